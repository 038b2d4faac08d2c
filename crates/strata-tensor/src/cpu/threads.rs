//! The worker threads of the CPU backend.
//!
//! A decode step of a small model is some two hundred parallel regions of a few tens of microseconds each, so workers spin
//! for a moment before they sleep, and the caller works too. A worker that the system has not scheduled is never waited for: whoever
//! is awake takes the tasks. Tasks split outputs, never a reduction, so who runs one does not matter to its bits.
//!
//! A thread takes its own tasks first, one of each [`Pool::num_threads`], and then what others have left of theirs. So it knows what comes to it next, which it can fetch from memory; and those who count
//! together, on one line of a cache, would wait for each other at every task.

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use super::matmul::release_thread;

/// Spins before a worker sleeps: some tens of microseconds, more than the pause between two regions of a step.
const SPINS_BEFORE_SLEEP: u32 = 20_000;

/// Set in [`Shared::state`] while workers may join the current region.
const OPEN: u64 = 1 << 63;
/// One region, in [`Shared::state`]; the bits below count the workers inside.
const REGION: u64 = 1 << 16;

/// Bits of [`OwnTasks`] that count the tasks of one region.
const TAKEN_BITS: u32 = 24;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// How many of a thread's own tasks have been taken, and above it the number of the region: what is left of another counts as none. On lines of its own.
#[repr(align(128))]
struct OwnTasks(AtomicU64);

impl OwnTasks {
    /// Takes the next of so many, if there is one.
    fn take(&self, region: u64, count: usize) -> Option<usize> {
        let tag = (region / REGION) << TAKEN_BITS;
        let next = |now: u64| {
            let taken = now.checked_sub(tag).filter(|taken| taken >> TAKEN_BITS == 0).unwrap_or(0);
            (taken < count as u64).then(|| tag + taken + 1)
        };
        // The task itself was published with the region.
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        next(before).map(|after| (after - tag - 1) as usize)
    }
}

struct Shared {
    /// [`OPEN`], the number of the region, and the number of workers in it.
    state: AtomicU64,
    /// The region's task. Written only while the region is closed and empty.
    task: UnsafeCell<Option<*const Task<'static>>>,
    num_tasks: AtomicUsize,
    /// Of each thread, the caller first.
    own_tasks: Box<[OwnTasks]>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
    /// Workers asleep, and whether the pool is closing.
    sleepers: Mutex<Sleepers>,
    wake: Condvar,
    num_sleeping: AtomicUsize,
}

struct Sleepers {
    closing: bool,
}

// SAFETY: `task` is only written by the one thread that holds `Pool::region`, while no worker is inside, and only read by workers that
// joined the open region; the atomics on `state` order the two.
unsafe impl Sync for Shared {}
// SAFETY: the task pointer is only followed inside a region, during which its owner waits.
unsafe impl Send for Shared {}

/// A fixed set of threads that run the tasks of one region at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    region: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool in which `num_threads` threads work, the caller among them.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn try_new(num_threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            task: UnsafeCell::new(None),
            num_tasks: AtomicUsize::new(0),
            own_tasks: (0..num_threads.max(1)).map(|_| OwnTasks(AtomicU64::new(0))).collect(),
            panic: Mutex::new(None),
            sleepers: Mutex::new(Sleepers { closing: false }),
            wake: Condvar::new(),
            num_sleeping: AtomicUsize::new(0),
        });
        let mut pool = Pool { shared, region: Mutex::new(()), workers: Vec::new() };
        for i in 1..num_threads.max(1) {
            let shared = pool.shared.clone();
            let worker = std::thread::Builder::new().name(format!("strata-cpu-{i}"));
            // Those before it end with the pool.
            pool.workers.push(worker.spawn(move || shared.work(i))?);
        }
        Ok(pool)
    }

    /// As [`Pool::try_new`].
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub(crate) fn new(num_threads: usize) -> Self {
        Self::try_new(num_threads).expect("the system has threads to give")
    }

    /// Threads that work, the caller among them.
    pub(crate) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every `i` below `num_tasks`, in any order, on any thread, and returns when all are done.
    pub(crate) fn run(&self, num_tasks: usize, task: &Task<'_>) {
        if num_tasks <= 1 || self.workers.is_empty() || IN_REGION.get() {
            (0..num_tasks).for_each(task);
            if !IN_REGION.get() {
                release_thread();
            }
            return;
        }
        let at_once = self.num_threads() * ((1 << TAKEN_BITS) - 1);
        if num_tasks > at_once {
            for first in (0..num_tasks).step_by(at_once) {
                self.run(at_once.min(num_tasks - first), &|i| task(first + i));
            }
            return;
        }
        let _one_region = self.region.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; this function returns after every worker has left the region.
        let task: *const Task<'static> = unsafe { std::mem::transmute(task as *const Task<'_>) };
        // SAFETY: the region is closed and empty, so nobody reads.
        unsafe { *shared.task.get() = Some(task) };
        shared.num_tasks.store(num_tasks, Ordering::Relaxed);
        let region = (shared.state.load(Ordering::Relaxed) & !(OPEN | (REGION - 1))).wrapping_add(REGION) & !OPEN;
        shared.state.store(region | OPEN, Ordering::SeqCst);
        if shared.num_sleeping.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleepers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            shared.wake.notify_all();
        }
        shared.run_tasks(0, region);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & (REGION - 1) != 0 {
            spins += 1;
            if spins < SPINS_BEFORE_SLEEP { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Some(panic) = shared.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.sleepers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).closing = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, thread: usize) {
        let mut last_region = 0;
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Acquire);
            let region = state & !(OPEN | (REGION - 1));
            if state & OPEN != 0 && region != last_region {
                if self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    last_region = region;
                    self.run_tasks(thread, region);
                    self.state.fetch_sub(1, Ordering::AcqRel);
                    spins = 0;
                }
                continue;
            }
            spins += 1;
            if spins < SPINS_BEFORE_SLEEP {
                std::hint::spin_loop();
                continue;
            }
            let mut sleepers = self.sleepers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            self.num_sleeping.fetch_add(1, Ordering::SeqCst);
            loop {
                if sleepers.closing {
                    return;
                }
                let state = self.state.load(Ordering::SeqCst);
                if state & OPEN != 0 && state & !(OPEN | (REGION - 1)) != last_region {
                    break;
                }
                sleepers = self.wake.wait(sleepers).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            self.num_sleeping.fetch_sub(1, Ordering::SeqCst);
            spins = 0;
        }
    }

    /// Runs the tasks of a thread, and what is left of those of the threads behind it.
    fn run_tasks(&self, thread: usize, region: u64) {
        let (num_tasks, threads) = (self.num_tasks.load(Ordering::Relaxed), self.own_tasks.len());
        // SAFETY: the task was published before the region opened, and its owner waits until everyone has left.
        let task = unsafe { &*(*self.task.get()).expect("an open region has a task") };
        IN_REGION.set(true);
        for owner in (thread..threads).chain(0..thread) {
            let count = num_tasks.saturating_sub(owner).div_ceil(threads);
            while let Some(i) = self.own_tasks[owner].take(region, count) {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(owner + i * threads))) {
                    *self.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(panic);
                }
            }
        }
        release_thread();
        IN_REGION.set(false);
    }
}

/// A pointer into an output that several tasks write, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<T>(*mut T, usize);

// SAFETY: whoever takes parts of it promises that they do not overlap.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// Wraps an output for the length of a region.
    pub(crate) fn new(slice: &mut [T]) -> Self {
        SharedMut(slice.as_mut_ptr(), slice.len())
    }

    /// Elements `range` of the output.
    ///
    /// # Safety
    /// No two live parts may overlap, and none may outlive the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }

    /// The same, numbered as if so many elements were before it, which nobody may touch.
    pub(crate) fn begun_before(self, elements: usize) -> Self {
        SharedMut(self.0.wrapping_sub(elements), 0)
    }

    /// The start of the output.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once() {
        let pool = Pool::new(4);
        for n in [0, 1, 2, 3, 100, 1000] {
            for _ in 0..200 {
                let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn each_thread_has_one_of_so_many_tasks() {
        const THREADS: usize = 3;
        let (pool, caller) = (Pool::new(THREADS), std::thread::current().id());
        for _ in 0..100 {
            // Nobody is done before all are there.
            let all_are_there = std::sync::Barrier::new(THREADS);
            let others = AtomicUsize::new(0);
            pool.run(4 * THREADS, &|i| {
                let thread = std::thread::current();
                let is_own = match i % THREADS {
                    0 => thread.id() == caller,
                    owner => thread.name() == Some(&format!("strata-cpu-{owner}")[..]),
                };
                others.fetch_add(usize::from(!is_own), Ordering::Relaxed);
                all_are_there.wait();
            });
            assert_eq!(others.into_inner(), 0);
        }
    }

    #[test]
    fn tasks_of_a_thread_are_counted_anew_in_each_region_and_to_the_most_there_are() {
        const MOST: usize = (1 << TAKEN_BITS) - 1;
        for region in [REGION, 7 * REGION, REGION << 40, 0u64.wrapping_sub(2 * REGION) & !OPEN] {
            let tasks = OwnTasks(AtomicU64::new(0));
            assert_eq!([(); 3].map(|()| tasks.take(region, 2)), [Some(0), Some(1), None]);
            assert_eq!(tasks.take(region + REGION, 0), None);
            assert_eq!([(); 2].map(|()| tasks.take(region + REGION, MOST)), [Some(0), Some(1)]);
            tasks.0.fetch_add(MOST as u64 - 3, Ordering::Relaxed);
            assert_eq!([(); 2].map(|()| tasks.take(region + REGION, MOST)), [Some(MOST - 1), None]);
            assert_eq!(tasks.take(region, 1), Some(0));
        }
    }

    #[test]
    fn more_tasks_than_a_thread_counts_are_all_run() {
        let pool = Pool::new(2);
        let n = 2 * ((1 << TAKEN_BITS) - 1) + 3;
        let last = AtomicUsize::new(0);
        pool.run(n, &|i| {
            if i + 4 > n {
                last.fetch_add(1 << (8 * (n - 1 - i)), Ordering::Relaxed);
            }
        });
        assert_eq!(last.into_inner(), 0x01_0101);
    }

    #[test]
    fn sleeping_workers_wake_and_panics_reach_the_caller() {
        let pool = Pool::new(3);
        std::thread::sleep(std::time::Duration::from_millis(30));
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(10, &|i| assert!(i != 7)))).is_err());
        pool.run(10, &|_| {});
    }

    #[test]
    fn a_region_inside_a_region_runs_in_place() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(4, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 24);
    }
}
