//! `strata bench train`.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde_json::json;
use strata_engine::api::{AdamParams, Datum, LossInput, LossSpec, LossValues, Request, TrainOp};
use strata_limits::Limits;

use super::adapters::Adapters;
use super::counts::{self, TrainFlops};
use super::engine::{Engine, Held, adapter_name, wait};
use super::peer::{self, Peer};
use super::report::{Case, Figure, PeakMemory, Report, Unit, forget_peak_memory, peak_memory_bytes};
use super::{ArithmeticNow, Common, beside_arithmetic, later, least, median_of_arithmetic, progress, text, timed};

/// Settings of the training benchmark.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    adapters: Adapters,
    /// Sequences of a forward_backward.
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 256)]
    seq_len: usize,
    /// Tokens at the start of each sequence whose weight is 0, as those of a prompt.
    #[arg(long, default_value_t = 0)]
    prompt: usize,
    /// Ask for no log-probabilities of those tokens: the loss's setting weightless_logprobs is then 0.
    #[arg(long, requires = "prompt")]
    no_weightless_logprobs: bool,
    /// Have all sequences of a request begin with the same such tokens, as the completions of one prompt do.
    #[arg(long, requires = "prompt")]
    shared_prompt: bool,
    /// Steps; the first is shown apart, of the others the fastest and the mean.
    #[arg(long, default_value_t = 4)]
    steps: usize,
}

/// A forward_backward of each adapter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub batch: usize,
    pub seq_len: usize,
    /// Of them, at the start, those of weight 0.
    pub prompt: usize,
    /// Whether log-probabilities of those are asked for.
    pub weightless_logprobs: bool,
    /// Whether they are the same in all sequences of a request.
    pub shared_prompt: bool,
}

impl Cell {
    /// Sequences all of whose tokens count.
    pub(super) fn of(batch: usize, seq_len: usize) -> Self {
        Cell { batch, seq_len, prompt: 0, weightless_logprobs: true, shared_prompt: false }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let cell = Cell {
        prompt: args.prompt,
        weightless_logprobs: !args.no_weightless_logprobs,
        shared_prompt: args.shared_prompt,
        ..Cell::of(args.batch, args.seq_len)
    };
    measure(&args.common, &args.adapters, &[cell], args.steps)
}

/// Measures each of the cells and prints the report.
pub(super) fn measure(common: &Common, adapters: &Adapters, cells: &[Cell], steps: usize) -> anyhow::Result<()> {
    let ranks = adapters.ranks(1)?;
    ensure!(!ranks.is_empty(), "--adapters must be at least 1: the base model is frozen");
    ensure!(steps > 0, "--steps must be at least 1");
    ensure!(cells.iter().all(|cell| cell.batch > 0 && cell.seq_len > 0), "--batch and --seq-len must be at least 1");
    ensure!(cells.iter().all(|cell| cell.prompt < cell.seq_len), "--prompt must be below --seq-len");
    let weighted = cells.iter().all(|cell| cell.prompt == 0);
    ensure!(weighted || common.compare.is_none(), "--compare: the peer does not know of weights, so --prompt must be 0");
    let engine = Engine::start(common, Held::Training(&ranks))?;
    check_room(&engine, cells)?;
    let mut trainer = Trainer::start(&engine, &ranks)?;
    let mut peer = common.start_peer(&peer::MODEL_MODULES, &ranks)?;
    let threads = common.threads()?;
    let limits = Limits::measure(threads)?;
    let arithmetic_now = || limits.arithmetic_now(common.dtype.into(), threads);
    forget_peak_memory();

    // The peer's peak only grows: what needs less memory goes first.
    let mut peaks = Vec::new();
    let mut all_rounds = |again: bool| -> anyhow::Result<Vec<Rounds>> {
        let (ours, peers) = match again {
            true => ("strata, activations recomputed", "peer, checkpointed"),
            false => ("strata", "peer, not checkpointed"),
        };
        engine.compute_activations_again(again);
        let rounds = |&cell| Rounds::new(&mut trainer, peer.as_mut(), cell, steps, again, Some(&arithmetic_now));
        let rounds: Vec<Rounds> = cells.iter().map(rounds).collect::<anyhow::Result<_>>()?;
        peaks.push(PeakMemory { of: ours, bytes: peak_memory_bytes()? });
        let of_peer = rounds.iter().flat_map(|rounds| &rounds.peers).map(|trained| trained.peak_memory_bytes).max();
        peaks.extend(of_peer.map(|bytes| PeakMemory { of: peers, bytes }));
        Ok(rounds)
    };
    let recomputed = all_rounds(true)?;
    let runs = all_rounds(false)?;

    let limits = limits.clone().max(&Limits::measure(threads)?);
    let gflop_per_s = limits.fastest(common.dtype.into()).gflop_per_s;
    let mut report = Report::new("train", common, limits)?;
    report.kernels = Some(engine.info().backend.clone());
    report.peak_memory_bytes = peaks;
    report.peer = peer.map(|peer| peer.versions().clone());
    for ((cell, rounds), recomputed) in cells.iter().zip(&runs).zip(&recomputed) {
        let flops = ranks.iter().map(|&rank| counts::train(&engine.config, rank, cell.batch, cell.seq_len));
        let flops = flops.fold(TrainFlops { model: 0.0, recompute: 0.0 }, |a, b| TrainFlops {
            model: a.model + b.model,
            recompute: a.recompute + b.recompute,
        });
        let num_tokens = (ranks.len() * cell.batch * cell.seq_len) as f64;
        let settings = [
            ("batch", json!(cell.batch)),
            ("seq_len", json!(cell.seq_len)),
            ("prompt", json!(cell.prompt)),
            ("weightless_logprobs", json!(cell.weightless_logprobs)),
            ("shared_prompt", json!(cell.shared_prompt)),
            ("ranks", json!(ranks)),
            ("steps", json!(steps)),
        ];
        let mut figures = rounds.figures(num_tokens, &flops, gflop_per_s);
        figures.extend(recomputed.figures_of_recomputing(num_tokens, &flops, gflop_per_s));
        report
            .cases
            .push(Case { settings: settings.map(|(name, value)| (name.to_string(), value)).into_iter().collect(), figures });
    }
    text::print(&report, common.json)
}

pub(super) fn check_room(engine: &Engine, cells: &[Cell]) -> anyhow::Result<()> {
    let room = engine.info().max_example_tokens;
    let longest = cells.iter().map(|cell| cell.seq_len).max().unwrap_or(0);
    ensure!(
        longest <= room,
        "--seq-len {longest} is above {room}, the longest example for which there is memory; see --memory"
    );
    Ok(())
}

/// The tenants that train.
pub(super) struct Trainer<'e> {
    engine: &'e Engine,
    tenants: usize,
    /// Place of the last operation in the order of each tenant.
    seq_id: u64,
}

impl<'e> Trainer<'e> {
    /// Makes an adapter of each rank, of a tenant of its own.
    pub(super) fn start(engine: &'e Engine, ranks: &[usize]) -> anyhow::Result<Self> {
        for (tenant, &rank) in ranks.iter().enumerate() {
            engine.create_adapter(tenant, rank)?;
        }
        Ok(Trainer { engine, tenants: ranks.len(), seq_id: 0 })
    }

    /// Sends an operation of every tenant, and waits for all. Answers with the seconds.
    fn all(&mut self, op: impl Fn() -> TrainOp) -> anyhow::Result<f64> {
        self.seq_id += 1;
        let ops: Vec<TrainOp> = (0..self.tenants).map(|_| op()).collect();
        let run = || {
            let send = |(tenant, op)| {
                let request = Request::Train { model_id: adapter_name(tenant), seq_id: self.seq_id, op };
                self.engine.submit(tenant, request)
            };
            let outcomes: Vec<_> = ops.into_iter().enumerate().map(send).collect();
            outcomes.iter().try_for_each(|outcome| wait(outcome).map(drop))
        };
        Ok(timed(run)?.0)
    }

    /// Gives up the adapters and their memory.
    pub(super) fn end(self) -> anyhow::Result<()> {
        (0..self.tenants)
            .try_for_each(|tenant| self.engine.call(tenant, Request::UnloadModel { model_id: adapter_name(tenant) }).map(drop))
    }

    fn forward_backward(&mut self, cell: Cell) -> anyhow::Result<f64> {
        let engine = self.engine;
        let without = ("weightless_logprobs".to_string(), 0.0);
        let config: BTreeMap<String, f64> = (!cell.weightless_logprobs).then_some(without).into_iter().collect();
        let data = || {
            let prompt = cell.shared_prompt.then(|| engine.new_sequence(cell.prompt));
            (0..cell.batch).map(|_| datum(engine, cell, prompt.as_deref())).collect()
        };
        let loss = LossSpec { name: "cross_entropy".into(), config };
        self.all(|| TrainOp::ForwardBackward { data: data(), loss: loss.clone(), forward_only: false })
    }

    /// A step of every tenant's optimizer.
    pub(super) fn optim_step(&mut self) -> anyhow::Result<f64> {
        self.all(|| TrainOp::OptimStep(AdamParams::default()))
    }
}

/// An example; `shared`: what it begins with.
fn datum(engine: &Engine, Cell { seq_len: len, prompt, .. }: Cell, shared: Option<&[i64]>) -> Datum {
    let mut text = engine.new_sequence(len + 1);
    if let Some(shared) = shared {
        text[..prompt].copy_from_slice(shared);
    }
    let (tokens, targets) = (text[..len].to_vec(), text[1..].to_vec());
    let input = |values| LossInput { shape: vec![len], values };
    let loss_inputs = [
        ("target_tokens".to_string(), input(LossValues::I64(targets))),
        ("weights".to_string(), input(LossValues::F32((0..len).map(|t| if t < prompt { 0.0 } else { 1.0 }).collect()))),
    ];
    Datum { tokens, images: Vec::new(), loss_inputs: loss_inputs.into() }
}

/// Steps of ours and of the peer in turns, so that noise hits both.
pub(super) struct Rounds {
    pub seconds: Vec<f64>,
    /// What arithmetic gave beside each of them, in GFLOP/s, if it was measured.
    arithmetic: Vec<f64>,
    optimizer_seconds: Vec<f64>,
    peers: Vec<peer::Trained>,
}

impl Rounds {
    pub(super) fn new(
        trainer: &mut Trainer<'_>,
        mut peer: Option<&mut Peer>,
        cell: Cell,
        steps: usize,
        checkpointing: bool,
        arithmetic_now: ArithmeticNow<'_>,
    ) -> anyhow::Result<Self> {
        let mut rounds =
            Rounds { seconds: Vec::new(), arithmetic: Vec::new(), optimizer_seconds: Vec::new(), peers: Vec::new() };
        for step in 1..=steps {
            progress(format_args!("training {} × {} tokens, step {step} of {steps}", cell.batch, cell.seq_len));
            let (seconds, arithmetic) = beside_arithmetic(arithmetic_now, || trainer.forward_backward(cell))?;
            rounds.seconds.push(seconds);
            rounds.arithmetic.extend(arithmetic);
            rounds.optimizer_seconds.push(trainer.optim_step()?);
            if let Some(peer) = peer.as_deref_mut() {
                rounds.peers.push(peer.call(&peer::Request::Train {
                    batch: cell.batch,
                    seq_len: cell.seq_len,
                    checkpointing,
                })?);
            }
        }
        Ok(rounds)
    }

    /// `gflop_per_s`: the limit.
    fn figures(&self, num_tokens: f64, flops: &TrainFlops, gflop_per_s: f64) -> Vec<Figure> {
        let peers: Vec<f64> = self.peers.iter().map(|p| p.seconds).collect();
        let peers_optimizer: Vec<f64> = self.peers.iter().map(|p| p.optimizer_seconds).collect();
        let beside =
            |seconds: &[f64], figure: &dyn Fn(f64) -> f64| (!seconds.is_empty()).then(|| figure(least(later(seconds))));
        let best = least(later(&self.seconds));
        let mean = later(&self.seconds).iter().sum::<f64>() / later(&self.seconds).len() as f64;
        let rate = |seconds| num_tokens / seconds;
        let mfu = |seconds| flops.model / seconds / 1e9 / gflop_per_s;
        let mut figures = vec![
            Figure::new("forward_backward_tokens_per_s", "forward_backward, best", Unit::TokensPerSecond, rate(best))
                .beside(beside(&peers, &rate))
                .in_table(),
            Figure::new("forward_backward_mean_tokens_per_s", "forward_backward, mean", Unit::TokensPerSecond, rate(mean)),
            Figure::new(
                "forward_backward_first_tokens_per_s",
                "forward_backward, first",
                Unit::TokensPerSecond,
                rate(self.seconds[0]),
            )
            .beside(peers.first().map(|&seconds| rate(seconds))),
            Figure::new("useful_gflop_per_s", "useful work", Unit::GflopPerSecond, flops.model / best / 1e9),
            Figure::new("mfu", "MFU: useful work", Unit::OfArithmetic, mfu(best)).beside(beside(&peers, &mfu)).in_table(),
            Figure::new("optim_step_seconds", "optim_step, best", Unit::Seconds, least(&self.optimizer_seconds))
                .beside(beside(&peers_optimizer, &|seconds| seconds)),
        ];
        if let Some(mfu) = median_of_arithmetic(flops.model, &self.seconds, &self.arithmetic) {
            let name = "MFU, of arithmetic beside it";
            figures.insert(figures.len() - 1, Figure::new("mfu_beside_it", name, Unit::OfArithmetic, mfu));
        }
        figures
    }

    /// Of rounds in which both sides compute activations again.
    fn figures_of_recomputing(&self, num_tokens: f64, flops: &TrainFlops, gflop_per_s: f64) -> [Figure; 2] {
        let peers: Vec<f64> = self.peers.iter().map(|p| p.seconds).collect();
        let figure = |key, label, unit, of: &dyn Fn(f64) -> f64| {
            let beside = (!peers.is_empty()).then(|| of(least(later(&peers))));
            Figure::new(key, label, unit, of(least(later(&self.seconds)))).beside(beside).in_table()
        };
        let (rate, label) = ("forward_backward_recomputed_tokens_per_s", "forward_backward, activations recomputed");
        let hfu = |seconds: f64| (flops.model + flops.recompute) / seconds / 1e9 / gflop_per_s;
        [
            figure(rate, label, Unit::TokensPerSecond, &|seconds| num_tokens / seconds),
            figure("hfu", "HFU of that: with what is recomputed", Unit::OfArithmetic, &hfu),
        ]
    }
}
