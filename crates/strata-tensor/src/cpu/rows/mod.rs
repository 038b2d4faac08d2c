//! Operations on rows of elements: everything that is neither a matmul nor a walk over a KV cache.
//!
//! Each takes a run of whole rows, so that a caller may split rows over threads, and comes from one plain body that
//! [`multiversion!`](crate::cpu::isa::multiversion) compiles for every instruction set. They stream: per element a few to thirty
//! FLOPs against 4 to 16 bytes, so memory bounds them all once the exponential is vectorised.
//!
//! Invariant: a sum over a row has an order fixed by the length of that row alone (see [`lanes`]), so its bits do not depend on
//! the width of a register, on how rows are split, or on the rows beside it.
//!
//! Shapes are checked where operations are recorded; here a wrong length is a bug of the caller, and panics.

pub(crate) mod adamw;
pub(crate) mod convert;
pub(crate) mod delta_chunk;
pub(crate) mod delta_net;
pub(crate) mod draw;
pub(crate) mod exp;
pub(crate) mod experts;
pub(crate) mod gate;
pub(crate) mod gelu;
mod lanes;
pub(crate) mod layer_norm;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod softmax;
#[cfg(target_arch = "x86_64")]
mod softmax_avx512;
pub(crate) mod swiglu;
#[cfg(test)]
mod testing;
