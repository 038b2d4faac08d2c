//! Log output of every command: to standard error, filtered by `RUST_LOG`.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// What is logged where `RUST_LOG` says nothing.
const DEFAULT_FILTER: &str = "info,tower_http=warn,hyper=warn";

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging; the first call of a process wins.
pub fn init(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A line that cannot be written is lost: a terminal that was closed, or a full disk, must not end what is at work.
    let builder = builder.log_internal_errors(false);
    // A second initialisation in one process leaves the first in place, which is what is wanted.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
