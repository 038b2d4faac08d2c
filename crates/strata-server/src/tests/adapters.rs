//! Adapters that come from elsewhere, and checkpoints in the form of other tools.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request as HttpRequest, StatusCode};
use hyper::body::Frame;
use serde_json::{Value, json};

use super::{Reply, TestServer};
use crate::limits;

const IMPORT: &str = "/api/v1/weights/import?name=mine&base_model=org/base";

fn config(changes: Value) -> Vec<u8> {
    let mut config = json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none" });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config.to_string().into_bytes()
}

/// Pairs of this rank of q in both layers of the base, by hand.
fn weights(rank: usize) -> Vec<u8> {
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for layer in 0..2 {
        for (side, shape) in [("A", [rank, 8]), ("B", [8, rank])] {
            let start = bytes.len();
            bytes.extend((0..8 * rank).flat_map(|i| (i as f32 / 8.0 - layer as f32).to_le_bytes()));
            let name = format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight");
            header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()] }));
        }
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat()
}

fn tar(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, contents) in files {
        archive.extend(crate::routes::tar_header(name, contents.len() as u64));
        archive.extend(contents);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

fn adapter() -> Vec<u8> {
    tar(&[("adapter_config.json", config(json!({}))), ("adapter_model.safetensors", weights(2))])
}

async fn upload(server: &TestServer, uri: &str, body: impl Into<Body>) -> Reply {
    let request = HttpRequest::post(uri).header("content-type", "application/x-tar").body(body.into());
    server.send(request.unwrap()).await
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).map_or(0, |entries| entries.count())
}

/// Whether nothing of an upload is left.
fn is_clean(server: &TestServer) -> bool {
    let dir = server.data_dir.path();
    entries(&dir.join("scratch")) == 0 && entries(&dir.join("checkpoints")) == 0
}

#[tokio::test]
async fn an_uploaded_adapter_is_a_checkpoint_and_goes_out_in_either_form() {
    let server = TestServer::new();
    let reply = upload(&server, IMPORT, adapter()).await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.bytes);
    let answer = reply.json();
    let path = answer["path"].as_str().unwrap();
    assert!(path.starts_with("tinker://import-") && path.ends_with("/weights/mine"), "{path}");
    assert_eq!((&answer["base_model"], &answer["lora_rank"]), (&json!("org/base"), &json!(2)));
    assert_eq!(entries(&server.data_dir.path().join("scratch")), 0);
    let info = server.ok("weights_info", json!({ "tinker_path": path })).await;
    assert_eq!((&info["base_model"], &info["lora_rank"]), (&json!("org/base"), &json!(2)));
    assert_eq!(server.get("checkpoints").await.json()["checkpoints"][0]["tinker_path"], json!(path));

    let run = path.trim_start_matches("tinker://").split('/').next().unwrap();
    for (query, form, sent) in [
        ("", "tinker", "archive.tar"),
        ("?format=tinker", "tinker", "archive.tinker.tar"),
        ("?format=peft", "peft", "archive.peft.tar"),
    ] {
        let archive = format!("/api/v1/training_runs/{run}/checkpoints/weights/mine/archive{query}");
        let (status, headers, body) = server.fetch("GET", &archive, &[]).await;
        assert_eq!(status, StatusCode::FOUND, "{query}: {body:?}");
        let location = headers["location"].to_str().unwrap();
        assert!(location.contains(sent), "{location}");
        let (status, headers, sent) = server.fetch("GET", location, &[]).await;
        assert_eq!((status, headers["content-length"].to_str().unwrap()), (StatusCode::OK, &*sent.len().to_string()));
        let text = String::from_utf8_lossy(&sent);
        assert!(text.contains(&format!("\"form\":\"{form}\"")), "what is in the file says which form it is: {query}");
        let (status, _, part) = server.fetch("GET", location, &[("range", "bytes=600-699")]).await;
        assert_eq!((status, &part[..]), (StatusCode::PARTIAL_CONTENT, &sent[600..700]), "the same bytes each time");
        assert_eq!(entries(&server.data_dir.path().join("scratch")), 0);
        let again = upload(&server, IMPORT, sent).await;
        assert_eq!(again.status, StatusCode::OK, "{query}: {:?}", again.bytes);
    }
}

#[tokio::test]
async fn a_checkpoint_that_goes_while_it_is_looked_at_is_not_there_and_not_faulty() {
    let server = TestServer::new();
    let reply = upload(&server, IMPORT, adapter()).await.json();
    let path = reply["path"].as_str().unwrap();
    let run = path.trim_start_matches("tinker://").split('/').next().unwrap();
    let archive = format!("training_runs/{run}/checkpoints/weights/mine/archive?format=peft");
    assert_eq!(server.get(&archive).await.status, StatusCode::FOUND);
    // A delete has come this far: the record goes first.
    let dir = server.data_dir.path().join("checkpoints").join(run).join("weights/mine");
    std::fs::remove_file(dir.join("adapter_model.safetensors")).unwrap();
    let faulty = server.get(&archive).await;
    assert_eq!(faulty.status, StatusCode::BAD_REQUEST, "{}", faulty.detail());
    std::fs::remove_file(dir.join(strata_engine::api::METADATA_FILE)).unwrap();
    let gone = server.get(&archive).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND, "{}", gone.detail());
}

#[tokio::test]
async fn forms_that_a_server_does_not_make_are_refused_with_what_does() {
    let server = TestServer::new();
    let embedding = {
        let header = json!({
            "base_model.model.model.embed_tokens.lora_embedding_A": { "dtype": "F32", "shape": [2, 32], "data_offsets": [0, 256] },
            "base_model.model.model.embed_tokens.lora_embedding_B": { "dtype": "F32", "shape": [8, 2], "data_offsets": [256, 320] },
        });
        let header = header.to_string();
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 320]].concat()
    };
    let archive = tar(&[
        ("adapter_config.json", config(json!({ "target_modules": ["embed_tokens"] }))),
        ("adapter_model.safetensors", embedding),
    ]);
    let reply = upload(&server, IMPORT, archive).await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.bytes);
    let path = reply.json()["path"].as_str().unwrap().to_owned();
    let run = path.trim_start_matches("tinker://").split('/').next().unwrap();
    for (format, expected) in [
        ("merged", "strata export ADAPTER OUT --base BASE --format merged"),
        ("gguf", "format is \"gguf\"; supported: peft, tinker"),
        ("tinker", "no pair of the embedding"),
    ] {
        let reply = server.get(&format!("training_runs/{run}/checkpoints/weights/mine/archive?format={format}")).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        assert!(reply.detail().contains(expected), "{format}: {}", reply.detail());
    }
}

#[tokio::test]
async fn a_hostile_upload_is_refused_and_leaves_nothing() {
    let server = TestServer::new();
    let with =
        |config: Vec<u8>, weights: Vec<u8>| tar(&[("adapter_config.json", config), ("adapter_model.safetensors", weights)]);
    let plain = || config(json!({}));
    let mut lying = weights(2);
    lying[0..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    let mut not_finite = weights(2);
    let last = not_finite.len() - 4;
    not_finite[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    for (archive, expected) in [
        (tar(&[("../adapter_config.json", plain())]), "../adapter_config.json"),
        (tar(&[("adapter_config.json", plain()), ("adapter_config.json", plain())]), "adapter_config.json twice"),
        (tar(&[("adapter_config.json", plain())]), "no adapter_model.safetensors"),
        (adapter()[..2000].to_vec(), "ends before its end"),
        (with(b"{".to_vec(), weights(2)), "adapter_config.json"),
        (with(config(json!({ "use_dora": true })), weights(2)), "use_dora is true"),
        (with(plain(), weights(3)), "shape"),
        (with(plain(), b"short".to_vec()), "adapter_model.safetensors"),
        (with(plain(), lying), "adapter_model.safetensors"),
        (with(plain(), not_finite), "NaN"),
        (vec![], "ends before its end"),
    ] {
        let reply = upload(&server, IMPORT, archive).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{expected}: {:?}", reply.bytes);
        assert!(reply.detail().contains(expected), "{expected}: {}", reply.detail());
        let text = server.data_dir.path().to_string_lossy().into_owned();
        assert!(!reply.detail().contains(&text), "{}", reply.detail());
        assert!(is_clean(&server), "{expected}");
    }
}

/// The file of a plain adapter that lists these tensors too, none of which has bytes.
fn weights_and(names: impl Iterator<Item = String>) -> Vec<u8> {
    let plain = weights(2);
    let (length, rest) = plain.split_first_chunk().unwrap();
    let (header, bytes) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let more: Vec<String> =
        names.map(|name| format!(r#""{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#)).collect();
    let header = [b"{", more.join(",").as_bytes(), b",", &header[1..]].concat();
    [&(header.len() as u64).to_le_bytes()[..], &header, bytes].concat()
}

#[tokio::test]
async fn a_refusal_is_short_whatever_was_uploaded() {
    let server = TestServer::with(|config| config.transit_bytes = 64 << 20);
    let long = "x".repeat(900_000);
    let many = (0..5_000).map(|i| format!("{i}{}", "n".repeat(400)));
    for (config, weights, expected) in [
        (config(json!({})), weights_and([long.clone()].into_iter()), "has a name of 900000 bytes"),
        (config(json!({})), weights_and(many), "tensors that the model has no use for"),
        (config(json!({ &*long: true })), weights(2), "is true, which is not supported"),
    ] {
        let files = [("adapter_config.json", config), ("adapter_model.safetensors", weights)];
        let reply = upload(&server, IMPORT, tar(&files)).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{expected}");
        let detail = reply.detail();
        assert!(detail.chars().count() <= limits::REFUSAL_CHARS_MAX + 1, "{expected}: {} bytes", detail.len());
        assert!(detail.contains(expected), "{expected}: {detail}");
        assert!(is_clean(&server), "{expected}");
    }
}

#[tokio::test]
async fn what_a_header_takes_to_be_read_is_taken_from_the_budget_first() {
    let server = TestServer::with(|config| config.transit_bytes = 8 << 20);
    let upload_of = async |config: Value, weights: Vec<u8>| {
        let files = [("adapter_config.json", self::config(config)), ("adapter_model.safetensors", weights)];
        upload(&server, IMPORT, tar(&files)).await
    };
    // Each takes some twenty times the bytes of its text or more.
    for reply in [
        upload_of(json!({}), weights_and((0..30_000).map(|i| i.to_string()))).await,
        upload_of(json!({ "z": vec![[1]; 200_000] }), weights(2)).await,
    ] {
        assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", reply.detail());
        assert!(reply.detail().contains("this server has 4 MiB for that; `strata import`"), "{}", reply.detail());
        assert!(is_clean(&server));
    }
    assert_eq!(upload(&server, IMPORT, adapter()).await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_upload_says_what_it_is_and_how_long() {
    let server = TestServer::with(|config| config.transit_bytes = 32 << 20);
    for (uri, expected) in [
        ("/api/v1/weights/import?base_model=org/base", "name"),
        ("/api/v1/weights/import?name=a", "base_model"),
        ("/api/v1/weights/import?name=../a&base_model=org/base", "\"../a\""),
        ("/api/v1/weights/import?name=a&base_model=org/other", "\"org/other\" is not served here"),
        ("/api/v1/weights/import?name=a&base_model=org/base&rank=3", "rank"),
    ] {
        let reply = upload(&server, uri, adapter()).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{uri}");
        assert!(reply.detail().contains(expected), "{uri}: {}", reply.detail());
    }
    let request = |name: &str, value: &str| {
        HttpRequest::post(IMPORT)
            .header("content-type", "application/x-tar")
            .header(name, value)
            .body(adapter().into())
            .unwrap()
    };
    let reply = server.send(request("content-encoding", "zstd")).await;
    assert!(reply.detail().contains("content-encoding is \"zstd\""), "{}", reply.detail());
    let reply = server.send(request("content-length", &(33 << 20).to_string())).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(reply.detail().contains("limit of 32 MiB") && reply.detail().contains("strata import"), "{}", reply.detail());
    let json = HttpRequest::post(IMPORT).header("content-type", "application/json").body(adapter().into()).unwrap();
    let reply = server.send(json).await;
    assert_eq!(reply.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(reply.detail().contains("application/x-tar"), "{}", reply.detail());
    assert!(is_clean(&server));
}

#[tokio::test]
async fn an_adapter_that_takes_more_memory_than_there_is_for_it_is_refused_before_it_is_read() {
    let server = TestServer::with(|config| config.transit_bytes = 20 << 20);
    // One layer of two is there; the rank is for both, and for the copies that are laid out otherwise.
    let config = config(json!({ "r": 1024, "rank_pattern": {} }));
    let archive = tar(&[("adapter_config.json", config), ("adapter_model.safetensors", weights(1024))]);
    let free = server.app.transit.bytes_free();
    let reply = upload(&server, IMPORT, archive.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.bytes);
    assert_eq!(server.app.transit.bytes_free(), free, "what was taken is given back");
    let small = TestServer::with(|config| config.transit_bytes = 1 << 20);
    let reply = upload(&small, IMPORT, archive).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(reply.detail().contains("512 KiB for that; `strata import`"), "{}", reply.detail());
    assert!(is_clean(&small));
}

/// A body that begins, and then fails or says nothing more.
pub struct Broken {
    pub first: Option<Bytes>,
    pub fails: bool,
}

impl HttpBody for Broken {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        match (self.first.take(), self.fails) {
            (Some(first), _) => Poll::Ready(Some(Ok(Frame::data(first)))),
            (None, true) => Poll::Ready(Some(Err(std::io::Error::other("the connection is gone")))),
            (None, false) => Poll::Pending,
        }
    }
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    let server = TestServer::new();
    let begun = |fails| Body::new(Broken { first: Some(adapter()[..1600].to_vec().into()), fails });
    let reply = upload(&server, IMPORT, begun(true)).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(is_clean(&server));
    // A client that is gone takes its request with it.
    let gone = tokio::time::timeout(Duration::from_millis(300), upload(&server, IMPORT, begun(false))).await;
    assert!(gone.is_err());
    assert!(is_clean(&server));
}

#[tokio::test]
async fn what_a_server_that_was_killed_has_left_of_an_upload_goes_with_the_next_start() {
    let server = TestServer::new();
    let left = server.data_dir.path().join("scratch/of-an-upload");
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("adapter_config.json"), "{}").unwrap();
    let server = server.restart();
    assert!(!left.exists() && is_clean(&server));
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_stalls_gives_its_turn_back() {
    let server = TestServer::new();
    for _ in 0..2 * limits::UPLOADS_MAX {
        let reply =
            upload(&server, IMPORT, Body::new(Broken { first: Some(adapter()[..1600].to_vec().into()), fails: false })).await;
        assert_eq!(reply.status, StatusCode::REQUEST_TIMEOUT);
        assert!(reply.detail().contains("nothing of the archive arrived for 10 s"), "{}", reply.detail());
    }
    assert!(is_clean(&server));
}
