//! A tenant: its adapter in training, and its operations that have begun.

use std::collections::VecDeque;

use crate::api::{Client, DatumOutput, Failure, LoraSpec, RequestId};
use crate::compute::Compute;
use crate::core::forward_backward_response;
use crate::datum::{Extent, PreparedDatum};
use crate::intake::Op;
use crate::losses::Term;
use crate::reply::PendingReply;

/// A `forward_backward` in work: some of its examples have been computed, in order.
pub(crate) struct RunningForward {
    pub(crate) id: RequestId,
    pub(crate) data: Vec<PreparedDatum>,
    pub(crate) backward: bool,
    outputs: Vec<DatumOutput>,
    loss_sum: f64,
    /// The first of its losses that is no finite number.
    not_finite: Option<String>,
    reply: PendingReply,
}

impl RunningForward {
    pub(crate) fn new(id: RequestId, data: Vec<PreparedDatum>, backward: bool, reply: PendingReply) -> Self {
        let outputs = Vec::with_capacity(data.len());
        RunningForward { id, outputs, data, backward, loss_sum: 0.0, not_finite: None, reply }
    }

    /// The next example to compute.
    pub(crate) fn next_datum(&self) -> usize {
        self.outputs.len()
    }

    /// Examples that are not computed.
    pub(crate) fn remaining(&self) -> usize {
        self.data.len() - self.outputs.len()
    }

    /// The examples that are not computed, and what each takes of a pass that has those before it.
    pub(crate) fn rest(&self) -> impl Iterator<Item = (&RequestId, &PreparedDatum, Extent)> {
        let rest = self.data[self.next_datum()..].iter().enumerate();
        rest.map(|(i, datum)| (&self.id, datum, datum.extent(i > 0, self.backward)))
    }

    pub(crate) fn is_done(&self) -> bool {
        self.remaining() == 0
    }

    /// Takes the log-probabilities of the targets of the next example, which is not needed any more.
    pub(crate) fn push_logprobs(&mut self, logprobs: &[f32]) {
        let index = self.outputs.len();
        let datum = &mut self.data[index];
        let mut elementwise_loss = Vec::with_capacity(logprobs.len());
        for (i, &logprob) in logprobs.iter().enumerate() {
            let Term { loss, derivative } = datum.loss.term(i, logprob);
            // One that does not count may have the log-probability -inf; NaN goes through a backward pass however little it counts.
            if self.not_finite.is_none() && (logprob.is_nan() || !loss.is_finite() || !derivative.is_finite()) {
                self.not_finite = Some(format!(
                    "datum {index}: the loss of target {i} is {loss}, and its derivative {derivative}, at the log-probability {logprob}"
                ));
            }
            elementwise_loss.push(loss);
        }
        // In the order of examples and targets, so that the sum does not depend on how passes were cut.
        for &loss in &elementwise_loss {
            self.loss_sum += loss as f64;
        }
        self.outputs.push(DatumOutput {
            shape: std::mem::take(&mut datum.shape),
            logprobs: logprobs.to_vec(),
            elementwise_loss,
        });
        datum.clear();
    }

    /// What is wrong with its losses, if one so far is no finite number.
    pub(crate) fn not_finite(&self) -> Option<&str> {
        self.not_finite.as_deref()
    }

    pub(crate) fn answer(self) {
        self.reply.send(Ok(forward_backward_response(self.outputs, self.loss_sum)));
    }

    pub(crate) fn fail(self, failure: Failure) {
        self.reply.send(Err(failure));
    }
}

/// One tenant of the engine.
pub(crate) struct Tenant<C: Compute> {
    /// Distinguishes it from an earlier tenant of the same name.
    pub(crate) uid: u64,
    pub(crate) client: Client,
    /// `None` until the checkpoint it is made from is loaded, and while a pass has it.
    pub(crate) learner: Option<C::Learner>,
    /// The adapter that room was set aside for.
    pub(crate) lora: LoraSpec,
    /// The adapter that it was made with, whose place others may take: smaller than that where a checkpoint's record says more than there is.
    pub(crate) made_with: LoraSpec,
    /// The adapter's first weights, which are being drawn, and whom to tell. Nothing else begins before.
    pub(crate) making: Option<(u64, PendingReply)>,
    /// Whether a pass has the learner.
    pub(crate) in_pass: bool,
    /// What a pass has of `running`.
    pub(crate) pass_ids: Vec<RequestId>,
    /// What is to be given up when the pass is over.
    cancelled: Vec<RequestId>,
    /// Passes that have begun, in order.
    pub(crate) running: VecDeque<RunningForward>,
    /// The checkpoint that is being loaded, and whom to tell. Nothing else begins meanwhile.
    pub(crate) loading: Option<(u64, PendingReply)>,
    /// A save that shares memory with the learner, which must not change until it is written.
    pub(crate) saving: Option<u64>,
    /// Whether its next operation could begin, and waits for the session's turn on the device.
    pub(crate) due: bool,
    /// When it last had a turn or a part in a pass.
    pub(crate) served: u64,
}

impl<C: Compute> Tenant<C> {
    pub(crate) fn new(uid: u64, client: Client, learner: Option<C::Learner>, lora: LoraSpec) -> Self {
        Tenant {
            uid,
            client,
            learner,
            made_with: lora.clone(),
            lora,
            making: None,
            in_pass: false,
            pass_ids: Vec::new(),
            cancelled: Vec::new(),
            running: VecDeque::new(),
            loading: None,
            saving: None,
            due: false,
            served: 0,
        }
    }

    /// Whether an operation can begin. Passes may, as long as less than `ahead_max` tokens wait for one.
    pub(crate) fn may_begin(&self, op: &Op, ahead_max: usize) -> bool {
        if self.making.is_some() || self.loading.is_some() || self.saving.is_some() {
            return false;
        }
        if op.is_pass() {
            let waiting: usize = self.running.iter().flat_map(|f| &f.data[f.next_datum()..]).map(|d| d.tokens.len()).sum();
            return waiting < ahead_max;
        }
        self.running.is_empty() && !self.in_pass
    }

    /// The next example that a pass can take.
    pub(crate) fn next_example(&self) -> Option<&PreparedDatum> {
        if self.in_pass || self.learner.is_none() || self.saving.is_some() {
            return None;
        }
        let forward = self.running.front()?;
        forward.data.get(forward.next_datum())
    }

    /// The next examples that may share a pass, all with a gradient or all without, until their work exceeds `most`; what each belongs to, and what it takes of the pass.
    pub(crate) fn next_examples(&self, most: usize) -> impl Iterator<Item = (&RequestId, &PreparedDatum, Extent)> {
        let backward = self.running.front().map(|f| f.backward);
        let forwards = self.running.iter().take_while(move |f| Some(f.backward) == backward);
        forwards.flat_map(RunningForward::rest).scan(0, move |total, example| {
            let fits = *total <= most;
            *total += example.2.work;
            fits.then_some(example)
        })
    }

    /// Answers the passes that are complete.
    pub(crate) fn answer_done(&mut self) {
        while self.running.front().is_some_and(RunningForward::is_done) {
            self.running.pop_front().into_iter().for_each(RunningForward::answer);
        }
    }

    /// Fails a request that has begun. What a pass has of it is computed, and the rest of it given up after the pass.
    pub(crate) fn cancel(&mut self, c: &C, request_id: &RequestId, failure: &Failure) {
        if self.pass_ids.contains(request_id) {
            self.cancelled.push(request_id.clone());
        } else if let Some(i) = self.running.iter().position(|f| f.id == *request_id) {
            self.give_up(c, i, failure);
        }
    }

    /// After a pass: gives up what was cancelled meanwhile.
    pub(crate) fn give_up_cancelled(&mut self, c: &C, failure: &Failure) {
        self.pass_ids.clear();
        for id in std::mem::take(&mut self.cancelled) {
            if let Some(i) = self.running.iter().position(|f| f.id == id) {
                self.give_up(c, i, failure);
            }
        }
    }

    /// Fails a request. Where a part of it is in the gradient, that is no gradient of anything that was asked for.
    fn give_up(&mut self, c: &C, index: usize, failure: &Failure) {
        let Some(forward) = self.running.remove(index) else { return };
        if forward.backward
            && forward.next_datum() > 0
            && let Some(learner) = &mut self.learner
        {
            let why = |failure| format!("a forward_backward was ended when a part of it had been added: {failure}");
            c.lose_gradient(learner, failure.clone().retold(why));
        }
        forward.fail(failure.clone());
    }

    /// Fails everything that is owed.
    pub(crate) fn fail_all(mut self, failure: &Failure) {
        if let Some((_, reply)) = self.making.take() {
            reply.send(Err(failure.clone()));
        }
        if let Some((_, reply)) = self.loading.take() {
            reply.send(Err(failure.clone()));
        }
        self.running.into_iter().for_each(|forward| forward.fail(failure.clone()));
    }
}
