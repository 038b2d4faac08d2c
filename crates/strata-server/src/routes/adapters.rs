//! Adapters that other tools have made, uploaded; and checkpoints in the form that other tools load.

use std::io::ErrorKind;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::header::{CONNECTION, CONTENT_ENCODING};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use strata_engine::adapters::{AdapterFiles, Adapters, Form};
use strata_engine::api::Failure;
use strata_model::Error;
use tokio::io::AsyncWriteExt;

use crate::app::App;
use crate::auth;
use crate::bases::BaseId;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult};
use crate::import::{self, ImportError};
use crate::limits;
use crate::names::{CheckpointId, check_name, shown};
use crate::payload::{announced_bytes, drain_body, refuse};
use crate::scratch::Scratch;
use crate::store::CheckpointRecord;
use crate::transit::Charge;
use crate::untar::{Found, Untar, Wanted};

const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// What PEFT writes beside an adapter, and this server's own archives have at their end.
const IGNORED: [&str; 2] = ["README.md", "checkpoint_complete"];

/// What an upload says of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// What the checkpoint is to be called.
    name: String,
    /// The base model that it adapts.
    base_model: String,
}

/// `POST weights/import?name=N&base_model=B`: a tar archive of an adapter becomes a training checkpoint.
pub async fn import(State(app): State<Arc<App>>, asked: Result<Query<Asked>, QueryRejection>, request: Request) -> Response {
    let bytes_max = app.transit.bytes_max() as u64;
    let checked = asked.map_err(|rejection| ApiError::bad(rejection.body_text())).and_then(|Query(asked)| {
        let base = app.bases.find(&asked.base_model).map_err(ApiError::BadRequest)?;
        check_name("checkpoint name", &asked.name)?;
        app.store.check_room().map_err(ApiError::BadRequest)?;
        if let Some(encoding) = request.headers().get(CONTENT_ENCODING) {
            let encoding = String::from_utf8_lossy(encoding.as_bytes());
            return Err(ApiError::bad(format!("content-encoding is {:?}; an archive is taken without one", shown(&encoding))));
        }
        match announced_bytes(&request) {
            Some(bytes) if bytes > bytes_max => Err(too_large(bytes_max)),
            bytes => Ok((base, asked.name, bytes.unwrap_or(bytes_max))),
        }
    });
    let (base, name, bytes) = match checked {
        Ok(checked) => checked,
        Err(refusal) => return refuse(request, refusal).await,
    };
    let owner = auth::owner(request.headers());
    let mut body = request.into_body();
    match upload(&app, &owner, (base, &name), &mut body, bytes, bytes_max).await {
        Ok(answer) => Json(answer).into_response(),
        Err(refusal) => {
            // A client that is still sending hears of it only when it has sent what is on its way.
            drain_body(body, limits::DRAINED_BYTES_MAX, limits::DRAIN_TIME_MAX, |_| {}).await;
            ([(CONNECTION, "close")], refusal).into_response()
        }
    }
}

fn too_large(bytes_max: u64) -> ApiError {
    let bytes_max = limits::shown_bytes(bytes_max as usize);
    ApiError::TooLarge(format!(
        "the archive is above the limit of {bytes_max} of this server; `strata import` takes larger adapters into its data directory"
    ))
}

async fn upload(
    app: &Arc<App>,
    owner: &str,
    (base, name): (BaseId, &str),
    body: &mut Body,
    bytes: u64,
    bytes_max: u64,
) -> ApiResult<Value> {
    let Some(turn) = app.uploads.try_take(owner) else {
        return Err(ApiError::Busy(format!(
            "{} adapters are being uploaded already, or {} of yours; send it again later",
            limits::UPLOADS_MAX,
            limits::UPLOADS_MAX / 2
        )));
    };
    let mut charge = app.transit.charge();
    charge.grow(limits::DOWNLOAD_CHUNK_BYTES).await?;
    let making = app.clone();
    let scratch = in_turn((&app.conversions, owner), move || making.store.scratch()).await?;
    let time_max = app.config.body_timeout + Duration::from_secs(bytes / limits::UPLOAD_BYTES_PER_SECOND_MIN);
    let Ok(received) = tokio::time::timeout(time_max, receive(body, scratch.path(), bytes_max)).await else {
        return Err(ApiError::Timeout(format!("the archive did not arrive within {} s", time_max.as_secs_f64())));
    };
    received?;
    drop(charge);
    let (making, name) = (app.clone(), name.to_owned());
    // What is on the disk keeps its turn until it is a checkpoint: those who wait for that do not pile up there.
    let _turn = turn;
    in_turn((&app.conversions, owner), move || publish(&making, base, &name, &scratch)).await
}

/// Writes the files of an archive into a directory.
async fn receive(body: &mut Body, dir: &Path, bytes_max: u64) -> ApiResult<()> {
    let wanted =
        [Wanted { name: CONFIG_FILE, bytes_max: limits::ADAPTER_CONFIG_BYTES_MAX }, Wanted { name: WEIGHTS_FILE, bytes_max }];
    let mut archive = Untar::new(&wanted, &IGNORED, bytes_max);
    let mut file: Option<tokio::fs::File> = None;
    let (mut body, mut received) = (pin!(body), 0u64);
    loop {
        let Ok(arrived) = tokio::time::timeout(limits::BODY_STALL_MAX, body.frame()).await else {
            let seconds = limits::BODY_STALL_MAX.as_secs();
            return Err(ApiError::Timeout(format!("nothing of the archive arrived for {seconds} s")));
        };
        let Some(frame) = arrived else { break };
        let frame = frame.map_err(|error| ApiError::bad(format!("request body: {error}")))?;
        let Some(data) = frame.data_ref() else { continue };
        received = received.saturating_add(data.len() as u64);
        if received > bytes_max {
            return Err(too_large(bytes_max));
        }
        let mut data = &data[..];
        while !data.is_empty() {
            match archive.take(&mut data).map_err(ApiError::BadRequest)? {
                Found::File(name) => {
                    close(file.take()).await?;
                    let created = tokio::fs::OpenOptions::new().write(true).create_new(true).open(dir.join(name)).await;
                    file = Some(created.map_err(|error| not_written(&error))?);
                }
                Found::Bytes(bytes) => {
                    if let Some(file) = &mut file {
                        file.write_all(bytes).await.map_err(|error| not_written(&error))?;
                    }
                }
                Found::Nothing => {}
            }
        }
    }
    close(file).await?;
    archive.finish().map_err(ApiError::BadRequest)
}

async fn close(file: Option<tokio::fs::File>) -> ApiResult<()> {
    match file {
        Some(mut file) => file.flush().await.map_err(|error| not_written(&error)),
        None => Ok(()),
    }
}

fn not_written(error: &std::io::Error) -> ApiError {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            ApiError::Unavailable(format!("there is no room for the adapter on this server's disk: {error}"))
        }
        _ => ApiError::Internal(format!("the adapter was not written: {error}")),
    }
}

/// Reads what was uploaded, and makes a checkpoint of it. Blocks.
fn publish(app: &App, base: BaseId, name: &str, scratch: &Scratch) -> ApiResult<Value> {
    let base = &app.bases.get(base).info;
    let (_charge, files) = opened(app, (&base.adapters, scratch.path()), "strata import")?;
    let lora = files.lora();
    let adapter = files.read().map_err(of_failure)?;
    let written =
        import::import(app.config.data_dir.path(), name, &base.name, lora.clone(), |dir| adapter.write_checkpoint(dir));
    let imported = written.map_err(|error| match error {
        ImportError::Name(reason) => ApiError::BadRequest(reason),
        ImportError::Files(Error::Io { source, .. }) => not_written(&source),
        ImportError::Files(other) => ApiError::BadRequest(other.to_string()),
    })?;
    app.store.get(&CheckpointId::parse(&imported.path)?)?;
    tracing::info!(path = imported.path, bytes = imported.size_bytes, "imported an adapter");
    Ok(json!({
        "type": "import_weights", "path": imported.path, "size_bytes": imported.size_bytes,
        "base_model": base.name, "lora_rank": lora.rank,
    }))
}

/// Opens an adapter and takes memory for all of it. `by_hand`: the command that does without.
fn opened<'a>(app: &App, (adapters, dir): (&'a Adapters, &Path), by_hand: &str) -> ApiResult<(Charge, AdapterFiles<'a>)> {
    let bytes_max = app.transit.bytes_max() / limits::CONVERSION_PART;
    let mut charge = app.transit.charge();
    let mut take = |bytes: u64| match usize::try_from(bytes) {
        Ok(more) if charge.bytes().saturating_add(more) <= bytes_max => charge.try_grow(more),
        _ => Err(ApiError::TooLarge(format!(
            "the adapter takes {} bytes of memory to be read and written again, and this server has {} for that; `{by_hand}` does it on its machine",
            (charge.bytes() as u64).saturating_add(bytes),
            limits::shown_bytes(bytes_max)
        ))),
    };
    take(Adapters::memory_bytes_to_open(dir).map_err(of_failure)?)?;
    let files = adapters.open(dir).map_err(of_failure)?;
    take(files.memory_bytes())?;
    Ok((charge, files))
}

fn of_failure(failure: Failure) -> ApiError {
    match failure {
        Failure::User(reason) => ApiError::BadRequest(reason),
        Failure::Server(reason) => ApiError::Internal(reason),
    }
}

/// The form that a download names; `None`: as the checkpoint is.
///
/// # Errors
/// If there is no such form, or none that a server makes.
pub fn form(asked: Option<&str>) -> ApiResult<Option<Form>> {
    match asked {
        None => Ok(None),
        Some("tinker") => Ok(Some(Form::Tinker)),
        Some("peft") => Ok(Some(Form::Peft)),
        Some("merged") => Err(ApiError::bad(
            "format \"merged\" would have this server read all of the base model's weights again; download the adapter, and run \
             `strata export ADAPTER OUT --base BASE --format merged` where the base model is",
        )),
        Some(other) => Err(ApiError::bad(format!("format is {:?}; supported: peft, tinker", shown(other)))),
    }
}

/// Refuses a checkpoint that cannot be had in a form, before anyone is sent for it. Blocks.
///
/// # Errors
/// Says why.
pub fn check(app: &App, record: &CheckpointRecord, form: Form) -> ApiResult<()> {
    let base = &app.bases.get(base_of(app, record)?).info;
    let dir = app.store.dir(&record.id());
    of_one_save(app, record, || {
        let (_charge, files) = opened(app, (&base.adapters, &dir), &by_hand(form))?;
        files.check(form).map_err(of_failure)
    })
}

/// Writes a checkpoint in a form into a directory that goes with what is returned. Blocks.
///
/// # Errors
/// If it has no such form, or another save has taken its place.
pub fn converted(app: &App, record: &CheckpointRecord, form: Form) -> ApiResult<Scratch> {
    let base = &app.bases.get(base_of(app, record)?).info;
    let (dir, scratch) = (app.store.dir(&record.id()), app.store.scratch()?);
    of_one_save(app, record, || {
        let (_charge, files) = opened(app, (&base.adapters, &dir), &by_hand(form))?;
        let adapter = files.read().map_err(of_failure)?;
        adapter.write(scratch.path(), form).map_err(|error| match error {
            Error::Io { source, .. } => not_written(&source),
            other => ApiError::BadRequest(other.to_string()),
        })
    })?;
    Ok(scratch)
}

/// What was read of one save and of the next is neither, and what has gone meanwhile was not faulty.
fn of_one_save<T>(app: &App, record: &CheckpointRecord, read: impl FnOnce() -> ApiResult<T>) -> ApiResult<T> {
    let read = read();
    if app.store.is_on_disk(record) {
        return read;
    }
    Err(ApiError::NotFound(format!("there is no checkpoint {} as it was", record.id().tinker_path())))
}

fn by_hand(form: Form) -> String {
    let form = if form == Form::Peft { "peft" } else { "tinker" };
    format!("strata export CHECKPOINT OUT --format {form}")
}

fn base_of(app: &App, record: &CheckpointRecord) -> ApiResult<BaseId> {
    let found = app.bases.find(&record.base_model);
    found.map_err(|reason| ApiError::bad(format!("{}: {reason}", record.id().tinker_path())))
}
