//! A real model behind [`Compute`].

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_model::lora::{Adapter, LoraParams};
use strata_model::{Held, ImageFeatures, KvCache, Model, PackedBatch, PlacedImage};
use strata_tensor::{RowReply, RowRequest};

use crate::api::{AdamParams, Failure, LoraSpec};
use crate::compute::{AdapterBytes, Between, Compute, PassError, PassPart, RowResult, RowTask, Scored, StepSpan, Stepped};
use crate::datum::PreparedDatum;
use crate::engine::Switches;
use crate::learner::{self, Learner, LearnerState};
use crate::machine::Turn;
use crate::pass_targets::PassTargets;
use crate::pictures::{Picture, PictureId};
use crate::sampler::{Alternatives, Room, draw};
use crate::snapshot::WeightsId;

/// This part of a model's layers is little: on the way there alone, without the unembedding.
const EARLY_FRACTION: usize = 8;
/// How long nobody is looked for who is due while a picture is decoded.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A model, its device and a clock.
pub(crate) struct Device {
    pub(crate) model: Arc<Model>,
    start: Instant,
    turn: Turn,
    switches: Arc<Switches>,
    /// Who has this decodes: others are seen while a picture is decoded, and memory is set aside for one.
    decoding: Mutex<()>,
}

impl Device {
    pub(crate) fn new(model: Arc<Model>, turn: Turn, switches: Arc<Switches>) -> Self {
        Device { model, start: Instant::now(), turn, switches, decoding: Mutex::default() }
    }
}

impl Device {
    fn run_pass(
        &self,
        parts: &mut [PassPart<'_, Self>],
        seen: &HashMap<PictureId, Rc<ImageFeatures>>,
        kept_bytes: u64,
        between: Between<'_>,
    ) -> Result<Vec<f32>, PassError> {
        let (tokens, rank) = size_of_pass(parts);
        let mut adapters = Vec::with_capacity(parts.len());
        for part in parts.iter_mut() {
            let packed = part.learner.packed(&self.model);
            adapters.push(packed.map_err(|failure| PassError::Failed(failure.to_string()))?.1);
        }
        let mut batch = PackedBatch::new();
        let mut targets = PassTargets::new();
        let mut gradients: Vec<Option<&mut LoraParams>> = Vec::with_capacity(parts.len());
        for (part, adapter) in parts.iter_mut().zip(&adapters) {
            batch.begin_group(Some(adapter));
            for datum in &part.data {
                push_datum(datum, seen, &mut batch)?;
                if part.backward { targets.push(datum) } else { targets.push_scored(datum) }
            }
            let gradient = part.backward.then(|| part.learner.gradient_mut(&self.model)).transpose();
            gradients.push(gradient.map_err(|failure| PassError::Failed(failure.to_string()))?);
        }
        let done = if gradients.iter().all(Option::is_none) {
            self.model.forward_with(&batch, &targets.targets, between)
        } else {
            let keeping = self.model.kept_within(kept_bytes, tokens, rank);
            self.model.forward_backward_with(&batch, &targets.targets, &targets, &mut gradients, keeping, between)
        };
        done.map(|computed| targets.answers(computed)).map_err(pass_error)
    }
}

impl Compute for Device {
    type Learner = Learner;
    type Frozen = Option<Arc<Adapter>>;
    type State = LearnerState;
    type Cache = KvCache;
    type Seen = Rc<ImageFeatures>;

    fn now(&self) -> Duration {
        // What it waited for other engines is nobody's time.
        self.start.elapsed().saturating_sub(self.turn.waited())
    }

    fn adapter_bytes(&self, lora: &LoraSpec) -> Result<AdapterBytes, String> {
        Ok(learner::adapter_bytes(&self.model, &learner::config_of(lora, self.model.lora_modules())?))
    }

    fn restore(&self, state: LearnerState) -> Learner {
        Learner::from_state(state)
    }

    fn spec_of(&self, state: &LearnerState) -> LoraSpec {
        learner::spec_of(&state.config, self.model.lora_modules())
    }

    fn state_bytes(&self, state: &LearnerState) -> AdapterBytes {
        learner::adapter_bytes(&self.model, &state.config)
    }

    fn check_shape(&self, made_with: &LoraSpec, state: &LearnerState) -> Result<(), String> {
        let (ours, theirs) = (&learner::config_of(made_with, self.model.lora_modules())?, &state.config);
        learner::check_shape(ours, theirs)?;
        let [ours, theirs] = [ours, theirs].map(|config| learner::adapter_bytes(&self.model, config).training);
        if theirs > ours {
            return Err(format!("the checkpoint's adapter takes {theirs} bytes, and the model was given {ours}"));
        }
        Ok(())
    }

    fn capture(&self, learner: &mut Learner, with_optimizer: bool) -> Result<LearnerState, Failure> {
        if with_optimizer { self.turn.work(|| learner.full_state(&self.model)) } else { Ok(learner.adapter_state()) }
    }

    fn freeze(&self, learner: &mut Learner) -> Result<(WeightsId, Self::Frozen), Failure> {
        self.turn.work(|| learner.packed(&self.model)).map(|(id, adapter)| (id, Some(adapter)))
    }

    fn freeze_state(&self, state: &LearnerState) -> Result<Self::Frozen, Failure> {
        self.turn.work(|| learner::pack(&self.model, state.config.clone(), &state.weights)).map(Some)
    }

    fn base(&self) -> Self::Frozen {
        None
    }

    fn optim_step(&self, learner: &mut Learner, params: &AdamParams) -> Result<f64, Failure> {
        self.turn.work(|| learner.optim_step(&self.model, params))
    }

    fn gradient_is_finite(&self, learner: &Learner) -> Result<bool, Failure> {
        self.turn.work(|| learner.gradient_is_finite(&self.model))
    }

    fn lose_gradient(&self, learner: &mut Learner, why: Failure) {
        self.turn.work(|| learner.lose_gradient(&self.model, why));
    }

    fn seen_bytes_per_token(&self) -> u64 {
        self.model.image_bytes().features as u64
    }

    fn see(&self, file: &[u8], between: Between<'_>) -> Result<Self::Seen, PassError> {
        let processor = self.model.image_processor().ok_or_else(|| PassError::Failed("the model reads text alone".into()))?;
        let one_at_a_time = &self.decoding;
        let decode = || {
            let _decoding = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
            processor.process(file)
        };
        let patches = decoded_beside(decode, &mut *between)?;
        let mut between = || self.turn.aside(&mut *between);
        let seen = self.turn.work(|| self.model.image_features(&patches, &mut between));
        seen.map(Rc::new).map_err(pass_error)
    }

    fn kept_bytes(&self, parts: &[PassPart<'_, Self>], spare_bytes: u64) -> u64 {
        if !parts.iter().any(|part| part.backward) {
            return 0;
        }
        let (tokens, rank) = size_of_pass(parts);
        let mut keeping = self.model.kept_within(spare_bytes, tokens, rank);
        if self.switches.computes_again.load(Ordering::Relaxed) {
            keeping.layers = 1;
        }
        self.model.kept_bytes(keeping, tokens, rank)
    }

    fn early_layers(&self) -> usize {
        (self.model.config().num_layers / EARLY_FRACTION).max(1)
    }

    fn pass(
        &self,
        parts: &mut [PassPart<'_, Self>],
        seen: &HashMap<PictureId, Self::Seen>,
        kept_bytes: u64,
        between: Between<'_>,
    ) -> Result<Vec<f32>, PassError> {
        let mut between = || self.turn.aside(&mut *between);
        self.turn.work(|| self.run_pass(parts, seen, kept_bytes, &mut between))
    }

    fn new_cache(&self, size: Room) -> Result<KvCache, String> {
        self.model.new_kv_cache(size.pages, size.states).map_err(|error| format!("the cache of keys and values: {error}"))
    }

    fn copy_page(&self, cache: &mut KvCache, from: u32, to: u32) -> Result<(), String> {
        self.turn.work(|| cache.copy_page(self.model.backend(), from, to)).map_err(|error| error.to_string())
    }

    fn copy_state(&self, cache: &mut KvCache, from: u32, to: u32) -> Result<(), String> {
        self.turn.work(|| cache.copy_state(self.model.backend(), from, to)).map_err(|error| error.to_string())
    }

    fn release_memory(&self, cache: &mut KvCache, free_pages: &[u32], free_states: &[u32]) {
        if let Err(error) = cache.release(self.model.backend(), free_pages, free_states) {
            tracing::error!("pages and states that nobody needs keep their memory: {error}");
        }
        self.model.backend().trim();
        release_freed_memory();
    }

    fn step(&self, cache: &mut KvCache, spans: &[StepSpan<'_, Self::Frozen, Self::Seen>]) -> Result<Stepped, String> {
        let mut batch = PackedBatch::new();
        let (mut rows, mut tasks) = (Vec::new(), Vec::new());
        for (i, span) in spans.iter().enumerate() {
            if i == 0 || spans[i - 1].weights.0 != span.weights.0 {
                batch.begin_group(span.weights.1.as_deref());
            }
            let start = batch.len();
            let images = span.pictures.iter();
            let images: Vec<PlacedImage<'_>> =
                images.map(|(picture, seen)| placed(picture, seen.map(|seen| &**seen))).collect();
            batch.push_with_images(&span.tokens, span.past, span.length_max, span.held.clone(), &images);
            for (row, task) in &span.rows {
                rows.push(start + row);
                tasks.push(task);
            }
        }
        let requests: Vec<RowRequest> = tasks.iter().map(|task| request_of(task)).collect();
        let replies = self.turn.work(|| self.model.step(&batch, cache, &rows, &requests)).map_err(|error| error.to_string())?;
        let results = tasks.into_iter().zip(replies).map(|(task, reply)| result_of(task, reply)).collect();
        Ok(Stepped { results, num_computed: self.model.num_computed(&batch) })
    }
}

/// Decodes on a thread of its own, while others run between.
fn decoded_beside<T: Send>(decode: impl FnOnce() -> Result<T, String> + Send, between: Between<'_>) -> Result<T, PassError> {
    let waiting = std::thread::current();
    std::thread::scope(|scope| {
        let decoding = std::thread::Builder::new().name("strata-picture".into()).spawn_scoped(scope, move || {
            let decoded = decode();
            waiting.unpark();
            decoded
        });
        let decoding = decoding.map_err(|error| PassError::Failed(format!("the system refuses a thread: {error}")))?;
        let mut goes_on = true;
        while goes_on && !decoding.is_finished() {
            goes_on = between().is_continue();
            std::thread::park_timeout(LOOK_AGAIN);
        }
        let decoded = decoding.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if goes_on { decoded.map_err(PassError::Failed) } else { Err(PassError::Interrupted) }
    })
}

/// Has the allocator give back what it keeps for later.
pub(crate) fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn pass_error(error: strata_model::Error) -> PassError {
    match error {
        strata_model::Error::Interrupted => PassError::Interrupted,
        other => PassError::Failed(other.to_string()),
    }
}

fn request_of(task: &RowTask) -> RowRequest {
    match task {
        RowTask::Score { ids, topk, alternatives } => {
            RowRequest { ids: ids.clone(), top: *topk, draw: alternatives.as_ref().map(Alternatives::request) }
        }
        RowTask::Draw { settings, samples, position } => draw::request(settings, samples, *position),
    }
}

fn result_of(task: &RowTask, reply: Option<RowReply>) -> RowResult {
    match (task, reply) {
        (_, None) => RowResult::NotNumbers,
        (RowTask::Score { .. }, Some(reply)) => {
            let RowReply { logprobs, top, drawn } = reply;
            RowResult::Scored(Scored { logprobs, topk: top, alternatives: drawn })
        }
        (RowTask::Draw { .. }, Some(reply)) => RowResult::Drawn(draw::drawn(reply)),
    }
}

fn placed<'a>(picture: &Picture, features: Option<&'a ImageFeatures>) -> PlacedImage<'a> {
    PlacedImage { first: picture.first, grid: picture.grid, features }
}

fn push_datum<'a>(
    datum: &PreparedDatum,
    seen: &'a HashMap<PictureId, Rc<ImageFeatures>>,
    batch: &mut PackedBatch<'a>,
) -> Result<(), PassError> {
    let images = datum.pictures.iter().map(|picture| match seen.get(&picture.id) {
        Some(features) => Ok(placed(picture, Some(features))),
        None => Err(PassError::Failed("a picture of it was not seen before".into())),
    });
    let (tokens, images) = (&datum.tokens, images.collect::<Result<Vec<_>, _>>()?);
    batch.push_with_images(tokens, 0, tokens.len(), Held::default(), &images);
    Ok(())
}

/// Tokens of a pass, and the largest rank of its adapters.
fn size_of_pass(parts: &[PassPart<'_, Device>]) -> (usize, usize) {
    let tokens = parts.iter().flat_map(|part| &part.data).map(|datum| datum.tokens.len()).sum();
    let ranks = parts.iter().map(|part| part.learner.config.rank_max());
    (tokens, ranks.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::ControlFlow;
    use std::sync::OnceLock;

    use strata_model::ModelSource;
    use strata_tensor::CpuBackend;

    use super::*;
    use crate::losses::{DatumLoss, Loss, LossInputs};
    use crate::machine::Machine;

    const TOKENS: usize = 40;

    fn example(loss: &str) -> PreparedDatum {
        let loss = Loss::parse(loss, &BTreeMap::new()).unwrap();
        let inputs = LossInputs::Policy {
            advantages: (0..TOKENS).map(|i| if i < 8 { 0.0 } else { 1.5 }).collect(),
            sampling_logprobs: vec![-6.0; TOKENS],
            clip: Some((vec![0.0; TOKENS], vec![1e9; TOKENS])),
            ratio_mask: loss.needs_sequence_ratio().then(|| (0..TOKENS).map(|i| (i % 3) as f32).collect()),
        };
        PreparedDatum {
            tokens: (0..TOKENS as u32).map(|i| i * 7 % 200 + 3).collect(),
            pictures: Vec::new(),
            targets: (0..TOKENS as u32).map(|i| i * 11 % 200 + 3).collect(),
            targets_per_token: 1,
            shape: vec![TOKENS],
            loss: DatumLoss { loss, inputs, log_sequence_ratio: OnceLock::new() },
            repeated: 0,
        }
    }

    /// How often others are looked for in a pass over an example, its log-probabilities, and the ratio that its loss has then.
    fn looks(device: &Device, loss: &str, backward: bool) -> (usize, Vec<f32>, Option<f64>) {
        let lora =
            LoraSpec { rank: 4, seed: 1, train_attn: true, train_mlp: true, train_unembed: true, ranks: BTreeMap::new() };
        let config = learner::config_of(&lora, device.model.lora_modules()).unwrap();
        let mut learner = Learner::from_state(LearnerState::fresh(&device.model, config, 1).unwrap());
        let example = example(loss);
        let mut looks = 0;
        let mut between = || {
            looks += 1;
            ControlFlow::Continue(())
        };
        let mut parts = [PassPart { learner: &mut learner, data: vec![&example], backward }];
        let logprobs = device.pass(&mut parts, &HashMap::new(), 0, &mut between).unwrap();
        (looks, logprobs, example.loss.log_sequence_ratio.get().copied())
    }

    /// The layers are gone through once, whatever of the log-probabilities has to be known before a derivative is.
    #[test]
    fn a_ratio_of_a_sequence_costs_logits_of_its_targets_and_no_pass() {
        let model = Model::load(Arc::new(CpuBackend::new(Some(1)).unwrap()), &ModelSource::Embedded, None).unwrap();
        let device = Device::new(Arc::new(model), Machine::default().join(), Arc::new(Switches::default()));
        for backward in [true, false] {
            let (ppo, expected, none) = looks(&device, "ppo", backward);
            let (gspo, logprobs, ratio) = looks(&device, "gspo", backward);
            assert_eq!(gspo, ppo + usize::from(backward), "one chunk of logits more, if there is a way back");
            let whole = example("gspo").loss;
            whole.fix_sequence_ratio(&expected);
            assert!(logprobs == expected && none.is_none() && ratio.is_some());
            assert_eq!(ratio, whole.log_sequence_ratio.get().copied());
        }
    }
}
