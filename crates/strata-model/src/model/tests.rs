//! Passes over a small random model.

use strata_tensor::{CpuBackend, Isa};

use super::*;

/// A model of a few thousand parameters, with a head width and a vocabulary that no vector register divides.
pub(super) fn config() -> ModelConfig {
    ModelConfig {
        model_type: "qwen3".into(),
        vocab_size: 301,
        hidden_size: 48,
        intermediate_size: 80,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 12,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        attention_bias: false,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        initializer_range: 0.2,
        bos_token_id: None,
        eos_token_ids: vec![0],
        dtype: None,
    }
}

pub(super) fn backend() -> Arc<CpuBackend> {
    Arc::new(CpuBackend::with_isa(Isa::detect(), 2))
}

fn model() -> Model {
    Model::random(backend(), config(), 7, DType::F32).unwrap()
}

fn lora(rank: usize) -> LoraConfig {
    LoraConfig { rank, alpha: 8.0, attention: true, mlp: true, unembed: true, left_out: crate::lora::ModuleSet::NONE }
}

/// An adapter whose B is not zero, so that every gradient is felt.
fn adapter(model: &Model, rank: usize) -> (LoraParams, Arc<Adapter>) {
    let mut params = LoraParams::init(model.lora_modules(), &lora(rank), 3);
    for stack in params.stacks.iter_mut().flatten() {
        let values: Vec<f32> = (0..stack.b.shape().len()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 500.0).collect();
        stack.b.as_mut().copy_from_f32(&values).unwrap();
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

fn gradient_bits(params: &LoraParams) -> Vec<u32> {
    params.tensors().flat_map(|t| bits(&t.to_f32_vec())).collect()
}

/// Log-probabilities and gradients of a training pass.
fn train(model: &Model, adapter: &Adapter, rank: usize, lengths: &[usize], between: &mut Between<'_>) -> Result<[Vec<u32>; 2]> {
    let (batch, targets) = batch(adapter, lengths);
    let mut gradients = LoraParams::zeros(model.lora_modules(), &lora(rank));
    let logprobs = model.forward_backward_with(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)], between)?;
    Ok([bits(&logprobs), gradient_bits(&gradients)])
}

/// The logits of one decode after a prefill.
fn decode(model: &Model, adapter: &Adapter) -> Vec<u32> {
    let mut cache = model.new_kv_cache(2);
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_cached(&tokens(70, 1), 0, vec![1, 0]);
    let out = std::sync::Mutex::new(Vec::new());
    model.step(&batch, &mut cache, &[69], &|_, row| *out.lock().unwrap() = bits(row.logits)).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    batch.push_cached(&[9], 70, vec![1, 0]);
    model.step(&batch, &mut cache, &[0], &|_, row| out.lock().unwrap().extend(bits(row.logits))).unwrap();
    out.into_inner().unwrap()
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
    let mut calls = 0;
    let disturbed = train(&model, &outer, 4, &[33, 70], &mut || {
        calls += 1;
        assert_eq!(train(&model, &inner, 6, &[5, 2], &mut || ControlFlow::Continue(())).unwrap(), small);
        assert_eq!(decode(&model, &inner), sampled);
        ControlFlow::Continue(())
    });
    assert_eq!(disturbed.unwrap(), alone);
    // Each layer forward, the one chunk of logits, each layer backward.
    assert_eq!(calls, 3 + 1 + 3);
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
    for stop in 1..=7 {
        let mut calls = 0;
        let mut between = || {
            calls += 1;
            if calls == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let result = train(&model, &adapter, 4, &[33, 70], &mut between);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        assert_eq!(calls, stop, "nothing runs on after the interruption");
    }
    let (batch, targets) = batch(&adapter, &[3]);
    assert!(matches!(model.forward_with(&batch, &targets, &mut || ControlFlow::Break(())), Err(Error::Interrupted)));
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
    assert!(more_calls >= calls + 149 / 16, "there are chunks: {more_calls} calls, {calls} in one");
    assert_eq!((chunked, sampled_again), (whole, sampled));
}
