//! Mixtures of experts: a whole block, as models have it, against plain sums in f64, and its bits in any company.

mod refusals;

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::toy::Gradients;
use super::{Nowhere, assert_close, normal};
use crate::backend::Backend;
use crate::moe::*;
use crate::tape::{Linear, LoraGradients, LoraGroup, LoraProjection, LoraSite, Tape, Var};
use crate::testing::bits;
use crate::{Arithmetic, CpuBackend, DType, HostRef, Isa, Memory, PackedStack, Result, Tensor};

/// Layers whose experts are in a stack, and the one that is tested.
const LAYERS: usize = 2;
const LAYER: usize = 1;
const EPS: f32 = 1e-6;
/// Ranks of the adapters.
const RANKS: [usize; 2] = [3, 1];

#[derive(Clone, Copy, PartialEq)]
enum Scores {
    Softmax,
    SoftmaxOfChosen,
    Sigmoid,
}

/// What kind of a block.
#[derive(Clone, Copy)]
struct Case {
    hidden: usize,
    intermediate: usize,
    num_experts: usize,
    top_k: usize,
    scores: Scores,
    activation: ExpertActivation,
    has_biases: bool,
    has_shared: bool,
}

const QWEN3_MOE: Case = Case {
    hidden: 6,
    intermediate: 5,
    num_experts: 6,
    top_k: 2,
    scores: Scores::SoftmaxOfChosen,
    activation: ExpertActivation::SwiGlu,
    has_biases: false,
    has_shared: false,
};
const NOT_NORMALIZED: Case = Case { scores: Scores::Softmax, top_k: 1, ..QWEN3_MOE };
const QWEN3_5_MOE: Case = Case { has_shared: true, top_k: 3, ..QWEN3_MOE };
const DEEPSEEK_V3: Case = Case { scores: Scores::Sigmoid, ..QWEN3_MOE };
const GPT_OSS: Case =
    Case { activation: ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 1.5 }, has_biases: true, top_k: 4, ..QWEN3_MOE };

/// Sigmoid scores choose two of three groups.
const SIGMOID: SigmoidScores<'static> =
    SigmoidScores { correction_bias: None, num_groups: 3, top_groups: 2, normalize: true, scaling_factor: 2.5 };

impl Case {
    fn routing<'a>(&self, correction_bias: &'a Tensor) -> Routing<'a> {
        let correction_bias = Some(correction_bias.as_ref());
        let scores = match self.scores {
            Scores::Softmax => RouterScores::Softmax,
            Scores::SoftmaxOfChosen => RouterScores::SoftmaxOfChosen,
            Scores::Sigmoid => RouterScores::Sigmoid(SigmoidScores { correction_bias, ..SIGMOID }),
        };
        Routing { top_k: self.top_k, scores }
    }

    /// `(in, out, first column)` of the modules with adapters: gate, up, and down.
    fn modules(&self) -> Vec<(usize, usize, usize)> {
        let (h, n) = (self.hidden, self.intermediate);
        vec![(h, n, 0), (h, n, n), (n, h, 0)]
    }

    fn site(&self, group: usize, module: usize) -> LoraSite {
        LoraSite { group, module, layer: LAYER * self.num_experts }
    }

    /// Accumulators for all adapters.
    fn gradients(&self) -> Gradients {
        let mut gradients = Gradients::default();
        for (group, rank) in RANKS.into_iter().enumerate() {
            for (module, (inputs, outputs, _)) in self.modules().into_iter().enumerate() {
                gradients.open_layers(self.site(group, module), self.num_experts, rank, inputs, outputs);
            }
        }
        gradients
    }
}

/// All numbers of a block; those of adapters and experts of the layer that is tested.
#[derive(Clone)]
struct Numbers {
    norm: Vec<f64>,
    router: Vec<f64>,
    correction: Vec<f64>,
    gate_up: Vec<f64>,
    gate_up_bias: Vec<f64>,
    down: Vec<f64>,
    down_bias: Vec<f64>,
    shared_gate: Vec<f64>,
    shared_gate_up: Vec<f64>,
    shared_down: Vec<f64>,
    /// For each adapter and module A, `[experts, rank, in]`, and B transposed, `[experts, rank, out]`.
    pairs: Vec<Vec<[Vec<f64>; 2]>>,
}

impl Numbers {
    /// Numbers that bf16 can hold.
    fn random(case: &Case) -> Self {
        let some = |n: usize, key: u64, factor: f32| -> Vec<f64> {
            normal(n, key).iter().map(|v| half::bf16::from_f32(v * factor).to_f64()).collect()
        };
        let (h, n, e) = (case.hidden, case.intermediate, case.num_experts);
        let (wide, narrow) = (1.0 / (h as f32).sqrt(), 1.0 / (n as f32).sqrt());
        let pair = |(rank, key): (usize, u64), (inputs, outputs, _): (usize, usize, usize)| {
            [some(e * rank * inputs, key, 1.0 / (inputs as f32).sqrt()), some(e * rank * outputs, key + 1, 0.5)]
        };
        let pairs = |(i, rank): (usize, usize)| {
            case.modules()
                .into_iter()
                .enumerate()
                .map(|(m, module)| pair((rank, 1000 + (i * 10 + m) as u64 * 2), module))
                .collect()
        };
        Numbers {
            norm: some(h, 1, 1.0),
            router: some(e * h, 2, 2.0 * wide),
            correction: some(e, 3, 0.3),
            gate_up: some(e * 2 * n * h, 4, 2.0 * wide),
            gate_up_bias: some(e * 2 * n, 5, 0.5),
            down: some(e * h * n, 6, narrow),
            down_bias: some(e * h, 7, 0.5),
            shared_gate: some(h, 8, wide),
            shared_gate_up: some(2 * n * h, 9, wide),
            shared_down: some(h * n, 10, narrow),
            pairs: RANKS.into_iter().enumerate().map(pairs).collect(),
        }
    }
}

/// A sequence: whose adapter, how many tokens, and of what seed.
type Sequence = (Option<usize>, usize, u64);

/// The residual stream of a batch.
fn input(case: &Case, batch: &[Sequence]) -> Vec<f32> {
    batch.iter().flat_map(|&(_, len, seed)| normal(len * case.hidden, seed)).collect()
}

/// Gradients of the outputs of a batch.
fn output_gradient(case: &Case, batch: &[Sequence]) -> Vec<f32> {
    batch.iter().flat_map(|&(_, len, seed)| normal(len * case.hidden, seed + 500)).collect()
}

/// `x·Wᵀ` with `w: [out, in]`.
fn product(x: &[f64], w: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn best(keys: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
    order[..n].to_vec()
}

/// Experts and weights, as the models' own code has it.
fn routed(case: &Case, numbers: &Numbers, logits: &[f64]) -> Vec<(usize, f64)> {
    let normalized = |values: Vec<f64>, factor: f64| -> Vec<f64> {
        let sum = values.iter().sum::<f64>();
        values.iter().map(|v| v / sum * factor).collect()
    };
    let (chosen, weights) = match case.scores {
        Scores::Sigmoid => {
            let scores: Vec<f64> = logits.iter().map(|&l| sigmoid(l)).collect();
            let keys: Vec<f64> = scores.iter().zip(&numbers.correction).map(|(s, c)| s + c).collect();
            let groups: Vec<f64> = keys.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            let groups = best(&groups, SIGMOID.top_groups);
            let masked = |(e, &key): (usize, &f64)| if groups.contains(&(e / 2)) { key } else { f64::NEG_INFINITY };
            let chosen = best(&keys.iter().enumerate().map(masked).collect::<Vec<_>>(), case.top_k);
            let weights = chosen.iter().map(|&e| scores[e]).collect();
            (chosen, normalized(weights, 2.5))
        }
        softmax => {
            let probabilities = normalized(logits.iter().map(|l| l.exp()).collect(), 1.0);
            let chosen = best(logits, case.top_k);
            let weights: Vec<f64> = chosen.iter().map(|&e| probabilities[e]).collect();
            (chosen, if softmax == Scores::Softmax { weights } else { normalized(weights, 1.0) })
        }
    };
    chosen.into_iter().zip(weights).collect()
}

fn activated(activation: ExpertActivation, gate_up: &[f64]) -> Vec<f64> {
    let n = gate_up.len() / 2;
    let value = |i: usize| match activation {
        ExpertActivation::SwiGlu => gate_up[i] * sigmoid(gate_up[i]) * gate_up[n + i],
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let limit = limit as f64;
            let (gate, up) = (gate_up[i].min(limit), gate_up[n + i].clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(alpha as f64 * gate)
        }
    };
    (0..n).map(value).collect()
}

/// The block of a token: the residual, and what shared and chosen experts add to it.
fn reference_of_token(case: &Case, numbers: &Numbers, adapter: Option<usize>, x: &[f64]) -> Vec<f64> {
    let (h, n) = (case.hidden, case.intermediate);
    let rms = (x.iter().map(|v| v * v).sum::<f64>() / h as f64 + EPS as f64).sqrt();
    let normed: Vec<f64> = x.iter().zip(&numbers.norm).map(|(v, w)| v / rms * w).collect();
    let mut y = x.to_vec();
    let mut add = |factor: f64, part: &[f64]| y.iter_mut().zip(part).for_each(|(y, v)| *y += factor * v);
    if case.has_shared {
        let out =
            product(&activated(ExpertActivation::SwiGlu, &product(&normed, &numbers.shared_gate_up)), &numbers.shared_down);
        add(sigmoid(product(&normed, &numbers.shared_gate)[0]), &out);
    }
    for (e, weight) in routed(case, numbers, &product(&normed, &numbers.router)) {
        let linear = |x: &[f64], (w, bias): (&[f64], &[f64]), modules: Range<usize>| {
            let out = w.len() / case.num_experts / x.len();
            let mut y = product(x, &w[e * out * x.len()..][..out * x.len()]);
            if case.has_biases {
                y.iter_mut().zip(&bias[e * out..]).for_each(|(y, b)| *y += b);
            }
            for (adapter, module) in adapter.iter().flat_map(|&a| modules.clone().map(move |m| (a, m))) {
                let ((_, width, first), rank) = (case.modules()[module], RANKS[adapter]);
                let [a, b] = &numbers.pairs[adapter][module];
                let low = product(x, &a[e * rank * x.len()..][..rank * x.len()]);
                for (r, low) in low.iter().enumerate() {
                    let b = &b[(e * rank + r) * width..][..width];
                    y[first..first + width].iter_mut().zip(b).for_each(|(y, b)| *y += 0.5 * low * b);
                }
            }
            y
        };
        let last = case.modules().len() - 1;
        let gate_up = linear(&normed, (&numbers.gate_up, &numbers.gate_up_bias), 0..last);
        let activated = activated(case.activation, &gate_up);
        assert_eq!(activated.len(), n);
        add(weight, &linear(&activated, (&numbers.down, &numbers.down_bias), last..last + 1));
    }
    y
}

fn reference(case: &Case, numbers: &Numbers, batch: &[Sequence], x: &[f64]) -> Vec<f64> {
    let adapters = batch.iter().flat_map(|&(adapter, len, _)| std::iter::repeat_n(adapter, len));
    adapters.zip(x.chunks(case.hidden)).flat_map(|(adapter, x)| reference_of_token(case, numbers, adapter, x)).collect()
}

/// A block in memory of a backend.
struct Block {
    case: Case,
    dtype: DType,
    norm: Tensor,
    correction: Tensor,
    router: PackedStack,
    gate_up: PackedStack,
    gate_up_bias: Tensor,
    down: PackedStack,
    down_bias: Tensor,
    shared: [PackedStack; 3],
    adapters: Vec<Vec<[PackedStack; 2]>>,
}

impl Block {
    fn new(b: &dyn Backend, case: Case, numbers: &Numbers, dtype: DType) -> Self {
        let (h, n, e) = (case.hidden, case.intermediate, case.num_experts);
        let narrow = |values: &[f64]| values.iter().map(|&v| v as f32).collect::<Vec<_>>();
        // `[experts, rows, columns]` after a layer of other numbers.
        let stacked = |values: &[f64], rows: usize, columns: usize, in_columns: bool| {
            let entries = values.len() / (rows * columns);
            let (inputs, outputs) = if in_columns { (rows, columns) } else { (columns, rows) };
            let mut stack = b.packed(LAYERS * entries, inputs, outputs, dtype.into()).unwrap();
            for entry in 0..LAYERS * entries {
                let first = entry % entries * rows * columns;
                let mut values = narrow(&values[first..first + rows * columns]);
                if entry / entries != LAYER {
                    values.fill(1e3);
                }
                let tensor = b.tensor(&values, &[rows, columns], DType::F32).unwrap();
                match in_columns {
                    true => b.pack_columns(&mut stack, entry, tensor.as_ref()).unwrap(),
                    false => {
                        b.upload_rows(&mut stack, entry, 0, HostRef::from_f32(&values, &[rows, columns]).unwrap()).unwrap()
                    }
                }
            }
            stack
        };
        let biases = |values: &[f64], out: usize| {
            let values = [vec![1e3; values.len()], narrow(values)].concat();
            b.tensor(&values, &[LAYERS, e, out], DType::F32).unwrap()
        };
        let vector = |values: &[f64]| b.tensor(&narrow(values), &[values.len()], DType::F32).unwrap();
        let adapter = |(rank, pairs): (usize, &Vec<[Vec<f64>; 2]>)| {
            let pair = |([a, b], (inputs, outputs, _)): (&[Vec<f64>; 2], (usize, usize, usize))| {
                [stacked(a, rank, inputs, false), stacked(b, rank, outputs, true)]
            };
            pairs.iter().zip(case.modules()).map(pair).collect()
        };
        Block {
            case,
            dtype,
            norm: vector(&numbers.norm),
            correction: vector(&numbers.correction),
            router: stacked(&numbers.router, e, h, false),
            gate_up: stacked(&numbers.gate_up, 2 * n, h, false),
            gate_up_bias: biases(&numbers.gate_up_bias, 2 * n),
            down: stacked(&numbers.down, h, n, false),
            down_bias: biases(&numbers.down_bias, h),
            shared: [
                stacked(&numbers.shared_gate, 1, h, false),
                stacked(&numbers.shared_gate_up, 2 * n, h, false),
                stacked(&numbers.shared_down, h, n, false),
            ],
            adapters: RANKS.into_iter().zip(&numbers.pairs).map(adapter).collect(),
        }
    }

    fn random(b: &dyn Backend, case: Case, dtype: DType) -> Self {
        Block::new(b, case, &Numbers::random(&case), dtype)
    }

    /// The experts, with adapters on runs of sequences.
    fn experts<'a>(&'a self, batch: &[Sequence]) -> Experts<'a> {
        let case = &self.case;
        let first = LAYER * case.num_experts;
        let mut end = 0;
        let placed: Vec<(Option<usize>, Range<usize>)> = batch
            .iter()
            .map(|&(adapter, len, _)| {
                end += len;
                (adapter, end - len..end)
            })
            .collect();
        let group = |run: &[(Option<usize>, Range<usize>)], modules: &Range<usize>| {
            let projection = |(adapter, module): (usize, usize)| LoraProjection {
                a: self.adapters[adapter][module][0].layer(first),
                b: self.adapters[adapter][module][1].layer(first),
                scale: 0.5,
                first_column: case.modules()[module].2,
                site: case.site(adapter, module),
            };
            LoraGroup {
                tokens: run[0].1.start..run[run.len() - 1].1.end,
                sequences: run.iter().map(|s| s.1.clone()).collect(),
                projections: run[0].0.into_iter().flat_map(|a| modules.clone().map(move |m| (a, m))).map(projection).collect(),
            }
        };
        let linear = |weight: &'a PackedStack, biases: &'a Tensor, modules: Range<usize>| Linear {
            weight: weight.layer(first),
            bias: case.has_biases.then(|| biases.row(LAYER)),
            lora: placed.chunk_by(|a, b| a.0 == b.0).map(|run| group(run, &modules)).collect(),
        };
        let last = case.modules().len() - 1;
        Experts {
            num_experts: case.num_experts,
            gate_up: linear(&self.gate_up, &self.gate_up_bias, 0..last),
            activation: case.activation,
            down: linear(&self.down, &self.down_bias, last..last + 1),
            keeps: true,
        }
    }

    fn run<'a>(&'a self, tape: &mut Tape<'a>, x: &Var, batch: &[Sequence]) -> Result<Var> {
        let plain = |w: &'a PackedStack| Linear { weight: w.layer(LAYER), bias: None, lora: Arc::from([]) };
        let h = tape.rms_norm(x, self.norm.as_ref(), EPS, self.dtype)?;
        let logits = tape.linear(&h, plain(&self.router))?;
        let routed = tape.route(&logits, self.case.routing(&self.correction))?;
        let mut residual = x.clone();
        if self.case.has_shared {
            let gates = tape.linear(&h, plain(&self.shared[0]))?;
            let gate_up = tape.linear(&h, plain(&self.shared[1]))?;
            let activated = tape.swiglu(&gate_up, DType::F32)?;
            let gated = tape.sigmoid_gate(&activated, &gates, self.dtype)?;
            residual = tape.add_linear(&residual, &gated, plain(&self.shared[2]))?;
        }
        tape.add_experts(&residual, &h, &routed, self.experts(batch))
    }

    /// The block without its way back.
    fn forward(&self, b: &dyn Backend, batch: &[Sequence]) -> Result<Vec<f32>> {
        let mut tape = Tape::inference(b);
        let x = input(&self.case, batch);
        let x = tape.constant(b.tensor(&x, &[x.len() / self.case.hidden, self.case.hidden], DType::F32)?);
        b.to_f32_vec(self.run(&mut tape, &x, batch)?.value().as_ref())
    }

    fn layer<'a>(&'a self, batch: Rc<[Sequence]>) -> impl Fn(&mut Tape<'a>, &Var) -> Result<Var> + 'a {
        move |tape, x| self.run(tape, x, &batch)
    }

    /// Outputs and gradients of the inputs; adds to the gradients of the pairs.
    fn train<'a>(
        &'a self,
        b: &'a dyn Backend,
        batch: &[Sequence],
        keep: Keep,
        lora: &mut dyn LoraGradients,
    ) -> Result<[Vec<f32>; 2]> {
        self.train_on(b, batch, keep, [&input(&self.case, batch), &output_gradient(&self.case, batch)], lora)
    }

    /// The same for another input and another gradient of the outputs.
    fn train_on<'a>(
        &'a self,
        b: &'a dyn Backend,
        batch: &[Sequence],
        keep: Keep,
        [x, dy]: [&[f32]; 2],
        lora: &mut dyn LoraGradients,
    ) -> Result<[Vec<f32>; 2]> {
        let tensor = |values: &[f32]| b.tensor(values, &[values.len() / self.case.hidden, self.case.hidden], DType::F32);
        let gradient = Rc::new(RefCell::new(Vec::new()));
        let slot = gradient.clone();
        let mut tape = Tape::recording(b);
        let x = tape.push(Rc::new(tensor(x)?), move |_, dx| {
            *slot.borrow_mut() = b.to_f32_vec((*dx).as_ref())?;
            Ok(())
        });
        let layer = self.layer(batch.into());
        let y = match keep {
            Keep::Everything => layer(&mut tape, &x)?,
            Keep::Checkpoint => tape.checkpoint(&x, layer)?,
        };
        let out = b.to_f32_vec(y.value().as_ref())?;
        tape.backward(y, tensor(dy)?, lora)?;
        Ok([out, gradient.take()])
    }
}

#[derive(Clone, Copy)]
enum Keep {
    Everything,
    Checkpoint,
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v as f64).collect()
}

fn cpu(arithmetic: impl Into<Arithmetic>, threads: usize) -> CpuBackend {
    CpuBackend::with_isa(arithmetic, threads)
}

/// The slopes of `loss` along each number of `of`.
fn slopes(numbers: &mut Numbers, of: impl Fn(&mut Numbers) -> &mut Vec<f64>, loss: impl Fn(&Numbers) -> f64) -> Vec<f64> {
    let at = |numbers: &mut Numbers, i: usize, step: f64| {
        let value = of(numbers)[i];
        of(numbers)[i] = value + step;
        let loss = loss(numbers);
        of(numbers)[i] = value;
        loss
    };
    (0..of(numbers).len()).map(|i| (at(numbers, i, 1e-5) - at(numbers, i, -1e-5)) / 2e-5).collect()
}

#[test]
fn blocks_of_all_models_and_their_gradients_are_those_of_plain_sums() {
    let b = cpu(Isa::detect(), 2);
    let batch = [(Some(0), 3, 10), (Some(0), 4, 20), (None, 2, 30), (Some(1), 5, 40)];
    for (i, case) in [QWEN3_MOE, NOT_NORMALIZED, QWEN3_5_MOE, DEEPSEEK_V3, GPT_OSS].into_iter().enumerate() {
        let mut numbers = Numbers::random(&case);
        let block = Block::new(&b, case, &numbers, DType::F32);
        let mut gradients = case.gradients();
        let [y, dx] = block.train(&b, &batch, Keep::Checkpoint, &mut gradients).unwrap();
        let x = wide(&input(&case, &batch));
        assert_close(&y, &reference(&case, &numbers, &batch, &x), 1e-5, &format!("case {i}"));

        let dy = output_gradient(&case, &batch);
        let weigh = |y: &[f64]| y.iter().zip(&dy).map(|(y, &g)| y * g as f64).sum::<f64>();
        // The place of the input is taken by numbers that no block has more of.
        let mut with_x = Numbers { norm: x.clone(), ..numbers.clone() };
        let norm = numbers.norm.clone();
        let loss_of_x = |n: &Numbers| weigh(&reference(&case, &Numbers { norm: norm.clone(), ..n.clone() }, &batch, &n.norm));
        assert_close(&dx, &slopes(&mut with_x, |n| &mut n.norm, loss_of_x), 1e-4, &format!("case {i}, dx"));
        for (group, module) in (0..RANKS.len()).flat_map(|g| (0..case.modules().len()).map(move |m| (g, m))) {
            let (da, db) = gradients.of(case.site(group, module));
            for (which, actual) in [da, db].into_iter().enumerate() {
                let loss = |n: &Numbers| weigh(&reference(&case, n, &batch, &x));
                let expected = slopes(&mut numbers, |n| &mut n.pairs[group][module][which], loss);
                assert!(expected.iter().any(|&v| v.abs() > 1e-3), "there is something to compare");
                let context = format!("case {i}, group {group}, module {module}, matrix {which}");
                assert_close(&actual, &expected, 1e-4, &context);
            }
        }
    }
}

/// Large enough for several panels and granules, and for sequences that reach an expert with more than a granule.
const LARGE: Case = Case { hidden: 130, intermediate: 70, ..QWEN3_5_MOE };
const LARGE_CASES: [Case; 2] = [LARGE, Case { hidden: 130, intermediate: 70, ..GPT_OSS }];

fn large_batch() -> Vec<Sequence> {
    vec![(Some(0), 90, 10), (Some(0), 1, 20), (Some(0), 37, 30), (None, 3, 40), (Some(1), 40, 50), (Some(1), 64, 60)]
}

fn train_fresh(block: &Block, b: &CpuBackend, batch: &[Sequence], keep: Keep) -> ([Vec<u32>; 2], Gradients) {
    let mut gradients = block.case.gradients();
    let [y, dx] = block.train(b, batch, keep, &mut gradients).unwrap();
    ([bits_of(&y), bits_of(&dx)], gradients)
}

fn gradient_bits(gradients: &Gradients, group: usize) -> Vec<u32> {
    bits_of(&gradients.of_group(group))
}

/// The elements of sequences `own` of a batch.
fn rows(case: &Case, batch: &[Sequence], own: Range<usize>) -> Range<usize> {
    let elements = |s: &[Sequence]| s.iter().map(|s| s.1 * case.hidden).sum::<usize>();
    elements(&batch[..own.start])..elements(&batch[..own.end])
}

#[test]
fn experts_have_the_same_bits_alone_in_company_and_on_any_number_of_threads() {
    let batch = large_batch();
    for (case, dtype) in LARGE_CASES.into_iter().flat_map(|c| [DType::F32, DType::BF16].map(|d| (c, d))) {
        let block = Block::random(&cpu(Isa::Portable, 1), case, dtype);
        for arithmetic in Arithmetic::available() {
            let (all, gradients) = train_fresh(&block, &cpu(arithmetic, 3), &batch, Keep::Everything);
            assert!(all.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
            let (again, again_gradients) = train_fresh(&block, &cpu(arithmetic, 1), &batch, Keep::Checkpoint);
            assert!(all == again && (0..2).all(|g| gradient_bits(&gradients, g) == gradient_bits(&again_gradients, g)));
            for (own, group) in [(0..3, Some(0)), (3..4, None), (4..6, Some(1)), (2..3, None)] {
                let (alone, own_gradients) = train_fresh(&block, &cpu(arithmetic, 2), &batch[own.clone()], Keep::Checkpoint);
                let rows = rows(&case, &batch, own.clone());
                assert!(alone.iter().zip(&all).all(|(alone, all)| *alone == all[rows.clone()]), "{arithmetic} {dtype} {own:?}");
                if let Some(g) = group {
                    assert!(gradient_bits(&own_gradients, g) == gradient_bits(&gradients, g), "{arithmetic} {dtype} {own:?}");
                }
            }
        }
    }
}

#[test]
fn experts_side_by_side_have_the_bits_of_experts_in_turn() {
    let batch = large_batch();
    // Few rows for each of many experts; and one that half of the tokens choose between them, which is nobody's alone of three threads.
    for (top_k, chosen) in [(3, 1.0), (3, 20.0), (8, 1.0)] {
        let case = Case { num_experts: 30, top_k, ..LARGE_CASES[1] };
        let mut numbers = Numbers::random(&case);
        numbers.router[10 * case.hidden..11 * case.hidden].iter_mut().for_each(|w| *w *= chosen);
        let block = Block::new(&cpu(Isa::Portable, 1), case, &numbers, DType::BF16);
        // So many threads have no whole experts each.
        let (in_turn, gradients) = train_fresh(&block, &cpu(Isa::detect(), 16), &batch, Keep::Everything);
        for (threads, keep) in [(1, Keep::Everything), (2, Keep::Everything), (2, Keep::Checkpoint), (3, Keep::Everything)] {
            let (side_by_side, own_gradients) = train_fresh(&block, &cpu(Isa::detect(), threads), &batch, keep);
            assert!(side_by_side == in_turn, "{threads} threads, {top_k} experts of a token");
            assert!((0..2).all(|g| gradient_bits(&own_gradients, g) == gradient_bits(&gradients, g)), "{threads} threads");
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_a_decode_step_as_in_its_sequence() {
    for (case, dtype) in LARGE_CASES.into_iter().flat_map(|c| [DType::F32, DType::BF16].map(|d| (c, d))) {
        let block = Block::random(&cpu(Isa::Portable, 1), case, dtype);
        let x = input(&case, &[(Some(0), 40, 10)]);
        for arithmetic in Arithmetic::available() {
            let b = cpu(arithmetic, 2);
            let run = |rows: Range<usize>| {
                let mut tape = Tape::inference(&b);
                let own = &x[rows.start * case.hidden..rows.end * case.hidden];
                let x = tape.constant(Tensor::from_f32(own, &[rows.len(), case.hidden], DType::F32).unwrap());
                bits(block.run(&mut tape, &x, &[(Some(0), rows.len(), 10)]).unwrap().value())
            };
            let steps = [run(0..17), run(17..18), run(18..19), run(19..40)].concat();
            assert!(run(0..40) == steps, "{arithmetic} {dtype}");
        }
    }
}

#[test]
fn gradients_of_experts_of_two_calls_add_up_to_the_bits_of_one() {
    let batch = large_batch();
    for (case, dtype) in LARGE_CASES.into_iter().flat_map(|c| [DType::F32, DType::BF16].map(|d| (c, d))) {
        let block = Block::random(&cpu(Isa::Portable, 1), case, dtype);
        for arithmetic in Arithmetic::available() {
            let b = cpu(arithmetic, 2);
            let (_, whole) = train_fresh(&block, &b, &batch, Keep::Checkpoint);
            for cut in 1..batch.len() {
                let mut gradients = case.gradients();
                for part in [&batch[..cut], &batch[cut..]] {
                    block.train(&b, part, Keep::Checkpoint, &mut gradients).unwrap();
                }
                let equal = |g| gradient_bits(&whole, g) == gradient_bits(&gradients, g);
                assert!((0..2).all(equal), "{arithmetic} {dtype} cut at {cut}");
            }
        }
    }
}

#[test]
fn tokens_without_a_gradient_leave_what_there_is_without_them() {
    let without = [(Some(0), 40, 10), (Some(0), 1, 20), (None, 3, 40), (Some(1), 33, 50)];
    // Before every third token there are two more in their places.
    let has_gradient = |token: usize| token % 3 == 2;
    let with = without.map(|(adapter, len, seed)| (adapter, 3 * len, seed + 1));
    for (case, dtype) in LARGE_CASES.into_iter().flat_map(|c| [DType::F32, DType::BF16].map(|d| (c, d))) {
        let block = Block::random(&cpu(Isa::Portable, 1), case, dtype);
        let [mut x, mut dy] = [input(&case, &with), vec![0.0; with.iter().map(|s| s.1 * case.hidden).sum()]];
        for (among, alone) in [(&mut x, input(&case, &without)), (&mut dy, output_gradient(&case, &without))] {
            let rows = among.chunks_mut(case.hidden).enumerate().filter(|(token, _)| has_gradient(*token));
            rows.zip(alone.chunks(case.hidden)).for_each(|((_, row), alone)| row.copy_from_slice(alone));
        }
        for arithmetic in Arithmetic::available() {
            let b = cpu(arithmetic, 2);
            let mut gradients = case.gradients();
            let [_, dx] = block.train_on(&b, &with, Keep::Everything, [&x, &dy], &mut gradients).unwrap();
            let ([_, dx_alone], alone) = train_fresh(&block, &b, &without, Keep::Checkpoint);
            assert!((0..2).all(|g| gradient_bits(&gradients, g) == gradient_bits(&alone, g)), "{arithmetic} {dtype}");
            let mut dx_alone = dx_alone.chunks(case.hidden);
            for (token, dx) in dx.chunks(case.hidden).enumerate() {
                let as_expected = match has_gradient(token) {
                    true => dx_alone.next().is_some_and(|alone| bits_of(dx) == alone),
                    false => dx.iter().all(|v| *v == 0.0),
                };
                assert!(as_expected, "{arithmetic} {dtype}, token {token}");
            }
        }
    }
}

#[test]
fn all_instruction_sets_with_fused_multiply_adds_compute_the_same_experts() {
    for case in LARGE_CASES {
        let block = Block::random(&cpu(Isa::Portable, 1), case, DType::F32);
        let mut fused: Option<([Vec<u32>; 2], Vec<u32>)> = None;
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
            let (values, gradients) = train_fresh(&block, &cpu(isa, 2), &large_batch(), Keep::Checkpoint);
            let all = (values, gradient_bits(&gradients, 0));
            assert!(*fused.get_or_insert_with(|| all.clone()) == all, "{isa}");
        }
    }
}

#[test]
fn experts_in_bf16_are_close_to_those_in_f32() {
    let b = cpu(Isa::detect(), 2);
    for case in LARGE_CASES {
        // One choice for both: a rounded logit may choose another expert.
        let batch = [(Some(0), 50, 10), (None, 20, 20)];
        let [exact, rounded] = [DType::F32, DType::BF16].map(|dtype| {
            let block = Block::random(&b, case, dtype);
            let mut tape = Tape::inference(&b);
            let values = input(&case, &batch);
            let x = tape.constant(Tensor::from_f32(&values, &[70, case.hidden], dtype).unwrap());
            let logits = tape.constant(Tensor::from_f32(&normal(70 * 6, 1), &[70, 6], DType::F32).unwrap());
            let routed = tape.route(&logits, case.routing(&block.correction)).unwrap();
            tape.experts(&x, &routed, block.experts(&batch)).unwrap().value().to_f32_vec()
        });
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| (v as f64).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        assert!(error < 0.01, "relative error {error}");
    }
}

#[test]
fn no_tokens_are_no_work_and_constants_get_no_gradient() {
    let b = cpu(Isa::detect(), 2);
    for case in [QWEN3_5_MOE, GPT_OSS] {
        let block = Block::random(&b, case, DType::BF16);
        assert_eq!(block.forward(&b, &[]).unwrap(), []);
        assert_eq!(block.train(&b, &[], Keep::Everything, &mut Nowhere).unwrap(), [[], []]);

        // The first layer of a model: only the pairs are trained.
        let batch = [(Some(0), 5, 10), (None, 4, 20), (Some(1), 6, 30)];
        let (_, expected) = train_fresh(&block, &b, &batch, Keep::Everything);
        let mut gradients = case.gradients();
        let mut tape = Tape::recording(&b);
        let x = tape.constant(Tensor::from_f32(&input(&case, &batch), &[15, case.hidden], DType::F32).unwrap());
        let y = block.run(&mut tape, &x, &batch).unwrap();
        let dy = Tensor::from_f32(&output_gradient(&case, &batch), &[15, case.hidden], DType::F32).unwrap();
        tape.backward(y, dy, &mut gradients).unwrap();
        assert!((0..2).all(|g| gradient_bits(&expected, g) == gradient_bits(&gradients, g)));
    }
}
