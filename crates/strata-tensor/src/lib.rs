//! What a number is: dtypes, tensors, fused operations with their backward, the tape, and the backends that compute them.
//!
//! Map:
//! - [`dtype`](DType), [`tensor`](Tensor): element types; owned and borrowed contiguous tensors; `memory`: their recycled buffers.
//! - [`packed`](PackedStack): weights of linear layers in the layout that matmuls stream.
//! - [`tape`](Tape) and `ops`: one file per fused op; shapes checked, forward, backward beside it.
//! - [`backend`](Backend): what every device must do; `cpu` is the reference and the fast path of processors.
//!
//! Invariants:
//! - Every reduction has one order, fixed by the shapes of that row or sequence: results do not depend on the
//!   number of threads, on other rows of a batch, or on whether a row was computed in a batch of one or of a thousand.
//! - Nothing outside `backend` and `cpu` knows a device.

mod backend;
mod cpu;
mod dtype;
mod error;
mod kv;
mod memory;
mod ops;
mod packed;
pub mod random;
mod tape;
mod tensor;
#[cfg(test)]
mod testing;

pub use backend::{AdamwStep, AttentionGeometry, AttentionSpan, Backend, Block, Qkv, Rotary, Target};
pub use cpu::{Arithmetic, CpuBackend, Isa, Numerics};
pub use dtype::DType;
pub use error::{Error, Result};
pub use kv::{KV_PAGE_TOKENS, KvPages};
pub use memory::{live_bytes, peak_live_bytes, pool_held_bytes, reset_peak_live_bytes, set_pool_limit, trim_pool};
pub use ops::{
    AttentionInput, EmbeddingTable, KvAccess, LOGITS_CHUNK_BYTES, LogprobPass, LogprobTargets, TargetLoss,
    attention_pages_bytes, logits_chunk_rows, target_logprobs, visit_logits,
};
pub use packed::{PackedRef, PackedStack};
pub use tape::{Between, LoraGradients, LoraGroup, LoraProjection, LoraSite, Tape, Var, go_on};
pub use tensor::{Element, Shape, Tensor, TensorMut, TensorRef};
