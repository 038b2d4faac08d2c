//! What an adapter adds to a matrix.

use std::num::NonZeroUsize;
use std::ops::Range;

/// How a matrix lies of which a pair has the outputs.
#[derive(Clone, Copy, Debug)]
pub enum Lies {
    /// `[out, in]`: its outputs are every `step`th row from `first` on.
    Rows {
        /// The row of its first output.
        first: usize,
        /// From one of its rows to the next.
        step: usize,
    },
    /// `[in, out]`: they are every `step`th column.
    Columns {
        /// The column of its first output.
        first: usize,
        /// From one of its columns to the next.
        step: usize,
    },
    /// `[vocab, hidden]`, a row for each token.
    Table,
}

impl Lies {
    /// All rows.
    pub const AS_IT_IS: Lies = Lies::Rows { first: 0, step: 1 };
}

/// A pair in memory.
pub struct Pair {
    /// `[rank, in]`, or `[vocab, rank]` of a table.
    pub a: Vec<f32>,
    /// `[rank, out]`.
    pub b: Vec<f32>,
    /// What their product is multiplied by.
    pub scale: f32,
    /// Where the matrix has it.
    pub lies: Lies,
    /// Inputs of the pair.
    pub in_features: usize,
    /// Its outputs.
    pub out_features: usize,
}

/// Adds pairs to `rows`, which are those of `range` of a matrix of `columns`, on all threads of the machine.
///
/// # Panics
/// If a pair has not the numbers that its features need.
pub fn add_pairs(pairs: &[Pair], rows: &mut [f32], range: Range<usize>, columns: usize) {
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
