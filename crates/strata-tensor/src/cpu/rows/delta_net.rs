//! What surrounds the gated delta rule in a layer: the causal convolution with SiLU, heads of unit length, gates, and the gated norm
//! (Yang et al., 2024, arXiv:2412.06464; `Qwen3_5GatedDeltaNet` of transformers), in f32.

use std::ops::Range;

use super::exp::exp_f32;
use super::lanes::{dot, dot3};
use super::norm::inverse_rms;
use crate::Element;
use crate::cpu::isa::{Fma, multiversion};

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

    /// `Σ_j w_j x_{t - kernel + 1 + j}`, one chain from the oldest input to the newest.
    #[inline(always)]
    fn sums(
        &self,
        fma: impl Fma,
        taps: &[[f32; MAX_HEAD_DIM]; MAX_KERNEL],
        row: usize,
        channels: &Range<usize>,
        out: &mut [f32],
    ) {
        out.fill(0.0);
        for (j, tap) in taps[..self.kernel].iter().enumerate() {
            let x = self.input(row, self.kernel - 1 - j, channels);
            for ((out, &w), &x) in out.iter_mut().zip(tap).zip(x) {
                *out = fma.fma(w, x, *out);
            }
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
        let out = &mut out[head.column..][..head.channels.len()];
        conv.sums(fma, &taps, row, &head.channels, out);
        for out in out.iter_mut() {
            *out /= 1.0 + exp_f32(fma, -*out);
        }
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
        conv.sums(fma, &taps, row, &head.channels, sums);
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
