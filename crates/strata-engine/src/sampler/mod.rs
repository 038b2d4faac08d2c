//! Continuous batching: every step runs one token of each live sequence and a chunk of the prompts that wait, whoever sent them.
//!
//! A request is a [`Job`]. Its prompt is computed once, in chunks; its full pages go to the prefix cache. From the last prompt
//! position the first token of every sample is drawn; each sample then shares the full pages of the prompt and continues in its own copy
//! of the partly filled one. Jobs are admitted in order of arrival, one sample of each in turn, as soon as the pages that the
//! sample can ever need are free: so no step can run out of pages, and no job waits for one that came later.
//!
//! A token's logits depend on its sequence and weights alone, so nothing here changes what is sampled: not the chunks, not the cache, not the company.

mod draw;
mod job;
mod pages;
mod stop;

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};

use strata_model::lora::Adapter;
use strata_model::{KvCache, LogitsRow, Model, PAGE_TOKENS, PackedBatch, Tokenizer};

use crate::api::{Failure, SampleRequest, StopReason, TopK};
use crate::reply::PendingReply;
use crate::snapshot::Weights;

use draw::{DrawSettings, Drawn};
use job::{Job, Plan, Sequence};
use pages::PagePool;

/// Sequences that run at the same time, at most.
const SEQUENCES_MAX: usize = 256;
/// Prompt tokens of a step when nothing else runs.
const PREFILL_TOKENS: usize = 512;
/// Prompt tokens of a step beside running sequences, which wait for it: a fraction of a second on a processor.
const PREFILL_TOKENS_BESIDE_DECODES: usize = 128;
/// Requests that may wait or run.
const JOBS_MAX: usize = 65_536;

/// What sample requests are checked against.
pub(crate) struct SamplerLimits {
    pub(crate) vocab_size: usize,
    pub(crate) max_context_tokens: usize,
    pub(crate) eos_token_ids: Vec<u32>,
    /// Needed for stop strings.
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
}

/// All sampling of an engine.
pub(crate) struct Sampler {
    limits: SamplerLimits,
    cache: KvCache,
    pool: PagePool,
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    /// Jobs with samples that have no promise of pages yet, in turn.
    waiting: VecDeque<u64>,
    /// Jobs whose prompt is being computed, in order.
    prefilling: VecDeque<u64>,
    running: Vec<Sequence>,
    /// Samples that hold a promise of pages.
    granted: usize,
}

/// A sequence's part in a step.
enum Work {
    /// Prompt tokens from the first that is not computed.
    Prefill { job: u64, tokens: usize },
    /// The last token of `running[sequence]`.
    Decode { sequence: usize },
}

/// What a row of logits is for.
enum RowTask {
    /// Score the prompt token at `position`.
    Score { job: u64, position: usize, token: u32, topk: usize },
    /// Draw the first token of all samples of a job.
    First { job: u64, settings: DrawSettings, samples: Vec<usize> },
    /// Draw the next token of `running[sequence]`.
    Next { sequence: usize, settings: DrawSettings, sample: [usize; 1], position: usize },
}

enum RowResult {
    Scored(f32, TopK),
    Drawn(Vec<Drawn>),
    NotNumbers,
}

impl RowTask {
    fn run(&self, row: LogitsRow<'_>) -> RowResult {
        let drawn = match self {
            RowTask::Score { token, topk, .. } => {
                let finite = row.log_normalizer.is_finite();
                return if finite {
                    RowResult::Scored(row.logprob(*token), draw::top_k(row, *topk))
                } else {
                    RowResult::NotNumbers
                };
            }
            RowTask::First { settings, samples, .. } => draw::draw(row, settings, samples, 0),
            RowTask::Next { settings, sample, position, .. } => draw::draw(row, settings, sample, *position),
        };
        drawn.map_or(RowResult::NotNumbers, RowResult::Drawn)
    }
}

impl Sampler {
    pub(crate) fn new(cache: KvCache, limits: SamplerLimits) -> Self {
        Sampler {
            limits,
            pool: PagePool::new(cache.num_pages()),
            cache,
            jobs: BTreeMap::new(),
            next_job: 0,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
            granted: 0,
        }
    }

    /// Whether there is anything to run.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Checks and queues a request.
    pub(crate) fn submit(&mut self, weights: Weights, request: &SampleRequest, reply: PendingReply) {
        if self.jobs.len() >= JOBS_MAX {
            return reply.fail_server(format!("{JOBS_MAX} sample requests are waiting already"));
        }
        match Plan::new(request, &self.limits) {
            Ok(plan) => {
                let id = self.next_job;
                self.next_job += 1;
                self.jobs.insert(id, Job::new(plan, weights, reply));
                self.waiting.push_back(id);
            }
            Err(message) => reply.fail_user(message),
        }
    }

    /// Runs one step over everything that is live.
    pub(crate) fn step(&mut self, model: &Model) {
        self.admit();
        let mut work = self.plan_step();
        assert!(!work.is_empty() || self.is_idle(), "{} sample requests wait, and none can run", self.jobs.len());
        if work.is_empty() {
            return;
        }
        // Sequences with the same weights lie together, so that each adapter multiplies one run of tokens.
        work.sort_by_key(|w| self.weights_of(w).id);
        let adapters: Vec<(crate::snapshot::WeightsId, Option<Arc<Adapter>>)> =
            work.iter().map(|w| (self.weights_of(w).id, self.weights_of(w).adapter.clone())).collect();
        let mut batch = PackedBatch::new();
        let (mut rows, mut tasks) = (Vec::new(), Vec::new());
        for (i, item) in work.iter().enumerate() {
            if i == 0 || adapters[i].0 != adapters[i - 1].0 {
                batch.begin_group(adapters[i].1.as_deref());
            }
            self.pack(item, &mut batch, &mut rows, &mut tasks);
        }
        let results: Vec<OnceLock<RowResult>> = rows.iter().map(|_| OnceLock::new()).collect();
        let visit = |i: usize, row: LogitsRow<'_>| {
            // A row is visited once; a second visit would find the same numbers.
            let _ = results[i].set(tasks[i].run(row));
        };
        if let Err(error) = model.step(&batch, &mut self.cache, &rows, &visit) {
            tracing::error!(%error, "a sampling step failed");
            return self.fail_step(&work, &format!("sampling step: {error}"));
        }
        self.advance_prompts(&work);
        self.take_results(tasks, results);
    }

    fn weights_of(&self, work: &Work) -> &Weights {
        let job = match *work {
            Work::Prefill { job, .. } => job,
            Work::Decode { sequence } => self.running[sequence].job,
        };
        &self.jobs[&job].weights
    }

    /// Promises pages to waiting samples, in turn, until the next in turn does not fit.
    fn admit(&mut self) {
        while let Some(&id) = self.waiting.front() {
            let Some(job) = self.jobs.get_mut(&id).filter(|j| j.wants_grants() > 0) else {
                self.waiting.pop_front();
                continue;
            };
            let begins = job.pages.is_empty() && job.reserved == 0;
            let prompt_pages = if begins { job.plan.prompt_pages() } else { 0 };
            if self.granted >= SEQUENCES_MAX || !self.pool.try_reserve(prompt_pages + job.plan.own_pages()) {
                return;
            }
            self.granted += 1;
            job.grants += 1;
            if begins {
                job.reserved = prompt_pages;
                self.prefilling.push_back(id);
            }
            let wants_more = if job.prefilled() { job.wants_grants() > 1 } else { job.wants_grants() > 0 };
            self.waiting.pop_front();
            if wants_more {
                self.waiting.push_back(id);
            }
            if self.jobs[&id].prefilled() {
                self.start_granted(id);
            }
        }
    }

    /// What runs next: all running sequences, and prompts in order up to the step's share of tokens. Takes the pages they need.
    fn plan_step(&mut self) -> Vec<Work> {
        for sequence in &mut self.running {
            if sequence.cached == sequence.pages.len() * PAGE_TOKENS {
                sequence.reserved -= 1;
                sequence.pages.push(take_cleared(&mut self.pool, &mut self.cache));
            }
        }
        let mut work: Vec<Work> = (0..self.running.len()).map(|sequence| Work::Decode { sequence }).collect();
        let mut left = if self.running.is_empty() { PREFILL_TOKENS } else { PREFILL_TOKENS_BESIDE_DECODES };
        for &id in &self.prefilling {
            if left == 0 {
                break;
            }
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            if !job.looked_up {
                look_up_prefix(job, &mut self.pool);
            }
            let tokens = left.min(job.plan.prompt.len() - job.computed);
            while job.pages.len() * PAGE_TOKENS < job.computed + tokens {
                job.reserved -= 1;
                job.pages.push(take_cleared(&mut self.pool, &mut self.cache));
            }
            left -= tokens;
            work.push(Work::Prefill { job: id, tokens });
        }
        work
    }

    fn pack(&self, work: &Work, batch: &mut PackedBatch<'_>, rows: &mut Vec<usize>, tasks: &mut Vec<RowTask>) {
        let start = batch.len();
        match *work {
            Work::Decode { sequence } => {
                let s = &self.running[sequence];
                let last = *s.tokens.last().expect("a running sequence has its first token");
                batch.push_cached(&[last], s.cached, s.pages.clone());
                rows.push(start);
                let settings = self.jobs[&s.job].plan.settings;
                tasks.push(RowTask::Next { sequence, settings, sample: [s.index], position: s.tokens.len() });
            }
            Work::Prefill { job: id, tokens } => {
                let job = &self.jobs[&id];
                let (plan, first) = (&job.plan, job.computed);
                batch.push_cached(&plan.prompt[first..first + tokens], first, job.pages.clone());
                // The row of a position predicts the one after it.
                for position in (first + 1).max(plan.first_scored)..(first + tokens + 1).min(plan.prompt.len()) {
                    rows.push(start + position - 1 - first);
                    let (token, topk) = (plan.prompt[position], plan.topk_prompt);
                    tasks.push(RowTask::Score { job: id, position, token, topk });
                }
                if first + tokens == plan.prompt.len() {
                    rows.push(start + tokens - 1);
                    let samples = (0..plan.num_samples).collect();
                    tasks.push(RowTask::First { job: id, settings: plan.settings, samples });
                }
            }
        }
    }

    /// Counts what a step put into the cache, and registers the prompt pages that became full.
    fn advance_prompts(&mut self, work: &[Work]) {
        for item in work {
            match *item {
                Work::Decode { sequence } => self.running[sequence].cached += 1,
                Work::Prefill { job: id, tokens } => {
                    let Some(job) = self.jobs.get_mut(&id) else { continue };
                    let full_before = job.computed / PAGE_TOKENS;
                    job.computed += tokens;
                    for page in full_before..job.computed / PAGE_TOKENS {
                        let tokens = &job.plan.prompt[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
                        job.prefix = self.pool.register(job.prefix, tokens, job.pages[page]);
                    }
                }
            }
        }
        let jobs = &self.jobs;
        self.prefilling.retain(|id| !jobs[id].prefilled());
    }

    fn take_results(&mut self, tasks: Vec<RowTask>, results: Vec<OnceLock<RowResult>>) {
        let mut ended = Vec::new();
        let mut failed = Vec::new();
        for (task, result) in tasks.into_iter().zip(results) {
            let result = result.into_inner().expect("the model visits every row");
            match (task, result) {
                (RowTask::Score { job, position, .. }, RowResult::Scored(logprob, topk)) => {
                    if let Some(job) = self.jobs.get_mut(&job) {
                        job.score(position, logprob, topk);
                    }
                }
                (RowTask::First { job, .. }, RowResult::Drawn(drawn)) => self.begin_samples(job, drawn),
                (RowTask::Next { sequence, .. }, RowResult::Drawn(drawn)) => {
                    let s = &mut self.running[sequence];
                    let plan = &self.jobs[&s.job].plan;
                    for drawn in drawn {
                        ended.extend(s.push(drawn, plan).map(|reason| (sequence, reason)));
                    }
                }
                (RowTask::Next { sequence, .. }, _) => failed.push(self.running[sequence].job),
                (RowTask::Score { job, .. } | RowTask::First { job, .. }, _) => failed.push(job),
            }
        }
        // From the back, so that the places before stay what they are: sequences begun in this step are behind all of them.
        ended.sort_unstable_by_key(|&(sequence, _)| Reverse(sequence));
        for (sequence, reason) in ended {
            let sequence = self.running.remove(sequence);
            self.end_sequence(sequence, reason);
        }
        for job in failed {
            self.fail_job(job, Failure::User("the model's logits are not finite numbers with these weights".into()));
        }
    }

    /// Makes sequences of the first tokens of a job's samples, ends those that are done, and starts those with a grant.
    fn begin_samples(&mut self, id: u64, drawn: Vec<Drawn>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        for (index, drawn) in drawn.into_iter().enumerate() {
            let mut sequence = Sequence::new(id, index, job.plan.prompt.len());
            match sequence.push(drawn, &job.plan) {
                Some(reason) => job.finish(index, sequence.into_sample(&job.plan, reason)),
                None => job.unstarted.push(sequence),
            }
        }
        job.unstarted.reverse();
        let surplus = job.grants.saturating_sub(job.unstarted.len());
        job.grants -= surplus;
        self.granted -= surplus;
        self.pool.unreserve(surplus * job.plan.own_pages());
        self.start_granted(id);
    }

    /// Starts as many sequences of a job as have a grant, and frees the prompt once all have started.
    fn start_granted(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let full_pages = job.plan.prompt.len() / PAGE_TOKENS;
        while job.grants > 0 {
            let Some(mut sequence) = job.unstarted.pop() else { break };
            job.grants -= 1;
            sequence.reserved = job.plan.own_pages();
            sequence.pages.extend_from_slice(&job.pages[..full_pages]);
            sequence.pages.iter().for_each(|&page| self.pool.hold(page));
            if let Some(&partial) = job.pages.get(full_pages) {
                sequence.reserved -= 1;
                let own = self.pool.take_reserved();
                self.cache.copy_page(partial, own);
                sequence.pages.push(own);
            }
            self.running.push(sequence);
        }
        if job.unstarted.is_empty() {
            self.pool.release(&std::mem::take(&mut job.pages));
        }
        if job.unfinished == 0 {
            self.answer(id);
        }
    }

    fn end_sequence(&mut self, sequence: Sequence, reason: StopReason) {
        self.granted -= 1;
        self.pool.unreserve(sequence.reserved);
        let Some(job) = self.jobs.get_mut(&sequence.job) else { return };
        // What was sampled may begin the next prompt, as in a conversation.
        let (prompt, id) = (&job.plan.prompt, sequence.job);
        let mut prefix = job.prefix;
        for page in prompt.len() / PAGE_TOKENS..sequence.cached / PAGE_TOKENS {
            let tokens: Vec<u32> =
                prompt.iter().chain(&sequence.tokens).skip(page * PAGE_TOKENS).take(PAGE_TOKENS).copied().collect();
            prefix = self.pool.register(prefix, &tokens, sequence.pages[page]);
        }
        self.pool.release(&sequence.pages);
        let index = sequence.index;
        let sample = sequence.into_sample(&job.plan, reason);
        job.finish(index, sample);
        if job.unfinished == 0 {
            self.answer(id);
        }
    }

    fn answer(&mut self, id: u64) {
        if let Some(job) = self.jobs.remove(&id) {
            job.answer();
        }
    }

    /// Fails a job and frees all it holds.
    fn fail_job(&mut self, id: u64, failure: Failure) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.prefilling.retain(|&other| other != id);
        self.granted -= job.grants;
        self.pool.unreserve(job.reserved + job.grants * job.plan.own_pages());
        self.pool.release(&job.pages);
        let (pool, granted) = (&mut self.pool, &mut self.granted);
        self.running.retain(|s| {
            if s.job == id {
                *granted -= 1;
                pool.unreserve(s.reserved);
                pool.release(&s.pages);
            }
            s.job != id
        });
        job.reply.send(Err(failure));
    }

    fn fail_step(&mut self, work: &[Work], message: &str) {
        let mut jobs: Vec<u64> = work
            .iter()
            .map(|w| match *w {
                Work::Prefill { job, .. } => job,
                Work::Decode { sequence } => self.running[sequence].job,
            })
            .collect();
        jobs.sort_unstable();
        jobs.dedup();
        for job in jobs {
            self.fail_job(job, Failure::Server(message.to_string()));
        }
    }
}

fn take_cleared(pool: &mut PagePool, cache: &mut KvCache) -> u32 {
    let page = pool.take_reserved();
    cache.clear_page(page);
    page
}

/// Takes over as many full pages of the prompt as the cache has.
fn look_up_prefix(job: &mut Job, pool: &mut PagePool) {
    job.looked_up = true;
    for page in 0..job.plan.cacheable_pages() {
        let tokens = &job.plan.prompt[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
        let Some((page, prefix)) = pool.find_and_hold(job.prefix, tokens) else { break };
        job.pages.push(page);
        job.prefix = prefix;
    }
    // The pages were promised; those that were found need not be taken.
    job.reserved -= job.pages.len();
    pool.unreserve(job.pages.len());
    job.computed = job.pages.len() * PAGE_TOKENS;
    job.cache_hit_tokens = job.computed;
}
