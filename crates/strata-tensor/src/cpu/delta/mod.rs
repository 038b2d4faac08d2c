//! The gated delta rule (Yang et al., 2024, arXiv:2412.06464) in chunks of [`CHUNK`] tokens, forward (here) and backward (`backward`).
//!
//! With `S` the state at the start of a chunk, `G_i` the sum of the logarithms of decay from its start to token `i`, and `d_ij = exp(G_i - G_j)`, what the recurrence
//! computes is
//!
//! ```text
//! u_i = beta_i (v_i - exp(G_i) k_i S - Σ_{j<i} d_ij (k_i·k_j) u_j)        corrected values
//! o_i = exp(G_i) q_i S + Σ_{j<=i} d_ij (q_i·k_j) u_j
//! S'  = exp(G_last) S + Σ_j exp(G_last - G_j) k_jᵀ u_j                    the state at the start of the next chunk
//! ```
//!
//! Every sum is one chain of multiply-adds in the order of its index, begun from the term before it, so that the matrix products of many rows have the bits of one row. A
//! decode step is one more row of this, from the same state at the start of the chunk: nothing depends on how a sequence was cut. Before the first chunk the state is zeros, with
//! which nothing is multiplied.
//!
//! A task has the value heads of one key head of one sequence, or one of them. Roofline: a chunk of a head of 128 does 4 million multiply-adds on 160 KiB in cache: bound by arithmetic. A decode step reads
//! the state and half a chunk of values and keys: bound by memory.

mod backward;

pub(crate) use backward::{Gradients, backward, scratch_bytes as backward_scratch_bytes};

use std::ops::Range;

use super::isa::{Arithmetic, Isa};
use super::matmul::{Fetch, Pieces, Tile, TileKernel, bytes_of, write_panel_rows};
use super::packed::{LANES, PANEL};
use super::recurrent::{RecurrentStates, SlotLayout};
use super::rows::delta_chunk::{self as rows, Block};
use super::scratch::{Arena, taken_bytes, with_scratch};
use super::threads::{Pool, SharedMut};
use crate::backend::{DeltaGeometry, DeltaSpan};
use crate::{DELTA_CHUNK as CHUNK, DType};

/// Rows that are added together before each of them is finished by itself.
const BLOCK: usize = 16;
/// Tasks for each thread that make it likely that all finish together.
const TASKS_PER_THREAD: usize = 4;

/// What the rule reads; see [`DeltaInputs`](crate::DeltaInputs).
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) g: &'a [f32],
    pub(crate) beta: &'a [f32],
}

/// Numbers, and how many of them there are from one row to the next.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    numbers: &'a [f32],
    stride: usize,
}

impl<'a> Matrix<'a> {
    fn new(numbers: &'a [f32], stride: usize) -> Self {
        Matrix { numbers, stride }
    }

    fn at_row(self, row: usize) -> Self {
        Matrix { numbers: &self.numbers[row * self.stride..], ..self }
    }

    fn at_column(self, column: usize) -> Self {
        Matrix { numbers: &self.numbers[column..], ..self }
    }
}

/// What every task needs.
struct Rule<'a> {
    kernel: TileKernel,
    isa: Isa,
    g: &'a DeltaGeometry,
    /// Numbers of a row of values, whole vectors.
    width: usize,
}

/// Consecutive tokens of a chunk, for one value head.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    /// The first of them, in the chunk.
    first: usize,
    count: usize,
    v: Matrix<'a>,
    g: Matrix<'a>,
    beta: Matrix<'a>,
}

impl<'a> Tokens<'a> {
    /// Tokens from row `row` of the inputs on.
    fn of(inputs: &Inputs<'a>, g: &DeltaGeometry, row: usize, v_head: usize, first: usize, count: usize) -> Self {
        let from = |numbers: &'a [f32], stride: usize, column: usize| Matrix::new(&numbers[row * stride + column..], stride);
        Tokens {
            first,
            count,
            v: from(inputs.v, g.value_width(), v_head * g.v_dim),
            g: from(inputs.g, g.v_heads, v_head),
            beta: from(inputs.beta, g.v_heads, v_head),
        }
    }
}

/// Queries and keys of consecutive tokens of a chunk, and their products with the keys of the chunk: what the value heads of a key head have in common.
struct Shared<'a> {
    k: Matrix<'a>,
    /// If outputs are wanted.
    q: Option<Matrix<'a>>,
    /// The keys of the chunk as columns, up to these tokens, `[k_dim, CHUNK]`.
    key_columns: &'a [f32],
    /// Products with keys up to that of each row, `[CHUNK, CHUNK]`; what is beyond is unspecified.
    by_keys: &'a [f32],
    by_queries: &'a [f32],
}

/// What a value head carries from token to token.
struct Carried<'a> {
    /// At the start of the chunk, `[k_dim, width]`.
    state: &'a mut [f32],
    /// Whether that is nothing but zeros: the sequence begins with this chunk.
    is_blank: bool,
    /// Corrected values of the chunk, `[CHUNK, width]`.
    values: &'a mut [f32],
    /// Sums of the logarithms of decay, `[CHUNK]`.
    sums: &'a mut [f32],
}

/// Where what value heads have in common is computed.
struct SharedWork<'a> {
    key_columns: &'a mut [f32],
    by_keys: &'a mut [f32],
    by_queries: &'a mut [f32],
}

impl<'a> SharedWork<'a> {
    fn take(arena: &mut Arena<'a>, g: &DeltaGeometry) -> Self {
        SharedWork {
            key_columns: arena.take(g.k_dim * CHUNK),
            by_keys: arena.take(CHUNK * CHUNK),
            by_queries: arena.take(CHUNK * CHUNK),
        }
    }

    const fn bytes(g: &DeltaGeometry) -> usize {
        taken_bytes::<f32>(g.k_dim * CHUNK) + 2 * taken_bytes::<f32>(CHUNK * CHUNK)
    }
}

/// Where a chunk is computed.
struct Work<'a> {
    /// `[CHUNK, CHUNK]`.
    decays: &'a mut [f32],
    /// Weights of corrected values in later ones, `[CHUNK, CHUNK]`.
    keys: &'a mut [f32],
    /// Weights of corrected values in outputs, `[CHUNK, CHUNK]`.
    queries: &'a mut [f32],
    /// What is left of values that the state and earlier values do not say, `[CHUNK, width]`.
    rest: &'a mut [f32],
    /// `[CHUNK, width]`.
    out: &'a mut [f32],
    /// Keys as columns, scaled, `[k_dim, CHUNK]`.
    scaled: &'a mut [f32],
    /// `exp(G_i)`, and `beta`, of the tokens in question.
    starts: &'a mut [f32],
    beta: &'a mut [f32],
}

impl<'a> Work<'a> {
    fn take(arena: &mut Arena<'a>, g: &DeltaGeometry, width: usize) -> Self {
        Work {
            decays: arena.take(CHUNK * CHUNK),
            keys: arena.take(CHUNK * CHUNK),
            queries: arena.take(CHUNK * CHUNK),
            rest: arena.take(CHUNK * width),
            out: arena.take(CHUNK * width),
            scaled: arena.take(g.k_dim * CHUNK),
            starts: arena.take(CHUNK),
            beta: arena.take(CHUNK),
        }
    }

    const fn bytes(g: &DeltaGeometry, width: usize) -> usize {
        3 * taken_bytes::<f32>(CHUNK * CHUNK)
            + 2 * taken_bytes::<f32>(CHUNK * width)
            + taken_bytes::<f32>(g.k_dim * CHUNK)
            + 2 * taken_bytes::<f32>(CHUNK)
    }
}

/// A matrix with a column for each token of a chunk.
fn square(numbers: &[f32]) -> Matrix<'_> {
    Matrix::new(numbers, CHUNK)
}

/// Tokens `first..end` of a chunk, block by block.
fn blocks(first: usize, end: usize) -> impl Iterator<Item = Range<usize>> {
    (first / BLOCK..end.div_ceil(BLOCK)).map(move |b| first.max(b * BLOCK)..end.min((b + 1) * BLOCK))
}

/// The key head that serves a value head.
fn k_head_of(g: &DeltaGeometry, v_head: usize) -> usize {
    v_head / (g.v_heads / g.k_heads)
}

/// `out[c][first + r] = x[r][c]` for `rows` rows of `columns` numbers, into rows of `width`.
fn transpose(isa: Isa, x: Matrix<'_>, [rows, columns]: [usize; 2], out: &mut [f32], first: usize, width: usize) {
    // SAFETY: every f32 is a word, and every word an f32.
    let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u32>(), out.len()) };
    let bytes = bytes_of(&x.numbers[..(rows - 1) * x.stride + columns]);
    write_panel_rows(isa, bytes, (columns * size_of::<f32>(), x.stride * size_of::<f32>()), first, width, out);
}

/// Columns `columns` of rows of `stride` numbers from `first` on.
fn rows_to_fetch(first: *const f32, stride: usize, rows: &Range<usize>, columns: Range<usize>) -> Pieces {
    let at = first.wrapping_add(rows.start * stride + columns.start).addr();
    Pieces::one(at, 0..size_of::<f32>() * columns.len()).repeated(rows.len(), size_of::<f32>() * stride)
}

/// Copies `count` rows of `len` numbers to rows of `width`, filled up with zeros.
fn widen(x: Matrix<'_>, count: usize, len: usize, width: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(width).enumerate().take(count) {
        out[..len].copy_from_slice(&x.numbers[i * x.stride..][..len]);
        out[len..].fill(0.0);
    }
}

impl<'a> Rule<'a> {
    fn new(arithmetic: Arithmetic, g: &'a DeltaGeometry) -> Self {
        let kernel = TileKernel::new(arithmetic, DType::F32);
        Rule { kernel, isa: arithmetic.isa, g, width: g.v_dim.next_multiple_of(LANES) }
    }

    /// `c = a·b` of `[rows, steps, columns]`.
    fn multiply(&self, shape: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], c_stride: usize) {
        self.product(shape, [a, b], (c, c_stride), false, &mut []);
    }

    /// `c += a·b`, each chain begun from what is there.
    fn multiply_add(&self, shape: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], c_stride: usize) {
        self.product(shape, [a, b], (c, c_stride), true, &mut []);
    }

    /// Either of them; fetches meanwhile what of `coming` there is time for, and goes past it.
    fn product(
        &self,
        shape: [usize; 3],
        [a, b]: [Matrix<'_>; 2],
        (c, c_stride): (&mut [f32], usize),
        accumulate: bool,
        coming: &mut [Pieces],
    ) {
        let [rows, steps, columns] = shape;
        assert!(rows > 0 && steps > 0 && columns.is_multiple_of(LANES));
        assert!(a.numbers.len() >= (rows - 1) * a.stride + steps && b.numbers.len() >= (steps - 1) * b.stride + columns);
        assert!(c.len() >= (rows - 1) * c_stride + columns);
        for first in (0..columns).step_by(PANEL) {
            let mut room = [0; CHUNK];
            let chunks = coming.iter_mut().fold(0, |listed, pieces| listed + pieces.list_chunks(&mut room[listed..]));
            let tile = Tile {
                steps,
                a: a.numbers.as_ptr().cast(),
                a_stride: a.stride * 4,
                b: b.numbers[first..].as_ptr().cast(),
                b_stride: b.stride * 4,
                c: c[first..].as_mut_ptr(),
                c_stride,
                columns: (columns - first).min(PANEL),
                accumulate,
                fetch: if chunks == 0 { Fetch::Nothing } else { Fetch::Chunks(&raw const room[..chunks]) },
            };
            // SAFETY: in bounds by the assertions, and columns are whole vectors.
            unsafe { self.kernel.block(rows, &tile) };
        }
    }

    /// Products of the keys (or queries) of `count` tokens from token `first` of a chunk on with keys up to their own, as blocks of rows need them.
    fn products_with_keys(&self, rows: Matrix<'_>, first: usize, count: usize, key_columns: &[f32], out: &mut [f32]) {
        let end = first + count;
        for tokens in blocks(first, end) {
            let columns = tokens.end.next_multiple_of(LANES);
            let (row, shape) = (tokens.start - first, [tokens.len(), self.g.k_dim, columns]);
            self.multiply(shape, rows.at_row(row), square(key_columns), &mut out[row * CHUNK..], CHUNK);
        }
    }

    /// Corrected values of some tokens, and what was left of theirs (`work.rest`); if queries are there also their outputs (`work.out`). `coming` is what comes next in memory.
    fn advance(
        &self,
        t: &Tokens<'_>,
        shared: &Shared<'_>,
        carried: &mut Carried<'_>,
        work: &mut Work<'_>,
        coming: &mut [Pieces],
    ) {
        let (k_dim, width, n) = (self.g.k_dim, self.width, t.count);
        let end = t.first + n;
        for (i, beta) in work.beta[..n].iter_mut().enumerate() {
            let before = if t.first + i == 0 { 0.0 } else { carried.sums[t.first + i - 1] };
            carried.sums[t.first + i] = before + t.g.numbers[i * t.g.stride];
            *beta = t.beta.numbers[i * t.beta.stride];
        }
        let starts = &mut work.starts[..n];
        rows::exponentials(self.isa, &carried.sums[t.first..end], starts);
        let decays = &mut work.decays[..n * CHUNK];
        rows::decays(self.isa, t.first, carried.sums, decays);

        let state = Matrix::new(carried.state, width);
        match shared.q {
            _ if carried.is_blank => {
                work.rest[..n * width].fill(0.0);
                if shared.q.is_some() {
                    work.out[..n * width].fill(0.0);
                }
            }
            // What is read once should be read front to back.
            Some(q) if n == 1 => {
                let (rest, out) = (&mut work.rest[..width], &mut work.out[..width]);
                rest.fill(0.0);
                out.fill(0.0);
                rows::add_rows_twice(
                    self.isa,
                    [&shared.k.numbers[..k_dim], &q.numbers[..k_dim]],
                    state.numbers,
                    width,
                    [rest, out],
                );
            }
            Some(q) => {
                self.product([n, k_dim, width], [shared.k, state], (work.rest, width), false, coming);
                self.product([n, k_dim, width], [q, state], (work.out, width), false, coming);
            }
            None => self.multiply([n, k_dim, width], shared.k, state, work.rest, width),
        }
        rows::subtract_from(self.isa, t.v.numbers, t.v.stride, self.g.v_dim, starts, width, &mut work.rest[..n * width]);
        rows::weigh_before(self.isa, t.first, decays, shared.by_keys, &mut work.keys[..n * CHUNK]);
        if shared.q.is_some() {
            rows::scale_rows(self.isa, starts, width, &mut work.out[..n * width]);
            rows::weigh_up_to(self.isa, t.first, decays, shared.by_queries, &mut work.queries[..n * CHUNK]);
        }

        for tokens in blocks(t.first, end) {
            let start = tokens.start / BLOCK * BLOCK;
            let (row, count) = (tokens.start - t.first, tokens.len());
            let rest = &mut work.rest[row * width..][..count * width];
            let out = &mut work.out[row * width..][..count * width];
            let weights = row * CHUNK..(row + count) * CHUNK;
            let queries = if shared.q.is_some() { &work.queries[weights.clone()] } else { &[] };
            let keys = &work.keys[weights];
            if start > 0 && count == 1 && !queries.is_empty() {
                rows::add_rows_twice(self.isa, [&keys[..start], &queries[..start]], carried.values, width, [rest, out]);
            } else if start > 0 {
                let (shape, values) = ([count, start, width], Matrix::new(carried.values, width));
                self.multiply_add(shape, square(keys), values, rest, width);
                if !queries.is_empty() {
                    self.multiply_add(shape, square(queries), values, out, width);
                }
            }
            let block = Block { tokens, start, width, keys, queries, beta: &work.beta[row..row + count] };
            rows::substitute(self.isa, &block, rest, carried.values, out);
        }
    }

    /// Makes of the state at the start of a whole chunk that at its end.
    fn finish(&self, keys: &[f32], carried: &mut Carried<'_>, work: &mut Work<'_>) {
        // The decays from the last token are those to the end of the chunk.
        let decays = &mut work.decays[..CHUNK];
        rows::decays(self.isa, CHUNK - 1, carried.sums, decays);
        let mut decay = [0.0];
        rows::exponentials(self.isa, &carried.sums[CHUNK - 1..CHUNK], &mut decay);
        rows::scale_columns(self.isa, keys, decays, work.scaled);
        let (shape, width) = ([self.g.k_dim, CHUNK, self.width], self.width);
        let (keys, values) = (Matrix::new(work.scaled, CHUNK), Matrix::new(carried.values, width));
        if carried.is_blank {
            self.multiply(shape, keys, values, carried.state, width);
        } else {
            rows::scale(self.isa, decay[0], carried.state);
            self.multiply_add(shape, keys, values, carried.state, width);
        }
        carried.is_blank = false;
    }
}

/// Bytes that a thread takes for `heads` value heads of a key head, forward.
fn task_bytes(g: &DeltaGeometry, width: usize, heads: usize) -> usize {
    let carried = taken_bytes::<f32>(heads * SlotLayout::new(g).head_len());
    Work::bytes(g, width) + SharedWork::bytes(g) + 2 * taken_bytes::<f32>(CHUNK * g.k_dim) + carried
}

/// Bytes that the forward pass takes beside its inputs and outputs.
pub(crate) fn scratch_bytes(g: &DeltaGeometry, num_threads: usize) -> usize {
    num_threads * task_bytes(g, g.v_dim.next_multiple_of(LANES), g.v_heads / g.k_heads)
}

/// Writes keys of tokens `tokens` of a span to the current chunk of its slot.
fn write_keys(
    isa: Isa,
    inputs: &Inputs<'_>,
    g: &DeltaGeometry,
    span: &DeltaSpan,
    tokens: Range<usize>,
    k_head: usize,
    keys: &mut [f32],
) {
    let rows = Matrix::new(inputs.k, g.key_width()).at_row(span.tokens.start + tokens.start).at_column(k_head * g.k_dim);
    let first = (span.past + tokens.start) % CHUNK;
    transpose(isa, rows, [tokens.len(), g.k_dim], keys, first, CHUNK);
}

/// The rule over all sequences of a batch, into `out: [tokens, v_heads * v_dim]`. Sequences with a slot go on from what is there and leave it for their next token.
pub(crate) fn forward(
    pool: &Pool,
    arithmetic: Arithmetic,
    g: &DeltaGeometry,
    inputs: &Inputs<'_>,
    spans: &[DeltaSpan],
    states: Option<&mut RecurrentStates>,
    out: &mut [f32],
) {
    let rule = Rule::new(arithmetic, g);
    let layout = SlotLayout::new(g);
    let mut no_slots = [];
    let slots = SharedMut::new(states.map_or(&mut no_slots[..], RecurrentStates::numbers_mut));
    let (slot_len, width) = (layout.len(), rule.width);
    let part = |slot: u32, range: Range<usize>| {
        let first = slot as usize * slot_len;
        first + range.start..first + range.end
    };
    let out = SharedMut::new(out);

    // The keys of a chunk are read by all value heads of a key head: those of the first chunk are written before, those of the last after.
    let write_slots = |tokens_of: &(dyn Fn(&DeltaSpan) -> Range<usize> + Sync)| {
        let kept: Vec<(&DeltaSpan, u32)> =
            spans.iter().filter_map(|s| Some((s, s.slot?))).filter(|(s, _)| !tokens_of(s).is_empty()).collect();
        pool.run(kept.len() * g.k_heads, &|task| {
            let ((span, slot), k_head) = (kept[task / g.k_heads], task % g.k_heads);
            // SAFETY: a slot belongs to one sequence, and each task has one key head of it.
            let keys = unsafe { slots.part(part(slot, layout.keys(k_head))) };
            write_keys(rule.isa, inputs, g, span, tokens_of(span), k_head, keys);
        });
    };
    let first_chunk = |s: &DeltaSpan| 0..(CHUNK - s.past % CHUNK).min(s.tokens.len());
    write_slots(&first_chunk);
    // Value heads of a key head share its products, unless there are too few key heads for all threads.
    let group = g.v_heads / g.k_heads;
    let heads = if spans.len() * g.k_heads >= TASKS_PER_THREAD * pool.num_threads() { group } else { 1 };
    let tasks = g.v_heads / heads;
    pool.run(spans.len() * tasks, &|task| {
        let (span, first_head) = (&spans[task / tasks], task % tasks * heads);
        if span.tokens.is_empty() {
            return;
        }
        with_scratch(task_bytes(g, width, heads), |mut arena| {
            let mut work = Work::take(&mut arena, g, width);
            let shared_work = SharedWork::take(&mut arena, g);
            let (queries, keys) = (arena.take::<f32>(CHUNK * g.k_dim), arena.take::<f32>(CHUNK * g.k_dim));
            let of_heads = layout.heads(first_head..first_head + heads);
            let carried: &mut [f32] = match span.slot {
                // SAFETY: a slot belongs to one sequence, and each task has some value heads of it.
                Some(slot) => unsafe { slots.part(part(slot, of_heads)) },
                None => arena.take(of_heads.len()),
            };
            if span.past == 0 {
                carried.chunks_exact_mut(layout.head_len()).for_each(|head| layout.parts(head)[0].fill(0.0));
            }
            let k_head = first_head / group;
            let mut done = 0;
            while done < span.tokens.len() {
                let first = (span.past + done) % CHUNK;
                let count = (CHUNK - first).min(span.tokens.len() - done);
                let row = span.tokens.start + done;
                let tokens = row..row + count;
                let next = tokens.end..span.tokens.end.min(tokens.end + CHUNK);
                let head = |x| Matrix::new(x, g.key_width()).at_row(row).at_column(k_head * g.k_dim);
                // Rows of many heads are powers of two apart, which share few sets of a cache.
                widen(head(inputs.q), count, g.k_dim, g.k_dim, queries);
                widen(head(inputs.k), count, g.k_dim, g.k_dim, keys);
                let (q, k) = (Matrix::new(queries, g.k_dim), Matrix::new(keys, g.k_dim));
                let key_columns: &[f32] = match span.slot {
                    Some(slot) if done == 0 => {
                        let range = part(slot, layout.keys(k_head));
                        // SAFETY: in the slot by its layout; nobody writes keys while these tasks run.
                        unsafe { std::slice::from_raw_parts(slots.as_ptr().add(range.start), range.len()) }
                    }
                    _ => {
                        transpose(rule.isa, k, [count, g.k_dim], shared_work.key_columns, 0, CHUNK);
                        shared_work.key_columns
                    }
                };
                rule.products_with_keys(k, first, count, key_columns, shared_work.by_keys);
                rule.products_with_keys(q, first, count, key_columns, shared_work.by_queries);
                let (by_keys, by_queries) = (&*shared_work.by_keys, &*shared_work.by_queries);
                let shared = Shared { k, q: Some(q), key_columns, by_keys, by_queries };
                for (v_head, head) in (first_head..).zip(carried.chunks_exact_mut(layout.head_len())) {
                    let [state, values_of_chunk, sums] = layout.parts(head);
                    let is_blank = span.past + done < CHUNK;
                    let carried = &mut Carried { state, is_blank, values: values_of_chunk, sums };
                    let t = Tokens::of(inputs, g, row, v_head, first, count);
                    let columns = |v_head: usize| v_head * g.v_dim..(v_head + 1) * g.v_dim;
                    let values = |tokens: &Range<usize>, v_head: usize| {
                        rows_to_fetch(inputs.v.as_ptr(), g.value_width(), tokens, columns(v_head))
                    };
                    let outputs = rows_to_fetch(out.as_ptr(), g.value_width(), &tokens, columns(v_head));
                    let mut coming = if v_head + 1 < first_head + heads {
                        [outputs, values(&tokens, v_head + 1), Pieces::default(), Pieces::default()]
                    } else {
                        let columns = k_head * g.k_dim..(k_head + 1) * g.k_dim;
                        let keys = |x: &[f32]| rows_to_fetch(x.as_ptr(), g.key_width(), &next, columns.clone());
                        [outputs, values(&next, first_head), keys(inputs.q), keys(inputs.k)]
                    };
                    rule.advance(&t, &shared, carried, &mut work, &mut coming);
                    for (i, from) in work.out.chunks_exact(width).enumerate().take(count) {
                        let at = (row + i) * g.value_width() + v_head * g.v_dim;
                        // SAFETY: each task has some heads of its tokens.
                        unsafe { out.part(at..at + g.v_dim) }.copy_from_slice(&from[..g.v_dim]);
                    }
                    if first + count == CHUNK {
                        rule.finish(shared.key_columns, carried, &mut work);
                    }
                }
                done += count;
            }
        });
    });
    write_slots(&|s| {
        let (end, total) = (s.tokens.len(), s.past + s.tokens.len());
        end - (total % CHUNK).min(end - first_chunk(s).end)..end
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Numerics;
    use crate::testing::normal;

    #[test]
    fn what_is_fetched_of_a_head_is_where_its_numbers_are() {
        let (stride, x) = (48, normal(9 * 48, 1));
        for (rows, columns) in [(0..9, 0..48), (2..7, 16..32), (8..9, 40..48)] {
            let pieces = rows_to_fetch(x.as_ptr(), stride, &rows, columns.clone()).each();
            let there = rows.map(|row| x[row * stride..][columns.clone()].as_ptr_range());
            assert_eq!(pieces, there.map(|range| range.start.addr()..range.end.addr()).collect::<Vec<_>>());
        }
        assert!(rows_to_fetch(x.as_ptr(), stride, &(9..9), 0..48).each().is_empty(), "behind the last chunk there is nothing");
    }

    #[test]
    fn products_go_past_what_they_fetch_and_have_the_bits_of_those_that_fetch_nothing() {
        let g = DeltaGeometry { k_heads: 1, v_heads: 1, k_dim: 128, v_dim: 128, kernel: 4 };
        let (a, b) = (normal(CHUNK * 128, 1), normal(128 * 128, 2));
        for isa in Isa::available() {
            let rule = Rule::new(Arithmetic { isa, numerics: Numerics::Fast }, &g);
            let product = |coming: &mut [Pieces]| {
                let mut c = vec![9.0; CHUNK * 128];
                rule.product([CHUNK, 128, 128], [Matrix::new(&a, 128), Matrix::new(&b, 128)], (&mut c, 128), false, coming);
                c
            };
            // Two panels, with room for a chunk of tokens each: of three times as many rows a third is left.
            let mut coming =
                [rows_to_fetch(a.as_ptr(), 128, &(0..CHUNK), 0..128), rows_to_fetch(b.as_ptr(), 128, &(0..2 * CHUNK), 0..128)];
            assert_eq!(product(&mut coming), product(&mut []), "{isa}");
            assert_eq!(coming.map(|left| left.each().len()), [0, CHUNK], "{isa}");
        }
    }
}
