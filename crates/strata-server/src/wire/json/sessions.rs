//! Bodies about sessions, sampling sessions and what is fetched later.

use serde::Deserialize;
use time::OffsetDateTime;

use super::{Id, Name, TinkerPath, null_is_default};
use crate::limits;
use crate::names::shown;
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
    /// Whose it is.
    #[serde(default)]
    pub owner: Option<OwnerQuery>,
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

impl SearchSessions {
    /// Refuses a filter that could only be ignored.
    ///
    /// # Errors
    /// If one says nothing, or what no session could be.
    pub fn check(&self) -> Result<(), String> {
        if self.display_name.as_ref().is_some_and(|name| name.trim().is_empty()) {
            return Err("display_name has no word; leave it out to find sessions of any name".into());
        }
        self.owner.as_ref().map_or(Ok(()), OwnerQuery::check)?;
        let Some(statuses) = &self.statuses else { return Ok(()) };
        if statuses.0.is_empty() {
            return Err("statuses is empty; leave it out to find sessions however they stand".into());
        }
        statuses.0.iter().try_for_each(StatusQuery::check)
    }
}

/// Whose sessions are looked for.
#[derive(Debug, Deserialize)]
pub struct OwnerQuery {
    /// `own`, `accessible` or `user`.
    #[serde(rename = "type")]
    pub kind: Name,
    /// Of `user`: who.
    #[serde(default)]
    pub owner_urns: Option<List<Name, { limits::OWNERS_SOUGHT_MAX }>>,
}

impl OwnerQuery {
    fn check(&self) -> Result<(), String> {
        let urns = self.owner_urns.as_ref().map(|urns| &urns.0[..]);
        match (&*self.kind, urns) {
            ("own" | "accessible", None) | ("user", Some([_, ..])) => Ok(()),
            ("user", _) => Err("owner of type user needs owner_urns, one at least".into()),
            (kind @ ("own" | "accessible"), _) => Err(format!("owner_urns belong to an owner of type user, and not {kind}")),
            (other, _) => Err(format!("owner {:?} is none of own, accessible and user", shown(other))),
        }
    }

    /// Whether what belongs to `owner`, who also asks, is looked for.
    pub fn is(&self, owner: &str) -> bool {
        self.owner_urns.as_ref().is_none_or(|urns| urns.0.iter().any(|urn| **urn == *owner))
    }
}

/// How a session stands, by what the wire calls it.
#[derive(Debug, Deserialize)]
pub struct StatusQuery {
    /// `active`, `cancelled`, `failed` or `client_finished`.
    #[serde(rename = "type")]
    pub kind: Name,
    /// Of `client_finished`: why, one of these.
    #[serde(default)]
    pub reasons: Option<List<Name, 16>>,
}

impl StatusQuery {
    fn check(&self) -> Result<(), String> {
        let reasons = self.reasons.as_ref().map(|reasons| &reasons.0[..]);
        match (&*self.kind, reasons) {
            ("active" | "cancelled" | "failed" | "client_finished", None) => Ok(()),
            ("client_finished", Some([])) => {
                Err("reasons is empty; leave it out to find sessions that finished for any".into())
            }
            ("client_finished", Some(reasons)) => {
                let unknown = reasons.iter().find(|reason| !matches!(&***reason, "success" | "errored" | "interrupted"));
                unknown.map_or(Ok(()), |reason| {
                    Err(format!("reason {:?} is none of success, errored and interrupted", shown(reason)))
                })
            }
            (kind @ ("active" | "cancelled" | "failed"), _) => {
                Err(format!("reasons belong to the status client_finished, and not to {kind}"))
            }
            (other, _) => Err(format!("status {:?} is none of active, cancelled, failed and client_finished", shown(other))),
        }
    }

    /// Whether a status is this, by its kind and by why its client finished, if it did.
    pub fn is(&self, kind: &str, reason: Option<&str>) -> bool {
        let is_reason = |reasons: &List<Name, 16>| reasons.0.iter().any(|wanted| reason == Some(&**wanted));
        *self.kind == *kind && self.reasons.as_ref().is_none_or(is_reason)
    }
}

/// Where a page of sessions ended.
#[derive(Debug, Deserialize)]
pub struct SessionCursor {
    /// The last session on it,
    pub last_session_id: Id,
    /// and when that was made, should it be forgotten meanwhile.
    #[serde(with = "time::serde::rfc3339")]
    pub last_created_at: OffsetDateTime,
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
