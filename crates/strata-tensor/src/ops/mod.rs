//! The fused ops of the tape: shapes checked, forward, and its backward beside it.

mod attention;
mod embedding;
mod linear;
mod loss;
mod norm;
mod swiglu;

pub use attention::{AttentionInput, KvAccess};
pub use embedding::EmbeddingTable;
pub use loss::{LogprobTargets, TargetLoss, target_logprobs, visit_logits};

use crate::{DType, Error, Result, Tensor};

/// Refuses a tensor that is not f32 `[rows, columns]`.
fn check_f32(op: &'static str, tensor: &Tensor, columns: usize) -> Result<()> {
    check(op, tensor, DType::F32, columns)
}

/// Refuses a tensor that is not `[rows, columns]` of `dtype`.
fn check(op: &'static str, tensor: &Tensor, dtype: DType, columns: usize) -> Result<()> {
    if tensor.dtype() != dtype {
        return Err(Error::DType { op, expected: dtype, actual: tensor.dtype() });
    }
    if tensor.shape().row_len() != columns {
        return Err(Error::Shape { op, expected: format!("[rows, {columns}]"), actual: tensor.shape().to_string() });
    }
    Ok(())
}
