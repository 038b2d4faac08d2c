//! Rows without targets are left out, and on the way back those whose targets do not count.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::toy::{Gradients, Quadratic};
use super::{Layer, PAIRS, backend, layer_gradients, tensor};
use crate::backend::{Backend, LogprobTargets};
use crate::live::live_runs;
use crate::ops::linear;
use crate::ops::loss::{LOGITS_CHUNK_BYTES, LogprobPass, Part, TargetLoss, in_chunks, target_logprobs};
use crate::tape::{Backward, Linear, LoraGroup, LoraProjection, LoraSite};
use crate::{DType, Memory, Tensor};

const SEQUENCES: [Range<usize>; 2] = [0..200, 200..330];
const ROWS: usize = 330;

/// Rows whose target counts: the end of one sequence, the beginning and the end of the next.
fn counts(row: usize) -> bool {
    (150..230).contains(&row) || row >= 310
}

#[test]
fn runs_begin_and_end_with_granules_and_take_short_gaps_along() {
    assert_eq!(live_runs(&SEQUENCES, &(0..ROWS), counts), [128..232, 296..330]);
    assert_eq!(live_runs(&SEQUENCES, &(64..200), counts), [128..200], "a chunk that ends with a sequence");
    assert_eq!(
        live_runs(&SEQUENCES, &(0..ROWS), |row| row == 40 || row == 100),
        [32..128],
        "a granule between two is computed with them"
    );
    assert_eq!(live_runs(&SEQUENCES, &(0..ROWS), |_| false), []);
    assert_eq!(live_runs(&SEQUENCES, &(0..ROWS), |_| true), [0..ROWS]);
}

#[test]
fn what_is_left_out_changes_no_bit_of_what_is_computed() {
    let (b, layer, x) = (backend(), Layer::random(), tensor(&[ROWS, 7], DType::F32, 3));
    let projection = |i: usize| LoraProjection {
        a: layer.packed[i][0].layer(0),
        b: layer.packed[i][1].layer(0),
        scale: 0.5,
        first_column: PAIRS[i].1,
        site: LoraSite { group: 0, module: i, layer: 0 },
    };
    let group = |tokens: Range<usize>, pairs: &[usize]| LoraGroup {
        sequences: Arc::from([tokens.clone()]),
        tokens,
        projections: pairs.iter().map(|&i| projection(i)).collect(),
    };
    let groups = [group(SEQUENCES[0].clone(), &[0, 1]), group(SEQUENCES[1].clone(), &[2])];
    let ids: Vec<u32> = (0..ROWS as u32).map(|i| i * 7 % 11).collect();
    let offsets: Vec<usize> = (0..=ROWS).collect();
    let targets = LogprobTargets { ids: &ids, offsets: &offsets };
    let loss = Quadratic { factors: (0..ROWS).map(|row| if counts(row) { 0.01 * row as f32 - 2.0 } else { 0.0 }).collect() };
    let bits = |tensor: &Tensor| tensor.to_f32_vec().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let of_pairs = |gradients: &Gradients| gradients.of_group(0).iter().map(|v| v.to_bits()).collect::<Vec<_>>();

    // All rows at once, with the gradients of those that do not count, which are 0.
    let whole = Linear { weight: layer.w.layer(0), bias: None, lora: groups.clone().into() };
    let (logits, low) = linear::forward(&b, &x, &whole).unwrap();
    let mut normalizers = b.scratch(&[ROWS], DType::F32).unwrap();
    let logprobs = b.target_logprobs(&logits, targets, &mut normalizers).unwrap();
    let mut by_logprob = vec![0.0; ROWS];
    loss.gradient(0, &logprobs, &mut by_logprob);
    let mut dlogits = b.scratch(&[ROWS, 11], DType::F32).unwrap();
    b.logits_gradient(logits.as_ref(), normalizers.as_ref(), targets, &by_logprob, &mut dlogits).unwrap();
    let mut expected = layer_gradients(None);
    let dx = linear::backward(&mut Backward::new(&b, &mut expected), &x, &dlogits, &whole, &low, true).unwrap().unwrap();

    for rows in [32, 64, 100, 512] {
        let mut gradients = layer_gradients(None);
        let between = &mut || ControlFlow::Continue(());
        let loss = Some((&loss as &dyn TargetLoss, &mut gradients as _));
        let pass =
            LogprobPass { sequences: &SEQUENCES, targets, loss, chunk_bytes: LOGITS_CHUNK_BYTES, repeats: None, between };
        let (ours, by_x) = in_chunks(&b, &x, layer.w.layer(0), &groups, (vec![Part::Computed(0..ROWS)], rows), pass).unwrap();
        assert_eq!(ours, logprobs, "chunks of {rows}");
        assert_eq!(bits(&by_x.unwrap()), bits(&dx), "chunks of {rows}");
        assert_eq!(of_pairs(&gradients), of_pairs(&expected), "chunks of {rows}");
    }
}

#[test]
fn rows_without_targets_are_not_multiplied() {
    let (b, layer, x) = (backend(), Layer::random(), tensor(&[ROWS, 7], DType::F32, 3));
    // Targets of the rows that count, and of all.
    let numbered = |has: &dyn Fn(usize) -> bool| -> (Vec<usize>, Vec<usize>) {
        let rows: Vec<usize> = (0..ROWS).filter(|&row| has(row)).collect();
        let offsets = (0..=ROWS).map(|row| rows.partition_point(|&r| r < row)).collect();
        (rows, offsets)
    };
    let computed = |has: &dyn Fn(usize) -> bool| {
        let (rows, offsets) = numbered(has);
        let ids: Vec<u32> = rows.iter().map(|&row| row as u32 * 7 % 11).collect();
        let factors = rows.iter().map(|&row| if counts(row) { 0.01 * row as f32 - 2.0 } else { 0.0 }).collect();
        let mut gradients = layer_gradients(None);
        let mut chunks = 0;
        let between = &mut || {
            chunks += 1;
            ControlFlow::Continue(())
        };
        let (targets, loss) = (LogprobTargets { ids: &ids, offsets: &offsets }, Quadratic { factors });
        // Chunks of 32 rows, the fewest there are.
        let loss = Some((&loss as &dyn TargetLoss, &mut gradients as _));
        let pass = LogprobPass { sequences: &SEQUENCES, targets, loss, chunk_bytes: 0, repeats: None, between };
        let (logprobs, by_x) = target_logprobs(&b, &x, layer.w.layer(0), &[], pass).unwrap();
        let logprobs: Vec<(usize, u32)> = rows.into_iter().zip(logprobs.iter().map(|v| v.to_bits())).collect();
        let by_x: Vec<u32> = by_x.unwrap().to_f32_vec().iter().map(|v| v.to_bits()).collect();
        (logprobs, by_x, chunks)
    };
    let (of_all, by_all, chunks_of_all) = computed(&|_| true);
    let (of_some, by_some, chunks_of_some) = computed(&counts);
    assert_eq!(of_some, of_all.into_iter().filter(|&(row, _)| counts(row)).collect::<Vec<_>>());
    assert_eq!(by_some, by_all);
    // 128..232 and 296..330, by granules: the first cuts the sequence that ends at 200 and the one that begins there.
    assert_eq!((chunks_of_some, chunks_of_all), (6, 12));
    assert_eq!(computed(&|_| false).2, 0);
}
