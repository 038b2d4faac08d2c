//! Pages of keys and values.

use std::fmt;

use crate::DType;
use crate::storage::Storage;

/// Tokens in a page.
pub const KV_PAGE_TOKENS: usize = 64;

/// Keys and values of one layer, in pages of [`KV_PAGE_TOKENS`] tokens and all heads, laid out as the backend's attention streams them.
/// [`Memory::kv_pages`](crate::Memory::kv_pages) allocates them.
pub struct KvPages {
    pub(crate) num_pages: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) storage: Storage,
}

impl fmt::Debug for KvPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPages({} of {} heads of {} {})", self.num_pages, self.num_kv_heads, self.head_dim, self.dtype)
    }
}
