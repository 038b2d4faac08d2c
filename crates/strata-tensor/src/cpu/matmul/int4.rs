//! Weights of four bits in groups with scales and zeros, and the way back to what kernels multiply.
//!
//! A group is 32, 64 or 128 inputs of one output. What is computed with is `(q − zero)·scale` in the compute dtype: a scale has eleven bits, so that the product is exact, and it is
//! rounded once. So the products have the bits of a model that had these very weights, in training and in sampling, with whatever kernel. Files that have such
//! groups are held as they are; of dense weights, a scale is the distance from the least weight (or zero) to the largest (or zero) over 15, rounded up to eleven bits, the zero is the multiple
//! nearest to where zero lies, and a weight is the nearest multiple.
//!
//! Layout: panels as those of the compute dtype (see `packed`). A panel of `width` outputs is, for each group of inputs, `width` words, and then its lines. A word is the scale, an f32,
//! with the zero in its last five bits, which a scale does not have. Lines lie as those of `int8`: for every 32 outputs those of the first 16 and of the others in turns. A line
//! is eight inputs of 16 outputs: word `2·(o % 8) + i % 2` has `q` of output `o` and input `i` in the four bits from bit `15 + 4·(2·(i / 2) + o / 8)` on, and goes round: turned right by
//! a byte for each pair of inputs, both codes of a word are mantissas of numbers of which one power of two each has to be taken off (`int4_avx512`). Where there is no output, scales are zero.
//!
//! Roofline: a decode step reads 0.56 bytes for a weight (groups of 64) where bytes with scales take 1.03 and bf16 2; blocks that several rows read are unpacked once, to stay in
//! cache.

use std::ops::Range;

use super::int8::{HALF, unpack_lines};
#[cfg(target_arch = "x86_64")]
use super::{int4_avx512, unpacked_avx512};
use crate::Element;
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::packed::LANES;
use crate::int4_rows::{Int4Rows, value};
use crate::weights::Int4Group;

/// Inputs of a line.
pub(super) const LINE_INPUTS: usize = 8;
/// Bytes of a line.
pub(super) const LINE_BYTES: usize = LINE_INPUTS * LANES / 2;
/// Bytes of a scale with its zero.
pub(super) const WORD_BYTES: usize = size_of::<u32>();
/// The bits of a word that are the zero.
pub(super) const ZERO_BITS: u32 = 15;
/// The first bit of the first code of a word of a line.
pub(super) const FIRST_BIT: u32 = 15;

/// Bytes of a group of each of `width` outputs.
pub(super) const fn group_bytes(group: usize, width: usize) -> usize {
    width * (WORD_BYTES + group / 2)
}

/// Bytes of one quantised matrix, padding included.
pub(crate) fn matrix_bytes(group: Int4Group, in_features: usize, out_features: usize) -> usize {
    let of_output = in_features.div_ceil(group.inputs()).saturating_mul(group_bytes(group.inputs(), 1));
    of_output.saturating_mul(out_features.next_multiple_of(LANES))
}

/// Bytes of a panel of `width` outputs, a multiple of [`LANES`].
pub(crate) fn panel_bytes(group: Int4Group, in_features: usize, width: usize) -> usize {
    in_features.div_ceil(group.inputs()) * group_bytes(group.inputs(), width)
}

/// Where in a group of a panel, scales included, the word of a line with the code of an output and an input lies, and from which bit on.
fn place(group: usize, width: usize, output: usize, input: usize) -> (usize, u32) {
    let (o, i, pair) = (output % LANES, input % LINE_INPUTS, output / (2 * LANES));
    let vectors = (width / LANES - 2 * pair).min(2);
    let lines = width * WORD_BYTES + pair * 2 * (group / LINE_INPUTS * LINE_BYTES);
    let line = input / LINE_INPUTS * vectors + output / LANES % 2;
    let bit = (FIRST_BIT + 4 * (2 * (i / 2) + o / 8) as u32) % u32::BITS;
    (lines + line * LINE_BYTES + WORD_BYTES * (2 * (o % 8) + i % 2), bit)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + WORD_BYTES].try_into().expect("a word is four bytes"))
}

/// The scale and the zero of a word.
fn scale_and_zero(word: u32) -> (f32, u8) {
    (f32::from_bits(word & !ZERO_BITS), (word & ZERO_BITS) as u8)
}

/// The most inputs of a group.
const GROUP_MAX: usize = Int4Group::Of128.inputs();

/// Writes the codes of one output of one group, one for each of its inputs, over whatever was there.
fn write(groups: &mut [u8], width: usize, output: usize, (scale, zero): (f32, u8), codes: &[u8]) {
    groups[WORD_BYTES * output..][..WORD_BYTES].copy_from_slice(&(scale.to_bits() | u32::from(zero)).to_le_bytes());
    for (line, &[a, b, c, d, e, f, g, h]) in codes.as_chunks::<LINE_INPUTS>().0.iter().enumerate() {
        let (at, bit) = place(codes.len(), width, output, line * LINE_INPUTS);
        // Two words have every second input each, a byte apart. What goes round has its last bits first.
        let (words, mask) = ([[a, c, e, g], [b, d, f, h]], 0x0f0f_0f0f_u32.rotate_left(bit));
        for (at, codes) in (at..).step_by(WORD_BYTES).zip(words) {
            let changed = word(groups, at) & !mask | u32::from_le_bytes(codes).rotate_left(bit);
            groups[at..at + WORD_BYTES].copy_from_slice(&changed.to_le_bytes());
        }
    }
}

/// Largest weight that is quantised.
pub(super) const LARGEST: f32 = 1e30;

/// Writes one output of a panel. `weights` are all its inputs.
///
/// # Errors
/// With a weight that is not finite or beyond [`LARGEST`].
pub(crate) fn quantize<T: Element>(
    isa: Isa,
    group: Int4Group,
    weights: &[T],
    panel: &mut [u8],
    width: usize,
    output: usize,
) -> Result<(), f32> {
    let group = group.inputs();
    let (mut values, mut codes) = ([0.0f32; GROUP_MAX], [0u8; GROUP_MAX]);
    let (values, codes) = (&mut values[..group], &mut codes[..group]);
    for (weights, groups) in weights.chunks(group).zip(panel.chunks_exact_mut(group_bytes(group, width))) {
        // What is behind the last input is multiplied with nothing, or with zero.
        values[weights.len()..].fill(0.0);
        let scale_and_zero = codes_of(isa, weights, values, codes)?;
        write(groups, width, output, scale_and_zero, codes);
    }
    Ok(())
}

multiversion! {
    /// The codes of a group, in the place of whatever was there, and its scale and zero. `values` has room for the weights, and zeros behind the last.
    fn codes_of<T: Element>(weights: &[T], values: &mut [f32], codes: &mut [u8]) -> Result<(f32, u8), f32> = codes_of_body;
}

#[inline(always)]
fn codes_of_body<T: Element>(_fma: impl Fma, weights: &[T], values: &mut [f32], codes: &mut [u8]) -> Result<(f32, u8), f32> {
    values.iter_mut().zip(weights).for_each(|(to, w)| *to = w.to_f32());
    let is_held = |w: f32| w.abs() <= LARGEST;
    // Without a branch, and so by vectors.
    if !values.iter().fold(true, |all, &w| all & is_held(w)) {
        return Err(values.iter().copied().find(|&w| !is_held(w)).unwrap_or(f32::NAN));
    }
    let (mut least, mut most) = ([0.0f32; LANES], [0.0f32; LANES]);
    for vector in values.as_chunks::<LANES>().0 {
        for (l, &w) in vector.iter().enumerate() {
            least[l] = if w < least[l] { w } else { least[l] };
            most[l] = if w > most[l] { w } else { most[l] };
        }
    }
    let (least, most) = (least.into_iter().fold(0.0, f32::min), most.into_iter().fold(0.0, f32::max));
    let scale = scale_for(most - least);
    let per_step = if scale > 0.0 { scale } else { f32::INFINITY };
    let zero = (-least / per_step).round_ties_even().clamp(0.0, 15.0);
    for (code, w) in codes.iter_mut().zip(&*values) {
        *code = ((w / per_step).round_ties_even() + zero).clamp(0.0, 15.0) as u8;
    }
    Ok((scale, zero as u8))
}

/// The least number of eleven bits that `range` is at most 15 times.
fn scale_for(range: f32) -> f32 {
    if range / 15.0 < *Int4Rows::SCALES.start() {
        return 0.0;
    }
    f32::from_bits(((range / 15.0).to_bits() + Int4Rows::SCALE_SPARE_BITS) & !Int4Rows::SCALE_SPARE_BITS)
}

/// Writes row `row` as one output of a panel, as it is. Its groups consist of `group`s.
pub(crate) fn write_row(group: Int4Group, rows: &Int4Rows<'_>, row: usize, panel: &mut [u8], width: usize, output: usize) {
    let inputs = group.inputs();
    let mut whole = [0; GROUP_MAX];
    for (i, (codes, groups)) in
        rows.codes(row).chunks(inputs).zip(panel.chunks_exact_mut(group_bytes(inputs, width))).enumerate()
    {
        let (scale, zero) = rows.group(row, i * inputs);
        let (own, behind) = whole[..inputs].split_at_mut(codes.len());
        own.copy_from_slice(codes);
        // As `quantize` has it.
        behind.fill(zero);
        write(groups, width, output, (scale, zero), &whole[..inputs]);
    }
}

/// Unpacks a part of a panel: steps `steps`, which begin with a line, to rows of `width` words.
pub(crate) fn unpack<T: Element>(
    isa: Isa,
    group: Int4Group,
    panel: &[u8],
    width: usize,
    steps: Range<usize>,
    words: &mut [u32],
) {
    let (group, per_step) = (group.inputs(), 4 / size_of::<T>());
    let inputs = steps.start * per_step..steps.end * per_step;
    assert!(inputs.start.is_multiple_of(LINE_INPUTS) && words.len() >= steps.len() * width && width.is_multiple_of(LANES));
    let mut input = inputs.start;
    while input < inputs.end {
        let count = (group - input % group).min(inputs.end - input);
        let groups = &panel[input / group * group_bytes(group, width)..][..group_bytes(group, width)];
        let words = &mut words[(input - inputs.start) / per_step * width..][..count / per_step * width];
        unpack_group::<T>(isa, groups, width, input % group / LINE_INPUTS, words);
        input += count;
    }
}

/// Lines from `first_line` on of one group of a panel, as many as `words` has room for.
fn unpack_group<T: Element>(isa: Isa, groups: &[u8], width: usize, first_line: usize, words: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if T::DTYPE == crate::DType::BF16 && isa.has_avx512() {
        let group = (groups.len() / width - WORD_BYTES) * 2;
        // SAFETY: the machine has the instructions.
        unsafe {
            unpacked_avx512::unpack::<int4_avx512::Pairs, int4_avx512::Numbers>(isa, group, groups, width, first_line, words)
        };
        return;
    }
    let (scales, lines) = groups.split_at(width * WORD_BYTES);
    // Of one vector of outputs.
    let vector_bytes = lines.len() / (width / LANES);
    for (pair, lines) in lines.chunks(2 * vector_bytes).enumerate() {
        let vectors = lines.len() / vector_bytes;
        for vector in 0..vectors {
            let first = (2 * pair + vector) * LANES;
            let scales: [(f32, u8); LANES] = std::array::from_fn(|l| scale_and_zero(word(scales, WORD_BYTES * (first + l))));
            let lines = &lines[(first_line * vectors + vector) * LINE_BYTES..];
            unpack_vector(isa, T::from_f32(0.0), &scales, lines, vectors, width, &mut words[first..]);
        }
    }
}

/// One weight, as it is computed with: the reference.
pub(crate) fn weight<T: Element>(group: Int4Group, panel: &[u8], width: usize, output: usize, input: usize) -> f32 {
    let group = group.inputs();
    let groups = &panel[input / group * group_bytes(group, width)..];
    let (at, bit) = place(group, width, output, input % group);
    let code = word(groups, at).rotate_right(bit) & 15;
    let (scale, zero) = scale_and_zero(word(groups, WORD_BYTES * output));
    T::from_f32(value(code as u8, zero, scale)).to_f32()
}

multiversion! {
    /// One vector of outputs of one group, in the dtype of `_zero`: `words` begins with it, `width` outputs to a step, and one in `every` of `lines` is of it.
    fn unpack_vector<T: Element>(_zero: T, scales: &[(f32, u8); LANES], lines: &[u8], every: usize, width: usize, words: &mut [u32]) = unpack_vector_body;
}

#[inline(always)]
fn unpack_vector_body<T: Element>(
    _fma: impl Fma,
    _zero: T,
    scales: &[(f32, u8); LANES],
    lines: &[u8],
    every: usize,
    width: usize,
    words: &mut [u32],
) {
    let zeros = scales.map(|(_, zero)| f32::from(zero));
    let scales = scales.map(|(scale, _)| scale);
    unpack_lines::<T, { LINE_INPUTS / 2 }>(lines, every, width, words, |word, pair, output| {
        let code = word.rotate_right(FIRST_BIT + 4 * (2 * pair + output / HALF) as u32) & 15;
        // By way of i32, for which every processor has the instruction.
        (code as i32 as f32 - zeros[output]) * scales[output] + 0.0
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::random;

    const GROUPS: [Int4Group; 3] = [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128];

    /// All weights of a panel, unpacked in parts of `cut` steps.
    fn unpacked<T: Element>(isa: Isa, group: Int4Group, panel: &[u8], (width, inputs): (usize, usize), cut: usize) -> Vec<f32> {
        let per_step = 4 / size_of::<T>();
        let steps = inputs.div_ceil(per_step);
        let mut words = vec![0; steps * width];
        for first in (0..steps).step_by(cut) {
            let part = first..steps.min(first + cut);
            unpack::<T>(isa, group, panel, width, part.clone(), &mut words[first * width..part.end * width]);
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

    fn weights_come_back<T: Element>(group: Int4Group) {
        for (inputs, width) in [(64, 16), (200, 64), (33, 48), (130, 32)] {
            let weights: Vec<f32> = (0..inputs * width)
                .map(|i| match i {
                    0..40 => 0.0,
                    40..64 => random::normal([1, 0], i as u64) * 1e-37,
                    // Groups on one side of zero, too.
                    _ if i / 300 % 3 == 1 => random::normal([1, 0], i as u64).abs() + 2.0,
                    _ => random::normal([1, 0], i as u64) * 10f32.powi(-(i as i32 / 50 % 5)),
                })
                .collect();
            let panels = Isa::available().into_iter().map(|isa| {
                let mut panel = vec![0xa5; panel_bytes(group, inputs, width)];
                for (output, weights) in weights.chunks(inputs).enumerate() {
                    quantize(isa, group, weights, &mut panel, width, output).unwrap();
                }
                panel
            });
            let panels: Vec<_> = panels.collect();
            let panel = &panels[0];
            assert!(panels.iter().all(|other| other == panel), "codes are the same on every instruction set");
            for (isa, cut) in Isa::available().into_iter().flat_map(|isa| [8, 16, 40, 1000].map(|cut| (isa, cut))) {
                let back = unpacked::<T>(isa, group, panel, (width, inputs), cut);
                for (i, (&back, &weight_was)) in back.iter().zip(&weights).enumerate() {
                    let (output, input) = (i / inputs, i % inputs);
                    let first = i - input % group.inputs();
                    let own = &weights[first..(first + group.inputs()).min((output + 1) * inputs)];
                    let [least, most] = [f32::min, f32::max].map(|f| own.iter().fold(0.0, |a, &b| f(a, b)));
                    // Half a step of a scale that was rounded up for the weight and half of one for its zero, and the rounding of the weight.
                    assert!(
                        (back - weight_was).abs() <= (most - least) * (1.01 / 15.0 + 1.0 / 256.0) + 1e-29,
                        "{isa}: {back} for {weight_was} of {least} to {most}"
                    );
                    let reference = weight::<T>(group, panel, width, output, input);
                    assert_eq!(back.to_bits(), reference.to_bits(), "{isa}, {output} {input}");
                }
            }
        }
    }

    #[test]
    fn weights_come_back_to_a_step_with_the_same_bits_on_every_instruction_set() {
        for group in GROUPS {
            weights_come_back::<bf16>(group);
            weights_come_back::<f32>(group);
        }
    }

    /// Every code with every zero, and scales of every kind.
    #[test]
    fn what_is_held_is_unpacked_to_the_product_rounded_once_on_every_instruction_set() {
        let scales = [0.0, 1.0, -1.0, 65504.0, 5.960_464_5e-8, 0.333_251_95, -0.1, 9.9e29, 1.1e-30];
        let scales = scales.map(|scale: f32| f32::from_bits(scale.to_bits() & !Int4Rows::SCALE_SPARE_BITS));
        let codes: Vec<u8> = (0..32u8).map(|i| i % 16).collect();
        for (scale, zero) in scales.into_iter().flat_map(|scale| (0..=Int4Rows::ZERO_MAX).map(move |zero| (scale, zero))) {
            let (group, scales, zeros) = (Int4Group::Of32, [scale], [zero]);
            let rows = Int4Rows::new((32, 32), &codes, &scales, &zeros).unwrap();
            let mut panel = vec![0; panel_bytes(group, 32, LANES)];
            for output in [0, 7, 8, 15] {
                write_row(group, &rows, 0, &mut panel, LANES, output);
            }
            for isa in Isa::available() {
                let back = unpacked::<bf16>(isa, group, &panel, (LANES, 32), 16);
                let exact = unpacked::<f32>(isa, group, &panel, (LANES, 32), 32);
                for (i, output) in [0, 7, 8, 15].into_iter().flat_map(|output| (0..32).map(move |i| (i, output))) {
                    let product = (f64::from(codes[i]) - f64::from(zero)) * f64::from(scale) + 0.0;
                    let (rounded, exact) = (back[output * 32 + i], exact[output * 32 + i]);
                    assert_eq!(f64::from(exact).to_bits(), product.to_bits(), "{isa}: {} less {zero} by {scale}", codes[i]);
                    let expected = <bf16 as Element>::from_f32(product as f32).to_f32();
                    assert_eq!(rounded.to_bits(), expected.to_bits(), "{isa}: {} less {zero} by {scale}", codes[i]);
                }
            }
        }
    }

    #[test]
    fn a_weight_that_no_code_and_scale_can_hold_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -2e30] {
            for at in [0, 63, 64, 69] {
                let mut weights = [1.0f32; 70];
                weights[at] = bad;
                let mut panel = vec![0; panel_bytes(Int4Group::Of64, 70, LANES)];
                let refused = quantize(Isa::detect(), Int4Group::Of64, &weights, &mut panel, LANES, 3).unwrap_err();
                assert_eq!(refused.to_bits(), bad.to_bits());
            }
        }
    }

    #[test]
    fn scales_have_eleven_bits_and_no_range_is_beyond_fifteen_of_them() {
        for i in 0..10_000 {
            let range = random::normal([5, 0], i).abs() * 10f32.powi(i as i32 % 60 - 29);
            let scale = scale_for(range);
            assert_eq!(scale.to_bits() & Int4Rows::SCALE_SPARE_BITS, 0, "eleven bits");
            if scale > 0.0 {
                assert!((15.0 / 1.001..=15.0).contains(&(range / scale)), "{range} in steps of {scale}");
            } else {
                assert!(range < 2e-29);
            }
        }
    }
}
