//! Low-rank products of a left side, made as the rows of a product with it are.
//!
//! Both read the same rows. A thread that has copied some of them into tiles makes their low-rank products first, from the cache they were copied into, and adds them to its panels then: so rows are
//! copied once for a layer and its adapter, where each matrix of the adapter had copied them for itself, and all threads had waited for each other behind each.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::{PanelProduct, TiledLeft, near};
use crate::DType;
use crate::cpu::matmul::Matmul;
use crate::cpu::matmul::addends::Addend;
use crate::cpu::matmul::granules::{self, GranuleFn};
use crate::cpu::matmul::operands::{Out, RightOn, RightSide, RowRuns, Rows, Target, steps};
use crate::cpu::packed::PANEL;
use crate::cpu::rows::convert;
use crate::cpu::threads::SharedMut;

/// One of them, of every row, and what it is added with.
#[derive(Clone)]
pub(crate) struct Low<'a> {
    /// Of the left side, from where on there are as many as `right` reduces over.
    pub(crate) first_input: usize,
    /// To a rank.
    pub(crate) right: RightSide<'a>,
    pub(crate) scale: f32,
    /// Of the result, from where on `added` has columns.
    pub(crate) first_column: usize,
    /// From the rank.
    pub(crate) added: RightSide<'a>,
}

impl Low<'_> {
    /// Whether it can be made of tiles of rows of `width` numbers of bf16: of whole granules, or to the end of a row, and to whole steps.
    fn is_regular(&self, width: usize) -> bool {
        let end = self.first_input + self.inputs();
        let ends = end.is_multiple_of(granules::INPUTS) || end == width;
        let begins = self.first_input.is_multiple_of(granules::INPUTS);
        begins && ends && self.right.columns().is_multiple_of(2) && Addend::can_join(self.first_column, &self.added)
    }

    /// How many columns of the left side that is.
    pub(crate) fn inputs(&self) -> usize {
        match self.right {
            RightSide::Weights(w) => w.in_features,
            RightSide::Transposed(w) => w.out_features,
        }
    }
}

/// Some of them, and where they go.
pub(crate) struct Lows<'a> {
    each: Vec<Low<'a>>,
    /// `[rows, rank]` of one after another.
    sums: SharedMut<f32>,
    /// The same, scaled and rounded.
    rounded: SharedMut<bf16>,
    rows: usize,
    outputs: PhantomData<(&'a mut [f32], &'a mut [bf16])>,
}

impl<'a> Lows<'a> {
    /// `sums` and `rounded` are for one after another, of `rows` rows each.
    pub(crate) fn new(each: Vec<Low<'a>>, rows: usize, sums: &'a mut [f32], rounded: &'a mut [bf16]) -> Self {
        let numbers = rows * each.iter().map(|low| low.right.columns()).sum::<usize>();
        assert!(sums.len() == numbers && rounded.len() == numbers);
        let (sums, rounded) = (SharedMut::new(sums), SharedMut::new(rounded));
        Lows { each, sums, rounded, rows, outputs: PhantomData }
    }

    /// Whether all of it is within so many rows and columns, in whole panels, and of this dtype.
    pub(in crate::cpu::matmul) fn fit(&self, rows: usize, columns: usize, dtype: DType) -> bool {
        let fits = |low: &Low<'_>| {
            let is_whole = low.first_column.is_multiple_of(PANEL) && low.added.steps() * 2 == low.right.columns();
            is_whole && low.first_column + low.added.columns() <= columns
        };
        self.rows == rows && dtype == DType::BF16 && self.each.iter().all(fits)
    }

    /// Each, and where its numbers of some rows are.
    fn of_rows(&self, rows: Range<usize>) -> impl Iterator<Item = (&Low<'a>, Range<usize>)> {
        assert!(rows.end <= self.rows);
        let mut first = 0;
        self.each.iter().map(move |low| {
            let rank = low.right.columns();
            let part = first + rows.start * rank..first + rows.end * rank;
            first += self.rows * rank;
            (low, part)
        })
    }

    /// Makes those of rows and steps that were copied, on this thread; the last steps of a row bring them to an end.
    pub(super) fn make(&self, matmul: &Matmul<'_>, run: GranuleFn, tiles: &TiledLeft<'_>, is_last: bool) {
        let near = near::kernel(matmul.isa);
        let rows = one_run(tiles.rows);
        let local = 0..rows.len();
        for (low, part) in self.of_rows(rows) {
            // SAFETY: who copies rows for their products is the only one who makes these, and nobody reads them before.
            let (sums, rounded) = unsafe { (self.sums.part(part.clone()), self.rounded.part(part)) };
            if let Some(left) = tiles.of_inputs(low.first_input, low.inputs(), RowRuns::of(&local)) {
                let rank = low.right.columns();
                let out = &Out::new(sums, rank, &Target::overwrite(), local.len(), rank);
                let (accumulate, block_steps) = (left.steps.start > 0, super::NEAR_GRANULE_BLOCK_STEPS);
                let right = &RightOn(matmul.isa, low.right);
                let product = PanelProduct { run, left: &left, out, accumulate, block_steps, right };
                for panel in 0..rank.div_ceil(PANEL) {
                    // SAFETY: all of the result is this thread's.
                    unsafe { matmul.panel_of_granules(&product, near, (panel, panel + 1), local.clone(), None) };
                }
            }
            if is_last {
                convert::scale(matmul.isa, sums, low.scale, rounded);
            }
        }
    }

    /// What is added to some rows, once theirs have been made.
    ///
    /// # Safety
    /// They have been, and nobody makes them again as long as it is read.
    pub(in crate::cpu::matmul) unsafe fn added_to(&self, rows: Range<usize>) -> Vec<Addend<'_>> {
        let addend = |(low, part): (&Low<'a>, Range<usize>)| {
            let rank = low.right.columns();
            // SAFETY: the caller's promise: it is read alone.
            let numbers: &[bf16] = unsafe { self.rounded.part(part) };
            let left = Rows::new(numbers, rank, 0..rows.len(), 0..rank);
            Addend { first_row: rows.start, first_column: low.first_column, left, right: low.added }
        };
        self.of_rows(rows.clone()).map(addend).collect()
    }
}

/// The rows of tiles that are one run.
pub(super) fn one_run(rows: RowRuns<'_>) -> Range<usize> {
    let run = rows.parts(0..rows.len()).next().expect("there are rows");
    assert_eq!(run.len(), rows.len(), "low-rank products are made of every row");
    run
}

impl Matmul<'_> {
    /// Whether a product of `rows` rows of `width` numbers, all of which are computed, with `columns` columns, in pairs of panels or not, makes these on its way: where threads copy rows for themselves.
    pub(crate) fn makes_lows(&self, rows: usize, width: usize, columns: usize, in_pairs: bool, lows: &[Low<'_>]) -> bool {
        let panels = if in_pairs { columns / 2 } else { columns }.div_ceil(PANEL);
        self.dtype == DType::BF16
            && near::kernel(self.isa).is_some()
            && lows.iter().all(|low| low.is_regular(width))
            && self.own_rows(rows, steps(width, self.dtype), panels, !in_pairs).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Numerics;
    use crate::cpu::isa::{Arithmetic, Isa};
    use crate::cpu::matmul::Addends;
    use crate::cpu::matmul::tests::{all, into, packed, values};
    use crate::cpu::matmul::tiled::step_ranges;
    use crate::cpu::packed::PackedStack;
    use crate::cpu::threads::Pool;

    /// First input and inputs of a low-rank product, its rank, and first column and columns of what it is added to.
    type Shape = [usize; 5];

    /// A product of `[m, k, n]` and what is made of its left side, there or back.
    struct Case {
        shape: [usize; 3],
        is_back: bool,
        lows: Vec<Shape>,
        w: PackedStack,
        /// Of each to a rank, and from it.
        pairs: Vec<[PackedStack; 2]>,
        x: Vec<bf16>,
        bias: Vec<f32>,
    }

    impl Case {
        fn new(shape: [usize; 3], is_back: bool, lows: &[Shape]) -> Self {
            let ([m, k, n], one) = (shape, Pool::new(1));
            let pack = |seed: u64, from: usize, to: usize| {
                let (inputs, outputs) = if is_back { (to, from) } else { (from, to) };
                packed::<bf16>(&one, &values(seed, inputs * outputs), inputs, outputs)
            };
            let pairs = (10..)
                .step_by(2)
                .zip(lows)
                .map(|(seed, &[_, inputs, rank, _, columns])| [pack(seed, inputs, rank), pack(seed + 1, rank, columns)]);
            Case {
                shape,
                is_back,
                lows: lows.to_vec(),
                w: pack(1, k, n),
                pairs: pairs.collect(),
                x: values(2, m * k),
                bias: (0..n).map(|i| i as f32 * 0.1).collect(),
            }
        }

        fn right<'a>(&self, w: &'a PackedStack) -> RightSide<'a> {
            if self.is_back { RightSide::Transposed(w.layer(0)) } else { RightSide::Weights(w.layer(0)) }
        }

        fn each(&self) -> Vec<Low<'_>> {
            let mut each = Vec::new();
            for (&[first_input, _, _, first_column, _], [to, from]) in self.lows.iter().zip(&self.pairs) {
                let (right, added) = (self.right(to), self.right(from));
                each.push(Low { first_input, right, scale: 0.3, first_column, added });
            }
            each
        }

        /// The result and all low-rank products, made on the way or one after another.
        fn bits(&self, isa: Isa, threads: usize, on_the_way: bool) -> [Vec<u32>; 2] {
            let [m, k, n] = self.shape;
            let pool = Pool::new(threads);
            let matmul = Matmul::new(&pool, Arithmetic { isa, numerics: Numerics::Portable }, DType::BF16);
            let each = self.each();
            assert_eq!(matmul.makes_lows(m, k, n, false, &each), on_the_way, "{isa}, {threads} threads");
            let numbers = m * each.iter().map(|low| low.right.columns()).sum::<usize>();
            let (mut y, mut sums, mut rounded) = (vec![0.5; m * n], vec![0.5; numbers], vec![bf16::ONE; numbers]);
            let (every, left) = (0..m, all(&self.x, k));
            let product = |left: Rows<'_>, right, out, addends: &Addends<'_>| {
                matmul.product((left, RowRuns::of(&every)), out, matmul.block_steps(), RightOn(isa, right), addends).unwrap();
            };
            if on_the_way {
                let addends = Addends::with_lows(Some(&self.bias), Lows::new(each, m, &mut sums, &mut rounded));
                product(left, self.right(&self.w), into(&mut y, n, false), &addends);
            } else {
                let mut products = Vec::new();
                let (mut sums, mut rounded) = (&mut sums[..], &mut rounded[..]);
                for low in each {
                    let (rank, first) = (low.right.columns(), low.first_input);
                    let sums = sums.split_off_mut(..m * rank).unwrap();
                    let rounded = rounded.split_off_mut(..m * rank).unwrap();
                    let left = Rows::new(&self.x, k, 0..m, first..first + low.inputs());
                    product(left, low.right, into(sums, rank, false), &Addends::default());
                    convert::scale(isa, sums, low.scale, rounded);
                    let left = all(&*rounded, rank);
                    products.push(Addend { first_row: 0, first_column: low.first_column, left, right: low.added });
                }
                product(left, self.right(&self.w), into(&mut y, n, false), &Addends::new(Some(&self.bias), products));
            }
            [y.into_iter().map(f32::to_bits).collect(), rounded.iter().map(|v| v.to_f32().to_bits()).collect()]
        }
    }

    /// There, each of all inputs, and back, each of some: of one part of the reduction and of several, of which some have nothing of one; of ranks of a few columns, of some and of more than a panel.
    #[test]
    fn what_is_made_on_the_way_has_the_bits_of_products_in_turn() {
        if !Isa::Amx.is_available() {
            return;
        }
        let there = [[0, 70, 6, 0, 64], [0, 70, 32, 64, 130], [0, 70, 70, 0, 194]];
        let far = [[0, 2100, 6, 0, 64], [0, 2100, 2, 64, 64]];
        let back = [[0, 128, 6, 0, 70], [128, 64, 66, 0, 70], [192, 40, 2, 0, 70]];
        let far_back = [[0, 576, 6, 0, 130], [576, 1472, 4, 0, 130], [2048, 52, 2, 0, 130]];
        let cases = [
            (Case::new([300, 70, 194], false, &there), 1),
            (Case::new([600, 2100, 128], false, &far), 2),
            (Case::new([270, 232, 70], true, &back), 1),
            (Case::new([520, 2100, 130], true, &far_back), 2),
        ];
        for (case, parts_min) in cases {
            let [m, k, n] = case.shape;
            let expected = case.bits(Isa::Avx512, 1, false);
            for threads in [1, 2] {
                let pool = Pool::new(threads);
                let matmul = Matmul::new(&pool, Isa::Amx.into(), DType::BF16);
                let own = matmul.own_rows(m, k / 2, n.div_ceil(PANEL), true).expect("there are enough");
                assert!(step_ranges(own.rows, k / 2, own.bytes_max).count() >= parts_min);
                assert!(case.bits(Isa::Amx, threads, true) == expected, "{:?}, {threads} threads", case.shape);
            }
        }
    }

    #[test]
    fn only_what_is_of_whole_granules_is_made_on_the_way() {
        if !Isa::Amx.is_available() {
            return;
        }
        let pool = Pool::new(1);
        let makes = |rows: usize, columns: usize, low: Shape| {
            let case = Case::new([1, 100, columns], true, &[low]);
            Matmul::new(&pool, Isa::Amx.into(), DType::BF16).makes_lows(rows, 100, columns, false, &case.each())
        };
        assert!(makes(128, 128, [32, 32, 2, 0, 128]) && makes(128, 128, [32, 68, 2, 64, 64]));
        // It begins within a granule, ends within one, has half a step, is added within a panel, and is of few rows.
        assert!(!makes(128, 128, [16, 84, 2, 0, 128]) && !makes(128, 128, [32, 40, 2, 0, 128]));
        assert!(!makes(128, 128, [32, 32, 3, 0, 128]) && !makes(128, 128, [32, 32, 2, 32, 64]));
        assert!(!makes(127, 128, [32, 32, 2, 0, 128]));
    }
}
