//! `strata export`: what comes out in either form computes what went in. That PEFT computes it too is what `tests/reference/check_peft_forms.py` shows.

use std::path::Path;
use std::process::{Command, Output};

use safetensors::SafeTensors;
use strata_tensor::Isa;
use tempfile::TempDir;

use crate::trace::{VALUE_TOLERANCE, adapters, write_trace};
use crate::values::{Reference, fixtures};

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
            // Two scales: see the adapters of `stock` in make_fixtures.py.
            let of_own_scale = ["qwen3_moe_f32 stock_parameters", "deepseek_moe_groups_f32 stock_parameters"];
            match refusal(&export(&fixture, &peft, &tinker, "tinker"), &tinker) {
                Some(why) => {
                    assert!(of_own_scale.iter().any(|own| label.ends_with(own)), "{label}: {why}");
                    assert!(why.contains("the Tinker tools scale all modules by lora_alpha / r"), "{label}: {why}");
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
    assert!(compared > 1000 && refused == 3, "{compared} compared, {refused} refused");
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
