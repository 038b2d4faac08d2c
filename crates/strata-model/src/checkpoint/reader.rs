//! Accounting for the tensors of a checkpoint: every parameter filled, every tensor used, and all that is wrong in one message.

use std::collections::BTreeSet;

use safetensors::Dtype;

use super::safetensors::list_names;
use super::{Checkpoint, SourceTensor};
use crate::{Error, Result};

/// Hands out the tensors of a checkpoint and remembers what was missing, misshapen or left over.
pub struct CheckpointReader<'a> {
    checkpoint: &'a Checkpoint,
    unused: BTreeSet<&'a str>,
    missing: Vec<String>,
    malformed: Vec<String>,
}

impl<'a> CheckpointReader<'a> {
    /// Begins with every tensor unused.
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        CheckpointReader { checkpoint, unused: checkpoint.names().collect(), missing: Vec::new(), malformed: Vec::new() }
    }

    /// The tensor of a parameter. If it is absent, has another shape or a dtype that cannot be read, this returns `None` and
    /// [`CheckpointReader::finish`] will say so.
    pub fn require(&mut self, name: &str, shape: &[usize]) -> Option<SourceTensor<'a>> {
        self.unused.remove(name);
        match self.checkpoint.tensor(name) {
            Ok(None) => self.missing.push(name.into()),
            Err(Error::Checkpoint { message, .. }) => self.malformed.push(message),
            Err(other) => self.malformed.push(other.to_string()),
            Ok(Some(tensor)) if tensor.shape != shape => {
                self.malformed.push(format!("tensor {name} has shape {:?}, expected {shape:?}", tensor.shape));
            }
            Ok(Some(tensor)) => return Some(tensor),
        }
        None
    }

    /// The number that a tensor of one u64 holds. Failures are remembered as for [`CheckpointReader::require`].
    pub(crate) fn require_count(&mut self, name: &str) -> Option<u64> {
        self.unused.remove(name);
        match self.checkpoint.count(name) {
            Some(Ok(count)) => return Some(count),
            Some(Err(message)) => self.malformed.push(message),
            None => self.missing.push(name.into()),
        }
        None
    }

    /// The bytes of a tensor of one of these dtypes and this shape. Failures are remembered as for [`CheckpointReader::require`].
    pub(crate) fn require_plain(&mut self, name: &str, dtypes: &[Dtype], shape: &[usize]) -> Option<&'a [u8]> {
        self.unused.remove(name);
        match self.checkpoint.plain(name, dtypes, shape) {
            Some(Ok(bytes)) => return Some(bytes),
            Some(Err(message)) => self.malformed.push(message),
            None => self.missing.push(name.into()),
        }
        None
    }

    /// As [`Checkpoint::forget_all`].
    pub(super) fn forget(&self, name: &str) {
        self.checkpoint.forget_all(name);
    }

    /// Remembers what is wrong with a tensor beside its dtype and shape.
    pub(crate) fn refuse(&mut self, problem: String) {
        self.malformed.push(problem);
    }

    /// Whether there is a tensor of this name that nobody has asked for, and all its bytes are zero.
    pub(crate) fn is_zero(&self, name: &str) -> bool {
        let tensor = self.checkpoint.tensor(name).ok().flatten();
        self.unused.contains(name) && tensor.is_some_and(|tensor| tensor.bytes.iter().all(|&byte| byte == 0))
    }

    /// Whether the checkpoint holds a tensor of this name. Does not count as its use.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    /// The shape of a tensor, if there is one of this name. Does not count as its use.
    pub(crate) fn shape(&self, name: &str) -> Option<&'a [usize]> {
        self.checkpoint.shape(name)
    }

    /// The first tensor that nobody has asked for whose name ends like this.
    pub(crate) fn unused_ending(&self, last: &str) -> Option<&str> {
        self.unused.iter().map(|name| &**name).find(|name| name.ends_with(last))
    }

    /// Marks a tensor that is known and not needed, such as the `lm_head.weight` of a tied model, if it is there.
    pub fn ignore(&mut self, name: &str) {
        self.unused.remove(name);
    }

    /// As [`CheckpointReader::ignore`], of all tensors whose names begin with this.
    pub(crate) fn ignore_under(&mut self, prefix: &str) {
        self.unused.retain(|name| !name.starts_with(prefix));
    }

    /// Ends the accounting.
    ///
    /// # Errors
    /// If anything was missing or malformed, or a tensor was neither required nor ignored. The message names them, or the first of very many.
    pub fn finish(self) -> Result<()> {
        /// Misshapen tensors that are described; where there are more, one reason explains them all.
        const MALFORMED_MAX: usize = 100;
        let mut problems = Vec::with_capacity(self.malformed.len());
        let mut told = BTreeSet::new();
        problems.extend(self.malformed.iter().filter(|problem| told.insert(*problem)).cloned());
        if let Some(more @ 1..) = problems.len().checked_sub(MALFORMED_MAX) {
            problems.truncate(MALFORMED_MAX);
            problems.push(format!("{more} more like these"));
        }
        if !self.missing.is_empty() {
            // Two of a model's parameters may be one tensor of the file.
            let mut told = BTreeSet::new();
            let names: Vec<_> = self.missing.iter().map(String::as_str).filter(|name| told.insert(*name)).collect();
            problems.push(format!("missing tensors: {}", list_names(&names)));
        }
        if !self.unused.is_empty() {
            let names: Vec<_> = self.unused.into_iter().collect();
            problems.push(format!("tensors that the model has no use for: {}", list_names(&names)));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(self.checkpoint.error(problems.join("; ")))
    }
}
