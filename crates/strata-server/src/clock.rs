//! The time by which sessions and results end. Tests move it by hand.

#[cfg(not(test))]
pub fn now() -> std::time::Instant {
    std::time::Instant::now()
}

#[cfg(test)]
pub use moved::{advance, now};

#[cfg(test)]
mod moved {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        static MOVED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    pub fn now() -> Instant {
        Instant::now() + MOVED.get()
    }

    /// Moves this thread's time forward.
    pub fn advance(by: Duration) {
        MOVED.set(MOVED.get() + by);
    }
}
