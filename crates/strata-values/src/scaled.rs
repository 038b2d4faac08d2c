//! Numbers of eight bits with a scale for each block, as DeepSeek-V3 is published (DeepSeek-AI, 2024, arXiv:2412.19437).

use std::ops::Range;

use strata_tensor::{DType, HostTensor, Shape};

use crate::pieces::{Run, fill_pieces};
use crate::source::{SourceTensor, e4m3_to_f32, write_values};

/// Rows and columns of a block.
pub const FP8_BLOCK: usize = 128;

/// Rows of a matrix of [`SourceDType::F8E4M3`](crate::SourceDType), each number multiplied by the scale of its block. `scales`: those of all blocks of the matrix, row by row.
///
/// # Panics
/// If it has no such rows, or fewer scales than blocks above their last.
pub fn scaled_rows(run: Run<'_>, tensor: &SourceTensor<'_>, rows: Range<usize>, scales: &[f32], dtype: DType) -> HostTensor {
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
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SourceDType;
    use crate::pieces::backwards;

    #[test]
    fn rows_in_bytes_are_scaled_by_their_blocks_whoever_scales_which_piece() {
        let (rows, columns) = (FP8_BLOCK + 40, FP8_BLOCK + 3);
        let bytes: Vec<u8> = (0..rows * columns).map(|i| (i * 7 % 126) as u8).collect();
        let shape = [rows, columns];
        let tensor = SourceTensor { name: "w", shape: &shape, dtype: SourceDType::F8E4M3, bytes: &bytes };
        let scales = [0.5, 2.0, 3.0, 0.25];
        for (first, dtype) in [(0, DType::F32), (37, DType::BF16)] {
            let scaled = scaled_rows(&backwards, &tensor, first..rows, &scales, dtype);
            let expected: Vec<f32> = (first * columns..rows * columns)
                .map(|i| e4m3_to_f32(bytes[i]) * scales[i / columns / FP8_BLOCK * 2 + i % columns / FP8_BLOCK])
                .collect();
            let expected = HostTensor::from_f32(&expected, &[rows - first, columns], dtype).unwrap();
            assert_eq!(scaled.as_ref().to_f32_vec(), expected.as_ref().to_f32_vec(), "{dtype}");
        }
    }
}
