//! Weights of four bits, see [`int4`](super::int4), with AVX-512.
//!
//! Roofline: what finds the codes of the 32 weights of a step is a turn, two selections and two multiply-adds, and as numbers in a row two selections, two multiply-adds and, of the
//! six operations that each line is turned and permuted with, one and a half; see [`unpacked_avx512`](super::unpacked_avx512).

use std::arch::x86_64::*;

use super::int4::{FIRST_BIT, LINE_INPUTS, WORD_BYTES, ZERO_BITS};
use super::unpacked_avx512::{Packed, PackedNumbers, PackedPairs};

/// The power of two whose f32 counts ones from bit `bit` on: put a code there and it is `unit + q`, which one multiply-add makes `(q − zero)·scale`. From bit 11 on it is exact, for
/// `unit + zero` has thirteen bits then, and a scale eleven.
const fn unit(bit: u32) -> f32 {
    assert!(bit >= 11);
    (1u32 << (23 - bit)) as f32
}

/// Scales of sixteen outputs, and what is added to their products with `unit(bit) + q`, for codes from each of `bits` on.
///
/// # Safety
/// A word of each output must be readable, and the machine have AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn scales_and_shifts<const BITS: usize>(words: *const u8, bits: [u32; BITS]) -> (__m512, [__m512; BITS]) {
    // SAFETY: the caller's promise.
    let words = unsafe { _mm512_loadu_si512(words.cast()) };
    let zeros = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(ZERO_BITS as i32)));
    let scales = _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(ZERO_BITS as i32), words));
    let mut shifts = [_mm512_setzero_ps(); BITS];
    for i in 0..BITS {
        let taken_off = _mm512_add_ps(zeros, _mm512_set1_ps(unit(bits[i])));
        shifts[i] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(scales, taken_off));
    }
    (scales, shifts)
}

/// `(q − zero)·scale` of codes from bit `BIT` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn product<const BIT: u32>(words: __m512i, scale: __m512, shift: __m512) -> __m512 {
    let unit = _mm512_set1_epi32(const { unit(BIT).to_bits() as i32 });
    // `words & mask | unit`.
    let number = _mm512_ternarylogic_epi32::<0xf8>(unit, words, _mm512_set1_epi32(15 << BIT));
    _mm512_fmadd_ps(_mm512_castsi512_ps(number), scale, shift)
}

/// The bit from which on a code of the others of a step lies where one of the first eight does from [`FIRST_BIT`] on.
const OTHERS_BIT: u32 = FIRST_BIT + 4;

/// What codes of sixteen outputs become numbers with: of the first eight and of the others, each twice for its two inputs.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    scale: [__m512; 2],
    shift: [__m512; 2],
}

impl PackedPairs for Pairs {}

impl Packed for Pairs {
    const LINE_STEPS: usize = LINE_INPUTS / 2;
    const SCALE_BYTES: usize = WORD_BYTES;
    type Line = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load(words: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let (scales, [shift_first, shift_others]) = unsafe { scales_and_shifts(words, [FIRST_BIT, OTHERS_BIT]) };
        let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        let others = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        Pairs {
            scale: [_mm512_permutexvar_ps(first, scales), _mm512_permutexvar_ps(others, scales)],
            shift: [_mm512_permutexvar_ps(first, shift_first), _mm512_permutexvar_ps(others, shift_others)],
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn line(codes: __m512i) -> __m512i {
        codes
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn products<const STEP: usize>(&self, &line: &__m512i) -> [__m512; 2] {
        let turned = match STEP {
            0 => line,
            1 => _mm512_ror_epi32::<8>(line),
            2 => _mm512_ror_epi32::<16>(line),
            _ => _mm512_ror_epi32::<24>(line),
        };
        [
            product::<FIRST_BIT>(turned, self.scale[0], self.shift[0]),
            product::<OTHERS_BIT>(turned, self.scale[1], self.shift[1]),
        ]
    }
}

/// Bits from which on the codes of every other step of a line lie, once it is turned.
const EVEN_BIT: u32 = 11;
const ODD_BIT: u32 = EVEN_BIT + 8;

/// What codes of sixteen outputs become numbers with, where each output has a number of a vector.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    scale: __m512,
    shift: [__m512; 2],
}

impl PackedNumbers for Numbers {}

impl Packed for Numbers {
    const LINE_STEPS: usize = LINE_INPUTS / 2;
    const SCALE_BYTES: usize = WORD_BYTES;
    /// Of the first and of the second inputs: codes of steps 0 and 1 at [`EVEN_BIT`] and [`ODD_BIT`], and in others those of steps 2 and 3.
    type Line = [[__m512i; 2]; 2];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load(words: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let (scale, shift) = unsafe { scales_and_shifts(words, [EVEN_BIT, ODD_BIT]) };
        Numbers { scale, shift }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn line(codes: __m512i) -> Self::Line {
        const FIRST: i32 = (FIRST_BIT - EVEN_BIT) as i32;
        const OTHERS: i32 = (OTHERS_BIT - EVEN_BIT) as i32;
        let turn = _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(FIRST), _mm512_set1_epi32(OTHERS));
        // A word has codes of an output of each half.
        let first_words = _mm512_set_epi32(14, 12, 10, 8, 6, 4, 2, 0, 14, 12, 10, 8, 6, 4, 2, 0);
        let second_words = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 15, 13, 11, 9, 7, 5, 3, 1);
        let first = _mm512_rorv_epi32(_mm512_permutexvar_epi32(first_words, codes), turn);
        let second = _mm512_rorv_epi32(_mm512_permutexvar_epi32(second_words, codes), turn);
        [[first, second], [_mm512_ror_epi32::<16>(first), _mm512_ror_epi32::<16>(second)]]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn products<const STEP: usize>(&self, line: &Self::Line) -> [__m512; 2] {
        let [first, second] = line[STEP / 2];
        let Numbers { scale, shift: [even, odd] } = *self;
        match STEP % 2 {
            0 => [product::<EVEN_BIT>(first, scale, even), product::<EVEN_BIT>(second, scale, even)],
            _ => [product::<ODD_BIT>(first, scale, odd), product::<ODD_BIT>(second, scale, odd)],
        }
    }
}
