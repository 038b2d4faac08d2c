//! Windows, and sinks.

use super::*;

#[test]
fn nothing_before_the_window_reaches_a_token_be_it_infinite_or_of_a_page_that_is_gone() {
    let len = 230;
    let values = [KvValues::Own(20), KvValues::PrefixOfKey(16)];
    let cases = [3, 64, 70].into_iter().flat_map(|w| DTYPES.map(|d| (w, d))).flat_map(|(w, d)| values.map(|v| (w, d, v)));
    for (window, dtype, values) in cases {
        let mut layer = Layer::new((1, 2, 20), Some(window), false);
        layer.g.values = values;
        let g = layer.g;
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let finite = attend_whole(&b, &layer, &qkv, &packed(&[len])).map(|t| bits(&t));
            for bad in [0, 5, 63, 64, 100, 127] {
                let spoil = |t: &Tensor| {
                    let mut values = t.to_f32_vec();
                    values[..(bad + 1) * g.head_dim].fill(f32::NAN);
                    values[bad * g.head_dim] = f32::INFINITY;
                    Tensor::from_f32(&values, t.shape().dims(), dtype).unwrap()
                };
                let spoiled = Qkv { q: qkv.q.clone(), k: spoil(&qkv.k), v: qkv.v.as_ref().map(spoil) };
                let whole = attend_whole(&b, &layer, &spoiled, &packed(&[len])).map(|t| bits(&t));
                for (whole, finite) in whole.iter().zip(&finite) {
                    let from = (bad + window) * finite.len() / len;
                    assert_eq!(whole[from..], finite[from..], "{isa} {dtype} window {window}: NaN up to {bad}");
                    assert!(whole[..from].iter().all(|&b| f32::from_bits(b).is_nan()), "those that see it have it");
                }
            }
            // A decode step looks at no page before its window: the number of one that is not there would be out of bounds.
            let past = 200;
            let first_page = g.first_visible(past) / KV_PAGE_TOKENS;
            let mut pages = poisoned_pages(&g, 4, dtype);
            let write = AttentionSpan { tokens: 0..past, past: 0, pages: &[0, 1, 2, 3] };
            b.write_kv(&part(&qkv, 0..past), &g, &[write], &mut pages).unwrap();
            let table: Vec<u32> = (0..4).map(|page| if (page as usize) < first_page { u32::MAX } else { page }).collect();
            let step = AttentionSpan { tokens: 0..1, past, pages: &table };
            let results = attend(&b, &layer, &part(&qkv, past..past + 1), &[step], &mut pages);
            for (result, finite) in results.iter().zip(&finite) {
                let row = finite.len() / len;
                assert_eq!(bits(result), finite[past * row..(past + 1) * row], "{isa} {dtype} window {window}");
            }
        }
    }
}

#[test]
fn a_window_as_long_as_the_sequence_and_a_sink_of_no_weight_change_no_bit() {
    let (lengths, shape) = ([300, 65], (1, 2, 16));
    let sequences = packed(&lengths);
    for dtype in DTYPES {
        let plain = Layer::plain(shape);
        let qkv = random_qkv(&plain.g, 365, dtype);
        let dout = random_dout(&plain.g, qkv.q.rows());
        let b = CpuBackend::with_isa(Isa::detect(), 2);
        let all = |layer: &Layer| {
            let forward = attend_whole(&b, layer, &qkv, &sequences).map(|t| bits(&t));
            (forward, go_back(&b, layer, &qkv, &dout, &sequences).iter().map(bits).collect::<Vec<_>>())
        };
        let no_weight = Tensor::from_f32(&[f32::NEG_INFINITY; 2], &[2], DType::F32).unwrap();
        for window in [300, 301, usize::MAX] {
            let layer = Layer { sinks: Some(no_weight.clone()), ..Layer::new(shape, Some(window), false) };
            assert!(all(&layer) == all(&plain), "{dtype} window {window}");
        }
        assert!(all(&Layer::new(shape, Some(299), false)) != all(&plain));
    }
}

#[test]
fn a_sink_that_outweighs_all_keys_leaves_nothing_of_them() {
    let layer = Layer { sinks: Some(Tensor::from_f32(&[300.0, 0.0], &[2], DType::F32).unwrap()), ..Layer::plain((1, 2, 16)) };
    let qkv = random_qkv(&layer.g, 70, DType::F32);
    let [out, log_normalizers] =
        attend_whole(&CpuBackend::with_isa(Isa::detect(), 1), &layer, &qkv, &packed(&[70])).map(|t| t.to_f32_vec());
    for (out, log_normalizers) in out.chunks(32).zip(log_normalizers.chunks(2)) {
        assert!(out[..16].iter().all(|&v| v == 0.0) && out[16..].iter().all(|&v| v != 0.0 && v.is_finite()));
        assert!(log_normalizers[0] == 300.0 && log_normalizers[1] > 0.0);
    }
}
