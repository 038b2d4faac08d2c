//! Work that computes, or waits for the disk, off the threads that all connections share. It gives way to them and to the threads of the engines: a step that waits for one that has lost its
//! processor to a body waits for all of a time slice.

use std::cell::Cell;

use crate::error::{ApiError, ApiResult};
use crate::turns::Turns;

/// By how much the threads here are nicer than others: where all have something to do, they get a third of what others get.
const NICENESS: i32 = 5;

/// Runs work that waits for the disk and takes little memory. It goes on if the client hangs up meanwhile.
///
/// # Errors
/// Those of the work, or that it has panicked.
pub async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> ApiResult<T> + Send + 'static) -> ApiResult<T> {
    let work = move || {
        give_way();
        work()
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!("off the threads that serve: {error}");
        Err(ApiError::Internal("this request hit a bug in the server; its log says where".into()))
    })
}

/// As [`off_thread`], work for an owner that grows with the size of a body. Few of them run at once, by `turns`, so that requests that wait for their turn hold their bodies and nothing else.
///
/// # Errors
/// As there.
pub async fn in_turn<T: Send + 'static>(
    (turns, owner): (&Turns, &str),
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let turn = turns.take(owner).await;
    // The turn goes along with the work.
    off_thread(move || {
        let _turn = turn;
        work()
    })
    .await
}

/// Lowers the priority of this thread, once. It is the runtime's, and does nothing but such work.
fn give_way() {
    thread_local! {
        static GIVES_WAY: Cell<bool> = const { Cell::new(false) };
    }
    // Elsewhere than on Linux it would be that of the process.
    if cfg!(target_os = "linux") && !GIVES_WAY.replace(true) {
        // Where the system refuses, work is as urgent as any.
        let _ = rustix::process::nice(NICENESS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn work_gives_way_to_the_threads_that_serve() {
        let niceness = || rustix::process::nice(0).unwrap();
        let before = niceness();
        for _ in 0..3 {
            let there = off_thread(move || Ok(niceness())).await.unwrap();
            assert_eq!(there, (before + NICENESS).min(19), "once and not each time");
        }
        assert_eq!(niceness(), before);
    }
}
