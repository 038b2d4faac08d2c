//! Qwen2 and Qwen2.5, as `Qwen2ForCausalLM` of transformers computes them: a dense decoder with biases on queries, keys and values.

use serde_json::{Map, Value};

use super::Family;
use super::blocks::{AttentionConfig, MlpConfig};
use super::dense::{self, DenseConfig};
use crate::config::fields::{Defaults, Fields};
use crate::config::{INTERMEDIATE_SIZE_MAX, Rope};
use crate::{ModelConfig, Result};

/// As `Qwen2Config`.
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
    // The class declares no `head_dim`, but its attention takes one that is there.
    let head_dim = dense::head_dim(fields, num_heads, 4096)?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: true,
        o_bias: false,
        qk_norm: None,
        output_gate: false,
        sinks: false,
        windows: dense::windows(fields, 32)?,
        rope: Rope::read(fields, head_dim, fields.context(32_768)?)?,
    };
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 22_016, INTERMEDIATE_SIZE_MAX)?, bias: false };
    fields.model(generation, &defaults, Family::Qwen2(DenseConfig { attention, mlp }))
}

/// The keys of `Qwen2Config` that are not every family's.
pub(super) fn write(model: &ModelConfig, c: &DenseConfig, map: &mut Map<String, Value>) {
    dense::write(c, "Qwen2ForCausalLM", map);
    dense::write_windows(c, map);
    dense::write_head_dim(model, c, map);
}
