//! What is added to a product while its rows are in cache: a bias, and the low-rank products of runs of rows.
//!
//! Rows of a result lie so far apart that reading and writing them again costs as much as a low-rank product itself. So the task that has a panel of a product adds to each
//! run of its rows, once their reduction has come to its end, what belongs to them. The bits are those of one product after another: an addend goes on from what is there.

use std::ops::Range;

use super::fetch::Fetch;
use super::kernel::{SingleAddend, Tile, TileKernel};
use super::operands::{Out, RightBlock, RightSide, Rows, panel_columns, steps};
use super::tiled::Lows;
use crate::DType;
use crate::cpu::isa::Isa;
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::rows::convert;
use crate::cpu::scratch::{Arena, taken_bytes};

/// Rows of a panel that are added to at a time: with their addends they stay in the first-level cache. Whole tiles of every kernel.
const ROWS: usize = 48;
/// Blocks of right sides that a task keeps at a time, at most: those of a run of rows are read in turn.
const BLOCKS_MAX: usize = 8;
/// Words that they take, at most.
const BLOCKS_WORDS: usize = 16 << 10;
/// Bytes of a task's arena for addends, at most.
pub(super) const SCRATCH_BYTES_MAX: usize = BLOCKS_WORDS * 4;

/// A product of some rows, added to as many rows and some columns of another.
pub(crate) struct Addend<'a> {
    /// First row of the result.
    pub(crate) first_row: usize,
    /// First column of the result; a multiple of [`PANEL`].
    pub(crate) first_column: usize,
    /// Rows of whole steps.
    pub(crate) left: Rows<'a>,
    pub(crate) right: RightSide<'a>,
}

impl<'a> Addend<'a> {
    /// Whether a product with columns from here on can be added on the way: its panels are those of the result, and its blocks have room on a thread.
    pub(crate) fn can_join(first_column: usize, right: &RightSide<'_>) -> bool {
        first_column.is_multiple_of(PANEL) && right.written_words(right.steps(), right.columns().min(PANEL)) <= BLOCKS_WORDS
    }

    /// Its panel that is added to the panel of the result from this column on, if there is one.
    fn panel(&self, first_column: usize) -> Option<usize> {
        let first = first_column.checked_sub(self.first_column)?;
        (first < self.right.columns()).then_some(first / PANEL)
    }

    /// Words of the largest block that has to be written for it.
    fn block_words(&self) -> usize {
        self.right.written_words(self.right.steps(), self.right.columns().min(PANEL))
    }

    fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.left.rows
    }

    fn columns(&self) -> Range<usize> {
        self.first_column..self.first_column + self.right.columns()
    }

    /// As one of a single row, if it is one, of whole panels that are read as they lie.
    fn single(&self) -> Option<SingleAddend<'a>> {
        let fits = self.left.rows == 1 && self.first_column.is_multiple_of(PANEL);
        let right = self.right.whole_panels().filter(|_| fits)?;
        let (steps, first_panel) = (self.right.steps(), self.first_column / PANEL);
        Some(SingleAddend { row: self.first_row, left: &self.left.bytes[..steps * 4], right, steps, first_panel })
    }
}

/// Products of one row each, as a decode step has for each adapter, with the same panels of the result, by rows: a call adds those of a panel.
struct Singles<'a> {
    panels: Range<usize>,
    addends: Vec<SingleAddend<'a>>,
}

impl<'a> Singles<'a> {
    /// Takes out of `products`, which are in order, those that are such. None, where any elements of the result would have two.
    fn take_from(products: &mut Vec<Addend<'a>>) -> Vec<Self> {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let meets_earlier = |(i, p): (usize, &Addend<'_>)| {
            let mut near = products[..i].iter().rev().take_while(|earlier| earlier.rows().end > p.first_row);
            near.any(|earlier| meet(&earlier.columns(), &p.columns()))
        };
        if products.iter().enumerate().any(meets_earlier) {
            return Vec::new();
        }
        let mut all: Vec<Singles<'a>> = Vec::new();
        products.retain(|p| {
            let Some(single) = p.single() else { return true };
            let panels = single.first_panel..single.first_panel + p.right.columns() / PANEL;
            match all.iter_mut().find(|singles| singles.panels == panels) {
                Some(singles) => singles.addends.push(single),
                None => all.push(Singles { panels, addends: vec![single] }),
            }
            false
        });
        all
    }

    /// Those of some rows.
    fn of_rows(&self, rows: &Range<usize>) -> &[SingleAddend<'a>] {
        let before = |end: usize| self.addends.partition_point(|single| single.row < end);
        &self.addends[before(rows.start)..before(rows.end)]
    }
}

/// All that is added to a product, in this order.
#[derive(Default)]
pub(crate) struct Addends<'a> {
    /// To every row; as long as there are columns.
    pub(super) bias: Option<&'a [f32]>,
    products: Vec<Addend<'a>>,
    singles: Vec<Singles<'a>>,
    /// Instead of those: products of the product's own left side, which are made as its rows are.
    lows: Option<Lows<'a>>,
    /// Whether rows of later products never lie before those of earlier ones, so that those of a run of rows lie together.
    in_order: bool,
    /// Words of the largest block.
    block_words: usize,
}

impl<'a> Addends<'a> {
    /// A bias, and then products.
    pub(crate) fn new(bias: Option<&'a [f32]>, mut products: Vec<Addend<'a>>) -> Self {
        for Addend { left, .. } in &products {
            let row_bytes = left.width * left.dtype.size_bytes();
            assert!(
                row_bytes.is_multiple_of(4),
                "a row of {row_bytes} bytes ends within a step, and behind it is what lies there"
            );
        }
        let in_order = products.windows(2).all(|pair| {
            let (before, after) = (pair[0].rows(), pair[1].rows());
            before.start <= after.start && before.end <= after.end
        });
        let singles = if in_order { Singles::take_from(&mut products) } else { Vec::new() };
        let block_words = products.iter().map(Addend::block_words).max().unwrap_or(0);
        Addends { bias, products, singles, lows: None, in_order, block_words }
    }

    /// A bias, and then what is made of the left side, for a product that [makes](super::Matmul::makes_lows) it.
    pub(crate) fn with_lows(bias: Option<&'a [f32]>, lows: Lows<'a>) -> Self {
        Addends { bias, lows: Some(lows), ..Addends::default() }
    }

    /// What is made of the left side.
    pub(super) fn lows(&self) -> Option<&Lows<'a>> {
        self.lows.as_ref()
    }

    /// What is added to some rows, once what is made of the left side has been made of them.
    ///
    /// # Safety
    /// As [`Lows::added_to`].
    pub(super) unsafe fn of_made_rows(&self, lows: &'a Lows<'_>, rows: Range<usize>) -> Addends<'a> {
        // SAFETY: the caller's promise.
        Addends::new(self.bias, unsafe { lows.added_to(rows) })
    }

    /// Products of single rows that are added together.
    #[cfg(test)]
    pub(super) fn num_singles(&self) -> usize {
        self.singles.iter().map(|singles| singles.addends.len()).sum()
    }

    /// Whether all of it is within so many rows and columns, in whole panels, and of this dtype.
    pub(super) fn fit(&self, rows: usize, columns: usize, dtype: DType) -> bool {
        let products = self.products.iter().all(|p| {
            let fits = p.rows().end <= rows && p.columns().end <= columns;
            fits && p.first_column.is_multiple_of(PANEL) && p.left.dtype == dtype
        });
        let singles = self.singles.iter().all(|singles| {
            let last = singles.addends.last().map_or(0, |single| single.row);
            last < rows && singles.panels.end * PANEL <= columns
        });
        let lows = self.lows.as_ref().is_none_or(|lows| lows.fit(rows, columns, dtype));
        products && singles && lows && self.bias.is_none_or(|bias| bias.len() == columns)
    }

    /// Single rows of some rows and a panel.
    fn singles_of(&self, rows: &Range<usize>, panel: usize) -> impl Iterator<Item = &[SingleAddend<'a>]> {
        let of_panel = self.singles.iter().filter(move |singles| singles.panels.contains(&panel));
        of_panel.map(|singles| singles.of_rows(rows))
    }

    /// Products that may be of some of `rows`, with their places.
    fn of_rows(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, &Addend<'a>)> {
        let all = 0..self.products.len();
        let near = if self.in_order {
            let first = self.products.partition_point(|p| p.first_row + p.left.rows <= rows.start);
            first..first + self.products[first..].partition_point(|p| p.first_row < rows.end)
        } else {
            all
        };
        near.clone().zip(&self.products[near])
    }

    /// What of the right sides is added to these rows of a panel, as far as it is read as it lies.
    pub(super) fn read_for(&self, rows: &Range<usize>, panel: usize) -> impl Iterator<Item = &'a [u8]> {
        let singles = self.singles_of(rows, panel).flatten().map(move |single| single.panel_bytes(panel));
        singles.chain(self.of_rows(rows).filter_map(move |(_, addend)| addend.right.panel_bytes(addend.panel(panel * PANEL)?)))
    }

    /// Bytes of the arena of a task.
    pub(super) fn scratch_bytes(&self) -> usize {
        taken_bytes::<u32>(self.words())
    }

    fn words(&self) -> usize {
        self.block_words * self.blocks()
    }

    /// Blocks that there is room for.
    fn blocks(&self) -> usize {
        (BLOCKS_WORDS / self.block_words.max(1)).clamp(1, BLOCKS_MAX.min(self.products.len()).max(1))
    }

    /// Runs `product` on all of `rows`, in runs if there is something to add to each.
    pub(super) fn runs(&self, rows: Range<usize>, mut product: impl FnMut(Range<usize>)) {
        let is_empty = self.bias.is_none() && self.products.is_empty() && self.singles.is_empty();
        let run = if is_empty { rows.len() } else { rows.len().div_ceil(rows.len().div_ceil(ROWS)).next_multiple_of(12) };
        for first in rows.clone().step_by(run.max(1)) {
            product(first..(first + run).min(rows.end));
        }
    }
}

/// What a task adds to its panel.
pub(super) struct PanelAddends<'a, 's> {
    addends: &'a Addends<'a>,
    kernel: &'a TileKernel,
    isa: Isa,
    panel: usize,
    /// Room for blocks, and the addends whose they are.
    words: &'s mut [u32],
    blocks: [Option<(usize, RightBlock)>; BLOCKS_MAX],
    next_block: usize,
}

impl<'a, 's> PanelAddends<'a, 's> {
    pub(super) fn new(addends: &'a Addends<'a>, kernel: &'a TileKernel, isa: Isa, panel: usize, arena: &mut Arena<'s>) -> Self {
        let words = arena.take(addends.words());
        PanelAddends { addends, kernel, isa, panel, words, blocks: [const { None }; BLOCKS_MAX], next_block: 0 }
    }

    /// Adds to `rows` of the panel of `out`.
    ///
    /// # Safety
    /// They are in bounds, and nobody else's.
    pub(super) unsafe fn add(&mut self, out: &Out, rows: Range<usize>) {
        let first_column = self.panel * PANEL;
        let columns = panel_columns(self.panel, out.columns);
        if let Some(bias) = self.addends.bias {
            for row in rows.clone() {
                // SAFETY: the caller's promise.
                let values = unsafe { std::slice::from_raw_parts_mut(out.at(row, first_column), columns) };
                convert::add_bias(self.isa, &bias[first_column..][..columns], values);
            }
        }
        let addends = self.addends;
        for singles in addends.singles_of(&rows, self.panel) {
            // SAFETY: as above; all are within the result, and have been taken from slices.
            unsafe { self.kernel.add_single_rows(self.panel, singles, out.at(0, first_column), out.stride) };
        }
        for (i, addend) in addends.of_rows(&rows) {
            let own = rows.start.max(addend.first_row)..rows.end.min(addend.first_row + addend.left.rows);
            let Some(panel) = addend.panel(first_column).filter(|_| !own.is_empty()) else { continue };
            let left = &addend.left;
            let steps = steps(left.width, left.dtype);
            let columns = panel_columns(panel, addend.right.columns());
            let block = self.block(i, addend, panel, steps);
            // SAFETY: as above; the block has these steps and columns, the left side these rows.
            unsafe {
                let tile = Tile {
                    steps,
                    a: left.bytes.as_ptr().add((own.start - addend.first_row) * left.stride),
                    a_stride: left.stride,
                    b: block.first,
                    b_stride: block.stride,
                    c: out.at(own.start, first_column),
                    c_stride: out.stride,
                    columns,
                    accumulate: true,
                    fetch: Fetch::Nothing,
                };
                self.kernel.block(own.len(), &tile);
            }
        }
    }

    /// The right side of addend `i`.
    fn block(&mut self, i: usize, addend: &Addend<'_>, panel: usize, steps: usize) -> RightBlock {
        if addend.block_words() == 0 {
            return addend.right.block(self.isa, panel, 0..steps, &mut []);
        }
        if let Some((_, block)) = self.blocks.iter().flatten().find(|(of, _)| *of == i) {
            return *block;
        }
        let slot = self.next_block % self.addends.blocks();
        self.next_block += 1;
        let room = self.addends.block_words;
        let words = &mut self.words[slot * room..][..addend.block_words()];
        let block = addend.right.block(self.isa, panel, 0..steps, words);
        self.blocks[slot] = Some((i, block));
        block
    }
}

const _: () = assert!(ROWS.is_multiple_of(12) && ROWS.is_multiple_of(LANES), "whole tiles of every kernel");
