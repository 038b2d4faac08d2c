//! Checkpoints on disk: the only place that knows how Hugging Face lays out files and names tensors.
//!
//! - [`safetensors`](Checkpoint): base models, one file or sharded, mapped into memory; [`CheckpointReader`] accounts for every tensor.

mod limits;
mod reader;
mod safetensors;
mod source_tensor;

pub use reader::CheckpointReader;
pub use safetensors::Checkpoint;
pub use source_tensor::{Converted, SourceDType, SourceTensor};

pub(crate) use limits::{read_text, read_text_if_exists};
