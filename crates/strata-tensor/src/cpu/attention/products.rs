//! Products of a tile of queries and the pages of a cache, or what lies as they do.

use super::SPLIT_PAGES;
use super::ahead::{Ahead, Pace, STEPS_AT_A_TIME};
use crate::KV_PAGE_TOKENS as PAGE;
use crate::cpu::matmul::{CHUNK_STEPS, Fetch, STREAM_STEPS, Tile, TileKernel};
use crate::cpu::packed::{LANES, PANEL};

/// Steps of a tile that fetches for the next: those of a page of keys of 128.
const STREAMED_STEPS: usize = 64;

/// Chunks that a product of many rows fetches, at most: a panel of the values of a split of bf16.
const CHUNKS_MAX: usize = SPLIT_PAGES * PAGE / 2 * (PANEL / LANES) / CHUNK_STEPS;

/// The left side of a product: rows of whole steps, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) rows: usize,
    pub(super) steps: usize,
    pub(super) first: *const u8,
    pub(super) stride: usize,
}

/// What multiplies tiles of queries.
pub(super) struct Products<'a, 'p> {
    pub(super) kernel: &'a TileKernel,
    /// See [`TileKernel::block_in_parts`].
    pub(super) wide: &'a mut [f32],
    /// What is fetched meanwhile.
    pub(super) ahead: &'a mut Ahead<'p>,
}

impl Products<'_, '_> {
    /// `left` by the first steps of a packed matrix of `b_steps` steps and `columns`, panel by panel. `c` has `c_stride` elements from one row to the next.
    ///
    /// # Safety
    /// The left side holds its rows, `b` the packed matrix, `c` as many rows.
    pub(super) unsafe fn product(
        &mut self,
        left: Left,
        (b, b_steps): (*const u32, usize),
        columns: usize,
        (c, c_stride): (*mut f32, usize),
        accumulate: bool,
    ) {
        for panel in 0..columns.div_ceil(PANEL) {
            let width = (columns - panel * PANEL).min(PANEL);
            let b_stride = width.next_multiple_of(LANES) * 4;
            let tile = Tile {
                steps: left.steps,
                a: left.first,
                a_stride: left.stride,
                b: b.wrapping_add(panel * PANEL * b_steps).cast(),
                b_stride,
                c: c.wrapping_add(panel * PANEL),
                c_stride,
                columns: width,
                accumulate,
                fetch: Fetch::Nothing,
            };
            // SAFETY: within the packed matrix and the rows of the result.
            unsafe { self.block(left.rows, &tile) };
        }
    }

    /// As [`TileKernel::block`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn block(&mut self, rows: usize, tile: &Tile) {
        if self.ahead.pace != Pace::Few {
            // SAFETY: passed on from the caller.
            return unsafe { self.block_in_parts(rows, &[tile.b], tile) };
        }
        let streams = self.kernel.streams(rows, tile.columns);
        let (at_a_time, mut room) =
            (if streams { STREAMED_STEPS } else { STEPS_AT_A_TIME }, [0; STREAMED_STEPS / STREAM_STEPS]);
        let mut first = 0;
        loop {
            let steps = (tile.steps - first).min(at_a_time);
            let mut fetch = Fetch::Nothing;
            if !streams {
                self.ahead.fetch(steps * tile.columns.div_ceil(LANES));
            } else if let chunks @ [_, ..] = self.ahead.chunks(&mut room[..steps.div_ceil(STREAM_STEPS)]) {
                fetch = Fetch::Stream(chunks);
            }
            let (a, b) = (tile.a.wrapping_add(first * 4), tile.b.wrapping_add(first * tile.b_stride));
            let accumulate = tile.accumulate || first > 0;
            // SAFETY: a part of the steps for which the caller vouches; the chunks are there until it is done.
            unsafe { self.kernel.block(rows, &Tile { steps, a, b, accumulate, fetch, ..*tile }) };
            first += steps;
            if first == tile.steps {
                break;
            }
        }
    }

    /// As [`TileKernel::block_in_parts`]. Fetches as much as it reads, if many rows do.
    ///
    /// # Safety
    /// As there.
    unsafe fn block_in_parts(&mut self, rows: usize, parts: &[*const u8], tile: &Tile) {
        let mut room = [0; CHUNKS_MAX];
        let lines = parts.len() * tile.steps * tile.columns.div_ceil(LANES);
        let chunks = match self.ahead.pace {
            Pace::Many => self.ahead.chunks(&mut room[..(lines / CHUNK_STEPS).min(CHUNKS_MAX)]),
            Pace::Few | Pace::Nothing => &[],
        };
        let fetch = if chunks.is_empty() { Fetch::Nothing } else { Fetch::Chunks(chunks) };
        // SAFETY: passed on from the caller; the chunks are there until it is done.
        unsafe { self.kernel.block_in_parts(rows, parts, &Tile { fetch, ..*tile }, self.wide) }
    }

    /// As [`Products::product`] of rows next to each other, by packed matrices, each the right side of `left.steps` steps, one after another.
    ///
    /// # Safety
    /// As there, for each of them; the left side has the steps of all.
    pub(super) unsafe fn product_in_parts(
        &mut self,
        left: Left,
        parts: usize,
        part: &dyn Fn(usize) -> *const u32,
        columns: usize,
        c: *mut f32,
        accumulate: bool,
    ) {
        for panel in 0..columns.div_ceil(PANEL) {
            let width = (columns - panel * PANEL).min(PANEL);
            let mut panels = [std::ptr::null(); SPLIT_PAGES];
            for (i, panel_of_part) in panels.iter_mut().enumerate().take(parts) {
                *panel_of_part = part(i).wrapping_add(panel * PANEL * left.steps).cast();
            }
            let tile = Tile {
                steps: left.steps,
                a: left.first,
                a_stride: left.stride,
                b: std::ptr::null(),
                b_stride: width.next_multiple_of(LANES) * 4,
                c: c.wrapping_add(panel * PANEL),
                c_stride: columns,
                columns: width,
                accumulate,
                fetch: Fetch::Nothing,
            };
            if self.ahead.pace != Pace::Few {
                // SAFETY: within the packed matrices and the rows of the result.
                unsafe { self.block_in_parts(left.rows, &panels[..parts], &tile) };
                continue;
            }
            for (i, &b) in panels[..parts].iter().enumerate() {
                let (a, accumulate) = (tile.a.wrapping_add(i * tile.steps * 4), accumulate || i > 0);
                // SAFETY: as above; the bits are the same.
                unsafe { self.block(left.rows, &Tile { a, b, accumulate, ..tile }) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::ahead::Lists;
    use super::*;
    use crate::cpu::isa::{Arithmetic, Isa};
    use crate::cpu::matmul::Pieces;
    use crate::{Element, Numerics};

    /// As many steps as a tile that streams takes at a time, fewer and more; as many rows as one has, and more, up to so many that the right side is widened for them.
    #[test]
    fn what_is_fetched_meanwhile_changes_no_bit() {
        for isa in Isa::available() {
            let kernel = TileKernel::new(Arithmetic { isa, numerics: Numerics::Fast }, bf16::DTYPE);
            let shapes = [1, 33, 64, 65, 128, 200].into_iter().flat_map(|steps| [1, 2, 6, 7, 40].map(|rows| (steps, rows)));
            for ((steps, rows), parts) in shapes.flat_map(|shape| [1, 3].map(|parts| (shape, parts))) {
                let values = |len: usize| (0..len).map(|i| bf16::from_f32((i * 7 % 31) as f32 * 0.1 - 1.5)).collect::<Vec<_>>();
                let (a, b) = (values(rows * parts * steps * 2), values(parts * steps * PANEL * 2));
                let part = |i: usize| b[i * steps * PANEL * 2..].as_ptr().cast();
                let mut wide = vec![0.0; kernel.wide_len(rows, parts * steps)];
                let mut product = |mut ahead: Ahead<'_>, accumulate: bool| {
                    let mut c = vec![0.5f32; rows * PANEL];
                    let left = Left { rows, steps, first: a.as_ptr().cast(), stride: parts * steps * 4 };
                    let mut products = Products { kernel: &kernel, wide: &mut wide, ahead: &mut ahead };
                    // SAFETY: the operands have these rows and steps.
                    unsafe {
                        if parts == 1 {
                            products.product(left, (part(0), steps), PANEL, (c.as_mut_ptr(), PANEL), accumulate);
                        } else {
                            products.product_in_parts(left, parts, &part, PANEL, c.as_mut_ptr(), accumulate);
                        }
                    }
                    (c.into_iter().map(f32::to_bits).collect::<Vec<_>>(), ahead.is_done())
                };
                for accumulate in [false, true] {
                    let (at_once, _) = product(Ahead::nothing(), accumulate);
                    for pace in [Pace::Few, Pace::Many] {
                        let lists = Lists(vec![vec![Pieces::one(b.as_ptr().addr(), 0..size_of_val(&b[..]))]]);
                        let (meanwhile, is_done) = product(lists.ahead(pace), accumulate);
                        assert_eq!(meanwhile, at_once, "{isa}, {rows} rows of {parts} times {steps} steps");
                        let are_more = parts * steps * (PANEL / LANES) > CHUNKS_MAX * CHUNK_STEPS;
                        assert!(is_done || are_more, "{isa}, {rows} rows of {parts} times {steps} steps");
                    }
                }
            }
        }
    }
}
