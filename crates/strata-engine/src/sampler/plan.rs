//! What runs in a step: which sequences, how many tokens of each, and the form in which the device takes them.

use std::collections::{BTreeMap, HashMap};

use super::job::{Job, Sequence};
use super::pages::Prefix;
use super::{Batcher, PREFILL_PER_BASE, Part, RowFor, STEP_COPIES, STEP_PER_BASE, STEP_TOKENS, Sights};
use crate::api::Client;
use crate::compute::{Compute, RowTask, StepSpan};
use crate::fair::company_limit;

impl<C: Compute> Batcher<C> {
    /// What runs next, with the pages it needs, and how many tokens each session has of it.
    pub(super) fn plan_step(&mut self, compute: &C, order: &[Client]) -> (Vec<Part>, Vec<(Client, usize)>) {
        let prompts = self.prefilling.clone();
        let looked_up = prompts.iter().filter_map(|&id| Some((id, self.look_up_prefix(compute, id).err()?)));
        let broken: Vec<(u64, String)> = looked_up.collect();
        self.broken.extend(broken);
        // A copy may take the place of a page that nobody holds: not before each holds what it has found.
        for id in prompts {
            if let Err(error) = self.begin_page_of_prompt(compute, id) {
                self.broken.push((id, error));
            }
        }
        let base = self.cost.base_tokens();
        let most = |per_base: usize| (per_base * base).clamp(STEP_TOKENS.0, STEP_TOKENS.1);
        let mut by_session = self.work_by_session();
        let number = |client| self.sessions.get(client).map_or(0, |s| s.number);
        let mut works: Vec<SessionWork> = order.iter().map(|c| by_session.remove(&number(c)).unwrap_or_default()).collect();
        works.iter_mut().for_each(|work| work.reading_max = most(PREFILL_PER_BASE));
        let draws = works.iter().any(|work| !work.decodes.is_empty());
        let longest = most(if draws { STEP_PER_BASE } else { PREFILL_PER_BASE });
        let whole = works.iter().map(SessionWork::tokens).sum();
        // If they took turns, the smallest would wait for one step of each: together it may take as long as that.
        let company = company_limit(order.iter().zip(works.iter().map(SessionWork::tokens)), base);
        let limit = company.unwrap_or(whole).min(longest.max(order.len()));
        let (mut parts, mut tokens) = (Vec::new(), Vec::new());
        for (client, plan) in order.iter().zip(self.divide(order, &works, limit)) {
            tokens.push((client.clone(), plan.tokens));
            self.take_parts(compute, plan, &mut parts);
        }
        let taken: usize = tokens.iter().map(|(_, taken)| taken).sum();
        let most = company.unwrap_or(usize::MAX).min(longest);
        self.speculate(&parts, most.saturating_sub(taken), &mut tokens);
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
            let known = sequence.known(&self.jobs[&sequence.job].plan);
            match self.seen_until(sequence.job, sequence.cached).min(known) - sequence.cached {
                0 if known > sequence.cached => {}
                0 => work.decodes.push(i),
                missing => work.again.push((i, missing)),
            }
        }
        for id in self.prefilling.iter().filter(|id| self.broken.iter().all(|(broken, _)| broken != *id)) {
            let job = &self.jobs[id];
            let missing = self.seen_until(*id, job.computed).min(job.plan.prompt.len()) - job.computed;
            works.entry(job.session).or_default().prompts.push((*id, missing));
        }
        works
    }

    /// Divides a step of `limit` tokens that are new among the sessions that are in line.
    fn divide(&self, order: &[Client], works: &[SessionWork], limit: usize) -> Vec<SessionPlan> {
        // Layers with states have rows for copies too.
        let copies_left = if self.pool.has_states() { STEP_TOKENS.1.saturating_sub(limit) } else { STEP_COPIES };
        let mut wants: Vec<usize> = works.iter().map(SessionWork::tokens).collect();
        let mut divisions = 0;
        loop {
            let quotas = share_among_owners(order, &wants, limit);
            let mut read = Read { copies_left, ..Read::default() };
            let plans = works.iter().zip(quotas).map(|(work, quota)| self.plan_session(work, quota, &mut read));
            let plans: Vec<SessionPlan> = plans.collect();
            divisions += 1;
            // What some leave because others read it for them is for those who have too little.
            let is_over =
                plans.iter().map(|plan| plan.tokens).sum::<usize>() >= limit || !plans.iter().any(|plan| plan.is_short);
            let next = plans.iter().zip(works).map(|(plan, work)| if plan.is_short { work.tokens() } else { plan.tokens });
            let next: Vec<usize> = next.collect();
            if is_over || next == wants || divisions == DIVISIONS_MAX {
                return plans;
            }
            wants = next;
        }
    }

    /// What a session does with up to `quota` tokens that are new, and with what repeats what others `read` in this step.
    fn plan_session(&self, work: &SessionWork, quota: usize, read: &mut Read) -> SessionPlan {
        let reading = work.reading();
        // Neither drawing nor reading stops while there is the other.
        let for_reading = match (reading, work.decodes.len()) {
            (0, _) => 0,
            (_, 0) => quota.min(reading),
            (_, _) if quota == 1 => usize::from(self.clock.is_multiple_of(2)),
            (_, decodes) => reading.min((quota / 2).max(quota.saturating_sub(decodes))),
        };
        let mut plan = SessionPlan::default();
        let mut left = for_reading;
        for &(sequence, missing) in &work.again {
            let tokens = missing.min(left);
            plan.is_short |= tokens < missing;
            if tokens > 0 {
                left -= tokens;
                plan.again.push((sequence, tokens));
            }
        }
        for &(id, _) in &work.prompts {
            if left == 0 && (read.copies_left == 0 || read.parts.is_empty()) {
                plan.is_short = true;
                break;
            }
            let Some(part) = self.part_of_prompt(id, left, read) else { continue };
            plan.is_short |= part.is_short;
            if part.tokens == 0 {
                continue;
            }
            left -= part.tokens - part.copies;
            read.copies_left -= part.copies;
            if let Some(behind) = part.behind {
                let others = read.parts.entry(behind).or_default();
                if part.copies < part.tokens && others.len() < COMPARED_MAX {
                    others.push((id, part.tokens));
                }
            }
            plan.prompts.push((id, part.tokens));
        }
        let read = for_reading - left;
        plan.decodes = work.decodes[..work.decodes.len().min(quota - read)].to_vec();
        plan.is_short |= plan.decodes.len() < work.decodes.len();
        plan.tokens = plan.decodes.len() + read;
        plan
    }

    /// Takes pages for what a session does.
    fn take_parts(&mut self, compute: &C, plan: SessionPlan, parts: &mut Vec<Part>) {
        for sequence in plan.decodes {
            let s = &mut self.running[sequence];
            s.last_step = self.clock;
            if s.cached == s.held.pages.len() * self.page_tokens {
                s.reserved.pages -= 1;
                s.held.pages.push(self.pool.take_page());
            }
            parts.push(Part::Decode { sequence });
        }
        for (sequence, tokens) in plan.again {
            let s = &mut self.running[sequence];
            s.last_step = self.clock;
            while s.held.pages.len() * self.page_tokens < s.cached + tokens {
                s.reserved.pages -= 1;
                s.held.pages.push(self.pool.take_page());
            }
            parts.push(Part::Again { sequence, tokens });
        }
        for (id, tokens) in plan.prompts {
            if let Err(error) = self.begin_state(compute, id, None) {
                self.broken.push((id, error));
                continue;
            }
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            while job.held.pages.len() * self.page_tokens < job.computed + tokens {
                job.reserved.pages -= 1;
                job.held.pages.push(self.pool.take_page());
            }
            parts.push(Part::Prompt { job: id, tokens });
        }
    }

    /// What a step that may compute `left` more tokens reads of the prompt of a job.
    fn part_of_prompt(&self, id: u64, left: usize, read: &Read) -> Option<PromptPart> {
        let job = self.jobs.get(&id)?;
        let until = self.seen_until(id, job.computed).min(job.plan.prompt.len());
        let mut wanted = until - job.computed;
        if self.pool.has_room_for_snapshot() {
            // A snapshot can be taken of what is there at the end of a step.
            let next_fork = job.forks.iter().find(|&&fork| fork > job.computed);
            wanted = next_fork.map_or(wanted, |fork| wanted.min(fork - job.computed));
        }
        let behind = self.behind(job);
        let others = behind.as_ref().and_then(|behind| read.parts.get(behind));
        let Likeness { tokens: alike, goes_on, ends } = others.map_or_else(Likeness::default, |others| self.alike(job, others));
        let alike = alike.min(wanted);
        // What is seen of a picture may be there twice.
        let copies = if job.plan.pictures.is_empty() { alike.min(read.copies_left) } else { 0 };
        // Pages that others read are in the cache when the step is over, and the page in which a prompt ends can be copied then.
        let may_find = job.plan.pages_in(job.computed) < job.plan.cacheable_pages();
        let is_whole = wanted <= left + copies;
        let waits_for_pages = may_find && ((alike >= self.page_tokens && copies < alike) || (goes_on && !is_whole));
        let waits_for_copy =
            ends && copies < alike && job.plan.cacheable().min(job.computed + alike) >= job.computed + self.worthwhile();
        let waits = (!self.pool.has_states() && (waits_for_pages || waits_for_copy)) || self.awaits_state(job);
        let tokens = match wanted.min(left + copies) {
            _ if waits => 0,
            all if all == wanted => all,
            _ if left == 0 => 0,
            // Others can go on behind whole pages only.
            some if !self.pool.has_states() && some >= self.page_tokens => {
                job.plan.pages_in(job.computed + some) * self.page_tokens - job.computed
            }
            some => some,
        };
        Some(PromptPart { tokens, copies: copies.min(tokens), behind, is_short: tokens < wanted && !waits })
    }

    /// Whether a prompt that has not begun waits for what another of its session will leave behind: with states, it can go on only from where somebody was.
    fn awaits_state(&self, job: &Job<C::Frozen>) -> bool {
        let root = |job: &Job<C::Frozen>| (job.session, job.plan.root(job.weights.0));
        let leaves_it = |other: &Job<C::Frozen>| {
            let pages = other.forks.iter().find(|&&fork| fork > other.computed).map_or(0, |&fork| job.plan.pages_in(fork));
            let is_there = other.held.state.is_some() && root(other) == root(job);
            is_there && pages > 0 && pages <= job.plan.cacheable_pages() && {
                let tokens = pages * self.page_tokens;
                job.plan.prompt[..tokens] == other.plan.prompt[..tokens]
                    && ((job.plan.pictures.is_empty() && other.plan.pictures.is_empty())
                        || (0..pages).all(|page| job.plan.page(page) == other.plan.page(page)))
            }
        };
        let may_wait = job.held.state.is_none() && self.pool.has_room_for_snapshot();
        may_wait && self.prefilling.iter().filter_map(|id| self.jobs.get(id)).any(leaves_it)
    }

    /// What the next token of a prompt follows, if others can follow the same: whole pages, which are shared, and what copies of one page have in common.
    fn behind(&self, job: &Job<C::Frozen>) -> Option<Behind> {
        let pages = job.plan.pages_in(job.computed);
        let begun = match job.computed - pages * self.page_tokens {
            0 => None,
            tokens => Some((tokens, job.held.begun?)),
        };
        Some((job.plan.root(job.weights.0), job.held.pages.get(..pages)?.to_vec(), begun))
    }

    /// How a prompt goes on, from the first token that is not computed, beside these.
    fn alike(&self, job: &Job<C::Frozen>, others: &[(u64, usize)]) -> Likeness {
        let with = |&(other, tokens): &(u64, usize)| {
            let Some(other) = self.jobs.get(&other) else { return Likeness::default() };
            let same = common_prefix(&job.plan.prompt[job.computed..], &other.plan.prompt[other.computed..], tokens);
            if job.plan.pictures.is_empty() && other.plan.pictures.is_empty() {
                let ends = other.computed + tokens == other.plan.prompt.len();
                return Likeness { tokens: same, goes_on: same == tokens && !ends, ends };
            }
            let first = job.plan.pages_in(job.computed);
            let pages = first..first + same / self.page_tokens;
            let pages = pages.take_while(|&page| job.plan.page(page) == other.plan.page(page)).count();
            Likeness { tokens: pages * self.page_tokens, ..Likeness::default() }
        };
        others.iter().map(with).max().unwrap_or_default()
    }

    /// Takes over what the cache has of the prompt of a job that is about to begin, and, as long as it has only read whole pages, what others have
    /// read beyond them. What a state goes on from is found only before it has begun.
    pub(super) fn look_up_prefix(&mut self, compute: &C, id: u64) -> Result<(), String> {
        if self.jobs.get(&id).is_some_and(|job| job.held.begun.is_some()) {
            self.begin_anew(id);
        }
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(()) };
        let known = job.plan.pages_in(job.computed);
        let begins = !std::mem::replace(&mut job.looked_up, true);
        if job.held.state.is_some() || job.computed != known * self.page_tokens {
            return Ok(());
        }
        let pages = (known..job.plan.cacheable_pages()).map(|page| job.plan.page(page));
        let found = self.pool.find_promised(job.prefix, pages);
        let hit_tokens = found.pages.len() * self.page_tokens;
        job.reserved.pages -= found.pages.len();
        job.prefix = found.prefix;
        job.computed += hit_tokens;
        job.cache_hit_tokens = hit_tokens + if begins { 0 } else { job.cache_hit_tokens };
        job.held.pages.extend(found.pages);
        if self.pool.has_states() {
            // Where another prompt parted from this one, a third may too.
            job.forks = [found.known * self.page_tokens, job.plan.resumable()];
        }
        found.snapshot.map_or(Ok(()), |snapshot| self.begin_state(compute, id, Some(snapshot)))
    }

    /// Gives the prompt of a job its state, if there are states and it has none, with a copy of `from`.
    fn begin_state(&mut self, compute: &C, id: u64, from: Option<u32>) -> Result<(), String> {
        let job = self.jobs.get_mut(&id).filter(|job| self.pool.has_states() && job.held.state.is_none());
        let Some(job) = job else { return Ok(()) };
        let (mut reserved, mut held) = (job.reserved, std::mem::take(&mut job.held));
        let taken = self.take_state(compute, &mut reserved, &mut held, from);
        if let Some(job) = self.jobs.get_mut(&id) {
            (job.reserved, job.held) = (reserved, held);
        }
        taken
    }
}

/// How often a step is divided anew for what some leave of their part, at most.
const DIVISIONS_MAX: usize = 4;

/// With so many prompts that others compare theirs, at most.
const COMPARED_MAX: usize = 32;

/// Weights, the whole pages that a token follows, and how many tokens of the page that it lies in were copied, and of what.
type Behind = (Prefix, Vec<u32>, Option<(usize, u64)>);

/// Jobs and how many tokens of each, by what these follow.
type Readings = HashMap<Behind, Vec<(u64, usize)>>;

/// What a step reads of prompts.
#[derive(Default)]
struct Read {
    parts: Readings,
    /// Tokens that it may still read because they repeat others, beside those that it computes.
    copies_left: usize,
}

/// How a prompt goes on beside others of which a step reads something.
#[derive(Default, PartialEq, Eq, PartialOrd, Ord)]
struct Likeness {
    /// For how many tokens as one of them, of those that the step reads.
    tokens: usize,
    /// Whether the step reads no more of that one than these, although there is more.
    goes_on: bool,
    /// Whether the step reads that one to its end.
    ends: bool,
}

/// What a step reads of one prompt.
struct PromptPart {
    tokens: usize,
    /// How many of them follow the same tokens as those of others in this step: the device has computed them already.
    copies: usize,
    /// What it follows, if others can.
    behind: Option<Behind>,
    /// Whether there was too little for more.
    is_short: bool,
}

/// What a session does in a step.
#[derive(Default)]
struct SessionPlan {
    /// Places in `running`.
    decodes: Vec<usize>,
    /// Places in `running`, and how many tokens of each.
    again: Vec<(usize, usize)>,
    /// Jobs, and how many tokens of each.
    prompts: Vec<(u64, usize)>,
    /// Tokens that are new.
    tokens: usize,
    /// Whether it could do more.
    is_short: bool,
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

/// How many of the first `most` tokens of both are the same: many at a time, for prompts are long.
fn common_prefix(a: &[u32], b: &[u32], most: usize) -> usize {
    const AT_ONCE: usize = 64;
    let most = most.min(a.len()).min(b.len());
    let (a, b) = (&a[..most], &b[..most]);
    let blocks = a.chunks_exact(AT_ONCE).zip(b.chunks_exact(AT_ONCE)).take_while(|(a, b)| a == b).count();
    let first = blocks * AT_ONCE;
    first + a[first..].iter().zip(&b[first..]).take_while(|(a, b)| a == b).count()
}

/// A part of a step in the form that the device takes, and where its rows go.
pub(super) fn span<'s, F, S>(
    (jobs, sights): (&'s BTreeMap<u64, Job<F>>, &'s Sights<S>),
    running: &'s [Sequence],
    part: &Part,
    targets: &mut Vec<RowFor>,
) -> StepSpan<'s, F, S> {
    let id = match *part {
        Part::Prompt { job, .. } => job,
        Part::Again { sequence, .. } | Part::Decode { sequence } => running[sequence].job,
    };
    let job = &jobs[&id];
    let plan = &job.plan;
    let weights = (job.weights.0, &job.weights.1);
    let pictures =
        plan.pictures.iter().enumerate().map(|(i, picture)| (picture, sights.get(&(id, i)).map(|(_, seen)| seen))).collect();
    match *part {
        Part::Decode { sequence } => {
            let s = &running[sequence];
            let guesses = s.guesses.fed();
            let draw =
                |ahead| RowTask::Draw { settings: plan.settings, samples: vec![s.index], position: s.tokens.len() + ahead };
            targets.extend((0..=guesses.len()).map(|ahead| RowFor::Next { sequence, ahead }));
            StepSpan {
                weights,
                tokens: [&[s.token(plan, s.cached)], guesses].concat(),
                past: s.cached,
                length_max: plan.length_max(),
                held: s.held.clone(),
                pictures,
                rows: (0..=guesses.len()).map(|ahead| (ahead, draw(ahead))).collect(),
            }
        }
        Part::Again { sequence, tokens } => {
            let s = &running[sequence];
            let tokens = (s.cached..s.cached + tokens).map(|position| s.token(plan, position)).collect();
            let (held, length_max) = (s.held.clone(), plan.length_max());
            StepSpan { weights, tokens, past: s.cached, length_max, held, pictures, rows: Vec::new() }
        }
        Part::Prompt { tokens, .. } => {
            let first = job.computed;
            let mut rows = Vec::new();
            // The row of a position predicts the one after it.
            let predicted = (first + 1).max(plan.wanted.first())..(first + tokens + 1).min(plan.prompt.len());
            for position in predicted {
                if let Some(task) = plan.score_task(position) {
                    rows.push((position - 1 - first, task));
                    targets.push(RowFor::Score { job: id, position });
                }
            }
            if first + tokens == plan.prompt.len() {
                let samples = (0..plan.num_samples).collect();
                rows.push((tokens - 1, RowTask::Draw { settings: plan.settings, samples, position: 0 }));
                targets.push(RowFor::First { job: id });
            }
            let tokens = plan.prompt[first..first + tokens].to_vec();
            let (held, length_max) = (job.held.clone(), plan.length_max());
            StepSpan { weights, tokens, past: first, length_max, held, pictures, rows }
        }
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
