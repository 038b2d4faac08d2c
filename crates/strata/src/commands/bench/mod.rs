//! `strata bench`: how fast this machine trains and samples, beside what the same run measures as its limits.
//!
//! A model of a named shape is made in memory with random weights, and requests go through the engine as they would from the server.

mod limits;
mod sample;
mod train;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use anyhow::{Context, bail};
use serde::Serialize;
use strata_engine::api::{Client, Failure, LoraSpec, Outcome, Request, Response};
use strata_engine::{EngineConfig, EngineHandle};
use strata_model::{Model, ModelConfig};
use strata_tensor::{CpuBackend, DType, WeightFormat};

use crate::base_model::{Quantize, Resources};
use limits::Limits;

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Train a LoRA adapter: forward and backward with layer checkpointing, then an optimizer step.
    Train(train::Args),
    /// Sample: prefill of prompts, then decode steps.
    Sample(sample::Args),
}

/// Settings of every benchmark.
#[derive(Debug, clap::Args)]
struct Common {
    /// Shape of the model, such as qwen3-0.6b.
    #[arg(long, default_value = "qwen3-0.6b")]
    shape: String,
    /// Dtype of the weights.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
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

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// If the shape is not known, memory does not suffice, or a request fails.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.what {
        What::Train(args) => train::run(&args),
        What::Sample(args) => sample::run(&args),
    }
}

/// An engine over a random model, and the limits of the machine it runs on.
struct Bench {
    backend: Arc<CpuBackend>,
    engine: EngineHandle,
    /// Requests sent so far.
    requests: Cell<u64>,
    config: ModelConfig,
    weight_bytes: u64,
    limits: Limits,
    kernels: String,
}

impl Bench {
    fn start(common: &Common) -> anyhow::Result<Self> {
        let config = ModelConfig::named_shape(&common.shape).with_context(|| {
            format!(
                "shape {:?} is not known; there are {}",
                common.shape,
                ModelConfig::named_shapes().collect::<Vec<_>>().join(", ")
            )
        })?;
        let backend = Arc::new(CpuBackend::with_numerics(common.resources.threads, common.resources.numerics.into())?);
        let limits = limits::measure(&*backend, common.dtype.into(), common.resources.threads)?;
        let storage = Quantize::storage(common.resources.quantize);
        let format = WeightFormat { compute: common.dtype.into(), storage };
        let model = Model::random(backend.clone(), config.clone(), 0, format)?;
        let (weight_bytes, kernels) = (model.weight_bytes() as u64, model.backend().description());
        let engine_config = EngineConfig { memory_bytes: common.resources.memory_bytes(), base_model: common.shape.clone() };
        let engine = EngineHandle::start(model, None, engine_config)?;
        Ok(Bench { backend, engine, requests: Cell::new(0), config, weight_bytes, limits, kernels })
    }

    /// Measures the limits again, and keeps the better: the machine may have been busy with others the first time.
    fn measure_limits_again(&mut self, common: &Common) -> anyhow::Result<()> {
        let again = limits::measure(&*self.backend, common.dtype.into(), common.resources.threads)?;
        self.limits = self.limits.max(again);
        Ok(())
    }

    /// Sends a request; the outcome comes through the receiver.
    fn submit(&self, request: Request) -> Receiver<Outcome> {
        let (sender, receiver) = channel();
        let refused = sender.clone();
        // A benchmark that has gone away no longer wants the outcome.
        let reply = Box::new(move |outcome, _| sender.send(outcome).unwrap_or(()));
        let client = Client { owner: "bench".into(), session: "bench".into() };
        self.requests.set(self.requests.get() + 1);
        if let Err(refusal) = self.engine.submit(self.requests.get().to_string().into(), client, request, reply) {
            refused.send(Err(Failure::User(refusal.to_string()))).unwrap_or(());
        }
        receiver
    }

    fn call(&self, request: Request) -> anyhow::Result<Response> {
        wait(&self.submit(request))
    }

    fn create_model(&self, model_id: &str, rank: usize) -> anyhow::Result<()> {
        let lora = LoraSpec { rank, seed: 0, train_attn: true, train_mlp: true, train_unembed: true };
        self.call(Request::CreateModel { model_id: model_id.into(), lora })?;
        Ok(())
    }

    /// Parameters of the decoder layers, and of the unembedding.
    fn matmul_parameters(&self) -> (f64, f64) {
        let c = &self.config;
        let attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads);
        let mlp = 3 * c.hidden_size * c.intermediate_size;
        ((c.num_layers * (attention + mlp)) as f64, (c.hidden_size * c.vocab_size) as f64)
    }

    /// Multiply-adds of scores and values of one forward pass over whole sequences.
    fn attention_flops(&self, sequences: usize, tokens: usize) -> f64 {
        let c = &self.config;
        let pairs = (tokens * (tokens + 1) / 2) as f64;
        4.0 * pairs * (sequences * c.num_heads * c.head_dim * c.num_layers) as f64
    }
}

fn wait(receiver: &Receiver<Outcome>) -> anyhow::Result<Response> {
    Ok(receiver.recv().context("the engine went away")??)
}

/// Token ids that look like text to a matmul: any will do, but no two prompts alike.
fn tokens(vocab_size: usize, sequence: u64, len: usize) -> Vec<i64> {
    (0..len as u64).map(|i| (strata_tensor::random::philox(sequence, [i, 0])[0] as usize % vocab_size) as i64).collect()
}

/// One measurement for people and machines: a name, a value, and its unit, with the fraction of a limit where there is one.
#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    shape: String,
    dtype: String,
    kernels: String,
    settings: BTreeMap<&'static str, usize>,
    matmul_peak_gflops: f64,
    read_bandwidth_gb_per_s: f64,
    results: BTreeMap<String, f64>,
    peak_memory_bytes: u64,
}

impl Report {
    fn new(benchmark: &'static str, common: &Common, bench: &Bench, settings: &[(&'static str, usize)]) -> Self {
        Report {
            benchmark,
            shape: common.shape.clone(),
            dtype: DType::from(common.dtype).to_string(),
            kernels: bench.kernels.clone(),
            settings: settings.iter().copied().collect(),
            matmul_peak_gflops: bench.limits.matmul_flops / 1e9,
            read_bandwidth_gb_per_s: bench.limits.read_bytes / 1e9,
            results: BTreeMap::new(),
            peak_memory_bytes: 0,
        }
    }

    fn add(&mut self, name: impl Into<String>, value: f64) {
        self.results.insert(name.into(), value);
    }

    fn finish(mut self, json: bool) -> anyhow::Result<()> {
        self.peak_memory_bytes = peak_memory_bytes()?;
        if json {
            println!("{}", serde_json::to_string(&self)?);
            return Ok(());
        }
        let settings: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("{} {} {} on {}: {}", self.benchmark, self.shape, self.dtype, self.kernels, settings.join(", "));
        println!(
            "  machine: matmul peak {:.0} GFLOP/s, read bandwidth {:.1} GB/s",
            self.matmul_peak_gflops, self.read_bandwidth_gb_per_s
        );
        for (name, value) in &self.results {
            println!("  {name:<42} {value:>12.3}");
        }
        println!("  {:<42} {:>12.3}", "peak memory, GB", self.peak_memory_bytes as f64 / 1e9);
        Ok(())
    }
}

/// The most memory this process has had, in bytes.
fn peak_memory_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading this process's memory")?;
    let Some(line) = status.lines().find_map(|l| l.strip_prefix("VmHWM:")) else { bail!("the system does not say") };
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}

/// Seconds that `body` takes, and what it answers.
fn timed<R>(body: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<(f64, R)> {
    let start = Instant::now();
    let result = body()?;
    Ok((start.elapsed().as_secs_f64(), result))
}
