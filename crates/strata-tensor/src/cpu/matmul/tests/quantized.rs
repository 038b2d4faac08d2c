//! Products with weights in fewer bits.

use half::bf16;

use super::*;
use crate::cpu::isa::Numerics;

/// Weights of `k` inputs and `n` outputs in fewer bits, and the same weights dense, with so many rows. `steps`: how many of them there are from the least weight to the largest.
fn quantized_products_have_the_bits_of_dense_ones<T: Element>(
    pool: &Pool,
    (storage, steps): (WeightStorage, f32),
    (k, n): (usize, usize),
    rows: &[usize],
) {
    let w: Vec<T> = values(2, n * k);
    let format = WeightFormat { compute: T::DTYPE, storage };
    let mut quantized = PackedStack::zeros(1, k, n, format).unwrap();
    // In two parts, which meet within a panel.
    pack_rows(pool, Isa::detect(), &w[..70 * k], 0, &mut quantized.layer_mut(0).unwrap()).unwrap();
    pack_rows(pool, Isa::detect(), &w[70 * k..], 70, &mut quantized.layer_mut(0).unwrap()).unwrap();
    let rounded: Vec<T> = (0..n)
        .flat_map(|output| {
            let mut row = vec![0.0; k];
            unpack_row::<T>(quantized.layer(0), output, &mut row);
            row.into_iter().map(T::from_f32)
        })
        .collect();
    let largest = w.iter().fold(0.0f32, |largest, w| largest.max(w.to_f32().abs()));
    assert!(rounded.iter().zip(&w).all(|(a, b)| (a.to_f32() - b.to_f32()).abs() < largest / steps * 2.5));
    let dense = packed(pool, &rounded, k, n);
    for arithmetic in Arithmetic::available() {
        let matmul = Matmul::new(pool, arithmetic, T::DTYPE);
        for &m in rows {
            let (x, dy): (Vec<T>, Vec<T>) = (values(1, m * k), values(3, m * n));
            let run = |stack: &PackedStack| {
                let (mut y, mut added, mut dx) = (vec![7.0; m * n], vec![0.25; m * n], vec![7.0; m * k]);
                matmul.forward(all(&x, k), stack.layer(0), into(&mut y, n, false), &Addends::default()).unwrap();
                matmul.forward(all(&x, k), stack.layer(0), into(&mut added, n, true), &Addends::default()).unwrap();
                backward_input(&matmul, all(&dy, n), stack.layer(0), into(&mut dx, k, false), &Addends::default()).unwrap();
                (y, added, dx)
            };
            assert!(run(&quantized) == run(&dense), "{arithmetic} {format:?} {m} rows");
        }
    }
}

/// An order without such a kernel has the same bits, and decodes at a tenth of the speed.
#[test]
fn every_order_of_chains_of_avx512_has_a_kernel_for_a_few_rows_with_weights_in_fewer_bits() {
    for arithmetic in Arithmetic::available().into_iter().filter(|arithmetic| arithmetic.isa.has_avx512()) {
        if let TileKernel::Chains(chains) = TileKernel::new(arithmetic, DType::BF16) {
            assert!(chains.of_bytes.is_some() && chains.of_int4.is_some(), "{arithmetic}");
        }
    }
}

pub(super) const INT4: [WeightStorage; 3] =
    [WeightStorage::Int4(Int4Group::Of32), WeightStorage::Int4(Int4Group::Of64), WeightStorage::Int4(Int4Group::Of128)];

#[test]
fn products_with_weights_in_fewer_bits_have_the_bits_of_those_with_the_same_weights_dense() {
    let (pool, rows) = (Pool::new(3), [1, 2, 3, 4, 5, 6, 7, 70]);
    // Last lines of every length.
    let int4 = [330, 332, 334].into_iter().flat_map(|k| INT4.map(|storage| (storage, 15.0, k)));
    for (storage, steps, k) in [(WeightStorage::Int8, 255.0, 330)].into_iter().chain(int4) {
        quantized_products_have_the_bits_of_dense_ones::<f32>(&pool, (storage, steps), (k, 200), &rows);
        quantized_products_have_the_bits_of_dense_ones::<bf16>(&pool, (storage, steps), (k, 200), &rows);
    }
}

#[test]
fn pairs_of_panels_with_weights_in_fewer_bits_have_the_bits_of_those_with_the_same_weights_dense() {
    let (pool, rows, n) = (Pool::new(1), 97, 2 * PANEL * TASKS_PER_THREAD);
    if Isa::Avx512.is_available() {
        let matmul = Matmul::new(&pool, Arithmetic { isa: Isa::Avx512, numerics: Numerics::Fast }, DType::BF16);
        let TileKernel::Chains(chains) = matmul.kernel else { panic!("AVX-512 adds in chains") };
        assert!(matmul.pairs(&chains, rows, n).is_some(), "{rows} rows, {n} outputs");
    }
    for storage in [(WeightStorage::Int8, 255.0), (INT4[0], 15.0)] {
        quantized_products_have_the_bits_of_dense_ones::<bf16>(&pool, storage, (330, n), &[rows]);
    }
}

#[test]
fn rows_that_have_four_bits_are_stored_as_they_are_in_groups_of_theirs_and_smaller_ones() {
    let (b, n) = (crate::CpuBackend::with_isa(Isa::detect(), 2), 70);
    // Groups of one size, of one for each row, and a last group that is cut; zeros up to the largest, scales of eleven bits and both signs.
    for (k, in_file, storage) in [
        (256usize, 128, INT4[2]),
        (256, 128, INT4[0]),
        (192, 64, INT4[1]),
        (160, 32, INT4[0]),
        (130, 130, INT4[1]),
        (100, 128, INT4[2]),
        (100, 999, INT4[0]),
    ] {
        let groups = n * k.div_ceil(in_file);
        let draw = |key, i: usize, below: u32| (crate::random::uniform([key, 0], i as u64) * below as f32) as u8;
        let codes: Vec<u8> = (0..n * k).map(|i| draw(1, i, 16)).collect();
        let zeros: Vec<u8> = (0..groups).map(|i| draw(2, i, 16)).collect();
        let scales: Vec<f32> =
            (0..groups).map(|i| half::f16::from_f32(crate::random::normal([3, 0], i as u64)).to_f32()).collect();
        let rows = Int4Rows::new((k, in_file), &codes, &scales, &zeros).unwrap();
        let values = rows.to_f32_vec();
        for dtype in [DType::F32, DType::BF16] {
            let (quantized, dense) = (WeightFormat { compute: dtype, storage }, WeightFormat::from(dtype));
            for format in [quantized, dense] {
                let mut stack = b.packed(2, k, n + 3, format).unwrap();
                b.upload_int4_rows(&mut stack, 1, 2, rows).unwrap();
                let ids: Vec<u32> = (2..n as u32 + 2).collect();
                let mut back = b.scratch(&[n, k], DType::F32).unwrap();
                crate::Backend::embedding_packed(&b, stack.layer(1), &ids, &mut back).unwrap();
                let expected = b.to_f32_vec(b.tensor(&values, &[n, k], dtype).unwrap().as_ref()).unwrap();
                let back = b.to_f32_vec(back.as_ref()).unwrap();
                let differs = back.iter().zip(&expected).position(|(a, e)| a.to_bits() != e.to_bits());
                assert_eq!(differs, None, "{k} in groups of {in_file} as {format:?}");
                let refused = |stack: &mut _, layer, first| b.upload_int4_rows(stack, layer, first, rows).is_err();
                assert!(refused(&mut stack, 2, 0) && refused(&mut stack, 0, 4));
            }
        }
        let mut other = b.packed(1, k, n, WeightFormat { compute: DType::F32, storage: WeightStorage::Int8 }).unwrap();
        assert!(b.upload_int4_rows(&mut other, 0, 0, rows).unwrap_err().to_string().contains("Int8"));
        let mut narrow = b.packed(1, k - 1, n, DType::F32.into()).unwrap();
        assert!(b.upload_int4_rows(&mut narrow, 0, 0, rows).is_err());
    }
    let (codes, scales, zeros) = ([0; 96], [1.0; 3], [0; 3]);
    let rows = Int4Rows::new((96, 32), &codes, &scales, &zeros).unwrap();
    let mut wider = b.packed(1, 96, 1, WeightFormat { compute: DType::F32, storage: INT4[1] }).unwrap();
    assert!(b.upload_int4_rows(&mut wider, 0, 0, rows).is_err(), "groups of 32 are none of 64");
}

#[test]
fn a_weight_that_cannot_be_stored_in_fewer_bits_is_refused_by_its_value() {
    for storage in [WeightStorage::Int8, INT4[1]] {
        let mut stack = PackedStack::zeros(1, 3, 200, WeightFormat { compute: DType::F32, storage }).unwrap();
        let mut rows = vec![1.0f32; 100 * 3];
        rows[30 * 3 + 1] = f32::NEG_INFINITY;
        let refused = pack_rows(&Pool::new(2), Isa::detect(), &rows, 70, &mut stack.layer_mut(0).unwrap());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("a weight is -inf"), "{refused}");
    }
}
