//! Rows of a batch that need not be computed, because an earlier one has the same value.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::AttentionSpan;
use crate::tape::LoraGroup;
use crate::{Backend, Result, Tensor};

/// Which rows of a batch repeat others: those of sequences that begin as an earlier one of the same low-rank pairs does, as far as they are the same. Since nothing
/// that is computed for a row depends on what else is in the batch or comes later in its sequence, such a row has the bits of the other.
///
/// Ops that cost much compute the first of equal rows and copy the result; all others compute every row. Gradients of equal rows differ: the way back has all of them.
#[derive(Debug, PartialEq)]
pub struct Repeats {
    /// The rows that are computed, ascending.
    computed: Vec<usize>,
    /// For each row, the place of what it has among those.
    places: Vec<usize>,
}

impl Repeats {
    /// `firsts[row]`: the first row with the same value, itself if there is none before it.
    ///
    /// # Panics
    /// If that is a row which repeats another, or comes later.
    pub fn new(firsts: &[usize]) -> Self {
        let mut computed = Vec::new();
        let mut places = Vec::with_capacity(firsts.len());
        for (row, &first) in firsts.iter().enumerate() {
            if first == row {
                places.push(computed.len());
                computed.push(row);
            } else {
                assert!(
                    first < row && firsts[first] == first,
                    "row {row} repeats row {first}, which is not the first of its kind"
                );
                places.push(places[first]);
            }
        }
        Repeats { computed, places }
    }

    /// How many rows are computed.
    pub fn num_computed(&self) -> usize {
        self.computed.len()
    }

    /// Rows of the batch.
    pub(crate) fn rows(&self) -> usize {
        self.places.len()
    }

    /// Where what each of `rows` has lies among the rows that are computed.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn places(&self, rows: impl IntoIterator<Item = usize>) -> Vec<usize> {
        rows.into_iter().map(|row| self.places[row]).collect()
    }

    /// Of the rows that are computed, counted from the first of them, those of a run of all rows.
    pub fn own(&self, rows: &Range<usize>) -> Range<usize> {
        let place = |row: usize| self.computed.partition_point(|&computed| computed < row);
        place(rows.start)..place(rows.end)
    }

    /// The rows that are computed, ascending.
    pub fn firsts(&self) -> &[usize] {
        &self.computed
    }

    /// A sequence as runs of the rows that are computed, the last of which holds what is its own, if anything is.
    pub(crate) fn runs<'s>(&self, span: &AttentionSpan<'s>) -> Vec<AttentionSpan<'s>> {
        let places = &self.places[span.tokens.clone()];
        let mut runs: Vec<AttentionSpan<'s>> = Vec::new();
        for (i, &place) in places.iter().enumerate() {
            match runs.last_mut().filter(|run| run.tokens.end == place) {
                Some(run) => run.tokens.end += 1,
                None => runs.push(AttentionSpan { tokens: place..place + 1, past: span.past + i, pages: span.pages }),
            }
        }
        runs
    }

    /// What of a sequence is its own, of the rows that are computed.
    pub(crate) fn own_queries<'s>(&self, span: &AttentionSpan<'s>) -> Option<AttentionSpan<'s>> {
        let tokens = self.own(&span.tokens);
        let past = span.past + span.tokens.len() - tokens.len();
        (!tokens.is_empty()).then_some(AttentionSpan { tokens, past, pages: span.pages })
    }

    /// The first row with the value of this one.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn first(&self, row: usize) -> usize {
        self.computed[self.places[row]]
    }

    /// The same runs of low-rank pairs, of rows counted among those that are computed.
    pub(crate) fn groups<'a>(&self, lora: &[LoraGroup<'a>]) -> Arc<[LoraGroup<'a>]> {
        lora.iter()
            .map(|group| LoraGroup {
                tokens: self.own(&group.tokens),
                sequences: group.sequences.iter().map(|sequence| self.own(sequence)).collect(),
                projections: group.projections.clone(),
            })
            .collect()
    }

    /// The rows of a tensor that are computed.
    pub(crate) fn pick(&self, backend: &dyn Backend, x: &Tensor) -> Result<Tensor> {
        self.gather(backend, x, &self.computed)
    }

    /// The rows of a matrix of `width` columns that are computed.
    pub(crate) fn pick_numbers(&self, numbers: &[u32], width: usize) -> Vec<u32> {
        self.computed.iter().flat_map(|row| &numbers[row * width..][..width]).copied().collect()
    }

    /// All rows, of those that were computed.
    pub(crate) fn spread(&self, backend: &dyn Backend, computed: &Tensor) -> Result<Tensor> {
        self.gather(backend, computed, &self.places)
    }

    fn gather(&self, backend: &dyn Backend, source: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let mut shape = source.shape().dims().to_vec();
        shape[0] = rows.len();
        let mut gathered = backend.scratch(&shape, source.dtype())?;
        backend.gather(source.as_ref(), rows, &mut gathered)?;
        Ok(gathered)
    }

    /// The sequences without the queries at their beginning that repeat others.
    pub(crate) fn without_repeated_queries<'s>(&self, spans: &[AttentionSpan<'s>]) -> Vec<AttentionSpan<'s>> {
        let rest = |span: &AttentionSpan<'s>| {
            let start = span.tokens.clone().find(|&row| self.first(row) == row)?;
            let repeated = start - span.tokens.start;
            Some(AttentionSpan { tokens: start..span.tokens.end, past: span.past + repeated, pages: span.pages })
        };
        spans.iter().filter_map(rest).collect()
    }

    /// The rows of a tensor of which those that [`Repeats::without_repeated_queries`] left out are not there, with them.
    pub(crate) fn with_repeated_queries(
        &self,
        backend: &dyn Backend,
        spans: &[AttentionSpan<'_>],
        x: &Tensor,
    ) -> Result<Tensor> {
        let mut rows: Vec<usize> = (0..self.rows()).collect();
        for span in spans {
            for row in span.tokens.clone().take_while(|&row| self.first(row) != row) {
                rows[row] = self.first(row);
            }
        }
        self.gather(backend, x, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_sequences_are_counted_among_the_rows_that_are_computed() {
        // Sequences of 3, 4 and 2 tokens, of which the second begins as the first, and the third is another's.
        let repeats = Repeats::new(&[0, 1, 2, 0, 1, 5, 6, 7, 8]);
        assert_eq!((repeats.rows(), repeats.first(4), repeats.first(5)), (9, 1, 5));
        let group = |sequences: &[Range<usize>]| LoraGroup {
            tokens: sequences[0].start..sequences.last().unwrap().end,
            sequences: sequences.into(),
            projections: Vec::new(),
        };
        let groups = repeats.groups(&[group(&[0..3, 3..7]), group(&[7..8, 8..9])]);
        let found: Vec<_> = groups.iter().map(|g| (g.tokens.clone(), g.sequences.to_vec())).collect();
        assert_eq!(found, [(0..5, vec![0..3, 3..5]), (5..7, vec![5..6, 6..7])]);
        let spans = [0..3, 3..7, 7..9].map(|tokens| AttentionSpan { tokens, past: 0, pages: &[] });
        let rest = repeats.without_repeated_queries(&spans);
        assert_eq!(rest.iter().map(|s| (s.tokens.clone(), s.past)).collect::<Vec<_>>(), [(0..3, 0), (5..7, 2), (7..9, 0)]);
        let same = Repeats::new(&[0, 1, 0, 1]);
        assert_eq!(
            same.without_repeated_queries(&[0..2, 2..4].map(|tokens| AttentionSpan { tokens, past: 0, pages: &[] })).len(),
            1
        );
    }
}
