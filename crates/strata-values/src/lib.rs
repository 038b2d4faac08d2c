//! Numbers of the host on their way into a model or out of it: what goes through every element of a checkpoint, an adapter or a picture, and knows
//! neither files nor models.
//!
//! - [`source`](SourceTensor): elements as they lie in files, converted and looked through. [`scaled_rows`]: those with a scale for each block.
//! - [`mxfp4`](dequantize_mxfp4), [`int4`](unpack_codes): numbers and codes of four bits.
//! - [`turned`], [`turn`]: matrices of which rows become columns. [`FusedLie`]: those of experts that lie in one of all.
//! - [`low_rank`](add_pairs): what an adapter adds to a matrix.
//! - [`rgb`], [`resize`], [`cut`]: pictures.
//! - [`pieces`](Run): all of it in pieces, by several threads; no result depends on how many there are.
//!
//! It is a crate of its own to be optimised as kernels are, which the rest of what reads and writes files need not be.

mod fused;
mod int4;
mod low_rank;
mod mxfp4;
mod patches;
mod pieces;
mod pixels;
mod resize;
mod scaled;
mod source;
mod turn;

pub use fused::FusedLie;
pub use int4::{INT4_CODES, Int4Groups, Int4Words, unpack_codes};
pub use low_rank::{Lies, Pair, add_pairs};
pub use mxfp4::{MXFP4_BLOCK, MXFP4_BLOCK_BYTES, dequantize_mxfp4};
pub use patches::{PatchSizes, cut};
pub use pieces::{Run, alone, fill_pieces};
pub use pixels::{Channels, high_bytes, jpeg_scans, rgb};
pub use resize::resize;
pub use scaled::{FP8_BLOCK, scaled_rows};
pub use source::{Converted, SourceDType, SourceTensor, first_negative, first_not_finite, rounded, write_values};
pub use turn::{turn, turned};
