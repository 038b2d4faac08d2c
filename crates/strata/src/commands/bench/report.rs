//! What was measured, for people ([`text`](super::text)) and scripts (JSON).

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use strata_limits::{Arithmetic, Limits};
use strata_tensor::DType;

use super::Common;

/// Everything that one run found.
#[derive(Serialize)]
pub(super) struct Report {
    pub benchmark: &'static str,
    pub shape: String,
    pub dtype: String,
    pub threads: usize,
    /// What computes: `cpu avx512-bf16, 2 threads`. `None`: nothing of ours was measured.
    pub kernels: Option<String>,
    pub limits: LimitsReport,
    pub cases: Vec<Case>,
    pub peak_memory_bytes: Vec<PeakMemory>,
    /// Versions of the peer's modules; `None`: there was no peer.
    pub peer: Option<BTreeMap<String, String>>,
}

/// The limits that fractions are fractions of.
#[derive(Serialize)]
pub(super) struct LimitsReport {
    pub arithmetic: Vec<Arithmetic>,
    /// The one that counts for the dtype of the benchmark.
    pub fastest: Arithmetic,
    pub read_gb_per_s: f64,
    /// In the middle of the windows of which the best counts.
    pub read_median_gb_per_s: f64,
}

/// The most memory that a process had up to a point of the run.
#[derive(Serialize)]
pub(super) struct PeakMemory {
    pub of: &'static str,
    pub bytes: u64,
}

/// What was measured under one setting.
#[derive(Serialize)]
pub(super) struct Case {
    pub settings: serde_json::Map<String, Value>,
    #[serde(serialize_with = "by_key")]
    pub figures: Vec<Figure>,
}

/// One figure of ours, and the peer's beside it.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    /// Its name in JSON; ends with the unit if it has one.
    pub key: &'static str,
    /// Its name for people.
    pub label: &'static str,
    pub unit: Unit,
    pub ours: f64,
    pub peers: Option<f64>,
    /// Whether a table of many cases has a column for it.
    pub in_table: bool,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    TokensPerSecond,
    Seconds,
    GflopPerSecond,
    GbPerSecond,
    /// Of the arithmetic limit; 1 is all of it.
    OfArithmetic,
    /// Of the bandwidth; 1 is all of it.
    OfBandwidth,
    /// Of the tokens that were guessed; 1 is all of them.
    OfGuesses,
    /// How many for each token.
    PerToken,
}

impl Figure {
    pub(super) fn new(key: &'static str, label: &'static str, unit: Unit, ours: f64) -> Self {
        Figure { key, label, unit, ours, peers: None, in_table: false }
    }

    /// With the peer's figure, if there is one.
    pub(super) fn beside(self, peers: Option<f64>) -> Self {
        Figure { peers, ..self }
    }

    /// With a column in tables.
    pub(super) fn in_table(self) -> Self {
        Figure { in_table: true, ..self }
    }

    /// How many times as fast as the peer we are.
    pub(super) fn ratio(&self) -> Option<f64> {
        self.peers.map(|peers| if self.unit == Unit::Seconds { peers / self.ours } else { self.ours / peers })
    }
}

fn by_key<S: Serializer>(figures: &[Figure], serializer: S) -> Result<S::Ok, S::Error> {
    let entry = |f: &Figure| match (f.peers, f.ratio()) {
        (Some(peer), Some(ratio)) => (f.key, json!({ "strata": f.ours, "peer": peer, "ratio": ratio })),
        _ => (f.key, json!({ "strata": f.ours })),
    };
    serializer.collect_map(figures.iter().map(entry))
}

impl Report {
    pub(super) fn new(benchmark: &'static str, common: &Common, limits: Limits) -> anyhow::Result<Self> {
        Ok(Report {
            benchmark,
            shape: common.shape.clone(),
            dtype: DType::from(common.dtype).to_string(),
            threads: common.threads()?,
            kernels: None,
            limits: LimitsReport {
                fastest: limits.fastest(common.dtype.into()).clone(),
                arithmetic: limits.arithmetic().to_vec(),
                read_gb_per_s: limits.read_gb_per_s,
                read_median_gb_per_s: limits.read_median_gb_per_s(),
            },
            cases: Vec::new(),
            peak_memory_bytes: Vec::new(),
            peer: None,
        })
    }
}

/// The most memory this process has had since [`forget_peak_memory`], in bytes.
pub(super) fn peak_memory_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading this process's memory")?;
    let Some(line) = status.lines().find_map(|l| l.strip_prefix("VmHWM:")) else { bail!("the system does not say") };
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}

/// Begins the peak of memory anew, so that what the limits were measured with is not in it. A system that cannot leaves it in.
pub(super) fn forget_peak_memory() {
    if let Err(error) = std::fs::write("/proc/self/clear_refs", "5") {
        tracing::debug!(%error, "the peak of memory includes the measurement of the limits");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_say_how_many_times_as_fast_we_are() {
        let rate = Figure::new("rate", "rate", Unit::TokensPerSecond, 10.0).beside(Some(5.0));
        let time = Figure::new("time", "time", Unit::Seconds, 2.0).beside(Some(8.0));
        assert_eq!((rate.ratio(), time.ratio()), (Some(2.0), Some(4.0)));
        assert_eq!(Figure::new("rate", "rate", Unit::TokensPerSecond, 1.0).ratio(), None);
    }

    #[test]
    fn the_peak_of_memory_is_known_after_it_began_anew() {
        forget_peak_memory();
        assert!(peak_memory_bytes().unwrap() > 0);
    }
}
