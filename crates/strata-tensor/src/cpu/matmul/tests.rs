//! The three products against plain sums, and their bits against themselves.

mod quantized;

use std::collections::BTreeMap;

use half::bf16;

use self::quantized::INT4;
use super::fetch::{Fetching, Lines, Own};
use super::*;
use crate::cpu::packed::PackedStack;
use crate::{Element, Int4Group, Int4Rows, Memory, WeightFormat, random};

pub(super) fn values<T: Element>(seed: u64, n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(random::normal([seed, 0], i as u64))).collect()
}

pub(super) fn packed<T: Element>(pool: &Pool, w: &[T], k: usize, n: usize) -> PackedStack {
    let mut stack = PackedStack::zeros(1, k, n, T::DTYPE.into()).unwrap();
    pack_rows(pool, Isa::detect(), w, 0, &mut stack.layer_mut(0).unwrap()).unwrap();
    stack
}

pub(super) fn all<T: Element>(matrix: &[T], columns: usize) -> Rows<'_> {
    Rows::new(matrix, columns, 0..matrix.len() / columns, 0..columns)
}

pub(super) fn into(matrix: &mut [f32], columns: usize, accumulate: bool) -> Out {
    let rows = matrix.len() / columns;
    Out::new(matrix, columns, &Target { accumulate, ..Target::overwrite() }, rows, columns)
}

/// Of all rows.
fn backward_input(matmul: &Matmul<'_>, dy: Rows<'_>, w: PackedRef<'_>, dx: Out, addends: &Addends<'_>) -> Result<()> {
    let all = 0..dy.rows();
    matmul.backward_input((dy, RowRuns::of(&all)), w, dx, addends)
}

fn close(actual: &[f32], expected: &[f64], what: &str) {
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!((a as f64 - e).abs() <= 1e-4 * (1.0 + e.abs()), "{what}: element {i} is {a}, not {e}");
    }
}

/// The three products against f64 sums, on every instruction set, in shapes that leave remainders everywhere.
fn all_products_match_plain_sums<T: Element>() {
    for arithmetic in Arithmetic::available() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for (m, k, n) in
                [(1, 1, 1), (1, 60, 100), (5, 64, 64), (7, 33, 65), (13, 700, 130), (50, 96, 16), (33, 17, 263), (70, 1040, 71)]
            {
                let what = format!("{arithmetic} {} m={m} k={k} n={n}", T::DTYPE);
                let (x, w, dy): (Vec<T>, Vec<T>, Vec<T>) = (values(1, m * k), values(2, n * k), values(3, m * n));
                let stack = packed(&pool, &w, k, n);
                let matmul = Matmul::new(&pool, arithmetic, T::DTYPE);
                let get = |v: &[T], i: usize| v[i].to_f32() as f64;

                let mut y = vec![1.0; m * n];
                matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, true), &Addends::default()).unwrap();
                let expected: Vec<f64> = (0..m * n)
                    .map(|i| 1.0 + (0..k).map(|j| get(&x, i / n * k + j) * get(&w, i % n * k + j)).sum::<f64>())
                    .collect();
                close(&y, &expected, &what);

                let mut dx = vec![0.5; m * k];
                backward_input(&matmul, all(&dy, n), stack.layer(0), into(&mut dx, k, true), &Addends::default()).unwrap();
                let expected: Vec<f64> = (0..m * k)
                    .map(|i| 0.5 + (0..n).map(|j| get(&dy, i / k * n + j) * get(&w, j * k + i % k)).sum::<f64>())
                    .collect();
                close(&dx, &expected, &what);

                let mut dw = vec![0.25; n * k];
                let cut = m / 2;
                let mut pairs = [(all(&dy, n), into(&mut dw, k, true))];
                matmul.backward_weights::<T>(all(&x, k), &[0..cut, cut..m], &mut pairs).unwrap();
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

/// What threads keep for products is what [`scratch_bytes`] says beforehand, or less: few rows and many, with one block of the reduction and with several.
#[test]
fn products_keep_no_more_scratch_than_they_say() {
    let kept_for = |arithmetic: Arithmetic, (m, k, n): (usize, usize, usize)| {
        let (x, w, dy) = (values::<bf16>(1, m * k), values::<bf16>(2, n * k), values::<bf16>(3, m * n));
        // This thread alone, which has kept nothing yet.
        let pool = Pool::new(1);
        let (matmul, stack) = (Matmul::new(&pool, arithmetic, DType::BF16), packed(&pool, &w, k, n));
        let (mut y, mut dx) = (vec![0.0; m * n], vec![0.0; m * k]);
        matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, false), &Addends::default()).unwrap();
        backward_input(&matmul, all(&dy, n), stack.layer(0), into(&mut dx, k, false), &Addends::default()).unwrap();
        let width = k.max(n);
        let said = scratch_bytes(&matmul.kernel, m, width, DType::BF16, 1);
        // What is set aside for reductions over tokens, of which there are none here, would hide what is missing.
        let of_others =
            if matches!(matmul.kernel, TileKernel::Chains(_)) { tokens::panels_bytes(width, DType::BF16) } else { 0 };
        (crate::cpu::scratch::held_bytes(), said - of_others)
    };
    let shapes = [1, 7, 200].into_iter().flat_map(|m| [(m, 64, 64), (m, 600, 64), (m, 2100, 130), (m, 600, 1024)]);
    for (arithmetic, shape) in shapes.flat_map(|shape| Arithmetic::available().into_iter().map(move |a| (a, shape))) {
        let (kept, said) = std::thread::scope(|s| s.spawn(|| kept_for(arithmetic, shape)).join().unwrap());
        assert!(kept <= said, "{arithmetic}, {shape:?}: {kept} bytes are kept, {said} were said");
    }
}

/// The three products against chains of [`f32::mul_add`], on every instruction set with fused multiply-add whose products of this dtype are chains of numbers
/// as f32: so all of these have the same bits.
fn products_are_plain_chains<T: Element>(isas: &[Isa]) {
    let chain = |first: f32, factors: &mut dyn Iterator<Item = (T, T)>| {
        factors.fold(first, |acc, (a, b)| a.to_f32().mul_add(b.to_f32(), acc)).to_bits()
    };
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let shapes = [
        (1, 1, 1),
        (2, 3, 131),
        (7, 33, 65),
        (13, 700, 130),
        (50, 97, 16),
        // Several blocks of the reduction, of columns that are laid out at a time, and of tokens.
        (70, 1041, 71),
        (543, 20, 33),
        // Several panels at once, and some that are left over.
        (1, 33, 1100),
        (3, 10, 1159),
    ];
    // Of ordinary size; and with products below the normal range, which chains do not flush.
    for ((m, k, n), size) in shapes.into_iter().flat_map(|shape| [(shape, 1.0f32), (shape, 1e-20)]) {
        let sized = |seed, len| -> Vec<T> { values::<T>(seed, len).iter().map(|v| T::from_f32(v.to_f32() * size)).collect() };
        let (x, w, dy) = (sized(1, m * k), sized(2, n * k), sized(3, m * n));
        let there = |i: usize| (i % 7) as f32 * 0.3 * size * size;
        let what_is_there = |len: usize| (0..len).map(there).collect::<Vec<f32>>();

        let y: Vec<u32> =
            (0..m * n).map(|i| chain(there(i), &mut (0..k).map(|j| (x[i / n * k + j], w[i % n * k + j])))).collect();
        let fresh: Vec<u32> =
            (0..m * n).map(|i| chain(0.0, &mut (0..k).map(|j| (x[i / n * k + j], w[i % n * k + j])))).collect();
        let dx: Vec<u32> =
            (0..m * k).map(|i| chain(there(i), &mut (0..n).map(|j| (dy[i / k * n + j], w[j * k + i % k])))).collect();
        let dw: Vec<u32> =
            (0..n * k).map(|i| chain(there(i), &mut (0..m).map(|t| (dy[t * n + i / k], x[t * k + i % k])))).collect();
        for (&isa, threads) in isas.iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            let what = format!("{} on {isa}, {threads} threads, m={m} k={k} n={n}, numbers of size {size}", T::DTYPE);
            let pool = Pool::new(threads);
            let stack = packed(&pool, &w, k, n);
            let matmul = Matmul::new(&pool, isa.into(), T::DTYPE);
            let (mut out, mut overwritten) = (what_is_there(m * n), vec![7.0; m * n]);
            matmul.forward(all(&x, k), stack.layer(0), into(&mut out, n, true), &Addends::default()).unwrap();
            matmul.forward(all(&x, k), stack.layer(0), into(&mut overwritten, n, false), &Addends::default()).unwrap();
            assert!(bits(out) == y && bits(overwritten) == fresh, "forward in {what}");
            let mut out = what_is_there(m * k);
            backward_input(&matmul, all(&dy, n), stack.layer(0), into(&mut out, k, true), &Addends::default()).unwrap();
            assert!(bits(out) == dx, "backward_input in {what}");
            let mut out = what_is_there(n * k);
            let mut pairs = [(all(&dy, n), into(&mut out, k, true))];
            matmul.backward_weights::<T>(all(&x, k), &[0..m / 3, m / 3..m], &mut pairs).unwrap();
            assert!(bits(out) == dw, "backward_weights in {what}");
        }
    }
}

/// Few rows read several panels at once, some more fetch what comes next, and many do neither.
fn few_rows_have_the_bits_of_many<T: Element>() {
    let (m, k, n) = (60, 301, 1100);
    let (x, w) = (values::<T>(1, m * k), values::<T>(2, n * k));
    for arithmetic in Arithmetic::available() {
        let mut of_all: Option<Vec<f32>> = None;
        for (threads, rows) in
            [1, 3].into_iter().flat_map(|threads| [m, 1, 2, 3, 4, 6, 7, 13, 16, 48, 49].map(|rows| (threads, rows)))
        {
            let pool = Pool::new(threads);
            let stack = packed(&pool, &w, k, n);
            let matmul = Matmul::new(&pool, arithmetic, T::DTYPE);
            let mut y = vec![1.5; rows * n];
            matmul.forward(all(&x[..rows * k], k), stack.layer(0), into(&mut y, n, true), &Addends::default()).unwrap();
            let of_all = of_all.get_or_insert_with(|| y.clone());
            let same = y.iter().zip(of_all).all(|(y, of_all)| y.to_bits() == of_all.to_bits());
            assert!(same, "{rows} rows on {threads} threads, {arithmetic} {}", T::DTYPE);
        }
    }
}

#[test]
fn few_rows_have_the_bits_of_many_however_their_right_side_is_read() {
    few_rows_have_the_bits_of_many::<f32>();
    few_rows_have_the_bits_of_many::<bf16>();
}

/// Narrow matrices are padded less than vectors are wide, and who reads the last of them reads on: each result is that of its output in a whole panel. Single rows are
/// computed several at a time.
fn narrow_matrices_have_the_bits_of_wide_ones<T: Element>(m: usize, k: usize) {
    let (x, w) = (values::<T>(1, m * k), values::<T>(2, PANEL * k));
    let pool = Pool::new(2);
    for arithmetic in Arithmetic::available() {
        let matmul = Matmul::new(&pool, arithmetic, T::DTYPE);
        let (mut wide, whole) = (vec![0.0; m * PANEL], packed(&pool, &w, k, PANEL));
        matmul.forward(all(&x, k), whole.layer(0), into(&mut wide, PANEL, false), &Addends::default()).unwrap();
        for n in [1, 7, 8, 9, 16, 17, 24, 25, 33, 40, 56, 63] {
            // The last of a stack, behind which there is nothing.
            let mut stack = PackedStack::zeros(2, k, n, T::DTYPE.into()).unwrap();
            pack_rows(&pool, arithmetic.isa, &w[..n * k], 0, &mut stack.layer_mut(1).unwrap()).unwrap();
            let narrow = stack.layer(1);
            let same = |row: usize, y: &[f32]| y.iter().zip(&wide[row * PANEL..]).all(|(a, b)| a.to_bits() == b.to_bits());
            for rows in [1, 2, 5, 17, m] {
                let mut y = vec![0.0; rows * n];
                matmul.forward(all(&x[..rows * k], k), narrow, into(&mut y, n, false), &Addends::default()).unwrap();
                assert!(y.chunks(n).enumerate().all(|(row, y)| same(row, y)), "{rows} rows by {n}, {arithmetic} {}", T::DTYPE);
            }
            let mut y = vec![f32::NAN; 6 * n];
            let mut products: Vec<_> =
                x.chunks(k).zip(y.chunks_mut(n)).map(|(x, y)| (all(x, k), narrow, into(y, n, false))).collect();
            if products.iter().any(|(x, w, _)| matmul.single_row(x, w).is_none()) {
                assert!(!arithmetic.isa.has_avx512() || T::DTYPE == DType::BF16, "{arithmetic} computes single rows");
                continue;
            }
            for count in [1, 4, 6] {
                matmul.single_rows(&products[..count]);
            }
            // One that is as many vectors wide, in another stride.
            let other_n = n.next_multiple_of(LANES);
            let (mut other, stack) = (vec![f32::NAN; other_n], packed(&pool, &w[..other_n * k], k, other_n));
            products[1] = (all(&x[..k], k), stack.layer(0), into(&mut other, other_n, false));
            matmul.single_rows(&products[..2]);
            drop(products);
            assert!(same(0, &other), "single rows of other strides, {arithmetic} {}", T::DTYPE);
            assert!(y.chunks(n).enumerate().all(|(row, y)| same(row, y)), "single rows by {n}, {arithmetic} {}", T::DTYPE);
        }
    }
}

#[test]
fn narrow_matrices_have_the_bits_of_wide_ones_and_single_rows_those_of_many() {
    // With a granule that is filled up, and without one, where rows that one panel reads are not copied.
    for (m, k) in [(60, 70), (90, 96)] {
        narrow_matrices_have_the_bits_of_wide_ones::<f32>(m, k);
        narrow_matrices_have_the_bits_of_wide_ones::<bf16>(m, k);
    }
}

#[test]
fn f32_products_have_the_same_bits_on_every_instruction_set_with_fused_multiply_add() {
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect();
    products_are_plain_chains::<f32>(&fused);
}

/// `vdpbf16ps` has an order of its own, and flushes numbers below the normal range; AMX adds in granules.
#[test]
fn bf16_products_of_widened_numbers_have_the_same_bits_on_every_instruction_set() {
    let widening: Vec<Isa> =
        Isa::available().into_iter().filter(|isa| [Isa::Neon, Isa::Avx2, Isa::Avx512].contains(isa)).collect();
    products_are_plain_chains::<bf16>(&widening);
}

#[test]
fn a_product_reads_and_writes_blocks_of_larger_matrices() {
    let pool = Pool::new(2);
    let w: Vec<bf16> = values(2, 10 * 6);
    let stack = packed(&pool, &w, 6, 10);
    let x: Vec<bf16> = values(1, 4 * 9);
    let block: Vec<bf16> = (1..3).flat_map(|r| x[r * 9 + 3..r * 9 + 9].to_vec()).collect();
    let matmul = Matmul::new(&pool, Isa::detect().into(), DType::BF16);
    let (mut expected, mut y) = (vec![0.0; 2 * 10], vec![7.0; 5 * 13]);
    matmul.forward(all(&block, 6), stack.layer(0), into(&mut expected, 10, false), &Addends::default()).unwrap();
    let target = Target { first_row: 2, first_column: 3, accumulate: false };
    matmul
        .forward(Rows::new(&x, 9, 1..3, 3..9), stack.layer(0), Out::new(&mut y, 13, &target, 2, 10), &Addends::default())
        .unwrap();
    for (i, &value) in y.iter().enumerate() {
        let (r, c) = (i / 13, i % 13);
        let inside = (2..4).contains(&r) && c >= 3;
        assert_eq!(value, if inside { expected[(r - 2) * 10 + c - 3] } else { 7.0 });
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
    // More rows than a kernel wants the right side laid out for, and more than one block of the reduction.
    let (m, k, n) = (101, 1100, 200);
    let (x, w, dy): (Vec<bf16>, Vec<bf16>, Vec<bf16>) = (values(1, m * k), values(2, n * k), values(3, m * n));
    for arithmetic in Arithmetic::available() {
        let (one, many) = (Pool::new(1), Pool::new(4));
        let stack = packed(&many, &w, k, n);
        let (mut y, mut dx) = (vec![0.0; m * n], vec![0.0; m * k]);
        let matmul = Matmul::new(&many, arithmetic, DType::BF16);
        matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, false), &Addends::default()).unwrap();
        backward_input(&matmul, all(&dy, n), stack.layer(0), into(&mut dx, k, false), &Addends::default()).unwrap();
        let matmul = Matmul::new(&one, arithmetic, DType::BF16);
        for r in 0..m {
            let (mut alone, mut dx_alone) = (vec![0.0; n], vec![0.0; k]);
            matmul.forward(all(&x[r * k..][..k], k), stack.layer(0), into(&mut alone, n, false), &Addends::default()).unwrap();
            backward_input(
                &matmul,
                all(&dy[r * n..][..n], n),
                stack.layer(0),
                into(&mut dx_alone, k, false),
                &Addends::default(),
            )
            .unwrap();
            assert_eq!(alone, y[r * n..][..n], "{arithmetic} row {r}");
            assert_eq!(dx_alone, dx[r * k..][..k], "{arithmetic} row {r}");
        }
    }
}

#[test]
fn some_rows_have_the_bits_that_they_have_among_all_and_the_others_are_left_as_they_are() {
    let (k, n, rank) = (200, 1100, 5);
    let w: Vec<bf16> = values(2, n * k);
    let a: Vec<bf16> = values(3, rank * k);
    for (arithmetic, threads) in Arithmetic::available().into_iter().flat_map(|a| [(a, 1), (a, 3)]) {
        let pool = Pool::new(threads);
        let matmul = Matmul::new(&pool, arithmetic, DType::BF16);
        let (w, a) = (packed(&pool, &w, k, n), packed(&pool, &a, k, rank));
        // More than are laid out at a time; a run of one row, runs as they come of granules, and one up to the last.
        for (m, runs) in
            [(1300, vec![3..4, 32..96, 130..1200, 1299..1300]), (101, vec![0..32, 64..101]), (70, vec![0..1, 69..70])]
        {
            let (dy, low): (Vec<bf16>, Vec<bf16>) = (values(4, m * n), values(5, (m - 10) * rank));
            let mut padded = None;
            let left = all(&low, rank).whole_steps(&mut padded).unwrap();
            let product = |rows: RowRuns<'_>, dx: &mut [f32]| {
                let addend = Addend { first_row: 10, first_column: 0, left, right: RightSide::Transposed(a.layer(0)) };
                let addends = Addends::new(None, vec![addend]);
                matmul.backward_input((all(&dy, n), rows), w.layer(0), into(dx, k, false), &addends).unwrap();
            };
            let (mut whole, mut some) = (vec![7.0; m * k], vec![7.0; m * k]);
            product(RowRuns::of(&(0..m)), &mut whole);
            product(RowRuns::new(&runs), &mut some);
            for (row, (some, whole)) in some.chunks(k).zip(whole.chunks(k)).enumerate() {
                let is_wanted = runs.iter().any(|run| run.contains(&row));
                let as_it_was = some.iter().all(|v| *v == 7.0);
                assert!(if is_wanted { some == whole } else { as_it_was }, "{arithmetic}, {threads} threads, row {row} of {m}");
            }
        }
    }
}

#[test]
fn a_weight_gradient_has_the_same_bits_in_one_call_and_in_one_call_for_each_sequence() {
    let (tokens, rank, width) = (1541, 7, 70);
    let (low, x): (Vec<bf16>, Vec<bf16>) = (values(1, tokens * rank), values(2, tokens * width));
    for arithmetic in Arithmetic::available() {
        let pool = Pool::new(3);
        let matmul = Matmul::new(&pool, arithmetic, DType::BF16);
        let (mut whole, mut parts) = (vec![0.0; rank * width], vec![0.0; rank * width]);
        let sequences = [0..5, 5..6, 6..41, 41..tokens];
        let mut pairs = [(all(&low, rank), into(&mut whole, width, true))];
        matmul.backward_weights::<bf16>(all(&x, width), &sequences, &mut pairs).unwrap();
        for s in sequences {
            let (low, x) = (Rows::new(&low, rank, s.clone(), 0..rank), Rows::new(&x, width, s.clone(), 0..width));
            let mut pairs = [(low, into(&mut parts, width, true))];
            matmul.backward_weights::<bf16>(x, std::slice::from_ref(&(0..s.len())), &mut pairs).unwrap();
        }
        assert_eq!(whole, parts, "{arithmetic}");
    }
}

#[test]
#[should_panic(expected = "this machine has no")]
fn a_backend_refuses_instructions_that_the_machine_lacks() {
    let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    crate::CpuBackend::with_isa(foreign, 1);
}

#[test]
fn numerics_name_those_that_round_products_before_they_add_them() {
    use crate::Backend;
    let numerics = |isa| crate::CpuBackend::with_isa(Arithmetic { isa, numerics: crate::Numerics::Portable }, 1).numerics();
    for isa in Isa::available() {
        let expected = if isa == Isa::Portable { "portable portable" } else { "portable" };
        assert_eq!(numerics(isa), expected, "{isa}");
    }
}

#[test]
fn columns_and_rows_pack_alike_and_unpack_to_what_was_packed() {
    let pool = Pool::new(2);
    for (k, n) in [(5, 130), (64, 64), (33, 17)] {
        let w: Vec<bf16> = values(4, n * k);
        let transposed: Vec<bf16> = (0..n * k).map(|i| w[i % n * k + i / n]).collect();
        let by_rows = packed(&pool, &w, k, n);
        let mut by_columns = PackedStack::zeros(1, k, n, DType::BF16.into()).unwrap();
        pack_columns(&pool, Isa::detect(), &transposed, &mut by_columns.layer_mut(0).unwrap());
        assert_eq!(by_rows.layer(0).bytes, by_columns.layer(0).bytes);
        let mut row = vec![0.0; k];
        for o in 0..n {
            unpack_row::<bf16>(by_rows.layer(0), o, &mut row);
            assert!(row.iter().zip(&w[o * k..]).all(|(a, b)| *a == b.to_f32()));
        }
    }
}

/// A low-rank product for some rows of a result.
struct Pair<'a, T> {
    first_row: usize,
    first_column: usize,
    /// `[rows, rank]`.
    low: Vec<T>,
    rank: usize,
    /// `rank → columns` of y.
    b: &'a PackedStack,
    /// `in → rank`; transposed it adds to all of dx.
    a: &'a PackedStack,
}

/// Of a low-rank product: rank, first row, rows, first column, columns.
type Place = (usize, usize, usize, usize, usize);

/// Within a panel, over several, up to the last, for rows that others have too; and of the last ranks, blocks that take turns on a thread.
fn places_of_all_kinds() -> Vec<Place> {
    let places = [(5, 0, 3, 0, 64), (32, 2, 60, 64, 130), (33, 10, 52, 128, 72), (1, 61, 1, 192, 8), (128, 0, 62, 0, 200)];
    places.into_iter().chain((0..9).map(|i| (2 + i, 4 * i, 7, 64, 64))).collect()
}

/// As a step has them that decodes with an adapter for each row, among which is one with three; some also have columns that are no whole panel.
fn places_of_single_rows() -> Vec<Place> {
    let of_row = |row: usize| match row {
        20 => vec![(5, 20, 3, 0, 64), (7, 20, 3, 64, 128)],
        21 | 22 => vec![],
        _ if row % 10 == 3 => vec![(2, row, 1, 64, 128), (4, row, 1, 192, 8)],
        _ => vec![(1 + row % 9, row, 1, 0, 64), (1 + row % 5 * 8, row, 1, 64, 128)],
    };
    (0..101).flat_map(of_row).collect()
}

/// A bias and low-rank products that are added on the way, against the same products one after another.
fn addends_have_the_bits_of_products_in_turn<T: Element>(storage: WeightStorage, places: &[Place]) {
    let (k, n) = (1300, 200);
    let (w, bias): (Vec<T>, Vec<f32>) = (values(2, n * k), values(3, n));
    const ROWS: [usize; 5] = [1, 4, 47, 62, 101];
    let (x, dy): (Vec<T>, Vec<T>) = (values(4, ROWS[4] * k), values(5, ROWS[4] * n));
    // By their sizes: places have the same ones again and again.
    let (mut stacks_a, mut stacks_b) = (BTreeMap::new(), BTreeMap::new());
    for &(rank, .., columns) in places {
        let pool = Pool::new(1);
        stacks_a.entry(rank).or_insert_with(|| packed(&pool, &values::<T>(8, rank * k), k, rank));
        stacks_b.entry((rank, columns)).or_insert_with(|| packed(&pool, &values::<T>(7, columns * rank), rank, columns));
    }
    for (arithmetic, threads) in Arithmetic::available().into_iter().flat_map(|a| [(a, 1), (a, 3)]) {
        let pool = Pool::new(threads);
        let matmul = Matmul::new(&pool, arithmetic, T::DTYPE);
        let mut stack = PackedStack::zeros(1, k, n, WeightFormat { compute: T::DTYPE, storage }).unwrap();
        pack_rows(&pool, Isa::detect(), &w, 0, &mut stack.layer_mut(0).unwrap()).unwrap();
        for (m, in_order) in ROWS.into_iter().flat_map(|m| [(m, false), (m, true)]) {
            let what = format!("{arithmetic} {}, {threads} threads, {m} rows, in order: {in_order}", T::DTYPE);
            let mut places = places.to_vec();
            if in_order {
                // As groups of a batch lie: each begins and ends no earlier than the one before.
                places.sort_by_key(|&(_, first_row, rows, ..)| (first_row, first_row + rows));
                let mut end = 0;
                places.retain(|&(_, first_row, rows, ..)| {
                    let follows = first_row + rows >= end;
                    end = end.max(first_row + rows);
                    follows
                });
            }
            let clipped = places.iter().filter(|(_, first_row, ..)| *first_row < m);
            let pairs: Vec<Pair<'_, T>> = clipped
                .map(|&(rank, first_row, rows, first_column, columns)| Pair {
                    first_row,
                    first_column,
                    low: values(6, rows.min(m - first_row) * rank),
                    rank,
                    b: &stacks_b[&(rank, columns)],
                    a: &stacks_a[&rank],
                })
                .collect();
            for transposed in [false, true] {
                let width = if transposed { k } else { n };
                let multiply = |left: Rows<'_>, right: RightSide<'_>, out: Out, addends: &Addends<'_>| match right {
                    RightSide::Weights(w) => matmul.forward(left, w, out, addends).unwrap(),
                    RightSide::Transposed(w) => backward_input(&matmul, left, w, out, addends).unwrap(),
                };
                let (left, right) = match transposed {
                    false => (all(&x[..m * k], k), RightSide::Weights(stack.layer(0))),
                    true => (all(&dy[..m * n], n), RightSide::Transposed(stack.layer(0))),
                };
                let (mut joined, mut apart) = (vec![7.0; m * width], vec![7.0; m * width]);
                multiply(left, right, into(&mut apart, width, false), &Addends::default());
                if !transposed {
                    apart.chunks_mut(n).flat_map(|row| row.iter_mut().zip(&bias)).for_each(|(y, bias)| *y += bias);
                }
                let mut padded: Vec<_> = pairs.iter().map(|_| None).collect();
                let mut products = Vec::new();
                for (pair, padded) in pairs.iter().zip(&mut padded) {
                    let (first_column, right) = match transposed {
                        false => (pair.first_column, RightSide::Weights(pair.b.layer(0))),
                        true => (0, RightSide::Transposed(pair.a.layer(0))),
                    };
                    let low = all(&pair.low, pair.rank);
                    let target = Target { first_row: pair.first_row, first_column, accumulate: true };
                    multiply(low, right, Out::new(&mut apart, width, &target, low.rows, right.columns()), &Addends::default());
                    assert!(Addend::can_join(first_column, &right));
                    products.push(Addend {
                        first_row: pair.first_row,
                        first_column,
                        left: low.whole_steps(padded).unwrap(),
                        right,
                    });
                }
                let bias = (!transposed).then_some(&bias[..]);
                multiply(left, right, into(&mut joined, width, false), &Addends::new(bias, products));
                assert!(joined == apart, "{what}, transposed: {transposed}");
            }
        }
    }
}

#[test]
fn products_that_are_added_on_the_way_have_the_bits_of_products_in_turn() {
    let places = places_of_all_kinds();
    addends_have_the_bits_of_products_in_turn::<f32>(WeightStorage::Dense, &places);
    addends_have_the_bits_of_products_in_turn::<bf16>(WeightStorage::Dense, &places);
    addends_have_the_bits_of_products_in_turn::<bf16>(WeightStorage::Int8, &places);
    addends_have_the_bits_of_products_in_turn::<bf16>(INT4[1], &places);
}

#[test]
fn single_rows_that_are_added_on_the_way_have_the_bits_of_products_in_turn() {
    let places = places_of_single_rows();
    addends_have_the_bits_of_products_in_turn::<f32>(WeightStorage::Dense, &places);
    addends_have_the_bits_of_products_in_turn::<bf16>(WeightStorage::Dense, &places);
    addends_have_the_bits_of_products_in_turn::<bf16>(INT4[1], &places);
    // Also where a row has two for the same columns.
    addends_have_the_bits_of_products_in_turn::<f32>(WeightStorage::Dense, &[places, vec![(3, 100, 1, 0, 64)]].concat());
}

#[test]
fn single_rows_are_added_together_where_no_element_has_two() {
    let pool = Pool::new(1);
    let low = values::<bf16>(1, 3 * 40);
    let singles = |places: &[Place]| {
        let stacks: Vec<_> = places
            .iter()
            .map(|&(rank, .., columns)| packed(&pool, &values::<bf16>(2, columns * rank), rank, columns))
            .collect();
        let mut padded: Vec<_> = places.iter().map(|_| None).collect();
        let addends =
            places.iter().zip(&stacks).zip(&mut padded).map(|((&(rank, first_row, rows, first_column, _), b), padded)| {
                let left = Rows::new(&low, rank, 0..rows, 0..rank).whole_steps(padded).unwrap();
                Addend { first_row, first_column, left, right: RightSide::Weights(b.layer(0)) }
            });
        Addends::new(None, addends.collect()).num_singles()
    };
    let places = places_of_single_rows();
    assert_eq!(singles(&places), places.iter().filter(|(_, _, rows, _, columns)| *rows == 1 && columns % 64 == 0).count());
    assert_eq!(singles(&[places, vec![(3, 100, 1, 0, 64)]].concat()), 0);
    // Of one that covers others, and of some in no order.
    assert_eq!(singles(&[(3, 0, 3, 0, 64), (3, 2, 1, 0, 64), (3, 3, 1, 0, 64)]), 0);
    assert_eq!(singles(&[(3, 4, 1, 0, 64), (3, 3, 1, 0, 64)]), 0);
}

#[test]
fn what_has_other_panels_or_no_room_on_a_thread_is_added_apart() {
    let layer = |in_features, out_features| PackedStack::zeros(1, in_features, out_features, DType::F32.into()).unwrap();
    let (small, large) = (layer(64, 256), layer(64, 257));
    assert!(Addend::can_join(128, &RightSide::Weights(small.layer(0))));
    assert!(!Addend::can_join(32, &RightSide::Weights(small.layer(0))));
    assert!(Addend::can_join(0, &RightSide::Transposed(small.layer(0))));
    assert!(!Addend::can_join(0, &RightSide::Transposed(large.layer(0))));
}

#[test]
fn a_block_is_made_of_its_pieces_and_nothing_else() {
    let (k, n) = (256, 320);
    let pool = Pool::new(1);
    let w = values::<bf16>(1, k * n);
    for storage in [WeightStorage::Dense, WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of64)] {
        let stack = || PackedStack::zeros(1, k, n, WeightFormat { compute: DType::BF16, storage }).unwrap();
        let mut whole = stack();
        pack_rows(&pool, Isa::detect(), &w, 0, &mut whole.layer_mut(0).unwrap()).unwrap();
        let whole = whole.layer(0);
        // Of the forward pass steps over inputs, of the way back over outputs.
        for (transposed, panel, steps) in [(false, 1, 32..96), (false, 4, 0..128), (true, 2, 64..160), (true, 0, 32..64)] {
            fn side(transposed: bool, w: PackedRef<'_>) -> RightSide<'_> {
                if transposed { RightSide::Transposed(w) } else { RightSide::Weights(w) }
            }
            let words = |w: PackedRef<'_>| {
                let mut scratch = vec![0; steps.len() * PANEL];
                let block = side(transposed, w).block(Isa::detect(), panel, steps.clone(), &mut scratch);
                // SAFETY: a block has so many steps of whole panels.
                let step = |step| unsafe { std::slice::from_raw_parts(block.first.add(step * block.stride), PANEL * 4) };
                (0..steps.len()).flat_map(|at| step(at).to_vec()).collect::<Vec<u8>>()
            };
            let mut some = stack();
            let (mut bytes, base) = (0, whole.bytes.as_ptr().addr());
            for piece in side(transposed, whole).pieces(panel, steps.clone()).each() {
                let piece = piece.start - base..piece.end - base;
                bytes += piece.len();
                some.layer_mut(0).unwrap().bytes[piece.clone()].copy_from_slice(&whole.bytes[piece]);
            }
            let what = format!("{storage:?}, transposed: {transposed}, panel {panel}, steps {steps:?}");
            assert_eq!(bytes, whole.bytes.len() * steps.len() * PANEL / (k / 2 * n), "{what}");
            assert!(words(some.layer(0)) == words(whole), "{what}");
        }
    }
}

#[test]
fn what_a_tile_fetches_changes_no_bit() {
    for arithmetic in Arithmetic::available() {
        let TileKernel::Chains(chains) = TileKernel::new(arithmetic, DType::BF16) else { continue };
        if !chains.fetching.meanwhile {
            continue;
        }
        for (steps, rows) in [1, 17, 70].into_iter().flat_map(|steps| (1..=chains.tile_rows()).map(move |rows| (steps, rows))) {
            let (a, b) = (values::<bf16>(1, rows * steps * 2), values::<bf16>(2, steps * PANEL * 2));
            let product = |fetch: Fetch, accumulate: bool| {
                let mut c = vec![0.5f32; rows * PANEL];
                let tile = Tile {
                    steps,
                    a: a.as_ptr().cast(),
                    a_stride: steps * 4,
                    b: b.as_ptr().cast(),
                    b_stride: PANEL * 4,
                    c: c.as_mut_ptr(),
                    c_stride: PANEL,
                    columns: PANEL,
                    accumulate,
                    fetch,
                };
                // SAFETY: the operands have these rows and steps.
                unsafe { chains.block(rows, &tile) };
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let next = b.as_ptr().cast();
            let mut all = vec![Fetch::Own(next), Fetch::Next(next, Lines::One, &[])];
            // What widens has no hints.
            if !chains.fetching.streams {
                all.push(Fetch::Hints(next));
            }
            for (fetch, accumulate) in all.into_iter().flat_map(|fetch| [false, true].map(|accumulate| (fetch, accumulate))) {
                let expected = product(Fetch::Nothing, accumulate);
                assert!(product(fetch, accumulate) == expected, "{arithmetic}, {rows} rows of {steps} steps");
            }
        }
    }
}

#[test]
fn a_tile_fetches_of_its_own_what_pays_on_its_processor() {
    let plain = |rows, own, meanwhile| {
        let TileKernel::Chains(mut chains) = TileKernel::new(Isa::detect().into(), DType::F32) else { unreachable!() };
        chains.fetching = Fetching { own, meanwhile, streams: false };
        (chains.fetch(rows, std::ptr::null()), chains.chunks(rows, 64) > 0)
    };
    let none = std::ptr::null();
    for rows in [1, 4] {
        assert!(plain(rows, Own::Nothing, true) == (Fetch::Nothing, false));
        assert!(plain(rows, Own::Hints, true) == (Fetch::Hints(none), false));
        assert!(plain(rows, Own::EveryLine, true) == (Fetch::Own(none), true));
    }
    // Several tiles fetch what comes next, whatever one does alone.
    for own in [Own::Nothing, Own::Hints, Own::EveryLine] {
        assert!(plain(13, own, true) == (Fetch::Next(none, Lines::One, &[]), true));
        assert!(plain(13, own, false) == (Fetch::Nothing, false));
    }
}
