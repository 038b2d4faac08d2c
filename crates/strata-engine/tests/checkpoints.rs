//! Saving and loading, and the life of the engine.

mod common;

use std::path::Path;

use common::*;
use strata_engine::api::*;
use strata_engine::{EngineHandle, StartError};

fn rounds(engine: &EngineHandle, id: &str, first_seq: u64, seeds: std::ops::Range<u64>) {
    for (i, seed) in seeds.enumerate() {
        let seq = first_seq + 2 * i as u64;
        losses(ask(engine, train(id, seq, backward(examples(seed, 3)))));
        grad_norm(ask(engine, train(id, seq + 1, step(1e-2))));
    }
}

fn from_checkpoint(engine: &EngineHandle, id: &str, dir: &Path, with_optimizer: bool) -> Outcome {
    ask(engine, Request::CreateModelFromCheckpoint { model_id: id.into(), dir: dir.into(), with_optimizer })
}

#[test]
fn a_tenant_resumes_from_a_checkpoint_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("run").join("weights").join("one");
    let engine = engine();
    create(&engine, "m", 8, 1);
    rounds(&engine, "m", 1, 0..2);
    let Ok(Response::Saved { size_bytes, dir: saved_dir }) = ask(&engine, train("m", 5, TrainOp::SaveState(save(&checkpoint))))
    else {
        panic!("not saved")
    };
    assert_eq!(saved_dir, checkpoint);
    let files = std::fs::read_dir(&checkpoint).unwrap();
    assert_eq!(size_bytes, files.map(|f| f.unwrap().metadata().unwrap().len()).sum::<u64>());
    assert_eq!(std::fs::read_to_string(checkpoint.join("strata.json")).unwrap(), r#"{"by":"test"}"#);
    rounds(&engine, "m", 6, 2..4);
    let uninterrupted = saved_bytes(&engine, "m", 10);
    drop(engine);

    let engine = common::engine();
    let created = from_checkpoint(&engine, "m", &checkpoint, true);
    assert!(matches!(created, Ok(Response::Created { lora: LoraSpec { rank: 8, .. } })), "{created:?}");
    rounds(&engine, "m", 1, 2..4);
    assert!(uninterrupted == saved_bytes(&engine, "m", 5), "with the optimizer's state the run goes on as if nothing had been");

    from_checkpoint(&engine, "fresh", &checkpoint, false).unwrap();
    rounds(&engine, "fresh", 1, 2..4);
    assert!(uninterrupted != saved_bytes(&engine, "fresh", 5), "without it Adam starts afresh");

    create(&engine, "legacy", 8, 99);
    let load = TrainOp::LoadState { dir: checkpoint.clone(), with_optimizer: true };
    let loaded = submit(&engine, train("legacy", 1, load));
    rounds(&engine, "legacy", 2, 2..4);
    assert!(matches!(loaded.recv().unwrap(), Ok(Response::Loaded)));
    assert!(uninterrupted == saved_bytes(&engine, "legacy", 6), "operations behind a load wait for it");
}

#[test]
fn a_save_captures_its_moment_although_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    for id in ["still", "moving"] {
        create(&engine, id, 8, 1);
        rounds(&engine, id, 1, 0..1);
    }
    let target = dir.path().join("moving");
    let saved = submit(&engine, train("moving", 3, TrainOp::SaveState(save(&target))));
    rounds(&engine, "moving", 4, 1..3);
    assert!(saved.recv().unwrap().is_ok());
    let moment = [std::fs::read(target.join("adapter_model.safetensors")), std::fs::read(target.join("optimizer.safetensors"))];
    let moment: Vec<u8> = moment.into_iter().flat_map(Result::unwrap).collect();
    assert!(moment == saved_bytes(&engine, "still", 3));
}

#[test]
fn a_sampler_checkpoint_samples_as_the_snapshot_does() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("sampler");
    let engine = engine();
    create(&engine, "m", 8, 1);
    rounds(&engine, "m", 1, 0..2);
    snapshot(&engine, "m", 5, "memory");
    let saved = submit(&engine, train("m", 6, TrainOp::SaveSampler(save(&target))));
    // The load is behind the save on the disk thread, and the sample waits for the load.
    assert!(saved.recv().unwrap().is_ok());
    let created = submit(&engine, Request::CreateSampler { sampler_id: "disk".into(), dir: Some(target.clone()) });
    let request = || sample_request(tokens(4, 30), 2, 20, 6);
    let from_disk = sampled(ask(&engine, sample("disk", request())));
    assert!(created.recv().unwrap().is_ok());
    assert_eq!(sample_bits(&from_disk), sample_bits(&sampled(ask(&engine, sample("memory", request())))));
    assert!(!target.join("optimizer.safetensors").exists());
    let message = user_error(from_checkpoint(&engine, "n", &target, true));
    assert!(message.contains("optimizer"), "{message}");
    create(&engine, "n", 4, 1);
}

#[test]
fn names_that_exist_are_replaced_only_if_asked() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("one");
    let engine = engine();
    create(&engine, "m", 4, 1);
    ask(&engine, train("m", 1, TrainOp::SaveState(save(&target)))).unwrap();
    assert!(user_error(ask(&engine, train("m", 2, TrainOp::SaveSampler(save(&target))))).contains("exists already"));
    let replace = SaveTarget { overwrite: true, ..save(&target) };
    ask(&engine, train("m", 3, TrainOp::SaveSampler(replace))).unwrap();
    assert!(!target.join("optimizer.safetensors").exists());
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_and_leave_the_tenant_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("rank4");
    let engine = engine();
    create(&engine, "small", 4, 1);
    ask(&engine, train("small", 1, TrainOp::SaveState(save(&target)))).unwrap();
    create(&engine, "m", 8, 1);
    let before = saved_bytes(&engine, "m", 1);
    let load = |dir: &Path| TrainOp::LoadState { dir: dir.into(), with_optimizer: false };
    assert!(user_error(ask(&engine, train("m", 2, load(&target)))).contains("another shape"));
    user_error(ask(&engine, train("m", 3, load(&dir.path().join("nothing")))));
    assert!(before == saved_bytes(&engine, "m", 4));
    user_error(from_checkpoint(&engine, "x", &dir.path().join("nothing"), false));
    user_error(ask(&engine, Request::CreateSampler { sampler_id: "x".into(), dir: Some(dir.path().join("nothing")) }));
    base_sampler(&engine, "x");
    create(&engine, "x", 4, 1);
}

#[test]
fn operations_of_a_tenant_that_could_not_be_made_fail() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let request =
        Request::CreateModelFromCheckpoint { model_id: "m".into(), dir: dir.path().join("no"), with_optimizer: false };
    let (created, waiting) = (submit(&engine, request), submit(&engine, train("m", 1, step(1e-3))));
    user_error(created.recv().unwrap());
    user_error(waiting.recv().unwrap());
}

#[test]
fn memory_that_does_not_suffice_is_an_error_at_start_or_of_the_request() {
    let error = EngineHandle::start(model(1), None, config(4 << 20)).err().unwrap();
    assert!(matches!(error, StartError::Memory { .. }), "{error}");
    let engine = engine_with(1, 64 << 20);
    let message = (0..1000)
        .map(|i| ask(&engine, Request::CreateModel { model_id: format!("m{i}"), lora: lora(64, i) }))
        .find_map(Result::err)
        .unwrap();
    assert!(message.to_string().contains("set aside for adapters"), "{message}");
}

#[test]
fn what_is_owed_when_the_last_handle_goes_is_answered() {
    let engine = engine();
    create(&engine, "m", 4, 1);
    let gap = submit(&engine, train("m", 9, step(1e-3)));
    assert!(engine.is_alive());
    drop(engine);
    assert!(matches!(gap.recv().unwrap(), Err(Failure::Server(_))));
}
