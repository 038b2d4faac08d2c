//! What every device must do: memory-to-memory forms of the fused ops, with shapes already checked.
//!
//! The ops of this crate, and the model and the optimizer that call the few that are no part of a tape, check shapes and indices first; a backend may panic at what
//! they refuse. They also see to what a backend could only find out at a cost: the sequences of a batch do not overlap, and no two of
//! them write one page of a cache, so that threads may write without looking at each other.

mod attention;
mod delta;

use crate::memory::Memory;
use crate::moe::{Dispatch, Experts, KeptExperts, Routing};
use crate::tape::{EmbeddingLora, Linear};
use crate::{DType, KvPages, PackedRef, RecurrentStates, Result, Tensor, TensorMut, TensorRef};

pub use attention::*;
pub use delta::*;

/// Tokens of a granule. A reduction over tokens, on any device, takes the tokens of a sequence by so many at a time, in whatever order within them, and begins
/// a granule with each sequence: so what is reduced in several parts has the same bits if it is cut between granules. It is what a matrix unit takes in one step
/// (AMX and tensor cores 16 or 32 numbers of bf16).
pub const TOKEN_GRANULE: usize = 32;

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

/// Which GELU (Hendrycks & Gimpel, 2016, arXiv:1606.08415).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `x * (1 + erf(x / √2)) / 2`: `gelu` of Hugging Face, `nn.GELU()`.
    Erf,
    /// `x * (1 + tanh(√(2 / π) * (x + 0.044715 * x³))) / 2`: `gelu_pytorch_tanh`.
    Tanh,
}

/// Accumulators of the gradients of one low-rank pair, f32.
pub struct LoraGradient<'a> {
    /// Of A: `[rank, in]`, or `[vocab_size, rank]` of an embedding.
    pub a: TensorMut<'a>,
    /// Of B transposed: `[rank, out]`.
    pub b: TensorMut<'a>,
}

/// What [`Backend::linear`] keeps for its backward: for each group and projection, in order, `scale · x·Aᵀ` in the compute dtype, `[tokens, rank]`; and
/// [`Backend::embedding_lora`], for each pair, `scale · A[ids]`. One behind the other in one allocation: where many adapters share a batch, there are hundreds of a few numbers each.
#[derive(Default)]
pub struct LowProducts {
    /// Of all of them; `None` if there are none.
    pub(crate) numbers: Option<Tensor>,
    /// Rows and rank of each.
    pub(crate) shapes: Vec<[usize; 2]>,
}

impl LowProducts {
    /// Which of the numbers each has.
    pub(crate) fn parts(&self) -> impl Iterator<Item = ([usize; 2], std::ops::Range<usize>)> {
        let ends = self.shapes.iter().scan(0, |end, &[rows, rank]| {
            *end += rows * rank;
            Some(*end)
        });
        self.shapes.iter().copied().zip(ends).map(|(shape, end)| (shape, end - shape[0] * shape[1]..end))
    }
}

/// Target tokens, any number for each row; one may occur twice in a row.
#[derive(Clone, Copy)]
pub struct LogprobTargets<'t> {
    /// Token ids, row after row.
    pub ids: &'t [u32],
    /// `offsets[r]..offsets[r + 1]` are the targets of row `r`; `[rows + 1]`, from 0 to the number of targets.
    pub offsets: &'t [usize],
}

/// What is wanted of the prediction in one row of logits. By default nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowRequest {
    /// Tokens whose log-probabilities are wanted.
    pub ids: Vec<u32>,
    /// How many of the most probable tokens are wanted.
    pub top: usize,
    /// Tokens to draw.
    pub draw: Option<Draw>,
}

/// How to draw tokens from a row of logits. The order of filters is temperature, top-k, top-p; top-p counts probability among what top-k left.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// What logits are divided by; 0 takes the most probable token, of equals that of the lowest id.
    pub temperature: f32,
    /// Draw among this many of the most probable tokens only.
    pub top_k: Option<usize>,
    /// Draw among the fewest of the most probable tokens whose probability is at least this; 1 draws among all.
    pub top_p: f32,
    /// A number from [0, 1) for each token to draw.
    pub uniforms: Vec<f64>,
}

/// What was asked of a row with a [`RowRequest`]. Log-probabilities are at temperature 1, whatever the settings of a draw, and have the bits that
/// [`Backend::target_logprobs`] gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowReply {
    /// Of the ids that were asked for.
    pub logprobs: Vec<f32>,
    /// The most probable tokens with theirs, best first; of equals the lower id first.
    pub top: Vec<(u32, f32)>,
    /// The tokens that were drawn with theirs.
    pub drawn: Vec<(u32, f32)>,
}

/// A device that computes the fused ops.
///
/// # Errors
/// Of every method that answers a `Result`, unless it says more: [`Error::OutOfMemory`](crate::Error::OutOfMemory) and whatever else a device refuses, and
/// [`Error::ForeignMemory`](crate::Error::ForeignMemory) for operands of another backend. Outputs are then unspecified, those that are added to included.
pub trait Backend: Memory + Send + Sync {
    /// What it is, for people: `cpu avx512-bf16, 2 threads`.
    fn description(&self) -> String;

    /// The order in which products of bf16 are added: `portable`, or `fast` and whose order it is. Backends that say the same compute the same bits.
    fn numerics(&self) -> String;

    /// Bytes of scratch that a product takes beside its operands, whose left side has so many rows of this width and dtype.
    fn matmul_scratch_bytes(&self, rows: usize, width: usize, dtype: DType) -> usize;

    /// Bytes of scratch that [`Backend::attention`] and its gradient take beside their inputs and outputs, however many tokens there are. `dtype` is that of
    /// queries, keys and values.
    fn attention_scratch_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize;

    /// Bytes that the gradient takes for each token of the longest sequence, where that is more than [`Backend::attention_scratch_bytes`].
    fn attention_gradient_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize;

    /// Refuses numbers of heads, and widths of them, that [`Backend::attention`] and what goes with it cannot compute.
    ///
    /// # Errors
    /// Names the geometry and the limit.
    fn check_attention(&self, g: &AttentionGeometry) -> Result<()>;

    /// `y = x·Wᵀ + bias`, f32 `[tokens, out_features]`, for `x: [tokens, in_features]` in the weight's dtype; then all low-rank products, in their order:
    /// `y[tokens, columns] += (scale · x·Aᵀ)·Bᵀ`, the product in brackets rounded to the dtype of `x`. Without `y` only what its way back needs.
    fn linear(&self, x: &Tensor, layer: &Linear<'_>, y: Option<&mut Tensor>) -> Result<LowProducts>;

    /// [`Backend::swiglu`] of [`Backend::linear`] into `y: [tokens, out_features / 2]`, to the bit, and if something goes back the value of the layer into `kept: [tokens, out_features]`; answers what
    /// the layer's way back needs. A device that has no faster way than both in turn leaves them to its caller, and `y` and `kept` as they are.
    fn linear_swiglu(
        &self,
        _x: &Tensor,
        _layer: &Linear<'_>,
        _kept: Option<&mut Tensor>,
        _y: &mut Tensor,
    ) -> Result<Option<LowProducts>> {
        Ok(None)
    }

    /// The way back of [`Backend::linear`], for `dy: [tokens, out_features]` in the dtype of `x`: `dx = dy·W + Σ (scale · dy[tokens, columns]·B)·A`, f32
    /// `[tokens, in_features]`, if it is wanted. Adds to the gradients of the pairs, one for each group and projection, in order, sequence after sequence.
    fn linear_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        layer: &Linear<'_>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dx: Option<&mut Tensor>,
    ) -> Result<()>;

    /// Rows `ids` of `table: [vocab, hidden]`, as f32.
    fn embedding(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()>;

    /// Rows `ids` of a packed table, as f32.
    fn embedding_packed(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()>;

    /// Adds low-rank products to f32 `y: [tokens, hidden]`, in their order: `y[tokens] += (scale · A[ids])·Bᵀ`, the product in brackets rounded to the dtype of A
    /// and B. `ids` are those of all tokens; no two pairs are of one token.
    fn embedding_lora(&self, ids: &[u32], lora: &[EmbeddingLora<'_>], y: &mut Tensor) -> Result<LowProducts>;

    /// Adds to the gradients of the pairs of [`Backend::embedding_lora`], one for each in order, for `dy: [tokens, hidden]` in their dtype. That of B is a sum over
    /// tokens as in [`Backend::linear_backward`]. That of row `id` of A is one chain of additions, of `scale · dy·B` in f32, from the first of the tokens that have this id
    /// to the last, sequence after sequence.
    fn embedding_lora_backward(
        &self,
        dy: &Tensor,
        ids: &[u32],
        low: &LowProducts,
        lora: &[EmbeddingLora<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()>;

    /// RMSNorm of every row of f32 `x` with f32 `weight`, into the dtype of `y`.
    fn rms_norm(&self, x: &Tensor, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()>;

    /// Adds to f32 `dx` the gradient of [`Backend::rms_norm`] by its input.
    fn rms_norm_backward(&self, dy: &Tensor, x: &Tensor, weight: TensorRef<'_>, eps: f32, dx: &mut Tensor) -> Result<()>;

    /// LayerNorm of every row of f32 `x` with f32 `weight` and `bias`, into the dtype of `y`.
    fn layer_norm(&self, x: &Tensor, weight: TensorRef<'_>, bias: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()>;

    /// Cosines and sines for these positions, times `factor`: angles are f32 products of a position and a frequency in radians, one for each pair of a head.
    fn rotary(&self, positions: &[u32], frequencies: &[f32], factor: f32) -> Result<Rotary> {
        let turns: Vec<AxisFrequency> = frequencies.iter().map(|&frequency| AxisFrequency { axis: 0, frequency }).collect();
        self.rotary_of_axes(&[positions], &turns, factor)
    }

    /// As [`Backend::rotary`], for tokens that have a position on each of several axes; each pair of a head turns by one of them. Qwen3-VL: text and what images
    /// become by time, height and width, in an order of the model's own; patches by height in the first half of the pairs and by width in the second.
    ///
    /// # Errors
    /// If axes differ in the number of tokens, or a pair turns by one that is not there.
    fn rotary_of_axes(&self, positions: &[&[u32]], turns: &[AxisFrequency], factor: f32) -> Result<Rotary>;

    /// Splits f32 `qkv: [tokens, layout.width]`, normalises heads of q and k where weights are given, and rotates them.
    fn norm_rotate(
        &self,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        out: &mut Qkv,
    ) -> Result<()>;

    /// [`Backend::norm_rotate`] of [`Backend::linear`], to the bit, under the terms of [`Backend::linear_swiglu`].
    #[allow(clippy::too_many_arguments)]
    fn linear_norm_rotate(
        &self,
        _x: &Tensor,
        _layer: &Linear<'_>,
        _norms: Option<[TensorRef<'_>; 2]>,
        _rotary: &Rotary,
        _g: &AttentionGeometry,
        _layout: &QkvLayout,
        _kept: Option<&mut Tensor>,
        _out: &mut Qkv,
    ) -> Result<Option<LowProducts>> {
        Ok(None)
    }

    /// Gradient of [`Backend::norm_rotate`] by its input, into the dtype of `dqkv`; `gradient` is f32. Columns of gates are left alone.
    #[allow(clippy::too_many_arguments)]
    fn norm_rotate_backward(
        &self,
        gradient: &Qkv,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dqkv: &mut Tensor,
    ) -> Result<()>;

    /// Writes the keys and values of all new tokens to the pages of their sequences, one page to one sequence.
    fn write_kv(&self, qkv: &Qkv, g: &AttentionGeometry, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> Result<()>;

    /// Attention of all new queries over the pages of their sequences. A query sees what was written up to its own position, from the first that its
    /// window leaves, or with [`Sight::Whole`] all that was written of its sequence, and nothing else: what lies outside, of its sequence or left by others, does not reach its result, be it infinite or NaN. Pages before the
    /// window of every query are not read. The softmax of head `h` has one more term, `exp(sinks[h])`, that has no value (f32 `[heads]`; gpt-oss). `out`
    /// is `[tokens, heads, value width]` in the dtype of `q`; `log_normalizers: [tokens, heads]`, f32, of the softmax with its sink.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        q: &Tensor,
        g: &AttentionGeometry,
        sinks: Option<TensorRef<'_>>,
        spans: &[AttentionSpan<'_>],
        pages: &KvPages,
        out: &mut Tensor,
        log_normalizers: &mut Tensor,
    ) -> Result<()>;

    /// Gradients of causal attention over whole sequences (nothing cached); `dout` and `gradient` are f32. That of keys has both parts where they are values too. Sinks are frozen, and what they do is in `log_normalizers`.
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
    ) -> Result<()>;

    /// `silu(gate) * up` of every row of f32 `gate_up: [tokens, 2 * n]`, into the dtype of `y: [tokens, n]`.
    fn swiglu(&self, gate_up: &Tensor, y: &mut Tensor) -> Result<()>;

    /// Gradient of [`Backend::swiglu`] by its input, into the dtype of `dgate_up`; `dy` is f32.
    fn swiglu_backward(&self, dy: &Tensor, gate_up: &Tensor, dgate_up: &mut Tensor) -> Result<()>;

    /// `gelu(x)` of every element of f32 `x`, into the dtype of `y`.
    fn gelu(&self, x: &Tensor, kind: Gelu, y: &mut Tensor) -> Result<()>;

    /// `y = x` in the dtype of `y`: f32 rounded for a matmul, or widened back.
    fn convert(&self, x: &Tensor, y: &mut Tensor) -> Result<()>;

    /// `y += x`, f32 of as many elements.
    fn add(&self, x: TensorRef<'_>, y: TensorMut<'_>) -> Result<()>;

    /// Log-probabilities of the targets of every row of f32 `logits: [rows, vocab]`. Also writes the logarithm of the sum of the exponentials of
    /// each row to `log_normalizers: [rows]`, f32, for [`Backend::logits_gradient`].
    fn target_logprobs(&self, logits: &Tensor, targets: LogprobTargets<'_>, log_normalizers: &mut Tensor) -> Result<Vec<f32>>;

    /// The gradient of a loss by logits, into the dtype of `dlogits`, from its derivatives `gradient` by the log-probabilities of the targets: for each
    /// row `Σ_k g_k (1[v = id_k] − p_v)` over its targets `k`.
    fn logits_gradient(
        &self,
        logits: TensorRef<'_>,
        log_normalizers: TensorRef<'_>,
        targets: LogprobTargets<'_>,
        gradient: &[f32],
        dlogits: &mut Tensor,
    ) -> Result<()>;

    /// What `requests[i]` asks of row `rows[i]` of f32 `logits: [rows, vocab]`; `None` where a row's logits are not finite numbers.
    fn read_logits(&self, logits: &Tensor, rows: &[usize], requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>>;

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

    /// `y = attended * sigmoid(gate)`, `[tokens, heads * head_dim]` in the dtype of `attended` (`head_dim` is here that of values), with the gates of f32 `qkv: [tokens, layout.width]`.
    ///
    /// # Panics
    /// If the layout has no gate.
    fn gate_heads(
        &self,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        y: &mut Tensor,
    ) -> Result<()>;

    /// Gradients of [`Backend::gate_heads`], given f32 `dy`: f32 `dattended`, and the columns of gates of `dqkv`.
    #[allow(clippy::too_many_arguments)]
    fn gate_heads_backward(
        &self,
        dy: &Tensor,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dattended: &mut Tensor,
        dqkv: &mut Tensor,
    ) -> Result<()>;

    /// The experts that every row of f32 `logits: [tokens, experts]` chooses, `[tokens, top_k]`, best first. Writes what they weigh to f32 `weights: [tokens, top_k]`.
    fn route(&self, logits: &Tensor, routing: &Routing<'_>, weights: &mut Tensor) -> Result<Vec<u32>>;

    /// Gradient of [`Backend::route`] by the logits, given that of the weights; all f32.
    fn route_backward(
        &self,
        dweights: &Tensor,
        logits: &Tensor,
        routing: &Routing<'_>,
        experts: &[u32],
        dlogits: &mut Tensor,
    ) -> Result<()>;

    /// What the experts make of `x: [tokens, hidden]` in their dtype, f32 `y: [tokens, hidden]`: for each token the sum over those that it has chosen, in the order of
    /// experts. `weights` is f32 `[tokens, top_k]`. Answers what is kept of it, if the layer keeps something and the device can.
    fn experts(
        &self,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        y: &mut Tensor,
    ) -> Result<Option<KeptExperts>>;

    /// The way back of [`Backend::experts`], for `dy: [tokens, hidden]` in the dtype of `x`: writes f32 `dweights: [tokens, top_k]`, and f32 `dx: [tokens, hidden]` if it is
    /// wanted. What was not kept is computed again, to the same bits. Adds to the gradients of the pairs, `[num_experts, rank, width]`, one for each group and projection of `gate_up` and then of `down`, in order.
    #[allow(clippy::too_many_arguments)]
    fn experts_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        kept: Option<&KeptExperts>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dweights: &mut Tensor,
        dx: Option<&mut Tensor>,
    ) -> Result<()>;

    /// `sigmoid(gate) * x` of every row of f32 `x: [tokens, n]` with f32 `gates: [tokens, 1]`, into the dtype of `y`.
    fn sigmoid_gate(&self, x: &Tensor, gates: &Tensor, y: &mut Tensor) -> Result<()>;

    /// Gradients of [`Backend::sigmoid_gate`] by both inputs; all f32.
    fn sigmoid_gate_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gates: &Tensor,
        dx: &mut Tensor,
        dgates: &mut Tensor,
    ) -> Result<()>;

    /// Rotates the heads of f32 `x` to columns of `y`, in its dtype; a head is all that turns. Other columns of `y` are left alone.
    fn rotate_heads(
        &self,
        x: &Tensor,
        heads: &HeadMove,
        rotary: &Rotary,
        style: RotaryStyle,
        turn: Turn,
        y: &mut Tensor,
    ) -> Result<()>;

    /// RMSNorm of heads of f32 `x` with f32 `weight: [width]` to columns of `y`, in its dtype. Other columns of `y` are left alone.
    fn norm_heads(&self, x: &Tensor, heads: &HeadMove, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()>;

    /// Gradient of [`Backend::norm_heads`] by `x`, to the columns of `dx` that its heads come from, in the dtype of `dx`; `dy` is f32.
    fn norm_heads_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        heads: &HeadMove,
        weight: TensorRef<'_>,
        eps: f32,
        dx: &mut Tensor,
    ) -> Result<()>;

    /// Multiplies each head of `x` with its part of a layer of latents, whose low-rank pairs are added as in [`Backend::linear`] and
    /// [`Backend::linear_backward`], the product between them rounded to the dtype of `x`. `x` has the dtype of the weight, and `y`, whose other columns
    /// are left alone, any. `x` and `y` are the matrices of heads and of latents of `part`, or the other way round. The gradient by `x` is the same with the
    /// other side.
    fn head_linear(&self, x: &Tensor, layer: &Linear<'_>, part: &HeadPart, side: HeadSide, y: &mut Tensor) -> Result<()>;

    /// Adds to the gradients of the pairs of [`Backend::head_linear`], of either side, given what is multiplied and the gradient of the product: one of them is a
    /// matrix of heads and one of latents, both in the dtype of the weight. Sequence after sequence, and in each token after token, the heads of each in order.
    fn head_linear_gradients(
        &self,
        heads: &Tensor,
        latents: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()>;

    /// Refuses shapes that [`Backend::delta_rule`] and what goes with it cannot compute.
    ///
    /// # Errors
    /// Names the geometry and the limit.
    fn check_delta(&self, g: &DeltaGeometry) -> Result<()>;

    /// Bytes of scratch that the ops of the gated delta rule take beside their inputs and outputs, for sequences of at most `tokens` tokens, forward and back.
    fn delta_scratch_bytes(&self, g: &DeltaGeometry, tokens: usize) -> usize;

    /// Splits f32 `projection: [tokens, projection_width]`: causal convolution of queries, keys and values with SiLU, begun from the last inputs of each
    /// sequence or from zeros; heads of q and k to unit length (epsilon 1e-6 under the root) and q by `1/√k_dim`; `beta = sigmoid(b)` and
    /// `g = -exp(a_log) * softplus(a + dt_bias)`. Leaves the last inputs of sequences with a slot there.
    fn delta_inputs(
        &self,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut DeltaInputs,
    ) -> Result<()>;

    /// Gradient of [`Backend::delta_inputs`] over whole sequences, into all columns of `dprojection` but those of the gate, in its dtype. `gradient` is left
    /// unspecified.
    fn delta_inputs_backward(
        &self,
        gradient: &mut DeltaInputs,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        dprojection: &mut Tensor,
    ) -> Result<()>;

    /// The gated delta rule: for each token and value head, in the order of the sequence, `S = exp(g) S; S += kᵀ (beta (v - k S)); out = q S`, computed in chunks of
    /// [`DELTA_CHUNK`](crate::DELTA_CHUNK) tokens. `out` is f32 `[tokens, v_heads * v_dim]`. A token sees its own and earlier ones of its sequence and nothing else. A sequence of
    /// `past` zero begins from nothing, whatever is in its slot.
    fn delta_rule(
        &self,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut Tensor,
    ) -> Result<()>;

    /// Gradients of [`Backend::delta_rule`] over whole sequences; `dout` is f32.
    fn delta_rule_backward(
        &self,
        dout: &Tensor,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        gradient: &mut DeltaInputs,
    ) -> Result<()>;

    /// `weight * rms_norm(x) * silu(z)` for every head of f32 `x: [tokens, v_heads * v_dim]`, with `z` from its columns of the projection, into the dtype of `y`.
    fn gated_norm(
        &self,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        y: &mut Tensor,
    ) -> Result<()>;

    /// Gradients of [`Backend::gated_norm`] by `x`, into f32 `dx`, and by `z`, into its columns of `dprojection`, in its dtype; `dy` is f32.
    #[allow(clippy::too_many_arguments)]
    fn gated_norm_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        dx: &mut Tensor,
        dprojection: &mut Tensor,
    ) -> Result<()>;
}
