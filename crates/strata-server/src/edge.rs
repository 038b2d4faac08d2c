//! Who is answered at all: the server's own names and pages, and bodies of the types that the API takes.
//!
//! A browser sends requests to this machine for any page that asks it to. A server without a key would answer them, were it not that the
//! browser says where they come from: in `Origin`, and in `Host` where a page has its own name point here.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::app::App;
use crate::auth::check_key;
use crate::error::ApiError;
use crate::names::shown;
use crate::payload::{refuse, refuse_operation};

/// Types of bodies that the API takes, whatever their parameters.
const BODY_TYPES: [&str; 2] = ["application/json", "application/x-protobuf"];
/// Where archives are taken, and their type.
const ARCHIVES: (&str, &str) = ("/api/v1/weights/import", "application/x-tar");

/// Lets a request pass if it comes from where it may, with a body that it may have.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_open = app.config.api_key.is_none();
    let checked =
        check_host(&request, is_open).and_then(|()| check_origin(request.headers())).and_then(|()| check_body_type(&request));
    match checked {
        Ok(()) => next.run(request).await,
        Err(refusal @ ApiError::UnsupportedMediaType(_)) if check_key(&app, request.headers()).is_ok() => {
            refuse_operation(&app, request, refusal).await
        }
        Err(refusal) => refuse(request, refusal).await,
    }
}

/// Without a key, only this machine's own names are answered: a page whose name was made to point here sends its own.
fn check_host(request: &Request, is_open: bool) -> Result<(), ApiError> {
    if !is_open {
        return Ok(());
    }
    let hosts: Vec<&str> = texts(request.headers(), &HOST).chain(request.uri().authority().map(Authority::as_str)).collect();
    match hosts.iter().find(|host| !is_loopback(host)) {
        None if !hosts.is_empty() => Ok(()),
        None => Err(ApiError::Forbidden("a server without an API key answers requests that have a Host header only".into())),
        Some(host) => Err(ApiError::Forbidden(format!(
            "a server without an API key answers to names of this machine, such as localhost or 127.0.0.1, and not to {:?}",
            shown(host)
        ))),
    }
}

/// Pages of other servers are refused, key or not: a browser may hold the key of its user.
fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let foreign = texts(headers, &ORIGIN).find(|origin| !texts(headers, &HOST).any(|host| is_origin_of(origin, host)));
    match foreign {
        None => Ok(()),
        Some(origin) => {
            Err(ApiError::Forbidden(format!("requests from pages of {:?} are not answered by this server", shown(origin))))
        }
    }
}

/// A page can send texts and forms anywhere without asking; it cannot send these types.
fn check_body_type(request: &Request) -> Result<(), ApiError> {
    if request.body().is_end_stream() || !request.uri().path().starts_with("/api/v1/") {
        return Ok(());
    }
    let given = texts(request.headers(), &CONTENT_TYPE).next().unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    let (archives, archive) = ARCHIVES;
    let (taken, wanted) = match request.uri().path() == archives {
        true => (&[archive][..], archive),
        false => (&BODY_TYPES[..], "application/json or application/x-protobuf"),
    };
    if taken.iter().any(|taken| essence.eq_ignore_ascii_case(taken)) {
        return Ok(());
    }
    let given = if given.is_empty() { "none".into() } else { format!("{:?}", shown(given)) };
    Err(ApiError::UnsupportedMediaType(format!("a body needs the content-type {wanted} here, and this one has {given}")))
}

/// The values of a header; one that is no text reads as one that suits nobody.
fn texts<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().map(|value: &HeaderValue| value.to_str().unwrap_or("\u{fffd}").trim())
}

/// Whether `host`, a name or an address with or without a port, means this machine wherever it is read.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    if host.contains('@') {
        return false;
    }
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    if let Some(address) = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok_and(|address| address.to_canonical().is_loopback());
    }
    name == "localhost" || name.ends_with(".localhost") || name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

/// Whether `origin` is that of the pages of `host`.
fn is_origin_of(origin: &str, host: &str) -> bool {
    let own = |scheme: &str, port: &str| {
        let Some(origin) = origin.strip_prefix(scheme) else { return false };
        let without_port = |name: &str| name.strip_suffix(port).unwrap_or(name).to_ascii_lowercase();
        !origin.is_empty() && without_port(origin) == without_port(host)
    };
    own("http://", ":80") || own("https://", ":443")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_known_in_all_their_spellings() {
        for host in [
            "localhost",
            "LOCALHOST:80",
            "localhost.",
            "a.localhost:8000",
            "127.0.0.1:8000",
            "127.9.9.9",
            "[::1]:8000",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.localhost.example",
            "xlocalhost",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "[::2]:80",
            "localhost@evil.example",
            "evil@localhost",
            "",
            ":80",
            "\u{fffd}",
            "localhost/evil.example",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn an_origin_is_the_servers_own_or_it_is_not() {
        for (origin, host) in [
            ("http://localhost:8000", "localhost:8000"),
            ("http://LocalHost:8000", "localhost:8000"),
            ("http://strata.example", "strata.example:80"),
            ("https://strata.example", "strata.example"),
            ("http://[::1]:8000", "[::1]:8000"),
        ] {
            assert!(is_origin_of(origin, host), "{origin} {host}");
        }
        for (origin, host) in [
            ("http://evil.example", "localhost:8000"),
            ("http://localhost:9000", "localhost:8000"),
            ("http://localhost", "localhost:8000"),
            ("null", "null"),
            ("", ""),
            ("http://", ""),
            ("http://", ":80"),
            ("file://localhost:8000", "localhost:8000"),
            ("http://localhost:8000.evil.example", "localhost:8000"),
        ] {
            assert!(!is_origin_of(origin, host), "{origin} {host}");
        }
    }
}
