//! Outcomes that clients come back for.
//!
//! [`Futures`] is a cheap handle. The table is behind a std mutex: it is held for a few map operations and never across an await.
//! A reader that comes early waits on its entry's `Notify`; nobody polls. Results stay readable for a while after they were read,
//! because an answer can be lost on the way, and are bounded in bytes: what was read goes first, then what is oldest.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use strata_engine::api::Failure;
use tokio::sync::Notify;

use crate::limits;

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

/// What became of an id that asks to be accepted.
pub enum Begun {
    /// It is new; its outcome is to be given to this.
    New(Completer),
    /// A request of this id was accepted before.
    Known,
    /// Too much is queued already.
    Full,
}

/// Bounds on what a store keeps; the defaults are those of [`limits`].
#[derive(Clone, Debug)]
pub struct Retention {
    /// Requests whose outcome is open.
    pub pending_max: usize,
    /// Body bytes of requests whose outcome is open.
    pub pending_bytes_max: usize,
    /// Bytes of results.
    pub result_bytes_max: usize,
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
            pending_max: limits::PENDING_FUTURES_MAX,
            pending_bytes_max: limits::PENDING_BYTES_MAX,
            result_bytes_max: limits::RESULT_BYTES_MAX,
            unread: limits::RESULT_UNREAD_RETENTION,
            read: limits::RESULT_READ_RETENTION,
            gone_max: limits::GONE_FUTURES_MAX,
        }
    }
}

/// The store of outcomes.
#[derive(Clone)]
pub struct Futures {
    shared: Arc<Shared>,
}

struct Shared {
    retention: Retention,
    table: Mutex<Table>,
    pending_count: AtomicUsize,
    pending_bytes: AtomicUsize,
}

#[derive(Default)]
struct Table {
    entries: HashMap<Arc<str>, Entry>,
    /// Results no one has read, oldest first; those read since are skipped when they come up.
    unread: VecDeque<(Instant, Arc<str>)>,
    /// Results someone has read, in the order of their first readers.
    read: VecDeque<(Instant, Arc<str>)>,
    result_bytes: usize,
    gone: HashSet<Arc<str>>,
    gone_order: VecDeque<Arc<str>>,
}

struct Entry {
    slot: Arc<Slot>,
    was_read: bool,
}

#[derive(Default)]
struct Slot {
    answer: OnceLock<Arc<Answer>>,
    done: Notify,
}

/// Takes the outcome of one accepted request. Dropped without one, the request fails rather than staying open for ever.
pub struct Completer {
    shared: Arc<Shared>,
    id: Arc<str>,
    slot: Arc<Slot>,
    cost_bytes: usize,
}

impl Futures {
    /// An empty store.
    pub fn new(retention: Retention) -> Self {
        let shared = Shared {
            retention,
            table: Mutex::default(),
            pending_count: AtomicUsize::new(0),
            pending_bytes: AtomicUsize::new(0),
        };
        Futures { shared: Arc::new(shared) }
    }

    /// Accepts a request id whose body holds `cost_bytes` in memory until it is done.
    pub fn begin(&self, id: &str, cost_bytes: usize) -> Begun {
        self.begin_unless(id, cost_bytes, |count, bytes| {
            count >= self.shared.retention.pending_max
                || bytes.saturating_add(cost_bytes) > self.shared.retention.pending_bytes_max
        })
    }

    /// As [`Futures::begin`], even when the queue is full: for the request that others in the queue wait for.
    pub fn begin_urgent(&self, id: &str, cost_bytes: usize) -> Begun {
        self.begin_unless(id, cost_bytes, |_, _| false)
    }

    fn begin_unless(&self, id: &str, cost_bytes: usize, is_full: impl Fn(usize, usize) -> bool) -> Begun {
        let mut table = self.shared.lock();
        if table.entries.contains_key(id) || table.gone.contains(id) {
            return Begun::Known;
        }
        let pending = &self.shared;
        if is_full(pending.pending_count.load(Ordering::Relaxed), pending.pending_bytes.load(Ordering::Relaxed)) {
            return Begun::Full;
        }
        pending.pending_count.fetch_add(1, Ordering::Relaxed);
        pending.pending_bytes.fetch_add(cost_bytes, Ordering::Relaxed);
        let (id, slot): (Arc<str>, Arc<Slot>) = (id.into(), Arc::default());
        table.entries.insert(id.clone(), Entry { slot: slot.clone(), was_read: false });
        Begun::New(Completer { shared: self.shared.clone(), id, slot, cost_bytes })
    }

    /// Whether a request of this id was accepted.
    pub fn is_known(&self, id: &str) -> bool {
        let table = self.shared.lock();
        table.entries.contains_key(id) || table.gone.contains(id)
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
        if slot.answer.get().is_none() && tokio::time::timeout(hold, done).await.is_err() && slot.answer.get().is_none() {
            return Waited::Pending;
        }
        match slot.answer.get() {
            Some(answer) => {
                self.shared.mark_read(id);
                Waited::Ready(answer.clone())
            }
            None => Waited::Pending,
        }
    }

    /// Lets go of results whose time is over.
    pub fn sweep(&self, now: Instant) {
        let mut table = self.shared.lock();
        while let Some((at, _)) = table.read.front()
            && now.saturating_duration_since(*at) > self.shared.retention.read
        {
            table.evict_read(&self.shared.retention);
        }
        while let Some((at, id)) = table.unread.front()
            && (now.saturating_duration_since(*at) > self.shared.retention.unread
                || table.entries.get(id).is_none_or(|entry| entry.was_read))
        {
            table.evict_unread(&self.shared.retention);
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
        if let Some(entry) = table.entries.get_mut(id) {
            entry.was_read = true;
        }
        table.read.push_back((Instant::now(), key));
    }
}

impl Table {
    fn evict_read(&mut self, retention: &Retention) {
        if let Some((_, id)) = self.read.pop_front() {
            self.forget(id, retention);
        }
    }

    fn evict_unread(&mut self, retention: &Retention) {
        let Some((_, id)) = self.unread.pop_front() else { return };
        if self.entries.get(&id).is_some_and(|entry| !entry.was_read) {
            self.forget(id, retention);
        }
    }

    fn forget(&mut self, id: Arc<str>, retention: &Retention) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.result_bytes -= entry.slot.answer.get().map_or(0, |answer| answer.size_bytes());
        self.gone.insert(id.clone());
        self.gone_order.push_back(id);
        while self.gone_order.len() > retention.gone_max {
            if let Some(oldest) = self.gone_order.pop_front() {
                self.gone.remove(&oldest);
            }
        }
    }
}

impl Completer {
    /// Stores the outcome and wakes its readers.
    pub fn complete(self, answer: Answer) {
        self.store(answer);
    }

    fn store(&self, answer: Answer) {
        let size_bytes = answer.size_bytes();
        if self.slot.answer.set(Arc::new(answer)).is_err() {
            return;
        }
        self.shared.pending_count.fetch_sub(1, Ordering::Relaxed);
        self.shared.pending_bytes.fetch_sub(self.cost_bytes, Ordering::Relaxed);
        {
            let mut table = self.shared.lock();
            table.result_bytes += size_bytes;
            table.unread.push_back((Instant::now(), self.id.clone()));
            while table.result_bytes > self.shared.retention.result_bytes_max && table.read.front().is_some() {
                table.evict_read(&self.shared.retention);
            }
            // The newest result stays even if it alone is above the bound: its reader is still to come.
            while table.result_bytes > self.shared.retention.result_bytes_max && table.unread.len() > 1 {
                table.evict_unread(&self.shared.retention);
            }
        }
        self.slot.done.notify_waiters();
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if self.slot.answer.get().is_none() {
            self.store(Answer::Failed(Failure::Server("the request was dropped before it was done".into())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(20);

    fn json(text: &str) -> Answer {
        Answer::Json(Bytes::copy_from_slice(text.as_bytes()))
    }

    fn begin(futures: &Futures, id: &str) -> Completer {
        match futures.begin(id, 1) {
            Begun::New(completer) => completer,
            _ => panic!("{id} is new"),
        }
    }

    #[tokio::test]
    async fn a_result_wakes_its_reader_and_can_be_read_again() {
        let futures = Futures::new(Retention::default());
        let completer = begin(&futures, "a");
        let reader = tokio::spawn({
            let futures = futures.clone();
            async move { futures.wait("a", LONG).await }
        });
        tokio::time::sleep(SHORT).await;
        completer.complete(json("{}"));
        assert_eq!(reader.await.unwrap(), Waited::Ready(Arc::new(json("{}"))));
        assert_eq!(futures.wait("a", SHORT).await, Waited::Ready(Arc::new(json("{}"))));
        assert!(matches!(futures.begin("a", 1), Begun::Known));
        assert_eq!(futures.shared.pending_count.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_poll_ends_after_its_hold_and_unknown_ids_are_told_apart() {
        let futures = Futures::new(Retention::default());
        let _open = begin(&futures, "a");
        assert_eq!(futures.wait("a", SHORT).await, Waited::Pending);
        assert_eq!(futures.wait("b", SHORT).await, Waited::Unknown);
    }

    #[tokio::test]
    async fn results_are_gone_after_their_time_and_stay_known() {
        let futures = Futures::new(Retention { unread: Duration::ZERO, read: Duration::ZERO, ..Retention::default() });
        begin(&futures, "unread").complete(json("{}"));
        begin(&futures, "read").complete(json("{}"));
        futures.wait("read", SHORT).await;
        futures.sweep(Instant::now() + SHORT);
        assert_eq!(futures.wait("unread", SHORT).await, Waited::Gone);
        assert_eq!(futures.wait("read", SHORT).await, Waited::Gone);
        assert!(matches!(futures.begin("read", 1), Begun::Known));
    }

    #[tokio::test]
    async fn above_the_byte_bound_read_results_go_before_unread_ones() {
        let futures = Futures::new(Retention { result_bytes_max: 8, ..Retention::default() });
        begin(&futures, "old").complete(json("1234"));
        begin(&futures, "read").complete(json("1234"));
        futures.wait("read", SHORT).await;
        begin(&futures, "new").complete(json("1234"));
        assert_eq!(futures.wait("read", SHORT).await, Waited::Gone);
        assert!(matches!(futures.wait("old", SHORT).await, Waited::Ready(_)));
        assert!(matches!(futures.wait("new", SHORT).await, Waited::Ready(_)));
    }

    #[tokio::test]
    async fn a_dropped_request_fails() {
        let futures = Futures::new(Retention::default());
        drop(begin(&futures, "a"));
        let Waited::Ready(answer) = futures.wait("a", SHORT).await else { panic!("it is done") };
        assert!(matches!(&*answer, Answer::Failed(Failure::Server(_))));
    }

    #[test]
    fn a_full_queue_refuses_all_but_the_urgent() {
        let futures = Futures::new(Retention { pending_bytes_max: 10, ..Retention::default() });
        let Begun::New(_open) = futures.begin("a", 8) else { panic!("there is room") };
        assert!(matches!(futures.begin("b", 8), Begun::Full));
        assert!(matches!(futures.begin_urgent("b", 8), Begun::New(_)));
    }

    #[test]
    fn ids_that_are_gone_are_forgotten_beyond_a_bound() {
        let futures = Futures::new(Retention { unread: Duration::ZERO, gone_max: 1, ..Retention::default() });
        begin(&futures, "a").complete(json("{}"));
        begin(&futures, "b").complete(json("{}"));
        futures.sweep(Instant::now() + SHORT);
        assert!(matches!(futures.begin("b", 1), Begun::Known));
        assert!(matches!(futures.begin("a", 1), Begun::New(_)));
    }
}
