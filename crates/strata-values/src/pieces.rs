//! Numbers of the host, worked on in pieces by several threads.

use std::sync::{Mutex, OnceLock, PoisonError};

/// Runs a task for each number below a count, once, in any order, on as many threads as it has; [`strata_tensor::Memory::on_threads`] is one.
pub type Run<'r> = &'r dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// A [`Run`] on the thread that calls it.
pub fn alone(num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    (0..num_tasks).for_each(task);
}

/// Has `fill` write all of `out`, pieces of `piece_bytes` and a rest, each with the number of the piece.
pub fn fill_pieces(run: Run<'_>, out: &mut [u8], piece_bytes: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) {
    let count = out.len().div_ceil(piece_bytes.max(1));
    // Whoever is free takes the next: a lock for some ten thousand numbers.
    let pieces = Mutex::new(out.chunks_mut(piece_bytes.max(1)).enumerate());
    run(count, &|_| {
        let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        if let Some((i, piece)) = next {
            fill(i, piece);
        }
    });
}

/// The least number below `count` that `find` finds something for, and what it is.
pub(crate) fn first_found<T: Send + Sync>(
    run: Run<'_>,
    count: usize,
    find: &(dyn Fn(usize) -> Option<T> + Sync),
) -> Option<(usize, T)> {
    let found: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    run(count, &|i| {
        if let Some(value) = find(i) {
            let _ = found[i].set(value);
        }
    });
    found.into_iter().enumerate().find_map(|(i, value)| Some((i, value.into_inner()?)))
}

/// A [`Run`] of the last task first.
#[cfg(test)]
pub(crate) fn backwards(num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    (0..num_tasks).rev().for_each(task);
}
