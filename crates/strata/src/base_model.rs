//! The base model that a command works with: where it comes from, what it may use, and the engine over it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use indicatif::HumanBytes;
use strata_engine::adapters::Adapters;
use strata_engine::{EngineConfig, EngineHandle, EngineInfo, Machine, StartError};
use strata_model::checkpoint::{HubOptions, read_own_file, refuse_links_below, write_file_atomically};
use strata_model::{EMBEDDED_NAME, LateTokenizer, Model, ModelConfig, ModelSource, Tokenizer, UnwrittenCopy, weight_bytes};
use strata_server::{DataDir, ModelInfo, ServerConfig};
use strata_tensor::{CpuBackend, DType, Int4Group, WeightFormat, WeightStorage};

use crate::download::DownloadBars;
use crate::machine;
use crate::units::parse_bytes;

/// What a model may use of the machine.
#[derive(Clone, Debug, clap::Args)]
pub struct Resources {
    /// Memory for everything, base weights included, such as 16GiB [default: three quarters of what the machine has].
    #[arg(long, env = "STRATA_MEMORY", value_name = "BYTES", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Of the memory, what adapters get: in training, frozen for sampling, and a fourth of it for what is being saved of them; training examples and the KV cache share
    /// the rest [default: some three eighths of what weights, requests and the KV cache leave].
    #[arg(long, env = "STRATA_ADAPTER_MEMORY", value_name = "BYTES", value_parser = parse_bytes)]
    pub adapter_memory: Option<u64>,
    /// Threads that compute [default: one for each core].
    #[arg(long, env = "STRATA_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// In which order products of bf16 are added: as this machine is fastest, or in one order on every machine, so that a run can move to another
    /// without changing a bit.
    #[arg(long, env = "STRATA_NUMERICS", value_enum, default_value_t = Numerics::Fast)]
    pub numerics: Numerics,
    /// Store the base weights in fewer bits than they are computed with, and read fewer in a decode step: int8 takes half the memory of bf16, int4 less than a third.
    #[arg(long, env = "STRATA_QUANTIZE", value_enum)]
    pub quantize: Option<Quantize>,
    /// Whether samples guess what follows: prompt-lookup tries what followed the same tokens earlier in the sequence, several tokens to a step. The
    /// tokens that come are the same.
    #[arg(long, env = "STRATA_SPECULATION", value_enum, default_value_t = Speculation::PromptLookup)]
    pub speculation: Speculation,
}

/// The file of a tokenizer that is read while other things go on, at least.
const LATE_TOKENIZER_BYTES: usize = 1 << 20;
/// What a tokenizer takes of memory, for each byte of its file: a token is in two maps and has a text of its own in each, and so do merges. Of 151,643 tokens and as many merges it is some six.
const TOKENIZER_FACTOR: u64 = 8;
/// Of what is for tables, the part that the catalogue of checkpoints may take.
const CATALOGUE_PART: usize = 2;
/// The most threads that compute.
const THREADS_MAX: usize = 1024;

/// How samples guess what follows; see [`strata_engine::Speculation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Speculation {
    /// Not at all: a step for each token.
    Off,
    /// What followed the last tokens where the sequence had them before.
    PromptLookup,
}

impl From<Speculation> for strata_engine::Speculation {
    fn from(speculation: Speculation) -> Self {
        match speculation {
            Speculation::Off => strata_engine::Speculation::Off,
            Speculation::PromptLookup => strata_engine::Speculation::PromptLookup,
        }
    }
}

/// What base weights are stored in; see [`WeightStorage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Quantize {
    /// Signed bytes with a scale for every 64 of them.
    Int8,
    /// Four bits with a scale and a zero for every 64 of them.
    Int4,
}

impl Quantize {
    /// How weights are stored, if they are to be quantized like this or not at all.
    pub fn storage(quantize: Option<Quantize>) -> WeightStorage {
        match quantize {
            None => WeightStorage::Dense,
            Some(Quantize::Int8) => WeightStorage::Int8,
            Some(Quantize::Int4) => WeightStorage::Int4(Int4Group::default()),
        }
    }
}

/// The order of products; see `docs/numerics.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Numerics {
    /// The order of this machine's fastest kernel.
    Fast,
    /// The order that AMX has and all others can compute.
    Portable,
}

impl From<Numerics> for strata_tensor::Numerics {
    fn from(numerics: Numerics) -> Self {
        match numerics {
            Numerics::Fast => strata_tensor::Numerics::Fast,
            Numerics::Portable => strata_tensor::Numerics::Portable,
        }
    }
}

/// What clients are told instead of what the model's own place says.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Naming {
    /// Name to serve the model under, such as Qwen/Qwen3-8B for a directory that holds it: clients ask for a base model by this name, and choose renderers by
    /// it. Of several models, the names in their order [default: that of the repository or the directory].
    #[arg(long, env = "STRATA_NAME", value_name = "NAME", value_parser = parse_name)]
    pub name: Vec<String>,
    /// What clients load the tokenizer from: a Hugging Face name or a directory of theirs, of each model in order [default: where the model is].
    #[arg(long, env = "STRATA_TOKENIZER", value_name = "TOKENIZER", value_parser = parse_name)]
    pub tokenizer: Vec<String>,
}

/// A name that fits a line and a path of a request.
pub fn parse_name(name: &str) -> Result<String, String> {
    /// Longer than any on the hub.
    const CHARS_MAX: usize = 200;
    if name.is_empty() || name.chars().count() > CHARS_MAX {
        return Err(format!("a name has 1 to {CHARS_MAX} characters"));
    }
    match name.chars().find(|c| c.is_control() || c.is_whitespace()) {
        Some(c) => Err(format!("{c:?} is no part of a name")),
        None => Ok(name.into()),
    }
}

impl Resources {
    /// The memory to use: as asked, or the default share of what the machine has.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.unwrap_or_else(|| strata_limits::memory_bytes() / 4 * 3)
    }

    /// Threads that compute: as asked, or one for each core.
    ///
    /// # Errors
    /// If there are none, or more than any machine has.
    pub fn threads(&self) -> anyhow::Result<usize> {
        match self.threads {
            None => Ok(std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)),
            Some(0) => anyhow::bail!("--threads 0 leaves nothing to compute with; it needs at least 1"),
            Some(threads) if threads > THREADS_MAX => anyhow::bail!("--threads {threads} is more than {THREADS_MAX}"),
            Some(threads) => Ok(threads),
        }
    }
}

/// An engine over a base model, and what there is to say of it.
pub struct BaseModel {
    /// The engine.
    pub engine: EngineHandle,
    /// What clients are told.
    pub info: ModelInfo,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// What computes: `cpu avx512-bf16, 2 threads`.
    pub kernels: String,
    /// What it has text by, if it has: as a rule it is still being read.
    own_tokenizer: Option<LateTokenizer>,
}

impl BaseModel {
    /// Answers once the tokenizer has been read.
    ///
    /// # Errors
    /// If it cannot be, or is another model's: clients would load the same.
    pub fn wait_for_tokenizer(&self) -> impl FnOnce() -> anyhow::Result<()> + Send + 'static {
        let (tokenizer, name) = (self.own_tokenizer.clone(), self.info.name.clone());
        move || match tokenizer.map(|tokenizer| tokenizer.wait()) {
            Some(Err(error)) => Err(unreadable(&name, error)),
            _ => Ok(()),
        }
    }
}

fn unreadable(name: &str, error: String) -> anyhow::Error {
    anyhow::anyhow!(error).context(format!("loading {name}"))
}

/// Has a server keep to what is for it of the memory of these models.
pub fn keep_within(config: &mut ServerConfig, bases: &[BaseModel]) {
    let sum = |bytes: fn(&EngineInfo) -> u64| bases.iter().map(|base| bytes(base.engine.info()) as usize).sum::<usize>();
    config.transit_bytes = sum(|info| info.transit_bytes);
    config.catalogue_bytes = config.catalogue_bytes.min(sum(|info| info.reserve_bytes) / CATALOGUE_PART);
}

/// A base model that is not loaded yet.
struct Found {
    source: ModelSource,
    config: ModelConfig,
    name: String,
    tokenizer: Option<String>,
    /// What its weights will take, about.
    weight_bytes: u64,
    /// What its tokenizer will take, at most.
    tokenizer_bytes: u64,
}

impl Found {
    /// What it takes whatever it is asked.
    fn fixed_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.tokenizer_bytes)
    }
}

/// A base model that no engine runs yet.
struct Loaded {
    found: Found,
    model: Model,
    own_tokenizer: Option<LateTokenizer>,
    engine: EngineConfig,
}

/// Where packed copies of base models are kept.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Copies {
    /// Directory for packed copies of base models: a later start maps its copy instead of reading and packing the checkpoint. A copy takes the disk space of the weights; whatever is
    /// in the directory may be deleted at any time.
    #[arg(long, env = "STRATA_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
}

impl Copies {
    /// Loads a model, from its packed copy if there is one. Answers also what makes the copy where there is none.
    ///
    /// # Errors
    /// As [`Model::load_stored`].
    pub fn load(
        &self,
        backend: Arc<CpuBackend>,
        source: &ModelSource,
        dtype: Option<DType>,
        storage: WeightStorage,
    ) -> strata_model::Result<(Model, Option<UnwrittenCopy>)> {
        match &self.cache_dir {
            Some(dir) => Model::load_copied(backend, source, dtype, storage, dir),
            None => Ok((Model::load_stored(backend, source, dtype, storage)?, None)),
        }
    }
}

/// Writes a packed copy, and says what became of it. That there is none is no failure.
pub fn write_copy(copy: UnwrittenCopy) {
    let path = copy.path().to_owned();
    match copy.write() {
        Ok(true) => tracing::info!(path = %path.display(), "a packed copy of the weights is written"),
        Ok(false) => tracing::info!(path = %path.display(), "another process writes the packed copy of the weights"),
        Err(error) => tracing::warn!(path = %path.display(), "no packed copy of the weights: {error}"),
    }
}

/// Loads the models and starts an engine over each; they share the machine. A spec is a directory or a Hugging Face name; with none there is the model in this binary, whose
/// tokenizer is written below `data_dir` for clients to load, unless `naming` sends them elsewhere. Packed copies that are missing are written meanwhile.
///
/// # Errors
/// If a model cannot be found or read, two have one name, or memory does not suffice.
pub fn start(
    specs: &[String],
    naming: &Naming,
    resources: &Resources,
    copies: &Copies,
    data_dir: &DataDir,
) -> anyhow::Result<Vec<BaseModel>> {
    // Before anything is loaded for nothing.
    resources.threads()?;
    if resources.memory_bytes() > strata_limits::memory_bytes() {
        let [asked, there] = [resources.memory_bytes(), strata_limits::memory_bytes()].map(HumanBytes);
        tracing::warn!(
            "--memory grants {asked}, and this machine has {there}: what is beyond that will be missing when it is needed"
        );
    }
    let embedded = [EMBEDDED_NAME.to_string()];
    let specs = if specs.is_empty() { &embedded } else { specs };
    let found = find(specs, naming, Quantize::storage(resources.quantize), resources.memory_bytes())?;
    let memory = divide(resources.memory_bytes(), &found)?;
    let adapter_bytes = resources.adapter_memory.map(|bytes| bytes / found.len() as u64);
    let machine = Machine::default();
    let loaded = found.into_iter().zip(memory).map(|(found, memory_bytes)| {
        let engine = EngineConfig {
            memory_bytes,
            adapter_bytes,
            base_model: found.name.clone(),
            machine: machine.clone(),
            speculation: resources.speculation.into(),
        };
        load(found, engine, resources, copies)
    });
    let mut loaded = loaded.collect::<anyhow::Result<Vec<Loaded>>>()?;
    // Of all of them, before any is started: together they say what would do.
    check_memory(&mut loaded, resources.memory_bytes())?;
    loaded.into_iter().map(|loaded| start_one(loaded, data_dir)).collect()
}

/// Finds the models, before any of them is loaded. What cannot be served with so much memory is not downloaded.
fn find(specs: &[String], naming: &Naming, storage: WeightStorage, memory_bytes: u64) -> anyhow::Result<Vec<Found>> {
    for (flag, given) in [("--name", naming.name.len()), ("--tokenizer", naming.tokenizer.len())] {
        if given > specs.len() {
            anyhow::bail!("{flag} is given {given} times, and there are {} models", specs.len());
        }
    }
    let mut all: Vec<Found> = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let taken = all.iter().fold(0u64, |sum, model| sum.saturating_add(model.fixed_bytes()));
        let check = |source: &ModelSource| check_before_weights(source, storage, memory_bytes.saturating_sub(taken));
        let source = ModelSource::resolve_with(spec, &HubOptions::from_env(), &DownloadBars::default(), &check)?;
        let name = naming.name.get(i).cloned().unwrap_or_else(|| source.served_name());
        if all.iter().any(|other| other.name == name) {
            anyhow::bail!("two models would be served as {name}: give them names with --name, one after another");
        }
        let config = source.config()?;
        let (weight_bytes, _) = Model::weight_bytes_of(&source, None, storage).with_context(|| format!("loading {name}"))?;
        // One that cannot be read is said to be so when it is loaded.
        let tokenizer_bytes = source.tokenizer_json().map_or(0, |json| json.len() as u64 * TOKENIZER_FACTOR);
        all.push(Found { source, config, name, tokenizer: naming.tokenizer.get(i).cloned(), weight_bytes, tokenizer_bytes });
    }
    Ok(all)
}

/// Whether a model of which there is everything but the weights can be served, as far as that is known.
fn check_before_weights(source: &ModelSource, storage: WeightStorage, memory_bytes: u64) -> strata_model::Result<()> {
    let config = source.config()?;
    if let Some(tokenizer) = Tokenizer::load_if_exists(source)? {
        tokenizer.check_against(&config)?;
    }
    // What files have in four bits, and whether they have wider numbers than these, they say themselves.
    let least = weight_bytes(&config, WeightFormat { compute: DType::BF16, storage });
    if config.int4.is_none() && least > memory_bytes {
        let message =
            format!("the weights take at least {least} bytes, and of what --memory grants there are {memory_bytes} for them");
        return Err(strata_model::Error::Checkpoint { path: source.directory().unwrap_or(Path::new("")).into(), message });
    }
    Ok(())
}

/// What each model may use of the memory: its weights, and an equal part of what they and the tokenizers leave.
fn divide(memory_bytes: u64, found: &[Found]) -> anyhow::Result<Vec<u64>> {
    let weights = found.iter().fold(0u64, |sum, model| sum.saturating_add(model.weight_bytes));
    let tokenizers = found.iter().map(|model| model.tokenizer_bytes).sum::<u64>();
    let Some(rest) = memory_bytes.checked_sub(weights.saturating_add(tokenizers)) else {
        let names: Vec<&str> = found.iter().map(|model| model.name.as_str()).collect();
        anyhow::bail!(
            "loading {}: the weights take {weights} bytes and tokenizers {tokenizers}, and --memory grants {memory_bytes}",
            names.join(", ")
        );
    };
    let part = rest / found.len() as u64;
    Ok(found.iter().map(|model| model.weight_bytes + part).collect())
}

/// Whether what each model may use of the memory suffices for it.
fn check_memory(loaded: &mut [Loaded], memory_bytes: u64) -> anyhow::Result<()> {
    let models = loaded.len() as u64;
    let fixed = loaded.iter().fold(0u64, |sum, loaded| sum.saturating_add(loaded.found.fixed_bytes()));
    let mut neediest: Option<(u64, String)> = None;
    for Loaded { found, model, engine, .. } in loaded {
        match EngineHandle::check_memory(model, engine) {
            Ok(()) => {}
            Err(StartError::Memory { memory_bytes, weight_bytes, adapter_bytes, context_tokens, least_bytes }) => {
                let [has, weights, least] = [memory_bytes, weight_bytes, least_bytes].map(HumanBytes);
                let adapters =
                    adapter_bytes.map_or_else(String::new, |bytes| format!(", adapters are to have {}", HumanBytes(bytes)));
                let name = &found.name;
                let lacks = format!(
                    "{name} has {has}, its weights take {weights}{adapters}, and with sequences of {context_tokens} tokens the least is {least}"
                );
                let part_bytes = least_bytes.saturating_sub(found.weight_bytes);
                neediest = neediest.into_iter().chain([(part_bytes, lacks)]).max();
            }
            Err(other) => return Err(other).with_context(|| format!("starting the engine of {}", found.name)),
        }
    }
    let Some((part_bytes, lacks)) = neediest else { return Ok(()) };
    let divided = match models {
        1 => String::new(),
        _ => format!(", of which each of {models} models has its weights and an equal part of the rest,"),
    };
    let enough = part_bytes.saturating_mul(models).saturating_add(fixed).div_ceil(1 << 20);
    let given = HumanBytes(memory_bytes);
    anyhow::bail!("--memory {given}{divided} does not suffice: {lacks}; --memory {enough}MiB would do");
}

fn load(found: Found, engine: EngineConfig, resources: &Resources, copies: &Copies) -> anyhow::Result<Loaded> {
    let Found { source, config, name, .. } = &found;
    // Threads of its own: they sleep while other engines have the machine.
    let threads = resources.threads()?;
    let backend = machine::with_low_priority(|| CpuBackend::with_numerics(Some(threads), resources.numerics.into()))?;
    let storage = Quantize::storage(resources.quantize);
    // Read meanwhile, and then while others are served already.
    let own_tokenizer = read_tokenizer(source, config).with_context(|| format!("loading {name}"))?;
    let loaded = copies.load(Arc::new(backend), source, None, storage);
    let (model, unwritten) = loaded.with_context(|| format!("loading {name}"))?;
    if let Some(copy) = unwritten {
        // Nobody waits for it, the end of the process included: what is half written then goes with it.
        machine::with_low_priority(|| std::thread::Builder::new().name("strata-copy".into()).spawn(|| write_copy(copy)))
            .context("a thread to write the packed copy")?;
    }
    if let Some(Err(error)) = own_tokenizer.as_ref().and_then(LateTokenizer::now) {
        return Err(unreadable(name, error));
    }
    Ok(Loaded { found, model, own_tokenizer, engine })
}

fn start_one(loaded: Loaded, data_dir: &DataDir) -> anyhow::Result<BaseModel> {
    let Loaded { found: Found { source, config, name, tokenizer, .. }, model, own_tokenizer, engine } = loaded;
    let (weight_bytes, kernels) = (model.weight_bytes() as u64, model.backend().description());
    let architecture = config.model_type().to_string();
    let engine = machine::with_low_priority(|| EngineHandle::start(model, own_tokenizer.clone(), engine));
    let engine = engine.with_context(|| format!("starting the engine of {name}"))?;
    let info = ModelInfo {
        architecture,
        tokenizer_id: match tokenizer {
            Some(tokenizer) => tokenizer,
            None => tokenizer_id(&source, data_dir.path())?,
        },
        max_context_tokens: engine.info().max_context_tokens,
        adapters: Adapters::new(name.clone(), config),
        name,
    };
    Ok(BaseModel { engine, info, weight_bytes, kernels, own_tokenizer })
}

/// The tokenizer of a model, if it has one. Clients bring their own: without one here, stop strings alone cannot be had. That of a large vocabulary is read by a thread of its own; one that is malformed,
/// or another model's, is an error all the same: clients would load the same.
fn read_tokenizer(source: &ModelSource, config: &ModelConfig) -> anyhow::Result<Option<LateTokenizer>> {
    let Some(json) = source.tokenizer_json_if_exists()? else {
        tracing::warn!("the model has no tokenizer.json: requests with stop strings will fail");
        return Ok(None);
    };
    let (is_small, config) = (json.len() < LATE_TOKENIZER_BYTES, config.clone());
    let read = move || {
        let tokenizer = Tokenizer::from_json(&json)?;
        tokenizer.check_against(&config)?;
        Ok(tokenizer)
    };
    if is_small {
        return Ok(Some(read()?.into()));
    }
    LateTokenizer::read(machine::lower_priority, read).context("a thread to read the tokenizer").map(Some)
}

/// What clients load the tokenizer from: the directory of the model, its Hugging Face name, or files that are written for them.
fn tokenizer_id(source: &ModelSource, data_dir: &Path) -> anyhow::Result<String> {
    match source {
        ModelSource::Hub { repository, .. } => Ok(repository.clone()),
        ModelSource::Directory(dir) => {
            let dir = dir.canonicalize().with_context(|| format!("model directory {}", dir.display()))?;
            Ok(dir.to_string_lossy().into_owned())
        }
        ModelSource::Embedded => {
            let dir = data_dir.join("tokenizers").join(EMBEDDED_NAME.replace('/', "--"));
            // Nothing is written through a link that somebody has put there.
            let is_in_place = refuse_links_below(data_dir, &dir).map_err(anyhow::Error::from);
            let written = is_in_place.and_then(|()| write_tokenizer(source, &dir));
            written.with_context(|| format!("writing the tokenizer to {}", dir.display()))?;
            Ok(std::path::absolute(&dir)?.to_string_lossy().into_owned())
        }
    }
}

fn write_tokenizer(source: &ModelSource, dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir)?;
    let mut files = vec![("tokenizer.json", source.tokenizer_json()?), ("config.json", source.config_json()?)];
    files.extend(source.tokenizer_config_json()?.map(|text| ("tokenizer_config.json", text)));
    files.extend(source.chat_template_jinja()?.map(|text| ("chat_template.jinja", text)));
    for (name, text) in files {
        let path = dir.join(name);
        if read_own_file(&path, text.len() as u64).is_ok_and(|present| present == text.as_bytes()) {
            continue;
        }
        // Whole at every moment: clients of an earlier server may be loading it.
        write_file_atomically(&path, text.as_bytes())?;
    }
    Ok(())
}

/// Where data lives if nothing is said: `$XDG_DATA_HOME/strata`, or `~/.local/share/strata`.
///
/// # Errors
/// If the environment names no home.
pub fn default_data_dir() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(data_home) = absolute("XDG_DATA_HOME") {
        return Ok(data_home.join("strata"));
    }
    let home = absolute("HOME").context("neither XDG_DATA_HOME nor HOME is set: say where data lives with --data-dir")?;
    Ok(home.join(".local/share/strata"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_word_of_some_length() {
        assert_eq!(parse_name("Qwen/Qwen3-8B").as_deref(), Ok("Qwen/Qwen3-8B"));
        for name in ["", "two words", "line\nbreak", &"x".repeat(201)] {
            assert!(parse_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn memory_is_divided_among_models_and_too_little_is_refused_before_they_are_loaded() {
        let config = ModelConfig::named_shape("qwen3-0.6b").unwrap();
        let model = |name: &str, storage| Found {
            source: ModelSource::Embedded,
            weight_bytes: weight_bytes(&config, WeightFormat { compute: DType::BF16, storage }),
            config: config.clone(),
            name: name.into(),
            tokenizer: None,
            tokenizer_bytes: 0,
        };
        let two = [model("a", WeightStorage::Dense), model("b", WeightStorage::Int8)];
        let parts = divide(4 << 30, &two).unwrap();
        assert_eq!(parts[0] - two[0].weight_bytes, parts[1] - two[1].weight_bytes);
        assert!(parts[0] > parts[1] && parts.iter().sum::<u64>().abs_diff(4 << 30) < 2);
        let with_tokenizer = [Found { tokenizer_bytes: 100 << 20, ..model("a", WeightStorage::Dense) }];
        assert_eq!(divide(4 << 30, &with_tokenizer).unwrap(), [(4 << 30) - (100 << 20)]);
        assert!(divide(two[0].weight_bytes + 100, &with_tokenizer).is_err());
        let embedded = find(&[EMBEDDED_NAME.to_string()], &Naming::default(), WeightStorage::Dense, u64::MAX).unwrap();
        let file_bytes = ModelSource::Embedded.tokenizer_json().unwrap().len() as u64;
        assert_eq!(embedded[0].tokenizer_bytes, file_bytes * TOKENIZER_FACTOR);
        assert!(divide(1 << 30, &two[1..]).is_ok());
        let error = divide(1 << 30, &two).unwrap_err().to_string();
        assert!(error.contains("loading a, b") && error.contains("--memory grants 1073741824"), "{error}");
    }

    fn with_memory(memory: u64) -> Resources {
        Resources {
            memory: Some(memory),
            adapter_memory: None,
            threads: Some(1),
            numerics: Numerics::Fast,
            quantize: None,
            speculation: Speculation::Off,
        }
    }

    #[test]
    fn too_little_memory_is_said_in_terms_of_what_was_given_and_what_would_do() {
        let start_with = |models: usize, memory: u64| {
            let (dir, specs) = (tempfile::tempdir().unwrap(), vec![EMBEDDED_NAME.to_string(); models]);
            let names = ["a", "b", "c"].map(str::to_string).into_iter().take(models).collect();
            let naming = Naming { name: names, tokenizer: Vec::new() };
            let data_dir = DataDir::claim(dir.path()).unwrap();
            start(&specs, &naming, &with_memory(memory), &Copies::default(), &data_dir)
                .map(drop)
                .map_err(|error| format!("{error:#}"))
        };
        for (models, given, divided) in
            [(1, 10 << 20, "--memory 10.00 MiB does not"), (3, 30 << 20, "of which each of 3 models has its weights")]
        {
            let refused = start_with(models, given).unwrap_err();
            assert!(refused.contains(divided) && refused.contains("MiB, its weights take"), "{refused}");
            let enough = refused.rsplit("--memory ").next().and_then(|text| text.strip_suffix(" would do")).map(parse_bytes);
            let enough = enough.unwrap().unwrap();
            assert_eq!(start_with(models, enough), Ok(()), "{refused}");
            assert!(start_with(models, enough / 8 * 7).is_err(), "{refused}");
        }
    }

    #[test]
    fn a_server_keeps_to_what_is_for_it_of_the_memory() {
        const MEMORY: u64 = 64 << 20;
        let (dir, naming) = (tempfile::tempdir().unwrap(), Naming::default());
        let data_dir = DataDir::claim(dir.path()).unwrap();
        let bases = start(&[], &naming, &with_memory(MEMORY), &Copies::default(), &data_dir).unwrap();
        let mut config = ServerConfig::new(([127, 0, 0, 1], 0).into(), data_dir);
        keep_within(&mut config, &bases);
        assert!((1..=MEMORY as usize / 8).contains(&config.transit_bytes), "{}", config.transit_bytes);
        assert!((1..=MEMORY as usize / 32).contains(&config.catalogue_bytes), "{}", config.catalogue_bytes);
    }

    #[test]
    fn what_cannot_be_served_is_refused_before_its_weights_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Directory(dir.path().into());
        let check = |memory_bytes| check_before_weights(&source, WeightStorage::Dense, memory_bytes);
        fs::write(dir.path().join("config.json"), &*ModelSource::Embedded.config_json().unwrap()).unwrap();
        assert!(check(1 << 30).is_ok());
        let error = check(1 << 20).unwrap_err().to_string();
        assert!(error.contains("--memory grants") && error.contains("1048576"), "{error}");
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        assert!(check(1 << 30).is_err());
    }

    #[test]
    fn names_are_those_of_models_in_order_and_no_two_alike() {
        let two = ["strata/tiny-base".to_string(), "strata/tiny-base".to_string()];
        let named = |names: &[&str]| {
            let naming = Naming { name: names.iter().map(|name| name.to_string()).collect(), tokenizer: Vec::new() };
            let found = find(&two, &naming, WeightStorage::Dense, u64::MAX);
            found.map(|found| found.into_iter().map(|model| model.name).collect::<Vec<_>>()).map_err(|error| error.to_string())
        };
        assert_eq!(named(&["a"]), Ok(vec!["a".to_string(), EMBEDDED_NAME.to_string()]));
        assert!(named(&[]).unwrap_err().contains("two models would be served as"));
        assert!(named(&["a", "b", "c"]).unwrap_err().contains("3 times"));
    }

    #[test]
    fn a_tokenizer_may_be_absent_but_not_malformed_or_anothers() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Directory(dir.path().into());
        let config = ModelSource::Embedded.config().unwrap();
        assert!(read_tokenizer(&source, &config).unwrap().is_none());
        let of_another = ModelConfig { vocab_size: 100, ..config.clone() };
        let whole = ModelSource::Embedded.tokenizer_json().unwrap();
        // A small file, which is read at once, and a large one.
        for size in [0, LATE_TOKENIZER_BYTES] {
            let write =
                |json: &str| fs::write(dir.path().join("tokenizer.json"), format!("{json}{}", " ".repeat(size))).unwrap();
            let read = |config| match read_tokenizer(&source, config) {
                Ok(Some(tokenizer)) => tokenizer.wait().map(|_| ()).map_err(|error| format!("late: {error}")),
                Ok(None) => Err("absent".into()),
                Err(error) => Err(error.to_string()),
            };
            let is_late = size > 0;
            let refused = |config| {
                let error = read(config).unwrap_err();
                assert!(error.contains("tokenizer") && error.starts_with("late") == is_late, "{error}");
            };
            write("{}");
            refused(&config);
            write(&whole);
            assert_eq!(read(&config), Ok(()));
            refused(&of_another);
        }
    }

    #[test]
    fn the_tokenizer_of_the_embedded_model_is_not_written_through_a_link() {
        let [data_dir, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let tokenizers = data_dir.path().join("tokenizers");
        let link = |at: &Path| std::os::unix::fs::symlink(elsewhere.path(), at).unwrap();
        let refused = || {
            let error = format!("{:#}", tokenizer_id(&ModelSource::Embedded, data_dir.path()).unwrap_err());
            assert!(error.contains("is a symbolic link"), "{error}");
            assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
        };
        link(&tokenizers);
        refused();
        fs::remove_file(&tokenizers).unwrap();
        fs::create_dir(&tokenizers).unwrap();
        link(&tokenizers.join(EMBEDDED_NAME.replace('/', "--")));
        refused();
    }

    #[test]
    fn the_tokenizer_of_the_embedded_model_is_written_once() {
        let data_dir = tempfile::tempdir().unwrap();
        let id = tokenizer_id(&ModelSource::Embedded, data_dir.path()).unwrap();
        let file = Path::new(&id).join("tokenizer.json");
        let written = fs::metadata(&file).unwrap().modified().unwrap();
        assert_eq!(tokenizer_id(&ModelSource::Embedded, data_dir.path()).unwrap(), id);
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);
        assert_eq!(fs::read_dir(&id).unwrap().count(), 4);
    }
}
