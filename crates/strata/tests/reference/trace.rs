//! `strata trace` against hidden states, logits, gradients and greedy tokens.

use std::path::{Path, PathBuf};
use std::process::Command;

use strata_tensor::Isa;
use tempfile::TempDir;

use crate::values::{Reference, fixtures};

/// Largest difference of hidden states, logits and log-probabilities from the f32 reference.
pub const VALUE_TOLERANCE: f32 = 3e-5;
/// Largest difference of a gradient, as a share of the largest entry of its tensor.
const GRADIENT_TOLERANCE: f32 = 1e-5;
/// The same of models with gated delta nets: the reference computes a chunk in another order, with an inverse of its keys, and what it leaves behind is carried on from chunk to chunk.
const DELTA_VALUE_TOLERANCE: f32 = 2e-4;
const DELTA_GRADIENT_TOLERANCE: f32 = 1e-4;
/// Tokens that the fixtures continue every sequence by.
const GREEDY_TOKENS: &str = "12";

fn trace(isa: Isa, fixture: &Path, adapter: Option<&str>, dtype: &str, extra: &[&str]) -> Reference {
    let out_dir = TempDir::new().expect("a temporary directory");
    let out = out_dir.path().join("out.safetensors");
    write_trace(&out, isa, fixture, adapter, dtype, extra);
    Reference::read(&out)
}

pub fn write_trace(out: &Path, isa: Isa, fixture: &Path, adapter: Option<&str>, dtype: &str, extra: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command
        .env("STRATA_ISA", isa.name())
        .arg("trace")
        .arg(fixture.join("model"))
        .arg("--tokens")
        .arg(fixture.join("tokens.json"));
    if let Some(adapter) = adapter {
        command.arg("--adapter").arg(fixture.join(adapter));
    }
    command.args(["--dtype", dtype]).args(extra).arg("--out").arg(out);
    let output = command.output().expect("the binary runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The largest differences of values and of gradients from the f32 reference.
fn tolerances(fixture: &Path) -> (f32, f32) {
    match fixture.to_string_lossy().contains("qwen3_5") {
        true => (DELTA_VALUE_TOLERANCE, DELTA_GRADIENT_TOLERANCE),
        false => (VALUE_TOLERANCE, GRADIENT_TOLERANCE),
    }
}

/// The fixture's adapters; `None` stands for the bare model.
pub fn adapters(fixture: &Path) -> Vec<Option<String>> {
    let mut names: Vec<Option<String>> = vec![None];
    for entry in std::fs::read_dir(fixture).expect("a fixture directory") {
        let path = entry.expect("an entry").path();
        if path.join("adapter_config.json").exists() {
            names.push(Some(path.file_name().expect("a name").to_string_lossy().into_owned()));
        }
    }
    names.sort();
    names
}

fn expected(fixture: &Path, adapter: Option<&str>) -> Reference {
    Reference::read(&fixture.join(format!("{}.safetensors", adapter.unwrap_or("base"))))
}

/// Every fixture with each of its adapters and without, on every instruction set of this machine.
fn for_each_case(mut check: impl FnMut(Isa, &Path, Option<&str>, &str)) {
    let mut cases = 0;
    for fixture in fixtures() {
        for adapter in adapters(&fixture) {
            for isa in Isa::available() {
                let name = fixture.file_name().expect("a name").to_string_lossy();
                let label = format!("{name} {} on {}", adapter.as_deref().unwrap_or("base"), isa.name());
                check(isa, &fixture, adapter.as_deref(), &label);
            }
            cases += 1;
        }
    }
    assert!(cases >= 12, "only {cases} cases were found");
}

#[test]
fn hidden_states_logits_and_logprobs_in_f32_are_those_of_transformers() {
    for_each_case(|isa, fixture, adapter, label| {
        let actual = trace(isa, fixture, adapter, "f32", &[]);
        for (name, want) in expected(fixture, adapter).floats("s.") {
            if name.ends_with("greedy_logprobs") {
                continue;
            }
            let got = actual.float(name);
            assert_eq!(got.shape, want.shape, "{label} {name}");
            let error = got.max_difference(want);
            assert!(error <= tolerances(fixture).0, "{label} {name}: off by {error}");
        }
    });
}

#[test]
fn lora_gradients_in_f32_are_those_of_peft() {
    for_each_case(|isa, fixture, adapter, label| {
        // Those in PEFT's form have no gradients here: `check_peft_forms.py` compares them.
        if adapter.is_none_or(|name| name.starts_with("stock_")) {
            return;
        }
        let actual = trace(isa, fixture, adapter, "f32", &["--grads"]);
        let want = expected(fixture, adapter);
        let mut compared = 0;
        for (name, want) in want.floats("base_model.") {
            let got = actual.float(name);
            assert_eq!(got.shape, want.shape, "{label} {name}");
            let error = got.max_difference(want) / want.max_abs();
            assert!(error <= tolerances(fixture).1, "{label} {name}: off by {error} of its largest entry");
            compared += 1;
        }
        assert_eq!(actual.floats("base_model.").count(), compared, "{label}: as many gradients as PEFT has");
        for (name, want) in want.floats("s.").filter(|(name, _)| name.ends_with("next_logprobs")) {
            let error = actual.float(name).max_difference(want);
            assert!(error <= tolerances(fixture).0, "{label} {name} with gradients: off by {error}");
        }
    });
}

#[test]
fn greedy_tokens_through_the_kv_cache_are_those_of_transformers() {
    for_each_case(|isa, fixture, adapter, label| {
        let actual = trace(isa, fixture, adapter, "f32", &["--greedy", GREEDY_TOKENS]);
        let want = expected(fixture, adapter);
        for (name, want) in want.integers("s.") {
            assert_eq!(actual.integer(name), want, "{label} {name}");
        }
        for (name, want) in want.floats("s.").filter(|(name, _)| name.ends_with("greedy_logprobs")) {
            let error = actual.float(name).max_difference(want);
            assert!(error <= tolerances(fixture).0, "{label} {name}: off by {error}");
        }
    });
}

/// What the tower is given has the reference's bits: a model sees every level of a pixel.
#[test]
fn pictures_are_cut_up_and_placed_as_transformers_does_it() {
    let (mut pictures, mut pixels) = (0, 0);
    for_each_case(|isa, fixture, adapter, label| {
        let want = expected(fixture, adapter);
        if adapter.is_some() || want.integers("s.").all(|(name, _)| !name.ends_with("position_ids")) {
            return;
        }
        let actual = trace(isa, fixture, None, "f32", &[]);
        for (name, want) in want.floats("s.").filter(|(name, _)| name.ends_with("pixel_values")) {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&actual.float(name).values), bits(&want.values), "{label} {name}");
            pixels += want.values.len();
        }
        for (name, want) in want.integers("s.").filter(|(name, _)| !name.ends_with("greedy")) {
            assert_eq!(actual.integer(name), want, "{label} {name}");
            pictures += usize::from(name.ends_with("grid_thw"));
        }
    });
    assert!(pictures >= 30 && pixels > 100_000, "{pictures} pictures of {pixels} numbers");
}

/// Both are rounded, differently; what counts is that our rounding is no worse. Values of one kind are taken together over
/// all sequences, because a mean over a handful of numbers is a matter of luck.
#[test]
fn values_in_bf16_are_no_further_from_the_f32_truth_than_those_of_transformers() {
    let mut kinds = 0;
    for_each_case(|isa, fixture, adapter, label| {
        let truth = expected(fixture, adapter);
        if truth.floats("bf16.").next().is_none() {
            return;
        }
        for numerics in ["fast", "portable"] {
            let mut extra = vec!["--numerics", numerics];
            extra.extend(adapter.map(|_| "--grads"));
            let actual = trace(isa, fixture, adapter, "bf16", &extra);
            for (kind, names) in truth.kinds_with_bf16() {
                let ours = truth.rms_difference(&actual, &names, "");
                let theirs = truth.rms_difference(&truth, &names, "bf16.");
                assert!(
                    ours <= theirs,
                    "{label} {numerics} {kind}: off by {ours} (root mean square), transformers by {theirs}"
                );
                kinds += 1;
            }
        }
    });
    assert!(kinds > 0, "no fixture has bf16 values");
}

/// The whole output with these flags, gradients and greedy tokens included, on all instruction sets but the one that has no fused multiply-add. Where this machine
/// has one such set, there is nothing to compare; where it has more, every case is compared once for each but the first.
fn have_the_same_bits_on_every_instruction_set(flags: &[&str], dtype: &str) {
    let fused = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).count();
    let dir = TempDir::new().expect("a temporary directory");
    let out = dir.path().join("out.safetensors");
    let (mut cases, mut compared) = (0, 0);
    let mut first: Option<(PathBuf, Option<String>, String, Vec<u8>)> = None;
    for_each_case(|isa, fixture, adapter, label| {
        if isa == Isa::Portable {
            return;
        }
        let mut extra = [flags, &["--greedy", GREEDY_TOKENS]].concat();
        extra.extend(adapter.map(|_| "--grads"));
        write_trace(&out, isa, fixture, adapter, dtype, &extra);
        let bytes = std::fs::read(&out).expect("the trace was written");
        match &first {
            Some((same_fixture, same_adapter, other, expected))
                if same_fixture == fixture && same_adapter.as_deref() == adapter =>
            {
                assert!(*expected == bytes, "{label} is not {other}, in {dtype} with {flags:?}");
                compared += 1;
            }
            _ => {
                first = Some((fixture.to_owned(), adapter.map(str::to_owned), label.to_owned(), bytes));
                cases += 1;
            }
        }
    });
    assert_eq!(compared, cases * fused.saturating_sub(1), "{fused} instruction sets, {cases} cases");
    assert!(compared > 0 || fused <= 1);
}

#[test]
fn portable_numerics_have_the_same_bits_on_every_instruction_set() {
    have_the_same_bits_on_every_instruction_set(&["--numerics", "portable"], "bf16");
}

#[test]
fn f32_has_the_same_bits_on_every_instruction_set_whatever_the_numerics() {
    have_the_same_bits_on_every_instruction_set(&[], "f32");
    have_the_same_bits_on_every_instruction_set(&["--numerics", "portable"], "f32");
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let fixture = fixtures().remove(0);
    let dir = TempDir::new().expect("a temporary directory");
    let tokens: PathBuf = dir.path().join("tokens.json");
    std::fs::write(&tokens, "[[0, 99999]]").expect("the file can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_strata"))
        .arg("trace")
        .arg(fixture.join("model"))
        .arg("--tokens")
        .arg(&tokens)
        .arg("--out")
        .arg(dir.path().join("out.safetensors"))
        .output()
        .expect("the binary runs");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("99999"), "the message names the token");
}

/// A layer's weights in fewer bits are off by half a step each: what comes of them is off by little, and trace says by how much.
#[test]
fn the_error_of_quantized_weights_is_small_and_shown() {
    for fixture in fixtures() {
        let dir = TempDir::new().expect("a temporary directory");
        let out = dir.path().join("out.safetensors");
        let run = |extra: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
            command.arg("trace").arg(fixture.join("model")).arg("--tokens").arg(fixture.join("tokens.json"));
            let output =
                command.args(["--dtype", "bf16"]).args(extra).arg("--out").arg(&out).output().expect("the binary runs");
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            (Reference::read(&out), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let (dense, _) = run(&[]);
        // A router chooses otherwise here and there, and behind a gated delta net a norm makes much of what little it recalls.
        let makes_much = ["moe", "gpt_oss", "qwen3_5"].iter().any(|name| fixture.to_string_lossy().contains(name));
        for (storage, bound, otherwise) in [("int8", 0.3, 1.5), ("int4", 3.0, 4.0)] {
            let (quantized, said) = run(&["--quantize", storage]);
            let mut largest = 0.0f32;
            for (name, want) in dense.floats("s.").filter(|(name, _)| name.ends_with("next_logprobs")) {
                largest = largest.max(quantized.float(name).max_difference(want));
            }
            let bound = if makes_much { otherwise } else { bound };
            assert!(largest > 0.0 && largest < bound, "{}, {storage}: off by {largest}", fixture.display());
            assert!(said.contains(&format!("{largest:.5} at most")), "{said}");
        }
    }
}
