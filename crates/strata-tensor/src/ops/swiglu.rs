//! SwiGLU (Shazeer, 2020, arXiv:2002.05202): `silu(gate) * up`.

use std::rc::Rc;

use super::check_f32;
use super::linear::{check_layer, forward};
use crate::backend::LowProducts;
use crate::tape::{Linear, Tape, Var, in_f32};
use crate::{Backend, DType, Error, Result, Tensor};

impl<'a> Tape<'a> {
    /// [`Tape::swiglu`] of [`Tape::linear`], to the bit. Where nothing goes back what is between them need not be kept, nor written to memory, and elsewhere not be read again.
    ///
    /// # Errors
    /// As both.
    pub fn linear_swiglu(&mut self, x: &Var, layer: Linear<'a>, dtype: DType) -> Result<Var> {
        const OP: &str = "linear_swiglu";
        let (rows, backend) = (x.value().rows(), self.backend());
        if self.is_recording() {
            if self.repeats(rows).is_some() {
                let gate_up = self.linear(x, layer)?;
                return self.swiglu(&gate_up, dtype);
            }
            check_layer(OP, x.value(), &layer)?;
            check_even(OP, layer.weight.out_features())?;
            let (gate_up, low, y) = kept_and_gated(backend, x.value(), &layer, dtype)?;
            let gate_up = self.push_linear(None, x, layer, Rc::new(gate_up), low)?;
            return self.push_swiglu(&gate_up, Rc::new(y), dtype);
        }
        check_layer(OP, x.value(), &layer)?;
        check_even(OP, layer.weight.out_features())?;
        let y = match self.repeats(rows) {
            Some(repeats) => {
                let picked = Linear { lora: repeats.groups(&layer.lora), ..layer };
                repeats.spread(backend, &gated(backend, &repeats.pick(backend, x.value())?, &picked, dtype)?)?
            }
            None => gated(backend, x.value(), &layer, dtype)?,
        };
        // Two ops, as on a tape that records.
        for _ in 0..2 {
            self.records(&[], false);
        }
        Ok(self.constant(y))
    }

    /// `silu(gate) * up` of f32 `gate_up: [tokens, 2 * n]`, gate first, as `[tokens, n]` in the dtype of the matmul that reads it.
    ///
    /// # Errors
    /// If the input is not f32 of even width.
    pub fn swiglu(&mut self, gate_up: &Var, dtype: DType) -> Result<Var> {
        let width = gate_up.value().shape().row_len();
        check_f32("swiglu", gate_up.value(), width)?;
        check_even("swiglu", width)?;
        let mut y = self.backend().scratch(&[gate_up.value().rows(), width / 2], dtype)?;
        self.backend().swiglu(gate_up.value(), &mut y)?;
        self.push_swiglu(gate_up, Rc::new(y), dtype)
    }

    /// The gated value, and the way back from it.
    fn push_swiglu(&mut self, gate_up: &Var, y: Rc<Tensor>, dtype: DType) -> Result<Var> {
        if !self.records(&[gate_up], false) {
            return Ok(self.shared_constant(y));
        }
        let (input, node) = (gate_up.shared(), gate_up.node());
        Ok(self.push(y, move |pass, dy| {
            let mut dgate_up = pass.backend.scratch(input.shape().dims(), dtype)?;
            let dy = in_f32(pass.backend, dy)?;
            pass.backend.swiglu_backward(&dy, &input, &mut dgate_up)?;
            drop(dy);
            pass.accumulate(node, Rc::new(dgate_up))
        }))
    }
}

/// The gated value of a layer, in one op where the device has one.
fn gated(backend: &dyn Backend, x: &Tensor, layer: &Linear<'_>, dtype: DType) -> Result<Tensor> {
    let mut y = backend.scratch(&[x.rows(), layer.weight.out_features() / 2], dtype)?;
    if backend.linear_swiglu(x, layer, None, &mut y)?.is_none() {
        let (gate_up, _) = forward(backend, x, layer)?;
        backend.swiglu(&gate_up, &mut y)?;
    }
    Ok(y)
}

/// The value of a layer, what its way back needs beside it, and the gated value.
fn kept_and_gated(
    backend: &dyn Backend,
    x: &Tensor,
    layer: &Linear<'_>,
    dtype: DType,
) -> Result<(Tensor, LowProducts, Tensor)> {
    let outputs = layer.weight.out_features();
    let mut y = backend.scratch(&[x.rows(), outputs / 2], dtype)?;
    let mut kept = backend.scratch(&[x.rows(), outputs], DType::F32)?;
    if let Some(low) = backend.linear_swiglu(x, layer, Some(&mut kept), &mut y)? {
        return Ok((kept, low, y));
    }
    let low = backend.linear(x, layer, Some(&mut kept))?;
    backend.swiglu(&kept, &mut y)?;
    Ok((kept, low, y))
}

fn check_even(op: &'static str, width: usize) -> Result<()> {
    match width.is_multiple_of(2) {
        true => Ok(()),
        false => Err(Error::Shape { op, expected: "an even width".into(), actual: width.to_string() }),
    }
}
