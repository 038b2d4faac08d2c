//! Sessions: begin, heartbeat, end, look.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiResult;
use crate::limits;
use crate::payload::Payload;
use crate::wire::json::{self as wire, CreateSession, FinishSession, Page, SessionOnly};

/// `POST create_session`
pub async fn create(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CreateSession>().await?;
    let metadata = wire::metadata(asked.user_metadata);
    let session_id = app.registry.create_session(metadata, asked.display_name.map(|name| name.0))?;
    tracing::info!(session_id, sdk_version = asked.sdk_version.as_deref(), "session began");
    Ok(Json(json!({ "type": "create_session", "session_id": session_id })))
}

/// `POST session_heartbeat`: a session that is over answers 410, which ends the client's heartbeats.
pub async fn heartbeat(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<SessionOnly>().await?;
    app.registry.heartbeat(&asked.session_id)?;
    Ok(Json(json!({ "type": "session_heartbeat" })))
}

/// `POST sessions/{id}/finish`: the first one counts.
pub async fn finish(State(app): State<Arc<App>>, Path(session_id): Path<String>, body: Payload) -> ApiResult<Json<Value>> {
    let asked = if body.is_empty() { FinishSession::default() } else { body.json::<FinishSession>().await?.0 };
    let kind = asked.reason.and_then(|reason| reason.kind).map_or_else(|| "success".into(), |kind| kind.0);
    let freed = app.registry.end_session(&session_id, "its client finished the session")?;
    tracing::info!(session_id, reason = kind, detail = asked.detail.map(|detail| detail.0), "session finished");
    app.notify_engine(freed);
    Ok(Json(json!({})))
}

/// `GET sessions`: newest first.
pub async fn list(State(app): State<Arc<App>>, page: Page) -> Json<Value> {
    let limit = page.limit.unwrap_or(20).min(limits::PAGE_MAX);
    let sessions: Vec<String> = app.registry.sessions().into_iter().skip(page.offset.unwrap_or(0)).take(limit).collect();
    Json(json!({ "sessions": sessions }))
}

/// `GET sessions/{id}`
pub async fn get(State(app): State<Arc<App>>, Path(session_id): Path<String>) -> ApiResult<Json<Value>> {
    let session = app.registry.session(&session_id)?;
    Ok(Json(json!({
        "training_run_ids": session.models,
        "sampler_ids": session.samplers,
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    })))
}
