//! Contiguous tensors: owned ([`Tensor`]) and borrowed ([`TensorRef`], [`TensorMut`]).
//!
//! A tensor is one allocation in row-major order. There are no strides: the only view is a run of entries of the leading axis,
//! which is all that stacked layers and packed batches need. Views borrow, so the borrow checker proves that nobody
//! reads a layer while it is being written.

use std::fmt;

use half::bf16;

use crate::memory::Buffer;
use crate::{DType, Error, Result};

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

/// An owned contiguous tensor.
pub struct Tensor {
    shape: Shape,
    dtype: DType,
    buffer: Buffer,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(shape: &[usize], dtype: DType) -> Self {
        let shape = Shape::new(shape);
        Tensor { shape, dtype, buffer: Buffer::zeroed(shape.len() * dtype.size_bytes()) }
    }

    /// A tensor whose contents are whatever an earlier tensor left there: every caller overwrites all of it.
    pub(crate) fn scratch(shape: &[usize], dtype: DType) -> Self {
        let shape = Shape::new(shape);
        Tensor { shape, dtype, buffer: Buffer::recycled(shape.len() * dtype.size_bytes()) }
    }

    /// A tensor of `dtype` with these values, rounded where `dtype` is narrower than `f32`.
    ///
    /// # Errors
    /// If the number of values is not that of the shape.
    pub fn from_f32(values: &[f32], shape: &[usize], dtype: DType) -> Result<Self> {
        let mut tensor = Tensor::scratch(shape, dtype);
        tensor.as_mut().copy_from_f32(values)?;
        Ok(tensor)
    }

    /// Rows `rows` of `source`, in that order.
    ///
    /// # Errors
    /// If a row is not there.
    pub fn gather(source: &Tensor, rows: &[usize]) -> Result<Self> {
        let mut shape = source.shape;
        shape.dims[0] = rows.len();
        let mut out = Tensor::scratch(shape.dims(), source.dtype);
        let size = source.shape.row_len() * source.dtype.size_bytes();
        for (&row, out) in rows.iter().zip(out.as_mut().bytes.chunks_exact_mut(size.max(1))) {
            if row >= source.rows() {
                return Err(Error::Index { op: "gather", what: "rows", index: row, size: source.rows() });
            }
            out.copy_from_slice(source.row(row).bytes);
        }
        Ok(out)
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

    /// Bytes of memory held.
    pub fn size_bytes(&self) -> usize {
        self.shape.len() * self.dtype.size_bytes()
    }

    /// A borrowed view of the whole tensor.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { shape: self.shape, dtype: self.dtype, bytes: &self.buffer[..self.size_bytes()] }
    }

    /// A mutable view of the whole tensor.
    pub fn as_mut(&mut self) -> TensorMut<'_> {
        let len = self.size_bytes();
        TensorMut { shape: self.shape, dtype: self.dtype, bytes: &mut self.buffer[..len] }
    }

    /// Entry `i` of the leading axis, as a view without that axis.
    pub fn row(&self, i: usize) -> TensorRef<'_> {
        self.as_ref().row(i)
    }

    /// Entry `i` of the leading axis, as a view that writes through.
    pub fn row_mut(&mut self, i: usize) -> TensorMut<'_> {
        self.as_mut().into_row(i)
    }

    /// Overwrites rows `first..` with `rows`, of the same dtype.
    ///
    /// # Errors
    /// If the rows are of another width or dtype, or do not fit.
    pub fn copy_rows(&mut self, first: usize, rows: TensorRef<'_>) -> Result<()> {
        let end = first.saturating_add(rows.shape.leading());
        if rows.dtype != self.dtype {
            return Err(Error::DType { op: "copy_rows", expected: self.dtype, actual: rows.dtype });
        }
        if rows.shape.row_len() != self.shape.row_len() || end > self.rows() {
            let actual = format!("{} at row {first}", rows.shape);
            return Err(Error::Shape { op: "copy_rows", expected: self.shape.to_string(), actual });
        }
        self.rows_mut(first..end).bytes.copy_from_slice(rows.bytes);
        Ok(())
    }

    /// Rows `rows`, as a view that writes through.
    pub(crate) fn rows_mut(&mut self, rows: std::ops::Range<usize>) -> TensorMut<'_> {
        let size = self.shape.row_len() * self.dtype.size_bytes();
        let (shape, dtype) = (self.shape.with_leading(rows.len()), self.dtype);
        TensorMut { shape, dtype, bytes: &mut self.buffer[rows.start * size..rows.end * size] }
    }

    /// All elements, widened to `f32`.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        self.as_ref().to_f32_vec()
    }

    /// The elements.
    ///
    /// # Panics
    /// If the dtype is not `T`'s: ops check dtypes before they come here.
    pub(crate) fn slice<T: Element>(&self) -> &[T] {
        self.as_ref().slice()
    }

    /// The elements, mutable. Panics as [`Tensor::slice`] does.
    pub(crate) fn slice_mut<T: Element>(&mut self) -> &mut [T] {
        self.as_mut().into_slice()
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Self {
        self.as_ref().to_tensor()
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
    bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    /// A view of elements that lie elsewhere, such as in a mapped file, in the byte order of this machine.
    ///
    /// # Errors
    /// If the shape has too many axes, its size is not that of `bytes`, or `bytes` are not aligned for the dtype (the
    /// caller then has to copy them).
    pub fn from_bytes(bytes: &'a [u8], shape: &[usize], dtype: DType) -> Result<Self> {
        let size = shape.iter().try_fold(dtype.size_bytes(), |size, &n| size.checked_mul(n));
        if shape.len() > Shape::MAX_RANK || size != Some(bytes.len()) {
            let expected = format!("{shape:?} of {dtype}");
            return Err(Error::Shape { op: "from_bytes", expected, actual: format!("{} bytes", bytes.len()) });
        }
        if !(bytes.as_ptr() as usize).is_multiple_of(dtype.size_bytes()) {
            return Err(Error::Unsupported(format!("from_bytes: the address is not a multiple of the size of {dtype}")));
        }
        Ok(TensorRef { shape: Shape::new(shape), dtype, bytes })
    }

    /// The bytes of the elements, row-major, in the byte order of this machine.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Entry `i` of the leading axis, as a view without that axis.
    pub fn row(&self, i: usize) -> TensorRef<'a> {
        assert!(i < self.shape.leading(), "row {i} of a tensor of shape {}", self.shape);
        let size = self.shape.row_len() * self.dtype.size_bytes();
        TensorRef { shape: self.shape.without_leading(), dtype: self.dtype, bytes: &self.bytes[i * size..(i + 1) * size] }
    }

    /// Entries `range` of the leading axis.
    pub fn rows(&self, range: std::ops::Range<usize>) -> TensorRef<'a> {
        let size = self.shape.row_len() * self.dtype.size_bytes();
        TensorRef {
            shape: self.shape.with_leading(range.len()),
            dtype: self.dtype,
            bytes: &self.bytes[range.start * size..range.end * size],
        }
    }

    /// All elements, widened to `f32`.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.slice::<f32>().to_vec(),
            DType::BF16 => self.slice::<bf16>().iter().map(|v| v.to_f32()).collect(),
        }
    }

    /// An owned copy.
    pub fn to_tensor(&self) -> Tensor {
        let mut copy = Tensor::scratch(self.shape.dims(), self.dtype);
        copy.as_mut().bytes.copy_from_slice(self.bytes);
        copy
    }

    /// Element `i` of an f32 view.
    pub(crate) fn f32_at(&self, i: usize) -> f32 {
        self.slice::<f32>()[i]
    }

    pub(crate) fn slice<T: Element>(&self) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        // SAFETY: the bytes hold `len` elements of `T::DTYPE`, and buffers and their rows are aligned for every element type.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.shape.len()) }
    }
}

/// A mutable borrowed run of a tensor: what is written here is in the tensor.
pub struct TensorMut<'a> {
    shape: Shape,
    dtype: DType,
    bytes: &'a mut [u8],
}

impl<'a> TensorMut<'a> {
    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Entry `i` of the leading axis, as a view that writes through.
    pub fn into_row(self, i: usize) -> TensorMut<'a> {
        assert!(i < self.shape.leading(), "row {i} of a tensor of shape {}", self.shape);
        let size = self.shape.row_len() * self.dtype.size_bytes();
        TensorMut { shape: self.shape.without_leading(), dtype: self.dtype, bytes: &mut self.bytes[i * size..(i + 1) * size] }
    }

    /// Overwrites all elements, rounding where the dtype is narrower than `f32`.
    ///
    /// # Errors
    /// If the number of values is not that of the shape.
    pub fn copy_from_f32(&mut self, values: &[f32]) -> Result<()> {
        if values.len() != self.shape.len() {
            return Err(Error::Shape {
                op: "copy_from_f32",
                expected: self.shape.to_string(),
                actual: format!("{} values", values.len()),
            });
        }
        match self.dtype {
            DType::F32 => self.reborrow().into_slice::<f32>().copy_from_slice(values),
            DType::BF16 => {
                for (out, &value) in self.reborrow().into_slice::<bf16>().iter_mut().zip(values) {
                    *out = Element::from_f32(value);
                }
            }
        }
        Ok(())
    }

    /// Overwrites all elements with those that `bytes` hold, bit for bit, in the byte order of this machine.
    ///
    /// # Errors
    /// If the number of bytes is not that of the shape.
    pub fn copy_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.bytes.len() {
            let expected = format!("{} of {}", self.shape, self.dtype);
            return Err(Error::Shape { op: "copy_from_bytes", expected, actual: format!("{} bytes", bytes.len()) });
        }
        self.bytes.copy_from_slice(bytes);
        Ok(())
    }

    /// Overwrites all elements with those of a tensor of the same shape and dtype.
    pub(crate) fn copy_from(&mut self, source: &Tensor) {
        assert!(self.shape == source.shape && self.dtype == source.dtype);
        self.bytes.copy_from_slice(source.as_ref().bytes);
    }

    /// Sets every element to zero.
    pub fn fill_zero(&mut self) {
        self.bytes.fill(0);
    }

    fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { shape: self.shape, dtype: self.dtype, bytes: self.bytes }
    }

    pub(crate) fn into_slice<T: Element>(self) -> &'a mut [T] {
        assert_eq!(self.dtype, T::DTYPE);
        // SAFETY: as in `TensorRef::slice`; the mutable borrow of the bytes makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), self.shape.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_view_writes_through() {
        let mut t = Tensor::zeros(&[3, 2], DType::BF16);
        t.row_mut(1).copy_from_f32(&[1.5, -2.0]).unwrap();
        assert_eq!(t.to_f32_vec(), [0.0, 0.0, 1.5, -2.0, 0.0, 0.0]);
        assert_eq!(t.row(1).to_f32_vec(), [1.5, -2.0]);
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for bits in (0..u32::MAX).step_by(65_521 * 3) {
            let v = f32::from_bits(bits);
            let ours: bf16 = Element::from_f32(v);
            assert_eq!(ours.to_bits(), bf16::from_f32(v).to_bits(), "{v} ({bits:#x})");
        }
    }

    #[test]
    fn a_wrong_number_of_values_is_refused() {
        assert!(Tensor::from_f32(&[1.0], &[2], DType::F32).is_err());
    }

    #[test]
    fn foreign_bytes_are_viewed_only_if_they_fit_and_are_aligned() {
        let tensor = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0], &[4], DType::F32).unwrap();
        let bytes = tensor.as_ref().as_bytes();
        assert_eq!(TensorRef::from_bytes(bytes, &[2, 2], DType::F32).unwrap().row(1).to_f32_vec(), [3.0, 4.0]);
        assert!(TensorRef::from_bytes(&bytes[1..13], &[3], DType::F32).is_err());
        assert!(TensorRef::from_bytes(bytes, &[3], DType::F32).is_err());
        assert!(TensorRef::from_bytes(bytes, &[usize::MAX, 4], DType::F32).is_err());
        assert!(TensorRef::from_bytes(bytes, &[1, 1, 1, 1, 4], DType::F32).is_err());
        let mut copy = Tensor::zeros(&[4], DType::F32);
        copy.as_mut().copy_from_bytes(bytes).unwrap();
        assert_eq!(copy.to_f32_vec(), tensor.to_f32_vec());
        assert!(copy.as_mut().copy_from_bytes(&bytes[..12]).is_err());
    }
}
