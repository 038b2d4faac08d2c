//! Threads that compute a step wait for no memory. Every allocation of a thread other than the caller's is counted, and so there is one test here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use strata_model::lora::{Adapter, LoraConfig, LoraParams, ModuleSet};
use strata_model::{Held, KvCache, Model, ModelConfig, PackedBatch};
use strata_tensor::{CpuBackend, DType, Isa, KV_PAGE_TOKENS, RowRequest};

/// Allocations of threads that are not the caller of a pass.
static OF_WORKERS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_CALLER: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

fn count() {
    // A thread that is ending has no mark any more, and computes nothing.
    if IS_CALLER.try_with(|is_caller| !is_caller.get()).unwrap_or(false) {
        OF_WORKERS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: the system's allocator, with a counter.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const THREADS: usize = 3;
const VOCAB: usize = 301;
/// Of several sequences that are decoded side by side, and of one whose keys several threads share out among them.
const SHORT: [usize; 8] = [1, 63, 64, 100, 130, 200, 260, 300];
const LONG: usize = 1100;

/// Dense; with windows; with gated delta nets. (Of experts and of latents a thread has whole ones, with tensors of its own.)
fn models() -> [(&'static str, Value); 3] {
    let attention = |model_type: &str| {
        json!({
            "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": true
        })
    };
    let with = |mut config: Value, changes: Value| {
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config
    };
    let delta = json!({
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4
    });
    [
        ("dense", attention("qwen3")),
        (
            "windows",
            with(attention("qwen3"), json!({ "use_sliding_window": true, "sliding_window": 50, "max_window_layers": 1 })),
        ),
        ("delta", with(attention("qwen3_5_text"), delta)),
    ]
}

fn adapter(model: &Model, rank: usize) -> Arc<Adapter> {
    let config = LoraConfig {
        rank,
        alpha: 8.0,
        attention: true,
        mlp: true,
        unembed: true,
        embedding: false,
        own: BTreeMap::new(),
        left_out: ModuleSet::NONE,
    };
    let params = LoraParams::init(model.backend(), model.lora_modules(), &config, 3).unwrap();
    model.pack_adapter(config, &params).unwrap()
}

/// A pass over what comes next of these sequences, of which one after another has the next adapter or none. The last token of each is computed to its end, and nothing of it answered: answers are allocated.
fn step(model: &Model, adapters: &[Arc<Adapter>], cache: &mut KvCache, sequences: &[(usize, usize)]) {
    let mut batch = PackedBatch::new();
    let (mut first_page, mut rows) = (0, Vec::new());
    for (i, &(past, count)) in sequences.iter().enumerate() {
        let pages = (past + count).div_ceil(KV_PAGE_TOKENS) as u32 + 1;
        let tokens: Vec<u32> = (0..count).map(|at| ((past + at) * 31 + i * 17) as u32 % VOCAB as u32).collect();
        batch.begin_group(adapters.get(i % (adapters.len() + 1)).map(|adapter| &**adapter));
        let held = Held { pages: (first_page..first_page + pages).collect(), state: Some(i as u32), ..Held::default() };
        batch.push_cached(&tokens, past, usize::MAX, held);
        first_page += pages;
        rows.push(batch.len() - 1);
    }
    let requests: Vec<RowRequest> = rows.iter().map(|_| RowRequest::default()).collect();
    model.step(&batch, cache, &rows, &requests).unwrap();
}

#[test]
fn what_computes_a_step_allocates_nothing() {
    const ROUNDS: usize = 12;
    IS_CALLER.set(true);
    let mut found = Vec::new();
    for ((name, config), dtype) in models().iter().flat_map(|model| [DType::F32, DType::BF16].map(|dtype| (model, dtype))) {
        for isa in Isa::available() {
            let config = ModelConfig::from_json(&config.to_string(), None).unwrap();
            let model = Model::random(Arc::new(CpuBackend::with_isa(isa, THREADS)), config, 7, dtype).unwrap();
            let adapters = [3, 8].map(|rank| adapter(&model, rank));
            let mut cache = model.new_kv_cache(64, SHORT.len()).unwrap();
            let prefill: Vec<_> = SHORT.iter().map(|&len| (0, len)).collect();
            let decode: Vec<_> = SHORT.iter().map(|&len| (len, 1)).collect();
            for (what, sequences) in
                [("prefill", &prefill[..]), ("decode", &decode), ("long prefill", &[(0, LONG)]), ("long decode", &[(LONG, 1)])]
            {
                let mut of_round = || {
                    let before = OF_WORKERS.load(Ordering::Relaxed);
                    step(&model, &adapters, &mut cache, sequences);
                    OF_WORKERS.load(Ordering::Relaxed) - before
                };
                // Each thread finds room once for what it takes again and again, some of them late: most rounds go without.
                let mut allocations: Vec<usize> = (0..2 * ROUNDS).map(|_| of_round()).skip(ROUNDS).collect();
                allocations.sort_unstable();
                if allocations[ROUNDS / 2] > 0 {
                    found.push(format!("{name}, {dtype:?}, {isa}, {what}: {allocations:?}"));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
