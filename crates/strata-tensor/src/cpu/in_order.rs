//! Jobs of which each thread has whole ones, while what they make is taken in their order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};

use super::threads::Pool;
use crate::Result;

/// How far the jobs are.
struct Progress<R, T> {
    /// The next to begin.
    next: usize,
    /// The next whose result is taken.
    next_taken: usize,
    /// Of those that have begun and whose results are not taken.
    weight: usize,
    /// Results that wait for those before them.
    made: BTreeMap<usize, R>,
    /// What takes results; `None` while a thread does.
    take: Option<T>,
    /// How it ended, if it did so early.
    failed: Option<Result<()>>,
}

struct Line<R, T> {
    progress: Mutex<Progress<R, T>>,
    changed: Condvar,
}

impl<R, T> Line<R, T> {
    fn lock(&self) -> MutexGuard<'_, Progress<R, T>> {
        // Jobs and takers run without the lock.
        self.progress.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Has all threads leave.
    fn fail(&self, how: Result<()>) {
        self.lock().failed.get_or_insert(how);
        self.changed.notify_all();
    }
}

/// Has the others leave if a job or taker panics, whose results they would wait for.
struct Unwinding<'l, R, T>(&'l Line<R, T>);

impl<R, T> Drop for Unwinding<'_, R, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Ok(()));
        }
    }
}

/// Runs `job(i)` for each of `weights` on some thread of `pool`, and `take(i, result)` for one after another, in their order. What has begun and is not taken weighs at most `weight_max` together, but that
/// one job may weigh more.
///
/// # Errors
/// The first of a job or of `take`; jobs that had not begun are left out then.
pub(crate) fn in_order<R: Send, T: FnMut(usize, R) -> Result<()> + Send>(
    pool: &Pool,
    weights: &[usize],
    weight_max: usize,
    job: impl Fn(usize) -> Result<R> + Sync,
    take: T,
) -> Result<()> {
    let progress = Progress { next: 0, next_taken: 0, weight: 0, made: BTreeMap::new(), take: Some(take), failed: None };
    let line = Line { progress: Mutex::new(progress), changed: Condvar::new() };
    pool.run(pool.num_threads().min(weights.len()), &|_| {
        let _unwinding = Unwinding(&line);
        while let Some(i) = next_job(&line, weights, weight_max) {
            match job(i) {
                Ok(result) => take_all(&line, weights, (i, result)),
                Err(error) => line.fail(Err(error)),
            }
        }
    });
    line.progress.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).failed.unwrap_or(Ok(()))
}

/// The next job that nobody has, once it may begin.
fn next_job<R, T>(line: &Line<R, T>, weights: &[usize], weight_max: usize) -> Option<usize> {
    let mut progress = line.lock();
    loop {
        let weight = *weights.get(progress.next).filter(|_| progress.failed.is_none())?;
        if progress.weight == 0 || progress.weight + weight <= weight_max {
            progress.weight += weight;
            progress.next += 1;
            return Some(progress.next - 1);
        }
        progress = line.changed.wait(progress).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
}

/// Takes this result and those behind it that are there, if it is their turn and no thread is at it.
fn take_all<R, T: FnMut(usize, R) -> Result<()>>(line: &Line<R, T>, weights: &[usize], (i, result): (usize, R)) {
    let mut progress = line.lock();
    progress.made.insert(i, result);
    let Some(mut take) = progress.take.take() else { return };
    loop {
        let i = progress.next_taken;
        let Some(result) = progress.made.remove(&i).filter(|_| progress.failed.is_none()) else { break };
        drop(progress);
        if let Err(error) = take(i, result) {
            line.fail(Err(error));
        }
        progress = line.lock();
        progress.next_taken += 1;
        progress.weight -= weights[i];
        line.changed.notify_all();
    }
    progress.take = Some(take);
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::Error;

    #[test]
    fn results_are_taken_in_order_and_no_more_are_on_their_way_than_there_is_room_for() {
        let weights: Vec<usize> = (0..200).map(|i| if i % 50 == 49 { 30 } else { 1 + i % 7 }).collect();
        for (threads, weight_max) in [(1, 20), (2, 20), (4, 7), (4, 1000), (3, 0)] {
            let (begun, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let mut taken = Vec::new();
            let job = |i: usize| {
                most.fetch_max(begun.fetch_add(weights[i], Ordering::SeqCst) + weights[i], Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros((i as u64 * 37) % 200));
                Ok(i * 3)
            };
            let take = |i: usize, result: usize| {
                assert_eq!(result, i * 3);
                begun.fetch_sub(weights[i], Ordering::SeqCst);
                taken.push(i);
                Ok(())
            };
            in_order(&Pool::new(threads), &weights, weight_max, job, take).unwrap();
            assert!(taken.into_iter().eq(0..200), "{threads} threads");
            let most = most.into_inner();
            assert!(most <= weight_max.max(30), "{threads} threads: {most} of {weight_max}");
            assert!(most == 30 || threads > 1, "one thread begins one at a time, not {most}");
        }
    }

    #[test]
    fn every_thread_has_jobs() {
        // Each waits for the other.
        let (here, pool) = (AtomicUsize::new(0), Pool::new(2));
        let job = |_| {
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            Ok(())
        };
        in_order(&pool, &[1, 1], 2, job, |_, ()| Ok(())).unwrap();
    }

    #[test]
    fn an_error_ends_it_and_so_does_a_panic() {
        let pool = Pool::new(3);
        let failing = |at: usize| {
            let (mut taken, begun) = (0, AtomicUsize::new(0));
            let refused = || Err(Error::Unsupported("not this one".into()));
            let job = |i: usize| {
                begun.fetch_add(1, Ordering::SeqCst);
                if i == at { refused() } else { Ok(i) }
            };
            let take = |i: usize, _| {
                taken += 1;
                if i + 3 == at { refused().map(drop) } else { Ok(()) }
            };
            let result = in_order(&pool, &[1; 1000], 4, job, take);
            assert!(matches!(result, Err(Error::Unsupported(_))), "{result:?}");
            (taken, begun.into_inner())
        };
        // A job; what takes, three before one that might still fail.
        let (taken, begun) = failing(2);
        assert!(taken <= 2 && begun <= 3 + 4, "{taken} of {begun}");
        let (taken, begun) = failing(10);
        assert!(taken <= 10 && begun <= 10 + 8, "{taken} of {begun}");
        for in_job in [true, false] {
            let panics = |here: bool, i: usize| {
                assert!(!here || i != 20);
                Ok(())
            };
            let run = || in_order(&pool, &[1; 1000], 4, |i| panics(in_job, i), |i, ()| panics(!in_job, i));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let mut taken = 0;
        let take = |i, j| {
            taken += usize::from(i == j);
            Ok(())
        };
        in_order(&pool, &[1; 10], 4, Ok, take).unwrap();
        assert_eq!(taken, 10);
    }
}
