//! Sending, and what must come of it: who is refused, who is answered, and with what numbers.

use std::mem::discriminant;

use crate::api::{Cells, Datum, Failure, Outcome, Refusal, Request, Response, TrainOp};
use crate::ledger::Charge;
use crate::sampler::REQUEST_BYTES;

use super::super::oracle::{self, Numbers, VOCAB};
use super::super::toy::{ADAPTER_FAULT, Content, bytes_of};
use super::{ATTEMPTS_MAX, Asked, Event, Kind, Sampler, TRACE_LINES, World, brief, brief_outcome, id_of};

impl World {
    pub(super) fn send(&mut self, asked: usize) {
        if let Kind::Train { model, .. } = self.asked[asked].kind {
            // Another may have its name by now.
            let m = &self.models[model];
            self.asked[asked].given_up |= m.gone && self.models.iter().any(|other| !other.gone && other.name == m.name);
        }
        if let (Request::Sample { sampler_id, .. }, None) = (&self.asked[asked].request, self.asked[asked].accepted) {
            let sampler = self.samplers.iter().position(|s| s.name == *sampler_id && !s.gone);
            let version = sampler.and_then(|s| self.samplers[s].versions.len().checked_sub(1));
            self.asked[asked].kind = Kind::Sample { sampler, version };
        }
        let a = &mut self.asked[asked];
        if a.given_up || (a.accepted.is_none() && self.sessions[a.session].over && !matches!(a.request, Request::EndSession)) {
            return;
        }
        a.attempts += 1;
        let attempt = a.attempts;
        if let (Request::Train { op: TrainOp::Snapshot { .. }, .. }, Kind::Train { model, .. }, None) =
            (&a.request, &a.kind, a.accepted)
        {
            let (session, bytes) = (a.session, bytes_of(self.models[*model].rank).frozen);
            let had_room = self.room(session) >= bytes;
            self.asked[asked].had_room = had_room;
        }
        let a = &self.asked[asked];
        let inbox = self.inbox.clone();
        let reply = Box::new(move |outcome, charge| {
            inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push_back((asked, attempt, outcome, charge));
        });
        let client = self.sessions[a.session].client.clone();
        let done = self.handle.submit(id_of(asked), client, a.request.clone(), reply);
        trace!(self, "send {} (attempt {attempt}): {} -> {done:?}", asked + 1, brief(&self.asked[asked].request));
        match done {
            Ok(()) => self.accepted(asked, attempt),
            Err(refusal) => self.refused(asked, refusal),
        }
    }

    fn accepted(&mut self, asked: usize, attempt: u64) {
        if self.asked[asked].accepted.is_some() {
            return self.violate(format!("request {} was accepted twice", asked + 1));
        }
        self.asked[asked].accepted = Some(attempt);
        self.owed_bytes += held_bytes(&self.asked[asked].request);
        let Kind::Train { model, seq } = self.asked[asked].kind else { return };
        if self.models[model].gone {
            return self.violate(format!("request {} was accepted for a model that is gone", asked + 1));
        }
        self.models[model].ops.insert(seq, asked);
        if let Request::Train { op: TrainOp::Snapshot { sampler_id, .. }, .. } = &self.asked[asked].request {
            let known = self.samplers.iter().position(|s| s.name == *sampler_id && !s.gone);
            let sampler = known.unwrap_or_else(|| {
                let bytes = bytes_of(self.models[model].rank).frozen;
                let session = self.models[model].session;
                let name = sampler_id.clone();
                self.samplers.push(Sampler { name, session, bytes, gone: false, versions: Vec::new(), pending: 0 });
                self.samplers.len() - 1
            });
            self.asked[asked].makes = Some(sampler);
            let bytes = bytes_of(self.models[model].rank).frozen;
            let s = &mut self.samplers[sampler];
            (s.pending, s.bytes) = (s.pending + 1, s.bytes.max(bytes));
        }
    }

    fn refused(&mut self, asked: usize, refusal: Refusal) {
        let number = asked + 1;
        let a = &self.asked[asked];
        match (refusal, &a.kind) {
            (Refusal::Seen, Kind::Train { .. }) if a.accepted.is_some() => {}
            (Refusal::Busy(_), Kind::Train { .. } | Kind::Sample { .. }) if a.accepted.is_none() => {
                if self.handle.ledger().used() == 0 {
                    self.violate(format!("request {number} finds no room in an empty account"));
                }
                self.asked[asked].refusals += 1;
                self.after(2000 * self.asked[asked].refusals, Event::Send { asked });
                if self.asked[asked].refusals > ATTEMPTS_MAX {
                    self.make_way(number);
                }
            }
            (Refusal::Busy(_), Kind::Create { model }) if !a.had_room => {
                self.models[*model].gone = true;
                self.asked[asked].given_up = true;
            }
            (Refusal::Busy(_), Kind::CreateSampler { sampler }) if !a.had_room => {
                self.samplers[*sampler].gone = true;
                self.asked[asked].given_up = true;
            }
            (Refusal::User(message), Kind::Train { model, seq }) if message.contains("there is no model") => {
                if !self.models[*model].gone && a.accepted.is_none() {
                    self.violate(format!("request {number}, operation {seq}: {message}"));
                }
                self.asked[asked].given_up = true;
            }
            (Refusal::User(message), Kind::Train { .. }) if message.contains("above the limit of") => {
                // Its place is taken by the reason, as a server does.
                if let Request::Train { op, .. } = &mut self.asked[asked].request {
                    *op = TrainOp::Refused("too large".into());
                }
                self.asked[asked].wrong = Some("too large".into());
                self.after(1, Event::Send { asked });
            }
            (Refusal::User(message), Kind::Sample { .. }) if message.contains("above the limit of") => {
                self.asked[asked].given_up = true;
            }
            (refusal, _) => self.violate(format!("request {number} is refused: {refusal}")),
        }
    }

    /// A request is refused for ever: because of a client that is gone and has left operations behind, which a server notices, or for nothing.
    fn make_way(&mut self, number: usize) {
        match self.sessions.iter().position(|s| s.lost_one && !s.over) {
            Some(session) => {
                self.end_session(session);
                self.asked.iter_mut().for_each(|asked| asked.refusals = 0);
            }
            None => self.violate(format!("request {number} is refused for ever")),
        }
    }

    pub(super) fn answered(&mut self, asked: usize, attempt: u64, outcome: Outcome, charge: Option<Charge>) {
        let number = asked + 1;
        trace!(self, "answer {number}: {}", brief_outcome(&outcome));
        self.answers += 1;
        self.fingerprint = oracle::mix(self.fingerprint, number as u64 * 2 + u64::from(outcome.is_ok()));
        let a = &mut self.asked[asked];
        if a.accepted != Some(attempt) {
            return self.violate(format!("request {number} was refused and is answered all the same"));
        }
        if a.outcome.is_some() {
            return self.violate(format!("request {number} is answered twice"));
        }
        self.owed_bytes -= held_bytes(&a.request);
        let result_bytes = result_bytes(&outcome);
        a.outcome = Some(outcome);
        if charge.as_ref().map_or(0, Charge::bytes) < result_bytes {
            self.violate(format!("the result of request {number} takes {result_bytes} bytes and is charged {charge:?}"));
        }
        if let Some(mut charge) = charge {
            let bytes = charge.bytes();
            let held = self.handle.ledger().used();
            charge.shrink_to(self.rng.below(bytes + 1));
            if held - self.handle.ledger().used() != bytes - charge.bytes() {
                return self.violate(format!(
                    "a charge of {bytes} bytes shrank to {}, and {held} are {}",
                    charge.bytes(),
                    self.handle.ledger().used()
                ));
            }
            self.held.insert(asked, charge);
            let patience = if self.rng.chance(5) { 100_000 } else { 4000 };
            self.after(patience, Event::Release { asked });
        }
        let checked = match self.asked[asked].kind.clone() {
            Kind::Create { model } => self.check_create(asked, model),
            // Its failure comes before that of the creation, which then must follow: nobody has told that model's end before.
            Kind::Train { model, .. } if !self.models[model].made && was_not_made(&self.asked[asked]) => {
                self.lose_model(model);
                self.asked[asked].ended = Some(self.shared.moment.get());
                self.check_train(model)
            }
            Kind::Train { model, .. } => self.check_train(model),
            Kind::CreateSampler { sampler } => self.check_create_sampler(asked, sampler),
            Kind::Sample { sampler, version } => self.check_sample(asked, sampler, version),
            Kind::Free { found } => match (&self.asked[asked].outcome, found) {
                (Some(Ok(Response::Freed)), _) => Ok(()),
                (Some(Err(_)), None) => Ok(()),
                (other, _) => Err(format!("{other:?}")),
            },
        };
        if let Err(what) = checked {
            self.violate(format!("request {number} ({}): {what}", brief(&self.asked[asked].request)));
        }
    }

    /// Whether a failure is what a request had to expect, whatever its kind.
    fn is_excused(&self, asked: usize, failure: &Failure) -> bool {
        let a = &self.asked[asked];
        match failure {
            Failure::User(message) => {
                a.ended.is_some()
                    || (a.cancelled.is_some() && message.contains("cancelled"))
                    || (message.contains("set aside for adapters") && !a.had_room)
            }
            Failure::Server(message) => a.ended.is_some() && message == ADAPTER_FAULT,
        }
    }

    fn check_create(&mut self, asked: usize, model: usize) -> Result<(), String> {
        let a = &self.asked[asked];
        let m = &mut self.models[model];
        match (&a.outcome, &a.request) {
            (Some(Ok(Response::Created { lora })), Request::CreateModel { lora: wanted, .. }) if lora == wanted => {
                m.numbers = Some(Numbers::fresh(wanted));
            }
            (Some(Ok(Response::Created { lora })), Request::CreateModelFromCheckpoint { source, with_optimizer, .. }) => {
                let save_id = source.save_id.as_deref().unwrap_or_default();
                let contents = self.contents.borrow();
                let content = contents.written.get(save_id).ok_or("it was made from a checkpoint that was never written")?;
                let moments = content.moments.filter(|_| *with_optimizer).unwrap_or(0);
                m.numbers = Some(Numbers { weights: content.weights, moments, gradient: 0 });
                if lora.rank != content.rank {
                    return Err(format!("it has rank {}, not {}", lora.rank, content.rank));
                }
                m.shape = content.rank;
            }
            (Some(Err(failure)), request) => {
                m.gone = true;
                let (model_name, failure) = (m.name.clone(), failure.clone());
                let from_checkpoint = matches!(request, Request::CreateModelFromCheckpoint { .. });
                let moment = self.shared.moment.get();
                for other in self.asked.iter_mut().filter(|o| o.outcome.is_none()) {
                    if matches!(other.kind, Kind::Train { model: m, .. } if m == model) {
                        other.ended.get_or_insert(moment);
                    }
                }
                let text = failure.to_string();
                let expected = text.contains("toy fault")
                    || text.contains("is not between 1 and")
                    || (from_checkpoint && (text.contains("toy disk") || text.contains("do not belong together")));
                if !expected && !self.is_excused(asked, &failure) {
                    return Err(format!("model {model_name} was not made: {text}"));
                }
                return Ok(());
            }
            (other, _) => return Err(format!("{other:?}")),
        }
        let m = &mut self.models[model];
        m.made = true;
        match m.ops.values().any(|&op| was_not_made(&self.asked[op])) {
            true => Err("it was made, and its operations failed because it was not".into()),
            false => Ok(()),
        }
    }

    /// Goes on with the operations of a model whose outcome is known, in order.
    fn check_train(&mut self, model: usize) -> Result<(), String> {
        while let Some(&asked) = self.models[model].ops.get(&self.models[model].next) {
            if !self.apply(model, asked)? {
                break;
            }
            self.models[model].next += 1;
        }
        // Of the rest, what is answered must be excused or independent of order.
        let open: Vec<(u64, usize)> = self.models[model].ops.range(self.models[model].next..).map(|(s, a)| (*s, *a)).collect();
        for (seq, asked) in open {
            let a = &self.asked[asked];
            // One that was refused as it was accepted takes no part in the order but its place.
            if let Some(outcome) = &a.outcome
                && a.wrong.is_none()
                && !matches!(outcome, Err(failure) if self.is_excused(asked, failure))
            {
                return Err(format!("operation {seq} is answered before those that precede it: {}", brief_outcome(outcome)));
            }
        }
        Ok(())
    }

    /// Computes what an operation must have come to. Answers whether its outcome was known, as far as those that follow depend on it.
    fn apply(&mut self, model: usize, asked: usize) -> Result<bool, String> {
        let number = asked as u64 + 1;
        let max_example_tokens = self.limits.max_example_tokens();
        let Request::Train { op, seq_id, .. } = self.asked[asked].request.clone() else { return Ok(true) };
        let outcome = self.asked[asked].outcome.clone();
        if let (TrainOp::SaveState(target) | TrainOp::SaveSampler(target), Some(numbers)) = (&op, self.models[model].numbers) {
            // What it holds is decided now, whenever it is written.
            let moments = matches!(op, TrainOp::SaveState(_)).then_some(numbers.moments);
            let content = Content { rank: self.models[model].shape, weights: numbers.weights, moments };
            let save_id = target.metadata["save_id"].as_str().unwrap_or_default().to_string();
            self.expected_saves.insert(save_id, content);
        }
        let is_save = matches!(op, TrainOp::SaveState(_) | TrainOp::SaveSampler(_));
        let Some(outcome) = outcome else { return Ok(is_save) };
        let fail = |what: String| Err(format!("operation {seq_id} of {}: {what}", self.models[model].name));
        if let Err(failure) = &outcome {
            let text = failure.to_string();
            let faulty = self.shared.failed.borrow().contains(&number);
            let m = &mut self.models[model];
            let expected = match &op {
                _ if self.asked[asked].wrong.as_ref().is_some_and(|wrong| text.contains(wrong)) => true,
                TrainOp::ForwardBackward { forward_only, .. } if faulty && text.contains("training pass") => {
                    if !forward_only {
                        m.lost = Some(failure.clone());
                        m.numbers.iter_mut().for_each(|n| n.gradient = 0);
                    }
                    true
                }
                TrainOp::ForwardBackward { forward_only: false, .. }
                    if self.asked[asked].worked && self.asked[asked].cancelled.is_some() && text.contains("cancelled") =>
                {
                    m.lost = Some(failure.clone());
                    m.numbers.iter_mut().for_each(|n| n.gradient = 0);
                    true
                }
                TrainOp::ForwardBackward { forward_only, .. }
                    if self.shared.failed_sights.get() > 0 && text.contains("seeing a picture") =>
                {
                    if !forward_only && self.asked[asked].worked {
                        m.lost = Some(failure.clone());
                        m.numbers.iter_mut().for_each(|n| n.gradient = 0);
                    }
                    true
                }
                TrainOp::OptimStep(_)
                    if text.contains("lost") && m.lost.as_ref().map(discriminant) == Some(discriminant(failure)) =>
                {
                    m.lost = None;
                    m.numbers.iter_mut().for_each(|n| n.gradient = 0);
                    true
                }
                TrainOp::OptimStep(_) if text.contains("toy fault") => true,
                TrainOp::OptimStep(_) if text.contains("panicked") && self.limits.faults.optim > 0 => {
                    m.lost = Some(failure.clone());
                    m.numbers.iter_mut().for_each(|n| n.gradient = 0);
                    true
                }
                TrainOp::SaveState(_) | TrainOp::SaveSampler(_) | TrainOp::LoadState { .. } if text.contains("toy") => true,
                TrainOp::Snapshot { replace: true, .. } if text.contains("samples still run") => true,
                TrainOp::Snapshot { .. } if text.contains("toy fault") => true,
                _ => false,
            };
            self.snapshot_over(asked, None);
            if !expected && !self.is_excused(asked, failure) {
                return Err(format!("operation {seq_id} of {}: {text}", self.models[model].name));
            }
            return Ok(true);
        }
        if self.asked[asked].wrong.is_some() {
            return fail("it is wrong and succeeded".into());
        }
        if self.shared.failed.borrow().contains(&number) {
            return fail("its pass failed and it succeeded".into());
        }
        let Some(mut numbers) = self.models[model].numbers else { return fail("it ran before its model was made".into()) };
        let lost = self.models[model].lost.is_some();
        match (op, outcome) {
            (TrainOp::ForwardBackward { data, loss, forward_only }, Ok(Response::ForwardBackward(output))) => {
                let expected = numbers.forward(data, &loss, forward_only, max_example_tokens)?;
                if format!("{expected:?}") != format!("{output:?}") {
                    return fail(format!("it got other numbers than alone: {output:?}, not {expected:?}"));
                }
            }
            (TrainOp::OptimStep(params), Ok(Response::OptimStep { metrics })) => {
                let norm = numbers.optim_step(&params);
                if lost || metrics != [("optim/grad_norm".to_string(), norm)] {
                    return fail(format!("the norm is {metrics:?}, not {norm}; lost: {lost}"));
                }
            }
            (TrainOp::SaveState(target) | TrainOp::SaveSampler(target), Ok(Response::Saved { dir, .. })) => {
                let save_id = target.metadata["save_id"].as_str().unwrap_or_default();
                if dir != target.dir {
                    return fail(format!("it says it is in {dir:?}"));
                }
                self.check_saved(save_id)?;
            }
            (TrainOp::Snapshot { .. }, Ok(Response::Sampler)) => {
                self.models[model].snapshots.insert(seq_id, numbers.weights);
                self.snapshot_over(asked, Some(numbers.weights));
            }
            (TrainOp::LoadState { source, with_optimizer }, Ok(Response::Loaded)) => {
                let save_id = source.save_id.as_deref().unwrap_or_default();
                let contents = self.contents.borrow();
                let Some(content) = contents.written.get(save_id) else {
                    return fail("it loaded what was never written".into());
                };
                if content.rank != self.models[model].shape {
                    return fail("it loaded an adapter of another shape".into());
                }
                let moments = content.moments.filter(|_| with_optimizer).unwrap_or(0);
                numbers = Numbers { weights: content.weights, moments, gradient: 0 };
                self.models[model].lost = None;
            }
            (_, other) => return fail(format!("it is answered with {}", brief_outcome(&other))),
        }
        self.models[model].numbers = Some(numbers);
        Ok(true)
    }

    /// A save that was answered is on the disk, and is what the model was in its place.
    fn check_saved(&self, save_id: &str) -> Result<(), String> {
        let contents = self.contents.borrow();
        let (expected, written) = (self.expected_saves.get(save_id), contents.written.get(save_id));
        match written == expected && written.is_some() {
            true => Ok(()),
            false => Err(format!("{save_id} holds {written:?}, not {expected:?}")),
        }
    }

    fn snapshot_over(&mut self, asked: usize, weights: Option<u64>) {
        let Some(sampler) = self.asked[asked].makes.map(|sampler| &mut self.samplers[sampler]) else { return };
        sampler.pending -= 1;
        sampler.versions.extend(weights);
        if sampler.pending == 0 && sampler.versions.is_empty() {
            sampler.gone = true;
        }
    }

    fn check_create_sampler(&mut self, asked: usize, sampler: usize) -> Result<(), String> {
        let a = &self.asked[asked];
        match (&a.outcome, &a.request) {
            (Some(Ok(Response::Sampler)), Request::CreateSampler { source, .. }) => {
                let weights = match source {
                    Some((source, _)) => {
                        let save_id = source.save_id.as_deref().unwrap_or_default();
                        let contents = self.contents.borrow();
                        contents.written.get(save_id).ok_or("it was made from what was never written")?.weights
                    }
                    None => oracle::BASE,
                };
                self.samplers[sampler].versions.push(weights);
                Ok(())
            }
            (Some(Err(failure)), _) => {
                self.samplers[sampler].gone = true;
                let text = failure.to_string();
                match text.contains("toy disk") || text.contains("do not belong together") || self.is_excused(asked, failure) {
                    true => Ok(()),
                    false => Err(text),
                }
            }
            (other, _) => Err(format!("{other:?}")),
        }
    }

    fn check_sample(&mut self, asked: usize, sampler: Option<usize>, version: Option<usize>) -> Result<(), String> {
        let a = &self.asked[asked];
        let Request::Sample { sample, .. } = &a.request else { return Ok(()) };
        let number = asked as u64 + 1;
        let faulty = self.shared.failed.borrow().contains(&number);
        let may_fail = faulty || self.shared.may_fail.borrow().contains(&number);
        match &a.outcome {
            Some(Ok(Response::Sampled(output))) => {
                if let Some(wrong) = &a.wrong {
                    return Err(format!("it is wrong ({wrong}) and succeeded"));
                }
                if faulty {
                    return Err("its step failed and it succeeded".into());
                }
                let sampler = sampler.ok_or("it sampled from nowhere")?;
                let mut output = output.clone();
                let hit = std::mem::take(&mut output.prompt_cache_hit_tokens);
                let length = sample.prompt.len() + sample.images.iter().map(|i| usize::from(i.file[0])).sum::<usize>();
                if (self.limits.states > 0 && hit % self.limits.page_tokens != 0) || hit >= length {
                    return Err(format!("{hit} tokens of {length} were in the prefix cache"));
                }
                let versions = &self.samplers[sampler].versions[version.unwrap_or(0)..];
                let max_context_tokens = self.limits.max_context_tokens();
                match versions.iter().any(|&weights| oracle::expected_sample(weights, sample, max_context_tokens) == output) {
                    true => Ok(()),
                    false => {
                        let expected =
                            versions.first().map(|&weights| oracle::expected_sample(weights, sample, max_context_tokens));
                        Err(format!("it got other numbers than alone: {output:?}, not {expected:?}"))
                    }
                }
            }
            Some(Err(failure)) => {
                let text = failure.to_string();
                let step_failed = text.contains("sampling step") && (text.contains("toy fault") || text.contains("panicked"));
                let expected = a.wrong.as_ref() == Some(&text)
                    || (step_failed && self.shared.failed_steps.get() > 0)
                    || (self.shared.failed_sights.get() > 0 && text.contains("seeing a picture"))
                    || (may_fail && text.contains("not finite"))
                    || (self.limits.faults.page > 0 && text.contains("the engine stopped"))
                    || (version.is_none() && (matches!(failure, Failure::User(_)) || text.contains("toy")));
                match expected || self.is_excused(asked, failure) {
                    true => Ok(()),
                    false => Err(text),
                }
            }
            other => Err(format!("{other:?}")),
        }
    }
}

/// What a request holds at least while it is open.
fn held_bytes(request: &Request) -> u64 {
    let tokens = |n: usize| REQUEST_BYTES + 4 * n as u64;
    match request {
        Request::Train { op: TrainOp::ForwardBackward { data, .. }, .. } => {
            // Wrong ones are let go of at once.
            let limit = i64::from(VOCAB);
            let whole = |d: &Datum| d.images.iter().all(|image| image.file.last() != Some(&255));
            let right = data.iter().all(|d| whole(d) && d.tokens.iter().all(|&t| t < limit));
            if right { tokens(data.iter().map(|d| d.tokens.len() * 2).sum()) } else { REQUEST_BYTES }
        }
        Request::Train { .. } => REQUEST_BYTES,
        _ => 0,
    }
}

/// What a result holds at least.
fn result_bytes(outcome: &Outcome) -> u64 {
    match outcome {
        Ok(Response::ForwardBackward(output)) => output.data.iter().map(|d| 8 * d.logprobs.len() as u64).sum(),
        Ok(Response::Sampled(output)) => {
            let topk = |s: &crate::api::SampledSequence| s.topk.iter().flatten().map(|k| 8 * k.len() as u64).sum::<u64>();
            let sequences: u64 = output.sequences.iter().map(|s| 8 * s.tokens.len() as u64 + topk(s)).sum();
            let targets = output.target_prompt_logprobs.as_ref().map_or(0, |targets| {
                let sparse = match &targets.cells {
                    Cells::All => 0,
                    Cells::Csr { row_offsets, columns } => 8 * (row_offsets.len() + columns.len()),
                };
                4 * targets.logprobs.len() + sparse
            });
            let alternatives = output.prompt_alt_tokens.as_ref().map_or(0, |drawn| 8 * drawn.tokens.len());
            let prompt = output.prompt_logprobs.as_ref().map_or(0, |p| 8 * p.len());
            sequences + (prompt + targets + alternatives) as u64
        }
        _ => 0,
    }
}

/// Whether an operation failed because its model could not be made.
fn was_not_made(asked: &Asked) -> bool {
    let made_to_fail = |text: &str| text.contains("was not made") || text == ADAPTER_FAULT;
    matches!(&asked.outcome, Some(Err(failure)) if made_to_fail(&failure.to_string()))
}
