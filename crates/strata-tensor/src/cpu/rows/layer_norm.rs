//! LayerNorm (Ba et al., 2016, arXiv:1607.06450): `y = (x - mean) / sqrt(variance + eps) * weight + bias`, in f32. The variance is that of the row itself, the mean
//! of the squares of what is left when the mean is taken out: two passes, for one would lose it where the mean is much larger.

use super::lanes::{squares_about, sum};
use crate::Element;
use crate::cpu::isa::{Fma, multiversion};

multiversion! {
    /// Normalises rows `x: [rows, n]` with `weight: [n]` and `bias: [n]` into `out: [rows, n]`.
    pub(crate) fn layer_norm<T: Element>(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [T]) = layer_norm_body;
}

#[inline(always)]
fn layer_norm_body<T: Element>(fma: impl Fma, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [T]) {
    let n = weight.len();
    assert!(bias.len() == n && x.len() == out.len() && x.len().is_multiple_of(n));
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let mean = sum(x) / n as f32;
        let inverse = 1.0 / (squares_about(fma, x, mean) / n as f32 + eps).sqrt();
        for (((out, &x), &w), &b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
            *out = T::from_f32(fma.fma((x - mean) * inverse, w, b));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, on_every_isa, random};

    const EPS: f32 = 1e-6;

    fn reference(x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f64> {
        let n = weight.len();
        let row = |x: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|&v| v as f64).sum::<f64>() / n as f64;
            let variance = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n as f64;
            let inverse = 1.0 / (variance + EPS as f64).sqrt();
            (0..n).map(|i| (x[i] as f64 - mean) * inverse * weight[i] as f64 + bias[i] as f64).collect()
        };
        x.chunks(n).flat_map(row).collect()
    }

    #[test]
    fn layer_norm_equals_its_definition() {
        for n in LENGTHS {
            let (x, weight, bias) = (random(3 * n, 1), random(n, 2), random(n, 3));
            let expected = reference(&x, &weight, &bias);
            on_every_isa(|isa| {
                let mut out = vec![0.0; 3 * n];
                layer_norm(isa, &x, &weight, &bias, EPS, &mut out);
                assert_close(&out, &expected, 2e-6, &format!("{isa}, length {n}"));
                let mut narrow = vec![bf16::ZERO; 3 * n];
                layer_norm(isa, &x, &weight, &bias, EPS, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    #[test]
    fn a_mean_far_from_zero_does_not_eat_the_variance() {
        let n = 1000;
        let (weight, bias) = (vec![1.0; n], vec![0.0; n]);
        // Of mean square 1e6 and variance 1: in one pass of f32 nothing would be right of it.
        let x: Vec<f32> = random(n, 1).iter().map(|v| v + 1000.0).collect();
        let expected = reference(&x, &weight, &bias);
        on_every_isa(|isa| {
            let mut out = vec![0.0; n];
            layer_norm(isa, &x, &weight, &bias, EPS, &mut out);
            assert_close(&out, &expected, 1e-4, &format!("{isa}"));
            out
        });
    }

    #[test]
    fn a_row_of_one_value_is_the_bias() {
        for isa in Isa::available() {
            let mut out = [0.0; 7];
            layer_norm(isa, &[3.0; 7], &[2.0; 7], &[0.5; 7], EPS, &mut out);
            assert_eq!(out, [0.5; 7], "{isa}");
        }
    }
}
