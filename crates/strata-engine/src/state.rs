//! Everything the engine thread owns, and what each request does to it.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use strata_model::{Model, Tokenizer};

use crate::api::{
    CheckpointSource, Failure, LoraSpec, ModelId, Request, Response, SampleRequest, SamplerId, SaveTarget, TrainOp,
};
use crate::budget::Budget;
use crate::clock::{FairClock, Work};
use crate::datum::{self, ModelLimits};
use crate::disk::{Disk, Done, LoadJob, SaveJob};
use crate::engine::Message;
use crate::reply::PendingReply;
use crate::sampler::{Sampler, SamplerLimits};
use crate::scheduler::Scheduler;
use crate::snapshot::{Weights, WeightsIds};
use crate::tenant::{Learner, LearnerState, RunningForward, Tenant, config_of, spec_of};

/// Tokens of a training pass while samples run: they wait for it.
const PASS_TOKENS_BESIDE_SAMPLING: usize = 512;
/// Sample requests that may wait for their weights to be loaded.
const SAMPLES_AWAITING_WEIGHTS_MAX: usize = 4096;

/// Saves that are with the disk at a time; more wait here.
const SAVES_ON_DISK_MAX: usize = 2;

/// Sampling weights by name.
enum SamplerSlot {
    Ready(Weights),
    /// Being loaded.
    Loading {
        uid: u64,
        reply: PendingReply,
        queued: Vec<(SampleRequest, PendingReply)>,
    },
}

/// What the engine thread owns.
pub(crate) struct State {
    model: Model,
    budget: Budget,
    tenants: BTreeMap<ModelId, Tenant>,
    samplers: BTreeMap<SamplerId, SamplerSlot>,
    sampler: Sampler,
    scheduler: Scheduler,
    clock: FairClock,
    weights_ids: WeightsIds,
    /// Saves that are to be answered, by ticket.
    saves: BTreeMap<u64, (PathBuf, PendingReply)>,
    waiting_saves: VecDeque<SaveJob>,
    disk: Disk,
    next_uid: u64,
}

impl Drop for State {
    fn drop(&mut self) {
        // Nobody can be answered any more, but what was captured is written.
        self.waiting_saves.drain(..).for_each(|job| self.disk.save(job));
    }
}

impl State {
    pub(crate) fn new(model: Model, budget: Budget, tokenizer: Option<Arc<Tokenizer>>, disk: Disk) -> Self {
        let limits = SamplerLimits {
            vocab_size: model.config().vocab_size,
            max_context_tokens: budget.max_context_tokens,
            eos_token_ids: model.config().eos_token_ids.clone(),
            tokenizer,
        };
        State {
            sampler: Sampler::new(model.new_kv_cache(budget.kv_pages), limits),
            model,
            budget,
            tenants: BTreeMap::new(),
            samplers: BTreeMap::new(),
            scheduler: Scheduler::default(),
            clock: FairClock::default(),
            weights_ids: WeightsIds::default(),
            saves: BTreeMap::new(),
            waiting_saves: VecDeque::new(),
            disk,
            next_uid: 0,
        }
    }

    /// Whether there is something to compute without another message.
    pub(crate) fn has_work(&self) -> bool {
        !self.sampler.is_idle() || Scheduler::has_work(&self.tenants)
    }

    /// Runs one training pass or one sampling step.
    pub(crate) fn work(&mut self) {
        let (training, sampling) = (Scheduler::has_work(&self.tenants), !self.sampler.is_idle());
        let Some(work) = self.clock.choose(training, sampling) else { return };
        let start = Instant::now();
        match work {
            Work::Training => {
                let most = if sampling { PASS_TOKENS_BESIDE_SAMPLING } else { usize::MAX };
                let tokens = self.budget.pass_tokens.min(most);
                self.scheduler.run_pass(&self.model, &mut self.tenants, &mut self.weights_ids, tokens);
            }
            Work::Sampling => self.sampler.step(&self.model),
        }
        self.clock.charge(work, start.elapsed());
    }

    /// Takes a message: runs what needs no turn, queues the rest.
    pub(crate) fn take(&mut self, message: Message) {
        match message {
            Message::Request(request, reply) => self.request(request, reply),
            Message::Disk(Done::Saved { ticket, result }) => self.saved(ticket, result),
            Message::Disk(Done::Loaded { ticket, result }) => self.loaded(ticket, result),
        }
    }

    fn save(&mut self, state: LearnerState, target: SaveTarget, reply: PendingReply) {
        let ticket = self.next_uid();
        self.saves.insert(ticket, (target.dir.clone(), reply));
        self.waiting_saves.push_back(SaveJob { ticket, state, target });
        self.start_saves();
    }

    fn start_saves(&mut self) {
        while self.saves.len() - self.waiting_saves.len() < SAVES_ON_DISK_MAX
            && let Some(job) = self.waiting_saves.pop_front()
        {
            self.disk.save(job);
        }
    }

    fn saved(&mut self, ticket: u64, result: Result<u64, Failure>) {
        if let Some((dir, reply)) = self.saves.remove(&ticket) {
            reply.send(result.map(|size_bytes| Response::Saved { dir, size_bytes }));
        }
        self.start_saves();
    }

    /// The uid of the tenant or sampler that waits is the ticket.
    fn loaded(&mut self, uid: u64, result: Result<LearnerState, Failure>) {
        match self.tenants.values().any(|tenant| tenant.uid == uid) {
            true => self.tenant_loaded(uid, result),
            false => self.sampler_loaded(uid, result),
        }
    }

    fn request(&mut self, request: Request, reply: PendingReply) {
        match request {
            Request::CreateModel { model_id, lora } => match self.create_model(model_id, &lora) {
                Ok(()) => reply.send(Ok(Response::Created { lora })),
                Err(message) => reply.fail_user(message),
            },
            Request::CreateModelFromCheckpoint { model_id, source, with_optimizer } => {
                self.create_from_checkpoint(model_id, source, with_optimizer, reply);
            }
            Request::Train { model_id, seq_id, op } => match self.tenants.get_mut(&model_id) {
                Some(tenant) => {
                    if let Err(((_, reply), message)) = tenant.ops.insert(seq_id, (op, reply)) {
                        reply.fail_user(message);
                    }
                }
                None => reply.fail_user(format!("there is no model {model_id}")),
            },
            Request::UnloadModel { model_id } => match self.tenants.remove(&model_id) {
                Some(tenant) => {
                    tenant.fail_all(&Failure::User(format!("model {model_id} was unloaded before this operation was done")));
                    reply.send(Ok(Response::Freed));
                }
                None => reply.fail_user(format!("there is no model {model_id}")),
            },
            Request::CreateSampler { sampler_id, source } => self.create_sampler(sampler_id, source, reply),
            Request::DropSampler { sampler_id } => self.drop_sampler(&sampler_id, reply),
            Request::Sample { sampler_id, sample } => match self.samplers.get_mut(&sampler_id) {
                Some(SamplerSlot::Ready(weights)) => self.sampler.submit(weights.clone(), &sample, reply),
                Some(SamplerSlot::Loading { queued, .. }) if queued.len() < SAMPLES_AWAITING_WEIGHTS_MAX => {
                    queued.push((sample, reply));
                }
                Some(SamplerSlot::Loading { .. }) => {
                    reply.fail_server(format!("{SAMPLES_AWAITING_WEIGHTS_MAX} samples wait for {sampler_id} already"));
                }
                None => reply.fail_user(format!("there are no sampling weights {sampler_id}")),
            },
        }
    }

    fn next_uid(&mut self) -> u64 {
        self.next_uid += 1;
        self.next_uid
    }

    fn create_model(&mut self, model_id: ModelId, lora: &LoraSpec) -> Result<(), String> {
        self.check_new_model(&model_id)?;
        let config = config_of(lora, &self.model)?;
        self.check_adapter_memory(Learner::full_bytes(&self.model, &config))?;
        let learner = Learner::fresh(&self.model, config, lora.seed);
        let uid = self.next_uid();
        self.tenants.insert(model_id, Tenant::new(uid, Some(learner), None));
        Ok(())
    }

    fn create_from_checkpoint(
        &mut self,
        model_id: ModelId,
        source: CheckpointSource,
        with_optimizer: bool,
        reply: PendingReply,
    ) {
        if let Err(message) = self.check_new_model(&model_id) {
            return reply.fail_user(message);
        }
        let uid = self.next_uid();
        self.disk.load(LoadJob { ticket: uid, source, with_optimizer });
        self.tenants.insert(model_id, Tenant::new(uid, None, Some(reply)));
    }

    fn check_new_model(&self, model_id: &ModelId) -> Result<(), String> {
        if self.tenants.contains_key(model_id) {
            return Err(format!("model {model_id} exists already"));
        }
        Ok(())
    }

    /// Whether `bytes` more fit the share of memory that adapters have.
    fn check_adapter_memory(&self, bytes: u64) -> Result<(), String> {
        let tenants = self.tenants.values().filter_map(|t| t.learner.as_ref());
        let tenants: u64 = tenants.map(|l| Learner::full_bytes(&self.model, &l.config)).sum();
        let samplers: BTreeMap<_, _> = self
            .samplers
            .values()
            .filter_map(|slot| match slot {
                SamplerSlot::Ready(weights) => Some((weights.id, weights.size_bytes() as u64)),
                SamplerSlot::Loading { .. } => None,
            })
            .collect();
        let used = tenants + samplers.values().sum::<u64>();
        if used + bytes > self.budget.adapter_bytes {
            return Err(format!(
                "the adapter needs {bytes} bytes, but models and samplers take {used} of the {} bytes set aside for adapters; \
                 free some, or start the server with more memory",
                self.budget.adapter_bytes
            ));
        }
        Ok(())
    }

    fn tenant_loaded(&mut self, uid: u64, result: Result<LearnerState, Failure>) {
        // Unloaded meanwhile: its requests have been answered.
        let Some(model_id) = self.tenants.iter().find(|(_, t)| t.uid == uid).map(|(id, _)| id.clone()) else { return };
        let is_new = self.tenants[&model_id].learner.is_none();
        let checked = result.and_then(|state| {
            if is_new {
                self.check_adapter_memory(Learner::full_bytes(&self.model, &state.config)).map_err(Failure::User)?;
            }
            Ok(state)
        });
        let Some(tenant) = self.tenants.get_mut(&model_id) else { return };
        let Some(reply) = tenant.loading.take() else { return };
        match (checked, &mut tenant.learner) {
            (Ok(state), learner @ None) => {
                let lora = spec_of(&state.config);
                *learner = Some(Learner::from_state(state));
                reply.send(Ok(Response::Created { lora }));
            }
            (Ok(state), Some(learner)) if state.config == learner.config => {
                *learner = Learner::from_state(state);
                reply.send(Ok(Response::Loaded));
            }
            (Ok(state), Some(learner)) => reply.fail_user(format!(
                "the checkpoint holds an adapter of another shape ({:?}) than the model's ({:?})",
                state.config, learner.config
            )),
            (Err(failure), Some(_)) => reply.send(Err(failure)),
            (Err(failure), None) => {
                reply.send(Err(failure.clone()));
                if let Some(tenant) = self.tenants.remove(&model_id) {
                    tenant.fail_all(&Failure::User(format!("model {model_id} was not made: {failure}")));
                }
            }
        }
    }

    fn create_sampler(&mut self, sampler_id: SamplerId, source: Option<CheckpointSource>, reply: PendingReply) {
        if self.samplers.contains_key(&sampler_id) {
            return reply.fail_user(format!("sampling weights {sampler_id} exist already"));
        }
        let Some(source) = source else {
            self.samplers.insert(sampler_id, SamplerSlot::Ready(Weights::base()));
            return reply.send(Ok(Response::Sampler));
        };
        let uid = self.next_uid();
        self.disk.load(LoadJob { ticket: uid, source, with_optimizer: false });
        self.samplers.insert(sampler_id, SamplerSlot::Loading { uid, reply, queued: Vec::new() });
    }

    fn sampler_loaded(&mut self, uid: u64, result: Result<LearnerState, Failure>) {
        let is_it = |slot: &SamplerSlot| matches!(slot, SamplerSlot::Loading { uid: u, .. } if *u == uid);
        let Some(sampler_id) = self.samplers.iter().find(|(_, slot)| is_it(slot)).map(|(id, _)| id.clone()) else { return };
        let Some(SamplerSlot::Loading { reply, queued, .. }) = self.samplers.remove(&sampler_id) else { return };
        let weights = result.and_then(|state| {
            let adapter = self.model.pack_adapter(state.config, &state.weights);
            let adapter = adapter.map_err(|e| Failure::Server(format!("packing the adapter: {e}")))?;
            self.check_adapter_memory(adapter.size_bytes() as u64).map_err(Failure::User)?;
            Ok(Weights { id: self.weights_ids.next(), adapter: Some(adapter) })
        });
        match weights {
            Ok(weights) => {
                self.samplers.insert(sampler_id, SamplerSlot::Ready(weights.clone()));
                reply.send(Ok(Response::Sampler));
                for (sample, reply) in queued {
                    self.sampler.submit(weights.clone(), &sample, reply);
                }
            }
            Err(failure) => {
                for (_, reply) in queued {
                    reply.send(Err(failure.clone()));
                }
                reply.send(Err(failure));
            }
        }
    }

    /// Samples that were submitted before keep their weights alive.
    fn drop_sampler(&mut self, sampler_id: &SamplerId, reply: PendingReply) {
        match self.samplers.remove(sampler_id) {
            Some(SamplerSlot::Ready(_)) => reply.send(Ok(Response::Freed)),
            Some(SamplerSlot::Loading { reply: create, queued, .. }) => {
                let failure = Failure::User(format!("sampling weights {sampler_id} were dropped before they were loaded"));
                for waiting in queued.into_iter().map(|(_, reply)| reply).chain([create]) {
                    waiting.send(Err(failure.clone()));
                }
                reply.send(Ok(Response::Freed));
            }
            None => reply.fail_user(format!("there are no sampling weights {sampler_id}")),
        }
    }

    /// Begins every operation whose turn it is.
    pub(crate) fn advance(&mut self) {
        let ready: Vec<ModelId> = self.tenants.iter().filter(|(_, t)| t.can_advance()).map(|(id, _)| id.clone()).collect();
        for model_id in ready {
            while let Some(tenant) = self.tenants.get_mut(&model_id).filter(|t| t.can_advance()) {
                let Some((op, reply)) = tenant.ops.pop() else { break };
                self.begin(&model_id, op, reply);
            }
        }
    }

    fn begin(&mut self, model_id: &ModelId, op: TrainOp, reply: PendingReply) {
        let Some(tenant) = self.tenants.get_mut(model_id) else { return };
        let learner = tenant.learner.as_mut().expect("operations begin only once the adapter is there");
        match op {
            TrainOp::ForwardBackward { data, loss, forward_only } => {
                let limits = ModelLimits {
                    vocab_size: self.model.config().vocab_size,
                    max_context_tokens: self.budget.max_context_tokens,
                };
                match datum::prepare(&data, &loss, limits) {
                    Ok(data) => tenant.running.push_back(RunningForward::new(data, !forward_only, reply)),
                    Err(message) => reply.fail_user(message),
                }
            }
            TrainOp::OptimStep(params) => reply.send(
                learner
                    .optim_step(&self.model, &params)
                    .map(|norm| Response::OptimStep { metrics: vec![("optim/grad_norm".into(), norm)] }),
            ),
            TrainOp::SaveState(target) => {
                let state = learner.full_state(&self.model);
                self.save(state, target, reply);
            }
            TrainOp::SaveSampler(target) => {
                let state = learner.adapter_state();
                self.save(state, target, reply);
            }
            TrainOp::Snapshot { sampler_id, replace } => match self.snapshot(model_id, sampler_id, replace) {
                Ok(()) => reply.send(Ok(Response::Sampler)),
                Err(failure) => reply.send(Err(failure)),
            },
            TrainOp::LoadState { source, with_optimizer } => {
                self.disk.load(LoadJob { ticket: tenant.uid, source, with_optimizer });
                tenant.loading = Some(reply);
            }
            TrainOp::Refused(reason) => reply.fail_user(reason),
        }
    }

    fn snapshot(&mut self, model_id: &ModelId, sampler_id: SamplerId, replace: bool) -> Result<(), Failure> {
        match self.samplers.get(&sampler_id) {
            Some(SamplerSlot::Ready(_)) if replace => {}
            Some(_) => return Err(Failure::User(format!("sampling weights {sampler_id} exist already"))),
            None => {}
        }
        let learner = self.tenants.get_mut(model_id).and_then(|t| t.learner.as_mut());
        let learner = learner.ok_or_else(|| Failure::User(format!("there is no model {model_id}")))?;
        let weights = learner.packed(&self.model, &mut self.weights_ids)?;
        self.check_adapter_memory(weights.size_bytes() as u64).map_err(Failure::User)?;
        // Samples that run keep the weights they began with.
        self.samplers.insert(sampler_id, SamplerSlot::Ready(weights));
        Ok(())
    }
}
