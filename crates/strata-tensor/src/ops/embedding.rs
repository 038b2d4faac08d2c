//! Token embedding. The table is frozen; what goes back goes to the low-rank pairs of groups that have one, see [`EmbeddingLora`].

use std::rc::Rc;
use std::sync::Arc;

use super::check_run;
use crate::tape::{EmbeddingLora, LoraSite, Tape, Var, in_dtype};
use crate::{DType, Error, PackedRef, Result, TensorRef};

const OP: &str = "embedding";

/// The table of a token embedding, `[vocab_size, hidden_size]`.
#[derive(Clone, Copy)]
pub enum EmbeddingTable<'a> {
    /// A table of its own.
    Rows(TensorRef<'a>),
    /// The unembedding's weight, where the two are tied.
    Tied(PackedRef<'a>),
}

impl EmbeddingTable<'_> {
    /// `[vocab_size, hidden_size]`.
    fn shape(&self) -> [usize; 2] {
        match self {
            EmbeddingTable::Rows(t) => [t.shape().leading(), t.shape().row_len()],
            EmbeddingTable::Tied(w) => [w.out_features(), w.in_features()],
        }
    }

    fn dtype(&self) -> DType {
        match self {
            EmbeddingTable::Rows(t) => t.dtype(),
            EmbeddingTable::Tied(w) => w.dtype(),
        }
    }
}

impl<'a> Tape<'a> {
    /// Embeddings of `ids`, f32 `[tokens, hidden_size]`, with the low-rank additions of `lora`.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, or a pair does not fit the table.
    pub fn embedding(&mut self, table: EmbeddingTable<'_>, lora: Arc<[EmbeddingLora<'a>]>, ids: &'a [u32]) -> Result<Var> {
        let [vocab, hidden] = table.shape();
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::Index { op: OP, what: "vocabulary", index: id as usize, size: vocab });
        }
        check_pairs(&lora, ids.len(), &table)?;
        let mut y = self.backend().scratch(&[ids.len(), hidden], DType::F32)?;
        match table {
            EmbeddingTable::Rows(t) => self.backend().embedding(t, ids, &mut y)?,
            EmbeddingTable::Tied(w) => self.backend().embedding_packed(w, ids, &mut y)?,
        }
        let is_recorded = self.records(&[], !lora.is_empty());
        if lora.is_empty() {
            return Ok(self.constant(y));
        }
        let low = self.backend().embedding_lora(ids, &lora, &mut y)?;
        if !is_recorded {
            return Ok(self.constant(y));
        }
        let dtype = table.dtype();
        Ok(self.push(Rc::new(y), move |pass, dy| {
            let dy = in_dtype(pass.backend, dy, dtype)?;
            let sites: Vec<LoraSite> = lora.iter().map(|pair| pair.site).collect();
            let mut gradients = pass.lora.at(&sites);
            pass.backend.embedding_lora_backward(&dy, ids, &low, &lora, &mut gradients)
        }))
    }
}

/// Refuses pairs of what are not runs of `tokens` tokens, and those that do not fit the table.
fn check_pairs(lora: &[EmbeddingLora<'_>], tokens: usize, table: &EmbeddingTable<'_>) -> Result<()> {
    let [vocab, hidden] = table.shape();
    for EmbeddingLora { tokens: run, sequences, a, b, .. } in lora {
        check_run(OP, run, sequences, tokens)?;
        if let Some(actual) = [a.dtype(), b.dtype()].into_iter().find(|&dtype| dtype != table.dtype()) {
            return Err(Error::DType { op: OP, expected: table.dtype(), actual });
        }
        let rank = b.in_features();
        if a.shape().dims() != [vocab, rank] || b.out_features() != hidden || rank == 0 {
            return Err(Error::Shape {
                op: OP,
                expected: format!("low-rank pair [{vocab}, r], r → {hidden}"),
                actual: format!("{}, {rank} → {}", a.shape(), b.out_features()),
            });
        }
    }
    Ok(())
}
