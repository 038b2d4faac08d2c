//! Pictures: from the bytes of a file to what a model reads.

mod decode;
mod preprocess;

pub use decode::{DECODING_BYTES_MAX, IMAGE_BYTES_MAX, IMAGE_PIXELS_MAX, check, decoding_bytes};
pub use preprocess::{Grid, ImageProcessor, Patches};

#[cfg(test)]
mod tests;
