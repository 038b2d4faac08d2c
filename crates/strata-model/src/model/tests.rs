//! Passes over a small random model.

mod answers;
mod embedding;
mod images;
mod int4;
mod loading;
mod repeats;
mod tied;

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Value, json};
use strata_tensor::{Arithmetic, CpuBackend, HostRef, Int4Group, Isa, random};

use super::*;
use crate::Held;

/// A model of a few thousand parameters, with a head width and a vocabulary that no vector register divides.
pub(super) fn config() -> ModelConfig {
    config_with(json!({}))
}

/// With other values of some keys.
fn config_with(changes: Value) -> ModelConfig {
    let mut config = json!({
        "model_type": "qwen3", "vocab_size": 301, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": true, "max_position_embeddings": 4096, "initializer_range": 0.2,
        "eos_token_id": 0
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    ModelConfig::from_json(&config.to_string(), None).unwrap()
}

pub(super) fn backend() -> Arc<CpuBackend> {
    Arc::new(CpuBackend::with_isa(Isa::detect(), 2))
}

fn model() -> Model {
    Model::random(backend(), config(), 7, DType::F32).unwrap()
}

fn lora(rank: usize) -> LoraConfig {
    LoraConfig {
        rank,
        alpha: 8.0,
        attention: true,
        mlp: true,
        unembed: true,
        embedding: false,
        own: BTreeMap::new(),
        left_out: crate::lora::ModuleSet::NONE,
    }
}

/// An adapter whose B is not zero, so that every gradient is felt.
fn adapter(model: &Model, rank: usize) -> (LoraParams, Arc<Adapter>) {
    let mut params = LoraParams::init(model.backend(), model.lora_modules(), &lora(rank), 3).unwrap();
    for stack in params.stacks.iter_mut().flatten() {
        let values: Vec<f32> = (0..stack.b.shape().len()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 500.0).collect();
        model.backend().upload(HostRef::from_f32(&values, &[values.len()]).unwrap(), stack.b.as_mut()).unwrap();
    }
    let packed = model.pack_adapter(lora(rank), &params).unwrap();
    (params, packed)
}

fn tokens(len: usize, salt: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 31 + salt * 17) % 301) as u32).collect()
}

/// Each token's successor as its one target.
fn batch<'a>(adapter: &'a Adapter, lengths: &[usize]) -> (PackedBatch<'a>, Targets) {
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    lengths.iter().enumerate().for_each(|(i, &len)| batch.push_sequence(&tokens(len, i)));
    let ids: Vec<u32> = batch.tokens.iter().map(|t| (t + 5) % 301).collect();
    let offsets = (0..=ids.len()).collect();
    (batch, Targets { ids, offsets })
}

struct CrossEntropy;

impl TokenLoss for CrossEntropy {
    fn gradient(&self, _: usize, _: &[f32], gradient: &mut [f32]) {
        gradient.fill(-1.0);
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn gradient_bits(model: &Model, params: &LoraParams) -> Vec<u32> {
    params.tensors().flat_map(|t| bits(&model.backend().to_f32_vec(t.as_ref()).unwrap())).collect()
}

/// Log-probabilities and gradients of a training pass.
fn train(model: &Model, adapter: &Adapter, rank: usize, lengths: &[usize], between: &mut Between<'_>) -> Result<[Vec<u32>; 2]> {
    train_keeping(Keeping::ALL_CHECKPOINTS, model, adapter, rank, lengths, between)
}

/// What a pass may keep beside the input of each layer: more of the last layers, fewer inputs, and some of both.
fn other_than_checkpoints(config: &ModelConfig) -> impl Iterator<Item = Keeping> {
    let num_layers = config.num_layers;
    let more = (2..=num_layers).map(|layers| Keeping { layers, every: 1 });
    let fewer = (2..=num_layers).map(|every| Keeping { layers: 1, every });
    more.chain(fewer).chain([Keeping { layers: 2, every: num_layers - 1 }])
}

/// As [`train`], with this in memory.
fn train_keeping(
    keeping: Keeping,
    model: &Model,
    adapter: &Adapter,
    rank: usize,
    lengths: &[usize],
    between: &mut Between<'_>,
) -> Result<[Vec<u32>; 2]> {
    let (batch, targets) = batch(adapter, lengths);
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(rank))?;
    let logprobs =
        model.forward_backward_with(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)], keeping, between)?;
    Ok([bits(&logprobs), gradient_bits(model, &gradients)])
}

/// Asks for the log-probabilities of all tokens.
fn whole_row() -> RowRequest {
    RowRequest { ids: (0..301).collect(), ..RowRequest::default() }
}

/// All log-probabilities of the last token of a prefill, and of one decode after it.
fn decode(model: &Model, adapter: &Adapter) -> Vec<u32> {
    let mut cache = model.new_kv_cache(2, 0).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_cached(&tokens(70, 1), 0, 71, vec![1, 0]);
    let mut replies = model.step(&batch, &mut cache, &[69], &[whole_row()]).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_cached(&[9], 70, 71, vec![1, 0]);
    replies.extend(model.step(&batch, &mut cache, &[0], &[whole_row()]).unwrap());
    replies.into_iter().flat_map(|reply| bits(&reply.unwrap().logprobs)).collect()
}

#[test]
fn other_passes_may_run_between_the_layers_of_a_pass_and_no_bit_changes() {
    let model = model();
    let (_, outer) = adapter(&model, 4);
    let (_, inner) = adapter(&model, 6);
    let undisturbed = &mut || ControlFlow::Continue(());
    let alone = train(&model, &outer, 4, &[33, 70], undisturbed).unwrap();
    let small = train(&model, &inner, 6, &[5, 2], undisturbed).unwrap();
    let sampled = decode(&model, &inner);
    // Each layer forward, the one chunk of logits, each layer backward; with the activations of the first nothing comes after it. What goes into the second is found again.
    let all = (1..=3).flat_map(|layers| (1..=3).map(move |every| Keeping { layers, every })).collect::<Vec<_>>();
    for (keeping, back) in [((1, 1), 3), ((2, 1), 3), ((3, 1), 2), ((1, 2), 4), ((1, 3), 4), ((2, 3), 3)] {
        let keeping = Keeping { layers: keeping.0, every: keeping.1 };
        let mut calls = 0;
        let disturbed = train_keeping(keeping, &model, &outer, 4, &[33, 70], &mut || {
            calls += 1;
            let keeping = all[calls % all.len()];
            assert_eq!(train_keeping(keeping, &model, &inner, 6, &[5, 2], &mut || ControlFlow::Continue(())).unwrap(), small);
            assert_eq!(decode(&model, &inner), sampled);
            ControlFlow::Continue(())
        });
        assert_eq!(disturbed.unwrap(), alone);
        assert_eq!(calls, 3 + 1 + back, "{keeping:?}");
    }
    let (batch, targets) = batch(&outer, &[33, 70]);
    let mut calls = 0;
    let scored = model.forward_with(&batch, &targets, &mut || {
        calls += 1;
        assert_eq!(decode(&model, &inner), sampled);
        ControlFlow::Continue(())
    });
    assert_eq!(bits(&scored.unwrap()), alone[0]);
    assert_eq!(calls, 3 + 1);
}

#[test]
fn a_pass_ends_where_it_is_interrupted() {
    let model = model();
    let (_, adapter) = adapter(&model, 4);
    let stops = [((1, 1), 7), ((3, 1), 6), ((1, 2), 8)];
    for ((layers, every), stop) in stops.into_iter().flat_map(|(keeping, calls)| (1..=calls).map(move |stop| (keeping, stop))) {
        let mut calls = 0;
        let mut between = || {
            calls += 1;
            if calls == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let result = train_keeping(Keeping { layers, every }, &model, &adapter, 4, &[33, 70], &mut between);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        assert_eq!(calls, stop, "nothing runs on after the interruption");
    }
    let (batch, targets) = batch(&adapter, &[3]);
    assert!(matches!(model.forward_with(&batch, &targets, &mut || ControlFlow::Break(())), Err(Error::Interrupted)));
}

#[test]
fn a_pass_that_is_interrupted_on_the_way_there_has_added_nothing_to_gradients() {
    let model = model();
    let (_, adapter) = adapter(&model, 4);
    let (batch, targets) = batch(&adapter, &[33, 70]);
    // Whether anything was added if the pass is stopped at a call.
    let adds = |stop: usize, keeping: Keeping| {
        let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(4)).unwrap();
        let mut calls = 0;
        let mut between = || {
            calls += 1;
            if calls == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let given = &mut [Some(&mut gradients)];
        let result = model.forward_backward_with(&batch, &targets, &CrossEntropy, given, keeping, &mut between);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        gradient_bits(&model, &gradients).iter().any(|bits| *bits != 0)
    };
    for keeping in other_than_checkpoints(model.config()).chain([Keeping::ALL_CHECKPOINTS]) {
        for stop in 1..=model.config().num_layers {
            assert!(!adds(stop, keeping), "after layer {stop} with {keeping:?}");
        }
        assert!(adds(model.config().num_layers + 2, keeping), "behind a layer on the way back with {keeping:?}");
    }
}

#[test]
fn no_bit_depends_on_the_size_of_a_chunk_of_logits() {
    let mut model = model();
    let (_, adapter) = adapter(&model, 4);
    let run = |model: &Model| {
        let mut calls = 0;
        let mut between = || {
            calls += 1;
            ControlFlow::Continue(())
        };
        let result = train(model, &adapter, 4, &[33, 70, 1, 45], &mut between).unwrap();
        (result, decode(model, &adapter), calls)
    };
    let (whole, sampled, calls) = run(&model);
    model.set_logits_chunk_bytes(0);
    let (chunked, sampled_again, more_calls) = run(&model);
    assert!(more_calls >= calls + 149 / 32, "there are chunks: {more_calls} calls, {calls} in one");
    assert_eq!((chunked, sampled_again), (whole, sampled));
}

/// Of a step the sequences and tokens of each.
type Parts = Vec<(usize, Range<usize>)>;

/// Log-probabilities of the targets of two sequences that go through the cache in these steps. In the order of a training pass.
fn through_cache(model: &Model, adapter: &Adapter, lengths: [usize; 2], steps: &[Parts]) -> Vec<u32> {
    let (training, targets) = batch(adapter, &lengths);
    let mut cache = model.new_kv_cache(6, 2).unwrap();
    // Pages and states out of order.
    let held = [
        Held { pages: vec![2, 0, 5], state: Some(1), ..Held::default() },
        Held { pages: vec![3, 1, 4], state: Some(0), ..Held::default() },
    ];
    let mut found = vec![0; targets.ids.len()];
    for parts in steps {
        let mut cached = PackedBatch::new();
        cached.begin_group(Some(adapter));
        let places: Vec<usize> = parts
            .iter()
            .flat_map(|(s, tokens)| tokens.clone().map(|at| training.spans[*s].tokens.start + at).collect::<Vec<_>>())
            .collect();
        for (s, tokens) in parts {
            let own = &training.tokens[training.spans[*s].tokens.clone()][tokens.clone()];
            cached.push_cached(own, tokens.start, usize::MAX, held[*s].clone());
        }
        let requests: Vec<RowRequest> =
            places.iter().map(|&place| RowRequest { ids: vec![targets.ids[place]], ..RowRequest::default() }).collect();
        let rows: Vec<usize> = (0..places.len()).collect();
        let replies = model.step(&cached, &mut cache, &rows, &requests).unwrap();
        for (place, reply) in places.into_iter().zip(replies) {
            found[place] = reply.unwrap().logprobs[0].to_bits();
        }
    }
    found
}

/// As [`through_cache`], step by step: the first token of each alone, then both sequences a token at a time, side by side as long as both last.
fn step_by_step(model: &Model, adapter: &Adapter, lengths: [usize; 2]) -> Vec<u32> {
    let first = (0..lengths.len()).map(|s| vec![(s, 0..1)]);
    let of_all = |at: usize| (0..lengths.len()).filter(|&s| at < lengths[s]).map(|s| (s, at..at + 1)).collect();
    let steps: Vec<Parts> = first.chain((1..lengths.into_iter().max().unwrap()).map(of_all)).collect();
    through_cache(model, adapter, lengths, &steps)
}

#[test]
fn with_quantized_weights_sampling_and_training_agree_to_the_bit_on_any_number_of_threads() {
    // Decoding reads the weights as they are, a batch of many rows unpacks them first.
    let lengths = [70, 33];
    let undisturbed = &mut || ControlFlow::Continue(());
    let storages = [WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of32)];
    for ((arithmetic, compute, tie_word_embeddings), storage) in Arithmetic::available()
        .into_iter()
        .flat_map(|a| [(a, DType::F32, true), (a, DType::F32, false), (a, DType::BF16, true), (a, DType::BF16, false)])
        .flat_map(|case| storages.map(|storage| (case, storage)))
    {
        let context = format!("{arithmetic} {compute} {storage:?} tied {tie_word_embeddings}");
        let config = ModelConfig { tie_word_embeddings, ..config() };
        let on_threads = |threads: usize, storage| {
            let backend = Arc::new(CpuBackend::with_isa(arithmetic, threads));
            Model::random(backend, config.clone(), 7, WeightFormat { compute, storage }).unwrap()
        };
        let mut of_one_thread = None;
        for threads in [1, 3] {
            let model = on_threads(threads, storage);
            let (_, adapter) = adapter(&model, 4);
            let [trained, gradients] = train(&model, &adapter, 4, &lengths, undisturbed).unwrap();
            let (batch, targets) = batch(&adapter, &lengths);
            assert!(bits(&model.forward(&batch, &targets).unwrap()) == trained, "scored, {context}, {threads} threads");
            assert!(step_by_step(&model, &adapter, lengths) == trained, "decoded, {context}, {threads} threads");
            assert!(gradients.iter().any(|&g| g != 0), "{context}");
            let first = of_one_thread.get_or_insert_with(|| (trained.clone(), gradients.clone()));
            assert!(*first == (trained, gradients), "{threads} threads instead of 1, {context}");
            for keeping in other_than_checkpoints(&config).filter(|_| threads == 3) {
                let [trained, gradients] = train_keeping(keeping, &model, &adapter, 4, &lengths, undisturbed).unwrap();
                assert!(*first == (trained, gradients), "{keeping:?}, {context}");
            }
        }
        let dense = on_threads(1, WeightStorage::Dense);
        let [of_dense, _] = train(&dense, &adapter(&dense, 4).1, 4, &lengths, undisturbed).unwrap();
        assert_ne!(of_one_thread.unwrap().0, of_dense, "the weights were quantized, {context}");
    }
}

/// A checkpoint on disk whose tensors `change` has changed; the rest as [`Model::random`] has it.
fn written(config: &ModelConfig, change: &dyn Fn(&str, &mut Vec<f32>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_json()).unwrap();
    let tensors = crate::parameter_shapes(config).into_iter().enumerate().map(|(i, p)| {
        let mut values = vec![0.0; p.shape.iter().product()];
        random_parameter(p.initial, config.initializer_range, [1, i as u64], 0, &mut values);
        change(&p.name, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        (p.name, p.shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

fn load(dir: &tempfile::TempDir, dtype: Option<DType>) -> Result<Model> {
    Model::load(backend(), &ModelSource::Directory(dir.path().into()), dtype)
}

fn load_error(dir: &tempfile::TempDir, dtype: Option<DType>) -> String {
    load(dir, dtype).err().expect("the model is broken").to_string()
}

/// gpt-oss with matrices of experts that are not square, and rows of whole blocks of 32.
fn gpt_oss() -> ModelConfig {
    config_with(json!({
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5,
        "rope_parameters": {"rope_type": "default"}
    }))
}

#[test]
fn a_written_model_that_is_stored_otherwise_than_it_is_computed_is_the_random_one() {
    let logits = |model: &Model| {
        let mut batch = PackedBatch::new();
        batch.push_sequence(&tokens(9, 1));
        let mut logits = Vec::new();
        let mut observe = |what, value: &Tensor| {
            if what == Observed::Logits {
                logits = bits(&model.backend().to_f32_vec(value.as_ref())?);
            }
            Ok(())
        };
        model.forward_observed(&batch, &mut observe).unwrap();
        logits
    };
    let configs = [gpt_oss()].into_iter().chain(qwen3_5());
    for (config, dtype) in configs.flat_map(|c| [(c.clone(), DType::F32), (c, DType::BF16)]) {
        let random = Model::random(backend(), config.clone(), 1, dtype).unwrap();
        let read = load(&written(&config, &|_, _| ()), Some(dtype)).unwrap();
        assert_eq!(logits(&read), logits(&random), "{dtype} {config:?}");
        let of_ones = load(
            &written(&config, &|name, values| {
                if name.ends_with("input_layernorm.weight") {
                    values.fill(1.0);
                }
            }),
            Some(dtype),
        );
        let is_changed = logits(&of_ones.unwrap()) != logits(&random);
        assert_eq!(
            is_changed,
            matches!(config.family, crate::Family::Qwen3_5(_)),
            "norms that are stored less one, {config:?}"
        );
    }
}

/// Qwen3.5 of a layer that attends between two gated delta nets, and Qwen3.5-MoE that begins with one.
fn qwen3_5() -> [ModelConfig; 2] {
    let keys = |own: Value| {
        let mut all = json!({
            "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10,
            "linear_value_head_dim": 14, "linear_conv_kernel_dim": 3
        });
        all.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        config_with(all)
    };
    [
        keys(json!({"model_type": "qwen3_5_text", "full_attention_interval": 2})),
        keys(json!({
            "model_type": "qwen3_5_moe_text", "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24
        })),
    ]
}

#[test]
fn layers_of_two_kinds_are_in_stacks_of_their_own_under_their_numbers() {
    let model = Model::random(backend(), qwen3_5()[0].clone(), 1, DType::F32).unwrap();
    let layers = |path: &str| &model.lora_modules().iter().find(|m| m.path == path).unwrap().layers[..];
    assert_eq!(
        (layers("linear_attn.in_proj_a"), layers("self_attn.q_proj"), layers("mlp.up_proj")),
        (&[0, 2][..], &[1][..], &[0, 1, 2][..])
    );
    let names: Vec<String> = crate::parameter_shapes(model.config()).into_iter().map(|p| p.name).collect();
    for name in ["0.linear_attn.A_log", "1.self_attn.k_norm.weight", "2.linear_attn.conv1d.weight", "2.linear_attn.norm.weight"]
    {
        assert!(names.contains(&format!("model.layers.{name}")), "{name} is not in {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("1.linear_attn") || name.contains("0.self_attn")), "{names:?}");
}

#[test]
fn a_sequence_with_a_state_has_the_same_bits_however_it_is_cut_and_whoever_is_beside_it() {
    let lengths = [150, 33];
    // Around the ends of chunks, in which states are kept.
    let steps = [
        vec![(0, 0..63)],
        vec![(1, 0..1), (0, 63..64)],
        vec![(0, 64..65), (1, 1..32)],
        vec![(1, 32..33), (0, 65..127)],
        vec![(0, 127..130)],
        vec![(0, 130..131)],
        vec![(0, 131..150)],
    ];
    let configs = qwen3_5();
    for (config, compute) in configs.iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        let model = Model::random(backend(), config.clone(), 7, compute).unwrap();
        let (_, adapter) = adapter(&model, 4);
        let [trained, _] = train(&model, &adapter, 4, &lengths, &mut || ControlFlow::Continue(())).unwrap();
        assert!(through_cache(&model, &adapter, lengths, &steps) == trained, "in chunks, {compute} {config:?}");
        assert!(step_by_step(&model, &adapter, lengths) == trained, "token by token, {compute} {config:?}");
    }
}

#[test]
fn a_copied_state_goes_on_with_the_bits_of_the_original() {
    let model = Model::random(backend(), qwen3_5()[0].clone(), 7, DType::F32).unwrap();
    let (_, adapter) = adapter(&model, 4);
    let mut cache = model.new_kv_cache(6, 4).unwrap();
    let held = |pages: [u32; 2], state| Held { pages: pages.into(), state: Some(state), ..Held::default() };
    let step = |cache: &mut KvCache, tokens: &[u32], past: usize, held: Held| {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(&adapter));
        batch.push_cached(tokens, past, usize::MAX, held);
        let rows = [tokens.len() - 1];
        let replies = model.step(&batch, cache, &rows, &[whole_row()]).unwrap();
        bits(&replies[0].as_ref().unwrap().logprobs)
    };
    let prefix = tokens(70, 1);
    step(&mut cache, &prefix, 0, held([0, 1], 2));
    for (page, state) in [(2, 0), (3, 1)] {
        cache.copy_page(model.backend(), 1, page).unwrap();
        cache.copy_state(model.backend(), 2, state).unwrap();
    }
    let original = step(&mut cache, &[5, 9, 11], 70, held([0, 1], 2));
    let other = step(&mut cache, &[8, 9, 11], 70, held([0, 2], 0));
    // After others have gone on from where it was copied.
    assert_eq!(step(&mut cache, &[5, 9, 11], 70, held([0, 3], 1)), original);
    assert_ne!(other, original);
    step(&mut cache, &prefix, 0, held([4, 5], 3));
    assert_eq!(step(&mut cache, &[8, 9, 11], 70, held([4, 5], 3)), other, "as one that began by itself");
    // Without the state it is another.
    cache.copy_page(model.backend(), 1, 2).unwrap();
    assert_ne!(step(&mut cache, &[5, 9, 11], 70, held([0, 2], 3)), original);
}

#[test]
fn unusual_sizes_compute_finite_numbers_on_every_instruction_set() {
    let sizes = [
        config_with(json!({"head_dim": 512, "num_attention_heads": 1, "num_key_value_heads": 1})),
        config_with(json!({"head_dim": 2, "num_attention_heads": 130, "num_key_value_heads": 1})),
        config_with(json!({
            "hidden_size": 1, "intermediate_size": 1, "vocab_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2,
            "eos_token_id": null
        })),
        config_with(json!({
            "hidden_size": 65, "intermediate_size": 33, "num_hidden_layers": 1, "tie_word_embeddings": false, "attention_bias": true
        })),
        config_with(json!({"max_position_embeddings": 1})),
    ];
    for (config, dtype) in sizes.iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        for isa in Arithmetic::available() {
            let model = Model::random(Arc::new(CpuBackend::with_isa(isa, 1)), config.clone(), 1, dtype).unwrap();
            model.probe().unwrap_or_else(|e| panic!("{isa} {dtype} {config:?}: {e}"));
            let params = LoraParams::init(model.backend(), model.lora_modules(), &lora(3), 3).unwrap();
            let adapter = model.pack_adapter(lora(3), &params).unwrap();
            let mut batch = PackedBatch::new();
            batch.begin_group(Some(&adapter));
            let len = config.max_position_embeddings.min(67);
            batch.push_sequence(&tokens(len, 1).iter().map(|t| t % config.vocab_size as u32).collect::<Vec<_>>());
            let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=len).collect() };
            let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(3)).unwrap();
            let logprobs = model.forward_backward(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)]).unwrap();
            assert!(logprobs.iter().all(|v| v.is_finite()), "{isa} {dtype} {config:?}");
            let values = |t: &Tensor| model.backend().to_f32_vec(t.as_ref()).unwrap();
            assert!(gradients.tensors().flat_map(values).all(|v| v.is_finite()), "{isa} {dtype} {config:?}");
        }
    }
}

#[test]
fn accumulators_of_several_layers_are_those_that_follow_the_site() {
    let model = model();
    let (mut scored, mut trained) = (adapter(&model, 2).0, adapter(&model, 3).0);
    let module = model.lora_modules().iter().position(|m| m.path == "mlp.up_proj").unwrap();
    let expected = bits(&model.backend().to_f32_vec(trained.stacks[module].as_ref().unwrap().b.as_ref().rows(1..3)).unwrap());
    scored.stacks[module] = None;
    let mut groups = [None, Some(&mut scored), Some(&mut trained)];
    let mut gradients = GroupGradients { groups: &mut groups };
    let sites = [2, 0, 1].map(|group| LoraSite { group, module, layer: 1 });
    let found = gradients.layers_at(&sites, 2);
    let [Some(LoraGradient { a, b }), None, None] = &found[..] else { panic!("one of three groups trains this module") };
    assert_eq!((a.shape().dims(), b.shape().dims()), (&[2, 3, 48][..], &[2, 3, 80][..]));
    assert_eq!(bits(&model.backend().to_f32_vec(b.as_ref()).unwrap()), expected);
    drop(found);
    let of_one = gradients.at(&sites[..1]);
    let b = of_one[0].as_ref().unwrap().b.as_ref();
    assert_eq!(b.shape().dims(), [3, 80]);
    assert_eq!(bits(&model.backend().to_f32_vec(b).unwrap()), expected[..240]);
}

/// A model of every family, the one above too, to be computed in each dtype.
fn families_in_both_dtypes() -> impl Iterator<Item = (ModelConfig, DType)> {
    families().into_iter().chain([config()]).flat_map(|config| [DType::F32, DType::BF16].map(|dtype| (config.clone(), dtype)))
}

/// A model of every family that is not the one above, with what it has of its own.
fn families() -> Vec<ModelConfig> {
    let experts = json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20});
    let own = [
        json!({"model_type": "llama", "attention_bias": true, "mlp_bias": true}),
        json!({"model_type": "mistral", "sliding_window": 20}),
        json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 65, "max_window_layers": 1}),
        json!({"model_type": "qwen3_moe", "mlp_only_layers": [1], "norm_topk_prob": true}),
        json!({"model_type": "qwen3_moe", "decoder_sparse_step": 2, "use_sliding_window": true, "sliding_window": 9}),
        json!({
            "model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": null, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6, "v_head_dim": 8, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1
        }),
        json!({"model_type": "gpt_oss", "num_local_experts": 6, "sliding_window": 9}),
    ];
    let with_experts = |mut own: Value| {
        own.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
        config_with(own)
    };
    own.into_iter().map(with_experts).chain(qwen3_5()).collect()
}

#[test]
fn of_every_family_sampling_and_training_agree_to_the_bit_in_any_company_on_any_number_of_threads_whatever_is_kept() {
    let lengths = [70, 33];
    let undisturbed = &mut || ControlFlow::Continue(());
    let all = families().into_iter().flat_map(|c| Arithmetic::available().into_iter().map(move |a| (c.clone(), a)));
    for ((config, arithmetic), (compute, storage)) in all.flat_map(|case| {
        let quantized = [WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of64)].map(|storage| (DType::BF16, storage));
        [(DType::F32, WeightStorage::Dense), (DType::BF16, WeightStorage::Dense), quantized[0], quantized[1]]
            .map(|format| (case.clone(), format))
    }) {
        let context = format!("{arithmetic} {compute} {storage:?} {:?}", config.family);
        let mut of_one_thread = None;
        for threads in [1, 3] {
            let backend = Arc::new(CpuBackend::with_isa(arithmetic, threads));
            let model = Model::random(backend, config.clone(), 7, WeightFormat { compute, storage }).unwrap();
            let (_, adapter) = adapter(&model, 4);
            let [trained, gradients] = train(&model, &adapter, 4, &lengths, undisturbed).unwrap();
            if threads == 1 {
                let (whole, targets) = batch(&adapter, &lengths);
                assert!(bits(&model.forward(&whole, &targets).unwrap()) == trained, "scored, {context}");
                assert!(step_by_step(&model, &adapter, lengths) == trained, "decoded, {context}");
                // One sequence after the other adds up to the same gradient.
                let mut sum = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(4)).unwrap();
                let mut alone = Vec::new();
                for span in &whole.spans {
                    let mut part = PackedBatch::new();
                    part.begin_group(Some(&adapter));
                    part.push_sequence(&whole.tokens[span.tokens.clone()]);
                    let ids = targets.ids[span.tokens.clone()].to_vec();
                    let targets = Targets { offsets: (0..=ids.len()).collect(), ids };
                    let logprobs = model.forward_backward(&part, &targets, &CrossEntropy, &mut [Some(&mut sum)]).unwrap();
                    alone.extend(bits(&logprobs));
                }
                assert!(alone == trained && gradient_bits(&model, &sum) == gradients, "alone, {context}");
            }
            assert!(gradients.iter().filter(|&&g| g != 0).count() * 2 > gradients.len(), "{context}");
            let first = of_one_thread.get_or_insert_with(|| (trained.clone(), gradients.clone()));
            assert!(*first == (trained, gradients), "{threads} threads instead of 1, {context}");
            for keeping in other_than_checkpoints(&config).filter(|_| threads == 3) {
                let [trained, gradients] = train_keeping(keeping, &model, &adapter, 4, &lengths, undisturbed).unwrap();
                assert!(*first == (trained, gradients), "{keeping:?}, {context}");
            }
        }
    }
}
