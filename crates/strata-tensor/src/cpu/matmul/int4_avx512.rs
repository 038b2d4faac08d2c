//! Weights of four bits, see [`int4`](super::int4), as pairs of bf16 with AVX-512.
//!
//! Roofline (Zen 5, two pipes that multiply, four in all): the 32 weights of a step of a line are a turn, two selections, two multiply-adds and a rounding, and a product for each row. Beyond [`ROWS_MAX`]
//! rows, unpacking once to cache is cheaper.

use std::arch::x86_64::*;

use super::int4::{FIRST_BIT, LINE_BYTES, LINE_INPUTS, WORD_BYTES, ZERO_BITS, group_bytes};
use super::int8::{BytesKernel, BytesTile};
use crate::cpu::packed::LANES;

/// How far ahead of what is unpacked memory is fetched.
const AHEAD_BYTES: usize = 2048;

/// Rows that are multiplied with what is in registers, at most: twelve accumulators, twelve numbers to unpack with, and what is being unpacked.
const ROWS_MAX: usize = 6;

/// The order of chains of `vdpbf16ps`, with weights unpacked in registers.
pub(super) const KERNEL: BytesKernel = BytesKernel { run: product, rows_max: ROWS_MAX };

/// Steps of a line: pairs of inputs.
const LINE_STEPS: usize = LINE_INPUTS / 2;

/// Powers of two whose f32 counts ones from where the codes of the first eight and of the others lie in a word that was turned: put a code there and it is `unit + q`, which one
/// multiply-add makes `(q − zero)·scale`. It is exact, for `unit + zero` has nine bits at most, and a scale eleven.
const UNITS: [f32; 2] = [(1u32 << (23 - FIRST_BIT)) as f32, (1u32 << (19 - FIRST_BIT)) as f32];

/// What codes of sixteen outputs become numbers with: of the first eight and of the others, each twice for its two inputs.
#[derive(Clone, Copy)]
struct Scales {
    scale: [__m512; 2],
    shift: [__m512; 2],
}

impl Scales {
    /// # Safety
    /// There must be sixteen words, and AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
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

    /// The pairs of bf16 of step `STEP` of a line, `TURN` being eight times as much: of the first eight outputs and of the others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn step<const TURN: i32>(&self, line: __m512i) -> __m512i {
        let turned = if TURN == 0 { line } else { _mm512_ror_epi32::<TURN>(line) };
        let rounded = _mm512_cvtne2ps_pbh(self.weights::<1>(turned), self.weights::<0>(turned));
        // SAFETY: both types are 512 bits of any value.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) }
    }

    /// `(q − zero)·scale` of the outputs of one half.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn weights<const HALF: usize>(&self, turned: __m512i) -> __m512 {
        let unit = _mm512_set1_epi32(UNITS[HALF].to_bits() as i32);
        let mask = _mm512_set1_epi32(15 << (FIRST_BIT as usize + 4 * HALF));
        // `turned & mask | unit`.
        let number = _mm512_ternarylogic_epi32::<0xf8>(unit, turned, mask);
        _mm512_fmadd_ps(_mm512_castsi512_ps(number), self.scale[HALF], self.shift[HALF])
    }
}

/// Lines from `first_line` on of a group of a panel, as pairs of bf16: as many steps as `words` has room for.
///
/// # Safety
/// The machine must have AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn unpack(groups: &[u8], width: usize, first_line: usize, words: &mut [u32]) {
    let steps = words.len() / width;
    let group = (groups.len() / width - WORD_BYTES) * 2;
    assert!(width.is_multiple_of(LANES) && groups.len() == group_bytes(group, width));
    assert!(group.is_multiple_of(LINE_INPUTS) && first_line * LINE_STEPS + steps <= group / 2);
    let vector_bytes = group / LINE_INPUTS * LINE_BYTES;
    for vector in 0..width / LANES {
        // SAFETY: in bounds by the assertions: `width` words, and then a line for every four steps of each vector.
        unsafe {
            let scales = Scales::load(groups.as_ptr().add(WORD_BYTES * vector * LANES));
            let vectors = (width / LANES - vector / 2 * 2).min(2);
            let lines = WORD_BYTES * width + vector / 2 * 2 * vector_bytes;
            let mut line = groups.as_ptr().add(lines + (first_line * vectors + vector % 2) * LINE_BYTES);
            for step in (0..steps).step_by(LINE_STEPS) {
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                let codes = _mm512_loadu_si512(line.cast());
                let to = words.as_mut_ptr().add(step * width + vector * LANES);
                let pairs =
                    [scales.step::<0>(codes), scales.step::<8>(codes), scales.step::<16>(codes), scales.step::<24>(codes)];
                for (i, pairs) in pairs.into_iter().enumerate().take(steps - step) {
                    _mm512_storeu_si512(to.add(i * width).cast(), pairs);
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
    let group_steps = t.group / 2;
    let vector_bytes = t.group / LINE_INPUTS * LINE_BYTES;
    for group in 0..t.steps.div_ceil(group_steps) {
        let done = group * group_steps;
        for vector in (0..vectors).step_by(2) {
            // SAFETY: what the caller vouches for begins here.
            unsafe {
                let groups = t.b.add(group * group_bytes(t.group, t.width));
                let scales = groups.add(WORD_BYTES * vector * LANES);
                let lines = groups.add(WORD_BYTES * t.width + vector * vector_bytes);
                let part = BytesTile {
                    steps: (t.steps - done).min(group_steps),
                    a: t.a.add(4 * done),
                    c: t.c.add(vector * LANES),
                    columns: t.columns - vector * LANES,
                    accumulate: t.accumulate || group > 0,
                    ..*t
                };
                match vectors - vector {
                    1 => vectors_of_group::<ROWS, 1>(scales, lines, &part),
                    _ => vectors_of_group::<ROWS, 2>(scales, lines, &part),
                }
            }
        }
    }
}

/// One group of one or two vectors of outputs.
#[allow(clippy::needless_range_loop)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn vectors_of_group<const ROWS: usize, const VECTORS: usize>(scales: *const u8, lines: *const u8, t: &BytesTile) {
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
            unpacking[v] = Scales::load(scales.add(WORD_BYTES * v * LANES));
            for r in 0..ROWS {
                if t.accumulate {
                    acc[r][v] = _mm512_maskz_loadu_ps(mask(v), t.c.add(r * t.c_stride + v * LANES));
                }
            }
        }
        let (mut line, mut a) = (lines, t.a);
        macro_rules! load_line {
            ($codes:ident) => {
                let mut $codes = [_mm512_setzero_si512(); VECTORS];
                for v in 0..VECTORS {
                    let line = line.add(v * LINE_BYTES);
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                    $codes[v] = _mm512_loadu_si512(line.cast());
                }
            };
        }
        macro_rules! multiply {
            ($step:literal, $codes:ident) => {
                let mut b = $codes;
                for v in 0..VECTORS {
                    b[v] = unpacking[v].step::<{ 8 * $step }>($codes[v]);
                }
                for r in 0..ROWS {
                    let a = _mm512_set1_epi32(a.add(r * t.a_stride + 4 * $step).cast::<i32>().read_unaligned());
                    for v in 0..VECTORS {
                        let b = std::mem::transmute::<__m512i, __m512bh>(b[v]);
                        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], std::mem::transmute::<__m512i, __m512bh>(a), b);
                    }
                }
            };
        }
        for _ in 0..t.steps / LINE_STEPS {
            load_line!(codes);
            multiply!(0, codes);
            multiply!(1, codes);
            multiply!(2, codes);
            multiply!(3, codes);
            line = line.add(VECTORS * LINE_BYTES);
            a = a.wrapping_add(2 * LINE_INPUTS);
        }
        let rest = t.steps % LINE_STEPS;
        if rest > 0 {
            load_line!(codes);
            multiply!(0, codes);
            if rest > 1 {
                multiply!(1, codes);
            }
            if rest > 2 {
                multiply!(2, codes);
            }
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                _mm512_mask_storeu_ps(t.c.add(r * t.c_stride + v * LANES), mask(v), acc[r][v]);
            }
        }
    }
}
