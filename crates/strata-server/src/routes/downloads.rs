//! Files of checkpoints for whoever holds their address.
//!
//! Clients fetch such files with whatever they have, and without the key. So an address says itself who may fetch: it names one file of one save,
//! and the time until which it holds, and is signed with a secret that lives as long as this server. Anything that is changed in it, or another
//! save under the name, makes it void.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Json;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Path, Query, State};
use axum::http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, EXPIRES, HOST, IF_RANGE, LOCATION, RANGE,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hmac::{Hmac, Mac};
use hyper::body::Frame;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::Sha256;
use strata_engine::adapters::Form;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::{AsyncRead, ReadBuf};

use crate::app::App;
use crate::auth;
use crate::blocking::{in_turn, off_thread};
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, shown};
use crate::routes::adapters;
use crate::store::CheckpointRecord;
use crate::transit::Charge;

/// The name under which the files of a checkpoint are one.
const ARCHIVE: &str = "archive.tar";
/// The same in a form that is asked for.
const ARCHIVES: [(&str, Form); 2] = [("archive.peft.tar", Form::Peft), ("archive.tinker.tar", Form::Tinker)];
/// What older tools look for in an archive to know that it is whole.
const ARCHIVE_COMPLETE: &str = "checkpoint_complete";
const TAR_BLOCK_BYTES: usize = 512;

/// What an archive is to have.
#[derive(Debug, Deserialize)]
pub struct Wanted {
    /// `peft` or `tinker`; without one, the files as they are.
    format: Option<String>,
}

/// The part of an address that makes it hold.
#[derive(Debug, Deserialize)]
pub struct Signed {
    /// Until when, in seconds since 1970.
    expires: i64,
    /// In hex.
    signature: String,
}

/// `GET .../checkpoints/external_weights/{name}/external_weights_urls`: an address for each file.
pub async fn urls(
    State(app): State<Arc<App>>,
    Path((run, kind, name)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> ApiResult<Json<Value>> {
    let id = CheckpointId::new(&run, &kind, &name)?;
    if id.kind != CheckpointKind::ExternalWeights {
        return Err(ApiError::bad(format!(
            "{} holds {} weights; only what save_weights_external saved is downloaded file by file",
            id.tinker_path(),
            id.kind.checkpoint_type()
        )));
    }
    let base = base_url(&app, &headers)?;
    let (asked, looked) = (id.clone(), app.clone());
    let (record, files) = off_thread(move || looked.store.files(&asked)).await?;
    let expires = OffsetDateTime::now_utc() + limits::DOWNLOAD_URL_LIFE;
    let url = |file: &String| (file.clone(), json!(address(&app, &base, &record, file, expires)));
    let urls: serde_json::Map<String, Value> = files.iter().map(url).collect();
    Ok(Json(json!({ "urls": urls, "expires": expires.format(&Rfc3339).unwrap_or_default() })))
}

/// `GET .../checkpoints/{kind}/{name}/archive`, as older clients download: where the adapter's files are in one.
pub async fn archive(
    State(app): State<Arc<App>>,
    Path((run, kind, name)): Path<(String, String, String)>,
    Query(wanted): Query<Wanted>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let id = CheckpointId::new(&run, &kind, &name)?;
    let form = adapters::form(wanted.format.as_deref())?;
    let base = base_url(&app, &headers)?;
    let (asked, looked) = (id, app.clone());
    let (record, _) = off_thread(move || looked.store.files(&asked)).await?;
    let record = match form {
        None => record,
        Some(form) => {
            let checking = app.clone();
            in_turn((&app.conversions, &auth::owner(&headers)), move || {
                adapters::check(&checking, &record, form).map(|()| record)
            })
            .await?
        }
    };
    let expires = OffsetDateTime::now_utc() + limits::DOWNLOAD_URL_LIFE;
    let location = address(&app, &base, &record, archive_name(form), expires);
    let until = http_date(expires);
    Ok((StatusCode::FOUND, [(LOCATION, location.clone()), (EXPIRES, until)], Json(json!({ "url": location }))).into_response())
}

/// `GET downloads/{run}/{kind}/{name}/{file}`: a file, or the part of it that is asked for.
pub async fn file(
    State(app): State<Arc<App>>,
    Path((run, kind, name, file)): Path<(String, String, String, String)>,
    signed: Query<Signed>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let id = CheckpointId::new(&run, &kind, &name)?;
    let looked = app.clone();
    let record = off_thread(move || looked.store.get(&id)).await?;
    check_signature(&app, &record, &file, &signed)?;
    let mut charge = app.transit.charge();
    charge.try_grow(2 * limits::DOWNLOAD_CHUNK_BYTES)?;
    let etag = format!("\"{}\"", record.save_id);
    let is_converted = form_of(&file).is_some();
    let range = range(&headers, &etag);
    let opening = app.clone();
    let work = move || {
        let parts = open(&opening, &record, &file)?;
        let len = parts.iter().map(|part| part.len).sum::<u64>();
        Ok((parts, len))
    };
    let (parts, whole) =
        if is_converted { in_turn((&app.conversions, &auth::owner(&headers)), work).await? } else { off_thread(work).await? };
    let part = match range {
        None => 0..whole,
        Some(range) => match range.within(whole) {
            Some(part) => part,
            None => {
                let refusal = format!("the file has {whole} bytes, and what is asked for is beyond them");
                let headers = [(CONTENT_RANGE, format!("bytes */{whole}"))];
                return Ok((StatusCode::RANGE_NOT_SATISFIABLE, headers, Json(json!({ "detail": refusal }))).into_response());
            }
        },
    };
    let is_partial = range.is_some();
    let len = part.end - part.start;
    let body = FileBody { parts: off_thread(move || cut(parts, part.start, len)).await?, buffer: Vec::new(), _charge: charge };
    let mut response = Response::new(Body::new(body));
    let mut put = |name, value: String| {
        // Numbers, and an identity that is a UUID.
        response.headers_mut().insert(name, HeaderValue::from_str(&value).unwrap_or(HeaderValue::from_static("")));
    };
    put(CONTENT_TYPE, "application/octet-stream".into());
    put(ACCEPT_RANGES, "bytes".into());
    put(CONTENT_LENGTH, len.to_string());
    put(ETAG, etag);
    if is_partial {
        put(CONTENT_RANGE, format!("bytes {}-{}/{whole}", part.start, part.end.saturating_sub(1)));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

/// What clients reach this server by: what its settings say, or the name that this client has reached it by. A client that makes a name up gets
/// it back, and nobody else does.
fn base_url(app: &App, headers: &HeaderMap) -> ApiResult<String> {
    if let Some(url) = &app.config.public_url {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    let first = |name: &str| {
        let value = headers.get(name)?.to_str().ok()?;
        value.split(',').next().map(str::trim).filter(|value| !value.is_empty())
    };
    let host = first("x-forwarded-host").or_else(|| first(HOST.as_str())).unwrap_or("");
    if host.parse::<Authority>().is_err() || host.contains('@') {
        return Err(ApiError::bad(format!("the host {:?} of this request is no name to put into an address", shown(host))));
    }
    let scheme = first("x-forwarded-proto").filter(|scheme| ["http", "https"].contains(scheme)).unwrap_or("http");
    Ok(format!("{scheme}://{host}"))
}

fn address(app: &App, base: &str, record: &CheckpointRecord, file: &str, expires: OffsetDateTime) -> String {
    let expires = expires.unix_timestamp();
    let signature = signature(app, record, file, expires).finalize().into_bytes();
    let signature: String = signature.iter().map(|byte| format!("{byte:02x}")).collect();
    let (run, kind, name) = (&record.run, record.kind.segment(), &record.name);
    format!("{base}/api/v1/downloads/{run}/{kind}/{name}/{file}?expires={expires}&signature={signature}")
}

fn signature(app: &App, record: &CheckpointRecord, file: &str, expires: i64) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&app.signing_key).expect("keys of any length are taken");
    let save_id = if record.save_id.is_empty() { "none" } else { &record.save_id };
    // No part but the last can have a line break, so that no two sets of parts read the same.
    mac.update(
        format!("{expires}\n{}\n{}\n{}\n{file:?}\n{save_id}", record.run, record.kind.segment(), record.name).as_bytes(),
    );
    mac
}

fn check_signature(app: &App, record: &CheckpointRecord, file: &str, signed: &Signed) -> ApiResult<()> {
    let bytes: Option<Vec<u8>> = (signed.signature.len() == 64 && signed.signature.is_ascii())
        .then(|| (0..64).step_by(2).map(|at| u8::from_str_radix(&signed.signature[at..at + 2], 16).ok()).collect())
        .flatten();
    let is_ours = bytes.is_some_and(|bytes| signature(app, record, file, signed.expires).verify_slice(&bytes).is_ok());
    if !is_ours {
        return Err(ApiError::Forbidden(
            "this address was not signed by this server since it started, or its checkpoint was saved anew; ask for the URLs again".into(),
        ));
    }
    if OffsetDateTime::now_utc().unix_timestamp() >= signed.expires {
        return Err(ApiError::Forbidden("the time of this address is over; ask for the URLs again".into()));
    }
    Ok(())
}

/// A run of bytes that are sent.
struct Part {
    source: Source,
    len: u64,
}

enum Source {
    Bytes(Bytes),
    File(tokio::fs::File),
}

impl Part {
    fn of_bytes(bytes: Vec<u8>) -> Self {
        Part { len: bytes.len() as u64, source: Source::Bytes(bytes.into()) }
    }

    fn of_file(file: File, len: u64) -> Self {
        let mut file = tokio::fs::File::from_std(file);
        file.set_max_buf_size(limits::DOWNLOAD_CHUNK_BYTES);
        Part { source: Source::File(file), len }
    }
}

fn open(app: &App, record: &CheckpointRecord, file: &str) -> ApiResult<Vec<Part>> {
    if let Some(form) = form_of(file) {
        return open_converted(app, record, form);
    }
    if file != ARCHIVE {
        let (file, len) = app.store.open_file(record, file)?;
        return Ok(vec![Part::of_file(file, len)]);
    }
    let (_, files) = app.store.files(&record.id())?;
    let mut parts = Vec::new();
    for name in files.iter().filter(|name| name.starts_with("adapter_")) {
        put_file(&mut parts, name, app.store.open_file(record, name)?);
    }
    Ok(ended(parts))
}

/// An archive of the adapter in another form. Its files have no name any more when it is sent.
fn open_converted(app: &App, record: &CheckpointRecord, form: Form) -> ApiResult<Vec<Part>> {
    let written = adapters::converted(app, record, form)?;
    let unread = |error: std::io::Error| ApiError::Internal(format!("the adapter was written and cannot be read: {error}"));
    let mut parts = Vec::new();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let file = File::open(written.path().join(name)).map_err(unread)?;
        let len = file.metadata().map_err(unread)?.len();
        put_file(&mut parts, name, (file, len));
    }
    Ok(ended(parts))
}

fn archive_name(form: Option<Form>) -> &'static str {
    ARCHIVES.iter().find(|(_, of)| Some(*of) == form).map_or(ARCHIVE, |(name, _)| name)
}

fn form_of(file: &str) -> Option<Form> {
    ARCHIVES.iter().find(|(name, _)| *name == file).map(|(_, form)| *form)
}

/// Adds a file to an archive.
fn put_file(parts: &mut Vec<Part>, name: &str, (file, len): (File, u64)) {
    parts.push(Part::of_bytes(tar_header(name, len)));
    parts.push(Part::of_file(file, len));
    parts.push(Part::of_bytes(vec![0; (len.next_multiple_of(TAR_BLOCK_BYTES as u64) - len) as usize]));
}

/// An archive with its end.
fn ended(mut parts: Vec<Part>) -> Vec<Part> {
    parts.push(Part::of_bytes(tar_header(ARCHIVE_COMPLETE, 0)));
    parts.push(Part::of_bytes(vec![0; 2 * TAR_BLOCK_BYTES]));
    parts
}

/// The header of a file in a tar archive (`ustar`). Names here are short; a size beyond 8 GiB is written as GNU tar does.
pub fn tar_header(name: &str, len: u64) -> Vec<u8> {
    let mut block = [0; TAR_BLOCK_BYTES];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name.as_bytes()[..name.len().min(100)]);
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    if len < 1 << 33 {
        put(124, format!("{len:011o}\0").as_bytes());
    } else {
        put(124, &[0x80, 0, 0, 0]);
        put(128, &len.to_be_bytes());
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.to_vec()
}

/// The parts from `start` on, `len` bytes of them.
fn cut(parts: Vec<Part>, mut start: u64, mut len: u64) -> ApiResult<std::collections::VecDeque<Part>> {
    let mut wanted = std::collections::VecDeque::new();
    for part in parts {
        let skipped = start.min(part.len);
        start -= skipped;
        let taken = len.min(part.len - skipped);
        len -= taken;
        if taken == 0 {
            continue;
        }
        let source = match part.source {
            Source::Bytes(bytes) => Source::Bytes(bytes.slice(skipped as usize..(skipped + taken) as usize)),
            Source::File(file) => {
                let mut file = file.try_into_std().map_err(|_| ApiError::Internal("a file is being read already".into()))?;
                file.seek(SeekFrom::Start(skipped)).map_err(|error| ApiError::Internal(format!("reading a file: {error}")))?;
                Part::of_file(file, taken).source
            }
        };
        wanted.push_back(Part { source, len: taken });
    }
    Ok(wanted)
}

/// A body that is read as it is sent.
struct FileBody {
    parts: std::collections::VecDeque<Part>,
    buffer: Vec<u8>,
    _charge: Charge,
}

impl HttpBody for FileBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        let body = self.get_mut();
        let Some(part) = body.parts.front_mut() else { return Poll::Ready(None) };
        let read = match &mut part.source {
            Source::Bytes(bytes) => std::mem::take(bytes),
            Source::File(file) => {
                let wanted = usize::try_from(part.len).unwrap_or(usize::MAX).min(limits::DOWNLOAD_CHUNK_BYTES);
                body.buffer.resize(wanted, 0);
                let mut buffer = ReadBuf::new(&mut body.buffer);
                ready!(Pin::new(file).poll_read(context, &mut buffer))?;
                let read = Bytes::copy_from_slice(buffer.filled());
                if read.is_empty() {
                    let error =
                        std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "a file became shorter while it was sent");
                    return Poll::Ready(Some(Err(error)));
                }
                read
            }
        };
        part.len -= read.len() as u64;
        if part.len == 0 {
            body.parts.pop_front();
        }
        Poll::Ready(Some(Ok(Frame::data(read))))
    }
}

/// A part of a file, as `Range` has it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Range {
    /// From the first byte to the last, both included.
    Between(u64, Option<u64>),
    /// So many at the end.
    Last(u64),
}

impl Range {
    fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.trim().strip_prefix("bytes=")?.split_once('-')?;
        match (first.trim(), last.trim()) {
            ("", last) => last.parse().ok().map(Range::Last),
            (first, "") => first.parse().ok().map(|first| Range::Between(first, None)),
            (first, last) => {
                let (first, last) = (first.parse().ok()?, last.parse().ok()?);
                (first <= last).then_some(Range::Between(first, Some(last)))
            }
        }
    }

    /// Which bytes of `len` it is, if any.
    fn within(self, len: u64) -> Option<std::ops::Range<u64>> {
        let part = match self {
            Range::Between(first, last) => first..last.map_or(len, |last| last.saturating_add(1).min(len)),
            Range::Last(count) => len.saturating_sub(count)..len,
        };
        (part.start < part.end).then_some(part)
    }
}

/// The range that is asked for. Several at once, those of units that nobody knows, and those of a file as it was before are answered with all of it.
fn range(headers: &HeaderMap, etag: &str) -> Option<Range> {
    let is_same = headers.get(IF_RANGE).is_none_or(|given| given.as_bytes() == etag.as_bytes());
    headers.get(RANGE).filter(|_| is_same).and_then(|range| Range::parse(range.to_str().ok()?))
}

fn http_date(at: OffsetDateTime) -> String {
    // Of a name the first three letters, as RFC 9110 (section 5.6.7) wants them.
    let (weekday, month) = (at.weekday().to_string(), at.month().to_string());
    let (day, year, (hour, minute, second)) = (at.day(), at.year(), at.to_hms());
    format!("{weekday:.3}, {day:02} {month:.3} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranges_are_what_they_say_within_the_file() {
        let within = |text: &str| Range::parse(text).map(|range| range.within(10));
        assert_eq!(within("bytes=0-"), Some(Some(0..10)));
        assert_eq!(within("bytes=2-3"), Some(Some(2..4)));
        assert_eq!(within("bytes=2-99"), Some(Some(2..10)));
        assert_eq!(within("bytes=-3"), Some(Some(7..10)));
        assert_eq!(within("bytes=-30"), Some(Some(0..10)));
        assert_eq!(within(&format!("bytes=0-{}", u64::MAX)), Some(Some(0..10)));
        for beyond in ["bytes=10-", "bytes=99-100", "bytes=-0"] {
            assert_eq!(within(beyond), Some(None), "{beyond}");
        }
        for unread in ["bytes=3-2", "bytes=", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5", "bytes=-"] {
            assert_eq!(within(unread), None, "{unread}");
        }
    }

    #[test]
    fn a_date_is_one_of_http() {
        let date = |seconds| http_date(OffsetDateTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(86_400 * 3), "Sun, 04 Jan 1970 00:00:00 GMT");
        // The example of RFC 9110.
        assert_eq!(date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}
