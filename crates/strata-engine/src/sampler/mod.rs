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
//! **Samples guess** what they have said before, and check several tokens in a step: see [`speculation`].
//!
//! A token's logits depend on its sequence and weights alone, so nothing here changes what is sampled: not the chunks, not the guesses, not the cache, not the company.

mod admit;
mod begun;
mod cost;
pub(crate) mod draw;
mod job;
mod pages;
mod plan;
mod pool;
mod prompt;
mod room;
mod sight;
mod snapshots;
mod speculation;
mod states;
mod stop;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use strata_model::LateTokenizer;

use crate::api::{Client, Failure, RequestId, StopReason};
use crate::budget::Budget;
use crate::compute::{Compute, RowResult, StepSpan, Stepped};
use crate::gallery::Gallery;
use crate::pictures::{Eyes, PictureId};
use crate::snapshot::WeightsId;

use begun::register_begun;
use cost::StepCost;
pub(crate) use draw::{Alternatives, DrawSettings, Drawn};
pub(crate) use job::{Asked, Plan, REQUEST_BYTES};
use job::{Job, Sequence, Want};
use plan::span;
use pool::CachePool;
pub(crate) use room::Room;
pub(crate) use speculation::Speculating;
pub use speculation::{Speculated, Speculation};

/// Samples that run at the same time, at most.
const SEQUENCES_MAX: usize = 256;
/// How many times the tokens that reading the weights is worth a step has, at most: with samples that draw, who wait for it, and with
/// prompts alone. Beyond it a step gets longer, and whoever comes waits for it, while each token costs hardly less: at 16 times, a step is
/// 94% arithmetic.
const STEP_PER_BASE: usize = 16;
const PREFILL_PER_BASE: usize = 32;
/// The least and the most tokens of a step by that measure.
pub(crate) const STEP_TOKENS: (usize, usize) = (48, 512);
/// Tokens beside those that repeat others of the step, and cost no more than a place in the cache. Where they are less than one in eight of all, models compute them too.
pub(crate) const STEP_COPIES: usize = 7 * STEP_TOKENS.1;
/// A session's last sample keeps its pages until it has drawn this many tokens since it began, and a quarter of what it had to compute again.
const TOKENS_BEFORE_EVICTION: usize = 16;

/// What sample requests are checked against.
pub(crate) struct SamplerLimits {
    pub(crate) vocab_size: usize,
    pub(crate) max_context_tokens: usize,
    /// The longest sequence that shares pages with short ones.
    pub(crate) short_sequence_max: usize,
    pub(crate) eos_token_ids: Vec<u32>,
    /// Tokens in a page of the cache.
    pub(crate) page_tokens: usize,
    /// What the cache has.
    pub(crate) cache: Room,
    /// Needed for stop strings.
    pub(crate) tokenizer: Option<LateTokenizer>,
    /// Needed for pictures.
    pub(crate) eyes: Option<Box<dyn Eyes>>,
}

/// What is held of what was seen, by job and place of the picture in its prompt.
type Sights<S> = BTreeMap<(u64, usize), (PictureId, S)>;

/// All sampling of an engine.
pub(crate) struct Batcher<C: Compute> {
    page_tokens: usize,
    cache: C::Cache,
    pool: CachePool,
    /// What was seen of pictures.
    gallery: Gallery<C::Seen>,
    sights: Sights<C::Seen>,
    seen_bytes_per_token: u64,
    /// For whom pictures are being seen, and their tokens.
    pub(crate) seeing: Vec<(Arc<str>, usize)>,
    /// Tokens of all pictures that are seen at the same time.
    picture_tokens: usize,
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
    speculating: Arc<Speculating>,
    /// What steps were seen to cost.
    cost: StepCost,
    /// Whether something has changed since admission last found nothing to do.
    may_admit: bool,
    /// Jobs of which a page or a state could not be made, and why. They fail before anything more is computed.
    broken: Vec<(u64, String)>,
    /// What the simulation sees.
    pub(crate) evictions: u64,
}

/// What a session has in the sampler.
#[derive(Default)]
struct Session {
    number: u64,
    /// Its jobs, in turn: the front is next to get what it wants.
    jobs: Vec<u64>,
    /// What is promised to it.
    room: Room,
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
    /// The last token of `running[sequence]`, and what it guesses to follow.
    Decode { sequence: usize },
}

/// Where a row of a step goes.
enum RowFor {
    Score {
        job: u64,
        position: usize,
    },
    First {
        job: u64,
    },
    /// The token behind so many guesses of the sequence.
    Next {
        sequence: usize,
        ahead: usize,
    },
}

/// A step that was run: what each client had of it.
pub(crate) struct StepDone {
    /// Tokens of each session that took part.
    pub(crate) tokens: Vec<(Client, usize)>,
}

impl<C: Compute> Batcher<C> {
    /// A sampler over a cache of this size.
    pub(crate) fn new(
        compute: &C,
        cache: C::Cache,
        size: Room,
        page_tokens: usize,
        budget: &Budget,
        speculating: Arc<Speculating>,
    ) -> Self {
        Batcher {
            page_tokens,
            cache,
            pool: CachePool::new(size, page_tokens),
            gallery: Gallery::new(budget.gallery_bytes),
            sights: BTreeMap::new(),
            seen_bytes_per_token: compute.seen_bytes_per_token(),
            seeing: Vec::new(),
            picture_tokens: budget.picture_tokens,
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
            speculating,
            cost: StepCost::default(),
            may_admit: false,
            broken: Vec::new(),
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

    /// How samples speculate, and what comes of it.
    pub(crate) fn speculating(&self) -> Arc<Speculating> {
        self.speculating.clone()
    }

    /// Empties the prefix cache, and forgets pictures.
    pub(crate) fn forget_prefixes(&mut self) {
        self.pool.forget_idle();
        self.gallery.forget_idle();
    }

    /// Gives the memory of free pages back to the system.
    pub(crate) fn release_memory(&mut self, compute: &C) {
        let (pages, states) = self.pool.free();
        compute.release_memory(&mut self.cache, pages, states);
    }

    /// Admits what has room, and answers the sessions that have something to run.
    pub(crate) fn runnable(&mut self, compute: &C) -> Vec<Client> {
        self.admit(compute);
        self.let_go_of_sights();
        for (job, error) in std::mem::take(&mut self.broken) {
            tracing::error!(error, "a page or a state was not copied");
            self.fail_job(job, Failure::Server(format!("sampling step: {error}")));
        }
        let prefilling = self.prefilling.iter().filter(|job| self.may_go_on(**job, self.jobs[*job].computed));
        let prefilling = prefilling.map(|job| self.jobs[job].session);
        let running = self.running.iter().filter(|s| self.may_go_on(s.job, s.cached));
        let active: HashSet<u64> = prefilling.chain(running.map(|s| s.session)).collect();
        self.sessions.iter().filter(|(_, s)| active.contains(&s.number)).map(|(client, _)| client.clone()).collect()
    }

    /// Runs one step for these sessions, the first in line first. Answers what each had of it.
    pub(crate) fn step(&mut self, compute: &C, order: &[Client]) -> StepDone {
        self.clock += 1;
        let (mut parts, tokens) = self.plan_step(compute, order);
        if parts.is_empty() {
            return StepDone { tokens };
        }
        // Sequences with the same weights lie together, so that each adapter multiplies one run of tokens.
        parts.sort_by_key(|p| self.jobs[&self.job_of(p)].weights.0);
        let mut targets = Vec::new();
        let spans: Vec<StepSpan<'_, C::Frozen, C::Seen>> =
            parts.iter().map(|part| span((&self.jobs, &self.sights), &self.running, part, &mut targets)).collect();
        let (cache, start) = (&mut self.cache, compute.now());
        let done = catch_unwind(AssertUnwindSafe(|| compute.step(cache, &spans)));
        drop(spans);
        let took = compute.now().saturating_sub(start);
        let error = match done {
            Ok(Ok(Stepped { results, num_computed })) if results.len() == targets.len() => {
                self.cost.observe(num_computed, took);
                self.advance(&parts);
                self.let_go_of_sights();
                self.keep_snapshots(compute, &parts);
                self.take_results(compute, &parts, targets, results);
                return StepDone { tokens };
            }
            Ok(Ok(Stepped { results, .. })) => format!("{} results for {} rows", results.len(), targets.len()),
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
                    job.held.begun = None;
                    for page in full_before..job.computed / self.page_tokens {
                        job.prefix = self.pool.register(job.prefix, job.plan.page(page), &mut job.held.pages[page]);
                    }
                    if job.prefilled() {
                        // What is behind its whole pages is only copied from now on.
                        let whole = job.plan.pages_in(job.computed);
                        let rest = job.plan.plain(whole * self.page_tokens..job.computed);
                        register_begun(&mut self.pool, job.prefix, rest, job.held.pages.get_mut(whole));
                    }
                }
            }
        }
        let jobs = &self.jobs;
        self.prefilling.retain(|id| !jobs[id].prefilled());
    }

    fn take_results(&mut self, compute: &C, parts: &[Part], targets: Vec<RowFor>, results: Vec<RowResult>) {
        let (mut ended, mut begun, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for (target, result) in targets.into_iter().zip(results) {
            match (target, result) {
                (RowFor::Score { job, position }, RowResult::Scored(scored)) => {
                    if let Some(job) = self.jobs.get_mut(&job) {
                        job.score(position, scored);
                    }
                }
                (RowFor::First { job }, RowResult::Drawn(drawn)) => begun.push((job, drawn)),
                // What a row behind a wrong guess shows, even that it is not a number, would not have been computed.
                (RowFor::Next { sequence, ahead }, _) if !self.running[sequence].holds(ahead) => {}
                (RowFor::Next { sequence, ahead }, RowResult::Drawn(drawn)) => {
                    let s = &mut self.running[sequence];
                    // The guess that led here is a token of the sequence.
                    s.cached += usize::from(ahead > 0);
                    let plan = &self.jobs[&s.job].plan;
                    for drawn in drawn {
                        s.guesses.note(drawn.token);
                        ended.extend(s.push(drawn, plan).map(|reason| (sequence, reason)));
                    }
                }
                (RowFor::Next { sequence, .. }, _) => failed.push(self.running[sequence].job),
                (RowFor::Score { job, .. } | RowFor::First { job }, _) => failed.push(job),
            }
        }
        self.count_guesses(parts);
        // A job whose samples all end with their first token is answered here, and may have failed at another row of its prompt.
        for (job, drawn) in begun {
            if !failed.contains(&job) {
                self.begin_samples(compute, job, drawn);
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
        let (client, room) = (job.asked.client.clone(), job.plan.own_room() * surplus);
        self.pool.unreserve(room);
        self.take_back(&client, room, surplus);
        self.start_idle_lanes(compute, id);
    }

    /// Starts as many sequences of a job as it has promises for, and lets go of the prompt once none is left to start.
    fn start_idle_lanes(&mut self, compute: &C, id: u64) {
        while let Some(job) = self.jobs.get_mut(&id).filter(|job| job.begun && job.idle_lanes > 0) {
            let Some(mut sequence) = job.unstarted.pop() else { break };
            let full_pages = job.plan.pages_in(job.plan.prompt.len());
            self.clock += 1;
            job.idle_lanes -= 1;
            job.running += 1;
            sequence.started = self.clock;
            sequence.tokens_at_start = sequence.tokens.len();
            sequence.cached = job.plan.prompt.len();
            sequence.granted = job.plan.own_room();
            sequence.reserved = sequence.granted;
            sequence.prefix = job.prefix;
            sequence.registered = full_pages;
            sequence.held.pages.extend_from_slice(&job.held.pages[..full_pages]);
            sequence.held.pages.iter().for_each(|&page| self.pool.hold_page(page));
            let (partial, state) = (job.held.pages.get(full_pages).copied(), job.held.state);
            let mut copied = self.take_state(compute, &mut sequence.reserved, &mut sequence.held, state);
            if let Some(partial) = partial {
                sequence.reserved.pages -= 1;
                let own = self.pool.take_page();
                copied = copied.and(compute.copy_page(&mut self.cache, partial, own));
                sequence.held.pages.push(own);
            }
            if copied.is_err() {
                // What is in its own page is not known, and not to be registered.
                sequence.cached = full_pages * self.page_tokens;
            }
            self.broken.extend(copied.err().map(|error| (id, error)));
            self.running.push(sequence);
        }
        let Some(job) = self.jobs.get(&id).filter(|job| job.begun) else { return };
        let (all_started, all_ended) = (job.unstarted.is_empty(), job.unfinished == 0);
        if all_started {
            self.give_up_prompt(id);
        }
        if all_ended {
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
            let (client, own) = (job.asked.client.clone(), job.plan.own_room());
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
        self.let_go_of_sights();
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
            let (idle, lanes) = (job.idle_room(), std::mem::take(&mut job.idle_lanes));
            let client = job.asked.client.clone();
            self.pool.unreserve(idle);
            self.take_back(&client, idle, lanes);
        }
        self.prefilling.retain(|&other| other != id);
        self.give_up_prompt(id);
        if let Some(job) = self.forget(id) {
            job.asked.reply.send(Err(failure));
        }
    }
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
        let held = self.running.iter().map(|s| &s.held).chain(self.jobs.values().map(|j| &j.held));
        let promised = self.running.iter().map(|s| s.reserved).sum::<Room>()
            + self.jobs.values().map(|j| j.reserved + j.idle_room()).sum::<Room>();
        self.pool.audit(held, promised)?;
        self.audit_sights()?;
        let lanes = self.running.len() + self.jobs.values().map(|j| j.idle_lanes).sum::<usize>();
        if lanes != self.lanes || lanes > SEQUENCES_MAX {
            return Err(format!("{lanes} samples hold promises, {} are counted", self.lanes));
        }
        for (client, session) in &self.sessions {
            let jobs = self.jobs.values().filter(|j| j.session == session.number);
            let of_prompt = |j: &Job<C::Frozen>| if j.admitted { j.plan.prompt_room() } else { Room::default() };
            let of_jobs: Room = jobs.map(|j| of_prompt(j) + j.idle_room()).sum();
            let own = self.running.iter().filter(|s| s.session == session.number);
            let held = of_jobs + own.map(|s| s.granted).sum::<Room>();
            if held != session.room {
                return Err(format!("{client:?} holds {held}, its account says {}", session.room));
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
