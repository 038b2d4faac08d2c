//! What the engine owns, and one turn of it.
//!
//! A turn takes what has arrived, begins the operations whose turn it is, and runs one piece of device work: a sampling step or a training
//! pass. Between the layers of a pass the same happens again: whoever is due before the pass runs a step, or a small pass of
//! their own, so that nobody waits for longer than a layer. A pass that has hardly begun when many come who would go with it is left, and runs with them.
//!
//! Nothing here knows a clock but the device's, a thread, or a file: a simulation drives it turn by turn.

#[cfg(any(test, feature = "simulation"))]
mod audit;
mod from_files;
mod passes;
mod sight;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::api::{CheckpointSource, Client, Failure, ForwardBackwardOutput, LoraSpec, ModelId, Response, SamplerId};
use crate::budget::Budget;
use crate::compute::Compute;
use crate::fair::{Fair, Standing, Work};
use crate::files::{Done, Files, Load, LoadFor, Save, SaveFor, Storage};
use crate::intake::{Control, Intake, Op, QueuedOp};
use crate::reply::PendingReply;
use crate::sampler::{Asked, Batcher, Plan, Room, Speculating};
use crate::snapshot::{LoadedFrom, WeightsId};
use crate::tenant::{RunningForward, Tenant};

/// Tokens whose arithmetic takes about as long as what every training pass costs whatever its length.
const PASS_BASE_TOKENS: usize = 32;
/// A pass that runs between the layers of another, or between the blocks that see a picture, has at most this part of its tokens, so that passes within passes end soon.
const INNER_PASS_FRACTION: usize = 4;

/// Sampling weights by name.
enum SamplerSlot<C: Compute> {
    Ready {
        weights: (WeightsId, C::Frozen),
        bytes: u64,
        loaded_from: Option<LoadedFrom>,
    },
    /// Being loaded, alone or with others that have the same ticket.
    Loading {
        ticket: u64,
        client: Client,
        loaded_from: LoadedFrom,
        reply: PendingReply,
        queued: Vec<(Plan, Asked)>,
    },
}

/// Everything the engine owns.
pub(crate) struct Core<C: Compute, S> {
    compute: C,
    state: State<C, S>,
}

struct State<C: Compute, S> {
    intake: Arc<Intake>,
    budget: Budget,
    tenants: BTreeMap<ModelId, Tenant<C>>,
    samplers: BTreeMap<SamplerId, SamplerSlot<C>>,
    batcher: Batcher<C>,
    fair: Fair,
    storage: S,
    files: Files<C::State>,
    /// Weights of samples that run and whose name stands for others since, and under what their memory is kept.
    retired: Vec<(u64, WeightsId)>,
    /// Passes that run, each between two layers of the one before.
    passes: Vec<passes::PassInWork>,
    /// Work of the pass that was left for a larger one, if none has come to its end since.
    left_work: usize,
    last_uid: u64,
    /// Counts passes, so that the models of a session take turns.
    served: u64,
    /// Panics outside of passes. What the simulation sees.
    recoveries: u64,
}

impl<C: Compute, S: Storage<C::State>> Core<C, S> {
    /// An engine over a cache of the budget's size.
    pub(crate) fn new(
        compute: C,
        cache: C::Cache,
        intake: Arc<Intake>,
        storage: S,
        budget: Budget,
        page_tokens: usize,
        speculating: Arc<Speculating>,
    ) -> Self {
        let state = State {
            intake,
            tenants: BTreeMap::new(),
            samplers: BTreeMap::new(),
            batcher: Batcher::new(&compute, cache, budget.cache, page_tokens, &budget, speculating),
            fair: Fair::default(),
            storage,
            files: Files::new(budget.captured_bytes),
            budget,
            retired: Vec::new(),
            passes: Vec::new(),
            left_work: 0,
            last_uid: 0,
            served: 0,
            recoveries: 0,
        };
        Core { compute, state }
    }

    /// Takes what has arrived and runs one piece of work. Answers whether there was any.
    ///
    /// Whatever panics on the way fails what it was working on, and the engine goes on.
    pub(crate) fn turn(&mut self) -> bool {
        let Core { compute, state } = self;
        match catch_unwind(AssertUnwindSafe(|| state.turn(compute))) {
            Ok(worked) => worked,
            Err(_) => {
                tracing::error!("the engine panicked outside of a pass; samples in work fail, models stay");
                state.recover(compute, 0);
                true
            }
        }
    }

    /// Gives memory that is not needed now back to the system.
    pub(crate) fn release_memory(&mut self) {
        self.state.batcher.release_memory(&self.compute);
    }

    /// Empties the prefix cache.
    pub(crate) fn forget_prefixes(&mut self) {
        self.state.batcher.forget_prefixes();
    }

    /// Saves that were accepted by the core and are not written yet.
    pub(crate) fn unwritten_saves(&self) -> usize {
        self.state.files.unwritten()
    }

    /// Collects what the storage has done, without beginning anything new.
    pub(crate) fn settle(&mut self) {
        let Core { compute, state } = self;
        state.collect(compute);
        state.files.dispatch(&mut state.storage);
    }
}

impl<C: Compute, S: Storage<C::State>> State<C, S> {
    fn turn(&mut self, c: &C) -> bool {
        self.take_arrivals(c);
        let Some((_, client, work)) = self.next_work(c, usize::MAX) else { return false };
        self.run(c, &client, work, usize::MAX);
        true
    }

    /// After a panic in a place that is no pass, with `depth` passes around it that go on: the sampler's books may be wrong, so it begins anew;
    /// learners that other passes had are gone.
    fn recover(&mut self, c: &C, depth: usize) {
        self.recoveries += 1;
        self.passes.truncate(depth);
        let failure = Failure::Server("the engine hit a bug while this request was in work; its log says where".into());
        let (page_tokens, speculating) = (self.batcher.page_tokens(), self.batcher.speculating());
        // The old sampler answers everything it holds as it is dropped, and gives back its memory before the new one asks for as much.
        for size in [Room::default(), self.budget.cache] {
            // A device that has no memory for what it had at the start has nothing to go on with: the engine ends.
            let cache = c.new_cache(size).unwrap_or_else(|error| panic!("no sampler can be made: {error}"));
            self.batcher = Batcher::new(c, cache, size, page_tokens, &self.budget, speculating.clone());
        }
        self.note_seeing();
        let lost = |(_, t): &(&ModelId, &Tenant<C>)| t.in_pass && !self.passes.iter().any(|pass| pass.uids.contains(&t.uid));
        let lost: Vec<ModelId> = self.tenants.iter().filter(lost).map(|(id, _)| id.clone()).collect();
        for model_id in lost {
            self.intake.remove_model(&model_id, &failure);
        }
    }

    /// Takes requests and files that have arrived, and begins the operations whose turn it is.
    fn take_arrivals(&mut self, c: &C) {
        self.retired.retain(|&(key, weights)| {
            let used = self.batcher.uses(weights);
            if !used {
                self.intake.release(key);
            }
            used
        });
        while let Some(control) = self.intake.next_control() {
            self.control(c, control);
        }
        self.collect(c);
        for model_id in self.intake.ready_models() {
            self.begin_ops(c, &model_id);
        }
        self.files.dispatch(&mut self.storage);
    }

    fn collect(&mut self, c: &C) {
        while let Some(done) = self.storage.poll() {
            match done {
                Done::Saved { ticket, result } => self.saved(ticket, result),
                Done::Loaded { ticket, result } => self.loaded(c, ticket, result),
                Done::Made { ticket, result } => self.made(c, ticket, result),
            }
        }
    }

    // What runs next.

    /// Who is next and with what, of those that have something to run; training only if its next example has at most `pass_tokens`.
    fn next_work(&mut self, c: &C, pass_tokens: usize) -> Option<(Standing, Client, Work)> {
        let sampling = self.batcher.runnable(c).into_iter().map(|client| (client, Work::Sampling));
        let ready = self.tenants.values().filter(|t| t.due || self.has_example(t, pass_tokens));
        let mut training: Vec<(Client, Work)> = ready.map(|t| (t.client.clone(), Work::Training)).collect();
        training.dedup();
        let all = sampling.chain(training).map(|(client, work)| (self.fair.standing(&client, work), client, work));
        let waiting_to_see = self.first_waiting_to_see();
        all.filter(|(standing, client, _)| !self.gives_way(*standing, client, waiting_to_see)).min()
    }

    fn run(&mut self, c: &C, client: &Client, work: Work, pass_tokens: usize) {
        self.fair.serve(client, work);
        match work {
            Work::Training => self.train(c, client, pass_tokens),
            Work::Sampling if self.see_for_samples(c, client) => {}
            Work::Sampling => {
                let mut order = self.batcher.runnable(c);
                order.sort_by_key(|other| (other != client, self.fair.standing(other, Work::Sampling)));
                let start = c.now();
                let done = self.batcher.step(c, &order);
                self.charge(&done.tokens, Work::Sampling, c.now().saturating_sub(start));
            }
        }
    }

    /// Charges those who took part for their share of the time.
    fn charge(&mut self, clients: &[(Client, usize)], work: Work, time: Duration) {
        let total: usize = clients.iter().map(|(_, tokens)| tokens).sum();
        for (client, tokens) in clients.iter().filter(|(_, tokens)| *tokens > 0) {
            self.fair.charge(client, work, time.mul_f64(*tokens as f64 / total as f64));
        }
    }

    // Requests.

    fn next_uid(&mut self) -> u64 {
        self.last_uid += 1;
        self.last_uid
    }

    fn control(&mut self, c: &C, control: Control) {
        match control {
            Control::Create { model_id, client, lora, reply } => {
                // Its name may have been given up before the engine came to it.
                if !self.intake.has_model(&model_id) {
                    return reply.fail_user(format!("model {model_id} was unloaded before it was made"));
                }
                // Drawing its weights takes a while: not on this thread. What it takes of memory stays taken until it is done, also if its model is gone by then.
                let (uid, ticket) = (self.next_uid(), self.next_uid());
                let mut tenant = Tenant::new(uid, client.clone(), None, lora.clone());
                tenant.making = Some((ticket, reply));
                self.intake.keep(ticket, &model_id, c.adapter_bytes(&lora).map_or(0, |bytes| bytes.captured));
                self.tenants.insert(model_id, tenant);
                self.files.make(&client, ticket, lora, uid);
            }
            Control::CreateFrom { model_id, client, source, lora, with_optimizer, reply } => {
                if !self.intake.has_model(&model_id) {
                    return reply.fail_user(format!("model {model_id} was unloaded before it was made"));
                }
                let (uid, ticket) = (self.next_uid(), self.next_uid());
                let mut tenant = Tenant::new(uid, client.clone(), None, lora);
                let bytes_max = c.adapter_bytes(&tenant.lora).map_or(0, |bytes| bytes.read(with_optimizer));
                // A part of what its model has, and taken until it is read, also if the model is gone by then.
                self.intake.keep(ticket, &model_id, bytes_max);
                tenant.loading = Some((ticket, reply));
                self.tenants.insert(model_id, tenant);
                let load = Load { ticket, source, with_optimizer, replaces: None, bytes_max, beside_bytes: 0 };
                self.files.load(&client, load, LoadFor::Tenant { uid });
            }
            Control::Unload { model_id, failure } => self.unload(&model_id, &failure),
            Control::CreateSampler { sampler_id, client, source, reply } => {
                self.create_sampler(c, sampler_id, client, source, reply);
            }
            Control::DropSampler { sampler_id, failure } => self.drop_sampler(c, &sampler_id, &failure),
            Control::Sample { plan, asked } => self.sample(plan, asked),
            Control::Cancel { request_id } => {
                let failure = cancelled();
                if !self.batcher.cancel(&request_id, &failure) {
                    self.cancel_queued_sample(&request_id, &failure);
                    self.tenants.values_mut().for_each(|tenant| tenant.cancel(c, &request_id, &failure));
                }
            }
            Control::Drain { keep, failure } => {
                self.batcher.cancel_where(|_| true, &failure);
                for (_, tenant) in self.tenants.iter_mut().filter(|(id, _)| !keep.contains(*id)) {
                    tenant.running.drain(..).for_each(|forward| forward.fail(failure.clone()));
                    if let Some((ticket, reply)) = tenant.making.take() {
                        if self.files.abandon_make(ticket) {
                            self.intake.release(ticket);
                        }
                        reply.send(Err(failure.clone()));
                    }
                }
            }
            Control::EndSession { client } => {
                let failure = Failure::User("the session is over".into());
                self.batcher.cancel_where(|asked| asked.client == client, &failure);
                for slot in self.samplers.values_mut() {
                    let SamplerSlot::Loading { queued, .. } = slot else { continue };
                    let over = queued.extract_if(.., |(_, asked)| asked.client == client);
                    over.for_each(|(_, asked)| asked.reply.send(Err(failure.clone())));
                }
                // Passes that run charge their clients: whoever is over must not come back that way.
                self.passes.iter_mut().for_each(|pass| pass.clients.retain(|(other, _)| *other != client));
                self.fair.forget(&client);
                self.files.forget(&client);
            }
        }
    }

    fn unload(&mut self, model_id: &str, failure: &Failure) {
        let Some(tenant) = self.tenants.remove(model_id) else { return };
        if let Some((ticket, _)) = &tenant.loading
            && self.files.abandon_load(*ticket)
        {
            self.intake.release(*ticket);
        }
        if let Some((ticket, _)) = &tenant.making
            && self.files.abandon_make(*ticket)
        {
            self.intake.release(*ticket);
        }
        tenant.fail_all(failure);
    }

    fn create_sampler(
        &mut self,
        c: &C,
        sampler_id: SamplerId,
        client: Client,
        source: Option<(CheckpointSource, LoraSpec)>,
        reply: PendingReply,
    ) {
        if !self.intake.wants_sampler(&sampler_id) {
            return reply.fail_user(format!("sampling weights {sampler_id} were dropped before they were made"));
        }
        let Some((source, lora)) = source else {
            self.samplers
                .insert(sampler_id, SamplerSlot::Ready { weights: (WeightsId::BASE, c.base()), bytes: 0, loaded_from: None });
            return reply.send(Ok(Response::Sampler));
        };
        let loaded_from = LoadedFrom { owner: client.owner.clone(), source, lora };
        // Who samples from the same weights shares what was computed of prompts, and steps read them once.
        let same = |other: &LoadedFrom| other.is_same(&loaded_from);
        let found = self.samplers.values().find_map(|slot| match slot {
            SamplerSlot::Ready { weights, bytes, loaded_from: Some(other) } if same(other) => {
                Some(Ok((weights.clone(), *bytes)))
            }
            SamplerSlot::Loading { ticket, loaded_from: other, .. } if same(other) => Some(Err(*ticket)),
            _ => None,
        });
        let ticket = match found {
            Some(Ok((weights, bytes))) => {
                self.samplers.insert(sampler_id, SamplerSlot::Ready { weights, bytes, loaded_from: Some(loaded_from) });
                return reply.send(Ok(Response::Sampler));
            }
            Some(Err(ticket)) => ticket,
            None => self.load_sampler(c, &client, &loaded_from),
        };
        self.samplers.insert(sampler_id, SamplerSlot::Loading { ticket, client, loaded_from, reply, queued: Vec::new() });
    }

    /// Has sampling weights loaded; the ticket of the load.
    fn load_sampler(&mut self, c: &C, client: &Client, from: &LoadedFrom) -> u64 {
        let ticket = self.next_uid();
        // What is kept of it is set aside already, in another form.
        let bytes = c.adapter_bytes(&from.lora).map_or(0, |bytes| bytes.read(false));
        let source = from.source.clone();
        let load = Load { ticket, source, with_optimizer: false, replaces: None, bytes_max: bytes, beside_bytes: bytes };
        self.files.load(client, load, LoadFor::Sampler { lora: from.lora.clone() });
        ticket
    }

    fn drop_sampler(&mut self, c: &C, sampler_id: &str, failure: &Failure) {
        match self.samplers.remove(sampler_id) {
            Some(SamplerSlot::Ready { .. }) => {
                self.batcher.cancel_where(|asked| asked.sampler_id == sampler_id, failure);
            }
            Some(SamplerSlot::Loading { ticket, loaded_from, reply, queued, .. }) => {
                queued.into_iter().for_each(|(_, asked)| asked.reply.send(Err(failure.clone())));
                reply.send(Err(failure.clone()));
                self.leave_load(c, ticket, &loaded_from);
            }
            None => {}
        }
    }

    /// Gives up a load that nobody waits for any more of the client in whose turn it is read. For others it begins again.
    fn leave_load(&mut self, c: &C, ticket: u64, from: &LoadedFrom) {
        let others = self.samplers.values().filter_map(|slot| match slot {
            SamplerSlot::Loading { ticket: other, client, .. } if *other == ticket => Some(client.clone()),
            _ => None,
        });
        let others: Vec<Client> = others.collect();
        if others.iter().any(|client| self.files.reader(ticket) == Some(client)) {
            return;
        }
        self.files.abandon_load(ticket);
        let Some(next) = others.first() else { return };
        let begun = self.load_sampler(c, next, from);
        for slot in self.samplers.values_mut() {
            if let SamplerSlot::Loading { ticket: other, .. } = slot
                && *other == ticket
            {
                *other = begun;
            }
        }
    }

    fn sample(&mut self, plan: Plan, asked: Asked) {
        match self.samplers.get_mut(&asked.sampler_id) {
            Some(SamplerSlot::Ready { weights, .. }) => self.batcher.submit(plan, weights.clone(), asked),
            Some(SamplerSlot::Loading { queued, .. }) => queued.push((plan, asked)),
            None => {
                let message = format!("there are no sampling weights {}", asked.sampler_id);
                asked.reply.fail_user(message);
            }
        }
    }

    fn cancel_queued_sample(&mut self, request_id: &str, failure: &Failure) {
        for slot in self.samplers.values_mut() {
            let SamplerSlot::Loading { queued, .. } = slot else { continue };
            if let Some(i) = queued.iter().position(|(_, asked)| *asked.id == *request_id) {
                return queued.remove(i).1.reply.send(Err(failure.clone()));
            }
        }
    }

    // Operations of a model.

    /// Begins the operations of a model whose turn it is, up to one that takes time on the device.
    fn begin_ops(&mut self, c: &C, model_id: &str) {
        while self.begin_op(c, model_id, false) {}
    }

    /// Begins an operation of a model that takes time on the device, and those that follow.
    fn take_turn(&mut self, c: &C, model_id: &str) {
        self.served += 1;
        let Some(tenant) = self.tenants.get_mut(model_id) else { return };
        tenant.served = self.served;
        self.begin_op(c, model_id, true);
        self.begin_ops(c, model_id);
    }

    /// Begins the next operation of a model if it can. Answers whether it did.
    fn begin_op(&mut self, c: &C, model_id: &str, has_turn: bool) -> bool {
        let (ahead_max, ticket) = (self.budget.pass_tokens, self.next_uid());
        let Some(tenant) = self.tenants.get_mut(model_id) else { return false };
        tenant.due = false;
        let replaced = |sampler_id: &str| match self.samplers.get(sampler_id) {
            Some(SamplerSlot::Ready { weights, bytes, .. }) if self.batcher.uses(weights.0) => Some((weights.0, *bytes)),
            _ => None,
        };
        let (mut retired, mut has_room) = (None, true);
        let queued = self.intake.begin_op(model_id, ticket, |op, room| {
            if !tenant.may_begin(op, ahead_max) {
                return None;
            }
            if let Op::Snapshot { sampler_id, replace: true, .. } = op {
                retired = replaced(sampler_id).map(|(weights, bytes)| (sampler_id.clone(), weights, bytes));
            }
            let bytes = retired.as_ref().map_or(0, |(_, _, bytes)| *bytes);
            has_room = bytes <= room;
            tenant.due = op.takes_a_turn() && !has_turn;
            (!tenant.due).then_some(if has_room { bytes } else { 0 })
        });
        let Some(mut queued) = queued else { return false };
        if let Op::Snapshot { sampler_id, entry, .. } = &queued.op
            && !has_room
        {
            // To wait for the samples would be to wait for all that come meanwhile.
            let reason = format!(
                "samples still run with the weights of {sampler_id} that this would replace, and there is no room for both among the bytes \
                 set aside for adapters; wait for those samples, or free some"
            );
            self.intake.snapshot_over(sampler_id, *entry, false);
            queued.op = Op::Refused(Failure::User(reason));
        }
        self.begin(c, model_id, queued);
        if let Some((sampler_id, weights, _)) = retired.filter(|_| has_room) {
            match self.samplers.get(&sampler_id) {
                Some(SamplerSlot::Ready { weights: now, .. }) if now.0 == weights => self.intake.release(ticket),
                _ => self.retired.push((ticket, weights)),
            }
        }
        true
    }

    fn begin(&mut self, c: &C, model_id: &str, queued: QueuedOp) {
        let ticket = self.next_uid();
        let QueuedOp { id, op, reply } = queued;
        let Some(tenant) = self.tenants.get_mut(model_id) else { return };
        let Some(learner) = tenant.learner.as_mut() else {
            // Passes alone begin while a pass has the learner.
            match op {
                Op::Forward { data, backward } => tenant.running.push_back(RunningForward::new(id, data, backward, reply)),
                Op::Refused(failure) => reply.send(Err(failure)),
                _ => reply.send(Err(Failure::Server("the operation began while a pass had the adapter".into()))),
            }
            return;
        };
        let start = c.now();
        match op {
            Op::Forward { data, backward } => tenant.running.push_back(RunningForward::new(id, data, backward, reply)),
            Op::Refused(failure) => reply.send(Err(failure)),
            Op::Optim(params) => {
                let done = catch_unwind(AssertUnwindSafe(|| c.optim_step(learner, &params)));
                let norm = done.unwrap_or_else(|_| {
                    c.lose_gradient(learner, Failure::Server("the optimizer panicked".into()));
                    Err(Failure::Server("the optimizer step panicked; the server log says where".into()))
                });
                let client = tenant.client.clone();
                self.fair.charge(&client, Work::Training, c.now().saturating_sub(start));
                reply.send(norm.map(|norm| Response::OptimStep { metrics: vec![("optim/grad_norm".into(), norm)] }));
            }
            Op::Save { mut target, with_optimizer } => {
                let state = match c.capture(learner, with_optimizer) {
                    Ok(state) => state,
                    Err(failure) => return reply.send(Err(failure)),
                };
                let lora = LoraSpec { seed: tenant.lora.seed, ..c.spec_of(&state) };
                if let Some(recorded) = target.metadata.get_mut("lora") {
                    *recorded = serde_json::json!(lora);
                }
                let bytes = c.state_bytes(&state).captured;
                let captured = self.files.try_capture(bytes);
                if !captured {
                    // No room for a copy: the model goes on once its state is written.
                    tenant.saving = Some(ticket);
                    self.intake.keep(ticket, model_id, bytes);
                }
                let captured_bytes = if captured { bytes } else { 0 };
                let save_for = SaveFor { dir: target.dir.clone(), lora, reply, captured_bytes };
                let client = tenant.client.clone();
                self.files.save(&client, Save { ticket, state, target, bytes }, save_for);
                self.files.dispatch(&mut self.storage);
            }
            Op::Snapshot { sampler_id, replace, entry } => {
                let client = tenant.client.clone();
                let made = match self.intake.wants_snapshot(&sampler_id, entry) {
                    true => self.snapshot(c, model_id, &sampler_id, replace),
                    false => Err(Failure::User(format!("sampling weights {sampler_id} were dropped before they were made"))),
                };
                self.intake.snapshot_over(&sampler_id, entry, made.is_ok());
                self.fair.charge(&client, Work::Training, c.now().saturating_sub(start));
                reply.send(made.map(|()| Response::Sampler));
            }
            Op::Load { source, with_optimizer } => {
                tenant.loading = Some((ticket, reply));
                let (client, uid) = (tenant.client.clone(), tenant.uid);
                // What it has stays until it has the other.
                let replaces = Some(tenant.made_with.clone());
                let bytes = c.adapter_bytes(&tenant.made_with).map_or(0, |bytes| bytes.read(with_optimizer));
                let load = Load { ticket, source, with_optimizer, replaces, bytes_max: bytes, beside_bytes: bytes };
                self.files.load(&client, load, LoadFor::Tenant { uid });
                self.files.dispatch(&mut self.storage);
            }
        }
    }

    fn snapshot(&mut self, c: &C, model_id: &str, sampler_id: &str, replace: bool) -> Result<(), Failure> {
        if !replace && self.samplers.contains_key(sampler_id) {
            return Err(Failure::User(format!("sampling weights {sampler_id} exist already")));
        }
        let tenant = self.tenants.get_mut(model_id);
        let Some(tenant) = tenant else { return Err(Failure::User(format!("there is no model {model_id}"))) };
        let learner = tenant.learner.as_mut().ok_or_else(|| Failure::User(format!("model {model_id} is not there yet")))?;
        // Samples that run keep the weights they began with.
        let weights = c.freeze(learner)?;
        let bytes = c.adapter_bytes(&tenant.lora).map_or(0, |bytes| bytes.frozen);
        self.samplers.insert(sampler_id.to_owned(), SamplerSlot::Ready { weights, bytes, loaded_from: None });
        Ok(())
    }
}

fn cancelled() -> Failure {
    Failure::User("the request was cancelled".into())
}

/// The answer of a `forward_backward`.
pub(crate) fn forward_backward_response(data: Vec<crate::api::DatumOutput>, loss_sum: f64) -> Response {
    Response::ForwardBackward(ForwardBackwardOutput { data, metrics: vec![("loss:sum".to_string(), loss_sum)] })
}
