//! What a model is: configuration, stacked layers, LoRA adapters, architectures, checkpoints, the KV cache.
//!
//! Map:
//! - [`model`](Model): the passes over a loaded model, and what they take of memory; `architectures`: one file each; [`batch`]: their input.
//! - [`config`], [`source`](ModelSource), [`checkpoint`]: what a model is read from, none of which is believed.
//! - [`lora`], [`kv_cache`](KvCache): adapters, and keys and values of sequences being sampled.
//! - [`tokenizer`](Tokenizer), [`chat_template`](ChatTemplate): between text and tokens.
//!
//! Invariants:
//! - A model that loads computes finite numbers, and what its files say; all else is refused by the name of what is wrong.
//! - A pass takes no more memory than [`Model::train_bytes_per_token`] says, and holds no lock while it lets others run.

mod architectures;
pub mod batch;
mod chat_template;
pub mod checkpoint;
pub mod config;
mod embedded;
mod error;
mod kv_cache;
pub mod lora;
mod model;
mod source;
mod tokenizer;
pub mod vision;

pub use architectures::{
    AttentionConfig, AttentionWork, DeepseekV3Config, DenseConfig, ExpertWork, Family, FileTensor, GptOssConfig, ImageBytes,
    ImageFeatures, Initial, LatentConfig, LinearWork, MatrixShape, MixerWork, MlpConfig, MoeConfig, MoeLayout, NormWeights,
    Observed, ParameterShape, Qwen3_5Config, Qwen3_5Mlp, Qwen3MoeConfig, Qwen3VlConfig, Qwen3VlText, Router, SigmoidRouter,
    VisionConfig, Work, file_tensors, lora_modules, parameter_shapes, weight_bytes,
};
pub use batch::{AdapterGroup, Held, PackedBatch, PlacedImage, Span};
pub use chat_template::{ChatInput, ChatTemplate};
pub use config::{Int4Form, ModelConfig};
pub use embedded::EMBEDDED_NAME;
pub use error::{Error, Result};
pub use kv_cache::{KvCache, PAGE_TOKENS};
pub use model::{Keeping, Model, Targets, TokenLoss, UnwrittenCopy, random_parameter, write_merged};
pub use source::ModelSource;
pub use tokenizer::{LateTokenizer, SpecialTokens, StreamDecoder, Tokenizer};
