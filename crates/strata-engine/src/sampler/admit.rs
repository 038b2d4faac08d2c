//! Which samples get pages, and which give theirs up.

use std::cmp::Reverse;
use std::collections::HashMap;

use strata_model::Held;

use super::begun::{Begun, register_begun};
use super::job::{Plan, Sequence, Want};
use super::pool::CachePool;
use super::room::Room;
use super::{Batcher, SEQUENCES_MAX, Session, TOKENS_BEFORE_EVICTION};
use crate::api::Client;
use crate::compute::Compute;

impl<C: Compute> Batcher<C> {
    /// Gives sessions what they want, whoever holds least first, until the next in line finds no room.
    pub(super) fn admit(&mut self, compute: &C) {
        while std::mem::take(&mut self.may_admit) {
            let Some((client, job, want)) = self.next_want() else { return };
            let need = self.jobs[&job].room_for(want);
            if self.lanes >= SEQUENCES_MAX && !self.make_room_for_lane(&client) {
                return;
            }
            if !self.pool.try_reserve(need) && !self.make_room(&client, need) {
                return;
            }
            self.grant(compute, &client, job, want, need);
            self.may_admit = true;
        }
    }

    /// Who is next, of those that want something: the owner that holds least, its session that holds least.
    fn next_want(&self) -> Option<(Client, u64, Want)> {
        let mut owners: HashMap<&str, Room> = HashMap::new();
        for (client, session) in &self.sessions {
            *owners.entry(&*client.owner).or_default() += session.room;
        }
        let wants = self.sessions.iter().filter_map(|(client, session)| {
            let found = session.jobs.iter().find_map(|job| self.jobs[job].want().map(|want| (*job, want)));
            found.map(|(job, want)| (client, session, job, want))
        });
        let first = wants.min_by_key(|(client, session, job, _)| {
            let owner = (self.weight(owners[&*client.owner]), self.waiting_since.get(&client.owner));
            (owner, self.weight(session.room), session.lanes, session.waiting_since, *job)
        });
        first.map(|(client, _, job, want)| (client.clone(), job, want))
    }

    /// Records a promise of `need`, and begins what it is for.
    pub(super) fn grant(&mut self, compute: &C, client: &Client, job_id: u64, want: Want, need: Room) {
        self.clock += 1;
        self.lanes += 1;
        let session = self.sessions.entry(client.clone()).or_default();
        session.room += need;
        session.lanes += 1;
        // Its session's other jobs are next.
        session.jobs.retain(|&other| other != job_id);
        session.jobs.push(job_id);
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        match want {
            Want::Admission => {
                job.admitted = true;
                job.started = self.clock;
                job.reserved = job.plan.prompt_room();
                job.idle_lanes = 1;
                self.prefilling.push(job_id);
            }
            Want::Lane => {
                job.idle_lanes += 1;
                self.start_idle_lanes(compute, job_id);
            }
            Want::Restart => {
                let Some(mut sequence) = job.evicted.pop() else { return };
                job.running += 1;
                sequence.granted = need;
                sequence.reserved = need;
                sequence.started = self.clock;
                sequence.tokens_at_start = sequence.tokens.len();
                sequence.cached = 0;
                sequence.registered = 0;
                sequence.prefix = job.plan.root(job.weights.0);
                // What others left of its text need not be computed again.
                let whole_pages = sequence.known(&job.plan) / self.page_tokens;
                let found =
                    self.pool.find_promised(sequence.prefix, (0..whole_pages).map(|page| sequence.page(&job.plan, page)));
                sequence.prefix = found.prefix;
                sequence.registered = found.pages.len();
                sequence.cached = found.pages.len() * self.page_tokens;
                sequence.reserved.pages -= found.pages.len();
                sequence.held.pages = found.pages;
                let end = sequence.known(&job.plan).min(sequence.cached + self.page_tokens);
                let rest = sequence.plain(&job.plan, sequence.cached..end);
                let mut begun = self.take_state(compute, &mut sequence.reserved, &mut sequence.held, found.snapshot);
                if let Some(Begun { page, of, copied }) = self.begin_page(compute, sequence.prefix, &rest) {
                    sequence.reserved.pages -= 1;
                    sequence.held.pages.push(page);
                    sequence.cached += if copied.is_ok() { of.tokens } else { 0 };
                    begun = begun.and(copied);
                }
                self.broken.extend(begun.err().map(|error| (job_id, error)));
                self.running.push(sequence);
            }
        }
    }

    /// Takes the state that was promised to a sequence, where there are states, and begins it with a copy of `from`.
    pub(super) fn take_state(
        &mut self,
        compute: &C,
        reserved: &mut Room,
        held: &mut Held,
        from: Option<u32>,
    ) -> Result<(), String> {
        if !self.pool.has_states() {
            return Ok(());
        }
        reserved.states -= 1;
        let state = self.pool.take_state();
        held.state = Some(state);
        match from.filter(|&from| from != state) {
            Some(from) => compute.copy_state(&mut self.cache, from, state),
            None => Ok(()),
        }
    }

    /// How much this is of the cache.
    fn weight(&self, room: Room) -> u64 {
        room.weight(self.pool.size())
    }

    /// What each session may hold while others want some too.
    fn share(&self, client: &Client, of: u64) -> u64 {
        let owners = self.sessions.keys().map(|c| &c.owner).fold((0, None), |(n, last), owner| {
            // Sessions are in the order of their owners.
            if last == Some(owner) { (n, last) } else { (n + 1, Some(owner)) }
        });
        let sessions = self.sessions.keys().filter(|c| c.owner == client.owner).count();
        of / owners.0.max(1) as u64 / sessions.max(1) as u64
    }

    /// Takes room from sessions above their share until `need` can be promised to a session that stays within its own. Promises it.
    fn make_room(&mut self, client: &Client, need: Room) -> bool {
        let (held, all) = (self.sessions.get(client).map_or(0, |s| self.weight(s.room)), self.weight(self.pool.size()));
        if held > 0 && held + self.weight(need) > self.share(client, all) {
            return false;
        }
        // Evicted one by one, the excess of the others may still not suffice; then nobody passes this session until it does.
        loop {
            let excess = |(other, session): (&Client, &Session)| {
                let excess = self.weight(session.room).saturating_sub(self.share(other, all));
                (other != client && excess > 0).then(|| (excess, other.clone()))
            };
            let mut victims: Vec<(u64, Client)> = self.sessions.iter().filter_map(excess).collect();
            victims.sort_by_key(|(excess, _)| Reverse(*excess));
            if !victims.iter().any(|(_, victim)| self.evict_from(victim)) {
                return false;
            }
            if self.pool.try_reserve(need) {
                return true;
            }
        }
    }

    /// Takes a sample's place from the session with most of them, for one with fewer than its share.
    fn make_room_for_lane(&mut self, client: &Client) -> bool {
        let held = self.sessions.get(client).map_or(0, |s| s.lanes);
        let share = |client: &Client| self.share(client, SEQUENCES_MAX as u64).max(1) as usize;
        if held >= share(client) {
            return false;
        }
        let above = |(other, session): (&Client, &Session)| {
            (other != client && session.lanes > share(other)).then(|| (session.lanes, other.clone()))
        };
        let victim = self.sessions.iter().filter_map(above).max();
        victim.is_some_and(|(_, victim)| self.evict_from(&victim))
    }

    /// Takes back the youngest promise of a session: one that is not in use, else a running sample's, else a prompt's. Its last one only
    /// once it has got somewhere with it. Answers whether there was one.
    fn evict_from(&mut self, client: &Client) -> bool {
        let Some(session) = self.sessions.get(client) else { return false };
        let (number, jobs) = (session.number, session.jobs.clone());
        for id in &jobs {
            let Some(job) = self.jobs.get_mut(id) else { continue };
            if job.idle_lanes > 0 && job.idle_lanes + job.running > 1 {
                job.idle_lanes -= 1;
                let own = job.plan.own_room();
                self.pool.unreserve(own);
                self.take_back(client, own, 1);
                return true;
            }
        }
        let own = self.running.iter().enumerate().filter(|(_, s)| s.session == number);
        let sequence = own.max_by_key(|(_, s)| s.started);
        let sequence = sequence.map(|(i, s)| (s.started, i));
        let prompt = self.prefilling.iter().filter(|id| self.jobs[id].session == number);
        let prompt = prompt.map(|id| (self.jobs[id].started, *id)).max();
        let is_last = session.lanes <= 1;
        match (sequence, prompt) {
            (Some((at, i)), prompt) if prompt.is_none_or(|(other, _)| other < at) => {
                let s = &self.running[i];
                let Some(job) = self.jobs.get(&s.job) else { return false };
                let again = s.tokens_at_start + job.plan.prompt.len();
                let drawn = s.tokens.len() - s.tokens_at_start;
                if is_last && drawn < TOKENS_BEFORE_EVICTION + again / 4 {
                    return false;
                }
                self.evict_sequence(i);
                true
            }
            (_, Some((_, id))) if !is_last => {
                self.evict_prompt(id);
                true
            }
            _ => false,
        }
    }

    fn evict_sequence(&mut self, index: usize) {
        self.evictions += 1;
        let mut sequence = self.running.remove(index);
        self.let_go(&mut sequence);
        let id = sequence.job;
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.evicted.push(sequence);
        if job.running + job.idle_lanes == 0 {
            self.give_up_prompt(id);
        }
    }

    /// Sends a job whose prompt is being computed back to where it waits to be admitted. What is computed stays in the prefix cache for a while.
    fn evict_prompt(&mut self, id: u64) {
        self.evictions += 1;
        self.prefilling.retain(|&other| other != id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let (idle, lanes) = (job.idle_room(), std::mem::take(&mut job.idle_lanes));
        self.pool.unreserve(idle);
        let client = job.asked.client.clone();
        self.take_back(&client, idle, lanes);
        self.give_up_prompt(id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.computed = 0;
        job.looked_up = false;
        job.prefix = job.plan.root(job.weights.0);
    }

    /// Lets go of the prompt of a job that has no pages left for its samples; those that have begun begin again from their first token.
    pub(super) fn give_up_prompt(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !job.admitted {
            return;
        }
        job.admitted = false;
        let unstarted = std::mem::take(&mut job.unstarted);
        job.evicted.extend(unstarted);
        self.pool.unreserve(std::mem::take(&mut job.reserved));
        self.pool.release(std::mem::take(&mut job.held));
        let (client, room) = (job.asked.client.clone(), job.plan.prompt_room());
        self.take_back(&client, room, 0);
        self.may_admit = true;
    }

    /// Takes what was promised to a session off its account.
    pub(super) fn take_back(&mut self, client: &Client, room: Room, lanes: usize) {
        self.lanes -= lanes;
        self.may_admit = true;
        if let Some(session) = self.sessions.get_mut(client) {
            session.room -= room;
            session.lanes -= lanes;
            session.waiting_since = self.clock;
            self.waiting_since.insert(client.owner.clone(), self.clock);
        }
    }

    /// Takes away what a sequence holds, and keeps in the prefix cache what is full of its pages.
    pub(super) fn let_go(&mut self, sequence: &mut Sequence) {
        self.pool.unreserve(std::mem::take(&mut sequence.reserved));
        if let Some(job) = self.jobs.get_mut(&sequence.job) {
            register_full_pages(&mut self.pool, &job.plan, sequence);
            let whole = sequence.registered * self.page_tokens;
            let rest = sequence.plain(&job.plan, whole..sequence.cached);
            register_begun(&mut self.pool, sequence.prefix, &rest, sequence.held.pages.get_mut(sequence.registered));
            job.running -= 1;
            let client = job.asked.client.clone();
            self.take_back(&client, std::mem::take(&mut sequence.granted), 1);
        }
        self.pool.release(std::mem::take(&mut sequence.held));
        sequence.registered = 0;
        sequence.cached = 0;
    }
}

/// Registers the pages of a sequence that are full and are not yet.
pub(super) fn register_full_pages(pool: &mut CachePool, plan: &Plan, sequence: &mut Sequence) {
    let full = sequence.registered..plan.pages_in(sequence.cached);
    for page in full {
        let text = sequence.page(plan, page);
        let Some(held) = sequence.held.pages.get_mut(page) else { return };
        sequence.prefix = pool.register(sequence.prefix, text, held);
        sequence.registered = page + 1;
    }
}
