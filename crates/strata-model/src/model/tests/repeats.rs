//! Sequences of one batch that begin alike: the beginning is computed once, and no bit changes.

use strata_tensor::testing::RemoteBackend;

use super::*;
use crate::PAGE_TOKENS;

/// What the loss is multiplied with, target for target.
struct Weighted(Vec<f32>);

impl TokenLoss for Weighted {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        let weights = &self.0[first..];
        gradient.iter_mut().zip(logprobs).zip(weights).for_each(|((g, l), w)| *g = -w * (1.0 - l / 64.0));
    }
}

/// Of one prompt: a completion, one that goes another way, one that leaves that again, the first once more, and a part of the prompt alone.
fn one_prompt() -> Vec<Vec<u32>> {
    let (prompt, first, second) = (tokens(50, 1), tokens(45, 2), tokens(40, 3));
    let third = [&second[..10], &tokens(9, 4)].concat();
    vec![
        [&prompt[..], &first].concat(),
        [&prompt[..], &second].concat(),
        [&prompt[..], &third].concat(),
        [&prompt[..], &first].concat(),
        prompt[..21].to_vec(),
    ]
}

/// The token that follows each, which those that repeat do not share at the end of what they share. Every fifth token has no target, and every seventh two.
fn targets_of(sequences: &[Vec<u32>]) -> Targets {
    let mut targets = Targets { ids: Vec::new(), offsets: vec![0] };
    for sequence in sequences {
        for (i, token) in sequence.iter().enumerate() {
            let of_token = [sequence[(i + 1) % sequence.len()], (token + 9) % 301];
            let count = if i % 5 == 4 { 0 } else { 1 + usize::from(i % 7 == 6) };
            targets.ids.extend(&of_token[..count]);
            targets.offsets.push(targets.ids.len());
        }
    }
    targets
}

/// Weights that are 0 in prompts, or nowhere, or here and there.
fn weights_of(targets: usize, kind: usize) -> Weighted {
    let weight = |i: usize| match kind {
        0 if i % 90 < 50 => 0.0,
        1 => 1.0,
        2 if i * i % 11 < 7 => 0.0,
        _ => 1.0 + (i % 3) as f32,
    };
    Weighted((0..targets).map(weight).collect())
}

/// Adapters with their ranks, and sequences of each.
type Groups<'a> = [(&'a Adapter, usize, Vec<Vec<u32>>)];

fn packed<'a>(groups: &Groups<'a>) -> PackedBatch<'a> {
    let mut batch = PackedBatch::new();
    for (adapter, _, sequences) in groups {
        batch.begin_group(Some(adapter));
        sequences.iter().for_each(|sequence| batch.push_sequence(sequence));
    }
    batch
}

/// Log-probabilities of all groups, and the gradients of each.
fn together(model: &Model, groups: &Groups<'_>, kind: usize, keeping: Keeping) -> (Vec<u32>, Vec<Vec<u32>>) {
    let batch = packed(groups);
    let targets = targets_of(&groups.iter().flat_map(|(.., sequences)| sequences.clone()).collect::<Vec<_>>());
    let mut sums: Vec<LoraParams> = groups.iter().map(|(_, rank, _)| zeros(model, *rank)).collect();
    let mut gradients: Vec<Option<&mut LoraParams>> = sums.iter_mut().map(Some).collect();
    let loss = weights_of(targets.ids.len(), kind);
    let go_on = &mut || ControlFlow::Continue(());
    let logprobs = model.forward_backward_with(&batch, &targets, &loss, &mut gradients, keeping, go_on).unwrap();
    let scored = model.forward(&batch, &targets).unwrap();
    assert_eq!(bits(&scored), bits(&logprobs));
    (bits(&logprobs), sums.iter().map(|sum| gradient_bits(model, sum)).collect())
}

/// The same, a sequence at a time.
fn alone(model: &Model, groups: &Groups<'_>, kind: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    let all = targets_of(&groups.iter().flat_map(|(.., sequences)| sequences.clone()).collect::<Vec<_>>());
    let weights = weights_of(all.ids.len(), kind).0;
    let (mut logprobs, mut gradients, mut row) = (Vec::new(), Vec::new(), 0);
    for (adapter, rank, sequences) in groups {
        let mut sum = zeros(model, *rank);
        for sequence in sequences {
            let batch = packed(&[(*adapter, *rank, vec![sequence.clone()])]);
            let offsets = &all.offsets[row..=row + sequence.len()];
            let own = offsets[0]..offsets[sequence.len()];
            let targets =
                Targets { ids: all.ids[own.clone()].to_vec(), offsets: offsets.iter().map(|o| o - own.start).collect() };
            let loss = Weighted(weights[own].to_vec());
            logprobs.extend(bits(&model.forward_backward(&batch, &targets, &loss, &mut [Some(&mut sum)]).unwrap()));
            row += sequence.len();
        }
        gradients.push(gradient_bits(model, &sum));
    }
    (logprobs, gradients)
}

fn zeros(model: &Model, rank: usize) -> LoraParams {
    LoraParams::zeros(model.backend(), model.lora_modules(), &lora(rank)).unwrap()
}

fn shares(model: &Model, groups: &Groups<'_>) -> bool {
    BatchInputs::new(model.backend(), model.config(), &packed(groups)).unwrap().repeats.is_some()
}

#[test]
fn of_every_family_sequences_that_begin_alike_have_the_bits_that_each_has_alone() {
    for config in [config()].into_iter().chain(families()) {
        for (compute, storage) in
            [(DType::F32, WeightStorage::Dense), (DType::BF16, WeightStorage::Dense), (DType::BF16, WeightStorage::Int8)]
        {
            for threads in [1, 3] {
                let context = format!("{compute} {storage:?}, {threads} threads, {:?}", config.family);
                let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), threads));
                let mut model = Model::random(backend, config.clone(), 7, WeightFormat { compute, storage }).unwrap();
                let ((_, first), (_, second)) = (adapter(&model, 4), adapter(&model, 6));
                // The other adapter reads the same prompt: what it makes of it is its own.
                let groups = [(&*first, 4, one_prompt()), (&*second, 6, one_prompt()[..2].to_vec())];
                assert!(shares(&model, &groups), "{context}");
                for kind in 0..3 {
                    let expected = alone(&model, &groups, kind);
                    for (layers, every) in [(1, 1), (2, 1), (config.num_layers, 1), (1, 2)] {
                        let keeping = Keeping { layers, every };
                        let together = together(&model, &groups, kind, keeping);
                        assert!(together == expected, "{keeping:?}, loss {kind}, {context}");
                    }
                    let chunk_bytes = model.logits_chunk_bytes;
                    model.set_logits_chunk_bytes(0);
                    assert!(
                        together(&model, &groups, kind, model.least_kept()) == expected,
                        "small chunks, loss {kind}, {context}"
                    );
                    model.set_logits_chunk_bytes(chunk_bytes);
                }
            }
        }
    }
}

#[test]
fn adapters_share_nothing() {
    let model = model();
    let ((_, first), (_, second)) = (adapter(&model, 4), adapter(&model, 6));
    let sequence = vec![tokens(70, 1)];
    assert!(!shares(&model, &[(&*first, 4, sequence.clone()), (&*second, 6, sequence.clone())]));
    assert!(shares(&model, &[(&*first, 4, [sequence.clone(), sequence].concat())]));
}

/// Sequences behind the page that another step left, or behind nothing: their tokens, past and pages.
type Parts<'a> = [(&'a [u32], usize, [u32; 2])];

/// What each of these sequences says of its last token, and of a token behind it, in steps with all of them or one by one.
fn stepped(model: &Model, adapter: &Adapter, prefix: &[u32], parts: &Parts<'_>, at_once: bool) -> Vec<Vec<u32>> {
    let mut cache = model.new_kv_cache(2 + parts.len(), 1 + parts.len()).unwrap();
    let mut found = Vec::new();
    let mut step = |cache: &mut KvCache, sequences: &[(&[u32], usize, Held)]| {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(adapter));
        sequences.iter().for_each(|(tokens, past, held)| batch.push_cached(tokens, *past, 200, held.clone()));
        let rows: Vec<usize> = batch.spans.iter().map(|span| span.tokens.end - 1).collect();
        let replies = model.step(&batch, cache, &rows, &vec![whole_row(); rows.len()]).unwrap();
        found.extend(replies.into_iter().map(|reply| bits(&reply.unwrap().logprobs)));
        model.num_computed(&batch)
    };
    let state = |n: usize| (model.kv_state_bytes() > 0).then_some(n as u32);
    step(&mut cache, &[(prefix, 0, Held { pages: vec![0], state: state(0), ..Held::default() })]);
    let held = |n: usize| Held { pages: parts[n].2.to_vec(), state: state(1 + n), ..Held::default() };
    for n in (0..parts.len()).filter(|&n| parts[n].1 > 0 && state(n).is_some()) {
        cache.copy_state(model.backend(), 0, 1 + n as u32).unwrap();
    }
    let sequences: Vec<(&[u32], usize, Held)> = (0..parts.len()).map(|n| (parts[n].0, parts[n].1, held(n))).collect();
    let further: Vec<_> =
        parts.iter().enumerate().map(|(n, (tokens, past, _))| (&[7][..], past + tokens.len(), held(n))).collect();
    if at_once {
        let all = parts.iter().map(|(tokens, ..)| tokens.len()).sum::<usize>();
        assert!(step(&mut cache, &sequences) < all / 2, "most repeat others");
        step(&mut cache, &further);
    } else {
        sequences.iter().chain(&further).for_each(|sequence| {
            step(&mut cache, std::slice::from_ref(sequence));
        });
    }
    found
}

#[test]
fn of_every_family_requests_that_begin_alike_in_a_step_have_the_bits_that_each_has_alone() {
    for (config, compute) in families_in_both_dtypes() {
        let context = format!("{compute} {:?}", config.family);
        let model = Model::random(backend(), config, 7, compute).unwrap();
        let (_, adapter) = adapter(&model, 4);
        let (prefix, prompt) = (tokens(PAGE_TOKENS, 1), tokens(40, 2));
        let other = [&prompt[..30], &tokens(9, 4)].concat();
        // The second goes on where the third ends, whose last token is the only one of its that is answered.
        let parts: Vec<(&[u32], usize, [u32; 2])> = vec![
            (&prompt[..20], 0, [2, 0]),
            (&prompt, PAGE_TOKENS, [0, 3]),
            (&prompt[..35], PAGE_TOKENS, [0, 4]),
            (&prompt, PAGE_TOKENS, [0, 5]),
            (&other, PAGE_TOKENS, [0, 6]),
            (&prompt, 0, [7, 1]),
        ];
        let alone = stepped(&model, &adapter, &prefix, &parts, false);
        assert!(stepped(&model, &adapter, &prefix, &parts, true) == alone, "{context}");
    }
}

/// Pages that are begun with the same tokens are copies of one another, and what goes on in them is computed once.
#[test]
fn of_every_family_requests_that_go_on_in_copies_of_a_page_have_the_bits_that_each_has_alone() {
    for (config, compute) in families_in_both_dtypes() {
        let context = format!("{compute} {:?}", config.family);
        let model = Model::random(backend(), config, 7, compute).unwrap();
        if model.kv_state_bytes() > 0 {
            continue;
        }
        let (_, adapter) = adapter(&model, 4);
        // Of the second page the sequences have a part, and others have written on in it.
        let (read, past) = (tokens(PAGE_TOKENS + 20, 1), PAGE_TOKENS + 11);
        let prompt = tokens(70, 2);
        let sequences = [&prompt[..], &prompt[..50], &[&prompt[..30], &tokens(9, 4)[..]].concat(), &prompt];
        let steps = |together: bool| {
            let mut cache = model.new_kv_cache(2 + 3 * sequences.len(), 0).unwrap();
            let step = |cache: &mut KvCache, group: &[(&[u32], usize, Held)]| {
                let mut batch = PackedBatch::new();
                batch.begin_group(Some(&adapter));
                group.iter().for_each(|(tokens, past, held)| batch.push_cached(tokens, *past, 200, held.clone()));
                let rows: Vec<usize> = batch.spans.iter().map(|span| span.tokens.end - 1).collect();
                let replies = model.step(&batch, cache, &rows, &vec![whole_row(); rows.len()]).unwrap();
                let found: Vec<_> = replies.into_iter().map(|reply| bits(&reply.unwrap().logprobs)).collect();
                (found, model.num_computed(&batch))
            };
            let pages = |n: usize| vec![0, 2 + 3 * n as u32, 3 + 3 * n as u32];
            step(&mut cache, &[(&read, 0, vec![0, 1].into())]);
            (0..sequences.len()).for_each(|n| cache.copy_page(model.backend(), 1, pages(n)[1]).unwrap());
            let held = |n| Held { pages: pages(n), begun: Some(3), ..Held::default() };
            let group: Vec<_> = sequences.iter().enumerate().map(|(n, tokens)| (*tokens, past, held(n))).collect();
            let further: Vec<_> =
                group.iter().map(|(tokens, past, held)| (&[7][..], past + tokens.len(), held.clone())).collect();
            let at_once = if together { group.len() } else { 1 };
            let steps = group.chunks(at_once).chain(further.chunks(1)).map(|group| step(&mut cache, group));
            let (found, computed): (Vec<_>, Vec<_>) = steps.unzip();
            (found.concat(), computed[0])
        };
        let (together, computed) = steps(true);
        assert!(together == steps(false).0, "{context}");
        assert_eq!(computed, 70 + 9, "{context}");
    }
}

/// Of what begins alike a device is asked for the rows that it is asked for without what repeats.
#[test]
fn of_every_family_rows_that_repeat_others_are_not_computed_where_nothing_goes_back() {
    for config in families().into_iter().chain([config()]) {
        let context = format!("{:?}", config.family);
        let far = Arc::new(RemoteBackend::new(CpuBackend::with_isa(Isa::detect(), 1)));
        let model = Model::random(far.clone(), config, 7, DType::F32).unwrap();
        let (_, adapter) = adapter(&model, 4);
        let (prompt, first, second) = (tokens(PAGE_TOKENS, 1), tokens(12, 2), tokens(9, 3));
        let rows_of = |sequences: &[&[&[u32]]], step: bool| {
            let mut batch = PackedBatch::new();
            batch.begin_group(Some(&adapter));
            for (n, parts) in sequences.iter().enumerate() {
                let state = (model.kv_state_bytes() > 0).then_some(n as u32);
                let held = Held { pages: vec![2 * n as u32, 2 * n as u32 + 1], state, ..Held::default() };
                batch.push_cached(&parts.concat(), 0, 200, if step { held } else { Held::default() });
            }
            let before = far.rows_computed();
            if step {
                let mut cache = model.new_kv_cache(6, 3).unwrap();
                let rows: Vec<usize> = batch.spans.iter().map(|span| span.tokens.end - 1).collect();
                model.step(&batch, &mut cache, &rows, &vec![whole_row(); rows.len()]).unwrap();
            } else {
                let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=batch.len()).collect() };
                model.forward(&batch, &targets).unwrap();
            }
            far.rows_computed() - before
        };
        for step in [false, true] {
            let together = rows_of(&[&[&prompt, &first], &[&prompt, &second], &[&prompt, &second]], step);
            let expected = rows_of(&[&[&prompt, &first]], step) + rows_of(&[&[&second]], step);
            assert_eq!(together, expected, "{context}, in a step: {step}");
        }
    }
}

#[test]
fn logits_of_rows_that_repeat_others_are_computed_once_however_few_are_in_memory() {
    let far = Arc::new(RemoteBackend::new(CpuBackend::with_isa(Isa::detect(), 1)));
    let mut model = Model::random(far.clone(), config(), 7, DType::F32).unwrap();
    let prompt = tokens(PAGE_TOKENS, 1);
    let mut scored = |times: usize, chunk_bytes: usize| {
        model.set_logits_chunk_bytes(chunk_bytes);
        let mut batch = PackedBatch::new();
        (0..times as u32).for_each(|n| batch.push_cached(&prompt, 0, 200, vec![n]));
        let mut cache = model.new_kv_cache(times, 0).unwrap();
        let rows: Vec<usize> = (0..batch.len()).collect();
        let before = far.rows_computed();
        let replies = model.step(&batch, &mut cache, &rows, &vec![whole_row(); rows.len()]).unwrap();
        (far.rows_computed() - before, replies)
    };
    let (computed, alone) = scored(1, 1 << 20);
    // Nine rows at a time.
    let (computed_together, together) = scored(3, 9 * 4 * 301);
    assert_eq!(computed_together, computed);
    together.chunks(alone.len()).for_each(|own| assert!(own == alone));
}
