//! Saving, loading and keeping checkpoints.

use std::sync::{Arc, PoisonError};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use strata_engine::api::{Request, Response, SaveTarget, TrainOp};
use time::OffsetDateTime;

use crate::app::{App, acknowledged, json_answer, unexpected};
use crate::bases::BaseId;
use crate::blocking::off_thread;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, shown};
use crate::payload::{Operation, Payload, op_head};
use crate::registry::{TrainedModel, Weights, inflight_name, model_id, sampling_session_id};
use crate::routes::training;
use crate::store::CheckpointRecord;
use crate::submit::Wanted;
use crate::wire::guard;
use crate::wire::json::{self as wire, CopyWeights, LoadKind, LoadWeights, OpHead, SaveWeights, Ttl};

/// `POST save_weights`: adapter and optimizer state, under a name.
pub async fn save_weights(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (Operation { head, asked }, _held) = body.operation::<SaveWeights>().await?;
    save_named(&app, head, asked, CheckpointKind::Weights).await
}

/// `POST save_weights_for_sampler`: the adapter under a name, or without one as sampling weights in memory.
pub async fn save_weights_for_sampler(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (Operation { head, asked }, _held) = body.operation::<SaveWeights>().await?;
    match asked {
        Ok(SaveWeights { path: None, sampling_session_seq_id: Some(n), kind, .. }) => {
            snapshot(&app, head, n, kind.as_deref().unwrap_or("snapshot"))
        }
        named => save_named(&app, head, named, CheckpointKind::SamplerWeights).await,
    }
}

/// `POST save_weights_external`: the adapter under a name, for its user to download.
pub async fn save_weights_external(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (Operation { head, asked }, _held) = body.operation::<SaveWeights>().await?;
    save_named(&app, head, asked, CheckpointKind::ExternalWeights).await
}

async fn save_named(
    app: &Arc<App>,
    head: OpHead,
    asked: Result<SaveWeights, String>,
    kind: CheckpointKind,
) -> ApiResult<Json<Value>> {
    let model = app.registry.model(&head.model_id)?;
    let overwrite = asked.as_ref().is_ok_and(|asked| asked.overwrite);
    if let Some(Ok(id)) = asked.as_ref().ok().map(|asked| checkpoint_id(&head, asked, kind))
        && app.store.is_expired(&id)
    {
        let freeing = app.clone();
        let free = move || {
            freeing.store.free_name(&id);
            Ok(())
        };
        off_thread(free).await?;
    }
    let asked = asked.and_then(|asked| {
        let recipients = if kind == CheckpointKind::ExternalWeights { asked.recipients()? } else { Vec::new() };
        let record = new_record(app, &head, model, asked, kind)?;
        let metadata = serde_json::to_value(&record).map_err(|error| format!("the checkpoint's record: {error}"))?;
        app.store.check_room()?;
        let (root, dir, name) = (app.store.root().to_owned(), app.store.dir(&record.id()), record.id().tinker_path());
        Ok((record, SaveTarget { root, dir, name, overwrite, metadata, recipients }))
    });
    let (record, op) = match asked {
        Ok((record, target)) if kind == CheckpointKind::Weights => (Some(record), Ok(TrainOp::SaveState(target))),
        Ok((record, target)) => (Some(record), Ok(TrainOp::SaveSampler(target))),
        Err(reason) => (None, Err(reason)),
    };
    training::accept(app, head, op, move |app, response| match (response, record) {
        (Response::Saved { size_bytes, lora, .. }, Some(mut record)) => {
            (record.size_bytes, record.lora) = (size_bytes, lora);
            let path = record.id().tinker_path();
            app.store.insert(record);
            let kind = match kind {
                CheckpointKind::Weights => "save_weights",
                CheckpointKind::SamplerWeights => "save_weights_for_sampler",
                CheckpointKind::ExternalWeights => "save_weights_external",
            };
            Ok(json_answer(&json!({ "type": kind, "path": path, "size_bytes": size_bytes })))
        }
        (other, _) => Err(unexpected(&other)),
    })
}

fn checkpoint_id(head: &OpHead, asked: &SaveWeights, kind: CheckpointKind) -> Result<CheckpointId, String> {
    let name = asked.path.as_ref().map_or_else(|| format!("{:06}", head.seq_id), |path| path.0.clone());
    CheckpointId::new(&head.model_id, kind.segment(), &name).map_err(|error| error.to_string())
}

fn new_record(
    app: &App,
    head: &OpHead,
    model: TrainedModel,
    asked: SaveWeights,
    kind: CheckpointKind,
) -> Result<CheckpointRecord, String> {
    let id = checkpoint_id(head, &asked, kind)?;
    let mut record = CheckpointRecord::new(id, app.bases.get(model.base).info.name.clone(), model.lora);
    record.expires_at = wire::ttl(asked.ttl_seconds)?.map(|life| record.created_at + life);
    record.user_metadata = asked.user_metadata.map(|texts| texts.0);
    record.run_metadata = model.user_metadata.as_deref().cloned();
    record.project_id = app.registry.project_of_model(&head.model_id).map_err(|error| error.to_string())?;
    Ok(record)
}

/// Sampling weights that live in memory: frozen, or shared by all inflight samplers of the model and replaced in place.
fn snapshot(app: &Arc<App>, head: OpHead, sampling_session_seq_id: u64, kind: &str) -> ApiResult<Json<Value>> {
    let session_id = app.registry.session_of_model(&head.model_id)?;
    let (client, base) = (app.registry.client(&session_id)?, app.registry.model(&head.model_id)?.base);
    let charge = app.charge(&client, limits::SESSION_BYTES)?;
    let sampler_id = sampling_session_id(&session_id, sampling_session_seq_id);
    let op = match kind {
        "snapshot" => Ok((
            Weights::Snapshot(head.model_id.0.clone()),
            TrainOp::Snapshot { sampler_id: sampler_id.clone(), replace: false },
        )),
        "inflight" => {
            let shared = inflight_name(&head.model_id);
            Ok((Weights::Inflight(head.model_id.0.clone()), TrainOp::Snapshot { sampler_id: shared, replace: true }))
        }
        other => Err(format!("kind {:?} is neither snapshot nor inflight", shown(other))),
    };
    let _registering = app.registering.lock().unwrap_or_else(PoisonError::into_inner);
    // Sent again, it comes under its seq_id with a sampling_session_seq_id of its own, for which nothing is made.
    let request_id = format!("{}:{}", &*head.model_id, head.seq_id);
    if app.futures.is_known(&request_id, op.as_ref().ok().and_then(|(_, op)| op.fingerprint()))? {
        return Ok(acknowledged(&request_id));
    }
    let mut is_new = false;
    let op = op.and_then(|(weights, op)| {
        if matches!(weights, Weights::Snapshot(_)) {
            app.make_adapter_room((&client, base), Wanted::Snapshot(&head.model_id));
        }
        let added = app.registry.add_sampler(&session_id, &sampler_id, (base, weights), charge);
        let (added, freed) = added.map_err(|error| error.to_string())?;
        app.notify_engine(&client, freed);
        is_new = added;
        if is_new {
            Ok(op)
        } else {
            Err(format!("there was a sampling session {sampler_id} before; take another sampling_session_seq_id"))
        }
    });
    let (made_id, failed_id) = (sampler_id.clone(), sampler_id.clone());
    let accepted = training::accept_or_else(
        app,
        head,
        op,
        move |_, response| match response {
            Response::Sampler => {
                Ok(json_answer(&json!({ "type": "save_weights_for_sampler", "sampling_session_id": made_id })))
            }
            other => Err(unexpected(&other)),
        },
        move |app, failure| {
            if is_new {
                app.registry.end_sampler(&failed_id, &format!("its weights could not be saved: {failure}"));
            }
        },
    );
    // What was not accepted as it is made no session.
    if is_new && !matches!(accepted, Ok(true)) {
        app.registry.remove_sampler(&sampler_id);
    }
    accepted.map(|_| acknowledged(&request_id))
}

/// `POST load_weights`: into a new model, or as an operation of one that is there.
pub async fn load_weights(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let work = |bytes: Bytes, budget: &_| {
        let head = match guard::parse::<LoadKind>(&bytes, budget) {
            Ok(LoadKind { model_id: None }) => None,
            _ => Some(op_head(&bytes, budget)?),
        };
        Ok((head, guard::parse::<LoadWeights>(&bytes, budget)))
    };
    let ((head, asked), _held) = body.decode(work).await?;
    if let Some(head) = head {
        let op = asked.and_then(|asked| {
            let (base, record, path) = loadable(&app, &asked).map_err(|error| error.to_string())?;
            if app.registry.model(&head.model_id).is_ok_and(|model| model.base != base) {
                return Err(format!("{path} adapts {:?}, which is another base model than this one's", record.base_model));
            }
            let op = TrainOp::LoadState { source: app.store.source(&record), with_optimizer: asked.optimizer };
            Ok((op, path))
        });
        let (op, path) = match op {
            Ok((op, path)) => (Ok(op), path),
            Err(reason) => (Err(reason), String::new()),
        };
        let model_id = head.model_id.0.clone();
        return training::accept(&app, head, op, move |_, response| match response {
            Response::Loaded => Ok(json_answer(&json!({ "type": "load_weights", "path": path, "model_id": model_id }))),
            other => Err(unexpected(&other)),
        });
    }
    let asked = asked.map_err(ApiError::BadRequest)?;
    let (Some(session_id), Some(model_seq_id)) = (&asked.session_id, asked.model_seq_id) else {
        return Err(ApiError::bad("load_weights needs a model_id and seq_id, or a session_id and model_seq_id"));
    };
    let (base, record, path) = loadable(&app, &asked)?;
    let metadata = wire::metadata(asked.user_metadata);
    let source = app.store.source(&record);
    let answer = json!({ "type": "load_weights", "path": path });
    let lora = record.lora.clone();
    let wanted = (record.id().tinker_path(), asked.optimizer);
    training::create(&app, (session_id, model_seq_id), (base, record.lora.clone()), wanted, metadata, answer, |model_id| {
        Request::CreateModelFromCheckpoint { model_id, source, lora, with_optimizer: asked.optimizer }
    })
}

/// The checkpoint to load into training, if it can be.
fn loadable(app: &App, asked: &LoadWeights) -> ApiResult<(BaseId, Arc<CheckpointRecord>, String)> {
    let id = CheckpointId::parse(&asked.path)?;
    if id.kind != CheckpointKind::Weights {
        return Err(ApiError::bad(format!(
            "{} holds {} weights, which cannot be trained; load what save_state returned, such as tinker://{}/weights/NAME",
            shown(&asked.path),
            id.kind.checkpoint_type(),
            id.run
        )));
    }
    if let Some(optimizer) = &asked.optimizer_config {
        optimizer.check().map_err(ApiError::BadRequest)?;
    }
    let record = app.store.get(&id)?;
    let find =
        |name: &str| app.bases.find(name).map_err(|reason| ApiError::bad(format!("loading {}: {reason}", shown(&asked.path))));
    let base = find(&record.base_model)?;
    if let Some(other) = asked.base_model.as_deref()
        && find(other)? != base
    {
        let (path, own) = (shown(&asked.path), &record.base_model);
        return Err(ApiError::bad(format!("{path} adapts {own:?}, and base_model is {:?}", shown(other))));
    }
    Ok((base, record, id.tinker_path()))
}

/// `POST copy_weights`: a checkpoint of the same name, in a run of its own that cannot be trained. It belongs to the project that is named, or to that of
/// its session.
pub async fn copy_weights(State(app): State<Arc<App>>, headers: HeaderMap, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CopyWeights>().await?;
    let id = CheckpointId::parse(&asked.source_path)?;
    let record = app.store.get(&id)?;
    let life = wire::ttl(asked.ttl_seconds).map_err(ApiError::BadRequest)?;
    let project_id = asked.destination_project_id.map(|project| project.0);
    let (run, project_id) = match (asked.session_id, asked.model_seq_id) {
        (Some(_), Some(_)) if project_id.is_some() => {
            return Err(ApiError::bad(
                "copy_weights takes a destination_project_id, or a session_id and a model_seq_id, whose copy is in the session's project",
            ));
        }
        (Some(session_id), Some(model_seq_id)) => {
            let session = app.registry.session(&session_id)?;
            let run = model_id(&session_id, model_seq_id);
            if app.registry.model(&run).is_ok() {
                return Err(ApiError::bad(format!(
                    "model_seq_id {model_seq_id} of session {} is a model already",
                    shown(&session_id)
                )));
            }
            (run, session.project_id)
        }
        (None, None) => (copy_run(&headers, &record, project_id.as_deref()), project_id),
        _ => return Err(ApiError::bad("copy_weights needs a session_id and a model_seq_id, or neither")),
    };
    let copied = CheckpointId { run: run.clone(), ..id };
    match app.store.get(&copied) {
        // A request that is sent again has been answered, if not heard.
        Ok(there) if there.copy_of.as_ref().is_none_or(|of| *of == record.save_id) => {}
        Ok(_) => {
            let (path, other) = (copied.tinker_path(), record.id().tinker_path());
            return Err(ApiError::bad(format!(
                "{path} is a copy of another checkpoint than {other} is now: each needs a model_seq_id of its own"
            )));
        }
        Err(_) => {
            let expires_at = life.map(|life| OffsetDateTime::now_utc() + life);
            off_thread(move || app.store.copy(&record, (&run, project_id), expires_at)).await?;
        }
    }
    Ok(Json(json!({ "tinker_path": copied.tinker_path() })))
}

/// A name for the run of a copy: the same for a request that is sent again, as its key says.
fn copy_run(headers: &HeaderMap, record: &CheckpointRecord, project_id: Option<&str>) -> String {
    let key = headers.get("x-idempotency-key").filter(|key| !key.is_empty());
    let Some(key) = key else { return format!("copy:{}", uuid::Uuid::new_v4()) };
    let mut hash = Sha256::new();
    hash.update(record.id().tinker_path().as_bytes());
    hash.update(record.save_id.as_bytes());
    hash.update(key.as_bytes());
    if let Some(project_id) = project_id {
        // No key has a zero in it.
        hash.update([0]);
        hash.update(project_id.as_bytes());
    }
    let hash = hash.finalize();
    format!("copy:{}", hash[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// `DELETE training_runs/{run}/checkpoints/{kind}/{name}`
pub async fn delete(State(app): State<Arc<App>>, Path(path): Path<(String, String, String)>) -> ApiResult<Json<Value>> {
    edit(app, path, |app, id| app.store.delete(id)).await
}

/// `POST .../publish`: publishing twice is the same as once.
pub async fn publish(State(app): State<Arc<App>>, Path(path): Path<(String, String, String)>) -> ApiResult<Json<Value>> {
    edit(app, path, |app, id| app.store.set_public(id, true)).await
}

/// `DELETE .../publish`
pub async fn unpublish(State(app): State<Arc<App>>, Path(path): Path<(String, String, String)>) -> ApiResult<Json<Value>> {
    edit(app, path, |app, id| app.store.set_public(id, false)).await
}

/// `PUT .../ttl`: the life of a checkpoint from now on.
pub async fn set_ttl(
    State(app): State<Arc<App>>,
    Path(path): Path<(String, String, String)>,
    body: Payload,
) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<Ttl>().await?;
    let life = wire::ttl(asked.ttl_seconds).map_err(ApiError::BadRequest)?;
    let expires_at = life.map(|life| OffsetDateTime::now_utc() + life);
    edit(app, path, move |app, id| app.store.set_expiry(id, expires_at)).await
}

async fn edit(
    app: Arc<App>,
    (run, kind, name): (String, String, String),
    change: impl FnOnce(&App, &CheckpointId) -> ApiResult<()> + Send + 'static,
) -> ApiResult<Json<Value>> {
    let id = CheckpointId::new(&run, &kind, &name)?;
    off_thread(move || change(&app, &id)).await?;
    Ok(Json(json!({})))
}
