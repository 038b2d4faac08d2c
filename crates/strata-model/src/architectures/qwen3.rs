//! Qwen3 dense, as `Qwen3ForCausalLM` of transformers computes it.
//!
//! A decoder layer is RMSNorm, grouped-query attention with per-head RMSNorm of queries and keys and rotary positions, a residual addition, RMSNorm, SwiGLU, and
//! another addition. q, k and v are one matrix here, and so are gate and up; each keeps its own low-rank pair. The residual stream is f32.

use std::rc::Rc;

use strata_tensor::{
    AttentionGeometry, AttentionInput, Backend, Between, DType, EmbeddingTable, HostRef, KV_PAGE_TOKENS, KvAccess, KvValues,
    Linear, PackedRef, PackedStack, QkvLayout, Tape, Tensor, Var, WeightFormat, attention_pages_bytes, go_on,
};

use super::{Architecture, BatchInputs, Observed, Observer, Parameter, WeightSource};
use crate::lora::{LoraModule, Part};
use crate::{KvCache, ModelConfig, Result};

/// Places of the modules in [`Qwen3::lora_modules`].
mod module {
    pub const Q: usize = 0;
    pub const K: usize = 1;
    pub const V: usize = 2;
    pub const O: usize = 3;
    pub const GATE: usize = 4;
    pub const UP: usize = 5;
    pub const DOWN: usize = 6;
    pub const UNEMBED: usize = 7;
}

/// Weights of a Qwen3 model.
pub(super) struct Qwen3 {
    dtype: DType,
    geometry: AttentionGeometry,
    num_layers: usize,
    /// `[vocab_size, hidden_size]`, unless tied to `lm_head`.
    embed_tokens: Option<Tensor>,
    layers: Layers,
    /// `[hidden_size]`.
    norm: Tensor,
    /// One layer of `hidden_size → vocab_size`.
    lm_head: PackedStack,
    lora_modules: Vec<LoraModule>,
}

/// Every parameter of the decoder layers, stacked: `[num_layers, ...]`. Vectors are f32.
struct Layers {
    /// `[hidden_size]`.
    input_layernorm: Tensor,
    /// `hidden_size → (num_heads + 2 * num_kv_heads) * head_dim`: queries, keys, values.
    qkv_proj: PackedStack,
    qkv_bias: Option<Tensor>,
    /// `[head_dim]`.
    q_norm: Tensor,
    /// `[head_dim]`.
    k_norm: Tensor,
    /// `num_heads * head_dim → hidden_size`.
    o_proj: PackedStack,
    o_bias: Option<Tensor>,
    /// `[hidden_size]`.
    post_attention_layernorm: Tensor,
    /// `hidden_size → 2 * intermediate_size`: gate, up.
    gate_up_proj: PackedStack,
    /// `intermediate_size → hidden_size`.
    down_proj: PackedStack,
}

/// Where a parameter goes. Within a layer, a number is the first output it fills of a fused matrix.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    Embedding,
    Norm,
    Unembedding,
    InputLayernorm(usize),
    Qkv(usize, usize),
    QkvBias(usize, usize),
    QNorm(usize),
    KNorm(usize),
    O(usize),
    OBias(usize),
    PostAttentionLayernorm(usize),
    GateUp(usize, usize),
    Down(usize),
}

/// The parameters of a checkpoint of this configuration.
pub(super) fn parameters(c: &ModelConfig) -> Vec<Parameter<Slot>> {
    let (hidden, mlp) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], slot| all.push(Parameter { name, shape: shape.to_vec(), slot });
    // A tied embedding is read into the unembedding, which serves as both.
    let embedding = if c.tie_word_embeddings { Slot::Unembedding } else { Slot::Embedding };
    add("model.embed_tokens.weight".into(), &[c.vocab_size, hidden], embedding);
    for l in 0..c.num_layers {
        let mut add = |name: &str, shape: &[usize], slot| add(format!("model.layers.{l}.{name}"), shape, slot);
        add("input_layernorm.weight", &[hidden], Slot::InputLayernorm(l));
        for (name, first, n) in [("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)] {
            add(&format!("self_attn.{name}.weight"), &[n, hidden], Slot::Qkv(l, first));
            if c.attention_bias {
                add(&format!("self_attn.{name}.bias"), &[n], Slot::QkvBias(l, first));
            }
        }
        add("self_attn.o_proj.weight", &[hidden, q], Slot::O(l));
        if c.attention_bias {
            add("self_attn.o_proj.bias", &[hidden], Slot::OBias(l));
        }
        add("self_attn.q_norm.weight", &[c.head_dim], Slot::QNorm(l));
        add("self_attn.k_norm.weight", &[c.head_dim], Slot::KNorm(l));
        add("post_attention_layernorm.weight", &[hidden], Slot::PostAttentionLayernorm(l));
        add("mlp.gate_proj.weight", &[mlp, hidden], Slot::GateUp(l, 0));
        add("mlp.up_proj.weight", &[mlp, hidden], Slot::GateUp(l, mlp));
        add("mlp.down_proj.weight", &[hidden, mlp], Slot::Down(l));
    }
    add("model.norm.weight".into(), &[hidden], Slot::Norm);
    if !c.tie_word_embeddings {
        add("lm_head.weight".into(), &[c.vocab_size, hidden], Slot::Unembedding);
    }
    all
}

/// Shapes of attention in every layer.
pub(super) fn geometry(c: &ModelConfig) -> AttentionGeometry {
    AttentionGeometry {
        heads: c.num_heads,
        kv_heads: c.num_kv_heads,
        head_dim: c.head_dim,
        scale: (1.0 / (c.head_dim as f64).sqrt()) as f32,
        eps: c.rms_norm_eps,
        window: None,
        values: KvValues::Own(c.head_dim),
    }
}

fn lora_modules(c: &ModelConfig) -> Vec<LoraModule> {
    let (hidden, mlp) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    let layer =
        |path, part, in_features, out_features| LoraModule { path, part, num_layers: c.num_layers, in_features, out_features };
    vec![
        layer("self_attn.q_proj", Part::Attention, hidden, q),
        layer("self_attn.k_proj", Part::Attention, hidden, kv),
        layer("self_attn.v_proj", Part::Attention, hidden, kv),
        layer("self_attn.o_proj", Part::Attention, q, hidden),
        layer("mlp.gate_proj", Part::Mlp, hidden, mlp),
        layer("mlp.up_proj", Part::Mlp, hidden, mlp),
        layer("mlp.down_proj", Part::Mlp, mlp, hidden),
        LoraModule { num_layers: 1, ..layer("lm_head", Part::Unembed, hidden, c.vocab_size) },
    ]
}

impl Qwen3 {
    /// Fills a model from `weights`.
    pub(super) fn build(
        backend: &dyn Backend,
        c: &ModelConfig,
        format: WeightFormat,
        weights: &mut dyn WeightSource,
    ) -> Result<Self> {
        let dtype = format.compute;
        let (n, hidden, mlp, d) = (c.num_layers, c.hidden_size, c.intermediate_size, c.head_dim);
        let geometry = geometry(c);
        let qkv = geometry.qkv_width();
        let vectors = |width: usize| backend.zeros(&[n, width], DType::F32);
        let embedding = || backend.zeros(&[c.vocab_size, hidden], dtype);
        let mut model = Qwen3 {
            dtype,
            geometry,
            num_layers: n,
            embed_tokens: (!c.tie_word_embeddings).then(embedding).transpose()?,
            layers: Layers {
                input_layernorm: vectors(hidden)?,
                qkv_proj: backend.packed(n, hidden, qkv, format)?,
                qkv_bias: c.attention_bias.then(|| vectors(qkv)).transpose()?,
                q_norm: vectors(d)?,
                k_norm: vectors(d)?,
                o_proj: backend.packed(n, c.num_heads * d, hidden, format)?,
                o_bias: c.attention_bias.then(|| vectors(hidden)).transpose()?,
                post_attention_layernorm: vectors(hidden)?,
                gate_up_proj: backend.packed(n, hidden, 2 * mlp, format)?,
                down_proj: backend.packed(n, mlp, hidden, format)?,
            },
            norm: backend.zeros(&[1, hidden], DType::F32)?,
            lm_head: backend.packed(1, hidden, c.vocab_size, format)?,
            lora_modules: lora_modules(c),
        };
        for p in parameters(c) {
            let element = if p.shape.len() == 1 { DType::F32 } else { dtype };
            weights.read(&p.name, &p.shape, element, &mut |first, rows| model.store(backend, p.slot, first, rows))?;
        }
        Ok(model)
    }

    /// Writes rows of a parameter, the first of which is row `first`, to their place.
    fn store(&mut self, backend: &dyn Backend, slot: Slot, first: usize, rows: HostRef<'_>) -> Result<()> {
        let layers = &mut self.layers;
        let vector = |stack: &mut Tensor, layer: usize, at: usize| {
            let start = at + first;
            backend.upload(rows, stack.row_mut(layer).into_rows(start..start + rows.shape().len()))
        };
        let bias = "a slot for a bias is made only for models with biases";
        match slot {
            Slot::Embedding => {
                let table = self.embed_tokens.as_mut().expect("an untied model has a table of embeddings");
                backend.upload(rows, table.rows_mut(first..first + rows.shape().leading()))?;
            }
            Slot::Unembedding => backend.upload_rows(&mut self.lm_head, 0, first, rows)?,
            Slot::Norm => vector(&mut self.norm, 0, 0)?,
            Slot::InputLayernorm(l) => vector(&mut layers.input_layernorm, l, 0)?,
            Slot::PostAttentionLayernorm(l) => vector(&mut layers.post_attention_layernorm, l, 0)?,
            Slot::QNorm(l) => vector(&mut layers.q_norm, l, 0)?,
            Slot::KNorm(l) => vector(&mut layers.k_norm, l, 0)?,
            Slot::QkvBias(l, at) => vector(layers.qkv_bias.as_mut().expect(bias), l, at)?,
            Slot::OBias(l) => vector(layers.o_bias.as_mut().expect(bias), l, 0)?,
            Slot::Qkv(l, at) => backend.upload_rows(&mut layers.qkv_proj, l, at + first, rows)?,
            Slot::O(l) => backend.upload_rows(&mut layers.o_proj, l, first, rows)?,
            Slot::GateUp(l, at) => backend.upload_rows(&mut layers.gate_up_proj, l, at + first, rows)?,
            Slot::Down(l) => backend.upload_rows(&mut layers.down_proj, l, first, rows)?,
        }
        Ok(())
    }

    /// One decoder layer. `x`: the residual stream, f32 `[tokens, hidden_size]`.
    fn layer<'a>(
        &'a self,
        tape: &mut Tape<'a>,
        l: usize,
        x: &Var,
        inputs: &LayerInputs<'a>,
        kv: KvAccess<'_>,
    ) -> strata_tensor::Result<Var> {
        let (w, dtype, eps) = (&self.layers, self.dtype, self.geometry.eps);
        let linear = |weight: &'a PackedStack, bias: Option<&'a Tensor>, lora: &Lora<'a>| Linear {
            weight: weight.layer(l),
            bias: bias.map(|bias| bias.row(l)),
            lora: lora.clone(),
        };

        let h = tape.rms_norm(x, w.input_layernorm.row(l), eps, dtype)?;
        let qkv = tape.linear(&h, linear(&w.qkv_proj, w.qkv_bias.as_ref(), &inputs.qkv))?;
        let a = tape.attention(&qkv, &inputs.attention, kv, dtype)?;
        let x = tape.add_linear(x, &a, linear(&w.o_proj, w.o_bias.as_ref(), &inputs.o))?;
        let h = tape.rms_norm(&x, w.post_attention_layernorm.row(l), eps, dtype)?;
        let gate_up = tape.linear(&h, linear(&w.gate_up_proj, None, &inputs.gate_up))?;
        let m = tape.swiglu(&gate_up, dtype)?;
        tape.add_linear(&x, &m, linear(&w.down_proj, None, &inputs.down))
    }

    /// What a batch brings to layer `l`.
    fn layer_inputs<'a>(&'a self, l: usize, inputs: &BatchInputs<'a>) -> LayerInputs<'a> {
        let modules = &self.lora_modules;
        let (q, k) = (modules[module::Q].out_features, modules[module::K].out_features);
        LayerInputs {
            qkv: inputs.lora(l, &[(module::Q, 0), (module::K, q), (module::V, q + k)]),
            o: inputs.lora(l, &[(module::O, 0)]),
            gate_up: inputs.lora(l, &[(module::GATE, 0), (module::UP, modules[module::GATE].out_features)]),
            down: inputs.lora(l, &[(module::DOWN, 0)]),
            attention: AttentionInput {
                geometry: self.geometry,
                norms: Some([self.layers.q_norm.row(l), self.layers.k_norm.row(l)]),
                layout: QkvLayout::fused(&self.geometry),
                sinks: None,
                rotary: inputs.rotary.clone(),
                spans: inputs.spans.clone(),
            },
        }
    }
}

/// What a batch brings to one layer.
struct LayerInputs<'a> {
    qkv: Lora<'a>,
    o: Lora<'a>,
    gate_up: Lora<'a>,
    down: Lora<'a>,
    attention: AttentionInput<'a>,
}

type Lora<'a> = Rc<[strata_tensor::LoraGroup<'a>]>;

impl Architecture for Qwen3 {
    fn hidden<'a>(
        &'a self,
        tape: &mut Tape<'a>,
        inputs: &BatchInputs<'a>,
        mut cache: Option<&mut KvCache>,
        mut observe: Observer<'_>,
        between: &mut Between<'_>,
    ) -> Result<Var> {
        let table = match &self.embed_tokens {
            Some(table) => EmbeddingTable::Rows(table.as_ref()),
            None => EmbeddingTable::Tied(self.lm_head.layer(0)),
        };
        let mut see = |what, value: &Var| match &mut observe {
            Some(observe) => observe(what, value.value()),
            None => Ok(()),
        };
        let mut x = tape.embedding(table, &inputs.batch.tokens)?;
        see(Observed::Embeddings, &x)?;
        for l in 0..self.num_layers {
            let layer_inputs = self.layer_inputs(l, inputs);
            x = match &mut cache {
                Some(cache) => self.layer(tape, l, &x, &layer_inputs, KvAccess::Cache(cache.layer_mut(l)))?,
                None => tape.checkpoint(&x, move |tape, x| self.layer(tape, l, x, &layer_inputs, KvAccess::None))?,
            };
            see(Observed::LayerOutput(l), &x)?;
            if cache.is_none() {
                go_on(between)?;
            }
        }
        let x = tape.rms_norm(&x, self.norm.row(0), self.geometry.eps, self.dtype)?;
        see(Observed::FinalNorm, &x)?;
        Ok(x)
    }

    fn unembedding(&self) -> (PackedRef<'_>, usize) {
        (self.lm_head.layer(0), module::UNEMBED)
    }

    fn lora_modules(&self) -> &[LoraModule] {
        &self.lora_modules
    }

    fn weight_bytes(&self) -> usize {
        let w = &self.layers;
        let stacks = [&w.qkv_proj, &w.o_proj, &w.gate_up_proj, &w.down_proj, &self.lm_head];
        stacks.iter().map(|s| s.size_bytes()).sum::<usize>() + self.embed_tokens.as_ref().map_or(0, Tensor::size_bytes)
    }

    fn train_bytes_per_token(&self, backend: &dyn Backend) -> usize {
        let g = &self.geometry;
        let (qkv, attention) = (g.qkv_width(), g.heads * g.head_dim);
        let modules = &self.lora_modules;
        let (hidden, mlp) = (modules[module::Q].in_features, modules[module::GATE].out_features);
        let (wide, narrow) = (DType::F32.size_bytes(), self.dtype.size_bytes());
        // A checkpoint for each layer, angles, and the gradient and value of the residual stream on their way.
        let stream = wide * (hidden * (self.num_layers + 4) + g.head_dim);
        // What one layer saves for its backward: inputs of its ops.
        let attention_saved = (wide + narrow) * qkv + narrow * attention + wide * g.heads;
        let mlp_saved = wide * hidden + 2 * narrow * hidden + (2 * wide + narrow) * mlp;
        // What goes back through the one and then the other; of attention's own, see `Backend::attention_scratch_bytes`.
        let mlp_gradients = (wide + 2 * narrow) * mlp + (2 * wide + narrow) * hidden;
        let attention_gradients = (wide + narrow) * qkv + 6 * wide * attention + 5 * wide * g.head_dim + 2 * wide * hidden;
        let pages = attention_pages_bytes(backend, KV_PAGE_TOKENS * 64, g, self.dtype) / (KV_PAGE_TOKENS * 64);
        let layer = attention_saved + (mlp_saved + mlp_gradients).max(attention_gradients).max(pages);
        // Rows of odd width are copied for products of pairs.
        let copied = [hidden, attention, mlp].into_iter().filter(|width| width % 2 == 1).max().unwrap_or(0);
        stream + layer + narrow * copied
    }

    fn fixed_bytes(&self, backend: &dyn Backend) -> usize {
        // Of any number of tokens, and of the widest rows that are multiplied.
        let modules = &self.lora_modules;
        let widths = modules
            .iter()
            .flat_map(|m| [m.in_features, m.out_features])
            .chain([self.geometry.qkv_width(), 2 * modules[module::GATE].out_features]);
        let products = widths.map(|width| backend.matmul_scratch_bytes(usize::MAX, width, self.dtype)).max().unwrap_or(0);
        let attention = backend.attention_scratch_bytes(&self.geometry, self.dtype)
            + attention_pages_bytes(backend, 1, &self.geometry, self.dtype);
        // One op at a time has its own.
        products.max(attention)
    }
}
