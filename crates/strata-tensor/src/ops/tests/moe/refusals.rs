//! Experts on a device that refuses memory, and with what does not fit them.

use super::*;
use crate::testing::RemoteBackend;
use crate::{Error, PackedRef};

/// Accumulators that a remote backend holds.
struct Far<'b> {
    b: &'b RemoteBackend,
    case: Case,
    held: Vec<(LoraSite, Tensor, Tensor)>,
}

impl<'b> Far<'b> {
    fn new(b: &'b RemoteBackend, case: Case) -> Self {
        let mut held = Vec::new();
        for (group, rank) in RANKS.into_iter().enumerate() {
            for (module, (inputs, outputs, _)) in case.modules().into_iter().enumerate() {
                let zeros = |width| b.zeros(&[case.num_experts, rank, width], DType::F32).unwrap();
                held.push((case.site(group, module), zeros(inputs), zeros(outputs)));
            }
        }
        Far { b, case, held }
    }

    fn values(&self) -> Vec<f32> {
        let pair = |(_, a, b): &(LoraSite, Tensor, Tensor)| {
            [self.b.to_f32_vec(a.as_ref()).unwrap(), self.b.to_f32_vec(b.as_ref()).unwrap()].concat()
        };
        self.held.iter().flat_map(pair).collect()
    }
}

impl LoraGradients for Far<'_> {
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<crate::LoraGradient<'_>>> {
        assert_eq!(num_layers, self.case.num_experts);
        let mut all: Vec<_> = sites.iter().map(|_| None).collect();
        for (site, a, b) in &mut self.held {
            if let Some(i) = sites.iter().position(|s| s == site) {
                all[i] = Some(crate::LoraGradient { a: a.as_mut(), b: b.as_mut() });
            }
        }
        all
    }
}

#[test]
fn a_device_elsewhere_computes_the_same_bits_and_any_allocation_may_be_refused() {
    let batch = [(Some(0), 30, 10), (None, 3, 40), (Some(1), 9, 50)];
    for case in [QWEN3_5_MOE, DEEPSEEK_V3, GPT_OSS] {
        let (near, far) = (cpu(Isa::detect(), 2), RemoteBackend::new(cpu(Isa::detect(), 1)));
        let (values, gradients) = train_fresh(&Block::random(&near, case, DType::BF16), &near, &batch, Keep::Checkpoint);
        let block = Block::random(&far, case, DType::BF16);
        let mut accumulators = Far::new(&far, case);
        let first = far.allocations();
        let [y, dx] = block.train(&far, &batch, Keep::Checkpoint, &mut accumulators).unwrap();
        assert!(values == [bits_of(&y), bits_of(&dx)]);
        assert_eq!(bits_of(&accumulators.values()), [gradient_bits(&gradients, 0), gradient_bits(&gradients, 1)].concat());

        let (allocations, held) = (far.allocations() - first, far.held());
        for nth in 1..=allocations {
            far.refuse_allocation(nth);
            let refused = block.train(&far, &batch, Keep::Checkpoint, &mut accumulators);
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "allocation {nth} of {allocations}");
            assert_eq!(far.held(), held, "what was allocated before allocation {nth} is freed");
        }
    }
}

#[test]
fn what_does_not_fit_experts_is_an_error() {
    let b = cpu(Isa::detect(), 1);
    let block = Block::random(&b, GPT_OSS, DType::F32);
    let batch = [(Some(0), 5, 10)];
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32);
    let var = |t: Tensor| Tape::inference(&b).constant(t);
    let choices: Vec<u32> = (0..5).flat_map(|_| [5, 0, 3, 1]).collect();
    let routed = |experts: &[u32], weights: Tensor| Routed { experts: experts.into(), weights: var(weights) };
    let good = || routed(&choices, zeros(&[5, 4]));
    let refused = |x: Tensor, routed: &Routed, change: &dyn Fn(&mut Experts<'_>)| {
        let mut experts = block.experts(&batch);
        change(&mut experts);
        let mut tape = Tape::inference(&b);
        let (x, residual) = (var(x), var(zeros(&[5, 6])));
        let added = tape.add_experts(&residual, &x, routed, experts.clone());
        assert!(added.is_err() || tape.experts(&x, routed, experts.clone()).is_ok());
        tape.experts(&x, routed, experts).err().map(|e| e.to_string())
    };
    let keep = |_: &mut Experts<'_>| ();
    assert_eq!(refused(zeros(&[5, 6]), &good(), &keep), None);
    let some =
        |refusal: Option<String>, about: &str| assert!(refusal.as_ref().is_some_and(|r| r.contains(about)), "{refusal:?}");
    some(refused(zeros(&[5, 7]), &good(), &keep), "[rows, 6]");
    some(refused(Tensor::zeros(&[5, 6], DType::BF16), &good(), &keep), "dtype");
    some(refused(zeros(&[5, 6]), &routed(&choices, zeros(&[5, 3])), &keep), "[5, 3]");
    some(refused(zeros(&[5, 6]), &routed(&choices[..16], zeros(&[4, 4])), &keep), "[4, 4]");
    some(refused(zeros(&[5, 6]), &routed(&choices, Tensor::zeros(&[5, 4], DType::BF16)), &keep), "dtype");
    some(refused(zeros(&[5, 6]), &routed(&[vec![6], choices[1..].to_vec()].concat(), zeros(&[5, 4])), &keep), "index 6");
    some(refused(zeros(&[5, 6]), &routed(&[vec![0], choices[1..].to_vec()].concat(), zeros(&[5, 4])), &keep), "twice");
    some(refused(zeros(&[5, 6]), &good(), &|e| e.num_experts = 7), "size 6");
    some(refused(zeros(&[5, 6]), &good(), &|e| e.num_experts = 5), "[50]");
    some(refused(zeros(&[5, 6]), &good(), &|e| std::mem::swap(&mut e.gate_up, &mut e.down)), "[rows, 5]");
    some(refused(zeros(&[5, 6]), &good(), &|e| e.down.weight = e.gate_up.weight), "n → hidden");
    some(refused(zeros(&[5, 6]), &good(), &|e| e.down.bias = e.gate_up.bias), "[6, 10]");
    let narrow = forever(&b.packed(12, 5, 6, DType::BF16.into()).unwrap());
    some(refused(zeros(&[5, 6]), &good(), &move |e| e.down.weight = narrow), "dtype");
    let flat: &'static Tensor = Box::leak(Box::new(zeros(&[36])));
    some(refused(zeros(&[5, 6]), &good(), &|e| e.down.bias = Some(flat.as_ref())), "[6, 6]");
    let change_pair = |e: &mut Experts<'_>, change: &dyn Fn(&mut LoraProjection<'_>)| {
        let mut groups = e.down.lora.to_vec();
        change(&mut groups[0].projections[0]);
        e.down.lora = groups.into();
    };
    let few = forever(&b.packed(4, 5, 3, DType::F32.into()).unwrap());
    some(refused(zeros(&[5, 6]), &good(), &|e| change_pair(e, &|p| p.a = few)), "size 4");
    some(refused(zeros(&[5, 6]), &good(), &|e| change_pair(e, &|p| p.first_column = 1)), "low-rank");
    some(refused(zeros(&[4, 6]), &routed(&choices[..16], zeros(&[4, 4])), &keep), "index 5");
    let residual = |shape: &[usize]| {
        Tape::inference(&b).add_experts(&var(zeros(shape)), &var(zeros(&[5, 6])), &good(), block.experts(&batch)).is_err()
    };
    assert!(residual(&[4, 6]) && residual(&[5, 5]) && !residual(&[5, 6]));

    let route = |logits: Tensor, top_k, scores| Tape::inference(&b).route(&var(logits), Routing { top_k, scores }).is_err();
    for scores in [RouterScores::Softmax, RouterScores::SoftmaxOfChosen, RouterScores::Sigmoid(SIGMOID)] {
        let choices = if matches!(scores, RouterScores::Sigmoid(_)) { 4 } else { 6 };
        assert!(!route(zeros(&[5, 6]), 1, scores) && !route(zeros(&[0, 6]), choices, scores));
        assert!(route(zeros(&[5, 6]), 0, scores) && route(zeros(&[5, 6]), choices + 1, scores));
        assert!(route(Tensor::zeros(&[5, 6], DType::BF16), 1, scores));
    }
    let sigmoid = |s: SigmoidScores<'static>| route(zeros(&[5, 6]), 1, RouterScores::Sigmoid(s));
    for (num_groups, top_groups) in [(0, 0), (4, 1), (6, 1), (3, 0), (3, 4)] {
        assert!(sigmoid(SigmoidScores { num_groups, top_groups, ..SIGMOID }), "{top_groups} of {num_groups}");
    }
    let short: &'static Tensor = Box::leak(Box::new(zeros(&[5])));
    assert!(sigmoid(SigmoidScores { correction_bias: Some(short.as_ref()), ..SIGMOID }));

    let gate = |x: Tensor, gates: Tensor| Tape::inference(&b).sigmoid_gate(&var(x), &var(gates), DType::F32).is_err();
    assert!(!gate(zeros(&[5, 3]), zeros(&[5, 1])));
    assert!(gate(zeros(&[5, 3]), zeros(&[4, 1])) && gate(zeros(&[5, 3]), zeros(&[5, 2])));
    assert!(gate(Tensor::zeros(&[5, 3], DType::BF16), zeros(&[5, 1])));
}

/// A weight like the first of a stack, of one that outlives every test.
fn forever(stack: &PackedStack) -> PackedRef<'static> {
    let w = stack.layer(0);
    let copy = PackedStack::zeros(stack.num_layers, w.in_features(), w.out_features(), w.dtype());
    Box::leak(Box::new(copy)).layer(0)
}
