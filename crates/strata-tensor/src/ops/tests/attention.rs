//! Attention through norms and rotation: gradients, layouts, windows, and bits.

use super::*;

#[test]
fn the_gradient_of_attention_through_norms_and_rotation_is_that_of_finite_differences() {
    let b = backend();
    let norms = [tensor(&[6], DType::F32, 5), tensor(&[6], DType::F32, 6)];
    let qkv = tensor(&[8, GEOMETRY.qkv_width()], DType::F32, 1);
    let mut input = attention_input(&b, GEOMETRY, &norms, &[whole(0..5), whole(5..5), whole(5..8)]);
    check_gradient(&b, &qkv, |tape, x| tape.attention(x, &input, KvAccess::None, DType::F32));
    input.norms = None;
    check_gradient(&b, &qkv, |tape, x| tape.attention(x, &input, KvAccess::None, DType::F32));
    let sinks = tensor(&[4], DType::F32, 7);
    (input.geometry.window, input.sinks) = (Some(2), Some(sinks.as_ref()));
    check_gradient(&b, &qkv, |tape, x| tape.attention(x, &input, KvAccess::None, DType::F32));
}

#[test]
fn gated_attention_of_other_layouts_is_that_of_the_plain_one_and_a_product() {
    let b = backend();
    let (d, g) = (GEOMETRY.head_dim, GEOMETRY);
    let norms = [tensor(&[6], DType::F32, 5), tensor(&[6], DType::F32, 6)];
    let spans = [whole(0..5), whole(5..8)];
    let layout = QkvLayout::gated(&g, 4);
    let qkv = tensor(&[8, layout.width], DType::F32, 1);
    let mut input = attention_input(&b, g, &norms, &spans);
    input.rotary = Rc::new(b.rotary(&[0, 1, 2, 3, 4, 0, 1, 2], &frequencies(4), 1.0).unwrap());
    input.layout = layout;
    check_gradient(&b, &qkv, |tape, x| tape.attention(x, &input, KvAccess::None, DType::F32));
    for dtype in [DType::F32, DType::BF16] {
        let run = |input: &AttentionInput<'_>, qkv: &[f32]| {
            let qkv = Tensor::from_f32(qkv, &[8, input.layout.width], DType::F32).unwrap();
            poison_recycled(&[8, input.layout.width], dtype);
            go_back(&b, &qkv, &mut Nowhere, |tape, x| tape.attention(x, input, KvAccess::None, dtype))
        };
        // The gated projection without its gates is the plain one.
        let (gated, dgated) = run(&input, &qkv.to_f32_vec());
        let (mut plain_columns, mut gates) = (Vec::<f32>::new(), Vec::<f32>::new());
        for row in qkv.to_f32_vec().chunks(layout.width) {
            let (queries, rest) = row.split_at(2 * g.heads * d);
            queries.chunks(2 * d).for_each(|head| plain_columns.extend(&head[..d]));
            queries.chunks(2 * d).for_each(|head| gates.extend(&head[d..]));
            plain_columns.extend(rest);
        }
        let plain_layout = QkvLayout { rotary_dim: 4, ..QkvLayout::fused(&g) };
        let plain = AttentionInput { layout: plain_layout, ..input.clone() };
        let (attended, _) = run(&plain, &plain_columns);
        let tolerance = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
        let product = attended.to_f32_vec().into_iter().zip(&gates).map(|(a, &gate)| a as f64 / (1.0 + (-gate as f64).exp()));
        assert_close(&gated.to_f32_vec(), &product.collect::<Vec<_>>(), tolerance, "gated");
        assert!(dgated.iter().all(|v| v.is_finite()));
        // Gates so open that they are 1 leave the bits of the plain gradient.
        let mut open = qkv.to_f32_vec();
        for row in open.chunks_mut(layout.width) {
            row[..2 * g.heads * d].chunks_mut(2 * d).for_each(|head| head[d..].fill(100.0));
        }
        let ((gated, dgated), (attended, dplain)) = (run(&input, &open), run(&plain, &plain_columns));
        assert_eq!(bits(&gated), bits(&attended));
        for (dgated, dplain) in dgated.chunks(layout.width).zip(dplain.chunks(plain_layout.width)) {
            let heads = dgated[..2 * g.heads * d].chunks(2 * d);
            assert!(heads.clone().all(|head| head[d..].iter().all(|&g| g == 0.0)));
            let without = heads.flat_map(|head| &head[..d]).chain(&dgated[2 * g.heads * d..]);
            assert!(without.eq(dplain));
        }
    }
}

#[test]
fn gated_attention_with_sinks_in_a_window_has_the_same_bits_far_away() {
    let g = AttentionGeometry { window: Some(3), ..GEOMETRY };
    let run = |b: &dyn Backend| {
        let here = |shape: &[usize], key| b.tensor(&normal(shape.iter().product(), key), shape, DType::F32).unwrap();
        let (norms, sinks) = ([here(&[6], 5), here(&[6], 6)], here(&[4], 7));
        let layout = QkvLayout { rotary_style: RotaryStyle::Interleaved, ..QkvLayout::gated(&g, 4) };
        let input = AttentionInput {
            geometry: g,
            layout,
            norms: Some([norms[0].as_ref(), norms[1].as_ref()]),
            sinks: Some(sinks.as_ref()),
            rotary: Rc::new(b.rotary(&[0, 1, 2, 3, 4, 0, 1, 2], &frequencies(4), 1.0).unwrap()),
            spans: [whole(0..5), whole(5..8)].into(),
            queries: None,
        };
        let slot = Rc::new(RefCell::new(Vec::new()));
        let mut tape = Tape::recording(b);
        let kept = slot.clone();
        let x = tape.push(Rc::new(here(&[8, layout.width], 1)), move |pass, dx| {
            *kept.borrow_mut() = pass.backend.to_f32_vec(dx.as_ref().as_ref())?;
            Ok(())
        });
        let y = tape.attention(&x, &input, KvAccess::None, DType::F32).unwrap();
        let out = b.to_f32_vec(y.value().as_ref()).unwrap();
        tape.backward(y, here(&[8, 24], 99), &mut Nowhere).unwrap();
        (out, slot.take())
    };
    let near = run(&backend());
    assert!(near.1.iter().all(|&v| v != 0.0) && near.1.len() == 8 * 72);
    assert_eq!(run(&RemoteBackend::new(backend())), near);
}

#[test]
fn attention_of_queries_keys_and_values_apart_has_the_gradient_of_finite_differences_by_each() {
    let b = backend();
    let spans: Rc<[AttentionSpan<'static>]> = [whole(0..5), whole(5..8)].into();
    for (values, v_width) in [(KvValues::Own(5), 2 * 5), (KvValues::PrefixOfKey(4), 0)] {
        let sight = AttentionSight {
            geometry: AttentionGeometry { values, ..GEOMETRY },
            sinks: None,
            spans: spans.clone(),
            queries: None,
        };
        let all = [tensor(&[8, 4, 6], DType::F32, 1), tensor(&[8, 2, 6], DType::F32, 2), tensor(&[8, 10], DType::F32, 3)];
        let attend =
            |tape: &mut Tape<'_>, [q, k, v]: [Var; 3]| tape.attend(q, k, (v_width > 0).then_some(v), &sight, KvAccess::None);
        for which in (0..3).filter(|&which| which < 2 || v_width > 0) {
            check_gradient(&b, &all[which], |tape, x| {
                let inputs = std::array::from_fn(|i| if i == which { x.clone() } else { tape.constant(all[i].clone()) });
                attend(tape, inputs)
            });
        }
        let refused = |change: &dyn Fn(&mut AttentionSight<'_>, &mut Vec<Tensor>)| {
            let (mut sight, mut all) = (sight.clone(), all.to_vec());
            change(&mut sight, &mut all);
            let mut tape = Tape::inference(&b);
            let [q, k, v] = [0, 1, 2].map(|i| tape.constant(all[i].clone()));
            tape.attend(q, k, (v_width > 0).then_some(v), &sight, KvAccess::None).is_err()
        };
        assert!(!refused(&|_, _| ()));
        for which in (0..3).filter(|&which| which < 2 || v_width > 0) {
            assert!(refused(&|_, all| all[which] = Tensor::zeros(&[8, 7], DType::F32)));
            assert!(refused(&|_, all| all[which] = Tensor::zeros(&[7, all[which].shape().row_len()], DType::F32)));
            assert!(refused(&|_, all| all[which] = Tensor::zeros(all[which].shape().dims(), DType::BF16)));
        }
        assert!(refused(&|s, _| s.spans = [whole(0..7)].into()));
        assert!(refused(&|s, _| {
            let own = KvValues::Own(4);
            s.geometry.values = if s.geometry.values == KvValues::Own(5) { KvValues::PrefixOfKey(5) } else { own };
        }));
        let sinks: &'static Tensor = Box::leak(Box::new(Tensor::zeros(&[3], DType::F32)));
        assert!(refused(&|s, _| s.sinks = Some(sinks.as_ref())));
    }
    let prefix = AttentionGeometry { values: KvValues::PrefixOfKey(6), ..GEOMETRY };
    let norms = [tensor(&[6], DType::F32, 5), tensor(&[6], DType::F32, 6)];
    let input = attention_input(&b, prefix, &norms, &[whole(0..8)]);
    let mut tape = Tape::inference(&b);
    let qkv = tape.constant(Tensor::zeros(&[8, input.layout.width], DType::F32));
    assert!(tape.attention(&qkv, &input, KvAccess::None, DType::F32).is_err(), "a fused projection has values of its own");
}

#[test]
fn attention_has_the_same_bits_recorded_cached_and_among_recycled_nans() {
    let b = backend();
    let g = AttentionGeometry {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        values: KvValues::Own(64),
        scale: 0.125,
        eps: 1e-6,
        window: None,
        sees: Sight::Before,
    };
    let norms = [tensor(&[64], DType::F32, 5), tensor(&[64], DType::F32, 6)];
    let (first, second) = (70, 31);
    let qkv = tensor(&[first + second, g.qkv_width()], DType::F32, 1);
    for dtype in [DType::F32, DType::BF16] {
        let input = attention_input(&b, g, &norms, &[whole(0..first), whole(first..first + second)]);
        let recorded = || go_back(&b, &qkv, &mut Nowhere, |tape, x| tape.attention(x, &input, KvAccess::None, dtype));
        let (out, dx) = recorded();
        poison_recycled(&[3 * b.kv_page_bytes(g.kv_layout(), dtype) / dtype.size_bytes()], dtype);
        for heads in [4, 2] {
            poison_recycled(&[first + second, heads, 64], DType::F32);
            poison_recycled(&[first + second, heads, 64], DType::BF16);
        }
        poison_recycled(&[first + second, g.qkv_width()], dtype);
        let (again, dx_again) = recorded();
        assert_eq!((bits(&out), &dx), (bits(&again), &dx_again));
        assert!(dx.iter().all(|v| v.is_finite()));

        let spans = [
            AttentionSpan { tokens: 0..first, past: 0, pages: &[3, 1] },
            AttentionSpan { tokens: first..first + second, past: 0, pages: &[2] },
        ];
        let mut pages = KvPages::new(4, 2, 64, dtype);
        let mut tape = Tape::inference(&b);
        let x = tape.constant(qkv.clone());
        let cached = attention_input(&b, g, &norms, &spans);
        let all = tape.attention(&x, &cached, KvAccess::Cache(&mut pages), dtype).unwrap();
        assert_eq!(bits(&out), bits(all.value()));
        // Some of the queries alone find the same, and leave as much behind.
        let mut other_pages = KvPages::new(4, 2, 64, dtype);
        let part = AttentionSpan { tokens: 65..68, past: 65, ..spans[0].clone() };
        let some = AttentionInput { queries: Some(Rc::from([part, spans[1].clone()])), ..cached.clone() };
        let some = tape.attention(&x, &some, KvAccess::Cache(&mut other_pages), dtype).unwrap();
        let of = |y: &Tensor, rows: Range<usize>| bits(y)[rows.start * g.out_width()..rows.end * g.out_width()].to_vec();
        for rows in [65..68, first..first + second] {
            assert_eq!(of(some.value(), rows.clone()), of(&out, rows));
        }
        let next = tensor(&[1, g.qkv_width()], DType::F32, 2);
        let then = |pages: &mut KvPages| {
            let one = [AttentionSpan { tokens: 0..1, past: first, pages: &[3, 1] }];
            let (x, input) = (Tape::inference(&b).constant(next.clone()), attention_input(&b, g, &norms, &one));
            bits(Tape::inference(&b).attention(&x, &input, KvAccess::Cache(pages), dtype).unwrap().value())
        };
        assert_eq!(then(&mut pages), then(&mut other_pages));
    }
}
