//! What all handlers share, and the way from a request to a future.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use strata_engine::adapters::Adapters;
use strata_engine::api::{Client, Failure, Outcome, Refusal, Request, Response};
use strata_engine::ledger::{Charge, Ledger, Shortage};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::bases::{Base, BaseId, Bases};
use crate::clock;
use crate::data_dir::DataDir;
use crate::error::{ApiError, ApiResult, failure_category};
use crate::futures::{Answer, Completer, Futures, Retention};
use crate::image_dirs::ImageDirs;
use crate::image_stores::ImageStores;
use crate::limits;
use crate::records::Records;
use crate::registry::Registry;
use crate::store::Store;
use crate::submit::Wanted;
use crate::transit::Transit;
use crate::turns::Turns;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address to listen on; port 0 takes a free one.
    pub address: SocketAddr,
    /// Key that clients must send. Without one any key is accepted, and the address must be a loopback address.
    pub api_key: Option<String>,
    /// Where checkpoints live.
    pub data_dir: DataDir,
    /// What clients reach the server by, for addresses in answers; `None`: the name that each has used itself.
    pub public_url: Option<String>,
    /// Directories that prompts may name pictures in.
    pub image_dirs: ImageDirs,
    /// Object stores that prompts may name pictures in.
    pub image_stores: ImageStores,
    /// How long a session may be silent before it ends.
    pub session_timeout: Duration,
    /// How long a poll for a result is held.
    pub poll_hold: Duration,
    /// Bytes of all requests on their way in: bodies as they arrive, inflated and decoded, until they are handed on.
    pub transit_bytes: usize,
    /// Bytes that what is known of checkpoints takes in memory.
    pub catalogue_bytes: usize,
    /// Bytes of one request body, as sent and inflated; `None`: half of `transit_bytes`, and at most [`limits::BODY_BYTES_MAX`].
    pub body_bytes_max: Option<usize>,
    /// Bytes that one request may become decoded; `None`: half of `transit_bytes`.
    pub request_bytes_max: Option<usize>,
    /// Time in which the headers of a request arrive, from their first byte on.
    pub header_timeout: Duration,
    /// Time in which the body of a request arrives.
    pub body_timeout: Duration,
    /// How long a connection may be open without a request on it.
    pub idle_timeout: Duration,
    /// Connections that are open at the same time; a new one then takes the place of an idle one, or waits.
    pub connections_max: usize,
}

impl ServerConfig {
    /// Settings with the default times and no key.
    pub fn new(address: SocketAddr, data_dir: DataDir) -> Self {
        ServerConfig {
            address,
            api_key: None,
            data_dir,
            public_url: None,
            image_dirs: ImageDirs::default(),
            image_stores: ImageStores::default(),
            session_timeout: Duration::from_secs(300),
            poll_hold: limits::POLL_HOLD,
            transit_bytes: limits::TRANSIT_BYTES,
            catalogue_bytes: limits::CATALOGUE_BYTES_MAX,
            body_bytes_max: None,
            request_bytes_max: None,
            header_timeout: limits::HEADER_TIME_MAX,
            body_timeout: limits::BODY_TIME_MAX,
            idle_timeout: limits::IDLE_TIME_MAX,
            connections_max: limits::CONNECTIONS_MAX,
        }
    }

    /// Bytes of one request body, as sent and inflated.
    pub fn body_bytes_max(&self) -> usize {
        self.body_bytes_max.unwrap_or((self.transit_bytes / 2).min(limits::BODY_BYTES_MAX))
    }

    /// Bytes that one request may become decoded.
    pub fn request_bytes_max(&self) -> usize {
        self.request_bytes_max.unwrap_or(self.transit_bytes / 2)
    }
}

/// The base model as clients see it.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Its name: a Hugging Face name where it has one, because clients derive tokenizers and renderers from it.
    pub name: String,
    /// Its architecture, such as `qwen3`.
    pub architecture: String,
    /// What clients load the tokenizer from: a Hugging Face name or a directory.
    pub tokenizer_id: String,
    /// Longest sequence, prompt and sample together.
    pub max_context_tokens: usize,
    /// What its adapters are read against.
    pub adapters: Adapters,
}

/// An owner, and what is sampled for it: a base model, or a save of a checkpoint.
pub type SharedSource = (Arc<str>, BaseId, Option<(String, Option<String>)>);

/// What all handlers share.
pub struct App {
    /// Settings.
    pub config: ServerConfig,
    /// The base models.
    pub bases: Bases,
    /// Outcomes of requests.
    pub futures: Futures,
    /// Sessions, models and sampling sessions.
    pub registry: Registry,
    /// What is remembered of samples.
    pub records: Records,
    /// Checkpoints.
    pub store: Store,
    /// Memory of requests on their way in.
    pub transit: Transit,
    /// Turns at decoding large bodies.
    pub decodes: Turns,
    /// Turns at reading pictures from directories: storage that does not answer holds up no bodies.
    pub asset_reads: Turns,
    /// Turns at fetching pictures from stores, which hold up no directories.
    pub asset_fetches: Turns,
    /// Turns at accepting requests with pictures, which are decoded for it.
    pub picture_checks: Turns,
    /// Turns at uploading adapters.
    pub uploads: Turns,
    /// Turns at reading adapters and writing them in another form.
    pub conversions: Turns,
    /// Held while a model or a snapshot is registered and handed to its engine, so that a copy of the request finds it there, or not at all.
    pub registering: Mutex<()>,
    /// Sampling sessions of those who sample without one, by owner and source.
    pub shared_samplers: Mutex<HashMap<SharedSource, String>>,
    /// What addresses of files are signed with, for as long as this server lives.
    pub signing_key: [u8; 32],
    closing: watch::Sender<bool>,
}

impl App {
    /// Opens the data directory.
    ///
    /// # Errors
    /// If the directory cannot be used.
    pub fn new(config: ServerConfig, bases: Vec<Base>) -> std::io::Result<Arc<Self>> {
        let mut signing_key = [0; 32];
        getrandom::fill(&mut signing_key).map_err(std::io::Error::other)?;
        let app = App {
            signing_key,
            registering: Mutex::default(),
            shared_samplers: Mutex::default(),
            registry: Registry::new(config.session_timeout),
            records: Records::default(),
            store: Store::open(config.data_dir.clone(), config.catalogue_bytes)?,
            futures: Futures::new(Retention::default()),
            transit: Transit::new(config.transit_bytes),
            decodes: Turns::new(limits::DECODES_MAX),
            uploads: Turns::new(limits::UPLOADS_MAX),
            conversions: Turns::new(limits::CONVERSIONS_MAX),
            picture_checks: Turns::new(limits::PICTURE_CHECKS_MAX),
            asset_reads: Turns::new(limits::ASSET_READS_MAX),
            asset_fetches: Turns::new(limits::ASSET_FETCHES_MAX),
            closing: watch::Sender::new(false),
            config,
            bases: Bases::new(bases),
        };
        let app = Arc::new(app);
        let weak = Arc::downgrade(&app);
        app.ledger().on_shortage(move |_| weak.upgrade().is_some_and(|app| app.make_room()));
        Ok(app)
    }

    /// Gives up what is missed least when memory is short. Answers whether there was anything.
    fn make_room(&self) -> bool {
        if self.futures.evict() || self.records.give_up() {
            return true;
        }
        let forgotten = self.registry.forget_ended().or_else(|| {
            let silent = self.registry.end_empty();
            silent.inspect(|session_id| tracing::info!(session_id, "a silent session without models makes room for others"))
        });
        forgotten.is_some_and(|session_id| {
            self.futures.forget_session(&session_id);
            self.records.forget_session(&session_id);
            true
        })
    }

    /// The account that requests and results are charged to, whichever engine has them.
    pub fn ledger(&self) -> &Ledger {
        self.bases.first().engine.ledger()
    }

    /// Charges a client for something that is kept for it.
    ///
    /// # Errors
    /// If there is no room.
    pub fn charge(&self, client: &Client, bytes: u64) -> ApiResult<Charge> {
        self.ledger().charge(client, bytes).map_err(|shortage| match shortage {
            Shortage::Now { .. } => {
                ApiError::Busy("this server has no room for more at the moment; send it again later".into())
            }
            Shortage::Ever { bytes, bytes_max } => {
                ApiError::TooLarge(format!("this takes {bytes} bytes of memory, above the limit of {bytes_max}"))
            }
        })
    }

    /// Whether every engine works.
    pub fn engine_is_alive(&self) -> bool {
        self.bases.iter().all(|base| base.engine.is_alive())
    }

    /// Hands a request to the engine of a base model. When it is done, `finish` makes the answer of its future from the response, or `on_failure` is told
    /// that there is none.
    ///
    /// # Errors
    /// If the engine refuses it: the future is then closed again, and neither is called.
    pub fn dispatch(
        self: &Arc<Self>,
        request_id: &str,
        (base, client): (BaseId, Client),
        completer: Completer,
        request: Request,
        finish: impl FnOnce(&App, Response) -> Result<Answer, Failure> + Send + 'static,
        on_failure: impl FnOnce(&App, &Failure) + Send + 'static,
    ) -> Result<(), Refusal> {
        let kind = kind_of(&request);
        let is_sample = matches!(request, Request::Sample { .. });
        let (weak, started) = (Arc::downgrade(self), Instant::now());
        let id: Arc<str> = request_id.into();
        let request_id = id.clone();
        let finished = move |outcome: Outcome, charge: Option<Charge>| {
            // A server that is gone has nobody to answer.
            let Some(app) = Weak::upgrade(&weak) else { return };
            let answer = match outcome {
                Ok(response) => finish(&app, response).unwrap_or_else(Answer::Failed),
                Err(failure) => {
                    on_failure(&app, &app.for_clients(&failure));
                    Answer::Failed(failure)
                }
            };
            let elapsed_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
            match &answer {
                Answer::Failed(Failure::Server(reason)) => {
                    tracing::error!(request_id = &*request_id, kind, elapsed_us, "failed: {reason}");
                }
                Answer::Failed(Failure::User(reason)) => {
                    tracing::warn!(request_id = &*request_id, kind, elapsed_us, "refused: {reason}")
                }
                // A busy sampler finishes thousands a second.
                _ if is_sample => tracing::debug!(request_id = &*request_id, kind, elapsed_us, "done"),
                _ => tracing::info!(request_id = &*request_id, kind, elapsed_us, "done"),
            }
            // The log has seen the paths; clients do not.
            let answer = match answer {
                Answer::Failed(failure) => Answer::Failed(app.for_clients(&failure)),
                answer => answer,
            };
            completer.complete(answer, charge);
        };
        let runtime = Handle::try_current().ok();
        let reply = move |outcome: Outcome, charge: Option<Charge>| {
            // The engine's thread is no place to write down a large result.
            let is_large = charge.as_ref().is_some_and(|charge| charge.bytes() > limits::RESULT_INLINE_BYTES_MAX);
            match (&outcome, runtime) {
                (Ok(Response::Sampled(_) | Response::ForwardBackward(_)), Some(runtime)) if is_large => {
                    drop(runtime.spawn_blocking(move || finished(outcome, charge)));
                }
                _ => finished(outcome, charge),
            }
        };
        self.bases.get(base).engine.submit(id, client, request, Box::new(reply))
    }

    /// Tells every engine something whose outcome nobody waits for: those that know nothing of what it names have nothing to do.
    pub fn notify_engine(&self, client: &Client, requests: Vec<Request>) {
        for (request, base) in requests.iter().flat_map(|request| self.bases.iter().map(move |base| (request, base))) {
            let kind = kind_of(request);
            let reply = move |outcome: Outcome, _| {
                if let Err(failure) = outcome {
                    tracing::debug!(kind, category = failure_category(&failure), "{failure}");
                }
            };
            if let Err(refusal) = base.engine.submit(kind.into(), client.clone(), request.clone(), Box::new(reply)) {
                tracing::warn!(kind, "{refusal}");
            }
        }
    }

    /// Gives up snapshots of a client that nobody asks for, if what it wants to have finds room then and does not now.
    pub fn make_adapter_room(&self, (client, base): (&Client, BaseId), wanted: Wanted<'_>) {
        let engine = &self.bases.get(base).engine;
        let shortage = engine.shortage(client, wanted);
        if shortage > 0 {
            let of_model = if let Wanted::Snapshot(model_id) = wanted { Some(model_id) } else { None };
            let bytes_of = |sampler_id: &str| engine.sampler_bytes(sampler_id);
            self.notify_engine(client, self.registry.give_up_snapshots((client, base), of_model, shortage, bytes_of));
        }
    }

    /// Hands a request to the engine whose failure changes the registry, and whose outcome nobody waits for.
    pub fn submit(
        self: &Arc<Self>,
        (base, client): (BaseId, Client),
        request: Request,
        on_failure: impl FnOnce(&App, &Failure) + Send + 'static,
    ) -> Result<(), Refusal> {
        let (kind, weak) = (kind_of(&request), Arc::downgrade(self));
        let reply = move |outcome: Outcome, _| {
            if let (Err(failure), Some(app)) = (outcome, Weak::upgrade(&weak)) {
                tracing::warn!(category = failure_category(&failure), "{failure}");
                on_failure(&app, &app.for_clients(&failure));
            }
        };
        self.bases.get(base).engine.submit(kind.into(), client, request, Box::new(reply))
    }

    /// Ends all that a session has, and all work for it.
    pub fn end_session(&self, client: &Client) {
        self.futures.session_over(&client.session);
        self.records.forget_session(&client.session);
        self.notify_engine(client, vec![Request::EndSession]);
        for session_id in self.registry.forget_surplus() {
            self.futures.forget_session(&session_id);
        }
    }

    /// Stops the work on a request, if it is open, and keeps its result no longer than one that was read.
    pub fn cancel(&self, request_id: &str) {
        self.futures.given_up(request_id);
        let nobody = Client { owner: "".into(), session: "".into() };
        self.notify_engine(&nobody, vec![Request::Cancel { request_id: request_id.into() }]);
    }

    /// A failure without the server's own paths in it: a checkpoint goes by its `tinker://` path, and the rest of the data directory by what
    /// it is.
    fn for_clients(&self, failure: &Failure) -> Failure {
        let prefix = |dir: &Path| format!("{}/", dir.display().to_string().trim_end_matches('/'));
        let dir = self.config.data_dir.path();
        let (data_dir, checkpoints_dir) = (prefix(dir), prefix(&dir.join("checkpoints")));
        let without_paths =
            |text: String| text.replace(&checkpoints_dir, "tinker://").replace(&data_dir, "the data directory's ");
        failure.clone().retold(without_paths)
    }

    /// Ends polls that are being held, so that connections can close.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Waits until the server closes.
    pub async fn closed(&self) {
        // The sender lives as long as this value, so the only way out is that it says so.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// One round of looking for what is over: sessions, results, checkpoints.
    pub async fn reap(self: &Arc<Self>) {
        let now = clock::now();
        for client in self.registry.expire(now) {
            let seconds = self.config.session_timeout.as_secs();
            tracing::info!(session_id = &*client.session, "session ended: no heartbeat for {seconds} s");
            self.end_session(&client);
        }
        self.futures.sweep(now);
        self.records.sweep(now);
        let app = self.clone();
        let swept = tokio::task::spawn_blocking(move || app.store.reap(time::OffsetDateTime::now_utc())).await;
        if let Err(error) = swept {
            tracing::error!("looking for checkpoints whose time is over: {error}");
        }
    }
}

/// What a user is told when the engine answers something that does not belong to the request.
pub fn unexpected(response: &Response) -> Failure {
    let kind = match response {
        Response::Created { .. } => "Created",
        Response::ForwardBackward(_) => "ForwardBackward",
        Response::OptimStep { .. } => "OptimStep",
        Response::Saved { .. } => "Saved",
        Response::Loaded => "Loaded",
        Response::Sampler => "Sampler",
        Response::Sampled(_) => "Sampled",
        Response::Freed => "Freed",
    };
    Failure::Server(format!("the engine answered {kind} to a request of another kind"))
}

/// A JSON answer.
pub fn json_answer(value: &Value) -> Answer {
    Answer::Json(value.to_string().into())
}

/// What a client is told whose request the engine refuses.
pub fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Busy(reason) => ApiError::Busy(reason),
        Refusal::User(reason) => ApiError::BadRequest(reason),
        Refusal::Seen => ApiError::BadRequest(refusal.to_string()),
        Refusal::Stopped => ApiError::Unavailable("the engine is not running: the server has to be restarted".into()),
    }
}

/// The acknowledgement of a request whose outcome is fetched later.
pub fn acknowledged(request_id: &str) -> axum::Json<Value> {
    axum::Json(json!({ "request_id": request_id }))
}

fn kind_of(request: &Request) -> &'static str {
    use strata_engine::api::TrainOp;
    match request {
        Request::CreateModel { .. } => "create_model",
        Request::CreateModelFromCheckpoint { .. } => "create_model_from_checkpoint",
        Request::Train { op: TrainOp::ForwardBackward { forward_only: false, .. }, .. } => "forward_backward",
        Request::Train { op: TrainOp::ForwardBackward { forward_only: true, .. }, .. } => "forward",
        Request::Train { op: TrainOp::OptimStep(_), .. } => "optim_step",
        Request::Train { op: TrainOp::SaveState(_), .. } => "save_state",
        Request::Train { op: TrainOp::SaveSampler(_), .. } => "save_sampler",
        Request::Train { op: TrainOp::Snapshot { .. }, .. } => "snapshot",
        Request::Train { op: TrainOp::LoadState { .. }, .. } => "load_state",
        Request::Train { op: TrainOp::Refused(_), .. } => "refused",
        Request::UnloadModel { .. } => "unload_model",
        Request::CreateSampler { .. } => "create_sampler",
        Request::DropSampler { .. } => "drop_sampler",
        Request::Sample { .. } => "sample",
        Request::Cancel { .. } => "cancel",
        Request::EndSession => "end_session",
    }
}
