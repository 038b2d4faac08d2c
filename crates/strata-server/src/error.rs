//! Errors as the SDK expects them: `{"detail": ...}` with a status that makes it stop or retry, whichever is right.
//!
//! 409 and 425 are never used: the SDK retries the first for minutes and cannot recover from the second. A user's mistake is a 400,
//! because the SDK retries every 5xx.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::CONNECTION;
use axum::response::{IntoResponse, Response};
use strata_engine::api::Failure;

use crate::limits;
use crate::names::cut;

/// Why a request was not accepted. The text is shown to the user.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// The request is wrong and will stay wrong.
    #[error("{0}")]
    BadRequest(String),
    /// The key is missing or wrong.
    #[error("{0}")]
    Unauthorized(String),
    /// The request comes from where none is answered.
    #[error("{0}")]
    Forbidden(String),
    /// What the request names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// No such method on this path.
    #[error("{0}")]
    MethodNotAllowed(String),
    /// What the request names existed, and is no more.
    #[error("{0}")]
    Gone(String),
    /// The body did not arrive in time.
    #[error("{0}")]
    Timeout(String),
    /// The body is above a limit.
    #[error("{0}")]
    TooLarge(String),
    /// The body is of a type that the API does not take.
    #[error("{0}")]
    UnsupportedMediaType(String),
    /// A queue is full: the client should send the same request again later.
    #[error("{0}")]
    Busy(String),
    /// What the request names is elsewhere, and that does not answer: the client may send the request again.
    #[error("{0}")]
    BadGateway(String),
    /// The engine is dead.
    #[error("{0}")]
    Unavailable(String),
    /// Strata is at fault.
    #[error("{0}")]
    Internal(String),
}

impl ApiError {
    /// Shorthand for [`ApiError::BadRequest`].
    pub fn bad(detail: impl Into<String>) -> Self {
        ApiError::BadRequest(detail.into())
    }

    /// The HTTP status of this error.
    pub fn status(&self) -> StatusCode {
        match self {
            ApiError::BadRequest(_) => StatusCode::BAD_REQUEST,
            ApiError::Unauthorized(_) => StatusCode::UNAUTHORIZED,
            ApiError::Forbidden(_) => StatusCode::FORBIDDEN,
            ApiError::NotFound(_) => StatusCode::NOT_FOUND,
            ApiError::MethodNotAllowed(_) => StatusCode::METHOD_NOT_ALLOWED,
            ApiError::Gone(_) => StatusCode::GONE,
            ApiError::Timeout(_) => StatusCode::REQUEST_TIMEOUT,
            ApiError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            ApiError::UnsupportedMediaType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ApiError::Busy(_) => StatusCode::TOO_MANY_REQUESTS,
            ApiError::BadGateway(_) => StatusCode::BAD_GATEWAY,
            ApiError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            ApiError::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, text) = (self.status(), self.to_string());
        let detail = cut(&text, limits::REFUSAL_CHARS_MAX);
        if status.is_server_error() {
            tracing::error!(status = status.as_u16(), "{detail}");
        } else {
            tracing::debug!(status = status.as_u16(), "{detail}");
        }
        let answer = Json(serde_json::json!({ "detail": detail }));
        match self {
            // What is left of the body is not going to be read, so no request can follow it.
            ApiError::TooLarge(_) | ApiError::Timeout(_) => (status, [(CONNECTION, "close")], answer).into_response(),
            _ => (status, answer).into_response(),
        }
    }
}

/// The `category` under which the SDK files a failure.
pub fn failure_category(failure: &Failure) -> &'static str {
    match failure {
        Failure::User(_) => "user",
        Failure::Server(_) => "server",
    }
}

/// The result of every handler.
pub type ApiResult<T> = Result<T, ApiError>;
