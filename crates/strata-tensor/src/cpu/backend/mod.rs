//! The backend of the processor: splits each op over threads and picks the element type.
//!
//! [`memory`] has what belongs to memory, [`delta`] layers of gated delta rule, [`embedding`] rows of tables, [`encoder`] what encoders of images have beside decoders, [`linear`] linear layers with their low-rank additions, [`heads`] those of which each head has a part, [`rotation`] norms, rotation and gates of heads, [`experts`] mixtures
//! of experts, [`logits`] what is asked of logits.

mod delta;
mod embedding;
mod encoder;
mod experts;
mod heads;
mod linear;
mod logits;
mod memory;
mod rotation;

use std::ops::Range;

use super::attention::{self, AttentionGradient};
use super::isa::{Arithmetic, Isa, Numerics};
use super::matmul::{self, Matmul, TileKernel};
use super::rows::rope::MAX_HEAD_DIM;
use super::rows::{adamw, convert, norm, swiglu};
use super::threads::{Pool, SharedMut};
use crate::backend::*;
use crate::moe::{Dispatch, Experts, KeptExperts, Routing};
use crate::tape::{EmbeddingLora, Linear};
use crate::{DType, Element, Error, KvPages, KvValues, PackedRef, RecurrentStates, Result, Tensor, TensorMut, TensorRef};
use linear::PairGradient;
use memory::{pages, pages_mut};
use rotation::norm_slices;

/// What the fused projection of a model has.
const OWN_VALUES: &str = "a fused projection has values of its own";
/// Elements of a row op that are worth a task of their own: some microseconds of streaming.
const TASK_ELEMENTS: usize = 16 << 10;
/// Elements in a piece of a sum over a tensor; part of the order of the sum.
const SUM_PIECE: usize = 4096;

/// Runs `$body` with `$t` standing for the Rust type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::BF16 => {
                type $t = half::bf16;
                $body
            }
        }
    };
}

pub(crate) use with_element;

/// The processor: an instruction set and a pool of threads.
pub struct CpuBackend {
    isa: Isa,
    arithmetic: Arithmetic,
    pool: Pool,
}

impl CpuBackend {
    /// As [`CpuBackend::with_numerics`], as fast as can be.
    ///
    /// # Errors
    /// As there.
    pub fn new(num_threads: Option<usize>) -> Result<Self> {
        Self::with_numerics(num_threads, Numerics::Fast)
    }

    /// The best instruction set of this machine, or the one that `STRATA_ISA` names, on `num_threads` threads (`None`: one for each core).
    ///
    /// # Errors
    /// If `STRATA_ISA` names an instruction set that this machine does not have, or the system has not so many threads to give.
    pub fn with_numerics(num_threads: Option<usize>, numerics: Numerics) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (arithmetic, num_threads) = (Arithmetic { isa: Isa::from_env()?, numerics }, num_threads.unwrap_or(cores));
        let pool = Pool::try_new(num_threads)
            .map_err(|error| Error::Unsupported(format!("{num_threads} threads that compute: {error}")))?;
        Ok(CpuBackend { isa: arithmetic.isa, arithmetic, pool })
    }

    /// This instruction set, or arithmetic, on this many threads.
    ///
    /// # Panics
    /// If this machine does not have the instructions, or so many threads to give.
    pub fn with_isa(arithmetic: impl Into<Arithmetic>, num_threads: usize) -> Self {
        let arithmetic = arithmetic.into();
        assert!(arithmetic.isa.is_available(), "this machine has no {}", arithmetic.isa);
        CpuBackend { isa: arithmetic.isa, arithmetic, pool: Pool::new(num_threads) }
    }

    fn matmul_for(&self, dtype: DType) -> Matmul<'_> {
        Matmul::new(&self.pool, self.arithmetic, dtype)
    }

    /// `y = x * scale`, rounded.
    fn scale_into<T: Element>(&self, x: &[f32], scale: f32, y: &mut [T]) {
        let y = SharedMut::new(y);
        self.over_rows(x.len(), 1, |range| {
            // SAFETY: tasks have ranges of their own.
            let y = unsafe { rows_mut(&y, &range, 1) };
            convert::scale(self.isa, &x[range], scale, y);
        });
    }

    /// Splits `rows` rows of `row_len` elements into runs, one task each.
    fn over_rows(&self, rows: usize, row_len: usize, body: impl Fn(Range<usize>) + Sync) {
        let run = (TASK_ELEMENTS / row_len.max(1)).max(1);
        self.pool.run(rows.div_ceil(run), &|task| body(task * run..((task + 1) * run).min(rows)));
    }
}

/// Rows `rows` of an output that tasks share.
///
/// # Safety
/// No two tasks may take the same rows.
#[allow(clippy::mut_from_ref)]
unsafe fn rows_mut<'a, T>(shared: &'a SharedMut<T>, rows: &Range<usize>, row_len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { shared.part(rows.start * row_len..rows.end * row_len) }
}

impl Backend for CpuBackend {
    fn description(&self) -> String {
        format!("cpu {}, {} threads", self.arithmetic, self.pool.num_threads())
    }

    fn attention_scratch_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        with_element!(dtype, T => attention::scratch_bytes::<T>(g, self.pool.num_threads()))
    }

    fn attention_gradient_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        with_element!(dtype, T => attention::gradient_bytes_per_token::<T>(g))
    }

    fn numerics(&self) -> String {
        match TileKernel::new(self.arithmetic, DType::BF16) {
            // It rounds products before it adds them, in all else.
            TileKernel::Granules(_) if self.isa == Isa::Portable => format!("{} {}", Numerics::Portable.name(), self.isa),
            TileKernel::Granules(_) => Numerics::Portable.name().to_string(),
            TileKernel::Chains(_) => format!("{} {}", Numerics::Fast.name(), self.isa),
        }
    }

    fn matmul_scratch_bytes(&self, rows: usize, width: usize, dtype: DType) -> usize {
        matmul::scratch_bytes(&TileKernel::new(self.arithmetic, dtype), rows, width, dtype, self.pool.num_threads())
    }

    fn check_attention(&self, g: &AttentionGeometry) -> Result<()> {
        if g.window == Some(0) {
            return Err(Error::Unsupported("attention with a window of 0 keys: a query sees its own at least".into()));
        }
        if let (Sight::Whole, Some(window)) = (g.sees, g.window) {
            return Err(Error::Unsupported(format!("attention to whole sequences in a window of {window} keys")));
        }
        let grouped = g.heads > 0 && g.kv_heads > 0 && g.heads.is_multiple_of(g.kv_heads);
        let widths = 1..=if let KvValues::PrefixOfKey(_) = g.values { g.head_dim } else { MAX_HEAD_DIM };
        let of_width = g.head_dim.is_multiple_of(2) && (2..=MAX_HEAD_DIM).contains(&g.head_dim);
        if grouped && of_width && widths.contains(&g.values.width()) {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "attention with {} heads, {} kv heads of width {}, values {:?}: heads must be a multiple of kv heads, their width even and at most {MAX_HEAD_DIM}, and values are not wider than that, or than keys that they are a part of",
            g.heads, g.kv_heads, g.head_dim, g.values
        )))
    }

    fn linear(&self, x: &Tensor, layer: &Linear<'_>, y: Option<&mut Tensor>) -> Result<LowProducts> {
        self.forward_linear(x, layer, y)
    }

    fn linear_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        layer: &Linear<'_>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let gradients = gradients.iter_mut().map(|g| g.as_mut().map(PairGradient::new).transpose());
        self.backward_linear(dy, x, low, layer, gradients.collect::<Result<_>>()?, dx)
    }

    fn embedding(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        self.rows_of_table(table, ids, out)
    }

    fn embedding_packed(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        self.rows_of_packed_table(table, ids, out)
    }

    fn embedding_lora(&self, ids: &[u32], lora: &[EmbeddingLora<'_>], y: &mut Tensor) -> Result<LowProducts> {
        self.forward_embedding_lora(ids, lora, y)
    }

    fn embedding_lora_backward(
        &self,
        dy: &Tensor,
        ids: &[u32],
        low: &LowProducts,
        lora: &[EmbeddingLora<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        self.backward_embedding_lora(dy, ids, low, lora, gradients)
    }

    fn rms_norm(&self, x: &Tensor, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let n = x.shape().row_len();
        let (rows, x, weight) = (x.rows(), x.slice::<f32>()?, weight.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                norm::rms_norm(self.isa, &x[rows.start * n..rows.end * n], weight, eps, y);
            });
        });
        Ok(())
    }

    fn rms_norm_backward(&self, dy: &Tensor, x: &Tensor, weight: TensorRef<'_>, eps: f32, dx: &mut Tensor) -> Result<()> {
        let n = x.shape().row_len();
        let (num_rows, dy, x, weight) = (x.rows(), dy.slice::<f32>()?, x.slice::<f32>()?, weight.slice::<f32>()?);
        let dx = SharedMut::new(dx.slice_mut::<f32>()?);
        self.over_rows(num_rows, n, |rows| {
            // SAFETY: tasks have rows of their own.
            let dx = unsafe { rows_mut(&dx, &rows, n) };
            let range = rows.start * n..rows.end * n;
            norm::rms_norm_backward(self.isa, &dy[range.clone()], &x[range], weight, eps, dx);
        });
        Ok(())
    }

    fn layer_norm(&self, x: &Tensor, weight: TensorRef<'_>, bias: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        self.norm_layer(x, weight, bias, eps, y)
    }

    fn rotary_of_axes(&self, positions: &[&[u32]], turns: &[AxisFrequency], factor: f32) -> Result<Rotary> {
        self.angles_of_axes(positions, turns, factor)
    }

    fn linear_norm_rotate(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        kept: Option<&mut Tensor>,
        out: &mut Qkv,
    ) -> Result<Option<LowProducts>> {
        self.forward_heads(x, layer, norm_slices(norms)?, rotary, g, layout, kept, out)
    }

    fn norm_rotate(
        &self,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        out: &mut Qkv,
    ) -> Result<()> {
        self.norm_and_rotate(qkv, norms, rotary, g, layout, out)
    }

    fn norm_rotate_backward(
        &self,
        gradient: &Qkv,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        self.norm_and_rotate_backward(gradient, qkv, norms, rotary, g, layout, dqkv)
    }

    fn write_kv(&self, qkv: &Qkv, g: &AttentionGeometry, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> Result<()> {
        with_element!(qkv.k.dtype(), T => {
            let v = qkv.v.as_ref().map(|v| v.slice()).transpose()?;
            attention::write_pages::<T>(&self.pool, self.isa, g, qkv.k.slice()?, v, spans, pages_mut(pages)?);
        });
        Ok(())
    }

    fn attention(
        &self,
        q: &Tensor,
        g: &AttentionGeometry,
        sinks: Option<TensorRef<'_>>,
        spans: &[AttentionSpan<'_>],
        pages: &KvPages,
        out: &mut Tensor,
        log_normalizers: &mut Tensor,
    ) -> Result<()> {
        let sinks = sinks.map(|sinks| sinks.slice::<f32>()).transpose()?;
        with_element!(q.dtype(), T => {
            let (pages, log_normalizers) = (self::pages(pages)?, log_normalizers.slice_mut()?);
            let (q, out) = (q.slice::<T>()?, out.slice_mut()?);
            attention::forward(&self.pool, self.arithmetic, g, q, sinks, spans, pages, out, log_normalizers)?;
        });
        Ok(())
    }

    fn attention_backward(
        &self,
        dout: &Tensor,
        qkv: &Qkv,
        out: &Tensor,
        log_normalizers: &Tensor,
        g: &AttentionGeometry,
        spans: &[AttentionSpan<'_>],
        gradient: &mut Qkv,
    ) -> Result<()> {
        with_element!(out.dtype(), T => {
            let io = AttentionGradient::<T> {
                q: qkv.q.slice()?,
                k: qkv.k.slice()?,
                v: qkv.v.as_ref().map(|v| v.slice()).transpose()?,
                out: out.slice()?,
                log_normalizers: log_normalizers.slice()?,
                dout: dout.slice()?,
                dq: gradient.q.slice_mut()?,
                dk: gradient.k.slice_mut()?,
                dv: gradient.v.as_mut().map(|dv| dv.slice_mut()).transpose()?,
            };
            attention::backward(&self.pool, self.arithmetic, g, spans, io)?;
        });
        Ok(())
    }

    fn linear_swiglu(
        &self,
        x: &Tensor,
        layer: &Linear<'_>,
        kept: Option<&mut Tensor>,
        y: &mut Tensor,
    ) -> Result<Option<LowProducts>> {
        self.forward_swiglu(x, layer, kept, y)
    }

    fn swiglu(&self, gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
        let n = y.shape().row_len();
        let (num_rows, gate_up) = (gate_up.rows(), gate_up.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, 2 * n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                swiglu::swiglu(self.isa, &gate_up[rows.start * 2 * n..rows.end * 2 * n], n, y);
            });
        });
        Ok(())
    }

    fn swiglu_backward(&self, dy: &Tensor, gate_up: &Tensor, dgate_up: &mut Tensor) -> Result<()> {
        let n = dy.shape().row_len();
        let (num_rows, dy, gate_up) = (dy.rows(), dy.slice::<f32>()?, gate_up.slice::<f32>()?);
        with_element!(dgate_up.dtype(), T => {
            let dgate_up = SharedMut::new(dgate_up.slice_mut::<T>()?);
            self.over_rows(num_rows, 2 * n, |rows| {
                // SAFETY: tasks have rows of their own.
                let dgate_up = unsafe { rows_mut(&dgate_up, &rows, 2 * n) };
                let dy = &dy[rows.start * n..rows.end * n];
                swiglu::swiglu_backward(self.isa, dy, &gate_up[rows.start * 2 * n..rows.end * 2 * n], n, dgate_up);
            });
        });
        Ok(())
    }

    fn gelu(&self, x: &Tensor, kind: Gelu, y: &mut Tensor) -> Result<()> {
        self.gelu_of(x, kind, y)
    }

    fn convert(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        if y.dtype() != DType::F32 {
            return with_element!(y.dtype(), T => { self.scale_into::<T>(x.slice()?, 1.0, y.slice_mut()?); Ok(()) });
        }
        let y = SharedMut::new(y.slice_mut::<f32>()?);
        with_element!(x.dtype(), T => {
            let x = x.slice::<T>()?;
            self.over_rows(x.len(), 1, |range| {
                // SAFETY: tasks have ranges of their own.
                let y = unsafe { rows_mut(&y, &range, 1) };
                convert::to_f32(self.isa, &x[range], y);
            });
        });
        Ok(())
    }

    fn add(&self, x: TensorRef<'_>, y: TensorMut<'_>) -> Result<()> {
        let x = x.slice::<f32>()?;
        let y = SharedMut::new(y.into_slice::<f32>()?);
        self.over_rows(x.len(), 1, |range| {
            // SAFETY: tasks have ranges of their own.
            let y = unsafe { rows_mut(&y, &range, 1) };
            convert::add(self.isa, &x[range], y);
        });
        Ok(())
    }

    fn target_logprobs(&self, logits: &Tensor, targets: LogprobTargets<'_>, log_normalizers: &mut Tensor) -> Result<Vec<f32>> {
        self.logprobs_of(logits, targets, log_normalizers)
    }

    fn logits_gradient(
        &self,
        logits: TensorRef<'_>,
        log_normalizers: TensorRef<'_>,
        targets: LogprobTargets<'_>,
        gradient: &[f32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        self.gradient_of_logits(logits, log_normalizers, targets, gradient, dlogits)
    }

    fn read_logits(&self, logits: &Tensor, rows: &[usize], requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>> {
        self.replies(logits, rows, requests)
    }

    fn adamw(
        &self,
        step: &AdamwStep,
        weights: &mut Tensor,
        gradient: &mut Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
    ) -> Result<()> {
        let shape = weights.shape();
        for other in [&*weights, &*gradient, &*m, &*v] {
            if other.shape() != shape {
                return Err(Error::Shape { op: "adamw", expected: shape.to_string(), actual: other.shape().to_string() });
            }
            if other.dtype() != DType::F32 {
                return Err(Error::DType { op: "adamw", expected: DType::F32, actual: other.dtype() });
            }
        }
        let factors = adamw::AdamwFactors::new(step);
        let (weights, gradient, m, v) = (
            SharedMut::new(weights.slice_mut::<f32>()?),
            SharedMut::new(gradient.slice_mut::<f32>()?),
            SharedMut::new(m.slice_mut::<f32>()?),
            SharedMut::new(v.slice_mut::<f32>()?),
        );
        self.over_rows(shape.len(), 1, |r| {
            // SAFETY: tasks have ranges of their own.
            let (weights, gradient, m, v) =
                unsafe { (rows_mut(&weights, &r, 1), rows_mut(&gradient, &r, 1), rows_mut(&m, &r, 1), rows_mut(&v, &r, 1)) };
            adamw::adamw(self.isa, &factors, weights, gradient, m, v);
        });
        Ok(())
    }

    fn sum_squares(&self, tensor: &Tensor) -> Result<f64> {
        if tensor.dtype() != DType::F32 {
            return Err(Error::DType { op: "sum_squares", expected: DType::F32, actual: tensor.dtype() });
        }
        let values = tensor.slice::<f32>()?;
        let mut pieces = vec![0.0f64; values.len().div_ceil(SUM_PIECE)];
        let sums = SharedMut::new(&mut pieces);
        self.over_rows(values.len().div_ceil(SUM_PIECE), SUM_PIECE, |rows| {
            // SAFETY: tasks have pieces of their own.
            let sums = unsafe { rows_mut(&sums, &rows, 1) };
            for (piece, sum) in values[rows.start * SUM_PIECE..].chunks(SUM_PIECE).zip(sums) {
                *sum = adamw::sum_squares(self.isa, piece);
            }
        });
        Ok(pieces.iter().sum())
    }

    fn gate_heads(
        &self,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        y: &mut Tensor,
    ) -> Result<()> {
        self.gate_of_heads(attended, qkv, g, layout, y)
    }

    fn gate_heads_backward(
        &self,
        dy: &Tensor,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dattended: &mut Tensor,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        self.gate_of_heads_backward(dy, attended, qkv, g, layout, dattended, dqkv)
    }

    fn route(&self, logits: &Tensor, routing: &Routing<'_>, weights: &mut Tensor) -> Result<Vec<u32>> {
        self.choose_experts(logits, routing, weights)
    }

    fn route_backward(
        &self,
        dweights: &Tensor,
        logits: &Tensor,
        routing: &Routing<'_>,
        experts: &[u32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        self.gradient_of_choice(dweights, logits, routing, experts, dlogits)
    }

    fn experts(
        &self,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        y: &mut Tensor,
    ) -> Result<Option<KeptExperts>> {
        self.forward_experts(x, weights, dispatch, layer, y)
    }

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
    ) -> Result<()> {
        self.backward_experts(dy, x, weights, dispatch, layer, kept, gradients, dweights, dx)
    }

    fn sigmoid_gate(&self, x: &Tensor, gates: &Tensor, y: &mut Tensor) -> Result<()> {
        self.gate(x, gates, y)
    }

    fn sigmoid_gate_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gates: &Tensor,
        dx: &mut Tensor,
        dgates: &mut Tensor,
    ) -> Result<()> {
        self.gradient_of_gate(dy, x, gates, dx, dgates)
    }

    fn rotate_heads(
        &self,
        x: &Tensor,
        heads: &HeadMove,
        rotary: &Rotary,
        style: RotaryStyle,
        turn: Turn,
        y: &mut Tensor,
    ) -> Result<()> {
        self.turn_heads(x, heads, rotary, style, turn, y)
    }

    fn norm_heads(&self, x: &Tensor, heads: &HeadMove, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        self.norm_of_heads(x, heads, weight, eps, y)
    }

    fn norm_heads_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        heads: &HeadMove,
        weight: TensorRef<'_>,
        eps: f32,
        dx: &mut Tensor,
    ) -> Result<()> {
        self.norm_of_heads_backward(dy, x, heads, weight, eps, dx)
    }

    fn head_linear(&self, x: &Tensor, layer: &Linear<'_>, part: &HeadPart, side: HeadSide, y: &mut Tensor) -> Result<()> {
        self.through_heads(x, layer, part, side, y)
    }

    fn head_linear_gradients(
        &self,
        heads: &Tensor,
        latents: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        self.gradients_of_heads(heads, latents, layer, part, gradients)
    }

    fn check_delta(&self, g: &DeltaGeometry) -> Result<()> {
        self.check_delta_geometry(g)
    }

    fn delta_scratch_bytes(&self, g: &DeltaGeometry, tokens: usize) -> usize {
        self.delta_scratch(g, tokens)
    }

    fn delta_inputs(
        &self,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut DeltaInputs,
    ) -> Result<()> {
        self.split_delta(projection, params, g, spans, states, out)
    }

    fn delta_inputs_backward(
        &self,
        gradient: &mut DeltaInputs,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        dprojection: &mut Tensor,
    ) -> Result<()> {
        self.split_delta_backward(gradient, projection, params, g, spans, dprojection)
    }

    fn delta_rule(
        &self,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut Tensor,
    ) -> Result<()> {
        self.delta_forward(inputs, g, spans, states, out)
    }

    fn delta_rule_backward(
        &self,
        dout: &Tensor,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        gradient: &mut DeltaInputs,
    ) -> Result<()> {
        self.delta_backward(dout, inputs, g, spans, gradient)
    }

    fn gated_norm(
        &self,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        y: &mut Tensor,
    ) -> Result<()> {
        self.gate_and_norm(x, projection, weight, eps, g, y)
    }

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
    ) -> Result<()> {
        self.gate_and_norm_backward(dy, x, projection, weight, eps, g, dx, dprojection)
    }
}
