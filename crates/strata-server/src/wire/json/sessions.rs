//! Bodies about sessions, sampling sessions and what is fetched later.

use serde::Deserialize;

use super::{Id, Name, TinkerPath, null_is_default};
use crate::limits;
use crate::wire::bounded::{Excerpt, List, MetadataTexts, Text};

/// Body of `create_session`.
#[derive(Debug, Deserialize)]
pub struct CreateSession {
    /// What the user attached.
    #[serde(default)]
    pub user_metadata: Option<MetadataTexts>,
    /// A name for people.
    #[serde(default)]
    pub display_name: Option<Text<{ limits::METADATA_BYTES_MAX }>>,
    /// What the user calls the project that it belongs to.
    #[serde(default)]
    pub project_id: Option<Name>,
    /// Version of the client.
    #[serde(default)]
    pub sdk_version: Option<Name>,
}

/// Body of `sessions/{id}/project`.
#[derive(Debug, Deserialize)]
pub struct AssignProject {
    /// The project.
    pub project_id: Name,
}

/// Body of `sessions/search`. What is absent holds for every session.
#[derive(Debug, Deserialize)]
pub struct SearchSessions {
    /// Its id.
    #[serde(default)]
    pub session_id: Option<Id>,
    /// Its project, one of these.
    #[serde(default)]
    pub project_ids: Option<List<Name, { limits::METADATA_ENTRIES_MAX }>>,
    /// What is attached to it, among others.
    #[serde(default, deserialize_with = "null_is_default")]
    pub user_metadata: MetadataTexts,
    /// Words of its name, in any case.
    #[serde(default)]
    pub display_name: Option<Name>,
    /// How it stands, one of these.
    #[serde(default)]
    pub statuses: Option<List<StatusQuery, 16>>,
    /// Most sessions to answer.
    #[serde(default)]
    pub limit: Option<usize>,
    /// Where the page before ended.
    #[serde(default)]
    pub cursor: Option<SessionCursor>,
}

/// How a session stands, by what the wire calls it.
#[derive(Debug, Deserialize)]
pub struct StatusQuery {
    /// `active`, `cancelled`, `failed` or `client_finished`.
    #[serde(rename = "type")]
    pub kind: Name,
}

/// Where a page of sessions ended.
#[derive(Debug, Deserialize)]
pub struct SessionCursor {
    /// The last session on it.
    pub last_session_id: Id,
}

/// Body of `join_sampling_session`.
#[derive(Debug, Deserialize)]
pub struct JoinSamplingSession {
    /// The sampling session.
    pub sampling_session_id: Id,
}

/// Body of `retrieve_futures`.
#[derive(Debug, Deserialize)]
pub struct RetrieveFutures {
    /// Whose requests.
    pub target: FuturesTarget,
    /// What was answered before.
    #[serde(default, deserialize_with = "null_is_default")]
    pub prev_cursor: u64,
    /// How long to wait at most, in seconds.
    #[serde(default)]
    pub timeout: Option<f64>,
    /// Requests whose results have been read and may be forgotten.
    #[serde(default, deserialize_with = "null_is_default")]
    pub retrieved_request_ids: List<Id, { limits::RETRIEVED_IDS_MAX }>,
}

/// The requests of one client of a sampling session.
#[derive(Debug, Deserialize)]
pub struct FuturesTarget {
    /// The sampling session.
    pub sampling_session_id: Id,
    /// The client.
    #[serde(default, deserialize_with = "null_is_default")]
    pub cloned_sampler_id: u64,
}

/// Body of requests that name a session only.
#[derive(Debug, Deserialize)]
pub struct SessionOnly {
    /// The session.
    pub session_id: Id,
}

/// Body of `sessions/{id}/finish`.
#[derive(Debug, Default, Deserialize)]
pub struct FinishSession {
    /// Why.
    #[serde(default)]
    pub reason: Option<FinishReason>,
    /// More about why.
    #[serde(default)]
    pub detail: Option<Excerpt>,
}

/// Why a client finished its session.
#[derive(Debug, Deserialize)]
pub struct FinishReason {
    /// `success`, `errored` or `interrupted`.
    #[serde(default, rename = "type")]
    pub kind: Option<Name>,
}

/// Body of `retrieve_future` and `cancel_future`.
#[derive(Debug, Deserialize)]
pub struct FutureOnly {
    /// The request whose outcome is wanted.
    pub request_id: Id,
}

/// What weights are sampled, where a request says so itself.
#[derive(Debug, Deserialize)]
pub struct Source {
    /// The base model.
    #[serde(default)]
    pub base_model: Option<Name>,
    /// A checkpoint, which counts if both are there.
    #[serde(default)]
    pub model_path: Option<TinkerPath>,
}

/// Body of `create_sampling_session`.
#[derive(Debug, Deserialize)]
pub struct CreateSamplingSession {
    /// The session.
    pub session_id: Id,
    /// The number of the sampling session within its session.
    pub sampling_session_seq_id: u64,
    /// The base model, where it is to be sampled, or where the user says what a checkpoint belongs to.
    #[serde(default)]
    pub base_model: Option<Name>,
    /// The checkpoint to sample.
    #[serde(default)]
    pub model_path: Option<TinkerPath>,
}
