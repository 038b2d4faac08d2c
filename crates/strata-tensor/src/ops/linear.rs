//! A frozen linear layer with low-rank additions for runs of tokens.
//!
//! `y = x·Wᵀ + bias`, and for each run of tokens and each projection within the layer `y[:, columns] += (scale · x·Aᵀ)·Bᵀ` (Hu et al., 2021,
//! arXiv:2106.09685). The base product runs once over all tokens. A and B are rounded to the base's dtype for the product, as is
//! the product between them; sums are f32.

use std::rc::Rc;

use super::{check, check_f32, check_vector};
use crate::backend::{Backend, LowProducts};
use crate::tape::{Backward, LoraGroup, LoraProjection, LoraSite, Tape, Var, in_dtype};
use crate::{DType, Error, PackedRef, Result, Tensor, TensorRef};

impl<'a> Tape<'a> {
    /// `x: [tokens, in_features]` in the weight's dtype, through a frozen layer and the low-rank pairs of `lora`; f32 `[tokens, out_features]`.
    ///
    /// # Errors
    /// If the width or dtype of `x`, the bias or a pair do not fit the weight.
    pub fn linear(&mut self, x: &Var, w: PackedRef<'a>, bias: Option<TensorRef<'a>>, lora: Rc<[LoraGroup<'a>]>) -> Result<Var> {
        let (y, low) = forward(self.backend(), x.value(), w, bias, &lora)?;
        let y = Rc::new(y);
        let has_weights = lora.iter().any(|g| !g.projections.is_empty());
        if !self.records(&[x], has_weights) {
            return Ok(self.shared_constant(y));
        }
        let (input, node) = (x.shared(), x.node());
        Ok(self.push(y, move |pass, dy| {
            let dy = in_dtype(pass.backend, dy, w.dtype())?;
            match backward(pass, &input, &dy, w, &lora, &low, node.is_some())? {
                Some(dx) => pass.accumulate(node, Rc::new(dx)),
                None => Ok(()),
            }
        }))
    }
}

impl<'a> Tape<'a> {
    /// `residual + linear(x)`, f32 `[tokens, out_features]`. Its way back does not need its value: as the last op of a layer that is run again for its gradients
    /// it is not computed again.
    ///
    /// # Errors
    /// As [`Tape::linear`], and if the residual is not f32 `[tokens, out_features]`.
    pub fn add_linear(
        &mut self,
        residual: &Var,
        x: &Var,
        w: PackedRef<'a>,
        bias: Option<TensorRef<'a>>,
        lora: Rc<[LoraGroup<'a>]>,
    ) -> Result<Var> {
        const OP: &str = "add_linear";
        check_f32(OP, residual.value(), w.out_features())?;
        if residual.value().rows() != x.value().rows() {
            let (expected, actual) = (x.value().shape().to_string(), residual.value().shape().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
        let backend = self.backend();
        let (y, low) = if self.wants_next_value() {
            let (mut y, low) = forward(backend, x.value(), w, bias, &lora)?;
            backend.add(residual.value(), &mut y)?;
            (y, low)
        } else {
            check_groups(OP, &lora, x.value().rows(), w)?;
            let y = backend.scratch(residual.value().shape().dims(), DType::F32)?;
            (y, low_products(backend, x.value(), &lora, None)?)
        };
        let y = Rc::new(y);
        let has_weights = lora.iter().any(|g| !g.projections.is_empty());
        if !self.records(&[residual, x], has_weights) {
            return Ok(self.shared_constant(y));
        }
        let (residual_node, input, node) = (residual.node(), x.shared(), x.node());
        Ok(self.push(y, move |pass, dy| {
            pass.accumulate(residual_node, dy.clone())?;
            let dy = in_dtype(pass.backend, dy, w.dtype())?;
            match backward(pass, &input, &dy, w, &lora, &low, node.is_some())? {
                Some(dx) => pass.accumulate(node, Rc::new(dx)),
                None => Ok(()),
            }
        }))
    }
}

/// The products between the low-rank pairs, which are added to `y` if there is one.
fn low_products(backend: &dyn Backend, x: &Tensor, lora: &[LoraGroup<'_>], y: Option<&mut Tensor>) -> Result<LowProducts> {
    if lora.is_empty() { Ok(LowProducts::default()) } else { backend.lora(x, lora, y) }
}

/// Refuses groups that are not runs of `tokens` tokens, and pairs that do not fit the weight.
pub(super) fn check_groups(op: &'static str, lora: &[LoraGroup<'_>], tokens: usize, w: PackedRef<'_>) -> Result<()> {
    for group in lora {
        let run = &group.tokens;
        if run.end > tokens {
            return Err(Error::Index { op, what: "tokens", index: run.end, size: tokens });
        }
        if run.start > run.end || group.sequences.iter().any(|s| s.start < run.start || s.start > s.end || s.end > run.end) {
            return Err(Error::Shape {
                op,
                expected: format!("sequences in {run:?}"),
                actual: format!("{:?}", group.sequences),
            });
        }
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

/// The forward pass, with the low products that its backward wants.
pub(super) fn forward(
    backend: &dyn Backend,
    x: &Tensor,
    w: PackedRef<'_>,
    bias: Option<TensorRef<'_>>,
    lora: &[LoraGroup<'_>],
) -> Result<(Tensor, LowProducts)> {
    const OP: &str = "linear";
    check(OP, x, w.dtype(), w.in_features())?;
    let tokens = x.rows();
    check_groups(OP, lora, tokens, w)?;
    let mut y = backend.scratch(&[tokens, w.out_features()], DType::F32)?;
    backend.matmul(x, w, &mut y)?;
    if let Some(bias) = bias {
        check_vector(OP, bias, w.out_features())?;
        backend.add_bias(bias, &mut y)?;
    }
    let low = low_products(backend, x, lora, Some(&mut y))?;
    Ok((y, low))
}

/// The backward pass: adds the gradients of the pairs, and answers that of `x` if `wants_dx`.
pub(super) fn backward(
    pass: &mut Backward<'_>,
    x: &Tensor,
    dy: &Tensor,
    w: PackedRef<'_>,
    lora: &[LoraGroup<'_>],
    low: &LowProducts,
    wants_dx: bool,
) -> Result<Option<Tensor>> {
    let backend = pass.backend;
    let mut dx = None;
    if wants_dx {
        let dx = dx.insert(backend.scratch(&[x.rows(), w.in_features()], DType::F32)?);
        backend.matmul_transposed(dy, w, dx)?;
    }
    if !lora.is_empty() {
        let sites: Vec<LoraSite> = lora.iter().flat_map(|g| &g.projections).map(|p| p.site).collect();
        backend.lora_backward(dy, x, low, lora, &mut pass.lora.at(&sites), dx.as_mut())?;
    }
    Ok(dx)
}
