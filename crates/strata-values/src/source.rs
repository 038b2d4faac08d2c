//! A tensor as it lies in a file, and its conversion to the dtype that a model computes in.

use std::ops::Range;
use std::sync::LazyLock;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use strata_tensor::{DType, Element, Error, HostRef, HostTensor, Result, Shape};

use crate::pieces::{Run, alone, fill_pieces, first_found};

/// Elements that a thread looks at, or converts, before it takes the next.
const PIECE: usize = 64 << 10;
/// Halves that are widened at a time.
const VECTOR: usize = 256;

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
        read(&alone, self.bytes, self.shape, self.dtype, dtype)
    }

    /// Entries `rows` of the leading axis in `dtype`, borrowed if the file allows it.
    ///
    /// # Errors
    /// If the range is not within the leading axis, or the tensor has more axes than a tensor can have.
    pub fn read_rows(&self, rows: Range<usize>, dtype: DType) -> Result<Converted<'a>> {
        self.read_rows_on(&alone, rows, dtype)
    }

    /// As [`SourceTensor::read_rows`], what is to be converted on several threads.
    pub fn read_rows_on(&self, run: Run<'_>, rows: Range<usize>, dtype: DType) -> Result<Converted<'a>> {
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
        read(run, &self.bytes[rows.start * row_bytes..rows.end * row_bytes], &shape, self.dtype, dtype)
    }
}

/// The place and value of the first element that is infinite or not a number, if there is one.
pub fn first_not_finite(run: Run<'_>, tensor: HostRef<'_>) -> Option<(usize, f32)> {
    // The exponent of infinities and of NaNs is all ones.
    first_by_bits(run, tensor, |bits| bits & 0x7f80_0000 == 0x7f80_0000)
}

/// The place and value of the first element below zero, if there is one.
pub fn first_negative(run: Run<'_>, tensor: HostRef<'_>) -> Option<(usize, f32)> {
    first_by_bits(run, tensor, |bits| bits > 0x8000_0000)
}

/// The place and value of the first element whose bits as f32 are of some kind.
fn first_by_bits(run: Run<'_>, tensor: HostRef<'_>, is_wanted: impl Fn(u32) -> bool + Sync) -> Option<(usize, f32)> {
    let (bytes, size) = (tensor.as_bytes(), tensor.dtype().size_bytes());
    let widened = |b: [u8; 2]| u32::from(u16::from_ne_bytes(b)) << 16;
    // Without a branch within a piece, and so at the speed of memory.
    let has = |piece: &[u8]| match tensor.dtype() {
        DType::F32 => piece.as_chunks().0.iter().fold(false, |any, &b| any | is_wanted(u32::from_ne_bytes(b))),
        DType::BF16 => piece.as_chunks().0.iter().fold(false, |any, &b| any | is_wanted(widened(b))),
    };
    let piece = |i: usize| &bytes[i * PIECE * size..bytes.len().min((i + 1) * PIECE * size)];
    let (index, ()) = first_found(run, bytes.len().div_ceil(PIECE * size), &|i| has(piece(i)).then_some(()))?;
    let (place, element) = piece(index).chunks(size).enumerate().find(|(_, element)| has(element))?;
    let bits = match tensor.dtype() {
        DType::F32 => u32::from_ne_bytes(element.try_into().expect("four bytes")),
        DType::BF16 => widened(element.try_into().expect("two bytes")),
    };
    Some((index * PIECE + place, f32::from_bits(bits)))
}

fn read<'a>(run: Run<'_>, bytes: &'a [u8], shape: &[usize], from: SourceDType, to: DType) -> Result<Converted<'a>> {
    if shape.len() > strata_tensor::Shape::MAX_RANK {
        let expected = format!("at most {} axes", strata_tensor::Shape::MAX_RANK);
        return Err(Error::Shape { op: "read", expected, actual: format!("{shape:?}") });
    }
    let same = matches!((from, to), (SourceDType::F32, DType::F32) | (SourceDType::BF16, DType::BF16));
    if same && let Ok(view) = HostRef::from_bytes(bytes, shape, to) {
        return Ok(Converted::Borrowed(view));
    }
    // Before memory is taken, and without overflow: that many bytes there are.
    let elements = shape.iter().try_fold(1usize, |elements, &n| elements.checked_mul(n));
    if elements.and_then(|elements| elements.checked_mul(from.size_bytes())) != Some(bytes.len()) {
        let expected = format!("{shape:?} of {to}");
        return Err(Error::Shape { op: "read", expected, actual: format!("{} bytes", bytes.len()) });
    }
    let mut tensor = HostTensor::zeros(shape, to);
    fill_pieces(run, tensor.bytes_mut(), PIECE * to.size_bytes(), &|i, piece| {
        let first = i * PIECE * from.size_bytes();
        let len = piece.len() / to.size_bytes() * from.size_bytes();
        convert(&bytes[first..first + len], from, to, piece);
    });
    Ok(Converted::Owned(tensor))
}

/// Elements in another dtype; `out` has room for as many.
fn convert(bytes: &[u8], from: SourceDType, to: DType, out: &mut [u8]) {
    match (from, to) {
        (SourceDType::F32, DType::F32) | (SourceDType::BF16, DType::BF16) => out.copy_from_slice(bytes),
        (SourceDType::F32, DType::BF16) => {
            put(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)), to, out);
        }
        (SourceDType::BF16, DType::F32) => {
            put(bytes.as_chunks().0.iter().map(|&b| Element::to_f32(bf16::from_le_bytes(b))), to, out);
        }
        (SourceDType::F16, _) => {
            let (mut halves, mut values) = ([f16::ZERO; VECTOR], [0.0; VECTOR]);
            for (bytes, out) in bytes.chunks(2 * VECTOR).zip(out.chunks_mut(VECTOR * to.size_bytes())) {
                let count = bytes.len() / 2;
                halves.iter_mut().zip(bytes.as_chunks().0).for_each(|(half, &b)| *half = f16::from_le_bytes(b));
                // By the instructions of the machine, which it asks for once.
                halves[..count].convert_to_f32_slice(&mut values[..count]);
                write_values(&values[..count], to, out);
            }
        }
        (SourceDType::F8E4M3, _) => put(bytes.iter().map(|&b| e4m3_to_f32(b)), to, out),
    }
}

/// Numbers as a file has them in a dtype, each rounded to the nearest; or the place of the first that is not finite there, and what it is.
///
/// # Errors
/// That place, and the value there.
///
/// # Panics
/// If the dtype is [`SourceDType::F8E4M3`]: that comes with scales.
pub fn rounded(values: &[f32], dtype: SourceDType) -> std::result::Result<Vec<u8>, (usize, f32)> {
    let not_finite = |as_written: fn(f32) -> f32| {
        let found = values.iter().map(|&value| as_written(value)).enumerate().find(|(_, value)| !value.is_finite());
        found.map_or(Ok(()), Err)
    };
    Ok(match dtype {
        SourceDType::F16 => {
            not_finite(|value| f16::from_f32(value).to_f32())?;
            values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect()
        }
        SourceDType::BF16 => {
            not_finite(|value| bf16::from_f32(value).to_f32())?;
            values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
        }
        SourceDType::F32 => {
            not_finite(|value| value)?;
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        SourceDType::F8E4M3 => panic!("numbers are not rounded to {dtype:?}"),
    })
}

/// Values in a dtype, as bytes of this machine; `out` has room for as many.
pub fn write_values(values: &[f32], to: DType, out: &mut [u8]) {
    put(values.iter().copied(), to, out);
}

fn put(values: impl Iterator<Item = f32>, to: DType, out: &mut [u8]) {
    match to {
        DType::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, v)| *out = v.to_ne_bytes()),
        DType::BF16 => {
            out.as_chunks_mut()
                .0
                .iter_mut()
                .zip(values)
                .for_each(|(out, v)| *out = <bf16 as Element>::from_f32(v).to_ne_bytes());
        }
    }
}

/// What a byte of [`SourceDType::F8E4M3`] stands for.
pub fn e4m3_to_f32(byte: u8) -> f32 {
    static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3_value(byte as u8)));
    VALUES[usize::from(byte)]
}

fn e4m3_value(byte: u8) -> f32 {
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
    use crate::pieces::backwards;

    #[test]
    fn bytes_stand_for_what_the_format_says() {
        let known = [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0), (0xb9, -1.125)];
        for (byte, value) in known.into_iter().chain([(0x7e, 448.0), (0xfe, -448.0), (0x78, 256.0)]) {
            assert_eq!(e4m3_to_f32(byte), value, "{byte:#x}");
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
        assert_eq!((0..0x7f).filter(|&b| e4m3_to_f32(b) >= e4m3_to_f32(b + 1)).count(), 0, "larger bytes are larger numbers");
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_and_the_first_that_is_too_large_is_named() {
        // Halfway between two bf16, and just above; the largest f16, and what rounds beyond it.
        let values = [1.0 + 1.0 / 256.0, 1.004, 65504.0, 65520.0, f32::MAX, f32::NAN];
        let bytes = |values: &[f32], dtype| rounded(values, dtype);
        assert_eq!(bytes(&values[..2], SourceDType::BF16), Ok(vec![0x80, 0x3f, 0x81, 0x3f]));
        assert_eq!(bytes(&values[..3], SourceDType::F16).unwrap()[4..], [0xff, 0x7b]);
        assert_eq!(bytes(&values, SourceDType::F16), Err((3, f32::INFINITY)));
        assert_eq!(bytes(&values, SourceDType::BF16), Err((4, f32::INFINITY)));
        assert_eq!(bytes(&values, SourceDType::F32).map_err(|(place, value)| (place, value.is_nan())), Err((5, true)));
        assert_eq!(bytes(&values[4..5], SourceDType::F32), Ok(f32::MAX.to_le_bytes().to_vec()));
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
    fn pieces_of_all_dtypes_are_what_single_elements_are() {
        // Every half, and bytes of every kind, in more than one piece.
        let elements = 2 * PIECE + 77;
        let bytes: Vec<u8> = (0..4 * elements).map(|i| (i as u32).wrapping_mul(0x9e37_79b1).to_le_bytes()[i % 4]).collect();
        for from in [SourceDType::F32, SourceDType::BF16, SourceDType::F16, SourceDType::F8E4M3] {
            // One byte further, no element is aligned.
            let bytes = &bytes[1..][..(elements - 1) * from.size_bytes()];
            let value = |b: &[u8]| match from {
                SourceDType::F32 => f32::from_le_bytes(b.try_into().unwrap()),
                SourceDType::BF16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                SourceDType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                SourceDType::F8E4M3 => e4m3_value(b[0]),
            };
            let expected: Vec<f32> = bytes.chunks(from.size_bytes()).map(value).collect();
            for to in [DType::F32, DType::BF16] {
                let shape = [elements - 1];
                let tensor = source(bytes, &shape, from).read_rows_on(&backwards, 0..elements - 1, to).unwrap();
                let expected = HostTensor::from_f32(&expected, &[elements - 1], to).unwrap();
                let (actual, expected) = (tensor.as_ref().to_f32_vec(), expected.as_ref().to_f32_vec());
                let same = |(a, e): (&f32, &f32)| a.to_bits() == e.to_bits() || a.is_nan() && e.is_nan();
                assert!(actual.iter().zip(&expected).all(same), "{from:?} to {to}");
            }
        }
    }

    #[test]
    fn whatever_is_below_zero_is_found() {
        for dtype in [DType::F32, DType::BF16] {
            for place in [0, PIECE - 1, 2 * PIECE + 998] {
                let mut values = vec![1.0e38f32; 2 * PIECE + 999];
                values[3] = -0.0;
                let found = |values: &[f32]| {
                    let tensor = HostTensor::from_f32(values, &[values.len()], dtype).unwrap();
                    first_negative(&backwards, tensor.as_ref())
                };
                assert!(found(&values).is_none());
                values[place] = -f32::from_bits(0x0001_0000);
                assert_eq!(found(&values), Some((place, values[place])), "{dtype}");
            }
        }
    }

    #[test]
    fn whatever_is_not_finite_is_found() {
        for dtype in [DType::F32, DType::BF16] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xffff_0000)] {
                for place in [0, 1, PIECE - 1, PIECE, 2 * PIECE + 998] {
                    let len = 2 * PIECE + 999;
                    let mut values = vec![-1.0e38f32; len];
                    values[3] = 0.0;
                    let clean = HostTensor::from_f32(&values, &[len], dtype).unwrap();
                    assert!(first_not_finite(&backwards, clean.as_ref()).is_none());
                    values[place] = bad;
                    // Not the first, but what is seen first.
                    values[len - 1] = f32::NAN;
                    let tensor = HostTensor::from_f32(&values, &[len], dtype).unwrap();
                    let (found, value) = first_not_finite(&backwards, tensor.as_ref()).unwrap();
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
