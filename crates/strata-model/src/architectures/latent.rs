//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), as `DeepseekV3Attention` of transformers computes it: each token leaves one latent and one rotated
//! key, and the keys and values of all heads are a linear layer's outputs of the latent, which is absorbed and never run.

use serde_json::{Map, Value};
use strata_tensor::{
    AttentionGeometry, AttentionSight, Backend, DType, KV_PAGE_TOKENS, KvAccess, KvValues, LatentAttention, LatentRotary,
    RotaryStyle, Sight, Tape, Var, attention_pages_bytes,
};

use super::blocks::{Pass, TokenBytes};
use super::declaration::{Declaration, MatrixId, NormWeights, VectorId};
use crate::config::fields::{Fields, check_size, unsupported};
use crate::config::{HEAD_DIM_MAX, HIDDEN_SIZE_MAX, NUM_HEADS_MAX, Rope, RopeScaling, Yarn};
use crate::lora::Part;
use crate::{Error, Result};

/// Epsilon of the norms of latents, whatever `rms_norm_eps` says: transformers makes them with that of the class.
const LATENT_EPS: f32 = 1e-6;

/// Attention over latents.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentConfig {
    /// Query heads.
    pub num_heads: usize,
    /// `q_lora_rank`: width of the latent that queries are made of; `None`: they are made of the residual stream.
    pub query_latent: Option<usize>,
    /// `kv_lora_rank`: width of the latent that keys and values are made of.
    pub latent: usize,
    /// `qk_nope_head_dim`: the part of a query and of a key that does not turn.
    pub nope_dim: usize,
    /// `qk_rope_head_dim`: the part that turns.
    pub rope_dim: usize,
    /// `v_head_dim`: width of a value.
    pub value_dim: usize,
    /// `attention_bias`: whether the projections of the residual stream to latents, and the output projection, have biases.
    pub bias: bool,
    /// `rope_interleave`: whether neighbours turn against each other rather than halves.
    pub interleaved: bool,
    /// Rotary positions.
    pub rope: Rope,
}

/// Sizes that a family takes where a file has none.
pub(super) struct LatentDefaults {
    pub num_heads: usize,
    pub query_latent: usize,
    pub nope_dim: usize,
    pub value_dim: usize,
}

impl LatentConfig {
    /// Reads the keys of attention.
    pub(super) fn read(fields: &Fields<'_>, defaults: &LatentDefaults, context: usize) -> Result<Self> {
        let num_heads = fields.size("num_attention_heads", defaults.num_heads, NUM_HEADS_MAX)?;
        if let Some(value) = fields.get("num_key_value_heads").filter(|v| v.as_u64() != Some(num_heads as u64)) {
            return Err(unsupported("num_key_value_heads", value, &format!("num_attention_heads, {num_heads}")));
        }
        let query_latent = match fields.is_null("q_lora_rank") {
            true => None,
            false => Some(fields.size("q_lora_rank", defaults.query_latent, HIDDEN_SIZE_MAX)?),
        };
        let rope_dim = fields.size("qk_rope_head_dim", 64, HEAD_DIM_MAX)?;
        // The part that turns goes by this name too.
        if let Some(value) = fields.get("head_dim").filter(|v| v.as_u64() != Some(rope_dim as u64)) {
            return Err(unsupported("head_dim", value, &format!("qk_rope_head_dim, {rope_dim}")));
        }
        let rope = Rope::read(fields, rope_dim, context)?;
        // Whatever the kind of rope, transformers multiplies scores by what this says; ropes but yarn's know nothing of it.
        const MSCALE: &str = "mscale_all_dim";
        let settings = ["rope_scaling", "rope_parameters"].into_iter().filter_map(|key| fields.get(key)?.get(MSCALE));
        let is_yarn = matches!(rope.scaling, RopeScaling::Yarn(_) | RopeScaling::Default);
        if let Some(value) = settings.into_iter().find(|value| !is_yarn && value.as_f64() != Some(0.0) && !value.is_null()) {
            return Err(unsupported(MSCALE, value, "it with rope_type \"yarn\" alone"));
        }
        Ok(LatentConfig {
            num_heads,
            query_latent,
            latent: fields.size("kv_lora_rank", 512, HEAD_DIM_MAX)?,
            nope_dim: fields.size("qk_nope_head_dim", defaults.nope_dim, HEAD_DIM_MAX)?,
            rope_dim,
            value_dim: fields.size("v_head_dim", defaults.value_dim, HEAD_DIM_MAX)?,
            bias: fields.flag("attention_bias", false)?,
            interleaved: fields.flag("rope_interleave", true)?,
            rope,
        })
    }

    /// Refuses sizes and combinations that no model can have.
    pub(super) fn validate(&self) -> Result<()> {
        let sizes = [
            ("num_attention_heads", self.num_heads, NUM_HEADS_MAX),
            ("q_lora_rank", self.query_latent.unwrap_or(1), HIDDEN_SIZE_MAX),
            ("kv_lora_rank", self.latent, HEAD_DIM_MAX),
            ("qk_nope_head_dim", self.nope_dim, HEAD_DIM_MAX),
            ("qk_rope_head_dim", self.rope_dim, HEAD_DIM_MAX),
            ("v_head_dim", self.value_dim, HEAD_DIM_MAX),
        ];
        for (key, size, max) in sizes {
            check_size(key, size as u64, max)?;
        }
        // A head's keys, as they are kept, are the latent and what turns.
        let (width, rope_dim) = (self.latent + self.rope_dim, self.rope_dim);
        if !width.is_multiple_of(2) || width > HEAD_DIM_MAX {
            let latent = self.latent;
            return Err(Error::Config(format!(
                "kv_lora_rank {latent} and qk_rope_head_dim {rope_dim} are {width} together; supported: even numbers up to {HEAD_DIM_MAX}"
            )));
        }
        if self.rope.rotary_dim != self.rope_dim {
            let (dim, rope_dim) = (self.rope.rotary_dim, self.rope_dim);
            return Err(Error::Config(format!(
                "rotary embeddings turn {dim} of the {rope_dim} elements of qk_rope_head_dim; supported: all"
            )));
        }
        self.rope.validate()
    }

    /// The keys that [`LatentConfig::read`] reads.
    pub(super) fn write(&self, map: &mut Map<String, Value>) {
        map.insert("num_attention_heads".into(), self.num_heads.into());
        map.insert("num_key_value_heads".into(), self.num_heads.into());
        map.insert("q_lora_rank".into(), self.query_latent.into());
        map.insert("kv_lora_rank".into(), self.latent.into());
        map.insert("qk_nope_head_dim".into(), self.nope_dim.into());
        map.insert("qk_rope_head_dim".into(), self.rope_dim.into());
        map.insert("v_head_dim".into(), self.value_dim.into());
        map.insert("attention_bias".into(), self.bias.into());
        map.insert("attention_dropout".into(), 0.0.into());
        map.insert("rope_interleave".into(), self.interleaved.into());
        map.insert("rope_parameters".into(), self.rope.to_json(self.rope_dim));
    }

    /// Width of a query of a head.
    fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// What products of queries and keys are multiplied by.
    pub(crate) fn scale(&self) -> f32 {
        // Beside what yarn does to cosines and sines, which only the turning part sees.
        let stretch = match &self.rope.scaling {
            RopeScaling::Yarn(Yarn { factor, mscale_all_dim: Some(all), .. }) if *all != 0.0 => Yarn::mscale(*factor, *all),
            _ => 1.0,
        };
        (stretch * stretch / (self.query_dim() as f64).sqrt()) as f32
    }

    /// Shapes of the op: one key head, of the latent and the part that turns.
    fn geometry(&self) -> AttentionGeometry {
        AttentionGeometry {
            heads: self.num_heads,
            kv_heads: 1,
            head_dim: self.latent + self.rope_dim,
            values: KvValues::PrefixOfKey(self.latent),
            scale: self.scale(),
            eps: LATENT_EPS,
            window: None,
            sees: Sight::Before,
        }
    }
}

/// Where queries come from.
enum Queries {
    /// The residual stream: `q_proj`.
    Direct { proj: MatrixId, module: usize },
    /// A latent of their own: `q_a_proj`, `q_a_layernorm`, `q_b_proj`.
    Latent { a_proj: MatrixId, a_bias: Option<VectorId>, a_module: usize, norm: VectorId, b_proj: MatrixId, b_module: usize },
}

/// The weights of attention over latents in some layers.
pub(super) struct MultiHeadLatentAttention {
    config: LatentConfig,
    queries: Queries,
    kv_a_proj: MatrixId,
    kv_a_bias: Option<VectorId>,
    kv_a_norm: VectorId,
    kv_b_proj: MatrixId,
    o_proj: MatrixId,
    o_bias: Option<VectorId>,
    kv_a_module: usize,
    kv_b_module: usize,
    o_module: usize,
}

impl MultiHeadLatentAttention {
    /// Of the decoder layers `layers`.
    pub(super) fn declare(d: &mut Declaration, c: &LatentConfig, hidden: usize, layers: &[usize]) -> Self {
        let (n, attention) = (layers.len(), Part::Attention);
        let (query, latent) = (c.num_heads * c.query_dim(), c.latent + c.rope_dim);
        let bias = |d: &mut Declaration, path: &str, width| c.bias.then(|| d.own_vector(path, layers, width));
        let queries = match c.query_latent {
            None => {
                let proj = d.matrix("q", n, hidden, query);
                Queries::Direct { proj, module: d.projection((proj, 0), "self_attn.q_proj", attention, layers, query) }
            }
            Some(rank) => {
                let (a_proj, b_proj) = (d.matrix("q_a", n, hidden, rank), d.matrix("q_b", n, rank, query));
                Queries::Latent {
                    a_proj,
                    a_module: d.projection((a_proj, 0), "self_attn.q_a_proj", attention, layers, rank),
                    a_bias: bias(d, "self_attn.q_a_proj.bias", rank),
                    norm: d.norm("self_attn.q_a_layernorm", layers, rank, NormWeights::Plain),
                    b_proj,
                    b_module: d.projection((b_proj, 0), "self_attn.q_b_proj", attention, layers, query),
                }
            }
        };
        let (made, found) = (c.num_heads * (c.nope_dim + c.value_dim), c.num_heads * c.value_dim);
        let kv_a_proj = d.matrix("kv_a", n, hidden, latent);
        let kv_b_proj = d.matrix("kv_b", n, c.latent, made);
        let o_proj = d.matrix("o", n, found, hidden);
        MultiHeadLatentAttention {
            queries,
            kv_a_module: d.projection((kv_a_proj, 0), "self_attn.kv_a_proj_with_mqa", attention, layers, latent),
            kv_a_bias: bias(d, "self_attn.kv_a_proj_with_mqa.bias", latent),
            kv_a_norm: d.norm("self_attn.kv_a_layernorm", layers, c.latent, NormWeights::Plain),
            kv_b_module: d.projection((kv_b_proj, 0), "self_attn.kv_b_proj", attention, layers, made),
            o_module: d.projection((o_proj, 0), "self_attn.o_proj", attention, layers, hidden),
            o_bias: bias(d, "self_attn.o_proj.bias", hidden),
            kv_a_proj,
            kv_b_proj,
            o_proj,
            config: c.clone(),
        }
    }

    /// `residual + o(attention(h))`.
    pub(super) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
        kv: KvAccess<'_>,
    ) -> strata_tensor::Result<Var> {
        let c = &self.config;
        let q = match &self.queries {
            Queries::Direct { proj, module } => tape.linear(h, pass.linear((*proj, l), None, &[(*module, 0)]))?,
            Queries::Latent { a_proj, a_bias, a_module, norm, b_proj, b_module } => {
                let a = tape.linear(h, pass.linear((*a_proj, l), *a_bias, &[(*a_module, 0)]))?;
                let a = tape.rms_norm(&a, pass.weights.vector(*norm, l), LATENT_EPS, pass.dtype)?;
                tape.linear(&a, pass.linear((*b_proj, l), None, &[(*b_module, 0)]))?
            }
        };
        let latents = tape.linear(h, pass.linear((self.kv_a_proj, l), self.kv_a_bias, &[(self.kv_a_module, 0)]))?;
        let style = if c.interleaved { RotaryStyle::Interleaved } else { RotaryStyle::Halves };
        let rotary = LatentRotary { angles: pass.inputs.rotary.clone(), style };
        let norm = pass.weights.vector(self.kv_a_norm, l);
        let keys = tape.latent_keys(&latents, norm, LATENT_EPS, &rotary, pass.dtype)?;
        let input = LatentAttention {
            sight: AttentionSight {
                geometry: c.geometry(),
                sinks: None,
                spans: pass.inputs.spans.clone(),
                queries: pass.queries(),
            },
            layer: pass.linear((self.kv_b_proj, l), None, &[(self.kv_b_module, 0)]),
            nope_dim: c.nope_dim,
            value_dim: c.value_dim,
            rotary,
        };
        let a = tape.latent_attention(&q, keys, &input, kv)?;
        drop(q);
        pass.add_mixed(tape, residual, a, |pass| pass.linear((self.o_proj, l), self.o_bias, &[(self.o_module, 0)]))
    }

    pub(super) fn geometry(&self) -> AttentionGeometry {
        self.config.geometry()
    }

    /// Bytes for each token of a training pass, keys in pages included in what goes back; of attention's own scratch, see [`Backend::attention_scratch_bytes`].
    pub(super) fn token_bytes(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> TokenBytes {
        let (c, g) = (&self.config, self.geometry());
        let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
        let (query, absorbed) = (c.num_heads * c.query_dim(), c.num_heads * g.head_dim);
        let (found, result) = (c.num_heads * c.latent, c.num_heads * c.value_dim);
        let query_latent = c.query_latent.unwrap_or(0);
        let inputs = (wide + narrow) * (query_latent + query + g.head_dim);
        let saved = inputs + narrow * (absorbed + found + result) + wide * c.num_heads;
        // The gradient of what attention finds, of absorbed queries, exact and rounded, and of what those are made of.
        let gradients =
            wide * (found + absorbed + 2 * g.head_dim) + narrow * absorbed + (wide + narrow) * (query + result + query_latent);
        // Before that, those of what attention finds and reads, and what it goes back in.
        let attended = wide * (found + absorbed + g.head_dim) + backend.attention_gradient_bytes(&g, dtype);
        let pages = attention_pages_bytes(backend, KV_PAGE_TOKENS * 64, &g, dtype) / (KV_PAGE_TOKENS * 64);
        TokenBytes { saved, gradients: gradients.max(attended).max(pages) + 2 * wide * hidden }
    }
}
