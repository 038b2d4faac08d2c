//! The most probable tokens of a row, and draws among them.
//!
//! A block whose largest logit is below those of `k` other blocks has none of the `k` best: of 594 blocks of a vocabulary of 152k, those that are left are looked through.
//! Nothing is sorted but what is reported and a few hundred: of more candidates, the half that is looked for is divided further.

use super::summary::{BLOCK, Row, inverse};
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::rows::lanes::LANES;

/// How many of the most probable tokens top-p looks at first. Most often they suffice.
const TOP_P_FIRST: usize = 256;
/// So many candidates are sorted, and their weights added up in that order.
const SORTED: usize = 256;
/// Candidates whose memory a thread keeps.
const KEPT: usize = 1 << 14;

multiversion! {
    /// Adds the logits that are at least `threshold` to the candidates; the first logit is that of `first`.
    fn push_at_least(logits: &[f32], first: u32, threshold: f32, keys: &mut Vec<u64>) = push_at_least_body;
}

multiversion! {
    /// The sum of what candidates weigh, in 16 lanes, joined in order.
    fn sum_of(keys: &[u64], weight: Weight) -> f64 = sum_of_body;
}

#[inline(always)]
fn sum_of_body(_: impl Fma, keys: &[u64], weight: Weight) -> f64 {
    let mut sums = [0.0; LANES];
    let (chunks, tail) = keys.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            sums[l] += weight.of(chunk[l]);
        }
    }
    for (sum, &key) in sums.iter_mut().zip(tail) {
        *sum += weight.of(key);
    }
    sums.iter().sum()
}

#[inline(always)]
fn push_at_least_body(_: impl Fma, logits: &[f32], first: u32, threshold: f32, keys: &mut Vec<u64>) {
    for (chunk, first) in logits.chunks(LANES).zip((first..).step_by(LANES)) {
        // Of sixteen most often none: the sixteen are compared at once.
        if chunk.iter().fold(false, |any, &logit| any | (logit >= threshold)) {
            let hits = chunk.iter().zip(first..).filter(|(logit, _)| **logit >= threshold);
            keys.extend(hits.map(|(&logit, id)| key(logit, id)));
        }
    }
}

/// A token and its logit as one number: less is better, and of equals the lower id.
fn key(logit: f32, id: u32) -> u64 {
    let bits = logit.to_bits();
    // The order of `f32::total_cmp`, as that of whole numbers.
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!ascending) << 32 | u64::from(id)
}

fn id_of(key: u64) -> u32 {
    key as u32
}

#[inline(always)]
fn logit_of(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

/// What candidates weigh: unnormalised probabilities, at most 1.
#[derive(Clone, Copy)]
struct Weight {
    maximum: f32,
    inverse_temperature: f32,
}

impl Weight {
    #[inline(always)]
    fn of(self, key: u64) -> f64 {
        exponential((logit_of(key) - self.maximum) * self.inverse_temperature) as f64
    }

    /// Of all of them together: a few in their order, best first.
    fn of_all(self, isa: Isa, keys: &[u64]) -> f64 {
        if keys.len() > SORTED { sum_of(isa, keys, self) } else { keys.iter().map(|&key| self.of(key)).sum() }
    }
}

/// Tokens that may be drawn. Its memory is used again from row to row.
#[derive(Default)]
pub(super) struct Candidates {
    keys: Vec<u64>,
    work: Vec<u64>,
}

impl Candidates {
    /// The `k` best tokens of a row, best first; of equals the lower id first.
    pub(super) fn best(&mut self, row: &Row<'_>, k: usize) -> impl Iterator<Item = u32> {
        self.find_best(row, k);
        self.keys.sort_unstable();
        self.keys.iter().map(|&key| id_of(key))
    }

    /// Gives back the memory that most draws have no use for.
    pub(super) fn trim(&mut self) {
        for keys in [&mut self.keys, &mut self.work] {
            if keys.capacity() > KEPT {
                keys.clear();
                keys.shrink_to(KEPT);
            }
        }
    }

    /// Finds the `k` best tokens, sorted if they are few.
    fn find_best(&mut self, row: &Row<'_>, k: usize) {
        let keys = &mut self.keys;
        let k = k.min(row.logits.len());
        keys.clear();
        if k == 0 {
            return;
        }
        let mut threshold = f32::NEG_INFINITY;
        if k <= row.maxima.len() {
            keys.extend(row.maxima.iter().zip(0..).map(|(&maximum, block)| key(maximum, block)));
            threshold = logit_of(*keys.select_nth_unstable(k - 1).1);
            keys.clear();
        }
        for (block, &maximum) in row.maxima.iter().enumerate() {
            if maximum < threshold {
                continue;
            }
            push_block(row, block, threshold, keys);
            if keys.len() >= 2 * k + BLOCK {
                keys.select_nth_unstable(k - 1);
                keys.truncate(k);
                threshold = logit_of(keys[k - 1]);
            }
        }
        if keys.len() > k {
            keys.select_nth_unstable(k - 1);
            keys.truncate(k);
        }
        if k <= SORTED {
            keys.sort_unstable();
        }
    }

    /// Finds all tokens whose logits are at least `threshold`.
    fn find_at_least(&mut self, row: &Row<'_>, threshold: f32) {
        self.keys.clear();
        for (block, _) in row.maxima.iter().enumerate().filter(|(_, maximum)| **maximum >= threshold) {
            push_block(row, block, threshold, &mut self.keys);
        }
    }

    /// Hands on a token for each uniform number from what top-k and top-p leave.
    pub(super) fn draw(
        &mut self,
        row: &Row<'_>,
        temperature: f32,
        k: usize,
        top_p: f32,
        uniforms: &[f64],
        mut drawn: impl FnMut(u32),
    ) {
        let weight = Weight { maximum: row.maximum, inverse_temperature: inverse(temperature) };
        let vocab = row.logits.len();
        let is_all = k >= vocab;
        self.find_best(row, if is_all { TOP_P_FIRST } else { k });
        let mut found = weight.of_all(row.isa, &self.keys);
        let total = if is_all { row.sums.iter().sum() } else { found };
        let enough = top_p as f64 * total;
        if found < enough && is_all && self.keys.len() < vocab {
            // All tokens that each weigh less than an equal share of what may be left out can be left out; half of that, for the rounding.
            let least = (1.0 - top_p as f64) * total / vocab as f64 / 2.0;
            self.find_at_least(row, (row.maximum as f64 + least.ln() / weight.inverse_temperature as f64) as f32);
            found = weight.of_all(row.isa, &self.keys);
        }
        if found >= enough {
            let last = first_where(&mut self.keys, row.isa, weight, |sum| sum >= enough);
            self.keys.truncate(last + 1);
            found = weight.of_all(row.isa, &self.keys);
        }
        for uniform in uniforms {
            // A draw does not depend on what those before have sorted.
            self.work.clone_from(&self.keys);
            let at = first_where(&mut self.work, row.isa, weight, |sum| sum > uniform * found);
            drawn(id_of(self.work[at]));
        }
    }
}

fn push_block(row: &Row<'_>, block: usize, threshold: f32, keys: &mut Vec<u64>) {
    let start = block * BLOCK;
    let end = (start + BLOCK).min(row.logits.len());
    push_at_least(row.isa, &row.logits[start..end], start as u32, threshold, keys);
}

/// The first place, best first, at which the sum of weights is enough, or where rounding keeps it from that the last with any weight. Moves keys until
/// the one that belongs there is there, and none that is worse is before it.
fn first_where(keys: &mut [u64], isa: Isa, weight: Weight, is_enough: impl Fn(f64) -> bool) -> usize {
    let (mut first, mut sum, mut keys) = (0, 0.0, keys);
    while keys.len() > SORTED {
        let half = keys.len() / 2;
        let (better, best_of_rest, _) = keys.select_nth_unstable(half);
        let with_better = sum + sum_of(isa, better, weight);
        if is_enough(with_better) || weight.of(*best_of_rest) == 0.0 {
            keys = &mut keys[..half];
        } else {
            (first, sum, keys) = (first + half, with_better, &mut keys[half..]);
        }
    }
    keys.sort_unstable();
    let mut last = 0;
    for (i, weight) in keys.iter().map(|&key| weight.of(key)).enumerate() {
        if weight > 0.0 {
            last = i;
            sum += weight;
            if is_enough(sum) {
                break;
            }
        }
    }
    first + last
}

/// `exp(x)` for `x <= 0`, to about 2 units in the last place: plain multiplications and additions that the compiler vectorises and that
/// give the same bits on every processor, with a fused multiply-add or without. Below -87 it is 0.
#[inline(always)]
pub(super) fn exponential(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding it rounds to a whole number, which then sits in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    // Minimax polynomial for exp on ±ln(2)/2 (Cephes, expf).
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let fraction = p * r * r + r + 1.0;
    let power =
        f32::from_bits(((rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127) << 23) as u32);
    if x > -87.0 { fraction * power } else { 0.0 }
}
