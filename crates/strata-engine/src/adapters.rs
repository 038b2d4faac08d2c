//! Adapters of a base model as files, without an engine: what other tools have written becomes a checkpoint, and a checkpoint what they load.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use strata_model::checkpoint::{AdapterFormat, PeftAdapter, PlannedAdapter, check_form, write_adapter};
use strata_model::lora::LoraModule;
use strata_model::{Error, ModelConfig, lora_modules};
use strata_tensor::CpuBackend;

use crate::api::{Failure, LoraSpec};
use crate::checkpoint::without_directory;
use crate::learner::spec_of;

/// How an adapter is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As the Tinker tools have it, and checkpoints.
    Tinker,
    /// As stock PEFT has it.
    Peft,
}

/// What adapters of a base model are read against. Clones share it.
#[derive(Clone, Debug)]
pub struct Adapters {
    base: Arc<Base>,
}

#[derive(Debug)]
struct Base {
    name: String,
    config: ModelConfig,
    modules: Vec<LoraModule>,
}

impl Adapters {
    /// Those of a model of this configuration, which is served under this name.
    pub fn new(name: impl Into<String>, config: ModelConfig) -> Self {
        let modules = lora_modules(&config);
        Adapters { base: Arc::new(Base { name: name.into(), config, modules }) }
    }

    /// The most bytes of memory that opening the adapter in a directory takes.
    ///
    /// # Errors
    /// If there is none.
    pub fn memory_bytes_to_open(dir: &Path) -> Result<u64, Failure> {
        PlannedAdapter::memory_bytes_to_open(dir).map_err(|error| failure(&error, dir))
    }

    /// Opens the adapter in a directory, and reads its configuration.
    ///
    /// # Errors
    /// If there is none, or it is none for this model.
    pub fn open(&self, dir: &Path) -> Result<AdapterFiles<'_>, Failure> {
        let planned = PlannedAdapter::open(dir, &self.base.modules).map_err(|error| failure(&error, dir))?;
        Ok(AdapterFiles { base: &self.base, planned, dir: dir.into() })
    }
}

/// An adapter that is opened, and not read.
pub struct AdapterFiles<'a> {
    base: &'a Base,
    planned: PlannedAdapter<'a>,
    dir: PathBuf,
}

impl<'a> AdapterFiles<'a> {
    /// The most bytes of memory that reading and writing it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.planned.memory_bytes()
    }

    /// Its shape in the words of the API.
    pub fn lora(&self) -> LoraSpec {
        spec_of(self.planned.config(), &self.base.modules)
    }

    /// Refuses an adapter that cannot be said in a form.
    ///
    /// # Errors
    /// Says what there are no words for.
    pub fn check(&self, form: Form) -> Result<(), Failure> {
        let checked = check_form(&self.base.config, &self.base.modules, self.planned.config(), self.base.format(form));
        checked.map_err(|error| failure(&error, &self.dir))
    }

    /// Reads all of it.
    ///
    /// # Errors
    /// If a tensor is missing, does not fit, or has an element that is no finite number.
    pub fn read(self) -> Result<ReadAdapter<'a>, Failure> {
        let AdapterFiles { base, planned, dir } = self;
        // Its memory is the host's, and it computes nothing.
        let read = CpuBackend::new(Some(1)).map_err(Error::from).and_then(|backend| {
            let adapter = planned.read(&backend)?;
            Ok(ReadAdapter { base, backend, adapter })
        });
        read.map_err(|error| failure(&error, &dir))
    }
}

/// An adapter in memory.
pub struct ReadAdapter<'a> {
    base: &'a Base,
    backend: CpuBackend,
    adapter: PeftAdapter,
}

impl ReadAdapter<'_> {
    /// Writes it into a directory that exists.
    ///
    /// # Errors
    /// If there is no saying it in this form, or the file system refuses.
    pub fn write(&self, dir: &Path, form: Form) -> strata_model::Result<()> {
        check_form(&self.base.config, &self.base.modules, &self.adapter.config, self.base.format(form))?;
        self.write_any(dir, form)
    }

    /// Writes it as a checkpoint, into a directory that exists: in the names of the Tinker tools, and with what they have no words for.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn write_checkpoint(&self, dir: &Path) -> strata_model::Result<()> {
        self.write_any(dir, Form::Tinker)
    }

    fn write_any(&self, dir: &Path, form: Form) -> strata_model::Result<()> {
        let (base, PeftAdapter { config, params, .. }) = (self.base, &self.adapter);
        write_adapter(&self.backend, dir, &base.modules, (config, params), &base.name, base.format(form))
    }
}

impl Base {
    fn format(&self, form: Form) -> AdapterFormat {
        match form {
            Form::Tinker => AdapterFormat::tinker(&self.config),
            Form::Peft => AdapterFormat::peft(&self.config),
        }
    }
}

/// What is wrong with the files is a matter of whoever made them; a disk that fails is ours.
fn failure(error: &Error, dir: &Path) -> Failure {
    let message = without_directory(error, dir);
    match error {
        Error::Io { source, .. }
            if !matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::InvalidData) =>
        {
            Failure::Server(message)
        }
        Error::Tensor(_) => Failure::Server(message),
        _ => Failure::User(message),
    }
}
