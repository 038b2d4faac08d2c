//! `strata bench` as a user runs it, on the smallest shape there is. Nothing here looks at how fast it was.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

const RESOURCES: [&str; 4] = ["--memory", "1GiB", "--threads", "2"];

/// A file that is being written does not run, and a process that another test starts meanwhile inherits the writing for a moment. Each run
/// also has the machine to itself.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bench(arguments: &[&str]) -> Output {
    let _alone = one_at_a_time();
    let shape: &[&str] = if arguments.contains(&"--shape") { &[] } else { &["--shape", "strata/tiny-base"] };
    Command::new(env!("CARGO_BIN_EXE_strata")).arg("bench").args(arguments).args(shape).args(RESOURCES).output().unwrap()
}

fn bench_json(arguments: &[&str]) -> Value {
    let output = bench(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn bench_error(arguments: &[&str]) -> String {
    let output = bench(arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A Python that runs this shell script, whatever it is told to.
fn python(dir: &Path, script: &str) -> PathBuf {
    let _alone = one_at_a_time();
    let path = dir.join("python");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The figures of the first case: each with these keys and no others.
fn assert_figures(report: &Value, figures: &[&str], keys: &[&str]) {
    for &figure in figures {
        let values = report["cases"][0]["figures"][figure].as_object().unwrap_or_else(|| panic!("{figure} in {report}"));
        assert_eq!(values.keys().collect::<Vec<_>>(), keys, "{figure}");
        assert!(values.values().all(|value| value.as_f64().is_some_and(f64::is_finite)), "{figure}: {values:?}");
    }
}

#[test]
fn training_is_reported_under_the_documented_keys() {
    let report = bench_json(&["train", "--batch", "2", "--seq-len", "16", "--prompt", "5", "--steps", "2", "--rank", "4"]);
    assert_eq!(
        (&report["benchmark"], &report["shape"], &report["dtype"]),
        (&"train".into(), &"strata/tiny-base".into(), &"bf16".into())
    );
    assert_eq!(report["threads"], 2);
    assert!(report["kernels"].as_str().unwrap().starts_with("cpu "));
    let limits = &report["limits"];
    assert!(limits["arithmetic"].as_array().unwrap().contains(&limits["fastest"]));
    assert!(
        limits["fastest"]["instructions"].is_string()
            && limits["fastest"]["gflop_per_s"].is_f64()
            && limits["read_median_gb_per_s"].as_f64() <= limits["read_gb_per_s"].as_f64()
            && limits["read_median_gb_per_s"].as_f64() > Some(0.0)
    );
    let settings = serde_json::json!({ "batch": 2, "seq_len": 16, "prompt": 5, "weightless_logprobs": true, "shared_prompt": false, "ranks": [4], "steps": 2 });
    assert_eq!(report["cases"][0]["settings"], settings);
    let figures = [
        "forward_backward_tokens_per_s",
        "forward_backward_mean_tokens_per_s",
        "forward_backward_first_tokens_per_s",
        "useful_gflop_per_s",
        "mfu",
        "mfu_beside_it",
        "forward_backward_recomputed_tokens_per_s",
        "hfu",
        "optim_step_seconds",
    ];
    assert_figures(&report, &figures, &["strata"]);
    let peaks = report["peak_memory_bytes"].as_array().unwrap();
    assert_eq!(peaks.iter().map(|peak| &peak["of"]).collect::<Vec<_>>(), ["strata, activations recomputed", "strata"]);
    assert!(peaks.iter().all(|peak| peak["bytes"].as_u64().unwrap() > 0));
    assert!(report["peer"].is_null());
}

#[test]
fn sampling_from_several_adapters_is_reported_under_the_documented_keys() {
    let report = bench_json(&["sample", "--batch", "3", "--prompt", "40", "--new", "64", "--repeats", "1", "--adapters", "2"]);
    let settings = serde_json::json!({ "batch": 3, "prompt": 40, "new": 64, "ranks": [32, 1] });
    assert_eq!(report["cases"][0]["settings"], settings);
    // What comes out of differences of times may be anything on a busy machine, but it is there.
    let figures = ["prefill_tokens_per_s", "prefill_first_tokens_per_s", "prefill_mfu", "prefill_mfu_beside_it"];
    assert_figures(&report, &figures, &["strata"]);
    for figure in [
        "decode_tokens_per_s",
        "decode_gb_per_s",
        "decode_fraction_of_bandwidth",
        "decode_fraction_of_bandwidth_beside_it",
        "request_tokens_per_s",
    ] {
        assert!(report["cases"][0]["figures"][figure].is_object(), "{figure}");
    }
}

#[test]
fn samples_that_repeat_themselves_are_reported_with_their_guesses() {
    for (speculation, some) in [("prompt-lookup", true), ("off", false)] {
        let cell = ["sample", "--repeating", "--batch", "1", "--prompt", "40", "--new", "600", "--repeats", "1"];
        let report = bench_json(&[&cell[..], &["--speculation", speculation]].concat());
        let case = &report["cases"][0];
        let settings = serde_json::json!({ "batch": 1, "prompt": 40, "new": 600, "ranks": [], "speculation": speculation });
        assert_eq!(case["settings"], settings);
        assert_eq!(case["figures"]["guesses_per_token"]["strata"].as_f64().unwrap() > 0.0, some, "{report}");
        assert!(case["figures"]["accepted_fraction"].is_object() && case["figures"]["decode_gb_per_s"].is_null());
    }
}

const DELTA_FIGURES: [&str; 4] = ["tokens_per_s", "rule_tokens_per_s", "rule_gflop_per_s", "rule_fraction_of_limit"];

#[test]
fn a_gated_delta_net_is_reported_under_the_documented_keys() {
    let report = bench_json(&["delta", "--shape", "qwen3.5-35b-a3b", "--dtype", "f32", "--tokens", "70", "--repeats", "1"]);
    assert_eq!(
        (&report["benchmark"], &report["shape"], &report["dtype"]),
        (&"delta".into(), &"qwen3.5-35b-a3b".into(), &"f32".into())
    );
    let settings = serde_json::json!({ "tokens": 70, "k_heads": 16, "v_heads": 32, "k_dim": 128, "v_dim": 128, "kernel": 4 });
    assert_eq!(report["cases"][0]["settings"], settings);
    assert_figures(&report, &DELTA_FIGURES, &["strata"]);
    assert!(report["kernels"].as_str().unwrap().starts_with("cpu ") && report["peer"].is_null());
}

#[test]
fn the_delta_rule_is_held_against_f32_whatever_the_dtype() {
    let report = bench_json(&["delta", "--shape", "qwen3.5-9b", "--tokens", "8", "--repeats", "1"]);
    assert_eq!((&report["dtype"], &report["limits"]["fastest"]["inputs"]), (&"bf16".into(), &"f32".into()));
    let figures = &report["cases"][0]["figures"];
    let [rate, share] = ["rule_gflop_per_s", "rule_fraction_of_limit"].map(|name| figures[name]["strata"].as_f64().unwrap());
    let limit = report["limits"]["fastest"]["gflop_per_s"].as_f64().unwrap();
    assert!((rate / limit / share - 1.0).abs() < 1e-9, "{rate} of {limit} is not {share}");
}

#[test]
fn a_table_has_every_batch_size_with_every_length() {
    let report = bench_json(&["table", "train", "--batch", "1,2", "--seq-len", "4,8", "--steps", "1", "--adapters", "2"]);
    let cells: Vec<(u64, u64)> = report["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| (case["settings"]["batch"].as_u64().unwrap(), case["settings"]["seq_len"].as_u64().unwrap()))
        .collect();
    assert_eq!(cells, [(1, 4), (1, 8), (2, 4), (2, 8)]);
}

#[test]
fn the_peer_is_shown_beside_ours() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"read -r setup
echo '{"ok": {"torch": "2.0", "transformers": "5.0", "peft": "0.20"}}'
while read -r request; do
    echo '{"ok": {"seconds": 2.0, "optimizer_seconds": 0.5, "peak_memory_bytes": 1000000, "net_seconds": 4.0, "rule_seconds": 0.5}}'
done"#;
    let python = python(dir.path(), script);
    let compare = ["--compare", python.to_str().unwrap()];
    let report = bench_json(&[&["train", "--batch", "2", "--seq-len", "16", "--steps", "1"], &compare[..]].concat());
    let figures =
        ["forward_backward_tokens_per_s", "mfu", "optim_step_seconds", "forward_backward_recomputed_tokens_per_s", "hfu"];
    assert_figures(&report, &figures, &["strata", "peer", "ratio"]);
    assert_eq!(report["cases"][0]["figures"]["forward_backward_tokens_per_s"]["peer"], 16.0);
    assert_eq!(report["peer"]["peft"], "0.20");
    let peaks: Vec<&Value> = report["peak_memory_bytes"].as_array().unwrap().iter().map(|peak| &peak["of"]).collect();
    assert_eq!(peaks, ["strata, activations recomputed", "peer, checkpointed", "strata", "peer, not checkpointed"]);
    let report = bench_json(&[&["matmul", "--tokens", "4", "--rounds", "1"], &compare[..]].concat());
    assert_eq!(report["cases"].as_array().unwrap().len(), 5);
    assert_figures(&report, &["gflop_per_s"], &["strata", "peer", "ratio"]);
    let delta = ["delta", "--shape", "qwen3.5-9b", "--tokens", "8", "--repeats", "1"];
    let report = bench_json(&[&delta, &compare[..]].concat());
    assert_figures(&report, &DELTA_FIGURES, &["strata", "peer", "ratio"]);
    let figures = &report["cases"][0]["figures"];
    assert_eq!((&figures["tokens_per_s"]["peer"], &figures["rule_tokens_per_s"]["peer"]), (&2.0.into(), &16.0.into()));
}

#[test]
fn a_peer_that_fails_is_an_error_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let python = python(dir.path(), "read -r setup; echo 'ImportError: libtorch' >&2; exit 1");
    let error = bench_error(&["matmul", "--tokens", "4", "--compare", python.to_str().unwrap()]);
    assert!(error.contains("the peer ended (exit status: 1); its last messages:\nImportError: libtorch"), "{error}");
    let error = bench_error(&["delta", "--shape", "qwen3.5-9b", "--tokens", "4", "--compare", python.to_str().unwrap()]);
    assert!(error.contains("the peer ended (exit status: 1); its last messages:\nImportError: libtorch"), "{error}");
    let error = bench_error(&["matmul", "--tokens", "4", "--compare", "/nowhere/python"]);
    assert!(error.contains("there is no Python interpreter at /nowhere/python"), "{error}");
}

/// More adapters than the default share of the memory has room for.
#[test]
fn several_adapters_get_the_memory_that_they_take_unless_it_is_said_how_much() {
    let train = ["train", "--batch", "1", "--seq-len", "4", "--steps", "1", "--adapters", "16", "--rank", "64"];
    let sample =
        ["sample", "--batch", "16", "--prompt", "4", "--new", "64", "--repeats", "1", "--adapters", "16", "--rank", "512"];
    for arguments in [&train[..], &sample] {
        bench_json(arguments);
        let error = bench_error(&[arguments, &["--adapter-memory", "256MiB"]].concat());
        assert!(error.contains("bytes set aside for adapters"), "{error}");
    }
}

#[test]
fn arguments_that_make_no_sense_are_refused_before_anything_is_measured() {
    for (arguments, reason) in [
        (&["train", "--adapters", "0"][..], "--adapters must be at least 1"),
        (&["train", "--rank", "0"], "--rank 0 is not between 1 and 1024"),
        (&["train", "--batch", "0"], "--batch and --seq-len must be at least 1"),
        (&["train", "--steps", "0"], "--steps must be at least 1"),
        (&["train", "--seq-len", "999999"], "the longest example for which there is memory"),
        (&["sample", "--new", "1"], "--new must be at least 2"),
        (&["sample", "--prompt", "0"], "--batch and --prompt must be at least 1"),
        (&["sample", "--prompt", "999999"], "the longest sequence for which there is memory"),
        (&["sample", "--batch", "4000", "--prompt", "1024"], "in the cache, which holds"),
        (&["table", "train", "--batch", "1,0"], "--batch and --seq-len must be at least 1"),
        (&["all", "--repeats", "0"], "--repeats must be at least 1"),
        (&["all", "--layers", "6"], "--layers 6 is not between 1 and 5"),
        (&["all", "--compare", "python"], "curves are ours alone"),
        (&["matmul", "--tokens", "0"], "--tokens and --rounds must be at least 1"),
        (&["delta"], r#"shape "strata/tiny-base" has no gated delta nets"#),
        (&["delta", "--shape", "qwen3.5-9b", "--tokens", "0"], "--tokens and --repeats must be at least 1"),
        (&["delta", "--shape", "qwen3.5-9b", "--repeats", "0"], "--tokens and --repeats must be at least 1"),
        (
            &["delta", "--shape", "qwen3.5-9b", "--tokens", "18446744073709551615"],
            "the longest sequence for which there is memory",
        ),
    ] {
        let error = bench_error(arguments);
        assert!(error.contains(reason), "{arguments:?}: {error}");
    }
    let error = bench_error(&["train", "--shape", "nothing"]);
    assert!(error.contains(r#"shape "nothing" is not known; there are strata/tiny-base, qwen3-0.6b"#), "{error}");
}
