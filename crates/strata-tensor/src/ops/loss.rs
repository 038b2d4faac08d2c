//! The unembedding with log-softmax, target log-probabilities and their loss, over chunks of tokens.
//!
//! The logits of all tokens are never in memory at once: a chunk of them is computed, read, turned into its own gradient and multiplied back, in
//! one pass over the weight in each direction. Rows without targets are left out, and on the way back those whose targets do not count, by
//! whole granules. Chunks begin and end at whole granules of a sequence, so that what gradients of weights are summed in does not depend on
//! where a chunk ends.
//!
//! A row that repeats an earlier one and has its targets has its log-probabilities, too: its logits are computed only if the loss depends on them.

use std::ops::Range;

use super::{check, linear};
use crate::backend::{Backend, LogprobTargets, RowReply, RowRequest, TOKEN_GRANULE};
use crate::live::live_runs;
use crate::tape::{Backward, Between, Linear, LoraGradients, LoraGroup, go_on};
use crate::{DType, Error, PackedRef, Repeats, Result, Tensor};

const OP: &str = "target_logprobs";
/// Bytes of f32 logits in a chunk, about, unless someone says otherwise: enough rows that the product is bound by arithmetic, and far from
/// the memory of a batch.
pub const LOGITS_CHUNK_BYTES: usize = 320 << 20;
/// Rows of a chunk at least, whatever the vocabulary, and at most.
const CHUNK_ROWS: Range<usize> = TOKEN_GRANULE..512;

/// A loss that is a sum of one term for each target.
pub trait TargetLoss {
    /// Writes the derivative of the loss by each log-probability of targets `first..first + logprobs.len()`.
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]);
}

/// Rows of logits that are in memory at once, for chunks of about `chunk_bytes` and a vocabulary of `vocab`.
pub fn logits_chunk_rows(vocab: usize, chunk_bytes: usize) -> usize {
    (chunk_bytes / (DType::F32.size_bytes() * vocab.max(1))).clamp(CHUNK_ROWS.start, CHUNK_ROWS.end)
}

/// What [`target_logprobs`] computes, and how.
pub struct LogprobPass<'p> {
    /// The sequences of the batch; they decide where chunks may end.
    pub sequences: &'p [Range<usize>],
    /// What is wanted.
    pub targets: LogprobTargets<'p>,
    /// A loss, and somewhere for the gradients of low-rank pairs.
    pub loss: Option<(&'p dyn TargetLoss, &'p mut dyn LoraGradients)>,
    /// Bytes of f32 logits in a chunk, about. No bit of a result depends on it.
    pub chunk_bytes: usize,
    /// Rows that are the same as others.
    pub repeats: Option<&'p Repeats>,
    /// Called after each chunk.
    pub between: &'p mut Between<'p>,
}

/// Runs of at most `max` of `rows` that split a sequence only between granules of a reduction over tokens.
pub(super) fn chunks(sequences: &[Range<usize>], rows: Range<usize>, max: usize) -> Vec<Range<usize>> {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let mut start = rows.start;
    while start < rows.end {
        let mut end = (start + max).min(rows.end);
        if let Some(cut) = sequences.iter().find(|s| s.start < end && end < s.end) {
            // `max` is at least a granule, so at least one row of the chunk stays.
            end -= (end - cut.start) % TOKEN_GRANULE;
        }
        chunks.push(start..end);
        start = end;
    }
    chunks
}

/// The parts of low-rank groups that fall in `rows`, with tokens counted from its start.
fn groups_in<'a>(lora: &[LoraGroup<'a>], rows: &Range<usize>) -> Vec<LoraGroup<'a>> {
    let clip = |r: &Range<usize>| {
        let (start, end) = (r.start.max(rows.start), r.end.min(rows.end));
        (start < end).then(|| start - rows.start..end - rows.start)
    };
    lora.iter()
        .filter_map(|g| {
            let tokens = clip(&g.tokens)?;
            let sequences = g.sequences.iter().filter_map(clip).collect();
            Some(LoraGroup { tokens, sequences, projections: g.projections.clone() })
        })
        .collect()
}

/// Log-probabilities of `targets` under the unembedding `w` of normed hidden states `x: [tokens, hidden]` (in the weight's dtype). With a
/// loss and somewhere for the gradients of low-rank pairs, also the gradient of the loss by `x`, f32.
///
/// # Errors
/// If a target is not in the vocabulary, or shapes do not fit; [`Error::Interrupted`].
pub fn target_logprobs(
    backend: &dyn Backend,
    x: &Tensor,
    w: PackedRef<'_>,
    lora: &[LoraGroup<'_>],
    pass: LogprobPass<'_>,
) -> Result<(Vec<f32>, Option<Tensor>)> {
    // A cut through a sequence that ended past the batch would never find the end of a granule.
    if let Some(s) = pass.sequences.iter().find(|s| s.end > x.rows()) {
        return Err(Error::Index { op: OP, what: "tokens", index: s.end, size: x.rows() });
    }
    check_targets(x.rows(), w.out_features(), pass.targets)?;
    let max = logits_chunk_rows(w.out_features(), pass.chunk_bytes);
    let parts = parts(pass.sequences, x.rows(), pass.targets, pass.repeats);
    in_chunks(backend, x, w, lora, (parts, max), pass)
}

/// What is done with some rows.
#[derive(Debug, PartialEq)]
pub(super) enum Part {
    /// Their logits are computed.
    Computed(Range<usize>),
    /// Those that have targets have the log-probabilities of rows before them.
    Copied(Range<usize>),
}

/// All rows that have targets, in order: they are computed, but for those that repeat earlier ones with the same targets.
fn parts(sequences: &[Range<usize>], rows: usize, targets: LogprobTargets<'_>, repeats: Option<&Repeats>) -> Vec<Part> {
    let of_row = |row: usize| &targets.ids[targets.offsets[row]..targets.offsets[row + 1]];
    let is_copied =
        |row: usize| repeats.map(|r| r.first(row)).is_some_and(|first| first != row && of_row(first) == of_row(row));
    let mut parts = Vec::new();
    let mut end = 0;
    for run in live_runs(sequences, &(0..rows), |row| !of_row(row).is_empty() && !is_copied(row)) {
        parts.push(Part::Copied(end..run.start));
        end = run.end;
        parts.push(Part::Computed(run));
    }
    parts.push(Part::Copied(end..rows));
    parts.retain(|part| match part {
        Part::Computed(_) => true,
        Part::Copied(rows) => targets.offsets[rows.start] < targets.offsets[rows.end],
    });
    parts
}

fn check_targets(rows: usize, vocab: usize, targets: LogprobTargets<'_>) -> Result<()> {
    if let Some(&id) = targets.ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(Error::Index { op: OP, what: "vocabulary", index: id as usize, size: vocab });
    }
    let offsets = targets.offsets;
    let covers = offsets.first() == Some(&0) && offsets.last() == Some(&targets.ids.len()) && offsets.is_sorted();
    if offsets.len() != rows + 1 || !covers {
        return Err(Error::Shape {
            op: OP,
            expected: format!("ascending offsets of {rows} rows into {} targets", targets.ids.len()),
            actual: format!("{} offsets from {:?} to {:?}", offsets.len(), offsets.first(), offsets.last()),
        });
    }
    Ok(())
}

/// [`target_logprobs`] by these parts, in chunks of so many rows.
pub(super) fn in_chunks(
    backend: &dyn Backend,
    x: &Tensor,
    w: PackedRef<'_>,
    lora: &[LoraGroup<'_>],
    (parts, max): (Vec<Part>, usize),
    pass: LogprobPass<'_>,
) -> Result<(Vec<f32>, Option<Tensor>)> {
    let LogprobPass { sequences, targets, mut loss, repeats, between, .. } = pass;
    check(OP, x, w.dtype(), w.in_features())?;
    linear::check_groups(OP, lora, x.rows(), w)?;
    let mut logprobs = vec![0.0f32; targets.ids.len()];
    let mut dx = match &loss {
        Some(_) => Some(backend.zeros(&[x.rows(), w.in_features()], DType::F32)?),
        None => None,
    };
    for part in parts {
        let runs = match part {
            Part::Computed(rows) => vec![rows],
            Part::Copied(rows) => {
                let repeats = repeats.expect("rows are copied because they repeat others");
                copy_logprobs(repeats, &rows, targets, &mut logprobs);
                loss.as_ref().map_or(Vec::new(), |(loss, _)| runs_of_loss(*loss, sequences, &rows, targets, &logprobs))
            }
        };
        for rows in runs.into_iter().flat_map(|run| chunks(sequences, run, max)) {
            let of_chunk = &mut logprobs[targets.offsets[rows.start]..targets.offsets[rows.end]];
            let loss: Option<(&dyn TargetLoss, &mut dyn LoraGradients)> = match &mut loss {
                Some((loss, gradients)) => Some((*loss, &mut **gradients)),
                None => None,
            };
            let gradients = chunk(backend, x, (w, lora), (rows, sequences), targets, of_chunk, loss)?;
            if let Some(dx) = dx.as_mut() {
                for (rows, gradient) in gradients {
                    backend.copy(gradient.as_ref(), dx.rows_mut(rows))?;
                }
            }
            go_on(between)?;
        }
    }
    Ok((logprobs, dx))
}

/// Gives rows that have targets the log-probabilities of those that they repeat.
fn copy_logprobs(repeats: &Repeats, rows: &Range<usize>, targets: LogprobTargets<'_>, logprobs: &mut [f32]) {
    let of_row = |row: usize| targets.offsets[row]..targets.offsets[row + 1];
    for row in rows.clone().filter(|&row| !of_row(row).is_empty()) {
        logprobs.copy_within(of_row(repeats.first(row)), of_row(row).start);
    }
}

/// The runs of `rows`, whose log-probabilities are known, on which the loss depends.
fn runs_of_loss(
    loss: &dyn TargetLoss,
    sequences: &[Range<usize>],
    rows: &Range<usize>,
    targets: LogprobTargets<'_>,
    logprobs: &[f32],
) -> Vec<Range<usize>> {
    let own = targets.offsets[rows.start]..targets.offsets[rows.end];
    let mut by_logprob = vec![0.0f32; own.len()];
    loss.gradient(own.start, &logprobs[own.clone()], &mut by_logprob);
    let of_row = |row: usize| targets.offsets[row] - own.start..targets.offsets[row + 1] - own.start;
    live_runs(sequences, rows, |row| by_logprob[of_row(row)].iter().any(|g| *g != 0.0))
}

/// The log-probabilities of the targets of `rows`, and the gradient of their loss by those rows of `x`, by runs: that of the others is 0.
fn chunk(
    backend: &dyn Backend,
    x: &Tensor,
    unembedding: (PackedRef<'_>, &[LoraGroup<'_>]),
    (rows, sequences): (Range<usize>, &[Range<usize>]),
    targets: LogprobTargets<'_>,
    logprobs: &mut [f32],
    loss: Option<(&dyn TargetLoss, &mut dyn LoraGradients)>,
) -> Result<Vec<(Range<usize>, Tensor)>> {
    let (w, lora) = unembedding;
    let of_rows = |rows: &Range<usize>| targets.offsets[rows.start]..targets.offsets[rows.end];
    let offsets_in = |rows: &Range<usize>| -> Vec<usize> {
        let first = targets.offsets[rows.start];
        targets.offsets[rows.start..=rows.end].iter().map(|offset| offset - first).collect()
    };
    let (own, offsets) = (of_rows(&rows), offsets_in(&rows));
    let of_chunk = LogprobTargets { ids: &targets.ids[own.clone()], offsets: &offsets };
    let chunk = backend.duplicate(x.as_ref().rows(rows.clone()))?;
    let layer = Linear { weight: w, bias: None, lora: groups_in(lora, &rows).into() };
    let (logits, low) = linear::forward(backend, &chunk, &layer)?;
    let mut log_normalizers = backend.scratch(&[rows.len()], DType::F32)?;
    logprobs.copy_from_slice(&backend.target_logprobs(&logits, of_chunk, &mut log_normalizers)?);
    let Some((loss, gradients)) = loss else { return Ok(Vec::new()) };
    let mut by_logprob = vec![0.0f32; logprobs.len()];
    loss.gradient(own.start, logprobs, &mut by_logprob);
    let counts = |row: usize| by_logprob[offsets[row - rows.start]..offsets[row - rows.start + 1]].iter().any(|g| *g != 0.0);
    let runs = live_runs(sequences, &rows, counts);
    let dlogits = runs.iter().map(|run| {
        let within = run.start - rows.start..run.end - rows.start;
        let (own, offsets) = (offsets[within.start]..offsets[within.end], offsets_in(run));
        let of_run = LogprobTargets { ids: &of_chunk.ids[own.clone()], offsets: &offsets };
        let mut dlogits = backend.scratch(&[run.len(), w.out_features()], w.dtype())?;
        let (logits, normalizers) = (logits.as_ref().rows(within.clone()), log_normalizers.as_ref().rows(within));
        backend.logits_gradient(logits, normalizers, of_run, &by_logprob[own], &mut dlogits)?;
        Ok(dlogits)
    });
    let dlogits = dlogits.collect::<Result<Vec<Tensor>>>()?;
    drop(logits);
    let mut of_runs = Vec::with_capacity(runs.len());
    for (run, dlogits) in runs.into_iter().zip(dlogits) {
        let mut pass = Backward::new(backend, &mut *gradients);
        let dx = if run == rows {
            linear::backward(&mut pass, &chunk, &dlogits, &layer, &low, true)?
        } else {
            let x = backend.duplicate(x.as_ref().rows(run.clone()))?;
            let layer = Linear { weight: w, bias: None, lora: groups_in(lora, &run).into() };
            let low = backend.linear(&x, &layer, None)?;
            linear::backward(&mut pass, &x, &dlogits, &layer, &low, true)?
        };
        of_runs.extend(dx.map(|dx| (run, dx)));
    }
    Ok(of_runs)
}

/// What `requests[i]` asks of the prediction after row `rows[i]` of `x`, whose logits are computed once for all who ask of them; `None` where they are not finite numbers. About `chunk_bytes` of logits are
/// in memory at once.
///
/// # Errors
/// If a row is not there, there are not as many requests as rows, an id is not in the vocabulary, or shapes do not fit.
pub fn read_logits(
    backend: &dyn Backend,
    x: &Tensor,
    w: PackedRef<'_>,
    lora: &[LoraGroup<'_>],
    rows: &[usize],
    requests: &[RowRequest],
    chunk_bytes: usize,
) -> Result<Vec<Option<RowReply>>> {
    const OP: &str = "read_logits";
    check(OP, x, w.dtype(), w.in_features())?;
    if rows.len() != requests.len() {
        let (expected, actual) = (format!("requests of {} rows", rows.len()), requests.len().to_string());
        return Err(Error::Shape { op: OP, expected, actual });
    }
    if let Some(&id) = requests.iter().flat_map(|r| &r.ids).find(|&&id| id as usize >= w.out_features()) {
        return Err(Error::Index { op: OP, what: "vocabulary", index: id as usize, size: w.out_features() });
    }
    if requests.iter().flat_map(|r| &r.draw).any(|draw| draw.top_k == Some(0)) {
        return Err(Error::Unsupported("a draw among the 0 most probable tokens".into()));
    }
    if let Some(&row) = rows.iter().find(|&&r| r >= x.rows()) {
        return Err(Error::Index { op: OP, what: "rows", index: row, size: x.rows() });
    }
    linear::check_groups(OP, lora, x.rows(), w)?;
    let max = logits_chunk_rows(w.out_features(), chunk_bytes);
    let mut by_row: Vec<usize> = (0..rows.len()).collect();
    by_row.sort_by_key(|&i| rows[i]);
    let (mut replies, mut left) = (vec![None; rows.len()], &by_row[..]);
    let mut distinct: Vec<usize> = by_row.iter().map(|&i| rows[i]).collect();
    distinct.dedup();
    for chunk in distinct.chunks(max) {
        let mut gathered = backend.scratch(&[chunk.len(), x.shape().row_len()], x.dtype())?;
        backend.gather(x.as_ref(), chunk, &mut gathered)?;
        let lora = LoraGroup::of_rows(lora, chunk);
        let (logits, _) = linear::forward(backend, &gathered, &Linear { weight: w, bias: None, lora })?;
        let place = |row: usize| chunk.partition_point(|&other| other < row);
        let (asked, later) = left.split_at(left.partition_point(|&i| place(rows[i]) < chunk.len()));
        left = later;
        for asked in asked.chunks(max) {
            let places: Vec<usize> = asked.iter().map(|&i| place(rows[i])).collect();
            let requests: Vec<RowRequest> = asked.iter().map(|&i| requests[i].clone()).collect();
            for (&i, reply) in asked.iter().zip(backend.read_logits(&logits, &places, &requests)?) {
                replies[i] = reply;
            }
        }
    }
    Ok(replies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cut_sequences_between_granules_only() {
        let sequences = [0..7, 7..160, 160..161, 161..290];
        let chunks = chunks(&sequences, 0..290, 40);
        assert_eq!(chunks.first().unwrap().start, 0);
        assert_eq!(chunks.last().unwrap().end, 290);
        assert!(chunks.windows(2).all(|w| w[0].end == w[1].start));
        for chunk in chunks {
            assert!(chunk.len() <= 40 && !chunk.is_empty());
            let inside = sequences.iter().find(|s| s.start < chunk.start && chunk.start < s.end);
            assert!(inside.is_none_or(|s| (chunk.start - s.start) % TOKEN_GRANULE == 0));
        }
    }
}
