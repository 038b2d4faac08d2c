//! The catalogue of checkpoints: directories under `{data_dir}/checkpoints/{run}/{kind}/{name}`, each with a `strata.json` that says what it is.
//!
//! The engine writes a checkpoint whole, `strata.json` included, under its name. This catalogue is read from those files at start and kept in
//! memory; nothing is stored twice. Deleting first moves a directory out of the way, so that a checkpoint is there or not, never in part.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use strata_engine::api::LoraSpec;
use strata_model::checkpoint::recover_directories;
use time::OffsetDateTime;

use crate::error::{ApiError, ApiResult};
use crate::names::{CheckpointId, CheckpointKind, check_name};

/// Name of the file that describes a checkpoint, in its directory.
const RECORD_FILE: &str = "strata.json";
/// What this build writes; a record of a later format is left alone.
const RECORD_FORMAT: u32 = 1;

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    format: u32,
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
}

/// The checkpoints of a data directory.
pub struct Store {
    checkpoints_dir: PathBuf,
    trash_dir: PathBuf,
    records: Mutex<BTreeMap<CheckpointId, CheckpointRecord>>,
    /// Held while files change, so that two edits of a record do not mix; never together with an await.
    edits: Mutex<()>,
}

impl Store {
    /// Opens a data directory, making it if there is none.
    ///
    /// # Errors
    /// If the directory cannot be made or read. Checkpoints that cannot be understood are logged and left alone.
    pub fn open(data_dir: &Path) -> std::io::Result<Self> {
        let store = Store {
            checkpoints_dir: data_dir.join("checkpoints"),
            trash_dir: data_dir.join("trash"),
            records: Mutex::default(),
            edits: Mutex::default(),
        };
        fs::create_dir_all(&store.checkpoints_dir)?;
        if store.trash_dir.exists() {
            fs::remove_dir_all(&store.trash_dir)?;
        }
        for run_dir in subdirectories(&store.checkpoints_dir)? {
            for kind in CheckpointKind::ALL {
                let kind_dir = run_dir.join(kind.segment());
                if !kind_dir.is_dir() {
                    continue;
                }
                recover_directories(&kind_dir).map_err(std::io::Error::other)?;
                for dir in subdirectories(&kind_dir)? {
                    match read_record(&dir, kind) {
                        Ok(Some(record)) => store.insert(record),
                        Ok(None) => {}
                        Err(reason) => tracing::warn!(dir = %dir.display(), "not a checkpoint: {reason}"),
                    }
                }
            }
        }
        Ok(store)
    }

    /// Where a checkpoint is, or would be.
    pub fn dir(&self, id: &CheckpointId) -> PathBuf {
        self.checkpoints_dir.join(&id.run).join(id.kind.segment()).join(&id.name)
    }

    /// Adds a checkpoint that the engine has written, or replaces one of the same name.
    pub fn insert(&self, record: CheckpointRecord) {
        self.lock().insert(record.id(), record);
    }

    /// A checkpoint by its id.
    ///
    /// # Errors
    /// If there is none, or its time is over.
    pub fn get(&self, id: &CheckpointId) -> ApiResult<CheckpointRecord> {
        let found = self.lock().get(id).filter(|record| !is_expired(record, OffsetDateTime::now_utc())).cloned();
        found.ok_or_else(|| ApiError::NotFound(format!("there is no checkpoint {}", id.tinker_path())))
    }

    /// Checkpoints, newest first: all of them, or those of one run.
    pub fn list(&self, run: Option<&str>) -> Vec<CheckpointRecord> {
        let now = OffsetDateTime::now_utc();
        let records = self.lock();
        let wanted = records.values().filter(|record| run.is_none_or(|run| record.run == run) && !is_expired(record, now));
        let mut found: Vec<CheckpointRecord> = wanted.cloned().collect();
        drop(records);
        found.sort_by_key(|record| std::cmp::Reverse(record.created_at));
        found
    }

    /// Deletes a checkpoint and its files. Blocks.
    ///
    /// # Errors
    /// If there is none, or its files cannot be removed.
    pub fn delete(&self, id: &CheckpointId) -> ApiResult<()> {
        let _edit = self.edits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if self.lock().remove(id).is_none() {
            return Err(ApiError::NotFound(format!("there is no checkpoint {}", id.tinker_path())));
        }
        let trash = self.trash_dir.join(uuid::Uuid::new_v4().to_string());
        let moved = fs::create_dir_all(&self.trash_dir).and_then(|()| fs::rename(self.dir(id), &trash));
        match moved.and_then(|()| fs::remove_dir_all(&trash)) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(ApiError::Internal(format!("deleting {}: {error}", id.tinker_path()))),
        }
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

    /// Deletes checkpoints whose time is over. Blocks.
    pub fn reap(&self, now: OffsetDateTime) {
        let expired: Vec<CheckpointId> =
            self.lock().values().filter(|record| is_expired(record, now)).map(CheckpointRecord::id).collect();
        for id in expired {
            match self.delete(&id) {
                Ok(()) => tracing::info!(path = id.tinker_path(), "deleted a checkpoint whose time is over"),
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }

    fn edit(&self, id: &CheckpointId, change: impl FnOnce(&mut CheckpointRecord)) -> ApiResult<()> {
        let _edit = self.edits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut record = self.get(id)?;
        change(&mut record);
        write_record(&self.dir(id), &record)
            .map_err(|error| ApiError::Internal(format!("writing the record of {}: {error}", id.tinker_path())))?;
        self.insert(record);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<CheckpointId, CheckpointRecord>> {
        self.records.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn is_expired(record: &CheckpointRecord, now: OffsetDateTime) -> bool {
    record.expires_at.is_some_and(|at| at <= now)
}

fn subdirectories(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Reads the record of a directory; `None` if it is not a finished checkpoint. The path decides over what the file says, so that a copied
/// directory goes by its new name.
fn read_record(dir: &Path, kind: CheckpointKind) -> Result<Option<CheckpointRecord>, String> {
    let segment = |path: Option<&Path>| path.and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned);
    let Some(name) = segment(Some(dir)).filter(|name| !name.starts_with('.')) else { return Ok(None) };
    let run = segment(dir.parent().and_then(Path::parent)).ok_or("its run has no readable name")?;
    check_name("checkpoint name", &name).and(check_name("run", &run)).map_err(|error| error.to_string())?;
    let bytes = match fs::read(dir.join(RECORD_FILE)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{RECORD_FILE}: {error}")),
    };
    let mut record: CheckpointRecord = serde_json::from_slice(&bytes).map_err(|error| format!("{RECORD_FILE}: {error}"))?;
    if record.format != RECORD_FORMAT {
        return Err(format!("{RECORD_FILE} has format {}, this build knows {RECORD_FORMAT}", record.format));
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

fn write_record(dir: &Path, record: &CheckpointRecord) -> std::io::Result<()> {
    let temporary = dir.join(format!(".{RECORD_FILE}.new"));
    let mut file = fs::File::create(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(RECORD_FILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> CheckpointRecord {
        let id = CheckpointId::new("s:train:0", "weights", name).unwrap();
        let lora = LoraSpec { rank: 4, seed: 1, train_attn: true, train_mlp: true, train_unembed: false };
        CheckpointRecord::new(id, "base".into(), lora)
    }

    /// What the engine leaves behind for a save.
    fn write(store: &Store, record: &CheckpointRecord) {
        let dir = store.dir(&record.id());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("adapter_model.safetensors"), [0u8; 10]).unwrap();
        write_record(&dir, record).unwrap();
        store.insert(record.clone());
    }

    #[test]
    fn a_catalogue_is_rebuilt_from_its_files() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = Store::open(data_dir.path()).unwrap();
        write(&store, &record("a"));
        store.set_public(&record("a").id(), true).unwrap();
        fs::create_dir_all(store.dir(&record("half").id())).unwrap();
        let broken = store.dir(&record("broken").id());
        fs::create_dir_all(&broken).unwrap();
        fs::write(broken.join(RECORD_FILE), "{").unwrap();

        let found = Store::open(data_dir.path()).unwrap().list(None);
        assert_eq!(found.len(), 1);
        assert!(found[0].public && found[0].size_bytes > 10);
        assert_eq!(found[0].lora, record("a").lora);
    }

    #[test]
    fn a_deleted_checkpoint_is_gone_from_disk_and_a_second_delete_is_not_found() {
        let data_dir = tempfile::tempdir().unwrap();
        let store = Store::open(data_dir.path()).unwrap();
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
        let store = Store::open(data_dir.path()).unwrap();
        let id = record("a").id();
        write(&store, &record("a"));
        let now = OffsetDateTime::now_utc();
        store.set_expiry(&id, Some(now - time::Duration::SECOND)).unwrap();
        assert!(store.list(None).is_empty());
        store.reap(now);
        assert!(!store.dir(&id).exists());
    }
}
