//! Memory, divided once at start.
//!
//! ```text
//! memory = base weights + reserve + requests + pictures + KV cache + workspace + training activations + adapters
//! ```
//!
//! The reserve (1/16 of what the weights leave) is for what is not counted one by one: tables, threads, the allocator's slack. Of the rest
//! requests get an eighth: one half for bodies on their way in, the other (the [`Ledger`](crate::ledger::Ledger)) for what was accepted and
//! for results. Where a model sees, pictures get a sixth of what remains, or what they can use of it. The KV cache gets a fourth of what remains, but never more than [`KV_CONTEXTS_MAX`] whole contexts, which for a tiny model
//! is far less. Where sequences have states beside pages, half of it is for them, up to [`STATES_MAX`]. Then the logits of a chunk get their place, and what is left is split five to three between activations and adapters, or up to
//! three to one where activations would not suffice for a useful context. Where it is said what adapters get, they get it before the cache, and activations what is left. A pass that does not need all of it keeps activations
//! that it would else compute again. Freed tensors wait for the next ones in what those in use leave. What activations could never use goes to requests, up to [`REQUEST_BYTES_MAX`], and to adapters. From the shares follow the
//! longest sequence (what the cache holds), the longest training example (what activations hold, as little of them as can be), the tokens of a
//! training pass (of which what goes into each layer can be kept), and the pages of the cache: nothing else asks how much memory there is.

use strata_model::PAGE_TOKENS;
use strata_model::vision::DECODING_BYTES_MAX;

use crate::sampler::Room;

/// Whole contexts that the KV cache holds at most.
pub(crate) const KV_CONTEXTS_MAX: usize = 64;
/// States at most: one for each sample that can run, and half as many for prompts and for what is kept of prefixes.
pub(crate) const STATES_MAX: u64 = 384;
/// States at least, where there are some: a prompt and a sample of it, twice.
const STATES_MIN: u64 = 4;
/// Tokens of a training pass at most, however much memory there is: beyond it a pass gets longer, not faster, and everyone
/// else waits.
pub(crate) const PASS_TOKENS_MAX: usize = 2048;
/// Memory for requests, at most.
pub(crate) const REQUEST_BYTES_MAX: u64 = 2 << 30;
/// Tokens of pictures whose sight is kept, at most.
const GALLERY_TOKENS_MAX: u64 = 64 << 10;
/// The longest sequence and the longest training example must be at least this, or the model's own limit.
pub(crate) const CONTEXT_TOKENS_MIN: usize = 256;

/// What the division depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) weight_bytes: u64,
    pub(crate) kv_page_bytes: u64,
    /// Of a state; 0 if sequences have none.
    pub(crate) kv_state_bytes: u64,
    pub(crate) train_bytes_per_token: u64,
    /// Of a training pass that keeps what goes into each layer, for each token beyond that.
    pub(crate) checkpoint_bytes_per_token: u64,
    /// Of a training pass that computes nothing twice, for each token beyond the least.
    pub(crate) kept_bytes_per_token: u64,
    /// What a pass needs whatever its length.
    pub(crate) workspace_bytes: u64,
    /// What adapters get, if it is said: in training, frozen and captured.
    pub(crate) adapter_bytes: Option<u64>,
    /// An adapter of rank 1 in training. There is room for one, unless it is said what adapters get.
    pub(crate) least_adapter_bytes: u64,
    /// The model's own longest sequence.
    pub(crate) max_position_embeddings: usize,
    pub(crate) pictures: PictureNeeds,
}

/// What pictures take; nothing, where a model reads text alone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PictureNeeds {
    /// What was seen of one, for each of its tokens.
    pub(crate) seen_bytes: u64,
    /// Seeing one, for each of its tokens.
    pub(crate) seeing_bytes: u64,
    /// The most tokens that the model makes of one.
    pub(crate) tokens_max: usize,
}

/// The division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Prompt and sample together.
    pub(crate) max_context_tokens: usize,
    /// Tokens of one training example.
    pub(crate) max_example_tokens: usize,
    /// What the KV cache has.
    pub(crate) cache: Room,
    /// Tokens of a training pass, unless it is one sequence that is longer: that fits too.
    pub(crate) pass_tokens: usize,
    /// Tokens of all passes that run at the same time, one between the layers of another.
    pub(crate) activation_tokens: usize,
    /// What each of them takes.
    pub(crate) bytes_per_token: u64,
    /// Of the whole, what is for tensors of any kind: freed ones are kept for the next ones within it.
    pub(crate) buffer_bytes: u64,
    pub(crate) adapter_bytes: u64,
    /// Copies of adapters that are being written.
    pub(crate) captured_bytes: u64,
    /// Requests that were accepted, and results.
    pub(crate) ledger_bytes: u64,
    /// Bodies of requests on their way in.
    pub(crate) transit_bytes: u64,
    /// What is not counted one by one: tables, threads, the allocator's slack.
    pub(crate) reserve_bytes: u64,
    /// Tokens of the pictures that are seen at the same time: one, or smaller ones between its blocks.
    pub(crate) picture_tokens: usize,
    /// What decoding a picture may take.
    pub(crate) decoding_bytes: u64,
    /// What was seen of pictures and is kept.
    pub(crate) gallery_bytes: u64,
}

/// Why an engine cannot start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Memory does not suffice for the base weights and one sequence of a useful length.
    #[error(
        "{memory_bytes} bytes of memory do not suffice: the base weights take {weight_bytes}{}, and with sequences of \
         {context_tokens} tokens the least is {least_bytes}",
        .adapter_bytes.map_or_else(String::new, |bytes| format!(", adapters are to have {bytes}"))
    )]
    Memory {
        /// Memory that was granted.
        memory_bytes: u64,
        /// What the base weights take of it.
        weight_bytes: u64,
        /// What adapters were to get of it, if that was said.
        adapter_bytes: Option<u64>,
        /// The shortest acceptable longest sequence.
        context_tokens: usize,
        /// Memory with which the engine would start.
        least_bytes: u64,
    },
    /// The device does not have the memory that it was granted.
    #[error("the device refuses: {0}")]
    Device(String),
    /// The system refuses a thread.
    #[error("cannot start the engine thread: {0}")]
    Thread(String),
}

impl Budget {
    /// Divides `memory_bytes`.
    ///
    /// # Errors
    /// If a sequence of [`CONTEXT_TOKENS_MIN`] tokens does not fit, or no adapter.
    pub(crate) fn divide(memory_bytes: u64, needs: Needs) -> Result<Budget, StartError> {
        let least_context = CONTEXT_TOKENS_MIN.min(needs.max_position_embeddings);
        let suffices = |budget: &Budget| {
            let has_room = needs.adapter_bytes.is_some() || budget.adapter_bytes >= needs.least_adapter_bytes;
            has_room && budget.shortest_limit() >= least_context
        };
        let budget = Self::shares(memory_bytes, needs);
        if suffices(&budget) {
            return Ok(budget);
        }
        // The shares grow with memory: the least that suffices is found by halving, for the message alone.
        let (mut low, mut high) = (memory_bytes, u64::MAX / 16);
        while high - low > 1 << 20 {
            let middle = low + (high - low) / 2;
            if suffices(&Self::shares(middle, needs)) { high = middle } else { low = middle }
        }
        Err(StartError::Memory {
            memory_bytes,
            weight_bytes: needs.weight_bytes,
            adapter_bytes: needs.adapter_bytes,
            context_tokens: least_context,
            least_bytes: high,
        })
    }

    fn shortest_limit(&self) -> usize {
        self.max_context_tokens.min(self.max_example_tokens)
    }

    fn shares(memory_bytes: u64, needs: Needs) -> Budget {
        let free_of_weights = memory_bytes.saturating_sub(needs.weight_bytes);
        let free = free_of_weights - free_of_weights / 16;
        let requests = (free / 8).min(REQUEST_BYTES_MAX);
        let free = free - requests;
        let pictures = PictureShares::of(free / 6, needs.pictures);
        let free = (free - pictures.bytes).saturating_sub(needs.adapter_bytes.unwrap_or(0));
        // One page more than whole contexts: samples of one prompt each copy its last, partly filled page.
        let context_pages = needs.max_position_embeddings.div_ceil(PAGE_TOKENS);
        let kv_pages_max = (context_pages * KV_CONTEXTS_MAX + 1) as u64;
        let states = match needs.kv_state_bytes {
            0 => 0,
            bytes => (free / 8 / bytes).clamp(STATES_MIN, STATES_MAX),
        };
        let state_bytes = states * needs.kv_state_bytes;
        let kv_pages = ((free / 4).saturating_sub(state_bytes) / needs.kv_page_bytes.max(1)).min(kv_pages_max);
        let free = free.saturating_sub(kv_pages * needs.kv_page_bytes + state_bytes + needs.workspace_bytes);
        let per_token = needs.train_bytes_per_token.max(1);
        let least = CONTEXT_TOKENS_MIN.min(needs.max_position_embeddings) as u64 * 8 / 7 + 4;
        let share = match needs.adapter_bytes {
            Some(_) => free,
            None => (free / 8 * 5).max((free / 4 * 3).min(least * per_token)),
        };
        // The longest example, or a pass of many that computes nothing twice.
        let kept = PASS_TOKENS_MAX as u64 * (needs.kept_bytes_per_token / per_token + 2);
        let with_checkpoints = per_token + needs.checkpoint_bytes_per_token;
        let longest_useful = needs.max_position_embeddings as u64 * with_checkpoints / per_token;
        let useful = longest_useful.max(kept) * 4 / 3 + 4;
        let activation_tokens = (share / per_token).min(useful);
        let activation_bytes = activation_tokens * per_token;
        let activation_tokens = activation_tokens as usize;
        let more_requests = (share.saturating_sub(activation_bytes) / 2).min(REQUEST_BYTES_MAX - requests);
        let requests = requests + more_requests;
        let cache_tokens = (kv_pages as usize).saturating_sub(1) * PAGE_TOKENS;
        // Some stays free for small passes between the layers of a long one.
        let longest = activation_tokens.saturating_sub((activation_tokens / 8 + 1).min(PASS_TOKENS_MAX));
        let ordinary = (activation_bytes / 8 * 7 / with_checkpoints) as usize;
        let adapters = needs.adapter_bytes.unwrap_or(0) + (free - activation_bytes - more_requests);
        let max_context_tokens = needs.max_position_embeddings.min(cache_tokens);
        Budget {
            max_context_tokens,
            max_example_tokens: needs.max_position_embeddings.min(longest),
            cache: Room { pages: kv_pages as usize, states: states as usize },
            pass_tokens: longest.min(PASS_TOKENS_MAX).min(ordinary.max(1)),
            activation_tokens,
            bytes_per_token: per_token,
            buffer_bytes: (memory_bytes - free_of_weights / 16).saturating_sub(requests + pictures.decoding_bytes * 2),
            adapter_bytes: adapters - adapters / 4,
            captured_bytes: adapters / 4,
            ledger_bytes: requests / 2,
            transit_bytes: requests / 2,
            reserve_bytes: free_of_weights / 16,
            picture_tokens: pictures.tokens,
            decoding_bytes: pictures.decoding_bytes,
            gallery_bytes: pictures.gallery_bytes,
        }
    }
}

/// What pictures get of the memory: a fourth to decode two at a time (where one is sent, and where one is seen), half to see them, and a fourth for what was seen.
#[derive(Default)]
struct PictureShares {
    tokens: usize,
    decoding_bytes: u64,
    gallery_bytes: u64,
    /// All together.
    bytes: u64,
}

impl PictureShares {
    fn of(share: u64, needs: PictureNeeds) -> Self {
        if needs.seen_bytes == 0 || needs.seeing_bytes == 0 {
            return PictureShares::default();
        }
        let decoding_bytes = (share / 8).min(DECODING_BYTES_MAX);
        let gallery_bytes = (share / 4).min(needs.seen_bytes * GALLERY_TOKENS_MAX);
        // While one is in use by a prompt there is room for another.
        let tokens = (share / 2 / needs.seeing_bytes).min(gallery_bytes / 2 / needs.seen_bytes);
        let tokens = tokens.min(needs.tokens_max as u64);
        let bytes = decoding_bytes * 2 + tokens * needs.seeing_bytes + gallery_bytes;
        PictureShares { tokens: tokens as usize, decoding_bytes, gallery_bytes, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const SMALL: Needs = Needs {
        weight_bytes: GIB,
        kv_page_bytes: 7 << 20,
        kv_state_bytes: 0,
        train_bytes_per_token: 200 << 10,
        checkpoint_bytes_per_token: 70 << 10,
        kept_bytes_per_token: 2 << 20,
        workspace_bytes: 240 << 20,
        adapter_bytes: None,
        least_adapter_bytes: 12 << 20,
        max_position_embeddings: 40_960,
        pictures: PictureNeeds { seen_bytes: 0, seeing_bytes: 0, tokens_max: 0 },
    };

    #[test]
    fn the_parts_never_exceed_the_whole() {
        let sees = PictureNeeds { seen_bytes: 64 << 10, seeing_bytes: 400 << 10, tokens_max: 16_384 };
        let sees = Needs { pictures: sees, ..SMALL };
        let with_states = Needs { kv_state_bytes: 90 << 20, kv_page_bytes: 2 << 20, ..SMALL };
        let memories = [3 * GIB, 5 * GIB, 16 * GIB, 64 * GIB, 1024 * GIB];
        let for_adapters = Needs { adapter_bytes: Some(GIB / 2), ..SMALL };
        let all_needs = [SMALL, with_states, sees, for_adapters];
        for (memory, needs) in memories.into_iter().flat_map(|memory| all_needs.map(|needs| (memory, needs))) {
            let b = Budget::divide(memory, needs).unwrap();
            let activations = b.activation_tokens as u64 * needs.train_bytes_per_token + needs.workspace_bytes;
            let requests = b.ledger_bytes + b.transit_bytes;
            let pictures = b.decoding_bytes * 2 + b.picture_tokens as u64 * needs.pictures.seeing_bytes + b.gallery_bytes;
            assert_eq!(b.picture_tokens > 0 && b.decoding_bytes > 0, needs.pictures.seen_bytes > 0);
            assert!(2 * b.picture_tokens as u64 * needs.pictures.seen_bytes <= b.gallery_bytes);
            let cache = b.cache.pages as u64 * needs.kv_page_bytes + b.cache.states as u64 * needs.kv_state_bytes;
            assert_eq!(b.cache.states > 0, needs.kv_state_bytes > 0);
            let tensors = needs.weight_bytes + cache + activations + b.adapter_bytes + b.captured_bytes + pictures;
            assert!(tensors + requests <= memory);
            assert!(tensors - b.decoding_bytes * 2 <= b.buffer_bytes && b.buffer_bytes + requests <= memory);
            assert!(b.max_example_tokens.max(b.pass_tokens) < b.activation_tokens);
            assert!(b.max_context_tokens < b.cache.pages * PAGE_TOKENS);
        }
        let roomy = Budget::divide(64 * GIB, SMALL).unwrap();
        assert_eq!((roomy.max_context_tokens, roomy.max_example_tokens), (40_960, 40_960));
    }

    #[test]
    fn a_tiny_model_does_not_take_all_memory_for_its_cache() {
        let tiny = Needs {
            weight_bytes: 4 << 20,
            kv_page_bytes: 80 << 10,
            kv_state_bytes: 0,
            train_bytes_per_token: 10 << 10,
            checkpoint_bytes_per_token: 2 << 10,
            kept_bytes_per_token: 20 << 10,
            workspace_bytes: 1 << 20,
            adapter_bytes: None,
            least_adapter_bytes: 64 << 10,
            max_position_embeddings: 2048,
            pictures: PictureNeeds::default(),
        };
        let b = Budget::divide(16 * GIB, tiny).unwrap();
        assert_eq!(b.cache, Room { pages: 32 * KV_CONTEXTS_MAX + 1, states: 0 });
        assert_eq!((b.max_context_tokens, b.max_example_tokens, b.pass_tokens), (2048, 2048, PASS_TOKENS_MAX));
    }

    #[test]
    fn too_little_memory_is_an_error_that_says_how_much_is_enough() {
        let Err(StartError::Memory { least_bytes, .. }) = Budget::divide(GIB, SMALL) else { panic!("1 GiB suffices?") };
        assert!(Budget::divide(least_bytes, SMALL).is_ok());
        assert!(least_bytes < 2 * GIB, "{least_bytes}");
    }

    #[test]
    fn what_is_enough_is_enough_for_an_adapter() {
        let of = |least_adapter_bytes| {
            let needs = Needs { least_adapter_bytes, ..SMALL };
            let Err(StartError::Memory { least_bytes, .. }) = Budget::divide(GIB, needs) else { panic!("1 GiB suffices?") };
            (least_bytes, Budget::divide(least_bytes, needs).unwrap())
        };
        let (least, small) = of(1);
        let (more, large) = of(small.adapter_bytes * 2);
        assert!(large.adapter_bytes >= small.adapter_bytes * 2, "{large:?}");
        assert!(more > least && more - least < small.adapter_bytes * 8, "{least} and {more}");
        // Whoever says what adapters get has said it.
        let said = Needs { adapter_bytes: Some(1 << 20), least_adapter_bytes: GIB, ..SMALL };
        assert!(Budget::divide(least, said).is_ok());
    }

    #[test]
    fn what_adapters_are_to_have_they_have_and_examples_give_or_take_the_difference() {
        let of = |adapter_bytes| Budget::divide(18 * GIB, Needs { adapter_bytes, ..SMALL });
        let all = |b: &Budget| b.adapter_bytes + b.captured_bytes;
        let by_default = of(None).unwrap();
        let (more, less) = (of(Some(all(&by_default) * 2)).unwrap(), of(Some(GIB)).unwrap());
        let over = all(&more) - all(&by_default) * 2;
        assert!(over < SMALL.train_bytes_per_token, "{over}");
        assert!(more.max_example_tokens < by_default.max_example_tokens && more.pass_tokens == PASS_TOKENS_MAX);
        assert!(all(&less) >= GIB && less.max_example_tokens > by_default.max_example_tokens);
        let error = of(Some(17 * GIB)).unwrap_err();
        assert!(error.to_string().contains("adapters are to have 18253611008"), "{error}");
        let StartError::Memory { least_bytes, .. } = error else { panic!("{error}") };
        assert!(Budget::divide(least_bytes, Needs { adapter_bytes: Some(17 * GIB), ..SMALL }).is_ok());
    }
}
