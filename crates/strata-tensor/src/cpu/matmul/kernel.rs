//! The innermost product: a tile of a few rows by up to 64 columns, held in registers while the reduction streams by.
//!
//! A *step* of the reduction is four bytes of the left side: two bf16 or one f32. There are two orders of adding steps: chains (`chains`), and for bf16
//! granules of sixteen steps, as matrix units have it (`granules`). Either way the bits of an element do not depend on the size of the tile it was computed in, nor on where a
//! long reduction was cut, if it was cut between granules.

use std::ops::Range;

use super::chains;
#[cfg(target_arch = "x86_64")]
use super::chains_avx512 as avx512;
use super::fetch::{CHUNK_STEPS, FETCHING_TILES_MAX, Fetch, Fetching, Lines, Own, chunks_of_tile, next_of_tile};
use super::granules::{self, GranuleFn, GranuleTile, ROW_BYTES};
use super::int8::BytesKernel;
#[cfg(target_arch = "x86_64")]
use super::widened_avx512 as widened;
#[cfg(target_arch = "x86_64")]
use super::{int4_avx512, int8_avx512, unpacked_avx512 as unpacked};
use crate::DType;
use crate::cpu::isa::{Arithmetic, Isa, Numerics};
use crate::cpu::packed::{LANES, PANEL};

/// Columns of a full tile, in vectors of [`LANES`].
pub(crate) const VECTORS_MAX: usize = 4;

/// Operands of one tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Steps of the reduction.
    pub steps: usize,
    /// First row of the left side: `steps` steps each.
    pub a: *const u8,
    /// Bytes from one row of the left side to the next.
    pub a_stride: usize,
    /// Right side: `steps` rows, from each of which `vectors * LANES` steps can be read.
    pub b: *const u8,
    /// Bytes from one step of the right side to the next.
    pub b_stride: usize,
    /// Result.
    pub c: *mut f32,
    /// Elements from one row of the result to the next.
    pub c_stride: usize,
    /// Columns of the result that exist; the last vector may be cut.
    pub columns: usize,
    /// Whether to begin from the result's present values instead of zero.
    pub accumulate: bool,
    pub fetch: Fetch,
}

/// Computes a tile of `rows` by `vectors * LANES` in chains.
type ChainFn = unsafe fn(rows: usize, vectors: usize, tile: &Tile);

/// Computes any number of rows of a whole panel, in tiles one below another: `tile` is the first, and what it fetches, chunks or nothing, is for all of them. What lies between one tile and the next
/// would be a few percent of a short one.
type ColumnFn = unsafe fn(rows: usize, tile: &Tile);

/// As [`ColumnFn`], with pairs of bf16 that were widened to f32 and lie at `tile.b`, [`WIDE_LINES`] lines for each step. If they are not there yet, the first tile writes them, which reads pairs at `narrow`.
pub(super) type WideFn = unsafe fn(rows: usize, narrow: Option<*const u8>, tile: &Tile);

/// As [`WideFn`] of what is widened already, with the panel behind it too, whose right side, widened, is `second`. The numbers of `kept` are for the left side of a tile, once it is widened: see
/// [`PanelPairs`].
pub(super) type WidePairFn = unsafe fn(rows: usize, tile: &Tile, second: *const f32, kept: &mut [f32]);

/// What computes two panels next to each other, with right sides that were widened, by a left side that is widened once for both.
#[derive(Clone, Copy)]
pub(super) struct PanelPairs {
    pub run: WidePairFn,
    /// Numbers of the left side of a tile of so many steps.
    pub kept_len: fn(steps: usize) -> usize,
}

/// Lines of a step whose pairs were widened: of the first numbers, and of the second.
pub(super) const WIDE_LINES: usize = 2;

/// Numbers of a whole panel of so many steps that is widened.
pub(crate) const fn widened_len(steps: usize) -> usize {
    WIDE_LINES * PANEL * steps
}

/// Tiles that read a right side from which on it is widened for them: they also have all that comes next to fetch, a line each for each step.
const WIDE_TILES_MIN: usize = 6;

/// Tiles from which on two panels are computed together: they read both right sides, which take twice the room.
const PAIR_TILES_MIN: usize = 16;

/// Computes a tile of whole panels whose right side lies in parts, of `tile.steps` steps each: one reduction through all of them.
type PartsFn = unsafe fn(rows: usize, parts: &[*const u8], tile: &Tile);

/// Computes a tile of whole panels next to each other, `panel_bytes` from the right side of one to that of the next.
type PanelsFn = unsafe fn(rows: usize, panels: usize, panel_bytes: usize, tile: &Tile);

/// Tiles of one row that are computed at the same time.
pub(crate) const SINGLE_ROWS: usize = 4;
/// How far each of them fetches ahead of itself, in its right side.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // For its kernels.
pub(super) const SINGLE_AHEAD_BYTES: usize = 4096;

/// Computes tiles of one row by `vectors * LANES`, of which each may have fewer columns, of the same number of steps each, begun from zero: where one row waits for its last sum, others go on.
type SingleRowsFn = unsafe fn(vectors: usize, tiles: &[Tile; SINGLE_ROWS]);

/// A product of one row, added to whole panels of a result.
#[derive(Clone, Copy)]
pub(crate) struct SingleAddend<'a> {
    /// Of the result.
    pub row: usize,
    /// `steps` steps.
    pub left: &'a [u8],
    /// Whole panels of `steps` steps.
    pub right: &'a [u8],
    pub steps: usize,
    /// Panel of the result to which the first is added.
    pub first_panel: usize,
}

impl<'a> SingleAddend<'a> {
    /// What is added to a panel of the result.
    #[inline(always)]
    pub(super) fn panel_bytes(&self, panel: usize) -> &'a [u8] {
        let bytes = self.steps * PANEL * 4;
        &self.right[(panel - self.first_panel) * bytes..][..bytes]
    }
}

/// Adds to some rows of a panel of a result, `c` its first row. Chains begin with what is there.
type SingleAddendsFn = unsafe fn(panel: usize, addends: &[SingleAddend<'_>], c: *mut f32, c_stride: usize);

/// Tiles of a few rows by several panels: more streams from memory at the same time than a processor follows in one panel.
#[derive(Clone, Copy)]
pub(crate) struct ManyPanels {
    pub run: PanelsFn,
    /// How many panels at once for 1, 2, ... rows; powers of two.
    pub panels: &'static [usize],
    /// Rows with a panel of their own each.
    pub single_rows: SingleRowsFn,
    pub single_addends: SingleAddendsFn,
}

/// Chains of an instruction set and dtype.
#[derive(Clone, Copy)]
pub(crate) struct Chains {
    run: ChainFn,
    /// Most rows of a tile for each number of vectors, less one.
    rows_max: [usize; VECTORS_MAX],
    /// The same chains for more rows than a tile has.
    column: Option<ColumnFn>,
    /// The same chains through right sides in parts.
    parts: Option<PartsFn>,
    /// The same chains with a right side that is widened once.
    wide: Option<WideFn>,
    /// The same for two panels.
    pairs: Option<PanelPairs>,
    pub(super) fetching: Fetching,
    /// The same chains for a few rows with weights that come from memory.
    pub many_panels: Option<ManyPanels>,
    /// The same chains with weights in bytes, for a few rows.
    pub of_bytes: Option<BytesKernel>,
    /// The same chains with weights of four bits, for a few rows.
    pub of_int4: Option<BytesKernel>,
}

/// The kernel of an instruction set, numerics and dtype.
#[derive(Clone, Copy)]
pub(crate) enum TileKernel {
    /// Adds step after step.
    Chains(Chains),
    /// Adds granule after granule; whole granules and whole vectors of columns.
    Granules(GranuleFn),
}

impl TileKernel {
    /// f32 always adds in chains. bf16 adds in granules if that was asked for, or if a matrix unit does; else in the chains that are fastest.
    pub(crate) fn new(arithmetic: Arithmetic, dtype: DType) -> Self {
        let Arithmetic { isa, numerics } = arithmetic;
        if dtype == DType::BF16 && (numerics == Numerics::Portable || isa == Isa::Amx) {
            return TileKernel::Granules(granules::kernel(isa));
        }
        TileKernel::Chains(match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, DType::BF16) => Chains {
                rows_max: avx512::ROWS_MAX,
                column: Some(avx512::native::run_column),
                parts: Some(avx512::native::run_parts),
                fetching: Fetching::of_pairs(),
                many_panels: Some(avx512::native::MANY_PANELS),
                of_bytes: Some(unpacked::native::kernel::<int8_avx512::Pairs>()),
                of_int4: Some(unpacked::native::kernel::<int4_avx512::Pairs>()),
                ..Chains::plain(avx512::native::run)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, DType::F32) => Chains {
                rows_max: avx512::ROWS_MAX,
                column: Some(avx512::single::run_column),
                parts: Some(avx512::single::run_parts),
                fetching: Fetching::of_pairs(),
                many_panels: Some(avx512::single::MANY_PANELS),
                ..Chains::plain(avx512::single::run)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, DType::BF16) => Chains {
                rows_max: avx512::ROWS_MAX,
                column: Some(widened::pairs::run_column),
                wide: Some(widened::wide::run),
                pairs: Some(PanelPairs { run: widened::wide::run_pair, kept_len: widened::kept_len }),
                fetching: Fetching::of_widened(),
                many_panels: Some(widened::pairs::MANY_PANELS),
                of_bytes: Some(unpacked::widened::kernel::<int8_avx512::Numbers>()),
                of_int4: Some(unpacked::widened::kernel::<int4_avx512::Numbers>()),
                ..Chains::plain(widened::pairs::run)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DType::F32) => Chains::plain(chains::avx2_f32),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DType::BF16) => Chains::plain(chains::avx2_bf16),
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, DType::F32) => Chains::plain(chains::neon_f32),
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, DType::BF16) => Chains::plain(chains::neon_bf16),
            (_, DType::F32) => Chains::plain(chains::portable_f32),
            (_, DType::BF16) => Chains::plain(chains::portable_bf16),
        })
    }

    /// Whether [`TileKernel::block`] of so many rows and columns takes [`Fetch::Stream`].
    pub(crate) fn streams(&self, rows: usize, columns: usize) -> bool {
        match self {
            TileKernel::Chains(chains) => chains.fetching.streams && columns == PANEL && rows <= chains.tile_rows(),
            TileKernel::Granules(_) => false,
        }
    }

    /// Numbers that [`TileKernel::block_in_parts`] has room for if it is to widen a right side of so many steps for so many rows; 0 if it never does.
    pub(crate) fn wide_len(&self, rows: usize, steps: usize) -> usize {
        match self {
            TileKernel::Chains(chains) if chains.widening(rows).is_some() => widened_len(steps),
            _ => 0,
        }
    }

    /// As [`TileKernel::block`], with a right side that lies in `parts` of `tile.steps` steps each, one after another: the left side goes through all of them. The bits are those of a product with
    /// each that begins with the result of the one before it. If it fits into `wide`, a right side that is better widened is.
    ///
    /// # Safety
    /// As there, for each part; `tile.b` is not read.
    pub(crate) unsafe fn block_in_parts(&self, rows: usize, parts: &[*const u8], tile: &Tile, wide: &mut [f32]) {
        let steps = parts.len() * tile.steps;
        if let TileKernel::Chains(chains) = self
            && let Some(run) = chains.widening(rows)
            && tile.columns == PANEL
            && widened_len(steps) <= wide.len()
        {
            // The first tile widens part after part, the others go through all at once.
            let first_rows = chains.rows_max[VECTORS_MAX - 1];
            for (i, part) in parts.iter().enumerate() {
                let (a, b) = (tile.a.wrapping_add(4 * i * tile.steps), wide[widened_len(i * tile.steps)..].as_mut_ptr());
                let accumulate = tile.accumulate || i > 0;
                // SAFETY: the caller vouches for the operands, and there is room for what is widened.
                unsafe { run(first_rows, Some(*part), &Tile { a, b: b.cast(), accumulate, fetch: Fetch::Nothing, ..*tile }) };
            }
            let (a, c) = (tile.a.wrapping_add(first_rows * tile.a_stride), tile.c.wrapping_add(first_rows * tile.c_stride));
            // SAFETY: as above; what they read has been written.
            return unsafe { run(rows - first_rows, None, &Tile { steps, a, b: wide.as_ptr().cast(), c, ..*tile }) };
        }
        match self {
            TileKernel::Chains(Chains { rows_max, parts: Some(run), .. }) if tile.columns == PANEL && parts.len() > 1 => {
                let rows_max = rows_max[VECTORS_MAX - 1];
                // As in `Chains::block`.
                let tiles = rows.div_ceil(rows_max);
                let mut row = 0;
                for i in 0..tiles {
                    let count = (rows - row).div_ceil(tiles - i);
                    // SAFETY: `row < rows`, for which the caller vouches.
                    unsafe {
                        let (a, c) = (tile.a.add(row * tile.a_stride), tile.c.add(row * tile.c_stride));
                        run(count, parts, &Tile { a, c, ..*tile });
                    }
                    row += count;
                }
            }
            TileKernel::Granules(run)
                if tile.steps > 0 && tile.steps.is_multiple_of(granules::STEPS) && tile.columns.is_multiple_of(LANES) =>
            {
                // SAFETY: passed on from the caller.
                unsafe { run_all(*run, rows, parts, &granule_tile(tile), |_| ()) }
            }
            _ => {
                for (i, &b) in parts.iter().enumerate() {
                    let (a, accumulate) = (tile.a.wrapping_add(4 * i * tile.steps), tile.accumulate || i > 0);
                    // SAFETY: passed on from the caller.
                    unsafe { self.block(rows, &Tile { a, b, accumulate, ..*tile }) };
                }
            }
        }
    }

    /// Adds to some rows of a panel of a result, `c` its first row, a product each.
    ///
    /// # Safety
    /// The rows must be writable, and what is added have this panel. The machine must have the instruction set.
    pub(super) unsafe fn add_single_rows(&self, panel: usize, addends: &[SingleAddend<'_>], c: *mut f32, c_stride: usize) {
        if let TileKernel::Chains(Chains { many_panels: Some(many), .. }) = self {
            // SAFETY: passed on from the caller.
            return unsafe { (many.single_addends)(panel, addends, c, c_stride) };
        }
        for addend in addends {
            let tile = Tile {
                steps: addend.steps,
                a: addend.left.as_ptr(),
                a_stride: addend.left.len(),
                b: addend.panel_bytes(panel).as_ptr(),
                b_stride: PANEL * 4,
                c: c.wrapping_add(addend.row * c_stride),
                c_stride,
                columns: PANEL,
                accumulate: true,
                fetch: Fetch::Nothing,
            };
            // SAFETY: as above.
            unsafe { self.block(1, &tile) };
        }
    }

    /// A block of any number of rows by up to one panel of columns: `tile` describes its first row.
    ///
    /// # Safety
    /// All operands must be readable, and the result writable, for `rows` rows; `tile.columns` is at most 64, and the right
    /// side can be read in whole vectors. The machine must have the instruction set.
    pub(crate) unsafe fn block(&self, rows: usize, tile: &Tile) {
        // SAFETY: passed on from the caller.
        unsafe {
            match self {
                TileKernel::Chains(chains) => chains.block(rows, tile),
                TileKernel::Granules(run) => block_of_granules(*run, rows, tile),
            }
        }
    }
}

impl Chains {
    /// Small tiles, and nothing beyond them.
    fn plain(run: ChainFn) -> Self {
        let rows_max = [4; VECTORS_MAX];
        Chains {
            run,
            rows_max,
            column: None,
            parts: None,
            wide: None,
            pairs: None,
            fetching: Fetching::NOTHING,
            many_panels: None,
            of_bytes: None,
            of_int4: None,
        }
    }

    /// What computes whole panels of so many rows with a right side that is widened once for all of them, if several tiles read it.
    pub(super) fn widening(&self, rows: usize) -> Option<WideFn> {
        self.wide.filter(|_| self.tiles(rows) >= WIDE_TILES_MIN)
    }

    /// The most rows of a tile of a whole panel.
    pub(super) fn tile_rows(&self) -> usize {
        self.rows_max[VECTORS_MAX - 1]
    }

    /// What computes two panels of so many rows at a time, if that is worth having the left side widened for both.
    pub(super) fn pairs(&self, rows: usize) -> Option<PanelPairs> {
        self.pairs.filter(|_| self.tiles(rows) >= PAIR_TILES_MIN)
    }

    /// How `next`, the right side that comes after this one and is as large, is fetched best while `rows` rows are computed. It is worth its time where
    /// a few tiles compute with what is fetched.
    pub(super) fn fetch(&self, rows: usize, next: *const u8) -> Fetch {
        match self.tiles(rows) {
            0 | 1 => match self.fetching.own {
                Own::Nothing => Fetch::Nothing,
                Own::Hints => Fetch::Hints(next),
                Own::EveryLine => Fetch::Own(next),
            },
            2..=FETCHING_TILES_MAX if self.fetching.meanwhile => Fetch::Next(next, Lines::One, &[]),
            _ => Fetch::Nothing,
        }
    }

    /// Tiles of whole panels that so many rows are computed in.
    fn tiles(&self, rows: usize) -> usize {
        rows.div_ceil(self.rows_max[VECTORS_MAX - 1])
    }

    /// Chunks that tiles of so many rows and steps fetch while they compute: none where steps are few, or where the processor itself looks ahead of so few rows.
    pub(super) fn chunks(&self, rows: usize, steps: usize) -> usize {
        match self.tiles(rows) {
            _ if !self.fetching.meanwhile => 0,
            0 | 1 if self.fetching.own != Own::EveryLine => 0,
            tiles => tiles * (steps / CHUNK_STEPS),
        }
    }

    /// # Safety
    /// As [`TileKernel::block`].
    pub(super) unsafe fn block(&self, rows: usize, tile: &Tile) {
        let vectors = tile.columns.div_ceil(LANES);
        let rows_max = self.rows_max[vectors - 1];
        if (1..=rows_max).contains(&rows) && !matches!(tile.fetch, Fetch::Chunks(_)) {
            // SAFETY: passed on from the caller.
            return unsafe { (self.run)(rows, vectors, tile) };
        }
        if let (Some(run), Fetch::Nothing | Fetch::Chunks(_), VECTORS_MAX) = (self.column, tile.fetch, vectors)
            && rows > 0
        {
            // SAFETY: as above.
            return unsafe { run(rows, tile) };
        }
        // Rows are dealt evenly: 32 rows in tiles of 6 would leave a last tile of 2, too few chains to hide the latency of an add.
        let tiles = rows.div_ceil(rows_max);
        let mut row = 0;
        for i in 0..tiles {
            let count = (rows - row).div_ceil(tiles - i);
            let mut part = *tile;
            // SAFETY: `row < rows`, for which the caller vouches.
            unsafe {
                part.a = tile.a.add(row * tile.a_stride);
                part.c = tile.c.add(row * tile.c_stride);
                part.fetch = match tile.fetch {
                    Fetch::Next(next, _, chunks) => next_of_tile(next, &*chunks, i, tiles, tile.steps),
                    Fetch::Chunks(chunks) => match chunks_of_tile(&*chunks, i, tile.steps) {
                        [] => Fetch::Nothing,
                        chunks => Fetch::Chunks(chunks),
                    },
                    fetch => fetch,
                };
                (self.run)(count, vectors, &part);
            }
            row += count;
        }
    }
}

/// A block in granules.
///
/// # Safety
/// As [`TileKernel::block`].
unsafe fn block_of_granules(run: GranuleFn, rows: usize, t: &Tile) {
    if !t.columns.is_multiple_of(LANES) {
        // SAFETY: passed on from the caller.
        return unsafe { block_of_cut_vectors(run, rows, t) };
    }
    let tile = granule_tile(t);
    let last = t.steps % granules::STEPS;
    // SAFETY: the caller vouches for all operands.
    unsafe {
        if tile.granules > 0 {
            run_all(run, rows, &[t.b], &tile, |_| ());
            if last > 0 {
                last_granule(run, rows, (t.b, last), &GranuleTile { from: t.c, ..tile });
            }
        } else if last > 0 {
            last_granule(run, rows, (t.b, last), &tile);
        } else {
            tile.begun(rows);
        }
    }
}

/// The whole granules of a tile as their kernels read them, beside its right side.
fn granule_tile(t: &Tile) -> GranuleTile {
    GranuleTile {
        granules: t.steps / granules::STEPS,
        a: t.a,
        a_row: t.a_stride,
        a_granule: ROW_BYTES,
        a_tile: granules::TILE_ROWS * t.a_stride,
        b_step: t.b_stride,
        behind: std::ptr::null(),
        from: if t.accumulate { t.c } else { std::ptr::null() },
        from_row: t.c_stride,
        c: t.c,
        c_row: t.c_stride,
        vectors: t.columns / LANES,
    }
}

/// Any number of rows. `before` is called before each call of the kernel, with the rows that it is for.
///
/// # Safety
/// As [`GranuleFn`], for all of them.
pub(super) unsafe fn run_all(
    run: GranuleFn,
    rows: usize,
    parts: &[*const u8],
    t: &GranuleTile,
    mut before: impl FnMut(Range<usize>),
) {
    debug_assert!(t.granules > 0 && (1..=VECTORS_MAX).contains(&t.vectors), "kernels count granules down to zero");
    for first in (0..rows).step_by(granules::ROWS_MAX) {
        let count = (rows - first).min(granules::ROWS_MAX);
        before(first..first + count);
        // SAFETY: passed on from the caller; whole tiles of rows come before each part.
        unsafe { run(count, parts, &t.below(first)) };
    }
}

/// The granule after those of `t` of a right side in one part, of which there are only `steps` steps: it is filled up with zeros on the side.
///
/// # Safety
/// As [`GranuleFn`], for one more granule as far as it goes.
#[inline(never)]
unsafe fn last_granule(run: GranuleFn, rows: usize, (right, steps): (*const u8, usize), t: &GranuleTile) {
    let step_bytes = t.vectors * LANES * 4;
    let mut b = [0u8; granules::STEPS * PANEL * 4];
    let mut a = [0u8; granules::ROWS_MAX * ROW_BYTES];
    // SAFETY: the caller vouches for all operands; what is written on the side has room.
    unsafe {
        for step in 0..steps {
            let from = right.add((t.granules * granules::STEPS + step) * t.b_step);
            std::ptr::copy_nonoverlapping(from, b[step * step_bytes..].as_mut_ptr(), step_bytes);
        }
        for first in (0..rows).step_by(granules::ROWS_MAX) {
            let rows = (rows - first).min(granules::ROWS_MAX);
            for row in 0..rows {
                let tile = (first + row) / granules::TILE_ROWS;
                let from = t.a.add(tile * t.a_tile + row % granules::TILE_ROWS * t.a_row + t.granules * t.a_granule);
                std::ptr::copy_nonoverlapping(from, a[row * ROW_BYTES..].as_mut_ptr(), steps * 4);
            }
            let a = a.as_ptr();
            let (a_row, a_tile) = (ROW_BYTES, granules::TILE_ROWS * ROW_BYTES);
            run(rows, &[b.as_ptr()], &GranuleTile { granules: 1, a, a_row, a_tile, b_step: step_bytes, ..t.below(first) });
        }
    }
}

/// A block whose last vector of columns does not exist as a whole: the result is made on the side.
///
/// # Safety
/// As [`TileKernel::block`].
#[inline(never)]
unsafe fn block_of_cut_vectors(run: GranuleFn, rows: usize, t: &Tile) {
    let mut sums = [0.0f32; granules::ROWS_MAX * PANEL];
    for first in (0..rows).step_by(granules::ROWS_MAX) {
        let rows = (rows - first).min(granules::ROWS_MAX);
        // SAFETY: the caller vouches for all operands, and the right side for whole vectors.
        unsafe {
            let (a, c) = (t.a.add(first * t.a_stride), t.c.add(first * t.c_stride));
            for (row, sums) in sums.chunks_exact_mut(PANEL).enumerate().take(rows) {
                sums.fill(0.0);
                if t.accumulate {
                    sums.as_mut_ptr().copy_from_nonoverlapping(c.add(row * t.c_stride), t.columns);
                }
            }
            let columns = t.columns.next_multiple_of(LANES);
            let side = Tile { a, c: sums.as_mut_ptr(), c_stride: PANEL, columns, accumulate: true, ..*t };
            block_of_granules(run, rows, &side);
            for (row, sums) in sums.chunks_exact(PANEL).enumerate().take(rows) {
                c.add(row * t.c_stride).copy_from_nonoverlapping(sums.as_ptr(), t.columns);
            }
        }
    }
}
