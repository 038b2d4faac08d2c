//! Attention against softmax attention in f64, written plainly; and its bits against themselves.

mod fetched;
mod whole;
mod window;

use std::ops::Range;

use half::bf16;

use crate::backend::{AttentionGeometry, AttentionSpan, Backend, Qkv, Sight};
use crate::testing::{assert_close, bits, poison, poison_recycled, rows, tensor};
use crate::{Arithmetic, CpuBackend, DType, Element, Isa, KV_PAGE_TOKENS, KvPages, KvValues, Memory, Tensor};

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Around the edges of splits of keys, and of blocks of queries by keys.
const LONG_LENGTHS: [usize; 3] = [1100, 511, 260];
/// Around the edges of pages and of tiles.
const LENGTHS: [usize; 6] = [1, 2, 63, 64, 65, 130];
/// `(kv_heads, query heads of each, head_dim)`.
const GEOMETRIES: [(usize, usize, usize); 9] =
    [(2, 1, 2), (1, 2, 16), (1, 3, 20), (1, 4, 32), (1, 5, 64), (2, 2, 64), (1, 1, 80), (3, 1, 128), (1, 2, 128)];

fn geometry((kv_heads, group, head_dim): (usize, usize, usize)) -> AttentionGeometry {
    let values = KvValues::Own(head_dim);
    AttentionGeometry {
        heads: kv_heads * group,
        kv_heads,
        head_dim,
        values,
        scale: (head_dim as f32).powf(-0.5),
        eps: 0.0,
        window: None,
        sees: Sight::Before,
    }
}

fn random_qkv(g: &AttentionGeometry, tokens: usize, dtype: DType) -> Qkv {
    let of = |heads, width, key| tensor(&[tokens, heads, width], dtype, key);
    let v = matches!(g.values, KvValues::Own(_)).then(|| of(g.kv_heads, g.values.width(), 3));
    Qkv { q: of(g.heads, g.head_dim, 1), k: of(g.kv_heads, g.head_dim, 2), v }
}

fn part(qkv: &Qkv, range: Range<usize>) -> Qkv {
    Qkv { q: rows(&qkv.q, range.clone()), k: rows(&qkv.k, range.clone()), v: qkv.v.as_ref().map(|v| rows(v, range)) }
}

/// Sequences of these lengths, one after another.
fn packed(lengths: &[usize]) -> Vec<Range<usize>> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    ends.zip(lengths).map(|(end, len)| end - len..end).collect()
}

/// A cache in which every page is full of NaN.
fn poisoned_pages(g: &AttentionGeometry, num_pages: usize, dtype: DType) -> KvPages {
    let mut pages = CpuBackend::with_isa(Isa::detect(), 1).kv_pages(num_pages, g.kv_layout(), dtype).unwrap();
    pages.storage.get_mut::<super::KvPages>().unwrap().buffer.fill(0xff);
    pages
}

/// Attention of one layer.
#[derive(Clone)]
struct Layer {
    g: AttentionGeometry,
    sinks: Option<Tensor>,
}

impl Layer {
    /// A layer with this window, with sinks or without.
    fn new(shape: (usize, usize, usize), window: Option<usize>, with_sinks: bool) -> Self {
        let g = AttentionGeometry { window, ..geometry(shape) };
        Layer { g, sinks: with_sinks.then(|| tensor(&[g.heads], DType::F32, 9)) }
    }

    fn plain(shape: (usize, usize, usize)) -> Self {
        Layer::new(shape, None, false)
    }

    /// Keys whose beginning is their value, seen through a window and with sinks.
    fn latent() -> Self {
        let mut layer = Layer::new((1, 3, 24), Some(130), true);
        layer.g.values = KvValues::PrefixOfKey(17);
        layer
    }

    fn with_values(shape: (usize, usize, usize), values: KvValues) -> Self {
        let plain = Layer::plain(shape);
        Layer { g: AttentionGeometry { values, ..plain.g }, ..plain }
    }

    /// What is seen of keys by one query head.
    fn sight(&self, head: usize) -> View {
        let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks.to_f32_vec()[head] as f64);
        View { scale: self.g.scale as f64, window: self.g.window.unwrap_or(usize::MAX), sees: self.g.sees, sink }
    }
}

/// The output and log-normalizers of new tokens, whose keys and values are added to `pages`.
fn attend(b: &CpuBackend, layer: &Layer, qkv: &Qkv, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> [Tensor; 2] {
    let g = &layer.g;
    let mut out = poison(&[qkv.q.rows(), g.heads, g.values.width()], qkv.q.dtype());
    let mut log_normalizers = poison(&[qkv.q.rows(), g.heads], DType::F32);
    b.write_kv(qkv, g, spans, pages).unwrap();
    b.attention(&qkv.q, g, layer.sinks.as_ref().map(Tensor::as_ref), spans, pages, &mut out, &mut log_normalizers).unwrap();
    [out, log_normalizers]
}

/// Attention over whole sequences, in pages that lie in no order, among pages of NaN.
fn attend_whole(b: &CpuBackend, layer: &Layer, qkv: &Qkv, sequences: &[Range<usize>]) -> [Tensor; 2] {
    let counts: Vec<usize> = sequences.iter().map(|s| s.len().div_ceil(KV_PAGE_TOKENS)).collect();
    let num_pages = counts.iter().sum::<usize>() + 2;
    // Every other page, from the end; then those between.
    let order: Vec<u32> = (0..num_pages as u32).rev().step_by(2).chain((0..num_pages as u32 - 1).rev().step_by(2)).collect();
    let mut rest = &order[..];
    let spans: Vec<AttentionSpan<'_>> = sequences
        .iter()
        .zip(&counts)
        .map(|(tokens, &count)| {
            let (own, others) = rest.split_at(count);
            rest = others;
            AttentionSpan { tokens: tokens.clone(), past: 0, pages: own }
        })
        .collect();
    attend(b, layer, qkv, &spans, &mut poisoned_pages(&layer.g, num_pages, qkv.k.dtype()))
}

/// Gradients of queries, keys and values of whole sequences.
fn go_back(b: &CpuBackend, layer: &Layer, qkv: &Qkv, dout: &Tensor, sequences: &[Range<usize>]) -> Vec<Tensor> {
    go_back_from(b, layer, qkv, dout, sequences, attend_whole(b, layer, qkv, sequences))
}

/// The same, from what the forward pass answered.
fn go_back_from(
    b: &CpuBackend,
    layer: &Layer,
    qkv: &Qkv,
    dout: &Tensor,
    sequences: &[Range<usize>],
    [out, log_normalizers]: [Tensor; 2],
) -> Vec<Tensor> {
    let like = |t: &Tensor| poison(t.shape().dims(), DType::F32);
    let mut gradient = Qkv { q: like(&qkv.q), k: like(&qkv.k), v: qkv.v.as_ref().map(like) };
    let spans: Vec<_> = sequences.iter().map(|s| AttentionSpan { tokens: s.clone(), past: 0, pages: &[] }).collect();
    b.attention_backward(dout, qkv, &out, &log_normalizers, &layer.g, &spans, &mut gradient).unwrap();
    [gradient.q, gradient.k].into_iter().chain(gradient.v).collect()
}

/// One head of one sequence, `[len, head_dim]`, in f64.
fn head_of(t: &Tensor, sequence: &Range<usize>, head: usize) -> Vec<Vec<f64>> {
    let [_, heads, d] = *t.shape().dims() else { panic!("a tensor of heads has three axes") };
    let values = t.to_f32_vec();
    sequence.clone().map(|t| values[(t * heads + head) * d..][..d].iter().map(|&v| v as f64).collect()).collect()
}

/// Keys and values of one head of one sequence.
fn keys_and_values(qkv: &Qkv, g: &AttentionGeometry, sequence: &Range<usize>, kv_head: usize) -> [Vec<Vec<f64>>; 2] {
    let k = head_of(&qkv.k, sequence, kv_head);
    let prefix = || k.iter().map(|k| k[..g.values.width()].to_vec()).collect();
    let v = qkv.v.as_ref().map_or_else(prefix, |v| head_of(v, sequence, kv_head));
    [k, v]
}

/// The gradient of what attention answers.
fn random_dout(g: &AttentionGeometry, tokens: usize) -> Tensor {
    tensor(&[tokens, g.heads, g.values.width()], DType::F32, 4)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(target: &mut [f64], factor: f64, source: &[f64]) {
    target.iter_mut().zip(source).for_each(|(t, s)| *t += factor * s);
}

/// How a query head looks at keys.
#[derive(Clone, Copy)]
struct View {
    scale: f64,
    window: usize,
    sees: Sight,
    sink: f64,
}

impl View {
    /// Positions of `len` that a query sees: masking_utils.py of transformers lets it see those with `kv_idx > q_idx - sliding_window`.
    fn keys(&self, t: usize, len: usize) -> impl Iterator<Item = usize> {
        let window = self.window as i128;
        let end = if self.sees == Sight::Whole { len } else { t + 1 };
        (0..end).filter(move |&s| s as i128 > t as i128 - window)
    }
}

/// Softmax attention of one head by its definition: outputs, and log-normalizers.
fn reference(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], sight: View) -> (Vec<Vec<f64>>, Vec<f64>) {
    let attend = |(t, q): (usize, &Vec<f64>)| {
        let score = |s: usize| sight.scale * dot(q, &k[s]);
        let log_normalizer = (sight.keys(t, k.len()).map(|s| score(s).exp()).sum::<f64>() + sight.sink.exp()).ln();
        let mut out = vec![0.0; v[0].len()];
        sight.keys(t, k.len()).for_each(|s| add_scaled(&mut out, (score(s) - log_normalizer).exp(), &v[s]));
        (out, log_normalizer)
    };
    q.iter().enumerate().map(attend).unzip()
}

/// Gradients by q, k and v of `Σ dout · reference(q, k, v)`.
fn reference_backward(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], dout: &[Vec<f64>], sight: View) -> [Vec<Vec<f64>>; 3] {
    let (out, log_normalizers) = reference(q, k, v, sight);
    let zeros = |like: &[Vec<f64>]| vec![vec![0.0; like[0].len()]; like.len()];
    let [mut dq, mut dk, mut dv] = [zeros(q), zeros(k), zeros(v)];
    for t in 0..q.len() {
        for s in sight.keys(t, k.len()) {
            let p = (sight.scale * dot(&q[t], &k[s]) - log_normalizers[t]).exp();
            let ds = p * (dot(&dout[t], &v[s]) - dot(&dout[t], &out[t])) * sight.scale;
            add_scaled(&mut dv[s], p, &dout[t]);
            add_scaled(&mut dq[t], ds, &k[s]);
            add_scaled(&mut dk[s], ds, &q[t]);
        }
    }
    [dq, dk, dv]
}

/// Checks one head of one sequence of a tensor `[tokens, heads, head_dim]`.
#[track_caller]
fn assert_head(actual: &Tensor, sequence: &Range<usize>, head: usize, expected: &[Vec<f64>], tolerance: f64, context: &str) {
    let actual: Vec<f32> = head_of(actual, sequence, head).concat().iter().map(|&v| v as f32).collect();
    assert_close(&actual, &expected.concat(), tolerance, context);
}

/// Each geometry with each dtype for short sequences, and some for long ones; with windows around the edges of pages, blocks and splits, and with sinks.
fn cases() -> impl Iterator<Item = (Layer, DType, &'static [usize])> {
    let short = GEOMETRIES.into_iter().map(|shape| (Layer::plain(shape), &LENGTHS[..]));
    let windows = [1, 2, 40, 64, 65, 129].map(|window| (Layer::new((1, 3, 20), Some(window), window > 50), &LENGTHS[..]));
    let long = [None, Some(1), Some(64), Some(100), Some(257), Some(600)];
    // Values of whole panels, which are one reduction from page to page, and others.
    let widths = [16, 64, 16, 16, 64, 16];
    let layer = |(window, width)| (Layer::new((1, 2, width), window, window == Some(100)), &LONG_LENGTHS[..]);
    let long = long.into_iter().zip(widths).map(layer);
    let sinks = [(2, 2, 64), (1, 1, 2)].map(|shape| (Layer::new(shape, None, true), &LENGTHS[..]));
    let own = [((2, 2, 16), 20), ((1, 3, 36), 7), ((1, 1, 32), 130)];
    let own = own.map(|(shape, width)| (Layer::with_values(shape, KvValues::Own(width)), &LENGTHS[..]));
    let prefix = [((1, 3, 20), 7), ((2, 2, 24), 16), ((1, 5, 80), 64), ((1, 2, 70), 70), ((1, 2, 576), 512)];
    let prefix = prefix.map(|(shape, width)| (Layer::with_values(shape, KvValues::PrefixOfKey(width)), &LENGTHS[..]));
    let prefix = prefix.into_iter().chain([(Layer::latent(), &LONG_LENGTHS[..])]);
    let all = short.chain(windows).chain(long).chain(sinks).chain(own).chain(prefix);
    all.flat_map(|(layer, lengths)| DTYPES.map(|dtype| (layer.clone(), dtype, lengths)))
}

/// Pages of queries to which no gradient comes are passed over. A gradient so small that it is lost in every sum is not, and leaves the same bits.
#[test]
fn queries_without_a_gradient_are_passed_over_on_the_way_back() {
    let lengths = [700, 64, 65, 3, 130];
    let sequences = packed(&lengths);
    let tokens = lengths.iter().sum::<usize>();
    let layers = [Layer::plain((2, 2, 16)), Layer::new((1, 3, 20), Some(100), true), Layer::latent()];
    for (layer, dtype) in layers.iter().flat_map(|layer| DTYPES.map(|dtype| (layer, dtype))) {
        let (g, qkv) = (&layer.g, random_qkv(&layer.g, tokens, dtype));
        let row = g.heads * g.values.width();
        // Of the long sequence a page within a block, and its end; of others all, none, and the first page. Of one page one head alone.
        let is_live = |token: usize, head: usize| match token {
            130..140 => head == 0,
            540..=765 => true,
            829..840 => true,
            _ => false,
        };
        let dense = random_dout(g, tokens).to_f32_vec();
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let go_back = |elsewhere: f32| {
                let of = |(i, &v): (usize, &f32)| {
                    if is_live(i / row, i % row / g.values.width()) { v } else { elsewhere }
                };
                let dout: Vec<f32> = dense.iter().enumerate().map(of).collect();
                let dout = Tensor::from_f32(&dout, &[tokens, g.heads, g.values.width()], DType::F32).unwrap();
                let [out, mut log_normalizers] = attend_whole(&b, layer, &qkv, &sequences);
                if elsewhere == 0.0 {
                    // Of what is passed over nobody looks at these.
                    let mut values = log_normalizers.to_f32_vec();
                    [0..128, 192..512, 896..960]
                        .into_iter()
                        .for_each(|rows| values[rows.start * g.heads..rows.end * g.heads].fill(f32::NAN));
                    log_normalizers = Tensor::from_f32(&values, log_normalizers.shape().dims(), DType::F32).unwrap();
                }
                poison_recycled(&[1 << 20], DType::F32);
                go_back_from(&b, layer, &qkv, &dout, &sequences, [out, log_normalizers])
            };
            let (passed_over, whole) = (go_back(0.0), go_back(1e-30));
            for (what, (passed_over, whole)) in ["q", "k", "v"].iter().zip(passed_over.iter().zip(&whole)) {
                let numbers = passed_over.to_f32_vec().into_iter().zip(whole.to_f32_vec());
                for (i, (passed_over, whole)) in numbers.enumerate() {
                    let same = passed_over == whole || passed_over == 0.0 && whole.abs() < 1e-25;
                    assert!(same, "{isa} {dtype} {g:?}: d{what} {i} is {passed_over}, not {whole}");
                }
            }
            assert!(passed_over.iter().all(|gradient| gradient.to_f32_vec().iter().any(|v| *v != 0.0)));
        }
    }
}

/// Checks outputs and log-normalizers of whole sequences against the definition, on every instruction set.
#[track_caller]
fn assert_is_softmax_attention(layer: &Layer, dtype: DType, lengths: &[usize]) {
    let sequences = packed(lengths);
    let g = layer.g;
    let qkv = random_qkv(&g, lengths.iter().sum(), dtype);
    let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
    let results = Arithmetic::available()
        .into_iter()
        .map(|isa| (isa, attend_whole(&CpuBackend::with_isa(isa, 2), layer, &qkv, &sequences)));
    let results: Vec<_> = results.collect();
    for (sequence, head) in sequences.iter().flat_map(|s| (0..g.heads).map(move |h| (s, h))) {
        let kv_head = head * g.kv_heads / g.heads;
        let [k, v] = keys_and_values(&qkv, &g, sequence, kv_head);
        let (out, log_normalizers) = reference(&head_of(&qkv.q, sequence, head), &k, &v, layer.sight(head));
        for (isa, [actual_out, actual_normalizers]) in &results {
            let context = format!("{isa} {dtype} {g:?}, head {head} of {sequence:?}");
            assert_head(actual_out, sequence, head, &out, tolerance, &context);
            let values = actual_normalizers.to_f32_vec();
            let actual: Vec<f32> = sequence.clone().map(|t| values[t * g.heads + head]).collect();
            assert_close(&actual, &log_normalizers, 1e-5, &context);
        }
    }
}

#[test]
fn attention_is_causal_softmax_attention_on_every_instruction_set() {
    cases().for_each(|(layer, dtype, lengths)| assert_is_softmax_attention(&layer, dtype, lengths));
}

#[test]
fn a_sequence_has_the_same_bits_whole_in_chunks_and_token_by_token() {
    let len = 130;
    let tables: [&[u32]; 2] = [&[4, 0, 2], &[1, 5, 3]];
    let plain = [(1, 2, 16), (1, 5, 20), (2, 1, 64)].map(Layer::plain);
    let windows = [1, 30, 64, 66].map(|window| Layer::new((1, 2, 16), Some(window), window > 40));
    let latents = [Layer::latent(), Layer::with_values((1, 2, 20), KvValues::PrefixOfKey(16))];
    for (layer, dtype) in plain.into_iter().chain(windows).chain(latents).flat_map(|l| DTYPES.map(|d| (l.clone(), d))) {
        let g = layer.g;
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let whole = attend_whole(&b, &layer, &qkv, &packed(&[len])).map(|t| bits(&t));
            let cuts: Vec<usize> =
                if isa == Isa::detect().into() { (1..len).collect() } else { vec![1, 31, 63, 64, 65, 127, 129] };
            let mut plans: Vec<Vec<usize>> = cuts.into_iter().map(|cut| vec![0, cut, len]).collect();
            plans.push((0..=len).collect());
            plans.push(vec![0, 7, 70, 71, 72, 128, len]);
            for (plan, table) in plans.iter().zip(tables.into_iter().cycle()) {
                let mut pages = poisoned_pages(&g, 6, dtype);
                for chunk in plan.windows(2).map(|w| w[0]..w[1]) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: table };
                    let results = attend(&b, &layer, &part(&qkv, chunk.clone()), &[span], &mut pages);
                    for (result, whole) in results.iter().zip(&whole) {
                        let row = whole.len() / len;
                        assert_eq!(
                            bits(result),
                            whole[chunk.start * row..chunk.end * row],
                            "{isa} {dtype} {g:?} {chunk:?} of {plan:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_long_sequence_has_the_same_bits_whole_in_chunks_and_by_single_tokens_whoever_takes_which_split() {
    let len = 2100usize;
    let table: Vec<u32> = (0..len.div_ceil(KV_PAGE_TOKENS) as u32).rev().collect();
    let windows = [None, Some(300), Some(513), Some(1100)];
    let layer = |(window, width)| Layer::new((1, 2, width), window, window == Some(513));
    let layers = windows.into_iter().zip([64, 16, 64, 16]).map(layer).chain([Layer::latent()]);
    for (layer, dtype) in layers.flat_map(|l| DTYPES.map(|d| (l.clone(), d))) {
        let g = layer.g;
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let whole = attend_whole(&CpuBackend::with_isa(isa, 1), &layer, &qkv, &packed(&[len])).map(|t| bits(&t));
            for threads in [1, 3, 7] {
                let b = CpuBackend::with_isa(isa, threads);
                let mut pages = poisoned_pages(&g, table.len(), dtype);
                let cuts = [0, 500, 511, 512, 513, 700, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2099, len];
                for chunk in cuts.windows(2).map(|w| w[0]..w[1]) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &table };
                    let results = attend(&b, &layer, &part(&qkv, chunk.clone()), &[span], &mut pages);
                    for (result, whole) in results.iter().zip(&whole) {
                        let row = whole.len() / len;
                        let same = bits(result) == whole[chunk.start * row..chunk.end * row];
                        assert!(same, "{isa} {dtype} {g:?} {chunk:?} on {threads} threads");
                    }
                }
            }
        }
    }
}

#[test]
fn the_sign_of_a_zero_does_not_tell_where_a_sequence_was_cut() {
    // Keys of the second page outweigh the first by so much that what was accumulated there, negative, becomes -0; and adding products
    // with the third page's values, +0, would make it +0 for those queries alone whose tile reaches the third page.
    let (layer, len) = (Layer::plain((1, 1, 16)), 130);
    let g = layer.g;
    let fill = |value: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..len * 16).map(|i| value(i / 16 / KV_PAGE_TOKENS)).collect();
        Tensor::from_f32(&values, &[len, 1, 16], DType::F32).unwrap()
    };
    let qkv = Qkv { q: fill(&|_| 30.0), k: fill(&|page| 30.0 * page as f32), v: Some(fill(&|page| [-1.0, -0.0, 0.0][page])) };
    for isa in Arithmetic::available() {
        let b = CpuBackend::with_isa(isa, 1);
        let [whole, _] = attend_whole(&b, &layer, &qkv, &packed(&[len]));
        let mut pages = poisoned_pages(&g, 3, DType::F32);
        for chunk in [0..100, 100..len] {
            let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &[0, 1, 2] };
            let [out, _] = attend(&b, &layer, &part(&qkv, chunk.clone()), &[span], &mut pages);
            assert_eq!(bits(&out), bits(&rows(&whole, chunk)), "{isa}");
        }
    }
}

#[test]
fn an_infinity_reaches_no_earlier_token_and_a_strangers_reaches_none() {
    let len = 150;
    for (shape, dtype) in [(1, 2, 16), (1, 3, 20), (2, 2, 130)].into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let layer = Layer::plain(shape);
        let g = layer.g;
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let finite = attend_whole(&b, &layer, &qkv, &packed(&[len])).map(|t| bits(&t));
            // The values of these tokens become infinite or NaN, one token at a time.
            for (bad, value) in
                [(1, f32::INFINITY), (63, f32::NAN), (64, f32::NEG_INFINITY), (77, f32::INFINITY), (149, f32::NAN)]
            {
                let own = qkv.v.as_ref().expect("values of their own");
                let mut v = own.to_f32_vec();
                v[bad * g.kv_heads * g.head_dim..][..g.kv_heads * g.head_dim].fill(value);
                let v = Some(Tensor::from_f32(&v, own.shape().dims(), dtype).unwrap());
                let poisoned = Qkv { q: qkv.q.clone(), k: qkv.k.clone(), v };
                let whole = attend_whole(&b, &layer, &poisoned, &packed(&[len])).map(|t| bits(&t));
                for (poisoned, finite) in whole.iter().zip(&finite) {
                    let row = finite.len() / len;
                    assert_eq!(poisoned[..bad * row], finite[..bad * row], "{isa} {dtype} {shape:?}: a {value} at {bad}");
                }
                let not_finite = whole[0][bad * whole[0].len() / len..].iter().all(|&b| !f32::from_bits(b).is_finite());
                assert!(not_finite, "{isa} {dtype} {shape:?}: those that see the {value} at {bad} have it");
                // The same bits over a cache, cut where the infinity is in sight of some of a chunk and not of others.
                let mut pages = poisoned_pages(&g, 3, dtype);
                for chunk in [0..bad.min(70), bad.min(70)..bad + 1, bad + 1..len].into_iter().filter(|c| !c.is_empty()) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &[2, 0, 1] };
                    let results = attend(&b, &layer, &part(&poisoned, chunk.clone()), &[span], &mut pages);
                    for (result, whole) in results.iter().zip(&whole) {
                        let row = whole.len() / len;
                        let (result, whole) = (bits(result), &whole[chunk.start * row..chunk.end * row]);
                        // Which NaN it is does not matter.
                        let same = |a: u32, b: u32| a == b || f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan();
                        assert!(result.iter().zip(whole).all(|(&a, &b)| same(a, b)), "{isa} {dtype} {shape:?} {bad} {chunk:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_in_company_and_on_any_number_of_threads() {
    let layers = [
        (Layer::plain((1, 3, 20)), &LENGTHS[..]),
        (Layer::plain((2, 2, 64)), &LENGTHS),
        (Layer::plain((1, 1, 16)), &LONG_LENGTHS),
        (Layer::new((1, 3, 20), Some(50), true), &LENGTHS),
        (Layer::new((1, 1, 16), Some(150), true), &LONG_LENGTHS),
        (Layer::with_values((1, 3, 20), KvValues::PrefixOfKey(16)), &LENGTHS),
        (Layer::latent(), &LONG_LENGTHS),
    ];
    for ((layer, lengths), dtype) in layers.into_iter().flat_map(|l| DTYPES.map(|d| (l.clone(), d))) {
        let (g, sequences) = (layer.g, packed(lengths));
        let tokens = lengths.iter().sum();
        let qkv = random_qkv(&g, tokens, dtype);
        let dout = random_dout(&g, qkv.q.rows());
        for isa in Arithmetic::available() {
            let (one, four) = (CpuBackend::with_isa(isa, 1), CpuBackend::with_isa(isa, 4));
            let forward = attend_whole(&four, &layer, &qkv, &sequences);
            let backward = go_back(&four, &layer, &qkv, &dout, &sequences);
            for s in &sequences {
                let (alone, whole) = (part(&qkv, s.clone()), packed(&[s.len()]));
                let context = format!("{isa} {dtype} {g:?} {s:?}");
                for (alone, company) in attend_whole(&one, &layer, &alone, &whole).iter().zip(&forward) {
                    assert_eq!(bits(alone), bits(&rows(company, s.clone())), "{context}");
                }
                for (alone, company) in go_back(&one, &layer, &alone, &rows(&dout, s.clone()), &whole).iter().zip(&backward) {
                    assert_eq!(bits(alone), bits(&rows(company, s.clone())), "{context}, backward");
                }
            }
        }
    }
}

#[test]
fn the_backward_of_attention_is_its_gradient_on_every_instruction_set() {
    for (layer, dtype, lengths) in cases() {
        let sequences = packed(lengths);
        let g = layer.g;
        let qkv = random_qkv(&g, lengths.iter().sum(), dtype);
        let dout = random_dout(&g, qkv.q.rows());
        let tolerance = if dtype == DType::F32 { 2e-5 } else { 3e-2 };
        let results = Arithmetic::available()
            .into_iter()
            .map(|isa| (isa, go_back(&CpuBackend::with_isa(isa, 2), &layer, &qkv, &dout, &sequences)));
        let results: Vec<_> = results.collect();
        for (sequence, kv_head) in sequences.iter().flat_map(|s| (0..g.kv_heads).map(move |h| (s, h))) {
            let [k, v] = keys_and_values(&qkv, &g, sequence, kv_head);
            let [mut dk_sum, mut dv_sum] = [&k, &v].map(|t| vec![vec![0.0; t[0].len()]; t.len()]);
            let group = g.heads / g.kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                let (q, dout) = (head_of(&qkv.q, sequence, head), head_of(&dout, sequence, head));
                let [dq, dk, dv] = reference_backward(&q, &k, &v, &dout, layer.sight(head));
                dk_sum.iter_mut().zip(&dk).for_each(|(sum, dk)| add_scaled(sum, 1.0, dk));
                dv_sum.iter_mut().zip(&dv).for_each(|(sum, dv)| add_scaled(sum, 1.0, dv));
                for (isa, actual) in results.iter().map(|(isa, gradients)| (isa, &gradients[0])) {
                    assert_head(
                        actual,
                        sequence,
                        head,
                        &dq,
                        tolerance,
                        &format!("{isa} {dtype} {g:?} dq {head} of {sequence:?}"),
                    );
                }
            }
            if let KvValues::PrefixOfKey(_) = g.values {
                dk_sum.iter_mut().zip(&dv_sum).for_each(|(dk, dv)| dk.iter_mut().zip(dv).for_each(|(dk, dv)| *dk += dv));
            }
            for (isa, gradients) in &results {
                let context = format!("{isa} {dtype} {g:?} head {kv_head} of {sequence:?}");
                assert_head(&gradients[1], sequence, kv_head, &dk_sum, tolerance, &format!("dk, {context}"));
                if let Some(dv) = gradients.get(2) {
                    assert_head(dv, sequence, kv_head, &dv_sum, tolerance, &format!("dv, {context}"));
                }
            }
        }
    }
}

#[test]
fn a_query_that_sees_one_key_sends_nothing_back_to_the_score() {
    for (dtype, window) in DTYPES.into_iter().flat_map(|dtype| [(dtype, None), (dtype, Some(1))]) {
        for shape in GEOMETRIES {
            let layer = Layer::new(shape, window, false);
            let sequences = packed(&[1, 70, 1]);
            let qkv = random_qkv(&layer.g, 72, dtype);
            let dout = random_dout(&layer.g, 72);
            for isa in Arithmetic::available() {
                let gradients = go_back(&CpuBackend::with_isa(isa, 2), &layer, &qkv, &dout, &sequences);
                let is_zero = |t: &Tensor, token: usize| rows(t, token..token + 1).to_f32_vec().iter().all(|v| *v == 0.0);
                let of = |t: &Tensor| (0..72).map(|token| is_zero(t, token)).collect::<Vec<bool>>();
                let alone: Vec<bool> = (0..72).map(|token| window.is_some() || [0, 1, 71].contains(&token)).collect();
                assert_eq!(of(&gradients[0]), alone, "{isa} {dtype} {window:?} {shape:?}");
                assert!(is_zero(&gradients[1], 0) && is_zero(&gradients[1], 71), "{isa} {dtype} {window:?} {shape:?}");
                assert!(!is_zero(&gradients[2], 0), "its value has a gradient");
            }
        }
    }
}

#[test]
fn the_reference_gradient_is_that_of_the_reference() {
    let (len, d, sight) = (5, 3, View { scale: 0.7, window: 3, sees: Sight::Before, sink: 0.4 });
    let random = |key| -> Vec<Vec<f64>> {
        let values = crate::testing::normal(len * d, key);
        values.chunks(d).map(|row| row.iter().map(|&v| v as f64).collect()).collect()
    };
    let mut inputs = [random(1), random(2), random(3)];
    let dout = random(4);
    let gradient = reference_backward(&inputs[0], &inputs[1], &inputs[2], &dout, sight);
    let loss = |[q, k, v]: &[Vec<Vec<f64>>; 3]| dot(&reference(q, k, v, sight).0.concat(), &dout.concat());
    for (which, t, c) in (0..3).flat_map(|w| (0..len).flat_map(move |t| (0..d).map(move |c| (w, t, c)))) {
        let value = inputs[which][t][c];
        let [above, below] = [1e-5, -1e-5].map(|step| {
            inputs[which][t][c] = value + step;
            loss(&inputs)
        });
        inputs[which][t][c] = value;
        assert!(((above - below) / 2e-5 - gradient[which][t][c]).abs() < 1e-8);
    }
}

#[test]
fn a_latent_is_in_its_pages_once() {
    let latent = Layer::with_values((1, 128, 576), KvValues::PrefixOfKey(512)).g;
    let b = CpuBackend::with_isa(Isa::detect(), 1);
    assert_eq!(b.kv_page_bytes(latent.kv_layout(), DType::BF16), KV_PAGE_TOKENS * 576 * 2);
    assert!(b.check_attention(&latent).is_ok());
    for values in [KvValues::PrefixOfKey(577), KvValues::PrefixOfKey(0), KvValues::Own(0), KvValues::Own(1025)] {
        assert!(b.check_attention(&AttentionGeometry { values, ..latent }).is_err(), "{values:?}");
    }
}
