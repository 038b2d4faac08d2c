//! Request bodies: read, inflated and decoded within the transit budget, off the async threads where they are large.

use std::io::{self, Read, Write};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::HeaderName;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use crate::app::App;
use crate::auth;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::routes::take_place;
use crate::transit::Charge;
use crate::wire::budget::Budget;
use crate::wire::json::OpHead;
use crate::wire::{guard, head};

/// Bytes that are inflated at a time.
const INFLATED_CHUNK_BYTES: usize = 64 << 10;

/// A request body as it arrived, charged to the transit budget.
pub struct Payload {
    /// The bytes, compressed or not.
    bytes: Bytes,
    /// Whether they are protobuf.
    pub is_protobuf: bool,
    is_zstd: bool,
    charge: Charge,
    owner: Arc<str>,
    app: Arc<App>,
}

/// An operation of a model: its head, without which it cannot be accepted, and the rest, which may be wrong.
pub struct Operation<T> {
    /// Its model and its place.
    pub head: OpHead,
    /// What it asks for, or why it is refused.
    pub asked: Result<T, String>,
}

impl FromRequest<Arc<App>> for Payload {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> ApiResult<Self> {
        let is_protobuf = header(&request, &CONTENT_TYPE).to_ascii_lowercase().starts_with("application/x-protobuf");
        let owner = auth::owner(request.headers());
        let encoding = header(&request, &CONTENT_ENCODING).to_ascii_lowercase();
        let bytes_max = app.config.body_bytes_max();
        if announced_bytes(&request).is_some_and(|bytes| bytes > bytes_max as u64) {
            let (start, _held) = start_of(app, request).await?;
            return Err(refuse_in_place(app, &start, encoding == "zstd", too_large(bytes_max)));
        }
        let (mut charge, mut bytes) = (app.transit.charge(), Vec::new());
        let arriving = read(request.into_body(), bytes_max, &mut bytes, &mut charge);
        // Read before anything is refused: see `refuse`.
        match tokio::time::timeout(app.config.body_timeout, arriving).await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => return Err(refuse_in_place(app, &bytes, encoding == "zstd", refusal)),
            Err(_) => {
                let seconds = app.config.body_timeout.as_secs_f64();
                return Err(ApiError::Timeout(format!("the request body did not arrive within {seconds} s")));
            }
        };
        let is_zstd = match encoding.as_str() {
            "" | "identity" => false,
            "zstd" => true,
            other => {
                let other = crate::names::shown(other);
                return Err(ApiError::bad(format!("content-encoding {other:?} is not supported; send zstd or none")));
            }
        };
        Ok(Payload { bytes: bytes.into(), is_protobuf, is_zstd, charge, owner, app: app.clone() })
    }
}

impl Payload {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Decodes a JSON body. What is returned with it is the memory it is charged for, to be kept until the request is handed on.
    ///
    /// # Errors
    /// If it is not what is asked for, or there is no room for it.
    pub async fn json<T: DeserializeOwned + Send + 'static>(self) -> ApiResult<(T, Charge)> {
        self.decode(|bytes, budget| guard::parse(&bytes, budget).map_err(ApiError::BadRequest)).await
    }

    /// Decodes the JSON body of an operation.
    ///
    /// # Errors
    /// If the body names no model or place, as far as it is JSON, or there is no room for it at the moment.
    pub async fn operation<T: DeserializeOwned + Send + 'static>(self) -> ApiResult<(Operation<T>, Charge)> {
        self.decode(|bytes, budget| Ok(Operation { head: op_head(&bytes, budget)?, asked: guard::parse(&bytes, budget) })).await
    }

    /// Inflates and decodes: in place if the body is small, on one of a few blocking threads otherwise.
    ///
    /// # Errors
    /// Those of `work`; or that there is no room for what the body becomes, whatever `work` made of that. An operation that is too large for
    /// any time is left to `work`, which has it take its place.
    pub async fn decode<T: Send + 'static>(
        self,
        work: impl FnOnce(Bytes, &Budget) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<(T, Charge)> {
        let Payload { bytes, is_zstd, mut charge, owner, app, .. } = self;
        let decodes = app.decodes.clone();
        let is_small = !is_zstd && bytes.len() <= limits::BODY_INLINE_BYTES_MAX;
        let (body_bytes_max, request_bytes_max) = (app.config.body_bytes_max(), app.config.request_bytes_max());
        let decode = move || {
            let bytes = if is_zstd {
                let mut inflated = Vec::new();
                match inflate(&bytes, body_bytes_max, &mut inflated, &mut charge) {
                    Ok(()) => inflated.into(),
                    // Of a frame whose window is too large nothing is inflated, and its start may be.
                    Err(refusal) if inflated.is_empty() => return Err(refuse_in_place(&app, &bytes, true, refusal)),
                    Err(refusal) => return Err(refuse_in_place(&app, &inflated, false, refusal)),
                }
            } else {
                bytes
            };
            let body_bytes = charge.bytes();
            let budget = Budget::new(request_bytes_max, charge);
            let decoded = work(bytes, &budget);
            match (decoded, budget.refusal()) {
                (_, Some(busy @ ApiError::Busy(_))) => Err(busy),
                (Err(_), Some(refusal)) => Err(refusal),
                (decoded, _) => {
                    let mut charge = budget.into_charge();
                    charge.shrink(body_bytes);
                    decoded.map(|decoded| (decoded, charge))
                }
            }
        };
        if is_small { decode() } else { in_turn((&decodes, &owner), decode).await }
    }
}

/// The head of the JSON body of an operation. Where the body is malformed, it is what can be read of it.
///
/// # Errors
/// If there is none; the text says what is wrong with the body.
pub fn op_head(body: &[u8], budget: &Budget) -> ApiResult<OpHead> {
    guard::parse(body, budget).or_else(|reason| head::of_json(body).ok_or(ApiError::BadRequest(reason)))
}

/// Has the operation whose body begins with `start` take its place, and fail there, if it is refused for good: those behind it would wait for
/// it for ever. Answers the refusal. What a client sends again by itself takes its place then.
fn refuse_in_place(app: &Arc<App>, start: &[u8], is_zstd: bool, refusal: ApiError) -> ApiError {
    if matches!(refusal, ApiError::Busy(_) | ApiError::Timeout(_) | ApiError::Internal(_)) {
        return refusal;
    }
    let found = if is_zstd {
        let mut charge = app.transit.charge();
        if let Err(busy) = charge.try_grow(limits::HEAD_BYTES_MAX + (1 << limits::ZSTD_START_WINDOW_LOG_MAX)) {
            return busy;
        }
        head::glimpse(&inflated_start(start))
    } else {
        head::glimpse(&start[..start.len().min(limits::HEAD_BYTES_MAX)])
    };
    if let Some(head) = found {
        take_place(app, head, &refusal);
    }
    refusal
}

/// Reads a body, charged as it arrives. The buffer grows by doubling up to what is announced: an announcement alone takes nothing.
async fn read(body: Body, bytes_max: usize, bytes: &mut Vec<u8>, charge: &mut Charge) -> ApiResult<()> {
    let announced = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    let mut body = pin!(body);
    loop {
        let Ok(arrived) = tokio::time::timeout(limits::BODY_STALL_MAX, body.frame()).await else {
            let seconds = limits::BODY_STALL_MAX.as_secs();
            return Err(ApiError::Timeout(format!("nothing of the request body arrived for {seconds} s")));
        };
        let Some(frame) = arrived else { return Ok(()) };
        // Its client sends it again, whole.
        let frame = frame.map_err(|error| ApiError::Timeout(format!("the request body did not arrive whole: {error}")))?;
        let Some(arrived) = frame.data_ref() else { continue };
        if bytes.len() + arrived.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        let grows_by = growth(bytes, arrived.len(), announced.unwrap_or(bytes_max));
        charge.grow(grows_by).await?;
        bytes.reserve_exact(grows_by + bytes.capacity() - bytes.len());
        bytes.extend_from_slice(arrived);
    }
}

/// By how much the capacity of a vector grows to take `more` bytes: to double, but not beyond `bytes_max` unless it has to.
fn growth(bytes: &Vec<u8>, more: usize, bytes_max: usize) -> usize {
    let needed = bytes.len() + more;
    if needed <= bytes.capacity() {
        return 0;
    }
    needed.max((bytes.capacity() * 2).min(bytes_max)) - bytes.capacity()
}

/// Text that is charged as it is written, and for as long as it is there.
pub struct ChargedText {
    bytes: Vec<u8>,
    /// Why no more could be written, if that happened.
    pub refusal: Option<ApiError>,
    charge: Charge,
}

impl ChargedText {
    /// No text yet.
    pub fn new(charge: Charge) -> Self {
        ChargedText { bytes: Vec::new(), refusal: None, charge }
    }

    /// The longest that there can be.
    pub fn bytes_max(&self) -> usize {
        self.charge.transit().request_bytes_max()
    }
}

impl AsRef<[u8]> for ChargedText {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Write for ChargedText {
    fn write(&mut self, written: &[u8]) -> std::io::Result<usize> {
        let grows_by = growth(&self.bytes, written.len(), usize::MAX);
        if let Err(refusal) = self.charge.try_grow(grows_by) {
            let error = std::io::Error::other(refusal.to_string());
            self.refusal = Some(refusal);
            return Err(error);
        }
        self.bytes.reserve_exact(grows_by + self.bytes.capacity() - self.bytes.len());
        self.bytes.extend_from_slice(written);
        Ok(written.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Refuses a request whose body has not been read. A connection that is answered before its request has arrived is closed, and a client that
/// sends its next request over it sees an error in place of an answer; so what is left of a small body is read and dropped first.
pub async fn refuse(request: Request, refusal: ApiError) -> Response {
    let is_large = is_large(&request);
    if !is_large {
        drain_body(request.into_body(), limits::DRAINED_BYTES_MAX, limits::DRAIN_TIME_MAX, |_| {}).await;
    }
    answer_unread(is_large, refusal)
}

/// As [`refuse`], of a request that may be an operation of a model: it takes its place, if it says which.
pub async fn refuse_operation(app: &Arc<App>, request: Request, refusal: ApiError) -> Response {
    let (is_large, is_zstd) = (is_large(&request), header(&request, &CONTENT_ENCODING).eq_ignore_ascii_case("zstd"));
    match start_of(app, request).await {
        Ok((start, _held)) => answer_unread(is_large, refuse_in_place(app, &start, is_zstd, refusal)),
        Err(busy) => answer_unread(is_large, busy),
    }
}

fn is_large(request: &Request) -> bool {
    announced_bytes(request).is_some_and(|bytes| bytes > limits::DRAINED_BYTES_MAX as u64)
}

fn answer_unread(is_large: bool, refusal: ApiError) -> Response {
    if is_large {
        return ([(axum::http::header::CONNECTION, "close")], refusal).into_response();
    }
    refusal.into_response()
}

/// The first bytes of a body that is to be refused; of a small one, the rest is read and dropped.
///
/// # Errors
/// If there is no room for them at the moment.
async fn start_of(app: &App, request: Request) -> ApiResult<(Vec<u8>, Charge)> {
    let mut charge = app.transit.charge();
    charge.grow(limits::HEAD_BYTES_MAX).await?;
    let (read_max, time_max) = match is_large(&request) {
        // Its connection is closed, and its client may be waiting for that.
        true => (limits::HEAD_BYTES_MAX, limits::HEAD_TIME_MAX),
        false => (limits::DRAINED_BYTES_MAX, limits::DRAIN_TIME_MAX),
    };
    let mut start = Vec::new();
    drain_body(request.into_body(), read_max, time_max, |arrived| {
        let kept = arrived.len().min(limits::HEAD_BYTES_MAX - start.len());
        start.extend_from_slice(&arrived[..kept]);
    })
    .await;
    Ok((start, charge))
}

/// Reads a body up to `read_max` and for `time_max`, and shows `see` what arrives.
pub async fn drain_body(body: Body, read_max: usize, time_max: Duration, mut see: impl FnMut(&[u8])) {
    let drained = async {
        let (mut body, mut left) = (pin!(body), read_max);
        while let Some(Ok(frame)) = body.frame().await {
            let Some(arrived) = frame.data_ref() else { continue };
            see(arrived);
            let Some(rest) = left.checked_sub(arrived.len()) else { return };
            left = rest;
        }
    };
    // Whatever comes of it, the answer is the same.
    let _ = tokio::time::timeout(time_max, drained).await;
}

/// Bytes that the body of a request is said to have, if it is said.
pub fn announced_bytes(request: &Request) -> Option<u64> {
    // The header counts where there is one: a number that is too large for hyper is no exact size.
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    announced.or_else(|| request.body().size_hint().exact())
}

fn header<'a>(request: &'a Request, name: &HeaderName) -> &'a str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("").trim()
}

fn too_large(bytes_max: usize) -> ApiError {
    ApiError::TooLarge(format!("request body is above the limit of {}", limits::shown_bytes(bytes_max)))
}

/// Inflates a body into `inflated`, each part charged before it is there, and lets go of what is charged for what it was compressed to.
fn inflate(compressed: &[u8], bytes_max: usize, inflated: &mut Vec<u8>, charge: &mut Charge) -> ApiResult<()> {
    let compressed_bytes = charge.bytes();
    // A frame may ask for its window before its first byte is out.
    let window_log = (charge.transit().bytes_max() / 16).max(1 << 10).ilog2().min(limits::ZSTD_WINDOW_LOG_MAX);
    let window_bytes = 1 << window_log;
    charge.try_grow(window_bytes)?;
    let malformed = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ApiError::bad("request body ends before its zstd does"),
        // The library is built without sentences of its own.
        _ => {
            let window = limits::shown_bytes(window_bytes);
            ApiError::bad(format!("request body is not zstd with a window of up to {window}"))
        }
    };
    let mut decoder = zstd::stream::read::Decoder::with_buffer(compressed).map_err(malformed)?;
    decoder.window_log_max(window_log).map_err(malformed)?;
    let mut chunk = vec![0; INFLATED_CHUNK_BYTES];
    loop {
        let count = decoder.read(&mut chunk).map_err(malformed)?;
        if count == 0 {
            break;
        }
        if inflated.len() + count > bytes_max {
            return Err(too_large(bytes_max));
        }
        let grows_by = growth(inflated, count, bytes_max);
        charge.try_grow(grows_by)?;
        inflated.reserve_exact(grows_by + inflated.capacity() - inflated.len());
        inflated.extend_from_slice(&chunk[..count]);
    }
    charge.shrink(compressed_bytes + window_bytes);
    Ok(())
}

/// How a body starts of whose compressed form only the start is there.
fn inflated_start(compressed: &[u8]) -> Vec<u8> {
    let mut start = Vec::new();
    if let Ok(mut decoder) = zstd::stream::read::Decoder::with_buffer(compressed)
        && decoder.window_log_max(limits::ZSTD_START_WINDOW_LOG_MAX).is_ok()
    {
        let mut chunk = [0; 4096];
        while start.len() < limits::HEAD_BYTES_MAX
            && let Ok(count @ 1..) = decoder.read(&mut chunk)
        {
            start.extend_from_slice(&chunk[..count]);
        }
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transit::Transit;

    fn inflated(frame: &[u8], bytes_max: usize, transit: &Transit) -> ApiResult<Bytes> {
        let mut charge = transit.charge();
        charge.try_grow(frame.len()).unwrap();
        let mut inflated = Vec::new();
        inflate(frame, bytes_max, &mut inflated, &mut charge)?;
        assert!((inflated.len()..=2 * inflated.len() + 100).contains(&charge.bytes()), "what is held is what is charged");
        Ok(inflated.into())
    }

    #[test]
    fn a_frame_that_inflates_beyond_the_limit_is_refused() {
        let transit = Transit::new(64 << 20);
        let bomb = zstd::encode_all(&vec![0u8; 1 << 20][..], 3).unwrap();
        assert!(bomb.len() < 1000);
        assert!(matches!(inflated(&bomb, 1000, &transit), Err(ApiError::TooLarge(_))));
        assert_eq!(inflated(&bomb, 1 << 20, &transit).unwrap().len(), 1 << 20);
        let said = |compressed: &[u8]| match inflated(compressed, 1000, &transit) {
            Err(ApiError::BadRequest(why)) => why,
            other => panic!("{:?}", other.map(|_| ())),
        };
        assert!(said(b"not zstd").contains("is not zstd with a window of up to"));
        let cut = zstd::encode_all(&[7u8; 500][..], 3).unwrap();
        assert_eq!(said(&cut[..cut.len() - 2]), "request body ends before its zstd does");
        assert!(matches!(inflated(&bomb[..bomb.len() - 3], 1 << 20, &transit), Err(ApiError::BadRequest(_))));
    }

    #[test]
    fn a_frame_never_takes_more_than_there_is_room_for() {
        let bomb = zstd::encode_all(&vec![0u8; 64 << 20][..], 3).unwrap();
        assert!(bomb.len() < 6 << 10);
        let transit = Transit::new(48 << 20);
        let mut others = transit.charge();
        others.try_grow(32 << 20).unwrap();
        let (refused, peak) = crate::tests::peak_bytes(|| inflated(&bomb, usize::MAX, &transit));
        assert!(matches!(refused, Err(ApiError::Busy(_))));
        assert!(peak < 32 << 20, "{peak}");
    }

    #[test]
    fn a_window_that_is_large_for_the_budget_is_refused() {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(24).unwrap();
        std::io::Write::write_all(&mut encoder, &vec![7u8; 20 << 20]).unwrap();
        let frame = encoder.finish().unwrap();
        assert!(matches!(inflated(&frame, usize::MAX, &Transit::new(1 << 30)), Err(ApiError::BadRequest(_))));
    }
}
