//! Token embedding. Frozen: nothing goes back.

use crate::tape::{Tape, Var};
use crate::{DType, Error, PackedRef, Result, TensorRef};

/// The table of a token embedding, `[vocab_size, hidden_size]`.
#[derive(Clone, Copy)]
pub enum EmbeddingTable<'a> {
    /// A table of its own.
    Rows(TensorRef<'a>),
    /// The unembedding's weight, where the two are tied.
    Tied(PackedRef<'a>),
}

impl<'a> Tape<'a> {
    /// Embeddings of `ids`, f32 `[tokens, hidden_size]`.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    pub fn embedding(&mut self, table: EmbeddingTable<'_>, ids: &[u32]) -> Result<Var> {
        let (vocab, hidden) = match table {
            EmbeddingTable::Rows(t) => (t.shape().leading(), t.shape().row_len()),
            EmbeddingTable::Tied(w) => (w.out_features(), w.in_features()),
        };
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::Index { op: "embedding", what: "vocabulary", index: id as usize, size: vocab });
        }
        let mut out = self.backend().scratch(&[ids.len(), hidden], DType::F32)?;
        match table {
            EmbeddingTable::Rows(t) => self.backend().embedding(t, ids, &mut out)?,
            EmbeddingTable::Tied(w) => self.backend().embedding_packed(w, ids, &mut out)?,
        }
        Ok(self.constant(out))
    }
}
