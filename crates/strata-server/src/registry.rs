//! Who is here: sessions, the models they train and the sampling sessions they draw from.
//!
//! Everything is behind one std mutex, held for map operations only: never across an await, and never while the engine is called, because
//! the engine may answer at once and its answers come back here. Methods that free something return what the engine has to be told.
//!
//! What is known of a session, a model or a sampling session is charged to its session like a request, until it is forgotten. When the account
//! runs short, sessions that are over are forgotten first; then those that have nothing and are silent end.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use strata_engine::api::{Client, LoraSpec, ModelId, Request, SamplerId};
use strata_engine::ledger::Charge;
use time::OffsetDateTime;

use crate::bases::BaseId;
use crate::clock;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::names::shown;

mod snapshots;

/// What a user attached to something.
pub type Metadata = Option<Arc<BTreeMap<String, String>>>;

/// What it takes of memory.
pub fn metadata_bytes(metadata: &Metadata) -> u64 {
    /// Places in a map, and what the allocator adds.
    const ENTRY: usize = 100;
    metadata.iter().flat_map(|entries| &**entries).map(|(key, value)| key.len() + value.len() + ENTRY).sum::<usize>() as u64
}

/// How a session stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionStatus {
    /// It sends heartbeats.
    Active,
    /// It is over, for this reason; its models and sampling weights are freed.
    Ended(String),
    /// Its client finished it, and said how; the same holds.
    Finished(String),
}

impl SessionStatus {
    /// Why it is over, for whoever asks it for something.
    fn reason(&self) -> &str {
        match self {
            SessionStatus::Active => "it is active",
            SessionStatus::Ended(reason) => reason,
            SessionStatus::Finished(_) => "its client finished the session",
        }
    }
}

/// What a user says of a session.
#[derive(Debug, Default)]
pub struct About {
    /// What is attached to it.
    pub user_metadata: Metadata,
    /// Its name.
    pub display_name: Option<String>,
    /// What the user calls the project that it belongs to.
    pub project_id: Option<String>,
    /// Whether nobody sends heartbeats for it: it is then alive while it samples.
    pub is_shared: bool,
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
    /// What the user calls the project that it belongs to.
    pub project_id: Option<String>,
    /// When it was made.
    pub created_at: OffsetDateTime,
    /// Its models, oldest first.
    pub models: Vec<ModelId>,
    /// Its sampling sessions, oldest first.
    pub samplers: Vec<String>,
    /// Who it is to the engine.
    pub client: Client,
    is_shared: bool,
    /// Its place in the order of all sessions.
    number: u64,
    last_seen: Instant,
    _charge: Arc<Charge>,
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
    /// What it adapts.
    pub base: BaseId,
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
    Snapshot(ModelId),
    /// A model as it was last published; shared by all such sampling sessions of the model.
    Inflight(ModelId),
}

/// A set of weights to sample from.
#[derive(Clone, Debug)]
pub struct SamplingSession {
    /// What its weights adapt.
    pub base: BaseId,
    /// Where its weights come from.
    pub weights: Weights,
    /// How it stands.
    pub state: State,
    session_id: String,
    /// In which order they were made.
    number: u64,
    last_used: Instant,
    running: usize,
    /// Clients that joined it.
    joined: u64,
    _charge: Arc<Charge>,
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
    session_order: BTreeMap<u64, String>,
    sessions_made: u64,
    ended: VecDeque<String>,
    models: HashMap<ModelId, ModelEntry>,
    samplers: HashMap<String, SamplingSession>,
    samplers_made: u64,
}

struct ModelEntry {
    model: TrainedModel,
    session_id: String,
    client: Client,
    _charge: Charge,
}

impl Registry {
    /// No sessions yet. A session that is not heard of for `session_timeout` is over.
    pub fn new(session_timeout: Duration) -> Self {
        Registry { session_timeout, inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes a session under an id that no other has; `charge` pays for what is known of it.
    pub fn create_session(&self, client: Client, about: About, charge: Charge) {
        let About { user_metadata, display_name, project_id, is_shared } = about;
        let mut inner = self.lock();
        inner.sessions_made += 1;
        let (id, number) = (client.session.to_string(), inner.sessions_made);
        let session = Session {
            status: SessionStatus::Active,
            user_metadata,
            display_name,
            project_id,
            created_at: OffsetDateTime::now_utc(),
            is_shared,
            models: Vec::new(),
            samplers: Vec::new(),
            client,
            number,
            last_seen: clock::now(),
            _charge: Arc::new(charge),
        };
        inner.session_order.insert(number, id.clone());
        inner.sessions.insert(id, session);
    }

    /// Who a session is to the engine.
    ///
    /// # Errors
    /// If there is no such session.
    pub fn client(&self, session_id: &str) -> ApiResult<Client> {
        self.lock().sessions.get(session_id).map(|s| s.client.clone()).ok_or_else(|| unknown_session(session_id))
    }

    /// Makes room when memory is short: forgets the session that was over first, with the id of whose results nobody will ask for any more.
    pub fn forget_ended(&self) -> Option<String> {
        let mut inner = self.lock();
        let id = inner.ended.pop_front()?;
        let forgotten = inner.forget(&id);
        drop(inner);
        drop(forgotten);
        Some(id)
    }

    /// Makes room when memory is short: ends and forgets the session that was silent longest, of those that have nothing.
    pub fn end_empty(&self) -> Option<String> {
        let now = clock::now();
        let mut inner = self.lock();
        let is_empty = |s: &Session| {
            s.status == SessionStatus::Active
                && s.models.is_empty()
                && s.samplers.is_empty()
                && now.saturating_duration_since(s.last_seen) > limits::EMPTY_SESSION_PATIENCE
        };
        let stalest = inner.sessions.iter().filter(|(_, s)| is_empty(s)).min_by_key(|(_, s)| s.last_seen);
        let id = stalest.map(|(id, _)| id.clone())?;
        let forgotten = inner.forget(&id);
        drop(inner);
        drop(forgotten);
        Some(id)
    }

    /// Notes that a session is alive.
    ///
    /// # Errors
    /// If it is over, or there is none.
    pub fn heartbeat(&self, session_id: &str) -> ApiResult<()> {
        self.lock().active_session(session_id).map(|session| session.last_seen = clock::now())
    }

    /// Whether a session is alive.
    pub fn is_active(&self, session_id: &str) -> bool {
        self.lock().sessions.get(session_id).is_some_and(|session| session.status == SessionStatus::Active)
    }

    /// Ends a session as its client says; ending it twice is the same as once. Answers whom the engine has to end, if it was not over.
    ///
    /// # Errors
    /// If there is none.
    pub fn finish_session(&self, session_id: &str, how: &str) -> ApiResult<Option<Client>> {
        let mut inner = self.lock();
        let session = inner.sessions.get(session_id).ok_or_else(|| unknown_session(session_id))?;
        match session.status {
            SessionStatus::Active => Ok(inner.end(session_id, SessionStatus::Finished(how.to_owned()))),
            _ => Ok(None),
        }
    }

    /// Notes the project of a session.
    ///
    /// # Errors
    /// If there is none.
    pub fn set_project(&self, session_id: &str, project_id: String) -> ApiResult<()> {
        let mut inner = self.lock();
        let session = inner.sessions.get_mut(session_id).ok_or_else(|| unknown_session(session_id))?;
        session.project_id = Some(project_id);
        Ok(())
    }

    /// Numbers another client of a sampling session; the one that made it is 0.
    ///
    /// # Errors
    /// If there is none.
    pub fn join_sampler(&self, sampler_id: &str) -> ApiResult<u64> {
        let mut inner = self.lock();
        let sampler = inner.samplers.get_mut(sampler_id).ok_or_else(|| unknown_sampler(sampler_id))?;
        sampler.joined += 1;
        Ok(sampler.joined)
    }

    /// Ends sessions that have not been heard of. Answers whom the engine has to end.
    pub fn expire(&self, now: Instant) -> Vec<Client> {
        let mut inner = self.lock();
        let is_expired = |session: &Session| {
            let is_sampling = |id: &String| inner.samplers.get(id).is_some_and(|sampler| sampler.running > 0);
            session.status == SessionStatus::Active
                && now.saturating_duration_since(session.last_seen) > self.session_timeout
                && !(session.is_shared && session.samplers.iter().any(is_sampling))
        };
        let expired = inner.session_order.values().filter(|id| inner.sessions.get(*id).is_some_and(is_expired));
        let expired: Vec<String> = expired.cloned().collect();
        let reason = format!("its session was not heard of for {} s", self.session_timeout.as_secs());
        expired.into_iter().filter_map(|id| inner.end(&id, SessionStatus::Ended(reason.clone()))).collect()
    }

    /// Forgets sessions that were over before many others.
    pub fn forget_surplus(&self) -> Vec<String> {
        let surplus = self.lock().ended.len().saturating_sub(limits::ENDED_SESSIONS_MAX);
        (0..surplus).filter_map(|_| self.forget_ended()).collect()
    }

    /// Session ids, newest first.
    pub fn sessions(&self, offset: usize, limit: usize) -> Vec<String> {
        self.lock().session_order.values().rev().skip(offset).take(limit).cloned().collect()
    }

    /// What is to be shown of sessions that a condition holds for, newest first; as many as `limit`. Those `behind` a session
    /// alone, if there is one: if it is forgotten, those that are no younger than it was, because rather comes one twice than one never.
    pub fn find_sessions<T>(
        &self,
        limit: usize,
        behind: Option<(&str, OffsetDateTime)>,
        condition: impl Fn(&str, &Session) -> bool,
        show: impl Fn(&str, &Session) -> T,
    ) -> Vec<T> {
        // Clients may keep no more of a time.
        let microseconds = |at: OffsetDateTime| at.unix_timestamp_nanos() / 1000;
        let inner = self.lock();
        let last = behind.and_then(|(id, _)| inner.sessions.get(id)).map(|session| session.number);
        let is_behind = |session: &Session| match (last, behind) {
            (Some(last), _) => session.number < last,
            (None, Some((_, at))) => microseconds(session.created_at) <= microseconds(at),
            (None, None) => true,
        };
        let sessions = inner.session_order.values().rev().filter_map(|id| Some((id, inner.sessions.get(id)?)));
        let found = sessions.filter(|(id, session)| is_behind(session) && condition(id, session)).take(limit);
        found.map(|(id, session)| show(id, session)).collect()
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
        (session_id, model_seq_id): (&str, u64),
        (base, lora): (BaseId, LoraSpec),
        user_metadata: Metadata,
        charge: Charge,
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
        session.last_seen = clock::now();
        session.models.push(id.clone());
        let client = session.client.clone();
        let last_request_at = OffsetDateTime::now_utc();
        let model = TrainedModel { base, lora, user_metadata, state: State::Active, last_request_at };
        let entry = ModelEntry { model, session_id: session_id.to_owned(), client, _charge: charge };
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

    /// Notes that a model is asked for something. Answers what it adapts and whose it is.
    ///
    /// # Errors
    /// If there is no such model, or it is gone.
    pub fn use_model(&self, model_id: &str) -> ApiResult<(BaseId, Client)> {
        let mut inner = self.lock();
        let Some(entry) = inner.models.get_mut(model_id) else { return Err(unknown_model(model_id)) };
        if let State::Gone(reason) = &entry.model.state {
            return Err(ApiError::bad(format!("model {} is gone: {reason}", shown(model_id))));
        }
        entry.model.last_request_at = OffsetDateTime::now_utc();
        let (base, client) = (entry.model.base, entry.client.clone());
        if let Some(session) = inner.sessions.get_mut(&*client.session) {
            session.last_seen = clock::now();
        }
        Ok((base, client))
    }

    /// The session of a model.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn session_of_model(&self, model_id: &str) -> ApiResult<String> {
        let inner = self.lock();
        inner.models.get(model_id).map(|entry| entry.session_id.clone()).ok_or_else(|| unknown_model(model_id))
    }

    /// The project of a model's session; `None` if its user named none.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn project_of_model(&self, model_id: &str) -> ApiResult<Option<String>> {
        let inner = self.lock();
        let entry = inner.models.get(model_id).ok_or_else(|| unknown_model(model_id))?;
        Ok(inner.sessions.get(&entry.session_id).and_then(|session| session.project_id.clone()))
    }

    /// Adds a sampling session, unless it is there already. Returns whether it is new, and what the engine has to free for it.
    ///
    /// # Errors
    /// If the session is over or has too many sampling sessions.
    pub fn add_sampler(
        &self,
        session_id: &str,
        sampler_id: &str,
        (base, weights): (BaseId, Weights),
        charge: Charge,
    ) -> ApiResult<(bool, Vec<Request>)> {
        let mut inner = self.lock();
        if let Some(there) = inner.samplers.get(sampler_id) {
            if there.base != base || there.weights != weights {
                return Err(taken(sampler_id));
            }
            return Ok((false, Vec::new()));
        }
        inner.active_session(session_id)?;
        let freed = inner.make_room_for_sampler(session_id, &weights)?;
        inner.samplers_made += 1;
        let sampler = SamplingSession {
            base,
            weights,
            state: State::Active,
            session_id: session_id.to_owned(),
            number: inner.samplers_made,
            last_used: clock::now(),
            running: 0,
            joined: 0,
            _charge: Arc::new(charge),
        };
        inner.samplers.insert(sampler_id.to_owned(), sampler);
        if let Some(session) = inner.sessions.get_mut(session_id) {
            session.last_seen = clock::now();
            session.samplers.push(sampler_id.to_owned());
        }
        Ok((true, freed))
    }

    /// Whether a sampling session is there, and is what is asked for.
    ///
    /// # Errors
    /// If it is of something else.
    pub fn find_sampler(&self, sampler_id: &str, is_of_it: impl FnOnce(BaseId, &Weights) -> bool) -> ApiResult<bool> {
        match self.lock().samplers.get(sampler_id) {
            None => Ok(false),
            Some(there) if is_of_it(there.base, &there.weights) => Ok(true),
            Some(_) => Err(taken(sampler_id)),
        }
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

    /// Notes that samples are to be drawn. Answers what the engine calls the weights, and who asks.
    ///
    /// # Errors
    /// If there is no such sampling session, or its weights are freed.
    pub fn begin_sample(&self, sampler_id: &str) -> ApiResult<(SamplerId, (BaseId, Client))> {
        let mut inner = self.lock();
        let Some(sampler) = inner.samplers.get_mut(sampler_id) else { return Err(unknown_sampler(sampler_id)) };
        if let State::Gone(reason) = &sampler.state {
            return Err(ApiError::bad(format!("sampling session {} is gone: {reason}", shown(sampler_id))));
        }
        sampler.running += 1;
        sampler.last_used = clock::now();
        let (name, base, session_id) = (sampler.engine_name(sampler_id), sampler.base, sampler.session_id.clone());
        let session = inner.sessions.get_mut(&session_id).ok_or_else(|| unknown_session(&session_id))?;
        session.last_seen = clock::now();
        Ok((name, (base, session.client.clone())))
    }

    /// Notes that the samples of one [`Registry::begin_sample`] are drawn, or never will be.
    pub fn end_sample(&self, sampler_id: &str) {
        if let Some(sampler) = self.lock().samplers.get_mut(sampler_id) {
            sampler.running = sampler.running.saturating_sub(1);
            sampler.last_used = clock::now();
        }
    }
}

impl Inner {
    fn active_session(&mut self, session_id: &str) -> ApiResult<&mut Session> {
        let session = self.sessions.get_mut(session_id).ok_or_else(|| unknown_session(session_id))?;
        match &session.status {
            SessionStatus::Active => Ok(session),
            over => Err(ApiError::Gone(format!("session {session_id} is over: {}", over.reason()))),
        }
    }

    fn end(&mut self, session_id: &str, status: SessionStatus) -> Option<Client> {
        let session = self.sessions.get_mut(session_id)?;
        let reason = status.reason().to_owned();
        session.status = status;
        let client = session.client.clone();
        for id in &session.models {
            if let Some(entry) = self.models.get_mut(id)
                && entry.model.state == State::Active
            {
                entry.model.state = State::Gone(reason.clone());
            }
        }
        for id in &session.samplers {
            if let Some(sampler) = self.samplers.get_mut(id)
                && sampler.state == State::Active
            {
                sampler.state = State::Gone(reason.clone());
            }
        }
        self.ended.push_back(session_id.to_owned());
        Some(client)
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

    /// Takes a session out of all tables. What is handed out is to be dropped without the lock: what it holds goes back to the ledger.
    fn forget(&mut self, session_id: &str) -> Option<(Session, Vec<ModelEntry>, Vec<SamplingSession>)> {
        let session = self.sessions.remove(session_id)?;
        let models = session.models.iter().filter_map(|id| self.models.remove(id)).collect();
        let samplers = session.samplers.iter().filter_map(|id| self.samplers.remove(id)).collect();
        self.session_order.remove(&session.number);
        Some((session, models, samplers))
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

fn taken(sampler_id: &str) -> ApiError {
    ApiError::bad(format!(
        "sampling session {} was made before, of something else: each needs a sampling_session_seq_id of its own",
        shown(sampler_id)
    ))
}

fn unknown_sampler(sampler_id: &str) -> ApiError {
    ApiError::NotFound(format!("there is no sampling session {:?}", shown(sampler_id)))
}
