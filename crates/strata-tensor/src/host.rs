//! Numbers in the memory of the host: what is read from files before a backend has it, and what a backend has given back.

use std::ops::{Deref, Range};
use std::sync::Arc;

use half::bf16;

use crate::{DType, Element, Error, Result, Shape};

/// Elements that lie in host memory, such as in a mapped file, in the byte order of this machine; aligned for their dtype.
#[derive(Clone, Copy, Debug)]
pub struct HostRef<'a> {
    shape: Shape,
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> HostRef<'a> {
    /// These bytes as elements.
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
        Ok(HostRef { shape: Shape::new(shape), dtype, bytes })
    }

    /// These values as f32 of this shape.
    ///
    /// # Errors
    /// If the number of values is not that of the shape, or the shape has too many axes.
    pub fn from_f32(values: &'a [f32], shape: &[usize]) -> Result<Self> {
        Self::from_bytes(f32_bytes(values), shape, DType::F32)
    }

    /// The bytes of the elements, row-major.
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

    /// All elements, widened to `f32`.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.slice::<f32>().to_vec(),
            DType::BF16 => self.slice::<bf16>().iter().map(|v| v.to_f32()).collect(),
        }
    }

    /// The elements.
    ///
    /// # Panics
    /// If the dtype is not `T`'s.
    pub(crate) fn slice<T: Element>(&self) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        // SAFETY: the bytes hold `len` elements of `T::DTYPE` and are aligned for them, both checked in `from_bytes`.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.shape.len()) }
    }
}

/// Elements in host memory of their own.
#[derive(Clone, Debug)]
pub struct HostTensor {
    shape: Shape,
    dtype: DType,
    /// Aligned for every dtype; the last may be used in part.
    words: Vec<u32>,
}

impl HostTensor {
    /// Zeros.
    pub fn zeros(shape: &[usize], dtype: DType) -> Self {
        let shape = Shape::new(shape);
        HostTensor { shape, dtype, words: vec![0; (shape.len() * dtype.size_bytes()).div_ceil(4)] }
    }

    /// These values, rounded where `dtype` is narrower than `f32`.
    ///
    /// # Errors
    /// If the number of values is not that of the shape.
    pub fn from_f32(values: &[f32], shape: &[usize], dtype: DType) -> Result<Self> {
        let source = HostRef::from_f32(values, shape)?;
        let mut tensor = HostTensor::zeros(shape, dtype);
        match dtype {
            DType::F32 => tensor.bytes_mut().copy_from_slice(source.bytes),
            DType::BF16 => {
                let out = tensor.bytes_mut().as_chunks_mut().0;
                out.iter_mut().zip(values).for_each(|(out, &v)| *out = <bf16 as Element>::from_f32(v).to_ne_bytes());
            }
        }
        Ok(tensor)
    }

    /// The elements.
    pub fn as_ref(&self) -> HostRef<'_> {
        let len = self.shape.len() * self.dtype.size_bytes();
        // SAFETY: words are readable as bytes, and there are at least so many.
        let bytes = unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), len) };
        HostRef { shape: self.shape, dtype: self.dtype, bytes }
    }

    /// The bytes of the elements, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.shape.len() * self.dtype.size_bytes();
        // SAFETY: as in `as_ref`, borrowed exclusively; any byte may be in a word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), len) }
    }
}

/// Bytes of the host that stay where they are, and what they are, as long as someone has them: a part of a mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// These of the bytes of `owner`.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= (*owner).as_ref().len(), "bytes {range:?} are not there");
        SharedBytes { owner, range }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

fn f32_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: plain numbers are readable as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), std::mem::size_of_val(values)) }
}

/// The bytes of these values, to be written.
pub(crate) fn f32_bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `f32_bytes`, borrowed exclusively; any four bytes are an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), std::mem::size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_bytes_are_viewed_only_if_they_fit_and_are_aligned() {
        let tensor = HostTensor::from_f32(&[1.0, 2.0, 3.0, 4.0], &[4], DType::F32).unwrap();
        let bytes = tensor.as_ref().as_bytes();
        assert_eq!(HostRef::from_bytes(&bytes[8..], &[2], DType::F32).unwrap().to_f32_vec(), [3.0, 4.0]);
        assert_eq!(HostRef::from_bytes(bytes, &[2, 2], DType::F32).unwrap().to_f32_vec(), [1.0, 2.0, 3.0, 4.0]);
        assert!(HostRef::from_bytes(&bytes[1..13], &[3], DType::F32).is_err());
        assert!(HostRef::from_bytes(bytes, &[3], DType::F32).is_err());
        assert!(HostRef::from_bytes(bytes, &[usize::MAX, 4], DType::F32).is_err());
        assert!(HostRef::from_bytes(bytes, &[1, 1, 1, 1, 4], DType::F32).is_err());
    }

    #[test]
    fn values_are_rounded_to_the_dtype() {
        let tensor = HostTensor::from_f32(&[1.5, -2.0, 1.0 + 1.0 / 512.0], &[3], DType::BF16).unwrap();
        assert_eq!(tensor.as_ref().as_bytes().len(), 6);
        assert_eq!(tensor.as_ref().to_f32_vec(), [1.5, -2.0, 1.0]);
        assert!(HostTensor::from_f32(&[1.0], &[2], DType::F32).is_err());
    }
}
