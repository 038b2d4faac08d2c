//! Checkpoints on disk: the only place that knows how Hugging Face lays out files and names tensors.
//!
//! - [`write_adapter`], [`read_adapter`], [`PlannedAdapter`]: PEFT adapters; [`check_form`]: what a form of them has no words for; [`gradient_as_given`]: their gradients; [`write_optimizer`], [`read_optimizer`]: the rest of a training state.
//! - [`write_atomically`]: directories that appear whole or not at all; [`set_aside`], [`write_file_atomically`]: the same for what goes or changes.
//! - [`read_own_file`]: small files that may be anything.
//! - [`fetch_model`]: models of the Hugging Face hub, through its cache.
//! - [`safetensors`](Checkpoint): base models, one file or sharded, mapped into memory; [`CheckpointReader`] accounts for every tensor.

mod atomic;
mod hub;
mod int4;
mod limits;
mod one_writer;
mod peft;
mod reader;
mod safetensors;
mod safetensors_file;

pub use atomic::{
    Existing, NamesHeld, abandon_writes, hold_names, recover_directories, refuse_links_below, remove_empty_directories,
    set_aside, write_atomically, write_file_atomically,
};
pub use hub::{DownloadEvent, DownloadProgress, HubOptions, NoProgress, Patience, fetch_model, is_repository_name};
pub use limits::read_own_file;
pub use one_writer::abandon_files;
pub use peft::{
    AdapterFormat, OptimizerState, PeftAdapter, PlannedAdapter, check_form, gradient_as_given, has_optimizer, named_base_model,
    read_adapter, read_optimizer, write_adapter, write_optimizer,
};
pub use reader::CheckpointReader;
pub use safetensors::Checkpoint;
pub use safetensors_file::{Sink, WriteTensor, WrittenTensor, write_safetensors};
pub use strata_values::{Converted, SourceDType, SourceTensor};

pub(crate) use int4::{Int4Matrix, Int4Tensors};
pub(crate) use limits::{JsonInto, json_memory_bytes, open_own, open_regular, read_text, read_text_if_exists};
pub(crate) use one_writer::write_by_one;
pub(crate) use safetensors::{FileIdentity, INDEX_FILE, SINGLE_FILE, StoredTensor, source_dtype};
