//! For tests: a backend whose memory the host cannot see.

#[cfg(test)]
mod helpers;

#[cfg(test)]
pub(crate) use helpers::*;
