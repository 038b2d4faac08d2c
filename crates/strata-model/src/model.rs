//! A loaded model, and the passes the engine runs over it: train, score, step.

mod firsts;
mod merge;
mod packed_copy;
mod stored_matrix;
mod wanted;
mod weights;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use strata_tensor::{
    Backend, Between, DType, LOGITS_CHUNK_BYTES, Linear, LogprobPass, LogprobTargets, LoraGradient, LoraGradients, LoraGroup,
    LoraSite, RowReply, RowRequest, Tape, TargetLoss, Tensor, WeightFormat, WeightStorage, logits_chunk_rows, read_logits,
    target_logprobs,
};
use strata_values::{alone, first_not_finite};

use crate::architectures::{self, BatchInputs, Decoder, ImageBytes, ImageFeatures, Leaves, Observed, Observer, Plan};
use crate::checkpoint::{Checkpoint, Int4Tensors};
use crate::config::RopeScaling;
use crate::lora::{Adapter, LoraConfig, LoraModule, LoraParams};
use crate::vision::{ImageProcessor, Patches};
use crate::{Error, KvCache, ModelConfig, ModelSource, PackedBatch, Result};
use packed_copy::{PackedCopy, Unusable};
use wanted::WantedRows;
use weights::{CheckpointWeights, RandomWeights, account_for, check_tied, tensors_of};

pub use merge::write_merged;
pub use packed_copy::UnwrittenCopy;
pub use weights::random_parameter;

/// Lists that a pass keeps for each token: positions, steps of sums, terms of the loss.
const TOKEN_LISTS_BYTES: usize = 128;
/// What small allocations and the scratch of matrix products come to.
const SMALL_BUFFERS_BYTES: usize = 2 << 20;

/// Bytes of buffers for this many bytes: sizes are rounded up to whole lines or more, by a sixty-fourth at most where they are not small.
fn with_rounding(bytes: usize) -> usize {
    bytes + bytes / 64
}

/// What a training pass keeps in memory until the way back; what it does not keep it computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// The last layers of which all is kept that the way back needs; one at least, which would be needed at once.
    pub layers: usize,
    /// Of the layers before, only what goes into the first of so many is kept: all but the last of those are computed once more than that one. 1: what goes into each.
    pub every: usize,
}

impl Keeping {
    /// What goes into each layer.
    pub const ALL_CHECKPOINTS: Keeping = Keeping { layers: 1, every: 1 };

    /// Whether kept layers keep what the first products of their experts make, too: all of them, unless the least is kept.
    pub(crate) fn keeps_experts(self) -> bool {
        self.layers > 1
    }

    /// The most values of the residual stream that are in memory at the same time, those that go into layers, if only the last is kept.
    pub(crate) fn checkpoints(self, num_layers: usize) -> usize {
        // Those of runs of layers, and those within the one that is gone back through, or that of the last.
        (num_layers.max(1) - 1).div_ceil(self.every) + (self.every - 1).max(1)
    }
}

/// Targets of a training or scoring pass: for each token of the batch any number of token ids whose log-probabilities are wanted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Token ids of all targets, token after token.
    pub ids: Vec<u32>,
    /// `offsets[t]..offsets[t + 1]` are the targets of token `t`; one more entry than there are tokens.
    pub offsets: Vec<usize>,
}

impl Targets {
    /// Whether they are those of so many tokens.
    fn cover(&self, tokens: usize) -> bool {
        let Targets { ids, offsets } = self;
        let ends = offsets.first() == Some(&0) && offsets.last() == Some(&ids.len());
        offsets.len() == tokens + 1 && ends && offsets.is_sorted()
    }
}

/// A loss over target log-probabilities that is a sum of one term per target.
pub trait TokenLoss: Sync {
    /// Writes the derivative of the loss by each log-probability of targets `first..first + logprobs.len()` of the pass.
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]);

    /// Those targets, as targets of the same tokens, whose log-probabilities have to be known before the derivative by any is, if a term depends on others than its own.
    fn asks_first(&self) -> Option<Targets> {
        None
    }

    /// Is told what it has asked for.
    fn is_told(&self, _logprobs: &[f32]) {}
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
        Ok(Self::load_from(backend, source, dtype, storage, None)?.0)
    }

    /// As [`Model::load_stored`], from the packed copy in the directory `copies` if there is one of this checkpoint; the weights of the files are then not read. If there is none, or
    /// it is damaged, also what makes one.
    ///
    /// # Errors
    /// As there: what is wrong with a copy never is.
    pub fn load_copied(
        backend: Arc<dyn Backend>,
        source: &ModelSource,
        dtype: Option<DType>,
        storage: WeightStorage,
        copies: &Path,
    ) -> Result<(Self, Option<UnwrittenCopy>)> {
        Self::load_from(backend, source, dtype, storage, Some(copies))
    }

    fn load_from(
        backend: Arc<dyn Backend>,
        source: &ModelSource,
        dtype: Option<DType>,
        storage: WeightStorage,
        copies: Option<&Path>,
    ) -> Result<(Self, Option<UnwrittenCopy>)> {
        let config = source.config()?;
        let checkpoint = tensors_of(source, &config)?;
        let dtype = dtype.unwrap_or_else(|| Self::compute_dtype(&checkpoint, &config));
        architectures::check(&*backend, &config)?;
        account_for(&checkpoint, &config)?;
        let (format, mut plan) = (WeightFormat { compute: dtype, storage }, Plan::of(&config));
        keep_int4(&mut plan, &checkpoint, &config);
        let copy = match copies.zip(source.directory()) {
            Some((copies, dir)) => {
                let files = (dir, &checkpoint, &*source.config_json()?);
                Some(PackedCopy::of(copies, files, &plan.declaration, format, &*backend))
            }
            None => None,
        };
        let copied = copy.as_ref().map(|copy| (copy.read(&*backend, &plan.declaration), copy.path().display()));
        let (weights, copy) = match copied {
            Some((Ok(weights), _)) => (weights, None),
            Some((Err(Unusable::Device(error)), _)) => return Err(error),
            missing => {
                match missing {
                    Some((Err(Unusable::Damaged(why)), path)) => {
                        tracing::warn!(%path, "the packed copy cannot be used, and is made again: {why}");
                    }
                    Some((Err(Unusable::Stale), path)) => {
                        tracing::info!(%path, "the packed copy is of another state of the checkpoint or the program, and is made again");
                    }
                    _ => {}
                }
                check_tied(&checkpoint, &config)?;
                let run = |num_tasks: usize, task: &(dyn Fn(usize) + Sync)| backend.on_threads(num_tasks, task);
                let mut weights = CheckpointWeights { checkpoint: &checkpoint, int4: config.int4, run: &run };
                (plan.declaration.load(&*backend, format, &mut weights)?, copy)
            }
        };
        let decoder = Decoder::new(plan, weights, &config, dtype);
        let image_processor = source.image_processor(&config)?;
        let model = Model { backend, config, dtype, decoder, image_processor, logits_chunk_bytes: LOGITS_CHUNK_BYTES };
        model.probe().map_err(|message| checkpoint.error(message))?;
        let unwritten =
            copy.map(|copy| UnwrittenCopy::new(copy, model.decoder.shared_weights(), model.backend.clone(), &checkpoint));
        Ok((model, unwritten))
    }

    /// What the weights of a model would take if it were loaded by [`Model::load_stored`], but for what layouts add, and the dtype that it would compute in. No weight is read.
    ///
    /// # Errors
    /// If its configuration is not supported, or there are no files.
    pub fn weight_bytes_of(source: &ModelSource, dtype: Option<DType>, storage: WeightStorage) -> Result<(u64, DType)> {
        let config = source.config()?;
        let checkpoint = tensors_of(source, &config)?;
        let compute = dtype.unwrap_or_else(|| Self::compute_dtype(&checkpoint, &config));
        let mut plan = Plan::of(&config);
        keep_int4(&mut plan, &checkpoint, &config);
        Ok((plan.declaration.element_bytes(WeightFormat { compute, storage }), compute))
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
        let image_processor = config.image_processor();
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
            if first.is_none() && first_not_finite(&alone, self.backend.to_host(value.as_ref())?.as_ref()).is_some() {
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
        with_rounding(self.decoder.train_bytes_per_token(self.backend(), self.least_kept()) + TOKEN_LISTS_BYTES)
    }

    /// What takes the least memory, and of that the least time.
    pub fn least_kept(&self) -> Keeping {
        let bytes = |every: &usize| Keeping { layers: 1, every: *every }.checkpoints(self.config.num_layers);
        let every = (1..=self.config.num_layers).min_by_key(bytes).unwrap_or(1);
        Keeping { layers: 1, every }
    }

    /// Bytes that adapters of ranks up to `rank` add to [`Model::train_bytes_per_token`].
    pub fn lora_bytes_per_token(&self, rank: usize) -> usize {
        let (wide, narrow) = (DType::F32.size_bytes(), self.dtype.size_bytes());
        // The products of a layer's pairs, saved for the way back; and for one pair at a time, those on the way, twice.
        let rank = rank.next_multiple_of(2);
        with_rounding(rank * (self.lora_modules().len() * narrow + 3 * wide + 3 * narrow) + TOKEN_LISTS_BYTES)
    }

    /// Bytes that a training pass over `tokens` tokens, with adapters of ranks up to `rank`, takes beyond [`Model::train_bytes_per_token`] if it keeps more than
    /// [`Model::least_kept`].
    pub fn kept_bytes(&self, keeping: Keeping, tokens: usize, rank: usize) -> u64 {
        let further = keeping.layers.min(self.config.num_layers).saturating_sub(1) as u64;
        let layers = self.layer_bytes_per_token(rank).saturating_mul(further);
        let experts = if further > 0 { self.experts_bytes_per_token().saturating_mul(further + 1) } else { 0 };
        self.checkpoint_bytes_per_token(keeping).saturating_add(layers).saturating_add(experts).saturating_mul(tokens as u64)
    }

    /// What takes the least time of what has [`Model::kept_bytes`] within `bytes`: what goes into each layer, and then whole layers.
    pub fn kept_within(&self, bytes: u64, tokens: usize, rank: usize) -> Keeping {
        let least = self.least_kept();
        let fits = |every: &usize| self.kept_bytes(Keeping { every: *every, ..least }, tokens, rank) <= bytes;
        let keeping = Keeping { every: (1..least.every).find(fits).unwrap_or(least.every), ..least };
        if keeping.every > 1 {
            return keeping;
        }
        // The experts of the last layer keep something, too, if those of others do.
        let of_last = (tokens as u64).saturating_mul(self.experts_bytes_per_token());
        let spare = (bytes - self.kept_bytes(keeping, tokens, rank)).saturating_sub(of_last);
        let of_layer = (tokens as u64).saturating_mul(self.layer_bytes_per_token(rank) + self.experts_bytes_per_token()).max(1);
        let layers = usize::try_from(spare / of_layer).unwrap_or(usize::MAX).saturating_add(1);
        Keeping { layers: layers.min(self.config.num_layers), ..keeping }
    }

    /// For what goes into layers, beyond the least.
    fn checkpoint_bytes_per_token(&self, keeping: Keeping) -> u64 {
        let count = |keeping: Keeping| keeping.checkpoints(self.config.num_layers);
        let further = count(keeping).saturating_sub(count(self.least_kept()));
        with_rounding(further * self.config.hidden_size * DType::F32.size_bytes()) as u64
    }

    fn layer_bytes_per_token(&self, rank: usize) -> u64 {
        let products = rank.next_multiple_of(2) * self.lora_modules().len() * self.dtype.size_bytes();
        with_rounding(self.decoder.layer_bytes_per_token(self.backend()).kept + products) as u64
    }

    fn experts_bytes_per_token(&self) -> u64 {
        with_rounding(self.decoder.experts_bytes_per_token()) as u64
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
    /// If the model reads text alone, the patches are not those of a picture, there is no memory, or `between`, which is called after each block, breaks.
    pub fn image_features(&self, image: &Patches, between: &mut dyn FnMut() -> ControlFlow<()>) -> Result<ImageFeatures> {
        self.decoder.image_features(self.backend(), image, between)
    }

    /// Bytes that a picture takes for each of its tokens. Its pixels are not in it.
    pub fn image_bytes(&self) -> ImageBytes {
        let ImageBytes { features, seeing } = self.decoder.image_bytes(self.backend());
        ImageBytes { features: with_rounding(features), seeing: with_rounding(seeing) }
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
        let repeats = inputs.repeats.as_ref().filter(|_| targets.cover(batch.len()));
        if let Some(repeats) = repeats {
            return self.forward_of_firsts(&inputs, repeats, targets, between);
        }
        let wanted = WantedRows::of(&inputs, targets, self.config.num_layers);
        let (mut tape, leaves) = (Tape::inference(self.backend()), leaving(Keeping::ALL_CHECKPOINTS, wanted.as_ref()));
        let hidden = self.decoder.hidden(&mut tape, &inputs, leaves, None, between)?;
        Ok(self.target_logprobs(&inputs, wanted.as_ref(), hidden.value(), targets, None, between)?.0)
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
        let keeping = self.least_kept();
        self.forward_backward_with(batch, targets, loss, gradients, keeping, &mut || ControlFlow::Continue(()))
    }

    /// As [`Model::forward_backward`], with more or less kept in memory until the way back. Calls `between` after each chunk of logits and after each decoder layer in both directions, if others come after it. Nothing is
    /// locked meanwhile: it may run other passes on this model. No bit of a result depends on either.
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
        keeping: Keeping,
        between: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<f32>> {
        if gradients.len() != batch.groups.len() {
            return Err(Error::Batch(format!("{} gradients for {} groups", gradients.len(), batch.groups.len())));
        }
        let mut gradients = GroupGradients { groups: gradients };
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let mut tape = Tape::recording(self.backend()).with_repeats(inputs.repeats.clone());
        let wanted = WantedRows::of(&inputs, targets, self.config.num_layers);
        let hidden = self.decoder.hidden(&mut tape, &inputs, leaving(keeping, wanted.as_ref()), None, between)?;
        if let Some(first) = loss.asks_first() {
            let wanted = wanted.as_ref().map(|wanted| wanted.with(&first));
            let logprobs = self.target_logprobs(&inputs, wanted.as_ref(), hidden.value(), &first, None, &mut *between)?.0;
            loss.is_told(&logprobs);
        }
        let loss: (&dyn TargetLoss, &mut dyn LoraGradients) = (&Loss(loss), &mut gradients);
        let (logprobs, dhidden) =
            self.target_logprobs(&inputs, wanted.as_ref(), hidden.value(), targets, Some(loss), between)?;
        let dhidden = dhidden.expect("a loss was given");
        tape.backward_with(hidden, dhidden, &mut gradients, between)?;
        Ok(logprobs)
    }

    /// The unembedding of a training or scoring pass, over the hidden states of all tokens or of those that are wanted.
    fn target_logprobs<'p>(
        &self,
        inputs: &'p BatchInputs<'_>,
        wanted: Option<&'p WantedRows>,
        hidden: &Tensor,
        targets: &'p Targets,
        loss: Option<(&'p dyn TargetLoss, &'p mut dyn LoraGradients)>,
        between: &'p mut Between<'p>,
    ) -> Result<(Vec<f32>, Option<Tensor>)> {
        let (w, module) = self.decoder.unembedding();
        let lora = inputs.lora(0, &[(module, 0)]);
        let all = (&inputs.sequences, &targets.offsets, inputs.repeats.as_deref(), lora.clone());
        let (sequences, offsets, repeats, lora) =
            wanted.map_or(all, |wanted| (&wanted.sequences, &wanted.offsets, None, LoraGroup::of_rows(&lora, &wanted.rows)));
        let pass = LogprobPass {
            sequences,
            targets: LogprobTargets { ids: &targets.ids, offsets },
            loss,
            chunk_bytes: self.logits_chunk_bytes,
            repeats,
            between,
        };
        Ok(target_logprobs(self.backend(), hidden, w, &lora, pass)?)
    }

    /// Tokens of a batch that cost something: the others follow the same tokens as one of these does, and have what it has.
    pub fn num_computed(&self, batch: &PackedBatch<'_>) -> usize {
        architectures::repeats_of(&self.config, batch).map_or(batch.len(), |repeats| repeats.num_computed())
    }

    /// Runs sequences that live in the KV cache: prefill chunks and decode steps alike. Answers what `requests[i]` asks of the prediction after token
    /// `rows[i]` of the batch; `None` where the logits are not finite numbers.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, pages do not hold a sequence, a row is out of range, or there are not as many requests as rows.
    pub fn step(
        &self,
        batch: &PackedBatch<'_>,
        cache: &mut KvCache,
        rows: &[usize],
        requests: &[RowRequest],
    ) -> Result<Vec<Option<RowReply>>> {
        if let Some(row) = rows.iter().find(|&&row| row >= batch.len()) {
            return Err(Error::Batch(format!("row {row} of a batch of {} tokens", batch.len())));
        }
        let inputs = BatchInputs::new(self.backend(), &self.config, batch)?;
        let undisturbed = &mut || ControlFlow::Continue(());
        let repeats = inputs.repeats.as_ref();
        // Each is answered by the first row with the same value.
        let asked: Vec<usize> = rows.iter().map(|&row| repeats.map_or(row, |repeats| repeats.first(row))).collect();
        let mut answered = asked.clone();
        answered.sort_unstable();
        answered.dedup();
        let computed = repeats.map_or(batch.len(), |repeats| repeats.num_computed());
        // Of the others the last layer computes what it keeps alone, unless more is added to all behind it.
        let few = answered.len() < computed && inputs.deepstack(self.config.num_layers - 1).is_empty();
        let answered: Option<Rc<[usize]>> = few.then(|| answered.into());
        let hidden = match repeats {
            Some(repeats) => self.step_of_firsts(&inputs, repeats, answered.clone(), cache, undisturbed)?,
            None => {
                let leaves = Leaves::Cache { cache, answered: answered.clone() };
                self.decoder.hidden(&mut Tape::inference(self.backend()), &inputs, leaves, None, undisturbed)?
            }
        };
        let (w, module) = self.decoder.unembedding();
        let mut lora = inputs.lora(0, &[(module, 0)]);
        let there = answered.as_deref().or(repeats.map(|repeats| repeats.firsts()));
        if let Some(there) = there {
            lora = LoraGroup::of_rows(&lora, there);
        }
        let place = |row: usize| there.map_or(row, |there| there.partition_point(|&other| other < row));
        let places: Vec<usize> = asked.into_iter().map(place).collect();
        Ok(read_logits(self.backend(), hidden.value(), w, &lora, &places, requests, self.logits_chunk_bytes)?)
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
        let hidden = self
            .decoder
            .hidden(&mut tape, &inputs, leaving(Keeping::ALL_CHECKPOINTS, None), observer, &mut || ControlFlow::Continue(()))?;
        let (w, module) = self.decoder.unembedding();
        let logits = tape.linear(&hidden, Linear { weight: w, bias: None, lora: inputs.lora(0, &[(module, 0)]) })?;
        observe(Observed::Logits, logits.value())
    }
}

/// What a pass over whole sequences leaves.
fn leaving(keeping: Keeping, wanted: Option<&WantedRows>) -> Leaves<'static> {
    Leaves::Activations { keeping, answered: wanted.map(|wanted| wanted.rows.clone()) }
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

/// Has matrices that a checkpoint has in four bits stored as they lie.
fn keep_int4(plan: &mut Plan, checkpoint: &Checkpoint, config: &ModelConfig) {
    plan.declaration.keep_int4(|parameter| {
        Some(Int4Tensors::of(checkpoint, config.int4, &parameter.name, &parameter.shape)?.group_inputs())
    });
}

#[cfg(test)]
mod tests;
