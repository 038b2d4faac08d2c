//! What a hosted service has and one's own machine does not: accounts, organisations, bills, traces. The answers are as empty as they are true, so that
//! clients and their command line go on.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::payload::Payload;

/// Whom everything here belongs to: there is one key, and so one user.
pub const USER: &str = "tml:organization_user:local";

/// `GET auth/apikey/me`: the key is right, or this would not have been reached.
pub async fn key() -> Json<Value> {
    Json(json!({
        "key_id": 1,
        "name": "strata",
        "note": "the key of this server's own settings",
        "details": { "org_details": { "name": "local" }, "user_details": { "email": "local" } },
    }))
}

/// `DELETE auth/apikey/me`
pub async fn delete_key() -> ApiError {
    ApiError::bad("the key of this server is set where it is started, with --api-key, and cannot be deleted from here")
}

/// `POST auth/token`: clients ask only where `client/config` tells them to.
pub async fn token(_body: Payload) -> ApiError {
    ApiError::bad("this server takes API keys and gives out no tokens; leave pjwt_auth_enabled off")
}

/// `GET billing/usage/events`: nothing costs anything.
pub async fn usage() -> Json<Value> {
    Json(json!({ "data": [], "sessions": {} }))
}

/// `GET billing/usage/checkpoints/current`: what checkpoints take of the disk, at no cost.
pub async fn checkpoint_usage(State(app): State<Arc<App>>) -> ApiResult<Json<Value>> {
    let checkpoints = app.checkpoints(None).await?;
    if checkpoints.is_empty() {
        return Ok(Json(json!({ "data": [] })));
    }
    let size_bytes: u64 = checkpoints.iter().map(|record| record.size_bytes).sum();
    Ok(Json(json!({ "data": [{
        "org_user_urn": USER,
        "checkpoint_count": checkpoints.len(),
        "size_bytes": size_bytes,
        "size_gigabytes": size_bytes as f64 / 1e9,
    }] })))
}

/// `GET audit`: no such log is kept.
pub async fn audit() -> Json<Value> {
    Json(json!({ "entries": [] }))
}

/// `GET sessions/{id}/trace_export`
pub async fn trace() -> Json<Value> {
    Json(
        json!({ "status": "failed", "error": "this server keeps no traces of sessions; RUST_LOG=strata_server=debug has it log every request" }),
    )
}

/// `POST create_custom_loss`
pub async fn custom_loss(_body: Payload) -> ApiResult<Json<Value>> {
    Err(ApiError::bad(
        "this server runs no losses of clients' own; forward_backward_custom computes them on the client, as it does where custom_loss_server_side is off",
    ))
}
