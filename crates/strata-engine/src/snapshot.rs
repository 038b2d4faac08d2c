//! Names of frozen weights.

use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies weights for as long as the process runs; what was computed with them is reused only under the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WeightsId(pub(crate) u64);

impl WeightsId {
    /// The bare base model.
    pub(crate) const BASE: WeightsId = WeightsId(0);

    /// An id that no weights have had.
    pub(crate) fn fresh() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        WeightsId(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}
