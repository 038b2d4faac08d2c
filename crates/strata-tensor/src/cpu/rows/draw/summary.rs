//! What is found out about a row before anything is drawn from it, block by block and span by span, on any number of threads.
//!
//! Two passes over the logits: one for maxima, at the speed of memory, and one of some 16 operations per token for the sum of the exponentials that every log-probability needs. What
//! a draw needs comes out of the same passes: the most probable tokens are found by the maxima of their blocks, and a token by the sums of the spans.

use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::rows::exp::exp_f32;
use crate::cpu::rows::lanes::{LANES, filled};
use crate::cpu::rows::softmax::{self, center, larger, normalizer, sum_of_span};

/// Tokens whose largest logit is noted.
pub(crate) const BLOCK: usize = 256;
/// Tokens whose exponentials are summed together, whole blocks of them.
pub(crate) const SPAN: usize = softmax::SPAN;

multiversion! {
    /// The largest logit of every block.
    pub(crate) fn block_maxima(logits: &[f32], maxima: &mut [f32]) = block_maxima_body;
}

multiversion! {
    /// For every span of logits the sum of their exponentials about `maximum`, as [`log_sum_exp`](crate::cpu::rows::softmax::log_sum_exp) adds them up, and if they are
    /// divided by another temperature than 1 the sum of those too.
    pub(crate) fn span_sums(
        logits: &[f32],
        maximum: f32,
        inverse_temperature: Option<f32>,
        sums: &mut [f64],
        tempered: &mut [f64],
    ) = span_sums_body;
}

multiversion! {
    /// The weights of the tokens of a span, `[logits.len()]`, with the sums of its blocks.
    pub(super) fn weigh_span(
        logits: &[f32],
        maximum: f32,
        inverse_temperature: Option<f32>,
        weights: &mut [f32],
        sums: &mut [f64; SPAN / BLOCK],
    ) = weigh_span_body;
}

/// The model's prediction after one token, with what is known of it.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    pub(super) isa: Isa,
    /// `[vocab_size]`.
    pub(super) logits: &'a [f32],
    /// The largest of each block.
    pub(super) maxima: &'a [f32],
    /// The largest of all.
    pub(super) maximum: f32,
    /// Logarithm of the sum of the exponentials of the logits.
    pub(super) log_normalizer: f32,
    /// By how much a draw from all tokens multiplies logits, if not by 1.
    pub(super) inverse_temperature: Option<f32>,
    /// What the tokens of each span weigh in that draw.
    pub(super) sums: &'a [f64],
}

impl<'a> Row<'a> {
    /// A row of which the maxima of blocks and the sums of spans are known.
    pub(crate) fn new(
        isa: Isa,
        logits: &'a [f32],
        maxima: &'a [f32],
        inverse_temperature: Option<f32>,
        sums: &'a [f64],
        tempered: &'a [f64],
    ) -> Self {
        let maximum = maximum(maxima);
        let log_normalizer = normalizer(center(maximum), sums.iter().sum());
        let sums = if inverse_temperature.is_some() { tempered } else { sums };
        Row { isa, logits, maxima, maximum, log_normalizer, inverse_temperature, sums }
    }

    /// The log-probability of a token, at temperature 1.
    pub(super) fn logprob(&self, token: u32) -> f32 {
        self.logits[token as usize] - self.log_normalizer
    }

    /// The most probable token, of equals that of the lowest id.
    pub(super) fn argmax(&self) -> u32 {
        let block = self.maxima.iter().position(|&m| m == self.maximum).unwrap_or(0);
        let start = block * BLOCK;
        let within = self.logits[start..].iter().position(|&l| l == self.maximum).unwrap_or(0);
        (start + within) as u32
    }
}

/// The largest logit of a row, given those of its blocks.
pub(crate) fn maximum(maxima: &[f32]) -> f32 {
    maxima.iter().fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// What a temperature above 0 multiplies logits by.
pub(super) fn inverse(temperature: f32) -> f32 {
    temperature.recip().min(f32::MAX)
}

#[inline(always)]
fn block_maxima_body(_: impl Fma, logits: &[f32], maxima: &mut [f32]) {
    // Whole blocks are of a length that the compiler knows.
    let (blocks, tail) = logits.as_chunks::<BLOCK>();
    for (block, maximum) in blocks.iter().zip(&mut *maxima) {
        *maximum = largest_of(block);
    }
    if !tail.is_empty() {
        maxima[blocks.len()] = largest_of(tail);
    }
}

/// The largest of a block, what is not a number passed over.
#[inline(always)]
fn largest_of(block: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l]);
        }
    }
    for (lane, &logit) in lanes.iter_mut().zip(tail) {
        *lane = larger(*lane, logit);
    }
    // As whole numbers in the same order: of those a compiler knows how to find the largest of a register.
    let turned = |bits: i32| bits ^ ((bits >> 31) as u32 >> 1) as i32;
    let largest = lanes.iter().fold(i32::MIN, |largest, lane| largest.max(turned(lane.to_bits() as i32)));
    f32::from_bits(turned(largest) as u32)
}

#[inline(always)]
fn span_sums_body(
    fma: impl Fma,
    logits: &[f32],
    maximum: f32,
    inverse_temperature: Option<f32>,
    sums: &mut [f64],
    tempered: &mut [f64],
) {
    let center = center(maximum);
    for ((span, sum), tempered) in logits.chunks(SPAN).zip(sums).zip(tempered) {
        *sum = sum_of_span(span, |logit| exp_f32(fma, logit - center));
        if let Some(factor) = inverse_temperature {
            *tempered = sum_of_span(span, |logit| exp_f32(fma, (logit - center) * factor));
        }
    }
}

#[inline(always)]
fn weigh_span_body(
    fma: impl Fma,
    logits: &[f32],
    maximum: f32,
    inverse_temperature: Option<f32>,
    weights: &mut [f32],
    sums: &mut [f64; SPAN / BLOCK],
) {
    let factor = inverse_temperature.unwrap_or(1.0);
    for (weight, &logit) in weights.iter_mut().zip(logits) {
        *weight = exp_f32(fma, (logit - maximum) * factor);
    }
    sums.fill(0.0);
    for (block, sum) in weights.chunks(BLOCK).zip(sums) {
        let mut lanes = [0.0; LANES];
        let (chunks, tail) = block.as_chunks::<LANES>();
        for chunk in chunks.iter().chain([&filled(tail, 0.0)]) {
            for l in 0..LANES {
                lanes[l] += chunk[l] as f64;
            }
        }
        *sum = lanes.iter().sum();
    }
}
