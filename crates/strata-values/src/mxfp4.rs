//! MXFP4 (OCP Microscaling Formats 1.0): numbers of four bits, 32 to a scale that is a power of two. As `convert_moe_packed_tensors` of transformers reads them.

/// Numbers that share a scale.
pub const MXFP4_BLOCK: usize = 32;
/// Bytes that they take.
pub const MXFP4_BLOCK_BYTES: usize = MXFP4_BLOCK / 2;

/// What the lower three bits stand for; the fourth is the sign.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The numbers of blocks of [`MXFP4_BLOCK_BYTES`] and their scales, into `out`. A byte has the earlier number in its lower half.
///
/// # Panics
/// If there are not as many of one as the others need.
pub fn dequantize_mxfp4(blocks: &[u8], scales: &[u8], out: &mut [f32]) {
    let (blocks, out) = (blocks.as_chunks::<MXFP4_BLOCK_BYTES>().0, out.as_chunks_mut::<MXFP4_BLOCK>().0);
    assert!(blocks.len() == scales.len() && out.len() == scales.len());
    for ((block, &scale), out) in blocks.iter().zip(scales).zip(out) {
        let scale = power(scale);
        let number = |bits: u8| {
            let magnitude = MAGNITUDES[usize::from(bits & 7)];
            scale * if bits & 8 == 0 { magnitude } else { -magnitude }
        };
        for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(block) {
            *pair = [number(byte & 15), number(byte >> 4)];
        }
    }
}

/// `2^(scale - 127)`; what the format calls NaN, 255, is infinite as there, and no number of its block is finite.
fn power(scale: u8) -> f32 {
    // The least one is subnormal.
    if scale == 0 { f32::from_bits(1 << 22) } else { f32::from_bits(u32::from(scale) << 23) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_halves_of_bytes_times_a_power_of_two() {
        let bytes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        for scale in [0, 1, 126, 127, 128, 254] {
            let mut out = [f32::NAN; 64];
            dequantize_mxfp4(&[&bytes[..], &bytes].concat(), &[127, scale], &mut out);
            let signed = |bits: usize| if bits < 8 { MAGNITUDES[bits] } else { -MAGNITUDES[bits - 8] };
            let expected: Vec<f32> = (0..16).flat_map(|i| [signed(i), signed(15 - i)]).collect();
            assert_eq!(out[..32], expected);
            let power = 2f64.powi(i32::from(scale) - 127);
            assert!(out[32..].iter().zip(&expected).all(|(&v, &e)| v.to_bits() == ((f64::from(e) * power) as f32).to_bits()));
        }
        let mut out = [0.0; 32];
        dequantize_mxfp4(&bytes, &[255], &mut out);
        assert!(out.iter().all(|v| !v.is_finite()));
    }
}
