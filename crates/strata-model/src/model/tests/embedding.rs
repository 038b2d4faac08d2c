//! Adapters of the token embedding.

use super::*;
use crate::lora::Part;

/// Of attention and the embedding.
fn embedding_lora(rank: usize) -> LoraConfig {
    LoraConfig { mlp: false, unembed: false, embedding: true, ..lora(rank) }
}

/// An adapter of random numbers, none of them zero.
fn random_adapter(model: &Model, config: &LoraConfig, key: u64) -> (LoraParams, Arc<Adapter>) {
    let mut params = LoraParams::zeros(model.backend(), model.lora_modules(), config).unwrap();
    for (i, tensor) in params.tensors_mut().enumerate() {
        let values: Vec<f32> = (0..tensor.shape().len() as u64).map(|n| 0.1 * random::normal([key, i as u64], n)).collect();
        model.backend().upload(HostRef::from_f32(&values, &[values.len()]).unwrap(), tensor.as_mut()).unwrap();
    }
    let packed = model.pack_adapter(config.clone(), &params).unwrap();
    (params, packed)
}

/// A batch of groups of sequences, each token's successor as its one target.
fn batch_of<'a>(groups: &[(&'a Adapter, &[Vec<u32>])]) -> (PackedBatch<'a>, Targets) {
    let mut batch = PackedBatch::new();
    for (adapter, sequences) in groups {
        batch.begin_group(Some(adapter));
        sequences.iter().for_each(|sequence| batch.push_sequence(sequence));
    }
    let ids: Vec<u32> = batch.tokens.iter().map(|t| (t + 5) % 301).collect();
    let offsets = (0..=ids.len()).collect();
    (batch, Targets { ids, offsets })
}

/// Log-probabilities of all groups, and the gradient of each that is added to what is there.
fn train_into(model: &Model, groups: &[(&Adapter, &[Vec<u32>])], gradients: &mut [Option<&mut LoraParams>]) -> Vec<u32> {
    let (batch, targets) = batch_of(groups);
    bits(&model.forward_backward(&batch, &targets, &CrossEntropy, gradients).unwrap())
}

fn zeros(model: &Model, config: &LoraConfig) -> LoraParams {
    LoraParams::zeros(model.backend(), model.lora_modules(), config).unwrap()
}

/// Of few different tokens, so that ids repeat.
fn sequences() -> Vec<Vec<u32>> {
    let sequence = |len: usize, salt: usize| (0..len).map(|i| ((i * i * 7 + salt * 13) % 41 * 7) as u32).collect();
    vec![sequence(70, 1), sequence(33, 2), sequence(1, 3)]
}

#[test]
fn an_adapter_of_the_embedding_has_the_same_bits_in_training_and_sampling_in_pieces_and_company_on_any_threads() {
    let untied = json!({"tie_word_embeddings": false});
    let configs = [config(), config_with(untied)].into_iter().chain(families().into_iter().skip(3));
    let formats = [
        (DType::F32, WeightStorage::Dense),
        (DType::BF16, WeightStorage::Dense),
        (DType::BF16, WeightStorage::Int8),
        (DType::BF16, WeightStorage::Int4(Int4Group::Of64)),
    ];
    for (config, (compute, storage)) in configs.flat_map(|c| formats.map(|format| (c.clone(), format))) {
        let context = format!("{compute} {storage:?} {config:?}");
        let mut of_one_thread = None;
        for threads in [1, 3] {
            let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), threads));
            let model = Model::random(backend, config.clone(), 7, WeightFormat { compute, storage }).unwrap();
            let (own, others) = (embedding_lora(5), lora(3));
            let ((_, adapter), (_, other)) = (random_adapter(&model, &own, 1), random_adapter(&model, &others, 2));
            let (sequences, strangers) = (sequences(), vec![tokens(40, 5), tokens(3, 6)]);
            let alone = [(&*adapter, &sequences[..])];
            let mut gradient = zeros(&model, &own);
            let trained = train_into(&model, &alone, &mut [Some(&mut gradient)]);
            let gradient = gradient_bits(&model, &gradient);
            let (whole, targets) = batch_of(&alone);
            assert!(bits(&model.forward(&whole, &targets).unwrap()) == trained, "scored, {context}");
            let lengths = [70, 33];
            let decoded = step_by_step(&model, &adapter, lengths);
            let (plain, plain_targets) = batch(&adapter, &lengths);
            assert!(bits(&model.forward(&plain, &plain_targets).unwrap()) == decoded, "decoded, {context}");

            let mut sum = zeros(&model, &own);
            for sequence in &sequences {
                train_into(&model, &[(&adapter, std::slice::from_ref(sequence))], &mut [Some(&mut sum)]);
            }
            assert!(gradient_bits(&model, &sum) == gradient, "in pieces, {context}");

            // One whose embedding is frozen has the bits that it has where nothing goes back to embeddings.
            let (mut first, mut second, mut scored) = (zeros(&model, &others), zeros(&model, &own), zeros(&model, &others));
            let groups = [(&*other, &strangers[..]), (&*adapter, &sequences[..]), (&*other, &strangers[..])];
            let together = train_into(&model, &groups, &mut [Some(&mut first), Some(&mut second), None]);
            let of_strangers = train_into(&model, &[(&other, &strangers)], &mut [Some(&mut scored)]);
            assert!(together == [&of_strangers[..], &trained, &of_strangers].concat(), "in company, {context}");
            assert!(gradient_bits(&model, &second) == gradient, "in company, {context}");
            assert!(gradient_bits(&model, &first) == gradient_bits(&model, &scored), "in company of it, {context}");
            // One that only scores has no gradient to give.
            let mut first = zeros(&model, &others);
            train_into(&model, &groups, &mut [Some(&mut first), None, None]);
            assert!(gradient_bits(&model, &first) == gradient_bits(&model, &scored), "beside who scores, {context}");

            let all = of_one_thread.get_or_insert_with(|| (trained.clone(), gradient.clone()));
            assert!(*all == (trained, gradient), "{threads} threads, {context}");
        }
    }
}

#[test]
fn the_gradient_of_the_embeddings_adapter_is_that_of_finite_differences() {
    for (tied, with_attention) in [(true, true), (false, true), (false, false)] {
        let model = Model::random(backend(), config_with(json!({"tie_word_embeddings": tied})), 7, DType::F32).unwrap();
        let config = LoraConfig { attention: with_attention, ..embedding_lora(3) };
        let (params, adapter) = random_adapter(&model, &config, 1);
        let sequences = vec![sequences().remove(1)];
        let mut gradient = zeros(&model, &config);
        train_into(&model, &[(&adapter, &sequences)], &mut [Some(&mut gradient)]);
        let module = model.lora_modules().iter().position(|m| m.part == Part::Embedding).unwrap();
        let values = |t: &Tensor| model.backend().to_f32_vec(t.as_ref()).unwrap();
        for side in 0..2 {
            fn of(params: &mut LoraParams, module: usize, side: usize) -> &mut Tensor {
                let stack = params.stacks[module].as_mut().unwrap();
                [&mut stack.a, &mut stack.b].into_iter().nth(side).unwrap()
            }
            let got = values(of(&mut gradient, module, side));
            let direction: Vec<f32> = (0..got.len() as u64).map(|n| random::normal([5, 6], n)).collect();
            let loss = |step: f32| {
                let mut moved = params.duplicate(model.backend()).unwrap();
                let tensor = of(&mut moved, module, side);
                let at: Vec<f32> = values(tensor).iter().zip(&direction).map(|(v, d)| v + step * d).collect();
                model.backend().upload(HostRef::from_f32(&at, &[at.len()]).unwrap(), tensor.as_mut()).unwrap();
                let adapter = model.pack_adapter(config.clone(), &moved).unwrap();
                let (batch, targets) = batch_of(&[(&adapter, &sequences)]);
                -model.forward(&batch, &targets).unwrap().into_iter().map(f64::from).sum::<f64>()
            };
            let slope = (loss(1e-3) - loss(-1e-3)) / 2e-3;
            let expected: f64 = got.iter().zip(&direction).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
            let size: f64 = got.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            assert!(size > 1.0 && (slope - expected).abs() < 1e-2 * size, "side {side}: {expected}, by differences {slope}");
        }
    }
}

#[test]
fn fresh_adapters_of_the_embedding_begin_as_peft_begins_them_and_leave_those_of_others_as_they_were() {
    let model = model();
    let modules = model.lora_modules();
    let place = modules.iter().position(|m| m.part == Part::Embedding).unwrap();
    assert_eq!(place, modules.len() - 1, "numbers of fresh adapters depend on places in the list");
    let (without, with) = (lora(4), LoraConfig { embedding: true, ..lora(4) });
    let [without, with] = [without, with].map(|config| LoraParams::init(model.backend(), modules, &config, 3).unwrap());
    assert!(without.stacks[place].is_none());
    let stack = with.stacks[place].as_ref().unwrap();
    assert_eq!((stack.a.shape().dims(), stack.b.shape().dims()), (&[1, 301, 4][..], &[1, 4, 48][..]));
    let values = |t: &Tensor| model.backend().to_f32_vec(t.as_ref()).unwrap();
    assert!(values(&stack.a).iter().all(|&v| v == 0.0));
    let b = values(&stack.b);
    let variance = b.iter().map(|v| v * v).sum::<f32>() / b.len() as f32;
    assert!((0.6..1.5).contains(&variance), "{variance}");
    let before = gradient_bits(&model, &without);
    assert_eq!(gradient_bits(&model, &with)[..before.len()], before);
}
