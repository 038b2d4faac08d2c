//! A matrix of a checkpoint in one of the forms in which matrices lie there row by row, and its rows as numbers.

use std::ops::Range;

use strata_tensor::DType;
use strata_values::{SourceDType, SourceTensor, alone, scaled_rows};

use crate::Result;
use crate::checkpoint::{Checkpoint, Int4Matrix, Int4Tensors};
use crate::config::Int4Form;

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
            StoredMatrix::Scaled(tensor, scales) => scaled_rows(&alone, tensor, rows, scales, DType::F32).as_ref().to_f32_vec(),
            StoredMatrix::Int4(matrix) => matrix.rows(&alone, rows).as_ref()?.to_f32_vec(),
        })
    }
}

/// The tensor of scales of a parameter in bytes.
pub(super) fn scales_name(name: &str) -> String {
    format!("{name}_scale_inv")
}
