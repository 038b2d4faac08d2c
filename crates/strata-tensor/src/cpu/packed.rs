//! Weights of linear layers in host memory, in the layout that matmuls stream.
//!
//! A weight `[out, in]` is cut into panels of [`PANEL`] outputs. In bf16 a panel is `[in/2][PANEL][2]`: two consecutive inputs of
//! one output lie together, as the pairwise dot-product instructions want them; in f32 it is `[in][PANEL]`. The last panel is only as wide as
//! it must be (a multiple of [`LANES`]). Inputs are padded to even with zeros. The forward pass streams panels
//! front to back, for one row as for a thousand; the backward pass transposes blocks of them in cache. There is no second copy.

use super::memory::Buffer;
use crate::{DType, Result};

/// Outputs in a full panel.
pub(crate) const PANEL: usize = 64;
/// Outputs in one vector register of the widest kernels; panels are padded to this.
pub(crate) const LANES: usize = 16;

/// A stack of packed weights `[num_layers]` of shape `[out_features, in_features]` each.
pub(crate) struct PackedStack {
    in_features: usize,
    out_features: usize,
    dtype: DType,
    buffer: Buffer,
}

impl PackedStack {
    /// A stack of zero weights. The memory is not touched until it is packed into.
    pub(crate) fn zeros(num_layers: usize, in_features: usize, out_features: usize, dtype: DType) -> Result<Self> {
        let buffer = Buffer::zeroed(Self::bytes(num_layers, in_features, out_features, dtype))?;
        Ok(PackedStack { in_features, out_features, dtype, buffer })
    }

    /// Bytes that a stack takes, padding included.
    pub(crate) fn bytes(num_layers: usize, in_features: usize, out_features: usize, dtype: DType) -> usize {
        layer_len(in_features, out_features).saturating_mul(num_layers).saturating_mul(dtype.size_bytes())
    }

    /// The weights of one layer.
    pub(crate) fn layer(&self, layer: usize) -> PackedRef<'_> {
        let size = layer_len(self.in_features, self.out_features) * self.dtype.size_bytes();
        PackedRef {
            in_features: self.in_features,
            out_features: self.out_features,
            dtype: self.dtype,
            bytes: &self.buffer[layer * size..(layer + 1) * size],
        }
    }

    /// The weights of one layer, to be written.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> PackedMut<'_> {
        let size = layer_len(self.in_features, self.out_features) * self.dtype.size_bytes();
        PackedMut {
            in_features: self.in_features,
            out_features: self.out_features,
            dtype: self.dtype,
            bytes: &mut self.buffer[layer * size..(layer + 1) * size],
        }
    }
}

/// Elements of one packed matrix, padding included.
pub(crate) fn layer_len(in_features: usize, out_features: usize) -> usize {
    in_features.next_multiple_of(2) * out_features.next_multiple_of(LANES)
}

/// A packed weight `[out_features, in_features]`, borrowed.
#[derive(Clone, Copy)]
pub(crate) struct PackedRef<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

/// A packed weight, borrowed to be written.
pub(crate) struct PackedMut<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a mut [u8],
}
