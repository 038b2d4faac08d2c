//! Guesses of a real engine: no bit of a sample depends on whether any were made.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::*;
use strata_engine::api::*;
use strata_engine::{EngineConfig, EngineHandle, Speculated, Speculation};
use strata_model::{Model, ModelSource};
use strata_tensor::CpuBackend;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/fixtures").join(name)
}

/// An engine over a model of the reference tests.
fn over(name: &str, speculation: Speculation) -> EngineHandle {
    let source = ModelSource::resolve(fixture(name).join("model").to_str().unwrap()).expect("the fixture is there");
    let backend = CpuBackend::new(Some(2)).expect("the processor has a backend");
    let model = Model::load(Arc::new(backend), &source, None).expect("the fixture is whole");
    EngineHandle::start(model, None, EngineConfig { speculation, ..config(MEMORY_BYTES) }).expect("memory suffices")
}

fn embedded(speculation: Speculation) -> EngineHandle {
    let config = EngineConfig { speculation, ..config(MEMORY_BYTES) };
    EngineHandle::start(model(2), Some(tokenizer().into()), config).expect("memory suffices")
}

/// The first `n` tokens of a text of `period` that is said again and again.
fn refrain(seed: u64, period: usize, n: usize) -> Vec<i64> {
    tokens(seed, period).into_iter().map(|token| token % 79).cycle().take(n).collect()
}

/// Everything that a sample answers, in bits, one by one.
type Answer = Vec<(Vec<u32>, Vec<u32>, StopReason, Option<Vec<TopK>>)>;

fn answer(output: &SampleOutput) -> Answer {
    let of = |s: &SampledSequence| (s.tokens.clone(), bits_of(&s.logprobs), s.stop_reason, s.topk.clone());
    output.sequences.iter().map(of).collect()
}

/// What requests of all kinds of settings answer, alone and then all at once.
fn run(engine: &EngineHandle, sampler: &str, requests: &[SampleRequest]) -> Vec<Answer> {
    let alone = requests.iter().map(|request| ask(engine, sample(sampler, request.clone()))).collect::<Vec<_>>();
    let together: Vec<_> = requests.iter().map(|request| submit(engine, sample(sampler, request.clone()))).collect();
    let together = together.into_iter().map(|rx| rx.recv().unwrap());
    alone.into_iter().chain(together).map(|outcome| answer(&sampled(outcome))).collect()
}

fn requests() -> Vec<SampleRequest> {
    let greedy = |period, length, max_tokens| SampleRequest {
        temperature: 0.0,
        ..sample_request(refrain(period as u64, period, length), 1, max_tokens, 1)
    };
    let stopped = SampleRequest { stop: Stop::Strings(vec!["planet".into(), "<|im_end|>".into()]), ..greedy(4, 90, 60) };
    vec![
        // Beginning and ending at any place of a page.
        greedy(3, 40, 150),
        greedy(5, 64, 64),
        greedy(7, 121, 70),
        stopped,
        SampleRequest { num_samples: 3, temperature: 0.4, topk_sample_logprobs: 3, ..greedy(2, 70, 80) },
        SampleRequest { num_samples: 2, temperature: 0.7, top_k: Some(3), ..greedy(6, 33, 60) },
        SampleRequest { num_samples: 2, temperature: 1.0, top_p: 0.5, ..greedy(4, 33, 60) },
        sample_request(tokens(3, 50), 2, 60, 3),
    ]
}

#[test]
fn no_bit_of_a_sample_depends_on_guesses() {
    let [on, off] = [Speculation::PromptLookup, Speculation::Off].map(|speculation| {
        let engine = embedded(speculation);
        base_sampler(&engine, "base");
        create(&engine, "m", 8, 1);
        losses(ask(&engine, train("m", 1, backward(examples(4, 3)))));
        grad_norm(ask(&engine, train("m", 2, step(3e-2))));
        snapshot(&engine, "m", 3, "tuned");
        let answers = ["base", "tuned"].map(|sampler| run(&engine, sampler, &requests()));
        (answers, engine.speculated())
    });
    assert_eq!(on.0, off.0);
    let Speculated { proposed, accepted } = on.1;
    assert!(accepted > 200 && proposed > accepted, "{accepted} of {proposed} guesses came: both kinds are to be seen");
    assert_eq!(off.1, Speculated::default());
}

#[test]
fn samples_are_the_bits_that_forward_computes_behind_guesses_too() {
    let engine = embedded(Speculation::PromptLookup);
    base_sampler(&engine, "base");
    create(&engine, "m", 8, 1);
    let prompt = refrain(5, 5, 63);
    let request = SampleRequest { temperature: 0.0, ..sample_request(prompt.clone(), 1, 100, 1) };
    snapshot(&engine, "m", 1, "fresh");
    let sequence = sampled(ask(&engine, sample("fresh", request))).sequences.remove(0);
    assert!(engine.speculated().accepted > 10, "{:?}", engine.speculated());
    let text: Vec<i64> = prompt.iter().copied().chain(sequence.tokens.iter().map(|&t| t as i64)).collect();
    let exact = losses(ask(&engine, train("m", 2, forward(vec![cross_entropy_datum(&text, 1.0)])))).data.remove(0).logprobs;
    assert_eq!(bits_of(&exact[prompt.len() - 1..]), bits_of(&sequence.logprobs));
}

#[test]
fn guesses_behind_pictures_are_in_their_places() {
    let image = |at| {
        let file = std::fs::read(fixture("qwen3_vl_f32").join("photo.jpg")).expect("the fixture is there");
        Image { at, file: file.into(), expected_tokens: None }
    };
    let request = |length, temperature| SampleRequest {
        images: vec![image(2), image(length)],
        temperature,
        ..sample_request(refrain(3, 3, length), 2, 70, 1)
    };
    let requests = [request(30, 0.0), request(50, 0.0), request(40, 0.2)];
    let [on, off] = [Speculation::PromptLookup, Speculation::Off].map(|speculation| {
        let engine = over("qwen3_vl_f32", speculation);
        base_sampler(&engine, "base");
        (run(&engine, "base", &requests), engine.speculated())
    });
    assert_eq!(on.0, off.0);
    assert!(on.1.accepted > 20, "{:?}", on.1);
}

#[test]
fn models_guess_that_can_go_back_and_whose_tokens_share_what_they_read() {
    let families = [
        ("deepseek_latent_bf16", true),
        ("mistral_window_f32", true),
        // A token's states cannot be taken back.
        ("qwen3_5_f32", false),
        // Nearly all of it is experts.
        ("qwen3_moe_f32", false),
    ];
    for (name, guesses) in families {
        let request = SampleRequest { temperature: 0.0, ..sample_request(refrain(4, 4, 30), 2, 60, 1) };
        let [on, off] = [Speculation::PromptLookup, Speculation::Off].map(|speculation| {
            let engine = over(name, speculation);
            base_sampler(&engine, "base");
            (run(&engine, "base", std::slice::from_ref(&request)), engine.speculated())
        });
        assert_eq!(on.0, off.0, "{name}");
        assert_eq!(on.1.proposed > 0, guesses, "{name}: {:?}", on.1);
    }
}
