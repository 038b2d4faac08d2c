//! What the tests of row operations share.

use crate::cpu::isa::Isa;
use crate::random::normal;

/// Lengths of rows: shorter than a register, not a multiple of one, and those of models.
pub(super) const LENGTHS: [usize; 7] = [1, 7, 16, 60, 128, 1000, 1024];

/// Standard normal values.
pub(super) fn random(n: usize, key: u64) -> Vec<f32> {
    (0..n as u64).map(|i| normal([key, 0], i)).collect()
}

/// Checks every element against a reference, relative to values of the size of one.
#[track_caller]
pub(super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, context: &str) {
    assert_eq!(actual.len(), expected.len(), "{context}");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!((a as f64 - e).abs() <= tolerance * (1.0 + e.abs()), "{context}: element {i} is {a}, not {e}");
    }
}

/// Runs `compute` on every instruction set and checks that those with fused multiply-add agree on every bit.
pub(super) fn on_every_isa(mut compute: impl FnMut(Isa) -> Vec<f32>) {
    let mut fused: Option<Vec<u32>> = None;
    for isa in Isa::available() {
        let bits: Vec<u32> = compute(isa).into_iter().map(f32::to_bits).collect();
        if isa != Isa::Portable {
            assert_eq!(fused.get_or_insert_with(|| bits.clone()), &bits, "{isa}");
        }
    }
}

/// The gradient of `loss` at `point` by central differences.
pub(super) fn numeric_gradient(loss: impl Fn(&[f64]) -> f64, point: &[f32]) -> Vec<f64> {
    let mut point: Vec<f64> = point.iter().map(|&v| v as f64).collect();
    (0..point.len())
        .map(|i| {
            let (center, step) = (point[i], 1e-5);
            let mut at = |value| {
                point[i] = value;
                loss(&point)
            };
            let slope = (at(center + step) - at(center - step)) / (2.0 * step);
            point[i] = center;
            slope
        })
        .collect()
}
