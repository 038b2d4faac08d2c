//! The Tinker API over HTTP: what the official SDK (0.38) and its cookbook speak.
//!
//! Map:
//! - [`Server`]: listener, reaper, shutdown. `connection`: one task for each connection, and the clock that ends it. `app`: what all handlers
//!   share, and the way from a request to a future.
//! - `routes`: the endpoints, a file for each part of the API; `edge`, `auth`: who is answered; `payload`, `blocking`, `turns`, `error`: what all of them need.
//! - `wire`: protobuf and JSON bodies, read within limits and translated from and to the engine's values. `transit`: the memory that requests take
//!   on their way in.
//! - `futures`: outcomes that clients come back for. `registry`: sessions, models and sampling sessions. `clock`, `ids`: the time they end by and the names they get.
//! - `records`: what is remembered of samples that are to be trained on. `provenance`: how examples refer to it.
//! - `untar`, `scratch`: archives as they arrive, and where they go until they are checkpoints.
//! - [`DataDir`], `store`, `names`: the directory that one server has to itself, the checkpoints in it, and the names that lead to them; [`import`]: those that come from elsewhere.
//! - [`ImageDirs`], [`ImageStores`]: the directories and the object stores that prompts may name pictures in.
//! - [`limits`]: every bound on what comes from outside.
//!
//! Invariants:
//! - A request is acknowledged at once; no handler waits for the engine. Only `retrieve_future` waits, and not for longer than the client.
//! - Ids follow from what a client sends: a request that is sent again gets the same id and runs once.
//! - Once a training operation's model and place in the order can be read, it takes its place, even if the rest of it is refused or never read.
//! - A user's mistake is a 4xx with a sentence, or a failed future of category `user`; never a 409, a 425, a 5xx or a panic.
//! - No body takes memory that was not charged to the transit budget first, as it arrives, inflated or decoded.
//! - No path of the server's own file system is in an answer, but for the tokenizer's.
//! - What clients report about themselves (telemetry) is never stored: it may hold their keys.

mod app;
mod auth;
mod bases;
mod blocking;
mod clock;
mod connection;
mod data_dir;
mod edge;
mod error;
mod futures;
mod gone;
mod ids;
mod image_dirs;
mod image_stores;
mod import;
pub mod limits;
mod names;
mod payload;
mod provenance;
mod records;
mod registry;
mod routes;
mod scratch;
mod server;
mod store;
mod submit;
#[cfg(test)]
mod tests;
mod transit;
mod turns;
mod untar;
mod wire;

pub use app::{ModelInfo, ServerConfig};
pub use auth::KEY_PREFIX;
pub use data_dir::{DataDir, DataDirError};
pub use image_dirs::{ImageDirError, ImageDirs};
pub use image_stores::{Credentials, ImageStoreError, ImageStores, S3Settings};
pub use import::{ImportError, Imported, import};
pub use server::{RunningServer, Server, StartError};
pub use wire::proto;
