//! Rows of tables, and the low-rank pairs of embeddings.

use std::ops::Range;

use super::linear::{all_of, block, rows_of};
use super::memory::weights;
use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{LoraGradient, LowProducts};
use crate::cpu::matmul::{self, Addends, RightSide, Target};
use crate::cpu::rows::convert;
use crate::cpu::threads::SharedMut;
use crate::memory::Memory;
use crate::tape::EmbeddingLora;
use crate::{DType, PackedRef, Result, Tensor, TensorMut, TensorRef};

impl CpuBackend {
    pub(super) fn rows_of_table(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        let n = table.shape().row_len();
        let out = SharedMut::new(out.slice_mut::<f32>()?);
        with_element!(table.dtype(), T => {
            let table = table.slice::<T>()?;
            self.over_rows(ids.len(), n, |rows| {
                for row in rows {
                    // SAFETY: tasks have rows of their own.
                    let out = unsafe { rows_mut(&out, &(row..row + 1), n) };
                    convert::to_f32(self.isa, &table[ids[row] as usize * n..][..n], out);
                }
            });
        });
        Ok(())
    }

    pub(super) fn rows_of_packed_table(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        let table = weights(table)?;
        let n = table.in_features;
        let out = SharedMut::new(out.slice_mut::<f32>()?);
        self.over_rows(ids.len(), n, |rows| {
            for row in rows {
                // SAFETY: tasks have rows of their own.
                let out = unsafe { rows_mut(&out, &(row..row + 1), n) };
                with_element!(table.dtype, T => matmul::unpack_row::<T>(table, ids[row] as usize, out));
            }
        });
        Ok(())
    }

    pub(super) fn forward_embedding_lora(
        &self,
        ids: &[u32],
        lora: &[EmbeddingLora<'_>],
        y: &mut Tensor,
    ) -> Result<LowProducts> {
        let Some(first) = lora.first() else { return Ok(LowProducts::default()) };
        let shapes = lora.iter().map(|pair| [pair.tokens.len(), pair.b.in_features()]);
        let mut low = self.room_for_products(shapes.collect(), first.b.dtype())?;
        let parts: Vec<Range<usize>> = low.parts().map(|(_, part)| part).collect();
        for (i, (pair, part)) in lora.iter().zip(parts).enumerate() {
            let (ids, b) = (&ids[pair.tokens.clone()], weights(pair.b)?);
            let mut rows = self.scratch(&[ids.len(), b.in_features], DType::F32)?;
            self.rows_of_table(pair.a, ids, &mut rows)?;
            let numbers = low.numbers.as_mut().expect("there is room");
            with_element!(b.dtype, T => self.scale_into::<T>(rows.slice()?, pair.scale, &mut numbers.slice_mut()?[part]));
            drop(rows);
            let target = Target { first_row: pair.tokens.start, first_column: 0, accumulate: true };
            let y = all_of(y, &target, ids.len(), b.out_features)?;
            let own = rows_of(&low)?.nth(i).expect("of each pair");
            self.matmul_for(b.dtype).forward(own, b, y, &Addends::default())?;
        }
        Ok(low)
    }

    pub(super) fn backward_embedding_lora(
        &self,
        dy: &Tensor,
        ids: &[u32],
        low: &LowProducts,
        lora: &[EmbeddingLora<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        for ((pair, low), gradient) in lora.iter().zip(rows_of(low)?).zip(gradients) {
            let Some(LoraGradient { a, b }) = gradient else { continue };
            let tokens = pair.tokens.clone();
            let sequences: Vec<_> = pair.sequences.iter().map(|s| s.start - tokens.start..s.end - tokens.start).collect();
            let dy = || block(dy, tokens.clone(), 0..dy.shape().row_len());
            self.backward_weights(dy()?, &sequences, vec![(low, b.reborrow().into_slice()?)])?;
            // No product reads it: it stays exact.
            let dlow = self.low_product(dy()?, RightSide::Transposed(weights(pair.b)?), pair.scale, DType::F32)?;
            self.add_to_rows(&dlow, &sequences, &ids[tokens], a.reborrow())?;
        }
        Ok(())
    }

    /// Adds each row of f32 `rows` that is in a sequence to row `ids[row]` of `table`, rows of one id one after another.
    fn add_to_rows(&self, rows: &Tensor, sequences: &[Range<usize>], ids: &[u32], table: TensorMut<'_>) -> Result<()> {
        let n = rows.shape().row_len();
        let mut order: Vec<usize> = sequences.iter().cloned().flatten().collect();
        // Stable: those of one id stay in their order.
        order.sort_by_key(|&row| ids[row]);
        let runs: Vec<&[usize]> = order.chunk_by(|&a, &b| ids[a] == ids[b]).collect();
        let (rows, table) = (rows.slice::<f32>()?, SharedMut::new(table.into_slice::<f32>()?));
        self.over_rows(runs.len(), n, |some| {
            for run in &runs[some] {
                let id = ids[run[0]] as usize;
                // SAFETY: no two runs are of one id.
                let sum = unsafe { rows_mut(&table, &(id..id + 1), n) };
                run.iter().for_each(|row| convert::add(self.isa, &rows[row * n..][..n], sum));
            }
        });
        Ok(())
    }
}
