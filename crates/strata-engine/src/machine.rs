//! What engines on one machine have in common: its processors, by turns, and the account of requests.
//!
//! An engine computes with all threads, one piece of work at a time: a step, an optimizer step, what lies between two layers of a pass. Where there are several they take turns
//! between such pieces: of those that wait, whoever has had the machine for least is next, and idleness earns no credit, as among the clients of one engine. What an engine waits for
//! others is no time that its own clients are charged for.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::ledger::Ledger;

/// What engines share. Cheap to clone; engines that are started with clones of one are on one machine.
#[derive(Clone)]
pub struct Machine {
    pub(crate) ledger: Ledger,
    /// Memory that the backends of all engines have for buffers.
    buffer_bytes: Arc<AtomicU64>,
    turns: Arc<Turns>,
}

impl Default for Machine {
    /// One that no engine is on.
    fn default() -> Self {
        Machine { ledger: Ledger::new(0), buffer_bytes: Arc::default(), turns: Arc::default() }
    }
}

impl Machine {
    /// Adds the memory that an engine has for buffers; answers what all have.
    pub(crate) fn grow_buffers(&self, bytes: u64) -> u64 {
        self.buffer_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }
}

#[derive(Default)]
struct Turns {
    state: Mutex<State>,
    given_back: Condvar,
}

#[derive(Default)]
struct State {
    engines: Vec<Engine>,
    /// Whether someone has the machine.
    is_taken: bool,
    /// Where whoever was served last began: those who come after being idle begin here.
    now: Duration,
}

#[derive(Default)]
struct Engine {
    used: Duration,
    waits: bool,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// Whether it is the turn of engine `own`, which waits.
    fn is_next(&self, own: usize) -> bool {
        let start = |i: usize| (self.engines[i].used.max(self.now), i);
        let waiting = (0..self.engines.len()).filter(|&i| self.engines[i].waits);
        !self.is_taken && waiting.map(start).min().is_none_or(|first| first == start(own))
    }

    fn take(&mut self, own: usize) {
        self.is_taken = true;
        let engine = &mut self.engines[own];
        engine.waits = false;
        // Idleness earns no credit.
        engine.used = engine.used.max(self.now);
        self.now = engine.used;
    }

    fn give_back(&mut self, own: usize, time: Duration) {
        self.is_taken = false;
        self.engines[own].used += time;
    }
}

/// One engine's part in a machine. Its own thread has it.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    number: usize,
    /// Since when it has the machine.
    since: Cell<Option<Instant>>,
    /// How long it has waited in all.
    waited: Cell<Duration>,
}

impl Machine {
    /// A further engine.
    pub(crate) fn join(&self) -> Turn {
        let mut state = self.turns.lock();
        let number = state.engines.len();
        state.engines.push(Engine::default());
        drop(state);
        Turn { turns: self.turns.clone(), number, since: Cell::new(None), waited: Cell::default() }
    }
}

impl Turn {
    /// Does a piece of work when it is its turn. What is done within is part of it.
    pub(crate) fn work<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.since.get().is_some() {
            return work();
        }
        self.take();
        let _given_back = OnDrop(|| self.give_back());
        work()
    }

    /// Lets others have a turn in the middle of a piece of work, and does `aside` meanwhile, which may be work of its own.
    pub(crate) fn aside<R>(&self, aside: impl FnOnce() -> R) -> R {
        if self.since.get().is_none() {
            return aside();
        }
        self.give_back();
        let _taken_again = OnDrop(|| self.take());
        aside()
    }

    /// How long it has waited for its turns.
    pub(crate) fn waited(&self) -> Duration {
        self.waited.get()
    }

    fn take(&self) {
        let mut state = self.turns.lock();
        if state.engines.len() > 1 {
            let began = Instant::now();
            state.engines[self.number].waits = true;
            while !state.is_next(self.number) {
                state = self.turns.given_back.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            self.waited.set(self.waited.get() + began.elapsed());
        }
        state.take(self.number);
        self.since.set(Some(Instant::now()));
    }

    fn give_back(&self) {
        let Some(since) = self.since.take() else { return };
        let mut state = self.turns.lock();
        state.give_back(self.number, since.elapsed());
        drop(state);
        self.turns.given_back.notify_all();
    }
}

/// Calls something when it is dropped, however that comes.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_engine_at_a_time_has_the_machine_also_after_a_panic() {
        let machine = Machine::default();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let turn = machine.join();
                let inside = &inside;
                scope.spawn(move || {
                    let alone = || {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    };
                    for i in 0..300 {
                        turn.work(|| {
                            alone();
                            turn.aside(|| turn.work(alone));
                            turn.work(alone);
                        });
                        if i % 50 == 0 {
                            let panic = || turn.work(|| turn.aside(|| std::panic::resume_unwind(Box::new("expected"))));
                            assert!(catch_unwind(AssertUnwindSafe(panic)).is_err());
                        }
                    }
                });
            }
        });
        assert!(!machine.turns.lock().is_taken);
    }

    #[test]
    fn who_waits_and_has_had_least_is_next_and_idleness_earns_nothing() {
        let mut state = State { engines: (0..3).map(|_| Engine::default()).collect(), ..State::default() };
        let mut run = |waiting: &[usize], times: [u64; 3]| {
            waiting.iter().for_each(|&i| state.engines[i].waits = true);
            let next = waiting.iter().copied().find(|&i| state.is_next(i)).expect("someone is next");
            state.take(next);
            assert!(!waiting.iter().any(|&i| state.is_next(i)), "it is taken");
            state.give_back(next, Duration::from_millis(times[next]));
            next
        };
        // Layers of 10 ms against steps of 2 ms: five steps for a layer.
        let order: Vec<usize> = (0..12).map(|_| run(&[0, 1], [10, 2, 0])).collect();
        assert_eq!(order, [0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]);
        // One that comes late begins where the others are.
        let order: Vec<usize> = (0..6).map(|_| run(&[0, 1, 2], [10, 10, 10])).collect();
        assert_eq!([0, 1, 2].map(|i| order.iter().filter(|&&other| other == i).count()), [2, 2, 2], "{order:?}");
    }
}
