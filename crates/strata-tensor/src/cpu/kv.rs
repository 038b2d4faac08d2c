//! Pages of keys and values in host memory, in the layout that attention's matmuls stream.
//!
//! For each page and head, keys are a packed matrix `head_dim → KV_PAGE_TOKENS` and values one of `KV_PAGE_TOKENS → head_dim`
//! (see `packed`): a query multiplies a page of keys, and a row of probabilities a page of values, exactly as a token multiplies a weight.
//! Values that are the first numbers of keys have no memory of their own: they are transposed in cache from the keys, as weights are for a backward pass.

use super::memory::Buffer;
use super::packed::LANES;
use crate::{DType, Error, KV_PAGE_TOKENS, KvLayout, KvValues, Result};

/// Keys and values of one layer, `[num_pages][num_kv_heads]` packed pages of each.
pub(crate) struct KvPages {
    pub(crate) num_pages: usize,
    page_bytes: usize,
    pub(crate) buffer: Buffer,
}

impl KvPages {
    /// Room for `num_pages` pages. Memory is touched only as pages are used.
    pub(crate) fn zeroed(num_pages: usize, page_bytes: usize) -> Result<Self> {
        Ok(KvPages { num_pages, page_bytes, buffer: Buffer::zeroed(num_pages.saturating_mul(page_bytes))? })
    }

    /// As [`KvPages::zeroed`], with pages that hold what others left.
    pub(crate) fn recycled(num_pages: usize, page_bytes: usize) -> Result<Self> {
        Ok(KvPages { num_pages, page_bytes, buffer: Buffer::recycled(num_pages.saturating_mul(page_bytes))? })
    }

    /// Bytes of one page of keys and values.
    pub(crate) fn page_bytes(layout: KvLayout, dtype: DType) -> usize {
        layout.kv_heads * (key_len(layout.key_dim) + own_value_len(layout.values)) * dtype.size_bytes()
    }

    /// Gives the memory of pages that are free back to the system, as far as it can take it; they read as zeros from then on, and take memory
    /// again once they are written.
    pub(crate) fn release_pages(&mut self, pages: &[u32]) -> Result<()> {
        // Pages of the cache are smaller than those of the system can be: runs of them hold more whole ones.
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        for run in sorted.chunk_by(|a, b| b - a <= 1) {
            let range = self.page_range(run[0])?.start..self.page_range(run[run.len() - 1])?.end;
            self.buffer.release_range(range);
        }
        Ok(())
    }

    /// Copies page `from` over page `to`.
    pub(crate) fn copy_page(&mut self, from: u32, to: u32) -> Result<()> {
        let (from, to) = (self.page_range(from)?, self.page_range(to)?);
        self.buffer.copy_within(from, to.start);
        Ok(())
    }

    fn page_range(&self, page: u32) -> Result<std::ops::Range<usize>> {
        let (page, size) = (page as usize, self.num_pages);
        if page >= size {
            return Err(Error::Index { op: "pages", what: "pages", index: page, size });
        }
        Ok(page * self.page_bytes..(page + 1) * self.page_bytes)
    }
}

/// Elements of the keys of one page and head.
pub(crate) fn key_len(head_dim: usize) -> usize {
    head_dim.next_multiple_of(2) * KV_PAGE_TOKENS
}

/// Elements of the values of one page and head, laid out for products.
pub(crate) fn value_len(width: usize) -> usize {
    KV_PAGE_TOKENS * width.next_multiple_of(LANES)
}

/// Elements of a page and head beside its keys.
pub(crate) fn own_value_len(values: KvValues) -> usize {
    match values {
        KvValues::Own(width) => value_len(width),
        KvValues::PrefixOfKey(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of memory that this process holds.
    #[cfg(target_os = "linux")]
    fn resident_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn released_pages_give_their_memory_back_and_the_others_stay() {
        let page_bytes = KvPages::page_bytes(KvLayout { kv_heads: 2, key_dim: 36, values: KvValues::Own(36) }, DType::BF16);
        let num_pages = (256 << 20) / page_bytes;
        let mut pages = KvPages::zeroed(num_pages, page_bytes).unwrap();
        let untouched = resident_bytes();
        pages.buffer.fill(7);
        let full = resident_bytes();
        assert!(full - untouched > 200 << 20);
        let kept = num_pages as u32 / 2;
        let free: Vec<u32> = (0..num_pages as u32).filter(|&page| page != kept).rev().collect();
        pages.release_pages(&free).unwrap();
        assert!(full - resident_bytes() > 200 << 20);
        let is = |page: u32, value: u8| pages.buffer[pages.page_range(page).unwrap()].iter().all(|&b| b == value);
        assert!(is(kept, 7) && is(kept - 1, 0) && is(kept + 1, 0) && is(0, 0) && is(num_pages as u32 - 1, 0));
    }
}
