//! Weights of four bits, see [`int4`](super::int4), with AVX-512.
//!
//! Roofline: what finds the codes of the 32 weights of a step is a turn, two selections and two multiply-adds; see [`unpacked_avx512`](super::unpacked_avx512).

use std::arch::x86_64::*;

use super::int4::{FIRST_BIT, LINE_INPUTS, WORD_BYTES, ZERO_BITS};
use super::unpacked_avx512::Packed;

/// Powers of two whose f32 counts ones from where the codes of the first eight and of the others lie in a word that was turned: put a code there and it is `unit + q`, which one
/// multiply-add makes `(q − zero)·scale`. It is exact, for `unit + zero` has nine bits at most, and a scale eleven.
const UNITS: [f32; 2] = [(1u32 << (23 - FIRST_BIT)) as f32, (1u32 << (19 - FIRST_BIT)) as f32];

/// What codes of sixteen outputs become numbers with: of the first eight and of the others, each twice for its two inputs.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    scale: [__m512; 2],
    shift: [__m512; 2],
}

impl Packed for Scales {
    const LINE_STEPS: usize = LINE_INPUTS / 2;
    const SCALE_BYTES: usize = WORD_BYTES;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load(words: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let words = unsafe { _mm512_loadu_si512(words.cast()) };
        let zeros = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(ZERO_BITS as i32)));
        let scales = _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(ZERO_BITS as i32), words));
        let shift = |unit: f32| {
            let taken_off = _mm512_add_ps(zeros, _mm512_set1_ps(unit));
            _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(scales, taken_off))
        };
        let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        let others = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        Scales {
            scale: [_mm512_permutexvar_ps(first, scales), _mm512_permutexvar_ps(others, scales)],
            shift: [_mm512_permutexvar_ps(first, shift(UNITS[0])), _mm512_permutexvar_ps(others, shift(UNITS[1]))],
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn weights<const STEP: usize>(&self, line: __m512i) -> [__m512; 2] {
        let turned = match STEP {
            0 => line,
            1 => _mm512_ror_epi32::<8>(line),
            2 => _mm512_ror_epi32::<16>(line),
            _ => _mm512_ror_epi32::<24>(line),
        };
        [self.half::<0>(turned), self.half::<1>(turned)]
    }
}

impl Scales {
    /// `(q − zero)·scale` of the outputs of one half.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn half<const HALF: usize>(&self, turned: __m512i) -> __m512 {
        let unit = _mm512_set1_epi32(UNITS[HALF].to_bits() as i32);
        let mask = _mm512_set1_epi32(15 << (FIRST_BIT as usize + 4 * HALF));
        // `turned & mask | unit`.
        let number = _mm512_ternarylogic_epi32::<0xf8>(unit, turned, mask);
        _mm512_fmadd_ps(_mm512_castsi512_ps(number), self.scale[HALF], self.shift[HALF])
    }
}
