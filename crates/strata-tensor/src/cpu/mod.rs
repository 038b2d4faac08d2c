//! The processor: the reference for every other device, and fast in its own right.
//!
//! Map: [`backend`](CpuBackend) splits ops over [`threads`]; [`matmul`] and [`attention`] are the hard kernels, [`rows`] the operations on
//! rows of elements; [`isa`] chooses instructions at run time; [`scratch`] is what a task works in.

mod attention;
mod backend;
mod isa;
mod matmul;
mod rows;
mod scratch;
mod threads;

pub use backend::CpuBackend;
pub use isa::{Arithmetic, Isa, Numerics};
