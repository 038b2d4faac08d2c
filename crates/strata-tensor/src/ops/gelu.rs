//! GELU (Hendrycks & Gimpel, 2016, arXiv:1606.08415).

use super::{check_f32, check_forward_only};
use crate::backend::Gelu;
use crate::tape::{Tape, Var};
use crate::{DType, Result};

const OP: &str = "gelu";

impl<'a> Tape<'a> {
    /// `gelu(x)` of every element of f32 `x: [tokens, n]`, in the dtype of the matmul that reads it.
    ///
    /// # Errors
    /// If the input is not f32, or the tape would have to go back.
    pub fn gelu(&mut self, x: &Var, kind: Gelu, dtype: DType) -> Result<Var> {
        check_f32(OP, x.value(), x.value().shape().row_len())?;
        let records = self.records(&[x], false);
        check_forward_only(OP, records)?;
        let mut y = self.backend().scratch(x.value().shape().dims(), dtype)?;
        self.backend().gelu(x.value(), kind, &mut y)?;
        Ok(self.constant(y))
    }
}
