//! Operations that are refused, and the places that they take all the same.

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request as HttpRequest, StatusCode};
use hyper::body::Frame;
use prost::Message;
use serde_json::{Value, json};
use strata_engine::api::Request;

use super::adapters::Broken;
use super::training::{optim_step, pass_body, tokens};
use super::{Reply, TestServer, create_model_body};
use crate::wire::proto;

/// Sends something to a model in place 1 and has it run what waits in place 2.
async fn takes_its_place(server: &TestServer, what: &str, send: impl AsyncFnOnce(&str) -> Reply) -> StatusCode {
    let (_, model_id) = server.new_model().await;
    server.ok("optim_step", optim_step(&model_id, 2)).await;
    let status = send(&model_id).await.status;
    let outcome = server.retrieve(&format!("{model_id}:1")).await;
    assert_eq!(outcome.status, StatusCode::OK, "{what}");
    assert_eq!(outcome.json()["category"], json!("user"), "{what}");
    assert!(server.retrieve(&format!("{model_id}:2")).await.json()["metrics"].is_object(), "{what}");
    status
}

#[tokio::test]
async fn whatever_is_wrong_with_a_request_its_place_in_the_order_is_taken() {
    let server = TestServer::with(|config| config.body_bytes_max = Some(1 << 20));
    let json_to = |path: &'static str, body: fn(&str) -> String| {
        let server = &server;
        async move |model_id: &str| server.request("POST", path, body(model_id)).await
    };
    let unknown = json_to("save_weights_elsewhere", |id| json!({ "model_id": id, "seq_id": 1, "path": "a" }).to_string());
    assert_eq!(takes_its_place(&server, "an unknown route", unknown).await, StatusCode::NOT_FOUND);
    let other_method = async |id: &str| server.request("PUT", "optim_step", optim_step(id, 1).to_string()).await;
    assert_eq!(takes_its_place(&server, "another method", other_method).await, StatusCode::METHOD_NOT_ALLOWED);
    for (what, path, body) in [
        (
            "a body that is cut short",
            "optim_step",
            (|id| format!(r#"{{"model_id":"{id}","seq_id":1,"adam"#)) as fn(&str) -> String,
        ),
        ("a load that is cut short", "load_weights", |id| format!(r#"{{"model_id":"{id}","seq_id":1,"path":"#)),
        ("a pass that is cut short", "forward_backward", |id| format!(r#"{{"seq_id":1,"model_id":"{id}","#)),
        ("a null", "save_weights_for_sampler", |id| format!(r#"{{"model_id":"{id}","seq_id":1,"overwrite":7}}"#)),
        ("another optimizer", "optim_step", |id| {
            json!({ "model_id": id, "seq_id": 1, "optimizer_params": { "type": "dimuon" } }).to_string()
        }),
        ("a recipient that is none", "save_weights_external", |id| {
            json!({ "model_id": id, "seq_id": 1, "path": "a", "age_encryption_recipients": ["ssh-dss A"] }).to_string()
        }),
    ] {
        assert_eq!(takes_its_place(&server, what, json_to(path, body)).await, StatusCode::OK, "{what}");
    }
    let cut = async |id: &str| server.pass(pass_body(id, 1, tokens(100))[..80].to_vec(), None).await;
    assert_eq!(takes_its_place(&server, "protobuf that is cut short", cut).await, StatusCode::OK);

    let large = |id: &str| pass_body(id, 1, tokens(1 << 19));
    let plain = async |id: &str| server.pass(large(id), None).await;
    assert_eq!(takes_its_place(&server, "a body too large", plain).await, StatusCode::PAYLOAD_TOO_LARGE);
    let unannounced = async |id: &str| {
        let request = HttpRequest::post("/api/v1/forward_backward").header("content-type", "application/x-protobuf");
        let parts = unannounced_body(large(id));
        server.send(request.body(parts).unwrap()).await
    };
    assert_eq!(takes_its_place(&server, "an unannounced body too large", unannounced).await, StatusCode::PAYLOAD_TOO_LARGE);
    let inflating = async |id: &str| server.pass(zstd::encode_all(&large(id)[..], 1).unwrap(), Some("zstd")).await;
    assert_eq!(takes_its_place(&server, "a body that inflates too much", inflating).await, StatusCode::PAYLOAD_TOO_LARGE);
    let announced = async |id: &str| {
        let random: Vec<u8> = (0..1_u32 << 20).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
        let mut body = pass_body(id, 1, tokens(1));
        body.extend(proto::EncodedText { tokens: random.into() }.encode_to_vec());
        let compressed = zstd::encode_all(&body[..], 1).unwrap();
        assert!(compressed.len() > 1 << 20);
        server.pass(compressed, Some("zstd")).await
    };
    assert_eq!(takes_its_place(&server, "a compressed body too large", announced).await, StatusCode::PAYLOAD_TOO_LARGE);

    let other_type = async |id: &str| {
        let request = HttpRequest::post("/api/v1/optim_step").header("content-type", "text/plain");
        server.send(request.body(optim_step(id, 1).to_string().into()).unwrap()).await
    };
    assert_eq!(takes_its_place(&server, "another type", other_type).await, StatusCode::UNSUPPORTED_MEDIA_TYPE);

    // A window of 2 MiB, where this server takes one of 1 MiB.
    let small = TestServer::with(|config| config.transit_bytes = 16 << 20);
    let window = async |id: &str| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.window_log(21).unwrap();
        std::io::Write::write_all(&mut encoder, &pass_body(id, 1, tokens(1 << 19))).unwrap();
        small.pass(encoder.finish().unwrap(), Some("zstd")).await
    };
    assert_eq!(takes_its_place(&small, "a window too large", window).await, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn what_breaks_off_on_its_way_takes_no_place_and_is_sent_again() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let whole = optim_step(&model_id, 1).to_string();
    let broken = |kind: &str, path: &str, start: &[u8]| {
        let request = HttpRequest::post(format!("/api/v1/{path}")).header("content-type", kind);
        let body = Broken { first: Some(Bytes::copy_from_slice(start)), fails: true };
        server.send(request.body(Body::new(body)).unwrap())
    };
    let pass = pass_body(&model_id, 1, tokens(100));
    for (kind, path, start) in [
        ("application/json", "optim_step", &whole.as_bytes()[..whole.len() - 1]),
        ("application/x-protobuf", "forward_backward", &pass[..pass.len() / 2]),
    ] {
        let reply = broken(kind, path, start).await;
        assert_eq!(reply.status, StatusCode::REQUEST_TIMEOUT, "{path}");
        assert!(reply.detail().contains("did not arrive whole"), "{}", reply.detail());
    }
    assert!(server.outcome("optim_step", optim_step(&model_id, 1)).await["metrics"].is_object());
}

#[tokio::test]
async fn types_are_read_in_either_case() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let request = HttpRequest::post("/api/v1/forward_backward").header("content-type", "APPLICATION/X-Protobuf");
    let sent = server.send(request.body(pass_body(&model_id, 1, tokens(3)).into()).unwrap()).await;
    assert_eq!(sent.status, StatusCode::OK, "{:?}", sent.bytes);
    assert_eq!(server.retrieve(&format!("{model_id}:1")).await.status, StatusCode::OK);
}

/// A body whose length is not said beforehand.
fn unannounced_body(bytes: Vec<u8>) -> Body {
    struct Unannounced(Vec<Bytes>);

    impl HttpBody for Unannounced {
        type Data = Bytes;
        type Error = std::io::Error;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
            Poll::Ready(self.0.pop().map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    Body::new(Unannounced(bytes.chunks(10_000).rev().map(Bytes::copy_from_slice).collect()))
}

#[tokio::test]
async fn an_operation_that_is_larger_than_there_is_ever_room_for_takes_its_place() {
    let server = TestServer::new();
    server.engine.datum_tokens_max.store(100, Ordering::Relaxed);
    let large = async |id: &str| server.pass(pass_body(id, 1, tokens(101)), None).await;
    assert_eq!(takes_its_place(&server, "an operation too large", large).await, StatusCode::OK);
}

#[tokio::test]
async fn who_has_not_the_key_takes_no_place() {
    let server = TestServer::with(|config| config.api_key = Some("tml-x".into()));
    let with_key = |method: &str, path: &str, body: Value| {
        let request = HttpRequest::builder().method(method).uri(format!("/api/v1/{path}")).header("x-api-key", "tml-x");
        server.send(request.header("content-type", "application/json").body(body.to_string().into()).unwrap())
    };
    let session = with_key("POST", "create_session", json!({})).await.json()["session_id"].clone();
    with_key("POST", "create_model", create_model_body(session.as_str().unwrap(), 0)).await;
    let model_id = format!("{}:train:0", session.as_str().unwrap());
    for (path, kind) in
        [("no_such_thing", "application/json"), ("optim_step", "text/plain"), ("optim_step", "application/json")]
    {
        let request = HttpRequest::post(format!("/api/v1/{path}")).header("content-type", kind);
        server.send(request.body(optim_step(&model_id, 1).to_string().into()).unwrap()).await;
    }
    assert_eq!(server.engine.count(|r| matches!(r, Request::Train { .. })), 0);
}
