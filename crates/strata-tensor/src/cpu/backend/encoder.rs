//! What encoders of images compute beside what decoders do: LayerNorm and GELU.

use super::{CpuBackend, rows_mut, with_element};
use crate::backend::Gelu;
use crate::cpu::rows::{gelu, layer_norm};
use crate::cpu::threads::SharedMut;
use crate::{DType, Result, Tensor, TensorRef};

impl CpuBackend {
    pub(super) fn norm_layer(
        &self,
        x: &Tensor,
        weight: TensorRef<'_>,
        bias: TensorRef<'_>,
        eps: f32,
        y: &mut Tensor,
    ) -> Result<()> {
        let n = x.shape().row_len();
        let (num_rows, x) = (x.rows(), x.slice::<f32>()?);
        let (weight, bias) = (weight.slice::<f32>()?, bias.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                layer_norm::layer_norm(self.isa, &x[rows.start * n..rows.end * n], weight, bias, eps, y);
            });
        });
        Ok(())
    }

    pub(super) fn gelu_of(&self, x: &Tensor, kind: Gelu, y: &mut Tensor) -> Result<()> {
        let x = x.slice::<f32>()?;
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(x.len(), 1, |range| {
                // SAFETY: tasks have ranges of their own.
                let y = unsafe { rows_mut(&y, &range, 1) };
                gelu::gelu(self.isa, kind, &x[range], y);
            });
        });
        Ok(())
    }
}
