//! Matrix products of the CPU backend: three shapes of them, one way through memory, one order of reduction for each kind of kernel.
//!
//! - [`Matmul::forward`]: `y = x·Wᵀ` on packed weights, streamed once; the same code for one token as for a thousand.
//! - [`Matmul::backward_input`]: `dx = dy·W` on the same packed weights, transposed block by block in cache (`transpose`).
//! - [`Matmul::backward_weight`]: `dW += dyᵀ·x` for low-rank weights, reduced over tokens in order, sequence after sequence.
//!
//! Work is split over threads by outputs: panels of 64 columns, and runs of rows where there are few panels.
//!
//! Kernels, `chains` and `granules`, are one file for each family of instructions; `kernel` chooses.

#[cfg(target_arch = "x86_64")]
mod amx;
mod chains;
#[cfg(target_arch = "x86_64")]
mod chains_avx512;
mod granules;
#[cfg(target_arch = "x86_64")]
mod granules_avx512;
pub(crate) mod int8;
#[cfg(target_arch = "x86_64")]
mod int8_avx512;
mod kernel;
#[cfg(test)]
mod tests;
mod transpose;

use std::ops::Range;
use std::sync::OnceLock;

use granules::{GranuleFn, GranuleTile};
use int8::{BytesKernel, BytesTile};
use kernel::Chains;
pub(crate) use kernel::{Tile, TileKernel};

use super::backend::Target;
use super::isa::{Arithmetic, Fma, Isa, multiversion};
use super::memory::Buffer;
use super::packed::{LANES, PANEL, PackedRef};
use super::scratch::{taken_bytes, with_scratch};
use super::threads::{Pool, SharedMut};
use crate::backend::TOKEN_GRANULE;
use crate::{DType, Element, Error, Result, WeightStorage};

/// Whether the system lets this process use tiles.
#[cfg(target_arch = "x86_64")]
pub(crate) fn tiles_permitted() -> bool {
    amx::permitted()
}

/// Gives up what the kernels of this thread have set up in the processor; the next that needs it sets it up again.
pub(crate) fn release_thread() {
    #[cfg(target_arch = "x86_64")]
    amx::release();
}

/// Steps of the reduction (four bytes each) in a block of a product in chains: 128 KiB of a full panel, which stays in the second-level cache while all rows pass. Each block
/// reads and writes the result once, whose rows lie so far apart that they push each other out.
const CHAIN_BLOCK_STEPS: usize = 512;
/// Steps of a block of a product in granules, which keeps the result together: two vectors of columns of it, 32 KiB, stay in the first-level cache.
const GRANULE_BLOCK_STEPS: usize = 256;
/// Steps of a block that stays in the first-level cache from when it is written until it is read: 16 KiB of a full panel.
const NEAR_BLOCK_STEPS: usize = 64;
/// Rows of a left side in tiles at a time, at most: what a block of the reduction has of them, a megabyte, stays in the second-level cache.
const TILED_ROWS_MAX: usize = 1024;
/// Bytes of a left side in tiles at a time, at most.
const TILED_BYTES_MAX: usize = 16 << 20;
/// From so many rows on, a block of the right side is worth laying out for the tiles of a kernel.
const LAID_OUT_ROWS_MIN: usize = 64;
const _: () = assert!(
    TOKEN_GRANULE.is_multiple_of(granules::INPUTS),
    "a cut between granules of tokens is one between those of a kernel"
);

/// Fewer rows than this are not worth splitting over threads.
const SPLIT_ROWS_MIN: usize = 24;
/// Columns of a matrix of tokens that are laid out at a time for a reduction over tokens, at most.
const TOKEN_PANELS_WIDTH: usize = 16 * PANEL;
/// Tokens that are laid out at a time, the filling of granules among them: memory does not grow with the number of short sequences.
const TOKEN_PANELS_TOKENS: usize = 16 * TOKEN_GRANULE;

/// A block of a row-major matrix of `dtype`, to be read.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    rows: usize,
    width: usize,
    /// Bytes from one row to the next.
    stride: usize,
    dtype: DType,
}

impl<'a> Rows<'a> {
    /// Rows `rows` and columns `columns` of a matrix with `matrix_columns` columns.
    pub(crate) fn new<T: Element>(matrix: &'a [T], matrix_columns: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        let size = size_of::<T>();
        // SAFETY: plain numbers are readable as bytes.
        let bytes = unsafe { std::slice::from_raw_parts(matrix.as_ptr().cast::<u8>(), std::mem::size_of_val(matrix)) };
        assert!(columns.end <= matrix_columns && rows.end * matrix_columns <= matrix.len());
        let start = (rows.start * matrix_columns + columns.start) * size;
        let bytes = if rows.is_empty() { &[] } else { &bytes[start..((rows.end - 1) * matrix_columns + columns.end) * size] };
        Rows { bytes, rows: rows.len(), width: columns.len(), stride: matrix_columns * size, dtype: T::DTYPE }
    }

    fn row<T: Element>(&self, row: usize) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        let bytes = &self.bytes[row * self.stride..][..self.width * size_of::<T>()];
        // SAFETY: made of whole, aligned elements of `T` in `new`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.width) }
    }

    /// The rows, each followed by a zero where the width is not a whole number of steps.
    fn whole_steps(self, padded: &'a mut Vec<u8>) -> Rows<'a> {
        let size = self.width * self.dtype.size_bytes();
        if size.is_multiple_of(4) {
            return self;
        }
        padded.clear();
        for row in 0..self.rows {
            padded.extend_from_slice(&self.bytes[row * self.stride..][..size]);
            padded.resize(padded.len().next_multiple_of(4), 0);
        }
        Rows { bytes: padded, width: self.width + 1, stride: size.next_multiple_of(4), ..self }
    }
}

/// A block of a row-major f32 matrix, to be written.
pub(crate) struct Out {
    values: SharedMut<f32>,
    start: usize,
    stride: usize,
    rows: usize,
    columns: usize,
    accumulate: bool,
}

impl Out {
    /// `rows` by `columns` from `(first_row, first_column)` on of a matrix with `matrix_columns` columns.
    pub(crate) fn new(matrix: &mut [f32], matrix_columns: usize, target: &Target, rows: usize, columns: usize) -> Self {
        assert!(target.first_column + columns <= matrix_columns && (target.first_row + rows) * matrix_columns <= matrix.len());
        let start = target.first_row * matrix_columns + target.first_column;
        Out { values: SharedMut::new(matrix), start, stride: matrix_columns, rows, columns, accumulate: target.accumulate }
    }

    /// Some of its columns.
    fn columns(&self, columns: Range<usize>) -> Out {
        assert!(columns.end <= self.columns);
        Out { start: self.start + columns.start, columns: columns.len(), ..*self }
    }

    /// Element `(row, column)`.
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        debug_assert!(row < self.rows && column < self.columns);
        self.values.as_ptr().wrapping_add(self.start + row * self.stride + column)
    }
}

/// Steps of a reduction over `len` elements.
fn steps(len: usize, dtype: DType) -> usize {
    (len * dtype.size_bytes()).div_ceil(4)
}

/// Columns `64 * panel ..` of a matrix of `columns`.
fn panel_columns(panel: usize, columns: usize) -> usize {
    (columns - panel * PANEL).min(PANEL)
}

/// A block of the right side of a product: where its steps lie, a panel of columns each, and bytes from one to the next.
struct RightBlock {
    first: *const u8,
    stride: usize,
}

impl RightBlock {
    /// A block that was written to scratch, `width` words a step.
    fn written(scratch: &[u32], width: usize) -> Self {
        RightBlock { first: scratch.as_ptr().cast(), stride: width * 4 }
    }
}

/// Gives the block of a panel of the right side for some steps of the reduction. What does not lie in memory as it should is written to
/// the scratch, which holds a block.
trait Right: Fn(usize, Range<usize>, &mut [u32]) -> RightBlock + Sync {}
impl<F: Fn(usize, Range<usize>, &mut [u32]) -> RightBlock + Sync> Right for F {}

/// The matrix products of one arithmetic on one pool of threads.
pub(crate) struct Matmul<'a> {
    pool: &'a Pool,
    isa: Isa,
    kernel: TileKernel,
    dtype: DType,
}

impl<'a> Matmul<'a> {
    pub(crate) fn new(pool: &'a Pool, arithmetic: Arithmetic, dtype: DType) -> Self {
        Matmul { pool, isa: arithmetic.isa, kernel: TileKernel::new(arithmetic, dtype), dtype }
    }

    /// Steps of a block of the right side, if many rows read it.
    fn block_steps(&self) -> usize {
        match self.kernel {
            TileKernel::Chains(_) => CHAIN_BLOCK_STEPS,
            TileKernel::Granules(_) => GRANULE_BLOCK_STEPS,
        }
    }

    /// `y = x·Wᵀ`.
    ///
    /// # Errors
    /// Of this and the other products: if there is no memory to work in.
    pub(crate) fn forward(&self, x: Rows<'_>, w: PackedRef<'_>, y: Out) -> Result<()> {
        assert!(x.width == w.in_features && x.dtype == self.dtype && w.dtype == self.dtype);
        assert!(y.rows == x.rows && y.columns == w.out_features);
        let num_steps = steps(w.in_features, self.dtype);
        let mut padded = Vec::new();
        let x = x.whole_steps(&mut padded);
        let width = |panel| panel_columns(panel, w.out_features).next_multiple_of(LANES);
        match w.storage {
            WeightStorage::Dense => self.product(x, y, self.block_steps(), |panel, steps, _| {
                let stride = width(panel) * 4;
                let panel = &w.bytes[panel * PANEL * num_steps * 4..][..num_steps * stride];
                RightBlock { first: panel[steps.start * stride..steps.end * stride].as_ptr(), stride }
            }),
            WeightStorage::Int8 => {
                if let TileKernel::Chains(Chains { of_bytes: Some(kernel), .. }) = self.kernel
                    && x.rows <= kernel.rows_max
                {
                    self.product_of_bytes(&kernel, x, &w, &y);
                    return Ok(());
                }
                // What a few rows are multiplied with is read once: it should not leave the first-level cache.
                let block_steps = if x.rows < LAID_OUT_ROWS_MIN { NEAR_BLOCK_STEPS } else { self.block_steps() };
                self.product(x, y, block_steps, |panel, steps, scratch| {
                    let width = width(panel);
                    unpack_int8(self.isa, &w, panel, width, steps, scratch);
                    RightBlock::written(scratch, width)
                })
            }
        }
    }

    /// `dx = dy·W`.
    pub(crate) fn backward_input(&self, dy: Rows<'_>, w: PackedRef<'_>, dx: Out) -> Result<()> {
        assert!(dy.width == w.out_features && dy.dtype == self.dtype && w.dtype == self.dtype);
        assert!(dx.rows == dy.rows && dx.columns == w.in_features);
        let mut padded = Vec::new();
        self.product(dy.whole_steps(&mut padded), dx, self.block_steps(), |panel, steps, scratch| {
            let columns = panel_columns(panel, w.in_features);
            transpose::block(self.isa, w, panel * PANEL..panel * PANEL + columns, steps, scratch);
            RightBlock::written(scratch, columns.next_multiple_of(LANES))
        })
    }

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
        for tokens in in_granules(sequences).chunks(TOKEN_PANELS_TOKENS) {
            let lows: Vec<Vec<T>> = pairs.iter().map(|(low, _)| transposed(low, tokens)).collect();
            for first in (0..x.width).step_by(TOKEN_PANELS_WIDTH) {
                let columns = first..(first + TOKEN_PANELS_WIDTH).min(x.width);
                let panels = TokenPanels::of::<T>(self.pool, self.isa, &x, columns.clone(), tokens)?;
                for ((low, dw), low_columns) in pairs.iter().zip(&lows) {
                    assert!(low.rows == x.rows && dw.rows == low.width && dw.columns == x.width && dw.accumulate);
                    let low_columns = Rows::new(low_columns, tokens.len(), 0..low.width, 0..tokens.len());
                    let dw = dw.columns(columns.clone());
                    self.product(low_columns, dw, self.block_steps(), |panel, steps, _| panels.block(panel, steps))?;
                }
            }
        }
        Ok(())
    }

    /// `out` = or += `left·right`, for rows of whole steps, and blocks of the right side of `block_steps` steps.
    fn product(&self, left: Rows<'_>, out: Out, block_steps: usize, right: impl Right) -> Result<()> {
        match self.kernel {
            TileKernel::Chains(chains) => {
                self.product_of_chains(&chains, left, &out, block_steps, &right);
                Ok(())
            }
            TileKernel::Granules(run) => self.product_of_granules(run, left, &out, block_steps, &right),
        }
    }

    /// Left sides as they lie.
    fn product_of_chains(&self, chains: &Chains, left: Rows<'_>, out: &Out, block_steps: usize, right: &impl Right) {
        let num_steps = steps(left.width, left.dtype);
        self.over_panels(left.rows, out.columns, 1, |panel, rows| {
            let columns = panel_columns(panel, out.columns);
            let words = block_steps * columns.next_multiple_of(LANES);
            with_scratch(taken_bytes::<u32>(words), |mut arena| {
                let scratch = arena.take(words);
                for first in (0..num_steps).step_by(block_steps) {
                    let steps = first..(first + block_steps).min(num_steps);
                    let block = right(panel, steps.clone(), scratch);
                    // SAFETY: rows and columns are in bounds by the assertions of the callers; tasks own disjoint parts of the result.
                    unsafe {
                        let tile = Tile {
                            steps: steps.len(),
                            a: left.bytes.as_ptr().add(rows.start * left.stride + first * 4),
                            a_stride: left.stride,
                            b: block.first,
                            b_stride: block.stride,
                            c: out.at(rows.start, panel * PANEL),
                            c_stride: out.stride,
                            columns,
                            accumulate: out.accumulate || first > 0,
                        };
                        chains.block(rows.len(), &tile);
                    }
                }
            });
        });
    }

    /// A few rows with weights in bytes.
    fn product_of_bytes(&self, kernel: &BytesKernel, x: Rows<'_>, w: &PackedRef<'_>, y: &Out) {
        self.over_panels(x.rows, y.columns, kernel.rows_max, |panel, rows| {
            let columns = panel_columns(panel, y.columns);
            let width = columns.next_multiple_of(LANES);
            let bytes = &w.bytes[panel * int8::panel_bytes(w.in_features, PANEL)..][..int8::panel_bytes(w.in_features, width)];
            // SAFETY: rows and columns are in bounds by the assertions of the caller; tasks own disjoint parts of the result.
            unsafe {
                let tile = BytesTile {
                    steps: steps(w.in_features, w.dtype),
                    a: x.bytes.as_ptr().add(rows.start * x.stride),
                    a_stride: x.stride,
                    b: bytes.as_ptr(),
                    width,
                    c: y.at(rows.start, panel * PANEL),
                    c_stride: y.stride,
                    columns,
                    accumulate: y.accumulate,
                };
                (kernel.run)(rows.len(), &tile);
            }
        });
    }

    /// Left sides in tiles, a part of the rows and of the reduction at a time.
    fn product_of_granules(
        &self,
        run: GranuleFn,
        left: Rows<'_>,
        out: &Out,
        block_steps: usize,
        right: &impl Right,
    ) -> Result<()> {
        let num_steps = steps(left.width, left.dtype);
        for first_row in (0..left.rows).step_by(TILED_ROWS_MAX) {
            let rows = first_row..(first_row + TILED_ROWS_MAX).min(left.rows);
            let step_bytes = rows.len().next_multiple_of(granules::TILE_ROWS) * 4;
            let steps_max = (TILED_BYTES_MAX / step_bytes / GRANULE_BLOCK_STEPS).max(1) * GRANULE_BLOCK_STEPS;
            for first_step in (0..num_steps).step_by(steps_max) {
                let steps = first_step..(first_step + steps_max).min(num_steps);
                let tiles = TiledLeft::of(self.pool, &left, rows.clone(), steps)?;
                let accumulate = out.accumulate || first_step > 0;
                self.over_panels(rows.len(), out.columns, granules::ROWS_MAX, |panel, part| {
                    // SAFETY: tasks own disjoint parts of the result, in bounds by the assertions of the callers.
                    unsafe { panel_of_granules(run, &tiles, part, out, accumulate, panel, block_steps, right) };
                });
            }
        }
        Ok(())
    }

    /// Runs `body(panel, rows)` over all panels of `columns`, and runs of whole `tile_rows` rows if there are too few panels to share.
    fn over_panels(&self, rows: usize, columns: usize, tile_rows: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        if rows == 0 {
            return;
        }
        let panels = columns.div_ceil(PANEL);
        let threads = self.pool.num_threads();
        let wanted = if panels >= 4 * threads { 1 } else { (4 * threads).div_ceil(panels) };
        let runs = wanted.min(rows.div_ceil(SPLIT_ROWS_MIN)).max(1);
        let run_rows = rows.div_ceil(runs).next_multiple_of(tile_rows);
        self.pool.run(panels * runs, &|task| {
            let (panel, run) = (task / runs, task % runs);
            let range = (run * run_rows).min(rows)..((run + 1) * run_rows).min(rows);
            if !range.is_empty() {
                body(panel, range);
            }
        });
    }
}

/// Rows of a left side as kernels of granules read them: `[tiles of rows][granules][16 rows][64 bytes]`. Rows of a matrix lie a multiple of a large power of two apart, where
/// they would push each other out of the cache. The last granule of a row is filled up with zeros; rows of the last tile that there are none of are unspecified.
struct TiledLeft {
    buffer: Buffer,
    /// Which rows and steps these are.
    rows: Range<usize>,
    steps: Range<usize>,
}

impl TiledLeft {
    const TILE_BYTES: usize = granules::TILE_ROWS * granules::ROW_BYTES;

    fn of(pool: &Pool, left: &Rows<'_>, rows: Range<usize>, steps: Range<usize>) -> Result<Self> {
        let num_tiles = rows.len().div_ceil(granules::TILE_ROWS);
        let stride = tiles_bytes(steps.len());
        let mut buffer = Buffer::recycled(num_tiles * stride)?;
        let bytes = SharedMut::new(&mut buffer[..num_tiles * stride]);
        let tile = |tile: usize| {
            // SAFETY: each task has a tile of its own.
            let tiled = unsafe { bytes.part(tile * stride..(tile + 1) * stride) };
            let first = rows.start + tile * granules::TILE_ROWS;
            for row in first..(first + granules::TILE_ROWS).min(rows.end) {
                let at = (row - first) * granules::ROW_BYTES;
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

/// Bytes that products take beside their operands, of which the left side has `rows` rows of `width` numbers.
pub(crate) fn scratch_bytes(kernel: &TileKernel, rows: usize, width: usize, dtype: DType) -> usize {
    let left = match kernel {
        TileKernel::Chains(_) => 0,
        TileKernel::Granules(_) => tiled_left_bytes(rows, width),
    };
    left.max(token_panels_bytes(width, dtype))
}

/// Bytes of a left side of `rows` rows of `width` numbers of bf16 in tiles, as many as there are at a time.
fn tiled_left_bytes(rows: usize, width: usize) -> usize {
    (rows.min(TILED_ROWS_MAX).next_multiple_of(granules::TILE_ROWS) * width.next_multiple_of(granules::INPUTS) * 2)
        .min(TILED_BYTES_MAX)
}

/// Tokens in the order of a reduction over them: each sequence begins a granule and fills up its last.
fn in_granules(sequences: &[Range<usize>]) -> Vec<Option<usize>> {
    let filled = |s: &Range<usize>| {
        let missing = s.len().next_multiple_of(TOKEN_GRANULE) - s.len();
        s.clone().map(Some).chain(std::iter::repeat_n(None, missing))
    };
    sequences.iter().flat_map(filled).collect()
}

/// `[width, tokens]`, with zeros where there is no token.
fn transposed<T: Element>(rows: &Rows<'_>, tokens: &[Option<usize>]) -> Vec<T> {
    let mut columns = vec![T::from_f32(0.0); rows.width * tokens.len()];
    for (at, token) in tokens.iter().enumerate() {
        let Some(token) = token else { continue };
        for (r, &value) in rows.row::<T>(*token).iter().enumerate() {
            columns[r * tokens.len() + at] = value;
        }
    }
    columns
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
                for (line, tokens) in lines.chunks_exact_mut(width).zip(tokens.chunks_exact(per_step)) {
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

    fn block(&self, panel: usize, steps: Range<usize>) -> RightBlock {
        let stride = panel_columns(panel, self.num_columns).next_multiple_of(LANES) * 4;
        let panel = &self.buffer[panel * PANEL * self.num_steps * 4..][..self.num_steps * stride];
        RightBlock { first: panel[steps.start * stride..steps.end * stride].as_ptr(), stride }
    }
}

/// Bytes that a reduction over tokens takes to lay out what is `width` numbers wide.
fn token_panels_bytes(width: usize, dtype: DType) -> usize {
    TOKEN_PANELS_TOKENS * width.min(TOKEN_PANELS_WIDTH).next_multiple_of(LANES) * dtype.size_bytes()
}

/// One panel of a product of granules, for rows `part` of the tiles.
///
/// # Safety
/// The result is in bounds, and nobody else has this part of it.
#[allow(clippy::too_many_arguments)]
unsafe fn panel_of_granules(
    run: GranuleFn,
    left: &TiledLeft,
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
    let on_the_side = left.steps.len() > block_steps && is_laid_out || !columns.is_multiple_of(LANES);
    let side_words = if on_the_side { rows * width } else { 0 };
    let block_words = block_steps * width;
    with_scratch(2 * taken_bytes::<u32>(block_words) + taken_bytes::<f32>(side_words), |mut arena| {
        let (written, laid_out, side) = (arena.take(block_words), arena.take(block_words), arena.take::<f32>(side_words));
        let result = |row: usize| out.at(left.rows.start + part.start + row, panel * PANEL);
        let (c, c_row) = if on_the_side { (side.as_mut_ptr(), width) } else { (result(0), out.stride) };
        // SAFETY: the caller vouches for the result; the side has room for all rows, the tiles have them, and blocks have whole granules.
        unsafe {
            for row in 0..rows {
                let c: *mut f32 = c.add(row * c_row);
                match (accumulate, on_the_side) {
                    (false, _) => c.write_bytes(0, width),
                    (true, true) => c.copy_from_nonoverlapping(result(row), columns),
                    (true, false) => {}
                }
            }
            for first in left.steps.clone().step_by(block_steps) {
                let steps = first..(first + block_steps).min(left.steps.end);
                let block = right(panel, steps.clone(), written);
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
                // A few rows read the right side once, all its columns as they lie; many rows two vectors of columns at a time, which stay
                // in the first-level cache.
                let at_a_time = if is_laid_out { 2 } else { vectors };
                for vector in (0..vectors).step_by(at_a_time) {
                    let vectors = at_a_time.min(vectors - vector);
                    let mut tile = GranuleTile { vectors, c: c.add(vector * LANES), ..tile };
                    if is_laid_out || !steps.len().is_multiple_of(granules::STEPS) {
                        lay_out(&block, steps.len(), vector * LANES..(vector + vectors) * LANES, laid_out);
                        (tile.b, tile.b_step) = (laid_out.as_ptr().cast(), vectors * LANES * 4);
                    }
                    kernel::run_all(run, rows, &tile);
                }
            }
            if on_the_side {
                (0..rows).for_each(|row| result(row).copy_from_nonoverlapping(c.add(row * c_row), columns));
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

/// One step of the reduction: an f32, or a pair of bf16 whose second may be missing.
#[inline(always)]
fn step_word<T: Element>(first: T, second: Option<T>) -> u32 {
    match T::DTYPE {
        DType::F32 => first.to_f32().to_bits(),
        // Widening and cutting again is exact.
        DType::BF16 => first.to_f32().to_bits() >> 16 | second.map_or(0, |s| s.to_f32().to_bits()),
    }
}

multiversion! {
    /// Interleaves one or two rows into a row of steps; with f32 the second is ignored.
    pub(crate) fn pack_step<T: Element>(first: &[T], second: Option<&[T]>, out: &mut [u32]) = pack_step_body;
}

#[inline(always)]
fn pack_step_body<T: Element>(_fma: impl Fma, first: &[T], second: Option<&[T]>, out: &mut [u32]) {
    let Some(second) = second else {
        return out.iter_mut().zip(first).for_each(|(o, &a)| *o = step_word(a, None));
    };
    // Whole vectors, so that all loads of a row are under way at once: rows lie far apart, and waiting for them is what takes the time.
    let (vectors, rest) = out.as_chunks_mut::<LANES>();
    let (first_vectors, first_rest) = first.as_chunks::<LANES>();
    let (second_vectors, second_rest) = second.as_chunks::<LANES>();
    for (out, (first, second)) in vectors.iter_mut().zip(first_vectors.iter().zip(second_vectors)) {
        for l in 0..LANES {
            out[l] = step_word(first[l], Some(second[l]));
        }
    }
    rest.iter_mut().zip(first_rest.iter().zip(second_rest)).for_each(|(o, (&a, &b))| *o = step_word(a, Some(b)));
}

/// Unpacks steps of a panel of weights that are stored in bytes.
fn unpack_int8(isa: Isa, w: &PackedRef<'_>, panel: usize, width: usize, steps: Range<usize>, words: &mut [u32]) {
    let panel = &w.bytes[panel * int8::panel_bytes(w.in_features, PANEL)..];
    match w.dtype {
        DType::F32 => int8::unpack::<f32>(isa, panel, width, steps, words),
        DType::BF16 => int8::unpack::<half::bf16>(isa, panel, width, steps, words),
    }
}

/// Writes `rows: [n, in_features]` as outputs `first_output..` of packed weights.
///
/// # Errors
/// If a weight cannot be stored as these are.
pub(crate) fn pack_rows<T: Element>(
    pool: &Pool,
    isa: Isa,
    rows: &[T],
    first_output: usize,
    w: &mut super::packed::PackedMut<'_>,
) -> Result<()> {
    if w.storage == WeightStorage::Int8 {
        return quantize_rows(pool, isa, rows, first_output, w);
    }
    let k = w.in_features;
    let num_steps = steps(k, w.dtype);
    let (n, out_features) = (rows.len() / k, w.out_features);
    let per_step = 4 / w.dtype.size_bytes();
    // SAFETY: buffers are aligned to pages and panels to whole steps; every 4 bytes are a word.
    let words =
        SharedMut::new(unsafe { std::slice::from_raw_parts_mut(w.bytes.as_mut_ptr().cast::<u32>(), w.bytes.len() / 4) });
    let panels = first_output / PANEL..(first_output + n).div_ceil(PANEL);
    pool.run(panels.len(), &|task| {
        let panel = panels.start + task;
        let width = panel_columns(panel, out_features).next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        // SAFETY: each task has a panel to itself.
        let panel_words = unsafe { words.part(start..start + num_steps * width) };
        let outputs = (panel * PANEL).max(first_output)..(panel * PANEL + PANEL).min(first_output + n);
        // Sixteen outputs at a time fill whole cache lines of the panel.
        for group in outputs.clone().step_by(LANES) {
            let group = group..(group + LANES).min(outputs.end);
            for s in 0..num_steps {
                let line = &mut panel_words[s * width..(s + 1) * width];
                for output in group.clone() {
                    let row = &rows[(output - first_output) * k..][..k];
                    line[output - panel * PANEL] = step_word(row[s * per_step], row.get(s * per_step + 1).copied());
                }
            }
        }
    });
    Ok(())
}

/// As [`pack_rows`], for weights that are stored in bytes.
fn quantize_rows<T: Element>(
    pool: &Pool,
    isa: Isa,
    rows: &[T],
    first_output: usize,
    w: &mut super::packed::PackedMut<'_>,
) -> Result<()> {
    let (k, n, out_features) = (w.in_features, rows.len() / w.in_features, w.out_features);
    let panel_bytes = |width: usize| int8::panel_bytes(k, width);
    let bytes = SharedMut::new(w.bytes);
    let panels = first_output / PANEL..(first_output + n).div_ceil(PANEL);
    let refused = OnceLock::new();
    pool.run(panels.len(), &|task| {
        let panel = panels.start + task;
        let width = panel_columns(panel, out_features).next_multiple_of(LANES);
        let start = panel * panel_bytes(PANEL);
        // SAFETY: each task has a panel to itself.
        let panel_bytes = unsafe { bytes.part(start..start + panel_bytes(width)) };
        for output in (panel * PANEL).max(first_output)..(panel * PANEL + PANEL).min(first_output + n) {
            let row = &rows[(output - first_output) * k..][..k];
            if let Err(weight) = int8::quantize(isa, row, panel_bytes, width, output % PANEL) {
                refused.get_or_init(|| (output, weight));
            }
        }
    });
    match refused.get() {
        None => Ok(()),
        Some((output, weight)) => Err(Error::Unsupported(format!(
            "output {output} has a weight of {weight:e}, and bytes with a scale hold finite numbers up to {:e}",
            int8::LARGEST
        ))),
    }
}

/// Writes `columns: [in_features, out_features]` as packed weights.
pub(crate) fn pack_columns<T: Element>(pool: &Pool, isa: Isa, columns: &[T], w: &mut super::packed::PackedMut<'_>) {
    let (k, n) = (w.in_features, w.out_features);
    let num_steps = steps(k, w.dtype);
    let per_step = 4 / w.dtype.size_bytes();
    // SAFETY: as in `pack_rows`.
    let words =
        SharedMut::new(unsafe { std::slice::from_raw_parts_mut(w.bytes.as_mut_ptr().cast::<u32>(), w.bytes.len() / 4) });
    pool.run(n.div_ceil(PANEL), &|panel| {
        let columns_here = panel_columns(panel, n);
        let width = columns_here.next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        // SAFETY: each task has a panel to itself.
        let panel_words = unsafe { words.part(start..start + num_steps * width) };
        for (s, line) in panel_words.chunks_exact_mut(width).enumerate() {
            let row = |i: usize| &columns[i * n + panel * PANEL..][..columns_here];
            let first = s * per_step;
            pack_step(isa, row(first), (per_step == 2 && first + 1 < k).then(|| row(first + 1)), &mut line[..columns_here]);
        }
    });
}

/// Reads row `output` (one token's embedding, where embedding and unembedding are one matrix) back out of packed weights.
pub(crate) fn unpack_row<T: Element>(w: PackedRef<'_>, output: usize, out: &mut [f32]) {
    let num_steps = steps(w.in_features, w.dtype);
    let panel = output / PANEL;
    let width = panel_columns(panel, w.out_features).next_multiple_of(LANES);
    if w.storage == WeightStorage::Int8 {
        let panel = &w.bytes[panel * int8::panel_bytes(w.in_features, PANEL)..];
        return out.iter_mut().enumerate().for_each(|(i, out)| *out = int8::weight::<T>(panel, width, output % PANEL, i));
    }
    let start = (panel * PANEL * num_steps + output % PANEL) * 4;
    for (s, values) in out.chunks_mut(4 / T::DTYPE.size_bytes()).enumerate() {
        let at = start + s * width * 4;
        let word = u32::from_le_bytes(w.bytes[at..at + 4].try_into().expect("a word is four bytes"));
        match T::DTYPE {
            DType::F32 => values[0] = f32::from_bits(word),
            DType::BF16 => {
                values[0] = f32::from_bits(word << 16);
                if let Some(second) = values.get_mut(1) {
                    *second = f32::from_bits(word & 0xffff_0000);
                }
            }
        }
    }
}
