//! JSON bodies. A field that is absent, null or at its default means the same; unknown fields are ignored, as newer clients send them.

mod sessions;

use std::collections::BTreeMap;

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use strata_engine::age::{self, Recipient};
use strata_engine::api;

use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::shown;
use crate::registry::Metadata;
use crate::wire::bounded::{List, Map, MetadataTexts, Numbers, Present, Text};
use crate::wire::budget::{Budget, map_bytes};
use crate::wire::input::{Input, ModelInput};
use crate::wire::setting::{self, Setting};
use crate::wire::tensor::{self, CsrIndices};

pub use sessions::{
    AssignProject, CreateSamplingSession, CreateSession, FinishSession, FutureOnly, JoinSamplingSession, RetrieveFutures,
    SearchSessions, SessionOnly, Source, StatusQuery,
};

/// An id of something on this server.
pub type Id = Text<{ limits::ID_BYTES_MAX }>;
/// A short text: a name, a kind, a version.
pub type Name = Text<{ limits::ID_BYTES_MAX }>;
/// A `tinker://` path; its parser refuses those that are too long, and says what a path looks like.
pub type TinkerPath = Text<{ limits::TEXT_BYTES_MAX }>;

/// Null as the default of a type that is not optional.
pub(super) fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn yes() -> bool {
    true
}

/// Body of `copy_weights`.
#[derive(Debug, Deserialize)]
pub struct CopyWeights {
    /// The checkpoint.
    pub source_path: TinkerPath,
    /// The session that gets it, where there is one,
    #[serde(default)]
    pub session_id: Option<Id>,
    /// and the number of the run in it.
    #[serde(default)]
    pub model_seq_id: Option<u64>,
    /// The project that gets it, where there is no session.
    #[serde(default)]
    pub destination_project_id: Option<Name>,
    /// Life of the copy.
    #[serde(default)]
    pub ttl_seconds: Option<i64>,
}

/// Body of requests that name a model only.
#[derive(Debug, Deserialize)]
pub struct ModelOnly {
    /// The model.
    pub model_id: Id,
}

/// Body of `create_model`.
#[derive(Debug, Deserialize)]
pub struct CreateModel {
    /// The session.
    pub session_id: Id,
    /// The number of the model within its session.
    pub model_seq_id: u64,
    /// The base model.
    pub base_model: Name,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<MetadataTexts>,
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
    pub kind: Name,
}

impl OptimizerConfig {
    /// Refuses what is not here.
    ///
    /// # Errors
    /// If it is not AdamW.
    pub fn check(&self) -> Result<(), String> {
        match &*self.kind {
            "adamw" | "adam" => Ok(()),
            other => Err(format!("optimizer {:?} is not supported; this server has adamw", shown(other))),
        }
    }
}

/// Body of `load_weights`, in both of its forms.
#[derive(Debug, Deserialize)]
pub struct LoadWeights {
    /// The session, where the load makes a model.
    #[serde(default)]
    pub session_id: Option<Id>,
    /// The number of that model.
    #[serde(default)]
    pub model_seq_id: Option<u64>,
    /// The base model that the user expects.
    #[serde(default)]
    pub base_model: Option<Name>,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<MetadataTexts>,
    /// The checkpoint.
    pub path: TinkerPath,
    /// Whether to restore the optimizer too.
    #[serde(default, deserialize_with = "null_is_default")]
    pub optimizer: bool,
    /// The optimizer of the new model.
    #[serde(default)]
    pub optimizer_config: Option<OptimizerConfig>,
}

/// What tells the two forms of `load_weights` apart.
#[derive(Debug, Deserialize)]
pub struct LoadKind {
    /// The model, where the load is an operation of one that is there.
    #[serde(default)]
    pub model_id: Option<Present>,
}

/// What every operation of a model has.
#[derive(Debug, Deserialize)]
pub struct OpHead {
    /// The model.
    pub model_id: Id,
    /// Its place in the order of the model's operations.
    pub seq_id: u64,
}

impl OpHead {
    /// The head of an operation of `model_id`.
    pub fn new(model_id: String, seq_id: u64) -> Self {
        OpHead { model_id: Text(model_id), seq_id }
    }
}

/// Body of `optim_step`.
#[derive(Debug, Deserialize)]
pub struct OptimStep {
    /// AdamW settings.
    #[serde(default)]
    adam_params: Option<OptimizerParams>,
    /// Settings of an optimizer by its type.
    #[serde(default)]
    optimizer_params: Option<OptimizerParams>,
}

/// Settings of an optimizer; those that are absent have the defaults of [`api::AdamParams`].
#[derive(Debug, Default, Deserialize)]
struct OptimizerParams {
    #[serde(default, rename = "type")]
    kind: Option<Name>,
    #[serde(default)]
    learning_rate: Hyperparameter,
    #[serde(default)]
    beta1: Hyperparameter,
    #[serde(default)]
    beta2: Hyperparameter,
    #[serde(default)]
    eps: Hyperparameter,
    #[serde(default)]
    weight_decay: Hyperparameter,
    #[serde(default)]
    grad_clip_norm: Hyperparameter,
}

/// A number of a step. Null is not its default: the SDK leaves out what it does not set, and writes NaN and infinities as null.
#[derive(Clone, Copy, Debug, Default)]
enum Hyperparameter {
    #[default]
    Absent,
    Null,
    Number(f64),
}

impl<'de> Deserialize<'de> for Hyperparameter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Hyperparameter::Null, Hyperparameter::Number))
    }
}

impl Hyperparameter {
    fn or(self, name: &str, default: f64) -> Result<f64, String> {
        match self {
            Hyperparameter::Absent => Ok(default),
            Hyperparameter::Number(number) => Ok(number),
            Hyperparameter::Null => Err(format!(
                "{name} is null, which is what a client makes of NaN and infinities; send a number, or leave it out"
            )),
        }
    }
}

impl OptimStep {
    /// The operation it asks for.
    ///
    /// # Errors
    /// If it asks for another optimizer than AdamW, or a setting is null.
    pub fn into_op(self) -> Result<api::TrainOp, String> {
        let params = match (self.adam_params, self.optimizer_params) {
            (Some(params), _) => OptimizerParams { kind: None, ..params },
            (None, params) => params.unwrap_or_default(),
        };
        if let Some(kind) = params.kind {
            OptimizerConfig { kind }.check()?;
        }
        let default = api::AdamParams::default();
        Ok(api::TrainOp::OptimStep(api::AdamParams {
            learning_rate: params.learning_rate.or("learning_rate", default.learning_rate)?,
            beta1: params.beta1.or("beta1", default.beta1)?,
            beta2: params.beta2.or("beta2", default.beta2)?,
            eps: params.eps.or("eps", default.eps)?,
            weight_decay: params.weight_decay.or("weight_decay", default.weight_decay)?,
            grad_clip_norm: params.grad_clip_norm.or("grad_clip_norm", default.grad_clip_norm)?,
        }))
    }
}

/// Body of `save_weights` and `save_weights_for_sampler`.
#[derive(Debug, Deserialize)]
pub struct SaveWeights {
    /// A name for the checkpoint.
    #[serde(default)]
    pub path: Option<TinkerPath>,
    /// The number of the sampling session to make, where there is no name.
    #[serde(default)]
    pub sampling_session_seq_id: Option<u64>,
    /// `snapshot` or `inflight`.
    #[serde(default)]
    pub kind: Option<Name>,
    /// Life of the checkpoint.
    #[serde(default)]
    pub ttl_seconds: Option<i64>,
    /// Whether to replace a checkpoint of the same name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub overwrite: bool,
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<MetadataTexts>,
    /// Keys to encrypt to, where the checkpoint is to be downloaded.
    #[serde(default)]
    age_encryption_recipients: Option<List<Text<{ limits::TEXT_BYTES_MAX }>, { 2 * age::RECIPIENTS_MAX }>>,
}

impl SaveWeights {
    /// The keys to encrypt to, checked.
    ///
    /// # Errors
    /// If one is none, or there are too many.
    pub fn recipients(&self) -> Result<Vec<String>, String> {
        let given = self.age_encryption_recipients.as_ref().map_or(&[][..], |given| &given.0);
        at_most("age_encryption_recipients", given.len(), age::RECIPIENTS_MAX)?;
        for (i, text) in given.iter().enumerate() {
            Recipient::parse(text).map_err(|reason| format!("age_encryption_recipients[{i}]: {reason}"))?;
        }
        Ok(given.iter().map(|text| text.0.clone()).collect())
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

/// A number that nobody else draws.
pub fn random_seed() -> u64 {
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
    #[serde(default, deserialize_with = "null_is_default")]
    forward_only: bool,
}

#[derive(Debug, Deserialize)]
struct ForwardBackwardInput {
    data: List<JsonDatum, { limits::DATUMS_MAX }>,
    loss_fn: Text<{ limits::NAME_BYTES_MAX }>,
    #[serde(default)]
    loss_fn_config: Option<Map<Setting, { limits::LOSS_SETTINGS_MAX }>>,
}

#[derive(Debug, Deserialize)]
struct JsonDatum {
    model_input: ModelInput,
    #[serde(default, deserialize_with = "null_is_default")]
    loss_fn_inputs: Map<TensorData, { limits::LOSS_INPUTS_MAX }>,
}

/// A tensor of numbers, dense or by compressed sparse rows.
#[derive(Debug, Deserialize)]
pub(super) struct TensorData {
    data: Numbers,
    dtype: Name,
    #[serde(default)]
    shape: Option<List<i64, 8>>,
    #[serde(default)]
    sparse_crow_indices: Indices,
    #[serde(default)]
    sparse_col_indices: Indices,
}

type Indices = Option<List<i64, { usize::MAX }>>;

fn csr_indices(row_offsets: Indices, columns: Indices) -> Result<Option<CsrIndices>, String> {
    match (row_offsets, columns) {
        (None, None) => Ok(None),
        (Some(row_offsets), Some(columns)) => Ok(Some(CsrIndices { row_offsets: row_offsets.0, columns: columns.0 })),
        _ => Err("a sparse tensor needs both sparse_crow_indices and sparse_col_indices".into()),
    }
}

impl TensorData {
    fn into_loss_input(self, budget: &Budget) -> Result<api::LossInput, String> {
        let values = match (&*self.dtype, self.data) {
            ("float32", Numbers::F32(values)) => api::LossValues::F32(values),
            ("float32", Numbers::I64(values)) => {
                budget.take_values::<f32>(values.len())?;
                api::LossValues::F32(values.into_iter().map(|value| value as f32).collect())
            }
            ("int64", Numbers::I64(values)) => api::LossValues::I64(values),
            ("int64", Numbers::F32(_)) => return Err("int64 data has a value that is no integer of 64 bits".into()),
            (other, _) => return Err(format!("dtype {:?} is neither float32 nor int64", shown(other))),
        };
        let sparse = csr_indices(self.sparse_crow_indices, self.sparse_col_indices)?;
        tensor::loss_input(values, &self.shape.unwrap_or_default().0, sparse, budget)
    }

    /// Token ids for positions of a prompt. Whether they fit it, the engine knows.
    ///
    /// # Errors
    /// If they are not a matrix of integers.
    pub(super) fn into_prompt_targets(self) -> Result<api::PromptTargets, String> {
        let ids = match (&*self.dtype, self.data) {
            ("int64", Numbers::I64(ids)) => ids,
            ("int64", Numbers::F32(_)) => return Err("int64 data has a value that is no integer of 64 bits".into()),
            (other, _) => return Err(format!("dtype {:?} is not int64, that of token ids", shown(other))),
        };
        let shape = self.shape.unwrap_or_default().0;
        let extents: Vec<usize> = shape.iter().filter_map(|&extent| usize::try_from(extent).ok()).collect();
        let (&[rows, columns], 2) = (&extents[..], shape.len()) else {
            return Err(format!("shape {shape:?} is not [prompt tokens - 1, k]"));
        };
        let cells = match csr_indices(self.sparse_crow_indices, self.sparse_col_indices)? {
            None => api::Cells::All,
            Some(CsrIndices { row_offsets, columns }) => api::Cells::Csr { row_offsets, columns },
        };
        Ok(api::PromptTargets { shape: [rows, columns], cells, ids })
    }
}

impl ForwardBackward {
    /// The operation it asks for; `forward_only` also where the path says so.
    ///
    /// # Errors
    /// If an example has chunks that are neither text nor pictures, or a tensor that contradicts itself, or goes beyond the budget.
    pub fn into_op(self, forward_only: bool, budget: &Budget) -> Result<api::TrainOp, String> {
        let input = self.forward_backward_input;
        budget.take_values::<api::Datum>(input.data.0.len())?;
        let mut data = Vec::with_capacity(input.data.0.len());
        for (i, datum) in input.data.0.into_iter().enumerate() {
            let input = datum.model_input.into_input(budget).and_then(Input::without_assets);
            let (tokens, images) = input.map_err(|error| format!("datum {i}: {error}"))?;
            budget.take(map_bytes::<String, api::LossInput>(datum.loss_fn_inputs.0.len()))?;
            let mut loss_inputs = BTreeMap::new();
            for (name, tensor) in datum.loss_fn_inputs.0 {
                let tensor = tensor.into_loss_input(budget);
                let tensor = tensor.map_err(|error| format!("datum {i}: loss_fn_inputs[{:?}]: {error}", shown(&name)))?;
                loss_inputs.insert(name, tensor);
            }
            data.push(api::Datum { tokens, images, loss_inputs });
        }
        let settings = input.loss_fn_config.map(|config| config.0).unwrap_or_default().into_iter();
        let config = setting::numbers(&input.loss_fn, settings.map(|(name, setting)| (name, Some(setting))))?;
        Ok(api::TrainOp::ForwardBackward {
            data,
            loss: api::LossSpec { name: input.loss_fn.0, config },
            forward_only: forward_only || self.forward_only,
        })
    }
}

/// Body of `weights_info`.
#[derive(Debug, Deserialize)]
pub struct WeightsInfo {
    /// The checkpoint.
    pub tinker_path: TinkerPath,
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
        query(parts)
    }
}

/// Query of what is asked of one project, or of all.
#[derive(Debug, Default, Deserialize)]
pub struct InProject {
    /// The project.
    #[serde(default)]
    pub project_id: Option<Name>,
}

impl<S: Send + Sync> FromRequestParts<S> for InProject {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> ApiResult<Self> {
        query(parts)
    }
}

fn query<T: DeserializeOwned>(parts: &Parts) -> ApiResult<T> {
    Query::<T>::try_from_uri(&parts.uri).map(|Query(asked)| asked).map_err(|error| {
        let query = parts.uri.query().unwrap_or_default();
        ApiError::bad(format!("query {:?}: {}", shown(query), shown(&error.body_text())))
    })
}

/// Metadata as it is kept and given back.
pub fn metadata(given: Option<MetadataTexts>) -> Metadata {
    given.map(|texts| texts.0.into())
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
    use crate::tests::{peak_bytes, with_budget};
    use crate::wire::guard::parse;

    fn parsed<T: serde::de::DeserializeOwned>(body: &str) -> Result<T, String> {
        with_budget(16 << 20, |budget| parse(body.as_bytes(), budget))
    }

    #[test]
    fn an_optimizer_that_is_not_here_is_refused() {
        let step = |body: &str| parsed::<OptimStep>(body).unwrap().into_op();
        let op = step(r#"{"adam_params": {"learning_rate": 0.5}}"#).unwrap();
        assert!(matches!(op, api::TrainOp::OptimStep(params) if params.learning_rate == 0.5 && params.beta2 == 0.95));
        let op = step(r#"{"optimizer_params": {"type": "adamw", "learning_rate": 1}}"#).unwrap();
        assert!(matches!(op, api::TrainOp::OptimStep(params) if params.learning_rate == 1.0 && params.beta1 == 0.9));
        assert!(step(r#"{"optimizer_params": {"type": "dimuon", "learning_rate": 1}}"#).unwrap_err().contains("dimuon"));
        for name in ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"] {
            let error = step(&format!(r#"{{"adam_params": {{"{name}": null}}}}"#)).unwrap_err();
            assert!(error.starts_with(&format!("{name} is null")), "{error}");
        }
    }

    #[test]
    fn metadata_comes_back_as_text() {
        let body = r#"{"a": "x", "b": 3, "c": [1.5, {"d\"": null, "e": "f"}, true], "g": "\u00e9"}"#;
        let texts = parsed::<MetadataTexts>(body).unwrap().0;
        let values: Vec<&str> = texts.values().map(String::as_str).collect();
        assert_eq!(values, ["x", "3", r#"[1.5,{"d\"":null,"e":"f"},true]"#, "é"]);
    }

    #[test]
    fn lists_and_texts_are_refused_at_the_first_entry_too_many() {
        for (body, word) in [
            (format!(r#"{{"model_id": "{}"}}"#, "x".repeat(513)), "512"),
            (format!(r#"{{"model_id": {{"a": "{}"}}}}"#, "x".repeat(100_000)), "invalid type"),
            (format!(r#"{{"model_id": ["{}"]}}"#, "x".repeat(100_000)), "invalid type"),
        ] {
            let error = parsed::<ModelOnly>(&body).unwrap_err();
            assert!(error.contains(word) && error.len() < 2000, "{error}");
        }
        let shape = format!(r#"{{"data": [], "dtype": "int64", "shape": [{}1]}}"#, "1,".repeat(8));
        assert!(parsed::<TensorData>(&shape).unwrap_err().contains("at most 8"));
        let metadata = format!(r#"{{"user_metadata": {{"a": [{}1]}}}}"#, "1,".repeat(50_000));
        assert!(parsed::<CreateSession>(&metadata).unwrap_err().contains("user_metadata"));
        let many: Vec<String> = (0..2000).map(|i| format!(r#""{i}": 1"#)).collect();
        let metadata = format!(r#"{{"user_metadata": {{{}}}}}"#, many.join(","));
        assert!(parsed::<CreateSession>(&metadata).unwrap_err().contains("1024"));
    }

    #[test]
    fn a_text_in_the_wrong_place_is_not_repeated_at_length() {
        let body = format!(r#"{{"data": "{}", "dtype": "int64"}}"#, "\u{7f}".repeat(1 << 20));
        let (refused, peak) = peak_bytes(|| parsed::<TensorData>(&body));
        assert!(refused.unwrap_err().contains("limit"));
        assert!(peak < 4 << 20, "{peak}");
    }

    #[test]
    fn numbers_have_the_type_that_the_tensor_says() {
        let values = |body: &str| {
            with_budget(1 << 20, |budget| {
                parse::<TensorData>(body.as_bytes(), budget)?.into_loss_input(budget).map(|input| input.values)
            })
        };
        let floats = |body: &str| match values(body) {
            Ok(api::LossValues::F32(floats)) => floats,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            floats(r#"{"data": [1, 2.5, 3, 1e400], "dtype": "float32"}"#.replace("1e400", "1e30").as_str()),
            [1.0, 2.5, 3.0, 1e30]
        );
        assert_eq!(floats(r#"{"dtype": "float32", "data": [1, -2]}"#), [1.0, -2.0]);
        assert!(matches!(values(r#"{"data": [1, -2], "dtype": "int64"}"#), Ok(api::LossValues::I64(v)) if v == [1, -2]));
        assert!(values(r#"{"data": [1, 2.5], "dtype": "int64"}"#).unwrap_err().contains("no integer"));
        assert!(values(r#"{"data": [1, "2"], "dtype": "int64"}"#).unwrap_err().contains("a number"));
        assert!(values(r#"{"data": [1], "dtype": "int8"}"#).unwrap_err().contains("int8"));
    }

    /// Bodies made to become as large as they can.
    fn greedy_bodies() -> Vec<(&'static str, String)> {
        let datum = |inputs: &str| format!(r#"{{"model_input":{{"chunks":[]}},"loss_fn_inputs":{{{inputs}}}}}"#);
        let pass = |data: String| format!(r#"{{"forward_backward_input":{{"loss_fn":"x","data":[{data}]}}}}"#);
        let many = |what: &str, count: usize| format!("{}{what}", format!("{what},").repeat(count - 1));
        let tensor = |data: &str| format!(r#""a":{{"dtype":"float32","data":[{data}]}}"#);
        vec![
            ("empty examples", pass(many(&datum(""), 20_000))),
            ("examples of one tensor", pass(many(&datum(&tensor("")), 20_000))),
            ("empty chunks", pass(format!(r#"{{"model_input":{{"chunks":[{}]}}}}"#, many("{}", 16_000)))),
            ("integers as floats", pass(datum(&tensor(&many("1", 1 << 20))))),
            ("integers, then a float", pass(datum(&tensor(&(many("1", 1 << 20) + ",0.5"))))),
            ("tokens", pass(format!(r#"{{"model_input":{{"chunks":[{{"tokens":[{}]}}]}}}}"#, many("1", 1 << 20)))),
            ("what is not asked for", format!(r#"{{"x":[{}]}}"#, many("[]", 1 << 20))),
            ("a deep list", format!(r#"{{"forward_backward_input":{}"#, "[".repeat(1 << 20))),
        ]
    }

    #[test]
    fn decoding_stays_within_three_times_the_body_and_the_budget() {
        for budget_bytes in [1 << 20, 64 << 20] {
            for (what, body) in greedy_bodies() {
                let (decoded, peak) = peak_bytes(|| {
                    with_budget(budget_bytes, |budget| {
                        parse::<ForwardBackward>(body.as_bytes(), budget)?.into_op(false, budget)
                    })
                });
                let bound = 3 * (body.len() + budget_bytes);
                assert!(peak <= bound, "{what}: {peak} bytes, above {bound}");
                if budget_bytes == 1 << 20 {
                    assert!(decoded.is_err(), "{what}");
                }
            }
        }
    }
}
