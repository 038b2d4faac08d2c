//! A gated delta net in the place of attention, with its projections: queries, keys, values and the gates are one matrix, and each keeps its own low-rank pair.

use strata_tensor::{Backend, DELTA_CHUNK, DType, DeltaGeometry, DeltaNetInput, DeltaParams, RecurrentStates, Tape, Var};

use super::blocks::{Pass, TokenBytes};
use super::declaration::{Declaration, MatrixId, NormWeights, VectorId};
use crate::config::CONTEXT_TOKENS_MAX;
use crate::lora::Part;

/// The weights of gated delta nets in some layers.
pub(super) struct DeltaNet {
    geometry: DeltaGeometry,
    in_proj: MatrixId,
    conv1d: VectorId,
    a_log: VectorId,
    dt_bias: VectorId,
    norm: VectorId,
    out_proj: MatrixId,
    /// The modules of the projection with their first columns.
    in_modules: [(usize, usize); 4],
    out_module: usize,
}

impl DeltaNet {
    /// Of the decoder layers `layers`.
    pub(super) fn declare(d: &mut Declaration, g: &DeltaGeometry, hidden: usize, layers: &[usize]) -> Self {
        let in_proj = d.matrix("qkv+z+b+a", layers.len(), hidden, g.projection_width());
        let out_proj = d.matrix("out", layers.len(), g.value_width(), hidden);
        let in_modules = [
            ("linear_attn.in_proj_qkv", 0..g.conv_width()),
            ("linear_attn.in_proj_z", g.z_columns()),
            ("linear_attn.in_proj_b", g.b_columns()),
            ("linear_attn.in_proj_a", g.a_columns()),
        ]
        .map(|(path, columns)| {
            let module = d.projection((in_proj, columns.start), path, Part::Attention, layers, columns.len());
            (module, columns.start)
        });
        // The Tinker tools have them apart.
        let (keys, values) = (g.key_width(), g.value_width());
        let parts = [("linear_attn.in_proj_q", keys), ("linear_attn.in_proj_k", keys), ("linear_attn.in_proj_v", values)];
        d.parts(in_modules[0].0, parts);
        let out_module = d.projection((out_proj, 0), "linear_attn.out_proj", Part::Attention, layers, hidden);
        DeltaNet {
            geometry: *g,
            in_proj,
            conv1d: d.convolution("linear_attn.conv1d", layers, [g.conv_width(), g.kernel]),
            a_log: d.own_vector("linear_attn.A_log", layers, g.v_heads),
            dt_bias: d.own_vector("linear_attn.dt_bias", layers, g.v_heads),
            norm: d.norm("linear_attn.norm", layers, g.v_dim, NormWeights::Plain),
            out_proj,
            in_modules,
            out_module,
        }
    }

    /// `residual + out(net(h))`.
    pub(super) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
        states: Option<&mut RecurrentStates>,
    ) -> strata_tensor::Result<Var> {
        let projection = tape.linear(h, pass.linear((self.in_proj, l), None, &self.in_modules))?;
        let input = DeltaNetInput {
            geometry: self.geometry,
            params: DeltaParams {
                conv: pass.weights.vector(self.conv1d, l),
                a_log: pass.weights.vector(self.a_log, l),
                dt_bias: pass.weights.vector(self.dt_bias, l),
            },
            norm: pass.weights.vector(self.norm, l),
            eps: pass.eps,
            spans: pass.inputs.delta_spans.clone(),
        };
        let y = tape.gated_delta_net(&projection, &input, states, pass.dtype)?;
        pass.add_mixed(tape, residual, y, |pass| pass.linear((self.out_proj, l), None, &[(self.out_module, 0)]))
    }

    pub(super) fn geometry(&self) -> DeltaGeometry {
        self.geometry
    }

    /// Bytes for each token of a training pass; of the rule's own scratch what grows with a sequence, the rest being in [`Backend::delta_scratch_bytes`] of one chunk.
    pub(super) fn token_bytes(&self, backend: &dyn Backend, hidden: usize, dtype: DType) -> TokenBytes {
        let g = &self.geometry;
        let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
        let (projection, value) = (g.projection_width(), g.value_width());
        let inputs = wide * (g.conv_width() + 2 * g.v_heads);
        // The scratch of the longest sequence that there is, less that of a chunk: a larger share of each token than of any shorter one.
        let scratch = |tokens| backend.delta_scratch_bytes(g, tokens);
        let growth = (scratch(CONTEXT_TOKENS_MAX) - scratch(DELTA_CHUNK)).div_ceil(CONTEXT_TOKENS_MAX - DELTA_CHUNK);
        TokenBytes {
            saved: wide * (projection + value) + inputs + narrow * value,
            // Of the projection, of what was recalled, and of its norm and gate or the rule's inputs.
            gradients: narrow * projection + wide * value + (wide * value).max(inputs) + growth + 2 * wide * hidden,
        }
    }
}
