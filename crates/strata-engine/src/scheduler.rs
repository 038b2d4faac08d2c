//! Cuts the training work of all tenants into packed passes.
//!
//! A pass takes examples from every tenant that has some, in turn, up to a number of tokens. A tenant's examples stay in order and are
//! never split, and the model adds gradients token after token: so losses and gradients are the same bits however passes are
//! cut and whoever shares them.

use std::collections::{BTreeMap, VecDeque};

use strata_model::lora::LoraParams;
use strata_model::{Model, PackedBatch, Targets, TokenLoss};

use crate::api::{Failure, ModelId};
use crate::datum::PreparedDatum;
use crate::losses::DatumLoss;
use crate::snapshot::{Weights, WeightsIds};
use crate::tenant::{Learner, RunningForward, Tenant};

/// Runs passes; remembers whose turn it is.
#[derive(Default)]
pub(crate) struct Scheduler {
    turn: usize,
}

/// What a pass takes from one tenant.
struct Part<'a> {
    learner: &'a mut Learner,
    running: &'a mut VecDeque<RunningForward>,
    weights: Weights,
    /// `(operation, example)` of `running`, in order.
    picks: Vec<(usize, usize)>,
    backward: bool,
}

impl Part<'_> {
    fn data(&self) -> impl Iterator<Item = &PreparedDatum> {
        self.picks.iter().map(|&(op, datum)| &self.running[op].data[datum])
    }

    /// Fails the operations that have a part in this pass, and with them what they added to the gradient.
    fn fail(self, failure: &Failure) {
        if self.backward {
            self.learner.lose_gradient(&failure.to_string());
        }
        let last = self.picks.last().map_or(0, |&(op, _)| op);
        self.running.drain(..=last).for_each(|forward| forward.fail(failure.clone()));
    }
}

impl Scheduler {
    /// Whether any tenant has a pass to run.
    pub(crate) fn has_work(tenants: &BTreeMap<ModelId, Tenant>) -> bool {
        tenants.values().any(|t| !t.running.is_empty())
    }

    /// Runs one pass of at most `token_budget` tokens, or of one sequence if that is longer.
    pub(crate) fn run_pass(
        &mut self,
        model: &Model,
        tenants: &mut BTreeMap<ModelId, Tenant>,
        ids: &mut WeightsIds,
        token_budget: usize,
    ) {
        let mut ready: Vec<&mut Tenant> = tenants.values_mut().filter(|t| !t.running.is_empty()).collect();
        let queues: Vec<Vec<usize>> = ready.iter().map(|t| next_lengths(&t.running, token_budget)).collect();
        let counts = share(&queues, self.turn, token_budget);
        self.turn = self.turn.wrapping_add(1);
        let mut parts = Vec::new();
        for (tenant, count) in ready.iter_mut().zip(counts) {
            if count > 0 {
                parts.extend(make_part(tenant, count, model, ids));
            }
        }
        match compute(model, &mut parts) {
            Ok(logprobs) => deliver(parts, &logprobs),
            Err(error) => {
                tracing::error!(%error, "a training pass failed");
                let failure = Failure::Server(format!("training pass: {error}"));
                parts.into_iter().for_each(|part| part.fail(&failure));
            }
        }
    }
}

/// Lengths of the next examples of a tenant that may share a pass: all with a gradient, or all without.
fn next_lengths(running: &VecDeque<RunningForward>, token_budget: usize) -> Vec<usize> {
    let (mut lengths, mut total) = (Vec::new(), 0);
    let Some(backward) = running.front().map(|f| f.backward) else { return lengths };
    for forward in running.iter().take_while(|f| f.backward == backward) {
        for datum in &forward.data[forward.next_datum()..] {
            lengths.push(datum.tokens.len());
            total += datum.tokens.len();
            if total > token_budget {
                return lengths;
            }
        }
    }
    lengths
}

/// How many examples a pass takes from each queue of lengths: one from each in turn, beginning with queue `turn`, until the next
/// of a queue does not fit. The first fits always.
fn share(queues: &[Vec<usize>], turn: usize, token_budget: usize) -> Vec<usize> {
    let mut counts = vec![0; queues.len()];
    let mut open: VecDeque<usize> = (0..queues.len()).map(|i| (i + turn) % queues.len()).collect();
    let mut total = 0;
    while let Some(queue) = open.pop_front() {
        let Some(&length) = queues[queue].get(counts[queue]) else { continue };
        if total > 0 && total + length > token_budget {
            continue;
        }
        total += length;
        counts[queue] += 1;
        open.push_back(queue);
    }
    counts
}

fn make_part<'a>(tenant: &'a mut Tenant, count: usize, model: &Model, ids: &mut WeightsIds) -> Option<Part<'a>> {
    let Tenant { learner, running, .. } = tenant;
    let learner = learner.as_mut().expect("passes begin only once the adapter is there");
    let backward = running.front()?.backward;
    let picks: Vec<(usize, usize)> = running
        .iter()
        .enumerate()
        .flat_map(|(op, forward)| (forward.next_datum()..forward.data.len()).map(move |datum| (op, datum)))
        .take(count)
        .collect();
    match learner.packed(model, ids) {
        Ok(weights) => Some(Part { learner, running, weights, picks, backward }),
        Err(failure) => {
            Part { learner, running, weights: Weights::base(), picks, backward }.fail(&failure);
            None
        }
    }
}

/// Log-probabilities of all targets, part after part; gradients are added to the learners.
fn compute(model: &Model, parts: &mut [Part<'_>]) -> strata_model::Result<Vec<f32>> {
    fix_sequence_ratios(model, parts)?;
    let mut batch = PackedBatch::new();
    let mut targets = Targets { ids: Vec::new(), offsets: vec![0] };
    let mut loss = PassLoss { starts: Vec::new(), losses: Vec::new() };
    let mut gradients: Vec<Option<&mut LoraParams>> = Vec::with_capacity(parts.len());
    for part in parts.iter_mut() {
        let Part { learner, running, weights, picks, backward } = part;
        batch.begin_group(weights.adapter.as_deref());
        for &mut (op, datum) in picks {
            let datum = &running[op].data[datum];
            loss.starts.push(targets.ids.len());
            loss.losses.push(&datum.loss);
            push_datum(datum, &mut batch, &mut targets);
        }
        gradients.push(backward.then(|| learner.gradient_mut(model)));
    }
    if gradients.iter().all(Option::is_none) {
        return model.forward(&batch, &targets);
    }
    model.forward_backward(&batch, &targets, &loss, &mut gradients)
}

fn push_datum(datum: &PreparedDatum, batch: &mut PackedBatch<'_>, targets: &mut Targets) {
    batch.push_sequence(&datum.tokens);
    let start = targets.ids.len();
    targets.ids.extend_from_slice(&datum.targets);
    targets.offsets.extend((1..=datum.tokens.len()).map(|t| start + t * datum.targets_per_token));
}

/// Losses with a ratio per sequence need its log-probabilities before their derivative is known: one pass forward finds them. They are the
/// same bits as those of the pass that follows.
fn fix_sequence_ratios(model: &Model, parts: &mut [Part<'_>]) -> strata_model::Result<()> {
    let needs = |datum: &PreparedDatum| datum.loss.loss.needs_sequence_ratio();
    if !parts.iter().any(|part| part.data().any(needs)) {
        return Ok(());
    }
    let mut batch = PackedBatch::new();
    let mut targets = Targets { ids: Vec::new(), offsets: vec![0] };
    for part in parts.iter().filter(|part| part.data().any(needs)) {
        batch.begin_group(part.weights.adapter.as_deref());
        part.data().filter(|d| needs(d)).for_each(|d| push_datum(d, &mut batch, &mut targets));
    }
    let logprobs = model.forward(&batch, &targets)?;
    let mut start = 0;
    for part in parts {
        for &(op, datum) in &part.picks {
            let datum = &mut part.running[op].data[datum];
            if needs(datum) {
                datum.loss.set_sequence_ratio(&logprobs[start..start + datum.targets.len()]);
                start += datum.targets.len();
            }
        }
    }
    Ok(())
}

/// Hands the log-probabilities to the operations they belong to, and answers those that are complete.
fn deliver(parts: Vec<Part<'_>>, logprobs: &[f32]) {
    let mut start = 0;
    for part in parts {
        for &(op, datum) in &part.picks {
            let end = start + part.running[op].data[datum].targets.len();
            part.running[op].push_logprobs(&logprobs[start..end]);
            start = end;
        }
        while part.running.front().is_some_and(RunningForward::is_done) {
            part.running.pop_front().into_iter().for_each(RunningForward::answer);
        }
    }
}

/// The losses of all examples of a pass.
struct PassLoss<'a> {
    /// First target of each example.
    starts: Vec<usize>,
    losses: Vec<&'a DatumLoss>,
}

impl TokenLoss for PassLoss<'_> {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        let mut datum = self.starts.partition_point(|&start| start <= first).saturating_sub(1);
        for (i, (out, &logprob)) in gradient.iter_mut().zip(logprobs).enumerate() {
            let target = first + i;
            while self.starts.get(datum + 1).is_some_and(|&start| start <= target) {
                datum += 1;
            }
            *out = self.losses[datum].term(target - self.starts[datum], logprob).derivative;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::{Loss, LossInputs};

    #[test]
    fn a_pass_takes_from_every_tenant_in_turn() {
        let queues = [vec![10; 100], vec![10; 2], vec![10; 100]];
        assert_eq!(share(&queues, 0, 100), [4, 2, 4]);
        assert_eq!(share(&queues, 2, 110), [4, 2, 5], "the odd one goes to the tenant whose turn it is");
    }

    #[test]
    fn a_sequence_longer_than_the_budget_runs_alone() {
        assert_eq!(share(&[vec![500, 1], vec![500]], 0, 100), [1, 0]);
        assert_eq!(share(&[vec![500, 1], vec![500]], 1, 100), [0, 1]);
    }

    #[test]
    fn a_tenant_whose_next_example_does_not_fit_waits_and_keeps_its_order() {
        assert_eq!(share(&[vec![60, 60, 1], vec![10, 10, 10, 10, 10]], 0, 100), [1, 4]);
    }

    #[test]
    fn derivatives_are_those_of_the_example_that_a_target_belongs_to() {
        let datum = |weights: &[f32]| DatumLoss {
            loss: Loss::CrossEntropy,
            inputs: LossInputs::Weights(weights.to_vec()),
            log_sequence_ratio: 0.0,
        };
        let (a, b) = (datum(&[1.0, 2.0]), datum(&[3.0]));
        let loss = PassLoss { starts: vec![0, 2], losses: vec![&a, &b] };
        let mut out = [0.0; 2];
        loss.gradient(1, &[-1.0, -1.0], &mut out);
        assert_eq!(out, [-2.0, -3.0]);
    }
}
