//! A tenant's checkpoint: a PEFT adapter, for training checkpoints Adam's state beside it, and what the caller wants kept with them.
//!
//! A checkpoint is read as the one that was asked for or not at all: the caller's metadata carry the identity of the save, which is looked
//! at before the files are opened and again after, so that a save that replaces the directory meanwhile cannot mix its weights in.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use strata_model::Error;
use strata_model::checkpoint::{
    AdapterFormat, Existing, PlannedAdapter, has_optimizer, read_optimizer, read_own_file, refuse_links_below, write_adapter,
    write_atomically, write_optimizer,
};
use strata_model::lora::{LoraConfig, LoraModule};
use strata_tensor::Backend;

use crate::age::{Recipient, encrypt_file};
use crate::api::{CheckpointSource, Failure, METADATA_BYTES_MAX, METADATA_FILE, SaveTarget};
use crate::files::Load;
use crate::learner::{self, LearnerState};
use crate::optimizer::Moments;

/// What checkpoints are written for and read against.
#[derive(Clone)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    /// What has the memory of adapters.
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) modules: Vec<LoraModule>,
    /// How its adapters are written.
    pub(crate) format: AdapterFormat,
}

/// Writes a checkpoint whole or not at all; returns the bytes of its files.
pub(crate) fn write(base: &BaseModel, target: &SaveTarget, state: &LearnerState) -> Result<u64, Failure> {
    let SaveTarget { root, dir, name, overwrite, metadata, recipients } = target;
    let recipients: Result<Vec<Recipient>, String> = recipients.iter().map(|text| Recipient::parse(text)).collect();
    let recipients = recipients.map_err(|reason| Failure::User(format!("checkpoint {name}: {reason}")))?;
    if !overwrite && dir.symlink_metadata().is_ok() {
        return Err(Failure::User(format!("checkpoint {name} exists already")));
    }
    let metadata = metadata.to_string();
    if metadata.len() as u64 > METADATA_BYTES_MAX {
        return Err(Failure::User(format!(
            "the metadata of checkpoint {name} have {} bytes; at most {METADATA_BYTES_MAX} are kept",
            metadata.len()
        )));
    }
    let existing = if *overwrite { Existing::Replace } else { Existing::Refuse };
    // What is behind a link would be passed over at the next start.
    let is_in_place = refuse_links_below(root, dir.parent().unwrap_or(dir));
    let write = |partial: &Path| {
        let adapter = (&state.config, &*state.weights);
        write_adapter(&*base.backend, partial, &base.modules, adapter, &base.name, base.format)?;
        if let Some(Moments { m, v, step }) = &state.moments {
            write_optimizer(&*base.backend, partial, &base.modules, [m, v], *step)?;
        }
        if !recipients.is_empty() {
            encrypt_files(partial, &recipients)?;
        }
        let path = partial.join(METADATA_FILE);
        std::fs::write(&path, metadata).map_err(|source| Error::Io { path, source })
    };
    let written = is_in_place.and_then(|()| write_atomically(dir, existing, write));
    written.map_err(|error| {
        tracing::error!(name, "a checkpoint was not written: {error}");
        Failure::Server(format!("checkpoint {name} was not written: {}", without_directory(&error, dir)))
    })
}

/// Encrypts every file of a directory that nobody else sees yet, and leaves none as it was.
fn encrypt_files(partial: &Path, recipients: &[Recipient]) -> strata_model::Result<()> {
    let io_error = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    };
    let files: std::io::Result<Vec<PathBuf>> =
        std::fs::read_dir(partial).and_then(|dir| dir.map(|entry| Ok(entry?.path())).collect());
    for path in files.map_err(io_error(partial))? {
        encrypt_file(&path, recipients).map_err(io_error(&path))?;
    }
    Ok(())
}

/// Reads a checkpoint, with Adam's state if it is asked for.
pub(crate) fn read(base: &BaseModel, load: &Load) -> Result<LearnerState, Failure> {
    let source = &load.source;
    // Held open, the directory stays the one it was, whatever takes its name meanwhile.
    let (held, pinned) = pin(&source.dir);
    let pinned = CheckpointSource { dir: pinned, ..source.clone() };
    check_identity(&pinned)?;
    let state = read_files(base, &pinned, load);
    // Whatever was read, and whatever went wrong, may be due to another save that took the place of this one.
    check_identity(&pinned)?;
    if state.is_err() && held.is_some_and(|held| !is_still_at(&held, &source.dir)) {
        return Err(overwritten(&source.name));
    }
    state
}

/// Opens a directory, and answers a path by which files of this very directory are reached, also once another has taken its name. Where the system
/// has no such path, it is the name itself.
fn pin(dir: &Path) -> (Option<File>, PathBuf) {
    use std::os::fd::AsRawFd;
    let Ok(held) = File::open(dir) else { return (None, dir.to_owned()) };
    let pinned = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    if pinned.is_dir() { (Some(held), pinned) } else { (None, dir.to_owned()) }
}

/// Whether a name still leads to the directory that is held open.
fn is_still_at(held: &File, dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|m| (m.dev(), m.ino())).ok();
    place(held.metadata()) == place(std::fs::metadata(dir))
}

fn overwritten(name: &str) -> Failure {
    Failure::User(format!("checkpoint {name} was overwritten or deleted after this request was accepted"))
}

fn read_files(base: &BaseModel, source: &CheckpointSource, load: &Load) -> Result<LearnerState, Failure> {
    let CheckpointSource { dir, name, .. } = source;
    refuse_links(dir).map_err(|file| Failure::User(format!("checkpoint {name}: {file} is a symbolic link, not a file")))?;
    let failure = |error| read_failure(error, source);
    let planned = PlannedAdapter::open(dir, &base.modules).map_err(failure)?;
    check_size(base, planned.config(), load).map_err(Failure::User)?;
    let adapter = planned.read(&*base.backend).map_err(failure)?;
    adapter.check_base_model(&base.name).map_err(|error| Failure::User(format!("checkpoint {name}: {error}")))?;
    let moments = match load.with_optimizer {
        true if !has_optimizer(dir) => {
            return Err(Failure::User(format!(
                "checkpoint {name} has no state of an optimizer, as those that were imported have none; load its weights alone \
                 (create_training_client_from_state or load_state), and AdamW begins afresh"
            )));
        }
        true => {
            let state = read_optimizer(&*base.backend, dir, &base.modules, &adapter.config).map_err(failure)?;
            let ours = base.backend.numerics();
            if let Some(theirs) = state.numerics.filter(|theirs| *theirs != ours) {
                tracing::warn!(
                    "checkpoint {name} was trained with {theirs} numerics and goes on with {ours}: other bits than it would have had"
                );
            }
            Some(Moments { m: Arc::new(state.m), v: Arc::new(state.v), step: state.step })
        }
        false => None,
    };
    Ok(LearnerState { config: adapter.config, weights: Arc::new(adapter.params), moments })
}

/// Refuses an adapter that takes more memory than what was set aside for it.
fn check_size(base: &BaseModel, config: &LoraConfig, load: &Load) -> Result<(), String> {
    let (bytes, bytes_max) = (learner::read_bytes(config, &base.modules, load.with_optimizer), load.bytes_max);
    if bytes <= bytes_max {
        return Ok(());
    }
    match &load.replaces {
        None => Err(format!(
            "the checkpoint's adapter takes {bytes} bytes, and its record says {bytes_max}: they do not belong together"
        )),
        Some(made_with) => {
            learner::check_shape(&learner::config_of(made_with, &base.modules)?, config)?;
            Err(format!("the checkpoint's adapter takes {bytes} bytes, and the model was given {bytes_max}"))
        }
    }
}

/// Fails if what is in the directory now is not the save that was asked for.
fn check_identity(source: &CheckpointSource) -> Result<(), Failure> {
    let CheckpointSource { dir, name, save_id } = source;
    let found = match read_own_file(&dir.join(METADATA_FILE), METADATA_BYTES_MAX) {
        Ok(metadata) => saved_id(&metadata),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(Failure::User(format!("checkpoint {name}: {METADATA_FILE}: {error}"))),
    };
    if found != *save_id { Err(overwritten(name)) } else { Ok(()) }
}

/// The identity in a caller's metadata, if there is one.
fn saved_id(metadata: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        save_id: Option<String>,
    }
    serde_json::from_slice::<Metadata>(metadata).ok()?.save_id.filter(|id| !id.is_empty())
}

/// The name of an entry of a checkpoint's directory that is a link, if there is one.
fn refuse_links(dir: &Path) -> Result<(), String> {
    // A directory that cannot be listed fails in its turn, with a better reason.
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
    let link = entries.flatten().find(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    link.map_or(Ok(()), |entry| Err(entry.file_name().to_string_lossy().into_owned()))
}

/// A checkpoint that is missing or malformed was the wrong one to name; a disk that fails, or a device without memory, is ours.
fn read_failure(error: Error, source: &CheckpointSource) -> Failure {
    let message = format!("checkpoint {}: {}", source.name, without_directory(&error, &source.dir));
    match &error {
        Error::Io { source, .. } if source.kind() != ErrorKind::NotFound => Failure::Server(message),
        Error::Tensor(strata_tensor::Error::OutOfMemory { .. }) => Failure::Server(message),
        _ => Failure::User(message),
    }
}

/// What went wrong, in words that tell a client nothing of where this server keeps its files.
pub(crate) fn without_directory(error: &Error, dir: &Path) -> String {
    let file = |path: &PathBuf| match path.file_name() {
        Some(file) if path != dir && path.parent().and_then(Path::file_name) == dir.file_name() => {
            format!("{}: ", file.to_string_lossy())
        }
        _ => String::new(),
    };
    match error {
        Error::Checkpoint { path, message } => format!("{}{message}", file(path)),
        Error::Io { path, source } => format!("{}{source}", file(path)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_from_metadata_of_any_kind() {
        assert_eq!(saved_id(br#"{"save_id":"a","other":[1]}"#), Some("a".into()));
        for none in ["", "{", "{}", r#"{"save_id":null}"#, r#"{"save_id":""}"#, r#"{"save_id":3}"#, "null", "[]"] {
            assert_eq!(saved_id(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn a_failure_names_the_file_and_not_where_it_is() {
        let dir = Path::new("/srv/secret/data/run/weights/a");
        let error = |path: &str| Error::Checkpoint { path: path.into(), message: "is wrong".into() };
        for (path, expected) in [
            ("/srv/secret/data/run/weights/a/adapter_config.json", "adapter_config.json: is wrong"),
            ("/srv/secret/data/run/weights/a", "is wrong"),
            ("/srv/secret/data/run", "is wrong"),
        ] {
            assert_eq!(without_directory(&error(path), dir), expected);
        }
    }
}
