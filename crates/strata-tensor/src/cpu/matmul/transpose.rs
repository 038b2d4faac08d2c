//! Transposes a block of packed weights in cache, so that the backward pass needs no second copy of them.
//!
//! From a panel, steps over inputs of 64 outputs, to a block with steps over outputs of 64 inputs. Each weight is moved once for a pass, at
//! about eight elements a cycle, against sixteen cycles of multiplication for every weight in a pass of a thousand tokens.

use std::ops::Range;

use crate::cpu::isa::Isa;
use crate::cpu::packed::{LANES, PANEL, PackedRef, dense_width};
use crate::{DType, WeightStorage};

/// Writes inputs `inputs` (at most a panel, beginning at a multiple of [`PANEL`]) of the output steps `out_steps` to `block`: one row of
/// `inputs.len()` words, padded to whole vectors, for each step. Words of the padding are unspecified.
pub(crate) fn block(isa: Isa, w: PackedRef<'_>, inputs: Range<usize>, out_steps: Range<usize>, block: &mut [u32]) {
    // SAFETY: packed buffers are aligned to pages, and every four bytes are a word.
    let words = unsafe { std::slice::from_raw_parts(w.bytes.as_ptr().cast::<u32>(), w.bytes.len() / 4) };
    // A panel of outputs of weights that are stored in fewer bits, as far as these inputs go.
    let mut unpacked;
    let per_step = 4 / w.dtype.size_bytes();
    let num_steps = super::steps(w.in_features, w.dtype);
    let block_width = inputs.len().next_multiple_of(LANES);
    let in_steps = inputs.start / per_step..inputs.end.div_ceil(per_step);
    let outputs_end = (out_steps.end * per_step).min(w.out_features);
    let mut output = out_steps.start * per_step;
    while output < outputs_end {
        let panel = output / PANEL;
        let in_panel = output % PANEL;
        let count = (PANEL - in_panel).min(outputs_end - output);
        let columns = super::panel_columns(panel, w.out_features);
        let (width, source) = match w.storage {
            WeightStorage::Dense => {
                let width = dense_width(columns);
                (width, &words[panel * PANEL * num_steps..][in_steps.start * width..num_steps * width])
            }
            WeightStorage::Int8 | WeightStorage::Int4(_) => {
                let width = columns.next_multiple_of(LANES);
                unpacked = [0; PANEL * PANEL];
                super::pack::unpack(isa, &w, panel, width, in_steps.clone(), &mut unpacked);
                (width, &unpacked[..in_steps.len() * width])
            }
        };
        let first_row = output / per_step - out_steps.start;
        let target = &mut block[first_row * block_width..];
        let source = &source[in_panel..];
        match w.dtype {
            DType::F32 => plain_f32(source, width, count, in_steps.len(), target, block_width),
            DType::BF16 => {
                #[cfg(target_arch = "x86_64")]
                if isa.has_avx512() && in_steps.len().is_multiple_of(16) && count.is_multiple_of(16) {
                    // SAFETY: the machine has the instruction set; sixteen outputs by sixteen steps at a time are in bounds.
                    unsafe { avx512_bf16(source, width, count, in_steps.len(), target, block_width) };
                    output += count;
                    continue;
                }
                plain_bf16(source, width, count, in_steps.len(), target, block_width);
            }
        }
        output += count;
    }
}

/// `target[output][input] = source[input][output]`.
fn plain_f32(source: &[u32], width: usize, outputs: usize, inputs: usize, target: &mut [u32], target_width: usize) {
    for (i, row) in source.chunks(width).take(inputs).enumerate() {
        for (o, &word) in row.iter().take(outputs).enumerate() {
            target[o * target_width + i] = word;
        }
    }
}

/// Transposes two by two: the source word of a step holds two inputs of an output, the target's two outputs of an input.
fn plain_bf16(source: &[u32], width: usize, outputs: usize, in_steps: usize, target: &mut [u32], target_width: usize) {
    for (s, row) in source.chunks(width).take(in_steps).enumerate() {
        // An odd last output is paired with the panel's zero padding; there is always some, for panels are even.
        for (pair, words) in row.chunks_exact(2).take(outputs.div_ceil(2)).enumerate() {
            let at = pair * target_width + 2 * s;
            target[at] = words[0] & 0xffff | words[1] << 16;
            target[at + 1] = words[0] >> 16 | words[1] & 0xffff_0000;
        }
    }
}

/// As [`plain_bf16`], sixteen outputs by sixteen steps in registers.
///
/// # Safety
/// `source` and `target` must hold `in_steps` and `outputs / 2` rows; both counts are multiples of 16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn avx512_bf16(source: &[u32], width: usize, outputs: usize, in_steps: usize, target: &mut [u32], target_width: usize) {
    use std::arch::x86_64::*;
    assert!(source.len() >= (in_steps - 1) * width + outputs);
    assert!(target.len() >= (outputs / 2 - 1) * target_width + in_steps * 2);
    // Within each 8 bytes (two inputs of output 0, two of output 1) swap the middle, giving two outputs of input 0 and two of input 1.
    let swap = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
    for o in (0..outputs).step_by(16) {
        for s in (0..in_steps).step_by(8) {
            // SAFETY: in bounds by the assertions above.
            unsafe {
                let load = |i: usize| {
                    let p = source.as_ptr().add((s + i) * width + o);
                    _mm512_shuffle_epi8(_mm512_loadu_si512(p.cast()), swap)
                };
                // An 8x8 transpose of 8-byte elements.
                let r: [__m512i; 8] = std::array::from_fn(load);
                let t: [__m512i; 8] = std::array::from_fn(|i| {
                    let (x, y) = (r[i & !1], r[i | 1]);
                    if i & 1 == 0 { _mm512_unpacklo_epi64(x, y) } else { _mm512_unpackhi_epi64(x, y) }
                });
                // t[2j + h] lane pairs: rows 2j, 2j+1 of column 2q + h in 128-bit lane q.
                for h in 0..2 {
                    let (a, b, c, d) = (t[h], t[2 + h], t[4 + h], t[6 + h]);
                    let ab02 = _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b);
                    let ab13 = _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b);
                    let cd02 = _mm512_shuffle_i64x2::<0b10_00_10_00>(c, d);
                    let cd13 = _mm512_shuffle_i64x2::<0b11_01_11_01>(c, d);
                    let columns = [
                        _mm512_shuffle_i64x2::<0b10_00_10_00>(ab02, cd02),
                        _mm512_shuffle_i64x2::<0b10_00_10_00>(ab13, cd13),
                        _mm512_shuffle_i64x2::<0b11_01_11_01>(ab02, cd02),
                        _mm512_shuffle_i64x2::<0b11_01_11_01>(ab13, cd13),
                    ];
                    for (q, column) in columns.into_iter().enumerate() {
                        let row = o / 2 + 2 * q + h;
                        _mm512_storeu_si512(target.as_mut_ptr().add(row * target_width + 2 * s).cast(), column);
                    }
                }
            }
        }
    }
}
