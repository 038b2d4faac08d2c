//! The command line and the environment, with errors that say which of the two was wrong.

use std::ffi::{OsStr, OsString};

use clap::error::{ContextKind, ContextValue};
use clap::{Command, Parser};

/// The arguments of this process. Ends it after `--help`, or with what is wrong.
pub(crate) fn parse<T: Parser>() -> T {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    match T::try_parse_from(&arguments) {
        Ok(parsed) => parsed,
        Err(mut error) => {
            let mut command = T::command();
            // Arguments have their names as errors have them only then.
            command.build();
            name_variable(&mut error, &command, &arguments, |name| std::env::var_os(name));
            error.exit()
        }
    }
}

/// Where a refused value came from the environment, says so: clap names the flag alone, which nobody gave.
fn name_variable(
    error: &mut clap::Error,
    root: &Command,
    arguments: &[OsString],
    variable: impl Fn(&OsStr) -> Option<OsString>,
) {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return };
    let (flag, mut command, mut given) = (flag.clone(), root, arguments.get(1..).unwrap_or_default().iter());
    while let Some(below) = given.as_slice().first().and_then(|name| command.find_subcommand(name)) {
        command = below;
        given.next();
    }
    let Some(arg) = command.get_arguments().find(|arg| arg.to_string() == flag) else { return };
    let (Some(name), Some(long)) = (arg.get_env(), arg.get_long()) else { return };
    let is_given = |argument: &OsString| {
        let rest = argument.to_str().and_then(|argument| argument.strip_prefix("--")?.strip_prefix(long));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    };
    if !given.any(is_given) && variable(name).is_some() {
        let from = format!("{flag}, which the environment sets as {}", name.to_string_lossy());
        error.insert(ContextKind::InvalidArg, ContextValue::String(from));
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[derive(Parser, Debug)]
    enum Cli {
        Work {
            #[arg(long, env = "STRATA_TEST_OF_ARGUMENTS", value_name = "N")]
            threads: Option<u8>,
            #[arg(long)]
            rounds: Option<u8>,
            place: Option<String>,
        },
    }

    /// What is said of `parsed` where the process was started with `given`.
    fn refusal(parsed: &[&str], given: &[&str]) -> String {
        let mut error = Cli::try_parse_from([&["strata", "work"], parsed].concat()).unwrap_err();
        let given: Vec<OsString> = [&["strata", "work"], given].concat().iter().map(OsString::from).collect();
        let mut command = Cli::command();
        command.build();
        name_variable(&mut error, &command, &given, |name| (name == "STRATA_TEST_OF_ARGUMENTS").then(OsString::new));
        error.to_string()
    }

    #[test]
    fn a_refused_value_of_the_environment_is_said_to_be_one() {
        // A value of the variable is refused as one of the command line is.
        let of_variable = refusal(&["--threads", "many"], &[]);
        assert!(
            of_variable.contains("'many' for '--threads <N>, which the environment sets as STRATA_TEST_OF_ARGUMENTS'"),
            "{of_variable}"
        );
        for given in [&["--threads", "many"][..], &["--threads=many"], &["--rounds", "many"], &["--thread", "many"]] {
            let refusal = refusal(given, given);
            assert!(refusal.contains("error: ") && !refusal.contains("environment"), "{refusal}");
        }
    }
}
