//! What a number is: dtypes, tensors, fused operations with their backward, the tape, and the backends that compute them.
//!
//! Map:
//! - [`dtype`](DType), [`tensor`](Tensor): element types; owned and borrowed contiguous tensors. [`weights`](PackedStack), [`kv`](KvPages): weights of
//!   linear layers, and pages of keys and values, in whatever layout a backend streams. [`recurrent`](RecurrentStates): states of linear
//!   attention. [`host`](HostRef): numbers on the host.
//! - [`memory`](Memory): what every device does with memory; `storage`: why nobody else can.
//! - [`moe`](Experts): mixtures of experts, and which rows go to which. [`repeats`](Repeats), `live`: rows that need not be computed.
//! - [`tape`](Tape) and `ops`: one file per fused op; shapes checked, forward, backward beside it.
//! - [`backend`](Backend): what every device must compute; `cpu` is the reference and the fast path of processors.
//!
//! Invariants:
//! - Every reduction has one order, fixed by the shapes of that row or sequence: results do not depend on the
//!   number of threads, on other rows of a batch, or on whether a row was computed in a batch of one or of a thousand.
//! - Nothing outside `backend` and `cpu` knows a device.
//! - Tensors, weights and pages belong to the backend that allocated them. The host sees what is in them through [`Memory::download`] and what ops
//!   answer, and in no other way: [`Tensor`] gives nobody a slice. Slices of host memory are made in `cpu` alone.
//! - What a device refuses, memory included, is an error of the op that wanted it.

mod backend;
mod cpu;
mod dtype;
mod error;
mod host;
mod int4_rows;
mod kv;
mod live;
mod memory;
mod moe;
mod ops;
pub mod random;
mod recurrent;
mod repeats;
mod storage;
mod tape;
mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod weights;

pub use backend::{
    AdamwStep, AttentionGeometry, AttentionSpan, AxisFrequency, Backend, DeltaGeometry, DeltaInputs, DeltaParams, DeltaSpan,
    Draw, Gelu, HeadColumns, HeadMove, HeadPart, HeadSide, LogprobTargets, LoraGradient, LowProducts, Qkv, QkvLayout, Rotary,
    RotaryStyle, RowReply, RowRequest, Sight, Turn,
};
pub use cpu::{Arithmetic, CpuBackend, Isa, Numerics, live_bytes, mapped_bytes, peak_live_bytes, reset_peak_live_bytes};
pub use dtype::DType;
pub use error::{Error, Result};
pub use host::{HostRef, HostTensor, SharedBytes};
pub use int4_rows::Int4Rows;
pub use kv::{KV_PAGE_TOKENS, KvLayout, KvPages, KvValues};
pub use live::live_runs;
pub use memory::{Layers, Memory, PACKED_PIECE_BYTES};
pub use moe::{Dispatch, ExpertActivation, Experts, KeptExperts, Routed, RouterScores, Routing, SigmoidScores};
pub use ops::{
    AttentionInput, AttentionSight, DeltaNetInput, EmbeddingTable, KvAccess, LOGITS_CHUNK_BYTES, LatentAttention, LatentRotary,
    LogprobPass, TargetLoss, attention_pages_bytes, experts_bytes_per_token, logits_chunk_rows, read_logits, target_logprobs,
};
pub use recurrent::{DELTA_CHUNK, RecurrentStates};
pub use repeats::Repeats;
pub use tape::{Between, EmbeddingLora, Linear, LoraGradients, LoraGroup, LoraProjection, LoraSite, Tape, Var, go_on};
pub use tensor::{Element, Shape, Tensor, TensorMut, TensorRef};
pub use weights::{Int4Group, PackedRef, PackedStack, WeightFormat, WeightStorage};
