//! SwiGLU (Shazeer, 2020, arXiv:2002.05202): `silu(gate) * up`, with `silu(g) = g / (1 + exp(-g))`, in f32.

use super::exp::exp_f32;
use crate::Element;
use crate::cpu::isa::{Fma, multiversion};
use crate::cpu::packed::PANEL;

multiversion! {
    /// `silu(gate) * up` of rows `gate_up: [rows, 2 * n]`, gate first, into `out: [rows, n]`.
    pub(crate) fn swiglu<T: Element>(gate_up: &[f32], n: usize, out: &mut [T]) = swiglu_body;
}

multiversion! {
    /// The same of rows that lie apart, `[gate: 64, up: 64]` each.
    pub(crate) fn swiglu_pairs<T: Element>(gate_up: &[[f32; 2 * PANEL]], out: &mut [&mut [T]]) = swiglu_pairs_body;
}

multiversion! {
    /// The gradient of `gate_up: [rows, 2 * n]` into `dgate_up`, given that of the output, `dy: [rows, n]`.
    pub(crate) fn swiglu_backward<T: Element>(dy: &[f32], gate_up: &[f32], n: usize, dgate_up: &mut [T]) = swiglu_backward_body;
}

#[inline(always)]
fn swiglu_body<T: Element>(fma: impl Fma, gate_up: &[f32], n: usize, out: &mut [T]) {
    assert!(gate_up.len() == 2 * out.len() && out.len().is_multiple_of(n));
    for (gate_up, out) in gate_up.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)) {
        let (gate, up) = gate_up.split_at(n);
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = T::from_f32(gate / (1.0 + exp_f32(fma, -gate)) * up);
        }
    }
}

#[inline(always)]
fn swiglu_pairs_body<T: Element>(fma: impl Fma, gate_up: &[[f32; 2 * PANEL]], out: &mut [&mut [T]]) {
    for (gate_up, out) in gate_up.iter().zip(out) {
        let out: &mut [T; PANEL] = (&mut **out).try_into().expect("a panel");
        swiglu_body(fma, gate_up, PANEL, out);
    }
}

#[inline(always)]
fn swiglu_backward_body<T: Element>(fma: impl Fma, dy: &[f32], gate_up: &[f32], n: usize, dgate_up: &mut [T]) {
    assert!(gate_up.len() == 2 * dy.len() && gate_up.len() == dgate_up.len() && dy.len().is_multiple_of(n));
    let rows = dy.chunks_exact(n).zip(gate_up.chunks_exact(2 * n)).zip(dgate_up.chunks_exact_mut(2 * n));
    for ((dy, gate_up), dgate_up) in rows {
        let (gate, up) = gate_up.split_at(n);
        let (dgate, dup) = dgate_up.split_at_mut(n);
        for ((((dgate, dup), &dy), &gate), &up) in dgate.iter_mut().zip(dup).zip(dy).zip(gate).zip(up) {
            let sigmoid = 1.0 / (1.0 + exp_f32(fma, -gate));
            // d silu / d gate = sigmoid * (1 + gate * (1 - sigmoid)).
            let slope = sigmoid * fma.fma(gate, 1.0 - sigmoid, 1.0);
            *dgate = T::from_f32(dy * up * slope);
            *dup = T::from_f32(dy * (gate * sigmoid));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, numeric_gradient, on_every_isa, random};

    fn reference(gate_up: &[f64], n: usize) -> Vec<f64> {
        let row = |row: &[f64]| -> Vec<f64> { (0..n).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[n + i]).collect() };
        gate_up.chunks(2 * n).flat_map(row).collect()
    }

    #[test]
    fn swiglu_equals_its_definition() {
        for n in LENGTHS {
            let gate_up: Vec<f32> = random(6 * n, 1).iter().map(|v| v * 3.0).collect();
            let expected = reference(&gate_up.iter().map(|&v| v as f64).collect::<Vec<_>>(), n);
            on_every_isa(|isa| {
                let mut out = vec![0.0; 3 * n];
                swiglu(isa, &gate_up, n, &mut out);
                assert_close(&out, &expected, 1e-6, &format!("{isa}, length {n}"));
                let mut narrow = vec![bf16::ZERO; 3 * n];
                swiglu(isa, &gate_up, n, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    #[test]
    fn the_backward_of_swiglu_is_its_gradient() {
        for n in [1, 7, 16, 60, 128] {
            let (gate_up, dy) = (random(4 * n, 1), random(2 * n, 2));
            let loss = |x: &[f64]| reference(x, n).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum();
            let expected = numeric_gradient(loss, &gate_up);
            on_every_isa(|isa| {
                let mut gradient = vec![0.0; 4 * n];
                swiglu_backward(isa, &dy, &gate_up, n, &mut gradient);
                assert_close(&gradient, &expected, 1e-5, &format!("{isa}, length {n}"));
                gradient
            });
        }
    }

    #[test]
    fn far_from_zero_silu_is_zero_or_its_argument() {
        for isa in Isa::available() {
            let (gate_up, mut out, mut gradient) = ([-1000.0, 1000.0, 1.0, 1.0], [9.0; 2], [9.0; 4]);
            swiglu(isa, &gate_up, 2, &mut out);
            swiglu_backward(isa, &[1.0, 1.0], &gate_up, 2, &mut gradient);
            assert_eq!((out, gradient), ([0.0, 1000.0], [0.0, 1.0, 0.0, 1000.0]), "{isa}");
        }
    }
}
