//! Who may ask.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::ids;
use crate::payload::refuse;

/// What every key starts with: the SDK refuses others before it sends them.
pub const KEY_PREFIX: &str = "tml-";

/// Lets a request pass if it carries the server's key, or if the server has none.
pub async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match check_key(&app, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refuse(request, refusal).await,
    }
}

/// Whether a request carries the server's key, or the server has none.
///
/// # Errors
/// If it does not.
pub fn check_key(app: &App, headers: &HeaderMap) -> ApiResult<()> {
    let Some(expected) = &app.config.api_key else { return Ok(()) };
    let refusal = match given_key(headers) {
        Some(given) if equal_in_constant_time(given.as_bytes(), expected.as_bytes()) => return Ok(()),
        Some(_) => "this API key is not the server's",
        None => "an API key is needed in the header X-API-Key",
    };
    Err(ApiError::Unauthorized(refusal.into()))
}

/// Whom a request's key stands for. Where the server has no key of its own, each key that clients make up is an owner.
pub struct Owner(pub Arc<str>);

impl<S: Send + Sync> FromRequestParts<S> for Owner {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        Ok(Owner(owner(&parts.headers)))
    }
}

/// As [`Owner`], of the headers of a request.
pub fn owner(headers: &HeaderMap) -> Arc<str> {
    ids::owner(given_key(headers).unwrap_or("")).into()
}

fn given_key(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let (scheme, key) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim_start())
}

/// Compares without telling by its time how much was right. The length of the key is no secret.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let difference = a.iter().zip(b).fold(0u8, |difference, (x, y)| difference | (x ^ y));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_equal_only_if_every_byte_is() {
        assert!(equal_in_constant_time(b"tml-abc", b"tml-abc"));
        for other in ["tml-abd", "tml-ab", "tml-abcd", ""] {
            assert!(!equal_in_constant_time(b"tml-abc", other.as_bytes()));
        }
    }
}
