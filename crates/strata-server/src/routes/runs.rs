//! Training runs and checkpoints, to look at. A run is a model in training, or one of which checkpoints are left.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::{CheckpointId, CheckpointKind, check_name};
use crate::payload::Payload;
use crate::routes::account::{PROJECT, USER};
use crate::store::CheckpointRecord;
use crate::wire::json::{InProject, Page, WeightsInfo};

/// `GET training_runs`: most recently used first; of one project, or of all.
pub async fn list(State(app): State<Arc<App>>, page: Page, asked: InProject) -> ApiResult<Json<Value>> {
    let checkpoints = app.checkpoints(None).await?;
    let is_wanted = |project: &str| asked.project_id.as_ref().is_none_or(|id| **id == *project);
    let mut runs: BTreeMap<String, OffsetDateTime> = BTreeMap::new();
    for (id, model) in app.registry.models() {
        let project = app.registry.project_of_model(&id).ok().flatten();
        if is_wanted(project.as_deref().unwrap_or(PROJECT)) {
            runs.insert(id, model.last_request_at);
        }
    }
    for record in checkpoints.iter().filter(|record| is_wanted(&project_of(&app, record))) {
        let last = runs.entry(record.run.clone()).or_insert(record.created_at);
        *last = (*last).max(record.created_at);
    }
    let mut runs: Vec<(String, OffsetDateTime)> = runs.into_iter().collect();
    runs.sort_by_key(|(_, last)| std::cmp::Reverse(*last));
    let (total_count, offset, limit) = (runs.len(), page.offset.unwrap_or(0), page.limit.unwrap_or(20).min(limits::PAGE_MAX));
    let shown = runs.iter().skip(offset).take(limit).filter_map(|(id, _)| describe_run(&app, id, &checkpoints));
    let shown: Vec<Value> = shown.collect();
    Ok(Json(json!({
        "training_runs": shown,
        "cursor": { "offset": offset, "limit": limit, "total_count": total_count },
    })))
}

/// The project of a checkpoint: that of its session now, or what is recorded where that is not known any more.
pub fn project_of(app: &App, record: &CheckpointRecord) -> String {
    let project = app.registry.project_of_model(&record.run).unwrap_or_else(|_| record.project_id.clone());
    project.unwrap_or_else(|| PROJECT.into())
}

/// `GET training_runs/{run}`
pub async fn get(State(app): State<Arc<App>>, Path(run): Path<String>) -> ApiResult<Json<Value>> {
    check_name("training run id", &run)?;
    let checkpoints = app.checkpoints(Some(run.clone())).await?;
    let described = describe_run(&app, &run, &checkpoints).map(Json);
    described.ok_or_else(|| ApiError::NotFound(format!("there is no training run {run}")))
}

/// A run, and which of these checkpoints, newest first, are its last.
fn describe_run(app: &App, run: &str, checkpoints: &[CheckpointRecord]) -> Option<Value> {
    let checkpoints: Vec<_> = checkpoints.iter().filter(|record| record.run == run).collect();
    let last_of =
        |kind: CheckpointKind| checkpoints.iter().find(|record| record.kind == kind).map(|last| describe_checkpoint(last));
    let (lora_rank, last_request_at, user_metadata, base_model) = match app.registry.model(run) {
        Ok(model) => (model.lora.rank, model.last_request_at, model.user_metadata, app.bases.get(model.base).info.name.clone()),
        Err(_) => {
            let newest = CheckpointRecord::clone(checkpoints.first()?);
            (newest.lora.rank, newest.created_at, newest.run_metadata, newest.base_model)
        }
    };
    Some(json!({
        "training_run_id": run,
        "base_model": base_model,
        "model_owner": USER,
        "is_lora": true,
        "corrupted": false,
        "lora_rank": lora_rank,
        "last_request_time": rfc3339(last_request_at),
        "last_checkpoint": last_of(CheckpointKind::Weights),
        "last_sampler_checkpoint": last_of(CheckpointKind::SamplerWeights),
        "user_metadata": user_metadata,
    }))
}

/// `GET training_runs/{run}/checkpoints`: all of them, or a page.
pub async fn checkpoints(State(app): State<Arc<App>>, Path(run): Path<String>, page: Page) -> ApiResult<Json<Value>> {
    check_name("training run id", &run)?;
    let found = app.checkpoints(Some(run.clone())).await?;
    if found.is_empty() {
        app.registry.model(&run).map_err(|_| ApiError::NotFound(format!("there is no training run {run}")))?;
    }
    let (total_count, offset) = (found.len(), page.offset.unwrap_or(0));
    let limit = page.limit.map_or(total_count, |limit| limit.min(limits::PAGE_MAX));
    let shown: Vec<Value> = found.iter().skip(offset).take(limit).map(describe_checkpoint).collect();
    let cursor = json!({ "offset": offset, "limit": limit, "total_count": total_count });
    Ok(Json(json!({ "checkpoints": shown, "cursor": cursor })))
}

/// `GET checkpoints`: all of them, newest first.
pub async fn all_checkpoints(State(app): State<Arc<App>>, page: Page) -> ApiResult<Json<Value>> {
    let all = app.checkpoints(None).await?;
    let (offset, limit) = (page.offset.unwrap_or(0), page.limit.unwrap_or(100).min(limits::PAGE_MAX));
    let shown: Vec<Value> = all.iter().skip(offset).take(limit).map(describe_checkpoint).collect();
    Ok(Json(json!({
        "checkpoints": shown,
        "cursor": { "offset": offset, "limit": limit, "total_count": all.len() },
    })))
}

fn describe_checkpoint(record: &CheckpointRecord) -> Value {
    json!({
        "checkpoint_id": format!("{}/{}", record.kind.segment(), record.name),
        "checkpoint_type": record.kind.checkpoint_type(),
        "time": rfc3339(record.created_at),
        "tinker_path": record.id().tinker_path(),
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": record.user_metadata,
        "expires_at": record.expires_at.map(rfc3339),
    })
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
