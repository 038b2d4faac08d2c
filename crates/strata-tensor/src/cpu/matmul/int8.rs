//! Weights as signed bytes in blocks with scales, and the way back to what kernels multiply.
//!
//! A block is 64 inputs of one output. Its scale, in bf16, is its largest magnitude over 127; a weight is the nearest multiple, and what is computed with is that multiple in the
//! compute dtype: `q·scale`, which has fifteen bits, rounded once. So the products have the bits of a model that had these very weights, in training and in sampling, with
//! whatever kernel.
//!
//! Layout: panels as those of the compute dtype (see `packed`). A panel of `width` outputs is, for each block of inputs, `width` scales and then 32 pairs of inputs of
//! `width` outputs, `[32][width][2]`; what there is no weight for is zero.
//!
//! Roofline: a decode step reads 1.03 bytes for a weight where bf16 takes 2, and spends 7 vector operations on 32 of them; unpacked blocks stay in cache.

use std::ops::Range;

use half::bf16;

use crate::Element;
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::packed::{LANES, PANEL};

/// Inputs of a block.
pub(crate) const BLOCK_INPUTS: usize = PANEL;

/// How many blocks ahead of what is unpacked memory is fetched.
#[cfg(target_arch = "x86_64")]
const AHEAD_BLOCKS: usize = 2;

/// Bytes of the blocks of a panel that share their inputs.
const fn blocks_bytes(width: usize) -> usize {
    width * (size_of::<bf16>() + BLOCK_INPUTS)
}

/// Bytes of one quantised matrix, padding included.
pub(crate) fn matrix_bytes(in_features: usize, out_features: usize) -> usize {
    in_features.div_ceil(BLOCK_INPUTS).saturating_mul(blocks_bytes(out_features.next_multiple_of(LANES)))
}

/// Bytes of a panel of `width` outputs, a multiple of [`LANES`].
pub(crate) fn panel_bytes(in_features: usize, width: usize) -> usize {
    in_features.div_ceil(BLOCK_INPUTS) * blocks_bytes(width)
}

/// Writes one output of a panel. `weights` are all its inputs.
pub(crate) fn quantize<T: Element>(weights: &[T], panel: &mut [u8], width: usize, output: usize) {
    for (weights, blocks) in weights.chunks(BLOCK_INPUTS).zip(panel.chunks_exact_mut(blocks_bytes(width))) {
        let (scales, pairs) = blocks.split_at_mut(width * size_of::<bf16>());
        let largest = weights.iter().fold(0.0f32, |largest, w| largest.max(w.to_f32().abs()));
        // Multiples of the smallest of scales are normal numbers still, which no kernel flushes.
        let scale = if largest < 1e-30 { bf16::ZERO } else { <bf16 as Element>::from_f32(largest / 127.0) };
        scales[2 * output..][..2].copy_from_slice(&scale.to_bits().to_le_bytes());
        for i in 0..BLOCK_INPUTS {
            let multiple = match weights.get(i) {
                Some(w) if scale > bf16::ZERO => (w.to_f32() / scale.to_f32()).round_ties_even().clamp(-127.0, 127.0),
                _ => 0.0,
            };
            pairs[(i / 2 * width + output) * 2 + i % 2] = multiple as i8 as u8;
        }
    }
}

/// Steps of a block of inputs in the compute dtype.
pub(crate) const fn block_steps<T>() -> usize {
    BLOCK_INPUTS * size_of::<T>() / 4
}

/// Unpacks whole blocks of a panel: steps `steps`, which begin with a block, to rows of `width` words. Of a last block whose inputs do not all exist, only steps asked for are written.
pub(crate) fn unpack<T: Element>(isa: Isa, panel: &[u8], width: usize, steps: Range<usize>, words: &mut [u32]) {
    let per_block = block_steps::<T>();
    assert!(steps.start.is_multiple_of(per_block) && words.len() >= steps.len() * width && width.is_multiple_of(LANES));
    let blocks = panel[steps.start / per_block * blocks_bytes(width)..].chunks_exact(blocks_bytes(width));
    for (words, blocks) in words[..steps.len() * width].chunks_mut(per_block * width).zip(blocks) {
        #[cfg(target_arch = "x86_64")]
        if T::DTYPE == crate::DType::BF16 && isa.has_avx512() && is_x86_feature_detected!("avx512bf16") {
            // SAFETY: the machine has the instructions.
            unsafe { avx512_bf16(blocks, width, words) };
            continue;
        }
        let (scales, pairs) = blocks.split_at(width * size_of::<bf16>());
        for first in (0..width).step_by(LANES) {
            let scales: [f32; LANES] = std::array::from_fn(|l| scale_at(scales, first + l));
            unpack_vector(isa, T::from_f32(0.0), &scales, &pairs[2 * first..], width, &mut words[first..]);
        }
    }
}

/// One weight, as it is computed with.
pub(crate) fn weight<T: Element>(panel: &[u8], width: usize, output: usize, input: usize) -> f32 {
    let blocks = &panel[input / BLOCK_INPUTS * blocks_bytes(width)..];
    let (scales, pairs) = blocks.split_at(width * size_of::<bf16>());
    let i = input % BLOCK_INPUTS;
    let multiple = pairs[(i / 2 * width + output) * 2 + i % 2] as i8;
    T::from_f32(multiple as f32 * scale_at(scales, output)).to_f32()
}

fn scale_at(scales: &[u8], output: usize) -> f32 {
    bf16::from_bits(u16::from_le_bytes([scales[2 * output], scales[2 * output + 1]])).to_f32()
}

multiversion! {
    /// One vector of outputs of one block, in the dtype of `_zero`: `pairs` and `words` begin with it, `width` outputs to a step.
    fn unpack_vector<T: Element>(_zero: T, scales: &[f32; LANES], pairs: &[u8], width: usize, words: &mut [u32]) = unpack_vector_body;
}

#[inline(always)]
fn unpack_vector_body<T: Element>(
    _fma: impl Fma,
    _zero: T,
    scales: &[f32; LANES],
    pairs: &[u8],
    width: usize,
    words: &mut [u32],
) {
    let per_step = 4 / size_of::<T>();
    for (step, words) in words.chunks_mut(width).enumerate() {
        let words: &mut [u32; LANES] = (&mut words[..LANES]).try_into().expect("a vector of words");
        let input = step * per_step;
        let pairs: &[u8; 2 * LANES] = pairs[input / 2 * width * 2..][..2 * LANES].try_into().expect("a vector of pairs");
        let value = |l: usize, which: usize| T::from_f32(pairs[2 * l + which] as i8 as f32 * scales[l]).to_f32().to_bits();
        for (l, word) in words.iter_mut().enumerate() {
            *word = if per_step == 1 { value(l, input % 2) } else { value(l, 0) >> 16 | value(l, 1) };
        }
    }
}

/// The blocks of a panel that share their inputs, as pairs of bf16: as many steps as `words` has room for.
///
/// # Safety
/// The machine must have the instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn avx512_bf16(blocks: &[u8], width: usize, words: &mut [u32]) {
    use std::arch::x86_64::*;
    let steps = words.len() / width;
    assert!(width.is_multiple_of(LANES) && blocks.len() == blocks_bytes(width) && steps <= BLOCK_INPUTS / 2);
    // Two numbers of each of the first eight outputs, and of the others.
    let low_twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    let high_twice = _mm512_add_epi32(low_twice, _mm512_set1_epi32(8));
    for first in (0..width).step_by(LANES) {
        // SAFETY: in bounds by the assertion: `width` scales, and then 32 steps of `width` pairs.
        unsafe {
            let narrow = _mm256_loadu_si256(blocks.as_ptr().add(2 * first).cast());
            let scales = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)));
            let low_scale = _mm512_permutexvar_ps(low_twice, scales);
            let high_scale = _mm512_permutexvar_ps(high_twice, scales);
            let mut pairs = blocks.as_ptr().add(2 * width + 2 * first);
            let mut out = words.as_mut_ptr().add(first);
            for _ in 0..steps {
                // Lines of a block further on, one after another: all at once they would wait for each other.
                _mm_prefetch::<_MM_HINT_T0>(pairs.wrapping_add(AHEAD_BLOCKS * blocks_bytes(width)).cast());
                let low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(pairs.cast())));
                let high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(pairs.add(LANES).cast())));
                let rounded = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, high_scale), _mm512_mul_ps(low, low_scale));
                _mm512_storeu_si512(out.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
                pairs = pairs.add(2 * width);
                out = out.wrapping_add(width);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    fn unpacked<T: Element>(isa: Isa, panel: &[u8], width: usize, inputs: usize) -> Vec<f32> {
        let per_step = 4 / size_of::<T>();
        let steps = inputs.div_ceil(per_step);
        let mut words = vec![0; steps * width];
        let cut = block_steps::<T>().min(steps);
        unpack::<T>(isa, panel, width, 0..cut, &mut words);
        if cut < steps {
            unpack::<T>(isa, panel, width, cut..steps, &mut words[cut * width..]);
        }
        let number = |output: usize, input: usize| {
            let word = words[input / per_step * width + output];
            match (per_step, input % 2) {
                (1, _) => f32::from_bits(word),
                (_, 0) => f32::from_bits(word << 16),
                _ => f32::from_bits(word & 0xffff_0000),
            }
        };
        (0..width * inputs).map(|i| number(i / inputs, i % inputs)).collect()
    }

    fn weights_come_back<T: Element>() {
        for (inputs, width) in [(64, 16), (200, 64), (33, 48), (130, 32)] {
            let weights: Vec<f32> = (0..inputs * width)
                .map(|i| random::normal([1, 0], i as u64) * 10f32.powi(-(i as i32 / 50 % 5)))
                // A block of zeros, and one of numbers too small to matter.
                .enumerate()
                .map(|(i, w)| {
                    if i < 40 {
                        0.0
                    } else if i < 64 {
                        w * 1e-37
                    } else {
                        w
                    }
                })
                .collect();
            let mut panel = vec![0; panel_bytes(inputs, width)];
            for (output, weights) in weights.chunks(inputs).enumerate() {
                quantize(weights, &mut panel, width, output);
            }
            for isa in Isa::available() {
                let back = unpacked::<T>(isa, &panel, width, inputs);
                for (i, (&back, &weight_was)) in back.iter().zip(&weights).enumerate() {
                    let (output, input) = (i / inputs, i % inputs);
                    let block = &weights
                        [i - input % BLOCK_INPUTS..(i - input % BLOCK_INPUTS + BLOCK_INPUTS).min((output + 1) * inputs)];
                    let largest = block.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
                    // Half a step, a scale that was rounded, and a weight that is.
                    assert!(
                        (back - weight_was).abs() <= largest * (0.5 / 127.0 + 1.0 / 256.0) + 1e-30,
                        "{isa}: {back} for {weight_was}"
                    );
                    assert_eq!(back.to_bits(), weight::<T>(&panel, width, output, input).to_bits(), "{isa}, {output} {input}");
                }
            }
        }
    }

    #[test]
    fn weights_come_back_to_half_a_step_with_the_same_bits_on_every_instruction_set() {
        weights_come_back::<bf16>();
        weights_come_back::<f32>();
    }
}
