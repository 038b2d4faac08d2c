//! What can go wrong with a model, a checkpoint or an adapter.

use std::path::PathBuf;

/// Every error of this crate; the text is meant for the user and names the value that is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` asks for something this build does not compute.
    #[error("config.json: {0}")]
    Config(String),
    /// A checkpoint's files do not hold what the model needs, or hold what it does not know.
    #[error("checkpoint {path}: {message}")]
    Checkpoint {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// An adapter has an impossible shape.
    #[error("lora: {0}")]
    Lora(String),
    /// A batch refers to something that is not there.
    #[error("batch: {0}")]
    Batch(String),
    /// The tokenizer or chat template cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The hub cannot be reached, or does not have the model.
    #[error("hub: {0}")]
    Hub(String),
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Whoever was asked between two parts of a pass said to stop.
    #[error("the pass was interrupted")]
    Interrupted,
    /// A tensor operation refused its inputs.
    #[error(transparent)]
    Tensor(strata_tensor::Error),
}

impl From<strata_tensor::Error> for Error {
    fn from(error: strata_tensor::Error) -> Self {
        match error {
            strata_tensor::Error::Interrupted => Error::Interrupted,
            other => Error::Tensor(other),
        }
    }
}

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A text that quotes a file, cut: a hostile one must fill neither a log nor an answer.
pub(crate) fn cut(mut text: String, chars_max: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(chars_max) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}
