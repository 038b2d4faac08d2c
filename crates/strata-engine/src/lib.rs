//! What runs next: tenants and their adapters, packed training passes, losses, the optimizer and the continuous-batching sampler.
//!
//! Map:
//! - [`api`]: what can be asked and what is answered; plain values.
//! - [`engine`](EngineHandle): the thread and the handle on it; `core`: what the engine owns and one turn of it; `reply`: answers, exactly once.
//! - `admission`: checks a request where it is sent; `intake`: the one keeper of order; [`ledger`]: the account of what requests hold.
//! - `fair`: whose turn it is; `tenant`: a model in training; `sampler`: continuous batching on the paged KV cache.
//! - `compute`: what all of this asks of a model on a device; `device`, `learner`, `losses`, `datum`, `optimizer`: the real one.
//! - `pictures`: pictures among the tokens of inputs; `gallery`: what was seen of them.
//! - [`adapters`]: adapters as files in the forms of other tools.
//! - `fingerprint`: what tells a request that is sent again from another of the same number.
//! - [`age`]: files that are encrypted to whoever asked for them.
//! - `files`: checkpoints that wait to be written or read; `disk`, `checkpoint`: doing it beside the engine thread; `unfinished`: saves that are owed.
//! - `budget`: memory, divided once; `machine`: what engines of several base models share.
//! - `simulation`: all of it over a toy model, a toy disk and a simulated clock.
//!
//! Invariants:
//! - One thread computes. Every accepted request is answered exactly once, also when that thread dies; a refused one never.
//! - A tenant's operations run in the order of their ids. One that fails takes its place, adds nothing, and later ones go on.
//! - What a request computes does not depend on who else is there: schedules, batches and caches decide when, never what.
//! - What was accepted can finish: its memory, its result's and its pages are set aside before. Every queue is paid for from one account,
//!   and a full one refuses at the door. A user's mistake is a [`Failure::User`](api::Failure::User), never a panic.
//! - A panic in a pass fails what was in that pass. The engine goes on.

pub mod adapters;
mod admission;
pub mod age;
pub mod api;
mod budget;
mod checkpoint;
mod compute;
mod core;
mod datum;
mod device;
mod disk;
mod engine;
mod fair;
mod files;
mod fingerprint;
mod gallery;
mod intake;
mod learner;
pub mod ledger;
pub mod limits;
mod losses;
mod machine;
mod maker;
mod optimizer;
mod pass_targets;
mod pictures;
mod reply;
mod sampler;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod snapshot;
mod tenant;
mod unfinished;

pub use budget::StartError;
pub use compute::AdapterBytes;
pub use engine::{EngineConfig, EngineHandle, EngineInfo};
pub use learner::{bytes_of, spec_of};
pub use losses::STABLE_REINFORCE;
pub use machine::Machine;
pub use reply::Reply;
pub use sampler::{Speculated, Speculation};
