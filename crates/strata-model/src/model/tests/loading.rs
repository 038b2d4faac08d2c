//! What is refused of a checkpoint, by the names of its tensors and settings, and what reading one leaves in memory.

use super::*;
use crate::architectures::{Parameter, Rows, WeightSource};

#[test]
fn blocks_and_scales_that_do_not_fit_are_refused_by_name() {
    const EXPERTS: &str = "model.layers.1.mlp.experts.gate_up_proj";
    let dir = written(&gpt_oss(), &|_, _| ());
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    // The file with other tensors in the place of one layer's experts.
    let error = |quantized: &[(&str, safetensors::Dtype, &[usize])]| {
        let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
        let zeros: Vec<_> = quantized.iter().map(|(_, _, shape)| vec![127u8; shape.iter().product()]).collect();
        let of = |((name, dtype, shape), bytes): (&(&str, _, &[usize]), &'_ Vec<u8>)| {
            (format!("{EXPERTS}_{name}"), *dtype, shape.to_vec(), bytes.clone())
        };
        let new: Vec<_> = quantized.iter().zip(&zeros).map(of).collect();
        let views = new.iter().map(|(name, dtype, shape, bytes)| {
            (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let kept = file.tensors().into_iter().filter(|(name, _)| name != EXPERTS);
        safetensors::serialize_to_file(kept.chain(views), None, &path).unwrap();
        load(&dir, None).err().map(|e| e.to_string())
    };
    use safetensors::Dtype::{I8, U8};
    let (blocks, scales) = (("blocks", U8, &[3, 64, 2, 16][..]), ("scales", U8, &[3, 64, 2][..]));
    assert_eq!(error(&[blocks, scales]), None);
    let missing = error(&[blocks]).unwrap();
    assert!(missing.contains("missing tensors: model.layers.1.mlp.experts.gate_up_proj_scales"), "{missing}");
    assert!(error(&[scales]).unwrap().contains("missing tensors: model.layers.1.mlp.experts.gate_up_proj;"));
    let turned = error(&[blocks, ("scales", U8, &[3, 2, 64])]).unwrap();
    assert!(turned.contains("gate_up_proj_scales has dtype U8 and shape [3, 2, 64], expected U8 and [3, 64, 2]"), "{turned}");
    assert!(error(&[("blocks", I8, blocks.2), scales]).unwrap().contains("gate_up_proj_blocks has dtype I8"));
}

#[test]
fn weights_in_bytes_need_a_scale_for_each_block() {
    const NAME: &str = "model.layers.1.self_attn.q_proj.weight";
    let with_scales = |shape: Option<&[usize]>| {
        use safetensors::{Dtype, SafeTensors, tensor::TensorView};
        let dir = written(&config(), &|_, _| ());
        let path = dir.path().join("model.safetensors");
        let file = std::fs::read(&path).unwrap();
        let mut tensors = SafeTensors::deserialize(&file).unwrap().tensors();
        let (ones, scales) = (vec![0x38; 48 * 48], vec![0; 4 * shape.unwrap_or(&[]).iter().product::<usize>()]);
        tensors.retain(|(name, _)| name != NAME);
        tensors.push((NAME.into(), TensorView::new(Dtype::F8_E4M3, vec![48, 48], &ones).unwrap()));
        if let Some(shape) = shape {
            tensors.push((format!("{NAME}_scale_inv"), TensorView::new(Dtype::F32, shape.to_vec(), &scales).unwrap()));
        }
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        load(&dir, None).err().map(|e| e.to_string())
    };
    assert_eq!(with_scales(Some(&[1, 1])), None);
    assert!(with_scales(None).unwrap().contains(&format!("missing tensors: {NAME}_scale_inv")));
    assert!(with_scales(Some(&[2, 1])).unwrap().contains("has shape [2, 1], expected [1, 1]"));
}

#[test]
fn experts_in_one_tensor_of_bytes_without_scales_are_refused() {
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};
    let experts = json!({
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": true
    });
    let dir = written(&config_with(experts), &|_, _| ());
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let error = |dtype: Dtype, width: usize| {
        let own = "model.layers.1.mlp.experts.";
        let mut tensors = SafeTensors::deserialize(&whole).unwrap().tensors();
        tensors.retain(|(name, _)| !name.starts_with(own));
        let zeros = vec![0; 4 * 40 * 48 * width];
        for (name, shape) in [("gate_up_proj", [4, 40, 48]), ("down_proj", [4, 48, 20])] {
            let bytes = &zeros[..shape.iter().product::<usize>() * width];
            tensors.push((format!("{own}{name}"), TensorView::new(dtype, shape.to_vec(), bytes).unwrap()));
        }
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        load(&dir, None).err().map(|e| e.to_string())
    };
    assert_eq!(error(Dtype::F32, 4), None);
    let refused = error(Dtype::F8_E4M3, 1).unwrap();
    assert!(refused.contains("tensor model.layers.1.mlp.experts.gate_up_proj of shape [4, 40, 48] is in F8_E4M3"), "{refused}");
}

#[test]
fn bytes_of_more_axes_than_a_matrix_are_refused_whatever_scales_they_have() {
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};
    const EXPERTS: &str = "model.layers.1.mlp.experts.gate_up_proj";
    let dir = written(&gpt_oss(), &|_, _| ());
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let mut tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    tensors.retain(|(name, _)| name != EXPERTS);
    let (ones, scale) = (vec![0x38; 3 * 64 * 64], 1f32.to_le_bytes());
    tensors.push((EXPERTS.into(), TensorView::new(Dtype::F8_E4M3, vec![3, 64, 64], &ones).unwrap()));
    tensors.push((format!("{EXPERTS}_scale_inv"), TensorView::new(Dtype::F32, vec![1, 1, 1], &scale).unwrap()));
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    let refused = load_error(&dir, None);
    assert!(refused.contains(&format!("tensor {EXPERTS} of shape [3, 64, 64] is in F8_E4M3")), "{refused}");
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    load(&written(&config(), &|_, _| ()), None).unwrap();
    for name in [
        "model.embed_tokens.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.norm.weight",
    ] {
        for bad in [f32::NAN, f32::INFINITY] {
            let dir = written(&config(), &|n, values| {
                if n == name {
                    *values.last_mut().unwrap() = bad;
                }
            });
            let error = load_error(&dir, None);
            assert!(error.contains(name) && error.contains("not a finite number"), "{error}");
        }
    }
    // Finite in the file, infinite in the dtype to compute in.
    let dir = written(&config(), &|n, values| {
        if n == "model.layers.1.mlp.up_proj.weight" {
            values[77] = f32::MAX;
        }
    });
    let error = load_error(&dir, Some(DType::BF16));
    assert!(error.contains("element 77 of tensor model.layers.1.mlp.up_proj.weight is inf in bf16"), "{error}");
}

#[test]
fn a_weight_that_few_bits_cannot_hold_is_refused_with_the_name_of_its_tensor() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let dir = written(&config(), &|n, values| {
        if n == name {
            values[77] = 2e30;
        }
    });
    for storage in [WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of32)] {
        let loaded = Model::load_stored(backend(), &ModelSource::Directory(dir.path().into()), None, storage);
        let error = loaded.err().expect("a weight is too large").to_string();
        assert!(error.contains(name) && error.contains("a weight is 2e30"), "{error}");
    }
}

#[test]
fn a_model_that_two_tokens_blow_up_is_refused_where_they_do() {
    let dir = written(&config(), &|name, values| {
        if name == "model.layers.1.mlp.down_proj.weight" {
            values.iter_mut().for_each(|v| *v = v.signum() * 3e38);
        }
    });
    let error = load_error(&dir, None);
    assert!(error.contains("from the output of layer 1 on"), "{error}");
}

#[test]
fn a_configuration_that_no_kernel_computes_is_refused_by_the_value() {
    for (changes, complaint) in [
        (json!({"head_dim": 1026}), "head_dim 1026"),
        (json!({"head_dim": 11}), "head_dim 11"),
        (json!({"head_dim": 0}), "head_dim 0"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads 3"),
        (json!({"num_key_value_heads": 0}), "num_key_value_heads 0"),
        (json!({"intermediate_size": 0}), "intermediate_size 0"),
    ] {
        let dir = written(&config(), &|_, _| ());
        let mut json: Value = serde_json::from_str(&config().to_json()).unwrap();
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        assert!(load_error(&dir, None).contains(complaint), "{complaint}");
    }
    let wide = r#"{"model_type": "deepseek_v3", "num_hidden_layers": 1, "kv_lora_rank": 1000, "qk_rope_head_dim": 64}"#;
    let error = ModelConfig::from_json(wide, None).unwrap_err().to_string();
    assert!(error.contains("kv_lora_rank 1000 and qk_rope_head_dim 64 are 1064 together"), "{error}");
}

#[test]
fn a_model_that_its_files_do_not_hold_takes_no_memory() {
    let dir = written(&config(), &|_, _| ());
    // Fifty trillion parameters: had it been made first, the system would have refused and ended the program.
    let huge = config_with(json!({"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 1000}));
    std::fs::write(dir.path().join("config.json"), huge.to_json()).unwrap();
    let error = load_error(&dir, None);
    assert!(error.contains("has shape [301, 48], expected [301, 65536]"), "{}", &error[..300]);
    assert!(error.contains("missing tensors: model.layers.3.") && error.len() < 200_000);
}

#[test]
#[cfg(target_os = "linux")]
fn what_was_read_of_a_checkpoint_does_not_stay_in_memory() {
    let resident_bytes = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        // Of files: what other tests allocate beside does not count.
        let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let (rows, columns) = (64 << 10, 1 << 10);
    let size = rows * columns * 4;
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{size}]}}}}"#);
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len((8 + header.len() + size) as u64).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let before = resident_bytes();
    let mut most = 0;
    let mut weights = CheckpointWeights { checkpoint: &checkpoint, int4: None, run: &strata_values::alone };
    let mut store = |_: usize, rows: Rows<'_>| {
        let Rows::Values(values) = rows else { panic!("four bits of f32") };
        assert_eq!(values.as_bytes().iter().step_by(4096).map(|&b| u32::from(b)).sum::<u32>(), 0);
        most = most.max(resident_bytes().saturating_sub(before));
        Ok(())
    };
    let parameter = Parameter::named("w", &[rows, columns]);
    weights.read(&parameter, DType::F32, &mut store).unwrap();
    assert!(most < size / 2, "{most} bytes of {size}");
}
