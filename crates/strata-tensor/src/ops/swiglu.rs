//! SwiGLU (Shazeer, 2020, arXiv:2002.05202): `silu(gate) * up`.

use std::rc::Rc;

use super::check_f32;
use super::linear::{check_layer, forward};
use crate::tape::{Linear, Tape, Var, in_f32};
use crate::{Backend, DType, Error, Result, Tensor};

impl<'a> Tape<'a> {
    /// [`Tape::swiglu`] of [`Tape::linear`], to the bit. Where nothing goes back what is between them need not be kept, nor written to memory.
    ///
    /// # Errors
    /// As both.
    pub fn linear_swiglu(&mut self, x: &Var, layer: Linear<'a>, dtype: DType) -> Result<Var> {
        const OP: &str = "linear_swiglu";
        if self.is_recording() {
            let gate_up = self.linear(x, layer)?;
            return self.swiglu(&gate_up, dtype);
        }
        check_layer(OP, x.value(), &layer)?;
        check_even(OP, layer.weight.out_features())?;
        let backend = self.backend();
        let y = match self.repeats(x.value().rows()) {
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
        let y = Rc::new(y);
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
    if !backend.linear_swiglu(x, layer, &mut y)? {
        let (gate_up, _) = forward(backend, x, layer)?;
        backend.swiglu(&gate_up, &mut y)?;
    }
    Ok(y)
}

fn check_even(op: &'static str, width: usize) -> Result<()> {
    match width.is_multiple_of(2) {
        true => Ok(()),
        false => Err(Error::Shape { op, expected: "an even width".into(), actual: width.to_string() }),
    }
}
