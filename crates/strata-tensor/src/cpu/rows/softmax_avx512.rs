//! Blocks of attention, see [`attention_blocks`](super::softmax::attention_blocks), with AVX-512, and its conversion to bf16 where there is one: the bits of the portable code, operation by operation.
//!
//! Roofline (Zen 5): the exponentials of a row of 64 keys are 52 multiplications and multiply-adds, two a cycle, beside as many other operations on other pipes: 30 to 40 cycles, where
//! the products of the row take 256 at a head width of 128.

use std::arch::x86_64::*;

use half::bf16;

use super::exp::{EXPONENT_SHIFT, LARGEST, LN_2_HIGH, LN_2_LOW, POLYNOMIAL, ROUND, SMALLEST};
use super::softmax::BLOCK_KEYS;

/// Queries at a time: for each a lane.
const QUERIES: usize = 16;
/// Vectors of a block.
const VECTORS: usize = BLOCK_KEYS / 16;

/// The blocks, with these instructions and what they have to round two vectors to bf16.
macro_rules! blocks_of {
    ($name:ident, $features:literal, $to_bf16:path) => {
        pub(super) mod $name {
            use super::*;

            /// As [`attention_blocks`](super::softmax::attention_blocks).
            ///
            /// # Safety
            /// The machine must have these instructions.
            ///
            /// # Panics
            /// If the slices are not of as many queries each.
            #[target_feature(enable = $features)]
            pub(in crate::cpu::rows) unsafe fn attention_blocks(
                scores: &[f32],
                seen: &[[u32; 2]],
                scale: f32,
                maxima: &mut [f32],
                sums: &mut [f32],
                probabilities: &mut [bf16],
            ) {
                let (scores, probabilities) =
                    (scores.as_chunks::<BLOCK_KEYS>().0, probabilities.as_chunks_mut::<BLOCK_KEYS>().0);
                let queries = seen.len();
                assert!(maxima.len() == queries && sums.len() == queries && probabilities.len() == scores.len());
                let blocks = scores.len() / queries.max(1);
                for first in (0..queries).step_by(QUERIES) {
                    let range = first..queries.min(first + QUERIES);
                    let seen = &seen[range.clone()];
                    let out = &mut probabilities[range.start * blocks..range.end * blocks];
                    let (maxima, sums) = (&mut maxima[range.clone()], &mut sums[range]);
                    some_queries(&scores[first..], queries, seen, scale, maxima, sums, out);
                }
            }

            /// Up to [`QUERIES`], the blocks of whose scores are `stride` apart. What one query waits for, another fills, and lanes are joined for all of them at once.
            #[inline]
            #[target_feature(enable = $features)]
            fn some_queries(
                scores: &[[f32; BLOCK_KEYS]],
                stride: usize,
                seen: &[[u32; 2]],
                scale: f32,
                maxima: &mut [f32],
                sums: &mut [f32],
                probabilities: &mut [[bf16; BLOCK_KEYS]],
            ) {
                let (queries, scale) = (seen.len(), _mm512_set1_ps(scale));
                let blocks = probabilities.len() / queries;
                // Of most blocks all of them see all.
                let from = seen.iter().map(|seen| seen[0]).max().unwrap_or(0) as usize;
                let to = seen.iter().map(|seen| seen[1]).min().unwrap_or(0) as usize;
                let counted = |query: usize, block: usize| {
                    let (row, keys) = (&scores[block * stride + query], block * BLOCK_KEYS..(block + 1) * BLOCK_KEYS);
                    let mut vectors = [_mm512_setzero_ps(); VECTORS];
                    for (v, vector) in vectors.iter_mut().enumerate() {
                        // SAFETY: a row has as many vectors.
                        *vector = _mm512_mul_ps(unsafe { _mm512_loadu_ps(row.as_ptr().add(16 * v)) }, scale);
                    }
                    if keys.start < from || keys.end > to {
                        for (v, vector) in vectors.iter_mut().enumerate() {
                            *vector = masked(*vector, (keys.start + 16 * v) as u32, seen[query]);
                        }
                    }
                    vectors
                };
                let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); QUERIES];
                for block in 0..blocks {
                    for (query, largest) in largest.iter_mut().enumerate().take(queries) {
                        let [a, b, c, d] = counted(query, block);
                        *largest = larger(*largest, larger(larger(a, b), larger(c, d)));
                    }
                }
                let largest = across::<false>(largest);
                let is_finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(largest), _mm512_set1_ps(f32::INFINITY));
                let mut centers = [0.0; QUERIES];
                // SAFETY: as many as lanes.
                unsafe { _mm512_storeu_ps(centers.as_mut_ptr(), _mm512_maskz_mov_ps(is_finite, largest)) };
                let mut found = [_mm512_setzero_ps(); QUERIES];
                for (query, found) in found.iter_mut().enumerate().take(queries) {
                    let center = _mm512_set1_ps(centers[query]);
                    for block in 0..blocks {
                        let mut weights = counted(query, block);
                        for weight in &mut weights {
                            *weight = exp(_mm512_sub_ps(*weight, center));
                        }
                        let [a, b, c, d] = weights;
                        let sum = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), c), d);
                        *found = _mm512_add_ps(*found, sum);
                        let out = probabilities[query * blocks + block].as_mut_ptr().cast();
                        // SAFETY: a row is two vectors of bf16.
                        unsafe {
                            _mm512_storeu_si512(out, $to_bf16(a, b));
                            _mm512_storeu_si512(out.add(1), $to_bf16(c, d));
                        }
                    }
                }
                let found = across::<true>(found);
                let lanes: __mmask16 = ((1u32 << queries) - 1) as __mmask16;
                // SAFETY: lanes beyond the queries are not touched.
                unsafe {
                    _mm512_mask_storeu_ps(maxima.as_mut_ptr(), lanes, largest);
                    _mm512_mask_storeu_ps(sums.as_mut_ptr(), lanes, found);
                }
            }
        }
    };
}

blocks_of!(native, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma", rounded_natively);
blocks_of!(rounding, "avx512f,avx512bw,avx512vl,avx512dq,fma", rounded);

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rounded_natively(a: __m512, b: __m512) -> __m512i {
    // SAFETY: both types are 512 bits of bf16.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a)) }
}

/// As `bf16::from_f32`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
fn rounded(a: __m512, b: __m512) -> __m512i {
    let [a, b] = [a, b].map(|numbers| {
        let bits = _mm512_castps_si512(numbers);
        let is_even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_even, _mm512_set1_epi32(0x7fff)));
        // What is no number stays none.
        let is_none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(numbers, numbers);
        let rounded = _mm512_mask_or_epi32(rounded, is_none, bits, _mm512_set1_epi32(1 << 22));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    });
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
}

/// The scores of sixteen keys from `first` on, with negative infinity for those that are not seen.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
fn masked(scores: __m512, first: u32, [from, to]: [u32; 2]) -> __m512 {
    let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(first.wrapping_sub(from) as i32));
    let is_seen = _mm512_cmplt_epu32_mask(keys, _mm512_set1_epi32((to - from) as i32));
    _mm512_mask_blend_ps(is_seen, _mm512_set1_ps(f32::NEG_INFINITY), scores)
}

/// The larger of two, or `a` if `b` is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
fn larger(a: __m512, b: __m512) -> __m512 {
    // The second operand, where one is no number.
    _mm512_max_ps(b, a)
}

/// Joins the lanes of each query, by sums or by the larger: those of its second half to those of the first, and so on. Query `r` goes to lane `r`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
fn across<const SUMS: bool>(queries: [__m512; QUERIES]) -> __m512 {
    let join = |a, b| if SUMS { _mm512_add_ps(a, b) } else { larger(a, b) };
    let mut halves = [_mm512_setzero_ps(); 8];
    for k in 0..8 {
        let (a, b) = (queries[k], queries[k + 8]);
        halves[k] = join(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    }
    let mut quarters = [_mm512_setzero_ps(); 4];
    for k in 0..4 {
        let (a, b) = (halves[k], halves[k + 4]);
        quarters[k] = join(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    }
    let mut eighths = [_mm512_setzero_ps(); 2];
    for k in 0..2 {
        let (a, b) = (_mm512_castps_pd(quarters[k]), _mm512_castps_pd(quarters[k + 2]));
        eighths[k] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    let [a, b] = eighths;
    let joined = join(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
    // Queries 0 2 1 3, 8 10 9 11, 4 6 5 7 and 12 14 13 15.
    let places = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
    _mm512_permutexvar_ps(places, joined)
}

/// [`exp_f32`](super::exp::exp_f32) of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
fn exp(x: __m512) -> __m512 {
    let all = |value: f32| _mm512_set1_ps(value);
    // The second operand, where `x` is no number.
    let clamped = _mm512_min_ps(all(LARGEST), x);
    let shifted = _mm512_fmadd_ps(clamped, all(std::f32::consts::LOG2_E), all(ROUND));
    let n = _mm512_sub_ps(shifted, all(ROUND));
    let r = _mm512_fmadd_ps(n, all(-LN_2_LOW), _mm512_fmadd_ps(n, all(-LN_2_HIGH), clamped));
    let mut p = all(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        p = _mm512_fmadd_ps(p, r, all(*coefficient));
    }
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), all(1.0));
    let exponent = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(EXPONENT_SHIFT as i32));
    let power = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent));
    let scaled = _mm512_mul_ps(_mm512_mul_ps(p, power), all(2.0));
    let is_something = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, all(SMALLEST));
    _mm512_maskz_mov_ps(is_something, scaled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    #[test]
    fn numbers_are_rounded_as_one_by_one() {
        if !Isa::available().contains(&Isa::Avx512) {
            return;
        }
        // Halves of the last place below and above an even and an odd number, what is just off them, infinities, and what is no number.
        let upper = [0u32, 1, 0x0080, 0x3f80, 0x3f81, 0x7f7f, 0x7f80, 0x7fc0, 0x7fff, 0x8000, 0xbf81, 0xff80, 0xffff];
        let lower = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        let mut numbers: Vec<f32> =
            upper.iter().flat_map(|upper| lower.map(|lower| f32::from_bits(upper << 16 | lower))).collect();
        numbers.resize(numbers.len().next_multiple_of(32), 0.0);
        for numbers in numbers.as_chunks::<32>().0 {
            let mut found = [bf16::ZERO; 32];
            // SAFETY: the machine has the instructions, and both are of 32 numbers.
            unsafe {
                let (a, b) = (_mm512_loadu_ps(numbers.as_ptr()), _mm512_loadu_ps(numbers[16..].as_ptr()));
                _mm512_storeu_si512(found.as_mut_ptr().cast(), rounded(a, b));
            }
            let expected = numbers.map(bf16::from_f32);
            assert_eq!(found.map(bf16::to_bits), expected.map(bf16::to_bits), "{numbers:?}");
        }
    }

    /// Of queries that see all keys, some of them, one, and none; with scores so far apart that most probabilities round to nothing.
    #[test]
    fn blocks_have_the_same_bits_whatever_rounds_them() {
        if !Isa::available().contains(&Isa::Avx512Bf16) {
            return;
        }
        let (queries, blocks) = (19, 3);
        let keys = (blocks * BLOCK_KEYS) as u32;
        let seen: Vec<[u32; 2]> =
            (0..queries as u32).map(|q| [[0, keys], [q, keys - q], [q, q + 1], [0, 0]][q as usize % 4]).collect();
        for spread in [0.01, 1.0, 40.0] {
            let scores: Vec<f32> =
                (0..queries * blocks * BLOCK_KEYS).map(|i| ((i * 7919 % 1013) as f32 / 1013.0 - 0.5) * spread).collect();
            let found = [native::attention_blocks, rounding::attention_blocks].map(|run| {
                let (mut maxima, mut sums) = (vec![0.0; queries], vec![0.0; queries]);
                let mut probabilities = vec![bf16::ZERO; scores.len()];
                // SAFETY: the machine has the instructions.
                unsafe { run(&scores, &seen, 0.3, &mut maxima, &mut sums, &mut probabilities) };
                let bits: Vec<u32> = maxima.iter().chain(&sums).map(|v| v.to_bits()).collect();
                (bits, probabilities.into_iter().map(bf16::to_bits).collect::<Vec<_>>())
            });
            assert_eq!(found[0], found[1], "{spread}");
        }
    }
}
