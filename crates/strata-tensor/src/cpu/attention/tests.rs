//! Attention against softmax attention in f64, written plainly; and its bits against themselves.

use std::ops::Range;

use crate::backend::{AttentionGeometry, AttentionSpan, Backend, Qkv};
use crate::testing::{assert_close, bits, poison, rows, tensor};
use crate::{Arithmetic, CpuBackend, DType, Isa, KV_PAGE_TOKENS, KvPages, Tensor};

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Around the edges of splits of keys, and of blocks of queries by keys.
const LONG_LENGTHS: [usize; 3] = [1100, 511, 260];
/// Around the edges of pages and of tiles.
const LENGTHS: [usize; 6] = [1, 2, 63, 64, 65, 130];
/// `(kv_heads, query heads of each, head_dim)`.
const GEOMETRIES: [(usize, usize, usize); 9] =
    [(2, 1, 2), (1, 2, 16), (1, 3, 20), (1, 4, 32), (1, 5, 64), (2, 2, 64), (1, 1, 80), (3, 1, 128), (1, 2, 128)];

fn geometry((kv_heads, group, head_dim): (usize, usize, usize)) -> AttentionGeometry {
    AttentionGeometry { heads: kv_heads * group, kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5), eps: 0.0 }
}

fn random_qkv(g: &AttentionGeometry, tokens: usize, dtype: DType) -> Qkv {
    let of = |heads, key| tensor(&[tokens, heads, g.head_dim], dtype, key);
    Qkv { q: of(g.heads, 1), k: of(g.kv_heads, 2), v: of(g.kv_heads, 3) }
}

fn part(qkv: &Qkv, range: Range<usize>) -> Qkv {
    Qkv { q: rows(&qkv.q, range.clone()), k: rows(&qkv.k, range.clone()), v: rows(&qkv.v, range) }
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
    let mut pages = KvPages::new(num_pages, g.kv_heads, g.head_dim, dtype);
    pages.storage.get_mut::<super::KvPages>().unwrap().buffer.fill(0xff);
    pages
}

/// The output and log-normalizers of new tokens, whose keys and values are added to `pages`.
fn attend(b: &CpuBackend, g: &AttentionGeometry, qkv: &Qkv, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> [Tensor; 2] {
    let mut out = poison(qkv.q.shape().dims(), qkv.q.dtype());
    let mut log_normalizers = poison(&[qkv.q.rows(), g.heads], DType::F32);
    b.write_kv(qkv, g, spans, pages).unwrap();
    b.attention(&qkv.q, g, spans, pages, &mut out, &mut log_normalizers).unwrap();
    [out, log_normalizers]
}

/// Attention over whole sequences, in pages that lie in no order, among pages of NaN.
fn attend_whole(b: &CpuBackend, g: &AttentionGeometry, qkv: &Qkv, sequences: &[Range<usize>]) -> [Tensor; 2] {
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
    attend(b, g, qkv, &spans, &mut poisoned_pages(g, num_pages, qkv.k.dtype()))
}

/// Gradients of queries, keys and values of whole sequences.
fn go_back(b: &CpuBackend, g: &AttentionGeometry, qkv: &Qkv, dout: &Tensor, sequences: &[Range<usize>]) -> [Tensor; 3] {
    let [out, log_normalizers] = attend_whole(b, g, qkv, sequences);
    let like = |t: &Tensor| poison(t.shape().dims(), DType::F32);
    let mut gradient = Qkv { q: like(&qkv.q), k: like(&qkv.k), v: like(&qkv.v) };
    let spans: Vec<_> = sequences.iter().map(|s| AttentionSpan { tokens: s.clone(), past: 0, pages: &[] }).collect();
    b.attention_backward(dout, qkv, &out, &log_normalizers, g, &spans, &mut gradient).unwrap();
    [gradient.q, gradient.k, gradient.v]
}

/// One head of one sequence, `[len, head_dim]`, in f64.
fn head_of(t: &Tensor, sequence: &Range<usize>, head: usize) -> Vec<Vec<f64>> {
    let [_, heads, d] = *t.shape().dims() else { panic!("a tensor of heads has three axes") };
    let values = t.to_f32_vec();
    sequence.clone().map(|t| values[(t * heads + head) * d..][..d].iter().map(|&v| v as f64).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(target: &mut [f64], factor: f64, source: &[f64]) {
    target.iter_mut().zip(source).for_each(|(t, s)| *t += factor * s);
}

/// Causal softmax attention of one head by its definition: outputs, and log-normalizers.
fn reference(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], scale: f64) -> (Vec<Vec<f64>>, Vec<f64>) {
    let attend = |(t, q): (usize, &Vec<f64>)| {
        let scores: Vec<f64> = k[..=t].iter().map(|k| scale * dot(q, k)).collect();
        let log_normalizer = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
        let mut out = vec![0.0; q.len()];
        scores.iter().zip(v).for_each(|(s, v)| add_scaled(&mut out, (s - log_normalizer).exp(), v));
        (out, log_normalizer)
    };
    q.iter().enumerate().map(attend).unzip()
}

/// Gradients by q, k and v of `Σ dout · reference(q, k, v)`.
fn reference_backward(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], dout: &[Vec<f64>], scale: f64) -> [Vec<Vec<f64>>; 3] {
    let (out, log_normalizers) = reference(q, k, v, scale);
    let zeros = || vec![vec![0.0; q[0].len()]; q.len()];
    let [mut dq, mut dk, mut dv] = [zeros(), zeros(), zeros()];
    for t in 0..q.len() {
        for s in 0..=t {
            let p = (scale * dot(&q[t], &k[s]) - log_normalizers[t]).exp();
            let ds = p * (dot(&dout[t], &v[s]) - dot(&dout[t], &out[t])) * scale;
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

/// Each geometry with each dtype for short sequences, and one for long ones.
fn cases() -> impl Iterator<Item = ((usize, usize, usize), DType, &'static [usize])> {
    let of = |shape, lengths| DTYPES.map(|dtype| (shape, dtype, lengths));
    GEOMETRIES.into_iter().flat_map(move |shape| of(shape, &LENGTHS[..])).chain(of((1, 2, 16), &LONG_LENGTHS[..]))
}

#[test]
fn attention_is_causal_softmax_attention_on_every_instruction_set() {
    for (shape, dtype, lengths) in cases() {
        let sequences = packed(lengths);
        let g = geometry(shape);
        let qkv = random_qkv(&g, lengths.iter().sum(), dtype);
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        let results = Arithmetic::available()
            .into_iter()
            .map(|isa| (isa, attend_whole(&CpuBackend::with_isa(isa, 2), &g, &qkv, &sequences)));
        let results: Vec<_> = results.collect();
        for (sequence, head) in sequences.iter().flat_map(|s| (0..g.heads).map(move |h| (s, h))) {
            let kv_head = head * g.kv_heads / g.heads;
            let [k, v] = [&qkv.k, &qkv.v].map(|t| head_of(t, sequence, kv_head));
            let (out, log_normalizers) = reference(&head_of(&qkv.q, sequence, head), &k, &v, g.scale as f64);
            for (isa, [actual_out, actual_normalizers]) in &results {
                let context = format!("{isa} {dtype} {shape:?}, head {head} of {sequence:?}");
                assert_head(actual_out, sequence, head, &out, tolerance, &context);
                let values = actual_normalizers.to_f32_vec();
                let actual: Vec<f32> = sequence.clone().map(|t| values[t * g.heads + head]).collect();
                assert_close(&actual, &log_normalizers, 1e-5, &context);
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_whole_in_chunks_and_token_by_token() {
    let len = 130;
    let tables: [&[u32]; 2] = [&[4, 0, 2], &[1, 5, 3]];
    for (shape, dtype) in [(1, 2, 16), (1, 5, 20), (2, 1, 64)].into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let g = geometry(shape);
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let whole = attend_whole(&b, &g, &qkv, &packed(&[len])).map(|t| bits(&t));
            let cuts: Vec<usize> =
                if isa == Isa::detect().into() { (1..len).collect() } else { vec![1, 31, 63, 64, 65, 127, 129] };
            let mut plans: Vec<Vec<usize>> = cuts.into_iter().map(|cut| vec![0, cut, len]).collect();
            plans.push((0..=len).collect());
            plans.push(vec![0, 7, 70, 71, 72, 128, len]);
            for (plan, table) in plans.iter().zip(tables.into_iter().cycle()) {
                let mut pages = poisoned_pages(&g, 6, dtype);
                for chunk in plan.windows(2).map(|w| w[0]..w[1]) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: table };
                    let results = attend(&b, &g, &part(&qkv, chunk.clone()), &[span], &mut pages);
                    for (result, whole) in results.iter().zip(&whole) {
                        let row = whole.len() / len;
                        assert_eq!(
                            bits(result),
                            whole[chunk.start * row..chunk.end * row],
                            "{isa} {dtype} {shape:?} {chunk:?} of {plan:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_long_sequence_has_the_same_bits_whole_in_chunks_and_by_single_tokens_whoever_takes_which_split() {
    let (g, len) = (geometry((1, 2, 16)), 2100usize);
    let table: Vec<u32> = (0..len.div_ceil(KV_PAGE_TOKENS) as u32).rev().collect();
    for dtype in DTYPES {
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let whole = attend_whole(&CpuBackend::with_isa(isa, 1), &g, &qkv, &packed(&[len])).map(|t| bits(&t));
            for threads in [1, 3, 7] {
                let b = CpuBackend::with_isa(isa, threads);
                let mut pages = poisoned_pages(&g, table.len(), dtype);
                let cuts = [0, 500, 511, 512, 513, 700, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2099, len];
                for chunk in cuts.windows(2).map(|w| w[0]..w[1]) {
                    let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &table };
                    let results = attend(&b, &g, &part(&qkv, chunk.clone()), &[span], &mut pages);
                    for (result, whole) in results.iter().zip(&whole) {
                        let row = whole.len() / len;
                        let same = bits(result) == whole[chunk.start * row..chunk.end * row];
                        assert!(same, "{isa} {dtype} {chunk:?} on {threads} threads");
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
    let (g, len) = (geometry((1, 1, 16)), 130);
    let fill = |value: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..len * 16).map(|i| value(i / 16 / KV_PAGE_TOKENS)).collect();
        Tensor::from_f32(&values, &[len, 1, 16], DType::F32).unwrap()
    };
    let qkv = Qkv { q: fill(&|_| 30.0), k: fill(&|page| 30.0 * page as f32), v: fill(&|page| [-1.0, -0.0, 0.0][page]) };
    for isa in Arithmetic::available() {
        let b = CpuBackend::with_isa(isa, 1);
        let [whole, _] = attend_whole(&b, &g, &qkv, &packed(&[len]));
        let mut pages = poisoned_pages(&g, 3, DType::F32);
        for chunk in [0..100, 100..len] {
            let span = AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &[0, 1, 2] };
            let [out, _] = attend(&b, &g, &part(&qkv, chunk.clone()), &[span], &mut pages);
            assert_eq!(bits(&out), bits(&rows(&whole, chunk)), "{isa}");
        }
    }
}

#[test]
fn an_infinity_reaches_no_earlier_token_and_a_strangers_reaches_none() {
    let len = 150;
    for (shape, dtype) in [(1, 2, 16), (1, 3, 20), (2, 2, 130)].into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let g = geometry(shape);
        let qkv = random_qkv(&g, len, dtype);
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let finite = attend_whole(&b, &g, &qkv, &packed(&[len])).map(|t| bits(&t));
            // The values of these tokens become infinite or NaN, one token at a time.
            for (bad, value) in
                [(1, f32::INFINITY), (63, f32::NAN), (64, f32::NEG_INFINITY), (77, f32::INFINITY), (149, f32::NAN)]
            {
                let mut v = qkv.v.to_f32_vec();
                v[bad * g.kv_heads * g.head_dim..][..g.kv_heads * g.head_dim].fill(value);
                let v = Tensor::from_f32(&v, qkv.v.shape().dims(), dtype).unwrap();
                let poisoned = Qkv { q: qkv.q.clone(), k: qkv.k.clone(), v };
                let whole = attend_whole(&b, &g, &poisoned, &packed(&[len])).map(|t| bits(&t));
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
                    let results = attend(&b, &g, &part(&poisoned, chunk.clone()), &[span], &mut pages);
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
    let shapes = [((1, 3, 20), &LENGTHS[..]), ((2, 2, 64), &LENGTHS), ((1, 1, 16), &LONG_LENGTHS)];
    for ((shape, lengths), dtype) in shapes.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let (g, sequences) = (geometry(shape), packed(lengths));
        let tokens = lengths.iter().sum();
        let qkv = random_qkv(&g, tokens, dtype);
        let dout = tensor(qkv.q.shape().dims(), DType::F32, 4);
        for isa in Arithmetic::available() {
            let (one, four) = (CpuBackend::with_isa(isa, 1), CpuBackend::with_isa(isa, 4));
            let forward = attend_whole(&four, &g, &qkv, &sequences);
            let backward = go_back(&four, &g, &qkv, &dout, &sequences);
            for s in &sequences {
                let (alone, whole) = (part(&qkv, s.clone()), packed(&[s.len()]));
                let context = format!("{isa} {dtype} {shape:?} {s:?}");
                for (alone, company) in attend_whole(&one, &g, &alone, &whole).iter().zip(&forward) {
                    assert_eq!(bits(alone), bits(&rows(company, s.clone())), "{context}");
                }
                for (alone, company) in go_back(&one, &g, &alone, &rows(&dout, s.clone()), &whole).iter().zip(&backward) {
                    assert_eq!(bits(alone), bits(&rows(company, s.clone())), "{context}, backward");
                }
            }
        }
    }
}

#[test]
fn the_backward_of_attention_is_its_gradient_on_every_instruction_set() {
    for (shape, dtype, lengths) in cases() {
        let sequences = packed(lengths);
        let g = geometry(shape);
        let qkv = random_qkv(&g, lengths.iter().sum(), dtype);
        let dout = tensor(qkv.q.shape().dims(), DType::F32, 4);
        let tolerance = if dtype == DType::F32 { 2e-5 } else { 3e-2 };
        let results = Arithmetic::available()
            .into_iter()
            .map(|isa| (isa, go_back(&CpuBackend::with_isa(isa, 2), &g, &qkv, &dout, &sequences)));
        let results: Vec<_> = results.collect();
        for (sequence, kv_head) in sequences.iter().flat_map(|s| (0..g.kv_heads).map(move |h| (s, h))) {
            let [k, v] = [&qkv.k, &qkv.v].map(|t| head_of(t, sequence, kv_head));
            let [mut dk_sum, mut dv_sum] = [&k, &v].map(|t| vec![vec![0.0; g.head_dim]; t.len()]);
            let group = g.heads / g.kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                let (q, dout) = (head_of(&qkv.q, sequence, head), head_of(&dout, sequence, head));
                let [dq, dk, dv] = reference_backward(&q, &k, &v, &dout, g.scale as f64);
                dk_sum.iter_mut().zip(&dk).for_each(|(sum, dk)| add_scaled(sum, 1.0, dk));
                dv_sum.iter_mut().zip(&dv).for_each(|(sum, dv)| add_scaled(sum, 1.0, dv));
                for (isa, [actual, ..]) in &results {
                    assert_head(
                        actual,
                        sequence,
                        head,
                        &dq,
                        tolerance,
                        &format!("{isa} {dtype} {shape:?} dq {head} of {sequence:?}"),
                    );
                }
            }
            for (isa, [_, dk, dv]) in &results {
                let context = format!("{isa} {dtype} {shape:?} head {kv_head} of {sequence:?}");
                assert_head(dk, sequence, kv_head, &dk_sum, tolerance, &format!("dk, {context}"));
                assert_head(dv, sequence, kv_head, &dv_sum, tolerance, &format!("dv, {context}"));
            }
        }
    }
}

#[test]
fn the_reference_gradient_is_that_of_the_reference() {
    let (len, d, scale) = (5, 3, 0.7);
    let random = |key| -> Vec<Vec<f64>> {
        let values = crate::testing::normal(len * d, key);
        values.chunks(d).map(|row| row.iter().map(|&v| v as f64).collect()).collect()
    };
    let mut inputs = [random(1), random(2), random(3)];
    let dout = random(4);
    let gradient = reference_backward(&inputs[0], &inputs[1], &inputs[2], &dout, scale);
    let loss = |[q, k, v]: &[Vec<Vec<f64>>; 3]| dot(&reference(q, k, v, scale).0.concat(), &dout.concat());
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
