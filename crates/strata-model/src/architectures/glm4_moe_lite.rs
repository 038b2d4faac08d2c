//! GLM-4.7-Flash, as `Glm4MoeLiteForCausalLM` of transformers computes it: DeepSeek-V3 in other sizes, which says layer by layer where experts are.

use serde_json::{Map, Value};

use super::Family;
use super::blocks::MlpConfig;
use super::deepseek_v3::{self, DeepseekV3Config, ExpertDefaults};
use super::latent::{LatentConfig, LatentDefaults};
use crate::config::fields::{Defaults, Fields, unsupported};
use crate::config::{INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX};
use crate::{Error, ModelConfig, Result};

/// As `Glm4MoeLiteConfig` of transformers.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let defaults = Defaults {
        vocab_size: 154_880,
        hidden_size: 2048,
        num_layers: 47,
        max_position_embeddings: 202_752,
        bos_token_id: Some(0),
        eos_token_id: Some(1),
        tie_word_embeddings: false,
    };
    let attention = LatentDefaults { num_heads: 20, query_latent: 768, nope_dim: 192, value_dim: 256 };
    let experts = ExpertDefaults {
        num_experts: 64,
        experts_per_token: 4,
        intermediate_size: 1536,
        num_groups: 1,
        top_groups: 1,
        scaling_factor: 1.8,
    };
    let sparse = schedule(fields, fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?)?;
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 10_240, INTERMEDIATE_SIZE_MAX)?, bias: false };
    let attention = LatentConfig::read(fields, &attention, fields.context(defaults.max_position_embeddings)?)?;
    let config = deepseek_v3::read_with(fields, attention, mlp, &experts, sparse)?;
    let model = fields.model(generation, &defaults, Family::Glm4MoeLite(config))?;
    Ok(ModelConfig { rms_norm_eps: fields.number("rms_norm_eps", 1e-5)? as f32, ..model })
}

/// Whether each layer has experts: all but the first, if `mlp_layer_types` does not say otherwise.
fn schedule(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>> {
    let Some(types) = fields.names("mlp_layer_types")? else {
        // Files have this key too, and it is not what transformers goes by.
        if let Some(value) = fields.get("first_k_dense_replace").filter(|v| v.as_u64() != Some(1)) {
            return Err(unsupported("first_k_dense_replace", value, "1, or mlp_layer_types"));
        }
        return Ok((0..num_layers).map(|l| l > 0).collect());
    };
    if types.len() != num_layers {
        let found = types.len();
        return Err(Error::Config(format!("mlp_layer_types has {found} entries for num_hidden_layers {num_layers}")));
    }
    let of_type = |(layer, name): (usize, &&str)| match *name {
        "sparse" => Ok(true),
        "dense" => Ok(false),
        other => Err(unsupported(&format!("mlp_layer_types[{layer}]"), &other.into(), "\"sparse\", \"dense\"")),
    };
    types.iter().enumerate().map(of_type).collect()
}

/// The keys of `Glm4MoeLiteConfig` that are not every family's.
pub(super) fn write(c: &DeepseekV3Config, map: &mut Map<String, Value>) {
    deepseek_v3::write_with(c, "Glm4MoeLiteForCausalLM", map);
    let name = |sparse: &bool| if *sparse { "sparse" } else { "dense" };
    map.insert("mlp_layer_types".into(), c.sparse.iter().map(name).collect::<Vec<_>>().into());
}
