//! The `strata` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    strata::run()
}
