//! Frozen weights that samples are drawn from.
//!
//! A snapshot is never written to: a tenant's next step packs a new adapter, and whoever samples from the old one keeps it alive.

use std::sync::Arc;

use strata_model::lora::Adapter;

/// Identifies weights for as long as the engine runs; what was computed with them is reused only under the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WeightsId(pub(crate) u64);

impl WeightsId {
    /// The bare base model.
    pub(crate) const BASE: WeightsId = WeightsId(0);
}

/// Hands out ids.
#[derive(Default)]
pub(crate) struct WeightsIds {
    last: u64,
}

impl WeightsIds {
    pub(crate) fn next(&mut self) -> WeightsId {
        self.last += 1;
        WeightsId(self.last)
    }
}

/// Weights ready to compute with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Weights {
    pub(crate) id: WeightsId,
    /// `None` for the bare base model.
    pub(crate) adapter: Option<Arc<Adapter>>,
}

impl Weights {
    pub(crate) fn base() -> Self {
        Weights { id: WeightsId::BASE, adapter: None }
    }

    /// Bytes of memory held.
    pub(crate) fn size_bytes(&self) -> usize {
        self.adapter.as_ref().map_or(0, |a| a.size_bytes())
    }
}
