//! A frozen linear layer with low-rank additions for runs of tokens; see [`Linear`].

use std::rc::Rc;

use super::{check, check_f32, check_run, check_vector};
use crate::backend::{Backend, LowProducts};
use crate::tape::{Backward, Linear, LoraGroup, LoraProjection, LoraSite, Tape, Var, in_dtype};
use crate::{DType, Error, PackedRef, Result, Tensor};

impl<'a> Tape<'a> {
    /// `x: [tokens, in_features]` in the weight's dtype, through a layer; f32 `[tokens, out_features]`.
    ///
    /// # Errors
    /// If the width or dtype of `x`, the bias or a pair do not fit the weight.
    pub fn linear(&mut self, x: &Var, layer: Linear<'a>) -> Result<Var> {
        let (y, low) = self.forward_linear(x.value(), &layer)?;
        self.push_linear(None, x, layer, Rc::new(y), low)
    }

    /// `residual + linear(x)`, f32 `[tokens, out_features]`. Its way back does not need its value: as the last op of a layer that is run again for its gradients
    /// it is not computed again.
    ///
    /// # Errors
    /// As [`Tape::linear`], and if the residual is not f32 `[tokens, out_features]`.
    pub fn add_linear(&mut self, residual: &Var, x: &Var, layer: Linear<'a>) -> Result<Var> {
        const OP: &str = "add_linear";
        check_f32(OP, residual.value(), layer.weight.out_features())?;
        if residual.value().rows() != x.value().rows() {
            let (expected, actual) = (x.value().shape().to_string(), residual.value().shape().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
        let backend = self.backend();
        let (y, low) = if self.wants_next_value() {
            let (mut y, low) = self.forward_linear(x.value(), &layer)?;
            backend.add(residual.value().as_ref(), y.as_mut())?;
            (y, low)
        } else {
            check_layer(OP, x.value(), &layer)?;
            let y = backend.scratch(residual.value().shape().dims(), DType::F32)?;
            (y, backend.linear(x.value(), &layer, None)?)
        };
        self.push_linear(Some(residual), x, layer, Rc::new(y), low)
    }

    /// The value of a layer, of equal rows once, with what its backward wants if there is one.
    fn forward_linear(&self, x: &Tensor, layer: &Linear<'a>) -> Result<(Tensor, LowProducts)> {
        let backend = self.backend();
        let Some(repeats) = self.repeats(x.rows()) else { return forward(backend, x, layer) };
        check_layer("linear", x, layer)?;
        let picked = Linear { lora: repeats.groups(&layer.lora), ..layer.clone() };
        let (y, _) = forward(backend, &repeats.pick(backend, x)?, &picked)?;
        let low = if self.is_recording() { backend.linear(x, layer, None)? } else { LowProducts::default() };
        Ok((repeats.spread(backend, &y)?, low))
    }

    /// The value of a layer, and the way back from it.
    pub(super) fn push_linear(
        &mut self,
        residual: Option<&Var>,
        x: &Var,
        layer: Linear<'a>,
        y: Rc<Tensor>,
        low: LowProducts,
    ) -> Result<Var> {
        let has_weights = layer.lora.iter().any(|g| !g.projections.is_empty());
        let inputs: Vec<&Var> = residual.into_iter().chain([x]).collect();
        if !self.records(&inputs, has_weights) {
            return Ok(self.shared_constant(y));
        }
        let (residual, input, node) = (residual.and_then(Var::node), x.shared(), x.node());
        Ok(self.push(y, move |pass, dy| {
            pass.accumulate(residual, dy.clone())?;
            let dy = in_dtype(pass.backend, dy, layer.weight.dtype())?;
            match backward(pass, &input, &dy, &layer, &low, node.is_some())? {
                Some(dx) => pass.accumulate(node, Rc::new(dx)),
                None => Ok(()),
            }
        }))
    }
}

/// Refuses what does not fit.
pub(super) fn check_layer(op: &'static str, x: &Tensor, layer: &Linear<'_>) -> Result<()> {
    let w = layer.weight;
    check(op, x, w.dtype(), w.in_features())?;
    if let Some(bias) = layer.bias {
        check_vector(op, bias, w.out_features())?;
    }
    check_groups(op, &layer.lora, x.rows(), w)
}

/// Refuses groups that are not runs of `tokens` tokens, and pairs that do not fit the weight.
pub(super) fn check_groups(op: &'static str, lora: &[LoraGroup<'_>], tokens: usize, w: PackedRef<'_>) -> Result<()> {
    for group in lora {
        check_run(op, &group.tokens, &group.sequences, tokens)?;
        for LoraProjection { a, b, first_column, .. } in &group.projections {
            if let Some(pair) = [a, b].into_iter().find(|p| p.dtype() != w.dtype()) {
                return Err(Error::DType { op, expected: w.dtype(), actual: pair.dtype() });
            }
            let room = w.out_features().saturating_sub(*first_column);
            let fits = a.in_features() == w.in_features() && a.out_features() == b.in_features() && b.out_features() <= room;
            if !fits || a.out_features() == 0 || b.out_features() == 0 {
                return Err(Error::Shape {
                    op,
                    expected: format!("low-rank pair {} → r → 1 to {room}", w.in_features()),
                    actual: format!("{} → {}, {} → {}", a.in_features(), a.out_features(), b.in_features(), b.out_features()),
                });
            }
        }
    }
    Ok(())
}

/// The forward pass, with what its backward wants.
pub(super) fn forward(backend: &dyn Backend, x: &Tensor, layer: &Linear<'_>) -> Result<(Tensor, LowProducts)> {
    check_layer("linear", x, layer)?;
    let mut y = backend.scratch(&[x.rows(), layer.weight.out_features()], DType::F32)?;
    let low = backend.linear(x, layer, Some(&mut y))?;
    Ok((y, low))
}

/// The backward pass: adds the gradients of the pairs, and answers that of `x` if `wants_dx`.
pub(super) fn backward(
    pass: &mut Backward<'_>,
    x: &Tensor,
    dy: &Tensor,
    layer: &Linear<'_>,
    low: &LowProducts,
    wants_dx: bool,
) -> Result<Option<Tensor>> {
    let backend = pass.backend;
    let mut dx = None;
    if wants_dx {
        dx = Some(backend.scratch(&[x.rows(), layer.weight.in_features()], DType::F32)?);
    }
    let sites: Vec<LoraSite> = layer.lora.iter().flat_map(|g| &g.projections).map(|p| p.site).collect();
    let mut gradients = if sites.is_empty() { Vec::new() } else { pass.lora.at(&sites) };
    backend.linear_backward(dy, x, low, layer, &mut gradients, dx.as_mut())?;
    Ok(dx)
}
