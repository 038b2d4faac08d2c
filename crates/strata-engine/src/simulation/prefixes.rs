//! What of a prompt need not be computed again, where sequences have states and where they have none.

use std::sync::{Arc, Mutex};

use crate::api::{Client, Outcome, Request, Response, SampleOutput, SampleRequest, Stop};

use super::{Engine, Limits};

struct Asker {
    engine: Engine,
    sent: usize,
}

fn client() -> Client {
    Client { owner: "o".into(), session: "s".into() }
}

impl Asker {
    /// Pages are of 4 tokens.
    fn new(states: usize) -> Self {
        let mut asker = Asker { engine: Engine::new(Limits { states, ..Limits::roomy(1) }), sent: 0 };
        asker.ask(Request::CreateSampler { sampler_id: "base".into(), source: None });
        asker
    }

    fn ask(&mut self, request: Request) -> Response {
        self.sent += 1;
        let answer = Arc::new(Mutex::new(None));
        let to = answer.clone();
        let reply = Box::new(move |outcome: Outcome, _| *to.lock().unwrap() = Some(outcome));
        self.engine.handle().submit(format!("r{}", self.sent).into(), client(), request, reply).unwrap();
        loop {
            self.engine.turn();
            self.engine.audit().unwrap();
            if let Some(outcome) = answer.lock().unwrap().take() {
                return outcome.unwrap();
            }
        }
    }

    /// Samples after a prompt. How many tokens of it were found, and the answer.
    fn sample(&mut self, prompt: &[i64], max_tokens: usize) -> (usize, SampleOutput) {
        let sample = SampleRequest {
            prompt: prompt.to_vec(),
            images: Vec::new(),
            num_samples: 1,
            max_tokens: Some(max_tokens),
            seed: 1,
            stop: Stop::Tokens(Vec::new()),
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            prompt_logprobs: false,
            prompt_logprobs_last_n: None,
            topk_prompt_logprobs: 0,
            topk_sample_logprobs: 0,
        };
        match self.ask(Request::Sample { sampler_id: "base".into(), sample }) {
            Response::Sampled(output) => (output.prompt_cache_hit_tokens, output),
            other => panic!("{other:?}"),
        }
    }
}

fn tokens(seed: i64, count: i64) -> Vec<i64> {
    (0..count).map(|i| (seed + 3 * i) % 16).collect()
}

#[test]
fn a_prompt_is_computed_once_but_for_its_last_tokens() {
    for states in [0, 8] {
        let mut asker = Asker::new(states);
        let prompt = tokens(1, 14);
        let (none, first) = asker.sample(&prompt, 3);
        let (found, second) = asker.sample(&prompt, 3);
        assert_eq!((none, found), (0, 12), "with {states} states");
        assert_eq!(first.sequences[0].tokens, second.sequences[0].tokens);
    }
}

#[test]
fn the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() {
    for states in [0, 8] {
        let mut asker = Asker::new(states);
        let mut turn = tokens(1, 6);
        let (_, output) = asker.sample(&turn, 12);
        turn.extend(output.sequences[0].tokens.iter().map(|&token| i64::from(token)));
        turn.extend(tokens(5, 5));
        // 6 tokens and 11 of the sample were inputs: four full pages.
        assert_eq!(asker.sample(&turn, 2).0, 16, "with {states} states");
    }
}

#[test]
fn where_two_prompts_were_seen_to_part_a_third_goes_on() {
    let prompts: Vec<Vec<i64>> = [2, 3, 4].map(|seed| [tokens(1, 9), tokens(seed, 9)].concat()).to_vec();
    for (states, hits) in [(0, [0, 8, 8]), (8, [0, 0, 8])] {
        let mut asker = Asker::new(states);
        let found: Vec<usize> = prompts.iter().map(|prompt| asker.sample(prompt, 2).0).collect();
        assert_eq!(found, hits, "with {states} states");
    }
}

#[test]
fn with_no_state_to_spare_prompts_are_computed_again() {
    // One for the prompt and one for its sample.
    let mut asker = Asker::new(2);
    let prompt = tokens(1, 14);
    let first = asker.sample(&prompt, 3).1;
    let second = asker.sample(&prompt, 3).1;
    assert_eq!(first.sequences[0].tokens, second.sequences[0].tokens);
    assert_eq!(asker.engine.evictions(), 0);
}
