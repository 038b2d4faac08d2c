//! The architectures, one file each, and the registry that chooses by `model_type`.

mod qwen3;

use std::rc::Rc;

use strata_tensor::{
    AttentionSpan, Backend, Between, DType, HostRef, LoraGroup, LoraProjection, LoraSite, PackedRef, Rotary, Tape, Tensor, Var,
    WeightFormat,
};

use crate::lora::LoraModule;
use crate::{Error, KvCache, ModelConfig, PackedBatch, Result};

/// What an architecture computes, and what the passes over it need to know.
pub(crate) trait Architecture: Send + Sync {
    /// Hidden states after the final norm, `[tokens, hidden_size]` in the compute dtype. With a cache, keys and values of the batch
    /// are added to it; without, every decoder layer is a checkpoint of the tape, and `between` is called after each.
    fn hidden<'a>(
        &'a self,
        tape: &mut Tape<'a>,
        inputs: &BatchInputs<'a>,
        cache: Option<&mut KvCache>,
        observe: Observer<'_>,
        between: &mut Between<'_>,
    ) -> Result<Var>;

    /// The unembedding, and its place among [`Architecture::lora_modules`].
    fn unembedding(&self) -> (PackedRef<'_>, usize);

    /// The linear layers that can carry LoRA.
    fn lora_modules(&self) -> &[LoraModule];

    /// Bytes of the weights.
    fn weight_bytes(&self) -> usize;

    /// As [`crate::Model::train_bytes_per_token`].
    fn train_bytes_per_token(&self, backend: &dyn Backend) -> usize;

    /// What a pass takes whatever its tokens, logits aside.
    fn fixed_bytes(&self, backend: &dyn Backend) -> usize;
}

impl std::fmt::Display for Observed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Observed::Embeddings => write!(f, "the embeddings"),
            Observed::LayerOutput(layer) => write!(f, "the output of layer {layer}"),
            Observed::FinalNorm => write!(f, "the final norm"),
            Observed::Logits => write!(f, "the logits"),
        }
    }
}

/// Something on the way through a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// Token embeddings, f32 `[tokens, hidden_size]`.
    Embeddings,
    /// What decoder layer `i` hands on, f32 `[tokens, hidden_size]`, before any final norm.
    LayerOutput(usize),
    /// After the final norm, `[tokens, hidden_size]`.
    FinalNorm,
    /// f32 `[tokens, vocab_size]`.
    Logits,
}

/// Sees values on the way through a model, where someone asks; an error of theirs ends the pass.
pub(crate) type Observer<'o> = Option<&'o mut dyn FnMut(Observed, &Tensor) -> Result<()>>;

/// Where the values of an architecture's parameters come from.
pub(crate) trait WeightSource {
    /// Passes the values of the parameter `name` to `store`, in slices of whole rows: the first row of the slice, then the rows.
    fn read(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()>;
}

/// A parameter of a checkpoint.
pub(crate) struct Parameter<S> {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// Where it goes.
    pub slot: S,
}

/// Names and shapes of all parameters of a model of this configuration, in the order of a checkpoint.
///
/// # Errors
/// If the architecture is not known.
pub fn parameter_shapes(config: &ModelConfig) -> Result<Vec<(String, Vec<usize>)>> {
    match config.model_type.as_str() {
        "qwen3" => Ok(qwen3::parameters(config).into_iter().map(|p| (p.name, p.shape)).collect()),
        other => Err(unknown(other)),
    }
}

/// Refuses a configuration that no kernel of `backend` computes.
pub(crate) fn check(backend: &dyn Backend, config: &ModelConfig) -> Result<()> {
    config.validate()?;
    match config.model_type.as_str() {
        "qwen3" => {
            let refused = |e| Error::Config(format!("head_dim {}: {e}", config.head_dim));
            backend.check_attention(&qwen3::geometry(config)).map_err(refused)
        }
        other => Err(unknown(other)),
    }
}

/// Builds the architecture that `config` names.
pub(crate) fn build(
    backend: &dyn Backend,
    config: &ModelConfig,
    format: WeightFormat,
    weights: &mut dyn WeightSource,
) -> Result<Box<dyn Architecture>> {
    check(backend, config)?;
    match config.model_type.as_str() {
        "qwen3" => Ok(Box::new(qwen3::Qwen3::build(backend, config, format, weights)?)),
        other => Err(unknown(other)),
    }
}

fn unknown(model_type: &str) -> Error {
    Error::Config(format!("model_type {model_type:?} is not supported; supported: \"qwen3\""))
}

/// A batch in the form that ops take: borrowed pages, shared angles, low-rank groups by module.
pub(crate) struct BatchInputs<'a> {
    pub batch: &'a PackedBatch<'a>,
    pub spans: Rc<[AttentionSpan<'a>]>,
    pub rotary: Rc<Rotary>,
    /// The sequences, as tokens of the batch.
    pub sequences: Vec<std::ops::Range<usize>>,
    /// For each group of the batch, its sequences as tokens of the batch.
    group_sequences: Vec<Rc<[std::ops::Range<usize>]>>,
}

impl<'a> BatchInputs<'a> {
    pub(crate) fn new(backend: &dyn Backend, config: &ModelConfig, batch: &'a PackedBatch<'a>) -> Result<Self> {
        let spans: Rc<[AttentionSpan<'a>]> =
            batch.spans.iter().map(|s| AttentionSpan { tokens: s.tokens.clone(), past: s.past, pages: &s.pages }).collect();
        if let Some(s) = batch.spans.iter().find(|s| s.past + s.tokens.len() > config.max_position_embeddings) {
            return Err(Error::Batch(format!(
                "a sequence of {} tokens is longer than the context of {}",
                s.past + s.tokens.len(),
                config.max_position_embeddings
            )));
        }
        let group_sequences = batch
            .groups
            .iter()
            .map(|g| {
                let within = batch.spans.iter().filter(|s| g.start <= s.tokens.start && s.tokens.end <= g.end);
                within.map(|s| s.tokens.clone()).collect()
            })
            .collect();
        let rotary = Rc::new(backend.rotary(&batch.positions, config.head_dim, config.rope_theta)?);
        let sequences = batch.spans.iter().map(|s| s.tokens.clone()).collect();
        Ok(BatchInputs { batch, spans, rotary, sequences, group_sequences })
    }

    /// The low-rank pairs of one layer of a fused linear layer: `projections` are its modules and their first output columns.
    pub(crate) fn lora(&self, layer: usize, projections: &[(usize, usize)]) -> Rc<[LoraGroup<'a>]> {
        self.batch
            .groups
            .iter()
            .zip(&self.group_sequences)
            .enumerate()
            .filter_map(|(group, (g, sequences))| {
                let adapter = g.adapter?;
                let scale = adapter.config().scale();
                let projections: Vec<LoraProjection<'a>> = projections
                    .iter()
                    .filter_map(|&(module, first_column)| {
                        let pair = adapter.pair(module)?;
                        let site = LoraSite { group, module, layer };
                        Some(LoraProjection { a: pair.a.layer(layer), b: pair.b.layer(layer), scale, first_column, site })
                    })
                    .collect();
                let any = !projections.is_empty() && g.start < g.end;
                any.then(|| LoraGroup { tokens: g.start..g.end, sequences: sequences.clone(), projections })
            })
            .collect()
    }
}
