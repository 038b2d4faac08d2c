//! What the server asks of an engine; tests put a scripted one in its place.

use strata_engine::api::{Client, Refusal, Request, RequestId};
use strata_engine::ledger::Ledger;
use strata_engine::{EngineHandle, Reply};

/// Something that takes requests and answers each that it accepts exactly once.
pub trait Submit: Send + Sync + 'static {
    /// Accepts a request, or drops `reply` and says why.
    fn submit(&self, id: RequestId, client: Client, request: Request, reply: Reply) -> Result<(), Refusal>;

    /// Whether requests are still being worked on.
    fn is_alive(&self) -> bool;

    /// The account that requests and results are charged to.
    fn ledger(&self) -> &Ledger;
}

impl Submit for EngineHandle {
    fn submit(&self, id: RequestId, client: Client, request: Request, reply: Reply) -> Result<(), Refusal> {
        EngineHandle::submit(self, id, client, request, reply)
    }

    fn is_alive(&self) -> bool {
        EngineHandle::is_alive(self)
    }

    fn ledger(&self) -> &Ledger {
        EngineHandle::ledger(self)
    }
}
