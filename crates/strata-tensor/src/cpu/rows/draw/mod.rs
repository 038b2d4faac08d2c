//! Draws tokens from a row of logits, and reads log-probabilities off it.
//!
//! A draw is a function of the logits, the settings and its uniform number alone: it does not depend on who else is in the batch, or which threads it runs
//! on. The order of filters is temperature, top-k, top-p; top-p counts probability among what top-k left.
//!
//! What every row is summed up to ([`summary`]) is most of the work: 41 us for 152k tokens on a core of Zen 4. From there a token is found by the sums of
//! spans and blocks, and the most probable ones by the maxima of blocks ([`candidates`]).
//!
//! Weights at temperature 1 are the exponentials that the normaliser is made of. What is divided by another temperature, or filtered, weighs an [`exponential`](summary::exponential)
//! that has the same bits on every processor.

mod candidates;
mod summary;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use crate::backend::{Draw, RowReply, RowRequest};
use candidates::Candidates;
pub(crate) use summary::{BLOCK, Row, SPAN, block_maxima, maximum, span_sums};
use summary::{inverse, weigh_span};

/// What a thread keeps from draw to draw.
#[derive(Default)]
struct Scratch {
    candidates: Candidates,
    /// The order in which the draws of a row are looked for.
    order: Vec<u32>,
    /// Of the tokens of a span.
    weights: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What is drawn from.
enum From {
    /// The most probable token.
    Best,
    /// All tokens.
    All,
    /// What top-k and top-p leave.
    Some { k: usize, top_p: f32 },
}

impl From {
    fn of(draw: &Draw, vocab: usize) -> From {
        let k = draw.top_k.unwrap_or(vocab).min(vocab);
        match draw.temperature == 0.0 || k == 1 {
            true => From::Best,
            false if k == vocab && draw.top_p >= 1.0 => From::All,
            false => From::Some { k, top_p: draw.top_p },
        }
    }
}

/// By how much the draws of a request from a vocabulary of this size multiply all logits, if not by 1: [`span_sums`] has to know it.
pub(crate) fn inverse_temperature(request: &RowRequest, vocab: usize) -> Option<f32> {
    let draw = request.draw.as_ref().filter(|draw| draw.temperature != 1.0)?;
    let needs_all = match From::of(draw, vocab) {
        From::Best => false,
        From::All => true,
        From::Some { k, .. } => k == vocab,
    };
    needs_all.then(|| inverse(draw.temperature))
}

/// What is asked of a row. `None` if the logits are not numbers.
pub(crate) fn reply(row: Row<'_>, request: &RowRequest) -> Option<RowReply> {
    if !row.log_normalizer.is_finite() {
        return None;
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let with_logprob = |id: u32| (id, row.logprob(id));
        let reply = RowReply {
            logprobs: request.ids.iter().map(|&id| row.logprob(id)).collect(),
            top: scratch.candidates.best(&row, request.top).map(with_logprob).collect(),
            drawn: request.draw.as_ref().map_or_else(Vec::new, |d| draw(&row, d, scratch)),
        };
        scratch.candidates.trim();
        Some(reply)
    })
}

/// One token for each of the uniform numbers, with its log-probability.
fn draw(row: &Row<'_>, draw: &Draw, scratch: &mut Scratch) -> Vec<(u32, f32)> {
    let Draw { temperature, uniforms, .. } = draw;
    let mut drawn = Vec::with_capacity(uniforms.len());
    match From::of(draw, row.logits.len()) {
        From::Best => drawn.resize(uniforms.len(), row.argmax()),
        From::All => draw_from_all(row, uniforms, scratch, &mut drawn),
        From::Some { k, top_p } => scratch.candidates.draw(row, *temperature, k, top_p, uniforms, |id| drawn.push(id)),
    }
    drawn.into_iter().map(|id| (id, row.logprob(id))).collect()
}

/// For each uniform number the first token at which the cumulative probability exceeds it.
fn draw_from_all(row: &Row<'_>, uniforms: &[f64], scratch: &mut Scratch, drawn: &mut Vec<u32>) {
    let Scratch { order, weights, .. } = scratch;
    order.clear();
    order.extend(0..uniforms.len() as u32);
    // In the order of their tokens, so that the tokens of a span are weighed once.
    order.sort_unstable_by(|&a, &b| uniforms[a as usize].total_cmp(&uniforms[b as usize]));
    drawn.resize(uniforms.len(), 0);
    let total: f64 = row.sums.iter().sum();
    let (mut weighed, mut block_sums) = (usize::MAX, [0.0; SPAN / BLOCK]);
    for &draw in order.iter() {
        let (span, within) = pick(row.sums.iter().copied(), uniforms[draw as usize] * total);
        let start = span * SPAN;
        if weighed != span {
            let logits = &row.logits[start..(start + SPAN).min(row.logits.len())];
            weights.resize(logits.len(), 0.0);
            weigh_span(row.isa, logits, row.maximum, row.inverse_temperature, weights, &mut block_sums);
            weighed = span;
        }
        // Spans may have been added up in another order than their blocks: the place within one is a share of it.
        let share = within / row.sums[span] * block_sums.iter().sum::<f64>();
        let (block, within) = pick(block_sums.iter().copied(), share);
        let weights = &weights[block * BLOCK..];
        let (token, _) = pick(weights.iter().take(BLOCK).map(|&w| w as f64), within);
        drawn[draw as usize] = (start + block * BLOCK + token) as u32;
    }
}

/// The first place at which the cumulative weight exceeds `target`, or where rounding leaves it short of that the last with any weight; and how far `target` is beyond what comes before.
fn pick(weights: impl Iterator<Item = f64>, target: f64) -> (usize, f64) {
    let (mut sum, mut found) = (0.0, (0, 0.0));
    for (i, weight) in weights.enumerate().filter(|(_, weight)| *weight > 0.0) {
        found = (i, target - sum);
        sum += weight;
        if sum > target {
            break;
        }
    }
    found
}
