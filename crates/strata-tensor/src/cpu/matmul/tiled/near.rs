//! Many rows and a whole panel on a matrix unit: sums stay in tiles until they are whole.
//!
//! A block of the right side, 32 KiB, stays in the first-level cache while tiles of rows pass, sixteen rows at a time with all four vectors of its columns. What a tile of the left side and its sums
//! bring from the second-level cache, 5 KiB in 32 products and 4 KiB back, lies side by side, so that a processor sees it coming: sums that lie as in a row-major matrix take a sixth longer. Behind the last
//! block a few rows lie as in the result, in the first-level cache, until what is added to them is; then they are written once. A large result goes past the caches, where the lines that are written would be
//! read first.

use std::ops::Range;

use super::{PanelProduct, fill_up};
use crate::cpu::isa::Isa;
use crate::cpu::matmul::Matmul;
use crate::cpu::matmul::addends::{Addends, PanelAddends};
use crate::cpu::matmul::fetch::fetch_to_write;
use crate::cpu::matmul::granules::{ROWS_MAX, STEPS, TILE_ROWS};
use crate::cpu::matmul::operands::{Right, panel_columns};
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::scratch::{Arena, taken_bytes};

/// Numbers of a tile of sums: `[4 vectors][16 rows][16]`.
const SUMS: usize = TILE_ROWS * PANEL;
const LINE_BYTES: usize = 64;
/// Lines that are fetched during a granule, at most.
const LINES_EACH_MAX: usize = 16;
/// Bytes of a result that would not stay in a second-level cache.
const STREAMED_BYTES_MIN: usize = 8 << 20;

/// Operands of sixteen rows and a whole panel over whole granules.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Some of it is for matrix units.
pub(in crate::cpu::matmul) struct NearTile {
    /// Granules of the reduction, at least one.
    pub granules: usize,
    /// Left side: `[granules][16 rows][64 bytes]`.
    pub a: *const u8,
    /// Right side: each step has 64 words.
    pub b: *const u8,
    /// Bytes from one step to the next.
    pub b_step: usize,
    /// A tile of sums that the product is added to: a null pointer for zeros.
    pub from: *const f32,
    /// Where the result goes, which may be the same.
    pub to: *mut f32,
    /// Elements from one of its rows to the next.
    pub to_row: usize,
    /// Elements from one of its vectors to the next.
    pub to_vector: usize,
    /// What is fetched into the second-level cache meanwhile: from here on, so many lines during each granule.
    pub coming: *const u8,
    pub coming_each: usize,
    /// What is fetched into the first: a tile of sums that comes next.
    pub next_sums: *const f32,
}

/// Adds the product to what there is.
///
/// # Safety
/// All operands must be readable, and the result writable. The machine must have the instructions.
pub(in crate::cpu::matmul) type NearFn = unsafe fn(tile: &NearTile);

/// The kernel of an instruction set, if it has one.
pub(super) fn kernel(isa: Isa) -> Option<NearFn> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => Some(crate::cpu::matmul::amx::near),
        _ => None,
    }
}

/// What a panel of `rows` rows takes of an arena, with blocks of so many steps.
pub(super) fn scratch_bytes(rows: usize, block_steps: usize) -> usize {
    taken_bytes::<f32>(rows.div_ceil(TILE_ROWS) * SUMS)
        + taken_bytes::<f32>(ROWS_MAX * PANEL)
        + 2 * taken_bytes::<u32>(block_steps * PANEL)
}

impl<R: Right> PanelProduct<'_, R> {
    /// One panel for rows `part` of the tiles, with what is added to it. `next_panel` is the one that this thread comes to then, if there is one.
    ///
    /// # Safety
    /// The result is in bounds, and nobody else has this part of it; the left side was copied, with room for whole tiles.
    pub(super) unsafe fn near_panel(
        &self,
        (matmul, run): (&Matmul<'_>, NearFn),
        (panel, next_panel): (usize, usize),
        part: Range<usize>,
        addends: Option<&Addends<'_>>,
        mut arena: Arena<'_>,
    ) {
        let PanelProduct { left, out, accumulate, block_steps, right, .. } = *self;
        let block_words = block_steps * PANEL;
        let (written, filled_up) = (arena.take(block_words), arena.take(block_words));
        let sums = arena.take::<f32>(part.len().div_ceil(TILE_ROWS) * SUMS);
        let side = arena.take::<f32>(ROWS_MAX * PANEL);
        let mut added = addends.map(|addends| PanelAddends::new(addends, &matmul.kernel, matmul.isa, panel, &mut arena));
        let is_streamed =
            addends.is_some() && !out.stays_near && out.rows * out.columns * size_of::<f32>() >= STREAMED_BYTES_MIN;
        let is_fetched = !is_streamed && !out.stays_near && !accumulate;
        for first in left.steps.clone().step_by(block_steps) {
            let steps = first..(first + block_steps).min(left.steps.end);
            let (is_first, is_last) = (first == left.steps.start, steps.end == left.steps.end);
            let block = right.block(panel, steps.clone(), written);
            let (mut b, mut b_step) = (block.first, block.stride);
            if !steps.len().is_multiple_of(STEPS) {
                // SAFETY: the block has these steps.
                unsafe { fill_up(&block, steps.len(), PANEL, filled_up) };
                (b, b_step) = (filled_up.as_ptr().cast(), PANEL * 4);
            }
            let mut ahead = self.coming(panel, next_panel, &steps);
            let granules = steps.len().div_ceil(STEPS);
            let lines_max = ahead.lines_each(part.len().div_ceil(TILE_ROWS)).min(LINES_EACH_MAX * granules);
            let granules_before = (first - left.steps.start) / STEPS;
            for places in part.clone().step_by(ROWS_MAX).map(|first| first..(first + ROWS_MAX).min(part.end)) {
                let sums = &mut sums[(places.start - part.start) / TILE_ROWS * SUMS..];
                if is_first && accumulate {
                    // SAFETY: rows of the result, which are this task's.
                    unsafe { self.fill_in(panel, places.clone(), sums) };
                }
                for (i, sums) in sums.chunks_exact_mut(SUMS).take(places.len().div_ceil(TILE_ROWS)).enumerate() {
                    let sums = sums.as_mut_ptr();
                    let (coming, lines) = ahead.next_lines(lines_max);
                    if is_fetched {
                        // Of the rows of the tile as many during each block.
                        let before = |step: usize| TILE_ROWS * (step - left.steps.start) / left.steps.len();
                        let first = places.start + i * TILE_ROWS;
                        let of_block = first + before(steps.start)..(first + before(steps.end)).min(places.end);
                        left.rows.parts(of_block).flatten().for_each(|row| fetch_to_write(out.at(row, panel * PANEL), PANEL));
                    }
                    // SAFETY: the tiles have these rows and granules, the block its steps, the side its rows.
                    unsafe {
                        let to = match is_last {
                            true => (side[i * SUMS..].as_mut_ptr(), PANEL, LANES),
                            false => (sums, LANES, TILE_ROWS * LANES),
                        };
                        run(&NearTile {
                            granules,
                            a: left.first.add((places.start / TILE_ROWS + i) * left.tile + granules_before * left.granule),
                            b,
                            b_step,
                            from: if is_first && !accumulate { std::ptr::null() } else { sums },
                            to: to.0,
                            to_row: to.1,
                            to_vector: to.2,
                            coming: std::ptr::without_provenance(coming),
                            coming_each: lines.div_ceil(granules),
                            next_sums: sums.wrapping_add(SUMS),
                        });
                    }
                }
                if !is_last {
                    continue;
                }
                // SAFETY: the caller's promise.
                unsafe { self.finish(panel, places, side, added.as_mut(), is_streamed) };
            }
        }
        if is_streamed {
            written_past_caches();
        }
    }

    /// Adds to rows on the side, `[rows][64]`, what is added to them, and writes them where they belong.
    ///
    /// # Safety
    /// The result is in bounds, and nobody else has these rows of the panel.
    unsafe fn finish(
        &self,
        panel: usize,
        places: Range<usize>,
        mut side: &mut [f32],
        mut added: Option<&mut PanelAddends<'_, '_>>,
        is_streamed: bool,
    ) {
        let (out, first_column) = (self.out, panel * PANEL);
        let columns = panel_columns(panel, out.columns);
        for rows in self.left.rows.parts(places) {
            let sums = side.split_off_mut(..rows.len() * PANEL).expect("there is room for all places");
            if let Some(added) = &mut added {
                let on_the_side = out.on_the_side(sums, PANEL, (rows.start, first_column));
                // SAFETY: these rows lie there.
                unsafe { added.add(&on_the_side, rows.clone()) };
            }
            for (row, sums) in rows.zip(sums.chunks_exact(PANEL)) {
                // SAFETY: the caller's promise.
                unsafe { write(&sums[..columns], out.at(row, first_column), is_streamed) };
            }
        }
    }

    /// What there is of the result, into tiles of sums.
    ///
    /// # Safety
    /// The rows are in bounds, and nobody writes them.
    unsafe fn fill_in(&self, panel: usize, places: Range<usize>, sums: &mut [f32]) {
        let columns = panel_columns(panel, self.out.columns);
        for (place, row) in self.left.rows.parts(places).flatten().enumerate() {
            let (tile, in_tile) = (place / TILE_ROWS, place % TILE_ROWS);
            // SAFETY: the caller's promise.
            let there = unsafe { std::slice::from_raw_parts(self.out.at(row, panel * PANEL), columns) };
            for (vector, there) in there.chunks(LANES).enumerate() {
                sums[tile * SUMS + (vector * TILE_ROWS + in_tile) * LANES..][..there.len()].copy_from_slice(there);
            }
        }
    }
}

/// Writes numbers where they belong, past the caches if they are a whole panel's and lie in whole lines.
///
/// # Safety
/// There is room for them, which is nobody else's.
unsafe fn write(from: &[f32], to: *mut f32, is_streamed: bool) {
    // SAFETY: the caller's promise; who has tiles has AVX-512.
    match is_streamed && from.len() == PANEL && to.addr().is_multiple_of(LINE_BYTES) {
        #[cfg(target_arch = "x86_64")]
        true => unsafe { stream(from, to) },
        false if let Ok(from) = <&[f32; PANEL]>::try_from(from) => unsafe { to.cast::<[f32; PANEL]>().write_unaligned(*from) },
        _ => unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) },
    }
}

/// # Safety
/// As [`write`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream(from: &[f32], to: *mut f32) {
    use std::arch::x86_64::*;
    for (i, line) in from.as_chunks::<LANES>().0.iter().enumerate() {
        // SAFETY: the caller's promise; a line of its own.
        unsafe { _mm512_stream_ps(to.add(i * LANES), _mm512_loadu_ps(line.as_ptr())) };
    }
}

/// Has other threads see what was written past the caches before whatever this one does next.
fn written_past_caches() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use crate::cpu::isa::Arithmetic;
    use crate::cpu::matmul::operands::RightOn;
    use crate::cpu::matmul::tests::{all, into, packed, values};
    use crate::cpu::matmul::{Addend, Addends, Matmul, RightSide, RowRuns};
    use crate::cpu::threads::Pool;
    use crate::{DType, Isa, Numerics};

    /// Products of many rows with a bias and a low-rank product, on a matrix unit and with vectors: each of one block and of several, of steps that are copied at once and of more, of rows that
    /// one thread has and that all share, and of a result that goes past the caches.
    #[test]
    fn a_matrix_unit_has_the_bits_of_vectors() {
        if !Isa::Amx.is_available() {
            return;
        }
        let rank = 7;
        let shapes = [
            (64, 32, 64),
            (300, 3000, 40),
            (100, 100, 200),
            (130, 1040, 200),
            (700, 6000, 130),
            (1100, 32, 2100),
            (2000, 40, 1100),
        ];
        for (m, k, n) in shapes {
            let one = Pool::new(1);
            let (w, b) = (packed::<bf16>(&one, &values(1, n * k), k, n), packed::<bf16>(&one, &values(2, n * rank), rank, n));
            let (x, low) = (values::<bf16>(3, m * k), values::<bf16>(4, 40 * rank));
            let bias: Vec<f32> = (0..n).map(|i| i as f32 * 0.1).collect();
            // Every row, and some: a run of few, one from within a tile to within another, and the last.
            let (every, some) = (0..m, [0..3, 20..m - 5, m - 1..m]);
            for runs in [std::slice::from_ref(&every), &some] {
                for accumulate in [false, true] {
                    let product = |isa: Isa, threads: usize| {
                        let pool = Pool::new(threads);
                        let matmul = Matmul::new(&pool, Arithmetic { isa, numerics: Numerics::Portable }, DType::BF16);
                        let mut padded = None;
                        let left = all(&low, rank).whole_steps(&mut padded).unwrap();
                        let addend = Addend { first_row: 10, first_column: 0, left, right: RightSide::Weights(b.layer(0)) };
                        let addends = Addends::new(Some(&bias), vec![addend]);
                        let mut y = vec![0.5; m * n];
                        let right = RightOn(isa, RightSide::Weights(w.layer(0)));
                        let rows = (all(&x, k), RowRuns::new(runs));
                        matmul.product(rows, into(&mut y, n, accumulate), matmul.block_steps(), right, &addends).unwrap();
                        y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let expected = product(Isa::Avx512, 1);
                    for threads in [1, 2, 3] {
                        let what =
                            format!("m={m} k={k} n={n}, {} runs, accumulate {accumulate}, {threads} threads", runs.len());
                        assert!(product(Isa::Amx, threads) == expected, "{what}");
                    }
                }
            }
        }
    }
}
