//! Public model shapes by name, for benchmarks and randomly initialised models.

use serde_json::{Map, Value, json};

use super::ModelConfig;

/// A model's `config.json` as it is published, as far as it makes the shape.
struct NamedShape {
    name: &'static str,
    config: fn() -> Value,
}

const SHAPES: [NamedShape; 14] = [
    // The Qwen3 technical report (arXiv:2505.09388), tables 1 and 2.
    NamedShape { name: "qwen3-0.6b", config: || qwen3(1024, 3072, 28, 16, true) },
    NamedShape { name: "qwen3-1.7b", config: || qwen3(2048, 6144, 28, 16, true) },
    NamedShape { name: "qwen3-4b", config: || qwen3(2560, 9728, 36, 32, true) },
    NamedShape { name: "qwen3-8b", config: || qwen3(4096, 12_288, 36, 32, false) },
    NamedShape { name: "qwen3-14b", config: || qwen3(5120, 17_408, 40, 40, false) },
    NamedShape { name: "qwen3-32b", config: || qwen3(5120, 25_600, 64, 64, false) },
    NamedShape { name: "qwen3-30b-a3b", config: qwen3_moe },
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
        Self::shape_with(name, json!({}))
    }

    /// As [`ModelConfig::named_shape`], with the first `num_layers` decoder layers only: a layer of a model that is too large for the machine.
    pub fn named_shape_of_layers(name: &str, num_layers: usize) -> Option<ModelConfig> {
        Self::shape_with(name, json!({ "num_hidden_layers": num_layers }))
    }

    fn shape_with(name: &str, changes: Value) -> Option<ModelConfig> {
        let shape = SHAPES.iter().find(|s| s.name == name)?;
        ModelConfig::from_json(&with((shape.config)(), changes).to_string(), None).ok()
    }

    /// The names that [`ModelConfig::named_shape`] knows, family by family, the smallest model of each first.
    pub fn named_shapes() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|s| s.name)
    }
}
