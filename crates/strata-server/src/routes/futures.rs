//! Coming back for an outcome.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;
use crate::error::{ApiError, ApiResult, failure_category};
use crate::futures::{Answer, Waited};
use crate::payload::{Payload, blocking};
use crate::wire::json::{self as wire, FutureOnly};
use crate::wire::render;

const PROTOBUF: &str = "application/x-protobuf";

/// `POST retrieve_future`: held until the outcome is there, and otherwise answered 408, upon which the client asks again. A failed
/// operation is a 200 with its reason: other statuses would make the client ask again.
pub async fn retrieve(State(app): State<Arc<App>>, headers: HeaderMap, body: Payload) -> ApiResult<Response> {
    let FutureOnly { request_id } = wire::parse(&body.bytes)?;
    let waited = tokio::select! {
        waited = app.futures.wait(&request_id, app.config.poll_hold) => waited,
        () = app.closed() => Waited::Pending,
    };
    let answer = match waited {
        Waited::Ready(answer) => answer,
        Waited::Pending => {
            let body = json!({ "type": "try_again", "request_id": request_id, "queue_state": "active" });
            return Ok((StatusCode::REQUEST_TIMEOUT, Json(body)).into_response());
        }
        Waited::Gone => {
            return Err(ApiError::Gone(format!("the result of request {request_id} was kept for a while, and is gone")));
        }
        Waited::Unknown => return Err(ApiError::NotFound(format!("there is no request {request_id:?} on this server"))),
    };
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let accepts_protobuf = accepts.into_iter().any(|value| value.contains(PROTOBUF));
    Ok(match &*answer {
        Answer::Json(bytes) => ([(CONTENT_TYPE, "application/json")], bytes.clone()).into_response(),
        Answer::Sample(bytes) | Answer::ForwardBackward(bytes) if accepts_protobuf => {
            ([(CONTENT_TYPE, PROTOBUF)], bytes.clone()).into_response()
        }
        Answer::Sample(bytes) => rendered(bytes.clone(), render::sample).await?,
        Answer::ForwardBackward(bytes) => rendered(bytes.clone(), render::forward_backward).await?,
        Answer::Failed(failure) => {
            Json(json!({ "error": failure.to_string(), "category": failure_category(failure) })).into_response()
        }
    })
}

async fn rendered(
    encoded: axum::body::Bytes,
    render: fn(axum::body::Bytes) -> Result<serde_json::Value, String>,
) -> ApiResult<Response> {
    let value = blocking(encoded.len(), move || {
        render(encoded).map_err(|error| ApiError::Internal(format!("rendering a result: {error}")))
    });
    Ok(Json(value.await?).into_response())
}
