//! Request bodies: read up to a limit, inflated up to the same limit, and decoded off the async threads where they are large.

use std::io::Read;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::HeaderName;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};

use crate::error::{ApiError, ApiResult};
use crate::limits;

/// Largest zstd window that is accepted: the memory a frame may ask for before its first byte is out.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// A request body, inflated.
pub struct Payload {
    /// The bytes.
    pub bytes: Bytes,
    /// Whether they are protobuf.
    pub is_protobuf: bool,
}

impl<S: Send + Sync> FromRequest<S> for Payload {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> ApiResult<Self> {
        let is_protobuf = header(&request, &CONTENT_TYPE).starts_with("application/x-protobuf");
        let encoding = header(&request, &CONTENT_ENCODING).to_ascii_lowercase();
        // Read before anything is refused: see `drain`.
        let bytes = axum::body::to_bytes(request.into_body(), limits::BODY_BYTES_MAX).await;
        let bytes = bytes.map_err(|error| body_error(&error))?;
        let is_zstd = match encoding.as_str() {
            "" | "identity" => false,
            "zstd" => true,
            other => return Err(ApiError::bad(format!("content-encoding {other:?} is not supported; send zstd or none"))),
        };
        let bytes =
            if is_zstd { blocking(bytes.len(), move || inflate(&bytes, limits::BODY_BYTES_MAX)).await?.into() } else { bytes };
        Ok(Payload { bytes, is_protobuf })
    }
}

/// Reads what is left of a body that nobody wants. A connection that is answered before its request has arrived is closed, and a client
/// that sends its next request over it sees an error in place of an answer.
pub async fn drain(body: Body) {
    let read = axum::body::to_bytes(body, limits::DRAINED_BYTES_MAX);
    // Whatever comes of it, the answer is the same.
    let _ = tokio::time::timeout(limits::DRAIN_TIME_MAX, read).await;
}

fn header<'a>(request: &'a Request, name: &HeaderName) -> &'a str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("").trim()
}

fn body_error(error: &axum::Error) -> ApiError {
    // The limit is an error of a type that axum does not name; its text is all there is to tell it by.
    if std::error::Error::source(error).is_some_and(|source| source.to_string().contains("length limit")) {
        too_large()
    } else {
        ApiError::bad(format!("request body: {error}"))
    }
}

fn too_large() -> ApiError {
    ApiError::TooLarge(format!("request body is above the limit of {} MiB", limits::BODY_BYTES_MAX >> 20))
}

fn inflate(compressed: &[u8], bytes_max: usize) -> ApiResult<Vec<u8>> {
    let malformed = |error: std::io::Error| ApiError::bad(format!("request body is not zstd: {error}"));
    let mut decoder = zstd::stream::read::Decoder::with_buffer(compressed).map_err(malformed)?;
    decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(malformed)?;
    let mut inflated = Vec::new();
    decoder.take(bytes_max as u64 + 1).read_to_end(&mut inflated).map_err(malformed)?;
    if inflated.len() > bytes_max { Err(too_large()) } else { Ok(inflated) }
}

/// Runs work that grows with the size of a body: in place if it is small, on a blocking thread otherwise.
///
/// # Errors
/// Those of the work.
pub async fn blocking<T: Send + 'static>(
    size_bytes: usize,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    if size_bytes <= limits::BODY_INLINE_BYTES_MAX {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::Internal(format!("decoding the request body: {error}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_inflates_beyond_the_limit_is_refused() {
        let bomb = zstd::encode_all(&vec![0u8; 1 << 20][..], 3).unwrap();
        assert!(bomb.len() < 1000);
        assert!(matches!(inflate(&bomb, 1000), Err(ApiError::TooLarge(_))));
        assert_eq!(inflate(&bomb, 1 << 20).unwrap().len(), 1 << 20);
        assert!(matches!(inflate(b"not zstd", 1000), Err(ApiError::BadRequest(_))));
        assert!(matches!(inflate(&bomb[..bomb.len() - 3], 1 << 20), Err(ApiError::BadRequest(_))));
    }
}
