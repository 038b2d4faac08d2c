use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use serde_json::json;

use super::http::{joined, shown};
use super::options::{expanded, in_one_line, is_true, offline};
use super::*;
use crate::ModelSource;

mod fake;

use fake::*;

fn blob_of(name: &str, cache_dir: &Path) -> PathBuf {
    cache_dir.join("models--org--model/blobs").join(etag(name, &model()[name]))
}

fn index_of(shards: &[&str]) -> Vec<u8> {
    let weight_map: BTreeMap<String, &str> = shards.iter().enumerate().map(|(i, s)| (format!("w{i}"), *s)).collect();
    json!({"weight_map": weight_map}).to_string().into()
}

/// Remembers every event as text.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl DownloadProgress for Recorder {
    fn on_event(&self, event: DownloadEvent<'_>) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

#[test]
fn a_model_is_downloaded_once_and_then_found_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let mut all = model();
    all.extend(files(&[
        ("preprocessor_config.json", b"{\"p\": 2}"),
        ("processor_config.json", b"{}"),
        ("pytorch_model.bin", b"pickles"),
        ("README.md", b"words"),
    ]));
    let hub = Hub::start(&all);
    let recorder = Recorder::default();
    let snapshot = fetch_model("org/model", &hub.options(cache.path()), &recorder, &|_| Ok(())).unwrap();
    for name in ["config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json", SINGLE_FILE] {
        assert_eq!(fs::read(snapshot.join(name)).unwrap(), all[name]);
        assert_eq!(fs::read_link(snapshot.join(name)).unwrap(), Path::new("../../blobs").join(etag(name, &all[name])));
    }
    assert!(!snapshot.join("pytorch_model.bin").exists());
    assert_eq!(fs::read_to_string(cache.path().join("models--org--model/refs/main")).unwrap(), COMMIT);
    let events = recorder.0.lock().unwrap();
    assert_eq!(events[0], format!("Asking {{ endpoint: {:?} }}", hub.endpoint));
    assert_eq!(events[1], "Started { files: 4, bytes: 20 }");
    let bytes = all[SINGLE_FILE].len();
    let last = format!("File {{ name: \"model.safetensors\", bytes_done: {bytes}, bytes_total: {bytes} }}");
    assert_eq!(events[events.len() - 2..], [last, "Finished".into()]);

    hub.count();
    assert_eq!(hub.fetch(cache.path()).unwrap(), snapshot);
    assert_eq!(hub.count(), 0, "a model in the cache needs no network");
    assert_eq!(hub.offline(cache.path()).unwrap(), snapshot);
}

#[test]
fn shards_that_the_index_names_are_downloaded_and_resumed() {
    let cache = tempfile::tempdir().unwrap();
    let (one, two) = ("model-00001-of-00002.safetensors", "model 2#é.safetensors");
    let (index, first, second) = (index_of(&[one, two]), weights(10), weights(20));
    let hub = Hub::start(&files(&[
        ("config.json", b"{}"),
        (INDEX_FILE, &index),
        (one, &first),
        (two, &second),
        ("model-00003-of-00003.safetensors", b"stray"),
    ]));
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert!(snapshot.join(one).is_file() && snapshot.join(two).is_file());
    assert!(!snapshot.join("model-00003-of-00003.safetensors").exists());
    fs::remove_file(snapshot.join(two)).unwrap();
    let error = hub.offline(cache.path()).unwrap_err().to_string();
    assert!(error.contains("TRANSFORMERS_OFFLINE is set") && error.ends_with(two), "{error}");
    hub.fetch(cache.path()).unwrap();
    assert!(snapshot.join(two).is_file());
}

#[test]
fn what_a_repository_lacks_is_named_before_anything_is_downloaded() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&files(&[("tokenizer.json", b"{}"), ("pytorch_model.bin", b"pickles")]));
    let error = hub.error(cache.path());
    assert!(error.contains("org/model does not hold config.json, model.safetensors or model.safetensors.index"), "{error}");
    assert_eq!(hub.count(), 1);
    let (index, shard) = (index_of(&["a.safetensors", "b.safetensors"]), weights(1));
    let hub = Hub::start(&files(&[("config.json", b"{}"), (INDEX_FILE, &index), ("a.safetensors", &shard)]));
    assert!(hub.error(cache.path()).ends_with("org/model does not hold b.safetensors"));
    assert!(hub.starts("a.safetensors").is_empty());
}

#[test]
fn a_model_without_a_tokenizer_is_a_model() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&files(&[("config.json", b"{}"), (SINGLE_FILE, &weights(1))]));
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert!(!snapshot.join("tokenizer.json").exists());
    assert_eq!(hub.offline(cache.path()).unwrap(), snapshot);
}

#[test]
fn weights_are_not_downloaded_of_a_model_that_is_refused() {
    let check = |source: &ModelSource| {
        assert!(source.directory().unwrap().join("tokenizer.json").is_file());
        Err(Error::Config("no room".into()))
    };
    for (config, told) in [("{\"model_type\": \"gpt_neox\"}", "gpt_neox"), (crate::embedded::CONFIG, "no room")] {
        let (cache, mut all) = (tempfile::tempdir().unwrap(), model());
        all.insert("config.json".into(), config.into());
        let hub = Hub::start(&all);
        let refused = ModelSource::resolve_with("org/model", &hub.options(cache.path()), &NoProgress, &check);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        assert!(hub.requests.lock().unwrap().iter().all(|request| !request.path.contains(SINGLE_FILE)));
    }
}

#[test]
fn names_from_the_hub_cannot_reach_outside_their_directory() {
    let cache = tempfile::tempdir().unwrap();
    let index = index_of(&["../../evil.safetensors"]);
    let hub = Hub::start(&files(&[("config.json", b"{}"), (INDEX_FILE, &index)]));
    assert!(hub.error(cache.path()).contains("not a plain *.safetensors file name"));
    for header in ["ETag: \"../../evil\"", "X-Repo-Commit: ../../evil"] {
        let hub = Hub::with(&model(), move |request, files| {
            let reply = reply(request, files);
            let others = reply.headers.into_iter().filter(|h| h.split(':').next() != header.split(':').next());
            request.is_look().then(|| Reply { headers: others.chain([header.into()]).collect(), ..reply })
        });
        let cache = tempfile::tempdir().unwrap();
        let error = hub.error(cache.path());
        assert!(error.contains("org/model, config.json: the hub") && error.contains("../../evil"), "{error}");
    }
}

#[test]
fn absent_and_restricted_models_are_explained() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&Files::new());
    let error = |name| fetch_model(name, &hub.options(cache.path()), &NoProgress, &|_| Ok(())).unwrap_err().to_string();
    let absent = error("org/other");
    assert!(absent.contains("org/other does not exist") && absent.contains(&hub.endpoint), "{absent}");
    assert!(error("org/gated").contains("HF_TOKEN"));
    assert!(hub.offline(cache.path()).unwrap_err().to_string().contains("lacks everything"));
}

#[test]
fn the_token_stays_with_the_hub() {
    let cdn = Hub::with(&model(), |request, files| {
        let signed = Reply::status(400, "X-Error: two ways to say who asks");
        Some(if request.has_token { signed } else { ranged(request, SINGLE_FILE, &files[SINGLE_FILE]) })
    });
    let elsewhere = format!("Location: {}/signed", cdn.endpoint);
    let all = model();
    let hub = Hub::with(&model(), move |request, _| {
        let (hash, bytes) = (etag(SINGLE_FILE, &all[SINGLE_FILE]), all[SINGLE_FILE].len());
        let told = [format!("X-Linked-Etag: \"{hash}\""), format!("X-Linked-Size: {bytes}")];
        let told = told.into_iter().chain([format!("X-Repo-Commit: {COMMIT}"), "ETag: \"other\"".into()]);
        match &*request.path {
            path if path.ends_with(SINGLE_FILE) => Some(Reply::status(307, "Location: here?and=there://")),
            path if path.ends_with("/here") => {
                let headers = told.chain([elsewhere.clone()]).collect();
                Some(Reply { status: 302, headers, ..Reply::default() })
            }
            _ => None,
        }
    });
    let cache = tempfile::tempdir().unwrap();
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), model()[SINGLE_FILE]);
    assert!(cdn.requests.lock().unwrap().iter().all(|request| !request.has_token));
    assert!(hub.requests.lock().unwrap().iter().all(|request| request.has_token));
    assert_eq!(cdn.count(), 2);
}

#[test]
fn a_redirect_is_followed_so_far() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::with(&model(), |_, _| Some(Reply::status(302, "Location: /round/and/round")));
    let error = hub.error(cache.path());
    assert!(error.contains("from address to address") && error.contains(&hub.endpoint), "{error}");
    assert_eq!(hub.count(), 11);
    for (header, told) in
        [("X-None: 1", "answers 302"), ("Location: file:///etc/passwd", "file:///etc/passwd"), ("Location: /a b", "no address")]
    {
        let hub = Hub::with(&model(), move |_, _| Some(Reply::status(302, header)));
        let error = hub.error(cache.path());
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn addresses_are_joined_as_they_should_and_shown_without_secrets() {
    let from = "https://hub.example:8000/a/b?c=d".parse().unwrap();
    for (location, to) in [
        ("http://else.example/x", "http://else.example/x"),
        ("//else.example/x", "https://else.example/x"),
        ("/x?to=http://y", "https://hub.example:8000/x?to=http://y"),
        ("x", "https://hub.example:8000/a/x"),
        ("../../c/./d/..?x=/../y", "https://hub.example:8000/c/?x=/../y"),
        ("?e=f", "https://hub.example:8000/a/b?e=f"),
    ] {
        assert_eq!(joined(&from, location), to);
    }
    assert_eq!(shown("https://me:secret@hub.example/prefix?X-Signature=secret"), "https://hub.example/prefix");
}

#[test]
fn weights_that_arrive_with_another_hash_are_fetched_once_more() {
    let cache = tempfile::tempdir().unwrap();
    let corrupted = |until: usize| {
        let arrivals = AtomicUsize::new(0);
        move |request: &Request, files: &Files| {
            let is_spoilt = request.is_for(SINGLE_FILE) && arrivals.fetch_add(1, Ordering::Relaxed) < until;
            let mut reply = reply(request, files);
            is_spoilt.then(|| {
                *reply.body.last_mut().unwrap() ^= 1;
                reply
            })
        }
    };
    let hub = Hub::with(&model(), corrupted(2));
    let error = hub.error(cache.path());
    let mut spoilt = model()[SINGLE_FILE].clone();
    *spoilt.last_mut().unwrap() ^= 1;
    for part in ["org/model, model.safetensors", &etag(SINGLE_FILE, &model()[SINGLE_FILE]), &etag(SINGLE_FILE, &spoilt)] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
    assert_eq!(hub.starts(SINGLE_FILE), [0, 0]);
    assert!(!blob_of(SINGLE_FILE, cache.path()).exists());
    let snapshot = Hub::with(&model(), corrupted(1)).fetch(cache.path()).unwrap();
    assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), model()[SINGLE_FILE]);
}

#[test]
fn a_file_that_arrives_short_does_not_stay_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::with(&model(), |request, files| {
        let mut reply = reply(request, files);
        if let Some(range) = reply.headers.get_mut(2) {
            *range = format!("Content-Range: bytes {}-7/13", request.start());
        }
        request.path.ends_with("tokenizer.json").then_some(reply)
    });
    for _ in 0..2 {
        let error = hub.error(cache.path());
        assert!(error.contains("tokenizer.json arrived from") && error.ends_with("with 8 bytes of 13"), "{error}");
    }
    assert!(RepositoryCache::new(cache.path(), "org/model").unwrap().commit(REVISION).is_none());
}

#[test]
fn sizes_that_disagree_are_an_error() {
    for size in [5, 5000] {
        let hub = Hub::with(&model(), move |request, files| {
            let mut reply = reply(request, files);
            reply.headers.push(format!("X-Linked-Size: {size}"));
            (request.is_look() && request.path.ends_with(SINGLE_FILE)).then_some(reply)
        });
        let (cache, bytes) = (tempfile::tempdir().unwrap(), model()[SINGLE_FILE].len());
        let error = hub.error(cache.path());
        assert!(error.contains(&format!("has {size} bytes")) && error.ends_with(&format!("has {bytes}")), "{error}");
        assert_eq!(hub.starts(SINGLE_FILE), [0]);
    }
}

#[test]
fn a_download_that_broke_off_goes_on_where_it_was() {
    let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&model()));
    let all = &model()[SINGLE_FILE];
    let part = blob_of(SINGLE_FILE, cache.path()).with_extension("part");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &all[..1000]).unwrap();
    // What no hash checks is not trusted.
    fs::write(blob_of("tokenizer.json", cache.path()).with_extension("part"), "\0\0").unwrap();
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), *all);
    assert_eq!(fs::read(snapshot.join("tokenizer.json")).unwrap(), model()["tokenizer.json"]);
    assert_eq!((hub.starts(SINGLE_FILE), hub.starts("tokenizer.json")), (vec![1000], vec![0]));
    assert!(!part.exists());
}

#[test]
fn what_a_loss_of_power_left_is_not_gone_on_with() {
    for left in [vec![0; 1000], vec![0; 10_000], vec![0; model()[SINGLE_FILE].len()]] {
        let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&model()));
        let part = blob_of(SINGLE_FILE, cache.path()).with_extension("part");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, left).unwrap();
        let snapshot = hub.fetch(cache.path()).unwrap();
        assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), model()[SINGLE_FILE]);
    }
}

#[test]
fn a_connection_may_break_or_stall_again_and_again() {
    for stalls in [false, true] {
        let cache = tempfile::tempdir().unwrap();
        let hub = Hub::with(&model(), move |request, files| {
            let whole = reply(request, files);
            let (length, body) = (whole.body.len(), whole.body[..whole.body.len().min(600)].to_vec());
            request.is_for(SINGLE_FILE).then_some(Reply {
                length: Some(length),
                stalls: stalls && body.len() < length,
                body,
                ..whole
            })
        });
        let patience = Patience { silence: Duration::from_secs(1), ..QUICK };
        let (options, begun) = (HubOptions { patience, ..hub.options(cache.path()) }, Instant::now());
        let snapshot = fetch_model("org/model", &options, &NoProgress, &|_| Ok(())).unwrap();
        assert!(begun.elapsed() < STALL);
        assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), model()[SINGLE_FILE]);
        assert_eq!(hub.starts(SINGLE_FILE), [0, 600, 1200, 1800, 2400, 3000]);
    }
}

#[test]
fn a_server_that_knows_no_ranges_sends_all_again() {
    let part_of = |cache: &Path| blob_of(SINGLE_FILE, cache).with_extension("part");
    for status in [200, 206] {
        let cache = tempfile::tempdir().unwrap();
        fs::create_dir_all(part_of(cache.path()).parent().unwrap()).unwrap();
        fs::write(part_of(cache.path()), &model()[SINGLE_FILE][..1000]).unwrap();
        let hub = Hub::with(&model(), move |request, files| {
            let body = files[SINGLE_FILE].clone();
            let headers = vec![format!("Content-Range: bytes 0-{}/{}", body.len() - 1, body.len())];
            request.is_for(SINGLE_FILE).then_some(Reply { status, headers, body, ..Reply::default() })
        });
        let snapshot = hub.fetch(cache.path()).unwrap();
        assert_eq!(fs::read(snapshot.join(SINGLE_FILE)).unwrap(), model()[SINGLE_FILE]);
        assert_eq!(hub.starts(SINGLE_FILE).len(), if status == 200 { 1 } else { 2 });
    }
}

#[test]
fn two_downloads_of_one_model_are_one() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::with(&model(), |request, _| {
        if request.range.is_some() && !request.is_look() {
            thread::sleep(Duration::from_millis(300));
        }
        None
    });
    thread::scope(|scope| {
        for fetched in [(); 3].map(|()| scope.spawn(|| hub.fetch(cache.path()))) {
            fetched.join().unwrap().unwrap();
        }
    });
    for name in model().keys() {
        assert_eq!(hub.starts(name), [0], "{name}");
    }
}

#[test]
fn whoever_holds_the_lock_of_a_file_is_waited_for() {
    let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&model()));
    let blob = blob_of(SINGLE_FILE, cache.path());
    let locks = cache.path().join(".locks/models--org--model");
    fs::create_dir_all(&locks).unwrap();
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    let path = locks.join(format!("{}.lock", etag(SINGLE_FILE, &model()[SINGLE_FILE])));
    let lock = File::create(&path).unwrap();
    lock.lock().unwrap();
    fs::write(blob.with_extension("part"), [0; 10_000]).unwrap();
    thread::scope(|scope| {
        let fetched = scope.spawn(|| hub.fetch(cache.path()));
        thread::sleep(Duration::from_millis(500));
        assert!(!fetched.is_finished());
        assert_eq!(fs::metadata(blob.with_extension("part")).unwrap().len(), 10_000);
        // As another library does when it is done.
        fs::write(&blob, &model()[SINGLE_FILE]).unwrap();
        fs::remove_file(&path).unwrap();
        drop(lock);
        assert!(fetched.join().unwrap().is_ok());
    });
    assert!(hub.starts(SINGLE_FILE).is_empty() && path.exists());
}

#[test]
fn what_is_damaged_in_the_cache_is_named_and_fetched_again() {
    let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&model()));
    hub.fetch(cache.path()).unwrap();
    let whole = &model()[SINGLE_FILE];
    for (name, left) in [
        (SINGLE_FILE, &b""[..]),
        (SINGLE_FILE, &whole[..2000]),
        (SINGLE_FILE, &vec![0; whole.len()]),
        ("config.json", b"{"),
        ("config.json", b"\0\0"),
    ] {
        let blob = blob_of(name, cache.path());
        fs::write(&blob, left).unwrap();
        let error = hub.offline(cache.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(&format!("delete {}", blob.display())), "{error}");
        hub.fetch(cache.path()).unwrap();
        assert_eq!(fs::read(&blob).unwrap(), model()[name]);
    }
    // What is as the hub has it is not fetched for ever.
    let odd = files(&[("config.json", b"{}"), (SINGLE_FILE, b"no safetensors")]);
    let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&odd));
    for _ in 0..2 {
        hub.fetch(cache.path()).unwrap();
    }
    assert_eq!(hub.starts(SINGLE_FILE), [0]);
}

#[test]
fn what_python_takes_is_not_damaged_and_an_empty_file_is_a_file() {
    let cache = tempfile::tempdir().unwrap();
    let mut all = model();
    all.extend(files(&[("tokenizer_config.json", b"{\"most\": NaN}"), ("chat_template.jinja", b"")]));
    // Such an answer says nothing of what it is of.
    let hub = Hub::with(&all, |request, _| {
        let is_empty = request.path.ends_with("chat_template.jinja") && request.range.is_some();
        is_empty.then(|| Reply::status(416, "content-range: bytes */0"))
    });
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(snapshot.join("chat_template.jinja")).unwrap(), b"");
    hub.count();
    hub.fetch(cache.path()).unwrap();
    assert_eq!(hub.count(), 0, "all of it is here");
}

#[test]
fn what_is_damaged_stays_until_another_takes_its_place() {
    let (cache, hub) = (tempfile::tempdir().unwrap(), Hub::start(&model()));
    hub.fetch(cache.path()).unwrap();
    let blob = blob_of("config.json", cache.path());
    fs::write(&blob, b"{").unwrap();
    let down = Hub::with(&model(), |request, _| request.is_for("config.json").then(|| Reply::status(500, "x: y")));
    assert!(down.fetch(cache.path()).is_err());
    assert_eq!(fs::read(&blob).unwrap(), b"{");
    hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(&blob).unwrap(), model()["config.json"]);
}

#[test]
fn what_comes_in_another_encoding_is_refused_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::with(&model(), |request, files| {
        request.is_for("config.json").then(|| {
            let mut reply = reply(request, files);
            reply.headers.push("Content-Encoding: br".into());
            reply
        })
    });
    let error = hub.error(cache.path());
    assert!(error.contains("config.json") && error.contains("encoding \"br\""), "{error}");
}

#[test]
fn a_list_of_files_that_breaks_off_is_asked_for_again() {
    let (cache, asked) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let hub = Hub::with(&model(), move |request, files| {
        let is_first = request.path.contains("/revision/") && asked.fetch_add(1, Ordering::Relaxed) == 0;
        is_first.then(|| {
            let whole = reply(request, files);
            let body = format!("{:x}\r\n", whole.body.len()).into_bytes();
            let cut = [&body[..], &whole.body[..whole.body.len() / 2]].concat();
            Reply { headers: vec!["transfer-encoding: chunked".into()], body: cut, ..whole }
        })
    });
    hub.fetch(cache.path()).unwrap();
}

#[test]
fn optional_files_are_looked_for_until_it_is_known_that_there_are_none() {
    let cache = tempfile::tempdir().unwrap();
    let mut all = model();
    all.extend(files(&[("generation_config.json", b"{\"eos_token_id\": 2}")]));
    let hub = Hub::start(&all);
    let snapshot = hub.fetch(cache.path()).unwrap();
    let no_exist = cache.path().join("models--org--model/.no_exist").join(COMMIT);
    assert!(no_exist.join("chat_template.jinja").is_file() && !no_exist.join("generation_config.json").exists());
    // As Python's library leaves the cache.
    fs::remove_dir_all(&no_exist).unwrap();
    hub.count();
    hub.fetch(cache.path()).unwrap();
    assert_eq!(hub.count(), 1, "the list of files is all it takes");
    fs::remove_file(snapshot.join("generation_config.json")).unwrap();
    hub.fetch(cache.path()).unwrap();
    assert!(snapshot.join("generation_config.json").is_file());
    hub.count();
    fs::remove_file(snapshot.join("generation_config.json")).unwrap();
    assert_eq!(hub.offline(cache.path()).unwrap(), snapshot);
    let broken = Hub::with(&all, |_, _| Some(Reply::status(503, "Retry-After: 50")));
    assert_eq!(broken.fetch(cache.path()).unwrap(), snapshot);
    assert_eq!((broken.count(), hub.count()), (1, 0));
}

#[test]
fn failures_that_may_pass_are_tried_again() {
    for what in ["/api/models/org/model/revision/main", "config.json", SINGLE_FILE] {
        for (look, status) in [(true, 408), (true, 429), (false, 429), (false, 500), (true, 503), (false, 504)] {
            let failed = AtomicUsize::new(0);
            let hub = Hub::with(&model(), move |request, _| {
                let is_it = request.path.ends_with(what) && (request.is_look() == look || request.range.is_none());
                (is_it && failed.fetch_add(1, Ordering::Relaxed) < 3).then(|| Reply::status(status, ""))
            });
            let cache = tempfile::tempdir().unwrap();
            assert!(hub.fetch(cache.path()).is_ok(), "{what}: {status}");
        }
    }
    let hub = Hub::with(&model(), |request, _| request.path.ends_with(SINGLE_FILE).then(|| Reply::status(502, "")));
    let cache = tempfile::tempdir().unwrap();
    let error = hub.error(cache.path());
    assert!(error.ends_with(&format!("org/model, model.safetensors: {} answers 502 Bad Gateway", hub.endpoint)), "{error}");
}

#[test]
fn a_server_may_say_when_to_try_again() {
    let failed = AtomicUsize::new(0);
    let hub = Hub::with(&model(), move |_, _| {
        (failed.fetch_add(1, Ordering::Relaxed) == 0).then(|| Reply::status(429, "Retry-After: 1"))
    });
    let (cache, begun) = (tempfile::tempdir().unwrap(), Instant::now());
    assert!(hub.fetch(cache.path()).is_ok());
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn weak_etags_are_etags() {
    let hub = Hub::with(&model(), |request, files| {
        let mut reply = reply(request, files);
        let etag = reply.headers.first_mut()?;
        *etag = etag.replace("ETag: \"", "ETag: W/\"");
        request.is_look().then_some(reply)
    });
    let cache = tempfile::tempdir().unwrap();
    hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(blob_of(SINGLE_FILE, cache.path())).unwrap(), model()[SINGLE_FILE]);
}

#[test]
fn an_empty_file_is_a_file() {
    let mut all = model();
    all.extend(files(&[("chat_template.jinja", b"")]));
    let hub = Hub::with(&all, |request, files| {
        let mut empty = Reply::status(416, "Content-Range: bytes */0");
        empty.headers.extend([format!("ETag: \"{}\"", etag("", b"")), format!("X-Repo-Commit: {COMMIT}")]);
        assert!(files.contains_key(SINGLE_FILE));
        request.path.ends_with(".jinja").then_some(empty)
    });
    let cache = tempfile::tempdir().unwrap();
    let snapshot = hub.fetch(cache.path()).unwrap();
    assert_eq!(fs::read(snapshot.join("chat_template.jinja")).unwrap(), b"");
}

#[test]
fn an_unreachable_hub_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let nobody = Hub { endpoint: endpoint.clone(), requests: Arc::default() };
    let error = nobody.error(cache.path());
    assert!(error.contains("org/model") && error.contains(&endpoint), "{error}");
    let nowhere = Hub { endpoint: "hub.example".into(), requests: Arc::default() };
    assert!(nowhere.error(cache.path()).contains("no address of a hub"));
}

#[test]
fn a_hub_that_does_not_answer_is_an_error_in_time() {
    let cache = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let hub = Hub { endpoint: endpoint.clone(), requests: Arc::default() };
    let patience = Patience { silence: Duration::from_secs(1), pauses: &[] };
    let options = HubOptions { patience, ..hub.options(cache.path()) };
    let message = fetch_model("org/model", &options, &NoProgress, &|_| Ok(())).unwrap_err().to_string();
    assert!(message.ends_with(&format!("org/model: nothing has come from {endpoint} for 1 s")), "{message}");
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
fn the_first_variable_that_has_a_value_says_whether_to_stay_off_the_network() {
    let of = |hub: Option<&str>, transformers: Option<&str>| {
        let values = [("HF_HUB_OFFLINE", hub), ("TRANSFORMERS_OFFLINE", transformers)];
        offline(|name| values.iter().find(|(known, _)| *known == name)?.1.map(Into::into))
    };
    assert_eq!(of(Some("1"), None), Some("HF_HUB_OFFLINE"));
    assert_eq!(of(None, Some("yes")), Some("TRANSFORMERS_OFFLINE"));
    assert_eq!(of(Some("0"), Some("1")), None);
    assert_eq!(of(None, None), None);
}

#[test]
fn the_environment_is_read_as_the_python_library_reads_it() {
    assert!(["1", "ON", "yes", "True"].iter().all(|v| is_true(v)));
    assert!(["", "0", "off", "no", "2"].iter().all(|v| !is_true(v)));
    assert_eq!(in_one_line(" hf_a\r\nb\n"), Some("hf_ab".into()));
    assert_eq!(in_one_line(" \n"), None);
    let value_of = |name: &str| (name == "DISK_1").then(|| "/disk".to_string());
    for (text, path) in [
        ("~", "/home/me"),
        ("~/hf", "/home/me/hf"),
        ("~you/hf", "~you/hf"),
        ("$DISK_1/hf", "/disk/hf"),
        ("/a/${DISK_1}b/~", "/a//diskb/~"),
        ("$NOT/${NOT}/$/${DISK_1", "$NOT/${NOT}/$/${DISK_1"),
    ] {
        assert_eq!(expanded(text, Path::new("/home/me"), value_of), Path::new(path), "{text}");
    }
}
