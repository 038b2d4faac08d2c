//! Codes of four bits in words of eight, as GPTQ, AWQ and compressed-tensors write them: in what order, and what is beside what.

use std::ops::Range;

use crate::pieces::{Run, fill_pieces};

/// Codes of a word.
pub const INT4_CODES: usize = 8;
/// Where in a word of AWQ the code of output `o % 8` is: its unpacking interleaves halves, `[0, 2, 4, 6, 1, 3, 5, 7]`.
const AWQ_PLACES: [usize; INT4_CODES] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Rows to a piece.
const ROWS: usize = 16;

/// How the words of a matrix `[outputs, inputs]` lie. What of a last word is beyond its matrix is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int4Words {
    /// `[inputs / 8, outputs]`, a word eight inputs of an output (Frantar et al., 2022, arXiv:2210.17323; as AutoGPTQ writes them).
    Gptq,
    /// `[inputs, outputs / 8]`, a word eight outputs of an input, in an order of its own (Lin et al., 2023, arXiv:2306.00978; as AutoAWQ writes them).
    Awq,
    /// `[outputs, inputs / 8]`, a word eight inputs of an output.
    CompressedTensors,
}

/// The zero of all groups where there are no zeros.
const SYMMETRIC_ZERO: u8 = 8;

/// A code of a word, the least bits first.
fn int4_code(word: [u8; 4], place: usize) -> u8 {
    (u32::from_le_bytes(word) >> (4 * place)) as u8 & 15
}

/// The code of an output in the word of AWQ that has it and its neighbours.
fn awq_code(word: [u8; 4], output: usize) -> u8 {
    int4_code(word, AWQ_PLACES[output % INT4_CODES])
}

/// The codes, a byte each, of rows `first..` of a matrix, as many as `out` has room for.
///
/// # Panics
/// If the matrix has not as many.
pub fn unpack_codes(
    run: Run<'_>,
    lie: Int4Words,
    words: &[[u8; 4]],
    [outputs, inputs]: [usize; 2],
    first: usize,
    out: &mut [u8],
) {
    fill_pieces(run, out, ROWS * inputs, &|piece, out| {
        let first = first + piece * ROWS;
        match lie {
            Int4Words::Gptq => {
                // What lies together is read together.
                for (word, words) in words.chunks_exact(outputs).enumerate() {
                    for (row, &codes) in out.chunks_exact_mut(inputs).zip(&words[first..]) {
                        let to = row[word * INT4_CODES..].iter_mut().take(INT4_CODES);
                        to.enumerate().for_each(|(place, to)| *to = int4_code(codes, place));
                    }
                }
            }
            Int4Words::Awq => {
                for (input, words) in words.chunks_exact(outputs.div_ceil(INT4_CODES)).enumerate() {
                    for (output, row) in (first..).zip(out.chunks_exact_mut(inputs)) {
                        row[input] = awq_code(words[output / INT4_CODES], output);
                    }
                }
            }
            Int4Words::CompressedTensors => {
                let of_row = inputs.div_ceil(INT4_CODES);
                for (row, words) in out.chunks_exact_mut(inputs).zip(words[first * of_row..].chunks_exact(of_row)) {
                    for (to, &codes) in row.chunks_mut(INT4_CODES).zip(words) {
                        to.iter_mut().enumerate().for_each(|(place, to)| *to = int4_code(codes, place));
                    }
                }
            }
        }
    });
}

/// The scales and zeros of a matrix, one of each for every group of inputs of an output.
#[derive(Clone, Copy, Debug)]
pub struct Int4Groups<'a> {
    /// As the words of its codes lie.
    pub lie: Int4Words,
    /// Outputs of the matrix.
    pub outputs: usize,
    /// Groups of an output.
    pub groups: usize,
    /// `[groups, outputs]`, or with [`Int4Words::CompressedTensors`] `[outputs, groups]`.
    pub scales: &'a [f32],
    /// Words of eight outputs, `[groups, outputs / 8]`, or with [`Int4Words::CompressedTensors`] `[outputs / 8, groups]`; if there are none, all zeros are 8.
    pub zeros: Option<&'a [[u8; 4]]>,
    /// What those of [`Int4Words::Gptq`] are stored less than they are.
    pub zeros_less: u8,
}

impl Int4Groups<'_> {
    /// The scales and the zeros of some outputs, `[rows, groups]` each.
    ///
    /// # Panics
    /// If the matrix has not as many outputs, or there is less than it says.
    pub fn of_rows(&self, rows: Range<usize>) -> (Vec<f32>, Vec<u8>) {
        let all = || rows.clone().flat_map(|output| (0..self.groups).map(move |group| (output, group)));
        let scales = all().map(|(output, group)| self.scale(output, group)).collect();
        (scales, all().map(|(output, group)| self.zero(output, group)).collect())
    }

    fn scale(&self, output: usize, group: usize) -> f32 {
        match self.lie {
            Int4Words::Gptq | Int4Words::Awq => self.scales[group * self.outputs + output],
            Int4Words::CompressedTensors => self.scales[output * self.groups + group],
        }
    }

    fn zero(&self, output: usize, group: usize) -> u8 {
        let Some(zeros) = self.zeros else { return SYMMETRIC_ZERO };
        let (word, place) = (output / INT4_CODES, output % INT4_CODES);
        let of_outputs = group * self.outputs.div_ceil(INT4_CODES) + word;
        match self.lie {
            Int4Words::Gptq => {
                // As GPTQModel and AutoGPTQ convert one format into the other, `qzeros += 0x11111111`: by words, so that what a zero of 0 has borrowed comes back.
                let word = u32::from_le_bytes(zeros[of_outputs]);
                int4_code(word.wrapping_add(u32::from(self.zeros_less) * 0x1111_1111).to_le_bytes(), place)
            }
            Int4Words::Awq => awq_code(zeros[of_outputs], output),
            Int4Words::CompressedTensors => int4_code(zeros[word * self.groups + group], place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pieces::backwards;

    #[test]
    fn every_code_of_a_matrix_is_where_its_words_have_it() {
        let [outputs, inputs] = [2 * ROWS + 5, 21];
        let code = |output: usize, input: usize| ((output * 7 + input * 3 + output * input) % 16) as u8;
        let inside =
            |output: usize, input: usize| if output < outputs && input < inputs { u32::from(code(output, input)) } else { 15 };
        let word = |at: &dyn Fn(usize) -> u32| (0..INT4_CODES).map(|place| at(place) << (4 * place)).sum::<u32>().to_le_bytes();
        let of = |rows: usize, columns: usize, at: &dyn Fn(usize, usize) -> [u8; 4]| -> Vec<[u8; 4]> {
            (0..rows * columns).map(|i| at(i / columns, i % columns)).collect()
        };
        // As AutoAWQ packs them: of places in a word, the outputs.
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        for (lie, words) in [
            (Int4Words::Gptq, of(3, outputs, &|w, output| word(&|place| inside(output, w * INT4_CODES + place)))),
            (Int4Words::Awq, of(inputs, 5, &|input, w| word(&|place| inside(w * INT4_CODES + order[place], input)))),
            (Int4Words::CompressedTensors, of(outputs, 3, &|output, w| word(&|place| inside(output, w * INT4_CODES + place)))),
        ] {
            for first in [0, 3] {
                let mut out = vec![99; (outputs - first) * inputs];
                unpack_codes(&backwards, lie, &words, [outputs, inputs], first, &mut out);
                let expected = (first * inputs..outputs * inputs).map(|i| code(i / inputs, i % inputs));
                assert_eq!(out, expected.collect::<Vec<_>>(), "{lie:?} from row {first}");
            }
        }
    }

    #[test]
    fn scales_and_zeros_of_a_row_are_where_its_words_have_them() {
        let (outputs, groups) = (10, 3);
        let scales: Vec<f32> = (0..outputs * groups).map(|i| i as f32).collect();
        // Two words for the outputs of a group, or of each group for eight outputs.
        let words: Vec<[u8; 4]> = (0..2 * groups as u32).map(|i| (0x7654_3210 ^ (i * 0x1111_1111)).to_le_bytes()).collect();
        let of = |lie, zeros, zeros_less| {
            Int4Groups { lie, outputs, groups, scales: &scales, zeros, zeros_less }.of_rows(3..outputs)
        };
        let place_in = |lie, output: usize, group: usize| match lie {
            Int4Words::CompressedTensors => (output * groups + group, output / 8 * groups + group),
            Int4Words::Gptq | Int4Words::Awq => (group * outputs + output, group * 2 + output / 8),
        };
        let of_rows = || (3..outputs).flat_map(|output| (0..groups).map(move |group| (output, group)));
        // As AutoAWQ packs them: of outputs, the places in a word.
        let awq = [0, 4, 1, 5, 2, 6, 3, 7];
        for (lie, zeros_less) in
            [(Int4Words::Gptq, 0), (Int4Words::Gptq, 1), (Int4Words::Awq, 0), (Int4Words::CompressedTensors, 0)]
        {
            let (scales_of, zeros_of) = of(lie, Some(&words), zeros_less);
            for (i, (output, group)) in of_rows().enumerate() {
                let (scale, word) = place_in(lie, output, group);
                let place = if lie == Int4Words::Awq { awq[output % 8] } else { output % 8 };
                assert_eq!(scales_of[i], scale as f32, "{lie:?}");
                // The code of a place is the place, with the bits of its word turned; what is stored less by one carries on to the next, as all of a word did when it was stored.
                let whole = 0x7654_3210 ^ (word as u32 * 0x1111_1111);
                let expected = (whole + u32::from(zeros_less) * 0x1111_1111) >> (4 * place) & 15;
                assert_eq!(u32::from(zeros_of[i]), expected, "{lie:?}, {zeros_less} less, output {output}, group {group}");
            }
            assert_eq!(of(lie, None, zeros_less).1, vec![8; 7 * groups]);
        }
    }
}
