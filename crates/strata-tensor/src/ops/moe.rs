//! Mixtures of experts: the choice of a router, what the chosen experts make of a token, and the gate of a shared one; see [`Experts`].

use std::rc::Rc;

use super::linear::check_groups;
use super::{check, check_f32, check_vector};
use crate::moe::{Dispatch, Experts, Routed, RouterScores, Routing};
use crate::tape::{Linear, LoraSite, Tape, Var, in_dtype, in_f32};
use crate::{Backend, DType, Error, Repeats, Result, Tensor};

impl<'a> Tape<'a> {
    /// Chooses experts by f32 `logits: [tokens, experts]`, and weighs them. Gradients reach the logits through the weights.
    ///
    /// # Errors
    /// If the logits are not f32, or there are not as many experts and groups as are to be chosen.
    pub fn route(&mut self, logits: &Var, routing: Routing<'a>) -> Result<Routed> {
        check_routing(logits, &routing)?;
        let backend = self.backend();
        let mut weights = backend.scratch(&[logits.value().rows(), routing.top_k], DType::F32)?;
        let experts: Rc<[u32]> = backend.route(logits.value(), &routing, &mut weights)?.into();
        let weights = Rc::new(weights);
        if !self.records(&[logits], false) {
            return Ok(Routed { experts, weights: self.shared_constant(weights) });
        }
        let (input, node, chosen) = (logits.shared(), logits.node(), experts.clone());
        let weights = self.push(weights, move |pass, dweights| {
            let mut dlogits = pass.backend.scratch(input.shape().dims(), DType::F32)?;
            let dweights = in_f32(pass.backend, dweights)?;
            pass.backend.route_backward(&dweights, &input, &routing, &chosen, &mut dlogits)?;
            pass.accumulate(node, Rc::new(dlogits))
        });
        Ok(Routed { experts, weights })
    }

    /// `x: [tokens, hidden]` in the experts' dtype, through the experts that each token has chosen; f32 `[tokens, hidden]`. Nothing but its inputs is kept for its way back, which
    /// computes the first of their layers again, unless the layer says otherwise.
    ///
    /// # Errors
    /// If shapes or dtypes do not fit, a stack has not as many experts, or the choices are not different experts of the layer.
    pub fn experts(&mut self, x: &Var, routed: &Routed, layer: Experts<'a>) -> Result<Var> {
        self.push_experts("experts", None, x, routed, layer)
    }

    /// `residual + experts(x)`, f32 `[tokens, hidden]`. Its way back does not need its value: as the last op of a layer that is run again for its gradients it is not
    /// computed again. What a shared expert adds is part of the residual.
    ///
    /// # Errors
    /// As [`Tape::experts`], and if the residual is not f32 `[tokens, hidden]`.
    pub fn add_experts(&mut self, residual: &Var, x: &Var, routed: &Routed, layer: Experts<'a>) -> Result<Var> {
        const OP: &str = "add_experts";
        check_f32(OP, residual.value(), layer.down.weight.out_features())?;
        if residual.value().rows() != x.value().rows() {
            let (expected, actual) = (x.value().shape().to_string(), residual.value().shape().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
        self.push_experts(OP, Some(residual), x, routed, layer)
    }

    fn push_experts(
        &mut self,
        op: &'static str,
        residual: Option<&Var>,
        x: &Var,
        routed: &Routed,
        layer: Experts<'a>,
    ) -> Result<Var> {
        let (tokens, backend) = (x.value().rows(), self.backend());
        let dispatch = check_experts(op, x, routed, &layer)?;
        let mut y = backend.scratch(&[tokens, layer.down.weight.out_features()], DType::F32)?;
        let mut kept = None;
        if self.wants_next_value() {
            match self.repeats(tokens) {
                Some(repeats) => y = experts_once(backend, op, x.value(), routed, &layer, &repeats)?,
                None => {
                    let layer = Experts { keeps: layer.keeps && self.is_recording(), ..layer.clone() };
                    kept = backend.experts(x.value(), routed.weights.value(), &dispatch, &layer, &mut y)?;
                }
            }
            if let Some(residual) = residual {
                backend.add(residual.value().as_ref(), y.as_mut())?;
            }
        }
        let y = Rc::new(y);
        let sites = |linear: &Linear<'_>| linear.lora.iter().flat_map(|g| &g.projections).map(|p| p.site).collect::<Vec<_>>();
        let sites: Vec<LoraSite> = [sites(&layer.gate_up), sites(&layer.down)].concat();
        let inputs: Vec<&Var> = residual.into_iter().chain([x, &routed.weights]).collect();
        if !self.records(&inputs, !sites.is_empty()) {
            return Ok(self.shared_constant(y));
        }
        let residual = residual.and_then(Var::node);
        let ((input, node), (weights, weights_node)) =
            ((x.shared(), x.node()), (routed.weights.shared(), routed.weights.node()));
        Ok(self.push(y, move |pass, dy| {
            pass.accumulate(residual, dy.clone())?;
            let backend = pass.backend;
            let dy = in_dtype(backend, dy, input.dtype())?;
            let mut dweights = backend.scratch(weights.shape().dims(), DType::F32)?;
            let mut dx = None;
            if node.is_some() {
                dx = Some(backend.scratch(input.shape().dims(), DType::F32)?);
            }
            let mut gradients = if sites.is_empty() { Vec::new() } else { pass.lora.layers_at(&sites, layer.num_experts) };
            let (kept, gradients) = (kept.as_ref(), &mut gradients);
            backend.experts_backward(&dy, &input, &weights, &dispatch, &layer, kept, gradients, &mut dweights, dx.as_mut())?;
            drop(dy);
            pass.accumulate(weights_node, Rc::new(dweights))?;
            match dx {
                Some(dx) => pass.accumulate(node, Rc::new(dx)),
                None => Ok(()),
            }
        }))
    }

    /// `sigmoid(gates) * x` for f32 `x: [tokens, n]` and `gates: [tokens, 1]`, as `[tokens, n]` in the dtype of what reads it: the gate of Qwen3.5-MoE's shared expert. It may stand before
    /// the last layer of the expert as well as after it.
    ///
    /// # Errors
    /// If shapes or dtypes do not fit.
    pub fn sigmoid_gate(&mut self, x: &Var, gates: &Var, dtype: DType) -> Result<Var> {
        const OP: &str = "sigmoid_gate";
        check_f32(OP, x.value(), x.value().shape().row_len())?;
        check_f32(OP, gates.value(), 1)?;
        if gates.value().rows() != x.value().rows() {
            let expected = format!("[{}, 1]", x.value().rows());
            return Err(Error::Shape { op: OP, expected, actual: gates.value().shape().to_string() });
        }
        let mut y = self.backend().scratch(&[x.value().rows(), x.value().shape().row_len()], dtype)?;
        self.backend().sigmoid_gate(x.value(), gates.value(), &mut y)?;
        let y = Rc::new(y);
        if !self.records(&[x, gates], false) {
            return Ok(self.shared_constant(y));
        }
        let ((input, node), (gates, gates_node)) = ((x.shared(), x.node()), (gates.shared(), gates.node()));
        Ok(self.push(y, move |pass, dy| {
            let mut dx = pass.backend.scratch(input.shape().dims(), DType::F32)?;
            let mut dgates = pass.backend.scratch(gates.shape().dims(), DType::F32)?;
            let dy = in_f32(pass.backend, dy)?;
            pass.backend.sigmoid_gate_backward(&dy, &input, &gates, &mut dx, &mut dgates)?;
            drop(dy);
            pass.accumulate(gates_node, Rc::new(dgates))?;
            pass.accumulate(node, Rc::new(dx))
        }))
    }
}

/// Bytes that [`Tape::experts`] takes for each token of a pass at most, beside its inputs, its output's gradient, what it keeps and what low-rank pairs take: if all tokens have chosen the same experts, on the way back.
/// `intermediate` is the width of an expert.
pub fn experts_bytes_per_token(hidden: usize, intermediate: usize, top_k: usize, dtype: DType) -> usize {
    let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
    // Gathered inputs and gradients, the first product, and what becomes of it with its gradient.
    let between_layers = 2 * hidden * narrow + 3 * intermediate * wide + 2 * intermediate * narrow;
    let last_product = hidden * (narrow + wide) + 2 * intermediate * narrow;
    let choices = top_k * (2 * size_of::<usize>() + 2 * size_of::<u32>() + 2 * wide);
    // The gradient of the output, rounded, and that of the input.
    hidden * (narrow + wide) + between_layers.max(last_product) + choices
}

/// What experts make of all rows, of equal ones once.
fn experts_once(
    backend: &dyn Backend,
    op: &'static str,
    x: &Tensor,
    routed: &Routed,
    layer: &Experts<'_>,
    repeats: &Repeats,
) -> Result<Tensor> {
    let (x, weights) = (repeats.pick(backend, x)?, repeats.pick(backend, routed.weights.value())?);
    let top_k = weights.shape().row_len();
    let dispatch = Dispatch::new(op, &repeats.pick_numbers(&routed.experts, top_k), x.rows(), top_k, layer.num_experts)?;
    let layer = Experts {
        gate_up: Linear { lora: repeats.groups(&layer.gate_up.lora), ..layer.gate_up.clone() },
        down: Linear { lora: repeats.groups(&layer.down.lora), ..layer.down.clone() },
        keeps: false,
        ..layer.clone()
    };
    let mut y = backend.scratch(&[x.rows(), layer.down.weight.out_features()], DType::F32)?;
    backend.experts(&x, &weights, &dispatch, &layer, &mut y)?;
    repeats.spread(backend, &y)
}

/// Refuses what cannot be chosen.
fn check_routing(logits: &Var, routing: &Routing<'_>) -> Result<()> {
    const OP: &str = "route";
    let experts = logits.value().shape().row_len();
    check_f32(OP, logits.value(), experts)?;
    let choose = |what: String| Error::Unsupported(format!("{OP}: {what}"));
    let mut choices = experts;
    if let RouterScores::Sigmoid(s) = routing.scores {
        if let Some(bias) = s.correction_bias {
            check_vector(OP, bias, experts)?;
        }
        if s.num_groups == 0 || !experts.is_multiple_of(s.num_groups) || experts / s.num_groups < 2 {
            return Err(choose(format!("{experts} experts are not {} groups of at least two", s.num_groups)));
        }
        if !(1..=s.num_groups).contains(&s.top_groups) {
            return Err(choose(format!("{} of {} groups are not to be chosen", s.top_groups, s.num_groups)));
        }
        choices = experts / s.num_groups * s.top_groups;
    }
    if !(1..=choices).contains(&routing.top_k) {
        return Err(choose(format!("{} of {choices} experts are not to be chosen", routing.top_k)));
    }
    Ok(())
}

/// Refuses what does not fit; answers which rows go where.
fn check_experts(op: &'static str, x: &Var, routed: &Routed, layer: &Experts<'_>) -> Result<Dispatch> {
    let (x, weights) = (x.value(), routed.weights.value());
    let (gate_up, down) = (layer.gate_up.weight, layer.down.weight);
    check(op, x, gate_up.dtype(), gate_up.in_features())?;
    if down.dtype() != gate_up.dtype() {
        return Err(Error::DType { op, expected: gate_up.dtype(), actual: down.dtype() });
    }
    if gate_up.out_features() != 2 * down.in_features() || down.in_features() == 0 || down.out_features() == 0 {
        return Err(Error::Shape {
            op,
            expected: format!("experts {} → 2 · n, n → hidden", gate_up.in_features()),
            actual: format!(
                "{} → {}, {} → {}",
                gate_up.in_features(),
                gate_up.out_features(),
                down.in_features(),
                down.out_features()
            ),
        });
    }
    for linear in [&layer.gate_up, &layer.down] {
        let pairs = linear.lora.iter().flat_map(|g| &g.projections).flat_map(|p| [p.a, p.b]);
        if let Some(w) = [linear.weight].into_iter().chain(pairs).find(|w| w.layers_left() < layer.num_experts) {
            return Err(Error::Index { op, what: "experts of a stack", index: layer.num_experts, size: w.layers_left() });
        }
        if let Some(biases) = linear.bias {
            let shape = [layer.num_experts, linear.weight.out_features()];
            check_vector(op, biases, shape[0] * shape[1])?;
            if biases.shape().dims() != shape {
                return Err(Error::Shape { op, expected: format!("{shape:?}"), actual: biases.shape().to_string() });
            }
        }
        check_groups(op, &linear.lora, x.rows(), linear.weight)?;
    }
    let top_k = weights.shape().row_len();
    check_f32(op, weights, top_k)?;
    if weights.rows() != x.rows() {
        let expected = format!("weights of {} tokens", x.rows());
        return Err(Error::Shape { op, expected, actual: weights.shape().to_string() });
    }
    Dispatch::new(op, &routed.experts, x.rows(), top_k, layer.num_experts)
}
