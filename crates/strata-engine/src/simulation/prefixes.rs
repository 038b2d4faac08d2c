//! What of a prompt need not be computed again, where sequences have states and where they have none; and what of its pictures need not be seen again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::api::{Client, Image, Outcome, Request, Response, SampleOutput, SampleRequest, Stop};

use crate::sampler::Speculation;

use super::toy::Worked;
use super::{Engine, Faults, Limits};

/// A client that waits for each answer.
pub(super) struct Asker {
    pub(super) engine: Engine,
    pub(super) client: Client,
    sent: usize,
}

pub(super) fn client() -> Client {
    Client { owner: "o".into(), session: "s".into() }
}

impl Asker {
    /// Pages are of 4 tokens.
    pub(super) fn new(states: usize) -> Self {
        Asker::over(Limits { states, ..Limits::roomy(1) })
    }

    pub(super) fn over(limits: Limits) -> Self {
        let mut asker = Asker { engine: Engine::new(limits), client: client(), sent: 0 };
        asker.ask(Request::CreateSampler { sampler_id: "base".into(), source: None });
        asker
    }

    pub(super) fn ask(&mut self, request: Request) -> Response {
        self.outcome_of(request).unwrap()
    }

    pub(super) fn outcome_of(&mut self, request: Request) -> Outcome {
        let answer = self.send(request);
        loop {
            self.turn();
            if let Some(outcome) = answer.lock().unwrap().take() {
                return outcome;
            }
        }
    }

    /// Sends a request. The answer comes later.
    pub(super) fn send(&mut self, request: Request) -> Arc<Mutex<Option<Outcome>>> {
        self.sent += 1;
        let answer = Arc::new(Mutex::new(None));
        let to = answer.clone();
        let reply = Box::new(move |outcome: Outcome, _| *to.lock().unwrap() = Some(outcome));
        self.engine.handle().submit(format!("r{}", self.sent).into(), self.client.clone(), request, reply).unwrap();
        answer
    }

    /// Has the engine do something, or the disk.
    fn turn(&mut self) {
        if !self.engine.turn() {
            self.engine.advance_to_disk();
        }
        self.engine.audit().unwrap();
    }

    /// Samples after a prompt. How many tokens of it were found, and the answer.
    fn sample(&mut self, prompt: &[i64], max_tokens: usize) -> (usize, SampleOutput) {
        self.sample_of(&[], prompt, max_tokens)
    }

    /// As [`Asker::sample`], with pictures at the beginning.
    fn sample_of(&mut self, pictures: &[&[u8]], prompt: &[i64], max_tokens: usize) -> (usize, SampleOutput) {
        self.sample_from("base", pictures, prompt, max_tokens)
    }

    pub(super) fn sample_from(
        &mut self,
        from: &str,
        pictures: &[&[u8]],
        prompt: &[i64],
        max_tokens: usize,
    ) -> (usize, SampleOutput) {
        let sample = SampleRequest {
            images: images(pictures),
            max_tokens: Some(max_tokens),
            seed: 1,
            stop: Stop::Tokens(Vec::new()),
            ..SampleRequest::of(prompt.to_vec())
        };
        match self.ask(Request::Sample { sampler_id: from.into(), sample }) {
            Response::Sampled(output) => (output.prompt_cache_hit_tokens, output),
            other => panic!("{other:?}"),
        }
    }
}

impl Asker {
    /// Samples after many prompts that come at once, each of them from another session. The tokens that each step computed, and the answers.
    fn wave(&mut self, prompts: &[Vec<i64>], max_tokens: usize) -> (Vec<usize>, Vec<SampleOutput>) {
        self.wave_from((prompts.len(), 0), &[], prompts, max_tokens)
    }

    /// As [`Asker::wave`], from so many sessions in turn, with seeds from this one on, and pictures at the beginning of each.
    fn wave_from(
        &mut self,
        (sessions, seed): (usize, u64),
        pictures: &[&[u8]],
        prompts: &[Vec<i64>],
        max_tokens: usize,
    ) -> (Vec<usize>, Vec<SampleOutput>) {
        let answers = Arc::new(Mutex::new(vec![None; prompts.len()]));
        for (n, prompt) in prompts.iter().enumerate() {
            let sample = SampleRequest {
                images: images(pictures),
                max_tokens: Some(max_tokens),
                seed: seed + n as u64,
                stop: Stop::Tokens(Vec::new()),
                ..SampleRequest::of(prompt.clone())
            };
            self.sent += 1;
            let to = answers.clone();
            let reply = Box::new(move |outcome: Outcome, _| to.lock().unwrap()[n] = Some(outcome));
            let client = Client { session: format!("s{}", n % sessions).into(), ..client() };
            let request = Request::Sample { sampler_id: "base".into(), sample };
            self.engine.handle().submit(format!("r{}", self.sent).into(), client, request, reply).unwrap();
        }
        self.engine.shared.log.borrow_mut().clear();
        while answers.lock().unwrap().iter().any(Option::is_none) {
            assert!(self.engine.turn());
            self.engine.audit().unwrap();
        }
        let log = self.engine.shared.log.borrow();
        let steps =
            log.iter().filter_map(|(_, worked)| if let Worked::Step { tokens, .. } = worked { Some(*tokens) } else { None });
        let answers = std::mem::take(&mut *answers.lock().unwrap());
        let outputs = answers.into_iter().map(|outcome| match outcome {
            Some(Ok(Response::Sampled(output))) => output,
            other => panic!("{other:?}"),
        });
        (steps.collect(), outputs.collect())
    }

    /// Tokens of the pictures that were seen.
    fn sights(&self) -> Vec<usize> {
        let log = self.engine.shared.log.borrow();
        log.iter()
            .filter_map(
                |(_, worked)| if let Worked::Sight { block: 0, file } = worked { Some(usize::from(file[0])) } else { None },
            )
            .collect()
    }
}

fn images(files: &[&[u8]]) -> Vec<Image> {
    files.iter().map(|&file| Image { at: 0, file: file.into(), expected_tokens: None }).collect()
}

pub(super) fn tokens(seed: i64, count: i64) -> Vec<i64> {
    (0..count).map(|i| (seed + 3 * i) % 16).collect()
}

#[test]
fn a_prompt_is_computed_once_but_for_its_last_tokens() {
    for (states, expected) in [(0, 13), (8, 12)] {
        let mut asker = Asker::new(states);
        let prompt = tokens(1, 14);
        let (none, first) = asker.sample(&prompt, 3);
        let (found, second) = asker.sample(&prompt, 3);
        assert_eq!((none, found), (0, expected), "with {states} states");
        assert_eq!(first.sequences[0].tokens, second.sequences[0].tokens);
    }
}

#[test]
fn the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() {
    // 6 tokens and 11 of the sample were inputs: four full pages and one that is begun, of which no state is kept.
    for (states, expected) in [(0, 17), (8, 16)] {
        let mut asker = Asker::new(states);
        let mut turn = tokens(1, 6);
        let (_, output) = asker.sample(&turn, 12);
        turn.extend(output.sequences[0].tokens.iter().map(|&token| i64::from(token)));
        turn.extend(tokens(5, 5));
        assert_eq!(asker.sample(&turn, 2).0, expected, "with {states} states");
    }
}

#[test]
fn where_two_prompts_were_seen_to_part_a_third_goes_on() {
    let prompts: Vec<Vec<i64>> = [2, 3, 4].map(|seed| [tokens(1, 9), tokens(seed, 9)].concat()).to_vec();
    for (states, hits) in [(0, [0, 9, 9]), (8, [0, 0, 8])] {
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

#[test]
fn a_prompt_that_many_ask_for_at_once_is_computed_once() {
    // What a state is where the full pages of a prompt end is kept: a step ends there.
    for (states, expected) in [(0, &[30][..]), (40, &[28, 2])] {
        let prompt = tokens(1, 30);
        let (steps, together) = Asker::new(states).wave(&vec![prompt.clone(); 12], 2);
        assert_eq!(steps, [expected, &[12]].concat(), "with {states} states");
        for (seed, output) in (0..).zip(together) {
            let (steps, alone) = Asker::new(states).wave_from((1, seed), &[], std::slice::from_ref(&prompt), 2);
            assert_eq!((steps, &alone[0].sequences), ([expected, &[1]].concat(), &output.sequences), "with {states} states");
        }
    }
}

#[test]
fn a_step_has_no_more_copies_than_it_has_rows_for() {
    let limits = Limits { pages: 5000, ..Limits::roomy(1) };
    let steps = Asker::over(limits).wave(&vec![tokens(1, 60); 200], 1).0;
    // The first step has rows for some; the others begin with copies of the pages that it left, and their last token is computed once.
    assert_eq!(steps, [60, 1], "{steps:?}");
}

#[test]
fn of_long_prompts_that_begin_alike_one_goes_ahead_and_the_others_take_over_what_it_has_read() {
    let long = tokens(1, 1400);
    let ending = |n: i64| [&long[..1390], &tokens(n, 10)[..]].concat();
    let limits = Limits { pages: 2000, ..Limits::roomy(1) };
    let same = Asker::over(limits).wave(&vec![long.clone(); 6], 1).0;
    // The one that goes ahead, and the last token, from which the others draw.
    assert_eq!(same.iter().sum::<usize>(), 1401, "{same:?}");
    let parted = Asker::over(limits).wave(&(2..8).map(ending).collect::<Vec<_>>(), 1).0;
    // The end of each, which is no copy.
    assert!((1440..=1460).contains(&parted.iter().sum::<usize>()), "{parted:?}");
    // Those who wait do not shorten its steps, whoever they are.
    assert!(parted.len() <= 16, "{parted:?}");
    // Nobody waits for others who ask for something else.
    let apart = Asker::over(limits).wave(&(0..6).map(|n| tokens(n, 1400)).collect::<Vec<_>>(), 1).0;
    assert_eq!(apart.iter().sum::<usize>(), 6 * 1400, "{apart:?}");
}

#[test]
fn who_has_begun_a_page_with_a_copy_leaves_it_for_what_others_have_read_meanwhile() {
    let limits = Limits { pages: 2000, page_tokens: 40, ..Limits::roomy(1) };
    // Of what is there the prompts of the wave have some tokens, or all of a page but one.
    for found in [30, 39] {
        let mut asker = Asker::over(limits);
        asker.sample(&[tokens(1, found), tokens(2, 5)].concat(), 1);
        let steps = asker.wave(&vec![tokens(1, 1400); 6], 1).0;
        assert_eq!(steps.iter().sum::<usize>(), 1400 - found as usize, "{steps:?}");
    }
    // Of short prompts, for which a step has not enough rows, the others find more than they began with.
    let mut asker = Asker::over(Limits { pages: 5000, ..limits });
    asker.sample(&[tokens(1, 10), tokens(2, 5)].concat(), 1);
    let (steps, outputs) = asker.wave(&vec![tokens(1, 39); 200], 1);
    let found = |tokens| outputs.iter().filter(|output| output.prompt_cache_hit_tokens == tokens).count();
    assert_eq!((steps, found(10) + found(38)), (vec![29, 1], 200));
    assert!(found(10) > 0 && found(38) > 0);
    // Behind copies of different pages the same is not the same: each computes it, in as many steps as that takes.
    let mut asker = Asker::over(Limits { pages: 5000, ..limits });
    let begun = |n: i64| [vec![n / 16, n % 16], vec![1; 28]].concat();
    (0..80).for_each(|n| drop(asker.sample(&[begun(n), vec![9; 5]].concat(), 1)));
    let steps = asker.wave(&(0..80).map(|n| [begun(n), tokens(7, 8)].concat()).collect::<Vec<_>>(), 1).0;
    assert_eq!(steps.iter().sum::<usize>(), 80 * 8, "{steps:?}");
    assert!(steps.iter().all(|&tokens| tokens <= 256), "{steps:?}");
    // Copies of one page from which prompts part are no longer the same.
    let mut asker = Asker::over(limits);
    let prompts: Vec<Vec<i64>> = (0..6).map(|n| [tokens(3, 30), tokens(n, 600)].concat()).collect();
    asker.sample(&[tokens(3, 30), tokens(9, 5)].concat(), 1);
    let together = asker.wave(&prompts, 1).1;
    for (prompt, (seed, output)) in prompts.iter().zip((0..).zip(together)) {
        let alone = Asker::over(limits).wave_from((1, seed), &[], std::slice::from_ref(prompt), 1).1;
        assert_eq!(alone[0].sequences, output.sequences);
        assert_eq!(output.prompt_cache_hit_tokens, 30);
    }
}

#[test]
fn a_prompt_whose_page_was_not_copied_fails_and_leaves_nothing_behind() {
    let (prompt, mut failed) = (tokens(1, 14), 0);
    for seed in 1..12 {
        let mut asker = Asker::over(Limits { seed, ..Limits::roomy(seed) });
        let first = asker.sample(&prompt, 1).1;
        asker.engine.set_faults(Faults { page: 1000, ..Faults::default() });
        let sample = SampleRequest { max_tokens: Some(1), stop: Stop::Tokens(vec![]), ..SampleRequest::of(prompt.clone()) };
        let outcome = asker.outcome_of(Request::Sample { sampler_id: "base".into(), sample });
        asker.engine.set_faults(Faults::default());
        if asker.engine.core.recoveries() > 0 {
            continue;
        }
        failed += 1;
        assert!(outcome.unwrap_err().to_string().contains("sampling step: toy fault"));
        // It asks for what it did not get again.
        let (found, second) = asker.sample(&prompt, 1);
        assert_eq!((found, second.sequences), (13, first.sequences));
    }
    assert!(failed > 2, "{failed}");
}

#[test]
fn a_sample_that_lost_its_pages_goes_on_where_it_was() {
    let limits = Limits { pages: 15, page_tokens: 16, speculation: Speculation::Off, ..Limits::roomy(1) };
    let mut asker = Asker::over(limits);
    let long = |seed: u64| SampleRequest {
        max_tokens: Some(90),
        seed,
        stop: Stop::Tokens(Vec::new()),
        ..SampleRequest::of(tokens(seed as i64, 6))
    };
    let running = [1, 2].map(|seed| asker.send(Request::Sample { sampler_id: "base".into(), sample: long(seed) }));
    (0..57).for_each(|_| asker.turn());
    // Somebody else asks for the room of one of the two, and is soon done.
    asker.client.owner = "other".into();
    asker.ask(Request::CreateSampler { sampler_id: "other".into(), source: None });
    asker.engine.shared.log.borrow_mut().clear();
    let sample = SampleRequest { max_tokens: Some(60), stop: Stop::Tokens(vec![]), ..SampleRequest::of(tokens(5, 3)) };
    let answered = asker.send(Request::Sample { sampler_id: "other".into(), sample });
    (0..3).for_each(|_| asker.turn());
    assert_eq!(asker.engine.evictions(), 1);
    asker.client.owner = client().owner;
    while running.iter().chain([&answered]).any(|answer| answer.lock().unwrap().is_none()) {
        asker.turn();
    }
    let log = asker.engine.shared.log.borrow();
    let steps: Vec<usize> = log
        .iter()
        .filter_map(|(_, worked)| if let Worked::Step { tokens, .. } = worked { Some(*tokens) } else { None })
        .collect();
    // No step has more than a token of each sample, but for that which reads the other's prompt.
    assert!(steps.iter().filter(|&&tokens| tokens > 3).count() <= 1, "{steps:?}");
}

#[test]
fn nobody_waits_for_what_another_reads_behind_a_backlog() {
    let limits = Limits { pages: 6000, page_tokens: 40, speculation: Speculation::Off, ..Limits::roomy(1) };
    let turns = |asks_too: bool| {
        let mut asker = Asker::over(limits);
        let send = |asker: &mut Asker, names: [&str; 2], prompt: &[i64], num_samples: usize, max_tokens: usize| {
            let sample = SampleRequest {
                max_tokens: Some(max_tokens),
                num_samples,
                seed: 1,
                stop: Stop::Tokens(Vec::new()),
                ..SampleRequest::of(prompt.to_vec())
            };
            asker.sent += 1;
            let answered = Arc::new(AtomicBool::new(false));
            let to = answered.clone();
            let reply = Box::new(move |_, _| to.store(true, Ordering::Relaxed));
            let client = Client { owner: names[0].into(), session: names[1].into() };
            let request = Request::Sample { sampler_id: "base".into(), sample };
            asker.engine.handle().submit(format!("r{}", asker.sent).into(), client, request, reply).unwrap();
            answered
        };
        // An owner whose samples draw all that is its share, and one who reads by whole pages, somewhat less.
        send(&mut asker, ["drawing", "a"], &tokens(3, 5), 200, 600);
        for _ in 0..60 {
            asker.engine.turn();
        }
        for n in 0..8 {
            send(&mut asker, ["reading", "b"], &[vec![n, 15 - n], tokens(n, 900)].concat(), 1, 1);
        }
        if asks_too {
            send(&mut asker, ["reading", "b"], &[tokens(7, 60), vec![1]].concat(), 1, 1);
        }
        for _ in 0..3 {
            asker.engine.turn();
        }
        let answered = send(&mut asker, ["drawing", "c"], &tokens(7, 60), 1, 1);
        let mut turns = 0;
        while !answered.load(Ordering::Relaxed) {
            asker.engine.turn();
            asker.engine.audit().unwrap();
            turns += 1;
        }
        turns
    };
    let (alone, beside) = (turns(false), turns(true));
    assert!(beside <= alone + 2, "{beside} turns, where nobody else asks for the same {alone}");
}

#[test]
fn where_there_are_states_long_prompts_of_one_session_wait_for_what_the_first_leaves_behind() {
    let long = tokens(1, 600);
    let limits = Limits { pages: 2000, states: 40, ..Limits::roomy(1) };
    let steps = Asker::over(limits).wave_from((1, 0), &[], &vec![long; 6], 1).0;
    assert_eq!(steps.iter().sum::<usize>(), 600, "{steps:?}");
}

#[test]
fn of_prompts_with_the_same_picture_one_goes_ahead_too() {
    let (picture, text): (&[u8], _) = (&[9, 1], tokens(1, 30));
    let mut asker = Asker::new(0);
    let (steps, together) = asker.wave_from((6, 0), &[picture], &vec![text.clone(); 6], 1);
    // 39 tokens, of which the others compute the last.
    assert_eq!((steps.iter().sum::<usize>(), asker.sights()), (39 + 5, vec![9]), "{steps:?}");
    let alone = Asker::new(0).wave_from((1, 5), &[picture], &[text], 1).1;
    assert_eq!(alone[0].sequences, together[5].sequences);
}

#[test]
fn a_prompt_that_another_begins_with_costs_nothing_beside_it() {
    let prompts = [tokens(1, 30), tokens(1, 22), tokens(1, 7), tokens(2, 30)];
    assert_eq!(Asker::new(0).wave_from((1, 0), &[], &prompts, 1).0, [60]);
}

#[test]
fn a_picture_is_seen_once_whoever_shows_it() {
    // The same again is found in the cache: four pages and a half of pictures, and half a page of text, of which no state is kept.
    for (states, expected) in [(0, 21), (8, 20)] {
        let mut asker = Asker::new(states);
        let (a, b): (&[u8], &[u8]) = (&[9, 1], &[9, 2]);
        let (none, first) = asker.sample_of(&[a, b], &tokens(1, 4), 3);
        assert_eq!((none, asker.sights()), (0, vec![9, 9]));
        // Other text behind it, and the pictures the other way round: what was seen serves, what was computed does not.
        asker.sample_of(&[a], &tokens(2, 7), 3);
        let (none, other) = asker.sample_of(&[b, a], &tokens(1, 4), 3);
        assert_eq!((none, asker.sights().len()), (0, 2), "with {states} states");
        assert_ne!(first.sequences[0].logprobs, other.sequences[0].logprobs);
        let (found, again) = asker.sample_of(&[a, b], &tokens(1, 4), 3);
        assert_eq!((found, again.sequences), (expected, first.sequences), "with {states} states");
    }
}

#[test]
fn pictures_that_find_no_room_together_are_seen_one_after_another() {
    let limits = Limits { gallery_tokens: 18, ..Limits::roomy(1) };
    let mut small = Asker::over(limits);
    let mut roomy = Asker::new(0);
    let pictures: Vec<Vec<u8>> = (0..5).map(|n| vec![9, n]).collect();
    let pictures: Vec<&[u8]> = pictures.iter().map(|file| &file[..]).collect();
    let [one, other] = [&mut small, &mut roomy].map(|asker| asker.sample_of(&pictures, &tokens(1, 4), 3).1);
    assert_eq!((one, small.sights().len()), (other, 5));
    // Two of them are still there.
    small.sample_of(&pictures[3..], &tokens(1, 4), 3);
    assert_eq!(small.sights().len(), 5);
}

#[test]
fn no_copy_takes_the_place_of_a_page_that_another_prompt_of_the_step_begins_with() {
    // All is taken by what was read before, the longest first.
    let mut asker = Asker::over(Limits { pages: 8, ..Limits::roomy(1) });
    let (long, short) = (tokens(2, 20), tokens(5, 3));
    [&long, &tokens(9, 3), &tokens(10, 3), &short].into_iter().for_each(|prompt| drop(asker.sample(prompt, 1)));
    let found = asker.wave(&[[short, vec![1]].concat(), [long, vec![1]].concat()], 1).1;
    assert_eq!(found.iter().map(|output| output.prompt_cache_hit_tokens).collect::<Vec<_>>(), [3, 20]);
}

#[test]
fn a_sample_whose_page_was_not_copied_leaves_no_page_that_others_find() {
    let (long, short) = (tokens(1, 6), tokens(5, 7));
    let sample = |prompt: &[i64], max_tokens, num_samples| SampleRequest {
        max_tokens: Some(max_tokens),
        num_samples,
        stop: Stop::Tokens(vec![]),
        ..SampleRequest::of(prompt.to_vec())
    };
    let request = |sample| Request::Sample { sampler_id: "base".into(), sample };
    let (expected, mut failed) = (Asker::new(0).ask(request(sample(&short, 2, 1))), 0);
    for (seed, turns) in (1..20).flat_map(|seed| (1..20).map(move |turns| (seed, turns))) {
        // Room for both prompts and one sample of each, all of which is taken when the long one ends. Its next sample takes the page that the short prompt ends in.
        let mut asker = Asker::over(Limits { seed, pages: 9, speculation: Speculation::Off, ..Limits::roomy(seed) });
        let first = asker.send(request(sample(&long, 15, 2)));
        (0..turns).for_each(|_| asker.turn());
        // A session that holds nothing is next.
        asker.client.owner = "other".into();
        asker.ask(Request::CreateSampler { sampler_id: "other".into(), source: None });
        let second = asker.send(Request::Sample { sampler_id: "other".into(), sample: sample(&short, 2, 1) });
        asker.engine.set_faults(Faults { page: 1000, ..Faults::default() });
        while second.lock().unwrap().is_none() && asker.engine.core.recoveries() == 0 {
            asker.turn();
        }
        asker.engine.set_faults(Faults::default());
        while first.lock().unwrap().is_none() && asker.engine.core.recoveries() == 0 {
            asker.turn();
        }
        if asker.engine.core.recoveries() > 0 {
            continue;
        }
        asker.client = client();
        failed += usize::from(second.lock().unwrap().take().unwrap().is_err());
        let (Response::Sampled(expected), Response::Sampled(again)) = (&expected, asker.ask(request(sample(&short, 2, 1))))
        else {
            panic!("no sample")
        };
        assert_eq!(again.sequences, expected.sequences, "seed {seed}, {turns} turns");
    }
    assert!(failed > 2, "{failed}");
}

#[test]
fn for_a_prompt_whose_page_was_not_copied_no_other_is_taken() {
    let pictures: [&[u8]; 2] = [&[2, 1], &[2, 2]];
    let text = tokens(1, 4);
    let mut failed = 0;
    for seed in 1..20 {
        let mut asker = Asker::over(Limits { seed, ..Limits::roomy(seed) });
        asker.sample_of(&pictures, &text, 1);
        asker.sample(&text[..3], 1);
        asker.engine.set_faults(Faults { page: 1000, ..Faults::default() });
        // The first page is text, of which there is a part; what is behind it was seen.
        let images = images(&pictures).into_iter().map(|image| Image { at: 4, ..image }).collect();
        let sample =
            SampleRequest { images, max_tokens: Some(1), stop: Stop::Tokens(vec![]), ..SampleRequest::of(text.clone()) };
        let outcome = asker.outcome_of(Request::Sample { sampler_id: "base".into(), sample });
        assert!(outcome.is_err());
        if asker.engine.core.recoveries() == 0 {
            failed += 1;
            assert_eq!(asker.engine.shared.failed_steps.get(), 1, "it is copied once");
        }
    }
    assert!(failed > 2, "{failed}");
}
