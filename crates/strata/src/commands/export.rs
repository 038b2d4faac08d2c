//! `strata export`: an adapter in the form that another tool loads.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;
use indicatif::HumanBytes;
use strata_model::checkpoint::{AdapterFormat, Existing, PeftAdapter, read_adapter, write_adapter, write_atomically};
use strata_model::lora::LoraModule;
use strata_model::{Family, ModelConfig, ModelSource, lora_modules};
use strata_tensor::CpuBackend;

/// Settings of `strata export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Adapter directory, in either form.
    pub adapter: PathBuf,
    /// Directory to create.
    pub out: PathBuf,
    /// Checkpoint directory of the base model; its weights are not read.
    #[arg(long)]
    pub base: PathBuf,
    /// Whose form to write.
    #[arg(long, value_enum)]
    pub format: Format,
}

/// The forms of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Stock PEFT's, on transformers 5.
    Peft,
    /// That of the Tinker tools, in which checkpoints are saved.
    Tinker,
}

/// Reads the adapter and writes it.
///
/// # Errors
/// If the adapter does not fit the base model, has something that there is no saying in the form, or the directory exists or cannot be written.
pub fn run(args: Args) -> Result<()> {
    let base = ModelSource::Directory(args.base);
    let config = base.config()?;
    let modules = lora_modules(&config);
    let backend = CpuBackend::new(None)?;
    let adapter = read_adapter(&backend, &args.adapter, &modules)?;
    let format = match args.format {
        Format::Peft => {
            check_for_peft(&config, &modules, &adapter)?;
            AdapterFormat::peft(&config)
        }
        Format::Tinker => {
            check_for_tinker(&modules, &adapter)?;
            AdapterFormat::Tinker
        }
    };
    let PeftAdapter { config, params, base_model } = &adapter;
    let base_model = base_model.clone().unwrap_or_else(|| base.served_name());
    let bytes = write_atomically(&args.out, Existing::Refuse, |dir| {
        write_adapter(&backend, dir, &modules, (config, params), &base_model, format)
    })?;
    println!("{}: {}", args.out.display(), HumanBytes(bytes));
    Ok(())
}

/// Refuses what PEFT would take for something else.
fn check_for_peft(base: &ModelConfig, modules: &[LoraModule], adapter: &PeftAdapter) -> Result<()> {
    let of_experts = matches!(base.family, Family::Qwen3Moe(_) | Family::DeepseekV3(_) | Family::Glm4MoeLite(_));
    if of_experts && adapter.config.mlp && modules.iter().all(|module| module.experts.is_none()) {
        bail!("PEFT looks for MLPs of {} among its experts, and this base model has none", base.model_type());
    }
    Ok(())
}

/// Refuses scales that the Tinker tools do not read: they scale every product by `lora_alpha / r`.
fn check_for_tinker(modules: &[LoraModule], adapter: &PeftAdapter) -> Result<()> {
    let common = adapter.config.scale();
    match adapter.config.own.iter().find(|(_, shape)| shape.scale != common) {
        None => Ok(()),
        Some((&index, shape)) => bail!(
            "the Tinker tools scale all modules by lora_alpha / r, {common} here, and {} of this adapter has {}",
            modules[index].path,
            shape.scale
        ),
    }
}
