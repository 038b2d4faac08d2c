//! A server on a socket: how it starts, and how it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::engine::ScriptedEngine;
use crate::app::ServerConfig;
use crate::bases::Base;
use crate::data_dir::DataDir;
use crate::server::{RunningServer, Server, StartError};

async fn start(
    address: &str,
    data_dir: &TempDir,
    api_key: Option<&str>,
    engine: Arc<ScriptedEngine>,
) -> Result<RunningServer, StartError> {
    let mut config = ServerConfig::new(address.parse().unwrap(), DataDir::claim(data_dir.path()).unwrap());
    config.api_key = api_key.map(str::to_owned);
    Server::start_over(config, vec![Base { info: super::model_info(), engine }]).await
}

/// Sends one request over a connection of its own and reads until the server closes it.
async fn post(address: SocketAddr, path: &str, body: serde_json::Value) -> std::io::Result<String> {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n");
    let head = format!("{head}content-length: {}\r\n\r\n", body.len());
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all((head + &body).as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    Ok(answer)
}

fn json_of(answer: &str) -> serde_json::Value {
    let (_, body) = answer.split_once("\r\n\r\n").expect("an answer has a body");
    serde_json::from_str(body).unwrap()
}

#[tokio::test]
async fn a_stopped_server_lets_go_of_polls_and_takes_no_more() {
    let data_dir = tempfile::tempdir().unwrap();
    let engine = Arc::new(ScriptedEngine::default());
    let server = start("127.0.0.1:0", &data_dir, None, engine.clone()).await.unwrap();
    let address = server.local_address();
    assert_eq!(server.url(), format!("http://{address}"));

    let session = json_of(&post(address, "/api/v1/create_session", json!({})).await.unwrap());
    engine.holds.store(true, Ordering::Relaxed);
    let body = super::create_model_body(session["session_id"].as_str().unwrap(), 0);
    let request_id = json_of(&post(address, "/api/v1/create_model", body).await.unwrap())["request_id"].clone();
    let poll = tokio::spawn(post(address, "/api/v1/retrieve_future", json!({ "request_id": request_id })));
    tokio::time::sleep(Duration::from_millis(100)).await;

    let started = Instant::now();
    server.stop().await;
    assert!(started.elapsed() < Duration::from_secs(4), "a poll of 25 s must not hold up the end");
    assert!(poll.await.unwrap().unwrap().starts_with("HTTP/1.1 408"));
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn settings_that_contradict_each_other_do_not_start() {
    let data_dir = tempfile::tempdir().unwrap();
    let engine = || Arc::new(ScriptedEngine::default());
    let open = start("0.0.0.0:0", &data_dir, None, engine()).await;
    assert!(matches!(open, Err(StartError::NoKey(_))));
    let unusable = start("127.0.0.1:0", &data_dir, Some("secret"), engine()).await;
    assert!(matches!(unusable, Err(StartError::KeyPrefix)));
    let server = start("127.0.0.1:0", &data_dir, Some("tml-x"), engine()).await.unwrap();
    let other_dir = tempfile::tempdir().unwrap();
    let taken = start(&server.local_address().to_string(), &other_dir, Some("tml-x"), engine()).await;
    let Err(error @ StartError::Listen { .. }) = taken else { panic!("the address is taken") };
    assert!(error.to_string().contains(&server.local_address().to_string()));
}
