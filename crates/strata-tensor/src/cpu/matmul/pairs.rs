//! Products in chains of many rows with a right side that is widened: two panels at a time, for which the left side is widened once.
//!
//! Roofline: what widens the left side takes 2% of a tile, and waiting for its rows, which lie far apart, 2 to 3%, if they are not fetched. Both panels, half a mebibyte in blocks of 512 steps,
//! stay in a second-level cache, from which they come as fast as they are multiplied.

use std::ops::Range;

use super::addends::{Addends, PanelAddends};
use super::fetch::{ChunkList, Fetch};
use super::kernel::{Chains, PanelPairs, Tile, WideFn, widened_len};
use super::operands::{Out, Right, RowRuns, Rows, steps};
use super::{CHUNKS_MAX, Matmul, TASKS_PER_THREAD};
use crate::cpu::packed::PANEL;
use crate::cpu::scratch::{taken_bytes, with_scratch};

impl Matmul<'_> {
    /// What computes pairs of panels, if there are enough rows for it, and pairs for all threads.
    pub(super) fn pairs(&self, chains: &Chains, rows: usize, columns: usize) -> Option<(WideFn, PanelPairs)> {
        let are_enough = columns / (2 * PANEL) >= TASKS_PER_THREAD * self.pool.num_threads();
        if columns.is_multiple_of(2 * PANEL) && are_enough { chains.widening(rows).zip(chains.pairs(rows)) } else { None }
    }

    /// As [`Matmul::product`].
    pub(super) fn product_of_pairs(
        &self,
        (chains, wide, pairs): (&Chains, WideFn, PanelPairs),
        (left, all): (Rows<'_>, RowRuns<'_>),
        out: &Out,
        block_steps: usize,
        right: &impl Right,
        addends: &Addends<'_>,
    ) {
        let num_steps = steps(left.width, left.dtype);
        self.over_panels(all.len(), out.columns / 2, 1, |pair, rows| {
            let panels = [2 * pair, 2 * pair + 1];
            let (words, wide_len, kept_len) = (block_steps * PANEL, widened_len(block_steps), (pairs.kept_len)(block_steps));
            let chunks_max = chains.chunks(rows.len(), block_steps.min(num_steps)).min(CHUNKS_MAX);
            let of_a_panel = taken_bytes::<u32>(words) + taken_bytes::<f32>(wide_len) + addends.scratch_bytes();
            let of_both = taken_bytes::<f32>(kept_len) + taken_bytes::<usize>(chunks_max);
            with_scratch(2 * of_a_panel + of_both, |mut arena| {
                let written: [&mut [u32]; 2] = panels.map(|_| arena.take(words));
                let widened = panels.map(|_| arena.take::<f32>(wide_len).as_mut_ptr());
                let (kept, chunks) = (arena.take(kept_len), arena.take(chunks_max));
                let mut added = panels.map(|panel| PanelAddends::new(addends, &self.kernel, self.isa, panel, &mut arena));
                let mut coming = ChunkList::new(chunks);
                let [first_written, second_written] = written;
                for first in (0..num_steps).step_by(block_steps) {
                    let steps = first..(first + block_steps).min(num_steps);
                    let is_last = steps.end == num_steps;
                    let mut narrow = Some([
                        right.block(panels[0], steps.clone(), first_written).first,
                        right.block(panels[1], steps.clone(), second_written).first,
                    ]);
                    // What comes next of the right side. Threads take pairs in turns.
                    let next = 2 * self.pool.num_threads();
                    let mut ahead =
                        panels.map(|panel| right.coming((panel, panel + next), &steps, 0..num_steps, block_steps, out.columns));
                    let mut product = |rows: Range<usize>| {
                        // The tiles of the first panel fetch for both.
                        coming.clear(chains.chunks(rows.len(), steps.len()));
                        if is_last {
                            panels.iter().for_each(|&panel| coming.add_all(addends.read_for(&rows, panel)));
                        }
                        ahead.iter_mut().for_each(|ahead| *ahead = coming.add_pieces(std::mem::take(ahead)));
                        let tile_at = |row: usize, fetch: Fetch| Tile {
                            steps: steps.len(),
                            a: left.bytes[row * left.stride + first * 4..].as_ptr(),
                            a_stride: left.stride,
                            b: widened[0].cast(),
                            b_stride: 0,
                            c: out.at(row, panels[0] * PANEL),
                            c_stride: out.stride,
                            columns: PANEL,
                            accumulate: out.accumulate || first > 0,
                            fetch,
                        };
                        let mut row = rows.start;
                        // SAFETY: rows and columns are in bounds by the assertions of the callers; tasks own disjoint parts of the result. What is read widened has been written.
                        unsafe {
                            if let Some(narrow) = narrow.take() {
                                let count = rows.len().min(chains.tile_rows());
                                for (i, narrow) in narrow.into_iter().enumerate() {
                                    let tile = tile_at(row, Fetch::Nothing);
                                    let (b, c) = (widened[i].cast(), tile.c.wrapping_add(i * PANEL));
                                    wide(count, Some(narrow), &Tile { b, c, ..tile });
                                }
                                row += count;
                            }
                            if row < rows.end {
                                (pairs.run)(rows.end - row, &tile_at(row, coming.fetch()), widened[1], kept);
                            }
                        }
                    };
                    if !is_last {
                        all.parts(rows.clone()).for_each(&mut product);
                        continue;
                    }
                    let mut last = |rows: Range<usize>| {
                        product(rows.clone());
                        // SAFETY: as above.
                        added.iter_mut().for_each(|added| unsafe { added.add(out, rows.clone()) });
                    };
                    all.parts(rows.clone()).for_each(|part| addends.runs(part, &mut last));
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::isa::Arithmetic;
    use crate::cpu::matmul::operands::RightOn;
    use crate::cpu::matmul::tests::{all, into, packed, values};
    use crate::cpu::matmul::{Addend, RightSide, TileKernel};
    use crate::cpu::threads::Pool;
    use crate::{DType, Isa, Numerics};

    /// With a bias and a low-rank product: of one block of the reduction and of several, of every row and of some, begun from zero and from what there is, there and back.
    #[test]
    fn pairs_of_panels_have_the_bits_of_single_ones() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let rank = 7;
        let arithmetic = Arithmetic { isa: Isa::Avx512, numerics: Numerics::Fast };
        // Too many threads for pairs, and few enough.
        let (single, few) = (Pool::new(20), [Pool::new(1), Pool::new(2)]);
        for (m, k, n, transposed) in [(97, 40, 1024, false), (130, 1300, 1024, false), (101, 1024, 1300, true)] {
            let (columns, inputs) = if transposed { (k, n) } else { (n, k) };
            let w = packed::<bf16>(&single, &values(1, n * k), k, n);
            let (a, b) = (
                packed::<bf16>(&single, &values(2, rank * k), k, rank),
                packed::<bf16>(&single, &values(3, n * rank), rank, n),
            );
            let (x, low) = (values::<bf16>(4, m * inputs), values::<bf16>(5, 40 * rank));
            let (right, added) = match transposed {
                true => (RightSide::Transposed(w.layer(0)), RightSide::Transposed(a.layer(0))),
                false => (RightSide::Weights(w.layer(0)), RightSide::Weights(b.layer(0))),
            };
            let bias: Vec<f32> = (0..columns).map(|i| i as f32 * 0.1).collect();
            let (every, some) = (0..m, [0..3, 4..m - 2, m - 1..m]);
            for runs in [std::slice::from_ref(&every), &some] {
                for accumulate in [false, true] {
                    let product = |pool: &Pool, are_pairs: bool| {
                        let matmul = Matmul::new(pool, arithmetic, DType::BF16);
                        let rows = RowRuns::new(runs);
                        let TileKernel::Chains(chains) = matmul.kernel else { unreachable!("its products are chains") };
                        assert_eq!(matmul.pairs(&chains, rows.len(), columns).is_some(), are_pairs);
                        let mut padded = None;
                        let left = all(&low, rank).whole_steps(&mut padded).unwrap();
                        let addend = Addend { first_row: 10, first_column: 0, left, right: added };
                        let addends = Addends::new(Some(&bias), vec![addend]);
                        let mut y = vec![0.5; m * columns];
                        let out = into(&mut y, columns, accumulate);
                        let right = RightOn(matmul.isa, right);
                        matmul.product((all(&x, inputs), rows), out, matmul.block_steps(), right, &addends).unwrap();
                        y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let expected = product(&single, false);
                    for pool in &few {
                        let what = format!("m={m} k={k} n={n}, {} runs, accumulate {accumulate}", runs.len());
                        assert!(product(pool, true) == expected, "{what}, {} threads", pool.num_threads());
                    }
                }
            }
        }
    }
}
