//! Qwen3.5, as `Qwen3_5ForCausalLM` of transformers computes it: gated delta nets in three layers of four, attention with gated heads of which a quarter turns in the others. And
//! Qwen3.5-MoE, as `Qwen3_5MoeForCausalLM`: the same with experts in the place of the MLP, and one with a gate beside them.
//!
//! Published models are composites with a part that sees. Of those the part that reads and writes text is taken: `text_config` of `config.json`, and the parameters under
//! `model.language_model.`. Text alone turns all sections of a head by the same positions, so that `mrope_section` does not matter.

use serde_json::{Map, Value, json};
use strata_tensor::{Backend, DType, DeltaGeometry, ExpertActivation, Tape, Var};

use super::blocks::{Attention, AttentionConfig, GatedMlp, MlpConfig, MlpPaths, Pass};
use super::composite;
use super::declaration::{Declaration, NormWeights, VectorId};
use super::decoder::{DecoderLayers, LayerBytes, Mixer};
use super::delta_net::DeltaNet;
use super::dense;
use super::moe::{Moe, MoeConfig, MoeLayout, Router};
use super::{Family, FamilyConfig};
use crate::config::fields::{Defaults, Fields, check_size, unsupported};
use crate::config::{
    CONVOLUTION_TOKENS_MAX, EXPERTS_MAX, HEAD_DIM_MAX, INTERMEDIATE_SIZE_MAX, NUM_HEADS_MAX, NUM_LAYERS_MAX, Rope,
};
use crate::kv_cache::LayerAccess;
use crate::{Error, ModelConfig, Result};

/// What a Qwen3.5 model has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3_5Config {
    /// Attention of the layers that attend.
    pub attention: AttentionConfig,
    /// The gated delta nets of the others.
    pub delta: DeltaGeometry,
    /// Whether each layer attends.
    pub attends: Vec<bool>,
    /// What follows in every layer.
    pub mlp: Qwen3_5Mlp,
}

/// What follows attention, or what is in its place.
#[derive(Clone, Debug, PartialEq)]
pub enum Qwen3_5Mlp {
    /// An MLP: Qwen3.5.
    Dense(MlpConfig),
    /// Experts: Qwen3.5-MoE.
    Experts(MoeConfig),
}

impl Qwen3_5Config {
    pub(super) fn model_type(&self) -> &'static str {
        match self.mlp {
            Qwen3_5Mlp::Dense(_) => TEXT,
            Qwen3_5Mlp::Experts(_) => MOE_TEXT,
        }
    }
}

impl FamilyConfig for Qwen3_5Config {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        self.attention.validate(model)?;
        let g = &self.delta;
        let sizes = [
            ("linear_num_key_heads", g.k_heads, NUM_HEADS_MAX),
            ("linear_num_value_heads", g.v_heads, NUM_HEADS_MAX),
            ("linear_key_head_dim", g.k_dim, HEAD_DIM_MAX),
            ("linear_value_head_dim", g.v_dim, HEAD_DIM_MAX),
            ("linear_conv_kernel_dim", g.kernel, CONVOLUTION_TOKENS_MAX),
        ];
        for (key, size, max) in sizes {
            check_size(key, size as u64, max)?;
        }
        if !g.v_heads.is_multiple_of(g.k_heads) {
            let (values, keys) = (g.v_heads, g.k_heads);
            return Err(Error::Config(format!(
                "linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
            )));
        }
        if self.attends.len() != model.num_layers {
            let (known, layers) = (self.attends.len(), model.num_layers);
            return Err(Error::Config(format!("of {known} layers is known whether they attend, of {layers}")));
        }
        match &self.mlp {
            Qwen3_5Mlp::Dense(mlp) => {
                check_size("intermediate_size", mlp.intermediate_size as u64, INTERMEDIATE_SIZE_MAX).map(|_| ())
            }
            Qwen3_5Mlp::Experts(moe) => moe.validate(model.num_layers),
        }
    }

    fn rope(&self) -> &Rope {
        &self.attention.rope
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        Box::new(Qwen3_5Layers::declare(d, model, self))
    }

    fn active_experts(&self) -> usize {
        match &self.mlp {
            Qwen3_5Mlp::Dense(_) => 0,
            Qwen3_5Mlp::Experts(moe) => moe.experts_per_token,
        }
    }

    fn left_aside(&self, _: &ModelConfig) -> Vec<String> {
        [composite::VISION_PREFIX, "mtp."].map(String::from).into()
    }

    fn norm_weights(&self) -> NormWeights {
        NormWeights::ZeroCentred
    }

    fn part_of_composite(&self) -> Option<&'static str> {
        Some(composite::TEXT_PREFIX)
    }
}

const TEXT: &str = "qwen3_5_text";
const MOE_TEXT: &str = "qwen3_5_moe_text";

const DEFAULTS: Defaults = Defaults {
    vocab_size: 248_320,
    hidden_size: 4096,
    num_layers: 32,
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    tie_word_embeddings: false,
};
const MOE_DEFAULTS: Defaults = Defaults { hidden_size: 2048, num_layers: 40, ..DEFAULTS };

/// As `Qwen3_5TextConfig`.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let intermediate_size = fields.size("intermediate_size", 12_288, INTERMEDIATE_SIZE_MAX)?;
    let mlp = Qwen3_5Mlp::Dense(MlpConfig { intermediate_size, bias: false });
    read_with(fields, generation, &DEFAULTS, 4, mlp)
}

/// As `Qwen3_5MoeTextConfig`.
pub(super) fn read_moe(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let moe = MoeConfig {
        num_experts: fields.size("num_experts", 256, EXPERTS_MAX)?,
        experts_per_token: fields.size("num_experts_per_tok", 8, EXPERTS_MAX)?,
        intermediate_size: fields.size("moe_intermediate_size", 512, INTERMEDIATE_SIZE_MAX)?,
        // Always divided by their sum: there is no key for it.
        router: Router::Softmax { normalize: true },
        shared_size: Some(fields.size("shared_expert_intermediate_size", 512, INTERMEDIATE_SIZE_MAX)?),
        shared_gate: true,
        activation: ExpertActivation::SwiGlu,
        layout: MoeLayout::PerExpert,
    };
    read_with(fields, generation, &MOE_DEFAULTS, 2, Qwen3_5Mlp::Experts(moe))
}

/// As `Qwen3_5Config`, of which the part that reads and writes text.
pub(super) fn read_composite(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    read(&Fields { map: &composite::text_of(fields, TEXT)? }, generation)
}

/// As `Qwen3_5MoeConfig`, of which the part that reads and writes text.
pub(super) fn read_moe_composite(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    read_moe(&Fields { map: &composite::text_of(fields, MOE_TEXT)? }, generation)
}

/// What both have.
fn read_with(
    fields: &Fields<'_>,
    generation: Option<&Fields<'_>>,
    defaults: &Defaults,
    default_kv_heads: usize,
    mlp: Qwen3_5Mlp,
) -> Result<ModelConfig> {
    fields.require_silu()?;
    let num_layers = fields.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    let (num_heads, num_kv_heads) = dense::heads(fields, 16, Some(default_kv_heads))?;
    let head_dim = fields.size("head_dim", 256, HEAD_DIM_MAX)?;
    let bias = fields.flag("attention_bias", false)?;
    let mut with_default = fields.map.clone();
    with_default.entry("partial_rotary_factor").or_insert(0.25.into());
    let context = fields.context(defaults.max_position_embeddings)?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(NormWeights::ZeroCentred),
        output_gate: true,
        sinks: false,
        windows: vec![None; num_layers],
        rope: Rope::read(&Fields { map: &with_default }, head_dim, context)?,
    };
    let delta = DeltaGeometry {
        k_heads: fields.size("linear_num_key_heads", 16, NUM_HEADS_MAX)?,
        v_heads: fields.size("linear_num_value_heads", 32, NUM_HEADS_MAX)?,
        k_dim: fields.size("linear_key_head_dim", 128, HEAD_DIM_MAX)?,
        v_dim: fields.size("linear_value_head_dim", 128, HEAD_DIM_MAX)?,
        kernel: fields.size("linear_conv_kernel_dim", 4, CONVOLUTION_TOKENS_MAX)?,
    };
    let attends = attends(fields, num_layers)?;
    fields.model(generation, defaults, Family::Qwen3_5(Qwen3_5Config { attention, delta, attends, mlp }))
}

/// Which layers attend: those that `layer_types` says; without it, every fourth, or of what `full_attention_interval` says the last.
fn attends(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>> {
    let Some(types) = fields.names("layer_types")? else {
        let interval = fields.size("full_attention_interval", 4, NUM_LAYERS_MAX)?;
        return Ok((1..=num_layers).map(|l| l.is_multiple_of(interval)).collect());
    };
    if types.len() != num_layers {
        let found = types.len();
        return Err(Error::Config(format!("layer_types has {found} entries for num_hidden_layers {num_layers}")));
    }
    let of_type = |(layer, name): (usize, &&str)| match *name {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => Err(unsupported(&format!("layer_types[{layer}]"), &other.into(), "\"full_attention\", \"linear_attention\"")),
    };
    types.iter().enumerate().map(of_type).collect()
}

/// The keys of `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` that are not every family's.
pub(super) fn write(c: &Qwen3_5Config, map: &mut Map<String, Value>) {
    let (a, g) = (&c.attention, &c.delta);
    let mut set = |key: &str, value: Value| map.insert(key.into(), value);
    set("attention_bias", a.o_bias.into());
    set("attention_dropout", 0.0.into());
    set("head_dim", a.head_dim.into());
    let of_type = |attends: &bool| if *attends { "full_attention" } else { "linear_attention" };
    set("layer_types", c.attends.iter().map(of_type).collect::<Vec<_>>().into());
    set("linear_conv_kernel_dim", g.kernel.into());
    set("linear_key_head_dim", g.k_dim.into());
    set("linear_num_key_heads", g.k_heads.into());
    set("linear_num_value_heads", g.v_heads.into());
    set("linear_value_head_dim", g.v_dim.into());
    set("num_attention_heads", a.num_heads.into());
    set("num_key_value_heads", a.num_kv_heads.into());
    let mut rope = a.rope.to_json(a.head_dim);
    // Without it a quarter turns.
    rope.as_object_mut().expect("a rope is an object").entry("partial_rotary_factor").or_insert(json!(1.0));
    set("rope_parameters", rope);
    match &c.mlp {
        Qwen3_5Mlp::Dense(mlp) => {
            set("architectures", json!(["Qwen3_5ForCausalLM"]));
            set("intermediate_size", mlp.intermediate_size.into());
        }
        Qwen3_5Mlp::Experts(moe) => {
            set("architectures", json!(["Qwen3_5MoeForCausalLM"]));
            set("moe_intermediate_size", moe.intermediate_size.into());
            set("num_experts", moe.num_experts.into());
            set("num_experts_per_tok", moe.experts_per_token.into());
            set("shared_expert_intermediate_size", moe.shared_size.into());
        }
    }
}

/// The decoder layers: RMSNorm, attention or a gated delta net, a residual addition, RMSNorm, an MLP or experts, and another addition. Attention and gated delta nets are a
/// stack each, and a schedule says which layer has which.
pub(super) struct Qwen3_5Layers {
    input_layernorm: VectorId,
    attention: Option<Attention>,
    delta_net: Option<DeltaNet>,
    /// Of each layer its place in the stack that it is in.
    places: Vec<usize>,
    attends: Vec<bool>,
    post_attention_layernorm: VectorId,
    mlp: Mlp,
}

enum Mlp {
    Dense(GatedMlp),
    Experts(Moe),
}

impl Qwen3_5Layers {
    pub(super) fn declare(d: &mut Declaration, model: &ModelConfig, c: &Qwen3_5Config) -> Self {
        let (hidden, eps, norms) = (model.hidden_size, model.rms_norm_eps, NormWeights::ZeroCentred);
        let layers: Vec<usize> = (0..model.num_layers).collect();
        let (with, without): (Vec<usize>, Vec<usize>) = layers.iter().partition(|&&l| c.attends[l]);
        let place = |l: usize| if c.attends[l] { &with } else { &without }.partition_point(|&other| other < l);
        Qwen3_5Layers {
            input_layernorm: d.norm("input_layernorm", &layers, hidden, norms),
            attention: (!with.is_empty()).then(|| Attention::declare(d, &c.attention, hidden, eps, &with)),
            delta_net: (!without.is_empty()).then(|| DeltaNet::declare(d, &c.delta, hidden, &without)),
            places: layers.iter().map(|&l| place(l)).collect(),
            attends: c.attends.clone(),
            post_attention_layernorm: d.norm("post_attention_layernorm", &layers, hidden, norms),
            mlp: match &c.mlp {
                Qwen3_5Mlp::Dense(mlp) => Mlp::Dense(GatedMlp::declare(d, &MlpPaths::MLP, mlp, hidden, &layers)),
                Qwen3_5Mlp::Experts(moe) => Mlp::Experts(Moe::declare(d, moe, hidden, &layers)),
            },
        }
    }
}

impl DecoderLayers for Qwen3_5Layers {
    fn mix<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        x: &Var,
        past: LayerAccess<'_>,
    ) -> strata_tensor::Result<Var> {
        let (h, place) = (pass.norm(tape, x, self.input_layernorm, l)?, self.places[l]);
        match (&self.attention, &self.delta_net) {
            (Some(attention), _) if self.attends[l] => attention.forward(pass, tape, place, x, &h, past.pages()),
            (_, Some(net)) => net.forward(pass, tape, place, x, &h, past.states()),
            (_, None) => unreachable!("a layer has a stack that it is in"),
        }
    }

    fn transform<'a>(&self, pass: &Pass<'a>, tape: &mut Tape<'a>, l: usize, x: &Var) -> strata_tensor::Result<Var> {
        let h = pass.norm(tape, x, self.post_attention_layernorm, l)?;
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.forward(pass, tape, l, x, &h),
            Mlp::Experts(moe) => moe.forward(pass, tape, l, x, &h),
        }
    }

    fn mixer(&self, l: usize) -> Mixer {
        match (&self.attention, &self.delta_net) {
            (Some(attention), _) if self.attends[l] => Mixer::Attention(attention.geometry(self.places[l])),
            (_, Some(net)) => Mixer::DeltaNet(net.geometry()),
            (_, None) => unreachable!("a layer has a stack that it is in"),
        }
    }

    fn experts_bytes_per_token(&self) -> usize {
        match &self.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(moe) => moe.kept_bytes_per_token(),
        }
    }

    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes {
        let mlp = match &self.mlp {
            Mlp::Dense(mlp) => mlp.token_bytes(hidden, dtype),
            Mlp::Experts(moe) => moe.token_bytes(hidden, dtype),
        };
        let attention = self.attention.as_ref().map(|attention| attention.token_bytes(backend, hidden, dtype));
        let delta_net = self.delta_net.as_ref().map(|net| net.token_bytes(backend, hidden, dtype));
        attention.into_iter().chain(delta_net).map(|mixer| mixer.then(&mlp)).fold(LayerBytes::default(), LayerBytes::max)
    }
}
