//! Continuous batching: every step runs tokens of the live sequences and chunks of the prompts that wait, whoever sent them.
//!
//! A request is a [`Job`]. Its prompt is computed once, in chunks; its full pages go to the prefix cache. From the last prompt
//! position the first token of every sample is drawn; each sample then shares the full pages of the prompt and continues in its own copy
//! of the partly filled one.
//!
//! **Pages are promised before they are used**: a job is admitted when the pages of its prompt and of one whole sample can be
//! promised, and keeps that promise until its last sample has begun, handing it from one sample to the next. So whatever was
//! admitted can finish on what it holds, and no step can run out.
//!
//! **Pages are shared fairly**: of all sessions that want something, the one that holds least goes next, and nobody passes it. If it holds
//! less than its share and finds no room, those above theirs give up their youngest samples, which begin again later: their text
//! is kept, and computing its keys and values again gives the same bits.
//!
//! **Steps are shared fairly**: a step of several sessions takes no longer than if each in turn ran a step as small as the smallest of theirs.
//!
//! A token's logits depend on its sequence and weights alone, so nothing here changes what is sampled: not the chunks, not the cache, not the company.

mod cost;
pub(crate) mod draw;
mod job;
mod pages;
mod stop;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use strata_model::Tokenizer;

use crate::api::{Client, Failure, RequestId, StopReason};
use crate::compute::{Compute, RowResult, RowTask, StepSpan};
use crate::snapshot::WeightsId;

use cost::StepCost;
pub(crate) use draw::{DrawSettings, Drawn};
pub(crate) use job::{Asked, Plan, REQUEST_BYTES};
use job::{Job, Sequence, Want};
use pages::{PagePool, Prefix};

/// Samples that run at the same time, at most.
const SEQUENCES_MAX: usize = 256;
/// How many times the tokens that reading the weights is worth a step has, at most: with samples that draw, who wait for it, and with
/// prompts alone. Beyond it a step gets longer, and whoever comes waits for it, while each token costs hardly less: at 16 times, a step is
/// 94% arithmetic.
const STEP_PER_BASE: usize = 16;
const PREFILL_PER_BASE: usize = 32;
/// The least and the most tokens of a step by that measure.
const STEP_TOKENS: (usize, usize) = (48, 512);
/// A session's last sample keeps its pages until it has drawn this many tokens since it began, and a quarter of what it had to compute again.
const TOKENS_BEFORE_EVICTION: usize = 16;

/// What sample requests are checked against.
pub(crate) struct SamplerLimits {
    pub(crate) vocab_size: usize,
    pub(crate) max_context_tokens: usize,
    pub(crate) eos_token_ids: Vec<u32>,
    /// Tokens in a page of the cache.
    pub(crate) page_tokens: usize,
    /// Pages of the cache.
    pub(crate) pages: usize,
    /// Needed for stop strings.
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
}

/// All sampling of an engine.
pub(crate) struct Batcher<C: Compute> {
    page_tokens: usize,
    num_pages: usize,
    cache: C::Cache,
    pool: PagePool,
    jobs: BTreeMap<u64, Job<C::Frozen>>,
    by_id: HashMap<RequestId, u64>,
    next_job: u64,
    sessions: BTreeMap<Client, Session>,
    /// Since when owners wait: when they came, or last gave something back. Of those that hold as much, who has waited longest is next.
    waiting_since: HashMap<Arc<str>, u64>,
    next_session: u64,
    /// Jobs whose prompt is being computed, in the order of their admission.
    prefilling: Vec<u64>,
    running: Vec<Sequence>,
    /// Promises for samples, used or not.
    lanes: usize,
    /// Counts steps and starts.
    clock: u64,
    /// What steps were seen to cost.
    cost: StepCost,
    /// Whether something has changed since admission last found nothing to do.
    may_admit: bool,
    /// What the simulation sees.
    pub(crate) evictions: u64,
}

/// What a session has in the sampler.
#[derive(Default)]
struct Session {
    number: u64,
    /// Its jobs, in turn: the front is next to get what it wants.
    jobs: Vec<u64>,
    /// Pages promised to it.
    pages: usize,
    lanes: usize,
    /// When it came, or last gave something back.
    waiting_since: u64,
}

/// A sequence's part in a step.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Prompt tokens of a job from the first that is not computed.
    Prompt { job: u64, tokens: usize },
    /// Known tokens of `running[sequence]` that it lost with its pages.
    Again { sequence: usize, tokens: usize },
    /// The last token of `running[sequence]`.
    Decode { sequence: usize },
}

/// Where a row of a step goes.
enum RowFor {
    Score { job: u64, position: usize },
    First { job: u64 },
    Next { sequence: usize },
}

/// A step that was run: what each client had of it.
pub(crate) struct StepDone {
    /// Tokens of each session that took part.
    pub(crate) tokens: Vec<(Client, usize)>,
}

impl<C: Compute> Batcher<C> {
    pub(crate) fn new(compute: &C, num_pages: usize, page_tokens: usize) -> Self {
        Batcher {
            page_tokens,
            num_pages,
            cache: compute.new_cache(num_pages),
            pool: PagePool::new(num_pages),
            jobs: BTreeMap::new(),
            by_id: HashMap::new(),
            next_job: 0,
            sessions: BTreeMap::new(),
            waiting_since: HashMap::new(),
            next_session: 0,
            prefilling: Vec::new(),
            running: Vec::new(),
            lanes: 0,
            clock: 0,
            cost: StepCost::default(),
            may_admit: false,
            evictions: 0,
        }
    }

    /// Queues a checked request.
    pub(crate) fn submit(&mut self, plan: Plan, weights: (WeightsId, C::Frozen), asked: Asked) {
        let id = self.next_job;
        self.next_job += 1;
        self.by_id.insert(asked.id.clone(), id);
        self.waiting_since.entry(asked.client.owner.clone()).or_insert(self.clock);
        let session = self.sessions.entry(asked.client.clone()).or_insert_with(|| {
            self.next_session += 1;
            Session { number: self.next_session, waiting_since: self.clock, ..Session::default() }
        });
        session.jobs.push(id);
        self.jobs.insert(id, Job::new(plan, weights, asked, session.number));
        self.may_admit = true;
    }

    /// Fails the job of a request, if it is open, and frees all it holds.
    pub(crate) fn cancel(&mut self, request: &str, failure: &Failure) -> bool {
        let found = self.by_id.get(request).copied();
        found.is_some_and(|job| {
            self.fail_job(job, failure.clone());
            true
        })
    }

    /// Fails every job for which `is_meant` holds.
    pub(crate) fn cancel_where(&mut self, is_meant: impl Fn(&Asked) -> bool, failure: &Failure) {
        let meant: Vec<u64> = self.jobs.iter().filter(|(_, j)| is_meant(&j.asked)).map(|(&id, _)| id).collect();
        for job in meant {
            self.fail_job(job, failure.clone());
        }
    }

    /// Whether an open request samples with these weights.
    pub(crate) fn uses(&self, weights: WeightsId) -> bool {
        self.jobs.values().any(|job| job.weights.0 == weights)
    }

    /// Tokens in a page.
    pub(crate) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Empties the prefix cache.
    pub(crate) fn forget_prefixes(&mut self) {
        self.pool.forget_idle();
    }

    /// Gives the memory of free pages back to the system.
    pub(crate) fn release_memory(&mut self, compute: &C) {
        compute.release_memory(&mut self.cache, self.pool.free_pages());
    }

    /// Admits what has room, and answers the sessions that have something to run.
    pub(crate) fn runnable(&mut self, compute: &C) -> Vec<Client> {
        self.admit(compute);
        let prefilling = self.prefilling.iter().map(|job| self.jobs[job].session);
        let active: HashSet<u64> = prefilling.chain(self.running.iter().map(|s| s.session)).collect();
        self.sessions.iter().filter(|(_, s)| active.contains(&s.number)).map(|(client, _)| client.clone()).collect()
    }

    /// Runs one step for these sessions, the first in line first. Answers what each had of it.
    pub(crate) fn step(&mut self, compute: &C, order: &[Client]) -> StepDone {
        self.clock += 1;
        let (mut parts, tokens) = self.plan_step(order);
        if parts.is_empty() {
            return StepDone { tokens };
        }
        // Sequences with the same weights lie together, so that each adapter multiplies one run of tokens.
        parts.sort_by_key(|p| self.jobs[&self.job_of(p)].weights.0);
        let mut targets = Vec::new();
        let spans: Vec<StepSpan<'_, C::Frozen>> =
            parts.iter().map(|part| span(&self.jobs, &self.running, part, &mut targets)).collect();
        let num_tokens = spans.iter().map(|span| span.tokens.len()).sum();
        let (cache, start) = (&mut self.cache, compute.now());
        let done = catch_unwind(AssertUnwindSafe(|| compute.step(cache, &spans)));
        drop(spans);
        self.cost.observe(num_tokens, compute.now().saturating_sub(start));
        let error = match done {
            Ok(Ok(results)) if results.len() == targets.len() => {
                self.advance(&parts);
                self.take_results(compute, targets, results);
                return StepDone { tokens };
            }
            Ok(Ok(results)) => format!("{} results for {} rows", results.len(), targets.len()),
            Ok(Err(error)) => error,
            Err(_) => "it panicked; the server log says where".into(),
        };
        tracing::error!(error, "a sampling step failed");
        let mut jobs: Vec<u64> = parts.iter().map(|p| self.job_of(p)).collect();
        jobs.sort_unstable();
        jobs.dedup();
        for job in jobs {
            self.fail_job(job, Failure::Server(format!("sampling step: {error}")));
        }
        StepDone { tokens }
    }

    fn job_of(&self, part: &Part) -> u64 {
        match *part {
            Part::Prompt { job, .. } => job,
            Part::Again { sequence, .. } | Part::Decode { sequence } => self.running[sequence].job,
        }
    }

    // Admission.

    /// Gives sessions what they want, whoever holds least first, until the next in line finds no room.
    fn admit(&mut self, compute: &C) {
        while std::mem::take(&mut self.may_admit) {
            let Some((client, job, want)) = self.next_want() else { return };
            let need = self.jobs[&job].pages_for(want);
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
        let mut owners: HashMap<&str, usize> = HashMap::new();
        for (client, session) in &self.sessions {
            *owners.entry(&*client.owner).or_default() += session.pages;
        }
        let wants = self.sessions.iter().filter_map(|(client, session)| {
            let found = session.jobs.iter().find_map(|job| self.jobs[job].want().map(|want| (*job, want)));
            found.map(|(job, want)| (client, session, job, want))
        });
        let first = wants.min_by_key(|(client, session, job, _)| {
            let owner = (owners[&*client.owner], self.waiting_since.get(&client.owner));
            (owner, session.pages, session.lanes, session.waiting_since, *job)
        });
        first.map(|(client, _, job, want)| (client.clone(), job, want))
    }

    /// Records a promise of `need` pages, and begins what it is for.
    fn grant(&mut self, compute: &C, client: &Client, job_id: u64, want: Want, need: usize) {
        self.clock += 1;
        self.lanes += 1;
        let session = self.sessions.entry(client.clone()).or_default();
        session.pages += need;
        session.lanes += 1;
        // Its session's other jobs are next.
        session.jobs.retain(|&other| other != job_id);
        session.jobs.push(job_id);
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        match want {
            Want::Admission => {
                job.admitted = true;
                job.started = self.clock;
                job.reserved = job.plan.prompt_pages();
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
                sequence.prefix = Prefix::Root(job.weights.0);
                // What others left of its text need not be computed again.
                let whole_pages = sequence.known(&job.plan) / self.page_tokens;
                for page in 0..whole_pages {
                    let tokens: Vec<u32> = (page * self.page_tokens..(page + 1) * self.page_tokens)
                        .map(|position| sequence.token(&job.plan, position))
                        .collect();
                    let Some((found, prefix)) = self.pool.find_and_hold(sequence.prefix, &tokens) else { break };
                    sequence.pages.push(found);
                    sequence.prefix = prefix;
                }
                sequence.registered = sequence.pages.len();
                sequence.cached = sequence.pages.len() * self.page_tokens;
                sequence.reserved -= sequence.pages.len();
                self.pool.unreserve(sequence.pages.len());
                self.running.push(sequence);
            }
        }
    }

    /// What each session may hold while others want pages too.
    fn share(&self, client: &Client, of: usize) -> usize {
        let owners = self.sessions.keys().map(|c| &c.owner).fold((0, None), |(n, last), owner| {
            // Sessions are in the order of their owners.
            if last == Some(owner) { (n, last) } else { (n + 1, Some(owner)) }
        });
        let sessions = self.sessions.keys().filter(|c| c.owner == client.owner).count();
        of / owners.0.max(1) / sessions.max(1)
    }

    /// Takes pages from sessions above their share until `need` can be promised to a session that stays within its own. Promises them.
    fn make_room(&mut self, client: &Client, need: usize) -> bool {
        let held = self.sessions.get(client).map_or(0, |s| s.pages);
        if held > 0 && held + need > self.share(client, self.num_pages) {
            return false;
        }
        // Evicted one by one, the excess of the others may still not suffice; then nobody passes this session until it does.
        loop {
            let excess = |(other, session): (&Client, &Session)| {
                let share = self.share(other, self.num_pages);
                (other != client && session.pages > share).then(|| (session.pages - share, other.clone()))
            };
            let mut victims: Vec<(usize, Client)> = self.sessions.iter().filter_map(excess).collect();
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
        if held >= self.share(client, SEQUENCES_MAX).max(1) {
            return false;
        }
        let above = |(other, session): (&Client, &Session)| {
            (other != client && session.lanes > self.share(other, SEQUENCES_MAX).max(1)).then(|| (session.lanes, other.clone()))
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
                let pages = job.plan.own_pages();
                self.pool.unreserve(pages);
                self.take_back(client, pages, 1);
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
        let (lanes, own) = (std::mem::take(&mut job.idle_lanes), job.plan.own_pages());
        self.pool.unreserve(lanes * own);
        let client = job.asked.client.clone();
        self.take_back(&client, lanes * own, lanes);
        self.give_up_prompt(id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.computed = 0;
        job.looked_up = false;
        job.prefix = Prefix::Root(job.weights.0);
    }

    /// Lets go of the prompt of a job that has no pages left for its samples; those that have begun begin again from their first token.
    fn give_up_prompt(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !job.admitted {
            return;
        }
        job.admitted = false;
        let unstarted = std::mem::take(&mut job.unstarted);
        job.evicted.extend(unstarted);
        self.pool.unreserve(std::mem::take(&mut job.reserved));
        self.pool.release(&std::mem::take(&mut job.pages));
        let (client, pages) = (job.asked.client.clone(), job.plan.prompt_pages());
        self.take_back(&client, pages, 0);
        self.may_admit = true;
    }

    /// Takes what was promised to a session off its account.
    fn take_back(&mut self, client: &Client, pages: usize, lanes: usize) {
        self.lanes -= lanes;
        self.may_admit = true;
        if let Some(session) = self.sessions.get_mut(client) {
            session.pages -= pages;
            session.lanes -= lanes;
            session.waiting_since = self.clock;
            self.waiting_since.insert(client.owner.clone(), self.clock);
        }
    }

    /// Takes a sequence's pages away, and keeps in the prefix cache what is full of them.
    fn let_go(&mut self, sequence: &mut Sequence) {
        self.pool.unreserve(std::mem::take(&mut sequence.reserved));
        let pages = std::mem::take(&mut sequence.pages);
        if let Some(job) = self.jobs.get_mut(&sequence.job) {
            let full = sequence.registered..sequence.cached / self.page_tokens;
            for (page, &held) in full.clone().zip(pages.get(full).unwrap_or_default()) {
                let positions = page * self.page_tokens..(page + 1) * self.page_tokens;
                let tokens: Vec<u32> = positions.map(|p| sequence.token(&job.plan, p)).collect();
                sequence.prefix = self.pool.register(sequence.prefix, &tokens, held);
            }
            job.running -= 1;
            let client = job.asked.client.clone();
            self.take_back(&client, std::mem::take(&mut sequence.granted), 1);
        }
        self.pool.release(&pages);
        sequence.registered = 0;
        sequence.cached = 0;
    }

    // A step.

    /// What runs next, with the pages it needs, and how many tokens each session has of it.
    fn plan_step(&mut self, order: &[Client]) -> (Vec<Part>, Vec<(Client, usize)>) {
        let base = self.cost.base_tokens();
        let most = |per_base: usize| (per_base * base).clamp(STEP_TOKENS.0, STEP_TOKENS.1);
        let mut by_session = self.work_by_session();
        let number = |client| self.sessions.get(client).map_or(0, |s| s.number);
        let mut wants: Vec<SessionWork> = order.iter().map(|c| by_session.remove(&number(c)).unwrap_or_default()).collect();
        wants.iter_mut().for_each(|work| work.reading_max = most(PREFILL_PER_BASE));
        let draws = wants.iter().any(|work| !work.decodes.is_empty());
        let longest = most(if draws { STEP_PER_BASE } else { PREFILL_PER_BASE });
        let whole = wants.iter().map(SessionWork::tokens).sum();
        let smallest = wants.iter().map(SessionWork::tokens).filter(|&n| n > 0).min().unwrap_or(0);
        // If they took turns, the smallest would wait for one step of each: together it may take as long as that.
        let company = if order.len() < 2 { whole } else { order.len() * (base + smallest) - base };
        let limit = company.min(longest.max(order.len()));
        let quotas = share_among_owners(order, &wants.iter().map(SessionWork::tokens).collect::<Vec<_>>(), limit);
        let (mut parts, mut tokens) = (Vec::new(), Vec::new());
        for ((client, work), quota) in order.iter().zip(&mut wants).zip(quotas) {
            let taken = self.take_parts(work, quota, &mut parts);
            tokens.push((client.clone(), taken));
        }
        (parts, tokens)
    }

    /// What each session could run, by its number.
    fn work_by_session(&self) -> HashMap<u64, SessionWork> {
        let mut works: HashMap<u64, SessionWork> = HashMap::new();
        let mut running: Vec<(usize, &Sequence)> = self.running.iter().enumerate().collect();
        // Those that waited longest first.
        running.sort_by_key(|(_, s)| (s.last_step, s.started));
        for (i, sequence) in running {
            let work = works.entry(sequence.session).or_default();
            let missing = sequence.known(&self.jobs[&sequence.job].plan) - sequence.cached;
            if missing > 0 { work.again.push((i, missing)) } else { work.decodes.push(i) }
        }
        for id in &self.prefilling {
            let job = &self.jobs[id];
            works.entry(job.session).or_default().prompts.push((*id, job.plan.prompt.len() - job.computed));
        }
        works
    }

    /// Takes up to `quota` tokens of a session's work. Answers how many.
    fn take_parts(&mut self, work: &SessionWork, quota: usize, parts: &mut Vec<Part>) -> usize {
        let reading = work.reading();
        // Neither drawing nor reading stops while there is the other.
        let for_reading = match (reading, work.decodes.len()) {
            (0, _) => 0,
            (_, 0) => quota.min(reading),
            (_, decodes) if quota == 1 => usize::from(self.clock.is_multiple_of(2) || decodes == 0),
            (_, decodes) => reading.min((quota / 2).max(quota.saturating_sub(decodes))),
        };
        let decodes = work.decodes.len().min(quota - for_reading);
        for &sequence in &work.decodes[..decodes] {
            let s = &mut self.running[sequence];
            s.last_step = self.clock;
            if s.cached == s.pages.len() * self.page_tokens {
                s.reserved -= 1;
                s.pages.push(self.pool.take_reserved());
            }
            parts.push(Part::Decode { sequence });
        }
        let mut left = for_reading;
        for &(sequence, missing) in &work.again {
            let tokens = missing.min(left);
            if tokens == 0 {
                break;
            }
            left -= tokens;
            let s = &mut self.running[sequence];
            s.last_step = self.clock;
            while s.pages.len() * self.page_tokens < s.cached + tokens {
                s.reserved -= 1;
                s.pages.push(self.pool.take_reserved());
            }
            parts.push(Part::Again { sequence, tokens });
        }
        for &(id, _) in &work.prompts {
            if left == 0 {
                break;
            }
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            if !job.looked_up {
                look_up_prefix(job, &mut self.pool, self.page_tokens);
            }
            let tokens = left.min(job.plan.prompt.len() - job.computed);
            while job.pages.len() * self.page_tokens < job.computed + tokens {
                job.reserved -= 1;
                job.pages.push(self.pool.take_reserved());
            }
            left -= tokens;
            parts.push(Part::Prompt { job: id, tokens });
        }
        decodes + for_reading - left
    }

    /// Counts what a step put into the cache, and registers the prompt pages that became full.
    fn advance(&mut self, parts: &[Part]) {
        for part in parts {
            match *part {
                Part::Decode { sequence } => self.running[sequence].cached += 1,
                Part::Again { sequence, tokens } => self.running[sequence].cached += tokens,
                Part::Prompt { job: id, tokens } => {
                    let Some(job) = self.jobs.get_mut(&id) else { continue };
                    let full_before = job.computed / self.page_tokens;
                    job.computed += tokens;
                    for page in full_before..job.computed / self.page_tokens {
                        let tokens = &job.plan.prompt[page * self.page_tokens..(page + 1) * self.page_tokens];
                        job.prefix = self.pool.register(job.prefix, tokens, job.pages[page]);
                    }
                }
            }
        }
        let jobs = &self.jobs;
        self.prefilling.retain(|id| !jobs[id].prefilled());
    }

    fn take_results(&mut self, compute: &C, targets: Vec<RowFor>, results: Vec<RowResult>) {
        let (mut ended, mut failed) = (Vec::new(), Vec::new());
        for (target, result) in targets.into_iter().zip(results) {
            match (target, result) {
                (RowFor::Score { job, position }, RowResult::Scored(logprob, topk)) => {
                    if let Some(job) = self.jobs.get_mut(&job) {
                        job.score(position, logprob, topk);
                    }
                }
                (RowFor::First { job }, RowResult::Drawn(drawn)) => self.begin_samples(compute, job, drawn),
                (RowFor::Next { sequence }, RowResult::Drawn(drawn)) => {
                    let s = &mut self.running[sequence];
                    let plan = &self.jobs[&s.job].plan;
                    for drawn in drawn {
                        ended.extend(s.push(drawn, plan).map(|reason| (sequence, reason)));
                    }
                }
                (RowFor::Next { sequence }, _) => failed.push(self.running[sequence].job),
                (RowFor::Score { job, .. } | RowFor::First { job }, _) => failed.push(job),
            }
        }
        // From the back, so that the places before stay what they are: sequences begun in this step are behind all of them.
        ended.sort_unstable_by_key(|&(sequence, _)| Reverse(sequence));
        let mut over = Vec::new();
        for (sequence, reason) in ended {
            over.push((self.running.remove(sequence), reason));
        }
        for (sequence, reason) in over {
            self.end_sequence(compute, sequence, reason);
        }
        failed.sort_unstable();
        failed.dedup();
        for job in failed {
            self.fail_job(job, Failure::User("the model's logits are not finite numbers with these weights".into()));
        }
    }

    /// Makes sequences of the first tokens of a job's samples, ends those that are done, and starts those with a promise of pages.
    fn begin_samples(&mut self, compute: &C, id: u64, drawn: Vec<Drawn>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.begun = true;
        for (index, drawn) in drawn.into_iter().enumerate() {
            let mut sequence = Sequence::new(id, job.session, index, job.prefix);
            match sequence.push(drawn, &job.plan) {
                Some(reason) => job.finish(index, sequence.into_sample(&job.plan, reason)),
                None => job.unstarted.push(sequence),
            }
        }
        job.unstarted.reverse();
        let surplus = job.idle_lanes.saturating_sub(job.unstarted.len());
        job.idle_lanes -= surplus;
        let (client, pages) = (job.asked.client.clone(), surplus * job.plan.own_pages());
        self.pool.unreserve(pages);
        self.take_back(&client, pages, surplus);
        self.start_idle_lanes(compute, id);
    }

    /// Starts as many sequences of a job as it has promises for, and lets go of the prompt once none is left to start.
    fn start_idle_lanes(&mut self, compute: &C, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !job.begun {
            return;
        }
        let full_pages = job.plan.prompt.len() / self.page_tokens;
        while job.idle_lanes > 0 {
            let Some(mut sequence) = job.unstarted.pop() else { break };
            self.clock += 1;
            job.idle_lanes -= 1;
            job.running += 1;
            sequence.started = self.clock;
            sequence.tokens_at_start = sequence.tokens.len();
            sequence.cached = job.plan.prompt.len();
            sequence.granted = job.plan.own_pages();
            sequence.reserved = sequence.granted;
            sequence.prefix = job.prefix;
            sequence.registered = full_pages;
            sequence.pages.extend_from_slice(&job.pages[..full_pages]);
            sequence.pages.iter().for_each(|&page| self.pool.hold(page));
            if let Some(&partial) = job.pages.get(full_pages) {
                sequence.reserved -= 1;
                let own = self.pool.take_reserved();
                compute.copy_page(&mut self.cache, partial, own);
                sequence.pages.push(own);
            }
            self.running.push(sequence);
        }
        if job.unstarted.is_empty() {
            self.give_up_prompt(id);
        }
        if self.jobs.get(&id).is_some_and(|job| job.unfinished == 0) {
            self.answer(id);
        }
    }

    fn end_sequence(&mut self, compute: &C, mut sequence: Sequence, reason: StopReason) {
        let id = sequence.job;
        self.let_go(&mut sequence);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let index = sequence.index;
        let sample = sequence.into_sample(&job.plan, reason);
        job.finish(index, sample);
        if job.unfinished == 0 {
            return self.answer(id);
        }
        // The promise passes to the next sample: what was admitted finishes on what it holds.
        if job.admitted && !job.unstarted.is_empty() && job.running + job.idle_lanes == 0 {
            let (client, own) = (job.asked.client.clone(), job.plan.own_pages());
            if self.pool.try_reserve(own) {
                self.grant(compute, &client, id, Want::Lane, own);
            } else {
                self.give_up_prompt(id);
            }
        }
    }

    fn answer(&mut self, id: u64) {
        if let Some(job) = self.forget(id) {
            job.answer();
        }
    }

    /// Takes a job that holds nothing any more out of all tables.
    fn forget(&mut self, id: u64) -> Option<Job<C::Frozen>> {
        let job = self.jobs.remove(&id)?;
        self.by_id.remove(&job.asked.id);
        if let Some(session) = self.sessions.get_mut(&job.asked.client) {
            session.jobs.retain(|&other| other != id);
            if session.jobs.is_empty() {
                self.sessions.remove(&job.asked.client);
                if !self.sessions.keys().any(|client| client.owner == job.asked.client.owner) {
                    self.waiting_since.remove(&job.asked.client.owner);
                }
            }
        }
        self.may_admit = true;
        Some(job)
    }

    /// Fails a job and frees all it holds.
    fn fail_job(&mut self, id: u64, failure: Failure) {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].job == id {
                let mut sequence = self.running.remove(index);
                self.let_go(&mut sequence);
            } else {
                index += 1;
            }
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            let (lanes, own) = (std::mem::take(&mut job.idle_lanes), job.plan.own_pages());
            let client = job.asked.client.clone();
            self.pool.unreserve(lanes * own);
            self.take_back(&client, lanes * own, lanes);
        }
        self.prefilling.retain(|&other| other != id);
        self.give_up_prompt(id);
        if let Some(job) = self.forget(id) {
            job.asked.reply.send(Err(failure));
        }
    }
}

/// What a session could run in a step.
#[derive(Default)]
struct SessionWork {
    /// Places in `running`.
    decodes: Vec<usize>,
    /// Places in `running`, and how many tokens each has to compute again.
    again: Vec<(usize, usize)>,
    /// Jobs, and how many tokens of the prompt are missing.
    prompts: Vec<(u64, usize)>,
    /// Tokens that are read in one step, at most.
    reading_max: usize,
}

impl SessionWork {
    /// Tokens to read, up to a step's share.
    fn reading(&self) -> usize {
        // Running sequences wait for what is read beside them.
        let most = if self.decodes.is_empty() { self.reading_max } else { self.reading_max / 2 };
        let wanted = self.again.iter().map(|a| a.1).chain(self.prompts.iter().map(|p| p.1));
        wanted.fold(0, |sum: usize, n| sum.saturating_add(n).min(most))
    }

    fn tokens(&self) -> usize {
        self.decodes.len() + self.reading()
    }
}

/// Divides `limit` among owners, and the share of each among its sessions, which want `wants`.
fn share_among_owners(order: &[Client], wants: &[usize], limit: usize) -> Vec<usize> {
    let mut owners: Vec<(&str, Vec<usize>)> = Vec::new();
    for (i, client) in order.iter().enumerate() {
        match owners.iter_mut().find(|(owner, _)| *owner == &*client.owner) {
            Some((_, sessions)) => sessions.push(i),
            None => owners.push((&*client.owner, vec![i])),
        }
    }
    let of_owner = |sessions: &[usize]| -> Vec<usize> { sessions.iter().map(|&i| wants[i]).collect() };
    let whole: Vec<usize> = owners.iter().map(|(_, sessions)| of_owner(sessions).iter().sum()).collect();
    let mut quotas = vec![0; wants.len()];
    for ((_, sessions), share) in owners.iter().zip(share_out(&whole, limit)) {
        for (&i, quota) in sessions.iter().zip(share_out(&of_owner(sessions), share)) {
            quotas[i] = quota;
        }
    }
    quotas
}

/// Divides `limit` among those who want `wants`: equally, and what someone does not need to the others, the first in line first.
fn share_out(wants: &[usize], limit: usize) -> Vec<usize> {
    let mut given = vec![0; wants.len()];
    let mut left = limit;
    loop {
        let hungry: Vec<usize> = (0..wants.len()).filter(|&i| given[i] < wants[i]).collect();
        if hungry.is_empty() || left == 0 {
            return given;
        }
        let each = (left / hungry.len()).max(1);
        for i in hungry {
            let more = each.min(wants[i] - given[i]).min(left);
            given[i] += more;
            left -= more;
        }
    }
}

/// A part of a step in the form that the device takes, and where its rows go.
fn span<'s, F>(
    jobs: &'s BTreeMap<u64, Job<F>>,
    running: &'s [Sequence],
    part: &Part,
    targets: &mut Vec<RowFor>,
) -> StepSpan<'s, F> {
    let id = match *part {
        Part::Prompt { job, .. } => job,
        Part::Again { sequence, .. } | Part::Decode { sequence } => running[sequence].job,
    };
    let job = &jobs[&id];
    let plan = &job.plan;
    let weights = (job.weights.0, &job.weights.1);
    match *part {
        Part::Decode { sequence } => {
            let s = &running[sequence];
            let (samples, position) = (vec![s.index], s.tokens.len());
            targets.push(RowFor::Next { sequence });
            StepSpan {
                weights,
                tokens: vec![s.token(plan, s.cached)],
                past: s.cached,
                pages: s.pages.clone(),
                rows: vec![(0, RowTask::Draw { settings: plan.settings, samples, position })],
            }
        }
        Part::Again { sequence, tokens } => {
            let s = &running[sequence];
            let tokens = (s.cached..s.cached + tokens).map(|position| s.token(plan, position)).collect();
            StepSpan { weights, tokens, past: s.cached, pages: s.pages.clone(), rows: Vec::new() }
        }
        Part::Prompt { tokens, .. } => {
            let first = job.computed;
            let mut rows = Vec::new();
            // The row of a position predicts the one after it.
            for position in (first + 1).max(plan.first_scored)..(first + tokens + 1).min(plan.prompt.len()) {
                rows.push((position - 1 - first, RowTask::Score { token: plan.prompt[position], topk: plan.topk_prompt }));
                targets.push(RowFor::Score { job: id, position });
            }
            if first + tokens == plan.prompt.len() {
                let samples = (0..plan.num_samples).collect();
                rows.push((tokens - 1, RowTask::Draw { settings: plan.settings, samples, position: 0 }));
                targets.push(RowFor::First { job: id });
            }
            let tokens = plan.prompt[first..first + tokens].to_vec();
            StepSpan { weights, tokens, past: first, pages: job.pages.clone(), rows }
        }
    }
}

/// Takes over as many full pages of the prompt as the cache has.
fn look_up_prefix<F>(job: &mut Job<F>, pool: &mut PagePool, page_tokens: usize) {
    job.looked_up = true;
    for page in 0..job.plan.cacheable_pages() {
        let tokens = &job.plan.prompt[page * page_tokens..(page + 1) * page_tokens];
        let Some((page, prefix)) = pool.find_and_hold(job.prefix, tokens) else { break };
        job.pages.push(page);
        job.prefix = prefix;
    }
    // The pages were promised; those that were found need not be taken.
    job.reserved -= job.pages.len();
    pool.unreserve(job.pages.len());
    job.computed = job.pages.len() * page_tokens;
    job.cache_hit_tokens = job.computed;
}

#[cfg(any(test, feature = "simulation"))]
impl<C: Compute> Batcher<C> {
    /// What is held although nothing is open.
    pub(crate) fn leftovers(&self) -> Result<(), String> {
        self.audit()?;
        let sessions = self.sessions.len() + self.waiting_since.len();
        let tables = (self.jobs.len(), self.by_id.len(), sessions, self.running.len(), self.prefilling.len(), self.lanes);
        if tables != (0, 0, 0, 0, 0, 0) || !self.pool.is_unused() {
            return Err(format!("the sampler keeps {tables:?} jobs, names, sessions, samples, prompts and promises, or pages"));
        }
        Ok(())
    }

    /// Requests that wait or run.
    pub(crate) fn open(&self) -> usize {
        self.jobs.len()
    }

    /// What is wrong with the books, if anything: every page is free, idle or held, promises are covered, and sessions are charged for what
    /// their jobs hold. The simulation asks after every step.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut holders: HashMap<u32, u32> = HashMap::new();
        let held = self.running.iter().flat_map(|s| &s.pages).chain(self.jobs.values().flat_map(|j| &j.pages));
        held.for_each(|&page| *holders.entry(page).or_default() += 1);
        let promised = self.running.iter().map(|s| s.reserved).sum::<usize>()
            + self.jobs.values().map(|j| j.reserved + j.idle_lanes * j.plan.own_pages()).sum::<usize>();
        self.pool.audit(&holders, promised)?;
        let lanes = self.running.len() + self.jobs.values().map(|j| j.idle_lanes).sum::<usize>();
        if lanes != self.lanes || lanes > SEQUENCES_MAX {
            return Err(format!("{lanes} samples hold promises, {} are counted", self.lanes));
        }
        for (client, session) in &self.sessions {
            let jobs = self.jobs.values().filter(|j| j.session == session.number);
            let of_jobs: usize =
                jobs.map(|j| if j.admitted { j.plan.prompt_pages() } else { 0 } + j.idle_lanes * j.plan.own_pages()).sum();
            let own = self.running.iter().filter(|s| s.session == session.number);
            let of_sequences: usize = own.map(|s| s.granted).sum();
            if of_jobs + of_sequences != session.pages {
                return Err(format!("{client:?} holds {} pages, its account says {}", of_jobs + of_sequences, session.pages));
            }
        }
        for job in self.jobs.values().filter(|j| j.admitted) {
            if job.running + job.idle_lanes == 0 {
                return Err(format!("request {} holds a prompt and no pages for a sample", job.asked.id));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_gets_no_more_of_a_step_for_having_more_sessions() {
        let client = |owner: &str, session: &str| Client { owner: owner.into(), session: session.into() };
        let order = [client("a", "1"), client("b", "2"), client("a", "3"), client("a", "4")];
        assert_eq!(share_among_owners(&order, &[100, 100, 100, 2], 60), [14, 30, 14, 2]);
        assert_eq!(share_among_owners(&order, &[100, 5, 100, 100], 60), [19, 5, 18, 18]);
    }

    #[test]
    fn tokens_are_shared_equally_and_what_is_not_needed_goes_to_others() {
        assert_eq!(share_out(&[1, 256], 10), [1, 9]);
        assert_eq!(share_out(&[100, 100, 2], 50), [24, 24, 2]);
        assert_eq!(share_out(&[5, 5], 3), [2, 1]);
        assert_eq!(share_out(&[5, 5], 100), [5, 5]);
        assert!(share_out(&[], 3).is_empty());
    }
}
