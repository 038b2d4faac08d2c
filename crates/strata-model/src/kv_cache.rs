//! The paged KV cache: keys and values of sequences being sampled, in pages that sequences with a common prefix share.
//!
//! This is the memory only. Which page belongs to whom, and when one is free, is the engine's business.

use strata_tensor::{Backend, DType, KvLayout, KvPages};

use crate::Result;

/// Tokens in a page. Attention walks a sequence in blocks of one page, so this number is part of the order of its reductions.
pub const PAGE_TOKENS: usize = strata_tensor::KV_PAGE_TOKENS;

/// Pages of keys and values for every layer of a model, in memory of the backend that made them.
pub struct KvCache {
    layers: Vec<KvPages>,
}

impl KvCache {
    /// A cache of `num_pages` pages for layers that hold this of each token. Memory is touched only as pages are used.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub(crate) fn new(
        backend: &dyn Backend,
        layers: impl Iterator<Item = KvLayout>,
        dtype: DType,
        num_pages: usize,
    ) -> Result<Self> {
        let layers = layers.map(|layout| backend.kv_pages(num_pages, layout, dtype));
        Ok(KvCache { layers: layers.collect::<strata_tensor::Result<_>>()? })
    }

    /// Gives the memory of free pages back to the system, as far as it can take it (on Linux, whole pages of the system's). They take memory again
    /// once they are written. Costs some microseconds for each run of neighbouring pages and layer: for pages that stay free a while.
    ///
    /// # Errors
    /// If a page is not there, or the memory is another backend's.
    pub fn release_pages(&mut self, backend: &dyn Backend, pages: &[u32]) -> Result<()> {
        self.layers.iter_mut().try_for_each(|l| Ok(backend.release_pages(l, pages)?))
    }

    /// Copies page `from` over page `to`, for a sequence that continues a shared, partly filled page.
    ///
    /// # Errors
    /// If a page is not there, or the memory is another backend's.
    pub fn copy_page(&mut self, backend: &dyn Backend, from: u32, to: u32) -> Result<()> {
        self.layers.iter_mut().try_for_each(|l| Ok(backend.copy_page(l, from, to)?))
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut KvPages {
        &mut self.layers[layer]
    }
}
