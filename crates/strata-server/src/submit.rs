//! What the server asks of an engine; tests put a scripted one in its place.

use strata_engine::api::Request;
use strata_engine::{EngineHandle, Reply};

/// Something that takes requests and answers each exactly once.
pub trait Submit: Send + Sync + 'static {
    /// Queues a request.
    fn submit(&self, request: Request, reply: Reply);

    /// Whether requests are still being worked on.
    fn is_alive(&self) -> bool;
}

impl Submit for EngineHandle {
    fn submit(&self, request: Request, reply: Reply) {
        EngineHandle::submit(self, request, reply);
    }

    fn is_alive(&self) -> bool {
        EngineHandle::is_alive(self)
    }
}
