//! Models of the Hugging Face hub: found in its local cache, or downloaded into it.
//!
//! The cache is the one that Python's `huggingface_hub` uses, and so are the variables of the environment: `HF_HOME`, `HF_HUB_CACHE`,
//! `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. A model that is in the cache whole is used as it is, without a word to the network.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::safetensors::{INDEX_FILE, SINGLE_FILE, read_index};
use crate::{Error, Result};

const PUBLIC_ENDPOINT: &str = "https://huggingface.co";
/// Files to have before the weights: without the first two a model cannot be used, the others are taken where they exist.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
];
/// How many of [`SMALL_FILES`] must exist.
const REQUIRED_FILES: usize = 2;
/// The revision that is used.
const REVISION: &str = "main";
/// The longest name of a repository or organisation, as the hub has it.
const NAME_CHARS_MAX: usize = 96;

/// Pauses before trying again when a download breaks off; what has arrived is kept.
const RETRY_PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];

/// How long the hub may take to answer. It sends no more than a list of files, or what is known of one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Where and how to look for models.
#[derive(Clone)]
pub struct HubOptions {
    /// Base URL of the hub.
    pub endpoint: String,
    /// Access token; `None`: none is sent.
    pub token: Option<String>,
    /// Directory of the cache.
    pub cache_dir: PathBuf,
    /// Whether to stay off the network.
    pub offline: bool,
    /// How long the hub may take to answer what it is asked. A download may take as long as it likes.
    pub answer_timeout: Duration,
}

impl HubOptions {
    /// What the environment says, read as `huggingface_hub` reads it.
    pub fn from_env() -> Self {
        let home = variable("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            cache.unwrap_or_else(|| env::home_dir().unwrap_or_default().join(".cache")).join("huggingface")
        });
        let cache_dir = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from);
        HubOptions {
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_ENDPOINT.into()),
            token: token(&home),
            cache_dir: cache_dir.unwrap_or_else(|| home.join("hub")),
            offline: variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            answer_timeout: ANSWER_TIMEOUT,
        }
    }
}

/// A variable of the environment that is set and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// `HF_TOKEN`, or the token that a login stored.
fn token(home: &Path) -> Option<String> {
    if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value)) {
        return None;
    }
    let stored = || {
        let path = variable("HF_TOKEN_PATH").map(PathBuf::from).unwrap_or_else(|| home.join("token"));
        fs::read_to_string(path).ok()
    };
    let token = variable("HF_TOKEN").or_else(stored)?.trim().to_string();
    (!token.is_empty()).then_some(token)
}

/// Values of flags that `huggingface_hub` takes for true.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownloadEvent<'a> {
    /// The hub is about to be asked what there is.
    Asking {
        /// Its address.
        endpoint: &'a str,
    },
    /// Files are about to be downloaded. Occurs more than once: shards come after the index that names them.
    Started {
        /// Number of files.
        files: usize,
        /// Bytes of all of them.
        bytes: u64,
    },
    /// A file has come this far.
    File {
        /// Its name.
        name: &'a str,
        /// Bytes that are here.
        bytes_done: u64,
        /// Bytes there are.
        bytes_total: u64,
    },
    /// What [`DownloadEvent::Started`] announced is here.
    Finished,
}

/// Is told how far a download is; must be quick.
pub trait DownloadProgress {
    /// Takes an event.
    fn on_event(&self, event: DownloadEvent<'_>);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl DownloadProgress for NoProgress {
    fn on_event(&self, _event: DownloadEvent<'_>) {}
}

/// Whether a text has the form of a repository's name, `organisation/model`.
pub fn is_repository_name(text: &str) -> bool {
    let part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty()
            && part.chars().all(plain)
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
            && !part.contains("--")
            && !part.contains("..")
    };
    text.len() <= 2 * NAME_CHARS_MAX && text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The directory of a model's files, downloaded if they are not all in the cache. Blocks.
///
/// # Errors
/// If the name is not one, the hub has no such model or does not let us have it, cannot be reached, or must not be reached.
pub fn fetch_model(repository: &str, options: &HubOptions, progress: &dyn DownloadProgress) -> Result<PathBuf> {
    if !is_repository_name(repository) {
        return Err(Error::Hub(format!("{repository:?} is not a repository name such as Qwen/Qwen3-0.6B")));
    }
    let cached = cached_snapshot(&options.cache_dir, repository);
    let missing = match &cached {
        Some(snapshot) => missing_files(snapshot)?,
        None => vec!["everything".into()],
    };
    match cached {
        Some(snapshot) if missing.is_empty() => Ok(snapshot),
        _ if options.offline => Err(Error::Hub(format!(
            "HF_HUB_OFFLINE is set, and of {repository} the cache {} lacks {}",
            options.cache_dir.display(),
            missing.join(", ")
        ))),
        _ => Download::begin(repository, options, progress)?.run(),
    }
}

/// A download of one commit of a repository.
struct Download<'a> {
    repository: &'a str,
    progress: &'a dyn DownloadProgress,
    cache: Cache,
    api: Api,
    repo: ApiRepo,
    commit: String,
    /// Files of the commit.
    files: Vec<String>,
    answer_timeout: Duration,
}

impl<'a> Download<'a> {
    /// Asks the hub for the commit and its files.
    fn begin(repository: &'a str, options: &HubOptions, progress: &'a dyn DownloadProgress) -> Result<Self> {
        // Links within the cache are relative, and are made from absolute paths.
        let cache_dir =
            std::path::absolute(&options.cache_dir).map_err(|source| Error::Io { path: options.cache_dir.clone(), source })?;
        let cache = Cache::new(cache_dir);
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(options.endpoint.trim_end_matches('/').into())
            .with_token(options.token.clone())
            .with_progress(false)
            .build()
            .map_err(|e| hub_error(repository, "", &e))?;
        progress.on_event(DownloadEvent::Asking { endpoint: &options.endpoint });
        let asked = api.model(repository.into());
        let info = answered(options.answer_timeout, (repository, ""), move || asked.info())?;
        if !is_plain(&info.sha) {
            return Err(Error::Hub(format!("{repository}: the hub names commit {:?}", info.sha)));
        }
        let repo = api.repo(Repo::with_revision(repository.into(), RepoType::Model, info.sha.clone()));
        let files = info.siblings.into_iter().map(|s| s.rfilename).collect();
        let answer_timeout = options.answer_timeout;
        Ok(Download { repository, progress, cache, api, repo, commit: info.sha, files, answer_timeout })
    }

    fn run(self) -> Result<PathBuf> {
        let cached = self.cache.model(self.repository.into());
        let snapshot = cached.pointer_path(&self.commit);
        let mut first: Vec<&str> = SMALL_FILES.to_vec();
        // One file or shards, as transformers prefers them.
        first.push(if self.holds(SINGLE_FILE) { SINGLE_FILE } else { INDEX_FILE });
        self.fetch(first.into_iter().filter(|name| self.holds(name) && !snapshot.join(name).is_file()))?;
        let shards = missing_shards(&snapshot)?;
        self.fetch(shards.iter().map(String::as_str).filter(|name| self.holds(name)))?;
        let missing = missing_files(&snapshot)?;
        if !missing.is_empty() {
            return Err(Error::Hub(format!("{} does not hold {}", self.repository, missing.join(", "))));
        }
        cached.create_ref(&self.commit).map_err(|source| Error::Io { path: snapshot.clone(), source })?;
        Ok(snapshot)
    }

    fn holds(&self, name: &str) -> bool {
        self.files.iter().any(|file| file == name)
    }

    /// Downloads files into the snapshot.
    fn fetch<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<()> {
        let mut files = Vec::new();
        for name in names {
            let (api, url) = (self.api.clone(), self.repo.url(name));
            let metadata = answered(self.answer_timeout, (self.repository, name), move || api.metadata(&url))?;
            // Both become names of files.
            if !is_plain(metadata.etag()) || metadata.commit_hash() != self.commit {
                return Err(Error::Hub(format!(
                    "{}: the hub says that {name} is {:?} of commit {:?}",
                    self.repository,
                    metadata.etag(),
                    metadata.commit_hash()
                )));
            }
            files.push((name, metadata.etag().to_string(), metadata.size() as u64));
        }
        if files.is_empty() {
            return Ok(());
        }
        let bytes = files.iter().map(|(_, _, size)| size).sum();
        self.progress.on_event(DownloadEvent::Started { files: files.len(), bytes });
        for (name, etag, size) in files {
            self.fetch_file(name, &etag, size)?;
        }
        self.progress.on_event(DownloadEvent::Finished);
        Ok(())
    }

    fn fetch_file(&self, name: &str, etag: &str, size: u64) -> Result<()> {
        let blob = self.cache.model(self.repository.into()).blob_path(etag);
        let part = blob.with_extension("part");
        let mut pauses = RETRY_PAUSES.iter();
        let path = loop {
            // A file that arrived whole just before a crash would be resumed beyond its end.
            if part.metadata().is_ok_and(|m| m.len() >= size) {
                fs::remove_file(&part).map_err(|source| Error::Io { path: part.clone(), source })?;
            }
            let progress = FileProgress { listener: self.progress, name: name.into(), bytes_done: 0, bytes_total: 0 };
            match self.repo.download_with_progress(name, progress) {
                Ok(path) => break path,
                Err(error) => match pauses.next() {
                    Some(pause) if is_passing(&error) => thread::sleep(*pause),
                    _ => return Err(hub_error(self.repository, name, &error)),
                },
            }
        };
        let found = fs::metadata(&path).map_err(|source| Error::Io { path: path.clone(), source })?.len();
        if found != size {
            // Left in the cache it would be taken for the file.
            for broken in [&path, &blob] {
                fs::remove_file(broken).map_err(|source| Error::Io { path: broken.clone(), source })?;
            }
            return Err(Error::Hub(format!("{}: {name} arrived with {found} bytes of {size}", self.repository)));
        }
        Ok(())
    }
}

/// What the hub answers, if it does in time. `what`: the repository and the file that it is asked for.
fn answered<T: Send + 'static>(
    timeout: Duration,
    what: (&str, &str),
    ask: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T> {
    let (tell, told) = mpsc::sync_channel(1);
    // The library knows no limit: a thread that waits for ever ends with the process, which has nothing else to do without the answer.
    thread::spawn(move || drop(tell.send(ask())));
    match told.recv_timeout(timeout) {
        Ok(answer) => answer.map_err(|error| hub_error(what.0, what.1, &error)),
        Err(RecvTimeoutError::Timeout) => {
            Err(Error::Hub(format!("{}: the hub has not answered in {} s", named(what), timeout.as_secs())))
        }
        Err(RecvTimeoutError::Disconnected) => Err(Error::Hub(format!("{}: asking the hub has panicked", named(what)))),
    }
}

/// Passes the progress of one file on.
struct FileProgress<'a> {
    listener: &'a dyn DownloadProgress,
    name: String,
    bytes_done: u64,
    bytes_total: u64,
}

impl FileProgress<'_> {
    fn tell(&self) {
        let FileProgress { name, bytes_done, bytes_total, .. } = self;
        let event = DownloadEvent::File { name, bytes_done: *bytes_done, bytes_total: *bytes_total };
        self.listener.on_event(event);
    }
}

impl Progress for FileProgress<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        (self.bytes_done, self.bytes_total) = (0, size as u64);
    }

    fn update(&mut self, size: usize) {
        self.bytes_done += size as u64;
        self.tell();
    }

    fn finish(&mut self) {
        self.tell();
    }
}

/// Whether a text can be part of a path and stay where it is put.
fn is_plain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    !text.is_empty() && text.len() <= 128 && text.chars().all(plain)
}

/// Whether trying again may help.
fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(error) => !matches!(**error, ureq::Error::StatusCode(400..500)),
        ApiError::IoError(_) | ApiError::LockAcquisition(_) => true,
        _ => false,
    }
}

fn named((repository, file): (&str, &str)) -> String {
    if file.is_empty() { repository.to_string() } else { format!("{repository}, {file}") }
}

fn hub_error(repository: &str, file: &str, error: &ApiError) -> Error {
    let what = named((repository, file));
    let status = match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    };
    Error::Hub(match status {
        Some(401 | 403) => {
            format!("{what} does not exist, or is restricted: set HF_TOKEN to a token that may read it")
        }
        Some(404) => format!("{what} does not exist, or is private: if so, set HF_TOKEN to a token that may read it"),
        _ => format!("{what}: {error}"),
    })
}

/// The snapshot of [`REVISION`] in the cache, complete or not.
fn cached_snapshot(cache_dir: &Path, repository: &str) -> Option<PathBuf> {
    let folder = cache_dir.join(format!("models--{}", repository.replace('/', "--")));
    let commit = fs::read_to_string(folder.join("refs").join(REVISION)).ok()?;
    let commit = commit.trim();
    let is_commit = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
    let snapshot = folder.join("snapshots").join(commit);
    (is_commit && snapshot.is_dir()).then_some(snapshot)
}

/// Names of files that a snapshot lacks to be a model.
fn missing_files(snapshot: &Path) -> Result<Vec<String>> {
    let lacks = |file: &str| !snapshot.join(file).is_file();
    let mut missing: Vec<String> = SMALL_FILES[..REQUIRED_FILES].iter().filter(|f| lacks(f)).map(|f| f.to_string()).collect();
    if lacks(SINGLE_FILE) && lacks(INDEX_FILE) {
        missing.push(format!("{SINGLE_FILE} or {INDEX_FILE}"));
    }
    missing.extend(missing_shards(snapshot)?);
    Ok(missing)
}

/// Names of shards that a snapshot lacks, if it needs shards.
fn missing_shards(snapshot: &Path) -> Result<Vec<String>> {
    let index = snapshot.join(INDEX_FILE);
    if snapshot.join(SINGLE_FILE).is_file() || !index.is_file() {
        return Ok(Vec::new());
    }
    Ok(read_index(&index)?.into_keys().filter(|file| !snapshot.join(file).is_file()).collect())
}

#[cfg(test)]
mod tests;
