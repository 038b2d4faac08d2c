//! Products in granules: left sides in tiles, a part of the rows and of the reduction at a time.

mod lows;
pub(super) mod near;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) use self::lows::{Low, Lows};
use self::near::NearFn;
use super::addends::{Addends, PanelAddends};
use super::fetch::Pieces;
use super::granules::{self, GranuleFn, GranuleTile};
use super::kernel;
use super::operands::{Out, Right, RightBlock, RowRuns, Rows, panel_columns, steps};
use super::{Matmul, TASKS_PER_THREAD};
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{LANES, PANEL, PackedRef};
use crate::cpu::scratch::{taken_bytes, with_operand, with_scratch};
use crate::cpu::threads::{Pool, SharedMut};
use crate::{DType, Result};

/// Steps of a block of a product in granules that a few rows read once.
pub(super) const GRANULE_BLOCK_STEPS: usize = 256;
/// Steps of a block that many rows read: 32 KiB of a full panel. They stay in a first-level cache of 48 KiB, from which a tile of the left side, 8 KiB of it, and one of the result do not push them out.
const NEAR_GRANULE_BLOCK_STEPS: usize = 128;
/// Rows of a left side in tiles at a time, at most.
const TILED_ROWS_MAX: usize = 512;
/// Bytes of a left side in tiles at a time, at most.
const TILED_BYTES_MAX: usize = 4 << 20;
/// The same where sums of parts of a reduction are kept in tiles, and need not come and go through the result: a second-level cache of 2 MiB holds both them and the sums of a panel.
const NEAR_TILED_BYTES_MAX: usize = 1 << 20;
/// Bytes of such sums for each thread, at most.
const SUMS_BYTES_MAX: usize = 4 << 20;
/// Rows of its own that a thread copies, at least: each thread reads the whole right side then.
const OWN_ROWS_MIN: usize = 128;
/// And of a right side beyond [`FAR_BYTES`], which comes from memory each time.
const OWN_ROWS_OF_FAR_MIN: usize = 256;
const FAR_BYTES: usize = 64 << 20;
/// Bytes of them in one part of a reduction, at most, if they are not fewer rows than [`OWN_ROWS_OF_FAR_MIN`]: a second-level cache has 2 MiB, into which the right side and the sums come too.
const OWN_BYTES_MAX: usize = 3 << 19;
/// Panels that are left of other rows, at least, for which they are copied once more.
const OTHERS_PANELS_MIN: usize = 4;
/// From so many rows on a block of the right side is read often enough to be kept near.
pub(super) const NEAR_ROWS_MIN: usize = 64;

/// Takes pairs of panels of some rows: the first row, the first column of the first panel, and the numbers of both.
pub(crate) type PairSink<'s> = dyn Fn(usize, usize, &[[f32; 2 * PANEL]]) + Sync + 's;

/// Which panels of a result are computed together.
#[derive(Clone, Copy)]
pub(crate) enum Paired {
    /// Those that have the same place in each half.
    Halves,
    /// Those side by side.
    Neighbours,
}

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
        let block_steps = if all.len() < NEAR_ROWS_MIN { block_steps } else { block_steps.min(NEAR_GRANULE_BLOCK_STEPS) };
        let (num_steps, near) = (steps(left.width, left.dtype), near::kernel(self.isa));
        self.over_tiles(run, (left, all), (out.columns, true), addends, |tiles, panels, part, addends| {
            let accumulate = out.accumulate || tiles.steps.start > 0;
            let product = PanelProduct { run, left: tiles, out, accumulate, block_steps, right };
            let addends = (tiles.steps.end == num_steps).then_some(addends);
            // SAFETY: disjoint parts of the result, in bounds by the assertions of the callers.
            unsafe { self.panel_of_granules(&product, near, panels, part, addends) };
        })
    }

    /// Whether [`Matmul::pairs_of_granules`] has them for so many rows: where a matrix unit keeps what it adds to a panel near, and needs no more than one part of the reduction.
    pub(super) fn has_pairs(&self, rows: usize, w: &PackedRef<'_>) -> bool {
        // What one panel alone reads is not copied.
        let fits = w.out_features.is_multiple_of(2 * PANEL) && w.out_features > 2 * PANEL && rows >= NEAR_ROWS_MIN;
        let mut parts = step_ranges(TILED_ROWS_MAX, steps(w.in_features, w.dtype), TILED_BYTES_MAX);
        fits && near::kernel(self.isa).is_some() && parts.nth(1).is_none()
    }

    /// Pairs of panels of a result, for `sink` and into `kept`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn pairs_of_granules(
        &self,
        run: GranuleFn,
        (left, all): (Rows<'_>, RowRuns<'_>),
        right: &impl Right,
        (columns, paired): (usize, Paired),
        addends: &Addends<'_>,
        kept: Option<&Out>,
        sink: &PairSink<'_>,
    ) -> Result<()> {
        let near = near::kernel(self.isa).expect("it was asked for");
        let (block_steps, half) = (NEAR_GRANULE_BLOCK_STEPS, columns / 2 / PANEL);
        let panels_of = |pair: usize| match paired {
            Paired::Halves => [pair, half + pair],
            Paired::Neighbours => [2 * pair, 2 * pair + 1],
        };
        self.over_tiles(run, (left, all), (columns / 2, false), addends, |tiles, (pair, next_pair), part, addends| {
            let bytes = pair_bytes(part.len()) + near::scratch_bytes(part.len(), block_steps) + addends.scratch_bytes();
            with_scratch(bytes, |mut arena| {
                let side = arena.take::<f32>(part.len().next_multiple_of(granules::TILE_ROWS) * 2 * PANEL);
                let first_row = tiles.rows.parts(part.clone()).next().expect("there are rows").start;
                let ([first, second], [next, _]) = (panels_of(pair), panels_of(next_pair));
                for (i, panels) in [(first, second), (second, next)].into_iter().enumerate() {
                    let first = (first_row, panels.0 * PANEL);
                    let out = Out::aside(left.rows, columns, &mut side[i * PANEL..], 2 * PANEL, first);
                    let product = PanelProduct { run, left: tiles, out: &out, accumulate: false, block_steps, right };
                    // SAFETY: the side has these rows of both panels, and the left side is copied if several panels read it.
                    unsafe { product.near_panel((self, near), panels, part.clone(), Some(addends), arena.reborrow()) };
                }
                let sums = &side.as_chunks().0[..part.len()];
                if let Some(kept) = kept {
                    // SAFETY: these rows of both panels are this task's.
                    unsafe { near::keep(sums, kept, first_row, [first, second]) };
                }
                sink(first_row, first * PANEL, sums);
            });
        })
    }

    /// Runs `body` with tiles of a part of the left side, a panel of so many columns, of which it may have some rows, and the next to come, and what is added to them. Sums may be kept between parts of the
    /// reduction if `body` can.
    fn over_tiles(
        &self,
        run: GranuleFn,
        (left, all): (Rows<'_>, RowRuns<'_>),
        (columns, may_keep): (usize, bool),
        addends: &Addends<'_>,
        body: impl Fn(&TiledLeft<'_>, (usize, usize), Range<usize>, &Addends<'_>) + Sync,
    ) -> Result<()> {
        let num_steps = steps(left.width, left.dtype);
        let num_rows = all.len();
        let near = near::kernel(self.isa);
        let panels = columns.div_ceil(PANEL);
        if near.is_some()
            && let Some(own) = self.own_rows(num_rows, num_steps, panels, may_keep)
        {
            return self.over_own_tiles(run, (left, all), (own, panels), addends, body);
        }
        assert!(addends.lows().is_none(), "who makes them copies rows for himself");
        for first in (0..num_rows).step_by(TILED_ROWS_MAX) {
            let rows: Vec<Range<usize>> = all.parts(first..(first + TILED_ROWS_MAX).min(num_rows)).collect();
            let rows = RowRuns::new(&rows);
            for steps in step_ranges(rows.len(), num_steps, TILED_BYTES_MAX) {
                let mut buffer;
                // What one panel alone reads is not worth a copy.
                let in_place = if panels == 1 { TiledLeft::in_place(&left, rows, steps.clone()) } else { None };
                let tiles = match in_place {
                    Some(tiles) => tiles,
                    None => {
                        buffer = Buffer::recycled(TiledLeft::bytes(rows.len(), steps.len()))?;
                        TiledLeft::copied(self.pool, &left, rows, steps.clone(), &mut buffer)
                    }
                };
                self.over_panels(rows.len(), columns, granules::ROWS_MAX, |panel, part| {
                    // Threads take panels in turns.
                    body(&tiles, (panel, panel + self.pool.num_threads()), part, addends);
                });
            }
        }
        Ok(())
    }

    /// As [`Matmul::over_tiles`], of rows that each thread copies for itself.
    fn over_own_tiles(
        &self,
        run: GranuleFn,
        (left, all): (Rows<'_>, RowRuns<'_>),
        (own, panels): (OwnRows, usize),
        addends: &Addends<'_>,
        body: impl Fn(&TiledLeft<'_>, (usize, usize), Range<usize>, &Addends<'_>) + Sync,
    ) -> Result<()> {
        let (num_rows, num_steps) = (all.len(), steps(left.width, left.dtype));
        let of_chunk = |first| RowChunk::new(all.parts(first..(first + own.rows).min(num_rows)).collect());
        let chunks: Vec<RowChunk> = (0..num_rows).step_by(own.rows).map(of_chunk).collect();
        let parts: Vec<Range<usize>> = step_ranges(own.rows, num_steps, own.bytes_max).collect();
        let sums_each = if own.keeps_sums && parts.len() > 1 { sums_of_chunk(own.rows, panels) } else { 0 };
        let (at_once, mut kept) = if sums_each > 0 {
            let have_room = SUMS_BYTES_MAX / (sums_each * size_of::<f32>()) * self.pool.num_threads();
            let at_once = have_room.min(chunks.len());
            (at_once, Some(Buffer::recycled(at_once * sums_each * size_of::<f32>())?))
        } else {
            (chunks.len(), None)
        };
        let kept = kept.as_mut().map(|kept| SharedMut::new(kept.numbers_mut::<f32>(at_once * sums_each)));
        for chunks in chunks.chunks(at_once) {
            for steps in &parts {
                let is_last = steps.end == num_steps;
                self.over_chunks(chunks, panels, |chunk, rows, next_panel| {
                    let bytes = TiledLeft::bytes(rows.len(), steps.len());
                    with_operand(bytes, |mut arena| {
                        let mut tiles = TiledLeft::copied(self.pool, &left, rows, steps.clone(), arena.take(bytes));
                        let mut of_rows = None;
                        if let Some(lows) = addends.lows() {
                            chunks[chunk].once(|| lows.make(self, run, &tiles, is_last));
                            // SAFETY: they have been made.
                            of_rows = is_last.then(|| unsafe { addends.of_made_rows(lows, lows::one_run(rows)) });
                        }
                        let addends = of_rows.as_ref().unwrap_or(addends);
                        tiles.sums = kept.as_ref().map(|kept| (kept, chunk * sums_each));
                        while let Some(panel) = next_panel() {
                            body(&tiles, (panel, panel + 1), 0..rows.len(), addends);
                        }
                    });
                });
            }
        }
        Ok(())
    }

    /// The rows of so many steps that a thread copies at a time for itself alone, if there are enough for all threads: it would have to ask the others for what they have written. Of one panel, many rows are
    /// copied too; as they lie, they are read more slowly than that.
    fn own_rows(&self, rows: usize, num_steps: usize, panels: usize, may_keep: bool) -> Option<OwnRows> {
        let threads = self.pool.num_threads();
        if panels == 1 {
            let chunks = (TASKS_PER_THREAD * threads).min(rows / granules::ROWS_MAX);
            let is_many = rows >= NEAR_ROWS_MIN && chunks > 0;
            return is_many.then(|| OwnRows::of(rows.div_ceil(chunks), TILED_BYTES_MAX, false));
        }
        // So many rows have room for their sums.
        let kept_rows = SUMS_BYTES_MAX / size_of::<f32>() / (panels * PANEL) / granules::ROWS_MAX * granules::ROWS_MAX;
        let keeps_sums = may_keep && kept_rows >= OWN_ROWS_OF_FAR_MIN;
        let rows_max = match keeps_sums {
            true => kept_rows.min(TILED_ROWS_MAX),
            false => {
                (OWN_BYTES_MAX / tiles_bytes(num_steps).max(1) * granules::TILE_ROWS).clamp(OWN_ROWS_OF_FAR_MIN, TILED_ROWS_MAX)
            }
        };
        let is_far = num_steps * 4 * panels * PANEL > FAR_BYTES;
        let rows_min = if is_far { OWN_ROWS_OF_FAR_MIN } else { OWN_ROWS_MIN };
        let chunks = rows.div_ceil(rows_max).div_ceil(threads).min(rows / rows_min / threads) * threads;
        let bytes_max = if keeps_sums { NEAR_TILED_BYTES_MAX } else { TILED_BYTES_MAX };
        (chunks > 0).then(|| OwnRows::of(rows.div_ceil(chunks).min(rows_max), bytes_max, keeps_sums))
    }

    /// Runs `body` with the number and rows of each chunk on some thread, and with what answers the next of their panels that nobody has. A thread whose own chunks are done helps with others.
    fn over_chunks(
        &self,
        chunks: &[RowChunk],
        panels: usize,
        body: impl Fn(usize, RowRuns<'_>, &mut dyn FnMut() -> Option<usize>) + Sync,
    ) {
        let threads = self.pool.num_threads();
        chunks.iter().for_each(RowChunk::begin);
        self.pool.run(threads, &|thread| {
            let is_own = |chunk: &usize| chunk % threads == thread;
            let own = (0..chunks.len()).filter(is_own).map(|chunk| (chunk, 1));
            let others = (0..chunks.len()).filter(|chunk| !is_own(chunk)).map(|chunk| (chunk, OTHERS_PANELS_MIN.min(panels)));
            for (chunk, panels_min) in own.chain(others) {
                let RowChunk { rows, next_panel, .. } = &chunks[chunk];
                if next_panel.load(Ordering::Relaxed) + panels_min > panels {
                    continue;
                }
                let mut next = || Some(next_panel.fetch_add(1, Ordering::Relaxed)).filter(|panel| *panel < panels);
                body(chunk, RowRuns::new(rows), &mut next);
            }
        });
    }

    /// A panel for rows `part` of the tiles, and what is added to it.
    ///
    /// # Safety
    /// As [`PanelProduct::panel`].
    unsafe fn panel_of_granules(
        &self,
        product: &PanelProduct<'_, impl Right>,
        near: Option<NearFn>,
        (panel, next_panel): (usize, usize),
        part: Range<usize>,
        addends: Option<&Addends<'_>>,
    ) {
        let (left, out) = (product.left, product.out);
        let is_whole = panel_columns(panel, out.columns).next_multiple_of(LANES) == PANEL;
        let added_bytes = addends.map_or(0, Addends::scratch_bytes);
        if let Some(near) = near.filter(|_| is_whole && part.len() >= NEAR_ROWS_MIN && left.is_copied) {
            return with_scratch(near::scratch_bytes(part.len(), product.block_steps) + added_bytes, |arena| {
                // SAFETY: the caller's promise.
                unsafe { product.near_panel((self, near), (panel, next_panel), part, addends, arena) };
            });
        }
        // SAFETY: the caller's promise.
        unsafe { product.panel(panel, part.clone(), next_panel) };
        let Some(addends) = addends else { return };
        with_scratch(added_bytes, |mut arena| {
            let mut added = PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena);
            // SAFETY: the caller's promise.
            let mut add = |rows| unsafe { added.add(out, rows) };
            left.rows.parts(part).for_each(|part| addends.runs(part, &mut add));
        });
    }
}

/// How threads copy rows for themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
struct OwnRows {
    /// So many at a time.
    rows: usize,
    /// Bytes of a part of the reduction of them, at most.
    bytes_max: usize,
    /// Whether sums are kept in tiles between parts.
    keeps_sums: bool,
}

impl OwnRows {
    fn of(rows: usize, bytes_max: usize, keeps_sums: bool) -> Self {
        let rows = rows.next_multiple_of(granules::ROWS_MAX).min(TILED_ROWS_MAX);
        OwnRows { rows, bytes_max, keeps_sums }
    }
}

/// Numbers of the sums of a chunk of so many rows, a whole tile for the last of them too.
fn sums_of_chunk(rows: usize, panels: usize) -> usize {
    rows.div_ceil(granules::TILE_ROWS) * near::SUMS * panels
}

/// Some rows of a left side, which one thread copies and multiplies, and others that have nothing else to do.
struct RowChunk {
    rows: Vec<Range<usize>>,
    /// The first panel that nobody has taken.
    next_panel: AtomicUsize,
    /// Whether what comes before all panels has been done.
    is_begun: Mutex<bool>,
}

impl RowChunk {
    fn new(rows: Vec<Range<usize>>) -> Self {
        RowChunk { rows, next_panel: AtomicUsize::new(0), is_begun: Mutex::new(false) }
    }

    /// For all panels again.
    fn begin(&self) {
        self.next_panel.store(0, Ordering::Relaxed);
        *self.is_begun.lock().expect("nobody failed") = false;
    }

    /// Has `first` done by the first thread that comes here; others wait for it.
    fn once(&self, first: impl FnOnce()) {
        let mut is_begun = self.is_begun.lock().expect("nobody failed");
        if !*is_begun {
            first();
            *is_begun = true;
        }
    }
}

/// The steps of a reduction, as many at a time as so many rows have in `bytes_max` bytes.
fn step_ranges(rows: usize, num_steps: usize, bytes_max: usize) -> impl Iterator<Item = Range<usize>> {
    let step_bytes = rows.next_multiple_of(granules::TILE_ROWS) * 4;
    let steps_max = (bytes_max / step_bytes / GRANULE_BLOCK_STEPS).max(1) * GRANULE_BLOCK_STEPS;
    (0..num_steps).step_by(steps_max).map(move |first| first..(first + steps_max).min(num_steps))
}

/// Rows of a left side as kernels of granules read them.
struct TiledLeft<'r> {
    /// The first row's first granule.
    first: *const u8,
    /// Bytes from one row to the next within a tile, from one granule of a row to the next, and from one tile to the next.
    row: usize,
    granule: usize,
    tile: usize,
    /// Which rows and steps these are.
    rows: RowRuns<'r>,
    steps: Range<usize>,
    /// Whether they were copied: there is room for whole tiles.
    is_copied: bool,
    /// Sums between parts of the reduction, and where those of these rows begin: of each whole panel, tile after tile.
    sums: Option<(&'r SharedMut<f32>, usize)>,
}

// SAFETY: the numbers are read alone.
unsafe impl Sync for TiledLeft<'_> {}

impl<'r> TiledLeft<'r> {
    const TILE_BYTES: usize = granules::TILE_ROWS * granules::ROW_BYTES;
    /// Granules that are copied of a row at a time: what processors fetch ahead of by themselves.
    const GRANULES_AT_ONCE: usize = 4;

    /// Bytes of so many rows in tiles.
    fn bytes(rows: usize, steps: usize) -> usize {
        rows.div_ceil(granules::TILE_ROWS) * tiles_bytes(steps)
    }

    /// `[tiles of rows][granules][16 rows][64 bytes]`, side by side wherever they come from: rows of a matrix lie a multiple of a large power of two apart, where they would push each other out of the cache.
    /// The last granule of a row is filled up with zeros; rows of the last tile that there are none of are unspecified.
    fn copied(pool: &Pool, left: &Rows<'_>, rows: RowRuns<'r>, steps: Range<usize>, room: &'r mut [u8]) -> Self {
        let num_tiles = rows.len().div_ceil(granules::TILE_ROWS);
        let stride = tiles_bytes(steps.len());
        let room = &mut room[..num_tiles * stride];
        let first = room.as_ptr();
        let bytes = SharedMut::new(room);
        let tile = |tile: usize| {
            // SAFETY: each task has a tile of its own.
            let tiled = unsafe { bytes.part(tile * stride..(tile + 1) * stride) };
            let places = tile * granules::TILE_ROWS..((tile + 1) * granules::TILE_ROWS).min(rows.len());
            let at_once = Self::GRANULES_AT_ONCE * granules::STEPS;
            for (first, tiled) in
                steps.clone().step_by(at_once).zip(tiled.chunks_mut(Self::GRANULES_AT_ONCE * Self::TILE_BYTES))
            {
                let steps = first..(first + at_once).min(steps.end);
                for (place, row) in rows.parts(places.clone()).flatten().enumerate() {
                    let source = &left.bytes[row * left.stride..][steps.start * 4..steps.end * 4];
                    let targets = tiled[place * granules::ROW_BYTES..].chunks_mut(Self::TILE_BYTES);
                    let (whole, rest) = source.as_chunks::<{ granules::ROW_BYTES }>();
                    for (source, target) in whole.iter().zip(targets) {
                        target.first_chunk_mut().expect("a granule of a row").clone_from(source);
                    }
                    if !rest.is_empty() {
                        let target = &mut tiled[whole.len() * Self::TILE_BYTES + place * granules::ROW_BYTES..];
                        target[..granules::ROW_BYTES].fill(0);
                        target[..rest.len()].copy_from_slice(rest);
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
        let (row, granule) = (granules::ROW_BYTES, Self::TILE_BYTES);
        TiledLeft { first, row, granule, tile: stride, rows, steps, is_copied: true, sums: None }
    }

    /// Some columns of rows that were copied, as many of them as are in these steps, as a left side of their own whose rows are `rows`. They begin and end with a granule, or end with the rows.
    fn of_inputs(&self, first: usize, inputs: usize, rows: RowRuns<'r>) -> Option<Self> {
        let (before, end) = (steps(first, DType::BF16), steps(first + inputs, DType::BF16));
        let part = self.steps.start.max(before)..self.steps.end.min(end);
        let granules = part.start.saturating_sub(self.steps.start) / granules::STEPS;
        (!part.is_empty()).then(|| TiledLeft {
            first: self.first.wrapping_add(granules * self.granule),
            rows,
            steps: part.start - before..part.end - before,
            sums: None,
            ..*self
        })
    }

    /// The rows as they lie, if a kernel can read them so: one run, whole granules.
    fn in_place(left: &Rows<'r>, rows: RowRuns<'r>, steps: Range<usize>) -> Option<Self> {
        let mut runs = rows.parts(0..rows.len());
        let (run, None) = (runs.next()?, runs.next()) else { return None };
        drop(runs);
        if !steps.len().is_multiple_of(granules::STEPS) {
            return None;
        }
        let bytes = &left.bytes[run.start * left.stride + steps.start * 4..(run.end - 1) * left.stride + steps.end * 4];
        let (first, row, granule) = (bytes.as_ptr(), left.stride, granules::ROW_BYTES);
        Some(TiledLeft { first, row, granule, tile: granules::TILE_ROWS * row, rows, steps, is_copied: false, sums: None })
    }
}

/// Bytes of a tile of rows with so many steps.
fn tiles_bytes(steps: usize) -> usize {
    steps.div_ceil(granules::STEPS) * TiledLeft::TILE_BYTES
}

/// Bytes of a left side of `rows` rows of `width` numbers of bf16 in tiles, as many as there are at a time, and of sums between parts of the reduction.
pub(super) fn left_bytes(rows: usize, width: usize) -> usize {
    let rows = rows.min(TILED_ROWS_MAX);
    let tiled = rows.next_multiple_of(granules::TILE_ROWS) * width.next_multiple_of(granules::INPUTS) * 2;
    let is_split = step_ranges(rows, steps(width, DType::BF16), NEAR_TILED_BYTES_MAX).nth(1).is_some();
    tiled.min(TILED_BYTES_MAX) + if is_split { SUMS_BYTES_MAX } else { 0 }
}

/// Bytes that a panel of `rows` rows takes on its thread: two blocks, the result on the side, and that of a pair of panels.
pub(super) fn panel_scratch_bytes(rows: usize) -> usize {
    (2 * GRANULE_BLOCK_STEPS + rows.min(TILED_ROWS_MAX)) * PANEL * 4 + pair_bytes(rows.min(TILED_ROWS_MAX))
}

/// Bytes of so many rows of a pair of panels.
fn pair_bytes(rows: usize) -> usize {
    taken_bytes::<f32>(rows.next_multiple_of(granules::TILE_ROWS) * 2 * PANEL)
}

/// A product of granules with some rows and steps of its left side.
struct PanelProduct<'p, R> {
    run: GranuleFn,
    left: &'p TiledLeft<'p>,
    out: &'p Out,
    accumulate: bool,
    block_steps: usize,
    right: &'p R,
}

impl<R: Right> PanelProduct<'_, R> {
    /// What is read of the right side behind these steps.
    fn coming(&self, panel: usize, next_panel: usize, steps: &Range<usize>) -> Pieces {
        let all = self.left.steps.clone();
        self.right.coming((panel, next_panel), steps, all, self.block_steps, self.out.columns)
    }

    /// One panel for rows `part` of the tiles. `next_panel` is the one that this thread comes to then, if there is one.
    ///
    /// # Safety
    /// The result is in bounds, and nobody else has this part of it.
    unsafe fn panel(&self, panel: usize, part: Range<usize>, next_panel: usize) {
        let PanelProduct { run, left, out, accumulate, block_steps, right } = *self;
        let columns = panel_columns(panel, out.columns);
        let (rows, vectors) = (part.len(), columns.div_ceil(LANES));
        let width = vectors * LANES;
        let is_near = rows >= NEAR_ROWS_MIN;
        // The kernel can begin with the result and end in it if that is made of whole vectors in equal distances.
        let is_regular = columns.is_multiple_of(LANES) && left.rows.parts(part.clone()).nth(1).is_none();
        // Rows of a result lie as far apart as those of a left side: sums of many are kept together between blocks.
        let on_the_side = left.steps.len() > block_steps && is_near || !is_regular;
        let side_words = if on_the_side { rows * width } else { 0 };
        let block_words = block_steps * width;
        with_scratch(2 * taken_bytes::<u32>(block_words) + taken_bytes::<f32>(side_words), |mut arena| {
            let (written, filled_up, side) = (arena.take(block_words), arena.take(block_words), arena.take::<f32>(side_words));
            let result = |row: usize| out.at(row, panel * PANEL);
            let rows_of_result = || left.rows.parts(part.clone()).flatten();
            let first_row = rows_of_result().next().expect("there are rows");
            let in_result = (result(first_row), out.stride);
            let aside = if on_the_side { (side.as_mut_ptr(), width) } else { in_result };
            // SAFETY: the caller vouches for the result; the side has room for all rows, the tiles have them, and blocks have whole granules.
            unsafe {
                if accumulate && !is_regular {
                    for (place, row) in rows_of_result().enumerate() {
                        aside.0.add(place * width).copy_from_nonoverlapping(result(row), columns);
                    }
                }
                for first in left.steps.clone().step_by(block_steps) {
                    let steps = first..(first + block_steps).min(left.steps.end);
                    let (is_first, is_last) = (first == left.steps.start, steps.end == left.steps.end);
                    let (from, from_row) = match is_first {
                        true if !accumulate => (std::ptr::null_mut(), 0),
                        true if is_regular => in_result,
                        _ => aside,
                    };
                    let (c, c_row) = if is_last && is_regular { in_result } else { aside };
                    let block = right.block(panel, steps.clone(), written);
                    let coming = self.coming(panel, next_panel, &steps);
                    // It fetches itself what it streams.
                    let (behind, mut ahead) = match !is_near && block.is_streamed {
                        true => (coming.first_address().unwrap_or(block.first), Pieces::default()),
                        false => (std::ptr::null(), coming),
                    };
                    let lines = ahead.lines().div_ceil(rows.div_ceil(granules::ROWS_MAX));
                    // A few lines at a time, as often as the kernel is called.
                    let before = |_| ahead = std::mem::take(&mut ahead).fetch(lines);
                    let granules_before = (first - left.steps.start) / granules::STEPS;
                    let at = part.start / granules::TILE_ROWS * left.tile + granules_before * left.granule;
                    let mut tile = GranuleTile {
                        granules: steps.len().div_ceil(granules::STEPS),
                        a: left.first.add(at),
                        a_row: left.row,
                        a_granule: left.granule,
                        a_tile: left.tile,
                        b_step: block.stride,
                        behind,
                        from,
                        from_row,
                        c,
                        c_row,
                        vectors,
                    };
                    let mut b = block.first;
                    if !steps.len().is_multiple_of(granules::STEPS) {
                        fill_up(&block, steps.len(), width, filled_up);
                        (b, tile.b_step) = (filled_up.as_ptr().cast(), width * 4);
                    }
                    kernel::run_all(run, rows, &[b], &tile, before);
                }
                if !is_regular {
                    for (place, row) in rows_of_result().enumerate() {
                        result(row).copy_from_nonoverlapping(aside.0.add(place * width), columns);
                    }
                }
            }
        });
    }
}

/// Copies a block of `steps` steps of `width` words, and fills up the last granule with zeros.
///
/// # Safety
/// The block has these steps.
unsafe fn fill_up(block: &RightBlock, steps: usize, width: usize, out: &mut [u32]) {
    let (steps_of, rest) = out[..steps.next_multiple_of(granules::STEPS) * width].split_at_mut(steps * width);
    for (step, out) in steps_of.chunks_exact_mut(width).enumerate() {
        // SAFETY: the caller's promise.
        out.copy_from_slice(unsafe { std::slice::from_raw_parts(block.first.add(step * block.stride).cast::<u32>(), width) });
    }
    rest.fill(0);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::cpu::isa::Isa;

    fn chunks(count: usize) -> Vec<RowChunk> {
        (0..count).map(|i| RowChunk::new(std::iter::once(i..i + 1).collect())).collect()
    }

    #[test]
    fn every_panel_of_every_chunk_is_given_out_once_however_often_it_is_asked() {
        // Of one chunk all threads take panels at the same time.
        for (threads, count, panels) in [(1, 3, 5), (2, 2, 1), (2, 4, 9), (3, 6, 47), (4, 2, 3), (3, 1, 200_000)] {
            let pool = Pool::new(threads);
            let matmul = Matmul::new(&pool, Isa::detect().into(), DType::BF16);
            let chunks = chunks(count);
            // As for each range of a reduction.
            for _ in 0..2 {
                let none = |count: usize| -> Vec<AtomicUsize> { (0..count).map(|_| AtomicUsize::new(0)).collect() };
                let (given, begun) = (none(count * panels), none(count));
                let take = |chunk: usize, rows: RowRuns<'_>, next_panel: &mut dyn FnMut() -> Option<usize>| {
                    assert_eq!(rows.end() - 1, chunk);
                    chunks[chunk].once(|| {
                        std::thread::yield_now();
                        begun[chunk].fetch_add(1, Ordering::Relaxed);
                    });
                    assert_eq!(begun[chunk].load(Ordering::Relaxed), 1, "who comes later waits for who begins");
                    while let Some(panel) = next_panel() {
                        given[chunk * panels + panel].fetch_add(1, Ordering::Relaxed);
                    }
                };
                matmul.over_chunks(&chunks, panels, take);
                let what = format!("{threads} threads, {count} chunks, {panels} panels");
                let wrong = given.iter().position(|given| given.load(Ordering::Relaxed) != 1);
                assert_eq!(wrong, None, "{what}");
            }
        }
    }

    #[test]
    fn a_thread_has_as_many_rows_of_its_own_as_stay_near_it() {
        let of = |threads: usize, rows: usize, inputs: usize, panels: usize, may_keep: bool| {
            let pool = Pool::new(threads);
            let own = Matmul::new(&pool, Isa::detect().into(), DType::BF16).own_rows(rows, inputs / 2, panels, may_keep);
            own.map(|own| (own.rows, own.keeps_sums))
        };
        // In one part of the reduction: 512 rows of 3,072 inputs are 3 MiB.
        let whole = |threads, rows, inputs| of(threads, rows, inputs, 16, false);
        assert_eq!([whole(2, 512, 1024), whole(2, 512, 3072), whole(2, 1024, 1024)], [256, 256, 512].map(|n| Some((n, false))));
        assert_eq!([whole(2, 1024, 3072), whole(2, 1024, 2048), whole(1, 512, 3072)], [Some((256, false)); 3]);
        // In several, with sums of 1,024 columns, of 4,096, and of more than there is room for.
        assert_eq!([of(2, 1024, 3072, 16, true), of(2, 1024, 3072, 64, true)], [Some((512, true)), Some((256, true))]);
        assert_eq!(of(2, 1024, 3072, 96, true), Some((256, false)));
        // Few rows, and few of what lies in memory.
        assert_eq!([of(2, 256, 1024, 16, true), of(2, 255, 1024, 16, true)], [Some((128, true)), None]);
        assert_eq!([of(2, 511, 1024, 2374, true), of(2, 512, 1024, 2374, true)], [None, Some((256, false))]);
        assert_eq!([of(4, 511, 1024, 16, true), of(1, 127, 64, 16, true)], [None; 2]);
        // Not a chunk more than rows are enough for.
        assert_eq!(whole(2, 550, 8192), Some((160, false)));
        let cases = (1..6).flat_map(|threads| (1..3000).step_by(77).map(move |rows| (threads, rows)));
        for ((threads, rows), keep) in cases.flat_map(|case| [(case, false), (case, true)]) {
            for panels in [1, 16, 64, 2374] {
                if let Some((own, keeps)) = of(threads, rows, 3072, panels, keep) {
                    let what = format!("{threads} threads, {rows} rows, {panels} panels: {own}");
                    assert!(own <= TILED_ROWS_MAX && (panels == 1 || rows.div_ceil(own) <= rows / OWN_ROWS_MIN), "{what}");
                    assert!(!keeps || sums_of_chunk(own, panels) * 4 <= SUMS_BYTES_MAX, "{what}");
                }
            }
        }
    }

    #[test]
    fn who_is_done_helps() {
        let pool = Pool::new(2);
        let matmul = Matmul::new(&pool, Isa::detect().into(), DType::BF16);
        let in_first = AtomicUsize::new(0);
        // Whoever has the first chunk waits there until the other has come too.
        let meet = |chunk: usize, _: RowRuns<'_>, next_panel: &mut dyn FnMut() -> Option<usize>| {
            next_panel();
            if chunk == 0 {
                in_first.fetch_add(1, Ordering::Relaxed);
                let end = Instant::now() + Duration::from_secs(20);
                while in_first.load(Ordering::Relaxed) < 2 && Instant::now() < end {
                    std::thread::yield_now();
                }
            }
        };
        matmul.over_chunks(&chunks(2), OTHERS_PANELS_MIN + 2, meet);
        assert_eq!(in_first.into_inner(), 2);
    }
}
