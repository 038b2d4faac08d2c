//! LoRA adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! For each layer and projection there is an A of `[rank, in]` and a B of `[out, rank]`, unscaled, under
//! `base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight` and so on. The unembedding and experts are where two conventions part
//! ([`AdapterFormat`]). What training saves has the names by which the Tinker tools merge it, `base_model.model.model.unembed_tokens` and `mlp.experts.w1`, which PEFT would pass over; its
//! configuration has PEFT refuse it therefore, and `strata export` writes PEFT's own. Writing both into one file would make the Tinker tools merge the products twice.

mod config;
mod config_file;
mod forms;
mod fused;
mod given;
mod modules;
mod names;
mod pattern;
mod read;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use strata_tensor::{Backend, DType};

use super::safetensors::header_memory_bytes;
use super::{Checkpoint, CheckpointReader, JsonInto, json_memory_bytes, read_text};
use crate::lora::{LoraConfig, LoraModule, LoraParams, ModuleSet, Part};
use crate::{Error, ModelConfig, Result};
use config::AdapterSettings;
use names::{AdapterTensors, Layout, Naming};
use read::{leave_base, read_params, refuse_not_finite, refuse_wrong_moments};
use write::{Lost, OutTensor, Source, tensors, write_tensors};

pub use forms::check_form;
pub use given::gradient_as_given;

/// The largest `adapter_config.json` that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Entry of the metadata of the optimizer's state: [`Backend::numerics`] of what computed it.
const NUMERICS: &str = "numerics";
/// Prefixes of Adam's moments in [`OPTIMIZER_FILE`].
const MOMENTS: [&str; 2] = ["m.", "v."];
const STEP: &str = "step";

/// An adapter that was read.
#[derive(Debug)]
pub struct PeftAdapter {
    /// Its shape.
    pub config: LoraConfig,
    /// Its weights.
    pub params: LoraParams,
    /// The base model it says it was trained on; see [`PeftAdapter::check_base_model`].
    pub base_model: Option<String>,
}

/// Moments of Adam and the number of steps taken.
#[derive(Debug)]
pub struct OptimizerState {
    /// First moment.
    pub m: LoraParams,
    /// Second moment.
    pub v: LoraParams,
    /// Steps taken.
    pub step: u64,
    /// [`Backend::numerics`] of what took them, if the file says it.
    pub numerics: Option<String>,
}

/// How an adapter is written. Each form is read. The metadata of the file says which it is: `form` is `tinker` or `peft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFormat {
    /// As the Tinker tools merge it: the unembedding as `unembed_tokens`, all experts of a layer and projection in one tensor. Stock PEFT refuses an adapter that has any of these, and loads all others.
    Tinker,
    /// The same, of a model that transformers has as a part of a composite only: PEFT finds none of its modules under these names, and refuses it.
    TinkerOfComposite,
    /// As stock PEFT (0.21, on transformers 5) loads it, all of it: the unembedding as `lm_head`, experts as pairs of the parameters that have all of them.
    Peft,
    /// The same, of a model that transformers has as a part of a composite only, under `model.language_model.`.
    PeftOfComposite,
}

impl AdapterFormat {
    /// The form of the Tinker tools for models of this configuration.
    pub fn tinker(model: &ModelConfig) -> Self {
        if model.is_composite() { AdapterFormat::TinkerOfComposite } else { AdapterFormat::Tinker }
    }

    /// PEFT's form for models of this configuration.
    pub fn peft(model: &ModelConfig) -> Self {
        if model.is_composite() { AdapterFormat::PeftOfComposite } else { AdapterFormat::Peft }
    }

    fn is_peft(self) -> bool {
        matches!(self, AdapterFormat::Peft | AdapterFormat::PeftOfComposite)
    }
}

/// Writes an adapter, in f32, into a directory that exists. `base_model` is the name of the model it was trained on.
///
/// # Errors
/// If a file cannot be written, the backend does not have the parameters, or the adapter has scales that there is no saying in PEFT's form: gate and up of experts have one there.
pub fn write_adapter(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    (config, params): (&LoraConfig, &LoraParams),
    base_model: &str,
    format: AdapterFormat,
) -> Result<()> {
    let path = dir.join(CONFIG_FILE);
    let json = config_file::to_json(modules, config, base_model, format).map_err(Error::Lora)?;
    std::fs::write(&path, json).map_err(|source| Error::Io { path, source })?;
    let lost = Lost::default();
    // Transformers and PEFT insist on the first.
    let metadata = [("format", "pt"), ("form", if format.is_peft() { "peft" } else { "tinker" })];
    let all = tensors(Source { backend, lost: &lost }, "", modules, params, format);
    write_tensors(&dir.join(WEIGHTS_FILE), &metadata, all, &lost)
}

/// The files of an adapter, and how they have it.
struct OpenAdapter {
    /// Where the configuration is, for errors.
    path: PathBuf,
    settings: AdapterSettings,
    checkpoint: Checkpoint,
    naming: Naming,
    /// By place of the modules.
    layouts: Vec<Option<Layout>>,
    /// By place of the modules, the numbers of those of its layers that carry LoRA.
    layers: Vec<Vec<usize>>,
}

impl OpenAdapter {
    fn open(dir: &Path, modules: &[LoraModule]) -> Result<Self> {
        let path = dir.join(CONFIG_FILE);
        let refused = |message| Error::Checkpoint { path: path.clone(), message };
        let settings = AdapterSettings::from_json(&read_config(&path)?).map_err(refused)?;
        let mut checkpoint = Checkpoint::open_file(&dir.join(WEIGHTS_FILE))?;
        let [composite, alone] = names::MODEL_PREFIXES;
        let of_composite = checkpoint.rename(composite, alone)?;
        let naming = Naming::of(&checkpoint, settings.target_names(), of_composite);
        let tensors = AdapterTensors { checkpoint: &checkpoint, prefix: "", naming };
        let layouts: Vec<_> = modules.iter().map(|module| tensors.layout(module)).collect();
        let layers = modules.iter().zip(&layouts).map(|(module, layout)| match layout {
            Some(layout) => settings.layers_of(module, *layout, &tensors),
            None => Ok(Vec::new()),
        });
        let layers = layers.collect::<std::result::Result<_, _>>().map_err(refused)?;
        Ok(OpenAdapter { path, settings, checkpoint, naming, layouts, layers })
    }

    fn tensors(&self) -> AdapterTensors<'_> {
        AdapterTensors { checkpoint: &self.checkpoint, prefix: "", naming: self.naming }
    }
}

/// An adapter whose files have been opened and whose configuration has been held against a model. No tensor has been read.
pub struct PlannedAdapter<'m> {
    file: OpenAdapter,
    modules: &'m [LoraModule],
    config: LoraConfig,
}

/// Reads an adapter for a model with these modules into memory of `backend`. Any subset of modules may carry LoRA, each in all of its layers or in those that `target_modules`, `exclude_modules` and `layers_to_transform` leave it; the
/// adapter is widened to f32 if it is narrower. Of experts whose gate and up share an A, each gets a copy of it. Layers that carry nothing are zeros on both sides, which training leaves at that.
///
/// # Errors
/// If files are missing or malformed, a tensor does not fit the model or the rank, belongs to nothing, or is missing, or the
/// adapter needs something that is not plain LoRA. The message says what.
pub fn read_adapter(backend: &dyn Backend, dir: &Path, modules: &[LoraModule]) -> Result<PeftAdapter> {
    PlannedAdapter::open(dir, modules)?.read(backend)
}

impl<'m> PlannedAdapter<'m> {
    /// Opens the files and reads the configuration.
    ///
    /// # Errors
    /// If files are missing or malformed, or the adapter needs something that is not plain LoRA, or a part that the model does not have.
    pub fn open(dir: &Path, modules: &'m [LoraModule]) -> Result<Self> {
        let file = OpenAdapter::open(dir, modules)?;
        let OpenAdapter { path, settings, naming, layouts, layers, .. } = &file;
        let refused = |message| Error::Checkpoint { path: path.clone(), message };
        let tensors = file.tensors();
        let carried: Vec<bool> = layouts.iter().map(Option::is_some).collect();
        let trains = |part| modules.iter().zip(&carried).any(|(module, carried)| *carried && module.part == part);
        let mut config = LoraConfig {
            rank: settings.rank,
            alpha: settings.alpha,
            attention: trains(Part::Attention),
            mlp: trains(Part::Mlp),
            unembed: trains(Part::Unembed),
            embedding: trains(Part::Embedding),
            left_out: ModuleSet::NONE,
            own: BTreeMap::new(),
        };
        settings.check_modules(modules, &carried, *naming).map_err(refused)?;
        let mut of_parameters = modules.iter().zip(layouts).filter(|(_, layout)| matches!(layout, Some(Layout::Fused { .. })));
        if let Some((module, _)) = of_parameters.find(|(module, _)| !settings.names_parameter_of(module, *naming)) {
            let path = module.path;
            let message = format!("the adapter holds tensors for a parameter of {path}, which target_parameters does not name");
            return Err(refused(message));
        }
        for (index, module) in modules.iter().enumerate() {
            let Some(layout) = layouts[index] else { continue };
            let mut unlisted = module.layers.iter().filter(|number| !layers[index].contains(number));
            if let Some(number) = unlisted.find(|number| tensors.holds_layer(module, layout, **number)) {
                let (left_out, path) = (settings.leave_out(module, *number), module.path);
                return Err(refused(format!("{left_out}, and the adapter holds tensors for {path} there")));
            }
        }
        for (index, module) in modules.iter().enumerate() {
            if !carried[index] && config.trains(module.part) {
                config.left_out.insert(index);
            }
        }
        let with_layouts = modules.iter().zip(layouts).enumerate();
        let pairs = with_layouts.filter_map(|(index, (module, layout))| {
            Some(settings.named_pairs((index, &layers[index]), module, (*layout)?, &tensors))
        });
        config.own = settings.own_shapes(&config, &pairs.collect::<Vec<_>>()).map_err(refused)?;
        Ok(PlannedAdapter { file, modules, config })
    }

    /// The most bytes of memory that opening the files in a directory takes.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn memory_bytes_to_open(dir: &Path) -> Result<u64> {
        let config = json_memory_bytes(read_config(&dir.join(CONFIG_FILE))?.as_bytes(), JsonInto::Values);
        Ok(config + header_memory_bytes(&dir.join(WEIGHTS_FILE))?)
    }

    /// Its shape.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The most bytes that reading it and writing it again take: all of it in f32, and what is laid out otherwise at a time.
    pub fn memory_bytes(&self) -> u64 {
        /// The tensor of a file, the same widened, and transposed.
        const AT_A_TIME: u64 = 3;
        let carried = self.modules.iter().enumerate().filter(|(index, module)| self.config.carries(*index, module));
        let sizes = carried.map(|(index, module)| {
            let of_entry = (self.config.rank_of(index, module) as u64)
                .saturating_mul((module.in_features as u64).saturating_add(module.out_features as u64))
                .saturating_mul(DType::F32.size_bytes() as u64);
            (of_entry.saturating_mul(module.entries() as u64), of_entry.saturating_mul(module.entries_of_layer() as u64))
        });
        // Parameters that have gate and up of experts have the rank of both, and the rows of both.
        let (all, largest) = sizes.fold((0u64, 0u64), |(all, largest), (size, of_layer)| {
            (all.saturating_add(size), largest.max(of_layer.saturating_mul(4)))
        });
        all.saturating_add(largest.saturating_mul(AT_A_TIME))
    }

    /// Reads the tensors into memory of `backend`.
    ///
    /// # Errors
    /// If a tensor does not fit the model or the rank, belongs to nothing, is missing, or has an element that is no finite number.
    pub fn read(self, backend: &dyn Backend) -> Result<PeftAdapter> {
        let PlannedAdapter { file, modules, config } = self;
        let OpenAdapter { checkpoint, layouts, layers, .. } = &file;
        let mut reader = CheckpointReader::new(checkpoint);
        let carried = modules.iter().zip(layouts).filter(|(_, layout)| layout.is_some());
        carried.for_each(|(module, _)| leave_base(&mut reader, module));
        let params = read_params(backend, file.tensors(), &mut reader, modules, &config, Some(layers));
        reader.finish()?;
        config.validate()?;
        refuse_not_finite(checkpoint)?;
        Ok(PeftAdapter { config, params: params?, base_model: file.settings.base_model })
    }
}

/// The text of an adapter's configuration.
fn read_config(path: &Path) -> Result<String> {
    read_text(path, CONFIG_BYTES_MAX).map_err(|error| match path.with_extension("json.age").exists() {
        true => Error::Checkpoint { path: path.into(), message: "the files are encrypted; decrypt them with age first".into() },
        false => error,
    })
}

/// The base model that the configuration of an adapter names, if it names one.
///
/// # Errors
/// If the configuration cannot be read, or is not that of an adapter.
pub fn named_base_model(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(CONFIG_FILE);
    let settings = AdapterSettings::from_json(&read_config(&path)?);
    settings.map(|settings| settings.base_model).map_err(|message| Error::Checkpoint { path, message })
}

impl PeftAdapter {
    /// Refuses an adapter that was trained on another base model than the one that is served as `served`. One that does not name its base
    /// passes. Where one of the two names is a path or a bare name, as for models in directories, only the last parts are compared.
    ///
    /// # Errors
    /// Names both models.
    pub fn check_base_model(&self, served: &str) -> Result<()> {
        let Some(trained_on) = &self.base_model else { return Ok(()) };
        let last = |name: &str| name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_string();
        let on_hub = |name: &str| name.matches('/').count() == 1 && !name.starts_with(['/', '.']);
        let same = match on_hub(trained_on) && on_hub(served) {
            true => trained_on == served,
            false => last(trained_on) == last(served),
        };
        if same {
            return Ok(());
        }
        let shown: String = trained_on.chars().take(200).collect();
        Err(Error::Lora(format!("the adapter was trained on base model {shown:?}, and this is {served:?}")))
    }
}

/// Writes the state of an optimizer, bit for bit, into a directory that exists.
///
/// # Errors
/// If the file cannot be written.
pub fn write_optimizer(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    [m, v]: [&LoraParams; 2],
    step: u64,
) -> Result<()> {
    let [m_prefix, v_prefix] = MOMENTS;
    let lost = Lost::default();
    let source = Source { backend, lost: &lost };
    let of = |prefix, params| tensors(source, prefix, modules, params, AdapterFormat::Tinker);
    let moments = of(m_prefix, m).into_iter().chain(of(v_prefix, v));
    // Where a run goes on with the same bits.
    let numerics = backend.numerics();
    let metadata = [(NUMERICS, &*numerics)];
    write_tensors(&dir.join(OPTIMIZER_FILE), &metadata, moments.chain([(STEP.into(), OutTensor::count(step))]), &lost)
}

/// Whether a checkpoint has the state of an optimizer. Adapters that were made elsewhere, and those that are saved to be sampled, have none.
pub fn has_optimizer(dir: &Path) -> bool {
    dir.join(OPTIMIZER_FILE).symlink_metadata().is_ok()
}

/// Reads the state of an optimizer of an adapter of `config`: the bits that were written.
///
/// # Errors
/// If the file is missing or malformed, does not fit the adapter, or has a moment that is no finite number, or a second one below zero.
pub fn read_optimizer(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    config: &LoraConfig,
) -> Result<OptimizerState> {
    let checkpoint = Checkpoint::open_file(&dir.join(OPTIMIZER_FILE))?;
    refuse_wrong_moments(&checkpoint, MOMENTS)?;
    let mut reader = CheckpointReader::new(&checkpoint);
    let of = |prefix| AdapterTensors { checkpoint: &checkpoint, prefix, naming: Naming::default() };
    let [m, v] = MOMENTS.map(|prefix| read_params(backend, of(prefix), &mut reader, modules, config, None));
    let step = reader.require_count(STEP);
    reader.finish()?;
    let step = step.expect("a reader that finished well has filled every request");
    Ok(OptimizerState { m: m?, v: v?, step, numerics: checkpoint.metadata(NUMERICS) })
}

#[cfg(test)]
mod tests;
