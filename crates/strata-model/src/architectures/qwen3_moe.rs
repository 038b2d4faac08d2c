//! Qwen3-MoE, as `Qwen3MoeForCausalLM` of transformers computes it: Qwen3 whose layers have experts in the place of the MLP, all of them or some.

use serde_json::{Map, Value};
use strata_tensor::{Backend, DType, ExpertActivation, Tape, Var};

use super::blocks::{Attention, AttentionConfig, MlpConfig, Pass};
use super::declaration::{Declaration, NormWeights, VectorId};
use super::decoder::{DecoderLayers, LayerBytes, Mixer};
use super::dense::{self, DenseConfig};
use super::moe::{MlpOrMoe, MoeConfig, MoeLayout, Router};
use super::{Family, FamilyConfig};
use crate::config::fields::{Defaults, Fields, wrong_kind};
use crate::config::{CONTEXT_TOKENS_MAX, EXPERTS_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope};
use crate::kv_cache::LayerAccess;
use crate::{ModelConfig, Result};

/// What a Qwen3-MoE model has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3MoeConfig {
    /// Attention of every layer, and the MLP of those without experts.
    pub dense: DenseConfig,
    /// The experts of the others.
    pub moe: MoeConfig,
    /// Whether each layer has experts.
    pub sparse: Vec<bool>,
}

impl FamilyConfig for Qwen3MoeConfig {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        self.dense.validate(model)?;
        MlpOrMoe::validate(&self.sparse, model)?;
        self.moe.validate(model.num_layers)
    }

    fn rope(&self) -> &Rope {
        &self.dense.attention.rope
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        Box::new(Qwen3MoeLayers::declare(d, model, self))
    }

    fn active_experts(&self) -> usize {
        self.moe.experts_per_token
    }
}

/// As `Qwen3MoeConfig` of transformers.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    fields.require_silu()?;
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        num_layers: 24,
        max_position_embeddings: 32_768,
        bos_token_id: None,
        eos_token_id: None,
        tie_word_embeddings: false,
    };
    let num_layers = fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    let (num_heads, num_kv_heads) = dense::heads(fields, 32, Some(4))?;
    let head_dim = dense::head_dim(fields, num_heads, defaults.hidden_size)?;
    let bias = fields.flag("attention_bias", false)?;
    // Here a window is every layer's.
    let window = match (fields.flag("use_sliding_window", false)?, fields.has("sliding_window")) {
        (false, _) => None,
        (true, false) => Some(4096),
        (true, true) => fields.optional_size("sliding_window", CONTEXT_TOKENS_MAX)?,
    };
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(NormWeights::Plain),
        output_gate: false,
        sinks: false,
        windows: vec![window; num_layers],
        rope: Rope::read(fields, head_dim, fields.context(defaults.max_position_embeddings)?)?,
    };
    let mlp = MlpConfig { intermediate_size: fields.size("intermediate_size", 6144, INTERMEDIATE_SIZE_MAX)?, bias: false };
    let experts_key = fields.one_of("num_experts", "num_local_experts")?;
    let moe = MoeConfig {
        num_experts: fields.size(experts_key, 128, EXPERTS_MAX)?,
        experts_per_token: fields.size("num_experts_per_tok", 8, EXPERTS_MAX)?,
        intermediate_size: fields.size("moe_intermediate_size", 768, INTERMEDIATE_SIZE_MAX)?,
        router: Router::Softmax { normalize: fields.flag("norm_topk_prob", false)? },
        shared_size: None,
        shared_gate: false,
        activation: ExpertActivation::SwiGlu,
        layout: MoeLayout::PerExpert,
    };
    let sparse = sparse_layers(fields, num_layers)?;
    let family = Family::Qwen3Moe(Qwen3MoeConfig { dense: DenseConfig { attention, mlp }, moe, sparse });
    fields.model(generation, &defaults, family)
}

/// Which layers have experts.
pub(super) fn sparse_layers(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>> {
    let step = fields.size("decoder_sparse_step", 1, NUM_LAYERS_MAX)?;
    let dense_layers = mlp_only_layers(fields)?;
    Ok((0..num_layers).map(|l| (l + 1).is_multiple_of(step) && !dense_layers.contains(&(l as u64))).collect())
}

fn mlp_only_layers(fields: &Fields<'_>) -> Result<Vec<u64>> {
    const KEY: &str = "mlp_only_layers";
    let Some(value) = fields.get(KEY) else { return Ok(Vec::new()) };
    let layers: Option<Vec<u64>> = value.as_array().and_then(|layers| layers.iter().map(Value::as_u64).collect());
    layers.ok_or_else(|| wrong_kind(KEY, value, "a list of layers"))
}

/// The keys of `Qwen3MoeConfig` that are not every family's.
pub(super) fn write(model: &ModelConfig, c: &Qwen3MoeConfig, map: &mut Map<String, Value>) {
    dense::write(&c.dense, "Qwen3MoeForCausalLM", map);
    dense::write_head_dim(model, &c.dense, map);
    let window = c.dense.attention.windows.first().copied().flatten();
    map.insert("use_sliding_window".into(), window.is_some().into());
    map.insert("sliding_window".into(), window.into());
    map.insert("attention_bias".into(), c.dense.attention.o_bias.into());
    map.insert("num_experts".into(), c.moe.num_experts.into());
    map.insert("num_experts_per_tok".into(), c.moe.experts_per_token.into());
    map.insert("moe_intermediate_size".into(), c.moe.intermediate_size.into());
    map.insert("norm_topk_prob".into(), matches!(c.moe.router, Router::Softmax { normalize: true }).into());
    map.insert("decoder_sparse_step".into(), 1.into());
    let dense_layers: Vec<usize> = (0..c.sparse.len()).filter(|&l| !c.sparse[l]).collect();
    map.insert("mlp_only_layers".into(), dense_layers.into());
}

/// The decoder layers: those of Qwen3, with experts in the place of the MLP where the schedule says so. Attention is one stack, and MLPs and experts are two.
pub(super) struct Qwen3MoeLayers {
    input_layernorm: VectorId,
    attention: Attention,
    post_attention_layernorm: VectorId,
    mlp: MlpOrMoe,
}

impl Qwen3MoeLayers {
    pub(super) fn declare(d: &mut Declaration, model: &ModelConfig, c: &Qwen3MoeConfig) -> Self {
        let (hidden, layers) = (model.hidden_size, (0..model.num_layers).collect::<Vec<_>>());
        Qwen3MoeLayers {
            input_layernorm: d.norm("input_layernorm", &layers, hidden, NormWeights::Plain),
            attention: Attention::declare(d, &c.dense.attention, hidden, model.rms_norm_eps, &layers),
            post_attention_layernorm: d.norm("post_attention_layernorm", &layers, hidden, NormWeights::Plain),
            mlp: MlpOrMoe::declare(d, &c.dense.mlp, &c.moe, &c.sparse, hidden),
        }
    }
}

impl DecoderLayers for Qwen3MoeLayers {
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

    fn mixer(&self, l: usize) -> Mixer {
        Mixer::Attention(self.attention.geometry(l))
    }

    fn experts_bytes_per_token(&self) -> usize {
        self.mlp.kept_bytes_per_token()
    }

    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes {
        let attention = self.attention.token_bytes(backend, hidden, dtype);
        self.mlp.token_bytes(hidden, dtype).map(|mlp| attention.then(&mlp)).fold(LayerBytes::default(), LayerBytes::max)
    }
}
