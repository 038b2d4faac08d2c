//! Coming back for an outcome.

use std::io::Write;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;
use crate::error::{ApiError, ApiResult, failure_category};
use crate::futures::{Answer, Waited};
use crate::limits;
use crate::names::shown;
use crate::payload::{ChargedText, Payload, blocking};
use crate::wire::json::FutureOnly;
use crate::wire::render;

const PROTOBUF: &str = "application/x-protobuf";

/// `POST retrieve_future`: held until the outcome is there, and otherwise answered 408, upon which the client asks again. A failed
/// operation is a 200 with its reason: other statuses would make the client ask again.
pub async fn retrieve(State(app): State<Arc<App>>, headers: HeaderMap, body: Payload) -> ApiResult<Response> {
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
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let accepts_protobuf = accepts.into_iter().any(|value| value.contains(PROTOBUF));
    Ok(match &*answer {
        Answer::Json(bytes) => ([(CONTENT_TYPE, "application/json")], bytes.clone()).into_response(),
        Answer::Sample(bytes) | Answer::ForwardBackward(bytes) if accepts_protobuf => {
            ([(CONTENT_TYPE, PROTOBUF)], bytes.clone()).into_response()
        }
        Answer::Sample(bytes) => rendered(&app, bytes.clone(), render::sample).await?,
        Answer::ForwardBackward(bytes) => rendered(&app, bytes.clone(), render::forward_backward).await?,
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

/// A result as JSON, which takes several times the memory that it does as protobuf, and is charged as a request is.
async fn rendered(app: &App, encoded: Bytes, render: fn(Bytes, &mut dyn Write) -> Result<(), String>) -> ApiResult<Response> {
    let mut text = ChargedText::new(app.transit.charge());
    let is_small = encoded.len() <= limits::BODY_INLINE_BYTES_MAX;
    let render = move || match (render(encoded, &mut text), text.refusal.take()) {
        // Charged until the client has read it.
        (Ok(()), _) => Ok(Bytes::from_owner(text)),
        (Err(_), Some(refusal)) => Err(refusal),
        (Err(error), None) => Err(ApiError::Internal(format!("rendering a result: {error}"))),
    };
    let text = if is_small { render()? } else { blocking(&app.decodes, render).await? };
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}
