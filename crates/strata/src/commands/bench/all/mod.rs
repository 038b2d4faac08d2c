//! `strata bench all`: how cost grows along each axis, in one run.
//!
//! Every point is what `strata bench train` or `strata bench sample` measures under one setting. Points that differ in the axis alone lie on a
//! [curve](plan::Curve); beside each stands what the limits of this machine allow for the work that was counted.

mod plan;
mod report;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use strata_limits::Limits;
use strata_model::lora::RANK_MAX;
use strata_model::{EMBEDDED_NAME, ModelConfig, ModelSource};

use self::plan::{Curve, FULL, QUICK, Setting, Work};
use self::report::{Curves, LeftOut, Machine, Pass, Settings};
use super::counts::{self, ElementBytes};
use super::engine::{Engine, Held};
use super::report::{Report, forget_peak_memory, peak_memory_bytes};
use super::{Common, measure_reads_up_to, median, progress, sample, train};
use crate::base_model::Quantize;

/// Layers of the model unless it is said how many: of the products of a layer and of the unembedding neither hides the other, and a run takes minutes.
const LAYERS: usize = 8;
/// After this long a point has enough passes, however many were asked for: on a slow machine one counts.
const POINT_TIME: Duration = Duration::from_secs(4);
/// So long a point goes on whose passes are short, if it passes more than once: a median of three tenths of a second says what the neighbours did then.
const LEAST_POINT_TIME: Duration = Duration::from_secs(1);
/// How many times as often as was asked for it then passes at most.
const MORE_PASSES_MAX: usize = 8;
/// Tokens that are sampled to time decode steps: their mean context is but little longer than the prompt.
const NEW: usize = 32;
/// Of the memory, what the weights of a point may take.
const WEIGHTS_FRACTION: f64 = 0.5;

/// Settings of all curves.
#[derive(Debug, clap::Args)]
#[command(mut_arg("shape", |shape| shape.default_value_if("quick", "true", EMBEDDED_NAME)))]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Passes of each point; the median counts. Of long ones there are fewer, of short ones more.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Few and small points of the shape in this binary: to see that all of it runs, in seconds.
    #[arg(long)]
    quick: bool,
}

/// What was found at the settings of one kind of work.
type Found = HashMap<(Work, Setting), Result<Pass, String>>;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (common, start) = (&args.common, Instant::now());
    ensure!(args.repeats > 0, "--repeats must be at least 1");
    ensure!(common.compare.is_none(), "--compare: curves are ours alone; the peer goes with train, sample, matmul and delta");
    let whole = config_of(common, None)?;
    let layers_max = whole.num_layers;
    let (grid, layers) = if args.quick { (QUICK, 2) } else { (FULL, LAYERS) };
    let layers = common.layers.unwrap_or(layers.min(layers_max));
    ensure!((1..=layers_max).contains(&layers), "--layers {layers} is not between 1 and {layers_max}");
    let curves = grid.curves(layers, layers_max);
    debug_assert!(curves.iter().flat_map(|curve| &curve.points).all(|(_, at)| at.rank <= RANK_MAX));

    let threads = common.threads()?;
    let mut reads = Reads { limits: Limits::measure(threads)?, threads, quick: args.quick };
    let mut kernels = None;
    let mut found = Found::new();
    for settings in by_tenants(&curves) {
        let config = config_of(common, Some(settings[0].1.layers))?;
        // So many tokens pass every expert.
        let wanted = counts::weight_bytes(&config, bytes(common), &[], i32::MAX as usize);
        let memory = common.resources.memory_bytes();
        if wanted > memory as f64 * WEIGHTS_FRACTION {
            let reason = format!("weights of {wanted:.0} bytes are above half of the memory, {memory} bytes; see --memory");
            found.extend(settings.into_iter().map(|key| (key, Err(reason.clone()))));
            continue;
        }
        let engine = Engine::of(common, config, Held::AsItComes)?;
        kernels.get_or_insert_with(|| engine.info().backend.clone());
        measure_all(common, &engine, &settings, args.repeats, &mut reads, &mut found)?;
    }
    let mut limits = reads.limits;
    if !args.quick {
        limits = limits.max(&Limits::measure(threads)?);
    }
    let fastest_reads = found.values().flatten().map(|pass| pass.bytes / pass.seconds / 1e9).fold(0.0, f64::max);
    if !args.quick {
        measure_reads_up_to(fastest_reads, &mut limits, threads)?;
    }

    let (gflop_per_s, best_gb_per_s) = (limits.fastest(common.dtype.into()).gflop_per_s, limits.read_gb_per_s);
    let mut left_out = Vec::new();
    let curves = curves.into_iter().map(|Curve { work, axis, points }| {
        let mut measured = Vec::with_capacity(points.len());
        for (x, setting) in points {
            match &found[&(work, setting)] {
                Ok(pass) => measured.push(pass.beside(x, setting, gflop_per_s, best_gb_per_s)),
                Err(reason) => left_out.push(LeftOut { work, axis, x, reason: reason.clone() }),
            }
        }
        report::Curve { work, axis, points: measured }
    });
    let curves = curves.collect();
    let mut report = Report::new("all", common, limits)?;
    report.kernels = kernels;
    let machine = Machine {
        processor: processor(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: strata_limits::memory_bytes(),
    };
    let settings = Settings {
        layers,
        layers_of_shape: layers_max,
        new: NEW,
        repeats: args.repeats,
        memory_bytes: common.resources.memory_bytes(),
    };
    let seconds = start.elapsed().as_secs_f64();
    Curves { report, version: env!("CARGO_PKG_VERSION"), machine, settings, curves, left_out, seconds }.print(common.json)
}

/// The shape with so many of its layers, or all.
fn config_of(common: &Common, layers: Option<usize>) -> anyhow::Result<ModelConfig> {
    if common.shape != EMBEDDED_NAME {
        return common.with_layers(layers);
    }
    let all = ModelSource::Embedded.config()?;
    let Some(layers) = layers else { return Ok(all) };
    let mut json: Value = serde_json::from_str(&all.to_json())?;
    json["num_hidden_layers"] = json!(layers);
    if let Some(types) = json.get_mut("layer_types").and_then(Value::as_array_mut) {
        types.truncate(layers);
    }
    Ok(ModelConfig::from_json(&json.to_string(), None)?)
}

/// Settings of all curves, each once, those together that share an engine and its adapters, in the order of the work in them.
fn by_tenants(curves: &[Curve]) -> Vec<Vec<(Work, Setting)>> {
    let mut groups: Vec<Vec<(Work, Setting)>> = Vec::new();
    for curve in curves {
        for &(_, setting) in &curve.points {
            let key = (curve.work, setting);
            match groups.iter_mut().find(|group| group[0].1.tenants() == setting.tenants()) {
                Some(group) if group.contains(&key) => {}
                Some(group) => group.push(key),
                None => groups.push(vec![key]),
            }
        }
    }
    // The peak of memory only grows: what needs less goes first.
    for group in &mut groups {
        group.sort_by_key(|(work, setting)| (*work != Work::Train, setting.num_tokens()));
    }
    groups
}

/// Limits of the machine, and how fast its memory is read while something is measured: a virtual machine is moved about, and its memory is half as fast in one minute as in the next.
struct Reads {
    limits: Limits,
    threads: usize,
    quick: bool,
}

impl Reads {
    /// Runs `body`; answers with what memory gave before or after it, whichever was more. A quick run measures once for all.
    fn beside<T>(&mut self, body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, f64)> {
        if self.quick {
            return Ok((body()?, self.limits.read_gb_per_s));
        }
        let before = self.limits.measure_reads_again(self.threads)?;
        let measured = body()?;
        Ok((measured, self.limits.measure_reads_again(self.threads)?.max(before)))
    }
}

/// Measures what one engine and its adapters serve.
fn measure_all(
    common: &Common,
    engine: &Engine,
    settings: &[(Work, Setting)],
    repeats: usize,
    reads: &mut Reads,
    found: &mut Found,
) -> anyhow::Result<()> {
    let (_, adapters, rank) = settings[0].1.tenants();
    let ranks = vec![rank; adapters];
    let trains: Vec<Setting> = settings.iter().filter(|(work, _)| *work == Work::Train).map(|of| of.1).collect();
    if !trains.is_empty() {
        match train::Trainer::start(engine, &ranks) {
            Ok(mut trainer) => {
                // What optimizers keep has its memory before anything is timed.
                trainer.optim_step()?;
                for setting in trains {
                    found.insert(
                        (Work::Train, setting),
                        measure_training(common, engine, &mut trainer, setting, repeats, reads)?,
                    );
                }
                trainer.end()?;
            }
            Err(no_room) => found.extend(trains.into_iter().map(|at| ((Work::Train, at), Err(no_room.to_string())))),
        }
    }
    let sampler = match sample::Sampler::start(engine, &ranks) {
        Ok(sampler) => sampler,
        Err(no_room) => {
            let others = settings.iter().filter(|key| key.0 != Work::Train);
            found.extend(others.map(|&key| (key, Err(no_room.to_string()))));
            return Ok(());
        }
    };
    for &(work, setting) in settings {
        // Of one measurement come the prefill and the steps after it.
        if work != Work::Train && !found.contains_key(&(work, setting)) {
            let [prefill, decode] = measure_sampling(common, engine, &sampler, setting, repeats, reads)?;
            found.insert((Work::Prefill, setting), prefill);
            found.insert((Work::Decode, setting), decode);
        }
    }
    Ok(())
}

fn measure_training(
    common: &Common,
    engine: &Engine,
    trainer: &mut train::Trainer<'_>,
    setting: Setting,
    repeats: usize,
    reads: &mut Reads,
) -> anyhow::Result<Result<Pass, String>> {
    let Setting { adapters, rank, batch, tokens, .. } = setting;
    let cell = train::Cell::of(batch / adapters, tokens);
    if let Err(no_room) = train::check_room(engine, &[cell]) {
        return Ok(Err(no_room.to_string()));
    }
    progress(format_args!("{setting:?}"));
    let mut seconds = Vec::new();
    let each = |counts| {
        let measured = train::Rounds::new(trainer, None, cell, 1, false, None)?;
        if counts {
            seconds.extend(measured.seconds);
        }
        Ok(())
    };
    let (peak_memory_bytes, read_gb_per_s) = reads.beside(|| peak_of(|| passes(repeats, each)))?;
    let ranks = vec![rank; adapters];
    Ok(Ok(Pass {
        passes: seconds.len(),
        seconds: median(&seconds),
        tokens: setting.num_tokens(),
        flops: counts::train(&engine.config, rank, batch, tokens).model,
        // Forward and on the way back.
        bytes: 2.0 * counts::weight_bytes(&engine.config, bytes(common), &ranks, setting.num_tokens()),
        read_gb_per_s,
        peak_memory_bytes,
    }))
}

/// The prefill and a decode step.
fn measure_sampling(
    common: &Common,
    engine: &Engine,
    sampler: &sample::Sampler<'_>,
    setting: Setting,
    repeats: usize,
    reads: &mut Reads,
) -> anyhow::Result<[Result<Pass, String>; 2]> {
    let Setting { adapters, rank, batch, tokens, .. } = setting;
    let cell = sample::Cell { batch, prompt: tokens };
    if let Err(no_room) = sample::check_room(engine, &[cell], NEW) {
        return Ok([Err(no_room.to_string()), Err(no_room.to_string())]);
    }
    let (mut prefills, mut steps) = (Vec::new(), Vec::new());
    let each = |counts| {
        let times =
            sample::Times::measure(sampler, None, cell, sample::Rounds { new: NEW, repeats: 1, repeating: false }, None)?;
        if counts {
            prefills.extend(times.prefills);
            steps.extend(times.steps);
        }
        Ok(())
    };
    let (peak_memory_bytes, read_gb_per_s) = reads.beside(|| peak_of(|| passes(repeats, each)))?;
    let work = sample::Work::of(sampler, cell, NEW, bytes(common));
    let prefill = Pass {
        passes: prefills.len(),
        seconds: median(&prefills),
        tokens: setting.num_tokens(),
        flops: work.prefill_flops,
        bytes: counts::weight_bytes(&engine.config, bytes(common), &vec![rank; adapters.min(batch)], setting.num_tokens()),
        read_gb_per_s,
        peak_memory_bytes,
    };
    let seconds = median(&steps);
    let step = Pass {
        passes: steps.len(),
        seconds,
        tokens: batch,
        flops: work.decode_flops,
        bytes: work.decode_bytes,
        read_gb_per_s,
        peak_memory_bytes,
    };
    let decode = if seconds > 0.0 {
        Ok(step)
    } else {
        Err(format!("{NEW} new tokens took no longer than one: too few to time their steps beside whatever else runs here"))
    };
    Ok([Ok(prefill), decode])
}

/// Runs `body`; answers with the most memory that the process had meanwhile.
fn peak_of(body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<u64> {
    forget_peak_memory();
    body()?;
    peak_memory_bytes()
}

/// Has a point pass as often as was asked for and there is time; more often if that was soon done. The first pass, for which the system
/// has to find memory, is told that it does not count, unless one alone was asked for.
fn passes(repeats: usize, mut pass: impl FnMut(bool) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if repeats == 1 {
        return pass(true);
    }
    pass(false)?;
    let start = Instant::now();
    for done in 0..MORE_PASSES_MAX * repeats {
        let enough = if done < repeats { POINT_TIME } else { LEAST_POINT_TIME };
        if done > 0 && start.elapsed() > enough {
            break;
        }
        pass(true)?;
    }
    Ok(())
}

fn bytes(common: &Common) -> ElementBytes {
    ElementBytes::of(common.dtype.into(), Quantize::storage(common.resources.quantize))
}

/// What the system calls the processor.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(name.trim_start_matches([' ', '\t', ':']).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_is_measured_once_by_an_engine_of_its_tenants() {
        let curves = FULL.curves(8, 28);
        let groups = by_tenants(&curves);
        let all: Vec<_> = groups.iter().flatten().collect();
        for curve in &curves {
            for (_, setting) in &curve.points {
                assert_eq!(all.iter().filter(|of| ***of == (curve.work, *setting)).count(), 1, "{setting:?}");
            }
        }
        assert!(groups.iter().all(|group| group.iter().all(|of| of.1.tenants() == group[0].1.tenants())));
        // The base, five more ranks, four numbers of adapters of another rank and four more of layers.
        assert_eq!(groups.len(), 14);
    }

    #[test]
    fn a_point_passes_as_often_as_was_asked_for_or_more_often_and_the_first_does_not_count() {
        let count = |repeats| {
            let mut counted = Vec::new();
            passes(repeats, |counts| {
                counted.push(counts);
                Ok(())
            })
            .unwrap();
            counted
        };
        assert_eq!(count(1), [true]);
        let counted = count(3);
        assert!(!counted[0] && counted[1..].iter().all(|&counts| counts));
        assert!((3..=3 * MORE_PASSES_MAX).contains(&(counted.len() - 1)));
    }
}
