//! Attention from a fused projection: per-head norm, rotary embedding, then causal attention over pages of keys and values.

use std::rc::Rc;

use super::{check_f32, check_vector};
use crate::backend::{AttentionGeometry, AttentionSpan, Backend, Qkv, QkvLayout, Rotary};
use crate::tape::{Tape, Var, in_f32};
use crate::{DType, Error, KV_PAGE_TOKENS, KvPages, Result, Tensor, TensorRef};

const OP: &str = "attention";

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
    /// Where the projection has its heads, and what of them turns.
    pub layout: QkvLayout,
    /// Weights of the per-head norms of q and k, `[head_dim]` each, f32; `None` for models without.
    pub norms: Option<[TensorRef<'a>; 2]>,
    /// Logits that join the softmax of each query head without a value, `[heads]`, f32 and frozen (gpt-oss); `None` for models without.
    pub sinks: Option<TensorRef<'a>>,
    /// Angles of the batch's positions.
    pub rotary: Rc<Rotary>,
    /// The sequences of the batch, in order; they cover all tokens.
    pub spans: Rc<[AttentionSpan<'a>]>,
}

impl<'a> Tape<'a> {
    /// f32 `qkv: [tokens, layout.width]` (queries, keys, values and, where the layout has them, gates) to `[tokens, heads * head_dim]` in `dtype`.
    ///
    /// # Errors
    /// If shapes, the layout, the sequences or their pages do not fit, or the tape would have to go back through a cache.
    pub fn attention(&mut self, qkv: &Var, input: &AttentionInput<'a>, kv: KvAccess<'_>, dtype: DType) -> Result<Var> {
        let (g, layout) = (input.geometry, input.layout);
        self.backend().check_attention(&g)?;
        check_layout(&layout, &g)?;
        check_f32(OP, qkv.value(), layout.width)?;
        let (tokens, backend) = (qkv.value().rows(), self.backend());
        for angles in [&input.rotary.cos, &input.rotary.sin].into_iter().filter(|_| layout.rotary_dim > 0) {
            check_f32(OP, angles, layout.rotary_dim / 2)?;
            if angles.rows() != tokens {
                return Err(Error::Shape {
                    op: OP,
                    expected: format!("angles of {tokens} tokens"),
                    actual: angles.shape().to_string(),
                });
            }
        }
        for norm in input.norms.iter().flatten() {
            check_vector(OP, *norm, g.head_dim)?;
        }
        if let Some(sinks) = input.sinks {
            check_vector(OP, sinks, g.heads)?;
        }
        check_spans(&input.spans, tokens)?;
        let records = self.records(&[qkv], false);
        match &kv {
            KvAccess::Cache(_) if records => return Err(Error::Unsupported("gradients through a KV cache".into())),
            KvAccess::Cache(pages) => check_pages(&input.spans, &g, dtype, pages)?,
            KvAccess::None => {
                if let Some(span) = input.spans.iter().find(|s| s.past > 0) {
                    return Err(Error::Unsupported(format!("a sequence with {} cached tokens needs its cache", span.past)));
                }
            }
        }
        let mut split = Qkv {
            q: backend.scratch(&[tokens, g.heads, g.head_dim], dtype)?,
            k: backend.scratch(&[tokens, g.kv_heads, g.head_dim], dtype)?,
            v: backend.scratch(&[tokens, g.kv_heads, g.head_dim], dtype)?,
        };
        backend.norm_rotate(qkv.value(), input.norms, &input.rotary, &g, &layout, &mut split)?;
        let mut out = backend.scratch(&[tokens, g.heads * g.head_dim], dtype)?;
        let mut log_normalizers = backend.scratch(&[tokens, g.heads], DType::F32)?;
        let mut attend = |spans: &[AttentionSpan<'_>], pages: &mut KvPages| {
            backend.write_kv(&split, &g, spans, pages)?;
            backend.attention(&split.q, &g, input.sinks, spans, pages, &mut out, &mut log_normalizers)
        };
        match kv {
            KvAccess::Cache(pages) => attend(&input.spans, pages)?,
            KvAccess::None => {
                // Keys and values in the layout of a cache, with pages of this batch alone.
                let count = |s: &AttentionSpan<'_>| s.tokens.len().div_ceil(KV_PAGE_TOKENS);
                // Short sequences leave most of their page empty: so many at a time that the pages of all take little more than their tokens.
                let longest = input.spans.iter().map(count).max().unwrap_or(0);
                let num_pages = longest.max(whole_batch_pages(tokens)).min(input.spans.iter().map(count).sum());
                let ids: Vec<u32> = (0..num_pages as u32).collect();
                let mut pages = backend.scratch_kv_pages(ids.len(), g.kv_heads, g.head_dim, dtype)?;
                let mut batch: Vec<AttentionSpan<'_>> = Vec::new();
                let mut first_free = 0;
                for span in input.spans.iter() {
                    if first_free + count(span) > num_pages {
                        attend(&batch, &mut pages)?;
                        batch.clear();
                        first_free = 0;
                    }
                    let of_span = &ids[first_free..first_free + count(span)];
                    first_free += of_span.len();
                    batch.push(AttentionSpan { tokens: span.tokens.clone(), past: 0, pages: of_span });
                }
                attend(&batch, &mut pages)?;
            }
        }
        let out = Rc::new(out);
        let mut y = out.clone();
        if layout.gate.is_some() {
            let mut gated = backend.scratch(out.shape().dims(), dtype)?;
            backend.gate_heads(&out, qkv.value(), &g, &layout, &mut gated)?;
            y = Rc::new(gated);
        }
        if !records {
            return Ok(self.shared_constant(y));
        }
        let (projection, node, saved, input) = (qkv.shared(), qkv.node(), out, input.clone());
        Ok(self.push(y, move |pass, dy| {
            let like = |t: &Tensor| pass.backend.scratch(t.shape().dims(), DType::F32);
            let mut dout = in_f32(pass.backend, dy)?;
            let mut dqkv = pass.backend.scratch(projection.shape().dims(), dtype)?;
            if layout.gate.is_some() {
                let mut dattended = like(&saved)?;
                pass.backend.gate_heads_backward(&dout, &saved, &projection, &g, &layout, &mut dattended, &mut dqkv)?;
                dout = Rc::new(dattended);
            }
            let mut gradient = Qkv { q: like(&split.q)?, k: like(&split.k)?, v: like(&split.v)? };
            pass.backend.attention_backward(&dout, &split, &saved, &log_normalizers, &g, &input.spans, &mut gradient)?;
            drop(dout);
            pass.backend.norm_rotate_backward(&gradient, &projection, input.norms, &input.rotary, &g, &layout, &mut dqkv)?;
            pass.accumulate(node, Rc::new(dqkv))
        }))
    }
}

/// Pages for the keys and values of a pass over `tokens` tokens that is not over a cache, unless one sequence needs more: twice those that full
/// pages would need, and enough sequences at a time for many threads.
fn whole_batch_pages(tokens: usize) -> usize {
    (2 * tokens.div_ceil(KV_PAGE_TOKENS)).max(16)
}

/// Bytes of keys and values in pages that a pass over `tokens` tokens takes at most, if it is not over a cache.
pub fn attention_pages_bytes(backend: &dyn Backend, tokens: usize, g: &AttentionGeometry, dtype: DType) -> usize {
    whole_batch_pages(tokens) * backend.kv_page_bytes(g.kv_heads, g.head_dim, dtype)
}

/// Refuses heads that overlap or leave columns to nobody, and turns of more or less than pairs of a head.
fn check_layout(layout: &QkvLayout, g: &AttentionGeometry) -> Result<()> {
    if layout.rotary_dim > g.head_dim || !layout.rotary_dim.is_multiple_of(2) {
        let (turning, d) = (layout.rotary_dim, g.head_dim);
        return Err(Error::Unsupported(format!("a rotary part of {turning} in heads of {d}: it is even and at most a head")));
    }
    let all = [
        Some((layout.q, g.heads)),
        Some((layout.k, g.kv_heads)),
        Some((layout.v, g.kv_heads)),
        layout.gate.map(|gate| (gate, g.heads)),
    ];
    let heads = all.into_iter().flatten().flat_map(|(columns, heads)| {
        (0..heads).map(move |head| columns.stride.saturating_mul(head).saturating_add(columns.first))
    });
    let mut firsts: Vec<usize> = heads.collect();
    firsts.sort_unstable();
    let whole =
        firsts.iter().enumerate().all(|(i, &first)| first == i * g.head_dim) && layout.width == firsts.len() * g.head_dim;
    if !whole {
        return Err(Error::Shape {
            op: OP,
            expected: format!("a layout of {} columns as heads of {} side by side", layout.width, g.head_dim),
            actual: format!("heads from {firsts:?}"),
        });
    }
    Ok(())
}

/// Refuses sequences that are not all of a batch of `tokens`, one after another.
fn check_spans(spans: &[AttentionSpan<'_>], tokens: usize) -> Result<()> {
    let follow = |end, s: &AttentionSpan<'_>| (s.tokens.start == end && s.tokens.end >= end).then_some(s.tokens.end);
    if spans.iter().try_fold(0, follow) != Some(tokens) {
        let actual = spans.iter().map(|s| s.tokens.clone()).collect::<Vec<_>>();
        return Err(Error::Shape {
            op: OP,
            expected: format!("sequences that cover 0..{tokens}"),
            actual: format!("{actual:?}"),
        });
    }
    Ok(())
}

/// Refuses a cache of another shape, pages that are not there or not enough, and a page that two sequences would write.
fn check_pages(spans: &[AttentionSpan<'_>], g: &AttentionGeometry, dtype: DType, pages: &KvPages) -> Result<()> {
    if pages.dtype != dtype {
        return Err(Error::DType { op: OP, expected: dtype, actual: pages.dtype });
    }
    if [pages.num_kv_heads, pages.head_dim] != [g.kv_heads, g.head_dim] {
        return Err(Error::Shape {
            op: OP,
            expected: format!("a cache of {} heads of {}", g.kv_heads, g.head_dim),
            actual: format!("{} heads of {}", pages.num_kv_heads, pages.head_dim),
        });
    }
    let mut written = Vec::new();
    for span in spans {
        let len = span.past.saturating_add(span.tokens.len());
        if len.div_ceil(KV_PAGE_TOKENS) > span.pages.len() {
            return Err(Error::Shape {
                op: OP,
                expected: format!("pages for {len} tokens"),
                actual: format!("{:?}", span.pages),
            });
        }
        if let Some(&page) = span.pages.iter().find(|&&p| p as usize >= pages.num_pages) {
            return Err(Error::Index { op: OP, what: "pages", index: page as usize, size: pages.num_pages });
        }
        if !span.tokens.is_empty() {
            written.extend_from_slice(&span.pages[span.past / KV_PAGE_TOKENS..len.div_ceil(KV_PAGE_TOKENS)]);
        }
    }
    written.sort_unstable();
    if let Some(twice) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::Unsupported(format!("two places of a batch would write page {} of the cache", twice[0])));
    }
    Ok(())
}
