//! What is wanted of the predictions within a prompt, and what came of it: log-probabilities of its own tokens, the most probable ones, those of
//! tokens that the request names, and tokens drawn in the place of its own.
//!
//! All of it is read off one row of logits for each position, and a position of which nothing is wanted has none. What a picture shows is
//! given: its positions have no score of their own, but the model expects something there, and can be asked for that.

use std::ops::Range;

use crate::api::{Cells, PromptAltTokens, PromptTargetLogprobs, PromptTargets, SampleRequest, TopK};
use crate::compute::{RowTask, Scored};
use crate::limits::{PROMPT_ALT_TOKENS_MAX, PROMPT_TARGETS_MAX, TOPK_MAX};

use super::draw::{Alternatives, DrawSettings};

/// In the place of a token id: nothing is wanted.
const NOTHING: u32 = u32::MAX;

/// What a request wants of its prompt.
pub(crate) struct Wanted {
    /// Whether log-probabilities of the prompt's own tokens are wanted.
    logprobs: bool,
    /// How many of the most probable tokens.
    topk: usize,
    /// The first position of which these two are: the prompt's length if neither is.
    first_scored: usize,
    targets: Option<Targets>,
    /// How many tokens to draw in the place of each.
    alternatives: usize,
    /// The first position of which anything is wanted: the prompt's length if nothing is.
    first: usize,
}

/// Tokens that the request names.
struct Targets {
    shape: [usize; 2],
    cells: Cells,
    /// Of the listed cells, or [`NOTHING`].
    ids: Vec<u32>,
}

impl Wanted {
    /// Of a prompt of `length` tokens.
    ///
    /// # Errors
    /// A message for the user that names what is wrong.
    pub(crate) fn new(request: &SampleRequest, length: usize, vocab_size: usize) -> Result<Self, String> {
        let (topk, alternatives) = (request.topk_prompt_logprobs, request.prompt_alt_tokens_k);
        if topk > TOPK_MAX {
            return Err(format!("topk_prompt_logprobs is {topk}, above {TOPK_MAX}"));
        }
        if alternatives > PROMPT_ALT_TOKENS_MAX {
            return Err(format!("prompt_alt_tokens_k is {alternatives}, above {PROMPT_ALT_TOKENS_MAX}"));
        }
        if let Some(n) = request.prompt_logprobs_last_n
            && !(1..length).contains(&n)
        {
            let most = length - 1;
            return Err(format!("prompt_logprobs_last_n is {n}, not between 1 and {most}, the prompt's length less one"));
        }
        let targets = request.target_prompt_logprobs.as_ref();
        let targets = targets.map(|asked| Targets::new(asked, length, vocab_size)).transpose()?;
        let first_scored = match request.prompt_logprobs || topk > 0 {
            true => request.prompt_logprobs_last_n.map_or(1, |n| length - n),
            false => length,
        };
        let first_target = targets.as_ref().map_or(length, |(_, first)| *first);
        let first_alternatives = if alternatives > 0 { 1 } else { length };
        Ok(Wanted {
            logprobs: request.prompt_logprobs,
            topk,
            first_scored,
            targets: targets.map(|(targets, _)| targets),
            alternatives,
            first: first_scored.min(first_target).min(first_alternatives),
        })
    }

    /// The first position of which anything is wanted, at least 1: the prompt's length if nothing is.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Whether the prompt's own token at a position has a score, if it is one of text.
    pub(crate) fn scores(&self, position: usize) -> bool {
        position >= self.first_scored
    }

    /// What to ask of the prediction of a position, whose token `own` is if that has a score; `None`: nothing.
    pub(crate) fn task(&self, position: usize, own: Option<u32>, settings: &DrawSettings) -> Option<RowTask> {
        let topk = if own.is_some() { self.topk } else { 0 };
        let ids: Vec<u32> = own.into_iter().chain(self.targets_at(position).map(|(_, id)| id)).collect();
        let DrawSettings { seed, temperature, .. } = *settings;
        let count = self.alternatives;
        let alternatives = (count > 0).then_some(Alternatives { seed, temperature, position, count });
        let is_something = !ids.is_empty() || alternatives.is_some();
        is_something.then_some(RowTask::Score { ids, topk, alternatives })
    }

    /// The listed cells that name a token for a position, and the tokens.
    fn targets_at(&self, position: usize) -> impl Iterator<Item = (usize, u32)> {
        let cells =
            self.targets.iter().flat_map(move |targets| targets.row(position - 1).map(|cell| (cell, targets.ids[cell])));
        cells.filter(|&(_, id)| id != NOTHING)
    }

    /// What is asked that takes much, for people.
    pub(crate) fn shown(&self) -> String {
        let mut shown = String::new();
        let targets = self.targets.as_ref().map_or(0, |targets| targets.ids.len());
        for (name, value) in [
            ("topk_prompt_logprobs is", self.topk),
            ("prompt_alt_tokens_k is", self.alternatives),
            ("the values of target_prompt_logprobs are", targets),
        ] {
            if value > 0 {
                shown += &format!(", where {name} {value}");
            }
        }
        shown
    }

    /// Bytes that all this takes while the request is open, its part of the encoded answer included, for a prompt of `length` tokens.
    pub(crate) fn held_bytes(&self, length: usize) -> u64 {
        let of_position = if self.logprobs { 12 } else { 0 } + topk_bytes(self.topk);
        // Ids of 4 bytes and log-probabilities, and as many of 8 with log-probabilities in the answer.
        let of_draw = 8 + 12;
        let of_targets = self.targets.as_ref().map_or(0, |targets| {
            let cells = targets.ids.len() as u64 * 12;
            match &targets.cells {
                Cells::All => cells,
                // Where they are, here and in the answer.
                Cells::Csr { row_offsets, columns } => cells + (row_offsets.len() + columns.len()) as u64 * 16,
            }
        });
        length as u64 * (of_position + self.alternatives as u64 * of_draw) + of_targets
    }
}

/// Bytes that so many of the most probable tokens take for a position, here and in the encoded answer.
pub(crate) fn topk_bytes(k: usize) -> u64 {
    if k == 0 { 0 } else { 24 + 16 * k as u64 }
}

impl Targets {
    /// What is asked for, and the first position that has something of it.
    fn new(asked: &PromptTargets, length: usize, vocab_size: usize) -> Result<(Self, usize), String> {
        check_cells(asked, length).map_err(|wrong| format!("target_prompt_logprobs {wrong}"))?;
        let targets = Targets { shape: asked.shape, cells: asked.cells.clone(), ids: Vec::new() };
        let mut ids = Vec::with_capacity(asked.ids.len());
        let mut first = None;
        for row in 0..length - 1 {
            for cell in targets.row(row) {
                ids.push(match asked.ids[cell] {
                    -1 => NOTHING,
                    id => match u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size) {
                        Some(id) => {
                            first.get_or_insert(row + 1);
                            id
                        }
                        None => {
                            let column = targets.column(row, cell);
                            return Err(format!(
                                "target_prompt_logprobs[{row}, {column}] is {id}, neither a token of the vocabulary, 0 to {}, nor -1 for none",
                                vocab_size - 1
                            ));
                        }
                    },
                });
            }
        }
        let first = first.ok_or("target_prompt_logprobs names no token: every cell of it is -1; leave it out, or name one")?;
        Ok((Targets { ids, ..targets }, first))
    }

    /// The listed cells of a row.
    fn row(&self, row: usize) -> Range<usize> {
        match &self.cells {
            Cells::All => row * self.shape[1]..(row + 1) * self.shape[1],
            Cells::Csr { row_offsets, .. } => row_offsets[row] as usize..row_offsets[row + 1] as usize,
        }
    }

    fn column(&self, row: usize, cell: usize) -> i64 {
        match &self.cells {
            Cells::All => (cell - row * self.shape[1]) as i64,
            Cells::Csr { columns, .. } => columns[cell],
        }
    }
}

/// Whether the listed cells are those of a matrix that fits a prompt of `length` tokens. Costs no memory.
fn check_cells(asked: &PromptTargets, length: usize) -> Result<(), String> {
    let ([rows, width], listed) = (asked.shape, asked.ids.len());
    if rows != length - 1 {
        let needed = length - 1;
        return Err(format!(
            "has shape [{rows}, {width}]; a prompt of {length} tokens needs {needed} rows, one for each token after the first"
        ));
    }
    if width == 0 || width > PROMPT_TARGETS_MAX {
        return Err(format!("has shape [{rows}, {width}]; its columns are between 1 and {PROMPT_TARGETS_MAX}"));
    }
    let Cells::Csr { row_offsets, columns } = &asked.cells else {
        let needed = rows.saturating_mul(width);
        return if listed == needed {
            Ok(())
        } else {
            Err(format!("has {listed} values, and its shape [{rows}, {width}] needs {needed}"))
        };
    };
    if columns.len() != listed {
        return Err(format!("has {listed} values and {} sparse_col_indices; there is one for each value", columns.len()));
    }
    if row_offsets.len() != rows + 1 {
        let needed = rows + 1;
        return Err(format!("has {} sparse_crow_indices; {rows} rows need {needed}", row_offsets.len()));
    }
    if row_offsets[0] != 0 || usize::try_from(row_offsets[rows]) != Ok(listed) {
        let (from, to) = (row_offsets[0], row_offsets[rows]);
        return Err(format!("has sparse_crow_indices from {from} to {to}; with {listed} values they go from 0 to {listed}"));
    }
    if let Some(row) = (0..rows).find(|&row| row_offsets[row] > row_offsets[row + 1]) {
        let (from, to) = (row_offsets[row], row_offsets[row + 1]);
        return Err(format!("has sparse_crow_indices that fall from {from} to {to} at row {row}; they never fall"));
    }
    for row in 0..rows {
        let own = &columns[row_offsets[row] as usize..row_offsets[row + 1] as usize];
        let is_column = |column: i64| usize::try_from(column).is_ok_and(|column| column < width);
        if let Some(column) = own.iter().copied().find(|&column| !is_column(column)) {
            return Err(format!("has column {column} among sparse_col_indices of row {row}; columns are 0 to {}", width - 1));
        }
        if let Some(pair) = own.windows(2).find(|pair| pair[0] >= pair[1]) {
            let (before, after) = (pair[0], pair[1]);
            return Err(format!(
                "has column {after} behind {before} among sparse_col_indices of row {row}; within a row they rise, and none comes twice"
            ));
        }
    }
    Ok(())
}

/// What came of it so far.
pub(crate) struct Scores {
    logprobs: Vec<Option<f32>>,
    topk: Vec<TopK>,
    /// Of the listed cells.
    targets: Vec<f32>,
    alternatives: PromptAltTokens,
}

/// All of it, as it is answered.
pub(crate) struct PromptOutput {
    pub(crate) logprobs: Option<Vec<Option<f32>>>,
    pub(crate) topk: Option<Vec<TopK>>,
    pub(crate) targets: Option<PromptTargetLogprobs>,
    pub(crate) alternatives: Option<PromptAltTokens>,
}

impl Scores {
    /// Nothing yet, of a prompt of `length` tokens.
    pub(crate) fn new(wanted: &Wanted, length: usize) -> Self {
        let k = wanted.alternatives;
        let draws = (length - 1) * k;
        Scores {
            logprobs: vec![None; if wanted.logprobs { length } else { 0 }],
            topk: vec![TopK::new(); if wanted.topk > 0 { length } else { 0 }],
            targets: vec![0.0; wanted.targets.as_ref().map_or(0, |targets| targets.ids.len())],
            alternatives: PromptAltTokens { k, tokens: vec![0; draws], logprobs: vec![0.0; draws] },
        }
    }

    /// Takes what came of the [`Wanted::task`] of a position, whose own token has a score or not.
    pub(crate) fn record(&mut self, wanted: &Wanted, position: usize, is_scored: bool, scored: Scored) {
        let mut logprobs = scored.logprobs.into_iter();
        if is_scored {
            let own = logprobs.next();
            if let Some(slot) = self.logprobs.get_mut(position) {
                *slot = own;
            }
            if let Some(slot) = self.topk.get_mut(position) {
                *slot = scored.topk;
            }
        }
        for ((cell, _), logprob) in wanted.targets_at(position).zip(logprobs) {
            self.targets[cell] = logprob;
        }
        let PromptAltTokens { k, tokens, logprobs } = &mut self.alternatives;
        let row = (position - 1) * *k;
        for (i, (token, logprob)) in (row..row + *k).zip(scored.alternatives) {
            (tokens[i], logprobs[i]) = (token, logprob);
        }
    }

    /// All of it, once every position was recorded.
    pub(crate) fn into_output(self, wanted: Wanted) -> PromptOutput {
        PromptOutput {
            logprobs: wanted.logprobs.then_some(self.logprobs),
            topk: (wanted.topk > 0).then_some(self.topk),
            targets: wanted.targets.map(|Targets { shape, cells, .. }| PromptTargetLogprobs {
                shape,
                cells,
                logprobs: self.targets,
            }),
            alternatives: (wanted.alternatives > 0).then_some(self.alternatives),
        }
    }
}
