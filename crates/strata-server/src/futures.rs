//! Outcomes that clients come back for.
//!
//! [`Futures`] is a cheap handle. The table is behind a std mutex: it is held for a few map operations and never across an await.
//! A reader that comes early waits on its entry's `Notify`; nobody polls. Results stay readable for a while after they were read,
//! because an answer can be lost on the way.
//!
//! Who has many requests open need not come for each: the completions of a [`Target`] are numbered as they happen, and kept until their client says
//! that it has seen them, or has read the result. One whose result is given up unread is told of all the same: the client then learns that
//! it is gone, and asks anew.
//!
//! Every result holds the [`Charge`] that its request was accepted with, shrunk to its size: an unread result takes of its session's share of
//! memory until it is read, and so a client that never reads fills its own share and nobody else's. When the account runs short, results that
//! were read, or whose request was given up, go first, and then those whose session is over.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use strata_engine::api::{Client, Failure};
use strata_engine::ledger::Charge;
use tokio::sync::Notify;

use crate::clock;
use crate::error::ApiError;
use crate::gone::Gone;
use crate::limits;
use crate::names::shown;

#[cfg(test)]
mod tests;

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A JSON object.
    Json(Bytes),
    /// An encoded `SampleResponse`.
    Sample(Bytes),
    /// An encoded `ForwardBackwardOutput`.
    ForwardBackward(Bytes),
    /// The operation failed.
    Failed(Failure),
}

impl Answer {
    fn size_bytes(&self) -> usize {
        match self {
            Answer::Json(bytes) | Answer::Sample(bytes) | Answer::ForwardBackward(bytes) => bytes.len(),
            Answer::Failed(Failure::User(text) | Failure::Server(text)) => text.len(),
        }
    }
}

/// What a reader finds.
#[derive(Clone, Debug, PartialEq)]
pub enum Waited {
    /// The outcome.
    Ready(Arc<Answer>),
    /// Not yet.
    Pending,
    /// There was a result, and it is no longer kept.
    Gone,
    /// No request of this id was ever accepted, as far as is remembered.
    Unknown,
}

/// Another request of this id was accepted before: its outcome must not be taken for this one's.
#[derive(Debug, PartialEq)]
pub struct Taken(String);

impl From<Taken> for ApiError {
    fn from(Taken(id): Taken) -> Self {
        let id = shown(&id);
        ApiError::bad(format!(
            "request {id} was sent before and asked for something else: each request needs a seq_id of its own"
        ))
    }
}

/// How long things are kept; the defaults are those of [`limits`].
#[derive(Clone, Debug)]
pub struct Retention {
    /// How long a result waits for its first reader.
    pub unread: Duration,
    /// How long a result stays after its first reader.
    pub read: Duration,
    /// Ids that are remembered as gone.
    pub gone_max: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Retention {
            unread: limits::RESULT_UNREAD_RETENTION,
            read: limits::RESULT_READ_RETENTION,
            gone_max: limits::GONE_FUTURES_MAX,
        }
    }
}

/// Whose completions are numbered: the requests of one client of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The sampling session.
    pub sampler_id: Arc<str>,
    /// The number of the client within it.
    pub clone: u64,
}

/// That a request was done.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The request.
    pub request_id: Arc<str>,
    /// Bytes of its result; `None` if it failed.
    pub result_bytes: Option<usize>,
}

/// The store of outcomes.
#[derive(Clone)]
pub struct Futures {
    shared: Arc<Shared>,
}

struct Shared {
    retention: Retention,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<Arc<str>, Entry>,
    /// The requests of each session.
    of_session: HashMap<Arc<str>, HashSet<Arc<str>>>,
    /// Results no one has read, oldest first.
    unread: Queue,
    /// Results someone has read, in the order of their first readers.
    read: Queue,
    /// Places that were given out in either.
    places: u64,
    /// Sessions that are over: their results are kept as long as there is room.
    over: HashSet<Arc<str>>,
    /// Of what no one has read, what is of them.
    orphans: BTreeSet<u64>,
    /// Completions by their targets and numbers.
    completions: BTreeMap<(Target, u64), Completion>,
    completed: u64,
    /// Who waits for completions.
    watched: HashMap<Target, Arc<Notify>>,
    /// Ids of results that are gone, and completions that their clients may not know of.
    gone: Gone<(Target, u64)>,
}

/// Results by their places, with the moments since when they are there.
type Queue = BTreeMap<u64, (Instant, Arc<str>)>;

struct Entry {
    slot: Arc<Slot>,
    client: Client,
    /// What tells the request from another of this id; `None` if nothing does.
    fingerprint: Option<u64>,
    was_read: bool,
    is_given_up: bool,
    /// Where a result stands among those that were read, or those that were not.
    place: Option<u64>,
    charge: Option<Charge>,
    target: Option<Target>,
    completion: Option<(Target, u64)>,
}

#[derive(Default)]
struct Slot {
    answer: OnceLock<Arc<Answer>>,
    /// Whether the request was refused after all.
    withdrawn: OnceLock<()>,
    done: Notify,
}

/// Takes the outcome of one accepted request. Dropped without one, the request was refused: its id is free again.
pub struct Completer {
    shared: Arc<Shared>,
    id: Arc<str>,
    slot: Arc<Slot>,
    charge: Option<Charge>,
}

impl Futures {
    /// An empty store.
    pub fn new(retention: Retention) -> Self {
        Futures { shared: Arc::new(Shared { retention, table: Mutex::default() }) }
    }

    /// Opens the future of a client's request, which is known by its id alone. `None` if it was accepted before.
    pub fn begin(&self, id: &str, client: &Client) -> Option<Completer> {
        // Nothing is another one without a fingerprint.
        self.begin_for(id, client, None, None).ok().flatten()
    }

    /// As [`Futures::begin`], of a request that its fingerprint tells from another of its id, and whose completion `target` is to be told.
    ///
    /// # Errors
    /// If another was accepted before.
    pub fn begin_for(
        &self,
        id: &str,
        client: &Client,
        fingerprint: Option<u64>,
        target: Option<Target>,
    ) -> Result<Option<Completer>, Taken> {
        let mut table = self.shared.lock();
        if table.is_known(id, fingerprint)? {
            return Ok(None);
        }
        let (id, slot): (Arc<str>, Arc<Slot>) = (id.into(), Arc::default());
        let entry = Entry {
            slot: slot.clone(),
            client: client.clone(),
            fingerprint,
            was_read: false,
            is_given_up: false,
            place: None,
            charge: None,
            target,
            completion: None,
        };
        table.of_session.entry(client.session.clone()).or_default().insert(id.clone());
        table.entries.insert(id.clone(), entry);
        Ok(Some(Completer { shared: self.shared.clone(), id, slot, charge: None }))
    }

    /// Whether this request was accepted before.
    ///
    /// # Errors
    /// If another of its id was.
    pub fn is_known(&self, id: &str, fingerprint: Option<u64>) -> Result<bool, Taken> {
        self.shared.lock().is_known(id, fingerprint)
    }

    /// Waits for an outcome, no longer than `hold`.
    pub async fn wait(&self, id: &str, hold: Duration) -> Waited {
        let slot = {
            let table = self.shared.lock();
            match table.entries.get(id) {
                Some(entry) => entry.slot.clone(),
                None if table.gone.contains(id) => return Waited::Gone,
                None => return Waited::Unknown,
            }
        };
        let done = slot.done.notified();
        tokio::pin!(done);
        // Registered before looking, so that an outcome between the look and the wait is not missed.
        done.as_mut().enable();
        let is_over = || slot.answer.get().is_some() || slot.withdrawn.get().is_some();
        if !is_over() && tokio::time::timeout(hold, done).await.is_err() && !is_over() {
            return Waited::Pending;
        }
        match slot.answer.get() {
            Some(answer) => {
                self.shared.mark_read(id);
                Waited::Ready(answer.clone())
            }
            None => Waited::Unknown,
        }
    }

    /// What of a target was completed after number `seen`, and the number of the last of it; waits for something no longer than `hold`. Completions
    /// up to `seen` are forgotten.
    pub async fn completions(&self, target: &Target, seen: u64, hold: Duration) -> (Vec<Completion>, u64) {
        let deadline = tokio::time::Instant::now() + hold;
        loop {
            let watching = {
                let mut table = self.shared.lock();
                let found = table.completions_after(target, seen);
                if !found.0.is_empty() {
                    return found;
                }
                let watched = table.watched.entry(target.clone()).or_default().clone();
                Watching { shared: &self.shared, target, watched }
            };
            let done = watching.watched.notified();
            tokio::pin!(done);
            // Registered before looking again: see `wait`.
            done.as_mut().enable();
            let found = self.shared.lock().completions_after(target, seen);
            if found.0.is_empty() && tokio::time::timeout_at(deadline, done).await.is_ok() {
                continue;
            }
            return if found.0.is_empty() { self.shared.lock().completions_after(target, seen) } else { found };
        }
    }

    /// Notes that a client gives up a request: its result, there or to come, goes as early as one that was read.
    pub fn given_up(&self, id: &str) {
        let is_done = {
            let mut table = self.shared.lock();
            let Some(entry) = table.entries.get_mut(id) else { return };
            entry.is_given_up = true;
            entry.slot.answer.get().is_some()
        };
        if is_done {
            self.shared.mark_read(id);
        }
    }

    /// Lets go of a result that its client has read and will not read again.
    pub fn retrieved(&self, id: &str) {
        let mut table = self.shared.lock();
        let id = match table.entries.get_key_value(id) {
            Some((id, entry)) if entry.was_read => id.clone(),
            _ => return,
        };
        let freed = table.forget(id, &self.shared.retention);
        drop(table);
        drop(freed);
    }

    /// Lets go of results whose time is over.
    pub fn sweep(&self, now: Instant) {
        let (mut freed, mut table) = (Vec::new(), self.shared.lock());
        let retention = &self.shared.retention;
        while let Some(id) = first_over(&mut table.read, now, retention.read) {
            freed.extend(table.forget(id, retention));
        }
        while let Some(id) = first_over(&mut table.unread, now, retention.unread) {
            freed.extend(table.forget(id, retention));
        }
        drop(table);
    }

    /// Notes that a session is over: nobody is expected to come for its results.
    pub fn session_over(&self, session_id: &str) {
        let mut table = self.shared.lock();
        table.over.insert(session_id.into());
        let orphans: Vec<u64> = table.of_session(session_id).filter(|entry| !entry.was_read).filter_map(|e| e.place).collect();
        table.orphans.extend(orphans);
    }

    /// Forgets a session that is over, with all its results.
    pub fn forget_session(&self, session_id: &str) {
        let mut table = self.shared.lock();
        table.over.remove(session_id);
        let ids = table.of_session.get(session_id).into_iter().flatten();
        let done = ids.filter(|id| table.entries.get(*id).is_some_and(|entry| entry.place.is_some()));
        let done: Vec<Arc<str>> = done.cloned().collect();
        let freed: Vec<Entry> = done.iter().filter_map(|id| table.remove(id)).collect();
        for completion in freed.iter().filter_map(|entry| entry.completion.as_ref()) {
            table.completions.remove(completion);
        }
        drop(table);
        drop(freed);
    }

    /// Gives up the result that is missed least: the first that was read, or else one of a session that is over. Answers whether there was one.
    pub fn evict(&self) -> bool {
        let mut table = self.shared.lock();
        let orphan = || table.orphans.first().and_then(|place| table.unread.get(place));
        let first = table.read.first_key_value().map(|(_, first)| first).or_else(orphan);
        let freed = first.map(|(_, id)| id.clone()).and_then(|id| table.forget(id, &self.shared.retention));
        drop(table);
        freed.is_some()
    }
}

/// Someone who waits for the completions of a target.
struct Watching<'a> {
    shared: &'a Shared,
    target: &'a Target,
    watched: Arc<Notify>,
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        let mut table = self.shared.lock();
        // The last to wait takes the entry along: then it and this have it, and nobody else.
        if table.watched.get(self.target).is_some_and(|watched| Arc::strong_count(watched) == 2) {
            table.watched.remove(self.target);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn mark_read(&self, id: &str) {
        let mut table = self.lock();
        let Some((key, entry)) = table.entries.get_key_value(id) else { return };
        if entry.was_read {
            return;
        }
        let key = key.clone();
        table.leave_queue(&key);
        if let Some(entry) = table.entries.get_mut(id) {
            entry.was_read = true;
        }
        table.enter_queue(&key);
    }
}

/// Takes out the first of a queue if it has been there for longer than `kept`.
fn first_over(queue: &mut Queue, now: Instant, kept: Duration) -> Option<Arc<str>> {
    let first = queue.first_entry().filter(|first| now.saturating_duration_since(first.get().0) > kept)?;
    Some(first.remove().1)
}

/// What tells what is asked for from something else that is asked for under its id, as long as the process runs.
pub fn fingerprint_of(wanted: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    wanted.hash(&mut hasher);
    hasher.finish()
}

impl Table {
    /// Of a result that is gone, no more is known than that it was there.
    fn is_known(&self, id: &str, fingerprint: Option<u64>) -> Result<bool, Taken> {
        let Some(entry) = self.entries.get(id) else { return Ok(self.gone.contains(id)) };
        match (entry.fingerprint, fingerprint) {
            (Some(first), Some(now)) if first != now => Err(Taken(id.to_owned())),
            _ => Ok(true),
        }
    }

    // Entries are handed out to be dropped without the lock: what they hold goes back to the ledger.

    /// Puts a result behind those that were read, or those that were not, as it is one.
    fn enter_queue(&mut self, id: &Arc<str>) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        self.places += 1;
        entry.place = Some(self.places);
        if !entry.was_read && self.over.contains(&entry.client.session) {
            self.orphans.insert(self.places);
        }
        let queue = if entry.was_read { &mut self.read } else { &mut self.unread };
        queue.insert(self.places, (clock::now(), id.clone()));
    }

    fn leave_queue(&mut self, id: &str) {
        let Some(place) = self.entries.get_mut(id).and_then(|entry| entry.place.take()) else { return };
        self.read.remove(&place);
        self.unread.remove(&place);
        self.orphans.remove(&place);
    }

    /// The requests of a session.
    fn of_session(&self, session_id: &str) -> impl Iterator<Item = &Entry> {
        self.of_session.get(session_id).into_iter().flatten().filter_map(|id| self.entries.get(id))
    }

    /// Takes a request out, wherever it is known.
    fn remove(&mut self, id: &str) -> Option<Entry> {
        self.leave_queue(id);
        let entry = self.entries.remove(id)?;
        if let Some(others) = self.of_session.get_mut(&entry.client.session) {
            others.remove(id);
            if others.is_empty() {
                self.of_session.remove(&entry.client.session);
            }
        }
        Some(entry)
    }

    fn forget(&mut self, id: Arc<str>, retention: &Retention) -> Option<Entry> {
        let mut entry = self.remove(&id)?;
        let completion = entry.completion.take();
        let untold = match (completion, entry.was_read) {
            (Some(completion), true) => {
                self.completions.remove(&completion);
                None
            }
            (completion, _) => completion,
        };
        for completion in self.gone.add(&id, untold, retention.gone_max) {
            self.completions.remove(&completion);
        }
        Some(entry)
    }

    /// Numbers the completion of a request, if anybody is to be told, and answers who waits for it.
    fn note_completion(&mut self, id: &Arc<str>, result_bytes: Option<usize>) -> Option<Arc<Notify>> {
        let entry = self.entries.get_mut(id)?;
        let target = entry.target.take()?;
        self.completed += 1;
        entry.completion = Some((target.clone(), self.completed));
        let watched = self.watched.get(&target).cloned();
        self.completions.insert((target, self.completed), Completion { request_id: id.clone(), result_bytes });
        watched
    }

    /// Forgets a target's completions up to number `seen`, and answers those after it with the number of the last.
    fn completions_after(&mut self, target: &Target, seen: u64) -> (Vec<Completion>, u64) {
        let end = |number| (target.clone(), number);
        let told = self.completions.range(end(0)..=end(seen)).map(|(at, _)| at.clone()).collect::<Vec<_>>();
        for at in told {
            self.completions.remove(&at);
        }
        let after = (Bound::Excluded(end(seen)), Bound::Included(end(u64::MAX)));
        let found = self.completions.range(after).take(limits::COMPLETIONS_MAX);
        let mut last = seen;
        let found = found.map(|((_, number), completion)| {
            last = *number;
            completion.clone()
        });
        (found.collect(), last)
    }
}

impl Completer {
    /// Has `charge` pay for the outcome of a request that the engine does not charge for.
    pub fn paid_by(mut self, charge: Charge) -> Self {
        self.charge = Some(charge);
        self
    }

    /// Stores the outcome with what pays for it, and wakes its readers.
    pub fn complete(mut self, answer: Answer, charge: Option<Charge>) {
        let mut charge = charge.or_else(|| self.charge.take());
        let result_bytes = if matches!(answer, Answer::Failed(_)) { None } else { Some(answer.size_bytes()) };
        if let Some(charge) = &mut charge {
            charge.shrink_to(answer.size_bytes() as u64 + limits::FUTURE_BYTES);
        }
        if self.slot.answer.set(Arc::new(answer)).is_err() {
            return;
        }
        let watched = {
            let mut table = self.shared.lock();
            if let Some(entry) = table.entries.get_mut(&self.id) {
                entry.charge = charge;
                entry.was_read |= entry.is_given_up;
                table.enter_queue(&self.id);
            }
            table.note_completion(&self.id, result_bytes)
        };
        self.slot.done.notify_waiters();
        watched.inspect(|watched| watched.notify_waiters());
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if self.slot.answer.get().is_none() {
            let withdrawn = self.shared.lock().remove(&self.id);
            let _ = self.slot.withdrawn.set(());
            self.slot.done.notify_waiters();
            drop(withdrawn);
        }
    }
}
