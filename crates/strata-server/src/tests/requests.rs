//! Keys, bodies, ids that make no sense, sessions.

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request as HttpRequest, StatusCode};
use serde_json::{Value, json};
use strata_engine::api::{Client, Request, SampleRequest};

use super::{Reply, TestServer, create_model_body, sample_body};
use crate::app::{App, json_answer};
use crate::clock;
use crate::limits;

async fn with_key(server: &TestServer, header: &str, key: &str) -> StatusCode {
    let request = HttpRequest::get("/api/v1/get_server_capabilities").header(header, key).body(Body::empty());
    server.send(request.unwrap()).await.status
}

#[tokio::test]
async fn only_the_key_of_the_server_passes() {
    let server = TestServer::with(|config| config.api_key = Some("tml-secret".into()));
    assert_eq!(with_key(&server, "X-API-Key", "tml-secret").await, StatusCode::OK);
    assert_eq!(with_key(&server, "authorization", "Bearer tml-secret").await, StatusCode::OK);
    for wrong in ["tml-secre", "tml-secrets", "", "eyJhbGciOi"] {
        assert_eq!(with_key(&server, "X-API-Key", wrong).await, StatusCode::UNAUTHORIZED, "{wrong:?}");
    }
    let reply = server.get("get_server_capabilities").await;
    assert_eq!(reply.status, StatusCode::UNAUTHORIZED);
    assert!(reply.detail().contains("X-API-Key"));
    assert_eq!(server.get("healthz").await.status, StatusCode::OK);
}

#[tokio::test]
async fn health_follows_the_engine() {
    let server = TestServer::new();
    assert_eq!(server.get("healthz").await.json(), json!({ "status": "ok" }));
    server.engine.is_dead.store(true, Ordering::Relaxed);
    let reply = server.get("healthz").await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(reply.detail().contains("engine"));
}

#[tokio::test]
async fn the_first_requests_of_a_client_are_answered() {
    let server = TestServer::new();
    let version = || json!({ "sdk_version": "0.38.0" });
    assert!(server.ok("client/config", version()).await.is_object());
    assert!(server.ok("client/dynamic_config", version()).await.is_object());
    assert_eq!(server.ok("telemetry", json!({ "events": [] })).await, json!({ "status": "accepted" }));
    let model = &server.get("get_server_capabilities").await.json()["supported_models"][0];
    assert_eq!((&model["model_name"], &model["max_context_length"]), (&json!("org/base"), &json!(64)));
}

#[tokio::test]
async fn a_body_that_is_not_json_is_told_what_is_wrong_with_it() {
    let server = TestServer::new();
    let reply = server.request("POST", "create_session", "{\"tags\": ").await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("EOF"), "{}", reply.detail());
    let reply = server.post("session_heartbeat", json!({})).await;
    assert!(reply.detail().contains("session_id"), "{}", reply.detail());
}

#[tokio::test]
async fn a_query_that_makes_no_sense_gets_a_sentence() {
    let server = TestServer::new();
    for path in ["sessions?limit=-1", "training_runs?offset=x", "checkpoints?limit=1e9"] {
        let reply = server.get(path).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}");
        let (_, query) = path.split_once('?').unwrap();
        assert!(reply.detail().contains(&format!("query {query:?}: ")), "{}", reply.detail());
    }
}

#[tokio::test]
async fn paths_that_do_not_exist_get_a_sentence() {
    let server = TestServer::new();
    let reply = server.get("nonsense").await;
    assert_eq!(reply.status, StatusCode::NOT_FOUND);
    assert!(reply.detail().contains("/api/v1/nonsense"));
    let reply = server.get("create_model").await;
    assert_eq!(reply.status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(reply.detail().contains("GET"));
}

#[tokio::test]
async fn ids_that_name_nothing_are_not_found() {
    let server = TestServer::new();
    for (path, body) in [
        ("retrieve_future", json!({ "request_id": "garbage" })),
        ("retrieve_future", json!({ "request_id": "../../etc/passwd" })),
        ("get_info", json!({ "model_id": "garbage" })),
        ("session_heartbeat", json!({ "session_id": "garbage" })),
        ("sessions/garbage/finish", json!({})),
        ("optim_step", json!({ "model_id": "garbage", "seq_id": 1, "adam_params": {} })),
        ("save_weights", json!({ "model_id": "garbage", "seq_id": 1, "path": "a" })),
        ("create_model", create_model_body("garbage", 0)),
        ("asample", sample_body("garbage", 0)),
    ] {
        let reply = server.post(path, body).await;
        assert_eq!(reply.status, StatusCode::NOT_FOUND, "{path}");
        assert!(reply.detail().contains("there is no"), "{}", reply.detail());
    }
    assert_eq!(server.get("samplers/garbage").await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.get("training_runs/garbage").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn colons_in_paths_may_be_encoded_or_not() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for path in [model_id.clone(), model_id.replace(':', "%3A")] {
        let run = server.get(&format!("training_runs/{path}")).await.json();
        assert_eq!(run["training_run_id"], json!(model_id));
        assert_eq!(run["user_metadata"], json!({ "recipe": "sft" }));
    }
}

#[tokio::test]
async fn a_body_that_inflates_beyond_the_limit_is_refused() {
    let server = TestServer::new();
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    let zeros = vec![0u8; 1 << 20];
    for _ in 0..=(limits::BODY_BYTES_MAX >> 20) {
        std::io::Write::write_all(&mut encoder, &zeros).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 1 << 20);
    let request = HttpRequest::post("/api/v1/forward_backward")
        .header("content-type", "application/x-protobuf")
        .header("content-encoding", "zstd");
    let reply = server.send(request.body(bomb.into()).unwrap()).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(reply.detail().contains("256 MiB"));
}

#[tokio::test]
async fn a_body_above_the_limit_is_refused() {
    let server = TestServer::new();
    let reply = server.request("POST", "create_session", vec![b' '; limits::BODY_BYTES_MAX + 1]).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn a_finished_session_frees_everything_and_says_so_to_its_heartbeats() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let heartbeat = json!({ "session_id": session_id });
    server.ok("session_heartbeat", heartbeat.clone()).await;
    server
        .ok(
            "create_sampling_session",
            json!({ "session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/base" }),
        )
        .await;
    for _ in 0..2 {
        server.ok(&format!("sessions/{session_id}/finish"), json!({ "reason": { "type": "success" }, "detail": null })).await;
    }
    assert_eq!(server.post("session_heartbeat", heartbeat).await.status, StatusCode::GONE);
    assert_eq!(server.engine.count(|r| matches!(r, Request::EndSession)), 1);
    assert_eq!(server.post("optim_step", json!({ "model_id": model_id, "seq_id": 1 })).await.status, StatusCode::BAD_REQUEST);
    let reply = server.post("asample", sample_body(&format!("{session_id}:sample:0"), 0)).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("finished"), "{}", reply.detail());
}

#[tokio::test]
async fn a_silent_session_ends() {
    let server = TestServer::new();
    let (session_id, _) = server.new_model().await;
    assert!(server.app.registry.expire(clock::now()).is_empty());
    clock::advance(Duration::from_secs(301));
    server.app.reap().await;
    assert_eq!(server.engine.count(|r| matches!(r, Request::EndSession)), 1);
    assert_eq!(server.post("session_heartbeat", json!({ "session_id": session_id })).await.status, StatusCode::GONE);
}

#[tokio::test]
async fn sessions_can_be_looked_at() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    assert_eq!(server.get("sessions?limit=5").await.json(), json!({ "sessions": [session_id] }));
    let session = server.get(&format!("sessions/{session_id}")).await.json();
    assert_eq!(session["training_run_ids"], json!([model_id]));
    let runs = server.get("training_runs?limit=1").await.json();
    assert_eq!(runs["cursor"], json!({ "offset": 0, "limit": 1, "total_count": 1 }));
    assert_eq!(runs["training_runs"][0]["model_owner"], json!("tml:organization_user:local"));
    assert_eq!(runs["training_runs"][0]["last_checkpoint"], Value::Null);
}

#[tokio::test]
async fn sessions_are_limited_by_memory_and_silent_empty_ones_make_room() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let mut sessions = 0;
    let refused = loop {
        let reply = server.post("create_session", json!({})).await;
        if reply.status != StatusCode::OK {
            break reply;
        }
        sessions += 1;
    };
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(sessions > 4096, "{sessions} sessions fit in 16 MiB");
    clock::advance(Duration::from_secs(31));
    server.new_session().await;
    // One that has a model stays.
    server.ok("optim_step", json!({ "model_id": model_id, "seq_id": 1 })).await;
}

#[tokio::test]
async fn results_that_were_read_make_room_and_unread_ones_do_not() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let step = |seq_id: u64| json!({ "model_id": model_id, "seq_id": seq_id });
    server.outcome("optim_step", step(1)).await;
    server.ok("optim_step", step(2)).await;
    let mut hog = Vec::new();
    let client = strata_engine::api::Client { owner: "hog".into(), session: "hog".into() };
    while let Ok(charge) = server.engine.ledger.charge(&client, 1000) {
        hog.push(charge);
    }
    assert_eq!(server.retrieve(&format!("{model_id}:1")).await.status, StatusCode::GONE);
    assert_eq!(server.retrieve(&format!("{model_id}:2")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_engine_is_a_429_and_the_same_request_is_taken_later() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/base" });
    server.ok("create_sampling_session", body).await;
    server.engine.is_full.store(true, Ordering::Relaxed);
    let step = json!({ "model_id": model_id, "seq_id": 1 });
    let sample = sample_body(&format!("{session_id}:sample:0"), 0);
    for (path, body) in [("optim_step", &step), ("asample", &sample)] {
        assert_eq!(server.post(path, body.clone()).await.status, StatusCode::TOO_MANY_REQUESTS);
    }
    server.engine.is_full.store(false, Ordering::Relaxed);
    for (path, body) in [("optim_step", step), ("asample", sample)] {
        assert!(server.outcome(path, body).await.get("error").is_none());
    }
}

#[tokio::test]
async fn a_request_can_be_cancelled() {
    let server = TestServer::new();
    server.ok("cancel_future", json!({ "request_id": "x:1" })).await;
    assert_eq!(server.engine.count(|r| matches!(r, Request::Cancel { request_id } if **request_id == *"x:1")), 1);
    assert_eq!(server.post("cancel_future", json!({})).await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_path_that_is_no_text_gets_a_sentence_too() {
    let server = TestServer::new();
    for path in ["training_runs/%ff", "sessions/%ff", "samplers/%c3%28"] {
        let reply = server.get(path).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        assert!(reply.detail().contains("UTF-8"), "{}", reply.detail());
    }
}

#[tokio::test]
async fn clients_are_told_to_send_no_more_than_there_is_room_for() {
    let flag = async |server: &TestServer, name: &str| server.ok("client/config", json!({})).await[name].as_u64().unwrap();
    let large = TestServer::new();
    assert_eq!(flag(&large, "fwdbwd_max_chunk_bytes_count").await, 5_000_000);
    assert_eq!(flag(&large, "sample_max_concurrent_requests").await, 2000);
    let small = TestServer::with(|config| (config.transit_bytes, config.connections_max) = (8 << 20, 100));
    assert_eq!(flag(&small, "fwdbwd_max_chunk_bytes_count").await, 1 << 20);
    assert_eq!(flag(&small, "fwdbwd_dispatch_bytes_semaphore_size").await, 2 << 20);
    assert_eq!(flag(&small, "sample_max_concurrent_requests").await, 25);
}

#[tokio::test]
async fn a_refused_body_is_not_kept_without_being_paid_for() {
    let server = TestServer::new();
    let free = server.app.transit.bytes_free();
    let mut others = server.app.transit.charge();
    others.try_grow(free - (free / 16) - (40 << 10)).unwrap();
    let reply = server.post("no_such_thing", json!({ "model_id": "a", "seq_id": 1 })).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS, "it is sent again when there is room");
    drop(others);
    assert_eq!(server.post("no_such_thing", json!({})).await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.app.transit.bytes_free(), free);
}

/// Has two threads send at the same moment, and answers what they were told.
fn at_once(server: &TestServer, path: &str, bodies: [Value; 2]) -> [Reply; 2] {
    let barrier = Barrier::new(2);
    let send = |body: Value| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        barrier.wait();
        runtime.block_on(server.post(path, body))
    };
    std::thread::scope(|scope| bodies.map(|body| scope.spawn(|| send(body))).map(|thread| thread.join().unwrap()))
}

/// A client sends a snapshot again under another number of a session.
#[tokio::test]
async fn of_two_snapshots_at_the_same_moment_one_is_made_and_nothing_is_left_of_the_other() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for round in 0..400 {
        // Or under the same, as it was.
        let number = |n: u64| 2 * round + n * (round % 2);
        let snapshot = |n: u64| json!({ "model_id": model_id, "seq_id": round + 1, "sampling_session_seq_id": number(n) });
        let told = at_once(&server, "save_weights_for_sampler", [snapshot(0), snapshot(1)]);
        assert!(told.iter().all(|reply| reply.status == StatusCode::OK), "{:?}", told.map(|reply| reply.bytes));
        let made = server.retrieve(told[0].json()["request_id"].as_str().unwrap()).await.json();
        let made = made["sampling_session_id"].as_str().unwrap_or_else(|| panic!("round {round}: {made}")).to_owned();
        for id in [0, 1].map(|n| format!("{}:sample:{}", model_id.split(':').next().unwrap(), number(n))) {
            let expected = if id == made { StatusCode::OK } else { StatusCode::NOT_FOUND };
            assert_eq!(server.get(&format!("samplers/{id}")).await.status, expected, "{id} beside {made}");
        }
    }
}

#[tokio::test]
async fn a_result_that_a_client_cancels_makes_room_before_one_that_is_waited_for() {
    let server = TestServer::new();
    let session = server.ok("create_session", json!({})).await["session_id"].clone();
    let made = json!({ "session_id": session, "sampling_session_seq_id": 0, "base_model": "org/base" });
    let made = server.ok("create_sampling_session", made).await;
    let sampler_id = made["sampling_session_id"].as_str().unwrap();
    for seq_id in 0..2 {
        server.ok("asample", sample_body(sampler_id, seq_id)).await;
    }
    assert!(!server.app.futures.evict(), "nobody has read any of them");
    server.ok("cancel_future", json!({ "request_id": format!("{sampler_id}:0") })).await;
    assert!(server.app.futures.evict() && !server.app.futures.evict());
    assert_eq!(server.retrieve(&format!("{sampler_id}:0")).await.status, StatusCode::GONE);
    assert_eq!(server.retrieve(&format!("{sampler_id}:1")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_large_result_is_written_down_on_another_thread_than_the_engines() {
    let server = TestServer::new();
    let client = Client { owner: "o".into(), session: "s".into() };
    for (id, bytes, is_large) in [("small", 1000, false), ("large", limits::RESULT_INLINE_BYTES_MAX + 1, true)] {
        server.engine.charged_bytes.store(bytes, Ordering::Relaxed);
        let (told, thread) = std::sync::mpsc::channel();
        let completer = server.app.futures.begin(id, &client).unwrap();
        let finish = move |_: &App, _| {
            told.send(std::thread::current().id()).unwrap();
            Ok(json_answer(&json!({})))
        };
        let request = Request::Sample { sampler_id: "x".into(), sample: SampleRequest::of(vec![1]) };
        let base = server.app.bases.find("org/base").unwrap();
        // The engine of these tests answers on the thread that asks.
        server.app.dispatch(id, (base, client.clone()), completer, request, finish, |_, _| {}).unwrap();
        assert_eq!(server.retrieve(id).await.status, StatusCode::OK);
        assert_eq!(thread.recv().unwrap() != std::thread::current().id(), is_large, "{id}");
    }
}
