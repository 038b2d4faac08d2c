//! Memory of requests on their way in: bodies as they arrive, what they inflate to, and what they decode to, until they are handed on.
//!
//! One budget for the whole server. Bytes are charged as they come to exist, never as they are announced, and let go with the [`Charge`].
//! A part is kept for bodies of a few KiB, so that polls and heartbeats pass while large bodies fill the rest.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::error::{ApiError, ApiResult};
use crate::limits;

/// Bytes of one permit: semaphores count in `u32`, and nobody needs to know it finer.
const PERMIT_BYTES: usize = 1 << 10;
/// The part of the budget that is kept for small bodies.
const SMALL_PART: usize = 16;

/// The budget; cheap to clone.
#[derive(Clone)]
pub struct Transit {
    shared: Arc<Shared>,
}

struct Shared {
    bytes_max: usize,
    /// What is left of them for one request: a request beyond it would wait for ever.
    request_bytes_max: usize,
    large: Semaphore,
    small: Semaphore,
}

impl Transit {
    /// A budget of `bytes_max`.
    pub fn new(bytes_max: usize) -> Self {
        let permits = (bytes_max / PERMIT_BYTES).clamp(2, u32::MAX as usize);
        let small = (permits / SMALL_PART).max(1);
        let large = permits - small;
        let shared = Shared {
            bytes_max,
            request_bytes_max: large * PERMIT_BYTES,
            large: Semaphore::new(large),
            small: Semaphore::new(small),
        };
        Transit { shared: Arc::new(shared) }
    }

    /// Its size.
    pub fn bytes_max(&self) -> usize {
        self.shared.bytes_max
    }

    /// What one request may take of it.
    pub fn request_bytes_max(&self) -> usize {
        self.shared.request_bytes_max
    }

    /// Bytes that are not charged to anyone.
    #[cfg(test)]
    pub fn bytes_free(&self) -> usize {
        (self.shared.large.available_permits() + self.shared.small.available_permits()) * PERMIT_BYTES
    }

    /// A charge of nothing yet.
    pub fn charge(&self) -> Charge {
        Charge { transit: self.clone(), bytes: 0, small_permits: 0, large_permits: 0 }
    }
}

/// What one request takes of the budget; given back when dropped.
pub struct Charge {
    transit: Transit,
    bytes: usize,
    small_permits: usize,
    large_permits: usize,
}

impl Charge {
    /// Bytes charged so far.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The budget that is charged.
    pub fn transit(&self) -> &Transit {
        &self.transit
    }

    /// Charges more, at once or not at all.
    ///
    /// # Errors
    /// If there is no room, upon which the client should send the request again later.
    pub fn try_grow(&mut self, bytes: usize) -> ApiResult<()> {
        let missing = self.missing_permits(bytes)?;
        if missing > 0 && !self.try_take(missing) {
            return Err(self.no_room());
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Charges more, and waits a moment for others to finish where there is no room.
    ///
    /// # Errors
    /// If there still is none.
    pub async fn grow(&mut self, bytes: usize) -> ApiResult<()> {
        let missing = self.missing_permits(bytes)?;
        if missing > 0 && !self.try_take(missing) {
            let wait: Duration = limits::TRANSIT_WAIT;
            // Fits in u32: the budget has no more permits than that.
            let waiting = self.transit.shared.large.acquire_many(missing as u32);
            match tokio::time::timeout(wait, waiting).await {
                Ok(Ok(permit)) => permit.forget(),
                _ => return Err(self.no_room()),
            }
            self.large_permits += missing;
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Gives back what is no longer held.
    pub fn shrink(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let surplus = self.small_permits + self.large_permits - self.bytes.div_ceil(PERMIT_BYTES);
        let large = surplus.min(self.large_permits);
        self.give_back(large, surplus - large);
    }

    fn missing_permits(&self, bytes: usize) -> ApiResult<usize> {
        let total = self.bytes.saturating_add(bytes);
        let bytes_max = self.transit.shared.request_bytes_max;
        if total > bytes_max {
            return Err(ApiError::TooLarge(format!(
                "this request and what it becomes decoded take more than {}, which is what this server has for one",
                limits::shown_bytes(bytes_max)
            )));
        }
        Ok(total.div_ceil(PERMIT_BYTES).saturating_sub(self.small_permits + self.large_permits))
    }

    fn try_take(&mut self, permits: usize) -> bool {
        let shared = &self.transit.shared;
        let is_small = (self.small_permits + self.large_permits + permits) * PERMIT_BYTES <= limits::BODY_INLINE_BYTES_MAX;
        if is_small && let Ok(permit) = shared.small.try_acquire_many(permits as u32) {
            permit.forget();
            self.small_permits += permits;
            return true;
        }
        let Ok(permit) = shared.large.try_acquire_many(permits as u32) else { return false };
        permit.forget();
        self.large_permits += permits;
        true
    }

    fn give_back(&mut self, large: usize, small: usize) {
        self.transit.shared.large.add_permits(large);
        self.transit.shared.small.add_permits(small);
        self.large_permits -= large;
        self.small_permits -= small;
    }

    fn no_room(&self) -> ApiError {
        ApiError::Busy(format!(
            "the {} that this server has for requests on their way in are taken; send this one again in a moment",
            limits::shown_bytes(self.transit.shared.bytes_max)
        ))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.give_back(self.large_permits, self.small_permits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_charged_comes_back() {
        let transit = Transit::new(1 << 20);
        let free = transit.bytes_free();
        let mut charge = transit.charge();
        charge.try_grow(100).unwrap();
        charge.try_grow(500_000).unwrap();
        assert_eq!(transit.bytes_free(), free - 500_100usize.next_multiple_of(1024));
        charge.shrink(499_900);
        assert_eq!(transit.bytes_free(), free - 1024);
        drop(charge);
        assert_eq!(transit.bytes_free(), free);
    }

    #[test]
    fn small_bodies_pass_when_large_ones_have_taken_the_rest() {
        let transit = Transit::new(1 << 20);
        let mut large = transit.charge();
        large.try_grow((1 << 20) - (1 << 16)).unwrap();
        // Not even alone, which is no matter of waiting.
        assert!(matches!(large.try_grow(1), Err(ApiError::TooLarge(_))));
        let mut another = transit.charge();
        assert!(matches!(another.try_grow(100_000), Err(ApiError::Busy(_))));
        another.try_grow(1000).unwrap();
        assert!(matches!(another.try_grow(100_000), Err(ApiError::Busy(_))));
        assert!(matches!(another.try_grow(2 << 20), Err(ApiError::TooLarge(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_budget_is_waited_for_and_then_refused() {
        let transit = Transit::new(1 << 20);
        let mut first = transit.charge();
        first.try_grow(900_000).unwrap();
        let mut second = transit.charge();
        let started = tokio::time::Instant::now();
        assert!(matches!(second.grow(200_000).await, Err(ApiError::Busy(_))));
        assert_eq!(started.elapsed(), limits::TRANSIT_WAIT);
        let freeing = async {
            tokio::time::sleep(limits::TRANSIT_WAIT / 2).await;
            drop(first);
        };
        let (grown, ()) = tokio::join!(second.grow(200_000), freeing);
        grown.unwrap();
    }
}
