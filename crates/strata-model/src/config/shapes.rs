//! Public model shapes by name, for benchmarks and randomly initialised models.

use serde_json::{Map, Value, json};

use super::ModelConfig;

/// A model's `config.json` as it is published, as far as it makes the shape.
struct NamedShape {
    name: &'static str,
    config: fn() -> Value,
}

const SHAPES: [NamedShape; 21] = [
    // The Qwen3 technical report (arXiv:2505.09388), tables 1 and 2.
    NamedShape { name: "qwen3-0.6b", config: || qwen3(1024, 3072, 28, 16, true) },
    NamedShape { name: "qwen3-1.7b", config: || qwen3(2048, 6144, 28, 16, true) },
    NamedShape { name: "qwen3-4b", config: || qwen3(2560, 9728, 36, 32, true) },
    NamedShape { name: "qwen3-8b", config: || qwen3(4096, 12_288, 36, 32, false) },
    NamedShape { name: "qwen3-14b", config: || qwen3(5120, 17_408, 40, 40, false) },
    NamedShape { name: "qwen3-32b", config: || qwen3(5120, 25_600, 64, 64, false) },
    NamedShape { name: "qwen3-30b-a3b", config: qwen3_moe },
    // Qwen3-VL, as published.
    NamedShape { name: "qwen3-vl-8b", config: qwen3_vl },
    NamedShape { name: "qwen3-vl-30b-a3b", config: qwen3_vl_moe },
    // Qwen3.5, as its configuration classes in transformers have it.
    NamedShape { name: "qwen3.5-9b", config: || qwen3_5("qwen3_5_text") },
    NamedShape { name: "qwen3.5-35b-a3b", config: || qwen3_5("qwen3_5_moe_text") },
    // Qwen2.5 (arXiv:2412.15115), table 1.
    NamedShape { name: "qwen2.5-0.5b", config: || qwen2([896, 4864, 24, 14, 2], 151_936, true) },
    NamedShape { name: "qwen2.5-1.5b", config: || qwen2([1536, 8960, 28, 12, 2], 151_936, true) },
    NamedShape { name: "qwen2.5-7b", config: || qwen2([3584, 18_944, 28, 28, 4], 152_064, false) },
    // Llama 3 (arXiv:2407.21783), table 3, and the smaller ones of 3.2.
    NamedShape { name: "llama-3.2-1b", config: || llama3([2048, 8192, 16, 32], 64, 32.0, true) },
    NamedShape { name: "llama-3.2-3b", config: || llama3([3072, 8192, 28, 24], 128, 32.0, true) },
    NamedShape { name: "llama-3.1-8b", config: || llama3([4096, 14_336, 32, 32], 128, 8.0, false) },
    // Mistral 7B (arXiv:2310.06825), v0.3.
    NamedShape { name: "mistral-7b", config: mistral },
    // DeepSeek-V3 (arXiv:2412.19437), section 4.2; GLM-4.7-Flash and gpt-oss (arXiv:2508.10925) as published.
    NamedShape { name: "deepseek-v3", config: deepseek_v3 },
    NamedShape { name: "glm-4.7-flash", config: glm_4_7_flash },
    NamedShape { name: "gpt-oss-20b", config: gpt_oss },
];

/// What all Qwen3 models have.
fn qwen3_common() -> Value {
    json!({
        "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40_960,
        "bos_token_id": 151_643, "eos_token_id": [151_645, 151_643], "dtype": "bfloat16"
    })
}

fn qwen3(hidden: usize, mlp: usize, layers: usize, heads: usize, tied: bool) -> Value {
    with(
        qwen3_common(),
        json!({
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": heads, "tie_word_embeddings": tied
        }),
    )
}

fn qwen3_moe() -> Value {
    with(
        qwen3_common(),
        json!({
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true
        }),
    )
}

fn qwen3_vl() -> Value {
    let text = json!({
        "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8
    });
    qwen3_vl_of("qwen3_vl", text)
}

fn qwen3_vl_moe() -> Value {
    let text = json!({
        "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": true
    });
    qwen3_vl_of("qwen3_vl_moe", text)
}

/// What both have.
fn qwen3_vl_of(model_type: &str, text: Value) -> Value {
    let common = json!({
        "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 262_144, "bos_token_id": 151_643,
        "eos_token_id": 151_645, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": true
        }
    });
    json!({
        "model_type": model_type, "image_token_id": 151_655, "tie_word_embeddings": false,
        "vision_config": {
            "model_type": model_type, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [8, 16, 24]
        },
        "text_config": with(common, text)
    })
}

fn qwen3_5(model_type: &str) -> Value {
    json!({ "model_type": model_type, "rope_theta": 1e7, "max_position_embeddings": 262_144, "dtype": "bfloat16" })
}

fn qwen2([hidden, mlp, layers, heads, kv_heads]: [usize; 5], vocab: usize, tied: bool) -> Value {
    json!({
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 1e6, "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied, "bos_token_id": 151_643, "eos_token_id": [151_645, 151_643], "dtype": "bfloat16"
    })
}

fn llama3([hidden, mlp, layers, heads]: [usize; 4], head_dim: usize, factor: f64, tied: bool) -> Value {
    json!({
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        },
        "max_position_embeddings": 131_072, "tie_word_embeddings": tied, "bos_token_id": 128_000, "eos_token_id": 128_001,
        "dtype": "bfloat16"
    })
}

fn mistral() -> Value {
    json!({
        "model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32_768,
        "sliding_window": null, "dtype": "bfloat16"
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 0, "rope_theta": 10_000, "max_position_embeddings": 163_840,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0
        },
        "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16"
    })
}

fn glm_4_7_flash() -> Value {
    json!({
        "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "vocab_size": 154_880, "hidden_size": 2048,
        "intermediate_size": 10_240, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000,
        "max_position_embeddings": 202_752, "dtype": "bfloat16", "bos_token_id": null, "eos_token_id": null
    })
}

fn gpt_oss() -> Value {
    json!({
        "model_type": "gpt_oss", "num_hidden_layers": 24, "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "attention_bias": true,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096
        },
        "bos_token_id": 199_998, "eos_token_id": 200_002, "dtype": "bfloat16"
    })
}

/// An object with the keys of another.
fn with(mut object: Value, more: Value) -> Value {
    let keys = |value: Value| value.as_object().cloned().unwrap_or_default();
    let more: Map<String, Value> = keys(more);
    object.as_object_mut().expect("shapes are objects").extend(more);
    object
}

impl ModelConfig {
    /// The configuration of a public model by its short name, such as `qwen3-0.6b`. `None`: no such name.
    pub fn named_shape(name: &str) -> Option<ModelConfig> {
        let shape = SHAPES.iter().find(|s| s.name == name)?;
        ModelConfig::from_json(&(shape.config)().to_string(), None).ok()
    }

    /// As [`ModelConfig::named_shape`], with the first `num_layers` decoder layers only: a layer of a model that is too large for the machine.
    pub fn named_shape_of_layers(name: &str, num_layers: usize) -> Option<ModelConfig> {
        let shape = SHAPES.iter().find(|s| s.name == name)?;
        let mut config = (shape.config)();
        // The layers that are told what the tower has seen are the first.
        if let Some(deepstack) = config.pointer_mut("/vision_config/deepstack_visual_indexes").and_then(Value::as_array_mut) {
            deepstack.truncate(num_layers);
        }
        let of_text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
        of_text["num_hidden_layers"] = num_layers.into();
        ModelConfig::from_json(&config.to_string(), None).ok()
    }

    /// The names that [`ModelConfig::named_shape`] knows, family by family, the smallest model of each first.
    pub fn named_shapes() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|s| s.name)
    }
}
