//! What several families have in common because it is the same mathematics: grouped-query attention and gated MLPs.

use std::rc::Rc;

use strata_tensor::{
    AttentionGeometry, AttentionInput, AttentionSpan, Backend, DType, KV_PAGE_TOKENS, KvAccess, KvValues, Linear, LoraGroup,
    QkvLayout, Sight, Tape, TensorRef, Var, attention_pages_bytes,
};

use super::BatchInputs;
use super::declaration::{Declaration, MatrixId, NormWeights, VectorId, Weights};
use super::decoder::LayerBytes;
use crate::config::Rope;
use crate::lora::Part;

/// What the layers of a pass read.
#[derive(Clone)]
pub(crate) struct Pass<'a> {
    pub weights: &'a Weights,
    pub inputs: Rc<BatchInputs<'a>>,
    /// Of matmul inputs, keys and values.
    pub dtype: DType,
    /// Epsilon of norms.
    pub eps: f32,
    /// Which rows of the batch the residual stream has, if not all; they rise.
    pub rows: Option<Rc<[usize]>>,
    /// Which it is to have once the tokens of the layer have been brought together, if not all.
    pub answered: Option<Rc<[usize]>>,
    /// Whether layers that are kept for the way back keep what the first products of their experts make, too.
    pub keeps_experts: bool,
}

impl<'a> Pass<'a> {
    /// What goes on with the rows that are answered, once tokens have been brought together.
    pub(crate) fn after_mixing(&self) -> Self {
        Pass { rows: self.answered.clone().or_else(|| self.rows.clone()), answered: None, ..self.clone() }
    }

    /// Of each sequence in a cache the queries from the first row that is answered to the last, if not all rows are.
    pub(crate) fn queries(&self) -> Option<Rc<[AttentionSpan<'a>]>> {
        let rows = self.answered.as_ref().filter(|_| self.inputs.own_spans.iter().any(|span| !span.pages.is_empty()))?;
        let answered = |span: &AttentionSpan<'a>| {
            let [start, end] = [span.tokens.start, span.tokens.end].map(|token| rows.partition_point(|&row| row < token));
            let (first, last) = (*rows[start..end].first()?, *rows[start..end].last()?);
            let past = span.past + first - span.tokens.start;
            Some(AttentionSpan { tokens: first..last + 1, past, pages: span.pages })
        };
        Some(self.inputs.own_spans.iter().filter_map(answered).collect())
    }

    /// `residual + linear(mixed)`, of the rows that are answered. Ends what brings tokens together.
    pub(crate) fn add_mixed(
        &self,
        tape: &mut Tape<'a>,
        residual: &Var,
        mixed: Var,
        linear: impl FnOnce(&Self) -> Linear<'a>,
    ) -> strata_tensor::Result<Var> {
        let Some(rows) = &self.answered else { return tape.add_linear(residual, &mixed, linear(self)) };
        let (residual, mixed) = (tape.take_rows(residual, rows)?, tape.take_rows(&mixed, rows)?);
        tape.add_linear(&residual, &mixed, linear(&self.after_mixing()))
    }

    /// A frozen layer with the low-rank pairs of `projections`: modules and their first output columns.
    pub(crate) fn linear(
        &self,
        (matrix, l): (MatrixId, usize),
        bias: Option<VectorId>,
        projections: &[(usize, usize)],
    ) -> Linear<'a> {
        let lora = self.inputs.lora(l, projections);
        let lora = match &self.rows {
            Some(rows) => LoraGroup::of_rows(&lora, rows),
            None => lora,
        };
        Linear { weight: self.weights.matrix(matrix, l), bias: bias.map(|bias| self.weights.vector(bias, l)), lora }
    }

    /// RMSNorm with vector `l` of a stack.
    pub(crate) fn norm(&self, tape: &mut Tape<'a>, x: &Var, weight: VectorId, l: usize) -> strata_tensor::Result<Var> {
        tape.rms_norm(x, self.weights.vector(weight, l), self.eps, self.dtype)
    }
}

/// Bytes for each token.
pub(crate) struct TokenBytes {
    /// What a forward pass leaves for the way back.
    pub saved: usize,
    /// What goes back through it, at its peak.
    pub gradients: usize,
}

impl TokenBytes {
    /// Of a layer of this block and then another: the way back is through the other, and then this.
    pub(crate) fn then(&self, next: &TokenBytes) -> LayerBytes {
        let peak = self.saved + (next.saved + next.gradients).max(self.gradients);
        LayerBytes { kept: self.saved + next.saved, peak }
    }
}

/// Grouped-query attention with rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub o_bias: bool,
    /// The RMSNorm that each head of q and k has, if it has one (Qwen3).
    pub qk_norm: Option<NormWeights>,
    /// Whether `q_proj` has a gate behind each query, with whose sigmoid what the head finds is multiplied (Qwen3.5). Of such heads a part may turn.
    pub output_gate: bool,
    /// Whether each query head has a logit that joins its softmax without a value (gpt-oss).
    pub sinks: bool,
    /// How many keys a query of each layer sees, its own the last; `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// Rotary positions.
    pub rope: Rope,
}

impl AttentionConfig {
    /// Shapes of the op, in a layer with this window.
    fn geometry(&self, eps: f32, window: Option<usize>) -> AttentionGeometry {
        AttentionGeometry {
            heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            values: KvValues::Own(self.head_dim),
            scale: (1.0 / (self.head_dim as f64).sqrt()) as f32,
            eps,
            window,
            sees: Sight::Before,
        }
    }
}

/// The weights of attention in some layers. q, k and v are one matrix; each keeps its own low-rank pair.
pub(crate) struct Attention {
    /// Of each layer.
    geometries: Vec<AttentionGeometry>,
    layout: QkvLayout,
    qkv_proj: MatrixId,
    qkv_bias: Option<VectorId>,
    norms: Option<[VectorId; 2]>,
    sinks: Option<VectorId>,
    o_proj: MatrixId,
    o_bias: Option<VectorId>,
    /// Modules of q, k and v with their first columns.
    qkv_modules: [(usize, usize); 3],
    o_module: usize,
}

impl Attention {
    /// Of the decoder layers `layers`.
    pub(crate) fn declare(d: &mut Declaration, c: &AttentionConfig, hidden: usize, eps: f32, layers: &[usize]) -> Self {
        let geometries: Vec<_> = layers.iter().map(|&number| c.geometry(eps, c.windows[number])).collect();
        let (g, attended, kv) = (c.geometry(eps, None), c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let (layout, q) = match c.output_gate {
            false => (QkvLayout::fused(&g), attended),
            true => (QkvLayout::gated(&g, c.rope.rotary_dim), 2 * attended),
        };
        let qkv_proj = d.matrix("q+k+v", layers.len(), hidden, layout.width);
        let o_proj = d.matrix("o", layers.len(), attended, hidden);
        let qkv_modules = [("self_attn.q_proj", 0, q), ("self_attn.k_proj", q, kv), ("self_attn.v_proj", q + kv, kv)]
            .map(|(path, first, rows)| (d.projection((qkv_proj, first), path, Part::Attention, layers, rows), first));
        let o_module = d.projection((o_proj, 0), "self_attn.o_proj", Part::Attention, layers, hidden);
        let qkv_bias = c.qkv_bias.then(|| {
            let id = d.vector(layers.len(), layout.width);
            for (path, first, len) in [("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)] {
                d.vectors((id, first), &format!("self_attn.{path}.bias"), layers, len);
            }
            id
        });
        let o_bias = c.o_bias.then(|| d.own_vector("self_attn.o_proj.bias", layers, hidden));
        let norms = c
            .qk_norm
            .map(|weights| ["self_attn.q_norm", "self_attn.k_norm"].map(|path| d.norm(path, layers, c.head_dim, weights)));
        let sinks = c.sinks.then(|| d.own_vector("self_attn.sinks", layers, c.num_heads));
        Attention { geometries, layout, qkv_proj, qkv_bias, norms, sinks, o_proj, o_bias, qkv_modules, o_module }
    }

    /// `residual + o(attention(h))`.
    pub(crate) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
        kv: KvAccess<'_>,
    ) -> strata_tensor::Result<Var> {
        let qkv = pass.linear((self.qkv_proj, l), self.qkv_bias, &self.qkv_modules);
        let input = AttentionInput {
            geometry: self.geometries[l],
            layout: self.layout,
            sinks: self.sinks.map(|id| pass.weights.vector(id, l)),
            norms: self.norms.map(|norms| norms.map(|id| -> TensorRef<'a> { pass.weights.vector(id, l) })),
            rotary: pass.inputs.rotary.clone(),
            spans: pass.inputs.spans.clone(),
            queries: pass.queries(),
        };
        let a = tape.linear_attention(h, qkv, &input, kv, pass.dtype)?;
        pass.add_mixed(tape, residual, a, |pass| pass.linear((self.o_proj, l), self.o_bias, &[(self.o_module, 0)]))
    }

    pub(crate) fn geometry(&self, l: usize) -> AttentionGeometry {
        self.geometries[l]
    }

    /// Bytes for each token of a training pass, keys and values in pages included in what goes back; of attention's own scratch, see
    /// [`Backend::attention_scratch_bytes`].
    pub(crate) fn token_bytes(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> TokenBytes {
        let g = &self.geometries[0];
        let (qkv, attention) = (self.layout.width, g.heads * g.head_dim);
        let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
        // Of what attention found, gated and not; of q, k and v, and rounded; and what attention goes back in.
        let found = wide * attention * if self.layout.gate.is_some() { 2 } else { 1 };
        let gradients = found + (wide + narrow) * qkv + backend.attention_gradient_bytes(g, dtype) + 2 * wide * hidden;
        let pages = attention_pages_bytes(backend, KV_PAGE_TOKENS * 64, g, dtype) / (KV_PAGE_TOKENS * 64);
        TokenBytes { saved: (wide + narrow) * qkv + narrow * attention + wide * g.heads, gradients: gradients.max(pages) }
    }
}

/// A gated MLP: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// Width between the projections.
    pub intermediate_size: usize,
    /// Whether the projections have biases.
    pub bias: bool,
}

/// Where the projections of a gated MLP are in a decoder layer, and words for its matrices.
pub(crate) struct MlpPaths {
    gate_proj: &'static str,
    up_proj: &'static str,
    down_proj: &'static str,
    /// Of a linear layer to one number, with whose sigmoid what the MLP answers is multiplied.
    output_gate: Option<&'static str>,
    labels: [&'static str; 2],
}

impl MlpPaths {
    /// The MLP of a layer.
    pub(crate) const MLP: MlpPaths = MlpPaths {
        gate_proj: "mlp.gate_proj",
        up_proj: "mlp.up_proj",
        down_proj: "mlp.down_proj",
        output_gate: None,
        labels: ["gate+up", "down"],
    };
    /// What stands beside the experts of a layer.
    pub(crate) const SHARED_EXPERTS: MlpPaths = MlpPaths {
        gate_proj: "mlp.shared_experts.gate_proj",
        up_proj: "mlp.shared_experts.up_proj",
        down_proj: "mlp.shared_experts.down_proj",
        output_gate: None,
        labels: ["gate+up of shared experts", "down of shared experts"],
    };
    /// The same, where it is one that has a gate.
    pub(crate) const SHARED_EXPERT: MlpPaths = MlpPaths {
        gate_proj: "mlp.shared_expert.gate_proj",
        up_proj: "mlp.shared_expert.up_proj",
        down_proj: "mlp.shared_expert.down_proj",
        output_gate: Some("mlp.shared_expert_gate"),
        labels: ["gate+up of the shared expert", "down of the shared expert"],
    };
}

/// The weights of gated MLPs in some layers. Gate and up are one matrix; each keeps its own low-rank pair.
pub(crate) struct GatedMlp {
    intermediate_size: usize,
    gate_up_proj: MatrixId,
    gate_up_bias: Option<VectorId>,
    down_proj: MatrixId,
    down_bias: Option<VectorId>,
    gate_up_modules: [(usize, usize); 2],
    down_module: usize,
    output_gate: Option<MatrixId>,
}

impl GatedMlp {
    /// Of the decoder layers `layers`.
    pub(crate) fn declare(d: &mut Declaration, paths: &MlpPaths, c: &MlpConfig, hidden: usize, layers: &[usize]) -> Self {
        let (mlp, [gate_up, down]) = (c.intermediate_size, paths.labels);
        let gate_up_proj = d.matrix(gate_up, layers.len(), hidden, 2 * mlp);
        let down_proj = d.matrix(down, layers.len(), mlp, hidden);
        let gate_up_modules = [(paths.gate_proj, 0), (paths.up_proj, mlp)]
            .map(|(path, first)| (d.projection((gate_up_proj, first), path, Part::Mlp, layers, mlp), first));
        let down_module = d.projection((down_proj, 0), paths.down_proj, Part::Mlp, layers, hidden);
        let gate_up_bias = c.bias.then(|| {
            let id = d.vector(layers.len(), 2 * mlp);
            d.vectors((id, 0), &format!("{}.bias", paths.gate_proj), layers, mlp);
            d.vectors((id, mlp), &format!("{}.bias", paths.up_proj), layers, mlp);
            id
        });
        let down_bias = c.bias.then(|| d.own_vector(&format!("{}.bias", paths.down_proj), layers, hidden));
        let output_gate = paths.output_gate.map(|path| d.router("gate of the shared expert", path, layers, hidden, 1));
        GatedMlp {
            intermediate_size: mlp,
            gate_up_proj,
            gate_up_bias,
            down_proj,
            down_bias,
            gate_up_modules,
            down_module,
            output_gate,
        }
    }

    /// `residual + mlp(h)`.
    pub(crate) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
    ) -> strata_tensor::Result<Var> {
        let gate_up = pass.linear((self.gate_up_proj, l), self.gate_up_bias, &self.gate_up_modules);
        let m = match self.output_gate {
            None => tape.linear_swiglu(h, gate_up, pass.dtype)?,
            Some(gate) => {
                // A factor of a row is the same before the last layer, which has no bias and whose pair is linear too.
                let m = tape.linear_swiglu(h, gate_up, DType::F32)?;
                let gates = tape.linear(h, pass.linear((gate, l), None, &[]))?;
                tape.sigmoid_gate(&m, &gates, pass.dtype)?
            }
        };
        tape.add_linear(residual, &m, pass.linear((self.down_proj, l), self.down_bias, &[(self.down_module, 0)]))
    }

    /// Bytes for each token of a training pass, the norm before it included.
    pub(crate) fn token_bytes(&self, hidden: usize, dtype: DType) -> TokenBytes {
        let (mlp, wide, narrow) = (self.intermediate_size, DType::F32.size_bytes(), dtype.size_bytes());
        // What is gated is not rounded before; the gate is a number, and its gradient one.
        let (ungated, gate) = if self.output_gate.is_some() { (wide * mlp, 2 * wide) } else { (0, 0) };
        TokenBytes {
            saved: (wide + narrow) * hidden + (2 * wide + narrow) * mlp + ungated + gate,
            // Of what is between the projections, and rounded of what comes out of the first two: what went into the last is gone by then.
            gradients: (wide + narrow) * mlp + (wide + narrow) * hidden + 2 * ungated + gate,
        }
    }
}
