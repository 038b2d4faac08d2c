//! Attention from a fused projection: per-head norm, rotary embedding, then causal attention over pages of keys and values.

use std::rc::Rc;

use super::check_f32;
use crate::backend::{AttentionGeometry, AttentionSpan, Qkv, Rotary};
use crate::tape::{Tape, Var};
use crate::{DType, Error, KV_PAGE_TOKENS, KvPages, Result, Tensor, TensorRef};

/// Where keys and values of a batch live.
pub enum KvAccess<'k> {
    /// Nowhere: every sequence is whole, and its keys and values are forgotten after the op. The only kind that can go back.
    None,
    /// In the pages of a cache, to which new tokens are added.
    Cache(&'k mut KvPages),
}

/// What attention reads beside the projection.
#[derive(Clone)]
pub struct AttentionInput<'a> {
    /// Shapes.
    pub geometry: AttentionGeometry,
    /// Weights of the per-head norms of q and k, `[head_dim]` each, f32; `None` for models without.
    pub norms: Option<[TensorRef<'a>; 2]>,
    /// Angles of the batch's positions.
    pub rotary: Rc<Rotary>,
    /// The sequences of the batch.
    pub spans: Rc<[AttentionSpan<'a>]>,
}

impl<'a> Tape<'a> {
    /// f32 `qkv: [tokens, (heads + 2 * kv_heads) * head_dim]` (queries, keys, values) to `[tokens, heads * head_dim]` in `dtype`.
    ///
    /// # Errors
    /// If the width of `qkv` or the pages of a sequence do not fit, or the tape would have to go back through a cache.
    pub fn attention(&mut self, qkv: &Var, input: &AttentionInput<'a>, kv: KvAccess<'_>, dtype: DType) -> Result<Var> {
        const OP: &str = "attention";
        let g = input.geometry;
        check_f32(OP, qkv.value(), g.qkv_width())?;
        let (tokens, backend) = (qkv.value().rows(), self.backend());
        if !g.heads.is_multiple_of(g.kv_heads) || !g.head_dim.is_multiple_of(2) || g.head_dim > HEAD_DIM_MAX {
            return Err(Error::Unsupported(format!(
                "attention with {} heads, {} kv heads of {}: heads must be a multiple of kv heads, and their width even and at most {HEAD_DIM_MAX}",
                g.heads, g.kv_heads, g.head_dim
            )));
        }
        if input.rotary.cos.rows() != tokens || input.spans.iter().any(|s| s.tokens.end > tokens) {
            return Err(Error::Shape { op: OP, expected: format!("{tokens} tokens"), actual: format!("{:?}", input.spans) });
        }
        let mut split = Qkv {
            q: Tensor::scratch(&[tokens, g.heads, g.head_dim], dtype),
            k: Tensor::scratch(&[tokens, g.kv_heads, g.head_dim], dtype),
            v: Tensor::scratch(&[tokens, g.kv_heads, g.head_dim], dtype),
        };
        backend.norm_rotate(qkv.value(), input.norms, &input.rotary, &g, &mut split);
        let mut out = Tensor::scratch(&[tokens, g.heads * g.head_dim], dtype);
        let mut log_normalizers = Tensor::scratch(&[tokens, g.heads], DType::F32);
        let cached = match kv {
            KvAccess::Cache(pages) => {
                for span in input.spans.iter() {
                    let len = span.past + span.tokens.len();
                    if len > span.pages.len() * KV_PAGE_TOKENS || span.pages.iter().any(|&p| p as usize >= pages.num_pages) {
                        return Err(Error::Shape {
                            op: OP,
                            expected: format!("pages for {len} tokens, below {}", pages.num_pages),
                            actual: format!("{:?}", span.pages),
                        });
                    }
                }
                backend.write_kv(&split, &g, &input.spans, pages);
                backend.attention(&split.q, &g, &input.spans, pages, &mut out, &mut log_normalizers);
                true
            }
            KvAccess::None => {
                if let Some(span) = input.spans.iter().find(|s| s.past > 0) {
                    return Err(Error::Unsupported(format!("a sequence with {} cached tokens needs its cache", span.past)));
                }
                // Keys and values in the layout of a cache, with pages of this batch alone.
                let counts = input.spans.iter().map(|s| s.tokens.len().div_ceil(KV_PAGE_TOKENS) as u32);
                let ids: Vec<u32> = (0..counts.clone().sum()).collect();
                let mut pages = KvPages::recycled(ids.len(), g.kv_heads, g.head_dim, dtype);
                let mut rest = &ids[..];
                let spans: Vec<AttentionSpan<'_>> = input
                    .spans
                    .iter()
                    .zip(counts)
                    .map(|(span, count)| {
                        let (own, others) = rest.split_at(count as usize);
                        rest = others;
                        AttentionSpan { tokens: span.tokens.clone(), past: 0, pages: own }
                    })
                    .collect();
                backend.write_kv(&split, &g, &spans, &mut pages);
                backend.attention(&split.q, &g, &spans, &pages, &mut out, &mut log_normalizers);
                false
            }
        };
        let out = Rc::new(out);
        if !self.records(&[qkv], false) {
            return Ok(self.shared_constant(out));
        }
        if cached {
            return Err(Error::Unsupported("gradients through a KV cache".into()));
        }
        let (projection, node, saved, input) = (qkv.shared(), qkv.node(), out.clone(), input.clone());
        Ok(self.push(out, move |pass, dout| {
            let like = |t: &Tensor| Tensor::scratch(t.shape().dims(), DType::F32);
            let mut gradient = Qkv { q: like(&split.q), k: like(&split.k), v: like(&split.v) };
            pass.backend.attention_backward(&dout, &split, &saved, &log_normalizers, &g, &input.spans, &mut gradient);
            let mut dqkv = Tensor::scratch(projection.shape().dims(), dtype);
            pass.backend.norm_rotate_backward(&gradient, &projection, input.norms, &input.rotary, &g, &mut dqkv);
            pass.accumulate(node, Rc::new(dqkv));
            Ok(())
        }))
    }
}

/// The widest head that the kernels have registers and stack for.
const HEAD_DIM_MAX: usize = 512;
