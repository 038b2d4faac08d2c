use super::candidates::exponential;
use super::*;
use crate::cpu::isa::Isa;
use crate::cpu::rows::softmax::log_sum_exp;
use crate::random::{normal, philox};

/// What a backend does with a row.
fn reply_on(isa: Isa, logits: &[f32], request: &RowRequest) -> Option<RowReply> {
    let mut maxima = vec![9.0; logits.len().div_ceil(BLOCK)];
    let spans = logits.len().div_ceil(SPAN);
    let (mut sums, mut tempered) = (vec![9.0; spans], vec![9.0; spans]);
    block_maxima(isa, logits, &mut maxima);
    let factor = inverse_temperature(request, logits.len());
    span_sums(isa, logits, maximum(&maxima), factor, &mut sums, &mut tempered);
    reply(Row::new(isa, logits, &maxima, factor, &sums, &tempered), request)
}

fn draws(isa: Isa, logits: &[f32], settings: &Draw, uniforms: &[f64]) -> Vec<(u32, f32)> {
    let draw = Draw { uniforms: uniforms.to_vec(), ..settings.clone() };
    reply_on(isa, logits, &RowRequest { draw: Some(draw), ..RowRequest::default() }).unwrap().drawn
}

fn settings(temperature: f32, top_k: Option<usize>, top_p: f32) -> Draw {
    Draw { temperature, top_k, top_p, uniforms: Vec::new() }
}

fn uniforms(count: u64) -> Vec<f64> {
    (0..count)
        .map(|position| {
            let [a, b, ..] = philox(7, [position, 3]);
            (((a as u64) << 32 | b as u64) >> 11) as f64 / (1u64 << 53) as f64
        })
        .collect()
}

/// Ids of the `k` largest logits by a sort of all, largest first; of equals the lower id first.
fn best_by_sort(logits: &[f32], k: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    ids.truncate(k);
    ids
}

/// What may be drawn, in the order in which uniform numbers run through it, with cumulative weights: everything sorted, weighed and added up in order.
fn reference(logits: &[f32], draw: &Draw) -> Vec<(u32, f64)> {
    let vocab = logits.len();
    let k = draw.top_k.unwrap_or(vocab).min(vocab);
    let is_all = k == vocab && draw.top_p >= 1.0;
    let ids = if is_all { (0..vocab as u32).collect() } else { best_by_sort(logits, k) };
    let maximum = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let factor = draw.temperature.recip().min(f32::MAX);
    let weights: Vec<f64> = ids.iter().map(|&id| exponential((logits[id as usize] - maximum) * factor) as f64).collect();
    let enough = if is_all { f64::INFINITY } else { draw.top_p as f64 * weights.iter().sum::<f64>() };
    let (mut sum, mut out) = (0.0, Vec::new());
    for (id, weight) in ids.into_iter().zip(weights) {
        if weight == 0.0 && sum > 0.0 {
            continue;
        }
        sum += weight;
        out.push((id, sum));
        if sum >= enough {
            break;
        }
    }
    out
}

/// Whether a uniform number means this token, or comes as near to its borders as other orders of addition can move them.
fn is_meant(reference: &[(u32, f64)], uniform: f64, token: u32) -> bool {
    let total = reference.last().unwrap().1;
    let at = reference.iter().position(|&(id, _)| id == token);
    at.is_some_and(|at| {
        let before = if at == 0 { 0.0 } else { reference[at - 1].1 };
        (before / total - 3e-7..=reference[at].1 / total + 3e-7).contains(&uniform)
    })
}

/// Rows of every kind: of a few that stand out, even, all alike, with ties, with tokens that are ruled out, with zeros of both signs, large.
fn rows() -> Vec<(&'static str, Vec<f32>)> {
    let random = |n: usize, scale: f32| -> Vec<f32> { (0..n as u64).map(|i| normal([n as u64, 1], i) * scale).collect() };
    let mut rows = Vec::new();
    for n in [1, 15, 257, 1000, SPAN + 1, 9973] {
        rows.push(("peaked", random(n, 6.0)));
        rows.push(("even", random(n, 0.1)));
        rows.push(("alike", vec![-3.5; n]));
        rows.push(("ties", random(n, 2.0).iter().map(|v| v.round()).collect()));
        let ruled_out = |(i, v): (usize, f32)| if i % 3 == 1 { f32::NEG_INFINITY } else { v };
        rows.push(("ruled out", random(n, 3.0).into_iter().enumerate().map(ruled_out).collect()));
        rows.push(("zeros", (0..n).map(|i| [0.0, -0.0][(i / 7) % 2]).collect()));
        rows.push(("large", random(n, 1e6)));
        rows.push(("rising", (0..n).map(|i| i as f32 * 0.01).collect()));
    }
    rows
}

#[test]
fn draws_are_those_of_plain_code_whatever_the_row_and_the_settings() {
    let all = uniforms(16);
    for (name, logits) in rows() {
        let n = logits.len();
        let mut of = Vec::new();
        for temperature in [1.0, 0.7, 1e-45, 1e30] {
            for top_k in [None, Some(2), Some(50), Some(700), Some(usize::MAX)] {
                of.extend([1.0, 0.95, 1e-9].map(|top_p| settings(temperature, top_k, top_p)));
            }
        }
        for settings in of {
            let reference = reference(&logits, &settings);
            for isa in [Isa::Portable, Isa::detect()] {
                let drawn = draws(isa, &logits, &settings, &all);
                let normalizer = log_sum_exp(isa, &logits);
                for (&uniform, &(token, logprob)) in all.iter().zip(&drawn) {
                    let is_right = is_meant(&reference, uniform, token) && logprob == logits[token as usize] - normalizer;
                    assert!(is_right, "{isa}: {token} of {n} {name} logits at {uniform} with {settings:?}");
                }
                let alone: Vec<_> = all[..4].iter().flat_map(|&u| draws(isa, &logits, &settings, &[u])).collect();
                assert_eq!(alone, drawn[..4], "{isa}: draws of a row of {n} {name} logits depend on each other");
            }
        }
    }
}

#[test]
fn among_the_best_few_the_token_is_that_of_plain_code_without_any_margin() {
    let logits: Vec<f32> = (0..9973).map(|i| normal([5, 1], i) * 3.0).collect();
    let all = uniforms(3000);
    for settings in [settings(0.7, Some(50), 1.0), settings(1.0, Some(50), 0.9), settings(1.3, Some(256), 0.8)] {
        let reference = reference(&logits, &settings);
        let total = reference.last().unwrap().1;
        let expected: Vec<u32> = all.iter().map(|u| reference.iter().find(|r| r.1 > u * total).unwrap().0).collect();
        let drawn: Vec<u32> = draws(Isa::detect(), &logits, &settings, &all).into_iter().map(|d| d.0).collect();
        assert_eq!(drawn, expected);
    }
}

#[test]
fn the_most_probable_are_those_of_a_sort_with_the_log_probabilities_of_training() {
    for (name, logits) in rows() {
        for isa in Isa::available() {
            let normalizer = log_sum_exp(isa, &logits);
            for top in [0, 1, 2, 20, 128, logits.len(), logits.len() + 3] {
                let request =
                    RowRequest { ids: vec![0], top, draw: Some(Draw { uniforms: vec![0.5], ..settings(0.0, None, 1.0) }) };
                let reply = reply_on(isa, &logits, &request).unwrap();
                let with_logprob = |id: u32| (id, logits[id as usize] - normalizer);
                let expected: Vec<_> = best_by_sort(&logits, top).into_iter().map(with_logprob).collect();
                assert_eq!(reply.top, expected, "{isa}: {top} of {} {name} logits", logits.len());
                assert_eq!(reply.logprobs, [logits[0] - normalizer]);
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let first = logits.iter().position(|&l| l == largest).unwrap() as u32;
                assert_eq!(reply.drawn, [with_logprob(first)], "{isa}: of equals the lowest id");
            }
        }
    }
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

/// How often each token is drawn, as a share.
fn shares(logits: &[f32], settings: &Draw, count: u64) -> Vec<f64> {
    let mut counts = vec![0.0; logits.len()];
    for (token, _) in draws(Isa::detect(), logits, settings, &uniforms(count)) {
        counts[token as usize] += 1.0 / count as f64;
    }
    counts
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
fn a_uniform_number_is_a_place_among_all_tokens() {
    let drawn = |uniforms: &[f64]| -> Vec<u32> {
        draws(Isa::detect(), &[0.0; 1000], &settings(1.0, None, 1.0), uniforms).into_iter().map(|d| d.0).collect()
    };
    assert_eq!(drawn(&[0.1, 0.7, 0.3]), [100, 700, 300]);
    assert_eq!(drawn(&[0.0, 1.0 - f64::EPSILON]), [0, 999]);
}

#[test]
fn logits_that_are_not_numbers_are_noticed_wherever_they_are() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for isa in Isa::available() {
        for n in [1, 300, SPAN + 300] {
            for bad in [nan, inf] {
                for at in [0, n / 2, n - 1] {
                    let mut logits = vec![1.0; n];
                    logits[at] = bad;
                    assert_eq!(reply_on(isa, &logits, &RowRequest::default()), None, "{isa}: {bad} at {at} of {n}");
                }
            }
            assert_eq!(reply_on(isa, &vec![-inf; n], &RowRequest::default()), None);
        }
    }
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
