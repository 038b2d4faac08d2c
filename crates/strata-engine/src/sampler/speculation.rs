//! Speculation by prompt lookup: what a sequence said before, it may say again.
//!
//! A sequence whose last tokens stand earlier in its own text guesses that what followed them there follows here. The guesses are fed behind its last
//! token in the same step, and a token is drawn at each of those rows, with the draw of its own position. A row's logits are the bits that they are
//! when tokens come one by one, so as long as the guesses are what was drawn, these are the draws there would have been without; from the first that is not, rows
//! are dropped. What dropped rows left lies in the sequence's own pages beyond its tokens, where nothing is read or registered, until it is written over.
//!
//! States of linear attention cannot go back behind a token: models with them do not speculate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use strata_model::{LinearWork, Work};

use super::job::Sequence;
use super::{Batcher, Part};
use crate::api::Client;
use crate::compute::Compute;

/// How many of its last tokens a sequence looks for, the longest match first.
const MATCH: (usize, usize) = (2, 4);
/// How far back it looks. No memory is kept for it, so that what is held does not depend on it.
const LOOKBACK_TOKENS: usize = 8192;
/// Guesses of a sequence in a step, at most: with the last token as many rows as a block of the kernels has.
const GUESSES_MAX: usize = 15;
/// Rows that take as long as reading the matrices of a model does.
const BASE_ROWS: f32 = 8.0;
/// How many times what a row costs it must be expected to save: where weights have few bits, reading them takes less.
const MARGIN: f32 = 2.0;
/// How probable the first guess of a sequence is held to be, and the weight of each outcome.
const RATE: f32 = 0.5;
const RATE_STEP: f32 = 0.125;

/// Whether samples speculate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// Every token in a step of its own.
    #[default]
    Off,
    /// By what the sequence itself has said before.
    PromptLookup,
}

/// What came of speculation since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculated {
    /// Guesses that took a row of a step.
    pub proposed: u64,
    /// Those that were what was then drawn.
    pub accepted: u64,
}

/// Speculation as it is set, and what comes of it: between an engine and whoever asks.
#[derive(Debug, Default)]
pub(crate) struct Speculating {
    speculation: Speculation,
    base_rows: f32,
    proposed: AtomicU64,
    accepted: AtomicU64,
}

impl Speculating {
    /// Of a model whose matrices all tokens of a step pass.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn new(speculation: Speculation) -> Arc<Self> {
        Arc::new(Speculating { speculation, base_rows: BASE_ROWS, ..Speculating::default() })
    }

    /// Of a model of this work.
    pub(crate) fn of(speculation: Speculation, work: &Work) -> Arc<Self> {
        Arc::new(Speculating { speculation, base_rows: base_rows(work), ..Speculating::default() })
    }

    pub(crate) fn speculated(&self) -> Speculated {
        Speculated { proposed: self.proposed.load(Ordering::Relaxed), accepted: self.accepted.load(Ordering::Relaxed) }
    }

    fn count(&self, proposed: usize, accepted: usize) {
        self.proposed.fetch_add(proposed as u64, Ordering::Relaxed);
        self.accepted.fetch_add(accepted as u64, Ordering::Relaxed);
    }
}

/// The guesses of a sequence in a step, and how good they were so far.
pub(crate) struct Guesses {
    /// The tokens, the next first. The first is made even if it gets no row: that it was right is known anyway.
    tokens: Vec<u32>,
    /// How many of them are fed.
    fed: usize,
    /// Rows of this step that were taken.
    taken: usize,
    /// How probable it is that a guess behind right ones is right.
    rate: f32,
}

impl Default for Guesses {
    fn default() -> Self {
        Guesses { tokens: Vec::new(), fed: 0, taken: 0, rate: RATE }
    }
}

impl Guesses {
    /// The guesses that are fed.
    pub(crate) fn fed(&self) -> &[u32] {
        &self.tokens[..self.fed]
    }

    /// Whether the row `ahead` guesses behind the last token is a row of the sequence that ends in `last` now.
    pub(crate) fn holds(&self, ahead: usize, last: Option<&u32>) -> bool {
        ahead == self.taken && (ahead == 0 || self.tokens.get(ahead - 1) == last)
    }

    /// Notes what was drawn at the next row.
    pub(crate) fn note(&mut self, drawn: u32) {
        if let Some(&guess) = self.tokens.get(self.taken) {
            let outcome = if guess == drawn { 1.0 } else { 0.0 };
            self.rate += (outcome - self.rate) * RATE_STEP;
        }
        self.taken += 1;
    }

    fn begin(&mut self, tokens: Vec<u32>) {
        (self.tokens, self.fed, self.taken) = (tokens, 0, 0);
    }
}

impl<C: Compute> Batcher<C> {
    /// Adds guesses to the decodes of a step that has room for `spare` more tokens, and to what their sessions have of it.
    pub(super) fn speculate(&mut self, parts: &[Part], mut spare: usize, tokens: &mut [(Client, usize)]) {
        let decodes: Vec<usize> =
            parts.iter().filter_map(|part| if let Part::Decode { sequence } = *part { Some(sequence) } else { None }).collect();
        let base_rows = self.speculating.base_rows;
        decodes.iter().for_each(|&i| self.running[i].guesses.begin(Vec::new()));
        if self.speculating.speculation == Speculation::Off
            || self.pool.has_states()
            || rows_worth(1.0, decodes.len(), base_rows) == 0
        {
            return;
        }
        for (i, &sequence) in decodes.iter().enumerate() {
            let s = &mut self.running[sequence];
            let Some(job) = self.jobs.get(&s.job) else { continue };
            // The last token of a sample is never an input, and its pages are promised up to there.
            let room = (job.plan.max_tokens - s.tokens.len()).saturating_sub(1);
            let worth = rows_worth(s.guesses.rate, decodes.len(), base_rows);
            s.guesses.begin(look_up(&job.plan.prompt, &s.tokens, worth.max(1)));
            let fed = worth.min(s.guesses.tokens.len()).min(room).min(spare / (decodes.len() - i));
            s.guesses.fed = fed;
            spare -= fed;
            while s.held.pages.len() * self.page_tokens < s.cached + 1 + fed {
                s.reserved.pages -= 1;
                s.held.pages.push(self.pool.take_page());
            }
            if let Some((_, tokens)) = tokens.iter_mut().find(|(client, _)| *client == job.asked.client) {
                *tokens += fed;
            }
        }
    }

    /// Counts what came of the guesses of a step.
    pub(super) fn count_guesses(&self, parts: &[Part]) {
        for part in parts {
            if let Part::Decode { sequence } = *part
                && let Some(Sequence { guesses, .. }) = self.running.get(sequence)
                && guesses.fed > 0
            {
                self.speculating.count(guesses.fed, guesses.taken.saturating_sub(1));
            }
        }
    }
}

/// Rows that cost as much as what a step costs whatever its rows: of experts each row reads its own, so with many of them a row costs as much as a step.
fn base_rows(work: &Work) -> f32 {
    let elements =
        |l: &LinearWork| (l.layers * l.experts.map_or(1, |e| e.active)) as f32 * (l.in_features * l.out_features) as f32;
    let (experts, shared): (Vec<_>, Vec<_>) = work.linears.iter().chain([&work.unembedding]).partition(|l| l.experts.is_some());
    let sum = |linears: Vec<&LinearWork>| linears.into_iter().map(elements).sum::<f32>();
    let (shared, own) = (sum(shared), sum(experts));
    BASE_ROWS * shared / (shared + own + BASE_ROWS * own)
}

/// How many guesses are worth a row, each right with probability `rate` if those before it are, in a step that draws for so many sequences.
///
/// A token costs a sequence its part of a step, `(base_rows + decodes) / decodes` rows: what a right guess saves. A guess costs one. Counts
/// of rows decide and no clock does, so that the same requests make the same steps.
fn rows_worth(rate: f32, decodes: usize, base_rows: f32) -> usize {
    let saves = (base_rows + decodes as f32) / decodes.max(1) as f32;
    let mut probability = 1.0;
    let is_worth = |_: &usize| {
        probability *= rate;
        probability * saves > MARGIN
    };
    (1..=GUESSES_MAX).take_while(is_worth).count()
}

/// Guesses what follows `prompt` and `sampled`: what followed their last tokens where these were last before, as many of them as were.
/// Where it runs into the end it goes round. Nothing if the last two tokens are new.
fn look_up(prompt: &[u32], sampled: &[u32], most: usize) -> Vec<u32> {
    let length = prompt.len() + sampled.len();
    let token = |i: usize| if i < prompt.len() { prompt[i] } else { sampled[i - prompt.len()] };
    let Some(last) = length.checked_sub(1).map(token) else { return Vec::new() };
    let (mut longest, mut follows) = (MATCH.0 - 1, length);
    let first = length.saturating_sub(LOOKBACK_TOKENS).max(1) - 1;
    let [of_prompt, of_sampled] = [first.min(prompt.len()), first.saturating_sub(prompt.len())];
    'search: for (offset, mut before) in
        [(prompt.len() + of_sampled, &sampled[of_sampled..]), (of_prompt, &prompt[of_prompt..])]
    {
        while let Some(place) = last_place(before, last) {
            before = &before[..place];
            let end = offset + place + 1;
            if end == length {
                continue;
            }
            let mut matching = 1;
            while matching < MATCH.1.min(end) && token(end - 1 - matching) == token(length - 1 - matching) {
                matching += 1;
            }
            if matching > longest {
                (longest, follows) = (matching, end);
                if matching == MATCH.1 {
                    break 'search;
                }
            }
        }
    }
    let period = length - follows;
    if period == 0 { Vec::new() } else { (0..most).map(|i| token(follows + i % period)).collect() }
}

/// Where a token is last. By hand, for every step of a long sequence goes through thousands of tokens, and as this crate is compiled iterators over them stay calls.
fn last_place(tokens: &[u32], token: u32) -> Option<usize> {
    let mut place = tokens.len();
    while place > 0 {
        place -= 1;
        if tokens[place] == token {
            return Some(place);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_longest_match_is_guessed_and_of_two_the_later() {
        assert_eq!(look_up(&[1, 2, 3, 4, 5], &[1, 2], 2), [3, 4]);
        // Of three tokens that match against two, whichever side of the prompt's end they lie on.
        assert_eq!(look_up(&[9, 1, 2, 7, 8, 1, 2, 5], &[9, 1, 2], 1), [7]);
        assert_eq!(look_up(&[1, 2, 7, 1, 2, 8, 1], &[2], 1), [8]);
        assert!(look_up(&[1, 2, 3, 4, 5, 6], &[9, 2], 3).is_empty(), "one token is no match");
        for short in [&[][..], &[1], &[1, 2]] {
            assert!(look_up(short, &[], 3).is_empty());
        }
    }

    #[test]
    fn what_is_found_is_what_comparing_every_place_finds() {
        let plainly = |all: &[u32]| {
            let matching =
                |end: usize| (1..=MATCH.1.min(end)).take_while(|back| all[end - back] == all[all.len() - back]).count();
            let longest = (1..all.len()).map(|end| (matching(end), end)).filter(|(count, _)| *count >= MATCH.0).max();
            longest.map(|(_, end)| all[end])
        };
        let mut state = 1u32;
        for length in 0..200 {
            let all: Vec<u32> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) % 5
                })
                .collect();
            for split in [0, length / 3, length] {
                assert_eq!(look_up(&all[..split], &all[split..], 1).first().copied(), plainly(&all), "{all:?} at {split}");
            }
        }
    }

    #[test]
    fn a_loop_goes_round() {
        assert_eq!(look_up(&[5, 1, 2, 3, 1, 2], &[3], 7), [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!(look_up(&[4, 4, 4], &[], 3), [4, 4, 4]);
    }

    #[test]
    fn no_more_is_looked_through_than_the_last_tokens() {
        let far: Vec<u32> = [1, 2, 3].into_iter().chain((0..LOOKBACK_TOKENS as u32).map(|i| 10 + i)).collect();
        assert!(look_up(&far, &[1, 2], 1).is_empty());
        assert_eq!(look_up(&far[..far.len() - 4], &[1, 2], 1), [3]);
        // Nor of what was sampled.
        let sampled = |count: usize| [&far[..count], &[1, 2]].concat();
        assert!(look_up(&[7], &sampled(far.len()), 1).is_empty());
        assert_eq!(look_up(&[7], &sampled(far.len() - 4), 1), [3]);
    }

    #[test]
    fn guesses_are_worth_a_row_while_few_draw_and_most_are_right() {
        let worth = |rate, decodes| rows_worth(rate, decodes, BASE_ROWS);
        assert_eq!((worth(1.0, 1), worth(0.5, 1), worth(0.2, 1)), (GUESSES_MAX, 2, 0));
        assert_eq!((worth(1.0, 4), worth(0.9, 4), worth(0.5, 4)), (GUESSES_MAX, 3, 0));
        assert_eq!((worth(1.0, 7), worth(1.0, 8), worth(1.0, 256)), (GUESSES_MAX, 0, 0));
    }

    #[test]
    fn where_rows_read_experts_of_their_own_fewer_guesses_are_worth_it() {
        let rows = |shape: &str| base_rows(&Work::of(&strata_model::ModelConfig::named_shape(shape).unwrap()));
        assert_eq!(rows("qwen3-0.6b"), BASE_ROWS);
        let of_experts = rows("qwen3-30b-a3b");
        assert!((0.3..1.0).contains(&of_experts), "{of_experts}");
        assert_eq!(rows_worth(1.0, 1, of_experts), 0);
    }

    #[test]
    fn rows_hold_until_a_guess_is_wrong_and_the_rate_follows() {
        let mut guesses = Guesses::default();
        guesses.begin(vec![5, 6, 7]);
        guesses.fed = 2;
        assert_eq!(guesses.fed(), [5, 6]);
        assert!(guesses.holds(0, Some(&1)));
        guesses.note(5);
        assert!(guesses.rate > RATE && guesses.holds(1, Some(&5)) && !guesses.holds(2, Some(&5)));
        guesses.note(9);
        assert!(!guesses.holds(2, Some(&9)), "6 was guessed and 9 drawn");
        let before = guesses.rate;
        // A guess that got no row is judged too.
        guesses.begin(vec![3]);
        guesses.note(3);
        assert!(guesses.rate > before && guesses.fed().is_empty());
        (0..40).for_each(|_| {
            guesses.begin(vec![3]);
            guesses.note(4);
        });
        assert_eq!(rows_worth(guesses.rate, 1, BASE_ROWS), 0);
    }
}
