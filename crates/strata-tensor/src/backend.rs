//! What every device must do: memory-to-memory forms of the fused ops, with shapes already checked.
//!
//! Methods panic where an index is out of bounds; the ops of this crate, which are their only callers outside a backend, check first
//! and return errors. They also see to what a backend could only find out at a cost: the sequences of a batch do not overlap, and no two of
//! them write one page of a cache, so that threads may write without looking at each other.

use std::ops::Range;

use crate::{DType, KvPages, PackedRef, PackedStack, Result, Tensor, TensorMut, TensorRef};

/// Tokens of a granule. A reduction over tokens, on any device, takes the tokens of a sequence by so many at a time, in whatever order within them, and begins
/// a granule with each sequence: so what is reduced in several parts has the same bits if it is cut between granules. It is what a matrix unit takes in one step
/// (AMX and tensor cores 16 or 32 numbers of bf16).
pub const TOKEN_GRANULE: usize = 32;

/// Some rows and columns of a matrix `[rows, columns]`.
#[derive(Clone)]
pub struct Block<'a> {
    /// The matrix.
    pub tensor: &'a Tensor,
    /// The rows.
    pub rows: Range<usize>,
    /// The columns.
    pub columns: Range<usize>,
}

impl<'a> Block<'a> {
    /// All of a matrix; further axes count as columns.
    pub fn whole(tensor: &'a Tensor) -> Self {
        Block { tensor, rows: 0..tensor.rows(), columns: 0..tensor.shape().row_len() }
    }

    /// Some rows of a matrix.
    pub fn rows(tensor: &'a Tensor, rows: Range<usize>) -> Self {
        Block { tensor, rows, columns: 0..tensor.shape().row_len() }
    }
}

/// Where in an output matrix a product goes, and whether it adds to what is there.
#[derive(Clone)]
pub struct Target {
    /// First row.
    pub first_row: usize,
    /// First column.
    pub first_column: usize,
    /// Whether to add instead of overwrite.
    pub accumulate: bool,
}

impl Target {
    /// The whole output, overwritten.
    pub fn overwrite() -> Self {
        Target { first_row: 0, first_column: 0, accumulate: false }
    }
}

/// One sequence of a packed batch, as attention sees it.
#[derive(Clone, Debug)]
pub struct AttentionSpan<'a> {
    /// Its tokens in the batch.
    pub tokens: Range<usize>,
    /// Positions already in its pages.
    pub past: usize,
    /// Its pages, in order.
    pub pages: &'a [u32],
}

/// Shapes and settings of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionGeometry {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Factor on the scores, usually `1/√head_dim`.
    pub scale: f32,
    /// Epsilon of the per-head norms.
    pub eps: f32,
}

impl AttentionGeometry {
    /// Columns of the fused projection: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Cosines and sines of rotary embedding for the tokens of a batch, `[tokens, head_dim / 2]` each, f32.
#[derive(Debug)]
pub struct Rotary {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

/// Queries, keys and values after per-head norm and rotary embedding, in the compute dtype.
#[derive(Debug)]
pub struct Qkv {
    /// `[tokens, heads, head_dim]`.
    pub q: Tensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub k: Tensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub v: Tensor,
}

/// Hyperparameters of one AdamW step. They stay f64 until they have become factors: in f32, 1 - 0.999 is off in its fifth digit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient, from clipping its norm.
    pub gradient_scale: f32,
    /// Which step this is, from 1.
    pub step: u64,
}

/// A device that computes the fused ops.
pub trait Backend: Send + Sync {
    /// What it is, for people: `cpu avx512-bf16, 2 threads`.
    fn description(&self) -> String;

    /// Bytes of scratch that a product takes beside its operands, whose left side has so many rows of this width and dtype.
    fn matmul_scratch_bytes(&self, rows: usize, width: usize, dtype: DType) -> usize;

    /// Bytes of scratch that [`Backend::attention`] and its gradient take beside their inputs and outputs, however many tokens there are; what
    /// the gradient takes for each token of one long sequence is at most `(heads + 1) * head_dim` f32 numbers five times over. `dtype` is that of queries, keys and values.
    fn attention_scratch_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize;

    /// Refuses numbers of heads, and widths of them, that [`Backend::attention`] and what goes with it cannot compute.
    ///
    /// # Errors
    /// Names the geometry and the limit.
    fn check_attention(&self, g: &AttentionGeometry) -> Result<()>;

    /// Writes `rows: [n, in_features]` as outputs `first_output..first_output + n` of a layer of packed weights.
    fn pack_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: TensorRef<'_>) -> Result<()>;

    /// Writes `columns: [in_features, out_features]` (the transposed weight) as a layer of packed weights.
    fn pack_columns(&self, stack: &mut PackedStack, layer: usize, columns: TensorRef<'_>) -> Result<()>;

    /// `y = x·Wᵀ`, f32, into a place of `y`.
    fn matmul(&self, x: Block<'_>, w: PackedRef<'_>, y: &mut Tensor, target: Target);

    /// `dx = dy·W`, f32, into a place of `dx`.
    fn matmul_transposed(&self, dy: Block<'_>, w: PackedRef<'_>, dx: &mut Tensor, target: Target);

    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]`, adding sequence after sequence; `sequences` are rows counted
    /// from the first of the blocks.
    fn matmul_weight_gradient(&self, low: Block<'_>, x: Block<'_>, sequences: &[Range<usize>], dw: TensorMut<'_>);

    /// Rows `ids` of `table: [vocab, hidden]`, as f32.
    fn embedding(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor);

    /// Rows `ids` of a packed table, as f32.
    fn embedding_packed(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor);

    /// RMSNorm of every row of f32 `x` with f32 `weight`, into the dtype of `y`.
    fn rms_norm(&self, x: &Tensor, weight: TensorRef<'_>, eps: f32, y: &mut Tensor);

    /// Adds to f32 `dx` the gradient of [`Backend::rms_norm`] by its input.
    fn rms_norm_backward(&self, dy: &Tensor, x: &Tensor, weight: TensorRef<'_>, eps: f32, dx: &mut Tensor);

    /// Cosines and sines for these positions: frequencies `theta^(-2i/head_dim)` as Hugging Face computes them, in f32.
    fn rotary(&self, positions: &[u32], head_dim: usize, theta: f64) -> Rotary;

    /// Splits f32 `qkv: [tokens, qkv_width]`, normalises heads of q and k where weights are given, and rotates them.
    fn norm_rotate(
        &self,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        out: &mut Qkv,
    );

    /// Gradient of [`Backend::norm_rotate`] by its input, into the dtype of `dqkv`; `gradient` is f32.
    fn norm_rotate_backward(
        &self,
        gradient: &Qkv,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        dqkv: &mut Tensor,
    );

    /// Writes the keys and values of all new tokens to the pages of their sequences, one page to one sequence.
    fn write_kv(&self, qkv: &Qkv, g: &AttentionGeometry, spans: &[AttentionSpan<'_>], pages: &mut KvPages);

    /// Causal attention of all new queries over the pages of their sequences. A query sees what was written up to its own position and nothing else:
    /// what lies further on, of its sequence or left by others, does not reach its result, be it infinite or NaN. `out` is as `q`; `log_normalizers: [tokens, heads]`, f32.
    fn attention(
        &self,
        q: &Tensor,
        g: &AttentionGeometry,
        spans: &[AttentionSpan<'_>],
        pages: &KvPages,
        out: &mut Tensor,
        log_normalizers: &mut Tensor,
    );

    /// Gradients of attention over whole sequences (nothing cached); `dout` and `gradient` are f32.
    #[allow(clippy::too_many_arguments)]
    fn attention_backward(
        &self,
        dout: &Tensor,
        qkv: &Qkv,
        out: &Tensor,
        log_normalizers: &Tensor,
        g: &AttentionGeometry,
        spans: &[AttentionSpan<'_>],
        gradient: &mut Qkv,
    );

    /// `silu(gate) * up` of every row of f32 `gate_up: [tokens, 2 * n]`, into the dtype of `y: [tokens, n]`.
    fn swiglu(&self, gate_up: &Tensor, y: &mut Tensor);

    /// Gradient of [`Backend::swiglu`] by its input, into the dtype of `dgate_up`; `dy` is f32.
    fn swiglu_backward(&self, dy: &Tensor, gate_up: &Tensor, dgate_up: &mut Tensor);

    /// `y = x * scale`, from f32 to the dtype of `y`.
    fn convert(&self, x: &Tensor, scale: f32, y: &mut Tensor);

    /// `y += x`, f32.
    fn add(&self, x: &Tensor, y: &mut Tensor);

    /// Adds f32 `bias: [columns]` to every row of f32 `y`.
    fn add_bias(&self, bias: TensorRef<'_>, y: &mut Tensor);

    /// Logarithm of the sum of the exponentials of every row of f32 `logits`.
    fn log_normalizers(&self, logits: &Tensor) -> Vec<f32>;

    /// The gradient of a loss by logits, into the dtype of `dlogits`: for row `r`, `Σ_k g_k (1[v = id_k] − p_v)` over its pairs
    /// `(id_k, g_k)`, `terms[r]`.
    fn logits_gradient(&self, logits: &Tensor, log_normalizers: &[f32], terms: &[Vec<(u32, f32)>], dlogits: &mut Tensor);

    /// Calls `visit(i, row, log_normalizer)` for every row of f32 `logits`, from several threads.
    fn visit_rows(&self, logits: &Tensor, visit: &(dyn Fn(usize, &[f32], f32) + Sync));

    /// One AdamW step (Loshchilov & Hutter, 2019, arXiv:1711.05101) over a stack, all f32; clears `gradient`.
    fn adamw(
        &self,
        step: &AdamwStep,
        weights: &mut Tensor,
        gradient: &mut Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
    ) -> Result<()>;

    /// Sum of the squares of all elements of an f32 tensor, in a fixed order, in f64.
    fn sum_squares(&self, tensor: &Tensor) -> Result<f64>;
}
