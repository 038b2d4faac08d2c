//! What lies in a page of the cache: of each key head keys as columns and values as rows, packed as the right sides of its two products.

use std::ops::Range;

use super::{PAGE, per_step};
use crate::backend::{AttentionGeometry, AttentionSpan};
use crate::cpu::isa::Isa;
use crate::cpu::kv::{KvPages, key_len, own_value_len};
use crate::cpu::matmul::{bytes_of, pack_step, transpose_block, write_panel_rows};
use crate::cpu::packed::{LANES, PANEL, PackedRef};
use crate::cpu::threads::{Pool, SharedMut};
use crate::{Element, KvValues, WeightStorage};

/// Where the keys and values of one page and head lie in the words of a cache.
pub(super) fn head_words(g: &AttentionGeometry, per_step: usize, page: usize, kv_head: usize) -> (usize, usize) {
    let (keys, values) = (key_len(g.head_dim) / per_step, own_value_len(g.values) / per_step);
    let start = (page * g.kv_heads + kv_head) * (keys + values);
    (start, start + keys)
}

/// The pages that the new tokens of a sequence lie in.
fn written_pages<'s>(span: &'s AttentionSpan<'_>) -> &'s [u32] {
    if span.tokens.is_empty() {
        return &[];
    }
    &span.pages[span.past / PAGE..(span.past + span.tokens.len()).div_ceil(PAGE)]
}

/// Writes the new keys, `[tokens, kv_heads, head_dim]`, and values, unless they are a part of them, to the pages of their sequences. What lies in the rest of a page stays.
///
/// # Panics
/// If two sequences would write one page.
pub(crate) fn write_pages<T: Element>(
    pool: &Pool,
    isa: Isa,
    g: &AttentionGeometry,
    k: &[T],
    v: Option<&[T]>,
    spans: &[AttentionSpan<'_>],
    pages: &mut KvPages,
) {
    let (d, value_dim) = (g.head_dim, g.values.width());
    assert_eq!(v.is_some(), matches!(g.values, KvValues::Own(_)));
    let per_step = 4 / T::DTYPE.size_bytes();
    let num_pages = pages.num_pages;
    let mut written: Vec<u32> = spans.iter().flat_map(written_pages).copied().collect();
    written.sort_unstable();
    let twice = written.windows(2).find(|pair| pair[0] == pair[1]);
    assert!(twice.is_none(), "two sequences would write one page: {twice:?}");
    // SAFETY: the buffer is aligned to a page, and every four bytes of it are a word.
    let words = SharedMut::new(unsafe {
        std::slice::from_raw_parts_mut(pages.buffer.as_mut_ptr().cast::<u32>(), pages.buffer.len() / 4)
    });
    let head_len = (key_len(d) + own_value_len(g.values)) / per_step;
    pool.run(spans.len() * g.kv_heads, &|task| {
        let (span, kv_head) = (&spans[task / g.kv_heads], task % g.kv_heads);
        let mut done = 0;
        while done < span.tokens.len() {
            let (page, slot) = ((span.past + done) / PAGE, (span.past + done) % PAGE);
            let count = (PAGE - slot).min(span.tokens.len() - done);
            let page = span.pages[page] as usize;
            assert!(page < num_pages);
            let (keys, values) = head_words(g, per_step, page, kv_head);
            // SAFETY: a page that is written is that of one sequence, as was seen above, and each task has one head of it.
            let head = unsafe { words.part(keys..keys + head_len) };
            let (key_words, value_words) = head.split_at_mut(values - keys);
            // Rows of this head, from the first of them on.
            let head = (span.tokens.start + done) * g.kv_heads + kv_head;
            let rows = |width: usize| head * width..(head + (count - 1) * g.kv_heads + 1) * width;
            write_keys(isa, &k[rows(d)], (d, g.kv_heads * d), slot, key_words);
            if let Some(v) = v {
                write_values(isa, &v[rows(value_dim)], (value_dim, g.kv_heads * value_dim), slot, value_words);
            }
            done += count;
        }
    });
}

/// Columns `slot..` of a packed `head_dim → PAGE` matrix, from keys `stride` apart.
pub(super) fn write_keys<T: Element>(isa: Isa, keys: &[T], (d, stride): (usize, usize), slot: usize, words: &mut [u32]) {
    write_panel_rows(isa, bytes_of(keys), (d * size_of::<T>(), stride * size_of::<T>()), slot, PANEL, words);
}

/// Rows `slot..` of a packed `PAGE → head_dim` matrix, from values `stride` apart. What else is in their steps is kept.
pub(super) fn write_values<T: Element>(isa: Isa, values: &[T], (d, stride): (usize, usize), slot: usize, words: &mut [u32]) {
    let (per_step, num_steps) = (per_step::<T>(), PAGE / per_step::<T>());
    let count = (values.len() + stride - d) / stride;
    let value = |i: usize| &values[i * stride..][..d];
    let mut i = 0;
    while i < count {
        let slot = slot + i;
        if !slot.is_multiple_of(per_step) || count - i < per_step {
            write_value(value(i), slot, words);
            i += 1;
            continue;
        }
        for panel in 0..d.div_ceil(PANEL) {
            let columns = panel * PANEL..d.min((panel + 1) * PANEL);
            let width = columns.len().next_multiple_of(LANES);
            let line = &mut words[panel * PANEL * num_steps + slot / per_step * width..][..columns.len()];
            let second = (per_step == 2).then(|| &value(i + 1)[columns.clone()]);
            pack_step(isa, &value(i)[columns.clone()], second, line);
        }
        i += per_step;
    }
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
pub(super) fn values_not_finite<T: Element>(words: &[u32], d: usize, slots: Range<usize>) -> bool {
    let per_step = 4 / T::DTYPE.size_bytes();
    let (steps, num_steps) = (slots.start / per_step..slots.end.div_ceil(per_step), PAGE / per_step);
    (0..d.div_ceil(PANEL)).any(|panel| {
        let width = (d - panel * PANEL).min(PANEL).next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        any_not_finite::<T>(&words[start + steps.start * width..start + steps.end * width])
    })
}

/// A packed page of values with zeros in place of those that are not visible.
pub(super) fn values_of<T: Element>(words: &[u32], d: usize, visible: &Range<usize>) -> Vec<u32> {
    let mut words = words.to_vec();
    let hidden = (0..visible.start).chain(visible.end..PAGE);
    hidden.for_each(|slot| write_value(&vec![T::from_f32(0.0); d], slot, &mut words));
    words
}

/// The values of a packed page whose keys begin with them, laid out as values of their own are.
pub(super) fn values_of_keys<T: Element>(isa: Isa, keys: &[u32], g: &AttentionGeometry, values: &mut [u32]) {
    // As weights from keys to slots, of which a product over slots reads the transposed.
    // SAFETY: words are readable as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(keys.as_ptr().cast::<u8>(), size_of_val(keys)) };
    let storage = WeightStorage::Dense;
    let keys = PackedRef { in_features: g.head_dim, out_features: PAGE, dtype: T::DTYPE, storage, bytes };
    let (width, steps) = (g.values.width(), PAGE / per_step::<T>());
    for first in (0..width).step_by(PANEL) {
        let inputs = first..(first + PANEL).min(width);
        transpose_block(isa, keys, inputs, 0..steps, &mut values[first * steps..]);
    }
}
