//! Checkpoints that were made elsewhere: written beside those that training saves, whether a server has the directory or not.

use std::path::Path;

use strata_engine::api::{LoraSpec, METADATA_FILE};
use strata_model::Error;
use strata_model::checkpoint::{Existing, write_atomically};

use crate::names::{CheckpointId, CheckpointKind};
use crate::store::{CheckpointRecord, IMPORTED};

/// Why a checkpoint was not imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// There is no checkpoint of such a name.
    #[error("{0}")]
    Name(String),
    /// Its files could not be made.
    #[error(transparent)]
    Files(#[from] Error),
}

/// A checkpoint in a data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Its `tinker://` path.
    pub path: String,
    /// Bytes of its files.
    pub size_bytes: u64,
}

/// Makes a training checkpoint of this name in a data directory, in a run of its own. `lora` says what room it takes; `write` puts the adapter into the directory that it is given. The
/// checkpoint is there whole or not at all, and a server that has the directory finds it when it is asked for it.
///
/// # Errors
/// If the name is not one that a checkpoint may have, `write` fails, or the file system refuses.
pub fn import(
    data_dir: &Path,
    name: &str,
    base_model: &str,
    lora: LoraSpec,
    write: impl FnOnce(&Path) -> strata_model::Result<()>,
) -> Result<Imported, ImportError> {
    let run = format!("{IMPORTED}{}:train:0", uuid::Uuid::new_v4());
    let id = CheckpointId::new(&run, CheckpointKind::Weights.segment(), name).map_err(|e| ImportError::Name(e.to_string()))?;
    let dir = id.dir_in(&data_dir.join("checkpoints"));
    let record = CheckpointRecord::new(id.clone(), base_model.into(), lora);
    let size_bytes = write_atomically(&dir, Existing::Refuse, |partial| {
        write(partial)?;
        let path = partial.join(METADATA_FILE);
        let bytes =
            serde_json::to_vec_pretty(&record).map_err(|error| Error::Io { path: path.clone(), source: error.into() })?;
        std::fs::write(&path, bytes).map_err(|source| Error::Io { path, source })
    })?;
    Ok(Imported { path: id.tinker_path(), size_bytes })
}
