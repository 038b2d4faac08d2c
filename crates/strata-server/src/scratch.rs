//! Directories for files that are not a checkpoint yet, or no longer: what is being uploaded, and what is being sent in another form.
//!
//! Each is removed with whoever has it, and all that a crash left at the next start.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const NAME: &str = "scratch";

/// A directory that is there as long as this is.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new one in a data directory.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn new(data_dir: &Path) -> std::io::Result<Self> {
        let parent = data_dir.join(NAME);
        match fs::create_dir(&parent) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ if parent.symlink_metadata()?.is_dir() => {}
            _ => return Err(std::io::Error::new(ErrorKind::InvalidInput, format!("{NAME} is no directory"))),
        }
        let path = parent.join(uuid::Uuid::new_v4().to_string());
        fs::create_dir(&path)?;
        Ok(Scratch { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), "cannot be removed before the next start: {error}");
        }
    }
}

/// Removes what a crash left in a data directory that no server has. What cannot be removed is logged and left.
pub fn clear(data_dir: &Path) {
    let path = data_dir.join(NAME);
    // A link is nothing of ours, wherever it leads.
    if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
        && let Err(error) = fs::remove_dir_all(&path)
    {
        tracing::warn!(path = %path.display(), "what was left of uploads and downloads cannot be removed: {error}");
    }
}
