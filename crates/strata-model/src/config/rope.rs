//! Rotary positions (Su et al., 2021, arXiv:2104.09864) and the ways to stretch them, as `modeling_rope_utils` of transformers computes them.

use std::f32::consts::PI;

use serde_json::{Map, Value, json};

use super::CONTEXT_TOKENS_MAX;
use super::HEAD_DIM_MAX;
use super::fields::{Fields, unsupported, wrong_kind};
use crate::{Error, Result};

/// How positions turn the pairs of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that turn: an even number of its first.
    pub rotary_dim: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// A kind of `rope_type`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all. Also what `dynamic` comes to within the context that a model announces: it stretches only what is longer, which is not served.
    Default,
    /// All by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Only beyond the context that the model announces; that is never served, so this computes what [`RopeScaling::Default`] does.
    Dynamic {
        /// The factor.
        factor: f64,
    },
    /// Slow pairs by a factor, fast ones not, a ramp between them (Peng et al., 2023, arXiv:2309.00071).
    Yarn(Yarn),
    /// Slow pairs by a factor, fast ones not, smoothly between them (Llama 3.1).
    Llama3 {
        /// The factor of slow pairs.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are slow.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are fast.
        high_freq_factor: f64,
        /// The context before it was stretched.
        original_max_position_embeddings: usize,
    },
    /// Each pair by a factor of its own, of two sets: for sequences up to the original context, and for longer ones (Ding et al., 2024, arXiv:2402.13753).
    LongRope(LongRope),
}

/// Settings of yarn.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// The factor of slow pairs.
    pub factor: f64,
    /// The context before it was stretched.
    pub original_max_position_embeddings: usize,
    /// Turns within the original context from which on a pair is fast.
    pub beta_fast: f64,
    /// Turns up to which a pair is slow.
    pub beta_slow: f64,
    /// Factor on cosines and sines, if it is given.
    pub attention_factor: Option<f64>,
    /// What that factor is computed from, if these are given.
    pub mscale: Option<f64>,
    /// As `mscale`, for the denominator.
    pub mscale_all_dim: Option<f64>,
    /// Whether the ramp begins and ends at whole pairs.
    pub truncate: bool,
}

/// Settings of longrope.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Factors for sequences up to the original context, one for each pair.
    pub short_factor: Vec<f64>,
    /// Factors for longer sequences.
    pub long_factor: Vec<f64>,
    /// The context before it was stretched.
    pub original_max_position_embeddings: usize,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
    /// As the file has it, if it does.
    pub factor: Option<f64>,
}

/// Frequencies of pairs, and what cosines and sines are multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position of each pair.
    pub frequencies: Vec<f32>,
    /// Factor on cosines and sines.
    pub factor: f32,
}

impl Rope {
    /// Reads `rope_scaling` or `rope_parameters`, of a model whose heads have `head_dim` elements that may turn. To be validated.
    pub(crate) fn read(fields: &Fields<'_>, head_dim: usize, max_position_embeddings: usize) -> Result<Self> {
        // Where a file has both, transformers takes `rope_scaling` if it is not empty.
        let scaling = fields.get("rope_scaling").filter(|v| v.as_object().is_none_or(|m| !m.is_empty()));
        let empty = Map::new();
        let (key, map) = match (scaling, fields.get("rope_parameters")) {
            (Some(value), _) => ("rope_scaling", object("rope_scaling", value)?),
            (None, Some(value)) => ("rope_parameters", object("rope_parameters", value)?),
            (None, None) => ("rope_parameters", &empty),
        };
        // A nested object would be a rope of its own for some kind of layer.
        if let Some((name, nested)) = map.iter().find(|(_, v)| v.is_object()) {
            return Err(unsupported(&format!("{key}.{name}"), nested, "one rope for all layers"));
        }
        let rope = Fields { map };
        let kind = match rope.get("rope_type").or_else(|| rope.get("type")) {
            None => "default",
            Some(kind) => kind.as_str().ok_or_else(|| wrong_kind(&format!("{key}.rope_type"), kind, "a name"))?,
        };
        let theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0)?)?;
        let partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)?)?;
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(Error::Config(format!("partial_rotary_factor {partial} is not above 0 and at most 1")));
        }
        let required = |name: &str| {
            let value = rope.get(name).ok_or_else(|| Error::Config(format!("{key} of rope_type {kind:?} has no {name}")))?;
            value.as_f64().ok_or_else(|| wrong_kind(&format!("{key}.{name}"), value, "a number"))
        };
        let optional = |name: &str| rope.get(name).map(|_| required(name)).transpose();
        let original = || {
            let name = "original_max_position_embeddings";
            let outside = fields.optional_size(name, CONTEXT_TOKENS_MAX)?;
            Ok::<_, Error>(outside.or(rope.optional_size(name, CONTEXT_TOKENS_MAX)?).unwrap_or(max_position_embeddings))
        };
        let by_pair = |name: &str| {
            let value = rope.get(name).ok_or_else(|| Error::Config(format!("{key} of rope_type {kind:?} has no {name}")))?;
            let factors: Option<Vec<f64>> =
                value.as_array().filter(|a| a.len() <= HEAD_DIM_MAX).and_then(|a| a.iter().map(Value::as_f64).collect());
            factors.ok_or_else(|| wrong_kind(&format!("{key}.{name}"), value, "a list of numbers"))
        };
        let implied = |original: usize| max_position_embeddings as f64 / original as f64;
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: required("factor")? },
            "dynamic" => RopeScaling::Dynamic { factor: required("factor")? },
            "yarn" => {
                let original = original()?;
                RopeScaling::Yarn(Yarn {
                    factor: optional("factor")?.unwrap_or(implied(original)),
                    original_max_position_embeddings: original,
                    // As there, 0 stands for the default.
                    beta_fast: optional("beta_fast")?.filter(|&beta| beta != 0.0).unwrap_or(32.0),
                    beta_slow: optional("beta_slow")?.filter(|&beta| beta != 0.0).unwrap_or(1.0),
                    attention_factor: optional("attention_factor")?,
                    mscale: optional("mscale")?,
                    mscale_all_dim: optional("mscale_all_dim")?,
                    truncate: rope.flag("truncate", true)?,
                })
            }
            "llama3" => RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: required("low_freq_factor")?,
                high_freq_factor: required("high_freq_factor")?,
                original_max_position_embeddings: original()?,
            },
            "longrope" => {
                let (original, factor) = (original()?, optional("factor")?);
                let stretched = factor.unwrap_or(implied(original));
                let default = if stretched <= 1.0 { 1.0 } else { (1.0 + stretched.ln() / (original as f64).ln()).sqrt() };
                RopeScaling::LongRope(LongRope {
                    short_factor: by_pair("short_factor")?,
                    long_factor: by_pair("long_factor")?,
                    original_max_position_embeddings: original,
                    attention_factor: optional("attention_factor")?.unwrap_or(default),
                    factor,
                })
            }
            _ => {
                let value = Value::from(kind);
                let kinds = "\"default\", \"linear\", \"dynamic\", \"yarn\", \"llama3\", \"longrope\"";
                return Err(unsupported(&format!("{key}.rope_type"), &value, kinds));
            }
        };
        Ok(Rope { theta, rotary_dim: (head_dim as f64 * partial) as usize, scaling })
    }

    /// Refuses what gives no frequencies.
    pub(crate) fn validate(&self) -> Result<()> {
        let theta = self.theta;
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::Config(format!("rope_theta {theta} is not a positive number")));
        }
        let dim = self.rotary_dim;
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(Error::Config(format!("rotary embeddings of {dim} elements of a head: they turn pairs")));
        }
        let pairs = dim / 2;
        if let RopeScaling::LongRope(LongRope { short_factor, long_factor, .. }) = &self.scaling
            && let Some(other) = [short_factor, long_factor].into_iter().find(|factors| factors.len() != pairs)
        {
            return Err(Error::Config(format!("longrope has {} factors for {pairs} pairs of a head", other.len())));
        }
        for longer in [false, true] {
            let table = self.table_of(longer);
            let wrong = table.frequencies.iter().find(|f| !(f.is_finite() && **f > 0.0));
            let factor = Some(&table.factor).filter(|f| !(f.is_finite() && **f > 0.0));
            if let Some(value) = wrong.or(factor) {
                return Err(Error::Config(format!("the settings of rope give a frequency or factor of {value}")));
            }
        }
        Ok(())
    }

    /// The table for a sequence that has, or may come to have, this many tokens.
    pub fn table(&self, length: usize) -> RopeTable {
        self.table_of(self.is_long(length))
    }

    /// Whether a sequence of this length has another table than a short one.
    pub fn is_long(&self, length: usize) -> bool {
        matches!(&self.scaling, RopeScaling::LongRope(long) if length > long.original_max_position_embeddings)
    }

    fn table_of(&self, is_long: bool) -> RopeTable {
        let plain = |i: usize| {
            let exponent = (2 * i) as f32 / self.rotary_dim as f32;
            (self.theta as f32 as f64).powf(exponent as f64) as f32
        };
        let wavelengths = (0..self.rotary_dim / 2).map(plain);
        let (frequencies, factor): (Vec<f32>, f64) = match &self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => (wavelengths.map(|w| 1.0 / w).collect(), 1.0),
            RopeScaling::Linear { factor } => (wavelengths.map(|w| 1.0 / w / *factor as f32).collect(), 1.0),
            RopeScaling::Yarn(yarn) => {
                let (low, high) = yarn.ramp(self.theta, self.rotary_dim);
                let frequency = |(i, w): (usize, f32)| {
                    let (interpolated, extrapolated) = (1.0 / (yarn.factor as f32 * w), 1.0 / w);
                    let slow = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                    let fast = 1.0 - slow;
                    interpolated * (1.0 - fast) + extrapolated * fast
                };
                (wavelengths.enumerate().map(frequency).collect(), yarn.attention_factor())
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let (factor, low, high) = (*factor as f32, *low_freq_factor, *high_freq_factor);
                let original = *original_max_position_embeddings as f64;
                let frequency = |w: f32| {
                    let frequency = 1.0 / w;
                    let wavelength = 2.0 * PI / frequency;
                    if wavelength > (original / low) as f32 {
                        frequency / factor
                    } else if wavelength < (original / high) as f32 {
                        frequency
                    } else {
                        let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                };
                (wavelengths.map(frequency).collect(), 1.0)
            }
            RopeScaling::LongRope(long) => {
                let factors = if is_long { &long.long_factor } else { &long.short_factor };
                let frequency = |(w, &factor): (f32, &f64)| 1.0 / (factor as f32 * w);
                (wavelengths.zip(factors).map(frequency).collect(), long.attention_factor)
            }
        };
        RopeTable { frequencies, factor: factor as f32 }
    }

    /// The object of a `config.json` that reads back as this.
    pub(crate) fn to_json(&self, head_dim: usize) -> Value {
        let mut value = match &self.scaling {
            RopeScaling::Default => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            RopeScaling::Yarn(y) => json!({
                "rope_type": "yarn", "factor": y.factor, "original_max_position_embeddings": y.original_max_position_embeddings,
                "beta_fast": y.beta_fast, "beta_slow": y.beta_slow, "attention_factor": y.attention_factor, "mscale": y.mscale,
                "mscale_all_dim": y.mscale_all_dim, "truncate": y.truncate,
            }),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
            RopeScaling::LongRope(l) => json!({
                "rope_type": "longrope", "factor": l.factor, "short_factor": l.short_factor, "long_factor": l.long_factor,
                "attention_factor": l.attention_factor, "original_max_position_embeddings": l.original_max_position_embeddings,
            }),
        };
        let map = value.as_object_mut().expect("an object was made above");
        map.retain(|_, value| !value.is_null());
        map.insert("rope_theta".into(), self.theta.into());
        if self.rotary_dim != head_dim {
            // What times the width of a head is rounded down to as many elements.
            let factor = self.rotary_dim as f64 / head_dim as f64;
            let is_exact = (head_dim as f64 * factor) as usize == self.rotary_dim;
            let factor = if is_exact { factor } else { (self.rotary_dim as f64 + 0.5) / head_dim as f64 };
            map.insert("partial_rotary_factor".into(), factor.into());
        }
        value
    }
}

impl Yarn {
    /// `0.1 · mscale · ln(scale) + 1`, the growth of attention's scale that the paper suggests.
    pub fn mscale(scale: f64, mscale: f64) -> f64 {
        if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
    }

    fn attention_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
                Yarn::mscale(self.factor, mscale) / Yarn::mscale(self.factor, all)
            }
            _ => Yarn::mscale(self.factor, 1.0),
        }
    }

    /// The pairs where the ramp begins and ends.
    fn ramp(&self, theta: f64, dim: usize) -> (f32, f32) {
        let original = self.original_max_position_embeddings as f64;
        let pair = |turns: f64| dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min((dim - 1) as f64));
        // As there, against a division by zero.
        (low as f32, if low == high { high + 0.001 } else { high } as f32)
    }
}

fn object<'v>(key: &str, value: &'v Value) -> Result<&'v Map<String, Value>> {
    value.as_object().ok_or_else(|| wrong_kind(key, value, "an object"))
}
