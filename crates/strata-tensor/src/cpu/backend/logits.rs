//! What is asked of logits: log-probabilities, their gradient, draws.

use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{LogprobTargets, RowReply, RowRequest};
use crate::cpu::rows::{draw, softmax};
use crate::cpu::threads::SharedMut;
use crate::{DType, Element, Result, Tensor, TensorRef};

impl CpuBackend {
    pub(super) fn logprobs_of(
        &self,
        logits: &Tensor,
        targets: LogprobTargets<'_>,
        log_normalizers: &mut Tensor,
    ) -> Result<Vec<f32>> {
        let n = logits.shape().row_len();
        let (num_rows, logits) = (logits.rows(), logits.slice::<f32>()?);
        let log_normalizers = log_normalizers.slice_mut::<f32>()?;
        let out = SharedMut::new(log_normalizers);
        self.over_rows(num_rows, n, |rows| {
            // SAFETY: tasks have rows of their own.
            let out = unsafe { rows_mut(&out, &rows, 1) };
            for (row, out) in rows.zip(out) {
                *out = softmax::log_sum_exp(self.isa, &logits[row * n..][..n]);
            }
        });
        let LogprobTargets { ids, offsets } = targets;
        let of_row = |(row, log_normalizer): (usize, &f32)| {
            let (row_logits, log_normalizer) = (&logits[row * n..][..n], *log_normalizer);
            ids[offsets[row]..offsets[row + 1]].iter().map(move |&id| row_logits[id as usize] - log_normalizer)
        };
        Ok(log_normalizers.iter().enumerate().flat_map(of_row).collect())
    }

    pub(super) fn gradient_of_logits(
        &self,
        logits: TensorRef<'_>,
        log_normalizers: TensorRef<'_>,
        targets: LogprobTargets<'_>,
        gradient: &[f32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let n = logits.shape().row_len();
        let (num_rows, logits) = (logits.shape().leading(), logits.slice::<f32>()?);
        let log_normalizers = log_normalizers.slice::<f32>()?;
        with_element!(dlogits.dtype(), T => {
            let dlogits = SharedMut::new(dlogits.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                for row in rows {
                    // SAFETY: tasks have rows of their own.
                    let out = unsafe { rows_mut(&dlogits, &(row..row + 1), n) };
                    let (logits, normalizer) = (&logits[row * n..][..n], log_normalizers[row]);
                    let own = targets.offsets[row]..targets.offsets[row + 1];
                    let (ids, gradient) = (&targets.ids[own.clone()], &gradient[own]);
                    let total: f32 = gradient.iter().sum();
                    if total == 0.0 {
                        out.fill(T::from_f32(0.0));
                    } else {
                        softmax::softmax_gradient(self.isa, logits, normalizer, -total, out);
                    }
                    for (i, &id) in ids.iter().enumerate() {
                        // An id that occurs twice is written once, with all its terms.
                        if ids[..i].contains(&id) {
                            continue;
                        }
                        let own: f32 = ids.iter().zip(gradient).filter(|t| *t.0 == id).map(|t| t.1).sum();
                        let id = id as usize;
                        out[id] = T::from_f32(own - total * (logits[id] - normalizer).exp());
                    }
                }
            });
        });
        Ok(())
    }

    pub(super) fn replies(&self, logits: &Tensor, requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>> {
        let n = logits.shape().row_len();
        let logits = logits.slice::<f32>()?;
        let mut replies = vec![None; requests.len()];
        let out = SharedMut::new(&mut replies);
        self.pool.run(requests.len(), &|row| {
            let row_logits = &logits[row * n..][..n];
            let log_normalizer = softmax::log_sum_exp(self.isa, row_logits);
            // SAFETY: tasks have rows of their own.
            let out = unsafe { rows_mut(&out, &(row..row + 1), 1) };
            out[0] = draw::reply(draw::Row { logits: row_logits, log_normalizer }, &requests[row]);
        });
        Ok(replies)
    }
}
