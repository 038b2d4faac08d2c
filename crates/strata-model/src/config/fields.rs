//! The keys of a `config.json`, read with errors that name key and value.

use serde_json::{Map, Value};
use strata_tensor::DType;

use super::quantization;
use super::{CONTEXT_TOKENS_MAX, EOS_TOKENS_MAX, HIDDEN_SIZE_MAX, ModelConfig, NUM_LAYERS_MAX, VOCAB_SIZE_MAX};
use crate::architectures::Family;
use crate::error::cut;
use crate::{Error, Result};

/// The keys of a JSON object.
pub(crate) struct Fields<'a> {
    pub(crate) map: &'a Map<String, Value>,
}

/// What transformers takes for keys that a `config.json` leaves out, where it differs from family to family.
pub(crate) struct Defaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
    pub tie_word_embeddings: bool,
}

impl<'a> Fields<'a> {
    /// Whether a key is there, with whatever value.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Whether a key is there and `null`.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// The value of a key; `null` counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// A whole number from 1 to `max`.
    pub(crate) fn size(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        let size = value.as_u64().ok_or_else(|| wrong_kind(key, value, "a whole number"))?;
        check_size(key, size, max)
    }

    /// A whole number from 0 to `max`.
    pub(crate) fn count(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        match self.map.get(key).map(Value::as_u64) {
            Some(Some(0)) => Ok(0),
            _ => self.size(key, default, max),
        }
    }

    /// As [`Fields::size`], of a key that may be `null`.
    pub(crate) fn optional_size(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.get(key).map(|_| self.size(key, 1, max)).transpose()
    }

    /// The longest sequence.
    pub(crate) fn context(&self, default: usize) -> Result<usize> {
        self.size("max_position_embeddings", default, CONTEXT_TOKENS_MAX)
    }

    pub(crate) fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| wrong_kind(key, value, "a number"))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong_kind(key, value, "true or false"))
    }

    /// The strings of a list; `None` if there is none.
    pub(crate) fn names(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(names) = value else { return Err(wrong_kind(key, value, "a list")) };
        let name =
            |(i, name): (usize, &'a Value)| name.as_str().ok_or_else(|| wrong_kind(&format!("{key}[{i}]"), name, "a name"));
        names.iter().enumerate().map(name).collect::<Result<_>>().map(Some)
    }

    /// Which of two names of the same setting a file has: the first, where it has both and they say the same.
    pub(crate) fn one_of<'k>(&self, first: &'k str, second: &'k str) -> Result<&'k str> {
        match (self.map.get(first), self.map.get(second)) {
            (Some(a), Some(b)) if a != b => {
                Err(Error::Config(format!("{first} is {a} and {second} is {b}; they are the same setting")))
            }
            (Some(_), _) => Ok(first),
            (None, _) => Ok(second),
        }
    }

    /// Refuses another activation than SiLU.
    pub(crate) fn require_silu(&self) -> Result<()> {
        match self.get("hidden_act") {
            Some(Value::String(act)) if act == "silu" => Ok(()),
            Some(other) => Err(unsupported("hidden_act", other, "\"silu\"")),
            None => Ok(()),
        }
    }

    /// What all families have. `generation`: the keys of `generation_config.json`, whose `eos_token_id` wins.
    pub(crate) fn model(&self, generation: Option<&Fields<'_>>, defaults: &Defaults, family: Family) -> Result<ModelConfig> {
        let vocab_size = self.size("vocab_size", defaults.vocab_size, VOCAB_SIZE_MAX)?;
        // Also those that nothing here reads: a model that names tokens which it does not have is not the model it says it is.
        for (is_beside, map) in generation.iter().map(|g| (true, g.map)).chain([(false, self.map)]) {
            for (key, value) in map.iter().filter(|(key, value)| is_token_id(key) && !value.is_null()) {
                token_ids(key, value, vocab_size).map_err(|error| match error {
                    Error::Config(message) if is_beside => {
                        Error::Config(format!("{message}, in generation_config.json beside it"))
                    }
                    other => other,
                })?;
            }
        }
        // transformers makes an encoder of any decoder so.
        if let Some(value) = self.get("is_causal").filter(|value| value.as_bool() != Some(true)) {
            return Err(unsupported("is_causal", value, "true"));
        }
        let num_layers = self.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
        if let Some(types) = self.names("layer_types")?.filter(|types| types.len() != num_layers) {
            let found = types.len();
            return Err(Error::Config(format!("layer_types has {found} entries for num_hidden_layers {num_layers}")));
        }
        let default_id = |key: &str, default: Option<u32>| if self.has(key) { None } else { default };
        let eos = generation.and_then(|g| g.get("eos_token_id")).or_else(|| self.get("eos_token_id"));
        let eos_token_ids = match eos {
            Some(ids) => token_ids("eos_token_id", ids, vocab_size)?,
            None => default_id("eos_token_id", defaults.eos_token_id).into_iter().collect(),
        };
        let bos = self.get("bos_token_id").map(|v| token_id("bos_token_id", v, vocab_size)).transpose()?;
        Ok(ModelConfig {
            vocab_size,
            hidden_size: self.size("hidden_size", defaults.hidden_size, HIDDEN_SIZE_MAX)?,
            num_layers,
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)? as f32,
            tie_word_embeddings: self.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
            max_position_embeddings: self.context(defaults.max_position_embeddings)?,
            initializer_range: self.number("initializer_range", 0.02)? as f32,
            bos_token_id: bos.or(default_id("bos_token_id", defaults.bos_token_id)),
            eos_token_ids,
            dtype: self.dtype()?,
            int4: quantization::int4_form(self)?,
            family,
        })
    }

    fn dtype(&self) -> Result<Option<DType>> {
        let (key, value) = match (self.get("dtype"), self.get("torch_dtype")) {
            (Some(value), _) => ("dtype", value),
            (None, Some(value)) => ("torch_dtype", value),
            (None, None) => return Ok(None),
        };
        match value.as_str() {
            Some("bfloat16") => Ok(Some(DType::BF16)),
            Some("float32" | "float16") => Ok(Some(DType::F32)),
            _ => Err(unsupported(key, value, "\"bfloat16\", \"float32\" or \"float16\"")),
        }
    }
}

/// The keys of a file.
pub(crate) fn parse_object(file: &str, json: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(json) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::Config(format!("{file} holds {}, not an object", shorten(&other)))),
        Err(e) => Err(Error::Config(format!("{file} is not JSON: {e}"))),
    }
}

/// A size that is neither 0 nor above its limit.
pub(crate) fn check_size(key: &str, size: u64, max: usize) -> Result<usize> {
    if size == 0 || size > max as u64 {
        return Err(Error::Config(format!("{key} {size} is not between 1 and {max}")));
    }
    Ok(size as usize)
}

/// Whether a key names tokens: `eos_token_id`, `pad_token_id`, `forced_eos_token_id`.
fn is_token_id(key: &str) -> bool {
    key.ends_with("_token_id")
}

/// A token id, or several.
fn token_ids(key: &str, value: &Value, vocab_size: usize) -> Result<Vec<u32>> {
    match value {
        Value::Array(ids) if ids.len() > EOS_TOKENS_MAX => {
            Err(Error::Config(format!("{key} lists {} tokens, more than {EOS_TOKENS_MAX}", ids.len())))
        }
        Value::Array(ids) => ids.iter().map(|id| token_id(key, id, vocab_size)).collect(),
        id => Ok(vec![token_id(key, id, vocab_size)?]),
    }
}

pub(crate) fn token_id(key: &str, value: &Value, vocab_size: usize) -> Result<u32> {
    let id = value.as_u64().ok_or_else(|| wrong_kind(key, value, "a token id"))?;
    if id >= vocab_size as u64 {
        return Err(Error::Config(format!("{key} {id} is not below vocab_size {vocab_size}")));
    }
    Ok(id as u32)
}

pub(crate) fn wrong_kind(key: &str, value: &Value, expected: &str) -> Error {
    Error::Config(format!("{key} is {}, not {expected}", shorten(value)))
}

pub(crate) fn unsupported(key: &str, value: &Value, supported: &str) -> Error {
    Error::Config(format!("{key} {} is not supported; supported: {supported}", shorten(value)))
}

/// JSON text of a value, cut so that a hostile file cannot fill the log.
fn shorten(value: &Value) -> String {
    const CHARS_MAX: usize = 200;
    cut(value.to_string(), CHARS_MAX)
}
