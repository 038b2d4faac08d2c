//! What is asked of logits: log-probabilities, their gradient, draws.

use std::ops::Range;

use super::{CpuBackend, rows_mut, with_element};
use crate::backend::{LogprobTargets, RowReply, RowRequest};
use crate::cpu::rows::{draw, softmax};
use crate::cpu::scratch::{taken_bytes, with_scratch};
use crate::cpu::threads::SharedMut;
use crate::{DType, Element, Result, Tensor, TensorRef};

/// Logits of a piece of a row, whole blocks and spans, where there are fewer rows than threads.
const PIECE: usize = 4 * draw::SPAN;

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

    pub(super) fn replies(&self, logits: &Tensor, rows: &[usize], requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>> {
        let n = logits.shape().row_len();
        let logits = logits.slice::<f32>()?;
        let rows: Vec<&[f32]> = rows.iter().map(|row| &logits[row * n..][..n]).collect();
        let mut replies = vec![None; requests.len()];
        if requests.len() < self.pool.num_threads() {
            self.reply_to(&rows, requests, PIECE, &mut replies);
        } else {
            // A row stays in the cache of one core.
            let out = SharedMut::new(&mut replies);
            self.pool.run(requests.len(), &|row| {
                // SAFETY: tasks have rows of their own.
                let out = unsafe { rows_mut(&out, &(row..row + 1), 1) };
                self.reply_to(&rows[row..row + 1], &requests[row..row + 1], n, out);
            });
        }
        Ok(replies)
    }

    /// Replies to requests of rows of logits. Pieces of `piece` logits, whole spans or whole rows, are summed up on all threads, or on the one that it is called on within a task.
    fn reply_to(&self, logits: &[&[f32]], requests: &[RowRequest], piece: usize, replies: &mut [Option<RowReply>]) {
        let n = logits.first().map_or(0, |row| row.len());
        let (rows, blocks, spans, pieces) =
            (requests.len(), n.div_ceil(draw::BLOCK), n.div_ceil(draw::SPAN), n.div_ceil(piece));
        let bytes = taken_bytes::<f32>(rows * blocks) + 2 * taken_bytes::<f64>(rows * spans);
        with_scratch(bytes, |mut arena| {
            let maxima = arena.take::<f32>(rows * blocks);
            let (sums, tempered) = (arena.take::<f64>(rows * spans), arena.take::<f64>(rows * spans));
            let piece_of = |task: usize| {
                let (row, start) = (task / pieces, task % pieces * piece);
                (row, start..(start + piece).min(n))
            };
            let in_row = |row: usize, per_row: usize, of: &Range<usize>, unit: usize| {
                row * per_row + of.start / unit..row * per_row + of.end.div_ceil(unit)
            };
            {
                let maxima = SharedMut::new(maxima);
                self.pool.run(rows * pieces, &|task| {
                    let (row, piece) = piece_of(task);
                    // SAFETY: pieces are of whole blocks, and tasks have pieces of their own.
                    let maxima = unsafe { maxima.part(in_row(row, blocks, &piece, draw::BLOCK)) };
                    draw::block_maxima(self.isa, &logits[row][piece], maxima);
                });
            }
            let maxima = &*maxima;
            let of_row = |row: usize| &maxima[row * blocks..][..blocks];
            {
                let (sums, tempered) = (SharedMut::new(sums), SharedMut::new(tempered));
                self.pool.run(rows * pieces, &|task| {
                    let (row, piece) = piece_of(task);
                    let own = in_row(row, spans, &piece, draw::SPAN);
                    // SAFETY: pieces are of whole spans, and tasks have pieces of their own.
                    let (sums, tempered) = unsafe { (sums.part(own.clone()), tempered.part(own)) };
                    let factor = draw::inverse_temperature(&requests[row], n);
                    let maximum = draw::maximum(of_row(row));
                    draw::span_sums(self.isa, &logits[row][piece], maximum, factor, sums, tempered);
                });
            }
            let (sums, tempered) = (&*sums, &*tempered);
            let out = SharedMut::new(replies);
            self.pool.run(rows, &|row| {
                let (factor, spans) = (draw::inverse_temperature(&requests[row], n), row * spans..(row + 1) * spans);
                let sums = &sums[spans.clone()];
                let row_of = draw::Row::new(self.isa, logits[row], of_row(row), factor, sums, &tempered[spans]);
                // SAFETY: tasks have rows of their own.
                let out = unsafe { rows_mut(&out, &(row..row + 1), 1) };
                out[0] = draw::reply(row_of, &requests[row]);
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Draw};
    use crate::cpu::isa::Isa;
    use crate::memory::Memory;
    use crate::random::normal;
    use crate::{HostRef, Result};

    #[test]
    fn replies_do_not_depend_on_threads_or_on_other_rows() -> Result<()> {
        let n = 3 * PIECE + 777;
        let draw = |temperature, top_k, top_p| RowRequest {
            ids: vec![5],
            top: 3,
            draw: Some(Draw { temperature, top_k, top_p, uniforms: vec![0.1, 0.6, 0.99] }),
        };
        let requests = [
            draw(1.0, None, 1.0),
            draw(0.7, None, 1.0),
            draw(0.0, None, 1.0),
            draw(1.3, Some(40), 0.9),
            draw(0.9, None, 0.8),
            RowRequest::default(),
        ];
        let values: Vec<f32> = (0..(requests.len() * n) as u64).map(|i| normal([3, 4], i) * 2.0).collect();
        let read = |threads: usize, rows: Range<usize>| {
            let backend = CpuBackend::with_isa(Isa::detect(), threads);
            let mut logits = backend.zeros(&[rows.len(), n], DType::F32)?;
            let of_rows = &values[rows.start * n..rows.end * n];
            backend.upload(HostRef::from_f32(of_rows, &[rows.len(), n])?, logits.as_mut())?;
            let all: Vec<usize> = (0..rows.len()).collect();
            backend.read_logits(&logits, &all, &requests[rows])
        };
        let alone = (0..requests.len()).map(|row| read(1, row..row + 1)).collect::<Result<Vec<_>>>()?.concat();
        assert!(alone.iter().all(Option::is_some));
        // Fewer rows than threads are divided into pieces.
        for threads in [1, 2, 3, 16] {
            assert_eq!(read(threads, 0..requests.len())?, alone, "{threads} threads");
            assert_eq!(read(threads, 1..2)?, alone[1..2], "{threads} threads");
        }
        // Several may ask of one row.
        let backend = CpuBackend::with_isa(Isa::detect(), 2);
        let mut logits = backend.zeros(&[2, n], DType::F32)?;
        backend.upload(HostRef::from_f32(&values[..2 * n], &[2, n])?, logits.as_mut())?;
        let asked = [requests[3].clone(), requests[0].clone(), requests[1].clone()];
        let replies = backend.read_logits(&logits, &[0, 0, 1], &asked)?;
        assert_eq!((&replies[1..], replies[0] == alone[0]), (&alone[..2], false));
        Ok(())
    }
}
