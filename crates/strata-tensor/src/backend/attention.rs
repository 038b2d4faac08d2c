//! What ops of attention are told: shapes, layouts of projections, sequences.

use std::ops::Range;

use crate::{KvLayout, KvValues, Tensor};

/// One sequence of a packed batch, as attention sees it.
#[derive(Clone, Debug)]
pub struct AttentionSpan<'a> {
    /// Its tokens in the batch.
    pub tokens: Range<usize>,
    /// Positions already in its pages.
    pub past: usize,
    /// Its pages, in order. What is in those that lie before the window of its first new token does not matter.
    pub pages: &'a [u32],
}

/// What a token sees of its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sight {
    /// Itself and the tokens before it.
    #[default]
    Before,
    /// All of it, as in encoders of images: sequences are whole, in no cache, there is no window, and nothing goes back.
    Whole,
}

/// Shapes and settings of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionGeometry {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query and of a key; even.
    pub head_dim: usize,
    /// Values.
    pub values: KvValues,
    /// Factor on the scores, usually `1/√head_dim`.
    pub scale: f32,
    /// Epsilon of the per-head norms.
    pub eps: f32,
    /// How many keys a query sees at most, its own included: one at position `p` those from `p + 1 - window` on. `None`: all up to its own. At least 1.
    pub window: Option<usize>,
    /// Which tokens of its sequence a query sees.
    pub sees: Sight,
}

impl AttentionGeometry {
    /// What pages hold of each token.
    pub fn kv_layout(&self) -> KvLayout {
        KvLayout { kv_heads: self.kv_heads, key_dim: self.head_dim, values: self.values }
    }

    /// Columns of what attention answers.
    pub fn out_width(&self) -> usize {
        self.heads * self.values.width()
    }

    /// The first position that a query at `position` sees.
    pub fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The positions that a query at `position` sees in a sequence of `len` tokens.
    pub(crate) fn visible(&self, position: usize, len: usize) -> Range<usize> {
        match self.sees {
            Sight::Before => self.first_visible(position)..position + 1,
            Sight::Whole => 0..len,
        }
    }

    /// Columns of the fused projection of [`QkvLayout::fused`]: queries, then keys, then values.
    #[cfg(test)]
    pub(crate) fn qkv_width(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.values.width()
    }
}

/// Columns of some heads, each of their width, in a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadColumns {
    /// Where the first head begins.
    pub first: usize,
    /// From where one head begins to where the next does.
    pub stride: usize,
}

/// Columns of `heads` heads of one width in two matrices, from one of which to the other something goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadMove {
    /// Heads.
    pub heads: usize,
    /// Width of each.
    pub width: usize,
    /// Where they come from.
    pub from: HeadColumns,
    /// Where they go.
    pub to: HeadColumns,
}

/// Some outputs of each head of a linear layer from a latent, the matrix beside whose latents they are multiplied, and the latents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadPart {
    /// Heads.
    pub heads: usize,
    /// How many outputs of each.
    pub width: usize,
    /// Which outputs of the layer they are.
    pub outputs: HeadColumns,
    /// Which columns of the matrix of heads, `[tokens, ...]`, belong to them.
    pub columns: HeadColumns,
    /// From one latent to the next in the matrix of latents, `[tokens, heads * stride]`, each at the beginning of its columns.
    pub latent_stride: usize,
}

/// Which way numbers go through the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSide {
    /// From the outputs of heads to a latent for each: `x·W`.
    ToLatents,
    /// From a latent for each head to its outputs: `x·Wᵀ`.
    FromLatents,
}

/// Which way heads turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By their positions.
    Forth,
    /// Gradients, back.
    Back,
}

/// Which numbers of a head turn against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryStyle {
    /// Number `i` and number `i + rotary_dim / 2`, as `rotate_half` of Hugging Face.
    Halves,
    /// Numbers `2i` and `2i + 1`, which come out as `i` and `i + rotary_dim / 2`, as `apply_rotary_pos_emb_interleave` of DeepSeek-V3 there.
    Interleaved,
}

/// Where a fused projection has its heads, and what of them turns with the position. Every column belongs to one head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkvLayout {
    /// Columns of the projection.
    pub width: usize,
    /// Queries.
    pub q: HeadColumns,
    /// Keys.
    pub k: HeadColumns,
    /// Values.
    pub v: HeadColumns,
    /// Gates: what each query head has found is multiplied with the sigmoid of its own (Qwen3-Next). `None` for models without.
    pub gate: Option<HeadColumns>,
    /// How many numbers of a head of queries or keys turn, its first; even. The others stay as they are.
    pub rotary_dim: usize,
    /// Which turn against each other.
    pub rotary_style: RotaryStyle,
}

impl QkvLayout {
    /// All queries, then all keys, then all values; whole heads turn.
    pub fn fused(g: &AttentionGeometry) -> Self {
        Self::of(g, g.head_dim, None)
    }

    /// For each query head its query and then its gate, then all keys, then all values, as Qwen3-Next and Qwen3.5 have them; of heads `rotary_dim` turn.
    pub fn gated(g: &AttentionGeometry, rotary_dim: usize) -> Self {
        let stride = g.head_dim + g.values.width();
        QkvLayout { rotary_dim, ..Self::of(g, stride, Some(HeadColumns { first: g.head_dim, stride })) }
    }

    fn of(g: &AttentionGeometry, query_stride: usize, gate: Option<HeadColumns>) -> Self {
        let (d, keys) = (g.head_dim, g.heads * query_stride);
        let values = keys + g.kv_heads * d;
        QkvLayout {
            width: values + g.kv_heads * g.values.width(),
            q: HeadColumns { first: 0, stride: query_stride },
            k: HeadColumns { first: keys, stride: d },
            v: HeadColumns { first: values, stride: g.values.width() },
            gate,
            rotary_dim: d,
            rotary_style: RotaryStyle::Halves,
        }
    }
}

/// What one pair of numbers of a head turns by: the position on one axis times a frequency in radians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AxisFrequency {
    /// Which of the positions of a token: in text with images time, height or width, say.
    pub axis: usize,
    /// Radians for each position.
    pub frequency: f32,
}

/// Cosines and sines of rotary embedding for the tokens of a batch, `[tokens, rotary_dim / 2]` each, f32.
#[derive(Debug)]
pub struct Rotary {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

/// Queries, keys and values as attention reads them, in the compute dtype.
#[derive(Debug)]
pub struct Qkv {
    /// `[tokens, heads, head_dim]`.
    pub q: Tensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub k: Tensor,
    /// `[tokens, kv_heads, value width]`; `None` if values are the first numbers of keys.
    pub v: Option<Tensor>,
}
