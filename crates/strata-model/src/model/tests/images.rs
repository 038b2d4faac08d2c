//! Passes over sequences with pictures: the same bits in any company, on any number of threads, and wherever a sequence is cut.

use strata_tensor::testing::RemoteBackend;

use super::*;
use crate::PlacedImage;
use crate::vision::{Grid, Patches};

/// The token of pictures.
const IMAGE: u32 = 7;

/// Qwen3-VL, and Qwen3-VL-MoE, whose first two layers are told what the tower's first and last have seen.
fn configs() -> [ModelConfig; 2] {
    let text = json!({
        "vocab_size": 301, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 4096, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 2, 1], "mrope_interleaved": true},
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20
    });
    let vision = json!({
        "depth": 3, "hidden_size": 24, "intermediate_size": 36, "num_heads": 2, "patch_size": 2, "out_hidden_size": 48,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]
    });
    ["qwen3_vl", "qwen3_vl_moe"].map(|model_type| {
        let all = json!({
            "model_type": model_type, "image_token_id": IMAGE, "tie_word_embeddings": model_type == "qwen3_vl",
            "text_config": text, "vision_config": vision
        });
        ModelConfig::from_json(&all.to_string(), None).unwrap()
    })
}

/// Patches of a picture of so many rows and columns of tokens.
fn picture(height: usize, width: usize) -> Patches {
    let grid = Grid { time: 1, height: 2 * height, width: 2 * width };
    let values = (0..grid.patches() * 24).map(|i| ((i * 37 + width) % 101) as f32 / 50.0 - 1.0).collect();
    Patches { values, grid }
}

/// A run of text, or a picture of so many rows and columns.
enum Part {
    Text(usize),
    Picture(usize, usize),
}
use Part::{Picture, Text};

/// A picture over the end of a page between texts, one at the end of a sequence and one beside another; one at its beginning; and text alone.
const SEQUENCES: [&[Part]; 3] = [
    &[Text(40), Picture(5, 6), Text(9), Picture(1, 3), Picture(2, 1)],
    &[Picture(3, 2), Text(20), Picture(1, 1), Text(2)],
    &[Text(33)],
];

/// A sequence with what a model sees of its pictures.
struct Seen {
    tokens: Vec<u32>,
    images: Vec<(usize, Grid, ImageFeatures)>,
}

impl Seen {
    fn of(model: &Model, parts: &[Part], salt: usize) -> Seen {
        let mut seen = Seen { tokens: Vec::new(), images: Vec::new() };
        for part in parts {
            let first = seen.tokens.len();
            match *part {
                Text(len) => seen.tokens.extend(tokens(len, salt + first)),
                Picture(height, width) => {
                    let features = model.image_features(&picture(height, width), &mut || ControlFlow::Continue(())).unwrap();
                    seen.images.push((first, Grid { time: 1, height, width }, features));
                    seen.tokens.extend(vec![IMAGE; height * width]);
                }
            }
        }
        seen
    }

    /// Pictures of which tokens from `past` on are new come with their features, others without.
    fn images(&self, past: usize) -> Vec<PlacedImage<'_>> {
        self.images
            .iter()
            .map(|image| {
                let (first, grid, features) = image;
                PlacedImage { first: *first, grid: *grid, features: (first + grid.patches() > past).then_some(features) }
            })
            .collect()
    }

    fn push<'s>(&'s self, batch: &mut PackedBatch<'s>, range: Range<usize>, held: Held) {
        batch.push_with_images(&self.tokens[range.clone()], range.start, usize::MAX, held, &self.images(range.start));
    }
}

fn all(model: &Model) -> Vec<Seen> {
    SEQUENCES.iter().enumerate().map(|(salt, parts)| Seen::of(model, parts, salt)).collect()
}

fn whole<'s>(adapter: &'s Adapter, sequences: impl IntoIterator<Item = &'s Seen>) -> (PackedBatch<'s>, Targets) {
    let mut batch = PackedBatch::new();
    batch.begin_group(Some(adapter));
    sequences.into_iter().for_each(|seen| seen.push(&mut batch, 0..seen.tokens.len(), Held::default()));
    let ids: Vec<u32> = batch.tokens.iter().enumerate().map(|(i, t)| (t + i as u32) % 301).collect();
    let offsets = (0..=ids.len()).collect();
    (batch, Targets { ids, offsets })
}

/// Log-probabilities of the targets of one sequence that goes through the cache in pieces that end at `cuts`, beside another of which a token is added each time.
fn in_pieces(model: &Model, adapter: &Adapter, seen: &Seen, beside: &Seen, targets: &[u32], cuts: &[usize]) -> Vec<u32> {
    let mut cache = model.new_kv_cache(4, 0).unwrap();
    let (mut start, mut found) = (0, Vec::new());
    for (step, &end) in cuts.iter().chain([&seen.tokens.len()]).enumerate() {
        let mut batch = PackedBatch::new();
        batch.begin_group(Some(adapter));
        let other = step % beside.tokens.len();
        beside.push(&mut batch, other..other + 1, vec![1].into());
        seen.push(&mut batch, start..end, vec![3, 0].into());
        let requests: Vec<RowRequest> =
            targets[start..end].iter().map(|&id| RowRequest { ids: vec![id], ..RowRequest::default() }).collect();
        let rows: Vec<usize> = (1..=end - start).collect();
        let replies = model.step(&batch, &mut cache, &rows, &requests).unwrap();
        found.extend(replies.into_iter().map(|reply| reply.unwrap().logprobs[0].to_bits()));
        start = end;
    }
    found
}

fn feature_bits(model: &Model, features: &ImageFeatures) -> Vec<u32> {
    let all = [&features.embeddings].into_iter().chain(&features.deepstack);
    all.flat_map(|t| bits(&model.backend().to_f32_vec(t.as_ref()).unwrap())).collect()
}

/// What is seen, log-probabilities and gradients.
fn trained(model: &Model, adapter: &Adapter) -> [Vec<u32>; 3] {
    let sequences = all(model);
    let seen = sequences.iter().flat_map(|seen| &seen.images).flat_map(|image| feature_bits(model, &image.2)).collect();
    let (batch, targets) = whole(adapter, &sequences);
    let mut gradients = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(4)).unwrap();
    let logprobs = model.forward_backward(&batch, &targets, &CrossEntropy, &mut [Some(&mut gradients)]).unwrap();
    [seen, bits(&logprobs), gradient_bits(model, &gradients)]
}

fn formats() -> [(DType, WeightStorage); 5] {
    [
        (DType::F32, WeightStorage::Dense),
        (DType::BF16, WeightStorage::Dense),
        (DType::F32, WeightStorage::Int8),
        (DType::BF16, WeightStorage::Int8),
        (DType::BF16, WeightStorage::Int4(Int4Group::Of64)),
    ]
}

#[test]
fn no_bit_of_sequences_with_pictures_depends_on_company_threads_or_cuts() {
    let cases = configs().into_iter().flat_map(|c| Arithmetic::available().into_iter().map(move |a| (c.clone(), a)));
    for ((config, arithmetic), (compute, storage)) in cases.flat_map(|case| formats().map(|format| (case.clone(), format))) {
        let context = format!("{} {arithmetic} {compute} {storage:?}", config.model_type());
        let mut of_one_thread = None;
        for threads in [1, 2, 3] {
            let backend = Arc::new(CpuBackend::with_isa(arithmetic, threads));
            let model = Model::random(backend, config.clone(), 7, WeightFormat { compute, storage }).unwrap();
            let (_, adapter) = adapter(&model, 4);
            let found = trained(&model, &adapter);
            assert!(found[2].iter().filter(|&&g| g != 0).count() * 2 > found[2].len(), "{context}");
            if threads == 2 {
                // Every place where a sequence can be cut, once; in other formats some.
                let every = if (compute, storage) == (DType::F32, WeightStorage::Dense) { 1 } else { 7 };
                check_company_and_cuts(&model, &adapter, &found, every, &context);
            }
            assert!(*of_one_thread.get_or_insert_with(|| found.clone()) == found, "{threads} threads instead of 1, {context}");
        }
    }
}

fn check_company_and_cuts(
    model: &Model,
    adapter: &Adapter,
    [_, logprobs, gradients]: &[Vec<u32>; 3],
    every: usize,
    context: &str,
) {
    let sequences = all(model);
    let (batch, targets) = whole(adapter, &sequences);
    assert!(bits(&model.forward(&batch, &targets).unwrap()) == *logprobs, "scored, {context}");
    let mut sum = LoraParams::zeros(model.backend(), model.lora_modules(), &lora(4)).unwrap();
    for (n, (seen, span)) in sequences.iter().zip(&batch.spans).enumerate() {
        let ids = &targets.ids[span.tokens.clone()];
        let own = &logprobs[span.tokens.clone()];
        let (alone, _) = whole(adapter, [seen]);
        let targets = Targets { ids: ids.to_vec(), offsets: (0..=ids.len()).collect() };
        let found = model.forward_backward(&alone, &targets, &CrossEntropy, &mut [Some(&mut sum)]).unwrap();
        assert!(bits(&found) == own, "sequence {n} alone, {context}");
        let beside = &sequences[(n + 1) % sequences.len()];
        let through = |cuts: &[usize]| in_pieces(model, adapter, seen, beside, ids, cuts);
        let each: Vec<usize> = (1..seen.tokens.len()).collect();
        assert!(through(&each) == own, "sequence {n} token by token, {context}");
        assert!(through(&[]) == own, "sequence {n} prefilled whole, {context}");
        for cut in (1..seen.tokens.len()).step_by(every) {
            assert!(through(&[cut]) == own, "sequence {n} cut at {cut}, {context}");
        }
    }
    assert!(gradient_bits(model, &sum) == *gradients, "gradients one after the other, {context}");
}

#[test]
fn a_device_whose_memory_is_elsewhere_sees_the_same_and_a_refusal_leaves_nothing_behind() {
    for (config, dtype) in configs().into_iter().flat_map(|c| [(c.clone(), DType::F32), (c, DType::BF16)]) {
        let here = Model::random(backend(), config.clone(), 7, dtype).unwrap();
        let device = Arc::new(RemoteBackend::new(CpuBackend::with_isa(Isa::detect(), 2)));
        let there = Model::random(device.clone(), config, 7, dtype).unwrap();
        let [expected, found] = [&here, &there].map(|model| trained(model, &adapter(model, 4).1));
        assert!(!expected[0].is_empty() && expected == found, "{dtype}");

        let patches = picture(3, 4);
        let see = || there.image_features(&patches, &mut || ControlFlow::Continue(()));
        // The first call keeps the embeddings of places on the host.
        let expected = feature_bits(&there, &see().unwrap());
        let (before, held) = (device.allocations(), device.held());
        drop(see().unwrap());
        let allocations = device.allocations() - before;
        assert!(allocations > 30);
        for nth in 1..=allocations {
            device.refuse_allocation(nth);
            let refused = see().err();
            let is_refusal = matches!(refused, Some(Error::Tensor(strata_tensor::Error::OutOfMemory { bytes })) if bytes > 0);
            assert!(is_refusal, "allocation {nth} of {allocations}: {refused:?}");
            assert_eq!(device.held(), held, "a pass that fails keeps nothing");
        }
        assert!(feature_bits(&there, &see().unwrap()) == expected, "after the refusals");
    }
}

#[test]
fn seeing_ends_where_it_is_interrupted() {
    let [config, _] = configs();
    let model = Model::random(backend(), config, 7, DType::F32).unwrap();
    for stop in 1..=3 {
        let mut calls = 0;
        let refused = model.image_features(&picture(2, 2), &mut || {
            calls += 1;
            if calls == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(refused, Err(Error::Interrupted)));
        assert_eq!(calls, stop, "once after each block");
    }
}

#[test]
fn pictures_that_do_not_fit_are_refused() {
    let [config, _] = configs();
    let seeing = Model::random(backend(), config, 7, DType::F32).unwrap();
    let error = |patches: &Patches| {
        seeing.image_features(patches, &mut || ControlFlow::Continue(())).err().expect("a refusal").to_string()
    };
    let grid = |height, width| Grid { time: 1, height, width };
    for (patches, part) in [
        (Patches { values: vec![0.0; 23], grid: grid(2, 2) }, "23 numbers"),
        (Patches { values: vec![0.0; 3 * 24], grid: grid(3, 1) }, "height: 3"),
        (Patches { values: Vec::new(), grid: grid(0, 2) }, "height: 0"),
        (Patches { values: vec![0.0; 24], grid: grid(usize::MAX - 1, 2) }, "numbers"),
    ] {
        let error = error(&patches);
        assert!(error.contains(part), "{error}");
    }
    let text = Model::random(backend(), super::config(), 7, DType::F32).unwrap();
    assert!(text.image_features(&picture(1, 1), &mut || ControlFlow::Continue(())).is_err());
    assert_eq!(text.image_bytes(), ImageBytes::default());
    let features = seeing.image_features(&picture(2, 1), &mut || ControlFlow::Continue(())).unwrap();
    let place = |grid| [PlacedImage { first: 1, grid, features: Some(&features) }];
    let score = |model: &Model, tokens: &[u32], images: &[PlacedImage<'_>]| {
        let mut batch = PackedBatch::new();
        batch.push_with_images(tokens, 0, 10, Held::default(), images);
        let targets = Targets { ids: Vec::new(), offsets: vec![0; tokens.len() + 1] };
        model.forward(&batch, &targets).map_err(|e| e.to_string())
    };
    let fits = place(grid(2, 1));
    assert!(score(&seeing, &[5, IMAGE, IMAGE, 6], &fits).is_ok());
    assert!(score(&seeing, &[5, IMAGE, 9, 6], &fits).unwrap_err().contains("token 9"));
    assert!(score(&text, &[5, IMAGE, IMAGE, 6], &fits).unwrap_err().contains("reads text alone"));
    assert!(score(&seeing, &[5, IMAGE, IMAGE, IMAGE], &place(grid(3, 1))).unwrap_err().contains("no tokens"));
}

#[test]
fn sequences_that_show_the_same_pictures_at_their_beginning_have_the_bits_that_each_has_alone() {
    for config in configs() {
        let model =
            Model::random(backend(), config, 7, WeightFormat { compute: DType::BF16, storage: WeightStorage::Dense }).unwrap();
        let (_, adapter) = adapter(&model, 4);
        let first = Seen::of(&model, SEQUENCES[0], 1);
        // Another word at the end of the text between the pictures, and nothing after the first picture.
        let place = |seen: &Seen| seen.images[1].0 - 1;
        let mut other = first.tokens.clone();
        other[place(&first)] += 1;
        let short = &first.tokens[..place(&first)];
        // The first to come ends within the first picture.
        let within = &first.tokens[..first.images[0].0 + 13];
        let sequences: [(&[u32], usize); 5] = [(within, 1), (&first.tokens, 3), (&other, 3), (short, 1), (&first.tokens, 3)];
        let batch_of = |sequences: &[(&[u32], usize)]| {
            let mut batch = PackedBatch::new();
            batch.begin_group(Some(&adapter));
            for (tokens, pictures) in sequences {
                batch.push_with_images(tokens, 0, usize::MAX, Held::default(), &first.images(0)[..*pictures]);
            }
            let ids: Vec<u32> = batch.tokens.iter().map(|t| (t * 5 + 1) % 301).collect();
            let offsets = (0..=ids.len()).collect();
            (batch, Targets { ids, offsets })
        };
        let scored = |sequences: &[(&[u32], usize)]| {
            let (batch, targets) = batch_of(sequences);
            bits(&model.forward(&batch, &targets).unwrap())
        };
        let (batch, _) = batch_of(&sequences);
        let repeats = BatchInputs::new(model.backend(), model.config(), &batch).unwrap().repeats.clone().unwrap();
        assert_eq!(repeats.firsts().len(), first.tokens.len() * 2 - place(&first));
        let alone: Vec<u32> = sequences.iter().flat_map(|&sequence| scored(&[sequence])).collect();
        assert!(scored(&sequences) == alone, "{}", model.config().model_type());
    }
}
