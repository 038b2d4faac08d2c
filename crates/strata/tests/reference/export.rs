//! `strata export`: what comes out in either form computes what went in. That PEFT computes it too is what `tests/reference/check_peft_forms.py` shows.

use std::path::Path;
use std::process::{Command, Output};

use safetensors::SafeTensors;
use strata_tensor::Isa;
use tempfile::TempDir;

use crate::trace::{VALUE_TOLERANCE, adapters, write_trace};
use crate::values::{Reference, fixtures};

/// Of logits between a product that was added to a weight and one that was added to what the weight makes: 1e-4 is what is promised.
const MERGED_TOLERANCE: f32 = 1e-4;

fn export(fixture: &Path, adapter: &Path, out: &Path, format: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("export").arg(adapter).arg(out).arg("--base").arg(fixture.join("model")).args(["--format", format]);
    command.output().expect("the binary runs")
}

/// Why an export is refused, if it is; a refused one leaves nothing.
fn refusal(output: &Output, out: &Path) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), out.exists(), "{said}");
    (!output.status.success()).then_some(said)
}

#[test]
fn exported_adapters_compute_what_they_did() {
    let isa = *Isa::available().last().expect("there is one");
    let (mut compared, mut refused) = (0, 0);
    for fixture in fixtures() {
        for name in adapters(&fixture).into_iter().flatten() {
            let dir = TempDir::new().expect("a temporary directory");
            let traced = |adapter: &Path| {
                let out = dir.path().join("out.safetensors");
                write_trace(&out, isa, &fixture, Some(&adapter.to_string_lossy()), "f32", &[]);
                Reference::read(&out)
            };
            let want = traced(&fixture.join(&name));
            let (peft, tinker, back) = (dir.path().join("peft"), dir.path().join("tinker"), dir.path().join("back"));
            let label = format!("{} {name}", fixture.display());
            if let Some(why) = refusal(&export(&fixture, &fixture.join(&name), &peft, "peft"), &peft) {
                assert!(
                    label.contains("deepseek_latent_bf16") && why.contains("PEFT looks for MLPs of deepseek_v3"),
                    "{label}: {why}"
                );
                refused += 1;
                continue;
            }
            let mut written = vec![&peft];
            // Two scales, and a pair of the embedding: see the adapters of `stock` in make_fixtures.py.
            let of_own_scale = ["qwen3_moe_f32 stock_parameters", "deepseek_moe_groups_f32 stock_parameters"];
            match refusal(&export(&fixture, &peft, &tinker, "tinker"), &tinker) {
                Some(why) => {
                    let expected = match of_own_scale.iter().any(|own| label.ends_with(own)) {
                        true => "the Tinker tools scale all modules by lora_alpha / r",
                        false => "the Tinker tools have no pair of the embedding",
                    };
                    assert!(why.contains(expected), "{label}: {why}");
                    refused += 1;
                }
                None => {
                    assert_eq!(refusal(&export(&fixture, &tinker, &back, "peft"), &back), None, "{label}");
                    written.extend([&tinker, &back]);
                }
            }
            for adapter in written {
                let got = traced(adapter);
                for (key, want) in want.floats("s.") {
                    let error = got.float(key).max_difference(want);
                    assert!(error <= VALUE_TOLERANCE, "{label} as {}, {key}: off by {error}", adapter.display());
                    compared += 1;
                }
                let bytes = std::fs::read(adapter.join("adapter_model.safetensors")).expect("weights");
                let file = SafeTensors::deserialize(&bytes).expect("safetensors");
                let (ours, theirs) = ([".experts.w", "unembed_tokens"], ["experts.lora_", "experts.base_layer", "lm_head"]);
                let foreign: &[&str] = if *adapter == tinker { &theirs } else { &ours };
                for name in file.names() {
                    assert!(!foreign.iter().any(|part| name.contains(part)), "{label} as {}: {name}", adapter.display());
                }
            }
        }
    }
    assert!(compared > 1000 && refused == 6, "{compared} compared, {refused} refused");
}

/// What a model computes of a fixture's tokens by itself.
fn trace_model(model: &Path, fixture: &Path, out: &Path) -> Reference {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("trace").arg(model).arg("--tokens").arg(fixture.join("tokens.json")).args(["--dtype", "f32"]);
    let output = command.arg("--out").arg(out).output().expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Reference::read(out)
}

#[test]
fn merged_checkpoints_compute_what_the_adapter_does_on_its_base() {
    let isa = *Isa::available().last().expect("there is one");
    let mut compared = 0;
    for fixture in fixtures() {
        for name in adapters(&fixture).into_iter().flatten() {
            let dir = TempDir::new().expect("a temporary directory");
            let (out, merged) = (dir.path().join("out.safetensors"), dir.path().join("merged"));
            write_trace(&out, isa, &fixture, Some(&name), "f32", &[]);
            let want = Reference::read(&out);
            let label = format!("{} {name}", fixture.display());
            let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
            command.arg("export").arg(fixture.join(&name)).arg(&merged).arg("--base").arg(fixture.join("model"));
            let output = command.args(["--format", "merged", "--dtype", "f32"]).output().expect("the binary runs");
            assert_eq!(refusal(&output, &merged), None, "{label}");
            let got = trace_model(&merged, &fixture, &out);
            for (key, want) in want.floats("s.").filter(|(key, _)| key.ends_with("logits") || key.ends_with("logprobs")) {
                let error = got.float(key).max_difference(want);
                assert!(error <= MERGED_TOLERANCE, "{label}, {key}: off by {error}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn a_merged_checkpoint_keeps_shards_and_dtypes_and_all_that_no_pair_is_for() {
    let dir = TempDir::new().expect("a temporary directory");
    for (name, adapter) in
        [("bias_untied_sharded_f32", "r3"), ("bias_untied_bf16", "r3"), ("qwen3_5_composite_f32", "r3"), ("mha_tied_f16", "r4")]
    {
        let fixture = fixtures().into_iter().find(|fixture| fixture.ends_with(name)).expect("a fixture");
        let merged = dir.path().join(name);
        assert_eq!(refusal(&export(&fixture, &fixture.join(adapter), &merged, "merged"), &merged), None);
        let files = |dir: &Path| {
            let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").file_name());
            entries.map(|name| name.to_string_lossy().into_owned()).collect::<std::collections::BTreeSet<_>>()
        };
        let base = fixture.join("model");
        assert_eq!(files(&merged), files(&base), "{name}");
        let (mut same, mut other) = (0, 0);
        for file in files(&base).iter().filter(|file| file.ends_with(".safetensors")) {
            let [base, merged] = [&base, &merged].map(|dir| std::fs::read(dir.join(file)).expect("a file"));
            let [base, merged] = [&base, &merged].map(|bytes| SafeTensors::deserialize(bytes).expect("safetensors"));
            for (tensor, before) in base.tensors() {
                let after = merged.tensor(&tensor).unwrap_or_else(|_| panic!("{name}: {tensor} is gone"));
                assert_eq!((before.shape(), before.dtype()), (after.shape(), after.dtype()), "{name}: {tensor}");
                let is_same = before.data() == after.data();
                assert!(is_same || tensor.contains("_proj") || tensor.contains("lm_head"), "{name}: {tensor} is another");
                if is_same { same += 1 } else { other += 1 }
            }
        }
        assert!(same > 0 && other > 0, "{name}: {same} and {other}");
    }
}

#[test]
fn a_directory_that_exists_is_left_alone() {
    let fixture = fixtures().into_iter().find(|fixture| fixture.ends_with("tied_gqa3_f32")).expect("a fixture");
    let dir = TempDir::new().expect("a temporary directory");
    std::fs::write(dir.path().join("mine"), "").expect("a file");
    let output = export(&fixture, &fixture.join("r7"), dir.path(), "peft");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("exists already"));
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 1);
}
