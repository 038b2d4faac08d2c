//! The architectures: one file for each family, and the registry that chooses by `model_type`.
//!
//! A family reads its own part of `config.json`, declares its weights (`declaration`: each is named once), and says what a decoder layer computes. What all have in common is
//! `decoder`, and what several have because it is the same mathematics is in `blocks` and `dense`.

mod blocks;
mod composite;
mod declaration;
mod decoder;
mod deepseek_v3;
mod delta_net;
mod dense;
mod files;
mod glm4_moe_lite;
mod gpt_oss;
mod latent;
mod llama;
mod mistral;
mod moe;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_vl;
mod repeats;
mod vision_tower;

use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Map, Value};
use strata_tensor::{
    AttentionSpan, AxisFrequency, Backend, DType, DeltaGeometry, DeltaSpan, EmbeddingLora, HostRef, Int4Rows, KvValues,
    LoraGroup, LoraProjection, LoraSite, Repeats, Rotary, Tensor, TensorRef, WeightFormat,
};

use crate::batch::ImageRows;
use crate::config::fields::{Fields, unsupported};
use crate::config::quantization;
use crate::config::{Rope, RopeTable};
use crate::lora::{LoraModule, Part};
use crate::{Error, ModelConfig, PackedBatch, Result};
pub(crate) use declaration::{Declaration, Stack, StackShape, Weights};
pub(crate) use declaration::{Form, FusedExpert, Parameter};
pub use declaration::{Initial, NormWeights, ParameterShape};
use decoder::{DecoderLayers, Mixer};

pub use blocks::{AttentionConfig, MlpConfig};
pub(crate) use decoder::{Decoder, Leaves, Plan};
pub use deepseek_v3::DeepseekV3Config;
pub use dense::DenseConfig;
pub use files::{FileTensor, file_tensors};
pub use gpt_oss::GptOssConfig;
pub use latent::LatentConfig;
pub use moe::{MoeConfig, MoeLayout, Router, SigmoidRouter};
pub use qwen3_5::{Qwen3_5Config, Qwen3_5Mlp};
pub use qwen3_moe::Qwen3MoeConfig;
pub use qwen3_vl::{Qwen3VlConfig, Qwen3VlText};
pub use vision_tower::{ImageBytes, ImageFeatures, VisionConfig};

/// A family, with what its models have beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub enum Family {
    /// Qwen3.
    Qwen3(DenseConfig),
    /// Qwen2 and Qwen2.5.
    Qwen2(DenseConfig),
    /// Llama, up to 3.3.
    Llama(DenseConfig),
    /// Mistral.
    Mistral(DenseConfig),
    /// Qwen3-MoE.
    Qwen3Moe(Qwen3MoeConfig),
    /// DeepSeek-V3 and R1.
    DeepseekV3(DeepseekV3Config),
    /// GLM-4.7-Flash.
    Glm4MoeLite(DeepseekV3Config),
    /// gpt-oss.
    GptOss(GptOssConfig),
    /// Qwen3.5 and Qwen3.5-MoE.
    Qwen3_5(Qwen3_5Config),
    /// Qwen3-VL and Qwen3-VL-MoE.
    Qwen3Vl(Qwen3VlConfig),
}

/// What is asked of a family's own configuration.
pub(crate) trait FamilyConfig {
    /// Refuses sizes and combinations that no model can have.
    fn validate(&self, model: &ModelConfig) -> Result<()>;

    /// Rotary positions.
    fn rope(&self) -> &Rope;

    /// Declares the decoder layers.
    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers>;

    /// Experts that a token passes in a layer that has some.
    fn active_experts(&self) -> usize {
        0
    }

    /// What the names of parameters begin with that checkpoints of the family hold, and a model has no use for.
    fn left_aside(&self, _model: &ModelConfig) -> Vec<String> {
        Vec::new()
    }

    /// How checkpoints store the weights of norms: all but those that a layer has for itself.
    fn norm_weights(&self) -> NormWeights {
        NormWeights::Plain
    }

    /// What the names of parameters begin with in checkpoints of which the family is a part, in the place of `model.`.
    fn part_of_composite(&self) -> Option<&'static str> {
        None
    }

    /// The part that sees.
    fn vision(&self) -> Option<&VisionConfig> {
        None
    }

    /// The token that stands for a part of a picture.
    fn image_token(&self) -> Option<u32> {
        None
    }

    /// The axis by whose positions a pair of a head turns: time, rows or columns of pictures. Text has the same on all.
    fn axis_of_pair(&self, _pair: usize) -> usize {
        0
    }
}

/// Reads the configuration of one family. `generation`: the keys of `generation_config.json`.
type Read = fn(&Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig>;

/// `model_type`s, and who reads them.
const REGISTRY: [(&str, Read); 15] = [
    ("qwen3", qwen3::read),
    ("qwen3_moe", qwen3_moe::read),
    ("qwen3_5_text", qwen3_5::read),
    ("qwen3_5", qwen3_5::read_composite),
    ("qwen3_5_moe_text", qwen3_5::read_moe),
    ("qwen3_5_moe", qwen3_5::read_moe_composite),
    ("qwen3_vl", qwen3_vl::read),
    ("qwen3_vl_moe", qwen3_vl::read_moe),
    ("gpt_oss", gpt_oss::read),
    ("qwen2", qwen2::read),
    ("llama", llama::read),
    ("mistral", mistral::read),
    ("ministral", mistral::read),
    ("deepseek_v3", deepseek_v3::read),
    ("glm4_moe_lite", glm4_moe_lite::read),
];

/// Reads a configuration by its `model_type`.
///
/// # Errors
/// If it is not in the registry, or its family refuses it.
pub(crate) fn read_config(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let supported = || REGISTRY.map(|(name, _)| format!("{name:?}")).join(", ");
    let Some(value) = fields.get("model_type") else {
        return Err(Error::Config(format!("model_type is missing; supported: {}", supported())));
    };
    // gpt-oss has a quantization of its own.
    if value != "gpt_oss" {
        quantization::check(fields)?;
    }
    match REGISTRY.iter().find(|(name, _)| value == name) {
        Some((_, read)) => read(fields, generation),
        None => Err(unsupported("model_type", value, &supported())),
    }
}

impl Family {
    pub(crate) fn model_type(&self) -> &'static str {
        match self {
            Family::Qwen3(_) => "qwen3",
            Family::Qwen2(_) => "qwen2",
            Family::Llama(_) => "llama",
            Family::Mistral(_) => "mistral",
            Family::Qwen3Moe(_) => "qwen3_moe",
            Family::DeepseekV3(_) => "deepseek_v3",
            Family::Glm4MoeLite(_) => "glm4_moe_lite",
            Family::GptOss(_) => "gpt_oss",
            Family::Qwen3_5(c) => c.model_type(),
            Family::Qwen3Vl(c) => c.model_type(),
        }
    }

    /// What the family has beside what all have.
    pub(crate) fn config(&self) -> &dyn FamilyConfig {
        match self {
            Family::Qwen3(c) | Family::Qwen2(c) | Family::Llama(c) | Family::Mistral(c) => c,
            Family::Qwen3Moe(c) => c,
            Family::DeepseekV3(c) | Family::Glm4MoeLite(c) => c,
            Family::GptOss(c) => c,
            Family::Qwen3_5(c) => c,
            Family::Qwen3Vl(c) => c,
        }
    }

    /// Adds the family's keys to a `config.json`.
    pub(crate) fn write(&self, model: &ModelConfig, map: &mut Map<String, Value>) {
        match self {
            Family::Qwen3(c) => qwen3::write(c, map),
            Family::Qwen2(c) => qwen2::write(model, c, map),
            Family::Llama(c) => llama::write(c, map),
            Family::Mistral(c) => mistral::write(c, map),
            Family::Qwen3Moe(c) => qwen3_moe::write(model, c, map),
            Family::DeepseekV3(c) => deepseek_v3::write(c, map),
            Family::Glm4MoeLite(c) => glm4_moe_lite::write(c, map),
            Family::GptOss(c) => gpt_oss::write(c, map),
            Family::Qwen3_5(c) => qwen3_5::write(c, map),
            Family::Qwen3Vl(c) => qwen3_vl::write(model, c, map),
        }
    }
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
    /// Passes the values of a parameter to `store`, in slices of whole rows: the first row of the slice, then the rows.
    fn read(&mut self, parameter: &Parameter, dtype: DType, store: StoreRows<'_>) -> Result<()>;
}

/// Takes rows of a parameter, and the number of the first.
pub(crate) type StoreRows<'s> = &'s mut dyn FnMut(usize, Rows<'_>) -> Result<()>;

/// Some rows of a parameter.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'r> {
    /// As numbers of the dtype that was asked for.
    Values(HostRef<'r>),
    /// As a checkpoint has them in four bits.
    Int4(Int4Rows<'r>),
}

/// Passes all parameters of a model of this configuration to `visit`, in the order of a checkpoint.
pub(crate) fn for_each_parameter(config: &ModelConfig, mut visit: impl FnMut(&Parameter)) {
    Plan::of(config).declaration.parameters().into_iter().for_each(&mut visit);
}

/// Names and shapes of all parameters of a model of this configuration, in the order of a checkpoint.
pub fn parameter_shapes(config: &ModelConfig) -> Vec<ParameterShape> {
    let plan = Plan::of(config);
    plan.declaration.parameters().into_iter().map(Parameter::shape_in_files).collect()
}

/// Bytes of the weights of a model of this configuration, but for what layouts add and for what a checkpoint has in fewer bits: see [`crate::Model::weight_bytes_of`].
pub fn weight_bytes(config: &ModelConfig, format: WeightFormat) -> u64 {
    Plan::of(config).declaration.element_bytes(format)
}

/// The modules of a model of this configuration that can carry LoRA, as [`crate::Model::lora_modules`] has them.
pub fn lora_modules(config: &ModelConfig) -> Vec<LoraModule> {
    Plan::of(config).declaration.modules().to_vec()
}

/// Refuses a configuration that no kernel of `backend` computes.
pub(crate) fn check(backend: &dyn Backend, config: &ModelConfig) -> Result<()> {
    config.validate()?;
    let plan = Plan::of(config);
    (0..config.num_layers).try_for_each(|l| match plan.mixer(l) {
        Mixer::Attention(g) => backend.check_attention(&g).map_err(|e| Error::Config(format!("head_dim {}: {e}", g.head_dim))),
        Mixer::DeltaNet(g) => backend.check_delta(&g).map_err(|e| Error::Config(e.to_string())),
    })
}

/// A linear layer as work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearWork {
    /// Last part of its path in a checkpoint.
    pub name: &'static str,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// How many layers have it.
    pub layers: usize,
    /// How many there are in each, of which a token passes some: experts.
    pub experts: Option<ExpertWork>,
    /// Whether it is the last op of its layer, whose product is not computed again for the layer's gradients.
    pub ends_layer: bool,
    /// Whether the last layer has it behind what brings tokens together: of a prompt only the tokens whose predictions are asked for pass it there.
    pub answers: bool,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertWork {
    /// How many there are.
    pub count: usize,
    /// How many a token passes.
    pub active: usize,
}

/// Attention of one layer as work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionWork {
    /// Numbers of a query, all heads.
    pub query_width: usize,
    /// Numbers of keys and values that a token leaves in the cache.
    pub cached_width: usize,
    /// How many keys a query sees at most.
    pub window: Option<usize>,
}

/// What mixes tokens in one layer as work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerWork {
    /// Attention.
    Attention(AttentionWork),
    /// A gated delta net.
    DeltaNet(DeltaGeometry),
}

/// A fused matrix as it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// What it is, for people: `q+k+v`.
    pub label: &'static str,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
}

/// What a token costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Linear layers of the decoder; each can carry LoRA.
    pub linears: Vec<LinearWork>,
    /// The unembedding.
    pub unembedding: LinearWork,
    /// What mixes tokens, layer by layer.
    pub mixers: Vec<MixerWork>,
    /// Kinds of matrices as they lie in memory, the unembedding last.
    pub matrices: Vec<MatrixShape>,
}

impl Work {
    /// Of a model of this configuration.
    pub fn of(config: &ModelConfig) -> Self {
        let plan = Plan::of(config);
        let linear = |m: &crate::lora::LoraModule| LinearWork {
            name: m.experts.map_or(m.path.rsplit('.').next().unwrap_or(m.path), |experts| experts.projection),
            in_features: m.in_features,
            out_features: m.out_features,
            layers: m.layers.len(),
            experts: m.experts.map(|e| ExpertWork { count: e.count, active: config.family.config().active_experts() }),
            answers: m.layers.contains(&(config.num_layers - 1))
                && (m.part == Part::Mlp || m.path.ends_with(".o_proj") || m.path.ends_with(".out_proj")),
            ends_layer: m.path == "mlp.down_proj" || m.experts.is_some_and(|e| e.projection == "down_proj"),
        };
        // A row of a table is no product.
        let products = plan.declaration.modules().iter().filter(|m| m.part != Part::Embedding);
        let (unembedding, linears): (Vec<_>, Vec<_>) = products.partition(|m| m.part == Part::Unembed);
        let mixer = |l: usize| match plan.mixer(l) {
            Mixer::Attention(g) => {
                // Values that are a part of keys are not held beside them.
                let of_values = if let KvValues::Own(width) = g.values { width } else { 0 };
                MixerWork::Attention(AttentionWork {
                    query_width: g.heads * g.head_dim,
                    cached_width: g.kv_heads * (g.head_dim + of_values),
                    window: g.window,
                })
            }
            Mixer::DeltaNet(g) => MixerWork::DeltaNet(g),
        };
        let mut matrices: Vec<MatrixShape> = plan.declaration.matrices().collect();
        matrices.sort_by_key(|m| m.label == "unembedding");
        Work {
            linears: linears.into_iter().map(linear).collect(),
            unembedding: linear(unembedding[0]),
            mixers: (0..config.num_layers).map(mixer).collect(),
            matrices,
        }
    }
}

/// A batch in the form that ops take: borrowed pages, shared angles, low-rank groups by module.
pub(crate) struct BatchInputs<'a> {
    pub batch: &'a PackedBatch<'a>,
    /// The sequences, as attention sees them.
    pub spans: Rc<[AttentionSpan<'a>]>,
    /// Of the sequences what has rows of its own: all, where no rows are left out.
    pub own_spans: Rc<[AttentionSpan<'a>]>,
    /// The sequences, as gated delta nets see them.
    pub delta_spans: Rc<[DeltaSpan]>,
    pub rotary: Rc<Rotary>,
    /// The sequences, as tokens of the batch.
    pub sequences: Vec<std::ops::Range<usize>>,
    /// Tokens that follow the same tokens as others do.
    pub repeats: Option<Rc<Repeats>>,
    /// For each group of the batch, its sequences as tokens of the batch.
    group_sequences: Vec<Arc<[std::ops::Range<usize>]>>,
}

impl<'a> BatchInputs<'a> {
    pub(crate) fn new(backend: &dyn Backend, config: &ModelConfig, batch: &'a PackedBatch<'a>) -> Result<Rc<Self>> {
        let spans: Rc<[AttentionSpan<'a>]> = batch
            .spans
            .iter()
            .map(|s| AttentionSpan { tokens: s.tokens.clone(), past: s.past, pages: &s.held.pages })
            .collect();
        let delta_spans =
            batch.spans.iter().map(|s| DeltaSpan { tokens: s.tokens.clone(), past: s.past, slot: s.held.state }).collect();
        if let Some(s) = batch.spans.iter().find(|s| s.past + s.tokens.len() > config.max_position_embeddings) {
            return Err(Error::Batch(format!(
                "a sequence of {} tokens is longer than the context of {}",
                s.past + s.tokens.len(),
                config.max_position_embeddings
            )));
        }
        check_images(config, batch)?;
        let group_sequences = batch
            .groups
            .iter()
            .map(|g| {
                let within = batch.spans.iter().filter(|s| g.start <= s.tokens.start && s.tokens.end <= g.end);
                within.map(|s| s.tokens.clone()).collect()
            })
            .collect();
        let rotary = Rc::new(angles(backend, config.family.config(), batch)?);
        let sequences = batch.spans.iter().map(|s| s.tokens.clone()).collect();
        let repeats = repeats_of(config, batch).map(Rc::new);
        let own_spans = spans.clone();
        Ok(Rc::new(BatchInputs { batch, spans, own_spans, delta_spans, rotary, sequences, repeats, group_sequences }))
    }

    /// The inputs of a pass that leaves rows out which are the same as others: `firsts` is the batch without them, of which all is but the sequences.
    pub(crate) fn without_repeats(
        &self,
        backend: &dyn Backend,
        config: &ModelConfig,
        firsts: &'a PackedBatch<'a>,
    ) -> Result<Rc<Self>> {
        let own = BatchInputs::new(backend, config, firsts)?;
        let own = Rc::into_inner(own).expect("nobody else has it yet");
        let (spans, delta_spans) = (self.spans.clone(), self.delta_spans.clone());
        Ok(Rc::new(BatchInputs { spans, delta_spans, repeats: None, ..own }))
    }

    /// Rows of what is known of the pictures of the batch, with their tokens; of what `of` answers `None` for, none.
    pub(crate) fn image_rows(
        &self,
        of: impl Fn(&'a ImageFeatures) -> Option<&'a Tensor>,
    ) -> Vec<(std::ops::Range<usize>, TensorRef<'a>)> {
        let rows = |image: &ImageRows<'a>| {
            let features = of(image.features)?;
            Some((image.tokens.clone(), features.as_ref().rows(image.first..image.first + image.tokens.len())))
        };
        self.batch.images.iter().filter_map(rows).collect()
    }

    /// What pictures add to the residual stream after a layer.
    pub(crate) fn deepstack(&self, layer: usize) -> Vec<(std::ops::Range<usize>, TensorRef<'a>)> {
        self.image_rows(|features| features.deepstack.get(layer))
    }

    /// The low-rank pairs of one layer of a fused linear layer: `projections` are its modules and their first output columns.
    pub(crate) fn lora(&self, layer: usize, projections: &[(usize, usize)]) -> Arc<[LoraGroup<'a>]> {
        self.batch
            .groups
            .iter()
            .zip(&self.group_sequences)
            .enumerate()
            .filter_map(|(group, (g, sequences))| {
                let adapter = g.adapter?;
                let projections: Vec<LoraProjection<'a>> = projections
                    .iter()
                    .filter_map(|&(module, first_column)| {
                        let pair = adapter.pair(module)?;
                        let site = LoraSite { group, module, layer };
                        let (a, b, scale) = (pair.a.layer(layer), pair.b.layer(layer), pair.scale);
                        Some(LoraProjection { a, b, scale, first_column, site })
                    })
                    .collect();
                let any = !projections.is_empty() && g.start < g.end;
                any.then(|| LoraGroup { tokens: g.start..g.end, sequences: sequences.clone(), projections })
            })
            .collect()
    }

    /// The low-rank pairs of the embedding, which is this module.
    pub(crate) fn embedding_lora(&self, module: usize) -> Arc<[EmbeddingLora<'a>]> {
        self.batch
            .groups
            .iter()
            .zip(&self.group_sequences)
            .enumerate()
            .filter_map(|(group, (g, sequences))| {
                let adapter = g.adapter.filter(|_| g.start < g.end)?;
                let pair = adapter.embedding()?;
                Some(EmbeddingLora {
                    tokens: g.start..g.end,
                    sequences: sequences.clone(),
                    a: pair.a.row(0),
                    b: pair.b.layer(0),
                    scale: pair.scale,
                    site: LoraSite { group, module, layer: 0 },
                })
            })
            .collect()
    }
}

/// Tokens of a batch that follow the same tokens as others do, if so many that it pays.
pub(crate) fn repeats_of(config: &ModelConfig, batch: &PackedBatch<'_>) -> Option<Repeats> {
    repeats::of(batch, |length| config.family.config().rope().is_long(length))
}

/// Refuses pictures for a model that reads text alone, and such as have other tokens than the sequence has for them.
fn check_images(config: &ModelConfig, batch: &PackedBatch<'_>) -> Result<()> {
    let Some(first) = batch.images.first() else { return Ok(()) };
    let family = config.family.config();
    let (Some(vision), Some(token)) = (family.vision(), family.image_token()) else {
        return Err(Error::Batch(format!("a picture at token {} for a model that reads text alone", first.tokens.start)));
    };
    for image in &batch.images {
        let ImageFeatures { embeddings, deepstack } = image.features;
        let fits = |features: &Tensor| {
            features.shape().row_len() == config.hidden_size && features.rows() >= image.first + image.tokens.len()
        };
        if !fits(embeddings) || !deepstack.iter().all(fits) || deepstack.len() != vision.deepstack.len() {
            let rows = image.first..image.first + image.tokens.len();
            return Err(Error::Batch(format!("a picture of {} has no tokens {rows:?}", embeddings.shape())));
        }
        if let Some(other) = batch.tokens[image.tokens.clone()].iter().find(|&&other| other != token) {
            return Err(Error::Batch(format!("token {other} is in the place of a picture, where {token} is to be")));
        }
    }
    Ok(())
}

/// The angles of a batch: of each sequence those of its length, where that matters.
fn angles(backend: &dyn Backend, family: &dyn FamilyConfig, batch: &PackedBatch<'_>) -> Result<Rotary> {
    let rope = family.rope();
    let axes = batch.positions.each_ref().map(Vec::as_slice);
    let turn = |RopeTable { frequencies, factor }: &RopeTable| {
        let turn = |(pair, &frequency): (usize, &f32)| AxisFrequency { axis: family.axis_of_pair(pair), frequency };
        let turns: Vec<AxisFrequency> = frequencies.iter().enumerate().map(turn).collect();
        backend.rotary_of_axes(&axes, &turns, *factor)
    };
    let any = |long: bool| batch.spans.iter().find(|s| rope.is_long(s.length_max) == long).map(|s| rope.table(s.length_max));
    let (short, long) = match (any(false), any(true)) {
        (Some(short), Some(long)) => (short, long),
        (short, long) => return Ok(turn(&short.or(long).unwrap_or_else(|| rope.table(0)))?),
    };
    let (mut all, of_long) = (turn(&short)?, turn(&long)?);
    for s in batch.spans.iter().filter(|s| rope.is_long(s.length_max)) {
        for (all, of_long) in [(&mut all.cos, &of_long.cos), (&mut all.sin, &of_long.sin)] {
            backend.copy(of_long.as_ref().rows(s.tokens.clone()), all.rows_mut(s.tokens.clone()))?;
        }
    }
    Ok(all)
}
