//! Checkpoints that have an unembedding beside the embedding that it is tied to.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::*;

/// What comes of loading a tied model in whose file `unembedding` makes an `lm_head.weight` of the embedding's elements: its shape and elements, in f32 or bf16.
fn loaded_with(dtype: Dtype, unembedding: impl Fn(&mut Vec<f32>) -> Vec<usize>) -> Result<(), String> {
    // Elements that bf16 has too, zeros among them.
    let dir = written(&config(), &|name, values| {
        if name == "model.embed_tokens.weight" {
            values.iter_mut().enumerate().for_each(|(i, v)| *v = (i % 256) as f32 / 256.0);
        }
    });
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let mut tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    let mut values: Vec<f32> = (0..301 * 48).map(|i| (i % 256) as f32 / 256.0).collect();
    let shape = unembedding(&mut values);
    let width = if dtype == Dtype::BF16 { 2 } else { 4 };
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()[4 - width..].to_vec()).collect();
    tensors.push(("lm_head.weight".into(), TensorView::new(dtype, shape, &bytes).unwrap()));
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    load(&dir, Some(DType::F32)).map(|_| ()).map_err(|e| e.to_string())
}

#[test]
fn a_tied_model_may_have_its_embedding_twice_and_no_other_unembedding() {
    let whole = |_: &mut Vec<f32>| vec![301, 48];
    for dtype in [Dtype::F32, Dtype::BF16] {
        assert_eq!(loaded_with(dtype, whole), Ok(()), "{dtype:?}");
    }
    let negative_zero = |values: &mut Vec<f32>| {
        values[0] = -0.0;
        vec![301, 48]
    };
    assert_eq!(loaded_with(Dtype::F32, negative_zero), Ok(()));
    for (dtype, expected) in [(Dtype::F32, "14447 is 7, not 0.43359375"), (Dtype::BF16, "14447 is 7, not 0.43359375")] {
        let last = |values: &mut Vec<f32>| {
            values[301 * 48 - 1] = 7.0;
            vec![301, 48]
        };
        let error = loaded_with(dtype, last).unwrap_err();
        assert!(error.contains(expected) && error.contains("tie_word_embeddings is true"), "{error}");
    }
    let error = loaded_with(Dtype::F32, |_| vec![48, 301]).unwrap_err();
    assert!(error.contains("its shape is [48, 301], not [301, 48]"), "{error}");
}
