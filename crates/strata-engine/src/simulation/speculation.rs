//! Guesses change when a sample ends, and nothing else.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::api::{Client, Outcome, Request, Response, SampleOutput, SampleRequest, Stop};
use crate::sampler::{Speculated, Speculation};

use super::oracle::{self, REFRAIN, REFRAIN_EVERY};
use super::{Engine, Limits};

/// An engine with two owners, so that one takes room from the other, and what they were answered.
struct Asker {
    engine: Engine,
    answers: Arc<Mutex<Vec<Option<SampleOutput>>>>,
}

fn client(i: usize) -> Client {
    Client { owner: ["one", "other"][i % 2].into(), session: ["s", "t"][i % 2].into() }
}

impl Asker {
    fn new(limits: Limits) -> Self {
        let asker = Asker { engine: Engine::new(limits), answers: Arc::default() };
        for i in 0..2 {
            let request = Request::CreateSampler { sampler_id: format!("base{i}"), source: None };
            let reply = Box::new(|outcome: Outcome, _| drop(outcome.unwrap()));
            asker.engine.handle().submit(format!("sampler{i}").into(), client(i), request, reply).unwrap();
        }
        asker
    }

    fn send(&self, sample: SampleRequest) {
        let i = self.answers.lock().unwrap().len();
        self.answers.lock().unwrap().push(None);
        let answers = self.answers.clone();
        let reply = Box::new(move |outcome: Outcome, _| match outcome.unwrap() {
            // What the cache had of a prompt depends on who came before.
            Response::Sampled(output) => {
                answers.lock().unwrap()[i] = Some(SampleOutput { prompt_cache_hit_tokens: 0, ..output });
            }
            other => panic!("{other:?}"),
        });
        let request = Request::Sample { sampler_id: format!("base{}", i % 2), sample };
        self.engine.handle().submit(format!("r{i}").into(), client(i), request, reply).unwrap();
    }

    fn run_while(&mut self, more: impl Fn(&[Option<SampleOutput>]) -> bool) {
        while more(&self.answers.lock().unwrap()) {
            assert!(self.engine.turn(), "there is something to do");
            self.engine.audit().unwrap();
        }
    }
}

/// What came of requests.
struct Ran {
    outputs: Vec<SampleOutput>,
    speculated: Speculated,
    took: Duration,
    evictions: u64,
}

/// Sends all requests of a round at once, and the next round when they are answered.
fn run(limits: Limits, rounds: &[Vec<SampleRequest>]) -> Ran {
    let mut asker = Asker::new(limits);
    for round in rounds {
        round.iter().for_each(|request| asker.send(request.clone()));
        asker.run_while(|answers| answers.iter().any(Option::is_none));
    }
    let outputs = asker.answers.lock().unwrap().iter().flatten().cloned().collect();
    let engine = &asker.engine;
    Ran { outputs, speculated: engine.speculated(), took: engine.now(), evictions: engine.evictions() }
}

/// Runs the requests with guesses and without: all outputs are what they are alone. Answers both runs, that with guesses first.
fn on_and_off(limits: Limits, rounds: &[Vec<SampleRequest>]) -> [Ran; 2] {
    let runs = [Speculation::PromptLookup, Speculation::Off].map(|speculation| run(Limits { speculation, ..limits }, rounds));
    for (i, request) in rounds.iter().flatten().enumerate() {
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
        num_samples,
        max_tokens: Some(max_tokens),
        seed: n * REFRAIN_EVERY,
        stop: Stop::Tokens(Vec::new()),
        topk_sample_logprobs: 2,
        ..SampleRequest::of((0..prompt).map(|i| i64::from(REFRAIN[(i + n as usize) % REFRAIN.len()])).collect())
    }
}

#[test]
fn a_sample_that_repeats_itself_takes_fewer_steps() {
    let [on, off] = on_and_off(Limits::roomy(1), &[vec![refrain(1, 20, 1, 400)]]);
    assert!(on.speculated.accepted > 250, "{:?}", on.speculated);
    assert!(on.took < off.took / 2, "{:?} and {:?}", on.took, off.took);
}

#[test]
fn samples_of_one_prompt_guess_each_for_itself() {
    for (num_samples, max_tokens) in [(3, 50), (5, 17), (2, 2), (4, 1)] {
        let [on, _] = on_and_off(Limits::roomy(1), &[vec![refrain(1, 18, num_samples, max_tokens)]]);
        assert_eq!(on.speculated.accepted > 0, max_tokens > 2, "{num_samples} of {max_tokens}: {:?}", on.speculated);
    }
}

#[test]
fn a_sample_ends_where_it_would_end_token_by_token() {
    // At each length, so that the last token is now fed, now guessed right and now guessed wrong.
    for max_tokens in 1..40 {
        on_and_off(Limits::roomy(1), &[vec![refrain(max_tokens as u64, 25, 1, max_tokens)]]);
    }
    // What is guessed and drawn ends the sample in the middle of a run of guesses.
    let (mut accepted, mut lengths) = (0, Vec::new());
    for n in 0..30 {
        let stop = Stop::Tokens(vec![i64::from(REFRAIN[4])]);
        let [on, _] = on_and_off(Limits::roomy(1), &[vec![SampleRequest { stop, ..refrain(n, 25, 1, 40) }]]);
        accepted += on.speculated.accepted;
        lengths.push(on.outputs[0].sequences[0].tokens.len());
    }
    assert!(accepted > 20 && lengths.iter().all(|&length| length < 40), "{accepted}, {lengths:?}");
}

#[test]
fn samples_that_lose_their_pages_guess_again() {
    let requests: Vec<SampleRequest> = (0..12).map(|n| refrain(n, 9 + n as usize, 1 + n as usize % 3, 40)).collect();
    let tight = Limits { pages: 36, page_tokens: 3, ..Limits::roomy(1) };
    let [on, off] = on_and_off(tight, &[requests]);
    assert!(on.speculated.accepted > 100, "{:?}", on.speculated);
    assert!(on.evictions > 0 && off.evictions > 0, "{} and {}", on.evictions, off.evictions);
}

#[test]
fn the_next_turn_finds_what_was_drawn_and_nothing_that_was_guessed() {
    // Each sample ends with what nothing before it says, so that something else was guessed in its place.
    let others = (0..oracle::VOCAB).filter(|token| !REFRAIN.contains(token)).map(i64::from).collect();
    let stop = Stop::Tokens(others);
    let (limits, mut accepted) = (Limits { page_tokens: 2, ..Limits::roomy(1) }, 0);
    for n in 0..40 {
        let first = SampleRequest { stop: stop.clone(), ..refrain(n, 20 + n as usize % 2, 1, 100) };
        let drawn = run(limits, &[vec![first.clone()]]).outputs.remove(0).sequences.remove(0).tokens;
        let text = first.prompt.iter().copied().chain(drawn.into_iter().map(i64::from));
        let next = SampleRequest { prompt: text.chain([1, 2]).collect(), max_tokens: Some(4), ..first.clone() };
        let [on, _] = on_and_off(limits, &[vec![first], vec![next]]);
        accepted += on.speculated.accepted;
    }
    assert!(accepted > 100, "{accepted}");
}

#[test]
fn who_guesses_pays_for_it() {
    let mut asker = Asker::new(Limits::roomy(1));
    asker.send(refrain(1, 20, 1, 150));
    asker.send(SampleRequest { seed: 1, ..refrain(1, 20, 1, 500) });
    asker.run_while(|answers| answers[0].is_none());
    let [one, other] = [0, 1].map(|i| asker.engine.core.used(&client(i)));
    assert!(one > other * 3 / 2, "{one:?} for two rows in a step and more, {other:?} for one");
    asker.run_while(|answers| answers.iter().any(Option::is_none));
}

#[test]
fn models_with_states_do_not_guess() {
    let limits = Limits { states: 8, ..Limits::roomy(1) };
    let [on, _] = on_and_off(limits, &[vec![refrain(1, 20, 2, 100)]]);
    assert_eq!(on.speculated, Speculated::default());
}

#[test]
fn samples_that_never_repeat_themselves_take_little_longer() {
    let requests: Vec<SampleRequest> = (0..3).map(|n| SampleRequest { seed: 1 + 3 * n, ..refrain(n, 60, 1, 600) }).collect();
    let [on, off] = on_and_off(Limits::roomy(1), &[requests]);
    assert!(on.took < off.took + off.took / 20, "{:?} and {:?}: {:?}", on.took, off.took, on.speculated);
}
