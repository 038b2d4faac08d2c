//! The engine thread and the handle that others hold on it.
//!
//! One plain thread owns model, KV cache, tenants and samplers. Requests reach it over a channel; it takes all that have
//! arrived, begins what can begin, runs one piece of device work, and looks again. With nothing to do it sleeps on the channel.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};

use strata_model::{Model, Tokenizer};

use crate::api::Request;
use crate::budget::{Budget, Needs, StartError};
use crate::checkpoint::BaseModel;
use crate::disk::{Disk, Done};
use crate::reply::{PendingReply, Reply};
use crate::state::State;
use crate::unfinished::UnfinishedSaves;

/// Limits of the engine, decided at start.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Memory for everything, base weights included, in bytes.
    pub memory_bytes: u64,
    /// Name of the base model, written into checkpoints.
    pub base_model: String,
}

/// What the server tells clients about the engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Longest sequence, prompt and sample together. The model's own limit, or less if memory does not allow it.
    pub max_context_tokens: usize,
    /// Rows of the vocabulary.
    pub vocab_size: usize,
    /// What computes.
    pub backend: String,
}

/// What reaches the engine thread.
pub(crate) enum Message {
    /// A request and whom to answer.
    Request(Request, PendingReply),
    /// A checkpoint was read or written.
    Disk(Done),
}

/// A cheap handle on the engine thread. When the last one is dropped the thread ends, after the saves in work are written; what has not
/// been answered then fails.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    messages: Sender<Message>,
    alive: Arc<AtomicBool>,
    info: EngineInfo,
    unfinished_saves: UnfinishedSaves,
}

impl EngineHandle {
    /// Starts the engine thread over a model. Without a tokenizer, requests with stop strings fail.
    ///
    /// # Errors
    /// If `config.memory_bytes` does not suffice, or the system refuses a thread.
    pub fn start(model: Model, tokenizer: Option<Arc<Tokenizer>>, config: EngineConfig) -> Result<Self, StartError> {
        let budget = Budget::divide(
            config.memory_bytes,
            Needs {
                weight_bytes: model.weight_bytes() as u64,
                kv_page_bytes: model.kv_page_bytes() as u64,
                train_bytes_per_token: model.train_bytes_per_token() as u64,
                max_position_embeddings: model.config().max_position_embeddings,
            },
        )?;
        let info = EngineInfo {
            max_context_tokens: budget.max_context_tokens,
            vocab_size: model.config().vocab_size,
            backend: model.backend().description(),
        };
        tracing::info!(?budget, backend = %info.backend, "engine starts");
        let (messages, queue) = channel();
        let alive = Arc::new(AtomicBool::new(true));
        let shared = Arc::new(Shared { messages, alive: alive.clone(), info, unfinished_saves: UnfinishedSaves::default() });
        let base = BaseModel { name: config.base_model, modules: model.lora_modules().to_vec() };
        let disk = start_disk(base, Arc::downgrade(&shared))?;
        spawn(alive, queue, move |queue| run(State::new(model, budget, tokenizer, disk), queue))?;
        Ok(EngineHandle { shared })
    }

    /// What the engine serves.
    pub fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    /// Queues a request. `reply` is called exactly once, also when the engine is dead or dies.
    pub fn submit(&self, request: Request, reply: Reply) {
        let reply = self.shared.unfinished_saves.counted(&request, reply);
        // A message that cannot be sent is dropped here, which answers it.
        let _ = self.shared.messages.send(Message::Request(request, PendingReply::new(reply)));
    }

    /// How many saves were submitted and are not answered yet. Whoever ends the process waits until there are none, if they are to be kept.
    pub fn saves_in_work(&self) -> usize {
        self.shared.unfinished_saves.owed()
    }

    /// How many saves were not written through a fault of the server, the disk included, since the start.
    pub fn saves_failed(&self) -> usize {
        self.shared.unfinished_saves.failed()
    }

    /// Whether the engine thread is running.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }
}

/// The disk's threads hold the channel weakly: what they do for an engine that nobody holds any more has no one to go to.
fn start_disk(base: BaseModel, shared: Weak<Shared>) -> Result<Disk, StartError> {
    let deliver = move |done| {
        if let Some(shared) = shared.upgrade() {
            let _ = shared.messages.send(Message::Disk(done));
        }
    };
    Disk::start(base, Arc::new(deliver)).map_err(|e| StartError::Thread(e.to_string()))
}

/// Runs `body` on the engine thread.
fn spawn(
    alive: Arc<AtomicBool>,
    queue: Receiver<Message>,
    body: impl FnOnce(&Receiver<Message>) + Send + 'static,
) -> Result<(), StartError> {
    let thread = move || {
        // The guard says so whatever way the thread ends; what is still owed is failed as state and queue are dropped.
        let _dead = MarkDead(alive);
        if catch_unwind(AssertUnwindSafe(|| body(&queue))).is_err() {
            tracing::error!("the engine thread panicked; every request fails from now on");
        }
    };
    let started = std::thread::Builder::new().name("strata-engine".into()).spawn(thread);
    started.map(drop).map_err(|e| StartError::Thread(e.to_string()))
}

struct MarkDead(Arc<AtomicBool>);

impl Drop for MarkDead {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Runs until the last handle is dropped.
fn run(mut state: State, queue: &Receiver<Message>) {
    loop {
        loop {
            match queue.try_recv() {
                Ok(message) => state.take(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        state.advance();
        if state.has_work() {
            state.work();
            continue;
        }
        match queue.recv() {
            Ok(message) => state.take(message),
            Err(RecvError) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::api::{Failure, Outcome};

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn a_panic_kills_the_engine_and_every_request_is_told() {
        let (messages, queue) = channel();
        let alive = Arc::new(AtomicBool::new(true));
        let info = EngineInfo { max_context_tokens: 1, vocab_size: 1, backend: "none".into() };
        let handle = EngineHandle {
            shared: Arc::new(Shared { messages, alive: alive.clone(), info, unfinished_saves: UnfinishedSaves::default() }),
        };
        let submit = || -> Receiver<Outcome> {
            let (tx, rx) = channel();
            let reply = Box::new(move |outcome| drop(tx.send(outcome)));
            handle.submit(Request::DropSampler { sampler_id: "s".into() }, reply);
            rx
        };
        let (taken, queued) = (submit(), submit());
        assert!(handle.is_alive());
        let body = |queue: &Receiver<Message>| {
            let _taken = queue.recv();
            panic!("expected in this test");
        };
        spawn(alive, queue, body).unwrap();
        for reply in [taken, queued] {
            assert!(matches!(reply.recv_timeout(PATIENCE), Ok(Err(Failure::Server(_)))));
        }
        assert!(!handle.is_alive(), "the queue is emptied after the engine is marked dead");
        assert!(matches!(submit().recv_timeout(PATIENCE), Ok(Err(Failure::Server(_)))));
    }
}
