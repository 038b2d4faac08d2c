//! Directories that appear under their name whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

const PARTIAL: &str = ".partial-";
const REPLACED: &str = ".replaced-";

/// What to do if the directory to write exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Leave it alone and fail.
    Refuse,
    /// Put the new one in its place.
    Replace,
}

/// Creates the directory `dir` with what `write` puts into the directory it is given, a hidden sibling of `dir` that is made durable and
/// then renamed. Parents of `dir` are created as needed. Returns the bytes of all files.
///
/// After a crash there is the old directory, or the new one, or (while one replaces the other) neither, and
/// [`recover_directories`] brings the old one back.
///
/// # Errors
/// If `write` fails, `dir` exists and is not to be replaced, or the file system refuses.
pub fn write_atomically(dir: &Path, existing: Existing, write: impl FnOnce(&Path) -> Result<()>) -> Result<u64> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let (Some(name), Some(parent)) = (dir.file_name(), dir.parent()) else {
        return Err(Error::Checkpoint { path: dir.into(), message: "is not a path that a directory can be created at".into() });
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    refuse_existing(dir, existing)?;
    create_durable_parents(parent)?;
    let suffix = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    let sibling = |kind: &str| {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!("{kind}{suffix}"));
        parent.join(hidden)
    };
    let partial = RemovedOnDrop(sibling(PARTIAL));
    fs::create_dir(&partial.0).map_err(io_error(&partial.0))?;
    write(&partial.0)?;
    let size_bytes = sync_tree(&partial.0)?;
    refuse_existing(dir, existing)?;
    let replaced = sibling(REPLACED);
    let replaces = dir.exists();
    if replaces {
        fs::rename(dir, &replaced).map_err(io_error(dir))?;
    }
    if let Err(error) = fs::rename(&partial.0, dir) {
        if replaces {
            fs::rename(&replaced, dir).map_err(io_error(dir))?;
        }
        return Err(io_error(dir)(error));
    }
    sync(parent)?;
    if replaces {
        fs::remove_dir_all(&replaced).map_err(io_error(&replaced))?;
    }
    Ok(size_bytes)
}

/// Clears what a crash left of [`write_atomically`] among the entries of `parent`: half-written directories go, and a directory
/// that was being replaced comes back. To be called when nothing is being written there.
///
/// # Errors
/// If the file system refuses.
pub fn recover_directories(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent).map_err(io_error(parent))? {
        let path = entry.map_err(io_error(parent))?.path();
        let Some(hidden) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix('.')) else { continue };
        if let Some((name, _)) = hidden.rsplit_once(REPLACED)
            && !parent.join(name).exists()
        {
            fs::rename(&path, parent.join(name)).map_err(io_error(&path))?;
        } else if hidden.contains(REPLACED) || hidden.contains(PARTIAL) {
            fs::remove_dir_all(&path).map_err(io_error(&path))?;
        }
    }
    sync(parent)
}

/// Makes a directory or a file that was written durable.
pub(crate) fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|f| f.sync_all()).map_err(io_error(path))
}

struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        // After the rename there is nothing left to remove, and of a failed write the first error is the one to report.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, source }
}

fn refuse_existing(dir: &Path, existing: Existing) -> Result<()> {
    if existing == Existing::Refuse && dir.symlink_metadata().is_ok() {
        return Err(Error::Checkpoint { path: dir.into(), message: "exists already".into() });
    }
    Ok(())
}

/// Creates a directory and those above it, each durable in the one that holds it.
fn create_durable_parents(dir: &Path) -> Result<()> {
    let missing: Vec<_> = dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !d.exists()).collect();
    fs::create_dir_all(dir).map_err(io_error(dir))?;
    for created in missing {
        let above = created.parent().filter(|p| !p.as_os_str().is_empty());
        sync(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

/// Makes a directory and everything in it durable; returns the bytes of its files.
fn sync_tree(dir: &Path) -> Result<u64> {
    let mut size_bytes = 0;
    for entry in fs::read_dir(dir).map_err(io_error(dir))? {
        let path = entry.map_err(io_error(dir))?.path();
        let metadata = fs::symlink_metadata(&path).map_err(io_error(&path))?;
        if metadata.is_dir() {
            size_bytes += sync_tree(&path)?;
        } else {
            sync(&path)?;
            size_bytes += metadata.len();
        }
    }
    sync(dir)?;
    Ok(size_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_file(text: &'static str) -> impl FnOnce(&Path) -> Result<()> {
        move |dir| fs::write(dir.join("a.txt"), text).map_err(io_error(dir))
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_directory_appears_whole_with_its_parents_and_its_size() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs").join("1").join("ckpt");
        assert_eq!(write_atomically(&dir, Existing::Refuse, write_file("hello")).unwrap(), 5);
        assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "hello");
        assert_eq!(names(dir.parent().unwrap()), ["ckpt"]);
    }

    #[test]
    fn an_existing_directory_is_kept_or_replaced_as_asked() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ckpt");
        write_atomically(&dir, Existing::Refuse, write_file("old")).unwrap();
        let error = write_atomically(&dir, Existing::Refuse, write_file("new")).unwrap_err().to_string();
        assert!(error.contains("exists already"), "{error}");
        assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "old");
        write_atomically(&dir, Existing::Replace, write_file("new")).unwrap();
        assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "new");
        assert_eq!(names(root.path()), ["ckpt"]);
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ckpt");
        let failing = |partial: &Path| {
            fs::write(partial.join("a.txt"), "half").unwrap();
            Err(Error::Lora("no".into()))
        };
        assert!(write_atomically(&dir, Existing::Replace, failing).is_err());
        assert!(names(root.path()).is_empty());
    }

    #[test]
    fn recovery_clears_leftovers_and_restores_what_was_being_replaced() {
        let root = tempfile::tempdir().unwrap();
        for name in [".a.partial-7-0", ".a.replaced-7-0", ".b.replaced-7-1", "b", "c", ".hidden"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        recover_directories(root.path()).unwrap();
        assert_eq!(names(root.path()), [".hidden", "a", "b", "c"]);
    }
}
