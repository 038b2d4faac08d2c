//! The `strata` command line: one module for each command under `commands`.

mod base_model;
mod commands;
mod logging;
mod machine;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use commands::serve;

/// Train and sample LoRA adapters on one base model, through the Tinker API.
#[derive(Parser)]
#[command(name = "strata", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a base model through the Tinker API.
    Serve(serve::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => serve::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
