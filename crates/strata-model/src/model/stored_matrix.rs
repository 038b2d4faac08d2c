//! A matrix of a checkpoint in one of the forms in which matrices lie there row by row, and its rows as numbers.

use std::ops::Range;

use strata_tensor::{DType, HostTensor, Shape};

use crate::Result;
use crate::checkpoint::{
    Checkpoint, Int4Matrix, Int4Tensors, Run, SourceDType, SourceTensor, alone, e4m3_to_f32, fill_pieces, write_values,
};
use crate::config::{FP8_BLOCK, Int4Form};

/// A matrix as it lies in a checkpoint.
pub(super) enum StoredMatrix<'a> {
    /// Numbers of its dtype.
    Plain(SourceTensor<'a>),
    /// Bytes, and a scale for each block of them.
    Scaled(SourceTensor<'a>, Vec<f32>),
    /// Four bits of each.
    Int4(Int4Matrix<'a>),
}

impl<'a> StoredMatrix<'a> {
    /// The matrix of this name, if the checkpoint has one. `shape`: what it has if it lies in four bits, in the form `int4`.
    pub(super) fn of(checkpoint: &'a Checkpoint, int4: Option<Int4Form>, name: &str, shape: &[usize]) -> Result<Option<Self>> {
        Ok(match checkpoint.tensor(name)? {
            Some(tensor) => Some(Self::of_tensor(checkpoint, tensor)?),
            None => match Int4Tensors::of(checkpoint, int4, name, shape) {
                Some(tensors) => Some(StoredMatrix::Int4(tensors.open(checkpoint)?)),
                None => None,
            },
        })
    }

    /// That of a tensor, with its scales if it has any.
    pub(super) fn of_tensor(checkpoint: &'a Checkpoint, tensor: SourceTensor<'a>) -> Result<Self> {
        Ok(match checkpoint.tensor(&scales_name(tensor.name))? {
            Some(scales) if tensor.dtype == SourceDType::F8E4M3 => {
                StoredMatrix::Scaled(tensor, scales.read(DType::F32)?.as_ref().to_f32_vec())
            }
            _ => StoredMatrix::Plain(tensor),
        })
    }

    /// Some of its rows of so many numbers, one after another. What has more axes than two is read as a matrix, whatever its rows are.
    pub(super) fn read(&self, rows: Range<usize>, columns: usize) -> Result<Vec<f32>> {
        Ok(match self {
            StoredMatrix::Plain(tensor) => {
                let shape = [tensor.bytes.len() / tensor.dtype.size_bytes() / columns.max(1), columns];
                SourceTensor { shape: &shape, ..*tensor }.read_rows(rows, DType::F32)?.as_ref().to_f32_vec()
            }
            StoredMatrix::Scaled(tensor, scales) => {
                scaled_rows(&alone, tensor, rows, scales, DType::F32)?.as_ref().to_f32_vec()
            }
            StoredMatrix::Int4(matrix) => matrix.rows(&alone, rows).as_ref()?.to_f32_vec(),
        })
    }
}

/// The tensor of scales of a parameter in bytes.
pub(super) fn scales_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Rows of a matrix in bytes, each multiplied by the scale of its block.
pub(super) fn scaled_rows(
    run: Run<'_>,
    tensor: &SourceTensor<'_>,
    rows: Range<usize>,
    scales: &[f32],
    dtype: DType,
) -> Result<HostTensor> {
    /// Rows to a piece.
    const ROWS: usize = 16;
    let (first, columns) = (rows.start, tensor.shape[1..].iter().product::<usize>());
    // As `SourceTensor::read_rows` has it.
    let mut shape = if tensor.shape.len() > Shape::MAX_RANK { vec![0, columns] } else { tensor.shape.to_vec() };
    shape[0] = rows.len();
    let mut out = HostTensor::zeros(&shape, dtype);
    let (row_bytes, bytes) = ((columns * dtype.size_bytes()).max(1), &tensor.bytes[rows.start * columns..rows.end * columns]);
    fill_pieces(run, out.bytes_mut(), ROWS * row_bytes, &|piece, out| {
        for (row, out) in (piece * ROWS..).zip(out.chunks_exact_mut(row_bytes)) {
            let of_row = &scales[(first + row) / FP8_BLOCK * columns.div_ceil(FP8_BLOCK)..];
            let blocks =
                bytes[row * columns..][..columns].chunks(FP8_BLOCK).zip(out.chunks_mut(FP8_BLOCK * dtype.size_bytes()));
            for ((block, out), scale) in blocks.zip(of_row) {
                let mut values = [0.0; FP8_BLOCK];
                values.iter_mut().zip(block).for_each(|(value, &byte)| *value = e4m3_to_f32(byte) * scale);
                write_values(&values[..block.len()], dtype, out);
            }
        }
    });
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last task first.
    fn backwards(num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..num_tasks).rev().for_each(task);
    }

    #[test]
    fn rows_in_bytes_are_scaled_by_their_blocks_whoever_scales_which_piece() {
        let (rows, columns) = (FP8_BLOCK + 40, FP8_BLOCK + 3);
        let bytes: Vec<u8> = (0..rows * columns).map(|i| (i * 7 % 126) as u8).collect();
        let shape = [rows, columns];
        let tensor = SourceTensor { name: "w", shape: &shape, dtype: SourceDType::F8E4M3, bytes: &bytes };
        let scales = [0.5, 2.0, 3.0, 0.25];
        for (first, dtype) in [(0, DType::F32), (37, DType::BF16)] {
            let scaled = scaled_rows(&backwards, &tensor, first..rows, &scales, dtype).unwrap();
            let expected: Vec<f32> = (first * columns..rows * columns)
                .map(|i| e4m3_to_f32(bytes[i]) * scales[i / columns / FP8_BLOCK * 2 + i % columns / FP8_BLOCK])
                .collect();
            let expected = HostTensor::from_f32(&expected, &[rows - first, columns], dtype).unwrap();
            assert_eq!(scaled.as_ref().to_f32_vec(), expected.as_ref().to_f32_vec(), "{dtype}");
        }
    }
}
