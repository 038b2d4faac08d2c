//! Directories that appear under their name whole or not at all, and go the same way.
//!
//! What is made is written beside its place, made durable, and renamed; the directory that holds both names is made durable after every
//! rename. Where the system can exchange two names at once (Linux and macOS, on local file systems) there is a checkpoint under its name at
//! every moment of its replacement; elsewhere the old one steps aside first, and [`recover_directories`] brings it back after a crash.
//!
//! Who writes a directory holds a lock on it, of which the system lets go with the process: what nobody holds is what a crash left, whichever process looks.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::{Error, Result};

/// Being written.
const PARTIAL: &str = ".partial-";
/// Set aside for the one that replaces it.
const REPLACED: &str = ".replaced-";
/// Deleted, and not yet removed.
const DELETED: &str = ".deleted-";

/// How often a directory is begun again whose parents others remove.
const BEGIN_ATTEMPTS: usize = 100;
/// How often it is tried to remove a directory in which another thread makes files.
const ABANDON_ATTEMPTS: usize = 100;

/// What to do if the directory to write exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Leave it alone and fail.
    Refuse,
    /// Put the new one in its place.
    Replace,
}

/// Says that no directory changes its name, or gets one, in this process.
pub struct NamesHeld {
    _held: MutexGuard<'static, ()>,
}

/// Holds every name where it is, for whoever looks what is under a name and then acts on it. Writing the contents of a directory does not
/// need this and goes on meanwhile. Not to be held across anything but a few small operations on files.
pub fn hold_names() -> NamesHeld {
    static NAMES: Mutex<()> = Mutex::new(());
    NamesHeld { _held: NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) }
}

/// A hidden directory that this process is writing.
struct Writing {
    path: PathBuf,
    /// Parents that were made for it, the lowest first.
    parents: Vec<PathBuf>,
}

/// All of them. One is made and noted here at once.
static WRITING: Mutex<Vec<Writing>> = Mutex::new(Vec::new());

fn writing() -> MutexGuard<'static, Vec<Writing>> {
    WRITING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Removes what this process is writing and has not got its name yet. None gets it any more, and none is begun: to be called when the process ends. Whoever writes waits for that from here on.
pub fn abandon_writes() {
    std::mem::forget(hold_names());
    let all = writing();
    for Writing { path, parents } in &*all {
        // Another thread may still add to it.
        let _ = (0..ABANDON_ATTEMPTS).any(|_| fs::remove_dir_all(path).is_ok() || !path.exists());
        remove_if_empty(parents);
    }
    std::mem::forget(all);
}

/// Creates the directory `dir` with what `write` puts into the directory it is given, a hidden sibling of `dir` that is made durable and
/// then renamed. Parents of `dir` are created as needed. Returns the bytes of all files.
///
/// When this returns, the new directory is there after a crash too. If it fails, what was there before is there still, and nothing else. What a process that was killed left of writing the same
/// directory is removed first, where file systems have locks.
///
/// # Errors
/// If `write` fails, `dir` exists and is not to be replaced or is no directory, or the file system refuses.
pub fn write_atomically(dir: &Path, existing: Existing, write: impl FnOnce(&Path) -> Result<()>) -> Result<u64> {
    let parent = parent_of(dir)?;
    refuse_existing(dir, existing)?;
    remove_abandoned(dir);
    let partial = Partial::begin(dir)?;
    let path = &partial.directory.0;
    write(path)?;
    let size_bytes = sync_tree(path)?;
    let held = hold_names();
    refuse_existing(dir, existing)?;
    match dir.symlink_metadata() {
        Ok(_) => replace(path, dir, exchange)?,
        Err(_) => {
            fs::rename(path, dir).map_err(io_error(dir))?;
            sync(parent).inspect_err(|_| undo(fs::rename(dir, path), dir))?;
        }
    }
    drop(held);
    // The directory that was replaced now has the name of the partial one, and is removed with it.
    Ok(size_bytes)
}

/// Refuses a path that leads through a link below `top`: where links are not followed when a directory is read, nothing must be written through one either.
///
/// # Errors
/// If it, or a directory above it and below `top`, is a symbolic link.
pub fn refuse_links_below(top: &Path, path: &Path) -> Result<()> {
    let mut below = path.ancestors().take_while(|part| *part != top && part.starts_with(top));
    let Some(link) = below.find(|part| part.is_symlink()) else { return Ok(()) };
    let shown = link.strip_prefix(top).unwrap_or(link).display();
    Err(Error::Checkpoint { path: link.into(), message: format!("{shown} is a symbolic link, and is not followed") })
}

/// Takes a directory out of the way under a hidden name, which is returned, as the first half of deleting it. The second half may fail,
/// or never come: [`recover_directories`] makes up for it.
///
/// # Errors
/// If the file system refuses. The directory then still has its name.
pub fn set_aside(dir: &Path, _: &NamesHeld) -> Result<PathBuf> {
    let parent = parent_of(dir)?;
    // Only a rename, which a disk that is full can still do: deleting is how it gets room.
    let aside = free_sibling(dir, DELETED)?;
    fs::rename(dir, &aside).map_err(io_error(dir))?;
    sync(parent).inspect_err(|_| undo(fs::rename(&aside, dir), dir))?;
    Ok(aside)
}

/// Replaces a file, or creates it: the old contents or the new are there, also after a crash.
///
/// # Errors
/// If the file system refuses. The old contents are then still there.
pub fn write_file_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = parent_of(path)?;
    let mut hidden = OsString::from(".");
    hidden.push(path.file_name().unwrap_or_default());
    hidden.push(".new");
    let temporary = parent.join(hidden);
    // What an interrupted write left; and whatever else has this name must not be written through.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(io_error(&temporary)(error)),
        _ => {}
    }
    let written = OpenOptions::new().write(true).create_new(true).open(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&temporary);
        return Err(io_error(path)(error));
    }
    sync(parent)
}

/// Clears what a crash left of [`write_atomically`] and [`set_aside`] among the entries of `parent`: half-written and deleted directories
/// go, and a directory that was being replaced comes back. To be called when this process writes nothing there; what another is writing is left to it.
///
/// Only directories under the hidden names that these functions give are touched. What cannot be cleared is logged and left.
///
/// # Errors
/// If `parent` cannot be read.
pub fn recover_directories(parent: &Path) -> Result<()> {
    let mut replaced: BTreeMap<String, Vec<(SystemTime, PathBuf)>> = BTreeMap::new();
    let mut changed = false;
    let attempt = |done: std::io::Result<()>, path: &Path| match done {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(path = %path.display(), "what an interrupted write left cannot be cleared: {error}");
            false
        }
    };
    for entry in fs::read_dir(parent).map_err(io_error(parent))? {
        let entry = entry.map_err(io_error(parent))?;
        let file_name = entry.file_name();
        let Some((name, kind)) = file_name.to_str().and_then(parse_leftover) else { continue };
        let path = entry.path();
        // Of the entry itself: a link is nothing of ours, wherever it leads.
        let metadata = entry.metadata().map_err(io_error(&path))?;
        if !metadata.is_dir() {
            tracing::warn!(path = %path.display(), "has the name of a directory that is being written, but is none; it is left alone");
            continue;
        }
        let hold = if kind == PARTIAL { Hold::of(&path) } else { Hold::Unknown };
        if kind == REPLACED {
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            replaced.entry(name.into()).or_default().push((modified, path));
        } else if matches!(hold, Hold::Others) {
            tracing::info!(path = %path.display(), "is being written by another process");
        } else {
            changed |= attempt(fs::remove_dir_all(&path), &path);
        }
    }
    for (name, mut copies) in replaced {
        copies.sort();
        let original = parent.join(&name);
        if original.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound)
            && let Some((_, newest)) = copies.pop()
        {
            changed |= attempt(fs::rename(&newest, &original), &newest);
        }
        for (_, path) in copies {
            changed |= attempt(fs::remove_dir_all(&path), &path);
        }
    }
    if changed { sync(parent) } else { Ok(()) }
}

/// Makes a directory or a file that was written durable.
pub(crate) fn sync(path: &Path) -> Result<()> {
    #[cfg(test)]
    tests::note_sync(path)?;
    let synced = File::open(path).and_then(|file| match file.sync_all() {
        // Some network and user-space file systems have no such thing for directories: their renames are as durable as they get.
        Err(error) if error.kind() == ErrorKind::InvalidInput && file.metadata()?.is_dir() => Ok(()),
        done => done,
    });
    synced.map_err(io_error(path))
}

/// Who is at a directory.
enum Hold {
    /// We are, for as long as this file is open.
    Ours(File),
    /// Somebody else.
    Others,
    /// It is gone, or its file system has no locks: on some networks there are none for directories.
    Unknown,
}

impl Hold {
    /// Takes a directory that nobody else has.
    fn of(dir: &Path) -> Self {
        let Ok(file) = File::open(dir) else { return Hold::Unknown };
        match file.try_lock() {
            Ok(()) => Hold::Ours(file),
            Err(TryLockError::WouldBlock) => Hold::Others,
            Err(TryLockError::Error(_)) => Hold::Unknown,
        }
    }

    /// Whether what has this path now is the directory that was taken, as far as is known.
    fn is_at(&self, dir: &Path) -> bool {
        let Hold::Ours(file) = self else { return matches!(self, Hold::Unknown) && dir.is_dir() };
        let identity = |metadata: std::io::Result<fs::Metadata>| metadata.map(|metadata| (metadata.dev(), metadata.ino())).ok();
        identity(file.metadata()).is_some_and(|held| Some(held) == identity(dir.symlink_metadata()))
    }
}

/// A directory that is being written under a hidden name.
struct Partial {
    directory: RemovedOnDrop,
    /// For as long as it has that name, and until it is removed.
    _hold: Hold,
    /// Parents that were made for it go with it, if nothing else is in them.
    _parents: EmptyRemovedOnDrop,
}

impl Partial {
    /// Makes it beside `dir`, and the parents that are missing.
    fn begin(dir: &Path) -> Result<Self> {
        let parent = parent_of(dir)?;
        let make = || {
            let mut all = writing();
            let parents = create_durable_parents(parent)?;
            let path = free_sibling(dir, PARTIAL)?;
            fs::create_dir(&path).map_err(io_error(&path))?;
            all.push(Writing { path: path.clone(), parents: parents.0.clone() });
            Ok((path, parents))
        };
        let mut attempts = 0..BEGIN_ATTEMPTS;
        loop {
            let (path, parents) = match make() {
                Ok(made) => made,
                // Others that were written there have gone, and parents with them, at whatever moment: what was not there is, or the other way round.
                Err(Error::Io { source, .. })
                    if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists) && attempts.next().is_some() =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (hold, directory) = (Hold::of(&path), RemovedOnDrop(path));
            // Before it was held, another process may have taken it for what a crash left.
            if hold.is_at(&directory.0) {
                return Ok(Partial { directory, _hold: hold, _parents: parents });
            }
        }
    }
}

/// Removes what a process that is no more left of writing this directory.
fn remove_abandoned(dir: &Path) {
    let siblings = parent_of(dir).and_then(|parent| fs::read_dir(parent).map_err(io_error(parent)));
    for entry in siblings.into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let leftover = file_name.to_str().and_then(parse_leftover);
        let is_ours = leftover.is_some_and(|(name, kind)| kind == PARTIAL && dir.file_name().is_some_and(|own| own == name));
        if is_ours
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Hold::Ours(_held) = Hold::of(&entry.path())
        {
            drop(RemovedOnDrop(entry.path()));
        }
    }
}

/// Removes the directories that are empty among a directory and those above it, from the lowest up to and without `top`. Another may be made in them at the same time: it comes first, or makes them
/// again.
pub fn remove_empty_directories(lowest: &Path, top: &Path) {
    for dir in lowest.ancestors().take_while(|dir| dir.starts_with(top) && *dir != top) {
        if fs::remove_dir(dir).is_err() {
            return;
        }
    }
}

/// Directories, the lowest first, of which those that are empty are removed.
struct EmptyRemovedOnDrop(Vec<PathBuf>);

impl Drop for EmptyRemovedOnDrop {
    fn drop(&mut self) {
        remove_if_empty(&self.0);
    }
}

fn remove_if_empty(dirs: &[PathBuf]) {
    // The first that is not empty keeps those above it.
    let _ = dirs.iter().try_for_each(fs::remove_dir);
}

struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        writing().retain(|writing| writing.path != self.0);
        // After a rename to a free name there is nothing left to remove, and of a failed write the first error is the one to report.
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(path = %self.0.display(), "cannot be removed before the next start: {error}");
            }
            _ => {}
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, source }
}

fn parent_of(path: &Path) -> Result<&Path> {
    let (Some(_), Some(parent)) = (path.file_name(), path.parent()) else {
        return Err(Error::Checkpoint { path: path.into(), message: "is not a path that anything can be created at".into() });
    };
    Ok(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
}

fn refuse_existing(dir: &Path, existing: Existing) -> Result<()> {
    let message = match dir.symlink_metadata() {
        Err(_) => return Ok(()),
        Ok(_) if existing == Existing::Refuse => "exists already",
        Ok(metadata) if !metadata.is_dir() => "is not a directory, and is not replaced",
        Ok(_) => return Ok(()),
    };
    Err(Error::Checkpoint { path: dir.into(), message: message.into() })
}

/// A hidden name beside `dir` that [`parse_leftover`] knows and nothing has.
fn free_sibling(dir: &Path, kind: &str) -> Result<PathBuf> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let parent = parent_of(dir)?;
    loop {
        let mut hidden = OsString::from(".");
        hidden.push(dir.file_name().unwrap_or_default());
        hidden.push(format!("{kind}{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let path = parent.join(hidden);
        // A process of the same id may have left something that cannot be removed: the next name will do.
        if path.symlink_metadata().is_err() {
            return Ok(path);
        }
    }
}

/// The directory that one of our hidden names stands beside, and what it is.
fn parse_leftover(file_name: &str) -> Option<(&str, &'static str)> {
    let hidden = file_name.strip_prefix('.')?;
    [PARTIAL, REPLACED, DELETED].into_iter().find_map(|kind| {
        let (name, suffix) = hidden.rsplit_once(kind)?;
        let (process, counter) = suffix.split_once('-')?;
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        (!name.is_empty() && is_number(process) && is_number(counter)).then_some((name, kind))
    })
}

/// Exchanges what is under two names, at once.
fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Puts the directory `new` in the place of `dir`; what was there has the name of `new` afterwards, or is removed.
fn replace(new: &Path, dir: &Path, exchange: impl Fn(&Path, &Path) -> std::io::Result<()>) -> Result<()> {
    let parent = parent_of(dir)?;
    match exchange(new, dir) {
        Ok(()) => return sync(parent).inspect_err(|_| undo(exchange(new, dir), dir)),
        Err(error) if !is_unsupported(&error) => return Err(io_error(dir)(error)),
        Err(_) => {}
    }
    let replaced = free_sibling(dir, REPLACED)?;
    let step_aside = fs::rename(dir, &replaced).map_err(io_error(dir)).and_then(|()| sync(parent));
    let put = step_aside.and_then(|()| fs::rename(new, dir).map_err(io_error(dir)));
    if let Err(error) = put {
        // Onto the new one it cannot go: that is still under its own name.
        undo(fs::rename(&replaced, dir), dir);
        return Err(error);
    }
    if let Err(error) = sync(parent) {
        undo(fs::rename(dir, new).and_then(|()| fs::rename(&replaced, dir)), dir);
        return Err(error);
    }
    drop(RemovedOnDrop(replaced));
    Ok(())
}

/// Whether a file system has no exchange of names, rather than failing at it.
fn is_unsupported(error: &std::io::Error) -> bool {
    // EPERM: how some sandboxes answer calls that they do not know.
    matches!(Errno::from_io_error(error), Some(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM))
}

/// After a failure, brings back what was there before; that this may fail too is for the log.
fn undo(undone: std::io::Result<()>, dir: &Path) {
    if let Err(error) = undone {
        tracing::error!(dir = %dir.display(), "what was there before could not be brought back: {error}");
    }
}

/// Creates a directory and those above it, each durable in the one that holds it. Returns those that there were not.
fn create_durable_parents(dir: &Path) -> Result<EmptyRemovedOnDrop> {
    let missing = dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !d.exists()).map(Path::to_owned);
    let missing = EmptyRemovedOnDrop(missing.collect());
    fs::create_dir_all(dir).map_err(io_error(dir))?;
    for created in &missing.0 {
        let above = created.parent().filter(|p| !p.as_os_str().is_empty());
        sync(above.unwrap_or(Path::new(".")))?;
    }
    Ok(missing)
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
mod tests;
