//! For tests: a backend whose memory the host cannot see.

#[cfg(test)]
mod helpers;
mod remote;

#[cfg(test)]
pub(crate) use helpers::*;
pub use remote::RemoteBackend;
