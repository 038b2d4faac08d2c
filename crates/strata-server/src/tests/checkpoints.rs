//! Checkpoints: their names, their life, and what is made from them.

use axum::http::{Request as HttpRequest, StatusCode};
use serde_json::{Value, json};
use strata_engine::api::{Request, TrainOp};
use tower::ServiceExt;

use super::{TestServer, create_model_body};
use crate::names::CheckpointId;

fn save(model_id: &str, seq_id: u64, name: &str) -> Value {
    json!({ "model_id": model_id, "seq_id": seq_id, "path": name, "user_metadata": { "renderer_name": "qwen3" } })
}

#[tokio::test]
async fn a_saved_checkpoint_is_listed_at_once_and_survives_a_restart() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let saved = server.outcome("save_weights", save(&model_id, 1, "a")).await;
    let path = format!("tinker://{model_id}/weights/a");
    assert_eq!(saved["path"], json!(path));
    let saved = server.outcome("save_weights_for_sampler", save(&model_id, 2, "a")).await;
    assert_eq!(saved["path"], json!(format!("tinker://{model_id}/sampler_weights/a")));

    let run = server.get(&format!("training_runs/{model_id}")).await.json();
    assert_eq!(run["last_checkpoint"]["tinker_path"], json!(path));
    assert_eq!(run["last_checkpoint"]["user_metadata"], json!({ "renderer_name": "qwen3" }));

    let restarted = server.restart();
    let listed = restarted.get("checkpoints").await.json();
    assert_eq!(listed["cursor"]["total_count"], json!(2));
    let run = restarted.get(&format!("training_runs/{model_id}")).await.json();
    assert_eq!((&run["lora_rank"], &run["user_metadata"]), (&json!(8), &json!({ "recipe": "sft" })));
    let info = restarted.ok("weights_info", json!({ "tinker_path": path })).await;
    assert_eq!((&info["base_model"], &info["lora_rank"]), (&json!("org/base"), &json!(8)));
}

#[tokio::test]
async fn names_that_leave_the_data_directory_never_reach_the_engine() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let names = ["../../x", "..", "a/b", ".hidden", "", "a\u{0}b", "x%2Fy"];
    for (name, seq_id) in names.iter().zip(1..) {
        let outcome = server.outcome("save_weights", save(&model_id, seq_id, name)).await;
        assert_eq!(outcome["category"], json!("user"), "{name:?}");
    }
    let is_save = |r: &Request| matches!(r, Request::Train { op: TrainOp::SaveState(_) | TrainOp::SaveSampler(_), .. });
    assert_eq!(server.engine.count(is_save), 0);
    for path in ["tinker://../weights/a", "tinker://a/weights/..", "tinker://a/weights/b/c", "/etc/passwd"] {
        let reply = server.post("weights_info", json!({ "tinker_path": path })).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}");
    }
    let reply = server.request("DELETE", "training_runs/%2E%2E/checkpoints/weights/%2E%2E", "").await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_name_that_is_taken_is_a_failed_future_and_a_retried_save_is_not() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for _ in 0..2 {
        assert!(server.outcome("save_weights", save(&model_id, 1, "a")).await["path"].is_string());
    }
    assert_eq!(server.outcome("save_weights", save(&model_id, 2, "a")).await["category"], json!("user"));
    let mut overwriting = save(&model_id, 3, "a");
    overwriting["overwrite"] = json!(true);
    assert!(server.outcome("save_weights", overwriting).await["path"].is_string());
}

#[tokio::test]
async fn a_name_is_free_when_the_time_of_its_checkpoint_is_over() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for (seq_id, route, kind) in [
        (1, "save_weights", "weights"),
        (3, "save_weights_for_sampler", "sampler_weights"),
        (5, "save_weights_external", "external_weights"),
    ] {
        server.outcome(route, save(&model_id, seq_id, "a")).await;
        let id = CheckpointId::new(&model_id, kind, "a").unwrap();
        let past = time::OffsetDateTime::now_utc() - time::Duration::SECOND;
        server.app.store.set_expiry(&id, Some(past)).unwrap();
        assert!(server.outcome(route, save(&model_id, seq_id + 1, "a")).await["path"].is_string(), "{kind}");
        assert!(server.app.store.get(&id).is_ok());
    }
}

#[tokio::test]
async fn checkpoints_are_published_given_a_life_and_deleted() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    let base = format!("training_runs/{model_id}/checkpoints/weights/a");
    let first = async || server.get("checkpoints").await.json()["checkpoints"][0].clone();
    for _ in 0..2 {
        assert_eq!(server.request("POST", &format!("{base}/publish"), "").await.status, StatusCode::OK);
    }
    assert_eq!(first().await["public"], json!(true));
    assert_eq!(server.request("DELETE", &format!("{base}/publish"), "").await.status, StatusCode::OK);
    assert_eq!(first().await["public"], json!(false));

    let ttl = |seconds: Value| json!({ "ttl_seconds": seconds }).to_string();
    assert_eq!(server.request("PUT", &format!("{base}/ttl"), ttl(json!(3600))).await.status, StatusCode::OK);
    assert!(first().await["expires_at"].is_string());
    assert_eq!(server.request("PUT", &format!("{base}/ttl"), ttl(json!(null))).await.status, StatusCode::OK);
    assert_eq!(first().await["expires_at"], Value::Null);
    let reply = server.request("PUT", &format!("{base}/ttl"), ttl(json!(5))).await;
    assert!(reply.detail().contains("ttl_seconds 5"), "{}", reply.detail());

    assert_eq!(server.request("DELETE", &base, "").await.status, StatusCode::OK);
    assert_eq!(server.get("checkpoints").await.json()["checkpoints"], json!([]));
    assert_eq!(server.request("DELETE", &base, "").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_model_is_made_from_a_training_checkpoint_only() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    server.outcome("save_weights_for_sampler", save(&model_id, 2, "a")).await;
    let load = |kind: &str, name: &str| json!({ "session_id": session_id, "model_seq_id": 1, "path": format!("tinker://{model_id}/{kind}/{name}"), "optimizer": true });
    let reply = server.post("load_weights", load("sampler_weights", "a")).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("sampler weights"), "{}", reply.detail());
    assert_eq!(server.post("load_weights", load("weights", "b")).await.status, StatusCode::NOT_FOUND);
    let loaded = server.outcome("load_weights", load("weights", "a")).await;
    assert_eq!(loaded["model_id"], json!(format!("{session_id}:train:1")));
    let is_load = |r: &Request| matches!(r, Request::CreateModelFromCheckpoint { with_optimizer: true, .. });
    assert_eq!(server.engine.count(is_load), 1);
    let info = server.ok("get_info", json!({ "model_id": loaded["model_id"] })).await;
    assert_eq!(info["lora_rank"], json!(8));
}

#[tokio::test]
async fn a_checkpoint_is_loaded_into_a_model_in_its_place() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    let load = |seq_id: u64, name: &str| {
        let path = format!("tinker://{model_id}/weights/{name}");
        json!({ "model_id": model_id, "seq_id": seq_id, "path": path, "optimizer": false })
    };
    assert_eq!(server.outcome("load_weights", load(2, "missing")).await["category"], json!("user"));
    assert!(server.outcome("load_weights", load(3, "a")).await["path"].is_string());
}

#[tokio::test]
async fn checkpoints_of_both_kinds_can_be_sampled_and_none_of_another_base() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    server.outcome("save_weights_for_sampler", save(&model_id, 2, "a")).await;
    for (n, kind) in ["weights", "sampler_weights"].into_iter().enumerate() {
        let path = format!("tinker://{model_id}/{kind}/a");
        let body = json!({ "session_id": session_id, "sampling_session_seq_id": n, "model_path": path });
        let id = server.ok("create_sampling_session", body).await["sampling_session_id"].clone();
        let sampler = server.get(&format!("samplers/{}", id.as_str().unwrap())).await.json();
        assert_eq!((&sampler["model_path"], &sampler["base_model"]), (&json!(path), &json!("org/base")));
    }
    // A base that is named beside it is the checkpoint's.
    let path = format!("tinker://{model_id}/weights/a");
    let named = |n: u64, base: &str| json!({ "session_id": session_id, "sampling_session_seq_id": n, "model_path": path, "base_model": base });
    server.ok("create_sampling_session", named(8, "org/base")).await;
    assert_eq!(server.post("create_sampling_session", named(9, "org/other")).await.status, StatusCode::BAD_REQUEST);
    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 9, "base_model": "org/other" });
    assert_eq!(server.post("create_sampling_session", body).await.status, StatusCode::BAD_REQUEST);
    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 9, "model_path": "tinker://x/weights/y" });
    assert_eq!(server.post("create_sampling_session", body).await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.outcome("create_model", create_model_body(&session_id, 5)).await["type"], json!("create_model"));
}

#[tokio::test]
async fn a_number_of_a_sampling_session_stands_for_what_it_was_made_of() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    for (seq_id, name) in [(1, "a"), (2, "b")] {
        server.outcome("save_weights_for_sampler", save(&model_id, seq_id, name)).await;
    }
    let path = |name: &str| format!("tinker://{model_id}/sampler_weights/{name}");
    let body = |n: u64, of: Value| {
        let mut body = json!({ "session_id": session_id, "sampling_session_seq_id": n });
        body.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
        body
    };
    let (of_a, of_base) = (json!({ "model_path": path("a") }), json!({ "base_model": "org/base" }));
    server.ok("create_sampling_session", body(0, of_a.clone())).await;
    server.ok("create_sampling_session", body(1, of_base.clone())).await;
    let snapshot = json!({ "model_id": model_id, "sampling_session_seq_id": 2, "kind": "snapshot", "seq_id": 3 });
    server.outcome("save_weights_for_sampler", snapshot).await;
    // One that is asked for again is the first, though its checkpoint is gone.
    server.request("DELETE", &format!("training_runs/{model_id}/checkpoints/sampler_weights/a"), "").await;
    server.ok("create_sampling_session", body(0, of_a.clone())).await;
    server.ok("create_sampling_session", body(1, of_base.clone())).await;
    for (n, other) in [(0, json!({ "model_path": path("b") })), (0, of_base.clone()), (1, of_a), (2, of_base)] {
        let refused = server.post("create_sampling_session", body(n, other.clone())).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{n} {other}");
        assert!(refused.json()["detail"].to_string().contains("was made before, of something else"), "{n} {other}");
    }
    // So it is with the numbers of its samples.
    let asked = |seed: Option<u64>, temperature: f64| {
        let mut body = super::sample_body(&format!("{session_id}:sample:1"), 7);
        (body["sampling_params"]["seed"], body["sampling_params"]["temperature"]) = (json!(seed), json!(temperature));
        body
    };
    for _ in 0..2 {
        server.ok("asample", asked(None, 1.0)).await;
    }
    for other in [asked(Some(1), 1.0), asked(None, 0.5)] {
        let refused = server.post("asample", other).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.json()["detail"].to_string().contains("was sent before and asked for something else"));
    }
}

#[tokio::test]
async fn a_path_that_is_sampled_without_a_session_is_what_it_is_now() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.outcome("save_weights_for_sampler", save(&model_id, 1, "a")).await;
    let path = format!("tinker://{model_id}/sampler_weights/a");
    let ask = async |more: Value| {
        let mut body = super::sample_body("", 0);
        let fields = body.as_object_mut().unwrap();
        fields.retain(|key, _| key != "sampling_session_id" && key != "seq_id");
        fields.insert("model_path".into(), json!(path));
        fields.extend(more.as_object().unwrap().clone());
        server.post("asample", body).await
    };
    let sampler = |reply: &super::Reply| reply.json()["request_id"].as_str().unwrap().rsplit_once(':').unwrap().0.to_owned();
    let first = sampler(&ask(json!({})).await);
    assert_eq!(sampler(&ask(json!({ "base_model": "org/base" })).await), first);
    assert_eq!(ask(json!({ "base_model": "org/other" })).await.status, StatusCode::BAD_REQUEST);
    let mut again = save(&model_id, 2, "a");
    again["overwrite"] = json!(true);
    server.outcome("save_weights_for_sampler", again).await;
    assert_ne!(sampler(&ask(json!({})).await), first, "it was saved again");
    server.request("DELETE", &format!("training_runs/{model_id}/checkpoints/sampler_weights/a"), "").await;
    assert_eq!(ask(json!({})).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_engine_is_asked_for_one_save_and_not_for_a_directory() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let path = format!("tinker://{model_id}/weights/a");
    let mut identities = Vec::new();
    for (n, seq_id) in (1..).zip([1, 2]) {
        let mut body = save(&model_id, seq_id, "a");
        body["overwrite"] = json!(true);
        server.outcome("save_weights", body).await;
        let load = json!({ "session_id": session_id, "model_seq_id": n, "path": path, "optimizer": true });
        server.outcome("load_weights", load).await;
        let body = json!({ "session_id": session_id, "sampling_session_seq_id": n, "model_path": path });
        server.ok("create_sampling_session", body).await;
        let directory = server.data_dir.path().join("checkpoints").join(&model_id).join("weights/a");
        let on_disk: Value = serde_json::from_slice(&std::fs::read(directory.join("strata.json")).unwrap()).unwrap();
        identities.push(on_disk["save_id"].as_str().unwrap().to_owned());
    }
    assert_ne!(identities[0], identities[1]);
    let into_it = json!({ "model_id": model_id, "seq_id": 3, "path": path, "optimizer": false });
    server.outcome("load_weights", into_it).await;
    let requests = server.engine.requests.lock().unwrap();
    let asked = requests.iter().filter_map(|request| match request {
        Request::CreateModelFromCheckpoint { source, .. } | Request::CreateSampler { source: Some((source, _)), .. } => {
            Some(source)
        }
        Request::Train { op: TrainOp::LoadState { source, .. }, .. } => Some(source),
        _ => None,
    });
    let asked: Vec<_> = asked.map(|source| (source.name.as_str(), source.save_id.as_deref())).collect();
    let expected = [0, 0, 1, 1, 1].map(|i: usize| (path.as_str(), Some(identities[i].as_str())));
    assert_eq!(asked, expected);
}

fn external(model_id: &str, seq_id: u64, name: &str) -> Value {
    json!({ "model_id": model_id, "seq_id": seq_id, "path": name, "ttl_seconds": 3600, "type": "save_weights_external" })
}

impl TestServer {
    /// Fetches an address with some headers, and without a key.
    pub(super) async fn fetch(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
    ) -> (StatusCode, axum::http::HeaderMap, Vec<u8>) {
        let path = url.split_once("//").map_or(url, |(_, rest)| &rest[rest.find('/').unwrap()..]);
        let request = HttpRequest::builder().method(method).uri(path).header("host", "localhost:8000");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let response = self.router.clone().oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        (parts.status, parts.headers, axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec())
    }
}

#[tokio::test]
async fn external_weights_are_fetched_by_signed_addresses_whole_or_in_part() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let saved = server.outcome("save_weights_external", external(&model_id, 1, "a")).await;
    assert_eq!(saved["path"], json!(format!("tinker://{model_id}/external_weights/a")));
    let dir = server.data_dir.path().join("checkpoints").join(&model_id).join("external_weights/a");
    let content: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(dir.join("adapter_model.safetensors"), &content).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", dir.join("link")).unwrap();
    let listing = server.get(&format!("training_runs/{model_id}/checkpoints")).await.json();
    assert_eq!(listing["checkpoints"][0]["checkpoint_type"], json!("external"));

    let signed =
        server.get(&format!("training_runs/{model_id}/checkpoints/external_weights/a/external_weights_urls")).await.json();
    let urls = signed["urls"].as_object().unwrap();
    assert_eq!(urls.keys().collect::<Vec<_>>(), ["adapter_model.safetensors"]);
    assert!(signed["expires"].as_str().unwrap().ends_with('Z'), "{signed}");
    let url = urls["adapter_model.safetensors"].as_str().unwrap();
    assert!(url.starts_with("http://localhost:8000/api/v1/"), "{url}");
    let (status, headers, bytes) = server.fetch("GET", url, &[]).await;
    assert_eq!((status, bytes == content), (StatusCode::OK, true));
    assert_eq!(
        (&headers["content-length"], &headers["accept-ranges"]),
        (&"200000".parse().unwrap(), &"bytes".parse().unwrap())
    );
    let etag = headers["etag"].to_str().unwrap().to_owned();
    let (status, headers, bytes) = server.fetch("HEAD", url, &[]).await;
    assert_eq!((status, &headers["content-length"], bytes.len()), (StatusCode::OK, &"200000".parse().unwrap(), 0));
    let (status, headers, bytes) = server.fetch("GET", url, &[("range", "bytes=70000-140000"), ("if-range", &etag)]).await;
    assert_eq!((status, bytes == content[70_000..=140_000]), (StatusCode::PARTIAL_CONTENT, true));
    assert_eq!(headers["content-range"], "bytes 70000-140000/200000");
    let (status, _, bytes) = server.fetch("GET", url, &[("range", "bytes=5-6"), ("if-range", "\"other\"")]).await;
    assert_eq!((status, bytes.len()), (StatusCode::OK, 200_000));
    let (status, headers, _) = server.fetch("GET", url, &[("range", "bytes=200000-")]).await;
    assert_eq!((status, &headers["content-range"]), (StatusCode::RANGE_NOT_SATISFIABLE, &"bytes */200000".parse().unwrap()));

    for changed in [
        url.replace("adapter_model.safetensors", "strata.json"),
        url.replace("adapter_model.safetensors", "link"),
        url.replace("adapter_model.safetensors", "..%2F..%2Fstrata.lock"),
        url.replace("external_weights", "weights"),
        url.replace("expires=1", "expires=2"),
        url[..url.len() - 1].to_owned(),
        url.replace("signature=", "signature=%C3%A9"),
        url.split('?').next().unwrap().to_owned(),
    ] {
        let (status, _, bytes) = server.fetch("GET", &changed, &[]).await;
        assert!(status.is_client_error() && bytes.len() < 1000, "{changed}: {status}");
    }
    server.request("DELETE", &format!("training_runs/{model_id}/checkpoints/external_weights/a"), "").await;
    assert_eq!(server.fetch("GET", url, &[]).await.0, StatusCode::NOT_FOUND);
    server.outcome("save_weights_external", external(&model_id, 2, "a")).await;
    assert_eq!(server.fetch("GET", url, &[]).await.0, StatusCode::FORBIDDEN, "another save of the name");
}

#[tokio::test]
async fn addresses_have_the_name_that_settings_or_the_client_give_the_server() {
    let ask = async |server: &TestServer, headers: &[(&str, &str)]| {
        let (_, model_id) = server.new_model().await;
        server.outcome("save_weights_external", external(&model_id, 1, "a")).await;
        let dir = server.data_dir.path().join("checkpoints").join(&model_id).join("external_weights/a");
        std::fs::write(dir.join("a.bin"), "x").unwrap();
        let path = format!("/api/v1/training_runs/{model_id}/checkpoints/external_weights/a/external_weights_urls");
        let (status, _, bytes) = server.fetch("GET", &path, headers).await;
        let answer: Value = serde_json::from_slice(&bytes).unwrap();
        (status, answer["urls"]["a.bin"].as_str().map(|url| url[..url.find("/api").unwrap()].to_owned()))
    };
    let server = TestServer::new();
    assert_eq!(ask(&server, &[]).await.1.unwrap(), "http://localhost:8000");
    let forwarded = [("x-forwarded-host", "strata.example, inner"), ("x-forwarded-proto", "https")];
    assert_eq!(ask(&server, &forwarded).await.1.unwrap(), "https://strata.example");
    assert_eq!(ask(&server, &[("x-forwarded-proto", "javascript")]).await.1.unwrap(), "http://localhost:8000");
    for hostile in ["a@b", "a b", "a/b?c", "\"><"] {
        assert_eq!(ask(&server, &[("x-forwarded-host", hostile)]).await.0, StatusCode::BAD_REQUEST, "{hostile}");
    }
    let server = TestServer::with(|config| config.public_url = Some("https://x.example/prefix/".into()));
    assert_eq!(ask(&server, &forwarded).await.1.unwrap(), "https://x.example/prefix");
}

#[tokio::test]
async fn an_archive_is_redirected_to_and_is_a_tar_of_the_adapter() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    let dir = server.data_dir.path().join("checkpoints").join(&model_id).join("weights/a");
    std::fs::write(dir.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(dir.join("optimizer.safetensors"), "x").unwrap();
    let path = format!("/api/v1/training_runs/{model_id}/checkpoints/weights/a/archive");
    let (status, headers, _) = server.fetch("GET", &path, &[]).await;
    assert_eq!(status, StatusCode::FOUND);
    assert!(headers["expires"].to_str().unwrap().ends_with(" GMT"));
    let (status, headers, tar) = server.fetch("GET", headers["location"].to_str().unwrap(), &[]).await;
    assert_eq!((status, headers["content-length"].to_str().unwrap()), (StatusCode::OK, &*tar.len().to_string()));
    // Header and content of the first, the header of an empty one, and two empty blocks.
    assert_eq!(tar.len(), 5 * 512);
    assert!(
        tar.starts_with(b"adapter_config.json\0")
            && tar[512..].starts_with(b"{}\0")
            && tar[1024..].starts_with(b"checkpoint_complete\0")
    );
}

#[tokio::test]
async fn a_copy_is_a_checkpoint_of_its_own() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    server.outcome("save_weights", save(&model_id, 1, "a")).await;
    let source = format!("tinker://{model_id}/weights/a");
    let copied = server
        .ok("copy_weights", json!({ "source_path": source, "session_id": session_id, "model_seq_id": 5, "ttl_seconds": 3600 }))
        .await;
    assert_eq!(copied["tinker_path"], json!(format!("tinker://{session_id}:train:5/weights/a")));
    server.request("DELETE", &format!("training_runs/{model_id}/checkpoints/weights/a"), "").await;
    // Its place is its own.
    let place = json!({ "session_id": session_id, "model_seq_id": 5 });
    server.outcome("save_weights", save(&model_id, 2, "a")).await;
    let mut other = place.clone();
    other["source_path"] = json!(source);
    let taken = server.post("copy_weights", other).await;
    assert!(
        taken.status == StatusCode::BAD_REQUEST && taken.json()["detail"].to_string().contains("a copy of another checkpoint")
    );
    let trained = server.post("create_model", create_model_body(&session_id, 5)).await;
    assert!(
        trained.status == StatusCode::BAD_REQUEST
            && trained.json()["detail"].to_string().contains("has a copy of a checkpoint")
    );
    server.request("DELETE", &format!("training_runs/{model_id}/checkpoints/weights/a"), "").await;
    let server = server.restart();
    let info = server.ok("weights_info", json!({ "tinker_path": copied["tinker_path"] })).await;
    assert_eq!(info["lora_rank"], json!(8));
    let checkpoints = server.get("checkpoints").await.json();
    assert!(checkpoints["checkpoints"][0]["expires_at"].is_string());
    assert_eq!(server.post("copy_weights", json!({ "source_path": source })).await.status, StatusCode::NOT_FOUND);
    for wrong in [json!({ "ttl_seconds": 10 }), json!({ "session_id": "x" }), json!({ "session_id": "x", "model_seq_id": 1 })] {
        let mut body = json!({ "source_path": copied["tinker_path"] });
        body.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert!(server.post("copy_weights", body).await.status.is_client_error(), "{wrong}");
    }
    let again = async || {
        let request = HttpRequest::post("/api/v1/copy_weights")
            .header("content-type", "application/json")
            .header("x-idempotency-key", "k");
        let body = json!({ "source_path": copied["tinker_path"], "destination_project_id": "p" }).to_string();
        server.send(request.body(body.into()).unwrap()).await.json()["tinker_path"].clone()
    };
    assert_eq!(again().await, again().await);
    assert_eq!(server.get("checkpoints").await.json()["cursor"]["total_count"], json!(2));
}

#[tokio::test]
async fn the_checkpoints_of_a_run_come_all_at_once_or_in_pages() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for (seq_id, name) in (1..).zip(["a", "b", "c"]) {
        server.outcome("save_weights", save(&model_id, seq_id, name)).await;
    }
    let names = async |query: &str| {
        let listed = server.get(&format!("training_runs/{model_id}/checkpoints{query}")).await.json();
        assert_eq!(listed["cursor"]["total_count"], json!(3));
        let ids = listed["checkpoints"].as_array().unwrap().iter().map(|c| c["checkpoint_id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(names("").await, ["weights/c", "weights/b", "weights/a"]);
    assert_eq!(names("?limit=1&offset=1").await, ["weights/b"]);
}
