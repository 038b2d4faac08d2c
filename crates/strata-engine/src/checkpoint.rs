//! A tenant's checkpoint: a PEFT adapter, for training checkpoints Adam's state beside it, and what the caller wants kept with them.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use strata_model::Error;
use strata_model::checkpoint::{Existing, read_adapter, read_optimizer, write_adapter, write_atomically, write_optimizer};
use strata_model::lora::LoraModule;

use crate::api::{Failure, SaveTarget};
use crate::optimizer::Moments;
use crate::tenant::LearnerState;

/// The caller's metadata.
const METADATA_FILE: &str = "strata.json";

/// What checkpoints are written for and read against.
#[derive(Clone, Debug)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    pub(crate) modules: Vec<LoraModule>,
}

/// Writes a checkpoint whole or not at all; returns the bytes of its files.
pub(crate) fn write(base: &BaseModel, target: &SaveTarget, state: &LearnerState) -> Result<u64, Failure> {
    let dir = &target.dir;
    if !target.overwrite && dir.symlink_metadata().is_ok() {
        return Err(Failure::User(format!("checkpoint {} exists already", dir.display())));
    }
    let existing = if target.overwrite { Existing::Replace } else { Existing::Refuse };
    write_atomically(dir, existing, |partial| {
        write_adapter(partial, &base.modules, &state.config, &state.weights, &base.name)?;
        if let Some(Moments { m, v, step }) = &state.moments {
            write_optimizer(partial, &base.modules, m, v, *step)?;
        }
        let path = partial.join(METADATA_FILE);
        std::fs::write(&path, target.metadata.to_string()).map_err(|source| Error::Io { path, source })
    })
    .map_err(|e| Failure::Server(format!("the checkpoint was not written: {e}")))
}

/// Reads a checkpoint, with Adam's state if it is asked for.
pub(crate) fn read(base: &BaseModel, dir: &Path, with_optimizer: bool) -> Result<LearnerState, Failure> {
    let adapter = read_adapter(dir, &base.modules).map_err(read_failure)?;
    if let Some(name) = adapter.base_model.filter(|name| *name != base.name) {
        tracing::warn!(dir = %dir.display(), "the adapter was trained on {name}; it is used with {}", base.name);
    }
    let moments = match with_optimizer {
        true => {
            let state = read_optimizer(dir, &base.modules, &adapter.config).map_err(read_failure)?;
            Some(Moments { m: Arc::new(state.m), v: Arc::new(state.v), step: state.step })
        }
        false => None,
    };
    Ok(LearnerState { config: adapter.config, weights: Arc::new(adapter.params), moments })
}

/// A checkpoint that is missing or malformed was the wrong one to name; a disk that fails is ours.
fn read_failure(error: Error) -> Failure {
    match &error {
        Error::Io { source, .. } if source.kind() != ErrorKind::NotFound => Failure::Server(error.to_string()),
        _ => Failure::User(error.to_string()),
    }
}
