//! Dense pre-norm decoders: Qwen3, Qwen2, Llama, Mistral. Their layers are the same mathematics, and differ in what `config.json` turns on.

use serde_json::{Map, Value};
use strata_tensor::{Backend, DType, Tape, Var};

use super::FamilyConfig;
use super::blocks::{Attention, AttentionConfig, GatedMlp, MlpConfig, MlpPaths, Pass};
use super::declaration::{Declaration, NormWeights, VectorId};
use super::decoder::{DecoderLayers, LayerBytes, Mixer};
use crate::config::fields::{Fields, check_size, unsupported, wrong_kind};
use crate::config::{
    CONTEXT_TOKENS_MAX, HEAD_DIM_MAX, HIDDEN_SIZE_MAX, INTERMEDIATE_SIZE_MAX, NUM_HEADS_MAX, NUM_LAYERS_MAX, Rope,
};
use crate::kv_cache::LayerAccess;
use crate::{Error, ModelConfig, Result};

/// What a dense decoder has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    /// Attention of every layer.
    pub attention: AttentionConfig,
    /// The MLP of every layer.
    pub mlp: MlpConfig,
}

impl FamilyConfig for DenseConfig {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        check_size("intermediate_size", self.mlp.intermediate_size as u64, INTERMEDIATE_SIZE_MAX)?;
        self.attention.validate(model)
    }

    fn rope(&self) -> &Rope {
        &self.attention.rope
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        Box::new(DenseLayers::declare(d, model, self))
    }
}

impl AttentionConfig {
    /// Refuses sizes and combinations that no model can have.
    pub(super) fn validate(&self, model: &ModelConfig) -> Result<()> {
        let a = self;
        let sizes = [
            ("num_attention_heads", a.num_heads, NUM_HEADS_MAX),
            ("num_key_value_heads", a.num_kv_heads, NUM_HEADS_MAX),
            ("head_dim", a.head_dim, HEAD_DIM_MAX),
        ];
        for (key, size, max) in sizes {
            check_size(key, size as u64, max)?;
        }
        if !a.num_heads.is_multiple_of(a.num_kv_heads) {
            let (heads, kv_heads) = (a.num_heads, a.num_kv_heads);
            return Err(Error::Config(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )));
        }
        if !a.head_dim.is_multiple_of(2) {
            return Err(Error::Config(format!("head_dim {} is odd; rotary embeddings turn pairs", a.head_dim)));
        }
        if a.rope.rotary_dim != a.head_dim && !a.output_gate {
            let (dim, head_dim) = (a.rope.rotary_dim, a.head_dim);
            return Err(Error::Config(format!(
                "rotary embeddings turn {dim} of {head_dim} elements of a head; supported: all"
            )));
        }
        if a.windows.len() != model.num_layers {
            let (windows, layers) = (a.windows.len(), model.num_layers);
            return Err(Error::Config(format!("{windows} layers have a window or none, and num_hidden_layers is {layers}")));
        }
        a.rope.validate()
    }
}

/// Query heads, and key and value heads: as many as of queries where it is `null`, or left out and there is no default.
pub(super) fn heads(fields: &Fields<'_>, default: usize, default_kv: Option<usize>) -> Result<(usize, usize)> {
    let num_heads = fields.size("num_attention_heads", default, NUM_HEADS_MAX)?;
    let num_kv_heads = match fields.is_null("num_key_value_heads") {
        true => num_heads,
        false => fields.size("num_key_value_heads", default_kv.unwrap_or(num_heads), NUM_HEADS_MAX)?,
    };
    Ok((num_heads, num_kv_heads))
}

/// Width of a head: `hidden_size / num_attention_heads` where the file does not say.
pub(super) fn head_dim(fields: &Fields<'_>, num_heads: usize, default_hidden: usize) -> Result<usize> {
    match fields.optional_size("head_dim", HEAD_DIM_MAX)? {
        Some(head_dim) => Ok(head_dim),
        None => Ok(fields.size("hidden_size", default_hidden, HIDDEN_SIZE_MAX)? / num_heads),
    }
}

/// The windows of Qwen's layers: those that `layer_types` says, or from `max_window_layers` on.
pub(super) fn windows(fields: &Fields<'_>, default_layers: usize) -> Result<Vec<Option<usize>>> {
    let num_layers = fields.size("num_hidden_layers", default_layers, NUM_LAYERS_MAX)?;
    let window = match (fields.flag("use_sliding_window", false)?, fields.has("sliding_window")) {
        (false, _) => None,
        (true, false) => Some(4096),
        (true, true) => fields.optional_size("sliding_window", CONTEXT_TOKENS_MAX)?,
    };
    let Some(types) = fields.names("layer_types")? else {
        let first = match fields.get("max_window_layers") {
            None => 28,
            Some(v) => v.as_u64().ok_or_else(|| wrong_kind("max_window_layers", v, "a whole number"))?,
        };
        return Ok((0..num_layers as u64).map(|l| window.filter(|_| l >= first)).collect());
    };
    windows_of_types(&types, num_layers, window, "use_sliding_window and a sliding_window")
}

/// The windows of layers of these types. `needs`: what a type with a window needs.
pub(super) fn windows_of_types(
    types: &[&str],
    num_layers: usize,
    window: Option<usize>,
    needs: &str,
) -> Result<Vec<Option<usize>>> {
    if types.len() != num_layers {
        let found = types.len();
        return Err(Error::Config(format!("layer_types has {found} entries for num_hidden_layers {num_layers}")));
    }
    let of_type = |(layer, name): (usize, &&str)| match (*name, window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(window)) => Ok(Some(window)),
        ("sliding_attention", None) => Err(Error::Config(format!("layer_types[{layer}] \"sliding_attention\" needs {needs}"))),
        (other, _) => {
            Err(unsupported(&format!("layer_types[{layer}]"), &other.into(), "\"full_attention\", \"sliding_attention\""))
        }
    };
    types.iter().enumerate().map(of_type).collect()
}

/// The keys that all dense decoders write.
pub(super) fn write(c: &DenseConfig, class: &str, map: &mut Map<String, Value>) {
    let a = &c.attention;
    map.insert("architectures".into(), [class].as_slice().into());
    map.insert("attention_dropout".into(), 0.0.into());
    map.insert("intermediate_size".into(), c.mlp.intermediate_size.into());
    map.insert("num_attention_heads".into(), a.num_heads.into());
    map.insert("num_key_value_heads".into(), a.num_kv_heads.into());
    map.insert("rope_parameters".into(), a.rope.to_json(a.head_dim));
}

/// The keys of windows that [`windows`] reads.
pub(super) fn write_windows(c: &DenseConfig, map: &mut Map<String, Value>) {
    let has_any = c.attention.windows.iter().any(Option::is_some);
    map.insert("use_sliding_window".into(), has_any.into());
    if has_any {
        write_layer_types(&c.attention.windows, map);
    }
}

/// The keys of windows that [`windows_of_types`] reads.
pub(super) fn write_layer_types(windows: &[Option<usize>], map: &mut Map<String, Value>) {
    let name = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    map.insert("sliding_window".into(), windows.iter().copied().flatten().next().into());
    map.insert("layer_types".into(), windows.iter().map(name).collect::<Vec<_>>().into());
}

/// `head_dim`, where it is not what the other sizes imply.
pub(super) fn write_head_dim(model: &ModelConfig, c: &DenseConfig, map: &mut Map<String, Value>) {
    if c.attention.head_dim * c.attention.num_heads != model.hidden_size {
        map.insert("head_dim".into(), c.attention.head_dim.into());
    }
}

/// The decoder layers: RMSNorm, attention, a residual addition, RMSNorm, a gated MLP, and another addition. The residual stream is f32.
pub(super) struct DenseLayers {
    input_layernorm: VectorId,
    attention: Attention,
    post_attention_layernorm: VectorId,
    mlp: GatedMlp,
}

impl DenseLayers {
    pub(super) fn declare(d: &mut Declaration, model: &ModelConfig, c: &DenseConfig) -> Self {
        let (hidden, layers) = (model.hidden_size, (0..model.num_layers).collect::<Vec<_>>());
        DenseLayers {
            input_layernorm: d.norm("input_layernorm", &layers, hidden, NormWeights::Plain),
            attention: Attention::declare(d, &c.attention, hidden, model.rms_norm_eps, &layers),
            post_attention_layernorm: d.norm("post_attention_layernorm", &layers, hidden, NormWeights::Plain),
            mlp: GatedMlp::declare(d, &MlpPaths::MLP, &c.mlp, hidden, &layers),
        }
    }
}

impl DecoderLayers for DenseLayers {
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

    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes {
        let (attention, mlp) = (self.attention.token_bytes(backend, hidden, dtype), self.mlp.token_bytes(hidden, dtype));
        attention.then(&mlp)
    }
}
