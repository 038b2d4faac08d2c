//! Reductions over tokens: gradients of low-rank weights.

use std::ops::Range;

use super::Matmul;
use super::addends::Addends;
use super::fetch::{Pieces, fetch_numbers};
use super::granules;
use super::operands::{Out, Right, RightBlock, RowRuns, Rows, panel_columns};
use super::pack::pack_step;
use crate::backend::TOKEN_GRANULE;
use crate::cpu::isa::Isa;
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::threads::{Pool, SharedMut};
use crate::{DType, Element, Result};

const _: () = assert!(
    TOKEN_GRANULE.is_multiple_of(granules::INPUTS),
    "a cut between granules of tokens is one between those of a kernel"
);
/// Columns of a matrix of tokens that are laid out at a time for a reduction over tokens, at most.
const TOKEN_PANELS_WIDTH: usize = 16 * PANEL;
/// Tokens that are laid out at a time, the filling of granules among them: memory does not grow with the number of short sequences.
const TOKEN_PANELS_TOKENS: usize = 16 * TOKEN_GRANULE;

impl Matmul<'_> {
    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]` for each pair of a `low` and a `dw`, one sequence of tokens after another.
    ///
    /// Each sequence begins a granule of tokens of its own and fills its last with zeros: the sum over several sequences has the same bits as
    /// adding them one call at a time, in whatever order a kernel adds within a granule.
    pub(crate) fn backward_weights<T: Element>(
        &self,
        x: Rows<'_>,
        sequences: &[Range<usize>],
        pairs: &mut [(Rows<'_>, Out)],
    ) -> Result<()> {
        let (mut all, mut tokens) = (in_granules(sequences), Vec::with_capacity(TOKEN_PANELS_TOKENS));
        loop {
            tokens.clear();
            tokens.extend(all.by_ref().take(TOKEN_PANELS_TOKENS));
            if tokens.is_empty() {
                return Ok(());
            }
            let mut lows = pairs.iter().map(|(low, _)| transposed::<T>(low, &tokens)).collect::<Result<Vec<_>>>()?;
            for first in (0..x.width).step_by(TOKEN_PANELS_WIDTH) {
                let columns = first..(first + TOKEN_PANELS_WIDTH).min(x.width);
                let panels = TokenPanels::of::<T>(self.pool, self.isa, &x, columns.clone(), &tokens)?;
                for ((low, dw), low_columns) in pairs.iter().zip(&mut lows) {
                    assert!(low.rows == x.rows && dw.rows == low.width && dw.columns == x.width && dw.accumulate);
                    let low_columns = low_columns.numbers_mut::<T>(low.width * tokens.len());
                    let low_columns = Rows::new(low_columns, tokens.len(), 0..low.width, 0..tokens.len());
                    let dw = dw.columns(columns.clone());
                    let all = 0..low_columns.rows;
                    self.product((low_columns, RowRuns::of(&all)), dw, self.block_steps(), &panels, &Addends::default())?;
                }
            }
        }
    }
}

/// Tokens in the order of a reduction over them: each sequence begins a granule and fills up its last.
fn in_granules(sequences: &[Range<usize>]) -> impl Iterator<Item = Option<usize>> {
    let filled = |s: &Range<usize>| {
        let missing = s.len().next_multiple_of(TOKEN_GRANULE) - s.len();
        s.clone().map(Some).chain(std::iter::repeat_n(None, missing))
    };
    sequences.iter().flat_map(filled)
}

/// `[width, tokens]`, with zeros where there is no token.
fn transposed<T: Element>(rows: &Rows<'_>, tokens: &[Option<usize>]) -> Result<Buffer> {
    let len = rows.width * tokens.len();
    let mut buffer = Buffer::zeroed(len * size_of::<T>())?;
    let columns = buffer.numbers_mut::<T>(len);
    for (at, token) in tokens.iter().enumerate() {
        let Some(token) = token else { continue };
        for (r, &value) in rows.row::<T>(*token).iter().enumerate() {
            columns[r * tokens.len() + at] = value;
        }
    }
    Ok(buffer)
}

/// Some columns of a matrix of tokens as the right side of a reduction over them: panels of [`PANEL`] columns, a line of words for each step of tokens.
/// Rows of tokens lie far apart: they are read once, whole, for all panels and all that is multiplied with them.
struct TokenPanels {
    buffer: Buffer,
    num_steps: usize,
    num_columns: usize,
}

impl TokenPanels {
    fn of<T: Element>(pool: &Pool, isa: Isa, x: &Rows<'_>, columns: Range<usize>, tokens: &[Option<usize>]) -> Result<Self> {
        let per_step = 4 / size_of::<T>();
        let (num_steps, num_columns) = (tokens.len() / per_step, columns.len());
        let mut buffer = Buffer::recycled(num_steps * num_columns.next_multiple_of(LANES) * 4)?;
        // SAFETY: buffers are aligned to pages, and every four bytes are a word.
        let words = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast::<u32>(), buffer.len() / 4) };
        let words = SharedMut::new(words);
        pool.run(tokens.len() / TOKEN_GRANULE, &|granule| {
            let tokens = &tokens[granule * TOKEN_GRANULE..][..TOKEN_GRANULE];
            let steps = TOKEN_GRANULE / per_step;
            for panel in 0..num_columns.div_ceil(PANEL) {
                let count = panel_columns(panel, num_columns);
                let width = count.next_multiple_of(LANES);
                let start = panel * PANEL * num_steps + granule * steps * width;
                // SAFETY: each task has a granule of its own.
                let lines = unsafe { words.part(start..start + steps * width) };
                let row = |token: Option<usize>| token.map(|t| &x.row::<T>(t)[columns.start + panel * PANEL..][..count]);
                // What the next panel has of a row: too little, and too far from the next row's, for a processor to look ahead.
                let behind = columns.start + panel * PANEL + count..(columns.start + (panel + 2) * PANEL).min(columns.end);
                for (line, tokens) in lines.chunks_exact_mut(width).zip(tokens.chunks_exact(per_step)) {
                    tokens.iter().flatten().for_each(|&t| fetch_numbers(&x.row::<T>(t)[behind.clone()]));
                    match row(tokens[0]) {
                        Some(first) => {
                            pack_step(isa, first, row(tokens[per_step - 1]).filter(|_| per_step == 2), &mut line[..count])
                        }
                        None => line.fill(0),
                    }
                }
            }
        });
        Ok(TokenPanels { buffer, num_steps, num_columns })
    }
}

impl Right for &TokenPanels {
    fn block(&self, panel: usize, steps: Range<usize>, _: &mut [u32]) -> RightBlock {
        let stride = panel_columns(panel, self.num_columns).next_multiple_of(LANES) * 4;
        let panel = &self.buffer[panel * PANEL * self.num_steps * 4..][..self.num_steps * stride];
        RightBlock { first: panel[steps.start * stride..steps.end * stride].as_ptr(), stride, is_streamed: false }
    }

    fn pieces(&self, _: usize, _: Range<usize>) -> Pieces {
        // They were just written.
        Pieces::default()
    }
}

/// Bytes that a reduction over tokens takes to lay out what is `width` numbers wide.
pub(super) fn panels_bytes(width: usize, dtype: DType) -> usize {
    TOKEN_PANELS_TOKENS * width.min(TOKEN_PANELS_WIDTH).next_multiple_of(LANES) * dtype.size_bytes()
}
