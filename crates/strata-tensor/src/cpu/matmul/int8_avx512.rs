//! Weights in bytes, see [`int8`](super::int8), with AVX-512.
//!
//! Roofline (Zen 4, which takes two cycles of a pipe for such a vector): the 64 weights of a line are a load, a shift, four blends, four multiply-adds and two
//! roundings, and two products for each row: with one row about ten cycles measured, 24 GB/s of a core, where a core reads 28 to 33 GB/s from memory. See
//! [`unpacked_avx512`](super::unpacked_avx512).

use std::arch::x86_64::*;

use half::bf16;

use super::int8::{LINE_INPUTS, OFFSET};
use super::unpacked_avx512::{Packed, PackedNumbers, PackedPairs};

/// Powers of two whose f32 has its ones in the first and in the second byte: put `q + 128` there and it is `unit + 128 + q`, which one multiply-add makes `q·scale`. It is exact, for
/// `unit + 128` has seventeen bits at most, and a scale seven.
const UNITS: [f32; 2] = [8388608.0, 32768.0];

/// What bytes of sixteen outputs become numbers with: of the first eight and of the others, each twice for its two inputs.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    scale: [__m512; 2],
    shift: [__m512; 2],
}

impl PackedPairs for Pairs {}

impl Packed for Pairs {
    const LINE_STEPS: usize = LINE_INPUTS / 2;
    const SCALE_BYTES: usize = size_of::<bf16>();
    type Line = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load(scales: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let narrow = unsafe { _mm256_loadu_si256(scales.cast()) };
        let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)));
        let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        let (low, high) =
            (_mm512_permutexvar_ps(first, wide), _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), wide));
        let shift = |scale, unit: f32| _mm512_mul_ps(scale, _mm512_set1_ps(-(unit + OFFSET)));
        Pairs { scale: [low, high], shift: [shift(low, UNITS[0]), shift(high, UNITS[1])] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn line(codes: __m512i) -> __m512i {
        codes
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn products<const STEP: usize>(&self, &line: &__m512i) -> [__m512; 2] {
        // The bytes of the step are the first and second of each word.
        let bytes = if STEP == 0 { line } else { _mm512_srli_epi32::<16>(line) };
        [self.half::<0>(bytes), self.half::<1>(bytes)]
    }
}

impl Pairs {
    /// `q·scale` of the outputs whose bytes are at `PLACE` in each word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn half<const PLACE: usize>(&self, bytes: __m512i) -> __m512 {
        // A blend reads two registers. Selecting with bits reads three, and waits for the multiply-adds beside it, which do too.
        let unit = _mm512_set1_epi32(UNITS[PLACE].to_bits() as i32);
        let number = _mm512_mask_blend_epi8(0x1111_1111_1111_1111 << PLACE, unit, bytes);
        _mm512_fmadd_ps(_mm512_castsi512_ps(number), self.scale[PLACE], self.shift[PLACE])
    }
}

/// The same, of which the first and the second inputs are brought together: permuting codes takes as many operations as permuting numbers, for each has to be moved within its word too.
#[derive(Clone, Copy)]
pub(super) struct Numbers(Pairs);

impl PackedNumbers for Numbers {}

impl Packed for Numbers {
    const LINE_STEPS: usize = Pairs::LINE_STEPS;
    const SCALE_BYTES: usize = Pairs::SCALE_BYTES;
    type Line = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load(scales: *const u8) -> Self {
        // SAFETY: the caller's promise.
        Numbers(unsafe { Pairs::load(scales) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn line(codes: __m512i) -> __m512i {
        codes
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn products<const STEP: usize>(&self, line: &__m512i) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        let [first, others] = unsafe { self.0.products::<STEP>(line) };
        let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        let odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        [_mm512_permutex2var_ps(first, even, others), _mm512_permutex2var_ps(first, odd, others)]
    }
}
