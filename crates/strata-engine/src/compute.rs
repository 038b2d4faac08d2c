//! What the engine asks of a model on a device. Everything that decides what runs next is written against this trait, so that a simulation can put
//! a toy in the model's place.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;

use strata_model::Held;

use crate::api::{AdamParams, Failure, LoraSpec, TopK};
use crate::datum::PreparedDatum;
use crate::pictures::{Picture, PictureId};
use crate::sampler::{Alternatives, DrawSettings, Drawn, Room};
use crate::snapshot::WeightsId;

/// Called between the layers of a long pass; `Break` ends it.
pub(crate) type Between<'a> = &'a mut dyn FnMut() -> ControlFlow<()>;

/// Why a pass did not end well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PassError {
    /// It was told to end.
    Interrupted,
    /// It failed, for this reason.
    Failed(String),
}

/// What a pass computes for one tenant.
pub(crate) struct PassPart<'a, C: Compute> {
    /// Its adapter. A backward pass adds to its gradient, example after example.
    pub(crate) learner: &'a mut C::Learner,
    /// Its examples, in order.
    pub(crate) data: Vec<&'a PreparedDatum>,
    /// Whether to add to the gradient.
    pub(crate) backward: bool,
}

/// New tokens of a sequence that lives in the cache.
pub(crate) struct StepSpan<'a, F, S> {
    /// The weights to compute with.
    pub(crate) weights: (WeightsId, &'a F),
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the sequence that are in the cache already.
    pub(crate) past: usize,
    /// Tokens that the sequence may come to have.
    pub(crate) length_max: usize,
    /// What the sequence holds of the cache: pages enough for `past + tokens.len()` tokens, and a state where there are some.
    pub(crate) held: Held,
    /// The pictures of the sequence, all of them, and what was seen of those whose tokens are among `tokens`.
    pub(crate) pictures: Vec<(&'a Picture, Option<&'a S>)>,
    /// What is wanted of the predictions after some of the tokens, in their order.
    pub(crate) rows: Vec<(usize, RowTask)>,
}

/// What is wanted of the prediction after a token.
#[derive(Clone, Debug)]
pub(crate) enum RowTask {
    /// The log-probabilities of these tokens, the most probable ones, and tokens drawn in the place of the one that follows.
    Score { ids: Vec<u32>, topk: usize, alternatives: Option<Alternatives> },
    /// A draw for each of these samples, all at `position` of their sequences.
    Draw { settings: DrawSettings, samples: Vec<usize>, position: usize },
}

/// What came of a step.
pub(crate) struct Stepped {
    /// Of the rows of all spans, in order.
    pub(crate) results: Vec<RowResult>,
    /// Tokens that it took to compute: those that follow the same tokens as others do cost nothing.
    pub(crate) num_computed: usize,
}

/// What came of a [`RowTask`].
#[derive(Clone, Debug)]
pub(crate) enum RowResult {
    Scored(Scored),
    Drawn(Vec<Drawn>),
    /// The logits are not finite.
    NotNumbers,
}

/// What came of a [`RowTask::Score`].
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    /// Of the ids that were asked for, in their order.
    pub(crate) logprobs: Vec<f32>,
    pub(crate) topk: TopK,
    /// The tokens that were drawn, with their log-probabilities at temperature 1.
    pub(crate) alternatives: Vec<(u32, f32)>,
}

/// Bytes of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterBytes {
    /// In training: weights, gradient, moments and a frozen copy.
    pub training: u64,
    /// Frozen.
    pub frozen: u64,
    /// Of a checkpoint that is being written: weights and moments.
    pub captured: u64,
}

impl AdapterBytes {
    /// Of a checkpoint that has been read: its weights, with their two moments or without.
    pub(crate) fn read(&self, with_optimizer: bool) -> u64 {
        if with_optimizer { self.captured } else { self.captured.div_ceil(3) }
    }
}

/// A model on a device. One thread uses it.
pub(crate) trait Compute {
    /// An adapter in training: weights, gradient, optimizer.
    type Learner;
    /// An adapter frozen for sampling; cheap to clone.
    type Frozen: Clone;
    /// What a checkpoint holds of an adapter; shares memory with the learner until it changes.
    type State;
    /// Pages and states that hold what sequences left behind.
    type Cache;
    /// What was seen of a picture; cheap to clone.
    type Seen: Clone;

    /// Time since some moment, by which shares are measured.
    fn now(&self) -> Duration;

    /// Bytes of an adapter.
    ///
    /// # Errors
    /// If there is no such adapter on this model, with a message for the user.
    fn adapter_bytes(&self, lora: &LoraSpec) -> Result<AdapterBytes, String>;

    /// The adapter that a checkpoint holds, or a fresh one.
    fn restore(&self, state: Self::State) -> Self::Learner;

    /// Its shape in the words of the API.
    fn spec_of(&self, state: &Self::State) -> LoraSpec;

    /// Bytes it would take.
    fn state_bytes(&self, state: &Self::State) -> AdapterBytes;

    /// Whether a checkpoint can take the place of the adapter that a model was made with.
    ///
    /// # Errors
    /// A message for the user if it has another shape.
    fn check_shape(&self, made_with: &LoraSpec, state: &Self::State) -> Result<(), String>;

    /// What a checkpoint is to hold.
    ///
    /// # Errors
    /// If the device has no memory.
    fn capture(&self, learner: &mut Self::Learner, with_optimizer: bool) -> Result<Self::State, Failure>;

    /// The adapter as it is now, frozen. The id is the same as long as the adapter is.
    ///
    /// # Errors
    /// If the device refuses.
    fn freeze(&self, learner: &mut Self::Learner) -> Result<(WeightsId, Self::Frozen), Failure>;

    /// The adapter that a checkpoint holds, frozen.
    ///
    /// # Errors
    /// If the device refuses.
    fn freeze_state(&self, state: &Self::State) -> Result<Self::Frozen, Failure>;

    /// The bare base model.
    fn base(&self) -> Self::Frozen;

    /// Applies and clears the gradient; answers its norm.
    ///
    /// # Errors
    /// If a setting is out of range, the gradient is lost or not finite, or what comes of it would not be: nothing then changes but the gradient.
    fn optim_step(&self, learner: &mut Self::Learner, params: &AdamParams) -> Result<f64, Failure>;

    /// Whether every number of the gradient is finite.
    ///
    /// # Errors
    /// If the device fails.
    fn gradient_is_finite(&self, learner: &Self::Learner) -> Result<bool, Failure>;

    /// Notes that a failed pass has left the gradient incomplete: the next step fails as `why` does, and begins anew.
    fn lose_gradient(&self, learner: &mut Self::Learner, why: Failure);

    /// Bytes of what is seen of a picture, for each of its tokens.
    fn seen_bytes_per_token(&self) -> u64;

    /// What the model sees in the file of a picture, which was found to be whole. Others may be seen in `between`.
    ///
    /// # Errors
    /// If `between` breaks or the device fails.
    fn see(&self, file: &[u8], between: Between<'_>) -> Result<Self::Seen, PassError>;

    /// What a pass over these parts would make of `spare_bytes` of memory beyond what it needs: bytes for activations that are then not computed again.
    fn kept_bytes(&self, parts: &[PassPart<'_, Self>], spare_bytes: u64) -> u64
    where
        Self: Sized;

    /// How often a pass calls `between` before it has computed much, or added to a gradient: what breaks it till then leaves all as it was.
    fn early_layers(&self) -> usize;

    /// Log-probabilities of all targets, part after part; gradients are added to the learners. `seen` has every picture of the examples. Beyond what it needs the pass has
    /// `kept_bytes` of memory, of which nothing but its time depends.
    ///
    /// # Errors
    /// If `between` breaks or the device fails; gradients are then incomplete, but for a break in the early layers.
    fn pass(
        &self,
        parts: &mut [PassPart<'_, Self>],
        seen: &HashMap<PictureId, Self::Seen>,
        kept_bytes: u64,
        between: Between<'_>,
    ) -> Result<Vec<f32>, PassError>
    where
        Self: Sized;

    /// A cache of this size. What lies in a page beyond the tokens of its sequence is never read, nor the state of a sequence without tokens.
    ///
    /// # Errors
    /// If the device has no memory.
    fn new_cache(&self, size: Room) -> Result<Self::Cache, String>;

    /// Copies a page.
    ///
    /// # Errors
    /// If the device fails.
    fn copy_page(&self, cache: &mut Self::Cache, from: u32, to: u32) -> Result<(), String>;

    /// Copies a state.
    ///
    /// # Errors
    /// If the device fails.
    fn copy_state(&self, cache: &mut Self::Cache, from: u32, to: u32) -> Result<(), String>;

    /// Gives the memory of pages and states that nobody needs, and all else that is only kept for speed, back to the system.
    fn release_memory(&self, cache: &mut Self::Cache, free_pages: &[u32], free_states: &[u32]);

    /// Adds tokens to sequences of the cache. Spans with the same weights lie together.
    ///
    /// # Errors
    /// If the device fails.
    fn step(&self, cache: &mut Self::Cache, spans: &[StepSpan<'_, Self::Frozen, Self::Seen>]) -> Result<Stepped, String>;
}
