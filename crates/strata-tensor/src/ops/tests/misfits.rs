//! What does not fit is an error, of every op that is not refused in a file of its own.

use super::*;

#[test]
fn what_does_not_fit_is_an_error() {
    let b = backend();
    let layer = Layer::random();
    let (f32s, bf16s) =
        (|shape: &[usize]| Tensor::zeros(shape, DType::F32), |shape: &[usize]| Tensor::zeros(shape, DType::BF16));
    let tape = || Tape::inference(&b);
    let var = |t: Tensor| tape().constant(t);
    let norm = |x, w: Tensor| tape().rms_norm(&var(x), w.as_ref(), 1e-6, DType::F32).is_err();
    assert!(norm(f32s(&[2, 5]), f32s(&[6])) && norm(f32s(&[2, 5]), bf16s(&[5])) && norm(bf16s(&[2, 5]), f32s(&[5])));
    assert!(norm(f32s(&[2, 0]), f32s(&[0])) && !norm(f32s(&[2, 5]), f32s(&[5])) && !norm(f32s(&[0, 5]), f32s(&[5])));

    let add = |x, y| tape().add(&var(x), var(y)).is_err();
    assert!(add(f32s(&[3, 2]), f32s(&[2, 2])) && add(f32s(&[2, 3]), f32s(&[3, 2])) && add(f32s(&[2, 2]), bf16s(&[2, 2])));

    let swiglu = |x| tape().swiglu(&var(x), DType::BF16).is_err();
    assert!(swiglu(f32s(&[2, 3])) && swiglu(bf16s(&[2, 4])) && !swiglu(f32s(&[2, 4])));

    let linear = |x, bias: &Tensor, change: &dyn Fn(&mut Vec<LoraGroup<'_>>)| {
        let mut groups = layer.groups().to_vec();
        change(&mut groups);
        let (weight, bias) = (layer.w.layer(0), Some(bias.as_ref()));
        tape().linear(&var(x), Linear { weight, bias, lora: groups.into() }).is_err()
    };
    let (x, bias) = (|| f32s(&[9, 7]), f32s(&[11]));
    assert!(!linear(x(), &bias, &|_| ()));
    assert!(
        linear(f32s(&[9, 8]), &bias, &|_| ())
            && linear(bf16s(&[9, 7]), &bias, &|_| ())
            && linear(f32s(&[8, 7]), &bias, &|_| ())
    );
    assert!(linear(x(), &f32s(&[10]), &|_| ()) && linear(x(), &bf16s(&[11]), &|_| ()));
    assert!(linear(x(), &bias, &|g| g[2].projections[0].first_column = 3));
    assert!(linear(x(), &bias, &|g| g[2].projections[0].first_column = 12));
    assert!(linear(x(), &bias, &|g| g[2].sequences = Arc::from([3..9])));
    assert!(linear(x(), &bias, &|g| g[0].projections[0].a = g[2].projections[0].a));
    let (narrow, none) = (packed(&[0.0; 21], 7, 3, DType::BF16), PackedStack::zeros(1, 7, 0, DType::F32));
    let from_none = PackedStack::zeros(1, 0, 5, DType::F32);
    assert!(linear(x(), &bias, &|g| g[0].projections[0].a = packed_forever(&narrow)));
    assert!(linear(x(), &bias, &|g| {
        (g[0].projections[0].a, g[0].projections[0].b) = (packed_forever(&none), packed_forever(&from_none));
    }));

    let norms = [f32s(&[6]), f32s(&[6])];
    let attention =
        |x: Tensor, spans: &[AttentionSpan<'static>], change: &dyn Fn(&mut AttentionInput<'_>), pages: Option<KvPages>| {
            let mut input = attention_input(&b, GEOMETRY, &norms, spans);
            change(&mut input);
            let mut pages = pages;
            let kv = pages.as_mut().map_or(KvAccess::None, KvAccess::Cache);
            tape().attention(&var(x), &input, kv, DType::F32).is_err()
        };
    let qkv = || f32s(&[8, GEOMETRY.qkv_width()]);
    let cached = |tokens, past, pages| AttentionSpan { tokens, past, pages };
    let cache = || Some(KvPages::new(4, 2, 6, DType::F32));
    let keep = |_: &mut AttentionInput<'_>| ();
    assert!(!attention(qkv(), &[whole(0..8)], &keep, None));
    assert!(!attention(qkv(), &[cached(0..6, 60, &[0, 3]), cached(6..8, 70, &[0, 1])], &keep, cache()));
    assert!(attention(f32s(&[8, 47]), &[whole(0..8)], &keep, None));
    let queries = |tokens: Range<usize>, past, cache: Option<KvPages>| {
        attention(
            qkv(),
            &[cached(0..6, 60, &[0, 3]), cached(6..8, 70, &[0, 1])],
            &|input| input.queries = Some([cached(tokens.clone(), past, &[0, 3])].into()),
            cache,
        )
    };
    assert!(!queries(5..6, 65, cache()));
    assert!(
        queries(5..7, 65, cache()) && queries(5..6, 64, cache()) && queries(6..7, 70, cache()) && queries(5..5, 65, cache())
    );
    assert!(attention(qkv(), &[whole(0..8)], &|input| input.queries = Some([whole(0..8)].into()), None));
    for spans in [&[whole(0..7)][..], &[whole(0..5), whole(4..8)], &[whole(4..8), whole(0..4)], &[whole(0..9)], &[]] {
        assert!(attention(qkv(), spans, &keep, None), "{spans:?}");
    }
    assert!(attention(qkv(), &[cached(0..8, 1, &[])], &keep, None));
    for pages in [&[][..], &[0], &[0, 4]] {
        assert!(attention(qkv(), &[cached(0..8, KV_PAGE_TOKENS - 1, pages)], &keep, cache()), "{pages:?}");
    }
    assert!(attention(qkv(), &[cached(0..4, 0, &[2]), cached(4..8, 0, &[2])], &keep, cache()));
    for pages in [KvPages::new(4, 2, 8, DType::F32), KvPages::new(4, 1, 6, DType::F32), KvPages::new(4, 2, 6, DType::BF16)] {
        assert!(attention(qkv(), &[cached(0..8, 0, &[1])], &keep, Some(pages)));
    }
    for (heads, kv_heads, head_dim) in [(3, 2, 6), (0, 4, 6), (8, 0, 6), (4, 2, 0)] {
        let change = move |i: &mut AttentionInput<'_>| {
            let values = KvValues::Own(head_dim);
            i.geometry = AttentionGeometry { heads, kv_heads, head_dim, values, ..GEOMETRY };
        };
        let change = move |i: &mut AttentionInput<'_>| {
            change(i);
            i.layout = QkvLayout::fused(&i.geometry);
        };
        let width = (heads + 2 * kv_heads) * head_dim;
        assert!(attention(f32s(&[8, width]), &[whole(0..8)], &change, None));
    }
    assert!(attention(qkv(), &[whole(0..8)], &|i| i.rotary = Rc::new(b.rotary(&[0; 7], &[1.0; 3], 1.0).unwrap()), None));
    assert!(attention(qkv(), &[whole(0..8)], &|i| i.rotary = Rc::new(b.rotary(&[0; 8], &[1.0; 4], 1.0).unwrap()), None));
    type Change = fn(&mut QkvLayout);
    let changes: [(bool, Change); 12] = [
        (true, |_| ()),
        (true, |l| (l.k.first, l.v.first) = (l.v.first, l.k.first)),
        (true, |l| l.rotary_style = RotaryStyle::Interleaved),
        (false, |l| l.rotary_dim = 5),
        (false, |l| l.rotary_dim = 8),
        (false, |l| l.rotary_dim = 4),
        (true, |l| l.rotary_dim = 0),
        (false, |l| l.width = 54),
        (false, |l| l.v.first = l.k.first),
        (false, |l| l.q.stride = usize::MAX),
        (false, |l| l.q.first = usize::MAX),
        (false, |l| l.gate = Some(HeadColumns { first: 48, stride: 6 })),
    ];
    for (i, (is_fine, change)) in changes.into_iter().enumerate() {
        assert_eq!(!attention(qkv(), &[whole(0..8)], &|i| change(&mut i.layout), None), is_fine, "change {i}");
    }
    assert!(attention(qkv(), &[whole(0..8)], &|i| i.geometry.window = Some(0), None));
    assert!(!attention(qkv(), &[whole(0..8)], &|i| i.geometry.window = Some(1), None));
    for (shape, dtype, is_refused) in [(5, DType::F32, true), (4, DType::BF16, true), (4, DType::F32, false)] {
        let sinks: &'static Tensor = Box::leak(Box::new(Tensor::zeros(&[shape], dtype)));
        assert_eq!(attention(qkv(), &[whole(0..8)], &|i| i.sinks = Some(sinks.as_ref()), None), is_refused);
    }
    let wide = f32s(&[8]);
    let wide: &'static Tensor = Box::leak(Box::new(wide));
    assert!(attention(qkv(), &[whole(0..8)], &|i| i.norms = Some([wide.as_ref(), wide.as_ref()]), None));

    let mut recording = Tape::recording(&b);
    let leaf = recording.push(Rc::new(qkv()), |_, _| Ok(()));
    let input = attention_input(&b, GEOMETRY, &norms, &[cached(0..8, 0, &[1])]);
    assert!(recording.attention(&leaf, &input, KvAccess::Cache(&mut cache().unwrap()), DType::F32).is_err());
    assert!(recording.backward(leaf, f32s(&[8, 1]), &mut Nowhere).is_err());

    let unembed = |x: Tensor, ids: &[u32], offsets: &[usize], lora: &[LoraGroup<'_>]| {
        logprobs(&b, &x, (layer.w.layer(0), lora), &[0..9], LogprobTargets { ids, offsets }, None).is_err()
    };
    let groups = layer.groups();
    let offsets = [0, 1, 1, 1, 1, 1, 1, 1, 1, 2];
    assert!(!unembed(x(), &[3, 10], &offsets, &groups));
    assert!(unembed(x(), &[3, 11], &offsets, &groups) && unembed(f32s(&[9, 6]), &[3, 10], &offsets, &groups));
    assert!(unembed(f32s(&[8, 7]), &[3, 10], &offsets[1..], &groups[..2]) && unembed(x(), &[3], &offsets, &groups));
    assert!(unembed(x(), &[3, 10], &offsets[..9], &groups) && unembed(x(), &[3, 10], &[0, 3, 1, 1, 1, 1, 1, 1, 1, 2], &groups));
    assert!(unembed(f32s(&[3, 7]), &[], &[0; 4], &groups));
    let read = |rows: &[usize], requests: usize, id: u32| {
        let requests = vec![RowRequest { ids: vec![id], ..RowRequest::default() }; requests];
        read_logits(&b, &x(), layer.w.layer(0), &groups, rows, &requests, LOGITS_CHUNK_BYTES).is_err()
    };
    assert!(read(&[9], 1, 0) && !read(&[8, 0, 8], 3, 10) && !read(&[], 0, 0));
    assert!(read(&[0, 8], 1, 0) && read(&[0, 8], 2, 11));

    let step =
        AdamwStep { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, gradient_scale: 1.0, step: 1 };
    let adamw = |w: DType, m: usize| {
        let mut moments = [f32s(&[m]), f32s(&[5]), f32s(&[5])];
        let [m, v, gradient] = &mut moments;
        b.adamw(&step, &mut Tensor::zeros(&[5], w), gradient, m, v).is_err()
    };
    assert!(adamw(DType::BF16, 5) && adamw(DType::F32, 4) && !adamw(DType::F32, 5));
    assert!(b.sum_squares(&bf16s(&[3])).is_err());
}
