//! What every device must do.

use crate::{PackedStack, Result, TensorRef};

/// A device that computes the fused ops.
pub trait Backend: Send + Sync {
    /// What it is, for people: `cpu avx512-bf16, 2 threads`.
    fn description(&self) -> String;

    /// Writes `rows: [n, in_features]` as outputs `first_output..first_output + n` of a layer of packed weights.
    fn pack_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: TensorRef<'_>) -> Result<()>;

    /// Writes `columns: [in_features, out_features]` (the transposed weight) as a layer of packed weights.
    fn pack_columns(&self, stack: &mut PackedStack, layer: usize, columns: TensorRef<'_>) -> Result<()>;

    /// One AdamW step (Loshchilov & Hutter, 2019, arXiv:1711.05101) over a stack, all f32; clears `gradient`.
    fn adamw(
        &self,
        step: &AdamwStep,
        weights: &mut crate::Tensor,
        gradient: &mut crate::Tensor,
        m: &mut crate::Tensor,
        v: &mut crate::Tensor,
    ) -> Result<()>;

    /// Sum of the squares of all elements of an f32 tensor, in a fixed order, in f64.
    fn sum_squares(&self, tensor: &crate::Tensor) -> Result<f64>;
}

/// Hyperparameters of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Step size.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor on the gradient, from clipping its norm.
    pub gradient_scale: f32,
    /// Which step this is, from 1.
    pub step: u64,
}
