//! The engine thread and the handle that others hold on it.

use strata_model::Model;

use crate::api::{Outcome, Request};

/// Takes the outcome of a request, on the engine's thread: it must be quick and must not block.
pub type Reply = Box<dyn FnOnce(Outcome) + Send>;

/// Limits of the engine, decided at start.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Memory for everything, base weights included, in bytes.
    pub memory_bytes: u64,
}

/// What the server tells clients about the engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Longest sequence, prompt and sample together.
    pub max_context_tokens: usize,
    /// Rows of the vocabulary.
    pub vocab_size: usize,
    /// What computes.
    pub backend: String,
}

/// A cheap handle on the engine thread.
#[derive(Clone)]
pub struct EngineHandle {}

impl EngineHandle {
    /// Starts the engine thread over a model.
    pub fn start(_model: Model, _config: EngineConfig) -> Self {
        unimplemented!()
    }

    /// What the engine serves.
    pub fn info(&self) -> &EngineInfo {
        unimplemented!()
    }

    /// Queues a request. `reply` is called exactly once, also when the engine is dead or dies.
    pub fn submit(&self, _request: Request, _reply: Reply) {
        unimplemented!()
    }

    /// Whether the engine thread is running.
    pub fn is_alive(&self) -> bool {
        unimplemented!()
    }
}
