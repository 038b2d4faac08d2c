//! Pictures in inputs, as far as they can be judged without looking into them. Whether a file is a picture, and one that the model can see, is
//! for the engine to find.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Deserialize, Deserializer, Error, Visitor};

use crate::limits;
use crate::names::shown;

/// Characters of base64 that the largest file is written in.
const BASE64_LEN_MAX: usize = limits::IMAGE_BYTES_MAX.div_ceil(3) * 4;

/// The file of a picture out of base64, in the standard alphabet and with padding, as the SDK writes it. Why there is none is said by whoever
/// knows where it stands.
#[derive(Debug)]
pub struct PictureFile(pub Result<Arc<[u8]>, String>);

impl<'de> Deserialize<'de> for PictureFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FileVisitor;

        impl Visitor<'_> for FileVisitor {
            type Value = PictureFile;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a file in base64")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<PictureFile, E> {
                Ok(PictureFile(out_of_base64(text)))
            }
        }

        deserializer.deserialize_bytes(FileVisitor)
    }
}

fn out_of_base64(text: &str) -> Result<Arc<[u8]>, String> {
    check_base64_len(text.len())?;
    let mut file: Arc<[u8]> = std::iter::repeat_n(0, decoded_len(text)).collect();
    match STANDARD.decode_slice(text, Arc::make_mut(&mut file)) {
        Ok(len) if len == file.len() => Ok(file),
        Ok(_) => Err("its data is not base64".into()),
        Err(error) => Err(format!("its data is not base64: {error}")),
    }
}

fn check_base64_len(len: usize) -> Result<(), String> {
    if len <= BASE64_LEN_MAX {
        return Ok(());
    }
    let bytes_max = limits::IMAGE_BYTES_MAX;
    Err(format!(
        "its data has {len} characters of base64, above the {BASE64_LEN_MAX} of a file of {bytes_max} bytes, which is the limit"
    ))
}

/// Exactly, where `text` is base64.
fn decoded_len(text: &str) -> usize {
    let padding = text.bytes().rev().take(2).take_while(|&byte| byte == b'=').count();
    (text.len().div_ceil(4) * 3).saturating_sub(padding)
}

/// What [`PictureFile`] takes for a text: nothing if it refuses it by its length.
pub fn bytes_out_of_base64(text: &str) -> usize {
    if check_base64_len(text.len()).is_ok() { held_bytes(decoded_len(text)) } else { 0 }
}

/// What a file of `len` bytes takes that is shared, with its counts.
pub const fn held_bytes(len: usize) -> usize {
    len.next_multiple_of(size_of::<usize>()) + 2 * size_of::<usize>()
}

/// Refuses formats that are not read, and pictures that are to be scaled.
///
/// # Errors
/// With what is wrong.
pub fn check(format: Option<&[u8]>, has_override_dimensions: bool) -> Result<(), String> {
    match format {
        Some(b"png" | b"jpeg") => {}
        Some(other) => {
            return Err(format!("format {:?} is neither png nor jpeg", shown(&String::from_utf8_lossy(head(other)))));
        }
        None => return Err("it has no format, which is png or jpeg".into()),
    }
    if has_override_dimensions {
        return Err(
            "override_dimensions is not supported by this server; send the picture in the size that it is to be seen in".into(),
        );
    }
    Ok(())
}

/// As much of a text as is ever shown.
fn head(text: &[u8]) -> &[u8] {
    &text[..text.len().min(4 * limits::SHOWN_CHARS_MAX)]
}

/// Refuses files that are empty or too large.
///
/// # Errors
/// With its size.
pub fn check_len(len: usize) -> Result<(), String> {
    match len {
        0 => Err("it has no data".into()),
        len if len > limits::IMAGE_BYTES_MAX => {
            Err(format!("its file has {len} bytes, above the limit of {}", limits::IMAGE_BYTES_MAX))
        }
        _ => Ok(()),
    }
}

/// What a user is told who sends a chunk of another kind; without a name if it has none.
pub fn unread(chunk: usize, kind: &str) -> String {
    let kind = if kind.is_empty() { "of a kind without a name".into() } else { format!("of kind {:?}", shown(kind)) };
    format!("model_input chunk {chunk} is {kind}; this server reads encoded_text and image")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{allocated_bytes, peak_bytes, with_budget};
    use crate::wire::guard::parse;

    fn file(text: &str) -> Result<Arc<[u8]>, String> {
        let body = serde_json::to_string(text).unwrap();
        with_budget(1 << 20, |budget| parse::<PictureFile>(body.as_bytes(), budget)).unwrap().0
    }

    #[test]
    fn a_file_comes_out_of_base64_as_it_went_in() {
        for len in [0, 1, 2, 3, 4, 5, 100, 300_000] {
            let bytes: Vec<u8> = (0..len).map(|i: usize| (i * 7 + i / 256) as u8).collect();
            assert_eq!(file(&STANDARD.encode(&bytes)).as_deref(), Ok(bytes.as_slice()), "{len}");
        }
        let escaped = with_budget(1 << 20, |budget| parse::<PictureFile>(br#""\/\u002f8="#.as_slice(), budget));
        assert!(escaped.is_err(), "a text that does not end");
        let escaped = with_budget(1 << 20, |budget| parse::<PictureFile>(br#""\/\u002f8=""#.as_slice(), budget));
        assert_eq!(escaped.unwrap().0.as_deref(), Ok(&[0xff, 0xff][..]));
    }

    #[test]
    fn what_is_not_base64_is_refused() {
        for text in
            ["A", "AA", "AAA", "AA=", "A===", "====", "=AAA", "AA==AAAA", "AAA\n", "AA A", "-_-_", "AB==", "ÄÄ", "AAAA="]
        {
            assert!(file(text).unwrap_err().contains("not base64"), "{text}");
        }
        let error = with_budget(1 << 20, |budget| parse::<PictureFile>(b"[1, 2]", budget)).unwrap_err();
        assert!(error.contains("a file in base64"), "{error}");
    }

    #[test]
    fn a_file_is_counted_before_it_is_decoded_and_once() {
        for len in [0, 1, 100_000] {
            let text = STANDARD.encode(vec![7; len]);
            let (file, allocated) = allocated_bytes(|| out_of_base64(&text).unwrap());
            assert_eq!((held_bytes(file.len()), bytes_out_of_base64(&text)), (allocated, allocated));
        }
        let body = format!("\"{}\"", "A".repeat(4 << 20));
        let (refused, peak) =
            peak_bytes(|| with_budget(1 << 20, |budget| parse::<PictureFile>(body.as_bytes(), budget).map(drop)));
        assert!(refused.unwrap_err().contains("1 MiB"));
        assert!(peak < 1 << 16, "{peak}");
    }

    #[test]
    fn a_file_above_the_limit_is_refused_by_its_length() {
        let text = "A".repeat(BASE64_LEN_MAX + 4);
        let (refused, peak) = peak_bytes(|| out_of_base64(&text).unwrap_err());
        assert!(refused.contains(&text.len().to_string()) && refused.contains("33554432"), "{refused}");
        assert!(peak < 1 << 16, "{peak}");
        assert_eq!(bytes_out_of_base64(&text), 0);
        assert!(check_len(limits::IMAGE_BYTES_MAX).is_ok());
        assert!(check_len(limits::IMAGE_BYTES_MAX + 1).unwrap_err().contains("33554433"));
    }
}
