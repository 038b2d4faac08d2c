//! Saving and loading, and the life of the engine.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use strata_engine::api::*;
use strata_engine::{EngineHandle, StartError};
use strata_model::checkpoint::{Existing, write_atomically};

fn rounds(engine: &EngineHandle, id: &str, first_seq: u64, seeds: std::ops::Range<u64>) {
    for (i, seed) in seeds.enumerate() {
        let seq = first_seq + 2 * i as u64;
        losses(ask(engine, train(id, seq, backward(examples(seed, 3)))));
        grad_norm(ask(engine, train(id, seq + 1, step(1e-2))));
    }
}

fn from_checkpoint(engine: &EngineHandle, id: &str, dir: &Path, with_optimizer: bool) -> Outcome {
    let source = source(dir);
    ask(engine, Request::CreateModelFromCheckpoint { model_id: id.into(), source, lora: lora(8, 0), with_optimizer })
}

#[test]
fn a_tenant_resumes_from_a_checkpoint_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("run").join("weights").join("one");
    let engine = engine();
    create(&engine, "m", 8, 1);
    rounds(&engine, "m", 1, 0..2);
    let Ok(Response::Saved { size_bytes, dir: saved_dir, .. }) =
        ask(&engine, train("m", 5, TrainOp::SaveState(save(&checkpoint))))
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
    let load = TrainOp::LoadState { source: source(&checkpoint), with_optimizer: true };
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
    let created =
        submit(&engine, Request::CreateSampler { sampler_id: "disk".into(), source: Some((source(&target), lora(8, 0))) });
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
fn an_adapter_of_fewer_parts_is_recorded_as_that_and_makes_room_for_all_of_them_again() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let [mlp, all, narrowed] = ["mlp", "all", "narrowed"].map(|name| dir.path().join(name));
    let of_mlp = LoraSpec { train_attn: false, train_unembed: false, ..lora(8, 3) };
    ask(&engine, Request::CreateModel { model_id: "small".into(), lora: of_mlp.clone() }).unwrap();
    create(&engine, "m", 8, 1);
    let save_as = |path: &Path| TrainOp::SaveState(SaveTarget { metadata: serde_json::json!({ "lora": "any" }), ..save(path) });
    ask(&engine, train("small", 1, save_as(&mlp))).unwrap();
    ask(&engine, train("m", 1, save_as(&all))).unwrap();
    let load = |path: &Path| TrainOp::LoadState { source: source(path), with_optimizer: true };
    // The save is asked for before the load is over.
    let [loaded, saved] = [load(&mlp), save_as(&narrowed)]
        .into_iter()
        .zip(2..)
        .map(|(op, seq)| submit(&engine, train("m", seq, op)))
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    assert!(matches!(loaded.recv().unwrap(), Ok(Response::Loaded)));
    let Ok(Response::Saved { lora: told, .. }) = saved.recv().unwrap() else { panic!("not saved") };
    assert_eq!(told, LoraSpec { seed: 1, ..of_mlp });
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(narrowed.join("strata.json")).unwrap()).unwrap();
    assert_eq!(written, serde_json::json!({ "lora": told }));
    let message = user_error(ask(&engine, train("small", 2, load(&all))));
    assert!(message.contains("has pairs of the attention, and the model's was made without"), "{message}");
    assert!(matches!(ask(&engine, train("m", 4, load(&all))), Ok(Response::Loaded)));
    rounds(&engine, "m", 5, 0..1);
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
    let larger_than_its_record = Request::CreateModelFromCheckpoint {
        model_id: "x".into(),
        source: source(&target),
        lora: lora(1, 0),
        with_optimizer: false,
    };
    assert!(user_error(ask(&engine, larger_than_its_record)).contains("do not belong together"));
    create(&engine, "m", 8, 1);
    let before = saved_bytes(&engine, "m", 1);
    let load = |dir: &Path| TrainOp::LoadState { source: source(dir), with_optimizer: false };
    assert!(user_error(ask(&engine, train("m", 2, load(&target)))).contains("adapter has rank 4, and the model's 8"));
    user_error(ask(&engine, train("m", 3, load(&dir.path().join("nothing")))));
    // What is larger than there is room for is refused by its shape, before a number of it is read.
    let large = dir.path().join("rank16");
    create(&engine, "large", 16, 1);
    ask(&engine, train("large", 1, TrainOp::SaveState(save(&large)))).unwrap();
    let file = large.join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let message = user_error(ask(&engine, train("m", 4, load(&large))));
    assert!(message.contains("adapter has rank 16, and the model's 8"), "{message}");
    assert!(before == saved_bytes(&engine, "m", 5));
    user_error(from_checkpoint(&engine, "x", &dir.path().join("nothing"), false));
    user_error(ask(
        &engine,
        Request::CreateSampler { sampler_id: "x".into(), source: Some((source(&dir.path().join("nothing")), lora(8, 0))) },
    ));
    base_sampler(&engine, "x");
    create(&engine, "x", 4, 1);
}

#[test]
fn operations_of_a_tenant_that_could_not_be_made_fail() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let request = Request::CreateModelFromCheckpoint {
        model_id: "m".into(),
        source: source(&dir.path().join("no")),
        lora: lora(8, 0),
        with_optimizer: false,
    };
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

#[test]
fn no_save_fails_because_many_wait_and_all_are_counted_until_they_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    create(&engine, "m", 4, 1);
    rounds(&engine, "m", 1, 0..1);
    let saves: Vec<_> = (0..200)
        .map(|i| submit(&engine, train("m", 3 + i, TrainOp::SaveState(save(&dir.path().join(format!("s{i}")))))))
        .collect();
    assert!(engine.saves_in_work() > 0);
    for saved in saves {
        assert!(matches!(saved.recv().unwrap(), Ok(Response::Saved { .. })));
    }
    // The last answer was sent a moment before it counts.
    while engine.saves_in_work() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 200);
    let waits_for_a_gap = submit(&engine, train("m", 999, TrainOp::SaveState(save(&dir.path().join("never")))));
    assert_eq!(engine.saves_in_work(), 1);
    ask(&engine, Request::UnloadModel { model_id: "m".into() }).unwrap();
    user_error(waits_for_a_gap.recv().unwrap());
}

#[test]
fn a_load_gets_the_save_that_it_names_or_fails() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("one");
    let engine = engine();
    create(&engine, "m", 4, 1);
    let save_as = |seq_id: u64, id: &str| {
        let metadata = serde_json::json!({ "save_id": id });
        let target = SaveTarget { overwrite: true, metadata, ..save(&target) };
        ask(&engine, train("m", seq_id, TrainOp::SaveState(target))).unwrap();
    };
    let load = |seq_id: u64, id: Option<&str>| {
        let source = CheckpointSource { save_id: id.map(str::to_owned), ..source(&target) };
        ask(&engine, train("m", seq_id, TrainOp::LoadState { source, with_optimizer: true }))
    };
    save_as(1, "first");
    assert!(matches!(load(2, Some("first")), Ok(Response::Loaded)));
    save_as(3, "second");
    for (seq_id, id) in [(4, Some("first")), (5, None)] {
        let message = user_error(load(seq_id, id));
        assert_eq!(message, "checkpoint the-save was overwritten or deleted after this request was accepted");
    }
    assert!(matches!(load(6, Some("second")), Ok(Response::Loaded)));
    std::fs::remove_dir_all(&target).unwrap();
    assert!(user_error(load(7, Some("second"))).contains("overwritten or deleted"));
    let sampler = Request::CreateSampler {
        sampler_id: "s".into(),
        source: Some((CheckpointSource { save_id: Some("x".into()), ..source(&target) }, lora(4, 0))),
    };
    assert!(user_error(ask(&engine, sampler)).contains("overwritten or deleted"));
}

/// Loads race with saves that replace what they load: what is loaded is what was asked for, or nothing is.
#[test]
fn a_load_never_mixes_two_saves() {
    const ROUNDS: usize = 600;
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let [a, b] = [("a", 4), ("b", 8)].map(|(id, rank)| {
        create(&engine, id, rank, 1);
        let target = dir.path().join(id);
        let save = SaveTarget { metadata: serde_json::json!({ "save_id": id }), ..save(&target) };
        ask(&engine, train(id, 1, TrainOp::SaveState(save))).unwrap();
        target
    });
    let target = dir.path().join("target");
    let put = |from: &Path| {
        write_atomically(&target, Existing::Replace, |partial| {
            for file in std::fs::read_dir(from).unwrap().flatten() {
                std::fs::copy(file.path(), partial.join(file.file_name())).unwrap();
            }
            Ok(())
        })
        .unwrap();
    };
    put(&a);
    let done = AtomicBool::new(false);
    let (mut loaded, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Now and then long enough for a load that finds nothing changed.
            for pause in (0..8).cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                put(&b);
                put(&a);
                std::thread::sleep(Duration::from_millis(pause));
            }
        });
        for round in 0..ROUNDS {
            let model_id = format!("from-{round}");
            let source = CheckpointSource { save_id: Some("a".into()), ..source(&target) };
            let request = Request::CreateModelFromCheckpoint {
                model_id: model_id.clone(),
                source,
                lora: lora(8, 0),
                with_optimizer: true,
            };
            match ask(&engine, request) {
                Ok(Response::Created { lora }) if lora.rank == 4 => {
                    loaded += 1;
                    ask(&engine, Request::UnloadModel { model_id }).unwrap();
                }
                Err(Failure::User(message)) if message.contains("overwritten or deleted") => refused += 1,
                other => {
                    done.store(true, Ordering::Relaxed);
                    panic!("{other:?}");
                }
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(loaded > 0 && refused > 0, "{loaded} loaded, {refused} refused");
}

#[test]
fn what_is_no_file_blocks_no_load_and_no_path_of_the_server_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    create(&engine, "m", 4, 1);
    let files = ["strata.json", "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"];
    let mut seq_ids = 1..;
    let mut ask_next = |op: TrainOp| ask(&engine, train("m", seq_ids.next().unwrap(), op));
    for file in files {
        for link in [false, true] {
            let target = dir.path().join(format!("{file}-{link}"));
            ask_next(TrainOp::SaveState(save(&target))).unwrap();
            let path = target.join(file);
            std::fs::remove_file(&path).unwrap();
            if link {
                std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
            } else {
                let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
                assert!(made.success());
            }
            let message = user_error(ask_next(TrainOp::LoadState { source: source(&target), with_optimizer: true }));
            let reason = if link { "symbolic link" } else { "special file" };
            assert!(message.contains(file) && message.contains(reason), "{message}");
            assert!(message.starts_with("checkpoint the-save: ") && !message.contains('/'), "{message}");
        }
    }
    let message =
        user_error(ask_next(TrainOp::LoadState { source: source(&dir.path().join("nothing")), with_optimizer: true }));
    assert!(!message.contains('/'), "{message}");
}

#[test]
fn a_save_through_a_link_is_refused_and_leaves_nothing_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let [elsewhere, root] = ["elsewhere", "root"].map(|name| dir.path().join(name));
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::create_dir(&root).unwrap();
    std::os::unix::fs::symlink(&elsewhere, root.join("run")).unwrap();
    let engine = engine();
    create(&engine, "m", 4, 1);
    for seq in 1..3 {
        let target = SaveTarget { root: root.clone(), overwrite: seq == 2, ..save(&root.join("run/weights/one")) };
        let failed = ask(&engine, train("m", seq, TrainOp::SaveState(target)));
        let Err(Failure::Server(message)) = failed else { panic!("{failed:?}") };
        assert!(message.contains("run is a symbolic link") && !message.contains('/'), "{message}");
    }
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    let above = SaveTarget { root: root.join("run"), ..save(&root.join("run/weights/one")) };
    ask(&engine, train("m", 3, TrainOp::SaveState(above))).unwrap();
}

#[test]
fn a_save_that_the_disk_refuses_fails_alone_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let in_the_way = dir.path().join("run");
    std::fs::write(&in_the_way, "a file").unwrap();
    let engine = engine();
    create(&engine, "m", 4, 1);
    let failed = ask(&engine, train("m", 1, TrainOp::SaveState(save(&in_the_way.join("weights").join("one")))));
    let Err(Failure::Server(message)) = failed else { panic!("{failed:?}") };
    assert!(message.contains("the-save was not written") && !message.contains('/'), "{message}");
    let huge = serde_json::Value::String("x".repeat(METADATA_BYTES_MAX as usize));
    let target = SaveTarget { metadata: huge, ..save(&dir.path().join("huge")) };
    assert!(user_error(ask(&engine, train("m", 2, TrainOp::SaveState(target)))).contains("metadata"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    ask(&engine, train("m", 3, TrainOp::SaveState(save(&dir.path().join("two"))))).unwrap();
}
