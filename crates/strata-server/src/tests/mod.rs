//! The whole app in this process, over an engine that answers by a script.

mod adapters;
mod allocations;
mod checkpoints;
mod edge;
mod engine;
pub mod fake_store;
mod images;
mod listings;
mod places;
mod projects;
mod provenance;
mod requests;
mod searches;
mod server;
mod simulation;
mod training;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request as HttpRequest, StatusCode};
use serde_json::{Value, json};
use strata_engine::adapters::Adapters;
use strata_model::ModelConfig;
use tempfile::TempDir;
use tower::ServiceExt;

use crate::app::{App, ModelInfo, ServerConfig};
use crate::bases::Base;
use crate::data_dir::DataDir;
use crate::routes;
pub use allocations::{allocated_bytes, peak_bytes};
pub use engine::ScriptedEngine;

use crate::transit::Transit;
use crate::wire::budget::Budget;

/// Decodes with a budget, and room for all of it.
pub fn with_budget<T>(bytes_max: usize, decode: impl FnOnce(&Budget) -> T) -> T {
    decode(&Budget::new(bytes_max, Transit::new(4 * bytes_max).charge()))
}

/// A server without a socket.
struct TestServer {
    app: Arc<App>,
    router: Router,
    engine: Arc<ScriptedEngine>,
    data_dir: TempDir,
}

/// A response, read to its end.
#[derive(Debug)]
struct Reply {
    status: StatusCode,
    content_type: String,
    bytes: Bytes,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|error| panic!("{error}: {:?}", self.bytes))
    }

    /// The text of an error.
    fn detail(&self) -> String {
        self.json()["detail"].as_str().expect("errors have a detail").to_owned()
    }
}

impl TestServer {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut ServerConfig)) -> Self {
        let data_dir = tempfile::tempdir().unwrap();
        Self::over(data_dir, change)
    }

    fn over(data_dir: TempDir, change: impl FnOnce(&mut ServerConfig)) -> Self {
        let mut config = ServerConfig::new(([127, 0, 0, 1], 0).into(), DataDir::claim(data_dir.path()).unwrap());
        config.poll_hold = Duration::from_millis(50);
        change(&mut config);
        let engine = Arc::new(ScriptedEngine::default());
        let app = App::new(config, vec![Base { info: model_info(), engine: engine.clone() }]).unwrap();
        TestServer { router: routes::router(app.clone()), app, engine, data_dir }
    }

    /// Another server on the directory of this one, which ends.
    fn restart(self) -> Self {
        let TestServer { app, router, engine, data_dir } = self;
        drop((app, router, engine));
        Self::over(data_dir, |_| {})
    }

    /// Sends a request to the name that its headers say, or to this machine.
    async fn send(&self, mut request: HttpRequest<Body>) -> Reply {
        request.headers_mut().entry("host").or_insert_with(|| HeaderValue::from_static("localhost:8000"));
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let content_type = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned());
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        Reply { status, content_type: content_type.unwrap_or_default(), bytes }
    }

    async fn request(&self, method: &str, path: &str, body: impl Into<Body>) -> Reply {
        let request = HttpRequest::builder().method(method).uri(format!("/api/v1/{path}"));
        self.send(request.header("content-type", "application/json").body(body.into()).unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> Reply {
        self.request("POST", path, body.to_string()).await
    }

    async fn get(&self, path: &str) -> Reply {
        self.request("GET", path, Body::empty()).await
    }

    /// Posts what has to succeed.
    async fn ok(&self, path: &str, body: Value) -> Value {
        let reply = self.post(path, body).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {:?}", reply.bytes);
        reply.json()
    }

    /// Posts what becomes a future, and waits for its outcome.
    async fn outcome(&self, path: &str, body: Value) -> Value {
        let acknowledged = self.ok(path, body).await;
        self.retrieve(acknowledged["request_id"].as_str().unwrap()).await.json()
    }

    async fn retrieve(&self, request_id: &str) -> Reply {
        self.post("retrieve_future", json!({ "request_id": request_id, "allow_metadata_only": true })).await
    }

    async fn new_session(&self) -> String {
        let created = self.ok("create_session", json!({ "tags": [], "sdk_version": "0.38.0" })).await;
        created["session_id"].as_str().unwrap().to_owned()
    }

    /// A session with one model.
    async fn new_model(&self) -> (String, String) {
        let session_id = self.new_session().await;
        let created = self.outcome("create_model", create_model_body(&session_id, 0)).await;
        (session_id, created["model_id"].as_str().unwrap().to_owned())
    }
}

pub fn model_info() -> ModelInfo {
    ModelInfo {
        name: "org/base".into(),
        architecture: "qwen3".into(),
        tokenizer_id: "/models/base".into(),
        max_context_tokens: 64,
        adapters: Adapters::new("org/base", model_config()),
    }
}

/// Of a small Qwen3 with untied tables.
fn model_config() -> ModelConfig {
    let config = json!({
        "model_type": "qwen3", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": false, "attention_bias": false,
    });
    ModelConfig::from_json(&config.to_string(), None).unwrap()
}

fn create_model_body(session_id: &str, model_seq_id: u64) -> Value {
    json!({
        "session_id": session_id, "model_seq_id": model_seq_id, "base_model": "org/base",
        "user_metadata": { "recipe": "sft" }, "lora_config": { "rank": 8, "seed": 3 },
        "optimizer_config": { "type": "adamw" }, "type": "create_model",
    })
}

fn sample_body(sampling_session_id: &str, seq_id: u64) -> Value {
    json!({
        "num_samples": 2, "prompt": { "chunks": [{ "type": "encoded_text", "tokens": [1, 2, 3] }] },
        "sampling_params": { "max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0 },
        "sampling_session_id": sampling_session_id, "seq_id": seq_id, "type": "sample",
    })
}
