//! A packed batch: the tokens of many sequences, grouped by adapter, with no padding anywhere.

use std::ops::Range;

use crate::lora::Adapter;

/// One sequence's new tokens in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where its tokens are in the batch.
    pub tokens: Range<usize>,
    /// Position of its first token: the number of tokens of the sequence that are already in the KV cache.
    pub past: usize,
    /// Tokens that the sequence has, or may come to have while its keys are in the cache. Some models turn positions otherwise in long sequences.
    pub length_max: usize,
    /// Pages of the KV cache that hold the sequence, in order, enough for `past + tokens.len()` positions. Empty for a
    /// sequence that is computed whole without a cache, as in training.
    pub pages: Vec<u32>,
}

/// A run of tokens of a batch that share an adapter.
#[derive(Clone, Copy)]
pub struct AdapterGroup<'a> {
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// The adapter, or `None` for the bare base model.
    pub adapter: Option<&'a Adapter>,
}

/// Tokens of several sequences, `[total_tokens]`, sequence after sequence, adapter after adapter.
#[derive(Default)]
pub struct PackedBatch<'a> {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence.
    pub positions: Vec<u32>,
    /// The sequences, in order; they cover all tokens.
    pub spans: Vec<Span>,
    /// The adapters, in order; they cover all tokens.
    pub groups: Vec<AdapterGroup<'a>>,
}

impl<'a> PackedBatch<'a> {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a run of sequences that share `adapter`. Every sequence pushed next belongs to it.
    pub fn begin_group(&mut self, adapter: Option<&'a Adapter>) {
        let at = self.tokens.len();
        self.groups.push(AdapterGroup { start: at, end: at, adapter });
    }

    /// Adds a whole sequence that needs no cache (training, scoring).
    pub fn push_sequence(&mut self, tokens: &[u32]) {
        self.push_cached(tokens, 0, tokens.len(), Vec::new());
    }

    /// Adds `tokens` that follow `past` tokens already held in `pages` of the KV cache, of a sequence that may come to have `length_max`.
    pub fn push_cached(&mut self, tokens: &[u32], past: usize, length_max: usize, pages: Vec<u32>) {
        if self.groups.is_empty() {
            self.begin_group(None);
        }
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((past..past + tokens.len()).map(|p| p as u32));
        let end = self.tokens.len();
        self.spans.push(Span { tokens: start..end, past, length_max, pages });
        self.groups.last_mut().expect("a group was begun above").end = end;
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
