//! States of sequences in layers of gated delta rule.

use std::fmt;

use crate::DeltaGeometry;
use crate::storage::Storage;

/// Tokens of a chunk of the gated delta rule, counted from the first of a sequence. Part of the order of every sum of it, and of what a state is.
pub const DELTA_CHUNK: usize = 64;

/// What each of a number of sequences has left behind in one layer: the recurrent state at the start of its current chunk of [`DELTA_CHUNK`] tokens, what the
/// tokens of that chunk left for those after them (keys, corrected values, decays), and the last inputs of the convolution.
/// [`Memory::recurrent_states`](crate::Memory::recurrent_states) allocates them.
pub struct RecurrentStates {
    pub(crate) num_slots: usize,
    pub(crate) geometry: DeltaGeometry,
    pub(crate) storage: Storage,
}

impl RecurrentStates {
    /// Sequences that there is room for.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }
}

impl fmt::Debug for RecurrentStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecurrentStates({} of {:?})", self.num_slots, self.geometry)
    }
}
