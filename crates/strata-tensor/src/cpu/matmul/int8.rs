//! Weights as bytes in blocks with scales, and the way back to what kernels multiply.
//!
//! A block is 64 inputs of one output. Its scale is its largest magnitude over 127, rounded up to seven bits; a weight is the nearest multiple, and what is computed with is that
//! multiple in the compute dtype: `q·scale`, which has fourteen bits, rounded once. So the products have the bits of a model that had these very weights, in training and in
//! sampling, with whatever kernel.
//!
//! Layout: panels as those of the compute dtype (see `packed`). A panel of `width` outputs is, for each block of inputs, `width` scales in bf16, and then its bytes: for every 32
//! outputs sixteen lines of 64 bytes for the first 16 of them and as many for the others, in turns, so that memory is read from front to back. A line is four inputs of 16 outputs:
//! byte `4·(2·(o % 8) + i % 2) + 2·(i / 2) + o / 8` is `q + 128` of output `o` and input `i`, for numbers are made of bytes where they lie (`int8_avx512`). Where there is no
//! output, scales are zero.
//!
//! Roofline: a decode step reads 1.03 bytes for a weight where bf16 takes 2, and spends a dozen vector operations on the 64 of a line; blocks that several rows read are unpacked
//! once, to stay in cache.

use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::{int8_avx512, unpacked_avx512};
use crate::Element;
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::packed::{LANES, PANEL};

/// Inputs of a block.
pub(crate) const BLOCK_INPUTS: usize = PANEL;
/// Inputs of a line.
pub(super) const LINE_INPUTS: usize = 4;
/// Bytes of a line.
pub(super) const LINE_BYTES: usize = LINE_INPUTS * LANES;
/// Bytes of a block of each of [`LANES`] outputs, without scales.
pub(super) const VECTOR_BYTES: usize = BLOCK_INPUTS * LANES;

/// What is added to a multiple to make it a byte.
pub(super) const OFFSET: f32 = 128.0;

/// Bytes of the blocks of a panel that share their inputs.
pub(super) const fn blocks_bytes(width: usize) -> usize {
    width * (size_of::<bf16>() + BLOCK_INPUTS)
}

/// Bytes of one quantised matrix, padding included.
pub(crate) fn matrix_bytes(in_features: usize, out_features: usize) -> usize {
    in_features.div_ceil(BLOCK_INPUTS).saturating_mul(blocks_bytes(1)).saturating_mul(out_features.next_multiple_of(LANES))
}

/// Bytes of a panel of `width` outputs, a multiple of [`LANES`].
pub(crate) fn panel_bytes(in_features: usize, width: usize) -> usize {
    in_features.div_ceil(BLOCK_INPUTS) * blocks_bytes(width)
}

/// Where in the blocks of a panel, scales included, the byte of an output and an input lies.
fn place(width: usize, output: usize, input: usize) -> usize {
    let (o, i, pair) = (output % LANES, input % LINE_INPUTS, output / (2 * LANES));
    let vectors = (width / LANES - 2 * pair).min(2);
    let lines = width * size_of::<bf16>() + pair * 2 * VECTOR_BYTES;
    let line = input / LINE_INPUTS * vectors + output / LANES % 2;
    lines + line * LINE_BYTES + 4 * (2 * (o % 8) + i % 2) + 2 * (i / 2) + o / 8
}

/// Largest weight that can be stored: 2^23 times the scale of its block, which kernels make of bytes, is a number still.
pub(super) const LARGEST: f32 = 1e30;

/// Writes one output of a panel. `weights` are all its inputs.
///
/// # Errors
/// With a weight that is not finite or beyond [`LARGEST`].
pub(crate) fn quantize<T: Element>(isa: Isa, weights: &[T], panel: &mut [u8], width: usize, output: usize) -> Result<(), f32> {
    for (weights, blocks) in weights.chunks(BLOCK_INPUTS).zip(panel.chunks_exact_mut(blocks_bytes(width))) {
        let mut block = [0.0; BLOCK_INPUTS];
        block.iter_mut().zip(weights).for_each(|(to, w)| *to = w.to_f32());
        if let Some(&w) = block.iter().find(|w| w.is_nan() || w.abs() > LARGEST) {
            return Err(w);
        }
        let scale = scale_for(block.iter().fold(0.0f32, |largest, w| largest.max(w.abs())));
        blocks[2 * output..][..2].copy_from_slice(&scale.to_bits().to_le_bytes());
        for (input, byte) in to_bytes(isa, &block, scale.to_f32()).into_iter().enumerate() {
            blocks[place(width, output, input)] = byte;
        }
    }
    Ok(())
}

multiversion! {
    /// The nearest multiples of a scale, as bytes.
    fn to_bytes(weights: &[f32; BLOCK_INPUTS], scale: f32) -> [u8; BLOCK_INPUTS] = to_bytes_body;
}

#[inline(always)]
fn to_bytes_body(_fma: impl Fma, weights: &[f32; BLOCK_INPUTS], scale: f32) -> [u8; BLOCK_INPUTS] {
    let scale = if scale > 0.0 { scale } else { f32::INFINITY };
    weights.map(|w| ((w / scale).round_ties_even() + OFFSET) as u8)
}

/// The least number of seven bits that `largest` is at most 127 times.
fn scale_for(largest: f32) -> bf16 {
    // Multiples of the smallest of scales are normal numbers still, which no kernel flushes.
    if largest < 1e-30 {
        return bf16::ZERO;
    }
    const BELOW: u32 = (1 << 17) - 1;
    <bf16 as Element>::from_f32(f32::from_bits(((largest / 127.0).to_bits() + BELOW) & !BELOW))
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
        if T::DTYPE == crate::DType::BF16 && isa.has_avx512() {
            // SAFETY: the machine has the instructions.
            unsafe {
                unpacked_avx512::unpack::<int8_avx512::Pairs, int8_avx512::Numbers>(isa, BLOCK_INPUTS, blocks, width, 0, words)
            };
            continue;
        }
        let (scales, lines) = blocks.split_at(width * size_of::<bf16>());
        for (pair, lines) in lines.chunks(2 * VECTOR_BYTES).enumerate() {
            for vector in 0..lines.len() / VECTOR_BYTES {
                let first = (2 * pair + vector) * LANES;
                let scales: [f32; LANES] = std::array::from_fn(|l| scale_at(scales, first + l));
                unpack_vector(
                    isa,
                    T::from_f32(0.0),
                    &scales,
                    &lines[vector * LINE_BYTES..],
                    lines.len() / VECTOR_BYTES,
                    width,
                    &mut words[first..],
                );
            }
        }
    }
}

/// One weight, as it is computed with: the reference.
pub(crate) fn weight<T: Element>(panel: &[u8], width: usize, output: usize, input: usize) -> f32 {
    let blocks = &panel[input / BLOCK_INPUTS * blocks_bytes(width)..];
    let multiple = blocks[place(width, output, input % BLOCK_INPUTS)] as f32 - OFFSET;
    T::from_f32(multiple * scale_at(blocks, output)).to_f32()
}

fn scale_at(scales: &[u8], output: usize) -> f32 {
    bf16::from_bits(u16::from_le_bytes([scales[2 * output], scales[2 * output + 1]])).to_f32()
}

multiversion! {
    /// One vector of outputs of one block, in the dtype of `_zero`: `words` begins with it, `width` outputs to a step, and one in `every` of `lines` is of it.
    fn unpack_vector<T: Element>(_zero: T, scales: &[f32; LANES], lines: &[u8], every: usize, width: usize, words: &mut [u32]) = unpack_vector_body;
}

#[inline(always)]
fn unpack_vector_body<T: Element>(
    _fma: impl Fma,
    _zero: T,
    scales: &[f32; LANES],
    lines: &[u8],
    every: usize,
    width: usize,
    words: &mut [u32],
) {
    unpack_lines::<T, { LINE_INPUTS / 2 }>(lines, every, width, words, |word, pair, output| {
        let byte = word >> (8 * (2 * pair + output / HALF)) & 0xff;
        // By way of i32, for which every processor has the instruction.
        (byte as i32 as f32 - OFFSET) * scales[output]
    });
}

/// Outputs whose codes lie in one place of the words of a line, half of a vector.
pub(super) const HALF: usize = LANES / 2;

/// Lines of one vector of outputs, one in `every` of `lines`, of `PAIRS` pairs of inputs each, in dtype `T`: `words` begins with it, `width` outputs to a step. `weight(word, pair, output)` is what a word of
/// the line holds of a pair of inputs of an output, the first or the second: words of firsts and of seconds lie in turns.
#[inline(always)]
pub(super) fn unpack_lines<T: Element, const PAIRS: usize>(
    lines: &[u8],
    every: usize,
    width: usize,
    words: &mut [u32],
    weight: impl Fn(u32, usize, usize) -> f32,
) {
    let per_step = 4 / size_of::<T>();
    let lines = lines.as_chunks::<LINE_BYTES>().0.iter().step_by(every);
    for (line, steps) in lines.zip(words.chunks_mut(2 * PAIRS / per_step * width)) {
        let line = line.as_chunks::<8>().0;
        // Loops, which the compiler makes vectors of whatever the instructions; functions of the standard library it compiles for the least of processors.
        let (mut firsts, mut seconds) = ([0u32; HALF], [0u32; HALF]);
        for o in 0..HALF {
            let both = u64::from_le_bytes(line[o]);
            (firsts[o], seconds[o]) = (both as u32, (both >> 32) as u32);
        }
        for (pair, steps) in steps.chunks_mut(2 / per_step * width).enumerate() {
            for half in 0..2 {
                let (mut first, mut second, mut pairs) = ([0u32; HALF], [0u32; HALF], [0u32; HALF]);
                for o in 0..HALF {
                    first[o] = T::from_f32(weight(firsts[o], pair, HALF * half + o)).to_f32().to_bits();
                    second[o] = T::from_f32(weight(seconds[o], pair, HALF * half + o)).to_f32().to_bits();
                    pairs[o] = first[o] >> 16 | second[o];
                }
                let mut put = |step: usize, values: [u32; HALF]| {
                    let at = step * width + HALF * half;
                    // A last pair may be one input alone.
                    if let Some(to) = steps.get_mut(at..at + HALF) {
                        to.copy_from_slice(&values);
                    }
                };
                if per_step == 2 {
                    put(0, pairs);
                } else {
                    put(0, first);
                    put(1, second);
                }
            }
        }
    }
}

/// Operands of a product of a few rows with a panel of weights in bytes, or of four bits.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // It has kernels there alone.
pub(crate) struct BytesTile {
    /// Steps of the reduction: two inputs each.
    pub steps: usize,
    /// First row of the left side: `steps` pairs of bf16.
    pub a: *const u8,
    /// Bytes from one row of the left side to the next.
    pub a_stride: usize,
    /// The panel.
    pub b: *const u8,
    /// Outputs of the panel, padding included.
    pub width: usize,
    /// Inputs that share a scale.
    pub group: usize,
    /// Result.
    pub c: *mut f32,
    /// Elements from one row of the result to the next.
    pub c_stride: usize,
    /// Columns of the result that exist; the last vector may be cut.
    pub columns: usize,
    /// Whether to begin from the result's present values instead of zero.
    pub accumulate: bool,
}

/// A kernel that multiplies a few rows with a panel of weights in bytes, or of four bits, without writing them anywhere.
#[derive(Clone, Copy)]
pub(crate) struct BytesKernel {
    /// The product of `rows` rows with all the panel.
    ///
    /// # Safety
    /// All operands must be readable, and the result writable, for 1 to `rows_max` rows. The machine must have the instructions.
    pub run: unsafe fn(rows: usize, tile: &BytesTile),
    /// From more rows on it costs less to unpack a block once to cache.
    pub rows_max: usize,
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
                quantize(Isa::detect(), weights, &mut panel, width, output).unwrap();
            }
            for isa in Isa::available() {
                let back = unpacked::<T>(isa, &panel, width, inputs);
                for (i, (&back, &weight_was)) in back.iter().zip(&weights).enumerate() {
                    let (output, input) = (i / inputs, i % inputs);
                    let block = &weights
                        [i - input % BLOCK_INPUTS..(i - input % BLOCK_INPUTS + BLOCK_INPUTS).min((output + 1) * inputs)];
                    let largest = block.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
                    // Half a step of a scale that was rounded up, and the rounding of the weight.
                    assert!(
                        (back - weight_was).abs() <= largest * (0.5 * 1.02 / 127.0 + 1.0 / 256.0) + 1e-30,
                        "{isa}: {back} for {weight_was}"
                    );
                    assert_eq!(back.to_bits(), weight::<T>(&panel, width, output, input).to_bits(), "{isa}, {output} {input}");
                }
            }
        }
    }

    #[test]
    fn a_weight_that_no_byte_and_scale_can_hold_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -2e30] {
            for at in [0, 63, 64, 69] {
                let mut weights = [1.0f32; 70];
                weights[at] = bad;
                let mut panel = vec![0; panel_bytes(70, LANES)];
                let refused = quantize(Isa::detect(), &weights, &mut panel, LANES, 3).unwrap_err();
                assert_eq!(refused.to_bits(), bad.to_bits());
            }
        }
    }

    #[test]
    fn no_multiple_is_beyond_a_byte_and_the_largest_is_kept_to_a_step() {
        for i in 0..10_000 {
            let largest = random::normal([5, 0], i).abs() * 10f32.powi(i as i32 % 60 - 29);
            let scale = scale_for(largest).to_f32();
            assert_eq!(scale.to_bits() & 0x1_ffff, 0, "seven bits");
            if largest >= 1e-30 {
                assert!((127.0 / 1.02..=127.0).contains(&(largest / scale)), "{largest} in steps of {scale}");
            }
        }
    }

    #[test]
    fn weights_come_back_to_half_a_step_with_the_same_bits_on_every_instruction_set() {
        weights_come_back::<bf16>();
        weights_come_back::<f32>();
    }
}
