//! A loaded model, and the passes the engine runs over it: train, score, step.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use strata_tensor::{
    Backend, Between, DType, HostRef, HostTensor, LOGITS_CHUNK_BYTES, Linear, LogprobPass, LogprobTargets, LoraGradient,
    LoraGradients, LoraSite, RowReply, RowRequest, Shape, Tape, TargetLoss, Tensor, WeightFormat, WeightStorage,
    logits_chunk_rows, random, read_logits, target_logprobs,
};

use crate::architectures::{
    self, BatchInputs, Decoder, Form, FusedExpert, ImageFeatures, Initial, Observed, Observer, Parameter, WeightSource,
};
use crate::checkpoint::{
    BLOCK, BLOCK_BYTES, Checkpoint, CheckpointReader, Converted, SourceDType, SourceTensor, dequantize, first_not_finite,
};
use crate::config::{FP8_BLOCK, RopeScaling};
use crate::lora::{Adapter, LoraConfig, LoraModule, LoraParams};
use crate::vision::{ImageProcessor, Patches};
use crate::{Error, KvCache, ModelConfig, ModelSource, PackedBatch, Result};

/// Rows of a matrix that are read, or made, at a time.
const SLICE_ELEMENTS: usize = 8 << 20;

/// Lists that a pass keeps for each token: positions, steps of sums, terms of the loss.
const TOKEN_LISTS_BYTES: usize = 128;
/// What small allocations and the scratch of matrix products come to.
const SMALL_BUFFERS_BYTES: usize = 2 << 20;

/// Bytes of buffers for this many bytes: sizes are rounded up so that buffers can be used again, by an eighth at most.
fn with_rounding(bytes: usize) -> usize {
    bytes + bytes / 8
}

/// Targets of a training or scoring pass: for each token of the batch any number of token ids whose log-probabilities are wanted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Token ids of all targets, token after token.
    pub ids: Vec<u32>,
    /// `offsets[t]..offsets[t + 1]` are the targets of token `t`; one more entry than there are tokens.
    pub offsets: Vec<usize>,
}

/// A loss over target log-probabilities that is a sum of one term per target.
pub trait TokenLoss: Sync {
    /// Writes the derivative of the loss by each log-probability of targets `first..first + logprobs.len()` of the pass.
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]);
}

/// A frozen base model in memory.
pub struct Model {
    backend: Arc<dyn Backend>,
    config: ModelConfig,
    dtype: DType,
    decoder: Decoder,
    image_processor: Option<ImageProcessor>,
    logits_chunk_bytes: usize,
}

impl Model {
    /// Loads a checkpoint, to compute in `dtype` (`None`: in the checkpoint's own, f16 as f32). Every tensor of it must be used and every
    /// parameter filled, which is checked before memory is taken: what a configuration announces must lie in the files. While it loads, a
    /// model takes [`Model::weight_bytes`] and, for what is being converted, some eight million elements.
    ///
    /// # Errors
    /// If the configuration asks for something that is not supported, or tensors are missing, misshapen or left over: all are named. If a
    /// weight is infinite or not a number, or what two tokens make of the weights is.
    pub fn load(backend: Arc<dyn Backend>, source: &ModelSource, dtype: Option<DType>) -> Result<Self> {
        Self::load_stored(backend, source, dtype, WeightStorage::Dense)
    }

    /// As [`Model::load`], with the weights of linear layers, the unembedding among them, stored like this.
    ///
    /// # Errors
    /// As there.
    pub fn load_stored(
        backend: Arc<dyn Backend>,
        source: &ModelSource,
        dtype: Option<DType>,
        storage: WeightStorage,
    ) -> Result<Self> {
        let config = source.config()?;
        let checkpoint = tensors_of(source, &config)?;
        let dtype = dtype.unwrap_or_else(|| Self::compute_dtype(&checkpoint, &config));
        architectures::check(&*backend, &config)?;
        account_for(&checkpoint, &config)?;
        check_tied(&checkpoint, &config)?;
        let format = WeightFormat { compute: dtype, storage };
        let decoder = Decoder::load(&*backend, &config, format, &mut CheckpointWeights { checkpoint: &checkpoint })?;
        let image_processor = source.image_processor(&config)?;
        let model = Model { backend, config, dtype, decoder, image_processor, logits_chunk_bytes: LOGITS_CHUNK_BYTES };
        model.probe().map_err(|message| checkpoint.error(message))?;
        Ok(model)
    }

    /// The dtype that a model computes in unless someone says otherwise: that of its embedding, f16 as f32, or what its configuration says.
    pub fn compute_dtype(checkpoint: &Checkpoint, config: &ModelConfig) -> DType {
        let own = || {
            let name = checkpoint.names().find(|n| n.ends_with("embed_tokens.weight"))?;
            Some(checkpoint.tensor(name).ok()??.dtype.compute_dtype())
        };
        own().or(config.dtype).unwrap_or(DType::F32)
    }

    /// Checks what can be known of a model without reading its weights: that its configuration is supported, and that its files hold every parameter
    /// and nothing else.
    ///
    /// # Errors
    /// As [`Model::load`], but for what weights hold.
    pub fn check_files(source: &ModelSource) -> Result<()> {
        let config = source.config()?;
        account_for(&tensors_of(source, &config)?, &config)
    }

    /// A model with random weights: matrices uniform with the standard deviation of the config's `initializer_range`, norms and sinks one, biases zero; see
    /// [`Initial`].
    ///
    /// # Errors
    /// If the configuration cannot be computed, or the backend has no memory.
    pub fn random(backend: Arc<dyn Backend>, config: ModelConfig, seed: u64, format: impl Into<WeightFormat>) -> Result<Self> {
        let format = format.into();
        let dtype = format.compute;
        let mut weights = RandomWeights { range: config.initializer_range, seed, index: 0 };
        architectures::check(&*backend, &config)?;
        let decoder = Decoder::load(&*backend, &config, format, &mut weights)?;
        let image_processor = config.family.config().vision().map(|vision| vision.processor());
        Ok(Model { backend, config, dtype, decoder, image_processor, logits_chunk_bytes: LOGITS_CHUNK_BYTES })
    }

    /// Computes two tokens, and says where the numbers stop being finite if they do.
    fn probe(&self) -> Result<(), String> {
        let mut batch = PackedBatch::new();
        let last = self.config.vocab_size - 1;
        // A context of one token has room for no more.
        let tokens = [last as u32 / 2, last as u32];
        batch.push_sequence(&tokens[..self.config.max_position_embeddings.min(2)]);
        let mut first = None;
        let mut observe = |what, value: &Tensor| {
            if first.is_none() && first_not_finite(self.backend.to_host(value.as_ref())?.as_ref()).is_some() {
                first = Some(what);
            }
            Ok(())
        };
        self.forward_observed(&batch, &mut observe).map_err(|e| format!("two tokens cannot be computed: {e}"))?;
        match first {
            None => Ok(()),
            Some(what) => Err(format!("the weights are finite, but what two tokens make of them is not, from {what} on")),
        }
    }

    /// Sets about how many bytes of f32 logits a pass has in memory at once. No bit of a result depends on it.
    pub fn set_logits_chunk_bytes(&mut self, bytes: usize) {
        self.logits_chunk_bytes = bytes;
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What computes, and has the model's memory.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// As [`Model::backend`], for whoever reads or fills memory of it on another thread.
    pub fn shared_backend(&self) -> Arc<dyn Backend> {
        self.backend.clone()
    }

    /// Dtype of weights, matmul inputs, keys and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The linear layers that can carry LoRA, and the embedding; adapters index by place in this list.
    pub fn lora_modules(&self) -> &[LoraModule] {
        self.decoder.lora_modules()
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    /// Bytes that a training pass takes for each token at its peak, at most. A pass over `n` tokens with adapters of ranks up to `r` takes no more than
    /// `n * (train_bytes_per_token() + lora_bytes_per_token(r)) + workspace_bytes()`, and 64 bytes for each target; a pass that only scores and a
    /// [`Model::step`] take less. The batch, weights, adapters and gradients are not in it.
    pub fn train_bytes_per_token(&self) -> usize {
        with_rounding(self.decoder.train_bytes_per_token(self.backend()) + TOKEN_LISTS_BYTES)
    }

    /// Bytes that adapters of ranks up to `rank` add to [`Model::train_bytes_per_token`].
    pub fn lora_bytes_per_token(&self, rank: usize) -> usize {
        let (wide, narrow) = (DType::F32.size_bytes(), self.dtype.size_bytes());
        // The products of a layer's pairs, saved for the way back; and for one pair at a time, those on the way, twice.
        let rank = rank.next_multiple_of(2);
        with_rounding(rank * (self.lora_modules().len() * narrow + 3 * wide + 3 * narrow) + TOKEN_LISTS_BYTES)
    }

    /// Bytes that a pass takes whatever its tokens: logits of a chunk (see [`Model::set_logits_chunk_bytes`]) and their gradient, and the
    /// scratch of threads.
    pub fn workspace_bytes(&self) -> usize {
        let (wide, narrow) = (DType::F32.size_bytes(), self.dtype.size_bytes());
        let rows = logits_chunk_rows(self.config.vocab_size, self.logits_chunk_bytes);
        let row = (wide + narrow) * (self.config.vocab_size + self.config.hidden_size)
            + narrow * (self.config.vocab_size % 2) * self.config.vocab_size;
        with_rounding(rows * row + self.decoder.fixed_bytes(self.backend())) + SMALL_BUFFERS_BYTES
    }

    /// Packs adapter parameters for this model.
    ///
    /// # Errors
    /// If a stack does not have the shape its module asks for, or the backend has no memory.
    pub fn pack_adapter(&self, config: LoraConfig, params: &LoraParams) -> Result<Arc<Adapter>> {
        Adapter::pack(self.backend(), self.dtype, self.lora_modules(), config, params)
    }

    /// A KV cache of `num_pages` pages and `num_states` states for this model; a model whose [`Model::kv_state_bytes`] is 0 has no use for states.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub fn new_kv_cache(&self, num_pages: usize, num_states: usize) -> Result<KvCache> {
        KvCache::new(self.backend(), self.decoder.cache_layouts(), self.dtype, (num_pages, num_states))
    }

    /// How pictures are cut up for this model; `None` if it reads text alone.
    pub fn image_processor(&self) -> Option<&ImageProcessor> {
        self.image_processor.as_ref()
    }

    /// What a picture is to this model. No bit of it depends on what else there is.
    ///
    /// # Errors
    /// If the model reads text alone, the patches are not those of a picture, or there is no memory.
    pub fn image_features(&self, image: &Patches) -> Result<ImageFeatures> {
        self.decoder.image_features(self.backend(), image)
    }

    /// The longest sequence whose keys lie in the cache as those of short ones do: a sequence that may come to be longer shares no pages with shorter ones.
    pub fn short_sequence_max(&self) -> usize {
        let rope = self.decoder.rope();
        match &rope.scaling {
            RopeScaling::LongRope(long) => long.original_max_position_embeddings,
            _ => usize::MAX,
        }
    }

    /// Bytes of one page of this model's KV cache.
    pub fn kv_page_bytes(&self) -> usize {
        self.decoder.cache_layouts().map(|layout| layout.page_bytes(self.backend(), self.dtype)).sum()
    }

    /// Bytes of the state that a sequence in this model's KV cache has beside its pages; 0 if it has none.
    pub fn kv_state_bytes(&self) -> usize {
        self.decoder.cache_layouts().map(|layout| layout.state_bytes(self.backend())).sum()
    }

    /// Log-probabilities of all targets, with no gradient. Bits equal those of [`Model::forward_backward`] and [`Model::step`].
    ///
    /// # Errors
    /// If a token or target is not in the vocabulary, or the batch is malformed.
    pub fn forward(&self, batch: &PackedBatch<'_>, targets: &Targets) -> Result<Vec<f32>> {
        self.forward_with(batch, targets, &mut || ControlFlow::Continue(()))
    }

    /// As [`Model::forward`]; calls `between` after each decoder layer and after each chunk of logits. Nothing is locked meanwhile: it may run
    /// other passes on this model. No bit of a result depends on it.
    ///
    /// # Errors
    /// As [`Model::forward`], and [`Error::Interrupted`] if `between` breaks.
    pub fn forward_with(
        &self,
        batch: &PackedBatch<'_>,
        targets: &Targets,
        between: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<f32>> {
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let hidden = self.decoder.hidden(&mut Tape::inference(self.backend()), &inputs, None, None, between)?;
        Ok(self.target_logprobs(&inputs, hidden.value(), targets, None, between)?.0)
    }

    /// Log-probabilities of all targets; adds the gradient of `loss` to `gradients[g]` for the adapter of `batch.groups[g]`
    /// (`None`: that group is only scored). Gradients are added token after token, so that a batch cut between two
    /// sequences adds up to the same bits as the whole.
    ///
    /// # Errors
    /// As [`Model::forward`]; also if there are not as many gradients as groups.
    pub fn forward_backward(
        &self,
        batch: &PackedBatch<'_>,
        targets: &Targets,
        loss: &dyn TokenLoss,
        gradients: &mut [Option<&mut LoraParams>],
    ) -> Result<Vec<f32>> {
        self.forward_backward_with(batch, targets, loss, gradients, &mut || ControlFlow::Continue(()))
    }

    /// As [`Model::forward_backward`]; calls `between` after each decoder layer in both directions and after each chunk of logits. Nothing is
    /// locked meanwhile: it may run other passes on this model. No bit of a result depends on it.
    ///
    /// # Errors
    /// As [`Model::forward_backward`], and [`Error::Interrupted`] if `between` breaks. Some of the gradients have then been added and others not,
    /// with no record of which: throw `gradients` away.
    pub fn forward_backward_with(
        &self,
        batch: &PackedBatch<'_>,
        targets: &Targets,
        loss: &dyn TokenLoss,
        gradients: &mut [Option<&mut LoraParams>],
        between: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<f32>> {
        if gradients.len() != batch.groups.len() {
            return Err(Error::Batch(format!("{} gradients for {} groups", gradients.len(), batch.groups.len())));
        }
        let mut gradients = GroupGradients { groups: gradients };
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let mut tape = Tape::recording(self.backend());
        let hidden = self.decoder.hidden(&mut tape, &inputs, None, None, between)?;
        let loss: (&dyn TargetLoss, &mut dyn LoraGradients) = (&Loss(loss), &mut gradients);
        let (logprobs, dhidden) = self.target_logprobs(&inputs, hidden.value(), targets, Some(loss), between)?;
        let dhidden = dhidden.expect("a loss was given");
        tape.backward_with(hidden, dhidden, &mut gradients, between)?;
        Ok(logprobs)
    }

    /// The unembedding of a training or scoring pass.
    fn target_logprobs<'p>(
        &self,
        inputs: &'p BatchInputs<'_>,
        hidden: &Tensor,
        targets: &'p Targets,
        loss: Option<(&'p dyn TargetLoss, &'p mut dyn LoraGradients)>,
        between: &'p mut Between<'p>,
    ) -> Result<(Vec<f32>, Option<Tensor>)> {
        let (w, module) = self.decoder.unembedding();
        let pass = LogprobPass {
            sequences: &inputs.sequences,
            targets: LogprobTargets { ids: &targets.ids, offsets: &targets.offsets },
            loss,
            chunk_bytes: self.logits_chunk_bytes,
            between,
        };
        Ok(target_logprobs(self.backend(), hidden, w, &inputs.lora(0, &[(module, 0)]), pass)?)
    }

    /// Runs sequences that live in the KV cache: prefill chunks and decode steps alike. Answers what `requests[i]` asks of the prediction after token
    /// `rows[i]` of the batch; `None` where the logits are not finite numbers. `rows` must be sorted.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, pages do not hold a sequence, or rows are out of range or order.
    pub fn step(
        &self,
        batch: &PackedBatch<'_>,
        cache: &mut KvCache,
        rows: &[usize],
        requests: &[RowRequest],
    ) -> Result<Vec<Option<RowReply>>> {
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let undisturbed = &mut || ControlFlow::Continue(());
        let hidden = self.decoder.hidden(&mut Tape::inference(self.backend()), &inputs, Some(cache), None, undisturbed)?;
        let (w, module) = self.decoder.unembedding();
        let lora = inputs.lora(0, &[(module, 0)]);
        Ok(read_logits(self.backend(), hidden.value(), w, &lora, rows, requests, self.logits_chunk_bytes)?)
    }

    /// Runs whole sequences and shows what is on the way, logits last. For looking at a model; a batch's logits are all in memory.
    ///
    /// # Errors
    /// As [`Model::forward`], and those of `observe`.
    pub fn forward_observed(
        &self,
        batch: &PackedBatch<'_>,
        observe: &mut dyn FnMut(Observed, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let mut tape = Tape::inference(self.backend());
        let observer: Observer<'_> = Some(&mut *observe);
        let hidden = self.decoder.hidden(&mut tape, &inputs, None, observer, &mut || ControlFlow::Continue(()))?;
        let (w, module) = self.decoder.unembedding();
        let logits = tape.linear(&hidden, Linear { weight: w, bias: None, lora: inputs.lora(0, &[(module, 0)]) })?;
        observe(Observed::Logits, logits.value())
    }
}

/// Carries a loss across the crates.
struct Loss<'l>(&'l dyn TokenLoss);

impl TargetLoss for Loss<'_> {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        self.0.gradient(first, logprobs, gradient);
    }
}

/// Hands out the accumulators of each group's adapter.
struct GroupGradients<'g, 'p> {
    groups: &'g mut [Option<&'p mut LoraParams>],
}

impl LoraGradients for GroupGradients<'_, '_> {
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<LoraGradient<'_>>> {
        let places: HashMap<_, _> = sites.iter().enumerate().map(|(i, s)| ((s.group, s.module), i)).collect();
        let mut all: Vec<Option<LoraGradient<'_>>> = sites.iter().map(|_| None).collect();
        for (group, params) in self.groups.iter_mut().enumerate() {
            for (module, stack) in params.iter_mut().flat_map(|p| &mut p.stacks).enumerate() {
                if let (Some(&i), Some(stack)) = (places.get(&(group, module)), stack) {
                    let layers = sites[i].layer..sites[i].layer + num_layers;
                    all[i] = Some(LoraGradient { a: stack.a.rows_mut(layers.clone()), b: stack.b.rows_mut(layers) });
                }
            }
        }
        all
    }
}

/// The tensors of a model, those that lie as a part of a composite under the names that they have by themselves.
fn tensors_of(source: &ModelSource, config: &ModelConfig) -> Result<Checkpoint> {
    let mut checkpoint = source.checkpoint()?;
    if let Some(prefix) = config.family.config().part_of_composite() {
        checkpoint.rename(prefix, "model.")?;
    }
    Ok(checkpoint)
}

/// Refuses a checkpoint that has an unembedding of other numbers than the embedding that its configuration ties it to. Transformers computes with the one that is there.
fn check_tied(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let [unembedding, embedding] = ["lm_head.weight", "model.embed_tokens.weight"];
    let (Some(own), Some(tied)) = (checkpoint.tensor(unembedding)?, checkpoint.tensor(embedding)?) else { return Ok(()) };
    if !config.tie_word_embeddings || own.dtype == tied.dtype && own.shape == tied.shape && own.bytes == tied.bytes {
        return Ok(());
    }
    let refused = |what: String| {
        let known = "tie_word_embeddings is true, and the checkpoint has another";
        Err(checkpoint.error(format!("{known} {unembedding} than {embedding}: {what}; if it counts, say false")))
    };
    if own.shape != tied.shape {
        return refused(format!("its shape is {:?}, not {:?}", own.shape, tied.shape));
    }
    // Equal in other bits: of another dtype, or zeros of another sign.
    for first in (0..config.vocab_size).step_by(SLICE_ELEMENTS.div_ceil(config.hidden_size)) {
        let rows = first..config.vocab_size.min(first + SLICE_ELEMENTS.div_ceil(config.hidden_size));
        let [own, tied] = [own, tied].map(|tensor| tensor.read_rows(rows.clone(), DType::F32));
        let (own, tied) = (own?, tied?);
        let [own, tied] = [&own, &tied].map(|rows| rows.as_ref().as_bytes().as_chunks::<4>().0);
        let [own, tied] = [own, tied].map(|all| all.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
        if let Some((place, (own, tied))) = own.zip(tied).enumerate().find(|(_, (own, tied))| own != tied) {
            return refused(format!("element {} is {own}, not {tied}", first * config.hidden_size + place));
        }
    }
    Ok(())
}

/// Refuses a checkpoint in which a parameter is missing or misshapen, or that holds anything else.
fn account_for(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let mut reader = CheckpointReader::new(checkpoint);
    if config.tie_word_embeddings {
        reader.ignore("lm_head.weight");
    }
    config.family.config().left_aside(config).iter().for_each(|prefix| reader.ignore_under(prefix));
    architectures::for_each_parameter(config, |p| match fused_in(checkpoint, p) {
        // The experts of a layer have it together; it is asked for once.
        Some(fused) if fused.expert > 0 || fused.first > 0 => {}
        Some(fused) => {
            let shape = [fused.num_experts, fused.rows, fused.columns];
            let flipped = [fused.num_experts, fused.columns, fused.rows];
            let is_flipped = checkpoint.shape(&fused.name) == Some(&flipped[..]) && shape != flipped;
            reader.require(&fused.name, if is_flipped { &flipped } else { &shape });
        }
        None => match Mxfp4::of(checkpoint, p) {
            Some(quantized) => {
                reader.require_bytes(&quantized.blocks.0, &quantized.blocks.1);
                reader.require_bytes(&quantized.scales.0, &quantized.scales.1);
            }
            None => {
                let tensor = reader.require(&p.name, &p.shape);
                if tensor.is_some_and(|tensor| tensor.dtype == SourceDType::F8E4M3) {
                    reader.require(&scales_name(&p.name), &scales_shape(&p.shape));
                }
            }
        },
    });
    reader.finish()
}

/// The tensor of scales of a parameter in bytes.
fn scales_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Its shape: a scale for each block.
fn scales_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|extent| extent.div_ceil(FP8_BLOCK)).collect()
}

/// Weights from a checkpoint that was accounted for.
struct CheckpointWeights<'c> {
    checkpoint: &'c Checkpoint,
}

/// Where a parameter of an expert lies, if the checkpoint has all experts of its layer in one tensor.
fn fused_in<'p>(checkpoint: &Checkpoint, parameter: &'p Parameter) -> Option<&'p FusedExpert> {
    match &parameter.form {
        Form::Expert(fused) if !checkpoint.contains(&parameter.name) && checkpoint.contains(&fused.name) => Some(fused),
        Form::Expert(_) | Form::Own | Form::ZeroCentred | Form::Flipped => None,
    }
}

/// Where the experts of a layer lie as blocks and scales: names and shapes.
struct Mxfp4 {
    blocks: (String, [usize; 4]),
    scales: (String, [usize; 3]),
}

impl Mxfp4 {
    /// If the checkpoint has a parameter so.
    fn of(checkpoint: &Checkpoint, parameter: &Parameter) -> Option<Self> {
        let Parameter { name, form: Form::Flipped, shape, .. } = parameter else { return None };
        let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{name}_{part}"));
        let [experts, columns, rows] = shape[..] else { return None };
        // Blocks are of one row each.
        let is_quantized = !checkpoint.contains(name) && checkpoint.contains(&blocks) && columns.is_multiple_of(BLOCK);
        is_quantized.then_some(Mxfp4 {
            blocks: (blocks, [experts, rows, columns / BLOCK, BLOCK_BYTES]),
            scales: (scales, [experts, rows, columns / BLOCK]),
        })
    }
}

/// Matrices `[count, m, n]` as `[count, n, m]`.
fn turned(matrices: HostRef<'_>) -> HostTensor {
    let shape = matrices.shape();
    let &[count, m, n] = shape.dims() else { panic!("matrices of shape {shape}") };
    let mut out = HostTensor::zeros(&[count, n, m], matrices.dtype());
    match matrices.dtype() {
        DType::F32 => turn::<4>(matrices.as_bytes(), out.bytes_mut(), [m, n]),
        DType::BF16 => turn::<2>(matrices.as_bytes(), out.bytes_mut(), [m, n]),
    }
    out
}

/// As [`turned`], of elements of `SIZE` bytes.
fn turn<const SIZE: usize>(from: &[u8], to: &mut [u8], [m, n]: [usize; 2]) {
    /// Rows and columns of what is read and written together: a few cache lines of each.
    const TILE: usize = 32;
    let (from, to) = (from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    for (from, to) in from.chunks_exact(m * n).zip(to.chunks_exact_mut(m * n)) {
        for (rows, columns) in (0..m)
            .step_by(TILE)
            .flat_map(|row| (0..n).step_by(TILE).map(move |column| (row..m.min(row + TILE), column..n.min(column + TILE))))
        {
            for row in rows {
                for column in columns.clone() {
                    to[column * m + row] = from[row * n + column];
                }
            }
        }
    }
}

impl CheckpointWeights<'_> {
    /// Passes rows that were read to `store`, if they are finite numbers.
    fn pass_on(
        &self,
        name: &str,
        first_element: usize,
        first: usize,
        rows: HostRef<'_>,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some((place, value)) = first_not_finite(rows) {
            let (at, dtype) = (first_element + place, rows.dtype());
            return Err(self
                .checkpoint
                .error(format!("element {at} of tensor {name} is {value} in {dtype}, not a finite number")));
        }
        store(first, rows)
    }

    /// The scales of a parameter in bytes, block after block.
    fn scales(&self, name: &str) -> Result<Vec<f32>> {
        let name = scales_name(name);
        let Some(tensor) = self.checkpoint.tensor(&name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {name}")));
        };
        Ok(tensor.read(DType::F32)?.as_ref().to_f32_vec())
    }

    /// The rows of one expert of a tensor that has all of a layer.
    fn read_fused(
        &self,
        fused: &FusedExpert,
        rows: usize,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(tensor) = self.checkpoint.tensor(&fused.name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {}", fused.name)));
        };
        let (elements, size) = (fused.rows * fused.columns, dtype.size_bytes());
        let expert = tensor.read_rows(fused.expert..fused.expert + 1, dtype)?;
        let bytes = expert.as_ref().as_bytes();
        let mut own = HostTensor::zeros(&[rows, fused.columns], dtype);
        if tensor.shape[1] == fused.rows {
            let first = fused.first * fused.columns * size;
            own.bytes_mut().copy_from_slice(&bytes[first..][..rows * fused.columns * size]);
        } else {
            // `[columns, rows]`.
            for (i, element) in own.bytes_mut().chunks_exact_mut(size).enumerate() {
                let (row, column) = (fused.first + i / fused.columns, i % fused.columns);
                element.copy_from_slice(&bytes[(column * fused.rows + row) * size..][..size]);
            }
        }
        self.pass_on(&fused.name, fused.expert * elements, 0, own.as_ref(), store)?;
        let of_expert = tensor.bytes.len() / fused.num_experts;
        self.checkpoint.forget(&fused.name, fused.expert * of_expert..(fused.expert + 1) * of_expert);
        Ok(())
    }
}

/// Rows of a matrix in bytes, each multiplied by the scale of its block.
fn scaled_rows(tensor: &SourceTensor<'_>, rows: Range<usize>, scales: &[f32], dtype: DType) -> Result<HostTensor> {
    let (first, columns) = (rows.start, tensor.shape[1..].iter().product::<usize>());
    let read = tensor.read_rows(rows, DType::F32)?;
    let shape = read.as_ref().shape();
    let mut values = read.as_ref().to_f32_vec();
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        let of_row = &scales[(first + row) / FP8_BLOCK * columns.div_ceil(FP8_BLOCK)..];
        for (block, scale) in values.chunks_mut(FP8_BLOCK).zip(of_row) {
            block.iter_mut().for_each(|value| *value *= scale);
        }
    }
    Ok(HostTensor::from_f32(&values, shape.dims(), dtype)?)
}

impl CheckpointWeights<'_> {
    /// Matrices of experts that lie as blocks and scales.
    fn read_mxfp4(
        &self,
        Mxfp4 { blocks, scales }: &Mxfp4,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let bytes = |name: &str, shape: &[usize]| match self.checkpoint.plain_bytes(name, shape) {
            Some(bytes) => bytes.map_err(|message| self.checkpoint.error(message)),
            None => Err(self.checkpoint.error(format!("missing tensors: {name}"))),
        };
        let [experts, rows, of_row] = scales.1;
        let (block_bytes, scale_bytes) = (bytes(&blocks.0, &blocks.1)?, bytes(&scales.0, &scales.1)?);
        let mut values = vec![0.0; rows * of_row * BLOCK];
        let of_expert = rows * of_row;
        for expert in 0..experts {
            let own = expert * of_expert..(expert + 1) * of_expert;
            let own_blocks = own.start * BLOCK_BYTES..own.end * BLOCK_BYTES;
            dequantize(&block_bytes[own_blocks.clone()], &scale_bytes[own.clone()], &mut values);
            let matrix = HostTensor::from_f32(&values, &[1, rows, of_row * BLOCK], dtype)?;
            self.pass_on(&blocks.0, own.start * BLOCK, expert, matrix.as_ref(), store)?;
            self.checkpoint.forget(&blocks.0, own_blocks);
            self.checkpoint.forget(&scales.0, own);
        }
        Ok(())
    }
}

impl WeightSource for CheckpointWeights<'_> {
    fn read(
        &mut self,
        parameter: &Parameter,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let Parameter { name, shape, .. } = parameter;
        if let Some(fused) = fused_in(self.checkpoint, parameter) {
            return self.read_fused(fused, shape[0], dtype, store);
        }
        if let Some(quantized) = Mxfp4::of(self.checkpoint, parameter) {
            return self.read_mxfp4(&quantized, dtype, store);
        }
        let mut store = in_form(&parameter.form, store);
        let Some(tensor) = self.checkpoint.tensor(name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {name}")));
        };
        let scales = match tensor.dtype {
            SourceDType::F8E4M3 => Some(self.scales(name)?),
            SourceDType::F32 | SourceDType::BF16 | SourceDType::F16 => None,
        };
        let row_bytes = tensor.bytes.len() / shape[0].max(1);
        for rows in slices(shape) {
            let first = rows.start;
            let bytes = rows.start * row_bytes..rows.end * row_bytes;
            let values = match &scales {
                Some(scales) => Converted::Owned(scaled_rows(&tensor, rows, scales, dtype)?),
                None => tensor.read_rows(rows, dtype)?,
            };
            self.pass_on(name, first * shape[1..].iter().product::<usize>(), first, values.as_ref(), &mut store)?;
            // Else the files of a model would take as much memory as the model while it loads.
            self.checkpoint.forget(name, bytes);
        }
        Ok(())
    }
}

/// Turns the matrices of a parameter that a checkpoint has the other way round before they are stored, and adds the one that it has less.
fn in_form<'s>(
    form: &'s Form,
    store: &'s mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
) -> impl FnMut(usize, HostRef<'_>) -> Result<()> + 's {
    move |first, rows| match form {
        Form::Flipped => store(first, turned(rows).as_ref()),
        Form::ZeroCentred => {
            let values: Vec<f32> = rows.to_f32_vec().into_iter().map(|value| 1.0 + value).collect();
            store(first, HostTensor::from_f32(&values, rows.shape().dims(), rows.dtype())?.as_ref())
        }
        Form::Own | Form::Expert(_) => store(first, rows),
    }
}

/// Runs of whole rows of about [`SLICE_ELEMENTS`].
fn slices(shape: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let rows = shape[0];
    let run = (SLICE_ELEMENTS / shape[1..].iter().product::<usize>().max(1)).max(1);
    (0..rows).step_by(run).map(move |first| first..(first + run).min(rows))
}

/// Random weights.
struct RandomWeights {
    range: f32,
    seed: u64,
    /// Which parameter is next.
    index: u64,
}

impl WeightSource for RandomWeights {
    fn read(
        &mut self,
        parameter: &Parameter,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let Parameter { shape, form, .. } = parameter;
        let (initial, mut store) = (parameter.initial(), in_form(form, store));
        let row_len = shape[1..].iter().product::<usize>();
        for rows in slices(shape) {
            let mut values = vec![0.0; rows.len() * row_len];
            random_parameter(initial, self.range, [self.seed, self.index], rows.start * row_len, &mut values);
            let mut slice_shape = vec![rows.len(), row_len];
            if shape.len() <= Shape::MAX_RANK {
                slice_shape = shape.to_vec();
            }
            slice_shape[0] = rows.len();
            store(rows.start, HostTensor::from_f32(&values, &slice_shape, dtype)?.as_ref())?;
        }
        self.index += 1;
        Ok(())
    }
}

/// Values of elements `first..` of a parameter before anything was learned, keyed by seed and place of the parameter: the rule of [`Model::random`].
pub fn random_parameter(initial: Initial, range: f32, key: [u64; 2], first: usize, values: &mut [f32]) {
    match initial {
        Initial::Zeros => values.fill(0.0),
        Initial::Ones => values.fill(1.0),
        // A uniform draw of this width has the standard deviation `range`.
        Initial::Random => random::fill_uniform(key, first as u64, range * 3f32.sqrt(), values),
        Initial::Decays => {
            // The logarithms of 0.01 and 16.
            let (slowest, fastest) = (-4.6, 2.8);
            random::fill_uniform(key, first as u64, (fastest - slowest) / 2.0, values);
            values.iter_mut().for_each(|value| *value += (fastest + slowest) / 2.0);
        }
    }
}

#[cfg(test)]
mod tests;
