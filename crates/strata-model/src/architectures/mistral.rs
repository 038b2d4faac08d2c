//! Mistral, as `MistralForCausalLM` of transformers computes it: a dense decoder without biases, in which every layer may see a window of keys only. With `layer_types` it is a Ministral, whose layers
//! have a window or none each, whatever its `model_type`: so `AutoConfig` reads it.

use serde_json::{Map, Value};

use super::Family;
use super::blocks::{AttentionConfig, MlpConfig};
use super::dense::{self, DenseConfig};
use crate::config::fields::{Defaults, Fields};
use crate::config::{CONTEXT_TOKENS_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope};
use crate::{ModelConfig, Result};

/// As `MistralConfig` and `MinistralConfig`.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    fields.require_silu()?;
    let defaults = Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        num_layers: 32,
        max_position_embeddings: 131_072,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        tie_word_embeddings: false,
    };
    let (num_heads, num_kv_heads) = dense::heads(fields, 32, Some(8))?;
    let head_dim = dense::head_dim(fields, num_heads, defaults.hidden_size)?;
    let num_layers = fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    let window = match fields.has("sliding_window") {
        true => fields.optional_size("sliding_window", CONTEXT_TOKENS_MAX)?,
        false => Some(4096),
    };
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: false,
        o_bias: false,
        qk_norm: None,
        output_gate: false,
        sinks: false,
        windows: match fields.names("layer_types")? {
            Some(types) => dense::windows_of_types(&types, num_layers, window, "a sliding_window")?,
            None => vec![window; num_layers],
        },
        rope: Rope::read(fields, head_dim, fields.context(defaults.max_position_embeddings)?)?,
    };
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 14_336, INTERMEDIATE_SIZE_MAX)?, bias: false };
    fields.model(generation, &defaults, Family::Mistral(DenseConfig { attention, mlp }))
}

/// The keys of `MistralConfig` that are not every family's.
pub(super) fn write(c: &DenseConfig, map: &mut Map<String, Value>) {
    dense::write(c, "MistralForCausalLM", map);
    map.insert("head_dim".into(), c.attention.head_dim.into());
    let windows = &c.attention.windows;
    match windows.windows(2).all(|two| two[0] == two[1]) {
        true => drop(map.insert("sliding_window".into(), windows.first().copied().flatten().into())),
        false => dense::write_layer_types(windows, map),
    }
}
