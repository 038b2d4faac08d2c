//! Names of frozen weights, and where they come from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::api::{CheckpointSource, LoraSpec};

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

/// An owner's checkpoint. What comes of it twice is the same, if its save has an identity.
#[derive(Clone)]
pub(crate) struct LoadedFrom {
    pub(crate) owner: Arc<str>,
    pub(crate) source: CheckpointSource,
    /// The adapter that it is known to hold.
    pub(crate) lora: LoraSpec,
}

impl LoadedFrom {
    /// Whether the same weights come of both.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.source.save_id.is_some() && self.source == other.source && self.lora == other.lora && self.owner == other.owner
    }
}
