//! Public model shapes by name, for benchmarks and randomly initialised models.

use strata_tensor::DType;

use super::{ModelConfig, Rope, RopeScaling};
use crate::architectures::{AttentionConfig, DenseConfig, Family, MlpConfig};

struct NamedShape {
    name: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    tie_word_embeddings: bool,
}

/// The dense models of the Qwen3 technical report (arXiv:2505.09388), table 1, with the widths of their published configs.
const QWEN3: [NamedShape; 6] = [
    shape("qwen3-0.6b", 1024, 3072, 28, 16, true),
    shape("qwen3-1.7b", 2048, 6144, 28, 16, true),
    shape("qwen3-4b", 2560, 9728, 36, 32, true),
    shape("qwen3-8b", 4096, 12_288, 36, 32, false),
    shape("qwen3-14b", 5120, 17_408, 40, 40, false),
    shape("qwen3-32b", 5120, 25_600, 64, 64, false),
];

const fn shape(
    name: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    tie_word_embeddings: bool,
) -> NamedShape {
    NamedShape { name, hidden_size, intermediate_size, num_layers, num_heads, tie_word_embeddings }
}

/// GLM-4.7-Flash as published, with four of its 47 layers: one without experts and three with 64. All would take sixty gigabytes.
const GLM_4_7_FLASH: (&str, &str) = (
    "glm-4.7-flash-4l",
    r#"{
        "model_type": "glm4_moe_lite", "num_hidden_layers": 4, "vocab_size": 154880, "hidden_size": 2048,
        "intermediate_size": 10240, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000, "max_position_embeddings": 202752, "dtype": "bfloat16", "bos_token_id": null,
        "eos_token_id": null
    }"#,
);

impl ModelConfig {
    /// The configuration of a public model by its short name, such as `qwen3-0.6b`. `None`: no such name.
    pub fn named_shape(name: &str) -> Option<ModelConfig> {
        let (glm, json) = GLM_4_7_FLASH;
        if name == glm {
            return Some(ModelConfig::from_json(json, None).expect("the shape is a valid configuration"));
        }
        let shape = QWEN3.iter().find(|s| s.name == name)?;
        let head_dim = 128;
        let attention = AttentionConfig {
            num_heads: shape.num_heads,
            num_kv_heads: 8,
            head_dim,
            qkv_bias: false,
            o_bias: false,
            qk_norm: true,
            windows: vec![None; shape.num_layers],
            rope: Rope { theta: 1e6, rotary_dim: head_dim, scaling: RopeScaling::Default },
        };
        let mlp = MlpConfig { intermediate_size: shape.intermediate_size, bias: false };
        Some(ModelConfig {
            vocab_size: 151_936,
            hidden_size: shape.hidden_size,
            num_layers: shape.num_layers,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: shape.tie_word_embeddings,
            max_position_embeddings: 40_960,
            initializer_range: 0.02,
            bos_token_id: Some(151_643),
            eos_token_ids: vec![151_645, 151_643],
            dtype: Some(DType::BF16),
            family: Family::Qwen3(DenseConfig { attention, mlp }),
        })
    }

    /// The names that [`ModelConfig::named_shape`] knows, those of a family together and its smallest model first.
    pub fn named_shapes() -> impl Iterator<Item = &'static str> {
        QWEN3.iter().map(|s| s.name).chain([GLM_4_7_FLASH.0])
    }
}
