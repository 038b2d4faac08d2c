//! Attention where every token sees all of its sequence.

use super::*;
use crate::Numerics;

/// Heads as encoders of images have them, and some that share keys.
const SHAPES: [(usize, usize, usize); 4] = [(2, 1, 72), (3, 1, 16), (1, 1, 10), (1, 3, 20)];
/// Around the edges of pages, of tiles and of splits of keys.
const WHOLE_LENGTHS: [usize; 9] = [1, 2, 64, 65, 130, 511, 512, 513, 1101];

fn seeing_all(shape: (usize, usize, usize), with_sinks: bool) -> Layer {
    let mut layer = Layer::new(shape, None, with_sinks);
    layer.g.sees = Sight::Whole;
    layer
}

#[test]
fn attention_to_whole_sequences_is_softmax_attention_on_every_instruction_set() {
    for (i, dtype) in (0..SHAPES.len()).flat_map(|i| DTYPES.map(|dtype| (i, dtype))) {
        assert_is_softmax_attention(&seeing_all(SHAPES[i], i == 3), dtype, &WHOLE_LENGTHS);
    }
}

#[test]
fn a_sequence_that_sees_itself_has_the_same_bits_alone_in_company_and_on_any_number_of_threads() {
    let lengths = [130, 33, 1101, 512];
    for (shape, dtype) in [(2, 1, 72), (1, 1, 10)].into_iter().flat_map(|shape| DTYPES.map(|dtype| (shape, dtype))) {
        let (layer, sequences) = (seeing_all(shape, false), packed(&lengths));
        let qkv = random_qkv(&layer.g, lengths.iter().sum(), dtype);
        let mut fused: Option<Vec<u32>> = None;
        for isa in Arithmetic::available() {
            let company = attend_whole(&CpuBackend::with_isa(isa, 1), &layer, &qkv, &sequences);
            // Of few tiles the splits are work for many threads; of many, and on one thread, a tile goes through them by itself.
            for threads in [1, 16] {
                let b = CpuBackend::with_isa(isa, threads);
                for s in &sequences {
                    let alone = attend_whole(&b, &layer, &part(&qkv, s.clone()), &packed(&[s.len()]));
                    for (alone, company) in alone.iter().zip(&company) {
                        let same = bits(alone) == bits(&rows(company, s.clone()));
                        assert!(same, "{isa} {dtype} {shape:?} {s:?} on {threads} threads");
                    }
                }
            }
            // Products of bf16 have an order of their own on each machine, unless it is asked for.
            if isa.isa != Isa::Portable && (dtype == DType::F32 || isa.numerics == Numerics::Portable) {
                let bits = bits(&company[0]);
                assert!(fused.get_or_insert_with(|| bits.clone()) == &bits, "{isa} {dtype} {shape:?}");
            }
        }
    }
}

#[test]
fn an_infinity_reaches_all_of_its_sequence_and_nobody_else() {
    let lengths = [70, 600, 33];
    let (layer, sequences) = (seeing_all((1, 1, 10), false), packed(&lengths));
    for dtype in DTYPES {
        let qkv = random_qkv(&layer.g, lengths.iter().sum(), dtype);
        for (isa, bad) in Arithmetic::available().into_iter().flat_map(|isa| [70, 134, 669].map(|bad| (isa, bad))) {
            let b = CpuBackend::with_isa(isa, 2);
            let [finite, _] = attend_whole(&b, &layer, &qkv, &sequences);
            let own = qkv.v.as_ref().expect("values of their own");
            let mut v = own.to_f32_vec();
            v[bad * 10..][..10].fill(f32::INFINITY);
            let v = Some(Tensor::from_f32(&v, own.shape().dims(), dtype).unwrap());
            let spoiled = Qkv { q: qkv.q.clone(), k: qkv.k.clone(), v };
            let [out, _] = attend_whole(&b, &layer, &spoiled, &sequences);
            for s in [&sequences[0], &sequences[2]] {
                assert_eq!(bits(&rows(&out, s.clone())), bits(&rows(&finite, s.clone())), "{isa} {dtype}");
            }
            let of_it = rows(&out, sequences[1].clone()).to_f32_vec();
            assert!(of_it.iter().all(|v| !v.is_finite()), "{isa} {dtype}: all see the infinity at {bad}");
        }
    }
}

#[test]
fn attention_to_whole_sequences_has_no_window() {
    let b = CpuBackend::with_isa(Isa::detect(), 1);
    let g = seeing_all((1, 1, 16), false).g;
    assert!(b.check_attention(&g).is_ok());
    let refused = b.check_attention(&AttentionGeometry { window: Some(7), ..g }).unwrap_err().to_string();
    assert!(refused.contains('7') && refused.contains("window"), "{refused}");
}
