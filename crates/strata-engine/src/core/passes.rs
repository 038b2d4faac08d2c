//! Training passes: what goes into one, what comes of it, and what runs between its layers.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::sight::Seen;
use super::{INNER_PASS_FRACTION, PASS_BASE_TOKENS, State, cancelled};
use crate::api::{Client, Failure, ModelId};
use crate::compute::{Compute, PassError, PassPart};
use crate::datum::{Extent, PreparedDatum};
use crate::fair::{Standing, Work, company_limit};
use crate::files::Storage;
use crate::pictures::PictureId;
use crate::tenant::{RunningForward, Tenant};

/// A training pass that runs, or a picture that is being seen.
pub(super) struct PassInWork {
    /// Who takes part, and with how much work.
    pub(super) clients: Vec<(Client, usize)>,
    /// If it has hardly begun and may be left for a larger one.
    pub(super) early: Option<Early>,
    /// Whether it is left.
    pub(super) left: bool,
    /// Tokens of the largest pass that may run within it, where there is room.
    pub(super) inner: usize,
    /// What it takes of the memory for training, in tokens: more than it has, where it keeps activations.
    pub(super) room: usize,
    /// What it is charged as.
    pub(super) work: Work,
    pub(super) uids: Vec<u64>,
    /// The picture, if it is one.
    pub(super) sees: Option<Sees>,
    /// Up to when its time was charged.
    pub(super) charged_until: Duration,
}

/// A pass that has hardly begun.
pub(super) struct Early {
    /// What of each model is in it.
    queues: Vec<Queue>,
    /// Tokens of the largest pass that may take its place.
    most: usize,
    /// Layers after each of which it may still be left.
    layers: usize,
}

/// The next examples of a model.
#[derive(Clone)]
pub(super) struct Queue {
    model_id: ModelId,
    client: Client,
    backward: bool,
    examples: Vec<Extent>,
}

/// A picture that is being seen.
pub(super) struct Sees {
    pub(super) id: PictureId,
    pub(super) tokens: usize,
    pub(super) owner: Arc<str>,
}

/// What a pass takes from one tenant.
struct Part<C: Compute> {
    model_id: ModelId,
    uid: u64,
    client: Client,
    learner: C::Learner,
    /// The operations that have examples in the pass, the first perhaps computed in part.
    ops: VecDeque<RunningForward>,
    /// Examples of `ops` that are in the pass.
    count: usize,
    backward: bool,
}

/// What became of a pass.
#[derive(Clone, Copy)]
enum Outcome<'a> {
    Done,
    /// It has changed nothing.
    Left,
    Failed(&'a str),
}

/// A pass may be so many times as long for the sake of examples that mostly repeat those before them: in another pass they would be all new.
const MOSTLY_COPIES_FACTOR: usize = 2;

/// Work of a pass for which one of so much is worth leaving.
fn larger_than(work: usize) -> usize {
    work + work.div_ceil(2)
}

impl<C: Compute, S: Storage<C::State>> State<C, S> {
    /// Runs what the model of a session needs that has waited longest: an operation on its adapter, or a pass.
    pub(super) fn train(&mut self, c: &C, client: &Client, pass_tokens: usize) {
        let of_client = self.tenants.iter().filter(|(_, t)| t.client == *client);
        let ready = of_client.filter(|(_, t)| t.due || self.has_example(t, pass_tokens));
        match ready.min_by_key(|(_, t)| t.served) {
            Some((model_id, tenant)) if tenant.due => {
                let model_id = model_id.clone();
                self.take_turn(c, &model_id);
            }
            Some((model_id, _)) => {
                let model_id = model_id.clone();
                if let Some(seen) = self.see_for_pass(c, &model_id, pass_tokens) {
                    self.run_pass(c, client, pass_tokens, seen);
                }
            }
            None => {}
        }
    }

    /// Whether a pass of at most so many tokens can take an example of a tenant.
    pub(super) fn has_example(&self, tenant: &Tenant<C>, pass_tokens: usize) -> bool {
        let next = tenant.next_example().filter(|datum| datum.tokens.len() <= pass_tokens);
        let unseen = |datum: &PreparedDatum| datum.pictures.iter().find(|picture| !self.batcher.has_seen(picture)).cloned();
        next.is_some_and(|datum| unseen(datum).is_none_or(|picture| self.batcher.may_see(&tenant.client.owner, &picture)))
    }

    /// Runs one pass for a session, whose next pictures were `seen`, and for others what goes with it. If more come who would go with it when it has hardly begun, it is left, and all is as it was.
    fn run_pass(&mut self, c: &C, primary: &Client, tokens_max: usize, mut seen: Seen<C>) {
        let free = self.room();
        let mut parts = self.choose_parts(primary, tokens_max, free, &mut seen);
        if parts.is_empty() {
            return;
        }
        let mut clients: Vec<(Client, usize)> = Vec::new();
        for part in &parts {
            let work = work_of(part.extents());
            match clients.iter_mut().find(|(client, _)| *client == part.client) {
                Some((_, sum)) => *sum += work,
                None => clients.push((part.client.clone(), work)),
            }
        }
        let work = clients.iter().map(|(_, work)| work).sum();
        let tokens: usize = parts.iter().flat_map(Part::extents).map(|extent| extent.tokens).sum();
        let uids = parts.iter().map(|p| p.uid).collect();
        let queue = |p: &Part<C>| Queue {
            model_id: p.model_id.clone(),
            client: p.client.clone(),
            backward: p.backward,
            examples: p.extents().collect(),
        };
        let (queues, most) = (parts.iter().map(queue).collect(), self.budget.pass_tokens.min(tokens_max).min(free));
        let mut parts_in_work: Vec<PassPart<'_, C>> = parts.iter_mut().map(Part::work).collect();
        // What is free beyond this pass and all that may run within it saves computing activations twice.
        let spare = free.saturating_sub(tokens + tokens / (INNER_PASS_FRACTION - 1)) as u64;
        let kept_bytes = c.kept_bytes(&parts_in_work, spare * self.budget.bytes_per_token);
        let room = tokens + kept_bytes.div_ceil(self.budget.bytes_per_token) as usize;
        // What comes after one that was left is larger, or stays: there is an end to it.
        let may_be_left = seen.is_empty() && work >= larger_than(self.left_work);
        self.passes.push(PassInWork {
            clients,
            early: may_be_left.then(|| Early { queues, most, layers: c.early_layers() }),
            left: false,
            inner: self.inner_tokens(self.passes.len(), work),
            room,
            work: Work::Training,
            uids,
            sees: None,
            charged_until: c.now(),
        });
        let depth = self.passes.len();
        let done = {
            let mut between = || self.guarded_between(c, depth);
            catch_unwind(AssertUnwindSafe(|| c.pass(&mut parts_in_work, &seen, kept_bytes, &mut between)))
        };
        drop(parts_in_work);
        // An inner pass that panicked may have left itself behind.
        self.passes.truncate(depth);
        self.charge_pass(c);
        let left = self.passes.pop().is_some_and(|pass| pass.left);
        if left && matches!(done, Ok(Err(PassError::Interrupted))) {
            self.left_work = work;
            return parts.into_iter().for_each(|part| self.put_back(c, part, Outcome::Left));
        }
        self.left_work = 0;
        let was_ended = matches!(done, Ok(Err(PassError::Interrupted)));
        let error = match done {
            Ok(Ok(logprobs)) if logprobs.len() == parts.iter().map(Part::num_targets).sum::<usize>() => {
                let mut rest = &logprobs[..];
                for part in &mut parts {
                    rest = part.take(rest);
                }
                None
            }
            Ok(Ok(logprobs)) => Some(format!("{} log-probabilities came back", logprobs.len())),
            Ok(Err(PassError::Interrupted)) => Some("it was interrupted".into()),
            Ok(Err(PassError::Failed(error))) => Some(error),
            Err(_) => Some("it panicked; the server log says where".into()),
        };
        match &error {
            Some(_) if was_ended => tracing::info!("a training pass was ended before its time"),
            Some(error) => tracing::error!(error, "a training pass failed"),
            None => {}
        }
        for part in parts {
            self.put_back(c, part, error.as_deref().map_or(Outcome::Done, Outcome::Failed));
        }
    }

    /// Whether the pass that runs had better be left: it has hardly begun, and with those who have come since it would be much larger. Many who send at the same time
    /// come one by one: without this whoever is first would run alone, and others in passes that are as small.
    fn is_better_left(&self) -> bool {
        let Some(pass) = self.passes.last() else { return false };
        let Some(Early { queues: own, most, .. }) = &pass.early else { return false };
        let mut queues = self.queues(*most, *most, &Seen::<C>::new());
        queues.extend(own.iter().cloned());
        let first = queues.iter().map(|queue| &queue.client).min_by_key(|client| self.fair.standing(client, Work::Training));
        let Some(first) = first.cloned() else { return false };
        let shares = self.share_out(&first, queues, *most, self.room() + pass.room);
        let work = work_of(shares.iter().flat_map(|(queue, count)| &queue.examples[..*count]).copied());
        work >= larger_than(work_of(own.iter().flat_map(|queue| &queue.examples).copied()))
    }

    /// Takes examples for a pass: from the session whose turn it is at least one, from others what costs nobody more than taking turns would.
    /// A sequence longer than a pass is the only one of its pass.
    /// Examples with pictures are taken if those are among what was `seen`, or were seen before.
    fn choose_parts(&mut self, primary: &Client, tokens_max: usize, room: usize, seen: &mut Seen<C>) -> Vec<Part<C>> {
        let most = self.budget.pass_tokens.min(tokens_max);
        let queues = self.share_out(primary, self.queues(most, tokens_max, seen), most, room);
        self.served += 1;
        let mut parts = Vec::new();
        for (Queue { model_id, .. }, count) in queues {
            if count > 0
                && let Some(tenant) = self.tenants.get_mut(&model_id)
            {
                tenant.served = self.served;
                parts.extend(Part::take_from(model_id, tenant, count));
            }
        }
        for picture in parts.iter().flat_map(Part::examples).flat_map(|datum| &datum.pictures) {
            if !seen.contains_key(&picture.id)
                && let Some(known) = self.batcher.seen(&picture.id)
            {
                seen.insert(picture.id, known);
            }
        }
        parts
    }

    /// What waits for a pass of `most` tokens, if those of an example are at most `most_of_one`.
    fn queues(&self, most: usize, most_of_one: usize, seen: &Seen<C>) -> Vec<Queue> {
        let is_seen =
            |datum: &PreparedDatum| datum.pictures.iter().all(|p| seen.contains_key(&p.id) || self.batcher.has_seen(p));
        let ready = self.tenants.iter().filter(|(_, t)| t.next_example().is_some_and(|d| d.tokens.len() <= most_of_one));
        let queue = |(model_id, t): (&ModelId, &Tenant<C>)| {
            let examples = t.next_examples(most * MOSTLY_COPIES_FACTOR).take_while(|(_, datum, _)| is_seen(datum));
            let examples = examples.map(|(_, _, extent)| extent).collect();
            let backward = t.running.front().is_some_and(|forward| forward.backward);
            Queue { model_id: model_id.clone(), client: t.client.clone(), backward, examples }
        };
        ready.map(queue).collect()
    }

    /// How many examples a pass takes of each, the session's whose turn it is first.
    fn share_out(&self, primary: &Client, mut queues: Vec<Queue>, most: usize, room: usize) -> Vec<(Queue, usize)> {
        queues.sort_by_cached_key(|Queue { model_id, client, .. }| {
            let served = self.tenants.get(model_id).map(|t| t.served);
            (client != primary, self.fair.standing(client, Work::Training), served, model_id.clone())
        });
        let wants = queues.iter().map(|queue| (&queue.client, work_of(queue.examples.iter().copied())));
        let limit = company_limit(wants, PASS_BASE_TOKENS).map_or(most, |company| company.min(most));
        // Between the layers of another, and in company, a pass stays as short as was promised.
        let of_copies = if limit < self.budget.pass_tokens { limit } else { limit * MOSTLY_COPIES_FACTOR };
        let counts = share(&queues, (limit, of_copies), room);
        queues.into_iter().zip(counts).collect()
    }

    /// Puts a part back where it came from, or answers for it if its model is gone.
    fn put_back(&mut self, c: &C, mut part: Part<C>, outcome: Outcome<'_>) {
        let tenant = self.tenants.get_mut(&part.model_id).filter(|t| t.uid == part.uid);
        let Some(tenant) = tenant else {
            let failure = Failure::User(format!("model {} was unloaded before this operation was done", part.model_id));
            part.ops.into_iter().for_each(|forward| forward.fail(failure.clone()));
            return;
        };
        tenant.in_pass = false;
        if let Outcome::Failed(error) = outcome {
            // What was answered had a part in the gradient, so a step without it would not be what was asked for.
            let why = Failure::Server(format!("training pass: {error}"));
            if part.backward {
                c.lose_gradient(&mut part.learner, why.clone());
            }
            part.ops.drain(..).for_each(|forward| forward.fail(why.clone()));
        }
        if !matches!(outcome, Outcome::Left) {
            part.fail_what_is_not_finite(c);
        }
        tenant.learner = Some(part.learner);
        while let Some(forward) = part.ops.pop_back() {
            tenant.running.push_front(forward);
        }
        tenant.answer_done();
        tenant.give_up_cancelled(c, &cancelled());
        let model_id = part.model_id;
        self.begin_ops(c, &model_id);
    }

    /// As `between`, of pass `depth`. What panics between layers is no part of it.
    pub(super) fn guarded_between(&mut self, c: &C, depth: usize) -> ControlFlow<()> {
        let flow = catch_unwind(AssertUnwindSafe(|| self.between(c))).unwrap_or_else(|_| {
            tracing::error!("the engine panicked between the layers of a pass; samples in work fail, models stay");
            self.recover(c, depth);
            ControlFlow::Continue(())
        });
        if let Some(pass) = self.passes.last_mut() {
            let further = |early: Early| (early.layers > 1).then(|| Early { layers: early.layers - 1, ..early });
            pass.early = pass.early.take().and_then(further);
        }
        flow
    }

    /// Tokens of the largest pass that may run within a pass at `depth`, or a picture, of so many tokens. What is within comes to its end before that goes on, so it is small
    /// beside it, and beside all that wait below.
    pub(super) fn inner_tokens(&self, depth: usize, tokens: usize) -> usize {
        let outer = self.passes[..depth].last().map_or(usize::MAX, |pass| pass.inner);
        outer.min(tokens / INNER_PASS_FRACTION)
    }

    /// Tokens for which training has memory now.
    pub(super) fn room(&self) -> usize {
        let in_work: usize = self.passes.iter().map(|p| p.room).sum();
        self.budget.activation_tokens.saturating_sub(in_work)
    }

    /// Between two layers of a pass: what has arrived is taken, and who is due before the pass runs.
    fn between(&mut self, c: &C) -> ControlFlow<()> {
        self.charge_pass(c);
        loop {
            self.take_arrivals(c);
            if self.intake.is_closed() || self.pass_is_for_nobody() {
                return ControlFlow::Break(());
            }
            if self.is_better_left() {
                self.passes.last_mut().into_iter().for_each(|pass| pass.left = true);
                return ControlFlow::Break(());
            }
            let Some(pass) = self.passes.last() else { return ControlFlow::Continue(()) };
            // Whoever has had least of those in the pass waits for it.
            let (work, inner, sees) = (pass.work, pass.inner, pass.sees.is_some());
            let Some(due) = pass.clients.iter().map(|(client, _)| self.fair.standing(client, work)).min() else {
                return ControlFlow::Continue(());
            };
            let inner = inner.min(self.room());
            match self.next_work(c, inner) {
                // Neither drawing nor reading stops while there is the other: those who have a picture seen take turns with it.
                Some((standing, client, work)) if standing < due || sees && work == Work::Sampling && standing == due => {
                    self.run(c, &client, work, inner);
                    if let Some(pass) = self.passes.last_mut() {
                        pass.charged_until = c.now();
                    }
                }
                _ => return ControlFlow::Continue(()),
            }
        }
    }

    /// Whether work of a client lets what is in work come to its end first, for someone who is before it in line and waits for that: a pass that was set aside, or a picture for whose
    /// tower there is no memory. An owner who has a pass set aside holds it up by that one piece of work, not by all its sessions in turn; nor does a session of the same owner by all
    /// that it has to do. Others are as free to run as they always are.
    pub(super) fn gives_way(&self, standing: Standing, client: &Client, waiting_to_see: Option<Standing>) -> bool {
        if waiting_to_see.is_some_and(|waiting| waiting < standing) && self.batcher.sees_for(&client.owner) {
            return true;
        }
        let firsts = self.passes.iter().map(|pass| {
            let standings = pass.clients.iter().map(|(client, _)| (self.fair.standing(client, pass.work), client));
            standings.min()
        });
        firsts.enumerate().any(|(depth, first)| {
            let Some((_, waiting)) = first.filter(|(first, _)| *first < standing) else { return false };
            let holds_up = |other: &Client| match waiting.owner == client.owner {
                true => other == client,
                false => other.owner == client.owner,
            };
            self.passes[depth + 1..].iter().flat_map(|pass| &pass.clients).any(|(other, _)| holds_up(other))
        })
    }

    fn pass_is_for_nobody(&self) -> bool {
        let Some(pass) = self.passes.last() else { return false };
        if let Some(sees) = &pass.sees {
            return !self.is_shown(&sees.id);
        }
        !pass.uids.iter().any(|uid| self.tenants.values().any(|t| t.uid == *uid))
    }

    /// Charges the innermost pass for the time since it was last charged.
    pub(super) fn charge_pass(&mut self, c: &C) {
        let now = c.now();
        let Some(pass) = self.passes.last_mut() else { return };
        let time = now.saturating_sub(pass.charged_until);
        pass.charged_until = now;
        let (clients, work) = (std::mem::take(&mut pass.clients), pass.work);
        self.charge(&clients, work, time);
        if let Some(pass) = self.passes.last_mut() {
            pass.clients = clients;
        }
    }
}

impl<C: Compute> Part<C> {
    /// Takes the next `count` examples of a tenant, and its learner with them.
    fn take_from(model_id: ModelId, tenant: &mut Tenant<C>, count: usize) -> Option<Self> {
        let backward = tenant.running.front()?.backward;
        let learner = tenant.learner.take()?;
        let (mut ops, mut left) = (VecDeque::new(), count);
        while left > 0 {
            let Some(forward) = tenant.running.pop_front() else { break };
            left = left.saturating_sub(forward.remaining());
            ops.push_back(forward);
        }
        tenant.in_pass = true;
        tenant.pass_ids = ops.iter().map(|forward| forward.id.clone()).collect();
        Some(Part { model_id, uid: tenant.uid, client: tenant.client.clone(), learner, ops, count, backward })
    }

    /// Fails the operations whose losses are no finite numbers, and all that had a part in a gradient that is none. Such a gradient is lost.
    fn fail_what_is_not_finite(&mut self, c: &C) {
        let told = |what: &str| Failure::User(format!("{what}: the adapter or the inputs are too large to compute with"));
        let mut why = None;
        for forward in std::mem::take(&mut self.ops) {
            match forward.not_finite().map(told) {
                Some(failure) => {
                    forward.fail(failure.clone());
                    why.get_or_insert(failure);
                }
                None => self.ops.push_back(forward),
            }
        }
        if !self.backward {
            return;
        }
        if why.is_none() && !self.ops.is_empty() {
            let failure = match c.gradient_is_finite(&self.learner) {
                Ok(true) => return,
                Ok(false) if self.ops.len() == 1 => told("the gradient is not finite"),
                Ok(false) => {
                    told("the gradient is not finite, of this request or of another of the model that was computed with it")
                }
                Err(failure) => failure,
            };
            self.ops.drain(..).for_each(|forward| forward.fail(failure.clone()));
            why = Some(failure);
        }
        if let Some(why) = why {
            c.lose_gradient(&mut self.learner, why);
        }
    }

    /// The examples that are in the pass.
    fn examples(&self) -> impl Iterator<Item = &PreparedDatum> {
        self.ops.iter().flat_map(RunningForward::rest).map(|(_, datum, _)| datum).take(self.count)
    }

    /// What they take of it.
    fn extents(&self) -> impl Iterator<Item = Extent> {
        self.ops.iter().flat_map(RunningForward::rest).map(|(_, _, extent)| extent).take(self.count)
    }

    fn num_targets(&self) -> usize {
        self.examples().map(|datum| datum.targets.len()).sum()
    }

    fn work(&mut self) -> PassPart<'_, C> {
        let data = self.ops.iter().flat_map(|f| &f.data[f.next_datum()..]).take(self.count).collect();
        PassPart { learner: &mut self.learner, data, backward: self.backward }
    }

    /// Hands the log-probabilities to the operations they belong to; answers those of the parts that follow.
    fn take<'l>(&mut self, logprobs: &'l [f32]) -> &'l [f32] {
        let (mut rest, mut left) = (logprobs, self.count);
        for forward in &mut self.ops {
            while left > 0 && !forward.is_done() {
                let (own, others) = rest.split_at(forward.data[forward.next_datum()].targets.len());
                forward.push_logprobs(own);
                rest = others;
                left -= 1;
            }
        }
        rest
    }
}

fn work_of(examples: impl Iterator<Item = Extent>) -> usize {
    examples.map(|extent| extent.work).sum()
}

/// How many examples a pass takes from each queue: one from each in turn, until the next of a queue would be more work than `limit`, or if most of it repeats the one before it, than `of_copies`. The
/// first is taken if it fits `room`, and no more are than do. Where some part goes back, tokens that repeat others are work as all are.
fn share(queues: &[Queue], (limit, of_copies): (usize, usize), room: usize) -> Vec<usize> {
    let mut counts = vec![0; queues.len()];
    let mut open: VecDeque<usize> = (0..queues.len()).collect();
    let (mut total, mut goes_back) = (Extent { tokens: 0, work: 0 }, false);
    while let Some(queue) = open.pop_front() {
        let Some(next) = queues[queue].examples.get(counts[queue]) else { continue };
        let with = Extent { tokens: total.tokens + next.tokens, work: total.work + next.work };
        let any_goes_back = goes_back || queues[queue].backward;
        let (work, limit) = match any_goes_back {
            true => (with.tokens, limit),
            false => (with.work, if next.work * 2 <= next.tokens { of_copies } else { limit }),
        };
        if with.tokens > room || total.tokens > 0 && work > limit {
            continue;
        }
        (total, goes_back) = (with, any_goes_back);
        counts[queue] += 1;
        open.push_back(queue);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(lengths: &[&[usize]]) -> Vec<Queue> {
        let client = Client { owner: "o".into(), session: "s".into() };
        lengths
            .iter()
            .map(|lengths| {
                let examples = lengths.iter().map(|&tokens| Extent { tokens, work: tokens }).collect();
                Queue { model_id: "m".into(), client: client.clone(), backward: false, examples }
            })
            .collect()
    }

    #[test]
    fn a_pass_takes_from_every_queue_in_turn() {
        let queues = queues(&[&[10; 100], &[10; 2], &[10; 100]]);
        assert_eq!(share(&queues, (100, 100), 1000), [4, 2, 4]);
        assert_eq!(share(&queues, (110, 110), 1000), [5, 2, 4], "the odd one goes to the first in line");
        assert_eq!(share(&queues, (110, 110), 50), [2, 2, 1], "there is no more room");
    }

    #[test]
    fn a_sequence_longer_than_the_limit_runs_alone_if_it_fits_at_all() {
        assert_eq!(share(&queues(&[&[500, 1], &[500]]), (100, 100), 1000), [1, 0]);
        assert_eq!(share(&queues(&[&[500, 1], &[50]]), (100, 100), 400), [0, 1]);
    }

    #[test]
    fn examples_that_repeat_others_go_on_while_there_is_little_work_and_room_for_all_their_tokens() {
        let mut queues = queues(&[&[60; 20]]);
        queues[0].examples[1..].iter_mut().for_each(|extent| extent.work = 20);
        assert_eq!(share(&queues, (100, 100), 1000), [3]);
        assert_eq!(share(&queues, (100, 200), 1000), [8], "in a pass of their own they would be more work");
        assert_eq!(share(&queues, (200, 200), 300), [5], "all their tokens take memory");
        let mut with_another = self::queues(&[&[60; 20], &[10]]);
        with_another[0].examples = queues[0].examples.clone();
        assert_eq!(share(&with_another, (200, 200), 1000), [7, 1]);
        with_another[1].backward = true;
        let why = "beside one that goes back they are computed as others are";
        assert_eq!(share(&with_another, (200, 400), 1000), [3, 1], "{why}");
        with_another.reverse();
        assert_eq!(share(&with_another, (200, 400), 1000), [1, 3]);
    }

    #[test]
    fn a_queue_whose_next_example_does_not_fit_waits_and_keeps_its_order() {
        assert_eq!(share(&queues(&[&[60, 60, 1], &[10, 10, 10, 10, 10]]), (100, 100), 1000), [1, 4]);
    }
}
