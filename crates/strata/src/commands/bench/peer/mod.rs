//! The peer: the same work in a Python process with PEFT, transformers and torch, which waits while we work, as we do while it works.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::NamedTempFile;

/// What the process runs.
const SCRIPT: &str = include_str!("peer.py");
/// Lines of its stderr that are shown when it fails.
const STDERR_LINES: usize = 25;
/// How long threads of one side may spin before the other side's turn.
const SETTLE: Duration = Duration::from_millis(20);

/// The modules that training and sampling need.
pub(super) const MODEL_MODULES: [&str; 3] = ["torch", "transformers", "peft"];
/// The modules that matmuls need.
pub(super) const MATMUL_MODULES: [&str; 1] = ["torch"];
/// The modules that gated delta nets need.
pub(super) const DELTA_MODULES: [&str; 2] = ["torch", "transformers"];

/// What the peer is told first.
#[derive(Serialize)]
pub(super) struct Setup<'a> {
    /// Python modules it needs; without `peft` it makes no model.
    pub modules: &'a [&'a str],
    /// The model's `config.json`.
    pub config: Value,
    /// `bf16` or `f32`.
    pub dtype: String,
    pub threads: usize,
    /// The rank of each adapter.
    pub ranks: &'a [usize],
}

/// What the peer is asked for.
#[derive(Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Request {
    /// Answer: [`Trained`].
    Train { batch: usize, seq_len: usize, checkpointing: bool },
    /// Answer: [`Sampled`].
    Sample { batch: usize, prompt: usize, new: usize },
    /// Answer: [`Multiplied`].
    Matmul { matrices: usize, tokens: usize, in_features: usize, out_features: usize, seconds: f64 },
    /// Answer: [`Mixed`].
    Delta { tokens: usize, k_heads: usize, v_heads: usize, k_dim: usize, v_dim: usize, kernel: usize, seconds: f64 },
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Trained {
    pub seconds: f64,
    pub optimizer_seconds: f64,
    pub peak_memory_bytes: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Sampled {
    pub prefill_seconds: f64,
    pub decode_step_seconds: f64,
    pub peak_memory_bytes: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Multiplied {
    pub seconds: f64,
}

/// Of a gated delta net.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Mixed {
    /// Between its projections.
    pub net_seconds: f64,
    /// Of its rule alone.
    pub rule_seconds: f64,
}

/// A line that the process writes.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer<R> {
    Ok(R),
    /// Modules that the interpreter does not have.
    Missing(Vec<String>),
}

/// The process.
#[derive(Debug)]
pub(super) struct Peer {
    python: PathBuf,
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    stderr: File,
    /// The script is there for as long as the process may read it.
    _script: NamedTempFile,
    versions: BTreeMap<String, String>,
}

impl Peer {
    /// Starts the process and waits until it is ready.
    ///
    /// # Errors
    /// If there is no such interpreter, it lacks a module, or the process ends.
    pub(super) fn start(python: &Path, setup: &Setup<'_>) -> anyhow::Result<Self> {
        let mut script = NamedTempFile::with_suffix(".py").context("writing the peer's script")?;
        script.write_all(SCRIPT.as_bytes()).context("writing the peer's script")?;
        let stderr = tempfile::tempfile().context("making a file for the peer's messages")?;
        let mut child = Command::new(python)
            .arg(script.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone()?)
            .spawn()
            .map_err(|error| match error.kind() {
                ErrorKind::NotFound => {
                    anyhow!("there is no Python interpreter at {}: --compare takes the path of one", python.display())
                }
                _ => anyhow!("{} does not start: {error}", python.display()),
            })?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the peer has no stdout")?);
        let versions = BTreeMap::new();
        let mut peer = Peer { python: python.into(), child, requests, answers, stderr, _script: script, versions };
        peer.versions = peer.exchange(setup)?;
        Ok(peer)
    }

    /// The version of each module.
    pub(super) fn versions(&self) -> &BTreeMap<String, String> {
        &self.versions
    }

    /// Has the peer do something, and waits for it.
    ///
    /// # Errors
    /// If the process ends.
    pub(super) fn call<R: DeserializeOwned>(&mut self, request: &Request) -> anyhow::Result<R> {
        std::thread::sleep(SETTLE);
        let answer = self.exchange(request)?;
        std::thread::sleep(SETTLE);
        Ok(answer)
    }

    fn exchange<R: DeserializeOwned>(&mut self, request: &impl Serialize) -> anyhow::Result<R> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        // A process that has ended takes no requests. What it said last is then the answer, or there is none.
        if self.requests.as_mut().is_none_or(|stdin| stdin.write_all(line.as_bytes()).is_err()) {
            self.requests = None;
        }
        let mut answer = String::new();
        self.answers.read_line(&mut answer).context("reading the peer's answer")?;
        if answer.is_empty() {
            return Err(self.death());
        }
        match serde_json::from_str(&answer) {
            Ok(Answer::Ok(answer)) => Ok(answer),
            Ok(Answer::Missing(modules)) => {
                let (python, modules) = (self.python.display(), modules.join(" "));
                bail!("{python} lacks modules: {modules}. To install them: {python} -m pip install {modules}")
            }
            Err(error) => bail!("the peer answered {:?}, which is not understood: {error}", answer.trim_end()),
        }
    }

    /// Why the process ended, as far as it said.
    fn death(&mut self) -> anyhow::Error {
        self.requests = None;
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let mut stderr = Vec::new();
        // Without its messages there is still its status to tell.
        let read = self.stderr.rewind().and_then(|()| self.stderr.read_to_end(&mut stderr)).is_ok();
        let stderr = String::from_utf8_lossy(&stderr);
        let lines: Vec<&str> = stderr.lines().collect();
        let last = lines[lines.len().saturating_sub(STDERR_LINES)..].join("\n");
        let said = if read && !last.is_empty() { format!("its last messages:\n{last}") } else { "it said nothing".into() };
        anyhow!("the peer ended ({status}); {said}")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends when its stdin does; one that has a long answer in work is not waited for.
        self.requests = None;
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::debug!(%error, "the peer does not end");
        }
    }
}

#[cfg(test)]
mod tests;
