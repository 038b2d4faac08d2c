//! Sessions: begin, heartbeat, end, look.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use strata_engine::api::Client;

use crate::app::App;
use crate::auth::Owner;
use crate::blocking::off_thread;
use crate::error::{ApiError, ApiResult};
use crate::ids;
use crate::limits;
use crate::payload::Payload;
use crate::registry::{About, Metadata, Session, SessionStatus, metadata_bytes};
use crate::routes::account::{PROJECT, USER};
use crate::routes::listing::{Entries, listed};
use crate::routes::runs::rfc3339;
use crate::store::CheckpointRecord;
use crate::wire::json::{
    self as wire, AssignProject, CreateSession, FinishSession, Page, SearchSessions, SessionOnly, StatusQuery,
};

/// `POST create_session`
pub async fn create(State(app): State<Arc<App>>, owner: Owner, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CreateSession>().await?;
    let metadata = wire::metadata(asked.user_metadata);
    let display_name = asked.display_name.map(|name| name.0);
    let project_id = asked.project_id.map(|project| project.0);
    let session_id = ids::session();
    let client = Client { owner: owner.0, session: session_id.as_str().into() };
    let texts = [&display_name, &project_id].into_iter().flatten().map(String::len).sum::<usize>() as u64;
    let bytes = limits::SESSION_BYTES + metadata_bytes(&metadata) + texts;
    let charge = app.charge(&client, bytes)?;
    app.registry.create_session(client, About { user_metadata: metadata, display_name, project_id, is_shared: false }, charge);
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
    let kind = asked.reason.and_then(|reason| reason.kind);
    let kind = match kind.as_deref() {
        None | Some("success") => "success",
        Some("interrupted") => "interrupted",
        // Whatever else a client says went wrong.
        Some(_) => "errored",
    };
    let ended = app.registry.finish_session(&session_id, kind)?;
    tracing::info!(session_id, reason = kind, detail = asked.detail.map(|detail| detail.0), "session finished");
    ended.inspect(|client| app.end_session(client));
    Ok(Json(json!({})))
}

/// `GET sessions`: newest first.
pub async fn list(State(app): State<Arc<App>>, Owner(owner): Owner, page: Page) -> ApiResult<Response> {
    #[derive(Serialize)]
    struct Sessions<'a> {
        sessions: &'a [String],
    }

    listed(&app, &owner, move |app, answer| {
        let limit = page.limit.unwrap_or(20).min(limits::PAGE_MAX);
        answer.write(&Sessions { sessions: &app.registry.sessions(page.offset.unwrap_or(0), limit) })
    })
    .await
}

/// `PUT sessions/{id}/project`: its runs and what was saved of them come along.
pub async fn assign_project(
    State(app): State<Arc<App>>,
    Path(session_id): Path<String>,
    body: Payload,
) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<AssignProject>().await?;
    let project_id = asked.project_id.0;
    app.registry.set_project(&session_id, project_id.clone())?;
    off_thread(move || app.store.set_project(&format!("{session_id}:train:"), &project_id)).await?;
    Ok(Json(json!({})))
}

/// `POST sessions/search`: newest first, in pages that begin where the one before ended.
pub async fn search(State(app): State<Arc<App>>, Owner(owner): Owner, body: Payload) -> ApiResult<Response> {
    let (asked, _held) = body.json::<SearchSessions>().await?;
    let limit = asked.limit.unwrap_or(50);
    if !(1..=limits::SESSIONS_FOUND_MAX).contains(&limit) {
        return Err(ApiError::bad(format!("limit {limit} is not between 1 and {}", limits::SESSIONS_FOUND_MAX)));
    }
    asked.check().map_err(ApiError::BadRequest)?;
    let words: Vec<String> =
        asked.display_name.iter().flat_map(|name| name.split_whitespace()).map(str::to_lowercase).collect();
    let is_wanted = |id: &str, session: &Session| {
        let name = session.display_name.as_deref().unwrap_or("").to_lowercase();
        let is_named = !words.is_empty() && words.iter().all(|word| name.contains(word));
        let is_it = match &asked.session_id {
            Some(wanted) => **wanted == *id || is_named,
            None => words.is_empty() || is_named,
        };
        let metadata = session.user_metadata.as_deref();
        is_it
            && asked.owner.as_ref().is_none_or(|owner| owner.is(USER))
            && asked
                .user_metadata
                .0
                .iter()
                .all(|(key, value)| metadata.is_some_and(|metadata| metadata.get(key) == Some(value)))
            && asked
                .project_ids
                .as_ref()
                .is_none_or(|ids| ids.0.iter().any(|id| **id == *session.project_id.as_deref().unwrap_or(PROJECT)))
            && asked.statuses.as_ref().is_none_or(|statuses| statuses.0.iter().any(|wanted| is_status(wanted, &session.status)))
    };
    #[derive(Serialize)]
    struct Found<T> {
        sessions: T,
        next_cursor: Option<Value>,
    }

    let behind = asked.cursor.as_ref().map(|cursor| (&*cursor.last_session_id, cursor.last_created_at));
    // One more, to know whether there is another page.
    let mut found = app.registry.find_sessions(limit + 1, behind, is_wanted, Summary::of);
    let has_more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found
        .last()
        .filter(|_| has_more)
        .map(|last| json!({ "last_session_id": last.session_id, "last_created_at": last.created_at }));
    listed(&app, &owner, move |app, answer| {
        let checkpoints = app.store.list(None);
        let counted = found.iter().map(|summary| Counted::of(summary, &checkpoints));
        answer.write(&Found { sessions: Entries(counted), next_cursor })
    })
    .await
}

/// What a search shows of a session.
#[derive(Serialize)]
struct Summary {
    session_id: String,
    created_at: String,
    owner: &'static str,
    project_id: String,
    status: Value,
    display_name: Option<String>,
    #[serde(serialize_with = "shared")]
    user_metadata: Metadata,
    #[serde(skip)]
    models: Vec<String>,
}

impl Summary {
    fn of(id: &str, session: &Session) -> Self {
        let status = match &session.status {
            SessionStatus::Active => json!({ "type": "active" }),
            SessionStatus::Ended(reason) => json!({ "type": "cancelled", "detail": reason }),
            SessionStatus::Finished(how) => json!({ "type": "client_finished", "reason": { "type": how } }),
        };
        Summary {
            session_id: id.into(),
            created_at: rfc3339(session.created_at),
            owner: USER,
            project_id: session.project_id.as_deref().unwrap_or(PROJECT).into(),
            status,
            display_name: session.display_name.clone(),
            user_metadata: session.user_metadata.clone(),
            models: session.models.clone(),
        }
    }
}

/// A session with what was saved of it.
#[derive(Serialize)]
struct Counted<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    checkpoints_count: usize,
    checkpoint_storage_bytes: u64,
}

impl<'a> Counted<'a> {
    fn of(summary: &'a Summary, checkpoints: &[Arc<CheckpointRecord>]) -> Self {
        let own = || checkpoints.iter().filter(|record| summary.models.contains(&record.run));
        Counted {
            summary,
            checkpoints_count: own().count(),
            checkpoint_storage_bytes: own().map(|record| record.size_bytes).sum(),
        }
    }
}

fn shared<S: Serializer>(metadata: &Metadata, serializer: S) -> Result<S::Ok, S::Error> {
    metadata.as_deref().serialize(serializer)
}

fn is_status(wanted: &StatusQuery, status: &SessionStatus) -> bool {
    match status {
        SessionStatus::Active => wanted.is("active", None),
        SessionStatus::Ended(_) => wanted.is("cancelled", None),
        SessionStatus::Finished(how) => wanted.is("client_finished", Some(how)),
    }
}

/// `GET sessions/{id}`
pub async fn get(State(app): State<Arc<App>>, Owner(owner): Owner, Path(session_id): Path<String>) -> ApiResult<Response> {
    #[derive(Serialize)]
    struct Shown<'a> {
        training_run_ids: &'a [String],
        sampler_ids: &'a [String],
        user_metadata: Option<&'a BTreeMap<String, String>>,
        display_name: Option<&'a str>,
    }

    listed(&app, &owner, move |app, answer| {
        let session = app.registry.session(&session_id)?;
        answer.write(&Shown {
            training_run_ids: &session.models,
            sampler_ids: &session.samplers,
            user_metadata: session.user_metadata.as_deref(),
            display_name: session.display_name.as_deref(),
        })
    })
    .await
}
