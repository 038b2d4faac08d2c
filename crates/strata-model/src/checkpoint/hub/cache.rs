//! The cache that Python's `huggingface_hub` keeps, one repository of it:
//!
//! ```text
//! models--org--name/blobs/<etag>                 what files hold; <etag>.part while it arrives
//! models--org--name/snapshots/<commit>/<file>    links to blobs
//! models--org--name/refs/<revision>              the commit of a branch
//! models--org--name/.no_exist/<commit>/<file>    empty: the commit has no such file
//! .locks/models--org--name/<etag>.lock           held by who brings a blob, or a link to it
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::checkpoint::atomic::{sync, write_file_atomically};
use crate::checkpoint::hub::is_plain;
use crate::checkpoint::safetensors::check_whole;
use crate::{Error, Result};

/// Bytes that are read and written at once.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// One repository in the cache.
pub(super) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// What the hub says of a file.
pub(super) struct Remote {
    pub(super) name: String,
    /// The name of its blob: of large files their SHA-256.
    pub(super) etag: String,
    pub(super) bytes: u64,
}

impl Remote {
    /// The SHA-256 that the file must have, if the hub says it.
    fn sha256(&self) -> Option<&str> {
        let is_sha256 = self.etag.len() == 64 && self.etag.chars().all(|c| c.is_ascii_hexdigit());
        is_sha256.then_some(&*self.etag)
    }
}

impl RepositoryCache {
    pub(super) fn new(cache_dir: &Path, repository: &str) -> Result<Self> {
        // Where the process stands may change, and messages name files that are to be found.
        let cache_dir = std::path::absolute(cache_dir).map_err(io_error(cache_dir))?;
        let name = format!("models--{}", repository.replace('/', "--"));
        Ok(RepositoryCache { folder: cache_dir.join(&name), locks: cache_dir.join(".locks").join(name) })
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The commit of a revision, if there is a snapshot of it, whole or not.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        let commit = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?.trim().to_string();
        (is_plain(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Notes the commit of a revision.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        let _lock = self.lock(revision, revision)?;
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let refs = self.folder.join("refs");
        fs::create_dir_all(&refs).map_err(io_error(&refs))?;
        write_file_atomically(&refs.join(revision), commit.as_bytes())
    }

    /// Whether it is known that a commit has no such file.
    pub(super) fn is_known_absent(&self, commit: &str, name: &str) -> bool {
        self.folder.join(".no_exist").join(commit).join(name).is_file()
    }

    /// Notes that a commit has no such file. A cache that cannot be written to is asked again next time.
    pub(super) fn note_absent(&self, commit: &str, name: &str) {
        let dir = self.folder.join(".no_exist").join(commit);
        if let Err(error) = fs::create_dir_all(&dir).and_then(|()| File::create(dir.join(name))) {
            tracing::debug!(path = %dir.display(), "cannot note that there is no {name}: {error}");
        }
    }

    /// Holds the lock of a blob, or of what else has a name, until the file is dropped. Waits for whoever has it; `what` it is that they bring.
    pub(super) fn lock(&self, name: &str, what: &str) -> Result<File> {
        fs::create_dir_all(&self.locks).map_err(io_error(&self.locks))?;
        let path = self.locks.join(format!("{name}.lock"));
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o664);
            let file = options.open(&path).map_err(io_error(&path))?;
            let locked = match file.try_lock() {
                Ok(()) => Ok(()),
                Err(TryLockError::Error(error)) => Err(error),
                Err(TryLockError::WouldBlock) => {
                    tracing::info!(lock = %path.display(), "another process brings {what}: waiting until it lets go of the lock");
                    file.lock()
                }
            };
            if let Err(error) = locked {
                tracing::warn!(lock = %path.display(), "going on without a lock, which cannot be had: {error}");
                return Ok(file);
            }
            // The one before may have taken the file away, and the next would lock another.
            let own = file.metadata().map_err(io_error(&path))?;
            if fs::metadata(&path).is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())) {
                return Ok(file);
            }
        }
    }

    /// Whether the blob of a file is here, of the right size. One that is suspected to be damaged is sound if its hash says so; what is not sound stays until another takes its place. Under its lock.
    pub(super) fn has_blob(&self, remote: &Remote, is_suspect: bool) -> Result<bool> {
        let path = self.blob(remote);
        let Ok(metadata) = fs::metadata(&path) else { return Ok(false) };
        let is_sound = match remote.sha256() {
            _ if metadata.len() != remote.bytes => false,
            Some(expected) if is_suspect => hash_file(&path)?.eq_ignore_ascii_case(expected),
            _ => !is_suspect,
        };
        if is_sound {
            return Ok(true);
        }
        tracing::warn!(path = %path.display(), "{} is damaged in the cache, and is fetched again", remote.name);
        Ok(false)
    }

    /// Links a file of a snapshot to its blob. Under the blob's lock.
    pub(super) fn link(&self, commit: &str, remote: &Remote) -> Result<()> {
        let snapshot = self.snapshot(commit);
        fs::create_dir_all(&snapshot).map_err(io_error(&snapshot))?;
        let (link, target) = (snapshot.join(&remote.name), Path::new("../../blobs").join(&remote.etag));
        if fs::read_link(&link).is_ok_and(|present| present == target) {
            return Ok(());
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io_error(&link)(error)),
            _ => symlink(target, &link).map_err(io_error(&link)),
        }
    }

    fn blob(&self, remote: &Remote) -> PathBuf {
        self.folder.join("blobs").join(&remote.etag)
    }

    /// Begins to receive a blob, or goes on where another process was cut off. Under its lock.
    pub(super) fn receive<'r>(&self, remote: &'r Remote) -> Result<Part<'r>> {
        let blob = self.blob(remote);
        let path = blob.with_extension("part");
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(io_error(&blobs))?;
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(io_error(&path))?;
        let present = file.metadata().map_err(io_error(&path))?.len();
        let mut part = Part { remote, blob, path, file, bytes: 0, hash: Sha256::new() };
        // After a loss of power bytes may be there that never were written: what no hash tells at the end begins anew.
        if remote.sha256().is_some() && present <= remote.bytes {
            part.read_present()?;
        } else {
            part.begin_anew()?;
        }
        Ok(part)
    }
}

/// A blob on its way into the cache.
pub(super) struct Part<'r> {
    remote: &'r Remote,
    blob: PathBuf,
    path: PathBuf,
    file: File,
    /// How many there are.
    pub(super) bytes: u64,
    hash: Sha256,
}

/// What became of a blob that arrived.
pub(super) enum Arrival {
    /// It is in the cache.
    Kept,
    /// It is gone: its SHA-256 is this one, and should be another.
    Damaged(String),
}

impl Part<'_> {
    fn read_present(&mut self) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = self.file.read(&mut chunk).map_err(io_error(&self.path))?;
            if read == 0 {
                return Ok(());
            }
            self.hash.update(&chunk[..read]);
            self.bytes += read as u64;
        }
    }

    /// Forgets all that is there.
    pub(super) fn begin_anew(&mut self) -> Result<()> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(io_error(&self.path))?;
        (self.bytes, self.hash) = (0, Sha256::new());
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(io_error(&self.path))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Gives the blob its name, durably, if it is what the hub says; or removes it.
    pub(super) fn finish(self) -> Result<Arrival> {
        let found = format!("{:x}", self.hash.finalize());
        if self.remote.sha256().is_some_and(|expected| !expected.eq_ignore_ascii_case(&found)) {
            fs::remove_file(&self.path).map_err(io_error(&self.path))?;
            return Ok(Arrival::Damaged(found));
        }
        self.file.sync_all().map_err(io_error(&self.path))?;
        fs::rename(&self.path, &self.blob).map_err(io_error(&self.blob))?;
        sync(self.blob.parent().unwrap_or(Path::new("/")))?;
        Ok(Arrival::Kept)
    }
}

/// What is wrong with a file of a snapshot, as far as that can be seen without the hub: `None` if nothing is.
pub(super) fn fault(path: &Path) -> Option<String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some(bytes) = fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len()) else { return Some(name) };
    let wrong = match path.extension().and_then(|extension| extension.to_str()) {
        Some("json" | "safetensors") if bytes == 0 => Some("is empty".to_string()),
        Some("safetensors") => check_whole(path).err().map(|error| error.to_string()),
        Some("json") => {
            let text = fs::read(path).map_err(|error| error.to_string());
            // Cut short, or never written. What else is no JSON for us (Python's has NaN) is for whoever reads it.
            let broken = |text: Vec<u8>| match serde_json::from_slice::<serde::de::IgnoredAny>(&text) {
                Err(error) if error.is_eof() || text.first() == Some(&0) => Err(error.to_string()),
                _ => Ok(()),
            };
            text.and_then(broken).err()
        }
        _ => None,
    }?;
    let there = path.canonicalize().unwrap_or_else(|_| path.into());
    Some(format!("{name} (damaged; delete {}: {wrong})", there.display()))
}

fn hash_file(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).map_err(io_error(path))?;
    std::io::copy(&mut file, &mut hash).map_err(io_error(path))?;
    Ok(format!("{:x}", hash.finalize()))
}

fn io_error(path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path: path.clone(), source }
}
