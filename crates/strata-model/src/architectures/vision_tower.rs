//! The tower that sees, as `Qwen3VLVisionModel` of transformers computes it: patches, embedded with where they lie, through blocks in which every patch of a picture sees every other,
//! and four neighbours at a time to what a token's embedding is. What some blocks have seen goes into the first layers of the decoder as well (DeepStack, arXiv:2406.04334).
//!
//! It is frozen: nothing goes back through it, and it computes on the same ops as the decoder, with no tape to record them.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::OnceLock;

use strata_tensor::{
    AttentionGeometry, AttentionInput, AttentionSpan, AxisFrequency, Backend, Between, DType, Gelu, HostRef, KV_PAGE_TOKENS,
    KvAccess, KvValues, Linear, QkvLayout, Sight, Tape, Tensor, Var, attention_pages_bytes, go_on,
};

use super::declaration::{Declaration, MatrixId, VectorId, Weights};
use crate::config::fields::{Fields, check_size, unsupported, wrong_kind};
use crate::config::{HEAD_DIM_MAX, HIDDEN_SIZE_MAX, INTERMEDIATE_SIZE_MAX, NUM_HEADS_MAX, NUM_LAYERS_MAX};
use crate::vision::{Grid, ImageProcessor, Patches};
use crate::{Error, ModelConfig, Result};

/// Epsilon of the tower's norms.
const EPS: f32 = 1e-6;
/// The most places that positions are embedded for.
const POSITIONS_MAX: usize = 1 << 16;
/// The largest side of a patch in pixels, and of what is merged in patches.
const PATCH_SIZE_MAX: usize = 64;
const MERGE_SIZE_MAX: usize = 8;
/// Channels of a picture.
const CHANNELS: usize = 3;

/// A tower that sees.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width of a patch.
    pub hidden_size: usize,
    /// Width between the layers of a block's MLP.
    pub intermediate_size: usize,
    /// Heads of attention.
    pub num_heads: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames of a patch.
    pub temporal_patch_size: usize,
    /// Patches along a side of what becomes a token.
    pub merge_size: usize,
    /// Places that positions are embedded for, a square of them.
    pub num_positions: usize,
    /// Blocks whose patches go into the decoder's first layers too, in order.
    pub deepstack: Vec<usize>,
    /// What lies between the layers of a block's MLP.
    pub activation: Gelu,
    /// Base of the frequencies by which heads turn.
    pub rope_theta: f64,
}

impl VisionConfig {
    /// Reads a `vision_config`, whose tokens are to be as wide as `hidden_size` of the decoder.
    pub(super) fn read(fields: &Fields<'_>, model_type: &str, hidden_size: usize) -> Result<Self> {
        // Old checkpoints have the composite's type here.
        let composite = model_type.trim_end_matches("_vision");
        if let Some(other) = fields.get("model_type").filter(|value| *value != model_type && *value != composite) {
            return Err(unsupported("vision_config.model_type", other, &format!("{model_type:?}")));
        }
        let activation = match fields.get("hidden_act").map_or(Some("gelu_pytorch_tanh"), |act| act.as_str()) {
            Some("gelu_pytorch_tanh") => Gelu::Tanh,
            Some("gelu") => Gelu::Erf,
            _ => {
                let act = fields.get("hidden_act").expect("an activation that is absent is the default");
                return Err(unsupported("vision_config.hidden_act", act, "\"gelu_pytorch_tanh\", \"gelu\""));
            }
        };
        let channels = fields.size("in_channels", CHANNELS, CHANNELS)?;
        let out = fields.size("out_hidden_size", 3584, HIDDEN_SIZE_MAX)?;
        if (channels, out) != (CHANNELS, hidden_size) {
            return Err(Error::Config(format!(
                "vision_config has in_channels {channels} and out_hidden_size {out}; supported: {CHANNELS}, and hidden_size {hidden_size} of the text"
            )));
        }
        let empty = serde_json::Map::new();
        let rope = match fields.get("rope_parameters") {
            None => &empty,
            Some(value) => value.as_object().ok_or_else(|| wrong_kind("vision_config.rope_parameters", value, "an object"))?,
        };
        let rope = Fields { map: rope };
        if let Some(kind) = rope.get("rope_type").filter(|kind| **kind != "axial" && **kind != "default") {
            return Err(unsupported("vision_config.rope_parameters.rope_type", kind, "\"axial\""));
        }
        let deepstack = match fields.get("deepstack_visual_indexes") {
            None => vec![8, 16, 24],
            Some(value) => {
                let blocks: Option<Vec<usize>> =
                    value.as_array().filter(|list| list.len() <= NUM_LAYERS_MAX).and_then(|list| {
                        list.iter().map(|block| block.as_u64().and_then(|block| usize::try_from(block).ok())).collect()
                    });
                blocks.ok_or_else(|| wrong_kind("vision_config.deepstack_visual_indexes", value, "a list of blocks"))?
            }
        };
        Ok(VisionConfig {
            depth: fields.size("depth", 27, NUM_LAYERS_MAX)?,
            hidden_size: fields.size("hidden_size", 1152, HIDDEN_SIZE_MAX)?,
            intermediate_size: fields.size("intermediate_size", 4304, INTERMEDIATE_SIZE_MAX)?,
            num_heads: fields.size("num_heads", 16, NUM_HEADS_MAX)?,
            patch_size: fields.size("patch_size", 16, PATCH_SIZE_MAX)?,
            temporal_patch_size: fields.size("temporal_patch_size", 2, MERGE_SIZE_MAX)?,
            merge_size: fields.size("spatial_merge_size", 2, MERGE_SIZE_MAX)?,
            num_positions: fields.size("num_position_embeddings", 2304, POSITIONS_MAX)?,
            deepstack,
            activation,
            rope_theta: rope.number("rope_theta", 10_000.0)?,
        })
    }

    /// Refuses sizes and combinations that no tower can have.
    pub(super) fn validate(&self, model: &ModelConfig) -> Result<()> {
        let (width, heads) = (self.hidden_size, self.num_heads);
        if !width.is_multiple_of(heads) || !(width / heads).is_multiple_of(4) {
            return Err(Error::Config(format!(
                "vision_config has {heads} heads of hidden_size {width}; heads turn by rows and columns, and are a multiple of four wide"
            )));
        }
        check_size("vision_config head_dim", (width / heads) as u64, HEAD_DIM_MAX)?;
        let side = self.num_positions.isqrt();
        if side * side != self.num_positions {
            return Err(Error::Config(format!("num_position_embeddings {} is not a square", self.num_positions)));
        }
        let ascending = self.deepstack.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || self.deepstack.last().is_some_and(|&last| last >= self.depth) {
            let (blocks, depth) = (&self.deepstack, self.depth);
            return Err(Error::Config(format!("deepstack_visual_indexes {blocks:?} are not blocks of {depth} in order")));
        }
        if self.deepstack.len() > model.num_layers {
            let (blocks, layers) = (self.deepstack.len(), model.num_layers);
            return Err(Error::Config(format!("{blocks} deepstack_visual_indexes for num_hidden_layers {layers}")));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(Error::Config(format!("rope_theta {} of vision_config is not a positive number", self.rope_theta)));
        }
        Ok(())
    }

    /// What pictures are cut into, unless a file says more.
    pub(crate) fn processor(&self) -> ImageProcessor {
        ImageProcessor::new(self.patch_size, self.temporal_patch_size, self.merge_size)
    }

    /// Numbers of a patch.
    fn patch_len(&self) -> usize {
        CHANNELS * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    fn geometry(&self) -> AttentionGeometry {
        let head_dim = self.hidden_size / self.num_heads;
        AttentionGeometry {
            heads: self.num_heads,
            kv_heads: self.num_heads,
            head_dim,
            values: KvValues::Own(head_dim),
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            eps: EPS,
            window: None,
            sees: Sight::Whole,
        }
    }

    /// By what the pairs of a head turn: the first half of them by rows, the second by columns.
    fn turns(&self) -> Vec<AxisFrequency> {
        let half = self.hidden_size / self.num_heads / 2;
        let of_axis = |axis| {
            let frequency = move |i| 1.0 / (self.rope_theta as f32).powf(i as f32 / half as f32);
            (0..half).step_by(2).map(move |i| AxisFrequency { axis, frequency: frequency(i) })
        };
        of_axis(0).chain(of_axis(1)).collect()
    }
}

/// What a picture is to the decoder.
pub struct ImageFeatures {
    /// In the place of the embeddings of its tokens, f32 `[tokens, hidden_size]`.
    pub embeddings: Tensor,
    /// What is added to the outputs of the first layers at its tokens, of the same shape.
    pub deepstack: Vec<Tensor>,
}

/// Bytes that pictures take for each of their tokens, at most; 0 for a model that reads text alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageBytes {
    /// Of what is seen of them, [`ImageFeatures`].
    pub features: usize,
    /// At the peak of seeing them, patches and features included.
    pub seeing: usize,
}

/// A frozen layer with a bias.
struct Layer {
    weight: MatrixId,
    bias: VectorId,
}

struct Norm {
    weight: VectorId,
    bias: VectorId,
}

/// What makes one token of neighbouring patches; of several mergers, the entries of a stack.
struct Merger {
    norm: Norm,
    fc1: Layer,
    fc2: Layer,
}

/// The weights of a tower.
pub(crate) struct VisionTower {
    config: VisionConfig,
    patch_embed: Layer,
    pos_embed: VectorId,
    norm1: Norm,
    norm2: Norm,
    qkv: Layer,
    proj: Layer,
    fc1: Layer,
    fc2: Layer,
    merger: Merger,
    deepstack: Option<Merger>,
    /// The embeddings of places, once they were asked for.
    places: OnceLock<Vec<f32>>,
}

impl VisionTower {
    pub(super) fn declare(d: &mut Declaration, c: &VisionConfig, out: usize) -> Self {
        let (width, patch) = (c.hidden_size, c.patch_size);
        let merged = width * c.merge_size * c.merge_size;
        let layer = |d: &mut Declaration, label, prefix: &dyn Fn(usize) -> String, count, shape: &[usize]| Layer {
            weight: d.frozen_matrices(label, (0..count).map(|i| prefix(i) + ".weight"), shape),
            bias: d.frozen_vectors((0..count).map(|i| prefix(i) + ".bias"), &shape[..1]),
        };
        let norm = |d: &mut Declaration, prefix: &dyn Fn(usize) -> String, count, width: usize| Norm {
            weight: d.frozen_vectors((0..count).map(|i| prefix(i) + ".weight"), &[width]),
            bias: d.frozen_vectors((0..count).map(|i| prefix(i) + ".bias"), &[width]),
        };
        let block = |part: &'static str| move |i: usize| format!("model.visual.blocks.{i}.{part}");
        let merger = |d: &mut Declaration, prefix: &dyn Fn(usize) -> String, count, norm_width| Merger {
            norm: norm(d, &|i| prefix(i) + ".norm", count, norm_width),
            fc1: layer(d, "merger fc1", &|i| prefix(i) + ".linear_fc1", count, &[merged, merged]),
            fc2: layer(d, "merger fc2", &|i| prefix(i) + ".linear_fc2", count, &[out, merged]),
        };
        let patch_shape = [width, CHANNELS, c.temporal_patch_size, patch, patch];
        VisionTower {
            config: c.clone(),
            patch_embed: layer(d, "patches", &|_| "model.visual.patch_embed.proj".into(), 1, &patch_shape),
            pos_embed: d.frozen_vectors(["model.visual.pos_embed.weight".into()].into_iter(), &[c.num_positions, width]),
            norm1: norm(d, &block("norm1"), c.depth, width),
            norm2: norm(d, &block("norm2"), c.depth, width),
            qkv: layer(d, "vision q+k+v", &block("attn.qkv"), c.depth, &[3 * width, width]),
            proj: layer(d, "vision o", &block("attn.proj"), c.depth, &[width, width]),
            fc1: layer(d, "vision fc1", &block("mlp.linear_fc1"), c.depth, &[c.intermediate_size, width]),
            fc2: layer(d, "vision fc2", &block("mlp.linear_fc2"), c.depth, &[width, c.intermediate_size]),
            merger: merger(d, &|_| "model.visual.merger".into(), 1, width),
            deepstack: (!c.deepstack.is_empty())
                .then(|| merger(d, &|i| format!("model.visual.deepstack_merger_list.{i}"), c.deepstack.len(), merged)),
            places: OnceLock::new(),
        }
    }

    /// Bytes for each token of a picture. `hidden_size`: of the decoder.
    pub(crate) fn bytes_per_token(&self, backend: &dyn Backend, hidden_size: usize, dtype: DType) -> ImageBytes {
        let (c, g) = (&self.config, self.config.geometry());
        let (wide, narrow, merged) = (DType::F32.size_bytes(), dtype.size_bytes(), c.merge_size * c.merge_size);
        let (width, cut) = (c.hidden_size, c.patch_len());
        let features = wide * hidden_size * (1 + c.deepstack.len());
        // A patch as it was given, where it lies, by what it turns, and the residual stream; and beside them what most is needed for of the following.
        let always = wide * cut + 4 * size_of::<usize>() + wide * g.head_dim + wide * width;
        let embedding = (wide + narrow) * cut + 2 * wide * width;
        let pages = attention_pages_bytes(backend, KV_PAGE_TOKENS * 64, &g, dtype) / (KV_PAGE_TOKENS * 64);
        let attention = 3 * wide * width + 2 * narrow * width + pages;
        let mlp = narrow * width + (wide + narrow) * c.intermediate_size;
        let merging = 2 * (wide + narrow) * width;
        // Rows of odd width are copied for products.
        let copied = [cut, c.intermediate_size].into_iter().filter(|width| width % 2 == 1).max().unwrap_or(0);
        let patch = always + embedding.max(attention).max(mlp).max(merging) + narrow * copied;
        // The features as they are made, and as they are kept.
        ImageBytes { features, seeing: features + wide * hidden_size + merged * patch }
    }

    /// What a picture takes whatever its size.
    pub(crate) fn fixed_bytes(&self, backend: &dyn Backend, dtype: DType) -> usize {
        let g = self.config.geometry();
        backend.attention_scratch_bytes(&g, dtype) + attention_pages_bytes(backend, 1, &g, dtype)
    }

    /// What a picture is to the decoder. `dtype`: of the inputs of products. `between` is called after each block.
    pub(crate) fn features(
        &self,
        backend: &dyn Backend,
        weights: &Weights,
        dtype: DType,
        image: &Patches,
        between: &mut Between<'_>,
    ) -> Result<ImageFeatures> {
        let (c, n) = (&self.config, image.grid.patches());
        let merged = c.merge_size * c.merge_size;
        let fits = image.grid.height.is_multiple_of(c.merge_size) && image.grid.width.is_multiple_of(c.merge_size);
        if n == 0 || !fits || image.values.len() != n.saturating_mul(c.patch_len()) {
            let (values, len) = (image.values.len(), c.patch_len());
            return Err(Error::Batch(format!("{values} numbers of patches of {len} in a grid of {:?}", image.grid)));
        }
        let positions = places(&image.grid, c.merge_size);
        let mut tape = Tape::inference(backend);
        // What is not needed any more is not held: a picture's patches are many.
        let mut x = {
            let embedded = {
                let embedded = self.embed_places(backend, weights, &positions, &image.grid)?;
                upload(backend, &embedded, &[n, c.hidden_size], DType::F32)?
            };
            let patches = tape.constant(upload(backend, &image.values, &[n, c.patch_len()], dtype)?);
            let x = self.linear(weights, &mut tape, &patches, &self.patch_embed, 0)?;
            tape.add_rows(x, &[(0..n, embedded.as_ref())])?
        };
        let axes = [0, 1].map(|axis| positions.iter().map(|place| place[axis] as u32).collect::<Vec<u32>>());
        let rotary = Rc::new(backend.rotary_of_axes(&[&axes[0], &axes[1]], &c.turns(), 1.0)?);
        // Frames do not see each other.
        let of_frame = image.grid.height * image.grid.width;
        let frame = |f: usize| AttentionSpan { tokens: f * of_frame..(f + 1) * of_frame, past: 0, pages: &[] };
        let spans: Rc<[AttentionSpan<'_>]> = (0..image.grid.time).map(frame).collect();
        let geometry = c.geometry();
        let input = AttentionInput {
            geometry,
            layout: QkvLayout::fused(&geometry),
            sinks: None,
            norms: None,
            rotary,
            spans,
            queries: None,
        };
        let mut deepstack = Vec::new();
        for block in 0..c.depth {
            let a = {
                let h = self.norm(weights, &mut tape, &x, &self.norm1, block, dtype)?;
                let qkv = self.linear(weights, &mut tape, &h, &self.qkv, block)?;
                tape.attention(&qkv, &input, KvAccess::None, dtype)?
            };
            x = tape.add_linear(&x, &a, frozen(weights, &self.proj, block))?;
            drop(a);
            let m = {
                let h = self.norm(weights, &mut tape, &x, &self.norm2, block, dtype)?;
                let m = self.linear(weights, &mut tape, &h, &self.fc1, block)?;
                tape.gelu(&m, c.activation, dtype)?
            };
            x = tape.add_linear(&x, &m, frozen(weights, &self.fc2, block))?;
            drop(m);
            if let (Some(mergers), Ok(place)) = (&self.deepstack, c.deepstack.binary_search(&block)) {
                let wide = tape.reshape(x.clone(), &[n / merged, merged * c.hidden_size])?;
                let h = self.norm(weights, &mut tape, &wide, &mergers.norm, place, dtype)?;
                deepstack.push(self.merge((backend, weights), &mut tape, &h, (mergers, place), dtype)?);
            }
            go_on(between)?;
        }
        let h = self.norm(weights, &mut tape, &x, &self.merger.norm, 0, dtype)?;
        let wide = tape.reshape(h, &[n / merged, merged * c.hidden_size])?;
        let embeddings = self.merge((backend, weights), &mut tape, &wide, (&self.merger, 0), dtype)?;
        Ok(ImageFeatures { embeddings, deepstack })
    }

    fn merge<'a>(
        &self,
        (backend, weights): (&dyn Backend, &'a Weights),
        tape: &mut Tape<'a>,
        h: &Var,
        (merger, place): (&Merger, usize),
        dtype: DType,
    ) -> Result<Tensor> {
        let m = self.linear(weights, tape, h, &merger.fc1, place)?;
        let m = tape.gelu(&m, Gelu::Erf, dtype)?;
        let out = self.linear(weights, tape, &m, &merger.fc2, place)?;
        Ok(backend.duplicate(out.value().as_ref())?)
    }

    fn linear<'a>(&self, weights: &'a Weights, tape: &mut Tape<'a>, x: &Var, layer: &Layer, i: usize) -> Result<Var> {
        Ok(tape.linear(x, frozen(weights, layer, i))?)
    }

    fn norm<'a>(&self, weights: &'a Weights, tape: &mut Tape<'a>, x: &Var, norm: &Norm, i: usize, dtype: DType) -> Result<Var> {
        Ok(tape.layer_norm(x, weights.vector(norm.weight, i), weights.vector(norm.bias, i), EPS, dtype)?)
    }

    /// The embeddings of where patches lie, between the places that there are embeddings for: bilinear, corners on corners.
    fn embed_places(
        &self,
        backend: &dyn Backend,
        weights: &Weights,
        positions: &[[usize; 2]],
        grid: &Grid,
    ) -> Result<Vec<f32>> {
        let (side, width) = (self.config.num_positions.isqrt(), self.config.hidden_size);
        let table = match self.places.get() {
            Some(table) => table,
            None => {
                let table = backend.to_f32_vec(weights.vector(self.pos_embed, 0))?;
                self.places.get_or_init(|| table)
            }
        };
        let taps = |index: usize, size: usize| {
            let at = index as f32 * (side - 1) as f32 / (size - 1).max(1) as f32;
            let (first, part) = (at.floor() as usize, at - at.floor());
            [(first.min(side - 1), 1.0 - part), ((first + 1).min(side - 1), part)]
        };
        let mut out = Vec::with_capacity(positions.len() * width);
        for &[row, column] in positions {
            let (rows, columns) = (taps(row, grid.height), taps(column, grid.width));
            let four = rows.into_iter().flat_map(|(row, a)| columns.map(|(column, b)| (row * side + column, a * b)));
            let four: Vec<(usize, f32)> = four.collect();
            out.extend((0..width).map(|i| four.iter().map(|&(place, weight)| table[place * width + i] * weight).sum::<f32>()));
        }
        Ok(out)
    }
}

fn frozen<'a>(weights: &'a Weights, layer: &Layer, i: usize) -> Linear<'a> {
    Linear { weight: weights.matrix(layer.weight, i), bias: Some(weights.vector(layer.bias, i)), lora: Arc::new([]) }
}

/// Row and column of each patch, in the order of patches: those that are merged are neighbours.
fn places(grid: &Grid, merge: usize) -> Vec<[usize; 2]> {
    let mut places = Vec::with_capacity(grid.patches());
    for _ in 0..grid.time {
        for top in (0..grid.height).step_by(merge) {
            for left in (0..grid.width).step_by(merge) {
                places.extend((0..merge * merge).map(|i| [top + i / merge, left + i % merge]));
            }
        }
    }
    places
}

/// Values in memory of the backend, rounded to `dtype`.
fn upload(backend: &dyn Backend, values: &[f32], shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut wide = backend.zeros(shape, DType::F32)?;
    backend.upload(HostRef::from_f32(values, shape)?, wide.as_mut())?;
    if dtype == DType::F32 {
        return Ok(wide);
    }
    let mut narrow = backend.zeros(shape, dtype)?;
    backend.convert(&wide, &mut narrow)?;
    Ok(narrow)
}
