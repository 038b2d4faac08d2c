//! Results as JSON, for readers that do not ask for protobuf: older clients, and people with curl.
//!
//! Written straight from the encoded bytes: as values of their own, numbers would take twenty times their size.

use std::collections::BTreeMap;
use std::io::Write;

use axum::body::Bytes;
use prost::Message;
use serde::Serialize;
use serde::ser::{Error, SerializeMap, Serializer};

use crate::wire::proto::{
    ArrayRecord, BatchedTensor, DType, Encoding, ForwardBackwardOutput, SampleResponse, StopReason, Tensor, TopkLogprobs,
};
use crate::wire::tensor::i64_values;

/// An encoded `SampleResponse` as JSON.
///
/// # Errors
/// If it is not one, or cannot be written.
pub fn sample(encoded: Bytes, out: &mut dyn Write) -> Result<(), String> {
    #[derive(Serialize)]
    struct Rendered<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
        sequences: Vec<Sequence<'a>>,
        prompt_logprobs: Option<Floats<'a>>,
        topk_prompt_logprobs: Option<Topk<'a>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target_prompt_logprobs: Option<Matrix<'a>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_alt_tokens: Option<AltTokens<'a>>,
        prompt_cache_hit_tokens: i32,
    }

    #[derive(Serialize)]
    struct AltTokens<'a> {
        tokens: Option<Matrix<'a>>,
        logprobs: Option<Matrix<'a>>,
    }

    #[derive(Serialize)]
    struct Sequence<'a> {
        stop_reason: &'a str,
        tokens: Tokens<'a>,
        logprobs: Option<Floats<'a>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        topk_logprobs: Option<Topk<'a>>,
    }

    let response = SampleResponse::decode(encoded).map_err(|error| error.to_string())?;
    let sequences = response.sequences.iter().map(|sequence| Sequence {
        stop_reason: if sequence.stop_reason == StopReason::Stop as i32 { "stop" } else { "length" },
        tokens: Tokens(&sequence.tokens),
        logprobs: sequence.logprobs.as_deref().map(Floats),
        topk_logprobs: sequence.topk_sampled_logprobs.as_ref().map(Topk),
    });
    let rendered = Rendered {
        kind: "sample",
        sequences: sequences.collect(),
        prompt_logprobs: response.prompt_logprobs.as_deref().map(Floats),
        topk_prompt_logprobs: response.topk_prompt_logprobs.as_ref().map(Topk),
        target_prompt_logprobs: response.target_prompt_logprobs.as_ref().map(Matrix),
        prompt_alt_tokens: response.prompt_alt_tokens.as_ref().map(|drawn| AltTokens {
            tokens: drawn.tokens.as_ref().map(Matrix),
            logprobs: drawn.logprobs.as_ref().map(Matrix),
        }),
        prompt_cache_hit_tokens: response.prompt_cache_hit_tokens,
    };
    serde_json::to_writer(out, &rendered).map_err(|error| error.to_string())
}

/// An encoded `ForwardBackwardOutput` as JSON.
///
/// # Errors
/// If it is not one, or cannot be written.
pub fn forward_backward(encoded: Bytes, out: &mut dyn Write) -> Result<(), String> {
    #[derive(Serialize)]
    struct Rendered<'a> {
        loss_fn_output_type: &'a str,
        loss_fn_outputs: Datums<'a>,
        metrics: &'a BTreeMap<String, f64>,
    }

    let output = ForwardBackwardOutput::decode(encoded).map_err(|error| error.to_string())?;
    let rendered = Rendered {
        loss_fn_output_type: &output.loss_fn_output_type,
        loss_fn_outputs: Datums(&output.loss_fn_outputs),
        metrics: &output.metrics,
    };
    serde_json::to_writer(out, &rendered).map_err(|error| error.to_string())
}

/// f32 values, little endian. JSON has no NaN: positions without a value become null.
struct Floats<'a>(&'a [u8]);

impl Serialize for Floats<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (values, rest) = self.0.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(S::Error::custom(format!("{} bytes are not a whole number of float32 values", self.0.len())));
        }
        serializer.collect_seq(values.iter().map(|value| f64::from(f32::from_le_bytes(*value))))
    }
}

/// i32 token ids, little endian.
struct Tokens<'a>(&'a [u8]);

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (values, rest) = self.0.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(S::Error::custom(format!("{} bytes are not a whole number of int32 tokens", self.0.len())));
        }
        serializer.collect_seq(values.iter().map(|value| i32::from_le_bytes(*value)))
    }
}

/// i64 values, little endian.
struct Integers<'a>(&'a [u8]);

impl Serialize for Integers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (values, rest) = self.0.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(S::Error::custom(format!("{} bytes are not a whole number of int64 values", self.0.len())));
        }
        serializer.collect_seq(values.iter().map(|value| i64::from_le_bytes(*value)))
    }
}

/// A tensor of f32 or i64 values, as the `TensorData` of a request.
struct Matrix<'a>(&'a Tensor);

impl Serialize for Matrix<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (values, indices) = match &self.0.encoding {
            Some(Encoding::Dense(values)) => (values, None),
            Some(Encoding::SparseCsr(csr)) => (&csr.values, Some((&csr.crow_indices, &csr.col_indices))),
            None => return Err(S::Error::custom("a tensor has no values")),
        };
        let mut map = serializer.serialize_map(None)?;
        if self.0.dtype == DType::Int64 as i32 {
            map.serialize_entry("data", &Integers(values))?;
            map.serialize_entry("dtype", "int64")?;
        } else {
            map.serialize_entry("data", &Floats(values))?;
            map.serialize_entry("dtype", "float32")?;
        }
        map.serialize_entry("shape", &self.0.shape)?;
        if let Some((row_offsets, columns)) = indices {
            map.serialize_entry("sparse_crow_indices", &Integers(row_offsets))?;
            map.serialize_entry("sparse_col_indices", &Integers(columns))?;
        }
        map.end()
    }
}

/// `[[[token, logprob], ...], null, ...]`: null where a row has no tokens.
struct Topk<'a>(&'a TopkLogprobs);

impl Serialize for Topk<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let k = (self.0.k as usize).max(1);
        let (tokens, logprobs) = (self.0.token_ids.as_chunks::<4>().0, self.0.logprobs.as_chunks::<4>().0);
        serializer.collect_seq(tokens.chunks(k).zip(logprobs.chunks(k)).map(|(tokens, logprobs)| {
            let cells = tokens.iter().zip(logprobs);
            let cells = cells.map(|(token, logprob)| (i32::from_le_bytes(*token), f64::from(f32::from_le_bytes(*logprob))));
            let cells: Vec<(i32, f64)> = cells.filter(|(_, logprob)| *logprob > -99_999.0).collect();
            if cells.is_empty() { None } else { Some(cells) }
        }))
    }
}

/// Outputs, one map for each example.
struct Datums<'a>(&'a [ArrayRecord]);

impl Serialize for Datums<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut records = Vec::with_capacity(self.0.len());
        for record in self.0 {
            let fields = record.fields.iter().map(|(name, tensor)| Ok((name.as_str(), tensor, i64_values(&tensor.offsets)?)));
            let fields: Vec<_> = fields.collect::<Result<_, String>>().map_err(S::Error::custom)?;
            records.push((usize::try_from(record.num_datums).unwrap_or(0), fields));
        }
        serializer
            .collect_seq(records.iter().flat_map(|(num_datums, fields)| (0..*num_datums).map(|datum| Fields { fields, datum })))
    }
}

/// The tensors of one example.
struct Fields<'a> {
    fields: &'a [(&'a str, &'a BatchedTensor, Vec<i64>)],
    datum: usize,
}

impl Serialize for Fields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Rendered<'a> {
            data: Floats<'a>,
            dtype: &'a str,
            shape: Vec<i64>,
        }

        let mut map = serializer.serialize_map(Some(self.fields.len()))?;
        for (name, tensor, offsets) in self.fields {
            let Some(&[start, end]) = offsets.get(self.datum..self.datum + 2) else { continue };
            let data = usize::try_from(start).ok().zip(usize::try_from(end).ok());
            let data = data.and_then(|(start, end)| tensor.data.get(start..end));
            let data = data.ok_or_else(|| S::Error::custom("offsets beyond the data"))?;
            let width = tensor.trailing_shape.iter().product::<i64>().max(1);
            let mut shape = vec![(data.len() / size_of::<f32>()) as i64 / width];
            shape.extend(&tensor.trailing_shape);
            map.serialize_entry(name, &Rendered { data: Floats(data), dtype: "float32", shape })?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::wire::proto::{encode_forward_backward, encode_sample};
    use strata_engine::api;

    fn rendered(render: fn(Bytes, &mut dyn Write) -> Result<(), String>, encoded: Bytes) -> Value {
        let mut text = Vec::new();
        render(encoded, &mut text).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    #[test]
    fn json_shows_what_protobuf_holds() {
        let sequence = api::SampledSequence {
            tokens: vec![5, 6],
            logprobs: vec![-0.5, -1.5],
            topk: Some(vec![vec![(5, -0.5)], vec![]]),
            stop_reason: api::StopReason::Stop,
        };
        let output = api::SampleOutput {
            sequences: vec![sequence],
            prompt_logprobs: Some(vec![None, Some(-2.0)]),
            topk_prompt_logprobs: None,
            target_prompt_logprobs: Some(api::PromptTargetLogprobs {
                shape: [1, 2],
                cells: api::Cells::Csr { row_offsets: vec![0, 1], columns: vec![1] },
                logprobs: vec![-3.0],
            }),
            prompt_alt_tokens: Some(api::PromptAltTokens { k: 2, tokens: vec![8, 9], logprobs: vec![-4.0, -5.0] }),
            prompt_cache_hit_tokens: 1,
        };
        let shown = rendered(sample, encode_sample(&output, 0, 1));
        let sparse = json!({ "sparse_crow_indices": [0, 1], "sparse_col_indices": [1] });
        let mut targets = json!({ "data": [-3.0], "dtype": "float32", "shape": [1, 2] });
        targets.as_object_mut().unwrap().extend(sparse.as_object().unwrap().clone());
        assert_eq!(shown["target_prompt_logprobs"], targets);
        let drawn = &shown["prompt_alt_tokens"];
        assert_eq!(drawn["tokens"], json!({ "data": [8, 9], "dtype": "int64", "shape": [1, 2] }));
        assert_eq!(drawn["logprobs"], json!({ "data": [-4.0, -5.0], "dtype": "float32", "shape": [1, 2] }));
        assert_eq!(shown["prompt_logprobs"], json!([null, -2.0]));
        assert_eq!(shown["sequences"][0]["tokens"], json!([5, 6]));
        assert_eq!(shown["sequences"][0]["topk_logprobs"], json!([[[5, -0.5]], null]));

        let datum = |shape: &[usize]| api::DatumOutput {
            shape: shape.to_vec(),
            logprobs: vec![-1.0; shape.iter().product()],
            elementwise_loss: vec![1.0; shape.iter().product()],
        };
        let output = api::ForwardBackwardOutput { data: vec![datum(&[1]), datum(&[2, 3])], metrics: vec![] };
        let shown = rendered(forward_backward, encode_forward_backward(&output));
        assert_eq!(shown["loss_fn_outputs"][1]["logprobs"]["shape"], json!([2, 3]));
        assert_eq!(shown["loss_fn_outputs"][0]["elementwise_loss"]["data"], json!([1.0]));
    }
}
