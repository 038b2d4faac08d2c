//! The one keeper of order: what the server has accepted and what the engine runs next.
//!
//! Server threads put requests in, the engine thread takes them out. Operations of a model wait under their ids; one notion of "next", the
//! first id that has not begun, says both what the engine runs and what a full queue still takes. Everything that waits is paid for from the
//! [`Ledger`]. A full account refuses all but one kind of request: the operation that is next while others behind it wait for it, because refusing it
//! would block them for good; it is paid for from a reserve.
//!
//! Room for adapters is decided here too, when a request is accepted, in the order of acceptance: whether there is room does not depend on how
//! far the engine has got. The last of it is for those who have nothing yet: a session without adapters, and then an owner without any.

#[cfg(any(test, feature = "simulation"))]
mod audit;
mod room;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::api::{AdamParams, CheckpointSource, Client, Failure, LoraSpec, ModelId, Refusal, RequestId, SamplerId, SaveTarget};
use crate::compute::AdapterBytes;
use crate::datum::PreparedDatum;
use crate::ledger::{Charge, Ledger, Shortage};
use crate::limits::SEQUENCE_AHEAD_MAX;
use crate::reply::PendingReply;
use crate::sampler::{Asked, Plan};
use crate::snapshot::LoadedFrom;

use room::AdapterRoom;

/// An operation that has been checked.
pub(crate) enum Op {
    Forward {
        data: Vec<PreparedDatum>,
        backward: bool,
    },
    Optim(AdamParams),
    Save {
        target: SaveTarget,
        with_optimizer: bool,
    },
    /// `entry` is what the name stood for when the operation was accepted.
    Snapshot {
        sampler_id: SamplerId,
        replace: bool,
        entry: u64,
    },
    Load {
        source: CheckpointSource,
        with_optimizer: bool,
    },
    Refused(Failure),
}

impl Op {
    /// Whether it takes time on the device, and so waits for its session's turn.
    pub(crate) fn takes_a_turn(&self) -> bool {
        matches!(self, Op::Optim(_) | Op::Snapshot { .. })
    }

    /// Whether it may begin while passes of the model still run.
    pub(crate) fn is_pass(&self) -> bool {
        matches!(self, Op::Forward { .. } | Op::Refused(_))
    }
}

/// An operation that waits for its turn.
pub(crate) struct QueuedOp {
    pub(crate) id: RequestId,
    pub(crate) op: Op,
    pub(crate) reply: PendingReply,
}

/// What is not an operation of a model; taken in the order of arrival.
pub(crate) enum Control {
    Create {
        model_id: ModelId,
        client: Client,
        lora: LoraSpec,
        reply: PendingReply,
    },
    CreateFrom {
        model_id: ModelId,
        client: Client,
        source: CheckpointSource,
        lora: LoraSpec,
        with_optimizer: bool,
        reply: PendingReply,
    },
    Unload {
        model_id: ModelId,
        failure: Failure,
    },
    CreateSampler {
        sampler_id: SamplerId,
        client: Client,
        source: Option<(CheckpointSource, LoraSpec)>,
        reply: PendingReply,
    },
    DropSampler {
        sampler_id: SamplerId,
        failure: Failure,
    },
    Sample {
        plan: Plan,
        asked: Asked,
    },
    Cancel {
        request_id: RequestId,
    },
    EndSession {
        client: Client,
    },
    /// Nothing but these models' operations is wanted any more.
    Drain {
        keep: HashSet<ModelId>,
        failure: Failure,
    },
}

/// What a model has in the keeper.
struct ModelQueue {
    client: Client,
    bytes: AdapterBytes,
    /// The first id that has not begun.
    next: u64,
    waiting: BTreeMap<u64, QueuedOp>,
}

/// A name for sampling weights, and the room they take.
struct SamplerEntry {
    /// Distinguishes it from an earlier one of the same name.
    uid: u64,
    client: Client,
    bytes: u64,
    /// What they were loaded from. Of all names for the same weights, one has the bytes.
    from: Option<LoadedFrom>,
    /// Whether there is something behind it, or a request of its own that will tell.
    made: bool,
    /// Snapshots that have not begun and are to make it. Without any, and not made, the name is given up.
    pending: usize,
}

#[derive(Default)]
struct Inner {
    closed: bool,
    /// Something has happened since the engine last looked.
    stirred: bool,
    controls: VecDeque<Control>,
    models: BTreeMap<ModelId, ModelQueue>,
    /// Models whose next operation has arrived.
    ready: BTreeSet<ModelId>,
    /// Where an operation waits.
    waiting: HashMap<RequestId, (ModelId, u64)>,
    samplers: BTreeMap<SamplerId, SamplerEntry>,
    last_uid: u64,
    /// Memory of adapters that outlives their names, or may.
    kept: BTreeMap<u64, Kept>,
    adapter_bytes_used: u64,
}

/// Memory of an adapter that something still needs.
struct Kept {
    bytes: u64,
    /// The model in whose room it still is.
    within: Option<ModelId>,
}

/// The keeper.
pub(crate) struct Intake {
    inner: Mutex<Inner>,
    wake: Condvar,
    ledger: Ledger,
    adapter_bytes_max: u64,
}

impl Intake {
    pub(crate) fn new(ledger: Ledger, adapter_bytes_max: u64) -> Self {
        Intake { inner: Mutex::default(), wake: Condvar::new(), ledger, adapter_bytes_max }
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn open(&self) -> Result<MutexGuard<'_, Inner>, Refusal> {
        let inner = self.lock();
        if inner.closed { Err(Refusal::Stopped) } else { Ok(inner) }
    }

    fn stir(&self, mut inner: MutexGuard<'_, Inner>) {
        inner.stirred = true;
        drop(inner);
        self.wake.notify_one();
    }

    // The server's side.

    /// Pays for a request.
    pub(crate) fn charge(&self, client: &Client, bytes: u64) -> Result<Charge, Refusal> {
        self.ledger.charge(client, bytes).map_err(refusal)
    }

    /// Accepts something that is not an operation of a model.
    pub(crate) fn accept(&self, control: Control) -> Result<(), Box<(Refusal, Control)>> {
        let mut inner = match self.open() {
            Ok(inner) => inner,
            Err(refusal) => return Err(Box::new((refusal, control))),
        };
        inner.controls.push_back(control);
        self.stir(inner);
        Ok(())
    }

    /// Accepts a model with room for its adapter.
    ///
    /// # Errors
    /// If it exists or there is no room.
    pub(crate) fn add_model(&self, model_id: &ModelId, client: &Client, bytes: AdapterBytes) -> Result<(), Refusal> {
        let mut inner = self.lock();
        if inner.models.contains_key(model_id) {
            return Err(Refusal::User(format!("model {model_id} exists already")));
        }
        self.take_adapter_room(&mut inner, client, bytes.training)?;
        let queue = ModelQueue { client: client.clone(), bytes, next: 1, waiting: BTreeMap::new() };
        inner.models.insert(model_id.clone(), queue);
        Ok(())
    }

    /// Accepts sampling weights with room for `bytes`, or in the room of others that are loaded `from` the same.
    ///
    /// # Errors
    /// If they exist or there is no room.
    pub(crate) fn add_sampler(
        &self,
        sampler_id: &SamplerId,
        client: &Client,
        bytes: u64,
        from: Option<LoadedFrom>,
    ) -> Result<(), Refusal> {
        let mut inner = self.lock();
        if inner.samplers.contains_key(sampler_id) {
            return Err(Refusal::User(format!("sampling weights {sampler_id} exist already")));
        }
        let is_there = from.as_ref().is_some_and(|from| inner.others_from(from).next().is_some());
        let bytes = if is_there { 0 } else { bytes };
        self.take_adapter_room(&mut inner, client, bytes)?;
        inner.last_uid += 1;
        let entry = SamplerEntry { uid: inner.last_uid, client: client.clone(), bytes, from, made: true, pending: 0 };
        inner.samplers.insert(sampler_id.clone(), entry);
        Ok(())
    }

    /// Bytes for adapters that are missing for what a client wants to have.
    pub(crate) fn shortage(&self, client: &Client, bytes: u64) -> u64 {
        if bytes > 0 { self.lock().adapter_room(client, self.adapter_bytes_max).shortage(bytes) } else { 0 }
    }

    /// The same for a snapshot of a model.
    pub(crate) fn snapshot_shortage(&self, model_id: &str) -> u64 {
        let inner = self.lock();
        let Some(queue) = inner.models.get(model_id) else { return 0 };
        inner.adapter_room(&queue.client, self.adapter_bytes_max).shortage(queue.bytes.frozen)
    }

    /// Bytes of sampling weights, if they are there and no snapshot of their name is still to come.
    pub(crate) fn sampler_bytes(&self, sampler_id: &str) -> Option<u64> {
        let inner = self.lock();
        inner.samplers.get(sampler_id).filter(|entry| entry.made && entry.pending == 0).map(|entry| entry.bytes)
    }

    fn take_adapter_room(&self, inner: &mut Inner, client: &Client, bytes: u64) -> Result<(), Refusal> {
        if bytes > 0 {
            inner.adapter_room(client, self.adapter_bytes_max).check("the adapter", bytes)?;
            inner.adapter_bytes_used += bytes;
        }
        Ok(())
    }

    /// Whether an operation could be accepted in this place.
    pub(crate) fn check_place(&self, model_id: &str, seq_id: u64) -> Result<Client, Refusal> {
        let inner = self.open()?;
        let Some(queue) = inner.models.get(model_id) else {
            return Err(Refusal::User(format!("there is no model {model_id}")));
        };
        queue.check_place(model_id, seq_id).map(|()| queue.client.clone())
    }

    /// Accepts an operation of a model in its place.
    pub(crate) fn accept_op(&self, model_id: &str, seq_id: u64, bytes: u64, mut queued: QueuedOp) -> Result<(), Refusal> {
        let client = match self.check_place(model_id, seq_id) {
            Ok(client) => client,
            Err(refusal) => {
                queued.reply.withdraw();
                return Err(refusal);
            }
        };
        // The ledger may ask others to give something up: not with the lock held.
        let ordinary = self.ledger.charge(&client, bytes);
        let mut inner = match self.open() {
            Ok(inner) => inner,
            Err(refusal) => {
                queued.reply.withdraw();
                return Err(refusal);
            }
        };
        let room = matches!(queued.op, Op::Snapshot { .. }).then(|| inner.adapter_room(&client, self.adapter_bytes_max));
        let Inner { models, ready, waiting, samplers, adapter_bytes_used, last_uid, .. } = &mut *inner;
        let Some(queue) = models.get_mut(model_id) else {
            queued.reply.withdraw();
            return Err(Refusal::User(format!("there is no model {model_id}")));
        };
        let charge = queue.check_place(model_id, seq_id).and_then(|()| match ordinary {
            Ok(charge) => Ok(charge),
            Err(Shortage::Now { .. }) if seq_id == queue.next && !queue.waiting.is_empty() => {
                self.ledger.charge_reserve(&client, bytes).map_err(refusal)
            }
            Err(shortage) => Err(refusal(shortage)),
        });
        let charge = match charge {
            Ok(charge) => charge,
            Err(refusal) => {
                queued.reply.withdraw();
                return Err(refusal);
            }
        };
        if let (Op::Snapshot { sampler_id, replace, entry }, Some(room)) = (&mut queued.op, room) {
            let there = samplers.get_mut(sampler_id);
            let more = queue.bytes.frozen.saturating_sub(there.as_ref().map_or(0, |there| there.bytes));
            let refused = match (there, room.check("a snapshot", more)) {
                (Some(_), _) if !*replace => Some(format!("sampling weights {sampler_id} exist already")),
                // Others may sample from the same.
                (Some(there), _) if there.from.is_some() => {
                    Some(format!("sampling weights {sampler_id} were loaded, and no snapshot takes their place"))
                }
                // It is not sent again: what follows it would have to wait for others to give something up.
                (_, Err(refusal)) if more > 0 => Some(refusal.to_string()),
                (Some(there), _) => {
                    *adapter_bytes_used += more;
                    there.bytes += more;
                    there.pending += 1;
                    *entry = there.uid;
                    None
                }
                (None, _) => {
                    *last_uid += 1;
                    *entry = *last_uid;
                    *adapter_bytes_used += more;
                    let client = queue.client.clone();
                    let made = SamplerEntry { uid: *entry, client, bytes: more, from: None, made: false, pending: 1 };
                    samplers.insert(sampler_id.clone(), made);
                    None
                }
            };
            if let Some(reason) = refused {
                queued.op = Op::Refused(Failure::User(reason));
            }
        }
        queued.reply = queued.reply.paid_by(charge);
        waiting.insert(queued.id.clone(), (model_id.to_owned(), seq_id));
        queue.waiting.insert(seq_id, queued);
        if seq_id == queue.next {
            ready.insert(model_id.to_owned());
        }
        self.stir(inner);
        Ok(())
    }

    /// Forgets a model: what waits fails at once, what runs when the engine gets to it. Answers whether there was one.
    pub(crate) fn remove_model(&self, model_id: &str, failure: &Failure) -> bool {
        let mut inner = self.lock();
        let Some(queue) = inner.remove_model(model_id) else { return false };
        inner.controls.push_back(Control::Unload { model_id: model_id.to_owned(), failure: failure.clone() });
        self.stir(inner);
        queue.fail_all(failure);
        true
    }

    /// Forgets sampling weights. Answers whether there were any.
    pub(crate) fn remove_sampler(&self, sampler_id: &str, failure: &Failure) -> bool {
        let mut inner = self.lock();
        if !inner.remove_sampler(sampler_id) {
            return false;
        }
        inner.controls.push_back(Control::DropSampler { sampler_id: sampler_id.to_owned(), failure: failure.clone() });
        self.stir(inner);
        true
    }

    /// Forgets everything of a session.
    pub(crate) fn end_session(&self, client: &Client, failure: &Failure) {
        let mut inner = self.lock();
        let models: Vec<ModelId> = inner.models.iter().filter(|(_, q)| q.client == *client).map(|(id, _)| id.clone()).collect();
        let queues: Vec<ModelQueue> = models.iter().filter_map(|id| inner.remove_model(id)).collect();
        for model_id in models {
            inner.controls.push_back(Control::Unload { model_id, failure: failure.clone() });
        }
        let samplers: Vec<SamplerId> =
            inner.samplers.iter().filter(|(_, s)| s.client == *client).map(|(id, _)| id.clone()).collect();
        for sampler_id in samplers {
            inner.remove_sampler(&sampler_id);
            inner.controls.push_back(Control::DropSampler { sampler_id, failure: failure.clone() });
        }
        inner.controls.push_back(Control::EndSession { client: client.clone() });
        self.stir(inner);
        queues.into_iter().for_each(|queue| queue.fail_all(failure));
    }

    /// Stops the work on a request. One that waits in the order of a model keeps its place and does nothing there.
    pub(crate) fn cancel(&self, request_id: &RequestId, failure: &Failure) {
        let mut inner = self.lock();
        let place = inner.waiting.get(request_id).cloned();
        let mut over = None;
        if let Some((model_id, seq_id)) = place
            && let Some(queued) = inner.models.get_mut(&model_id).and_then(|q| q.waiting.get_mut(&seq_id))
        {
            let op = std::mem::replace(&mut queued.op, Op::Refused(failure.clone()));
            inner.give_up_snapshot(&op);
            over = Some(op);
        } else {
            inner.controls.push_back(Control::Cancel { request_id: request_id.clone() });
        }
        self.stir(inner);
        drop(over);
    }

    /// Fails every operation that no save waits for: those behind the last save of their model, and those behind an operation that never came.
    pub(crate) fn drain(&self, failure: &Failure) {
        let mut inner = self.lock();
        let Inner { models, waiting, ready, .. } = &mut *inner;
        let (mut failed, mut keep) = (Vec::new(), HashSet::new());
        for (model_id, queue) in models {
            let in_order = (queue.next..).map_while(|seq| queue.waiting.get(&seq).map(|queued| (seq, &queued.op)));
            let last_save = in_order.filter(|(_, op)| matches!(op, Op::Save { .. })).last().map(|(seq, _)| seq);
            let given_up = queue.waiting.split_off(&last_save.map_or(0, |seq| seq + 1));
            given_up.values().for_each(|queued| drop(waiting.remove(&queued.id)));
            failed.extend(given_up.into_values().map(|queued| queued.reply));
            match last_save {
                Some(_) => drop(keep.insert(model_id.clone())),
                None => drop(ready.remove(model_id)),
            }
        }
        inner.controls.push_back(Control::Drain { keep, failure: failure.clone() });
        self.stir(inner);
        failed.into_iter().for_each(|reply| reply.send(Err(failure.clone())));
    }

    /// Takes no more requests, and wakes the engine to end.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        self.stir(inner);
    }

    /// Fails all that waits: the engine is gone.
    pub(crate) fn fail_all(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        let (controls, models) = (std::mem::take(&mut inner.controls), std::mem::take(&mut inner.models));
        drop(inner);
        // Dropped here, with no lock held, each is answered.
        drop((controls, models));
    }

    // The engine's side.

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Wakes the engine, for something that reaches it on another way.
    pub(crate) fn nudge(&self) {
        self.stir(self.lock());
    }

    /// Waits until something happens, or for `timeout`. Answers whether something has.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let is_quiet = |inner: &mut Inner| !inner.stirred && !inner.closed;
        let waited = self.wake.wait_timeout_while(self.lock(), timeout, is_quiet);
        let (mut inner, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::take(&mut inner.stirred)
    }

    /// The next request that is not an operation of a model.
    pub(crate) fn next_control(&self) -> Option<Control> {
        self.lock().controls.pop_front()
    }

    /// Models whose next operation has arrived.
    pub(crate) fn ready_models(&self) -> Vec<ModelId> {
        self.lock().ready.iter().cloned().collect()
    }

    /// Begins the next operation of a model, if it has arrived and `may_begin` lets it. That is told how many bytes of adapters have room, and
    /// answers how many outlive their name by the operation: those are kept under `key`.
    pub(crate) fn begin_op(
        &self,
        model_id: &str,
        key: u64,
        may_begin: impl FnOnce(&Op, u64) -> Option<u64>,
    ) -> Option<QueuedOp> {
        let mut inner = self.lock();
        let Inner { models, ready, waiting, kept, adapter_bytes_used, .. } = &mut *inner;
        let queue = models.get_mut(model_id)?;
        let room = self.adapter_bytes_max - *adapter_bytes_used;
        let bytes = may_begin(&queue.waiting.get(&queue.next)?.op, room)?;
        if bytes > 0 {
            *adapter_bytes_used += bytes;
            kept.insert(key, Kept { bytes, within: None });
        }
        let queued = queue.waiting.remove(&queue.next)?;
        queue.next += 1;
        if !queue.waiting.contains_key(&queue.next) {
            ready.remove(model_id);
        }
        waiting.remove(&queued.id);
        Some(queued)
    }

    /// Notes that a part of a model's memory is needed until [`Intake::release`], also if the model is given up before.
    pub(crate) fn keep(&self, key: u64, model_id: &str, bytes: u64) {
        let mut inner = self.lock();
        let within = inner.models.contains_key(model_id).then(|| model_id.to_owned());
        if within.is_none() {
            inner.adapter_bytes_used += bytes;
        }
        inner.kept.insert(key, Kept { bytes, within });
    }

    /// Gives back what was kept.
    pub(crate) fn release(&self, key: u64) {
        let mut inner = self.lock();
        if let Some(Kept { bytes, within: None }) = inner.kept.remove(&key) {
            inner.adapter_bytes_used -= bytes;
        }
    }

    /// Whether a model is still wanted.
    pub(crate) fn has_model(&self, model_id: &str) -> bool {
        self.lock().models.contains_key(model_id)
    }

    /// Whether a snapshot is still wanted: its name stands for what it stood for when the snapshot was accepted.
    pub(crate) fn wants_snapshot(&self, sampler_id: &str, entry: u64) -> bool {
        self.lock().samplers.get(sampler_id).is_some_and(|there| there.uid == entry)
    }

    /// Notes what became of a snapshot: a name with nothing behind it is given up.
    pub(crate) fn snapshot_over(&self, sampler_id: &str, entry: u64, made: bool) {
        self.lock().snapshot_over(sampler_id, entry, made);
    }

    /// Whether sampling weights are still wanted.
    pub(crate) fn wants_sampler(&self, sampler_id: &str) -> bool {
        self.lock().samplers.contains_key(sampler_id)
    }
}

impl Inner {
    /// What `client` may have of `total` bytes.
    fn adapter_room(&self, client: &Client, total: u64) -> AdapterRoom {
        let models = self.models.values().map(|queue| (&queue.client, queue.bytes.training));
        let samplers = self.samplers.values().map(|entry| (&entry.client, entry.bytes));
        AdapterRoom::of(client, models.chain(samplers), self.adapter_bytes_used, total)
    }

    fn remove_model(&mut self, model_id: &str) -> Option<ModelQueue> {
        let queue = self.models.remove(model_id)?;
        self.ready.remove(model_id);
        self.adapter_bytes_used -= queue.bytes.training;
        for kept in self.kept.values_mut().filter(|kept| kept.within.as_deref() == Some(model_id)) {
            kept.within = None;
            self.adapter_bytes_used += kept.bytes;
        }
        for queued in queue.waiting.values() {
            self.waiting.remove(&queued.id);
            self.give_up_snapshot(&queued.op);
        }
        Some(queue)
    }

    fn remove_sampler(&mut self, sampler_id: &str) -> bool {
        let Some(SamplerEntry { bytes, from, .. }) = self.samplers.remove(sampler_id) else { return false };
        match from.as_ref().filter(|_| bytes > 0).and_then(|from| self.others_from(from).next()) {
            // What it has stays, in the name of another.
            Some(other) => other.bytes = bytes,
            None => self.adapter_bytes_used -= bytes,
        }
        true
    }

    /// Names for the weights that are loaded from this.
    fn others_from<'a>(&'a mut self, from: &'a LoadedFrom) -> impl Iterator<Item = &'a mut SamplerEntry> {
        self.samplers.values_mut().filter(|entry| entry.from.as_ref().is_some_and(|other| other.is_same(from)))
    }

    /// Forgets a snapshot that will not be made, and its name if nothing else is behind it.
    fn give_up_snapshot(&mut self, op: &Op) {
        if let Op::Snapshot { sampler_id, entry, .. } = op {
            self.snapshot_over(sampler_id, *entry, false);
        }
    }

    fn snapshot_over(&mut self, sampler_id: &str, uid: u64, made: bool) {
        let Some(entry) = self.samplers.get_mut(sampler_id).filter(|entry| entry.uid == uid) else { return };
        entry.pending -= 1;
        entry.made |= made;
        if !entry.made && entry.pending == 0 {
            self.remove_sampler(sampler_id);
        }
    }
}

impl ModelQueue {
    fn check_place(&self, model_id: &str, seq_id: u64) -> Result<(), Refusal> {
        if seq_id == 0 {
            return Err(Refusal::User("operations of a model count from 1; their seq_id is never 0".into()));
        }
        if seq_id < self.next || self.waiting.contains_key(&seq_id) {
            return Err(Refusal::Seen);
        }
        if seq_id - self.next > SEQUENCE_AHEAD_MAX {
            return Err(Refusal::User(format!(
                "seq_id {seq_id} of model {model_id} is more than {SEQUENCE_AHEAD_MAX} ahead of {}, the first that has not begun",
                self.next
            )));
        }
        Ok(())
    }

    fn fail_all(self, failure: &Failure) {
        self.waiting.into_values().for_each(|queued| queued.reply.send(Err(failure.clone())));
    }
}

fn refusal(shortage: Shortage) -> Refusal {
    match shortage {
        Shortage::Now { bytes } => Refusal::Busy(format!(
            "requests and results of this session and others take the memory set aside for them, and this one needs {bytes} bytes; \
             send it again in a moment"
        )),
        Shortage::Ever { bytes, bytes_max } => Refusal::User(format!(
            "the request and its result take {bytes} bytes of memory, above the limit of {bytes_max}; send less in one request, or start \
             the server with more memory"
        )),
    }
}

#[cfg(test)]
mod tests;
