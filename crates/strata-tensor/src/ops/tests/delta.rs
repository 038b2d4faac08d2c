//! The gated delta net: its definition, its gradient, and its bits however a sequence is cut and whoever is beside it.

use super::*;
use crate::backend::{DeltaGeometry, DeltaInputs, DeltaParams, DeltaSpan};
use crate::testing::{RemoteBackend, rows};
use crate::{DELTA_CHUNK, RecurrentStates, TensorRef};

const EPS: f32 = 1e-6;

/// A layer with random parameters.
struct Net {
    g: DeltaGeometry,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
}

impl Net {
    fn new(k_heads: usize, v_heads: usize, k_dim: usize, v_dim: usize, kernel: usize) -> Self {
        let g = DeltaGeometry { k_heads, v_heads, k_dim, v_dim, kernel };
        let conv = tensor(&[g.conv_width(), 1, kernel], DType::F32, 1);
        let few = |key| tensor(&[v_heads], DType::F32, key);
        // Decays of which a good part of a state outlives its chunk.
        let a_log: Vec<f32> = normal(v_heads, 2).iter().map(|v| v - 4.0).collect();
        let a_log = Tensor::from_f32(&a_log, &[v_heads], DType::F32).unwrap();
        Net { g, conv, a_log, dt_bias: few(3), norm: tensor(&[v_dim], DType::F32, 4) }
    }

    fn input(&self, spans: &[DeltaSpan]) -> DeltaNetInput<'_> {
        self.input_of([&self.conv, &self.a_log, &self.dt_bias, &self.norm], spans)
    }

    fn input_of<'t>(&self, [conv, a_log, dt_bias, norm]: [&'t Tensor; 4], spans: &[DeltaSpan]) -> DeltaNetInput<'t> {
        let params = DeltaParams { conv: conv.as_ref(), a_log: a_log.as_ref(), dt_bias: dt_bias.as_ref() };
        DeltaNetInput { geometry: self.g, params, norm: norm.as_ref(), eps: EPS, spans: spans.into() }
    }

    fn projection(&self, tokens: usize, key: u64) -> Tensor {
        tensor(&[tokens, self.g.projection_width()], DType::F32, key)
    }

    fn run(&self, b: &dyn Backend, x: &Tensor, spans: &[DeltaSpan], states: Option<&mut RecurrentStates>) -> Vec<u32> {
        let mut tape = Tape::inference(b);
        let x = tape.constant(x.clone());
        bits(tape.gated_delta_net(&x, &self.input(spans), states, DType::F32).unwrap().value())
    }

    /// Output and gradient of whole sequences of these lengths.
    fn train(&self, b: &CpuBackend, x: &Tensor, lens: &[usize]) -> (Vec<u32>, Vec<u32>) {
        let spans = whole_spans(lens);
        let (y, dx) = go_back(b, x, &mut Nowhere, |tape, x| tape.gated_delta_net(x, &self.input(&spans), None, DType::F32));
        (bits(&y), dx.into_iter().map(f32::to_bits).collect())
    }

    /// Token by token in f64, as the recurrence is written.
    fn reference(&self, x: &[f64], lens: &[usize]) -> Vec<f64> {
        let g = &self.g;
        let wide = |t: &Tensor| t.to_f32_vec().into_iter().map(f64::from).collect::<Vec<_>>();
        let (conv, a_log, dt_bias, norm) = (wide(&self.conv), wide(&self.a_log), wide(&self.dt_bias), wide(&self.norm));
        let silu = |v: f64| v / (1.0 + (-v).exp());
        let (dk, dv, group) = (g.k_dim, g.v_dim, g.v_heads / g.k_heads);
        let mut out = Vec::new();
        let mut rest = x;
        for len in lens {
            let (rows, later) = rest.split_at(len * g.projection_width());
            rest = later;
            let rows: Vec<&[f64]> = rows.chunks(g.projection_width()).collect();
            let mut states = vec![vec![0.0; dk * dv]; g.v_heads];
            for t in 0..*len {
                let mixed: Vec<f64> = (0..g.conv_width())
                    .map(|c| {
                        let tap =
                            |j: usize| (t + 1 + j).checked_sub(g.kernel).map_or(0.0, |p| rows[p][c] * conv[c * g.kernel + j]);
                        silu((0..g.kernel).map(tap).sum())
                    })
                    .collect();
                let unit = |v: &[f64]| -> Vec<f64> {
                    let length = (v.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                    v.iter().map(|v| v / length).collect()
                };
                for h in 0..g.v_heads {
                    let head = h / group * dk;
                    let q = unit(&mixed[head..head + dk]);
                    let k = unit(&mixed[g.key_width() + head..][..dk]);
                    let v = &mixed[2 * g.key_width() + h * dv..][..dv];
                    let beta = 1.0 / (1.0 + (-rows[t][g.b_columns()][h]).exp());
                    let decay = (-a_log[h].exp() * (rows[t][g.a_columns()][h] + dt_bias[h]).exp().ln_1p()).exp();
                    let state = &mut states[h];
                    state.iter_mut().for_each(|s| *s *= decay);
                    for c in 0..dv {
                        let recalled: f64 = (0..dk).map(|f| k[f] * state[f * dv + c]).sum();
                        (0..dk).for_each(|f| state[f * dv + c] += k[f] * beta * (v[c] - recalled));
                    }
                    let o: Vec<f64> =
                        (0..dv).map(|c| (0..dk).map(|f| q[f] * state[f * dv + c]).sum::<f64>() / (dk as f64).sqrt()).collect();
                    let scale = (o.iter().map(|v| v * v).sum::<f64>() / dv as f64 + EPS as f64).sqrt();
                    let z = &rows[t][g.z_columns()][h * dv..][..dv];
                    out.extend((0..dv).map(|c| norm[c] * o[c] / scale * silu(z[c])));
                }
            }
        }
        out
    }
}

fn whole_spans(lens: &[usize]) -> Vec<DeltaSpan> {
    let mut end = 0;
    let span = |&len: &usize| {
        end += len;
        DeltaSpan { tokens: end - len..end, past: 0, slot: None }
    };
    lens.iter().map(span).collect()
}

fn wide(x: &Tensor) -> Vec<f64> {
    x.to_f32_vec().into_iter().map(f64::from).collect()
}

#[test]
fn a_gated_delta_net_equals_its_recurrence() {
    for (net, lens) in [
        (Net::new(2, 4, 6, 5, 4), &[3, 0, 200, 64, 1][..]),
        (Net::new(1, 1, 16, 32, 1), &[130]),
        (Net::new(2, 2, 33, 17, 8), &[65, 5]),
        (Net::new(1, 2, 128, 128, 4), &[150, 63]),
        // More vectors than go together, and one that goes alone.
        (Net::new(1, 1, 20, 80, 2), &[70]),
    ] {
        let x = net.projection(lens.iter().sum(), 7);
        let expected = net.reference(&wide(&x), lens);
        for isa in Isa::available() {
            let y = net.run(&CpuBackend::with_isa(isa, 2), &x, &whole_spans(lens), None);
            let y: Vec<f32> = y.into_iter().map(f32::from_bits).collect();
            assert_close(&y, &expected, 2e-4, &format!("{isa}, {:?}", net.g));
        }
    }
}

#[test]
fn the_gradient_of_a_gated_delta_net_is_that_of_finite_differences() {
    // Two whole chunks and a part of one, more value heads than key heads, and widths that fill no vector.
    for (net, lens) in
        [(Net::new(2, 4, 3, 2, 4), &[2, 0, 133, 4][..]), (Net::new(1, 1, 5, 19, 2), &[70]), (Net::new(1, 1, 2, 2, 1), &[64])]
    {
        let x = net.projection(lens.iter().sum(), 7);
        let b = backend();
        let spans = whole_spans(lens);
        let (y, dx) = go_back(&b, &x, &mut Nowhere, |tape, x| tape.gated_delta_net(x, &net.input(&spans), None, DType::F32));
        let dy = normal(y.shape().len(), 99);
        let mut point = wide(&x);
        let expected: Vec<f64> = (0..point.len())
            .map(|i| {
                let (center, step) = (point[i], 1e-5);
                let mut at = |value| {
                    point[i] = value;
                    net.reference(&point, lens).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum::<f64>()
                };
                let slope = (at(center + step) - at(center - step)) / (2.0 * step);
                point[i] = center;
                slope
            })
            .collect();
        assert_close(&dx, &expected, 1e-4, &format!("{:?}", net.g));
    }
}

/// The output of one sequence in pieces of these lengths, from a slot that another left full of NaN.
fn in_pieces(net: &Net, b: &CpuBackend, x: &Tensor, pieces: &[usize]) -> Vec<u32> {
    let mut states = b.recurrent_states(2, &net.g).unwrap();
    let nans =
        Tensor::from_f32(&vec![f32::NAN; 70 * net.g.projection_width()], &[70, net.g.projection_width()], DType::F32).unwrap();
    net.run(b, &nans, &[DeltaSpan { tokens: 0..70, past: 0, slot: Some(1) }], Some(&mut states));
    let mut past = 0;
    let mut out = Vec::new();
    for &piece in pieces {
        let part = rows(x, past..past + piece);
        out.extend(net.run(b, &part, &[DeltaSpan { tokens: 0..piece, past, slot: Some(1) }], Some(&mut states)));
        past += piece;
    }
    assert_eq!(past, x.rows());
    out
}

#[test]
fn a_sequence_has_the_same_bits_whole_in_pieces_token_by_token_in_company_and_on_any_machine() {
    // Value heads one at a time, and those of a key head together.
    for net in [Net::new(2, 4, 24, 20, 4), Net::new(1, 2, 64, 128, 3), Net::new(4, 8, 8, 8, 4)] {
        let x = net.projection(205, 7);
        let mut fused = None;
        for arithmetic in Arithmetic::available() {
            let b = CpuBackend::with_isa(arithmetic, 1);
            let whole = net.run(&b, &x, &whole_spans(&[205]), None);
            if arithmetic.isa != Isa::Portable {
                assert_eq!(fused.get_or_insert_with(|| whole.clone()), &whole, "{arithmetic}");
            }
            for pieces in [&[205][..], &[64, 64, 64, 13], &[1, 2, 70, 0, 100, 32], &[63, 1, 1, 140], &[1; 205], &[130, 62, 13]]
            {
                assert!(in_pieces(&net, &b, &x, pieces) == whole, "{arithmetic}: {pieces:?}");
            }
            for threads in [2, 3] {
                let b = CpuBackend::with_isa(arithmetic, threads);
                // Another sequence before it, one that only begins, and one that has come half way.
                let mut states = b.recurrent_states(5, &net.g).unwrap();
                let width = net.g.projection_width();
                net.run(&b, &rows(&x, 0..70), &[DeltaSpan { tokens: 0..70, past: 0, slot: Some(4) }], Some(&mut states));
                let values = [net.projection(33, 8).to_f32_vec(), x.to_f32_vec(), rows(&x, 70..205).to_f32_vec()].concat();
                let batch = Tensor::from_f32(&values, &[373, width], DType::F32).unwrap();
                let spans = [
                    DeltaSpan { tokens: 0..33, past: 0, slot: None },
                    DeltaSpan { tokens: 33..238, past: 0, slot: Some(0) },
                    DeltaSpan { tokens: 238..373, past: 70, slot: Some(4) },
                ];
                let out = net.run(&b, &batch, &spans, Some(&mut states));
                let n = net.g.value_width();
                assert!(out[33 * n..238 * n] == whole[..], "{arithmetic}, {threads} threads: whole");
                assert!(out[238 * n..] == whole[70 * n..], "{arithmetic}, {threads} threads: half way");
            }
        }
    }
}

#[test]
fn gradients_have_the_same_bits_in_company_on_any_number_of_threads_and_on_any_machine() {
    let net = Net::new(2, 4, 24, 20, 4);
    let (lens, width) = ([70, 1, 200], net.g.projection_width());
    let x = net.projection(271, 7);
    let mut fused = None;
    for arithmetic in Arithmetic::available() {
        let together = [1, 3].map(|threads| net.train(&CpuBackend::with_isa(arithmetic, threads), &x, &lens));
        assert!(together[0] == together[1], "{arithmetic}: threads");
        let (out, gradient) = &together[0];
        assert_eq!(out, &net.run(&CpuBackend::with_isa(arithmetic, 1), &x, &whole_spans(&lens), None));
        if arithmetic.isa != Isa::Portable {
            assert!(fused.get_or_insert_with(|| gradient.clone()) == gradient, "{arithmetic}");
        }
        // Gradients by the output are drawn for a batch: alone, the first sequence has those it had in company.
        let alone = net.train(&CpuBackend::with_isa(arithmetic, 2), &rows(&x, 0..70), &[70]);
        assert!(alone.1 == gradient[..70 * width], "{arithmetic}: company");
    }
}

#[test]
fn a_fork_goes_on_as_its_origin_does_and_neither_sees_the_other() {
    let (net, b) = (Net::new(2, 4, 8, 8, 4), backend());
    let (x, n) = (net.projection(150, 7), net.g.value_width());
    let whole = net.run(&b, &x, &whole_spans(&[150]), None);
    let mut states = b.recurrent_states(3, &net.g).unwrap();
    let span = |tokens: Range<usize>, past, slot| DeltaSpan { tokens, past, slot: Some(slot) };
    net.run(&b, &rows(&x, 0..100), &[span(0..100, 0, 0)], Some(&mut states));
    b.copy_slot(&mut states, 0, 2).unwrap();
    let other = net.projection(40, 8);
    let of_other = net.run(&b, &other, &[span(0..40, 100, 0)], Some(&mut states));
    assert!(net.run(&b, &rows(&x, 100..150), &[span(0..50, 100, 2)], Some(&mut states)) == whole[100 * n..]);
    let mixed = Tensor::from_f32(
        &[rows(&x, 0..100).to_f32_vec(), other.to_f32_vec()].concat(),
        &[140, net.g.projection_width()],
        DType::F32,
    )
    .unwrap();
    assert!(net.run(&b, &mixed, &whole_spans(&[140]), None)[100 * n..] == of_other);
    b.release_slots(&mut states, &[0, 2]).unwrap();
    assert!(net.run(&b, &x, &[span(0..150, 0, 0)], Some(&mut states)) == whole);
    assert!(b.copy_slot(&mut states, 0, 3).is_err() && b.copy_slot(&mut states, 3, 0).is_err());
    assert!(b.release_slots(&mut states, &[1, 3]).is_err());
    assert_eq!(states.num_slots(), 3);
}

#[test]
fn what_follows_a_token_does_not_reach_it_be_it_infinite() {
    let (net, b) = (Net::new(1, 2, 8, 8, 4), backend());
    let x = net.projection(100, 7);
    let (clean, n) = (net.run(&b, &x, &whole_spans(&[90, 10]), None), net.g.value_width());
    for at in [0, 63, 70, 77] {
        let mut values = x.to_f32_vec();
        values[at * net.g.projection_width()..90 * net.g.projection_width()].fill(f32::INFINITY);
        let x = Tensor::from_f32(&values, &[100, net.g.projection_width()], DType::F32).unwrap();
        let out = net.run(&b, &x, &whole_spans(&[90, 10]), None);
        assert!(out[..at * n] == clean[..at * n] && out[90 * n..] == clean[90 * n..], "from token {at}");
    }
}

#[test]
fn nothing_depends_on_what_recycled_memory_holds() {
    let (net, b) = (Net::new(2, 4, 24, 20, 4), backend());
    let x = net.projection(400, 7);
    let first = net.train(&b, &x, &[200, 200]);
    let g = net.g;
    for width in [g.key_width(), g.value_width(), g.v_heads, g.projection_width()] {
        poison_recycled(&[400, width], DType::F32);
    }
    poison_recycled(&[4 * 4 * g.k_dim * 32], DType::F32);
    assert!(first == net.train(&b, &x, &[200, 200]));
}

#[test]
fn gradients_rounded_for_a_matmul_are_those_in_f32_rounded() {
    let (net, b) = (Net::new(1, 2, 8, 8, 4), backend());
    let x = net.projection(70, 7);
    let spans = whole_spans(&[70]);
    let run = |dtype| go_back(&b, &x, &mut Nowhere, |tape, x| tape.gated_delta_net(x, &net.input(&spans), None, dtype));
    let ((y, dx), (y_narrow, dx_narrow)) = (run(DType::F32), run(DType::BF16));
    let rounded = |values: &[f32]| Tensor::from_f32(values, &[values.len()], DType::BF16).unwrap().to_f32_vec();
    assert_eq!((rounded(&y.to_f32_vec()), rounded(&dx)), (y_narrow.to_f32_vec(), dx_narrow));
}

#[test]
fn a_remote_device_computes_the_same_bits_and_refuses_for_lack_of_memory() {
    let (net, cpu) = (Net::new(1, 2, 8, 8, 4), backend());
    let far = RemoteBackend::new(backend());
    let x = net.projection(90, 7);
    let send = |t: TensorRef<'_>| far.tensor(&t.to_f32_vec(), t.shape().dims(), DType::F32).unwrap();
    let params = [&net.conv, &net.a_log, &net.dt_bias, &net.norm].map(|t| send(t.as_ref()));
    let [conv, a_log, dt_bias, norm] = &params;
    let input = |spans: &[DeltaSpan]| net.input_of([conv, a_log, dt_bias, norm], spans);
    let mut states = far.recurrent_states(2, &net.g).unwrap();
    let whole = net.run(&cpu, &x, &whole_spans(&[90]), None);
    let mut out = Vec::new();
    for (range, slot) in [(0..70, 0), (70..90, 1)] {
        far.copy_slot(&mut states, 0, slot).unwrap();
        let mut tape = Tape::inference(&far);
        let part = tape.constant(send(rows(&x, range.clone()).as_ref()));
        let spans = [DeltaSpan { tokens: 0..range.len(), past: range.start, slot: Some(slot) }];
        let y = tape.gated_delta_net(&part, &input(&spans), Some(&mut states), DType::F32).unwrap();
        out.extend(far.to_f32_vec(y.value().as_ref()).unwrap().into_iter().map(f32::to_bits));
    }
    assert!(out == whole);
    far.release_slots(&mut states, &[0]).unwrap();

    let spans = whole_spans(&[90]);
    let train = || -> Result<Vec<u32>> {
        let gradient = Rc::new(RefCell::new(None));
        let (mut tape, slot) = (Tape::recording(&far), gradient.clone());
        let x = tape.push(Rc::new(far.tensor(&x.to_f32_vec(), x.shape().dims(), DType::F32)?), move |_, dx| {
            *slot.borrow_mut() = Some(dx);
            Ok(())
        });
        let y = tape.gated_delta_net(&x, &input(&spans), None, DType::F32)?;
        let dy = far.tensor(&normal(y.value().shape().len(), 99), y.value().shape().dims(), DType::F32)?;
        tape.backward(y, dy, &mut Nowhere)?;
        let dx = gradient.borrow_mut().take().unwrap();
        Ok(far.to_f32_vec(dx.as_ref().as_ref())?.into_iter().map(f32::to_bits).collect())
    };
    let before = far.allocations();
    assert!(train().unwrap() == net.train(&cpu, &x, &[90]).1);
    for nth in 1..=far.allocations() - before {
        far.refuse_allocation(nth);
        assert!(matches!(train(), Err(Error::OutOfMemory { .. })), "allocation {nth}");
    }
    assert!(train().is_ok());
}

#[test]
fn what_does_not_fit_a_gated_delta_net_is_an_error() {
    let (net, b) = (Net::new(2, 4, 8, 8, 4), backend());
    let other = Net::new(2, 4, 8, 8, 3);
    let mut states = b.recurrent_states(2, &net.g).unwrap();
    let mut states_of_other = b.recurrent_states(2, &other.g).unwrap();
    let span = |tokens: Range<usize>, past, slot| DeltaSpan { tokens, past, slot };
    let good = [span(0..3, 0, None), span(3..5, 9, Some(1))];
    let run = |x: &Tensor, input: &DeltaNetInput<'_>, states: Option<&mut RecurrentStates>| {
        let mut tape = Tape::inference(&b);
        let x = tape.constant(x.clone());
        tape.gated_delta_net(&x, input, states, DType::BF16).map(|_| ()).map_err(|e| e.to_string())
    };
    let x = net.projection(5, 7);
    let mut refuses = |spans: &[DeltaSpan]| run(&x, &net.input(spans), Some(&mut states)).unwrap_err();
    assert!(refuses(&[span(0..4, 0, None)]).contains("0..5"));
    assert!(refuses(&[span(0..4, 0, None), span(3..5, 0, None)]).contains("0..5"));
    assert!(refuses(&[span(0..5, 3, None)]).contains("3 tokens behind it"));
    assert!(refuses(&[span(0..5, 3, Some(2))]).contains("index 2"));
    assert!(refuses(&[span(0..2, 0, Some(1)), span(2..5, 3, Some(1))]).contains("slot 1"));
    assert!(refuses(&[span(0..5, usize::MAX, Some(1))]).contains(&usize::MAX.to_string()));
    run(&x, &net.input(&good), Some(&mut states)).unwrap();
    assert!(run(&x, &net.input(&good), None).unwrap_err().contains("index 1"));
    assert!(run(&x, &net.input(&good), Some(&mut states_of_other)).unwrap_err().contains("kernel: 4"));
    let spans = whole_spans(&[5]);
    run(&x, &net.input(&spans), Some(&mut states)).unwrap();
    assert!(run(&tensor(&[5, 7], DType::F32, 1), &net.input(&spans), None).is_err());
    assert!(run(&tensor(&[5, net.g.projection_width()], DType::BF16, 1), &net.input(&spans), None).is_err());
    let short = tensor(&[3], DType::F32, 1);
    for i in 0..4 {
        let mut params = [&net.conv, &net.a_log, &net.dt_bias, &net.norm];
        params[i] = &short;
        assert!(run(&x, &net.input_of(params, &spans), None).unwrap_err().contains("[3]"), "parameter {i}");
    }
    let sizes: [fn(&mut DeltaGeometry); 6] =
        [|g| g.k_heads = 3, |g| g.k_heads = 0, |g| g.v_dim = 257, |g| g.k_dim = 0, |g| g.kernel = 9, |g| g.kernel = 0];
    for change in sizes {
        let mut input = net.input(&spans);
        change(&mut input.geometry);
        assert!(run(&x, &input, None).unwrap_err().contains("gated delta rule with"));
    }
    let mut tape = Tape::recording(&b);
    let leaf = tape.push(Rc::new(x.clone()), |_, _| Ok(()));
    assert!(tape.gated_delta_net(&leaf, &net.input(&good), Some(&mut states), DType::F32).is_err());
    assert!(tape.gated_delta_net(&leaf, &net.input(&spans), None, DType::F32).is_ok());
    assert!(matches!(b.recurrent_states(1 << 60, &net.g), Err(Error::OutOfMemory { .. })));
    assert!(b.recurrent_slot_bytes(&net.g) >= 4 * net.g.v_heads * net.g.k_dim * net.g.v_dim);
    assert_eq!(DELTA_CHUNK, 64);
}

/// What comes behind the last token with a gradient is not looked at: there are no numbers here.
#[test]
fn the_rule_does_not_go_back_through_chunks_to_which_no_gradient_comes() {
    let (net, b) = (Net::new(2, 4, 24, 20, 4), backend());
    let g = net.g;
    let widths = [g.key_width(), g.key_width(), g.value_width(), g.v_heads, g.v_heads];
    // Tokens, those that have numbers, and those with a gradient, of two sequences.
    let sequences = [(200, 128, 70), (150, 64, 0)];
    let inputs_of = |lengths: [usize; 2]| {
        let mut inputs = widths.map(|_| Vec::new());
        for (s, len) in lengths.into_iter().enumerate() {
            for (i, (numbers, width)) in inputs.iter_mut().zip(widths).enumerate() {
                // Keys of some length below 1, decays and steps as they are after their gates.
                let number = |x: f32| match i {
                    0..3 => x * 0.2,
                    3 => -x.abs() * 0.1,
                    _ => 1.0 / (1.0 + x.exp()),
                };
                let random = normal(128 * width, (10 * s + i) as u64);
                let row = |row: usize| random.get(row * width..(row + 1) * width).filter(|_| row < sequences[s].1);
                numbers.extend(
                    (0..len).flat_map(|t| row(t).map_or(vec![f32::NAN; width], |r| r.iter().map(|&x| number(x)).collect())),
                );
            }
        }
        let tokens: usize = lengths.iter().sum();
        let [q, k, v, decay, beta] = inputs;
        let of = |numbers: Vec<f32>, width: usize| Tensor::from_f32(&numbers, &[tokens, width], DType::F32).unwrap();
        DeltaInputs {
            q: of(q, widths[0]),
            k: of(k, widths[1]),
            v: of(v, widths[2]),
            g: of(decay, widths[3]),
            beta: of(beta, widths[4]),
        }
    };
    let gradients = |lengths: [usize; 2]| {
        let tokens: usize = lengths.iter().sum();
        let mut dout = Vec::new();
        for (s, len) in lengths.into_iter().enumerate() {
            let random = normal(128 * g.value_width(), 90 + s as u64);
            let with = sequences[s].2.min(len) * g.value_width();
            dout.extend_from_slice(&random[..with]);
            dout.resize(dout.len() + len * g.value_width() - with, 0.0);
        }
        let dout = Tensor::from_f32(&dout, &[tokens, g.value_width()], DType::F32).unwrap();
        let stale = |width: usize| Tensor::from_f32(&vec![f32::NAN; tokens * width], &[tokens, width], DType::F32).unwrap();
        let [q, k, v, decay, beta] = widths.map(stale);
        let mut found = DeltaInputs { q, k, v, g: decay, beta };
        b.delta_rule_backward(&dout, &inputs_of(lengths), &g, &whole_spans(&lengths), &mut found).unwrap();
        [found.q, found.k, found.v, found.g, found.beta].map(|t| t.to_f32_vec())
    };
    let (all, short) = (gradients([200, 150]), gradients([128, 64]));
    for ((all, short), width) in all.into_iter().zip(short).zip(widths) {
        let bits = |numbers: &[f32]| numbers[..128 * width].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&all) == bits(&short));
        assert!(short[..128 * width].iter().filter(|v| **v != 0.0).count() > 64 * width);
        assert!(all[128 * width..].iter().all(|v| *v == 0.0));
    }
}
