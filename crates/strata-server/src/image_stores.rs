//! The object stores that prompts may name pictures in, by `https://HOST/PREFIX/…`, `s3://BUCKET/PREFIX/…` and the like.
//!
//! Nothing but what is below a prefix that the operator enabled is ever asked for: addresses are compared in the one form that they are fetched in,
//! the host that is connected to is the one of the prefix, and no redirect is followed. What a store says is only ever taken as the file of a picture.

use std::env;
use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use time::OffsetDateTime;
use ureq::config::AutoHeaderValue;
use ureq::http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH};

use crate::limits;
use crate::names::shown;
use crate::wire::budget::Budget;
use crate::wire::picture;
use address::{Address, Scheme};
pub use sigv4::Credentials;

mod address;
mod sigv4;
#[cfg(test)]
mod tests;

/// Where S3 is, and with which key it is asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct S3Settings {
    /// The region of the buckets; `None`: `us-east-1`.
    pub region: Option<String>,
    /// What speaks like S3 in its place, such as `http://minio:9000`.
    pub endpoint: Option<String>,
    /// The key; `None`: only what everybody may read is found.
    pub credentials: Option<Credentials>,
}

impl S3Settings {
    /// What the environment says: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; `AWS_REGION` or `AWS_DEFAULT_REGION`;
    /// `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`.
    ///
    /// # Errors
    /// If it has one half of a key.
    pub fn from_env() -> Result<Self, ImageStoreError> {
        Self::from_variables(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ImageStoreError> {
        let credentials = match (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
            (None, None) => None,
            (Some(access_key_id), Some(secret_access_key)) => {
                Some(Credentials { access_key_id, secret_access_key, session_token: variable("AWS_SESSION_TOKEN") })
            }
            _ => return Err(ImageStoreError::HalfAKey),
        };
        Ok(S3Settings {
            region: variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")),
            endpoint: variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL")),
            credentials,
        })
    }
}

/// Why a store cannot be enabled.
#[derive(Debug, thiserror::Error)]
pub enum ImageStoreError {
    /// It is not clear where it is.
    #[error("store of pictures {url:?} {reason}; one is like https://images.example/pictures/ or s3://bucket/pictures/")]
    Address {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// What is to be asked in place of S3 cannot be.
    #[error("AWS_ENDPOINT_URL {url:?} {reason}; one is like http://minio:9000")]
    Endpoint {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The region would become part of a host's name.
    #[error("AWS_REGION {0:?} is not like us-east-1")]
    Region(String),
    /// A key has two parts.
    #[error("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set together or not at all")]
    HalfAKey,
}

/// Why there is no picture.
#[derive(Debug, PartialEq)]
pub enum Unfetched {
    /// It will not be there next time either.
    Refused(String),
    /// The store may answer another time.
    Failed(String),
}

/// Stores that prompts may name pictures in; none unless there are some. Clones share them, and their connections.
#[derive(Clone, Debug, Default)]
pub struct ImageStores {
    shared: Option<Arc<Shared>>,
}

#[derive(Debug)]
struct Shared {
    stores: Vec<ImageStore>,
    agent: ureq::Agent,
}

#[derive(Debug)]
struct ImageStore {
    /// What its locations begin with: scheme, authority, and a path that ends in `/`.
    scheme: Scheme,
    authority: String,
    prefix: String,
    /// What comes before the path when it is fetched: scheme and host, and a bucket that is not part of the host.
    origin: String,
    signer: Option<Signer>,
}

#[derive(Debug)]
struct Signer {
    credentials: Credentials,
    region: String,
    host: String,
    /// The bucket that is not part of the host, after a `/`; or nothing.
    bucket_path: String,
}

impl ImageStores {
    /// Enables what is below `urls`. Nothing is connected to yet.
    ///
    /// # Errors
    /// If it is not clear where one is.
    pub fn open(urls: &[String], s3: &S3Settings) -> Result<Self, ImageStoreError> {
        if urls.is_empty() {
            return Ok(ImageStores::default());
        }
        let stores = urls.iter().map(|url| ImageStore::new(url, s3)).collect::<Result<_, _>>()?;
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding(AutoHeaderValue::None)
            .timeout_connect(Some(limits::ASSET_CONNECT_TIME_MAX))
            .build();
        Ok(ImageStores { shared: Some(Arc::new(Shared { stores, agent: ureq::Agent::new_with_config(config) })) })
    }

    /// Whether a location is for a store to find, rather than a directory.
    pub fn has(&self, location: &str) -> bool {
        self.shared.is_some() && !location.starts_with("file:") && location.contains("://")
    }

    /// Fetches the picture at `location`, counted before it is.
    ///
    /// # Errors
    /// If it is below no store, the store has none there or too large a one or does not answer before `deadline`, or it goes beyond the budget.
    pub fn read(&self, location: &str, deadline: Instant, budget: &Budget) -> Result<Arc<[u8]>, Unfetched> {
        let quoted = || shown(location.split_once('?').map_or(location, |(path, _)| path)).into_owned();
        let refused = |reason: &str| Unfetched::Refused(format!("location {:?} {reason}", quoted()));
        let failed = |reason: &str| Unfetched::Failed(format!("location {:?} cannot be fetched: {reason}", quoted()));
        let address = Address::parse(location).map_err(|reason| refused(&reason))?;
        let nowhere = || refused("is in no store that this server was given with --image-store");
        let shared = self.shared.as_ref().ok_or_else(nowhere)?;
        let store = shared.stores.iter().find(|store| store.has(&address)).ok_or_else(nowhere)?;
        if address.path.ends_with('/') {
            return Err(refused("names no object: it ends in a /"));
        }
        let ended = |error: ureq::Error| match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                let seconds = limits::ASSET_CONNECT_TIME_MAX.as_secs();
                failed(&format!("its store could not be connected to within {seconds} s; send the request again later"))
            }
            ureq::Error::Timeout(_) => failed(&too_slow()),
            ureq::Error::Http(_) | ureq::Error::BadUri(_) => refused(&format!("cannot be fetched: {error}")),
            _ => failed(&format!("{error}; send the request again later")),
        };

        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(failed(&too_slow()));
        }
        let request = store.request(&shared.agent, &address, OffsetDateTime::now_utc());
        let response = request.config().timeout_global(Some(left)).build().call().map_err(ended)?;
        let status = response.status();
        match status.as_u16() {
            200 => {}
            300..=399 => {
                let region = response.headers().get("x-amz-bucket-region").and_then(|region| region.to_str().ok());
                let hint = region.map(|region| format!("; the bucket is in the region {:?}", shown(region)));
                let hint = hint.unwrap_or_default();
                return Err(refused(&format!(
                    "cannot be fetched: its store answers {status}, and no redirect is followed{hint}"
                )));
            }
            408 | 429 | 500..=599 => return Err(failed(&format!("its store answers {status}; send the request again later"))),
            _ => return Err(refused(&format!("cannot be fetched: its store answers {status}"))),
        }
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let is_plain = header(CONTENT_ENCODING).is_none_or(|encoding| encoding == "identity");
        // An object of no bytes has no body, and so none of a length.
        let is_empty = header(CONTENT_LENGTH) == Some("0");
        let len = if is_empty { Some(0) } else { response.body().content_length() };
        let len = len.filter(|_| is_plain).ok_or_else(|| {
            refused(
                "cannot be fetched: its store does not say how many bytes it has, as Content-Length does without an encoding",
            )
        })?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        picture::check_len(len).map_err(|reason| refused(&format!("cannot be fetched: {reason}")))?;
        budget.take(picture::held_bytes(len)).map_err(Unfetched::Refused)?;
        let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, len).collect();
        response.into_body().into_reader().read_exact(Arc::make_mut(&mut bytes)).map_err(|error| ended(error.into()))?;
        Ok(bytes)
    }
}

fn too_slow() -> String {
    let seconds = limits::ASSET_FETCH_TIME_MAX.as_secs();
    format!("the pictures of one request may take {seconds} s; send the request again later")
}

impl ImageStore {
    fn new(url: &str, s3: &S3Settings) -> Result<Self, ImageStoreError> {
        let wrong = |reason: &str| ImageStoreError::Address { url: url.into(), reason: reason.into() };
        // A prefix is a whole number of segments, with or without a slash at its end: pictures-private is not below pictures.
        let has_query = url.contains(['?', '#']);
        let whole = if has_query || url.ends_with('/') { url.to_owned() } else { format!("{url}/") };
        let Address { scheme, authority, path, query } = Address::parse(&whole).map_err(|reason| wrong(&reason))?;
        if query.is_some() {
            return Err(wrong("has a query"));
        }
        let (origin, signer) = match scheme {
            Scheme::Http | Scheme::Https => (format!("{}://{authority}", scheme.name()), None),
            Scheme::Gs => (format!("https://storage.googleapis.com/{authority}"), None),
            Scheme::S3 => {
                let (protocol, host, bucket_path) = s3_place(&authority, s3)?;
                let region = s3.region.clone().unwrap_or_else(|| DEFAULT_REGION.into());
                let origin = format!("{protocol}://{host}{bucket_path}");
                let signer = s3.credentials.clone().map(|credentials| Signer { credentials, region, host, bucket_path });
                (origin, signer)
            }
        };
        Ok(ImageStore { scheme, authority, prefix: path, origin, signer })
    }

    fn has(&self, address: &Address<'_>) -> bool {
        self.scheme == address.scheme && self.authority == address.authority && address.path.starts_with(&self.prefix)
    }

    fn request(
        &self,
        agent: &ureq::Agent,
        address: &Address<'_>,
        now: OffsetDateTime,
    ) -> ureq::RequestBuilder<ureq::typestate::WithoutBody> {
        let query = address.query.map(|query| format!("?{query}")).unwrap_or_default();
        let request = agent.get(format!("{}{}{query}", self.origin, address.path));
        let Some(Signer { credentials, region, host, bucket_path }) = &self.signer else { return request };
        let date = sigv4::timestamp(now);
        let mut headers =
            vec![("host", host.as_str()), ("x-amz-content-sha256", sigv4::EMPTY_SHA256), ("x-amz-date", date.as_str())];
        headers.extend(credentials.session_token.as_deref().map(|token| ("x-amz-security-token", token)));
        let scope = sigv4::Scope { region, service: "s3" };
        let path = format!("{bucket_path}{}", address.path);
        let authorization = sigv4::authorization(credentials, scope, &path, &headers, &date);
        // The host is the address's, and sent with it.
        let request = headers.into_iter().skip(1).fold(request, |request, (name, value)| request.header(name, value));
        request.header(AUTHORIZATION, authorization)
    }
}

const DEFAULT_REGION: &str = "us-east-1";

/// Where a bucket is: protocol and host, and the path of the bucket there, if it is no part of the host.
fn s3_place(bucket: &str, s3: &S3Settings) -> Result<(&'static str, String, String), ImageStoreError> {
    if let Some(endpoint) = &s3.endpoint {
        let wrong = |reason: &str| ImageStoreError::Endpoint { url: endpoint.clone(), reason: reason.into() };
        let whole = format!("{}/", endpoint.trim_end_matches('/'));
        let Address { scheme, authority, path, query } = Address::parse(&whole).map_err(|reason| wrong(&reason))?;
        return match scheme {
            Scheme::Http | Scheme::Https if path == "/" && query.is_none() => {
                Ok((scheme.name(), authority, format!("/{bucket}")))
            }
            _ => Err(wrong("is more than http:// or https:// and a host")),
        };
    }
    let region = s3.region.as_deref().unwrap_or(DEFAULT_REGION);
    if region.is_empty() || !region.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-') {
        return Err(ImageStoreError::Region(region.into()));
    }
    // Certificates of S3 are for one label before its own name.
    let is_label = !bucket.contains(['.', '_']) && bucket.len() <= 63;
    let suffix = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    Ok(match is_label {
        true => ("https", format!("{bucket}.s3.{region}.{suffix}"), String::new()),
        false => ("https", format!("s3.{region}.{suffix}"), format!("/{bucket}")),
    })
}
