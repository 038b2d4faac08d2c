//! An adapter in training on a real model.

use std::collections::BTreeMap;
use std::sync::Arc;

use strata_model::Model;
use strata_model::lora::{Adapter, LoraConfig, LoraModule, LoraParams, ModuleSet, PairShape, Part};
use strata_tensor::Backend;

use crate::api::{AdamParams, Failure, LoraSpec};
use crate::compute::AdapterBytes;
use crate::optimizer::{self, Bounds, Moments};
use crate::snapshot::WeightsId;

/// Numerator of the LoRA scale of every adapter made here: the API has no such setting and its clients take it for 32.
pub(crate) const LORA_ALPHA: f32 = 32.0;

/// An adapter in training.
pub(crate) struct Learner {
    pub(crate) config: LoraConfig,
    weights: Arc<LoraParams>,
    /// Allocated by the first backward pass; zero after every step.
    gradient: Option<LoraParams>,
    moments: Option<Moments>,
    /// What weights and moments are within, if that is known.
    bounds: Option<Bounds>,
    /// The adapter as matmuls read it, since the last change of weights.
    packed: Option<(WeightsId, Arc<Adapter>)>,
    /// Why the gradient is not what the answered requests add up to, if so.
    gradient_lost: Option<Failure>,
}

/// What a checkpoint holds of an adapter.
#[derive(Clone)]
pub(crate) struct LearnerState {
    pub(crate) config: LoraConfig,
    pub(crate) weights: Arc<LoraParams>,
    pub(crate) moments: Option<Moments>,
}

impl LearnerState {
    /// A fresh adapter.
    pub(crate) fn fresh(model: &Model, config: LoraConfig, seed: u64) -> Result<Self, Failure> {
        let weights = LoraParams::init(model.backend(), model.lora_modules(), &config, seed).map_err(device_failure)?;
        Ok(LearnerState { config, weights: Arc::new(weights), moments: None })
    }
}

impl Learner {
    pub(crate) fn from_state(state: LearnerState) -> Self {
        let LearnerState { config, weights, moments } = state;
        Learner { config, weights, gradient: None, moments, bounds: None, packed: None, gradient_lost: None }
    }

    /// The adapter as it is now. It shares memory with the learner until the next step.
    pub(crate) fn adapter_state(&self) -> LearnerState {
        LearnerState { config: self.config.clone(), weights: self.weights.clone(), moments: None }
    }

    /// Adapter and optimizer as they are now. They share memory with the learner until the next step.
    pub(crate) fn full_state(&mut self, model: &Model) -> Result<LearnerState, Failure> {
        let moments = or_made(&mut self.moments, || Moments::zero(model, &self.config))?.clone();
        Ok(LearnerState { moments: Some(moments), ..self.adapter_state() })
    }

    /// The adapter ready to compute with, packed again if the weights have changed.
    pub(crate) fn packed(&mut self, model: &Model) -> Result<(WeightsId, Arc<Adapter>), Failure> {
        if let Some(packed) = &self.packed {
            return Ok(packed.clone());
        }
        let packed = (WeightsId::fresh(), pack(model, self.config.clone(), &self.weights)?);
        self.packed = Some(packed.clone());
        Ok(packed)
    }

    /// The gradient to add to.
    pub(crate) fn gradient_mut(&mut self, model: &Model) -> Result<&mut LoraParams, Failure> {
        or_made(&mut self.gradient, || zeros(model, &self.config))
    }

    /// Whether every number of the gradient is finite.
    pub(crate) fn gradient_is_finite(&self, model: &Model) -> Result<bool, Failure> {
        let norm = self.gradient.as_ref().map(|gradient| optimizer::global_norm(model.backend(), gradient)).transpose()?;
        Ok(norm.is_none_or(f64::is_finite))
    }

    /// Clears a gradient that a failed pass may have left incomplete; the next step fails, because requests that were answered
    /// had a part in it.
    pub(crate) fn lose_gradient(&mut self, model: &Model, why: Failure) {
        self.clear_gradient(model.backend());
        self.gradient_lost = Some(why);
    }

    fn clear_gradient(&mut self, backend: &dyn Backend) {
        if self.gradient.as_mut().is_some_and(|gradient| gradient.fill_zero(backend).is_err()) {
            // The next pass makes one that is zero.
            self.gradient = None;
        }
    }

    /// Applies and clears the gradient. Returns its norm before clipping.
    pub(crate) fn optim_step(&mut self, model: &Model, params: &AdamParams) -> Result<f64, Failure> {
        if let Some(why) = self.gradient_lost.take() {
            // What was added since belongs to the step that fails: the next begins anew.
            self.clear_gradient(model.backend());
            return Err(why.retold(|why| format!("the gradient was lost to an earlier failure ({why}); no step was taken")));
        }
        optimizer::check(params).map_err(Failure::User)?;
        let Learner { config, weights, gradient, moments, bounds, packed, .. } = self;
        let gradient = or_made(gradient, || zeros(model, config))?;
        let moments = or_made(moments, || Moments::zero(model, config))?;
        let weights = optimizer::exclusive(model.backend(), weights)?;
        *packed = None;
        optimizer::step(model.backend(), params, weights, gradient, moments, bounds)
    }
}

/// What is there, or else is made now.
fn or_made<T>(place: &mut Option<T>, make: impl FnOnce() -> Result<T, Failure>) -> Result<&mut T, Failure> {
    match place {
        Some(present) => Ok(present),
        None => Ok(place.insert(make()?)),
    }
}

fn zeros(model: &Model, config: &LoraConfig) -> Result<LoraParams, Failure> {
    LoraParams::zeros(model.backend(), model.lora_modules(), config).map_err(device_failure)
}

/// What a client is told of a device that refuses.
pub(crate) fn device_failure(error: impl std::fmt::Display) -> Failure {
    Failure::Server(error.to_string())
}

/// Packs adapter parameters for computing.
pub(crate) fn pack(model: &Model, config: LoraConfig, weights: &LoraParams) -> Result<Arc<Adapter>, Failure> {
    model.pack_adapter(config, weights).map_err(|e| Failure::Server(format!("packing the adapter: {e}")))
}

/// Numbers of an adapter of this shape, for a model with these modules.
fn parameters(config: &LoraConfig, modules: &[LoraModule]) -> u64 {
    let carried = modules.iter().enumerate().filter(|(index, module)| config.carries(*index, module));
    carried
        .map(|(index, m)| m.entries() as u64 * config.rank_of(index, m) as u64 * (m.in_features + m.out_features) as u64)
        .sum()
}

/// Bytes of a checkpoint of an adapter of this shape that has been read, with its moments or without: what [`AdapterBytes::read`] says of it.
pub(crate) fn read_bytes(config: &LoraConfig, modules: &[LoraModule], with_optimizer: bool) -> u64 {
    parameters(config, modules) * if with_optimizer { 12 } else { 4 }
}

/// Bytes of an adapter of this shape.
pub(crate) fn adapter_bytes(model: &Model, config: &LoraConfig) -> AdapterBytes {
    let (parameters, mut frozen) = (parameters(config, model.lora_modules()), 0);
    for (index, m) in model.lora_modules().iter().enumerate().filter(|(i, m)| config.carries(*i, m)) {
        let rank = config.rank_of(index, m);
        let packed = |n_in, n_out| model.backend().packed_bytes(m.entries(), n_in, n_out, model.dtype().into()) as u64;
        frozen += packed(rank, m.out_features);
        frozen += match m.part {
            // Rows, which nothing is multiplied with.
            Part::Embedding => (m.in_features * rank * model.dtype().size_bytes()) as u64,
            Part::Attention | Part::Mlp | Part::Unembed => packed(m.in_features, rank),
        };
    }
    // In training: weights, gradient and two moments in f32, and the packed copy.
    AdapterBytes { training: parameters * 16 + frozen, frozen, captured: parameters * 12 }
}

/// The shape of a loaded adapter in the words of the API, for the modules of its model. A checkpoint does not know its seed: 0 stands for it.
pub fn spec_of(config: &LoraConfig, modules: &[LoraModule]) -> LoraSpec {
    let is_of_the_api = !config.embedding && config.own.is_empty() && config.left_out == ModuleSet::NONE;
    let carried = modules.iter().enumerate().filter(|(index, module)| !is_of_the_api && config.carries(*index, module));
    LoraSpec {
        rank: config.rank,
        seed: 0,
        train_attn: config.attention,
        train_mlp: config.mlp,
        train_unembed: config.unembed,
        ranks: carried.map(|(index, module)| (module.name(), config.rank_of(index, module))).collect(),
    }
}

/// Bytes of an adapter that the API asks for.
///
/// # Errors
/// A message for the user if there is no such adapter on this model.
pub fn bytes_of(spec: &LoraSpec, model: &Model) -> Result<AdapterBytes, String> {
    Ok(adapter_bytes(model, &config_of(spec, model.lora_modules())?))
}

/// The shape of an adapter that the API asks for.
///
/// # Errors
/// A message for the user if there is no such adapter on this model.
pub(crate) fn config_of(spec: &LoraSpec, modules: &[LoraModule]) -> Result<LoraConfig, String> {
    let mut config = LoraConfig {
        rank: spec.rank,
        alpha: LORA_ALPHA,
        attention: spec.train_attn,
        mlp: spec.train_mlp,
        unembed: spec.train_unembed,
        embedding: false,
        left_out: ModuleSet::NONE,
        own: BTreeMap::new(),
    };
    if !spec.ranks.is_empty() {
        own_ranks(&mut config, &spec.ranks, modules)?;
    }
    config.validate().map_err(|e| e.to_string())?;
    if !modules.iter().any(|m| config.trains(m.part)) {
        return Err("this model has no module of the parts that the adapter trains".into());
    }
    Ok(config)
}

/// Refuses a checkpoint's adapter in the place of a model's that was made with another rank, or without parts that it has. One that was made elsewhere may leave modules out or scale them otherwise.
///
/// # Errors
/// A message for the user.
pub(crate) fn check_shape(ours: &LoraConfig, theirs: &LoraConfig) -> Result<(), String> {
    if theirs.rank != ours.rank {
        return Err(format!("the checkpoint's adapter has rank {}, and the model's {}", theirs.rank, ours.rank));
    }
    let parts = [Part::Attention, Part::Mlp, Part::Unembed, Part::Embedding];
    if let Some(part) = parts.into_iter().find(|&part| theirs.trains(part) && !ours.trains(part)) {
        let part = match part {
            Part::Attention => "attention",
            Part::Mlp => "MLP",
            Part::Unembed => "unembedding",
            Part::Embedding => "embedding",
        };
        return Err(format!("the checkpoint's adapter has pairs of the {part}, and the model's was made without"));
    }
    Ok(())
}

/// Has the modules that are listed, and no other, carry LoRA of these ranks.
fn own_ranks(config: &mut LoraConfig, ranks: &BTreeMap<String, usize>, modules: &[LoraModule]) -> Result<(), String> {
    if let Some(name) = ranks.keys().find(|name| modules.iter().all(|module| module.name() != **name)) {
        return Err(format!("the adapter has pairs of {name}, which this model does not have"));
    }
    let carries = |part| modules.iter().any(|module| module.part == part && ranks.contains_key(&module.name()));
    (config.attention, config.mlp) = (carries(Part::Attention), carries(Part::Mlp));
    (config.unembed, config.embedding) = (carries(Part::Unembed), carries(Part::Embedding));
    for (index, module) in modules.iter().enumerate() {
        match ranks.get(&module.name()) {
            Some(&rank) => {
                let common = config.common_shape(module);
                if rank != common.rank {
                    config.own.insert(index, PairShape { rank, ..common });
                }
            }
            None if config.trains(module.part) => config.left_out.insert(index),
            None => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use strata_model::ModelSource;
    use strata_tensor::CpuBackend;

    use super::*;

    #[test]
    fn adapters_take_the_bytes_that_are_set_aside_for_them() {
        let backend = CpuBackend::new(Some(1)).unwrap();
        let model = Model::load(Arc::new(backend), &ModelSource::Embedded, None).unwrap();
        for rank in [1, 8, 33, 64, 100] {
            let lora =
                LoraSpec { rank, seed: 1, train_attn: true, train_mlp: rank != 8, train_unembed: true, ranks: BTreeMap::new() };
            let mut config = LoraConfig { embedding: rank != 64, ..config_of(&lora, model.lora_modules()).unwrap() };
            if rank == 33 {
                config.left_out.insert(1);
                config.own.insert(0, PairShape { rank: 70, scale: 0.5 });
            }
            let bytes = adapter_bytes(&model, &config);
            let as_recorded = config_of(&spec_of(&config, model.lora_modules()), model.lora_modules()).unwrap();
            assert_eq!(adapter_bytes(&model, &as_recorded), bytes, "rank {rank}");
            let mut learner = Learner::from_state(LearnerState::fresh(&model, config, 1).unwrap());
            assert_eq!(learner.packed(&model).unwrap().1.size_bytes() as u64, bytes.frozen, "rank {rank}");
            let state = learner.full_state(&model).unwrap();
            let moments = state.moments.unwrap();
            let captured = state.weights.size_bytes() + moments.m.size_bytes() + moments.v.size_bytes();
            assert_eq!(
                (captured as u64, captured as u64 / 3 * 4 + bytes.frozen),
                (bytes.captured, bytes.training),
                "rank {rank}"
            );
        }
    }
}
