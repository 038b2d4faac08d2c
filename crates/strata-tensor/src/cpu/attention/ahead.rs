//! What attention of a few queries fetches of the pages that it comes to.
//!
//! A step of decoding reads each page once, from memory, and a page and head is 16 KiB of keys and as much of values (head width 128, bf16), each head's somewhere else: a processor
//! that looks ahead by itself has hardly begun to when they end. Zen 4, two threads, such pieces in random order: 18 GB/s, 27 with the next piece fetched into the second-level cache while one
//! is read (into the first: 19), where one long stream brings 30.
//!
//! What is fetched all at once waits for the sixteen lines that a core can have on their way, and what is then computed asks for none. So where a kernel can (`Fetch::Stream`), lines are fetched one by
//! one while it computes. Emerald Rapids, two threads, four layers, one sequence of 4,096 tokens: decode at 57.5 tokens/s, at 54.9 with fetches between, mean of three rounds in turns.
//! Kernels of AVX-512-BF16 and f32 fetch between: on Zen 4 it makes no difference, and on Zen 5 it is not measured.
//!
//! Tiles of many rows wait for their arithmetic. But where keys and values are widened before they are multiplied, what widens them has nothing else to do while it waits: it finds them in the second-level
//! cache if the tiles before it fetched them, a line for each step (Emerald Rapids, prefill of 4,096 tokens: 2% of attention's time).

use std::cell::Cell;
use std::ops::Range;

use super::{Forward, QueryTile};
use crate::Element;
use crate::cpu::matmul::Pieces;
use crate::cpu::scratch::Plain;

/// Rows of a tile that waits for memory rather than for its arithmetic.
const FEW_ROWS: usize = 16;
/// Steps of a product between two fetches, of kernels that do not fetch meanwhile: whole granules, and so few that what is on its way lasts until the next.
pub(super) const STEPS_AT_A_TIME: usize = 32;
/// Lines that are fetched before the first is read.
pub(super) const LEAD_LINES: usize = 256;

/// Whether tiles of so many rows are fetched for.
pub(super) fn are_few(rows: usize) -> bool {
    rows <= FEW_ROWS
}

/// When tiles fetch what they come to.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pace {
    /// Never.
    Nothing,
    /// As much as they have read, every [`STEPS_AT_A_TIME`], or while these are computed, where a kernel can: tiles of few rows.
    Few,
    /// As much as they read, while they compute: tiles of many rows.
    Many,
}

/// Where tiles of queries find what they read.
pub(super) trait Reads {
    /// The splits of the keys that a tile goes through.
    fn splits(&self, tile: &QueryTile<'_>) -> Range<usize>;

    /// Adds the memory that a tile reads of pages in a split, in the order in which it does. (A decode step of 16 sequences of 512 tokens comes to 30,000 pages of a head, a microsecond or two each:
    /// what lists them one by one is felt.)
    fn areas(&self, tile: &QueryTile<'_>, split: usize, areas: &mut Vec<Pieces>);
}

thread_local! {
    /// Room for the areas of a split, from one list to the next: a task allocates nothing.
    static AREAS: Cell<Vec<Pieces>> = const { Cell::new(Vec::new()) };
}

/// Goes through the keys and values that some tiles read, in the order in which they are read, ahead of their being read.
pub(super) struct Ahead<'a> {
    of: Option<&'a dyn Reads>,
    /// The tile that is gone through, of which these splits have not been listed, and those behind it.
    tiles: &'a [QueryTile<'a>],
    splits: Range<usize>,
    /// Those of a split; from the `next`-th on nothing has been fetched.
    areas: Vec<Pieces>,
    next: usize,
    pieces: Pieces,
    pub(super) pace: Pace,
}

impl Drop for Ahead<'_> {
    fn drop(&mut self) {
        if self.of.is_some() {
            AREAS.set(std::mem::take(&mut self.areas));
        }
    }
}

impl<'a> Ahead<'a> {
    /// Of all that these tiles read.
    pub(super) fn of_tiles<T: Element + Plain>(forward: &'a Forward<'_, T>, tiles: &'a [QueryTile<'_>]) -> Self {
        if tiles.iter().all(|tile| forward.has_few_rows(tile)) {
            Ahead::new(forward, tiles, Pace::Few)
        } else if tiles.iter().all(|tile| forward.is_widened(tile)) {
            Ahead::new(forward, tiles, Pace::Many)
        } else {
            Ahead::nothing()
        }
    }

    /// Of what a tile reads in one split of its keys.
    pub(super) fn of_split<T: Element + Plain>(forward: &'a Forward<'_, T>, tile: &'a QueryTile<'_>, split: usize) -> Self {
        if forward.has_few_rows(tile) {
            Ahead::of_splits(forward, std::slice::from_ref(tile), split..split + 1, Pace::Few)
        } else {
            Ahead::nothing()
        }
    }

    pub(super) fn new(of: &'a dyn Reads, tiles: &'a [QueryTile<'_>], pace: Pace) -> Self {
        let splits = tiles.first().map_or(0..0, |tile| of.splits(tile));
        Ahead::of_splits(of, tiles, splits, pace)
    }

    fn of_splits(of: &'a dyn Reads, tiles: &'a [QueryTile<'_>], splits: Range<usize>, pace: Pace) -> Self {
        let mut areas = AREAS.take();
        areas.clear();
        let mut ahead = Ahead { of: Some(of), tiles, splits, areas, next: 0, pieces: Pieces::default(), pace };
        ahead.fetch(LEAD_LINES);
        ahead
    }

    pub(super) fn nothing() -> Self {
        Ahead { of: None, tiles: &[], splits: 0..0, areas: Vec::new(), next: 0, pieces: Pieces::default(), pace: Pace::Nothing }
    }

    /// Whether all has been fetched.
    #[cfg(test)]
    pub(super) fn is_done(&mut self) -> bool {
        self.pieces.lines() == 0 && !self.go_on()
    }

    /// Lists what is read in the next split; answers whether there is one.
    fn list_next(&mut self) -> bool {
        let (Some(of), [tile, others @ ..]) = (self.of, self.tiles) else { return false };
        if let Some(split) = self.splits.next() {
            of.areas(tile, split, &mut self.areas);
            return true;
        }
        self.tiles = others;
        self.splits = others.first().map_or(0..0, |tile| of.splits(tile));
        !others.is_empty()
    }

    /// Goes on to the next area; answers whether there is one.
    fn go_on(&mut self) -> bool {
        while self.next == self.areas.len() {
            self.areas.clear();
            self.next = 0;
            if !self.list_next() {
                return false;
            }
        }
        self.pieces = std::mem::take(&mut self.areas[self.next]);
        self.next += 1;
        true
    }

    /// Where the next chunks are, as many as there is room for, for the tile that is computed meanwhile. What lies in smaller pieces is fetched at once.
    pub(super) fn chunks<'r>(&mut self, room: &'r mut [usize]) -> &'r [usize] {
        let mut count = 0;
        while count < room.len() {
            if self.pieces.is_empty() && !self.go_on() {
                break;
            }
            if self.pieces.have_chunks() {
                count += self.pieces.list_chunks(&mut room[count..]);
            } else {
                let lines = self.pieces.lines();
                self.pieces = std::mem::take(&mut self.pieces).fetch(lines);
            }
        }
        &room[..count]
    }

    /// Fetches so many lines more: as many as are read before it is called again.
    pub(super) fn fetch(&mut self, mut lines: usize) {
        while lines > 0 {
            let count = self.pieces.lines().min(lines);
            self.pieces = std::mem::take(&mut self.pieces).fetch(count);
            lines -= count;
            if lines > 0 && !self.go_on() {
                return;
            }
        }
    }
}

/// Lists of areas, one after another.
#[cfg(test)]
pub(super) struct Lists(pub(super) Vec<Vec<Pieces>>);

#[cfg(test)]
impl Reads for Lists {
    fn splits(&self, _: &QueryTile<'_>) -> Range<usize> {
        0..self.0.len()
    }

    fn areas(&self, _: &QueryTile<'_>, split: usize, areas: &mut Vec<Pieces>) {
        areas.extend(self.0[split].iter().cloned());
    }
}

#[cfg(test)]
impl Lists {
    pub(super) fn ahead(&self, pace: Pace) -> Ahead<'_> {
        const SPAN: crate::AttentionSpan<'_> = crate::AttentionSpan { tokens: 0..1, past: 0, pages: &[] };
        Ahead::new(self, &[QueryTile { span: &SPAN, kv_head: 0, positions: 0..1 }], pace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_of_all_areas_in_order_but_for_small_pieces() {
        let small = Pieces::one(1 << 20, 0..240).repeated(64, 256);
        let areas = [Pieces::one(4096, 0..1024), small, Pieces::one(1 << 21, 64..1300), Pieces::default()];
        let lead = Pieces::one(1 << 22, 0..LEAD_LINES * 64);
        let expected = [4096, 4096 + 512, (1 << 21) + 64, (1 << 21) + 576, (1 << 21) + 1088];
        // In one list, in two, and each in one of its own with an empty one behind it.
        let lists = [4, 2, 1].map(|each| areas.chunks(each).flat_map(|areas| [areas.to_vec(), vec![]]).collect::<Vec<_>>());
        for (lists, at_a_time) in lists.iter().flat_map(|lists| (1..=6).map(move |at_a_time| (lists, at_a_time))) {
            // What is fetched before the first is read.
            let lists = Lists(std::iter::once(vec![lead.clone()]).chain(lists.iter().cloned()).collect());
            let mut ahead = lists.ahead(Pace::Few);
            let mut room = vec![0; at_a_time];
            let chunks: Vec<usize> = (0..6).flat_map(|_| ahead.chunks(&mut room).to_vec()).collect();
            assert_eq!(chunks, expected, "{at_a_time} at a time");
            assert!(ahead.chunks(&mut room).is_empty());
        }
    }
}
