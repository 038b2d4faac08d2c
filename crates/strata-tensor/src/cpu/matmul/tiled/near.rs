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
use crate::cpu::matmul::granules::{ROWS_MAX, STEPS, TILE_ROWS};
use crate::cpu::matmul::operands::{Out, Right, panel_columns};
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::scratch::{Arena, taken_bytes};

/// Numbers of a tile of sums: `[4 vectors][16 rows][16]`.
pub(super) const SUMS: usize = TILE_ROWS * PANEL;
const LINE_BYTES: usize = 64;
/// Lines that are fetched during a granule, at most.
const LINES_EACH_MAX: usize = 16;
/// Bytes of a result that would not stay in a second-level cache.
const STREAMED_BYTES_MIN: usize = 8 << 20;

/// Operands of tiles of sixteen rows, one after another, and a whole panel over whole granules. Distances are in bytes.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Some of it is for matrix units.
pub(in crate::cpu::matmul) struct NearTiles {
    /// How many, at least one.
    pub tiles: usize,
    /// Granules of the reduction, at least one.
    pub granules: usize,
    /// Left side of the first tile: `[granules][16 rows][64 bytes]`.
    pub a: *const u8,
    /// From one tile to the next.
    pub a_tile: usize,
    /// That of the last tile.
    pub last_a: *const u8,
    /// Right side of all: each step has 64 words.
    pub b: *const u8,
    /// From one step to the next.
    pub b_step: usize,
    /// Sums that the product is added to, tile after tile: a null pointer for zeros.
    pub from: *const f32,
    /// Where the result goes, which may be the same.
    pub to: *mut f32,
    /// From one of its tiles to the next.
    pub to_tile: usize,
    /// From one of its rows to the next.
    pub to_row: usize,
    /// From one of its vectors to the next.
    pub to_vector: usize,
    /// The sums of these tiles, each of which is fetched into the first-level cache a tile ahead.
    pub sums: *const f32,
    /// What is fetched into the second-level cache meanwhile: from here on, so many lines during each granule.
    pub coming: *const u8,
    pub coming_each: usize,
    /// Rows of the result that are fetched for writing: where the first is, how many before each tile, from one to the next, and from the first of a tile to that of the next.
    pub written: *const f32,
    pub written_rows: usize,
    pub written_row: usize,
    pub written_tile: usize,
}

/// Adds the products to what there is.
///
/// # Safety
/// All operands must be readable, and the result writable. The machine must have the instructions.
pub(in crate::cpu::matmul) type NearFn = unsafe fn(tiles: NearTiles);

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
        let (block_words, num_tiles) = (block_steps * PANEL, part.len().div_ceil(TILE_ROWS));
        let (written, filled_up) = (arena.take(block_words), arena.take(block_words));
        // Sums are there from the parts of the reduction before this one, and stay for those behind it.
        let kept = left.sums.map(|(kept, first)| {
            assert_eq!(part, 0..left.rows.len());
            let first = first + panel * num_tiles * SUMS;
            // SAFETY: nobody else has this panel of these rows.
            unsafe { kept.part(first..first + num_tiles * SUMS) }
        });
        let (is_kept, goes_on, is_done) = (kept.is_some(), kept.is_some() && left.steps.start > 0, addends.is_some());
        let sums = kept.unwrap_or_else(|| arena.take::<f32>(num_tiles * SUMS));
        let side = arena.take::<f32>(ROWS_MAX * PANEL);
        let mut added = addends.map(|addends| PanelAddends::new(addends, &matmul.kernel, matmul.isa, panel, &mut arena));
        let is_streamed = addends.is_some() && !out.stays_near && goes_past_caches(out);
        let mut runs = left.rows.parts(part.clone());
        let first_row = runs.next().expect("there are rows").start;
        let result = out.at(first_row, panel * PANEL);
        let in_place = out.stays_near;
        assert!(!in_place || is_done && !accumulate && runs.next().is_none(), "a result on the side is made whole");
        let is_near = in_place || accumulate && !is_kept;
        let is_fetched = (is_done || !is_kept) && !is_streamed && !is_near && runs.next().is_none();
        drop(runs);
        let tile = |tile: usize, granules_before: usize| {
            let at = (part.start / TILE_ROWS + tile) * left.tile + granules_before * left.granule;
            left.first.wrapping_add(at)
        };
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
            let granules = steps.len().div_ceil(STEPS);
            let granules_before = (first - left.steps.start) / STEPS;
            let mut ahead = self.coming(panel, next_panel, &steps);
            let coming_each = ahead.lines_each(num_tiles).div_ceil(granules).min(LINES_EACH_MAX);
            // Of the rows of a tile as many during each block.
            let written_before = |step: usize| TILE_ROWS * (step - left.steps.start) / left.steps.len();
            let written_rows = if is_fetched { written_before(steps.end) - written_before(steps.start) } else { 0 };
            if is_first && accumulate && !goes_on {
                // SAFETY: rows of the result, which are this task's.
                unsafe { self.fill_in(panel, part.clone(), sums) };
            }
            let of_block = |tiles: Range<usize>, sums: &mut [f32]| NearTiles {
                tiles: tiles.len(),
                granules,
                a: tile(tiles.start, granules_before),
                a_tile: left.tile,
                last_a: tile(tiles.end - 1, granules_before),
                b,
                b_step,
                from: if is_first && !accumulate { std::ptr::null() } else { sums.as_ptr() },
                to: sums.as_mut_ptr(),
                to_tile: SUMS * size_of::<f32>(),
                to_row: LANES * size_of::<f32>(),
                to_vector: TILE_ROWS * LANES * size_of::<f32>(),
                sums: sums.as_ptr(),
                coming: std::ptr::null(),
                coming_each: 0,
                written: result.wrapping_add((tiles.start * TILE_ROWS + written_before(steps.start)) * out.stride),
                written_rows,
                written_row: out.stride * size_of::<f32>(),
                written_tile: TILE_ROWS * out.stride * size_of::<f32>(),
            };
            // The last block's are finished while they are in the first-level cache.
            let is_finished = is_last && (is_done || !is_kept);
            let at_once = if is_finished { ROWS_MAX / TILE_ROWS } else { num_tiles };
            for tiles in (0..num_tiles).step_by(at_once).map(|first| first..(first + at_once).min(num_tiles)) {
                let mut next = tiles.start;
                while next < tiles.end {
                    let (coming, count) = ahead.next_tiles(tiles.end - next, granules * coming_each);
                    let mut these = of_block(next..next + count, &mut sums[next * SUMS..(next + count) * SUMS]);
                    if let Some(coming) = coming {
                        (these.coming, these.coming_each) = (std::ptr::without_provenance(coming), coming_each);
                    }
                    if is_finished {
                        (these.to, these.to_row) = match in_place {
                            true => (out.at(first_row + next * TILE_ROWS, panel * PANEL), out.stride * size_of::<f32>()),
                            false => (side[(next - tiles.start) * SUMS..].as_mut_ptr(), PANEL * size_of::<f32>()),
                        };
                        (these.to_tile, these.to_vector) = (TILE_ROWS * these.to_row, LANES * size_of::<f32>());
                    }
                    // SAFETY: the tiles have these rows and granules, the block its steps, the side its rows.
                    unsafe { run(these) };
                    next += count;
                }
                if is_finished {
                    let places = part.start + tiles.start * TILE_ROWS..(part.start + tiles.end * TILE_ROWS).min(part.end);
                    // SAFETY: the caller's promise.
                    match &mut added {
                        Some(added) if in_place => unsafe { added.add(out, left.rows.parts(places).next().expect("one run")) },
                        added => unsafe { self.finish(panel, places, side, added.as_mut(), is_streamed) },
                    }
                }
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

/// Whether a result would not stay in a second-level cache.
fn goes_past_caches(out: &Out) -> bool {
    out.rows * out.columns * size_of::<f32>() >= STREAMED_BYTES_MIN
}

/// Writes pairs of panels of rows from `first_row` on where they belong.
///
/// # Safety
/// They are in bounds, and nobody else's.
pub(super) unsafe fn keep(sums: &[[f32; 2 * PANEL]], out: &Out, first_row: usize, panels: [usize; 2]) {
    let is_streamed = goes_past_caches(out);
    for (row, sums) in (first_row..).zip(sums) {
        for (panel, sums) in panels.into_iter().zip(sums.chunks_exact(PANEL)) {
            // SAFETY: the caller's promise.
            unsafe { write(sums, out.at(row, panel * PANEL), is_streamed) };
        }
    }
    if is_streamed {
        written_past_caches();
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
    use std::ops::Range;

    use half::bf16;

    use super::super::{SUMS_BYTES_MAX, step_ranges, sums_of_chunk};
    use crate::cpu::isa::Arithmetic;
    use crate::cpu::matmul::operands::RightOn;
    use crate::cpu::matmul::tests::{all, into, packed, values};
    use crate::cpu::matmul::{Addend, Addends, Matmul, RightSide, RowRuns};
    use crate::cpu::packed::PackedStack;
    use crate::cpu::threads::Pool;
    use crate::{DType, Isa, Numerics};

    /// A product of rows `runs` with a bias and a low-rank product.
    struct Case {
        shape: [usize; 3],
        w: PackedStack,
        b: PackedStack,
        x: Vec<bf16>,
        low: Vec<bf16>,
        bias: Vec<f32>,
    }

    impl Case {
        const RANK: usize = 7;

        fn new(shape: [usize; 3]) -> Self {
            let ([m, k, n], rank, one) = (shape, Self::RANK, Pool::new(1));
            Case {
                shape,
                w: packed::<bf16>(&one, &values(1, n * k), k, n),
                b: packed::<bf16>(&one, &values(2, n * rank), rank, n),
                x: values(3, m * k),
                low: values(4, 40 * rank),
                bias: (0..n).map(|i| i as f32 * 0.1).collect(),
            }
        }

        fn bits(&self, isa: Isa, threads: usize, runs: &[Range<usize>], accumulate: bool) -> Vec<u32> {
            let [m, k, n] = self.shape;
            let pool = Pool::new(threads);
            let matmul = Matmul::new(&pool, Arithmetic { isa, numerics: Numerics::Portable }, DType::BF16);
            let mut padded = None;
            let left = all(&self.low, Self::RANK).whole_steps(&mut padded).unwrap();
            let addend = Addend { first_row: 10, first_column: 0, left, right: RightSide::Weights(self.b.layer(0)) };
            let addends = Addends::new(Some(&self.bias), vec![addend]);
            let mut y = vec![0.5; m * n];
            let right = RightOn(isa, RightSide::Weights(self.w.layer(0)));
            let rows = (all(&self.x, k), RowRuns::new(runs));
            matmul.product(rows, into(&mut y, n, accumulate), matmul.block_steps(), right, &addends).unwrap();
            y.into_iter().map(f32::to_bits).collect()
        }
    }

    /// Each of one block and of several, of steps that are copied at once and of more, of rows that one thread has and that all share, and of a result that goes past the caches.
    #[test]
    fn a_matrix_unit_has_the_bits_of_vectors() {
        if !Isa::Amx.is_available() {
            return;
        }
        let shapes = [
            [64, 32, 64],
            [90, 90, 64],
            [300, 3000, 40],
            [100, 100, 200],
            [130, 1040, 200],
            [700, 6000, 130],
            [1100, 32, 2100],
            [2000, 40, 1100],
        ];
        for shape in shapes {
            let (case, m) = (Case::new(shape), shape[0]);
            // Every row, and some: a run of few, one from within a tile to within another, and the last.
            let (every, some) = (0..m, [0..3, 20..m - 5, m - 1..m]);
            for runs in [std::slice::from_ref(&every), &some] {
                for accumulate in [false, true] {
                    let expected = case.bits(Isa::Avx512, 1, runs, accumulate);
                    for threads in [1, 2, 3] {
                        let what = format!("{shape:?}, {} runs, accumulate {accumulate}, {threads} threads", runs.len());
                        assert!(case.bits(Isa::Amx, threads, runs, accumulate) == expected, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_whose_sums_have_no_room_together_come_in_turns() {
        if !Isa::Amx.is_available() {
            return;
        }
        let (case, rows) = (Case::new([560, 1540, 2000]), 0..560);
        let pool = Pool::new(1);
        let own = Matmul::new(&pool, Isa::Amx.into(), DType::BF16).own_rows(560, 770, 32, true).expect("there are enough");
        // Two parts of the reduction of two chunks of rows, of which the sums of one have room.
        assert!(step_ranges(own.rows, 770, own.bytes_max).count() == 2 && rows.len().div_ceil(own.rows) == 2);
        assert!(own.keeps_sums && 2 * sums_of_chunk(own.rows, 32) * 4 > SUMS_BYTES_MAX);
        let runs = std::slice::from_ref(&rows);
        assert!(case.bits(Isa::Amx, 1, runs, false) == case.bits(Isa::Avx512, 1, runs, false));
    }
}
