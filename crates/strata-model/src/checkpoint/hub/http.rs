//! Requests to the hub, and to wherever it sends who asks.
//!
//! The token goes to the hub's own host and nowhere else, whatever a redirect says. What fails and may pass is tried again. An error names the host and the status, and never a whole
//! address: those that the hub gives out are signed.

use std::slice::Iter;
use std::thread;
use std::time::Duration;

use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::{Agent, Body};

use super::{HubOptions, Patience};
use crate::{Error, Result};

/// The most redirects for one request.
const REDIRECTS_MAX: usize = 10;
/// The longest pause that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Who asks.
pub(super) struct Http {
    agent: Agent,
    /// Base URL of the hub, without a slash at its end.
    pub(super) endpoint: String,
    host: Uri,
    token: Option<String>,
    patience: Patience,
}

/// An answer with a body to read.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// Headers of the last answer that the hub itself gave, before it led elsewhere.
    pub(super) hub_headers: HeaderMap,
    /// The host that the body comes from, for messages.
    pub(super) host: String,
}

/// Why a request, or what was to be made of its answer, failed.
pub(super) enum Failure {
    /// Trying again may help; the server may have said when.
    Passing { message: String, after: Option<Duration> },
    /// It will not.
    Final(Error),
}

impl Failure {
    pub(super) fn passing(message: String) -> Self {
        Failure::Passing { message, after: None }
    }

    pub(super) fn lasting(message: String) -> Self {
        Failure::Final(Error::Hub(message))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Final(error)
    }
}

/// How often something was tried.
pub(super) struct Attempts(Iter<'static, Duration>);

impl Attempts {
    /// Waits until it is time to try again.
    ///
    /// # Errors
    /// The failure, if it is for good or was one too many.
    pub(super) fn wait(&mut self, failure: Failure) -> Result<()> {
        let (message, after) = match failure {
            Failure::Passing { message, after } => (message, after),
            Failure::Final(error) => return Err(error),
        };
        let Some(pause) = self.0.next() else { return Err(Error::Hub(message)) };
        let pause = after.map_or(*pause, |after| after.min(RETRY_AFTER_MAX).max(*pause));
        tracing::warn!("{message}; trying again in {} s", pause.as_secs());
        thread::sleep(pause);
        Ok(())
    }
}

impl Http {
    pub(super) fn new(options: &HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.trim_end_matches('/').to_string();
        let host = endpoint.parse::<Uri>().ok().filter(|uri| origin(uri).is_some());
        let Some(host) = host else {
            return Err(Error::Hub(format!("{:?} is no address of a hub such as https://huggingface.co", shown(&endpoint))));
        };
        let silence = Some(options.patience.silence);
        let config = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("strata/", env!("CARGO_PKG_VERSION")))
            // Ranges are of files as they are.
            .accept_encoding("identity")
            .timeout_resolve(silence)
            .timeout_connect(silence)
            .timeout_send_request(silence)
            .timeout_recv_response(silence)
            .timeout_per_read(silence)
            .build();
        let (agent, token, patience) = (Agent::new_with_config(config), options.token.clone(), options.patience);
        Ok(Http { agent, endpoint, host, token, patience })
    }

    pub(super) fn attempts(&self) -> Attempts {
        Attempts(self.patience.pauses.iter())
    }

    /// What `attempt` answers, once it does.
    pub(super) fn retrying<T>(&self, attempt: impl Fn() -> Result<T, Failure>) -> Result<T> {
        let mut attempts = self.attempts();
        loop {
            match attempt() {
                Ok(answer) => return Ok(answer),
                Err(failure) => attempts.wait(failure)?,
            }
        }
    }

    /// Asks once, and follows where it is led. `what`: the repository, and the file if it is about one. An answer is a success, or of a request for a `range` that it cannot be had (416).
    pub(super) fn get(&self, what: &str, path: &str, range: Option<&str>) -> Result<Answer, Failure> {
        let mut url = format!("{}/{path}", self.endpoint);
        let mut hub_headers = HeaderMap::new();
        for _ in 0..=REDIRECTS_MAX {
            let uri: Uri = match url.parse() {
                Ok(uri) if origin(&uri).is_some() => uri,
                _ => return Err(Failure::lasting(format!("{what}: {:?} is no address", shown(&url)))),
            };
            let (host, is_own) = (shown(joined(&uri, "/").trim_end_matches('/')), origin(&uri) == origin(&self.host));
            let mut request = self.agent.get(uri.clone());
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            if let Some(token) = self.token.as_ref().filter(|_| is_own) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| self.failure(what, &host, error))?;
            if is_own {
                hub_headers = response.headers().clone();
            }
            let status = response.status();
            let location = text(response.headers(), header::LOCATION.as_str());
            match status.as_u16() {
                301..=303 | 307 | 308 if location.is_some() => url = joined(&uri, location.unwrap_or_default()),
                200 | 206 => return Ok(Answer { response, hub_headers, host }),
                416 if range.is_some() => return Ok(Answer { response, hub_headers, host }),
                401 | 403 | 404 if is_own => {
                    let kept = if status == 404 { "private" } else { "restricted" };
                    let message = format!("{what} does not exist, or is {kept} ({host} answers {status})");
                    return Err(Failure::lasting(format!("{message}: if so, set HF_TOKEN to a token that may read it")));
                }
                408 | 429 | 500.. => {
                    let after = text(response.headers(), header::RETRY_AFTER.as_str()).and_then(|after| after.parse().ok());
                    let message = format!("{what}: {host} answers {status}");
                    return Err(Failure::Passing { message, after: after.map(Duration::from_secs) });
                }
                _ => return Err(Failure::lasting(format!("{what}: {host} answers {status}"))),
            }
        }
        let endpoint = self.shown_endpoint();
        Err(Failure::lasting(format!("{what}: {endpoint} leads from address to address, more than {REDIRECTS_MAX} times")))
    }

    /// What an error of the library means.
    pub(super) fn failure(&self, what: &str, host: &str, error: ureq::Error) -> Failure {
        match error {
            ureq::Error::Timeout(_) => {
                let silence = self.patience.silence.as_secs();
                Failure::passing(format!("{what}: nothing has come from {host} for {silence} s"))
            }
            ureq::Error::Io(_)
            | ureq::Error::Protocol(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::BodyStalled => Failure::passing(format!("{what}: {host}: {error}")),
            _ => Failure::lasting(format!("{what}: {host}: {error}")),
        }
    }

    /// The hub's address, for messages.
    pub(super) fn shown_endpoint(&self) -> String {
        shown(&self.endpoint)
    }
}

/// A header that is text.
pub(super) fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Scheme, host and port: who is asked. `None`: not by HTTP.
fn origin(uri: &Uri) -> Option<(&str, String, u16)> {
    let (scheme, port) = match uri.scheme_str()? {
        "http" => ("http", 80),
        "https" => ("https", 443),
        _ => return None,
    };
    Some((scheme, uri.host()?.to_ascii_lowercase(), uri.port_u16().unwrap_or(port)))
}

/// Where a `Location` leads from an address.
pub(super) fn joined(from: &Uri, location: &str) -> String {
    let scheme = from.scheme_str().unwrap_or_default();
    let authority = from.authority().map_or("", |authority| authority.as_str());
    let has_scheme = location.split_once("://").is_some_and(|(scheme, _)| scheme.chars().all(|c| c.is_ascii_alphanumeric()));
    if has_scheme {
        location.into()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let directory = from.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        let (path, query) = location.split_at(location.find(['?', '#']).unwrap_or(location.len()));
        // One without a path is about the same file.
        let path = if path.is_empty() { from.path().to_owned() } else { without_dots(&format!("{directory}/{path}")) };
        format!("{scheme}://{authority}{path}{query}")
    }
}

/// A path from `/` on in which `.` and `..` have been followed.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    for (i, part) in parts.iter().enumerate() {
        match *part {
            ".." => drop(kept.pop()),
            "." => {}
            part => kept.push(part),
        }
        if i + 1 == parts.len() && matches!(*part, "." | "..") {
            kept.push("");
        }
    }
    format!("/{}", kept.join("/"))
}

/// An address without what may be secret: a user's name and password, and what was signed.
pub(super) fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            format!("{scheme}://{}{path}", authority.rsplit('@').next().unwrap_or_default())
        }
        None => url.into(),
    }
}
