//! A tensor as it lies in a file, and its conversion to the dtype that a model computes in.

use std::ops::Range;

use half::{bf16, f16};
use safetensors::Dtype;
use strata_tensor::{DType, Element, Error, HostRef, HostTensor, Result, Shape};

/// Element types that weights may have in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceDType {
    /// IEEE 754 single precision.
    F32,
    /// The upper half of an `F32`.
    BF16,
    /// IEEE 754 half precision.
    F16,
    /// A sign, four bits of exponent, three of mantissa; no infinities (Micikevicius et al., 2022, arXiv:2209.05433).
    F8E4M3,
}

impl SourceDType {
    pub(crate) fn from_safetensors(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(SourceDType::F32),
            Dtype::BF16 => Some(SourceDType::BF16),
            Dtype::F16 => Some(SourceDType::F16),
            Dtype::F8_E4M3 => Some(SourceDType::F8E4M3),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            SourceDType::F32 => 4,
            SourceDType::BF16 | SourceDType::F16 => 2,
            SourceDType::F8E4M3 => 1,
        }
    }

    /// The dtype to compute in when nothing else is asked for: its own, or f32 for f16 and bf16 for bytes.
    pub const fn compute_dtype(self) -> DType {
        match self {
            SourceDType::BF16 | SourceDType::F8E4M3 => DType::BF16,
            SourceDType::F32 | SourceDType::F16 => DType::F32,
        }
    }
}

/// A tensor as it lies in a file.
#[derive(Clone, Copy)]
pub struct SourceTensor<'a> {
    /// Its name in the checkpoint.
    pub name: &'a str,
    /// Extents, outermost first.
    pub shape: &'a [usize],
    /// Element type.
    pub dtype: SourceDType,
    /// Its elements, row-major and little-endian, at any alignment.
    pub bytes: &'a [u8],
}

/// Elements in the dtype that was asked for: in place where the file has them so, converted where it does not.
pub enum Converted<'a> {
    /// In the file.
    Borrowed(HostRef<'a>),
    /// In memory of their own.
    Owned(HostTensor),
}

impl Converted<'_> {
    /// The elements.
    pub fn as_ref(&self) -> HostRef<'_> {
        match self {
            Converted::Borrowed(tensor) => *tensor,
            Converted::Owned(tensor) => tensor.as_ref(),
        }
    }
}

impl<'a> SourceTensor<'a> {
    /// The whole tensor in `dtype`, borrowed if the file allows it.
    ///
    /// # Errors
    /// If it has more axes than a tensor can have.
    pub fn read(&self, dtype: DType) -> Result<Converted<'a>> {
        read(self.bytes, self.shape, self.dtype, dtype)
    }

    /// Entries `rows` of the leading axis in `dtype`, borrowed if the file allows it, so that several threads can convert and pack
    /// one matrix in slices.
    ///
    /// # Errors
    /// If the range is not within the leading axis, or the tensor has more axes than a tensor can have.
    pub fn read_rows(&self, rows: Range<usize>, dtype: DType) -> Result<Converted<'a>> {
        let leading = self.shape.first().copied().unwrap_or(0);
        if rows.start > rows.end || rows.end > leading {
            return Err(Error::Index { op: "read_rows", what: "rows", index: rows.end, size: leading });
        }
        // Cannot overflow: the whole tensor lies in memory.
        let row_bytes = self.bytes.len() / leading.max(1);
        // A kernel of a convolution over time, height and width has more axes than tensors here: it is a row.
        let row_len = self.shape[1..].iter().product();
        let mut shape = if self.shape.len() > Shape::MAX_RANK { vec![leading, row_len] } else { self.shape.to_vec() };
        shape[0] = rows.len();
        read(&self.bytes[rows.start * row_bytes..rows.end * row_bytes], &shape, self.dtype, dtype)
    }
}

/// The place and value of the first element that is infinite or not a number, if there is one.
pub(crate) fn first_not_finite(tensor: HostRef<'_>) -> Option<(usize, f32)> {
    /// Elements that are looked at together; within them a loop without a branch, at the speed of memory.
    const RUN: usize = 4096;
    let bytes = tensor.as_bytes();
    let size = tensor.dtype().size_bytes();
    let is_not_finite = |run: &[u8]| match tensor.dtype() {
        // The exponent of infinities and of NaNs is all ones.
        DType::F32 => {
            run.as_chunks().0.iter().fold(false, |any, &b| any | (u32::from_ne_bytes(b) & 0x7f80_0000 == 0x7f80_0000))
        }
        DType::BF16 => run.as_chunks().0.iter().fold(false, |any, &b| any | (u16::from_ne_bytes(b) & 0x7f80 == 0x7f80)),
    };
    let (index, run) = bytes.chunks(RUN * size).enumerate().find(|(_, run)| is_not_finite(run))?;
    let place = run.chunks(size).position(is_not_finite).expect("the run has such an element");
    let element = &run[place * size..(place + 1) * size];
    let value = match tensor.dtype() {
        DType::F32 => f32::from_ne_bytes(element.try_into().expect("four bytes")),
        DType::BF16 => bf16::from_ne_bytes(element.try_into().expect("two bytes")).to_f32(),
    };
    Some((index * RUN + place, value))
}

fn read<'a>(bytes: &'a [u8], shape: &[usize], from: SourceDType, to: DType) -> Result<Converted<'a>> {
    if shape.len() > strata_tensor::Shape::MAX_RANK {
        let expected = format!("at most {} axes", strata_tensor::Shape::MAX_RANK);
        return Err(Error::Shape { op: "read", expected, actual: format!("{shape:?}") });
    }
    let same = matches!((from, to), (SourceDType::F32, DType::F32) | (SourceDType::BF16, DType::BF16));
    if same {
        if let Ok(view) = HostRef::from_bytes(bytes, shape, to) {
            return Ok(Converted::Borrowed(view));
        }
        let mut tensor = HostTensor::zeros(shape, to);
        if bytes.len() != tensor.bytes_mut().len() {
            let expected = format!("{shape:?} of {to}");
            return Err(Error::Shape { op: "read", expected, actual: format!("{} bytes", bytes.len()) });
        }
        tensor.bytes_mut().copy_from_slice(bytes);
        return Ok(Converted::Owned(tensor));
    }
    let values: Vec<f32> = match from {
        SourceDType::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        SourceDType::BF16 => bytes.as_chunks().0.iter().map(|&b| Element::to_f32(bf16::from_le_bytes(b))).collect(),
        SourceDType::F16 => bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        SourceDType::F8E4M3 => bytes.iter().map(|&b| e4m3_to_f32(b)).collect(),
    };
    Ok(Converted::Owned(HostTensor::from_f32(&values, shape, to)?))
}

/// What a byte of [`SourceDType::F8E4M3`] stands for.
fn e4m3_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stand_for_what_the_format_says() {
        let known = [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0), (0xb9, -1.125)];
        for (byte, value) in known.into_iter().chain([(0x7e, 448.0), (0xfe, -448.0), (0x78, 256.0)]) {
            assert_eq!(e4m3_to_f32(byte), value, "{byte:#x}");
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
        assert_eq!((0..0x7f).filter(|&b| e4m3_to_f32(b) >= e4m3_to_f32(b + 1)).count(), 0, "larger bytes are larger numbers");
    }

    fn source<'a>(bytes: &'a [u8], shape: &'a [usize], dtype: SourceDType) -> SourceTensor<'a> {
        SourceTensor { name: "w", shape, dtype, bytes }
    }

    #[test]
    fn an_aligned_tensor_of_the_same_dtype_is_borrowed_and_an_unaligned_one_is_copied() {
        let tensor = HostTensor::from_f32(&[0.0, 1.0, 2.0, 3.0], &[4], DType::F32).unwrap();
        let bytes = tensor.as_ref().as_bytes();
        let aligned = source(&bytes[4..], &[3], SourceDType::F32).read(DType::F32).unwrap();
        assert!(matches!(aligned, Converted::Borrowed(_)));
        assert_eq!(aligned.as_ref().to_f32_vec(), [1.0, 2.0, 3.0]);
        let mut shifted = vec![0];
        shifted.extend_from_slice(bytes);
        let aligned_at = (shifted.as_ptr() as usize).next_multiple_of(4) - shifted.as_ptr() as usize;
        shifted.splice(0..1, vec![0; aligned_at + 1]);
        let start = shifted.len() - bytes.len();
        for dtype in [DType::F32, DType::BF16] {
            let copied = source(&shifted[start..], &[4], SourceDType::F32).read(dtype).unwrap();
            assert_eq!(copied.as_ref().to_f32_vec(), [0.0, 1.0, 2.0, 3.0]);
        }
    }

    #[test]
    fn every_source_dtype_converts_to_every_target() {
        let values = [1.0f32, -2.5, 0.15625, 65504.0];
        let f32_bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let bf16_bytes: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        let f16_bytes: Vec<u8> = values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        let rounded: Vec<f32> = values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
        for (bytes, dtype, wide) in [
            (&f32_bytes, SourceDType::F32, values.to_vec()),
            (&bf16_bytes, SourceDType::BF16, rounded.clone()),
            (&f16_bytes, SourceDType::F16, values.to_vec()),
        ] {
            let tensor = source(bytes, &[2, 2], dtype);
            assert_eq!(tensor.read(DType::F32).unwrap().as_ref().to_f32_vec(), wide, "{dtype:?}");
            assert_eq!(tensor.read(DType::BF16).unwrap().as_ref().to_f32_vec(), rounded, "{dtype:?}");
            let row = tensor.read_rows(1..2, DType::F32).unwrap();
            assert_eq!(row.as_ref().shape().dims(), [1, 2]);
            assert_eq!(row.as_ref().to_f32_vec(), wide[2..], "{dtype:?}");
        }
    }

    #[test]
    fn whatever_is_not_finite_is_found() {
        for dtype in [DType::F32, DType::BF16] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xffff_0000)] {
                for place in [0, 1, 4095, 4096, 9998] {
                    let mut values = vec![-1.0e38f32; 9999];
                    values[3] = 0.0;
                    let clean = HostTensor::from_f32(&values, &[9999], dtype).unwrap();
                    assert!(first_not_finite(clean.as_ref()).is_none());
                    values[place] = bad;
                    let tensor = HostTensor::from_f32(&values, &[9999], dtype).unwrap();
                    let (found, value) = first_not_finite(tensor.as_ref()).unwrap();
                    assert!(found == place && !value.is_finite(), "{dtype} {bad} at {place}: {value} at {found}");
                }
            }
        }
    }

    #[test]
    fn rows_outside_the_tensor_and_too_many_axes_are_refused() {
        let bytes = [0; 8];
        assert!(source(&bytes, &[2], SourceDType::F32).read_rows(1..3, DType::F32).is_err());
        assert!(source(&bytes[..4], &[], SourceDType::F32).read_rows(0..1, DType::F32).is_err());
        assert!(source(&bytes, &[1, 1, 1, 1, 2], SourceDType::F32).read(DType::F32).is_err());
        assert!(source(&bytes, &[1, 1, 1, 1, 2], SourceDType::F16).read(DType::F32).is_err());
    }
}
