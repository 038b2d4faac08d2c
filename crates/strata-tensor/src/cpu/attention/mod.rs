//! Attention over sequences of any length, with grouped queries, causal or of every token to all of its sequence, forward (here) and backward (`backward`, causal alone).
//!
//! The score matrix is never whole: a tile of queries walks the pages of its sequence in order, eight pages of 64 keys at a time, and joins what it finds in them by their maxima and sums
//! (Milakov & Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135), so that one query over many pages is work for many threads (Dao et al., Flash-Decoding, 2023). Within eight
//! pages nothing is rescaled: all scores are there before the first exponential, and the values are one reduction. What one query does at each page depends on its own position only, so its bits are the
//! same in a decode step of one token, in a prefill chunk and in a training pass. Training computes over pages too, which it packs for the length of the pass.
//!
//! Roofline: a tile of 48 query rows does `4 * 48 * 64 * head_dim` operations for each page of `256 * head_dim` bytes, and with what it computes for eight pages fits the second-level
//! cache: bound by arithmetic. A decode step reads each page once for the query heads that share it: bound by memory, and by how early it asks for it (`ahead`).

mod ahead;
mod backward;
mod pages;
mod products;
#[cfg(test)]
mod tests;

use ahead::{Ahead, Reads};
pub(crate) use backward::{AttentionGradient, backward, gradient_bytes_per_token};
pub(crate) use pages::write_pages;
use pages::{head_words, values_not_finite, values_of, values_of_keys};
use products::{Left, Products};

use std::ops::Range;

use super::isa::{Arithmetic, Isa};
use super::kv::{KvPages, key_len, value_len};
use super::matmul::{Fetch, Pieces, Tile, TileKernel, pack_step, widened_len};
use super::memory::Buffer;
use super::packed::{LANES, PANEL};
use super::rows::softmax;
use super::scratch::{Arena, Plain, taken_bytes, with_scratch};
use super::threads::{Pool, SharedMut};
use crate::backend::{AttentionGeometry, AttentionSpan};
use crate::{Element, KV_PAGE_TOKENS as PAGE, KvValues, Result};

/// Rows of a tile of queries, at most: with two query heads to a key head, 24 positions. A multiple of the rows of kernels' tiles.
const TILE_ROWS: usize = 48;
/// The same where keys and values are widened once for all of a tile, which takes as long as multiplying a sixth of 48 rows with them. (Emerald Rapids, prefill of 4,096 tokens, the time of all else
/// beside that of the large products of the layers: 0.73 with 48 rows, 0.70 with 96 or 128, 0.71 with 144; of 512 tokens 0.22, 0.21 with 96 or 128.)
const WIDENED_TILE_ROWS: usize = 96;
/// The same for a matrix unit, which takes 32 at a time, and waits for keys and values to come to the first-level cache unless many rows read them: of few keys, and of so many that what
/// its first rows do not see yet is little beside what they see.
const UNIT_TILE_ROWS: usize = 64;
const LONG_UNIT_TILE_ROWS: usize = 128;
const LONG_KEYS: usize = 2048;
/// Pages of a split of the keys of a sequence. Part of the order of every sum over keys.
const SPLIT_PAGES: usize = 8;
/// Keys of a split: enough that joining what was found in it costs nothing beside finding it, and few enough that one query over
/// a long context keeps many threads busy.
const SPLIT_KEYS: usize = SPLIT_PAGES * PAGE;
/// Tasks for each thread that make it likely that all finish together.
const TASKS_PER_THREAD: usize = 4;
/// The same of tiles that fetch for one another within a task.
const FETCHING_TASKS_PER_THREAD: usize = 16;

/// Bytes that attention takes beside its inputs and outputs, forward or back, however many tokens there are, unless a sequence is longer than
/// what the backward pass takes at a time.
pub(crate) fn scratch_bytes<T: Element + Plain>(g: &AttentionGeometry, num_threads: usize) -> usize {
    let (d, rows) = (g.values.width(), (g.heads / g.kv_heads).max(LONG_UNIT_TILE_ROWS));
    let split = 2 * taken_bytes::<f32>(rows * SPLIT_KEYS)
        + taken_bytes::<f32>(rows * g.head_dim)
        + taken_bytes::<T>(value_len(d))
        + taken_bytes::<f32>(widened_len(split_steps::<T>(g)));
    // Of fewer tiles than tasks, each has what it has found so far and what it finds in the splits of a round, of which there are no more than tasks and tiles.
    let found = 3 * TASKS_PER_THREAD * Found::bytes(rows, d);
    num_threads * (split + found) + backward::round_bytes::<T>(g, num_threads)
}

/// Rows of a tile of queries of a sequence of so many keys, at most. What a query finds does not depend on it.
fn tile_rows(isa: Isa, kernel: &TileKernel, keys: usize) -> usize {
    match isa {
        Isa::Amx if keys < LONG_KEYS => UNIT_TILE_ROWS,
        Isa::Amx => LONG_UNIT_TILE_ROWS,
        _ if kernel.wide_len(WIDENED_TILE_ROWS, 1) > 0 => WIDENED_TILE_ROWS,
        _ => TILE_ROWS,
    }
}

/// Steps of a right side of a product of a split, at most.
fn split_steps<T: Element>(g: &AttentionGeometry) -> usize {
    row_len::<T>(g.head_dim).max(SPLIT_KEYS) / per_step::<T>()
}

/// Slots of a page of keys that a query sees, given the positions that it sees; none, at either end, if it sees nothing of it.
fn visible_slots(visible: Range<usize>, page: usize) -> Range<usize> {
    let slot = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
    slot(visible.start)..slot(visible.end)
}

/// What a query head attends with and to: some positions of one sequence, the query heads that share a key head, and the keys.
struct QueryTile<'s> {
    span: &'s AttentionSpan<'s>,
    kv_head: usize,
    /// Its positions, counted from the first new token of the sequence.
    positions: Range<usize>,
}

impl QueryTile<'_> {
    /// Rows of the tile: row r is head `r / positions.len()` of the group at position `r % positions.len()`.
    fn rows(&self, group: usize) -> usize {
        self.positions.len() * group
    }

    /// Position in the sequence of a row.
    fn position(&self, row: usize) -> usize {
        self.span.past + self.positions.start + row % self.positions.len()
    }

    /// The query head of a row, as a row of `[tokens * heads, head_dim]`.
    fn place(&self, g: &AttentionGeometry, row: usize) -> usize {
        let token = self.span.tokens.start + self.positions.start + row % self.positions.len();
        token * g.heads + self.kv_head * (g.heads / g.kv_heads) + row / self.positions.len()
    }

    /// Positions in the sequence that a row sees.
    fn visible(&self, g: &AttentionGeometry, row: usize) -> Range<usize> {
        g.visible(self.position(row), self.span.past + self.span.tokens.len())
    }

    /// Positions in the sequence that some of its rows see.
    fn visible_to_any(&self, g: &AttentionGeometry) -> Range<usize> {
        self.visible(g, 0).start..self.visible(g, self.positions.len() - 1).end
    }

    /// Splits of the keys that its positions see.
    fn splits(&self, g: &AttentionGeometry) -> Range<usize> {
        let visible = self.visible_to_any(g);
        visible.start / SPLIT_KEYS..visible.end.div_ceil(SPLIT_KEYS)
    }
}

/// What the rows of a tile have found among some keys: maxima and sums of their softmax, and their values, not yet divided by the sums.
struct Found<'a> {
    maxima: &'a mut [f32],
    sums: &'a mut [f32],
    values: &'a mut [f32],
}

impl<'a> Found<'a> {
    /// Of so many rows, of unspecified contents.
    fn take(arena: &mut Arena<'a>, rows: usize, d: usize) -> Self {
        Found { maxima: arena.take(rows), sums: arena.take(rows), values: arena.take(rows * d) }
    }

    const fn bytes(rows: usize, d: usize) -> usize {
        2 * taken_bytes::<f32>(rows) + taken_bytes::<f32>(rows * d)
    }
}

/// Attention of new queries over pages.
struct Forward<'a, T> {
    isa: Isa,
    kernel: TileKernel,
    g: &'a AttentionGeometry,
    q: &'a [T],
    sinks: Option<&'a [f32]>,
    /// The value of a sink, if there are any.
    sink_value: &'a [f32],
    /// The words of the pages.
    words: &'a [u32],
    out: SharedMut<T>,
    log_normalizers: SharedMut<f32>,
}

/// Attends every query `[tokens, heads, head_dim]` to the keys of its sequence that it sees, up to its own position or all. Writes `out: [tokens, heads, value width]`, and
/// the logarithm of each query's softmax denominator, `[tokens, heads]`, where the backward pass will want it.
///
/// Keys are taken in splits of [`SPLIT_KEYS`], counted from the first of the sequence, and what is found in them is joined in order. Where there are not enough
/// tiles of queries for all threads, they take splits of the same tile; else a tile goes through its splits by itself. The bits are the same.
///
/// # Errors
/// If there is no memory to work in.
#[allow(clippy::too_many_arguments)]
pub(crate) fn forward<T: Element + Plain>(
    pool: &Pool,
    arithmetic: Arithmetic,
    g: &AttentionGeometry,
    q: &[T],
    sinks: Option<&[f32]>,
    spans: &[AttentionSpan<'_>],
    pages: &KvPages,
    out: &mut [T],
    log_normalizers: &mut [f32],
) -> Result<()> {
    let group = g.heads / g.kv_heads;
    let kernel = TileKernel::new(arithmetic, T::DTYPE);
    let mut tiles = Vec::new();
    for span in spans {
        let tile_positions = (tile_rows(arithmetic.isa, &kernel, span.past + span.tokens.len()) / group).max(1);
        for kv_head in 0..g.kv_heads {
            let len = span.tokens.len();
            let positions = (0..len).step_by(tile_positions).map(|first| first..(first + tile_positions).min(len));
            tiles.extend(positions.map(|positions| QueryTile { span, kv_head, positions }));
        }
    }
    // SAFETY: as in `write_pages`; nobody writes now.
    let words = unsafe { std::slice::from_raw_parts(pages.buffer.as_ptr().cast::<u32>(), pages.buffer.len() / 4) };
    let (out, log_normalizers) = (SharedMut::new(out), SharedMut::new(log_normalizers));
    let sink_value = &vec![0.0; sinks.map_or(0, |_| g.values.width())][..];
    let forward = Forward { isa: arithmetic.isa, kernel, g, q, sinks, sink_value, words, out, log_normalizers };
    let enough = TASKS_PER_THREAD * pool.num_threads();
    if tiles.len() >= enough || tiles.iter().all(|tile| tile.splits(g).len() == 1) {
        // Of tiles that fetch what the next of them reads, some at a time.
        let are_few = tiles.iter().all(|tile| forward.has_few_rows(tile));
        let per_task = if are_few { (tiles.len() / (FETCHING_TASKS_PER_THREAD * pool.num_threads())).max(1) } else { 1 };
        pool.run(tiles.len().div_ceil(per_task), &|task| {
            // The longest tiles of a sequence are its last: begin with them, so that threads finish together.
            let end = tiles.len() - task * per_task;
            let tiles = &tiles[end.saturating_sub(per_task)..end];
            let mut ahead = Ahead::of_tiles(&forward, tiles);
            tiles.iter().for_each(|tile| forward.tile(tile, &mut ahead));
        });
        return Ok(());
    }
    forward.in_splits(pool, &tiles, enough.div_ceil(tiles.len()))
}

impl<T: Element + Plain> Forward<'_, T> {
    /// One tile, split after split of its keys.
    fn tile(&self, tile: &QueryTile<'_>, ahead: &mut Ahead<'_>) {
        let (rows, d) = (tile.rows(self.g.heads / self.g.kv_heads), self.g.values.width());
        with_scratch(2 * Found::bytes(rows, d) + self.split_bytes(rows), |mut arena| {
            let splits = tile.splits(self.g);
            let mut total = Found::take(&mut arena, rows, d);
            self.split(tile, splits.start, &mut total, &mut arena, ahead);
            if splits.len() > 1 {
                let mut part = Found::take(&mut arena, rows, d);
                for split in splits.start + 1..splits.end {
                    self.split(tile, split, &mut part, &mut arena, ahead);
                    self.join(tile, split, &part, &mut total);
                }
            }
            self.write(tile, &mut total);
        });
    }

    /// All tiles, `at_a_time` splits of each at a time.
    fn in_splits(&self, pool: &Pool, tiles: &[QueryTile<'_>], at_a_time: usize) -> Result<()> {
        let (d, group) = (self.g.values.width(), self.g.heads / self.g.kv_heads);
        let rows_max = tiles.iter().map(|tile| tile.rows(group)).max().unwrap_or(0);
        let size = Found::bytes(rows_max, d);
        // Of each tile what it has found so far, and then in each of the next splits.
        let mut found = Buffer::recycled(tiles.len() * (1 + at_a_time) * size)?;
        let found = SharedMut::new(&mut found[..]);
        let of = |tile: usize, i: usize| {
            let at = (tile * (1 + at_a_time) + i) * size;
            // SAFETY: no two tasks of a region have the same part.
            Found::take(&mut Arena::new(unsafe { found.part(at..at + size) }), tiles[tile].rows(group), d)
        };
        let splits: Vec<Range<usize>> = tiles.iter().map(|tile| tile.splits(self.g)).collect();
        let num_splits = splits.iter().map(Range::len).max().unwrap_or(0);
        for first in (0..num_splits).step_by(at_a_time) {
            // The splits of a tile in this round, counted from its first.
            let round = |tile: usize| splits[tile].clone().skip(first).take(at_a_time).enumerate();
            pool.run(tiles.len() * at_a_time, &|task| {
                let tile = task / at_a_time;
                if let Some((i, split)) = round(tile).nth(task % at_a_time) {
                    let rows = tiles[tile].rows(group);
                    with_scratch(self.split_bytes(rows), |mut arena| {
                        let mut ahead = Ahead::of_split(self, &tiles[tile], split);
                        self.split(&tiles[tile], split, &mut of(tile, 1 + i), &mut arena, &mut ahead);
                    });
                }
            });
            pool.run(tiles.len(), &|tile| {
                let mut total = of(tile, 0);
                for (i, split) in round(tile) {
                    let part = of(tile, 1 + i);
                    if split == splits[tile].start {
                        total.maxima.copy_from_slice(part.maxima);
                        total.sums.copy_from_slice(part.sums);
                        total.values.copy_from_slice(part.values);
                    } else {
                        self.join(&tiles[tile], split, &part, &mut total);
                    }
                }
                if (first..first + at_a_time).contains(&(splits[tile].len() - 1)) {
                    self.write(&tiles[tile], &mut total);
                }
            });
        }
        Ok(())
    }

    /// Bytes of scratch of [`Forward::split`].
    fn split_bytes(&self, rows: usize) -> usize {
        taken_bytes::<T>(rows * row_len::<T>(self.g.head_dim))
            + taken_bytes::<f32>(rows * SPLIT_KEYS)
            + taken_bytes::<T>(rows * SPLIT_KEYS)
            + taken_bytes::<u32>(self.transposed_words())
            + taken_bytes::<[u32; 2]>(rows)
            + taken_bytes::<f32>(self.wide_len(rows))
    }

    /// Room for a right side that is widened.
    fn wide_len(&self, rows: usize) -> usize {
        self.kernel.wide_len(rows, split_steps::<T>(self.g))
    }

    /// Words of a page of values that are to be laid out.
    fn transposed_words(&self) -> usize {
        match self.g.values {
            KvValues::Own(_) => 0,
            KvValues::PrefixOfKey(width) => value_len(width) / per_step::<T>(),
        }
    }

    /// What a tile finds in one split of the keys. Rows that see none of it find unspecified things.
    fn split(&self, tile: &QueryTile<'_>, split: usize, found: &mut Found<'_>, arena: &mut Arena<'_>, ahead: &mut Ahead<'_>) {
        let g = self.g;
        let (key_dim, row_len) = (g.head_dim, row_len::<T>(g.head_dim));
        let (rows, positions) = (tile.rows(g.heads / g.kv_heads), tile.positions.len());
        let blocks = self.blocks(tile, split);
        let mut arena = arena.reborrow();
        let (queries, scores) = (arena.take::<T>(rows * row_len), arena.take::<f32>(rows * blocks.len() * PAGE));
        let (probabilities, seen) = (arena.take::<T>(rows * blocks.len() * PAGE), arena.take::<[u32; 2]>(rows));
        let wide = arena.take(self.wide_len(rows));
        let mut products = Products { kernel: &self.kernel, wide, ahead };
        for (r, query) in queries.chunks_exact_mut(row_len).enumerate() {
            query[..key_dim].copy_from_slice(&self.q[tile.place(g, r) * key_dim..][..key_dim]);
            query[key_dim..].fill(T::from_f32(0.0));
        }
        let left = Left {
            rows,
            steps: row_len / per_step::<T>(),
            first: queries.as_ptr().cast(),
            stride: size_of_val(queries) / rows,
        };
        for (block, scores) in blocks.clone().zip(scores.chunks_exact_mut(rows * PAGE)) {
            // Keys that no query of the tile sees are not read, and their scores are unspecified.
            let tile = Tile {
                steps: left.steps,
                a: left.first,
                a_stride: left.stride,
                b: self.keys(tile, block).as_ptr().cast(),
                b_stride: PAGE * 4,
                c: scores.as_mut_ptr(),
                c_stride: PAGE,
                columns: self.columns(tile, block),
                accumulate: false,
                fetch: Fetch::Nothing,
            };
            // SAFETY: the buffers hold `rows` rows, and the keys are a packed matrix.
            unsafe { products.block(rows, &tile) };
        }
        let in_blocks = |position: usize| position.clamp(blocks.start * PAGE, blocks.end * PAGE) - blocks.start * PAGE;
        let (of_first_head, of_others) = seen.split_at_mut(positions);
        for (row, seen) in of_first_head.iter_mut().enumerate() {
            let Range { start, end } = tile.visible(g, row);
            *seen = [in_blocks(start), in_blocks(end)].map(|key| key as u32);
        }
        of_others.chunks_exact_mut(positions).for_each(|of_head| of_head.copy_from_slice(of_first_head));
        softmax::attention_blocks(self.isa, scores, seen, g.scale, found.maxima, found.sums, probabilities);
        self.add_values(tile, blocks, probabilities, found, &mut arena, &mut products);
    }

    /// The pages of a split that a tile sees something of.
    fn blocks(&self, tile: &QueryTile<'_>, split: usize) -> Range<usize> {
        let visible = tile.visible_to_any(self.g);
        let first = (split * SPLIT_PAGES).max(visible.start / PAGE);
        first..((split + 1) * SPLIT_PAGES).min(visible.end.div_ceil(PAGE))
    }

    /// How many keys of a block are multiplied: whole vectors up to the last that some query of the tile sees.
    fn columns(&self, tile: &QueryTile<'_>, block: usize) -> usize {
        visible_slots(tile.visible_to_any(self.g), block).end.next_multiple_of(LANES)
    }

    /// Steps of the values of a block up to the last that some query of the tile sees.
    fn value_steps(&self, tile: &QueryTile<'_>, block: usize) -> usize {
        visible_slots(tile.visible_to_any(self.g), block).end.div_ceil(per_step::<T>())
    }

    /// How many blocks from one on are one reduction: those all of whose values all queries see.
    fn whole_blocks(&self, tile: &QueryTile<'_>, blocks: Range<usize>) -> usize {
        match self.g.values {
            KvValues::Own(_) => blocks.take_while(|&block| self.all_see_all(tile, block)).count(),
            KvValues::PrefixOfKey(_) => 0,
        }
    }

    /// Whether a tile has so few rows that it waits for memory.
    fn has_few_rows(&self, tile: &QueryTile<'_>) -> bool {
        ahead::are_few(tile.rows(self.g.heads / self.g.kv_heads))
    }

    /// Whether what it reads is widened before it is multiplied.
    fn is_widened(&self, tile: &QueryTile<'_>) -> bool {
        self.wide_len(tile.rows(self.g.heads / self.g.kv_heads)) > 0
    }

    /// The packed keys of a block.
    fn keys(&self, tile: &QueryTile<'_>, block: usize) -> &[u32] {
        let per_step = per_step::<T>();
        let (keys, _) = head_words(self.g, per_step, tile.span.pages[block] as usize, tile.kv_head);
        &self.words[keys..][..key_len(self.g.head_dim) / per_step]
    }

    /// The packed values of a block, if they lie so.
    fn values(&self, tile: &QueryTile<'_>, block: usize) -> &[u32] {
        let per_step = per_step::<T>();
        let (_, values) = head_words(self.g, per_step, tile.span.pages[block] as usize, tile.kv_head);
        &self.words[values..][..value_len(self.g.values.width()) / per_step]
    }

    /// The products of probabilities, `[rows, blocks, PAGE]`, and the values of these blocks.
    fn add_values(
        &self,
        tile: &QueryTile<'_>,
        blocks: Range<usize>,
        probabilities: &[T],
        found: &mut Found<'_>,
        arena: &mut Arena<'_>,
        products: &mut Products<'_, '_>,
    ) {
        let (g, d, page_steps) = (self.g, self.g.values.width(), PAGE / per_step::<T>());
        let (rows, positions) = (tile.rows(g.heads / g.kv_heads), tile.positions.len());
        let stride = blocks.len() * PAGE * size_of::<T>();
        let left_of = |row: usize, rows: usize, block: usize, steps: usize| {
            let first = probabilities[(row * blocks.len() + block - blocks.start) * PAGE..].as_ptr().cast();
            Left { rows, steps, first, stride }
        };
        let transposed = arena.take::<u32>(self.transposed_words());
        let mut block = blocks.start;
        while block < blocks.end {
            let accumulate = block > blocks.start;
            let parts = self.whole_blocks(tile, block..blocks.end);
            if parts > 0 {
                let values = |part: usize| self.values(tile, block + part).as_ptr();
                let left = left_of(0, rows, block, page_steps);
                // SAFETY: the buffers hold `rows` rows, and the values are packed matrices.
                unsafe { products.product_in_parts(left, parts, &values, d, found.values.as_mut_ptr(), accumulate) };
                block += parts;
                continue;
            }
            let values = match g.values {
                KvValues::Own(_) => self.values(tile, block),
                KvValues::PrefixOfKey(_) => {
                    values_of_keys::<T>(self.isa, self.keys(tile, block), g, transposed);
                    &*transposed
                }
            };
            let visible_of = |row: usize| visible_slots(tile.visible(g, row), block);
            // Values that no query of the tile sees are not read. What some see and others do not is multiplied by probabilities of zero for those,
            // and the least likely of values, an infinity, would be NaN.
            let (visible_first, visible_last) = (visible_of(0), visible_of(positions - 1));
            // Up to where the window of some query begins, and from where the view of some query ends.
            let not_before = visible_last.start > 0 && values_not_finite::<T>(values, d, 0..visible_last.start);
            let end_is_one = visible_first.end.is_multiple_of(per_step::<T>()) && visible_first.end == visible_last.end;
            let finite = || !values_not_finite::<T>(values, d, visible_first.end..visible_last.end);
            if !not_before && (end_is_one || finite()) {
                let left = left_of(0, rows, block, self.value_steps(tile, block));
                // SAFETY: as above.
                unsafe { products.product(left, (values.as_ptr(), page_steps), d, (found.values.as_mut_ptr(), d), accumulate) };
                block += 1;
                continue;
            }
            for p in 0..positions {
                let visible = visible_of(p);
                if visible.is_empty() {
                    if !accumulate {
                        (p..rows).step_by(positions).for_each(|row| found.values[row * d..][..d].fill(0.0));
                    }
                    continue;
                }
                let values = values_of::<T>(values, d, &visible);
                for row in (p..rows).step_by(positions) {
                    let left = left_of(row, 1, block, visible.end.div_ceil(per_step::<T>()));
                    let out = found.values[row * d..].as_mut_ptr();
                    // SAFETY: as above, one row at a time.
                    unsafe { products.product(left, (values.as_ptr(), page_steps), d, (out, d), accumulate) };
                }
            }
            block += 1;
        }
    }

    /// Whether every query of a tile sees every key of a block.
    fn all_see_all(&self, tile: &QueryTile<'_>, block: usize) -> bool {
        [0, tile.positions.len() - 1].into_iter().all(|row| visible_slots(tile.visible(self.g, row), block) == (0..PAGE))
    }

    /// Joins what the rows of a tile have found in a split to what they have found before it.
    fn join(&self, tile: &QueryTile<'_>, split: usize, part: &Found<'_>, total: &mut Found<'_>) {
        let d = self.g.values.width();
        for r in 0..total.sums.len() {
            let visible = tile.visible(self.g, r);
            let first = visible.start / SPLIT_KEYS;
            let (values, part_values) = (&mut total.values[r * d..][..d], &part.values[r * d..][..d]);
            let (maximum, sum) = (&mut total.maxima[r], &mut total.sums[r]);
            if split == first {
                values.copy_from_slice(part_values);
                (*maximum, *sum) = (part.maxima[r], part.sums[r]);
            } else if split > first && visible.end > split * SPLIT_KEYS {
                softmax::attention_join(self.isa, part_values, part.maxima[r], part.sums[r], maximum, sum, values);
            }
        }
    }

    /// The result of a tile, once the sinks have joined as keys with values of zero.
    fn write(&self, tile: &QueryTile<'_>, total: &mut Found<'_>) {
        let d = self.g.values.width();
        for (r, (maximum, sum)) in total.maxima.iter_mut().zip(&mut *total.sums).enumerate() {
            let place = tile.place(self.g, r);
            if let Some(sinks) = self.sinks {
                let sink = sinks[place % self.g.heads];
                softmax::attention_join(self.isa, self.sink_value, sink, 1.0, maximum, sum, &mut total.values[r * d..][..d]);
            }
            // SAFETY: every query row belongs to one tile.
            let (out, log_normalizer) =
                unsafe { (self.out.part(place * d..(place + 1) * d), self.log_normalizers.part(place..place + 1)) };
            softmax::attention_output(self.isa, &total.values[r * d..][..d], *sum, out);
            log_normalizer[0] = *maximum + sum.ln();
        }
    }
}

impl<T: Element + Plain> Reads for Forward<'_, T> {
    fn splits(&self, tile: &QueryTile<'_>) -> Range<usize> {
        tile.splits(self.g)
    }

    fn areas(&self, tile: &QueryTile<'_>, split: usize, areas: &mut Vec<Pieces>) {
        let (blocks, page_steps) = (self.blocks(tile, split), PAGE / per_step::<T>());
        for block in blocks.clone() {
            let (keys, columns) = (self.keys(tile, block), self.columns(tile, block));
            let address = keys.as_ptr().addr();
            areas.push(if columns == PAGE {
                Pieces::one(address, 0..size_of_val(keys))
            } else {
                Pieces::one(address, 0..columns * 4).repeated(keys.len() / PAGE, PAGE * 4)
            });
        }
        let KvValues::Own(d) = self.g.values else { return };
        let mut block = blocks.start;
        while block < blocks.end {
            let count = self.whole_blocks(tile, block..blocks.end).max(1);
            for panel in 0..d.div_ceil(PANEL) {
                let width = (d - panel * PANEL).min(PANEL).next_multiple_of(LANES);
                areas.extend((block..block + count).map(|block| {
                    let start = panel * PANEL * page_steps * 4;
                    let bytes = start..start + self.value_steps(tile, block) * width * 4;
                    Pieces::one(self.values(tile, block).as_ptr().addr(), bytes)
                }));
            }
            block += count;
        }
    }
}

fn page_row<T>(rows: &[T], row: usize) -> &[T; PAGE] {
    rows[row * PAGE..][..PAGE].try_into().expect("a row is a page wide")
}

fn page_row_mut<T>(rows: &mut [T], row: usize) -> &mut [T; PAGE] {
    (&mut rows[row * PAGE..][..PAGE]).try_into().expect("a row is a page wide")
}

/// Numbers of a step.
fn per_step<T: Element>() -> usize {
    4 / T::DTYPE.size_bytes()
}

/// Numbers of a row of `d` in whole steps.
fn row_len<T: Element>(d: usize) -> usize {
    d.next_multiple_of(per_step::<T>())
}

/// Packs a page of rows, `[64, columns]`, as a `64 → columns` matrix. Words of the padding are unspecified.
fn pack_rows_as_steps<T: Element>(isa: Isa, source: &[T], columns: usize, words: &mut [u32]) {
    let per_step = per_step::<T>();
    let steps = PAGE / per_step;
    for panel in 0..columns.div_ceil(PANEL) {
        let count = (columns - panel * PANEL).min(PANEL);
        let width = count.next_multiple_of(LANES);
        for (s, rows) in source.chunks_exact(columns * per_step).enumerate() {
            let line = &mut words[panel * PANEL * steps + s * width..][..count];
            let row = |i: usize| &rows[i * columns + panel * PANEL..][..count];
            pack_step(isa, row(0), (per_step == 2).then(|| row(1)), line);
        }
    }
}
