//! Protobuf messages of package `tinker_public`, as the SDK speaks it: the body of `forward_backward`, and the results of sampling and of
//! `forward_backward`. They are written out by hand so that building needs no protobuf compiler. Provenance spans are left out of
//! [`Datum`], and decoding skips them: the one loss that counts them has them read apart.

mod request;
mod response;
mod spans;

use std::collections::BTreeMap;

use axum::body::Bytes;

pub use request::{decode_forward_backward, decode_head};
pub use response::{encode_forward_backward, encode_sample};
pub use spans::{ProvenanceSpan, SequenceTokens, SpanKind, decode_spans};

/// Element types of tensors on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DType {
    /// Not set.
    Unspecified = 0,
    /// 32-bit floats.
    Float32 = 1,
    /// 64-bit integers.
    Int64 = 2,
    /// 32-bit integers.
    Int32 = 3,
    /// The upper half of a 32-bit float.
    Bfloat16 = 4,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum StopReason {
    /// At a stop token or string.
    Stop = 0,
    /// At the token limit.
    Length = 1,
}

/// The body of `forward_backward`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardRequest {
    /// The model.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// Its place in the order of the model's operations.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
    /// The examples.
    #[prost(message, repeated, tag = "3")]
    pub data: Vec<Datum>,
    /// Name of the loss.
    #[prost(string, tag = "4")]
    pub loss_fn: String,
    /// Numeric settings of the loss, as old servers read them.
    #[prost(btree_map = "string, double", tag = "5")]
    pub loss_fn_config: BTreeMap<String, f64>,
    /// Whether to leave the gradient alone.
    #[prost(bool, tag = "6")]
    pub forward_only: bool,
    /// Settings of the loss; these count where there are any.
    #[prost(btree_map = "string, message", tag = "7")]
    pub loss_fn_config_v2: BTreeMap<String, LossConfigValue>,
}

/// A setting of a loss.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LossConfigValue {
    /// The value.
    #[prost(oneof = "LossConfigKind", tags = "1, 2")]
    pub value: Option<LossConfigKind>,
}

/// The value of a setting of a loss.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum LossConfigKind {
    /// A number.
    #[prost(double, tag = "1")]
    Number(f64),
    /// A text.
    #[prost(string, tag = "2")]
    Text(String),
}

/// An example.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Datum {
    /// The input, in chunks.
    #[prost(message, repeated, tag = "1")]
    pub model_input: Vec<Chunk>,
    /// What the loss reads.
    #[prost(btree_map = "string, message", tag = "2")]
    pub loss_fn_inputs: BTreeMap<String, Tensor>,
}

/// A part of an input.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Chunk {
    /// What kind of part.
    #[prost(oneof = "ChunkKind", tags = "1, 2, 3")]
    pub chunk: Option<ChunkKind>,
}

/// What a part of an input holds.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ChunkKind {
    /// Token ids.
    #[prost(message, tag = "1")]
    EncodedText(EncodedText),
    /// A picture.
    #[prost(message, tag = "2")]
    Image(Image),
    /// Sound, which is refused.
    #[prost(message, tag = "3")]
    Dmel(Opaque),
}

/// Token ids.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedText {
    /// i32, little endian.
    #[prost(bytes = "bytes", tag = "1")]
    pub tokens: Bytes,
}

/// A picture.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Image {
    /// Its file.
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
    /// `png` or `jpeg`. A string on the wire; here it stays where it is, like the file, and costs nothing.
    #[prost(bytes = "bytes", tag = "2")]
    pub format: Bytes,
    /// The tokens that the client takes it for.
    #[prost(int32, optional, tag = "3")]
    pub expected_tokens: Option<i32>,
    /// A size to scale it to, which is refused.
    #[prost(message, optional, tag = "4")]
    pub override_dimensions: Option<Opaque>,
}

/// A message whose content is not looked at.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Opaque {}

/// A tensor, dense or sparse.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tensor {
    /// Its values.
    #[prost(oneof = "Encoding", tags = "1, 2")]
    pub encoding: Option<Encoding>,
    /// Type of its values.
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// Extents; empty: one dimension.
    #[prost(int64, repeated, tag = "4")]
    pub shape: Vec<i64>,
}

/// Values of a tensor.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Encoding {
    /// All of them, row-major, little endian.
    #[prost(bytes = "bytes", tag = "1")]
    Dense(Bytes),
    /// Those that are listed.
    #[prost(message, tag = "2")]
    SparseCsr(SparseCsr),
}

/// A sparse matrix in compressed rows.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseCsr {
    /// The listed values.
    #[prost(bytes = "bytes", tag = "1")]
    pub values: Bytes,
    /// i64 row pointers.
    #[prost(bytes = "bytes", tag = "2")]
    pub crow_indices: Bytes,
    /// i64 column indices.
    #[prost(bytes = "bytes", tag = "3")]
    pub col_indices: Bytes,
}

/// The result of sampling.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampleResponse {
    /// The sequences.
    #[prost(message, repeated, tag = "1")]
    pub sequences: Vec<SampledSequence>,
    /// f32 for each prompt token, NaN where there is none.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub prompt_logprobs: Option<Bytes>,
    /// Most probable tokens at each prompt position.
    #[prost(message, optional, tag = "3")]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
    /// Prompt tokens found in the prefix cache.
    #[prost(int32, tag = "4")]
    pub prompt_cache_hit_tokens: i32,
    /// Log-probabilities of tokens that were named for prompt positions: f32, with the shape and layout of the request.
    #[prost(message, optional, tag = "5")]
    pub target_prompt_logprobs: Option<Tensor>,
    /// Tokens drawn in the place of those of the prompt.
    #[prost(message, optional, tag = "6")]
    pub prompt_alt_tokens: Option<PromptAltTokens>,
}

/// Two matrices `[prompt tokens - 1, k]`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PromptAltTokens {
    /// i64 token ids.
    #[prost(message, optional, tag = "1")]
    pub tokens: Option<Tensor>,
    /// f32.
    #[prost(message, optional, tag = "2")]
    pub logprobs: Option<Tensor>,
}

/// One sampled sequence.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampledSequence {
    /// Why it ended.
    #[prost(enumeration = "StopReason", tag = "1")]
    pub stop_reason: i32,
    /// i32 token ids.
    #[prost(bytes = "bytes", tag = "2")]
    pub tokens: Bytes,
    /// f32, one for each token.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub logprobs: Option<Bytes>,
    /// Most probable tokens at each position.
    #[prost(message, optional, tag = "4")]
    pub topk_sampled_logprobs: Option<TopkLogprobs>,
}

/// Two matrices `[length, k]`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TopkLogprobs {
    /// i32.
    #[prost(bytes = "bytes", tag = "1")]
    pub token_ids: Bytes,
    /// f32.
    #[prost(bytes = "bytes", tag = "2")]
    pub logprobs: Bytes,
    /// Columns.
    #[prost(uint32, tag = "3")]
    pub k: u32,
    /// Rows.
    #[prost(uint32, tag = "4")]
    pub length: u32,
}

/// The result of `forward_backward`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardOutput {
    /// What kind of records.
    #[prost(string, tag = "1")]
    pub loss_fn_output_type: String,
    /// Outputs of the loss, in the order of the examples.
    #[prost(message, repeated, tag = "2")]
    pub loss_fn_outputs: Vec<ArrayRecord>,
    /// Metrics; each name has exactly one colon.
    #[prost(btree_map = "string, double", tag = "3")]
    pub metrics: BTreeMap<String, f64>,
}

/// Outputs of consecutive examples whose tensors agree in all but the first extent.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArrayRecord {
    /// Unused.
    #[prost(string, tag = "1")]
    pub type_tag: String,
    /// Tensors by name.
    #[prost(btree_map = "string, message", tag = "2")]
    pub fields: BTreeMap<String, BatchedTensor>,
    /// Number of examples.
    #[prost(int64, tag = "3")]
    pub num_datums: i64,
}

/// Tensors of several examples, one after another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BatchedTensor {
    /// All values.
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
    /// i64 byte offsets, one more than there are examples.
    #[prost(bytes = "bytes", tag = "2")]
    pub offsets: Bytes,
    /// Type of the values.
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// All extents but the first.
    #[prost(int64, repeated, tag = "4")]
    pub trailing_shape: Vec<i64>,
}

/// Where the body of `forward_backward` belongs: read before the rest, which may be wrong.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardHead {
    /// The model.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// Its place in the order of the model's operations.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
}
