//! What passes take of memory, against what the model says they take. Every allocation of this process is counted: one test runs at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use strata_model::checkpoint::{Checkpoint, PlannedAdapter};
use strata_model::lora::{LoraConfig, LoraParams, ModuleSet};
use strata_model::vision::{Grid, ImageProcessor, Patches};
use strata_model::{
    Held, ImageFeatures, Keeping, Model, ModelConfig, PackedBatch, PlacedImage, Targets, TokenLoss, Tokenizer, lora_modules,
};
use strata_tensor::{CpuBackend, DType, Isa, Memory, RowRequest, mapped_bytes};

/// Bytes that are allocated, tensors apart: large ones are not allocated but mapped, and so they count themselves.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The most that there has been of both together.
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// What tensors that are allocated are aligned to, and nothing else is.
const TENSOR_ALIGN_BYTES: usize = 4096;

struct Counting;

impl Counting {
    /// What is alive changes: until now it was `live` and, at some time since the last change, the most that there has been of tensors.
    fn note(live: usize) {
        let tensors = strata_tensor::peak_live_bytes().max(strata_tensor::live_bytes());
        PEAK.fetch_max(live + tensors, Ordering::Relaxed);
        strata_tensor::reset_peak_live_bytes();
    }
}

// SAFETY: the system's allocator, with counters.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() != TENSOR_ALIGN_BYTES {
            let before = LIVE.fetch_add(layout.size(), Ordering::Relaxed);
            Self::note(before);
            PEAK.fetch_max(before + layout.size() + strata_tensor::live_bytes(), Ordering::Relaxed);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if layout.align() != TENSOR_ALIGN_BYTES {
            Self::note(LIVE.fetch_sub(layout.size(), Ordering::Relaxed));
        }
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct CrossEntropy;

impl TokenLoss for CrossEntropy {
    fn gradient(&self, _: usize, _: &[f32], gradient: &mut [f32]) {
        gradient.fill(-1.0);
    }
}

/// Bytes that `pass` takes at its peak beyond what there was before.
fn peak_bytes(pass: impl FnOnce()) -> usize {
    let live = || LIVE.load(Ordering::Relaxed) + strata_tensor::live_bytes();
    let before = live();
    strata_tensor::reset_peak_live_bytes();
    PEAK.store(before, Ordering::Relaxed);
    pass();
    Counting::note(LIVE.load(Ordering::Relaxed));
    PEAK.load(Ordering::Relaxed) - before
}

fn config(hidden: usize, mlp: usize, layers: usize, heads: [usize; 3], vocab: usize) -> ModelConfig {
    let [num_heads, num_kv_heads, head_dim] = heads;
    let json = serde_json::json!({
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim, "tie_word_embeddings": true,
        "max_position_embeddings": 40_960
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// A mixture of `[experts, of a token, their width]`, with a dense layer between.
fn mixture(hidden: usize, [experts, active, width]: [usize; 3]) -> ModelConfig {
    let json = serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": hidden, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": experts, "num_experts_per_tok": active,
        "moe_intermediate_size": width, "mlp_only_layers": [1]
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// gpt-oss, of `[experts, of a token, their width]`.
fn gpt_oss(hidden: usize, heads: [usize; 3], [experts, active, width]: [usize; 3]) -> ModelConfig {
    let [num_heads, num_kv_heads, head_dim] = heads;
    let json = serde_json::json!({
        "model_type": "gpt_oss", "vocab_size": 300, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 3,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim, "sliding_window": 20,
        "num_local_experts": experts, "num_experts_per_tok": active
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// DeepSeek-V3, the first layer without experts. `latents`: of queries, and of keys and values; `heads`: how many, the parts of a query that do not turn and that do, and a value.
fn latent_config(hidden: usize, mlp: [usize; 2], latents: [Option<usize>; 2], heads: [usize; 4]) -> ModelConfig {
    let ([mlp, expert], [num_heads, nope, rope, value]) = (mlp, heads);
    let json = serde_json::json!({
        "model_type": "deepseek_v3", "vocab_size": 300, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 2,
        "num_attention_heads": num_heads, "num_key_value_heads": num_heads, "q_lora_rank": latents[0], "kv_lora_rank": latents[1],
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "moe_intermediate_size": expert,
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "tie_word_embeddings": true, "max_position_embeddings": 40_960
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// Qwen3.5 with these layers. `delta`: heads of keys and of values, their widths, and the convolution; `mixture`: experts, of a token, their width, and that of the shared one.
fn qwen3_5<const N: usize>(hidden: usize, delta: [usize; 5], layers: [&str; N], mixture: Option<[usize; 4]>) -> ModelConfig {
    let [k_heads, v_heads, k_dim, v_dim, kernel] = delta;
    let [experts, active, width, shared] = mixture.unwrap_or([2, 1, 8, 8]);
    let json = serde_json::json!({
        "model_type": if mixture.is_some() { "qwen3_5_moe_text" } else { "qwen3_5_text" }, "vocab_size": 300, "hidden_size": hidden,
        "intermediate_size": 16, "num_hidden_layers": N, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24,
        "layer_types": layers.as_slice(), "linear_num_key_heads": k_heads, "linear_num_value_heads": v_heads,
        "linear_key_head_dim": k_dim, "linear_value_head_dim": v_dim, "linear_conv_kernel_dim": kernel, "num_experts": experts,
        "num_experts_per_tok": active, "moe_intermediate_size": width, "shared_expert_intermediate_size": shared
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// Qwen3-VL. `vision`: width of the tower, of its MLP, and of its patches in pixels, heads, patches along a side of a token, and blocks that go into the decoder's first layers.
fn qwen3_vl(hidden: usize, vision: [usize; 6], experts: bool) -> ModelConfig {
    let [width, mlp, patch, heads, merge, deepstack] = vision;
    let json = serde_json::json!({
        "model_type": if experts { "qwen3_vl_moe" } else { "qwen3_vl" }, "image_token_id": 9,
        "text_config": {
            "vocab_size": 300, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "rope_parameters": { "rope_type": "default", "mrope_section": [2, 2, 2] }
        },
        "vision_config": {
            "depth": 3, "hidden_size": width, "intermediate_size": mlp, "num_heads": heads, "patch_size": patch,
            "spatial_merge_size": merge, "out_hidden_size": hidden, "num_position_embeddings": 16,
            "deepstack_visual_indexes": (&[0, 1, 2][..deepstack])
        }
    });
    ModelConfig::from_json(&json.to_string(), None).unwrap()
}

/// Towers each of which has something wide.
fn seeing_models() -> Vec<ModelConfig> {
    vec![
        qwen3_vl(64, [48, 96, 4, 3, 2, 3], false),
        // Patches, the MLP, the decoder, the tower itself, heads, tokens of one patch and of nine.
        qwen3_vl(16, [8, 16, 24, 1, 2, 1], false),
        qwen3_vl(32, [16, 900, 4, 2, 2, 0], false),
        qwen3_vl(800, [16, 16, 4, 2, 2, 3], true),
        qwen3_vl(16, [512, 16, 2, 4, 2, 1], false),
        qwen3_vl(16, [240, 480, 2, 60, 2, 3], true),
        qwen3_vl(48, [64, 128, 8, 2, 1, 2], false),
        qwen3_vl(33, [36, 70, 5, 3, 3, 2], false),
    ]
}

/// Adapters on everything but, unless it is asked for, the embedding.
fn lora(rank: usize, embedding: bool) -> LoraConfig {
    let (own, left_out) = (BTreeMap::new(), ModuleSet::NONE);
    LoraConfig { rank, alpha: 8.0, attention: true, mlp: true, unembed: true, embedding, own, left_out }
}

/// A picture of so many rows and columns of tokens, and those.
fn picture(model: &Model, height: usize, width: usize) -> (Patches, Grid) {
    let processor = model.image_processor().unwrap();
    let token_grid = Grid { time: 1, height, width };
    let grid = Grid { time: 1, height: height * processor.merge_size, width: width * processor.merge_size };
    let patch = 3 * processor.temporal_patch_size * processor.patch_size * processor.patch_size;
    (Patches { values: vec![0.25; grid.patches() * patch], grid }, token_grid)
}

#[test]
fn seeing_a_picture_takes_no_more_memory_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    CpuBackend::with_isa(Isa::detect(), 1).limit_memory(0);
    for (config, dtype) in seeing_models().iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        let model = Model::random(Arc::new(CpuBackend::with_isa(Isa::detect(), 2)), config.clone(), 1, dtype).unwrap();
        // What is kept of the places that have embeddings is the model's.
        model.image_features(&picture(&model, 1, 1).0, &mut || ControlFlow::Continue(())).unwrap();
        let bytes = model.image_bytes();
        for (height, width) in [(1, 1), (1, 20), (7, 9), (30, 30), (3, 350)] {
            // The patches are in what is said.
            let mut patches = None;
            let before = peak_bytes(|| patches = Some(picture(&model, height, width).0));
            let patches = patches.unwrap();
            let mut features: Option<ImageFeatures> = None;
            let live = strata_tensor::live_bytes();
            let seeing = peak_bytes(|| {
                features = Some(model.image_features(&patches, &mut || ControlFlow::Continue(())).unwrap());
            });
            let kept = strata_tensor::live_bytes() - live;
            let tokens = height * width;
            let said = tokens * bytes.seeing + model.workspace_bytes();
            let context = format!("{tokens} tokens {dtype} {:?}", config.vision());
            assert!(before + seeing <= said, "{before} + {seeing} bytes, said {said}: {context}");
            let said_kept = tokens * bytes.features + (1 + features.unwrap().deepstack.len()) * 4096;
            assert!(kept <= said_kept, "{kept} bytes are kept, said {said_kept}: {context}");
            if tokens >= 900 {
                let slack = (tokens * bytes.seeing) as f64 / (before + seeing) as f64;
                assert!(slack < 2.5, "{slack} times what was taken: {context}");
            }
        }
    }
}

/// A chunk of a PNG.
fn chunk(name: &[u8; 4], bytes: &[u8]) -> Vec<u8> {
    let crc = name.iter().chain(bytes).fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    [&(bytes.len() as u32).to_be_bytes()[..], name, bytes, &(!crc).to_be_bytes()].concat()
}

/// 16 bits of red, green, blue and opacity, and rows that are stored as they are.
fn png(height: usize, width: usize) -> Vec<u8> {
    let head = [&(width as u32).to_be_bytes()[..], &(height as u32).to_be_bytes(), &[16, 6, 0, 0, 0]].concat();
    let rows = vec![0; height * (1 + 8 * width)];
    let mut stored = vec![0x78, 0x01];
    let mut blocks = rows.chunks(0xffff).peekable();
    while let Some(block) = blocks.next() {
        let len = block.len() as u16;
        stored.push(u8::from(blocks.peek().is_none()));
        stored.extend([len.to_le_bytes(), (!len).to_le_bytes()].concat());
        stored.extend(block);
    }
    // The checksum of zeros.
    stored.extend((((rows.len() % 65_521) as u32) << 16 | 1).to_be_bytes());
    [&b"\x89PNG\r\n\x1a\n"[..], &chunk(b"IHDR", &head), &chunk(b"IDAT", &stored), &chunk(b"IEND", &[])].concat()
}

#[test]
fn decoding_a_picture_takes_no_more_memory_than_is_said_whatever_is_in_its_file() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let processor = ImageProcessor { pixels: [16, 64], ..ImageProcessor::new(2, 1, 2) };
    let check = |file: &[u8], pixels: usize| {
        let taken = peak_bytes(|| drop(processor.process(file).unwrap()));
        let said = 20 * pixels + file.len() + (256 << 10);
        assert!(taken <= said, "{taken} bytes, said {said}, for {pixels} pixels and a file of {}", file.len());
    };
    for (height, width) in [(16, 16), (900, 1100), (30, 4000)] {
        check(&png(height, width), height * width);
    }
    // Beside the pixels lies what unpacks to 64 MiB, or many small chunks.
    let zeros = include_bytes!("../src/vision/samples/zeros_64_mib.zlib");
    let profile = chunk(b"iCCP", &[&b"p\0\0"[..], zeros].concat());
    let text = chunk(b"zTXt", &[&b"t\0\0"[..], zeros].concat());
    let notes = chunk(b"tEXt", b"k\0v").repeat(200_000);
    let plain = png(16, 16);
    for beside in [profile, text, notes] {
        const HEAD: usize = 33;
        check(&[&plain[..HEAD], &beside, &plain[HEAD..]].concat(), 256);
    }
}

#[test]
fn passes_over_pictures_take_no_more_memory_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    CpuBackend::with_isa(Isa::detect(), 1).limit_memory(0);
    for (config, dtype) in seeing_models().iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        for lengths in [&[(2, 2)][..], &[(20, 15)], &[(1, 1); 40], &[(20, 1), (1, 30), (7, 7)]] {
            check_pictures(config, dtype, lengths);
        }
    }
}

/// Refuses passes over sequences of pictures of so many rows and columns, with little text, that take more than the model says.
fn check_pictures(config: &ModelConfig, dtype: DType, pictures: &[(usize, usize)]) {
    let mut model = Model::random(Arc::new(CpuBackend::with_isa(Isa::detect(), 2)), config.clone(), 1, dtype).unwrap();
    model.set_logits_chunk_bytes(3 << 20);
    let seen: Vec<(Grid, ImageFeatures)> = pictures
        .iter()
        .map(|&(height, width)| {
            let (patches, grid) = picture(&model, height, width);
            (grid, model.image_features(&patches, &mut || ControlFlow::Continue(())).unwrap())
        })
        .collect();
    let lora = lora(8, true);
    let params = LoraParams::init(model.backend(), model.lora_modules(), &lora, 3).unwrap();
    let adapter = model.pack_adapter(lora.clone(), &params).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(&adapter));
    for (grid, features) in &seen {
        let tokens = [&[3], &vec![9; grid.patches()][..], &[4]].concat();
        let image = PlacedImage { first: 1, grid: *grid, features: Some(features) };
        batch.push_with_images(&tokens, 0, tokens.len(), Held::default(), &[image]);
    }
    let n = batch.len();
    let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=n).collect() };
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora).unwrap();
    // The features were there before the pass, and are in what is said of it.
    let features: usize = seen.iter().map(|(grid, features)| grid.patches() * (1 + features.deepstack.len())).sum();
    let features = features * config.hidden_size * 4;
    let said = n * (model.train_bytes_per_token() + model.lora_bytes_per_token(8) + 64) + model.workspace_bytes();
    let trained = peak_bytes(|| {
        model.forward_backward(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)]).unwrap();
    });
    assert!(features + trained <= said, "{features} + {trained} bytes, said {said}: {n} tokens {dtype} {config:?}");
}

#[test]
fn passes_of_any_length_have_the_memory_of_those_before_them() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), 2));
    backend.limit_memory(1 << 30);
    let mut model = Model::random(backend, config(256, 640, 6, [8, 4, 32], 500), 1, DType::BF16).unwrap();
    model.set_logits_chunk_bytes(3 << 20);
    let lora = lora(8, false);
    let params = LoraParams::init(model.backend(), model.lora_modules(), &lora, 3).unwrap();
    let adapter = model.pack_adapter(lora.clone(), &params).unwrap();
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora).unwrap();
    let mut pass = |lengths: &[usize]| {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(&adapter));
        lengths.iter().for_each(|&len| batch.push_sequence(&vec![3; len]));
        let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=batch.len()).collect() };
        // By turns all is kept, and what goes into each layer.
        for layers in [6, 1] {
            let (keeping, gradients) = (Keeping { layers, every: 1 }, &mut [Some(&mut gradients)]);
            model
                .forward_backward_with(&batch, &targets, &CrossEntropy, gradients, keeping, &mut || ControlFlow::Continue(()))
                .unwrap();
        }
    };
    let before = mapped_bytes();
    pass(&[1000, 600]);
    let first = mapped_bytes() - before;
    assert!(first > 32 << 20, "{first} bytes are too few to tell");
    for lengths in [&[1500][..], &[1024, 512], &[777; 2], &[100; 13], &[1, 2, 3, 1111], &[30; 50], &[1599]] {
        pass(lengths);
    }
    let further = mapped_bytes() - before - first;
    assert!(further <= first / 16, "{further} bytes beside {first} of the longest pass");
}

/// Held by whoever counts.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_tensor_is_counted_once_whether_allocated_or_mapped() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let backend = CpuBackend::with_isa(Isa::detect(), 1);
    backend.limit_memory(0);
    // The harness allocates too, on a thread of its own.
    const BESIDE: usize = 16 << 10;
    for bytes in [64 << 10, 1 << 20, 16 << 20] {
        let taken = peak_bytes(|| drop(backend.zeros(&[bytes / 4], DType::F32).unwrap()));
        assert!((bytes..bytes + BESIDE).contains(&taken), "{taken} of {bytes}");
        let mut kept = Vec::new();
        let taken = peak_bytes(|| {
            drop(vec![0u8; 1 << 20]);
            kept.push(backend.zeros(&[bytes / 4], DType::F32).unwrap());
            drop(vec![0u8; 1 << 20]);
        });
        assert!((bytes..bytes + BESIDE).contains(&(taken - (1 << 20))), "{taken} of {bytes} and a mebibyte");
    }
}

#[test]
fn a_hostile_header_takes_little_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = |num_tensors: usize| {
        let dir = tempfile::tempdir().unwrap();
        let entries: Vec<String> = (0..num_tensors)
            .map(|i| {
                format!(r#""tensor.with.a.name.of.usual.length.{i}":{{"dtype":"F32","shape":[0,1],"data_offsets":[0,0]}}"#)
            })
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let mut opened = false;
        let taken = peak_bytes(|| opened = Checkpoint::open(dir.path()).is_ok());
        (opened, taken)
    };
    let (opened, taken) = open(131_072);
    assert!(opened && taken < 130 << 20, "the most tensors that are accepted take {taken} bytes");
    for num_tensors in [140_000, 1_000_000] {
        let (opened, taken) = open(num_tensors);
        assert!(!opened && taken < 64 << 10, "{num_tensors} tensors take {taken} bytes");
    }
}

#[test]
fn reading_a_tokenizer_takes_no_more_memory_than_is_set_aside_for_it() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Tokens of two to eight bytes, a letter for every two, as long as those of large vocabularies; those of more than one letter are merged of all but the last letter, and that.
    let mut tokens: Vec<String> = ('а'..='м').map(String::from).collect();
    let mut made = 0;
    while tokens.len() < 30_000 {
        tokens.extend(('а'..='м').map(|letter| format!("{}{letter}", tokens[made])).collect::<Vec<_>>());
        made += 1;
    }
    let vocab: serde_json::Map<String, serde_json::Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let pairs = || tokens.iter().filter(|token| token.len() > 2).map(|token| token.split_at(token.len() - 2));
    let lists: serde_json::Value = pairs().map(|(left, right)| serde_json::json!([left, right])).collect();
    let texts: serde_json::Value = pairs().map(|(left, right)| format!("{left} {right}")).collect();
    for (merges, name) in [(lists, "lists"), (texts, "texts")] {
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}
        });
        let json = serde_json::to_string_pretty(&json).unwrap();
        let mut read = None;
        // And its file, which is held meanwhile.
        let taken = peak_bytes(|| read = Some(Tokenizer::from_json(&json).unwrap())) + json.len();
        assert_eq!(read.unwrap().encode("абв").unwrap().len(), 1);
        let factor = taken as f64 / json.len() as f64;
        assert!(factor <= 8.0, "merges that are {name}: {factor:.1} times the file");
    }
}

#[test]
fn opening_an_adapter_takes_no_more_memory_than_is_said_whatever_is_in_its_files() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let modules = lora_modules(&config(64, 96, 2, [4, 2, 16], 300));
    let opened = |config: &str, entries: &str| {
        let dir = tempfile::tempdir().unwrap();
        let header = format!("{{{entries}}}");
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(dir.path().join("adapter_model.safetensors"), bytes).unwrap();
        let config = format!(r#"{{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["q_proj"]{config}}}"#);
        std::fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        let said = PlannedAdapter::memory_bytes_to_open(dir.path()).unwrap() as usize;
        let taken = peak_bytes(|| drop(PlannedAdapter::open(dir.path(), &modules)));
        assert!(taken <= said + (64 << 10), "{taken} bytes, where {said} were said: {}", &header[..header.len().min(80)]);
        said
    };
    let entry = |name: &str, shape: &str, end: usize| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,{end}]}}"#)
    };
    let many = |of: &dyn Fn(usize) -> String, count: usize| (0..count).map(of).collect::<Vec<_>>().join(",");
    let pair = |i: usize| entry(&format!("base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight"), "0,64", 0);
    assert!(opened("", &many(&pair, 500)) < 2 << 20, "what is usual is not thought to take much");
    for entries in [
        many(&|i| entry(&format!("{i:x}"), "0", 0), 30_000),
        // The last is wrong, and looked for.
        many(&|i| entry(&format!("{i:x}"), "0", i / 29_999), 30_000),
        many(&|i| entry(&format!("{i:x}{}", "n".repeat(500)), "0", 0), 10_000),
        entry(&"n".repeat(4 << 20), "0", 0),
        entry("n", &"0,".repeat(1 << 20), 0),
        format!(r#""__metadata__":{{{}}}"#, many(&|i| format!(r#""{i:x}":"""#), 100_000)),
    ] {
        opened("", &entries);
    }
    for listed in ["1", "[1]", "[]", r#"{"":0}"#, r#""a""#, r#"{"a":[{"b":{}}]}"#] {
        opened(&format!(r#","z":[{}]"#, many(&|_| listed.into(), 900_000 / (listed.len() + 1))), "");
    }
    opened(&format!(r#","z":{{{}}}"#, many(&|i| format!(r#""{i:x}":0"#), 90_000)), "");
}

#[test]
fn passes_of_many_adapters_take_no_more_memory_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Little attention, so that what it takes on every thread does not stand for what products take.
    let config = config(512, 1024, 2, [2, 1, 4], 300);
    for (threads, dtype) in [(1, DType::F32), (2, DType::BF16), (16, DType::F32)] {
        let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), threads));
        backend.limit_memory(0);
        let mut model = Model::random(backend, config.clone(), 1, dtype).unwrap();
        model.set_logits_chunk_bytes(0);
        let adapters: Vec<_> = [32, 1, 8, 2, 16, 4, 32, 32, 16, 32, 32, 8, 32, 32, 32, 32]
            .map(|rank| {
                let lora = lora(rank, false);
                let params = LoraParams::init(model.backend(), model.lora_modules(), &lora, 3).unwrap();
                let gradient = LoraParams::zeros(model.backend(), model.lora_modules(), &lora).unwrap();
                (model.pack_adapter(lora, &params).unwrap(), gradient)
            })
            .into();
        let (adapters, mut gradients): (Vec<_>, Vec<_>) = adapters.into_iter().unzip();
        let mut batch = PackedBatch::new();
        for adapter in &adapters {
            batch.begin_group(Some(adapter));
            // Each fills a granule of a sum over tokens.
            (0..16).for_each(|token| batch.push_sequence(&[token]));
        }
        let n = batch.len();
        let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=n).collect() };
        let said = n * (model.train_bytes_per_token() + model.lora_bytes_per_token(32) + 64) + model.workspace_bytes();
        let mut gradients: Vec<_> = gradients.iter_mut().map(Some).collect();
        for _ in 0..4 {
            let taken = peak_bytes(|| drop(model.forward_backward(&batch, &targets, &CrossEntropy, &mut gradients).unwrap()));
            assert!(taken <= said, "{taken} bytes of {threads} threads, said {said}: {dtype}");
        }
    }
}

#[test]
fn passes_take_no_more_memory_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Freed buffers go back at once, so that what is counted is what is in use.
    CpuBackend::with_isa(Isa::detect(), 1).limit_memory(0);
    let shapes = [
        config(64, 160, 3, [4, 2, 16], 500),
        config(64, 16, 2, [4, 1, 32], 300),
        config(64, 16, 2, [16, 1, 32], 300),
        config(32, 700, 2, [2, 2, 2], 300),
        config(96, 288, 28, [8, 4, 16], 1000),
        config(33, 65, 2, [3, 3, 6], 301),
        config(32, 64, 1, [4, 4, 64], 300),
        config(8, 8, 1, [1, 1, 2], 8000),
        gpt_oss(48, [4, 2, 16], [8, 2, 40]),
        gpt_oss(33, [3, 1, 10], [5, 4, 21]),
        mixture(64, [16, 4, 48]),
        mixture(32, [2, 2, 300]),
        mixture(96, [64, 8, 8]),
        latent_config(32, [16, 8], [Some(24), Some(64)], [8, 16, 8, 16]),
        latent_config(32, [16, 8], [None, Some(16)], [4, 64, 32, 64]),
        latent_config(96, [16, 200], [Some(8), Some(16)], [2, 8, 4, 8]),
        qwen3_5(33, [1, 3, 7, 9, 3], ["linear_attention", "full_attention"], None),
        qwen3_5(48, [2, 4, 40, 56, 4], ["linear_attention", "full_attention"], Some([8, 2, 40, 24])),
        // All that is wide is the gate of attention, and then the shared expert.
        qwen3_5(8, [1, 1, 2, 2, 1], ["full_attention"; 2], None),
        qwen3_5(8, [1, 1, 2, 2, 1], ["full_attention"; 2], Some([2, 1, 2, 700])),
    ];
    let batches: [&[usize]; 5] = [&[1], &[300], &[1; 200], &[64; 5], &[3, 200, 65, 1, 29]];
    let mut tightest = f64::MAX;
    for (config, dtype) in shapes.iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        for adapter in [(1, true), (32, false), (32, true)] {
            for lengths in batches {
                let (said, trained) = check_passes(config, dtype, adapter, lengths);
                tightest = tightest.min(said / trained);
            }
        }
    }
    assert!(tightest < 2.0, "a bound that is never near wastes memory: at best it is {tightest} times what was taken");
}

/// All that is wide is what experts have between their layers, for each of the four that a token chooses.
#[test]
fn layers_that_are_kept_keep_what_their_experts_make() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), 2));
    backend.limit_memory(0);
    let config = mixture(32, [4, 4, 300]);
    let model = Model::random(backend, config.clone(), 1, DType::F32).unwrap();
    let lora = lora(4, false);
    let params = LoraParams::init(model.backend(), model.lora_modules(), &lora, 3).unwrap();
    let adapter = model.pack_adapter(lora.clone(), &params).unwrap();
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(&adapter));
    batch.push_sequence(&(0..2000).map(|i| i * 7 % 300).collect::<Vec<_>>());
    let n = batch.len();
    let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=n).collect() };
    let mut peak = |keeping: Keeping| {
        let (gradients, between) = (&mut [Some(&mut gradients)], &mut || std::ops::ControlFlow::Continue(()));
        peak_bytes(|| drop(model.forward_backward_with(&batch, &targets, &CrossEntropy, gradients, keeping, between)))
    };
    let all = Keeping { layers: config.num_layers, every: 1 };
    let taken = peak(all).saturating_sub(peak(Keeping::ALL_CHECKPOINTS)) as u64;
    let said = model.kept_bytes(all, n, 4) - model.kept_bytes(Keeping::ALL_CHECKPOINTS, n, 4);
    // One of three layers has no experts.
    assert!(taken > said / 2 && taken <= said, "{taken} bytes of {said}");
}

#[test]
fn long_sequences_through_gated_delta_nets_take_little_less_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    CpuBackend::with_isa(Isa::detect(), 1).limit_memory(0);
    // So long that what does not grow with them is little beside what does. Heads that are narrow, and states that are large.
    for delta in [[4, 16, 16, 16, 4], [1, 4, 64, 64, 2]] {
        let config = qwen3_5(12, delta, ["linear_attention"; 2], None);
        for (dtype, lengths) in [(DType::F32, &[8000][..]), (DType::BF16, &[2000; 4])] {
            let (said, trained) = check_passes(&config, dtype, (4, false), lengths);
            let slack = said / trained;
            assert!(slack < 1.8, "{slack} times what was taken: {delta:?} {dtype} {lengths:?}");
        }
    }
}

#[test]
fn long_sequences_through_attention_take_little_less_than_the_model_says() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    CpuBackend::with_isa(Isa::detect(), 1).limit_memory(0);
    // So deep that what goes into layers is not all kept; heads that share keys and heads that do not, and latents.
    let shapes = [
        config(128, 384, 14, [16, 8, 16], 300),
        config(96, 160, 9, [4, 4, 24], 300),
        config(48, 64, 4, [16, 1, 16], 300),
        latent_config(32, [16, 8], [Some(24), Some(64)], [8, 16, 8, 16]),
    ];
    for (config, dtype) in shapes.iter().flat_map(|c| [DType::F32, DType::BF16].map(|dtype| (c, dtype))) {
        let of = |tokens| check_passes(config, dtype, (4, false), &[tokens]);
        // What a pass takes however long it is apart.
        let (short, long) = (of(1400), of(2200));
        let slack = (long.0 - short.0) / (long.1 - short.1);
        assert!(slack < 1.3, "{slack} times what was taken: {dtype} {config:?}");
    }
}

/// Refuses passes over sequences of these lengths that take more than the model says; answers that, and what training took.
fn check_passes(config: &ModelConfig, dtype: DType, (rank, embedding): (usize, bool), lengths: &[usize]) -> (f64, f64) {
    let backend = Arc::new(CpuBackend::with_isa(Isa::detect(), 2));
    let mut model = Model::random(backend, config.clone(), 1, dtype).unwrap();
    model.set_logits_chunk_bytes(3 << 20);
    let lora = lora(rank, embedding);
    let params = LoraParams::init(model.backend(), model.lora_modules(), &lora, 3).unwrap();
    let adapter = model.pack_adapter(lora.clone(), &params).unwrap();
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(&adapter));
    for &len in lengths {
        batch.push_sequence(&(0..len).map(|i| (i * 7 % config.vocab_size) as u32).collect::<Vec<_>>());
    }
    let n = batch.len();
    let targets = Targets { ids: batch.tokens.clone(), offsets: (0..=n).collect() };
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora).unwrap();
    let per_token = model.train_bytes_per_token() + model.lora_bytes_per_token(rank) + 64;
    let said = n * per_token + model.workspace_bytes();
    let trained = peak_bytes(|| {
        model.forward_backward(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)]).unwrap();
    });
    // So few tokens have targets that the last layer goes on with them alone.
    let first = n - n * 2 / 5;
    let few = Targets { ids: batch.tokens[first..].to_vec(), offsets: (0..=n).map(|row| row.saturating_sub(first)).collect() };
    let trained_few = peak_bytes(|| {
        model.forward_backward(&batch, &few, &CrossEntropy, &mut [Some(&mut gradients)]).unwrap();
    });
    // All activations are kept, what goes into each layer, and as much as there is room for.
    let all = Keeping { layers: config.num_layers, every: 1 };
    let some = [all, Keeping::ALL_CHECKPOINTS, model.kept_within(said as u64, n, rank)];
    for keeping in some.into_iter().filter(|_| !embedding) {
        let said = said as u64 + model.kept_bytes(keeping, n, rank);
        let between = &mut || std::ops::ControlFlow::Continue(());
        let gradients = &mut [Some(&mut gradients)];
        let kept =
            peak_bytes(|| drop(model.forward_backward_with(&batch, &targets, &CrossEntropy, gradients, keeping, between)));
        assert!(kept as u64 <= said, "{kept} bytes with {keeping:?}, said {said}: {config:?} {dtype} rank {rank} {lengths:?}");
    }
    let scored = peak_bytes(|| drop(model.forward(&batch, &targets).unwrap()));
    let pages = lengths.iter().map(|len| len.div_ceil(64)).sum();
    let mut cache = model.new_kv_cache(pages, lengths.len()).unwrap();
    let mut prefill = PackedBatch::new();
    prefill.begin_group(Some(&adapter));
    let mut page = 0u32;
    for ((state, span), &len) in (0..).zip(&batch.spans).zip(lengths) {
        let pages = (page..page + len.div_ceil(64) as u32).collect::<Vec<_>>();
        page += pages.len() as u32;
        prefill.push_cached(
            &batch.tokens[span.tokens.clone()],
            0,
            usize::MAX,
            Held { pages, state: Some(state), ..Held::default() },
        );
    }
    let rows: Vec<usize> = (0..n).collect();
    let requests = vec![RowRequest::default(); n];
    let stepped = peak_bytes(|| drop(model.step(&prefill, &mut cache, &rows, &requests).unwrap()));
    let context = format!("{config:?} {dtype} rank {rank}, embedding {embedding}: {} sequences, {n} tokens", lengths.len());
    let passes = [("trained", trained), ("trained on few targets", trained_few), ("scored", scored), ("stepped", stepped)];
    for (what, taken) in passes {
        assert!(taken <= said, "{what} with {taken} bytes, said {said}: {context}");
    }
    (said as f64, trained as f64)
}
