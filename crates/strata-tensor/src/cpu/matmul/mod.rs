//! Matrix products of the CPU backend: three shapes of them, one way through memory, one order of reduction for each kind of kernel.
//!
//! - [`Matmul::forward`]: `y = x·Wᵀ` on packed weights, streamed once; the same code for one token as for a thousand.
//! - [`Matmul::backward_input`]: `dx = dy·W` on the same packed weights, transposed block by block in cache (`transpose`).
//! - [`Matmul::backward_weights`]: `dW += lowᵀ·x` for low-rank weights, reduced over tokens in order, sequence after sequence (`tokens`).
//!
//! Work is split over threads by outputs: panels of 64 columns, and runs of rows where there are few panels.
//!
//! To the first two other products may be added on the way (`addends`), which a matrix unit makes there too (`tiled::lows`). What comes next is fetched from memory meanwhile (`fetch`).
//!
//! Kernels, `chains` and `granules`, are one file for each family of instructions; `kernel` chooses.

mod addends;
#[cfg(target_arch = "x86_64")]
mod amx;
mod chains;
#[cfg(target_arch = "x86_64")]
mod chains_avx512;
mod fetch;
mod granules;
#[cfg(target_arch = "x86_64")]
mod granules_avx512;
pub(crate) mod int4;
#[cfg(target_arch = "x86_64")]
mod int4_avx512;
pub(crate) mod int8;
#[cfg(target_arch = "x86_64")]
mod int8_avx512;
mod kernel;
mod operands;
mod pack;
mod pairs;
mod panels;
#[cfg(test)]
mod tests;
mod tiled;
mod tokens;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod unpacked_avx512;
#[cfg(target_arch = "x86_64")]
mod widened_avx512;

use std::ops::Range;

use addends::PanelAddends;
pub(crate) use addends::{Addend, Addends};
use fetch::ChunkList;
pub(crate) use fetch::{CHUNK_STEPS, Fetch, Pieces, STREAM_STEPS, fetch_numbers, fetch_to_write};
use int8::{BytesKernel, BytesTile};
use kernel::{Chains, ManyPanels, PanelPairs};
pub(crate) use kernel::{SINGLE_ROWS, Tile, TileKernel, widened_len};
pub(crate) use operands::{Out, RightSide, RowRuns, Rows, Target, panel_bytes};
use operands::{Right, RightOn, panel_columns, part_panel_bytes, steps};
pub(crate) use pack::{Given, bytes_of, pack_columns, pack_int4, pack_layers, pack_rows, pack_step, unpack_row};
pub(crate) use panels::write_rows as write_panel_rows;
use tiled::{GRANULE_BLOCK_STEPS, NEAR_ROWS_MIN};
pub(crate) use tiled::{Low, Lows, PairSink, Paired};
pub(crate) use transpose::block as transpose_block;

use super::isa::{Arithmetic, Isa};
use super::packed::{LANES, PANEL, PackedRef};
use super::scratch::{taken_bytes, with_scratch};
use super::threads::{Pool, SharedMut};
use crate::{DType, Result, WeightStorage};

/// Whether the system lets this process use tiles.
#[cfg(target_arch = "x86_64")]
pub(crate) fn tiles_permitted() -> bool {
    amx::permitted()
}

/// Whether tiles are emulated.
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn emulated_tiles() -> bool {
    amx::emulator::stands_in()
}

/// Gives up what the kernels of this thread have set up in the processor; the next that needs it sets it up again.
pub(crate) fn release_thread() {
    #[cfg(target_arch = "x86_64")]
    amx::release();
}

/// Steps of the reduction (four bytes each) in a block of a product in chains: 128 KiB of a full panel, which stays in the second-level cache while all rows pass. Each block
/// reads and writes the result once, whose rows lie so far apart that they push each other out. A few rows gain as much by it: in blocks that stay in the first-level cache (64 steps) they
/// take 7 to 15% longer, for tiles end so much oftener (Zen 4, 8 to 48 rows).
const CHAIN_BLOCK_STEPS: usize = 512;
/// Steps of a block that stays in the first-level cache from when it is written until it is read: 16 KiB of a full panel.
const NEAR_BLOCK_STEPS: usize = 64;

/// Tasks that a product of few rows is split into for each thread, if it has so many panels.
const TASKS_PER_THREAD: usize = 4;

/// Fewer rows than this are not worth splitting over threads.
const SPLIT_ROWS_MIN: usize = 24;

/// Rows at most whose sums lie side by side from one block of the right side to the next.
const SUMS_ROWS_MAX: usize = 48;

/// Chunks that are fetched while a run of rows is computed, at most.
const CHUNKS_MAX: usize = 1024;

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

    /// `y = x·Wᵀ`, and what is added to it.
    ///
    /// # Errors
    /// Of this and the other products: if there is no memory to work in.
    pub(crate) fn forward(&self, x: Rows<'_>, w: PackedRef<'_>, y: Out, addends: &Addends<'_>) -> Result<()> {
        assert!(x.width == w.in_features && x.dtype == self.dtype && w.dtype == self.dtype);
        assert!(y.rows == x.rows && y.columns == w.out_features);
        let mut padded = None;
        let x = x.whole_steps(&mut padded)?;
        let mut block_steps = self.block_steps();
        if w.storage == WeightStorage::Dense
            && let TileKernel::Chains(chains @ Chains { many_panels: Some(many), .. }) = self.kernel
            && (1..=many.panels.len()).contains(&x.rows)
        {
            self.product_of_streams(&chains, many, x, w, &y, addends);
            return Ok(());
        }
        if w.storage != WeightStorage::Dense && x.rows < NEAR_ROWS_MIN {
            let of_bytes = match (self.kernel, w.storage) {
                (TileKernel::Chains(Chains { of_bytes, .. }), WeightStorage::Int8) => of_bytes,
                (TileKernel::Chains(Chains { of_int4, .. }), WeightStorage::Int4(_)) => of_int4,
                _ => None,
            };
            if let Some(kernel) = of_bytes.filter(|kernel| x.rows <= kernel.rows_max) {
                self.product_of_bytes(&kernel, x, &w, &y, addends);
                return Ok(());
            }
            if self.isa == Isa::Amx {
                // A matrix unit is done with few rows as soon as it has read what they are multiplied with: that should not leave the first-level cache. (Vectors take
                // 3 to 10% longer in such blocks.)
                block_steps = NEAR_BLOCK_STEPS;
            }
        }
        let (right, all) = (RightOn(self.isa, RightSide::Weights(w)), 0..x.rows);
        self.product((x, RowRuns::of(&all)), y, block_steps, right, addends)
    }

    /// Whether there is [`Matmul::forward_pairs`] of so many rows.
    pub(crate) fn has_forward_pairs(&self, rows: usize, w: &PackedRef<'_>) -> bool {
        matches!(self.kernel, TileKernel::Granules(_)) && self.has_pairs(rows, w)
    }

    /// `x·Wᵀ`, and what is added to it, whose bits are those of [`Matmul::forward`], for `sink`, each row of each pair of panels once, and into `kept`.
    pub(crate) fn forward_pairs(
        &self,
        x: Rows<'_>,
        w: PackedRef<'_>,
        addends: &Addends<'_>,
        paired: Paired,
        kept: Option<&Out>,
        sink: &PairSink<'_>,
    ) -> Result<()> {
        assert!(x.width == w.in_features && x.dtype == self.dtype && w.dtype == self.dtype);
        assert!(addends.fit(x.rows, w.out_features, self.dtype));
        assert!(kept.is_none_or(|kept| (kept.rows, kept.columns, kept.accumulate) == (x.rows, w.out_features, false)));
        let TileKernel::Granules(run) = self.kernel else { unreachable!("it was asked for") };
        let mut padded = None;
        let (x, all) = (x.whole_steps(&mut padded)?, 0..x.rows);
        let right = RightOn(self.isa, RightSide::Weights(w));
        self.pairs_of_granules(run, (x, RowRuns::of(&all)), &right, (w.out_features, paired), addends, kept, sink)
    }

    /// Whether `x·Wᵀ` is one that [`Matmul::single_rows`] computes, and what it must have in common with others: steps and vectors of columns.
    pub(crate) fn single_row(&self, x: &Rows<'_>, w: &PackedRef<'_>) -> Option<[usize; 2]> {
        let is_narrow = w.storage == WeightStorage::Dense && (1..=PANEL).contains(&w.out_features);
        let fits = x.rows == 1 && is_narrow && (x.width * x.dtype.size_bytes()).is_multiple_of(4);
        let has_kernel = matches!(self.kernel, TileKernel::Chains(Chains { many_panels: Some(_), .. }));
        (fits && has_kernel).then(|| [steps(x.width, x.dtype), w.out_features.div_ceil(LANES)])
    }

    /// `y = x·Wᵀ` of some rows, each with weights of its own, which have in common what [`Matmul::single_row`] answers; on this thread.
    pub(crate) fn single_rows(&self, products: &[(Rows<'_>, PackedRef<'_>, Out)]) {
        let TileKernel::Chains(Chains { many_panels: Some(many), .. }) = self.kernel else { unreachable!("it was asked for") };
        let tile = |(x, w, y): &(Rows<'_>, PackedRef<'_>, Out)| {
            assert!(
                self.single_row(x, w).is_some() && x.width == w.in_features && x.dtype == self.dtype && w.dtype == self.dtype
            );
            assert!(y.rows == 1 && y.columns == w.out_features && !y.accumulate);
            let right = RightSide::Weights(*w);
            let block = right.block(self.isa, 0, 0..right.steps(), &mut []);
            Tile {
                steps: right.steps(),
                a: x.bytes.as_ptr(),
                a_stride: x.stride,
                b: block.first,
                b_stride: block.stride,
                c: y.at(0, 0),
                c_stride: y.stride,
                columns: y.columns,
                accumulate: false,
                fetch: Fetch::Nothing,
            }
        };
        for products in products.chunks(SINGLE_ROWS) {
            // What is missing of the last is computed again.
            let tiles: [Tile; SINGLE_ROWS] = std::array::from_fn(|i| tile(&products[i.min(products.len() - 1)]));
            let vectors = tiles[0].columns.div_ceil(LANES);
            assert!(tiles.iter().all(|t| t.steps == tiles[0].steps && t.columns.div_ceil(LANES) == vectors));
            // SAFETY: rows and columns are in bounds by the assertions; who asks owns all results.
            unsafe { (many.single_rows)(vectors, &tiles) };
        }
    }

    /// `dx = dy·W` of these rows, and what is added to it. Others are left as they are.
    pub(crate) fn backward_input(
        &self,
        (dy, rows): (Rows<'_>, RowRuns<'_>),
        w: PackedRef<'_>,
        dx: Out,
        addends: &Addends<'_>,
    ) -> Result<()> {
        assert!(dy.width == w.out_features && dy.dtype == self.dtype && w.dtype == self.dtype);
        assert!(dx.rows == dy.rows && dx.columns == w.in_features);
        let mut padded = None;
        let dy = dy.whole_steps(&mut padded)?;
        self.product((dy, rows), dx, self.block_steps(), RightOn(self.isa, RightSide::Transposed(w)), addends)
    }

    /// `out` = or += `left·right`, for rows of whole steps, and blocks of the right side of `block_steps` steps; then what is added to it. Of some rows alone.
    fn product(
        &self,
        (left, rows): (Rows<'_>, RowRuns<'_>),
        out: Out,
        block_steps: usize,
        right: impl Right,
        addends: &Addends<'_>,
    ) -> Result<()> {
        assert!(addends.fit(out.rows, out.columns, self.dtype) && rows.end() <= left.rows);
        match self.kernel {
            TileKernel::Chains(chains) => {
                self.product_of_chains(&chains, (left, rows), &out, block_steps, &right, addends);
                Ok(())
            }
            TileKernel::Granules(run) => self.product_of_granules(run, (left, rows), &out, block_steps, &right, addends),
        }
    }

    /// Left sides as they lie.
    fn product_of_chains(
        &self,
        chains: &Chains,
        (left, all): (Rows<'_>, RowRuns<'_>),
        out: &Out,
        block_steps: usize,
        right: &impl Right,
        addends: &Addends<'_>,
    ) {
        if let Some((wide, pairs)) = self.pairs(chains, all.len(), out.columns) {
            return self.product_of_pairs((chains, wide, pairs), (left, all), out, block_steps, right, addends);
        }
        let num_steps = steps(left.width, left.dtype);
        self.over_panels(all.len(), out.columns, 1, |panel, rows| {
            let columns = panel_columns(panel, out.columns);
            let widening = chains.widening(rows.len()).filter(|_| columns == PANEL);
            let words = block_steps * columns.next_multiple_of(LANES);
            let wide_len = if widening.is_some() { widened_len(block_steps) } else { 0 };
            // What is fetched while a run of rows is computed: first what is added to it, then the right side that comes next. Few rows have a block of that
            // fetched by other means, and what is added to them while all blocks are computed.
            let are_few = widening.is_none() && matches!(chains.fetch(rows.len(), std::ptr::null()), Fetch::Next(..));
            let chunk_steps = if are_few { num_steps } else { block_steps.min(num_steps) };
            let chunks_max = chains.chunks(rows.len(), chunk_steps).min(CHUNKS_MAX);
            // In the result a few rows lie so far apart that they push each other out of the first-level cache.
            let parts = || all.parts(rows.clone());
            let first_row = parts().next().map_or(0, |part| part.start);
            let whole = first_row..first_row + rows.len();
            let is_one = parts().eq([whole.clone()]);
            let apart = rows.len() <= SUMS_ROWS_MAX && num_steps > block_steps && !out.accumulate && is_one;
            let sums_len = if apart { rows.len() * PANEL } else { 0 };
            let scratch_bytes =
                taken_bytes::<u32>(words) + taken_bytes::<usize>(chunks_max) + taken_bytes::<f32>(wide_len + sums_len);
            with_scratch(scratch_bytes + addends.scratch_bytes(), |mut arena| {
                let (scratch, chunks) = (arena.take(words), arena.take(chunks_max));
                let (wide, sums) = arena.take::<f32>(wide_len + sums_len).split_at_mut(wide_len);
                let sums = SharedMut::new(sums);
                let sums_of = |row: usize| match apart {
                    true => (sums.as_ptr().wrapping_add((row - first_row) * PANEL), PANEL),
                    false => (out.at(row, panel * PANEL), out.stride),
                };
                let mut added = PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena);
                let mut coming = ChunkList::new(chunks);
                if are_few {
                    coming.add_all(addends.read_for(&whole, panel));
                }
                for first in (0..num_steps).step_by(block_steps) {
                    let steps = first..(first + block_steps).min(num_steps);
                    let is_last = steps.end == num_steps;
                    let block = right.block(panel, steps.clone(), scratch);
                    // What comes next of the right side, as far as it is still to be fetched. Threads take panels in turns.
                    let next_panel = panel + self.pool.num_threads();
                    let mut ahead = right.coming((panel, next_panel), &steps, 0..num_steps, block_steps, out.columns);
                    let mut near = Fetch::Nothing;
                    if block.is_streamed && widening.is_none() {
                        let next = if ahead.count > 0 { std::ptr::without_provenance(ahead.next.start) } else { block.first };
                        near = match chains.fetch(rows.len(), next) {
                            Fetch::Next(next, lines, _) => Fetch::Next(next, lines, coming.share(&steps, num_steps)),
                            near => near,
                        };
                    }
                    let mut narrow = Some(block.first);
                    let mut product = |rows: Range<usize>| {
                        let mut fetch = near;
                        if near == Fetch::Nothing && chunks_max > 0 {
                            coming.clear(chains.chunks(rows.len(), steps.len()));
                            if is_last {
                                coming.add_all(addends.read_for(&rows, panel));
                            }
                            ahead = coming.add_pieces(std::mem::take(&mut ahead));
                            fetch = coming.fetch();
                        }
                        let (c, c_stride) = sums_of(rows.start);
                        let tile = Tile {
                            steps: steps.len(),
                            a: left.bytes[rows.start * left.stride + first * 4..].as_ptr(),
                            a_stride: left.stride,
                            b: block.first,
                            b_stride: block.stride,
                            c,
                            c_stride,
                            columns,
                            accumulate: out.accumulate || first > 0,
                            fetch,
                        };
                        // SAFETY: rows and columns are in bounds by the assertions of the callers; tasks own disjoint parts of the result.
                        unsafe {
                            match widening {
                                Some(run) => run(rows.len(), narrow.take(), &Tile { b: wide.as_mut_ptr().cast(), ..tile }),
                                None => chains.block(rows.len(), &tile),
                            }
                        }
                    };
                    if !is_last {
                        parts().for_each(&mut product);
                        continue;
                    }
                    let mut last = |rows: Range<usize>| {
                        product(rows.clone());
                        for row in rows.clone().filter(|_| apart) {
                            // SAFETY: as above, and the sums are this task's.
                            unsafe { out.at(row, panel * PANEL).copy_from_nonoverlapping(sums_of(row).0, columns) };
                        }
                        // SAFETY: as above.
                        unsafe { added.add(out, rows) };
                    };
                    parts().for_each(|part| addends.runs(part, &mut last));
                }
            });
        });
    }

    /// A few rows with weights that come from memory, as they lie, in several streams.
    fn product_of_streams(
        &self,
        chains: &Chains,
        many: ManyPanels,
        x: Rows<'_>,
        w: PackedRef<'_>,
        y: &Out,
        addends: &Addends<'_>,
    ) {
        let right = RightSide::Weights(w);
        let panels = y.columns.div_ceil(PANEL);
        let shared = panels / (TASKS_PER_THREAD * self.pool.num_threads());
        let at_once = (1 << shared.max(1).ilog2()).min(many.panels[x.rows - 1]);
        self.pool.run(panels.div_ceil(at_once), &|task| {
            let group = task * at_once..panels.min((task + 1) * at_once);
            let are_whole = group.len() == at_once && group.end * PANEL <= y.columns;
            let tile_of = |panel: usize| {
                let block = right.block(self.isa, panel, 0..right.steps(), &mut []);
                Tile {
                    steps: right.steps(),
                    a: x.bytes.as_ptr(),
                    a_stride: x.stride,
                    b: block.first,
                    b_stride: block.stride,
                    c: y.at(0, panel * PANEL),
                    c_stride: y.stride,
                    columns: panel_columns(panel, y.columns),
                    accumulate: y.accumulate,
                    fetch: Fetch::Nothing,
                }
            };
            // SAFETY: rows and columns are in bounds by the assertions of the caller; tasks own disjoint parts of the result.
            unsafe {
                if are_whole {
                    (many.run)(x.rows, at_once, panel_bytes(&w), &tile_of(group.start));
                } else {
                    group.clone().for_each(|panel| chains.block(x.rows, &tile_of(panel)));
                }
            }
            for panel in group {
                with_scratch(addends.scratch_bytes(), |mut arena| {
                    let mut added = PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena);
                    // SAFETY: as above.
                    unsafe { added.add(y, 0..x.rows) };
                });
            }
        });
    }

    /// A few rows with weights in bytes, or of four bits.
    fn product_of_bytes(&self, kernel: &BytesKernel, x: Rows<'_>, w: &PackedRef<'_>, y: &Out, addends: &Addends<'_>) {
        self.over_panels(x.rows, y.columns, kernel.rows_max, |panel, rows| {
            let columns = panel_columns(panel, y.columns);
            let width = columns.next_multiple_of(LANES);
            let bytes = &w.bytes[panel * panel_bytes(w)..][..part_panel_bytes(w.storage, w.dtype, w.in_features, width)];
            let group = match w.storage {
                WeightStorage::Int4(group) => group.inputs(),
                WeightStorage::Int8 | WeightStorage::Dense => int8::BLOCK_INPUTS,
            };
            // SAFETY: rows and columns are in bounds by the assertions of the caller; tasks own disjoint parts of the result.
            unsafe {
                let tile = BytesTile {
                    steps: steps(w.in_features, w.dtype),
                    a: x.bytes.as_ptr().add(rows.start * x.stride),
                    a_stride: x.stride,
                    b: bytes.as_ptr(),
                    width,
                    group,
                    c: y.at(rows.start, panel * PANEL),
                    c_stride: y.stride,
                    columns,
                    accumulate: y.accumulate,
                };
                (kernel.run)(rows.len(), &tile);
            }
            with_scratch(addends.scratch_bytes(), |mut arena| {
                let mut added = PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena);
                // SAFETY: as above.
                unsafe { added.add(y, rows) };
            });
        });
    }

    /// Runs `body(panel, rows)` over all panels of `columns`, and runs of whole `tile_rows` rows if there are too few panels to share.
    fn over_panels(&self, rows: usize, columns: usize, tile_rows: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        if rows == 0 {
            return;
        }
        let panels = columns.div_ceil(PANEL);
        let threads = self.pool.num_threads();
        let wanted = (TASKS_PER_THREAD * threads).div_ceil(panels);
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

/// Bytes that products on `threads` threads take beside their operands, of which the left side has `rows` rows of `width` numbers.
pub(crate) fn scratch_bytes(kernel: &TileKernel, rows: usize, width: usize, dtype: DType, threads: usize) -> usize {
    let (left, of_a_thread) = match kernel {
        TileKernel::Chains(chains) => {
            let wide_len = if chains.widening(rows).is_some() { widened_len(CHAIN_BLOCK_STEPS) } else { 0 };
            let of_a_panel = (CHAIN_BLOCK_STEPS * PANEL + wide_len) * size_of::<f32>() + addends::SCRATCH_BYTES_MAX;
            let of_a_pair = |pairs: PanelPairs| 2 * of_a_panel + (pairs.kept_len)(CHAIN_BLOCK_STEPS) * size_of::<f32>();
            (0, chains.pairs(rows).map_or(of_a_panel, of_a_pair))
        }
        TileKernel::Granules(_) => {
            (tiled::left_bytes(rows, width), tiled::panel_scratch_bytes(rows) + addends::SCRATCH_BYTES_MAX)
        }
    };
    // Where many adapters share a batch, each thread multiplies for one of its own.
    threads
        * (left.max(tokens::panels_bytes(width, dtype))
            + of_a_thread
            + CHUNKS_MAX * size_of::<usize>()
            + SUMS_ROWS_MAX * PANEL * size_of::<f32>())
}
