//! What clients ask before anything else, and health.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::payload::Payload;

/// `POST client/config`: flags of the client; the SDK's defaults suit.
pub async fn client_config(_body: Payload) -> Json<Value> {
    Json(json!({}))
}

/// `POST client/dynamic_config`: flags that the client asks for again and again.
pub async fn client_dynamic_config(_body: Payload) -> Json<Value> {
    Json(json!({ "refresh_interval_sec": 300, "sample_cancel_enabled": true }))
}

/// `GET healthz`: whether the engine works.
pub async fn healthz(State(app): State<Arc<App>>) -> ApiResult<Json<Value>> {
    if app.engine_is_alive() {
        Ok(Json(json!({ "status": "ok" })))
    } else {
        Err(ApiError::Unavailable("the engine is not running: the server has to be restarted".into()))
    }
}

/// `GET get_server_capabilities`: the models.
pub async fn capabilities(State(app): State<Arc<App>>) -> Json<Value> {
    let models = app.bases.iter().map(|base| {
        json!({
            "model_name": base.info.name,
            "max_context_length": base.info.max_context_tokens,
            "trainable": true,
            "sampleable": true,
        })
    });
    Json(json!({ "supported_models": models.collect::<Vec<Value>>() }))
}

/// `POST telemetry`: accepted and dropped. It may hold the client's API key and is not looked at.
pub async fn telemetry(_body: Payload) -> Json<Value> {
    Json(json!({ "status": "accepted" }))
}
