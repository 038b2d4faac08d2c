//! Products of a tile of queries and the pages of a cache, or what lies as they do.

use super::SPLIT_PAGES;
use super::ahead::Ahead;
use crate::cpu::matmul::{Fetch, Tile, TileKernel};
use crate::cpu::packed::{LANES, PANEL};

/// The left side of a product: rows of whole steps, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) rows: usize,
    pub(super) steps: usize,
    pub(super) first: *const u8,
    pub(super) stride: usize,
}

/// One product of a tile: `left` by the first steps of a packed matrix of `b_steps` steps and `columns`, panel by panel. What comes after it is fetched meanwhile.
///
/// # Safety
/// The left side holds its rows, `b` the packed matrix, `c` `rows` rows of `c_stride` elements.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn product(
    kernel: &TileKernel,
    left: Left,
    b: *const u32,
    b_steps: usize,
    columns: usize,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
    ahead: &mut Ahead<'_>,
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
        unsafe { block_in_cuts(kernel, left.rows, &tile, ahead) };
    }
}

/// As [`TileKernel::block`], with what comes after it fetched meanwhile.
///
/// # Safety
/// As there.
pub(super) unsafe fn block_in_cuts(kernel: &TileKernel, rows: usize, tile: &Tile, ahead: &mut Ahead<'_>) {
    let mut first = 0;
    loop {
        let steps = (tile.steps - first).min(ahead.steps);
        ahead.fetch(steps * tile.columns.div_ceil(LANES));
        let (a, b) = (tile.a.wrapping_add(first * 4), tile.b.wrapping_add(first * tile.b_stride));
        // SAFETY: a part of the steps for which the caller vouches.
        unsafe { kernel.block(rows, &Tile { steps, a, b, accumulate: tile.accumulate || first > 0, ..*tile }) };
        first += steps;
        if first == tile.steps {
            break;
        }
    }
}

/// As [`product`] of rows next to each other, by packed matrices, each the right side of `left.steps` steps, one after another.
///
/// # Safety
/// As there, for each of them; the left side has the steps of all.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn product_in_parts(
    kernel: &TileKernel,
    left: Left,
    parts: usize,
    part: &dyn Fn(usize) -> *const u32,
    columns: usize,
    c: *mut f32,
    accumulate: bool,
    ahead: &mut Ahead<'_>,
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
        if ahead.is_nothing() {
            // SAFETY: within the packed matrices and the rows of the result.
            unsafe { kernel.block_in_parts(left.rows, &panels[..parts], &tile) };
            continue;
        }
        for (i, &b) in panels[..parts].iter().enumerate() {
            let (a, accumulate) = (tile.a.wrapping_add(i * tile.steps * 4), accumulate || i > 0);
            // SAFETY: as above; the bits are the same.
            unsafe { block_in_cuts(kernel, left.rows, &Tile { a, b, accumulate, ..tile }, ahead) };
        }
    }
}
