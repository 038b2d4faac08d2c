//! `strata trace`: writes down everything a forward pass computes, for comparison with other implementations.
//!
//! All sequences run as one packed batch through the same operations that serve requests, so that a reference that ran
//! each sequence alone also checks that packing changes nothing.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use safetensors::Dtype;
use strata_model::checkpoint::{Sink, WrittenTensor, gradient_as_given, read_adapter, write_safetensors};
use strata_model::lora::{Adapter, LoraConfig, LoraParams};
use strata_model::vision::{Grid, Patches};
use strata_model::{
    Held, ImageFeatures, Model, ModelSource, Observed, PAGE_TOKENS, PackedBatch, PlacedImage, Targets, TokenLoss,
};
use strata_tensor::{CpuBackend, DType, Draw, RowRequest};

use crate::base_model::{Copies, Numerics, Quantize, write_copy};
use crate::commands::export::note_other_base;
use crate::logging::{self, LogFormat};
use crate::output::say;

/// Settings of `strata trace`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// JSON file with a list of lists of token ids. A picture among them is an object, {"image": "picture.png"}, which stands for all of its tokens; its path is relative to the file.
    #[arg(long)]
    pub tokens: PathBuf,
    /// PEFT adapter directory.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Compute in this dtype rather than the checkpoint's.
    #[arg(long, value_parser = ["f32", "bf16"])]
    pub dtype: Option<String>,
    /// Also write the gradient of the summed next-token cross-entropy for the adapter, under the names that its file has.
    #[arg(long, requires = "adapter")]
    pub grads: bool,
    /// Also continue every sequence greedily by this many tokens.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub greedy: usize,
    /// In which order products of bf16 are added.
    #[arg(long, value_enum, default_value_t = Numerics::Fast)]
    pub numerics: Numerics,
    /// Store the base weights in fewer bits than they are computed with.
    #[arg(long, value_enum)]
    pub quantize: Option<Quantize>,
    #[command(flatten)]
    pub copies: Copies,
    /// Safetensors file to write.
    #[arg(long)]
    pub out: PathBuf,
}

/// The longest continuation, beyond the memory of any machine.
const GREEDY_MAX: usize = 1 << 24;

/// Runs the passes and writes the file.
///
/// # Errors
/// If the model, the adapter or the tokens cannot be used, or the file cannot be written.
pub fn run(args: Args) -> Result<()> {
    logging::init(LogFormat::Text);
    ensure!(args.greedy <= GREEDY_MAX, "--greedy {} is more than {GREEDY_MAX}", args.greedy);
    let dtype = args.dtype.as_deref().map(|name| if name == "f32" { DType::F32 } else { DType::BF16 });
    let backend = Arc::new(CpuBackend::with_numerics(None, args.numerics.into())?);
    let source = ModelSource::Directory(args.model);
    let (model, unwritten) = args.copies.load(backend.clone(), &source, dtype, Quantize::storage(args.quantize))?;
    unwritten.into_iter().for_each(write_copy);
    let sequences = read_tokens(&args.tokens, &model)?;
    let adapter = match &args.adapter {
        Some(dir) => {
            let adapter = read_adapter(model.backend(), dir, model.lora_modules())?;
            note_other_base(&adapter, &source.served_name());
            Some((dir, adapter.config.clone(), model.pack_adapter(adapter.config, &adapter.params)?))
        }
        None => None,
    };
    let packed = adapter.as_ref().map(|(.., packed)| packed.as_ref());

    let mut values = Values::default();
    trace_images(&model, &sequences, &mut values)?;
    trace_forward(&model, packed, &sequences, &mut values)?;
    let targets = next_token_targets(&sequences);
    let logprobs = match &adapter {
        Some((dir, config, packed)) if args.grads => {
            trace_gradients(&model, dir, (config, packed), &sequences, &targets, &mut values)?
        }
        _ => model.forward(&batch_of(packed, &sequences), &targets)?,
    };
    let mut rest = logprobs.as_slice();
    for (n, sequence) in sequences.iter().enumerate() {
        let (own, after) = rest.split_at(sequence.tokens.len() - 1);
        values.push_f32(format!("s.{n}.next_logprobs"), vec![own.len()], own);
        rest = after;
    }
    if args.quantize.is_some() {
        let dense = Model::load(backend, &source, dtype)?;
        print_error(&dense, &model, args.adapter.as_deref(), &sequences, &logprobs)?;
    }
    if args.greedy > 0 {
        trace_greedy(&model, packed, &sequences, args.greedy, &mut values)?;
    }
    values.write(&args.out)
}

/// Says how far the log-probabilities of quantized weights are from those of the weights they were made of.
fn print_error(dense: &Model, model: &Model, adapter: Option<&Path>, sequences: &[Sequence], logprobs: &[f32]) -> Result<()> {
    let adapter = match adapter {
        Some(dir) => {
            let adapter = read_adapter(dense.backend(), dir, dense.lora_modules())?;
            Some(dense.pack_adapter(adapter.config, &adapter.params)?)
        }
        None => None,
    };
    let expected = dense.forward(&batch_of(adapter.as_deref(), sequences), &next_token_targets(sequences))?;
    let differences = || logprobs.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let largest = differences().fold(0.0, f32::max);
    let square = differences().map(|d| (d as f64).powi(2)).sum::<f64>() / expected.len().max(1) as f64;
    say!(
        "next-token log-probabilities are off by {:.5} (root mean square), {largest:.5} at most, in {} bytes of weights instead of {}",
        square.sqrt(),
        model.weight_bytes(),
        dense.weight_bytes(),
    )?;
    Ok(())
}

/// A sequence, and the pictures in it.
struct Sequence {
    tokens: Vec<u32>,
    images: Vec<SeenImage>,
}

/// A picture of a sequence: where its first token is, its tokens, its patches, and what the model sees.
struct SeenImage {
    first: usize,
    grid: Grid,
    patches: Patches,
    features: ImageFeatures,
}

impl Sequence {
    fn images(&self) -> Vec<PlacedImage<'_>> {
        self.images.iter().map(|i| PlacedImage { first: i.first, grid: i.grid, features: Some(&i.features) }).collect()
    }
}

/// A part of a sequence in a file.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "neither a token id, a whole number from 0 on, nor {\"image\": \"picture.png\"}")]
enum Chunk {
    Token(u32),
    Image { image: PathBuf },
}

fn read_tokens(path: &Path, model: &Model) -> Result<Vec<Sequence>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let sequences: Vec<Vec<Chunk>> = serde_json::from_str(&text).with_context(|| format!("{}", path.display()))?;
    ensure!(!sequences.is_empty(), "{}: there are no sequences", path.display());
    let read = |(n, chunks): (usize, Vec<Chunk>)| {
        let place = || format!("{}: sequence {n}", path.display());
        ensure!(!chunks.is_empty(), "{} is empty", place());
        let mut sequence = Sequence { tokens: Vec::new(), images: Vec::new() };
        chunks.into_iter().try_for_each(|chunk| push_chunk(&mut sequence, chunk, path, model)).with_context(place)?;
        Ok(sequence)
    };
    sequences.into_iter().enumerate().map(read).collect()
}

fn push_chunk(sequence: &mut Sequence, chunk: Chunk, path: &Path, model: &Model) -> Result<()> {
    let vocab_size = model.config().vocab_size;
    match chunk {
        Chunk::Token(token) if token as usize >= vocab_size => bail!("token {token} is outside the vocabulary of {vocab_size}"),
        Chunk::Token(token) => sequence.tokens.push(token),
        Chunk::Image { image } => {
            let (processor, token) =
                model.image_processor().zip(model.config().image_token_id()).context("the model reads text alone")?;
            let file = path.parent().unwrap_or(Path::new("")).join(image);
            let bytes = std::fs::read(&file).with_context(|| file.display().to_string())?;
            let patches = processor.process(&bytes).map_err(|message| anyhow!("{}: {message}", file.display()))?;
            let grid = processor.token_grid(&patches.grid);
            let features = model.image_features(&patches, &mut || ControlFlow::Continue(()))?;
            sequence.images.push(SeenImage { first: sequence.tokens.len(), grid, patches, features });
            sequence.tokens.extend(std::iter::repeat_n(token, grid.patches()));
        }
    }
    Ok(())
}

fn batch_of<'a>(adapter: Option<&'a Adapter>, sequences: &'a [Sequence]) -> PackedBatch<'a> {
    let mut batch = PackedBatch::new();
    batch.begin_group(adapter);
    for sequence in sequences {
        let tokens = &sequence.tokens;
        batch.push_with_images(tokens, 0, tokens.len(), Held::default(), &sequence.images());
    }
    batch
}

/// Every token's target is the token after it; the last token of a sequence has none.
fn next_token_targets(sequences: &[Sequence]) -> Targets {
    let mut targets = Targets { ids: Vec::new(), offsets: vec![0] };
    for Sequence { tokens, .. } in sequences {
        for next in 1..=tokens.len() {
            targets.ids.extend(tokens.get(next));
            targets.offsets.push(targets.ids.len());
        }
    }
    targets
}

/// Of each picture what the tower is given and what it makes of it; of each token where it lies.
fn trace_images(model: &Model, sequences: &[Sequence], values: &mut Values) -> Result<()> {
    if model.image_processor().is_none() {
        return Ok(());
    }
    for (n, sequence) in sequences.iter().enumerate() {
        for (k, SeenImage { patches, features, .. }) in sequence.images.iter().enumerate() {
            let (name, grid) = (|what: &str| format!("s.{n}.image.{k}.{what}"), patches.grid);
            let shape = vec![grid.patches(), patches.values.len() / grid.patches()];
            values.push_f32(name("pixel_values"), shape, &patches.values);
            values.push_i64(name("grid_thw"), vec![3], [grid.time, grid.height, grid.width].map(|size| size as i64));
            let deepstack = features.deepstack.iter().enumerate().map(|(j, tensor)| (format!("deepstack.{j}"), tensor));
            for (what, tensor) in deepstack.chain([("features".to_owned(), &features.embeddings)]) {
                let shape = tensor.shape().dims().to_vec();
                values.push_f32(name(&what), shape, &model.backend().to_f32_vec(tensor.as_ref())?);
            }
        }
        let batch = batch_of(None, std::slice::from_ref(sequence));
        let positions = batch.positions.iter().flatten().map(|&position| i64::from(position));
        values.push_i64(format!("s.{n}.position_ids"), vec![3, batch.len()], positions);
    }
    Ok(())
}

fn trace_forward(model: &Model, adapter: Option<&Adapter>, sequences: &[Sequence], values: &mut Values) -> Result<()> {
    let batch = batch_of(adapter, sequences);
    model.forward_observed(&batch, &mut |what, tensor| {
        let name = match what {
            Observed::Embeddings => "embeds".to_owned(),
            Observed::LayerOutput(layer) => format!("layer_out.{layer}"),
            Observed::FinalNorm => "final_norm".to_owned(),
            Observed::Logits => "logits".to_owned(),
        };
        let width = tensor.shape().row_len();
        for (n, span) in batch.spans.iter().enumerate() {
            let rows = model.backend().to_f32_vec(tensor.as_ref().rows(span.tokens.clone()))?;
            values.push_f32(format!("s.{n}.{name}"), vec![span.tokens.len(), width], &rows);
        }
        Ok(())
    })?;
    Ok(())
}

/// Summed cross-entropy: the derivative by every log-probability is -1.
struct CrossEntropySum;

impl TokenLoss for CrossEntropySum {
    fn gradient(&self, _first: usize, _logprobs: &[f32], gradient: &mut [f32]) {
        gradient.fill(-1.0);
    }
}

fn trace_gradients(
    model: &Model,
    dir: &Path,
    (config, adapter): (&LoraConfig, &Adapter),
    sequences: &[Sequence],
    targets: &Targets,
    values: &mut Values,
) -> Result<Vec<f32>> {
    let mut gradient = LoraParams::zeros(model.backend(), model.lora_modules(), config)?;
    let batch = batch_of(Some(adapter), sequences);
    let logprobs = model.forward_backward(&batch, targets, &CrossEntropySum, &mut [Some(&mut gradient)])?;
    for (name, tensor) in gradient_as_given(model.backend(), dir, model.lora_modules(), &gradient)? {
        let tensor = tensor.as_ref();
        values.arrays.insert(name, (Dtype::F32, tensor.shape().dims().to_vec(), tensor.as_bytes().to_vec()));
    }
    Ok(logprobs)
}

/// The most probable token, the lowest id among equals, and its log-probability.
type Choice = (u32, f32);

/// Continues every sequence through the KV cache: one packed prefill, then one packed step for each token.
fn trace_greedy(
    model: &Model,
    adapter: Option<&Adapter>,
    sequences: &[Sequence],
    num_tokens: usize,
    values: &mut Values,
) -> Result<()> {
    let pages_of = |sequence: &Sequence| (sequence.tokens.len() + num_tokens).div_ceil(PAGE_TOKENS);
    let mut cache = model.new_kv_cache(sequences.iter().map(pages_of).sum(), sequences.len())?;
    let mut next_page = 0;
    let mut held = Vec::with_capacity(sequences.len());
    for (state, sequence) in (0..).zip(sequences) {
        let pages: Vec<u32> = (next_page..next_page + pages_of(sequence) as u32).collect();
        next_page += pages.len() as u32;
        held.push(Held { pages, state: Some(state), ..Held::default() });
    }

    let most_probable = Draw { temperature: 0.0, top_k: None, top_p: 1.0, uniforms: vec![0.0] };
    let greedy = RowRequest { draw: Some(most_probable), ..RowRequest::default() };
    let mut continuations: Vec<Vec<Choice>> = vec![Vec::with_capacity(num_tokens); sequences.len()];
    for step in 0..num_tokens {
        let mut batch = PackedBatch::new();
        batch.begin_group(adapter);
        for ((sequence, own), continuation) in sequences.iter().zip(&held).zip(&continuations) {
            let (tokens, images) = (&sequence.tokens, sequence.images());
            let length_max = tokens.len() + num_tokens;
            match continuation.last() {
                None => batch.push_with_images(tokens, 0, length_max, own.clone(), &images),
                Some(&(token, _)) => {
                    batch.push_with_images(&[token], tokens.len() + step - 1, length_max, own.clone(), &images);
                }
            }
        }
        let rows: Vec<usize> = batch.spans.iter().map(|span| span.tokens.end - 1).collect();
        let replies = model.step(&batch, &mut cache, &rows, &vec![greedy.clone(); rows.len()])?;
        for (continuation, reply) in continuations.iter_mut().zip(replies) {
            continuation.extend(reply.context("logits are not finite numbers")?.drawn);
        }
    }
    for (n, continuation) in continuations.iter().enumerate() {
        let (tokens, logprobs): (Vec<i64>, Vec<f32>) = continuation.iter().map(|&(t, l)| (i64::from(t), l)).unzip();
        values.push_i64(format!("s.{n}.greedy"), vec![num_tokens], tokens);
        values.push_f32(format!("s.{n}.greedy_logprobs"), vec![num_tokens], &logprobs);
    }
    Ok(())
}

/// Named arrays on their way into a safetensors file.
#[derive(Default)]
struct Values {
    arrays: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Values {
    fn push_f32(&mut self, name: String, shape: Vec<usize>, values: &[f32]) {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.arrays.insert(name, (Dtype::F32, shape, bytes));
    }

    fn push_i64(&mut self, name: String, shape: Vec<usize>, values: impl IntoIterator<Item = i64>) {
        let bytes = values.into_iter().flat_map(i64::to_le_bytes).collect();
        self.arrays.insert(name, (Dtype::I64, shape, bytes));
    }

    fn write(self, path: &Path) -> Result<()> {
        let tensors = self.arrays.into_iter().map(|(name, (dtype, shape, bytes))| WrittenTensor {
            name,
            dtype,
            shape,
            write: Box::new(move |sink: &mut Sink<'_>| sink.put(&bytes)),
        });
        Ok(write_safetensors(path, &[], tensors.collect())?)
    }
}
