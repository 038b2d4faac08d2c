//! Layers whose result goes into the next op at once.

use super::*;

/// A layer with a bias and one or two adapters, each with a pair for each part of its columns.
struct Wide {
    inputs: usize,
    /// First column and columns of each part.
    parts: Vec<(usize, usize)>,
    weight: PackedStack,
    bias: Tensor,
    /// Of each adapter those of all parts.
    pairs: Vec<Vec<[PackedStack; 2]>>,
}

impl Wide {
    fn new(inputs: usize, widths: &[usize]) -> Self {
        Wide::of_ranks(inputs, widths, &[3, 8])
    }

    fn of_ranks(inputs: usize, widths: &[usize], ranks: &[usize]) -> Self {
        let outputs = widths.iter().sum();
        let parts: Vec<_> =
            widths.iter().scan(0, |next, &width| Some((std::mem::replace(next, *next + width), width))).collect();
        let pack =
            |seed: u64, inputs: usize, outputs: usize| packed(&normal(inputs * outputs, seed), inputs, outputs, DType::BF16);
        let pairs = (10..).step_by(10).zip(ranks).map(|(seed, &rank)| {
            let pair = |(seed, &(_, width)): (u64, &(usize, usize))| [pack(seed, inputs, rank), pack(seed + 100, rank, width)];
            (seed..).zip(&parts).map(pair).collect()
        });
        let pairs = pairs.collect();
        Wide { inputs, weight: pack(1, inputs, outputs), bias: tensor(&[outputs], DType::F32, 2), parts, pairs }
    }

    /// All tokens of one adapter; of two all but some between theirs.
    fn linear(&self, tokens: usize) -> Linear<'_> {
        let projection = |adapter: usize, part: usize| LoraProjection {
            a: self.pairs[adapter][part][0].layer(0),
            b: self.pairs[adapter][part][1].layer(0),
            scale: 0.5,
            first_column: self.parts[part].0,
            site: LoraSite { group: adapter, module: part, layer: 0 },
        };
        let group = |adapter: usize, tokens: Range<usize>| LoraGroup {
            tokens: tokens.clone(),
            sequences: [tokens].into(),
            projections: (0..self.parts.len()).map(|part| projection(adapter, part)).collect(),
        };
        let groups = match self.pairs.len() {
            1 => vec![group(0, 0..tokens)],
            _ => vec![group(0, 0..tokens.div_ceil(3)), group(1, tokens / 2..tokens)],
        };
        let lora = groups.into_iter().filter(|group| !group.tokens.is_empty()).collect();
        Linear { weight: self.weight.layer(0), bias: Some(self.bias.as_ref()), lora }
    }
}

/// Of each arithmetic one, and AMX where it is or is emulated.
fn arithmetics() -> Vec<Arithmetic> {
    let portable = Arithmetic { isa: Isa::detect(), numerics: crate::Numerics::Portable };
    let amx = [Isa::Amx].into_iter().filter(|isa| isa.is_available()).map(Arithmetic::from);
    amx.chain([Isa::detect().into(), portable]).collect()
}

/// Runs `check` on all of these, with up to three threads.
fn on_backends(check: impl Fn(&CpuBackend, &str)) {
    for (arithmetic, threads) in arithmetics().into_iter().flat_map(|a| [1, 2, 3].map(|threads| (a, threads))) {
        check(&CpuBackend::with_isa(arithmetic, threads), &format!("{arithmetic:?}, {threads} threads"));
    }
}

/// The bits of `op` where nothing goes back.
fn there<'a>(b: &'a CpuBackend, x: &Tensor, op: impl Fn(&mut Tape<'a>, &Var) -> Result<Var>) -> Vec<u32> {
    let mut tape = Tape::inference(b);
    let x = tape.constant(x.clone());
    bits(op(&mut tape, &x).unwrap().value())
}

/// Those of it, of the gradient of `x` and of those of the pairs.
fn there_and_back<'a>(
    b: &'a CpuBackend,
    layer: &Wide,
    x: &Tensor,
    op: impl Fn(&mut Tape<'a>, &Var) -> Result<Var>,
) -> [Vec<u32>; 3] {
    let mut gradients = Gradients::default();
    for p in layer.linear(x.rows()).lora.iter().flat_map(|group| &group.projections) {
        gradients.open(p.site, p.a.out_features(), layer.inputs, p.b.out_features());
    }
    let (y, dx) = go_back(b, x, &mut gradients, op);
    let of_pairs = (0..layer.pairs.len()).flat_map(|group| gradients.of_group(group)).map(f32::to_bits).collect();
    [bits(&y), dx.into_iter().map(f32::to_bits).collect(), of_pairs]
}

fn gated<'a>(layer: &'a Wide, dtype: DType, at_once: bool) -> impl Fn(&mut Tape<'a>, &Var) -> Result<Var> {
    move |tape, x| {
        let linear = layer.linear(x.value().rows());
        match at_once {
            true => tape.linear_swiglu(x, linear, dtype),
            false => tape.linear(x, linear).and_then(|gate_up| tape.swiglu(&gate_up, dtype)),
        }
    }
}

/// Few tokens and many, which one thread copies or all share; columns that are whole panels of both halves and not; more inputs than are added up at once; and a result that goes past the caches.
#[test]
fn a_layer_that_is_gated_at_once_has_the_bits_of_both_ops_in_turn() {
    const MANY: usize = 1100;
    for (inputs, n) in [(40, 64), (40, 128), (1100, 192), (33, 40), (4200, 128), (32, 1024)] {
        let layer = Wide::new(inputs, &[n, n]);
        for tokens in [1, 70, 300, 600, MANY] {
            if (tokens == MANY) != (n == 1024) {
                continue;
            }
            let x = tensor(&[tokens, layer.inputs], DType::BF16, 3);
            on_backends(|b, on| {
                for dtype in [DType::BF16, DType::F32] {
                    let op = |at_once| gated(&layer, dtype, at_once);
                    let what = format!("{on}, {tokens} tokens, {inputs} → 2·{n}, {dtype:?}");
                    let in_turn = there_and_back(b, &layer, &x, op(false));
                    assert!(there(b, &x, op(true)) == in_turn[0], "{what}");
                    assert!(there_and_back(b, &layer, &x, op(true)) == in_turn, "{what}, recorded");
                }
            });
        }
    }
}

fn attended<'a>(layer: &'a Wide, input: &AttentionInput<'a>, at_once: bool) -> impl Fn(&mut Tape<'a>, &Var) -> Result<Var> {
    move |tape, x| {
        let linear = layer.linear(x.value().rows());
        match at_once {
            true => tape.linear_attention(x, linear, input, KvAccess::None, DType::BF16),
            false => tape.linear(x, linear).and_then(|qkv| tape.attention(&qkv, input, KvAccess::None, DType::BF16)),
        }
    }
}

/// Heads that are pairs of panels and others; with norms and without, of one layout and another, that turn whole and in part.
#[test]
fn attention_to_a_layer_at_once_has_the_bits_of_both_ops_in_turn() {
    for (heads, kv_heads, head_dim) in [(2, 1, 128), (4, 2, 64)] {
        let g = AttentionGeometry { heads, kv_heads, head_dim, values: KvValues::Own(head_dim), ..GEOMETRY };
        let layer = Wide::new(40, &[heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]);
        let norms = [tensor(&[head_dim], DType::F32, 5), tensor(&[head_dim], DType::F32, 6)];
        for tokens in [1, 70, 300] {
            let x = tensor(&[tokens, layer.inputs], DType::BF16, 3);
            let spans = [whole(0..tokens / 3), whole(tokens / 3..tokens)];
            on_backends(|b, on| {
                let plain = attention_input(b, g, &norms, &spans);
                let (q, k, v) = (plain.layout.q, plain.layout.k, plain.layout.v);
                let positions: Vec<u32> = (0..tokens as u32).collect();
                let in_part = Rc::new(b.rotary(&positions, &frequencies(head_dim / 2), 1.0).unwrap());
                let others = [
                    AttentionInput { norms: None, ..plain.clone() },
                    // Values before keys.
                    AttentionInput { layout: QkvLayout { k: v, v: k, ..plain.layout }, ..plain.clone() },
                    AttentionInput {
                        layout: QkvLayout {
                            rotary_dim: head_dim / 2,
                            rotary_style: RotaryStyle::Interleaved,
                            q,
                            ..plain.layout
                        },
                        rotary: in_part,
                        ..plain.clone()
                    },
                ];
                for (i, input) in [plain].iter().chain(&others).enumerate() {
                    let op = |at_once| attended(&layer, input, at_once);
                    let what = format!("{on}, {tokens} tokens, {heads} heads of {head_dim}, input {i}");
                    let in_turn = there_and_back(b, &layer, &x, op(false));
                    assert!(there(b, &x, op(true)) == in_turn[0], "{what}");
                    assert!(there_and_back(b, &layer, &x, op(true)) == in_turn, "{what}, recorded");
                }
            });
        }
    }
}

/// Where rows are copied for a layer and an adapter of all of them together, and where two have some each: the bits are those of vectors, which copy nothing.
#[test]
fn one_adapter_of_all_tokens_or_two_of_some_have_the_same_bits_on_a_matrix_unit() {
    if !Isa::Amx.is_available() {
        return;
    }
    let vectors = CpuBackend::with_isa(Arithmetic { isa: Isa::Avx512, numerics: crate::Numerics::Portable }, 1);
    let g = AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 128, values: KvValues::Own(128), ..GEOMETRY };
    let norms = [tensor(&[128], DType::F32, 5), tensor(&[128], DType::F32, 6)];
    const TOKENS: usize = 270;
    let spans = [whole(0..90), whole(90..TOKENS)];
    let [linear, gate_up, qkv] =
        [&[64, 128, 40][..], &[128, 128], &[256, 128, 128]].map(|widths| Wide::of_ranks(70, widths, &[6]));
    let of_two = Wide::of_ranks(70, &[64, 128], &[6, 8]);
    let x = tensor(&[TOKENS, 70], DType::BF16, 3);
    // Back of a gradient of which some rows are zeros.
    let mut dy = normal(TOKENS * 232, 4);
    dy[64 * 232..128 * 232].fill(0.0);
    let dy = Tensor::from_f32(&dy, &[TOKENS, 232], DType::BF16).unwrap();
    let back = |b: &CpuBackend| {
        let (layer, mut dx) = (linear.linear(TOKENS), b.scratch(&[TOKENS, 70], DType::F32).unwrap());
        let low = b.linear(&x, &layer, None).unwrap();
        b.linear_backward(&dy, &x, &low, &layer, &mut [None, None, None], Some(&mut dx)).unwrap();
        [bits(&dx), Vec::new(), Vec::new()]
    };
    let of = |b: &CpuBackend| {
        let input = attention_input(b, g, &norms, &spans);
        let sums = |linear: &Wide| there_and_back(b, linear, &x, |tape, x| tape.linear(x, linear.linear(TOKENS)));
        [
            sums(&linear),
            sums(&of_two),
            back(b),
            there_and_back(b, &gate_up, &x, gated(&gate_up, DType::BF16, true)),
            there_and_back(b, &qkv, &x, attended(&qkv, &input, true)),
        ]
    };
    let expected = of(&vectors);
    for threads in [1, 2] {
        let found = of(&CpuBackend::with_isa(Arithmetic::from(Isa::Amx), threads));
        for (what, (found, expected)) in
            ["linear", "of two", "back", "gated", "attended"].into_iter().zip(found.iter().zip(&expected))
        {
            assert!(found == expected, "{what}, {threads} threads");
        }
    }
}

#[test]
fn what_is_done_at_once_refuses_what_its_parts_refuse() {
    let (b, layer) = (backend(), Wide::new(40, &[64, 64]));
    let refuses = |x: Tensor, linear: Linear<'_>| {
        let mut tape = Tape::inference(&b);
        let x = tape.constant(x);
        tape.linear_swiglu(&x, linear, DType::BF16).is_err()
    };
    let odd = packed(&normal(40 * 7, 1), 40, 7, DType::BF16);
    assert!(!refuses(tensor(&[3, 40], DType::BF16, 1), layer.linear(3)));
    assert!(refuses(tensor(&[3, 39], DType::BF16, 1), layer.linear(3)));
    assert!(refuses(tensor(&[3, 40], DType::F32, 1), layer.linear(3)));
    assert!(refuses(tensor(&[2, 40], DType::BF16, 1), layer.linear(3)));
    assert!(refuses(tensor(&[3, 40], DType::BF16, 1), Linear { weight: odd.layer(0), bias: None, lora: Arc::from([]) }));

    let g = AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 128, values: KvValues::Own(128), ..GEOMETRY };
    let norms = [tensor(&[128], DType::F32, 5), tensor(&[128], DType::F32, 6)];
    let (layer, narrow) = (Wide::new(40, &[256, 128, 128]), Wide::new(40, &[256, 128, 64]));
    let refuses = |x: Tensor, layer: &Wide, tokens: usize| {
        let mut tape = Tape::inference(&b);
        let (x, input) = (tape.constant(x), attention_input(&b, g, &norms, &[whole(0..tokens)]));
        tape.linear_attention(&x, layer.linear(3), &input, KvAccess::None, DType::BF16).is_err()
    };
    assert!(!refuses(tensor(&[3, 40], DType::BF16, 1), &layer, 3));
    assert!(refuses(tensor(&[3, 40], DType::F32, 1), &layer, 3));
    assert!(refuses(tensor(&[3, 40], DType::BF16, 1), &layer, 2));
    assert!(refuses(tensor(&[3, 40], DType::BF16, 1), &narrow, 3));
}
