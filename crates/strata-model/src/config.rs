//! `config.json`: what kind of model a checkpoint holds.
//!
//! Read as `Qwen3Config` of transformers reads it, defaults included, in the layout of version 4 (`rope_theta`, `rope_scaling`,
//! `torch_dtype`) and of version 5 (`rope_parameters`, `dtype`). A setting that this build does not compute is refused:
//! a model that runs gives the numbers its authors meant.

mod shapes;

use serde::Serialize;
use serde_json::{Map, Value};
use strata_tensor::DType;

use crate::{Error, Result};

/// The largest vocabulary that is accepted.
pub const VOCAB_SIZE_MAX: usize = 1 << 20;
/// The widest residual stream that is accepted.
pub const HIDDEN_SIZE_MAX: usize = 1 << 16;
/// The widest MLP that is accepted.
pub const INTERMEDIATE_SIZE_MAX: usize = 1 << 18;
/// The most decoder layers that are accepted.
pub const NUM_LAYERS_MAX: usize = 1024;
/// The most attention heads that are accepted.
pub const NUM_HEADS_MAX: usize = 1024;
/// The widest attention head that is accepted.
pub const HEAD_DIM_MAX: usize = 1024;
/// The longest context that is accepted.
pub const CONTEXT_TOKENS_MAX: usize = 1 << 24;
/// The most end-of-sequence tokens that are accepted.
pub const EOS_TOKENS_MAX: usize = 64;

/// Everything about a Qwen3-style decoder that its forward pass needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Hugging Face `model_type`, which selects the architecture.
    pub model_type: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether q, k, v and o projections have biases.
    pub attention_bias: bool,
    /// Whether the unembedding is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Standard deviation of random initial weights.
    pub initializer_range: f32,
    /// Token that begins a sequence, if the config names one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence, from `generation_config.json` or `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Dtype to compute in, as the config names it: f16 checkpoints are widened to f32. `None`: it does not say.
    pub dtype: Option<DType>,
}

impl ModelConfig {
    /// Reads `config.json`, and `generation_config.json` where the checkpoint has one (its `eos_token_id` wins).
    ///
    /// # Errors
    /// If the text is not JSON, a value is missing, of the wrong kind, or out of its limits, or the model needs something that
    /// is not supported. The error names the key and the value.
    pub fn from_json(config_json: &str, generation_config_json: Option<&str>) -> Result<Self> {
        let map = parse_object("config.json", config_json)?;
        let fields = Fields { map: &map };
        match fields.map.get("model_type") {
            Some(Value::String(t)) if t == "qwen3" => {}
            Some(other) => return Err(unsupported("model_type", other, "\"qwen3\"")),
            None => return Err(Error::Config("model_type is missing; supported: \"qwen3\"".into())),
        }
        if let Some(quantization) = fields.get("quantization_config") {
            return Err(unsupported("quantization_config", quantization, "checkpoints in float32, bfloat16 or float16"));
        }
        match fields.get("hidden_act") {
            Some(Value::String(act)) if act == "silu" => {}
            Some(other) => return Err(unsupported("hidden_act", other, "\"silu\"")),
            None => {}
        }
        let num_layers = fields.size("num_hidden_layers", 32, NUM_LAYERS_MAX)?;
        refuse_sliding_window(&fields, num_layers)?;
        let num_heads = fields.size("num_attention_heads", 32, NUM_HEADS_MAX)?;
        let num_kv_heads = match map.get("num_key_value_heads") {
            Some(Value::Null) => num_heads,
            _ => fields.size("num_key_value_heads", 32, NUM_HEADS_MAX)?,
        };
        let vocab_size = fields.size("vocab_size", 151_936, VOCAB_SIZE_MAX)?;
        // Also those that nothing here reads: a model that names tokens which it does not have is not the model it says it is.
        for (key, value) in map.iter().filter(|(key, value)| is_token_id(key) && !value.is_null()) {
            token_ids(key, value, vocab_size)?;
        }
        let config = ModelConfig {
            model_type: "qwen3".into(),
            vocab_size,
            hidden_size: fields.size("hidden_size", 4096, HIDDEN_SIZE_MAX)?,
            intermediate_size: fields.size("intermediate_size", 22_016, INTERMEDIATE_SIZE_MAX)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim: fields.size("head_dim", 128, HEAD_DIM_MAX)?,
            rms_norm_eps: fields.number("rms_norm_eps", 1e-6)? as f32,
            rope_theta: rope_theta(&fields)?,
            attention_bias: fields.flag("attention_bias", false)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            max_position_embeddings: fields.size("max_position_embeddings", 32_768, CONTEXT_TOKENS_MAX)?,
            initializer_range: fields.number("initializer_range", 0.02)? as f32,
            bos_token_id: fields.get("bos_token_id").map(|v| token_id("bos_token_id", v, vocab_size)).transpose()?,
            eos_token_ids: eos_token_ids(&fields, generation_config_json, vocab_size)?,
            dtype: dtype(&fields)?,
        };
        config.validate()?;
        Ok(config)
    }

    /// Refuses sizes and combinations that no model can have. [`ModelConfig::from_json`] has done this already.
    ///
    /// # Errors
    /// Names the first value that is wrong.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, VOCAB_SIZE_MAX),
            ("hidden_size", self.hidden_size, HIDDEN_SIZE_MAX),
            ("intermediate_size", self.intermediate_size, INTERMEDIATE_SIZE_MAX),
            ("num_hidden_layers", self.num_layers, NUM_LAYERS_MAX),
            ("num_attention_heads", self.num_heads, NUM_HEADS_MAX),
            ("num_key_value_heads", self.num_kv_heads, NUM_HEADS_MAX),
            ("head_dim", self.head_dim, HEAD_DIM_MAX),
            ("max_position_embeddings", self.max_position_embeddings, CONTEXT_TOKENS_MAX),
        ];
        for (key, size, max) in sizes {
            check_size(key, size as u64, max)?;
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(Error::Config(format!(
                "num_attention_heads {} is not a multiple of num_key_value_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::Config(format!("head_dim {} is odd; rotary embeddings turn pairs", self.head_dim)));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return Err(Error::Config(format!("rms_norm_eps {} is not a positive number", self.rms_norm_eps)));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(Error::Config(format!("rope_theta {} is not a positive number", self.rope_theta)));
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return Err(Error::Config(format!("initializer_range {} is negative or not finite", self.initializer_range)));
        }
        if let Some(&id) = self.eos_token_ids.iter().chain(&self.bos_token_id).find(|&&id| id as usize >= self.vocab_size) {
            return Err(Error::Config(format!("token id {id} is not below vocab_size {}", self.vocab_size)));
        }
        Ok(())
    }

    /// A `config.json` that transformers 5, and [`ModelConfig::from_json`], read back as this configuration.
    pub fn to_json(&self) -> String {
        let file = ConfigFile {
            architectures: ["Qwen3ForCausalLM"],
            attention_bias: self.attention_bias,
            attention_dropout: 0.0,
            bos_token_id: self.bos_token_id,
            dtype: self.dtype.map(|dtype| match dtype {
                DType::F32 => "float32",
                DType::BF16 => "bfloat16",
            }),
            eos_token_id: match self.eos_token_ids[..] {
                [] => Value::Null,
                [id] => id.into(),
                ref ids => ids.into(),
            },
            head_dim: self.head_dim,
            hidden_act: "silu",
            hidden_size: self.hidden_size,
            initializer_range: self.initializer_range,
            intermediate_size: self.intermediate_size,
            max_position_embeddings: self.max_position_embeddings,
            model_type: &self.model_type,
            num_attention_heads: self.num_heads,
            num_hidden_layers: self.num_layers,
            num_key_value_heads: self.num_kv_heads,
            rms_norm_eps: self.rms_norm_eps,
            rope_parameters: RopeParameters { rope_theta: self.rope_theta, rope_type: "default" },
            tie_word_embeddings: self.tie_word_embeddings,
            use_cache: true,
            use_sliding_window: false,
            vocab_size: self.vocab_size,
        };
        serde_json::to_string_pretty(&file).expect("plain numbers, strings and flags are JSON") + "\n"
    }
}

/// The file as transformers 5 writes it. Typed, so that f32 values are written with the fewest digits that read back.
#[derive(Serialize)]
struct ConfigFile<'a> {
    architectures: [&'a str; 1],
    attention_bias: bool,
    attention_dropout: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    bos_token_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<&'a str>,
    eos_token_id: Value,
    head_dim: usize,
    hidden_act: &'a str,
    hidden_size: usize,
    initializer_range: f32,
    intermediate_size: usize,
    max_position_embeddings: usize,
    model_type: &'a str,
    num_attention_heads: usize,
    num_hidden_layers: usize,
    num_key_value_heads: usize,
    rms_norm_eps: f32,
    rope_parameters: RopeParameters<'a>,
    tie_word_embeddings: bool,
    use_cache: bool,
    use_sliding_window: bool,
    vocab_size: usize,
}

#[derive(Serialize)]
struct RopeParameters<'a> {
    rope_theta: f64,
    rope_type: &'a str,
}

/// The keys of a JSON object, read with errors that name key and value.
struct Fields<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value of a key; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn size(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        let size = value.as_u64().ok_or_else(|| wrong_kind(key, value, "a whole number"))?;
        check_size(key, size, max)
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| wrong_kind(key, value, "a number"))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong_kind(key, value, "true or false"))
    }
}

fn parse_object(file: &str, json: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(json) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::Config(format!("{file} holds {}, not an object", shorten(&other)))),
        Err(e) => Err(Error::Config(format!("{file} is not JSON: {e}"))),
    }
}

fn check_size(key: &str, size: u64, max: usize) -> Result<usize> {
    if size == 0 || size > max as u64 {
        return Err(Error::Config(format!("{key} {size} is not between 1 and {max}")));
    }
    Ok(size as usize)
}

fn rope_theta(fields: &Fields<'_>) -> Result<f64> {
    let default = fields.number("rope_theta", 10_000.0)?;
    // Where a file has both, transformers takes `rope_scaling` if it is not empty.
    let scaling = fields.get("rope_scaling").filter(|v| v.as_object().is_none_or(|m| !m.is_empty()));
    let (key, value) = match (scaling, fields.get("rope_parameters")) {
        (Some(value), _) => ("rope_scaling", value),
        (None, Some(value)) => ("rope_parameters", value),
        (None, None) => return Ok(default),
    };
    let Value::Object(map) = value else { return Err(wrong_kind(key, value, "an object")) };
    let rope_type = map.get("rope_type").or_else(|| map.get("type"));
    // A nested object would be a rope of its own for some kind of layer.
    if rope_type.is_some_and(|t| t != "default") || map.values().any(Value::is_object) {
        return Err(unsupported(key, value, "rope_type \"default\""));
    }
    Fields { map }.number("rope_theta", default)
}

fn refuse_sliding_window(fields: &Fields<'_>, num_layers: usize) -> Result<()> {
    let refuse =
        |what: String| Err(Error::Config(format!("{what} asks for sliding windows; supported: full attention in every layer")));
    if let Some(value) = fields.get("layer_types") {
        let Value::Array(types) = value else { return Err(wrong_kind("layer_types", value, "a list")) };
        if let Some((layer, other)) = types.iter().enumerate().find(|(_, t)| *t != "full_attention") {
            return match other.as_str() {
                Some("sliding_attention") => refuse(format!("layer_types[{layer}] \"sliding_attention\"")),
                _ => Err(unsupported(&format!("layer_types[{layer}]"), other, "\"full_attention\"")),
            };
        }
        if types.len() != num_layers {
            let found = types.len();
            return Err(Error::Config(format!("layer_types has {found} entries for num_hidden_layers {num_layers}")));
        }
        return Ok(());
    }
    if !fields.flag("use_sliding_window", false)? || fields.map.get("sliding_window").is_some_and(Value::is_null) {
        return Ok(());
    }
    // Layers from `max_window_layers` on have the window.
    let first = match fields.map.get("max_window_layers") {
        None => 28,
        Some(v) => v.as_u64().ok_or_else(|| wrong_kind("max_window_layers", v, "a whole number"))?,
    };
    if first < num_layers as u64 {
        return refuse(format!("use_sliding_window true with max_window_layers {first} and num_hidden_layers {num_layers}"));
    }
    Ok(())
}

fn eos_token_ids(fields: &Fields<'_>, generation_config_json: Option<&str>, vocab_size: usize) -> Result<Vec<u32>> {
    let generation = generation_config_json.map(|json| parse_object("generation_config.json", json)).transpose()?;
    for (key, value) in generation.iter().flatten().filter(|(key, value)| is_token_id(key) && !value.is_null()) {
        token_ids(key, value, vocab_size)?;
    }
    let key = "eos_token_id";
    let from_generation = generation.as_ref().and_then(|map| Fields { map }.get(key));
    match from_generation.or_else(|| fields.get(key)) {
        None => Ok(Vec::new()),
        Some(ids) => token_ids(key, ids, vocab_size),
    }
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

fn token_id(key: &str, value: &Value, vocab_size: usize) -> Result<u32> {
    let id = value.as_u64().ok_or_else(|| wrong_kind(key, value, "a token id"))?;
    if id >= vocab_size as u64 {
        return Err(Error::Config(format!("{key} {id} is not below vocab_size {vocab_size}")));
    }
    Ok(id as u32)
}

fn dtype(fields: &Fields<'_>) -> Result<Option<DType>> {
    let (key, value) = match (fields.get("dtype"), fields.get("torch_dtype")) {
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

fn wrong_kind(key: &str, value: &Value, expected: &str) -> Error {
    Error::Config(format!("{key} is {}, not {expected}", shorten(value)))
}

fn unsupported(key: &str, value: &Value, supported: &str) -> Error {
    Error::Config(format!("{key} {} is not supported; supported: {supported}", shorten(value)))
}

/// JSON text of a value, cut so that a hostile file cannot fill the log.
fn shorten(value: &Value) -> String {
    const CHARS_MAX: usize = 200;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests;
