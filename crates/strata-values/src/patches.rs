//! Pixels in the order in which a vision tower reads them, as `Qwen2VLImageProcessor` of transformers has it.

/// What a picture is cut into.
#[derive(Clone, Copy, Debug)]
pub struct PatchSizes {
    /// Pixels along a side of a patch.
    pub side: usize,
    /// Patches along a side of what becomes a token.
    pub merge: usize,
    /// Frames of a patch, all of them the picture.
    pub frames: usize,
}

/// Normalises pixels, `[height, width, 3]` of so many patches along height and width, and brings them into the order of patches: `[patches, 3 * frames * side²]`, those that become one
/// token neighbours.
///
/// # Panics
/// If there are fewer pixels.
pub fn cut(pixels: &[u8], [height, width]: [usize; 2], sizes: PatchSizes, mean: [f32; 3], std: [f32; 3]) -> Vec<f32> {
    let PatchSizes { side: p, merge, frames } = sizes;
    let row_pixels = width * p;
    // As transformers: the scale of bytes is drawn into mean and standard deviation.
    let [mean, std] = [mean, std].map(|of| of.map(|value| value * (1.0 / (1.0f64 / 255.0)) as f32));
    let mut values = Vec::with_capacity(height * width * 3 * frames * p * p);
    for (block_row, block_column) in product(height / merge, width / merge) {
        for (row, column) in product(merge, merge) {
            let (top, left) = ((block_row * merge + row) * p, (block_column * merge + column) * p);
            for channel in 0..3 {
                let start = values.len();
                for (y, x) in product(p, p) {
                    let byte = pixels[((top + y) * row_pixels + left + x) * 3 + channel];
                    values.push((f32::from(byte) - mean[channel]) / std[channel]);
                }
                for _ in 1..frames {
                    values.extend_from_within(start..start + p * p);
                }
            }
        }
    }
    values
}

/// Pairs of numbers below two limits, the second the faster.
fn product(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}
