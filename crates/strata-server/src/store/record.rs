//! What a checkpoint's directory says of it, in a `strata.json` of its own.
//!
//! Nothing in a directory is believed to be what its name says: links and special files are passed over, and never opened or followed.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use strata_engine::api::{LoraSpec, METADATA_BYTES_MAX, METADATA_FILE};
use strata_model::Error;
use strata_model::checkpoint::{read_own_file, write_file_atomically};
use time::OffsetDateTime;

use crate::names::{CheckpointId, CheckpointKind, check_name};

/// What this build writes; a record of a later format is left alone.
const RECORD_FORMAT: u32 = 1;

/// Why there is no telling what a directory is.
#[derive(Debug, thiserror::Error)]
pub enum Unread {
    /// It is nothing that this build writes, and stays so.
    #[error("{0}")]
    Malformed(String),
    /// The file system refuses.
    #[error("{METADATA_FILE}: {0}")]
    Io(std::io::Error),
}

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
    /// Of a copy, the `save_id` of what it is one of. Copies of earlier builds do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<String>,
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
    /// The project that its user named for it. Records of earlier builds have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<String>,
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
            copy_of: None,
            created_at: OffsetDateTime::now_utc(),
            expires_at: None,
            public: false,
            base_model,
            lora,
            user_metadata: None,
            run_metadata: None,
            project_id: None,
            size_bytes: 0,
        }
    }

    /// What names it.
    pub fn id(&self) -> CheckpointId {
        CheckpointId { run: self.run.clone(), kind: self.kind, name: self.name.clone() }
    }

    /// Whether its time is over.
    pub fn is_expired(&self, now: OffsetDateTime) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    /// Bytes that it takes in the catalogue, about.
    pub fn catalogued_bytes(&self) -> usize {
        // The record, its id, and their places in a map; each entry of the metadata likewise.
        const RECORD: usize = 512;
        const ENTRY: usize = 64;
        let metadata = self.user_metadata.iter().chain(&self.run_metadata).flatten();
        let metadata: usize = metadata.map(|(key, value)| ENTRY + key.len() + value.len()).sum();
        let project = self.project_id.as_ref().map_or(0, String::len);
        RECORD + 2 * (self.run.len() + self.name.len()) + self.base_model.len() + project + metadata
    }
}

/// Whether there is a directory at a path, rather than a link to one.
pub fn is_directory(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_symlink() => {
            tracing::warn!(path = %path.display(), "is a symbolic link, and is not followed");
            false
        }
        Ok(metadata) => metadata.is_dir(),
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), "cannot be looked at: {error}");
            }
            false
        }
    }
}

/// The directories in a directory, one after another; links are passed over.
pub fn subdirectories(dir: &Path) -> std::io::Result<impl Iterator<Item = PathBuf>> {
    let shown = dir.display().to_string();
    let entries = fs::read_dir(dir)?.filter_map(move |entry| {
        entry.inspect_err(|error| tracing::warn!(dir = shown, "cannot be read to its end: {error}")).ok()
    });
    Ok(entries.map(|entry| entry.path()).filter(|path| is_directory(path)))
}

/// Reads the record of a directory; `None` if it is not a finished checkpoint. The path decides over what the file says, so that a copied
/// directory goes by its new name.
///
/// # Errors
/// If the file system refuses, or what is there is malformed.
pub fn read_record(dir: &Path, kind: CheckpointKind) -> Result<Option<CheckpointRecord>, Unread> {
    let malformed = |reason: String| Unread::Malformed(reason);
    let segment = |path: Option<&Path>| path.and_then(Path::file_name).and_then(|name| name.to_str()).map(str::to_owned);
    let Some(name) = segment(Some(dir)).filter(|name| !name.starts_with('.')) else { return Ok(None) };
    let run = segment(dir.parent().and_then(Path::parent)).ok_or_else(|| malformed("its run has no readable name".into()))?;
    check_name("checkpoint name", &name).and(check_name("run", &run)).map_err(|error| malformed(error.to_string()))?;
    let bytes = match read_own_file(&dir.join(METADATA_FILE), METADATA_BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // Too long, no file, or in no directory.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::NotADirectory) => {
            return Err(malformed(format!("{METADATA_FILE}: {error}")));
        }
        Err(error) => return Err(Unread::Io(error)),
    };
    let parsed = serde_json::from_slice(&bytes).map_err(|error| malformed(format!("{METADATA_FILE}: {error}")));
    let mut record: CheckpointRecord = parsed?;
    if record.format != RECORD_FORMAT {
        let format = record.format;
        return Err(malformed(format!("{METADATA_FILE} has format {format}, this build knows {RECORD_FORMAT}")));
    }
    (record.run, record.kind, record.name) = (run, kind, name);
    record.size_bytes = files_size_bytes(dir).map_err(Unread::Io)?;
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

/// Writes the record of a directory, whole or not at all.
pub fn write_record(dir: &Path, record: &CheckpointRecord) -> strata_model::Result<()> {
    let path = dir.join(METADATA_FILE);
    let bytes = serde_json::to_vec_pretty(record).map_err(|error| Error::Io { path: path.clone(), source: error.into() })?;
    write_file_atomically(&path, &bytes)
}
