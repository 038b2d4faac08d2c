//! The same work on all threads during the same moment.

use std::time::{Duration, Instant};

/// How long threads get to start before the window does.
const START: Duration = Duration::from_micros(500);

/// How long `work` took on one thread, and how much of it was done, in the unit that `work` answers in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub work: f64,
    /// From the start of the window, also where this thread began late.
    pub elapsed: Duration,
    /// Of `elapsed`, what the processor gave this thread.
    pub on_processor: Duration,
}

/// Runs `work` on all threads again and again until the window ends, each with a value that `prepare` makes.
pub(super) fn during<T>(
    window: Duration,
    threads: usize,
    prepare: impl Fn(usize) -> T + Sync,
    work: impl Fn(&mut T) -> f64 + Sync,
) -> Vec<Done> {
    let start = Instant::now() + START;
    let (prepare, work) = (&prepare, &work);
    let run = |thread| {
        move || {
            let mut state = prepare(thread);
            while Instant::now() < start {
                std::hint::spin_loop();
            }
            let processor_start = processor_time();
            let mut done = Done { work: 0.0, elapsed: Duration::ZERO, on_processor: Duration::ZERO };
            while done.elapsed < window {
                done.work += work(&mut state);
                done.elapsed = start.elapsed();
            }
            Done { on_processor: processor_time().saturating_sub(processor_start), ..done }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the loops do not panic")).collect()
    })
}

/// What the processor has given this thread.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the struct it is given. A clock that there is not leaves it at zero.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_works_until_the_window_ends() {
        let window = Duration::from_millis(20);
        let done = during(window, 3, |thread| thread as f64, std::mem::take);
        assert_eq!(done.iter().map(|d| d.work).collect::<Vec<_>>(), [0.0, 1.0, 2.0]);
        for d in done {
            assert!(d.elapsed >= window && d.on_processor > Duration::ZERO && d.on_processor <= d.elapsed, "{d:?}");
        }
    }
}
