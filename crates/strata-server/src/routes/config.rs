//! What clients ask before anything else, and health.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::payload::Payload;

/// What the SDK sends at most in one `forward_backward`, and of several at the same time, by its own settings: estimated bytes.
const SDK_CHUNK_BYTES: usize = 5_000_000;
const SDK_DISPATCH_BYTES: usize = 50_000_000;
/// Samples that the SDK has open at the same time, by its own settings.
const SDK_SAMPLES: usize = 2000;

/// `POST client/config`: flags of the client. What is not here is at the SDK's own default, which suits.
pub async fn client_config(State(app): State<Arc<App>>, _body: Payload) -> Json<Value> {
    let config = &app.config;
    // Decoded, tokens and targets take twice what the SDK counts for them; a quarter leaves room for that twice.
    let chunk_bytes = SDK_CHUNK_BYTES.min(config.body_bytes_max().min(config.request_bytes_max()) / 4);
    Json(json!({
        // They arrive in any order and run in theirs; one after another each would wait for the acknowledgement of the one before it.
        "parallel_fwdbwd_chunks": true,
        // No request of the SDK is above what this server takes of one, however little memory it has.
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        "fwdbwd_max_chunk_len": limits::DATUMS_MAX.min(1024),
        // What one client sends at once leaves half of the budget to others.
        "fwdbwd_dispatch_bytes_semaphore_size": SDK_DISPATCH_BYTES.min(config.transit_bytes / 4).max(chunk_bytes),
        // On the same machine, or in the same rack, compressing takes longer than sending; it is understood where a client does it all the same.
        "proto_compress_fwdbwd": false,
        // Each open sample polls over a connection of its own: one client leaves three of four to others.
        "sample_max_concurrent_requests": SDK_SAMPLES.min(config.connections_max / 4).max(1),
        // Two forks of a client that drew the same number would get each other's samples.
        "sample_join_sampling_session": true,
        // One poll for all samples of a sampling session, in place of one for each.
        "sample_use_retrieve_futures": true,
        // There are no tokens to exchange keys for, and losses of clients' own run where their code is.
        "pjwt_auth_enabled": false,
        "custom_loss_server_side": false,
    }))
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
