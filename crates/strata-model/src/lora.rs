//! LoRA adapters: their shape, their f32 parameters as stacks, and the copy that matmuls read.
//!
//! LoRA (Hu et al., 2021, arXiv:2106.09685): `y = x·Wᵀ + (alpha / rank) · (x·Aᵀ)·Bᵀ` with `A: [rank, in]` and `B: [out, rank]`.
//! Here B is kept transposed, `[rank, out]`, because its gradient comes out of the matmul that way; checkpoints hold `[out, rank]`.
//!
//! Of an embedding, `y = W[ids] + (alpha / rank) · A[:, ids]ᵀ·Bᵀ` with `A: [rank, vocab]`: here A is kept transposed too, `[vocab, rank]`, because what is read
//! and what gradients are added to is a row for each token.

use std::collections::BTreeMap;
use std::sync::Arc;

use strata_tensor::{Backend, DType, HostRef, Layers, PackedStack, Tensor, random};

use crate::{Error, Result};

/// Which part of a model a LoRA module belongs to; an adapter trains any subset of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Attention projections.
    Attention,
    /// MLP projections.
    Mlp,
    /// The unembedding (`lm_head`).
    Unembed,
    /// The token embedding (`embed_tokens`), a module of its own also where its table is the unembedding's. The API has no name for it: adapters have it that
    /// were read from files.
    Embedding,
}

/// The experts of a layer that have a linear layer each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertModule {
    /// How many there are.
    pub count: usize,
    /// Last part of the Hugging Face path of one: `gate_proj` of `mlp.experts.7.gate_proj`.
    pub projection: &'static str,
    /// What the Tinker tools call it, all experts in one tensor: `w1` of `mlp.experts.w1`.
    pub tinker_name: &'static str,
    /// The parameter that has it in transformers, all experts and more than one projection in one tensor.
    pub fused: FusedRows,
}

/// Some rows, outputs, of a linear layer that adapters may have as a module of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModulePart {
    /// Its path within a decoder layer there.
    pub path: &'static str,
    /// How many.
    pub rows: usize,
}

/// Some rows, outputs, of each expert in a parameter that has all of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedRows {
    /// Its name: `gate_up_proj` of `mlp.experts.gate_up_proj`.
    pub parameter: &'static str,
    /// Rows of an expert, of all that is fused.
    pub rows: usize,
    /// The first that is meant.
    pub first: usize,
    /// From one to the next: 2 where gate and up come by turns.
    pub step: usize,
}

/// A linear layer, or a stack of them, that can carry LoRA; or the token embedding, as the linear layer of its one-hot tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraModule {
    /// Its Hugging Face path within a decoder layer (`self_attn.q_proj`), or within the model for [`Part::Unembed`] and [`Part::Embedding`].
    pub path: &'static str,
    /// The part it belongs to.
    pub part: Part,
    /// Numbers in a checkpoint of the decoder layers that have it, in the order of its stacks; one entry for the unembedding and the embedding.
    pub layers: Vec<usize>,
    /// Of a layer's experts; `None`: a layer has one.
    pub experts: Option<ExpertModule>,
    /// What adapters may have in its place, together all its rows in order: the Tinker tools have some layers that are one in a checkpoint as several, with an A each. Empty for most.
    pub parts: Vec<ModulePart>,
    /// Input features; the size of the vocabulary for [`Part::Embedding`].
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
}

impl LoraModule {
    /// Its name among those of its model: its path, and of experts also which projection, as the Tinker tools call it.
    pub fn name(&self) -> String {
        match self.experts {
            Some(experts) => format!("{}.{}", self.path, experts.tinker_name),
            None => self.path.into(),
        }
    }

    /// Entries of its stacks: one for each layer, or for each expert of each layer.
    pub fn entries(&self) -> usize {
        self.layers.len() * self.entries_of_layer()
    }

    /// Entries of one layer, which are neighbours.
    pub fn entries_of_layer(&self) -> usize {
        self.experts.map_or(1, |experts| experts.count)
    }

    /// Shape of an entry of its stack of A.
    fn shape_of_a(&self, rank: usize) -> [usize; 2] {
        match self.part {
            Part::Attention | Part::Mlp | Part::Unembed => [rank, self.in_features],
            Part::Embedding => [self.in_features, rank],
        }
    }
}

/// The largest rank that is accepted. Memory is set aside at start for the activations of this rank, as far as a model is that wide; beyond it a
/// pair has more numbers than the matrix it adapts in all but the widest models.
pub const RANK_MAX: usize = 1024;

/// A set of modules, by place in the model's list of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModuleSet(u64);

impl ModuleSet {
    /// No modules.
    pub const NONE: ModuleSet = ModuleSet(0);

    /// Adds a module.
    ///
    /// # Panics
    /// If `index` is above 63: architectures have a dozen kinds of linear layers.
    pub fn insert(&mut self, index: usize) {
        assert!(index < 64, "module {index} does not fit in a set of 64");
        self.0 |= 1 << index;
    }

    /// Whether a module is in the set.
    pub fn contains(&self, index: usize) -> bool {
        index < 64 && self.0 >> index & 1 == 1
    }
}

/// Rank and scale of the pairs of one module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairShape {
    /// Rank of each pair.
    pub rank: usize,
    /// The factor of the low-rank product.
    pub scale: f32,
}

/// The shape of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank of every pair; experts have [`LoraConfig::rank`] divided by their number, at least 1.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank`.
    pub alpha: f32,
    /// Whether attention projections carry LoRA.
    pub attention: bool,
    /// Whether MLP projections carry LoRA.
    pub mlp: bool,
    /// Whether the unembedding carries LoRA.
    pub unembed: bool,
    /// Whether the token embedding carries LoRA.
    pub embedding: bool,
    /// Modules without LoRA although their part is trained, as in a PEFT adapter of q and v only.
    pub left_out: ModuleSet,
    /// Modules, by place in the model's list, whose rank or scale is another than these: adapters made elsewhere have some.
    pub own: BTreeMap<usize, PairShape>,
}

impl LoraConfig {
    /// Rank and scale of the pairs of `module`, at place `index` of the model's list.
    pub fn shape_of(&self, index: usize, module: &LoraModule) -> PairShape {
        self.own.get(&index).copied().unwrap_or_else(|| self.common_shape(module))
    }

    /// As [`LoraConfig::shape_of`], of a module that has nothing of its own.
    pub fn common_shape(&self, module: &LoraModule) -> PairShape {
        let rank = module.experts.map_or(self.rank, |experts| (self.rank / experts.count).max(1));
        PairShape { rank, scale: self.scale() }
    }

    /// Rank of the pairs of `module`, at place `index` of the model's list.
    pub fn rank_of(&self, index: usize, module: &LoraModule) -> usize {
        self.shape_of(index, module).rank
    }

    /// The largest rank of a pair.
    pub fn rank_max(&self) -> usize {
        self.own.values().map(|own| own.rank).fold(self.rank, usize::max)
    }

    /// The factor of the low-rank product of modules that have none of their own, experts too: the Tinker tools know one rank and one alpha.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Whether modules of this part carry LoRA.
    pub fn trains(&self, part: Part) -> bool {
        match part {
            Part::Attention => self.attention,
            Part::Mlp => self.mlp,
            Part::Unembed => self.unembed,
            Part::Embedding => self.embedding,
        }
    }

    /// Whether `module`, at place `index` of the model's list, carries LoRA.
    pub fn carries(&self, index: usize, module: &LoraModule) -> bool {
        self.trains(module.part) && !self.left_out.contains(index)
    }

    /// Refuses shapes that no adapter can have.
    ///
    /// # Errors
    /// If a rank is 0 or above [`RANK_MAX`], a scale is not finite, or no part is trained.
    pub fn validate(&self) -> Result<()> {
        let ranks = [self.rank].into_iter().chain(self.own.values().map(|of_module| of_module.rank));
        if let Some(rank) = ranks.into_iter().find(|rank| !(1..=RANK_MAX).contains(rank)) {
            return Err(Error::Lora(format!(
                "rank {rank} is not between 1 and {RANK_MAX}, the ranks that memory is set aside for"
            )));
        }
        if !(self.attention || self.mlp || self.unembed || self.embedding) {
            return Err(Error::Lora("an adapter must train attention, MLP or unembedding; all three are off".into()));
        }
        if !(self.alpha.is_finite()) {
            return Err(Error::Lora(format!("alpha {} is not finite", self.alpha)));
        }
        if let Some(of_module) = self.own.values().find(|of_module| !of_module.scale.is_finite()) {
            return Err(Error::Lora(format!("scale {} is not finite", of_module.scale)));
        }
        Ok(())
    }
}

/// One quantity of one module of an adapter, for all layers.
#[derive(Debug)]
pub struct LoraStack {
    /// `[entries, rank, in_features]`, f32; see [`LoraModule::entries`]. Of the embedding transposed: `[1, vocab_size, rank]`.
    pub a: Tensor,
    /// B transposed: `[entries, rank, out_features]`, f32.
    pub b: Tensor,
}

impl LoraStack {
    /// Zeros of this rank.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub(crate) fn zeros(backend: &dyn Backend, module: &LoraModule, rank: usize) -> Result<Self> {
        let [rows, width] = module.shape_of_a(rank);
        Ok(LoraStack {
            a: backend.zeros(&[module.entries(), rows, width], DType::F32)?,
            b: backend.zeros(&[module.entries(), rank, module.out_features], DType::F32)?,
        })
    }
}

/// One quantity of a whole adapter: its weights, their gradient, or a moment of Adam. All f32.
#[derive(Debug)]
pub struct LoraParams {
    /// For each module of the model, in the model's order: its stacks, or `None` if the adapter leaves it alone.
    pub stacks: Vec<Option<LoraStack>>,
}

impl LoraParams {
    /// Zeros in the shape of an adapter of `config` on a model with `modules`, in memory of `backend`.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub fn zeros(backend: &dyn Backend, modules: &[LoraModule], config: &LoraConfig) -> Result<Self> {
        let stack = |(i, m): (usize, &LoraModule)| match config.carries(i, m) {
            true => LoraStack::zeros(backend, m, config.rank_of(i, m)).map(Some),
            false => Ok(None),
        };
        Ok(LoraParams { stacks: modules.iter().enumerate().map(stack).collect::<Result<_>>()? })
    }

    /// A fresh adapter, as PEFT initialises it: A uniform in ±1/√in_features (Kaiming-uniform with a = √5), B zero; of the embedding A zero, B standard normal.
    /// Each number depends on `seed`, module, layer and place only.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub fn init(backend: &dyn Backend, modules: &[LoraModule], config: &LoraConfig, seed: u64) -> Result<Self> {
        let mut params = Self::zeros(backend, modules, config)?;
        for (index, (module, stack)) in modules.iter().zip(&mut params.stacks).enumerate() {
            let Some(stack) = stack else { continue };
            if module.part == Part::Embedding {
                let key = [seed, (index as u64) << 32];
                let values: Vec<f32> = (0..stack.b.shape().len() as u64).map(|place| random::normal(key, place)).collect();
                backend.upload(HostRef::from_f32(&values, &[values.len()])?, stack.b.as_mut())?;
                continue;
            }
            let bound = 1.0 / (module.in_features as f32).sqrt();
            let mut values = vec![0.0; config.rank_of(index, module) * module.in_features];
            for layer in 0..module.entries() {
                let key = [seed, (index as u64) << 32 | layer as u64];
                random::fill_symmetric(key, bound, &mut values);
                backend.upload(HostRef::from_f32(&values, &[values.len()])?, stack.a.row_mut(layer))?;
            }
        }
        Ok(params)
    }

    /// A copy of its own.
    ///
    /// # Errors
    /// If the backend has no memory.
    pub fn duplicate(&self, backend: &dyn Backend) -> Result<Self> {
        let copy = |s: &LoraStack| Ok(LoraStack { a: backend.duplicate(s.a.as_ref())?, b: backend.duplicate(s.b.as_ref())? });
        Ok(LoraParams { stacks: self.stacks.iter().map(|s| s.as_ref().map(copy).transpose()).collect::<Result<_>>()? })
    }

    /// Sets every number to zero.
    ///
    /// # Errors
    /// If the backend refuses.
    pub fn fill_zero(&mut self, backend: &dyn Backend) -> Result<()> {
        self.tensors_mut().try_for_each(|t| Ok(backend.fill_zero(t.as_mut())?))
    }

    /// All tensors, A before B, module after module.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.stacks.iter().flatten().flat_map(|s| [&s.a, &s.b])
    }

    /// All tensors, mutable, in the order of [`LoraParams::tensors`].
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.stacks.iter_mut().flatten().flat_map(|s| [&mut s.a, &mut s.b])
    }

    /// Bytes of memory held.
    pub fn size_bytes(&self) -> usize {
        self.tensors().map(Tensor::size_bytes).sum()
    }
}

/// A module's low-rank pair in the layout and dtype that matmuls read.
pub(crate) struct PackedPair {
    /// `in → rank`, one layer after another.
    pub a: PackedStack,
    /// `rank → out`.
    pub b: PackedStack,
    /// The factor of their product.
    pub scale: f32,
}

/// The embedding's low-rank pair as it is computed with.
pub(crate) struct EmbeddingPair {
    /// `[1, vocab_size, rank]` in the base's dtype.
    pub a: Tensor,
    /// `rank → hidden_size`.
    pub b: PackedStack,
    /// The factor of their product.
    pub scale: f32,
}

/// An adapter ready to compute with: immutable, cheap to share, rounded to the base model's dtype. A sampler's snapshot is one of these.
pub struct Adapter {
    config: LoraConfig,
    pairs: Vec<Option<PackedPair>>,
    embedding: Option<EmbeddingPair>,
}

impl Adapter {
    /// Packs `params` for a model whose matmuls run in `dtype`.
    ///
    /// # Errors
    /// If a stack does not have the shape its module asks for, or the backend has no memory.
    pub fn pack(
        backend: &dyn Backend,
        dtype: DType,
        modules: &[LoraModule],
        config: LoraConfig,
        params: &LoraParams,
    ) -> Result<Arc<Self>> {
        let (mut shapes, mut embedding) = (Vec::new(), None);
        for (index, (module, stack)) in modules.iter().zip(&params.stacks).enumerate() {
            let Some(stack) = stack else { continue };
            let shape = config.shape_of(index, module);
            if module.part == Part::Embedding {
                embedding = Some(pack_embedding(backend, dtype, module, shape, stack)?);
            } else {
                shapes.push([module.entries(), module.in_features, shape.rank]);
                shapes.push([module.entries(), shape.rank, module.out_features]);
            }
        }
        let mut packed = backend.packed_together(&shapes, dtype.into())?;
        let of_pairs = modules.iter().zip(&params.stacks).filter(|(module, _)| module.part != Part::Embedding);
        let numbers = of_pairs.filter_map(|(_, stack)| stack.as_ref());
        let numbers: Vec<_> =
            numbers.flat_map(|stack| [Layers::Rows(stack.a.as_ref()), Layers::Columns(stack.b.as_ref())]).collect();
        backend.pack_stacks(&mut packed, &numbers)?;
        let mut packed = packed.into_iter();
        let mut pairs = Vec::with_capacity(modules.len());
        for (index, (module, stack)) in modules.iter().zip(&params.stacks).enumerate() {
            let is_pair = stack.is_some() && module.part != Part::Embedding;
            pairs.push(is_pair.then(|| {
                let (a, b) = packed.next().zip(packed.next()).expect("there are two for each pair");
                PackedPair { a, b, scale: config.shape_of(index, module).scale }
            }));
        }
        Ok(Arc::new(Adapter { config, pairs, embedding }))
    }

    /// The shape of the adapter.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Bytes of memory held.
    pub fn size_bytes(&self) -> usize {
        let embedding = self.embedding.as_ref().map_or(0, |p| p.a.size_bytes() + p.b.size_bytes());
        embedding + self.pairs.iter().flatten().map(|p| p.a.size_bytes() + p.b.size_bytes()).sum::<usize>()
    }

    /// The pair of a linear layer.
    pub(crate) fn pair(&self, module: usize) -> Option<&PackedPair> {
        self.pairs[module].as_ref()
    }

    /// The pair of the embedding.
    pub(crate) fn embedding(&self) -> Option<&EmbeddingPair> {
        self.embedding.as_ref()
    }
}

/// Rounds the embedding's pair to `dtype`.
fn pack_embedding(
    backend: &dyn Backend,
    dtype: DType,
    module: &LoraModule,
    PairShape { rank, scale }: PairShape,
    stack: &LoraStack,
) -> Result<EmbeddingPair> {
    let shape = [1, module.in_features, rank];
    if stack.a.shape().dims() != shape {
        return Err(Error::Lora(format!("A of {} has shape {}, not {shape:?}", module.path, stack.a.shape())));
    }
    let mut a = backend.zeros(&shape, dtype)?;
    backend.convert(&stack.a, &mut a)?;
    let mut b = backend.packed(1, rank, module.out_features, dtype.into())?;
    backend.pack_columns(&mut b, 0, stack.b.row(0))?;
    Ok(EmbeddingPair { a, b, scale })
}
