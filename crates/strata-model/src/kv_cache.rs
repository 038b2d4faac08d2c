//! The paged KV cache: keys and values of sequences being sampled, in pages that sequences with a common prefix share.
//!
//! This is the memory only. Which page belongs to whom, and when one is free, is the engine's business.

use strata_tensor::{DType, KvPages};

/// Tokens in a page. Attention walks a sequence in blocks of one page, so this number is part of the order of its reductions.
pub const PAGE_TOKENS: usize = strata_tensor::KV_PAGE_TOKENS;

/// Pages of keys and values for every layer of a model.
pub struct KvCache {
    layers: Vec<KvPages>,
    num_pages: usize,
}

impl KvCache {
    /// A cache of `num_pages` pages for `num_layers` layers of `num_kv_heads` heads of `head_dim`. Memory is touched only as pages are used.
    pub fn new(num_layers: usize, num_kv_heads: usize, head_dim: usize, dtype: DType, num_pages: usize) -> Self {
        let layers = (0..num_layers).map(|_| KvPages::new(num_pages, num_kv_heads, head_dim, dtype)).collect();
        KvCache { layers, num_pages }
    }

    /// Number of pages.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(num_layers: usize, num_kv_heads: usize, head_dim: usize, dtype: DType) -> usize {
        num_layers * KvPages::page_bytes(num_kv_heads, head_dim, dtype)
    }

    /// Gives the memory of free pages back to the system, as far as it can take it (on Linux, whole pages of the system's). They take memory again
    /// once they are written. Costs some microseconds for each run of neighbouring pages and layer: for pages that stay free a while.
    pub fn release_pages(&mut self, pages: &[u32]) {
        self.layers.iter_mut().for_each(|l| l.release_pages(pages));
    }

    /// Copies page `from` over page `to`, for a sequence that continues a shared, partly filled page.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        self.layers.iter_mut().for_each(|l| l.copy_page(from, to));
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut KvPages {
        &mut self.layers[layer]
    }
}
