//! Tensors of the processor as slices.

use super::memory::Buffer;
use crate::{Element, Error, Result, Tensor, TensorMut, TensorRef};

impl Tensor {
    /// The elements.
    ///
    /// # Errors
    /// If they are not a processor's, or not of `T`.
    pub(in crate::cpu) fn slice<T: Element>(&self) -> Result<&[T]> {
        self.as_ref().slice()
    }

    /// The elements, to be written. Errors as [`Tensor::slice`].
    pub(in crate::cpu) fn slice_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.as_mut().into_slice()
    }
}

impl<'a> TensorRef<'a> {
    /// As [`Tensor::slice`].
    pub(in crate::cpu) fn slice<T: Element>(&self) -> Result<&'a [T]> {
        check::<T>(self.dtype())?;
        let bytes = self.bytes()?;
        // SAFETY: the bytes hold whole elements of `T::DTYPE`, and buffers are aligned for every element type.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.shape().len()) })
    }

    /// The bytes of the elements.
    ///
    /// # Errors
    /// If they are not a processor's.
    pub(in crate::cpu) fn bytes(&self) -> Result<&'a [u8]> {
        let buffer: &Buffer = self.storage().get().ok_or(Error::ForeignMemory)?;
        let (elements, size) = (self.elements(), self.dtype().size_bytes());
        Ok(&buffer[elements.start * size..elements.end * size])
    }
}

impl<'a> TensorMut<'a> {
    /// As [`Tensor::slice_mut`].
    pub(in crate::cpu) fn into_slice<T: Element>(self) -> Result<&'a mut [T]> {
        check::<T>(self.dtype())?;
        let len = self.shape().len();
        let bytes = self.into_bytes()?;
        // SAFETY: as in `TensorRef::slice`; the mutable borrow of the bytes makes it exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) })
    }

    /// The bytes of the elements, to be written. Errors as [`TensorRef::bytes`].
    pub(in crate::cpu) fn into_bytes(self) -> Result<&'a mut [u8]> {
        let (elements, size) = (self.elements(), self.dtype().size_bytes());
        let buffer: &mut Buffer = self.into_storage().get_mut().ok_or(Error::ForeignMemory)?;
        Ok(&mut buffer[elements.start * size..elements.end * size])
    }
}

fn check<T: Element>(actual: crate::DType) -> Result<()> {
    if actual != T::DTYPE {
        return Err(Error::DType { op: "cpu", expected: T::DTYPE, actual });
    }
    Ok(())
}
