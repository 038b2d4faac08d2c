//! What a hosted service has and one's own machine does not: accounts, organisations, bills, traces. The answers are as empty as they are true, so that
//! clients and their command line go on.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::auth::Owner;
use crate::error::{ApiError, ApiResult};
use crate::payload::Payload;
use crate::routes::listing::{Entries, listed};
use crate::routes::runs::project_of;
use crate::wire::json::InProject;

/// Whom everything here belongs to: there is one key, and so one user.
pub const USER: &str = "tml:organization_user:local";

/// The project of whatever its user named none for.
pub const PROJECT: &str = "local";

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

/// `GET billing/usage/checkpoints/current`: what the checkpoints of each project take of the disk, at no cost.
pub async fn checkpoint_usage(State(app): State<Arc<App>>, Owner(owner): Owner, asked: InProject) -> ApiResult<Response> {
    #[derive(Serialize)]
    struct Usage<T> {
        data: T,
    }

    #[derive(Serialize)]
    struct OfProject<'a> {
        project_id: &'a str,
        org_user_urn: &'static str,
        checkpoint_count: usize,
        size_bytes: u64,
        size_gigabytes: f64,
    }

    listed(&app, &owner, move |app, answer| {
        let mut projects: BTreeMap<String, (usize, u64)> = BTreeMap::new();
        for record in app.store.list(None) {
            let (count, bytes) = projects.entry(project_of(app, &record)).or_default();
            (*count, *bytes) = (*count + 1, *bytes + record.size_bytes);
        }
        let wanted = projects.iter().filter(|(project, _)| asked.project_id.as_ref().is_none_or(|id| **id == **project));
        let data = wanted.map(|(project_id, &(checkpoint_count, size_bytes))| OfProject {
            project_id,
            org_user_urn: USER,
            checkpoint_count,
            size_bytes,
            size_gigabytes: size_bytes as f64 / 1e9,
        });
        answer.write(&Usage { data: Entries(data) })
    })
    .await
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
