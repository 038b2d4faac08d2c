//! Norms, rotation and gates of heads.

use super::{CpuBackend, OWN_VALUES, rows_mut, with_element};
use crate::backend::*;
use crate::cpu::rows::gate::{self, Gates};
use crate::cpu::rows::norm;
use crate::cpu::rows::rope::{self, QkvNormRope, TurningHeads};
use crate::cpu::threads::SharedMut;
use crate::{DType, Result, Tensor, TensorRef};

impl CpuBackend {
    pub(super) fn norm_and_rotate(
        &self,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        out: &mut Qkv,
    ) -> Result<()> {
        let (n, d, half) = (layout.width, g.head_dim, layout.rotary_dim / 2);
        let (num_rows, qkv) = (qkv.rows(), qkv.slice::<f32>()?);
        let (cos, sin) = (rotary.cos.slice::<f32>()?, rotary.sin.slice::<f32>()?);
        let norms = norm_slices(norms)?;
        with_element!(out.q.dtype(), T => {
            let (q, k, v) = (
                SharedMut::new(out.q.slice_mut::<T>()?),
                SharedMut::new(out.k.slice_mut::<T>()?),
                SharedMut::new(out.v.as_mut().expect(OWN_VALUES).slice_mut::<T>()?),
            );
            self.over_rows(num_rows, n, |rows| {
                let angles = rows.start * half..rows.end * half;
                let params = params(g, layout, norms, &cos[angles.clone()], &sin[angles]);
                // SAFETY: tasks have rows of their own.
                let (q, k, v) = unsafe {
                    (rows_mut(&q, &rows, g.heads * d), rows_mut(&k, &rows, g.kv_heads * d), rows_mut(&v, &rows, g.kv_heads * g.values.width()))
                };
                rope::qkv_norm_rope(self.isa, &params, &qkv[rows.start * n..rows.end * n], q, k, v);
            });
        });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_and_rotate_backward(
        &self,
        gradient: &Qkv,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        let (n, d, half) = (layout.width, g.head_dim, layout.rotary_dim / 2);
        let (num_rows, qkv) = (qkv.rows(), qkv.slice::<f32>()?);
        let (cos, sin) = (rotary.cos.slice::<f32>()?, rotary.sin.slice::<f32>()?);
        let norms = norm_slices(norms)?;
        let dv = gradient.v.as_ref().expect(OWN_VALUES).slice::<f32>()?;
        let (dq, dk) = (gradient.q.slice::<f32>()?, gradient.k.slice::<f32>()?);
        with_element!(dqkv.dtype(), T => {
            let dqkv = SharedMut::new(dqkv.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                let angles = rows.start * half..rows.end * half;
                let params = params(g, layout, norms, &cos[angles.clone()], &sin[angles]);
                let part = |width: usize| rows.start * width..rows.end * width;
                let (dq, dk, dv) = (&dq[part(g.heads * d)], &dk[part(g.kv_heads * d)], &dv[part(g.kv_heads * g.values.width())]);
                // SAFETY: tasks have rows of their own.
                let dqkv = unsafe { rows_mut(&dqkv, &rows, n) };
                rope::qkv_norm_rope_backward(self.isa, &params, dq, dk, dv, &qkv[part(n)], dqkv);
            });
        });
        Ok(())
    }

    pub(super) fn gate_of_heads(
        &self,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        y: &mut Tensor,
    ) -> Result<()> {
        let gates = Gates::new(g, layout);
        let (width, n, num_rows, qkv) = (layout.width, g.out_width(), qkv.rows(), qkv.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let (attended, y) = (attended.slice::<T>()?, SharedMut::new(y.slice_mut::<T>()?));
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                let (attended, qkv) = (&attended[rows.start * n..rows.end * n], &qkv[rows.start * width..rows.end * width]);
                gate::gate_heads(self.isa, &gates, attended, qkv, y);
            });
        });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn gate_of_heads_backward(
        &self,
        dy: &Tensor,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dattended: &mut Tensor,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        let gates = Gates::new(g, layout);
        let (width, n, num_rows) = (layout.width, g.out_width(), qkv.rows());
        let (dy, qkv) = (dy.slice::<f32>()?, qkv.slice::<f32>()?);
        let dattended = SharedMut::new(dattended.slice_mut::<f32>()?);
        with_element!(dqkv.dtype(), T => {
            let (attended, dqkv) = (attended.slice::<T>()?, SharedMut::new(dqkv.slice_mut::<T>()?));
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let (dattended, dqkv) = unsafe { (rows_mut(&dattended, &rows, n), rows_mut(&dqkv, &rows, width)) };
                let (narrow, wide) = (rows.start * n..rows.end * n, rows.start * width..rows.end * width);
                gate::gate_heads_backward(self.isa, &gates, &dy[narrow.clone()], &attended[narrow], &qkv[wide], dattended, dqkv);
            });
        });
        Ok(())
    }

    pub(super) fn turn_heads(
        &self,
        x: &Tensor,
        heads: &HeadMove,
        rotary: &Rotary,
        style: RotaryStyle,
        turn: Turn,
        y: &mut Tensor,
    ) -> Result<()> {
        let (x_columns, y_columns, half) = (x.shape().row_len(), y.shape().row_len(), heads.width / 2);
        let (num_rows, x) = (x.rows(), x.slice::<f32>()?);
        let (cos, sin) = (rotary.cos.slice::<f32>()?, rotary.sin.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, heads.heads * heads.width, |rows| {
                let angles = rows.start * half..rows.end * half;
                let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                let params = TurningHeads { heads: *heads, style, turn, cos, sin };
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, y_columns) };
                rope::rotate_heads(self.isa, &params, &x[rows.start * x_columns..rows.end * x_columns], x_columns, y, y_columns);
            });
        });
        Ok(())
    }

    pub(super) fn norm_of_heads(
        &self,
        x: &Tensor,
        heads: &HeadMove,
        weight: TensorRef<'_>,
        eps: f32,
        y: &mut Tensor,
    ) -> Result<()> {
        let (x_columns, y_columns, weight) = (x.shape().row_len(), y.shape().row_len(), weight.slice::<f32>()?);
        let (num_rows, x) = (x.rows(), x.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, heads.heads * heads.width, |rows| {
                let x = &x[rows.start * x_columns..rows.end * x_columns];
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, y_columns) };
                norm::norm_heads(self.isa, heads, x, x_columns, weight, eps, y, y_columns);
            });
        });
        Ok(())
    }

    pub(super) fn norm_of_heads_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        heads: &HeadMove,
        weight: TensorRef<'_>,
        eps: f32,
        dx: &mut Tensor,
    ) -> Result<()> {
        let (x_columns, dy_columns, weight) = (x.shape().row_len(), dy.shape().row_len(), weight.slice::<f32>()?);
        let (num_rows, x, dy) = (x.rows(), x.slice::<f32>()?, dy.slice::<f32>()?);
        with_element!(dx.dtype(), T => {
            let dx = SharedMut::new(dx.slice_mut::<T>()?);
            self.over_rows(num_rows, heads.heads * heads.width, |rows| {
                let x = &x[rows.start * x_columns..rows.end * x_columns];
                let dy = &dy[rows.start * dy_columns..rows.end * dy_columns];
                // SAFETY: tasks have rows of their own.
                let dx = unsafe { rows_mut(&dx, &rows, x_columns) };
                norm::norm_heads_backward(self.isa, heads, dy, dy_columns, x, weight, eps, dx, x_columns);
            });
        });
        Ok(())
    }
}

pub(super) fn params<'a>(
    g: &AttentionGeometry,
    layout: &QkvLayout,
    norms: Option<[&'a [f32]; 2]>,
    cos: &'a [f32],
    sin: &'a [f32],
) -> QkvNormRope<'a> {
    QkvNormRope {
        layout: *layout,
        heads: g.heads,
        kv_heads: g.kv_heads,
        head_dim: g.head_dim,
        value_dim: g.values.width(),
        q_norm: norms.map(|n| n[0]),
        k_norm: norms.map(|n| n[1]),
        eps: g.eps,
        cos,
        sin,
    }
}

/// The weights of the norms of queries and keys.
pub(super) fn norm_slices(norms: Option<[TensorRef<'_>; 2]>) -> Result<Option<[&[f32]; 2]>> {
    norms.map(|[q, k]| Ok([q.slice()?, k.slice()?])).transpose()
}
