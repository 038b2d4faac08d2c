//! Weights of linear layers in host memory, in the layout that matmuls stream.
//!
//! A weight `[out, in]` is cut into panels of [`PANEL`] outputs. In bf16 a panel is `[in/2][PANEL][2]`: two consecutive inputs of
//! one output lie together, as the pairwise dot-product instructions want them; in f32 it is `[in][PANEL]`. The last panel is only as wide as
//! it must be, see [`dense_width`]. Inputs are padded to even with zeros. The forward pass streams panels
//! front to back, for one row as for a thousand; the backward pass transposes blocks of them in cache. There is no second copy.
//! Weights that are stored in fewer bits have panels of their own kinds, see `matmul::int8` and `matmul::int4`.

use super::matmul::{int4, int8};
use super::memory::{ALIGN_BYTES, Buffer, InUse};
use crate::{DType, Error, Result, SharedBytes, WeightFormat, WeightStorage};

/// Outputs in a full panel.
pub(crate) const PANEL: usize = 64;
/// Outputs in one vector register of the widest kernels, which read whole ones.
pub(crate) const LANES: usize = 16;

/// Matrices begin at lines of the cache.
const LINE_BYTES: usize = 64;

/// Outputs that a panel of dense weights is padded to. Half a vector: pairs of a small rank are read from memory for each token, and padding is read with them. Who reads a whole vector at the
/// end reads on into the next step, and behind the last into what a matrix has there for it.
pub(crate) fn dense_width(columns: usize) -> usize {
    columns.next_multiple_of(LANES / 2)
}

/// A stack of packed weights `[num_layers]` of shape `[out_features, in_features]` each.
pub(crate) struct PackedStack {
    in_features: usize,
    out_features: usize,
    format: WeightFormat,
    memory: Memory,
}

/// Where the layers lie, one after another.
enum Memory {
    Own(Buffer),
    /// The host's, to be read alone.
    Shared(SharedBytes, #[expect(dead_code, reason = "it counts while it lives")] InUse),
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Own(buffer) => buffer,
            Memory::Shared(bytes, _) => bytes,
        }
    }
}

impl PackedStack {
    /// A stack of zero weights. The memory is not touched until it is packed into.
    pub(crate) fn zeros(num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> Result<Self> {
        let buffer = Buffer::zeroed(Self::bytes(num_layers, in_features, out_features, format))?;
        Ok(Self::of([num_layers, in_features, out_features], format, buffer))
    }

    /// As [`PackedStack::zeros`] of each `[num_layers, in_features, out_features]`, all in one allocation.
    pub(crate) fn zeros_together(shapes: &[[usize; 3]], format: WeightFormat) -> Result<Vec<Self>> {
        let bytes: Vec<usize> =
            shapes.iter().map(|&[layers, inputs, outputs]| Self::bytes(layers, inputs, outputs, format)).collect();
        let buffers = Buffer::zeroed_together(&bytes)?;
        Ok(shapes.iter().zip(buffers).map(|(&shape, buffer)| Self::of(shape, format, buffer)).collect())
    }

    fn of([_, in_features, out_features]: [usize; 3], format: WeightFormat, buffer: Buffer) -> Self {
        PackedStack { in_features, out_features, format, memory: Memory::Own(buffer) }
    }

    /// A stack that lies in memory of the host.
    ///
    /// # Errors
    /// If that is not as long as the stack, or does not begin at the alignment of a buffer.
    pub(crate) fn over(
        num_layers: usize,
        in_features: usize,
        out_features: usize,
        format: WeightFormat,
        bytes: SharedBytes,
    ) -> Result<Self> {
        let expected = Self::bytes(num_layers, in_features, out_features, format);
        let misplaced = bytes.as_ptr() as usize % ALIGN_BYTES;
        if bytes.len() != expected || misplaced != 0 {
            let actual = format!("{} bytes, {misplaced} after such a multiple", bytes.len());
            let expected = format!("{expected} bytes from a multiple of {ALIGN_BYTES} on");
            return Err(Error::Shape { op: "packed_over", expected, actual });
        }
        // It is memory that freed buffers cannot have.
        let in_use = InUse::new(bytes.len());
        Ok(PackedStack { in_features, out_features, format, memory: Memory::Shared(bytes, in_use) })
    }

    /// Bytes that a stack takes, padding included.
    pub(crate) fn bytes(num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> usize {
        layer_bytes(in_features, out_features, format).saturating_mul(num_layers)
    }

    /// The weights of one layer.
    pub(crate) fn layer(&self, layer: usize) -> PackedRef<'_> {
        let size = layer_bytes(self.in_features, self.out_features, self.format);
        PackedRef {
            in_features: self.in_features,
            out_features: self.out_features,
            dtype: self.format.compute,
            storage: self.format.storage,
            bytes: &self.memory.bytes()[layer * size..(layer + 1) * size],
        }
    }

    /// All layers, as they lie, and what a buffer has beyond them.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// As [`PackedStack::as_bytes`], to be written.
    ///
    /// # Errors
    /// If they lie in memory of the host.
    pub(crate) fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        match &mut self.memory {
            Memory::Own(buffer) => Ok(buffer),
            Memory::Shared(..) => Err(Error::Unsupported("weights that lie in memory of the host do not change".into())),
        }
    }

    /// The weights of each layer, one after another, to be written; behind the last, of what the buffer has beyond them.
    ///
    /// # Errors
    /// As [`PackedStack::as_bytes_mut`].
    pub(crate) fn layers_mut(&mut self) -> Result<impl Iterator<Item = PackedMut<'_>>> {
        let &mut PackedStack { in_features, out_features, format, .. } = self;
        let size = layer_bytes(in_features, out_features, format);
        let of = move |bytes| PackedMut { in_features, out_features, dtype: format.compute, storage: format.storage, bytes };
        Ok(self.as_bytes_mut()?.chunks_exact_mut(size.max(1)).map(of))
    }

    /// The weights of one layer, to be written.
    ///
    /// # Errors
    /// As [`PackedStack::as_bytes_mut`].
    pub(crate) fn layer_mut(&mut self, layer: usize) -> Result<PackedMut<'_>> {
        let &mut PackedStack { in_features, out_features, format, .. } = self;
        let size = layer_bytes(in_features, out_features, format);
        let bytes = &mut self.as_bytes_mut()?[layer * size..(layer + 1) * size];
        Ok(PackedMut { in_features, out_features, dtype: format.compute, storage: format.storage, bytes })
    }
}

/// Bytes of one packed matrix, padding included.
fn layer_bytes(in_features: usize, out_features: usize, format: WeightFormat) -> usize {
    match format.storage {
        WeightStorage::Dense => {
            let width = dense_width(out_features);
            let bytes =
                in_features.saturating_mul(format.compute.size_bytes()).div_ceil(4).saturating_mul(width).saturating_mul(4);
            let read_beyond = (width.next_multiple_of(LANES) - width) * 4;
            bytes.saturating_add(read_beyond).checked_next_multiple_of(LINE_BYTES).unwrap_or(usize::MAX)
        }
        WeightStorage::Int8 => int8::matrix_bytes(in_features, out_features),
        WeightStorage::Int4(group) => int4::matrix_bytes(group, in_features, out_features),
    }
}

/// A packed weight `[out_features, in_features]`, borrowed.
#[derive(Clone, Copy)]
pub(crate) struct PackedRef<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) storage: WeightStorage,
    pub(crate) bytes: &'a [u8],
}

/// A packed weight, borrowed to be written.
pub(crate) struct PackedMut<'a> {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) storage: WeightStorage,
    pub(crate) bytes: &'a mut [u8],
}
