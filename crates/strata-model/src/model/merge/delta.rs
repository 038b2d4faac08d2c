//! What an adapter adds to a matrix.

use std::num::NonZeroUsize;
use std::ops::Range;

use strata_tensor::Backend;

use crate::Result;
use crate::lora::{LoraStack, PairShape};

/// The pairs of an adapter that are added to a tensor.
pub(super) struct Addend<'a> {
    pub(super) stack: &'a LoraStack,
    pub(super) shape: PairShape,
    /// Entry of the stacks for the tensor's first matrix; those of the others follow.
    pub(super) entry: usize,
    pub(super) lies: Lies,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
}

/// How a matrix lies of which a pair has the outputs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lies {
    /// `[out, in]`: its outputs are every `step`th row from `first` on.
    Rows { first: usize, step: usize },
    /// `[in, out]`: they are every `step`th column.
    Columns { first: usize, step: usize },
    /// `[vocab, hidden]`, a row for each token.
    Table,
}

impl Lies {
    /// All rows.
    pub(super) const AS_IT_IS: Lies = Lies::Rows { first: 0, step: 1 };
}

/// A pair in memory.
pub(super) struct Pair {
    /// `[rank, in]`, or `[vocab, rank]` of a table.
    a: Vec<f32>,
    /// `[rank, out]`.
    b: Vec<f32>,
    scale: f32,
    lies: Lies,
    in_features: usize,
    out_features: usize,
}

impl Addend<'_> {
    /// The pair of one of the tensor's matrices.
    pub(super) fn pair(&self, backend: &dyn Backend, matrix: usize) -> Result<Pair> {
        let LoraStack { a, b } = self.stack;
        let &Addend { shape, lies, in_features, out_features, .. } = self;
        let (a, b) = (backend.to_f32_vec(a.row(self.entry + matrix))?, backend.to_f32_vec(b.row(self.entry + matrix))?);
        Ok(Pair { a, b, scale: shape.scale, lies, in_features, out_features })
    }
}

/// Adds pairs to rows `range` of a matrix of `columns`.
pub(super) fn add(pairs: &[Pair], rows: &mut [f32], range: Range<usize>, columns: usize) {
    if pairs.is_empty() || rows.is_empty() {
        return;
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let each = range.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (part, rows) in rows.chunks_mut(each * columns).enumerate() {
            let first = range.start + part * each;
            scope.spawn(move || {
                for (row, values) in (first..).zip(rows.chunks_exact_mut(columns)) {
                    pairs.iter().for_each(|pair| pair.add_to_row(row, values));
                }
            });
        }
    });
}

impl Pair {
    fn add_to_row(&self, row: usize, values: &mut [f32]) {
        let rank = self.b.len() / self.out_features;
        match self.lies {
            Lies::Rows { first, step } => {
                let Some(output) = row.checked_sub(first).filter(|past| past % step == 0).map(|past| past / step) else {
                    return;
                };
                if output < self.out_features {
                    let factors = (0..rank).map(|k| self.b[k * self.out_features + output]);
                    let sum = combination(factors, &self.a, self.in_features);
                    values.iter_mut().zip(sum).for_each(|(value, sum)| *value += self.scale * sum);
                }
            }
            Lies::Columns { first, step } => {
                let factors = (0..rank).map(|k| self.a[k * self.in_features + row]);
                let sum = combination(factors, &self.b, self.out_features);
                values[first..].iter_mut().step_by(step).zip(sum).for_each(|(value, sum)| *value += self.scale * sum);
            }
            Lies::Table => {
                let factors = self.a[row * rank..(row + 1) * rank].iter().copied();
                let sum = combination(factors, &self.b, self.out_features);
                values.iter_mut().zip(sum).for_each(|(value, sum)| *value += self.scale * sum);
            }
        }
    }
}

/// The sum of vectors of `width`, each times its factor.
fn combination(factors: impl Iterator<Item = f32>, vectors: &[f32], width: usize) -> Vec<f32> {
    let mut sum = vec![0.0; width];
    for (factor, vector) in factors.zip(vectors.chunks_exact(width)) {
        sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += factor * value);
    }
    sum
}
