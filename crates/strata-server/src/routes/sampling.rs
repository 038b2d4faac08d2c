//! Sampling sessions, and sampling.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use strata_engine::api::{CheckpointSource, Client, LoraSpec, Refusal, Request, Response, SampleRequest};

use crate::app::{App, refused, unexpected};
use crate::auth::Owner;
use crate::bases::BaseId;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult};
use crate::futures::{Answer, Target, fingerprint_of};
use crate::ids;
use crate::image_stores::Unfetched;
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, shown};
use crate::payload::Payload;
use crate::records::{self, Sampled};
use crate::registry::{About, State as SamplerState, Weights, sampling_session_id};
use crate::transit::Charge;
use crate::wire::budget::Budget;
use crate::wire::input::Asset;
use crate::wire::json::{CreateSamplingSession, JoinSamplingSession, Source, random_seed};
use crate::wire::sample::Sample;
use crate::wire::{guard, proto};

/// `POST create_sampling_session`: from the base model or a checkpoint. The engine loads while the client goes on.
pub async fn create_session(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<CreateSamplingSession>().await?;
    let from = Source { base_model: asked.base_model, model_path: asked.model_path };
    let sampler_id = sampling_session_id(&asked.session_id, asked.sampling_session_seq_id);
    let names_base = |base| from.base_model.as_ref().map(|name| app.bases.find(name).is_ok_and(|found| found == base));
    // One that is asked for again is there, whatever has become of its checkpoint.
    let is_known = app.registry.find_sampler(&sampler_id, |base, weights| match (weights, &from.model_path) {
        (Weights::Checkpoint(path), Some(asked)) => *path == asked.0 && names_base(base) != Some(false),
        (Weights::Base, None) => names_base(base) == Some(true),
        _ => false,
    });
    if !is_known? {
        make(&app, &asked.session_id, asked.sampling_session_seq_id, Found::new(&app, from)?)?;
    }
    Ok(Json(json!({ "type": "create_sampling_session", "sampling_session_id": sampler_id })))
}

/// What is to be sampled, where it was found.
struct Found {
    base: BaseId,
    weights: Weights,
    /// Of a checkpoint, its files, and the adapter in them.
    source: Option<(CheckpointSource, LoraSpec)>,
}

impl Found {
    /// Finds it.
    ///
    /// # Errors
    /// If it is not there, cannot be sampled, or contradicts itself.
    fn new(app: &App, from: Source) -> ApiResult<Self> {
        let Some(path) = from.model_path else {
            let Some(base_model) = &from.base_model else {
                return Err(ApiError::bad("sampling needs a base_model or a model_path"));
            };
            let base = app.bases.find(base_model).map_err(ApiError::BadRequest)?;
            return Ok(Found { base, weights: Weights::Base, source: None });
        };
        let id = CheckpointId::parse(&path)?;
        if id.kind == CheckpointKind::ExternalWeights {
            return Err(ApiError::bad(format!(
                "model_path {} is for download, and may be encrypted; sample what save_weights_for_sampler or save_state returned",
                shown(&path)
            )));
        }
        let record = app.store.get(&id)?;
        let base = app.bases.find(&record.base_model);
        let base = base.map_err(|reason| ApiError::bad(format!("checkpoint {path}: {reason}")))?;
        if let Some(other) = &from.base_model
            && app.bases.find(other).map_err(ApiError::BadRequest)? != base
        {
            let (path, own) = (shown(&path), &record.base_model);
            return Err(ApiError::bad(format!("{path} adapts {own:?}, and base_model is {:?}", shown(other))));
        }
        Ok(Found { base, weights: Weights::Checkpoint(path.0), source: Some((app.store.source(&record), record.lora.clone())) })
    }
}

/// Makes a sampling session, unless it is there; its id.
fn make(app: &Arc<App>, session_id: &str, number: u64, found: Found) -> ApiResult<String> {
    let sampler_id = sampling_session_id(session_id, number);
    let Found { base, weights, source } = found;
    let client = app.registry.client(session_id)?;
    let charge = app.charge(&client, limits::SESSION_BYTES)?;
    let (is_new, freed) = app.registry.add_sampler(session_id, &sampler_id, (base, weights), charge)?;
    app.notify_engine(&client, freed);
    if is_new {
        let failed_id = sampler_id.clone();
        let request = Request::CreateSampler { sampler_id: sampler_id.clone(), source };
        let submitted = app.submit((base, client.clone()), request, move |app, failure| {
            tracing::warn!(sampler_id = failed_id, "sampling weights could not be made: {failure}");
            app.registry.end_sampler(&failed_id, &format!("its weights could not be loaded: {failure}"));
        });
        if let Err(refusal) = submitted {
            app.registry.remove_sampler(&sampler_id);
            return Err(refused(refusal));
        }
        if !app.registry.is_active(session_id) {
            // The session ended in between, when the engine did not know the weights yet.
            app.notify_engine(&client, vec![Request::DropSampler { sampler_id: sampler_id.clone() }]);
        }
    }
    Ok(sampler_id)
}

/// The sampling session of those who sample without one, as old clients do: one for each owner and source. It has a session of its own, which
/// ends when nothing has been sampled for the time of a silent session.
fn shared(app: &Arc<App>, owner: Arc<str>, from: Source) -> ApiResult<String> {
    // Looked for each time: it may have been saved again, or deleted.
    let found = Found::new(app, from)?;
    let save = found.source.as_ref().map(|(source, _)| (source.name.clone(), source.save_id.clone()));
    let source = (owner.clone(), found.base, save);
    let is_there = |id: &String| app.registry.sampler(id).is_ok_and(|sampler| sampler.state == SamplerState::Active);
    // Held while one is made, so that no two are; making asks others for nothing that waits.
    let mut known = app.shared_samplers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(id) = known.get(&source).filter(|id| is_there(id)) {
        return Ok(id.clone());
    }
    let session_id = ids::session();
    let client = Client { owner, session: session_id.as_str().into() };
    let charge = app.charge(&client, limits::SESSION_BYTES)?;
    app.registry.create_session(client.clone(), About { is_shared: true, ..About::default() }, charge);
    let made = make(app, &session_id, 0, found);
    match &made {
        Ok(sampler_id) => {
            known.retain(|_, id| is_there(id));
            known.insert(source, sampler_id.clone());
        }
        Err(_) => {
            let ended = app.registry.finish_session(&session_id, "errored");
            drop(known);
            if let Ok(Some(client)) = ended {
                app.end_session(&client);
            }
        }
    }
    made
}

/// `POST join_sampling_session`: a number for another client of it, from which those of its requests follow.
pub async fn join(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<JoinSamplingSession>().await?;
    let client_counter = app.registry.join_sampler(&asked.sampling_session_id)?;
    Ok(Json(json!({ "type": "join_sampling_session", "client_counter": client_counter })))
}

/// `GET samplers/{id}`
pub async fn get(State(app): State<Arc<App>>, Path(sampler_id): Path<String>) -> ApiResult<Json<Value>> {
    let sampler = app.registry.sampler(&sampler_id)?;
    if let SamplerState::Gone(reason) = sampler.state {
        return Err(ApiError::NotFound(format!("sampling session {} is gone: {reason}", shown(&sampler_id))));
    }
    let mut found = json!({ "sampler_id": sampler_id, "base_model": app.bases.get(sampler.base).info.name });
    if let Weights::Checkpoint(path) = sampler.weights {
        found["model_path"] = json!(path);
    }
    Ok(Json(found))
}

/// `POST asample`: acknowledged with the ids that its sequences will have.
pub async fn sample(State(app): State<Arc<App>>, owner: Owner, body: Payload) -> ApiResult<Json<Value>> {
    let work = |bytes: Bytes, budget: &_| {
        let mut asked = guard::parse::<Sample>(&bytes, budget).map_err(ApiError::BadRequest)?;
        let addressed = match (asked.sampling_session_id.take(), asked.seq_id) {
            (Some(sampler_id), Some(seq_id)) => Addressed::To(sampler_id.0, seq_id),
            (Some(_), None) => return Err(ApiError::bad("asample to a sampling_session_id needs a seq_id")),
            (None, _) => Addressed::Without(guard::parse(&bytes, budget).map_err(ApiError::BadRequest)?),
        };
        let (is_recorded, seed) = (asked.record_stability_info, asked.seed());
        Ok((addressed, is_recorded, seed, asked.into_request(budget)?))
    };
    let ((addressed, is_recorded, seed, (sample, assets)), held) = body.decode(work).await?;
    let (sampler_id, seq_id) = match addressed {
        Addressed::To(sampler_id, seq_id) => (sampler_id, seq_id),
        // Nothing says whether such a request was sent before, so each is one of its own.
        Addressed::Without(from) => (shared(&app, owner.0.clone(), from)?, random_seed()),
    };
    let request_id = format!("{sampler_id}:{seq_id}");
    let sequence_ids: Vec<String> = (0..sample.num_samples).map(|i| records::sequence_id(&request_id, i)).collect();
    let acknowledgement = Json(json!({ "request_id": request_id, "sample_sequence_ids": sequence_ids }));
    let fingerprint = Some(fingerprint_of((sample.fingerprint(), seed, is_recorded, &assets)));
    if app.futures.is_known(&request_id, fingerprint)? {
        return Ok(acknowledgement);
    }
    let (sample, _held) =
        if assets.is_empty() { (sample, held) } else { with_assets((&app, &owner.0), sample, assets, held).await? };
    let has_pictures = !sample.images.is_empty();
    let turns = app.picture_checks.clone();
    let begin = move || {
        let (weights, (base, client)) = app.registry.begin_sample(&sampler_id)?;
        let target = Target { sampler_id: sampler_id.as_str().into(), clone: seq_id / limits::REQUESTS_PER_CLONE };
        let begun = app.futures.begin_for(&request_id, &client, fingerprint, Some(target));
        let Ok(Some(completer)) = begun else {
            app.registry.end_sample(&sampler_id);
            return Ok(begun.map(|_| acknowledgement)?);
        };
        let (topk_prompt, topk_sample) = (sample.topk_prompt_logprobs, sample.topk_sample_logprobs);
        let (drawn_id, failed_id) = (sampler_id.clone(), sampler_id.clone());
        let record_for = is_recorded.then(|| (client.clone(), request_id.clone(), prompt_tokens(&sample)));
        let dispatched = app.dispatch(
            &request_id,
            (base, client),
            completer,
            Request::Sample { sampler_id: weights, sample },
            move |app, response| {
                app.registry.end_sample(&drawn_id);
                match response {
                    Response::Sampled(output) => {
                        let answer = Answer::Sample(proto::encode_sample(&output, topk_prompt, topk_sample));
                        if let Some((client, request_id, prompt_tokens)) = record_for {
                            let sampled = Sampled::new(prompt_tokens, output.sequences);
                            if !app.records.remember(app.ledger(), &client, &request_id, sampled) {
                                tracing::warn!(
                                    request_id,
                                    "no room to record what was sampled; its client has the log-probabilities"
                                );
                            }
                            // A session that ended meanwhile has been cleared before.
                            if !app.registry.is_active(&client.session) {
                                app.records.forget_session(&client.session);
                            }
                        }
                        Ok(answer)
                    }
                    other => Err(unexpected(&other)),
                }
            },
            move |app, _| app.registry.end_sample(&failed_id),
        );
        match dispatched {
            Ok(()) | Err(Refusal::Seen) => Ok(acknowledgement),
            Err(refusal) => {
                app.registry.end_sample(&sampler_id);
                Err(refused(refusal))
            }
        }
    };
    if has_pictures { in_turn((&turns, &owner.0), begin).await } else { begin() }
}

/// Tokens of a prompt, if every picture in it says how many it counts as: the engine sees to it that it does.
fn prompt_tokens(sample: &SampleRequest) -> Option<usize> {
    let pictures = sample.images.iter().map(|image| usize::try_from(image.expected_tokens?).ok());
    pictures.sum::<Option<usize>>().and_then(|pictures| pictures.checked_add(sample.prompt.len()))
}

/// What a sample is drawn from.
enum Addressed {
    /// A sampling session, by its id, and the number of the request in it.
    To(String, u64),
    /// What the request itself says.
    Without(Source),
}

/// Reads the pictures that a prompt points to, in directories and stores. They count as what the request becomes decoded.
async fn with_assets(
    (app, owner): (&Arc<App>, &str),
    mut sample: SampleRequest,
    assets: Vec<Asset>,
    held: Charge,
) -> ApiResult<(SampleRequest, Charge)> {
    let (dirs, stores) = (app.config.image_dirs.clone(), app.config.image_stores.clone());
    let bytes_max = app.config.request_bytes_max();
    let deadline = Instant::now() + limits::ASSET_FETCH_TIME_MAX;
    let are_fetched = assets.iter().any(|asset| stores.has(&asset.location));
    let read = move || {
        let budget = Budget::resumed(bytes_max, held);
        for Asset { chunk, image, location } in assets {
            let read = match stores.has(&location) {
                true => stores.read(&location, deadline, &budget),
                false => dirs.read(&location, &budget).map_err(Unfetched::Refused),
            };
            sample.images[image].file = read.map_err(|unfetched| {
                let at = |reason| format!("prompt: model_input chunk {chunk} (image_asset_pointer): {reason}");
                budget.refusal().unwrap_or_else(|| match unfetched {
                    Unfetched::Refused(reason) => ApiError::BadRequest(at(reason)),
                    Unfetched::Failed(reason) => ApiError::BadGateway(at(reason)),
                })
            })?;
        }
        Ok((sample, budget.into_charge()))
    };
    if !are_fetched {
        return in_turn((&app.asset_reads, owner), read).await;
    }
    // Whatever waits does so no longer than its client: a turn, the name of a host.
    tokio::time::timeout_at(deadline.into(), in_turn((&app.asset_fetches, owner), read)).await.unwrap_or_else(|_| {
        let seconds = limits::ASSET_FETCH_TIME_MAX.as_secs();
        Err(ApiError::Busy(format!(
            "prompt: the pictures that it points to were not there after {seconds} s; send this request again later"
        )))
    })
}
