//! Results as JSON, for readers that do not ask for protobuf: older clients, and people with curl.

use axum::body::Bytes;
use prost::Message;
use serde_json::{Map, Value, json};

use crate::wire::proto::{BatchedTensor, ForwardBackwardOutput, SampleResponse, StopReason, TopkLogprobs};
use crate::wire::tensor::{append_i32_tokens, f32_values, i64_values};

/// An encoded `SampleResponse` as JSON.
///
/// # Errors
/// If it is not one.
pub fn sample(encoded: Bytes) -> Result<Value, String> {
    let response = SampleResponse::decode(encoded).map_err(|error| error.to_string())?;
    let mut sequences = Vec::with_capacity(response.sequences.len());
    for sequence in &response.sequences {
        let mut tokens = Vec::new();
        append_i32_tokens(&sequence.tokens, &mut tokens)?;
        let stop_reason = if sequence.stop_reason == StopReason::Stop as i32 { "stop" } else { "length" };
        let logprobs = sequence.logprobs.as_ref().map(|bytes| f32_values(bytes)).transpose()?;
        let mut rendered = json!({ "stop_reason": stop_reason, "tokens": tokens, "logprobs": logprobs });
        if let Some(topk) = &sequence.topk_sampled_logprobs {
            rendered["topk_logprobs"] = render_topk(topk)?;
        }
        sequences.push(rendered);
    }
    let prompt_logprobs = response.prompt_logprobs.as_ref().map(|bytes| f32_values(bytes)).transpose()?;
    Ok(json!({
        "type": "sample",
        "sequences": sequences,
        // JSON has no NaN: positions without a value become null.
        "prompt_logprobs": prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs.as_ref().map(render_topk).transpose()?,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    }))
}

/// `[[[token, logprob], ...], null, ...]`: null where a row has no tokens.
fn render_topk(topk: &TopkLogprobs) -> Result<Value, String> {
    let mut tokens = Vec::new();
    append_i32_tokens(&topk.token_ids, &mut tokens)?;
    let logprobs = f32_values(&topk.logprobs)?;
    let k = (topk.k as usize).max(1);
    let rows = tokens.chunks(k).zip(logprobs.chunks(k)).map(|(tokens, logprobs)| {
        let cells = tokens.iter().zip(logprobs).filter(|(_, logprob)| **logprob > -99_999.0);
        let cells: Vec<Value> = cells.map(|(token, logprob)| json!([token, logprob])).collect();
        if cells.is_empty() { Value::Null } else { Value::Array(cells) }
    });
    Ok(rows.collect())
}

/// An encoded `ForwardBackwardOutput` as JSON.
///
/// # Errors
/// If it is not one.
pub fn forward_backward(encoded: Bytes) -> Result<Value, String> {
    let output = ForwardBackwardOutput::decode(encoded).map_err(|error| error.to_string())?;
    let mut datums = Vec::new();
    for record in &output.loss_fn_outputs {
        let first = datums.len();
        datums.resize(first + usize::try_from(record.num_datums).unwrap_or(0), Map::new());
        for (name, tensor) in &record.fields {
            for (datum, rendered) in datums[first..].iter_mut().zip(render_batched(tensor)?) {
                datum.insert(name.clone(), rendered);
            }
        }
    }
    Ok(json!({
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": datums,
        "metrics": output.metrics,
    }))
}

fn render_batched(tensor: &BatchedTensor) -> Result<Vec<Value>, String> {
    let values = f32_values(&tensor.data)?;
    let offsets = i64_values(&tensor.offsets)?;
    let width = tensor.trailing_shape.iter().product::<i64>().max(1);
    let mut rendered = Vec::with_capacity(offsets.len());
    for bounds in offsets.windows(2) {
        let range = (bounds[0] / 4) as usize..(bounds[1] / 4) as usize;
        let values = values.get(range).ok_or("offsets beyond the data")?;
        let mut shape = vec![values.len() as i64 / width];
        shape.extend(&tensor.trailing_shape);
        rendered.push(json!({ "data": values, "dtype": "float32", "shape": shape }));
    }
    Ok(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::{encode_forward_backward, encode_sample};
    use strata_engine::api;

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
            prompt_cache_hit_tokens: 1,
        };
        let rendered = sample(encode_sample(&output, 0, 1)).unwrap();
        assert_eq!(rendered["prompt_logprobs"], json!([null, -2.0]));
        assert_eq!(rendered["sequences"][0]["tokens"], json!([5, 6]));
        assert_eq!(rendered["sequences"][0]["topk_logprobs"], json!([[[5, -0.5]], null]));

        let datum = |shape: &[usize]| api::DatumOutput {
            shape: shape.to_vec(),
            logprobs: vec![-1.0; shape.iter().product()],
            elementwise_loss: vec![1.0; shape.iter().product()],
        };
        let output = api::ForwardBackwardOutput { data: vec![datum(&[1]), datum(&[2, 3])], metrics: vec![] };
        let rendered = forward_backward(encode_forward_backward(&output)).unwrap();
        assert_eq!(rendered["loss_fn_outputs"][1]["logprobs"]["shape"], json!([2, 3]));
        assert_eq!(rendered["loss_fn_outputs"][0]["elementwise_loss"]["data"], json!([1.0]));
    }
}
