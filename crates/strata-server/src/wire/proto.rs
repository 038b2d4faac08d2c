//! Protobuf of package `tinker_public`, as the SDK speaks it: the body of `forward_backward`, and the results of sampling and of
//! `forward_backward`. The messages are written out by hand so that building needs no protobuf compiler; fields this server does not
//! read (provenance spans) are left out, and decoding skips them.

use std::collections::BTreeMap;

use axum::body::Bytes;
use prost::Message;
use strata_engine::api;

use crate::limits;
use crate::names::{cut, shown};
use crate::wire::budget::{Budget, map_bytes};
use crate::wire::json::at_most;
use crate::wire::tensor::{self, CsrIndices};

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
    /// A picture; a text model refuses it.
    #[prost(message, tag = "2")]
    Image(Opaque),
    /// Sound; a text model refuses it.
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

/// Decodes the head of the body of `forward_backward`.
///
/// # Errors
/// If it is not such a message.
pub fn decode_head(body: &Bytes) -> Result<ForwardBackwardHead, String> {
    let head = ForwardBackwardHead::decode(body.clone()).map_err(|error| not_a_request(&error))?;
    if head.model_id.len() > limits::ID_BYTES_MAX {
        let len = head.model_id.len();
        return Err(format!("a model_id of {len} bytes is above the limit of {}", limits::ID_BYTES_MAX));
    }
    Ok(head)
}

/// Decodes the body of `forward_backward`. Its tensors stay where they are, in `body`.
///
/// # Errors
/// If it is not such a message, or would take more memory than there is for it.
pub fn decode_forward_backward(body: Bytes, budget: &Budget) -> Result<ForwardBackwardRequest, String> {
    budget.take(decoded_bytes(&body)?)?;
    ForwardBackwardRequest::decode(body).map_err(|error| not_a_request(&error))
}

fn not_a_request(error: &prost::DecodeError) -> String {
    let error = error.to_string();
    format!("request body is not a ForwardBackwardRequest: {}", cut(&error, limits::ERROR_CHARS_MAX))
}

/// What a body takes when it is decoded, counted before it is: an empty message takes two bytes on the wire and up to a thousand times that
/// in memory. Lists count twice, because they grow by doubling.
fn decoded_bytes(body: &[u8]) -> Result<usize, String> {
    let (mut datums, mut messages, mut bytes) = (0usize, 0usize, 0usize);
    let mut settings = [0usize; 2];
    let mut inputs_max = 0;
    for_each_field(body, |tag, field| match (tag, field) {
        (1 | 4, Some(text)) => bytes += text.len(),
        (3, Some(datum)) => {
            datums += 1;
            bytes += 2 * size_of::<Datum>();
            let mut inputs = 0;
            for_each_field(datum, |tag, field| match (tag, field) {
                (1, Some(_)) => {
                    messages += 1;
                    bytes += 2 * size_of::<Chunk>();
                }
                (2, Some(input)) => {
                    messages += 1;
                    inputs += 1;
                    bytes += input_bytes(input);
                }
                _ => {}
            });
            inputs_max = inputs_max.max(inputs);
            bytes += map_bytes::<String, Tensor>(inputs);
        }
        (5 | 7, Some(setting)) => {
            messages += 1;
            settings[usize::from(tag == 7)] += 1;
            bytes += setting.len();
        }
        _ => {}
    });
    bytes += map_bytes::<String, f64>(settings[0]) + map_bytes::<String, LossConfigValue>(settings[1]);
    for (what, count, max) in [
        ("examples in one request", datums, limits::DATUMS_MAX),
        ("nested messages in one request", messages, limits::PROTO_MESSAGES_MAX),
        ("loss_fn_inputs of one example", inputs_max, limits::LOSS_INPUTS_MAX),
        ("settings of the loss", settings[0].max(settings[1]), limits::LOSS_SETTINGS_MAX),
    ] {
        if count > max {
            return Err(format!("{count} {what} are above the limit of {max}"));
        }
    }
    Ok(bytes)
}

/// What an entry of `loss_fn_inputs` takes beside its place in the map: its name, and the extents of its shape.
fn input_bytes(entry: &[u8]) -> usize {
    const VALUE: u32 = 2;
    const SHAPE: u32 = 4;
    let mut bytes = 0;
    for_each_field(entry, |tag, field| match field {
        Some(tensor) if tag == VALUE => for_each_field(tensor, |tag, field| {
            if tag == SHAPE {
                // Packed, an extent takes a byte or more.
                bytes += 2 * size_of::<i64>() * field.map_or(1, <[u8]>::len);
            }
        }),
        Some(text) => bytes += text.len(),
        None => {}
    });
    bytes
}

/// Visits the fields of a message; `None` for those that are not length-delimited. Stops where the bytes make no sense; decoding will say why.
fn for_each_field(mut bytes: &[u8], mut visit: impl FnMut(u32, Option<&[u8]>)) {
    use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
    while !bytes.is_empty() {
        let Ok((tag, wire_type)) = decode_key(&mut bytes) else { return };
        if wire_type != WireType::LengthDelimited {
            if skip_field(wire_type, tag, &mut bytes, DecodeContext::default()).is_err() {
                return;
            }
            visit(tag, None);
            continue;
        }
        let Ok(len) = decode_varint(&mut bytes) else { return };
        let Some((field, rest)) = usize::try_from(len).ok().and_then(|len| bytes.split_at_checked(len)) else { return };
        visit(tag, Some(field));
        bytes = rest;
    }
}

impl ForwardBackwardRequest {
    /// The operation it asks for.
    ///
    /// # Errors
    /// If an example has chunks that are not text, or a tensor that contradicts itself or goes beyond the budget.
    pub fn into_op(self, budget: &Budget) -> Result<api::TrainOp, String> {
        if self.loss_fn.len() > limits::NAME_BYTES_MAX {
            let (len, max) = (self.loss_fn.len(), limits::NAME_BYTES_MAX);
            return Err(format!("a loss_fn of {len} bytes is above the limit of {max}"));
        }
        budget.take_values::<api::Datum>(self.data.len())?;
        let data = self.data.into_iter().enumerate();
        let data = data.map(|(i, datum)| datum.into_api(budget).map_err(|error| format!("datum {i}: {error}")));
        let mut config = BTreeMap::new();
        if self.loss_fn_config_v2.is_empty() {
            config = self.loss_fn_config;
        } else {
            for (name, value) in self.loss_fn_config_v2 {
                match value.value {
                    Some(LossConfigKind::Number(number)) => drop(config.insert(name, number)),
                    // The settings of this loss are not published; the engine passes over those that it does not know.
                    Some(LossConfigKind::Text(_)) if self.loss_fn == "stable_reinforce" => {}
                    Some(LossConfigKind::Text(text)) => {
                        return Err(format!(
                            "loss_fn_config[{:?}] is the text {:?}, where {} takes numbers",
                            shown(&name),
                            shown(&text),
                            self.loss_fn
                        ));
                    }
                    None => {}
                }
            }
        }
        Ok(api::TrainOp::ForwardBackward {
            data: data.collect::<Result<_, String>>()?,
            loss: api::LossSpec { name: self.loss_fn, config },
            forward_only: self.forward_only,
        })
    }
}

impl Datum {
    fn into_api(self, budget: &Budget) -> Result<api::Datum, String> {
        let mut texts = Vec::new();
        budget.take_values::<Bytes>(self.model_input.len())?;
        for (i, chunk) in self.model_input.into_iter().enumerate() {
            match chunk.chunk {
                Some(ChunkKind::EncodedText(text)) => texts.push(text.tokens),
                Some(ChunkKind::Image(_)) => return Err(not_text(i, "image")),
                Some(ChunkKind::Dmel(_)) => return Err(not_text(i, "dmel")),
                None => return Err(not_text(i, "chunk of an unknown kind")),
            }
        }
        let num_tokens = texts.iter().map(|text| text.len() / size_of::<i32>()).sum();
        at_most("tokens of one input", num_tokens, limits::PROMPT_TOKENS_MAX)?;
        budget.take_values::<i64>(num_tokens)?;
        let mut tokens = Vec::with_capacity(num_tokens);
        for (i, text) in texts.iter().enumerate() {
            tensor::append_i32_tokens(text, &mut tokens).map_err(|error| format!("model_input chunk {i}: {error}"))?;
        }
        budget.take(map_bytes::<String, api::LossInput>(self.loss_fn_inputs.len()))?;
        let mut loss_inputs = BTreeMap::new();
        for (name, tensor) in self.loss_fn_inputs {
            at_most("bytes of a name in loss_fn_inputs", name.len(), limits::NAME_BYTES_MAX)?;
            let input = tensor.into_loss_input(budget);
            let input = input.map_err(|error| format!("loss_fn_inputs[{:?}]: {error}", shown(&name)))?;
            loss_inputs.insert(name, input);
        }
        Ok(api::Datum { tokens, loss_inputs })
    }
}

/// What a user is told who sends a picture to a text model.
pub fn not_text(chunk: usize, kind: &str) -> String {
    let kind = shown(kind);
    format!("model_input chunk {chunk} is an {kind}; this model reads text only, so every chunk must be encoded_text")
}

impl Tensor {
    fn into_loss_input(self, budget: &Budget) -> Result<api::LossInput, String> {
        // The indices of a sparse tensor are done with when it is filled in.
        let mut indices_bytes = 0;
        let (bytes, sparse) = match self.encoding {
            Some(Encoding::Dense(bytes)) => (bytes, None),
            Some(Encoding::SparseCsr(csr)) => {
                indices_bytes = csr.crow_indices.len() + csr.col_indices.len();
                budget.take(indices_bytes)?;
                let row_offsets = tensor::i64_values(&csr.crow_indices).map_err(|e| format!("crow_indices: {e}"))?;
                let columns = tensor::i64_values(&csr.col_indices).map_err(|e| format!("col_indices: {e}"))?;
                (csr.values, Some(CsrIndices { row_offsets, columns }))
            }
            None => return Err("it has neither dense nor sparse values".into()),
        };
        budget.take(bytes.len())?;
        let values = match DType::try_from(self.dtype) {
            Ok(DType::Float32) => api::LossValues::F32(tensor::f32_values(&bytes)?),
            Ok(DType::Int64) => api::LossValues::I64(tensor::i64_values(&bytes)?),
            _ => return Err(format!("dtype {} is neither float32 (1) nor int64 (2)", self.dtype)),
        };
        let is_sparse = sparse.is_some();
        let input = tensor::loss_input(values, &self.shape, sparse, budget)?;
        budget.give_back(if is_sparse { indices_bytes + bytes.len() } else { 0 });
        Ok(input)
    }
}

fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Bytes {
    values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into()
}

/// Encodes the result of sampling.
pub fn encode_sample(output: &api::SampleOutput, topk_prompt: usize, topk_sample: usize) -> Bytes {
    let sequences = output.sequences.iter().map(|sequence| SampledSequence {
        stop_reason: match sequence.stop_reason {
            api::StopReason::Stop => StopReason::Stop.into(),
            api::StopReason::Length => StopReason::Length.into(),
        },
        tokens: sequence.tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>().into(),
        logprobs: Some(f32_bytes(sequence.logprobs.iter().copied())),
        topk_sampled_logprobs: sequence.topk.as_ref().map(|rows| encode_topk(rows, topk_sample)),
    });
    let response = SampleResponse {
        sequences: sequences.collect(),
        prompt_logprobs: output
            .prompt_logprobs
            .as_ref()
            .map(|values| f32_bytes(values.iter().map(|value| value.unwrap_or(f32::NAN)))),
        topk_prompt_logprobs: output.topk_prompt_logprobs.as_ref().map(|rows| encode_topk(rows, topk_prompt)),
        prompt_cache_hit_tokens: i32::try_from(output.prompt_cache_hit_tokens).unwrap_or(i32::MAX),
    };
    response.encode_to_vec().into()
}

/// What fills a cell of a [`TopkLogprobs`] that has no token.
const EMPTY_TOPK_LOGPROB: f32 = -99_999.0;

fn encode_topk(rows: &[api::TopK], k: usize) -> TopkLogprobs {
    let (mut token_ids, mut logprobs) = (Vec::with_capacity(rows.len() * k * 4), Vec::with_capacity(rows.len() * k * 4));
    for row in rows {
        let padding = std::iter::repeat(&(0u32, EMPTY_TOPK_LOGPROB));
        for (token, logprob) in row.iter().chain(padding).take(k) {
            token_ids.extend_from_slice(&token.to_le_bytes());
            logprobs.extend_from_slice(&logprob.to_le_bytes());
        }
    }
    TopkLogprobs { token_ids: token_ids.into(), logprobs: logprobs.into(), k: k as u32, length: rows.len() as u32 }
}

/// Encodes the result of `forward_backward`: one record for each run of examples whose outputs agree in all but the first extent.
pub fn encode_forward_backward(output: &api::ForwardBackwardOutput) -> Bytes {
    let trailing = |datum: &api::DatumOutput| datum.shape.iter().skip(1).copied().collect::<Vec<usize>>();
    let runs = output.data.chunk_by(|a, b| trailing(a) == trailing(b));
    let records = runs.map(|run| {
        let trailing_shape: Vec<i64> = run.first().map(trailing).unwrap_or_default().iter().map(|&n| n as i64).collect();
        let fields = [
            ("logprobs", batched(run, &trailing_shape, |datum| &datum.logprobs)),
            ("elementwise_loss", batched(run, &trailing_shape, |datum| &datum.elementwise_loss)),
        ];
        ArrayRecord {
            type_tag: String::new(),
            fields: fields.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect(),
            num_datums: run.len() as i64,
        }
    });
    let message = ForwardBackwardOutput {
        loss_fn_output_type: "ArrayRecord".into(),
        loss_fn_outputs: records.collect(),
        metrics: output.metrics.iter().cloned().collect(),
    };
    message.encode_to_vec().into()
}

fn batched<'a>(
    run: &'a [api::DatumOutput],
    trailing_shape: &[i64],
    values: impl Fn(&'a api::DatumOutput) -> &'a Vec<f32>,
) -> BatchedTensor {
    let mut data = Vec::new();
    let mut offsets = Vec::with_capacity((run.len() + 1) * 8);
    offsets.extend_from_slice(&0i64.to_le_bytes());
    for datum in run {
        data.extend(values(datum).iter().flat_map(|value| value.to_le_bytes()));
        offsets.extend_from_slice(&(data.len() as i64).to_le_bytes());
    }
    BatchedTensor {
        data: data.into(),
        offsets: offsets.into(),
        dtype: DType::Float32.into(),
        trailing_shape: trailing_shape.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{peak_bytes, with_budget};
    use crate::wire::held::HeldBytes;

    fn decoded(body: Vec<u8>) -> Result<ForwardBackwardRequest, String> {
        with_budget(64 << 20, |budget| decode_forward_backward(body.into(), budget))
    }

    fn into_op(request: ForwardBackwardRequest) -> Result<api::TrainOp, String> {
        with_budget(1 << 20, |budget| request.into_op(budget))
    }

    fn text(tokens: &[i32]) -> Chunk {
        let tokens = tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>().into();
        Chunk { chunk: Some(ChunkKind::EncodedText(EncodedText { tokens })) }
    }

    fn dense(dtype: DType, bytes: Vec<u8>) -> Tensor {
        Tensor { encoding: Some(Encoding::Dense(bytes.into())), dtype: dtype.into(), shape: vec![] }
    }

    fn request(datum: Datum) -> ForwardBackwardRequest {
        ForwardBackwardRequest {
            model_id: "s:train:0".into(),
            seq_id: 3,
            data: vec![datum],
            loss_fn: "ppo".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_request_survives_the_wire() {
        let mut datum = Datum { model_input: vec![text(&[1, -2]), text(&[3])], ..Default::default() };
        datum.loss_fn_inputs.insert("weights".into(), dense(DType::Float32, 0.5f32.to_le_bytes().to_vec()));
        let mut sent = request(datum);
        sent.loss_fn_config.insert("clip".into(), 0.0);
        let number = LossConfigValue { value: Some(LossConfigKind::Number(0.9)) };
        sent.loss_fn_config_v2.insert("clip".into(), number);
        let received = decoded(sent.encode_to_vec()).unwrap();
        assert_eq!(received, sent);
        let api::TrainOp::ForwardBackward { data, loss, forward_only } = into_op(received).unwrap() else {
            panic!("it is a forward_backward")
        };
        assert_eq!((data[0].tokens.as_slice(), loss.config["clip"], forward_only), (&[1, -2, 3][..], 0.9, false));
        assert_eq!(data[0].loss_inputs["weights"].shape, [1]);
    }

    #[test]
    fn a_setting_that_is_text_is_refused_where_the_settings_are_known() {
        let with_text = |loss: &str| {
            let text = LossConfigValue { value: Some(LossConfigKind::Text("k3".into())) };
            let mut request = ForwardBackwardRequest { loss_fn: loss.into(), ..request(Datum::default()) };
            request.loss_fn_config_v2.insert("kl_kind".into(), text);
            into_op(request)
        };
        assert!(with_text("ppo").unwrap_err().contains("kl_kind"));
        assert!(with_text("stable_reinforce").is_ok());
    }

    #[test]
    fn errors_name_the_datum_and_the_input() {
        let mut datum = Datum::default();
        datum.loss_fn_inputs.insert("weights".into(), dense(DType::Float32, vec![0; 5]));
        let error = into_op(request(datum)).unwrap_err();
        assert!(error.contains("datum 0") && error.contains("\"weights\"") && error.contains("5 bytes"), "{error}");
        let image = Chunk { chunk: Some(ChunkKind::Image(Opaque {})) };
        let error = into_op(request(Datum { model_input: vec![image], ..Default::default() })).unwrap_err();
        assert!(error.contains("image"), "{error}");
    }

    #[test]
    fn bodies_of_very_many_empty_messages_are_refused_before_they_are_decoded() {
        let empty_datums = [0x1a, 0].repeat(limits::DATUMS_MAX + 1);
        assert!(decoded(empty_datums).unwrap_err().contains("examples"));
        let datum = Datum { model_input: vec![Chunk::default(); limits::PROTO_MESSAGES_MAX + 1], ..Default::default() };
        assert!(decoded(request(datum).encode_to_vec()).unwrap_err().contains("nested"));
        assert!(decoded(vec![0xff; 3]).unwrap_err().contains("request body"));
    }

    #[test]
    fn the_head_is_read_even_if_the_rest_is_wrong() {
        let mut body = request(Datum::default()).encode_to_vec();
        body.extend([0x1a, 2, 0xff, 0xff]);
        assert!(decoded(body.clone()).unwrap_err().contains("ForwardBackwardRequest"));
        assert_eq!(decode_head(&body.into()).map(|head| (head.model_id, head.seq_id)), Ok(("s:train:0".into(), 3)));
        assert!(decode_head(&Bytes::from_static(b"\x0a\x05ab")).is_err());
    }

    fn sparse(rows: usize, columns: i64) -> Tensor {
        let crow_indices = vec![0u8; (rows + 1) * 8].into();
        let csr = SparseCsr { crow_indices, ..Default::default() };
        Tensor { encoding: Some(Encoding::SparseCsr(csr)), dtype: DType::Int64.into(), shape: vec![rows as i64, columns] }
    }

    #[test]
    fn sparse_tensors_are_refused_before_they_become_large() {
        let mut datum = Datum::default();
        for i in 0..24 {
            datum.loss_fn_inputs.insert(i.to_string(), sparse(2, 1 << 20));
        }
        let body = request(datum).encode_to_vec();
        assert!(body.len() < 2200);
        let work = || with_budget(64 << 20, |budget| decode_forward_backward(body.clone().into(), budget)?.into_op(budget));
        let (refused, peak) = peak_bytes(work);
        assert!(refused.unwrap_err().contains("64 MiB"));
        assert!(peak < 65 << 20, "{peak}");
    }

    /// Bodies made to become as large as they can.
    fn greedy_bodies() -> Vec<(&'static str, Vec<u8>)> {
        let delimited = |tag: u8, content: &[u8]| {
            let mut field = vec![tag << 3 | 2];
            prost::encoding::encode_varint(content.len() as u64, &mut field);
            [field, content.to_vec()].concat()
        };
        let shape = delimited(4, &vec![1; 1 << 20]);
        let with_input = delimited(3, &delimited(2, &[]));
        vec![
            ("empty examples", delimited(3, &[]).repeat(60_000)),
            ("examples of one empty tensor", with_input.repeat(60_000)),
            ("examples of one empty chunk", delimited(3, &delimited(1, &[])).repeat(60_000)),
            ("one example of empty chunks", delimited(3, &delimited(1, &[]).repeat(500_000))),
            ("one shape", delimited(3, &delimited(2, &delimited(2, &shape)))),
            ("one unpacked shape", delimited(3, &delimited(2, &delimited(2, &[0x20, 1].repeat(1 << 20))))),
            ("settings", delimited(7, &[]).repeat(500_000)),
            ("tokens", delimited(3, &delimited(1, &delimited(1, &delimited(1, &vec![0; 4 << 20]))))),
        ]
    }

    #[test]
    fn decoding_stays_within_three_times_the_body_and_the_budget() {
        for budget_bytes in [1 << 20, 256 << 20] {
            for (what, body) in greedy_bodies() {
                let work = || {
                    with_budget(budget_bytes, |budget| {
                        decode_forward_backward(Bytes::copy_from_slice(&body), budget)?.into_op(budget)
                    })
                };
                let (decoded, peak) = peak_bytes(work);
                let bound = 3 * (body.len() + budget_bytes);
                assert!(peak <= bound, "{what}: {peak} bytes, above {bound}");
                if budget_bytes == 1 << 20 {
                    assert!(decoded.is_err(), "{what}");
                } else if let Ok(op) = decoded {
                    assert!(op.held_bytes() <= budget_bytes, "{what}");
                }
            }
        }
    }

    #[test]
    fn outputs_of_different_widths_become_records_of_their_own() {
        let datum = |shape: &[usize]| {
            let n = shape.iter().product();
            api::DatumOutput { shape: shape.to_vec(), logprobs: vec![-1.0; n], elementwise_loss: vec![1.0; n] }
        };
        let output = api::ForwardBackwardOutput {
            data: vec![datum(&[2]), datum(&[3]), datum(&[2, 4])],
            metrics: vec![("loss:sum".into(), 13.0)],
        };
        let message = ForwardBackwardOutput::decode(encode_forward_backward(&output)).unwrap();
        let counts: Vec<i64> = message.loss_fn_outputs.iter().map(|record| record.num_datums).collect();
        assert_eq!((counts, message.metrics["loss:sum"]), (vec![2, 1], 13.0));
        let first = &message.loss_fn_outputs[0].fields["logprobs"];
        assert_eq!(tensor::i64_values(&first.offsets).unwrap(), [0, 8, 20]);
        assert_eq!(message.loss_fn_outputs[1].fields["elementwise_loss"].trailing_shape, [4]);
    }

    #[test]
    fn prompt_positions_without_a_prediction_are_nan_and_sentinels() {
        let output = api::SampleOutput {
            sequences: vec![api::SampledSequence {
                tokens: vec![5],
                logprobs: vec![-0.5],
                topk: None,
                stop_reason: api::StopReason::Length,
            }],
            prompt_logprobs: Some(vec![None, Some(-2.0)]),
            topk_prompt_logprobs: Some(vec![vec![], vec![(7, -1.0), (8, -2.0)]]),
            prompt_cache_hit_tokens: 0,
        };
        let message = SampleResponse::decode(encode_sample(&output, 2, 0)).unwrap();
        let prompt = tensor::f32_values(&message.prompt_logprobs.unwrap()).unwrap();
        assert!(prompt[0].is_nan() && prompt[1] == -2.0);
        let topk = message.topk_prompt_logprobs.unwrap();
        assert_eq!((topk.k, topk.length), (2, 2));
        assert_eq!(tensor::f32_values(&topk.logprobs).unwrap(), [-99_999.0, -99_999.0, -1.0, -2.0]);
        assert_eq!(message.sequences[0].stop_reason, 1);
    }
}
