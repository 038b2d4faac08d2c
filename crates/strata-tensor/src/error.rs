//! What can go wrong with a number: a shape, a dtype or an index, named with its value, or memory that is not to be had.

use crate::DType;

/// An operation was given tensors that do not fit it, or the device could not do it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two shapes that had to agree do not.
    #[error("{op}: expected shape {expected}, got {actual}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// The shape it needed, as text such as `[tokens, 1024]`.
        expected: String,
        /// The shape it was given.
        actual: String,
    },
    /// A tensor has the wrong element type.
    #[error("{op}: expected dtype {expected}, got {actual}")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// The dtype it needed.
        expected: DType,
        /// The dtype it was given.
        actual: DType,
    },
    /// An index is past the end of what it indexes.
    #[error("{op}: index {index} is out of range for {what} of size {size}")]
    Index {
        /// The operation that refused.
        op: &'static str,
        /// What was indexed, such as `vocabulary`.
        what: &'static str,
        /// The offending index.
        index: usize,
        /// The number of entries there are.
        size: usize,
    },
    /// A size or combination that this build does not support.
    #[error("{0}")]
    Unsupported(String),
    /// The device has no memory for this. Nothing was changed.
    #[error("out of memory: {bytes} bytes are not to be had")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A tensor, weights or pages that another backend allocated.
    #[error("memory of another device")]
    ForeignMemory,
    /// Whoever was asked between two parts of a pass said to stop.
    #[error("the pass was interrupted")]
    Interrupted,
}

/// The result of every fallible tensor operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
