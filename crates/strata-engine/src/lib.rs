//! What runs next: tenants and their adapters, packed training passes, losses, the optimizer and the continuous-batching sampler.
//!
//! Map:
//! - [`api`]: what can be asked and what is answered; plain values.
//! - [`engine`](EngineHandle): the thread and its loop; `state`: what it owns and what each request does; `reply`: answers, exactly once.
//! - `reorder`, `datum`, `losses`, `tenant`, `scheduler`, `optimizer`: training, from arrival to step.
//! - `sampler`: continuous batching on the paged KV cache; `snapshot`: the weights it samples from.
//! - `disk`, `checkpoint`: saving and loading beside the engine thread; `unfinished`: how many saves are owed.
//! - `budget`: memory, divided once; `clock`: time, shared between training and sampling.
//!
//! Invariants:
//! - One thread computes. Every request is answered exactly once, also when that thread dies.
//! - A tenant's operations run in the order of their ids. One that fails takes its place, adds nothing, and later ones go on.
//! - What a request computes does not depend on who else is there: schedules, batches and caches decide when, never what.
//! - Every queue has a limit, named where it is checked. A user's mistake is a [`Failure::User`](api::Failure::User), never a panic.

pub mod api;
mod budget;
mod checkpoint;
mod clock;
mod datum;
mod disk;
mod engine;
mod losses;
mod optimizer;
mod reorder;
mod reply;
mod sampler;
mod scheduler;
mod snapshot;
mod state;
mod tenant;
mod unfinished;

pub use budget::StartError;
pub use engine::{EngineConfig, EngineHandle, EngineInfo};
pub use reply::Reply;
