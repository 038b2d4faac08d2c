//! The chains of [`chains`](super::chains) with AVX-512: dot products of bf16 pairs, and f32. (`widened_avx512` has those of bf16 where there are no dot products.)
//!
//! Roofline (Zen 5): a 6x64 tile does 24 `vdpbf16ps` (32 multiply-adds each, two a cycle) on 10 loads, so it is bound by arithmetic; a
//! 1x64 tile does 4 on 5 loads, so it is bound by wherever the right side comes from, which for a decode step is memory. One row reads fastest in
//! four streams, without fetching anything itself (79 of 79 GB/s, 72 in one stream, 66 with its own fetches); two and three in two streams; more
//! rows take longer for a step than the processor looks ahead, and fetch. Zen 4, with half the products a cycle, looks far enough ahead of six and is only shown the way.

use std::arch::x86_64::*;

use super::fetch::{CHUNK_STEPS, Fetch, Lines, STREAM_STEPS};
use super::kernel::{ManyPanels, SINGLE_AHEAD_BYTES, SINGLE_ROWS, SingleAddend, Tile, VECTORS_MAX};
use crate::cpu::packed::LANES;

/// 24 accumulators at most, of 32 registers.
pub(super) const ROWS_MAX: [usize; VECTORS_MAX] = [12, 12, 8, 6];

/// Steps that a tile fetches its own right side ahead: what a core reads in the time that memory takes to answer.
const OWN_AHEAD_STEPS: usize = 16;

/// [`Fetch`], for the compiler: lines of what comes next for each step, and whether there are others.
pub(super) const NOTHING: u8 = 0;
pub(super) const NEXT_ONE: u8 = 1;
pub(super) const NEXT_TWO: u8 = 2;
pub(super) const OWN: u8 = 4;
pub(super) const CHUNKS: u8 = 8;
pub(super) const STREAM: u8 = 16;
pub(super) const HINTS: u8 = 32;

/// The lanes of the last of `vectors` vectors that are columns.
#[inline(always)]
pub(super) fn last_mask(columns: usize, vectors: usize) -> __mmask16 {
    match columns - (vectors - 1) * LANES {
        LANES => !0,
        columns => (1 << columns) - 1,
    }
}

/// Where a tile is in what it fetches for others.
pub(super) struct Coming<'a> {
    next: *const u8,
    chunk: *const u8,
    chunks: std::slice::Iter<'a, usize>,
}

impl Coming<'_> {
    /// # Safety
    /// The chunks must be there for as long as this is used.
    #[inline(always)]
    pub(super) unsafe fn of(t: &Tile) -> Self {
        let next = match t.fetch {
            Fetch::Next(next, ..) | Fetch::Own(next) | Fetch::Hints(next) => next,
            _ => t.b,
        };
        let chunks: &[usize] = match t.fetch {
            // SAFETY: the caller's promise.
            Fetch::Next(_, _, chunks) | Fetch::Chunks(chunks) | Fetch::Stream(chunks) => unsafe { &*chunks },
            _ => &[],
        };
        Coming { next, chunk: t.b, chunks: chunks.iter() }
    }

    /// Where the right side of a step of the tile lies, or of one behind its last: what [`Fetch::Own`] and [`Fetch::Hints`] fetch.
    #[inline(always)]
    pub(super) fn own(&self, t: &Tile, step: usize) -> *const u8 {
        let (first, step) = if step < t.steps { (t.b, step) } else { (self.next, step - t.steps) };
        first.wrapping_add(step * t.b_stride)
    }

    /// Where the lines begin that [`Fetch::Stream`] fetches at this step; steps come in order. Behind the last chunk that is fetched again.
    #[inline(always)]
    fn streamed(&mut self, step: usize) -> *const u8 {
        if step.is_multiple_of(STREAM_STEPS)
            && let Some(&at) = self.chunks.next()
        {
            self.chunk = std::ptr::without_provenance(at);
        }
        self.chunk.wrapping_add(step % STREAM_STEPS * VECTORS_MAX * 64)
    }

    /// Fetches what is fetched at this step.
    #[inline(always)]
    pub(super) fn fetch<const FETCH: u8>(&mut self, step: usize) {
        // SAFETY: every such processor has the instruction, and any address will do.
        let fetch = |at: *const u8| unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
        for _ in 0..FETCH & (NEXT_ONE | NEXT_TWO) {
            fetch(self.next);
            self.next = self.next.wrapping_add(64);
        }
        if FETCH & CHUNKS != 0 {
            if step.is_multiple_of(CHUNK_STEPS)
                && let Some(&at) = self.chunks.next()
            {
                self.chunk = std::ptr::without_provenance(at);
            }
            fetch(self.chunk.wrapping_add(step % CHUNK_STEPS * 64));
        }
        if FETCH & STREAM != 0 {
            let lines = self.streamed(step);
            for vector in 0..VECTORS_MAX {
                fetch(lines.wrapping_add(vector * 64));
            }
        }
    }
}

/// Tiles of a whole panel one below another, in which rows are dealt evenly, with the rows of each; each fetches its chunks, if there are any left.
///
/// # Safety
/// The chunks of `t`, if it has any, must be there for as long as the tiles are used.
#[inline(always)]
pub(super) unsafe fn tiles_of_column(rows: usize, t: &Tile) -> impl Iterator<Item = (usize, Tile)> {
    let tiles = rows.div_ceil(ROWS_MAX[VECTORS_MAX - 1]);
    let (least, larger) = (rows / tiles, rows % tiles);
    let chunks_max = (t.steps / CHUNK_STEPS).max(1);
    let mut chunks: &[usize] = match t.fetch {
        // SAFETY: the caller's promise.
        Fetch::Chunks(chunks) => unsafe { &*chunks },
        _ => &[],
    };
    let mut below = *t;
    (0..tiles).map(move |i| {
        let count = least + usize::from(i < larger);
        let (own, others) = chunks.split_at(chunks_max.min(chunks.len()));
        let tile = Tile { fetch: if own.is_empty() { Fetch::Nothing } else { Fetch::Chunks(own) }, ..below };
        chunks = others;
        below.a = below.a.wrapping_add(count * t.a_stride);
        below.c = below.c.wrapping_add(count * t.c_stride);
        (count, tile)
    })
}

/// `tile`: so many rows and vectors, step by step.
macro_rules! chain_tile {
    ($features:literal, |$acc:ident, $a:ident, $b:ident| $dot:expr) => {
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn tile<const ROWS: usize, const VECTORS: usize, const FETCH: u8>(t: &Tile) {
            let last_mask = last_mask(t.columns, VECTORS);
            let mask = |v: usize| if v == VECTORS - 1 { last_mask } else { !0 };
            let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            // SAFETY: the caller of `TileKernel::block` vouches for all operands; a masked lane is not touched, and a
            // prefetch of any address is harmless.
            unsafe {
                if t.accumulate {
                    for r in 0..ROWS {
                        for v in 0..VECTORS {
                            acc[r][v] = _mm512_maskz_loadu_ps(mask(v), t.c.add(r * t.c_stride + v * LANES));
                        }
                    }
                }
                let (mut a_ptr, mut b_ptr) = (t.a, t.b);
                let mut coming = Coming::of(t);
                for step in 0..t.steps {
                    let mut $b = [_mm512_setzero_si512(); VECTORS];
                    let ahead = coming.own(t, step + OWN_AHEAD_STEPS);
                    for v in 0..VECTORS {
                        $b[v] = _mm512_loadu_si512(b_ptr.add(v * 64).cast());
                        if FETCH == OWN {
                            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(v * 64).cast());
                        }
                        if FETCH == HINTS && v == step % VECTORS {
                            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(v * 64).cast());
                        }
                    }
                    coming.fetch::<FETCH>(step);
                    for r in 0..ROWS {
                        let $a = _mm512_set1_epi32(a_ptr.add(r * t.a_stride).cast::<i32>().read_unaligned());
                        for v in 0..VECTORS {
                            let $acc = acc[r][v];
                            let $b = $b[v];
                            acc[r][v] = $dot;
                        }
                    }
                    a_ptr = a_ptr.wrapping_add(4);
                    b_ptr = b_ptr.wrapping_add(t.b_stride);
                }
                for r in 0..ROWS {
                    for v in 0..VECTORS {
                        _mm512_mask_storeu_ps(t.c.add(r * t.c_stride + v * LANES), mask(v), acc[r][v]);
                    }
                }
            }
        }
    };
}

/// [`ChainFn`](super::kernel) and [`ColumnFn`](super::kernel): each shape that the `tile` beside it is compiled for; and what computes rows of a whole panel that fetch [`Fetch::Hints`] and [`Fetch::Stream`].
macro_rules! tile_shapes {
    ($features:literal, |$rows:ident, $t:ident| $hints:expr, $stream:expr) => {
        #[target_feature(enable = $features)]
        unsafe fn whole_panel<const FETCH: u8>(rows: usize, t: &Tile) {
            // SAFETY: passed on from the caller.
            unsafe {
                match rows {
                    1 => tile::<1, 4, FETCH>(t),
                    2 => tile::<2, 4, FETCH>(t),
                    3 => tile::<3, 4, FETCH>(t),
                    4 => tile::<4, 4, FETCH>(t),
                    5 => tile::<5, 4, FETCH>(t),
                    6 => tile::<6, 4, FETCH>(t),
                    _ => unreachable!("no tile of {rows} rows by a panel"),
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run_column(rows: usize, t: &Tile) {
            // SAFETY: the caller of `ColumnFn` vouches for all operands, and for the list.
            unsafe {
                for (count, tile) in tiles_of_column(rows, t) {
                    match tile.fetch {
                        Fetch::Nothing => whole_panel::<NOTHING>(count, &tile),
                        _ => whole_panel::<CHUNKS>(count, &tile),
                    }
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run($rows: usize, vectors: usize, $t: &Tile) {
            let (rows, t) = ($rows, $t);
            // SAFETY: passed on from the caller.
            unsafe {
                match (vectors, rows) {
                    (4, _) => match t.fetch {
                        Fetch::Nothing => whole_panel::<NOTHING>(rows, t),
                        Fetch::Own(_) => whole_panel::<OWN>(rows, t),
                        Fetch::Next(_, Lines::One, chunks) if chunks.is_empty() => whole_panel::<NEXT_ONE>(rows, t),
                        Fetch::Next(_, Lines::Two, chunks) if chunks.is_empty() => whole_panel::<NEXT_TWO>(rows, t),
                        Fetch::Next(_, Lines::One, _) => whole_panel::<{ NEXT_ONE | CHUNKS }>(rows, t),
                        Fetch::Next(_, Lines::Two, _) => whole_panel::<{ NEXT_TWO | CHUNKS }>(rows, t),
                        Fetch::Chunks(_) => whole_panel::<CHUNKS>(rows, t),
                        Fetch::Hints(_) => $hints,
                        Fetch::Stream(_) => $stream,
                    },
                    (3, 1) => tile::<1, 3, NOTHING>(t),
                    (3, 2) => tile::<2, 3, NOTHING>(t),
                    (3, 3) => tile::<3, 3, NOTHING>(t),
                    (3, 4) => tile::<4, 3, NOTHING>(t),
                    (3, 5) => tile::<5, 3, NOTHING>(t),
                    (3, 6) => tile::<6, 3, NOTHING>(t),
                    (3, 7) => tile::<7, 3, NOTHING>(t),
                    (3, 8) => tile::<8, 3, NOTHING>(t),
                    (2, 1) => tile::<1, 2, NOTHING>(t),
                    (2, 2) => tile::<2, 2, NOTHING>(t),
                    (2, 3) => tile::<3, 2, NOTHING>(t),
                    (2, 4) => tile::<4, 2, NOTHING>(t),
                    (2, 5) => tile::<5, 2, NOTHING>(t),
                    (2, 6) => tile::<6, 2, NOTHING>(t),
                    (2, 7) => tile::<7, 2, NOTHING>(t),
                    (2, 8) => tile::<8, 2, NOTHING>(t),
                    (2, 9) => tile::<9, 2, NOTHING>(t),
                    (2, 10) => tile::<10, 2, NOTHING>(t),
                    (2, 11) => tile::<11, 2, NOTHING>(t),
                    (2, 12) => tile::<12, 2, NOTHING>(t),
                    (1, 1) => tile::<1, 1, NOTHING>(t),
                    (1, 2) => tile::<2, 1, NOTHING>(t),
                    (1, 3) => tile::<3, 1, NOTHING>(t),
                    (1, 4) => tile::<4, 1, NOTHING>(t),
                    (1, 5) => tile::<5, 1, NOTHING>(t),
                    (1, 6) => tile::<6, 1, NOTHING>(t),
                    (1, 7) => tile::<7, 1, NOTHING>(t),
                    (1, 8) => tile::<8, 1, NOTHING>(t),
                    (1, 9) => tile::<9, 1, NOTHING>(t),
                    (1, 10) => tile::<10, 1, NOTHING>(t),
                    (1, 11) => tile::<11, 1, NOTHING>(t),
                    (1, 12) => tile::<12, 1, NOTHING>(t),
                    _ => unreachable!("no tile of {rows} rows by {vectors} vectors"),
                }
            }
        }
    };
}
pub(super) use tile_shapes;

/// [`PartsFn`](super::kernel): a right side that lies in parts.
macro_rules! right_in_parts {
    ($features:literal, |$acc:ident, $a:ident, $b:ident| $dot:expr) => {
        /// Part after part of a panel's right side.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn parts_tile<const ROWS: usize>(parts: &[*const u8], t: &Tile) {
            let mut acc = [[_mm512_setzero_ps(); VECTORS_MAX]; ROWS];
            // SAFETY: the caller of `TileKernel::block_in_parts` vouches for all operands.
            unsafe {
                let at = |r: usize, v: usize| t.c.add(r * t.c_stride + v * LANES);
                if t.accumulate {
                    for r in 0..ROWS {
                        for v in 0..VECTORS_MAX {
                            acc[r][v] = _mm512_loadu_ps(at(r, v));
                        }
                    }
                }
                let mut a_ptr = t.a;
                for &part in parts {
                    let mut b_ptr = part;
                    for _ in 0..t.steps {
                        let mut $b = [_mm512_setzero_si512(); VECTORS_MAX];
                        for v in 0..VECTORS_MAX {
                            $b[v] = _mm512_loadu_si512(b_ptr.add(v * 64).cast());
                        }
                        for r in 0..ROWS {
                            let $a = _mm512_set1_epi32(a_ptr.add(r * t.a_stride).cast::<i32>().read_unaligned());
                            for v in 0..VECTORS_MAX {
                                let $acc = acc[r][v];
                                let $b = $b[v];
                                acc[r][v] = $dot;
                            }
                        }
                        a_ptr = a_ptr.wrapping_add(4);
                        b_ptr = b_ptr.wrapping_add(t.b_stride);
                    }
                }
                for r in 0..ROWS {
                    for v in 0..VECTORS_MAX {
                        _mm512_storeu_ps(at(r, v), acc[r][v]);
                    }
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run_parts(rows: usize, parts: &[*const u8], t: &Tile) {
            // SAFETY: passed on from the caller.
            unsafe {
                match rows {
                    1 => parts_tile::<1>(parts, t),
                    2 => parts_tile::<2>(parts, t),
                    3 => parts_tile::<3>(parts, t),
                    4 => parts_tile::<4>(parts, t),
                    5 => parts_tile::<5>(parts, t),
                    6 => parts_tile::<6>(parts, t),
                    _ => unreachable!("no tile of {rows} rows by a panel"),
                }
            }
        }
    };
}

/// What computes a few rows with several panels, as many at once for 1, 2, ... rows as `$panels` says, each fetched so far ahead; or with a right side for each row.
macro_rules! few_rows {
    ($features:literal, $panels:expr, $ahead_bytes:expr, |$acc:ident, $a:ident, $b:ident| $dot:expr) => {
        /// Step by step through several panels.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn panels_tile<const ROWS: usize, const PANELS: usize>(panel_bytes: usize, t: &Tile) {
            let mut acc = [[[_mm512_setzero_ps(); VECTORS_MAX]; PANELS]; ROWS];
            // SAFETY: the caller of `PanelsFn` vouches for all operands.
            unsafe {
                let at = |r: usize, p: usize, v: usize| t.c.add(r * t.c_stride + (p * VECTORS_MAX + v) * LANES);
                if t.accumulate {
                    for r in 0..ROWS {
                        for p in 0..PANELS {
                            for v in 0..VECTORS_MAX {
                                acc[r][p][v] = _mm512_loadu_ps(at(r, p, v));
                            }
                        }
                    }
                }
                let (mut a_ptr, mut b_ptr) = (t.a, t.b);
                for _ in 0..t.steps {
                    let mut left = [_mm512_setzero_si512(); ROWS];
                    for r in 0..ROWS {
                        left[r] = _mm512_set1_epi32(a_ptr.add(r * t.a_stride).cast::<i32>().read_unaligned());
                    }
                    for p in 0..PANELS {
                        for v in 0..VECTORS_MAX {
                            let $b = _mm512_loadu_si512(b_ptr.add(p * panel_bytes + v * 64).cast());
                            if $ahead_bytes > 0 {
                                let ahead = b_ptr.wrapping_add(p * panel_bytes + v * 64 + $ahead_bytes);
                                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                            }
                            for r in 0..ROWS {
                                let ($a, $acc) = (left[r], acc[r][p][v]);
                                acc[r][p][v] = $dot;
                            }
                        }
                    }
                    a_ptr = a_ptr.wrapping_add(4);
                    b_ptr = b_ptr.wrapping_add(t.b_stride);
                }
                for r in 0..ROWS {
                    for p in 0..PANELS {
                        for v in 0..VECTORS_MAX {
                            _mm512_storeu_ps(at(r, p, v), acc[r][p][v]);
                        }
                    }
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run_panels(rows: usize, panels: usize, panel_bytes: usize, t: &Tile) {
            // SAFETY: passed on from the caller.
            unsafe {
                match (rows, panels) {
                    (1, 4) => panels_tile::<1, 4>(panel_bytes, t),
                    (1, 2) => panels_tile::<1, 2>(panel_bytes, t),
                    (1, 1) => panels_tile::<1, 1>(panel_bytes, t),
                    (2, 2) => panels_tile::<2, 2>(panel_bytes, t),
                    (2, 1) => panels_tile::<2, 1>(panel_bytes, t),
                    (3, 2) => panels_tile::<3, 2>(panel_bytes, t),
                    (3, 1) => panels_tile::<3, 1>(panel_bytes, t),
                    _ => unreachable!("no tile of {rows} rows by {panels} panels"),
                }
            }
        }

        /// Step by step through the right sides of as many rows.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn single_rows<const VECTORS: usize>(tiles: &[Tile; SINGLE_ROWS]) {
            let mut acc = [[_mm512_setzero_ps(); VECTORS]; SINGLE_ROWS];
            // SAFETY: the caller of `SingleRowsFn` vouches for all operands; a masked lane is not touched.
            unsafe {
                let (a, mut b) = (tiles.map(|t| t.a), tiles.map(|t| t.b));
                let strides = tiles.map(|t| t.b_stride);
                for step in 0..tiles[0].steps {
                    for t in 0..SINGLE_ROWS {
                        let $a = _mm512_set1_epi32(a[t].add(step * 4).cast::<i32>().read_unaligned());
                        for v in 0..VECTORS {
                            _mm_prefetch::<_MM_HINT_T1>(b[t].wrapping_add(SINGLE_AHEAD_BYTES + v * 64).cast());
                            let $b = _mm512_loadu_si512(b[t].add(v * 64).cast());
                            let $acc = acc[t][v];
                            acc[t][v] = $dot;
                        }
                        b[t] = b[t].wrapping_add(strides[t]);
                    }
                }
                for (t, acc) in tiles.iter().zip(acc) {
                    for (v, acc) in acc.into_iter().enumerate() {
                        let columns = t.columns.saturating_sub(v * LANES).min(LANES);
                        let mask = ((1u32 << columns) - 1) as __mmask16;
                        _mm512_mask_storeu_ps(t.c.wrapping_add(v * LANES), mask, acc);
                    }
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run_single_rows(vectors: usize, tiles: &[Tile; SINGLE_ROWS]) {
            // SAFETY: passed on from the caller.
            unsafe {
                match vectors {
                    1 => single_rows::<1>(tiles),
                    2 => single_rows::<2>(tiles),
                    3 => single_rows::<3>(tiles),
                    4 => single_rows::<4>(tiles),
                    _ => unreachable!("no tile of {vectors} vectors"),
                }
            }
        }

        /// Row after row of a panel, each with a right side of its own.
        #[target_feature(enable = $features)]
        pub(in crate::cpu::matmul) unsafe fn run_single_addends(
            panel: usize,
            addends: &[SingleAddend<'_>],
            c: *mut f32,
            c_stride: usize,
        ) {
            for addend in addends {
                let (left, right) = (addend.left.as_ptr(), addend.panel_bytes(panel).as_ptr());
                // SAFETY: the caller of `SingleAddendsFn` vouches for all operands.
                unsafe {
                    let c = c.add(addend.row * c_stride);
                    let mut acc = [_mm512_setzero_ps(); VECTORS_MAX];
                    for v in 0..VECTORS_MAX {
                        acc[v] = _mm512_loadu_ps(c.add(v * LANES));
                    }
                    for step in 0..addend.steps {
                        let $a = _mm512_set1_epi32(left.add(step * 4).cast::<i32>().read_unaligned());
                        for v in 0..VECTORS_MAX {
                            let $b = _mm512_loadu_si512(right.add((step * VECTORS_MAX + v) * 64).cast());
                            let $acc = acc[v];
                            acc[v] = $dot;
                        }
                    }
                    for v in 0..VECTORS_MAX {
                        _mm512_storeu_ps(c.add(v * LANES), acc[v]);
                    }
                }
            }
        }

        /// Accumulators of the panels at once must leave registers for what is multiplied.
        pub(in crate::cpu::matmul) const MANY_PANELS: ManyPanels =
            ManyPanels { run: run_panels, panels: $panels, single_rows: run_single_rows, single_addends: run_single_addends };
    };
}
pub(super) use few_rows;

macro_rules! tile_kernel {
    ($name:ident, $features:literal, |$acc:ident, $a:ident, $b:ident| $dot:expr) => {
        pub(super) mod $name {
            use super::*;

            chain_tile!($features, |$acc, $a, $b| $dot);
            tile_shapes!(
                $features,
                |rows, t| whole_panel::<HINTS>(rows, t),
                unreachable!("{rows} rows of {} steps do not stream", t.steps)
            );
            right_in_parts!($features, |$acc, $a, $b| $dot);
            few_rows!($features, &[4, 2, 2], 0, |$acc, $a, $b| $dot);
        }
    };
}

tile_kernel!(native, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16", |acc, a, b| {
    // SAFETY: both types are 512 bits of bf16.
    _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b))
});
tile_kernel!(single, "avx512f,avx512bw,avx512vl,avx512dq", |acc, a, b| {
    _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc)
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_fetches_for_itself_and_goes_on_where_its_thread_does_or_streams_chunks() {
        let [b, next] = [1 << 20, 1 << 30].map(std::ptr::without_provenance::<u8>);
        let (a, c) = (std::ptr::null(), std::ptr::null_mut());
        let (steps, columns) = (OWN_AHEAD_STEPS + 1, VECTORS_MAX * LANES);
        let shape = Tile {
            steps,
            a,
            a_stride: 0,
            b,
            b_stride: 256,
            c,
            c_stride: 0,
            columns,
            accumulate: false,
            fetch: Fetch::Own(next),
        };
        // SAFETY: it has no chunks.
        let coming = unsafe { Coming::of(&shape) };
        let ahead: Vec<usize> = (0..steps).map(|step| coming.own(&shape, step + OWN_AHEAD_STEPS).addr()).collect();
        let expected: Vec<usize> = (0..steps)
            .map(|step| if step == 0 { b.addr() + OWN_AHEAD_STEPS * 256 } else { next.addr() + (step - 1) * 256 })
            .collect();
        assert_eq!(ahead, expected);
        // SAFETY: the chunks outlive what goes through them.
        let mut coming = unsafe { Coming::of(&Tile { fetch: Fetch::Stream(&[4096, 1 << 20]), ..shape }) };
        let streamed: Vec<usize> = (0..6).map(|step| coming.streamed(step).addr()).collect();
        assert_eq!(streamed, [4096, 4096 + 256, 1 << 20, (1 << 20) + 256, 1 << 20, (1 << 20) + 256]);
    }
}
