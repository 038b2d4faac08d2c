//! Bicubic resizing with antialiasing of bytes, to the bit as torchvision does it on a processor (`upsample_bicubic2d_aa` of PyTorch for bytes, which follows Pillow): first along
//! rows, then along columns, each with weights of 16 bits and a result of whole bytes.

/// Bytes of a pixel.
const CHANNELS: usize = 3;

/// What an output pixel is made of: the first input pixel, and the weights of it and those after it.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The kernel of Keys with `a = -0.5`.
fn keys(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    match x {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

/// The taps of all output pixels along one side, and how many bits their weights are shifted by.
fn taps(from: usize, to: usize) -> (Vec<Taps>, u32) {
    let scale = from as f64 / to as f64;
    // Shrinking sees as many more pixels as there are for each.
    let stretch = scale.max(1.0);
    let support = 2.0 * stretch;
    let weights_of = |i: usize| {
        let center = scale * (i as f64 + 0.5);
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let weights: Vec<f64> = (first..end).map(|j| keys((j as f64 - center + 0.5) / stretch)).collect();
        let sum: f64 = weights.iter().sum();
        (first, weights.into_iter().map(|w| w / sum).collect::<Vec<f64>>())
    };
    let exact: Vec<(usize, Vec<f64>)> = (0..to).map(weights_of).collect();
    let largest = exact.iter().flat_map(|(_, weights)| weights).fold(0.0, |max: f64, &w| max.max(w));
    // As many bits as the largest weight leaves of 15.
    let fits = |bits: &u32| (0.5 + largest * f64::from(1u32 << (bits + 1))) as i32 >= 1 << 15;
    let bits = (0..22).find(fits).unwrap_or(22);
    let whole = |w: f64| (w * f64::from(1u32 << bits) + 0.5f64.copysign(w)) as i32;
    let taps = exact.into_iter().map(|(first, weights)| Taps { first, weights: weights.into_iter().map(whole).collect() });
    (taps.collect(), bits)
}

/// A picture `[height, width, 3]` of the size `from` in the size `to`, both `[height, width]`.
///
/// # Panics
/// If it is smaller than `from` says.
pub fn resize(pixels: &[u8], from: [usize; 2], to: [usize; 2]) -> Vec<u8> {
    let ([_, width], [to_height, to_width]) = (from, to);
    let mut rows = pixels;
    let mut narrowed = Vec::with_capacity(if width == to_width { 0 } else { from[0] * to_width * CHANNELS });
    if width != to_width {
        let (taps, bits) = taps(width, to_width);
        for row in pixels.chunks_exact(width * CHANNELS) {
            for tap in &taps {
                let seen = row[tap.first * CHANNELS..].as_chunks::<CHANNELS>().0;
                let mut sums = [1 << (bits - 1); CHANNELS];
                for (pixel, weight) in seen.iter().zip(&tap.weights) {
                    sums.iter_mut().zip(pixel).for_each(|(sum, &byte)| *sum += weight * i32::from(byte));
                }
                narrowed.extend(sums.map(|sum| byte(sum >> bits)));
            }
        }
        rows = &narrowed;
    }
    if from[0] == to_height {
        return rows.to_vec();
    }
    let (taps, bits) = taps(from[0], to_height);
    let row_len = to_width * CHANNELS;
    let mut out = Vec::with_capacity(to_height * row_len);
    let mut sums = vec![0; row_len];
    for tap in &taps {
        sums.fill(1 << (bits - 1));
        for (row, weight) in rows[tap.first * row_len..].chunks_exact(row_len).zip(&tap.weights) {
            sums.iter_mut().zip(row).for_each(|(sum, &byte)| *sum += weight * i32::from(byte));
        }
        out.extend(sums.iter().map(|sum| byte(sum >> bits)));
    }
    out
}

fn byte(value: i32) -> u8 {
    value.clamp(0, 255) as u8
}
