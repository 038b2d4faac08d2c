//! What lies between the two products of an expert, and after them: gated activations times the weight of a choice, and sums of outputs.

use super::exp::exp_f32;
use super::lanes::{LANES, tree};
use crate::cpu::isa::{Fma, multiversion};
use crate::{Element, ExpertActivation};

multiversion! {
    /// `weight · activation` of rows `gate_up: [rows, 2 * n]` with `weights: [rows]`, into `out: [rows, n]`.
    pub(crate) fn activate<T: Element>(activation: ExpertActivation, gate_up: &[f32], weights: &[f32], n: usize, out: &mut [T]) = activate_body;
}

multiversion! {
    /// The gradients of `gate_up` and of the weights, given that of the output, `dy: [rows, n]`.
    pub(crate) fn activate_backward<T: Element>(
        activation: ExpertActivation,
        dy: &[f32],
        gate_up: &[f32],
        weights: &[f32],
        n: usize,
        dgate_up: &mut [T],
        dweights: &mut [f32],
    ) = activate_backward_body;
}

multiversion! {
    /// `target += factor * source`, of the same length.
    pub(crate) fn add_scaled(source: &[f32], factor: f32, target: &mut [f32]) = add_scaled_body;
}

multiversion! {
    /// `Σ a * b`, of the same length.
    pub(crate) fn dot<T: Element>(a: &[T], b: &[f32]) -> f32 = dot_body;
}

multiversion! {
    /// `sigmoid(gate) * x` of rows `x: [rows, n]` with `gates: [rows]`, into `out`.
    pub(crate) fn sigmoid_gate<T: Element>(x: &[f32], gates: &[f32], n: usize, out: &mut [T]) = sigmoid_gate_body;
}

multiversion! {
    /// The gradients of `x` and of the gates, given that of the output.
    pub(crate) fn sigmoid_gate_backward(dy: &[f32], x: &[f32], gates: &[f32], n: usize, dx: &mut [f32], dgates: &mut [f32]) = sigmoid_gate_backward_body;
}

/// The arithmetic of an activation.
trait Gate: Copy {
    fn value(self, fma: impl Fma, gate: f32, up: f32) -> f32;
    /// The value, and its slopes by gate and up.
    fn slopes(self, fma: impl Fma, gate: f32, up: f32) -> [f32; 3];
}

#[derive(Clone, Copy)]
struct SwiGlu;

impl Gate for SwiGlu {
    #[inline(always)]
    fn value(self, fma: impl Fma, gate: f32, up: f32) -> f32 {
        gate / (1.0 + exp_f32(fma, -gate)) * up
    }

    #[inline(always)]
    fn slopes(self, fma: impl Fma, gate: f32, up: f32) -> [f32; 3] {
        let sigmoid = 1.0 / (1.0 + exp_f32(fma, -gate));
        let silu = gate * sigmoid;
        [silu * up, up * (sigmoid * fma.fma(gate, 1.0 - sigmoid, 1.0)), silu]
    }
}

#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Gate for Clamped {
    #[inline(always)]
    fn value(self, fma: impl Fma, gate: f32, up: f32) -> f32 {
        let (gate, up) = self.clamped(gate, up);
        gate / (1.0 + exp_f32(fma, -self.alpha * gate)) * (up + 1.0)
    }

    #[inline(always)]
    fn slopes(self, fma: impl Fma, gate: f32, up: f32) -> [f32; 3] {
        let (clamped, up_clamped) = self.clamped(gate, up);
        let sigmoid = 1.0 / (1.0 + exp_f32(fma, -self.alpha * clamped));
        let glu = clamped * sigmoid;
        let by_gate = (up_clamped + 1.0) * (sigmoid * fma.fma(self.alpha * clamped, 1.0 - sigmoid, 1.0));
        // As torch has it: at the limit itself a clamp passes the gradient on.
        let by_gate = if gate > self.limit { 0.0 } else { by_gate };
        let by_up = if up > self.limit || up < -self.limit { 0.0 } else { glu };
        [glu * (up_clamped + 1.0), by_gate, by_up]
    }
}

impl Clamped {
    /// NaN stays NaN.
    #[inline(always)]
    fn clamped(self, gate: f32, up: f32) -> (f32, f32) {
        let gate = if gate > self.limit { self.limit } else { gate };
        let up = if up > self.limit { self.limit } else { up };
        (gate, if up < -self.limit { -self.limit } else { up })
    }
}

/// Gate and up of features `first..first + count`, at most [`LANES`], of a row that has all of gate first; zeros for those that there are none of.
#[inline(always)]
fn load(row: &[f32], first: usize, count: usize) -> [[f32; LANES]; 2] {
    let mut block = [[0.0; LANES]; 2];
    let (gate, up) = row.split_at(row.len() / 2);
    block[0][..count].copy_from_slice(&gate[first..first + count]);
    block[1][..count].copy_from_slice(&up[first..first + count]);
    block
}

/// As [`load`], the other way.
#[inline(always)]
fn store<T: Element>(block: &[[f32; LANES]; 2], row: &mut [T], first: usize, count: usize) {
    let (gate, up) = row.split_at_mut(row.len() / 2);
    for ((gate, up), l) in gate[first..first + count].iter_mut().zip(&mut up[first..first + count]).zip(0..) {
        (*gate, *up) = (T::from_f32(block[0][l]), T::from_f32(block[1][l]));
    }
}

#[inline(always)]
fn activate_body<T: Element>(
    fma: impl Fma,
    activation: ExpertActivation,
    gate_up: &[f32],
    weights: &[f32],
    n: usize,
    out: &mut [T],
) {
    match activation {
        ExpertActivation::SwiGlu => activate_with(fma, SwiGlu, gate_up, weights, n, out),
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            activate_with(fma, Clamped { alpha, limit }, gate_up, weights, n, out)
        }
    }
}

#[inline(always)]
fn activate_with<G: Gate, T: Element>(fma: impl Fma, g: G, gate_up: &[f32], weights: &[f32], n: usize, out: &mut [T]) {
    assert!(gate_up.len() == 2 * out.len() && out.len() == weights.len() * n);
    let whole = n / LANES * LANES;
    for ((gate_up, out), &weight) in gate_up.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)).zip(weights) {
        for first in (0..whole).step_by(LANES) {
            activate_lanes(fma, g, gate_up, weight, first, &mut out[first..first + LANES]);
        }
        if whole < n {
            activate_lanes(fma, g, gate_up, weight, whole, &mut out[whole..]);
        }
    }
}

/// Features from `first` on, at most [`LANES`]. Whoever has so many says so with a constant.
#[inline(always)]
fn activate_lanes<G: Gate, T: Element>(fma: impl Fma, g: G, gate_up: &[f32], weight: f32, first: usize, out: &mut [T]) {
    let [gate, up] = load(gate_up, first, out.len());
    let mut values = [0.0; LANES];
    for l in 0..LANES {
        values[l] = weight * g.value(fma, gate[l], up[l]);
    }
    out.iter_mut().zip(&values).for_each(|(out, &value)| *out = T::from_f32(value));
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn activate_backward_body<T: Element>(
    fma: impl Fma,
    activation: ExpertActivation,
    dy: &[f32],
    gate_up: &[f32],
    weights: &[f32],
    n: usize,
    dgate_up: &mut [T],
    dweights: &mut [f32],
) {
    match activation {
        ExpertActivation::SwiGlu => backward_with(fma, SwiGlu, dy, gate_up, weights, n, dgate_up, dweights),
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            backward_with(fma, Clamped { alpha, limit }, dy, gate_up, weights, n, dgate_up, dweights)
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn backward_with<G: Gate, T: Element>(
    fma: impl Fma,
    g: G,
    dy: &[f32],
    gate_up: &[f32],
    weights: &[f32],
    n: usize,
    dgate_up: &mut [T],
    dweights: &mut [f32],
) {
    assert!(gate_up.len() == 2 * dy.len() && gate_up.len() == dgate_up.len());
    assert!(dy.len() == weights.len() * n && dweights.len() == weights.len());
    let rows = dy.chunks_exact(n).zip(gate_up.chunks_exact(2 * n)).zip(dgate_up.chunks_exact_mut(2 * n));
    let whole = n / LANES * LANES;
    for (((dy, gate_up), dgate_up), (&weight, dweight)) in rows.zip(weights.iter().zip(dweights)) {
        let mut sums = [0.0; LANES];
        for first in (0..whole).step_by(LANES) {
            backward_lanes(fma, g, &dy[first..first + LANES], gate_up, weight, first, dgate_up, &mut sums);
        }
        if whole < n {
            backward_lanes(fma, g, &dy[whole..], gate_up, weight, whole, dgate_up, &mut sums);
        }
        *dweight = tree(sums);
    }
}

/// As [`activate_lanes`]; adds what the gradient of the weight is a sum of.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn backward_lanes<G: Gate, T: Element>(
    fma: impl Fma,
    g: G,
    dy: &[f32],
    gate_up: &[f32],
    weight: f32,
    first: usize,
    dgate_up: &mut [T],
    sums: &mut [f32; LANES],
) {
    let [gate, up] = load(gate_up, first, dy.len());
    let mut d = [0.0; LANES];
    d[..dy.len()].copy_from_slice(dy);
    let mut slopes = [[0.0; LANES]; 2];
    for l in 0..LANES {
        let [value, by_gate, by_up] = g.slopes(fma, gate[l], up[l]);
        sums[l] = fma.fma(d[l], value, sums[l]);
        (slopes[0][l], slopes[1][l]) = (d[l] * weight * by_gate, d[l] * weight * by_up);
    }
    store(&slopes, dgate_up, first, dy.len());
}

#[inline(always)]
fn add_scaled_body(fma: impl Fma, source: &[f32], factor: f32, target: &mut [f32]) {
    assert_eq!(source.len(), target.len());
    for (target, &v) in target.iter_mut().zip(source) {
        *target = fma.fma(factor, v, *target);
    }
}

#[inline(always)]
fn dot_body<T: Element>(fma: impl Fma, a: &[T], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            sums[l] = fma.fma(a[l].to_f32(), b[l], sums[l]);
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum = fma.fma(a.to_f32(), *b, *sum);
    }
    tree(sums)
}

#[inline(always)]
fn sigmoid_gate_body<T: Element>(fma: impl Fma, x: &[f32], gates: &[f32], n: usize, out: &mut [T]) {
    assert!(x.len() == gates.len() * n && out.len() == x.len());
    for ((x, out), &gate) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)).zip(gates) {
        let sigmoid = 1.0 / (1.0 + exp_f32(fma, -gate));
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = T::from_f32(sigmoid * x));
    }
}

#[inline(always)]
fn sigmoid_gate_backward_body(
    fma: impl Fma,
    dy: &[f32],
    x: &[f32],
    gates: &[f32],
    n: usize,
    dx: &mut [f32],
    dgates: &mut [f32],
) {
    assert!(x.len() == gates.len() * n && dy.len() == x.len() && dx.len() == x.len() && dgates.len() == gates.len());
    let rows = dy.chunks_exact(n).zip(x.chunks_exact(n)).zip(dx.chunks_exact_mut(n));
    for (((dy, x), dx), (&gate, dgate)) in rows.zip(gates.iter().zip(dgates)) {
        let sigmoid = 1.0 / (1.0 + exp_f32(fma, -gate));
        dx.iter_mut().zip(dy).for_each(|(dx, &dy)| *dx = sigmoid * dy);
        *dgate = super::lanes::dot(fma, dy, x) * (sigmoid * (1.0 - sigmoid));
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::rows::testing::{LENGTHS, assert_close, numeric_gradient, on_every_isa, random};

    /// With a limit that many of the inputs are past.
    const ACTIVATIONS: [ExpertActivation; 2] =
        [ExpertActivation::SwiGlu, ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 1.5 }];

    fn reference(activation: ExpertActivation, gate_up: &[f64], weights: &[f64], n: usize) -> Vec<f64> {
        let value = |row: &[f64], i: usize| match activation {
            ExpertActivation::SwiGlu => row[i] / (1.0 + (-row[i]).exp()) * row[n + i],
            ExpertActivation::ClampedSwiGlu { alpha, limit } => {
                let (alpha, limit) = (alpha as f64, limit as f64);
                let (gate, up) = (row[i].min(limit), row[n + i].clamp(-limit, limit));
                (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
            }
        };
        let rows = gate_up.chunks(2 * n).zip(weights);
        rows.flat_map(|(row, w)| (0..n).map(|i| w * value(row, i)).collect::<Vec<_>>()).collect()
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|&v| v as f64).collect()
    }

    #[test]
    fn activations_equal_their_definitions() {
        for (activation, n) in ACTIVATIONS.into_iter().flat_map(|a| LENGTHS.map(|n| (a, n))) {
            let gate_up: Vec<f32> = random(6 * n, 1).iter().map(|v| v * 3.0).collect();
            let weights = [0.5, -2.0, 0.0];
            let expected = reference(activation, &wide(&gate_up), &wide(&weights), n);
            on_every_isa(|isa| {
                let mut out = vec![f32::NAN; 3 * n];
                activate(isa, activation, &gate_up, &weights, n, &mut out);
                assert_close(&out, &expected, 1e-6, &format!("{isa}, {activation:?}, length {n}"));
                let mut narrow = vec![bf16::ZERO; 3 * n];
                activate(isa, activation, &gate_up, &weights, n, &mut narrow);
                assert!(narrow.iter().zip(&out).all(|(a, &b)| *a == bf16::from_f32(b)));
                out
            });
        }
    }

    #[test]
    fn the_backward_of_activations_is_their_gradient() {
        for (activation, n) in ACTIVATIONS.into_iter().flat_map(|a| [1, 7, 16, 60].map(|n| (a, n))) {
            let (gate_up, weights, dy) = (random(4 * n, 1), random(2, 2), random(2 * n, 3));
            let weigh = |y: Vec<f64>| y.iter().zip(&dy).map(|(y, &g)| y * g as f64).sum::<f64>();
            let by_gate_up = numeric_gradient(|x| weigh(reference(activation, x, &wide(&weights), n)), &gate_up);
            let by_weights = numeric_gradient(|w| weigh(reference(activation, &wide(&gate_up), w, n)), &weights);
            on_every_isa(|isa| {
                let (mut dgate_up, mut dweights) = (vec![f32::NAN; 4 * n], vec![f32::NAN; 2]);
                activate_backward(isa, activation, &dy, &gate_up, &weights, n, &mut dgate_up, &mut dweights);
                let context = format!("{isa}, {activation:?}, length {n}");
                assert_close(&dgate_up, &by_gate_up, 1e-5, &context);
                assert_close(&dweights, &by_weights, 1e-5, &context);
                [dgate_up, dweights].concat()
            });
        }
    }

    #[test]
    fn a_clamped_activation_passes_gradients_up_to_its_limit_and_no_further() {
        let activation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        on_every_isa(|isa| {
            let gate_up = [7.0, 7.5, 1.0, 1.0, 1.0, 1.0, 1.0, -7.0, -7.5, 8.0];
            let (mut dgate_up, mut dweights) = ([f32::NAN; 10], [f32::NAN]);
            activate_backward(isa, activation, &[1.0; 5], &gate_up, &[1.0], 5, &mut dgate_up, &mut dweights);
            let passes = [true, false, true, true, true, true, true, true, false, false];
            assert!(dgate_up.iter().zip(passes).all(|(&d, passes)| (d != 0.0) == passes), "{isa}: {dgate_up:?}");
            dgate_up.to_vec()
        });
    }

    #[test]
    fn sums_of_outputs_and_gates_equal_their_definitions() {
        for n in LENGTHS {
            let (x, y, gates) = (random(2 * n, 1), random(2 * n, 2), random(2, 3));
            let sigmoid = |g: f64| 1.0 / (1.0 + (-g).exp());
            let gated = |x: &[f64], gates: &[f64]| -> Vec<f64> { (0..2 * n).map(|i| sigmoid(gates[i / n]) * x[i]).collect() };
            let weigh = |gated: Vec<f64>| gated.iter().zip(&y).map(|(v, &g)| v * g as f64).sum::<f64>();
            let by_x = numeric_gradient(|x| weigh(gated(x, &wide(&gates))), &x);
            let by_gates = numeric_gradient(|g| weigh(gated(&wide(&x), g)), &gates);
            on_every_isa(|isa| {
                let mut sum = y.clone();
                add_scaled(isa, &x, 0.3, &mut sum);
                let expected: Vec<f64> = x.iter().zip(&y).map(|(&x, &y)| 0.3f32 as f64 * x as f64 + y as f64).collect();
                assert_close(&sum, &expected, 1e-6, &format!("{isa}, length {n}"));
                let narrow: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
                let product = narrow.iter().zip(&y).map(|(a, &b)| a.to_f64() * b as f64).sum();
                assert_close(&[dot(isa, &narrow, &y)], &[product], 1e-5, &format!("{isa}, length {n}"));
                let (mut out, mut dx, mut dgates) = (vec![f32::NAN; 2 * n], vec![f32::NAN; 2 * n], vec![f32::NAN; 2]);
                sigmoid_gate(isa, &x, &gates, n, &mut out);
                sigmoid_gate_backward(isa, &y, &x, &gates, n, &mut dx, &mut dgates);
                assert_close(&out, &gated(&wide(&x), &wide(&gates)), 1e-6, &format!("{isa}, length {n}"));
                assert_close(&dx, &by_x, 1e-5, &format!("{isa}, length {n}"));
                assert_close(&dgates, &by_gates, 2e-5, &format!("{isa}, length {n}"));
                [sum, out, dx, dgates].concat()
            });
        }
    }
}
