//! What a chunk of the gated delta rule computes beside matrix products: decays, the substitution within a block of rows, and sums over rows of a chunk.
//!
//! Matrices of a chunk have [`CHUNK`] columns; those that are numbered by tokens of a chunk begin at the first of it, rows that are computed at some later one.

use std::ops::Range;

use super::exp::exp_f32;
use super::lanes::{LANES, dot};
use crate::DELTA_CHUNK as CHUNK;
use crate::cpu::isa::{Fma, multiversion};

multiversion! {
    /// `exp` of every number.
    pub(crate) fn exponentials(x: &[f32], out: &mut [f32]) = exponentials_body;
}

multiversion! {
    /// The decay from token `j` to token `first + i`, `exp(sums[first + i] - sums[j])`, into `out: [rows, CHUNK]`; zero to earlier tokens.
    pub(crate) fn decays(first: usize, sums: &[f32], out: &mut [f32]) = decays_body;
}

multiversion! {
    /// `-decay * product` for tokens before that of a row, which is token `first` for the first row; zero for the others.
    pub(crate) fn weigh_before(first: usize, decays: &[f32], products: &[f32], out: &mut [f32]) = weigh_before_body;
}

multiversion! {
    /// `decay * product` for tokens up to that of a row; zero for the others.
    pub(crate) fn weigh_up_to(first: usize, decays: &[f32], products: &[f32], out: &mut [f32]) = weigh_up_to_body;
}

multiversion! {
    /// `out = v - factor * out` for rows `out: [rows, width]`, of which those of `v`, `stride` apart, are `len` wide. What is beyond is set to zero.
    pub(crate) fn subtract_from(v: &[f32], stride: usize, len: usize, factors: &[f32], width: usize, out: &mut [f32]) = subtract_from_body;
}

multiversion! {
    /// `x *= factor` for every row of `x: [rows, width]`.
    pub(crate) fn scale_rows(factors: &[f32], width: usize, x: &mut [f32]) = scale_rows_body;
}

multiversion! {
    /// `x *= factor`.
    pub(crate) fn scale(factor: f32, x: &mut [f32]) = scale_body;
}

multiversion! {
    /// `out = x * factor`, column by column, for rows of [`CHUNK`] columns.
    pub(crate) fn scale_columns(x: &[f32], factors: &[f32], out: &mut [f32]) = scale_columns_body;
}

multiversion! {
    /// Rows of one block of a chunk, one after another; see [`Block`].
    pub(crate) fn substitute(block: &Block<'_>, rest: &mut [f32], values: &mut [f32], out: &mut [f32]) = substitute_body;
}

multiversion! {
    /// The gradients by the corrected values of a block, the last row first; see [`BlockBackward`].
    pub(crate) fn substitute_backward(block: &BlockBackward<'_>, dvalues: &mut [f32], drest: &mut [f32]) = substitute_backward_body;
}

multiversion! {
    /// Makes of the gradients by weighted products those by the products themselves, and adds what they say of the sums of decays, for all rows of a chunk; see [`Weighted`].
    pub(crate) fn weighted_backward(w: &Weighted<'_>, dkeys: &mut [f32], dqueries: &mut [f32], dsums: &mut [f32]) = weighted_backward_body;
}

multiversion! {
    /// `factor * (a · b)` added to `out`, for every row of `a` and `b`, of which `len` numbers count.
    pub(crate) fn add_dots(factors: &[f32], a: &[f32], a_stride: usize, b: &[f32], b_stride: usize, len: usize, out: &mut [f32]) = add_dots_body;
}

multiversion! {
    /// `a · b`.
    pub(crate) fn product_sum(a: &[f32], b: &[f32]) -> f32 = dot;
}

multiversion! {
    /// `out += factor * x` for every row of `x` and `out: [rows, width]`.
    pub(crate) fn add_scaled_rows(factors: &[f32], x: &[f32], width: usize, out: &mut [f32]) = add_scaled_rows_body;
}

multiversion! {
    /// `out[r] += Σ_i weights[r][i] rows[i]` for rows of `width` numbers, whole vectors, each sum one chain from what is there: two products of one row each, which read the
    /// right side once and front to back, as memory likes it.
    pub(crate) fn add_rows_twice(weights: [&[f32]; 2], rows: &[f32], width: usize, out: [&mut [f32]; 2]) = add_rows_twice_body;
}

/// Rows of a chunk that depend on each other.
pub(crate) struct Block<'a> {
    /// The rows, as tokens of the chunk.
    pub tokens: Range<usize>,
    /// The token where the sums of these rows go on: what is before has been added.
    pub start: usize,
    /// Numbers of a row of values, whole vectors.
    pub width: usize,
    /// Weights of the values of earlier tokens in what is left of each row, `[rows, CHUNK]`.
    pub keys: &'a [f32],
    /// Weights of values in each row of the output, or nothing if there is none, `[rows, CHUNK]`.
    pub queries: &'a [f32],
    /// Of each row.
    pub beta: &'a [f32],
}

/// As [`Block`], for the way back.
pub(crate) struct BlockBackward<'a> {
    /// The rows, as tokens of the chunk.
    pub tokens: Range<usize>,
    /// Numbers of a row of values, whole vectors.
    pub width: usize,
    /// Weights of what was left of later tokens' rows in the gradient of each token's values, `[CHUNK, CHUNK]`.
    pub keys: &'a [f32],
    /// Of each token of the chunk.
    pub beta: &'a [f32],
}

/// Products of keys and queries with keys, as they were weighted: see [`weigh_before`] and [`weigh_up_to`].
pub(crate) struct Weighted<'a> {
    pub rows: usize,
    pub decays: &'a [f32],
    pub keys: &'a [f32],
    pub queries: &'a [f32],
}

#[inline(always)]
fn exponentials_body(fma: impl Fma, x: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = exp_f32(fma, x);
    }
}

#[inline(always)]
fn decays_body(fma: impl Fma, first: usize, sums: &[f32], out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(CHUNK).enumerate() {
        let row = first + i;
        let own = sums[row];
        for (v, (out, sums)) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums.as_chunks::<LANES>().0).enumerate() {
            if v * LANES > row {
                *out = [0.0; LANES];
                continue;
            }
            for l in 0..LANES {
                let decay = exp_f32(fma, own - sums[l]);
                out[l] = if v * LANES + l <= row { decay } else { 0.0 };
            }
        }
    }
}

#[inline(always)]
fn weigh_before_body(_: impl Fma, first: usize, decays: &[f32], products: &[f32], out: &mut [f32]) {
    let rows = out.chunks_exact_mut(CHUNK).zip(products.chunks_exact(CHUNK)).zip(decays.chunks_exact(CHUNK));
    for (i, ((out, products), decays)) in rows.enumerate() {
        for (j, ((out, &product), &decay)) in out.iter_mut().zip(products).zip(decays).enumerate() {
            *out = if j < first + i { -(decay * product) } else { 0.0 };
        }
    }
}

#[inline(always)]
fn weigh_up_to_body(_: impl Fma, first: usize, decays: &[f32], products: &[f32], out: &mut [f32]) {
    let rows = out.chunks_exact_mut(CHUNK).zip(products.chunks_exact(CHUNK)).zip(decays.chunks_exact(CHUNK));
    for (i, ((out, products), decays)) in rows.enumerate() {
        for (j, ((out, &product), &decay)) in out.iter_mut().zip(products).zip(decays).enumerate() {
            *out = if j <= first + i { decay * product } else { 0.0 };
        }
    }
}

#[inline(always)]
fn subtract_from_body(fma: impl Fma, v: &[f32], stride: usize, len: usize, factors: &[f32], width: usize, out: &mut [f32]) {
    for ((i, out), &factor) in out.chunks_exact_mut(width).enumerate().zip(factors) {
        let (out, beyond) = out.split_at_mut(len);
        for (out, &v) in out.iter_mut().zip(&v[i * stride..][..len]) {
            *out = fma.fma(-factor, *out, v);
        }
        beyond.fill(0.0);
    }
}

#[inline(always)]
fn scale_rows_body(_: impl Fma, factors: &[f32], width: usize, x: &mut [f32]) {
    for (x, &factor) in x.chunks_exact_mut(width).zip(factors) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

#[inline(always)]
fn scale_body(_: impl Fma, factor: f32, x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x *= factor);
}

#[inline(always)]
fn scale_columns_body(_: impl Fma, x: &[f32], factors: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks_exact(CHUNK).zip(out.chunks_exact_mut(CHUNK)) {
        for ((out, &x), &factor) in out.iter_mut().zip(x).zip(factors) {
            *out = x * factor;
        }
    }
}

/// Goes on with the chain of a row: adds `weights[j] * rows[j]`, from the first to the last.
#[inline(always)]
fn add_rows(fma: impl Fma, weights: &[f32], rows: &[f32], width: usize, out: &mut [f32]) {
    assert!(rows.len() >= weights.len() * width && out.len() == width);
    if weights.is_empty() {
        return;
    }
    // While a chain waits for its last sum, others go on.
    const AT_ONCE: usize = 4 * LANES;
    let (wide, narrow) = out.as_chunks_mut::<AT_ONCE>();
    let first_narrow = wide.len() * AT_ONCE;
    for (i, out) in wide.iter_mut().enumerate() {
        add_columns(fma, weights, &rows[i * AT_ONCE..], width, out);
    }
    for (i, out) in narrow.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        add_columns(fma, weights, &rows[first_narrow + i * LANES..], width, out);
    }
}

/// [`add_rows`] of as many columns as `out` has, of rows `width` apart.
#[inline(always)]
fn add_columns<const N: usize>(fma: impl Fma, weights: &[f32], rows: &[f32], width: usize, out: &mut [f32; N]) {
    let mut sums = *out;
    for (&w, row) in weights.iter().zip(rows.chunks(width)) {
        let row = &row.as_chunks::<N>().0[0];
        for (sum, &x) in sums.iter_mut().zip(row) {
            *sum = fma.fma(w, x, *sum);
        }
    }
    *out = sums;
}

#[inline(always)]
fn add_rows_twice_body(fma: impl Fma, weights: [&[f32]; 2], rows: &[f32], width: usize, [first, second]: [&mut [f32]; 2]) {
    const AT_ONCE: usize = 4;
    let (first, second) = (&mut first[..width], &mut second[..width]);
    let (a, a_rest) = weights[0].as_chunks::<AT_ONCE>();
    let (b, b_rest) = weights[1].as_chunks::<AT_ONCE>();
    for ((a, b), block) in a.iter().zip(b).zip(rows.chunks_exact(AT_ONCE * width)) {
        let [r0, r1, r2, r3] = std::array::from_fn(|r| &block[r * width..][..width]);
        for c in 0..width {
            first[c] = fma.fma(a[3], r3[c], fma.fma(a[2], r2[c], fma.fma(a[1], r1[c], fma.fma(a[0], r0[c], first[c]))));
            second[c] = fma.fma(b[3], r3[c], fma.fma(b[2], r2[c], fma.fma(b[1], r1[c], fma.fma(b[0], r0[c], second[c]))));
        }
    }
    let done = a.len() * AT_ONCE * width;
    for ((&a, &b), row) in a_rest.iter().zip(b_rest).zip(rows[done..].chunks_exact(width)) {
        for c in 0..width {
            first[c] = fma.fma(a, row[c], first[c]);
            second[c] = fma.fma(b, row[c], second[c]);
        }
    }
}

#[inline(always)]
fn substitute_body(fma: impl Fma, block: &Block<'_>, rest: &mut [f32], values: &mut [f32], out: &mut [f32]) {
    let (width, start) = (block.width, block.start);
    for (i, token) in block.tokens.clone().enumerate() {
        let rest = &mut rest[i * width..][..width];
        let (before, own) = values.split_at_mut(token * width);
        add_rows(fma, &block.keys[i * CHUNK..][start..token], &before[start * width..], width, rest);
        for (value, &rest) in own.iter_mut().zip(&*rest) {
            *value = block.beta[i] * rest;
        }
        if !block.queries.is_empty() {
            let out = &mut out[i * width..][..width];
            add_rows(fma, &block.queries[i * CHUNK..][start..token + 1], &values[start * width..], width, out);
        }
    }
}

#[inline(always)]
fn substitute_backward_body(fma: impl Fma, block: &BlockBackward<'_>, dvalues: &mut [f32], drest: &mut [f32]) {
    let (width, end) = (block.width, block.tokens.end);
    for token in block.tokens.clone().rev() {
        let dvalues = &mut dvalues[token * width..][..width];
        let weights = &block.keys[token * CHUNK..][token + 1..end];
        add_rows(fma, weights, &drest[(token + 1) * width..], width, dvalues);
        for (drest, &dvalue) in drest[token * width..][..width].iter_mut().zip(&*dvalues) {
            *drest = block.beta[token] * dvalue;
        }
    }
}

#[inline(always)]
fn weighted_backward_body(_: impl Fma, w: &Weighted<'_>, dkeys: &mut [f32], dqueries: &mut [f32], dsums: &mut [f32]) {
    for row in 0..w.rows {
        let at = row * CHUNK..(row + 1) * CHUNK;
        let (decays, keys, queries) = (&w.decays[at.clone()], &w.keys[at.clone()], &w.queries[at.clone()]);
        let (dkeys, dqueries) = (&mut dkeys[at.clone()], &mut dqueries[at]);
        // How much the row's weights say of its own sum, and the others' of theirs; a token's weight of itself says nothing.
        let mut own = [0.0; LANES];
        for v in 0..CHUNK / LANES {
            for (l, own) in own.iter_mut().enumerate() {
                let j = v * LANES + l;
                let said = if j < row { dkeys[j] * keys[j] + dqueries[j] * queries[j] } else { 0.0 };
                *own += said;
                dsums[j] -= said;
                dkeys[j] = if j < row { -(decays[j] * dkeys[j]) } else { 0.0 };
                dqueries[j] = if j <= row { decays[j] * dqueries[j] } else { 0.0 };
            }
        }
        dsums[row] += own.iter().sum::<f32>();
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn add_dots_body(
    fma: impl Fma,
    factors: &[f32],
    a: &[f32],
    a_stride: usize,
    b: &[f32],
    b_stride: usize,
    len: usize,
    out: &mut [f32],
) {
    for (i, (out, &factor)) in out.iter_mut().zip(factors).enumerate() {
        *out = fma.fma(factor, dot(fma, &a[i * a_stride..][..len], &b[i * b_stride..][..len]), *out);
    }
}

#[inline(always)]
fn add_scaled_rows_body(fma: impl Fma, factors: &[f32], x: &[f32], width: usize, out: &mut [f32]) {
    for ((out, x), &factor) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(factors) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = fma.fma(factor, x, *out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Fused, Isa};
    use crate::cpu::rows::testing::random;

    #[test]
    fn rows_are_added_in_one_chain_from_the_first_to_the_last() {
        for width in [16, 48, 128, 144] {
            for n in [0, 1, 3, 4, 7, 64] {
                let (a, b, rows, before) = (random(n, 1), random(n, 2), random(n * width, 3), random(2 * width, 4));
                let chain = |weights: &[f32], c: usize, from: f32| {
                    weights.iter().enumerate().fold(from, |sum, (i, &w)| Fused.fma(w, rows[i * width + c], sum))
                };
                let expected: Vec<f32> = (0..2 * width).map(|i| chain([&a, &b][i / width], i % width, before[i])).collect();
                for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Portable) {
                    let mut out = before.clone();
                    let (first, second) = out.split_at_mut(width);
                    add_rows_twice(isa, [&a, &b], &rows, width, [first, second]);
                    assert_eq!(out, expected, "{isa}: {n} rows of {width}");
                }
            }
        }
    }

    #[test]
    fn no_token_has_a_weight_in_those_before_it() {
        let (sums, products) = (random(CHUNK, 1), vec![f32::NAN; CHUNK * CHUNK]);
        for isa in Isa::available() {
            let (mut weights, mut out) = (vec![9.0; 3 * CHUNK], vec![9.0; 3 * CHUNK]);
            decays(isa, 20, &sums, &mut weights);
            for i in 0..3 {
                let row = &weights[i * CHUNK..][..CHUNK];
                assert!(
                    row[..=20 + i].iter().zip(&sums).all(|(d, s)| (d / (sums[20 + i] - s).exp() - 1.0).abs() < 1e-6),
                    "{isa}"
                );
                assert!(row[20 + i] == 1.0 && row[21 + i..].iter().all(|&d| d == 0.0), "{isa}");
            }
            weigh_up_to(isa, 20, &weights, &products[..3 * CHUNK], &mut out);
            assert!((0..3).all(|i| out[i * CHUNK + 20 + i].is_nan() && out[i * CHUNK + 21 + i] == 0.0), "{isa}");
            weigh_before(isa, 20, &weights, &products[..3 * CHUNK], &mut out);
            assert!((0..3).all(|i| out[i * CHUNK + 19 + i].is_nan() && out[i * CHUNK + 20 + i] == 0.0), "{isa}");
        }
    }
}
