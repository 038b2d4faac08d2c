//! AdamW over a tenant's stacks, with the gradient clipped by its global norm.

use std::sync::Arc;

use strata_model::Model;
use strata_model::lora::{LoraConfig, LoraParams};
use strata_tensor::{AdamwStep, Backend, Tensor};

use crate::api::{AdamParams, Failure};
use crate::learner::device_failure;
use crate::limits::LEARNING_RATE_MAX;

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
        if value.is_finite() && rounded.is_infinite() {
            return Err(format!("{name} is {value:?}, more than a 32-bit float holds"));
        }
        if rounded.is_finite() && ok(rounded) { Ok(value) } else { Err(format!("{name} is {value:?}, not {what}")) }
    };
    in_range("grad_clip_norm", params.grad_clip_norm, "a number from 0", |v| v >= 0.0)?;
    let learning_rate = in_range("learning_rate", params.learning_rate, "a number from 0", |v| v >= 0.0)?;
    if learning_rate > LEARNING_RATE_MAX {
        return Err(format!(
            "learning_rate is {learning_rate:?}, above {LEARNING_RATE_MAX}: a step moves every weight by about as much"
        ));
    }
    let decay = learning_rate * params.weight_decay;
    if decay > 1.0 {
        return Err(format!(
            "weight_decay is {:?}, {decay:?} when multiplied with a learning_rate of {learning_rate:?}; above 1 a step would turn weights around",
            params.weight_decay
        ));
    }
    Ok(AdamwStep {
        learning_rate,
        beta1: in_range("beta1", params.beta1, "a number from 0 to below 1, also as a 32-bit float", |v| {
            (0.0..1.0).contains(&v)
        })?,
        beta2: in_range("beta2", params.beta2, "a number from 0 to below 1, also as a 32-bit float", |v| {
            (0.0..1.0).contains(&v)
        })?,
        eps: in_range("eps", params.eps, "a positive number, also as a 32-bit float", |v| v > 0.0)?,
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

/// What no number of an adapter and its moments is above. It proves of almost every step that it stays finite, without a look at what comes
/// of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    weights: f64,
    m: f64,
    v: f64,
}

/// What is no larger is finite in f32, with everything that is rounded on the way.
const FINITE_MAX: f64 = 1e37;

impl Bounds {
    fn measured(backend: &dyn Backend, weights: &LoraParams, moments: &Moments) -> Result<Self, Failure> {
        // No number is above the norm of all.
        let norm = |params| global_norm(backend, params);
        Ok(Bounds { weights: norm(weights)?, m: norm(&moments.m)?, v: norm(&moments.v)? })
    }

    /// What they are after a step over a gradient of this norm; `None` where something may come to be beyond an f32.
    fn after(self, step: &AdamwStep, norm: f64) -> Option<Self> {
        let gradient = norm * f64::from(step.gradient_scale);
        // Moments are means of what was and what is new, and weights decay, if anything: `check` sees to that.
        let (m, v) = (self.m.max(gradient), self.v.max(gradient * gradient));
        let step_size = step.learning_rate / (1.0 - step.beta1.powf(step.step as f64));
        let quotient = m / step.eps;
        let weights = self.weights + step_size * quotient;
        // Those of before too: the larger of NaN and a number is the number.
        let all = [norm, self.m, self.v, m, v, step_size, quotient, weights];
        let is_finite = all.into_iter().all(|number| number <= FINITE_MAX);
        is_finite.then_some(Bounds { weights, m, v })
    }
}

/// Takes one step and clears the gradient. Returns the norm of the gradient before clipping.
///
/// `bounds` hold for `weights` and `moments`; `None` where they are not known.
///
/// # Errors
/// A user failure if a hyperparameter is out of range; if the gradient is not finite: the step is then not taken and the gradient is
/// cleared; and if a weight or a moment would not be finite: the step is then not taken and the gradient stays.
pub(crate) fn step(
    backend: &dyn Backend,
    params: &AdamParams,
    weights: &mut LoraParams,
    gradient: &mut LoraParams,
    moments: &mut Moments,
    bounds: &mut Option<Bounds>,
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
    let mut after = bounds.and_then(|bounds| bounds.after(&step, norm));
    if after.is_none() {
        after = Bounds::measured(backend, weights, moments)?.after(&step, norm);
    }
    if after.is_none()
        && let Some(what) = overflow(backend, &step, weights, gradient, moments)?
    {
        return Err(Failure::User(format!(
            "{what} would be beyond what a 32-bit float holds (learning_rate {:?}, eps {:?}, norm of the gradient {norm:?}): the step was not \
             taken, and adapter, optimizer and gradient are as they were",
            params.learning_rate, params.eps
        )));
    }
    let (m, v) = (exclusive(backend, &mut moments.m)?, exclusive(backend, &mut moments.v)?);
    // A device that fails half-way leaves what nothing is known of.
    *bounds = None;
    let stacks = weights.tensors_mut().zip(gradient.tensors_mut()).zip(m.tensors_mut()).zip(v.tensors_mut());
    for (((weights, gradient), m), v) in stacks {
        adamw(backend, &step, [weights, gradient, m, v])?;
    }
    moments.step = step.step;
    *bounds = after;
    Ok(norm)
}

fn adamw(backend: &dyn Backend, step: &AdamwStep, [weights, gradient, m, v]: [&mut Tensor; 4]) -> Result<(), Failure> {
    backend.adamw(step, weights, gradient, m, v).map_err(|e| Failure::Server(format!("optimizer step: {e}")))
}

/// What a step would take beyond an f32, if anything: it is tried on copies, one stack at a time.
fn overflow(
    backend: &dyn Backend,
    step: &AdamwStep,
    weights: &LoraParams,
    gradient: &LoraParams,
    moments: &Moments,
) -> Result<Option<&'static str>, Failure> {
    let copy = |tensor: &Tensor| backend.duplicate(tensor.as_ref()).map_err(device_failure);
    let stacks = weights.tensors().zip(gradient.tensors()).zip(moments.m.tensors()).zip(moments.v.tensors());
    for (((weights, gradient), m), v) in stacks {
        let (mut weights, mut gradient, mut m, mut v) = (copy(weights)?, copy(gradient)?, copy(m)?, copy(v)?);
        adamw(backend, step, [&mut weights, &mut gradient, &mut m, &mut v])?;
        for (what, tensor) in [("a second moment", &v), ("a first moment", &m), ("a weight", &weights)] {
            if !backend.sum_squares(tensor).map_err(device_failure)?.is_finite() {
                return Ok(Some(what));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use strata_model::lora::LoraStack;
    use strata_tensor::{CpuBackend, DType, HostRef, Memory};

    use super::*;

    #[test]
    fn hyperparameters_out_of_range_are_refused_by_name() {
        let ok = AdamParams::default();
        assert!(check(&ok).is_ok());
        assert!(check(&AdamParams { learning_rate: 100.0, weight_decay: 0.01, ..ok }).is_ok());
        for (params, name) in [
            (AdamParams { learning_rate: f64::NAN, ..ok }, "learning_rate"),
            (AdamParams { learning_rate: -1.0, ..ok }, "learning_rate"),
            (AdamParams { learning_rate: 1e300, ..ok }, "learning_rate"),
            (AdamParams { learning_rate: 1e30, ..ok }, "learning_rate is 1e30, above 100"),
            (AdamParams { learning_rate: 100.1, ..ok }, "learning_rate is 100.1, above 100"),
            (AdamParams { learning_rate: 0.1, weight_decay: 11.0, ..ok }, "weight_decay is 11.0, 1.1"),
            (AdamParams { weight_decay: f64::NAN, ..ok }, "weight_decay"),
            (AdamParams { beta1: 1.0, ..ok }, "beta1"),
            (AdamParams { beta2: -0.1, ..ok }, "beta2"),
            (AdamParams { eps: 0.0, ..ok }, "eps"),
            (AdamParams { eps: 1e-60, ..ok }, "eps is 1e-60, not a positive number, also as a 32-bit float"),
            (AdamParams { eps: 1e300, ..ok }, "eps is 1e300, more than a 32-bit float holds"),
            (AdamParams { grad_clip_norm: 1e39, ..ok }, "grad_clip_norm is 1e39, more than a 32-bit float holds"),
            (AdamParams { weight_decay: -1.0, ..ok }, "weight_decay"),
            (AdamParams { grad_clip_norm: f64::INFINITY, ..ok }, "grad_clip_norm"),
        ] {
            assert!(check(&params).unwrap_err().starts_with(name), "{params:?}");
        }
    }

    /// An adapter of a few weights, all `weight`, with moments as given and a gradient of `gradient` everywhere.
    struct Small {
        backend: CpuBackend,
        weights: LoraParams,
        gradient: LoraParams,
        moments: Moments,
        bounds: Option<Bounds>,
    }

    fn filled(backend: &dyn Backend, value: f32) -> LoraParams {
        let tensor = |rows: usize, width: usize| {
            let mut tensor = backend.zeros(&[1, rows, width], DType::F32).unwrap();
            let values = vec![value; rows * width];
            backend.upload(HostRef::from_f32(&values, &[values.len()]).unwrap(), tensor.as_mut()).unwrap();
            tensor
        };
        LoraParams { stacks: vec![None, Some(LoraStack { a: tensor(2, 5), b: tensor(2, 3) })] }
    }

    impl Small {
        fn new(weight: f32, gradient: f32, m: f32, v: f32) -> Self {
            let backend = CpuBackend::new(Some(1)).unwrap();
            let moments = Moments { m: Arc::new(filled(&backend, m)), v: Arc::new(filled(&backend, v)), step: 3 };
            let (weights, gradient) = (filled(&backend, weight), filled(&backend, gradient));
            Small { backend, weights, gradient, moments, bounds: None }
        }

        fn step(&mut self, params: &AdamParams) -> Result<f64, Failure> {
            let Small { backend, weights, gradient, moments, bounds } = self;
            step(backend, params, weights, gradient, moments, bounds)
        }

        fn refusal(&mut self, params: &AdamParams) -> String {
            match self.step(params) {
                Err(Failure::User(reason)) => reason,
                other => panic!("{other:?}"),
            }
        }

        /// Bits of weights, gradient and moments.
        fn bits(&self) -> Vec<Vec<u32>> {
            let all = [&self.weights, &self.gradient, &*self.moments.m, &*self.moments.v];
            let bits =
                |tensor: &Tensor| self.backend.to_f32_vec(tensor.as_ref()).unwrap().iter().map(|v| v.to_bits()).collect();
            all.into_iter().flat_map(|params| params.tensors().map(bits)).collect()
        }
    }

    #[test]
    fn a_step_that_would_overflow_leaves_everything_as_it_was() {
        let ok = AdamParams::default();
        let tiny_eps = AdamParams { eps: 1e-38, ..ok };
        for (mut small, params, word) in [
            (Small::new(1.0, 1e30, 0.0, 0.0), ok, "a second moment"),
            (Small::new(1.0, 0.0, 1e10, 0.0), tiny_eps, "a weight"),
            (Small::new(f32::INFINITY, 1.0, 0.0, 0.0), ok, "a weight"),
            (Small::new(1.0, 1.0, f32::NAN, 0.0), ok, "a first moment"),
            (Small::new(1.0, 1.0, 0.0, f32::INFINITY), ok, "a second moment"),
        ] {
            let before = small.bits();
            for _ in 0..2 {
                let reason = small.refusal(&params);
                assert!(reason.starts_with(word) && reason.contains("learning_rate 0.0001"), "{reason}");
                assert_eq!((small.bits(), small.moments.step), (before.clone(), 3), "{reason}");
            }
        }
    }

    #[test]
    fn what_bounds_cannot_prove_is_tried_and_taken_if_it_is_finite() {
        // The bound of the quotient is 1e39, and what comes of it is 1.
        let mut small = Small::new(1.0, 10.0, 0.0, 0.0);
        small.step(&AdamParams { eps: 1e-38, learning_rate: 0.5, ..AdamParams::default() }).unwrap();
        assert!(small.bounds.is_none());
        let weights = small.backend.to_f32_vec(small.weights.tensors().next().unwrap().as_ref()).unwrap();
        assert!(weights.iter().all(|w| w.is_finite() && *w < 1.0), "{weights:?}");
        // Of an ordinary step they are known, and hold.
        small.step(&AdamParams::default()).unwrap();
        let bounds = small.bounds.unwrap();
        let measured = Bounds::measured(&small.backend, &small.weights, &small.moments).unwrap();
        let elements = 16f64.sqrt();
        assert!(measured.weights <= elements * bounds.weights && measured.m <= elements * bounds.m, "{measured:?} {bounds:?}");
        assert!(measured.v <= elements * bounds.v, "{measured:?} {bounds:?}");
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_cleared_and_the_next_step_goes_on() {
        let mut small = Small::new(1.0, f32::NAN, 0.0, 0.0);
        assert!(small.refusal(&AdamParams::default()).contains("norm of the gradient is NaN"));
        assert_eq!(small.step(&AdamParams::default()).unwrap(), 0.0);
    }
}
