//! Pictures on their way to the engine: in bodies, and in directories and stores that prompts point to.

use std::fs;
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};
use strata_engine::api::{Image, Request, TrainOp};
use tempfile::TempDir;

use super::fake_store::{FakeStore, answer};
use super::{TestServer, sample_body};
use crate::image_dirs::ImageDirs;
use crate::image_stores::{ImageStores, S3Settings};
use crate::turns::{Turn, Turns};

impl TestServer {
    async fn new_sampler(&self) -> String {
        let session_id = self.new_session().await;
        let body = json!({ "session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/base" });
        self.ok("create_sampling_session", body).await;
        format!("{session_id}:sample:0")
    }

    /// Pictures of the last request that the engine had.
    fn last_images(&self) -> Vec<Image> {
        match self.engine.requests.lock().unwrap().last() {
            Some(Request::Sample { sample, .. }) => sample.images.clone(),
            Some(Request::Train { op: TrainOp::ForwardBackward { data, .. }, .. }) => data[0].images.clone(),
            other => panic!("{other:?}"),
        }
    }
}

fn prompt_body(sampler_id: &str, seq_id: u64, chunk: Value) -> Value {
    let mut body = sample_body(sampler_id, seq_id);
    body["prompt"]["chunks"].as_array_mut().unwrap().push(chunk);
    body
}

fn pointer(location: &str) -> Value {
    json!({ "type": "image_asset_pointer", "format": "png", "location": location, "expected_tokens": 4 })
}

/// A server that reads pictures from a directory which has one of `len` bytes; and where that is.
fn with_picture(len: usize, request_bytes_max: Option<usize>) -> (TestServer, TempDir, String) {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("a.png"), vec![7; len]).unwrap();
    let server = TestServer::with(|config| {
        config.image_dirs = ImageDirs::open(&[dir.path().into()]).unwrap();
        config.request_bytes_max = request_bytes_max;
    });
    let location = format!("file://{}/a.png", dir.path().display());
    (server, dir, location)
}

#[tokio::test]
async fn pictures_of_a_body_reach_the_engine() {
    let server = TestServer::new();
    let sampler_id = server.new_sampler().await;
    // Beyond the limit of other texts.
    let data = "AAAA".repeat(100_000);
    let chunk = json!({ "type": "image", "format": "jpeg", "data": data, "expected_tokens": 9 });
    server.ok("asample", prompt_body(&sampler_id, 0, chunk.clone())).await;
    let expected = [Image { at: 3, file: vec![0; 300_000].into(), expected_tokens: Some(9) }];
    assert_eq!(server.last_images(), expected);

    let (_, model_id) = server.new_model().await;
    let text = json!({ "type": "encoded_text", "tokens": [1, 2, 3] });
    let input = json!({ "loss_fn": "cross_entropy", "data": [{ "model_input": { "chunks": [text, chunk] } }] });
    server.ok("forward_backward", json!({ "model_id": model_id, "seq_id": 1, "forward_backward_input": input })).await;
    assert_eq!(server.last_images(), expected);
}

#[tokio::test]
async fn a_picture_that_a_prompt_points_to_is_read_once() {
    let (server, dir, location) = with_picture(100_000, None);
    let sampler_id = server.new_sampler().await;
    let free = server.app.transit.bytes_free();
    let body = prompt_body(&sampler_id, 0, pointer(&location));
    let acknowledged = server.ok("asample", body.clone()).await;
    assert_eq!(server.last_images(), [Image { at: 3, file: vec![7; 100_000].into(), expected_tokens: Some(4) }]);
    assert_eq!(server.app.transit.bytes_free(), free, "it waits in the engine's account");
    // A request that is sent again is known by its id, whatever has become of the picture.
    fs::remove_file(dir.path().join("a.png")).unwrap();
    assert_eq!(server.ok("asample", body).await, acknowledged);
    let reply = server.post("asample", prompt_body(&sampler_id, 1, pointer(&location))).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    let detail = reply.detail();
    assert!(
        detail.contains("prompt: model_input chunk 1 (image_asset_pointer)") && detail.contains("is not there"),
        "{detail}"
    );
}

#[tokio::test]
async fn pictures_that_a_prompt_points_to_count_as_what_it_becomes() {
    let (server, _dir, location) = with_picture(600_000, Some(1 << 20));
    let sampler_id = server.new_sampler().await;
    let mut body = prompt_body(&sampler_id, 0, pointer(&location));
    server.ok("asample", body.clone()).await;
    let sent = json!({ "type": "image", "format": "png", "data": "AAAA".repeat(200_000) });
    body["prompt"]["chunks"].as_array_mut().unwrap().push(sent);
    body["seq_id"] = json!(1);
    let reply = server.post("asample", body).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(reply.detail().contains("1 MiB"), "{}", reply.detail());
}

#[tokio::test]
async fn what_a_prompt_points_to_without_leave_is_refused_and_nothing_is_begun() {
    let server = TestServer::new();
    let sampler_id = server.new_sampler().await;
    for (location, words) in
        [("file:///etc/passwd", "--image-dir"), ("https://example.com/a.png", "\"https\""), ("a.png", "scheme")]
    {
        let reply = server.post("asample", prompt_body(&sampler_id, 0, pointer(location))).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        let detail = reply.detail();
        assert!(detail.contains("model_input chunk 1 (image_asset_pointer)") && detail.contains(words), "{detail}");
    }
    assert_eq!(server.engine.count(|request| matches!(request, Request::Sample { .. })), 0);
    server.ok("asample", sample_body(&sampler_id, 0)).await;
}

/// A server that fetches pictures from a store.
fn with_store(store: &FakeStore, request_bytes_max: Option<usize>) -> TestServer {
    TestServer::with(|config| {
        let url = format!("{}/pictures/", store.url());
        config.image_stores = ImageStores::open(&[url], &S3Settings::default()).unwrap();
        config.request_bytes_max = request_bytes_max;
    })
}

#[tokio::test]
async fn a_picture_in_a_store_that_a_prompt_points_to_is_fetched_once() {
    let store = FakeStore::start(|_| answer("200 OK", &[7; 100_000]));
    let server = with_store(&store, None);
    let sampler_id = server.new_sampler().await;
    let free = server.app.transit.bytes_free();
    let body = prompt_body(&sampler_id, 0, pointer(&format!("{}/pictures/a.png", store.url())));
    let acknowledged = server.ok("asample", body.clone()).await;
    assert_eq!(server.last_images(), [Image { at: 3, file: vec![7; 100_000].into(), expected_tokens: Some(4) }]);
    assert_eq!(server.app.transit.bytes_free(), free, "it waits in the engine's account");
    assert_eq!(server.ok("asample", body).await, acknowledged);
    assert_eq!(store.heads().len(), 1);
}

#[tokio::test]
async fn pictures_of_a_store_count_as_what_a_prompt_becomes() {
    let store = FakeStore::start(|_| answer("200 OK", &[7; 600_000]));
    let server = with_store(&store, Some(1 << 20));
    let sampler_id = server.new_sampler().await;
    let chunk = pointer(&format!("{}/pictures/a.png", store.url()));
    let mut body = prompt_body(&sampler_id, 0, chunk.clone());
    server.ok("asample", body.clone()).await;
    body["prompt"]["chunks"].as_array_mut().unwrap().push(chunk);
    body["seq_id"] = json!(1);
    let reply = server.post("asample", body).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(reply.detail().contains("1 MiB"), "{}", reply.detail());
}

#[tokio::test]
async fn a_store_that_fails_is_no_mistake_of_the_user_and_one_without_the_picture_is() {
    let store = FakeStore::start(|first| match first.contains("gone") {
        true => answer("404 Not Found", b"no"),
        false => answer("503 Slow Down", b"later"),
    });
    let server = with_store(&store, None);
    let sampler_id = server.new_sampler().await;
    for (path, status, words) in [
        ("/pictures/gone.png", StatusCode::BAD_REQUEST, "404 Not Found"),
        ("/pictures/busy.png", StatusCode::BAD_GATEWAY, "503"),
        ("/other/a.png", StatusCode::BAD_REQUEST, "--image-store"),
    ] {
        let reply = server.post("asample", prompt_body(&sampler_id, 0, pointer(&format!("{}{path}", store.url())))).await;
        assert_eq!(reply.status, status);
        let detail = reply.detail();
        assert!(detail.contains("model_input chunk 1 (image_asset_pointer)") && detail.contains(words), "{detail}");
        assert!(detail.contains(path), "{detail}");
    }
    assert_eq!(server.engine.count(|request| matches!(request, Request::Sample { .. })), 0);
}

/// All turns that are to be had, taken by others.
fn all_turns(turns: &Turns) -> Vec<Turn> {
    (0..).map_while(|other| turns.try_take(&format!("other {other}"))).collect()
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_store_waits_no_longer_than_a_client_and_holds_up_no_directories() {
    let store = FakeStore::of(b"picture");
    let (_, dir, file) = with_picture(10, None);
    let server = TestServer::with(|config| {
        config.image_dirs = ImageDirs::open(&[dir.path().into()]).unwrap();
        config.image_stores = ImageStores::open(&[store.url()], &S3Settings::default()).unwrap();
    });
    let sampler_id = server.new_sampler().await;
    let free = server.app.transit.bytes_free();
    let _turns = all_turns(&server.app.asset_fetches);
    let reply = server.post("asample", prompt_body(&sampler_id, 0, pointer(&format!("{}/a.png", store.url())))).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(reply.detail().contains("30 s"), "{}", reply.detail());
    assert_eq!(server.app.transit.bytes_free(), free);
    assert!(store.heads().is_empty());
    server.ok("asample", prompt_body(&sampler_id, 1, pointer(&file))).await;
}

#[tokio::test]
async fn pictures_that_wait_to_be_decoded_hold_up_nobody_else() {
    let (server, _dir, location) = with_picture(10, None);
    let (sampler_id, free) = (server.new_sampler().await, server.app.transit.bytes_free());
    let turns = all_turns(&server.app.picture_checks);
    let body = prompt_body(&sampler_id, 0, pointer(&location));
    let waiting = server.post("asample", body.clone());
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err());
    assert_eq!(server.app.transit.bytes_free(), free, "who hangs up meanwhile leaves nothing");
    server.ok("asample", sample_body(&sampler_id, 1)).await;
    drop(turns);
    server.ok("asample", body).await;
}

#[tokio::test]
async fn storage_that_does_not_answer_holds_up_no_bodies() {
    let (server, _dir, location) = with_picture(10, None);
    let sampler_id = server.new_sampler().await;
    let _turns = all_turns(&server.app.asset_reads);
    let waiting = server.post("asample", prompt_body(&sampler_id, 0, pointer(&location)));
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err());
    let sent = json!({ "type": "image", "format": "png", "data": "AAAA".repeat(200_000) });
    let answered = server.ok("asample", prompt_body(&sampler_id, 1, sent));
    tokio::time::timeout(Duration::from_secs(60), answered).await.expect("bodies have turns of their own");
}
