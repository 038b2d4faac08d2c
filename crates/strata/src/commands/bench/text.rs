//! Reports as people read them.

use std::fmt::Write;

use serde_json::Value;

use crate::output::{self, say};

use super::report::{Case, Figure, LimitsReport, Report, Unit};

/// Prints a report.
///
/// # Errors
/// If a figure is no number that JSON has.
pub(super) fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    if json {
        say!("{}", serde_json::to_string(report)?)?;
    } else {
        output::write(format_args!("{}", render(report)))?;
    }
    Ok(())
}

fn render(report: &Report) -> String {
    let mut text = String::new();
    let kernels = report.kernels.as_ref().map_or(String::new(), |kernels| format!(" on {kernels}"));
    line(&mut text, format_args!("{} {} {}{kernels}", report.benchmark, report.shape, report.dtype));
    render_limits(&mut text, &report.limits, report.threads);
    match &report.cases[..] {
        [] => {}
        [case] => render_case(&mut text, case),
        cases if cases.iter().all(|case| case.figures.iter().any(|f| f.in_table)) => render_table(&mut text, cases),
        cases => cases.iter().for_each(|case| render_case(&mut text, case)),
    }
    for peak in &report.peak_memory_bytes {
        line(&mut text, format_args!("  {:<46} {:>9.2} GB", format!("peak memory, {}", peak.of), peak.bytes as f64 / 1e9));
    }
    if let Some(versions) = &report.peer {
        let versions: Vec<String> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        line(&mut text, format_args!("peer: {}. A ratio above 1 means that Strata is faster.", versions.join(", ")));
    }
    text
}

fn render_limits(text: &mut String, limits: &LimitsReport, threads: usize) {
    line(text, format_args!("limits of this machine, {threads} threads:"));
    for arithmetic in &limits.arithmetic {
        let chosen = if arithmetic.instructions == limits.fastest.instructions { ", the limit" } else { "" };
        let (name, rate) = (arithmetic.instructions, arithmetic.gflop_per_s);
        line(text, format_args!("  {:<46} {rate:>9.1} GFLOP/s{chosen}", format!("arithmetic, {name}")));
    }
    let (best, middle) = (limits.read_gb_per_s, limits.read_median_gb_per_s);
    line(text, format_args!("  {:<46} {best:>9.1} GB/s, in the middle of many windows {middle:.1}", "memory, read"));
}

fn render_case(text: &mut String, case: &Case) {
    line(text, format_args!("{}:", settings(case)));
    let with_peer = case.figures.iter().any(|f| f.peers.is_some());
    if with_peer {
        line(text, format_args!("  {:<46} {:>9} {:>9} {:>6}", "", "strata", "peer", "ratio"));
    }
    for figure in &case.figures {
        let ours = number(figure.unit, figure.ours);
        let peers = match (figure.peers, figure.ratio()) {
            (Some(peers), Some(ratio)) => format!(" {:>9} {ratio:>6.2}", number(figure.unit, peers)),
            _ if with_peer => format!(" {:>9} {:>6}", "", ""),
            _ => String::new(),
        };
        line(text, format_args!("  {:<46} {ours:>9}{peers} {}", figure.label, unit(figure.unit)));
    }
}

/// One line for each case. All have the same settings and figures.
fn render_table(text: &mut String, cases: &[Case]) {
    let mut rows = vec![header(&cases[0])];
    rows.extend(cases.iter().map(row));
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        line(text, format_args!("  {}", cells.join("  ")));
    }
}

fn header(case: &Case) -> Vec<String> {
    let figures = columns(case).flat_map(|f| {
        let own = format!("{}, {}", f.label, unit(f.unit));
        std::iter::once(own).chain(f.peers.iter().flat_map(|_| ["peer".to_string(), "ratio".to_string()]))
    });
    case.settings.keys().cloned().chain(figures).collect()
}

fn row(case: &Case) -> Vec<String> {
    let figures = columns(case).flat_map(|f| {
        let peers = f.peers.iter().flat_map(|&p| [number(f.unit, p), format!("{:.2}", f.ratio().unwrap_or(f64::NAN))]);
        std::iter::once(number(f.unit, f.ours)).chain(peers)
    });
    case.settings.values().map(setting).chain(figures).collect()
}

fn columns(case: &Case) -> impl Iterator<Item = &Figure> {
    case.figures.iter().filter(|f| f.in_table)
}

fn settings(case: &Case) -> String {
    case.settings.iter().map(|(name, value)| format!("{name} {}", setting(value))).collect::<Vec<_>>().join(", ")
}

fn setting(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "-".into(),
        Value::Array(values) => values.iter().map(setting).collect::<Vec<_>>().join("+"),
        other => other.to_string(),
    }
}

fn number(unit: Unit, value: f64) -> String {
    match unit {
        Unit::TokensPerSecond | Unit::GflopPerSecond | Unit::GbPerSecond => format!("{value:.1}"),
        Unit::Seconds => format!("{value:.4}"),
        Unit::PerToken => format!("{value:.2}"),
        Unit::OfArithmetic | Unit::OfBandwidth | Unit::OfGuesses => format!("{:.1}", value * 100.0),
    }
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::TokensPerSecond => "tokens/s",
        Unit::Seconds => "s",
        Unit::GflopPerSecond => "GFLOP/s",
        Unit::GbPerSecond => "GB/s",
        Unit::OfArithmetic => "% of arithmetic",
        Unit::OfBandwidth => "% of bandwidth",
        Unit::OfGuesses => "% of guesses",
        Unit::PerToken => "per token",
    }
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    writeln!(text, "{arguments}").expect("text grows without errors");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(batch: u64, peers: Option<f64>) -> Case {
        let settings = [("batch".to_string(), batch.into()), ("ranks".to_string(), vec![32, 1].into())];
        let rate = Figure::new("rate", "forward", Unit::TokensPerSecond, 10.0).beside(peers).in_table();
        let share = Figure::new("share", "MFU", Unit::OfArithmetic, 0.5);
        Case { settings: settings.into_iter().collect(), figures: vec![rate, share] }
    }

    #[test]
    fn every_line_has_its_unit() {
        let mut text = String::new();
        render_case(&mut text, &case(4, Some(5.0)));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "batch 4, ranks 32+1:");
        assert!(lines[1].trim_start().starts_with("strata"), "{text}");
        assert!(lines[2].ends_with("10.0       5.0   2.00 tokens/s"), "{text}");
        assert!(lines[3].contains("50.0") && lines[3].ends_with("% of arithmetic"), "{text}");
    }

    #[test]
    fn the_best_window_of_memory_stands_before_the_middle_one() {
        let fastest = strata_limits::Arithmetic { instructions: "fma", inputs: strata_limits::Inputs::F32, gflop_per_s: 1.0 };
        let limits =
            LimitsReport { arithmetic: vec![fastest.clone()], fastest, read_gb_per_s: 60.0, read_median_gb_per_s: 34.0 };
        let mut text = String::new();
        render_limits(&mut text, &limits, 2);
        assert!(text.contains("60.0 GB/s, in the middle of many windows 34.0\n"), "{text}");
    }

    #[test]
    fn a_table_has_a_line_for_each_case() {
        let mut text = String::new();
        render_table(&mut text, &[case(4, None), case(16, None)]);
        assert_eq!(
            text,
            "  batch  ranks  forward, tokens/s\n      4   32+1               10.0\n     16   32+1               10.0\n"
        );
    }
}
