//! What ops of the gated delta rule are told: shapes, parameters, sequences and their slots.

use std::ops::Range;

use crate::{Tensor, TensorRef};

/// Shapes of a layer of gated delta rule (Yang et al., 2024, arXiv:2412.06464), as Qwen3.5 and Qwen3-Next have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaGeometry {
    /// Query and key heads.
    pub k_heads: usize,
    /// Value heads; a multiple of `k_heads`, each key head serving as many consecutive ones.
    pub v_heads: usize,
    /// Width of a query or key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Tokens that the causal convolution sees, its own among them.
    pub kernel: usize,
}

impl DeltaGeometry {
    /// Columns of all queries, which are as many as those of all keys.
    pub fn key_width(&self) -> usize {
        self.k_heads * self.k_dim
    }

    /// Columns of all values, and of the gate.
    pub fn value_width(&self) -> usize {
        self.v_heads * self.v_dim
    }

    /// Channels of the convolution: queries, then keys, then values. The first columns of the fused projection.
    pub fn conv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// The columns of the fused projection that gate the output (`in_proj_z`).
    pub fn z_columns(&self) -> Range<usize> {
        self.conv_width()..self.conv_width() + self.value_width()
    }

    /// The columns of the fused projection that `beta` comes of (`in_proj_b`), one for each value head.
    pub fn b_columns(&self) -> Range<usize> {
        let first = self.z_columns().end;
        first..first + self.v_heads
    }

    /// The columns of the fused projection that the decay comes of (`in_proj_a`), one for each value head.
    pub fn a_columns(&self) -> Range<usize> {
        let first = self.b_columns().end;
        first..first + self.v_heads
    }

    /// Numbers of the states of a sequence: what it has to remember, however long it is.
    pub fn state_width(&self) -> usize {
        self.v_heads * self.k_dim * self.v_dim
    }

    /// Columns of the fused projection.
    pub fn projection_width(&self) -> usize {
        self.a_columns().end
    }
}

/// One sequence of a packed batch, as the gated delta rule sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaSpan {
    /// Its tokens in the batch.
    pub tokens: Range<usize>,
    /// Tokens that its state has seen.
    pub past: usize,
    /// Where its state is kept; `None` for a whole sequence that leaves none.
    pub slot: Option<u32>,
}

/// The frozen parameters of a layer of gated delta rule, all f32.
#[derive(Clone, Copy)]
pub struct DeltaParams<'a> {
    /// Of the causal convolution, oldest token first: `[conv_width, kernel]`.
    pub conv: TensorRef<'a>,
    /// Logarithms of the rates of decay: `[v_heads]`.
    pub a_log: TensorRef<'a>,
    /// Added to the columns that the decay comes of: `[v_heads]`.
    pub dt_bias: TensorRef<'a>,
}

/// What the gated delta rule reads, all f32.
#[derive(Debug)]
pub struct DeltaInputs {
    /// `[tokens, k_heads * k_dim]`: of length `1/√k_dim` each.
    pub q: Tensor,
    /// `[tokens, k_heads * k_dim]`: of length 1 each.
    pub k: Tensor,
    /// `[tokens, v_heads * v_dim]`.
    pub v: Tensor,
    /// Logarithms of the decay, `[tokens, v_heads]`.
    pub g: Tensor,
    /// How much of what a key recalls is replaced, `[tokens, v_heads]`.
    pub beta: Tensor,
}
