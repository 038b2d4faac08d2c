//! Softmax in its three places: over the vocabulary, over a block of keys in attention, and backward.
//!
//! Attention keeps a running maximum and sum over blocks of keys (Dao et al., 2022, arXiv:2205.14135).

use std::ops::Range;

use super::exp::exp_f32;
use super::lanes::{LANES, filled, tree};
use crate::Element;
use crate::cpu::isa::{Fma, Isa, multiversion};

/// Partial sums over a row of logits, and keys in a block of attention: four registers of sixteen lanes, which hide the
/// latency of the exponential.
const WIDE: usize = 4 * LANES;

/// How many keys attention scores at a time.
pub(crate) const BLOCK_KEYS: usize = WIDE;

/// Elements of a row that are summed in f32 before their sum goes on in f64, so that a vocabulary of any size keeps 24 bits.
pub(super) const SPAN: usize = 64 * WIDE;

multiversion! {
    /// `ln(sum(exp(row)))`, about the maximum of the row. NaN if the row has a NaN.
    pub(crate) fn log_sum_exp(row: &[f32]) -> f32 = log_sum_exp_body;
}

multiversion! {
    /// `scale * exp(logit - log_normalizer)` into `out`, of the length of `logits`: `scale` times their softmax.
    pub(crate) fn softmax_gradient<T: Element>(logits: &[f32], log_normalizer: f32, scale: f32, out: &mut [T]) = softmax_gradient_body;
}

/// The attention of some queries to some blocks of keys. `scores`, `[blocks, queries, BLOCK_KEYS]`, become `probabilities = exp(score * scale - maximum)`, `[queries, blocks, BLOCK_KEYS]`; query `i` sees the
/// keys `seen[i][0]..seen[i][1]` of all, and those of others have probabilities of zero. `maxima` and `sums` are of each query's scores, scaled, and of its probabilities: negative infinity
/// and 0 where it sees nothing.
pub(crate) fn attention_blocks<T: Element>(
    isa: Isa,
    scores: &[f32],
    seen: &[[u32; 2]],
    scale: f32,
    maxima: &mut [f32],
    sums: &mut [f32],
    probabilities: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() && T::DTYPE == crate::DType::BF16 {
        use super::softmax_avx512::{native, rounding};
        // SAFETY: that is the dtype of `bf16` alone, and the machine has the instructions.
        unsafe {
            let probabilities = std::slice::from_raw_parts_mut(probabilities.as_mut_ptr().cast(), probabilities.len());
            // Also where products are made of something else.
            if Isa::Avx512Bf16.is_available() {
                native::attention_blocks(scores, seen, scale, maxima, sums, probabilities);
            } else {
                rounding::attention_blocks(scores, seen, scale, maxima, sums, probabilities);
            }
        }
        return;
    }
    attention_blocks_anywhere(isa, scores, seen, scale, maxima, sums, probabilities);
}

multiversion! {
    /// [`attention_blocks`] on any machine.
    fn attention_blocks_anywhere<T: Element>(
        scores: &[f32],
        seen: &[[u32; 2]],
        scale: f32,
        maxima: &mut [f32],
        sums: &mut [f32],
        probabilities: &mut [T],
    ) = attention_blocks_body;
}

multiversion! {
    /// Joins what a query has found among further keys, `part` under its own maximum and sum, to what it has found so far in `values`.
    pub(crate) fn attention_join(part: &[f32], part_maximum: f32, part_sum: f32, maximum: &mut f32, sum: &mut f32, values: &mut [f32]) = attention_join_body;
}

multiversion! {
    /// What a query has found, divided by its sum.
    pub(crate) fn attention_output<T: Element>(values: &[f32], sum: f32, out: &mut [T]) = attention_output_body;
}

multiversion! {
    /// One block of one query's attention, backward. Given the gradient of the probabilities and `delta`, the sum over all keys
    /// of probability times its gradient, writes the probabilities `p = exp(score * scale - log_normalizer)` and the gradient of
    /// the scores before scaling, `p * (gradient - delta) * scale`; zeros outside `visible`.
    pub(crate) fn attention_block_backward<T: Element>(
        scores: &[f32; BLOCK_KEYS],
        gradient: &[f32; BLOCK_KEYS],
        visible: Range<usize>,
        scale: f32,
        log_normalizer: f32,
        delta: f32,
        probabilities: &mut [T; BLOCK_KEYS],
        score_gradient: &mut [T; BLOCK_KEYS],
    ) = attention_block_backward_body;
}

/// Lanes `l`, `l + 16`, `l + 32`, `l + 48` one after the other, then the tree.
#[inline(always)]
fn join(wide: &[f32; WIDE]) -> f32 {
    let mut lanes = [0.0; LANES];
    for l in 0..LANES {
        lanes[l] = wide[l] + wide[l + LANES] + wide[l + 2 * LANES] + wide[l + 3 * LANES];
    }
    tree(lanes)
}

/// The larger of two, or `a` if `b` is NaN.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest of a block. A maximum has no rounding, so its order is free.
#[inline(always)]
fn largest(wide: &[f32; WIDE]) -> f32 {
    let mut lanes = [0.0; LANES];
    for l in 0..LANES {
        lanes[l] = larger(larger(wide[l], wide[l + LANES]), larger(wide[l + 2 * LANES], wide[l + 3 * LANES]));
    }
    largest_lane(lanes)
}

#[inline(always)]
fn largest_lane(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = larger(lanes[l], lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// What to subtract before the exponential: the maximum, or 0 where that would make a NaN of an infinity.
#[inline(always)]
pub(super) fn center(maximum: f32) -> f32 {
    if maximum.abs() < f32::INFINITY { maximum } else { 0.0 }
}

#[inline(always)]
fn log_sum_exp_body(fma: impl Fma, row: &[f32]) -> f32 {
    let mut maxima = [f32::NEG_INFINITY; WIDE];
    let (chunks, tail) = row.as_chunks::<WIDE>();
    for chunk in chunks {
        for l in 0..WIDE {
            maxima[l] = larger(maxima[l], chunk[l]);
        }
    }
    let tail = filled::<WIDE>(tail, f32::NEG_INFINITY);
    for l in 0..WIDE {
        maxima[l] = larger(maxima[l], tail[l]);
    }
    let center = center(largest(&maxima));

    // A closure that an iterator's method calls may be compiled apart, without the instructions of this function.
    let mut sum = 0.0;
    for span in row.chunks(SPAN) {
        sum += sum_of_span(span, |logit| exp_f32(fma, logit - center));
    }
    normalizer(center, sum)
}

/// The sum of what the logits of a span weigh; one of negative infinity has to weigh nothing.
#[inline(always)]
pub(super) fn sum_of_span(span: &[f32], weigh: impl Fn(f32) -> f32) -> f64 {
    let mut sums = [0.0; WIDE];
    let (chunks, tail) = span.as_chunks::<WIDE>();
    for chunk in chunks {
        for l in 0..WIDE {
            sums[l] += weigh(chunk[l]);
        }
    }
    if !tail.is_empty() {
        let tail = filled::<WIDE>(tail, f32::NEG_INFINITY);
        for l in 0..WIDE {
            sums[l] += weigh(tail[l]);
        }
    }
    join(&sums) as f64
}

/// [`log_sum_exp`] of a row, given the sum of its exponentials about `center`.
pub(super) fn normalizer(center: f32, sum: f64) -> f32 {
    (center as f64 + sum.ln()) as f32
}

#[inline(always)]
fn softmax_gradient_body<T: Element>(fma: impl Fma, logits: &[f32], log_normalizer: f32, scale: f32, out: &mut [T]) {
    assert_eq!(logits.len(), out.len());
    for (out, &logit) in out.iter_mut().zip(logits) {
        *out = T::from_f32(scale * exp_f32(fma, logit - log_normalizer));
    }
}

#[inline(always)]
fn attention_blocks_body<T: Element>(
    fma: impl Fma,
    scores: &[f32],
    seen: &[[u32; 2]],
    scale: f32,
    maxima: &mut [f32],
    sums: &mut [f32],
    probabilities: &mut [T],
) {
    let (scores, probabilities) = (scores.as_chunks::<BLOCK_KEYS>().0, probabilities.as_chunks_mut::<BLOCK_KEYS>().0);
    let queries = seen.len();
    assert!(maxima.len() == queries && sums.len() == queries && probabilities.len() == scores.len());
    let blocks = scores.len() / queries.max(1);
    for (query, seen) in seen.iter().enumerate() {
        let of_query = |block: usize| {
            let (mut counted, scores) = ([0.0; BLOCK_KEYS], &scores[block * queries + query]);
            for l in 0..BLOCK_KEYS {
                let key = (block * BLOCK_KEYS + l) as u32;
                let is_seen = key.wrapping_sub(seen[0]) < seen[1] - seen[0];
                counted[l] = if is_seen { scores[l] * scale } else { f32::NEG_INFINITY };
            }
            counted
        };
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for block in 0..blocks {
            let wide = of_query(block);
            for l in 0..LANES {
                let of_block = larger(larger(wide[l], wide[l + LANES]), larger(wide[l + 2 * LANES], wide[l + 3 * LANES]));
                lanes[l] = larger(lanes[l], of_block);
            }
        }
        let maximum = largest_lane(lanes);
        let center = center(maximum);
        let mut lanes = [0.0; LANES];
        for block in 0..blocks {
            let mut wide = of_query(block);
            let out = &mut probabilities[query * blocks + block];
            for l in 0..BLOCK_KEYS {
                wide[l] = exp_f32(fma, wide[l] - center);
                out[l] = T::from_f32(wide[l]);
            }
            for l in 0..LANES {
                lanes[l] += wide[l] + wide[l + LANES] + wide[l + 2 * LANES] + wide[l + 3 * LANES];
            }
        }
        (maxima[query], sums[query]) = (maximum, tree(lanes));
    }
}

#[inline(always)]
fn attention_join_body(
    fma: impl Fma,
    part: &[f32],
    part_maximum: f32,
    part_sum: f32,
    maximum: &mut f32,
    sum: &mut f32,
    values: &mut [f32],
) {
    let new_maximum = larger(*maximum, part_maximum);
    let center = center(new_maximum);
    let (factor, part_factor) = (exp_f32(fma, *maximum - center), exp_f32(fma, part_maximum - center));
    *sum = fma.fma(*sum, factor, part_sum * part_factor);
    *maximum = new_maximum;
    for (value, &part) in values.iter_mut().zip(part) {
        *value = fma.fma(*value, factor, part * part_factor);
    }
}

#[inline(always)]
fn attention_output_body<T: Element>(_: impl Fma, values: &[f32], sum: f32, out: &mut [T]) {
    for (out, &value) in out.iter_mut().zip(values) {
        // Which page boundaries a tile spans decides how often a zero is added to a zero: `+ 0.0` forgets its sign.
        *out = T::from_f32(value / sum + 0.0);
    }
}

/// The body of [`attention_block_backward`], for kernels that are compiled for an instruction set themselves.
#[inline(always)]
#[expect(clippy::too_many_arguments)]
pub(crate) fn attention_block_backward_body<T: Element>(
    fma: impl Fma,
    scores: &[f32; BLOCK_KEYS],
    gradient: &[f32; BLOCK_KEYS],
    visible: Range<usize>,
    scale: f32,
    log_normalizer: f32,
    delta: f32,
    probabilities: &mut [T; BLOCK_KEYS],
    score_gradient: &mut [T; BLOCK_KEYS],
) {
    let (first, count) = (visible.start as u32, visible.len() as u32);
    for l in 0..BLOCK_KEYS {
        let is_visible = (l as u32).wrapping_sub(first) < count;
        let p = exp_f32(fma, fma.fma(scores[l], scale, -log_normalizer));
        let p = if is_visible { p } else { 0.0 };
        // The gradient of a masked key may be anything, even NaN: it is not multiplied by its zero but replaced.
        let ds = p * (gradient[l] - delta) * scale;
        probabilities[l] = T::from_f32(p);
        score_gradient[l] = T::from_f32(if is_visible { ds } else { 0.0 });
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, numeric_gradient, on_every_isa, random};

    const SCALE: f32 = 0.125;

    fn log_sum_exp_reference(row: impl Iterator<Item = f64> + Clone) -> f64 {
        let maximum = row.clone().fold(f64::NEG_INFINITY, f64::max);
        maximum + row.map(|v| (v - maximum).exp()).sum::<f64>().ln()
    }

    fn logits(n: usize) -> Vec<f32> {
        random(n, 1).iter().map(|v| v * 5.0 + 3.0).collect()
    }

    #[test]
    fn log_sum_exp_equals_its_definition() {
        for n in LENGTHS.into_iter().chain([SPAN, SPAN + 1, 151_936]) {
            let row = logits(n);
            let expected = log_sum_exp_reference(row.iter().map(|&v| v as f64));
            on_every_isa(|isa| {
                let actual = log_sum_exp(isa, &row);
                assert_close(&[actual], &[expected], 1e-7, &format!("{isa}, length {n}"));
                vec![actual]
            });
        }
    }

    #[test]
    fn log_sum_exp_of_infinities_and_nan() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for isa in Isa::available() {
            assert_eq!(log_sum_exp(isa, &[-inf; 70]), -inf, "{isa}");
            assert_eq!(log_sum_exp(isa, &[-inf, 2.0]), 2.0, "{isa}");
            assert_eq!(log_sum_exp(isa, &[inf, 2.0]), inf, "{isa}");
            assert_eq!(log_sum_exp(isa, &[300.0, -300.0]), 300.0, "{isa}");
            for row in [vec![nan; 3], vec![1.0, nan], [vec![nan], vec![1.0; 99]].concat()] {
                assert!(log_sum_exp(isa, &row).is_nan(), "{isa}");
            }
        }
    }

    #[test]
    fn the_softmax_gradient_is_that_of_log_sum_exp() {
        for n in [1, 7, 16, 60, 128] {
            let row = logits(n);
            let expected = numeric_gradient(|x| -0.7 * log_sum_exp_reference(x.iter().copied()), &row);
            on_every_isa(|isa| {
                let (mut out, mut narrow) = (vec![0.0; n], vec![bf16::ZERO; n]);
                let normalizer = log_sum_exp(isa, &row);
                softmax_gradient(isa, &row, normalizer, -0.7, &mut out);
                assert_close(&out, &expected, 2e-6, &format!("{isa}, length {n}"));
                softmax_gradient(isa, &row, normalizer, -0.7, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    fn block(scores: &[f32], fill: f32) -> [f32; BLOCK_KEYS] {
        filled(scores, fill)
    }

    /// Maxima, sums and probabilities of queries with these scores, `[queries, blocks * BLOCK_KEYS]`.
    fn attended<T: Element>(isa: Isa, scores: &[Vec<f32>], seen: &[[u32; 2]]) -> (Vec<f32>, Vec<f32>, Vec<Vec<T>>) {
        let (queries, keys) = (scores.len(), scores[0].len());
        let by_blocks: Vec<f32> = (0..keys / BLOCK_KEYS)
            .flat_map(|block| scores.iter().flat_map(move |row| row[block * BLOCK_KEYS..][..BLOCK_KEYS].iter().copied()))
            .collect();
        let (mut maxima, mut sums, mut out) = (vec![9.0; queries], vec![9.0; queries], vec![T::from_f32(9.0); queries * keys]);
        attention_blocks(isa, &by_blocks, seen, SCALE, &mut maxima, &mut sums, &mut out);
        (maxima, sums, out.chunks(keys).map(<[T]>::to_vec).collect())
    }

    #[test]
    fn attention_over_blocks_equals_a_softmax_over_all_keys() {
        for keys in [1, 7, 63, 64, 65, 128, 200] {
            let scores: Vec<f32> = random(keys, 1).iter().map(|v| v * 30.0).collect();
            let scaled: Vec<f64> = scores.iter().map(|&s| s as f64 * SCALE as f64).collect();
            let normalizer = log_sum_exp_reference(scaled.iter().copied());
            let expected: Vec<f64> = scaled.iter().map(|s| (s - normalizer).exp()).collect();
            // What is not seen may be anything.
            let mut row = scores.clone();
            row.resize(keys.next_multiple_of(BLOCK_KEYS), f32::NAN);
            on_every_isa(|isa| {
                let (maxima, sums, out) = attended::<f32>(isa, &[row.clone()], &[[0, keys as u32]]);
                assert!(out[0][keys..].iter().all(|&p| p == 0.0), "{isa}");
                assert_close(&[maxima[0] + sums[0].ln()], &[normalizer], 1e-6, &format!("{isa}, {keys} keys"));
                let all: Vec<f32> = out[0][..keys].iter().map(|p| p / sums[0]).collect();
                assert_close(&all, &expected, 1e-6, &format!("{isa}, {keys} keys"));
                all
            });
        }
    }

    #[test]
    fn a_query_that_sees_nothing_finds_nothing() {
        for isa in Isa::available() {
            for seen in [[0, 0], [7, 7], [64, 64]] {
                let (maxima, sums, out) = attended::<bf16>(isa, &[vec![1.0; BLOCK_KEYS]], &[seen]);
                assert_eq!((maxima[0], sums[0], &out[0][..]), (f32::NEG_INFINITY, 0.0, &[bf16::ZERO; BLOCK_KEYS][..]));
            }
        }
    }

    /// Of any number of queries, with views that begin and end anywhere, and blocks before and behind them.
    #[test]
    fn a_query_finds_the_same_bits_alone_in_company_and_among_more_blocks_on_every_instruction_set() {
        let (queries, keys) = (37, 4 * BLOCK_KEYS);
        let mut scores: Vec<Vec<f32>> =
            (0..queries).map(|q| random(keys, q as u64).iter().map(|v| v * 40.0).collect()).collect();
        (scores[3][70], scores[5][100], scores[6][90], scores[7][64]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -700.0);
        let seen: Vec<[u32; 2]> = (0..queries as u32)
            .map(|q| {
                if q % 5 == 4 {
                    [64 + q, 128 + q]
                } else if q % 7 == 3 {
                    [64, 192]
                } else {
                    [64 + q / 4, 192 - q / 3]
                }
            })
            .collect();
        let bits = |(maxima, sums, out): (Vec<f32>, Vec<f32>, Vec<Vec<bf16>>), query: usize| {
            let of_row: Vec<u16> = out[query].iter().map(|p| p.to_bits()).collect();
            (maxima[query].to_bits(), sums[query].to_bits(), of_row)
        };
        let mut first: Option<Vec<_>> = None;
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
            let together: Vec<_> = (0..queries).map(|q| bits(attended(isa, &scores, &seen), q)).collect();
            for (q, expected) in together.iter().enumerate() {
                assert!(&bits(attended(isa, &scores[q..=q], &seen[q..=q]), 0) == expected, "{isa}: query {q} alone");
                let middle = vec![scores[q][BLOCK_KEYS..3 * BLOCK_KEYS].to_vec()];
                let (maximum, sum, out) = bits(attended(isa, &middle, &[seen[q].map(|key| key - 64)]), 0);
                let of_middle = &expected.2[BLOCK_KEYS..3 * BLOCK_KEYS];
                assert!((maximum, sum) == (expected.0, expected.1) && out == of_middle, "{isa}: query {q} among fewer blocks");
            }
            assert!(first.get_or_insert(together.clone()) == &together, "{isa}");
        }
    }

    #[test]
    fn keys_that_are_not_seen_count_for_nothing_whatever_they_are() {
        let (visible, scores, gradient) = (37..50, random(BLOCK_KEYS, 1), random(BLOCK_KEYS, 2));
        let keep = |values: &[f32], other: f32| -> [f32; BLOCK_KEYS] {
            std::array::from_fn(|l| if visible.contains(&l) { values[l] } else { other })
        };
        for isa in Isa::available() {
            let run = |other: f32, visible: Range<usize>| {
                let (mut q, mut ds) = ([9.0; BLOCK_KEYS], [9.0; BLOCK_KEYS]);
                let scores = keep(&scores, other);
                let seen = [visible.start as u32, visible.end as u32];
                let (maxima, sums, p) = attended::<f32>(isa, &[scores.to_vec()], &[seen]);
                let gradient = keep(&gradient, other);
                attention_block_backward(isa, &scores, &gradient, visible, SCALE, 0.3, 0.2, &mut q, &mut ds);
                (maxima, sums, p, q, ds)
            };
            let masked = run(f32::NAN, visible.clone());
            // Scores of negative infinity have a probability of zero without a mask.
            let (maxima, sums, p, ..) = run(f32::NEG_INFINITY, 0..BLOCK_KEYS);
            assert_eq!((&masked.0, &masked.1, &masked.2), (&maxima, &sums, &p), "{isa}");
            let outside = (0..BLOCK_KEYS).filter(|l| !visible.contains(l));
            assert!(outside.into_iter().all(|l| [masked.2[0][l], masked.3[l], masked.4[l]] == [0.0; 3]), "{isa}");
            assert!(visible.clone().all(|l| masked.3[l] > 0.0 && masked.4[l] != 0.0), "{isa}");
        }
    }

    #[test]
    fn the_backward_of_a_block_is_the_gradient_of_its_softmax() {
        for keys in [1, 7, 16, 60, 64] {
            let scores: Vec<f32> = random(keys, 1).iter().map(|v| v * 10.0).collect();
            let gradient = random(keys, 2);
            let softmax = |scores: &[f64]| -> Vec<f64> {
                let scaled: Vec<f64> = scores.iter().map(|s| s * SCALE as f64).collect();
                let normalizer = log_sum_exp_reference(scaled.iter().copied());
                scaled.iter().map(|s| (s - normalizer).exp()).collect()
            };
            let loss = |scores: &[f64]| softmax(scores).iter().zip(&gradient).map(|(p, &g)| p * g as f64).sum::<f64>();
            let wide: Vec<f64> = scores.iter().map(|&s| s as f64).collect();
            let (p_expected, delta) = (softmax(&wide), loss(&wide) as f32);
            let normalizer = log_sum_exp_reference(wide.iter().map(|s| s * SCALE as f64)) as f32;
            let ds_expected = numeric_gradient(loss, &scores);
            let (scores, gradient) = (block(&scores, f32::NAN), block(&gradient, f32::NAN));
            on_every_isa(|isa| {
                let (mut p, mut ds) = ([9.0; BLOCK_KEYS], [9.0; BLOCK_KEYS]);
                attention_block_backward(isa, &scores, &gradient, 0..keys, SCALE, normalizer, delta, &mut p, &mut ds);
                assert_close(&p[..keys], &p_expected, 1e-6, &format!("{isa}, {keys} keys"));
                assert_close(&ds[..keys], &ds_expected, 1e-6, &format!("{isa}, {keys} keys"));
                assert!(p[keys..].iter().chain(&ds[keys..]).all(|&v| v == 0.0), "{isa}");
                [p, ds].concat()
            });
        }
    }
}
