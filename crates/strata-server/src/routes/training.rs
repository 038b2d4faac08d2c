//! Models and the operations that train them.
//!
//! An operation is acknowledged as soon as its model and its place in the order are known. Whatever else is wrong with it becomes
//! the outcome of its future, and it still takes its place: the operations behind it must not wait for ever.

use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde_json::{Value, json};
use strata_engine::api::{Failure, LoraSpec, ModelId, Refusal, Request, Response, TrainOp};

use crate::app::{App, acknowledged, json_answer, refused, unexpected};
use crate::auth::Owner;
use crate::bases::BaseId;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult};
use crate::futures::{Answer, fingerprint_of};
use crate::limits;
use crate::names::shown;
use crate::payload::{Operation, Payload, op_head};
use crate::provenance::{self, Sources, Spans};
use crate::registry::{Metadata, State as ModelState, metadata_bytes, model_id};
use crate::submit::Wanted;
use crate::wire::budget::Budget;
use crate::wire::json::{self as wire, CreateModel, ForwardBackward, ModelOnly, OpHead, OptimStep};
use crate::wire::{guard, head, proto};

/// `POST create_model`
pub async fn create_model(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CreateModel>().await?;
    let base = app.bases.find(&asked.base_model).map_err(ApiError::BadRequest)?;
    if let Some(optimizer) = &asked.optimizer_config {
        optimizer.check().map_err(ApiError::BadRequest)?;
    }
    let Some(lora) = asked.lora_config else {
        return Err(ApiError::bad("lora_config is missing; this server trains LoRA adapters, not whole models"));
    };
    let seed = lora.seed.as_ref().map(ToString::to_string);
    let wanted = (base, lora.rank, seed, [lora.train_attn, lora.train_mlp, lora.train_unembed]);
    let lora = LoraSpec {
        rank: lora.rank,
        seed: wire::seed(lora.seed.as_ref()).map_err(ApiError::BadRequest)?,
        train_attn: lora.train_attn,
        train_mlp: lora.train_mlp,
        train_unembed: lora.train_unembed,
        ranks: Default::default(),
    };
    let metadata = wire::metadata(asked.user_metadata);
    let (place, adapter) = ((&*asked.session_id.0, asked.model_seq_id), (base, lora.clone()));
    create(&app, place, adapter, wanted, metadata, json!({ "type": "create_model" }), |model_id| Request::CreateModel {
        model_id,
        lora,
    })
}

/// Makes a model in whichever way `request` says; `wanted` tells it from another that takes its number, and `answer` is what its future resolves to, with the model's id put in.
pub fn create(
    app: &Arc<App>,
    (session_id, model_seq_id): (&str, u64),
    (base, lora): (BaseId, LoraSpec),
    wanted: impl Hash,
    metadata: Metadata,
    mut answer: Value,
    request: impl FnOnce(ModelId) -> Request,
) -> ApiResult<Json<Value>> {
    let client = app.registry.client(session_id)?;
    let entry_bytes = limits::SESSION_BYTES + metadata_bytes(&metadata);
    let (entry, future) = (app.charge(&client, entry_bytes)?, app.charge(&client, limits::FUTURE_BYTES)?);
    let fingerprint = Some(fingerprint_of(wanted));
    let own_id = model_id(session_id, model_seq_id);
    let request_id = format!("{own_id}:0");
    let _registering = app.registering.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(completer) = app.futures.begin_for(&request_id, &client, fingerprint, None)? else {
        return Ok(acknowledged(&request_id));
    };
    // Where a copy of a checkpoint lies nothing is trained: what was saved would stand beside it.
    if app.registry.model(&own_id).is_err() && app.store.has_run(&own_id) {
        let session_id = shown(session_id);
        return Err(ApiError::bad(format!("model_seq_id {model_seq_id} of session {session_id} has a copy of a checkpoint")));
    }
    let (model_id, is_new) = app.registry.add_model((session_id, model_seq_id), (base, lora.clone()), metadata, entry)?;
    if !is_new {
        // So long ago that nothing is remembered of its creation.
        return Ok(acknowledged(&request_id));
    }
    answer["model_id"] = json!(model_id);
    app.make_adapter_room((&client, base), Wanted::Model(&lora));
    let request = request(model_id.clone());
    let created_id = model_id.clone();
    let dispatched = app.dispatch(
        &request_id,
        (base, client.clone()),
        completer.paid_by(future),
        request,
        move |_, response| match response {
            Response::Created { .. } => Ok(json_answer(&answer)),
            other => Err(unexpected(&other)),
        },
        move |app, failure| {
            // What the engine never had it need not free.
            let _ = app.registry.end_model(&created_id, &format!("it could not be created: {failure}"));
        },
    );
    if let Err(refusal) = dispatched {
        app.registry.remove_model(&model_id);
        return Err(refused(refusal));
    }
    if !app.registry.is_active(session_id) {
        // The session ended in between, when the engine did not know the model yet.
        app.notify_engine(&client, vec![Request::UnloadModel { model_id }]);
    }
    Ok(acknowledged(&request_id))
}

/// `POST unload_model`, as older clients end a model.
pub async fn unload_model(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<ModelOnly>().await?;
    let client = app.registry.client(&app.registry.session_of_model(&asked.model_id)?)?;
    let request_id = format!("{}:unload", asked.model_id);
    let future = app.charge(&client, limits::FUTURE_BYTES)?;
    if let Some(completer) = app.futures.begin(&request_id, &client) {
        app.notify_engine(&client, app.registry.end_model(&asked.model_id, "its client unloaded it"));
        completer.complete(json_answer(&json!({ "type": "unload_model", "model_id": *asked.model_id })), Some(future));
    }
    Ok(acknowledged(&request_id))
}

/// `POST get_info`
pub async fn get_info(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<ModelOnly>().await?;
    let model = app.registry.model(&asked.model_id)?;
    if let ModelState::Gone(reason) = model.state {
        return Err(ApiError::bad(format!("model {} is gone: {reason}", shown(&asked.model_id))));
    }
    let base = &app.bases.get(model.base).info;
    Ok(Json(json!({
        "type": "get_info",
        "model_id": *asked.model_id,
        "model_data": {
            "arch": base.architecture,
            "model_name": base.name,
            "tokenizer_id": base.tokenizer_id,
        },
        "is_lora": true,
        "lora_rank": model.lora.rank,
        "model_name": base.name,
        "optimizer_config": { "type": "adamw" },
    })))
}

/// `POST forward_backward`: protobuf, or JSON from older clients.
pub async fn forward_backward(State(app): State<Arc<App>>, owner: Owner, body: Payload) -> ApiResult<Json<Value>> {
    pass(app, owner, body, false).await
}

/// `POST forward`, as older clients ask for losses without gradients.
pub async fn forward(State(app): State<Arc<App>>, owner: Owner, body: Payload) -> ApiResult<Json<Value>> {
    pass(app, owner, body, true).await
}

async fn pass(app: Arc<App>, Owner(owner): Owner, body: Payload, forward_only: bool) -> ApiResult<Json<Value>> {
    let (is_protobuf, of_app, of_owner) = (body.is_protobuf, app.clone(), owner.clone());
    let work = move |bytes: Bytes, budget: &Budget| {
        // What spans name becomes a part of the operation here, where large bodies hold up nobody.
        let resolved = |mut op: TrainOp, spans: &[Spans]| {
            let counts = provenance::counts_for(&op);
            let resolve = || provenance::resolve(&mut op, spans, &of_app.records, &of_owner, budget);
            let sources = counts.then(resolve).transpose()?;
            Ok((op, sources))
        };
        if !is_protobuf {
            let op = guard::parse::<ForwardBackward>(&bytes, budget).and_then(|asked| asked.into_op(forward_only, budget));
            return Ok((op_head(&bytes, budget)?, op.and_then(|op| resolved(op, &[]))));
        }
        let head = match proto::decode_head(&bytes) {
            Ok(proto::ForwardBackwardHead { model_id, seq_id }) => {
                let seq_id = u64::try_from(seq_id).map_err(|_| ApiError::bad(format!("seq_id {seq_id} is negative")))?;
                OpHead::new(model_id, seq_id)
            }
            Err(reason) => head::of_protobuf(&bytes).ok_or(ApiError::BadRequest(reason))?,
        };
        let op = proto::decode_forward_backward(bytes.clone(), budget).and_then(|asked| asked.into_op(budget)).and_then(|op| {
            let spans = if provenance::counts_for(&op) { proto::decode_spans(&bytes, budget)? } else { Vec::new() };
            resolved(op, &spans)
        });
        Ok((head, op))
    };
    let ((head, op), _held) = body.decode(work).await?;
    let (op, sources) = op.map_or_else(|reason| (Err(reason), None), |(op, sources)| (Ok(op), sources));
    let has_pictures =
        matches!(&op, Ok(TrainOp::ForwardBackward { data, .. }) if data.iter().any(|datum| !datum.images.is_empty()));
    let turns = app.picture_checks.clone();
    let begin = move || {
        accept(&app, head, op, move |_, response| match response {
            Response::ForwardBackward(mut output) => {
                if let Some(Sources { recorded, passed }) = sources {
                    let counts = [("recorded_logprobs:sum", recorded), ("passed_logprobs:sum", passed)];
                    output.metrics.extend(counts.map(|(name, count)| (name.to_owned(), count as f64)));
                }
                Ok(Answer::ForwardBackward(proto::encode_forward_backward(&output)))
            }
            other => Err(unexpected(&other)),
        })
    };
    if has_pictures { in_turn((&turns, &owner), begin).await } else { begin() }
}

/// `POST optim_step`
pub async fn optim_step(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (Operation { head, asked }, _held) = body.operation::<OptimStep>().await?;
    accept(&app, head, asked.and_then(OptimStep::into_op), |_, response| match response {
        Response::OptimStep { metrics } => {
            let metrics: serde_json::Map<String, Value> =
                metrics.into_iter().map(|(name, value)| (name, json!(value))).collect();
            Ok(json_answer(&json!({ "type": "optim_step", "metrics": metrics })))
        }
        other => Err(unexpected(&other)),
    })
}

/// Accepts an operation once, and has it fail in its place if it is refused.
///
/// # Errors
/// If there is no such model, its place is impossible or was taken by another operation, or too much is queued.
pub fn accept(
    app: &Arc<App>,
    head: OpHead,
    op: Result<TrainOp, String>,
    finish: impl FnOnce(&App, Response) -> Result<Answer, Failure> + Send + 'static,
) -> ApiResult<Json<Value>> {
    let request_id = format!("{}:{}", &*head.model_id, head.seq_id);
    accept_or_else(app, head, op, finish, |_, _| {}).map(|_| acknowledged(&request_id))
}

/// As [`accept`]; `on_failure` is told if the engine fails the operation. Answers whether the operation was accepted now, and as it is.
///
/// # Errors
/// Those of [`accept`].
pub fn accept_or_else(
    app: &Arc<App>,
    head: OpHead,
    op: Result<TrainOp, String>,
    finish: impl FnOnce(&App, Response) -> Result<Answer, Failure> + Send + 'static,
    on_failure: impl FnOnce(&App, &Failure) + Send + 'static,
) -> ApiResult<bool> {
    let OpHead { model_id, seq_id } = head;
    let model_id = model_id.0;
    if seq_id == 0 {
        return Err(ApiError::bad("seq_id 0 is the creation of the model; operations count from 1"));
    }
    let (base, client) = app.registry.use_model(&model_id)?;
    let request_id = format!("{model_id}:{seq_id}");
    let op = op.unwrap_or_else(TrainOp::Refused);
    let fingerprint = op.fingerprint();
    let begin = || app.futures.begin_for(&request_id, &client, fingerprint, None);
    let Some(completer) = begin()? else { return Ok(false) };
    let request = Request::Train { model_id: model_id.clone(), seq_id, op };
    let reason = match app.dispatch(&request_id, (base, client.clone()), completer, request, finish, on_failure) {
        Ok(()) => return Ok(true),
        Err(Refusal::Seen) => return Ok(false),
        Err(Refusal::User(reason)) => reason,
        Err(refusal) => return Err(refused(refusal)),
    };
    // It will never be accepted as it is: what it asks for is let go, and it fails in its place.
    let Some(completer) = begin()? else { return Ok(false) };
    let request = Request::Train { model_id, seq_id, op: TrainOp::Refused(reason) };
    let nothing = |_: &App, response| Err(unexpected(&response));
    match app.dispatch(&request_id, (base, client), completer, request, nothing, |_, _| {}) {
        Ok(()) | Err(Refusal::Seen) => Ok(false),
        Err(refusal) => Err(refused(refusal)),
    }
}

/// Has an operation whose request is refused take its place, and fail there for the same reason. Where it names no model that is in training,
/// nobody waits for it.
pub fn take_place(app: &Arc<App>, head: OpHead, refusal: &ApiError) {
    let (model_id, seq_id) = (head.model_id.0.clone(), head.seq_id);
    let taken = accept(app, head, Err(refusal.to_string()), |_, response| Err(unexpected(&response)));
    if let Err(error) = taken {
        tracing::debug!(model_id, seq_id, "a refused operation takes no place: {error}");
    }
}
