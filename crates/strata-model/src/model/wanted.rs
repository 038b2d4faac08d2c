//! Which hidden states a pass over whole sequences wants.

use std::ops::Range;
use std::rc::Rc;

use strata_tensor::live_runs;

use super::Targets;
use crate::architectures::BatchInputs;

/// Rows that are wanted, and what there is for each token of a batch as there is for each of them.
pub(super) struct WantedRows {
    pub(super) rows: Rc<[usize]>,
    /// The sequences, as rows that are wanted.
    pub(super) sequences: Vec<Range<usize>>,
    /// Of each row the first of its targets, as [`Targets::offsets`].
    pub(super) offsets: Vec<usize>,
}

impl WantedRows {
    /// Those with targets, by whole granules of their sequences, so that sums over tokens keep their bits. `None` where these are so many that it is not worth
    /// while to gather them, which takes memory too, or where rows are told apart in another way behind the last layer.
    pub(super) fn of(inputs: &BatchInputs<'_>, targets: &Targets, num_layers: usize) -> Option<Self> {
        let (num_rows, offsets) = (inputs.batch.len(), &targets.offsets);
        if !targets.cover(num_rows) || !inputs.deepstack(num_layers - 1).is_empty() {
            return None;
        }
        let runs = live_runs(&inputs.sequences, &(0..num_rows), |row| offsets[row] < offsets[row + 1]);
        if runs.iter().map(Range::len).sum::<usize>() > num_rows / 2 {
            return None;
        }
        let rows: Rc<[usize]> = runs.into_iter().flatten().collect();
        let place = |token: usize| rows.partition_point(|&row| row < token);
        let sequences = inputs.sequences.iter().map(|s| place(s.start)..place(s.end)).filter(|s| !s.is_empty()).collect();
        let offsets = of_rows(&rows, targets);
        Some(WantedRows { rows, sequences, offsets })
    }

    /// The same rows, for some of the targets.
    pub(super) fn with(&self, targets: &Targets) -> Self {
        WantedRows { rows: self.rows.clone(), sequences: self.sequences.clone(), offsets: of_rows(&self.rows, targets) }
    }
}

/// Of each of `rows`, which are all that have targets, the first of its targets.
fn of_rows(rows: &[usize], targets: &Targets) -> Vec<usize> {
    rows.iter().map(|&row| targets.offsets[row]).chain([targets.ids.len()]).collect()
}
