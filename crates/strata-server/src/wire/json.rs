//! JSON bodies. A field that is absent, null or at its default means the same; unknown fields are ignored, as newer clients send them.

use std::collections::BTreeMap;

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use strata_engine::api;

use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::registry::Metadata;
use crate::wire::proto::not_text;
use crate::wire::tensor::{self, CsrIndices, ElementBudget};

/// Null as the default of a type that is not optional.
pub(super) fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn yes() -> bool {
    true
}

/// Body of `create_session`.
#[derive(Debug, Deserialize)]
pub struct CreateSession {
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<serde_json::Map<String, Value>>,
    /// A name for people.
    #[serde(default)]
    pub display_name: Option<String>,
    /// Version of the client.
    #[serde(default)]
    pub sdk_version: Option<String>,
}

/// Body of requests that name a session only.
#[derive(Debug, Deserialize)]
pub struct SessionOnly {
    /// The session.
    pub session_id: String,
}

/// Body of requests that name a model only.
#[derive(Debug, Deserialize)]
pub struct ModelOnly {
    /// The model.
    pub model_id: String,
}

/// Body of `sessions/{id}/finish`.
#[derive(Debug, Default, Deserialize)]
pub struct FinishSession {
    /// Why.
    #[serde(default)]
    pub reason: Option<FinishReason>,
    /// More about why.
    #[serde(default)]
    pub detail: Option<String>,
}

/// Why a client finished its session.
#[derive(Debug, Deserialize)]
pub struct FinishReason {
    /// `success`, `errored` or `interrupted`.
    #[serde(default, rename = "type")]
    pub kind: Option<String>,
}

/// Body of `create_model`.
#[derive(Debug, Deserialize)]
pub struct CreateModel {
    /// The session.
    pub session_id: String,
    /// The number of the model within its session.
    pub model_seq_id: u64,
    /// The base model.
    pub base_model: String,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<serde_json::Map<String, Value>>,
    /// The adapter.
    #[serde(default)]
    pub lora_config: Option<LoraConfig>,
    /// The optimizer.
    #[serde(default)]
    pub optimizer_config: Option<OptimizerConfig>,
}

/// An adapter as the wire has it.
#[derive(Debug, Deserialize)]
pub struct LoraConfig {
    /// Rank of every pair.
    pub rank: usize,
    /// Seed of the initial weights.
    #[serde(default)]
    pub seed: Option<serde_json::Number>,
    /// Whether the unembedding carries LoRA.
    #[serde(default = "yes")]
    pub train_unembed: bool,
    /// Whether MLP projections carry LoRA.
    #[serde(default = "yes")]
    pub train_mlp: bool,
    /// Whether attention projections carry LoRA.
    #[serde(default = "yes")]
    pub train_attn: bool,
}

/// The family of an optimizer.
#[derive(Debug, Deserialize)]
pub struct OptimizerConfig {
    /// `adamw` is the only one here.
    #[serde(rename = "type")]
    pub kind: String,
}

impl OptimizerConfig {
    /// Refuses what is not here.
    ///
    /// # Errors
    /// If it is not AdamW.
    pub fn check(&self) -> Result<(), String> {
        match self.kind.as_str() {
            "adamw" | "adam" => Ok(()),
            other => Err(format!("optimizer {other:?} is not supported; this server has adamw")),
        }
    }
}

/// Body of `load_weights`, in both of its forms.
#[derive(Debug, Deserialize)]
pub struct LoadWeights {
    /// The session, where the load makes a model.
    #[serde(default)]
    pub session_id: Option<String>,
    /// The number of that model.
    #[serde(default)]
    pub model_seq_id: Option<u64>,
    /// The base model that the user expects.
    #[serde(default)]
    pub base_model: Option<String>,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<serde_json::Map<String, Value>>,
    /// The checkpoint.
    pub path: String,
    /// Whether to restore the optimizer too.
    #[serde(default, deserialize_with = "null_is_default")]
    pub optimizer: bool,
    /// The optimizer of the new model.
    #[serde(default)]
    pub optimizer_config: Option<OptimizerConfig>,
}

/// What every operation of a model has.
#[derive(Debug, Deserialize)]
pub struct OpHead {
    /// The model.
    pub model_id: String,
    /// Its place in the order of the model's operations.
    pub seq_id: u64,
}

/// Body of `optim_step`.
#[derive(Debug, Deserialize)]
pub struct OptimStep {
    /// AdamW settings.
    #[serde(default)]
    adam_params: Option<api::AdamParams>,
    /// Settings of an optimizer by its type.
    #[serde(default)]
    optimizer_params: Option<Value>,
}

impl OptimStep {
    /// The operation it asks for.
    ///
    /// # Errors
    /// If it asks for another optimizer than AdamW.
    pub fn into_op(self) -> Result<api::TrainOp, String> {
        let params = match (self.adam_params, self.optimizer_params) {
            (Some(params), _) => params,
            (None, None) => api::AdamParams::default(),
            (None, Some(params)) => {
                if let Some(kind) = params.get("type") {
                    let kind = OptimizerConfig { kind: kind.as_str().unwrap_or_default().into() };
                    kind.check()?;
                }
                serde_json::from_value(params).map_err(|error| format!("optimizer_params: {error}"))?
            }
        };
        Ok(api::TrainOp::OptimStep(params))
    }
}

/// Body of `save_weights` and `save_weights_for_sampler`.
#[derive(Debug, Deserialize)]
pub struct SaveWeights {
    /// A name for the checkpoint.
    #[serde(default)]
    pub path: Option<String>,
    /// The number of the sampling session to make, where there is no name.
    #[serde(default)]
    pub sampling_session_seq_id: Option<u64>,
    /// `snapshot` or `inflight`.
    #[serde(default)]
    pub kind: Option<String>,
    /// Life of the checkpoint.
    #[serde(default)]
    pub ttl_seconds: Option<i64>,
    /// Whether to replace a checkpoint of the same name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub overwrite: bool,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<serde_json::Map<String, Value>>,
}

/// Body of `create_sampling_session`.
#[derive(Debug, Deserialize)]
pub struct CreateSamplingSession {
    /// The session.
    pub session_id: String,
    /// The number of the sampling session within its session.
    pub sampling_session_seq_id: u64,
    /// The base model, where it is to be sampled, or where the user says what a checkpoint belongs to.
    #[serde(default)]
    pub base_model: Option<String>,
    /// The checkpoint to sample.
    #[serde(default)]
    pub model_path: Option<String>,
}

/// A prompt or an input, in chunks.
#[derive(Debug, Deserialize)]
pub(super) struct ModelInput {
    chunks: Vec<Chunk>,
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    tokens: Option<Vec<i64>>,
}

impl ModelInput {
    /// Its tokens.
    ///
    /// # Errors
    /// If a chunk is not text.
    pub(super) fn into_tokens(self) -> Result<Vec<i64>, String> {
        let mut tokens = Vec::new();
        for (i, chunk) in self.chunks.into_iter().enumerate() {
            match (chunk.kind.as_deref().unwrap_or("encoded_text"), chunk.tokens) {
                ("encoded_text", Some(chunk_tokens)) => tokens.extend(chunk_tokens),
                ("encoded_text", None) => return Err(format!("model_input chunk {i} has no tokens")),
                (other, _) => return Err(not_text(i, other)),
            }
        }
        Ok(tokens)
    }
}

/// A seed as any integer of up to 64 bits; drawn if there is none.
///
/// # Errors
/// If it is no such integer.
pub fn seed(given: Option<&serde_json::Number>) -> Result<u64, String> {
    let Some(given) = given else { return Ok(random_seed()) };
    let seed = given.as_u64().or_else(|| given.as_i64().map(i64::cast_unsigned));
    seed.ok_or_else(|| format!("seed {given} is not an integer of 64 bits"))
}

fn random_seed() -> u64 {
    getrandom::u64().unwrap_or_else(|_| uuid::Uuid::new_v4().as_u64_pair().0)
}

/// Refuses a value above a limit.
pub(super) fn at_most(what: &str, value: usize, max: usize) -> Result<(), String> {
    if value > max { Err(format!("{what}: {value} is above the limit of {max}")) } else { Ok(()) }
}

/// Body of `forward_backward` as older clients send it.
#[derive(Debug, Deserialize)]
pub struct ForwardBackward {
    #[serde(alias = "forward_input")]
    forward_backward_input: ForwardBackwardInput,
    #[serde(default)]
    forward_only: bool,
}

#[derive(Debug, Deserialize)]
struct ForwardBackwardInput {
    data: Vec<JsonDatum>,
    loss_fn: String,
    #[serde(default)]
    loss_fn_config: Option<BTreeMap<String, f64>>,
}

#[derive(Debug, Deserialize)]
struct JsonDatum {
    model_input: ModelInput,
    #[serde(default)]
    loss_fn_inputs: BTreeMap<String, TensorData>,
}

#[derive(Debug, Deserialize)]
struct TensorData {
    data: Value,
    dtype: String,
    #[serde(default)]
    shape: Option<Vec<i64>>,
    #[serde(default)]
    sparse_crow_indices: Option<Vec<i64>>,
    #[serde(default)]
    sparse_col_indices: Option<Vec<i64>>,
}

impl TensorData {
    fn into_loss_input(self, budget: &mut ElementBudget) -> Result<api::LossInput, String> {
        let values = match self.dtype.as_str() {
            "float32" => api::LossValues::F32(serde_json::from_value(self.data).map_err(|e| e.to_string())?),
            "int64" => api::LossValues::I64(serde_json::from_value(self.data).map_err(|e| e.to_string())?),
            other => return Err(format!("dtype {other:?} is neither float32 nor int64")),
        };
        let sparse = match (self.sparse_crow_indices, self.sparse_col_indices) {
            (None, None) => None,
            (Some(row_offsets), Some(columns)) => Some(CsrIndices { row_offsets, columns }),
            _ => return Err("a sparse tensor needs both sparse_crow_indices and sparse_col_indices".into()),
        };
        tensor::loss_input(values, &self.shape.unwrap_or_default(), sparse, budget)
    }
}

impl ForwardBackward {
    /// The operation it asks for; `forward_only` also where the path says so.
    ///
    /// # Errors
    /// If an example has chunks that are not text, or a tensor that contradicts itself.
    pub fn into_op(self, forward_only: bool) -> Result<api::TrainOp, String> {
        let input = self.forward_backward_input;
        if input.data.len() > limits::DATUMS_MAX {
            return Err(format!("{} examples in one request are above the limit of {}", input.data.len(), limits::DATUMS_MAX));
        }
        let mut budget = ElementBudget::new(limits::LOSS_ELEMENTS_MAX);
        let mut data = Vec::with_capacity(input.data.len());
        for (i, datum) in input.data.into_iter().enumerate() {
            let tokens = datum.model_input.into_tokens().map_err(|error| format!("datum {i}: {error}"))?;
            let mut loss_inputs = BTreeMap::new();
            for (name, tensor) in datum.loss_fn_inputs {
                let tensor = tensor.into_loss_input(&mut budget);
                let tensor = tensor.map_err(|error| format!("datum {i}: loss_fn_inputs[{name:?}]: {error}"))?;
                loss_inputs.insert(name, tensor);
            }
            data.push(api::Datum { tokens, loss_inputs });
        }
        Ok(api::TrainOp::ForwardBackward {
            data,
            loss: api::LossSpec { name: input.loss_fn, config: input.loss_fn_config.unwrap_or_default() },
            forward_only: forward_only || self.forward_only,
        })
    }
}

/// Body of `retrieve_future` and `cancel_future`.
#[derive(Debug, Deserialize)]
pub struct FutureOnly {
    /// The request whose outcome is wanted.
    pub request_id: String,
}

/// Body of `weights_info`.
#[derive(Debug, Deserialize)]
pub struct WeightsInfo {
    /// The checkpoint.
    pub tinker_path: String,
}

/// Body of `.../ttl`.
#[derive(Debug, Deserialize)]
pub struct Ttl {
    /// Life from now on; none: for ever.
    #[serde(default)]
    pub ttl_seconds: Option<i64>,
}

/// Query of listings.
#[derive(Debug, Default, Deserialize)]
pub struct Page {
    /// Entries to skip.
    #[serde(default)]
    pub offset: Option<usize>,
    /// Entries to return.
    #[serde(default)]
    pub limit: Option<usize>,
}

impl<S: Send + Sync> FromRequestParts<S> for Page {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> ApiResult<Self> {
        let page = Query::<Page>::try_from_uri(&parts.uri);
        page.map(|Query(page)| page).map_err(|error| ApiError::bad(format!("query: {}", error.body_text())))
    }
}

/// Parses a body.
///
/// # Errors
/// With serde's message, which names the field and the place.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> ApiResult<T> {
    Ok(serde_json::from_slice(body)?)
}

/// Metadata as text by text, which is how it is given back.
///
/// # Errors
/// If it is above the limit.
pub fn metadata(given: Option<serde_json::Map<String, Value>>) -> Result<Metadata, String> {
    let Some(given) = given else { return Ok(None) };
    let mut size_bytes = 0;
    let mut metadata = BTreeMap::new();
    for (key, value) in given {
        let value = match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        size_bytes += key.len() + value.len();
        metadata.insert(key, value);
    }
    at_most("bytes of user_metadata", size_bytes, limits::METADATA_BYTES_MAX)?;
    Ok(Some(metadata))
}

/// A time to live, checked.
///
/// # Errors
/// If it is outside of what checkpoints may have.
pub fn ttl(seconds: Option<i64>) -> Result<Option<time::Duration>, String> {
    match seconds {
        None => Ok(None),
        Some(seconds) if limits::CHECKPOINT_TTL_SECONDS.contains(&seconds) => Ok(Some(time::Duration::seconds(seconds))),
        Some(seconds) => Err(format!(
            "ttl_seconds {seconds} is not between {} (an hour) and {} (ten years)",
            limits::CHECKPOINT_TTL_SECONDS.start(),
            limits::CHECKPOINT_TTL_SECONDS.end()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_optimizer_that_is_not_here_is_refused() {
        let step = |body: Value| serde_json::from_value::<OptimStep>(body).unwrap().into_op();
        let op = step(json!({"adam_params": {"learning_rate": 0.5}})).unwrap();
        assert!(matches!(op, api::TrainOp::OptimStep(params) if params.learning_rate == 0.5 && params.beta2 == 0.95));
        assert!(step(json!({"optimizer_params": {"type": "dimuon", "learning_rate": 1}})).unwrap_err().contains("dimuon"));
    }

    #[test]
    fn metadata_comes_back_as_text() {
        let given = json!({"a": "x", "b": 3}).as_object().cloned();
        let metadata = metadata(given).unwrap().unwrap();
        assert_eq!((metadata["a"].as_str(), metadata["b"].as_str()), ("x", "3"));
    }
}
