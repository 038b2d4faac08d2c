//! RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467), LayerNorm (Ba et al., 2016, arXiv:1607.06450), and the residual addition.

use std::rc::Rc;

use super::{check_f32, check_forward_only, check_vector};
use crate::tape::{Tape, Var, in_f32};
use crate::{DType, Error, Result, TensorRef};

impl<'a> Tape<'a> {
    /// RMSNorm of every row of f32 `x: [tokens, n]` with frozen f32 `weight: [n]`, in the dtype of the matmul that reads it.
    ///
    /// # Errors
    /// If the width of `x` is not that of the weight, or either is not f32.
    pub fn rms_norm(&mut self, x: &Var, weight: TensorRef<'a>, eps: f32, dtype: DType) -> Result<Var> {
        check_f32("rms_norm", x.value(), weight.shape().len())?;
        check_vector("rms_norm", weight, weight.shape().len())?;
        let mut y = self.backend().scratch(x.value().shape().dims(), dtype)?;
        self.backend().rms_norm(x.value(), weight, eps, &mut y)?;
        let y = Rc::new(y);
        if !self.records(&[x], false) {
            return Ok(self.shared_constant(y));
        }
        let (input, node) = (x.shared(), x.node());
        Ok(self.push(y, move |pass, dy| {
            let dy = in_f32(pass.backend, dy)?;
            pass.accumulate_with(node, input.shape().dims(), |backend, dx| {
                backend.rms_norm_backward(&dy, &input, weight, eps, dx)
            })
        }))
    }

    /// LayerNorm of every row of f32 `x: [tokens, n]` with frozen f32 `weight: [n]` and `bias: [n]`, in the dtype of the matmul that reads it.
    ///
    /// # Errors
    /// If the width of `x` is not that of weight and bias, any is not f32, or the tape would have to go back.
    pub fn layer_norm(&mut self, x: &Var, weight: TensorRef<'a>, bias: TensorRef<'a>, eps: f32, dtype: DType) -> Result<Var> {
        const OP: &str = "layer_norm";
        let width = weight.shape().len();
        check_f32(OP, x.value(), width)?;
        check_vector(OP, weight, width)?;
        check_vector(OP, bias, width)?;
        let records = self.records(&[x], false);
        check_forward_only(OP, records)?;
        let mut y = self.backend().scratch(x.value().shape().dims(), dtype)?;
        self.backend().layer_norm(x.value(), weight, bias, eps, &mut y)?;
        Ok(self.constant(y))
    }

    /// `x + y`, both f32 of one shape.
    ///
    /// # Errors
    /// If the shapes differ.
    pub fn add(&mut self, x: &Var, y: Var) -> Result<Var> {
        check_f32("add", x.value(), y.value().shape().row_len())?;
        check_f32("add", y.value(), x.value().shape().row_len())?;
        if x.value().rows() != y.value().rows() {
            let (expected, actual) = (x.value().shape().to_string(), y.value().shape().to_string());
            return Err(Error::Shape { op: "add", expected, actual });
        }
        let records = self.records(&[x, &y], false);
        let (x_node, y_node) = (x.node(), y.node());
        let mut sum = y.into_tensor(self.backend())?;
        self.backend().add(x.value().as_ref(), sum.as_mut())?;
        let sum = Rc::new(sum);
        if !records {
            return Ok(self.shared_constant(sum));
        }
        Ok(self.push(sum, move |pass, gradient| {
            pass.accumulate(x_node, gradient.clone())?;
            pass.accumulate(y_node, gradient)
        }))
    }
}
