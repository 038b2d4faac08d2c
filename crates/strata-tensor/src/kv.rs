//! Pages of keys and values.

use std::fmt;

use crate::DType;
use crate::storage::Storage;

/// Tokens in a page.
pub const KV_PAGE_TOKENS: usize = 64;

/// What the values of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvValues {
    /// Vectors of their own, so wide.
    Own(usize),
    /// The first so many numbers of each key, as with a latent that is both (DeepSeek-V2, arXiv:2405.04434). Pages hold it once.
    PrefixOfKey(usize),
}

impl KvValues {
    /// Their width.
    pub fn width(self) -> usize {
        let (KvValues::Own(width) | KvValues::PrefixOfKey(width)) = self;
        width
    }
}

/// What the pages of a layer hold of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Values.
    pub values: KvValues,
}

/// Keys and values of one layer, in pages of [`KV_PAGE_TOKENS`] tokens and all heads, laid out as the backend's attention streams them.
/// [`Memory::kv_pages`](crate::Memory::kv_pages) allocates them.
pub struct KvPages {
    pub(crate) num_pages: usize,
    pub(crate) layout: KvLayout,
    pub(crate) dtype: DType,
    pub(crate) storage: Storage,
}

impl fmt::Debug for KvPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvPages({} of {:?} {})", self.num_pages, self.layout, self.dtype)
    }
}
