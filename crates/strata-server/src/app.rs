//! What all handlers share, and the way from a request to a future.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use strata_engine::api::{Failure, Outcome, Request, Response};
use tokio::sync::{Semaphore, watch};

use crate::error::{ApiError, ApiResult, failure_category};
use crate::futures::{Answer, Begun, Completer, Futures, Retention};
use crate::limits;
use crate::names::shown;
use crate::registry::Registry;
use crate::store::Store;
use crate::submit::Submit;
use crate::transit::Transit;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address to listen on; port 0 takes a free one.
    pub address: SocketAddr,
    /// Key that clients must send. Without one any key is accepted, and the address must be a loopback address.
    pub api_key: Option<String>,
    /// Where checkpoints live.
    pub data_dir: PathBuf,
    /// How long a session may be silent before it ends.
    pub session_timeout: Duration,
    /// How long a poll for a result is held.
    pub poll_hold: Duration,
    /// Bytes of all requests on their way in: bodies as they arrive, inflated and decoded, until they are handed on.
    pub transit_bytes: usize,
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
    pub fn new(address: SocketAddr, data_dir: PathBuf) -> Self {
        ServerConfig {
            address,
            api_key: None,
            data_dir,
            session_timeout: Duration::from_secs(300),
            poll_hold: limits::POLL_HOLD,
            transit_bytes: limits::TRANSIT_BYTES,
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
}

impl ModelInfo {
    /// Refuses other base models. Anything from the first `:` of `asked` on names a variant, such as a context length, and does not count.
    ///
    /// # Errors
    /// If `asked` is another model; the text names the one that is served.
    pub fn check(&self, asked: &str) -> Result<(), String> {
        if asked == self.name || asked.split(':').next() == Some(self.name.as_str()) {
            return Ok(());
        }
        Err(format!("base model {:?} is not served here; this server has {:?}", shown(asked), self.name))
    }
}

/// What all handlers share.
pub struct App {
    /// Settings.
    pub config: ServerConfig,
    /// The base model.
    pub model: ModelInfo,
    /// Outcomes of requests.
    pub futures: Futures,
    /// Sessions, models and sampling sessions.
    pub registry: Registry,
    /// Checkpoints.
    pub store: Store,
    /// Memory of requests on their way in.
    pub transit: Transit,
    /// Turns at decoding large bodies.
    pub decodes: Arc<Semaphore>,
    engine: Arc<dyn Submit>,
    closing: watch::Sender<bool>,
}

impl App {
    /// Opens the data directory.
    ///
    /// # Errors
    /// If the directory cannot be used.
    pub fn new(config: ServerConfig, model: ModelInfo, engine: Arc<dyn Submit>) -> std::io::Result<Arc<Self>> {
        let app = App {
            registry: Registry::new(config.session_timeout),
            store: Store::open(&config.data_dir)?,
            futures: Futures::new(Retention::default()),
            transit: Transit::new(config.transit_bytes),
            decodes: Arc::new(Semaphore::new(limits::DECODES_MAX)),
            closing: watch::Sender::new(false),
            config,
            model,
            engine,
        };
        Ok(Arc::new(app))
    }

    /// Whether the engine works.
    pub fn engine_is_alive(&self) -> bool {
        self.engine.is_alive()
    }

    /// Opens a future for a request that the server accepts at its own place, not in the order of a model. `None` if it was accepted before.
    ///
    /// # Errors
    /// If too much is queued.
    pub fn begin(&self, request_id: &str, cost_bytes: usize) -> ApiResult<Option<Completer>> {
        match self.futures.begin(request_id, cost_bytes) {
            Begun::New(completer) => Ok(Some(completer)),
            Begun::Known => Ok(None),
            Begun::Full => Err(ApiError::Busy("too many requests are queued; send this one again in a moment".into())),
        }
    }

    /// Hands a request to the engine. On the engine's thread, `finish` makes the answer of its future from the response, or `on_failure` is told
    /// that there is none.
    pub fn dispatch(
        self: &Arc<Self>,
        request_id: &str,
        completer: Completer,
        request: Request,
        finish: impl FnOnce(&App, Response) -> Result<Answer, Failure> + Send + 'static,
        on_failure: impl FnOnce(&App, &Failure) + Send + 'static,
    ) {
        let kind = kind_of(&request);
        let is_sample = matches!(request, Request::Sample { .. });
        let (app, request_id, started) = (self.clone(), request_id.to_owned(), Instant::now());
        let reply = move |outcome: Outcome| {
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
                    tracing::error!(request_id, kind, elapsed_us, "failed: {reason}");
                }
                Answer::Failed(Failure::User(reason)) => tracing::warn!(request_id, kind, elapsed_us, "refused: {reason}"),
                // A busy sampler finishes thousands a second.
                _ if is_sample => tracing::debug!(request_id, kind, elapsed_us, "done"),
                _ => tracing::info!(request_id, kind, elapsed_us, "done"),
            }
            // The log has seen the paths; clients do not.
            completer.complete(match answer {
                Answer::Failed(failure) => Answer::Failed(app.for_clients(&failure)),
                answer => answer,
            });
        };
        self.engine.submit(request, Box::new(reply));
    }

    /// Tells the engine something whose outcome nobody waits for.
    pub fn notify_engine(&self, requests: Vec<Request>) {
        for request in requests {
            let kind = kind_of(&request);
            let reply = move |outcome: Outcome| {
                if let Err(failure) = outcome {
                    tracing::warn!(kind, category = failure_category(&failure), "{failure}");
                }
            };
            self.engine.submit(request, Box::new(reply));
        }
    }

    /// Hands a request to the engine whose failure changes the registry, and whose outcome nobody waits for.
    pub fn submit(self: &Arc<Self>, request: Request, on_failure: impl FnOnce(&App, &Failure) + Send + 'static) {
        let app = self.clone();
        let reply = move |outcome: Outcome| {
            if let Err(failure) = outcome {
                tracing::warn!(category = failure_category(&failure), "{failure}");
                on_failure(&app, &app.for_clients(&failure));
            }
        };
        self.engine.submit(request, Box::new(reply));
    }

    /// A failure without the server's own paths in it: a checkpoint goes by its `tinker://` path, and the rest of the data directory by what
    /// it is.
    fn for_clients(&self, failure: &Failure) -> Failure {
        let prefix = |dir: &Path| format!("{}/", dir.display().to_string().trim_end_matches('/'));
        let (data_dir, checkpoints_dir) = (prefix(&self.config.data_dir), prefix(&self.config.data_dir.join("checkpoints")));
        let without_paths =
            |text: &str| text.replace(&checkpoints_dir, "tinker://").replace(&data_dir, "the data directory's ");
        match failure {
            Failure::User(text) => Failure::User(without_paths(text)),
            Failure::Server(text) => Failure::Server(without_paths(text)),
        }
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
        let now = Instant::now();
        for (session_id, freed) in self.registry.expire(now) {
            tracing::info!(session_id, "session ended: no heartbeat for {} s", self.config.session_timeout.as_secs());
            self.notify_engine(freed);
        }
        self.futures.sweep(now);
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
    }
}
