//! `config.json`: what kind of model a checkpoint holds.
//!
//! [`ModelConfig`] has what every model has, and the family's own part as its architecture reads it ([`Family`]). Each family is read as its configuration class in
//! transformers reads it, defaults included, in the layout of version 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of version 5
//! (`rope_parameters`, `dtype`). A setting that this build does not compute is refused: a model that runs gives the numbers its authors meant.

pub(crate) mod fields;
pub(crate) mod quantization;
mod rope;
mod shapes;

use serde_json::{Map, Value};
use strata_tensor::DType;

use crate::architectures::{self, Family, VisionConfig};
use crate::vision::ImageProcessor;
use crate::{Error, Result};
use fields::{Fields, check_size, parse_object};

pub use quantization::Int4Form;
pub(crate) use quantization::Int4Layout;
pub use rope::{LongRope, Rope, RopeScaling, RopeTable, Yarn};

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
/// The most experts of a layer that are accepted.
pub const EXPERTS_MAX: usize = 1024;
/// The most experts of all layers that are accepted: each is named three times before a file is looked at.
pub const ALL_EXPERTS_MAX: usize = 1 << 16;
/// The widest attention head that is accepted.
pub const HEAD_DIM_MAX: usize = 1024;
/// The most tokens that a causal convolution may see.
pub const CONVOLUTION_TOKENS_MAX: usize = 64;
/// The longest context that is accepted.
pub const CONTEXT_TOKENS_MAX: usize = 1 << 24;
/// The most end-of-sequence tokens that are accepted.
pub const EOS_TOKENS_MAX: usize = 64;

/// Everything about a model that its forward pass needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
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
    /// How matrices lie in the checkpoint that lie there in four bits; `None`: none do.
    pub int4: Option<Int4Form>,
    /// What the model's family has of its own.
    pub family: Family,
}

impl ModelConfig {
    /// Reads `config.json`, and `generation_config.json` where the checkpoint has one (its `eos_token_id` wins).
    ///
    /// # Errors
    /// If the text is not JSON, a value is missing, of the wrong kind, or out of its limits, or the model needs something that
    /// is not supported. The error names the key and the value.
    pub fn from_json(config_json: &str, generation_config_json: Option<&str>) -> Result<Self> {
        let map = parse_object("config.json", config_json)?;
        let generation = generation_config_json.map(|json| parse_object("generation_config.json", json)).transpose()?;
        let (fields, generation) = (Fields { map: &map }, generation.as_ref().map(|map| Fields { map }));
        let config = architectures::read_config(&fields, generation.as_ref())?;
        config.validate()?;
        Ok(config)
    }

    /// Hugging Face's `model_type`.
    pub fn model_type(&self) -> &'static str {
        self.family.model_type()
    }

    /// Refuses sizes and combinations that no model can have. [`ModelConfig::from_json`] has done this already.
    ///
    /// # Errors
    /// Names the first value that is wrong.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, VOCAB_SIZE_MAX),
            ("hidden_size", self.hidden_size, HIDDEN_SIZE_MAX),
            ("num_hidden_layers", self.num_layers, NUM_LAYERS_MAX),
            ("max_position_embeddings", self.max_position_embeddings, CONTEXT_TOKENS_MAX),
        ];
        for (key, size, max) in sizes {
            check_size(key, size as u64, max)?;
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return Err(Error::Config(format!("rms_norm_eps {} is not a positive number", self.rms_norm_eps)));
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return Err(Error::Config(format!("initializer_range {} is negative or not finite", self.initializer_range)));
        }
        if let Some(&id) = self.eos_token_ids.iter().chain(&self.bos_token_id).find(|&&id| id as usize >= self.vocab_size) {
            return Err(Error::Config(format!("token id {id} is not below vocab_size {}", self.vocab_size)));
        }
        self.family.config().validate(self)
    }

    /// The token that stands for a part of a picture; `None` if the model reads text alone.
    pub fn image_token_id(&self) -> Option<u32> {
        self.family.config().image_token()
    }

    /// The part that sees; `None` if the model reads text alone.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.family.config().vision()
    }

    /// Whether transformers has models of this kind as a part of a composite only, never by themselves.
    pub fn is_composite(&self) -> bool {
        self.vision().is_some()
    }

    /// How pictures are cut up, unless a file of the model says otherwise; `None` if it reads text alone.
    pub fn image_processor(&self) -> Option<ImageProcessor> {
        self.vision().map(VisionConfig::processor)
    }

    /// A `config.json` that transformers 5, and [`ModelConfig::from_json`], read back as this configuration.
    pub fn to_json(&self) -> String {
        let mut map = Map::new();
        let mut set = |key: &str, value: Value| map.insert(key.into(), value);
        set("bos_token_id", self.bos_token_id.into());
        set(
            "eos_token_id",
            match self.eos_token_ids[..] {
                [] => Value::Null,
                [id] => id.into(),
                ref ids => ids.into(),
            },
        );
        if let Some(dtype) = self.dtype {
            let name = match dtype {
                DType::F32 => "float32",
                DType::BF16 => "bfloat16",
            };
            set("dtype", name.into());
        }
        set("hidden_act", "silu".into());
        set("hidden_size", self.hidden_size.into());
        set("initializer_range", short(self.initializer_range));
        set("max_position_embeddings", self.max_position_embeddings.into());
        set("model_type", self.model_type().into());
        set("num_hidden_layers", self.num_layers.into());
        set("rms_norm_eps", short(self.rms_norm_eps));
        set("tie_word_embeddings", self.tie_word_embeddings.into());
        set("use_cache", true.into());
        set("vocab_size", self.vocab_size.into());
        self.family.write(self, &mut map);
        serde_json::to_string_pretty(&map).expect("plain numbers, strings and flags are JSON") + "\n"
    }
}

/// A number with the fewest digits that read back as it.
pub(crate) fn short(value: f32) -> Value {
    let shortest: f64 = value.to_string().parse().expect("what a number is written as is a number");
    shortest.into()
}

#[cfg(test)]
mod tests;
