//! What sequences that are being sampled leave behind for their next token: keys and values in pages, and in layers of linear attention a state.
//!
//! Sequences with a common prefix share its pages, because what is in a page is never changed by what follows. A state is changed by every token: each sequence has one of its own,
//! and whoever goes on from where another sequence is begins with a copy.
//!
//! This is the memory only. Which page or state belongs to whom, and when one is free, is the engine's business.

use strata_tensor::{Backend, DType, DeltaGeometry, KvAccess, KvLayout, KvPages, RecurrentStates};

use crate::Result;

/// Tokens in a page. Attention walks a sequence in blocks of one page, so this number is part of the order of its reductions.
pub const PAGE_TOKENS: usize = strata_tensor::KV_PAGE_TOKENS;

/// What sequences leave behind in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LayerLayout {
    /// Keys and values of each token.
    Pages(KvLayout),
    /// A state.
    States(DeltaGeometry),
}

impl LayerLayout {
    /// Bytes of a page.
    pub(crate) fn page_bytes(&self, backend: &dyn Backend, dtype: DType) -> usize {
        match self {
            LayerLayout::Pages(layout) => backend.kv_page_bytes(*layout, dtype),
            LayerLayout::States(_) => 0,
        }
    }

    /// Bytes of a state.
    pub(crate) fn state_bytes(&self, backend: &dyn Backend) -> usize {
        match self {
            LayerLayout::Pages(_) => 0,
            LayerLayout::States(geometry) => backend.recurrent_slot_bytes(geometry),
        }
    }
}

enum LayerMemory {
    Pages(KvPages),
    States(RecurrentStates),
}

/// What a layer finds of the past of the sequences of a batch.
pub(crate) enum LayerAccess<'c> {
    /// Nothing: every sequence is whole.
    None,
    /// Keys and values.
    Pages(&'c mut KvPages),
    /// States.
    States(&'c mut RecurrentStates),
}

impl<'c> LayerAccess<'c> {
    /// For a layer of attention.
    pub(crate) fn pages(self) -> KvAccess<'c> {
        match self {
            LayerAccess::None => KvAccess::None,
            LayerAccess::Pages(pages) => KvAccess::Cache(pages),
            LayerAccess::States(_) => unreachable!("a layer of attention has declared pages"),
        }
    }

    /// For a layer of linear attention.
    pub(crate) fn states(self) -> Option<&'c mut RecurrentStates> {
        match self {
            LayerAccess::None => None,
            LayerAccess::States(states) => Some(states),
            LayerAccess::Pages(_) => unreachable!("a layer of linear attention has declared states"),
        }
    }
}

/// Pages and states for every layer of a model, in memory of the backend that made them.
pub struct KvCache {
    layers: Vec<LayerMemory>,
}

impl KvCache {
    /// A cache of `num_pages` pages and `num_states` states for layers with these layouts. Memory is touched only as they are used.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub(crate) fn new(
        backend: &dyn Backend,
        layers: impl Iterator<Item = LayerLayout>,
        dtype: DType,
        (num_pages, num_states): (usize, usize),
    ) -> Result<Self> {
        let layer = |layout| match layout {
            LayerLayout::Pages(layout) => backend.kv_pages(num_pages, layout, dtype).map(LayerMemory::Pages),
            LayerLayout::States(geometry) => backend.recurrent_states(num_states, &geometry).map(LayerMemory::States),
        };
        Ok(KvCache { layers: layers.map(layer).collect::<strata_tensor::Result<_>>()? })
    }

    /// Gives the memory of free pages and states back to the system, as far as it can take it (on Linux, whole pages of the system's). They take memory again
    /// once they are written. Costs some microseconds for each run of neighbouring pages and layer: for what stays free a while.
    ///
    /// # Errors
    /// If one is not there, or the memory is another backend's.
    pub fn release(&mut self, backend: &dyn Backend, pages: &[u32], states: &[u32]) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| match layer {
            LayerMemory::Pages(of_layer) => Ok(backend.release_pages(of_layer, pages)?),
            LayerMemory::States(of_layer) => Ok(backend.release_slots(of_layer, states)?),
        })
    }

    /// Copies page `from` over page `to`, for a sequence that continues a shared, partly filled page.
    ///
    /// # Errors
    /// If a page is not there, or the memory is another backend's.
    pub fn copy_page(&mut self, backend: &dyn Backend, from: u32, to: u32) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| match layer {
            LayerMemory::Pages(pages) => Ok(backend.copy_page(pages, from, to)?),
            LayerMemory::States(_) => Ok(()),
        })
    }

    /// Copies state `from` over state `to`, for a sequence that goes on from where another is.
    ///
    /// # Errors
    /// If a state is not there, or the memory is another backend's.
    pub fn copy_state(&mut self, backend: &dyn Backend, from: u32, to: u32) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| match layer {
            LayerMemory::Pages(_) => Ok(()),
            LayerMemory::States(states) => Ok(backend.copy_slot(states, from, to)?),
        })
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> LayerAccess<'_> {
        match &mut self.layers[layer] {
            LayerMemory::Pages(pages) => LayerAccess::Pages(pages),
            LayerMemory::States(states) => LayerAccess::States(states),
        }
    }
}
