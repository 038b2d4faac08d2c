//! `strata serve`: a base model behind the Tinker API.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::bail;

use crate::logging::{self, LogFormat};

/// Settings of the server. Every flag has a twin in the environment.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Base model: a checkpoint directory or a Hugging Face name; the small model in the binary if absent.
    #[arg(env = "STRATA_MODEL")]
    pub model: Option<String>,
    /// Address to listen on. Anything but loopback needs an API key.
    #[arg(long, env = "STRATA_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, env = "STRATA_PORT", default_value_t = 8000)]
    pub port: u16,
    /// Key that clients must send; starts with `tml-`, as the SDK insists. Without one, any key is accepted, on loopback only.
    #[arg(long, env = "STRATA_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Where checkpoints live [default: $XDG_DATA_HOME/strata, or ~/.local/share/strata].
    #[arg(long, env = "STRATA_DATA_DIR")]
    pub data_dir: Option<PathBuf>,
    /// How log lines look.
    #[arg(long, env = "STRATA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Serves until it is told to stop.
///
/// # Errors
/// If the settings contradict each other, the model cannot be loaded or the address is taken.
pub fn run(args: Args) -> anyhow::Result<()> {
    logging::init(args.log_format);
    if args.api_key.is_none() && !args.host.is_loopback() {
        bail!("--host {} is reachable from other machines: set an API key with --api-key or STRATA_API_KEY", args.host);
    }
    bail!("this build has no engine to serve with")
}
