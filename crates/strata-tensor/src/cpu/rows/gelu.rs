//! GELU (Hendrycks & Gimpel, 2016, arXiv:1606.08415) in f32: `x * P(normal < x)`, with the error function or with the tanh that comes close to it.

use std::f32::consts::FRAC_1_SQRT_2;

use super::exp::exp_f32;
use crate::Element;
use crate::backend::Gelu;
use crate::cpu::isa::{Fma, multiversion};

/// `2 * sqrt(2 / pi)`.
const TWICE_ROOT: f32 = 1.595_769;
/// Of the cube in the argument of the tanh.
const CUBE: f32 = 0.044_715;

multiversion! {
    /// `gelu(x)` of every element, into `out` of the same length.
    pub(crate) fn gelu<T: Element>(kind: Gelu, x: &[f32], out: &mut [T]) = gelu_body;
}

#[inline(always)]
fn gelu_body<T: Element>(fma: impl Fma, kind: Gelu, x: &[f32], out: &mut [T]) {
    assert_eq!(x.len(), out.len());
    let all = out.iter_mut().zip(x);
    match kind {
        Gelu::Erf => all.for_each(|(out, &x)| *out = T::from_f32(0.5 * x * (1.0 + erf_f32(fma, x * FRAC_1_SQRT_2)))),
        // `0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2u))`, which has more digits where the tanh is near -1.
        Gelu::Tanh => all.for_each(|(out, &x)| {
            let twice_u = TWICE_ROOT * fma.fma(CUBE * x * x, x, x);
            *out = T::from_f32(x / (1.0 + exp_f32(fma, -twice_u)));
        }),
    }
}

/// The error function to within 2 units in the last place: both branches of N. Juffa's `erff` (stackoverflow.com/a/35148199), one of which is chosen, so that it vectorises.
#[inline(always)]
fn erf_f32(fma: impl Fma, x: f32) -> f32 {
    let (t, s) = (x.abs(), x * x);
    let mut far = fma.fma(-1.728_534_7e-5, t, 3.831_972e-4);
    far = fma.fma(far, s, fma.fma(-3.883_964_4e-3, t, 2.425_462_2e-2));
    far = fma.fma(far, t, -1.067_778_8e-1);
    far = fma.fma(far, t, -6.348_467e-1);
    far = fma.fma(far, t, -1.287_175_1e-1);
    far = fma.fma(far, t, -t);
    let far = (1.0 - exp_f32(fma, far)).copysign(x);
    let mut near = -5.967_617e-4;
    near = fma.fma(near, s, 4.991_194_2e-3);
    near = fma.fma(near, s, -2.676_813_5e-2);
    near = fma.fma(near, s, 1.128_199_25e-1);
    near = fma.fma(near, s, -3.761_253_4e-1);
    near = fma.fma(near, s, 1.283_791_7e-1);
    near = fma.fma(near, x, x);
    if t > 0.927_734_4 { far } else { near }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::on_every_isa;

    multiversion! {
        fn erf_all(values: &mut [f32]) = erf_all_body;
    }

    #[inline(always)]
    fn erf_all_body(fma: impl Fma, values: &mut [f32]) {
        for v in values {
            *v = erf_f32(fma, *v);
        }
    }

    /// `2 / sqrt(pi) * exp(-x^2) * sum of 2^n x^(2n + 1) / (2n + 1)!!`, all of one sign.
    fn erf_reference(x: f64) -> f64 {
        let (mut term, mut sum) = (x, 0.0);
        for n in 1..400 {
            sum += term;
            term *= 2.0 * x * x / (2 * n + 1) as f64;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    fn reference(kind: Gelu, x: f64) -> f64 {
        match kind {
            Gelu::Erf => 0.5 * x * (1.0 + erf_reference(x / 2f64.sqrt())),
            Gelu::Tanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
        }
    }

    /// The distance to the next number from that which is nearest.
    fn unit(x: f64) -> f64 {
        let nearest = (x as f32).abs();
        (f32::from_bits(nearest.to_bits() + 1) - nearest) as f64
    }

    /// Numbers from -12 to 12, and small ones.
    fn values() -> Vec<f32> {
        let small = (0x2000_0000..0x3f00_0000u32).step_by(70_001).map(f32::from_bits);
        (-120_000..120_000).map(|i| i as f32 * 1e-4).chain(small.flat_map(|v| [v, -v])).collect()
    }

    #[test]
    fn erf_is_within_two_units_in_the_last_place() {
        on_every_isa(|isa| {
            let mut actual = values();
            erf_all(isa, &mut actual);
            let mut worst = 0.0f64;
            for (x, &y) in values().into_iter().zip(&actual) {
                let exact = erf_reference(x as f64);
                let error = (y as f64 - exact).abs() / unit(exact);
                assert!(error <= 2.0, "{isa}: erf({x}) is {y}, {error} units from {exact}");
                worst = worst.max(error);
            }
            println!("{isa}: worst error {worst} units");
            actual
        });
    }

    #[test]
    fn gelu_is_within_few_units_of_its_definition() {
        for kind in [Gelu::Erf, Gelu::Tanh] {
            on_every_isa(|isa| {
                let (x, mut out) = (values(), vec![0.0; values().len()]);
                gelu(isa, kind, &x, &mut out);
                let mut worst = 0.0f64;
                for (&x, &y) in x.iter().zip(&out) {
                    let exact = reference(kind, x as f64);
                    // Below zero what is left of `1 + erf` has the digits of a number near one, as in any f32.
                    let error = (y as f64 - exact).abs() / unit(if x > 0.0 { exact } else { x as f64 / 2.0 });
                    assert!(error <= 3.0, "{isa} {kind:?}: gelu({x}) is {y}, {error} units from {exact}");
                    worst = worst.max(error);
                }
                println!("{isa} {kind:?}: worst error {worst} units");
                let mut narrow = vec![bf16::ZERO; out.len()];
                gelu(isa, kind, &x, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    #[test]
    fn far_from_zero_gelu_is_zero_or_its_argument() {
        for (isa, kind) in Isa::available().into_iter().flat_map(|isa| [Gelu::Erf, Gelu::Tanh].map(|kind| (isa, kind))) {
            let x = [-1e30, -1000.0, -20.0, 0.0, 20.0, 1000.0, 1e30, f32::INFINITY, f32::NAN];
            let mut out = [9.0; 9];
            gelu(isa, kind, &x, &mut out);
            assert_eq!(out[..8], [0.0, 0.0, 0.0, 0.0, 20.0, 1000.0, 1e30, f32::INFINITY], "{isa} {kind:?}");
            assert!(out[8].is_nan(), "{isa} {kind:?}");
        }
    }

    #[test]
    fn gelu_is_that_of_torch() {
        // `nn.GELU()` and `nn.GELU(approximate="tanh")` of torch 2.15 in f32.
        let of_torch: [(f32, f32, f32); 11] = [
            (-6.0, 0.0, 0.0),
            (-3.3, -0.001_595_100_7, -0.001_311_269_4),
            (-1.7, -0.075_761_35, -0.075_894_09),
            (-0.75, -0.169_970_51, -0.170_039_47),
            (-0.011, -0.005_451_729, -0.005_451_729),
            (0.002, 0.001_001_595_8, 0.001_001_595_8),
            (0.4, 0.262_168_7, 0.262_161_17),
            (0.93, 0.766_147_43, 0.766_019_5),
            (1.31, 1.185_421_7, 1.185_190_3),
            (1.32, 1.196_688_9, 1.196_456_8),
            (2.6, 2.587_881, 2.588_346),
        ];
        for (x, erf, tanh) in of_torch {
            for (isa, (kind, expected)) in
                Isa::available().into_iter().flat_map(|isa| [(Gelu::Erf, erf), (Gelu::Tanh, tanh)].map(|of| (isa, of)))
            {
                let mut out = [9.0];
                gelu(isa, kind, &[x], &mut out);
                let units = (out[0] - expected).abs() as f64 / unit(if x > 0.0 { expected } else { x / 2.0 } as f64);
                assert!(units <= 3.0, "{isa} {kind:?}: gelu({x}) is {}, not {expected}", out[0]);
            }
        }
    }
}
