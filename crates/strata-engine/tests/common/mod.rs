//! An engine over the embedded model, and short ways to ask it things.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

use strata_engine::api::*;
use strata_engine::{EngineConfig, EngineHandle, Machine, Speculation};
use strata_model::{Model, ModelSource, Tokenizer};
use strata_tensor::CpuBackend;

pub const MEMORY_BYTES: u64 = 1 << 30;

pub fn model(threads: usize) -> Model {
    let backend = CpuBackend::new(Some(threads)).expect("the processor has a backend");
    Model::load(Arc::new(backend), &ModelSource::Embedded, None).expect("the embedded model is whole")
}

pub fn config(memory_bytes: u64) -> EngineConfig {
    EngineConfig {
        memory_bytes,
        adapter_bytes: None,
        base_model: "strata/tiny-base".into(),
        machine: Machine::default(),
        speculation: Speculation::PromptLookup,
    }
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(&ModelSource::Embedded).expect("the embedded tokenizer is whole")
}

pub fn engine_with(threads: usize, memory_bytes: u64) -> EngineHandle {
    EngineHandle::start(model(threads), Some(tokenizer().into()), config(memory_bytes)).expect("memory suffices")
}

pub fn engine() -> EngineHandle {
    engine_with(2, MEMORY_BYTES)
}

pub fn client(session: &str) -> Client {
    Client { owner: "owner".into(), session: session.into() }
}

/// Submits for one of several sessions.
pub fn submit_as(engine: &EngineHandle, session: &str, request: Request) -> Receiver<Outcome> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = format!("request-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let (tx, rx) = channel();
    let refused = tx.clone();
    let reply = Box::new(move |outcome, _| drop(tx.send(outcome)));
    if let Err(refusal) = engine.submit(id.into(), client(session), request, reply) {
        refused.send(Err(Failure::User(refusal.to_string()))).unwrap();
    }
    rx
}

pub fn submit(engine: &EngineHandle, request: Request) -> Receiver<Outcome> {
    submit_as(engine, "session", request)
}

pub fn ask(engine: &EngineHandle, request: Request) -> Outcome {
    submit(engine, request).recv().expect("every request is answered")
}

pub fn user_error(outcome: Outcome) -> String {
    match outcome {
        Err(Failure::User(message)) => message,
        other => panic!("expected a user failure, got {other:?}"),
    }
}

pub fn lora(rank: usize, seed: u64) -> LoraSpec {
    LoraSpec { rank, seed, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() }
}

pub fn create(engine: &EngineHandle, id: &str, rank: usize, seed: u64) {
    let outcome = ask(engine, Request::CreateModel { model_id: id.into(), lora: lora(rank, seed) });
    assert!(matches!(outcome, Ok(Response::Created { .. })), "{outcome:?}");
}

pub fn train(id: &str, seq_id: u64, op: TrainOp) -> Request {
    Request::Train { model_id: id.into(), seq_id, op }
}

/// `n` token ids that depend on `seed`.
pub fn tokens(seed: u64, n: usize) -> Vec<i64> {
    (0..n as u64).map(|i| 3 + (strata_tensor::random::philox(seed, [i, 0])[0] % 256) as i64).collect()
}

pub fn reals(values: Vec<f32>) -> LossInput {
    LossInput { shape: vec![values.len()], values: LossValues::F32(values) }
}

pub fn ids(values: Vec<i64>) -> LossInput {
    LossInput { shape: vec![values.len()], values: LossValues::I64(values) }
}

pub fn datum(tokens: &[i64], inputs: Vec<(&str, LossInput)>) -> Datum {
    let mut loss_inputs: BTreeMap<String, LossInput> = inputs.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
    loss_inputs.insert("target_tokens".into(), ids(tokens[1..].to_vec()));
    Datum { tokens: tokens[..tokens.len() - 1].to_vec(), images: Vec::new(), loss_inputs }
}

/// Next-token cross-entropy over a sequence, every target with the same weight.
pub fn cross_entropy_datum(tokens: &[i64], weight: f32) -> Datum {
    datum(tokens, vec![("weights", reals(vec![weight; tokens.len() - 1]))])
}

/// Some cross-entropy examples of different lengths.
pub fn examples(seed: u64, count: usize) -> Vec<Datum> {
    (0..count as u64)
        .map(|i| cross_entropy_datum(&tokens(seed * 100 + i, 5 + (17 * i as usize + seed as usize) % 60), 0.5 + i as f32 / 8.0))
        .collect()
}

pub fn loss(name: &str) -> LossSpec {
    LossSpec { name: name.into(), config: BTreeMap::new() }
}

pub fn backward(data: Vec<Datum>) -> TrainOp {
    TrainOp::ForwardBackward { data, loss: loss("cross_entropy"), forward_only: false }
}

pub fn forward(data: Vec<Datum>) -> TrainOp {
    TrainOp::ForwardBackward { data, loss: loss("cross_entropy"), forward_only: true }
}

pub fn step(learning_rate: f64) -> TrainOp {
    TrainOp::OptimStep(AdamParams { learning_rate, weight_decay: 0.01, grad_clip_norm: 1.0, ..AdamParams::default() })
}

pub fn losses(outcome: Outcome) -> ForwardBackwardOutput {
    match outcome {
        Ok(Response::ForwardBackward(output)) => output,
        other => panic!("expected losses, got {other:?}"),
    }
}

pub fn loss_sum(output: &ForwardBackwardOutput) -> f64 {
    output.metrics.iter().find(|(name, _)| name == "loss:sum").expect("every loss has its sum").1
}

pub fn grad_norm(outcome: Outcome) -> f64 {
    match outcome {
        Ok(Response::OptimStep { metrics }) => metrics[0].1,
        other => panic!("expected a step, got {other:?}"),
    }
}

/// Everything a pass answered, as bits.
pub fn bits(output: &ForwardBackwardOutput) -> Vec<u32> {
    let values = output.data.iter().flat_map(|d| d.logprobs.iter().chain(&d.elementwise_loss));
    values.map(|v| v.to_bits()).collect()
}

pub fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn save(dir: &Path) -> SaveTarget {
    SaveTarget {
        root: dir.parent().unwrap().into(),
        dir: dir.into(),
        name: "the-save".into(),
        overwrite: false,
        metadata: serde_json::json!({ "by": "test" }),
        recipients: vec![],
    }
}

/// What [`save`] saved in a directory.
pub fn source(dir: &Path) -> CheckpointSource {
    CheckpointSource { dir: dir.into(), name: "the-save".into(), save_id: None }
}

/// The bytes of an adapter and its optimizer state, saved as the tenant's operation `seq_id`.
pub fn saved_bytes(engine: &EngineHandle, id: &str, seq_id: u64) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("checkpoint");
    let outcome = ask(engine, train(id, seq_id, TrainOp::SaveState(save(&target))));
    assert!(matches!(outcome, Ok(Response::Saved { .. })), "{outcome:?}");
    let read = |name: &str| std::fs::read(target.join(name)).unwrap();
    [read("adapter_model.safetensors"), read("optimizer.safetensors")].concat()
}

pub fn base_sampler(engine: &EngineHandle, id: &str) {
    let outcome = ask(engine, Request::CreateSampler { sampler_id: id.into(), source: None });
    assert!(matches!(outcome, Ok(Response::Sampler)), "{outcome:?}");
}

pub fn snapshot(engine: &EngineHandle, model: &str, seq_id: u64, sampler: &str) {
    let outcome = ask(engine, train(model, seq_id, TrainOp::Snapshot { sampler_id: sampler.into(), replace: false }));
    assert!(matches!(outcome, Ok(Response::Sampler)), "{outcome:?}");
}

/// A request for `max_tokens` tokens at temperature 1 that nothing stops.
pub fn sample_request(prompt: Vec<i64>, num_samples: usize, max_tokens: usize, seed: u64) -> SampleRequest {
    SampleRequest { num_samples, max_tokens: Some(max_tokens), seed, stop: Stop::Tokens(vec![]), ..SampleRequest::of(prompt) }
}

pub fn sample(sampler: &str, sample: SampleRequest) -> Request {
    Request::Sample { sampler_id: sampler.into(), sample }
}

pub fn sampled(outcome: Outcome) -> SampleOutput {
    match outcome {
        Ok(Response::Sampled(output)) => output,
        other => panic!("expected samples, got {other:?}"),
    }
}

/// Tokens and log-probability bits of all sequences.
pub fn sample_bits(output: &SampleOutput) -> Vec<(Vec<u32>, Vec<u32>)> {
    output.sequences.iter().map(|s| (s.tokens.clone(), bits_of(&s.logprobs))).collect()
}
