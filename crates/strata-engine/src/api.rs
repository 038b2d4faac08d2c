//! What can be asked of the engine, and what it answers: plain values that can be stored, sent and replayed.
//!
//! The engine knows nothing of HTTP or of futures. A caller hands over a [`Request`] and a closure that takes the outcome.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Names a training tenant: `{session}:train:{n}`.
pub type ModelId = String;
/// Names an immutable set of sampling weights: `{session}:sample:{n}`.
pub type SamplerId = String;

/// Names a request among all that are open, for as long as it is.
pub type RequestId = Arc<str>;

/// Who asks: shares of memory and time are given to owners, and by them to their sessions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Client {
    /// Whom a key stands for.
    pub owner: Arc<str>,
    /// One of its sessions.
    pub session: Arc<str>,
}

/// Why a request was not accepted. Nothing of it is kept, and its closure is not called.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// It was accepted before.
    #[error("the request was accepted before")]
    Seen,
    /// There is no room now: the same request may be accepted later.
    #[error("{0}")]
    Busy(String),
    /// It is wrong, and will stay wrong.
    #[error("{0}")]
    User(String),
    /// The engine is gone.
    #[error("the engine is not running")]
    Stopped,
}

/// Why a request failed. The message is shown to the user as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum Failure {
    /// The request itself is wrong; sending it again will not help.
    #[error("{0}")]
    User(String),
    /// Strata is at fault.
    #[error("{0}")]
    Server(String),
}

impl Failure {
    /// A failure of the same side, told in other words.
    #[must_use]
    pub fn retold(self, tell: impl FnOnce(String) -> String) -> Self {
        match self {
            Failure::User(why) => Failure::User(tell(why)),
            Failure::Server(why) => Failure::Server(tell(why)),
        }
    }
}

/// The outcome of a request.
pub type Outcome = Result<Response, Failure>;

/// A LoRA adapter as `create_model` asks for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraSpec {
    /// Rank of every low-rank pair.
    pub rank: usize,
    /// Seed of the initial A matrices; drawn by the server when the client gives none.
    pub seed: u64,
    /// Whether attention projections carry LoRA.
    pub train_attn: bool,
    /// Whether MLP projections carry LoRA.
    pub train_mlp: bool,
    /// Whether the unembedding carries LoRA.
    pub train_unembed: bool,
    /// Of an adapter that was made elsewhere, the modules that carry LoRA, by [`strata_model::lora::LoraModule::name`], and their ranks; empty where all else says it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: BTreeMap<String, usize>,
}

/// A request. Those with a `seq_id` run in the order of their ids within their model, whatever order they arrive in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Makes a tenant with a fresh adapter. Answer: [`Response::Created`].
    CreateModel {
        /// Its name.
        model_id: ModelId,
        /// Its adapter.
        lora: LoraSpec,
    },
    /// Makes a tenant from a training checkpoint. Answer: [`Response::Created`].
    CreateModelFromCheckpoint {
        /// Its name.
        model_id: ModelId,
        /// The checkpoint.
        source: CheckpointSource,
        /// The adapter that the checkpoint is known to hold: room for it is set aside before it is read.
        lora: LoraSpec,
        /// Whether to restore Adam's moments and step count too.
        with_optimizer: bool,
    },
    /// An ordered operation of a tenant.
    Train {
        /// The tenant.
        model_id: ModelId,
        /// Its place in the tenant's order; the first is 1.
        seq_id: u64,
        /// What to do.
        op: TrainOp,
    },
    /// Frees a tenant. Operations that wait or run fail.
    UnloadModel {
        /// The tenant.
        model_id: ModelId,
    },
    /// Makes sampling weights from the base model or a checkpoint. Answer: [`Response::Sampler`].
    CreateSampler {
        /// Its name.
        sampler_id: SamplerId,
        /// The checkpoint and the adapter it is known to hold, or `None` for the base model.
        source: Option<(CheckpointSource, LoraSpec)>,
    },
    /// Frees sampling weights. Samples that wait for them or run on them fail.
    DropSampler {
        /// Its name.
        sampler_id: SamplerId,
    },
    /// Samples. Answer: [`Response::Sampled`].
    Sample {
        /// The weights to sample from.
        sampler_id: SamplerId,
        /// What to sample.
        sample: SampleRequest,
    },
    /// Stops the work on a request that is open, if there is any: it then fails. Answer: [`Response::Freed`], whether or not it was open.
    Cancel {
        /// The request.
        request_id: RequestId,
    },
    /// Frees everything of the client's session and stops all work for it.
    EndSession,
}

/// An operation on a tenant, run in the order of `seq_id`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum TrainOp {
    /// Computes losses, and unless `forward_only` adds gradients. Answer: [`Response::ForwardBackward`].
    ForwardBackward {
        /// The examples.
        data: Vec<Datum>,
        /// The loss.
        loss: LossSpec,
        /// Whether to leave the gradient alone.
        forward_only: bool,
    },
    /// Applies and clears the gradient. Answer: [`Response::OptimStep`].
    OptimStep(AdamParams),
    /// Writes adapter and optimizer state to a new directory. Answer: [`Response::Saved`].
    SaveState(SaveTarget),
    /// Writes the adapter alone to a new directory. Answer: [`Response::Saved`].
    SaveSampler(SaveTarget),
    /// Freezes the adapter, as it is now, into sampling weights that live in memory. Answer: [`Response::Sampler`].
    Snapshot {
        /// Name of the sampling weights.
        sampler_id: SamplerId,
        /// `true`: replace the weights of an existing sampler of this name in place (the `inflight` kind).
        replace: bool,
    },
    /// Replaces adapter (and optimizer state) by a checkpoint's. Answer: [`Response::Loaded`].
    LoadState {
        /// The checkpoint.
        source: CheckpointSource,
        /// Whether to restore Adam's moments and step count too.
        with_optimizer: bool,
    },
    /// An operation that was refused before it reached the engine: it takes its place in the order and fails with the reason.
    Refused(String),
}

/// Where a checkpoint goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SaveTarget {
    /// Directory below which no link is followed.
    pub root: PathBuf,
    /// Directory to create; its parents are made as needed. It appears whole or not at all.
    pub dir: PathBuf,
    /// What clients call it, for messages; such as `tinker://RUN/weights/NAME`.
    pub name: String,
    /// Whether a directory of this name may be replaced.
    pub overwrite: bool,
    /// Written into the same directory as [`METADATA_FILE`], for the caller's own use. A string `save_id` in it is the identity of this save; what it has as `lora` becomes the [`LoraSpec`] of the
    /// adapter that is written, which may have been loaded after the save was asked for.
    pub metadata: serde_json::Value,
    /// Keys that every other file is encrypted to, as [`crate::age::Recipient`] reads them; none: files as they are.
    pub recipients: Vec<String>,
}

/// Which checkpoint to load: one save, and never another that has taken its directory since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSource {
    /// Its directory.
    pub dir: PathBuf,
    /// What clients call it, for messages; such as `tinker://RUN/weights/NAME`.
    pub name: String,
    /// The `save_id` in the metadata it was saved with; `None` if they had none.
    pub save_id: Option<String>,
}

/// The file in a checkpoint's directory that holds the metadata of its [`SaveTarget`].
pub const METADATA_FILE: &str = "strata.json";
/// The most bytes of a [`METADATA_FILE`].
pub const METADATA_BYTES_MAX: u64 = 1 << 20;

/// One training example. Nothing in it has been checked against the model; the engine does that.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Datum {
    /// Input token ids of its text. Signed, as they are on the wire.
    pub tokens: Vec<i64>,
    /// Pictures among them, in order.
    pub images: Vec<Image>,
    /// Inputs of the loss by name, such as `target_tokens`, `weights`, `advantages`, `logprobs`.
    pub loss_inputs: std::collections::BTreeMap<String, LossInput>,
}

/// A picture in an input. It counts as the tokens that the model makes of it; nothing has been checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Tokens of text before it, of those of its input.
    pub at: usize,
    /// The file, a PNG or JPEG.
    pub file: Arc<[u8]>,
    /// The tokens that the client takes it for, by which it has laid out what belongs to tokens.
    pub expected_tokens: Option<i64>,
}

/// A tensor that a loss reads: `[tokens]` or `[tokens, k]`, row-major, densified.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LossInput {
    /// Extents: `[tokens]` or `[tokens, k]`.
    pub shape: Vec<usize>,
    /// Values.
    pub values: LossValues,
}

/// Values of a [`LossInput`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum LossValues {
    /// Real numbers.
    F32(Vec<f32>),
    /// Token ids.
    I64(Vec<i64>),
}

/// A loss by name with its settings, as they come from the wire.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LossSpec {
    /// `cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro`, ...
    pub name: String,
    /// Numeric settings such as `clip_low_threshold`.
    pub config: std::collections::BTreeMap<String, f64>,
}

/// Hyperparameters of one AdamW step, as the SDK sends them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamParams {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global L2 norm of the gradient; 0 turns clipping off.
    pub grad_clip_norm: f64,
}

impl Default for AdamParams {
    fn default() -> Self {
        AdamParams { learning_rate: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-12, weight_decay: 0.0, grad_clip_norm: 0.0 }
    }
}

/// When a sample ends before its token limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Hash)]
pub enum Stop {
    /// At the model's end-of-sequence tokens.
    EndOfSequence,
    /// At any of these tokens; an empty list never stops.
    Tokens(Vec<i64>),
    /// When the text of the sample contains one of these strings.
    Strings(Vec<String>),
}

/// What to sample.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SampleRequest {
    /// Token ids of the prompt's text. Signed, as they are on the wire.
    pub prompt: Vec<i64>,
    /// Pictures among them, in order.
    pub images: Vec<Image>,
    /// Number of independent sequences.
    pub num_samples: usize,
    /// Most tokens of each sequence; `None`: as many as the context allows.
    pub max_tokens: Option<usize>,
    /// Seed; drawn by the server when the client gives none.
    pub seed: u64,
    /// When to stop.
    pub stop: Stop,
    /// 0 is greedy.
    pub temperature: f32,
    /// Sample among the k most probable tokens; `None`: all.
    pub top_k: Option<usize>,
    /// Sample among the most probable tokens that together have this probability; 1: all.
    pub top_p: f32,
    /// Whether to return log-probabilities of the prompt.
    pub prompt_logprobs: bool,
    /// Return prompt log-probabilities only of the last n positions.
    pub prompt_logprobs_last_n: Option<usize>,
    /// Number of most probable tokens to return for each prompt position.
    pub topk_prompt_logprobs: usize,
    /// Number of most probable tokens to return for each sampled position.
    pub topk_sample_logprobs: usize,
    /// Token ids whose log-probabilities to return at prompt positions.
    #[serde(default)]
    pub target_prompt_logprobs: Option<PromptTargets>,
    /// Number of tokens to draw in the place of each prompt token after the first.
    #[serde(default)]
    pub prompt_alt_tokens_k: usize,
}

impl SampleRequest {
    /// One sequence behind a prompt of text, drawn from all tokens at temperature 1 with seed 0 until the model ends it, and nothing of the prompt.
    pub fn of(prompt: Vec<i64>) -> Self {
        SampleRequest {
            prompt,
            images: Vec::new(),
            num_samples: 1,
            max_tokens: None,
            seed: 0,
            stop: Stop::EndOfSequence,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            prompt_logprobs: false,
            prompt_logprobs_last_n: None,
            topk_prompt_logprobs: 0,
            topk_sample_logprobs: 0,
            target_prompt_logprobs: None,
            prompt_alt_tokens_k: 0,
        }
    }
}

/// Token ids whose log-probabilities are wanted at positions of a prompt: a matrix whose row `i` belongs to position `i + 1`, because nothing
/// predicts the first. Nothing in it has been checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Hash)]
pub struct PromptTargets {
    /// `[prompt tokens - 1, k]`.
    pub shape: [usize; 2],
    /// Which of its cells are listed.
    pub cells: Cells,
    /// Token ids of the listed cells, row by row; -1: nothing is wanted there.
    pub ids: Vec<i64>,
}

/// Which cells of a matrix are listed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Hash)]
pub enum Cells {
    /// All of them.
    All,
    /// Those of compressed sparse rows.
    Csr {
        /// `[rows + 1]`: where each row begins among the listed cells, and where the last ends.
        row_offsets: Vec<i64>,
        /// `[listed cells]`: their columns, rising within a row.
        columns: Vec<i64>,
    },
}

/// Log-probabilities of [`PromptTargets`], with the shape and the cells of the request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptTargetLogprobs {
    /// `[prompt tokens - 1, k]`.
    pub shape: [usize; 2],
    /// Which of its cells are listed.
    pub cells: Cells,
    /// Log-probabilities of the listed cells at temperature 1; 0 where nothing was wanted.
    pub logprobs: Vec<f32>,
}

/// Tokens that were drawn in the place of those of a prompt, all but the first: `[prompt tokens - 1, k]`, row-major.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptAltTokens {
    /// Draws at each position.
    pub k: usize,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Their log-probabilities at temperature 1, whatever that of the draw.
    pub logprobs: Vec<f32>,
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Response {
    /// A tenant exists.
    Created {
        /// Its adapter.
        lora: LoraSpec,
    },
    /// Losses were computed.
    ForwardBackward(ForwardBackwardOutput),
    /// The adapter took a step.
    OptimStep {
        /// For example `optim/grad_norm`.
        metrics: Vec<(String, f64)>,
    },
    /// A checkpoint is on disk.
    Saved {
        /// Its directory.
        dir: PathBuf,
        /// Bytes of its files.
        size_bytes: u64,
        /// The adapter that it holds.
        lora: LoraSpec,
    },
    /// A checkpoint was loaded into a tenant.
    Loaded,
    /// Sampling weights exist.
    Sampler,
    /// Sequences were sampled.
    Sampled(SampleOutput),
    /// Something was freed.
    Freed,
}

/// Per-datum outputs of a loss, in the order of the request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForwardBackwardOutput {
    /// One for each datum.
    pub data: Vec<DatumOutput>,
    /// Metrics whose names have exactly one colon, such as `loss:sum`.
    pub metrics: Vec<(String, f64)>,
}

/// Outputs of a loss for one datum.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DatumOutput {
    /// Shape of the outputs: that of `target_tokens`, `[tokens]` or `[tokens, k]`.
    pub shape: Vec<usize>,
    /// Log-probability of each target.
    pub logprobs: Vec<f32>,
    /// Loss of each target; they sum to `loss:sum`.
    pub elementwise_loss: Vec<f32>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// A stop token or string, which is the last thing in it.
    Stop,
    /// The token limit or the context ran out.
    Length,
}

/// Most probable tokens of a position with their log-probabilities, best first. Empty where there is no prediction.
pub type TopK = Vec<(u32, f32)>;

/// One sampled sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledSequence {
    /// Token ids, the stop token included.
    pub tokens: Vec<u32>,
    /// Log-probability of each token under the model at temperature 1.
    pub logprobs: Vec<f32>,
    /// Most probable tokens at each position, if asked for.
    pub topk: Option<Vec<TopK>>,
    /// Why it ended.
    pub stop_reason: StopReason,
}

/// What was sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleOutput {
    /// `num_samples` sequences.
    pub sequences: Vec<SampledSequence>,
    /// For each prompt position the log-probability of its token, if asked for; `None` at the first.
    pub prompt_logprobs: Option<Vec<Option<f32>>>,
    /// For each prompt position the most probable tokens, if asked for; empty at the first.
    pub topk_prompt_logprobs: Option<Vec<TopK>>,
    /// Log-probabilities of the tokens that were named for prompt positions, if any were.
    pub target_prompt_logprobs: Option<PromptTargetLogprobs>,
    /// Tokens drawn in the place of those of the prompt, if asked for.
    pub prompt_alt_tokens: Option<PromptAltTokens>,
    /// Prompt tokens that were found in the prefix cache.
    pub prompt_cache_hit_tokens: usize,
}
