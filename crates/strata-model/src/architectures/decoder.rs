//! What all families are: an embedding, a scan over decoder layers, a norm, an unembedding.

use std::rc::Rc;
use std::sync::Arc;

use strata_tensor::{
    AttentionGeometry, Backend, Between, DELTA_CHUNK, DType, DeltaGeometry, EmbeddingTable, PackedRef, Tape, Tensor, Var,
    WeightFormat, attention_pages_bytes, go_on,
};

use super::blocks::Pass;
use super::declaration::{Declaration, MatrixId, VectorId, Weights};
use super::vision_tower::{ImageBytes, ImageFeatures, VisionTower};
use super::{BatchInputs, Observed, Observer, WeightSource};
use crate::config::Rope;
use crate::kv_cache::{LayerAccess, LayerLayout};
use crate::lora::{LoraModule, Part};
use crate::model::Keeping;
use crate::vision::Patches;
use crate::{Error, KvCache, ModelConfig, Result};

/// What brings the tokens of a sequence together in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mixer {
    /// Attention.
    Attention(AttentionGeometry),
    /// A gated delta net.
    DeltaNet(DeltaGeometry),
}

impl Mixer {
    /// What sequences leave behind.
    fn layout(&self) -> LayerLayout {
        match self {
            Mixer::Attention(g) => LayerLayout::Pages(g.kv_layout()),
            Mixer::DeltaNet(g) => LayerLayout::States(*g),
        }
    }
}

/// The decoder layers of a family.
pub(crate) trait DecoderLayers: Send + Sync {
    /// The half of layer `l` that brings tokens together. `x`: the residual stream, f32 `[tokens, hidden_size]`. Of what comes out there are
    /// the rows that `pass` says.
    fn mix<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        x: &Var,
        past: LayerAccess<'_>,
    ) -> strata_tensor::Result<Var>;

    /// The half that comes after it, in which each row is by itself.
    fn transform<'a>(&self, pass: &Pass<'a>, tape: &mut Tape<'a>, l: usize, x: &Var) -> strata_tensor::Result<Var>;

    /// What layer `l` mixes tokens with.
    fn mixer(&self, l: usize) -> Mixer;

    /// Bytes that a layer of a training pass takes for each token, the residual stream aside: of the layer that takes most.
    fn bytes_per_token(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> LayerBytes;

    /// Bytes for each token of what the experts of a layer keep beside that, where they do; 0 without experts.
    fn experts_bytes_per_token(&self) -> usize {
        0
    }
}

/// Bytes that a layer of a training pass takes for each token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerBytes {
    /// What is kept for the way back.
    pub kept: usize,
    /// That and what goes back, at its peak.
    pub peak: usize,
}

impl LayerBytes {
    /// Of whichever of two layers takes more.
    pub(crate) fn max(self, other: Self) -> Self {
        LayerBytes { kept: self.kept.max(other.kept), peak: self.peak.max(other.peak) }
    }
}

/// What a pass through the decoder leaves behind.
pub(crate) enum Leaves<'c> {
    /// Keys and values, in a cache. Of hidden states only those of the rows that are `answered`, if not all are; they rise.
    Cache { cache: &'c mut KvCache, answered: Option<Rc<[usize]>> },
    /// The way back, if the tape records. Of hidden states only those of the rows that are `answered`, if not all are: whole granules of their sequences, which rise.
    Activations { keeping: Keeping, answered: Option<Rc<[usize]>> },
}

/// The unembedding's place in adapters.
const UNEMBEDDING: &str = "lm_head";
/// The embedding's.
const EMBEDDING: &str = "model.embed_tokens";

/// A declared model.
pub(crate) struct Plan {
    pub(crate) declaration: Declaration,
    layers: Box<dyn DecoderLayers>,
    norm: VectorId,
    lm_head: MatrixId,
    unembed_module: usize,
    embedding_module: usize,
    rope: Rope,
    vision: Option<VisionTower>,
}

impl Plan {
    /// Of a configuration.
    pub(crate) fn of(c: &ModelConfig) -> Self {
        let mut d = Declaration::default();
        // A tied embedding is read into the unembedding, which serves as both.
        if !c.tie_word_embeddings {
            d.table("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
        }
        let tied_head =
            |d: &mut Declaration| d.single_matrix("unembedding", "model.embed_tokens.weight", c.hidden_size, c.vocab_size);
        let tied = c.tie_word_embeddings.then(|| tied_head(&mut d));
        let family = c.family.config();
        let layers = family.declare(&mut d, c);
        let norm = d.single_norm("model.norm.weight", c.hidden_size, family.norm_weights());
        let lm_head = tied.unwrap_or_else(|| d.single_matrix("unembedding", "lm_head.weight", c.hidden_size, c.vocab_size));
        let unembed_module = d.module(UNEMBEDDING, Part::Unembed, c.hidden_size, c.vocab_size);
        // The last, so that fresh adapters, which never have it, are what they were: their numbers depend on places in the list.
        let embedding_module = d.module(EMBEDDING, Part::Embedding, c.vocab_size, c.hidden_size);
        let vision = family.vision().map(|vision| VisionTower::declare(&mut d, vision, c.hidden_size));
        let rope = family.rope().clone();
        Plan { declaration: d, layers, norm, lm_head, unembed_module, embedding_module, rope, vision }
    }

    /// What layer `l` mixes tokens with.
    pub(crate) fn mixer(&self, l: usize) -> Mixer {
        self.layers.mixer(l)
    }
}

/// A model in memory.
pub(crate) struct Decoder {
    plan: Plan,
    weights: Arc<Weights>,
    hidden_size: usize,
    num_layers: usize,
    eps: f32,
    dtype: DType,
}

impl Decoder {
    /// Fills a model from `source`.
    pub(crate) fn load(
        backend: &dyn Backend,
        c: &ModelConfig,
        format: WeightFormat,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let plan = Plan::of(c);
        let weights = plan.declaration.load(backend, format, source)?;
        Ok(Self::new(plan, weights, c, format.compute))
    }

    /// A model whose weights are there.
    pub(crate) fn new(plan: Plan, weights: Weights, c: &ModelConfig, dtype: DType) -> Self {
        let (hidden_size, num_layers) = (c.hidden_size, c.num_layers);
        Decoder { plan, weights: Arc::new(weights), hidden_size, num_layers, eps: c.rms_norm_eps, dtype }
    }

    /// The weights, for whoever reads them on another thread.
    pub(crate) fn shared_weights(&self) -> Arc<Weights> {
        self.weights.clone()
    }

    /// Hidden states after the final norm, `[tokens, hidden_size]` in the compute dtype. Without a cache `between` is called after each layer, in both
    /// directions.
    pub(crate) fn hidden<'a>(
        &'a self,
        tape: &mut Tape<'a>,
        inputs: &Rc<BatchInputs<'a>>,
        mut leaves: Leaves<'_>,
        mut observe: Observer<'_>,
        between: &mut Between<'_>,
    ) -> Result<Var> {
        let weights = &*self.weights;
        let mut pass = Pass {
            weights,
            inputs: inputs.clone(),
            dtype: self.dtype,
            eps: self.eps,
            rows: None,
            answered: None,
            keeps_experts: false,
        };
        let table = match self.weights.table() {
            Some(table) => EmbeddingTable::Rows(table),
            None => EmbeddingTable::Tied(self.unembedding().0),
        };
        let mut see = |what, value: &Tensor| match &mut observe {
            Some(observe) => observe(what, value),
            None => Ok(()),
        };
        let mut x = tape.embedding(table, inputs.embedding_lora(self.plan.embedding_module), &inputs.batch.tokens)?;
        x = tape.replace_rows(x, &inputs.image_rows(|features| Some(&features.embeddings)))?;
        see(Observed::Embeddings, x.value())?;
        let mut l = 0;
        while l < self.num_layers {
            let first = l;
            let mut after = |i: usize, x: &Tensor| -> Result<()> {
                see(Observed::LayerOutput(first + i), x)?;
                Ok(go_on(between)?)
            };
            x = match &mut leaves {
                Leaves::Cache { cache, answered } => {
                    // Nothing but keys and values of the others is needed of the last layer.
                    pass.answered = answered.clone().filter(|_| l + 1 == self.num_layers);
                    let x = self.plan.layers.mix(&pass, tape, l, &x, cache.layer_mut(l))?;
                    pass = pass.after_mixing();
                    let x = self.plan.layers.transform(&pass, tape, l, &x)?;
                    see(Observed::LayerOutput(l), x.value())?;
                    l += 1;
                    x
                }
                Leaves::Activations { keeping, answered } => {
                    let checkpointed = self.num_layers.saturating_sub(keeping.layers.max(1));
                    if first < checkpointed {
                        let count = keeping.every.clamp(1, checkpointed - first);
                        l += count;
                        tape.checkpoint_run(&x, count, self.layers_from(first, &pass), &mut after)?
                    } else {
                        l += 1;
                        pass.answered = answered.clone().filter(|_| l == self.num_layers);
                        pass.keeps_experts = keeping.keeps_experts();
                        let x = tape.keep(&x, |tape, x| self.layers_from(first, &pass)(0, tape, x))?;
                        pass = pass.after_mixing();
                        after(0, x.value())?;
                        x
                    }
                }
            };
            x = tape.add_rows(x, &inputs.deepstack(l - 1))?;
        }
        let x = pass.norm(tape, &x, self.plan.norm, 0)?;
        see(Observed::FinalNorm, x.value())?;
        Ok(x)
    }

    /// Layers of whole sequences, by how many come after `first`; those after it begin with adding what the one before adds of pictures.
    fn layers_from<'a>(
        &'a self,
        first: usize,
        pass: &Pass<'a>,
    ) -> impl Fn(usize, &mut Tape<'a>, &Var) -> strata_tensor::Result<Var> + 'a {
        let (pass, mixed) = (pass.clone(), pass.after_mixing());
        move |i, tape, x| {
            let l = first + i;
            let added = if i > 0 { pass.inputs.deepstack(l - 1) } else { Vec::new() };
            let x = tape.add_rows(x.clone(), &added)?;
            let x = self.plan.layers.mix(&pass, tape, l, &x, LayerAccess::None)?;
            self.plan.layers.transform(&mixed, tape, l, &x)
        }
    }

    /// What a picture is to the decoder.
    ///
    /// # Errors
    /// If the model does not see, or the patches are not those of a picture.
    pub(crate) fn image_features(
        &self,
        backend: &dyn Backend,
        image: &Patches,
        between: &mut Between<'_>,
    ) -> Result<ImageFeatures> {
        match &self.plan.vision {
            Some(tower) => tower.features(backend, &self.weights, self.dtype, image, between),
            None => Err(Error::Batch("the model reads text alone".into())),
        }
    }

    /// As [`crate::Model::image_bytes`].
    pub(crate) fn image_bytes(&self, backend: &dyn Backend) -> ImageBytes {
        let bytes = |tower: &VisionTower| tower.bytes_per_token(backend, self.hidden_size, self.dtype);
        self.plan.vision.as_ref().map_or(ImageBytes::default(), bytes)
    }

    /// The unembedding, and its place among [`Decoder::lora_modules`].
    pub(crate) fn unembedding(&self) -> (PackedRef<'_>, usize) {
        (self.weights.matrix(self.plan.lm_head, 0), self.plan.unembed_module)
    }

    /// What can carry LoRA.
    pub(crate) fn lora_modules(&self) -> &[LoraModule] {
        self.plan.declaration.modules()
    }

    /// Rotary positions.
    pub(crate) fn rope(&self) -> &Rope {
        &self.plan.rope
    }

    /// What sequences leave behind in each layer.
    pub(crate) fn cache_layouts(&self) -> impl Iterator<Item = LayerLayout> {
        self.mixers().map(|mixer| mixer.layout())
    }

    /// What mixes tokens, layer by layer.
    fn mixers(&self) -> impl Iterator<Item = Mixer> {
        (0..self.num_layers).map(|l| self.plan.mixer(l))
    }

    /// Bytes of the weights.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.weights.size_bytes()
    }

    /// As [`crate::Model::train_bytes_per_token`].
    pub(crate) fn train_bytes_per_token(&self, backend: &dyn Backend, keeping: Keeping) -> usize {
        let (wide, narrow) = (DType::F32.size_bytes(), self.dtype.size_bytes());
        // What goes into layers, angles, and the gradient and value of the residual stream on their way.
        let stream = wide * (self.hidden_size * (keeping.checkpoints(self.num_layers) + 2) + self.plan.rope.rotary_dim);
        let layer = self.layer_bytes_per_token(backend).peak;
        // Rows of odd width are copied for products of pairs.
        let copied = self.plan.declaration.widths().filter(|width| width % 2 == 1).max().unwrap_or(0);
        stream + layer + narrow * copied + self.image_bytes(backend).features
    }

    /// Bytes that a layer of a training pass takes for each token, the residual stream aside.
    pub(crate) fn layer_bytes_per_token(&self, backend: &dyn Backend) -> LayerBytes {
        self.plan.layers.bytes_per_token(backend, self.hidden_size, self.dtype)
    }

    /// Bytes for each token of what the experts of a layer keep where [`Keeping::keeps_experts`].
    pub(crate) fn experts_bytes_per_token(&self) -> usize {
        self.plan.layers.experts_bytes_per_token()
    }

    /// What a pass takes whatever its tokens, logits aside.
    pub(crate) fn fixed_bytes(&self, backend: &dyn Backend) -> usize {
        // Of any number of tokens, and of the widest rows that are multiplied.
        let scratch = |width| backend.matmul_scratch_bytes(usize::MAX, width, self.dtype);
        let products = self.plan.declaration.widths().map(scratch).max().unwrap_or(0);
        let mixer = |mixer| match mixer {
            Mixer::Attention(g) => {
                backend.attention_scratch_bytes(&g, self.dtype) + attention_pages_bytes(backend, 1, &g, self.dtype)
            }
            Mixer::DeltaNet(g) => backend.delta_scratch_bytes(&g, DELTA_CHUNK),
        };
        let seeing = self.plan.vision.as_ref().map_or(0, |tower| tower.fixed_bytes(backend, self.dtype));
        // One op at a time has its own.
        self.mixers().map(mixer).max().unwrap_or(0).max(products).max(seeing)
    }
}
