//! Gates on what attention has found (Qwen3-Next): each number times the sigmoid of its gate, in f32.

use super::exp::exp_f32;
use crate::Element;
use crate::backend::{AttentionGeometry, HeadColumns, QkvLayout};
use crate::cpu::isa::{Fma, multiversion};

/// Where the rows of a projection have the gates of heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gates {
    width: usize,
    heads: usize,
    head_dim: usize,
    columns: HeadColumns,
}

impl Gates {
    /// # Panics
    /// If the layout has no gates.
    pub(crate) fn new(g: &AttentionGeometry, layout: &QkvLayout) -> Self {
        let columns = layout.gate.expect("gates are asked for where there are some");
        Gates { width: layout.width, heads: g.heads, head_dim: g.values.width(), columns }
    }

    /// Where head `i` of the heads of all rows has its gates.
    #[inline(always)]
    fn of(&self, i: usize) -> std::ops::Range<usize> {
        let first = i / self.heads * self.width + self.columns.first + i % self.heads * self.columns.stride;
        first..first + self.head_dim
    }
}

multiversion! {
    /// `attended * sigmoid(gate)` of rows `attended: [rows, heads * head_dim]` into `out`, of their shape; `qkv` is `[rows, width]`.
    pub(crate) fn gate_heads<T: Element>(gates: &Gates, attended: &[T], qkv: &[f32], out: &mut [T]) = gate_heads_body;
}

multiversion! {
    /// The gradients of `attended` and of the gates, which are written to their columns of `dqkv: [rows, width]`, given that of the output.
    pub(crate) fn gate_heads_backward<T: Element>(
        gates: &Gates,
        dy: &[f32],
        attended: &[T],
        qkv: &[f32],
        dattended: &mut [f32],
        dqkv: &mut [T],
    ) = gate_heads_backward_body;
}

#[inline(always)]
fn gate_heads_body<T: Element>(fma: impl Fma, gates: &Gates, attended: &[T], qkv: &[f32], out: &mut [T]) {
    let d = gates.head_dim;
    assert!(attended.len() == out.len() && out.len() * gates.width == qkv.len() * gates.heads * d);
    for (i, (attended, out)) in attended.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
        for ((out, &attended), &gate) in out.iter_mut().zip(attended).zip(&qkv[gates.of(i)]) {
            *out = T::from_f32(attended.to_f32() / (1.0 + exp_f32(fma, -gate)));
        }
    }
}

#[inline(always)]
fn gate_heads_backward_body<T: Element>(
    fma: impl Fma,
    gates: &Gates,
    dy: &[f32],
    attended: &[T],
    qkv: &[f32],
    dattended: &mut [f32],
    dqkv: &mut [T],
) {
    let d = gates.head_dim;
    assert!(attended.len() == dy.len() && dy.len() == dattended.len() && qkv.len() == dqkv.len());
    assert!(dy.len() * gates.width == qkv.len() * gates.heads * d);
    let heads = dy.chunks_exact(d).zip(attended.chunks_exact(d)).zip(dattended.chunks_exact_mut(d));
    for (i, ((dy, attended), dattended)) in heads.enumerate() {
        let (gate, dgate) = (&qkv[gates.of(i)], &mut dqkv[gates.of(i)]);
        for ((((dattended, dgate), &dy), &attended), &gate) in dattended.iter_mut().zip(dgate).zip(dy).zip(attended).zip(gate) {
            let sigmoid = 1.0 / (1.0 + exp_f32(fma, -gate));
            *dattended = dy * sigmoid;
            *dgate = T::from_f32(dy * attended.to_f32() * (sigmoid * (1.0 - sigmoid)));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::KvValues;
    use crate::backend::Sight;
    use crate::cpu::rows::testing::{assert_close, numeric_gradient, on_every_isa, random};

    const ROWS: usize = 3;

    /// The definition, with a gate right behind each query.
    fn reference(gates: &Gates, attended: &[f64], qkv: &[f64]) -> Vec<f64> {
        let (d, heads) = (gates.head_dim, gates.heads);
        let gate = |i: usize| qkv[i / (heads * d) * gates.width + (i / d % heads) * 2 * d + d + i % d];
        attended.iter().enumerate().map(|(i, a)| a / (1.0 + (-gate(i)).exp())).collect()
    }

    fn with_gates(check: impl Fn(&Gates, Vec<f32>, Vec<f32>)) {
        for head_dim in [2, 16, 37, 64] {
            let values = KvValues::Own(head_dim);
            let g = AttentionGeometry {
                heads: 3,
                kv_heads: 1,
                head_dim,
                values,
                scale: 1.0,
                eps: 0.0,
                window: None,
                sees: Sight::Before,
            };
            let gates = Gates::new(&g, &QkvLayout::gated(&g, 2));
            check(&gates, random(ROWS * 3 * head_dim, 1), random(ROWS * gates.width, 2));
        }
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|&v| v as f64).collect()
    }

    #[test]
    fn heads_are_multiplied_with_the_sigmoid_of_their_gates() {
        with_gates(|gates, attended, qkv| {
            let expected = reference(gates, &wide(&attended), &wide(&qkv));
            on_every_isa(|isa| {
                let mut out = vec![0.0; attended.len()];
                gate_heads(isa, gates, &attended, &qkv, &mut out);
                assert_close(&out, &expected, 1e-6, &format!("{isa} {gates:?}"));
                let narrow: Vec<bf16> = attended.iter().map(|&v| bf16::from_f32(v)).collect();
                let (again, mut narrow_out) = (narrow.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), narrow.clone());
                gate_heads(isa, gates, &narrow, &qkv, &mut narrow_out);
                let mut wide_out = again.clone();
                gate_heads(isa, gates, &again, &qkv, &mut wide_out);
                assert!(narrow_out.iter().zip(&wide_out).all(|(n, &w)| *n == bf16::from_f32(w)));
                out
            });
        });
    }

    #[test]
    fn the_backward_of_gates_is_their_gradient_and_leaves_other_columns_alone() {
        with_gates(|gates, attended, qkv| {
            let dy = random(attended.len(), 3);
            let loss = |attended: &[f64], qkv: &[f64]| -> f64 {
                reference(gates, attended, qkv).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum()
            };
            let by_attended = numeric_gradient(|x| loss(x, &wide(&qkv)), &attended);
            let by_qkv = numeric_gradient(|x| loss(&wide(&attended), x), &qkv);
            on_every_isa(|isa| {
                let (mut dattended, mut dqkv) = (vec![0.0; attended.len()], vec![7.0; qkv.len()]);
                gate_heads_backward(isa, gates, &dy, &attended, &qkv, &mut dattended, &mut dqkv);
                assert_close(&dattended, &by_attended, 1e-5, &format!("{isa} {gates:?}"));
                let is_gate: Vec<bool> =
                    (0..qkv.len()).map(|i| (0..ROWS * 3).any(|head| gates.of(head).contains(&i))).collect();
                assert!(dqkv.iter().zip(&is_gate).all(|(&g, &is_gate)| is_gate || g == 7.0));
                dqkv.iter_mut().zip(is_gate).for_each(|(g, is_gate)| *g = if is_gate { *g } else { 0.0 });
                assert_close(&dqkv, &by_qkv, 1e-5, &format!("{isa} {gates:?}"));
                [dattended, dqkv].concat()
            });
        });
    }
}
