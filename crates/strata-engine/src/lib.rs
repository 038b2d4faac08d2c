//! What runs next: tenants and their adapters, packed training passes, losses, the optimizer and the continuous-batching sampler.

pub mod api;
mod engine;

pub use engine::{EngineConfig, EngineHandle, EngineInfo, Reply};
