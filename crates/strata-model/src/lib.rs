//! What a model is: configuration, stacked layers, LoRA adapters, architectures, checkpoints, the KV cache.

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

pub use architectures::{Observed, parameter_shapes};
pub use batch::{AdapterGroup, PackedBatch, Span};
pub use chat_template::{ChatInput, ChatTemplate};
pub use config::ModelConfig;
pub use embedded::EMBEDDED_NAME;
pub use error::{Error, Result};
pub use kv_cache::{KvCache, PAGE_TOKENS};
pub use model::{LogitsRow, Model, Targets, TokenLoss, random_parameter};
pub use source::ModelSource;
pub use tokenizer::{SpecialTokens, StreamDecoder, Tokenizer};
