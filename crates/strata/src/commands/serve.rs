//! `strata serve`: a base model behind the Tinker API.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::HumanBytes;
use strata_engine::EngineHandle;
use strata_model::checkpoint::abandon_files;
use strata_server::{DataDir, ImageDirs, ImageStores, KEY_PREFIX, S3Settings, Server, ServerConfig};

use crate::base_model::{self, BaseModel, Copies, Naming, Resources};
use crate::commands::shutdown::{self, Signals};
use crate::logging::{self, LogFormat};
use crate::machine;
use crate::output::say;
use crate::units::parse_duration;

/// Open files that connections leave to others.
const FILES_KEPT: usize = 128;

/// Settings of the server. Every flag has a twin in the environment.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Base models: checkpoint directories or Hugging Face names; the small model in this binary if absent. Several share memory and processors.
    #[arg(env = "STRATA_MODEL", value_name = "MODEL")]
    pub models: Vec<String>,
    #[command(flatten)]
    pub naming: Naming,
    /// Address to listen on. Anything but loopback needs an API key.
    #[arg(long, env = "STRATA_HOST", value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, env = "STRATA_PORT", default_value_t = 8000)]
    pub port: u16,
    /// Key that clients must send; starts with tml-, as the SDK insists. Without one any key is accepted, on loopback only.
    #[arg(long, env = "STRATA_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Where checkpoints live [default: $XDG_DATA_HOME/strata, or ~/.local/share/strata].
    #[arg(long, env = "STRATA_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// What clients reach the server by, such as https://strata.example, for addresses in its answers [default: the name that each client has used].
    #[arg(long, env = "STRATA_PUBLIC_URL", value_name = "URL", value_parser = parse_public_url)]
    pub public_url: Option<String>,
    /// Directory of pictures that prompts may name, as file:///DIR/NAME.png; several are given one by one, or separated by colons.
    #[arg(long, env = "STRATA_IMAGE_DIR", value_name = "DIR", value_delimiter = ':')]
    pub image_dir: Vec<PathBuf>,
    /// Store of pictures that prompts may name: https://HOST/PREFIX/ (or http), s3://BUCKET/PREFIX/ with AWS_* of the environment, gs://BUCKET/PREFIX/; several are given one by one, or separated by commas.
    #[arg(long, env = "STRATA_IMAGE_STORE", value_name = "URL", value_delimiter = ',')]
    pub image_store: Vec<String>,
    /// What the model may use.
    #[command(flatten)]
    pub resources: Resources,
    #[command(flatten)]
    pub copies: Copies,
    /// How long a session may be silent before its models are freed; clients send a sign of life every 10 s.
    #[arg(long, env = "STRATA_SESSION_TIMEOUT", value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub session_timeout: Duration,
    /// How long SIGTERM and Ctrl-C wait for checkpoints that were asked for and are not written yet; a second signal ends at once.
    #[arg(long, env = "STRATA_SHUTDOWN_TIMEOUT", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub shutdown_timeout: Duration,
    /// Time in which the headers of a request arrive.
    #[arg(long, env = "STRATA_HEADER_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub header_timeout: Duration,
    /// Time in which the body of a request arrives.
    #[arg(long, env = "STRATA_BODY_TIMEOUT", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub body_timeout: Duration,
    /// How long a connection may be open without a request on it.
    #[arg(long, env = "STRATA_IDLE_TIMEOUT", value_name = "TIME", default_value = "2m", value_parser = parse_duration)]
    pub idle_timeout: Duration,
    /// Connections that are open at the same time; a new one then takes the place of an idle one, or waits [default: 16384, or less if the system allows fewer open files].
    #[arg(long, env = "STRATA_MAX_CONNECTIONS", value_name = "COUNT")]
    pub max_connections: Option<NonZeroUsize>,
    /// How log lines look; RUST_LOG says what is logged.
    #[arg(long, env = "STRATA_LOG_FORMAT", value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Serves until it is told to stop, and then until the checkpoints that were asked for are written.
///
/// # Errors
/// If the settings contradict each other, a directory of pictures cannot be read, the model cannot be loaded, the address is taken or another server has the data directory; at the
/// end, if checkpoints were not written.
pub fn run(args: Args) -> anyhow::Result<()> {
    logging::init(args.log_format);
    // What can be wrong without looking at the model is said before it is loaded, which may take a while.
    match &args.api_key {
        None if !args.host.is_loopback() => {
            bail!("--host {} is reachable from other machines: set a key with --api-key or STRATA_API_KEY", args.host)
        }
        Some(key) if !key.starts_with(KEY_PREFIX) => {
            bail!("--api-key must start with {KEY_PREFIX:?}: the Tinker SDK refuses to send other keys")
        }
        Some(key) if key.len() == KEY_PREFIX.len() || !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
            bail!(
                "--api-key must have something behind {KEY_PREFIX:?}, and letters, digits and signs of ASCII alone: no client could send another"
            )
        }
        _ => {}
    }
    machine::raise_open_files_limit();
    let address = SocketAddr::new(args.host, args.port);
    let data_dir = args.data_dir.clone().map_or_else(base_model::default_data_dir, Ok)?;
    // Before anything in it is changed, and before the model is loaded for nothing.
    let data_dir = DataDir::claim(&data_dir)?;
    let mut config = ServerConfig::new(address, data_dir.clone());
    config.image_dirs = ImageDirs::open(&args.image_dir).context("--image-dir")?;
    config.image_stores = ImageStores::open(&args.image_store, &S3Settings::from_env()?).context("--image-store")?;
    config.api_key = args.api_key.clone();
    config.public_url = args.public_url.clone();
    config.session_timeout = args.session_timeout;
    config.header_timeout = args.header_timeout;
    config.body_timeout = args.body_timeout;
    config.idle_timeout = args.idle_timeout;
    // Some files are for checkpoints, the log and the runtime.
    let connections_possible = machine::open_files_max().saturating_sub(FILES_KEPT).max(1);
    config.connections_max = match args.max_connections.map(NonZeroUsize::get) {
        Some(asked) if asked > connections_possible => bail!(
            "--max-connections {asked} is more than the {connections_possible} for which the system lets this process open files (ulimit -n)"
        ),
        asked => asked.unwrap_or(config.connections_max.min(connections_possible)),
    };

    // Whether the address is free is known before a model is loaded too; it is taken when there is something to serve.
    std::net::TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
    let bases = base_model::start(&args.models, &args.naming, &args.resources, &args.copies, &data_dir)?;
    base_model::keep_within(&mut config, &bases);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let served = bases.iter().map(|base| (base.engine.clone(), base.info.clone())).collect();
        let server = Server::start(config, served).await?;
        if let Err(error) = announce(&args, &bases, &data_dir.path().display().to_string(), server.local_address()) {
            // It serves all the same.
            tracing::warn!("{error:#}");
        }
        // What was still being read may turn out to be unreadable.
        let unreadable = tokio::select! {
            () = async { signals.next().await; } => Ok(()),
            error = unreadable_tokenizer(&bases) => Err(error),
        };
        let engines: Vec<EngineHandle> = bases.iter().map(|base| base.engine.clone()).collect();
        let hurry = async {
            signals.next().await;
        };
        unreadable.and(shutdown::end(server.stop(), &engines, args.shutdown_timeout, hurry).await)
    });
    // Polls that are still open belong to clients that will not be answered any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    // Of a copy of the weights that is half written.
    abandon_files();
    ended
}

/// Answers why a tokenizer of these models cannot be read, and nothing if all can.
async fn unreadable_tokenizer(bases: &[BaseModel]) -> anyhow::Error {
    for base in bases {
        let read = tokio::task::spawn_blocking(base.wait_for_tokenizer()).await;
        if let Err(error) = read.map_err(anyhow::Error::from).flatten() {
            return error;
        }
    }
    std::future::pending().await
}

/// Checks the start of addresses.
fn parse_public_url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match rest {
        Some(host) if !host.is_empty() && !text.contains(['?', '#', '@']) && !text.contains(char::is_whitespace) => {
            Ok(text.into())
        }
        _ => Err(format!("{text:?} is not like https://strata.example, with a path or without")),
    }
}

/// Says what is served and how to reach it.
fn announce(args: &Args, bases: &[BaseModel], data_dir: &str, address: SocketAddr) -> anyhow::Result<()> {
    let url = client_url(address);
    let key = if args.api_key.is_some() { "YOUR-KEY" } else { "tml-local" };
    let served: Vec<String> = bases.iter().map(describe).collect();
    say!(
        "Strata {} serves {}\n\
         \x20 kernels  {}\n\
         \x20 memory   {}\n\
         \x20 data     {data_dir}\n\
         \x20 address  http://{address}\n\
         \n\
         Connect from Python (pip install tinker):\n\
         \x20 import tinker\n\
         \x20 client = tinker.ServiceClient(base_url=\"{url}\", api_key=\"{key}\")\n",
        env!("CARGO_PKG_VERSION"),
        served.join("\n         and "),
        bases.first().map_or("", |base| &base.kernels),
        HumanBytes(args.resources.memory_bytes()),
    )
}

/// A base model in a line.
fn describe(base: &BaseModel) -> String {
    let limits = base.engine.info();
    let training = match limits.max_example_tokens {
        tokens if tokens != limits.max_context_tokens => format!(", {tokens} in training"),
        _ => String::new(),
    };
    let (name, architecture) = (&base.info.name, &base.info.architecture);
    let (weights, tokens) = (HumanBytes(base.weight_bytes), limits.max_context_tokens);
    format!("{name} ({architecture}, weights {weights}, up to {tokens} tokens{training})")
}

/// What a client on this machine puts as `base_url`.
fn client_url(address: SocketAddr) -> String {
    let reachable = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
        ip => ip,
    };
    format!("http://{}", SocketAddr::new(reachable, address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_given_an_address_that_they_can_reach() {
        for (address, url) in
            [("0.0.0.0:8000", "http://127.0.0.1:8000"), ("[::]:1", "http://[::1]:1"), ("10.0.0.1:2", "http://10.0.0.1:2")]
        {
            assert_eq!(client_url(address.parse().unwrap()), url);
        }
    }
}
