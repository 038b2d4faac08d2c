//! Each op alone: its gradient against finite differences, what it refuses, and what must not reach its result.

// A list of one sequence is what it looks like.
#![allow(clippy::single_range_in_vec_init)]

mod at_once;
mod attention;
mod composite;
mod delta;
mod embedding;
mod encoder;
mod latent;
mod loss;
mod misfits;
mod moe;
mod rows;
mod toy;

use std::cell::RefCell;
use std::ops::{ControlFlow, Range};
use std::rc::Rc;
use std::sync::Arc;

use super::*;
use crate::backend::{
    AdamwStep, AttentionGeometry, AttentionSpan, Backend, HeadColumns, LogprobTargets, LoraGradient, QkvLayout, RotaryStyle,
    RowRequest, Sight,
};
use crate::tape::{Backward, Linear, LoraGradients, LoraGroup, LoraProjection, LoraSite, Tape, Var, in_f32};
use crate::testing::{RemoteBackend, assert_close, bits, normal, packed, poison_recycled, slopes, tensor};
use crate::{Arithmetic, CpuBackend, DType, Isa, KV_PAGE_TOKENS, KvPages, KvValues, Memory, PackedStack};
use toy::{Gradients, Quadratic};

fn backend() -> CpuBackend {
    CpuBackend::with_isa(Isa::detect(), 2)
}

/// Gradients that nobody wants.
struct Nowhere;

impl LoraGradients for Nowhere {
    fn layers_at(&mut self, sites: &[LoraSite], _: usize) -> Vec<Option<LoraGradient<'_>>> {
        sites.iter().map(|_| None).collect()
    }
}

/// The output of `op` and the gradient of `Σ dy·op(x)` by f32 `x`, with `dy` random.
fn go_back<'a>(
    b: &'a CpuBackend,
    x: &Tensor,
    lora: &mut dyn LoraGradients,
    op: impl Fn(&mut Tape<'a>, &Var) -> Result<Var>,
) -> (Tensor, Vec<f32>) {
    let gradient = Rc::new(RefCell::new(None));
    let mut tape = Tape::recording(b);
    let slot = gradient.clone();
    let x = tape.push(Rc::new(x.clone()), move |_, dx| {
        *slot.borrow_mut() = Some(dx.to_f32_vec());
        Ok(())
    });
    let y = op(&mut tape, &x).unwrap();
    let dy = tensor(y.value().shape().dims(), DType::F32, 99);
    let out = y.value().clone();
    tape.backward(y, dy, lora).unwrap();
    let dx = gradient.borrow_mut().take().unwrap();
    (out, dx)
}

/// `Σ dy·y` with the `dy` of [`go_back`].
fn weigh(y: &Tensor) -> f64 {
    let dy = normal(y.shape().len(), 99);
    y.to_f32_vec().iter().zip(&dy).map(|(&y, &g)| y as f64 * g as f64).sum()
}

/// Checks the gradient of an f32 op by its input.
#[track_caller]
fn check_gradient<'a>(b: &'a CpuBackend, x: &Tensor, op: impl Fn(&mut Tape<'a>, &Var) -> Result<Var>) {
    let (_, dx) = go_back(b, x, &mut Nowhere, &op);
    let expected = slopes(&x.to_f32_vec(), 1e-2, |values| {
        let x = Tensor::from_f32(values, x.shape().dims(), DType::F32).unwrap();
        let mut tape = Tape::inference(b);
        let x = tape.constant(x);
        weigh(op(&mut tape, &x).unwrap().value())
    });
    assert_close(&dx, &expected, 2e-3, "gradient of the input");
}

#[test]
fn the_gradients_of_rms_norm_swiglu_and_addition_are_those_of_finite_differences() {
    let b = backend();
    let weight = tensor(&[7], DType::F32, 2);
    check_gradient(&b, &tensor(&[3, 7], DType::F32, 1), |tape, x| tape.rms_norm(x, weight.as_ref(), 1e-6, DType::F32));
    check_gradient(&b, &tensor(&[3, 10], DType::F32, 1), |tape, x| tape.swiglu(x, DType::F32));
    check_gradient(&b, &tensor(&[3, 5], DType::F32, 1), |tape, x| tape.add(x, x.clone()));
    check_gradient(&b, &tensor(&[3, 7], DType::F32, 1), |tape, x| {
        let h = tape.rms_norm(x, weight.as_ref(), 1e-6, DType::F32)?;
        let sum = tape.add(&h, x.clone())?;
        tape.add(&sum, h)
    });
}

#[test]
fn a_gradient_that_was_rounded_for_a_matmul_also_reaches_ops_and_sums_in_f32() {
    let b = backend();
    let (x, weight) = (tensor(&[3, 6], DType::F32, 1), tensor(&[6], DType::F32, 2));
    let run = |dtype| {
        let op = |tape: &mut Tape<'_>, h: &Var| {
            // As addition wants it: the value in f32, its gradient passed on as it comes.
            let y = tape.swiglu(h, dtype)?;
            let (node, wide) = (y.node(), in_f32(&b, y.shared())?);
            Ok::<_, Error>(tape.push(wide, move |pass, dy| pass.accumulate(node, dy)))
        };
        let twice = |tape: &mut Tape<'_>, h: &Var| {
            let y = op(tape, h)?;
            let z = op(tape, h)?;
            tape.add(&y, z)
        };
        let sum = go_back(&b, &x, &mut Nowhere, twice).1;
        let through = go_back(&b, &x, &mut Nowhere, |tape, x| {
            let h = tape.rms_norm(x, weight.as_ref(), 1e-6, DType::F32)?;
            op(tape, &h)
        });
        [sum, through.1].concat()
    };
    let (exact, rounded) = (run(DType::F32), run(DType::BF16));
    assert_close(&rounded, &exact.iter().map(|&v| v as f64).collect::<Vec<_>>(), 3e-2, "bf16");
}

/// A frozen layer 7 → 11 with bias, and pairs of rank 3, 1 and 5 on two of three runs of nine tokens.
struct Layer {
    w: PackedStack,
    bias: Tensor,
    pairs: Vec<(Vec<f32>, Vec<f32>)>,
    packed: Vec<[PackedStack; 2]>,
}

/// `(rank, first column, columns)` of each pair.
const PAIRS: [(usize, usize, usize); 3] = [(3, 0, 5), (1, 5, 6), (5, 2, 9)];

impl Layer {
    fn new(pairs: Vec<(Vec<f32>, Vec<f32>)>) -> Self {
        let pack = |((a, b), (rank, _, out)): (&(Vec<f32>, Vec<f32>), _)| {
            // B comes transposed, [rank, out].
            let rows: Vec<f32> = (0..out * rank).map(|i| b[i % rank * out + i / rank]).collect();
            [packed(a, 7, rank, DType::F32), packed(&rows, rank, out, DType::F32)]
        };
        let stacks = pairs.iter().zip(PAIRS).map(pack).collect();
        Layer { w: packed(&normal(77, 1), 7, 11, DType::F32), bias: tensor(&[11], DType::F32, 2), pairs, packed: stacks }
    }

    fn random() -> Self {
        let pair = |(i, (rank, _, out)): (u64, (usize, usize, usize))| (normal(rank * 7, 10 + i), normal(rank * out, 20 + i));
        Layer::new((0..).zip(PAIRS).map(pair).collect())
    }

    fn linear(&self) -> Linear<'_> {
        Linear { weight: self.w.layer(0), bias: Some(self.bias.as_ref()), lora: self.groups() }
    }

    fn groups(&self) -> Arc<[LoraGroup<'_>]> {
        let projection = |i: usize| LoraProjection {
            a: self.packed[i][0].layer(0),
            b: self.packed[i][1].layer(0),
            scale: 0.5,
            first_column: PAIRS[i].1,
            site: LoraSite { group: 0, module: i, layer: 0 },
        };
        let group = |tokens, sequences: &[_], pairs: &[usize]| LoraGroup {
            tokens,
            sequences: sequences.into(),
            projections: pairs.iter().map(|&i| projection(i)).collect(),
        };
        Arc::from([group(0..3, &[0..1, 1..3], &[0, 1]), group(3..4, &[3..4], &[]), group(4..9, &[4..7, 7..9], &[2])])
    }
}

/// Gradients for the pairs of [`Layer`], but not for the one that only scores.
fn layer_gradients(scores_only: Option<usize>) -> Gradients {
    let mut gradients = Gradients::default();
    for (i, (rank, _, out)) in PAIRS.into_iter().enumerate().filter(|(i, _)| Some(*i) != scores_only) {
        gradients.open(LoraSite { group: 0, module: i, layer: 0 }, rank, 7, out);
    }
    gradients
}

#[test]
fn linear_adds_low_rank_products_to_the_tokens_and_columns_of_their_group() {
    let (b, layer, x) = (backend(), Layer::random(), tensor(&[9, 7], DType::F32, 3));
    let mut tape = Tape::inference(&b);
    let input = tape.constant(x.clone());
    let y = tape.linear(&input, layer.linear()).unwrap();
    let (x, w, bias) = (x.to_f32_vec(), normal(77, 1), layer.bias.to_f32_vec());
    let expected: Vec<f64> = (0..9 * 11)
        .map(|i| {
            let (t, o) = (i / 11, i % 11);
            let x: Vec<f64> = x[t * 7..][..7].iter().map(|&v| v as f64).collect();
            let dot = |row: &[f32]| x.iter().zip(row).map(|(x, &w)| x * w as f64).sum::<f64>();
            let pairs: &[usize] = [&[0, 1][..], &[], &[2]][(t >= 3) as usize + (t >= 4) as usize];
            let low_rank = |&p: &usize| {
                let ((a, b), (rank, first, out)) = (&layer.pairs[p], PAIRS[p]);
                let inside = o >= first && o < first + out;
                (0..rank)
                    .map(|r| if inside { 0.5 * dot(&a[r * 7..][..7]) * b[r * out + o - first] as f64 } else { 0.0 })
                    .sum::<f64>()
            };
            dot(&w[o * 7..][..7]) + bias[o] as f64 + pairs.iter().map(low_rank).sum::<f64>()
        })
        .collect();
    assert_close(&y.value().to_f32_vec(), &expected, 1e-5, "linear");
}

#[test]
fn the_gradients_of_linear_are_those_of_finite_differences() {
    let (b, layer, x) = (backend(), Layer::random(), tensor(&[9, 7], DType::F32, 3));
    check_gradient(&b, &x, |tape, x| tape.linear(x, layer.linear()));

    let mut gradients = layer_gradients(None);
    let (_, dx) = go_back(&b, &x, &mut gradients, |tape, x| tape.linear(x, layer.linear()));
    let loss = |layer: &Layer| {
        let mut tape = Tape::inference(&b);
        let x = tape.constant(x.clone());
        weigh(tape.linear(&x, layer.linear()).unwrap().value())
    };
    for i in 0..PAIRS.len() {
        let with = |pair| {
            let mut pairs = layer.pairs.clone();
            pairs[i] = pair;
            loss(&Layer::new(pairs))
        };
        let (a, b) = layer.pairs[i].clone();
        let (da, db) = gradients.of(LoraSite { group: 0, module: i, layer: 0 });
        assert_close(&da, &slopes(&a, 0.1, |a| with((a.to_vec(), b.clone()))), 1e-3, &format!("A of pair {i}"));
        assert_close(&db, &slopes(&b, 0.1, |b| with((a.clone(), b.to_vec()))), 1e-3, &format!("B of pair {i}"));
    }

    // A group that only scores, and an input that needs no gradient, take nothing from the others.
    let mut fewer = layer_gradients(Some(1));
    let (_, dx_of_fewer) = go_back(&b, &x, &mut fewer, |tape, x| tape.linear(x, layer.linear()));
    let mut leaf = layer_gradients(Some(1));
    let mut tape = Tape::recording(&b);
    let constant = tape.constant(x.clone());
    let y = tape.linear(&constant, layer.linear()).unwrap();
    tape.backward(y, tensor(&[9, 11], DType::F32, 99), &mut leaf).unwrap();
    assert_eq!(dx, dx_of_fewer);
    for site in [0, 2].map(|module| LoraSite { group: 0, module, layer: 0 }) {
        assert_eq!(gradients.of(site), fewer.of(site));
        assert_eq!(gradients.of(site), leaf.of(site));
    }
}

/// Rows to which no gradient comes are left out of what goes back. A gradient so small that it is lost in every sum is not, and leaves the same bits.
#[test]
fn rows_without_a_gradient_are_left_out_of_the_way_back_of_linear() {
    let sequences = [0..200, 200..330, 330..340, 340..500];
    let is_live = |row: usize| (150..230).contains(&row) || row == 335 || (440..468).contains(&row);
    for dtype in [DType::F32, DType::BF16] {
        let (w, a, b_t) = (normal(70 * 40, 1), normal(6 * 40, 2), normal(70 * 6, 3));
        let (w, a, b_t) = (packed(&w, 40, 70, dtype), packed(&a, 40, 6, dtype), packed(&b_t, 6, 70, dtype));
        let site = |group| LoraSite { group, module: 0, layer: 0 };
        let group = |number: usize, sequences: &[Range<usize>]| LoraGroup {
            tokens: sequences[0].start..sequences[sequences.len() - 1].end,
            sequences: sequences.into(),
            projections: vec![LoraProjection {
                a: a.layer(0),
                b: b_t.layer(0),
                scale: 0.5,
                first_column: 0,
                site: site(number),
            }],
        };
        let lora: Arc<[LoraGroup<'_>]> = [group(0, &sequences[..3]), group(1, &sequences[3..])].into();
        let (x, dense) = (tensor(&[500, 40], dtype, 4), normal(500 * 70, 5));
        for arithmetic in Arithmetic::available() {
            let b = CpuBackend::with_isa(arithmetic, 2);
            let layer = Linear { weight: w.layer(0), bias: None, lora: lora.clone() };
            let low = b.linear(&x, &layer, None).unwrap();
            let go_back = |elsewhere: f32| {
                let mut x = x.clone();
                if elsewhere == 0.0 {
                    // Of what is left out nobody looks at these.
                    let mut values = x.to_f32_vec();
                    [0..128, 232..330, 340..436, 468..500]
                        .into_iter()
                        .for_each(|rows| values[rows.start * 40..rows.end * 40].fill(f32::NAN));
                    x = Tensor::from_f32(&values, x.shape().dims(), dtype).unwrap();
                }
                let dy: Vec<f32> =
                    dense.iter().enumerate().map(|(i, &v)| if is_live(i / 70) { v } else { elsewhere }).collect();
                let dy = Tensor::from_f32(&dy, &[500, 70], dtype).unwrap();
                let mut gradients = Gradients::default();
                (0..2).for_each(|group| gradients.open(site(group), 6, 40, 70));
                let mut pass = Backward::new(&b, &mut gradients);
                let dx = linear::backward(&mut pass, &x, &dy, &layer, &low, true).unwrap().unwrap();
                (dx.to_f32_vec(), [0, 1].map(|group| gradients.of(site(group))))
            };
            let ((skipped, weights), (whole, weights_of_whole)) = (go_back(0.0), go_back(1e-30));
            assert!(weights == weights_of_whole, "{arithmetic} {dtype}");
            for (row, (skipped, whole)) in skipped.chunks(40).zip(whole.chunks(40)).enumerate() {
                let expected = if is_live(row) { whole } else { &[0.0; 40][..] };
                assert_eq!(skipped, expected, "{arithmetic} {dtype}, row {row}");
            }
        }
    }
}

const GEOMETRY: AttentionGeometry = AttentionGeometry {
    heads: 4,
    kv_heads: 2,
    head_dim: 6,
    values: KvValues::Own(6),
    scale: 0.4,
    eps: 1e-6,
    window: None,
    sees: Sight::Before,
};

fn attention_input<'a>(
    b: &CpuBackend,
    g: AttentionGeometry,
    norms: &'a [Tensor; 2],
    spans: &[AttentionSpan<'a>],
) -> AttentionInput<'a> {
    let positions: Vec<u32> = spans.iter().flat_map(|s| (0..s.tokens.len()).map(|i| (s.past + i) as u32)).collect();
    let rotary = Rc::new(b.rotary(&positions, &frequencies(g.head_dim), 1.0).unwrap());
    let norms = Some([norms[0].as_ref(), norms[1].as_ref()]);
    AttentionInput { geometry: g, layout: QkvLayout::fused(&g), norms, sinks: None, rotary, spans: spans.into(), queries: None }
}

fn whole(tokens: std::ops::Range<usize>) -> AttentionSpan<'static> {
    AttentionSpan { tokens, past: 0, pages: &[] }
}

/// `100^(-2i / head_dim)`.
fn frequencies(head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2).map(|i| 100f32.powf(-2.0 * i as f32 / head_dim as f32)).collect()
}

/// [`target_logprobs`] in one chunk, undisturbed.
fn logprobs(
    b: &CpuBackend,
    x: &Tensor,
    (w, lora): (crate::PackedRef<'_>, &[LoraGroup<'_>]),
    sequences: &[Range<usize>],
    targets: LogprobTargets<'_>,
    loss: Option<(&dyn TargetLoss, &mut dyn LoraGradients)>,
) -> crate::Result<(Vec<f32>, Option<Tensor>)> {
    let mut between = || ControlFlow::Continue(());
    // The parts of a pass live as long as each other.
    let loss: Option<(&dyn TargetLoss, &mut dyn LoraGradients)> = match loss {
        Some((loss, gradients)) => Some((loss, gradients)),
        None => None,
    };
    let pass = LogprobPass { sequences, targets, loss, chunk_bytes: LOGITS_CHUNK_BYTES, repeats: None, between: &mut between };
    target_logprobs(b, x, w, lora, pass)
}

/// A layer of weights that outlives every test.
fn packed_forever(stack: &PackedStack) -> crate::PackedRef<'static> {
    let (layer, dtype) = (stack.layer(0), stack.layer(0).dtype());
    let copy = PackedStack::zeros(1, layer.in_features(), layer.out_features(), dtype);
    Box::leak(Box::new(copy)).layer(0)
}

#[test]
fn log_probabilities_and_their_gradient_are_those_of_a_plain_softmax() {
    let (b, layer, x) = (backend(), Layer::random(), tensor(&[9, 7], DType::F32, 3));
    // Rows without targets, with one, with the same twice, and with all.
    let ids = [3, 5, 5, 0, 10, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7];
    let offsets = [0, 1, 1, 4, 4, 5, 6, 6, 17, 18];
    let targets = LogprobTargets { ids: &ids, offsets: &offsets };
    let loss = Quadratic {
        factors: vec![1.0, 0.5, 0.25, -2.0, 0.0, 1.5, 0.0, 0.0, 0.3, -0.1, 0.2, 0.0, 0.7, -0.5, 0.1, 0.0, 0.4, 2.0],
    };
    let forward = |layer: &Layer, x: &Tensor| {
        logprobs(&b, x, (layer.w.layer(0), &layer.groups()), &[0..4, 4..9], targets, None).unwrap().0
    };
    let mut gradients = layer_gradients(None);
    let w = layer.w.layer(0);
    let lora = Some((&loss as &dyn TargetLoss, &mut gradients as &mut dyn LoraGradients));
    let (logprobs, dx) = logprobs(&b, &x, (w, &layer.groups()), &[0..4, 4..9], targets, lora).unwrap();
    assert_eq!(logprobs, forward(&layer, &x));

    let mut tape = Tape::inference(&b);
    let input = tape.constant(x.clone());
    let logits = tape.linear(&input, Linear { bias: None, ..layer.linear() }).unwrap().value().to_f32_vec();
    let expected: Vec<f64> = (0..9)
        .flat_map(|row| {
            let logits = &logits[row * 11..][..11];
            let normalizer = logits.iter().map(|&v| (v as f64).exp()).sum::<f64>().ln();
            ids[offsets[row]..offsets[row + 1]]
                .iter()
                .map(move |&id| logits[id as usize] as f64 - normalizer)
                .collect::<Vec<_>>()
        })
        .collect();
    assert_close(&logprobs, &expected, 1e-6, "log-probabilities");

    let by_x =
        slopes(&x.to_f32_vec(), 1e-2, |x| loss.value(&forward(&layer, &Tensor::from_f32(x, &[9, 7], DType::F32).unwrap())));
    assert_close(&dx.unwrap().to_f32_vec(), &by_x, 5e-3, "dx");
    for i in 0..PAIRS.len() {
        let with = |pair| {
            let mut pairs = layer.pairs.clone();
            pairs[i] = pair;
            loss.value(&forward(&Layer::new(pairs), &x))
        };
        let (a, b) = layer.pairs[i].clone();
        let (da, db) = gradients.of(LoraSite { group: 0, module: i, layer: 0 });
        assert_close(&da, &slopes(&a, 1e-2, |a| with((a.to_vec(), b.clone()))), 5e-3, &format!("A of pair {i}"));
        assert_close(&db, &slopes(&b, 1e-2, |b| with((a.clone(), b.to_vec()))), 5e-3, &format!("B of pair {i}"));
    }
}

#[test]
fn the_optimizer_and_norms_have_the_same_bits_on_any_number_of_threads() {
    let step =
        AdamwStep { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, gradient_scale: 0.3, step: 3 };
    let shape = [3, 7, 4999];
    for isa in Arithmetic::available() {
        let results = [1, 3, 4].map(|threads| {
            let b = CpuBackend::with_isa(isa, threads);
            let mut state = [1, 2, 3, 4].map(|key| tensor(&shape, DType::F32, key));
            let [w, gradient, m, v] = &mut state;
            let squares = b.sum_squares(gradient).unwrap();
            let positive: Vec<f32> = v.to_f32_vec().iter().map(|x| x * x).collect();
            v.as_mut().copy_from_f32(&positive).unwrap();
            b.adamw(&step, w, gradient, m, v).unwrap();
            assert!(gradient.to_f32_vec().iter().all(|&g| g == 0.0));
            (squares.to_bits(), [w, m, v].map(|t| bits(t)))
        });
        assert!(results[0] == results[1] && results[0] == results[2], "{isa}");
    }
}
