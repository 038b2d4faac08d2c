//! Contiguous tensors: owned ([`Tensor`]) and borrowed ([`TensorRef`], [`TensorMut`]).
//!
//! A tensor is one allocation of a backend in row-major order; what is in it only that backend can read or write. There are no strides: the only
//! view is a run of entries of the leading axis, which is all that stacked layers and packed batches need. Views borrow, so the
//! borrow checker proves that nobody reads a layer while it is being written.

use std::fmt;
use std::ops::Range;

use half::bf16;

use crate::DType;
use crate::storage::Storage;

/// Extents of a tensor, outermost first; at most [`Shape::MAX_RANK`] of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; Shape::MAX_RANK],
    rank: u8,
}

impl Shape {
    /// The largest number of axes.
    pub const MAX_RANK: usize = 4;

    /// A shape with these extents.
    ///
    /// # Panics
    /// If there are more than [`Shape::MAX_RANK`] extents.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= Self::MAX_RANK, "shape {dims:?} has more than {} axes", Self::MAX_RANK);
        let mut array = [1; Self::MAX_RANK];
        array[..dims.len()].copy_from_slice(dims);
        Shape { dims: array, rank: dims.len() as u8 }
    }

    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The extent of the leading axis (1 for a scalar).
    pub fn leading(&self) -> usize {
        self.dims[0]
    }

    /// Elements of one entry of the leading axis.
    pub fn row_len(&self) -> usize {
        self.dims().iter().skip(1).product()
    }

    fn with_leading(&self, leading: usize) -> Shape {
        let mut shape = *self;
        shape.dims[0] = leading;
        shape
    }

    fn without_leading(&self) -> Shape {
        Shape::new(&self.dims()[1..])
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// A Rust type that a [`DType`] names.
pub trait Element: Copy + Send + Sync + 'static {
    /// The dtype of this type.
    const DTYPE: DType;
    /// Widens to `f32`; exact.
    fn to_f32(self) -> f32;
    /// Rounds from `f32` to nearest even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    /// Branch-free, so that loops over rows vectorise; a NaN stays a (quiet) NaN.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        bf16::from_bits(if is_nan { quiet } else { rounded } as u16)
    }
}

/// An owned contiguous tensor. [`Memory`](crate::Memory) allocates it, fills it and reads it.
pub struct Tensor {
    shape: Shape,
    dtype: DType,
    storage: Storage,
}

impl Tensor {
    /// A tensor whose elements are at the start of `storage`.
    pub(crate) fn new(shape: Shape, dtype: DType, storage: Storage) -> Self {
        Tensor { shape, dtype, storage }
    }

    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extent of the leading axis.
    pub fn rows(&self) -> usize {
        self.shape.leading()
    }

    /// Bytes of the elements.
    pub fn size_bytes(&self) -> usize {
        self.shape.len() * self.dtype.size_bytes()
    }

    /// The same elements in another shape of as many.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub(crate) fn reshaped(self, shape: Shape) -> Tensor {
        assert_eq!(shape.len(), self.shape.len(), "a tensor of shape {} as {shape}", self.shape);
        Tensor { shape, ..self }
    }

    /// A borrowed view of the whole tensor.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { shape: self.shape, dtype: self.dtype, first: 0, storage: &self.storage }
    }

    /// A mutable view of the whole tensor.
    pub fn as_mut(&mut self) -> TensorMut<'_> {
        TensorMut { shape: self.shape, dtype: self.dtype, first: 0, storage: &mut self.storage }
    }

    /// Entry `i` of the leading axis, as a view without that axis.
    pub fn row(&self, i: usize) -> TensorRef<'_> {
        self.as_ref().row(i)
    }

    /// Entry `i` of the leading axis, as a view that writes through.
    pub fn row_mut(&mut self, i: usize) -> TensorMut<'_> {
        self.as_mut().into_row(i)
    }

    /// Entries `range` of the leading axis, as a view that writes through.
    pub fn rows_mut(&mut self, range: Range<usize>) -> TensorMut<'_> {
        self.as_mut().into_rows(range)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {})", self.dtype, self.shape)
    }
}

/// A borrowed run of a tensor.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    shape: Shape,
    dtype: DType,
    /// Elements of the storage before the first.
    first: usize,
    storage: &'a Storage,
}

impl<'a> TensorRef<'a> {
    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the elements.
    pub fn size_bytes(&self) -> usize {
        self.shape.len() * self.dtype.size_bytes()
    }

    /// Entry `i` of the leading axis, as a view without that axis.
    ///
    /// # Panics
    /// If there is no such entry.
    pub fn row(&self, i: usize) -> TensorRef<'a> {
        assert!(i < self.shape.leading(), "row {i} of a tensor of shape {}", self.shape);
        TensorRef { shape: self.shape.without_leading(), first: self.first + i * self.shape.row_len(), ..*self }
    }

    /// Entries `range` of the leading axis.
    ///
    /// # Panics
    /// If they are not there.
    pub fn rows(&self, range: Range<usize>) -> TensorRef<'a> {
        check_rows(&range, self.shape);
        let first = self.first + range.start * self.shape.row_len();
        TensorRef { shape: self.shape.with_leading(range.len()), first, ..*self }
    }

    /// The memory that the tensor lies in.
    pub(crate) fn storage(&self) -> &'a Storage {
        self.storage
    }

    /// The elements of the memory that the view covers.
    pub(crate) fn elements(&self) -> Range<usize> {
        self.first..self.first + self.shape.len()
    }
}

/// A mutable borrowed run of a tensor: what is written here is in the tensor.
pub struct TensorMut<'a> {
    shape: Shape,
    dtype: DType,
    first: usize,
    storage: &'a mut Storage,
}

impl<'a> TensorMut<'a> {
    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Entry `i` of the leading axis, as a view that writes through.
    ///
    /// # Panics
    /// If there is no such entry.
    pub fn into_row(self, i: usize) -> TensorMut<'a> {
        assert!(i < self.shape.leading(), "row {i} of a tensor of shape {}", self.shape);
        TensorMut { shape: self.shape.without_leading(), first: self.first + i * self.shape.row_len(), ..self }
    }

    /// Entries `range` of the leading axis, as a view that writes through.
    ///
    /// # Panics
    /// If they are not there.
    pub fn into_rows(self, range: Range<usize>) -> TensorMut<'a> {
        check_rows(&range, self.shape);
        let first = self.first + range.start * self.shape.row_len();
        TensorMut { shape: self.shape.with_leading(range.len()), first, ..self }
    }

    /// The same view, to be read.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { shape: self.shape, dtype: self.dtype, first: self.first, storage: self.storage }
    }

    /// The same view, borrowed for less.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { shape: self.shape, dtype: self.dtype, first: self.first, storage: self.storage }
    }

    /// The memory that the tensor lies in.
    pub(crate) fn into_storage(self) -> &'a mut Storage {
        self.storage
    }

    /// The elements of the memory that the view covers.
    pub(crate) fn elements(&self) -> Range<usize> {
        self.first..self.first + self.shape.len()
    }
}

fn check_rows(range: &Range<usize>, shape: Shape) {
    assert!(range.start <= range.end && range.end <= shape.leading(), "rows {range:?} of a tensor of shape {shape}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for bits in (0..u32::MAX).step_by(65_521 * 3) {
            let v = f32::from_bits(bits);
            let ours: bf16 = Element::from_f32(v);
            assert_eq!(ours.to_bits(), bf16::from_f32(v).to_bits(), "{v} ({bits:#x})");
        }
    }
}
