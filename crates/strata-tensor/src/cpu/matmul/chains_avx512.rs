//! The chains of [`chains`](super::chains) with AVX-512: dot products of bf16 pairs where the processor has them, widened numbers where not, and f32.
//!
//! Roofline (Zen 5): a 6x64 tile does 24 `vdpbf16ps` (32 multiply-adds each, two a cycle) on 10 loads, so it is bound by arithmetic; a
//! 1x64 tile does 4 on 5 loads, so it is bound by wherever the right side comes from, which for a decode step is memory.

use std::arch::x86_64::*;

use super::kernel::{Tile, VECTORS_MAX};
use crate::cpu::packed::LANES;

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
