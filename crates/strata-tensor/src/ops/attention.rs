//! Attention from a fused projection: per-head norm, rotary embedding, then attention over pages of keys and values, causal or to whole sequences.

use std::rc::Rc;

use super::linear::check_layer;
use super::{check, check_f32, check_vector};
use crate::backend::{AttentionGeometry, AttentionSpan, Backend, Qkv, QkvLayout, Rotary, Sight};
use crate::tape::{Linear, Tape, Var, in_f32};
use crate::{DType, Error, KV_PAGE_TOKENS, KvPages, KvValues, Repeats, Result, Tensor, TensorRef};

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
    /// Parts of those whose queries attend, if not all do: the other rows of the result may hold anything. Nothing goes back then.
    pub queries: Option<Rc<[AttentionSpan<'a>]>>,
}

/// What attention of queries, keys and values of their own reads beside them.
#[derive(Clone)]
pub struct AttentionSight<'a> {
    /// Shapes.
    pub geometry: AttentionGeometry,
    /// As in [`AttentionInput`].
    pub sinks: Option<TensorRef<'a>>,
    /// As in [`AttentionInput`].
    pub spans: Rc<[AttentionSpan<'a>]>,
    /// As in [`AttentionInput`].
    pub queries: Option<Rc<[AttentionSpan<'a>]>>,
}

impl<'a> Tape<'a> {
    /// f32 `qkv: [tokens, layout.width]` (queries, keys, values and, where the layout has them, gates) to `[tokens, heads * value width]` in
    /// `dtype`. Values are their own.
    ///
    /// # Errors
    /// If shapes, the layout, the sequences or their pages do not fit, or the tape would have to go back through a cache or through [`Sight::Whole`], which
    /// is also refused with a cache or a window.
    pub fn attention(&mut self, qkv: &Var, input: &AttentionInput<'a>, kv: KvAccess<'_>, dtype: DType) -> Result<Var> {
        let (g, layout) = (input.geometry, input.layout);
        let (tokens, backend) = (qkv.value().rows(), self.backend());
        check_input(backend, input, tokens, self.tokens_of(tokens))?;
        check_f32(OP, qkv.value(), layout.width)?;
        let records = self.records(&[qkv], false);
        check_access(&input.spans, &g, dtype, &kv, records)?;
        self.check_queries(input.queries.as_deref(), &input.spans, &kv, records)?;
        let mut split = room_for_heads(backend, &g, tokens, dtype)?;
        backend.norm_rotate(qkv.value(), input.norms, &input.rotary, &g, &layout, &mut split)?;
        self.attention_of_heads(qkv, split, input, kv, dtype, records)
    }

    /// Attention of what a projection was split into, and the way back through the split.
    fn attention_of_heads(
        &mut self,
        qkv: &Var,
        split: Qkv,
        input: &AttentionInput<'a>,
        kv: KvAccess<'_>,
        dtype: DType,
        records: bool,
    ) -> Result<Var> {
        let (g, layout, tokens, backend) = (input.geometry, input.layout, qkv.value().rows(), self.backend());
        let Attended { out, log_normalizers } =
            attend(backend, &split, &g, (input.sinks, &input.spans, input.queries.as_deref()), kv, self.copies(tokens))?;
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
            let mut dout = in_f32(pass.backend, dy)?;
            let mut dqkv = pass.backend.scratch(projection.shape().dims(), dtype)?;
            if layout.gate.is_some() {
                let mut dattended = like(pass.backend, &saved)?;
                pass.backend.gate_heads_backward(&dout, &saved, &projection, &g, &layout, &mut dattended, &mut dqkv)?;
                dout = Rc::new(dattended);
            }
            let mut gradient = like_qkv(pass.backend, &split)?;
            pass.backend.attention_backward(&dout, &split, &saved, &log_normalizers, &g, &input.spans, &mut gradient)?;
            drop(dout);
            pass.backend.norm_rotate_backward(&gradient, &projection, input.norms, &input.rotary, &g, &layout, &mut dqkv)?;
            pass.accumulate(node, Rc::new(dqkv))
        }))
    }

    /// [`Tape::attention`] of [`Tape::linear`], to the bit. Where nothing goes back what is between them need not be kept, nor written to memory, and elsewhere not be read again.
    ///
    /// # Errors
    /// As both.
    pub fn linear_attention(
        &mut self,
        x: &Var,
        layer: Linear<'a>,
        input: &AttentionInput<'a>,
        kv: KvAccess<'_>,
        dtype: DType,
    ) -> Result<Var> {
        let (tokens, backend, g) = (x.value().rows(), self.backend(), input.geometry);
        let records = self.is_recording();
        // Gates are read once more, when there is something to gate.
        if self.repeats(tokens).is_some() || input.layout.gate.is_some() {
            let qkv = self.linear(x, layer)?;
            return self.attention(&qkv, input, kv, dtype);
        }
        check_layer(OP, x.value(), &layer)?;
        check_input(backend, input, tokens, self.tokens_of(tokens))?;
        if layer.weight.out_features() != input.layout.width {
            let (expected, actual) = (input.layout.width.to_string(), layer.weight.out_features().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
        if !records {
            check_access(&input.spans, &g, dtype, &kv, false)?;
            self.check_queries(input.queries.as_deref(), &input.spans, &kv, false)?;
        }
        let mut split = room_for_heads(backend, &g, tokens, dtype)?;
        let (norms, rotary, layout) = (input.norms, &input.rotary, &input.layout);
        let mut kept = records.then(|| backend.scratch(&[tokens, layout.width], DType::F32)).transpose()?;
        let at_once = backend.linear_norm_rotate(x.value(), &layer, norms, rotary, &g, layout, kept.as_mut(), &mut split)?;
        let low = match at_once {
            Some(low) => low,
            None => {
                let qkv = match &mut kept {
                    Some(kept) => kept,
                    none => none.insert(backend.scratch(&[tokens, layout.width], DType::F32)?),
                };
                let low = backend.linear(x.value(), &layer, Some(qkv))?;
                backend.norm_rotate(qkv, norms, rotary, &g, layout, &mut split)?;
                low
            }
        };
        if let Some(kept) = kept.filter(|_| records) {
            let qkv = self.push_linear(None, x, layer, Rc::new(kept), low)?;
            let records = self.records(&[&qkv], false);
            check_access(&input.spans, &g, dtype, &kv, records)?;
            self.check_queries(input.queries.as_deref(), &input.spans, &kv, records)?;
            return self.attention_of_heads(&qkv, split, input, kv, dtype, records);
        }
        let attended =
            attend(backend, &split, &g, (input.sinks, &input.spans, input.queries.as_deref()), kv, self.copies(tokens))?;
        // Two ops, as on a tape that records.
        for _ in 0..2 {
            self.records(&[], false);
        }
        Ok(self.shared_constant(attended.out))
    }

    /// Attention of queries `[tokens, heads * head_dim]` to keys `[tokens, kv_heads * head_dim]` and values `[tokens, kv_heads * value width]`, which are `None`
    /// where they are a part of the keys; all in one dtype, in which the result is too, `[tokens, heads * value width]`.
    ///
    /// # Errors
    /// As [`Tape::attention`], and if dtypes do not fit.
    pub fn attend(&mut self, q: Var, k: Var, v: Option<Var>, sight: &AttentionSight<'a>, kv: KvAccess<'_>) -> Result<Var> {
        let (g, backend, dtype) = (sight.geometry, self.backend(), q.value().dtype());
        backend.check_attention(&g)?;
        if v.is_some() != matches!(g.values, KvValues::Own(_)) {
            return Err(Error::Unsupported(format!("values {:?} beside those given: {}", g.values, v.is_some())));
        }
        let widths = [g.heads * g.head_dim, g.kv_heads * g.head_dim, g.kv_heads * g.values.width()];
        for (x, width) in [Some(&q), Some(&k), v.as_ref()].into_iter().zip(widths) {
            let Some(x) = x else { continue };
            check(OP, x.value(), dtype, width)?;
            if x.value().rows() != q.value().rows() {
                let (expected, actual) = (format!("{} tokens", q.value().rows()), x.value().shape().to_string());
                return Err(Error::Shape { op: OP, expected, actual });
            }
        }
        if let Some(sinks) = sight.sinks {
            check_vector(OP, sinks, g.heads)?;
        }
        check_spans(&sight.spans, self.tokens_of(q.value().rows()))?;
        let inputs: Vec<&Var> = [&q, &k].into_iter().chain(&v).collect();
        let records = self.records(&inputs, false);
        check_access(&sight.spans, &g, dtype, &kv, records)?;
        self.check_queries(sight.queries.as_deref(), &sight.spans, &kv, records)?;
        let nodes = [q.node(), k.node(), v.as_ref().and_then(Var::node)];
        let own = |x: Var| x.into_tensor(backend);
        let split = Qkv { q: own(q)?, k: own(k)?, v: v.map(own).transpose()? };
        let copies = self.copies(split.q.rows());
        let Attended { out, log_normalizers } =
            attend(backend, &split, &g, (sight.sinks, &sight.spans, sight.queries.as_deref()), kv, copies)?;
        if !records {
            return Ok(self.shared_constant(out));
        }
        let (saved, spans) = (out.clone(), sight.spans.clone());
        Ok(self.push(out, move |pass, dout| {
            let dout = in_f32(pass.backend, dout)?;
            let mut gradient = like_qkv(pass.backend, &split)?;
            pass.backend.attention_backward(&dout, &split, &saved, &log_normalizers, &g, &spans, &mut gradient)?;
            let [q, k, v] = nodes;
            pass.accumulate(q, Rc::new(gradient.q))?;
            pass.accumulate(k, Rc::new(gradient.k))?;
            gradient.v.map_or(Ok(()), |gradient| pass.accumulate(v, Rc::new(gradient)))
        }))
    }
}

/// What becomes of rows that are the same as others.
pub(super) enum Copies {
    /// There are none.
    None,
    /// Keys and values have them, and of queries the first is computed and copied.
    There(Rc<Repeats>),
    /// They are the first of their kind alone.
    LeftOut(Rc<Repeats>),
}

impl Tape<'_> {
    /// What becomes of them in values of so many rows.
    pub(super) fn copies(&self, rows: usize) -> Copies {
        match (self.left_out(), self.repeats(rows)) {
            (Some(left_out), _) => Copies::LeftOut(left_out.clone()),
            (None, Some(repeats)) => Copies::There(repeats),
            (None, None) => Copies::None,
        }
    }

    /// Refuses queries that are no part of the sequences, or beside which all others are wanted: on the way back, or by sequences without a cache.
    pub(super) fn check_queries(
        &self,
        queries: Option<&[AttentionSpan<'_>]>,
        spans: &[AttentionSpan<'_>],
        kv: &KvAccess<'_>,
        records: bool,
    ) -> Result<()> {
        let Some(queries) = queries else { return Ok(()) };
        if records || matches!(kv, KvAccess::None) {
            return Err(Error::Unsupported("some of the queries alone, without a cache or on a way back".into()));
        }
        let own: Vec<AttentionSpan<'_>>;
        let spans = match self.left_out() {
            Some(repeats) => {
                own = spans.iter().filter_map(|span| repeats.own_queries(span)).collect();
                &own
            }
            None => spans,
        };
        for part in queries {
            let is_part = |whole: &AttentionSpan<'_>| {
                let first = part.tokens.start.checked_sub(whole.tokens.start);
                let within = !part.tokens.is_empty() && part.tokens.end <= whole.tokens.end && part.pages == whole.pages;
                within && first.is_some_and(|first| part.past == whole.past + first)
            };
            if !spans.iter().any(is_part) {
                let actual = format!("tokens {:?} after {}", part.tokens, part.past);
                return Err(Error::Shape { op: OP, expected: "queries of the sequences".into(), actual });
            }
        }
        Ok(())
    }
}

/// What attention has found, and the logarithms of the denominators.
pub(super) struct Attended {
    pub(super) out: Rc<Tensor>,
    pub(super) log_normalizers: Tensor,
}

/// Adds keys and values to their pages, or to some of this batch alone, and attends to them: of queries that repeat others, the first alone,
/// and into a cache only those of `queries`, if there are some.
pub(super) fn attend(
    backend: &dyn Backend,
    qkv: &Qkv,
    g: &AttentionGeometry,
    (sinks, spans, queries): (Option<TensorRef<'_>>, &[AttentionSpan<'_>], Option<&[AttentionSpan<'_>]>),
    kv: KvAccess<'_>,
    copies: Copies,
) -> Result<Attended> {
    let (tokens, dtype) = (qkv.q.rows(), qkv.q.dtype());
    let mut out = backend.scratch(&[tokens, g.out_width()], dtype)?;
    let mut log_normalizers = backend.scratch(&[tokens, g.heads], DType::F32)?;
    let mut attend = |spans: &[AttentionSpan<'_>], pages: &mut KvPages| {
        match &copies {
            Copies::LeftOut(repeats) => {
                let mut runs: Vec<_> = spans.iter().map(|span| repeats.runs(span).into_iter()).collect();
                loop {
                    // Runs of one sequence may meet in a page: each is written before the next.
                    let of_each: Vec<AttentionSpan<'_>> = runs.iter_mut().filter_map(Iterator::next).collect();
                    if of_each.is_empty() {
                        break;
                    }
                    backend.write_kv(qkv, g, &of_each, pages)?;
                }
            }
            _ => backend.write_kv(qkv, g, spans, pages)?,
        }
        let spans = match (queries, &copies) {
            (Some(queries), _) => queries,
            (None, Copies::There(repeats)) => &repeats.without_repeated_queries(spans),
            (None, Copies::LeftOut(repeats)) => &spans.iter().filter_map(|span| repeats.own_queries(span)).collect::<Vec<_>>(),
            (None, Copies::None) => spans,
        };
        backend.attention(&qkv.q, g, sinks, spans, pages, &mut out, &mut log_normalizers)
    };
    match kv {
        KvAccess::Cache(pages) => attend(spans, pages)?,
        KvAccess::None => {
            // Keys and values in the layout of a cache, with pages of this batch alone.
            let count = |s: &AttentionSpan<'_>| s.tokens.len().div_ceil(KV_PAGE_TOKENS);
            // Short sequences leave most of their page empty: so many at a time that the pages of all take little more than their tokens.
            let longest = spans.iter().map(count).max().unwrap_or(0);
            let num_pages = longest.max(whole_batch_pages(tokens)).min(spans.iter().map(count).sum());
            let ids: Vec<u32> = (0..num_pages as u32).collect();
            let mut pages = backend.scratch_kv_pages(ids.len(), g.kv_layout(), dtype)?;
            let mut batch: Vec<AttentionSpan<'_>> = Vec::new();
            let mut first_free = 0;
            for span in spans {
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
    if let Copies::There(repeats) = copies {
        out = repeats.with_repeated_queries(backend, spans, &out)?;
        log_normalizers = repeats.with_repeated_queries(backend, spans, &log_normalizers)?;
    }
    Ok(Attended { out: Rc::new(out), log_normalizers })
}

/// Room for a gradient of a tensor.
pub(super) fn like(backend: &dyn Backend, tensor: &Tensor) -> Result<Tensor> {
    backend.scratch(tensor.shape().dims(), DType::F32)
}

/// Room for the gradients of what attention reads.
pub(super) fn like_qkv(backend: &dyn Backend, qkv: &Qkv) -> Result<Qkv> {
    let v = qkv.v.as_ref().map(|v| like(backend, v)).transpose()?;
    Ok(Qkv { q: like(backend, &qkv.q)?, k: like(backend, &qkv.k)?, v })
}

/// Pages for the keys and values of a pass over `tokens` tokens that is not over a cache, unless one sequence needs more: twice those that full
/// pages would need, and enough sequences at a time for many threads.
fn whole_batch_pages(tokens: usize) -> usize {
    (2 * tokens.div_ceil(KV_PAGE_TOKENS)).max(16)
}

/// Bytes of keys and values in pages that a pass over `tokens` tokens takes at most, if it is not over a cache.
pub fn attention_pages_bytes(backend: &dyn Backend, tokens: usize, g: &AttentionGeometry, dtype: DType) -> usize {
    whole_batch_pages(tokens) * backend.kv_page_bytes(g.kv_layout(), dtype)
}

/// Refuses what does not fit tokens, whatever their projection is; sequences may have more, of which some are the same.
fn check_input(backend: &dyn Backend, input: &AttentionInput<'_>, tokens: usize, of_sequences: usize) -> Result<()> {
    let (g, layout) = (input.geometry, input.layout);
    backend.check_attention(&g)?;
    check_layout(&layout, &g)?;
    for angles in [&input.rotary.cos, &input.rotary.sin].into_iter().filter(|_| layout.rotary_dim > 0) {
        check_f32(OP, angles, layout.rotary_dim / 2)?;
        if angles.rows() != tokens {
            let (expected, actual) = (format!("angles of {tokens} tokens"), angles.shape().to_string());
            return Err(Error::Shape { op: OP, expected, actual });
        }
    }
    for norm in input.norms.iter().flatten() {
        check_vector(OP, *norm, g.head_dim)?;
    }
    if let Some(sinks) = input.sinks {
        check_vector(OP, sinks, g.heads)?;
    }
    check_spans(&input.spans, of_sequences)
}

/// Room for the heads of so many tokens.
fn room_for_heads(backend: &dyn Backend, g: &AttentionGeometry, tokens: usize, dtype: DType) -> Result<Qkv> {
    Ok(Qkv {
        q: backend.scratch(&[tokens, g.heads, g.head_dim], dtype)?,
        k: backend.scratch(&[tokens, g.kv_heads, g.head_dim], dtype)?,
        v: Some(backend.scratch(&[tokens, g.kv_heads, g.values.width()], dtype)?),
    })
}

/// Refuses heads that overlap or leave columns to nobody, and turns of more or less than pairs of a head.
fn check_layout(layout: &QkvLayout, g: &AttentionGeometry) -> Result<()> {
    if layout.rotary_dim > g.head_dim || !layout.rotary_dim.is_multiple_of(2) {
        let (turning, d) = (layout.rotary_dim, g.head_dim);
        return Err(Error::Unsupported(format!("a rotary part of {turning} in heads of {d}: it is even and at most a head")));
    }
    let KvValues::Own(value_dim) = g.values else {
        return Err(Error::Unsupported("a fused projection whose values are a part of its keys".into()));
    };
    let (d, gate) = (g.head_dim, layout.gate.map(|gate| (gate, g.heads, value_dim)));
    let all = [Some((layout.q, g.heads, d)), Some((layout.k, g.kv_heads, d)), Some((layout.v, g.kv_heads, value_dim)), gate];
    let mut heads: Vec<(usize, usize)> = Vec::new();
    for (columns, count, width) in all.into_iter().flatten() {
        heads.extend((0..count).map(|head| (columns.stride.saturating_mul(head).saturating_add(columns.first), width)));
    }
    heads.sort_unstable();
    let follow = |end, &(first, width): &(usize, usize)| (first == end).then_some(end + width);
    if heads.iter().try_fold(0, follow) != Some(layout.width) {
        return Err(Error::Shape {
            op: OP,
            expected: format!("a layout of {} columns as heads side by side", layout.width),
            actual: format!("heads from and of {heads:?}"),
        });
    }
    Ok(())
}

/// Refuses sequences that are not all of a batch of `tokens`, one after another.
pub(super) fn check_spans(spans: &[AttentionSpan<'_>], tokens: usize) -> Result<()> {
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

/// Refuses a cache that gradients would have to go through or that does not fit, and sequences whose cache is not there; and a cache or gradients where
/// tokens see all of their sequence.
pub(super) fn check_access(
    spans: &[AttentionSpan<'_>],
    g: &AttentionGeometry,
    dtype: DType,
    kv: &KvAccess<'_>,
    records: bool,
) -> Result<()> {
    match kv {
        KvAccess::Cache(_) if g.sees == Sight::Whole => {
            Err(Error::Unsupported("a cache of sequences whose tokens see those that come later".into()))
        }
        KvAccess::None if g.sees == Sight::Whole && records => Err(Error::Unsupported(
            "gradients through attention to whole sequences: it is for encoders, which are frozen".into(),
        )),
        KvAccess::Cache(_) if records => Err(Error::Unsupported("gradients through a KV cache".into())),
        KvAccess::Cache(pages) => check_pages(spans, g, dtype, pages),
        KvAccess::None => match spans.iter().find(|s| s.past > 0) {
            Some(span) => Err(Error::Unsupported(format!("a sequence with {} cached tokens needs its cache", span.past))),
            None => Ok(()),
        },
    }
}

/// Refuses a cache of another shape, pages that are not there or not enough, and a page that two sequences would write.
fn check_pages(spans: &[AttentionSpan<'_>], g: &AttentionGeometry, dtype: DType, pages: &KvPages) -> Result<()> {
    if pages.dtype != dtype {
        return Err(Error::DType { op: OP, expected: dtype, actual: pages.dtype });
    }
    if pages.layout != g.kv_layout() {
        return Err(Error::Shape {
            op: OP,
            expected: format!("a cache of {:?}", g.kv_layout()),
            actual: format!("{:?}", pages.layout),
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
