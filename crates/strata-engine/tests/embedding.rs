//! Adapters of the token embedding, which come from files: they train, save, resume and sample like any other.

mod common;

use std::path::Path;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;
use strata_model::checkpoint::{AdapterFormat, Checkpoint, read_adapter, write_adapter};
use strata_model::lora::{LoraConfig, LoraParams, ModuleSet};
use strata_tensor::DType;

/// Writes a fresh adapter of attention and the embedding, of rank 2.
fn write(dir: &Path) {
    let model = model(1);
    let config = LoraConfig {
        rank: 2,
        alpha: 32.0,
        attention: true,
        mlp: false,
        unembed: false,
        embedding: true,
        own: Default::default(),
        left_out: ModuleSet::NONE,
    };
    let params = LoraParams::init(model.backend(), model.lora_modules(), &config, 3).unwrap();
    std::fs::create_dir(dir).unwrap();
    write_adapter(model.backend(), dir, model.lora_modules(), (&config, &params), "strata/tiny-base", AdapterFormat::Tinker)
        .unwrap();
}

/// With room set aside for `lora`.
fn load(engine: &EngineHandle, id: &str, dir: &Path, lora: LoraSpec, with_optimizer: bool) -> Outcome {
    let source = CheckpointSource { dir: dir.into(), name: "the-save".into(), save_id: None };
    let request = Request::CreateModelFromCheckpoint { model_id: id.into(), source, lora, with_optimizer };
    ask(engine, request)
}

/// Passes and steps; the log-probabilities of each.
fn rounds(engine: &EngineHandle, id: &str, first_seq: u64, seeds: std::ops::Range<u64>) -> Vec<Vec<u32>> {
    let round = |(i, seed)| {
        let seq = first_seq + 2 * i as u64;
        let output = losses(ask(engine, train(id, seq, backward(examples(seed, 3)))));
        grad_norm(ask(engine, train(id, seq + 1, step(1e-2))));
        bits(&output)
    };
    seeds.enumerate().map(round).collect()
}

/// The numbers of a tensor of a saved adapter.
fn saved_tensor(dir: &Path, name: &str) -> Vec<f32> {
    let checkpoint = Checkpoint::open_file(&dir.join("adapter_model.safetensors")).unwrap();
    checkpoint.tensor(name).unwrap().unwrap().read(DType::F32).unwrap().as_ref().to_f32_vec()
}

#[test]
fn an_adapter_of_the_embedding_that_was_read_trains_saves_resumes_and_samples_to_the_same_bits() {
    const A: &str = "base_model.model.model.embed_tokens.lora_embedding_A";
    let dir = tempfile::tempdir().unwrap();
    let (written, saved) = (dir.path().join("written"), dir.path().join("saved"));
    write(&written);
    let engine = engine();
    load(&engine, "m", &written, lora(8, 0), false).unwrap();
    create(&engine, "other", 8, 1);
    rounds(&engine, "m", 1, 0..2);
    ask(&engine, train("m", 5, TrainOp::SaveState(save(&saved)))).unwrap();
    // A begins as zeros: only its gradient moves it, and only where tokens were.
    let trained = saved_tensor(&saved, A);
    let moved = trained.iter().filter(|&&v| v != 0.0).count();
    assert!(moved > 0 && moved < trained.len(), "{moved} of {}", trained.len());
    let uninterrupted = rounds(&engine, "m", 6, 2..4);
    let bytes = saved_bytes(&engine, "m", 10);
    snapshot(&engine, "m", 11, "memory");
    let request = || sample_request(tokens(4, 30), 2, 20, 6);
    let from_memory = sampled(ask(&engine, sample("memory", request())));
    let on_disk = dir.path().join("sampler");
    ask(&engine, train("m", 12, TrainOp::SaveSampler(save(&on_disk)))).unwrap();
    drop(engine);

    let engine = engine_with(1, MEMORY_BYTES);
    load(&engine, "m", &saved, lora(8, 0), true).unwrap();
    assert!(rounds(&engine, "m", 1, 2..4) == uninterrupted, "resumed");
    assert!(saved_bytes(&engine, "m", 5) == bytes, "resumed");
    let source = Some((CheckpointSource { dir: on_disk, name: "the-save".into(), save_id: None }, lora(8, 0)));
    ask(&engine, Request::CreateSampler { sampler_id: "disk".into(), source }).unwrap();
    let from_disk = sampled(ask(&engine, sample("disk", request())));
    assert_eq!(sample_bits(&from_disk), sample_bits(&from_memory));

    // What a token's log-probability is when it is sampled is what training says.
    let sequence = &from_memory.sequences[0];
    let all: Vec<i64> = tokens(4, 30).into_iter().chain(sequence.tokens.iter().map(|&t| i64::from(t))).collect();
    let scored = losses(ask(&engine, train("m", 6, forward(vec![cross_entropy_datum(&all, 1.0)]))));
    assert_eq!(bits_of(&scored.data[0].logprobs[29..]), bits_of(&sequence.logprobs));
}

#[test]
fn an_adapter_fits_the_room_that_its_own_shape_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("written");
    write(&written);
    let model = model(1);
    let read = read_adapter(model.backend(), &written, model.lora_modules()).unwrap();
    let engine = engine();
    let spec = strata_engine::spec_of(&read.config, model.lora_modules());
    assert_eq!(spec.ranks["model.embed_tokens"], 2);
    load(&engine, "m", &written, spec.clone(), false).unwrap();
    let source = || Some((CheckpointSource { dir: written.clone(), name: "it".into(), save_id: None }, spec.clone()));
    ask(&engine, Request::CreateSampler { sampler_id: "s".into(), source: source() }).unwrap();
    sampled(ask(&engine, sample("s", sample_request(tokens(4, 30), 1, 3, 6))));
    let smaller = LoraSpec { ranks: [("model.embed_tokens".to_owned(), 1)].into(), ..spec.clone() };
    assert!(user_error(load(&engine, "n", &written, smaller, false)).contains("do not belong together"));
    let unknown = LoraSpec { ranks: [("mlp.nothing".to_owned(), 1)].into(), ..spec };
    assert!(user_error(load(&engine, "n", &written, unknown, false)).contains("mlp.nothing"));
}

#[test]
fn an_adapter_whose_embedding_does_not_fit_its_record_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("written");
    write(&written);
    let all_but_the_embedding = LoraSpec { train_mlp: false, train_unembed: false, ..lora(2, 0) };
    let message = user_error(load(&engine(), "m", &written, all_but_the_embedding, false));
    assert!(message.contains("do not belong together"), "{message}");
}
