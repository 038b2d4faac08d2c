use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub of one repository, `org/model`, on a port of this machine. Remembers what it was asked.
struct Hub {
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn start(files: &[(&str, &str)]) -> Self {
        let files: BTreeMap<String, String> = files.iter().map(|(n, t)| (n.to_string(), t.to_string())).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (files, log) = (Arc::new(files), requests.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, log) = (files.clone(), log.clone());
                thread::spawn(move || serve(stream.unwrap(), &files, &log));
            }
        });
        Hub { endpoint, requests }
    }

    fn options(&self, cache_dir: &Path) -> HubOptions {
        let token = Some("hf_secret".to_string());
        HubOptions {
            endpoint: self.endpoint.clone(),
            token,
            cache_dir: cache_dir.into(),
            offline: false,
            answer_timeout: ANSWER_TIMEOUT,
        }
    }
}

/// Answers one request on a connection.
fn serve(stream: TcpStream, files: &BTreeMap<String, String>, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(|l| l.unwrap_or_default());
    let request = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.take_while(|l| !l.is_empty()).map(|l| l.to_ascii_lowercase()).collect();
    let authorised = headers.iter().any(|h| h == "authorization: bearer hf_secret");
    log.lock().unwrap().push(request.clone());
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    let listing = || files.keys().map(|name| json!({"rfilename": name})).collect::<Vec<_>>();
    let file = path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/")).and_then(|name| files.get_key_value(name));
    let (status, extra, body) = match file {
        _ if path.contains("/org/gated") || !authorised => ("401 Unauthorized", String::new(), String::new()),
        Some((name, text)) => {
            let start = headers.iter().find_map(|h| h.strip_prefix("range: bytes=")?.split('-').next()?.parse().ok());
            let one = headers.iter().any(|h| h == "range: bytes=0-0");
            let body = if one { text[..1].to_string() } else { text[start.unwrap_or(0)..].to_string() };
            let etag = name.replace('.', "-");
            // What the file itself asks for is announced and not sent.
            let size = text.len() + usize::from(text.contains("truncated")) * 5;
            let range = format!("Content-Range: bytes 0-0/{size}");
            ("206 Partial Content", format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n{range}\r\n"), body)
        }
        None if path == "/api/models/org/model/revision/main" => {
            ("200 OK", String::new(), json!({"sha": COMMIT, "siblings": listing()}).to_string())
        }
        None => ("404 Not Found", String::new(), String::new()),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{extra}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    let body = if method == "HEAD" { "" } else { &body };
    let _ = (&stream).write_all((head + body).as_bytes());
}

/// Remembers every event as text.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl DownloadProgress for Recorder {
    fn on_event(&self, event: DownloadEvent<'_>) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

fn index_of(shards: &[&str]) -> String {
    let weight_map: BTreeMap<String, &str> = shards.iter().enumerate().map(|(i, s)| (format!("w{i}"), *s)).collect();
    json!({"weight_map": weight_map}).to_string()
}

fn fetch_error(repository: &str, options: &HubOptions) -> String {
    fetch_model(repository, options, &NoProgress).unwrap_err().to_string()
}

#[test]
fn a_model_is_downloaded_once_and_then_found_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&[
        ("config.json", "{}"),
        ("tokenizer.json", "{\"t\": 1}"),
        ("model.safetensors", "weights"),
        ("preprocessor_config.json", "{\"p\": 2}"),
        ("processor_config.json", "{}"),
        ("pytorch_model.bin", "pickles"),
        ("README.md", "words"),
    ]);
    let recorder = Recorder::default();
    let snapshot = fetch_model("org/model", &hub.options(cache.path()), &recorder).unwrap();
    assert_eq!(fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
    assert_eq!(fs::read_to_string(snapshot.join("tokenizer.json")).unwrap(), "{\"t\": 1}");
    assert_eq!(fs::read_to_string(snapshot.join("preprocessor_config.json")).unwrap(), "{\"p\": 2}");
    assert!(snapshot.join("processor_config.json").is_file());
    assert!(!snapshot.join("pytorch_model.bin").exists());
    let events = recorder.0.lock().unwrap();
    assert_eq!(events[0], format!("Asking {{ endpoint: {:?} }}", hub.endpoint));
    assert_eq!(events[1], "Started { files: 5, bytes: 27 }");
    assert!(events.contains(&"File { name: \"model.safetensors\", bytes_done: 7, bytes_total: 7 }".to_string()), "{events:?}");
    assert_eq!(events.last().unwrap(), "Finished");

    let asked = hub.requests.lock().unwrap().len();
    assert_eq!(fetch_model("org/model", &hub.options(cache.path()), &NoProgress).unwrap(), snapshot);
    assert_eq!(hub.requests.lock().unwrap().len(), asked, "a model in the cache needs no network");
    let offline = HubOptions { offline: true, ..hub.options(cache.path()) };
    assert_eq!(fetch_model("org/model", &offline, &NoProgress).unwrap(), snapshot);
}

#[test]
fn shards_that_the_index_names_are_downloaded_and_resumed() {
    let cache = tempfile::tempdir().unwrap();
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let index = index_of(&[one, two]);
    let hub = Hub::start(&[
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors.index.json", &index),
        (one, "1"),
        (two, "2"),
        ("model-00003-of-00003.safetensors", "stray"),
    ]);
    let snapshot = fetch_model("org/model", &hub.options(cache.path()), &NoProgress).unwrap();
    assert!(snapshot.join(one).is_file() && snapshot.join(two).is_file());
    assert!(!snapshot.join("model-00003-of-00003.safetensors").exists());
    fs::remove_file(snapshot.join(two)).unwrap();
    let offline = HubOptions { offline: true, ..hub.options(cache.path()) };
    let error = fetch_error("org/model", &offline);
    assert!(error.contains("HF_HUB_OFFLINE") && error.ends_with(two), "{error}");
    fetch_model("org/model", &hub.options(cache.path()), &NoProgress).unwrap();
    assert!(snapshot.join(two).is_file());
}

#[test]
fn what_a_repository_lacks_is_named() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&[("config.json", "{}"), ("pytorch_model.bin", "pickles")]);
    let error = fetch_error("org/model", &hub.options(cache.path()));
    assert!(error.contains("org/model does not hold tokenizer.json, model.safetensors or"), "{error}");
}

#[test]
fn an_index_from_the_hub_cannot_reach_outside_its_directory() {
    let cache = tempfile::tempdir().unwrap();
    let index = index_of(&["../../evil.safetensors"]);
    let hub = Hub::start(&[("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors.index.json", &index)]);
    assert!(fetch_error("org/model", &hub.options(cache.path())).contains("not a plain *.safetensors file name"));
}

#[test]
fn absent_and_restricted_models_are_explained() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&[]);
    let error = fetch_error("org/other", &hub.options(cache.path()));
    assert!(error.contains("org/other") && error.contains("does not exist"), "{error}");
    let error = fetch_error("org/gated", &hub.options(cache.path()));
    assert!(error.contains("HF_TOKEN"), "{error}");
    let offline = HubOptions { offline: true, ..hub.options(cache.path()) };
    assert!(fetch_error("org/model", &offline).contains("lacks everything"));
}

#[test]
fn a_file_that_arrives_short_does_not_stay_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&[("config.json", "{}"), ("tokenizer.json", "truncated"), ("model.safetensors", "w")]);
    for _ in 0..2 {
        let error = fetch_error("org/model", &hub.options(cache.path()));
        assert!(error.contains("tokenizer.json arrived with 9 bytes of 14"), "{error}");
    }
    assert!(cached_snapshot(cache.path(), "org/model").is_none());
}

#[test]
fn a_download_that_broke_off_goes_on_where_it_was() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&[("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights")]);
    let blobs = cache.path().join("models--org--model/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("model-safetensors.part"), "WEI").unwrap();
    fs::write(blobs.join("config-json.part"), "{}").unwrap();
    let snapshot = fetch_model("org/model", &hub.options(cache.path()), &NoProgress).unwrap();
    assert_eq!(fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "WEIghts");
    assert_eq!(fs::read_to_string(snapshot.join("config.json")).unwrap(), "{}");
}

#[test]
fn an_unreachable_hub_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let options =
        HubOptions { endpoint, token: None, cache_dir: cache.path().into(), offline: false, answer_timeout: ANSWER_TIMEOUT };
    assert!(fetch_error("org/model", &options).contains("org/model"));
}

#[test]
fn a_hub_that_does_not_answer_is_an_error_in_time() {
    let cache = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let (cache_dir, answer_timeout) = (cache.path().into(), Duration::from_secs(1));
    let options = HubOptions { endpoint, token: None, cache_dir, offline: false, answer_timeout };
    let message = fetch_error("org/model", &options);
    assert!(message.contains("org/model: the hub has not answered in 1 s"), "{message}");
}

#[test]
fn only_plain_names_are_repositories() {
    for name in ["Qwen/Qwen3-0.6B", "a/b", "org.x/m_1"] {
        assert!(is_repository_name(name), "{name}");
    }
    for name in ["gpt2", "a/b/c", "../etc", "a/..", "/b", "a/", "a b/c", "-a/b", "a/b--c", "a/.b", "a/b?", &"a/b".repeat(100)] {
        assert!(!is_repository_name(name), "{name}");
    }
}

#[test]
fn offline_is_read_as_the_python_library_reads_it() {
    assert!(["1", "ON", "yes", "True"].iter().all(|v| is_true(v)));
    assert!(["", "0", "off", "no", "2"].iter().all(|v| !is_true(v)));
}
