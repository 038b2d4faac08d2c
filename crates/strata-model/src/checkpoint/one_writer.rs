//! A large file that several processes may want to write at the same time, for the same contents: one does.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use rustix::fs::OFlags;

use super::atomic::sync;
use crate::{Error, Result};

/// Hidden files that this process is writing. One is opened and noted here at once, and gets its name while nobody else looks.
static WRITING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn writing() -> MutexGuard<'static, Vec<PathBuf>> {
    WRITING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Removes the files that this process is writing and that have not got their names yet. None gets it any more, and none is begun: to be called when the process ends. Whoever writes waits for that from
/// here on.
pub fn abandon_files() {
    let all = writing();
    for hidden in &*all {
        let _ = fs::remove_file(hidden);
    }
    std::mem::forget(all);
}

/// Creates or replaces the file `path` with what `write` puts into the file that it is given, which has a hidden name beside it until it is whole and durable. Whether it did: not if
/// another process is at it. The directory is made if there is none.
///
/// What a process leaves there that was killed while it wrote is taken over by the next. The file is for its owner alone, as what it is made of may be.
///
/// # Errors
/// If `write` fails or the file system refuses. What was there before is there still.
pub(crate) fn write_by_one(path: &Path, write: impl FnOnce(&File) -> Result<()>) -> Result<bool> {
    let io_error = |source| Error::Io { path: path.into(), source };
    let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
        return Err(Error::Checkpoint { path: path.into(), message: "is not a path that anything can be created at".into() });
    };
    fs::create_dir_all(parent).map_err(io_error)?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".new");
    let hidden = parent.join(hidden);
    // A link, or something that blocks, may have been put there.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags.bits() as i32);
    let mut all = writing();
    let file = options.open(&hidden).map_err(io_error)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => return Err(io_error(error)),
    }
    let own = file.metadata().map_err(io_error)?;
    // Between the two calls another may have finished: what is open here is then what it has made, under its name.
    let is_there = fs::symlink_metadata(&hidden).is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()));
    if !own.is_file() {
        // Nobody who writes here has made it, and so nobody will take it away.
        return Err(Error::Checkpoint { path: hidden, message: "is no file, and stands where one is to be written".into() });
    }
    if !is_there {
        return Ok(false);
    }
    all.push(hidden.clone());
    drop(all);
    let put = file.set_len(0).map_err(io_error).and_then(|()| write(&file)).and_then(|()| file.sync_all().map_err(io_error));
    let mut all = writing();
    all.retain(|other| *other != hidden);
    if let Err(error) = put.and_then(|()| fs::rename(&hidden, path).map_err(io_error)) {
        // Of a failed write the first error is the one to report.
        let _ = fs::remove_file(&hidden);
        return Err(error);
    }
    drop(all);
    sync(parent)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn one_of_two_writes_and_what_a_killed_one_left_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/here/file");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let hidden = path.with_file_name(".file.new");
        fs::write(&hidden, "much longer, and left behind").unwrap();
        let put = |mut file: &File, text: &str| {
            file.write_all(text.as_bytes()).unwrap();
            Ok(())
        };
        let both = write_by_one(&path, |file| {
            assert!(!write_by_one(&path, |file| put(file, "second")).unwrap());
            put(file, "first")
        });
        assert!(both.unwrap() && !hidden.exists());
        assert_eq!(fs::read(&path).unwrap(), b"first");
        let failed = write_by_one(&path, |_| Err(Error::Hub("no".into())));
        assert!(failed.is_err() && !hidden.exists());
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert!(write_by_one(&path, |file| put(file, "third")).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("precious");
        fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join(".file.new")).unwrap();
        assert!(write_by_one(&dir.path().join("file"), |_| Ok(())).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"kept");
    }

    #[test]
    fn what_is_no_file_and_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let hidden = dir.path().join(".file.new");
        rustix::fs::mkfifoat(rustix::fs::CWD, &hidden, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        let error = write_by_one(&dir.path().join("file"), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains(".file.new") && error.contains("is no file"), "{error}");
    }
}
