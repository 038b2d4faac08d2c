//! Low-rank products: for now one product after another, in the order of groups and projections.

use std::ops::Range;

use super::memory::weights;
use super::{CpuBackend, with_element};
use crate::backend::{LoraGradient, LowProducts};
use crate::cpu::matmul::{Out, Rows, Target};
use crate::cpu::packed::PackedRef;
use crate::memory::Memory;
use crate::tape::LoraGroup;
use crate::{DType, Result, Tensor, TensorMut};

/// Some rows and columns of a matrix `[rows, columns]`.
#[derive(Clone)]
pub(super) struct Block<'a> {
    tensor: &'a Tensor,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Block<'a> {
    /// All of a matrix; further axes count as columns.
    pub(super) fn whole(tensor: &'a Tensor) -> Self {
        Block::rows(tensor, 0..tensor.rows())
    }

    /// Some rows of a matrix.
    fn rows(tensor: &'a Tensor, rows: Range<usize>) -> Self {
        Block { tensor, rows, columns: 0..tensor.shape().row_len() }
    }

    /// The rows, in their dtype.
    fn as_rows(&self) -> Result<Rows<'a>> {
        with_element!(self.tensor.dtype(), T => {
            let columns = self.tensor.shape().row_len();
            Ok(Rows::new(self.tensor.slice::<T>()?, columns, self.rows.clone(), self.columns.clone()))
        })
    }
}

impl CpuBackend {
    /// `y = x·Wᵀ`, f32, into a place of `y`.
    pub(super) fn forward(&self, x: &Block<'_>, w: PackedRef<'_>, y: &mut Tensor, target: &Target) -> Result<()> {
        let width = y.shape().row_len();
        let out = Out::new(y.slice_mut::<f32>()?, width, target, x.rows.len(), w.out_features);
        self.matmul_for(w.dtype).forward(x.as_rows()?, w, out)
    }

    /// `dx = dy·W`, f32, into a place of `dx`.
    pub(super) fn backward_input(&self, dy: &Block<'_>, w: PackedRef<'_>, dx: &mut Tensor, target: &Target) -> Result<()> {
        let width = dx.shape().row_len();
        let out = Out::new(dx.slice_mut::<f32>()?, width, target, dy.rows.len(), w.in_features);
        self.matmul_for(w.dtype).backward_input(dy.as_rows()?, w, out)
    }

    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]` for each `low` and its `dw`, adding sequence after sequence; `sequences` are rows
    /// counted from the first of the blocks.
    fn backward_weights(&self, x: &Block<'_>, sequences: &[Range<usize>], pairs: Vec<(&Tensor, TensorMut<'_>)>) -> Result<()> {
        let target = Target { accumulate: true, ..Target::overwrite() };
        let width = x.columns.len();
        let pair = |(low, dw): (_, TensorMut<'_>)| {
            let low = Block::whole(low);
            let rank = low.columns.len();
            Ok((low.as_rows()?, Out::new(dw.into_slice::<f32>()?, width, &target, rank, width)))
        };
        let mut pairs = pairs.into_iter().map(pair).collect::<Result<Vec<_>>>()?;
        let dtype = x.tensor.dtype();
        with_element!(dtype, T => self.matmul_for(dtype).backward_weights::<T>(x.as_rows()?, sequences, &mut pairs))
    }

    /// `scale · product` in `dtype`.
    fn scaled(&self, product: &Tensor, scale: f32, dtype: DType) -> Result<Tensor> {
        let mut low = self.scratch(product.shape().dims(), dtype)?;
        with_element!(dtype, T => self.scale_into::<T>(product.slice()?, scale, low.slice_mut()?));
        Ok(low)
    }

    pub(super) fn lora_forward(&self, x: &Tensor, groups: &[LoraGroup<'_>], mut y: Option<&mut Tensor>) -> Result<LowProducts> {
        let mut low_products = Vec::new();
        for group in groups {
            for p in &group.projections {
                let mut product = self.scratch(&[group.tokens.len(), p.a.out_features()], DType::F32)?;
                let x_rows = Block::rows(x, group.tokens.clone());
                self.forward(&x_rows, weights(p.a)?, &mut product, &Target::overwrite())?;
                let low = self.scaled(&product, p.scale, x.dtype())?;
                if let Some(y) = &mut y {
                    let target = Target { first_row: group.tokens.start, first_column: p.first_column, accumulate: true };
                    self.forward(&Block::whole(&low), weights(p.b)?, y, &target)?;
                }
                low_products.push(low);
            }
        }
        Ok(LowProducts(low_products))
    }

    pub(super) fn lora_gradients(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        groups: &[LoraGroup<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
        mut dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let mut pairs = low.0.iter().zip(gradients);
        for group in groups {
            let tokens = group.tokens.clone();
            let sequences: Vec<_> = group.sequences.iter().map(|s| s.start - tokens.start..s.end - tokens.start).collect();
            let mut of_a: Vec<(Tensor, TensorMut<'_>)> = Vec::new();
            for p in &group.projections {
                let (low, gradient) = pairs.next().expect("one low product and one gradient for each projection");
                if gradient.is_none() && dx.is_none() {
                    continue;
                }
                let columns = p.first_column..p.first_column + p.b.out_features();
                let dy = Block { tensor: dy, rows: tokens.clone(), columns };
                let mut product = self.scratch(&[tokens.len(), p.a.out_features()], DType::F32)?;
                self.backward_input(&dy, weights(p.b)?, &mut product, &Target::overwrite())?;
                let dlow = self.scaled(&product, p.scale, x.dtype())?;
                if let Some(dx) = &mut dx {
                    let target = Target { first_row: tokens.start, first_column: 0, accumulate: true };
                    self.backward_input(&Block::whole(&dlow), weights(p.a)?, dx, &target)?;
                }
                if let Some(LoraGradient { a, b }) = gradient {
                    self.backward_weights(&dy, &sequences, vec![(low, b.reborrow())])?;
                    of_a.push((dlow, a.reborrow()));
                }
            }
            // All projections read the same rows.
            let of_a: Vec<_> = of_a.iter_mut().map(|(dlow, a)| (&*dlow, a.reborrow())).collect();
            if !of_a.is_empty() {
                self.backward_weights(&Block::rows(x, tokens), &sequences, of_a)?;
            }
        }
        Ok(())
    }
}
