//! The engine over a device whose memory the host cannot see.

mod common;

use std::sync::Arc;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;
use strata_model::{Model, ModelSource};
use strata_tensor::testing::RemoteBackend;
use strata_tensor::{Backend, CpuBackend};

fn cpu() -> CpuBackend {
    CpuBackend::new(Some(2)).expect("the processor has a backend")
}

fn over(backend: Arc<dyn Backend>) -> EngineHandle {
    let model = Model::load(backend, &ModelSource::Embedded, None).expect("the embedded model is whole");
    EngineHandle::start(model, Some(tokenizer().into()), config(MEMORY_BYTES)).expect("memory suffices")
}

#[test]
fn a_run_has_the_bits_of_the_processor() {
    let run = |backend: Arc<dyn Backend>| {
        let engine = over(backend);
        create(&engine, "m", 4, 1);
        let first = bits(&losses(ask(&engine, train("m", 1, backward(examples(1, 2))))));
        let norm = grad_norm(ask(&engine, train("m", 2, step(1e-2)))).to_bits();
        // The save holds the state while the next step changes it.
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("state");
        let saving = submit(&engine, train("m", 3, TrainOp::SaveState(save(&target))));
        losses(ask(&engine, train("m", 4, backward(examples(2, 1)))));
        grad_norm(ask(&engine, train("m", 5, step(1e-2))));
        assert!(matches!(saving.recv().unwrap(), Ok(Response::Saved { .. })));
        let load = TrainOp::LoadState { source: source(&target), with_optimizer: true };
        assert!(matches!(ask(&engine, train("m", 6, load)), Ok(Response::Loaded)));
        snapshot(&engine, "m", 7, "tuned");
        let request = SampleRequest {
            prompt_logprobs: true,
            topk_sample_logprobs: 3,
            top_p: 0.9,
            ..sample_request(tokens(7, 70), 3, 5, 11)
        };
        let sampled = sampled(ask(&engine, sample("tuned", request)));
        let prompt: Vec<u32> = sampled.prompt_logprobs.iter().flatten().flatten().map(|v| v.to_bits()).collect();
        (first, norm, sample_bits(&sampled), prompt, saved_bytes(&engine, "m", 8))
    };
    assert!(run(Arc::new(cpu())) == run(Arc::new(RemoteBackend::new(cpu()))));
}

#[test]
fn a_request_that_is_refused_memory_fails_and_the_next_works() {
    let device = Arc::new(RemoteBackend::new(cpu()));
    let engine = over(device.clone());
    let server_error = |outcome: Outcome| match outcome {
        Err(Failure::Server(message)) => message,
        other => panic!("expected a server failure, got {other:?}"),
    };
    create(&engine, "m", 4, 1);
    let pass = |seq| ask(&engine, train("m", seq, forward(examples(1, 2))));
    let expected = bits(&losses(pass(1)));
    device.refuse_allocation(40);
    let message = server_error(pass(2));
    assert!(message.contains("out of memory"), "{message}");
    assert_eq!(bits(&losses(pass(3))), expected);

    base_sampler(&engine, "base");
    let request = || sample("base", sample_request(tokens(3, 20), 1, 4, 5));
    let expected = sample_bits(&sampled(ask(&engine, request())));
    device.refuse_allocation(40);
    let message = server_error(ask(&engine, request()));
    assert!(message.contains("out of memory"), "{message}");
    assert_eq!(sample_bits(&sampled(ask(&engine, request()))), expected);

    device.refuse_allocation(3);
    let create = Request::CreateModel { model_id: "n".into(), lora: lora(4, 2) };
    assert!(server_error(ask(&engine, create.clone())).contains("out of memory"));
    assert!(matches!(ask(&engine, create), Ok(Response::Created { .. })));
}
