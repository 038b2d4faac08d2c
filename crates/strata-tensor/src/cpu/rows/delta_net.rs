//! What surrounds the gated delta rule in a layer: the causal convolution with SiLU, heads of unit length, gates, and the gated norm
//! (Yang et al., 2024, arXiv:2412.06464; `Qwen3_5GatedDeltaNet` of transformers), in f32.

use std::ops::Range;

use super::exp::exp_f32;
use super::lanes::{LANES, dot, dot3};
use super::norm::inverse_rms;
use crate::Element;
use crate::cpu::isa::{Fma, multiversion};
use crate::cpu::matmul::fetch_numbers;

/// The most tokens that a convolution may see.
pub(crate) const MAX_KERNEL: usize = 8;
/// The widest head.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Under the root of the length of a head, as the reference has it.
const UNIT_EPS: f32 = 1e-6;

/// The inputs of a causal depthwise convolution over one sequence of a batch.
pub(crate) struct Conv<'a> {
    /// Rows of the batch, `stride` apart, that begin with the channels.
    pub x: &'a [f32],
    pub stride: usize,
    /// The first row of the sequence.
    pub first: usize,
    /// What came before it, `[kernel - 1, channels]`, oldest first.
    pub tail: &'a [f32],
    /// `[channels, kernel]`, oldest first.
    pub weight: &'a [f32],
    pub channels: usize,
    pub kernel: usize,
}

impl Conv<'_> {
    /// Channels `channels` of the input `back` tokens before row `row` of the batch.
    #[inline(always)]
    fn input(&self, row: usize, back: usize, channels: &Range<usize>) -> &[f32] {
        if row >= self.first + back {
            &self.x[(row - back) * self.stride..][channels.clone()]
        } else {
            &self.tail[(row + self.kernel - 1 - self.first - back) * self.channels..][channels.clone()]
        }
    }

    /// The weights of some channels, `[kernel][channels]`.
    #[inline(always)]
    fn taps(&self, channels: &Range<usize>) -> [[f32; MAX_HEAD_DIM]; MAX_KERNEL] {
        let mut taps = [[0.0; MAX_HEAD_DIM]; MAX_KERNEL];
        for (c, weights) in
            self.weight[channels.start * self.kernel..channels.end * self.kernel].chunks_exact(self.kernel).enumerate()
        {
            for (tap, &w) in taps.iter_mut().zip(weights) {
                tap[c] = w;
            }
        }
        taps
    }

    /// `Σ_j w_j x_{t - kernel + 1 + j}`, one chain from the oldest input to the newest; `finish` makes of it what is written.
    #[inline(always)]
    fn sums(
        &self,
        fma: impl Fma,
        taps: &[[f32; MAX_HEAD_DIM]; MAX_KERNEL],
        row: usize,
        channels: &Range<usize>,
        out: &mut [f32],
        finish: impl Fn(f32) -> f32,
    ) {
        let n = channels.len();
        let inputs: [&[f32]; MAX_KERNEL] = std::array::from_fn(|j| match self.kernel.checked_sub(1 + j) {
            Some(back) => self.input(row, back, channels),
            None => &[],
        });
        let (inputs, taps) = (&inputs[..self.kernel], &taps[..self.kernel]);
        let (vectors, rest) = out[..n].as_chunks_mut::<LANES>();
        let done = vectors.len() * LANES;
        for (v, out) in vectors.iter_mut().enumerate() {
            let mut sums = [0.0; LANES];
            for (tap, x) in taps.iter().zip(inputs) {
                let (tap, x) = (&tap.as_chunks::<LANES>().0[v], &x.as_chunks::<LANES>().0[v]);
                for l in 0..LANES {
                    sums[l] = fma.fma(tap[l], x[l], sums[l]);
                }
            }
            for l in 0..LANES {
                out[l] = finish(sums[l]);
            }
        }
        for (c, out) in (done..).zip(rest) {
            *out = finish(taps.iter().zip(inputs).fold(0.0, |sum, (tap, x)| fma.fma(tap[c], x[c], sum)));
        }
    }
}

/// One head of some rows: rows `rows` of the batch, `channels` of the convolution, and where they are in rows of the output.
pub(crate) struct ConvHead {
    pub rows: Range<usize>,
    pub channels: Range<usize>,
    /// Numbers from one row of the output to the next, and the column of the head in it.
    pub stride: usize,
    pub column: usize,
    /// The length that the head is brought to; `None` leaves it as it is.
    pub length: Option<f32>,
}

multiversion! {
    /// Convolution, SiLU, and perhaps the norm of a head, into the rows of the output that are `head.rows`.
    pub(crate) fn conv_head(conv: &Conv<'_>, head: &ConvHead, out: &mut [f32]) = conv_head_body;
}

multiversion! {
    /// Makes of the gradient by what [`conv_head`] has computed that by the sums of the convolution, in place.
    pub(crate) fn conv_head_backward(conv: &Conv<'_>, head: &ConvHead, gradient: &mut [f32]) = conv_head_backward_body;
}

multiversion! {
    /// The gradient by the inputs of a convolution, into the first columns of rows of `dx`, from that by its sums, `gradient`, of all rows of the batch, of which the
    /// sequence's end before `end`.
    pub(crate) fn conv_input_backward<T: Element>(conv: &Conv<'_>, head: &ConvHead, end: usize, gradient: &[f32], dx: &mut [T], dx_stride: usize) = conv_input_backward_body;
}

multiversion! {
    /// `beta = sigmoid(b)` and `g = -exp(a_log) * softplus(a + dt_bias)` of one token.
    pub(crate) fn gates(b: &[f32], a: &[f32], a_log: &[f32], dt_bias: &[f32], beta: &mut [f32], g: &mut [f32]) = gates_body;
}

multiversion! {
    /// The gradient of [`gates`] by `b` and `a`.
    pub(crate) fn gates_backward<T: Element>(dbeta: &[f32], dg: &[f32], b: &[f32], a: &[f32], a_log: &[f32], dt_bias: &[f32], db: &mut [T], da: &mut [T]) = gates_backward_body;
}

multiversion! {
    /// `weight * rms_norm(x) * silu(z)` of heads as wide as the weight.
    pub(crate) fn gated_norm<T: Element>(x: &[f32], z: &[f32], weight: &[f32], eps: f32, out: &mut [T]) = gated_norm_body;
}

multiversion! {
    /// The gradient of [`gated_norm`] by `x` and `z`.
    pub(crate) fn gated_norm_backward<T: Element>(dy: &[f32], x: &[f32], z: &[f32], weight: &[f32], eps: f32, dx: &mut [f32], dz: &mut [T]) = gated_norm_backward_body;
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
fn sigmoid(fma: impl Fma, x: f32) -> f32 {
    1.0 / (1.0 + exp_f32(fma, -x))
}

/// `ln(1 + exp(x))`.
#[inline(always)]
fn softplus(fma: impl Fma, x: f32) -> f32 {
    // ln(1 + t) = 2 artanh(s) with s = t / (2 + t), at most 1/3: its series is good to a unit in the last place after eight terms.
    let t = exp_f32(fma, -x.abs());
    let s = t / (2.0 + t);
    let square = s * s;
    let mut series = 1.0 / 15.0;
    for odd in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = fma.fma(series, square, 1.0 / odd);
    }
    x.max(0.0) + 2.0 * fma.fma(s * square, series, s)
}

/// What brings a head to unit length.
#[inline(always)]
fn inverse_length(fma: impl Fma, x: &[f32]) -> f32 {
    1.0 / (dot(fma, x, x) + UNIT_EPS).sqrt()
}

#[inline(always)]
fn conv_head_body(fma: impl Fma, conv: &Conv<'_>, head: &ConvHead, out: &mut [f32]) {
    let taps = conv.taps(&head.channels);
    for (row, out) in head.rows.clone().zip(out.chunks_exact_mut(head.stride)) {
        // A row of a head is too short for a processor to look ahead: what the next head reads and writes.
        let n = head.channels.len();
        let (out, next) = out[head.column..].split_at_mut(n);
        fetch_numbers(&next[..n.min(next.len())]);
        let next = &conv.x[row * conv.stride..][head.channels.end..conv.channels];
        fetch_numbers(&next[..n.min(next.len())]);
        conv.sums(fma, &taps, row, &head.channels, out, |sum| sum / (1.0 + exp_f32(fma, -sum)));
        if let Some(length) = head.length {
            let inverse = inverse_length(fma, out);
            for out in out.iter_mut() {
                *out = *out * inverse * length;
            }
        }
    }
}

#[inline(always)]
fn conv_head_backward_body(fma: impl Fma, conv: &Conv<'_>, head: &ConvHead, gradient: &mut [f32]) {
    let taps = conv.taps(&head.channels);
    let n = head.channels.len();
    let (mut sums, mut values) = ([0.0; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
    let (sums, values) = (&mut sums[..n], &mut values[..n]);
    for (row, gradient) in head.rows.clone().zip(gradient.chunks_exact_mut(head.stride)) {
        let gradient = &mut gradient[head.column..][..n];
        conv.sums(fma, &taps, row, &head.channels, sums, |sum| sum);
        if let Some(length) = head.length {
            for (value, &sum) in values.iter_mut().zip(&*sums) {
                *value = sum / (1.0 + exp_f32(fma, -sum));
            }
            // The gradient less its part along the head, which the norm does not see.
            let inverse = inverse_length(fma, values);
            let along = dot(fma, gradient, values) * inverse * inverse;
            for (gradient, &value) in gradient.iter_mut().zip(&*values) {
                *gradient = fma.fma(-along, value, *gradient) * inverse * length;
            }
        }
        for (gradient, &sum) in gradient.iter_mut().zip(&*sums) {
            let sigmoid = sigmoid(fma, sum);
            *gradient *= sigmoid * fma.fma(sum, 1.0 - sigmoid, 1.0);
        }
    }
}

#[inline(always)]
fn conv_input_backward_body<T: Element>(
    fma: impl Fma,
    conv: &Conv<'_>,
    head: &ConvHead,
    end: usize,
    gradient: &[f32],
    dx: &mut [T],
    dx_stride: usize,
) {
    let taps = conv.taps(&head.channels);
    let n = head.channels.len();
    let mut sums = [0.0; MAX_HEAD_DIM];
    let sums = &mut sums[..n];
    for (row, dx) in head.rows.clone().zip(dx.chunks_exact_mut(dx_stride)) {
        sums.fill(0.0);
        // Outputs that saw this input, the earliest first: it was their newest.
        for (ahead, tap) in taps[..conv.kernel].iter().rev().enumerate().take(end - row) {
            let gradient = &gradient[(row + ahead) * head.stride + head.column..][..n];
            for ((sum, &w), &gradient) in sums.iter_mut().zip(tap).zip(gradient) {
                *sum = fma.fma(w, gradient, *sum);
            }
        }
        for (dx, &sum) in dx[head.channels.clone()].iter_mut().zip(&*sums) {
            *dx = T::from_f32(sum);
        }
    }
}

#[inline(always)]
fn gates_body(fma: impl Fma, b: &[f32], a: &[f32], a_log: &[f32], dt_bias: &[f32], beta: &mut [f32], g: &mut [f32]) {
    for (beta, &b) in beta.iter_mut().zip(b) {
        *beta = sigmoid(fma, b);
    }
    for (((g, &a), &a_log), &dt_bias) in g.iter_mut().zip(a).zip(a_log).zip(dt_bias) {
        *g = -exp_f32(fma, a_log) * softplus(fma, a + dt_bias);
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn gates_backward_body<T: Element>(
    fma: impl Fma,
    dbeta: &[f32],
    dg: &[f32],
    b: &[f32],
    a: &[f32],
    a_log: &[f32],
    dt_bias: &[f32],
    db: &mut [T],
    da: &mut [T],
) {
    for ((db, &dbeta), &b) in db.iter_mut().zip(dbeta).zip(b) {
        let beta = sigmoid(fma, b);
        *db = T::from_f32(dbeta * beta * (1.0 - beta));
    }
    for ((((da, &dg), &a), &a_log), &dt_bias) in da.iter_mut().zip(dg).zip(a).zip(a_log).zip(dt_bias) {
        *da = T::from_f32(-dg * exp_f32(fma, a_log) * sigmoid(fma, a + dt_bias));
    }
}

#[inline(always)]
fn gated_norm_body<T: Element>(fma: impl Fma, x: &[f32], z: &[f32], weight: &[f32], eps: f32, out: &mut [T]) {
    let n = weight.len();
    assert!(x.len() == z.len() && x.len() == out.len() && x.len().is_multiple_of(n));
    for ((x, z), out) in x.chunks_exact(n).zip(z.chunks_exact(n)).zip(out.chunks_exact_mut(n)) {
        let inverse = inverse_rms(fma, x, eps);
        for (((out, &x), &w), &z) in out.iter_mut().zip(x).zip(weight).zip(z) {
            *out = T::from_f32(x * inverse * w * (z / (1.0 + exp_f32(fma, -z))));
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn gated_norm_backward_body<T: Element>(
    fma: impl Fma,
    dy: &[f32],
    x: &[f32],
    z: &[f32],
    weight: &[f32],
    eps: f32,
    dx: &mut [f32],
    dz: &mut [T],
) {
    let n = weight.len();
    assert!(
        dy.len() == x.len() && x.len() == z.len() && x.len() == dx.len() && x.len() == dz.len() && x.len().is_multiple_of(n)
    );
    let heads = dy.chunks_exact(n).zip(x.chunks_exact(n)).zip(z.chunks_exact(n));
    for (((dy, x), z), (dx, dz)) in heads.zip(dx.chunks_exact_mut(n).zip(dz.chunks_exact_mut(n))) {
        let inverse = inverse_rms(fma, x, eps);
        for (((((dx, dz), &dy), &x), &w), &z) in dx.iter_mut().zip(dz).zip(dy).zip(x).zip(weight).zip(z) {
            let sigmoid = sigmoid(fma, z);
            let slope = sigmoid * fma.fma(z, 1.0 - sigmoid, 1.0);
            *dz = T::from_f32(dy * (x * inverse * w) * slope);
            *dx = dy * (z * sigmoid);
        }
        let along = dot3(fma, dx, weight, x) * inverse * inverse * inverse / n as f32;
        for ((dx, &w), &x) in dx.iter_mut().zip(weight).zip(x) {
            *dx = fma.fma(*dx * w, inverse, -(x * along));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{assert_close, numeric_gradient, on_every_isa, random};

    #[test]
    fn gates_equal_their_definition_and_their_backward_is_its_gradient() {
        for n in [1, 7, 16, 60] {
            let b_and_a: Vec<f32> = random(2 * n, 1).iter().map(|v| v * 6.0).collect();
            let (a_log, dt_bias, dy) = (random(n, 2), random(n, 3), random(2 * n, 4));
            let definition = |x: &[f64]| -> Vec<f64> {
                let beta = (0..n).map(|i| 1.0 / (1.0 + (-x[i]).exp()));
                let g = (0..n).map(|i| -(a_log[i] as f64).exp() * (x[n + i] + dt_bias[i] as f64).exp().ln_1p());
                beta.chain(g).collect()
            };
            let expected = definition(&b_and_a.iter().map(|&v| v as f64).collect::<Vec<_>>());
            let slopes = numeric_gradient(|x| definition(x).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum(), &b_and_a);
            on_every_isa(|isa| {
                let ((b, a), mut out) = (b_and_a.split_at(n), vec![0.0; 4 * n]);
                let (values, gradients) = out.split_at_mut(2 * n);
                let (beta, g) = values.split_at_mut(n);
                gates(isa, b, a, &a_log, &dt_bias, beta, g);
                let (db, da) = gradients.split_at_mut(n);
                gates_backward(isa, &dy[..n], &dy[n..], b, a, &a_log, &dt_bias, db, da);
                assert_close(values, &expected, 1e-6, &format!("{isa}, {n} heads"));
                assert_close(gradients, &slopes, 1e-5, &format!("{isa}, {n} heads, backward"));
                out
            });
        }
    }

    #[test]
    fn far_from_zero_gates_are_open_or_shut() {
        let x = [-1000.0, 1000.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
        for isa in Isa::available() {
            let (mut beta, mut g, mut db, mut da) = ([9.0; 5], [9.0; 5], [9.0; 5], [9.0; 5]);
            gates(isa, &x, &x, &[0.0; 5], &[0.0; 5], &mut beta, &mut g);
            gates_backward(isa, &[1.0; 5], &[1.0; 5], &x, &x, &[0.0; 5], &[0.0; 5], &mut db, &mut da);
            assert_eq!((&beta[..4], &db[..4]), (&[0.0, 1.0, 0.0, 1.0][..], &[0.0; 4][..]), "{isa}");
            assert_eq!(
                (&g[..4], &da[..4]),
                (&[-0.0, -1000.0, -0.0, f32::NEG_INFINITY][..], &[-0.0, -1.0, -0.0, -1.0][..]),
                "{isa}"
            );
            assert!(beta[4].is_nan() && g[4].is_nan(), "{isa}");
        }
    }

    #[test]
    fn a_gated_norm_equals_its_definition_and_its_backward_is_its_gradient() {
        for n in [1, 7, 16, 60, 128] {
            let (x_and_z, weight, dy) = (random(4 * n, 1), random(n, 2), random(2 * n, 3));
            let definition = |v: &[f64]| -> Vec<f64> {
                let (x, z) = v.split_at(2 * n);
                let head = |(x, z): (&[f64], &[f64])| -> Vec<f64> {
                    let scale = (x.iter().map(|v| v * v).sum::<f64>() / n as f64 + 1e-6f32 as f64).sqrt();
                    (0..n).map(|i| weight[i] as f64 * x[i] / scale * z[i] / (1.0 + (-z[i]).exp())).collect()
                };
                x.chunks(n).zip(z.chunks(n)).flat_map(head).collect()
            };
            let expected = definition(&x_and_z.iter().map(|&v| v as f64).collect::<Vec<_>>());
            let slopes = numeric_gradient(|x| definition(x).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum(), &x_and_z);
            on_every_isa(|isa| {
                let (x, z) = x_and_z.split_at(2 * n);
                let (mut out, mut gradients) = (vec![0.0; 2 * n], vec![0.0; 4 * n]);
                gated_norm(isa, x, z, &weight, 1e-6, &mut out);
                assert_close(&out, &expected, 1e-6, &format!("{isa}, width {n}"));
                let mut narrow = vec![bf16::ZERO; 2 * n];
                gated_norm(isa, x, z, &weight, 1e-6, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                let (dx, dz) = gradients.split_at_mut(2 * n);
                gated_norm_backward(isa, &dy, x, z, &weight, 1e-6, dx, dz);
                assert_close(&gradients, &slopes, 2e-5, &format!("{isa}, width {n}, backward"));
                [out, gradients].concat()
            });
        }
    }

    #[test]
    fn a_convolution_goes_on_from_what_came_before() {
        // Two heads of three channels in rows of seven, the second of unit length, over a sequence that begins at the third row.
        let (channels, kernel, stride) = (6, 4, 7);
        let (x, tail, weight) = (random(8 * stride, 1), random(3 * channels, 2), random(channels * kernel, 3));
        let input = |t: usize, c: usize| if t < 3 { tail[t * channels + c] } else { x[(t - 3 + 2) * stride + c] };
        let mut expected = Vec::new();
        for t in 0..6 {
            let sum = |c: usize| (0..kernel).map(|j| weight[c * kernel + j] as f64 * input(t + j, c) as f64).sum::<f64>();
            let row: Vec<f64> = (0..channels).map(|c| sum(c) / (1.0 + (-sum(c)).exp())).collect();
            let length = (row[3..].iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
            expected.extend(row[..3].iter().copied().chain(row[3..].iter().map(|v| 0.5 * v / length)));
        }
        on_every_isa(|isa| {
            let conv = Conv { x: &x, stride, first: 2, tail: &tail, weight: &weight, channels, kernel };
            let mut out = vec![9.0; 6 * channels];
            for (column, length) in [(0, None), (3, Some(0.5))] {
                // In two runs, as two tasks would.
                for rows in [2..4, 4..8] {
                    let head = ConvHead { rows: rows.clone(), channels: column..column + 3, stride: channels, column, length };
                    conv_head(isa, &conv, &head, &mut out[(rows.start - 2) * channels..(rows.end - 2) * channels]);
                }
            }
            assert_close(&out, &expected, 1e-6, &format!("{isa}"));
            out
        });
    }
}
