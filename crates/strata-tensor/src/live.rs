//! Rows of a batch that matter: those that are wanted, or through which a gradient goes back.

use std::ops::Range;

use crate::backend::TOKEN_GRANULE;

/// Rows that nobody needs and that are computed all the same, where there are no more between two that someone does: a product of more rows is
/// faster for each.
const DEAD_ROWS_MIN: usize = 2 * TOKEN_GRANULE;

/// The runs of `rows`, by whole granules of their sequences, outside of which no row `counts`. Sequences are in order; a row of none is a granule.
pub fn live_runs(sequences: &[Range<usize>], rows: &Range<usize>, counts: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut start = rows.start;
    while start < rows.end {
        let next = sequences.partition_point(|s| s.end <= start);
        let end = match sequences.get(next).filter(|s| s.contains(&start)) {
            Some(sequence) => {
                let granule = (start - sequence.start) / TOKEN_GRANULE + 1;
                (sequence.start + granule * TOKEN_GRANULE).min(sequence.end)
            }
            None => start + 1,
        };
        let granule = start..end.min(rows.end);
        if granule.clone().any(&counts) {
            match runs.last_mut() {
                Some(last) if granule.start - last.end < DEAD_ROWS_MIN => last.end = granule.end,
                _ => runs.push(granule.clone()),
            }
        }
        start = granule.end;
    }
    runs
}
