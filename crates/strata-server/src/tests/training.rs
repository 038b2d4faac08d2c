//! Models, their operations and their futures.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::http::{Request as HttpRequest, StatusCode};
use prost::Message;
use serde_json::{Value, json};
use strata_engine::api::{Request, TrainOp};

use super::engine::SAMPLER_BYTES;
use super::{Reply, TestServer, create_model_body, sample_body};
use crate::clock;
use crate::wire::proto;

pub(super) fn optim_step(model_id: &str, seq_id: u64) -> Value {
    json!({ "model_id": model_id, "seq_id": seq_id, "adam_params": { "learning_rate": 1e-3 }, "type": "optim_step" })
}

pub(super) fn pass_body(model_id: &str, seq_id: i32, chunk: proto::ChunkKind) -> Vec<u8> {
    let datum = proto::Datum { model_input: vec![proto::Chunk { chunk: Some(chunk) }], ..Default::default() };
    let request = proto::ForwardBackwardRequest {
        model_id: model_id.into(),
        seq_id,
        data: vec![datum],
        loss_fn: "cross_entropy".into(),
        ..Default::default()
    };
    request.encode_to_vec()
}

pub(super) fn tokens(count: usize) -> proto::ChunkKind {
    proto::ChunkKind::EncodedText(proto::EncodedText { tokens: vec![0; count * 4].into() })
}

impl TestServer {
    pub(super) async fn pass(&self, body: Vec<u8>, encoding: Option<&str>) -> Reply {
        let mut request = HttpRequest::post("/api/v1/forward_backward").header("content-type", "application/x-protobuf");
        if let Some(encoding) = encoding {
            request = request.header("content-encoding", encoding);
        }
        self.send(request.body(body.into()).unwrap()).await
    }

    async fn retrieve_protobuf(&self, request_id: &str) -> Reply {
        let body = json!({ "request_id": request_id }).to_string();
        let request = HttpRequest::post("/api/v1/retrieve_future").header("accept", "application/x-protobuf");
        let request = request.header("content-type", "application/json");
        self.send(request.body(body.into()).unwrap()).await
    }
}

#[tokio::test]
async fn a_model_has_the_id_that_clients_compute_and_is_made_once() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    assert_eq!(model_id, format!("{session_id}:train:0"));
    let again = server.outcome("create_model", create_model_body(&session_id, 0)).await;
    assert_eq!(again["model_id"], json!(model_id));
    assert_eq!(server.engine.count(|r| matches!(r, Request::CreateModel { .. })), 1);
    let info = server.ok("get_info", json!({ "model_id": model_id })).await;
    assert_eq!((&info["model_data"]["model_name"], &info["lora_rank"]), (&json!("org/base"), &json!(8)));
    assert_eq!(info["model_data"]["tokenizer_id"], json!("/models/base"));
}

#[tokio::test]
async fn models_that_cannot_be_are_refused_with_a_reason() {
    let server = TestServer::new();
    let session_id = server.new_session().await;
    let mut body = create_model_body(&session_id, 0);
    body["base_model"] = json!("org/other");
    let reply = server.post("create_model", body.clone()).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("org/other") && reply.detail().contains("org/base"), "{}", reply.detail());
    body["base_model"] = json!("org/base:peft:262144");
    body["optimizer_config"] = json!({ "type": "dimuon", "version": 1 });
    assert!(server.post("create_model", body.clone()).await.detail().contains("dimuon"));
    body["optimizer_config"] = json!({ "type": "adamw" });
    body["lora_config"]["rank"] = json!(-1);
    assert!(server.post("create_model", body.clone()).await.detail().contains("-1"));
    body["lora_config"]["rank"] = json!(666);
    assert_eq!(server.outcome("create_model", body).await["category"], json!("user"));
    let reply = server.post("optim_step", optim_step(&format!("{session_id}:train:0"), 1)).await;
    assert!(reply.detail().contains("rank 666"), "{}", reply.detail());
}

#[tokio::test]
async fn operations_are_acknowledged_as_they_arrive_and_each_reaches_the_engine_once() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    for seq_id in [2, 3, 2, 1, 3] {
        let acknowledged = server.ok("optim_step", optim_step(&model_id, seq_id)).await;
        assert_eq!(acknowledged["request_id"], json!(format!("{model_id}:{seq_id}")));
    }
    assert_eq!(*server.engine.ran.lock().unwrap(), [1, 2, 3]);
    assert_eq!(server.engine.count(|r| matches!(r, Request::Train { .. })), 3);
    let outcome = server.retrieve(&format!("{model_id}:3")).await.json();
    assert_eq!(outcome["metrics"]["optim/grad_norm"], json!(0.5));
}

#[tokio::test]
async fn a_number_that_another_request_took_is_refused_and_one_sent_again_is_not() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    assert_eq!(server.pass(pass_body(&model_id, 1, tokens(3)), None).await.status, StatusCode::OK);
    assert_eq!(server.pass(pass_body(&model_id, 1, tokens(3)), None).await.status, StatusCode::OK);
    let save = json!({ "model_id": model_id, "path": "a", "seq_id": 2, "type": "save_weights" });
    server.ok("save_weights", save.clone()).await;
    // Its record says when it was asked for, which is no part of what is asked.
    server.ok("save_weights", save).await;
    let others = [
        server.pass(pass_body(&model_id, 1, tokens(4)), None).await,
        server.post("optim_step", optim_step(&model_id, 1)).await,
        server.post("save_weights", json!({ "model_id": model_id, "path": "b", "seq_id": 2, "type": "save_weights" })).await,
        server
            .post(
                "save_weights_for_sampler",
                json!({ "model_id": model_id, "sampling_session_seq_id": 7, "kind": "snapshot", "seq_id": 2 }),
            )
            .await,
    ];
    for (other, seq_id) in others.into_iter().zip([1, 1, 2, 2]) {
        assert_eq!(other.status, StatusCode::BAD_REQUEST);
        let detail = other.json()["detail"].to_string();
        assert!(detail.contains(&format!("{model_id}:{seq_id} was sent before and asked for something else")), "{detail}");
    }
    // So is a model that takes the number of another.
    let mut of_rank_1 = create_model_body(&session_id, 0);
    of_rank_1["lora_config"]["rank"] = json!(1);
    let path = format!("tinker://{model_id}/weights/a");
    let load = json!({ "session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": true, "type": "load_weights" });
    server.ok("create_model", create_model_body(&session_id, 0)).await;
    for other in [server.post("create_model", of_rank_1).await, server.post("load_weights", load).await] {
        let detail = other.json()["detail"].to_string();
        assert_eq!(other.status, StatusCode::BAD_REQUEST, "{detail}");
        assert!(detail.contains(&format!("{model_id}:0 was sent before and asked for something else")), "{detail}");
    }
    // The name that the last would have made is free.
    let body = json!({ "model_id": model_id, "sampling_session_seq_id": 7, "kind": "snapshot", "seq_id": 3 });
    let saved = server.outcome("save_weights_for_sampler", body.clone()).await;
    assert_eq!(server.engine.count(|r| matches!(r, Request::Train { .. })), 3);
    // The SDK sends such a save again under the next number of a sampling session, and then has no use for that.
    for sampling_session_seq_id in [7, 9] {
        let mut again = body.clone();
        again["sampling_session_seq_id"] = json!(sampling_session_seq_id);
        assert_eq!(server.outcome("save_weights_for_sampler", again).await, saved);
    }
    assert_eq!(server.engine.count(|r| matches!(r, Request::Train { .. })), 3);
    assert_eq!(server.get(&format!("samplers/{session_id}:sample:9")).await.status, StatusCode::NOT_FOUND);

    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 8, "base_model": "org/base" });
    let sampler_id = server.ok("create_sampling_session", body).await["sampling_session_id"].clone();
    let sample = sample_body(sampler_id.as_str().unwrap(), 5);
    server.ok("asample", sample.clone()).await;
    server.ok("asample", sample.clone()).await;
    let mut other = sample;
    other["prompt"]["chunks"][0]["tokens"] = json!([1, 2, 4]);
    assert_eq!(server.post("asample", other).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(server.engine.count(|r| matches!(r, Request::Sample { .. })), 1);
}

#[tokio::test]
async fn a_poll_is_held_and_then_answered_408() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.engine.holds.store(true, Ordering::Relaxed);
    server.ok("optim_step", optim_step(&model_id, 1)).await;
    let started = Instant::now();
    let reply = server.retrieve(&format!("{model_id}:1")).await;
    assert_eq!(reply.status, StatusCode::REQUEST_TIMEOUT);
    assert!(started.elapsed() >= Duration::from_millis(50));
    assert_eq!(reply.json()["type"], json!("try_again"));
    server.engine.release();
    for _ in 0..2 {
        assert_eq!(server.retrieve(&format!("{model_id}:1")).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_closing_server_lets_go_of_polls() {
    let server = TestServer::with(|config| config.poll_hold = Duration::from_secs(60));
    let (_, model_id) = server.new_model().await;
    server.engine.holds.store(true, Ordering::Relaxed);
    server.ok("optim_step", optim_step(&model_id, 1)).await;
    server.app.close();
    assert_eq!(server.retrieve(&format!("{model_id}:1")).await.status, StatusCode::REQUEST_TIMEOUT);
}

#[tokio::test]
async fn a_pass_goes_in_and_out_as_protobuf_compressed_or_not() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let compressed = zstd::encode_all(&pass_body(&model_id, 1, tokens(5))[..], 3).unwrap();
    assert_eq!(server.pass(compressed, Some("zstd")).await.status, StatusCode::OK);
    assert_eq!(server.pass(pass_body(&model_id, 2, tokens(7)), None).await.status, StatusCode::OK);
    for (seq_id, count) in [(1, 5.0), (2, 7.0)] {
        let reply = server.retrieve_protobuf(&format!("{model_id}:{seq_id}")).await;
        assert_eq!(reply.content_type, "application/x-protobuf");
        assert_eq!(proto::ForwardBackwardOutput::decode(reply.bytes).unwrap().metrics["loss:sum"], count);
    }
    let rendered = server.retrieve(&format!("{model_id}:1")).await.json();
    assert_eq!(rendered["loss_fn_outputs"][0]["logprobs"]["shape"], json!([5]));
}

#[tokio::test]
async fn a_pass_of_an_older_client_comes_as_json() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let datum = json!({
        "model_input": { "chunks": [{ "type": "encoded_text", "tokens": [1, 2] }] },
        "loss_fn_inputs": { "target_tokens": { "data": [2, 3], "dtype": "int64", "shape": [2] } },
    });
    let input = json!({ "data": [datum], "loss_fn": "cross_entropy" });
    let outcome = server.outcome("forward", json!({ "model_id": model_id, "seq_id": 1, "forward_input": input })).await;
    assert_eq!(outcome["metrics"]["loss:sum"], json!(2.0));
    let is_forward = |r: &Request| matches!(r, Request::Train { op: TrainOp::ForwardBackward { forward_only: true, .. }, .. });
    assert_eq!(server.engine.count(is_forward), 1);
}

#[tokio::test]
async fn a_refused_operation_keeps_its_place_in_the_order() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.ok("optim_step", optim_step(&model_id, 3)).await;
    let mut bad_step = optim_step(&model_id, 2);
    bad_step["adam_params"]["learning_rate"] = json!("fast");
    server.ok("optim_step", bad_step).await;
    let sound = proto::ChunkKind::Dmel(proto::Opaque {});
    assert_eq!(server.pass(pass_body(&model_id, 1, sound), None).await.status, StatusCode::OK);
    for (seq_id, word) in [(1, "dmel"), (2, "fast")] {
        let outcome = server.retrieve(&format!("{model_id}:{seq_id}")).await.json();
        assert_eq!(outcome["category"], json!("user"));
        assert!(outcome["error"].as_str().unwrap().contains(word), "{outcome}");
    }
    assert!(server.retrieve(&format!("{model_id}:3")).await.json()["metrics"].is_object());
}

#[tokio::test]
async fn a_pass_that_is_broken_or_would_be_too_large_keeps_its_place_in_the_order() {
    let server = TestServer::with(|config| config.request_bytes_max = Some(1 << 20));
    let (_, model_id) = server.new_model().await;
    server.ok("optim_step", optim_step(&model_id, 4)).await;
    let mut broken = pass_body(&model_id, 1, tokens(1));
    broken.extend([0x1a, 2, 0xff, 0xff]);
    let mut large = proto::ForwardBackwardRequest::decode(&pass_body(&model_id, 2, tokens(3))[..]).unwrap();
    let csr = proto::SparseCsr { crow_indices: vec![0; 32].into(), ..Default::default() };
    let sparse = proto::Tensor {
        encoding: Some(proto::Encoding::SparseCsr(csr)),
        dtype: proto::DType::Float32.into(),
        shape: vec![3, 1 << 20],
    };
    large.data[0].loss_fn_inputs.insert("weights".into(), sparse);
    for body in [broken, large.encode_to_vec()] {
        assert!(body.len() < 200);
        assert_eq!(server.pass(body, None).await.status, StatusCode::OK);
    }
    let datum = json!({ "model_input": { "chunks": [{ "tokens": vec![1; 200_000] }] } });
    let input = json!({ "data": [datum], "loss_fn": "cross_entropy" });
    server.ok("forward_backward", json!({ "model_id": model_id, "seq_id": 3, "forward_backward_input": input })).await;
    for (seq_id, word) in [(1, "ForwardBackwardRequest"), (2, "1 MiB"), (3, "1 MiB")] {
        let outcome = server.retrieve(&format!("{model_id}:{seq_id}")).await.json();
        assert_eq!(outcome["category"], json!("user"), "{outcome}");
        assert!(outcome["error"].as_str().unwrap().contains(word), "{outcome}");
    }
    assert!(server.retrieve(&format!("{model_id}:4")).await.json()["metrics"].is_object());
}

#[tokio::test]
async fn a_refusal_names_the_field_and_what_it_is() {
    let server = TestServer::new();
    for (path, body, words) in [
        ("create_model", json!({ "session_id": "s", "model_seq_id": null }), "model_seq_id: invalid type: null"),
        (
            "create_model",
            json!({ "session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": { "rank": "x" } }),
            "lora_config.rank: invalid type: string \"x\"",
        ),
        (
            "asample",
            json!({ "prompt": { "chunks": [{ "tokens": [1, null] }] } }),
            "prompt.chunks[0].tokens[1]: invalid type: null",
        ),
        ("retrieve_future", json!({}), "missing field `request_id`"),
        ("sessions/search", json!({ "limit": 0 }), "limit 0"),
    ] {
        let reply = server.post(path, body).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}");
        assert!(reply.detail().contains(words), "{}", reply.detail());
    }
    let reply = server.get("training_runs?limit=x").await;
    assert!(reply.detail().contains("limit"), "{}", reply.detail());
}

#[tokio::test]
async fn optimizers_that_are_not_here_are_refused_by_name() {
    let server = TestServer::new();
    let session_id = server.new_session().await;
    let mut body = create_model_body(&session_id, 0);
    body["optimizer_config"] = json!({ "type": "dimuon", "version": 1 });
    let reply = server.post("create_model", body).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("dimuon") && reply.detail().contains("adamw"), "{}", reply.detail());
    let (_, model_id) = server.new_model().await;
    let step = json!({ "model_id": model_id, "seq_id": 1, "optimizer_params": { "type": "dimuon", "learning_rate": 1e-3 } });
    let outcome = server.outcome("optim_step", step).await;
    assert!(outcome["error"].as_str().unwrap().contains("dimuon"), "{outcome}");
}

#[tokio::test]
async fn a_request_for_which_there_is_no_room_does_not_take_its_place() {
    let server = TestServer::with(|config| config.transit_bytes = 8 << 20);
    let (_, model_id) = server.new_model().await;
    let datum = json!({ "model_input": { "chunks": [{ "tokens": vec![1; 200_000] }] } });
    let input = json!({ "data": [datum], "loss_fn": "cross_entropy" });
    let body = json!({ "model_id": model_id, "seq_id": 1, "forward_backward_input": input });
    let mut others = server.app.transit.charge();
    others.try_grow(6 << 20).unwrap();
    assert_eq!(server.post("forward_backward", body.clone()).await.status, StatusCode::TOO_MANY_REQUESTS);
    drop(others);
    server.ok("forward_backward", body).await;
    assert_eq!(*server.engine.ran.lock().unwrap(), [1]);
}

#[tokio::test]
async fn places_that_cannot_be_are_refused() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    assert_eq!(server.post("optim_step", optim_step(&model_id, 0)).await.status, StatusCode::BAD_REQUEST);
    let reply = server.post("optim_step", optim_step(&model_id, 1 << 40)).await;
    assert!(reply.detail().contains("too far ahead"), "{}", reply.detail());
    assert_eq!(server.pass(pass_body(&model_id, -1, tokens(1)), None).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(server.pass(vec![0xff; 10], None).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(server.engine.count(|r| matches!(r, Request::Train { .. })), 0);
}

#[tokio::test]
async fn a_dead_engine_fails_what_it_is_asked() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    server.engine.is_dead.store(true, Ordering::Relaxed);
    let outcome = server.outcome("optim_step", optim_step(&model_id, 1)).await;
    assert_eq!(outcome["category"], json!("server"));
}

#[tokio::test]
async fn a_sample_is_acknowledged_with_its_sequence_ids_and_drawn_once() {
    let server = TestServer::new();
    let session_id = server.new_session().await;
    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 4, "base_model": "org/base" });
    let sampler_id = server.ok("create_sampling_session", body.clone()).await["sampling_session_id"].clone();
    assert_eq!(server.ok("create_sampling_session", body).await["sampling_session_id"], sampler_id);
    let sampler_id = sampler_id.as_str().unwrap();
    assert_eq!(server.get(&format!("samplers/{sampler_id}")).await.json()["base_model"], json!("org/base"));
    let seq_id = 1_000_000_007 * 999_999_999;
    for _ in 0..2 {
        let acknowledged = server.ok("asample", sample_body(sampler_id, seq_id)).await;
        assert_eq!(acknowledged["sample_sequence_ids"].as_array().unwrap().len(), 2);
    }
    assert_eq!(server.engine.count(|r| matches!(r, Request::Sample { .. })), 1);
    let reply = server.retrieve_protobuf(&format!("{sampler_id}:{seq_id}")).await;
    let response = proto::SampleResponse::decode(reply.bytes).unwrap();
    assert_eq!(response.sequences.len(), 2);
    let rendered = server.retrieve(&format!("{sampler_id}:{seq_id}")).await.json();
    assert_eq!(rendered["sequences"][1]["tokens"], json!([4, 5]));
}

#[tokio::test]
async fn an_unnamed_save_becomes_a_sampling_session() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let save = |seq_id: u64, kind: &str| json!({ "model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": kind });
    let saved = server.outcome("save_weights_for_sampler", save(1, "snapshot")).await;
    assert_eq!(saved["sampling_session_id"], json!(format!("{session_id}:sample:1")));
    let saved = server.outcome("save_weights_for_sampler", save(1, "snapshot")).await;
    assert_eq!(saved["sampling_session_id"], json!(format!("{session_id}:sample:1")));
    for seq_id in [2, 3] {
        let saved = server.outcome("save_weights_for_sampler", save(seq_id, "inflight")).await;
        assert_eq!(saved["sampling_session_id"], json!(format!("{session_id}:sample:{seq_id}")));
        server.ok("asample", sample_body(saved["sampling_session_id"].as_str().unwrap(), 0)).await;
    }
    let shared = format!("{model_id}:inflight");
    assert_eq!(server.engine.count(|r| matches!(r, Request::Sample { sampler_id, .. } if *sampler_id == shared)), 2);
    assert_eq!(server.outcome("save_weights_for_sampler", save(4, "other")).await["category"], json!("user"));
}

#[tokio::test]
async fn the_oldest_idle_snapshot_makes_room_for_a_new_one() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let count = crate::limits::SNAPSHOTS_PER_SESSION_MAX as u64;
    for n in 1..=count + 1 {
        let body = json!({ "model_id": model_id, "seq_id": n, "sampling_session_seq_id": n, "kind": "snapshot" });
        server.outcome("save_weights_for_sampler", body).await;
        // The first one stays in use, so the second is the oldest that is idle.
        server.ok("asample", sample_body(&format!("{session_id}:sample:1"), n)).await;
    }
    let dropped = format!("{session_id}:sample:2");
    assert_eq!(server.engine.count(|r| matches!(r, Request::DropSampler { sampler_id } if *sampler_id == dropped)), 1);
    let reply = server.post("asample", sample_body(&dropped, 0)).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.detail().contains("most recently used"), "{}", reply.detail());
}

#[tokio::test]
async fn snapshots_that_nobody_asks_for_make_room_for_adapters() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model().await;
    let snapshot = async |model_id: &str, seq_id: u64, n: u64| {
        let body = json!({ "model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": n, "kind": "snapshot" });
        server.outcome("save_weights_for_sampler", body).await["sampling_session_id"].as_str().unwrap().to_owned()
    };
    let dropped = || {
        let requests = server.engine.requests.lock().unwrap();
        let dropped = |request: &Request| match request {
            Request::DropSampler { sampler_id } => Some(sampler_id.clone()),
            _ => None,
        };
        requests.iter().filter_map(dropped).collect::<Vec<_>>()
    };
    let set_short = |samplers: u64| server.engine.shortage.store(samplers * SAMPLER_BYTES, Ordering::Relaxed);
    let mut ids = Vec::new();
    for n in 1..=4 {
        ids.push(snapshot(&model_id, n, n).await);
        clock::advance(Duration::from_secs(1));
    }
    // The first was used last.
    server.ok("asample", sample_body(&ids[0], 0)).await;
    set_short(2);
    ids.push(snapshot(&model_id, 5, 5).await);
    assert_eq!(dropped(), [ids[1].clone(), ids[2].clone()]);
    let reply = server.post("asample", sample_body(&ids[1], 1)).await;
    assert!(
        reply.status == StatusCode::BAD_REQUEST && reply.detail().contains("no more room for adapters"),
        "{}",
        reply.detail()
    );
    // Not enough of them: none is given up for nothing.
    set_short(4);
    snapshot(&model_id, 6, 6).await;
    assert_eq!(dropped().len(), 2);
    // For another model the last of this one stays, and its others go: they are of the same owner.
    set_short(1);
    let body = json!({ "session_id": session_id, "model_seq_id": 2, "base_model": "org/base", "lora_config": { "rank": 8 } });
    server.outcome("create_model", body).await;
    assert_eq!(dropped()[2..], [ids[3].clone()]);
    set_short(3);
    let (_, other) = server.new_model().await;
    assert_eq!(dropped().len(), 3, "the last of a model is kept");
    set_short(2);
    let first = snapshot(&other, 1, 1).await;
    assert_eq!(dropped()[3..], [ids[0].clone(), ids[4].clone()]);
    // Those of the session itself first, even if another has some that were not used for longer.
    snapshot(&model_id, 7, 7).await;
    set_short(1);
    snapshot(&other, 2, 2).await;
    assert_eq!(dropped()[5..], [first]);
}

#[tokio::test]
async fn a_sample_without_a_session_gets_one_that_others_of_its_owner_share() {
    let server = TestServer::new();
    let ask = async |owner: &str, change: Value| {
        let mut body = sample_body("", 0);
        let fields = body.as_object_mut().unwrap();
        fields.remove("sampling_session_id");
        fields.remove("seq_id");
        fields.extend(change.as_object().unwrap().clone());
        let request =
            HttpRequest::post("/api/v1/asample").header("content-type", "application/json").header("x-api-key", owner);
        server.send(request.body(body.to_string().into()).unwrap()).await
    };
    let mut ids = Vec::new();
    for owner in ["a", "a", "b"] {
        let acknowledged = ask(owner, json!({ "base_model": "org/base" })).await.json();
        ids.push(acknowledged["request_id"].as_str().unwrap().to_owned());
        let outcome = server.retrieve(&ids[ids.len() - 1]).await;
        assert_eq!(outcome.json()["sequences"][1]["tokens"], json!([4, 5]));
    }
    let sampler = |id: &String| id.rsplit_once(':').unwrap().0.to_owned();
    assert!(ids[0] != ids[1] && sampler(&ids[0]) == sampler(&ids[1]) && sampler(&ids[0]) != sampler(&ids[2]));
    clock::advance(Duration::from_secs(301));
    server.app.reap().await;
    let acknowledged = ask("a", json!({ "base_model": "org/base" })).await.json();
    assert_ne!(sampler(&ids[0]), sampler(&acknowledged["request_id"].as_str().unwrap().to_owned()), "its session was silent");
    for (change, status) in [
        (json!({}), StatusCode::BAD_REQUEST),
        (json!({ "base_model": "org/other" }), StatusCode::BAD_REQUEST),
        (json!({ "model_path": "tinker://a/weights/b" }), StatusCode::NOT_FOUND),
        (json!({ "sampling_session_id": "x" }), StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(ask("c", change.clone()).await.status, status, "{change}");
    }
}

#[tokio::test]
async fn completions_of_a_sampling_session_are_told_to_the_client_that_asked() {
    let server = TestServer::new();
    let session_id = server.new_session().await;
    let body = json!({ "session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/base" });
    server.ok("create_sampling_session", body).await;
    let sampler_id = format!("{session_id}:sample:0");
    let joined = server.ok("join_sampling_session", json!({ "sampling_session_id": sampler_id })).await;
    assert_eq!(joined["client_counter"], json!(1));
    for seq_id in [0, 1, 1_000_000_000] {
        server.ok("asample", sample_body(&sampler_id, seq_id)).await;
    }
    let poll = async |clone: u64, cursor: &Value, retrieved: &[String]| {
        let target = json!({ "type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone });
        let body = json!({ "target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": retrieved });
        server.ok("retrieve_futures", body).await
    };
    let first = poll(0, &json!(0), &[]).await;
    let ids: Vec<String> =
        first["completions"].as_array().unwrap().iter().map(|c| c["request_id"].as_str().unwrap().into()).collect();
    assert_eq!(ids, [format!("{sampler_id}:0"), format!("{sampler_id}:1")]);
    assert!(first["completions"][0]["response_payload_uncompressed_size"].as_u64().unwrap() > 0);
    assert_eq!(poll(1, &json!(0), &[]).await["completions"][0]["request_id"], json!(format!("{sampler_id}:1000000000")));
    server.retrieve(&ids[0]).await;
    let second = poll(0, &first["cursor"], &ids[..1]).await;
    assert_eq!(second["completions"], json!([]));
    assert_eq!(server.retrieve(&ids[0]).await.status, StatusCode::GONE, "its client has said that it has it");
    assert_eq!(server.retrieve(&ids[1]).await.status, StatusCode::OK);
    let unknown = json!({ "target": { "sampling_session_id": "x" } });
    assert_eq!(server.post("retrieve_futures", unknown).await.status, StatusCode::NOT_FOUND);
}
