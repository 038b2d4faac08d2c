//! Linear layers with their low-rank additions, which join the base product while its rows are in cache.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::memory::weights;
use super::{CpuBackend, with_element};
use crate::backend::{AttentionGeometry, LoraGradient, LowProducts, Qkv, QkvLayout, Rotary};
use crate::cpu::matmul::{
    Addend, Addends, Low, Lows, Out, PairSink, Paired, RightSide, RowRuns, Rows, SINGLE_ROWS, Target, fetch_to_write,
};
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{PANEL, PackedRef};
use crate::cpu::rows::rope::{self, HeadsNormRope};
use crate::cpu::rows::{convert, swiglu};
use crate::cpu::threads::SharedMut;
use crate::live::live_runs;
use crate::memory::Memory;
use crate::tape::{Linear, LoraGroup, LoraProjection};
use crate::{DType, KvValues, Result, Tensor};

/// Rows that an op after a product computes at a time, while lines of the next are fetched, which it writes then.
const ROWS_AT_A_TIME: usize = 8;

/// Some rows and columns of a matrix `[rows, columns]`, as numbers of its dtype.
pub(super) fn block(tensor: &Tensor, rows: Range<usize>, columns: Range<usize>) -> Result<Rows<'_>> {
    with_element!(tensor.dtype(), T => Ok(Rows::new(tensor.slice::<T>()?, tensor.shape().row_len(), rows, columns)))
}

/// All of a matrix; further axes count as columns.
pub(super) fn whole(tensor: &Tensor) -> Result<Rows<'_>> {
    block(tensor, 0..tensor.rows(), 0..tensor.shape().row_len())
}

/// All of a matrix of f32.
pub(super) fn all_of(out: &mut Tensor, target: &Target, rows: usize, columns: usize) -> Result<Out> {
    let width = out.shape().row_len();
    Ok(Out::new(out.slice_mut::<f32>()?, width, target, rows, columns))
}

/// Low-rank products, in order.
pub(super) fn rows_of(low: &LowProducts) -> Result<impl Iterator<Item = Rows<'_>>> {
    let mut all = Vec::with_capacity(low.shapes.len());
    if let Some(numbers) = &low.numbers {
        with_element!(numbers.dtype(), T => {
            let numbers = numbers.slice::<T>()?;
            all.extend(low.parts().map(|([rows, rank], part)| Rows::new(&numbers[part], rank, 0..rows, 0..rank)));
        });
    }
    Ok(all.into_iter())
}

/// A low-rank product on its way to a result.
pub(super) struct Pending<'a> {
    /// Its left side, `[tokens, rank]`.
    pub(super) low: Rows<'a>,
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    pub(super) right: RightSide<'a>,
}

impl Pending<'_> {
    /// Whether it can be added to a product on its way.
    fn can_join(&self) -> bool {
        Addend::can_join(self.first_column, &self.right)
    }

    /// Where it goes, if it goes alone.
    fn target(&self) -> Target {
        Target { first_row: self.first_row, first_column: self.first_column, accumulate: true }
    }
}

/// Some columns of at most [`ROWS_AT_A_TIME`] rows of a matrix of rows of `width`, while those of the next rows are fetched.
///
/// # Safety
/// Nobody else has them.
#[allow(clippy::mut_from_ref)]
unsafe fn parts_of_rows<T>(
    matrix: &SharedMut<T>,
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
) -> [&mut [T]; ROWS_AT_A_TIME] {
    for row in rows.end..rows.end + ROWS_AT_A_TIME {
        fetch_to_write(matrix.as_ptr().wrapping_add(row * width + columns.start), columns.len());
    }
    std::array::from_fn(|i| match rows.start + i {
        // SAFETY: the caller's promise; rows are apart.
        row if row < rows.end => unsafe { matrix.part(row * width + columns.start..row * width + columns.end) },
        _ => &mut [][..],
    })
}

/// `scale · left · right`, from or to a rank.
struct LowProduct<'a> {
    left: Rows<'a>,
    right: RightSide<'a>,
    scale: f32,
}

impl LowProduct<'_> {
    /// In multiply-adds.
    fn cost(&self) -> usize {
        self.left.rows() * self.left.width() * self.right.columns()
    }
}

/// A low-rank pair of a layer, there or back: some columns of some rows of a left side by a matrix to a rank, scaled, and that by one from the rank to some columns of a result.
struct LowPair<'a> {
    rows: Range<usize>,
    low: Low<'a>,
}

impl<'a> LowPair<'a> {
    fn forward(layer: &Linear<'a>) -> Result<Vec<Self>> {
        Self::all(layer, |p, a, b| Low {
            first_input: 0,
            right: RightSide::Weights(a),
            scale: p.scale,
            first_column: p.first_column,
            added: RightSide::Weights(b),
        })
    }

    fn backward(layer: &Linear<'a>) -> Result<Vec<Self>> {
        Self::all(layer, |p, a, b| Low {
            first_input: p.first_column,
            right: RightSide::Transposed(b),
            scale: p.scale,
            first_column: 0,
            added: RightSide::Transposed(a),
        })
    }

    fn all(
        layer: &Linear<'a>,
        low: impl Fn(&LoraProjection<'a>, PackedRef<'a>, PackedRef<'a>) -> Low<'a>,
    ) -> Result<Vec<Self>> {
        let pair = |(group, p): (&LoraGroup<'a>, &LoraProjection<'a>)| {
            Ok(LowPair { rows: group.tokens.clone(), low: low(p, weights(p.a)?, weights(p.b)?) })
        };
        pairs(&layer.lora).map(pair).collect()
    }

    /// The product of `left` and the first matrix.
    fn product<'l>(&self, left: &'l Tensor) -> Result<LowProduct<'l>>
    where
        'a: 'l,
    {
        let (inputs, first) = (self.low.inputs(), self.low.first_input);
        let left = block(left, self.rows.clone(), first..first + inputs)?;
        Ok(LowProduct { left, right: self.low.right, scale: self.low.scale })
    }

    /// What of it comes to a result, once that product is made.
    fn pending<'l>(&self, low: Rows<'l>) -> Pending<'l>
    where
        'a: 'l,
    {
        Pending { low, first_row: self.rows.start, first_column: self.low.first_column, right: self.low.added }
    }
}

/// A product, its rows and rank, and its part of the numbers.
type LowJob<'l, 'a> = (&'l LowProduct<'a>, ([usize; 2], Range<usize>));
/// A product of one row, its right side, and the rest.
type SingleRow<'l, 'a> = (&'l LowProduct<'a>, PackedRef<'a>, ([usize; 2], Range<usize>));

/// The accumulators of one pair: A's, `[rank, in]`, and those of B transposed, `[rank, out]`.
pub(super) struct PairGradient<'g> {
    pub(super) a: &'g mut [f32],
    pub(super) b: &'g mut [f32],
}

impl<'g> PairGradient<'g> {
    pub(super) fn new(g: &'g mut LoraGradient<'_>) -> Result<Self> {
        Ok(PairGradient { a: g.a.reborrow().into_slice()?, b: g.b.reborrow().into_slice()? })
    }
}

/// Gradients of one side of some pairs: see [`CpuBackend::backward_weights`].
struct WeightSums<'a, 'g> {
    x: Rows<'a>,
    sequences: Arc<[Range<usize>]>,
    pairs: Vec<(Rows<'a>, &'g mut [f32])>,
}

impl WeightSums<'_, '_> {
    /// In multiply-adds.
    fn cost(&self) -> usize {
        self.x.rows() * self.x.width() * self.pairs.iter().map(|(low, _)| low.width()).sum::<usize>()
    }
}

impl CpuBackend {
    /// `out = left · right + bias`, and all of `pending` in turn.
    pub(super) fn product(
        &self,
        left: Rows<'_>,
        right: RightSide<'_>,
        bias: Option<&[f32]>,
        pending: &[Pending<'_>],
        out: &mut Tensor,
    ) -> Result<()> {
        let all = 0..left.rows();
        self.product_of_rows((left, RowRuns::of(&all)), right, bias, pending, out)
    }

    /// As [`CpuBackend::product`] of some rows, which are all if the right side is not transposed. What of `out` is in no other row is left as it is, or has zeros added to it
    /// if nothing else is pending for it.
    fn product_of_rows(
        &self,
        (left, rows): (Rows<'_>, RowRuns<'_>),
        right: RightSide<'_>,
        bias: Option<&[f32]>,
        pending: &[Pending<'_>],
        out: &mut Tensor,
    ) -> Result<()> {
        let joins = pending.iter().all(Pending::can_join);
        let (joining, alone) = if joins { (pending, &[][..]) } else { (&[][..], pending) };
        let mut padded = Vec::new();
        let products = addends(joining, &mut padded)?;
        let of_rows = all_of(out, &Target::overwrite(), left.rows(), right.columns())?;
        self.multiply((left, rows), right, of_rows, &Addends::new(bias, products))?;
        for p in alone {
            let out = all_of(out, &p.target(), p.low.rows(), p.right.columns())?;
            self.multiply_all(p.low, p.right, out)?;
        }
        Ok(())
    }

    /// `out = left · right`, and what is added to it. Of some rows, which are all if the right side is not transposed.
    fn multiply(
        &self,
        (left, rows): (Rows<'_>, RowRuns<'_>),
        right: RightSide<'_>,
        out: Out,
        addends: &Addends<'_>,
    ) -> Result<()> {
        match right {
            RightSide::Weights(w) => self.matmul_for(w.dtype).forward(left, w, out, addends),
            RightSide::Transposed(w) => self.matmul_for(w.dtype).backward_input((left, rows), w, out, addends),
        }
    }

    /// `out = left · right`.
    fn multiply_all(&self, left: Rows<'_>, right: RightSide<'_>, out: Out) -> Result<()> {
        let all = 0..left.rows();
        self.multiply((left, RowRuns::of(&all)), right, out, &Addends::default())
    }

    /// `scale · left · right` in `dtype`.
    pub(super) fn low_product(&self, left: Rows<'_>, right: RightSide<'_>, scale: f32, dtype: DType) -> Result<Tensor> {
        let shape = [left.rows(), right.columns()];
        let mut product = self.scratch(&shape, DType::F32)?;
        self.product(left, right, None, &[], &mut product)?;
        let mut low = self.scratch(&shape, dtype)?;
        with_element!(dtype, T => self.scale_into::<T>(product.slice()?, scale, low.slice_mut()?));
        Ok(low)
    }

    pub(super) fn forward_linear(&self, x: &Tensor, layer: &Linear<'_>, y: Option<&mut Tensor>) -> Result<LowProducts> {
        let lows = LowPair::forward(layer)?;
        let Some(y) = y else { return self.low_products(x, &lows) };
        let bias = layer.bias.map(|bias| bias.slice::<f32>()).transpose()?;
        let all = 0..x.rows();
        self.product_with_lows(x, RowRuns::of(&all), RightSide::Weights(weights(layer.weight)?), bias, &lows, y)
    }

    /// As [`CpuBackend::product_of_rows`], and low-rank pairs of the same left side, whose products to a rank it answers.
    fn product_with_lows(
        &self,
        left: &Tensor,
        rows: RowRuns<'_>,
        right: RightSide<'_>,
        bias: Option<&[f32]>,
        lows: &[LowPair<'_>],
        out: &mut Tensor,
    ) -> Result<LowProducts> {
        let (num_rows, columns) = (left.rows(), right.columns());
        let is_every = rows.is_every(num_rows);
        if is_every && self.makes_lows(left, right, false, lows) {
            let out = all_of(out, &Target::overwrite(), num_rows, columns)?;
            return self.with_lows(left, lows, bias, |addends| self.multiply((whole(left)?, rows), right, out, addends));
        }
        let made = self.low_products(left, lows)?;
        let pending: Vec<Pending<'_>> = lows.iter().zip(rows_of(&made)?).map(|(pair, low)| pair.pending(low)).collect();
        self.product_of_rows((whole(left)?, rows), right, bias, &pending, out)?;
        Ok(made)
    }

    /// Whether a product makes these on its way.
    fn makes_lows(&self, left: &Tensor, right: RightSide<'_>, in_pairs: bool, lows: &[LowPair<'_>]) -> bool {
        let (rows, width) = (left.rows(), left.shape().row_len());
        if lows.is_empty() || lows.iter().any(|pair| pair.rows != (0..rows)) {
            return false;
        }
        let each: Vec<Low<'_>> = lows.iter().map(|pair| pair.low.clone()).collect();
        self.matmul_for(left.dtype()).makes_lows(rows, width, right.columns(), in_pairs, &each)
    }

    /// Runs `product`, which makes low-rank pairs of all rows of its left side on its way, and answers them.
    fn with_lows(
        &self,
        left: &Tensor,
        lows: &[LowPair<'_>],
        bias: Option<&[f32]>,
        product: impl FnOnce(&Addends<'_>) -> Result<()>,
    ) -> Result<LowProducts> {
        let rows = left.rows();
        let shapes = lows.iter().map(|pair| [rows, pair.low.right.columns()]).collect();
        let mut made = self.room_for_products(shapes, left.dtype())?;
        let rounded = made.numbers.as_mut().expect("there is room");
        let mut sums = self.scratch(rounded.shape().dims(), DType::F32)?;
        let each = lows.iter().map(|pair| pair.low.clone()).collect();
        product(&Addends::with_lows(bias, Lows::new(each, rows, sums.slice_mut()?, rounded.slice_mut()?)))?;
        Ok(made)
    }

    /// `silu(gate) * up` of a layer, gate first, where the sums of both come together; answers what [`CpuBackend::forward_linear`] does if so.
    pub(super) fn forward_swiglu(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        kept: Option<&mut Tensor>,
        y: &mut Tensor,
    ) -> Result<Option<LowProducts>> {
        let n = y.shape().row_len();
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.forward_pairs(x, layer, Paired::Halves, kept, &|row, column, gate_up| {
                for (row, gate_up) in (row..).step_by(ROWS_AT_A_TIME).zip(gate_up.chunks(ROWS_AT_A_TIME)) {
                    // SAFETY: each row and panel comes once.
                    let mut y = unsafe { parts_of_rows(&y, n, row..row + gate_up.len(), column..column + PANEL) };
                    swiglu::swiglu_pairs(self.isa, gate_up, &mut y[..gate_up.len()]);
                }
            })
        })
    }

    /// The heads of a layer with those of queries, keys and values, normalised and rotated, where the sums of a whole one come together; answers what
    /// [`CpuBackend::forward_linear`] does if so.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn forward_heads(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        norms: Option<[&[f32]; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        kept: Option<&mut Tensor>,
        out: &mut Qkv,
    ) -> Result<Option<LowProducts>> {
        const HEAD: usize = 2 * PANEL;
        let Some(v) = out.v.as_mut().filter(|_| g.head_dim == HEAD && g.values == KvValues::Own(HEAD)) else {
            return Ok(None);
        };
        // Which part of the result each pair of panels is, and which head of it.
        let mut heads = vec![None; layout.width / HEAD];
        for (part, columns, count) in [(0, layout.q, g.heads), (1, layout.k, g.kv_heads), (2, layout.v, g.kv_heads)] {
            for head in 0..count {
                let first = columns.first + head * columns.stride;
                match heads.get_mut(first / HEAD).filter(|_| first.is_multiple_of(HEAD)) {
                    Some(place) => *place = Some((part, head)),
                    None => return Ok(None),
                }
            }
        }
        let (cos, sin, half) = (rotary.cos.slice::<f32>()?, rotary.sin.slice::<f32>()?, layout.rotary_dim / 2);
        with_element!(out.q.dtype(), T => {
            let parts = [
                (SharedMut::new(out.q.slice_mut::<T>()?), g.heads),
                (SharedMut::new(out.k.slice_mut::<T>()?), g.kv_heads),
                (SharedMut::new(v.slice_mut::<T>()?), g.kv_heads),
            ];
            self.forward_pairs(x, layer, Paired::Neighbours, kept, &|row, column, sums| {
                let Some((part, head)) = heads[column / HEAD] else { return };
                let (out, count) = &parts[part];
                for (row, sums) in (row..).step_by(ROWS_AT_A_TIME).zip(sums.chunks(ROWS_AT_A_TIME)) {
                    let rows = row..row + sums.len();
                    // SAFETY: each row and head comes once.
                    let mut out = unsafe { parts_of_rows(out, count * HEAD, rows.clone(), head * HEAD..(head + 1) * HEAD) };
                    let out = &mut out[..sums.len()];
                    if part == 2 {
                        out.iter_mut().zip(sums).for_each(|(out, sums)| convert::scale(self.isa, sums, 1.0, out));
                        continue;
                    }
                    let angles = rows.start * half..rows.end * half;
                    let turning = HeadsNormRope {
                        norm: norms.map(|norms| norms[part]),
                        eps: g.eps,
                        style: layout.rotary_style,
                        half,
                        cos: &cos[angles.clone()],
                        sin: &sin[angles],
                    };
                    rope::heads_norm_rope(self.isa, &turning, sums, out);
                }
            })
        })
    }

    /// The result of a layer in pairs of panels, for `sink` and for whoever keeps it; answers what [`CpuBackend::forward_linear`] does, if there are such.
    fn forward_pairs(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        paired: Paired,
        kept: Option<&mut Tensor>,
        sink: &PairSink<'_>,
    ) -> Result<Option<LowProducts>> {
        let w = weights(layer.weight)?;
        let matmul = self.matmul_for(w.dtype);
        let lows = LowPair::forward(layer)?;
        let can_join = |pair: &LowPair<'_>| Addend::can_join(pair.low.first_column, &pair.low.added);
        if !matmul.has_forward_pairs(x.rows(), &w) || !lows.iter().all(can_join) {
            return Ok(None);
        }
        let bias = layer.bias.map(|bias| bias.slice::<f32>()).transpose()?;
        let kept = kept.map(|kept| all_of(kept, &Target::overwrite(), x.rows(), w.out_features)).transpose()?;
        let product = |addends: &Addends<'_>| matmul.forward_pairs(whole(x)?, w, addends, paired, kept.as_ref(), sink);
        if self.makes_lows(x, RightSide::Weights(w), true, &lows) {
            return self.with_lows(x, &lows, bias, product).map(Some);
        }
        let made = self.low_products(x, &lows)?;
        let pending: Vec<Pending<'_>> = lows.iter().zip(rows_of(&made)?).map(|(pair, low)| pair.pending(low)).collect();
        let mut padded = Vec::new();
        product(&Addends::new(bias, addends(&pending, &mut padded)?))?;
        Ok(Some(made))
    }

    pub(super) fn backward_linear(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        layer: &Linear<'_>,
        gradients: Vec<Option<PairGradient<'_>>>,
        dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let live = self.live_rows(dy, &layer.lora)?;
        let is_wanted: Vec<bool> = gradients.iter().map(|gradient| gradient.is_some() || dx.is_some()).collect();
        let mut lows = LowPair::backward(layer)?;
        let made = match dx {
            Some(dx) => {
                let dead_before = |i: usize| i.checked_sub(1).map_or(0, |before| live[before].end);
                for i in 0..=live.len() {
                    let dead = dead_before(i)..live.get(i).map_or(dy.rows(), |run| run.start);
                    self.fill_zero(dx.rows_mut(dead))?;
                }
                let right = RightSide::Transposed(weights(layer.weight)?);
                self.product_with_lows(dy, RowRuns::new(&live), right, None, &lows, dx)?
            }
            None => {
                let mut is_wanted = is_wanted.iter();
                lows.retain(|_| is_wanted.next() == Some(&true));
                self.low_products(dy, &lows)?
            }
        };
        let mut made = rows_of(&made)?;
        let by_low: Vec<Option<Rows<'_>>> = is_wanted.iter().map(|wanted| if *wanted { made.next() } else { None }).collect();
        let mut pairs = rows_of(low)?.zip(&by_low).zip(gradients);
        let mut sums = Vec::new();
        for group in &*layer.lora {
            let tokens = group.tokens.clone();
            // Whole granules that are left out leave the sums of the others as they are.
            let alive = |s: &Range<usize>| {
                let (s, first) = (s.clone(), live.partition_point(|run| run.end <= s.start));
                let within = live[first..].iter().take_while(move |run| run.start < s.end);
                within.map(move |run| run.start.max(s.start) - tokens.start..run.end.min(s.end) - tokens.start)
            };
            let sequences: Arc<[Range<usize>]> = group.sequences.iter().flat_map(alive).collect();
            let mut of_a: Vec<(Rows<'_>, &mut [f32])> = Vec::new();
            for (p, ((low, dlow), gradient)) in group.projections.iter().zip(&mut pairs) {
                let (Some(dlow), Some(PairGradient { a, b })) = (dlow, gradient) else { continue };
                let dy = block(dy, tokens.clone(), p.first_column..p.first_column + p.b.out_features())?;
                sums.push(WeightSums { x: dy, sequences: sequences.clone(), pairs: vec![(low, b)] });
                of_a.push((*dlow, a));
            }
            // All projections read the same rows.
            if !of_a.is_empty() {
                let x = block(x, tokens, 0..x.shape().row_len())?;
                sums.push(WeightSums { x, sequences, pairs: of_a });
            }
        }
        self.shared_out(sums, WeightSums::cost, |sums| self.backward_weights(sums.x, &sums.sequences, sums.pairs)).map(drop)
    }

    /// The rows of a gradient that are not all zeros, by whole granules of the sequences of groups, as runs.
    fn live_rows(&self, dy: &Tensor, lora: &[LoraGroup<'_>]) -> Result<Vec<Range<usize>>> {
        let sequences: Vec<Range<usize>> = lora.iter().flat_map(|group| group.sequences.iter().cloned()).collect();
        let width = dy.shape().row_len();
        with_element!(dy.dtype(), T => {
            let numbers = dy.slice::<T>()?;
            Ok(live_runs(&sequences, &(0..dy.rows()), |row| !convert::is_zero(self.isa, &numbers[row * width..][..width])))
        })
    }

    /// Room for products of these rows and ranks; their numbers are unspecified.
    pub(super) fn room_for_products(&self, shapes: Vec<[usize; 2]>, dtype: DType) -> Result<LowProducts> {
        let numbers = shapes.iter().map(|[rows, rank]| rows * rank).sum();
        Ok(LowProducts { numbers: Some(self.scratch(&[numbers], dtype)?), shapes })
    }

    /// The products of a left side and the first matrices of low-rank pairs, in order.
    fn low_products(&self, left: &Tensor, pairs: &[LowPair<'_>]) -> Result<LowProducts> {
        if pairs.is_empty() {
            return Ok(LowProducts::default());
        }
        let dtype = left.dtype();
        let lows = pairs.iter().map(|pair| pair.product(left)).collect::<Result<Vec<_>>>()?;
        let shapes = lows.iter().map(|low| [low.left.rows(), low.right.columns()]).collect();
        let mut products = self.room_for_products(shapes, dtype)?;
        let parts: Vec<_> = products.parts().collect();
        let rounded = products.numbers.as_mut().expect("there is room");
        let mut sums = self.scratch(rounded.shape().dims(), DType::F32)?;
        let (single, groups, jobs) = self.single_rows(lows.iter().zip(parts).collect());
        with_element!(dtype, T => {
            let (all_sums, all_rounded) = (SharedMut::new(sums.slice_mut::<f32>()?), SharedMut::new(rounded.slice_mut::<T>()?));
            let out = |rank: usize, part: &Range<usize>| {
                // SAFETY: each product has a part of its own.
                Out::new(unsafe { all_sums.part(part.clone()) }, rank, &Target::overwrite(), 1, rank)
            };
            let products: Vec<_> = single.iter().map(|(low, w, (shape, part))| (low.left, *w, out(shape[1], part))).collect();
            self.pool.run(groups.len(), &|task| {
                self.matmul_for(dtype).single_rows(&products[groups[task].clone()]);
                for (low, _, (_, part)) in &single[groups[task].clone()] {
                    // SAFETY: as above, and the product is done.
                    let (sums, rounded) = unsafe { (all_sums.part(part.clone()), all_rounded.part(part.clone())) };
                    convert::scale(self.isa, sums, low.scale, rounded);
                }
            });
            self.shared_out(jobs, |(low, _)| low.cost(), |(low, ([rows, rank], part))| {
                // SAFETY: each job has a part of its own.
                let (sums, rounded) = unsafe { (all_sums.part(part.clone()), all_rounded.part(part)) };
                let out = Out::new(&mut *sums, rank, &Target::overwrite(), rows, rank);
                self.multiply_all(low.left, low.right, out)?;
                self.scale_into::<T>(sums, low.scale, rounded);
                Ok(())
            })?;
        });
        Ok(products)
    }

    /// Takes out products of one row, as a decode step has for each adapter, and says which of them are computed together.
    #[allow(clippy::type_complexity)]
    fn single_rows<'l, 'a>(
        &self,
        jobs: Vec<LowJob<'l, 'a>>,
    ) -> (Vec<SingleRow<'l, 'a>>, Vec<Range<usize>>, Vec<LowJob<'l, 'a>>) {
        let common = |(low, _): &LowJob<'l, 'a>| match low.right {
            RightSide::Weights(w) => Some((self.matmul_for(w.dtype).single_row(&low.left, &w)?, w)),
            RightSide::Transposed(_) => None,
        };
        let (mut single, mut others) = (Vec::new(), Vec::new());
        for job in jobs {
            match common(&job) {
                Some((common, w)) => single.push((common, (job.0, w, job.1))),
                None => others.push(job),
            }
        }
        single.sort_by_key(|(common, _)| *common);
        let mut groups = Vec::new();
        let mut start = 0;
        for alike in single.chunk_by(|a, b| a.0 == b.0) {
            let end = start + alike.len();
            // A few are shared out rather than computed together.
            let at_once = alike.len().div_ceil(self.pool.num_threads()).min(SINGLE_ROWS);
            groups.extend((start..end).step_by(at_once).map(|first| first..end.min(first + at_once)));
            start = end;
        }
        (single.into_iter().map(|(_, job)| job).collect(), groups, others)
    }

    /// Runs all jobs; answers what they do, in order. Those that are large are divided among all threads, one after another; of the others, of which there are as many as there
    /// are adapters in a batch, each thread has whole ones.
    fn shared_out<J: Send, R: Send>(
        &self,
        jobs: Vec<J>,
        cost: impl Fn(&J) -> usize,
        run: impl Fn(J) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let total: usize = jobs.iter().map(&cost).sum();
        let is_large = |job: &J| cost(job) * 2 * self.pool.num_threads() > total;
        if self.pool.num_threads() == 1 || jobs.iter().all(is_large) {
            return jobs.into_iter().map(run).collect();
        }
        let mut small = Vec::new();
        let mut done: Vec<Option<Result<R>>> = Vec::with_capacity(jobs.len());
        for (place, job) in jobs.into_iter().enumerate() {
            if is_large(&job) {
                done.push(Some(run(job)));
            } else {
                done.push(None);
                small.push((place, Mutex::new((Some(job), None))));
            }
        }
        self.pool.run(small.len(), &|i| {
            // One thread has a job, and no one looks before all are done.
            let mut job = small[i].1.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            job.1 = job.0.take().map(&run);
        });
        for (place, job) in small {
            done[place] = job.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).1;
        }
        done.into_iter().map(|result| result.expect("every job was run")).collect()
    }

    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]` for each `low` and its `dw`, adding sequence after sequence; `sequences` are rows
    /// counted from the first of the blocks.
    pub(super) fn backward_weights(
        &self,
        x: Rows<'_>,
        sequences: &[Range<usize>],
        pairs: Vec<(Rows<'_>, &mut [f32])>,
    ) -> Result<()> {
        let target = Target { accumulate: true, ..Target::overwrite() };
        let (width, dtype) = (x.width(), x.dtype());
        let mut operands = Vec::with_capacity(pairs.len());
        for (low, dw) in pairs {
            operands.push((low, Out::new(dw, width, &target, low.width(), width)));
        }
        with_element!(dtype, T => self.matmul_for(dtype).backward_weights::<T>(x, sequences, &mut operands))
    }
}

/// Low-rank products as what is added to a product on its way. What has to be padded is.
fn addends<'a>(pending: &[Pending<'a>], padded: &'a mut Vec<Option<Buffer>>) -> Result<Vec<Addend<'a>>> {
    padded.resize_with(pending.len(), || None);
    let mut products = Vec::with_capacity(pending.len());
    for (p, padded) in pending.iter().zip(padded) {
        let left = p.low.whole_steps(padded)?;
        products.push(Addend { first_row: p.first_row, first_column: p.first_column, left, right: p.right });
    }
    Ok(products)
}

/// All pairs of all groups, in order.
pub(super) fn pairs<'l, 'a>(groups: &'l [LoraGroup<'a>]) -> impl Iterator<Item = (&'l LoraGroup<'a>, &'l LoraProjection<'a>)> {
    groups.iter().flat_map(|group| group.projections.iter().map(move |projection| (group, projection)))
}
