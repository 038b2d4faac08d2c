//! The catalogue of checkpoints: directories under `{data_dir}/checkpoints/{run}/{kind}/{name}`, each with a `strata.json` that says what it is.
//!
//! The engine writes a checkpoint whole, `strata.json` included, under its name. This catalogue is read from those files at start and kept in
//! memory; nothing is stored twice. Deleting first moves a directory out of the way, so that a checkpoint is there or not, never in part.
//!
//! A name may be saved again. The engine replaces the directory first and is answered later, so for a moment the catalogue is behind the disk.
//! Every save has an identity, which tells the two apart: an edit goes to what is on the disk, a load gets the save it was asked for, and a
//! checkpoint that was deleted before its save was answered stays deleted. Names are held while the catalogue looks at one and acts on it.
//!
//! Whoever finds that a checkpoint was removed by hand takes it out of the catalogue, as the next start would.
//!
//! Checkpoints of runs named [`IMPORTED`] are written by other processes, and catalogued when someone asks for them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::OFlags;
use strata_engine::api::{CheckpointSource, METADATA_FILE};
use strata_model::Error;
use strata_model::checkpoint::{
    Existing, NamesHeld, hold_names, recover_directories, refuse_links_below, remove_empty_directories, set_aside,
    write_atomically,
};
use time::OffsetDateTime;

use crate::data_dir::DataDir;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, shown};
use crate::scratch::{self, Scratch};
pub use record::CheckpointRecord;
use record::{Unread, is_directory, read_record, subdirectories, write_record};

mod record;
#[cfg(test)]
mod tests;

/// Deleted directories that could not be removed and are tried again; beyond it they wait for the next start.
const TRASH_MAX: usize = 4096;

/// What the names of runs begin with whose checkpoints come from elsewhere, and may do so while a server runs.
pub const IMPORTED: &str = "import-";

/// The checkpoints of a data directory.
pub struct Store {
    checkpoints_dir: PathBuf,
    catalogue: Mutex<Catalogue>,
    /// Deleted directories that could not be removed.
    trash: Mutex<Vec<PathBuf>>,
    /// Saves whose time is over and that could not be deleted, as was said.
    stuck: Mutex<BTreeSet<CheckpointId>>,
    /// Held for as long as this may change anything in it.
    data_dir: DataDir,
}

#[derive(Default)]
struct Catalogue {
    /// Shared with whoever looks at them: a listing of all copies none.
    records: BTreeMap<CheckpointId, Arc<CheckpointRecord>>,
    bytes: usize,
    bytes_max: usize,
    /// Saves that were deleted before they were answered.
    deleted_early: BTreeSet<String>,
    /// Saves that are here because they were edited before they were answered.
    edited_early: BTreeSet<String>,
}

impl Catalogue {
    fn new(bytes_max: usize) -> Self {
        Catalogue { bytes_max, ..Catalogue::default() }
    }

    fn put(&mut self, record: impl Into<Arc<CheckpointRecord>>) {
        let record = record.into();
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

    /// Takes out a save that is not on the disk any more, unless another has its place. If it is still to be answered, it stays out.
    fn forget(&mut self, gone: &CheckpointRecord) {
        let id = gone.id();
        if self.records.get(&id).is_none_or(|record| record.save_id != gone.save_id) {
            return;
        }
        self.remove(&id);
        if self.edited_early.remove(&gone.save_id) {
            self.deleted_early.insert(gone.save_id.clone());
        }
    }

    fn is_full(&self) -> bool {
        self.bytes >= self.bytes_max
    }
}

impl Store {
    /// Reads the checkpoints of a data directory, as far as `bytes_max` of memory hold what is known of them, after clearing what a crash left.
    ///
    /// # Errors
    /// If the directory cannot be made or read. Checkpoints that cannot be understood are logged and left alone.
    pub fn open(data_dir: DataDir, bytes_max: usize) -> std::io::Result<Self> {
        let checkpoints_dir = data_dir.path().join("checkpoints");
        scratch::clear(data_dir.path());
        fs::create_dir_all(&checkpoints_dir)?;
        let mut catalogue = Catalogue::new(bytes_max);
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
                        Ok(None) if is_hidden(&dir) => {}
                        Ok(None) => tracing::warn!(dir = %dir.display(), "not a checkpoint: it has no {METADATA_FILE}"),
                        Err(reason) => tracing::warn!(dir = %dir.display(), "not a checkpoint: {reason}"),
                    }
                }
                // Of runs all of whose checkpoints were deleted.
                remove_empty_directories(&kind_dir, &checkpoints_dir);
            }
            remove_empty_directories(&run_dir, &checkpoints_dir);
        }
        if passed_over > 0 {
            tracing::error!(
                "{passed_over} checkpoints are beyond what is catalogued in the {} of memory that there are for it, and are passed over until others are deleted, or \
                 --memory is more",
                limits::shown_bytes(bytes_max)
            );
        }
        Ok(Store {
            checkpoints_dir,
            catalogue: Mutex::new(catalogue),
            trash: Mutex::default(),
            stuck: Mutex::default(),
            data_dir,
        })
    }

    /// The directory of all checkpoints, which may itself be reached through links.
    pub fn root(&self) -> &Path {
        &self.checkpoints_dir
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
                "this server has {} checkpoints, as many as it can keep track of; delete some first, or start it with more memory",
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
        catalogue.edited_early.remove(&record.save_id);
        match catalogue.records.get_mut(&record.id()) {
            // Edited before the save was answered.
            Some(known) if known.save_id == record.save_id => Arc::make_mut(known).size_bytes = record.size_bytes,
            _ => catalogue.put(record),
        }
    }

    /// A checkpoint by its id.
    ///
    /// # Errors
    /// If there is none, or its time is over.
    pub fn get(&self, id: &CheckpointId) -> ApiResult<Arc<CheckpointRecord>> {
        let found = self.known(id).filter(|record| !record.is_expired(OffsetDateTime::now_utc()));
        found.ok_or_else(|| not_found(id))
    }

    /// A checkpoint of the catalogue, or one that was imported since that was read.
    fn known(&self, id: &CheckpointId) -> Option<Arc<CheckpointRecord>> {
        let known = self.lock().records.get(id).cloned();
        known.or_else(|| {
            let dir = self.dir(id);
            let is_there = id.run.starts_with(IMPORTED) && dir.ancestors().take(3).all(is_directory);
            let record = Arc::new(is_there.then(|| read_record(&dir, id.kind).ok().flatten()).flatten()?);
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

    /// Whether there is a checkpoint of a run.
    pub fn has_run(&self, run: &str) -> bool {
        let first = CheckpointId { run: run.to_owned(), kind: CheckpointKind::Weights, name: String::new() };
        let catalogue = self.lock();
        let mut from = catalogue.records.range(first..);
        from.next().is_some_and(|(id, _)| id.run == run)
    }

    /// Checkpoints, newest first: all of them, or those of one run.
    pub fn list(&self, run: Option<&str>) -> Vec<Arc<CheckpointRecord>> {
        self.find_imported(run);
        let now = OffsetDateTime::now_utc();
        let catalogue = self.lock();
        let is_wanted = |record: &&Arc<CheckpointRecord>| run.is_none_or(|run| record.run == run) && !record.is_expired(now);
        let mut found: Vec<_> = catalogue.records.values().filter(is_wanted).cloned().collect();
        drop(catalogue);
        found.sort_by_key(|record| std::cmp::Reverse(record.created_at));
        found
    }

    /// A checkpoint and the names of its files that clients may have, in order. Blocks.
    ///
    /// # Errors
    /// If there is none, or its directory cannot be read.
    pub fn files(&self, id: &CheckpointId) -> ApiResult<(Arc<CheckpointRecord>, Vec<String>)> {
        let names = hold_names();
        let record = self.get(id)?;
        self.on_disk(&record, &names)?;
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

    /// Makes a copy of a checkpoint under another run's name and in a project, as a checkpoint of its own. Files are shared where the file system lets them be; none
    /// is ever changed. Blocks.
    ///
    /// # Errors
    /// If the source is gone, the name is taken, there is no room in the catalogue, or the file system refuses.
    pub fn copy(
        &self,
        source: &CheckpointRecord,
        (run, project_id): (&str, Option<String>),
        expires_at: Option<OffsetDateTime>,
    ) -> ApiResult<CheckpointRecord> {
        self.check_room().map_err(ApiError::BadRequest)?;
        let from = source.id();
        let mut copy = CheckpointRecord::new(
            CheckpointId { run: run.to_owned(), ..from.clone() },
            source.base_model.clone(),
            source.lora.clone(),
        );
        (copy.expires_at, copy.copy_of) = (expires_at, Some(source.save_id.clone()));
        copy.project_id = project_id;
        (copy.user_metadata, copy.run_metadata) = (source.user_metadata.clone(), source.run_metadata.clone());
        let (source_dir, dir) = (self.dir(&from), self.dir(&copy.id()));
        self.refuse_links(&copy.id()).map_err(|error| failed(format!("{} was not copied", from.tinker_path()), &error))?;
        self.free_name(&copy.id());
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
    /// If there is none, its time is over, or its files cannot be moved out of the way: then it is still there, and listed.
    pub fn delete(&self, id: &CheckpointId) -> ApiResult<()> {
        self.get(id)?;
        let deleted = self.delete_if(id, |_| true)?;
        deleted.map_err(|error| failed(format!("{} was not deleted, and is still there", id.tinker_path()), &error))
    }

    /// Refuses a checkpoint whose run, or the directory of its kind, is a link: what it leads to is not ours.
    fn refuse_links(&self, id: &CheckpointId) -> strata_model::Result<()> {
        self.dir(id).parent().map_or(Ok(()), |kind_dir| refuse_links_below(&self.checkpoints_dir, kind_dir))
    }

    /// Deletes a checkpoint if what is on the disk under its name has an identity that is wanted. If the file system refuses, it is still there.
    fn delete_if(&self, id: &CheckpointId, is_wanted: impl FnOnce(&str) -> bool) -> ApiResult<strata_model::Result<()>> {
        let names = hold_names();
        let known = self.known(id).ok_or_else(|| not_found(id))?;
        let dir = self.dir(id);
        if let Err(error) = self.refuse_links(id) {
            return Ok(Err(error));
        }
        // A record that cannot be read belongs to no save that is to be answered.
        let on_disk = read_record(&dir, id.kind).ok().flatten().map_or_else(|| known.save_id.clone(), |record| record.save_id);
        if !is_wanted(&on_disk) {
            return Ok(Ok(()));
        }
        let aside = match set_aside(&dir, &names) {
            Ok(aside) => Some(aside),
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::CrossesDevices => {
                match remove_in_place(&dir, &names) {
                    Ok(()) => {
                        self.remove_empty_run(&dir);
                        None
                    }
                    Err(source) => return Ok(Err(Error::Io { path: dir, source })),
                }
            }
            Err(error) => return Ok(Err(error)),
        };
        let mut catalogue = self.lock();
        catalogue.remove(id);
        if on_disk != known.save_id || catalogue.edited_early.remove(&on_disk) {
            catalogue.deleted_early.insert(on_disk);
        }
        drop((catalogue, names));
        aside.into_iter().for_each(|aside| self.remove_trash(aside, true));
        Ok(Ok(()))
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

    /// Notes the project of all checkpoints of runs whose names begin with `prefix`. Blocks.
    ///
    /// # Errors
    /// If a record cannot be written.
    pub fn set_project(&self, prefix: &str, project_id: &str) -> ApiResult<()> {
        let ids: Vec<CheckpointId> = self.lock().records.keys().filter(|id| id.run.starts_with(prefix)).cloned().collect();
        for id in ids {
            match self.edit(&id, |record| record.project_id = Some(project_id.to_owned())) {
                // Deleted meanwhile.
                Err(ApiError::NotFound(_)) => {}
                edited => edited?,
            }
        }
        Ok(())
    }

    /// Whether a checkpoint is still there though its time is over, until [`Store::free_name`] or the next [`Store::reap`].
    pub fn is_expired(&self, id: &CheckpointId) -> bool {
        self.lock().records.get(id).is_some_and(|record| record.is_expired(OffsetDateTime::now_utc()))
    }

    /// Deletes a checkpoint whose time is over, so that whoever is told that there is none can save under its name. If the file system refuses, it is still
    /// there. Blocks.
    pub fn free_name(&self, id: &CheckpointId) {
        let now = OffsetDateTime::now_utc();
        let expired = self.lock().records.get(id).filter(|record| record.is_expired(now)).map(|record| record.save_id.clone());
        if let Some(save_id) = expired {
            // What goes wrong the next sweep says.
            let _ = self.delete_expired(id, &save_id);
        }
    }

    /// Deletes a save whose time is over. A later save of the name has a life of its own.
    fn delete_expired(&self, id: &CheckpointId, save_id: &str) -> ApiResult<strata_model::Result<()>> {
        let deleted = self.delete_if(id, |on_disk| on_disk == save_id)?;
        if deleted.is_ok() {
            tracing::info!(path = id.tinker_path(), "deleted a checkpoint whose time is over");
        }
        Ok(deleted)
    }

    /// Deletes checkpoints whose time is over, and what is left of deleted ones. Blocks.
    pub fn reap(&self, now: OffsetDateTime) {
        let trash = std::mem::take(&mut *self.trash.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        trash.into_iter().for_each(|aside| self.remove_trash(aside, false));
        let expired: Vec<(CheckpointId, String)> = {
            let catalogue = self.lock();
            let expired = catalogue.records.values().filter(|record| record.is_expired(now));
            expired.map(|record| (record.id(), record.save_id.clone())).collect()
        };
        let mut stuck = self.stuck.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let said = std::mem::take(&mut *stuck);
        for (id, save_id) in expired {
            // Otherwise it is deleted now, or was before by somebody else.
            if let Ok(Err(error)) = self.delete_expired(&id, &save_id) {
                if !said.contains(&id) {
                    tracing::warn!(path = id.tinker_path(), "its time is over, and it cannot be deleted yet: {error}");
                }
                stuck.insert(id);
            }
        }
    }

    fn remove_trash(&self, aside: PathBuf, is_first: bool) {
        // What was put in the place of a checkpoint may be a file.
        let removed = fs::remove_dir_all(&aside).or_else(|error| match error.kind() {
            ErrorKind::NotADirectory => fs::remove_file(&aside),
            _ => Err(error),
        });
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                if is_first {
                    tracing::warn!(dir = %aside.display(), "what was deleted cannot be removed yet: {error}");
                }
                let mut trash = self.trash.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if trash.len() < TRASH_MAX {
                    trash.push(aside);
                }
            }
            _ => self.remove_empty_run(&aside),
        }
    }

    /// Removes the run of what was a checkpoint here, if it was the last of it.
    fn remove_empty_run(&self, removed: &Path) {
        removed.parent().into_iter().for_each(|kind_dir| remove_empty_directories(kind_dir, &self.checkpoints_dir));
    }

    /// What is on the disk under the name of a catalogued checkpoint, which may be a later save of it.
    fn on_disk(&self, known: &CheckpointRecord, _: &NamesHeld) -> ApiResult<CheckpointRecord> {
        let id = known.id();
        let unread = |reason: &Unread| format!("the record of {} cannot be read: {reason}", id.tinker_path());
        self.refuse_links(&id).map_err(|error| failed(format!("{} is not used", id.tinker_path()), &error))?;
        match read_record(&self.dir(&id), id.kind) {
            Ok(Some(record)) => Ok(record),
            Ok(None) => {
                tracing::warn!(path = id.tinker_path(), "a checkpoint is gone that nobody has deleted here");
                self.lock().forget(known);
                Err(not_found(&id))
            }
            // However often it is asked for.
            Err(reason @ Unread::Malformed(_)) => Err(ApiError::BadRequest(unread(&reason))),
            Err(reason @ Unread::Io(_)) => Err(ApiError::Internal(unread(&reason))),
        }
    }

    /// Changes the record of what is on the disk now, which may be a later save than the catalogue knows.
    fn edit(&self, id: &CheckpointId, change: impl FnOnce(&mut CheckpointRecord)) -> ApiResult<()> {
        let names = hold_names();
        let known = self.get(id)?;
        let dir = self.dir(id);
        let mut record = self.on_disk(&known, &names)?;
        change(&mut record);
        write_record(&dir, &record)
            .map_err(|error| failed(format!("the record of {} was not changed", id.tinker_path()), &error))?;
        let mut catalogue = self.lock();
        if record.save_id != known.save_id {
            catalogue.edited_early.insert(record.save_id.clone());
        }
        catalogue.put(record);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Whether a directory has a name that no checkpoint has.
fn is_hidden(dir: &Path) -> bool {
    dir.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Removes a checkpoint that the file system does not rename: a lower layer of an overlay has it. Without its record it is none any more, whatever becomes of the rest.
fn remove_in_place(dir: &Path, _: &NamesHeld) -> std::io::Result<()> {
    fs::remove_file(dir.join(METADATA_FILE))?;
    fs::File::open(dir).and_then(|dir| dir.sync_all())?;
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!(dir = %dir.display(), "a checkpoint that was deleted has left files behind: {error}");
    }
    Ok(())
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
        // Asked for again, it would be no other.
        Error::Checkpoint { message, .. } => ApiError::BadRequest(format!("{what}: {message}")),
        _ => ApiError::Internal(what),
    }
}
