//! Opening files that nobody vouches for, and reading small ones with a limit on their size.
//!
//! Whatever has the name of a file may be a pipe that blocks whoever opens it, a device, or a link to either. Here a file is opened without
//! waiting for anyone, and read only if it is a file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

use crate::{Error, Result};

/// Whether a link may stand for the file it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Links {
    /// As in the cache of the Hugging Face hub, where every file of a model is one.
    Follow,
    /// As in a data directory, where nothing but Strata's own files belongs.
    Refuse,
}

/// Opens a file for reading, through links. What is not a regular file is refused, and never blocks.
///
/// # Errors
/// If there is no such file, or it is something else.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    open(path, Links::Follow).map_err(|source| match source.kind() {
        ErrorKind::InvalidInput => Error::Checkpoint { path: path.into(), message: source.to_string() },
        _ => Error::Io { path: path.into(), source },
    })
}

/// Opens a file of Strata's own for reading. Links, pipes, devices and directories are refused, and never block.
///
/// # Errors
/// If there is no such file, or it is something else.
pub(crate) fn open_own(path: &Path) -> std::io::Result<File> {
    open(path, Links::Refuse)
}

/// The bytes of a regular file of at most `bytes_max` bytes. Links, pipes, devices and directories are refused, and never block.
///
/// # Errors
/// If there is no such file, it is something else, or it is longer.
pub fn read_own_file(path: &Path, bytes_max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that is too long from one that just fits.
    open_own(path)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(std::io::Error::new(ErrorKind::InvalidData, format!("is longer than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// The text of a file of at most `bytes_max` bytes.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    let io_error = |source| Error::Io { path: path.into(), source };
    let malformed = |message| Error::Checkpoint { path: path.into(), message };
    let mut bytes = Vec::new();
    open_regular(path)?.take(bytes_max + 1).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() as u64 > bytes_max {
        return Err(malformed(format!("the file is longer than {bytes_max} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| malformed(format!("the file is not UTF-8 text: {}", error.utf8_error())))
}

/// The text of a file of at most `bytes_max` bytes, or `None` if there is no such file.
pub(crate) fn read_text_if_exists(path: &Path, bytes_max: u64) -> Result<Option<String>> {
    match read_text(path, bytes_max) {
        Ok(text) => Ok(Some(text)),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What a JSON text is read into.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum JsonInto {
    /// Values of any kind.
    Values,
    /// What is known before, with little beside it.
    Known,
}

/// The most bytes of memory that reading a JSON text takes: by its bytes, and by its signs, each of which is there for something that takes so much.
pub(crate) fn json_memory_bytes(json: &[u8], into: JsonInto) -> u64 {
    /// The text, and copies of its strings.
    const OF_A_BYTE: u64 = 4;
    let of_signs: u64 = json
        .iter()
        .map(|sign| match sign {
            // An entry of a list that has grown, and the list that it has grown out of.
            b',' => 224,
            // The least that a list has room for.
            b'[' => 320,
            // The least that an object has room for.
            b'{' => 672,
            // A key and its place.
            b':' => 320,
            // Half of what a string takes beside its bytes.
            b'"' => 16,
            _ => 0,
        })
        .sum();
    json.len() as u64 * OF_A_BYTE + if into == JsonInto::Values { of_signs } else { of_signs / 2 }
}

fn open(path: &Path, links: Links) -> std::io::Result<File> {
    let refused = |what: &str| std::io::Error::new(ErrorKind::InvalidInput, format!("is {what}, not a regular file"));
    // Without waiting: a pipe that nobody writes to would hold the one who opens it for ever. Of a file it changes nothing.
    let mut flags = OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    if links == Links::Refuse {
        if path.symlink_metadata()?.is_symlink() {
            return Err(refused("a symbolic link"));
        }
        flags |= OFlags::NOFOLLOW;
    }
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
    let file = file.map_err(|error| match rustix::io::Errno::from_io_error(&error) {
        // What a socket answers.
        Some(rustix::io::Errno::NXIO) => refused("a special file"),
        _ => error,
    })?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(refused("a directory"));
    }
    if !kind.is_file() {
        return Err(refused("a special file"));
    }
    Ok(file)
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
        assert_eq!(read_own_file(&path, 5).unwrap(), b"12345");
        assert!(read_own_file(&path, 4).unwrap_err().to_string().contains("longer than 4 bytes"));
        assert_eq!(read_text_if_exists(&dir.path().join("b.json"), 5).unwrap(), None);
    }

    #[test]
    fn bytes_that_are_no_text_are_the_fault_of_the_file_and_not_of_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, b"{\xff}").unwrap();
        let error = read_text(&path, 9).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { message, .. } if message.contains("not UTF-8 text")), "{error}");
        assert!(error.to_string().contains("a.json"), "{error}");
        assert!(read_text(&path, 2).unwrap_err().to_string().contains("longer than 2 bytes"));
    }

    /// Put back to a plain `File::open`, this test hangs.
    #[test]
    fn what_is_no_file_is_refused_and_blocks_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &socket, Path::new("/dev/zero"), dir.path()] {
            for error in [open_regular(path).unwrap_err().to_string(), read_own_file(path, 9).unwrap_err().to_string()] {
                assert!(error.contains("not a regular file"), "{}: {error}", path.display());
            }
        }
    }

    #[test]
    fn links_lead_to_the_files_of_a_model_and_to_nothing_in_a_data_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_text(&link, 9).unwrap(), "x");
        assert!(read_own_file(&link, 9).unwrap_err().to_string().contains("symbolic link"));
    }
}
