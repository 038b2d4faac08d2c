//! Llama, as `LlamaForCausalLM` of transformers computes it: a dense decoder with its own stretching of rotary positions from 3.1 on, and biases where a model has them.

use serde_json::{Map, Value};

use super::Family;
use super::blocks::{AttentionConfig, MlpConfig};
use super::dense::{self, DenseConfig};
use crate::config::fields::{Defaults, Fields};
use crate::config::{HIDDEN_SIZE_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope};
use crate::{Error, ModelConfig, Result};

/// As `LlamaConfig`.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    fields.require_silu()?;
    let defaults = Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        num_layers: 32,
        max_position_embeddings: 2048,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        tie_word_embeddings: false,
    };
    let (num_heads, num_kv_heads) = dense::heads(fields, 32, None)?;
    let hidden_size = fields.size("hidden_size", defaults.hidden_size, HIDDEN_SIZE_MAX)?;
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(Error::Config(format!("hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")));
    }
    let head_dim = dense::head_dim(fields, num_heads, defaults.hidden_size)?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: None,
        output_gate: false,
        sinks: false,
        windows: vec![None; fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?],
        rope: Rope::read(fields, head_dim, fields.context(defaults.max_position_embeddings)?)?,
    };
    let mlp = MlpConfig {
        intermediate_size: fields.size("intermediate_size", 11_008, INTERMEDIATE_SIZE_MAX)?,
        bias: fields.flag("mlp_bias", false)?,
    };
    fields.model(generation, &defaults, Family::Llama(DenseConfig { attention, mlp }))
}

/// The keys of `LlamaConfig` that are not every family's.
pub(super) fn write(c: &DenseConfig, map: &mut Map<String, Value>) {
    dense::write(c, "LlamaForCausalLM", map);
    map.insert("head_dim".into(), c.attention.head_dim.into());
    map.insert("attention_bias".into(), c.attention.o_bias.into());
    map.insert("mlp_bias".into(), c.mlp.bias.into());
}
