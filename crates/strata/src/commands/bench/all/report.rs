//! Curves, for people and scripts.

use std::fmt::Write;

use serde::Serialize;

use crate::output::{self, say};

use super::super::report::Report;
use super::super::text;
use super::plan::{Axis, Setting, Work};

/// Everything that a run found.
#[derive(Serialize)]
pub(super) struct Curves {
    #[serde(flatten)]
    pub report: Report,
    pub version: &'static str,
    pub machine: Machine,
    pub settings: Settings,
    pub curves: Vec<Curve>,
    pub left_out: Vec<LeftOut>,
    /// Of the whole run.
    pub seconds: f64,
}

/// What it ran on.
#[derive(Serialize)]
pub(super) struct Machine {
    /// What the system calls the processor.
    pub processor: Option<String>,
    /// Those that this process may use.
    pub cores: usize,
    pub memory_bytes: u64,
}

/// What holds for all points.
#[derive(Serialize)]
pub(super) struct Settings {
    /// Layers where they are not the axis, of how many.
    pub layers: usize,
    pub layers_of_shape: usize,
    /// Tokens that are sampled to time decode steps.
    pub new: usize,
    /// Passes of a point at most.
    pub repeats: usize,
    pub memory_bytes: u64,
}

#[derive(Serialize)]
pub(super) struct Curve {
    pub work: Work,
    pub axis: Axis,
    pub points: Vec<Point>,
}

/// One pass: a forward_backward of all adapters, a prefill of all prompts, or a decode step of all sequences.
#[derive(Serialize)]
pub(super) struct Point {
    pub x: usize,
    #[serde(flatten)]
    pub setting: Setting,
    /// Passes that were timed; the middle one counts.
    pub passes: usize,
    pub seconds: f64,
    pub tokens_per_s: f64,
    /// What one pass has to compute and to read.
    pub flops: f64,
    pub bytes: f64,
    /// The bandwidth that it is held against: what memory gave at the time, or the best of the run if the pass read faster.
    pub read_gb_per_s: f64,
    /// At the limit by which the pass takes longer.
    pub bound: Bound,
    pub limit_tokens_per_s: f64,
    pub fraction_of_limit: f64,
    pub fraction_of_arithmetic: f64,
    pub fraction_of_bandwidth: f64,
    /// The most memory of the process, from before the point on.
    pub peak_memory_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Bound {
    Arithmetic,
    Bandwidth,
}

/// A point that could not be measured.
#[derive(Serialize)]
pub(super) struct LeftOut {
    pub work: Work,
    pub axis: Axis,
    pub x: usize,
    pub reason: String,
}

/// What was timed at a point.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub passes: usize,
    pub seconds: f64,
    pub tokens: usize,
    pub flops: f64,
    pub bytes: f64,
    /// What memory gave at the time.
    pub read_gb_per_s: f64,
    pub peak_memory_bytes: u64,
}

impl Pass {
    /// Beside what a machine of these limits could do, the bandwidth being that of the time, or the best if that was exceeded.
    pub(super) fn beside(&self, x: usize, setting: Setting, gflop_per_s: f64, best_gb_per_s: f64) -> Point {
        let was_exceeded = self.bytes / self.seconds / 1e9 > self.read_gb_per_s;
        let gb_per_s = if was_exceeded { best_gb_per_s } else { self.read_gb_per_s };
        let (arithmetic, bandwidth) = (self.flops / gflop_per_s / 1e9, self.bytes / gb_per_s / 1e9);
        let least = arithmetic.max(bandwidth);
        Point {
            x,
            setting,
            passes: self.passes,
            seconds: self.seconds,
            tokens_per_s: self.tokens as f64 / self.seconds,
            flops: self.flops,
            bytes: self.bytes,
            read_gb_per_s: gb_per_s,
            bound: if arithmetic >= bandwidth { Bound::Arithmetic } else { Bound::Bandwidth },
            limit_tokens_per_s: self.tokens as f64 / least,
            fraction_of_limit: least / self.seconds,
            fraction_of_arithmetic: arithmetic / self.seconds,
            fraction_of_bandwidth: bandwidth / self.seconds,
            peak_memory_bytes: self.peak_memory_bytes,
        }
    }
}

impl Curves {
    /// Prints the curves.
    ///
    /// # Errors
    /// If a figure is no number that JSON has.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            say!("{}", serde_json::to_string(self)?)?;
            return Ok(());
        }
        text::print(&self.report, false)?;
        output::write(format_args!("{}", self.render()))
    }

    fn render(&self) -> String {
        let mut text = String::new();
        let Settings { layers, layers_of_shape, repeats, .. } = self.settings;
        line(
            &mut text,
            format_args!(
                "{layers} of {layers_of_shape} layers where they are not the axis, the median of up to {repeats} passes"
            ),
        );
        for curve in &self.curves {
            let axis = format!("{:?}", curve.axis).to_lowercase();
            line(&mut text, format_args!("\n{} against {axis}", format!("{:?}", curve.work).to_lowercase()));
            line(
                &mut text,
                format_args!(
                    "  {axis:>8}  layers adapters  rank batch tokens    seconds   tokens/s   at limit  % of limit            peak GB"
                ),
            );
            for p in &curve.points {
                let Setting { layers, adapters, rank, batch, tokens } = p.setting;
                let bound = match p.bound {
                    Bound::Arithmetic => "arithmetic",
                    Bound::Bandwidth => "bandwidth",
                };
                line(
                    &mut text,
                    format_args!(
                        "  {:>8}  {layers:>6} {adapters:>8} {rank:>5} {batch:>5} {tokens:>6} {:>10.4} {:>10.1} {:>10.1} {:>11.1} {bound:<10} {:>8.2}",
                        p.x,
                        p.seconds,
                        p.tokens_per_s,
                        p.limit_tokens_per_s,
                        p.fraction_of_limit * 100.0,
                        p.peak_memory_bytes as f64 / 1e9
                    ),
                );
            }
        }
        for LeftOut { work, axis, x, reason } in &self.left_out {
            line(&mut text, format_args!("left out: {work:?} against {axis:?}, {x}: {reason}"));
        }
        line(&mut text, format_args!("\n{:.0} s", self.seconds));
        text
    }
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    writeln!(text, "{arguments}").expect("text grows without errors");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_held_against_the_limit_by_which_it_takes_longer() {
        let setting = Setting { layers: 1, adapters: 1, rank: 1, batch: 2, tokens: 5 };
        let pass =
            Pass { passes: 1, seconds: 4.0, tokens: 10, flops: 20e9, bytes: 3e9, read_gb_per_s: 3.0, peak_memory_bytes: 0 };
        // 20 Gflop at 10 a second take 2 s, 3 GB at 3 a second take 1 s; at 1 a second 3 s.
        let point = pass.beside(2, setting, 10.0, 9.0);
        assert_eq!((point.bound, point.limit_tokens_per_s, point.tokens_per_s), (Bound::Arithmetic, 5.0, 2.5));
        assert_eq!((point.fraction_of_limit, point.fraction_of_arithmetic, point.fraction_of_bandwidth), (0.5, 0.5, 0.25));
        let point = Pass { read_gb_per_s: 1.0, ..pass }.beside(2, setting, 10.0, 9.0);
        assert_eq!((point.bound, point.fraction_of_limit, point.fraction_of_arithmetic), (Bound::Bandwidth, 0.75, 0.5));
        // It read faster than what memory was measured to give at the time: that was no limit.
        let point = Pass { read_gb_per_s: 0.5, ..pass }.beside(2, setting, 10.0, 1.0);
        assert_eq!((point.read_gb_per_s, point.fraction_of_bandwidth), (1.0, 0.75));
    }
}
