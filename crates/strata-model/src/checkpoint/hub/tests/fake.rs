//! A hub of one repository, on a port of this machine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;
use sha2::{Digest, Sha256};

use super::*;

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(super) const QUICK: Patience = Patience { silence: Duration::from_secs(10), pauses: &[Duration::ZERO; 3] };

/// How long a connection is held that stalls.
pub(super) const STALL: Duration = Duration::from_secs(20);

pub(super) type Files = BTreeMap<String, Vec<u8>>;

pub(super) struct Request {
    pub(super) path: String,
    pub(super) range: Option<String>,
    pub(super) has_token: bool,
}

impl Request {
    /// Whether a file is asked for, and not only what it is.
    pub(super) fn is_for(&self, name: &str) -> bool {
        self.path.ends_with(name) && !self.is_look()
    }

    pub(super) fn is_look(&self) -> bool {
        self.range.as_deref() == Some("bytes=0-0")
    }

    /// From which byte on.
    pub(super) fn start(&self) -> usize {
        self.range.as_deref().map_or(0, |range| range[6..].split('-').next().unwrap().parse().unwrap())
    }
}

#[derive(Default)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<String>,
    pub(super) body: Vec<u8>,
    /// What the body is said to have, if that is not what it has.
    pub(super) length: Option<usize>,
    /// Whether the connection is left open when the body is not all there.
    pub(super) stalls: bool,
}

impl Reply {
    pub(super) fn status(status: u16, header: &str) -> Self {
        Reply { status, headers: vec![header.into()], ..Reply::default() }
    }
}

type Hook = dyn Fn(&Request, &Files) -> Option<Reply> + Send + Sync;

/// A hub of one repository, `org/model`, on a port of this machine. Remembers what it was asked.
pub(super) struct Hub {
    pub(super) endpoint: String,
    pub(super) requests: Arc<Mutex<Vec<Request>>>,
}

impl Hub {
    pub(super) fn start(files: &Files) -> Self {
        Self::with(files, |_, _| None)
    }

    /// A hub that answers some requests as `hook` says.
    pub(super) fn with(files: &Files, hook: impl Fn(&Request, &Files) -> Option<Reply> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (files, log, hook): (_, _, Arc<Hook>) = (Arc::new(files.clone()), requests.clone(), Arc::new(hook));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, log, hook) = (files.clone(), log.clone(), hook.clone());
                thread::spawn(move || serve(stream.unwrap(), &files, &log, &*hook));
            }
        });
        Hub { endpoint, requests }
    }

    pub(super) fn options(&self, cache_dir: &Path) -> HubOptions {
        let (endpoint, token, cache_dir) = (self.endpoint.clone(), Some("hf_secret".to_string()), cache_dir.into());
        HubOptions { endpoint, token, cache_dir, offline: None, patience: QUICK }
    }

    pub(super) fn fetch(&self, cache_dir: &Path) -> Result<PathBuf> {
        fetch_model("org/model", &self.options(cache_dir), &NoProgress, &|_| Ok(()))
    }

    pub(super) fn error(&self, cache_dir: &Path) -> String {
        self.fetch(cache_dir).unwrap_err().to_string()
    }

    pub(super) fn offline(&self, cache_dir: &Path) -> Result<PathBuf> {
        let options = HubOptions { offline: Some("TRANSFORMERS_OFFLINE"), ..self.options(cache_dir) };
        fetch_model("org/model", &options, &NoProgress, &|_| Ok(()))
    }

    /// How many requests there were, since it was last asked.
    pub(super) fn count(&self) -> usize {
        self.requests.lock().unwrap().drain(..).count()
    }

    /// From which bytes on a file was asked for.
    pub(super) fn starts(&self, name: &str) -> Vec<usize> {
        self.requests.lock().unwrap().iter().filter(|request| request.is_for(name)).map(Request::start).collect()
    }
}

/// Answers one request on a connection.
fn serve(mut stream: TcpStream, files: &Files, log: &Mutex<Vec<Request>>, hook: &Hook) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(|l| l.unwrap_or_default());
    let first = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.take_while(|l| !l.is_empty()).map(|l| l.to_ascii_lowercase()).collect();
    let path = first.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default();
    let path = path.replace("%20", " ").replace("%23", "#").replace("%C3%A9", "é");
    let range = headers.iter().find_map(|h| h.strip_prefix("range: ")).map(String::from);
    let has_token = headers.iter().any(|h| h == "authorization: bearer hf_secret");
    let request = Request { path, range, has_token };
    let Reply { status, headers, body, length, stalls } = hook(&request, files).unwrap_or_else(|| reply(&request, files));
    log.lock().unwrap().push(request);
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let length = length.unwrap_or(body.len());
    let length = if headers.contains("chunked") { String::new() } else { format!("Content-Length: {length}\r\n") };
    let head = format!("HTTP/1.1 {status} \r\n{headers}{length}Connection: close\r\n\r\n");
    let _ = stream.write_all(&[head.as_bytes(), &body].concat());
    if stalls {
        let _ = stream.flush();
        thread::sleep(STALL);
    }
}

/// What a sound hub answers.
pub(super) fn reply(request: &Request, files: &Files) -> Reply {
    let listing = json!({"sha": COMMIT, "siblings": files.keys().map(|name| json!({"rfilename": name})).collect::<Vec<_>>()});
    let is_listing = ["main", COMMIT].iter().any(|r| request.path == format!("/api/models/org/model/revision/{r}"));
    match request.path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/")).and_then(|name| files.get_key_value(name)) {
        _ if !request.has_token || request.path.contains("/org/gated") => Reply::status(401, ""),
        Some((name, bytes)) => ranged(request, name, bytes),
        None if is_listing => Reply { status: 200, body: listing.to_string().into(), ..Reply::default() },
        None => Reply::status(404, ""),
    }
}

/// The part of a file that is asked for.
pub(super) fn ranged(request: &Request, name: &str, bytes: &[u8]) -> Reply {
    let (start, all) = (request.start(), bytes.len());
    if request.range.is_none() {
        let headers = vec![format!("ETag: \"{}\"", etag(name, bytes)), format!("X-Repo-Commit: {COMMIT}")];
        return Reply { status: 200, headers, body: bytes.into(), ..Reply::default() };
    }
    let end = if request.is_look() { 1 } else { all };
    let headers = vec![
        format!("ETag: \"{}\"", etag(name, bytes)),
        format!("X-Repo-Commit: {COMMIT}"),
        format!("Content-Range: bytes {start}-{}/{all}", end - 1),
    ];
    Reply { status: 206, headers, body: bytes[start..end].into(), ..Reply::default() }
}

/// The SHA-256 of weights, and something of 40 digits for other files, as if they lay in git.
pub(super) fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = format!("{:x}", Sha256::digest(bytes));
    if name.ends_with(".safetensors") { hash } else { hash[..40].into() }
}

/// A safetensors file of one tensor of so many bytes.
pub(super) fn weights(bytes: usize) -> Vec<u8> {
    let header = json!({"w": {"dtype": "U8", "shape": [bytes], "data_offsets": [0, bytes]}}).to_string();
    let data: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

pub(super) fn files(files: &[(&str, &[u8])]) -> Files {
    files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect()
}

/// A model in one file.
pub(super) fn model() -> Files {
    files(&[("config.json", b"{}"), ("tokenizer.json", b"{\"t\": 1}"), (SINGLE_FILE, &weights(3000))])
}
