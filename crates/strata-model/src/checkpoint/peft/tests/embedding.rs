//! Adapters of the token embedding.

use safetensors::Dtype;

use super::*;

const A: &str = "base_model.model.model.embed_tokens.lora_embedding_A";
const B: &str = "base_model.model.model.embed_tokens.lora_embedding_B";
const BASE: &str = "base_model.model.model.embed_tokens.base_layer.weight";

fn with_embedding() -> LoraConfig {
    LoraConfig { mlp: false, unembed: false, embedding: true, ..all_parts() }
}

/// Adds a tensor of these shape and values to a written adapter, or overwrites it.
fn put(dir: &Path, name: &str, shape: &[usize], value: f32) {
    let path = dir.join(WEIGHTS_FILE);
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data: Vec<u8> = (0..shape.iter().product::<usize>()).flat_map(|_| value.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(Dtype::F32, shape.to_vec(), &data).unwrap();
    let others = file.iter().filter(|(other, _)| *other != name).map(|(name, view)| (name.to_owned(), view));
    let tensors: Vec<_> = others.chain([(name.to_owned(), view)]).collect();
    let changed = safetensors::serialize(tensors, None).unwrap();
    fs::write(path, changed).unwrap();
}

#[test]
fn an_adapter_of_the_embedding_reads_back_to_the_bit() {
    let only = LoraConfig { attention: false, ..with_embedding() };
    for config in [with_embedding(), only, LoraConfig { embedding: true, ..all_parts() }] {
        let (dir, params) = written(&config);
        let read = read_adapter(&*BACKEND, dir.path(), &modules()).unwrap();
        assert_eq!(read.config, config);
        assert_eq!(bits(&read.params), bits(&params));
        let v = squares(&config, 7);
        write_optimizer(&*BACKEND, dir.path(), &modules(), [&params, &v], 3).unwrap();
        let state = read_optimizer(&*BACKEND, dir.path(), &modules(), &config).unwrap();
        assert_eq!([bits(&state.m), bits(&state.v)], [bits(&params), bits(&v)]);
    }
}

#[test]
fn the_embeddings_names_and_shapes_are_those_of_peft() {
    let (dir, params) = written(&with_embedding());
    let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let [a, b] = [A, B].map(|name| file.tensor(name).unwrap());
    assert_eq!((a.shape(), b.shape()), (&[RANK, 10][..], &[4, RANK][..]));
    let stack = params.stacks[4].as_ref().unwrap();
    let [ours_a, ours_b] = [&stack.a, &stack.b].map(|t| BACKEND.to_f32_vec(t.as_ref()).unwrap());
    let theirs = |view: &safetensors::tensor::TensorView<'_>, i: usize| f32::from_le_bytes(view.data().as_chunks::<4>().0[i]);
    let (place_in_rank, id, hidden) = (2, 7, 3);
    assert_eq!(theirs(&a, place_in_rank * 10 + id), ours_a[id * RANK + place_in_rank]);
    assert_eq!(theirs(&b, hidden * RANK + place_in_rank), ours_b[place_in_rank * 4 + hidden]);
    let config: Value = serde_json::from_str(&fs::read_to_string(dir.path().join(CONFIG_FILE)).unwrap()).unwrap();
    assert_eq!(config["target_modules"], json!(["embed_tokens", "q_proj", "v_proj"]));
}

#[test]
fn tensors_of_the_embedding_that_do_not_fit_are_refused_by_name() {
    for (name, shape, expected) in [
        (A, &[10, RANK][..], "[3, 10]"),
        (A, &[RANK, 11], "[3, 10]"),
        (A, &[RANK + 1, 10], "[3, 10]"),
        (A, &[RANK * 10], "[3, 10]"),
        (A, &[RANK, 0], "[3, 10]"),
        (A, &[1, RANK, 10], "[3, 10]"),
        (B, &[RANK, 4], "[4, 3]"),
        (BASE, &[4, 10], "[10, 4]"),
    ] {
        let (dir, _) = written(&with_embedding());
        put(dir.path(), name, shape, 1.0);
        let error = read_error(dir.path());
        assert!(error.contains(&format!("tensor {name} has shape {shape:?}, expected {expected}")), "{error}");
    }
    for name in [A, B] {
        let (dir, _) = written(&with_embedding());
        change_tensors(dir.path(), |other| (other != name).then(|| other.into()));
        assert!(read_error(dir.path()).contains(&format!("missing tensors: {name}")));
        let (dir, _) = written(&with_embedding());
        change_tensors(dir.path(), |other| Some(if other == name { format!("{name}.weight") } else { other.into() }));
        let error = read_error(dir.path());
        assert!(
            error.contains(&format!("missing tensors: {name}")) && error.contains(&format!("no use for: {name}.weight")),
            "{error}"
        );
    }
    let (dir, _) = written(&with_embedding());
    put(dir.path(), A, &[RANK, 10], f32::NAN);
    assert!(read_error(dir.path()).contains(&format!("element 0 of tensor {A} is NaN")));
}

#[test]
fn what_target_modules_says_of_the_embedding_and_what_there_is_must_agree() {
    let (dir, params) = written(&with_embedding());
    for targets in [json!(["q_proj", "v_proj", "embed_tokens"]), json!(["q_proj", "v_proj", "model.embed_tokens"])] {
        change_config(dir.path(), json!({ "target_modules": targets }));
        assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
    }
    change_config(dir.path(), json!({"target_modules": ["q_proj", "v_proj"]}));
    assert!(read_error(dir.path()).contains("holds tensors for model.embed_tokens, which target_modules does not name"));
    change_config(dir.path(), json!({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}));
    change_tensors(dir.path(), |name| (![A, B].contains(&name)).then(|| name.into()));
    assert!(read_error(dir.path()).contains("target_modules names model.embed_tokens, but the adapter holds nothing for it"));
}

#[test]
fn the_tables_that_peft_writes_beside_adapters_of_embeddings_are_left_aside() {
    let of_head = "base_model.model.lm_head.base_layer.weight";
    let (dir, params) = written(&LoraConfig { embedding: true, ..all_parts() });
    for name in [BASE, of_head] {
        put(dir.path(), name, &[10, 4], f32::INFINITY);
    }
    assert_eq!(bits(&read_adapter(&*BACKEND, dir.path(), &modules()).unwrap().params), bits(&params));
    // Without a pair there is nothing that it belongs to.
    let (dir, _) = written(&with_embedding());
    put(dir.path(), of_head, &[10, 4], 1.0);
    assert!(read_error(dir.path()).contains(&format!("no use for: {of_head}")));
}
