//! The engine thread and the handle that others hold on it.
//!
//! One plain thread owns model, KV cache, tenants and samplers. Requests reach it through the [`Intake`], where server threads put them; with
//! nothing to do it sleeps there.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use strata_model::checkpoint::AdapterFormat;
use strata_model::lora::RANK_MAX;
use strata_model::vision::ImageProcessor;
use strata_model::{Keeping, LateTokenizer, Model, PAGE_TOKENS, Work};
use strata_tensor::LOGITS_CHUNK_BYTES;

use crate::admission::Admission;
use crate::api::{Client, Failure, LoraSpec, Refusal, Request, RequestId, SaveTarget};
use crate::budget::{Budget, Needs, PictureNeeds, StartError};
use crate::checkpoint::BaseModel;
use crate::compute::Compute;
use crate::core::Core;
use crate::device::{Device, release_freed_memory};
use crate::disk::{Deliver, Disk, Done, SaveJob};
use crate::files::{Load, Storage};
use crate::intake::Intake;
use crate::learner::{self, LearnerState};
use crate::ledger::Ledger;
use crate::machine::Machine;
use crate::maker::Maker;
use crate::pictures::{Eyes, ModelEyes};
use crate::reply::Reply;
use crate::sampler::{SamplerLimits, Speculated, Speculating, Speculation};
use crate::unfinished::UnfinishedSaves;

/// Of the memory, the part that the logits of a chunk of tokens may take.
const LOGITS_FRACTION: u64 = 16;
/// How long the engine is idle before it gives up the prefix cache and gives all memory that is free back to the system. Shorter breaks are part of
/// a training loop, whose client computes rewards between steps: fresh pages for the next step would cost it up to a fifth of its time.
const IDLE_BEFORE_RELEASE: Duration = Duration::from_secs(60);

/// Limits of the engine, decided at start.
#[derive(Clone)]
pub struct EngineConfig {
    /// Memory for everything, base weights included, in bytes.
    pub memory_bytes: u64,
    /// Of those, what adapters get: three fourths for those in training and frozen for sampling, a fourth for what is being saved of them. If it is not said,
    /// three eighths of what weights, requests and the cache leave, or more.
    pub adapter_bytes: Option<u64>,
    /// Name of the base model, written into checkpoints.
    pub base_model: String,
    /// What it shares with others on the same machine.
    pub machine: Machine,
    /// Whether samples guess what follows.
    pub speculation: Speculation,
}

/// What the server tells clients about the engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Longest sequence, prompt and sample together. The model's own limit, or less if memory does not allow it.
    pub max_context_tokens: usize,
    /// Longest training example. The longest sequence, or less if memory does not allow it.
    pub max_example_tokens: usize,
    /// Rows of the vocabulary.
    pub vocab_size: usize,
    /// Tokens that the KV cache holds.
    pub cache_tokens: usize,
    /// What computes.
    pub backend: String,
    /// Memory for bodies of requests on their way in, in bytes.
    pub transit_bytes: u64,
    /// Memory that is for tables, threads and the allocator's slack.
    pub reserve_bytes: u64,
}

/// A cheap handle on the engine thread. When the last one is dropped the thread ends, after the saves that have begun are written; what has not
/// been answered then fails.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

/// What benchmarks ask of an engine that is running. No bit of a result depends on it.
#[derive(Default)]
pub(crate) struct Switches {
    /// Whether passes keep no activations, however much memory there is.
    pub(crate) computes_again: AtomicBool,
    /// Whether the prefix cache is to be emptied.
    forgets_prefixes: AtomicBool,
}

struct Shared {
    admission: Admission,
    alive: Arc<AtomicBool>,
    info: EngineInfo,
    switches: Arc<Switches>,
    speculating: Arc<Speculating>,
    unfinished_saves: UnfinishedSaves,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.admission.intake.close();
    }
}

impl EngineHandle {
    /// Whether memory suffices for an engine over a model, before there is one.
    ///
    /// # Errors
    /// [`StartError::Memory`], if it does not.
    pub fn check_memory(model: &mut Model, config: &EngineConfig) -> Result<(), StartError> {
        divide(model, config).map(drop)
    }

    /// Starts the engine thread over a model. Without a tokenizer, requests with stop strings fail.
    ///
    /// # Errors
    /// If `config.memory_bytes` does not suffice, or the device has no such memory, or the system refuses a thread.
    pub fn start(mut model: Model, tokenizer: Option<LateTokenizer>, config: EngineConfig) -> Result<Self, StartError> {
        let budget = divide(&mut model, &config)?;
        let info = EngineInfo {
            max_context_tokens: budget.max_context_tokens,
            max_example_tokens: budget.max_example_tokens,
            vocab_size: model.config().vocab_size,
            cache_tokens: budget.cache.pages * PAGE_TOKENS,
            backend: model.backend().description(),
            transit_bytes: budget.transit_bytes,
            reserve_bytes: budget.reserve_bytes,
        };
        tracing::info!(?budget, backend = %info.backend, "engine starts");
        model.backend().limit_memory(config.machine.grow_buffers(budget.buffer_bytes) as usize);
        let model = Arc::new(model);
        config.machine.ledger.grow(budget.ledger_bytes);
        let intake = Arc::new(Intake::new(config.machine.ledger.clone(), budget.adapter_bytes));
        let sizes = model.clone();
        let admission = Admission {
            intake: intake.clone(),
            max_example_tokens: info.max_example_tokens,
            sampler_limits: SamplerLimits {
                vocab_size: info.vocab_size,
                max_context_tokens: info.max_context_tokens,
                short_sequence_max: model.short_sequence_max(),
                eos_token_ids: model.config().eos_token_ids.clone(),
                page_tokens: PAGE_TOKENS,
                cache: budget.cache,
                tokenizer,
                eyes: ModelEyes::of(&model, budget.picture_tokens, budget.decoding_bytes)
                    .map(|eyes| Box::new(eyes) as Box<dyn Eyes>),
            },
            adapter_bytes: Box::new(move |lora| learner::bytes_of(lora, &sizes)),
        };
        let (backend, modules) = (model.shared_backend(), model.lora_modules().to_vec());
        let format = AdapterFormat::tinker(model.config());
        let base = BaseModel { name: config.base_model, backend, modules, format };
        let storage = DiskStorage::start(base, model.clone(), intake.clone()).map_err(|e| StartError::Thread(e.to_string()))?;
        let alive = Arc::new(AtomicBool::new(true));
        let switches = Arc::new(Switches::default());
        let speculating = Speculating::of(config.speculation, &Work::of(model.config()));
        let of_core = speculating.clone();
        let device = Device::new(model, config.machine.join(), switches.clone());
        let cache = device.new_cache(budget.cache).map_err(StartError::Device)?;
        let of_thread = switches.clone();
        spawn(alive.clone(), intake.clone(), move || {
            let core = Core::new(device, cache, intake.clone(), storage, budget, PAGE_TOKENS, of_core);
            run(core, &intake, &of_thread);
        })?;
        Ok(Self::of(admission, alive, info, switches, speculating))
    }

    fn of(
        admission: Admission,
        alive: Arc<AtomicBool>,
        info: EngineInfo,
        switches: Arc<Switches>,
        speculating: Arc<Speculating>,
    ) -> Self {
        let unfinished_saves = UnfinishedSaves::default();
        EngineHandle { shared: Arc::new(Shared { admission, alive, info, switches, speculating, unfinished_saves }) }
    }

    /// A handle on an engine that someone else drives.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn over(admission: Admission, info: EngineInfo, speculating: Arc<Speculating>) -> Self {
        let alive = Arc::new(AtomicBool::new(true));
        Self::of(admission, alive, info, Arc::default(), speculating)
    }

    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn intake(&self) -> &Intake {
        &self.shared.admission.intake
    }

    /// What the engine serves.
    pub fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    /// Whether passes from now on compute activations again on the way back, as if there were no memory to keep them. For benchmarks: no bit depends on it.
    pub fn compute_activations_again(&self, again: bool) {
        self.shared.switches.computes_again.store(again, Ordering::Relaxed);
    }

    /// Forgets the prefixes of all samples before the next request is worked on, so that it takes pages that were in use before. For
    /// benchmarks: a cache that is full for the first time takes memory from the system, and later it does not.
    pub fn forget_prefixes(&self) {
        self.shared.switches.forgets_prefixes.store(true, Ordering::Relaxed);
    }

    /// What came of the guesses of samples since the start.
    pub fn speculated(&self) -> Speculated {
        self.shared.speculating.speculated()
    }

    /// The account that requests and results are charged to.
    pub fn ledger(&self) -> &Ledger {
        self.shared.admission.intake.ledger()
    }

    /// Accepts a request under an id that no open request has. Once accepted, `reply` is called exactly once, also when the engine dies; it
    /// may be called before this returns.
    ///
    /// # Errors
    /// If the request is refused: `reply` is then dropped and never called.
    pub fn submit(&self, id: RequestId, client: Client, request: Request, reply: Reply) -> Result<(), Refusal> {
        let reply = self.shared.unfinished_saves.counted(&request, reply);
        self.shared.admission.submit(id, client, request, reply)
    }

    /// Bytes for adapters that are missing now for a snapshot of a model.
    pub fn snapshot_shortage(&self, model_id: &str) -> u64 {
        self.shared.admission.intake.snapshot_shortage(model_id)
    }

    /// Bytes for adapters that are missing now for a model of `client`.
    pub fn model_shortage(&self, client: &Client, lora: &LoraSpec) -> u64 {
        self.shared.admission.model_shortage(client, lora)
    }

    /// Bytes that [`Request::DropSampler`] gives back at once: `None` if there are no such sampling weights, or they are still to be made.
    pub fn sampler_bytes(&self, sampler_id: &str) -> Option<u64> {
        self.shared.admission.intake.sampler_bytes(sampler_id)
    }

    /// How many saves were submitted and are not answered yet. Whoever ends the process waits until there are none, if they are to be kept.
    pub fn saves_in_work(&self) -> usize {
        self.shared.unfinished_saves.owed()
    }

    /// How many saves were not written through a fault of the server, the disk included, since the start.
    pub fn saves_failed(&self) -> usize {
        self.shared.unfinished_saves.failed()
    }

    /// Gives up all work that no save waits for: nothing more will be asked for, and what is left is to be written soon. Operations that wait
    /// for one that never came fail too.
    pub fn drain(&self) {
        self.shared.admission.intake.drain(&Failure::Server("the server is stopping".into()));
    }

    /// Whether the engine thread is running.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }
}

/// The threads of the disk and of fresh adapters, and what they have done.
struct DiskStorage {
    disk: Disk,
    maker: Maker,
    done: Receiver<Done>,
}

impl DiskStorage {
    fn start(base: BaseModel, model: Arc<Model>, intake: Arc<Intake>) -> std::io::Result<Self> {
        let (sender, done) = channel();
        let deliver = move |ended| {
            // An engine that is gone wants nothing any more.
            let _ = sender.send(ended);
            intake.nudge();
        };
        let deliver: Deliver = Arc::new(deliver);
        Ok(DiskStorage { disk: Disk::start(base, deliver.clone())?, maker: Maker::start(model, deliver)?, done })
    }
}

impl Storage<LearnerState> for DiskStorage {
    fn save(&mut self, ticket: u64, state: LearnerState, target: SaveTarget) {
        self.disk.save(SaveJob { ticket, state, target });
    }

    fn load(&mut self, load: Load) {
        self.disk.load(load);
    }

    fn make(&mut self, ticket: u64, lora: LoraSpec) {
        self.maker.make(ticket, lora);
    }

    fn poll(&mut self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

/// Divides memory among what a model and its work need.
fn divide(model: &mut Model, config: &EngineConfig) -> Result<Budget, StartError> {
    let mut divided = |memory_bytes: u64| {
        let logits_bytes = (memory_bytes / LOGITS_FRACTION).min(LOGITS_CHUNK_BYTES as u64);
        model.set_logits_chunk_bytes(logits_bytes as usize);
        // Larger ranks than a model is wide make no sense, and what they take beyond is small beside the reserve.
        let rank = model.config().hidden_size.min(RANK_MAX);
        let least =
            LoraSpec { rank: 1, seed: 0, train_attn: true, train_mlp: true, train_unembed: true, ranks: BTreeMap::new() };
        let needs = Needs {
            weight_bytes: model.weight_bytes() as u64,
            kv_page_bytes: model.kv_page_bytes() as u64,
            kv_state_bytes: model.kv_state_bytes() as u64,
            train_bytes_per_token: (model.train_bytes_per_token() + model.lora_bytes_per_token(rank)) as u64,
            checkpoint_bytes_per_token: model.kept_bytes(Keeping::ALL_CHECKPOINTS, 1, rank),
            kept_bytes_per_token: model.kept_bytes(Keeping { layers: usize::MAX, ..Keeping::ALL_CHECKPOINTS }, 1, rank),
            workspace_bytes: model.workspace_bytes() as u64,
            adapter_bytes: config.adapter_bytes,
            least_adapter_bytes: learner::bytes_of(&least, model).map_or(0, |bytes| bytes.training),
            max_position_embeddings: model.config().max_position_embeddings,
            pictures: PictureNeeds {
                seen_bytes: model.image_bytes().features as u64,
                seeing_bytes: model.image_bytes().seeing as u64,
                tokens_max: model.image_processor().map_or(0, ImageProcessor::tokens_max),
            },
        };
        Budget::divide(memory_bytes, needs)
    };
    let mut budget = divided(config.memory_bytes);
    if let Err(StartError::Memory { least_bytes, .. }) = &mut budget {
        // The logits of a chunk get more where there is more.
        while let Err(StartError::Memory { least_bytes: more_bytes, .. }) = divided(*least_bytes)
            && more_bytes > *least_bytes
        {
            *least_bytes = more_bytes;
        }
    }
    budget
}

/// Runs `body` on the engine thread.
fn spawn(alive: Arc<AtomicBool>, intake: Arc<Intake>, body: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    let thread = move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            tracing::error!("the engine thread panicked; every request fails from now on");
        }
        alive.store(false, Ordering::Release);
        intake.fail_all();
    };
    let started = std::thread::Builder::new().name("strata-engine".into()).spawn(thread);
    started.map(drop).map_err(|e| StartError::Thread(e.to_string()))
}

/// Runs until the intake closes, and then until what is being saved is written.
fn run(mut core: Core<Device, DiskStorage>, intake: &Intake, switches: &Switches) {
    let mut released = false;
    while !intake.is_closed() {
        if switches.forgets_prefixes.swap(false, Ordering::Relaxed) {
            core.forget_prefixes();
        }
        if core.turn() {
            released = false;
        } else if !intake.wait(IDLE_BEFORE_RELEASE) {
            if released {
                // Results that nobody comes for are given up later than that.
                release_freed_memory();
            } else {
                core.forget_prefixes();
                core.release_memory();
                released = true;
            }
        }
    }
    while core.unwritten_saves() > 0 {
        core.settle();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::reply::PendingReply;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn a_panic_of_the_thread_is_told_to_everyone_who_waits() {
        let intake = Arc::new(Intake::new(Ledger::new(1000), 0));
        let alive = Arc::new(AtomicBool::new(true));
        let (tx, rx) = channel();
        let reply = PendingReply::new(Box::new(move |outcome, _| drop(tx.send(outcome))));
        let control = crate::intake::Control::CreateSampler {
            sampler_id: "s".into(),
            client: Client { owner: "o".into(), session: "s".into() },
            source: None,
            reply,
        };
        intake.accept(control).map_err(|e| e.0).unwrap();
        spawn(alive.clone(), intake.clone(), || panic!("expected in this test")).unwrap();
        assert!(matches!(rx.recv_timeout(PATIENCE), Ok(Err(Failure::Server(_)))));
        assert!(!alive.load(Ordering::Acquire), "requests are failed after the engine is marked dead");
        assert!(intake.is_closed(), "what comes later is refused");
    }
}
