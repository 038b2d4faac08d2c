//! From a sample that is recorded to the operation that refers to it.

use std::sync::atomic::Ordering;

use prost::Message;
use serde_json::json;
use strata_engine::api::{LossValues, Request, TrainOp};

use super::{TestServer, sample_body};
use crate::wire::proto::{self, DType, Encoding, SequenceTokens, SpanKind, Tensor};

/// A field whose content is `content`.
fn delimited(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![tag << 3 | 2];
    prost::encoding::encode_varint(content.len() as u64, &mut field);
    [field, content.to_vec()].concat()
}

fn tensor(dtype: DType, bytes: Vec<u8>) -> Tensor {
    Tensor { encoding: Some(Encoding::Dense(bytes.into())), dtype: dtype.into(), shape: vec![] }
}

/// A pass over what the scripted engine samples after the prompt 1, 2, 3. Each list of `spans` is that of a field of the datum.
fn pass_body(model_id: &str, seq_id: i32, loss_fn: &str, spans: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let bytes = |tokens: &[i32]| tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>();
    let text = proto::EncodedText { tokens: bytes(&[1, 2, 3, 4]).into() };
    let targets = [2i64, 3, 4, 5].iter().flat_map(|t| t.to_le_bytes()).collect();
    let advantages = [0.0f32, 0.0, 1.0, 1.0].iter().flat_map(|t| t.to_le_bytes()).collect();
    let inputs = [("target_tokens", tensor(DType::Int64, targets)), ("advantages", tensor(DType::Float32, advantages))];
    let datum = proto::Datum {
        model_input: vec![proto::Chunk { chunk: Some(proto::ChunkKind::EncodedText(text)) }],
        loss_fn_inputs: inputs.map(|(name, tensor)| (name.to_owned(), tensor)).into(),
    };
    let spans = spans.iter().flat_map(|(tag, span)| delimited(*tag, span));
    let datum: Vec<u8> = datum.encode_to_vec().into_iter().chain(spans).collect();
    let head =
        proto::ForwardBackwardRequest { model_id: model_id.into(), seq_id, loss_fn: loss_fn.into(), ..Default::default() };
    [head.encode_to_vec(), delimited(3, &datum)].concat()
}

fn spans(sequence_id: &str) -> Vec<(u8, Vec<u8>)> {
    let span = |kind: fn(SequenceTokens) -> SpanKind, offset, length| {
        let tokens = SequenceTokens { sequence_id: sequence_id.into(), offset, length };
        proto::ProvenanceSpan { span: Some(kind(tokens)) }.encode_to_vec()
    };
    let (prompt, sampled) = (SpanKind::PromptTokens as fn(_) -> _, SpanKind::SampledTokens as fn(_) -> _);
    vec![(3, span(prompt, 0, 3)), (3, span(sampled, 0, 1)), (4, span(prompt, 1, 2)), (4, span(sampled, 0, 2))]
}

impl TestServer {
    /// A sampling session and a model in it.
    async fn sampling_and_training(&self) -> (String, String, String) {
        let (session_id, model_id) = self.new_model().await;
        let asked = json!({ "session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/base" });
        let sampler = self.ok("create_sampling_session", asked).await["sampling_session_id"].as_str().unwrap().to_owned();
        (session_id, model_id, sampler)
    }

    async fn recorded_sample(&self, sampler: &str, seq_id: u64) -> String {
        let mut body = sample_body(sampler, seq_id);
        body["record_stability_info"] = json!(true);
        self.ok("asample", body).await["sample_sequence_ids"][1].as_str().unwrap().to_owned()
    }

    /// The outcome of a pass, and the log-probabilities that reached the engine.
    async fn spanned_pass(&self, body: Vec<u8>) -> (serde_json::Value, Option<Vec<f32>>) {
        let request_id = self.pass(body, None).await.json()["request_id"].as_str().unwrap().to_owned();
        let outcome = self.retrieve(&request_id).await.json();
        let logprobs = match self.engine.requests.lock().unwrap().last() {
            Some(Request::Train { op: TrainOp::ForwardBackward { data, .. }, .. }) => {
                data[0].loss_inputs.get("logprobs").map(|input| match &input.values {
                    LossValues::F32(values) => values.clone(),
                    LossValues::I64(values) => panic!("{values:?}"),
                })
            }
            _ => None,
        };
        (outcome, logprobs)
    }
}

#[tokio::test]
async fn what_was_sampled_becomes_the_policy_of_the_operation_that_names_it() {
    let server = TestServer::new();
    let (session_id, model_id, sampler) = server.sampling_and_training().await;
    let id = server.recorded_sample(&sampler, 0).await;
    let (outcome, logprobs) = server.spanned_pass(pass_body(&model_id, 1, "stable_reinforce", &spans(&id))).await;
    assert_eq!(logprobs, Some(vec![0.0, 0.0, -1.0, -2.0]), "{outcome}");
    assert_eq!(outcome["metrics"]["recorded_logprobs:sum"], json!(2.0), "{outcome}");
    let silent = server.ok("asample", sample_body(&sampler, 1)).await["sample_sequence_ids"][0].as_str().unwrap().to_owned();
    let (outcome, _) = server.spanned_pass(pass_body(&model_id, 2, "stable_reinforce", &spans(&silent))).await;
    let error = outcome["error"].as_str().unwrap();
    assert!(error.contains("nothing is recorded of sequence") && outcome["category"] == json!("user"), "{outcome}");
    let used = server.app.records.bytes();
    assert!(used > 0);
    server.ok(&format!("sessions/{session_id}/finish"), json!({ "reason": { "type": "success" } })).await;
    assert_eq!(server.app.records.bytes(), 0, "it ends with its session");
}

#[tokio::test]
async fn what_is_sampled_after_its_session_has_ended_is_not_recorded() {
    let server = TestServer::new();
    let (session_id, _, sampler) = server.sampling_and_training().await;
    server.engine.holds.store(true, Ordering::Relaxed);
    server.recorded_sample(&sampler, 0).await;
    server.ok(&format!("sessions/{session_id}/finish"), json!({ "reason": { "type": "success" } })).await;
    server.engine.holds.store(false, Ordering::Relaxed);
    server.engine.release();
    assert_eq!(server.app.records.bytes(), 0);
}

#[tokio::test]
async fn losses_that_do_not_count_spans_take_whatever_is_in_them() {
    let server = TestServer::new();
    let (_, model_id, _) = server.sampling_and_training().await;
    let garbage = [(3, vec![0xff, 0xff]), (4, vec![]), (4, delimited(2, &delimited(1, &[0xff, 0xfe])))];
    for (seq_id, spans) in [(1, garbage.to_vec()), (2, spans("nobody:0"))] {
        let (outcome, logprobs) = server.spanned_pass(pass_body(&model_id, seq_id, "ppo", &spans)).await;
        assert!(outcome.get("error").is_none() && logprobs.is_none(), "{outcome}");
        assert!(outcome["metrics"].get("recorded_logprobs:sum").is_none());
    }
    let (outcome, _) = server.spanned_pass(pass_body(&model_id, 3, "stable_reinforce", &garbage)).await;
    assert!(
        outcome["error"].as_str().unwrap().starts_with("datum 0: model_input_spans[0]: it is no ProvenanceSpan"),
        "{outcome}"
    );
}
