//! Work that computes, or waits for the disk, off the threads that all connections share.

use crate::error::{ApiError, ApiResult};
use crate::turns::Turns;

/// Runs work that waits for the disk and takes little memory. It goes on if the client hangs up meanwhile.
///
/// # Errors
/// Those of the work, or that it has panicked.
pub async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> ApiResult<T> + Send + 'static) -> ApiResult<T> {
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
