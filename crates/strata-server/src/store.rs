//! The catalogue of checkpoints: directories under `{data_dir}/checkpoints/{run}/{kind}/{name}`, each with a `strata.json` that says what it is.
//!
//! The engine writes a checkpoint whole, `strata.json` included, under its name. This catalogue is read from those files at start and kept in
//! memory; nothing is stored twice. Deleting first moves a directory out of the way, so that a checkpoint is there or not, never in part.
//!
//! A name may be saved again. The engine replaces the directory first and is answered later, so for a moment the catalogue is behind the disk.
//! Every save has an identity, which tells the two apart: an edit goes to what is on the disk, a load gets the save it was asked for, and a
//! checkpoint that was deleted before its save was answered stays deleted. Names are held while the catalogue looks at one and acts on it.
//!
//! Checkpoints of runs named [`IMPORTED`] are written by other processes, and catalogued when someone asks for them.
//!
//! Nothing in the directory is believed to be what its name says: links and special files are passed over, and never opened or followed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use strata_engine::api::{CheckpointSource, LoraSpec, METADATA_BYTES_MAX, METADATA_FILE};
use strata_model::Error;
use strata_model::checkpoint::{
    Existing, hold_names, read_own_file, recover_directories, set_aside, write_atomically, write_file_atomically,
};
use time::OffsetDateTime;

use crate::data_dir::DataDir;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, check_name, shown};
use crate::scratch::{self, Scratch};

/// What this build writes; a record of a later format is left alone.
const RECORD_FORMAT: u32 = 1;
/// Deleted directories that could not be removed and are tried again; beyond it they wait for the next start.
const TRASH_MAX: usize = 4096;

/// What the names of runs begin with whose checkpoints come from elsewhere, and may do so while a server runs.
pub const IMPORTED: &str = "import-";

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    format: u32,
    /// Tells this save from any other, also of the same name. Records of earlier builds have none.
    #[serde(default)]
    pub save_id: String,
    /// The model that was saved.
    pub run: String,
    /// What was saved of it.
    pub kind: CheckpointKind,
    /// The name the user gave.
    pub name: String,
    /// When it was saved.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// When it may be deleted.
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub expires_at: Option<OffsetDateTime>,
    /// Whether its owner published it.
    #[serde(default)]
    pub public: bool,
    /// The base model it belongs to.
    pub base_model: String,
    /// Its adapter.
    pub lora: LoraSpec,
    /// What the user attached to it.
    #[serde(default)]
    pub user_metadata: Option<BTreeMap<String, String>>,
    /// What the user attached to the model that was saved.
    #[serde(default)]
    pub run_metadata: Option<BTreeMap<String, String>>,
    /// Bytes of its files.
    #[serde(skip)]
    pub size_bytes: u64,
}

impl CheckpointRecord {
    /// A record of a checkpoint that is saved now.
    pub fn new(id: CheckpointId, base_model: String, lora: LoraSpec) -> Self {
        CheckpointRecord {
            format: RECORD_FORMAT,
            save_id: uuid::Uuid::new_v4().to_string(),
            run: id.run,
            kind: id.kind,
            name: id.name,
            created_at: OffsetDateTime::now_utc(),
            expires_at: None,
            public: false,
            base_model,
            lora,
            user_metadata: None,
            run_metadata: None,
            size_bytes: 0,
        }
    }

    /// What names it.
    pub fn id(&self) -> CheckpointId {
        CheckpointId { run: self.run.clone(), kind: self.kind, name: self.name.clone() }
    }

    /// Bytes that it takes in the catalogue, about.
    fn catalogued_bytes(&self) -> usize {
        // The record, its id, and their places in a map; each entry of the metadata likewise.
        const RECORD: usize = 512;
        const ENTRY: usize = 64;
        let metadata = self.user_metadata.iter().chain(&self.run_metadata).flatten();
        let metadata: usize = metadata.map(|(key, value)| ENTRY + key.len() + value.len()).sum();
        RECORD + 2 * (self.run.len() + self.name.len()) + self.base_model.len() + metadata
    }
}

/// The checkpoints of a data directory.
pub struct Store {
    checkpoints_dir: PathBuf,
    catalogue: Mutex<Catalogue>,
    /// Deleted directories that could not be removed.
    trash: Mutex<Vec<PathBuf>>,
    /// Held for as long as this may change anything in it.
    data_dir: DataDir,
}

#[derive(Default)]
struct Catalogue {
    records: BTreeMap<CheckpointId, CheckpointRecord>,
    bytes: usize,
    /// Saves that were deleted before they were answered.
    deleted_early: BTreeSet<String>,
}

impl Catalogue {
    fn put(&mut self, record: CheckpointRecord) {
        self.bytes += record.catalogued_bytes();
        if let Some(replaced) = self.records.insert(record.id(), record) {
            self.bytes -= replaced.catalogued_bytes();
        }
    }

    fn remove(&mut self, id: &CheckpointId) {
        if let Some(removed) = self.records.remove(id) {
            self.bytes -= removed.catalogued_bytes();
        }
    }

    fn is_full(&self) -> bool {
        self.bytes >= limits::CATALOGUE_BYTES_MAX
    }
}

impl Store {
    /// Reads the checkpoints of a data directory, after clearing what a crash left.
    ///
    /// # Errors
    /// If the directory cannot be made or read. Checkpoints that cannot be understood are logged and left alone.
    pub fn open(data_dir: DataDir) -> std::io::Result<Self> {
        let checkpoints_dir = data_dir.path().join("checkpoints");
        scratch::clear(data_dir.path());
        fs::create_dir_all(&checkpoints_dir)?;
        let mut catalogue = Catalogue::default();
        let mut passed_over = 0_u64;
        for run_dir in subdirectories(&checkpoints_dir)? {
            for kind in CheckpointKind::ALL {
                let kind_dir = run_dir.join(kind.segment());
                if !is_directory(&kind_dir) {
                    continue;
                }
                let found = recover_directories(&kind_dir).map_err(|error| error.to_string());
                let found = found.and_then(|()| subdirectories(&kind_dir).map_err(|error| error.to_string()));
                let found = found.inspect_err(|reason| tracing::warn!(dir = %kind_dir.display(), "cannot be read: {reason}"));
                for dir in found.into_iter().flatten() {
                    match read_record(&dir, kind) {
                        Ok(Some(_)) if catalogue.is_full() => passed_over += 1,
                        Ok(Some(record)) => catalogue.put(record),
                        Ok(None) => {}
                        Err(reason) => tracing::warn!(dir = %dir.display(), "not a checkpoint: {reason}"),
                    }
                }
            }
        }
        if passed_over > 0 {
            tracing::error!(
                "{passed_over} checkpoints are beyond what is catalogued, and are passed over until others are deleted"
            );
        }
        Ok(Store { checkpoints_dir, catalogue: Mutex::new(catalogue), trash: Mutex::default(), data_dir })
    }

    /// Where a checkpoint is, or would be.
    pub fn dir(&self, id: &CheckpointId) -> PathBuf {
        id.dir_in(&self.checkpoints_dir)
    }

    /// What the engine needs to load exactly this save.
    pub fn source(&self, record: &CheckpointRecord) -> CheckpointSource {
        let id = record.id();
        let save_id = Some(record.save_id.clone()).filter(|id| !id.is_empty());
        CheckpointSource { dir: self.dir(&id), name: id.tinker_path(), save_id }
    }

    /// Refuses another checkpoint if the catalogue has no room for it.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check_room(&self) -> Result<(), String> {
        let catalogue = self.lock();
        if catalogue.is_full() {
            return Err(format!(
                "this server has {} checkpoints, as many as it can keep track of; delete some first",
                catalogue.records.len()
            ));
        }
        Ok(())
    }

    /// Adds a checkpoint that the engine has written, or replaces one of the same name.
    pub fn insert(&self, record: CheckpointRecord) {
        let mut catalogue = self.lock();
        if catalogue.deleted_early.remove(&record.save_id) {
            return;
        }
        match catalogue.records.get_mut(&record.id()) {
            // Edited before the save was answered.
            Some(known) if known.save_id == record.save_id => known.size_bytes = record.size_bytes,
            _ => catalogue.put(record),
        }
    }

    /// A checkpoint by its id.
    ///
    /// # Errors
    /// If there is none, or its time is over.
    pub fn get(&self, id: &CheckpointId) -> ApiResult<CheckpointRecord> {
        let found = self.known(id).filter(|record| !is_expired(record, OffsetDateTime::now_utc()));
        found.ok_or_else(|| not_found(id))
    }

    /// A checkpoint of the catalogue, or one that was imported since that was read.
    fn known(&self, id: &CheckpointId) -> Option<CheckpointRecord> {
        let known = self.lock().records.get(id).cloned();
        known.or_else(|| {
            let dir = self.dir(id);
            let is_there = id.run.starts_with(IMPORTED) && dir.ancestors().take(3).all(is_directory);
            let record = is_there.then(|| read_record(&dir, id.kind).ok().flatten()).flatten()?;
            let mut catalogue = self.lock();
            // A full catalogue takes no more, and a delete may have come first.
            if !catalogue.is_full() && is_directory(&dir) {
                catalogue.put(record.clone());
            }
            Some(record)
        })
    }

    /// Catalogues what was imported since: of one run, or of all.
    fn find_imported(&self, run: Option<&str>) {
        let runs: Vec<String> = match run {
            Some(run) => vec![run.into()],
            None => {
                let entries = fs::read_dir(&self.checkpoints_dir).into_iter().flatten().map_while(Result::ok);
                entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
            }
        };
        for run in runs.iter().filter(|run| run.starts_with(IMPORTED)) {
            let kind = CheckpointKind::Weights;
            let dir = self.checkpoints_dir.join(run).join(kind.segment());
            let names = subdirectories(&dir).into_iter().flatten();
            for name in names.filter_map(|dir| dir.file_name()?.to_str().map(str::to_owned)) {
                if let Ok(id) = CheckpointId::new(run, kind.segment(), &name) {
                    self.known(&id);
                }
            }
        }
    }

    /// Checkpoints, newest first: all of them, or those of one run.
    pub fn list(&self, run: Option<&str>) -> Vec<CheckpointRecord> {
        self.find_imported(run);
        let now = OffsetDateTime::now_utc();
        let catalogue = self.lock();
        let is_wanted = |record: &&CheckpointRecord| run.is_none_or(|run| record.run == run) && !is_expired(record, now);
        let mut found: Vec<CheckpointRecord> = catalogue.records.values().filter(is_wanted).cloned().collect();
        drop(catalogue);
        found.sort_by_key(|record| std::cmp::Reverse(record.created_at));
        found
    }

    /// A checkpoint and the names of its files that clients may have, in order. Blocks.
    ///
    /// # Errors
    /// If there is none, or its directory cannot be read.
    pub fn files(&self, id: &CheckpointId) -> ApiResult<(CheckpointRecord, Vec<String>)> {
        let _names = hold_names();
        let record = self.get(id)?;
        let unread = |error: std::io::Error| {
            let path = self.dir(id);
            failed(format!("the files of {} cannot be listed", id.tinker_path()), &Error::Io { path, source: error })
        };
        let mut files = Vec::new();
        for entry in fs::read_dir(self.dir(id)).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            let name = entry.file_name().into_string().unwrap_or_default();
            if is_for_clients(&name) && entry.file_type().map_err(unread)?.is_file() {
                files.push(name);
            }
        }
        files.sort();
        Ok((record, files))
    }

    /// Opens a file of exactly this save for reading, with its length. Blocks.
    ///
    /// # Errors
    /// If it has no such file, or another save has taken its place.
    pub fn open_file(&self, record: &CheckpointRecord, name: &str) -> ApiResult<(fs::File, u64)> {
        let id = record.id();
        let missing = || ApiError::NotFound(format!("{} has no file {:?}", id.tinker_path(), shown(name)));
        if !is_for_clients(name) {
            return Err(missing());
        }
        let _names = hold_names();
        let on_disk = read_record(&self.dir(&id), id.kind).ok().flatten();
        if on_disk.is_none_or(|on_disk| on_disk.save_id != record.save_id) {
            return Err(not_found(&id));
        }
        // Neither through a link nor waiting for the other end of a pipe.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = fs::OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(self.dir(&id).join(name));
        let file = opened.map_err(|_| missing())?;
        let metadata = file.metadata().map_err(|_| missing())?;
        if metadata.is_file() { Ok((file, metadata.len())) } else { Err(missing()) }
    }

    /// A directory for files that are not a checkpoint yet, or no longer. Blocks.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn scratch(&self) -> ApiResult<Scratch> {
        let failed_io =
            |source| failed("no directory for it could be made".into(), &Error::Io { path: "scratch".into(), source });
        Scratch::new(self.data_dir.path()).map_err(failed_io)
    }

    /// Whether what is on the disk under the name of a save is still that save.
    pub fn is_on_disk(&self, record: &CheckpointRecord) -> bool {
        let id = record.id();
        matches!(read_record(&self.dir(&id), id.kind), Ok(Some(found)) if found.save_id == record.save_id)
    }

    /// Makes a copy of a checkpoint under another run's name, as a checkpoint of its own. Files are shared where the file system lets them be; none
    /// is ever changed. Blocks.
    ///
    /// # Errors
    /// If the source is gone, the name is taken, there is no room in the catalogue, or the file system refuses.
    pub fn copy(
        &self,
        source: &CheckpointRecord,
        run: &str,
        expires_at: Option<OffsetDateTime>,
    ) -> ApiResult<CheckpointRecord> {
        self.check_room().map_err(ApiError::BadRequest)?;
        let from = source.id();
        let mut copy = CheckpointRecord::new(
            CheckpointId { run: run.to_owned(), ..from.clone() },
            source.base_model.clone(),
            source.lora.clone(),
        );
        copy.expires_at = expires_at;
        (copy.user_metadata, copy.run_metadata) = (source.user_metadata.clone(), source.run_metadata.clone());
        let (source_dir, dir) = (self.dir(&from), self.dir(&copy.id()));
        if dir.symlink_metadata().is_ok() {
            return Err(ApiError::bad(format!("checkpoint {} exists already", copy.id().tinker_path())));
        }
        let io_error = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { path, source }
        };
        let is_same = || matches!(read_record(&source_dir, from.kind), Ok(Some(found)) if found.save_id == source.save_id);
        let written = write_atomically(&dir, Existing::Refuse, |partial| {
            let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
            for entry in fs::read_dir(&source_dir).map_err(io_error(&source_dir))? {
                let entry = entry.map_err(io_error(&source_dir))?;
                let name = entry.file_name();
                if !is_file(&entry) || !is_for_clients(&name.to_string_lossy()) {
                    continue;
                }
                let (from, to) = (entry.path(), partial.join(&name));
                fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop)).map_err(io_error(&to))?;
            }
            // Another save may have taken the name meanwhile, and its files are not to be mixed in.
            if !is_same() {
                return Err(Error::Io { path: source_dir.clone(), source: ErrorKind::NotFound.into() });
            }
            write_record(partial, &copy)
        });
        match written {
            Ok(size_bytes) => copy.size_bytes = size_bytes,
            Err(_) if !is_same() => return Err(not_found(&from)),
            Err(error) => return Err(failed(format!("{} was not copied", from.tinker_path()), &error)),
        }
        self.insert(copy.clone());
        Ok(copy)
    }

    /// Deletes a checkpoint and its files. Blocks.
    ///
    /// # Errors
    /// If there is none, or its files cannot be moved out of the way: then it is still there, and listed.
    pub fn delete(&self, id: &CheckpointId) -> ApiResult<()> {
        self.delete_if(id, |_| true)
    }

    /// Deletes a checkpoint if what is on the disk under its name has an identity that is wanted.
    fn delete_if(&self, id: &CheckpointId, is_wanted: impl FnOnce(&str) -> bool) -> ApiResult<()> {
        let names = hold_names();
        let known = self.known(id).ok_or_else(|| not_found(id))?;
        let dir = self.dir(id);
        // A record that cannot be read belongs to no save that is to be answered.
        let on_disk = read_record(&dir, id.kind).ok().flatten().map_or_else(|| known.save_id.clone(), |record| record.save_id);
        if !is_wanted(&on_disk) {
            return Ok(());
        }
        let aside = match set_aside(&dir, &names) {
            Ok(aside) => Some(aside),
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                return Err(failed(format!("{} was not deleted, and is still there", id.tinker_path()), &error));
            }
        };
        let mut catalogue = self.lock();
        catalogue.remove(id);
        if on_disk != known.save_id {
            catalogue.deleted_early.insert(on_disk);
        }
        drop((catalogue, names));
        aside.into_iter().for_each(|aside| self.remove_trash(aside));
        Ok(())
    }

    /// Publishes a checkpoint, or takes that back. Blocks.
    ///
    /// # Errors
    /// If there is none, or its record cannot be written.
    pub fn set_public(&self, id: &CheckpointId, public: bool) -> ApiResult<()> {
        self.edit(id, |record| record.public = public)
    }

    /// Sets when a checkpoint may be deleted; `None`: never. Blocks.
    ///
    /// # Errors
    /// If there is none, or its record cannot be written.
    pub fn set_expiry(&self, id: &CheckpointId, expires_at: Option<OffsetDateTime>) -> ApiResult<()> {
        self.edit(id, |record| record.expires_at = expires_at)
    }

    /// Deletes checkpoints whose time is over, and what is left of deleted ones. Blocks.
    pub fn reap(&self, now: OffsetDateTime) {
        let trash = std::mem::take(&mut *self.trash.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        trash.into_iter().for_each(|aside| self.remove_trash(aside));
        let expired: Vec<(CheckpointId, String)> = {
            let catalogue = self.lock();
            let expired = catalogue.records.values().filter(|record| is_expired(record, now));
            expired.map(|record| (record.id(), record.save_id.clone())).collect()
        };
        for (id, save_id) in expired {
            // A later save of the name has a life of its own.
            match self.delete_if(&id, |on_disk| on_disk == save_id) {
                Ok(()) => tracing::info!(path = id.tinker_path(), "deleted a checkpoint whose time is over"),
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }

    fn remove_trash(&self, aside: PathBuf) {
        match fs::remove_dir_all(&aside) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(dir = %aside.display(), "what was deleted cannot be removed yet: {error}");
                let mut trash = self.trash.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if trash.len() < TRASH_MAX {
                    trash.push(aside);
                }
            }
            _ => {}
        }
    }

    /// Changes the record of what is on the disk now, which may be a later save than the catalogue knows.
    fn edit(&self, id: &CheckpointId, change: impl FnOnce(&mut CheckpointRecord)) -> ApiResult<()> {
        let _names = hold_names();
        self.get(id)?;
        let dir = self.dir(id);
        let mut record = match read_record(&dir, id.kind) {
            Ok(Some(record)) => record,
            Ok(None) => return Err(ApiError::Internal(format!("the files of {} are gone", id.tinker_path()))),
            Err(reason) => return Err(ApiError::Internal(format!("the record of {}: {reason}", id.tinker_path()))),
        };
        change(&mut record);
        write_record(&dir, &record)
            .map_err(|error| failed(format!("the record of {} was not changed", id.tinker_path()), &error))?;
        self.lock().put(record);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Whether a file of a checkpoint's directory is one of the checkpoint, rather than what the server keeps about it.
fn is_for_clients(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']) && name != METADATA_FILE
}

fn not_found(id: &CheckpointId) -> ApiError {
    ApiError::NotFound(format!("there is no checkpoint {}", id.tinker_path()))
}

/// A failure of the file system: a client gets the reason, the log also the path.
fn failed(what: String, error: &Error) -> ApiError {
    tracing::error!("{what}: {error}");
    match error {
        Error::Io { source, .. } => ApiError::Internal(format!("{what}: {source}")),
        _ => ApiError::Internal(what),
    }
}

fn is_expired(record: &CheckpointRecord, now: OffsetDateTime) -> bool {
    record.expires_at.is_some_and(|at| at <= now)
}

/// Whether there is a directory at a path, rather than a link to one.
fn is_directory(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_symlink() => {
            tracing::warn!(path = %path.display(), "is a symbolic link, and is not followed");
            false
        }
        Ok(metadata) => metadata.is_dir(),
        Err(_) => false,
    }
}

/// The directories in a directory, one after another; links are passed over.
fn subdirectories(dir: &Path) -> std::io::Result<impl Iterator<Item = PathBuf>> {
    Ok(fs::read_dir(dir)?.map_while(Result::ok).map(|entry| entry.path()).filter(|path| is_directory(path)))
}

/// Reads the record of a directory; `None` if it is not a finished checkpoint. The path decides over what the file says, so that a copied
/// directory goes by its new name.
fn read_record(dir: &Path, kind: CheckpointKind) -> Result<Option<CheckpointRecord>, String> {
    let segment = |path: Option<&Path>| path.and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned);
    let Some(name) = segment(Some(dir)).filter(|name| !name.starts_with('.')) else { return Ok(None) };
    let run = segment(dir.parent().and_then(Path::parent)).ok_or("its run has no readable name")?;
    check_name("checkpoint name", &name).and(check_name("run", &run)).map_err(|error| error.to_string())?;
    let bytes = match read_own_file(&dir.join(METADATA_FILE), METADATA_BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{METADATA_FILE}: {error}")),
    };
    let mut record: CheckpointRecord = serde_json::from_slice(&bytes).map_err(|error| format!("{METADATA_FILE}: {error}"))?;
    if record.format != RECORD_FORMAT {
        return Err(format!("{METADATA_FILE} has format {}, this build knows {RECORD_FORMAT}", record.format));
    }
    (record.run, record.kind, record.name) = (run, kind, name);
    record.size_bytes = files_size_bytes(dir).map_err(|error| error.to_string())?;
    Ok(Some(record))
}

fn files_size_bytes(dir: &Path) -> std::io::Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(dir)? {
        let metadata = entry?.metadata()?;
        if metadata.is_file() {
            total += metadata.len();
        }
    }
    Ok(total)
}

fn write_record(dir: &Path, record: &CheckpointRecord) -> strata_model::Result<()> {
    let path = dir.join(METADATA_FILE);
    let bytes = serde_json::to_vec_pretty(record).map_err(|error| Error::Io { path: path.clone(), source: error.into() })?;
    write_file_atomically(&path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> CheckpointRecord {
        let id = CheckpointId::new("s:train:0", "weights", name).unwrap();
        let lora =
            LoraSpec { rank: 4, seed: 1, train_attn: true, train_mlp: true, train_unembed: false, ranks: Default::default() };
        CheckpointRecord::new(id, "base".into(), lora)
    }

    fn open(data_dir: &Path) -> Store {
        Store::open(DataDir::claim(data_dir).unwrap()).unwrap()
    }

    /// What the engine leaves behind for a save that is not answered yet.
    fn write_files(store: &Store, record: &CheckpointRecord) {
        write_atomically(&store.dir(&record.id()), Existing::Replace, |dir| {
            fs::write(dir.join("adapter_model.safetensors"), [0u8; 10]).unwrap();
            write_record(dir, record)
        })
        .unwrap();
    }

    fn write(store: &Store, record: &CheckpointRecord) {
        write_files(store, record);
        store.insert(record.clone());
    }

    fn read(store: &Store, id: &CheckpointId) -> CheckpointRecord {
        read_record(&store.dir(id), id.kind).unwrap().unwrap()
    }

    #[test]
    fn a_catalogue_is_rebuilt_from_its_files() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        write(&store, &record("a"));
        store.set_public(&record("a").id(), true).unwrap();
        fs::create_dir_all(store.dir(&record("half").id())).unwrap();
        let broken = store.dir(&record("broken").id());
        fs::create_dir_all(&broken).unwrap();
        fs::write(broken.join(METADATA_FILE), "{").unwrap();

        drop(store);
        let found = open(data_dir.path()).list(None);
        assert_eq!(found.len(), 1);
        assert!(found[0].public && found[0].size_bytes > 10);
        assert_eq!(found[0].lora, record("a").lora);
    }

    #[test]
    fn what_is_imported_while_a_server_runs_is_found_listed_and_deleted() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let write = |dir: &Path| {
            fs::write(dir.join("adapter_model.safetensors"), [0u8; 10]).unwrap();
            Ok(())
        };
        let import = |name: &str| crate::import(data_dir.path(), name, "base", record("a").lora, write);
        let (one, other) = (import("one").unwrap(), import("other").unwrap());
        let id = |path: &str| CheckpointId::parse(path).unwrap();
        let found = store.get(&id(&one.path)).unwrap();
        assert_eq!((found.lora.clone(), found.size_bytes), (record("a").lora, one.size_bytes));
        assert_eq!(store.list(None).len(), 2, "one that nobody has asked for is listed too");
        assert_eq!(store.list(Some(&id(&other.path).run)).len(), 1);
        let third = import("third").unwrap();
        for path in [&one.path, &third.path] {
            store.delete(&id(path)).unwrap();
            assert!(store.get(&id(path)).is_err() && !store.dir(&id(path)).exists());
        }
        assert_eq!(store.list(None).len(), 1);
        drop(store);
        assert_eq!(open(data_dir.path()).get(&id(&other.path)).unwrap().base_model, "base");
        assert!(import("..").is_err() && import("a/b").is_err());
        // Only what has the name of an import is looked for.
        let store = open(data_dir.path());
        let mut stray = record("stray");
        stray.run = "s:train:9".into();
        write_files(&store, &stray);
        assert!(store.get(&stray.id()).is_err());
    }

    #[test]
    fn a_deleted_checkpoint_is_gone_from_disk_and_a_second_delete_is_not_found() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let id = record("a").id();
        write(&store, &record("a"));
        store.delete(&id).unwrap();
        assert!(!store.dir(&id).exists());
        assert!(matches!(store.delete(&id), Err(ApiError::NotFound(_))));
        assert!(matches!(store.set_public(&id, true), Err(ApiError::NotFound(_))));
    }

    #[test]
    fn a_checkpoint_whose_time_is_over_is_not_listed_and_is_deleted() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let id = record("a").id();
        write(&store, &record("a"));
        let now = OffsetDateTime::now_utc();
        store.set_expiry(&id, Some(now - time::Duration::SECOND)).unwrap();
        assert!(store.list(None).is_empty());
        store.reap(now);
        assert!(!store.dir(&id).exists());
    }

    #[test]
    fn an_edit_goes_to_the_save_that_is_on_the_disk() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let (old, mut new) = (record("a"), record("a"));
        let id = old.id();
        write(&store, &old);
        // The save is on the disk and its answer on the way when the edit comes.
        new.user_metadata = Some(BTreeMap::from([("of".into(), "the new one".into())]));
        write_files(&store, &new);
        store.set_public(&id, true).unwrap();
        store.insert(new.clone());
        for found in [read(&store, &id), store.get(&id).unwrap()] {
            assert!(found.public, "the edit was answered");
            assert_eq!((found.save_id, found.user_metadata), (new.save_id.clone(), new.user_metadata.clone()));
        }
    }

    #[test]
    fn edits_and_saves_of_one_name_never_mix() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let id = record("a").id();
        write(&store, &record("a"));
        std::thread::scope(|scope| {
            let saving = scope.spawn(|| {
                for round in 0..200 {
                    let mut saved = record("a");
                    saved.base_model = format!("{round} {}", saved.save_id);
                    write(&store, &saved);
                }
            });
            let mut public = false;
            while !saving.is_finished() {
                public = !public;
                store.set_public(&id, public).unwrap();
            }
        });
        let (on_disk, listed) = (read(&store, &id), store.get(&id).unwrap());
        assert_eq!((&on_disk.save_id, on_disk.public), (&listed.save_id, listed.public));
        assert_eq!(listed.base_model, format!("199 {}", listed.save_id));
    }

    #[test]
    fn what_is_deleted_before_its_save_is_answered_stays_deleted() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let (old, new, newest) = (record("a"), record("a"), record("a"));
        write(&store, &old);
        write_files(&store, &new);
        store.delete(&old.id()).unwrap();
        store.insert(new);
        assert!(store.list(None).is_empty() && !store.dir(&old.id()).exists());
        write(&store, &newest);
        assert_eq!(store.list(None).len(), 1);
    }

    #[test]
    fn the_end_of_one_save_does_not_delete_the_next() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let (mut old, new) = (record("a"), record("a"));
        let now = OffsetDateTime::now_utc();
        old.expires_at = Some(now - time::Duration::SECOND);
        write(&store, &old);
        write_files(&store, &new);
        store.reap(now);
        store.insert(new.clone());
        assert_eq!(read(&store, &new.id()).save_id, new.save_id);
        assert_eq!(store.list(None).len(), 1);
    }

    #[test]
    fn a_delete_that_fails_leaves_the_listing_true() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let id = record("a").id();
        write(&store, &record("a"));
        // Permissions would not stop an administrator; a file in the place of a directory stops everyone.
        let (kind_dir, elsewhere) = (store.dir(&id).parent().unwrap().to_owned(), data_dir.path().join("elsewhere"));
        fs::rename(&kind_dir, &elsewhere).unwrap();
        fs::write(&kind_dir, "").unwrap();
        let Err(ApiError::Internal(message)) = store.delete(&id) else { panic!("it cannot be moved") };
        assert!(message.contains("still there") && !message.contains(&*data_dir.path().to_string_lossy()), "{message}");
        assert_eq!(store.list(None).len(), 1);
        fs::remove_file(&kind_dir).unwrap();
        fs::rename(&elsewhere, &kind_dir).unwrap();
        store.delete(&id).unwrap();
        assert!(store.list(None).is_empty());
    }

    #[test]
    fn what_cannot_be_removed_is_tried_again() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let aside = data_dir.path().join(".a.deleted-1-1");
        fs::write(&aside, "no directory, and so not removed as one").unwrap();
        store.remove_trash(aside.clone());
        fs::remove_file(&aside).unwrap();
        fs::create_dir(&aside).unwrap();
        store.reap(OffsetDateTime::now_utc());
        assert!(!aside.exists());
    }

    #[test]
    fn links_special_files_and_long_records_are_passed_over() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        write(&store, &record("a"));
        let (run_dir, a) = (data_dir.path().join("checkpoints/s:train:0"), store.dir(&record("a").id()));
        let beside = |name: &str| a.with_file_name(name);
        std::os::unix::fs::symlink(&a, beside("link")).unwrap();
        std::os::unix::fs::symlink(&run_dir, data_dir.path().join("checkpoints/linked-run")).unwrap();
        std::os::unix::fs::symlink(run_dir.join("weights"), run_dir.join("sampler_weights")).unwrap();
        for name in ["pipe", "linked-record", "long", "directory"] {
            fs::create_dir(beside(name)).unwrap();
        }
        let pipe = beside("pipe").join(METADATA_FILE);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        std::os::unix::fs::symlink(a.join(METADATA_FILE), beside("linked-record").join(METADATA_FILE)).unwrap();
        let padded = format!("{}{}", fs::read_to_string(a.join(METADATA_FILE)).unwrap(), " ".repeat(1 << 20));
        fs::write(beside("long").join(METADATA_FILE), padded).unwrap();
        fs::create_dir(beside("directory").join(METADATA_FILE)).unwrap();
        drop(store);
        let listed = open(data_dir.path()).list(None);
        assert_eq!(listed.iter().map(|record| record.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_record_of_an_earlier_build_has_no_identity_and_is_still_edited_and_loaded() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = open(data_dir.path());
        let id = record("a").id();
        write(&store, &record("a"));
        let path = store.dir(&id).join(METADATA_FILE);
        let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json.as_object_mut().unwrap().remove("save_id");
        fs::write(&path, json.to_string()).unwrap();
        drop(store);
        let store = open(data_dir.path());
        store.set_public(&id, true).unwrap();
        let record = store.get(&id).unwrap();
        assert!(record.public);
        assert_eq!(store.source(&record).save_id, None);
    }

    #[test]
    fn the_catalogue_is_bounded_in_memory() {
        let mut catalogue = Catalogue::default();
        let mut fat = record("a");
        fat.user_metadata = Some(BTreeMap::from([("k".into(), "v".repeat(limits::CATALOGUE_BYTES_MAX))]));
        catalogue.put(fat);
        assert!(catalogue.is_full());
        catalogue.put(record("a"));
        assert!(!catalogue.is_full(), "what is replaced takes no room");
        catalogue.remove(&record("a").id());
        assert_eq!(catalogue.bytes, 0);
    }
}
