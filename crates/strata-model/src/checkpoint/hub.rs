//! Models of the Hugging Face hub: found in its local cache, or downloaded into it.
//!
//! The cache is the one that Python's `huggingface_hub` uses, and so are the variables of the environment: `HF_HOME`, `HF_HUB_CACHE`,
//! `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. A model of which everything is in the cache, or known not to exist, is used without a word to the network.
//!
//! `options` is what the environment says, `http` how a hub is asked, `cache` what lies where. Here is which files are needed, and in which order.

mod cache;
mod http;
mod options;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::Body;
use ureq::http::{HeaderMap, Response, header};

use self::cache::{Arrival, CHUNK_BYTES, Part, Remote, RepositoryCache, fault};
use self::http::{Failure, Http, text};
pub use self::options::{HubOptions, Patience};
use super::safetensors::{INDEX_FILE, SINGLE_FILE, read_index};
use crate::{Error, Result};

/// The file that every model has.
const CONFIG_FILE: &str = "config.json";
/// Files that change what a model is or says, where a repository has them. They come before the weights.
const OPTIONAL_FILES: [&str; 6] = [
    "tokenizer.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
];
/// The revision that is used.
const REVISION: &str = "main";
/// The longest name of a repository or organisation, as the hub has it.
const NAME_CHARS_MAX: usize = 96;
/// The longest list of a repository's files.
const LISTING_BYTES_MAX: u64 = 32 << 20;
/// How often a file is fetched whose SHA-256 is wrong.
const ARRIVALS_MAX: usize = 2;
/// How long the hub is waited for where a start can do without it.
const OPTIONAL_SILENCE: Duration = Duration::from_secs(10);

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownloadEvent<'a> {
    /// The hub is about to be asked what there is.
    Asking {
        /// Its address.
        endpoint: &'a str,
    },
    /// Files are about to be downloaded. Occurs more than once: weights come after what says whether they can be used.
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

/// The directory of a model's files, downloaded if they are not all in the cache. Blocks. `check` is asked of a directory with everything but the weights whether they are worth
/// downloading.
///
/// # Errors
/// If the name is not one, the hub has no such model or does not let us have it, cannot be reached, or must not be reached; and those of `check`.
pub fn fetch_model(
    repository: &str,
    options: &HubOptions,
    progress: &dyn DownloadProgress,
    check: &dyn Fn(&Path) -> Result<()>,
) -> Result<PathBuf> {
    if !is_repository_name(repository) {
        return Err(Error::Hub(format!("{repository:?} is not a repository name such as Qwen/Qwen3-0.6B")));
    }
    let cache = RepositoryCache::new(&options.cache_dir, repository)?;
    let commit = cache.commit(REVISION);
    let lacking = match &commit {
        Some(commit) => needed_faults(&cache.snapshot(commit))?,
        None => vec!["everything".into()],
    };
    match commit {
        Some(commit) if lacking.is_empty() => {
            let snapshot = cache.snapshot(&commit);
            let is_unknown = |name: &&str| !cache.is_known_absent(&commit, name) && fault(&snapshot.join(name)).is_some();
            let unknown: Vec<&str> = OPTIONAL_FILES.into_iter().filter(is_unknown).collect();
            if let Some(reason) = complete(&cache, repository, &commit, &unknown, options, progress) {
                let names = unknown.join(", ");
                tracing::warn!(
                    "{repository} is used without {names}, which the cache lacks and the repository may have: {reason}"
                );
            }
            Ok(snapshot)
        }
        _ => match options.offline {
            Some(variable) => {
                let (place, lacking) = (options.cache_dir.display(), lacking.join(", "));
                Err(Error::Hub(format!("{variable} is set, and of {repository} the cache {place} lacks {lacking}")))
            }
            None => Download::begin(&cache, repository, REVISION, options, progress)?.run(check),
        },
    }
}

/// Looks for the optional files of a commit that are not in the cache. Why they could not be looked for, if so: a model that can be used is used.
fn complete(
    cache: &RepositoryCache,
    repository: &str,
    commit: &str,
    unknown: &[&str],
    options: &HubOptions,
    progress: &dyn DownloadProgress,
) -> Option<String> {
    if unknown.is_empty() {
        return None;
    }
    if let Some(variable) = options.offline {
        return Some(format!("{variable} is set"));
    }
    let patience = Patience { silence: options.patience.silence.min(OPTIONAL_SILENCE), pauses: &[] };
    let options = HubOptions { patience, ..options.clone() };
    let looked =
        Download::begin(cache, repository, commit, &options, progress).and_then(|download| download.fetch_optional(&[]));
    looked.err().map(|error| error.to_string())
}

/// A download of one commit of a repository.
struct Download<'a> {
    cache: &'a RepositoryCache,
    repository: &'a str,
    progress: &'a dyn DownloadProgress,
    http: Http,
    commit: String,
    /// Files of the commit.
    files: Vec<String>,
}

impl<'a> Download<'a> {
    /// Asks the hub for the commit and its files.
    fn begin(
        cache: &'a RepositoryCache,
        repository: &'a str,
        revision: &str,
        options: &HubOptions,
        progress: &'a dyn DownloadProgress,
    ) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Listing {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let http = Http::new(options)?;
        progress.on_event(DownloadEvent::Asking { endpoint: &http.shown_endpoint() });
        let path = format!("api/models/{repository}/revision/{revision}");
        let listing: Listing = http.retrying(|| {
            let mut answer = http.get(repository, &path, None)?;
            let body = answer.response.body_mut().with_config().limit(LISTING_BYTES_MAX);
            // Parsed when it is here: what breaks on the way is not taken for what is no JSON.
            let listing = body.read_to_vec().map_err(|error| http.failure(repository, &answer.host, error))?;
            let malformed =
                |error| Failure::lasting(format!("{repository}: {} answers no list of files: {error}", answer.host));
            serde_json::from_slice(&listing).map_err(malformed)
        })?;
        if !is_plain(&listing.sha) {
            return Err(Error::Hub(format!("{repository}: the hub names commit {:?}", listing.sha)));
        }
        let files = listing.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Download { cache, repository, progress, http, commit: listing.sha, files })
    }

    fn run(self, check: &dyn Fn(&Path) -> Result<()>) -> Result<PathBuf> {
        let snapshot = self.cache.snapshot(&self.commit);
        // One file or shards, as transformers prefers them.
        let weights = if self.holds(SINGLE_FILE) { SINGLE_FILE } else { INDEX_FILE };
        self.require([(CONFIG_FILE, CONFIG_FILE), (weights, "model.safetensors or model.safetensors.index.json")])?;
        let first: &[&str] = if weights == INDEX_FILE { &[CONFIG_FILE, INDEX_FILE] } else { &[CONFIG_FILE] };
        self.fetch_optional(first)?;
        check(&snapshot)?;
        let weights: Vec<String> = match weights {
            INDEX_FILE => read_index(&snapshot.join(INDEX_FILE))?.into_keys().collect(),
            single => vec![single.into()],
        };
        self.require(weights.iter().map(|name| (&**name, &**name)))?;
        self.fetch(weights.iter().map(String::as_str))?;
        self.cache.set_commit(REVISION, &self.commit)?;
        Ok(snapshot)
    }

    fn holds(&self, name: &str) -> bool {
        self.files.iter().any(|file| file == name)
    }

    /// Checks that the repository holds files; each comes with what to call it.
    fn require<'n>(&self, names: impl IntoIterator<Item = (&'n str, &'n str)>) -> Result<()> {
        let missing: Vec<&str> = names.into_iter().filter(|(name, _)| !self.holds(name)).map(|(_, called)| called).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::Hub(format!("{} does not hold {}", self.repository, missing.join(", "))))
    }

    /// Downloads what must be there, and the optional files that are; notes which are not.
    fn fetch_optional(&self, required: &[&str]) -> Result<()> {
        let (present, absent): (Vec<&str>, Vec<&str>) = OPTIONAL_FILES.into_iter().partition(|name| self.holds(name));
        absent.iter().for_each(|name| self.cache.note_absent(&self.commit, name));
        self.fetch(required.iter().copied().chain(present))
    }

    /// Downloads those of the files into the snapshot that are not there or damaged.
    fn fetch<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<()> {
        let snapshot = self.cache.snapshot(&self.commit);
        let mut files = Vec::new();
        for name in names.filter(|name| fault(&snapshot.join(name)).is_some()) {
            files.push(self.http.retrying(|| self.look_up(name))?);
        }
        if files.is_empty() {
            return Ok(());
        }
        let bytes = files.iter().map(|file| file.bytes).sum();
        self.progress.on_event(DownloadEvent::Started { files: files.len(), bytes });
        for remote in &files {
            let _lock = self.cache.lock(&remote.etag, &remote.name)?;
            let path = snapshot.join(&remote.name);
            if fault(&path).is_none() {
                // Another process has brought it meanwhile.
                continue;
            }
            let is_suspect = path.is_file();
            if !self.cache.has_blob(remote, is_suspect)? {
                self.fetch_blob(remote)?;
            }
            self.cache.link(&self.commit, remote)?;
        }
        self.progress.on_event(DownloadEvent::Finished);
        Ok(())
    }

    /// Asks what the hub says of a file: by its first byte, as wherever the hub leads gives files and need not answer to anything else.
    fn look_up(&self, name: &str) -> Result<Remote, Failure> {
        let what = self.named(name);
        let mut answer = self.http.get(&what, &self.path(name), Some("bytes=0-0"))?;
        if answer.response.status() == 416 && text(&answer.hub_headers, "x-repo-commit").is_none() {
            // Of an empty file there is no first byte, and such an answer need not say what it is of.
            answer = self.http.get(&what, &self.path(name), None)?;
        }
        let hub = &answer.hub_headers;
        // Python's library takes all that it is not for from either end.
        let etag = text(hub, "x-linked-etag").or_else(|| text(hub, header::ETAG.as_str())).unwrap_or_default();
        let etag = etag.trim_start_matches(['W', '/']).trim_matches('"');
        let commit = text(hub, "x-repo-commit").unwrap_or_default();
        // Both become names of files.
        if !is_plain(etag) || commit != self.commit {
            let told = format!("{etag:?} of commit {commit:?}, where it should be of {}", self.commit);
            return Err(Failure::lasting(format!("{what}: the hub {} says that it is {told}", self.http.shown_endpoint())));
        }
        let linked = text(hub, "x-linked-size").and_then(|size| size.parse().ok());
        let Some(bytes) = linked.or_else(|| all_bytes(&answer.response)) else {
            return Err(Failure::lasting(format!("{what}: {} does not say how large it is", answer.host)));
        };
        Ok(Remote { name: name.into(), etag: etag.into(), bytes })
    }

    /// Downloads a blob. Under its lock.
    fn fetch_blob(&self, remote: &Remote) -> Result<()> {
        let what = self.named(&remote.name);
        let mut found = String::new();
        for _ in 0..ARRIVALS_MAX {
            let mut part = self.cache.receive(remote)?;
            let (mut attempts, mut furthest) = (self.http.attempts(), part.bytes);
            while let Err(failure) = self.receive(&what, remote, &mut part) {
                // However often a connection breaks: as long as there is more each time, it is worth another.
                if part.bytes > furthest {
                    (attempts, furthest) = (self.http.attempts(), part.bytes);
                }
                attempts.wait(failure)?;
            }
            match part.finish()? {
                Arrival::Kept => return Ok(()),
                Arrival::Damaged(sha256) => found = sha256,
            }
            tracing::warn!("{what} has arrived with SHA-256 {found} in the place of {}", remote.etag);
        }
        let expected = &remote.etag;
        Err(Error::Hub(format!(
            "{what}: its SHA-256 should be {expected}, and {ARRIVALS_MAX} times what arrived had another, {found}"
        )))
    }

    /// Receives what a blob lacks, over one connection.
    fn receive(&self, what: &str, remote: &Remote, part: &mut Part<'_>) -> Result<(), Failure> {
        let tell = |bytes_done| {
            let event = DownloadEvent::File { name: &remote.name, bytes_done, bytes_total: remote.bytes };
            self.progress.on_event(event);
        };
        tell(part.bytes);
        if part.bytes == remote.bytes {
            return Ok(());
        }
        let answer = self.http.get(what, &self.path(&remote.name), Some(&format!("bytes={}-", part.bytes)))?;
        let (host, all) = (answer.host, remote.bytes);
        if let Some(other) = all_bytes(&answer.response).filter(|bytes| *bytes != all) {
            return Err(Failure::lasting(format!(
                "{what}: the hub says that it has {all} bytes, and {host} that it has {other}"
            )));
        }
        match (answer.response.status().as_u16(), content_range(answer.response.headers())) {
            (206, Some((start, _))) if start == part.bytes => {}
            // All of it, whatever was asked for.
            (200, _) => part.begin_anew()?,
            (status, _) => {
                let asked = part.bytes;
                part.begin_anew()?;
                return Err(Failure::passing(format!("{what}: {host} does not send what begins at byte {asked} ({status})")));
            }
        }
        if let Some(encoding) = text(answer.response.headers(), header::CONTENT_ENCODING.as_str())
            && encoding != "identity"
        {
            return Err(Failure::lasting(format!(
                "{what}: {host} sends it in the encoding {encoding:?}, which was not asked for"
            )));
        }
        let mut body = answer.response.into_body().into_reader();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = body.read(&mut chunk).map_err(|error| {
                let error = error.downcast::<ureq::Error>().unwrap_or_else(ureq::Error::Io);
                self.http.failure(what, &host, error)
            })?;
            if part.bytes + read as u64 > all {
                part.begin_anew()?;
                return Err(Failure::lasting(format!("{what} arrives from {host} with more than its {all} bytes")));
            }
            if read == 0 && part.bytes < all {
                return Err(Failure::passing(format!("{what} arrived from {host} with {} bytes of {all}", part.bytes)));
            }
            if read == 0 {
                return Ok(());
            }
            part.write(&chunk[..read])?;
            tell(part.bytes);
        }
    }

    /// A file's address, behind the hub's.
    fn path(&self, name: &str) -> String {
        format!("{}/resolve/{}/{}", self.repository, self.commit, escaped(name))
    }

    /// A file in messages.
    fn named(&self, name: &str) -> String {
        format!("{}, {name}", self.repository)
    }
}

/// Whether a text can be part of a path and stay where it is put.
fn is_plain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    !text.is_empty() && text.len() <= 128 && text.chars().all(plain)
}

/// A file's name as part of an address.
fn escaped(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(escape).collect()
}

/// The first byte that an answer says to bring, and how many there are in all: of `bytes 5-9/10` and `bytes */10`, which brings none.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, all) = text(headers, header::CONTENT_RANGE.as_str())?.strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-').map_or(Some(u64::MAX), |(start, _)| start.parse().ok())?;
    Some((start, all.parse().ok()))
}

/// How many bytes a file has of which an answer brings some or all.
fn all_bytes(response: &Response<Body>) -> Option<u64> {
    match response.status().as_u16() {
        200 => text(response.headers(), header::CONTENT_LENGTH.as_str())?.parse().ok(),
        _ => content_range(response.headers())?.1,
    }
}

/// What is wrong with the files of a snapshot that a model cannot be without.
fn needed_faults(snapshot: &Path) -> Result<Vec<String>> {
    let of = |name: &str| fault(&snapshot.join(name));
    let mut faults: Vec<String> = of(CONFIG_FILE).into_iter().collect();
    let is_there = |name: &str| snapshot.join(name).is_file();
    if is_there(SINGLE_FILE) {
        faults.extend(of(SINGLE_FILE));
    } else if !is_there(INDEX_FILE) {
        faults.push(format!("{SINGLE_FILE} or {INDEX_FILE}"));
    } else if let Some(index) = of(INDEX_FILE) {
        faults.push(index);
    } else {
        faults.extend(read_index(&snapshot.join(INDEX_FILE))?.keys().filter_map(|shard| of(shard)));
    }
    Ok(faults)
}

#[cfg(test)]
mod tests;
