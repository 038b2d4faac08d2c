//! Products in granules: left sides in tiles, a part of the rows and of the reduction at a time.

use std::ops::Range;

use super::Matmul;
use super::addends::{Addends, PanelAddends};
use super::fetch::Pieces;
use super::granules::{self, GranuleFn, GranuleTile};
use super::kernel;
use super::operands::{Out, Right, RightBlock, RowRuns, Rows, panel_columns, steps};
use crate::Result;
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::scratch::{taken_bytes, with_scratch};
use crate::cpu::threads::{Pool, SharedMut};

/// Steps of a block of a product in granules, which keeps the result together: two vectors of columns of it, 32 KiB, stay in the first-level cache.
pub(super) const GRANULE_BLOCK_STEPS: usize = 256;
/// Rows of a left side in tiles at a time, at most: what a block of the reduction has of them, a megabyte, stays in the second-level cache.
const TILED_ROWS_MAX: usize = 1024;
/// Bytes of a left side in tiles at a time, at most.
const TILED_BYTES_MAX: usize = 16 << 20;
/// From so many rows on, a block of the right side is worth laying out for the tiles of a kernel.
pub(super) const LAID_OUT_ROWS_MIN: usize = 64;

impl Matmul<'_> {
    /// Left sides in tiles, a part of the rows and of the reduction at a time.
    pub(super) fn product_of_granules(
        &self,
        run: GranuleFn,
        (left, all): (Rows<'_>, RowRuns<'_>),
        out: &Out,
        block_steps: usize,
        right: &impl Right,
        addends: &Addends<'_>,
    ) -> Result<()> {
        let num_steps = steps(left.width, left.dtype);
        let num_rows = all.len();
        for first in (0..num_rows).step_by(TILED_ROWS_MAX) {
            let rows: Vec<Range<usize>> = all.parts(first..(first + TILED_ROWS_MAX).min(num_rows)).collect();
            let rows = RowRuns::new(&rows);
            let step_bytes = rows.len().next_multiple_of(granules::TILE_ROWS) * 4;
            let steps_max = (TILED_BYTES_MAX / step_bytes / GRANULE_BLOCK_STEPS).max(1) * GRANULE_BLOCK_STEPS;
            for first_step in (0..num_steps).step_by(steps_max) {
                let steps = first_step..(first_step + steps_max).min(num_steps);
                let tiles = TiledLeft::of(self.pool, &left, rows, steps.clone())?;
                let accumulate = out.accumulate || first_step > 0;
                self.over_panels(rows.len(), out.columns, granules::ROWS_MAX, |panel, part| {
                    // SAFETY: tasks own disjoint parts of the result, in bounds by the assertions of the callers.
                    unsafe { panel_of_granules(run, &tiles, part.clone(), out, accumulate, panel, block_steps, right) };
                    if steps.end == num_steps {
                        with_scratch(addends.scratch_bytes(), |mut arena| {
                            let mut added = PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena);
                            // SAFETY: as above.
                            let mut add = |rows| unsafe { added.add(out, rows) };
                            rows.parts(part).for_each(|part| addends.runs(part, &mut add));
                        });
                    }
                });
            }
        }
        Ok(())
    }
}

/// Rows of a left side as kernels of granules read them: `[tiles of rows][granules][16 rows][64 bytes]`, side by side wherever they come from. Rows of a matrix lie a multiple of a large power of two apart, where
/// they would push each other out of the cache. The last granule of a row is filled up with zeros; rows of the last tile that there are none of are unspecified.
struct TiledLeft<'r> {
    buffer: Buffer,
    /// Which rows and steps these are.
    rows: RowRuns<'r>,
    steps: Range<usize>,
}

impl<'r> TiledLeft<'r> {
    const TILE_BYTES: usize = granules::TILE_ROWS * granules::ROW_BYTES;

    fn of(pool: &Pool, left: &Rows<'_>, rows: RowRuns<'r>, steps: Range<usize>) -> Result<Self> {
        let num_tiles = rows.len().div_ceil(granules::TILE_ROWS);
        let stride = tiles_bytes(steps.len());
        let mut buffer = Buffer::recycled(num_tiles * stride)?;
        let bytes = SharedMut::new(&mut buffer[..num_tiles * stride]);
        let tile = |tile: usize| {
            // SAFETY: each task has a tile of its own.
            let tiled = unsafe { bytes.part(tile * stride..(tile + 1) * stride) };
            let places = tile * granules::TILE_ROWS..((tile + 1) * granules::TILE_ROWS).min(rows.len());
            for (place, row) in rows.parts(places).flatten().enumerate() {
                let at = place * granules::ROW_BYTES;
                let source = &left.bytes[row * left.stride..][steps.start * 4..steps.end * 4];
                for (granule, source) in source.chunks(granules::ROW_BYTES).enumerate() {
                    let target = &mut tiled[granule * Self::TILE_BYTES + at..][..granules::ROW_BYTES];
                    if let Ok(source) = <&[u8; granules::ROW_BYTES]>::try_from(source) {
                        target.copy_from_slice(source);
                    } else {
                        target.fill(0);
                        target[..source.len()].copy_from_slice(source);
                    }
                }
            }
        };
        // One tile is not worth waking anyone for.
        if num_tiles == 1 {
            tile(0)
        } else {
            pool.run(num_tiles, &tile)
        }
        Ok(TiledLeft { buffer, rows, steps })
    }

    /// Bytes from one tile of rows to the next.
    fn stride(&self) -> usize {
        tiles_bytes(self.steps.len())
    }
}

/// Bytes of a tile of rows with so many steps.
fn tiles_bytes(steps: usize) -> usize {
    steps.div_ceil(granules::STEPS) * TiledLeft::TILE_BYTES
}

/// Bytes of a left side of `rows` rows of `width` numbers of bf16 in tiles, as many as there are at a time.
pub(super) fn left_bytes(rows: usize, width: usize) -> usize {
    (rows.min(TILED_ROWS_MAX).next_multiple_of(granules::TILE_ROWS) * width.next_multiple_of(granules::INPUTS) * 2)
        .min(TILED_BYTES_MAX)
}

/// Bytes that a panel of `rows` rows takes on its thread: two blocks, and the result on the side.
pub(super) fn panel_scratch_bytes(rows: usize) -> usize {
    (2 * GRANULE_BLOCK_STEPS + rows.min(TILED_ROWS_MAX)) * PANEL * 4
}

/// One panel of a product of granules, for rows `part` of the tiles.
///
/// # Safety
/// The result is in bounds, and nobody else has this part of it.
#[allow(clippy::too_many_arguments)]
unsafe fn panel_of_granules(
    run: GranuleFn,
    left: &TiledLeft<'_>,
    part: Range<usize>,
    out: &Out,
    accumulate: bool,
    panel: usize,
    block_steps: usize,
    right: &impl Right,
) {
    let columns = panel_columns(panel, out.columns);
    let (rows, vectors) = (part.len(), columns.div_ceil(LANES));
    let width = vectors * LANES;
    let is_laid_out = rows >= LAID_OUT_ROWS_MIN;
    // Rows of a result lie as far apart as those of a left side: what is added to several times is kept together meanwhile.
    let side_by_side = left.rows.parts(part.clone()).nth(1).is_none();
    let on_the_side = left.steps.len() > block_steps && is_laid_out || !columns.is_multiple_of(LANES) || !side_by_side;
    let side_words = if on_the_side { rows * width } else { 0 };
    let block_words = block_steps * width;
    with_scratch(2 * taken_bytes::<u32>(block_words) + taken_bytes::<f32>(side_words), |mut arena| {
        let (written, laid_out, side) = (arena.take(block_words), arena.take(block_words), arena.take::<f32>(side_words));
        let result = |row: usize| out.at(row, panel * PANEL);
        let rows_of_result = || left.rows.parts(part.clone()).flatten();
        let first = rows_of_result().next().expect("there are rows");
        let (c, c_row) = if on_the_side { (side.as_mut_ptr(), width) } else { (result(first), out.stride) };
        // SAFETY: the caller vouches for the result; the side has room for all rows, the tiles have them, and blocks have whole granules.
        unsafe {
            for (place, row) in rows_of_result().enumerate() {
                let c: *mut f32 = c.add(place * c_row);
                match (accumulate, on_the_side) {
                    (false, _) => c.write_bytes(0, width),
                    (true, true) => c.copy_from_nonoverlapping(result(row), columns),
                    (true, false) => {}
                }
            }
            for first in left.steps.clone().step_by(block_steps) {
                let steps = first..(first + block_steps).min(left.steps.end);
                let block = right.block(panel, steps.clone(), written);
                // A few rows read the right side once, all its columns as they lie; many rows two vectors of columns at a time, which stay
                // in the first-level cache.
                let at_a_time = if is_laid_out { 2 } else { vectors };
                // What the next block is made of is fetched a few lines at a time, as often as the kernel is called for this one. It fetches itself what it streams.
                let next = steps.end..(steps.end + block_steps).min(left.steps.end);
                let is_fetched = !next.is_empty() && (is_laid_out || !block.is_streamed);
                let mut ahead = if is_fetched { right.pieces(panel, next) } else { Pieces::default() };
                let lines = ahead.lines().div_ceil(rows.div_ceil(granules::ROWS_MAX) * vectors.div_ceil(at_a_time));
                let tiles = part.start / granules::TILE_ROWS * left.stride() + tiles_bytes(first - left.steps.start);
                let tile = GranuleTile {
                    granules: steps.len().div_ceil(granules::STEPS),
                    a: left.buffer.as_ptr().add(tiles),
                    a_row: granules::ROW_BYTES,
                    a_granule: TiledLeft::TILE_BYTES,
                    a_tile: left.stride(),
                    b: block.first,
                    b_step: block.stride,
                    c,
                    c_row,
                    vectors,
                };
                for vector in (0..vectors).step_by(at_a_time) {
                    let vectors = at_a_time.min(vectors - vector);
                    let mut tile = GranuleTile { vectors, c: c.add(vector * LANES), ..tile };
                    if is_laid_out || !steps.len().is_multiple_of(granules::STEPS) {
                        lay_out(&block, steps.len(), vector * LANES..(vector + vectors) * LANES, laid_out);
                        (tile.b, tile.b_step) = (laid_out.as_ptr().cast(), vectors * LANES * 4);
                    }
                    kernel::run_all(run, rows, &tile, || ahead = std::mem::take(&mut ahead).fetch(lines));
                }
            }
            if on_the_side {
                for (place, row) in rows_of_result().enumerate() {
                    result(row).copy_from_nonoverlapping(c.add(place * c_row), columns);
                }
            }
        }
    });
}

/// Copies `columns` of a block of `steps` steps together, and fills up the last granule with zeros.
///
/// # Safety
/// The block has these steps and columns.
unsafe fn lay_out(block: &RightBlock, steps: usize, columns: Range<usize>, out: &mut [u32]) {
    let (steps_of, rest) = out[..steps.next_multiple_of(granules::STEPS) * columns.len()].split_at_mut(steps * columns.len());
    for (step, out) in steps_of.chunks_exact_mut(columns.len()).enumerate() {
        // SAFETY: the caller's promise.
        let source = unsafe {
            std::slice::from_raw_parts(block.first.add(step * block.stride).cast::<u32>().add(columns.start), out.len())
        };
        out.copy_from_slice(source);
    }
    rest.fill(0);
}
