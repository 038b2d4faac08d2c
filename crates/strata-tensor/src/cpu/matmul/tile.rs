//! The innermost product: a tile of a few rows by up to 64 columns, held in registers while the reduction streams by.
//!
//! A *step* of the reduction is four bytes of the left side: two bf16 or one f32. At each step a row's four bytes are broadcast and
//! multiplied with a vector of right-side steps. Every element of the result is one chain of multiply-adds over the steps, in
//! order, begun from zero or from what is there: its bits do not depend on the size of the tile it was computed in, nor on
//! where a long reduction was cut into blocks.
//!
//! Roofline (Zen 5): a 6x64 tile does 24 `vdpbf16ps` (32 multiply-adds each, two a cycle) on 10 loads, so it is bound by arithmetic; a
//! 1x64 tile does 4 on 5 loads, so it is bound by wherever the right side comes from, which for a decode step is memory.

use half::bf16;

use crate::cpu::isa::{Fma, Fused, Isa, Unfused};
use crate::cpu::packed::LANES;
use crate::{DType, Element};

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
    /// Right side: `steps` rows of `vectors * LANES` steps.
    pub b: *const u8,
    /// Bytes from one step of the right side to the next.
    pub b_stride: usize,
    /// Result.
    pub c: *mut f32,
    /// Elements from one row of the result to the next.
    pub c_stride: usize,
    /// Columns of the result that exist; the last vector may be cut.
    pub columns: usize,
    /// Whether the chain begins from the result's present values instead of zero.
    pub accumulate: bool,
}

/// Computes a tile of `rows` by `vectors * LANES`.
type TileFn = unsafe fn(rows: usize, vectors: usize, tile: &Tile);

/// The tile kernel of an instruction set and dtype.
#[derive(Clone, Copy)]
pub(crate) struct TileKernel {
    run: TileFn,
    /// Most rows of a tile for each number of vectors, less one.
    rows_max: [usize; VECTORS_MAX],
}

impl TileKernel {
    pub(crate) fn new(isa: Isa, dtype: DType) -> Self {
        const SMALL: [usize; VECTORS_MAX] = [4; VECTORS_MAX];
        match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, DType::BF16) => TileKernel { run: avx512::native_bf16, rows_max: avx512::ROWS_MAX },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, DType::F32) => TileKernel { run: avx512::f32, rows_max: avx512::ROWS_MAX },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, DType::BF16) => TileKernel { run: avx512::widened_bf16, rows_max: avx512::ROWS_MAX },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DType::F32) => TileKernel { run: avx2_f32, rows_max: SMALL },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DType::BF16) => TileKernel { run: avx2_bf16, rows_max: SMALL },
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, DType::F32) => TileKernel { run: neon_f32, rows_max: SMALL },
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, DType::BF16) => TileKernel { run: neon_bf16, rows_max: SMALL },
            (_, DType::F32) => TileKernel { run: portable_f32, rows_max: SMALL },
            (_, DType::BF16) => TileKernel { run: portable_bf16, rows_max: SMALL },
        }
    }

    /// A block of any number of rows by up to one panel of columns: `tile` describes its first row.
    ///
    /// # Safety
    /// All operands must be readable, and the result writable, for `rows` rows; `tile.columns` is at most 64, and the right
    /// side is padded to whole vectors. The machine must have the instruction set.
    pub(crate) unsafe fn block(&self, rows: usize, tile: &Tile) {
        let vectors = tile.columns.div_ceil(LANES);
        let rows_max = self.rows_max[vectors - 1];
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
                (self.run)(count, vectors, &part);
            }
            row += count;
        }
    }
}

/// A right-side or left-side step as the numbers in it.
trait Steps: Element {
    /// `acc + a·b` for one step.
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32;
}

impl Steps for f32 {
    #[inline(always)]
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32 {
        fma.fma(f32::from_bits(a), f32::from_bits(b), acc)
    }
}

impl Steps for bf16 {
    #[inline(always)]
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32 {
        let (a0, b0) = (f32::from_bits(a << 16), f32::from_bits(b << 16));
        let (a1, b1) = (f32::from_bits(a & 0xffff_0000), f32::from_bits(b & 0xffff_0000));
        fma.fma(a1, b1, fma.fma(a0, b0, acc))
    }
}

/// The reference, which the vectoriser turns into the kernel of every instruction set that has none of its own.
#[inline(always)]
unsafe fn plain<T: Steps, const ROWS: usize>(fma: impl Fma, vectors: usize, t: &Tile) {
    for v in 0..vectors {
        let columns = (t.columns - v * LANES).min(LANES);
        let mut acc = [[0.0f32; LANES]; ROWS];
        // SAFETY: the caller of `TileKernel::block` vouches for all operands.
        unsafe {
            if t.accumulate {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (l, acc) in acc.iter_mut().enumerate().take(columns) {
                        *acc = *t.c.add(r * t.c_stride + v * LANES + l);
                    }
                }
            }
            for s in 0..t.steps {
                let b = *t.b.add(s * t.b_stride + v * LANES * 4).cast::<[u32; LANES]>();
                for (r, acc) in acc.iter_mut().enumerate() {
                    let a = t.a.add(r * t.a_stride + s * 4).cast::<u32>().read_unaligned();
                    for l in 0..LANES {
                        acc[l] = T::dot(fma, a, b[l], acc[l]);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (l, &acc) in acc.iter().enumerate().take(columns) {
                    *t.c.add(r * t.c_stride + v * LANES + l) = acc;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn plain_rows<T: Steps>(fma: impl Fma, rows: usize, vectors: usize, tile: &Tile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match rows {
            1 => plain::<T, 1>(fma, vectors, tile),
            2 => plain::<T, 2>(fma, vectors, tile),
            3 => plain::<T, 3>(fma, vectors, tile),
            4 => plain::<T, 4>(fma, vectors, tile),
            _ => unreachable!("{rows} rows in a tile of at most 4"),
        }
    }
}

/// Compiles the reference for one dtype and instruction set.
macro_rules! plain_kernel {
    ($name:ident, $element:ty, $fma:expr $(, #[$attribute:meta])*) => {
        $(#[$attribute])*
        unsafe fn $name(rows: usize, vectors: usize, tile: &Tile) {
            // SAFETY: passed on from the caller.
            unsafe { plain_rows::<$element>($fma, rows, vectors, tile) }
        }
    };
}

plain_kernel!(portable_f32, f32, Unfused);
plain_kernel!(portable_bf16, bf16, Unfused);
#[cfg(target_arch = "aarch64")]
plain_kernel!(neon_f32, f32, Fused);
#[cfg(target_arch = "aarch64")]
plain_kernel!(neon_bf16, bf16, Fused);
#[cfg(target_arch = "x86_64")]
plain_kernel!(avx2_f32, f32, Fused, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "x86_64")]
plain_kernel!(avx2_bf16, bf16, Fused, #[target_feature(enable = "avx2,fma")]);

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{LANES, Tile, VECTORS_MAX};

    /// 24 accumulators at most, of 32 registers.
    pub(super) const ROWS_MAX: [usize; VECTORS_MAX] = [12, 12, 8, 6];

    /// How far ahead of a narrow tile, which waits for memory, the right side is fetched.
    const PREFETCH_BYTES: usize = 2048;

    macro_rules! tile_kernel {
        ($name:ident, $features:literal, |$acc:ident, $a:ident, $b:ident| $dot:expr) => {
            pub(super) mod $name {
                use super::*;

                #[target_feature(enable = $features)]
                #[inline]
                unsafe fn tile<const ROWS: usize, const VECTORS: usize>(t: &Tile) {
                    let last_mask: __mmask16 = match t.columns - (VECTORS - 1) * LANES {
                        LANES => !0,
                        columns => (1 << columns) - 1,
                    };
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
                        for _ in 0..t.steps {
                            let mut $b = [_mm512_setzero_si512(); VECTORS];
                            for v in 0..VECTORS {
                                $b[v] = _mm512_loadu_si512(b_ptr.add(v * 64).cast());
                                if ROWS <= 4 {
                                    _mm_prefetch::<_MM_HINT_T0>(b_ptr.wrapping_add(v * 64 + PREFETCH_BYTES).cast());
                                }
                            }
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

                #[target_feature(enable = $features)]
                pub(in super::super) unsafe fn run(rows: usize, vectors: usize, t: &Tile) {
                    // SAFETY: passed on from the caller.
                    unsafe {
                        match (vectors, rows) {
                            (4, 1) => tile::<1, 4>(t),
                            (4, 2) => tile::<2, 4>(t),
                            (4, 3) => tile::<3, 4>(t),
                            (4, 4) => tile::<4, 4>(t),
                            (4, 5) => tile::<5, 4>(t),
                            (4, 6) => tile::<6, 4>(t),
                            (3, 1) => tile::<1, 3>(t),
                            (3, 2) => tile::<2, 3>(t),
                            (3, 3) => tile::<3, 3>(t),
                            (3, 4) => tile::<4, 3>(t),
                            (3, 5) => tile::<5, 3>(t),
                            (3, 6) => tile::<6, 3>(t),
                            (3, 7) => tile::<7, 3>(t),
                            (3, 8) => tile::<8, 3>(t),
                            (2, 1) => tile::<1, 2>(t),
                            (2, 2) => tile::<2, 2>(t),
                            (2, 3) => tile::<3, 2>(t),
                            (2, 4) => tile::<4, 2>(t),
                            (2, 5) => tile::<5, 2>(t),
                            (2, 6) => tile::<6, 2>(t),
                            (2, 7) => tile::<7, 2>(t),
                            (2, 8) => tile::<8, 2>(t),
                            (2, 9) => tile::<9, 2>(t),
                            (2, 10) => tile::<10, 2>(t),
                            (2, 11) => tile::<11, 2>(t),
                            (2, 12) => tile::<12, 2>(t),
                            (1, 1) => tile::<1, 1>(t),
                            (1, 2) => tile::<2, 1>(t),
                            (1, 3) => tile::<3, 1>(t),
                            (1, 4) => tile::<4, 1>(t),
                            (1, 5) => tile::<5, 1>(t),
                            (1, 6) => tile::<6, 1>(t),
                            (1, 7) => tile::<7, 1>(t),
                            (1, 8) => tile::<8, 1>(t),
                            (1, 9) => tile::<9, 1>(t),
                            (1, 10) => tile::<10, 1>(t),
                            (1, 11) => tile::<11, 1>(t),
                            (1, 12) => tile::<12, 1>(t),
                            _ => unreachable!("no tile of {rows} rows by {vectors} vectors"),
                        }
                    }
                }
            }
        };
    }

    tile_kernel!(native, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16", |acc, a, b| {
        // SAFETY: both types are 512 bits of bf16.
        _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b))
    });
    tile_kernel!(widened, "avx512f,avx512bw,avx512vl,avx512dq", |acc, a, b| {
        let high = _mm512_set1_epi32(0xffff_0000u32 as i32);
        let (a0, b0) = (_mm512_slli_epi32::<16>(a), _mm512_slli_epi32::<16>(b));
        let (a1, b1) = (_mm512_and_si512(a, high), _mm512_and_si512(b, high));
        let acc = _mm512_fmadd_ps(_mm512_castsi512_ps(a0), _mm512_castsi512_ps(b0), acc);
        _mm512_fmadd_ps(_mm512_castsi512_ps(a1), _mm512_castsi512_ps(b1), acc)
    });
    tile_kernel!(single, "avx512f,avx512bw,avx512vl,avx512dq", |acc, a, b| {
        _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc)
    });

    pub(super) use native::run as native_bf16;
    pub(super) use single::run as f32;
    pub(super) use widened::run as widened_bf16;
}
