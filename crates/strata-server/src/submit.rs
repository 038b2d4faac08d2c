//! What the server asks of an engine; tests put a scripted one in its place.

use strata_engine::api::{Client, LoraSpec, Refusal, Request, RequestId};
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

    /// Bytes for adapters that are missing now for what a client wants to have.
    fn shortage(&self, client: &Client, wanted: Wanted<'_>) -> u64;

    /// Bytes that dropping sampling weights gives back at once: `None` if there are none, or they are still to be made.
    fn sampler_bytes(&self, sampler_id: &str) -> Option<u64>;
}

/// What needs room for adapters.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// A model to train.
    Model(&'a LoraSpec),
    /// Frozen weights of a model, by its id.
    Snapshot(&'a str),
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

    fn shortage(&self, client: &Client, wanted: Wanted<'_>) -> u64 {
        match wanted {
            Wanted::Model(lora) => self.model_shortage(client, lora),
            Wanted::Snapshot(model_id) => self.snapshot_shortage(model_id),
        }
    }

    fn sampler_bytes(&self, sampler_id: &str) -> Option<u64> {
        EngineHandle::sampler_bytes(self, sampler_id)
    }
}
