//! The choice of experts by a row of a router's logits, what the choice weighs, and the way back; see `Routing`.
//!
//! Some hundreds of logits a token: nothing beside the product that made them.

use super::exp::exp_f32;
use super::lanes::{LANES, tree};
use crate::cpu::isa::{Fma, multiversion};

/// [`RouterScores`](crate::RouterScores) of a processor.
#[derive(Clone, Copy)]
pub(crate) enum Scores<'a> {
    Softmax,
    SoftmaxOfChosen,
    Sigmoid { correction: Option<&'a [f32]>, num_groups: usize, top_groups: usize, normalize: bool, scale: f32 },
}

/// Added to the sum that weights are divided by.
const SUM_EPS: f32 = 1e-20;

multiversion! {
    /// For each row of `logits: [rows, experts]` the experts that are chosen, best first, and their weights, both `[rows, top_k]`.
    pub(crate) fn route(scores: Scores<'_>, logits: &[f32], experts: usize, top_k: usize, chosen: &mut [u32], weights: &mut [f32]) = route_body;
}

multiversion! {
    /// The gradient of `logits`, all of `dlogits`, by that of the weights.
    pub(crate) fn route_backward(
        scores: Scores<'_>,
        dweights: &[f32],
        logits: &[f32],
        experts: usize,
        top_k: usize,
        chosen: &[u32],
        dlogits: &mut [f32],
    ) = route_backward_body;
}

#[inline(always)]
fn route_body(
    fma: impl Fma,
    scores: Scores<'_>,
    logits: &[f32],
    experts: usize,
    top_k: usize,
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let (mut values, mut keys, mut out) = (vec![0.0; experts], vec![0.0; experts], vec![false; experts]);
    let rows = logits.chunks_exact(experts).zip(chosen.chunks_exact_mut(top_k)).zip(weights.chunks_exact_mut(top_k));
    for ((logits, chosen), weights) in rows {
        out.fill(false);
        match scores {
            Scores::Softmax => {
                choose(logits, &mut out, chosen);
                softmax(fma, logits, &mut values);
                weights.iter_mut().zip(&*chosen).for_each(|(w, &e)| *w = values[e as usize]);
            }
            Scores::SoftmaxOfChosen => {
                choose(logits, &mut out, chosen);
                softmax_of_chosen(fma, logits, chosen, weights);
            }
            Scores::Sigmoid { correction, num_groups, top_groups, normalize, scale } => {
                values.iter_mut().zip(logits).for_each(|(s, &l)| *s = sigmoid(fma, l));
                keys.copy_from_slice(&values);
                if let Some(correction) = correction {
                    keys.iter_mut().zip(correction).for_each(|(key, c)| *key += c);
                }
                leave_out_groups(&keys, num_groups, top_groups, &mut out);
                choose(&keys, &mut out, chosen);
                let factor = if normalize { scale / sum_of_chosen(&values, chosen) } else { scale };
                weights.iter_mut().zip(&*chosen).for_each(|(w, &e)| *w = values[e as usize] * factor);
            }
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn route_backward_body(
    fma: impl Fma,
    scores: Scores<'_>,
    dweights: &[f32],
    logits: &[f32],
    experts: usize,
    top_k: usize,
    chosen: &[u32],
    dlogits: &mut [f32],
) {
    let mut weights = vec![0.0; top_k];
    let rows = dweights.chunks_exact(top_k).zip(chosen.chunks_exact(top_k));
    let logits = logits.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts));
    for ((dweights, chosen), (logits, dlogits)) in rows.zip(logits) {
        match scores {
            Scores::Softmax => {
                softmax(fma, logits, dlogits);
                weights.iter_mut().zip(chosen).for_each(|(p, &e)| *p = dlogits[e as usize]);
                let mean = mean_of(fma, dweights, &weights);
                // p · (g − Σ g p), with g of those that were not chosen zero.
                dlogits.iter_mut().for_each(|d| *d *= -mean);
                for ((&p, &g), &e) in weights.iter().zip(dweights).zip(chosen) {
                    dlogits[e as usize] = fma.fma(p, g, dlogits[e as usize]);
                }
            }
            Scores::SoftmaxOfChosen => {
                softmax_of_chosen(fma, logits, chosen, &mut weights);
                let mean = mean_of(fma, dweights, &weights);
                dlogits.fill(0.0);
                for ((&w, &g), &e) in weights.iter().zip(dweights).zip(chosen) {
                    dlogits[e as usize] = w * (g - mean);
                }
            }
            Scores::Sigmoid { normalize, scale, .. } => {
                weights.iter_mut().zip(chosen).for_each(|(s, &e)| *s = sigmoid(fma, logits[e as usize]));
                dlogits.fill(0.0);
                let (mut factor, mut mean) = (scale, 0.0);
                if normalize {
                    let sum = weights.iter().sum::<f32>() + SUM_EPS;
                    factor = scale / sum;
                    mean = mean_of(fma, dweights, &weights) / sum;
                }
                for ((&s, &g), &e) in weights.iter().zip(dweights).zip(chosen) {
                    dlogits[e as usize] = factor * (g - mean) * (s * (1.0 - s));
                }
            }
        }
    }
}

#[inline(always)]
fn sigmoid(fma: impl Fma, x: f32) -> f32 {
    1.0 / (1.0 + exp_f32(fma, -x))
}

/// The softmax of a row, its sum in lanes.
#[inline(always)]
fn softmax(fma: impl Fma, logits: &[f32], out: &mut [f32]) {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m });
    out.iter_mut().zip(logits).for_each(|(p, &l)| *p = exp_f32(fma, l - largest));
    let mut lanes = [0.0; LANES];
    for chunk in out.chunks(LANES) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, p)| *lane += p);
    }
    let sum = tree(lanes);
    out.iter_mut().for_each(|p| *p /= sum);
}

/// The softmax over the logits of the chosen, best first; its sum in that order.
#[inline(always)]
fn softmax_of_chosen(fma: impl Fma, logits: &[f32], chosen: &[u32], weights: &mut [f32]) {
    let largest = logits[chosen[0] as usize];
    weights.iter_mut().zip(chosen).for_each(|(w, &e)| *w = exp_f32(fma, logits[e as usize] - largest));
    let sum = weights.iter().sum::<f32>();
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// `Σ g · w`, in order.
#[inline(always)]
fn mean_of(fma: impl Fma, gradients: &[f32], weights: &[f32]) -> f32 {
    gradients.iter().zip(weights).fold(0.0, |sum, (&g, &w)| fma.fma(g, w, sum))
}

#[inline(always)]
fn sum_of_chosen(values: &[f32], chosen: &[u32]) -> f32 {
    chosen.iter().map(|&e| values[e as usize]).sum::<f32>() + SUM_EPS
}

/// The largest keys of those that are not left out, best first, of equals the first. Whatever the keys are, it chooses different ones.
fn choose(keys: &[f32], left_out: &mut [bool], chosen: &mut [u32]) {
    for chosen in chosen {
        let mut best: Option<usize> = None;
        for (i, key) in keys.iter().enumerate().filter(|(i, _)| !left_out[*i]) {
            if best.is_none_or(|best| *key > keys[best]) {
                best = Some(i);
            }
        }
        let best = best.expect("there are enough experts to choose from");
        left_out[best] = true;
        *chosen = best as u32;
    }
}

/// Leaves out all but the `top_groups` groups in which the sum of the two largest keys is largest.
fn leave_out_groups(keys: &[f32], num_groups: usize, top_groups: usize, left_out: &mut [bool]) {
    if top_groups == num_groups {
        return;
    }
    let size = keys.len() / num_groups;
    let two_largest = |group: &[f32]| {
        let mut largest = [f32::NEG_INFINITY; 2];
        for &key in group {
            if key > largest[0] {
                largest = [key, largest[0]];
            } else if key > largest[1] {
                largest[1] = key;
            }
        }
        largest[0] + largest[1]
    };
    let sums: Vec<f32> = keys.chunks_exact(size).map(two_largest).collect();
    let (mut top, mut taken) = (vec![0; top_groups], vec![false; num_groups]);
    choose(&sums, &mut taken, &mut top);
    for (group, left_out) in left_out.chunks_exact_mut(size).enumerate() {
        left_out.fill(!taken[group]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{assert_close, numeric_gradient, on_every_isa, random};

    const EXPERTS: usize = 24;

    /// Every rule, with the number of experts that it chooses.
    fn rules(correction: &[f32]) -> Vec<(Scores<'_>, usize)> {
        let sigmoid = |correction, num_groups, top_groups, normalize| {
            (Scores::Sigmoid { correction, num_groups, top_groups, normalize, scale: 2.5 }, 5)
        };
        vec![
            (Scores::Softmax, 4),
            (Scores::Softmax, 1),
            (Scores::SoftmaxOfChosen, 4),
            (Scores::SoftmaxOfChosen, EXPERTS),
            sigmoid(None, 1, 1, true),
            sigmoid(Some(correction), 1, 1, false),
            sigmoid(Some(correction), 4, 2, true),
            sigmoid(Some(correction), 8, 3, false),
        ]
    }

    /// Sorts by key, of equals the first first, and takes the first `n`.
    fn top(keys: &[f64], n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
        order.truncate(n);
        order
    }

    fn chosen_by(scores: Scores<'_>, logits: &[f64], top_k: usize) -> Vec<usize> {
        let Scores::Sigmoid { correction, num_groups, top_groups, .. } = scores else { return top(logits, top_k) };
        let key = |(e, l): (usize, &f64)| 1.0 / (1.0 + (-l).exp()) + correction.map_or(0.0, |c| c[e] as f64);
        let keys: Vec<f64> = logits.iter().enumerate().map(key).collect();
        let size = EXPERTS / num_groups;
        let sums: Vec<f64> = keys.chunks(size).map(|g| top(g, 2).iter().map(|&e| g[e]).sum()).collect();
        let groups = top(&sums, top_groups);
        let masked = |(e, &key): (usize, &f64)| if groups.contains(&(e / size)) { key } else { f64::NEG_INFINITY };
        top(&keys.iter().enumerate().map(masked).collect::<Vec<_>>(), top_k)
    }

    /// As the code of each model has it, where normalised softmaxes are divided by their sum.
    fn weights_of(scores: Scores<'_>, logits: &[f64], chosen: &[usize]) -> Vec<f64> {
        let value = |l: f64| match scores {
            Scores::Sigmoid { .. } => 1.0 / (1.0 + (-l).exp()),
            _ => l.exp() / logits.iter().map(|l| l.exp()).sum::<f64>(),
        };
        let values: Vec<f64> = chosen.iter().map(|&e| value(logits[e])).collect();
        let sum = values.iter().sum::<f64>();
        let factor = match scores {
            Scores::Softmax => 1.0,
            Scores::SoftmaxOfChosen => 1.0 / sum,
            Scores::Sigmoid { normalize, scale, .. } => scale as f64 / if normalize { sum + 1e-20 } else { 1.0 },
        };
        values.iter().map(|v| v * factor).collect()
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|&v| v as f64).collect()
    }

    #[test]
    fn every_rule_chooses_and_weighs_as_the_model_it_is_of() {
        let (logits, correction) = (random(9 * EXPERTS, 1), random(EXPERTS, 2));
        for (i, (scores, top_k)) in rules(&correction).into_iter().enumerate() {
            on_every_isa(|isa| {
                let (mut chosen, mut weights) = (vec![0; 9 * top_k], vec![0.0; 9 * top_k]);
                route(isa, scores, &logits, EXPERTS, top_k, &mut chosen, &mut weights);
                for (row, logits) in logits.chunks(EXPERTS).enumerate() {
                    let expected = chosen_by(scores, &wide(logits), top_k);
                    let own = &chosen[row * top_k..][..top_k];
                    assert!(own.iter().map(|&e| e as usize).eq(expected.iter().copied()), "{isa}, rule {i}, row {row}");
                    let expected = weights_of(scores, &wide(logits), &expected);
                    assert_close(&weights[row * top_k..][..top_k], &expected, 1e-6, &format!("{isa}, rule {i}, row {row}"));
                }
                weights
            });
        }
    }

    #[test]
    fn the_backward_of_every_rule_is_its_gradient() {
        let (logits, correction) = (random(3 * EXPERTS, 1), random(EXPERTS, 2));
        for (i, (scores, top_k)) in rules(&correction).into_iter().enumerate() {
            let dweights = random(3 * top_k, 3);
            on_every_isa(|isa| {
                let (mut chosen, mut weights) = (vec![0; 3 * top_k], vec![0.0; 3 * top_k]);
                route(isa, scores, &logits, EXPERTS, top_k, &mut chosen, &mut weights);
                let mut dlogits = vec![f32::NAN; 3 * EXPERTS];
                route_backward(isa, scores, &dweights, &logits, EXPERTS, top_k, &chosen, &mut dlogits);
                let loss = |x: &[f64]| {
                    let of_row = |(row, x): (usize, &[f64])| {
                        let chosen: Vec<usize> = chosen[row * top_k..][..top_k].iter().map(|&e| e as usize).collect();
                        let weights = weights_of(scores, x, &chosen);
                        weights.iter().zip(&dweights[row * top_k..]).map(|(w, &g)| w * g as f64).sum::<f64>()
                    };
                    x.chunks(EXPERTS).enumerate().map(of_row).sum()
                };
                assert_close(&dlogits, &numeric_gradient(loss, &logits), 1e-5, &format!("{isa}, rule {i}"));
                dlogits
            });
        }
    }

    #[test]
    fn of_equals_the_first_is_chosen_and_of_what_is_no_number_something() {
        let choices = |scores, logits: &[f32], top_k| {
            let (mut chosen, mut weights) = (vec![9; top_k], vec![0.0; top_k]);
            route(Isa::detect(), scores, logits, logits.len(), top_k, &mut chosen, &mut weights);
            chosen
        };
        assert_eq!(choices(Scores::Softmax, &[1.0, 3.0, 1.0, 3.0, 1.0], 4), [1, 3, 0, 2]);
        let groups = |top_groups| Scores::Sigmoid { correction: None, num_groups: 3, top_groups, normalize: true, scale: 1.0 };
        // The third group has the largest score, but no second.
        assert_eq!(choices(groups(1), &[1.0, 1.0, 1.0, 1.0, 5.0, -9.0], 2), [0, 1]);
        assert_eq!(choices(groups(2), &[1.0, 1.0, 1.0, 1.0, 5.0, -9.0], 3), [0, 1, 2]);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for scores in [Scores::Softmax, Scores::SoftmaxOfChosen, groups(2), groups(3)] {
                let mut chosen = choices(scores, &[value; 6], 4);
                chosen.sort_unstable();
                chosen.dedup();
                assert!(chosen.len() == 4 && chosen.iter().all(|&e| e < 6), "{value}: {chosen:?}");
            }
        }
    }
}
