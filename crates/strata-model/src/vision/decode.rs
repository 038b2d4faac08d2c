//! From the bytes of a PNG or JPEG to red, green and blue, as Pillow and transformers see them: no orientation is applied, and what is transparent shows white.
//!
//! JPEGs are decoded by libjpeg-turbo's code, whose rounding is what every tool of Python's has: a decoder that is free to choose is off by a few levels, which a model sees.

use std::cell::Cell;
use std::io::{self, BufRead, Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use png::{BitDepth, ColorType, Transformations};
use strata_values::{Channels, high_bytes, jpeg_scans, rgb};

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
/// Pixels of all scans together: sixteen of the largest picture.
const JPEG_SCANNED_PIXELS_MAX: u64 = 16 * IMAGE_PIXELS_MAX;
/// Parts that the pixels of a PNG come in, at most, each of which takes its time however few bytes it has. Encoders make them of some KiB.
const PNG_PARTS_MAX: usize = 1 << 16;
/// The chunks of a PNG that make its pixels. Others may be many, and unpack to anything.
const PNG_CHUNKS: [&[u8]; 5] = [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"];

/// What a PNG and a JPEG begin with.
const PNG_SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
const JPEG_SIGNATURE: [u8; 3] = [0xff, 0xd8, 0xff];

/// Kinds of files.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Png,
    Jpeg,
}

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
        Format::Png => {
            let (file, _) = png_pixels(file);
            let mut head = png::Decoder::new(Cursor::new(&file[..]));
            let (width, height) = head.read_header_info().map_err(broken)?.size();
            check_pixels(width, height)
        }
        Format::Jpeg => jpeg(file, |head, _| check_pixels(head.width() as u32, head.height() as u32)),
    }
}

/// Bytes that decoding a picture and resizing it takes at most, by the head of its file.
///
/// # Errors
/// A sentence, if it is neither a PNG nor a JPEG, or too large in bytes or pixels, or its head is broken.
pub fn decoding_bytes(file: &[u8]) -> Result<u64, String> {
    let [height, width] = size(file)?;
    // Of a JPEG its colours alone, row by row, and as much for what is half resized. One of many scans has its coefficients, too. A PNG is copied without what makes no pixels.
    let per_pixel = if format(file)? == Format::Png { PNG_BYTES_PER_PIXEL } else { JPEG_BYTES_PER_PIXEL };
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
        Format::Png => decode_png(file),
        Format::Jpeg => decode_jpeg(file),
    }
}

fn format(file: &[u8]) -> Result<Format, String> {
    if file.len() > IMAGE_BYTES_MAX {
        return Err(format!("a picture of {} bytes; at most {IMAGE_BYTES_MAX} are read", file.len()));
    }
    if file.starts_with(&PNG_SIGNATURE) {
        return Ok(Format::Png);
    }
    if file.starts_with(&JPEG_SIGNATURE) {
        return Ok(Format::Jpeg);
    }
    Err("the picture is neither a PNG nor a JPEG".into())
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

/// A PNG without what does not make its pixels, and how many parts of them there are.
fn png_pixels(file: &[u8]) -> (Vec<u8>, usize) {
    // Of each chunk its length, its name and a checksum beside its bytes.
    const AROUND: usize = 12;
    let (signature, mut rest) = file.split_at(PNG_SIGNATURE.len().min(file.len()));
    let (mut kept, mut parts) = (Vec::with_capacity(file.len()), 0);
    kept.extend_from_slice(signature);
    while let [a, b, c, d, name @ ..] = rest {
        let whole = (u32::from_be_bytes([*a, *b, *c, *d]) as usize).saturating_add(AROUND);
        // What is cut short is for the decoder to say.
        let (chunk, after) = rest.split_at(whole.min(rest.len()));
        if name.get(..4).is_none_or(|name| PNG_CHUNKS.contains(&name)) {
            kept.extend_from_slice(chunk);
            parts += usize::from(name.starts_with(b"IDAT"));
        }
        rest = after;
    }
    (kept, parts)
}

fn decode_png(file: &[u8]) -> Result<Pixels, String> {
    let (file, parts) = png_pixels(file);
    if parts > PNG_PARTS_MAX {
        return Err(format!("the pixels of the picture come in {parts} parts (IDAT); at most {PNG_PARTS_MAX} are read"));
    }
    let mut decoder = png::Decoder::new(Cursor::new(&file[..]));
    let (width, height) = decoder.read_header_info().map_err(broken)?.size();
    let [height, width] = check_pixels(width, height)?.map(|pixels| pixels as usize);
    // Eight bytes for a pixel of four channels of 16 bits, and as much again for what the decoder keeps.
    decoder.set_limits(png::Limits { bytes: width * height * 16 + (1 << 20) });
    // Fewer bits than eight become eight, palettes and transparent colours become channels.
    decoder.set_transformations(Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(broken)?;
    let (color, depth) = reader.output_color_type();
    if let (ColorType::Grayscale | ColorType::GrayscaleAlpha, BitDepth::Sixteen) = (color, depth) {
        // Pillow takes all but the darkest for white.
        return Err("the picture has greys of 16 bits; of 8 bits they are read".into());
    }
    let info = reader.info();
    if info.trns.is_some()
        && let (ColorType::Grayscale, BitDepth::Two | BitDepth::Four) | (ColorType::Rgb, BitDepth::Sixteen) =
            (info.color_type, info.bit_depth)
    {
        // Pillow compares its value with what others have become in eight bits.
        let bits = info.bit_depth as u8;
        return Err(format!("the picture has a transparent colour, of {bits} bits; of 8 bits it is read"));
    }
    let mut channels = vec![0; reader.output_buffer_size().ok_or_else(|| broken("it has too many bytes"))?];
    reader.next_frame(&mut channels).map_err(broken)?;
    if depth == BitDepth::Sixteen {
        channels = high_bytes(&channels);
    }
    let of = match color {
        ColorType::Rgb => Channels::Rgb,
        ColorType::Rgba => Channels::Rgba,
        ColorType::Grayscale => Channels::Grey,
        ColorType::GrayscaleAlpha => Channels::GreyAlpha,
        ColorType::Indexed => return Err(broken("its palette was not applied")),
    };
    let bytes = rgb(channels, of);
    Ok(Pixels { bytes, height, width })
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

fn decode_jpeg(file: &[u8]) -> Result<Pixels, String> {
    let scans = jpeg_scans(file);
    if scans > JPEG_SCANS_MAX {
        return Err(format!("the picture has {scans} scans; at most {JPEG_SCANS_MAX} are read"));
    }
    jpeg(file, |head, is_short| {
        let [height, width] = check_pixels(head.width() as u32, head.height() as u32)?;
        if scans as u64 * u64::from(height) * u64::from(width) > JPEG_SCANNED_PIXELS_MAX {
            return Err(format!(
                "the picture has {scans} scans of {width} × {height} pixels; at most {JPEG_SCANNED_PIXELS_MAX} pixels are read in all of them"
            ));
        }
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
