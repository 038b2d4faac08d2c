//! `strata bench`: how fast this machine trains and samples, beside what the same run measures as its limits, and beside a peer if asked.
//!
//! A model of a named shape is made in memory with random weights, and requests go through the engine as they would from the server. What counts
//! as work is in [`counts`], what counts as a limit in [`strata_limits`].

mod adapters;
mod all;
mod counts;
mod delta;
mod engine;
mod matmul;
mod peer;
mod report;
mod sample;
mod table;
mod text;
mod train;

use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use strata_limits::{Inputs, Limits, median};
use strata_model::{EMBEDDED_NAME, ModelConfig, ModelSource};
use strata_tensor::{CpuBackend, DType, Memory, Tensor, random};

use crate::base_model::Resources;
use crate::output::say_aside;
use peer::Peer;
use report::Report;

/// How long each side repeats one op of a layer in a round.
const ROUND_TIME: Duration = Duration::from_millis(200);

/// How often bandwidth is measured again if something has read faster than what was measured.
const MORE_READS_MAX: usize = 10;

/// Measures bandwidth until it is no less than what has been read, or often enough. Whatever was exceeded was no limit: others were using the memory while it was measured.
fn measure_reads_up_to(fastest_gb_per_s: f64, limits: &mut Limits, threads: usize) -> anyhow::Result<()> {
    for _ in 0..MORE_READS_MAX {
        if limits.read_gb_per_s >= fastest_gb_per_s {
            break;
        }
        limits.measure_reads_again(threads)?;
    }
    Ok(())
}

/// How a benchmark finds out what arithmetic gives at this moment, in GFLOP/s, if it does.
type ArithmeticNow<'a> = Option<&'a dyn Fn() -> f64>;

/// Runs `body`; answers with what arithmetic gave before or after it, whichever was more.
fn beside_arithmetic<T>(now: ArithmeticNow<'_>, body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Option<f64>)> {
    let before = now.map(|now| now());
    let done = body()?;
    Ok((done, now.map(|now| now()).zip(before).map(|(after, before)| after.max(before))))
}

/// The median of how much of what arithmetic gave beside them some times were, `limits` in GFLOP/s, all but the first if there are more; nothing if that was not measured.
fn median_of_arithmetic(flops: f64, seconds: &[f64], limits: &[f64]) -> Option<f64> {
    let fractions: Vec<f64> = seconds.iter().zip(limits).map(|(seconds, limit)| flops / seconds / 1e9 / limit).collect();
    (!fractions.is_empty()).then(|| median(later(&fractions)))
}

/// All but the first, if there are more.
fn later(values: &[f64]) -> &[f64] {
    if values.len() > 1 { &values[1..] } else { values }
}

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Train LoRA adapters: forward and backward, with activations kept and computed again, then an optimizer step.
    Train(train::Args),
    /// Sample: prefill of prompts, then decode steps.
    Sample(sample::Args),
    /// Train or sample at several batch sizes and lengths, one line each.
    Table(table::Args),
    /// Find how cost grows: sweeps over batch, length, rank, adapters and layers around one setting.
    All(all::Args),
    /// Multiply matrices of the model's shapes.
    Matmul(matmul::Args),
    /// Run one layer's gated delta net between its projections, and its rule alone.
    Delta(delta::Args),
    /// Measure the limits of this machine and nothing else.
    Limits(Common),
}

/// Settings of every benchmark.
#[derive(Debug, clap::Args)]
struct Common {
    /// Shape of the model, such as qwen3-0.6b, or strata/tiny-base for that of the model in this binary.
    #[arg(long, default_value = "qwen3-0.6b")]
    shape: String,
    /// Have only so many of the shape's layers, where all of them do not fit this machine.
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Dtype of the weights.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Do the same work with PEFT, transformers and torch in this Python interpreter, in turns with ours, and show both.
    #[arg(long, value_name = "PYTHON")]
    compare: Option<PathBuf>,
    #[command(flatten)]
    resources: Resources,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Dtype {
    Bf16,
    F32,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => DType::BF16,
            Dtype::F32 => DType::F32,
        }
    }
}

impl From<Dtype> for Inputs {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Inputs::Bf16,
            Dtype::F32 => Inputs::F32,
        }
    }
}

impl Common {
    fn config(&self) -> anyhow::Result<ModelConfig> {
        if self.shape == EMBEDDED_NAME {
            ensure!(self.layers.is_none(), "--layers cuts named shapes, and {EMBEDDED_NAME} is a model");
            return Ok(ModelSource::Embedded.config()?);
        }
        self.with_layers(self.layers)
    }

    /// The named shape with so many of its layers, or all.
    fn with_layers(&self, layers: Option<usize>) -> anyhow::Result<ModelConfig> {
        let all = ModelConfig::named_shape(&self.shape).with_context(|| {
            let known: Vec<_> = [EMBEDDED_NAME].into_iter().chain(ModelConfig::named_shapes()).collect();
            format!("shape {:?} is not known; there are {}", self.shape, known.join(", "))
        })?;
        let Some(layers) = layers else { return Ok(all) };
        ensure!((1..=all.num_layers).contains(&layers), "--layers {layers} is not between 1 and {}", all.num_layers);
        ModelConfig::named_shape_of_layers(&self.shape, layers).context("a shape with fewer layers is one")
    }

    /// Threads that compute, of the model, the limits and the peer alike.
    fn threads(&self) -> anyhow::Result<usize> {
        self.resources.threads()
    }

    /// What computes.
    fn backend(&self) -> anyhow::Result<CpuBackend> {
        Ok(CpuBackend::with_numerics(Some(self.threads()?), self.resources.numerics.into())?)
    }

    /// The peer that was asked for, ready to work on this model; it needs these Python modules.
    fn start_peer(&self, modules: &[&str], ranks: &[usize]) -> anyhow::Result<Option<Peer>> {
        let Some(python) = &self.compare else { return Ok(None) };
        let config = serde_json::from_str(&self.config()?.to_json())?;
        let setup =
            peer::Setup { modules, config, dtype: DType::from(self.dtype).to_string(), threads: self.threads()?, ranks };
        Peer::start(python, &setup).map(Some)
    }
}

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// If an argument makes no sense, memory does not suffice, a request fails, or the peer does.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.what {
        What::Train(args) => train::run(&args),
        What::Sample(args) => sample::run(&args),
        What::Table(args) => table::run(&args),
        What::All(args) => all::run(&args),
        What::Matmul(args) => matmul::run(&args),
        What::Delta(args) => delta::run(&args),
        What::Limits(common) => {
            let of_models = [
                ("--layers", common.layers.is_some()),
                ("--compare", common.compare.is_some()),
                ("--quantize", common.resources.quantize.is_some()),
            ];
            if let Some((flag, _)) = of_models.iter().find(|(_, is_given)| *is_given) {
                bail!("{flag} is of a model, and bench limits has none: it measures the machine");
            }
            common.config()?;
            let limits = Limits::measure(common.threads()?)?;
            text::print(&Report::new("limits", &common, limits)?, common.json)
        }
    }
}

/// Tells whoever sits before a terminal what a run is at: with long prompts, or a peer, it takes minutes.
fn progress(what: std::fmt::Arguments<'_>) {
    if stderr().is_terminal() {
        say_aside!("{what}");
    }
}

/// Seconds that `body` takes, and what it answers.
fn timed<R>(body: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<(f64, R)> {
    let start = Instant::now();
    let result = body()?;
    Ok((start.elapsed().as_secs_f64(), result))
}

/// Seconds of the fastest call of a round.
fn fastest(mut op: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let (end, mut best) = (Instant::now() + ROUND_TIME, f64::INFINITY);
    loop {
        best = best.min(timed(&mut op)?.0);
        if Instant::now() >= end {
            return Ok(best);
        }
    }
}

/// Numbers from -1 to 1 in a tensor: the same for each seed.
fn uniform(backend: &CpuBackend, seed: u64, shape: &[usize], dtype: DType) -> anyhow::Result<Tensor> {
    let mut values = vec![0.0; shape.iter().product()];
    random::fill_uniform([seed, 0], 0, 1.0, &mut values);
    Ok(backend.tensor(&values, shape, dtype)?)
}

/// The least of some times; infinite if there are none.
fn least(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arithmetic_gave_beside_something_is_the_more_of_before_and_after() {
        for (before, after) in [(1.0, 2.0), (2.0, 1.0)] {
            let gave = std::cell::Cell::new(before);
            let (done, beside) = beside_arithmetic(Some(&|| gave.get()), || Ok(gave.replace(after))).unwrap();
            assert_eq!((done, beside), (before, Some(2.0)));
        }
        assert_eq!(beside_arithmetic(None, || Ok(7)).unwrap(), (7, None));
    }
}
