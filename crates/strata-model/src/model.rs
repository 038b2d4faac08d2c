//! A loaded model, and the three passes the engine runs over it: train, score, step.

use std::path::Path;
use std::sync::Arc;

use strata_tensor::{Backend, DType};

use crate::lora::{Adapter, LoraConfig, LoraModule, LoraParams};
use crate::{KvCache, ModelConfig, PackedBatch, Result};

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

/// The model's prediction after one token.
#[derive(Clone, Copy)]
pub struct LogitsRow<'a> {
    /// `[vocab_size]`.
    pub logits: &'a [f32],
    /// Logarithm of the sum of the exponentials of the logits.
    pub log_normalizer: f32,
}

impl LogitsRow<'_> {
    /// Log-probability of a token, the same bits that a training pass computes for it.
    pub fn logprob(&self, token: u32) -> f32 {
        self.logits[token as usize] - self.log_normalizer
    }
}

/// A frozen base model in memory.
pub struct Model {
    _todo: (),
}

impl Model {
    /// Loads a Hugging Face checkpoint directory. Every tensor of it must be used and every parameter filled.
    pub fn load(_backend: Arc<dyn Backend>, _dir: &Path) -> Result<Self> {
        unimplemented!()
    }

    /// A model with random weights, as the config's `initializer_range` says.
    pub fn random(_backend: Arc<dyn Backend>, _config: ModelConfig, _seed: u64, _dtype: DType) -> Result<Self> {
        unimplemented!()
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        unimplemented!()
    }

    /// What computes.
    pub fn backend(&self) -> &dyn Backend {
        unimplemented!()
    }

    /// Dtype of weights, matmul inputs, keys and values.
    pub fn dtype(&self) -> DType {
        unimplemented!()
    }

    /// The linear layers that can carry LoRA; adapters index by place in this list.
    pub fn lora_modules(&self) -> &[LoraModule] {
        unimplemented!()
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> usize {
        unimplemented!()
    }

    /// Bytes a training pass holds for each token at its peak, adapters aside.
    pub fn train_bytes_per_token(&self) -> usize {
        unimplemented!()
    }

    /// Packs adapter parameters for this model.
    pub fn pack_adapter(&self, config: LoraConfig, params: &LoraParams) -> Result<Arc<Adapter>> {
        Adapter::pack(self.backend(), self.dtype(), self.lora_modules(), config, params)
    }

    /// A KV cache of `num_pages` pages for this model.
    pub fn new_kv_cache(&self, _num_pages: usize) -> KvCache {
        unimplemented!()
    }

    /// Bytes of one page of this model's KV cache.
    pub fn kv_page_bytes(&self) -> usize {
        unimplemented!()
    }

    /// Log-probabilities of all targets, with no gradient. Bits equal those of [`Model::forward_backward`] and [`Model::step`].
    pub fn forward(&self, _batch: &PackedBatch<'_>, _targets: &Targets) -> Result<Vec<f32>> {
        unimplemented!()
    }

    /// Log-probabilities of all targets; adds the gradient of `loss` to `gradients[g]` for the adapter of `batch.groups[g]`
    /// (`None`: that group is only scored). Gradients are added token after token, so that a batch cut between two
    /// sequences adds up to the same bits as the whole.
    pub fn forward_backward(
        &self,
        _batch: &PackedBatch<'_>,
        _targets: &Targets,
        _loss: &dyn TokenLoss,
        _gradients: &mut [Option<&mut LoraParams>],
    ) -> Result<Vec<f32>> {
        unimplemented!()
    }

    /// Runs sequences that live in the KV cache: prefill chunks and decode steps alike. Calls `visit(i, row)` with the prediction
    /// after token `rows[i]` of the batch, for all `i`, from several threads, in no particular order.
    pub fn step(
        &self,
        _batch: &PackedBatch<'_>,
        _cache: &mut KvCache,
        _rows: &[usize],
        _visit: &(dyn Fn(usize, LogitsRow<'_>) + Sync),
    ) -> Result<()> {
        unimplemented!()
    }
}
