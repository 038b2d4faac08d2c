//! Qwen3, as `Qwen3ForCausalLM` of transformers computes it: a dense decoder whose queries and keys have a norm for each head.

use serde_json::{Map, Value};

use super::Family;
use super::blocks::{AttentionConfig, MlpConfig};
use super::declaration::NormWeights;
use super::dense::{self, DenseConfig};
use crate::config::fields::{Defaults, Fields};
use crate::config::{HEAD_DIM_MAX, INTERMEDIATE_SIZE_MAX, Rope};
use crate::{ModelConfig, Result};

/// As `Qwen3Config`.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    fields.require_silu()?;
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 4096,
        num_layers: 32,
        max_position_embeddings: 32_768,
        bos_token_id: None,
        eos_token_id: None,
        tie_word_embeddings: false,
    };
    let (num_heads, num_kv_heads) = dense::heads(fields, 32, Some(32))?;
    let head_dim = fields.size("head_dim", 128, HEAD_DIM_MAX)?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(NormWeights::Plain),
        output_gate: false,
        sinks: false,
        windows: dense::windows(fields, 32)?,
        rope: Rope::read(fields, head_dim, fields.context(32_768)?)?,
    };
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 22_016, INTERMEDIATE_SIZE_MAX)?, bias: false };
    fields.model(generation, &defaults, Family::Qwen3(DenseConfig { attention, mlp }))
}

/// The keys of `Qwen3Config` that are not every family's.
pub(super) fn write(c: &DenseConfig, map: &mut Map<String, Value>) {
    dense::write(c, "Qwen3ForCausalLM", map);
    dense::write_windows(c, map);
    map.insert("head_dim".into(), c.attention.head_dim.into());
    map.insert("attention_bias".into(), c.attention.o_bias.into());
}
