//! The exponential, as one run of branch-free arithmetic that vectorises wherever it is inlined.
//!
//! `exp(x) = 2^n * exp(r)` with `n = round(x / ln 2)` and `|r| <= ln 2 / 2`, as in Cephes' `expf` (Moshier).

use crate::cpu::isa::Fma;

/// Adding this to a value of moderate size rounds it to an integer, which is then in the low bits of the mantissa.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Below this the result is 0. The last results before it are 1.8e-38, still normal numbers: denormal ones would stall some
/// processors for a hundred cycles each, and masked scores would meet them all the time.
pub(super) const SMALLEST: f32 = -86.9;

/// Past this the result is infinite, also when computed from this value.
pub(super) const LARGEST: f32 = 89.0;

/// `ln 2` in two parts; the first has few enough bits that its product with `n` is exact.
pub(super) const LN_2_HIGH: f32 = 0.693_359_4;
pub(super) const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Of the polynomial that `exp(r)` is, less one and `r`, over `r²`: the coefficient of the highest power first.
pub(super) const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// What makes `n + 126` of the bits of `n + ROUND`: the exponent of `2^(n - 1)`. 2^128 alone is past the largest exponent.
pub(super) const EXPONENT_SHIFT: u32 = 126u32.wrapping_sub(ROUND.to_bits());

/// `e^x` to within 2 units in the last place. 0 below -86.9, infinite where it overflows, NaN of NaN.
#[inline(always)]
pub(crate) fn exp_f32(fma: impl Fma, x: f32) -> f32 {
    let clamped = if x > LARGEST { LARGEST } else { x };
    let shifted = fma.fma(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma.fma(n, -LN_2_LOW, fma.fma(n, -LN_2_HIGH, clamped));

    let mut p = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        p = fma.fma(p, r, *coefficient);
    }
    p = fma.fma(p, r * r, r) + 1.0;

    // 2^n in two factors, 2^(n - 1) and 2.
    let exponent = shifted.to_bits().wrapping_add(EXPONENT_SHIFT);
    let scaled = p * f32::from_bits(exponent << 23) * 2.0;
    if x < SMALLEST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, multiversion};
    use crate::cpu::rows::testing::on_every_isa;

    multiversion! {
        fn exp_all(values: &mut [f32]) = exp_all_body;
    }

    #[inline(always)]
    fn exp_all_body(fma: impl Fma, values: &mut [f32]) {
        for v in values {
            *v = exp_f32(fma, *v);
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut values: Vec<f32> = (0..400_000).map(|i| SMALLEST + i as f32 * ((88.72 - SMALLEST) / 400_000.0)).collect();
        values.extend((0..0x42ae_0000u32).step_by(3001).flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)]));
        values.retain(|&v| (SMALLEST..88.72).contains(&v));
        let mut worst = 0.0f64;
        on_every_isa(|isa| {
            let mut actual = values.clone();
            exp_all(isa, &mut actual);
            for (&x, &y) in values.iter().zip(&actual) {
                let exact = (x as f64).exp();
                let nearest = exact as f32;
                let unit = (f32::from_bits(nearest.to_bits() + 1) - nearest) as f64;
                let error = (y as f64 - exact).abs() / unit;
                assert!(error <= 2.0, "{isa}: exp({x}) is {y}, {error} units from {exact}");
                worst = worst.max(error);
            }
            actual
        });
        println!("worst error: {worst} units");
    }

    #[test]
    fn exp_of_special_values() {
        let cases = [
            (0.0, 1.0),
            (f32::NEG_INFINITY, 0.0),
            (f32::MIN, 0.0),
            (-1e9, 0.0),
            (-88.0, 0.0),
            (88.722_84, f32::INFINITY),
            (89.5, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
        ];
        for isa in Isa::available() {
            let mut values: Vec<f32> = cases.iter().map(|c| c.0).collect();
            exp_all(isa, &mut values);
            assert_eq!(values, cases.map(|c| c.1), "{isa}");
            let mut not_numbers: Vec<f32> = [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0x7f80_0001].map(f32::from_bits).to_vec();
            exp_all(isa, &mut not_numbers);
            assert!(not_numbers.iter().all(|v| v.is_nan()), "{isa}: {not_numbers:?}");
        }
    }
}
