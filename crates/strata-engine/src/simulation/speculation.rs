//! Guesses change when a sample ends, and nothing else.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::api::{Client, Outcome, Request, Response, SampleOutput, SampleRequest, Stop};
use crate::sampler::{Speculated, Speculation};

use super::oracle::{self, REFRAIN, REFRAIN_EVERY};
use super::{Engine, Limits};

/// What came of requests that were sent at once.
struct Ran {
    outputs: Vec<SampleOutput>,
    speculated: Speculated,
    took: Duration,
    evictions: u64,
}

fn run(limits: Limits, requests: &[SampleRequest]) -> Ran {
    let mut engine = Engine::new(limits);
    // Two owners, so that one takes room from the other.
    let client = |i: usize| Client { owner: ["one", "other"][i % 2].into(), session: ["s", "t"][i % 2].into() };
    let answers: Arc<Mutex<Vec<Option<SampleOutput>>>> = Arc::new(Mutex::new(vec![None; requests.len()]));
    let send = |i: usize, id: String, request: Request, at: Option<usize>| {
        let answers = answers.clone();
        let reply = Box::new(move |outcome: Outcome, _| match (outcome.unwrap(), at) {
            (Response::Sampled(output), Some(at)) => answers.lock().unwrap()[at] = Some(output),
            (other, at) => assert!(at.is_none(), "{other:?}"),
        });
        engine.handle().submit(id.into(), client(i), request, reply).unwrap();
    };
    for i in 0..2 {
        send(i, format!("sampler{i}"), Request::CreateSampler { sampler_id: format!("base{i}"), source: None }, None);
    }
    for (i, sample) in requests.iter().enumerate() {
        let sampler_id = format!("base{}", i % 2);
        send(i, format!("r{i}"), Request::Sample { sampler_id, sample: sample.clone() }, Some(i));
    }
    while answers.lock().unwrap().iter().any(Option::is_none) {
        assert!(engine.turn(), "there is something to do");
        engine.audit().unwrap();
    }
    let outputs = std::mem::take(&mut *answers.lock().unwrap()).into_iter().flatten();
    // What the cache had of a prompt depends on who came before.
    let outputs = outputs.map(|output| SampleOutput { prompt_cache_hit_tokens: 0, ..output }).collect();
    Ran { outputs, speculated: engine.speculated(), took: engine.now(), evictions: engine.evictions() }
}

/// Runs the requests with guesses and without: all outputs are what they are alone. Answers both runs, that with guesses first.
fn on_and_off(limits: Limits, requests: &[SampleRequest]) -> [Ran; 2] {
    let runs = [Speculation::PromptLookup, Speculation::Off].map(|speculation| run(Limits { speculation, ..limits }, requests));
    for (i, request) in requests.iter().enumerate() {
        let expected = oracle::expected_sample(oracle::BASE, request, limits.max_context_tokens());
        runs.iter().for_each(|run| assert_eq!(run.outputs[i], expected, "request {i}"));
    }
    let [_, off] = &runs;
    assert_eq!(off.speculated, Speculated::default());
    runs
}

/// A request whose samples say the refrain, which its prompt has said before.
fn refrain(n: u64, prompt: usize, num_samples: usize, max_tokens: usize) -> SampleRequest {
    SampleRequest {
        prompt: (0..prompt).map(|i| i64::from(REFRAIN[(i + n as usize) % REFRAIN.len()])).collect(),
        images: Vec::new(),
        num_samples,
        max_tokens: Some(max_tokens),
        seed: n * REFRAIN_EVERY,
        stop: Stop::Tokens(Vec::new()),
        temperature: 1.0,
        top_k: None,
        top_p: 1.0,
        prompt_logprobs: false,
        prompt_logprobs_last_n: None,
        topk_prompt_logprobs: 0,
        topk_sample_logprobs: 2,
        target_prompt_logprobs: None,
        prompt_alt_tokens_k: 0,
    }
}

#[test]
fn a_sample_that_repeats_itself_takes_fewer_steps() {
    let [on, off] = on_and_off(Limits::roomy(1), &[refrain(1, 20, 1, 400)]);
    assert!(on.speculated.accepted > 250, "{:?}", on.speculated);
    assert!(on.took < off.took / 3 * 2, "{:?} and {:?}", on.took, off.took);
}

#[test]
fn samples_of_one_prompt_guess_each_for_itself() {
    for (num_samples, max_tokens) in [(3, 50), (5, 17), (2, 2), (4, 1)] {
        let [on, _] = on_and_off(Limits::roomy(1), &[refrain(1, 18, num_samples, max_tokens)]);
        assert_eq!(on.speculated.accepted > 0, max_tokens > 2, "{num_samples} of {max_tokens}: {:?}", on.speculated);
    }
}

#[test]
fn a_sample_ends_where_it_would_end_token_by_token() {
    // At each length, so that the last token is now fed, now guessed right and now guessed wrong.
    for max_tokens in 1..40 {
        on_and_off(Limits::roomy(1), &[refrain(max_tokens as u64, 25, 1, max_tokens)]);
    }
    // What is guessed and drawn ends the sample in the middle of a run of guesses.
    let (mut accepted, mut lengths) = (0, Vec::new());
    for n in 0..30 {
        let stop = Stop::Tokens(vec![i64::from(REFRAIN[4])]);
        let [on, _] = on_and_off(Limits::roomy(1), &[SampleRequest { stop, ..refrain(n, 25, 1, 40) }]);
        accepted += on.speculated.accepted;
        lengths.push(on.outputs[0].sequences[0].tokens.len());
    }
    assert!(accepted > 20 && lengths.iter().all(|&length| length < 40), "{accepted}, {lengths:?}");
}

#[test]
fn samples_that_lose_their_pages_guess_again() {
    let requests: Vec<SampleRequest> = (0..12).map(|n| refrain(n, 9 + n as usize, 1 + n as usize % 3, 40)).collect();
    let tight = Limits { pages: 36, page_tokens: 3, ..Limits::roomy(1) };
    let [on, off] = on_and_off(tight, &requests);
    assert!(on.speculated.accepted > 100, "{:?}", on.speculated);
    assert!(on.evictions > 0 && off.evictions > 0, "{} and {}", on.evictions, off.evictions);
}

#[test]
fn the_next_turn_finds_what_was_drawn_and_nothing_that_was_guessed() {
    // The text of a sample, and then that which was guessed wrong in it, are prompts: whatever page holds them must hold what they say.
    for n in 0..20 {
        let limits = Limits { page_tokens: 2, ..Limits::roomy(1) };
        let first = refrain(n, 20, 1, 60);
        let drawn = run(limits, std::slice::from_ref(&first)).outputs.remove(0).sequences.remove(0).tokens;
        let text: Vec<i64> = first.prompt.iter().copied().chain(drawn.into_iter().map(i64::from)).collect();
        let turns = (21..text.len()).map(|length| {
            let prompt = text[..length].iter().copied().chain([i64::from(REFRAIN[length % REFRAIN.len()]), 1]).collect();
            SampleRequest { prompt, max_tokens: Some(4), ..first.clone() }
        });
        let requests: Vec<SampleRequest> = [first.clone()].into_iter().chain(turns).collect();
        on_and_off(limits, &requests);
    }
}

#[test]
fn models_with_states_do_not_guess() {
    let limits = Limits { states: 8, ..Limits::roomy(1) };
    let [on, _] = on_and_off(limits, &[refrain(1, 20, 2, 100)]);
    assert_eq!(on.speculated, Speculated::default());
}

#[test]
fn samples_that_never_repeat_themselves_take_little_longer() {
    let requests: Vec<SampleRequest> = (0..3).map(|n| SampleRequest { seed: 1 + 3 * n, ..refrain(n, 60, 1, 600) }).collect();
    let [on, off] = on_and_off(Limits::roomy(1), &requests);
    assert!(on.took < off.took + off.took / 20, "{:?} and {:?}: {:?}", on.took, off.took, on.speculated);
}
