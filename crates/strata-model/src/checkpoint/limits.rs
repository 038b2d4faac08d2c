//! Reading small files with a limit on their size.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::{Error, Result};

/// The text of a file of at most `bytes_max` bytes.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    let io_error = |source| Error::Io { path: path.into(), source };
    let file = File::open(path).map_err(io_error)?;
    let mut text = String::new();
    // One byte more than allowed tells a file that is too long from one that just fits.
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(io_error)?;
    if text.len() as u64 > bytes_max {
        return Err(Error::Checkpoint { path: path.into(), message: format!("the file is longer than {bytes_max} bytes") });
    }
    Ok(text)
}

/// The text of a file of at most `bytes_max` bytes, or `None` if there is no such file.
pub(crate) fn read_text_if_exists(path: &Path, bytes_max: u64) -> Result<Option<String>> {
    match read_text(path, bytes_max) {
        Ok(text) => Ok(Some(text)),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_and_not_beyond() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("longer than 4 bytes"));
        assert_eq!(read_text_if_exists(&dir.path().join("b.json"), 5).unwrap(), None);
    }
}
