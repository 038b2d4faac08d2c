//! Weights in bytes, see [`int8`](super::int8), as pairs of bf16 with AVX-512.
//!
//! Roofline (Zen 4, which takes two cycles of a pipe for such a vector): the 64 weights of a line are a load, a shift, four blends, four multiply-adds and two
//! roundings, and two products for each row: with one row about ten cycles measured, 24 GB/s of a core, where a core reads 28 to 33 GB/s from memory. Beyond [`ROWS_MAX`] rows,
//! unpacking once to cache is cheaper.

use std::arch::x86_64::*;

use super::int8::{BLOCK_INPUTS, BytesKernel, BytesTile, LINE_BYTES, LINE_INPUTS, OFFSET, VECTOR_BYTES, blocks_bytes};
use crate::cpu::packed::LANES;

/// How far ahead of what is unpacked memory is fetched: from 1 KiB to 8 KiB it makes no difference of more than 3%.
const AHEAD_BYTES: usize = 2048;

/// Rows that are multiplied with what is in registers, at most: twelve accumulators, eight numbers to unpack with, and what is being unpacked.
const ROWS_MAX: usize = 6;

/// The order of chains of `vdpbf16ps`, with weights unpacked in registers.
pub(super) const KERNEL: BytesKernel = BytesKernel { run: product, rows_max: ROWS_MAX };

/// Powers of two whose f32 has its ones in the first and in the second byte: put `q + 128` there and it is `unit + 128 + q`, which one multiply-add makes `q·scale`. It is exact, for
/// `unit + 128` has seventeen bits at most, and a scale seven.
const UNITS: [f32; 2] = [8388608.0, 32768.0];

/// What bytes of sixteen outputs become numbers with: of the first eight and of the others, each twice for its two inputs.
#[derive(Clone, Copy)]
struct Scales {
    scale: [__m512; 2],
    shift: [__m512; 2],
}

impl Scales {
    /// # Safety
    /// There must be sixteen scales in bf16, and AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn load(scales: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let narrow = unsafe { _mm256_loadu_si256(scales.cast()) };
        let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)));
        let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        let (low, high) =
            (_mm512_permutexvar_ps(first, wide), _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), wide));
        let shift = |scale, unit: f32| _mm512_mul_ps(scale, _mm512_set1_ps(-(unit + OFFSET)));
        Scales { scale: [low, high], shift: [shift(low, UNITS[0]), shift(high, UNITS[1])] }
    }

    /// The pairs of bf16 of both steps of a line.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn unpack(&self, line: __m512i) -> [__m512i; 2] {
        [self.step(line), self.step(_mm512_srli_epi32::<16>(line))]
    }

    /// The pairs of the step whose bytes are the first and second of each word: of the first eight outputs and of the others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn step(&self, bytes: __m512i) -> __m512i {
        let rounded = _mm512_cvtne2ps_pbh(self.weights::<1>(bytes), self.weights::<0>(bytes));
        // SAFETY: both types are 512 bits of any value.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) }
    }

    /// `q·scale` of the outputs whose bytes are at `PLACE` in each word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn weights<const PLACE: usize>(&self, bytes: __m512i) -> __m512 {
        // A blend reads two registers. Selecting with bits reads three, and waits for the multiply-adds beside it, which do too.
        let unit = _mm512_set1_epi32(UNITS[PLACE].to_bits() as i32);
        let number = _mm512_mask_blend_epi8(0x1111_1111_1111_1111 << PLACE, unit, bytes);
        _mm512_fmadd_ps(_mm512_castsi512_ps(number), self.scale[PLACE], self.shift[PLACE])
    }
}

/// The blocks of a panel that share their inputs, as pairs of bf16: as many steps as `words` has room for.
///
/// # Safety
/// The machine must have AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn unpack(blocks: &[u8], width: usize, words: &mut [u32]) {
    let steps = words.len() / width;
    assert!(width.is_multiple_of(LANES) && blocks.len() == blocks_bytes(width) && steps <= BLOCK_INPUTS / 2);
    for vector in 0..width / LANES {
        // SAFETY: in bounds by the assertion: `width` scales, and then a line for every two steps of each vector.
        unsafe {
            let scales = Scales::load(blocks.as_ptr().add(2 * vector * LANES));
            let vectors = (width / LANES - vector / 2 * 2).min(2);
            let mut line = blocks.as_ptr().add(2 * width + vector / 2 * 2 * VECTOR_BYTES + vector % 2 * LINE_BYTES);
            for step in (0..steps).step_by(2) {
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                let pairs = scales.unpack(_mm512_loadu_si512(line.cast()));
                let to = words.as_mut_ptr().add(step * width + vector * LANES);
                _mm512_storeu_si512(to.cast(), pairs[0]);
                if step + 1 < steps {
                    _mm512_storeu_si512(to.add(width).cast(), pairs[1]);
                }
                line = line.wrapping_add(vectors * LINE_BYTES);
            }
        }
    }
}

/// See [`BytesKernel`].
///
/// # Safety
/// As there. The machine must have AVX-512 with BF16.
unsafe fn product(rows: usize, t: &BytesTile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match rows {
            1 => panel::<1>(t),
            2 => panel::<2>(t),
            3 => panel::<3>(t),
            4 => panel::<4>(t),
            5 => panel::<5>(t),
            6 => panel::<6>(t),
            _ => unreachable!("{rows} rows in a tile of at most {ROWS_MAX}"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn panel<const ROWS: usize>(t: &BytesTile) {
    let vectors = t.width / LANES;
    let block_steps = BLOCK_INPUTS / 2;
    for block in 0..t.steps.div_ceil(block_steps) {
        let done = block * block_steps;
        for vector in (0..vectors).step_by(2) {
            // SAFETY: what the caller vouches for begins here.
            unsafe {
                let blocks = t.b.add(block * blocks_bytes(t.width));
                let scales = blocks.add(2 * vector * LANES);
                let lines = blocks.add(2 * t.width + vector * VECTOR_BYTES);
                let part = BytesTile {
                    steps: (t.steps - done).min(block_steps),
                    a: t.a.add(4 * done),
                    c: t.c.add(vector * LANES),
                    columns: t.columns - vector * LANES,
                    accumulate: t.accumulate || block > 0,
                    ..*t
                };
                match vectors - vector {
                    1 => vectors_of_block::<ROWS, 1>(scales, lines, &part),
                    _ => vectors_of_block::<ROWS, 2>(scales, lines, &part),
                }
            }
        }
    }
}

/// One block of one or two vectors of outputs.
#[allow(clippy::needless_range_loop)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn vectors_of_block<const ROWS: usize, const VECTORS: usize>(scales: *const u8, lines: *const u8, t: &BytesTile) {
    let mask = |v: usize| -> __mmask16 {
        match t.columns - v * LANES {
            LANES.. => !0,
            columns => (1 << columns) - 1,
        }
    };
    // Plain loops unroll into registers.
    // SAFETY: the caller vouches for all operands; a masked lane is not touched, and a prefetch of any address is harmless.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        let mut unpacking = [Scales::load(scales); VECTORS];
        for v in 0..VECTORS {
            unpacking[v] = Scales::load(scales.add(2 * v * LANES));
            for r in 0..ROWS {
                if t.accumulate {
                    acc[r][v] = _mm512_maskz_loadu_ps(mask(v), t.c.add(r * t.c_stride + v * LANES));
                }
            }
        }
        let (mut line, mut a) = (lines, t.a);
        // Everything stays in registers only if both steps of a line are written out.
        macro_rules! unpack_line {
            ($first:ident, $second:ident) => {
                let mut $first = [_mm512_setzero_si512(); VECTORS];
                let mut $second = $first;
                for v in 0..VECTORS {
                    let line = line.add(v * LINE_BYTES);
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                    [$first[v], $second[v]] = unpacking[v].unpack(_mm512_loadu_si512(line.cast()));
                }
            };
        }
        macro_rules! multiply {
            ($step:literal, $b:ident) => {
                for r in 0..ROWS {
                    let a = _mm512_set1_epi32(a.add(r * t.a_stride + 4 * $step).cast::<i32>().read_unaligned());
                    for v in 0..VECTORS {
                        let b = std::mem::transmute::<__m512i, __m512bh>($b[v]);
                        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], std::mem::transmute::<__m512i, __m512bh>(a), b);
                    }
                }
            };
        }
        for _ in 0..t.steps / 2 {
            unpack_line!(first, second);
            multiply!(0, first);
            multiply!(1, second);
            line = line.add(VECTORS * LINE_BYTES);
            a = a.wrapping_add(2 * LINE_INPUTS);
        }
        if !t.steps.is_multiple_of(2) {
            unpack_line!(first, _second);
            multiply!(0, first);
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                _mm512_mask_storeu_ps(t.c.add(r * t.c_stride + v * LANES), mask(v), acc[r][v]);
            }
        }
    }
}
