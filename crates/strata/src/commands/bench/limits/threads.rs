//! The same work on all threads during the same moment.

use std::time::{Duration, Instant};

/// How long threads get to start before the clock does.
const START: Duration = Duration::from_millis(3);

/// What all threads together do a second, in the unit that `work` answers in. Each thread gets a value that `prepare` makes and calls `work` on it
/// again and again until the window ends. One that starts late, or is interrupted, counts from the start of the window all the same.
pub(super) fn per_second<T>(
    threads: usize,
    window: Duration,
    prepare: impl Fn(usize) -> T + Sync,
    work: impl Fn(&mut T) -> f64 + Sync,
) -> f64 {
    let start = Instant::now() + START;
    let (prepare, work) = (&prepare, &work);
    std::thread::scope(|scope| {
        let run = |thread| {
            move || {
                let mut state = prepare(thread);
                while Instant::now() < start {
                    std::hint::spin_loop();
                }
                let mut done = 0.0;
                loop {
                    done += work(&mut state);
                    let elapsed = start.elapsed();
                    if elapsed >= window {
                        return done / elapsed.as_secs_f64();
                    }
                }
            }
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the loops do not panic")).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_all_threads_is_added_up() {
        let window = Duration::from_millis(20);
        let rate = per_second(3, window, |thread| Some(thread as f64), |state| state.take().unwrap_or(0.0));
        // Thread 0 does nothing, threads 1 and 2 do 3 units of work together, in the window or what it took them beyond.
        assert!(rate > 0.0 && rate <= 3.0 / window.as_secs_f64(), "{rate}");
    }
}
