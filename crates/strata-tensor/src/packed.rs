//! Weights of linear layers in the layout that matmuls stream.
//!
//! A weight `[out, in]` is cut into panels of [`PANEL`] outputs. In bf16 a panel is `[in/2][PANEL][2]`: two consecutive inputs of
//! one output lie together, as the pairwise dot-product instructions want them; in f32 it is `[in][PANEL]`. The last panel is only as wide as
//! it must be (a multiple of [`LANES`]). Inputs are padded to even with zeros. The forward pass streams panels
//! front to back, for one row as for a thousand; the backward pass transposes blocks of them in cache. There is no second copy.

use crate::DType;
use crate::memory::Buffer;

/// Outputs in a full panel.
pub(crate) const PANEL: usize = 64;
/// Outputs in one vector register of the widest kernels; panels are padded to this.
pub(crate) const LANES: usize = 16;

/// A stack of packed weights `[num_layers]` of shape `[out_features, in_features]` each.
pub struct PackedStack {
    num_layers: usize,
    in_features: usize,
    out_features: usize,
    dtype: DType,
    buffer: Buffer,
}

impl PackedStack {
    /// A stack of zero weights. The memory is not touched until it is packed into.
    pub fn zeros(num_layers: usize, in_features: usize, out_features: usize, dtype: DType) -> Self {
        let layer_bytes = layer_len(in_features, out_features) * dtype.size_bytes();
        PackedStack { num_layers, in_features, out_features, dtype, buffer: Buffer::zeroed(num_layers * layer_bytes) }
    }

    /// Bytes that a stack takes, padding included.
    pub fn bytes(num_layers: usize, in_features: usize, out_features: usize, dtype: DType) -> usize {
        num_layers * layer_len(in_features, out_features) * dtype.size_bytes()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Bytes of memory held.
    pub fn size_bytes(&self) -> usize {
        Self::bytes(self.num_layers, self.in_features, self.out_features, self.dtype)
    }

    /// The weights of one layer.
    pub fn layer(&self, layer: usize) -> PackedRef<'_> {
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
pub struct PackedRef<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

impl PackedRef<'_> {
    /// Input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Output features.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// A packed weight, borrowed to be written.
pub(crate) struct PackedMut<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a mut [u8],
}
