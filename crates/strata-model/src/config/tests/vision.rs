//! Configurations of models that see.

use super::*;

/// A small Qwen3-VL, with other values of some keys of its parts.
fn read_parts(top: Value, text: Value, vision: Value) -> Result<ModelConfig> {
    let mut all = json!({
        "model_type": "qwen3_vl", "image_token_id": 90,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12
        },
        "vision_config": {
            "depth": 3, "hidden_size": 24, "intermediate_size": 36, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
            "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]
        }
    });
    for (part, changes) in [("", top), ("/text_config", text), ("/vision_config", vision)] {
        let Some(part) = all.pointer_mut(part).and_then(Value::as_object_mut) else { continue };
        for (key, value) in changes.as_object().unwrap() {
            match value.as_str() {
                Some("absent") => drop(part.remove(key)),
                _ => drop(part.insert(key.clone(), value.clone())),
            }
        }
    }
    ModelConfig::from_json(&all.to_string(), None)
}

#[test]
fn what_is_said_of_seeing_is_read_and_written() {
    for (top, text, vision) in [
        (json!({}), json!({}), json!({})),
        (
            json!({"tie_word_embeddings": true}),
            json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 1, 1]}}),
            json!({}),
        ),
        (
            json!({}),
            json!({"attention_bias": true}),
            json!({"hidden_act": "gelu", "deepstack_visual_indexes": [], "patch_size": 7, "spatial_merge_size": 1}),
        ),
    ] {
        let config = read_parts(top, text, vision).unwrap();
        assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
        assert_eq!(config.image_token_id(), Some(90));
    }
    // What is left out is as the class has it: widths that do not go with this text.
    let error = read_parts(json!({"vision_config": "absent"}), json!({}), json!({})).unwrap_err().to_string();
    assert!(error.contains("out_hidden_size 3584"), "{error}");
    assert_eq!(
        read_parts(json!({}), json!({}), json!({"depth": "absent", "num_heads": "absent", "hidden_size": 64}))
            .unwrap()
            .vision()
            .unwrap()
            .depth,
        27
    );
}

#[test]
fn hostile_values_of_seeing_are_refused_by_key_and_value() {
    let none = || json!({});
    let cases = [
        (json!({"image_token_id": 100}), none(), none(), "image_token_id 100"),
        (json!({"image_token_id": -3}), none(), none(), "image_token_id is -3"),
        (json!({"image_token_id": [1]}), none(), none(), "image_token_id is [1]"),
        (json!({"image_token_id": "absent"}), none(), none(), "image_token_id 151655"),
        (json!({"vision_config": 7}), none(), none(), "vision_config is 7"),
        (json!({"text_config": []}), none(), none(), "text_config is []"),
        (none(), json!({"rope_parameters": {"mrope_section": [1, 2]}}), none(), "mrope_section is [1,2]"),
        (none(), json!({"rope_parameters": {"mrope_section": [1, 2, -3]}}), none(), "mrope_section is [1,2,-3]"),
        (
            none(),
            json!({"rope_parameters": {"mrope_section": [1, 2, u64::MAX]}}),
            none(),
            "mrope_section is [1,2,18446744073709551615]",
        ),
        (none(), json!({"rope_parameters": {"mrope_section": "many"}}), none(), "mrope_section is \"many\""),
        (none(), json!({"num_hidden_layers": 1}), none(), "num_hidden_layers 1"),
        (none(), none(), json!({"model_type": "clip"}), "model_type \"clip\""),
        (none(), none(), json!({"depth": 0}), "depth 0"),
        (none(), none(), json!({"depth": 1u64 << 50}), "depth 1125899906842624"),
        (none(), none(), json!({"hidden_size": null}), "hidden_size is null"),
        (none(), none(), json!({"hidden_size": 0}), "hidden_size 0"),
        (none(), none(), json!({"hidden_size": 1u64 << 40}), "hidden_size 1099511627776"),
        (none(), none(), json!({"num_heads": 5}), "5 heads of hidden_size 24"),
        (none(), none(), json!({"num_heads": 4}), "4 heads of hidden_size 24"),
        (none(), none(), json!({"intermediate_size": "wide"}), "intermediate_size is \"wide\""),
        (none(), none(), json!({"patch_size": 0}), "patch_size 0"),
        (none(), none(), json!({"patch_size": 4096}), "patch_size 4096"),
        (none(), none(), json!({"spatial_merge_size": 100}), "spatial_merge_size 100"),
        (none(), none(), json!({"temporal_patch_size": 1.5}), "temporal_patch_size is 1.5"),
        (none(), none(), json!({"in_channels": 1}), "in_channels 1"),
        (none(), none(), json!({"in_channels": 4}), "in_channels 4"),
        (none(), none(), json!({"out_hidden_size": 33}), "out_hidden_size 33"),
        (none(), none(), json!({"num_position_embeddings": 26}), "num_position_embeddings 26"),
        (none(), none(), json!({"num_position_embeddings": 0}), "num_position_embeddings 0"),
        (none(), none(), json!({"num_position_embeddings": 1u64 << 34}), "num_position_embeddings 17179869184"),
        (none(), none(), json!({"deepstack_visual_indexes": [0, 3]}), "deepstack_visual_indexes [0, 3]"),
        (none(), none(), json!({"deepstack_visual_indexes": [2, 1]}), "deepstack_visual_indexes [2, 1]"),
        (none(), none(), json!({"deepstack_visual_indexes": [1, 1]}), "deepstack_visual_indexes [1, 1]"),
        (none(), none(), json!({"deepstack_visual_indexes": [-1]}), "deepstack_visual_indexes is [-1]"),
        (none(), none(), json!({"deepstack_visual_indexes": 3}), "deepstack_visual_indexes is 3"),
        (none(), none(), json!({"deepstack_visual_indexes": vec![0; 5000]}), "deepstack_visual_indexes is"),
        (none(), none(), json!({"hidden_act": "relu"}), "hidden_act \"relu\""),
        (none(), none(), json!({"hidden_act": 3}), "hidden_act 3"),
        (none(), none(), json!({"rope_parameters": 3}), "rope_parameters is 3"),
        (none(), none(), json!({"rope_parameters": {"rope_type": "yarn"}}), "rope_type \"yarn\""),
        (none(), none(), json!({"rope_parameters": {"rope_theta": -1.0}}), "rope_theta -1"),
    ];
    for (top, text, vision, expected) in cases {
        let error = read_parts(top, text, vision).map(|_| panic!("{expected}")).unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 1000, "{error:?} does not say {expected:?}");
    }
}
