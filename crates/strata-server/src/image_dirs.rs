//! The directories that prompts may name pictures in, by `file:///DIR/…`.
//!
//! Nothing outside of them can be reached, whatever happens in them meanwhile: each is opened once, at start, and every name below it is opened
//! from the one before and never through a link. What counts is what was opened, which is looked at only then.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::names::shown;
use crate::wire::budget::Budget;
use crate::wire::picture;

/// Directories that prompts may name pictures in; none unless there are some. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ImageDirs {
    dirs: Arc<[ImageDir]>,
}

#[derive(Debug)]
struct ImageDir {
    /// What it may be called: as it was given, and with its links resolved.
    names: [PathBuf; 2],
    opened: OwnedFd,
}

/// Why a directory cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("directory of pictures {dir}: {reason}")]
pub struct ImageDirError {
    /// The directory.
    dir: PathBuf,
    /// The system's reason.
    reason: std::io::Error,
}

impl ImageDirs {
    /// Opens directories. Links on the way to them are followed, now and never again.
    ///
    /// # Errors
    /// If one is not there, or is no directory, or may not be read.
    pub fn open(dirs: &[PathBuf]) -> Result<Self, ImageDirError> {
        let open = |dir: &PathBuf| {
            let resolved = dir.canonicalize()?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = openat(CWD, &resolved, flags, Mode::empty())?;
            Ok(ImageDir { names: [std::path::absolute(dir)?, resolved], opened })
        };
        let dirs = dirs.iter().map(|dir| open(dir).map_err(|reason| ImageDirError { dir: dir.clone(), reason }));
        Ok(ImageDirs { dirs: dirs.collect::<Result<_, _>>()? })
    }

    /// Reads the picture at `location`, counted before it is.
    ///
    /// # Errors
    /// If it is not the `file:` URL of a file in one of the directories, or the file is too large, or goes beyond the budget.
    pub fn read(&self, location: &str, budget: &Budget) -> Result<Arc<[u8]>, String> {
        let path = self.path(location)?;
        let file = self.find(path).map_err(|reason| format!("location {:?} {reason}", shown(location)))?;
        let wrong = |error: &dyn std::fmt::Display| format!("location {:?} cannot be read: {error}", shown(location));
        let metadata = file.metadata().map_err(|error| wrong(&error))?;
        if !metadata.is_file() {
            return Err(wrong(&"it is no regular file"));
        }
        let len = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        picture::check_len(len).map_err(|reason| wrong(&reason))?;
        budget.take(picture::held_bytes(len))?;
        let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, len).collect();
        let mut file = file;
        file.read_exact(Arc::make_mut(&mut bytes)).map_err(|error| wrong(&error))?;
        if file.read(&mut [0]).map_err(|error| wrong(&error))? > 0 {
            return Err(wrong(&"it grew meanwhile"));
        }
        Ok(bytes)
    }

    /// The path that a location names.
    fn path<'a>(&self, location: &'a str) -> Result<&'a Path, String> {
        const INSTEAD: &str = "send the picture itself, as an image";
        let quoted = shown(location);
        let path = match location.split_once(':') {
            Some(("file", path)) => path,
            Some((scheme, _)) if scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && !scheme.contains('/') => {
                let scheme = shown(scheme);
                return Err(format!(
                    "the location is one of scheme {scheme:?}, and this server fetches nothing, because it was started without --image-store; {INSTEAD}"
                ));
            }
            _ => return Err(format!("location {quoted:?} has no scheme, such as that of file:///DIR/NAME.png; {INSTEAD}")),
        };
        if self.dirs.is_empty() {
            return Err(format!(
                "this server reads no files for its clients, because it was started without --image-dir; {INSTEAD}"
            ));
        }
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') {
            return Err(format!(
                "location {quoted:?} names another machine or no absolute path; file:///DIR/NAME.png does not"
            ));
        }
        if let Some(c) = path.chars().find(|c| matches!(c, '%' | '?' | '#' | '\0')) {
            return Err(format!(
                "location {quoted:?} has a {c:?}; paths are taken as they are written, without encoding, and without this"
            ));
        }
        let path = Path::new(path);
        if path.components().any(|component| component == Component::ParentDir) {
            return Err(format!("location {quoted:?} has a .., which is not followed"));
        }
        Ok(path)
    }

    /// Opens what is at `path`, whatever it is.
    fn find(&self, path: &Path) -> Result<File, String> {
        let below = |dir: &'_ ImageDir| dir.names.iter().find_map(|name| path.strip_prefix(name).ok());
        let Some((dir, below)) = self.dirs.iter().find_map(|dir| Some((dir, below(dir)?))) else {
            return Err("is in no directory that this server was given with --image-dir".into());
        };
        let refused = |errno: Errno| match errno {
            Errno::NOENT => "is not there".to_owned(),
            // A link where a directory has to be is no directory either.
            Errno::LOOP | Errno::NOTDIR => "goes through a link, or through what is no directory".to_owned(),
            errno => format!("cannot be opened: {}", std::io::Error::from(errno)),
        };
        let common = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut names = below.components().map(Component::as_os_str).peekable();
        let mut parent: Option<OwnedFd> = None;
        while let Some(name) = names.next() {
            // A pipe would wait for its other end, and a terminal would become this process's own.
            let kind = if names.peek().is_some() { OFlags::DIRECTORY } else { OFlags::NONBLOCK | OFlags::NOCTTY };
            let opened = openat(parent.as_ref().unwrap_or(&dir.opened), name, common | kind, Mode::empty()).map_err(refused)?;
            parent = Some(opened);
        }
        parent.map(File::from).ok_or_else(|| "is a directory".into())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;
    use crate::limits;
    use crate::tests::{peak_bytes, with_budget};

    /// A directory `images` with a picture in it, beside a file that is nobody's business.
    fn dirs() -> (TempDir, ImageDirs) {
        let root = TempDir::new().unwrap();
        fs::create_dir_all(root.path().join("images/deep")).unwrap();
        fs::write(root.path().join("secret.png"), b"secret").unwrap();
        fs::write(root.path().join("images/deep/a b.png"), b"picture").unwrap();
        symlink(root.path().join("images"), root.path().join("link")).unwrap();
        let dirs = ImageDirs::open(&[root.path().join("link")]).unwrap();
        (root, dirs)
    }

    fn read(dirs: &ImageDirs, location: &str) -> Result<Arc<[u8]>, String> {
        with_budget(1 << 20, |budget| dirs.read(location, budget))
    }

    #[test]
    fn a_file_in_a_directory_is_read_under_either_of_its_names() {
        let (root, dirs) = dirs();
        let root = root.path().display();
        for path in [format!("{root}/images/deep/a b.png"), format!("{root}/link/./deep//a b.png")] {
            for location in [format!("file://{path}"), format!("file:{path}")] {
                assert_eq!(read(&dirs, &location).as_deref(), Ok(&b"picture"[..]), "{location}");
            }
        }
    }

    #[test]
    fn nothing_else_is_read() {
        let (root, dirs) = dirs();
        let images = root.path().join("images");
        symlink("../secret.png", images.join("out.png")).unwrap();
        symlink("..", images.join("up")).unwrap();
        symlink("deep/a b.png", images.join("in.png")).unwrap();
        fs::write(images.join("empty.png"), b"").unwrap();
        fs::File::create(images.join("huge.png")).unwrap().set_len(limits::IMAGE_BYTES_MAX as u64 + 1).unwrap();
        rustix::fs::mkfifoat(CWD, images.join("pipe.png"), Mode::RWXU).unwrap();
        let root = root.path().display();
        for (location, words) in [
            (format!("file://{root}/secret.png"), "in no directory"),
            (format!("file://{root}/images2/a.png"), "in no directory"),
            (format!("file://{root}/images/../secret.png"), "has a .."),
            (format!("file://{root}/images/%2e%2e/secret.png"), "has a '%'"),
            (format!("file://{root}/images/a.png?x"), "has a '?'"),
            (format!("file://{root}/images/a.png\0"), "has a '\\0'"),
            (format!("file://localhost{root}/images/deep/a b.png"), "another machine"),
            ("file:deep/a b.png".into(), "no absolute path"),
            (format!("{root}/images/deep/a b.png"), "no scheme"),
            (":x".into(), "no scheme"),
            (format!("FILE://{root}/images/deep/a b.png"), "\"FILE\""),
            ("https://example.com/a.png".into(), "\"https\", and this server fetches nothing"),
            ("s3://bucket/a.png".into(), "without --image-store"),
            (format!("file://{root}/images/out.png"), "through a link"),
            (format!("file://{root}/images/up/secret.png"), "through a link"),
            (format!("file://{root}/images/in.png"), "through a link"),
            (format!("file://{root}/images/deep/a b.png/x"), "no directory"),
            (format!("file://{root}/images/none.png"), "is not there"),
            (format!("file://{root}/images/deep"), "no regular file"),
            (format!("file://{root}/images"), "is a directory"),
            (format!("file://{root}/images/pipe.png"), "no regular file"),
            (format!("file://{root}/images/empty.png"), "no data"),
            (format!("file://{root}/images/huge.png"), "33554433 bytes"),
        ] {
            let error = read(&dirs, &location).unwrap_err();
            assert!(error.contains(words), "{location}: {error}");
        }
        let error = read(&ImageDirs::default(), &format!("file://{root}/images/deep/a b.png")).unwrap_err();
        assert!(error.contains("without --image-dir"), "{error}");
    }

    #[test]
    fn a_directory_that_is_replaced_is_still_the_one_that_was_given() {
        let (root, dirs) = dirs();
        let images = root.path().join("images");
        fs::rename(&images, root.path().join("moved")).unwrap();
        symlink(root.path(), &images).unwrap();
        let location = |name: &str| format!("file://{}/{name}", images.display());
        assert!(read(&dirs, &location("secret.png")).unwrap_err().contains("is not there"));
        assert_eq!(read(&dirs, &location("deep/a b.png")).as_deref(), Ok(&b"picture"[..]));
    }

    #[test]
    fn a_file_is_counted_before_it_is_read() {
        let (root, dirs) = dirs();
        fs::write(root.path().join("images/large.png"), vec![7; 2 << 20]).unwrap();
        let location = format!("file://{}/images/large.png", root.path().display());
        let (refused, peak) = peak_bytes(|| read(&dirs, &location));
        assert!(refused.unwrap_err().contains("1 MiB"));
        assert!(peak < 1 << 16, "{peak}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = ImageDirs::open(&["/nonexistent/pictures".into()]).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/pictures"), "{error}");
        let file = TempDir::new().unwrap();
        fs::write(file.path().join("a"), b"").unwrap();
        assert!(ImageDirs::open(&[file.path().join("a")]).is_err());
    }
}
