//! Attention over latents (DeepSeek-V2, arXiv:2405.04434, section 2.1): one latent for each token, from which a frozen layer would make the keys and the values
//! of all heads. It is never made to: its half for keys is absorbed into queries, and its half for values comes after attention, whose only key head is the latent
//! with a rotated part behind it. Training, prefill and decode all go this way, so that their bits agree.

use std::rc::Rc;
use std::sync::Arc;

use super::attention::{Attended, AttentionSight, KvAccess, attend, check_access, check_spans, like, like_qkv};
use super::linear::check_groups;
use super::{check, check_f32, check_vector};
use crate::backend::{Backend, HeadColumns, HeadMove, HeadPart, HeadSide, Qkv, Rotary, RotaryStyle, Turn};
use crate::tape::{Backward, Linear, LoraGroup, LoraSite, Tape, Var, in_dtype, in_f32};
use crate::{DType, Error, KvValues, Result, Tensor, TensorRef};

const OP: &str = "latent attention";

/// Angles of the rotated part of queries and keys.
#[derive(Clone)]
pub struct LatentRotary {
    /// Of the batch's positions, `[tokens, rope_dim / 2]`.
    pub angles: Rc<Rotary>,
    /// What turns against each other.
    pub style: RotaryStyle,
}

/// What attention over latents reads beside queries and latents.
#[derive(Clone)]
pub struct LatentAttention<'a> {
    /// One key head of `latent + rope_dim` numbers, the first `latent` of which are its value.
    pub sight: AttentionSight<'a>,
    /// `latent → heads * (nope_dim + value_dim)`, for each head its keys and then its values (`kv_b_proj` of Hugging Face), without bias; low-rank pairs are over all of it.
    pub layer: Linear<'a>,
    /// The part of a query that does not turn.
    pub nope_dim: usize,
    /// Width of a value of a head.
    pub value_dim: usize,
    /// Angles.
    pub rotary: LatentRotary,
}

/// The widths of an attention over latents.
#[derive(Clone, Copy)]
struct Widths {
    heads: usize,
    latent: usize,
    rope: usize,
    nope: usize,
    value: usize,
}

impl Widths {
    /// Keys of the layer, between the matrix of queries and that of absorbed queries.
    fn keys(&self) -> HeadPart {
        HeadPart {
            heads: self.heads,
            width: self.nope,
            outputs: HeadColumns { first: 0, stride: self.nope + self.value },
            columns: HeadColumns { first: 0, stride: self.nope + self.rope },
            latent_stride: self.latent + self.rope,
        }
    }

    /// Values of the layer, between the matrix of what attention finds and that of results.
    fn values(&self) -> HeadPart {
        HeadPart {
            heads: self.heads,
            width: self.value,
            outputs: HeadColumns { first: self.nope, stride: self.nope + self.value },
            columns: HeadColumns { first: 0, stride: self.value },
            latent_stride: self.latent,
        }
    }

    /// The rotated part, in the matrix of queries and in that of absorbed queries.
    fn rotated(&self) -> [HeadColumns; 2] {
        let behind = |first, rope| HeadColumns { first, stride: first + rope };
        [behind(self.nope, self.rope), behind(self.latent, self.rope)]
    }
}

impl<'a> Tape<'a> {
    /// f32 `kv: [tokens, latent + rope_dim]` to keys of that shape in `dtype`: RMSNorm of the latents with frozen f32 `norm: [latent]`, and the others rotated.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn latent_keys(&mut self, kv: &Var, norm: TensorRef<'a>, eps: f32, rotary: &LatentRotary, dtype: DType) -> Result<Var> {
        let (latent, width) = (norm.shape().len(), kv.value().shape().row_len());
        check_vector(OP, norm, latent)?;
        check_f32(OP, kv.value(), width)?;
        let rope = width.saturating_sub(latent);
        check_rotary(rotary, rope, kv.value().rows())?;
        let at = |first| HeadColumns { first, stride: width };
        let normed = HeadMove { heads: 1, width: latent, from: at(0), to: at(0) };
        let rotated = HeadMove { heads: 1, width: rope, from: at(latent), to: at(latent) };
        let mut keys = self.backend().scratch(&[kv.value().rows(), width], dtype)?;
        self.backend().norm_heads(kv.value(), &normed, norm, eps, &mut keys)?;
        self.backend().rotate_heads(kv.value(), &rotated, &rotary.angles, rotary.style, Turn::Forth, &mut keys)?;
        let keys = Rc::new(keys);
        if !self.records(&[kv], false) {
            return Ok(self.shared_constant(keys));
        }
        let (input, node, rotary) = (kv.shared(), kv.node(), rotary.clone());
        Ok(self.push(keys, move |pass, dkeys| {
            let dkeys = in_f32(pass.backend, dkeys)?;
            let mut dkv = pass.backend.scratch(input.shape().dims(), dtype)?;
            pass.backend.norm_heads_backward(&dkeys, &input, &normed, norm, eps, &mut dkv)?;
            pass.backend.rotate_heads(&dkeys, &rotated, &rotary.angles, rotary.style, Turn::Back, &mut dkv)?;
            pass.accumulate(node, Rc::new(dkv))
        }))
    }

    /// f32 `q: [tokens, heads * (nope_dim + rope_dim)]`, not yet rotated, and keys of [`Tape::latent_keys`] in the layer's dtype, to
    /// `[tokens, heads * value_dim]` in that dtype.
    ///
    /// # Errors
    /// If shapes, dtypes, the sequences or their pages do not fit, or the tape would have to go back through a cache.
    pub fn latent_attention(&mut self, q: &Var, keys: Var, input: &LatentAttention<'a>, kv: KvAccess<'_>) -> Result<Var> {
        let (g, backend, tokens) = (input.sight.geometry, self.backend(), q.value().rows());
        let (dtype, widths) = (input.layer.weight.dtype(), check_input(backend, q, &keys, input, self.tokens_of(tokens))?);
        let has_weights = input.layer.lora.iter().any(|g| !g.projections.is_empty());
        let records = self.records(&[q, &keys], has_weights);
        check_access(&input.sight.spans, &g, dtype, &kv, records)?;
        self.check_queries(input.sight.queries.as_deref(), &input.sight.spans, &kv, records)?;

        let narrow_q = in_dtype(backend, q.shared(), dtype)?;
        let mut absorbed = backend.scratch(&[tokens, g.heads, g.head_dim], dtype)?;
        backend.head_linear(&narrow_q, &input.layer, &widths.keys(), HeadSide::ToLatents, &mut absorbed)?;
        let [from, to] = widths.rotated();
        let rotated = HeadMove { heads: g.heads, width: widths.rope, from, to };
        let LatentRotary { angles, style } = input.rotary.clone();
        backend.rotate_heads(q.value(), &rotated, &angles, style, Turn::Forth, &mut absorbed)?;
        let (q_node, k_node) = (q.node(), keys.node());
        let qkv = Qkv { q: absorbed, k: keys.into_tensor(backend)?, v: None };
        let Attended { out, log_normalizers } = attend(
            backend,
            &qkv,
            &g,
            (input.sight.sinks, &input.sight.spans, input.sight.queries.as_deref()),
            kv,
            self.copies(tokens),
        )?;
        let mut y = backend.scratch(&[tokens, g.heads * widths.value], dtype)?;
        backend.head_linear(&out, &input.layer, &widths.values(), HeadSide::FromLatents, &mut y)?;
        let y = Rc::new(y);
        if !records {
            return Ok(self.shared_constant(y));
        }
        let (layer, spans) = (input.layer.clone(), input.sight.spans.clone());
        Ok(self.push(y, move |pass, dy| {
            let backend = pass.backend;
            let dy = in_dtype(backend, dy, dtype)?;
            let mut dout = like(backend, &out)?;
            backend.head_linear(&dy, &layer, &widths.values(), HeadSide::ToLatents, &mut dout)?;
            let mut gradient = like_qkv(backend, &qkv)?;
            backend.attention_backward(&dout, &qkv, &out, &log_normalizers, &g, &spans, &mut gradient)?;
            drop(dout);
            let mut dq = backend.scratch(narrow_q.shape().dims(), dtype)?;
            let back = HeadMove { from: rotated.to, to: rotated.from, ..rotated };
            backend.rotate_heads(&gradient.q, &back, &angles, style, Turn::Back, &mut dq)?;
            let dabsorbed = in_dtype(backend, Rc::new(gradient.q), dtype)?;
            backend.head_linear(&dabsorbed, &layer, &widths.keys(), HeadSide::FromLatents, &mut dq)?;
            add_pair_gradients(pass, &layer, [(&dy, &out, widths.values()), (&narrow_q, &dabsorbed, widths.keys())])?;
            pass.accumulate(q_node, Rc::new(dq))?;
            pass.accumulate(k_node, Rc::new(gradient.k))
        }))
    }
}

/// Adds to the gradients of low-rank pairs what both parts of the layer have to say, sequence after sequence: so a batch in several calls adds up to the same.
fn add_pair_gradients(
    pass: &mut Backward<'_>,
    layer: &Linear<'_>,
    parts: [(&Rc<Tensor>, &Rc<Tensor>, HeadPart); 2],
) -> Result<()> {
    let sites: Vec<LoraSite> = layer.lora.iter().flat_map(|g| &g.projections).map(|p| p.site).collect();
    if sites.is_empty() {
        return Ok(());
    }
    let backend = pass.backend;
    let mut gradients = pass.lora.at(&sites);
    let mut rest = &mut gradients[..];
    for group in &*layer.lora {
        let (of_group, others) = rest.split_at_mut(group.projections.len());
        rest = others;
        for sequence in group.sequences.iter() {
            let (tokens, sequences) = (sequence.clone(), Arc::from([sequence.clone()]));
            let one = LoraGroup { tokens, sequences, projections: group.projections.clone() };
            let layer = Linear { lora: Arc::from([one]), ..*layer };
            for (heads, latents, part) in &parts {
                backend.head_linear_gradients(heads, latents, &layer, part, of_group)?;
            }
        }
    }
    Ok(())
}

/// Refuses angles that are not those of so many tokens and numbers.
fn check_rotary(rotary: &LatentRotary, rope: usize, tokens: usize) -> Result<()> {
    if rope == 0 || !rope.is_multiple_of(2) {
        return Err(Error::Unsupported(format!("a rotated part of {rope} behind latents: it is even and not nothing")));
    }
    for angles in [&rotary.angles.cos, &rotary.angles.sin] {
        check_f32(OP, angles, rope / 2)?;
        check_tokens(angles, tokens)?;
    }
    Ok(())
}

fn check_tokens(tensor: &Tensor, tokens: usize) -> Result<()> {
    if tensor.rows() != tokens {
        return Err(Error::Shape { op: OP, expected: format!("{tokens} tokens"), actual: tensor.shape().to_string() });
    }
    Ok(())
}

/// Refuses what does not fit.
fn check_input(backend: &dyn Backend, q: &Var, keys: &Var, input: &LatentAttention<'_>, of_sequences: usize) -> Result<Widths> {
    let (g, w, tokens) = (input.sight.geometry, input.layer.weight, q.value().rows());
    backend.check_attention(&g)?;
    let (KvValues::PrefixOfKey(latent), 1) = (g.values, g.kv_heads) else {
        return Err(Error::Unsupported(format!("latents of {} key heads, values {:?}", g.kv_heads, g.values)));
    };
    let widths = Widths { heads: g.heads, latent, rope: g.head_dim - latent, nope: input.nope_dim, value: input.value_dim };
    let outputs = input.nope_dim.checked_add(input.value_dim).and_then(|n| n.checked_mul(g.heads));
    let is_split = input.nope_dim > 0 && input.value_dim > 0;
    if !is_split || outputs != Some(w.out_features()) || w.in_features() != latent || input.layer.bias.is_some() {
        return Err(Error::Shape {
            op: OP,
            expected: format!("{latent} → {} heads of {} + {}, no bias", g.heads, input.nope_dim, input.value_dim),
            actual: format!("{} → {}", w.in_features(), w.out_features()),
        });
    }
    check_groups(OP, &input.layer.lora, tokens, w)?;
    if let Some(p) = input.layer.lora.iter().flat_map(|g| &g.projections).find(|p| p.b.out_features() != w.out_features()) {
        let (expected, actual) =
            (format!("pairs of all {} outputs", w.out_features()), format!("{} of them", p.b.out_features()));
        return Err(Error::Shape { op: OP, expected, actual });
    }
    check_rotary(&input.rotary, widths.rope, tokens)?;
    check_f32(OP, q.value(), g.heads * (widths.nope + widths.rope))?;
    check(OP, keys.value(), w.dtype(), g.head_dim)?;
    check_tokens(keys.value(), tokens)?;
    if let Some(sinks) = input.sight.sinks {
        check_vector(OP, sinks, g.heads)?;
    }
    check_spans(&input.sight.spans, of_sequences)?;
    Ok(widths)
}
