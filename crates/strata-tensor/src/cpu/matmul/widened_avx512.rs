//! The chains of [`chains`](super::chains) for bf16 with AVX-512 where the processor has no dot products of bf16, or slow ones: multiply-adds of numbers widened to f32.
//!
//! Roofline (Intel's processors without matrix units): the two multiply-adds of a cycle go through the two ports that shifts and masks also take, so what is widened is paid for in products. A
//! line of each row of the left side is widened beside the tile, while the line before it is computed with: 2% of the operations. The right side is widened in registers, once for a tile: 8
//! operations beside 48 multiply-adds of six rows. Where many tiles read it, the first of them writes what it widened, and the others compute with that (`wide`); where few do,
//! the writing takes longer than the operations that it saves (16 rows: 240 GFLOP/s, and 275 in pairs; 48 rows: 330 and 295). Up to thirty rows of a left side
//! that is widened once for all panels and lies step by step, one row's number beside the next row's, were tried in tiles of sixteen rows by one vector and of fourteen by two, which widen least: in a loop
//! that does nothing else they run at 91% of the limit from a cache, but in products they are as fast as pairs of 16 rows and slower than those of 12 (`docs/kernel-notes.md`).
//!
//! A chain adds the first number of a pair and then the second, whichever way: the bits are the same.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::chains_avx512::{
    CHUNKS, Coming, NEXT_ONE, NEXT_TWO, NOTHING, OWN, ROWS_MAX, STREAM, few_rows, last_mask, tile_shapes, tiles_of_column,
};
use super::fetch::{Fetch, Lines};
use super::kernel::{ManyPanels, SINGLE_AHEAD_BYTES, SINGLE_ROWS, SingleAddend, Tile, VECTORS_MAX, WIDE_LINES};
use crate::cpu::packed::{LANES, PANEL};

/// Steps of the left side that are widened at a time, while those before them are computed with: a line of each row.
const LEFT_STEPS: usize = 16;
/// Of a row: the first numbers of the pairs, and the second.
type LeftSteps = [[f32; LEFT_STEPS]; 2];

/// Widens `steps` steps, at most [`LEFT_STEPS`], of a row of the left side.
///
/// # Safety
/// They must be readable, and `to` writable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn widen_left(from: *const u8, steps: usize, to: *mut LeftSteps) {
    let mask = if steps < LEFT_STEPS { (1 << steps) - 1 } else { !0 };
    // SAFETY: the caller's promise; a masked lane is not touched.
    unsafe {
        let pairs = _mm512_maskz_loadu_epi32(mask, from.cast());
        _mm512_storeu_si512(to.cast(), _mm512_slli_epi32::<16>(pairs));
        _mm512_storeu_si512(to.cast::<f32>().add(LEFT_STEPS).cast(), _mm512_and_si512(pairs, high_halves()));
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn high_halves() -> __m512i {
    _mm512_set1_epi32(0xffff_0000_u32 as i32)
}

/// Right sides of a tile. Pairs of bf16.
const PAIRS: u8 = 0;
/// Pairs, which the tile writes widened for others.
const WIDENING: u8 = 1;
/// What was widened: [`WIDE_LINES`] lines for a step, of the first numbers of the pairs and of the second.
const WIDE: u8 = 2;

/// Left sides of a tile. Widened as it goes.
const OWN_LEFT: u8 = 0;
/// Widened as it goes, and kept.
const KEEPING: u8 = 1;
/// What was kept.
const KEPT: u8 = 2;

/// Numbers of the left side of a tile of so many steps that is kept.
pub(super) const fn kept_len(steps: usize) -> usize {
    steps.div_ceil(LEFT_STEPS) * ROWS_MAX[VECTORS_MAX - 1] * size_of::<LeftSteps>() / size_of::<f32>()
}

/// Steps that a tile fetches its own right side ahead into the second-level cache, which has room for more on its way than the first, and into the first. (Four rows, Emerald Rapids, where two
/// threads read 38 GB/s: 36 so; 32 without the first level; 29 where they also fetch on behind a panel's end, which another thread reads.)
const OWN_AHEAD_STEPS: [usize; 2] = [64, 8];

/// How far ahead a few rows fetch each of several panels (one row reads 91% of what memory gives so, 80% without).
const PANELS_AHEAD_BYTES: usize = 1024;

/// The line of each row of the left side that begins at step `first`, in its place among `slots` lines of `left` or the last of a tile: widened, unless it was kept.
///
/// # Safety
/// As [`tile_of`]; `left` has room for what is widened.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn widen_lines<const ROWS: usize, const LEFT: u8>(
    t: &Tile,
    first: usize,
    left: *mut LeftSteps,
    slots: usize,
) -> *const f32 {
    let to = left.wrapping_add(first / LEFT_STEPS % slots * ROWS);
    let steps = t.steps.saturating_sub(first).min(LEFT_STEPS);
    for r in 0..if LEFT == KEPT || steps == 0 { 0 } else { ROWS } {
        // SAFETY: passed on from the caller.
        unsafe { widen_left(t.a.wrapping_add(r * t.a_stride + first * 4), steps, to.wrapping_add(r)) };
    }
    to.cast_const().cast()
}

/// A tile with such a right side.
/// `WIDENING` writes the lines of all steps to `to`, `KEEPING` the left side to `kept`, from where `KEPT` reads it.
///
/// # Safety
/// As [`ChainFn`](super::kernel); `to` has room for the lines, if they are written, and `kept` for the left side or has it.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn tile_of<const ROWS: usize, const VECTORS: usize, const FETCH: u8, const RIGHT: u8, const LEFT: u8>(
    t: &Tile,
    to: *mut f32,
    kept: *mut LeftSteps,
) {
    let last_mask = last_mask(t.columns, VECTORS);
    let mask = |v: usize| if v == VECTORS - 1 { last_mask } else { !0 };
    let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let mut left = MaybeUninit::<[[LeftSteps; ROWS]; 2]>::uninit();
    let (left, slots) = match LEFT {
        OWN_LEFT => (left.as_mut_ptr().cast::<LeftSteps>(), 2),
        _ => (kept, usize::MAX),
    };
    // SAFETY: the caller of `TileKernel::block` vouches for all operands; a masked lane is not touched, a prefetch of any address is harmless, and of the left side
    // that is widened is read what was written.
    unsafe {
        if t.accumulate {
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    acc[r][v] = _mm512_maskz_loadu_ps(mask(v), t.c.add(r * t.c_stride + v * LANES));
                }
            }
        }
        let (mut b_ptr, mut to) = (t.b, to);
        let mut coming = Coming::of(t);
        let mut now = widen_lines::<ROWS, LEFT>(t, 0, left, slots);
        for first in (0..t.steps).step_by(LEFT_STEPS) {
            let after = widen_lines::<ROWS, LEFT>(t, first + LEFT_STEPS, left, slots);
            if RIGHT != PAIRS && LEFT != KEPT {
                // The left side of the tile below. Where rows lie far apart, a processor does not see them coming, and waits for each (2 to 3%).
                for row in ROWS..2 * ROWS {
                    _mm_prefetch::<_MM_HINT_T1>(t.a.wrapping_add(row * t.a_stride + first * 4).cast());
                }
            }
            for step in 0..(t.steps - first).min(LEFT_STEPS) {
                if FETCH == OWN {
                    let [far, near] = OWN_AHEAD_STEPS;
                    let (far, near) = (coming.own(t, first + step + far), coming.own(t, first + step + near));
                    for v in 0..VECTORS {
                        _mm_prefetch::<_MM_HINT_T1>(far.wrapping_add(v * 64).cast());
                        _mm_prefetch::<_MM_HINT_T0>(near.wrapping_add(v * 64).cast());
                    }
                }
                coming.fetch::<FETCH>(first + step);
                for number in 0..WIDE_LINES {
                    let mut b = [_mm512_setzero_ps(); VECTORS];
                    for v in 0..VECTORS {
                        b[v] = _mm512_castsi512_ps(if RIGHT == WIDE {
                            _mm512_loadu_si512(b_ptr.add((number * VECTORS + v) * 64).cast())
                        } else if number == 0 {
                            _mm512_slli_epi32::<16>(_mm512_loadu_si512(b_ptr.add(v * 64).cast()))
                        } else {
                            // Loaded again: there are no registers to keep it in.
                            _mm512_maskz_loadu_epi16(0xaaaa_aaaa, b_ptr.add(v * 64).cast())
                        });
                        if RIGHT == WIDENING {
                            _mm512_storeu_ps(to.wrapping_add((number * VECTORS + v) * LANES), b[v]);
                        }
                    }
                    for r in 0..ROWS {
                        let a = _mm512_set1_ps(*now.add((r * 2 + number) * LEFT_STEPS + step));
                        for v in 0..VECTORS {
                            acc[r][v] = _mm512_fmadd_ps(a, b[v], acc[r][v]);
                        }
                    }
                }
                b_ptr = b_ptr.wrapping_add(t.b_stride);
                to = to.wrapping_add(WIDE_LINES * VECTORS * LANES);
            }
            now = after;
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                _mm512_mask_storeu_ps(t.c.add(r * t.c_stride + v * LANES), mask(v), acc[r][v]);
            }
        }
    }
}

/// Both sides in pairs of bf16.
pub(super) mod pairs {
    use super::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn tile<const ROWS: usize, const VECTORS: usize, const FETCH: u8>(t: &Tile) {
        // SAFETY: passed on from the caller.
        unsafe { tile_of::<ROWS, VECTORS, FETCH, PAIRS, OWN_LEFT>(t, std::ptr::null_mut(), std::ptr::null_mut()) }
    }

    tile_shapes!(
        "avx512f,avx512bw,avx512vl,avx512dq",
        |rows, t| unreachable!("{rows} rows of {} steps fetch all or nothing", t.steps),
        whole_panel::<STREAM>(rows, t)
    );
    few_rows!("avx512f,avx512bw,avx512vl,avx512dq", &[4, 2], PANELS_AHEAD_BYTES, |acc, a, b| {
        let high = high_halves();
        let (a0, b0) = (_mm512_slli_epi32::<16>(a), _mm512_slli_epi32::<16>(b));
        let (a1, b1) = (_mm512_and_si512(a, high), _mm512_and_si512(b, high));
        let acc = _mm512_fmadd_ps(_mm512_castsi512_ps(a0), _mm512_castsi512_ps(b0), acc);
        _mm512_fmadd_ps(_mm512_castsi512_ps(a1), _mm512_castsi512_ps(b1), acc)
    });
}

/// [`WideFn`](super::kernel): whole panels that are widened by the first tile.
pub(super) mod wide {
    use super::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn whole_panel<const FETCH: u8, const RIGHT: u8, const LEFT: u8>(
        rows: usize,
        t: &Tile,
        to: *mut f32,
        kept: *mut LeftSteps,
    ) {
        // SAFETY: passed on from the caller.
        unsafe {
            match rows {
                1 => tile_of::<1, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                2 => tile_of::<2, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                3 => tile_of::<3, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                4 => tile_of::<4, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                5 => tile_of::<5, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                6 => tile_of::<6, 4, FETCH, RIGHT, LEFT>(t, to, kept),
                _ => unreachable!("no tile of {rows} rows by a panel"),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(in crate::cpu::matmul) unsafe fn run(rows: usize, narrow: Option<*const u8>, t: &Tile) {
        debug_assert!(t.columns == PANEL);
        let (wide, none) = (t.b.cast_mut().cast(), std::ptr::null_mut());
        // SAFETY: the caller of `WideFn` vouches for all operands, and for the list.
        unsafe {
            for (i, (count, tile)) in tiles_of_column(rows, t).enumerate() {
                let tile = match narrow.filter(|_| i == 0) {
                    Some(b) => Tile { b, b_stride: PANEL * 4, ..tile },
                    None => Tile { b_stride: WIDE_LINES * PANEL * 4, ..tile },
                };
                match (narrow.is_some() && i == 0, tile.fetch) {
                    (true, Fetch::Nothing) => whole_panel::<NOTHING, WIDENING, OWN_LEFT>(count, &tile, wide, none),
                    (true, _) => whole_panel::<CHUNKS, WIDENING, OWN_LEFT>(count, &tile, wide, none),
                    (false, Fetch::Nothing) => whole_panel::<NOTHING, WIDE, OWN_LEFT>(count, &tile, wide, none),
                    (false, _) => whole_panel::<CHUNKS, WIDE, OWN_LEFT>(count, &tile, wide, none),
                }
            }
        }
    }

    /// [`WidePairFn`](super::super::kernel): the left side of a tile is widened for the first panel, and kept for the second.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(in crate::cpu::matmul) unsafe fn run_pair(rows: usize, t: &Tile, second: *const f32, kept: &mut [f32]) {
        debug_assert!(t.columns == PANEL && kept.len() >= kept_len(t.steps));
        let (none, kept) = (std::ptr::null_mut(), kept.as_mut_ptr().cast());
        // SAFETY: the caller of `WidePairFn` vouches for all operands, and for the list.
        unsafe {
            for (count, tile) in tiles_of_column(rows, t) {
                let tile = Tile { b_stride: WIDE_LINES * PANEL * 4, ..tile };
                match tile.fetch {
                    Fetch::Nothing => whole_panel::<NOTHING, WIDE, KEEPING>(count, &tile, none, kept),
                    _ => whole_panel::<CHUNKS, WIDE, KEEPING>(count, &tile, none, kept),
                }
                let tile = Tile { b: second.cast(), c: tile.c.wrapping_add(PANEL), fetch: Fetch::Nothing, ..tile };
                whole_panel::<NOTHING, WIDE, KEPT>(count, &tile, none, kept);
            }
        }
    }
}
