//! Encodes the results of sampling and of `forward_backward`.

use axum::body::Bytes;
use prost::Message;
use strata_engine::api;

use crate::wire::proto::{
    ArrayRecord, BatchedTensor, DType, Encoding, ForwardBackwardOutput, PromptAltTokens, SampleResponse, SampledSequence,
    SparseCsr, StopReason, Tensor, TopkLogprobs,
};

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
        target_prompt_logprobs: output.target_prompt_logprobs.as_ref().map(encode_targets),
        prompt_alt_tokens: output.prompt_alt_tokens.as_ref().map(encode_alternatives),
    };
    response.encode_to_vec().into()
}

fn i64_bytes(values: impl IntoIterator<Item = i64>) -> Bytes {
    values.into_iter().flat_map(i64::to_le_bytes).collect::<Vec<u8>>().into()
}

fn encode_targets(scored: &api::PromptTargetLogprobs) -> Tensor {
    let values = f32_bytes(scored.logprobs.iter().copied());
    let encoding = match &scored.cells {
        api::Cells::All => Encoding::Dense(values),
        api::Cells::Csr { row_offsets, columns } => Encoding::SparseCsr(SparseCsr {
            values,
            crow_indices: i64_bytes(row_offsets.iter().copied()),
            col_indices: i64_bytes(columns.iter().copied()),
        }),
    };
    matrix(encoding, DType::Float32, scored.shape)
}

fn encode_alternatives(drawn: &api::PromptAltTokens) -> PromptAltTokens {
    let shape = [drawn.tokens.len() / drawn.k.max(1), drawn.k];
    let tokens = Encoding::Dense(i64_bytes(drawn.tokens.iter().map(|&token| i64::from(token))));
    let logprobs = Encoding::Dense(f32_bytes(drawn.logprobs.iter().copied()));
    PromptAltTokens {
        tokens: Some(matrix(tokens, DType::Int64, shape)),
        logprobs: Some(matrix(logprobs, DType::Float32, shape)),
    }
}

fn matrix(encoding: Encoding, dtype: DType, shape: [usize; 2]) -> Tensor {
    Tensor { encoding: Some(encoding), dtype: dtype.into(), shape: shape.map(|extent| extent as i64).to_vec() }
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
    use crate::wire::tensor;

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
            target_prompt_logprobs: None,
            prompt_alt_tokens: None,
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
