//! Gradients of the gated delta rule over whole sequences, by hand.
//!
//! A task has one key head of one sequence, and its value heads one after another, so that the gradients of queries and keys add up in one order. It first runs through the chunks to
//! find the state at the start of each, then goes back through them, computing once more what it needs of each. With `A_ij = -d_ij (k_i·k_j)` for `j < i`, `P_ij = d_ij (q_i·k_j)` for `j <= i`,
//! `r_i = u_i / beta_i` what is left of a value, and `dS` the gradient by the state at the end of a chunk:
//!
//! ```text
//! du_j = exp(G_last - G_j) k_j dS + Σ_{i>=j} P_ij do_i + Σ_{i>j} A_ij dr_i        dr_j = beta_j du_j        dbeta_j = du_j·r_j        dv_j = dr_j
//! dP_ij = do_i·u_j     dA_ij = dr_i·u_j     and through their weights to q, k and G
//! dq_i = exp(G_i) do_i Sᵀ + ...             dk_i = -exp(G_i) dr_i Sᵀ + exp(G_last - G_i) u_i dSᵀ + ...
//! dS'  = exp(G_last) dS + Σ_i exp(G_i) (q_iᵀ do_i - k_iᵀ dr_i)                    the gradient by the state at its start
//! ```

use super::*;
use crate::Result;
use crate::cpu::memory::Buffer;
use crate::cpu::rows::convert;
use crate::cpu::rows::delta_chunk::{BlockBackward, Weighted};

/// Bytes of states that are kept at a time, unless the heads of all threads take more.
const ROUND_BYTES: usize = 32 << 20;

/// Gradients by what the rule reads; see [`DeltaInputs`](crate::DeltaInputs).
pub(crate) struct Gradients<'a> {
    pub(crate) q: &'a mut [f32],
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    pub(crate) g: &'a mut [f32],
    pub(crate) beta: &'a mut [f32],
}

/// Where the way back through a chunk is computed.
struct Back<'a> {
    /// Queries, keys and gradients of outputs of a chunk in rows of whole vectors, `[CHUNK, k_width]` or `[CHUNK, width]`.
    q: &'a mut [f32],
    k: &'a mut [f32],
    dout: &'a mut [f32],
    /// What the value heads of the key head have in common.
    shared: SharedWork<'a>,
    /// Queries as columns, `[k_dim, CHUNK]`.
    columns: &'a mut [f32],
    /// `[CHUNK, width]`.
    dvalues: &'a mut [f32],
    drest: &'a mut [f32],
    /// `[CHUNK, CHUNK]`.
    dkeys: &'a mut [f32],
    dqueries: &'a mut [f32],
    square: &'a mut [f32],
    /// Corrected values as columns, `[width, CHUNK]`.
    value_columns: &'a mut [f32],
    /// A state, transposed: `[v_dim, k_width]`.
    turned: &'a mut [f32],
    /// `[CHUNK, k_width]`.
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    through_state: &'a mut [f32],
    /// The gradient by the state, and what it becomes, `[k_dim, width]`.
    dstate: &'a mut [f32],
    state: &'a mut [f32],
    values: &'a mut [f32],
    sums: &'a mut [f32],
    dsums: &'a mut [f32],
    /// Factors of rows.
    factors: &'a mut [f32],
}

impl<'a> Back<'a> {
    fn take(arena: &mut Arena<'a>, g: &DeltaGeometry) -> Self {
        let (width, k_width) = widths(g);
        Back {
            q: arena.take(CHUNK * k_width),
            k: arena.take(CHUNK * k_width),
            dout: arena.take(CHUNK * width),
            shared: SharedWork::take(arena, g),
            columns: arena.take(g.k_dim * CHUNK),
            dvalues: arena.take(CHUNK * width),
            drest: arena.take(CHUNK * width),
            dkeys: arena.take(CHUNK * CHUNK),
            dqueries: arena.take(CHUNK * CHUNK),
            square: arena.take(CHUNK * CHUNK),
            value_columns: arena.take(width * CHUNK),
            turned: arena.take(g.v_dim * k_width),
            dq: arena.take(CHUNK * k_width),
            dk: arena.take(CHUNK * k_width),
            through_state: arena.take(CHUNK * k_width),
            dstate: arena.take(g.k_dim * width),
            state: arena.take(g.k_dim * width),
            values: arena.take(CHUNK * width),
            sums: arena.take(CHUNK),
            dsums: arena.take(CHUNK),
            factors: arena.take(CHUNK),
        }
    }

    fn bytes(g: &DeltaGeometry) -> usize {
        let (width, k_width) = widths(g);
        5 * taken_bytes::<f32>(CHUNK * k_width)
            + 4 * taken_bytes::<f32>(CHUNK * width)
            + SharedWork::bytes(g)
            + taken_bytes::<f32>(g.k_dim * CHUNK)
            + 3 * taken_bytes::<f32>(CHUNK * CHUNK)
            + taken_bytes::<f32>(width * CHUNK)
            + taken_bytes::<f32>(g.v_dim * k_width)
            + 2 * taken_bytes::<f32>(g.k_dim * width)
            + 3 * taken_bytes::<f32>(CHUNK)
    }
}

/// Numbers of rows of values and of keys, whole vectors.
fn widths(g: &DeltaGeometry) -> (usize, usize) {
    (g.v_dim.next_multiple_of(LANES), g.k_dim.next_multiple_of(LANES))
}

/// Numbers of the states that a sequence of so many tokens goes through.
fn states_len(g: &DeltaGeometry, tokens: usize) -> usize {
    tokens.div_ceil(CHUNK) * g.k_dim * widths(g).0
}

/// Bytes that the way back takes beside its inputs and outputs, for sequences of at most `tokens` tokens.
pub(crate) fn scratch_bytes(g: &DeltaGeometry, tokens: usize, num_threads: usize) -> usize {
    let states = (num_threads * states_len(g, tokens) * size_of::<f32>()).max(ROUND_BYTES);
    states + num_threads * (Work::bytes(g, widths(g).0) + Back::bytes(g))
}

/// One head of a chunk on its way back, in rows of the batch.
struct Place {
    row: usize,
    count: usize,
    v_head: usize,
    /// Whether it is the sequence's first chunk, before which the state is nothing but zeros; and the last that there is a way back through, behind which nobody asks for the state.
    is_first: bool,
    is_last: bool,
}

/// Gradients from `dout: [tokens, v_heads * v_dim]`.
///
/// # Errors
/// If there is no memory to work in.
pub(crate) fn backward(
    pool: &Pool,
    arithmetic: Arithmetic,
    g: &DeltaGeometry,
    inputs: &Inputs<'_>,
    dout: &[f32],
    spans: &[DeltaSpan],
    gradients: Gradients<'_>,
) -> Result<()> {
    let rule = Rule::new(arithmetic, g);
    let (width, _) = widths(g);
    gradients.q.fill(0.0);
    gradients.k.fill(0.0);
    let out = Outputs {
        q: SharedMut::new(gradients.q),
        k: SharedMut::new(gradients.k),
        v: SharedMut::new(gradients.v),
        g: SharedMut::new(gradients.g),
        beta: SharedMut::new(gradients.beta),
    };
    let tasks: Vec<(&DeltaSpan, usize)> = spans.iter().flat_map(|s| (0..g.k_heads).map(move |h| (s, h))).collect();
    let len_of = |task: &(&DeltaSpan, usize)| states_len(g, task.0.tokens.len());
    let mut rest = &tasks[..];
    while !rest.is_empty() {
        // As many tasks at a time as there are threads, and more while their states are small.
        let (mut count, mut len) = (0, 0);
        while count < rest.len() && (count < pool.num_threads() || (len + len_of(&rest[count])) * 4 <= ROUND_BYTES) {
            len += len_of(&rest[count]);
            count += 1;
        }
        let (round, later) = rest.split_at(count);
        rest = later;
        let firsts: Vec<usize> = round.iter().scan(0, |end, task| Some(std::mem::replace(end, *end + len_of(task)))).collect();
        let mut buffer = Buffer::recycled(len * size_of::<f32>())?;
        let states = SharedMut::new(buffer.numbers_mut::<f32>(len));
        pool.run(count, &|i| {
            let (span, k_head) = round[i];
            // SAFETY: tasks have states of their own.
            let states = unsafe { states.part(firsts[i]..firsts[i] + len_of(&round[i])) };
            with_scratch(Work::bytes(g, width) + Back::bytes(g), |mut arena| {
                let mut work = Work::take(&mut arena, g, width);
                let mut back = Back::take(&mut arena, g);
                let group = g.v_heads / g.k_heads;
                for v_head in k_head * group..(k_head + 1) * group {
                    rule.head_backward(inputs, dout, span, v_head, states, &mut work, &mut back, &out);
                }
            });
        });
    }
    Ok(())
}

/// The gradients, of which each task writes its heads.
struct Outputs {
    q: SharedMut<f32>,
    k: SharedMut<f32>,
    v: SharedMut<f32>,
    g: SharedMut<f32>,
    beta: SharedMut<f32>,
}

impl Rule<'_> {
    #[allow(clippy::too_many_arguments)]
    fn head_backward(
        &self,
        inputs: &Inputs<'_>,
        dout: &[f32],
        span: &DeltaSpan,
        v_head: usize,
        states: &mut [f32],
        work: &mut Work<'_>,
        back: &mut Back<'_>,
        out: &Outputs,
    ) {
        let state_len = self.g.k_dim * self.width;
        // Behind the last token that has a gradient there is nothing to go back through.
        let chunks = self.tokens_with_gradient(dout, span, v_head).div_ceil(CHUNK);
        self.write_nothing(span.tokens.start + (chunks * CHUNK).min(span.tokens.len())..span.tokens.end, v_head, out);
        let tokens = |chunk: usize| {
            let row = span.tokens.start + chunk * CHUNK;
            let (is_first, is_last) = (chunk == 0, chunk + 1 == chunks);
            Place { row, count: (span.tokens.end - row).min(CHUNK), v_head, is_first, is_last }
        };
        back.state.fill(0.0);
        for (chunk, kept) in states.chunks_exact_mut(state_len).enumerate().take(chunks) {
            kept.copy_from_slice(back.state);
            let place = tokens(chunk);
            if !place.is_last {
                self.chunk_again(inputs, &place, work, back);
                let mut carried = Carried { state: back.state, is_blank: place.is_first, values: back.values, sums: back.sums };
                self.finish(back.shared.key_columns, &mut carried, work);
            }
        }
        back.dstate.fill(0.0);
        for (chunk, state) in states.chunks_exact(state_len).enumerate().take(chunks).rev() {
            back.state.copy_from_slice(state);
            let place = tokens(chunk);
            self.chunk_again(inputs, &place, work, back);
            self.chunk_backward(inputs, dout, &place, work, back);
            self.write(&place, work, back, out);
        }
    }

    /// Tokens of a sequence up to the last whose output has a gradient other than zero.
    fn tokens_with_gradient(&self, dout: &[f32], span: &DeltaSpan, v_head: usize) -> usize {
        let (width, v_dim) = (self.g.value_width(), self.g.v_dim);
        let is_zero = |row: usize| convert::is_zero(self.isa, &dout[row * width + v_head * v_dim..][..v_dim]);
        span.tokens.clone().rev().find(|&row| !is_zero(row)).map_or(0, |row| row + 1 - span.tokens.start)
    }

    /// The gradients of a head of tokens that have none.
    fn write_nothing(&self, rows: Range<usize>, v_head: usize, out: &Outputs) {
        let g = self.g;
        for row in rows {
            let (value, gate) = (row * g.value_width() + v_head * g.v_dim, row * g.v_heads + v_head);
            // SAFETY: each task has the heads of one key head of its tokens.
            unsafe {
                out.v.part(value..value + g.v_dim).fill(0.0);
                out.beta.part(gate..gate + 1)[0] = 0.0;
                out.g.part(gate..gate + 1)[0] = 0.0;
            }
        }
    }

    /// Corrected values of a chunk from the state at its start, and what they were made of.
    fn chunk_again(&self, inputs: &Inputs<'_>, place: &Place, work: &mut Work<'_>, back: &mut Back<'_>) {
        let (g, n) = (self.g, place.count);
        let k = Matrix::new(inputs.k, g.key_width()).at_row(place.row).at_column(k_head_of(g, place.v_head) * g.k_dim);
        let t = Tokens::of(inputs, g, place.row, place.v_head, 0, n);
        let SharedWork { key_columns, by_keys, by_queries } = &mut back.shared;
        transpose(self.isa, k, [n, g.k_dim], key_columns, 0, CHUNK);
        self.products_with_keys(k, 0, n, key_columns, by_keys);
        let shared = Shared { k, q: None, key_columns, by_keys, by_queries };
        let mut carried = Carried { state: back.state, is_blank: place.is_first, values: back.values, sums: back.sums };
        self.advance(&t, &shared, &mut carried, work, &mut []);
    }

    /// `c += a·b` for `a: [n, CHUNK]` whose rows are zero from the end of their block on.
    fn multiply_add_lower(&self, n: usize, a: &[f32], b: Matrix<'_>, c: &mut [f32], width: usize) {
        for tokens in blocks(0, n) {
            let shape = [tokens.len(), tokens.end, width];
            self.multiply_add(shape, square(a).at_row(tokens.start), b, &mut c[tokens.start * width..], width);
        }
    }

    /// `c += a·b` for `a: [n, CHUNK]` whose rows are zero up to the start of their block.
    fn multiply_add_upper(&self, n: usize, a: &[f32], b: Matrix<'_>, c: &mut [f32], width: usize) {
        for tokens in blocks(0, n) {
            let (first, shape) = (tokens.start, [tokens.len(), n - tokens.start, width]);
            self.multiply_add(shape, square(a).at_row(first).at_column(first), b.at_row(first), &mut c[first * width..], width);
        }
    }

    /// The way back through a chunk; leaves `dq`, `dk`, `drest` and `dsums` of it, `dvalues`, and `dstate` of the chunk before.
    fn chunk_backward(&self, inputs: &Inputs<'_>, dout: &[f32], place: &Place, work: &mut Work<'_>, back: &mut Back<'_>) {
        let (isa, g) = (self.isa, self.g);
        let ((width, k_width), n) = (widths(g), place.count);
        let (k_dim, v_dim) = (g.k_dim, g.v_dim);
        let key = place.row * g.key_width() + k_head_of(g, place.v_head) * k_dim;
        widen(Matrix::new(&inputs.q[key..], g.key_width()), n, k_dim, k_width, back.q);
        widen(Matrix::new(&inputs.k[key..], g.key_width()), n, k_dim, k_width, back.k);
        let value = place.row * g.value_width() + place.v_head * v_dim;
        widen(Matrix::new(&dout[value..], g.value_width()), n, v_dim, width, back.dout);
        let (q, k, dout) = (Matrix::new(back.q, k_width), Matrix::new(back.k, k_width), Matrix::new(back.dout, width));

        // Weights of outputs, and the decays to the last token.
        self.products_with_keys(q, 0, n, back.shared.key_columns, back.shared.by_queries);
        rows::weigh_up_to(isa, 0, &work.decays[..n * CHUNK], back.shared.by_queries, &mut work.queries[..n * CHUNK]);
        back.factors[..n].copy_from_slice(&work.decays[(n - 1) * CHUNK..][..n]);
        let (to_end, starts) = (&back.factors[..n], &work.starts[..n]);
        let end_decay = starts[n - 1];

        // By corrected values.
        if place.is_last {
            back.dvalues[..n * width].fill(0.0);
        } else {
            self.multiply([n, k_dim, width], k, Matrix::new(back.dstate, width), back.dvalues, width);
            rows::scale_rows(isa, to_end, width, &mut back.dvalues[..n * width]);
        }
        transpose(isa, square(work.queries), [n, n], back.square, 0, CHUNK);
        self.multiply_add_upper(n, back.square, dout, back.dvalues, width);
        transpose(isa, square(work.keys), [n, n], back.square, 0, CHUNK);
        for start in (0..n).step_by(BLOCK).rev() {
            let tokens = start..(start + BLOCK).min(n);
            if tokens.end < n {
                let later = Matrix::new(&back.square[start * CHUNK + tokens.end..], CHUNK);
                let drest = Matrix::new(back.drest, width).at_row(tokens.end);
                let shape = [tokens.len(), n - tokens.end, width];
                self.multiply_add(shape, later, drest, &mut back.dvalues[start * width..], width);
            }
            let block = BlockBackward { tokens, width, keys: back.square, beta: work.beta };
            rows::substitute_backward(isa, &block, back.dvalues, back.drest);
        }

        // By the weights, and through them by the sums of decays and by products of keys and queries.
        transpose(isa, Matrix::new(back.values, width), [n, width], back.value_columns, 0, CHUNK);
        for tokens in blocks(0, n) {
            let shape = [tokens.len(), v_dim, tokens.end.next_multiple_of(LANES)];
            let (columns, at) = (square(back.value_columns), tokens.start * CHUNK);
            self.multiply(shape, dout.at_row(tokens.start), columns, &mut back.dqueries[at..], CHUNK);
            let drest = Matrix::new(back.drest, width).at_row(tokens.start);
            self.multiply(shape, drest, columns, &mut back.dkeys[at..], CHUNK);
        }
        back.dsums.fill(0.0);
        let weighted = Weighted { rows: n, decays: work.decays, keys: work.keys, queries: work.queries };
        rows::weighted_backward(isa, &weighted, back.dkeys, back.dqueries, back.dsums);

        // Through the state at the start of the chunk.
        let negative: [f32; CHUNK] = std::array::from_fn(|i| if i < n { -starts[i] } else { 0.0 });
        if place.is_first {
            back.dq[..n * k_width].fill(0.0);
            back.dk[..n * k_width].fill(0.0);
        } else {
            transpose(isa, Matrix::new(back.state, width), [k_dim, v_dim], back.turned, 0, k_width);
            if k_width > k_dim {
                back.turned.chunks_exact_mut(k_width).for_each(|row| row[k_dim..].fill(0.0));
            }
            let turned = Matrix::new(back.turned, k_width);
            self.multiply([n, v_dim, k_width], dout, turned, back.dq, k_width);
            rows::add_dots(isa, starts, back.q, k_width, back.dq, k_width, k_dim, &mut back.dsums[..n]);
            rows::scale_rows(isa, starts, k_width, &mut back.dq[..n * k_width]);
            self.multiply([n, v_dim, k_width], Matrix::new(back.drest, width), turned, back.dk, k_width);
            rows::add_dots(isa, &negative[..n], back.k, k_width, back.dk, k_width, k_dim, &mut back.dsums[..n]);
            rows::scale_rows(isa, &negative[..n], k_width, &mut back.dk[..n * k_width]);
        }

        // Through the products of keys and queries.
        self.multiply_add_lower(n, back.dqueries, k, back.dq, k_width);
        self.multiply_add_lower(n, back.dkeys, k, back.dk, k_width);
        transpose(isa, square(back.dqueries), [n, n], back.square, 0, CHUNK);
        self.multiply_add_upper(n, back.square, q, back.dk, k_width);
        transpose(isa, square(back.dkeys), [n, n], back.square, 0, CHUNK);
        self.multiply_add_upper(n, back.square, k, back.dk, k_width);

        // Through the state at the end of the chunk.
        if !place.is_last {
            transpose(isa, Matrix::new(back.dstate, width), [k_dim, v_dim], back.turned, 0, k_width);
            if k_width > k_dim {
                back.turned.chunks_exact_mut(k_width).for_each(|row| row[k_dim..].fill(0.0));
            }
            let turned = Matrix::new(back.turned, k_width);
            self.multiply([n, v_dim, k_width], Matrix::new(back.values, width), turned, back.through_state, k_width);
            let mut said = [0.0; CHUNK];
            rows::add_dots(isa, to_end, back.k, k_width, back.through_state, k_width, k_dim, &mut said[..n]);
            rows::add_scaled_rows(isa, to_end, &back.through_state[..n * k_width], k_width, &mut back.dk[..n * k_width]);
            let kept = end_decay * rows::product_sum(isa, back.state, back.dstate);
            for (dsum, said) in back.dsums.iter_mut().zip(&said[..n]) {
                *dsum -= said;
            }
            back.dsums[n - 1] += said[..n].iter().sum::<f32>() + kept;
        }

        // By the state at the start of the chunk.
        if !place.is_first {
            rows::scale(isa, end_decay, back.dstate);
            transpose(isa, q, [n, k_dim], back.columns, 0, CHUNK);
            rows::scale_columns(isa, back.columns, starts, work.scaled);
            self.multiply_add([k_dim, n, width], square(work.scaled), dout, back.dstate, width);
            rows::scale_columns(isa, back.shared.key_columns, &negative[..n], work.scaled);
            self.multiply_add([k_dim, n, width], square(work.scaled), Matrix::new(back.drest, width), back.dstate, width);
        }
    }

    /// Adds the gradients of a chunk to those of its head.
    fn write(&self, place: &Place, work: &Work<'_>, back: &mut Back<'_>, out: &Outputs) {
        let g = self.g;
        let ((width, k_width), n) = (widths(g), place.count);
        let mut dbeta = [0.0; CHUNK];
        rows::add_dots(self.isa, &[1.0; CHUNK][..n], back.dvalues, width, work.rest, width, g.v_dim, &mut dbeta[..n]);
        // A sum of decays holds all logarithms up to its own.
        let mut dg = 0.0;
        for i in (0..n).rev() {
            let row = place.row + i;
            dg += back.dsums[i];
            let key = row * g.key_width() + k_head_of(g, place.v_head) * g.k_dim;
            let value = row * g.value_width() + place.v_head * g.v_dim;
            let gate = row * g.v_heads + place.v_head;
            // SAFETY: each task has the heads of one key head of its tokens.
            unsafe {
                let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                add(out.q.part(key..key + g.k_dim), &back.dq[i * k_width..][..g.k_dim]);
                add(out.k.part(key..key + g.k_dim), &back.dk[i * k_width..][..g.k_dim]);
                out.v.part(value..value + g.v_dim).copy_from_slice(&back.drest[i * width..][..g.v_dim]);
                out.beta.part(gate..gate + 1)[0] = dbeta[i];
                out.g.part(gate..gate + 1)[0] = dg;
            }
        }
    }
}
