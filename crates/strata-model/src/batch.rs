//! A packed batch: the tokens of many sequences, grouped by adapter, with no padding anywhere.

use std::ops::Range;

use crate::lora::Adapter;

/// What a sequence holds of a cache. Nothing for one that is computed whole without a cache, as in training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Pages, in order, enough for all of its tokens and those that a batch adds.
    pub pages: Vec<u32>,
    /// Its state, in a cache that has states ([`crate::Model::kv_state_bytes`]). No other sequence of a batch has the same.
    pub state: Option<u32>,
}

impl From<Vec<u32>> for Held {
    /// Of a cache without states.
    fn from(pages: Vec<u32>) -> Self {
        Held { pages, state: None }
    }
}

/// One sequence's new tokens in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where its tokens are in the batch.
    pub tokens: Range<usize>,
    /// Position of its first token: the number of tokens of the sequence that are already in the KV cache.
    pub past: usize,
    /// Tokens that the sequence has, or may come to have while its keys are in the cache. Some models turn positions otherwise in long sequences.
    pub length_max: usize,
    /// Where its past lies, and what it leaves for tokens after these goes.
    pub held: Held,
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
        self.push_cached(tokens, 0, tokens.len(), Held::default());
    }

    /// Adds `tokens` that follow `past` tokens already in the cache, in what the sequence holds of it; the sequence may come to have `length_max`.
    pub fn push_cached(&mut self, tokens: &[u32], past: usize, length_max: usize, held: impl Into<Held>) {
        if self.groups.is_empty() {
            self.begin_group(None);
        }
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((past..past + tokens.len()).map(|p| p as u32));
        let end = self.tokens.len();
        self.spans.push(Span { tokens: start..end, past, length_max, held: held.into() });
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
