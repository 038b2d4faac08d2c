//! Checkpoints with matrices of four bits.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use strata_tensor::WeightStorage;

use super::*;

/// A tensor of a file.
type Stored = (Dtype, Vec<usize>, Vec<u8>);
/// What is done to the tensors of a file.
type Change<'c> = &'c dyn Fn(&mut BTreeMap<String, Stored>);

/// How a checkpoint says that its matrices lie.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Gptq,
    Awq,
    Compressed,
}

/// Codes, zeros and scales of `[rows, columns]`, by numbers that no layout favours.
struct Matrix {
    rows: usize,
    columns: usize,
    group: usize,
}

impl Matrix {
    fn code(&self, row: usize, column: usize) -> u32 {
        ((row * 7 + column * 5 + row * column) % 16) as u32
    }

    fn zero(&self, row: usize, group: usize) -> u32 {
        ((row * 3 + group * 11) % 16) as u32
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        half::f16::from_f32(0.003 + 0.001 * ((row + 5 * group) % 13) as f32).to_f32()
    }

    fn groups(&self) -> usize {
        self.columns / self.group
    }

    fn dense(&self) -> Vec<u8> {
        let value = |i: usize| {
            let (row, column) = (i / self.columns, i % self.columns);
            let (code, zero) = (self.code(row, column), self.zero(row, column / self.group));
            (code as f32 - zero as f32) * self.scale(row, column / self.group)
        };
        (0..self.rows * self.columns).flat_map(|i| value(i).to_le_bytes()).collect()
    }

    /// Words `[first, second]` of eight numbers: number `place` of word `[i, j]`.
    fn words([first, second]: [usize; 2], number: impl Fn(usize, usize, usize) -> u32) -> Stored {
        let word = |i: usize| (0..8).map(|place| number(i / second, i % second, place) << (4 * place)).sum::<u32>();
        (Dtype::I32, vec![first, second], (0..first * second).flat_map(|i| word(i).to_le_bytes()).collect())
    }

    fn scales(&self, [first, second]: [usize; 2], scale: impl Fn(usize, usize) -> f32) -> Stored {
        let bytes = |i: usize| half::f16::from_f32(scale(i / second, i % second)).to_le_bytes();
        (Dtype::F16, vec![first, second], (0..first * second).flat_map(bytes).collect())
    }

    fn tensors(&self, layout: Layout) -> Vec<(&'static str, Stored)> {
        let Matrix { rows, columns, group } = *self;
        let groups = self.groups();
        match layout {
            Layout::Gptq => {
                let order = (0..columns).flat_map(|i| ((i / group) as i32).to_le_bytes()).collect();
                let mut zeros = Self::words([groups, rows / 8], |group, j, place| self.zero(8 * j + place, group));
                for word in zeros.2.as_chunks_mut().0 {
                    *word = u32::from_le_bytes(*word).wrapping_sub(0x1111_1111).to_le_bytes();
                }
                vec![
                    ("qweight", Self::words([columns / 8, rows], |i, row, place| self.code(row, 8 * i + place))),
                    ("qzeros", zeros),
                    ("scales", self.scales([groups, rows], |group, row| self.scale(row, group))),
                    ("g_idx", (Dtype::I32, vec![columns], order)),
                ]
            }
            Layout::Awq => {
                let order = [0, 2, 4, 6, 1, 3, 5, 7];
                vec![
                    ("qweight", Self::words([columns, rows / 8], |i, j, place| self.code(8 * j + order[place], i))),
                    ("qzeros", Self::words([groups, rows / 8], |group, j, place| self.zero(8 * j + order[place], group))),
                    ("scales", self.scales([groups, rows], |group, row| self.scale(row, group))),
                ]
            }
            Layout::Compressed => {
                let shape = [rows, columns].iter().flat_map(|&n| (n as i64).to_le_bytes()).collect();
                vec![
                    ("weight_packed", Self::words([rows, columns / 8], |row, j, place| self.code(row, 8 * j + place))),
                    ("weight_zero_point", Self::words([rows / 8, groups], |i, group, place| self.zero(8 * i + place, group))),
                    ("weight_scale", self.scales([rows, groups], |row, group| self.scale(row, group))),
                    ("weight_shape", (Dtype::I64, vec![2], shape)),
                ]
            }
        }
    }

    fn config(&self, layout: Layout) -> Value {
        match layout {
            Layout::Gptq => json!({"quant_method": "gptq", "bits": 4, "group_size": self.group, "desc_act": false}),
            Layout::Awq => json!({"quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm"}),
            Layout::Compressed => json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": {
                    "num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": self.group}}}
            }),
        }
    }
}

/// The model of these tests, of widths that groups of 32 divide, with all linear layers but those whose names `plain` picks in four bits; dense, if there is no layout.
fn quantized(group: usize, layout: Option<Layout>, plain: &dyn Fn(&str) -> bool, change: Change<'_>) -> tempfile::TempDir {
    let model = config_with(json!({"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": false}));
    quantized_of(&model, group, layout, &|name| name.ends_with("_proj.weight") && !plain(name), change)
}

/// As [`quantized`], of any model, with the matrices in four bits whose names `picks` picks.
fn quantized_of(
    model: &ModelConfig,
    group: usize,
    layout: Option<Layout>,
    picks: &dyn Fn(&str) -> bool,
    change: Change<'_>,
) -> tempfile::TempDir {
    let dir = written(model, &|_, _| ());
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let owned = |(name, view): (String, TensorView<'_>)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    let mut tensors: BTreeMap<String, Stored> =
        SafeTensors::deserialize(&file).unwrap().tensors().into_iter().map(owned).collect();
    let names: Vec<String> = tensors.keys().filter(|name| picks(name)).cloned().collect();
    let mut settings = Value::Null;
    for name in names {
        let [rows, columns] = tensors[&name].1[..] else { panic!("{name} is no matrix") };
        let matrix = Matrix { rows, columns, group };
        match layout {
            None => tensors.get_mut(&name).unwrap().2 = matrix.dense(),
            Some(layout) => {
                tensors.remove(&name);
                let stem = name.strip_suffix("weight").unwrap();
                tensors.extend(matrix.tensors(layout).into_iter().map(|(last, tensor)| (format!("{stem}{last}"), tensor)));
                settings = matrix.config(layout);
            }
        }
    }
    change(&mut tensors);
    let views =
        tensors.iter().map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &path).unwrap();
    if layout.is_some() {
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config["quantization_config"] = settings;
        std::fs::write(&path, config.to_string()).unwrap();
    }
    dir
}

fn nothing(_: &mut BTreeMap<String, Stored>) {}

#[test]
fn matrices_of_four_bits_have_the_bits_of_the_dense_model_that_they_are() {
    let none = |_: &str| false;
    let one = |name: &str| name.contains("layers.1.self_attn.q_proj");
    let plain: [&dyn Fn(&str) -> bool; 2] = [&none, &one];
    // Kernels have no groups of 16.
    for (group, plain) in [(32, plain[0]), (16, plain[0]), (32, plain[1])] {
        for dtype in [DType::F32, DType::BF16] {
            let passes = |model: &Model| {
                let (_, adapter) = adapter(model, 4);
                let trained = train(model, &adapter, 4, &[9, 70], &mut || ControlFlow::Continue(())).unwrap();
                (trained, decode(model, &adapter))
            };
            let dense = load(&quantized(group, None, plain, &nothing), Some(dtype)).unwrap();
            let expected = passes(&dense);
            for layout in [Layout::Gptq, Layout::Awq, Layout::Compressed] {
                let dir = quantized(group, Some(layout), plain, &nothing);
                let model = load(&dir, Some(dtype)).unwrap();
                assert!(passes(&model) == expected, "{layout:?} in groups of {group}, {dtype}");
                // All of them are smaller, or those of some stacks, or none.
                match (group, plain("model.layers.1.self_attn.q_proj.weight")) {
                    (32, false) => assert!(model.weight_bytes() < dense.weight_bytes() * 6 / 10),
                    (32, true) => assert!(model.weight_bytes() < dense.weight_bytes()),
                    _ => assert_eq!(model.weight_bytes(), dense.weight_bytes()),
                }
                // What is said before it is loaded is that, but for what layouts add to either.
                let source = ModelSource::Directory(dir.path().into());
                let (said, own) = Model::weight_bytes_of(&source, Some(dtype), WeightStorage::Dense).unwrap();
                let added = dense.weight_bytes() as u64 - crate::weight_bytes(dense.config(), dtype.into());
                assert!((said..=said + added).contains(&(model.weight_bytes() as u64)), "{said}, {}", model.weight_bytes());
                assert_eq!(own, dtype);
            }
        }
    }
}

#[test]
fn what_lies_in_four_bits_stays_so_whatever_is_asked_of_the_rest() {
    let dir = quantized(32, Some(Layout::Gptq), &|_| false, &nothing);
    let at = |storage| {
        let source = ModelSource::Directory(dir.path().into());
        let model = Model::load_stored(backend(), &source, Some(DType::F32), storage).unwrap();
        let mut batch = PackedBatch::new();
        batch.push_sequence(&tokens(5, 2));
        let mut seen = [Vec::new(), Vec::new()];
        let mut observe = |what, value: &Tensor| {
            if let Some(place) = [Observed::FinalNorm, Observed::Logits].iter().position(|known| *known == what) {
                seen[place] = bits(&model.backend().to_f32_vec(value.as_ref())?);
            }
            Ok(())
        };
        model.forward_observed(&batch, &mut observe).unwrap();
        (seen, model.weight_bytes())
    };
    let ([hidden, logits], bytes) = at(WeightStorage::Dense);
    for storage in [WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of64)] {
        let ([own_hidden, own_logits], own_bytes) = at(storage);
        assert!(own_hidden == hidden, "{storage:?}: layers");
        assert!(own_logits != logits && own_bytes < bytes, "{storage:?}: the unembedding, which lies dense");
    }
}

#[test]
fn what_is_wrong_with_a_matrix_of_four_bits_is_said_by_name() {
    const STEM: &str = "model.layers.1.mlp.down_proj.";
    let refused = |layout, change: Change<'_>| load_error(&quantized(32, Some(layout), &|_| false, change), None);
    let name = |last: &str| format!("{STEM}{last}");
    let cases: [(Layout, &str, Change<'_>); 12] = [
        (Layout::Gptq, "missing tensors: model.layers.1.mlp.down_proj.scales", &|t| drop(t.remove(&name("scales")))),
        (Layout::Gptq, "missing tensors: model.layers.1.mlp.down_proj.qzeros", &|t| drop(t.remove(&name("qzeros")))),
        // Without codes nothing says that it is in four bits.
        (Layout::Awq, "missing tensors: model.layers.1.mlp.down_proj.weight", &|t| drop(t.remove(&name("qweight")))),
        (Layout::Gptq, "down_proj.g_idx has input 31 in group 1", &|t| t.get_mut(&name("g_idx")).unwrap().2[31 * 4] = 1),
        (Layout::Gptq, "down_proj.qzeros has dtype I32 and shape [4, 6], expected I32 and [3, 8]", &|t| {
            t.get_mut(&name("qzeros")).unwrap().1 = vec![4, 6];
        }),
        (Layout::Gptq, "qweight has dtype U32", &|t| t.get_mut(&name("qweight")).unwrap().0 = Dtype::U32),
        (Layout::Compressed, "weight_shape is [63, 96], not [64, 96]", &|t| {
            t.get_mut(&name("weight_shape")).unwrap().2[0] = 63
        }),
        (Layout::Awq, "model.layers.1.mlp.down_proj: weights of four bits: a scale is inf", &|t| {
            t.get_mut(&name("scales")).unwrap().2[..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        }),
        (Layout::Awq, "down_proj.scales has dtype F8_E4M3", &|t| {
            let (dtype, shape, bytes) = t.get_mut(&name("scales")).unwrap();
            (*dtype, *bytes) = (Dtype::F8_E4M3, vec![0x38; shape.iter().product()]);
        }),
        (Layout::Gptq, "has no use for: model.layers.1.mlp.down_proj.bias", &|t| {
            drop(t.insert(name("bias"), (Dtype::F16, vec![64], [&[1][..], &[0; 127]].concat())));
        }),
        (Layout::Gptq, "has no use for: model.layers.1.mlp.down_proj.bias", &|t| {
            drop(t.insert(name("bias"), (Dtype::F16, vec![3], vec![0; 6])));
        }),
        (Layout::Compressed, "has no use for: model.layers.1.mlp.down_proj.weight_packed", &|t| {
            drop(t.insert(name("weight"), (Dtype::F16, vec![64, 96], vec![0; 2 * 64 * 96])));
        }),
    ];
    for (layout, expected, change) in cases {
        let error = refused(layout, change);
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
    // Biases that are none.
    load(
        &quantized(32, Some(Layout::Gptq), &|_| false, &|t| {
            drop(t.insert(name("bias"), (Dtype::F16, vec![64], vec![0; 128])));
        }),
        None,
    )
    .unwrap();
}

#[test]
fn codes_of_which_nothing_says_how_they_lie_are_refused_for_that_reason() {
    for (layout, name) in [(Layout::Gptq, "qweight"), (Layout::Compressed, "weight_packed")] {
        let dir = quantized(32, Some(layout), &|_| false, &nothing);
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("quantization_config");
        std::fs::write(&path, config.to_string()).unwrap();
        let error = load_error(&dir, None);
        assert!(error.contains(&format!("{name} holds weights in few bits, and no quantization_config")), "{error}");
    }
}

/// A model whose embedding, to which its unembedding is tied, lies in four bits; dense, if there is no layout.
fn tied(layout: Option<Layout>, change: Change<'_>) -> tempfile::TempDir {
    let model = config_with(json!({"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 304}));
    quantized_of(&model, 32, layout, &|name| name == "model.embed_tokens.weight", change)
}

#[test]
fn an_embedding_in_four_bits_may_be_there_twice_and_with_no_other_unembedding() {
    let with_head = |first: Option<f32>| {
        move |tensors: &mut BTreeMap<String, Stored>| {
            let mut bytes = Matrix { rows: 304, columns: 64, group: 32 }.dense();
            if let Some(first) = first {
                bytes[..4].copy_from_slice(&first.to_le_bytes());
            }
            tensors.insert("lm_head.weight".into(), (Dtype::F32, vec![304, 64], bytes));
        }
    };
    for layout in [Some(Layout::Compressed), Some(Layout::Awq), None] {
        load(&tied(layout, &with_head(None)), None).unwrap();
        let error = load_error(&tied(layout, &with_head(Some(7.0))), None);
        assert!(error.contains("tie_word_embeddings is true") && error.contains("element 0 is 7, not "), "{layout:?}: {error}");
    }
}

#[test]
fn a_tied_embedding_in_four_bits_is_merged_into_two_matrices_as_the_dense_one_is() {
    let adapted = load(&tied(None, &nothing), None).unwrap();
    let (params, _) = adapter(&adapted, 4);
    let merged = |layout| {
        let (base, out) = (tied(layout, &nothing), tempfile::tempdir().unwrap());
        let source = ModelSource::Directory(base.path().into());
        crate::write_merged(&*backend(), &source, (&lora(4), &params), None, out.path()).unwrap();
        out
    };
    let (dense, int4) = (merged(None), merged(Some(Layout::Compressed)));
    let file = |dir: &tempfile::TempDir| std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let (dense_file, int4_file) = (file(&dense), file(&int4));
    let [dense_tensors, int4_tensors] = [&dense_file, &int4_file].map(|file| {
        let tensors = SafeTensors::deserialize(file).unwrap().tensors();
        tensors.into_iter().map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
    });
    let (dense_tensors, int4_tensors): (BTreeMap<String, Stored>, BTreeMap<String, Stored>) =
        (dense_tensors.collect(), int4_tensors.collect());
    assert!(dense_tensors == int4_tensors, "{:?} and {:?}", dense_tensors.keys(), int4_tensors.keys());
    assert_ne!(int4_tensors["lm_head.weight"], int4_tensors["model.embed_tokens.weight"]);
    let config: Value = serde_json::from_str(&std::fs::read_to_string(int4.path().join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["tie_word_embeddings"], config.get("quantization_config")), (&Value::Bool(false), None));
    load(&int4, None).unwrap();
}

/// The tensors of a model's file.
fn tensors_in(dir: &tempfile::TempDir) -> BTreeMap<String, Stored> {
    let file = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    tensors.into_iter().map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect()
}

#[test]
fn what_a_model_leaves_aside_is_merged_as_the_numbers_that_it_stands_for_too() {
    const STEM: &str = "model.layers.9.eh_proj.";
    let model = config_with(json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 9, "num_key_value_heads": 4, "head_dim": null, "hidden_size": 64, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1
    }));
    let (params, _) = adapter(&Model::random(backend(), model.clone(), 7, DType::F32).unwrap(), 4);
    let matrix = Matrix { rows: 40, columns: 64, group: 32 };
    // Its bias is its own, as far as anyone knows.
    let bias = || (Dtype::F32, vec![40], vec![0; 160]);
    let merged = |layout: Option<Layout>, change: Change<'_>| {
        let aside = |tensors: &mut BTreeMap<String, Stored>| {
            let own = match layout {
                Some(layout) => matrix.tensors(layout),
                None => vec![("weight", (Dtype::F32, vec![40, 64], matrix.dense()))],
            };
            let own = own.into_iter().chain([("bias", bias())]);
            tensors.extend(own.map(|(last, tensor)| (format!("{STEM}{last}"), tensor)));
            change(tensors);
        };
        let picks = |name: &str| name.contains("self_attn") && name.ends_with("o_proj.weight");
        let (base, out) = (quantized_of(&model, 32, layout, &picks, &aside), tempfile::tempdir().unwrap());
        let source = ModelSource::Directory(base.path().into());
        load(&base, None).unwrap();
        crate::write_merged(&*backend(), &source, (&lora(4), &params), None, out.path()).map(|()| tensors_in(&out))
    };
    let dense = merged(None, &nothing).unwrap();
    for layout in [Layout::Gptq, Layout::Awq, Layout::Compressed] {
        let int4 = merged(Some(layout), &nothing).unwrap();
        assert!(int4 == dense, "{layout:?}: {:?} and {:?}", int4.keys(), dense.keys());
    }
    let without =
        |last: &'static str| move |tensors: &mut BTreeMap<String, Stored>| drop(tensors.remove(&format!("{STEM}{last}")));
    for (layout, last) in [(Layout::Gptq, "qzeros"), (Layout::Awq, "scales"), (Layout::Compressed, "weight_shape")] {
        let error = merged(Some(layout), &without(last)).unwrap_err().to_string();
        assert!(error.contains(&format!("missing tensors: {STEM}{last}")), "{layout:?}: {error}");
    }
}

/// Without the groups of its inputs nobody knows their order.
#[test]
fn inputs_that_may_have_another_order_are_not_taken_in_the_one_that_there_is() {
    let without = |t: &mut BTreeMap<String, Stored>| t.retain(|name, _| !name.ends_with("g_idx"));
    let dir = quantized(32, Some(Layout::Gptq), &|_| false, &without);
    load(&dir, None).unwrap();
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["quantization_config"]["desc_act"] = Value::Bool(true);
    std::fs::write(&path, config.to_string()).unwrap();
    let error = load_error(&dir, None);
    assert!(error.contains("missing tensors: model.layers.") && error.contains(".g_idx"), "{error}");
}
