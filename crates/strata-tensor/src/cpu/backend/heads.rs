//! Linear layers of which each head has a part, between what belongs to the head and a latent: the two products that attention over latents absorbs into queries
//! and results (DeepSeek-V2, arXiv:2405.04434).
//!
//! Heads are work for the threads, and each head is a layer of [`linear`](super::linear) by itself: `x·Wᵀ` is its way forward and `x·W` its way back, low-rank
//! pairs included. Its rows of the packed weight are whole panels in all models that are known, and read where they lie.

use std::ops::Range;
use std::sync::Mutex;

use super::linear::{Pending, block, pairs, whole};
use super::memory::weights;
use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{HeadColumns, HeadPart, HeadSide, LoraGradient};
use crate::cpu::matmul::{Out, RightSide, Rows, Target, pack_rows, panel_bytes, unpack_row};
use crate::cpu::packed::{PANEL, PackedRef, PackedStack};
use crate::cpu::rows::convert;
use crate::cpu::threads::{Pool, SharedMut};
use crate::memory::Memory;
use crate::tape::{Linear, LoraGroup, LoraProjection};
use crate::{DType, Element, Error, Result, Tensor};

impl HeadPart {
    /// The outputs of the layer that belong to a head.
    fn outputs_of(&self, head: usize) -> Range<usize> {
        self.of(self.outputs, head)
    }

    /// The columns of the matrix of heads that belong to a head.
    fn columns_of(&self, head: usize) -> Range<usize> {
        self.of(self.columns, head)
    }

    fn of(&self, columns: HeadColumns, head: usize) -> Range<usize> {
        let first = columns.first + head * columns.stride;
        first..first + self.width
    }

    /// The columns of the matrix of latents that belong to a head.
    fn latent_of(&self, head: usize, width: usize) -> Range<usize> {
        head * self.latent_stride..head * self.latent_stride + width
    }
}

/// Some outputs of packed weights, as weights of their own. What does not lie in whole panels is copied.
fn outputs<'a>(
    alone: &CpuBackend,
    w: PackedRef<'a>,
    range: Range<usize>,
    copy: &'a mut Option<PackedStack>,
) -> Result<PackedRef<'a>> {
    if range.start.is_multiple_of(PANEL) && (range.end.is_multiple_of(PANEL) || range.end == w.out_features) {
        let first = range.start / PANEL * panel_bytes(&w);
        return Ok(PackedRef { out_features: range.len(), bytes: &w.bytes[first..], ..w });
    }
    let stack = copy.insert(PackedStack::zeros(1, w.in_features, range.len(), w.dtype.into())?);
    with_element!(w.dtype, T => {
        let (mut wide, mut row) = (vec![0.0; w.in_features], vec![T::from_f32(0.0); w.in_features]);
        for (i, output) in range.enumerate() {
            unpack_row::<T>(w, output, &mut wide);
            row.iter_mut().zip(&wide).for_each(|(row, &value)| *row = T::from_f32(value));
            pack_rows(&alone.pool, alone.isa, &row, i, &mut stack.layer_mut(0)?)?;
        }
    });
    Ok(stack.layer(0))
}

/// A low-rank pair as it lies, and its tokens.
struct Pair<'a> {
    tokens: Range<usize>,
    a: PackedRef<'a>,
    b: PackedRef<'a>,
    scale: f32,
}

impl<'a> Pair<'a> {
    fn all_of(layer: &Linear<'a>) -> Result<Vec<Self>> {
        let pair = |(group, p): (&LoraGroup<'a>, &LoraProjection<'a>)| {
            Ok(Pair { tokens: group.tokens.clone(), a: weights(p.a)?, b: weights(p.b)?, scale: p.scale })
        };
        pairs(&layer.lora).map(pair).collect()
    }
}

impl CpuBackend {
    /// Calls `body` with each head, and a backend that works on the thread that calls it.
    fn over_heads(&self, heads: usize, body: impl Fn(&CpuBackend, usize) -> Result<()> + Sync) -> Result<()> {
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        self.pool.run(heads, &|head| {
            let alone = CpuBackend { isa: self.isa, arithmetic: self.arithmetic, pool: Pool::new(1) };
            if let Err(error) = body(&alone, head) {
                failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
            }
        });
        failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
    }

    pub(super) fn through_heads(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        side: HeadSide,
        y: &mut Tensor,
    ) -> Result<()> {
        let (tokens, y_columns) = (x.rows(), y.shape().row_len());
        let (weight, lora) = (weights(layer.weight)?, Pair::all_of(layer)?);
        let latent = weight.in_features;
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_heads(part.heads, |alone, head| {
                let (columns, latents) = (part.columns_of(head), part.latent_of(head, latent));
                let (from, to) = match side {
                    HeadSide::ToLatents => (columns, latents),
                    HeadSide::FromLatents => (latents, columns),
                };
                let mut result = alone.scratch(&[tokens, to.len()], DType::F32)?;
                alone.through_head((x, from), weight, &lora, part.outputs_of(head), side, &mut result)?;
                for (token, result) in result.slice::<f32>()?.chunks_exact(to.len()).enumerate() {
                    let range = token * y_columns + to.start..token * y_columns + to.end;
                    // SAFETY: each head has columns of its own.
                    convert::scale(self.isa, result, 1.0, unsafe { rows_mut(&y, &range, 1) });
                }
                Ok(())
            })?;
        });
        Ok(())
    }

    /// One head: some columns of a matrix, by outputs `range` of the layer.
    fn through_head(
        &self,
        (x, from): (&Tensor, Range<usize>),
        weight: PackedRef<'_>,
        lora: &[Pair<'_>],
        range: Range<usize>,
        side: HeadSide,
        result: &mut Tensor,
    ) -> Result<()> {
        let right = |w| match side {
            HeadSide::ToLatents => RightSide::Transposed(w),
            HeadSide::FromLatents => RightSide::Weights(w),
        };
        let (mut weight_copy, mut copies) = (None, Vec::new());
        copies.resize_with(lora.len(), || None);
        let mut of_head = Vec::with_capacity(lora.len());
        for (p, copy) in lora.iter().zip(&mut copies) {
            let b = outputs(self, p.b, range.clone(), copy)?;
            let (first, second) = if side == HeadSide::ToLatents { (b, p.a) } else { (p.a, b) };
            let x = block(x, p.tokens.clone(), from.clone())?;
            of_head.push((self.low_product(x, right(first), p.scale, x.dtype())?, p.tokens.start, right(second)));
        }
        let mut pending = Vec::with_capacity(of_head.len());
        for (low, first_row, right) in &of_head {
            pending.push(Pending { low: whole(low)?, first_row: *first_row, first_column: 0, right: *right });
        }
        let weight = outputs(self, weight, range, &mut weight_copy)?;
        self.product(block(x, 0..x.rows(), from)?, right(weight), None, &pending, result)
    }

    pub(super) fn gradients_of_heads(
        &self,
        heads: &Tensor,
        latents: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        let (dtype, latent) = (heads.dtype(), layer.weight.in_features());
        for ((group, p), gradient) in pairs(&layer.lora).zip(gradients) {
            let Some(LoraGradient { a, b }) = gradient else { continue };
            let (tokens, rank) = (group.tokens.clone(), p.a.out_features());
            let (of_a, of_b, scale) = (weights(p.a)?, weights(p.b)?, p.scale);
            // `[tokens, heads, rank]` both: from the heads through B, and from the latents through A.
            let mut by_b = self.scratch(&[tokens.len(), part.heads * rank], dtype)?;
            let mut by_a = self.scratch(&[tokens.len(), part.heads * rank], dtype)?;
            with_element!(dtype, T => {
                let (by_b, by_a) = (SharedMut::new(by_b.slice_mut::<T>()?), SharedMut::new(by_a.slice_mut::<T>()?));
                self.over_heads(part.heads, |alone, head| {
                    let tokens = tokens.clone();
                    let mut copy = None;
                    let b = outputs(alone, of_b, part.outputs_of(head), &mut copy)?;
                    let x = block(heads, tokens.clone(), part.columns_of(head))?;
                    let z = block(latents, tokens.clone(), part.latent_of(head, latent))?;
                    let lows = [
                        (alone.low_product(x, RightSide::Transposed(b), scale, dtype)?, &by_b),
                        (alone.low_product(z, RightSide::Weights(of_a), scale, dtype)?, &by_a),
                    ];
                    for (low, all) in &lows {
                        for (token, low) in low.slice::<T>()?.chunks_exact(rank).enumerate() {
                            let first = (token * part.heads + head) * rank;
                            // SAFETY: each head has columns of its own.
                            unsafe { rows_mut(all, &(first..first + rank), 1) }.copy_from_slice(low);
                        }
                    }
                    Ok(())
                })?;
            });
            let sequences: Vec<_> = group.sequences.iter().map(|s| s.start - tokens.start..s.end - tokens.start).collect();
            let target = |first_column| Target { first_row: 0, first_column, accumulate: true };
            with_element!(dtype, T => {
                let matmul = self.matmul_for(dtype);
                // The heads of a token are rows one after another, so that a batch sums up to the same in several parts.
                let rows = tokens.start * part.heads..tokens.end * part.heads;
                let of_heads: Vec<_> = sequences.iter().map(|s| s.start * part.heads..s.end * part.heads).collect();
                let z = Rows::new(latents.slice::<T>()?, part.latent_stride, rows, 0..latent);
                let low = Rows::new(by_b.slice::<T>()?, rank, 0..tokens.len() * part.heads, 0..rank);
                let out = Out::new(a.reborrow().into_slice::<f32>()?, latent, &target(0), rank, latent);
                matmul.backward_weights::<T>(z, &of_heads, &mut [(low, out)])?;
                let columns = p.b.out_features();
                for head in 0..part.heads {
                    let x = block(heads, tokens.clone(), part.columns_of(head))?;
                    let low = block(&by_a, 0..tokens.len(), head * rank..(head + 1) * rank)?;
                    let first = part.outputs_of(head).start;
                    let out = Out::new(b.reborrow().into_slice::<f32>()?, columns, &target(first), rank, part.width);
                    matmul.backward_weights::<T>(x, &sequences, &mut [(low, out)])?;
                }
            });
        }
        Ok(())
    }
}
