//! Matrix products of the CPU backend: three shapes of them, one tile kernel (`tile`), one order of reduction.
//!
//! - [`Matmul::forward`]: `y = x·Wᵀ` on packed weights, streamed once; the same code for one token as for a thousand.
//! - [`Matmul::backward_input`]: `dx = dy·W` on the same packed weights, transposed block by block in cache (`transpose`).
//! - [`Matmul::backward_weight`]: `dW += dyᵀ·x` for low-rank weights, reduced over tokens in order, sequence after sequence.
//!
//! Work is split over threads by outputs: panels of 64 columns, and runs of rows where there are few panels.

mod tile;
mod transpose;

use std::cell::RefCell;
use std::ops::Range;

pub(crate) use tile::{Tile, TileKernel};

use super::backend::Target;
use super::isa::{Fma, Isa, multiversion, prefetch};
use super::packed::{LANES, PANEL, PackedRef};
use super::threads::{Pool, SharedMut};
use crate::{DType, Element};

/// Steps of the reduction (four bytes each) in a block: 64 KiB of a full panel, which stays in the second-level cache while all rows pass.
const BLOCK_STEPS: usize = 256;
/// Fewer rows than this are not worth splitting over threads.
const SPLIT_ROWS_MIN: usize = 24;
/// How many steps ahead rows are fetched that a weight gradient gathers from far apart.
const PACK_AHEAD: usize = 8;

/// A block of a row-major matrix of `dtype`, to be read.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    rows: usize,
    width: usize,
    /// Bytes from one row to the next.
    stride: usize,
    dtype: DType,
}

impl<'a> Rows<'a> {
    /// Rows `rows` and columns `columns` of a matrix with `matrix_columns` columns.
    pub(crate) fn new<T: Element>(matrix: &'a [T], matrix_columns: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        let size = size_of::<T>();
        // SAFETY: plain numbers are readable as bytes.
        let bytes = unsafe { std::slice::from_raw_parts(matrix.as_ptr().cast::<u8>(), std::mem::size_of_val(matrix)) };
        assert!(columns.end <= matrix_columns && rows.end * matrix_columns <= matrix.len());
        let start = (rows.start * matrix_columns + columns.start) * size;
        let bytes = if rows.is_empty() { &[] } else { &bytes[start..((rows.end - 1) * matrix_columns + columns.end) * size] };
        Rows { bytes, rows: rows.len(), width: columns.len(), stride: matrix_columns * size, dtype: T::DTYPE }
    }

    fn row<T: Element>(&self, row: usize) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        let bytes = &self.bytes[row * self.stride..][..self.width * size_of::<T>()];
        // SAFETY: made of whole, aligned elements of `T` in `new`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.width) }
    }

    /// The rows, each followed by a zero where the width is not a whole number of steps.
    fn whole_steps(self, padded: &'a mut Vec<u8>) -> Rows<'a> {
        let size = self.width * self.dtype.size_bytes();
        if size.is_multiple_of(4) {
            return self;
        }
        padded.clear();
        for row in 0..self.rows {
            padded.extend_from_slice(&self.bytes[row * self.stride..][..size]);
            padded.resize(padded.len().next_multiple_of(4), 0);
        }
        Rows { bytes: padded, width: self.width + 1, stride: size.next_multiple_of(4), ..self }
    }
}

/// A block of a row-major f32 matrix, to be written.
pub(crate) struct Out {
    values: SharedMut<f32>,
    start: usize,
    stride: usize,
    rows: usize,
    columns: usize,
    accumulate: bool,
}

impl Out {
    /// `rows` by `columns` from `(first_row, first_column)` on of a matrix with `matrix_columns` columns.
    pub(crate) fn new(matrix: &mut [f32], matrix_columns: usize, target: &Target, rows: usize, columns: usize) -> Self {
        assert!(target.first_column + columns <= matrix_columns && (target.first_row + rows) * matrix_columns <= matrix.len());
        let start = target.first_row * matrix_columns + target.first_column;
        Out { values: SharedMut::new(matrix), start, stride: matrix_columns, rows, columns, accumulate: target.accumulate }
    }

    /// Element `(row, column)`.
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        debug_assert!(row < self.rows && column < self.columns);
        self.values.as_ptr().wrapping_add(self.start + row * self.stride + column)
    }
}

/// Steps of a reduction over `len` elements.
fn steps(len: usize, dtype: DType) -> usize {
    (len * dtype.size_bytes()).div_ceil(4)
}

/// Columns `64 * panel ..` of a matrix of `columns`.
fn panel_columns(panel: usize, columns: usize) -> usize {
    (columns - panel * PANEL).min(PANEL)
}

thread_local! {
    /// Room for a block of a panel.
    static SCRATCH: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` with this thread's scratch block of at least `len` words, contents unspecified.
fn with_scratch<R>(len: usize, body: impl FnOnce(&mut [u32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len + LANES {
            scratch.resize(len + LANES, 0);
        }
        let offset = scratch.as_ptr().align_offset(64);
        body(&mut scratch[offset..offset + len])
    })
}

/// The matrix products of one instruction set on one pool of threads.
pub(crate) struct Matmul<'a> {
    pool: &'a Pool,
    isa: Isa,
    kernel: TileKernel,
    dtype: DType,
}

impl<'a> Matmul<'a> {
    pub(crate) fn new(pool: &'a Pool, isa: Isa, dtype: DType) -> Self {
        Matmul { pool, isa, kernel: TileKernel::new(isa, dtype), dtype }
    }

    /// `y = x·Wᵀ`.
    pub(crate) fn forward(&self, x: Rows<'_>, w: PackedRef<'_>, y: Out) {
        assert!(x.width == w.in_features && x.dtype == self.dtype && w.dtype == self.dtype);
        assert!(y.rows == x.rows && y.columns == w.out_features);
        let (rows, columns) = (x.rows, w.out_features);
        let mut padded = Vec::new();
        let x = x.whole_steps(&mut padded);
        let num_steps = steps(w.in_features, self.dtype);
        self.over_panels(rows, columns, |panel, row_range| {
            let width = panel_columns(panel, columns);
            let b_stride = width.next_multiple_of(LANES) * 4;
            let b = &w.bytes[panel * PANEL * num_steps * 4..];
            for first in (0..num_steps).step_by(BLOCK_STEPS) {
                let count = BLOCK_STEPS.min(num_steps - first);
                assert!(b.len() >= (first + count) * b_stride);
                // SAFETY: rows and columns are in bounds by the assertions; tasks own disjoint parts of y.
                unsafe {
                    let tile = Tile {
                        steps: count,
                        a: x.bytes.as_ptr().add(row_range.start * x.stride + first * 4),
                        a_stride: x.stride,
                        b: b.as_ptr().add(first * b_stride),
                        b_stride,
                        c: y.at(row_range.start, panel * PANEL),
                        c_stride: y.stride,
                        columns: width,
                        accumulate: y.accumulate || first > 0,
                    };
                    self.kernel.block(row_range.len(), &tile);
                }
            }
        });
    }

    /// `dx = dy·W`.
    pub(crate) fn backward_input(&self, dy: Rows<'_>, w: PackedRef<'_>, dx: Out) {
        assert!(dy.width == w.out_features && dy.dtype == self.dtype && w.dtype == self.dtype);
        assert!(dx.rows == dy.rows && dx.columns == w.in_features);
        let (rows, columns) = (dy.rows, w.in_features);
        let mut padded = Vec::new();
        let dy = dy.whole_steps(&mut padded);
        let num_steps = steps(w.out_features, self.dtype);
        self.over_panels(rows, columns, |panel, row_range| {
            let width = panel_columns(panel, columns);
            let padded_width = width.next_multiple_of(LANES);
            with_scratch(BLOCK_STEPS * padded_width, |scratch| {
                for first in (0..num_steps).step_by(BLOCK_STEPS) {
                    let count = BLOCK_STEPS.min(num_steps - first);
                    transpose::block(self.isa, w, panel * PANEL..panel * PANEL + width, first..first + count, scratch);
                    // SAFETY: as in `forward`; the scratch block holds `count` steps.
                    unsafe {
                        let tile = Tile {
                            steps: count,
                            a: dy.bytes.as_ptr().add(row_range.start * dy.stride + first * 4),
                            a_stride: dy.stride,
                            b: scratch.as_ptr().cast(),
                            b_stride: padded_width * 4,
                            c: dx.at(row_range.start, panel * PANEL),
                            c_stride: dx.stride,
                            columns: width,
                            accumulate: dx.accumulate || first > 0,
                        };
                        self.kernel.block(row_range.len(), &tile);
                    }
                }
            });
        });
    }

    /// `dw: [rank, width]` += `low: [tokens, rank]`ᵀ · `x: [tokens, width]`, one sequence of tokens after another.
    ///
    /// In bf16 two tokens make a step, and a sequence of odd length ends with half a step: no step spans two sequences, so the
    /// sum over several sequences has the same bits as adding them one call at a time.
    pub(crate) fn backward_weight<T: Element>(&self, low: Rows<'_>, x: Rows<'_>, sequences: &[Range<usize>], dw: Out) {
        let (rank, width) = (low.width, x.width);
        assert!(low.rows == x.rows && dw.rows == rank && dw.columns == width && dw.accumulate && T::DTYPE == self.dtype);
        let per_step = 4 / self.dtype.size_bytes();
        // Tokens of each step, in order: one, or two unless the sequence ends.
        let step_tokens: Vec<(usize, Option<usize>)> = sequences
            .iter()
            .flat_map(|s| s.clone().step_by(per_step).map(move |t| (t, (per_step == 2 && t + 1 < s.end).then_some(t + 1))))
            .collect();
        let num_steps = step_tokens.len();
        let mut low_steps = vec![0u32; rank * num_steps];
        for (s, &(first, second)) in step_tokens.iter().enumerate() {
            let (first, second) = (low.row::<T>(first), second.map(|t| low.row::<T>(t)));
            for r in 0..rank {
                low_steps[r * num_steps + s] = step_word(first[r], second.map(|row| row[r]));
            }
        }
        self.over_panels(rank, width, |panel, row_range| {
            let columns = panel_columns(panel, width);
            let padded = columns.next_multiple_of(LANES);
            let range = panel * PANEL..panel * PANEL + columns;
            with_scratch(BLOCK_STEPS * padded, |scratch| {
                for first in (0..num_steps).step_by(BLOCK_STEPS) {
                    let count = BLOCK_STEPS.min(num_steps - first);
                    for (i, out) in scratch.chunks_exact_mut(padded).take(count).enumerate() {
                        let (t, u) = step_tokens[first + i];
                        let row = |t: usize| &x.row::<T>(t)[range.clone()];
                        if let Some(&(ahead, _)) = step_tokens.get(first + i + PACK_AHEAD) {
                            (ahead..(ahead + per_step).min(x.rows)).for_each(|t| prefetch(row(t)));
                        }
                        pack_step(self.isa, row(t), u.map(row), &mut out[..columns]);
                    }
                    // SAFETY: as in `forward`; lanes of the scratch block past `columns` are computed but not stored.
                    unsafe {
                        let tile = Tile {
                            steps: count,
                            a: low_steps.as_ptr().add(row_range.start * num_steps + first).cast(),
                            a_stride: num_steps * 4,
                            b: scratch.as_ptr().cast(),
                            b_stride: padded * 4,
                            c: dw.at(row_range.start, panel * PANEL),
                            c_stride: dw.stride,
                            columns,
                            accumulate: true,
                        };
                        self.kernel.block(row_range.len(), &tile);
                    }
                }
            });
        });
    }

    /// Runs `body(panel, rows)` over all panels of `columns`, and runs of rows if there are too few panels to share.
    fn over_panels(&self, rows: usize, columns: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        if rows == 0 {
            return;
        }
        let panels = columns.div_ceil(PANEL);
        let threads = self.pool.num_threads();
        let wanted = if panels >= 4 * threads { 1 } else { (4 * threads).div_ceil(panels) };
        let runs = wanted.min(rows.div_ceil(SPLIT_ROWS_MIN)).max(1);
        let run_rows = rows.div_ceil(runs);
        self.pool.run(panels * runs, &|task| {
            let (panel, run) = (task / runs, task % runs);
            let range = (run * run_rows).min(rows)..((run + 1) * run_rows).min(rows);
            if !range.is_empty() {
                body(panel, range);
            }
        });
    }
}

/// One step of the reduction: an f32, or a pair of bf16 whose second may be missing.
#[inline(always)]
fn step_word<T: Element>(first: T, second: Option<T>) -> u32 {
    match T::DTYPE {
        DType::F32 => first.to_f32().to_bits(),
        // Widening and cutting again is exact.
        DType::BF16 => first.to_f32().to_bits() >> 16 | second.map_or(0, |s| s.to_f32().to_bits()),
    }
}

multiversion! {
    /// Interleaves one or two rows into a row of steps; with f32 the second is ignored.
    pub(crate) fn pack_step<T: Element>(first: &[T], second: Option<&[T]>, out: &mut [u32]) = pack_step_body;
}

#[inline(always)]
fn pack_step_body<T: Element>(_fma: impl Fma, first: &[T], second: Option<&[T]>, out: &mut [u32]) {
    let Some(second) = second else {
        return out.iter_mut().zip(first).for_each(|(o, &a)| *o = step_word(a, None));
    };
    // Whole vectors, so that all loads of a row are under way at once: rows lie far apart, and waiting for them is what takes the time.
    let (vectors, rest) = out.as_chunks_mut::<LANES>();
    let (first_vectors, first_rest) = first.as_chunks::<LANES>();
    let (second_vectors, second_rest) = second.as_chunks::<LANES>();
    for (out, (first, second)) in vectors.iter_mut().zip(first_vectors.iter().zip(second_vectors)) {
        *out = std::array::from_fn(|i| step_word(first[i], Some(second[i])));
    }
    rest.iter_mut().zip(first_rest.iter().zip(second_rest)).for_each(|(o, (&a, &b))| *o = step_word(a, Some(b)));
}

/// Writes `rows: [n, in_features]` as outputs `first_output..` of packed weights.
pub(crate) fn pack_rows<T: Element>(pool: &Pool, rows: &[T], first_output: usize, w: &mut super::packed::PackedMut<'_>) {
    let k = w.in_features;
    let num_steps = steps(k, w.dtype);
    let (n, out_features) = (rows.len() / k, w.out_features);
    let per_step = 4 / w.dtype.size_bytes();
    // SAFETY: buffers are aligned to pages and panels to whole steps; every 4 bytes are a word.
    let words =
        SharedMut::new(unsafe { std::slice::from_raw_parts_mut(w.bytes.as_mut_ptr().cast::<u32>(), w.bytes.len() / 4) });
    let panels = first_output / PANEL..(first_output + n).div_ceil(PANEL);
    pool.run(panels.len(), &|task| {
        let panel = panels.start + task;
        let width = panel_columns(panel, out_features).next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        // SAFETY: each task has a panel to itself.
        let panel_words = unsafe { words.part(start..start + num_steps * width) };
        let outputs = (panel * PANEL).max(first_output)..(panel * PANEL + PANEL).min(first_output + n);
        // Sixteen outputs at a time fill whole cache lines of the panel.
        for group in outputs.clone().step_by(LANES) {
            let group = group..(group + LANES).min(outputs.end);
            for s in 0..num_steps {
                let line = &mut panel_words[s * width..(s + 1) * width];
                for output in group.clone() {
                    let row = &rows[(output - first_output) * k..][..k];
                    line[output - panel * PANEL] = step_word(row[s * per_step], row.get(s * per_step + 1).copied());
                }
            }
        }
    });
}

/// Writes `columns: [in_features, out_features]` as packed weights.
pub(crate) fn pack_columns<T: Element>(pool: &Pool, isa: Isa, columns: &[T], w: &mut super::packed::PackedMut<'_>) {
    let (k, n) = (w.in_features, w.out_features);
    let num_steps = steps(k, w.dtype);
    let per_step = 4 / w.dtype.size_bytes();
    // SAFETY: as in `pack_rows`.
    let words =
        SharedMut::new(unsafe { std::slice::from_raw_parts_mut(w.bytes.as_mut_ptr().cast::<u32>(), w.bytes.len() / 4) });
    pool.run(n.div_ceil(PANEL), &|panel| {
        let columns_here = panel_columns(panel, n);
        let width = columns_here.next_multiple_of(LANES);
        let start = panel * PANEL * num_steps;
        // SAFETY: each task has a panel to itself.
        let panel_words = unsafe { words.part(start..start + num_steps * width) };
        for (s, line) in panel_words.chunks_exact_mut(width).enumerate() {
            let row = |i: usize| &columns[i * n + panel * PANEL..][..columns_here];
            let first = s * per_step;
            pack_step(isa, row(first), (per_step == 2 && first + 1 < k).then(|| row(first + 1)), &mut line[..columns_here]);
        }
    });
}

/// Reads row `output` (one token's embedding, where embedding and unembedding are one matrix) back out of packed weights.
pub(crate) fn unpack_row<T: Element>(w: PackedRef<'_>, output: usize, out: &mut [f32]) {
    let num_steps = steps(w.in_features, w.dtype);
    let panel = output / PANEL;
    let width = panel_columns(panel, w.out_features).next_multiple_of(LANES);
    let start = (panel * PANEL * num_steps + output % PANEL) * 4;
    for (s, values) in out.chunks_mut(4 / T::DTYPE.size_bytes()).enumerate() {
        let at = start + s * width * 4;
        let word = u32::from_le_bytes(w.bytes[at..at + 4].try_into().expect("a word is four bytes"));
        match T::DTYPE {
            DType::F32 => values[0] = f32::from_bits(word),
            DType::BF16 => {
                values[0] = f32::from_bits(word << 16);
                if let Some(second) = values.get_mut(1) {
                    *second = f32::from_bits(word & 0xffff_0000);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::packed::PackedStack;
    use crate::random;

    fn values<T: Element>(seed: u64, n: usize) -> Vec<T> {
        (0..n).map(|i| T::from_f32(random::normal([seed, 0], i as u64))).collect()
    }

    fn packed<T: Element>(pool: &Pool, w: &[T], k: usize, n: usize) -> PackedStack {
        let mut stack = PackedStack::zeros(1, k, n, T::DTYPE).unwrap();
        pack_rows(pool, w, 0, &mut stack.layer_mut(0));
        stack
    }

    fn all<T: Element>(matrix: &[T], columns: usize) -> Rows<'_> {
        Rows::new(matrix, columns, 0..matrix.len() / columns, 0..columns)
    }

    fn into(matrix: &mut [f32], columns: usize, accumulate: bool) -> Out {
        let rows = matrix.len() / columns;
        Out::new(matrix, columns, &Target { accumulate, ..Target::overwrite() }, rows, columns)
    }

    fn close(actual: &[f32], expected: &[f64], what: &str) {
        for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
            assert!((a as f64 - e).abs() <= 1e-4 * (1.0 + e.abs()), "{what}: element {i} is {a}, not {e}");
        }
    }

    /// The three products against f64 sums, on every instruction set, in shapes that leave remainders everywhere.
    fn all_products_match_plain_sums<T: Element>() {
        for isa in Isa::available() {
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                for (m, k, n) in
                    [(1, 1, 1), (1, 60, 100), (5, 64, 64), (7, 33, 65), (13, 700, 130), (50, 96, 16), (33, 17, 263)]
                {
                    let what = format!("{isa} {} m={m} k={k} n={n}", T::DTYPE);
                    let (x, w, dy): (Vec<T>, Vec<T>, Vec<T>) = (values(1, m * k), values(2, n * k), values(3, m * n));
                    let stack = packed(&pool, &w, k, n);
                    let matmul = Matmul::new(&pool, isa, T::DTYPE);
                    let get = |v: &[T], i: usize| v[i].to_f32() as f64;

                    let mut y = vec![1.0; m * n];
                    matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, true));
                    let expected: Vec<f64> = (0..m * n)
                        .map(|i| 1.0 + (0..k).map(|j| get(&x, i / n * k + j) * get(&w, i % n * k + j)).sum::<f64>())
                        .collect();
                    close(&y, &expected, &what);

                    let mut dx = vec![0.5; m * k];
                    matmul.backward_input(all(&dy, n), stack.layer(0), into(&mut dx, k, true));
                    let expected: Vec<f64> = (0..m * k)
                        .map(|i| 0.5 + (0..n).map(|j| get(&dy, i / k * n + j) * get(&w, j * k + i % k)).sum::<f64>())
                        .collect();
                    close(&dx, &expected, &what);

                    let mut dw = vec![0.25; n * k];
                    let cut = m / 2;
                    matmul.backward_weight::<T>(all(&dy, n), all(&x, k), &[0..cut, cut..m], into(&mut dw, k, true));
                    let expected: Vec<f64> = (0..n * k)
                        .map(|i| 0.25 + (0..m).map(|t| get(&dy, t * n + i / k) * get(&x, t * k + i % k)).sum::<f64>())
                        .collect();
                    close(&dw, &expected, &what);
                }
            }
        }
    }

    #[test]
    fn f32_products_match_plain_sums() {
        all_products_match_plain_sums::<f32>();
    }

    #[test]
    fn bf16_products_match_plain_sums() {
        all_products_match_plain_sums::<bf16>();
    }

    #[test]
    fn a_product_reads_and_writes_blocks_of_larger_matrices() {
        let pool = Pool::new(2);
        let w: Vec<bf16> = values(2, 10 * 6);
        let stack = packed(&pool, &w, 6, 10);
        let x: Vec<bf16> = values(1, 4 * 9);
        let block: Vec<bf16> = (1..3).flat_map(|r| x[r * 9 + 3..r * 9 + 9].to_vec()).collect();
        let matmul = Matmul::new(&pool, Isa::detect(), DType::BF16);
        let (mut expected, mut y) = (vec![0.0; 2 * 10], vec![7.0; 5 * 13]);
        matmul.forward(all(&block, 6), stack.layer(0), into(&mut expected, 10, false));
        let target = Target { first_row: 2, first_column: 3, accumulate: false };
        matmul.forward(Rows::new(&x, 9, 1..3, 3..9), stack.layer(0), Out::new(&mut y, 13, &target, 2, 10));
        for (i, &value) in y.iter().enumerate() {
            let (r, c) = (i / 13, i % 13);
            let inside = (2..4).contains(&r) && c >= 3;
            assert_eq!(value, if inside { expected[(r - 2) * 10 + c - 3] } else { 7.0 });
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
        let (m, k, n) = (37, 1100, 200);
        let (x, w, dy): (Vec<bf16>, Vec<bf16>, Vec<bf16>) = (values(1, m * k), values(2, n * k), values(3, m * n));
        for isa in Isa::available() {
            let (one, many) = (Pool::new(1), Pool::new(4));
            let stack = packed(&many, &w, k, n);
            let (mut y, mut dx) = (vec![0.0; m * n], vec![0.0; m * k]);
            let matmul = Matmul::new(&many, isa, DType::BF16);
            matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, false));
            matmul.backward_input(all(&dy, n), stack.layer(0), into(&mut dx, k, false));
            let matmul = Matmul::new(&one, isa, DType::BF16);
            for r in 0..m {
                let (mut alone, mut dx_alone) = (vec![0.0; n], vec![0.0; k]);
                matmul.forward(all(&x[r * k..][..k], k), stack.layer(0), into(&mut alone, n, false));
                matmul.backward_input(all(&dy[r * n..][..n], n), stack.layer(0), into(&mut dx_alone, k, false));
                assert_eq!(alone, y[r * n..][..n], "{isa} row {r}");
                assert_eq!(dx_alone, dx[r * k..][..k], "{isa} row {r}");
            }
        }
    }

    #[test]
    fn a_weight_gradient_has_the_same_bits_in_one_call_and_in_one_call_for_each_sequence() {
        let (tokens, rank, width) = (41, 7, 70);
        let (low, x): (Vec<bf16>, Vec<bf16>) = (values(1, tokens * rank), values(2, tokens * width));
        for isa in Isa::available() {
            let pool = Pool::new(3);
            let matmul = Matmul::new(&pool, isa, DType::BF16);
            let (mut whole, mut parts) = (vec![0.0; rank * width], vec![0.0; rank * width]);
            let sequences = [0..5, 5..6, 6..41];
            matmul.backward_weight::<bf16>(all(&low, rank), all(&x, width), &sequences, into(&mut whole, width, true));
            for s in sequences {
                let (low, x) = (Rows::new(&low, rank, s.clone(), 0..rank), Rows::new(&x, width, s, 0..width));
                matmul.backward_weight::<bf16>(low, x, std::slice::from_ref(&(0..low.rows)), into(&mut parts, width, true));
            }
            assert_eq!(whole, parts, "{isa}");
        }
    }

    #[test]
    fn columns_and_rows_pack_alike_and_unpack_to_what_was_packed() {
        let pool = Pool::new(2);
        for (k, n) in [(5, 130), (64, 64), (33, 17)] {
            let w: Vec<bf16> = values(4, n * k);
            let transposed: Vec<bf16> = (0..n * k).map(|i| w[i % n * k + i / n]).collect();
            let by_rows = packed(&pool, &w, k, n);
            let mut by_columns = PackedStack::zeros(1, k, n, DType::BF16).unwrap();
            pack_columns(&pool, Isa::detect(), &transposed, &mut by_columns.layer_mut(0));
            assert_eq!(by_rows.layer(0).bytes, by_columns.layer(0).bytes);
            let mut row = vec![0.0; k];
            for o in 0..n {
                unpack_row::<bf16>(by_rows.layer(0), o, &mut row);
                assert!(row.iter().zip(&w[o * k..]).all(|(a, b)| *a == b.to_f32()));
            }
        }
    }
}
