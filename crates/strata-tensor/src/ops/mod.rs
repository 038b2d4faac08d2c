//! The fused ops of the tape: shapes checked, forward, and its backward beside it.

mod attention;
mod delta;
mod embedding;
mod gelu;
mod latent;
mod linear;
mod loss;
mod moe;
mod norm;
mod rows;
mod swiglu;
#[cfg(test)]
mod tests;

pub use attention::{AttentionInput, AttentionSight, KvAccess, attention_pages_bytes};
pub use delta::DeltaNetInput;
pub use embedding::EmbeddingTable;
pub use latent::{LatentAttention, LatentRotary};
pub use loss::{LOGITS_CHUNK_BYTES, LogprobPass, TargetLoss, logits_chunk_rows, read_logits, target_logprobs};
pub use moe::experts_bytes_per_token;

use std::ops::Range;

use crate::{DType, Error, Result, Tensor, TensorRef};

/// Refuses a tensor that is not f32 `[rows, columns]`.
fn check_f32(op: &'static str, tensor: &Tensor, columns: usize) -> Result<()> {
    check(op, tensor, DType::F32, columns)
}

/// Refuses a tensor that is not `[rows, columns]` of `dtype`, or has no columns.
fn check(op: &'static str, tensor: &Tensor, dtype: DType, columns: usize) -> Result<()> {
    if tensor.dtype() != dtype {
        return Err(Error::DType { op, expected: dtype, actual: tensor.dtype() });
    }
    if tensor.shape().row_len() != columns || columns == 0 {
        return Err(Error::Shape { op, expected: format!("[rows, {}]", columns.max(1)), actual: tensor.shape().to_string() });
    }
    Ok(())
}

/// Refuses to go back through an op that only goes forward.
fn check_forward_only(op: &'static str, records: bool) -> Result<()> {
    if records {
        return Err(Error::Unsupported(format!("gradients through {op}: it is for encoders, which are frozen")));
    }
    Ok(())
}

/// Refuses a parameter that is not f32 `[len]`.
fn check_vector(op: &'static str, vector: TensorRef<'_>, len: usize) -> Result<()> {
    if vector.dtype() != DType::F32 {
        return Err(Error::DType { op, expected: DType::F32, actual: vector.dtype() });
    }
    if vector.shape().len() != len {
        return Err(Error::Shape { op, expected: format!("[{len}]"), actual: vector.shape().to_string() });
    }
    Ok(())
}

/// Refuses a group whose tokens are not a run of `tokens`, or whose sequences are not in it.
fn check_run(op: &'static str, run: &Range<usize>, sequences: &[Range<usize>], tokens: usize) -> Result<()> {
    if run.end > tokens {
        return Err(Error::Index { op, what: "tokens", index: run.end, size: tokens });
    }
    if run.start > run.end || sequences.iter().any(|s| s.start < run.start || s.start > s.end || s.end > run.end) {
        return Err(Error::Shape { op, expected: format!("sequences in {run:?}"), actual: format!("{sequences:?}") });
    }
    Ok(())
}
