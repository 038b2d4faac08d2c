//! What commands say on standard output, which may be a pipe that nobody reads any more or a file on a full disk.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use anyhow::Context;

/// Whoever read standard output has heard enough, as `head` has: the end of the command, and nothing to complain about.
#[derive(Debug)]
pub struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for Closed {}

/// Writes to standard output.
///
/// # Errors
/// [`Closed`], or what else the system has against it.
pub fn write(text: Arguments<'_>) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Closed.into()),
        done => done.context("writing to standard output"),
    }
}

/// Writes to standard error. Where nobody takes it, it is lost, and the command goes on.
pub fn write_aside(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// Writes a line to standard error, as `eprintln!` would, and never panics.
macro_rules! say_aside {
    ($($text:tt)*) => { $crate::output::write_aside(format_args!("{}\n", format_args!($($text)*))) };
}

/// Writes a line to standard output, as `println!` would, and answers whether it could.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($text)*))) };
}

pub(crate) use {say, say_aside};
