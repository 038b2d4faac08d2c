//! Training runs and checkpoints, to look at. A run is a model in training, or one of which checkpoints are left.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::app::App;
use crate::auth::Owner;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, check_name};
use crate::payload::Payload;
use crate::routes::account::{PROJECT, USER};
use crate::routes::listing::{Entries, listed};
use crate::store::CheckpointRecord;
use crate::wire::json::{InProject, Page, WeightsInfo};

/// `GET training_runs`: most recently used first; of one project, or of all.
pub async fn list(State(app): State<Arc<App>>, Owner(owner): Owner, page: Page, asked: InProject) -> ApiResult<Response> {
    #[derive(Serialize)]
    struct Runs<T> {
        training_runs: T,
        cursor: Cursor,
    }

    listed(&app, &owner, move |app, answer| {
        let checkpoints = app.store.list(None);
        let is_wanted = |project: &str| asked.project_id.as_ref().is_none_or(|id| **id == *project);
        let mut runs: BTreeMap<String, OffsetDateTime> = BTreeMap::new();
        for (id, model) in app.registry.models() {
            let project = app.registry.project_of_model(&id).ok().flatten();
            if is_wanted(project.as_deref().unwrap_or(PROJECT)) {
                runs.insert(id, model.last_request_at);
            }
        }
        for record in checkpoints.iter().filter(|record| is_wanted(&project_of(app, record))) {
            let last = runs.entry(record.run.clone()).or_insert(record.created_at);
            *last = (*last).max(record.created_at);
        }
        let mut runs: Vec<(String, OffsetDateTime)> = runs.into_iter().collect();
        runs.sort_by_key(|(_, last)| std::cmp::Reverse(*last));
        let (offset, limit) = (page.offset.unwrap_or(0), page.limit.unwrap_or(20).min(limits::PAGE_MAX));
        let cursor = Cursor { offset, limit, total_count: runs.len() };
        let shown = runs.iter().skip(offset).take(limit);
        answer.write(&Runs { training_runs: Entries(shown.filter_map(|(id, _)| Run::of(app, id, &checkpoints))), cursor })
    })
    .await
}

/// The project of a checkpoint: that of its session now, or what is recorded where that is not known any more.
pub fn project_of(app: &App, record: &CheckpointRecord) -> String {
    let project = app.registry.project_of_model(&record.run).unwrap_or_else(|_| record.project_id.clone());
    project.unwrap_or_else(|| PROJECT.into())
}

/// `GET training_runs/{run}`
pub async fn get(State(app): State<Arc<App>>, Owner(owner): Owner, Path(run): Path<String>) -> ApiResult<Response> {
    check_name("training run id", &run)?;
    listed(&app, &owner, move |app, answer| {
        let checkpoints = app.store.list(Some(&run));
        let found = Run::of(app, &run, &checkpoints);
        answer.write(&found.ok_or_else(|| ApiError::NotFound(format!("there is no training run {run}")))?)
    })
    .await
}

/// Where a page begins, and of how many entries it is one.
#[derive(Serialize)]
struct Cursor {
    offset: usize,
    limit: usize,
    total_count: usize,
}

/// A run as clients see it.
#[derive(Serialize)]
struct Run<'a> {
    training_run_id: &'a str,
    base_model: String,
    model_owner: &'static str,
    is_lora: bool,
    corrupted: bool,
    lora_rank: usize,
    last_request_time: String,
    last_checkpoint: Option<Checkpoint<'a>>,
    last_sampler_checkpoint: Option<Checkpoint<'a>>,
    user_metadata: RunMetadata<'a>,
}

/// What a user attached to a run: known of the model, or of what was saved of it.
#[derive(Serialize)]
#[serde(untagged)]
enum RunMetadata<'a> {
    Recorded(Option<&'a BTreeMap<String, String>>),
    OfModel(#[serde(serialize_with = "shared")] Arc<BTreeMap<String, String>>),
}

fn shared<S: Serializer>(metadata: &BTreeMap<String, String>, serializer: S) -> Result<S::Ok, S::Error> {
    metadata.serialize(serializer)
}

impl<'a> Run<'a> {
    /// A run, and which of these checkpoints, newest first, are its last.
    fn of(app: &App, run: &'a str, checkpoints: &'a [Arc<CheckpointRecord>]) -> Option<Self> {
        let own = || checkpoints.iter().filter(|record| record.run == run);
        let last_of = |kind: CheckpointKind| own().find(|record| record.kind == kind).map(|last| Checkpoint::of(last));
        let (lora_rank, last_request_at, user_metadata, base_model) = match app.registry.model(run) {
            Ok(model) => {
                let metadata = model.user_metadata.map_or(RunMetadata::Recorded(None), RunMetadata::OfModel);
                (model.lora.rank, model.last_request_at, metadata, app.bases.get(model.base).info.name.clone())
            }
            Err(_) => {
                let newest = own().next()?;
                let metadata = RunMetadata::Recorded(newest.run_metadata.as_ref());
                (newest.lora.rank, newest.created_at, metadata, newest.base_model.clone())
            }
        };
        Some(Run {
            training_run_id: run,
            base_model,
            model_owner: USER,
            is_lora: true,
            corrupted: false,
            lora_rank,
            last_request_time: rfc3339(last_request_at),
            last_checkpoint: last_of(CheckpointKind::Weights),
            last_sampler_checkpoint: last_of(CheckpointKind::SamplerWeights),
            user_metadata,
        })
    }
}

/// Checkpoints as clients see them.
#[derive(Serialize)]
struct Checkpoints<T> {
    checkpoints: T,
    cursor: Cursor,
}

/// `GET training_runs/{run}/checkpoints`: all of them, or a page.
pub async fn checkpoints(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Path(run): Path<String>,
    page: Page,
) -> ApiResult<Response> {
    check_name("training run id", &run)?;
    listed(&app, &owner, move |app, answer| {
        let found = app.store.list(Some(&run));
        if found.is_empty() {
            app.registry.model(&run).map_err(|_| ApiError::NotFound(format!("there is no training run {run}")))?;
        }
        let (total_count, offset) = (found.len(), page.offset.unwrap_or(0));
        let limit = page.limit.map_or(total_count, |limit| limit.min(limits::PAGE_MAX));
        let shown = found.iter().skip(offset).take(limit).map(|record| Checkpoint::of(record));
        answer.write(&Checkpoints { checkpoints: Entries(shown), cursor: Cursor { offset, limit, total_count } })
    })
    .await
}

/// `GET checkpoints`: all of them, newest first.
pub async fn all_checkpoints(State(app): State<Arc<App>>, Owner(owner): Owner, page: Page) -> ApiResult<Response> {
    listed(&app, &owner, move |app, answer| {
        let all = app.store.list(None);
        let (offset, limit) = (page.offset.unwrap_or(0), page.limit.unwrap_or(100).min(limits::PAGE_MAX));
        let shown = all.iter().skip(offset).take(limit).map(|record| Checkpoint::of(record));
        let cursor = Cursor { offset, limit, total_count: all.len() };
        answer.write(&Checkpoints { checkpoints: Entries(shown), cursor })
    })
    .await
}

/// A checkpoint as clients see it.
#[derive(Serialize)]
struct Checkpoint<'a> {
    checkpoint_id: String,
    checkpoint_type: &'static str,
    time: String,
    tinker_path: String,
    size_bytes: u64,
    public: bool,
    user_metadata: Option<&'a BTreeMap<String, String>>,
    expires_at: Option<String>,
}

impl<'a> Checkpoint<'a> {
    fn of(record: &'a CheckpointRecord) -> Self {
        Checkpoint {
            checkpoint_id: format!("{}/{}", record.kind.segment(), record.name),
            checkpoint_type: record.kind.checkpoint_type(),
            time: rfc3339(record.created_at),
            tinker_path: record.id().tinker_path(),
            size_bytes: record.size_bytes,
            public: record.public,
            user_metadata: record.user_metadata.as_ref(),
            expires_at: record.expires_at.map(rfc3339),
        }
    }
}

/// `POST weights_info`: what has to be known of a checkpoint to load it.
pub async fn weights_info(State(app): State<Arc<App>>, body: Payload) -> ApiResult<Json<Value>> {
    let (asked, _held) = body.json::<WeightsInfo>().await?;
    let record = app.store.get(&CheckpointId::parse(&asked.tinker_path)?)?;
    Ok(Json(json!({
        "base_model": record.base_model,
        "is_lora": true,
        "lora_rank": record.lora.rank,
        "train_unembed": record.lora.train_unembed,
        "train_mlp": record.lora.train_mlp,
        "train_attn": record.lora.train_attn,
        "optimizer_config": { "type": "adamw" },
    })))
}

/// A time as the wire has it.
pub fn rfc3339(at: OffsetDateTime) -> String {
    // Only years beyond 9999 cannot be written.
    at.format(&Rfc3339).unwrap_or_default()
}
