//! AdamW over a tenant's stacks, with the gradient clipped by its global norm.

use std::sync::Arc;

use strata_model::Model;
use strata_model::lora::{LoraConfig, LoraParams};
use strata_tensor::{AdamwStep, Backend};

use crate::api::{AdamParams, Failure};
use crate::learner::device_failure;

/// Adam's running moments.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    pub(crate) m: Arc<LoraParams>,
    pub(crate) v: Arc<LoraParams>,
    /// Steps taken.
    pub(crate) step: u64,
}

impl Moments {
    /// Those of an adapter of `config` that has not stepped.
    pub(crate) fn zero(model: &Model, config: &LoraConfig) -> Result<Self, Failure> {
        let zeros = || LoraParams::zeros(model.backend(), model.lora_modules(), config).map(Arc::new).map_err(device_failure);
        Ok(Moments { m: zeros()?, v: zeros()?, step: 0 })
    }
}

/// Parameters to be changed: a copy of their own, if a checkpoint that is being written shares them.
pub(crate) fn exclusive<'p>(backend: &dyn Backend, params: &'p mut Arc<LoraParams>) -> Result<&'p mut LoraParams, Failure> {
    if Arc::get_mut(params).is_none() {
        *params = Arc::new(params.duplicate(backend).map_err(device_failure)?);
    }
    Ok(Arc::get_mut(params).expect("nobody else has it"))
}

/// Checks hyperparameters. The backend computes its factors from them in f64 and rounds each once.
///
/// # Errors
/// A message that names the one that is out of range.
pub(crate) fn check(params: &AdamParams) -> Result<AdamwStep, String> {
    let in_range = |name: &str, value: f64, what: &str, ok: fn(f32) -> bool| {
        // What counts is what is left of it in the f32 of weights and moments.
        let rounded = value as f32;
        if rounded.is_finite() && ok(rounded) { Ok(value) } else { Err(format!("{name} is {value}, not {what}")) }
    };
    in_range("grad_clip_norm", params.grad_clip_norm, "a number from 0", |v| v >= 0.0)?;
    Ok(AdamwStep {
        learning_rate: in_range("learning_rate", params.learning_rate, "a number from 0", |v| v >= 0.0)?,
        beta1: in_range("beta1", params.beta1, "a number from 0 to below 1", |v| (0.0..1.0).contains(&v))?,
        beta2: in_range("beta2", params.beta2, "a number from 0 to below 1", |v| (0.0..1.0).contains(&v))?,
        eps: in_range("eps", params.eps, "a positive number", |v| v > 0.0)?,
        weight_decay: in_range("weight_decay", params.weight_decay, "a number from 0", |v| v >= 0.0)?,
        gradient_scale: 1.0,
        step: 0,
    })
}

/// L2 norm over all stacks.
pub(crate) fn global_norm(backend: &dyn Backend, params: &LoraParams) -> Result<f64, Failure> {
    let mut sum = 0.0;
    for tensor in params.tensors() {
        sum += backend.sum_squares(tensor).map_err(|e| Failure::Server(format!("norm of the gradient: {e}")))?;
    }
    Ok(sum.sqrt())
}

/// Takes one step and clears the gradient. Returns the norm of the gradient before clipping.
///
/// # Errors
/// A user failure if a hyperparameter is out of range, and if the gradient is not finite: the step is then not taken and the
/// gradient is cleared.
pub(crate) fn step(
    backend: &dyn Backend,
    params: &AdamParams,
    weights: &mut LoraParams,
    gradient: &mut LoraParams,
    moments: &mut Moments,
) -> Result<f64, Failure> {
    let mut step = check(params).map_err(Failure::User)?;
    let norm = global_norm(backend, gradient)?;
    if !norm.is_finite() {
        gradient.fill_zero(backend).map_err(device_failure)?;
        return Err(Failure::User(format!(
            "the norm of the gradient is {norm}: the step was not taken and the gradient was cleared"
        )));
    }
    if params.grad_clip_norm > 0.0 && norm > params.grad_clip_norm {
        step.gradient_scale = (params.grad_clip_norm / norm) as f32;
    }
    step.step = moments.step + 1;
    let (m, v) = (exclusive(backend, &mut moments.m)?, exclusive(backend, &mut moments.v)?);
    let stacks = weights.tensors_mut().zip(gradient.tensors_mut()).zip(m.tensors_mut()).zip(v.tensors_mut());
    for (((weights, gradient), m), v) in stacks {
        backend.adamw(&step, weights, gradient, m, v).map_err(|e| Failure::Server(format!("optimizer step: {e}")))?;
    }
    moments.step = step.step;
    Ok(norm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperparameters_out_of_range_are_refused_by_name() {
        let ok = AdamParams::default();
        assert!(check(&ok).is_ok());
        for (params, name) in [
            (AdamParams { learning_rate: f64::NAN, ..ok }, "learning_rate"),
            (AdamParams { learning_rate: -1.0, ..ok }, "learning_rate"),
            (AdamParams { learning_rate: 1e300, ..ok }, "learning_rate"),
            (AdamParams { beta1: 1.0, ..ok }, "beta1"),
            (AdamParams { beta2: -0.1, ..ok }, "beta2"),
            (AdamParams { eps: 0.0, ..ok }, "eps"),
            (AdamParams { eps: 1e-60, ..ok }, "eps"),
            (AdamParams { weight_decay: -1.0, ..ok }, "weight_decay"),
            (AdamParams { grad_clip_norm: f64::INFINITY, ..ok }, "grad_clip_norm"),
        ] {
            assert!(check(&params).unwrap_err().starts_with(name), "{params:?}");
        }
    }
}
