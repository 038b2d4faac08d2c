//! The `strata` command line: one module for each command under `commands`. It is a library so that cargo compiles it while the crates below
//! it are still being optimised; the binary does no more than to call it.

mod arguments;
mod base_model;
mod client;
mod commands;
mod download;
mod logging;
mod machine;
mod output;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use commands::shutdown::interruptible;
use commands::{bench, demo, export, import, init_model, inspect, serve, trace};
use output::say_aside;

/// Train and sample LoRA adapters on one base model, through the Tinker API.
#[derive(Parser)]
#[command(name = "strata", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Teach the embedded model Pig Latin over the HTTP API, and check what sampling and training compute against each other.
    Demo(demo::Args),
    /// Serve a base model through the Tinker API.
    Serve(serve::Args),
    /// Write down hidden states, logits, gradients and greedy tokens of a model, for comparison with other implementations.
    Trace(trace::Args),
    /// Say what a checkpoint holds and would take, without loading its weights.
    Inspect(inspect::Args),
    /// Write an adapter in the form that PEFT or the Tinker tools load, or a checkpoint of the base model with the adapter in its weights.
    Export(export::Args),
    /// Make a checkpoint that can be trained and sampled of a PEFT adapter.
    Import(import::Args),
    /// Write a checkpoint with random weights.
    InitModel(init_model::Args),
    /// Measure training and sampling beside the limits of this machine.
    Bench(bench::Args),
}

/// Runs the command that the arguments of this process ask for.
pub fn run() -> ExitCode {
    let command = arguments::parse::<Cli>().command;
    let base_models = if let Command::Serve(args) = &command { args.models.len().max(1) } else { 1 };
    machine::keep_little_freed_memory(base_models);
    machine::let_writes_fail_at_a_limit();
    let result = match command {
        Command::Demo(args) => demo::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Trace(args) => interruptible(|| trace::run(args)),
        Command::Inspect(args) => inspect::run(args),
        Command::Export(args) => interruptible(|| export::run(args)),
        Command::Import(args) => interruptible(|| import::run(args)),
        Command::InitModel(args) => interruptible(|| init_model::run(args)),
        Command::Bench(args) => bench::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // What a shell says of a program that a closed pipe has ended.
        Err(error) if error.is::<output::Closed>() => ExitCode::from(141),
        Err(error) => {
            say_aside!("error: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and what it comes from, but for what it says itself.
fn told(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if told.is_empty() {
            told = cause;
        } else if !told.ends_with(&cause) {
            told = format!("{told}: {cause}");
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_says_each_of_its_causes_once() {
        let missing = std::fs::read("/nowhere/at/all").unwrap_err();
        let io = strata_model::Error::Io { path: "/nowhere/at/all".into(), source: missing };
        let error = Err::<(), _>(io).context("loading a").unwrap_err();
        assert_eq!(told(&error), "loading a: /nowhere/at/all: No such file or directory (os error 2)");
        assert_eq!(told(&anyhow::anyhow!("b").context("a")), "a: b");
    }
}
