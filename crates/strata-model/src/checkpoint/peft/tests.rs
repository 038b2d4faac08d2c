mod embedding;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use strata_tensor::{CpuBackend, HostRef, HostTensor, Memory, Tensor};

use super::*;
use crate::lora::LoraStack;

mod forms;

const RANK: usize = 3;

static BACKEND: LazyLock<CpuBackend> = LazyLock::new(|| CpuBackend::new(Some(1)).unwrap());

/// Modules in the shape of a two-layer model.
fn modules() -> Vec<LoraModule> {
    let module = |path, part, num_layers, in_features, out_features| LoraModule {
        path,
        part,
        layers: (0..num_layers).collect(),
        experts: None,
        parts: Vec::new(),
        in_features,
        out_features,
    };
    vec![
        module("self_attn.q_proj", Part::Attention, 2, 4, 6),
        module("self_attn.v_proj", Part::Attention, 2, 4, 2),
        module("mlp.down_proj", Part::Mlp, 2, 8, 4),
        module("lm_head", Part::Unembed, 1, 4, 10),
        module("model.embed_tokens", Part::Embedding, 1, 10, 4),
    ]
}

fn all_parts() -> LoraConfig {
    LoraConfig {
        rank: RANK,
        alpha: 32.0,
        attention: true,
        mlp: true,
        unembed: true,
        embedding: false,
        left_out: ModuleSet::NONE,
        own: BTreeMap::new(),
    }
}

fn fill(tensor: &mut Tensor, bytes: &[u8]) {
    let mut host = HostTensor::zeros(tensor.shape().dims(), tensor.dtype());
    host.bytes_mut().copy_from_slice(bytes);
    BACKEND.upload(host.as_ref(), tensor.as_mut()).unwrap();
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    BACKEND.to_host(tensor.as_ref()).unwrap().as_ref().as_bytes().to_vec()
}

/// Parameters in which every number differs, some of them such as arithmetic would not preserve.
fn distinct_params(config: &LoraConfig) -> LoraParams {
    let mut params = LoraParams::zeros(&*BACKEND, &modules(), config).unwrap();
    let mut next = 0x3f80_0000u32;
    for tensor in params.tensors_mut() {
        let bytes: Vec<u8> = (0..tensor.size_bytes() / 4).flat_map(|i| (next + i as u32 * 77).to_le_bytes()).collect();
        fill(tensor, &bytes);
        next += 1_000_003;
    }
    let first = params.tensors_mut().next().unwrap();
    let odd = [f32::MIN, -0.0, f32::from_bits(1), f32::MAX];
    let rest = bytes_of(first)[16..].to_vec();
    let bytes: Vec<u8> = odd.iter().flat_map(|v| v.to_bits().to_le_bytes()).chain(rest).collect();
    fill(first, &bytes);
    params
}

/// Numbers that averages of squares can be: none is negative.
fn squares(config: &LoraConfig, seed: u64) -> LoraParams {
    let mut params = LoraParams::init(&*BACKEND, &modules(), config, seed).unwrap();
    for tensor in params.tensors_mut() {
        let mut bytes = bytes_of(tensor);
        bytes.as_chunks_mut().0.iter_mut().for_each(|number: &mut [u8; 4]| number[3] &= 0x7f);
        fill(tensor, &bytes);
    }
    params
}

fn bits(params: &LoraParams) -> Vec<Option<[Vec<u8>; 2]>> {
    let stack_bits = |s: &LoraStack| [bytes_of(&s.a), bytes_of(&s.b)];
    params.stacks.iter().map(|s| s.as_ref().map(stack_bits)).collect()
}

fn written(config: &LoraConfig) -> (tempfile::TempDir, LoraParams) {
    let dir = tempfile::tempdir().unwrap();
    let params = distinct_params(config);
    write_adapter(&*BACKEND, dir.path(), &modules(), (config, &params), "org/base", AdapterFormat::Tinker).unwrap();
    (dir, params)
}

/// Changes keys of the configuration of a written adapter.
fn change_config(dir: &Path, changes: Value) {
    let path = dir.join(CONFIG_FILE);
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    fs::write(path, config.to_string()).unwrap();
}

/// Renames, or with `None` removes, tensors of a written adapter.
fn change_tensors(dir: &Path, change: impl Fn(&str) -> Option<String>) {
    let path = dir.join(WEIGHTS_FILE);
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = file.iter().filter_map(|(name, view)| Some((change(name)?, view))).collect();
    let changed = safetensors::serialize(tensors, None).unwrap();
    fs::write(path, changed).unwrap();
}

fn read_error(dir: &Path) -> String {
    read_adapter(&*BACKEND, dir, &modules()).unwrap_err().to_string()
}

#[test]
fn an_adapter_reads_back_to_the_bit() {
    for (attention, mlp, unembed) in [(true, true, true), (true, false, false), (false, true, false), (false, false, true)] {
        let config = LoraConfig { attention, mlp, unembed, ..all_parts() };
        let (dir, params) = written(&config);
        let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
        assert_eq!(read.config, config);
        assert_eq!(read.base_model.as_deref(), Some("org/base"));
        assert_eq!(bits(&read.params), bits(&params));
    }
}

#[test]
fn an_adapter_of_some_modules_reads_back_as_such() {
    let mut config = LoraConfig { mlp: false, unembed: false, alpha: 0.3, ..all_parts() };
    config.left_out.insert(1);
    let (dir, params) = written(&config);
    let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
    assert_eq!(read.config, config);
    assert!(read.params.stacks[1].is_none());
    assert_eq!(bits(&read.params), bits(&params));
}

#[test]
fn names_and_shapes_are_those_of_peft_and_the_tinker_tools() {
    let (dir, params) = written(&all_parts());
    let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name: &str| file.tensor(name).unwrap().shape().to_vec();
    assert_eq!(file.len(), 14);
    assert_eq!(shape("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"), [RANK, 4]);
    assert_eq!(shape("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"), [4, RANK]);
    assert_eq!(shape("base_model.model.model.unembed_tokens.lora_B.weight"), [10, RANK]);
    let b = file.tensor("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight").unwrap();
    let ours = params.stacks[0].as_ref().unwrap().b.row(1);
    let ours = BACKEND.to_f32_vec(ours).unwrap();
    let (output, place_in_rank) = (5, 2);
    let theirs = b.data().as_chunks::<4>().0[output * RANK + place_in_rank];
    assert_eq!(f32::from_le_bytes(theirs), ours[place_in_rank * 6 + output]);
    let config: Value = serde_json::from_str(&fs::read_to_string(dir.path().join(CONFIG_FILE)).unwrap()).unwrap();
    assert_eq!(config["target_modules"], json!(["down_proj", "q_proj", "unembed_tokens", "v_proj"]));
    assert_eq!((&config["r"], &config["lora_alpha"], &config["peft_type"]), (&json!(3), &json!(32), &json!("LORA")));
}

#[test]
fn pefts_own_name_of_the_unembedding_is_read() {
    let (dir, params) = written(&all_parts());
    change_tensors(dir.path(), |name| Some(name.replace("model.unembed_tokens", "lm_head")));
    assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
    change_tensors(dir.path(), |name| Some(name.replace("lm_head.lora_A", "model.unembed_tokens.lora_A")));
    assert!(read_error(dir.path()).contains("unembed_tokens.lora_B.weight"));
}

#[test]
fn a_module_goes_by_the_names_that_the_file_has() {
    let (dir, params) = written(&all_parts());
    change_tensors(dir.path(), |name| Some(name.replace("model.unembed_tokens", "lm_head")));
    let names = json!(["q_proj", "v_proj", "down_proj", "lm_head"]);
    change_config(dir.path(), json!({"target_modules": names}));
    let read = || read_adapter(&*BACKEND, dir.path(), &modules()).map_err(|error| error.to_string());
    // To PEFT these are no names of anything here.
    for excluded in
        [json!(r".*unembed_tokens|.*\.attn\..*"), json!(["attn.q_proj", "unembed_tokens"]), json!(r"((?!proj|lm_head).)*")]
    {
        change_config(dir.path(), json!({"exclude_modules": excluded}));
        assert_eq!(bits(&read().unwrap().params), bits(&params), "{excluded}");
    }
    change_config(dir.path(), json!({"exclude_modules": null, "alpha_pattern": {r"model\..*": 64}}));
    let config = read().unwrap().config;
    let unembedding = modules().iter().position(|module| module.part == Part::Unembed).unwrap();
    assert_eq!(
        config.own.keys().copied().collect::<Vec<_>>(),
        (0..modules().len()).filter(|i| *i != unembedding && config.carries(*i, &modules()[*i])).collect::<Vec<_>>()
    );
    change_config(dir.path(), json!({"alpha_pattern": {}, "target_modules": "all-linear"}));
    assert!(read().unwrap_err().contains("holds tensors for lm_head"), "to PEFT it is the end of a model and no linear layer");
}

#[test]
fn a_whole_path_stands_beside_a_list_of_layers() {
    let (dir, _) = written(&all_parts());
    change_tensors(dir.path(), |name| {
        (!name.contains("layers.0.") || name.contains("q_proj")).then(|| name.replace("model.unembed_tokens", "lm_head"))
    });
    let names = ["q_proj", "model.layers.0.self_attn.q_proj", "v_proj", "down_proj", "lm_head"];
    change_config(dir.path(), json!({"target_modules": names, "layers_to_transform": 1}));
    read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
    change_config(dir.path(), json!({"target_modules": [names[0], names[2], names[3], names[4]]}));
    assert!(read_error(dir.path()).contains("layers_to_transform is without layer 0"));
}

#[test]
fn an_adapter_of_a_model_that_was_part_of_a_composite_is_read() {
    let config = all_parts();
    let (dir, params) = written(&config);
    let renamed = |name: &str| name.strip_prefix("base_model.model.model.layers.").map(in_composite);
    change_tensors(dir.path(), |name| Some(renamed(name).unwrap_or_else(|| name.into())));
    change_config(dir.path(), json!({"target_modules": "(.*language_model.*(q|v|down)_proj)|lm_head"}));
    let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
    assert_eq!((read.config, bits(&read.params)), (config, bits(&params)));
    let (twice, _) = written(&all_parts());
    let name = "self_attn.q_proj.lora_A.weight";
    let taken = |other: &str| {
        if other.ends_with("layers.1.self_attn.v_proj.lora_A.weight") {
            in_composite(&format!("0.{name}"))
        } else {
            other.into()
        }
    };
    change_tensors(twice.path(), |other| Some(taken(other)));
    let error = read_error(twice.path());
    assert!(error.contains("are one parameter") && error.contains(name), "{error}");
}

/// The name of a tensor of a decoder layer in adapters of a composite.
fn in_composite(rest: &str) -> String {
    format!("base_model.model.model.language_model.layers.{rest}")
}

#[test]
fn the_name_that_the_tinker_tools_have_for_attention_of_gpt_oss_is_read() {
    let (dir, params) = written(&all_parts());
    change_tensors(dir.path(), |name| Some(name.replace(".self_attn.", ".attn.")));
    for target in ["q_proj", "attn.q_proj", "self_attn.q_proj"] {
        change_config(dir.path(), json!({"target_modules": [target, "v_proj", "down_proj", "lm_head"]}));
        assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
    }
    // One layer by this name and another by that is as good; one tensor by both is not.
    change_tensors(dir.path(), |name| Some(name.replace("layers.0.attn.", "layers.0.self_attn.")));
    assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
    change_tensors(dir.path(), |name| Some(name.replace("0.self_attn.q_proj.lora_A", "0.attn.q_proj.lora_A")));
    assert!(read_error(dir.path()).contains("0.attn.q_proj.lora_B.weight"));
}

#[test]
fn tensors_must_fit_model_and_rank_and_all_be_used() {
    let (dir, _) = written(&all_parts());
    change_config(dir.path(), json!({"r": 5}));
    let error = read_error(dir.path());
    assert!(error.contains("shape [3, 4], expected [5, 4]") && error.contains("adapter_model.safetensors"), "{error}");
    let (dir, _) = written(&all_parts());
    change_tensors(dir.path(), |name| (!name.contains("layers.1.self_attn.q_proj.lora_B")).then(|| name.into()));
    assert!(read_error(dir.path()).contains("missing tensors: base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"));
    let (dir, _) = written(&all_parts());
    change_tensors(dir.path(), |name| Some(name.replace("layers.1.", "layers.2.")));
    let error = read_error(dir.path());
    assert!(error.contains("no use for: base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"), "{error}");
    let (dir, _) = written(&all_parts());
    change_tensors(dir.path(), |name| (!name.contains("v_proj")).then(|| name.into()));
    assert!(read_error(dir.path()).contains("target_modules names self_attn.v_proj"));
    let (dir, _) = written(&all_parts());
    change_tensors(dir.path(), |_| None);
    change_config(dir.path(), json!({"target_modules": "all-linear"}));
    assert!(read_error(dir.path()).contains("all three are off"));
}

#[test]
fn features_beyond_plain_lora_are_refused_by_name() {
    for changes in [
        json!({"use_dora": true}),
        json!({"rank_pattern": {"q_proj": 0}}),
        json!({"rank_pattern": {"q_proj": 2000}}),
        json!({"rank_pattern": {"q_proj": 2.5}}),
        json!({"rank_pattern": {"((": 3}}),
        json!({"rank_pattern": ["q_proj"]}),
        json!({"alpha_pattern": {"q_proj": "8"}}),
        json!({"alpha_pattern": {"q_proj": 1e300}}),
        json!({"alpha_pattern": {"layers.0.self_attn.q_proj": 8}}),
        json!({"alpha_pattern": {"(.*)*(.*)*(.*)*x(?=y)": 8}}),
        json!({"alpha_pattern": "q_proj"}),
        json!({"modules_to_save": ["embed_tokens"]}),
        json!({"bias": "all"}),
        json!({"lora_bias": true}),
        json!({"fan_in_fan_out": true}),
        json!({"use_qalora": true}),
        json!({"layers_to_transform": [0]}),
        json!({"layers_to_transform": 0}),
        json!({"layers_to_transform": "all"}),
        json!({"layer_replication": [[0, 1]]}),
        json!({"target_parameters": ["experts"]}),
        json!({"trainable_token_indices": {"embed_tokens": [1]}}),
        json!({"peft_type": "IA3"}),
        json!({"init_lora_weights": "pissa_niter_16"}),
        json!({"init_lora_weights": "OLoRA"}),
        json!({"init_lora_weights": "loftq"}),
        json!({"r": 0}),
        json!({"r": 1_000_000}),
        json!({"lora_alpha": "much"}),
        json!({"lora_alpha": 1e300}),
        json!({"some_feature_of_next_year": true}),
        json!({"use_dora": 1}),
        json!({"modules_to_save": "embed_tokens"}),
        json!({"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head", "banana"]}),
        json!({"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head", "roj"]}),
        json!({"target_modules": ["q_proj", 7]}),
        json!({"target_modules": 5}),
        json!({"target_modules": "q_proj"}),
        json!({"target_modules": "(("}),
        json!({"target_modules": "(.*)*(.*)*(.*)*x(?=y)"}),
        json!({"target_modules": "(".repeat(2000) + &")".repeat(2000)}),
        json!({"exclude_modules": {"q_proj": true}}),
    ] {
        let (dir, _) = written(&all_parts());
        let key = changes.as_object().unwrap().keys().next().unwrap().clone();
        change_config(dir.path(), changes);
        let error = read_error(dir.path());
        assert!(error.contains(&key) && error.contains(CONFIG_FILE), "{key}: {error}");
    }
}

#[test]
fn what_target_modules_names_and_what_there_is_must_agree() {
    let accepted = |changes: Value, keep: &dyn Fn(&str) -> bool| {
        let (dir, _) = written(&all_parts());
        change_config(dir.path(), changes);
        change_tensors(dir.path(), |name| keep(name).then(|| name.into()));
        read_adapter(&*BACKEND, dir.path(), &modules()).map(|_| ()).map_err(|e| e.to_string())
    };
    let all = |_: &str| true;
    let without_q = |name: &str| !name.contains("q_proj");
    for targets in [
        json!(["q_proj", "v_proj", "down_proj", "lm_head"]),
        json!(["self_attn.q_proj", "v_proj", "mlp.down_proj", "unembed_tokens"]),
        json!(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "v_proj", "down_proj", "lm_head"]),
        json!("all-linear"),
        json!(r".*\.(q_proj|v_proj|down_proj)|lm_head"),
        json!(r"(?!visual|model\.embed).*"),
        Value::Null,
    ] {
        assert_eq!(accepted(json!({"target_modules": targets}), &all), Ok(()), "{targets}");
    }
    for (changes, complaint) in [
        (json!({"target_modules": ["q_proj", "v_proj", "down_proj"]}), "holds tensors for lm_head"),
        (json!({"target_modules": []}), "holds tensors for self_attn.q_proj"),
        (json!({"target_modules": r".*\.(q_proj|v_proj)"}), "holds tensors for mlp.down_proj"),
        (json!({"exclude_modules": ["q_proj"]}), "holds tensors for self_attn.q_proj"),
        (json!({"target_modules": "all-linear", "exclude_modules": "lm_head"}), "holds tensors for lm_head"),
        (
            json!({"target_modules": ["layers.0.self_attn.q_proj", "v_proj", "down_proj", "lm_head"]}),
            "target_modules does not name self_attn.q_proj of layer 1, and the adapter holds tensors for self_attn.q_proj there",
        ),
        (json!({"exclude_modules": r".*layers\.0\..*"}), "exclude_modules leave out self_attn.q_proj of layer 0, and"),
    ] {
        let error = accepted(changes.clone(), &all).unwrap_err();
        assert!(error.contains(complaint), "{changes}: {error}");
    }
    assert_eq!(accepted(json!({"exclude_modules": ["q_proj"]}), &without_q), Ok(()));
    assert_eq!(accepted(json!({"target_modules": "all-linear"}), &without_q), Ok(()));
    for targets in [json!(["q_proj", "v_proj", "down_proj", "lm_head"]), json!(".*")] {
        let error = accepted(json!({"target_modules": targets}), &without_q).unwrap_err();
        assert!(error.contains("target_modules names self_attn.q_proj, but"), "{error}");
    }
}

#[test]
fn an_adapter_with_values_that_are_not_finite_is_refused() {
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let dir = tempfile::tempdir().unwrap();
        let mut params = distinct_params(&all_parts());
        let stack = params.stacks[2].as_mut().unwrap();
        let mut values = BACKEND.to_f32_vec(stack.b.as_ref()).unwrap();
        values[13] = bad;
        let bad_values = HostRef::from_f32(&values, &[values.len()]).unwrap();
        BACKEND.upload(bad_values, stack.b.as_mut()).unwrap();
        write_adapter(&*BACKEND, dir.path(), &modules(), (&all_parts(), &params), "org/base", AdapterFormat::Tinker).unwrap();
        let error = read_error(dir.path());
        assert!(error.contains("layers.1.mlp.down_proj.lora_B.weight is") && error.contains("not a finite"), "{error}");
    }
}

#[test]
fn an_adapter_of_another_base_model_is_refused() {
    let (dir, _) = written(&all_parts());
    let check = |trained_on: Value, served: &str| {
        change_config(dir.path(), json!({"base_model_name_or_path": trained_on}));
        read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().check_base_model(served).map_err(|e| e.to_string())
    };
    for (trained_on, served) in [
        (json!("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B"),
        (json!("Qwen/Qwen3-0.6B"), "Qwen3-0.6B"),
        (json!("/models/Qwen3-0.6B/"), "Qwen/Qwen3-0.6B"),
        (json!(null), "Qwen/Qwen3-0.6B"),
        (json!(""), "Qwen/Qwen3-0.6B"),
    ] {
        assert_eq!(check(trained_on.clone(), served), Ok(()), "{trained_on} {served}");
    }
    for (trained_on, served) in [
        (json!("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-4B"),
        (json!("evil/Qwen3-0.6B"), "Qwen/Qwen3-0.6B"),
        (json!("/models/Qwen3-4B"), "Qwen3-0.6B"),
    ] {
        let error = check(trained_on, served).unwrap_err();
        assert!(error.contains("trained on base model") && error.contains(served), "{error}");
    }
}

#[test]
fn rank_stabilised_adapters_keep_their_scale() {
    let (dir, _) = written(&all_parts());
    change_config(dir.path(), json!({"use_rslora": true, "lora_alpha": 16}));
    let scale = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().config.scale();
    assert!((scale - 16.0 / 3f32.sqrt()).abs() < 1e-6, "{scale}");
}

#[test]
fn adapters_that_peft_wrote_are_read() {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/fixtures/bias_untied_sharded_f32");
    let module = |path, part, num_layers, in_features, out_features| LoraModule {
        path,
        part,
        layers: (0..num_layers).collect(),
        experts: None,
        parts: Vec::new(),
        in_features,
        out_features,
    };
    let modules = [
        module("self_attn.q_proj", Part::Attention, 3, 32, 48),
        module("self_attn.k_proj", Part::Attention, 3, 32, 24),
        module("self_attn.v_proj", Part::Attention, 3, 32, 24),
        module("self_attn.o_proj", Part::Attention, 3, 48, 32),
        module("mlp.gate_proj", Part::Mlp, 3, 32, 44),
        module("mlp.up_proj", Part::Mlp, 3, 32, 44),
        module("mlp.down_proj", Part::Mlp, 3, 44, 32),
        module("lm_head", Part::Unembed, 1, 32, 97),
        module("model.embed_tokens", Part::Embedding, 1, 97, 32),
    ];
    for (name, rank, parts) in [
        ("r3", 3, (true, true, false)),
        ("attention_r1", 1, (true, false, false)),
        ("mlp_r16", 16, (false, true, false)),
        ("unembed_r5", 5, (true, true, true)),
    ] {
        let config = read_adapter(&*BACKEND, &fixtures.join(name), &modules).unwrap().config;
        assert_eq!((config.rank, (config.attention, config.mlp, config.unembed)), (rank, parts), "{name}");
        assert_eq!(config.left_out, ModuleSet::NONE);
    }
}

#[test]
fn optimizer_state_reads_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let config = LoraConfig { mlp: false, ..all_parts() };
    let (m, v) = (distinct_params(&config), squares(&config, 7));
    write_optimizer(&*BACKEND, dir.path(), &modules(), [&m, &v], u64::MAX).unwrap();
    let state = read_optimizer(&*BACKEND, dir.path(), &modules(), &config).unwrap();
    assert_eq!(state.step, u64::MAX);
    assert_eq!(bits(&state.m), bits(&m));
    assert_eq!(bits(&state.v), bits(&v));
    let other = read_optimizer(&*BACKEND, dir.path(), &modules(), &LoraConfig { mlp: true, ..config }).unwrap_err().to_string();
    assert!(other.contains("missing tensors: m.base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"), "{other}");
}

#[test]
fn moments_that_would_leave_no_number_of_an_adapter_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = all_parts();
    for (moment, bad, reason) in [
        (0, f32::NAN, "is NaN, not a finite number"),
        (0, f32::NEG_INFINITY, "is -inf, not a finite number"),
        (1, f32::INFINITY, "is inf, not a finite number"),
        (1, -1e-30, "is -0.000000000000000000000000000001, which an average of squares cannot be"),
    ] {
        let mut moments = [squares(&config, 1), squares(&config, 2)];
        let last = moments[moment].tensors_mut().next().unwrap();
        let mut bytes = bytes_of(last);
        bytes[4..8].copy_from_slice(&bad.to_le_bytes());
        fill(last, &bytes);
        let [m, v] = &moments;
        write_optimizer(&*BACKEND, dir.path(), &modules(), [m, v], 3).unwrap();
        let error = read_optimizer(&*BACKEND, dir.path(), &modules(), &config).unwrap_err().to_string();
        let name = ["m.", "v."][moment];
        assert!(error.contains(&format!("of tensor {name}base_model")) && error.contains(reason), "{error}");
    }
}

#[test]
fn the_state_of_an_optimizer_says_in_which_order_its_numbers_were_added() {
    let moment = || squares(&all_parts(), 1);
    let dir = tempfile::tempdir().unwrap();
    write_optimizer(&*BACKEND, dir.path(), &modules(), [&moment(), &moment()], 3).unwrap();
    let bytes = std::fs::read(dir.path().join(OPTIMIZER_FILE)).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().clone().unwrap().get("numerics"), Some(&BACKEND.numerics()));
    let state = read_optimizer(&*BACKEND, dir.path(), &modules(), &all_parts()).unwrap();
    assert_eq!(state.numerics, Some(BACKEND.numerics()));
}

#[test]
fn an_adapter_that_is_encrypted_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let error = named_base_model(dir.path()).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    fs::write(dir.path().join("adapter_config.json.age"), "age-encryption.org/v1").unwrap();
    let error = named_base_model(dir.path()).unwrap_err().to_string();
    assert!(error.contains(CONFIG_FILE) && error.contains("decrypt them with age"), "{error}");
}
