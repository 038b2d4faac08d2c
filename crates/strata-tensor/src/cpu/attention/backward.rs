//! The backward pass of attention: probabilities are computed again from scores, page by page of keys.
//!
//! For one key head, pages of keys in order; within a page, the query heads that share it in order; within a head, tiles of 64
//! queries in order. Gradients of keys and values are one chain over (head, tile, query), gradients of queries one over pages: nothing depends on
//! other sequences. With P the probabilities and dP = dO·Vᵀ: dV = Pᵀ·dO, dS = P∘(dP − rowsum(dO∘O)), dQ = dS·K, dK = dSᵀ·Q.

use super::{PAGE, pack_rows_as_steps, product, write_key};
use crate::Element;
use crate::backend::{AttentionGeometry, AttentionSpan};
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::kv::key_len;
use crate::cpu::matmul::TileKernel;
use crate::cpu::packed::LANES;
use crate::cpu::rows::softmax;
use crate::cpu::threads::{Pool, SharedMut};

/// What the backward pass reads and writes; queries are `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`.
pub(crate) struct AttentionGradient<'a, T> {
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    /// Output of the forward pass, as queries.
    pub out: &'a [T],
    /// `[tokens, heads]`, from the forward pass.
    pub log_normalizers: &'a [f32],
    /// Gradient of the output, as queries.
    pub dout: &'a [f32],
    /// Gradients, overwritten.
    pub dq: &'a mut [f32],
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
}

/// A tile of 64 queries of one head, prepared for all pages of keys.
struct QueryTile<T> {
    /// Queries and output gradients, `[64, row_len]`.
    q: Vec<T>,
    dout: Vec<T>,
    /// The same transposed, `[head_dim, 64]`.
    q_transposed: Vec<T>,
    dout_transposed: Vec<T>,
    /// Σ dO∘O of each query.
    delta: [f32; PAGE],
    log_normalizers: [f32; PAGE],
    rows: usize,
    /// Accumulated `[64, head_dim]`.
    dq: Vec<f32>,
}

multiversion! {
    /// `Σ a·b` in sixteen lanes.
    fn dot_mixed<T: Element>(a: &[f32], b: &[T]) -> f32 = dot_mixed_body;
}

#[inline(always)]
fn dot_mixed_body<T: Element>(fma: impl Fma, a: &[f32], b: &[T]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = fma.fma(a, b.to_f32(), *lane);
        }
    }
    lanes.iter().sum()
}

/// Gradients of whole sequences (no cached past) by their queries, keys and values.
pub(crate) fn backward<T: Element>(
    pool: &Pool,
    isa: Isa,
    g: &AttentionGeometry,
    spans: &[AttentionSpan<'_>],
    io: AttentionGradient<'_, T>,
) {
    let AttentionGradient { q, k, v, out, log_normalizers, dout, dq, dk, dv } = io;
    let (dq, dk, dv) = (SharedMut::new(dq), SharedMut::new(dk), SharedMut::new(dv));
    let kernel = TileKernel::new(isa, T::DTYPE);
    let (d, group) = (g.head_dim, g.heads / g.kv_heads);
    let per_step = 4 / T::DTYPE.size_bytes();
    let row_len = d.next_multiple_of(per_step);
    let zero = T::from_f32(0.0);

    pool.run(spans.len() * g.kv_heads, &|task| {
        let (span, kv_head) = (&spans[task / g.kv_heads], task % g.kv_heads);
        let len = span.tokens.len();
        let gather = |source: &[T], first: usize, rows: usize, stride: usize, head: usize, row_len: usize| {
            let mut gathered = vec![zero; PAGE * row_len];
            for (r, row) in gathered.chunks_exact_mut(row_len).take(rows).enumerate() {
                row[..d].copy_from_slice(&source[((span.tokens.start + first + r) * stride + head) * d..][..d]);
            }
            gathered
        };
        let mut tiles: Vec<QueryTile<T>> = Vec::with_capacity(group * len.div_ceil(PAGE));
        for head in kv_head * group..(kv_head + 1) * group {
            for first in (0..len).step_by(PAGE) {
                let rows = PAGE.min(len - first);
                let mut tile = QueryTile {
                    q: gather(q, first, rows, g.heads, head, row_len),
                    dout: vec![zero; PAGE * row_len],
                    q_transposed: vec![zero; d * PAGE],
                    dout_transposed: vec![zero; d * PAGE],
                    delta: [0.0; PAGE],
                    log_normalizers: [0.0; PAGE],
                    rows,
                    dq: vec![0.0; PAGE * d],
                };
                for r in 0..rows {
                    let place = (span.tokens.start + first + r) * g.heads + head;
                    tile.log_normalizers[r] = log_normalizers[place];
                    let (dout, out) = (&dout[place * d..][..d], &out[place * d..][..d]);
                    tile.delta[r] = dot_mixed(isa, dout, out);
                    for (c, &value) in dout.iter().enumerate() {
                        let value = T::from_f32(value);
                        tile.dout[r * row_len + c] = value;
                        tile.dout_transposed[c * PAGE + r] = value;
                        tile.q_transposed[c * PAGE + r] = tile.q[r * row_len + c];
                    }
                }
                tiles.push(tile);
            }
        }

        let tiles_per_head = len.div_ceil(PAGE);
        let mut keys_as_columns = vec![0u32; key_len(d) / per_step];
        let mut values_as_columns = vec![0u32; key_len(d) / per_step];
        let (mut keys_as_rows, mut p_words, mut ds_words) = (Vec::new(), Vec::new(), Vec::new());
        let (mut scores, mut dprobabilities) = (vec![0.0f32; PAGE * PAGE], vec![0.0f32; PAGE * PAGE]);
        let (mut p, mut ds) = (vec![zero; PAGE * PAGE], vec![zero; PAGE * PAGE]);
        for block in 0..tiles_per_head {
            let first = block * PAGE;
            let keys = PAGE.min(len - first);
            let block_k = gather(k, first, keys, g.kv_heads, kv_head, d);
            let block_v = gather(v, first, keys, g.kv_heads, kv_head, d);
            for slot in 0..PAGE {
                write_key(&block_k[slot * d..][..d], slot, &mut keys_as_columns);
                write_key(&block_v[slot * d..][..d], slot, &mut values_as_columns);
            }
            pack_rows_as_steps(isa, &block_k, d, PAGE, &mut keys_as_rows);
            // Gradients of this page's keys and values, transposed: [head_dim, 64].
            let (mut dk_block, mut dv_block) = (vec![0.0f32; d * PAGE], vec![0.0f32; d * PAGE]);
            for (index, tile) in tiles.iter_mut().enumerate() {
                let query_block = index % tiles_per_head;
                if query_block < block {
                    continue;
                }
                let row_bytes = row_len * T::DTYPE.size_bytes();
                let page_bytes = PAGE * T::DTYPE.size_bytes();
                let (steps, page_steps) = (row_len / per_step, PAGE / per_step);
                // SAFETY: all blocks are whole: 64 rows or columns, padded with zeros.
                unsafe {
                    let (q, keys) = (tile.q.as_ptr().cast(), keys_as_columns.as_ptr());
                    product(&kernel, tile.rows, steps, q, row_bytes, keys, steps, PAGE, scores.as_mut_ptr(), PAGE, false);
                    let (dout, values) = (tile.dout.as_ptr().cast(), values_as_columns.as_ptr());
                    product(
                        &kernel,
                        tile.rows,
                        steps,
                        dout,
                        row_bytes,
                        values,
                        steps,
                        PAGE,
                        dprobabilities.as_mut_ptr(),
                        PAGE,
                        false,
                    );
                }
                for r in 0..PAGE {
                    let range = r * PAGE..(r + 1) * PAGE;
                    let p: &mut [T; PAGE] = (&mut p[range.clone()]).try_into().expect("a row is a page wide");
                    let ds: &mut [T; PAGE] = (&mut ds[range.clone()]).try_into().expect("a row is a page wide");
                    if r >= tile.rows {
                        p.fill(zero);
                        ds.fill(zero);
                        continue;
                    }
                    let valid = if query_block == block { r + 1 } else { PAGE };
                    let (lse, delta) = (tile.log_normalizers[r], tile.delta[r]);
                    let scores: &[f32; PAGE] = scores[range.clone()].try_into().expect("a row is a page wide");
                    let dprobabilities: &[f32; PAGE] = dprobabilities[range].try_into().expect("a row is a page wide");
                    softmax::attention_block_backward(isa, scores, dprobabilities, valid, g.scale, lse, delta, p, ds);
                }
                pack_rows_as_steps(isa, &p, PAGE, PAGE, &mut p_words);
                pack_rows_as_steps(isa, &ds, PAGE, PAGE, &mut ds_words);
                // SAFETY: as above.
                unsafe {
                    let (dout, q) = (tile.dout_transposed.as_ptr().cast(), tile.q_transposed.as_ptr().cast());
                    product(
                        &kernel,
                        d,
                        page_steps,
                        dout,
                        page_bytes,
                        p_words.as_ptr(),
                        page_steps,
                        PAGE,
                        dv_block.as_mut_ptr(),
                        PAGE,
                        true,
                    );
                    product(
                        &kernel,
                        d,
                        page_steps,
                        q,
                        page_bytes,
                        ds_words.as_ptr(),
                        page_steps,
                        PAGE,
                        dk_block.as_mut_ptr(),
                        PAGE,
                        true,
                    );
                    let (ds, keys, dq) = (ds.as_ptr().cast(), keys_as_rows.as_ptr(), tile.dq.as_mut_ptr());
                    product(&kernel, tile.rows, page_steps, ds, page_bytes, keys, page_steps, d, dq, d, true);
                }
            }
            for slot in 0..keys {
                let place = (span.tokens.start + first + slot) * g.kv_heads + kv_head;
                // SAFETY: each task has one key head of one sequence.
                let (dk, dv) = unsafe { (dk.part(place * d..(place + 1) * d), dv.part(place * d..(place + 1) * d)) };
                for c in 0..d {
                    dk[c] = dk_block[c * PAGE + slot];
                    dv[c] = dv_block[c * PAGE + slot];
                }
            }
        }
        for (index, tile) in tiles.iter().enumerate() {
            let head = kv_head * group + index / tiles_per_head;
            for r in 0..tile.rows {
                let place = (span.tokens.start + index % tiles_per_head * PAGE + r) * g.heads + head;
                // SAFETY: a query head belongs to one key head, so to one task.
                unsafe { dq.part(place * d..(place + 1) * d) }.copy_from_slice(&tile.dq[r * d..][..d]);
            }
        }
    });
}
