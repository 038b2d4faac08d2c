//! Layers of gated delta rule: what surrounds the rule is split by rows, the rule itself by heads.

use std::ops::Range;

use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{DeltaGeometry, DeltaInputs, DeltaParams, DeltaSpan};
use crate::cpu::delta::{self, Gradients, Inputs};
use crate::cpu::memory::Buffer;
use crate::cpu::recurrent;
use crate::cpu::rows::convert;
use crate::cpu::rows::delta_net::{self as rows, Conv, ConvHead, MAX_HEAD_DIM, MAX_KERNEL};
use crate::cpu::threads::SharedMut;
use crate::tensor::Element;
use crate::{DType, Error, RecurrentStates, Result, Tensor, TensorRef};

/// Rows of a sequence that a task of the convolution has: enough that laying out its weights costs little beside them.
const CONV_ROWS: usize = 32;

/// States, as they lie.
pub(super) fn states_mut(states: &mut RecurrentStates) -> Result<&mut recurrent::RecurrentStates> {
    states.storage.get_mut().ok_or(Error::ForeignMemory)
}

/// Which of queries, keys and values a head is of.
#[derive(Clone, Copy)]
enum Part {
    Query,
    Key,
    Value,
}

/// Heads of queries, keys and values in the channels of the convolution, as heads of some rows of theirs.
fn conv_heads(g: &DeltaGeometry, rows: &Range<usize>, mut body: impl FnMut(Part, ConvHead)) {
    let parts = [
        (Part::Query, g.k_heads, g.k_dim, Some((g.k_dim as f32).sqrt().recip())),
        (Part::Key, g.k_heads, g.k_dim, Some(1.0)),
        (Part::Value, g.v_heads, g.v_dim, None),
    ];
    let mut channel = 0;
    for (part, heads, dim, length) in parts {
        for head in 0..heads {
            let (stride, column) = (heads * dim, head * dim);
            body(part, ConvHead { rows: rows.clone(), channels: channel..channel + dim, stride, column, length });
            channel += dim;
        }
    }
}

/// Runs of rows of sequences: of which, and the rows of the batch.
fn runs(spans: &[DeltaSpan]) -> Vec<(usize, Range<usize>)> {
    let of = |(i, span): (usize, &DeltaSpan)| {
        let Range { start, end } = span.tokens;
        (start..end).step_by(CONV_ROWS).map(move |row| (i, row..(row + CONV_ROWS).min(end)))
    };
    spans.iter().enumerate().flat_map(of).collect()
}

impl CpuBackend {
    pub(super) fn check_delta_geometry(&self, g: &DeltaGeometry) -> Result<()> {
        let grouped = g.k_heads > 0 && g.v_heads > 0 && g.v_heads.is_multiple_of(g.k_heads);
        let dims = (1..=MAX_HEAD_DIM).contains(&g.k_dim) && (1..=MAX_HEAD_DIM).contains(&g.v_dim);
        if grouped && dims && (1..=MAX_KERNEL).contains(&g.kernel) {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "gated delta rule with {} key heads of width {}, {} value heads of width {} and a convolution over {}: value heads must be a multiple of key heads, \
             widths at most {MAX_HEAD_DIM} and the convolution over at most {MAX_KERNEL}",
            g.k_heads, g.k_dim, g.v_heads, g.v_dim, g.kernel
        )))
    }

    pub(super) fn delta_scratch(&self, g: &DeltaGeometry, tokens: usize) -> usize {
        let threads = self.pool.num_threads();
        let zeros = (g.kernel - 1) * g.conv_width() * size_of::<f32>();
        zeros + delta::scratch_bytes(g, threads).max(delta::backward_scratch_bytes(g, tokens, threads))
    }

    pub(super) fn split_delta(
        &self,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut DeltaInputs,
    ) -> Result<()> {
        let (x, width, channels, back) = (projection.slice::<f32>()?, g.projection_width(), g.conv_width(), g.kernel - 1);
        let (weight, a_log, dt_bias) =
            (params.conv.slice::<f32>()?, params.a_log.slice::<f32>()?, params.dt_bias.slice::<f32>()?);
        let mut zeros = Buffer::zeroed(back * channels * size_of::<f32>())?;
        let zeros: &[f32] = zeros.numbers_mut(back * channels);
        let states = states.map(states_mut).transpose()?;
        let layout = states.as_ref().map(|s| s.layout);
        let mut no_slots = [];
        let slots = SharedMut::new(states.map_or(&mut no_slots[..], |s| s.numbers_mut()));
        let tail_of = |slot: u32| {
            let layout = layout.expect("a sequence with a slot comes with states");
            let first = slot as usize * layout.len();
            first + layout.tail().start..first + layout.tail().end
        };
        let conv_of = |span: &DeltaSpan| {
            let tail = match span.slot {
                // SAFETY: nobody writes the slot while this is read: what follows it is another region.
                Some(slot) if span.past > 0 => unsafe { &*slots.part(tail_of(slot)) },
                _ => zeros,
            };
            Conv { x, stride: width, first: span.tokens.start, tail, weight, channels, kernel: g.kernel }
        };
        let (q, k, v) = (
            SharedMut::new(out.q.slice_mut::<f32>()?),
            SharedMut::new(out.k.slice_mut::<f32>()?),
            SharedMut::new(out.v.slice_mut::<f32>()?),
        );
        let (beta, decay) = (SharedMut::new(out.beta.slice_mut::<f32>()?), SharedMut::new(out.g.slice_mut::<f32>()?));
        let runs = runs(spans);
        self.pool.run(runs.len(), &|task| {
            let (span, range) = &runs[task];
            let conv = conv_of(&spans[*span]);
            conv_heads(g, range, |part, head| {
                let to = match part {
                    Part::Query => &q,
                    Part::Key => &k,
                    Part::Value => &v,
                };
                // SAFETY: tasks have rows of their own.
                let to = unsafe { rows_mut(to, range, head.stride) };
                rows::conv_head(self.isa, &conv, &head, to);
            });
            for row in range.clone() {
                let x = &x[row * width..][..width];
                // SAFETY: as above.
                let (beta, decay) =
                    unsafe { (rows_mut(&beta, &(row..row + 1), g.v_heads), rows_mut(&decay, &(row..row + 1), g.v_heads)) };
                rows::gates(self.isa, &x[g.b_columns()], &x[g.a_columns()], a_log, dt_bias, beta, decay);
            }
        });
        let kept: Vec<(&DeltaSpan, u32)> =
            spans.iter().filter(|s| !s.tokens.is_empty()).filter_map(|s| Some((s, s.slot?))).collect();
        self.pool.run(kept.len(), &|task| {
            let (span, slot) = kept[task];
            // SAFETY: a slot belongs to one sequence.
            let tail = unsafe { slots.part(tail_of(slot)) };
            if span.past == 0 {
                tail.fill(0.0);
            }
            let new = span.tokens.len().min(back);
            tail.copy_within(new * channels.., 0);
            for (i, row) in (span.tokens.end - new..span.tokens.end).enumerate() {
                tail[(back - new + i) * channels..][..channels].copy_from_slice(&x[row * width..][..channels]);
            }
        });
        Ok(())
    }

    pub(super) fn split_delta_backward(
        &self,
        gradient: &mut DeltaInputs,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        dprojection: &mut Tensor,
    ) -> Result<()> {
        let (x, width, channels, back) = (projection.slice::<f32>()?, g.projection_width(), g.conv_width(), g.kernel - 1);
        let (weight, a_log, dt_bias) =
            (params.conv.slice::<f32>()?, params.a_log.slice::<f32>()?, params.dt_bias.slice::<f32>()?);
        let mut zeros = Buffer::zeroed(back * channels * size_of::<f32>())?;
        let tail: &[f32] = zeros.numbers_mut(back * channels);
        let conv_of =
            |span: &DeltaSpan| Conv { x, stride: width, first: span.tokens.start, tail, weight, channels, kernel: g.kernel };
        let runs = runs(spans);
        {
            let (q, k, v) = (
                SharedMut::new(gradient.q.slice_mut::<f32>()?),
                SharedMut::new(gradient.k.slice_mut::<f32>()?),
                SharedMut::new(gradient.v.slice_mut::<f32>()?),
            );
            self.pool.run(runs.len(), &|task| {
                let (span, range) = &runs[task];
                let conv = conv_of(&spans[*span]);
                conv_heads(g, range, |part, head| {
                    let gradient = match part {
                        Part::Query => &q,
                        Part::Key => &k,
                        Part::Value => &v,
                    };
                    // SAFETY: tasks have rows of their own.
                    let gradient = unsafe { rows_mut(gradient, range, head.stride) };
                    rows::conv_head_backward(self.isa, &conv, &head, gradient);
                });
            });
        }
        let (q, k, v) = (gradient.q.slice::<f32>()?, gradient.k.slice::<f32>()?, gradient.v.slice::<f32>()?);
        let (dbeta, dg) = (gradient.beta.slice::<f32>()?, gradient.g.slice::<f32>()?);
        with_element!(dprojection.dtype(), T => {
            let dx = SharedMut::new(dprojection.slice_mut::<T>()?);
            self.pool.run(runs.len(), &|task| {
                let (span, range) = &runs[task];
                let (conv, end) = (conv_of(&spans[*span]), spans[*span].tokens.end);
                // SAFETY: tasks have rows of their own.
                let dx = unsafe { rows_mut(&dx, range, width) };
                conv_heads(g, range, |part, head| {
                    let gradient = match part {
                        Part::Query => q,
                        Part::Key => k,
                        Part::Value => v,
                    };
                    rows::conv_input_backward(self.isa, &conv, &head, end, gradient, dx, width);
                });
                for (row, dx) in range.clone().zip(dx.chunks_exact_mut(width)) {
                    let x = &x[row * width..][..width];
                    let of_row = row * g.v_heads..(row + 1) * g.v_heads;
                    let (db, da) = dx[g.b_columns().start..].split_at_mut(g.v_heads);
                    let (dbeta, dg) = (&dbeta[of_row.clone()], &dg[of_row]);
                    rows::gates_backward(self.isa, dbeta, dg, &x[g.b_columns()], &x[g.a_columns()], a_log, dt_bias, db, da);
                }
            });
        });
        Ok(())
    }

    pub(super) fn delta_forward(
        &self,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut Tensor,
    ) -> Result<()> {
        let states = states.map(states_mut).transpose()?;
        delta::forward(&self.pool, self.arithmetic, g, &slices(inputs)?, spans, states, out.slice_mut()?);
        Ok(())
    }

    pub(super) fn delta_backward(
        &self,
        dout: &Tensor,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        gradient: &mut DeltaInputs,
    ) -> Result<()> {
        let gradients = Gradients {
            q: gradient.q.slice_mut()?,
            k: gradient.k.slice_mut()?,
            v: gradient.v.slice_mut()?,
            g: gradient.g.slice_mut()?,
            beta: gradient.beta.slice_mut()?,
        };
        delta::backward(&self.pool, self.arithmetic, g, &slices(inputs)?, dout.slice()?, spans, gradients)
    }

    pub(super) fn gate_and_norm(
        &self,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        y: &mut Tensor,
    ) -> Result<()> {
        let (n, width) = (g.value_width(), g.projection_width());
        let (num_rows, x, projection, weight) =
            (x.rows(), x.slice::<f32>()?, projection.slice::<f32>()?, weight.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                for (row, y) in rows.zip(y.chunks_exact_mut(n)) {
                    let z = &projection[row * width..][g.z_columns()];
                    rows::gated_norm(self.isa, &x[row * n..][..n], z, weight, eps, y);
                }
            });
        });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn gate_and_norm_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        dx: &mut Tensor,
        dprojection: &mut Tensor,
    ) -> Result<()> {
        let (n, width) = (g.value_width(), g.projection_width());
        let (num_rows, dy, x) = (x.rows(), dy.slice::<f32>()?, x.slice::<f32>()?);
        let (projection, weight) = (projection.slice::<f32>()?, weight.slice::<f32>()?);
        let dx = SharedMut::new(dx.slice_mut::<f32>()?);
        with_element!(dprojection.dtype(), T => {
            let dprojection = SharedMut::new(dprojection.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let (dx, dprojection) = unsafe { (rows_mut(&dx, &rows, n), rows_mut(&dprojection, &rows, width)) };
                for ((row, dx), dprojection) in rows.zip(dx.chunks_exact_mut(n)).zip(dprojection.chunks_exact_mut(width)) {
                    let (z, dz) = (&projection[row * width..][g.z_columns()], &mut dprojection[g.z_columns()]);
                    let of_row = row * n..(row + 1) * n;
                    if convert::is_zero(self.isa, &dy[of_row.clone()]) {
                        dx.fill(0.0);
                        dz.fill(T::from_f32(0.0));
                        continue;
                    }
                    rows::gated_norm_backward(self.isa, &dy[of_row.clone()], &x[of_row], z, weight, eps, dx, dz);
                }
            });
        });
        Ok(())
    }
}

fn slices(inputs: &DeltaInputs) -> Result<Inputs<'_>> {
    Ok(Inputs {
        q: inputs.q.slice()?,
        k: inputs.k.slice()?,
        v: inputs.v.slice()?,
        g: inputs.g.slice()?,
        beta: inputs.beta.slice()?,
    })
}
