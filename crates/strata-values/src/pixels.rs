//! What a picture's file holds, byte by byte, and its pixels as red, green and blue, as Pillow has them.

/// Channels of a pixel, a byte each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// Red, green and blue.
    Rgb,
    /// And how far the pixel hides what is behind it.
    Rgba,
    /// One for all three.
    Grey,
    /// And how far the pixel hides what is behind it.
    GreyAlpha,
}

/// Pixels, `[pixels, channels]`, as red, green and blue, `[pixels, 3]`, those with transparency laid on white.
pub fn rgb(channels: Vec<u8>, of: Channels) -> Vec<u8> {
    match of {
        Channels::Rgb => channels,
        Channels::Rgba => on_white(channels.as_chunks::<4>().0.iter().copied()),
        Channels::Grey => channels.iter().flat_map(|&grey| [grey; 3]).collect(),
        Channels::GreyAlpha => on_white(channels.as_chunks::<2>().0.iter().map(|&[grey, alpha]| [grey, grey, grey, alpha])),
    }
}

/// As Pillow rounds it.
fn on_white(rgba: impl ExactSizeIterator<Item = [u8; 4]>) -> Vec<u8> {
    let blend = |channel: u8, alpha: u8| {
        let sum = u32::from(channel) * u32::from(alpha) + 255 * (255 - u32::from(alpha)) + 128;
        ((sum + (sum >> 8)) >> 8) as u8
    };
    let mut rgb = vec![0; rgba.len() * 3];
    for (to, [r, g, b, a]) in rgb.as_chunks_mut().0.iter_mut().zip(rgba) {
        *to = [blend(r, a), blend(g, a), blend(b, a)];
    }
    rgb
}

/// The high bytes of samples of 16 bits, which are the first, as Pillow takes them.
pub fn high_bytes(samples: &[u8]) -> Vec<u8> {
    samples.as_chunks::<2>().0.iter().map(|sample| sample[0]).collect()
}

/// Scans of a JPEG.
pub fn jpeg_scans(file: &[u8]) -> usize {
    const START_OF_SCAN: u8 = 0xda;
    let (mut rest, mut scans) = (file.get(2..).unwrap_or_default(), 0);
    // Segments with a length, and behind the head of a scan bytes in which a marker is none if a zero or the number of a restart follows.
    while let Some(at) = rest.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff | 0xd0..=0xd7)) {
        scans += usize::from(rest[at + 1] == START_OF_SCAN);
        let len = rest.get(at + 2..at + 4).map_or(0, |len| usize::from(u16::from_be_bytes([len[0], len[1]])));
        rest = rest.get(at + 2 + len..).unwrap_or_default();
    }
    scans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_of_any_channels_become_red_green_and_blue() {
        assert_eq!(rgb(vec![1, 2, 3, 4, 5, 6], Channels::Rgb), [1, 2, 3, 4, 5, 6]);
        assert_eq!(rgb(vec![7, 9], Channels::Grey), [7, 7, 7, 9, 9, 9]);
        // Hidden, shown, and half of each: `(10·128 + 255·127 + 127) / 255`, rounded.
        assert_eq!(rgb(vec![10, 20, 30, 0, 10, 20, 30, 255], Channels::Rgba), [255, 255, 255, 10, 20, 30]);
        assert_eq!(rgb(vec![10, 128], Channels::GreyAlpha), [132, 132, 132]);
        assert_eq!(high_bytes(&[1, 200, 3, 4]), [1, 3]);
    }

    #[test]
    fn scans_are_counted_and_not_what_looks_like_one_within() {
        let segment = |marker: u8, body: &[u8]| [&[0xff, marker, 0, body.len() as u8 + 2][..], body].concat();
        let scan = [segment(0xda, &[1, 2]), vec![5, 0xff, 0, 0xff, 0xd3, 9]].concat();
        let file = [vec![0xff, 0xd8], segment(0xe0, &[0xff, 0xda, 0, 3]), scan.clone(), scan, vec![0xff, 0xd9]].concat();
        assert_eq!(jpeg_scans(&file), 2);
        assert_eq!(jpeg_scans(&[0xff]), 0);
    }
}
