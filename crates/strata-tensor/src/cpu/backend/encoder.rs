//! What images add to decoders: LayerNorm and GELU of their encoders, and angles of positions on several axes.

use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{AxisFrequency, Gelu, Rotary};
use crate::cpu::rows::rope::angles;
use crate::cpu::rows::{gelu, layer_norm};
use crate::cpu::threads::SharedMut;
use crate::memory::Memory;
use crate::{DType, Error, Result, Tensor, TensorRef};

impl CpuBackend {
    pub(super) fn angles_of_axes(&self, positions: &[&[u32]], turns: &[AxisFrequency], factor: f32) -> Result<Rotary> {
        const OP: &str = "rotary";
        let (tokens, half) = (positions.first().map_or(0, |axis| axis.len()), turns.len());
        if let Some(other) = positions.iter().find(|axis| axis.len() != tokens) {
            let (expected, actual) = (format!("{tokens} positions on each axis"), other.len().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
        if let Some(turn) = turns.iter().find(|turn| turn.axis >= positions.len()) {
            return Err(Error::Index { op: OP, what: "axes", index: turn.axis, size: positions.len() });
        }
        let shape = [tokens, half];
        let (mut cos, mut sin) = (self.scratch(&shape, DType::F32)?, self.scratch(&shape, DType::F32)?);
        {
            let (cos, sin) = (SharedMut::new(cos.slice_mut::<f32>()?), SharedMut::new(sin.slice_mut::<f32>()?));
            // A cosine costs about as much as a hundred streamed elements.
            self.over_rows(tokens, 100 * half, |rows| {
                // SAFETY: tasks have rows of their own.
                let (cos, sin) = unsafe { (rows_mut(&cos, &rows, half), rows_mut(&sin, &rows, half)) };
                angles(positions, rows, turns, factor, cos, sin);
            });
        }
        Ok(Rotary { cos, sin })
    }

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
