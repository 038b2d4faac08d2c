//! Weights in fewer bits with AVX-512: unpacked to pairs of bf16, and multiplied with a few rows from registers, in either order of [`chains`](super::chains) of bf16.
//!
//! [`int8`](super::int8) and [`int4`](super::int4) say how they lie, and [`Packed`] what becomes of a line: exact products of codes and scales, which an order rounds to bf16, once, and
//! multiplies. Beyond [`ROWS_MAX`] rows, unpacking once to cache is cheaper.
//!
//! Roofline: see there, and at each order.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::int8::{BytesKernel, BytesTile, LINE_BYTES};
use crate::cpu::isa::Isa;
use crate::cpu::packed::LANES;

/// How far ahead of what is unpacked memory is fetched: from 1 KiB to 8 KiB it makes no difference of more than 3%.
const AHEAD_BYTES: usize = 2048;

/// Rows that are multiplied with what is in registers, at most: twelve accumulators, eight to twelve numbers to unpack with, and what is being unpacked.
const ROWS_MAX: usize = 6;

// SAFETY: both types are 512 bits of any value.
const ZEROS: __m512 = unsafe { std::mem::transmute([0u32; LANES]) };
// SAFETY: as above.
const NO_PAIRS: __m512i = unsafe { std::mem::transmute([0u32; LANES]) };

/// Steps of a group at most, pairs of inputs.
const GROUP_STEPS_MAX: usize = 64;
/// Of a row of the left side, a group.
type LeftNumbers = [f32; 2 * GROUP_STEPS_MAX];

/// How weights of sixteen outputs of a group are packed: what their codes become numbers with.
pub(super) trait Packed: Copy {
    /// Steps of a line, two or four.
    const LINE_STEPS: usize;
    /// Bytes of the scale of an output.
    const SCALE_BYTES: usize;
    /// A line, in whose vectors each number of a step has its code where [`Packed::products`] finds it.
    type Line: Copy;

    /// From the scales of sixteen outputs.
    ///
    /// # Safety
    /// They must be readable, and the machine have AVX-512.
    unsafe fn load(scales: *const u8) -> Self;

    /// From the codes of a line, as they lie in memory.
    ///
    /// # Safety
    /// The machine must have AVX-512.
    unsafe fn line(codes: __m512i) -> Self::Line;

    /// The weights of step `STEP` of a line as products, of up to sixteen significant bits.
    ///
    /// # Safety
    /// The machine must have AVX-512.
    unsafe fn products<const STEP: usize>(&self, line: &Self::Line) -> [__m512; 2];
}

/// Packed weights whose products are those of the first eight outputs, the first and the second input of each in turns, and those of the others: as dot products of bf16 take them.
pub(super) trait PackedPairs: Packed {}

/// Packed weights whose products are those of the first input, and those of the second.
pub(super) trait PackedNumbers: Packed {}

/// Bytes of a group of each of `width` outputs.
const fn group_bytes<P: Packed>(group: usize, width: usize) -> usize {
    width * P::SCALE_BYTES + width / LANES * lines_bytes::<P>(group)
}

/// Bytes of a group of a vector of outputs, without scales.
const fn lines_bytes<P: Packed>(group: usize) -> usize {
    group / (2 * P::LINE_STEPS) * LINE_BYTES
}

/// Where the processor has fast dot products of bf16: pairs.
///
/// Roofline (Zen 5, two pipes that multiply, four in all): two multiply-adds and a rounding make the 32 weights of a step, beside what finds the codes, and a row is a product.
mod pairs {
    use super::*;

    /// A step of the right side.
    pub(super) type Step = __m512i;
    /// Zeros.
    pub(super) const EMPTY: Step = NO_PAIRS;
    /// Bytes of a step of a row of the left side.
    pub(super) const LEFT_BYTES: usize = 4;

    /// Where the rows of a left side of pairs are read, and the bytes from one to the next: as they are.
    ///
    /// # Safety
    /// None: nothing is read.
    #[inline(always)]
    pub(super) unsafe fn left<const ROWS: usize>(
        pairs: *const u8,
        stride: usize,
        _steps: usize,
        _to: *mut LeftNumbers,
    ) -> (*const u8, usize) {
        (pairs, stride)
    }

    /// Sixteen outputs of a step, rounded, of products of [`PackedPairs`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(super) fn step([first, others]: [__m512; 2]) -> Step {
        let rounded = _mm512_cvtne2ps_pbh(others, first);
        // SAFETY: both types are 512 bits of any value.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) }
    }

    /// A step as pairs of bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(super) fn pairs(step: Step) -> __m512i {
        step
    }

    /// Adds a step of a row to its sums.
    ///
    /// # Safety
    /// The step must be readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(super) unsafe fn add<const VECTORS: usize>(acc: &mut [__m512; VECTORS], left: *const u8, b: &[Step; VECTORS]) {
        // SAFETY: the caller's promise; both types are 512 bits of any value.
        unsafe {
            let a = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(left.cast::<i32>().read_unaligned()));
            for v in 0..VECTORS {
                acc[v] = _mm512_dpbf16_ps(acc[v], a, std::mem::transmute::<__m512i, __m512bh>(b[v]));
            }
        }
    }
}

/// Where it has none, or slow ones: f32, the first numbers of the pairs and then the second.
///
/// Roofline (Intel, two ports that compute): the 32 weights of a step are six multiplications beside what finds the codes, and a row is two multiply-adds, one cycle.
mod numbers {
    use super::*;

    /// A step of the right side: its first input, and its second.
    pub(super) type Step = [__m512; 2];
    /// Zeros.
    pub(super) const EMPTY: Step = [ZEROS; 2];
    /// Bytes of a step of a row of the left side.
    pub(super) const LEFT_BYTES: usize = 8;

    /// Where the rows of a left side of pairs are read, and the bytes from one to the next: widened to `to`.
    ///
    /// # Safety
    /// `steps` steps of each row must be readable, [`GROUP_STEPS_MAX`] at most, and `to` have room for the rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn left<const ROWS: usize>(
        pairs: *const u8,
        stride: usize,
        steps: usize,
        to: *mut LeftNumbers,
    ) -> (*const u8, usize) {
        for first in (0..2 * steps).step_by(LANES) {
            let mask = if 2 * steps - first < LANES { (1 << (2 * steps - first)) - 1 } else { !0 };
            for row in 0..ROWS {
                // SAFETY: the caller's promise; a masked lane is not touched.
                unsafe {
                    let from = pairs.add(row * stride + 2 * first);
                    let numbers = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                    let to = to.add(row).cast::<f32>().add(first);
                    _mm512_mask_storeu_epi32(to.cast(), mask, _mm512_slli_epi32::<16>(numbers));
                }
            }
        }
        (to.cast_const().cast(), size_of::<LeftNumbers>())
    }

    /// Rounds numbers of up to sixteen significant bits to the nearest bf16, ties to even.
    ///
    /// 2^16 times a number is one without those of its bits that bf16 lacks: added to that it is rounded where bf16 ends, and what is left when it is taken off is the number in bf16.
    /// (Dekker 1971, A floating-point technique for extending the available precision.)
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn rounded(numbers: __m512) -> __m512 {
        const SHIFT: f32 = 65536.0;
        let both = _mm512_mul_ps(numbers, _mm512_set1_ps(SHIFT + 1.0));
        _mm512_fnmadd_ps(numbers, _mm512_set1_ps(SHIFT), both)
    }

    /// Sixteen outputs of a step, rounded, of products of [`PackedNumbers`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn step([first, second]: [__m512; 2]) -> Step {
        [rounded(first), rounded(second)]
    }

    /// A step as pairs of bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn pairs([first, second]: Step) -> __m512i {
        _mm512_or_si512(_mm512_castps_si512(second), _mm512_srli_epi32::<16>(_mm512_castps_si512(first)))
    }

    /// Adds a step of a row to its sums.
    ///
    /// # Safety
    /// The step must be readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn add<const VECTORS: usize>(acc: &mut [__m512; VECTORS], left: *const u8, b: &[Step; VECTORS]) {
        // SAFETY: the caller's promise.
        let [first, second] = unsafe { left.cast::<[f32; 2]>().read_unaligned() };
        let (first, second) = (_mm512_set1_ps(first), _mm512_set1_ps(second));
        for v in 0..VECTORS {
            acc[v] = _mm512_fmadd_ps(first, b[v][0], acc[v]);
        }
        for v in 0..VECTORS {
            acc[v] = _mm512_fmadd_ps(second, b[v][1], acc[v]);
        }
    }
}

/// Lines from `first_line` on of a group of a panel, as pairs of bf16: as many steps as `words` has room for.
///
/// # Safety
/// The machine must have the instructions, AVX-512.
pub(super) unsafe fn unpack<P: PackedPairs, N: PackedNumbers>(
    isa: Isa,
    group: usize,
    groups: &[u8],
    width: usize,
    first_line: usize,
    words: &mut [u32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa.has_avx512_bf16() {
            true => native::unpack::<P>(group, groups, width, first_line, words),
            false => widened::unpack::<N>(group, groups, width, first_line, words),
        }
    }
}

macro_rules! kernels {
    ($(#[$doc:meta])* $name:ident, $order:ident, $packed:ident, $features:literal) => {
        $(#[$doc])*
        pub(super) mod $name {
            use super::*;

            /// A few rows with weights that are unpacked in registers.
            pub(in super::super) const fn kernel<P: $packed>() -> BytesKernel {
                BytesKernel { run: product::<P>, rows_max: ROWS_MAX }
            }

            /// Lines from `first_line` on of a group of a panel, as pairs of bf16: as many steps as `words` has room for.
            ///
            /// # Safety
            /// The machine must have the instructions.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn unpack<P: $packed>(
                group: usize,
                groups: &[u8],
                width: usize,
                first_line: usize,
                words: &mut [u32],
            ) {
                let steps = words.len() / width;
                assert!(width.is_multiple_of(LANES) && groups.len() == group_bytes::<P>(group, width));
                assert!(group.is_multiple_of(2 * P::LINE_STEPS) && first_line * P::LINE_STEPS + steps <= group / 2);
                for vector in 0..width / LANES {
                    // SAFETY: in bounds by the assertions: `width` scales, and then a line for every few steps of each vector.
                    unsafe {
                        let scales = P::load(groups.as_ptr().add(P::SCALE_BYTES * vector * LANES));
                        let vectors = (width / LANES - vector / 2 * 2).min(2);
                        let lines = P::SCALE_BYTES * width + vector / 2 * 2 * lines_bytes::<P>(group);
                        let mut line = groups.as_ptr().add(lines + (first_line * vectors + vector % 2) * LINE_BYTES);
                        for step in (0..steps).step_by(P::LINE_STEPS) {
                            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                            let codes = P::line(_mm512_loadu_si512(line.cast()));
                            let to = words.as_mut_ptr().add(step * width + vector * LANES);
                            macro_rules! write {
                                ($step:literal) => {
                                    if $step < P::LINE_STEPS && step + $step < steps {
                                        let step = $order::step(scales.products::<$step>(&codes));
                                        _mm512_storeu_si512(to.add($step * width).cast(), $order::pairs(step));
                                    }
                                };
                            }
                            write!(0);
                            write!(1);
                            write!(2);
                            write!(3);
                            line = line.wrapping_add(vectors * LINE_BYTES);
                        }
                    }
                }
            }

            /// See [`BytesKernel`].
            ///
            /// # Safety
            /// As there. The machine must have the instructions.
            unsafe fn product<P: $packed>(rows: usize, t: &BytesTile) {
                // SAFETY: passed on from the caller.
                unsafe {
                    match rows {
                        1 => panel::<P, 1>(t),
                        2 => panel::<P, 2>(t),
                        3 => panel::<P, 3>(t),
                        4 => panel::<P, 4>(t),
                        5 => panel::<P, 5>(t),
                        6 => panel::<P, 6>(t),
                        _ => unreachable!("{rows} rows in a tile of at most {ROWS_MAX}"),
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel<P: $packed, const ROWS: usize>(t: &BytesTile) {
                let (vectors, group_steps) = (t.width / LANES, t.group / 2);
                assert!(group_steps <= GROUP_STEPS_MAX);
                let mut numbers = [const { MaybeUninit::<LeftNumbers>::uninit() }; ROWS];
                for group in 0..t.steps.div_ceil(group_steps) {
                    let done = group * group_steps;
                    let steps = (t.steps - done).min(group_steps);
                    let accumulate = t.accumulate || group > 0;
                    // SAFETY: what the caller vouches for begins here; there is room for a group of each row.
                    unsafe {
                        let groups = t.b.add(group * group_bytes::<P>(t.group, t.width));
                        let (a, a_stride) =
                            $order::left::<ROWS>(t.a.add(4 * done), t.a_stride, steps, numbers.as_mut_ptr().cast());
                        for vector in (0..vectors).step_by(2) {
                            let scales = groups.add(P::SCALE_BYTES * vector * LANES);
                            let lines = groups.add(P::SCALE_BYTES * t.width + vector * lines_bytes::<P>(t.group));
                            let (c, columns) = (t.c.add(vector * LANES), t.columns - vector * LANES);
                            let part = BytesTile { steps, a, a_stride, c, columns, accumulate, ..*t };
                            match vectors - vector {
                                1 => vectors_of_group::<P, ROWS, 1>(scales, lines, &part),
                                _ => vectors_of_group::<P, ROWS, 2>(scales, lines, &part),
                            }
                        }
                    }
                }
            }

            /// One group of one or two vectors of outputs.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn vectors_of_group<P: $packed, const ROWS: usize, const VECTORS: usize>(
                scales: *const u8,
                lines: *const u8,
                t: &BytesTile,
            ) {
                let mask = |v: usize| -> __mmask16 {
                    match t.columns - v * LANES {
                        LANES.. => !0,
                        columns => (1 << columns) - 1,
                    }
                };
                // SAFETY: the caller vouches for all operands; a masked lane is not touched, and a prefetch of any address is harmless.
                unsafe {
                    let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                    let mut unpacking = [P::load(scales); VECTORS];
                    for v in 0..VECTORS {
                        unpacking[v] = P::load(scales.add(P::SCALE_BYTES * v * LANES));
                        for r in 0..ROWS {
                            if t.accumulate {
                                acc[r][v] = _mm512_maskz_loadu_ps(mask(v), t.c.add(r * t.c_stride + v * LANES));
                            }
                        }
                    }
                    let (mut line, mut a) = (lines, t.a);
                    // Written out, so that everything stays in registers.
                    macro_rules! multiply {
                        ($codes:ident, $step:literal) => {
                            if $step < P::LINE_STEPS {
                                let mut b = [$order::EMPTY; VECTORS];
                                for v in 0..VECTORS {
                                    b[v] = $order::step(unpacking[v].products::<$step>(&$codes[v]));
                                }
                                for r in 0..ROWS {
                                    $order::add(&mut acc[r], a.add(r * t.a_stride + $step * $order::LEFT_BYTES), &b);
                                }
                            }
                        };
                    }
                    macro_rules! load {
                        ($codes:ident) => {
                            let mut $codes = [P::line(NO_PAIRS); VECTORS];
                            for v in 0..VECTORS {
                                let line = line.add(v * LINE_BYTES);
                                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                                $codes[v] = P::line(_mm512_loadu_si512(line.cast()));
                            }
                        };
                    }
                    for _ in 0..t.steps / P::LINE_STEPS {
                        load!(codes);
                        multiply!(codes, 0);
                        multiply!(codes, 1);
                        multiply!(codes, 2);
                        multiply!(codes, 3);
                        line = line.add(VECTORS * LINE_BYTES);
                        a = a.wrapping_add(P::LINE_STEPS * $order::LEFT_BYTES);
                    }
                    let rest = t.steps % P::LINE_STEPS;
                    if rest > 0 {
                        load!(codes);
                        multiply!(codes, 0);
                        if rest > 1 {
                            multiply!(codes, 1);
                        }
                        if rest > 2 {
                            multiply!(codes, 2);
                        }
                    }
                    for r in 0..ROWS {
                        for v in 0..VECTORS {
                            _mm512_mask_storeu_ps(t.c.add(r * t.c_stride + v * LANES), mask(v), acc[r][v]);
                        }
                    }
                }
            }
        }
    };
}

kernels!(
    /// The order of chains of `vdpbf16ps`.
    native, pairs, PackedPairs, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"
);
kernels!(
    /// The order of multiply-adds of what was widened.
    widened, numbers, PackedNumbers, "avx512f,avx512bw,avx512vl,avx512dq"
);
