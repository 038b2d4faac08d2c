//! Causal attention over sequences of any length, with grouped queries, forward (here) and backward (`backward`).
//!
//! The score matrix is never whole: a tile of queries walks the pages of its sequence in order, one page of 64 keys at a time, with a
//! running maximum and sum (Milakov & Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135). What one query does at
//! each page depends on its own position only, so its bits are the same in a decode step of one token, in a
//! prefill chunk and in a training pass. Training computes over pages too, which it packs for the length of the pass.
//!
//! Roofline: a tile of 64 query rows does `4 * 64 * 64 * head_dim` operations for each page of `256 * head_dim` bytes, all in cache:
//! bound by arithmetic. A decode step reads each page once for the query heads that share it: bound by memory.

mod backward;
#[cfg(test)]
mod tests;

pub(crate) use backward::{AttentionGradient, backward};

use super::isa::Isa;
use super::kv::{KvPages, key_len, value_len};
use super::matmul::{Tile, TileKernel, pack_step};
use super::packed::{LANES, PANEL};
use super::rows::softmax;
use super::threads::{Pool, SharedMut};
use crate::backend::{AttentionGeometry, AttentionSpan};
use crate::{Element, KV_PAGE_TOKENS as PAGE};

/// Query positions of a tile, at most: with two query heads to a key head, 64 rows.
const TILE_ROWS: usize = 64;

/// Where the keys and values of one page and head lie in the words of a cache.
fn head_words(g: &AttentionGeometry, per_step: usize, page: usize, kv_head: usize) -> (usize, usize) {
    let (keys, values) = (key_len(g.head_dim) / per_step, value_len(g.head_dim) / per_step);
    let start = (page * g.kv_heads + kv_head) * (keys + values);
    (start, start + keys)
}

/// Bytes at most that one task takes, forward or back, apart from what the backward pass takes for each of its tokens: tiles that are
/// whole although their sequence is short, a few matrices of a page by a page, and of a page by a head.
pub(crate) fn task_scratch_bytes(g: &AttentionGeometry) -> usize {
    let group = g.heads / g.kv_heads;
    let (width, rows) = (g.head_dim.next_multiple_of(LANES), group.max(TILE_ROWS));
    4 * (rows * (2 * width + 2 * PAGE + 2) + PAGE * (5 * group * width + 8 * width + 6 * PAGE))
}

/// Writes the new keys and values, `[tokens, kv_heads, head_dim]` each, to the pages of their sequences. What lies in the rest of a page stays.
pub(crate) fn write_pages<T: Element>(
    pool: &Pool,
    g: &AttentionGeometry,
    k: &[T],
    v: &[T],
    spans: &[AttentionSpan<'_>],
    pages: &mut KvPages,
) {
    let d = g.head_dim;
    let per_step = 4 / T::DTYPE.size_bytes();
    let num_pages = pages.num_pages;
    // SAFETY: the buffer is aligned to a page, and every four bytes of it are a word.
    let words = SharedMut::new(unsafe {
        std::slice::from_raw_parts_mut(pages.buffer.as_mut_ptr().cast::<u32>(), pages.buffer.len() / 4)
    });
    let head_len = (key_len(d) + value_len(d)) / per_step;
    pool.run(spans.len() * g.kv_heads, &|task| {
        let (span, kv_head) = (&spans[task / g.kv_heads], task % g.kv_heads);
        for (i, token) in span.tokens.clone().enumerate() {
            let (page, slot) = ((span.past + i) / PAGE, (span.past + i) % PAGE);
            let page = span.pages[page] as usize;
            assert!(page < num_pages);
            let (keys, values) = head_words(g, per_step, page, kv_head);
            // SAFETY: a page that is written belongs to one sequence, and each task has one head of it.
            let head = unsafe { words.part(keys..keys + head_len) };
            let (key_words, value_words) = head.split_at_mut(values - keys);
            let at = (token * g.kv_heads + kv_head) * d;
            write_key(&k[at..at + d], slot, key_words);
            write_value(&v[at..at + d], slot, value_words);
        }
    });
}

/// Column `slot` of a packed `head_dim → PAGE` matrix.
fn write_key<T: Element>(key: &[T], slot: usize, words: &mut [u32]) {
    let per_step = 4 / T::DTYPE.size_bytes();
    for (s, pair) in key.chunks(per_step).enumerate() {
        pack_word(pair, &mut words[s * PANEL + slot]);
    }
}

fn pack_word<T: Element>(pair: &[T], word: &mut u32) {
    *word = if pair.len() == 2 {
        pair[0].to_f32().to_bits() >> 16 | pair[1].to_f32().to_bits()
    } else if T::DTYPE.size_bytes() == 4 {
        pair[0].to_f32().to_bits()
    } else {
        pair[0].to_f32().to_bits() >> 16
    };
}

/// Row `slot` of a packed `PAGE → head_dim` matrix; the other half of its step is kept.
fn write_value<T: Element>(value: &[T], slot: usize, words: &mut [u32]) {
    let d = value.len();
    let per_step = 4 / T::DTYPE.size_bytes();
    let (step, half) = (slot / per_step, slot % per_step);
    let num_steps = PAGE / per_step;
    for (panel, columns) in value.chunks(PANEL).enumerate() {
        let width = (d - panel * PANEL).min(PANEL).next_multiple_of(LANES);
        let line = &mut words[panel * PANEL * num_steps + step * width..][..columns.len()];
        for (word, &value) in line.iter_mut().zip(columns) {
            let bits = value.to_f32().to_bits();
            *word = match (per_step, half) {
                (1, _) => bits,
                (_, 0) => *word & 0xffff_0000 | bits >> 16,
                _ => *word & 0xffff | bits,
            };
        }
    }
}

/// One product of a tile: `rows` of `steps` steps by the first of a packed matrix of `b_steps` steps and `columns`, panel by panel.
///
/// # Safety
/// `a` holds `rows` rows of `a_stride` bytes, `b` the packed matrix, `c` `rows` rows of `c_stride` elements.
#[allow(clippy::too_many_arguments)]
unsafe fn product(
    kernel: &TileKernel,
    rows: usize,
    steps: usize,
    a: *const u8,
    a_stride: usize,
    b: *const u32,
    b_steps: usize,
    columns: usize,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    for panel in 0..columns.div_ceil(PANEL) {
        let width = (columns - panel * PANEL).min(PANEL);
        // SAFETY: within the packed matrix and the rows of the result.
        unsafe {
            let tile = Tile {
                steps,
                a,
                a_stride,
                b: b.add(panel * PANEL * b_steps).cast(),
                b_stride: width.next_multiple_of(LANES) * 4,
                c: c.add(panel * PANEL),
                c_stride,
                columns: width,
                accumulate,
            };
            kernel.block(rows, &tile);
        }
    }
}

/// Whether any of these words of packed values is infinite or not a number.
fn any_not_finite<T: Element>(words: &[u32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    let is_not_finite = |&word: &u32| match T::DTYPE {
        crate::DType::F32 => word & EXPONENT == EXPONENT,
        crate::DType::BF16 => word & EXPONENT == EXPONENT || word << 16 & EXPONENT == EXPONENT,
    };
    words.iter().fold(false, |any, word| any | is_not_finite(word))
}

/// Whether values of slots `slots` of a packed page are infinite or not a number. With two slots to a word, neighbours are looked at too.
fn values_not_finite<T: Element>(words: &[u32], d: usize, slots: std::ops::Range<usize>) -> bool {
    let per_step = 4 / T::DTYPE.size_bytes();
    let (steps, num_steps) = (slots.start / per_step..slots.end.div_ceil(per_step), PAGE / per_step);
    (0..d.div_ceil(PANEL)).any(|panel| {
        let width = (d - panel * PANEL).min(PANEL).next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        any_not_finite::<T>(&words[start + steps.start * width..start + steps.end * width])
    })
}

/// A packed page of values with zeros in place of those from slot `valid` on.
fn values_up_to<T: Element>(words: &[u32], d: usize, valid: usize) -> Vec<u32> {
    let mut words = words.to_vec();
    (valid..PAGE).for_each(|slot| write_value(&vec![T::from_f32(0.0); d], slot, &mut words));
    words
}

/// Attends every query `[tokens, heads, head_dim]` to the keys of its sequence up to its own position. Writes `out` in the same shape, and
/// the logarithm of each query's softmax denominator, `[tokens, heads]`, where the backward pass will want it.
#[allow(clippy::too_many_arguments)]
pub(crate) fn forward<T: Element>(
    pool: &Pool,
    isa: Isa,
    g: &AttentionGeometry,
    q: &[T],
    spans: &[AttentionSpan<'_>],
    pages: &KvPages,
    out: &mut [T],
    log_normalizers: &mut [f32],
) {
    let kernel = TileKernel::new(isa, T::DTYPE);
    let (d, group) = (g.head_dim, (g.heads / g.kv_heads));
    let per_step = 4 / T::DTYPE.size_bytes();
    let row_len = d.next_multiple_of(per_step);
    let tile_positions = (TILE_ROWS / group).max(1);
    let mut tasks = Vec::new();
    for span in spans {
        for kv_head in 0..g.kv_heads {
            let len = span.tokens.len();
            tasks.extend(
                (0..len).step_by(tile_positions).map(|first| (span, kv_head, first..(first + tile_positions).min(len))),
            );
        }
    }
    // SAFETY: as in `write_pages`; nobody writes now.
    let words = unsafe { std::slice::from_raw_parts(pages.buffer.as_ptr().cast::<u32>(), pages.buffer.len() / 4) };
    let (out, log_normalizers) = (SharedMut::new(out), SharedMut::new(log_normalizers));
    pool.run(tasks.len(), &|task| {
        // The longest tiles of a sequence are its last: begin with them, so that threads finish together.
        let (span, kv_head, positions) = &tasks[tasks.len() - 1 - task];
        let rows = positions.len() * group;
        let mut queries = vec![T::from_f32(0.0); rows * row_len];
        let mut acc = vec![0.0f32; rows * d];
        let mut scores = vec![0.0f32; rows * PAGE];
        let mut probabilities = vec![T::from_f32(0.0); rows * PAGE];
        let (mut maxima, mut sums) = (vec![f32::NEG_INFINITY; rows], vec![0.0f32; rows]);
        // Row r is head `r / positions.len()` of the group at position `r % positions.len()` of the tile.
        let place = |r: usize| {
            let token = span.tokens.start + positions.start + r % positions.len();
            (token, token * g.heads + kv_head * group + r / positions.len())
        };
        for (r, query) in queries.chunks_exact_mut(row_len).enumerate() {
            query[..d].copy_from_slice(&q[place(r).1 * d..][..d]);
        }
        let last = span.past + positions.end - 1;
        for (block, &page) in span.pages.iter().enumerate().take(last / PAGE + 1) {
            let (keys, values) = head_words(g, per_step, page as usize, *kv_head);
            assert!(words.len() >= values + value_len(d) / per_step);
            // SAFETY: the page is in bounds by the assertion; the buffers hold `rows` rows.
            unsafe {
                let keys = words.as_ptr().add(keys);
                let stride = row_len * T::DTYPE.size_bytes();
                product(
                    &kernel,
                    rows,
                    row_len / per_step,
                    queries.as_ptr().cast(),
                    stride,
                    keys,
                    row_len / per_step,
                    PAGE,
                    scores.as_mut_ptr(),
                    PAGE,
                    false,
                );
            }
            for r in 0..rows {
                let position = span.past + positions.start + r % positions.len();
                let valid = (position + 1).saturating_sub(block * PAGE).min(PAGE);
                let range = r * PAGE..(r + 1) * PAGE;
                let probabilities: &mut [T; PAGE] =
                    (&mut probabilities[range.clone()]).try_into().expect("a row is a page wide");
                if valid == 0 {
                    probabilities.fill(T::from_f32(0.0));
                    continue;
                }
                let scores: &[f32; PAGE] = scores[range].try_into().expect("a row is a page wide");
                let rescale =
                    softmax::attention_block(isa, scores, valid, g.scale, &mut maxima[r], &mut sums[r], probabilities);
                if rescale != 1.0 && block > 0 {
                    acc[r * d..][..d].iter_mut().for_each(|a| *a *= rescale);
                }
            }
            let valid_of = |position: usize| (position + 1).saturating_sub(block * PAGE).min(PAGE);
            // Values that no query of the tile sees are not read. What some see and others do not is multiplied by probabilities of zero for those,
            // and the least likely of values, an infinity, would be NaN.
            let (valid_first, valid_last) = (valid_of(span.past + positions.start), valid_of(last));
            let values = &words[values..values + value_len(d) / per_step];
            if valid_first.is_multiple_of(per_step) && valid_first == valid_last
                || !values_not_finite::<T>(values, d, valid_first..valid_last)
            {
                // SAFETY: as above.
                unsafe {
                    product(
                        &kernel,
                        rows,
                        valid_last.div_ceil(per_step),
                        probabilities.as_ptr().cast(),
                        PAGE * T::DTYPE.size_bytes(),
                        values.as_ptr(),
                        PAGE / per_step,
                        d,
                        acc.as_mut_ptr(),
                        d,
                        block > 0,
                    );
                }
                continue;
            }
            for p in 0..positions.len() {
                let valid = valid_of(span.past + positions.start + p);
                if valid == 0 {
                    continue;
                }
                let values = values_up_to::<T>(values, d, valid);
                for row in (p..rows).step_by(positions.len()) {
                    // SAFETY: as above, one row at a time.
                    unsafe {
                        product(
                            &kernel,
                            1,
                            valid.div_ceil(per_step),
                            probabilities[row * PAGE..].as_ptr().cast(),
                            PAGE * T::DTYPE.size_bytes(),
                            values.as_ptr(),
                            PAGE / per_step,
                            d,
                            acc[row * d..].as_mut_ptr(),
                            d,
                            block > 0,
                        );
                    }
                }
            }
        }
        for r in 0..rows {
            let (_, place) = place(r);
            // SAFETY: every query row belongs to one tile.
            let (out, log_normalizer) =
                unsafe { (out.part(place * d..(place + 1) * d), log_normalizers.part(place..place + 1)) };
            for (o, &a) in out.iter_mut().zip(&acc[r * d..]) {
                // Which page boundaries a tile spans decides how often a zero is added to a zero: `+ 0.0` forgets its sign.
                *o = T::from_f32(a / sums[r] + 0.0);
            }
            log_normalizer[0] = maxima[r] + sums[r].ln();
        }
    });
}

/// Words of a packed `rows → columns` matrix made of up to `rows` contiguous rows of `columns`; missing rows are zero.
fn pack_rows_as_steps<T: Element>(isa: Isa, source: &[T], columns: usize, rows: usize, words: &mut Vec<u32>) {
    let per_step = 4 / T::DTYPE.size_bytes();
    let steps = rows / per_step;
    words.clear();
    words.resize(steps * columns.next_multiple_of(LANES), 0);
    for panel in 0..columns.div_ceil(PANEL) {
        let count = (columns - panel * PANEL).min(PANEL);
        let width = count.next_multiple_of(LANES);
        for (s, pair) in source.chunks(columns * per_step).enumerate() {
            let line = &mut words[panel * PANEL * steps + s * width..][..count];
            let second = pair.get(columns + panel * PANEL..).filter(|_| per_step == 2 && pair.len() > columns);
            pack_step(isa, &pair[panel * PANEL..][..count], second.map(|s| &s[..count]), line);
        }
    }
}
