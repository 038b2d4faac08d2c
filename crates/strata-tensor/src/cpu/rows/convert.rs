//! Conversions between element types, sums of rows, and whether there is anything in them.

use crate::Element;
use crate::cpu::isa::{Fma, multiversion};
use crate::cpu::packed::LANES;

multiversion! {
    /// Widens `source` into `out`, of the same length.
    pub(crate) fn to_f32<T: Element>(source: &[T], out: &mut [f32]) = to_f32_body;
}

multiversion! {
    /// `source * scale`, rounded, into `out`, of the same length.
    pub(crate) fn scale<T: Element>(source: &[f32], factor: f32, out: &mut [T]) = scale_body;
}

multiversion! {
    /// `target += source`, of the same length.
    pub(crate) fn add(source: &[f32], target: &mut [f32]) = add_body;
}

multiversion! {
    /// Adds `bias: [n]` to every row of `target: [rows, n]`.
    pub(crate) fn add_bias(bias: &[f32], target: &mut [f32]) = add_bias_body;
}

multiversion! {
    /// Whether there is nothing but zeros, of either sign. Found as soon as there is something else.
    pub(crate) fn is_zero<T: Element>(source: &[T]) -> bool = is_zero_body;
}

#[inline(always)]
fn to_f32_body<T: Element>(_: impl Fma, source: &[T], out: &mut [f32]) {
    assert_eq!(source.len(), out.len());
    for (out, &v) in out.iter_mut().zip(source) {
        *out = v.to_f32();
    }
}

#[inline(always)]
fn scale_body<T: Element>(_: impl Fma, source: &[f32], factor: f32, out: &mut [T]) {
    assert_eq!(source.len(), out.len());
    for (out, &v) in out.iter_mut().zip(source) {
        *out = T::from_f32(v * factor);
    }
}

#[inline(always)]
fn add_body(_: impl Fma, source: &[f32], target: &mut [f32]) {
    assert_eq!(source.len(), target.len());
    for (target, &v) in target.iter_mut().zip(source) {
        *target += v;
    }
}

#[inline(always)]
fn add_bias_body(fma: impl Fma, bias: &[f32], target: &mut [f32]) {
    assert!(target.len().is_multiple_of(bias.len()));
    for row in target.chunks_exact_mut(bias.len()) {
        add_body(fma, bias, row);
    }
}

#[inline(always)]
fn is_zero_body<T: Element>(_: impl Fma, source: &[T]) -> bool {
    // A number of them at a time, so that they are looked at side by side.
    source.chunks(4 * LANES).all(|some| !some.iter().fold(false, |found, v| found | (v.to_f32() != 0.0)))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{LENGTHS, random};

    #[test]
    fn any_number_but_a_zero_is_something() {
        for (isa, n) in Isa::available().into_iter().flat_map(|isa| LENGTHS.map(|n| (isa, n))) {
            let mut numbers: Vec<f32> = (0..n).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect();
            let mut narrow: Vec<bf16> = numbers.iter().copied().map(bf16::from_f32).collect();
            assert!(is_zero(isa, &numbers) && is_zero(isa, &narrow), "{isa}");
            for (i, something) in (0..n).map(|i| (i, [1e-40, f32::NAN, -3.0][i % 3])) {
                let (before, before_narrow) = (numbers[i], narrow[i]);
                (numbers[i], narrow[i]) = (something, bf16::from_f32(something));
                assert!(!is_zero(isa, &numbers) && !is_zero(isa, &narrow), "{isa}: {something} at {i} of {n}");
                (numbers[i], narrow[i]) = (before, before_narrow);
            }
        }
    }

    #[test]
    fn conversions_round_and_widen_every_element() {
        for (isa, n) in Isa::available().into_iter().flat_map(|isa| LENGTHS.map(|n| (isa, n))) {
            let source = random(n, 1);
            let (mut narrow, mut half, mut wide) = (vec![bf16::ZERO; n], vec![bf16::ZERO; n], vec![0.0; n]);
            scale(isa, &source, 1.0, &mut narrow);
            to_f32(isa, &narrow, &mut wide);
            scale(isa, &source, 0.3, &mut half);
            for i in 0..n {
                assert_eq!(narrow[i], bf16::from_f32(source[i]), "{isa}");
                assert_eq!(wide[i], narrow[i].to_f32(), "{isa}");
                assert_eq!(half[i], bf16::from_f32(source[i] * 0.3), "{isa}");
            }
        }
    }

    #[test]
    fn sums_reach_every_element_of_every_row() {
        for (isa, n) in Isa::available().into_iter().flat_map(|isa| LENGTHS.map(|n| (isa, n))) {
            let (before, bias) = (random(3 * n, 1), random(n, 2));
            let (mut rows, mut sum) = (before.clone(), before.clone());
            add_bias(isa, &bias, &mut rows);
            add(isa, &rows, &mut sum);
            for i in 0..3 * n {
                assert_eq!(rows[i], before[i] + bias[i % n], "{isa}");
                assert_eq!(sum[i], before[i] + rows[i], "{isa}");
            }
        }
    }
}
