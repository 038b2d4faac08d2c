//! A running server: its listener, its reaper and its end.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use strata_engine::EngineHandle;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::app::{App, ModelInfo, ServerConfig};
use crate::auth::KEY_PREFIX;
use crate::bases::Base;
use crate::connection::{self, Times};
use crate::limits;
use crate::routes;

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is reachable from other machines, and there is no key.
    #[error("{0} is reachable from other machines: set an API key, or listen on a loopback address such as 127.0.0.1")]
    NoKey(SocketAddr),
    /// Clients would refuse to send this key.
    #[error("an API key must start with {KEY_PREFIX:?}: the Tinker SDK refuses to send others")]
    KeyPrefix,
    /// The data directory cannot be used.
    #[error("data directory {dir}: {source}")]
    DataDir {
        /// The directory.
        dir: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The address cannot be listened on.
    #[error("listening on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// The server, before it runs.
pub struct Server;

impl Server {
    /// Starts serving base models, each with an engine over it, on the current tokio runtime. When this returns, the address answers.
    ///
    /// # Errors
    /// If the settings contradict each other, or the data directory or the address cannot be used.
    pub async fn start(config: ServerConfig, bases: Vec<(EngineHandle, ModelInfo)>) -> Result<RunningServer, StartError> {
        let base = |(engine, info): (EngineHandle, ModelInfo)| Base { info, engine: Arc::new(engine) };
        Self::start_over(config, bases.into_iter().map(base).collect()).await
    }

    pub(crate) async fn start_over(config: ServerConfig, bases: Vec<Base>) -> Result<RunningServer, StartError> {
        match &config.api_key {
            None if !config.address.ip().is_loopback() => return Err(StartError::NoKey(config.address)),
            Some(key) if !key.starts_with(KEY_PREFIX) => return Err(StartError::KeyPrefix),
            _ => {}
        }
        let (address, dir) = (config.address, config.data_dir.path().to_owned());
        let app = App::new(config, bases).map_err(|source| StartError::DataDir { dir, source })?;
        let listener = TcpListener::bind(address).await.map_err(|source| StartError::Listen { address, source })?;
        let local_address = listener.local_addr().map_err(|source| StartError::Listen { address, source })?;
        let (stop, stopped) = oneshot::channel::<()>();
        let closing = app.clone();
        let (times, connections_max) = (Times::of(&app.config), app.config.connections_max);
        let serving = connection::serve(listener, routes::router(app.clone()), times, connections_max, async move {
            let _ = stopped.await;
            closing.close();
        });
        let serving = tokio::spawn(serving);
        let reaping = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(limits::REAP_INTERVAL);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                app.reap().await;
            }
        });
        Ok(RunningServer { local_address, stop, serving, reaping: AbortOnDrop(reaping) })
    }
}

/// Ends a task with its owner.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A server that answers until it is stopped or dropped.
pub struct RunningServer {
    local_address: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    reaping: AbortOnDrop,
}

impl RunningServer {
    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// What clients on this machine put as `base_url`.
    pub fn url(&self) -> String {
        format!("http://{}", self.local_address)
    }

    /// Takes no new requests, answers those at hand, and ends.
    pub async fn stop(self) {
        let RunningServer { stop, mut serving, reaping, .. } = self;
        let _ = stop.send(());
        if tokio::time::timeout(limits::SHUTDOWN_GRACE, &mut serving).await.is_err() {
            serving.abort();
        }
        drop(reaping);
    }
}
