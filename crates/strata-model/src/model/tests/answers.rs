//! Steps that answer some of their rows, and passes of which some tokens have no targets.

use super::*;

#[test]
fn what_is_asked_of_some_rows_is_what_is_asked_of_all_and_leaves_the_same_in_the_cache() {
    const LENGTHS: [usize; 3] = [40, 7, 21];
    for (config, dtype) in families_in_both_dtypes() {
        let context = format!("{dtype} {:?}", config.family);
        let model = Model::random(backend(), config, 7, dtype).unwrap();
        let ((_, first), (_, last)) = (adapter(&model, 4), adapter(&model, 2));
        let adapters = [Some(&*first), None, Some(&*last)];
        let steps = |rows: &[usize]| {
            let mut cache = model.new_kv_cache(3, 3).unwrap();
            let mut step = |past: &dyn Fn(usize) -> usize, tokens_of: &dyn Fn(usize) -> Vec<u32>, rows: &[usize]| {
                let mut batch = PackedBatch::new();
                for (s, adapter) in adapters.into_iter().enumerate() {
                    batch.begin_group(adapter);
                    batch.push_cached(
                        &tokens_of(s),
                        past(s),
                        50,
                        Held { pages: vec![s as u32], state: Some(s as u32), ..Held::default() },
                    );
                }
                let replies = model.step(&batch, &mut cache, rows, &vec![whole_row(); rows.len()]).unwrap();
                replies.into_iter().map(|reply| bits(&reply.unwrap().logprobs)).collect::<Vec<_>>()
            };
            let prefilled = step(&|_| 0, &|s| tokens(LENGTHS[s], s), rows);
            (prefilled, step(&|s| LENGTHS[s], &|s| vec![s as u32 + 5], &[0, 1, 2]))
        };
        let (all, decoded) = steps(&(0..LENGTHS.iter().sum()).collect::<Vec<_>>());
        for rows in [&[][..], &[67], &[39, 46, 67], &[0, 39, 39, 40], &[41, 50, 50, 50]] {
            let (some, then) = steps(rows);
            assert!(rows.iter().zip(&some).all(|(&row, reply)| *reply == all[row]), "rows {rows:?}, {context}");
            assert!(some.len() == rows.len() && then == decoded, "the cache after rows {rows:?}, {context}");
        }
    }
}

/// Minus the sum of all log-probabilities but those of some targets.
struct Counting(Vec<bool>);

impl TokenLoss for Counting {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        let counts = self.0[first..].iter().zip(logprobs);
        gradient.iter_mut().zip(counts).for_each(|(g, (counts, l))| *g = if *counts { l / 64.0 - 1.0 } else { 0.0 });
    }
}

/// The last layer computes no more of tokens without targets than others need of them; with targets that do not count, it computes all and goes back through as few.
#[test]
fn of_every_family_tokens_without_targets_leave_the_bits_of_targets_that_do_not_count() {
    // Of each sequence: its adapter, its tokens, and those at its end that have targets. Few have; a granule begins and ends among those that have none.
    const SEQUENCES: [(Option<usize>, usize, usize); 6] =
        [(Some(0), 100, 21), (Some(0), 33, 0), (Some(0), 41, 8), (None, 37, 3), (Some(1), 3, 3), (Some(1), 80, 11)];
    let ends = SEQUENCES.iter().scan(0, |end, (_, len, _)| {
        *end += len;
        Some(*end)
    });
    let with_targets: Vec<bool> =
        SEQUENCES.iter().flat_map(|&(_, len, count)| (0..len).map(move |token| token >= len - count)).collect();
    let ends: Vec<usize> = ends.collect();
    for (config, dtype) in families_in_both_dtypes() {
        let context = format!("{dtype} {:?}", config.family);
        let model = Model::random(backend(), config.clone(), 7, dtype).unwrap();
        let ((_, first), (_, second)) = (adapter(&model, 4), adapter(&model, 2));
        let mut batch = PackedBatch::new();
        for (s, &(group, len, _)) in SEQUENCES.iter().enumerate() {
            if s == 0 || SEQUENCES[s - 1].0 != group {
                batch.begin_group(group.map(|group| [&*first, &*second][group]));
            }
            batch.push_sequence(&tokens(len, s));
        }
        let train = |all_have_targets: bool, keeping: Keeping| {
            let mut targets = Targets { ids: Vec::new(), offsets: vec![0] };
            for (token, has_some) in with_targets.iter().enumerate() {
                if *has_some || all_have_targets {
                    targets.ids.push((token * 7 % 300) as u32);
                }
                targets.offsets.push(targets.ids.len());
            }
            let counts = if all_have_targets { with_targets.clone() } else { vec![true; targets.ids.len()] };
            let mut sums = [4, 2].map(|rank| LoraParams::zeros(model.backend(), model.lora_modules(), &lora(rank)).unwrap());
            let [of_first, of_second] = &mut sums;
            let gradients = &mut [Some(of_first), None, Some(of_second)];
            let loss = Counting(counts.clone());
            let go_on = &mut || ControlFlow::Continue(());
            let logprobs = model.forward_backward_with(&batch, &targets, &loss, gradients, keeping, go_on).unwrap();
            assert_eq!(bits(&model.forward(&batch, &targets).unwrap()), bits(&logprobs), "{context}");
            let logprobs: Vec<f32> = logprobs.into_iter().zip(counts).filter(|(_, counts)| *counts).map(|(l, _)| l).collect();
            (bits(&logprobs), sums.map(|sum| gradient_bits(&model, &sum)))
        };
        let expected = train(true, model.least_kept());
        assert_eq!(expected.0.len(), 46);
        for keeping in other_than_checkpoints(&config).chain([Keeping::ALL_CHECKPOINTS]) {
            assert!(train(false, keeping) == expected, "{keeping:?}, {context}");
        }
        let inputs = BatchInputs::new(model.backend(), model.config(), &batch).unwrap();
        let offsets: Vec<usize> = std::iter::once(0)
            .chain(with_targets.iter().scan(0, |n, has| {
                *n += usize::from(*has);
                Some(*n)
            }))
            .collect();
        let targets = Targets { ids: vec![0; 46], offsets };
        let wanted = WantedRows::of(&inputs, &targets, config.num_layers).unwrap();
        // The last granules of sequences in which the last tokens alone have targets, what is little between two of them, and a short one whole.
        let expected = [64..ends[0], ends[1] + 32..ends[4], ends[5] - 16..ends[5]];
        let expected: Vec<usize> = expected.into_iter().flatten().collect();
        assert_eq!(wanted.rows[..], expected[..]);
        // Nobody asks for anything.
        let targets = Targets { ids: Vec::new(), offsets: vec![0; with_targets.len() + 1] };
        let mut sum = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(4)).unwrap();
        let untouched = gradient_bits(&model, &sum);
        let gradients = &mut [Some(&mut sum), None, None];
        let logprobs = model.forward_backward(&batch, &targets, &Counting(Vec::new()), gradients).unwrap();
        assert!(logprobs.is_empty() && gradient_bits(&model, &sum) == untouched, "{context}");
        assert!(model.forward(&batch, &targets).unwrap().is_empty(), "{context}");
    }
}
