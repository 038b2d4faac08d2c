//! DeepSeek-V3, as `DeepseekV3ForCausalLM` of transformers computes it: attention over latents, MLPs in the first layers, and experts chosen by sigmoids beside shared
//! ones in the others. Layers that predict further tokens, which checkpoints hold behind the others, are left aside, as there.

use serde_json::{Map, Value};
use strata_tensor::{Backend, DType, ExpertActivation, Tape, Var};

use super::blocks::{MlpConfig, Pass};
use super::declaration::{Declaration, NormWeights, VectorId};
use super::decoder::{DecoderLayers, LayerBytes, Mixer};
use super::latent::{LatentConfig, LatentDefaults, MultiHeadLatentAttention};
use super::moe::{MlpOrMoe, MoeConfig, MoeLayout, Router, SigmoidRouter};
use super::{Family, FamilyConfig};
use crate::config::fields::{Defaults, Fields, check_size, unsupported};
use crate::config::{EXPERTS_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope, short};
use crate::kv_cache::LayerAccess;
use crate::{ModelConfig, Result};

/// What a DeepSeek-V3 model has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepseekV3Config {
    /// Attention of every layer.
    pub attention: LatentConfig,
    /// The MLP of layers without experts.
    pub mlp: MlpConfig,
    /// The experts of the others.
    pub moe: MoeConfig,
    /// Whether each layer has experts.
    pub sparse: Vec<bool>,
    /// `num_nextn_predict_layers`: layers behind the others of a checkpoint, which are not computed.
    pub further_layers: usize,
}

/// Sizes of experts that a family takes where a file has none.
pub(super) struct ExpertDefaults {
    pub num_experts: usize,
    pub experts_per_token: usize,
    pub intermediate_size: usize,
    pub num_groups: usize,
    pub top_groups: usize,
    pub scaling_factor: f64,
}

impl FamilyConfig for DeepseekV3Config {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        check_size("intermediate_size", self.mlp.intermediate_size as u64, INTERMEDIATE_SIZE_MAX)?;
        self.attention.validate()?;
        MlpOrMoe::validate(&self.sparse, model)?;
        self.moe.validate(model.num_layers)
    }

    fn left_aside(&self, model: &ModelConfig) -> Vec<String> {
        let further = model.num_layers..model.num_layers + self.further_layers;
        further.map(|number| format!("model.layers.{number}.")).collect()
    }

    fn rope(&self) -> &Rope {
        &self.attention.rope
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        Box::new(DeepseekV3Layers::declare(d, model, self))
    }

    fn active_experts(&self) -> usize {
        self.moe.experts_per_token
    }
}

/// As `DeepseekV3Config` of transformers.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let defaults = Defaults {
        vocab_size: 129_280,
        hidden_size: 7168,
        num_layers: 61,
        max_position_embeddings: 4096,
        bos_token_id: Some(0),
        eos_token_id: Some(1),
        tie_word_embeddings: false,
    };
    let num_layers = fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    let attention = LatentDefaults { num_heads: 128, query_latent: 1536, nope_dim: 128, value_dim: 128 };
    let experts = ExpertDefaults {
        num_experts: 256,
        experts_per_token: 8,
        intermediate_size: 2048,
        num_groups: 8,
        top_groups: 4,
        scaling_factor: 2.5,
    };
    let first_sparse = fields.count("first_k_dense_replace", 3, NUM_LAYERS_MAX)?;
    let sparse = (0..num_layers).map(|l| l >= first_sparse).collect();
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 18_432, INTERMEDIATE_SIZE_MAX)?, bias: false };
    let attention = LatentConfig::read(fields, &attention, fields.context(defaults.max_position_embeddings)?)?;
    let config = read_with(fields, attention, mlp, &experts, sparse)?;
    fields.model(generation, &defaults, Family::DeepseekV3(config))
}

/// The keys of experts, and what goes with them.
pub(super) fn read_with(
    fields: &Fields<'_>,
    attention: LatentConfig,
    mlp: MlpConfig,
    defaults: &ExpertDefaults,
    sparse: Vec<bool>,
) -> Result<DeepseekV3Config> {
    fields.require_silu()?;
    // What transformers computes whatever these say; a model that says otherwise is another.
    let fixed: [(&str, Value); 3] =
        [("scoring_func", "sigmoid".into()), ("topk_method", "noaux_tc".into()), ("moe_layer_freq", 1.into())];
    for (key, only) in fixed {
        if let Some(value) = fields.get(key).filter(|value| **value != only) {
            return Err(unsupported(key, value, &only.to_string()));
        }
    }
    let experts_key = fields.one_of("n_routed_experts", "num_local_experts")?;
    let intermediate_size = fields.size("moe_intermediate_size", defaults.intermediate_size, INTERMEDIATE_SIZE_MAX)?;
    let moe = MoeConfig {
        num_experts: fields.size(experts_key, defaults.num_experts, EXPERTS_MAX)?,
        experts_per_token: fields.size("num_experts_per_tok", defaults.experts_per_token, EXPERTS_MAX)?,
        intermediate_size,
        router: Router::Sigmoid(SigmoidRouter {
            num_groups: fields.size("n_group", defaults.num_groups, EXPERTS_MAX)?,
            top_groups: fields.size("topk_group", defaults.top_groups, EXPERTS_MAX)?,
            normalize: fields.flag("norm_topk_prob", true)?,
            scaling_factor: fields.number("routed_scaling_factor", defaults.scaling_factor)? as f32,
        }),
        shared_size: Some(fields.size("n_shared_experts", 1, EXPERTS_MAX)? * intermediate_size),
        shared_gate: false,
        activation: ExpertActivation::SwiGlu,
        layout: MoeLayout::PerExpert,
    };
    let further_key = if fields.has("num_mtp_layers") { "num_mtp_layers" } else { "num_nextn_predict_layers" };
    let further_layers = fields.count(further_key, 1, NUM_LAYERS_MAX)?;
    Ok(DeepseekV3Config { attention, mlp, moe, sparse, further_layers })
}

/// The keys of `DeepseekV3Config` that are not every family's.
pub(super) fn write(c: &DeepseekV3Config, map: &mut Map<String, Value>) {
    write_with(c, "DeepseekV3ForCausalLM", map);
    // Whatever is sparse follows on whatever is not.
    map.insert("first_k_dense_replace".into(), c.sparse.iter().filter(|sparse| !**sparse).count().into());
}

/// The keys that [`read_with`] reads, and those of attention.
pub(super) fn write_with(c: &DeepseekV3Config, class: &str, map: &mut Map<String, Value>) {
    c.attention.write(map);
    map.insert("architectures".into(), [class].as_slice().into());
    map.insert("intermediate_size".into(), c.mlp.intermediate_size.into());
    map.insert("n_routed_experts".into(), c.moe.num_experts.into());
    map.insert("num_experts_per_tok".into(), c.moe.experts_per_token.into());
    map.insert("moe_intermediate_size".into(), c.moe.intermediate_size.into());
    if let Some(size) = c.moe.shared_size {
        map.insert("n_shared_experts".into(), (size / c.moe.intermediate_size).into());
    }
    if let Router::Sigmoid(router) = &c.moe.router {
        map.insert("n_group".into(), router.num_groups.into());
        map.insert("topk_group".into(), router.top_groups.into());
        map.insert("norm_topk_prob".into(), router.normalize.into());
        map.insert("routed_scaling_factor".into(), short(router.scaling_factor));
    }
    map.insert("num_nextn_predict_layers".into(), c.further_layers.into());
}

/// The decoder layers. Attention is one stack, and MLPs and experts are two.
pub(super) struct DeepseekV3Layers {
    input_layernorm: VectorId,
    attention: MultiHeadLatentAttention,
    post_attention_layernorm: VectorId,
    mlp: MlpOrMoe,
}

impl DeepseekV3Layers {
    pub(super) fn declare(d: &mut Declaration, model: &ModelConfig, c: &DeepseekV3Config) -> Self {
        let (hidden, layers) = (model.hidden_size, (0..model.num_layers).collect::<Vec<_>>());
        DeepseekV3Layers {
            input_layernorm: d.norm("input_layernorm", &layers, hidden, NormWeights::Plain),
            attention: MultiHeadLatentAttention::declare(d, &c.attention, hidden, &layers),
            post_attention_layernorm: d.norm("post_attention_layernorm", &layers, hidden, NormWeights::Plain),
            mlp: MlpOrMoe::declare(d, &c.mlp, &c.moe, &c.sparse, hidden),
        }
    }
}

impl DecoderLayers for DeepseekV3Layers {
    fn mix<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        x: &Var,
        past: LayerAccess<'_>,
    ) -> strata_tensor::Result<Var> {
        let h = pass.norm(tape, x, self.input_layernorm, l)?;
        self.attention.forward(pass, tape, l, x, &h, past.pages())
    }

    fn transform<'a>(&self, pass: &Pass<'a>, tape: &mut Tape<'a>, l: usize, x: &Var) -> strata_tensor::Result<Var> {
        let h = pass.norm(tape, x, self.post_attention_layernorm, l)?;
        self.mlp.forward(pass, tape, l, x, &h)
    }

    fn mixer(&self, _: usize) -> Mixer {
        Mixer::Attention(self.attention.geometry())
    }

    fn experts_bytes_per_token(&self) -> usize {
        self.mlp.kept_bytes_per_token()
    }

    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes {
        let attention = self.attention.token_bytes(backend, hidden, dtype);
        self.mlp.token_bytes(hidden, dtype).map(|mlp| attention.then(&mlp)).fold(LayerBytes::default(), LayerBytes::max)
    }
}
