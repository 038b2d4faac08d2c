//! Sessions: begin, heartbeat, end, look.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use strata_engine::api::Client;

use crate::app::App;
use crate::auth::Owner;
use crate::error::ApiResult;
use crate::ids;
use crate::limits;
use crate::payload::Payload;
use crate::wire::json::{self as wire, CreateSession, FinishSession, Page, SessionOnly};

/// `POST create_session`
pub async fn create(State(app): State<Arc<App>>, owner: Owner, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CreateSession>().await?;
    let metadata = wire::metadata(asked.user_metadata);
    let display_name = asked.display_name.map(|name| name.0);
    let session_id = ids::session();
    let client = Client { owner: owner.0, session: session_id.as_str().into() };
    let texts = metadata.iter().flatten().map(|(key, value)| key.len() + value.len() + 100).sum::<usize>();
    let bytes = limits::SESSION_BYTES + (texts + display_name.as_ref().map_or(0, String::len)) as u64;
    let charge = app.charge(&client, bytes)?;
    app.registry.create_session(client, metadata, display_name, charge);
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
    let ended = app.registry.end_session(&session_id, "its client finished the session")?;
    tracing::info!(session_id, reason = kind, detail = asked.detail.map(|detail| detail.0), "session finished");
    ended.inspect(|client| app.end_session(client));
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
