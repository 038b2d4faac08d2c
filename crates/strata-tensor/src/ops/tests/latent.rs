//! Attention over latents, against the keys and values that the layer would make of them: `DeepseekV3Attention` of transformers, in f64.

use super::*;
use crate::backend::{Rotary, RotaryStyle};
use crate::{Int4Group, WeightFormat, WeightStorage};

const SPANS: [std::ops::Range<usize>; 3] = [0..3, 3..7, 7..11];
const TOKENS: usize = 11;
/// Ranks of the pairs of tokens `0..7` and `7..11`.
const RANKS: [usize; 2] = [2, 3];
const SCALE: f32 = 0.3;
const LORA_SCALE: f32 = 0.5;
const EPS: f32 = 1e-6;

/// Widths of a layer.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    latent: usize,
    rope: usize,
    nope: usize,
    value: usize,
    style: RotaryStyle,
}

/// Heads that share panels of the packed weight, and heads that are whole panels.
const SHAPES: [Shape; 2] = [
    Shape { heads: 3, latent: 10, rope: 6, nope: 4, value: 5, style: RotaryStyle::Interleaved },
    Shape { heads: 2, latent: 16, rope: 4, nope: 64, value: 64, style: RotaryStyle::Halves },
];

impl Shape {
    fn outputs(&self) -> usize {
        self.heads * (self.nope + self.value)
    }

    fn q_width(&self) -> usize {
        self.heads * (self.nope + self.rope)
    }

    fn geometry(&self) -> AttentionGeometry {
        AttentionGeometry {
            heads: self.heads,
            kv_heads: 1,
            head_dim: self.latent + self.rope,
            values: KvValues::PrefixOfKey(self.latent),
            scale: SCALE,
            eps: EPS,
            window: None,
            sees: Sight::Before,
        }
    }
}

/// What goes in: queries, latents, and A `[rank, latent]` and B transposed `[rank, outputs]` of each pair.
#[derive(Clone)]
struct Inputs {
    q: Vec<f32>,
    kv: Vec<f32>,
    pairs: [[Vec<f32>; 2]; 2],
}

impl Inputs {
    fn random(s: &Shape) -> Self {
        let small = |n, key| normal(n, key).iter().map(|v| 0.5 * v).collect::<Vec<f32>>();
        let pair = |i: usize| [small(RANKS[i] * s.latent, 20 + i as u64), small(RANKS[i] * s.outputs(), 30 + i as u64)];
        Inputs { q: normal(TOKENS * s.q_width(), 1), kv: normal(TOKENS * (s.latent + s.rope), 2), pairs: [pair(0), pair(1)] }
    }
}

fn weight(s: &Shape) -> Vec<f32> {
    normal(s.outputs() * s.latent, 3).iter().map(|v| v * 0.3).collect()
}

fn norm(s: &Shape) -> Tensor {
    tensor(&[s.latent], DType::F32, 4)
}

/// Position of a token in its sequence.
fn position(token: usize) -> usize {
    token - SPANS.iter().find(|span| span.contains(&token)).unwrap().start
}

/// The definition: keys and values of every head of every token are made, and attended to.
fn reference(s: &Shape, b: &CpuBackend, inputs: &Inputs) -> Vec<f64> {
    let positions: Vec<u32> = (0..TOKENS).map(|t| position(t) as u32).collect();
    let rotary = b.rotary(&positions, &frequencies(s.rope), 1.0).unwrap();
    let (cos, sin) = (rotary.cos.to_f32_vec(), rotary.sin.to_f32_vec());
    let wide = |values: &[f32]| values.iter().map(|&v| v as f64).collect::<Vec<f64>>();
    let half = s.rope / 2;
    let turn = |x: &[f64], t: usize| -> Vec<f64> {
        let pair = |i: usize| if s.style == RotaryStyle::Halves { (x[i], x[i + half]) } else { (x[2 * i], x[2 * i + 1]) };
        let angle = |i: usize| (cos[t * half + i] as f64, sin[t * half + i] as f64);
        let low = (0..half).map(|i| pair(i).0 * angle(i).0 - pair(i).1 * angle(i).1);
        low.chain((0..half).map(|i| pair(i).1 * angle(i).0 + pair(i).0 * angle(i).1)).collect()
    };
    let (w, norm) = (wide(&weight(s)), wide(&norm(s).to_f32_vec()));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    // Of each token the rotated key, and what the layer makes of the latent.
    let made: Vec<(Vec<f64>, Vec<f64>)> = (0..TOKENS)
        .map(|t| {
            let kv = wide(&inputs.kv[t * (s.latent + s.rope)..][..s.latent + s.rope]);
            let rms = (dot(&kv[..s.latent], &kv[..s.latent]) / s.latent as f64 + EPS as f64).sqrt();
            let latent: Vec<f64> = kv[..s.latent].iter().zip(&norm).map(|(x, w)| x / rms * w).collect();
            let pair = (t >= 7) as usize;
            let (rank, [a, b]) = (RANKS[pair], inputs.pairs[pair].each_ref().map(|m| wide(m)));
            let low: Vec<f64> = (0..rank).map(|r| LORA_SCALE as f64 * dot(&a[r * s.latent..][..s.latent], &latent)).collect();
            let added = |o: usize| (0..rank).map(|r| low[r] * b[r * s.outputs() + o]).sum::<f64>();
            let out = (0..s.outputs()).map(|o| dot(&w[o * s.latent..][..s.latent], &latent) + added(o)).collect();
            (turn(&kv[s.latent..], t), out)
        })
        .collect();
    let mut out = Vec::new();
    for t in 0..TOKENS {
        let first = t - position(t);
        for h in 0..s.heads {
            let q = wide(&inputs.q[(t * s.heads + h) * (s.nope + s.rope)..][..s.nope + s.rope]);
            let turned = turn(&q[s.nope..], t);
            let head = |u: usize| &made[u].1[h * (s.nope + s.value)..][..s.nope + s.value];
            let score = |u: usize| SCALE as f64 * (dot(&q[..s.nope], &head(u)[..s.nope]) + dot(&turned, &made[u].0));
            let sum: f64 = (first..=t).map(|u| score(u).exp()).sum();
            out.extend((0..s.value).map(|c| (first..=t).map(|u| score(u).exp() / sum * head(u)[s.nope + c]).sum::<f64>()));
        }
    }
    out
}

/// A layer on a backend.
struct On {
    weight: PackedStack,
    norm: Tensor,
    pairs: Vec<[PackedStack; 2]>,
    dtype: DType,
}

impl On {
    fn new(b: &dyn Backend, s: &Shape, inputs: &Inputs, dtype: DType) -> Self {
        let rows = |values: &[f32], inputs: usize, outputs: usize| {
            let mut stack = b.packed(1, inputs, outputs, dtype.into()).unwrap();
            let values = b.tensor(values, &[outputs, inputs], DType::F32).unwrap();
            b.pack_rows(&mut stack, 0, values.as_ref()).unwrap();
            stack
        };
        let pair = |i: usize| {
            let [a, transposed] = &inputs.pairs[i];
            let mut of_b = b.packed(1, RANKS[i], s.outputs(), dtype.into()).unwrap();
            let transposed = b.tensor(transposed, &[RANKS[i], s.outputs()], DType::F32).unwrap();
            b.pack_columns(&mut of_b, 0, transposed.as_ref()).unwrap();
            [rows(a, s.latent, RANKS[i]), of_b]
        };
        let norm = b.tensor(&norm(s).to_f32_vec(), &[s.latent], DType::F32).unwrap();
        On { weight: rows(&weight(s), s.latent, s.outputs()), norm, pairs: vec![pair(0), pair(1)], dtype }
    }

    /// What attention reads of these tokens of the batch, which are those of `spans`.
    fn input<'a>(
        &'a self,
        b: &dyn Backend,
        s: &Shape,
        tokens: std::ops::Range<usize>,
        spans: &[AttentionSpan<'a>],
    ) -> LatentAttention<'a> {
        let positions: Vec<u32> = tokens.clone().map(|t| position(t) as u32).collect();
        let angles: Rc<Rotary> = Rc::new(b.rotary(&positions, &frequencies(s.rope), 1.0).unwrap());
        let within = |range: &std::ops::Range<usize>| {
            let clamp = |t: usize| t.clamp(tokens.start, tokens.end) - tokens.start;
            clamp(range.start)..clamp(range.end)
        };
        let group = |i: usize, run: std::ops::Range<usize>| LoraGroup {
            tokens: within(&run),
            sequences: SPANS.iter().filter(|s| run.contains(&s.start)).map(within).filter(|s| !s.is_empty()).collect(),
            projections: vec![LoraProjection {
                a: self.pairs[i][0].layer(0),
                b: self.pairs[i][1].layer(0),
                scale: LORA_SCALE,
                first_column: 0,
                site: LoraSite { group: 0, module: i, layer: 0 },
            }],
        };
        LatentAttention {
            sight: AttentionSight { geometry: s.geometry(), sinks: None, spans: spans.into(), queries: None },
            layer: Linear { weight: self.weight.layer(0), bias: None, lora: Arc::from([group(0, 0..7), group(1, 7..11)]) },
            nope_dim: s.nope,
            value_dim: s.value,
            rotary: LatentRotary { angles, style: s.style },
        }
    }
}

/// Rows of a matrix of all tokens.
fn part(b: &dyn Backend, values: &[f32], tokens: std::ops::Range<usize>) -> Tensor {
    let width = values.len() / TOKENS;
    b.tensor(&values[tokens.start * width..tokens.end * width], &[tokens.len(), width], DType::F32).unwrap()
}

/// Bits on the host.
fn host_bits(b: &dyn Backend, tensor: &Tensor) -> Vec<u32> {
    b.to_f32_vec(tensor.as_ref()).unwrap().into_iter().map(f32::to_bits).collect()
}

/// What a pass over some of the sequences answers: the result, and gradients of queries and latents.
fn pass(
    b: &dyn Backend,
    s: &Shape,
    on: &On,
    inputs: &Inputs,
    sequences: std::ops::Range<usize>,
    gradients: &mut dyn LoraGradients,
) -> [Vec<f32>; 3] {
    let tokens = SPANS[sequences.start].start..SPANS[sequences.end - 1].end;
    let spans: Vec<AttentionSpan<'_>> =
        SPANS[sequences].iter().map(|s| whole(s.start - tokens.start..s.end - tokens.start)).collect();
    let input = on.input(b, s, tokens.clone(), &spans);
    let slots: [Rc<RefCell<Vec<f32>>>; 2] = Default::default();
    let mut tape = Tape::recording(b);
    let [q, kv] = [(&inputs.q, &slots[0]), (&inputs.kv, &slots[1])].map(|(values, slot)| {
        let slot = slot.clone();
        tape.push(Rc::new(part(b, values, tokens.clone())), move |pass, dx| {
            *slot.borrow_mut() = pass.backend.to_f32_vec(dx.as_ref().as_ref())?;
            Ok(())
        })
    });
    let keys = tape.latent_keys(&kv, on.norm.as_ref(), EPS, &input.rotary, on.dtype).unwrap();
    let y = tape.latent_attention(&q, keys, &input, KvAccess::None).unwrap();
    let out = b.to_f32_vec(y.value().as_ref()).unwrap();
    let dy = part(b, &normal(TOKENS * s.heads * s.value, 99), tokens);
    tape.backward(y, dy, gradients).unwrap();
    let [dq, dkv] = slots.map(|slot| slot.take());
    [out, dq, dkv]
}

/// Gradients of A and of B transposed of both pairs, on some device.
struct PairGradients(Vec<[Tensor; 2]>);

impl PairGradients {
    fn zeros(b: &dyn Backend, s: &Shape) -> Self {
        let zeros = |rank: usize, width: usize| b.zeros(&[1, rank, width], DType::F32).unwrap();
        PairGradients(RANKS.map(|rank| [zeros(rank, s.latent), zeros(rank, s.outputs())]).into())
    }

    fn of(&self, b: &dyn Backend, pair: usize) -> [Vec<f32>; 2] {
        self.0[pair].each_ref().map(|t| b.to_f32_vec(t.as_ref()).unwrap())
    }

    fn all(&self, b: &dyn Backend) -> Vec<f32> {
        [self.of(b, 0), self.of(b, 1)].concat().concat()
    }
}

impl LoraGradients for PairGradients {
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<LoraGradient<'_>>> {
        assert!(sites.iter().map(|site| site.module).eq(0..2) && num_layers == 1);
        self.0.iter_mut().map(|[a, b]| Some(LoraGradient { a: a.as_mut(), b: b.as_mut() })).collect()
    }
}

#[test]
fn latents_that_are_absorbed_are_attended_to_as_the_keys_and_values_that_they_stand_for() {
    for (s, isa) in SHAPES.iter().flat_map(|s| Arithmetic::available().into_iter().map(move |isa| (s, isa))) {
        let (b, inputs) = (CpuBackend::with_isa(isa, 2), Inputs::random(s));
        let expected = reference(s, &b, &inputs);
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 6e-2)] {
            let [out, ..] = pass(&b, s, &On::new(&b, s, &inputs, dtype), &inputs, 0..3, &mut Nowhere);
            assert_close(&out, &expected, tolerance, &format!("{isa} {dtype} {s:?}"));
        }
    }
}

#[test]
fn the_gradients_of_absorbed_latents_are_those_of_the_keys_and_values_that_they_stand_for() {
    let s = &SHAPES[0];
    let (b, inputs) = (backend(), Inputs::random(s));
    let mut gradients = PairGradients::zeros(&b, s);
    let [_, dq, dkv] = pass(&b, s, &On::new(&b, s, &inputs, DType::F32), &inputs, 0..3, &mut gradients);
    let dy = normal(TOKENS * s.heads * s.value, 99);
    let loss = |inputs: &Inputs| reference(s, &b, inputs).iter().zip(&dy).map(|(y, &g)| y * g as f64).sum::<f64>();
    let by = |values: &[f32], set: &dyn Fn(&mut Inputs, Vec<f32>)| {
        slopes(values, 1e-2, |values| {
            let mut changed = inputs.clone();
            set(&mut changed, values.to_vec());
            loss(&changed)
        })
    };
    assert_close(&dq, &by(&inputs.q, &|i, q| i.q = q), 1e-3, "queries");
    assert_close(&dkv, &by(&inputs.kv, &|i, kv| i.kv = kv), 1e-3, "latents");
    for i in 0..2 {
        let [da, db] = gradients.of(&b, i);
        assert_close(&da, &by(&inputs.pairs[i][0], &|inputs, a| inputs.pairs[i][0] = a), 1e-3, &format!("A of pair {i}"));
        assert_close(&db, &by(&inputs.pairs[i][1], &|inputs, b| inputs.pairs[i][1] = b), 1e-3, &format!("B of pair {i}"));
    }
}

#[test]
fn latents_have_the_same_bits_alone_in_company_in_parts_on_any_number_of_threads_and_far_away() {
    for (s, dtype) in SHAPES.iter().flat_map(|s| [DType::F32, DType::BF16].map(|dtype| (s, dtype))) {
        for isa in Arithmetic::available() {
            let (one, inputs) = (CpuBackend::with_isa(isa, 1), Inputs::random(s));
            let on = On::new(&one, s, &inputs, dtype);
            let mut together = PairGradients::zeros(&one, s);
            let all = pass(&one, s, &on, &inputs, 0..3, &mut together);
            let three = CpuBackend::with_isa(isa, 3);
            let mut again = PairGradients::zeros(&one, s);
            assert_eq!(pass(&three, s, &on, &inputs, 0..3, &mut again), all, "{isa} {dtype} {s:?} on three threads");
            assert_eq!(again.all(&three), together.all(&one), "{isa} {dtype} {s:?} on three threads");
            let mut apart = PairGradients::zeros(&one, s);
            for i in 0..3 {
                let alone = pass(&three, s, &on, &inputs, i..i + 1, &mut apart);
                for (alone, all) in alone.iter().zip(&all) {
                    let width = all.len() / TOKENS;
                    assert_eq!(alone[..], all[SPANS[i].start * width..SPANS[i].end * width], "{isa} {dtype} {s:?} alone");
                }
            }
            assert_eq!(apart.all(&three), together.all(&one), "{isa} {dtype} {s:?}: a batch in parts sums up to the same");
        }
        let here = CpuBackend::with_isa(Isa::detect(), 2);
        let inputs = Inputs::random(s);
        let mut near_pairs = PairGradients::zeros(&here, s);
        let near = pass(&here, s, &On::new(&here, s, &inputs, dtype), &inputs, 0..3, &mut near_pairs);
        let far = RemoteBackend::new(CpuBackend::with_isa(Isa::detect(), 2));
        let mut far_pairs = PairGradients::zeros(&far, s);
        assert_eq!(pass(&far, s, &On::new(&far, s, &inputs, dtype), &inputs, 0..3, &mut far_pairs), near, "{dtype} {s:?}");
        assert_eq!(far_pairs.all(&far), near_pairs.all(&here), "{dtype} {s:?}");
    }
}

#[test]
fn a_cache_of_latents_has_the_bits_of_training_whole_in_chunks_and_by_single_tokens() {
    for (s, dtype) in SHAPES.iter().flat_map(|s| [DType::F32, DType::BF16].map(|dtype| (s, dtype))) {
        for isa in Arithmetic::available() {
            let (b, inputs) = (CpuBackend::with_isa(isa, 2), Inputs::random(s));
            let on = On::new(&b, s, &inputs, dtype);
            let [trained, ..] = pass(&b, s, &on, &inputs, 0..3, &mut Nowhere);
            let (sequence, width) = (SPANS[1].clone(), s.heads * s.value);
            for cuts in [&[3, 7][..], &[3, 5, 7], &[3, 4, 5, 6, 7]] {
                let mut pages = b.kv_pages(2, s.geometry().kv_layout(), dtype).unwrap();
                for chunk in cuts.windows(2).map(|w| w[0]..w[1]) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start - sequence.start, pages: &[1] };
                    let input = on.input(&b, s, chunk.clone(), &[span]);
                    let mut tape = Tape::inference(&b);
                    let [q, kv] = [&inputs.q, &inputs.kv].map(|values| tape.constant(part(&b, values, chunk.clone())));
                    let keys = tape.latent_keys(&kv, on.norm.as_ref(), EPS, &input.rotary, dtype).unwrap();
                    let y = tape.latent_attention(&q, keys, &input, KvAccess::Cache(&mut pages)).unwrap();
                    let expected: Vec<u32> =
                        trained[chunk.start * width..chunk.end * width].iter().map(|v| v.to_bits()).collect();
                    assert_eq!(host_bits(&b, y.value()), expected, "{isa} {dtype} {s:?} {chunk:?} of {cuts:?}");
                }
            }
        }
    }
}

#[test]
fn latents_through_quantized_weights_have_the_bits_of_the_dense_weights_that_these_are() {
    let storages = [WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of32)];
    let formats =
        storages.into_iter().flat_map(|storage| [DType::F32, DType::BF16].map(|compute| WeightFormat { compute, storage }));
    for (s, format) in SHAPES.iter().flat_map(|s| formats.clone().map(move |format| (s, format))) {
        for isa in Arithmetic::available() {
            let dtype = format.compute;
            let (b, inputs) = (CpuBackend::with_isa(isa, 2), Inputs::random(s));
            let (mut quantized, mut dense) = (On::new(&b, s, &inputs, dtype), On::new(&b, s, &inputs, dtype));
            quantized.weight = b.packed(1, s.latent, s.outputs(), format).unwrap();
            let rows = b.tensor(&weight(s), &[s.outputs(), s.latent], DType::F32).unwrap();
            b.pack_rows(&mut quantized.weight, 0, rows.as_ref()).unwrap();
            let ids: Vec<u32> = (0..s.outputs() as u32).collect();
            let mut unpacked = b.scratch(&[s.outputs(), s.latent], DType::F32).unwrap();
            b.embedding_packed(quantized.weight.layer(0), &ids, &mut unpacked).unwrap();
            b.pack_rows(&mut dense.weight, 0, unpacked.as_ref()).unwrap();
            let [quantized, dense] = [quantized, dense].map(|on| pass(&b, s, &on, &inputs, 0..3, &mut Nowhere));
            assert!(quantized == dense, "{isa} {format:?} {s:?}");
        }
    }
}

#[test]
fn latents_that_do_not_fit_are_an_error() {
    let s = &SHAPES[0];
    let (b, inputs) = (backend(), Inputs::random(s));
    let on = On::new(&b, s, &inputs, DType::F32);
    let spans = SPANS.map(whole);
    let bias: &'static Tensor = Box::leak(Box::new(Tensor::zeros(&[s.outputs()], DType::F32)));
    let few: &'static PackedStack = Box::leak(Box::new(PackedStack::zeros(1, RANKS[0], s.outputs() - 1, DType::F32)));
    let refused = |q_width: usize, key_width: usize, dtype: DType, change: &dyn Fn(&mut LatentAttention<'_>)| {
        let mut input = on.input(&b, s, 0..TOKENS, &spans);
        change(&mut input);
        let mut tape = Tape::inference(&b);
        let q = tape.constant(Tensor::zeros(&[TOKENS, q_width], DType::F32));
        let keys = tape.constant(Tensor::zeros(&[TOKENS, key_width], dtype));
        tape.latent_attention(&q, keys, &input, KvAccess::None).is_err()
    };
    let (q_width, key_width) = (s.q_width(), s.latent + s.rope);
    assert!(!refused(q_width, key_width, DType::F32, &|_| ()));
    assert!(refused(q_width + 1, key_width, DType::F32, &|_| ()));
    assert!(refused(q_width, key_width + 2, DType::F32, &|_| ()) && refused(q_width, key_width, DType::BF16, &|_| ()));
    let changes: [&dyn Fn(&mut LatentAttention<'_>); 9] = [
        &|i| i.nope_dim += 1,
        &|i| (i.nope_dim, i.value_dim) = (i.nope_dim + i.value_dim, 0),
        &|i| i.nope_dim = usize::MAX,
        &|i| i.sight.geometry.values = KvValues::Own(10),
        &|i| i.sight.geometry.values = KvValues::PrefixOfKey(11),
        &|i| i.sight.spans = [whole(0..3)].into(),
        &|i| i.layer.bias = Some(bias.as_ref()),
        &|i| i.rotary.angles = Rc::new(b.rotary(&[0; TOKENS], &frequencies(4), 1.0).unwrap()),
        &|i| {
            let mut groups = i.layer.lora.to_vec();
            groups[0].projections[0].b = few.layer(0);
            i.layer.lora = groups.into();
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        assert!(refused(q_width, key_width, DType::F32, change), "change {i}");
    }
    let keys = |width: usize, rope: usize, tokens: usize| {
        let angles = Rc::new(b.rotary(&vec![0; tokens], &frequencies(rope), 1.0).unwrap());
        let mut tape = Tape::inference(&b);
        let kv = tape.constant(Tensor::zeros(&[TOKENS, width], DType::F32));
        tape.latent_keys(&kv, on.norm.as_ref(), EPS, &LatentRotary { angles, style: s.style }, DType::F32).is_err()
    };
    assert!(!keys(16, 6, TOKENS) && keys(18, 6, TOKENS) && keys(16, 4, TOKENS) && keys(16, 6, 10) && keys(10, 2, TOKENS));
}
