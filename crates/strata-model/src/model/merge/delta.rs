//! What an adapter adds to a matrix.

use strata_tensor::Backend;
use strata_values::{Lies, Pair};

use crate::Result;
use crate::lora::{LoraStack, PairShape};

/// The pairs of an adapter that are added to a tensor.
pub(super) struct Addend<'a> {
    pub(super) stack: &'a LoraStack,
    pub(super) shape: PairShape,
    /// Entry of the stacks for the tensor's first matrix; those of the others follow.
    pub(super) entry: usize,
    pub(super) lies: Lies,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
}

impl Addend<'_> {
    /// The pair of one of the tensor's matrices.
    pub(super) fn pair(&self, backend: &dyn Backend, matrix: usize) -> Result<Pair> {
        let LoraStack { a, b } = self.stack;
        let &Addend { shape, lies, in_features, out_features, .. } = self;
        let (a, b) = (backend.to_f32_vec(a.row(self.entry + matrix))?, backend.to_f32_vec(b.row(self.entry + matrix))?);
        Ok(Pair { a, b, scale: shape.scale, lies, in_features, out_features })
    }
}
