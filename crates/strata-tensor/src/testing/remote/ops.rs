//! The ops: each fetches what it reads and sends what it wrote.

use std::sync::atomic::Ordering;

use super::{RemoteBackend, delta_params, views};
use crate::backend::*;
use crate::moe::{Dispatch, Experts, KeptExperts, Routing};
use crate::tape::{EmbeddingLora, Linear};
use crate::{DType, KvPages, PackedRef, RecurrentStates, Result, Tensor, TensorMut, TensorRef};

impl Backend for RemoteBackend {
    fn description(&self) -> String {
        format!("remote {}", self.cpu.description())
    }

    fn numerics(&self) -> String {
        self.cpu.numerics()
    }

    fn matmul_scratch_bytes(&self, rows: usize, width: usize, dtype: DType) -> usize {
        self.cpu.matmul_scratch_bytes(rows, width, dtype)
    }

    fn attention_gradient_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        self.cpu.attention_gradient_bytes(g, dtype)
    }

    fn attention_scratch_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        self.cpu.attention_scratch_bytes(g, dtype)
    }

    fn check_attention(&self, g: &AttentionGeometry) -> Result<()> {
        self.cpu.check_attention(g)
    }

    fn linear(&self, x: &Tensor, layer: &Linear<'_>, y: Option<&mut Tensor>) -> Result<LowProducts> {
        let (x, bias) = (self.fetch(x.as_ref())?, self.fetch_bias(layer)?);
        let mut low = LowProducts::default();
        let mut run = |y: Option<&mut Tensor>| {
            let table = self.far.table();
            low = self.cpu.linear(&x, &table.linear(layer, &bias)?, y)?;
            Ok(())
        };
        match y {
            None => run(None)?,
            Some(y) => {
                self.rows.fetch_add(x.rows(), Ordering::Relaxed);
                self.change(y, |y| run(Some(y)))?
            }
        }
        self.keep_low(&low)
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
        let (dy, x, bias) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch_bias(layer)?);
        let low = self.fetch_low(low)?;
        let mut dx_here = dx.as_ref().map(|dx| self.fetch((**dx).as_ref())).transpose()?;
        self.change_pairs(gradients, |table, views| {
            self.cpu.linear_backward(&dy, &x, &low, &table.linear(layer, &bias)?, views, dx_here.as_mut())
        })?;
        match (dx_here, dx) {
            (Some(here), Some(dx)) => self.send(&here, dx.as_mut()),
            _ => Ok(()),
        }
    }

    fn embedding(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        let table = self.fetch(table)?;
        self.change(out, |out| self.cpu.embedding(table.as_ref(), ids, out))
    }

    fn embedding_packed(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        self.change(out, |out| self.cpu.embedding_packed(self.far.table().packed(table)?, ids, out))
    }

    fn embedding_lora(&self, ids: &[u32], lora: &[EmbeddingLora<'_>], y: &mut Tensor) -> Result<LowProducts> {
        let (rows, mut low) = (self.fetch_rows(lora)?, LowProducts::default());
        self.change(y, |y| {
            low = self.cpu.embedding_lora(ids, &self.far.table().pairs(lora, &rows)?, y)?;
            Ok(())
        })?;
        self.keep_low(&low)
    }

    fn embedding_lora_backward(
        &self,
        dy: &Tensor,
        ids: &[u32],
        low: &LowProducts,
        lora: &[EmbeddingLora<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        let (dy, low, rows) = (self.fetch(dy.as_ref())?, self.fetch_low(low)?, self.fetch_rows(lora)?);
        self.change_pairs(gradients, |table, views| {
            self.cpu.embedding_lora_backward(&dy, ids, &low, &table.pairs(lora, &rows)?, views)
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight) = (self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.rms_norm(&x, weight.as_ref(), eps, y))
    }

    fn rms_norm_backward(&self, dy: &Tensor, x: &Tensor, weight: TensorRef<'_>, eps: f32, dx: &mut Tensor) -> Result<()> {
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(dx, |dx| self.cpu.rms_norm_backward(&dy, &x, weight.as_ref(), eps, dx))
    }

    fn layer_norm(&self, x: &Tensor, weight: TensorRef<'_>, bias: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight, bias) = (self.fetch(x.as_ref())?, self.fetch(weight)?, self.fetch(bias)?);
        self.change(y, |y| self.cpu.layer_norm(&x, weight.as_ref(), bias.as_ref(), eps, y))
    }

    fn rotary_of_axes(&self, positions: &[&[u32]], turns: &[AxisFrequency], factor: f32) -> Result<Rotary> {
        let Rotary { cos, sin } = self.cpu.rotary_of_axes(positions, turns, factor)?;
        Ok(Rotary { cos: self.keep_tensor(&cos)?, sin: self.keep_tensor(&sin)? })
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
        let (qkv, norms, rotary) = (self.fetch(qkv.as_ref())?, self.fetch_norms(norms)?, self.fetch_rotary(rotary)?);
        let mut here = self.fetch_qkv(out)?;
        self.cpu.norm_rotate(&qkv, views(&norms), &rotary, g, layout, &mut here)?;
        self.send_qkv(&here, out)
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
        let (qkv, norms, rotary) = (self.fetch(qkv.as_ref())?, self.fetch_norms(norms)?, self.fetch_rotary(rotary)?);
        let gradient = self.fetch_qkv(gradient)?;
        self.change(dqkv, |dqkv| self.cpu.norm_rotate_backward(&gradient, &qkv, views(&norms), &rotary, g, layout, dqkv))
    }

    fn write_kv(&self, qkv: &Qkv, g: &AttentionGeometry, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> Result<()> {
        let qkv = self.fetch_qkv(qkv)?;
        self.cpu.write_kv(&qkv, g, spans, self.far.table().pages(pages)?)
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
        self.rows.fetch_add(spans.iter().map(|span| span.tokens.len()).sum(), Ordering::Relaxed);
        let (q, sinks) = (self.fetch(q.as_ref())?, sinks.map(|sinks| self.fetch(sinks)).transpose()?);
        let sinks = sinks.as_ref().map(Tensor::as_ref);
        let mut out_here = self.fetch(out.as_ref())?;
        let mut log_normalizers_here = self.fetch(log_normalizers.as_ref())?;
        self.cpu.attention(&q, g, sinks, spans, self.far.table().pages(pages)?, &mut out_here, &mut log_normalizers_here)?;
        self.send(&out_here, out.as_mut())?;
        self.send(&log_normalizers_here, log_normalizers.as_mut())
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
        let (dout, qkv, out) = (self.fetch(dout.as_ref())?, self.fetch_qkv(qkv)?, self.fetch(out.as_ref())?);
        let (log_normalizers, mut here) = (self.fetch(log_normalizers.as_ref())?, self.fetch_qkv(gradient)?);
        self.cpu.attention_backward(&dout, &qkv, &out, &log_normalizers, g, spans, &mut here)?;
        self.send_qkv(&here, gradient)
    }

    fn swiglu(&self, gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
        let gate_up = self.fetch(gate_up.as_ref())?;
        self.change(y, |y| self.cpu.swiglu(&gate_up, y))
    }

    fn swiglu_backward(&self, dy: &Tensor, gate_up: &Tensor, dgate_up: &mut Tensor) -> Result<()> {
        let (dy, gate_up) = (self.fetch(dy.as_ref())?, self.fetch(gate_up.as_ref())?);
        self.change(dgate_up, |dgate_up| self.cpu.swiglu_backward(&dy, &gate_up, dgate_up))
    }

    fn gelu(&self, x: &Tensor, kind: Gelu, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.gelu(&x, kind, y))
    }

    fn convert(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.convert(&x, y))
    }

    fn add(&self, x: TensorRef<'_>, y: TensorMut<'_>) -> Result<()> {
        let (x, mut here) = (self.fetch(x)?, self.fetch(y.as_ref())?);
        self.cpu.add(x.as_ref(), here.as_mut())?;
        self.send(&here, y)
    }

    fn target_logprobs(&self, logits: &Tensor, targets: LogprobTargets<'_>, log_normalizers: &mut Tensor) -> Result<Vec<f32>> {
        let logits = self.fetch(logits.as_ref())?;
        let mut logprobs = Vec::new();
        self.change(log_normalizers, |log_normalizers| {
            logprobs = self.cpu.target_logprobs(&logits, targets, log_normalizers)?;
            Ok(())
        })?;
        Ok(logprobs)
    }

    fn logits_gradient(
        &self,
        logits: TensorRef<'_>,
        log_normalizers: TensorRef<'_>,
        targets: LogprobTargets<'_>,
        gradient: &[f32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let (logits, log_normalizers) = (self.fetch(logits)?, self.fetch(log_normalizers)?);
        let (logits, log_normalizers) = (logits.as_ref(), log_normalizers.as_ref());
        self.change(dlogits, |dlogits| self.cpu.logits_gradient(logits, log_normalizers, targets, gradient, dlogits))
    }

    fn read_logits(&self, logits: &Tensor, rows: &[usize], requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>> {
        self.cpu.read_logits(&self.fetch(logits.as_ref())?, rows, requests)
    }

    fn adamw(
        &self,
        step: &AdamwStep,
        weights: &mut Tensor,
        gradient: &mut Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
    ) -> Result<()> {
        let mut here =
            [self.fetch(weights.as_ref())?, self.fetch(gradient.as_ref())?, self.fetch(m.as_ref())?, self.fetch(v.as_ref())?];
        let [weights_here, gradient_here, m_here, v_here] = &mut here;
        self.cpu.adamw(step, weights_here, gradient_here, m_here, v_here)?;
        for (here, there) in here.iter().zip([weights, gradient, m, v]) {
            self.send(here, there.as_mut())?;
        }
        Ok(())
    }

    fn sum_squares(&self, tensor: &Tensor) -> Result<f64> {
        self.cpu.sum_squares(&self.fetch(tensor.as_ref())?)
    }

    fn gate_heads(
        &self,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        y: &mut Tensor,
    ) -> Result<()> {
        let (attended, qkv) = (self.fetch(attended.as_ref())?, self.fetch(qkv.as_ref())?);
        self.change(y, |y| self.cpu.gate_heads(&attended, &qkv, g, layout, y))
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
        let (dy, attended, qkv) = (self.fetch(dy.as_ref())?, self.fetch(attended.as_ref())?, self.fetch(qkv.as_ref())?);
        self.change(dattended, |dattended| {
            self.change(dqkv, |dqkv| self.cpu.gate_heads_backward(&dy, &attended, &qkv, g, layout, dattended, dqkv))
        })
    }

    fn route(&self, logits: &Tensor, routing: &Routing<'_>, weights: &mut Tensor) -> Result<Vec<u32>> {
        let logits = self.fetch(logits.as_ref())?;
        let mut experts = Vec::new();
        self.change(weights, |weights| {
            experts = self.with_routing(routing, |routing| self.cpu.route(&logits, routing, weights))?;
            Ok(())
        })?;
        Ok(experts)
    }

    fn route_backward(
        &self,
        dweights: &Tensor,
        logits: &Tensor,
        routing: &Routing<'_>,
        experts: &[u32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let (dweights, logits) = (self.fetch(dweights.as_ref())?, self.fetch(logits.as_ref())?);
        self.change(dlogits, |dlogits| {
            self.with_routing(routing, |routing| self.cpu.route_backward(&dweights, &logits, routing, experts, dlogits))
        })
    }

    /// Keeps nothing.
    fn experts(
        &self,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        y: &mut Tensor,
    ) -> Result<Option<KeptExperts>> {
        self.rows.fetch_add(x.rows(), Ordering::Relaxed);
        let (x, weights, biases) = (self.fetch(x.as_ref())?, self.fetch(weights.as_ref())?, self.fetch_biases(layer)?);
        self.change(y, |y| {
            let table = self.far.table();
            let layer = Experts { keeps: false, ..table.experts(layer, &biases)? };
            self.cpu.experts(&x, &weights, dispatch, &layer, y).map(drop)
        })?;
        Ok(None)
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
        assert!(kept.is_none(), "nothing was kept");
        let (dy, x, weights) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weights.as_ref())?);
        let biases = self.fetch_biases(layer)?;
        let mut dx_here = dx.as_ref().map(|dx| self.fetch((**dx).as_ref())).transpose()?;
        self.change(dweights, |dweights| {
            self.change_pairs(gradients, |table, gradients| {
                let layer = table.experts(layer, &biases)?;
                self.cpu.experts_backward(&dy, &x, &weights, dispatch, &layer, None, gradients, dweights, dx_here.as_mut())
            })
        })?;
        match (dx_here, dx) {
            (Some(here), Some(dx)) => self.send(&here, dx.as_mut()),
            _ => Ok(()),
        }
    }

    fn sigmoid_gate(&self, x: &Tensor, gates: &Tensor, y: &mut Tensor) -> Result<()> {
        let (x, gates) = (self.fetch(x.as_ref())?, self.fetch(gates.as_ref())?);
        self.change(y, |y| self.cpu.sigmoid_gate(&x, &gates, y))
    }

    fn sigmoid_gate_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gates: &Tensor,
        dx: &mut Tensor,
        dgates: &mut Tensor,
    ) -> Result<()> {
        let (dy, x, gates) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(gates.as_ref())?);
        self.change(dx, |dx| self.change(dgates, |dgates| self.cpu.sigmoid_gate_backward(&dy, &x, &gates, dx, dgates)))
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
        let (x, rotary) = (self.fetch(x.as_ref())?, self.fetch_rotary(rotary)?);
        self.change(y, |y| self.cpu.rotate_heads(&x, heads, &rotary, style, turn, y))
    }

    fn norm_heads(&self, x: &Tensor, heads: &HeadMove, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight) = (self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.norm_heads(&x, heads, weight.as_ref(), eps, y))
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
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(dx, |dx| self.cpu.norm_heads_backward(&dy, &x, heads, weight.as_ref(), eps, dx))
    }

    fn head_linear(&self, x: &Tensor, layer: &Linear<'_>, part: &HeadPart, side: HeadSide, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.head_linear(&x, &self.far.table().linear(layer, &None)?, part, side, y))
    }

    fn head_linear_gradients(
        &self,
        heads: &Tensor,
        latents: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        let (heads, latents) = (self.fetch(heads.as_ref())?, self.fetch(latents.as_ref())?);
        self.change_pairs(gradients, |table, views| {
            self.cpu.head_linear_gradients(&heads, &latents, &table.linear(layer, &None)?, part, views)
        })
    }

    fn check_delta(&self, g: &DeltaGeometry) -> Result<()> {
        self.cpu.check_delta(g)
    }

    fn delta_scratch_bytes(&self, g: &DeltaGeometry, tokens: usize) -> usize {
        self.cpu.delta_scratch_bytes(g, tokens)
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
        let (projection, params) = (self.fetch(projection.as_ref())?, self.fetch_delta_params(params)?);
        let mut here = self.fetch_delta(out)?;
        {
            let mut table = self.far.table();
            let states = states.map(|s| table.states(s)).transpose()?;
            self.cpu.delta_inputs(&projection, &delta_params(&params), g, spans, states, &mut here)?;
        }
        self.send_delta(&here, out)
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
        let (projection, params) = (self.fetch(projection.as_ref())?, self.fetch_delta_params(params)?);
        let mut gradient = self.fetch_delta(gradient)?;
        self.change(dprojection, |d| {
            self.cpu.delta_inputs_backward(&mut gradient, &projection, &delta_params(&params), g, spans, d)
        })
    }

    fn delta_rule(
        &self,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut Tensor,
    ) -> Result<()> {
        let inputs = self.fetch_delta(inputs)?;
        let mut here = self.fetch(out.as_ref())?;
        {
            let mut table = self.far.table();
            let states = states.map(|s| table.states(s)).transpose()?;
            self.cpu.delta_rule(&inputs, g, spans, states, &mut here)?;
        }
        self.send(&here, out.as_mut())
    }

    fn delta_rule_backward(
        &self,
        dout: &Tensor,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        gradient: &mut DeltaInputs,
    ) -> Result<()> {
        let (dout, inputs, mut here) = (self.fetch(dout.as_ref())?, self.fetch_delta(inputs)?, self.fetch_delta(gradient)?);
        self.cpu.delta_rule_backward(&dout, &inputs, g, spans, &mut here)?;
        self.send_delta(&here, gradient)
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
        let (x, projection, weight) = (self.fetch(x.as_ref())?, self.fetch(projection.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.gated_norm(&x, &projection, weight.as_ref(), eps, g, y))
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
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        let (projection, mut dx_here) = (self.fetch(projection.as_ref())?, self.fetch(dx.as_ref())?);
        self.change(dprojection, |d| {
            self.cpu.gated_norm_backward(&dy, &x, &projection, weight.as_ref(), eps, g, &mut dx_here, d)
        })?;
        self.send(&dx_here, dx.as_mut())
    }
}
