//! The backward pass of attention: probabilities are computed again from scores, page by page of keys.
//!
//! With P the probabilities and dP = dO·Vᵀ: dV = Pᵀ·dO, dS = P∘(dP − rowsum(dO∘O)), dQ = dS·K, dK = dSᵀ·Q.
//!
//! The square of queries by keys of one sequence and key head is cut into blocks of [`BLOCK_PAGES`] by as many pages, which are taken diagonal by diagonal from
//! the one where queries attend to themselves. No two blocks of a diagonal have a query or a key in common, so all threads work on it at once; a block of the next one
//! waits for no more than the two of its queries and of its keys. And yet each gradient is one chain: that of a query over blocks of keys backwards, pages of keys within a block, that of a key over blocks of queries, the heads that share it, pages of queries.
//! Nothing depends on other sequences or on who computes what. Pages that a window puts out of each other's sight are passed over, and pages of queries to which no gradient comes.
//!
//! What a block needs of queries and keys, in the layouts of its products, is made once for all of them. Sequences and key heads are taken a few at a
//! time, enough for all threads, so that memory does not grow with their number.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::ahead::Ahead;
use super::pages::write_keys;
use super::products::{Left, Products};
use super::{PAGE, pack_rows_as_steps, page_row, page_row_mut, per_step, row_len, visible_slots};
use crate::backend::{AttentionGeometry, AttentionSpan};
use crate::cpu::isa::{Arithmetic, Fma, Isa, multiversion};
use crate::cpu::kv::key_len;
use crate::cpu::matmul::{TileKernel, bytes_of, pack_step, widened_len, write_panel_rows};
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{LANES, PANEL};
use crate::cpu::rows::convert::{is_zero, scale};
use crate::cpu::rows::softmax;
use crate::cpu::scratch::{Arena, Plain, taken_bytes, with_scratch};
use crate::cpu::threads::{Pool, SharedMut};
use crate::{Element, Result};

/// Pages of the side of a block of queries by keys. Part of the order of every sum.
const BLOCK_PAGES: usize = 4;
/// Pages of queries, for each thread, that are worth a round of their own: with them a sequence of some thousand tokens has threads wait for a
/// sixteenth of the time at most.
const ROUND_PAGES_PER_THREAD: usize = 16;

/// How often a thread looks again whether what it waits for is there before it lets another have the core.
const SPINS_BEFORE_YIELD: u32 = 256;

/// What the backward pass reads and writes; queries are `[tokens, heads, head_dim]`, keys `[tokens, kv_heads, head_dim]`.
pub(crate) struct AttentionGradient<'a, T> {
    pub q: &'a [T],
    pub k: &'a [T],
    /// `[tokens, kv_heads, value width]`; `None` if they are the first numbers of keys.
    pub v: Option<&'a [T]>,
    /// Output of the forward pass, `[tokens, heads, value width]`.
    pub out: &'a [T],
    /// `[tokens, heads]`, from the forward pass.
    pub log_normalizers: &'a [f32],
    /// Gradient of the output, of its shape.
    pub dout: &'a [f32],
    /// Gradients, overwritten.
    pub dq: &'a mut [f32],
    pub dk: &'a mut [f32],
    pub dv: Option<&'a mut [f32]>,
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

/// One key head of one sequence.
struct Unit<'s> {
    tokens: &'s Range<usize>,
    kv_head: usize,
    /// Its first page among those of its round.
    first_page: usize,
}

impl Unit<'_> {
    fn num_pages(&self) -> usize {
        self.tokens.len().div_ceil(PAGE)
    }

    fn num_blocks(&self) -> usize {
        self.num_pages().div_ceil(BLOCK_PAGES)
    }

    /// Diagonals of blocks in which any query sees any key.
    fn num_diagonals(&self, g: &AttentionGeometry) -> usize {
        // The first page of queries in a block and the last of keys are `BLOCK_PAGES - 1` nearer than their blocks.
        let reach = |window: usize| (window - 1).div_ceil(PAGE).div_ceil(BLOCK_PAGES) + 1;
        g.window.map_or(self.num_blocks(), |window| reach(window).min(self.num_blocks()))
    }

    /// Rows of a page; the last may have fewer.
    fn rows(&self, page: usize) -> usize {
        PAGE.min(self.tokens.len() - page * PAGE)
    }
}

/// A page of queries of one head: 64 rows, zeros where there are fewer.
struct Queries<'a, T> {
    /// `[64, row_len]`, of queries and of values.
    q: &'a mut [T],
    dout: &'a mut [T],
    /// `[head_dim, 64]` and `[value width, 64]`.
    q_transposed: &'a mut [T],
    dout_transposed: &'a mut [T],
    /// Σ dO∘O of each query.
    delta: &'a mut [f32],
    /// One number: whether no gradient comes to any of them, as to those of a prompt in the last layer. 1 or 0.
    is_dead: &'a mut [u32],
    log_normalizers: &'a mut [f32],
    /// Gradient, `[64, head_dim]`.
    dq: &'a mut [f32],
}

impl<'a, T: Plain + Element> Queries<'a, T> {
    fn take(arena: &mut Arena<'a>, g: &AttentionGeometry) -> Self {
        let (d, value_dim) = (g.head_dim, g.values.width());
        Queries {
            q: arena.take(PAGE * row_len::<T>(d)),
            dout: arena.take(PAGE * row_len::<T>(value_dim)),
            q_transposed: arena.take(d * PAGE),
            dout_transposed: arena.take(value_dim * PAGE),
            delta: arena.take(PAGE),
            is_dead: arena.take(1),
            log_normalizers: arena.take(PAGE),
            dq: arena.take(PAGE * d),
        }
    }

    fn bytes(g: &AttentionGeometry) -> usize {
        let of = |d: usize| taken_bytes::<T>(PAGE * row_len::<T>(d)) + taken_bytes::<T>(d * PAGE);
        of(g.head_dim)
            + of(g.values.width())
            + 2 * taken_bytes::<f32>(PAGE)
            + taken_bytes::<u32>(1)
            + taken_bytes::<f32>(PAGE * g.head_dim)
    }
}

/// A page of keys and values, zeros where there are fewer than 64.
struct Keys<'a> {
    /// Packed `head_dim → 64` and `value width → 64`.
    keys_as_columns: &'a mut [u32],
    values_as_columns: &'a mut [u32],
    /// Packed `64 → head_dim`.
    keys_as_rows: &'a mut [u32],
    /// Gradients, `[head_dim, 64]` and `[value width, 64]`.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

impl<'a> Keys<'a> {
    fn take<T: Element>(arena: &mut Arena<'a>, g: &AttentionGeometry) -> Self {
        let (d, value_dim) = (g.head_dim, g.values.width());
        Keys {
            keys_as_columns: arena.take(key_len(d) / per_step::<T>()),
            values_as_columns: arena.take(key_len(value_dim) / per_step::<T>()),
            keys_as_rows: arena.take(steps_words::<T>(d)),
            dk: arena.take(d * PAGE),
            dv: arena.take(value_dim * PAGE),
        }
    }

    fn bytes<T: Element>(g: &AttentionGeometry) -> usize {
        let of = |d: usize| taken_bytes::<u32>(key_len(d) / per_step::<T>()) + taken_bytes::<f32>(d * PAGE);
        of(g.head_dim) + of(g.values.width()) + taken_bytes::<u32>(steps_words::<T>(g.head_dim))
    }
}

/// Words of a packed `64 → columns` matrix.
fn steps_words<T: Element>(columns: usize) -> usize {
    PAGE / per_step::<T>() * columns.next_multiple_of(LANES)
}

/// Bytes of one page of a key head: its keys, and the queries of the heads that share it.
fn page_bytes<T: Element + Plain>(g: &AttentionGeometry) -> usize {
    Keys::bytes::<T>(g) + g.heads / g.kv_heads * Queries::<T>::bytes(g)
}

/// Bytes that the backward pass takes for each token of a long sequence.
pub(crate) fn gradient_bytes_per_token<T: Element + Plain>(g: &AttentionGeometry) -> usize {
    page_bytes::<T>(g).div_ceil(PAGE)
}

/// Bytes that the backward pass takes at once whatever its tokens: a round, and what the threads work in.
pub(crate) fn round_bytes<T: Element + Plain>(g: &AttentionGeometry, num_threads: usize) -> usize {
    num_threads
        * (ROUND_PAGES_PER_THREAD * page_bytes::<T>(g)
            + block_scratch_bytes::<T>(widened_len(steps_max::<T>(g)))
            + pack_scratch_bytes::<T>(g))
}

/// Gradients of whole sequences (no cached past) by their queries, keys and values.
///
/// # Errors
/// If there is no memory to work in.
pub(crate) fn backward<T: Element + Plain>(
    pool: &Pool,
    arithmetic: Arithmetic,
    g: &AttentionGeometry,
    spans: &[AttentionSpan<'_>],
    io: AttentionGradient<'_, T>,
) -> Result<()> {
    let AttentionGradient { q, k, v, out, log_normalizers, dout, dq, dk, dv } = io;
    let backward = Pass {
        isa: arithmetic.isa,
        kernel: TileKernel::new(arithmetic, T::DTYPE),
        g,
        inputs: Inputs { q, k, v, out, log_normalizers, dout },
        dq: SharedMut::new(dq),
        dk: SharedMut::new(dk),
        dv: dv.map(SharedMut::new),
    };
    let round_pages = ROUND_PAGES_PER_THREAD * pool.num_threads();
    let mut round: Vec<Unit<'_>> = Vec::new();
    let mut num_pages = 0;
    for (span, kv_head) in spans.iter().flat_map(|span| (0..g.kv_heads).map(move |head| (span, head))) {
        let unit = Unit { tokens: &span.tokens, kv_head, first_page: num_pages };
        if num_pages > 0 && num_pages + unit.num_pages() > round_pages {
            backward.round(pool, &round, num_pages)?;
            round.clear();
            num_pages = 0;
        }
        let unit = Unit { first_page: num_pages, ..unit };
        num_pages += unit.num_pages();
        round.push(unit);
    }
    backward.round(pool, &round, num_pages)
}

/// A block of keys by the block of queries so many further on.
#[derive(Clone, Copy)]
struct Block {
    /// Place of the unit in the round.
    unit: usize,
    keys: usize,
    diagonal: usize,
}

impl Block {
    /// The blocks of units of so many blocks and diagonals, diagonal after diagonal: one that another needs comes before it.
    fn all(units: impl Iterator<Item = (usize, usize)> + Clone) -> Vec<Block> {
        let num_diagonals = units.clone().map(|(_, diagonals)| diagonals).max().unwrap_or(0);
        let of_unit = |diagonal: usize, unit: usize, (blocks, diagonals): (usize, usize)| {
            let count = if diagonal < diagonals { blocks - diagonal } else { 0 };
            (0..count).map(move |keys| Block { unit, keys, diagonal })
        };
        (0..num_diagonals)
            .flat_map(|diagonal| units.clone().enumerate().flat_map(move |(unit, size)| of_unit(diagonal, unit, size)))
            .collect()
    }

    /// The blocks of keys that must have been taken by the diagonal before it: its own, and that whose queries come to it next.
    fn needs(&self) -> Range<usize> {
        if self.diagonal == 0 { 0..0 } else { self.keys..self.keys + 2 }
    }
}

/// Waits until so many diagonals of a block of keys are done. Whoever does them has begun: tasks are taken in order.
fn wait_for(done: &AtomicUsize, diagonals: usize) {
    let mut spins = 0u32;
    while done.load(Ordering::Acquire) < diagonals {
        spins += 1;
        if spins.is_multiple_of(SPINS_BEFORE_YIELD) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

/// Says that a block is done when it goes away.
struct Done<'d> {
    diagonals: &'d AtomicUsize,
    are: usize,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.diagonals.store(self.are, Ordering::Release);
    }
}

struct Inputs<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: Option<&'a [T]>,
    out: &'a [T],
    log_normalizers: &'a [f32],
    dout: &'a [f32],
}

struct Pass<'a, T> {
    isa: Isa,
    kernel: TileKernel,
    g: &'a AttentionGeometry,
    inputs: Inputs<'a, T>,
    dq: SharedMut<f32>,
    dk: SharedMut<f32>,
    dv: Option<SharedMut<f32>>,
}

impl<T: Element + Plain> Pass<'_, T> {
    /// Goes back through some units, with `num_pages` pages in all.
    fn round(&self, pool: &Pool, units: &[Unit<'_>], num_pages: usize) -> Result<()> {
        let mut buffer = Buffer::recycled(num_pages * page_bytes::<T>(self.g))?;
        let pages = Pages { bytes: SharedMut::new(&mut buffer[..]), g: *self.g, dtype: std::marker::PhantomData };
        let places: Vec<(&Unit<'_>, usize)> =
            units.iter().flat_map(|unit| (0..unit.num_pages()).map(move |page| (unit, page))).collect();
        pool.run(places.len(), &|i| {
            let (unit, page) = places[i];
            // SAFETY: each task has a page of its own.
            unsafe { self.prepare(unit, page, &pages) };
        });
        let blocks = Block::all(units.iter().map(|unit| (unit.num_blocks(), unit.num_diagonals(self.g))));
        // Of each block of keys, the diagonals that are done.
        let done: Vec<Vec<AtomicUsize>> =
            units.iter().map(|unit| (0..unit.num_blocks()).map(|_| AtomicUsize::new(0)).collect()).collect();
        pool.run(blocks.len(), &|i| {
            let Block { unit, keys, diagonal } = blocks[i];
            blocks[i].needs().for_each(|keys| wait_for(&done[unit][keys], diagonal));
            // Also if it panics: others wait for it.
            let _done = Done { diagonals: &done[unit][keys], are: diagonal + 1 };
            // SAFETY: of two blocks that share a page of queries, or one of keys, the later has waited for the one before it.
            unsafe { self.block(&units[unit], keys, keys + diagonal, &pages) };
        });
        pool.run(places.len(), &|i| {
            let (unit, page) = places[i];
            // SAFETY: each task has a page of its own.
            unsafe { self.write(unit, page, &pages) };
        });
        Ok(())
    }

    /// Lays out a page of keys and the queries of its positions.
    ///
    /// # Safety
    /// Nobody else has this page.
    unsafe fn prepare(&self, unit: &Unit<'_>, page: usize, pages: &Pages<T>) {
        let (g, d, value_dim, zero) = (self.g, self.g.head_dim, self.g.values.width(), T::from_f32(0.0));
        let (row_len, value_row_len) = (row_len::<T>(d), row_len::<T>(value_dim));
        let (rows, first) = (unit.rows(page), unit.tokens.start + page * PAGE);
        // SAFETY: passed on from the caller.
        let keys = unsafe { pages.keys(unit, page) };
        with_scratch(pack_scratch_bytes::<T>(g), |mut arena| {
            let (k, v) = (arena.take::<T>(PAGE * d), arena.take::<T>(PAGE * value_dim));
            // Values that are a part of keys lie as far apart as keys do.
            let (values, stride) = self.inputs.v.map_or((self.inputs.k, d), |v| (v, value_dim));
            for (gathered, width, source, stride) in [(&mut *k, d, self.inputs.k, d), (&mut *v, value_dim, values, stride)] {
                let (present, absent) = gathered.split_at_mut(rows * width);
                for (r, row) in present.chunks_exact_mut(width).enumerate() {
                    row.copy_from_slice(&source[((first + r) * g.kv_heads + unit.kv_head) * stride..][..width]);
                }
                absent.fill(zero);
            }
            write_keys(self.isa, k, (d, d), 0, keys.keys_as_columns);
            write_keys(self.isa, v, (value_dim, value_dim), 0, keys.values_as_columns);
            pack_rows_as_steps(self.isa, k, d, keys.keys_as_rows);
        });
        let group = g.heads / g.kv_heads;
        for head in 0..group {
            // SAFETY: passed on from the caller.
            let tile = unsafe { pages.queries(unit, page, head) };
            tile.q.fill(zero);
            tile.dout.fill(zero);
            let rows_of = tile.q.chunks_exact_mut(row_len).zip(tile.dout.chunks_exact_mut(value_row_len));
            for (r, (q, rounded)) in rows_of.enumerate().take(rows) {
                let place = (first + r) * g.heads + unit.kv_head * group + head;
                let of_values = place * value_dim..(place + 1) * value_dim;
                let dout = &self.inputs.dout[of_values.clone()];
                tile.log_normalizers[r] = self.inputs.log_normalizers[place];
                tile.delta[r] = dot_mixed(self.isa, dout, &self.inputs.out[of_values]);
                q[..d].copy_from_slice(&self.inputs.q[place * d..][..d]);
                scale(self.isa, dout, 1.0, &mut rounded[..value_dim]);
            }
            with_scratch(pack_scratch_bytes::<T>(g), |mut arena| {
                let steps = arena.take(PAGE / per_step::<T>() * d.max(value_dim));
                transpose_page(self.isa, tile.q, d, steps, tile.q_transposed);
                transpose_page(self.isa, tile.dout, value_dim, steps, tile.dout_transposed);
            });
            tile.is_dead[0] = u32::from(is_zero(self.isa, tile.dout) && is_zero(self.isa, &tile.delta[..rows]));
        }
    }

    /// Adds what a block of queries by keys has to say to the gradients of both; overwrites them where it is the first to do so.
    ///
    /// # Safety
    /// Nobody else has these pages of queries or of keys.
    unsafe fn block(&self, unit: &Unit<'_>, key_block: usize, query_block: usize, pages: &Pages<T>) {
        let (g, d, value_dim) = (self.g, self.g.head_dim, self.g.values.width());
        let steps_of = |d: usize| row_len::<T>(d) / per_step::<T>();
        let (steps, value_steps, page_steps) = (steps_of(d), steps_of(value_dim), PAGE / per_step::<T>());
        let page_bytes = page_steps * 4;
        let pages_of = |block: usize| block * BLOCK_PAGES..((block + 1) * BLOCK_PAGES).min(unit.num_pages());
        let zero = T::from_f32(0.0);
        let first_page = |query_page: usize| g.first_visible(query_page * PAGE) / PAGE;
        let wide_len = self.kernel.wide_len(PAGE, steps_max::<T>(g));
        with_scratch(block_scratch_bytes::<T>(wide_len), |mut arena| {
            let (scores, dprobabilities) = (arena.take::<f32>(PAGE * PAGE), arena.take::<f32>(PAGE * PAGE));
            let (p, ds) = (arena.take::<T>(PAGE * PAGE), arena.take::<T>(PAGE * PAGE));
            let (p_words, ds_words) = (arena.take::<u32>(steps_words::<T>(PAGE)), arena.take::<u32>(steps_words::<T>(PAGE)));
            // These products wait for their arithmetic.
            let (kernel, wide, ahead) = (&self.kernel, arena.take(wide_len), &mut Ahead::nothing());
            let mut products = Products { kernel, wide, ahead };
            for key_page in pages_of(key_block) {
                // SAFETY: passed on from the caller.
                let keys = unsafe { pages.keys(unit, key_page) };
                for head in 0..g.heads / g.kv_heads {
                    for query_page in pages_of(query_block).filter(|&page| page >= key_page && first_page(page) <= key_page) {
                        // SAFETY: passed on from the caller.
                        let tile = unsafe { pages.queries(unit, query_page, head) };
                        // The first to reach a key is the page of queries of its own positions; a query, the first page of its own block that it sees.
                        let key_has = !(head == 0 && query_page == key_page);
                        let query_has =
                            key_block != query_block || key_page > first_page(query_page).max(key_block * BLOCK_PAGES);
                        if tile.is_dead[0] == 1 {
                            // What it would add are zeros.
                            if !key_has {
                                keys.dk.fill(0.0);
                                keys.dv.fill(0.0);
                            }
                            if !query_has {
                                tile.dq.fill(0.0);
                            }
                            continue;
                        }
                        let rows = unit.rows(query_page);
                        let from_rows =
                            |first: &[T], steps| Left { rows, steps, first: first.as_ptr().cast(), stride: steps * 4 };
                        let from_columns = |first: &[T], rows| Left {
                            rows,
                            steps: page_steps,
                            first: first.as_ptr().cast(),
                            stride: page_bytes,
                        };
                        // SAFETY: all blocks are whole: 64 rows or columns, padded with zeros.
                        unsafe {
                            let (q, dout) = (from_rows(tile.q, steps), from_rows(tile.dout, value_steps));
                            let (k, v) = (keys.keys_as_columns.as_ptr(), keys.values_as_columns.as_ptr());
                            products.product(q, (k, steps), PAGE, (scores.as_mut_ptr(), PAGE), false);
                            products.product(dout, (v, value_steps), PAGE, (dprobabilities.as_mut_ptr(), PAGE), false);
                        }
                        for r in 0..rows {
                            let position = query_page * PAGE + r;
                            let visible = visible_slots(g.first_visible(position)..position + 1, key_page);
                            let (normalizer, delta) = (tile.log_normalizers[r], tile.delta[r]);
                            let (p, ds) = (page_row_mut(p, r), page_row_mut(ds, r));
                            let (scores, gradient) = (page_row(scores, r), page_row(dprobabilities, r));
                            let own = visible.start;
                            softmax::attention_block_backward(
                                self.isa, scores, gradient, visible, g.scale, normalizer, delta, p, ds,
                            );
                            // Who sees one key gives it all of its weight, wherever it is. What rounding makes of that would be a step of an optimizer that divides by its size. (A sink takes
                            // a part, and then the normalizer is another.)
                            let sees_one = g.first_visible(position) == position;
                            if sees_one && (scores[own] * g.scale - normalizer).abs() <= 1e-6 * normalizer.abs().max(1.0) {
                                ds.fill(zero);
                            }
                        }
                        p[rows * PAGE..].fill(zero);
                        ds[rows * PAGE..].fill(zero);
                        pack_rows_as_steps(self.isa, p, PAGE, p_words);
                        pack_rows_as_steps(self.isa, ds, PAGE, ds_words);
                        // SAFETY: as above.
                        unsafe {
                            let (dout, q) = (from_columns(tile.dout_transposed, value_dim), from_columns(tile.q_transposed, d));
                            products.product(dout, (p_words.as_ptr(), page_steps), PAGE, (keys.dv.as_mut_ptr(), PAGE), key_has);
                            products.product(q, (ds_words.as_ptr(), page_steps), PAGE, (keys.dk.as_mut_ptr(), PAGE), key_has);
                            let (ds, k) = (from_columns(ds, rows), keys.keys_as_rows.as_ptr());
                            products.product(ds, (k, page_steps), d, (tile.dq.as_mut_ptr(), d), query_has);
                        }
                    }
                }
            }
        });
    }

    /// Writes the gradients of a page to where they belong.
    ///
    /// # Safety
    /// Nobody else has this page.
    unsafe fn write(&self, unit: &Unit<'_>, page: usize, pages: &Pages<T>) {
        let (g, d, value_dim) = (self.g, self.g.head_dim, self.g.values.width());
        let (rows, first) = (unit.rows(page), unit.tokens.start + page * PAGE);
        // SAFETY: passed on from the caller.
        let keys = unsafe { pages.keys(unit, page) };
        with_scratch(pack_scratch_bytes::<T>(g), |mut arena| {
            let side = arena.take::<u32>(PAGE * PANEL);
            let mut write = |columns: &[f32], (out, width): (&SharedMut<f32>, usize), adds: bool| {
                for (panel, columns) in columns.chunks(PANEL * PAGE).enumerate() {
                    write_panel_rows(self.isa, bytes_of(columns), (PAGE * 4, PAGE * 4), 0, PANEL, side);
                    for (slot, numbers) in side.chunks_exact(PANEL).enumerate().take(rows) {
                        let start = ((first + slot) * g.kv_heads + unit.kv_head) * width + panel * PANEL;
                        // SAFETY: each page has key heads of its own.
                        let out = unsafe { out.part(start..start + columns.len() / PAGE) };
                        let numbers = numbers.iter().map(|&bits| f32::from_bits(bits));
                        out.iter_mut().zip(numbers).for_each(|(out, number)| *out = if adds { *out + number } else { number });
                    }
                }
            };
            write(keys.dk, (&self.dk, d), false);
            match &self.dv {
                Some(dv) => write(keys.dv, (dv, value_dim), false),
                None => write(keys.dv, (&self.dk, d), true),
            }
        });
        let group = g.heads / g.kv_heads;
        for head in 0..group {
            // SAFETY: passed on from the caller.
            let tile = unsafe { pages.queries(unit, page, head) };
            for (r, dq) in tile.dq.chunks_exact(d).take(rows).enumerate() {
                let place = (first + r) * g.heads + unit.kv_head * group + head;
                // SAFETY: a query head belongs to one key head, so to one page.
                unsafe { self.dq.part(place * d..(place + 1) * d) }.copy_from_slice(dq);
            }
        }
    }
}

/// Steps of the right sides of a block's products, at most.
fn steps_max<T: Element>(g: &AttentionGeometry) -> usize {
    row_len::<T>(g.head_dim.max(g.values.width()).max(PAGE)) / per_step::<T>()
}

/// Bytes of scratch that a block works in, with so much room for a right side that is widened.
fn block_scratch_bytes<T: Element + Plain>(wide_len: usize) -> usize {
    2 * taken_bytes::<f32>(PAGE * PAGE)
        + 2 * taken_bytes::<T>(PAGE * PAGE)
        + 2 * taken_bytes::<u32>(steps_words::<T>(PAGE))
        + taken_bytes::<f32>(wide_len)
}

/// Bytes of scratch that laying out a page takes, before and after.
fn pack_scratch_bytes<T: Element + Plain>(g: &AttentionGeometry) -> usize {
    let rows = taken_bytes::<T>(PAGE * g.head_dim) + taken_bytes::<T>(PAGE * g.values.width());
    let steps = taken_bytes::<u32>(PAGE / per_step::<T>() * g.head_dim.max(g.values.width()));
    rows.max(steps).max(taken_bytes::<u32>(PAGE * PANEL))
}

/// The first columns of a page of rows, `[64, row_len]`, as rows: `[columns, 64]`. `steps` has room for words of all of them.
fn transpose_page<T: Element>(isa: Isa, rows: &[T], columns: usize, steps: &mut [u32], out: &mut [T]) {
    let (row_len, per_step) = (rows.len() / PAGE, per_step::<T>());
    // SAFETY: plain numbers, of which whole words lie in each row; a scratch begins at a whole line.
    let (before, words, behind) = unsafe { out.align_to_mut::<u32>() };
    assert!(before.is_empty() && behind.is_empty(), "rows of 64 are whole words");
    let width = PAGE / per_step;
    if per_step == 1 {
        let size = size_of::<T>();
        return write_panel_rows(
            isa,
            &bytes_of(rows)[..((PAGE - 1) * row_len + columns) * size],
            (columns * size, row_len * size),
            0,
            width,
            words,
        );
    }
    let steps = &mut steps[..width * columns];
    for (step, rows) in steps.chunks_exact_mut(columns).zip(rows.chunks_exact(2 * row_len)) {
        pack_step(isa, &rows[..columns], Some(&rows[row_len..][..columns]), step);
    }
    // SAFETY: plain numbers are readable as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(steps.as_ptr().cast::<u8>(), size_of_val(steps)) };
    write_panel_rows(isa, bytes, (columns * 4, columns * 4), 0, width, words);
}

/// The pages of a round: of each its keys, and then the queries of the heads that share them.
struct Pages<T> {
    bytes: SharedMut<u8>,
    g: AttentionGeometry,
    dtype: std::marker::PhantomData<T>,
}

impl<T: Element + Plain> Pages<T> {
    /// # Safety
    /// Nobody else has these keys while they are in use.
    unsafe fn keys<'a>(&'a self, unit: &Unit<'_>, page: usize) -> Keys<'a> {
        let start = (unit.first_page + page) * page_bytes::<T>(&self.g);
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.bytes.part(start..start + Keys::bytes::<T>(&self.g)) };
        Keys::take::<T>(&mut Arena::new(bytes), &self.g)
    }

    /// # Safety
    /// Nobody else has these queries while they are in use.
    unsafe fn queries<'a>(&'a self, unit: &Unit<'_>, page: usize, head: usize) -> Queries<'a, T> {
        let g = &self.g;
        let start = (unit.first_page + page) * page_bytes::<T>(g) + Keys::bytes::<T>(g) + head * Queries::<T>::bytes(g);
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.bytes.part(start..start + Queries::<T>::bytes(g)) };
        Queries::take(&mut Arena::new(bytes), g)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of the main diagonal and of other blocks, in products of pages.
    const COSTS: [usize; 2] = [BLOCK_PAGES * (BLOCK_PAGES + 1) / 2, BLOCK_PAGES * BLOCK_PAGES];

    /// How many times as long as without waiting a round of `units` equal units takes on so many threads that take tasks in order.
    fn time(units: usize, num_blocks: usize, num_diagonals: usize, threads: usize) -> f64 {
        let blocks = Block::all((0..units).map(|_| (num_blocks, num_diagonals)));
        let mut ends = vec![vec![(0, 0); num_blocks]; units];
        let (mut free, mut total) = (vec![0; threads], 0);
        for block in blocks {
            let thread = (0..threads).min_by_key(|&thread| free[thread]).unwrap();
            let mut start = free[thread];
            for keys in block.needs() {
                let (diagonals, end) = ends[block.unit][keys];
                assert!(diagonals >= block.diagonal, "a block comes before one that it needs");
                start = start.max(end);
            }
            let cost = COSTS[block.diagonal.min(1)];
            free[thread] = start + cost;
            ends[block.unit][block.keys] = (block.diagonal + 1, start + cost);
            total += cost;
        }
        let last = free.into_iter().max().unwrap();
        (last * threads) as f64 / total as f64
    }

    #[test]
    fn all_threads_work_on_one_sequence() {
        const KV_HEADS: usize = 8;
        for threads in [2, 4, 16] {
            for tokens in [4096usize, 8192, 32_768] {
                let pages = tokens.div_ceil(PAGE);
                let units = (ROUND_PAGES_PER_THREAD * threads / pages).clamp(1, KV_HEADS);
                let (blocks, windowed) = (pages.div_ceil(BLOCK_PAGES), 5);
                for diagonals in [blocks, windowed] {
                    let time = time(units, blocks, diagonals, threads);
                    assert!(
                        time < 1.1,
                        "{time} times the work of a thread: {tokens} tokens, {diagonals} diagonals, {threads} threads"
                    );
                }
            }
        }
    }
}
