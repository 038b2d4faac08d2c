//! Weights of four bits in the memory of the host, as files have them whatever their layout, before a backend has them in its own.

use crate::{Error, Result};

/// Rows of weights `[rows, in_features]`, each `(code − zero)·scale` with a scale and a zero for every group of consecutive inputs of a row.
#[derive(Clone, Copy, Debug)]
pub struct Int4Rows<'a> {
    in_features: usize,
    group_inputs: usize,
    codes: &'a [u8],
    scales: &'a [f32],
    zeros: &'a [u8],
}

impl<'a> Int4Rows<'a> {
    /// The largest zero.
    pub const ZERO_MAX: u8 = 15;
    /// Magnitudes of scales that are not zero: beyond them, products of what kernels compute on the way are not finite or not normal.
    pub const SCALES: std::ops::RangeInclusive<f32> = 1e-30..=1e30;
    /// Bits of a scale's 23 that are zero: it has the eleven significant bits of f16, or fewer.
    pub(crate) const SCALE_SPARE_BITS: u32 = (1 << 13) - 1;

    /// Rows of `in_features` codes, and of as many scales and zeros as they have groups of `group_inputs`, of which the last may be cut.
    ///
    /// # Errors
    /// If there are not as many of one as of the others, a code is above 15, a zero above [`Int4Rows::ZERO_MAX`], or a scale is neither zero nor within
    /// [`Int4Rows::SCALES`] or has more significant bits than f16.
    pub fn new(
        (in_features, group_inputs): (usize, usize),
        codes: &'a [u8],
        scales: &'a [f32],
        zeros: &'a [u8],
    ) -> Result<Self> {
        let refused = |what: String| Err(Error::Unsupported(format!("weights of four bits: {what}")));
        if in_features == 0 || group_inputs == 0 || !codes.len().is_multiple_of(in_features) {
            return refused(format!("{} codes are no rows of {in_features} in groups of {group_inputs}", codes.len()));
        }
        let groups = (codes.len() / in_features).saturating_mul(in_features.div_ceil(group_inputs));
        if scales.len() != groups || zeros.len() != groups {
            return refused(format!("{} scales and {} zeros for {groups} groups", scales.len(), zeros.len()));
        }
        if let Some(code) = codes.iter().find(|&&code| code > 15) {
            return refused(format!("a code is {code}"));
        }
        if let Some(zero) = zeros.iter().find(|&&zero| zero > Self::ZERO_MAX) {
            return refused(format!("a zero is {zero}, above {}", Self::ZERO_MAX));
        }
        let is_held =
            |scale: f32| scale.to_bits() & Self::SCALE_SPARE_BITS == 0 && (scale == 0.0 || Self::SCALES.contains(&scale.abs()));
        if let Some(scale) = scales.iter().find(|&&scale| !is_held(scale)) {
            let (least, most) = (Self::SCALES.start(), Self::SCALES.end());
            return refused(format!("a scale is {scale:e}, and is held if it is 0 or from {least:e} to {most:e}, of 11 bits"));
        }
        Ok(Int4Rows { in_features, group_inputs, codes, scales, zeros })
    }

    /// How many there are.
    pub fn rows(&self) -> usize {
        self.codes.len() / self.in_features
    }

    /// Inputs of each.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Whether groups of so many inputs each lie within one of these.
    pub(crate) fn consist_of(&self, inputs: usize) -> bool {
        self.group_inputs.is_multiple_of(inputs) || self.group_inputs >= self.in_features
    }

    /// The codes of a row.
    pub(crate) fn codes(&self, row: usize) -> &'a [u8] {
        &self.codes[row * self.in_features..][..self.in_features]
    }

    /// Scale and zero of an input of a row.
    pub(crate) fn group(&self, row: usize, input: usize) -> (f32, u8) {
        let group = row * self.in_features.div_ceil(self.group_inputs) + input / self.group_inputs;
        (self.scales[group], self.zeros[group])
    }

    /// What they stand for. No bit is lost.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        let groups = self.in_features.div_ceil(self.group_inputs);
        let mut values = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks_exact(self.in_features).enumerate() {
            let of_row = row * groups..(row + 1) * groups;
            let groups = self.scales[of_row.clone()].iter().zip(&self.zeros[of_row]);
            for (codes, (&scale, &zero)) in codes.chunks(self.group_inputs).zip(groups) {
                values.extend(codes.iter().map(|&code| value(code, zero, scale)));
            }
        }
        values
    }
}

/// What a code stands for: the reference. A zero is never a negative one, as it is not where it comes of a difference.
#[inline(always)]
pub(crate) fn value(code: u8, zero: u8, scale: f32) -> f32 {
    (f32::from(code) - f32::from(zero)) * scale + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_stand_for_multiples_of_the_scale_of_their_group() {
        let (codes, scales, zeros) = ([0, 15, 8, 3, 9, 1], [0.5, -0.25, 2.0, 0.0], [8, 3, 15, 0]);
        let rows = Int4Rows::new((3, 2), &codes, &scales, &zeros).unwrap();
        assert_eq!(rows.to_f32_vec(), [-4.0, 3.5, -1.25, -24.0, -12.0, 0.0]);
        assert_eq!((rows.rows(), rows.codes(1), rows.group(1, 2)), (2, &codes[3..], (0.0, 0)));
        let negative = Int4Rows::new((1, 1), &[3], &[-1.0], &[3]).unwrap();
        assert_eq!(negative.to_f32_vec()[0].to_bits(), 0);
    }

    #[test]
    fn what_is_no_such_rows_is_refused_by_its_value() {
        let refused = |shape, codes: &[u8], scales: &[f32], zeros: &[u8]| {
            Int4Rows::new(shape, codes, scales, zeros).map(|_| ()).unwrap_err().to_string()
        };
        assert!(refused((3, 2), &[0; 4], &[1.0; 2], &[0; 2]).contains("4 codes are no rows of 3"));
        assert!(refused((2, 0), &[0; 4], &[1.0; 2], &[0; 2]).contains("groups of 0"));
        assert!(refused((2, 1), &[0; 4], &[1.0; 4], &[0; 3]).contains("4 scales and 3 zeros for 4 groups"));
        assert!(refused((2, 2), &[0, 16], &[1.0], &[0]).contains("a code is 16"));
        assert!(refused((2, 2), &[0, 15], &[1.0], &[16]).contains("a zero is 16"));
        for bad in [f32::NAN, f32::INFINITY, 2e30, 1e-31, 1.0 + f32::EPSILON] {
            assert!(refused((2, 2), &[0, 15], &[bad], &[15]).contains("a scale is"), "{bad}");
        }
    }
}
