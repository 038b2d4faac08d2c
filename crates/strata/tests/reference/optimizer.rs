//! Training through the engine against torch.optim.AdamW on the same checkpoints and adapters.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use strata_engine::api::{
    AdamParams, CheckpointSource, Client, Datum, LoraSpec, LossInput, LossSpec, LossValues, Request, Response, SaveTarget,
    TrainOp,
};
use strata_engine::{EngineConfig, EngineHandle, Machine, Speculation};
use strata_model::{Model, ModelSource};
use strata_tensor::{CpuBackend, DType};
use tempfile::TempDir;

use crate::values::{Reference, fixtures};

/// Largest relative difference of a loss or a gradient norm.
const LOSS_TOLERANCE: f64 = 1e-4;
/// Largest difference of a trained parameter. A step moves each by about the learning rate, 2e-3.
const PARAMETER_TOLERANCE: f32 = 1e-4;

/// The runs of the fixtures: their names and settings.
fn runs() -> [(&'static str, AdamParams); 2] {
    let plain = AdamParams { learning_rate: 2e-3, ..AdamParams::default() };
    [("plain", plain), ("decay_clip", AdamParams { weight_decay: 5.0, grad_clip_norm: 1.0, ..plain })]
}

fn ask(engine: &EngineHandle, request: Request) -> Response {
    let (sender, receiver) = channel();
    let client = Client { owner: "test".into(), session: "test".into() };
    let reply = Box::new(move |outcome, _| sender.send(outcome).expect("the test waits for it"));
    engine.submit("request".into(), client, request, reply).expect("the request is accepted");
    receiver.recv().expect("every request is answered").expect("the request succeeds")
}

/// All tokens of each sequence predicted one by one; a sequence of one token has nothing to predict.
fn next_token_data(tokens: &Path) -> Vec<Datum> {
    let text = std::fs::read_to_string(tokens).expect("the fixture has tokens");
    let sequences: Vec<Vec<i64>> = serde_json::from_str(&text).expect("the tokens are lists of lists");
    let long_enough = sequences.iter().filter(|tokens| tokens.len() > 1);
    let datum = |tokens: &Vec<i64>| {
        let len = tokens.len() - 1;
        let input = |values| LossInput { shape: vec![len], values };
        let loss_inputs = BTreeMap::from([
            ("target_tokens".to_owned(), input(LossValues::I64(tokens[1..].to_vec()))),
            ("weights".to_owned(), input(LossValues::F32(vec![1.0; len]))),
        ]);
        Datum { tokens: tokens[..len].to_vec(), images: Vec::new(), loss_inputs }
    };
    long_enough.map(datum).collect()
}

struct Run<'a> {
    engine: &'a EngineHandle,
    model_id: String,
    seq_id: u64,
}

impl Run<'_> {
    fn train(&mut self, op: TrainOp) -> Response {
        self.seq_id += 1;
        ask(self.engine, Request::Train { model_id: self.model_id.clone(), seq_id: self.seq_id, op })
    }

    fn loss(&mut self, data: &[Datum], forward_only: bool) -> f64 {
        let loss = LossSpec { name: "cross_entropy".into(), config: BTreeMap::new() };
        match self.train(TrainOp::ForwardBackward { data: data.to_vec(), loss, forward_only }) {
            Response::ForwardBackward(output) => metric(&output.metrics, "loss:sum"),
            other => panic!("a pass answered {other:?}"),
        }
    }

    fn step(&mut self, adam: AdamParams) -> f64 {
        match self.train(TrainOp::OptimStep(adam)) {
            Response::OptimStep { metrics } => metric(&metrics, "optim/grad_norm"),
            other => panic!("a step answered {other:?}"),
        }
    }
}

fn metric(metrics: &[(String, f64)], name: &str) -> f64 {
    metrics.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name} is missing")).1
}

fn assert_close(label: &str, actual: f64, expected: f32) {
    let error = (actual / f64::from(expected) - 1.0).abs();
    assert!(error <= LOSS_TOLERANCE, "{label}: {actual} where torch has {expected}");
}

#[test]
fn five_adamw_steps_follow_torch() {
    let mut compared = 0;
    for fixture in fixtures() {
        let model_dir = fixture.join("model");
        let backend = Arc::new(CpuBackend::new(None).expect("a backend"));
        let model = Model::load(backend, &ModelSource::Directory(model_dir), Some(DType::F32)).expect("the fixture loads");
        let engine = EngineHandle::start(
            model,
            None,
            EngineConfig {
                memory_bytes: 1 << 30,
                adapter_bytes: None,
                base_model: "reference".into(),
                machine: Machine::default(),
                speculation: Speculation::Off,
            },
        )
        .expect("the engine starts");
        for entry in std::fs::read_dir(&fixture).expect("a fixture directory") {
            let adapter_dir = entry.expect("an entry").path();
            if !adapter_dir.join("adapter_config.json").exists() {
                continue;
            }
            let expected = Reference::read(&adapter_dir.with_extension("safetensors"));
            if expected.floats("adamw.").next().is_none() {
                continue;
            }
            let data = next_token_data(&fixture.join("tokens.json"));
            for (name, adam) in runs() {
                let label = format!("{} {name}", adapter_dir.display());
                let model_id = label.clone();
                let create = Request::CreateModelFromCheckpoint {
                    model_id: model_id.clone(),
                    source: CheckpointSource { dir: adapter_dir.clone(), name: label.clone(), save_id: None },
                    // Room for any of them.
                    lora: LoraSpec {
                        rank: 64,
                        seed: 0,
                        train_attn: true,
                        train_mlp: true,
                        train_unembed: true,
                        ranks: Default::default(),
                    },
                    with_optimizer: false,
                };
                ask(&engine, create);
                let mut run = Run { engine: &engine, model_id, seq_id: 0 };
                let losses = &expected.float(&format!("adamw.{name}.losses")).values;
                let norms = &expected.float(&format!("adamw.{name}.grad_norms")).values;
                for (step, &norm) in norms.iter().enumerate() {
                    assert_close(&format!("{label}: loss before step {step}"), run.loss(&data, false), losses[step]);
                    assert_close(&format!("{label}: gradient norm of step {step}"), run.step(adam), norm);
                }
                assert_close(&format!("{label}: loss at the end"), run.loss(&data, true), losses[norms.len()]);
                check_final_parameters(&mut run, &expected, name, &label);
                compared += 1;
            }
        }
    }
    assert!(compared >= 10, "only {compared} runs were compared");
}

fn check_final_parameters(run: &mut Run<'_>, expected: &Reference, name: &str, label: &str) {
    let out = TempDir::new().expect("a temporary directory");
    let dir = out.path().join("adapter");
    let target = SaveTarget {
        root: out.path().into(),
        dir,
        name: label.into(),
        overwrite: false,
        metadata: serde_json::Value::Null,
        recipients: vec![],
    };
    let Response::Saved { dir, .. } = run.train(TrainOp::SaveSampler(target)) else { panic!("{label}: not saved") };
    let saved = Reference::read(&dir.join("adapter_model.safetensors"));
    let prefix = format!("adamw.{name}.final.");
    for (parameter, want) in expected.floats(&prefix) {
        let error = saved.float(&parameter[prefix.len()..]).max_difference(want);
        assert!(error <= PARAMETER_TOLERANCE, "{label} {parameter}: off by {error}");
    }
}
