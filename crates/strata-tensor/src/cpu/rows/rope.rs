//! What happens to the output of the QKV projection before attention: RMSNorm of each head of q and k where a model has it
//! (Qwen3), and rotary positions (Su et al., 2021, arXiv:2104.09864), with the halves of a head rotated against each other as
//! Hugging Face's `rotate_half` does, or its neighbours, or of a part of a head.

use std::ops::Range;

use super::lanes::LANES;
use super::norm::{backward_factors, inverse_rms, normalize};
use crate::Element;
use crate::backend::{AxisFrequency, HeadColumns, HeadMove, QkvLayout, RotaryStyle, Turn};
use crate::cpu::isa::{Fma, multiversion};
use crate::cpu::packed::PANEL;

/// The largest head that the kernels' scratch on the stack has room for.
pub(crate) const MAX_HEAD_DIM: usize = 1024;
/// Elements of a head that is two panels of a product.
const PAIR_HEAD_DIM: usize = 2 * PANEL;

/// Cosines and sines of the positions of `tokens` times `factor`, both `[tokens, turns]`; each axis has a position for every token of the batch. The angle is an f32
/// product, as in the reference; its cosine and sine are rounded once, and so is their product with the factor.
pub(crate) fn angles(
    positions: &[&[u32]],
    tokens: Range<usize>,
    turns: &[AxisFrequency],
    factor: f32,
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let half = turns.len();
    assert!(cos.len() == tokens.len() * half && sin.len() == cos.len());
    for ((token, cos), sin) in tokens.zip(cos.chunks_exact_mut(half.max(1))).zip(sin.chunks_exact_mut(half.max(1))) {
        for ((turn, cos), sin) in turns.iter().zip(cos).zip(sin) {
            let (s, c) = ((positions[turn.axis][token] as f32 * turn.frequency) as f64).sin_cos();
            (*cos, *sin) = (c as f32 * factor, s as f32 * factor);
        }
    }
}

/// How a row of `qkv: [rows, layout.width]` splits into heads, and what is done to them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QkvNormRope<'a> {
    /// Where they are, and what of them is rotated.
    pub(crate) layout: QkvLayout,
    /// Heads of q.
    pub(crate) heads: usize,
    /// Heads of k and of v.
    pub(crate) kv_heads: usize,
    /// Elements of a head, at most [`MAX_HEAD_DIM`].
    pub(crate) head_dim: usize,
    /// Elements of a value.
    pub(crate) value_dim: usize,
    /// Weight of the norm of q's heads, `[head_dim]`.
    pub(crate) q_norm: Option<&'a [f32]>,
    /// Weight of the norm of k's heads, `[head_dim]`.
    pub(crate) k_norm: Option<&'a [f32]>,
    /// Added to the mean square in both norms.
    pub(crate) eps: f32,
    /// Cosines of each row's position, `[rows, rotary_dim / 2]`.
    pub(crate) cos: &'a [f32],
    /// Sines of each row's position, `[rows, rotary_dim / 2]`.
    pub(crate) sin: &'a [f32],
}

multiversion! {
    /// Norms and rotates q and k of `qkv` and converts v, into `q: [rows, heads, head_dim]`, `k: [rows, kv_heads, head_dim]` and
    /// `v: [rows, kv_heads, value_dim]`.
    pub(crate) fn qkv_norm_rope<T: Element>(
        params: &QkvNormRope<'_>,
        qkv: &[f32],
        q: &mut [T],
        k: &mut [T],
        v: &mut [T],
    ) = qkv_norm_rope_body;
}

/// What is done to a head of each of some rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadsNormRope<'a> {
    /// Weight of its norm, if it has one.
    pub(crate) norm: Option<&'a [f32]>,
    /// Added to the mean square.
    pub(crate) eps: f32,
    /// What turns against each other.
    pub(crate) style: RotaryStyle,
    /// Pairs that turn.
    pub(crate) half: usize,
    /// Cosines and sines of the rows' positions, `[rows, half]`.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

multiversion! {
    /// Norms and rotates a head of each row, as [`qkv_norm_rope`] does, into what lies apart.
    pub(crate) fn heads_norm_rope<T: Element>(params: &HeadsNormRope<'_>, x: &[[f32; PAIR_HEAD_DIM]], out: &mut [&mut [T]]) = heads_norm_rope_body;
}

#[inline(always)]
fn heads_norm_rope_body<T: Element>(
    fma: impl Fma,
    params: &HeadsNormRope<'_>,
    x: &[[f32; PAIR_HEAD_DIM]],
    out: &mut [&mut [T]],
) {
    const HALF: usize = PAIR_HEAD_DIM / 2;
    let p = *params;
    let columns = HeadColumns { first: 0, stride: PAIR_HEAD_DIM };
    let mut scratch = [0.0; PAIR_HEAD_DIM];
    let norm: Option<&[f32; PAIR_HEAD_DIM]> = p.norm.map(|norm| norm.try_into().expect("a weight for each element"));
    for (row, (x, out)) in x.iter().zip(out).enumerate() {
        let out: &mut [T; PAIR_HEAD_DIM] = (&mut **out).try_into().expect("a head");
        let range = row * p.half..(row + 1) * p.half;
        let (cos, sin) = (&p.cos[range.clone()], &p.sin[range]);
        // Twice the same, once of a length that the compiler knows.
        if let (Some(norm), RotaryStyle::Halves, Ok(cos), Ok(sin)) =
            (norm, p.style, <&[f32; HALF]>::try_from(cos), <&[f32; HALF]>::try_from(sin))
        {
            let angles = Angles { style: RotaryStyle::Halves, cos, sin };
            heads_forward(fma, x, columns, Some(norm), p.eps, angles, &mut scratch, out);
        } else {
            let angles = Angles { style: p.style, cos, sin };
            heads_forward(fma, x, columns, norm.map(|norm| &norm[..]), p.eps, angles, &mut scratch, out);
        }
    }
}

multiversion! {
    /// The gradient of `qkv` into `dqkv`, of its shape, given those of the outputs. The norms' weights are frozen; columns of gates are left alone.
    pub(crate) fn qkv_norm_rope_backward<T: Element>(
        params: &QkvNormRope<'_>,
        dq: &[f32],
        dk: &[f32],
        dv: &[f32],
        qkv: &[f32],
        dqkv: &mut [T],
    ) = qkv_norm_rope_backward_body;
}

/// Heads that turn whole, on their way from one matrix to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurningHeads<'a> {
    /// Which, and from where to where.
    pub(crate) heads: HeadMove,
    /// What turns against each other, and which way.
    pub(crate) style: RotaryStyle,
    pub(crate) turn: Turn,
    /// Of each row's position, `[rows, width / 2]`.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

multiversion! {
    /// Turns heads of rows of `x` into columns of as many rows of `y`, given the columns of both.
    pub(crate) fn rotate_heads<T: Element>(params: &TurningHeads<'_>, x: &[f32], x_columns: usize, y: &mut [T], y_columns: usize) = rotate_heads_body;
}

#[inline(always)]
fn rotate_heads_body<T: Element>(
    fma: impl Fma,
    params: &TurningHeads<'_>,
    x: &[f32],
    x_columns: usize,
    y: &mut [T],
    y_columns: usize,
) {
    let (HeadMove { heads, width, from, to }, half) = (params.heads, params.heads.width / 2);
    for (row, (x, y)) in x.chunks_exact(x_columns).zip(y.chunks_exact_mut(y_columns)).enumerate() {
        let range = row * half..(row + 1) * half;
        let angles = Angles { style: params.style, cos: &params.cos[range.clone()], sin: &params.sin[range] };
        for head in 0..heads {
            let (x, y) = (&x[from.first + head * from.stride..][..width], &mut y[to.first + head * to.stride..][..width]);
            match params.turn {
                Turn::Forth => rotate(fma, x, angles, y),
                Turn::Back => rotate_back(fma, x, angles, y),
            }
        }
    }
}

/// One row's cosines and sines, and what they turn.
#[derive(Clone, Copy)]
struct Angles<'a> {
    style: RotaryStyle,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl QkvNormRope<'_> {
    #[inline(always)]
    fn row_len(&self) -> usize {
        self.layout.width
    }

    #[inline(always)]
    fn angles(&self, row: usize) -> Angles<'_> {
        let half = self.layout.rotary_dim / 2;
        let range = row * half..(row + 1) * half;
        Angles { style: self.layout.rotary_style, cos: &self.cos[range.clone()], sin: &self.sin[range] }
    }
}

/// `out = x` rotated by the angles; x is `[head_dim]`, and what there are no angles for stays.
#[inline(always)]
fn rotate<T: Element>(fma: impl Fma, x: &[f32], angles: Angles<'_>, out: &mut [T]) {
    let turn = |low: f32, high: f32, cos: f32, sin: f32| (fma.fma(low, cos, -(high * sin)), fma.fma(high, cos, low * sin));
    let (x, out) = keep_rest(x, angles, out);
    match angles.style {
        RotaryStyle::Halves => map_pairs(x, angles, out, turn),
        RotaryStyle::Interleaved => {
            let (out_low, out_high) = out.split_at_mut(angles.cos.len());
            for (i, pair) in x.as_chunks::<2>().0.iter().enumerate() {
                let (low, high) = turn(pair[0], pair[1], angles.cos[i], angles.sin[i]);
                (out_low[i], out_high[i]) = (T::from_f32(low), T::from_f32(high));
            }
        }
    }
}

/// `out = x` rotated by the negative angles: the transpose of [`rotate`], which takes gradients back.
#[inline(always)]
fn rotate_back<T: Element>(fma: impl Fma, x: &[f32], angles: Angles<'_>, out: &mut [T]) {
    let turn = |low: f32, high: f32, cos: f32, sin: f32| (fma.fma(low, cos, high * sin), fma.fma(high, cos, -(low * sin)));
    let (x, out) = keep_rest(x, angles, out);
    match angles.style {
        RotaryStyle::Halves => map_pairs(x, angles, out, turn),
        RotaryStyle::Interleaved => {
            let (low, high) = x.split_at(angles.cos.len());
            for (i, pair) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (first, second) = turn(low[i], high[i], angles.cos[i], angles.sin[i]);
                *pair = [T::from_f32(first), T::from_f32(second)];
            }
        }
    }
}

/// Copies what there are no angles for, and answers what there are some for.
#[inline(always)]
fn keep_rest<'x, 'o, T: Element>(x: &'x [f32], angles: Angles<'_>, out: &'o mut [T]) -> (&'x [f32], &'o mut [T]) {
    let rotary_dim = 2 * angles.cos.len();
    let ((x, rest), (out, out_rest)) = (x.split_at(rotary_dim), out.split_at_mut(rotary_dim));
    for (out, &x) in out_rest.iter_mut().zip(rest) {
        *out = T::from_f32(x);
    }
    (x, out)
}

/// `out = turn(low, high, cos, sin)` for all pairs of a head: element `i` of its lower half and of its upper half.
///
/// Whole registers at a time by hand: half a head is too short for the loop that the compiler would make, which unrolls
/// four times and leaves the rest to scalars.
#[inline(always)]
fn map_pairs<T: Element>(x: &[f32], angles: Angles<'_>, out: &mut [T], turn: impl Fn(f32, f32, f32, f32) -> (f32, f32)) {
    let half = x.len() / 2;
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    let (low, low_tail) = low.as_chunks::<LANES>();
    let (high, high_tail) = high.as_chunks::<LANES>();
    let (cos, cos_tail) = angles.cos.as_chunks::<LANES>();
    let (sin, sin_tail) = angles.sin.as_chunks::<LANES>();
    let (out_low, out_low_tail) = out_low.as_chunks_mut::<LANES>();
    let (out_high, out_high_tail) = out_high.as_chunks_mut::<LANES>();
    // Of one length, and indexed: a chain of zips is built by calls that stay calls.
    let (out_high, low, high, cos, sin) = {
        let n = out_low.len();
        (&mut out_high[..n], &low[..n], &high[..n], &cos[..n], &sin[..n])
    };
    for i in 0..out_low.len() {
        let (mut turned_low, mut turned_high) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            (turned_low[l], turned_high[l]) = turn(low[i][l], high[i][l], cos[i][l], sin[i][l]);
        }
        for l in 0..LANES {
            out_low[i][l] = T::from_f32(turned_low[l]);
        }
        for l in 0..LANES {
            out_high[i][l] = T::from_f32(turned_high[l]);
        }
    }
    for i in 0..low_tail.len() {
        let (low, high) = turn(low_tail[i], high_tail[i], cos_tail[i], sin_tail[i]);
        (out_low_tail[i], out_high_tail[i]) = (T::from_f32(low), T::from_f32(high));
    }
}

/// Norms and rotates all heads of one row, which are in these columns of `x`.
#[inline(always)]
#[expect(clippy::too_many_arguments)]
fn heads_forward<T: Element>(
    fma: impl Fma,
    x: &[f32],
    columns: HeadColumns,
    norm: Option<&[f32]>,
    eps: f32,
    angles: Angles<'_>,
    scratch: &mut [f32],
    out: &mut [T],
) {
    let head_dim = scratch.len();
    for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let x = &x[columns.first + head * columns.stride..][..head_dim];
        // One rotation for both: each is compiled once for every dtype and processor.
        let x = match norm {
            Some(weight) => {
                normalize(x, weight, inverse_rms(fma, x, eps), scratch);
                &*scratch
            }
            None => x,
        };
        rotate(fma, x, angles, out);
    }
}

/// The gradient of all heads of one row, which are in these columns of `x` and `dx`, given that of their output.
#[inline(always)]
#[expect(clippy::too_many_arguments)]
fn heads_backward<T: Element>(
    fma: impl Fma,
    dy: &[f32],
    x: &[f32],
    columns: HeadColumns,
    norm: Option<&[f32]>,
    eps: f32,
    angles: Angles<'_>,
    scratch: &mut [f32],
    dx: &mut [T],
) {
    let head_dim = scratch.len();
    for (head, dy) in dy.chunks_exact(head_dim).enumerate() {
        let first = columns.first + head * columns.stride;
        let (x, dx) = (&x[first..][..head_dim], &mut dx[first..][..head_dim]);
        rotate_back(fma, dy, angles, scratch);
        match norm {
            Some(weight) => {
                let (inverse, along) = backward_factors(fma, scratch, x, weight, eps);
                for (((dx, &dy), &x), &w) in dx.iter_mut().zip(&*scratch).zip(x).zip(weight) {
                    *dx = T::from_f32(fma.fma(dy * w, inverse, -(x * along)));
                }
            }
            None => dx.iter_mut().zip(&*scratch).for_each(|(dx, &dy)| *dx = T::from_f32(dy)),
        }
    }
}

#[inline(always)]
fn qkv_norm_rope_body<T: Element>(fma: impl Fma, params: &QkvNormRope<'_>, qkv: &[f32], q: &mut [T], k: &mut [T], v: &mut [T]) {
    let p = *params;
    let (q_len, k_len, v_len) = (p.heads * p.head_dim, p.kv_heads * p.head_dim, p.kv_heads * p.value_dim);
    let rows = qkv.len() / p.row_len();
    assert!(q.len() == rows * q_len && k.len() == rows * k_len && v.len() == rows * v_len);
    let mut scratch = [0.0; MAX_HEAD_DIM];
    let scratch = &mut scratch[..p.head_dim];
    for row in 0..rows {
        let angles = p.angles(row);
        let qkv = &qkv[row * p.row_len()..][..p.row_len()];
        let q = &mut q[row * q_len..][..q_len];
        let k = &mut k[row * k_len..][..k_len];
        let v = &mut v[row * v_len..][..v_len];
        for (columns, norm, out) in [(p.layout.q, p.q_norm, q), (p.layout.k, p.k_norm, k)] {
            heads_forward(fma, qkv, columns, norm, p.eps, angles, scratch, out);
        }
        for (head, v) in v.chunks_exact_mut(p.value_dim).enumerate() {
            for (v, &x) in v.iter_mut().zip(&qkv[p.layout.v.first + head * p.layout.v.stride..]) {
                *v = T::from_f32(x);
            }
        }
    }
}

#[inline(always)]
fn qkv_norm_rope_backward_body<T: Element>(
    fma: impl Fma,
    params: &QkvNormRope<'_>,
    dq: &[f32],
    dk: &[f32],
    dv: &[f32],
    qkv: &[f32],
    dqkv: &mut [T],
) {
    let p = *params;
    let (q_len, k_len, v_len) = (p.heads * p.head_dim, p.kv_heads * p.head_dim, p.kv_heads * p.value_dim);
    let rows = qkv.len() / p.row_len();
    assert!(dq.len() == rows * q_len && dk.len() == rows * k_len && dv.len() == rows * v_len && dqkv.len() == qkv.len());
    let mut scratch = [0.0; MAX_HEAD_DIM];
    let scratch = &mut scratch[..p.head_dim];
    for row in 0..rows {
        let angles = p.angles(row);
        let qkv = &qkv[row * p.row_len()..][..p.row_len()];
        let dqkv = &mut dqkv[row * p.row_len()..][..p.row_len()];
        let (dq, dk, dv) = (&dq[row * q_len..][..q_len], &dk[row * k_len..][..k_len], &dv[row * v_len..][..v_len]);
        for (dy, columns, norm) in [(dq, p.layout.q, p.q_norm), (dk, p.layout.k, p.k_norm)] {
            heads_backward(fma, dy, qkv, columns, norm, p.eps, angles, scratch, dqkv);
        }
        for (head, dv) in dv.chunks_exact(p.value_dim).enumerate() {
            for (out, &g) in dqkv[p.layout.v.first + head * p.layout.v.stride..].iter_mut().zip(dv) {
                *out = T::from_f32(g);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::KvValues;
    use crate::backend::{AttentionGeometry, Sight};
    use crate::cpu::rows::testing::{assert_close, numeric_gradient, on_every_isa, random};

    const ROWS: usize = 2;
    const HEADS: usize = 3;

    /// `theta^(-2i / head_dim)`.
    fn frequencies(head_dim: usize, theta: f32) -> Vec<f32> {
        (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f32 / head_dim as f32)).collect()
    }

    /// Of positions on one axis.
    fn angles_of(positions: &[u32], frequencies: &[f32], factor: f32, cos: &mut [f32], sin: &mut [f32]) {
        let turns: Vec<AxisFrequency> = frequencies.iter().map(|&frequency| AxisFrequency { axis: 0, frequency }).collect();
        angles(&[positions], 0..positions.len(), &turns, factor, cos, sin);
    }

    /// The definition, for one head. Interleaved pairs are those of halves once the even numbers are moved before the odd ones.
    fn head_reference(x: &[f64], norm: Option<&[f32]>, eps: f32, style: RotaryStyle, cos: &[f32], sin: &[f32]) -> Vec<f64> {
        let (d, half) = (x.len(), cos.len());
        let rms = (x.iter().map(|v| v * v).sum::<f64>() / d as f64 + eps as f64).sqrt();
        let normed: Vec<f64> = (0..d).map(|i| norm.map_or(x[i], |w| x[i] / rms * w[i] as f64)).collect();
        let mut y = normed.clone();
        if style == RotaryStyle::Interleaved {
            (0..half).for_each(|i| (y[i], y[i + half]) = (normed[2 * i], normed[2 * i + 1]));
        }
        let rotated = |i: usize| if i < half { -y[i + half] } else { y[i - half] };
        let turned = (0..2 * half).map(|i| y[i] * cos[i % half] as f64 + rotated(i) * sin[i % half] as f64);
        turned.chain(y[2 * half..].iter().copied()).collect()
    }

    /// All of q, then all of k, then all of v.
    fn reference(p: &QkvNormRope<'_>, qkv: &[f64]) -> Vec<f64> {
        let (d, half, style) = (p.head_dim, p.layout.rotary_dim / 2, p.layout.rotary_style);
        let mut parts = [const { Vec::new() }; 3];
        for (row, qkv) in qkv.chunks(p.row_len()).enumerate() {
            let (cos, sin) = (&p.cos[row * half..][..half], &p.sin[row * half..][..half]);
            let head = |columns: HeadColumns, head: usize| &qkv[columns.first + head * columns.stride..][..d];
            let turned = |x, norm| head_reference(x, norm, p.eps, style, cos, sin);
            (0..p.heads).for_each(|h| parts[0].extend(turned(head(p.layout.q, h), p.q_norm)));
            (0..p.kv_heads).for_each(|h| parts[1].extend(turned(head(p.layout.k, h), p.k_norm)));
            (0..p.kv_heads).for_each(|h| parts[2].extend(&head(p.layout.v, h)[..p.value_dim]));
        }
        parts.concat()
    }

    /// The plain layout, and others: with gates, keys and values that alternate, a part of a head that turns, none of it, other pairs.
    fn layouts(head_dim: usize, kv_heads: usize) -> Vec<QkvLayout> {
        let values = KvValues::Own(head_dim);
        let g = AttentionGeometry {
            heads: HEADS,
            kv_heads,
            head_dim,
            values,
            scale: 1.0,
            eps: 1e-6,
            window: None,
            sees: Sight::Before,
        };
        let plain = QkvLayout::fused(&g);
        let first = HEADS * head_dim;
        let columns = |first| HeadColumns { first, stride: 2 * head_dim };
        let (k, v) = (columns(first + head_dim), columns(first));
        let rotary_style = RotaryStyle::Interleaved;
        vec![
            plain,
            QkvLayout::gated(&g, head_dim / 4 * 2),
            QkvLayout { k, v, ..plain },
            QkvLayout { rotary_dim: 0, ..plain },
            QkvLayout { rotary_style, ..plain },
            QkvLayout { rotary_style, ..QkvLayout::gated(&g, head_dim / 4 * 2) },
        ]
    }

    fn with_params(head_dim: usize, kv_heads: usize, normed: bool, check: impl Fn(&QkvNormRope<'_>)) {
        layouts(head_dim, kv_heads).into_iter().for_each(|layout| with_layout(layout, head_dim, kv_heads, normed, &check));
    }

    fn with_layout(layout: QkvLayout, head_dim: usize, kv_heads: usize, normed: bool, check: &impl Fn(&QkvNormRope<'_>)) {
        let (mut cos, mut sin) = (vec![0.0; ROWS * layout.rotary_dim / 2], vec![0.0; ROWS * layout.rotary_dim / 2]);
        if !cos.is_empty() {
            angles_of(&[3, 70], &frequencies(layout.rotary_dim, 10_000.0), 1.0, &mut cos, &mut sin);
        }
        let (q_norm, k_norm) = (random(head_dim, 5), random(head_dim, 6));
        check(&QkvNormRope {
            layout,
            heads: HEADS,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            q_norm: normed.then_some(&q_norm),
            k_norm: normed.then_some(&k_norm),
            eps: 1e-6,
            cos: &cos,
            sin: &sin,
        });
    }

    #[test]
    fn heads_are_normed_and_rotated_and_v_is_neither() {
        for (head_dim, normed) in [(2, false), (14, true), (16, false), (60, true), (64, true), (128, true), (128, false)] {
            with_params(head_dim, 2, normed, |p| {
                let qkv = random(ROWS * p.row_len(), 1);
                let expected = reference(p, &qkv.iter().map(|&v| v as f64).collect::<Vec<_>>());
                on_every_isa(|isa| {
                    let kv_len = ROWS * p.kv_heads * head_dim;
                    let (mut q, mut k, mut v) = (vec![0.0; ROWS * HEADS * head_dim], vec![0.0; kv_len], vec![0.0; kv_len]);
                    qkv_norm_rope(isa, p, &qkv, &mut q, &mut k, &mut v);
                    let mut narrow = [vec![bf16::ZERO; q.len()], vec![bf16::ZERO; kv_len], vec![bf16::ZERO; kv_len]];
                    let [nq, nk, nv] = &mut narrow;
                    qkv_norm_rope(isa, p, &qkv, nq, nk, nv);
                    let all = [q, k, v].concat();
                    assert!(narrow.concat().iter().zip(&all).all(|(n, &w)| *n == bf16::from_f32(w)));
                    assert_close(&all, &expected, 2e-6, &format!("{isa}, head_dim {head_dim}, {:?}", p.layout));
                    all
                });
            });
        }
    }

    #[test]
    fn the_backward_of_norm_and_rope_is_their_gradient() {
        for (head_dim, normed) in [(2, true), (14, false), (16, true), (60, true)] {
            with_params(head_dim, 1, normed, |p| {
                let (qkv, dy) = (random(ROWS * p.row_len(), 1), random(ROWS * (HEADS + 2) * head_dim, 2));
                let loss = |x: &[f64]| reference(p, x).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum();
                let expected = numeric_gradient(loss, &qkv);
                on_every_isa(|isa| {
                    let mut dqkv = vec![0.0; qkv.len()];
                    let (dq, dkv) = dy.split_at(ROWS * HEADS * head_dim);
                    let (dk, dv) = dkv.split_at(ROWS * head_dim);
                    qkv_norm_rope_backward(isa, p, dq, dk, dv, &qkv, &mut dqkv);
                    assert_close(&dqkv, &expected, 2e-5, &format!("{isa}, head_dim {head_dim}, {:?}", p.layout));
                    dqkv
                });
            });
        }
    }

    #[test]
    fn heads_turn_from_one_matrix_to_another_as_in_a_projection_and_back_again() {
        let (rows, heads, width) = (3, 2, 20);
        let (mut cos, mut sin) = (vec![0.0; rows * width / 2], vec![0.0; rows * width / 2]);
        angles_of(&[0, 3, 70], &frequencies(width, 10_000.0), 1.0, &mut cos, &mut sin);
        let (x_columns, y_columns) = (heads * 30, heads * 24 + 1);
        let x = random(rows * x_columns, 1);
        let (from, to) = (HeadColumns { first: 10, stride: 30 }, HeadColumns { first: 1, stride: 24 });
        for style in [RotaryStyle::Halves, RotaryStyle::Interleaved] {
            on_every_isa(|isa| {
                let there = HeadMove { heads, width, from, to };
                let params = TurningHeads { heads: there, style, turn: Turn::Forth, cos: &cos, sin: &sin };
                let mut y = vec![7.0; rows * y_columns];
                rotate_heads(isa, &params, &x, x_columns, &mut y, y_columns);
                let back = HeadMove { heads, width, from: to, to: from };
                let mut again = vec![9.0; x.len()];
                rotate_heads(
                    isa,
                    &TurningHeads { heads: back, turn: Turn::Back, ..params },
                    &y,
                    y_columns,
                    &mut again,
                    x_columns,
                );
                let half = width / 2;
                for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                    let at = row * x_columns + from.first + head * from.stride;
                    let source: Vec<f64> = x[at..at + width].iter().map(|&v| v as f64).collect();
                    let expected =
                        head_reference(&source, None, 0.0, style, &cos[row * half..][..half], &sin[row * half..][..half]);
                    assert_close(
                        &y[row * y_columns + to.first + head * to.stride..][..width],
                        &expected,
                        2e-6,
                        &format!("{isa}"),
                    );
                    assert_close(&again[at..at + width], &source, 2e-6, &format!("{isa}, back"));
                }
                assert!((0..rows).all(|row| y[row * y_columns] == 7.0 && again[row * x_columns + 9] == 9.0));
                [y, again].concat()
            });
        }
    }

    #[test]
    fn angles_are_positions_times_frequencies() {
        let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
        angles_of(&[0, 100], &[1.0, 0.01], 2.0, &mut cos, &mut sin);
        assert_eq!((cos[..2].to_vec(), sin[..2].to_vec()), (vec![2.0; 2], vec![0.0; 2]));
        assert_close(&cos[2..], &[2.0 * 100f64.cos(), 2.0 * 1f64.cos()], 1e-7, "cos");
        assert_close(&sin[2..], &[2.0 * 100f64.sin(), 2.0 * 1f64.sin()], 1e-7, "sin");
    }

    #[test]
    fn each_pair_turns_by_the_positions_of_its_axis_alone() {
        let axes: [&[u32]; 3] = [&[9, 5, 7], &[9, 100, 3], &[9, 0, 11]];
        let turns = [(1, 1.0), (0, 0.5), (2, 0.25), (1, 0.01)].map(|(axis, frequency)| AxisFrequency { axis, frequency });
        let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
        angles(&axes, 1..3, &turns, 1.5, &mut cos, &mut sin);
        for (i, (token, turn)) in (1..3).flat_map(|token| turns.map(|turn| (token, turn))).enumerate() {
            let (mut one_cos, mut one_sin) = ([0.0], [0.0]);
            angles_of(&[axes[turn.axis][token]], &[turn.frequency], 1.5, &mut one_cos, &mut one_sin);
            assert_eq!((cos[i], sin[i]), (one_cos[0], one_sin[0]), "token {token}, {turn:?}");
        }
    }
}
