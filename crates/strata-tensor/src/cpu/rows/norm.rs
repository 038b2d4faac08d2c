//! RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467): `y = x / sqrt(mean(x^2) + eps) * weight`, in f32.

use super::lanes::{dot, dot3};
use crate::Element;
use crate::backend::HeadMove;
use crate::cpu::isa::{Fma, multiversion};

multiversion! {
    /// Normalises rows `x: [rows, n]` with `weight: [n]` into `out: [rows, n]`.
    pub(crate) fn rms_norm<T: Element>(x: &[f32], weight: &[f32], eps: f32, out: &mut [T]) = rms_norm_body;
}

multiversion! {
    /// Adds the gradient of `x: [rows, n]` to `dx`, given that of the output, `dy: [rows, n]`. The weight is frozen.
    pub(crate) fn rms_norm_backward(dy: &[f32], x: &[f32], weight: &[f32], eps: f32, dx: &mut [f32]) = rms_norm_backward_body;
}

multiversion! {
    /// Normalises heads of rows of `x` into columns of as many rows of `y`, given the columns of both.
    pub(crate) fn norm_heads<T: Element>(
        heads: &HeadMove,
        x: &[f32],
        x_columns: usize,
        weight: &[f32],
        eps: f32,
        y: &mut [T],
        y_columns: usize,
    ) = norm_heads_body;
}

multiversion! {
    /// The gradient of the heads of `x` into their columns of `dx`, given that of `y`, whose columns are `dy_columns`.
    pub(crate) fn norm_heads_backward<T: Element>(
        heads: &HeadMove,
        dy: &[f32],
        dy_columns: usize,
        x: &[f32],
        weight: &[f32],
        eps: f32,
        dx: &mut [T],
        x_columns: usize,
    ) = norm_heads_backward_body;
}

#[inline(always)]
#[expect(clippy::too_many_arguments)]
fn norm_heads_body<T: Element>(
    fma: impl Fma,
    heads: &HeadMove,
    x: &[f32],
    x_columns: usize,
    weight: &[f32],
    eps: f32,
    y: &mut [T],
    y_columns: usize,
) {
    let HeadMove { heads, width, from, to } = *heads;
    for (x, y) in x.chunks_exact(x_columns).zip(y.chunks_exact_mut(y_columns)) {
        for head in 0..heads {
            let x = &x[from.first + head * from.stride..][..width];
            normalize(x, weight, inverse_rms(fma, x, eps), &mut y[to.first + head * to.stride..][..width]);
        }
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments)]
fn norm_heads_backward_body<T: Element>(
    fma: impl Fma,
    heads: &HeadMove,
    dy: &[f32],
    dy_columns: usize,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dx: &mut [T],
    x_columns: usize,
) {
    let HeadMove { heads, width, from, to } = *heads;
    let rows = dy.chunks_exact(dy_columns).zip(x.chunks_exact(x_columns)).zip(dx.chunks_exact_mut(x_columns));
    for ((dy, x), dx) in rows {
        for head in 0..heads {
            let first = from.first + head * from.stride;
            let (x, dx) = (&x[first..][..width], &mut dx[first..][..width]);
            let dy = &dy[to.first + head * to.stride..][..width];
            let (inverse, along) = backward_factors(fma, dy, x, weight, eps);
            for (((dx, &dy), &x), &w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                *dx = T::from_f32(fma.fma(dy * w, inverse, -(x * along)));
            }
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
pub(super) fn inverse_rms(fma: impl Fma, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(fma, x, x) / x.len() as f32 + eps).sqrt()
}

/// `x * inverse * weight` of one row.
#[inline(always)]
pub(super) fn normalize<T: Element>(x: &[f32], weight: &[f32], inverse: f32, out: &mut [T]) {
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *out = T::from_f32(x * inverse * w);
    }
}

/// `(r, c)` with which the gradient of one row is `dx = dy * weight * r - x * c`: `r` is the inverse RMS, and `c` takes out
/// the part of the gradient along `x`, which the norm does not see.
#[inline(always)]
pub(super) fn backward_factors(fma: impl Fma, dy: &[f32], x: &[f32], weight: &[f32], eps: f32) -> (f32, f32) {
    let inverse = inverse_rms(fma, x, eps);
    let along = dot3(fma, dy, weight, x);
    (inverse, along * inverse * inverse * inverse / x.len() as f32)
}

#[inline(always)]
fn rms_norm_body<T: Element>(fma: impl Fma, x: &[f32], weight: &[f32], eps: f32, out: &mut [T]) {
    let n = weight.len();
    assert!(x.len() == out.len() && x.len().is_multiple_of(n));
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        normalize(x, weight, inverse_rms(fma, x, eps), out);
    }
}

#[inline(always)]
fn rms_norm_backward_body(fma: impl Fma, dy: &[f32], x: &[f32], weight: &[f32], eps: f32, dx: &mut [f32]) {
    let n = weight.len();
    assert!(x.len() == dy.len() && x.len() == dx.len() && x.len().is_multiple_of(n));
    for ((dy, x), dx) in dy.chunks_exact(n).zip(x.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
        let (inverse, along) = backward_factors(fma, dy, x, weight, eps);
        for (((dx, &dy), &x), &w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
            *dx += fma.fma(dy * w, inverse, -(x * along));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::backend::HeadColumns;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, numeric_gradient, on_every_isa, random};

    const EPS: f32 = 1e-6;

    fn reference(x: &[f64], weight: &[f32]) -> Vec<f64> {
        let n = weight.len();
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|v| v * v).sum::<f64>() / n as f64;
            x.iter().zip(weight).map(|(x, &w)| x / (mean + EPS as f64).sqrt() * w as f64).collect()
        };
        x.chunks(n).flat_map(row).collect()
    }

    #[test]
    fn rms_norm_equals_its_definition() {
        for n in LENGTHS {
            let (x, weight) = (random(3 * n, 1), random(n, 2));
            let expected = reference(&x.iter().map(|&v| v as f64).collect::<Vec<_>>(), &weight);
            on_every_isa(|isa| {
                let mut out = vec![0.0; 3 * n];
                rms_norm(isa, &x, &weight, EPS, &mut out);
                assert_close(&out, &expected, 1e-6, &format!("{isa}, length {n}"));
                let mut narrow = vec![bf16::ZERO; 3 * n];
                rms_norm(isa, &x, &weight, EPS, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    #[test]
    fn the_backward_of_rms_norm_is_its_gradient() {
        for n in [1, 7, 16, 60, 128] {
            let (x, weight, dy, before) = (random(2 * n, 1), random(n, 2), random(2 * n, 3), random(2 * n, 4));
            let loss = |x: &[f64]| reference(x, &weight).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum();
            let gradient = numeric_gradient(loss, &x);
            let expected: Vec<f64> = gradient.iter().zip(&before).map(|(g, &b)| g + b as f64).collect();
            on_every_isa(|isa| {
                let mut dx = before.clone();
                rms_norm_backward(isa, &dy, &x, &weight, EPS, &mut dx);
                assert_close(&dx, &expected, 2e-5, &format!("{isa}, length {n}"));
                dx
            });
        }
    }

    #[test]
    fn heads_within_rows_have_the_bits_of_rows_of_their_own_forward_and_back() {
        let (rows, width) = (3, 20);
        let from = HeadColumns { first: 2, stride: 23 };
        let heads = HeadMove { heads: 2, width, from, to: HeadColumns { first: 0, stride: 21 } };
        let (x, weight, dy) = (random(rows * 50, 1), random(width, 2), random(rows * 42, 3));
        let gather = |values: &[f32], columns: usize, at: HeadColumns| -> Vec<f32> {
            let row = |row: &[f32]| [0, 1].map(|head| row[at.first + head * at.stride..][..width].to_vec()).concat();
            values.chunks(columns).flat_map(row).collect()
        };
        on_every_isa(|isa| {
            let (mut y, mut expected) = (vec![7.0; rows * 42], vec![0.0; rows * 2 * width]);
            norm_heads(isa, &heads, &x, 50, &weight, EPS, &mut y, 42);
            rms_norm(isa, &gather(&x, 50, from), &weight, EPS, &mut expected);
            assert_eq!(gather(&y, 42, heads.to), expected);
            let (mut dx, mut dexpected) = (vec![7.0; x.len()], vec![0.0; expected.len()]);
            norm_heads_backward(isa, &heads, &dy, 42, &x, &weight, EPS, &mut dx, 50);
            rms_norm_backward(isa, &gather(&dy, 42, heads.to), &gather(&x, 50, from), &weight, EPS, &mut dexpected);
            assert_eq!(gather(&dx, 50, from), dexpected);
            assert!(y.chunks(42).all(|row| row[20] == 7.0) && dx.chunks(50).all(|row| row[1] == 7.0 && row[22] == 7.0));
            [y, dx].concat()
        });
    }
}
