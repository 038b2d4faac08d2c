//! Which pictures are to be seen before prompts can go on, and who holds what was seen.
//!
//! A prompt is computed up to its next picture that was not seen. What was seen of a picture is held until its tokens are in the cache; what finds no room in the gallery beside what
//! is held waits. Nobody holds a later picture and waits for an earlier one, so that what is held always serves to go on.

use std::collections::BTreeMap;

use super::{Batcher, STEP_TOKENS};
use crate::api::{Client, Failure};
use crate::compute::Compute;
use crate::pictures::{Picture, PictureId};

impl<C: Compute> Batcher<C> {
    /// The next picture that a session's work waits for, if it may be seen now: of which job, and which of its pictures.
    pub(crate) fn next_to_see(&mut self, compute: &C, client: &Client) -> Option<(u64, usize, Picture)> {
        let number = self.sessions.get(client).map(|s| s.number)?;
        let with_pictures = |job: &u64| self.jobs[job].session == number && !self.jobs[job].plan.pictures.is_empty();
        for id in self.prefilling.iter().copied().filter(with_pictures).collect::<Vec<u64>>() {
            if let Err(error) = self.look_up_prefix(compute, id) {
                self.broken.push((id, error));
            }
        }
        let prompts = self.prefilling.iter().filter(|id| self.jobs[id].session == number);
        let prompts = prompts.map(|id| (*id, self.jobs[id].computed));
        let again = self.running.iter().filter(|s| s.session == number).map(|s| (s.job, s.cached));
        let next = prompts.chain(again).find_map(|(id, from)| self.next_unseen(id, from).map(|index| (id, index)));
        let (id, index) = next?;
        let picture = self.jobs.get(&id)?.plan.pictures.get(index)?.clone();
        Some((id, index, picture))
    }

    /// The first picture of a job that a step from `from` on would touch and that is to be seen for it, if it may be now.
    fn next_unseen(&self, id: u64, from: usize) -> Option<usize> {
        let (index, job) = (self.first_unseen(id, from)?, self.jobs.get(&id)?);
        let picture = &job.plan.pictures[index];
        (self.gallery.has(&picture.id) || self.may_see(&job.asked.client.owner, picture)).then_some(index)
    }

    /// The same, if there is room for what is seen.
    fn first_unseen(&self, id: u64, from: usize) -> Option<usize> {
        let job = self.jobs.get(&id)?;
        let pictures = &job.plan.pictures;
        let first = pictures.partition_point(|picture| picture.tokens().end <= from);
        let touched = (first..pictures.len()).take_while(|&i| pictures[i].first < from + STEP_TOKENS.1);
        let index = touched.into_iter().find(|&i| !self.sights.contains_key(&(id, i)))?;
        let picture = &pictures[index];
        let has_room = self.gallery.is_held(&picture.id) || self.gallery.has_room(self.seen_bytes(picture));
        has_room.then_some(index)
    }

    /// Whose prompts wait until pictures of other owners were seen.
    pub(crate) fn waiting_to_see(&self) -> impl Iterator<Item = &Client> {
        let prompts = self.prefilling.iter().map(|id| (*id, self.jobs[id].computed));
        let again = self.running.iter().map(|s| (s.job, s.cached));
        let waits = |(id, from): &(u64, usize)| {
            let client = &self.jobs[id].asked.client;
            !self.sees_for(&client.owner) && !self.may_go_on(*id, *from) && self.first_unseen(*id, *from).is_some()
        };
        prompts.chain(again).filter(waits).map(|(id, _)| &self.jobs[&id].asked.client)
    }

    fn seen_bytes(&self, picture: &Picture) -> u64 {
        picture.grid.patches() as u64 * self.seen_bytes_per_token
    }

    /// Takes what was seen before of a picture for a job, if it is still there.
    pub(crate) fn recall(&mut self, job: u64, index: usize, picture: &Picture) -> bool {
        // While it was being seen for this job, another owner's may have been done with the same picture, and this job have taken that.
        if self.sights.contains_key(&(job, index)) {
            return true;
        }
        let seen = self.gallery.get(&picture.id).filter(|_| self.jobs.contains_key(&job));
        seen.is_some_and(|seen| {
            self.gallery.hold(&picture.id);
            self.sights.insert((job, index), (picture.id, seen));
            true
        })
    }

    /// What was seen before of a picture.
    pub(crate) fn seen(&mut self, id: &PictureId) -> Option<C::Seen> {
        self.gallery.get(id)
    }

    /// Whether what was seen of a picture is there.
    pub(crate) fn has_seen(&self, picture: &Picture) -> bool {
        self.gallery.has(&picture.id)
    }

    /// Whether a picture may be seen for an owner now: one at a time of each, and between the blocks of another's at most half of the memory that is left, so that there is some for
    /// the next who comes.
    pub(crate) fn may_see(&self, owner: &str, picture: &Picture) -> bool {
        let taken: usize = self.seeing.iter().map(|(_, tokens)| tokens).sum();
        let left = self.picture_tokens.saturating_sub(taken);
        let room = if self.seeing.is_empty() { left } else { left / 2 };
        picture.grid.patches() <= room && !self.sees_for(owner)
    }

    /// Whether a picture of an owner is being seen.
    pub(crate) fn sees_for(&self, owner: &str) -> bool {
        self.seeing.iter().any(|(other, _)| **other == *owner)
    }

    /// Keeps what was seen of a picture.
    pub(crate) fn keep_seen(&mut self, picture: &Picture, seen: &C::Seen) {
        let bytes = self.seen_bytes(picture);
        self.gallery.keep(picture.id, seen, bytes);
    }

    /// Fails a job of which a picture was not seen.
    pub(crate) fn not_seen(&mut self, job: u64, failure: Failure) {
        self.fail_job(job, failure);
    }

    /// Whether an open request shows a picture.
    pub(crate) fn shows(&self, id: &PictureId) -> bool {
        self.jobs.values().any(|job| job.plan.pictures.iter().any(|picture| picture.id == *id))
    }

    /// Up to where a sequence of a job can be computed from `from` on with what was seen; anywhere, if there is no other picture.
    pub(super) fn seen_until(&self, id: u64, from: usize) -> usize {
        let Some(job) = self.jobs.get(&id) else { return from };
        let pictures = &job.plan.pictures;
        let first = pictures.partition_point(|picture| picture.tokens().end <= from);
        let unseen = (first..pictures.len()).find(|&i| !self.sights.contains_key(&(id, i)));
        unseen.map_or(usize::MAX, |i| pictures[i].first.max(from))
    }

    /// Whether a sequence of a job could do something from `from` on: be computed, or have a picture seen.
    pub(super) fn may_go_on(&self, id: u64, from: usize) -> bool {
        let waits_for_lookup = self.jobs.get(&id).is_some_and(|job| job.admitted && !job.begun && !job.looked_up);
        waits_for_lookup || self.seen_until(id, from) > from || self.next_unseen(id, from).is_some()
    }

    /// Lets go of what was seen of pictures whose tokens nobody has to compute.
    pub(super) fn let_go_of_sights(&mut self) {
        if self.sights.is_empty() {
            return;
        }
        // Up to where each job has computed its prompt everywhere.
        let mut computed: BTreeMap<u64, usize> = self.prefilling.iter().map(|id| (*id, self.jobs[id].computed)).collect();
        for s in &self.running {
            let least = computed.entry(s.job).or_insert(s.cached);
            *least = (*least).min(s.cached);
        }
        let is_over = |(id, index): &(u64, usize)| match (self.jobs.get(id), computed.get(id)) {
            (Some(job), Some(&computed)) => job.plan.pictures[*index].tokens().end <= computed,
            _ => true,
        };
        let over: Vec<(u64, usize)> = self.sights.keys().filter(|key| is_over(key)).copied().collect();
        for key in over {
            self.sights.remove(&key).iter().for_each(|(id, _)| self.gallery.let_go(id));
        }
    }

    /// What is wrong with what is held, if anything.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn audit_sights(&self) -> Result<(), String> {
        let mut holders = std::collections::HashMap::new();
        for (id, _) in self.sights.values() {
            *holders.entry(*id).or_insert(0) += 1;
        }
        self.gallery.audit(&holders)?;
        match self.sights.keys().find(|(job, _)| !self.jobs.contains_key(job)) {
            Some((job, index)) => Err(format!("picture {index} of job {job} is held, which is over")),
            None => Ok(()),
        }
    }
}
