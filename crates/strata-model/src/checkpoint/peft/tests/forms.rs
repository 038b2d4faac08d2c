//! Ranks and scales of modules, and adapters as stock PEFT has them.

use super::*;
use crate::lora::{ExpertModule, FusedRows, ModulePart, PairShape};

const EXPERTS: usize = 3;
const HIDDEN: usize = 4;
const WIDTH: usize = 5;

/// Modules of a model whose layer 1 is dense and whose layers 0 and 2 have experts; `step` 2: gate and up come by turns.
fn modules_with_experts(step: usize) -> Vec<LoraModule> {
    let module = |path, part, layers: &[usize], in_features, out_features| LoraModule {
        path,
        part,
        layers: layers.to_vec(),
        experts: None,
        parts: Vec::new(),
        in_features,
        out_features,
    };
    let of_experts = |projection, tinker_name, fused, in_features, out_features| LoraModule {
        experts: Some(ExpertModule { count: EXPERTS, projection, tinker_name, fused }),
        ..module("mlp.experts", Part::Mlp, &[0, 2], in_features, out_features)
    };
    let gate_up = |first| FusedRows { parameter: "gate_up_proj", rows: 2 * WIDTH, first, step };
    let down = FusedRows { parameter: "down_proj", rows: HIDDEN, first: 0, step: 1 };
    vec![
        module("self_attn.q_proj", Part::Attention, &[0, 1, 2], HIDDEN, 6),
        of_experts("gate_proj", "w1", gate_up(0), HIDDEN, WIDTH),
        of_experts("up_proj", "w3", gate_up(if step == 1 { WIDTH } else { 1 }), HIDDEN, WIDTH),
        of_experts("down_proj", "w2", down, WIDTH, HIDDEN),
        module("mlp.gate_proj", Part::Mlp, &[1], HIDDEN, 7),
        module("mlp.shared_experts.gate_proj", Part::Mlp, &[0, 2], HIDDEN, 3),
        module("lm_head", Part::Unembed, &[0], HIDDEN, 10),
    ]
}

fn random(modules: &[LoraModule], config: &LoraConfig) -> LoraParams {
    let mut params = LoraParams::init(&*BACKEND, modules, config, 5).unwrap();
    let other = LoraParams::init(&*BACKEND, modules, config, 6).unwrap();
    for (tensor, values) in params.tensors_mut().zip(other.tensors()) {
        // A stays; B, which a fresh adapter has as zeros, takes numbers too.
        if bytes_of(tensor).iter().all(|byte| *byte == 0) {
            let numbers: Vec<u8> = (0..values.size_bytes() / 4).flat_map(|i| (0.25 + i as f32 / 64.0).to_le_bytes()).collect();
            fill(tensor, &numbers);
        }
    }
    params
}

fn written_as(format: AdapterFormat, modules: &[LoraModule], config: &LoraConfig, params: &LoraParams) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_adapter(&*BACKEND, dir.path(), modules, (config, params), "org/base", format).unwrap();
    dir
}

fn json_of(dir: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dir.join(CONFIG_FILE)).unwrap()).unwrap()
}

/// `scale * B * A` of every entry of a module, `[entries, out, in]`.
fn product(modules: &[LoraModule], config: &LoraConfig, params: &LoraParams, index: usize) -> Vec<f32> {
    let (module, PairShape { rank, scale }) = (&modules[index], config.shape_of(index, &modules[index]));
    let stack = params.stacks[index].as_ref().unwrap();
    let (a, b) = (BACKEND.to_f32_vec(stack.a.as_ref()).unwrap(), BACKEND.to_f32_vec(stack.b.as_ref()).unwrap());
    let (n_in, n_out) = (module.in_features, module.out_features);
    let mut all = Vec::new();
    for entry in 0..module.entries() {
        for (o, i) in (0..n_out).flat_map(|o| (0..n_in).map(move |i| (o, i))) {
            let terms = (0..rank).map(|k| b[(entry * rank + k) * n_out + o] * a[(entry * rank + k) * n_in + i]);
            all.push(scale * terms.sum::<f32>());
        }
    }
    all
}

/// The product that PEFT's `ParamWrapper` computes of a pair, `[experts, out, in]`: `einsum("o r e, e r i -> e o i")` of
/// `B.reshape(out, r, experts)` and `A.reshape(experts, r, in)`.
fn product_of_peft(file: &SafeTensors<'_>, path: &str, scale: f32) -> Vec<f32> {
    let read = |name: String| {
        let view = file.tensor(&name).unwrap_or_else(|_| panic!("{name} in {:?}", file.names()));
        let values: Vec<f32> = view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (values, [view.shape()[0], view.shape()[1]])
    };
    let (a, [all, n_in]) = read(format!("{path}.lora_A.weight"));
    let (b, [n_out, _]) = read(format!("{path}.lora_B.weight"));
    let rank = all / EXPERTS;
    let mut product = Vec::new();
    for e in 0..EXPERTS {
        for (o, i) in (0..n_out).flat_map(|o| (0..n_in).map(move |i| (o, i))) {
            let terms = (0..rank).map(|r| b[(o * rank + r) * EXPERTS + e] * a[(e * rank + r) * n_in + i]);
            product.push(scale * terms.sum::<f32>());
        }
    }
    product
}

#[test]
fn ranks_and_scales_of_modules_are_written_and_read_back() {
    let own = BTreeMap::from([
        (0, PairShape { rank: 5, scale: 0.1 }),
        // Of another rank and the same alpha, which needs no saying.
        (1, PairShape { rank: 2, scale: 16.0 }),
        (2, PairShape { rank: RANK, scale: 1e-3 }),
        (3, PairShape { rank: 7, scale: 32.0 / 3.0 }),
    ]);
    let config = LoraConfig { own, ..all_parts() };
    let (dir, params) = written(&config);
    let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
    assert_eq!(read.config, config);
    assert_eq!(bits(&read.params), bits(&params));
    let json = json_of(dir.path());
    assert_eq!(json["rank_pattern"], json!({r"self_attn\.q_proj": 5, r"self_attn\.v_proj": 2, "unembed_tokens": 7}));
    assert!(
        json["alpha_pattern"][r"self_attn\.v_proj"].is_null() && json["alpha_pattern"]["unembed_tokens"].is_number(),
        "{json}"
    );
    let (dir, params) = written(&all_parts());
    assert_eq!(json_of(dir.path())["rank_pattern"], json!({}));
    assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
}

#[test]
fn the_first_key_that_matches_the_end_of_a_path_gives_rank_and_alpha() {
    let config = LoraConfig { own: BTreeMap::from([(0, PairShape { rank: 5, scale: 6.4 })]), ..all_parts() };
    let read = |changes: Value| {
        let (dir, _) = written(&config);
        change_config(dir.path(), changes);
        read_adapter(&*BACKEND, dir.path(), &modules()).map(|read| read.config).map_err(|e| e.to_string())
    };
    for key in ["q_proj", "self_attn.q_proj", "q_.*", ".*q_proj", r"model\.layers\.\d\.self_attn\.q_proj", "q_proj|k_proj"] {
        let alphas = json!({key: 10, "self_attn.*": 64, "nothing_here": 3});
        let ours = read(json!({"rank_pattern": {key: 5, ".*": 3}, "alpha_pattern": alphas})).unwrap();
        assert_eq!(ours.own[&0], PairShape { rank: 5, scale: 2.0 }, "{key}");
        assert_eq!(ours.own[&1], PairShape { rank: 3, scale: 64.0 / 3.0 }, "{key}");
        assert_eq!(ours.own.len(), 2, "{key}");
    }
    for key in ["_proj", "q_pro", "self_attn", "attn.q_proj", "q_proj.x"] {
        let error = read(json!({"rank_pattern": {key: 5}})).unwrap_err();
        assert!(error.contains("has shape [5, 4], expected [3, 4]"), "{key}: {error}");
    }
    let error = read(json!({"rank_pattern": {"layers.0.self_attn.q_proj": 5}})).unwrap_err();
    assert!(
        error.contains("rank_pattern has 5 for model.layers.0.self_attn.q_proj and 3 for model.layers.1.self_attn.q_proj"),
        "{error}"
    );
    // Of each module its own root.
    let ours = read(json!({"rank_pattern": {"q_proj": 5}, "alpha_pattern": {}, "use_rslora": true})).unwrap();
    let (q, others) = (ours.own[&0].scale, ours.scale());
    assert!((q - 32.0 / 5f32.sqrt()).abs() < 1e-6 && (others - 32.0 / 3f32.sqrt()).abs() < 1e-5, "{q} {others}");
}

#[test]
fn ranks_alphas_and_parameters_of_an_adapter_of_a_composite_are_found_by_their_paths_there() {
    let modules = modules_with_experts(1);
    let config = LoraConfig { rank: 6, own: BTreeMap::from([(0, PairShape { rank: 5, scale: 2.0 })]), ..all_parts() };
    let params = random(&modules, &config);
    let read = |changes: Value| {
        let dir = written_as(AdapterFormat::Peft, &modules, &config, &params);
        let renamed = |name: &str| name.strip_prefix("base_model.model.model.layers.").map(in_composite);
        change_tensors(dir.path(), |name| Some(renamed(name).unwrap_or_else(|| name.into())));
        change_config(dir.path(), changes);
        read_adapter(&*BACKEND, dir.path(), &modules).map(|read| read.config).map_err(|e| e.to_string())
    };
    let pattern = |layers: &str, gate_up: f64| {
        let (q, gate_up_path) = (format!(r"{layers}.\d.self_attn.q_proj"), format!("{layers}.*gate_up_proj"));
        let down = r"mlp\.experts\.down_proj";
        let alphas = json!({&q: 10, &gate_up_path: 4.0 * gate_up, down: 2});
        let parameters = ["mlp.experts.down_proj", "mlp.gate_proj.weight", "mlp.shared_experts.gate_proj.weight"];
        let of_layers = [0, 2].map(|l| format!("{layers}.{l}.mlp.experts.gate_up_proj"));
        let parameters = [&parameters.map(String::from)[..], &of_layers].concat();
        json!({"rank_pattern": {q: 5, gate_up_path: 4, down: 2}, "alpha_pattern": alphas, "target_parameters": parameters})
    };
    let ours = read(pattern("model.language_model.layers", 3.0)).unwrap();
    assert_eq!(ours.own[&0], PairShape { rank: 5, scale: 2.0 });
    assert_eq!([1, 2].map(|index| ours.own[&index]), [PairShape { rank: 4, scale: 3.0 }; 2]);
    let error = read(pattern("model.layers", 3.0)).unwrap_err();
    assert!(error.contains("target_parameters names \"model.layers.0.mlp.experts.gate_up_proj\""), "{error}");
}

#[test]
fn what_is_written_for_peft_on_a_composite_has_its_names_and_is_read_as_it_was() {
    let modules = modules_with_experts(1);
    let params = random(&modules, &all_parts());
    let dir = written_as(AdapterFormat::PeftOfComposite, &modules, &all_parts(), &params);
    let checkpoint = Checkpoint::open_file(&dir.path().join(WEIGHTS_FILE)).unwrap();
    assert!(checkpoint.contains("base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"));
    assert!(checkpoint.contains("base_model.model.model.language_model.layers.0.mlp.experts.base_layer.lora_A.weight"));
    assert!(checkpoint.contains("base_model.model.lm_head.lora_A.weight"), "the unembedding is no part of that part");
    let alone = written_as(AdapterFormat::Peft, &modules, &all_parts(), &params);
    let [composite, alone] = [dir, alone].map(|dir| read_adapter(&*BACKEND, dir.path(), &modules).unwrap());
    assert_eq!(composite.config, alone.config);
    for index in 0..modules.len() {
        let [a, b] = [&composite, &alone].map(|read| product(&modules, &read.config, &read.params, index));
        assert_eq!(a, b, "module {index}");
    }
}

#[test]
fn a_name_of_experts_that_is_also_one_of_other_mlps_needs_tensors_of_these_only() {
    let modules = modules_with_experts(1);
    let mut config = LoraConfig { rank: 6, ..all_parts() };
    (1..4).for_each(|index| config.left_out.insert(index));
    let dir = written_as(AdapterFormat::Tinker, &modules, &config, &random(&modules, &config));
    assert_eq!(json_of(dir.path())["target_modules"], json!(["gate_proj", "gate_proj", "q_proj", "unembed_tokens"]));
    let read = |targets: Value| {
        change_config(dir.path(), json!({"target_modules": targets}));
        read_adapter(&*BACKEND, dir.path(), &modules).map(|read| read.config).map_err(|e| e.to_string())
    };
    for targets in [json!(["gate_proj", "lm_head", "q_proj"]), json!(".*(gate_proj|lm_head|q_proj)")] {
        assert_eq!(read(targets.clone()), Ok(config.clone()), "{targets}");
    }
    for name in ["w1", "experts.0.gate_proj"] {
        let error = read(json!(["gate_proj", "lm_head", "q_proj", name])).unwrap_err();
        assert!(error.contains("target_modules names mlp.experts, but"), "{name}: {error}");
    }
    // As PEFT on transformers 5 has them of models whose experts are no modules: they name nothing.
    for targets in
        [json!(["gate_proj", "up_proj", "down_proj", "lm_head", "q_proj"]), json!(".*(gate_proj|up_proj|lm_head|q_proj)")]
    {
        assert_eq!(read(targets.clone()), Ok(config.clone()), "{targets}");
    }
}

#[test]
fn a_list_of_all_layers_says_nothing() {
    let (dir, params) = written(&all_parts());
    for layers in [json!([]), json!([0, 1]), json!([0, 1, 2]), Value::Null] {
        change_config(dir.path(), json!({"layers_to_transform": layers}));
        assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params), "{layers}");
    }
}

#[test]
fn a_name_that_two_modules_end_with_is_written_as_a_path_where_one_carries_nothing() {
    let modules = modules_with_experts(1);
    let mut config = LoraConfig { attention: false, unembed: false, ..all_parts() };
    config.left_out.insert(5);
    let dir = written_as(AdapterFormat::Tinker, &modules, &config, &random(&modules, &config));
    assert_eq!(read_adapter(&*BACKEND, dir.path(), &modules).unwrap().config, config);
}

#[test]
fn pefts_form_computes_the_same_and_reads_back() {
    for step in [1, 2] {
        let modules = modules_with_experts(step);
        // Experts of rank 2, all of one scale.
        let config = LoraConfig { rank: 6, ..all_parts() };
        let params = random(&modules, &config);
        let dir = written_as(AdapterFormat::Peft, &modules, &config, &params);
        let json = json_of(dir.path());
        assert_eq!(json["target_modules"], json!(["lm_head", "q_proj"]));
        let parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate_proj.weight"];
        assert_eq!(json["target_parameters"], json!(([&parameters[..], &["mlp.shared_experts.gate_proj.weight"]].concat())));
        for (key, rank) in [(r"mlp\.experts\.gate_up_proj", 4), (r"mlp\.experts\.down_proj", 2)] {
            assert_eq!(json["rank_pattern"][key], rank);
            assert_eq!((json["alpha_pattern"][key].as_f64().unwrap() / f64::from(rank)) as f32, config.scale());
        }
        assert_eq!([&json["rank_pattern"], &json["alpha_pattern"]].map(|p| p.as_object().unwrap().len()), [2, 2]);
        let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert!(file.names().iter().all(|name| !name.contains(".w1.") && !name.contains("unembed")), "{:?}", file.names());
        file.tensor("base_model.model.lm_head.lora_B.weight").unwrap();
        file.tensor("base_model.model.model.layers.2.mlp.shared_experts.gate_proj.lora_B.weight").unwrap();
        let read = read_adapter(&*BACKEND, dir.path(), &modules).unwrap();
        assert_eq!(read.config.own.get(&1), Some(&PairShape { rank: 4, scale: config.scale() }));
        assert_eq!(read.config.own.keys().copied().collect::<Vec<_>>(), [1, 2]);
        for index in 0..modules.len() {
            let ours = product(&modules, &config, &params, index);
            assert!(ours.iter().all(|v| *v != 0.0));
            assert_eq!(product(&modules, &read.config, &read.params, index), ours, "{}", modules[index].path);
        }
        for (place, layer) in [0, 2].into_iter().enumerate() {
            let experts = format!("base_model.model.model.layers.{layer}.mlp.experts");
            let of_layer = |index: usize, rows: usize, width: usize| {
                let all = product(&modules, &config, &params, index);
                all[place * EXPERTS * rows * width..][..EXPERTS * rows * width].to_vec()
            };
            assert_eq!(product_of_peft(&file, &experts, config.scale()), of_layer(3, HIDDEN, WIDTH));
            let fused = product_of_peft(&file, &format!("{experts}.base_layer"), config.scale());
            for (index, up) in [(1, 0), (2, 1)] {
                let row = |o: usize| if step == 1 { up * WIDTH + o } else { 2 * o + up };
                let rows = (0..EXPERTS).flat_map(|e| (0..WIDTH).map(move |o| e * 2 * WIDTH + row(o)));
                let theirs: Vec<f32> = rows.flat_map(|row| fused[row * HIDDEN..][..HIDDEN].to_vec()).collect();
                assert_eq!(theirs, of_layer(index, WIDTH, HIDDEN), "module {index}, step {step}");
            }
        }
        // And once more, which changes nothing but whose rank is whose.
        let again = written_as(AdapterFormat::Tinker, &modules, &read.config, &read.params);
        let reread = read_adapter(&*BACKEND, again.path(), &modules).unwrap();
        assert_eq!((&reread.config, bits(&reread.params)), (&read.config, bits(&read.params)));
        assert_eq!(json_of(again.path())["rank_pattern"], json!({}));
    }
}

#[test]
fn one_projection_of_experts_goes_out_and_comes_back_alone() {
    let modules = modules_with_experts(1);
    for (kept, comes_back) in [(vec![1], vec![1, 2]), (vec![3], vec![3]), (vec![2, 3], vec![1, 2, 3])] {
        let mut config = LoraConfig { rank: 6, attention: false, unembed: false, ..all_parts() };
        (1..6).filter(|index| !kept.contains(index)).for_each(|index| config.left_out.insert(index));
        let params = random(&modules, &config);
        let dir = written_as(AdapterFormat::Peft, &modules, &config, &params);
        let read = read_adapter(&*BACKEND, dir.path(), &modules).unwrap();
        let carried: Vec<usize> = (0..modules.len()).filter(|&i| read.config.carries(i, &modules[i])).collect();
        assert_eq!(carried, comes_back);
        for index in kept {
            let ours = product(&modules, &config, &params, index);
            assert_eq!(product(&modules, &read.config, &read.params, index), ours, "{index}");
        }
        assert_eq!(json_of(dir.path())["target_modules"], json!([]));
    }
}

#[test]
fn a_scale_of_its_own_is_written_in_either_form_and_gate_and_up_have_one_in_pefts() {
    let modules = modules_with_experts(1);
    let scaled = |gate: f32| {
        let pair = |scale| PairShape { rank: 2, scale };
        let own = BTreeMap::from([(1, pair(gate)), (2, pair(0.3)), (3, pair(0.7)), (5, PairShape { rank: 4, scale: 0.9 })]);
        LoraConfig { rank: 6, own, ..all_parts() }
    };
    let config = scaled(0.3);
    let params = random(&modules, &config);
    for format in [AdapterFormat::Tinker, AdapterFormat::Peft] {
        let dir = written_as(format, &modules, &config, &params);
        let read = read_adapter(&*BACKEND, dir.path(), &modules).unwrap();
        for index in 0..modules.len() {
            let ours = product(&modules, &config, &params, index);
            assert_eq!(product(&modules, &read.config, &read.params, index), ours, "{format:?} {}", modules[index].path);
        }
    }
    let config = scaled(0.4);
    let dir = tempfile::tempdir().unwrap();
    let write = |format| write_adapter(&*BACKEND, dir.path(), &modules, (&config, &params), "org/base", format);
    let error = write(AdapterFormat::Peft).unwrap_err().to_string();
    assert!(error.contains("mlp.experts.gate_up_proj, and this adapter has 0.4 and 0.3"), "{error}");
    write(AdapterFormat::Tinker).unwrap();
    assert_eq!(read_adapter(&*BACKEND, dir.path(), &modules).unwrap().config, config);
}

#[test]
fn what_target_parameters_names_and_what_there_is_must_agree() {
    let modules = modules_with_experts(1);
    let config = LoraConfig { rank: 6, ..all_parts() };
    let params = random(&modules, &config);
    let read = |changes: Value, change: &dyn Fn(&str) -> Option<String>| {
        let dir = written_as(AdapterFormat::Peft, &modules, &config, &params);
        change_config(dir.path(), changes);
        change_tensors(dir.path(), change);
        read_adapter(&*BACKEND, dir.path(), &modules).map(|_| ()).map_err(|e| e.to_string())
    };
    let all = |name: &str| Some(name.to_string());
    let rest = ["mlp.gate_proj.weight", "shared_experts.gate_proj.weight"];
    let targets = |names: &[&str]| json!({"target_parameters": ([names, &rest[..]].concat())});
    assert_eq!(read(targets(&["gate_up_proj", "down_proj"]), &all), Ok(()));
    let by_layer = ["model.layers.0.mlp.experts.gate_up_proj", "layers.2.mlp.experts.gate_up_proj", "experts.down_proj"];
    assert_eq!(read(targets(&by_layer), &all), Ok(()));
    for (changes, complaint) in [
        (targets(&["gate_up_proj"]), "holds tensors for mlp.experts, which target_modules does not name"),
        (targets(&["gate_up_proj", "down_proj", "banana"]), "target_parameters names \"banana\", which carries no LoRA here"),
        (targets(&["gate_up_proj", "down_proj", "roj"]), "target_parameters names \"roj\""),
        (json!({"target_parameters": "gate_up_proj"}), "target_parameters is \"gate_up_proj\", not a list of names"),
        (json!({"target_parameters": [3]}), "target_parameters is [3], not a list of names"),
        (json!({"target_parameters": ["gate_up_proj"], "target_modules": null}), "which target_parameters does not name"),
        (json!({"rank_pattern": {}}), "has shape [12, 4], expected [18, 4]"),
    ] {
        let error = read(changes.clone(), &all).unwrap_err();
        assert!(error.contains(complaint), "{changes}: {error}");
    }
    // Where one parameter alone carries LoRA in a layer, its pair is the outermost there.
    let one_in_a_layer = |name: &str| match name.contains("layers.0.mlp.experts.") {
        true => name.contains(".base_layer.").then(|| name.replace(".base_layer.", ".")),
        false => Some(name.to_string()),
    };
    assert_eq!(read(targets(&["gate_up_proj", "layers.2.mlp.experts.down_proj"]), &one_in_a_layer), Ok(()));
    let error = read(targets(&["gate_up_proj", "down_proj"]), &one_in_a_layer).unwrap_err();
    assert!(error.contains("layers.0.mlp.experts.lora_A.weight has shape [12, 4], expected [6, 5]"), "{error}");
    let error = read(
        json!({"target_parameters": rest, "target_modules": ["q_proj", "lm_head", "gate_proj", "up_proj", "down_proj"]}),
        &all,
    );
    assert!(error.unwrap_err().contains("a parameter of mlp.experts, which target_parameters does not name"));
    let without_down = |name: &str| (!name.contains("experts.lora_")).then(|| name.to_string());
    let error = read(json!({}), &without_down).unwrap_err();
    assert!(error.contains("target_parameters names mlp.experts.down_proj, but the adapter holds nothing"), "{error}");
    let of_one_layer = |name: &str| (!name.contains("layers.2.mlp.experts.base_layer.lora_A")).then(|| name.to_string());
    assert!(read(json!({}), &of_one_layer).unwrap_err().contains("missing tensors"));
    // The other way round in the nest: shapes say which is which.
    let turned = |name: &str| {
        let (inner, outer) = ("experts.base_layer.lora_", "experts.lora_");
        Some(if name.contains(inner) { name.replace(inner, outer) } else { name.replace(outer, inner) })
    };
    assert_eq!(read(json!({}), &turned), Ok(()));
}

#[test]
fn names_of_experts_among_modules_are_of_nothing_where_experts_are_named_by_their_parameters() {
    let modules = modules_with_experts(1);
    let read = |config: &LoraConfig, targets: &[&str], parameters: &[&str]| {
        let dir = written_as(AdapterFormat::Peft, &modules, config, &random(&modules, config));
        change_config(dir.path(), json!({"target_modules": targets, "target_parameters": parameters}));
        read_adapter(&*BACKEND, dir.path(), &modules).map(|adapter| adapter.config).map_err(|e| e.to_string())
    };
    let mut config = LoraConfig { rank: 6, ..all_parts() };
    [4, 5].into_iter().for_each(|index| config.left_out.insert(index));
    // PEFT, asked for `.*_proj`, writes the one among both.
    let parameters = ["down_proj", "gate_up_proj"];
    assert!(read(&config, &["q_proj", "lm_head", "gate_up_proj"], &parameters).unwrap().left_out == config.left_out);
    let error = read(&config, &["q_proj", "lm_head", "gate_up_proj"], &["down_proj", "experts.gate_up_proj"]).unwrap_err();
    assert!(error.contains("target_modules names \"gate_up_proj\""), "{error}");
    // No module of the others is called so either.
    config.left_out.insert(3);
    assert!(read(&config, &["q_proj", "lm_head", "down_proj"], &["gate_up_proj"]).unwrap().left_out == config.left_out);
}

#[test]
fn parts_of_a_module_with_an_a_each_are_read_as_one_pair() {
    let of_parts = |parts: Vec<ModulePart>, path, out_features| LoraModule {
        path,
        part: Part::Attention,
        layers: vec![0, 2],
        experts: None,
        parts,
        in_features: HIDDEN,
        out_features,
    };
    let rows = [("linear_attn.in_proj_q", 2), ("linear_attn.in_proj_k", 2), ("linear_attn.in_proj_v", 5)];
    let parts = rows.map(|(path, rows)| ModulePart { path, rows });
    let whole = [of_parts(parts.to_vec(), "linear_attn.in_proj_qkv", 9)];
    // What the tools write is what we write of a model that has the parts as modules.
    let apart = rows.map(|(path, rows)| of_parts(Vec::new(), path, rows));
    let config = LoraConfig { mlp: false, unembed: false, ..all_parts() };
    let params = random(&apart, &config);
    let dir = written_as(AdapterFormat::Tinker, &apart, &config, &params);
    let read = read_adapter(&*BACKEND, dir.path(), &whole).unwrap();
    assert_eq!(read.config.own, BTreeMap::from([(0, PairShape { rank: 3 * RANK, scale: config.scale() })]));
    let ours = product(&whole, &read.config, &read.params, 0);
    for layer in 0..2 {
        let expected: Vec<f32> = (0..3)
            .flat_map(|part| {
                product(&apart, &config, &params, part)[layer * rows[part].1 * HIDDEN..][..rows[part].1 * HIDDEN].to_vec()
            })
            .collect();
        assert_eq!(ours[layer * 9 * HIDDEN..][..9 * HIDDEN], expected);
    }
    // Written again it is one module, and reads back as such.
    let again = written_as(AdapterFormat::Tinker, &whole, &read.config, &read.params);
    let reread = read_adapter(&*BACKEND, again.path(), &whole).unwrap();
    assert_eq!((&reread.config, bits(&reread.params)), (&read.config, bits(&read.params)));
    // All parts or none.
    let error = |keep: &dyn Fn(&str) -> bool| {
        let dir = written_as(AdapterFormat::Tinker, &apart, &config, &params);
        change_tensors(dir.path(), |name| keep(name).then(|| name.into()));
        read_adapter(&*BACKEND, dir.path(), &whole).unwrap_err().to_string()
    };
    let missing = error(&|name| !name.contains("in_proj_k"));
    assert!(missing.contains("missing tensors") && missing.contains("layers.2.linear_attn.in_proj_k.lora_B"), "{missing}");
    change_config(dir.path(), json!({"rank_pattern": {"in_proj_q": 2}}));
    let uneven = read_adapter(&*BACKEND, dir.path(), &whole).unwrap_err().to_string();
    assert!(
        uneven.contains("has 2 for model.layers.0.linear_attn.in_proj_q and 3 for model.layers.0.linear_attn.in_proj_k"),
        "{uneven}"
    );
}

#[test]
fn layers_that_carry_nothing_are_zeros_on_both_sides_and_have_no_gradient_in_the_file() {
    let (dir, params) = written(&all_parts());
    change_tensors(dir.path(), |name| (!name.contains("layers.0.")).then(|| name.into()));
    assert!(read_error(dir.path()).contains("missing tensors"));
    change_config(dir.path(), json!({"layers_to_transform": [1]}));
    let of_all = |names: Value| change_config(dir.path(), json!({"target_modules": names}));
    // What is in no layer PEFT takes by its whole path.
    of_all(json!(["q_proj", "v_proj", "down_proj", "model.lm_head"]));
    assert!(read_error(dir.path()).contains("model.lm_head"));
    let names = json!(["q_proj", "v_proj", "down_proj", "lm_head"]);
    // Layers are left out by their numbers, or by the paths of modules.
    let paths = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"].map(|path| format!("layers.1.{path}"));
    for changes in [
        json!({"target_modules": names}),
        json!({"target_modules": [paths[0], paths[1], paths[2], "lm_head"], "layers_to_transform": null}),
        json!({"target_modules": r"model\.layers\.1\..*_proj|lm_head"}),
        json!({"target_modules": names, "exclude_modules": r".*layers\.0\..*"}),
        json!({"exclude_modules": ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "0.mlp.down_proj"]}),
        json!({"target_modules": "all-linear"}),
    ] {
        change_config(dir.path(), changes.clone());
        let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
        assert_eq!(read.config, all_parts(), "{changes}");
        for (ours, all) in read.params.stacks.iter().flatten().zip(params.stacks.iter().flatten()).take(3) {
            for (ours, all) in [(&ours.a, &all.a), (&ours.b, &all.b)] {
                let (ours, all) = (bytes_of(ours), bytes_of(all));
                let half = ours.len() / 2;
                assert!(ours[..half].iter().all(|byte| *byte == 0) && ours[half..] == all[half..], "{changes}");
            }
        }
    }
    let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
    let given = gradient_as_given(&*BACKEND, dir.path(), &modules(), &read.params).unwrap();
    let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(given.len(), file.len());
    for (name, values) in given {
        assert_eq!(file.tensor(&name).unwrap().data(), values.as_ref().as_bytes(), "{name}");
    }
    for (key, value) in [
        ("layers_to_transform", json!([0])),
        ("layers_to_transform", json!("all")),
        ("layers_pattern", json!(["blocks"])),
        ("target_modules", json!(".*_proj|lm_head")),
    ] {
        let (dir, _) = written(&all_parts());
        change_config(dir.path(), json!({"layers_to_transform": [1]}));
        change_config(dir.path(), json!({key: value}));
        let error = read_error(dir.path());
        assert!(error.contains("layers_"), "{key}: {error}");
    }
}

#[test]
fn what_several_of_ours_read_has_the_sum_of_their_gradients() {
    for step in [1, 2] {
        let modules = modules_with_experts(step);
        let config = LoraConfig { rank: 6, ..all_parts() };
        let params = random(&modules, &config);
        let dir = written_as(AdapterFormat::Peft, &modules, &config, &params);
        // Of ours as it is read: gate and up have the A of both.
        let read = read_adapter(&*BACKEND, dir.path(), &modules).unwrap();
        let mut gradient = LoraParams::zeros(&*BACKEND, &modules, &read.config).unwrap();
        for (place, tensor) in gradient.tensors_mut().enumerate() {
            let values: Vec<u8> =
                (0..tensor.size_bytes() / 4).flat_map(|i| ((place * 1000 + i) as f32).to_le_bytes()).collect();
            fill(tensor, &values);
        }
        // A change of the file changes a sum of ours times the gradient as much as it does one of the file's.
        let dot = |a: &[u8], b: &[u8]| -> f64 {
            let of =
                |bytes: &[u8]| -> Vec<f64> { bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect() };
            of(a).iter().zip(of(b)).map(|(a, b)| a * b).sum()
        };
        let ours: f64 = read.params.tensors().zip(gradient.tensors()).map(|(a, b)| dot(&bytes_of(a), &bytes_of(b))).sum();
        let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let given = gradient_as_given(&*BACKEND, dir.path(), &modules, &gradient).unwrap();
        assert_eq!(given.len(), file.len());
        let theirs = given.iter().map(|(name, values)| dot(file.tensor(name).unwrap().data(), values.as_ref().as_bytes()));
        let theirs: f64 = theirs.sum();
        assert!((ours - theirs).abs() <= 1e-6 * ours.abs().max(1.0), "step {step}: {ours} and {theirs}");
    }
}

#[test]
fn a_configuration_says_which_form_a_file_has_and_keeps_stock_peft_from_a_part_of_it() {
    let modules = modules_with_experts(1);
    let all = all_parts();
    let (of_experts, of_unembedding) = (LoraConfig { unembed: false, ..all.clone() }, LoraConfig { mlp: false, ..all.clone() });
    let neither = LoraConfig { mlp: false, unembed: false, ..all.clone() };
    for (config, format, is_loaded) in [
        (&all, AdapterFormat::Tinker, false),
        (&of_experts, AdapterFormat::Tinker, false),
        (&of_unembedding, AdapterFormat::Tinker, false),
        (&neither, AdapterFormat::Tinker, true),
        (&neither, AdapterFormat::TinkerOfComposite, false),
        (&all, AdapterFormat::Peft, true),
        (&all, AdapterFormat::PeftOfComposite, true),
    ] {
        let dir = written_as(format, &modules, config, &random(&modules, config));
        let json = json_of(dir.path());
        assert_eq!(json["task_type"] == "CAUSAL_LM", is_loaded, "{format:?} {json}");
        assert!(is_loaded || json["task_type"].as_str().unwrap().contains("strata export --format peft"));
        let names_lm_head = json["target_modules"].as_array().unwrap().contains(&"lm_head".into());
        assert_eq!(names_lm_head, config.unembed && format.is_peft(), "{format:?} {json}");
        let file = Checkpoint::open_file(&dir.path().join(WEIGHTS_FILE)).unwrap();
        assert_eq!(file.metadata("form").unwrap(), if format.is_peft() { "peft" } else { "tinker" });
        assert_eq!(file.metadata("format").unwrap(), "pt");
        let of_composite =
            file.names().filter(|name| name.contains("model.layers.")).any(|name| !name.contains("model.language_model."));
        assert_eq!(of_composite, format != AdapterFormat::PeftOfComposite, "{format:?}");
        assert_eq!(
            read_adapter(&*BACKEND, dir.path(), &modules).unwrap().config.shape_of(0, &modules[0]),
            config.shape_of(0, &modules[0])
        );
    }
}
