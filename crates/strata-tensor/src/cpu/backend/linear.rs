//! Linear layers with their low-rank additions, which join the base product while its rows are in cache.

use std::ops::Range;

use super::memory::weights;
use super::{CpuBackend, with_element};
use crate::backend::{LoraGradient, LowProducts};
use crate::cpu::matmul::{Addend, Addends, Out, RightSide, Rows, Target};
use crate::cpu::memory::Buffer;
use crate::memory::Memory;
use crate::tape::{Linear, LoraGroup, LoraProjection};
use crate::{DType, Result, Tensor, TensorMut};

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

/// A low-rank product on its way to a result.
pub(super) struct Pending<'a> {
    /// Its left side, `[tokens, rank]`.
    pub(super) low: &'a Tensor,
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    pub(super) right: RightSide<'a>,
}

impl Pending<'_> {
    /// Where it goes, if it goes alone.
    fn target(&self) -> Target {
        Target { first_row: self.first_row, first_column: self.first_column, accumulate: true }
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
        let multiply = |left: Rows<'_>, right, out, addends: &Addends<'_>| match right {
            RightSide::Weights(w) => self.matmul_for(w.dtype).forward(left, w, out, addends),
            RightSide::Transposed(w) => self.matmul_for(w.dtype).backward_input(left, w, out, addends),
        };
        let joins = pending.iter().all(|p| Addend::can_join(p.first_column, &p.right));
        let (joining, alone) = if joins { (pending, &[][..]) } else { (&[][..], pending) };
        let mut padded: Vec<Option<Buffer>> = joining.iter().map(|_| None).collect();
        let mut products = Vec::with_capacity(joining.len());
        for (p, padded) in joining.iter().zip(&mut padded) {
            let left = whole(p.low)?.whole_steps(padded)?;
            products.push(Addend { first_row: p.first_row, first_column: p.first_column, left, right: p.right });
        }
        let (rows, columns) = (left.rows(), right.columns());
        multiply(left, right, all_of(out, &Target::overwrite(), rows, columns)?, &Addends { bias, products })?;
        for p in alone {
            let out = all_of(out, &p.target(), p.low.rows(), p.right.columns())?;
            multiply(whole(p.low)?, p.right, out, &Addends::default())?;
        }
        Ok(())
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
        let mut low_products = Vec::new();
        for (group, p) in pairs(&layer.lora) {
            let x_rows = block(x, group.tokens.clone(), 0..x.shape().row_len())?;
            low_products.push(self.low_product(x_rows, RightSide::Weights(weights(p.a)?), p.scale, x.dtype())?);
        }
        if let Some(y) = y {
            let mut pending = Vec::with_capacity(low_products.len());
            for ((group, p), low) in pairs(&layer.lora).zip(&low_products) {
                let right = RightSide::Weights(weights(p.b)?);
                pending.push(Pending { low, first_row: group.tokens.start, first_column: p.first_column, right });
            }
            let bias = layer.bias.map(|bias| bias.slice::<f32>()).transpose()?;
            self.product(whole(x)?, RightSide::Weights(weights(layer.weight)?), bias, &pending, y)?;
        }
        Ok(LowProducts(low_products))
    }

    pub(super) fn backward_linear(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        layer: &Linear<'_>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let mut by_low = Vec::new();
        for ((group, p), gradient) in pairs(&layer.lora).zip(&*gradients) {
            let is_wanted = gradient.is_some() || dx.is_some();
            let dy = block(dy, group.tokens.clone(), p.first_column..p.first_column + p.b.out_features())?;
            let dlow = || self.low_product(dy, RightSide::Transposed(weights(p.b)?), p.scale, x.dtype());
            by_low.push(is_wanted.then(dlow).transpose()?);
        }
        if let Some(dx) = dx {
            let mut pending = Vec::with_capacity(by_low.len());
            for ((group, p), low) in pairs(&layer.lora).zip(&by_low) {
                let low = low.as_ref().expect("all are made for dx");
                let right = RightSide::Transposed(weights(p.a)?);
                pending.push(Pending { low, first_row: group.tokens.start, first_column: 0, right });
            }
            self.product(whole(dy)?, RightSide::Transposed(weights(layer.weight)?), None, &pending, dx)?;
        }
        let mut pairs = low.0.iter().zip(&by_low).zip(gradients);
        for group in &*layer.lora {
            let tokens = group.tokens.clone();
            let sequences: Vec<_> = group.sequences.iter().map(|s| s.start - tokens.start..s.end - tokens.start).collect();
            let mut of_a: Vec<(&Tensor, TensorMut<'_>)> = Vec::new();
            for (p, ((low, dlow), gradient)) in group.projections.iter().zip(&mut pairs) {
                let (Some(dlow), Some(LoraGradient { a, b })) = (dlow, gradient) else { continue };
                let dy = block(dy, tokens.clone(), p.first_column..p.first_column + p.b.out_features())?;
                self.backward_weights(dy, &sequences, vec![(low, b.reborrow())])?;
                of_a.push((dlow, a.reborrow()));
            }
            // All projections read the same rows.
            if !of_a.is_empty() {
                self.backward_weights(block(x, tokens, 0..x.shape().row_len())?, &sequences, of_a)?;
            }
        }
        Ok(())
    }

    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]` for each `low` and its `dw`, adding sequence after sequence; `sequences` are rows
    /// counted from the first of the blocks.
    pub(super) fn backward_weights(
        &self,
        x: Rows<'_>,
        sequences: &[Range<usize>],
        pairs: Vec<(&Tensor, TensorMut<'_>)>,
    ) -> Result<()> {
        let target = Target { accumulate: true, ..Target::overwrite() };
        let (width, dtype) = (x.width(), x.dtype());
        let mut operands = Vec::with_capacity(pairs.len());
        for (low, dw) in pairs {
            let low = whole(low)?;
            operands.push((low, Out::new(dw.into_slice::<f32>()?, width, &target, low.width(), width)));
        }
        with_element!(dtype, T => self.matmul_for(dtype).backward_weights::<T>(x, sequences, &mut operands))
    }
}

/// All pairs of all groups, in order.
pub(super) fn pairs<'l, 'a>(groups: &'l [LoraGroup<'a>]) -> impl Iterator<Item = (&'l LoraGroup<'a>, &'l LoraProjection<'a>)> {
    groups.iter().flat_map(|group| group.projections.iter().map(move |projection| (group, projection)))
}
