//! `strata import`: a PEFT adapter as a checkpoint in a data directory.

use std::path::PathBuf;

use anyhow::Result;
use indicatif::HumanBytes;
use strata_engine::spec_of;
use strata_model::checkpoint::{AdapterFormat, read_adapter, write_adapter};
use strata_model::lora_modules;
use strata_tensor::CpuBackend;

use super::export::{base_of, note_other_base};
use crate::base_model::{self, parse_name};
use crate::output::{say, say_aside};

/// Settings of `strata import`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Adapter directory, as PEFT writes it, or in the form of the Tinker tools.
    pub adapter: PathBuf,
    /// What the checkpoint is to be called.
    #[arg(long)]
    pub name: String,
    /// Base model: a checkpoint directory or a Hugging Face name; its weights are not read [default: the one that the adapter names].
    #[arg(long)]
    pub base: Option<String>,
    /// The name that the base model is served under [default: that of its directory or repository].
    #[arg(long, value_parser = parse_name)]
    pub model_name: Option<String>,
    /// Where checkpoints live, of a server that runs or will run [default: $XDG_DATA_HOME/strata, or ~/.local/share/strata].
    #[arg(long, env = "STRATA_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

/// Reads the adapter, writes the checkpoint and prints its path.
///
/// # Errors
/// If the adapter does not fit the base model or needs something that is not plain LoRA, or the checkpoint cannot be written.
pub fn run(args: Args) -> Result<()> {
    let base = base_of(args.base.as_deref(), &args.adapter)?;
    let config = base.config()?;
    let modules = lora_modules(&config);
    let backend = CpuBackend::new(None)?;
    let adapter = read_adapter(&backend, &args.adapter, &modules)?;
    let served = args.model_name.unwrap_or_else(|| base.served_name());
    note_other_base(&adapter, &served);
    let data_dir = args.data_dir.map_or_else(base_model::default_data_dir, Ok)?;
    let lora = spec_of(&adapter.config, &modules);
    let imported = strata_server::import(&data_dir, &args.name, &served, lora, |dir| {
        write_adapter(&backend, dir, &modules, (&adapter.config, &adapter.params), &served, AdapterFormat::tinker(&config))
    })?;
    say_aside!("{} in {}", HumanBytes(imported.size_bytes), data_dir.display());
    say!("{}", imported.path)?;
    Ok(())
}
