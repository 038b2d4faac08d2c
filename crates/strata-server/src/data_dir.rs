//! The data directory, which belongs to one server at a time.
//!
//! Two servers on one directory would take each other's half-written checkpoints for what a crash left, and remove them. So a server holds
//! an advisory lock on `strata.lock` for as long as it lives, and changes nothing before it has it. The system lets go of the lock with the
//! process, however that ends: a file that is there but not locked is stale, whatever it says. It is never removed, because someone else may
//! have it open to lock it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

const LOCK_FILE: &str = "strata.lock";
/// Far more than a holder writes.
const LOCK_BYTES_MAX: u64 = 4096;

/// Why a data directory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Another server has it.
    #[error("data directory {dir} is in use by {holder}; stop that server, or choose another directory with --data-dir")]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// What the other server says of itself.
        holder: String,
    },
    /// It cannot be made or written.
    #[error("data directory {dir}: {source}")]
    Io {
        /// The directory.
        dir: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A data directory that this process alone may change. Clones are the same claim; it ends with the last of them.
#[derive(Clone, Debug)]
pub struct DataDir {
    claim: Arc<Claim>,
}

#[derive(Debug)]
struct Claim {
    path: PathBuf,
    lock: File,
}

impl DataDir {
    /// Claims a data directory, making it if there is none. Nothing in it but the lock file is touched.
    ///
    /// # Errors
    /// If another server has it, or the file system refuses.
    pub fn claim(path: &Path) -> Result<Self, DataDirError> {
        let io_error = |source| DataDirError::Io { dir: path.into(), source };
        fs::create_dir_all(path).map_err(io_error)?;
        let mut lock = open_lock_file(&path.join(LOCK_FILE)).map_err(io_error)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DataDirError::InUse { dir: path.into(), holder: read_holder(&mut lock) });
            }
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
                tracing::warn!(
                    dir = %path.display(),
                    "the file system of the data directory has no locks: a second server on it would not be noticed"
                );
            }
            Err(TryLockError::Error(error)) => return Err(io_error(error)),
        }
        let before = read_holder(&mut lock);
        if !before.is_empty() {
            tracing::info!(dir = %path.display(), "the last server on the data directory did not end in order: {before}");
        }
        if let Err(error) = write_holder(&mut lock) {
            // The lock is what counts, and on a full disk checkpoints can still be deleted.
            tracing::warn!(dir = %path.display(), "{LOCK_FILE} does not say who has the data directory: {error}");
        }
        Ok(DataDir { claim: Arc::new(Claim { path: path.into(), lock }) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.claim.path
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // An empty file says that its last holder ended in order. The lock goes with the file's descriptor.
        let _ = self.lock.set_len(0);
    }
}

fn open_lock_file(path: &Path) -> std::io::Result<File> {
    // Neither through a link nor waiting for the other end of a pipe.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(flags.bits() as i32);
    let file = options.open(path).map_err(|error| std::io::Error::new(error.kind(), format!("{LOCK_FILE}: {error}")))?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, format!("{LOCK_FILE} is not a regular file")));
    }
    Ok(file)
}

/// What the holder wrote, on one line; nothing if it did not, or ended in order.
fn read_holder(lock: &mut File) -> String {
    let mut bytes = Vec::new();
    // What cannot be read is not known; that the lock is taken is known all the same.
    let _ = lock.rewind().and_then(|()| lock.take(LOCK_BYTES_MAX).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).trim().replace(char::is_control, " ")
}

fn write_holder(lock: &mut File) -> std::io::Result<()> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let since = now.format(&Rfc3339).unwrap_or_default();
    lock.set_len(0)?;
    lock.rewind()?;
    writeln!(lock, "strata, pid {} on {host} since {since}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_claim_is_refused_with_the_name_of_the_first_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::claim(dir.path()).unwrap();
        let written = fs::read(dir.path().join(LOCK_FILE)).unwrap();
        let message = DataDir::claim(dir.path()).unwrap_err().to_string();
        let expected = format!("is in use by strata, pid {} on ", std::process::id());
        assert!(message.contains(&expected) && message.contains(" since 20"), "{message}");
        assert_eq!(fs::read(dir.path().join(LOCK_FILE)).unwrap(), written);
        let clone = first.clone();
        drop(first);
        assert!(DataDir::claim(dir.path()).is_err(), "a clone holds it too");
        drop(clone);
        DataDir::claim(dir.path()).unwrap();
    }

    #[test]
    fn a_lock_whose_holder_is_gone_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(LOCK_FILE), "strata, pid 1 on elsewhere since 1999").unwrap();
        let claimed = DataDir::claim(dir.path()).unwrap();
        let holder = fs::read_to_string(dir.path().join(LOCK_FILE)).unwrap();
        assert!(holder.contains(&format!("pid {} ", std::process::id())) && !holder.contains("elsewhere"), "{holder}");
        drop(claimed);
        assert_eq!(fs::read(dir.path().join(LOCK_FILE)).unwrap(), b"", "and leaves no trace when it ends in order");
    }

    #[test]
    fn a_lock_file_that_is_none_is_refused_and_blocks_nobody() {
        for make in [
            |path: &Path| rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RWXU).unwrap(),
            |path: &Path| std::os::unix::fs::symlink("/dev/null", path).unwrap(),
        ] {
            let dir = tempfile::tempdir().unwrap();
            make(&dir.path().join(LOCK_FILE));
            let message = DataDir::claim(dir.path()).unwrap_err().to_string();
            assert!(message.contains(LOCK_FILE), "{message}");
        }
    }
}
