//! A layer whose result is gated at once.

use super::*;

/// Layers of `inputs → 2 * n` with a bias and two adapters, each with a pair for the gates and one for the rest.
struct Gated {
    inputs: usize,
    n: usize,
    weight: PackedStack,
    bias: Tensor,
    pairs: Vec<[PackedStack; 2]>,
}

const RANKS: [usize; 2] = [3, 8];

impl Gated {
    fn new(inputs: usize, n: usize) -> Self {
        let pack =
            |seed: u64, inputs: usize, outputs: usize| packed(&normal(inputs * outputs, seed), inputs, outputs, DType::BF16);
        let pair = |seed: u64, rank: usize| [pack(seed, inputs, rank), pack(seed + 1, rank, n)];
        let pairs = (0..4).map(|i| pair(10 + 2 * i, RANKS[i as usize / 2])).collect();
        Gated { inputs, n, weight: pack(1, inputs, 2 * n), bias: tensor(&[2 * n], DType::F32, 2), pairs }
    }

    /// All tokens but some between the adapters'.
    fn linear(&self, tokens: usize) -> Linear<'_> {
        let projection = |adapter: usize, i: usize| LoraProjection {
            a: self.pairs[2 * adapter + i][0].layer(0),
            b: self.pairs[2 * adapter + i][1].layer(0),
            scale: 0.5,
            first_column: i * self.n,
            site: LoraSite { group: adapter, module: i, layer: 0 },
        };
        let group = |adapter: usize, tokens: Range<usize>| LoraGroup {
            tokens: tokens.clone(),
            sequences: [tokens].into(),
            projections: (0..2).map(|i| projection(adapter, i)).collect(),
        };
        let groups = [group(0, 0..tokens.div_ceil(3)), group(1, tokens / 2..tokens)];
        let lora = groups.into_iter().filter(|group| !group.tokens.is_empty()).collect();
        Linear { weight: self.weight.layer(0), bias: Some(self.bias.as_ref()), lora }
    }

    fn run<'a>(&'a self, mut tape: Tape<'a>, x: &Tensor, dtype: DType, at_once: bool) -> Vec<u32> {
        let (x, linear) = (tape.constant(x.clone()), self.linear(x.rows()));
        let y = match at_once {
            true => tape.linear_swiglu(&x, linear, dtype),
            false => tape.linear(&x, linear).and_then(|gate_up| tape.swiglu(&gate_up, dtype)),
        };
        bits(y.unwrap().value())
    }
}

/// Few tokens and many, which one thread copies or all share; columns that are whole panels of both halves and not; and more inputs than are added up at once.
#[test]
fn a_layer_that_is_gated_at_once_has_the_bits_of_both_ops_in_turn() {
    for (inputs, n) in [(40, 64), (40, 128), (1100, 192), (33, 40), (4200, 128)] {
        let layer = Gated::new(inputs, n);
        for tokens in [1, 70, 300, 600] {
            let x = tensor(&[tokens, layer.inputs], DType::BF16, 3);
            for (arithmetic, threads) in arithmetics().into_iter().flat_map(|a| [1, 2, 3].map(|threads| (a, threads))) {
                let b = CpuBackend::with_isa(arithmetic, threads);
                for dtype in [DType::BF16, DType::F32] {
                    let run = |tape, at_once| layer.run(tape, &x, dtype, at_once);
                    let in_turn = run(Tape::inference(&b), false);
                    let what = format!("{arithmetic:?}, {threads} threads, {tokens} tokens, {inputs} → 2·{n}, {dtype:?}");
                    assert!(run(Tape::inference(&b), true) == in_turn, "{what}");
                    assert!(run(Tape::recording(&b), true) == in_turn, "{what}, recorded");
                }
            }
        }
    }
}

/// Of each arithmetic one, and AMX where it is or is emulated.
fn arithmetics() -> Vec<Arithmetic> {
    let portable = Arithmetic { isa: Isa::detect(), numerics: crate::Numerics::Portable };
    let amx = [Isa::Amx].into_iter().filter(|isa| isa.is_available()).map(Arithmetic::from);
    amx.chain([Isa::detect().into(), portable]).collect()
}

#[test]
fn a_layer_that_is_gated_at_once_refuses_what_its_parts_refuse() {
    let (b, layer) = (backend(), Gated::new(40, 64));
    let refuses = |x: Tensor, linear: Linear<'_>| {
        let mut tape = Tape::inference(&b);
        let x = tape.constant(x);
        tape.linear_swiglu(&x, linear, DType::BF16).is_err()
    };
    assert!(!refuses(tensor(&[3, 40], DType::BF16, 1), layer.linear(3)));
    assert!(refuses(tensor(&[3, 39], DType::BF16, 1), layer.linear(3)));
    assert!(refuses(tensor(&[3, 40], DType::F32, 1), layer.linear(3)));
    assert!(refuses(tensor(&[2, 40], DType::BF16, 1), layer.linear(3)));
    let odd = packed(&normal(40 * 7, 1), 40, 7, DType::BF16);
    assert!(refuses(tensor(&[3, 40], DType::BF16, 1), Linear { weight: odd.layer(0), bias: None, lora: Rc::from([]) }));
}
