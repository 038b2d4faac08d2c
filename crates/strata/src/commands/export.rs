//! `strata export`: an adapter in the form that another tool loads, or its base model with the adapter in its weights.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use indicatif::HumanBytes;
use strata_model::checkpoint::{
    AdapterFormat, Existing, PeftAdapter, check_form, named_base_model, read_adapter, write_adapter, write_atomically,
};
use strata_model::{ModelSource, lora_modules, write_merged};
use strata_tensor::{CpuBackend, DType};

use crate::logging::{self, LogFormat};
use crate::output::{say, say_aside};

/// Settings of `strata export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Adapter directory, in either form.
    pub adapter: PathBuf,
    /// Directory to create.
    pub out: PathBuf,
    /// Base model: a checkpoint directory or a Hugging Face name; its weights are read only to merge [default: the one that the adapter names].
    #[arg(long)]
    pub base: Option<String>,
    /// What to write.
    #[arg(long, value_enum)]
    pub format: Format,
    /// The dtype of all weights of a merged checkpoint [default: that of each in the base].
    #[arg(long, value_parser = ["f32", "bf16"])]
    pub dtype: Option<String>,
}

/// What an adapter can be written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Stock PEFT's, on transformers 5.
    Peft,
    /// That of the Tinker tools, in which checkpoints are saved.
    Tinker,
    /// A checkpoint of the base model with the adapter added to its weights, for transformers and all that reads what it writes.
    Merged,
}

/// Reads the adapter and writes it.
///
/// # Errors
/// If the adapter does not fit the base model, has something that there is no saying in the form, or the directory exists or cannot be written.
pub fn run(args: Args) -> Result<()> {
    let dtype = args.dtype.as_deref().map(|name| if name == "f32" { DType::F32 } else { DType::BF16 });
    if dtype.is_some() && args.format != Format::Merged {
        bail!("--dtype is for --format merged: adapters are written in f32");
    }
    let base = base_of(args.base.as_deref(), &args.adapter)?;
    let config = base.config()?;
    let modules = lora_modules(&config);
    let backend = CpuBackend::new(None)?;
    let adapter = read_adapter(&backend, &args.adapter, &modules)?;
    note_other_base(&adapter, &base.served_name());
    let format = match args.format {
        Format::Peft => AdapterFormat::peft(&config),
        Format::Tinker => AdapterFormat::tinker(&config),
        Format::Merged => {
            let merged = (&adapter.config, &adapter.params);
            let write = |dir: &Path| write_merged(&backend, &base, merged, dtype, dir);
            let bytes = write_atomically(&args.out, Existing::Refuse, write)?;
            say!("{}: {}", args.out.display(), HumanBytes(bytes))?;
            return Ok(());
        }
    };
    check_form(&config, &modules, &adapter.config, format)?;
    let PeftAdapter { config, params, base_model } = &adapter;
    // Whoever names the base has said which it is.
    let own_name = base_model.clone().filter(|_| args.base.is_none());
    let base_model = own_name.unwrap_or_else(|| base.served_name());
    let bytes = write_atomically(&args.out, Existing::Refuse, |dir| {
        write_adapter(&backend, dir, &modules, (config, params), &base_model, format)
    })?;
    say!("{}: {}", args.out.display(), HumanBytes(bytes))?;
    Ok(())
}

/// Says where an adapter names another base model than the one that it is used with. Whoever has named the base has said which it is; where files lay when the adapter was made is no more than a hint.
pub fn note_other_base(adapter: &PeftAdapter, used: &str) {
    if let Err(other) = adapter.check_base_model(used) {
        say_aside!("note: {other}; every shape fits, and it is taken for {used:?}");
    }
}

/// The base model that was named, or else the one that an adapter names.
///
/// # Errors
/// If it cannot be found, or neither names one.
pub fn base_of(named: Option<&str>, adapter: &Path) -> Result<ModelSource> {
    logging::init(LogFormat::Text);
    if let Some(named) = named {
        return Ok(ModelSource::resolve(named)?);
    }
    let Some(own) = named_base_model(adapter)? else {
        bail!("the adapter does not say which model it is for: say it with --base");
    };
    ModelSource::resolve(&own).context("the adapter's base_model_name_or_path does not lead to it: say where it is with --base")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use strata_model::EMBEDDED_NAME;
    use strata_model::lora::{LoraConfig, LoraParams, ModuleSet};

    use super::*;

    #[test]
    fn an_exported_adapter_names_the_base_that_was_given_or_else_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let [adapter, base] = ["adapter", "base"].map(|name| dir.path().join(name));
        fs::create_dir(&base).unwrap();
        fs::write(base.join("config.json"), &*ModelSource::Embedded.config_json().unwrap()).unwrap();
        let config = ModelSource::Embedded.config().unwrap();
        let (modules, backend) = (lora_modules(&config), CpuBackend::new(Some(1)).unwrap());
        let shape = LoraConfig {
            rank: 2,
            alpha: 32.0,
            attention: true,
            mlp: true,
            unembed: false,
            embedding: false,
            left_out: ModuleSet::NONE,
            own: Default::default(),
        };
        let params = LoraParams::init(&backend, &modules, &shape, 1).unwrap();
        let own_name = base.to_str().unwrap();
        let written = (&shape, &params);
        fs::create_dir(&adapter).unwrap();
        write_adapter(&backend, &adapter, &modules, written, own_name, AdapterFormat::tinker(&config)).unwrap();
        for (given, expected) in [(None, own_name), (Some(EMBEDDED_NAME), EMBEDDED_NAME), (Some(own_name), "base")] {
            for format in [Format::Peft, Format::Tinker] {
                let out = dir.path().join("out");
                let base = given.map(str::to_owned);
                run(Args { adapter: adapter.clone(), out: out.clone(), base, format, dtype: None }).unwrap();
                assert_eq!(named_base_model(&out).unwrap().as_deref(), Some(expected));
                fs::remove_dir_all(&out).unwrap();
            }
        }
    }
}
