//! Lists of what is kept here, within the memory that there is for answers.

use axum::body::{Body, HttpBody};
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{TestServer, create_model_body, peak_bytes};

const TRANSIT_BYTES: usize = 4 << 20;
/// Of the metadata of a checkpoint, or a session.
const FAT_BYTES: usize = 60_000;
const FAT: usize = 60;

/// A server that has so many sessions and checkpoints that not all of them are one answer, and one of its runs.
async fn full() -> (TestServer, String) {
    let server = TestServer::with(|config| config.transit_bytes = TRANSIT_BYTES);
    let (_, model_id) = server.new_model().await;
    let metadata: Value =
        (0..6).map(|i| (format!("k{i}"), json!("v".repeat(FAT_BYTES / 6)))).collect::<serde_json::Map<_, _>>().into();
    for i in 1..=FAT {
        let save = json!({ "model_id": model_id, "seq_id": i, "path": format!("c{i}"), "user_metadata": metadata });
        let saved = server.outcome("save_weights", save).await;
        assert!(saved["path"].is_string(), "{saved}");
        server.ok("create_session", json!({ "user_metadata": metadata })).await;
    }
    (server, model_id)
}

/// An answer whose body nobody has read.
async fn unread(server: &TestServer, method: &str, path: &str, body: &str) -> Response {
    let request = Request::builder().method(method).uri(format!("/api/v1/{path}")).header(HOST, "localhost:8000");
    let request = request.header(CONTENT_TYPE, "application/json").body(Body::from(body.to_owned())).unwrap();
    server.router.clone().oneshot(request).await.unwrap()
}

#[tokio::test]
async fn a_list_that_is_too_long_is_refused_and_a_page_of_it_is_not() {
    let (server, run) = full().await;
    let of_run = format!("training_runs/{run}/checkpoints");
    for list in ["checkpoints", &of_run] {
        let refused = server.get(&format!("{list}?limit=1000")).await;
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE, "{list}");
        assert!(refused.detail().contains("ask for fewer entries (limit)"), "{}", refused.detail());
        let page = server.get(&format!("{list}?limit=20&offset=30")).await;
        let page = page.json();
        assert_eq!(page["checkpoints"].as_array().unwrap().len(), 20);
        assert_eq!(page["cursor"], json!({ "offset": 30, "limit": 20, "total_count": FAT }));
    }
    // What a catalogue keeps is shared with those who look at it.
    let (listed, peak) = peak_bytes(|| server.app.store.list(None));
    assert!(listed.len() == FAT && peak < FAT_BYTES, "{peak} bytes for {FAT} records");
}

#[tokio::test]
async fn lists_that_nobody_reads_take_no_memory_that_is_not_there() {
    let (server, run) = full().await;
    for (method, path, body) in [
        ("GET", "checkpoints?limit=10", ""),
        ("GET", &format!("training_runs/{run}/checkpoints?limit=10"), ""),
        ("GET", &format!("training_runs/{run}"), ""),
        ("GET", "training_runs", ""),
        ("POST", "sessions/search", "{\"limit\": 10}"),
    ] {
        let free = server.app.transit.bytes_free();
        let mut answers = Vec::new();
        let refused = loop {
            let answer = unread(&server, method, path, body).await;
            if answer.status() != StatusCode::OK {
                break answer.status();
            }
            answers.push(answer);
            assert!(answers.len() * FAT_BYTES < 2 * TRANSIT_BYTES, "{path}: nothing is refused");
        };
        assert_eq!(refused, StatusCode::TOO_MANY_REQUESTS, "{path}");
        let held: u64 = answers.iter().filter_map(|answer| answer.body().size_hint().exact()).sum();
        assert!(held > 0 && held < TRANSIT_BYTES as u64, "{path}: {held} bytes");
        drop(answers);
        assert_eq!(server.app.transit.bytes_free(), free, "{path}");
        assert_eq!(unread(&server, method, path, body).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn what_is_attached_to_a_model_is_paid_for() {
    let server = TestServer::new();
    let session_id = server.new_session().await;
    let before = server.app.ledger().used();
    let metadata = json!({ "note": "x".repeat(FAT_BYTES) });
    let mut body = create_model_body(&session_id, 0);
    body["user_metadata"] = metadata;
    server.outcome("create_model", body).await;
    let charged = server.app.ledger().used() - before;
    assert!(charged >= FAT_BYTES as u64, "{charged} bytes");
}
