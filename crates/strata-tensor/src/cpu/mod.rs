//! The processor: the reference for every other device, and fast in its own right.
//!
//! Map: [`backend`](CpuBackend) splits ops over [`threads`]; [`matmul`], [`attention`] and [`delta`] are the hard kernels, [`rows`] the operations on
//! rows of elements; [`isa`] chooses instructions at run time. [`memory`] is where tensors lie, [`packed`], [`kv`] and [`recurrent`] how weights, pages and states lie in it,
//! [`in_order`] jobs of which each thread has whole ones, [`views`] what makes slices of tensors, [`scratch`] what a task works in.

mod attention;
mod backend;
mod delta;
mod in_order;
pub(crate) mod isa;
mod kv;
mod matmul;
mod memory;
mod packed;
mod recurrent;
mod rows;
mod scratch;
mod threads;
mod views;

pub use backend::CpuBackend;
pub use isa::{Arithmetic, Isa, Numerics};
pub use memory::{live_bytes, mapped_bytes, peak_live_bytes, reset_peak_live_bytes};
