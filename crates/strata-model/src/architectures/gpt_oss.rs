//! gpt-oss, as `GptOssForCausalLM` of transformers computes it: attention whose heads have sinks, with a window in every second layer, and experts with biases and a clamped activation
//! (arXiv:2508.10925).

use serde_json::{Map, Value, json};
use strata_tensor::{Backend, DType, ExpertActivation, Tape, Var};

use super::blocks::{Attention, AttentionConfig, Pass};
use super::declaration::{Declaration, NormWeights, VectorId};
use super::decoder::{DecoderLayers, LayerBytes, Mixer};
use super::dense;
use super::moe::{Moe, MoeConfig, MoeLayout, Router};
use super::{Family, FamilyConfig};
use crate::config::fields::{Defaults, Fields, unsupported};
use crate::config::{CONTEXT_TOKENS_MAX, EXPERTS_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope, short};
use crate::kv_cache::LayerAccess;
use crate::{Error, ModelConfig, Result};

/// What a gpt-oss model has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOssConfig {
    /// Attention of every layer.
    pub attention: AttentionConfig,
    /// The experts of every layer.
    pub moe: MoeConfig,
}

impl FamilyConfig for GptOssConfig {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        self.attention.validate(model)?;
        self.moe.validate(model.num_layers)
    }

    fn rope(&self) -> &Rope {
        &self.attention.rope
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        Box::new(GptOssLayers::declare(d, model, self))
    }

    fn active_experts(&self) -> usize {
        self.moe.experts_per_token
    }
}

/// As `GptOssConfig` of transformers.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    fields.require_silu()?;
    // Which weights are in blocks the checkpoint's tensors say.
    if let Some(quantization) = fields.get("quantization_config")
        && quantization.get("quant_method") != Some(&"mxfp4".into())
    {
        return Err(unsupported("quantization_config", quantization, "quant_method \"mxfp4\", or none"));
    }
    let defaults = Defaults {
        vocab_size: 201_088,
        hidden_size: 2880,
        num_layers: 36,
        max_position_embeddings: 131_072,
        bos_token_id: None,
        eos_token_id: None,
        tie_word_embeddings: false,
    };
    let (num_heads, num_kv_heads) = dense::heads(fields, 64, Some(8))?;
    let head_dim = if fields.has("head_dim") { dense::head_dim(fields, num_heads, defaults.hidden_size)? } else { 64 };
    let bias = fields.flag("attention_bias", true)?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: None,
        output_gate: false,
        sinks: true,
        windows: windows(fields, defaults.num_layers)?,
        rope: rope(fields, head_dim, fields.context(defaults.max_position_embeddings)?)?,
    };
    let experts_key = fields.one_of("num_experts", "num_local_experts")?;
    let number = |key, default| Ok::<_, Error>(fields.number(key, default)? as f32);
    let moe = MoeConfig {
        num_experts: fields.size(experts_key, 128, EXPERTS_MAX)?,
        experts_per_token: fields.size("num_experts_per_tok", 4, EXPERTS_MAX)?,
        intermediate_size: fields.size("intermediate_size", 2880, INTERMEDIATE_SIZE_MAX)?,
        router: Router::Softmax { normalize: true },
        shared_size: None,
        shared_gate: false,
        activation: ExpertActivation::ClampedSwiGlu {
            alpha: number("swiglu_alpha", 1.702)?,
            limit: number("swiglu_limit", 7.0)?,
        },
        layout: MoeLayout::ByTurns,
    };
    let config = fields.model(generation, &defaults, Family::GptOss(GptOssConfig { attention, moe }))?;
    Ok(ModelConfig { rms_norm_eps: number("rms_norm_eps", 1e-5)?, ..config })
}

/// The windows that `layer_types` says; without it, one in every second layer, the first among them.
fn windows(fields: &Fields<'_>, default_layers: usize) -> Result<Vec<Option<usize>>> {
    let num_layers = fields.size("num_hidden_layers", default_layers, NUM_LAYERS_MAX)?;
    let window =
        if fields.has("sliding_window") { fields.optional_size("sliding_window", CONTEXT_TOKENS_MAX)? } else { Some(128) };
    let types = match fields.names("layer_types")? {
        Some(types) => types,
        None => (0..num_layers).map(|l| if l % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect(),
    };
    dense::windows_of_types(&types, num_layers, window, "a sliding_window")
}

/// Yarn with the settings of the published models, where a file says nothing.
fn rope(fields: &Fields<'_>, head_dim: usize, max_position_embeddings: usize) -> Result<Rope> {
    let mut map = fields.map.clone();
    map.entry("rope_theta").or_insert(150_000.0.into());
    if fields.get("rope_parameters").is_none() {
        let yarn = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096});
        map.insert("rope_parameters".into(), yarn);
    }
    Rope::read(&Fields { map: &map }, head_dim, max_position_embeddings)
}

/// The keys of `GptOssConfig` that are not every family's.
pub(super) fn write(c: &GptOssConfig, map: &mut Map<String, Value>) {
    let (a, moe) = (&c.attention, &c.moe);
    map.insert("architectures".into(), ["GptOssForCausalLM"].as_slice().into());
    map.insert("attention_bias".into(), a.o_bias.into());
    map.insert("attention_dropout".into(), 0.0.into());
    map.insert("head_dim".into(), a.head_dim.into());
    map.insert("intermediate_size".into(), moe.intermediate_size.into());
    dense::write_layer_types(&a.windows, map);
    map.insert("num_attention_heads".into(), a.num_heads.into());
    map.insert("num_experts_per_tok".into(), moe.experts_per_token.into());
    map.insert("num_key_value_heads".into(), a.num_kv_heads.into());
    map.insert("num_local_experts".into(), moe.num_experts.into());
    map.insert("rope_parameters".into(), a.rope.to_json(a.head_dim));
    if let ExpertActivation::ClampedSwiGlu { alpha, limit } = moe.activation {
        map.insert("swiglu_alpha".into(), short(alpha));
        map.insert("swiglu_limit".into(), short(limit));
    }
}

/// The decoder layers: RMSNorm, attention, a residual addition, RMSNorm, experts, and another addition. The residual stream is f32.
pub(super) struct GptOssLayers {
    input_layernorm: VectorId,
    attention: Attention,
    post_attention_layernorm: VectorId,
    moe: Moe,
}

impl GptOssLayers {
    pub(super) fn declare(d: &mut Declaration, model: &ModelConfig, c: &GptOssConfig) -> Self {
        let (hidden, layers) = (model.hidden_size, (0..model.num_layers).collect::<Vec<_>>());
        GptOssLayers {
            input_layernorm: d.norm("input_layernorm", &layers, hidden, NormWeights::Plain),
            attention: Attention::declare(d, &c.attention, hidden, model.rms_norm_eps, &layers),
            post_attention_layernorm: d.norm("post_attention_layernorm", &layers, hidden, NormWeights::Plain),
            moe: Moe::declare(d, &c.moe, hidden, &layers),
        }
    }
}

impl DecoderLayers for GptOssLayers {
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
        self.moe.forward(pass, tape, l, x, &h)
    }

    fn mixer(&self, l: usize) -> Mixer {
        Mixer::Attention(self.attention.geometry(l))
    }

    fn experts_bytes_per_token(&self) -> usize {
        self.moe.kept_bytes_per_token()
    }

    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes {
        let (attention, moe) = (self.attention.token_bytes(backend, hidden, dtype), self.moe.token_bytes(hidden, dtype));
        attention.then(&moe)
    }
}
