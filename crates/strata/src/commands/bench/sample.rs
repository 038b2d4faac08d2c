//! `strata bench sample`.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;
use strata_engine::Speculated;
use strata_engine::api::{Request, Response, SampleRequest, Stop, TrainOp};
use strata_limits::{Inputs, Limits};

use super::adapters::Adapters;
use super::counts::{self, ElementBytes};
use super::engine::{Engine, Held, adapter_name, wait};
use super::peer::{self, Peer};
use super::report::{Case, Figure, PeakMemory, Report, Unit, forget_peak_memory, peak_memory_bytes};
use super::{Common, beside_arithmetic, least, measure_reads_up_to, median, median_of_arithmetic, progress, text, timed};
use crate::base_model::Quantize;

/// After this long a cell has enough rounds, however many were asked for: long prompts take a minute each.
const CELL_TIME: Duration = Duration::from_secs(60);
/// Pairs of a short and a long request of a round, whose difference is the time of decode steps.
const DECODES_PER_ROUND: usize = 2;

/// Settings of the sampling benchmark.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    adapters: Adapters,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Sequences at a time; several numbers for several runs.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4])]
    batch: Vec<usize>,
    #[command(flatten)]
    rounds: Rounds,
}

/// How much of each.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Rounds {
    /// Tokens to sample after each prompt.
    #[arg(long, default_value_t = 32)]
    pub new: usize,
    /// Rounds of each measurement at most; the best counts, the first is shown too. No round begins after a minute.
    #[arg(long, default_value_t = 10)]
    pub repeats: usize,
    /// Have prompts repeat themselves, and take what is most probable: what samples guess then often comes.
    #[arg(long)]
    pub repeating: bool,
}

/// Sequences that are sampled at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub batch: usize,
    pub prompt: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let cells: Vec<Cell> = args.batch.iter().map(|&batch| Cell { batch, prompt: args.prompt }).collect();
    measure(&args.common, &args.adapters, &cells, args.rounds)
}

/// Tokens after which a repeating prompt begins anew.
const REFRAIN_TOKENS: usize = 8;

/// Measures each of the cells and prints the report.
pub(super) fn measure(common: &Common, adapters: &Adapters, cells: &[Cell], rounds: Rounds) -> anyhow::Result<()> {
    let ranks = adapters.ranks(0)?;
    ensure!(rounds.new > 1 && rounds.repeats > 0, "--new must be at least 2, --repeats at least 1");
    ensure!(cells.iter().all(|cell| cell.batch > 0 && cell.prompt > 0), "--batch and --prompt must be at least 1");
    let engine = Engine::start(common, Held::Frozen(&ranks))?;
    check_room(&engine, cells, rounds.new)?;
    let sampler = Sampler::start(&engine, &ranks)?;
    let mut peer = common.start_peer(&peer::MODEL_MODULES, &ranks)?;
    let mut limits = Limits::measure(common.threads()?)?;
    let (mut times, mut peak) = (Vec::with_capacity(cells.len()), 0);
    for &cell in cells {
        let beside = Beside { limits: &mut limits, inputs: common.dtype.into(), threads: common.threads()? };
        forget_peak_memory();
        let measured = Times::measure(&sampler, peer.as_mut(), cell, rounds, Some(beside))?;
        ensure!(
            measured.step > 0.0,
            "{} new tokens took no longer than one: too few to time their steps beside whatever else runs here",
            rounds.new
        );
        peak = peak.max(measured.peak_memory_bytes);
        times.push(measured);
    }

    let mut peaks = vec![PeakMemory { of: "strata", bytes: peak }];
    let peers_peak = times.iter().flat_map(|t| &t.peers).map(|sampled| sampled.peak_memory_bytes).max();
    peaks.extend(peers_peak.map(|bytes| PeakMemory { of: "peer", bytes }));
    let mut limits = limits.max(&Limits::measure(common.threads()?)?);
    let storage = Quantize::storage(common.resources.quantize);
    let element_bytes = ElementBytes::of(common.dtype.into(), storage);
    let works: Vec<Work> = cells.iter().map(|&cell| Work::of(&sampler, cell, rounds.new, element_bytes)).collect();
    let fastest_reads = works
        .iter()
        .zip(&times)
        .filter(|(_, t)| t.guesses.is_none())
        .map(|(work, t)| work.decode_bytes / t.step / 1e9)
        .fold(0.0, f64::max);
    measure_reads_up_to(fastest_reads, &mut limits, common.threads()?)?;
    let limit = Limit { gflop_per_s: limits.fastest(common.dtype.into()).gflop_per_s, gb_per_s: limits.read_gb_per_s };
    let mut report = Report::new("sample", common, limits)?;
    report.kernels = Some(engine.info().backend.clone());
    report.peak_memory_bytes = peaks;
    report.peer = peer.map(|peer| peer.versions().clone());
    for ((cell, times), work) in cells.iter().zip(&times).zip(works) {
        let settings =
            [("batch", json!(cell.batch)), ("prompt", json!(cell.prompt)), ("new", json!(rounds.new)), ("ranks", json!(ranks))];
        let speculation = rounds.repeating.then(|| ("speculation", json!(common.resources.speculation)));
        let figures = times.figures(work, &limit);
        report.cases.push(Case {
            settings: settings.into_iter().chain(speculation).map(|(name, value)| (name.to_string(), value)).collect(),
            figures,
        });
    }
    text::print(&report, common.json)
}

pub(super) fn check_room(engine: &Engine, cells: &[Cell], new: usize) -> anyhow::Result<()> {
    let info = engine.info();
    for &Cell { batch, prompt } in cells {
        let (length, longest) = (prompt + new, info.max_context_tokens);
        ensure!(
            length <= longest,
            "--prompt and --new make {length} tokens, above {longest}, the longest sequence for which there is memory; see --memory"
        );
        let (wanted, room) = (counts::cache_tokens(batch, length), info.cache_tokens);
        ensure!(
            wanted <= room,
            "{batch} sequences of {length} tokens take room for {wanted} in the cache, which holds {room}; see --memory"
        );
    }
    Ok(())
}

/// The tenants that sample, from the base model or from an adapter each.
pub(super) struct Sampler<'e> {
    engine: &'e Engine,
    /// Rank of each tenant's adapter; none: there is one tenant, who samples from the base model.
    ranks: &'e [usize],
}

impl<'e> Sampler<'e> {
    pub(super) fn start(engine: &'e Engine, ranks: &'e [usize]) -> anyhow::Result<Self> {
        if ranks.is_empty() {
            engine.call(0, Request::CreateSampler { sampler_id: sampler_name(0), source: None })?;
        }
        for (tenant, &rank) in ranks.iter().enumerate() {
            engine.create_adapter(tenant, rank)?;
            let op = TrainOp::Snapshot { sampler_id: sampler_name(tenant), replace: false };
            engine.call(tenant, Request::Train { model_id: adapter_name(tenant), seq_id: 1, op })?;
            engine.call(tenant, Request::UnloadModel { model_id: adapter_name(tenant) })?;
        }
        Ok(Sampler { engine, ranks })
    }

    /// Whose turn the `i`-th sequence of a batch is.
    fn tenant(&self, i: usize) -> usize {
        i % self.ranks.len().max(1)
    }

    /// The rank of the adapter of the `i`-th sequence, if it has one.
    fn rank(&self, i: usize) -> Option<usize> {
        self.ranks.get(self.tenant(i)).copied()
    }

    /// Samples from all prompts at the same time. Answers with the seconds.
    fn sample(&self, prompts: &[Vec<i64>], new: usize, temperature: f32) -> anyhow::Result<f64> {
        let prompts = prompts.to_vec();
        let run = || {
            let send = |(i, prompt)| {
                let tenant = self.tenant(i);
                let request =
                    Request::Sample { sampler_id: sampler_name(tenant), sample: request(prompt, i as u64, new, temperature) };
                self.engine.submit(tenant, request)
            };
            let outcomes: Vec<_> = prompts.into_iter().enumerate().map(send).collect();
            for outcome in &outcomes {
                let Response::Sampled(output) = wait(outcome)? else {
                    anyhow::bail!("a sample was answered with something else")
                };
                let sampled = output.sequences[0].tokens.len();
                ensure!(sampled == new, "a sample of {sampled} tokens instead of {new}");
            }
            Ok(())
        };
        Ok(timed(run)?.0)
    }
}

fn sampler_name(tenant: usize) -> String {
    format!("sampler-{tenant}")
}

fn request(prompt: Vec<i64>, seed: u64, new: usize, temperature: f32) -> SampleRequest {
    SampleRequest { max_tokens: Some(new), seed, stop: Stop::Tokens(Vec::new()), temperature, ..SampleRequest::of(prompt) }
}

/// What measures the limits beside what is timed: others use the machine too, and what they leave to one round, they may not leave to the next.
pub(super) struct Beside<'a> {
    limits: &'a mut Limits,
    inputs: Inputs,
    threads: usize,
}

/// Seconds of one cell, ours and the peer's in turns, so that noise hits both.
pub(super) struct Times {
    /// Requests for one token after prompts that nobody has seen.
    pub prefills: Vec<f64>,
    /// What arithmetic gave beside each of them, in GFLOP/s, if it was measured.
    arithmetic: Vec<f64>,
    /// A token of each sequence of the batch.
    step: f64,
    /// The same by each pair of a short and a long request; noise may have made one negative.
    pub steps: Vec<f64>,
    /// What memory gave just before or after each of them, whichever was more, in GB/s, if it was measured.
    reads: Vec<f64>,
    /// What samples that repeat themselves guessed.
    guesses: Option<Guesses>,
    peers: Vec<peer::Sampled>,
    /// The most that this process had of memory since that was forgotten, but for what bandwidth was measured with.
    peak_memory_bytes: u64,
}

impl Times {
    pub(super) fn measure(
        sampler: &Sampler<'_>,
        mut peer: Option<&mut Peer>,
        cell: Cell,
        rounds: Rounds,
        mut beside: Option<Beside<'_>>,
    ) -> anyhow::Result<Self> {
        let Cell { batch, prompt } = cell;
        let Rounds { new, repeats, repeating } = rounds;
        let (period, temperature) = if repeating { (REFRAIN_TOKENS, 0.0) } else { (prompt, 1.0) };
        let before = sampler.engine.speculated();
        let mut times = Times {
            prefills: Vec::new(),
            arithmetic: Vec::new(),
            step: f64::INFINITY,
            steps: Vec::new(),
            reads: Vec::new(),
            guesses: None,
            peers: Vec::new(),
            peak_memory_bytes: 0,
        };
        let (mut shorts, mut longs) = (Vec::new(), Vec::new());
        let start = Instant::now();
        for round in 0..repeats {
            if round > 0 && start.elapsed() > CELL_TIME {
                break;
            }
            progress(format_args!("sampling after {batch} × {prompt} tokens, round {} of at most {repeats}", round + 1));
            // As in a server whose cache has been full: memory that the system has to find first is shown by the first round.
            sampler.engine.forget_prefixes();
            let prompts: Vec<_> = (0..batch).map(|_| sampler.engine.new_refrain(prompt, period)).collect();
            let now = beside.as_ref().map(|b| || b.limits.arithmetic_now(b.inputs, b.threads));
            let now = now.as_ref().map(|now| now as &dyn Fn() -> f64);
            let (seconds, arithmetic) = beside_arithmetic(now, || sampler.sample(&prompts, 1, temperature))?;
            times.prefills.push(seconds);
            times.arithmetic.extend(arithmetic);
            // By now the prompts are in the prefix cache: requests of two lengths differ by decode steps and nothing else.
            let peak = &mut times.peak_memory_bytes;
            let mut read = || {
                let Some(b) = beside.as_mut() else { return anyhow::Ok(None) };
                *peak = peak_memory_bytes()?.max(*peak);
                let reads = b.limits.measure_reads_again(b.threads)?;
                forget_peak_memory();
                Ok(Some(reads))
            };
            let before = read()?;
            for _ in 0..DECODES_PER_ROUND {
                shorts.push(sampler.sample(&prompts, 1, temperature)?);
                longs.push(sampler.sample(&prompts, new, temperature)?);
            }
            if let Some((before, after)) = before.zip(read()?) {
                times.reads.extend([before.max(after); DECODES_PER_ROUND]);
            }
            if let Some(peer) = peer.as_deref_mut() {
                times.peers.push(peer.call(&peer::Request::Sample { batch, prompt, new })?);
            }
        }
        if repeating {
            times.guesses = Some(Guesses::between(before, sampler.engine.speculated(), longs.len() * batch * (new - 1)));
        }
        times.peak_memory_bytes = peak_memory_bytes()?.max(times.peak_memory_bytes);
        times.step = (least(&longs) - least(&shorts)) / (new - 1) as f64;
        times.steps = longs.iter().zip(&shorts).map(|(long, short)| (long - short) / (new - 1) as f64).collect();
        Ok(times)
    }

    fn figures(&self, work: Work, limit: &Limit) -> Vec<Figure> {
        let peers_prefill = self.peers.iter().map(|p| p.prefill_seconds).reduce(f64::min);
        let peers_step = self.peers.iter().map(|p| p.decode_step_seconds).reduce(f64::min);
        let (prefill, step) = (least(&self.prefills), self.step);
        let prefill_rate = |seconds| work.prompt_tokens / seconds;
        let mfu = |seconds| work.prefill_flops / seconds / 1e9 / limit.gflop_per_s;
        let decode_rate = |seconds| work.sequences / seconds;
        let read_rate = |seconds| work.decode_bytes / seconds / 1e9;
        let of_bandwidth = |seconds| read_rate(seconds) / limit.gb_per_s;
        let whole = |(prefill, step): (f64, f64)| work.sequences * work.new / (prefill + step * (work.new - 1.0));
        let mut figures = vec![
            Figure::new("prefill_tokens_per_s", "prefill, best", Unit::TokensPerSecond, prefill_rate(prefill))
                .beside(peers_prefill.map(prefill_rate))
                .in_table(),
            Figure::new("prefill_first_tokens_per_s", "prefill, first", Unit::TokensPerSecond, prefill_rate(self.prefills[0])),
            Figure::new("prefill_mfu", "MFU of prefill", Unit::OfArithmetic, mfu(prefill))
                .beside(peers_prefill.map(mfu))
                .in_table(),
            Figure::new("decode_tokens_per_s", "decode", Unit::TokensPerSecond, decode_rate(step))
                .beside(peers_step.map(decode_rate))
                .in_table(),
            Figure::new("decode_gb_per_s", "decode, weights and cache", Unit::GbPerSecond, read_rate(step)),
            Figure::new("decode_fraction_of_bandwidth", "decode, weights and cache", Unit::OfBandwidth, of_bandwidth(step))
                .beside(peers_step.map(of_bandwidth))
                .in_table(),
            Figure::new(
                "request_tokens_per_s",
                "new tokens of prefill and decode",
                Unit::TokensPerSecond,
                whole((prefill, step)),
            )
            .beside(peers_prefill.zip(peers_step).map(whole)),
        ];
        if let Some(mfu) = median_of_arithmetic(work.prefill_flops, &self.prefills, &self.arithmetic) {
            let name = "MFU of prefill, of arithmetic beside it";
            figures.insert(3, Figure::new("prefill_mfu_beside_it", name, Unit::OfArithmetic, mfu));
        }
        // Of the pairs of requests but those that noise has made negative, which say nothing.
        let pairs = self.steps.iter().zip(&self.reads).filter(|(step, _)| **step > 0.0);
        let of_its_time: Vec<f64> = pairs.map(|(&step, reads)| read_rate(step) / reads).collect();
        if !of_its_time.is_empty() {
            let name = "decode, median, of what memory gave beside it";
            let beside = Figure::new("decode_fraction_of_bandwidth_beside_it", name, Unit::OfBandwidth, median(&of_its_time));
            figures.insert(figures.len() - 1, beside);
        }
        if let Some(Guesses { accepted, per_token }) = self.guesses {
            // Steps of several tokens read as much as those of one.
            figures.retain(|figure| !matches!(figure.unit, Unit::GbPerSecond | Unit::OfBandwidth));
            figures.push(Figure::new("guesses_per_token", "guesses checked", Unit::PerToken, per_token).in_table());
            figures.push(Figure::new("accepted_fraction", "guesses that came", Unit::OfGuesses, accepted).in_table());
        }
        figures
    }
}

/// What came of the guesses of a cell.
struct Guesses {
    /// The part that was what was then drawn; 0 if there were none.
    accepted: f64,
    per_token: f64,
}

impl Guesses {
    fn between(before: Speculated, after: Speculated, tokens: usize) -> Self {
        let [proposed, accepted] = [after.proposed - before.proposed, after.accepted - before.accepted].map(|n| n as f64);
        Guesses { accepted: accepted / proposed.max(1.0), per_token: proposed / tokens as f64 }
    }
}

/// What the limits of the machine are for this benchmark.
struct Limit {
    gflop_per_s: f64,
    gb_per_s: f64,
}

/// What there is to do in one cell.
#[derive(Clone, Copy)]
pub(super) struct Work {
    sequences: f64,
    prompt_tokens: f64,
    new: f64,
    pub prefill_flops: f64,
    /// Of an average step.
    pub decode_flops: f64,
    pub decode_bytes: f64,
}

impl Work {
    pub(super) fn of(sampler: &Sampler<'_>, cell: Cell, new: usize, bytes: ElementBytes) -> Self {
        let config = &sampler.engine.config;
        // Only adapters that a sequence samples from are read.
        let used = &sampler.ranks[..sampler.ranks.len().min(cell.batch)];
        // The first step sees the prompt and one token, the last all but the last.
        let context = cell.prompt as f64 + new as f64 / 2.0;
        Work {
            sequences: cell.batch as f64,
            prompt_tokens: (cell.batch * cell.prompt) as f64,
            new: new as f64,
            prefill_flops: (0..cell.batch).map(|i| counts::prefill(config, sampler.rank(i), cell.prompt)).sum(),
            decode_flops: (0..cell.batch).map(|i| counts::decode(config, sampler.rank(i), context)).sum(),
            decode_bytes: counts::decode_bytes(config, bytes, used, cell.batch, context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_is_held_against_what_the_machine_gave_beside_it() {
        let work =
            Work { sequences: 1.0, prompt_tokens: 10.0, new: 5.0, prefill_flops: 60e9, decode_flops: 1.0, decode_bytes: 10e9 };
        // Prefills of 60, of which the first does not count, 20, 30 and 60 GFLOP/s, where there were 60, 40, 40 and 120; decodes of 20, 40 and 10 GB/s, where there were 40, 50 and 40, and two that noise has spoilt.
        let times = Times {
            prefills: vec![1.0, 3.0, 2.0, 1.0],
            arithmetic: vec![60.0, 40.0, 40.0, 120.0],
            step: 0.25,
            steps: vec![0.5, 0.25, 1.0, -1.0, -2.0],
            reads: vec![40.0, 50.0, 40.0, 40.0, 40.0],
            guesses: None,
            peers: Vec::new(),
            peak_memory_bytes: 0,
        };
        let limit = Limit { gflop_per_s: 100.0, gb_per_s: 50.0 };
        let figure = |times: &Times, key: &str| times.figures(work, &limit).into_iter().find(|f| f.key == key).map(|f| f.ours);
        assert_eq!(figure(&times, "decode_fraction_of_bandwidth"), Some(0.8));
        assert_eq!(figure(&times, "decode_fraction_of_bandwidth_beside_it"), Some(0.5));
        assert_eq!((figure(&times, "prefill_mfu"), figure(&times, "prefill_mfu_beside_it")), (Some(0.6), Some(0.5)));
        let unread = Times { reads: Vec::new(), arithmetic: Vec::new(), ..times };
        assert_eq!(figure(&unread, "decode_fraction_of_bandwidth_beside_it"), None);
        assert_eq!(figure(&unread, "prefill_mfu_beside_it"), None);
    }
}
