//! Rows of weights into panels: a row is cut into words of four bytes, one f32 or two bf16, and the words of sixteen rows are transposed at a time.
//!
//! Roofline: every byte is read once and written once, so memory bounds it: with AVX-512 a tile of 1 KiB is 64 shuffles, some 16 bytes a cycle of one core;
//! without, a word is a load and a store.

use crate::cpu::isa::Isa;
use crate::cpu::packed::LANES;

// A word is two bf16 as they lie in memory, the first in its lower half.
const _: () = assert!(cfg!(target_endian = "little"));

/// Writes `rows`, of `row_bytes` each, `stride` apart, as columns `first..` of a panel `[steps][width]` of words. What is missing of a last word is zero.
pub(crate) fn write_rows(
    isa: Isa,
    rows: &[u8],
    (row_bytes, stride): (usize, usize),
    first: usize,
    width: usize,
    panel: &mut [u32],
) {
    // The last row has nothing behind it.
    let (count, words) = ((rows.len() + stride - row_bytes) / stride, row_bytes / 4);
    assert!(row_bytes <= stride && first + count <= width && panel.len() >= row_bytes.div_ceil(4) * width);
    let mut row = 0;
    while row < count {
        let group = LANES.min(count - row);
        let (rows, column) = (&rows[row * stride..][..(group - 1) * stride + row_bytes], first + row);
        #[cfg(target_arch = "x86_64")]
        let done = if isa.has_avx512() && group == LANES { words / LANES * LANES } else { 0 };
        #[cfg(not(target_arch = "x86_64"))]
        let (done, _) = (0, isa);
        #[cfg(target_arch = "x86_64")]
        if done > 0 {
            // SAFETY: the machine has the instructions; sixteen rows have so many words, and the panel a line of at least `column + 16` for each.
            unsafe { avx512(rows, stride, done, column, width, panel) };
        }
        plain(rows, stride, done..words, column, width, panel);
        if words * 4 < row_bytes {
            for (r, row) in rows.chunks(stride).enumerate() {
                let mut word = [0; 4];
                word[..row_bytes - words * 4].copy_from_slice(&row[words * 4..row_bytes]);
                panel[words * width + column + r] = u32::from_le_bytes(word);
            }
        }
        row += group;
    }
}

/// Words `words` of at most sixteen rows, with no vectors: a few lines of the panel stay in cache until all rows have written to them.
fn plain(rows: &[u8], stride: usize, words: std::ops::Range<usize>, column: usize, width: usize, panel: &mut [u32]) {
    for start in words.clone().step_by(LANES) {
        let end = words.end.min(start + LANES);
        for (r, row) in rows.chunks(stride).enumerate() {
            let lines = panel[start * width..end * width].chunks_exact_mut(width);
            for (word, line) in row[start * 4..end * 4].as_chunks().0.iter().zip(lines) {
                line[column + r] = u32::from_le_bytes(*word);
            }
        }
    }
}

/// As [`plain`] for the first `words` of sixteen rows, a multiple of sixteen, in registers.
///
/// # Safety
/// The machine must have AVX-512 F. `rows` has sixteen rows of at least `words` words, and `panel` that many lines of `width`, at least `column + 16`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(rows: &[u8], stride: usize, words: usize, column: usize, width: usize, panel: &mut [u32]) {
    use std::arch::x86_64::*;
    for word in (0..words).step_by(LANES) {
        // SAFETY: in bounds by the caller's promise; unaligned loads and stores.
        let r: [__m512i; 16] =
            std::array::from_fn(|i| unsafe { _mm512_loadu_si512(rows.as_ptr().add(i * stride + word * 4).cast()) });
        // Of each four rows `4g..4g + 4`: `u[4g + c]` has in its quarter `q` the words `4q + c`.
        let t: [__m512i; 16] = std::array::from_fn(|i| match i % 2 {
            0 => _mm512_unpacklo_epi32(r[i], r[i + 1]),
            _ => _mm512_unpackhi_epi32(r[i - 1], r[i]),
        });
        let u: [__m512i; 16] = std::array::from_fn(|i| {
            let low = i / 4 * 4 + i % 4 / 2;
            if i % 2 == 0 { _mm512_unpacklo_epi64(t[low], t[low + 2]) } else { _mm512_unpackhi_epi64(t[low], t[low + 2]) }
        });
        for c in 0..4 {
            let even = |a, b| _mm512_shuffle_i32x4::<0x88>(a, b);
            let odd = |a, b| _mm512_shuffle_i32x4::<0xdd>(a, b);
            let (top, bottom) = ((u[c], u[4 + c]), (u[8 + c], u[12 + c]));
            let (e0, o0) = (even(top.0, top.1), odd(top.0, top.1));
            let (e1, o1) = (even(bottom.0, bottom.1), odd(bottom.0, bottom.1));
            for (q, line) in [even(e0, e1), even(o0, o1), odd(e0, e1), odd(o0, o1)].into_iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(panel.as_mut_ptr().add((word + 4 * q + c) * width + column).cast(), line) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    #[test]
    fn a_panel_has_every_word_of_every_row_in_its_place_and_nothing_else_is_touched() {
        for isa in Isa::available() {
            for (row_bytes, stride, count, first, width) in [
                (2, 2, 1, 0, 16),
                (64, 64, 16, 0, 16),
                (66, 66, 16, 3, 32),
                (66, 130, 17, 3, 32),
                (130, 130, 17, 5, 48),
                (256, 2048, 40, 20, 64),
                (2048, 2048, 64, 0, 64),
                (1030, 1030, 37, 27, 64),
                (12, 12, 64, 0, 64),
                (192, 256, 100, 16, 128),
            ] {
                // At an address that is a multiple of two alone, as rows of bf16 may lie, and the last up to its end.
                let bytes: Vec<u8> = (0..2 + stride * count).map(|i| random::philox(7, [i as u64, 0])[0] as u8).collect();
                let rows = &bytes[bytes.as_ptr() as usize % 4 / 2 * 2..][..stride * (count - 1) + row_bytes];
                let steps = row_bytes.div_ceil(4);
                let mut panel = vec![0xdead_beef; steps * width];
                write_rows(isa, rows, (row_bytes, stride), first, width, &mut panel);
                for (i, &word) in panel.iter().enumerate() {
                    let (step, column) = (i / width, i % width);
                    let expected = match column.checked_sub(first).filter(|row| *row < count) {
                        None => 0xdead_beef,
                        Some(row) => {
                            let byte = |b: usize| match step * 4 + b {
                                at if at < row_bytes => u32::from(rows[row * stride + at]) << (8 * b),
                                _ => 0,
                            };
                            (0..4).map(byte).sum()
                        }
                    };
                    assert_eq!(
                        word, expected,
                        "{isa}: {count} rows of {row_bytes} bytes, {stride} apart, step {step}, column {column}"
                    );
                }
            }
        }
    }
}
