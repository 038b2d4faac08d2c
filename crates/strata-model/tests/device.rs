//! Everything over a device whose memory the host cannot see: the same bits as on the processor, and a refusal of memory that harms nobody.

use std::collections::BTreeMap;
use std::sync::Arc;

use strata_model::checkpoint::{AdapterFormat, read_adapter, read_optimizer, write_adapter, write_optimizer};
use strata_model::lora::{Adapter, LoraConfig, LoraParams, ModuleSet};
use strata_model::{Error, KvCache, Model, ModelConfig, PackedBatch, Result, Targets, TokenLoss};
use strata_tensor::testing::RemoteBackend;
use strata_tensor::{AdamwStep, Backend, CpuBackend, DType, Draw, Isa, RowReply, RowRequest, Tensor};

const RANK: usize = 3;
const VOCAB: usize = 101;

/// Biases, a table of embeddings of its own or not, and sizes that no vector register divides.
fn config(tied: bool) -> ModelConfig {
    let json = serde_json::json!({
        "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "attention_bias": !tied, "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960, "initializer_range": 0.2
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

fn lora() -> LoraConfig {
    LoraConfig {
        rank: RANK,
        alpha: 8.0,
        attention: true,
        mlp: true,
        unembed: true,
        embedding: true,
        own: BTreeMap::new(),
        left_out: ModuleSet::NONE,
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::with_isa(Isa::detect(), 2)
}

fn remote() -> Arc<RemoteBackend> {
    Arc::new(RemoteBackend::new(cpu()))
}

struct CrossEntropy;

impl TokenLoss for CrossEntropy {
    fn gradient(&self, _: usize, logprobs: &[f32], gradient: &mut [f32]) {
        gradient.iter_mut().zip(logprobs).for_each(|(g, l)| *g = -1.0 - l / 64.0);
    }
}

fn tokens(len: usize, salt: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 31 + salt * 17) % VOCAB) as u32).collect()
}

fn bits<'v>(values: impl IntoIterator<Item = &'v f32>) -> Vec<u32> {
    values.into_iter().map(|v| v.to_bits()).collect()
}

fn bits_of(backend: &dyn Backend, params: &LoraParams) -> Vec<u32> {
    let values = |t: &Tensor| bits(&backend.to_f32_vec(t.as_ref()).unwrap());
    params.tensors().flat_map(values).collect()
}

/// Two sequences under an adapter, one of them longer than a page, and one under none; one target or two for each token.
fn batch(adapter: &Adapter) -> (PackedBatch<'_>, Targets) {
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_sequence(&tokens(70, 1));
    batch.push_sequence(&tokens(5, 2));
    batch.begin_group(None);
    batch.push_sequence(&tokens(9, 3));
    let ids = batch.tokens.iter().flat_map(|t| [(t + 5) % 101, (t + 9) % 101]).collect();
    let offsets = (0..=batch.len()).map(|t| 2 * t).collect();
    (batch, Targets { ids, offsets })
}

fn train(model: &Model, adapter: &Adapter, gradient: &mut LoraParams) -> Result<Vec<u32>> {
    let (batch, targets) = batch(adapter);
    Ok(bits(&model.forward_backward(&batch, &targets, &CrossEntropy, &mut [Some(gradient), None])?))
}

/// A prefill in two chunks, a second sequence that goes on from a copied page, and a decode of both.
fn sample(model: &Model, adapter: &Adapter, cache: &mut KvCache) -> Result<Vec<u32>> {
    let draw = |temperature, top_k, top_p| RowRequest {
        ids: vec![3, 100],
        top: 4,
        draw: Some(Draw { temperature, top_k, top_p, uniforms: vec![0.1, 0.5, 0.9] }),
    };
    let mut replies = Vec::new();
    for (chunk, past) in [(tokens(66, 1), 0), (tokens(4, 2), 66)] {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(adapter));
        batch.push_cached(&chunk, past, 71, vec![2, 0]);
        let last = chunk.len() - 1;
        let wanted = [draw(0.0, None, 1.0), draw(1.0, None, 1.0)];
        replies.extend(model.step(&batch, cache, &[last - 1, last], &wanted)?);
    }
    cache.copy_page(model.backend(), 0, 1)?;
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_cached(&[7], 70, 71, vec![2, 0]);
    batch.push_cached(&[8], 70, 71, vec![2, 1]);
    replies.extend(model.step(&batch, cache, &[0, 1], &[draw(0.7, Some(5), 1.0), draw(1.3, None, 0.8)])?);
    cache.release(model.backend(), &[1, 3], &[])?;
    let flat = |reply: Option<RowReply>| {
        let RowReply { logprobs, top, drawn } = reply.expect("the logits are finite");
        let pairs = top.into_iter().chain(drawn).flat_map(|(id, logprob)| [id, logprob.to_bits()]);
        [bits(&logprobs), pairs.collect()].concat()
    };
    Ok(replies.into_iter().flat_map(flat).collect())
}

fn optimize(
    backend: &dyn Backend,
    params: &mut LoraParams,
    gradient: &mut LoraParams,
    moments: &mut [LoraParams; 2],
    step: u64,
) {
    let norm: f64 = gradient.tensors().map(|t| backend.sum_squares(t).unwrap()).sum();
    let step = AdamwStep {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.01,
        gradient_scale: (1.0 / norm.sqrt()) as f32,
        step,
    };
    let [m, v] = moments;
    let stacks = params.tensors_mut().zip(gradient.tensors_mut()).zip(m.tensors_mut()).zip(v.tensors_mut());
    for (((weights, gradient), m), v) in stacks {
        backend.adamw(&step, weights, gradient, m, v).unwrap();
    }
}

/// The bits of all there is to do with a model, from its making to the sampling of an adapter that was trained, saved and loaded.
fn everything(backend: Arc<dyn Backend>, tied: bool, dtype: DType) -> Vec<Vec<u32>> {
    let model = Model::random(backend.clone(), config(tied), 7, dtype).unwrap();
    let (backend, modules) = (&*backend, model.lora_modules());
    let zeros = || LoraParams::zeros(backend, modules, &lora()).unwrap();
    let (mut params, mut gradient) = (LoraParams::init(backend, modules, &lora(), 3).unwrap(), zeros());
    let mut moments = [zeros(), zeros()];
    let mut seen = Vec::new();
    for step in 1..=2 {
        let adapter = model.pack_adapter(lora(), &params).unwrap();
        seen.push(train(&model, &adapter, &mut gradient).unwrap());
        seen.push(bits_of(backend, &gradient));
        optimize(backend, &mut params, &mut gradient, &mut moments, step);
        assert!(bits_of(backend, &gradient).iter().all(|&bits| bits == 0));
    }
    let dir = tempfile::tempdir().unwrap();
    let [m, v] = &moments;
    write_adapter(backend, dir.path(), modules, (&lora(), &params), "base", AdapterFormat::Tinker).unwrap();
    write_optimizer(backend, dir.path(), modules, [m, v], 2).unwrap();
    let read = read_adapter(backend, dir.path(), modules).unwrap().params;
    assert_eq!(bits_of(backend, &read), bits_of(backend, &params));
    assert_eq!(bits_of(backend, &read_optimizer(backend, dir.path(), modules, &lora()).unwrap().v), bits_of(backend, v));
    let copy = read.duplicate(backend).unwrap();
    drop(read);
    let adapter = model.pack_adapter(lora(), &copy).unwrap();
    let (batch, targets) = batch(&adapter);
    seen.push(bits(&model.forward(&batch, &targets).unwrap()));
    seen.push(sample(&model, &adapter, &mut model.new_kv_cache(4, 0).unwrap()).unwrap());
    seen.extend([&copy, m, v].map(|params| bits_of(backend, params)));
    seen
}

#[test]
fn a_device_whose_memory_is_elsewhere_has_the_bits_of_the_processor() {
    for (tied, dtype) in [(true, DType::F32), (false, DType::F32), (true, DType::BF16), (false, DType::BF16)] {
        let device = remote();
        let (here, there) = (everything(Arc::new(cpu()), tied, dtype), everything(device.clone(), tied, dtype));
        for (i, (here, there)) in here.iter().zip(&there).enumerate() {
            assert!(!here.is_empty() && here == there, "{dtype}, tied: {tied}, part {i}");
        }
        assert_eq!(device.held(), 0, "all memory is given back");
    }
}

#[test]
fn a_pass_that_is_refused_memory_fails_with_that_and_the_next_works() {
    let device = remote();
    let mut model = Model::random(device.clone(), config(false), 7, DType::BF16).unwrap();
    model.set_logits_chunk_bytes(0);
    let backend = model.backend();
    let params = LoraParams::init(backend, model.lora_modules(), &lora(), 3).unwrap();
    let adapter = model.pack_adapter(lora(), &params).unwrap();
    let mut cache = model.new_kv_cache(4, 0).unwrap();
    let mut gradient = LoraParams::zeros(backend, model.lora_modules(), &lora()).unwrap();
    let mut pass = |device: &RemoteBackend| {
        gradient.fill_zero(device).unwrap();
        let logprobs = train(&model, &adapter, &mut gradient)?;
        let sampled = sample(&model, &adapter, &mut cache)?;
        Ok::<_, Error>([logprobs, bits_of(device, &gradient), sampled])
    };
    let before = device.allocations();
    let expected = pass(&device).unwrap();
    let (allocations, held) = (device.allocations() - before, device.held());
    assert!(allocations > 100);
    for nth in 1..=allocations {
        device.refuse_allocation(nth);
        let refused = pass(&device);
        let is_refusal = matches!(refused, Err(Error::Tensor(strata_tensor::Error::OutOfMemory { bytes })) if bytes > 0);
        assert!(is_refusal, "allocation {nth} of {allocations}: {refused:?}");
        assert_eq!(device.held(), held, "a pass that fails keeps nothing");
        if nth % 16 == 1 {
            assert!(pass(&device).unwrap() == expected, "after the refusal of allocation {nth}");
        }
    }
}

#[test]
fn what_is_made_of_no_memory_is_an_error() {
    let device = remote();
    for nth in [1, 2, 5, 9] {
        device.refuse_allocation(nth);
        let refused = Model::random(device.clone(), config(false), 7, DType::F32).err();
        assert!(matches!(refused, Some(Error::Tensor(strata_tensor::Error::OutOfMemory { .. }))), "{refused:?}");
        assert_eq!(device.held(), 0);
    }
    let model = Model::random(device.clone(), config(true), 7, DType::F32).unwrap();
    let params = LoraParams::init(&*device, model.lora_modules(), &lora(), 3).unwrap();
    device.refuse_allocation(3);
    assert!(LoraParams::zeros(&*device, model.lora_modules(), &lora()).is_err());
    device.refuse_allocation(3);
    assert!(params.duplicate(&*device).is_err());
    device.refuse_allocation(3);
    assert!(model.pack_adapter(lora(), &params).is_err());
    device.refuse_allocation(2);
    assert!(model.new_kv_cache(4, 0).is_err());
    model.pack_adapter(lora(), &params).unwrap();
}

/// A loss of tokens of which some do not count.
struct OfCompletions(Vec<bool>);

impl TokenLoss for OfCompletions {
    fn gradient(&self, first: usize, _: &[f32], gradient: &mut [f32]) {
        gradient.iter_mut().zip(&self.0[first..]).for_each(|(g, counts)| *g = if *counts { -1.0 } else { 0.0 });
    }
}

#[test]
fn a_prompt_of_several_completions_is_computed_once() {
    const PROMPT: usize = 64;
    const COMPLETION: usize = 32;
    let backend = remote();
    let model = Model::random(backend.clone(), config(true), 7, DType::F32).unwrap();
    let params = LoraParams::init(model.backend(), model.lora_modules(), &lora(), 3).unwrap();
    let adapter = model.pack_adapter(lora(), &params).unwrap();
    // Rows that go through each op of a pass, scoring and training.
    let rows_of = |sequences: &[Vec<u32>]| {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(&adapter));
        sequences.iter().for_each(|sequence| batch.push_sequence(sequence));
        let targets =
            Targets { ids: batch.tokens.iter().map(|t| (t + 5) % 101).collect(), offsets: (0..=batch.len()).collect() };
        let start = backend.rows_computed();
        model.forward(&batch, &targets).unwrap();
        let scored = backend.rows_computed();
        let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora()).unwrap();
        let loss = OfCompletions((0..batch.len()).map(|row| row % (PROMPT + COMPLETION) >= PROMPT).collect());
        model.forward_backward(&batch, &targets, &loss, &mut [Some(&mut gradients)]).unwrap();
        // Four linear layers and attention of each of two layers, and the unembedding; and of the first layer all but the last again.
        ((scored - start) / 11, (backend.rows_computed() - scored) / 15)
    };
    let of_group = |prompt: &dyn Fn(usize) -> Vec<u32>| -> Vec<Vec<u32>> {
        (0..3).map(|i| [prompt(i), tokens(COMPLETION, 10 + i)].concat()).collect()
    };
    let all = 3 * (PROMPT + COMPLETION);
    assert_eq!(rows_of(&of_group(&|i| tokens(PROMPT, i))), (all, all));
    let once = PROMPT + 3 * COMPLETION;
    assert_eq!(rows_of(&of_group(&|_| tokens(PROMPT, 1))), (once, once));
}
