//! What is kept of the states of sequences for those who begin alike.
//!
//! A state is that of one moment. Worth keeping is what a prompt left behind where its full pages end, for whoever asks again or for more; where one prompt was seen to part from
//! another, for a third; and the last full page of a sample, for the next turn of its conversation and for the sample itself if it loses its room.

use super::admit::register_full_pages;
use super::pages::Prefix;
use super::{Batcher, Part};
use crate::compute::Compute;

impl<C: Compute> Batcher<C> {
    /// Keeps what is worth keeping of the sequences that a step was run for, as far as there is room.
    pub(super) fn keep_snapshots(&mut self, compute: &C, parts: &[Part]) {
        if !self.pool.has_states() {
            return;
        }
        for part in parts {
            match *part {
                Part::Prompt { job, .. } => {
                    let Some(job) = self.jobs.get(&job).filter(|job| job.forks.contains(&job.computed)) else { continue };
                    self.keep_snapshot(compute, job.prefix, job.held.state);
                }
                Part::Again { sequence, .. } | Part::Decode { sequence } => self.keep_sample(compute, sequence),
            }
        }
    }

    /// Keeps what a sample left behind at the end of a page, in the place of what was kept of it before.
    fn keep_sample(&mut self, compute: &C, sequence: usize) {
        let s = &mut self.running[sequence];
        let Some(job) = self.jobs.get(&s.job).filter(|_| s.cached.is_multiple_of(self.page_tokens)) else { return };
        register_full_pages(&mut self.pool, &job.plan, s);
        let (prefix, state, before) = (s.prefix, s.held.state, s.snapshot.take());
        before.into_iter().for_each(|before| self.pool.forget_snapshot(before));
        if self.keep_snapshot(compute, prefix, state) {
            self.running[sequence].snapshot = Some(prefix);
        }
    }

    /// Keeps a copy of a state as what `prefix` left behind. Whether it is there now that was not before.
    fn keep_snapshot(&mut self, compute: &C, prefix: Prefix, state: Option<u32>) -> bool {
        let Some((from, to)) = state.and_then(|from| Some((from, self.pool.new_snapshot(prefix)?))) else { return false };
        match compute.copy_state(&mut self.cache, from, to) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(error, "what a prefix left behind is not kept");
                self.pool.forget_snapshot(prefix);
                false
            }
        }
    }
}
