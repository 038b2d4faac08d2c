//! All ops together: gradients of a small model, and their bits in any company.

use std::ops::Range;

use super::toy::{Adapter, Gradients, Keep, Quadratic, Sequence, Toy, VOCAB, sites};
use crate::backend::LogprobTargets;
use crate::random::philox;
use crate::tape::LoraSite;
use crate::testing::normal;
use crate::{Arithmetic, CpuBackend, DType, Isa};

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// A sequence, and for each of its tokens the targets with their factors in the loss.
type Example = (Sequence, Vec<Vec<(u32, f32)>>);

fn draw(key: u64, i: usize, below: usize) -> u32 {
    philox(key, [i as u64, 0])[0] % below as u32
}

/// Sequences with their targets (none to three for each token, duplicates among them) and factors of the loss, each a function of its seed.
fn sequence(adapter: Option<usize>, len: usize, seed: u64) -> Example {
    let ids = (0..len).map(|i| draw(seed, i, VOCAB)).collect();
    let factors = normal(3 * len, seed);
    let targets = |i: usize| {
        let of = |k: usize| (draw(seed + 1, (i * 3 + k) / 2, VOCAB), if k == 1 { 0.0 } else { factors[i * 3 + k] });
        (0..draw(seed + 2, i, 4) as usize).map(of).collect()
    };
    (Sequence { adapter, ids }, (0..len).map(targets).collect())
}

/// Log-probabilities of each sequence, and gradients added to `gradients`.
fn train(
    toy: &Toy,
    b: &CpuBackend,
    batch: &[Example],
    keep: Keep,
    chunk_rows: usize,
    gradients: &mut Gradients,
) -> Vec<Vec<u32>> {
    let sequences: Vec<Sequence> = batch.iter().map(|s| s.0.clone()).collect();
    let rows: Vec<&Vec<(u32, f32)>> = batch.iter().flat_map(|s| &s.1).collect();
    let mut offsets = vec![0];
    offsets.extend(rows.iter().scan(0, |n, row| {
        *n += row.len();
        Some(*n)
    }));
    let (ids, factors): (Vec<u32>, Vec<f32>) = rows.into_iter().flatten().copied().unzip();
    let targets = LogprobTargets { ids: &ids, offsets: &offsets };
    let logprobs = toy.train(b, &sequences, (targets, &Quadratic { factors }), keep, chunk_rows, gradients);
    let mut rest = logprobs.into_iter().map(f32::to_bits);
    batch.iter().map(|s| rest.by_ref().take(s.1.iter().map(Vec::len).sum()).collect()).collect()
}

fn adapters() -> [Adapter; 2] {
    [Adapter::random(3, 1), Adapter::random(1, 2)]
}

/// Sequences of odd and even lengths under two adapters and none, some longer than a page.
fn batch() -> Vec<Example> {
    let of = [(Some(0), 5, 10), (Some(0), 1, 20), (Some(0), 67, 30), (None, 3, 40), (Some(1), 9, 50), (Some(1), 4, 60)];
    of.into_iter().map(|(adapter, len, seed)| sequence(adapter, len, seed)).collect()
}

fn train_fresh(toy: &Toy, b: &CpuBackend, batch: &[Example], keep: Keep, chunk_rows: usize) -> (Vec<Vec<u32>>, Gradients) {
    let mut gradients = toy.gradients();
    (train(toy, b, batch, keep, chunk_rows, &mut gradients), gradients)
}

fn bits_of(gradients: &Gradients, group: usize) -> Vec<u32> {
    gradients.of_group(group).into_iter().map(f32::to_bits).collect()
}

#[test]
fn gradients_of_a_small_model_are_those_of_finite_differences() {
    let b = CpuBackend::with_isa(Isa::detect(), 2);
    let adapters = adapters();
    let batch: Vec<_> = [(Some(0), 3, 10), (Some(0), 4, 20), (None, 2, 30), (Some(1), 5, 40)]
        .map(|(a, len, seed)| sequence(a, len, seed))
        .into();
    let factors: Vec<f32> = batch.iter().flat_map(|s| &s.1).flatten().map(|t| t.1).collect();
    let (_, gradients) = train_fresh(&Toy::new(DType::F32, &adapters), &b, &batch, Keep::Checkpoints, 512);
    let loss = |adapters: &[Adapter]| {
        let logprobs = train_fresh(&Toy::new(DType::F32, adapters), &b, &batch, Keep::Everything, 512).0.concat();
        Quadratic { factors: factors.clone() }.value(&logprobs.into_iter().map(f32::from_bits).collect::<Vec<_>>())
    };
    for (group, (i, (layer, module))) in (0..2).flat_map(|group| sites().enumerate().map(move |s| (group, s))) {
        let gradient = gradients.of(LoraSite { group, module, layer });
        let gradient = [gradient.0, gradient.1];
        // Along a random direction of A and one of B.
        for (which, gradient) in gradient.iter().enumerate() {
            let direction = normal(gradient.len(), 7 + which as u64);
            let [above, below] = [1e-2, -1e-2].map(|step| {
                let mut moved = adapters.clone();
                moved[group].pairs[i][which].iter_mut().zip(&direction).for_each(|(p, d)| *p += step * d);
                loss(&moved)
            });
            let slope = (above - below) / 2e-2;
            let expected: f64 = gradient.iter().zip(&direction).map(|(&g, &d)| g as f64 * d as f64).sum();
            let context = format!("group {group} layer {layer} module {module} matrix {which}");
            assert!((slope - expected).abs() < 1e-2 * (1.0 + expected.abs()), "{context}: {expected}, by differences {slope}");
        }
    }
}

#[test]
fn bf16_gradients_are_close_to_those_in_f32() {
    let b = CpuBackend::with_isa(Isa::detect(), 2);
    let [exact, rounded] =
        DTYPES.map(|dtype| train_fresh(&Toy::new(dtype, &adapters()), &b, &batch(), Keep::Checkpoints, 512).1);
    for group in 0..2 {
        let (exact, rounded) = (exact.of_group(group), rounded.of_group(group));
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| (v as f64).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        assert!(error < 0.05, "group {group}: relative error {error}");
    }
}

#[test]
fn checkpoints_and_chunks_of_logits_change_no_bit() {
    for dtype in DTYPES {
        let toy = Toy::new(dtype, &adapters());
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let (logprobs, expected) = train_fresh(&toy, &b, &batch(), Keep::Everything, 512);
            for (keep, chunk_rows) in [(Keep::Checkpoints, 512), (Keep::Checkpoints, 32), (Keep::Everything, 48)] {
                let (again, gradients) = train_fresh(&toy, &b, &batch(), keep, chunk_rows);
                assert_eq!(logprobs, again);
                assert!(
                    (0..2).all(|g| bits_of(&expected, g) == bits_of(&gradients, g)),
                    "{isa} {dtype} in chunks of {chunk_rows}"
                );
            }
        }
    }
}

#[test]
fn a_tenant_has_the_same_bits_alone_in_company_and_on_any_number_of_threads() {
    let batch = batch();
    let company: [(usize, Range<usize>); 2] = [(0, 0..3), (1, 4..6)];
    for dtype in DTYPES {
        let toy = Toy::new(dtype, &adapters());
        for isa in Arithmetic::available() {
            let (logprobs, gradients) = train_fresh(&toy, &CpuBackend::with_isa(isa, 3), &batch, Keep::Checkpoints, 34);
            for (group, own) in company.clone() {
                let (alone, gradients_alone) =
                    train_fresh(&toy, &CpuBackend::with_isa(isa, 1), &batch[own.clone()], Keep::Checkpoints, 40);
                assert_eq!(alone, logprobs[own]);
                assert_eq!(bits_of(&gradients, group), bits_of(&gradients_alone, group), "{isa} {dtype}");
            }
        }
    }
}

#[test]
fn gradients_of_two_calls_add_up_to_the_bits_of_one() {
    let batch = batch();
    for dtype in DTYPES {
        let toy = Toy::new(dtype, &adapters());
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let (_, whole) = train_fresh(&toy, &b, &batch, Keep::Checkpoints, 33);
            for cut in 1..batch.len() {
                let mut gradients = toy.gradients();
                for part in [&batch[..cut], &batch[cut..]] {
                    train(&toy, &b, part, Keep::Checkpoints, 33, &mut gradients);
                }
                assert!((0..2).all(|g| bits_of(&whole, g) == bits_of(&gradients, g)), "{isa} {dtype} cut at {cut}");
            }
        }
    }
}

#[test]
fn sampling_over_a_cache_has_the_log_probabilities_of_training_bit_for_bit() {
    let (sequence, _) = sequence(Some(0), 67, 30);
    let all: Vec<Vec<(u32, f32)>> = sequence.ids.iter().map(|_| (0..VOCAB as u32).map(|id| (id, 0.1)).collect()).collect();
    for dtype in DTYPES {
        let toy = Toy::new(dtype, &adapters());
        for isa in Arithmetic::available() {
            let b = CpuBackend::with_isa(isa, 2);
            let trained = train_fresh(&toy, &b, &[(sequence.clone(), all.clone())], Keep::Checkpoints, 32).0.concat();
            for cuts in [vec![0, 67], vec![0, 3, 64, 65, 67], (0..=67).collect()] {
                let sampled: Vec<u32> = toy.sample(&b, &sequence, &cuts).into_iter().map(f32::to_bits).collect();
                assert!(sampled == trained, "{isa} {dtype}, cut at {cuts:?}");
            }
        }
    }
}
