//! LoRA adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! For each layer and projection there is an A of `[rank, in]` and a B of `[out, rank]`, unscaled, under
//! `base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight` and so on. PEFT loads the files of adapters that train attention
//! and MLP as they are. The unembedding is where two conventions part: it is written as the Tinker tools merge it,
//! `base_model.model.model.unembed_tokens`, a name that PEFT passes over with a warning about missing keys of `lm_head`, while all else loads;
//! PEFT's own `base_model.model.lm_head` is read too. Writing both would make the Tinker tools merge the product twice.

mod config;

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, View, serialize_to_file};
use strata_tensor::{Backend, DType, HostRef, HostTensor, TensorRef};

use super::{Checkpoint, CheckpointReader, Converted, SourceTensor, first_not_finite, read_text};
use crate::lora::{ExpertModule, LoraConfig, LoraModule, LoraParams, LoraStack, ModuleSet, Part};
use crate::{Error, Result};
use config::AdapterSettings;

/// The largest `adapter_config.json` that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Entry of the metadata of the optimizer's state: [`Backend::numerics`] of what computed it.
const NUMERICS: &str = "numerics";
/// Paths of the unembedding: the one that is written, and PEFT's.
const UNEMBED_PATHS: [&str; 2] = ["base_model.model.model.unembed_tokens", "base_model.model.lm_head"];
/// Path of the embedding, whose tensors have names of their own.
const EMBEDDING_PATH: &str = "base_model.model.model.embed_tokens";
/// What the name of a copy of the base's weight ends in.
const BASE_WEIGHT: &str = ".base_layer.weight";
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

/// Writes an adapter, in f32, into a directory that exists. `base_model` is the name of the model it was trained on.
///
/// # Errors
/// If a file cannot be written, or the backend does not have the parameters.
pub fn write_adapter(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    config: &LoraConfig,
    params: &LoraParams,
    base_model: &str,
) -> Result<()> {
    let path = dir.join(CONFIG_FILE);
    std::fs::write(&path, config::to_json(modules, config, base_model)).map_err(|source| Error::Io { path, source })?;
    let lost = Lost::default();
    // Transformers and PEFT insist on this entry.
    let format = ("format".to_string(), "pt".to_string());
    write_tensors(&dir.join(WEIGHTS_FILE), format, tensors(backend, &lost, "", modules, params), &lost)
}

/// Reads an adapter for a model with these modules into memory of `backend`. Any subset of modules may carry LoRA, each in all of its layers; the
/// adapter is widened to f32 if it is narrower.
///
/// # Errors
/// If files are missing or malformed, a tensor does not fit the model or the rank, belongs to nothing, or is missing, or the
/// adapter needs something that is not plain LoRA. The message says what.
pub fn read_adapter(backend: &dyn Backend, dir: &Path, modules: &[LoraModule]) -> Result<PeftAdapter> {
    let path = dir.join(CONFIG_FILE);
    let settings = AdapterSettings::from_json(&read_text(&path, CONFIG_BYTES_MAX)?)
        .map_err(|message| Error::Checkpoint { path: path.clone(), message })?;
    let checkpoint = Checkpoint::open_file(&dir.join(WEIGHTS_FILE))?;
    let mut config = LoraConfig {
        rank: settings.rank,
        expert_rank: expert_rank(&checkpoint, modules),
        alpha: settings.alpha,
        attention: false,
        mlp: false,
        unembed: false,
        embedding: false,
        left_out: ModuleSet::NONE,
    };
    let carried: Vec<bool> = modules.iter().map(|m| is_carried(&checkpoint, m)).collect();
    for (module, _) in modules.iter().zip(&carried).filter(|(_, carried)| **carried) {
        match module.part {
            Part::Attention => config.attention = true,
            Part::Mlp => config.mlp = true,
            Part::Unembed => config.unembed = true,
            Part::Embedding => config.embedding = true,
        }
    }
    settings.check_modules(modules, &carried).map_err(|message| Error::Checkpoint { path, message })?;
    for (index, module) in modules.iter().enumerate() {
        if !carried[index] && config.trains(module.part) {
            config.left_out.insert(index);
        }
    }
    let mut reader = CheckpointReader::new(&checkpoint);
    modules.iter().zip(&carried).filter(|(_, carried)| **carried).for_each(|(module, _)| leave_base(&mut reader, module));
    let params = read_params(backend, &mut reader, "", modules, &config);
    reader.finish()?;
    config.validate()?;
    refuse_not_finite(&checkpoint)?;
    Ok(PeftAdapter { config, params: params?, base_model: settings.base_model })
}

/// Leaves aside the base's own weight, which is frozen: where embeddings carry LoRA, PEFT writes it too unless it is told not to (`save_embedding_layers`).
fn leave_base(reader: &mut CheckpointReader<'_>, module: &LoraModule) {
    let (path, shape) = match module.part {
        Part::Unembed => (UNEMBED_PATHS[1], [module.out_features, module.in_features]),
        Part::Embedding => (EMBEDDING_PATH, [module.in_features, module.out_features]),
        Part::Attention | Part::Mlp => return,
    };
    let name = format!("{path}{BASE_WEIGHT}");
    if reader.contains(&name) {
        reader.require(&name, &shape);
    }
}

/// Refuses an adapter that would make every number it touches infinite or not a number.
fn refuse_not_finite(checkpoint: &Checkpoint) -> Result<()> {
    for name in checkpoint.names().filter(|name| !name.ends_with(BASE_WEIGHT)) {
        let Some(tensor) = checkpoint.tensor(name)? else { continue };
        if let Some((place, value)) = first_not_finite(tensor.read(DType::F32)?.as_ref()) {
            return Err(checkpoint.error(format!("element {place} of tensor {name} is {value}, not a finite number")));
        }
    }
    Ok(())
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
        Err(Error::Lora(format!("the adapter was trained on base model {shown:?}, and this server has {served:?}")))
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
    let moments = tensors(backend, &lost, m_prefix, modules, m).chain(tensors(backend, &lost, v_prefix, modules, v));
    // Where a run goes on with the same bits.
    let numerics = (NUMERICS.to_string(), backend.numerics());
    write_tensors(&dir.join(OPTIMIZER_FILE), numerics, moments.chain([(STEP.into(), OutTensor::Count(step))]), &lost)
}

/// Reads the state of an optimizer of an adapter of `config`: the bits that were written.
///
/// # Errors
/// If the file is missing or malformed, or does not fit the adapter.
pub fn read_optimizer(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    config: &LoraConfig,
) -> Result<OptimizerState> {
    let checkpoint = Checkpoint::open_file(&dir.join(OPTIMIZER_FILE))?;
    let mut reader = CheckpointReader::new(&checkpoint);
    let [m, v] = MOMENTS.map(|prefix| read_params(backend, &mut reader, prefix, modules, config));
    let step = reader.require_count(STEP);
    reader.finish()?;
    let step = step.expect("a reader that finished well has filled every request");
    Ok(OptimizerState { m: m?, v: v?, step, numerics: checkpoint.metadata(NUMERICS) })
}

/// Path of a module in the decoder layer of this number in a checkpoint, under which its `lora_A.weight` and `lora_B.weight` are. Those of experts are one tensor for all.
fn module_path(module: &LoraModule, number: usize) -> String {
    let layer = format!("base_model.model.model.layers.{number}.{}", module.path);
    match (module.part, module.experts) {
        (Part::Unembed, _) => UNEMBED_PATHS[0].into(),
        (Part::Embedding, _) => EMBEDDING_PATH.into(),
        (_, Some(experts)) => format!("{layer}.{}", experts.tinker_name),
        (_, None) => layer,
    }
}

/// As [`module_path`], and what else the tensors may be called: PEFT has another name of the unembedding, and the Tinker tools have `attn` in adapters of gpt-oss.
fn module_paths(module: &LoraModule, number: usize) -> impl Iterator<Item = String> {
    let other = match module.part {
        Part::Unembed => Some(UNEMBED_PATHS[1].into()),
        Part::Attention => {
            let rest = module.path.strip_prefix("self_attn.");
            rest.map(|rest| format!("base_model.model.model.layers.{number}.attn.{rest}"))
        }
        Part::Mlp | Part::Embedding => None,
    };
    [module_path(module, number)].into_iter().chain(other)
}

/// Path of one expert, where each has tensors of its own.
fn expert_path(module: &LoraModule, experts: &ExpertModule, number: usize, expert: usize) -> String {
    format!("base_model.model.model.layers.{number}.{}.{expert}.{}", module.path, experts.projection)
}

/// The rank of experts in a file: that of the first A that is there.
fn expert_rank(checkpoint: &Checkpoint, modules: &[LoraModule]) -> Option<usize> {
    let of_module = |module: &LoraModule| {
        let (experts, number) = (module.experts?, *module.layers.first()?);
        let together = checkpoint.shape(&a_name("", &module_path(module, number))).and_then(|shape| shape.get(1));
        let alone = || checkpoint.shape(&a_name("", &expert_path(module, &experts, number, 0))).and_then(|shape| shape.first());
        together.or_else(alone).copied()
    };
    modules.iter().find_map(of_module)
}

fn a_name(prefix: &str, path: &str) -> String {
    let name = if path == EMBEDDING_PATH { "lora_embedding_A" } else { "lora_A.weight" };
    format!("{prefix}{path}.{name}")
}

fn b_name(prefix: &str, path: &str) -> String {
    let name = if path == EMBEDDING_PATH { "lora_embedding_B" } else { "lora_B.weight" };
    format!("{prefix}{path}.{name}")
}

fn holds(checkpoint: &Checkpoint, path: &str) -> bool {
    checkpoint.contains(&a_name("", path)) || checkpoint.contains(&b_name("", path))
}

/// The axis of experts of the A and B of these names, where they have all experts of a layer: one side may be the same for all, with an axis of 1.
fn leading_axes(reader: &CheckpointReader<'_>, module: &LoraModule, alone: bool, names: [&str; 2]) -> [Vec<usize>; 2] {
    let Some(experts) = module.experts.filter(|_| !alone) else { return [vec![], vec![]] };
    let is_shared = |name| reader.shape(name).is_some_and(|shape| shape.len() == 3 && shape[0] == 1);
    match names.map(is_shared) {
        [true, false] => [vec![1], vec![experts.count]],
        [false, true] => [vec![experts.count], vec![1]],
        _ => [vec![experts.count], vec![experts.count]],
    }
}

/// Whether the adapter has anything for a module.
fn is_carried(checkpoint: &Checkpoint, module: &LoraModule) -> bool {
    module.layers.iter().any(|&number| {
        let of_experts = |experts: ExpertModule| holds(checkpoint, &expert_path(module, &experts, number, 0));
        module_paths(module, number).any(|path| holds(checkpoint, &path)) || module.experts.is_some_and(of_experts)
    })
}

/// Reads one quantity of an adapter. Whatever does not fit is in the reader's account, to be settled before the result is used.
fn read_params(
    backend: &dyn Backend,
    reader: &mut CheckpointReader<'_>,
    prefix: &str,
    modules: &[LoraModule],
    config: &LoraConfig,
) -> Result<LoraParams> {
    let mut stacks = Vec::with_capacity(modules.len());
    for (index, module) in modules.iter().enumerate() {
        if !config.carries(index, module) {
            stacks.push(None);
            continue;
        }
        let rank = config.rank_of(module);
        // One layer decides for all whether experts have tensors of their own.
        let alone = module.experts.filter(|experts| {
            let path = module.layers.first().map(|&number| expert_path(module, experts, number, 0));
            path.is_some_and(|path| reader.contains(&a_name(prefix, &path)) || reader.contains(&b_name(prefix, &path)))
        });
        let mut pairs = Vec::with_capacity(module.layers.len());
        for &number in &module.layers {
            let path = module_paths(module, number).find(|path| reader.contains(&a_name(prefix, path)));
            let path = path.unwrap_or_else(|| module_path(module, number));
            let paths: Vec<String> = match alone {
                Some(experts) => (0..experts.count).map(|expert| expert_path(module, &experts, number, expert)).collect(),
                None => vec![path],
            };
            for path in paths {
                let (a, b) = (a_name(prefix, &path), b_name(prefix, &path));
                let [of_a, of_b] = leading_axes(reader, module, alone.is_some(), [&a, &b]);
                let a = reader.require(&a, &[of_a, vec![rank, module.in_features]].concat());
                let b = reader.require(&b, &[of_b, vec![module.out_features, rank]].concat());
                pairs.extend(a.zip(b));
            }
        }
        // Memory is for what is there: with anything missing the reader fails, and what is read here is not used.
        let wanted = if alone.is_some() { module.entries() } else { module.layers.len() };
        if pairs.len() == wanted {
            stacks.push(Some(read_stack(backend, module, rank, &pairs)?));
        }
    }
    Ok(LoraParams { stacks })
}

fn read_stack(
    backend: &dyn Backend,
    module: &LoraModule,
    rank: usize,
    pairs: &[(SourceTensor<'_>, SourceTensor<'_>)],
) -> Result<LoraStack> {
    let mut stack = LoraStack::zeros(backend, module, rank)?;
    // Of what a pair stands for, a tensor has all or one that serves for all.
    let entries = module.entries() / pairs.len().max(1);
    for (first, (a, b)) in pairs.iter().enumerate().map(|(i, pair)| (i * entries, pair)) {
        let (a, b) = (a.read(DType::F32)?, transposed(b.read(DType::F32)?.as_ref()));
        let a = if module.part == Part::Embedding { Converted::Owned(transposed(a.as_ref())) } else { a };
        for (side, to) in [(a.as_ref(), &mut stack.a), (b.as_ref(), &mut stack.b)] {
            let len = to.shape().row_len();
            let given = side.shape().len() / len;
            for entry in (first..first + entries).step_by(given) {
                backend.upload(side, to.rows_mut(entry..entry + given))?;
            }
        }
    }
    Ok(stack)
}

/// f32 matrices, the last two axes, transposed. Moves bits, computes nothing.
fn transposed(matrices: HostRef<'_>) -> HostTensor {
    let shape = matrices.shape();
    let dims = shape.dims();
    let (leading, &[rows, columns]) = dims.split_last_chunk().expect("a matrix has two axes");
    let source = matrices.as_bytes().as_chunks::<4>().0;
    let mut out = HostTensor::zeros(&[leading, &[columns, rows]].concat(), DType::F32);
    let len = (rows * columns).max(1);
    for (source, out) in source.chunks_exact(len).zip(out.bytes_mut().as_chunks_mut::<4>().0.chunks_exact_mut(len)) {
        for (i, value) in out.iter_mut().enumerate() {
            // Element `i` of the transpose `[columns, rows]`.
            *value = source[i % rows * columns + i / rows];
        }
    }
    out
}

/// What went wrong as tensors were read from a backend, for whoever could not be told at once.
type Lost = RefCell<Option<strata_tensor::Error>>;

/// A tensor to be written; it is read from its backend, and B matrices are transposed, only when their turn comes.
enum OutTensor<'a> {
    A { view: TensorRef<'a>, shape: Vec<usize>, from: (&'a dyn Backend, &'a Lost) },
    B { view: TensorRef<'a>, shape: Vec<usize>, from: (&'a dyn Backend, &'a Lost) },
    Count(u64),
}

/// The elements of a view. Where the backend refuses, zeros, and the reason in `lost`: what is written is then of no use.
fn download(view: TensorRef<'_>, (backend, lost): (&dyn Backend, &Lost)) -> HostTensor {
    backend.to_host(view).unwrap_or_else(|error| {
        lost.borrow_mut().get_or_insert(error);
        HostTensor::zeros(view.shape().dims(), view.dtype())
    })
}

impl View for OutTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self {
            OutTensor::A { .. } | OutTensor::B { .. } => Dtype::F32,
            OutTensor::Count(_) => Dtype::U64,
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            OutTensor::A { shape, .. } | OutTensor::B { shape, .. } => shape,
            OutTensor::Count(_) => &[],
        }
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self {
            OutTensor::A { view, from, .. } => download(*view, *from).as_ref().as_bytes().to_vec().into(),
            OutTensor::B { view, from, .. } => transposed(download(*view, *from).as_ref()).as_ref().as_bytes().to_vec().into(),
            OutTensor::Count(count) => count.to_le_bytes().to_vec().into(),
        }
    }

    fn data_len(&self) -> usize {
        match self {
            OutTensor::A { view, .. } | OutTensor::B { view, .. } => view.size_bytes(),
            OutTensor::Count(_) => 8,
        }
    }
}

/// The tensors of an adapter, or of anything of its shape such as a gradient, as [`write_adapter`] names and lays them out.
///
/// # Errors
/// If the backend does not have them.
pub fn adapter_tensors(
    backend: &dyn Backend,
    modules: &[LoraModule],
    params: &LoraParams,
) -> Result<Vec<(String, HostTensor)>> {
    let lost = Lost::default();
    let elements = |tensor: OutTensor<'_>| {
        let mut host = HostTensor::zeros(tensor.shape(), DType::F32);
        host.bytes_mut().copy_from_slice(&tensor.data());
        host
    };
    let all = tensors(backend, &lost, "", modules, params).map(|(name, tensor)| (name, elements(tensor))).collect();
    lost.take().map_or(Ok(all), |error| Err(error.into()))
}

/// All tensors of one quantity of an adapter, by their names in files.
fn tensors<'a>(
    backend: &'a dyn Backend,
    lost: &'a Lost,
    prefix: &'a str,
    modules: &'a [LoraModule],
    params: &'a LoraParams,
) -> impl Iterator<Item = (String, OutTensor<'a>)> {
    let from = (backend, lost);
    let stacks = modules.iter().zip(&params.stacks).filter_map(|(module, stack)| Some((module, stack.as_ref()?)));
    stacks.flat_map(move |(module, stack)| {
        module.layers.iter().enumerate().flat_map(move |(layer, &number)| {
            let path = module_path(module, number);
            let entries = module.entries_of_layer();
            let of_layer = layer * entries..(layer + 1) * entries;
            let rank = stack.b.shape().dims()[1];
            let (a, b) = match module.experts {
                None => (stack.a.row(layer), stack.b.row(layer)),
                Some(_) => (stack.a.as_ref().rows(of_layer.clone()), stack.b.as_ref().rows(of_layer)),
            };
            let leading = module.experts.map_or(vec![], |experts| vec![experts.count]);
            let shape = |matrix: [usize; 2]| [&leading[..], &matrix].concat();
            let a_shape = shape([rank, module.in_features]);
            let a = match module.part {
                // Kept the other way round, as every B.
                Part::Embedding => OutTensor::B { view: a, shape: a_shape, from },
                Part::Attention | Part::Mlp | Part::Unembed => OutTensor::A { view: a, shape: a_shape, from },
            };
            [
                (a_name(prefix, &path), a),
                (b_name(prefix, &path), OutTensor::B { view: b, shape: shape([module.out_features, rank]), from }),
            ]
        })
    })
}

/// Writes tensors whose reading from a backend leaves its complaints in `lost`, and one entry of metadata: several would lie in the file in no order.
fn write_tensors<'a>(
    path: &Path,
    metadata: (String, String),
    tensors: impl Iterator<Item = (String, OutTensor<'a>)>,
    lost: &Lost,
) -> Result<()> {
    let written = serialize_to_file(tensors, Some(HashMap::from([metadata])), path);
    if let Some(error) = lost.take() {
        return Err(error.into());
    }
    written.map_err(|e| Error::Checkpoint { path: path.into(), message: format!("cannot be written: {e}") })
}

#[cfg(test)]
mod tests;
