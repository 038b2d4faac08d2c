//! Coming back for an outcome.

use std::convert::Infallible;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use crate::app::App;
use crate::auth::Owner;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult, failure_category};
use crate::futures::{Answer, Completion, Target, Waited};
use crate::limits;
use crate::names::shown;
use crate::payload::{ChargedText, Payload};
use crate::routes::listing::{Entries, Page, listed};
use crate::wire::json::{FutureOnly, RetrieveFutures};
use crate::wire::render;

const PROTOBUF: &str = "application/x-protobuf";
/// Completions that are written down at once: of more a thread that serves would have no time for others.
const COMPLETIONS_INLINE_MAX: usize = 256;

/// Whether a client takes results in their own encoding. Its headers are not kept while it waits.
pub struct AcceptsProtobuf(bool);

impl<S: Send + Sync> FromRequestParts<S> for AcceptsProtobuf {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let mut accepts = parts.headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        Ok(AcceptsProtobuf(accepts.any(|value| value.contains(PROTOBUF))))
    }
}

/// `POST retrieve_future`: held until the outcome is there, and otherwise answered 408, upon which the client asks again. A failed
/// operation is a 200 with its reason: other statuses would make the client ask again.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    AcceptsProtobuf(accepts_protobuf): AcceptsProtobuf,
    Owner(owner): Owner,
    body: Payload,
) -> ApiResult<Response> {
    let (FutureOnly { request_id }, _) = body.json().await?;
    let waited = tokio::select! {
        waited = app.futures.wait(&request_id, app.config.poll_hold) => waited,
        () = app.closed() => Waited::Pending,
    };
    let answer = match waited {
        Waited::Ready(answer) => answer,
        Waited::Pending => {
            let body = json!({ "type": "try_again", "request_id": *request_id, "queue_state": "active" });
            return Ok((StatusCode::REQUEST_TIMEOUT, Json(body)).into_response());
        }
        Waited::Gone => {
            return Err(ApiError::Gone(format!(
                "the result of request {} was kept for a while, and is gone",
                shown(&request_id)
            )));
        }
        Waited::Unknown => {
            return Err(ApiError::NotFound(format!("there is no request {:?} on this server", shown(&request_id))));
        }
    };
    Ok(match &*answer {
        Answer::Json(bytes) => ([(CONTENT_TYPE, "application/json")], bytes.clone()).into_response(),
        Answer::Sample(bytes) | Answer::ForwardBackward(bytes) if accepts_protobuf => {
            ([(CONTENT_TYPE, PROTOBUF)], bytes.clone()).into_response()
        }
        Answer::Sample(bytes) => rendered(&app, &owner, bytes.clone(), render::sample).await?,
        Answer::ForwardBackward(bytes) => rendered(&app, &owner, bytes.clone(), render::forward_backward).await?,
        Answer::Failed(failure) => {
            Json(json!({ "error": failure.to_string(), "category": failure_category(failure) })).into_response()
        }
    })
}

/// `POST cancel_future`: stops the work on a request that is open. Its future then fails; one that is done stays as it is.
pub async fn cancel(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<serde_json::Value>> {
    let (FutureOnly { request_id }, _) = body.json().await?;
    app.cancel(&request_id);
    Ok(Json(json!({})))
}

/// `POST retrieve_futures`: which requests of one client of a sampling session are done. Held until there is one that it has not been told of.
pub async fn retrieve_many(State(app): State<Arc<App>>, Owner(owner): Owner, body: Payload) -> ApiResult<Response> {
    #[derive(Serialize)]
    struct Told<T> {
        completions: T,
        cursor: u64,
    }

    let (RetrieveFutures { target, prev_cursor, timeout, retrieved_request_ids }, _) = body.json().await?;
    let sampler_id = target.sampling_session_id.0;
    app.registry.sampler(&sampler_id)?;
    for id in &retrieved_request_ids.0 {
        // Others' results are not its to give up.
        if id.strip_prefix(sampler_id.as_str()).is_some_and(|rest| rest.starts_with(':')) {
            app.futures.retrieved(id);
        }
    }
    let hold = timeout.map_or(app.config.poll_hold, |seconds| {
        Duration::try_from_secs_f64(seconds).unwrap_or_default().min(app.config.poll_hold)
    });
    let target = Target { sampler_id: sampler_id.into(), clone: target.cloned_sampler_id };
    let (completions, cursor) = tokio::select! {
        told = app.futures.completions(&target, prev_cursor, hold) => told,
        () = app.closed() => (Vec::new(), prev_cursor),
    };
    let is_short = completions.len() <= COMPLETIONS_INLINE_MAX;
    let write = move |_: &App, answer: &mut Page| {
        let told = |Completion { request_id, result_bytes }: &Completion| match result_bytes {
            Some(bytes) => {
                json!({ "state": "finished", "request_id": &**request_id, "response_payload_uncompressed_size": bytes })
            }
            None => json!({ "state": "failed", "request_id": &**request_id }),
        };
        answer.write(&Told { completions: Entries(completions.iter().map(told)), cursor })
    };
    if !is_short {
        return listed(&app, &owner, write).await;
    }
    let mut answer = Page::new(&app);
    write(&app, &mut answer).map(|()| answer.into_response())
}

/// A result as JSON, which takes several times the memory that it does as protobuf, and is charged as a request is.
async fn rendered(
    app: &App,
    owner: &str,
    encoded: Bytes,
    render: fn(Bytes, &mut dyn Write) -> Result<(), String>,
) -> ApiResult<Response> {
    let mut text = ChargedText::new(app.transit.charge());
    let is_small = encoded.len() <= limits::BODY_INLINE_BYTES_MAX;
    let render = move || match (render(encoded, &mut text), text.refusal.take()) {
        // Charged until the client has read it.
        (Ok(()), _) => Ok(Bytes::from_owner(text)),
        (Err(_), Some(refusal)) => Err(refusal),
        (Err(error), None) => Err(ApiError::Internal(format!("rendering a result: {error}"))),
    };
    let text = if is_small { render()? } else { in_turn((&app.decodes, owner), render).await? };
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}
