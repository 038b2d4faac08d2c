//! Matrices of which rows become columns.

use strata_tensor::{DType, HostRef, HostTensor};

use crate::pieces::{Run, fill_pieces};

/// Matrices `[.., m, n]`, however many, as `[.., n, m]`.
///
/// # Panics
/// If there are fewer than two axes.
pub fn turned(run: Run<'_>, matrices: HostRef<'_>) -> HostTensor {
    let (shape, size) = (matrices.shape(), matrices.dtype().size_bytes());
    let Some((leading, &[m, n])) = shape.dims().split_last_chunk() else { panic!("matrices of shape {shape}") };
    let mut out = HostTensor::zeros(&[leading, &[n, m]].concat(), matrices.dtype());
    let matrix_bytes = (m * n * size).max(1);
    for (from, to) in matrices.as_bytes().chunks_exact(matrix_bytes).zip(out.bytes_mut().chunks_exact_mut(matrix_bytes)) {
        turn(run, from, [m, n], 0, matrices.dtype(), to);
    }
    out
}

/// Columns `first..` of a matrix `[m, n]` as rows of `m`, as many as `to` has.
///
/// # Panics
/// If the matrix has not as many.
pub fn turn(run: Run<'_>, from: &[u8], [m, n]: [usize; 2], first: usize, dtype: DType, to: &mut [u8]) {
    fill_pieces(run, to, TILE * m * dtype.size_bytes(), &|piece, to| match dtype {
        DType::F32 => turn_tiles::<4>(from, [m, n], first + piece * TILE, to),
        DType::BF16 => turn_tiles::<2>(from, [m, n], first + piece * TILE, to),
    });
}

/// Rows and columns of what is read and written together: a few cache lines of each.
const TILE: usize = 32;

/// As [`turn`] for at most [`TILE`] columns, of elements of `SIZE` bytes.
fn turn_tiles<const SIZE: usize>(from: &[u8], [m, n]: [usize; 2], first: usize, to: &mut [u8]) {
    let (from, to) = (from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    let columns = to.len() / m;
    for rows in (0..m).step_by(TILE).map(|row| row..m.min(row + TILE)) {
        for row in rows {
            for (column, element) in from[row * n + first..][..columns].iter().enumerate() {
                to[column * m + row] = *element;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pieces::backwards;

    #[test]
    fn matrices_are_turned_whole_whoever_turns_which_piece() {
        for (dtype, axes @ [count, m, n]) in
            [(DType::F32, [2, 70, 33]), (DType::BF16, [1, 3, 97]), (DType::BF16, [3, 64, 64]), (DType::F32, [1, 5, 40])]
        {
            let leading = if count == 1 { &[][..] } else { &axes[..1] };
            let values: Vec<f32> = (0..count * m * n).map(|i| (i % 251) as f32).collect();
            let turned =
                turned(&backwards, HostTensor::from_f32(&values, &[leading, &[m, n]].concat(), dtype).unwrap().as_ref());
            assert_eq!(turned.as_ref().shape().dims(), [leading, &[n, m]].concat());
            for (i, value) in turned.as_ref().to_f32_vec().into_iter().enumerate() {
                let (matrix, row, column) = (i / (m * n), i % (m * n) / m, i % m);
                assert_eq!(value, values[matrix * m * n + column * n + row], "{dtype}: row {row}, column {column}");
            }
        }
    }
}
