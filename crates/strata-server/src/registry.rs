//! Who is here: sessions, the models they train and the sampling sessions they draw from.
//!
//! Everything is behind one std mutex, held for map operations only: never across an await, and never while the engine is called, because
//! the engine may answer at once and its answers come back here. Methods that free something return what the engine has to be told.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use strata_engine::api::{LoraSpec, ModelId, Request, SamplerId};
use time::OffsetDateTime;

use crate::error::{ApiError, ApiResult};
use crate::futures::{Begun, Completer};
use crate::limits;
use crate::names::shown;
use crate::sequence::{AcceptedIds, Place};

/// What a user attached to something.
pub type Metadata = Option<BTreeMap<String, String>>;

/// How a session stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionStatus {
    /// It sends heartbeats.
    Active,
    /// It is over, for this reason; its models and sampling weights are freed.
    Ended(String),
}

/// A client process and its forks.
#[derive(Clone, Debug)]
pub struct Session {
    /// How it stands.
    pub status: SessionStatus,
    /// What the user attached to it.
    pub user_metadata: Metadata,
    /// The name the user gave it.
    pub display_name: Option<String>,
    /// Its models, oldest first.
    pub models: Vec<ModelId>,
    /// Its sampling sessions, oldest first.
    pub samplers: Vec<String>,
    last_seen: Instant,
}

/// How a model or a sampling session stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It exists, or is being made.
    Active,
    /// It does not exist any more, or never did, for this reason.
    Gone(String),
}

/// A model that a session trains.
#[derive(Clone, Debug)]
pub struct TrainedModel {
    /// Its adapter.
    pub lora: LoraSpec,
    /// What the user attached to it.
    pub user_metadata: Metadata,
    /// How it stands.
    pub state: State,
    /// When it was last asked for something.
    pub last_request_at: OffsetDateTime,
}

/// Where the weights of a sampling session come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The base model.
    Base,
    /// A checkpoint, by its `tinker://` path.
    Checkpoint(String),
    /// A model as it was at one point of its training.
    Snapshot,
    /// A model as it was last published; shared by all such sampling sessions of the model.
    Inflight(ModelId),
}

/// A set of weights to sample from.
#[derive(Clone, Debug)]
pub struct SamplingSession {
    /// Where its weights come from.
    pub weights: Weights,
    /// How it stands.
    pub state: State,
    session_id: String,
    last_used: Instant,
    running: usize,
}

impl SamplingSession {
    /// What the engine calls the weights of sampling session `id`.
    pub fn engine_name(&self, id: &str) -> SamplerId {
        match &self.weights {
            Weights::Inflight(model_id) => inflight_name(model_id),
            _ => id.to_owned(),
        }
    }
}

/// What the engine calls the weights that all inflight sampling sessions of a model share.
pub fn inflight_name(model_id: &str) -> SamplerId {
    format!("{model_id}:inflight")
}

/// The id of a session's n-th model; clients compute it too.
pub fn model_id(session_id: &str, model_seq_id: u64) -> ModelId {
    format!("{session_id}:train:{model_seq_id}")
}

/// The id of a session's n-th sampling session.
pub fn sampling_session_id(session_id: &str, sampling_session_seq_id: u64) -> String {
    format!("{session_id}:sample:{sampling_session_seq_id}")
}

/// All sessions of a server.
pub struct Registry {
    session_timeout: Duration,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    sessions: HashMap<String, Session>,
    /// Sessions in the order they were made.
    session_order: Vec<String>,
    ended: VecDeque<String>,
    models: HashMap<ModelId, ModelEntry>,
    samplers: HashMap<String, SamplingSession>,
    queued_sequences: usize,
}

struct ModelEntry {
    model: TrainedModel,
    session_id: String,
    accepted: AcceptedIds,
}

impl Registry {
    /// No sessions yet. A session that is not heard of for `session_timeout` is over.
    pub fn new(session_timeout: Duration) -> Self {
        Registry { session_timeout, inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes a session and returns its id.
    ///
    /// # Errors
    /// If there are too many.
    pub fn create_session(&self, user_metadata: Metadata, display_name: Option<String>) -> ApiResult<String> {
        let mut inner = self.lock();
        if inner.sessions.len() - inner.ended.len() >= limits::SESSIONS_MAX {
            return Err(ApiError::Busy(format!("{} sessions are alive, which is the limit", limits::SESSIONS_MAX)));
        }
        let id = uuid::Uuid::new_v4().to_string();
        let session = Session {
            status: SessionStatus::Active,
            user_metadata,
            display_name,
            models: Vec::new(),
            samplers: Vec::new(),
            last_seen: Instant::now(),
        };
        inner.sessions.insert(id.clone(), session);
        inner.session_order.push(id.clone());
        Ok(id)
    }

    /// Notes that a session is alive.
    ///
    /// # Errors
    /// If it is over, or there is none.
    pub fn heartbeat(&self, session_id: &str) -> ApiResult<()> {
        self.lock().active_session(session_id).map(|session| session.last_seen = Instant::now())
    }

    /// Whether a session is alive.
    pub fn is_active(&self, session_id: &str) -> bool {
        self.lock().sessions.get(session_id).is_some_and(|session| session.status == SessionStatus::Active)
    }

    /// Ends a session; ending it twice is the same as once. Returns what the engine has to free.
    ///
    /// # Errors
    /// If there is none.
    pub fn end_session(&self, session_id: &str, reason: &str) -> ApiResult<Vec<Request>> {
        let mut inner = self.lock();
        let session = inner.sessions.get(session_id).ok_or_else(|| unknown_session(session_id))?;
        match session.status {
            SessionStatus::Ended(_) => Ok(Vec::new()),
            SessionStatus::Active => Ok(inner.end(session_id, reason)),
        }
    }

    /// Ends sessions that have not been heard of. Returns their ids and what the engine has to free.
    pub fn expire(&self, now: Instant) -> Vec<(String, Vec<Request>)> {
        let mut inner = self.lock();
        let is_expired = |session: &Session| {
            session.status == SessionStatus::Active && now.saturating_duration_since(session.last_seen) > self.session_timeout
        };
        let expired: Vec<String> =
            inner.sessions.iter().filter(|(_, session)| is_expired(session)).map(|(id, _)| id.clone()).collect();
        let reason = format!("its session was not heard of for {} s", self.session_timeout.as_secs());
        expired
            .into_iter()
            .map(|id| {
                let freed = inner.end(&id, &reason);
                (id, freed)
            })
            .collect()
    }

    /// Session ids, newest first.
    pub fn sessions(&self) -> Vec<String> {
        self.lock().session_order.iter().rev().cloned().collect()
    }

    /// A session by its id.
    ///
    /// # Errors
    /// If there is none.
    pub fn session(&self, session_id: &str) -> ApiResult<Session> {
        self.lock().sessions.get(session_id).cloned().ok_or_else(|| unknown_session(session_id))
    }

    /// Adds a model to a session, unless it is there already. Returns its id and whether it is new.
    ///
    /// # Errors
    /// If the session is over or has too many models.
    pub fn add_model(
        &self,
        session_id: &str,
        model_seq_id: u64,
        lora: LoraSpec,
        user_metadata: Metadata,
    ) -> ApiResult<(ModelId, bool)> {
        let mut inner = self.lock();
        let id = model_id(session_id, model_seq_id);
        if inner.models.contains_key(&id) {
            return Ok((id, false));
        }
        let session = inner.active_session(session_id)?;
        if session.models.len() >= limits::MODELS_PER_SESSION_MAX {
            return Err(ApiError::bad(format!(
                "session {session_id} has {} models, which is the limit",
                limits::MODELS_PER_SESSION_MAX
            )));
        }
        session.last_seen = Instant::now();
        session.models.push(id.clone());
        let last_request_at = OffsetDateTime::now_utc();
        let model = TrainedModel { lora, user_metadata, state: State::Active, last_request_at };
        let entry = ModelEntry { model, session_id: session_id.to_owned(), accepted: AcceptedIds::new() };
        inner.models.insert(id.clone(), entry);
        Ok((id, true))
    }

    /// Takes back a [`Registry::add_model`] whose request could not be accepted, so that it can be sent again.
    pub fn remove_model(&self, model_id: &str) {
        let mut inner = self.lock();
        let Some(entry) = inner.models.remove(model_id) else { return };
        if let Some(session) = inner.sessions.get_mut(&entry.session_id) {
            session.models.retain(|id| id != model_id);
        }
    }

    /// A model by its id, whatever its state.
    ///
    /// # Errors
    /// If there is none.
    pub fn model(&self, model_id: &str) -> ApiResult<TrainedModel> {
        let inner = self.lock();
        inner.models.get(model_id).map(|entry| entry.model.clone()).ok_or_else(|| unknown_model(model_id))
    }

    /// All models, with their ids.
    pub fn models(&self) -> Vec<(ModelId, TrainedModel)> {
        self.lock().models.iter().map(|(id, entry)| (id.clone(), entry.model.clone())).collect()
    }

    /// Notes that a model is no more, for a reason that its users are told. Returns what the engine has to free.
    pub fn end_model(&self, model_id: &str, reason: &str) -> Vec<Request> {
        self.lock().end_model(model_id, reason)
    }

    /// Accepts an operation of a model: once for each id, in any order. `begin` is asked to open its future, urgently or not.
    /// `None` if it was accepted before.
    ///
    /// # Errors
    /// If there is no such model, the id is impossible, or too much is queued.
    pub fn accept(&self, model_id: &str, seq_id: u64, begin: impl FnOnce(bool) -> Begun) -> ApiResult<Option<Completer>> {
        let mut inner = self.lock();
        let Some(entry) = inner.models.get_mut(model_id) else { return Err(unknown_model(model_id)) };
        if let State::Gone(reason) = &entry.model.state {
            return Err(ApiError::bad(format!("model {model_id} is gone: {reason}")));
        }
        if seq_id == 0 {
            return Err(ApiError::bad("seq_id 0 is the creation of the model; operations count from 1"));
        }
        let place = entry.accepted.place(seq_id);
        if place == Place::Seen {
            return Ok(None);
        }
        if place == Place::TooFar {
            return Err(ApiError::bad(format!(
                "seq_id {seq_id} of model {model_id} is more than {} ahead of {}, the first that is missing",
                limits::SEQUENCE_AHEAD_MAX,
                entry.accepted.first_missing()
            )));
        }
        let completer = match begin(place == Place::Next) {
            Begun::New(completer) => completer,
            Begun::Known => return Ok(None),
            Begun::Full => return Err(too_busy()),
        };
        entry.accepted.insert(seq_id);
        entry.model.last_request_at = OffsetDateTime::now_utc();
        let session_id = entry.session_id.clone();
        if let Some(session) = inner.sessions.get_mut(&session_id) {
            session.last_seen = Instant::now();
        }
        Ok(Some(completer))
    }

    /// The session of a model.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn session_of_model(&self, model_id: &str) -> ApiResult<String> {
        let inner = self.lock();
        inner.models.get(model_id).map(|entry| entry.session_id.clone()).ok_or_else(|| unknown_model(model_id))
    }

    /// Adds a sampling session, unless it is there already. Returns whether it is new, and what the engine has to free for it.
    ///
    /// # Errors
    /// If the session is over or has too many sampling sessions.
    pub fn add_sampler(&self, session_id: &str, sampler_id: &str, weights: Weights) -> ApiResult<(bool, Vec<Request>)> {
        let mut inner = self.lock();
        if inner.samplers.contains_key(sampler_id) {
            return Ok((false, Vec::new()));
        }
        inner.active_session(session_id)?;
        let freed = inner.make_room_for_sampler(session_id, &weights)?;
        let sampler = SamplingSession {
            weights,
            state: State::Active,
            session_id: session_id.to_owned(),
            last_used: Instant::now(),
            running: 0,
        };
        inner.samplers.insert(sampler_id.to_owned(), sampler);
        if let Some(session) = inner.sessions.get_mut(session_id) {
            session.last_seen = Instant::now();
            session.samplers.push(sampler_id.to_owned());
        }
        Ok((true, freed))
    }

    /// Takes back a [`Registry::add_sampler`] whose request could not be accepted, so that it can be sent again.
    pub fn remove_sampler(&self, sampler_id: &str) {
        let mut inner = self.lock();
        let Some(sampler) = inner.samplers.remove(sampler_id) else { return };
        if let Some(session) = inner.sessions.get_mut(&sampler.session_id) {
            session.samplers.retain(|id| id != sampler_id);
        }
    }

    /// A sampling session by its id, whatever its state.
    ///
    /// # Errors
    /// If there is none.
    pub fn sampler(&self, sampler_id: &str) -> ApiResult<SamplingSession> {
        self.lock().samplers.get(sampler_id).cloned().ok_or_else(|| unknown_sampler(sampler_id))
    }

    /// Notes that a sampling session is no more, for a reason that its users are told.
    pub fn end_sampler(&self, sampler_id: &str, reason: &str) {
        if let Some(sampler) = self.lock().samplers.get_mut(sampler_id) {
            sampler.state = State::Gone(reason.to_owned());
        }
    }

    /// Notes that `num_samples` sequences are to be drawn. Returns what the engine calls the weights.
    ///
    /// # Errors
    /// If there is no such sampling session, its weights are freed, or too much is queued.
    pub fn begin_sample(&self, sampler_id: &str, num_samples: usize) -> ApiResult<SamplerId> {
        let mut inner = self.lock();
        let queued = inner.queued_sequences.saturating_add(num_samples);
        let Some(sampler) = inner.samplers.get_mut(sampler_id) else { return Err(unknown_sampler(sampler_id)) };
        if let State::Gone(reason) = &sampler.state {
            return Err(ApiError::bad(format!("sampling session {sampler_id} is gone: {reason}")));
        }
        if queued > limits::QUEUED_SEQUENCES_MAX {
            return Err(too_busy());
        }
        sampler.running += 1;
        sampler.last_used = Instant::now();
        let (name, session_id) = (sampler.engine_name(sampler_id), sampler.session_id.clone());
        inner.queued_sequences = queued;
        if let Some(session) = inner.sessions.get_mut(&session_id) {
            session.last_seen = Instant::now();
        }
        Ok(name)
    }

    /// Notes that the sequences of one [`Registry::begin_sample`] are drawn, or never will be.
    pub fn end_sample(&self, sampler_id: &str, num_samples: usize) {
        let mut inner = self.lock();
        inner.queued_sequences = inner.queued_sequences.saturating_sub(num_samples);
        if let Some(sampler) = inner.samplers.get_mut(sampler_id) {
            sampler.running = sampler.running.saturating_sub(1);
            sampler.last_used = Instant::now();
        }
    }
}

impl Inner {
    fn active_session(&mut self, session_id: &str) -> ApiResult<&mut Session> {
        let session = self.sessions.get_mut(session_id).ok_or_else(|| unknown_session(session_id))?;
        match &session.status {
            SessionStatus::Active => Ok(session),
            SessionStatus::Ended(reason) => Err(ApiError::Gone(format!("session {session_id} is over: {reason}"))),
        }
    }

    fn end(&mut self, session_id: &str, reason: &str) -> Vec<Request> {
        let Some(session) = self.sessions.get_mut(session_id) else { return Vec::new() };
        session.status = SessionStatus::Ended(reason.to_owned());
        let (models, samplers) = (session.models.clone(), session.samplers.clone());
        let mut freed = Vec::new();
        for id in models {
            freed.extend(self.end_model(&id, reason));
        }
        for id in samplers {
            if let Some(sampler) = self.samplers.get_mut(&id)
                && sampler.state == State::Active
            {
                sampler.state = State::Gone(reason.to_owned());
                if !matches!(sampler.weights, Weights::Inflight(_)) {
                    freed.push(Request::DropSampler { sampler_id: id });
                }
            }
        }
        self.ended.push_back(session_id.to_owned());
        while self.ended.len() > limits::ENDED_SESSIONS_MAX {
            if let Some(oldest) = self.ended.pop_front() {
                self.forget(&oldest);
            }
        }
        freed
    }

    fn end_model(&mut self, model_id: &str, reason: &str) -> Vec<Request> {
        let Some(ModelEntry { model, .. }) = self.models.get_mut(model_id) else { return Vec::new() };
        if model.state != State::Active {
            return Vec::new();
        }
        model.state = State::Gone(reason.to_owned());
        let mut freed = vec![Request::UnloadModel { model_id: model_id.to_owned() }];
        let mut published = false;
        for sampler in self.samplers.values_mut() {
            if matches!(&sampler.weights, Weights::Inflight(id) if id == model_id) {
                sampler.state = State::Gone(reason.to_owned());
                published = true;
            }
        }
        if published {
            freed.push(Request::DropSampler { sampler_id: inflight_name(model_id) });
        }
        freed
    }

    fn forget(&mut self, session_id: &str) {
        let Some(session) = self.sessions.remove(session_id) else { return };
        for id in &session.models {
            self.models.remove(id);
        }
        for id in &session.samplers {
            self.samplers.remove(id);
        }
        self.session_order.retain(|id| id != session_id);
    }

    /// Frees the least recently used snapshot of a session that has too many. Snapshots are what a reinforcement-learning loop makes at every
    /// step and never deletes.
    fn make_room_for_sampler(&mut self, session_id: &str, weights: &Weights) -> ApiResult<Vec<Request>> {
        let Some(session) = self.sessions.get_mut(session_id) else { return Err(unknown_session(session_id)) };
        if session.samplers.len() >= limits::SAMPLERS_PER_SESSION_MAX {
            // Those that are gone only serve to explain themselves, which they have had time for.
            let is_active = |id: &String| self.samplers.get(id).is_some_and(|s| s.state == State::Active);
            let (active, gone) = std::mem::take(&mut session.samplers).into_iter().partition(is_active);
            session.samplers = active;
            let gone: Vec<String> = gone;
            for id in gone {
                self.samplers.remove(&id);
            }
        }
        if session.samplers.len() >= limits::SAMPLERS_PER_SESSION_MAX {
            return Err(ApiError::bad(format!(
                "session {session_id} has {} sampling sessions, which is the limit",
                limits::SAMPLERS_PER_SESSION_MAX
            )));
        }
        let mut snapshots = Vec::new();
        for id in &session.samplers {
            if let Some(sampler) = self.samplers.get(id)
                && (&sampler.state, &sampler.weights) == (&State::Active, &Weights::Snapshot)
            {
                snapshots.push((sampler.running > 0, sampler.last_used, id.clone()));
            }
        }
        if *weights != Weights::Snapshot || snapshots.len() < limits::SNAPSHOTS_PER_SESSION_MAX {
            return Ok(Vec::new());
        }
        let Some((false, _, oldest)) = snapshots.into_iter().min() else { return Ok(Vec::new()) };
        if let Some(sampler) = self.samplers.get_mut(&oldest) {
            sampler.state = State::Gone(format!(
                "a session keeps its {} most recently used unnamed snapshots; save weights under a name to keep them longer",
                limits::SNAPSHOTS_PER_SESSION_MAX
            ));
        }
        Ok(vec![Request::DropSampler { sampler_id: oldest }])
    }
}

fn unknown_session(session_id: &str) -> ApiError {
    ApiError::NotFound(format!(
        "there is no session {:?}; sessions end with the server, so a client that outlives it has to start anew",
        shown(session_id)
    ))
}

fn unknown_model(model_id: &str) -> ApiError {
    ApiError::NotFound(format!("there is no model {:?} in training", shown(model_id)))
}

fn unknown_sampler(sampler_id: &str) -> ApiError {
    ApiError::NotFound(format!("there is no sampling session {:?}", shown(sampler_id)))
}

fn too_busy() -> ApiError {
    ApiError::Busy("too many requests are queued; send this one again in a moment".into())
}
