//! The optimizer's sweeps. AdamW reads 16 bytes and writes 16 per parameter, which is what bounds it.

use super::lanes::{LANES, filled};
use crate::AdamwStep;
use crate::cpu::isa::{Fma, multiversion};

/// Partial sums of squares.
const WIDE: usize = 4 * LANES;

/// What one step multiplies by, from [`AdamwStep`]: the same for all parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamwFactors {
    gradient_scale: f32,
    /// `1 - learning_rate * weight_decay`.
    keep: f32,
    /// Of the change from momentum to gradient, what is added to the nearer of the two, so that its rounding is no larger than theirs: `1 - beta1` or `-beta1`.
    m_weight: f32,
    /// Whether that is the gradient.
    is_nearer_gradient: bool,
    beta2: f32,
    /// `1 - beta2`.
    v_weight: f32,
    /// `learning_rate / (1 - beta1^step)`.
    step_size: f32,
    /// `sqrt(1 - beta2^step)`.
    root_correction: f32,
    eps: f32,
}

impl AdamwFactors {
    /// The factors, computed in f64.
    pub(crate) fn new(step: &AdamwStep) -> Self {
        let (beta1, beta2, rate) = (step.beta1, step.beta2, step.learning_rate);
        let count = step.step as f64;
        AdamwFactors {
            gradient_scale: step.gradient_scale,
            keep: (1.0 - rate * step.weight_decay) as f32,
            m_weight: if beta1 > 0.5 { 1.0 - beta1 } else { -beta1 } as f32,
            is_nearer_gradient: beta1 <= 0.5,
            beta2: beta2 as f32,
            v_weight: (1.0 - beta2) as f32,
            step_size: (rate / (1.0 - beta1.powf(count))) as f32,
            root_correction: (1.0 - beta2.powf(count)).sqrt() as f32,
            eps: step.eps as f32,
        }
    }
}

multiversion! {
    /// One step over slices of equal length, as `torch.optim.AdamW` takes it; clears `gradient`.
    pub(crate) fn adamw(
        factors: &AdamwFactors,
        weights: &mut [f32],
        gradient: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
    ) = adamw_body;
}

multiversion! {
    /// Sum of squares in f64. Its order is fixed by the length alone, so a caller who adds up pieces of a tensor must cut them
    /// in the same places whatever the number of threads.
    pub(crate) fn sum_squares(values: &[f32]) -> f64 = sum_squares_body;
}

#[inline(always)]
fn adamw_body(fma: impl Fma, factors: &AdamwFactors, weights: &mut [f32], gradient: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let f = *factors;
    assert!(weights.len() == gradient.len() && weights.len() == m.len() && weights.len() == v.len());
    for (((weight, gradient), m), v) in weights.iter_mut().zip(gradient).zip(m).zip(v) {
        let g = *gradient * f.gradient_scale;
        *gradient = 0.0;
        *m = fma.fma(f.m_weight, g - *m, if f.is_nearer_gradient { g } else { *m });
        *v = fma.fma(f.v_weight * g, g, f.beta2 * *v);
        let denominator = v.sqrt() / f.root_correction + f.eps;
        *weight = fma.fma(-f.step_size, *m / denominator, *weight * f.keep);
    }
}

#[inline(always)]
fn sum_squares_body(_: impl Fma, values: &[f32]) -> f64 {
    // The square of an f32 is exact in f64: fused or not, the bits are the same.
    let mut sums = [0.0f64; WIDE];
    let (chunks, tail) = values.as_chunks::<WIDE>();
    for chunk in chunks {
        for l in 0..WIDE {
            sums[l] += chunk[l] as f64 * chunk[l] as f64;
        }
    }
    let tail = filled::<WIDE>(tail, 0.0);
    for l in 0..WIDE {
        sums[l] += tail[l] as f64 * tail[l] as f64;
    }
    let mut width = WIDE / 2;
    while width > 0 {
        for l in 0..width {
            sums[l] += sums[l + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, on_every_isa, random};

    #[test]
    fn five_steps_follow_the_published_algorithm() {
        let mut step = AdamwStep {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            gradient_scale: 0.5,
            step: 0,
        };
        for n in LENGTHS {
            let start = random(n, 1);
            on_every_isa(|isa| {
                let (mut weights, mut m, mut v) = (start.clone(), vec![0.0; n], vec![0.0; n]);
                let mut expected: Vec<f64> = start.iter().map(|&w| w as f64).collect();
                let (mut m_expected, mut v_expected) = (vec![0.0f64; n], vec![0.0f64; n]);
                for t in 1..=5 {
                    step.step = t;
                    let mut gradient = random(n, 10 + t);
                    for i in 0..n {
                        let g = gradient[i] as f64 * 0.5;
                        let (b1, b2) = (step.beta1, step.beta2);
                        expected[i] *= 1.0 - 1e-2 * 0.1;
                        m_expected[i] = b1 * m_expected[i] + (1.0 - b1) * g;
                        v_expected[i] = b2 * v_expected[i] + (1.0 - b2) * g * g;
                        let (m_hat, v_hat) =
                            (m_expected[i] / (1.0 - b1.powi(t as i32)), v_expected[i] / (1.0 - b2.powi(t as i32)));
                        expected[i] -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
                    }
                    adamw(isa, &AdamwFactors::new(&step), &mut weights, &mut gradient, &mut m, &mut v);
                    assert!(gradient.iter().all(|&g| g == 0.0));
                }
                let context = format!("{isa}, length {n}");
                assert_close(&weights, &expected, 1e-6, &context);
                assert_close(&m, &m_expected, 1e-6, &context);
                assert_close(&v, &v_expected, 1e-6, &context);
                weights
            });
        }
    }

    #[test]
    fn a_small_gradient_behind_a_large_one_is_not_lost_to_rounding() {
        let mut step = AdamwStep {
            learning_rate: 1e-2,
            beta1: 0.0,
            beta2: 0.0,
            eps: 0.0,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            step: 0,
        };
        let large = random(65, 1);
        for beta1 in [0.0, 0.3, 0.5] {
            step.beta1 = beta1;
            on_every_isa(|isa| {
                let (mut weights, mut m, mut v) = (vec![0.0; 65], vec![0.0; 65], vec![0.0; 65]);
                for (t, scale) in [(1, 1.0f32), (2, 1e-9)] {
                    step.step = t;
                    let mut gradient: Vec<f32> = large.iter().map(|g| g * scale).collect();
                    let expected: Vec<f64> = gradient
                        .iter()
                        .zip(&m)
                        .map(|(&g, &m): (&f32, &f32)| beta1 * m as f64 + (1.0 - beta1) * g as f64)
                        .collect();
                    adamw(isa, &AdamwFactors::new(&step), &mut weights, &mut gradient, &mut m, &mut v);
                    for (m, expected) in m.iter().zip(expected) {
                        assert!(
                            (*m as f64 - expected).abs() <= 2e-7 * expected.abs(),
                            "{isa}, beta1 {beta1}: {m}, not {expected}"
                        );
                    }
                }
                m.clone()
            });
        }
    }

    #[test]
    fn sums_of_squares_are_the_same_bits_on_every_instruction_set() {
        for n in LENGTHS {
            let values = random(n, 1);
            let expected: f64 = values.iter().map(|&v| v as f64 * v as f64).sum();
            let portable = sum_squares(Isa::Portable, &values);
            assert!((portable - expected).abs() <= 1e-12 * expected);
            for isa in Isa::available() {
                assert_eq!(sum_squares(isa, &values).to_bits(), portable.to_bits(), "{isa}");
            }
        }
    }
}
