//! From the bytes of a PNG or JPEG to red, green and blue, as Pillow and transformers see them: no orientation is applied, and what is transparent shows white.
//!
//! JPEGs are decoded by libjpeg-turbo's code, whose rounding is what every tool of Python's has: a decoder that is free to choose is off by a few levels, which a model sees.

use std::cell::Cell;
use std::io::{self, BufRead, Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

/// The largest file of a picture.
pub const IMAGE_BYTES_MAX: usize = 32 << 20;
/// The most pixels of a picture before it is resized: twice what published models take.
pub const IMAGE_PIXELS_MAX: u64 = 32 << 20;
/// Bytes that decoding a picture takes, at most.
pub const DECODING_BYTES_MAX: u64 = IMAGE_PIXELS_MAX * PNG_BYTES_PER_PIXEL + IMAGE_BYTES_MAX as u64;
/// Bytes for each pixel while a picture is decoded: of a PNG of four channels of 16 bits, and of a JPEG.
const PNG_BYTES_PER_PIXEL: u64 = 20;
const JPEG_BYTES_PER_PIXEL: u64 = 13;
/// The most scans of a progressive JPEG, each of which goes over the whole picture, however few bytes it has. Encoders make some ten.
const JPEG_SCANS_MAX: usize = 64;
/// The chunks of a PNG that make its pixels. Others may be many, and unpack to anything.
const PNG_CHUNKS: [&[u8]; 5] = [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"];

/// A picture's pixels, `[height, width, 3]`.
pub(super) struct Pixels {
    pub(super) bytes: Vec<u8>,
    pub(super) height: usize,
    pub(super) width: usize,
}

/// What a file says of itself, `[height, width]`.
///
/// # Errors
/// A sentence, if it is neither a PNG nor a JPEG, or too large in bytes or pixels, or its head is broken.
pub(super) fn size(file: &[u8]) -> Result<[u32; 2], String> {
    match format(file)? {
        ImageFormat::Png => {
            let file = png_pixels(file);
            let (width, height) = png(&file)?.dimensions();
            check_pixels(width, height)
        }
        _ => jpeg(file, |head, _| check_pixels(head.width() as u32, head.height() as u32)),
    }
}

/// Bytes that decoding a picture and resizing it takes at most, by the head of its file.
///
/// # Errors
/// A sentence, if it is neither a PNG nor a JPEG, or too large in bytes or pixels, or its head is broken.
pub fn decoding_bytes(file: &[u8]) -> Result<u64, String> {
    let [height, width] = size(file)?;
    // Of a JPEG its colours alone, row by row, and as much for what is half resized. One of many scans has its coefficients, too. A PNG is copied without what makes no pixels.
    let per_pixel = if format(file)? == ImageFormat::Png { PNG_BYTES_PER_PIXEL } else { JPEG_BYTES_PER_PIXEL };
    Ok(u64::from(height) * u64::from(width) * per_pixel + file.len() as u64)
}

/// Makes sure that a file can be decoded, by decoding it.
///
/// # Errors
/// As [`decoding_bytes`]; also if what follows the head is broken or missing, or has colours that are not read.
pub fn check(file: &[u8]) -> Result<(), String> {
    decode(file).map(drop)
}

/// Decodes a file.
///
/// # Errors
/// As [`size`]; also if what follows the head is broken or missing, or has colours that are not read.
pub(super) fn decode(file: &[u8]) -> Result<Pixels, String> {
    match format(file)? {
        ImageFormat::Png => decode_png(file),
        _ => decode_jpeg(file),
    }
}

fn format(file: &[u8]) -> Result<ImageFormat, String> {
    if file.len() > IMAGE_BYTES_MAX {
        return Err(format!("a picture of {} bytes; at most {IMAGE_BYTES_MAX} are read", file.len()));
    }
    match image::guess_format(file) {
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg)) => Ok(format),
        _ => Err("the picture is neither a PNG nor a JPEG".into()),
    }
}

fn check_pixels(width: u32, height: u32) -> Result<[u32; 2], String> {
    if u64::from(width) * u64::from(height) > IMAGE_PIXELS_MAX {
        return Err(format!("a picture of {width} × {height} pixels; at most {IMAGE_PIXELS_MAX} pixels are decoded"));
    }
    if width == 0 || height == 0 {
        return Err(format!("a picture of {width} × {height} pixels"));
    }
    Ok([height, width])
}

fn broken(e: impl std::fmt::Display) -> String {
    format!("the picture cannot be decoded: {e}")
}

fn png(file: &[u8]) -> Result<impl ImageDecoder + '_, String> {
    ImageReader::with_format(Cursor::new(file), ImageFormat::Png).into_decoder().map_err(broken)
}

/// A PNG without what does not make its pixels.
fn png_pixels(file: &[u8]) -> Vec<u8> {
    const SIGNATURE: usize = 8;
    // Of each chunk its length, its name and a checksum beside its bytes.
    const AROUND: usize = 12;
    let (signature, mut rest) = file.split_at(SIGNATURE.min(file.len()));
    let mut kept = Vec::with_capacity(file.len());
    kept.extend_from_slice(signature);
    while let [a, b, c, d, name @ ..] = rest {
        let whole = (u32::from_be_bytes([*a, *b, *c, *d]) as usize).saturating_add(AROUND);
        // What is cut short is for the decoder to say.
        let (chunk, after) = rest.split_at(whole.min(rest.len()));
        if name.get(..4).is_none_or(|name| PNG_CHUNKS.contains(&name)) {
            kept.extend_from_slice(chunk);
        }
        rest = after;
    }
    kept
}

fn decode_png(file: &[u8]) -> Result<Pixels, String> {
    let file = png_pixels(file);
    let mut decoder = png(&file)?;
    let (width, height) = decoder.dimensions();
    check_pixels(width, height)?;
    // Eight bytes for a pixel of four channels of 16 bits, and as much again for what a decoder keeps.
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(u64::from(width) * u64::from(height) * 16 + (1 << 20));
    decoder.set_limits(limits).map_err(broken)?;
    if let ColorType::L16 | ColorType::La16 = decoder.color_type() {
        // Pillow takes all but the darkest for white.
        return Err("the picture has greys of 16 bits; of 8 bits they are read".into());
    }
    let image = DynamicImage::from_decoder(decoder).map_err(broken)?;
    let (height, width) = (height as usize, width as usize);
    let has_alpha = image.color().has_alpha();
    // The high byte of 16 bits, as Pillow takes it.
    let high = |channels: &[u16]| channels.iter().map(|channel| (channel >> 8) as u8).collect::<Vec<u8>>();
    let bytes = match (image, has_alpha) {
        (DynamicImage::ImageRgb16(image), _) => high(image.as_raw()),
        (DynamicImage::ImageRgba16(image), _) => on_white(&high(image.as_raw())),
        (image, false) => image.into_rgb8().into_raw(),
        (image, true) => on_white(image.into_rgba8().as_raw()),
    };
    Ok(Pixels { bytes, height, width })
}

/// Pixels with transparency laid on white, as Pillow rounds it.
fn on_white(rgba: &[u8]) -> Vec<u8> {
    let blend = |channel: u8, alpha: u8| {
        let sum = u32::from(channel) * u32::from(alpha) + 255 * (255 - u32::from(alpha)) + 128;
        ((sum + (sum >> 8)) >> 8) as u8
    };
    let mut rgb = Vec::with_capacity(rgba.len() / 4 * 3);
    rgba.as_chunks::<4>().0.iter().for_each(|&[r, g, b, a]| rgb.extend([r, g, b].map(|channel| blend(channel, a))));
    rgb
}

/// A file that notes whether someone read on beyond its end.
struct Whole<'f> {
    rest: &'f [u8],
    is_short: &'f Cell<bool>,
}

impl Read for Whole<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.rest.read(to)
    }
}

impl BufRead for Whole<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.is_short.set(self.is_short.get() || self.rest.is_empty());
        Ok(self.rest)
    }

    fn consume(&mut self, count: usize) {
        self.rest = &self.rest[count..];
    }
}

/// Calls `body` with a file whose head was read, and whether it has turned out to end too early.
fn jpeg<R>(
    file: &[u8],
    body: impl FnOnce(mozjpeg::Decompress<Whole<'_>>, &Cell<bool>) -> Result<R, String>,
) -> Result<R, String> {
    let is_short = Cell::new(false);
    let whole = Whole { rest: file, is_short: &is_short };
    // The library's way to fail is to unwind.
    let read = || body(mozjpeg::Decompress::new_reader(whole).map_err(broken)?, &is_short);
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|why| {
        let why = why.downcast::<String>().map_or_else(|_| "its library failed".into(), |why| *why);
        Err(broken(why))
    })
}

/// Scans of a JPEG.
fn jpeg_scans(file: &[u8]) -> usize {
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

fn decode_jpeg(file: &[u8]) -> Result<Pixels, String> {
    let scans = jpeg_scans(file);
    if scans > JPEG_SCANS_MAX {
        return Err(format!("the picture has {scans} scans; at most {JPEG_SCANS_MAX} are read"));
    }
    jpeg(file, |head, is_short| {
        check_pixels(head.width() as u32, head.height() as u32)?;
        if let mozjpeg::ColorSpace::JCS_CMYK | mozjpeg::ColorSpace::JCS_YCCK = head.color_space() {
            return Err("the picture has the four colours of print; red, green and blue are read".into());
        }
        let mut image = head.rgb().map_err(broken)?;
        let (height, width) = (image.height(), image.width());
        let bytes = image.read_scanlines::<u8>().map_err(broken)?;
        if is_short.get() {
            return Err(broken("the file ends before the picture does"));
        }
        image.finish().map_err(broken)?;
        Ok(Pixels { bytes, height, width })
    })
}
