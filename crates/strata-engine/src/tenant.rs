//! A tenant: its adapter, gradient and optimizer state, and the operations that wait for their turn.

use std::collections::VecDeque;
use std::sync::Arc;

use strata_model::Model;
use strata_model::lora::{LoraConfig, LoraParams, ModuleSet};

use crate::api::{AdamParams, DatumOutput, Failure, ForwardBackwardOutput, LoraSpec, Response, TrainOp};
use crate::datum::PreparedDatum;
use crate::optimizer::{self, Moments};
use crate::reorder::Reorder;
use crate::reply::PendingReply;
use crate::snapshot::{Weights, WeightsIds};

/// Numerator of the LoRA scale of every adapter made here: the API has no such setting and its clients take it for 32.
pub(crate) const LORA_ALPHA: f32 = 32.0;

/// An adapter in training.
pub(crate) struct Learner {
    pub(crate) config: LoraConfig,
    weights: Arc<LoraParams>,
    /// Allocated by the first backward pass; zero after every step.
    gradient: Option<LoraParams>,
    moments: Option<Moments>,
    /// The adapter as matmuls read it, since the last change of weights.
    packed: Option<Weights>,
    /// Why the gradient is not what the answered requests add up to, if so.
    gradient_lost: Option<String>,
}

/// What a checkpoint holds of an adapter.
#[derive(Clone)]
pub(crate) struct LearnerState {
    pub(crate) config: LoraConfig,
    pub(crate) weights: Arc<LoraParams>,
    pub(crate) moments: Option<Moments>,
}

impl Learner {
    /// A fresh adapter.
    pub(crate) fn fresh(model: &Model, config: LoraConfig, seed: u64) -> Self {
        let weights = Arc::new(LoraParams::init(model.lora_modules(), &config, seed));
        Self::from_state(LearnerState { config, weights, moments: None })
    }

    pub(crate) fn from_state(state: LearnerState) -> Self {
        let LearnerState { config, weights, moments } = state;
        Learner { config, weights, gradient: None, moments, packed: None, gradient_lost: None }
    }

    /// The adapter as it is now. It shares memory with the learner until the next step.
    pub(crate) fn adapter_state(&self) -> LearnerState {
        LearnerState { config: self.config, weights: self.weights.clone(), moments: None }
    }

    /// Adapter and optimizer as they are now. They share memory with the learner until the next step.
    pub(crate) fn full_state(&mut self, model: &Model) -> LearnerState {
        let moments = self.moments.get_or_insert_with(|| Moments::zero(model, &self.config)).clone();
        LearnerState { moments: Some(moments), ..self.adapter_state() }
    }

    /// Bytes that the learner holds once it has trained, an adapter packed for computing included.
    pub(crate) fn full_bytes(model: &Model, config: &LoraConfig) -> u64 {
        let parameters: u64 = model
            .lora_modules()
            .iter()
            .enumerate()
            .filter(|(i, m)| config.carries(*i, m))
            .map(|(_, m)| m.num_layers as u64 * config.rank as u64 * (m.in_features + m.out_features) as u64)
            .sum();
        // Weights, gradient and two moments in f32, and the packed copy.
        parameters * (4 * 4 + model.dtype().size_bytes() as u64)
    }

    /// The adapter ready to compute with, packed again if the weights have changed.
    pub(crate) fn packed(&mut self, model: &Model, ids: &mut WeightsIds) -> Result<Weights, Failure> {
        if let Some(packed) = &self.packed {
            return Ok(packed.clone());
        }
        let adapter =
            model.pack_adapter(self.config, &self.weights).map_err(|e| Failure::Server(format!("packing the adapter: {e}")))?;
        let packed = Weights { id: ids.next(), adapter: Some(adapter) };
        self.packed = Some(packed.clone());
        Ok(packed)
    }

    /// The gradient to add to.
    pub(crate) fn gradient_mut(&mut self, model: &Model) -> &mut LoraParams {
        self.gradient.get_or_insert_with(|| LoraParams::zeros(model.lora_modules(), &self.config))
    }

    /// Clears a gradient that a failed pass may have left incomplete; the next step fails, because requests that were answered
    /// had a part in it.
    pub(crate) fn lose_gradient(&mut self, why: &str) {
        if let Some(gradient) = &mut self.gradient {
            gradient.tensors_mut().for_each(|t| t.as_mut().fill_zero());
        }
        self.gradient_lost = Some(why.to_string());
    }

    /// Applies and clears the gradient. Returns its norm before clipping.
    pub(crate) fn optim_step(&mut self, model: &Model, params: &AdamParams) -> Result<f64, Failure> {
        if let Some(why) = self.gradient_lost.take() {
            return Err(Failure::Server(format!("the gradient was lost to an earlier failure ({why}); no step was taken")));
        }
        optimizer::check(params).map_err(Failure::User)?;
        let Learner { config, weights, gradient, moments, packed, .. } = self;
        let gradient = gradient.get_or_insert_with(|| LoraParams::zeros(model.lora_modules(), config));
        let moments = moments.get_or_insert_with(|| Moments::zero(model, config));
        *packed = None;
        optimizer::step(model.backend(), params, Arc::make_mut(weights), gradient, moments)
    }
}

/// A `forward_backward` in work: some of its examples have been computed, in order.
pub(crate) struct RunningForward {
    pub(crate) data: Vec<PreparedDatum>,
    pub(crate) backward: bool,
    outputs: Vec<DatumOutput>,
    loss_sum: f64,
    reply: PendingReply,
}

impl RunningForward {
    pub(crate) fn new(data: Vec<PreparedDatum>, backward: bool, reply: PendingReply) -> Self {
        RunningForward { outputs: Vec::with_capacity(data.len()), data, backward, loss_sum: 0.0, reply }
    }

    /// The next example to compute.
    pub(crate) fn next_datum(&self) -> usize {
        self.outputs.len()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.outputs.len() == self.data.len()
    }

    /// Takes the log-probabilities of the targets of the next example.
    pub(crate) fn push_logprobs(&mut self, logprobs: &[f32]) {
        let datum = &self.data[self.outputs.len()];
        let elementwise_loss: Vec<f32> =
            logprobs.iter().enumerate().map(|(i, &logprob)| datum.loss.term(i, logprob).loss).collect();
        // In the order of examples and targets, so that the sum does not depend on how passes were cut.
        for &loss in &elementwise_loss {
            self.loss_sum += loss as f64;
        }
        self.outputs.push(DatumOutput { shape: datum.shape.clone(), logprobs: logprobs.to_vec(), elementwise_loss });
    }

    pub(crate) fn answer(self) {
        let metrics = vec![("loss:sum".to_string(), self.loss_sum)];
        self.reply.send(Ok(Response::ForwardBackward(ForwardBackwardOutput { data: self.outputs, metrics })));
    }

    pub(crate) fn fail(self, failure: Failure) {
        self.reply.send(Err(failure));
    }
}

/// One tenant of the engine.
pub(crate) struct Tenant {
    /// Distinguishes it from an earlier tenant of the same name.
    pub(crate) uid: u64,
    /// `None` until the checkpoint it is made from is loaded.
    pub(crate) learner: Option<Learner>,
    /// Operations that have not begun.
    pub(crate) ops: Reorder<(TrainOp, PendingReply)>,
    /// Passes that have begun, in order.
    pub(crate) running: VecDeque<RunningForward>,
    /// The request that a checkpoint is being loaded for. Nothing else begins meanwhile.
    pub(crate) loading: Option<PendingReply>,
}

impl Tenant {
    pub(crate) fn new(uid: u64, learner: Option<Learner>, loading: Option<PendingReply>) -> Self {
        Tenant { uid, learner, ops: Reorder::new(), running: VecDeque::new(), loading }
    }

    /// Whether an operation can begin.
    pub(crate) fn can_advance(&self) -> bool {
        let Some((op, _)) = self.ops.peek() else { return false };
        let passes_only = matches!(op, TrainOp::ForwardBackward { .. } | TrainOp::Refused(_));
        self.loading.is_none() && (passes_only || self.running.is_empty())
    }

    /// Fails everything that is owed.
    pub(crate) fn fail_all(mut self, failure: &Failure) {
        if let Some(reply) = self.loading.take() {
            reply.send(Err(failure.clone()));
        }
        self.running.into_iter().for_each(|forward| forward.fail(failure.clone()));
        self.ops.drain().for_each(|(_, reply)| reply.send(Err(failure.clone())));
    }
}

/// The shape of a loaded adapter in the words of the API. A checkpoint does not know its seed: 0 stands for it.
pub(crate) fn spec_of(config: &LoraConfig) -> LoraSpec {
    LoraSpec { rank: config.rank, seed: 0, train_attn: config.attention, train_mlp: config.mlp, train_unembed: config.unembed }
}

/// The shape of an adapter that the API asks for.
///
/// # Errors
/// A message for the user if there is no such adapter on this model.
pub(crate) fn config_of(spec: &LoraSpec, model: &Model) -> Result<LoraConfig, String> {
    let config = LoraConfig {
        rank: spec.rank,
        alpha: LORA_ALPHA,
        attention: spec.train_attn,
        mlp: spec.train_mlp,
        unembed: spec.train_unembed,
        left_out: ModuleSet::NONE,
    };
    config.validate().map_err(|e| e.to_string())?;
    if !model.lora_modules().iter().any(|m| config.trains(m.part)) {
        return Err("this model has no module of the parts that the adapter trains".into());
    }
    Ok(config)
}
