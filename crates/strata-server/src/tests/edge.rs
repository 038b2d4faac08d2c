//! Who is answered, with what bodies, and in what time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request as HttpRequest, StatusCode};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::engine::ScriptedEngine;
use super::{TestServer, model_info};
use crate::app::ServerConfig;
use crate::bases::Base;
use crate::data_dir::DataDir;
use crate::server::{RunningServer, Server};

async fn status(server: &TestServer, method: &str, path: &str, headers: &[(&str, &str)], body: &'static str) -> StatusCode {
    let request = HttpRequest::builder().method(method).uri(path);
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    server.send(request.body(Body::from(body)).unwrap()).await.status
}

const CAPABILITIES: &str = "/api/v1/get_server_capabilities";

#[tokio::test]
async fn a_server_without_a_key_answers_to_its_own_names_only() {
    let server = TestServer::new();
    for host in ["localhost", "127.0.0.1:8000", "[::1]:8000", "strata.localhost"] {
        assert_eq!(status(&server, "GET", CAPABILITIES, &[("host", host)], "").await, StatusCode::OK, "{host}");
    }
    for host in ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1"] {
        assert_eq!(status(&server, "GET", CAPABILITIES, &[("host", host)], "").await, StatusCode::FORBIDDEN, "{host}");
        assert_eq!(status(&server, "GET", "/healthz", &[("host", host)], "").await, StatusCode::FORBIDDEN, "{host}");
        assert_eq!(status(&server, "GET", "/nowhere", &[("host", host)], "").await, StatusCode::FORBIDDEN, "{host}");
    }
    let two = [("host", "localhost"), ("host", "evil.example")];
    assert_eq!(status(&server, "GET", CAPABILITIES, &two, "").await, StatusCode::FORBIDDEN);
    assert_eq!(status(&server, "GET", "http://evil.example/healthz", &[], "").await, StatusCode::FORBIDDEN);
    let server = TestServer::with(|config| config.api_key = Some("tml-x".into()));
    let with_key = [("host", "strata.example"), ("x-api-key", "tml-x")];
    assert_eq!(status(&server, "GET", CAPABILITIES, &with_key, "").await, StatusCode::OK);
}

#[tokio::test]
async fn pages_of_other_servers_are_refused_with_and_without_a_key() {
    for key in [None, Some("tml-x")] {
        let server = TestServer::with(|config| config.api_key = key.map(str::to_owned));
        let key = ("x-api-key", key.unwrap_or("any"));
        let from = async |origin: &str| {
            status(&server, "GET", CAPABILITIES, &[("host", "localhost:8000"), ("origin", origin), key], "").await
        };
        assert_eq!(from("http://localhost:8000").await, StatusCode::OK);
        for origin in ["http://evil.example", "null", "http://localhost:9000", ""] {
            assert_eq!(from(origin).await, StatusCode::FORBIDDEN, "{origin}");
        }
        let preflight = [("origin", "http://evil.example"), ("access-control-request-method", "POST")];
        assert_eq!(status(&server, "OPTIONS", "/api/v1/create_session", &preflight, "").await, StatusCode::FORBIDDEN);
    }
}

#[tokio::test]
async fn a_body_needs_a_type_that_the_api_takes_and_no_body_needs_none() {
    let server = TestServer::new();
    let with_type = async |given: &[(&str, &str)]| status(&server, "POST", "/api/v1/create_session", given, "{}").await;
    for given in ["application/json", "Application/JSON; charset=utf-8"] {
        assert_eq!(with_type(&[("content-type", given)]).await, StatusCode::OK, "{given}");
    }
    for given in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", ""] {
        assert_eq!(with_type(&[("content-type", given)]).await, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{given}");
    }
    assert_eq!(with_type(&[]).await, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let publish = "/api/v1/training_runs/a/checkpoints/weights/b/publish";
    assert_eq!(status(&server, "POST", publish, &[], "").await, StatusCode::NOT_FOUND);
    let typed = [("content-type", "application/json")];
    assert_eq!(status(&server, "DELETE", publish, &typed, "").await, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn ids_come_back_cut_to_a_length() {
    let server = TestServer::new();
    let long = "x".repeat(400);
    for (path, body) in [
        ("retrieve_future", json!({ "request_id": long })),
        ("get_info", json!({ "model_id": long })),
        ("session_heartbeat", json!({ "session_id": long })),
        ("optim_step", json!({ "model_id": long, "seq_id": 1 })),
        ("weights_info", json!({ "tinker_path": long })),
        ("asample", super::sample_body(&long, 0)),
    ] {
        let detail = server.post(path, body).await.detail();
        assert!(detail.contains('…') && detail.len() < 350, "{path}: {detail}");
    }
    for path in [format!("sessions/{long}"), format!("samplers/{long}"), long.clone()] {
        let detail = server.get(&path).await.detail();
        assert!(detail.contains('…') && detail.len() < 350, "{path}: {detail}");
    }
}

#[tokio::test]
async fn paths_of_the_server_do_not_reach_clients() {
    let server = TestServer::new();
    let (_, model_id) = server.new_model().await;
    let save = |seq_id: u64| json!({ "model_id": model_id, "seq_id": seq_id, "path": "a" });
    server.outcome("save_weights", save(1)).await;
    let taken = server.outcome("save_weights", save(2)).await;
    assert_eq!(taken["error"], json!(format!("checkpoint tinker://{model_id}/weights/a exists already")));
}

async fn start(change: impl FnOnce(&mut ServerConfig)) -> (RunningServer, tempfile::TempDir) {
    let data_dir = tempfile::tempdir().unwrap();
    let mut config = ServerConfig::new("127.0.0.1:0".parse().unwrap(), DataDir::claim(data_dir.path()).unwrap());
    change(&mut config);
    let engine = Arc::new(ScriptedEngine::default());
    (Server::start_over(config, vec![Base { info: model_info(), engine }]).await.unwrap(), data_dir)
}

/// Sends the beginning of something and reads until the server closes the connection.
async fn answer_to(address: SocketAddr, sent: &str) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let reading = connection.read_to_string(&mut answer);
    tokio::time::timeout(Duration::from_secs(10), reading).await.expect("the server closes the connection").unwrap();
    answer
}

#[tokio::test]
async fn a_body_that_is_announced_too_large_is_refused_at_once() {
    let (server, _data_dir) = start(|_| {}).await;
    let started = Instant::now();
    for (path, status) in [("/api/v1/forward_backward", 413), ("/nowhere", 404)] {
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
        for announced in ["1000000000000000", "9223372036854775807"] {
            let answer = answer_to(server.local_address(), &format!("{head}content-length: {announced}\r\n\r\nabc")).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{announced}: {answer}");
            assert!(answer.contains("connection: close") && answer.contains("detail"), "{answer}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_answer_reaches_a_client_that_is_still_sending() {
    let (server, _data_dir) = start(|_| {}).await;
    let head = "POST /api/v1/asample HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let mut connection = TcpStream::connect(server.local_address()).await.unwrap();
    connection.write_all(format!("{head}content-length: 1000000000000000\r\n\r\n").as_bytes()).await.unwrap();
    for _ in 0..30 {
        connection.write_all(&[b'x'; 10_000]).await.expect("the server reads on for a moment");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[tokio::test]
async fn slow_headers_slow_bodies_and_idle_connections_end() {
    let (server, _data_dir) = start(|config| {
        config.header_timeout = Duration::from_millis(300);
        config.body_timeout = Duration::from_millis(1500);
        config.idle_timeout = Duration::from_millis(4000);
    })
    .await;
    let address = server.local_address();
    let timed = async |sent: &str, from: u64, to: u64, status: &str| {
        let started = Instant::now();
        let answer = answer_to(address, sent).await;
        let took = started.elapsed();
        assert!(answer.starts_with(status), "{answer}");
        let expected = Duration::from_millis(from)..Duration::from_millis(to);
        assert!(expected.contains(&took), "{sent:?} took {took:?}, not {expected:?}");
    };
    tokio::join!(
        timed("GET /healthz HTTP/1.1\r\nhost: loc", 290, 3500, ""),
        timed("", 3990, 8000, ""),
        timed("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", 3990, 8000, "HTTP/1.1 200"),
        timed("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea", 290, 8000, "HTTP/1.1 200"),
        // The answer comes after the time for the body, and reads on a little for a client that has not read it yet.
        timed(
            "POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{",
            1490,
            3900,
            "HTTP/1.1 408",
        ),
        async {
            // One byte at a time keeps no connection open.
            let mut connection = TcpStream::connect(address).await.unwrap();
            let started = Instant::now();
            for byte in b"GET /healthz HTTP/1.1\r\nx: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" {
                if connection.write_all(&[*byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
            assert!(started.elapsed() < Duration::from_millis(2500), "{:?}", started.elapsed());
        },
    );
}

#[tokio::test]
async fn a_poll_outlives_all_time_limits() {
    let (server, _data_dir) = start(|config| {
        config.header_timeout = Duration::from_millis(100);
        config.body_timeout = Duration::from_millis(100);
        config.idle_timeout = Duration::from_millis(100);
        config.poll_hold = Duration::from_millis(700);
    })
    .await;
    let post = async |path: &str, body: serde_json::Value| {
        let body = body.to_string();
        let head = format!(
            "POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        );
        let answer = answer_to(server.local_address(), &format!("{head}content-length: {}\r\n\r\n{body}", body.len())).await;
        let (head, body) = answer.split_once("\r\n\r\n").map(|(head, body)| (head.to_owned(), body.to_owned())).unwrap();
        (head, serde_json::from_str::<serde_json::Value>(&body).unwrap())
    };
    let (_, session) = post("create_session", json!({})).await;
    let body = super::create_model_body(session["session_id"].as_str().unwrap(), 0);
    let (_, created) = post("create_model", body).await;
    let model_id = created["request_id"].as_str().unwrap().strip_suffix(":0").unwrap().to_owned();
    // Its turn does not come: the operation before it is missing.
    let (_, step) = post("optim_step", json!({ "model_id": model_id, "seq_id": 2 })).await;
    let started = Instant::now();
    let (head, _) = post("retrieve_future", json!({ "request_id": step["request_id"] })).await;
    assert!(head.starts_with("HTTP/1.1 408"), "{head}");
    assert!(started.elapsed() >= Duration::from_millis(700));
}

#[tokio::test]
async fn connections_beyond_the_limit_take_the_place_of_idle_ones_or_wait() {
    let (server, _data_dir) = start(|config| {
        config.connections_max = 2;
        config.header_timeout = Duration::from_millis(800);
    })
    .await;
    let address = server.local_address();
    let healthy = async || {
        let started = Instant::now();
        let answer = answer_to(address, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        started.elapsed()
    };
    let mut idle = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(healthy().await < Duration::from_millis(400));
    assert_eq!(idle[0].read(&mut [0]).await.unwrap(), 0, "the one that was idle for longest gives way");
    let mut busy = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    for connection in &mut busy {
        connection.write_all(b"GET /hea").await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(healthy().await >= Duration::from_millis(500));
}

#[tokio::test]
async fn headers_beyond_the_limit_are_refused() {
    let (server, _data_dir) = start(|_| {}).await;
    let long = "x".repeat(100_000);
    let answer =
        answer_to(server.local_address(), &format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: {long}\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_answered_while_large_bodies_are_read() {
    let (server, _data_dir) = start(|_| {}).await;
    let address = server.local_address();
    let body = format!(r#"{{"session_id": "x", "ignored": [{}0]}}"#, "1,".repeat(16 << 20));
    let head =
        "POST /api/v1/session_heartbeat HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let request: Arc<str> = format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into();
    let large: Vec<_> = (0..4)
        .map(|_| {
            let request = request.clone();
            tokio::spawn(async move { answer_to(address, &request).await })
        })
        .collect();
    let (mut slowest, begun) = (Duration::ZERO, Instant::now());
    while large.iter().any(|request| !request.is_finished()) {
        let started = Instant::now();
        let answer = answer_to(address, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        slowest = slowest.max(started.elapsed());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let all = begun.elapsed();
    for request in large {
        assert!(request.await.unwrap().starts_with("HTTP/1.1 404"));
    }
    // Were bodies read by the threads that answer, two would be at a time, and an answer would wait for half of all.
    assert!(slowest * 3 < all, "{slowest:?} of {all:?}");
}

#[tokio::test]
async fn bodies_share_one_budget_and_give_it_back() {
    let server = TestServer::with(|config| config.transit_bytes = 1 << 20);
    let free = server.app.transit.bytes_free();
    let mut others = server.app.transit.charge();
    others.try_grow(900_000).unwrap();
    let reply = server.request("POST", "create_session", vec![b' '; 200_000]).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(reply.detail().contains("1 MiB"), "{}", reply.detail());
    // Small requests pass all the while.
    server.new_session().await;
    drop(others);
    let reply = server.request("POST", "create_session", vec![b' '; 200_000]).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert_eq!(server.app.transit.bytes_free(), free);
    let reply = server.request("POST", "create_session", vec![b' '; 600_000]).await;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
}
