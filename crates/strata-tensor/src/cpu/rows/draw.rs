//! Draws tokens from a row of logits, and reads log-probabilities off it.
//!
//! A draw is a function of the logits, the settings and its uniform number alone: it does not depend on who else is in the batch or which thread it runs
//! on. The order of filters is temperature, top-k, top-p; top-p counts probability among what top-k left.
//!
//! Without filters a row costs one pass: exponentials are summed in blocks, a block is picked by its sum and a token within it.
//! That is 4 bytes and about 15 operations per token of the vocabulary; for 152k tokens, 0.1 to 0.2 ms.

use crate::backend::{Draw, RowReply, RowRequest};

/// Tokens whose exponentials are summed together.
const BLOCK: usize = 256;
/// How many of the most probable tokens top-p looks at first.
const TOP_P_FIRST: usize = 256;

/// The model's prediction after one token.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    /// `[vocab_size]`.
    pub(crate) logits: &'a [f32],
    /// Logarithm of the sum of the exponentials of the logits.
    pub(crate) log_normalizer: f32,
}

impl Row<'_> {
    fn logprob(&self, token: u32) -> f32 {
        self.logits[token as usize] - self.log_normalizer
    }
}

/// What is asked of a row. `None` if the logits are not numbers.
pub(crate) fn reply(row: Row<'_>, request: &RowRequest) -> Option<RowReply> {
    if !row.log_normalizer.is_finite() {
        return None;
    }
    let with_logprob = |id: u32| (id, row.logprob(id));
    Some(RowReply {
        logprobs: request.ids.iter().map(|&id| row.logprob(id)).collect(),
        top: best(row.logits, request.top).into_iter().map(with_logprob).collect(),
        drawn: request.draw.iter().flat_map(|d| draw(row.logits, d)).map(with_logprob).collect(),
    })
}

/// One token for each of the uniform numbers.
fn draw(logits: &[f32], draw: &Draw) -> Vec<u32> {
    let Draw { temperature, top_k, top_p, uniforms } = draw;
    if *temperature == 0.0 || *top_k == Some(1) {
        return vec![argmax(logits); uniforms.len()];
    }
    let vocab = logits.len();
    let k = top_k.unwrap_or(vocab).min(vocab);
    if k == vocab && *top_p >= 1.0 {
        let distribution = Distribution::new(logits, *temperature);
        return uniforms.iter().map(|&u| distribution.pick(u) as u32).collect();
    }
    let candidates = filter(logits, *temperature, k, *top_p);
    uniforms.iter().map(|&u| pick_candidate(&candidates, u)).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let max = maximum(logits);
    logits.iter().position(|&l| l == max).unwrap_or(0) as u32
}

fn maximum(logits: &[f32]) -> f32 {
    logits.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m })
}

/// Ids of the `k` largest logits, largest first; of equals the lower id first.
fn best(logits: &[f32], k: usize) -> Vec<u32> {
    let k = k.min(logits.len());
    if k == 0 {
        return Vec::new();
    }
    let order = |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if k < ids.len() {
        ids.select_nth_unstable_by(k - 1, order);
        ids.truncate(k);
    }
    ids.sort_unstable_by(order);
    ids
}

/// Unnormalised probabilities of all tokens, with their sums by block.
struct Distribution<'a> {
    logits: &'a [f32],
    max: f32,
    inverse_temperature: f32,
    block_sums: Vec<f64>,
    total: f64,
}

impl<'a> Distribution<'a> {
    fn new(logits: &'a [f32], temperature: f32) -> Self {
        let (max, inverse_temperature) = (maximum(logits), temperature.recip().min(f32::MAX));
        let mut weights = [0.0; BLOCK];
        let block_sums: Vec<f64> = logits
            .chunks(BLOCK)
            .map(|block| {
                exponentials(block, max, inverse_temperature, &mut weights);
                weights[..block.len()].iter().map(|&w| w as f64).sum()
            })
            .collect();
        let total = block_sums.iter().sum();
        Distribution { logits, max, inverse_temperature, block_sums, total }
    }

    /// The first token at which the cumulative probability exceeds `u`.
    fn pick(&self, u: f64) -> usize {
        let target = u * self.total;
        let (mut before, mut chosen) = (0.0, 0);
        for (i, &sum) in self.block_sums.iter().enumerate() {
            if sum > 0.0 {
                chosen = i;
                if before + sum > target {
                    break;
                }
            }
            before += sum;
        }
        let start = chosen * BLOCK;
        let block = &self.logits[start..(start + BLOCK).min(self.logits.len())];
        let mut weights = [0.0; BLOCK];
        exponentials(block, self.max, self.inverse_temperature, &mut weights);
        // Where rounding leaves the cumulative sum short of its end, the last token that has any probability is meant. The
        // same rule above picks the last block that has any.
        let before: f64 = self.block_sums[..chosen].iter().sum();
        let weights = weights[..block.len()].iter().map(|&w| w as f64);
        start + pick_weighted(weights, target - before)
    }
}

/// The first place at which the cumulative weight exceeds `target`, or the last with any weight.
fn pick_weighted(weights: impl Iterator<Item = f64>, target: f64) -> usize {
    let (mut sum, mut last) = (0.0, 0);
    for (i, weight) in weights.enumerate() {
        if weight > 0.0 {
            last = i;
            sum += weight;
            if sum > target {
                return i;
            }
        }
    }
    last
}

/// Tokens that pass the filters, best first, with their unnormalised probabilities.
fn filter(logits: &[f32], temperature: f32, k: usize, top_p: f32) -> Vec<(u32, f64)> {
    let (max, inverse_temperature) = (maximum(logits), temperature.recip().min(f32::MAX));
    let weigh = |id: u32| (id, exponential((logits[id as usize] - max) * inverse_temperature) as f64);
    let whole = k == logits.len();
    let total = if whole { Distribution::new(logits, temperature).total } else { 0.0 };
    // Only as many candidates are sorted as it takes to reach top-p.
    let mut count = if whole { TOP_P_FIRST.min(k) } else { k };
    loop {
        let mut candidates: Vec<(u32, f64)> = best(logits, count).into_iter().map(weigh).collect();
        let total = if whole { total } else { candidates.iter().map(|c| c.1).sum() };
        let mut sum = 0.0;
        let needed = candidates.iter().position(|c| {
            sum += c.1;
            sum >= top_p as f64 * total
        });
        match needed {
            Some(last) => candidates.truncate(last + 1),
            None if count < k => {
                count = (count * 4).min(k);
                continue;
            }
            None => {}
        }
        return candidates;
    }
}

fn pick_candidate(candidates: &[(u32, f64)], u: f64) -> u32 {
    let total: f64 = candidates.iter().map(|c| c.1).sum();
    candidates[pick_weighted(candidates.iter().map(|c| c.1), u * total)].0
}

fn exponentials(logits: &[f32], max: f32, inverse_temperature: f32, out: &mut [f32; BLOCK]) {
    for (out, &logit) in out.iter_mut().zip(logits) {
        *out = exponential((logit - max) * inverse_temperature);
    }
}

/// `exp(x)` for `x <= 0`, to about 2 units in the last place: plain multiplications and additions that the compiler vectorises and that
/// give the same bits on every processor. Below -87 it is 0.
#[inline(always)]
fn exponential(x: f32) -> f32 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::philox;

    /// The token and log-probability of one draw with the uniform number of this position.
    fn draw_one(logits: &[f32], settings: &Draw, position: u64) -> (u32, f32) {
        let [a, b, ..] = philox(7, [position, 3]);
        let uniform = (((a as u64) << 32 | b as u64) >> 11) as f64 / (1u64 << 53) as f64;
        let draw = Draw { uniforms: vec![uniform], ..settings.clone() };
        reply(row(logits), &RowRequest { draw: Some(draw), ..RowRequest::default() }).unwrap().drawn[0]
    }

    fn row(logits: &[f32]) -> Row<'_> {
        let max = maximum(logits);
        let log_normalizer = max + logits.iter().map(|l| (l - max).exp()).sum::<f32>().ln();
        Row { logits, log_normalizer }
    }

    fn settings(temperature: f32, top_k: Option<usize>, top_p: f32) -> Draw {
        Draw { temperature, top_k, top_p, uniforms: Vec::new() }
    }

    /// How often each token is drawn, as a share.
    fn shares(logits: &[f32], settings: &Draw, draws: u64) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for position in 0..draws {
            counts[draw_one(logits, settings, position).0 as usize] += 1.0 / draws as f64;
        }
        counts
    }

    #[test]
    fn the_exponential_is_accurate() {
        for i in 0..200_000 {
            let x = -(i as f32) * 4.3e-4;
            let exact = (x as f64).exp();
            assert!(((exponential(x) as f64 - exact) / exact).abs() < 3e-7, "{x}");
        }
        assert_eq!(exponential(f32::NEG_INFINITY), 0.0);
        assert_eq!(exponential(0.0), 1.0);
    }

    #[test]
    fn draws_follow_the_distribution_at_any_temperature() {
        let logits: Vec<f32> = (0..700).map(|i| if i % 100 == 3 { (i as f32) / 200.0 } else { -30.0 }).collect();
        for temperature in [0.5f32, 1.0, 2.0] {
            let shares = shares(&logits, &settings(temperature, None, 1.0), 20_000);
            let weights: Vec<f64> = logits.iter().map(|&l| ((l / temperature) as f64).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (share, weight) in shares.iter().zip(&weights) {
                assert!((share - weight / total).abs() < 0.015, "{temperature}: {share} and {}", weight / total);
            }
        }
    }

    #[test]
    fn top_k_and_top_p_keep_the_most_probable() {
        // Probabilities 0.1, 0.2, 0.3, 0.4.
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let close = |actual: Vec<f64>, expected: [f64; 4]| {
            assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() < 0.015 && (e > 0.0 || *a == 0.0)), "{actual:?}");
        };
        close(shares(&logits, &settings(1.0, Some(2), 1.0), 20_000), [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        close(shares(&logits, &settings(1.0, None, 0.65), 20_000), [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        close(shares(&logits, &settings(1.0, None, 0.8), 20_000), [0.0, 2.0 / 9.0, 3.0 / 9.0, 4.0 / 9.0]);
        // Of the two that top-k leaves, the first alone has 4/7.
        close(shares(&logits, &settings(1.0, Some(2), 0.5), 1000), [0.0, 0.0, 0.0, 1.0]);
        close(shares(&logits, &settings(1.0, Some(100), 1.0), 20_000), [0.1, 0.2, 0.3, 0.4]);
    }

    #[test]
    fn top_p_looks_further_when_the_first_candidates_do_not_suffice() {
        let flat = vec![0.0f32; 2000];
        assert_eq!(filter(&flat, 1.0, 2000, 0.9).len(), 1800);
        assert_eq!(filter(&flat, 1.0, 2000, 0.0).len(), 1);
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let drawn = draw_one(&[1.0, 5.0, 5.0], &settings(0.0, None, 1.0), 0);
        assert_eq!(drawn, (1, row(&[1.0, 5.0, 5.0]).logprob(1)), "log-probabilities are at temperature 1");
        assert_eq!(best(&[5.0, 1.0, 5.0], 2), [0, 2]);
    }

    #[test]
    fn a_tiny_temperature_is_nearly_greedy() {
        for temperature in [1e-6, 1e-45] {
            assert_eq!(draw_one(&[1.0, 5.0, 4.9], &settings(temperature, None, 1.0), 0).0, 1);
        }
    }

    #[test]
    fn the_draws_of_a_row_do_not_depend_on_each_other() {
        let logits = vec![0.0f32; 1000];
        let together = draw(&logits, &Draw { uniforms: vec![0.1, 0.7, 0.3], ..settings(1.0, None, 1.0) });
        assert_eq!(together, [100, 700, 300]);
        assert_eq!(draw(&logits, &Draw { uniforms: vec![0.3], ..settings(1.0, None, 1.0) }), [300]);
    }

    #[test]
    fn logits_that_are_not_numbers_are_noticed() {
        let nan = Row { logits: &[0.0, f32::NAN], log_normalizer: f32::NAN };
        assert_eq!(reply(nan, &RowRequest::default()), None);
    }
}
