use serde_json::{Value, json};
use strata_tensor::DType;

use super::*;

const TINY_CONFIG: &str = include_str!("../../../../assets/tiny-base/config.json");
const TINY_GENERATION_CONFIG: &str = include_str!("../../../../assets/tiny-base/generation_config.json");

/// Reads a small valid config with `changes` applied; a change to the string `absent` removes the key.
fn read_with(changes: Value) -> Result<ModelConfig> {
    let mut config = json!({
        "model_type": "qwen3", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16
    });
    let map = config.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value.as_str() {
            Some("absent") => map.remove(key),
            _ => map.insert(key.clone(), value.clone()),
        };
    }
    ModelConfig::from_json(&config.to_string(), None)
}

fn error_with(changes: Value) -> String {
    read_with(changes.clone()).expect_err(&changes.to_string()).to_string()
}

#[test]
fn the_embedded_config_is_read() {
    let config = ModelConfig::from_json(TINY_CONFIG, Some(TINY_GENERATION_CONFIG)).unwrap();
    assert_eq!((config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads), (5, 192, 6, 2));
    assert_eq!((config.head_dim, config.intermediate_size, config.vocab_size), (32, 512, 272));
    assert_eq!((config.rope_theta, config.rms_norm_eps, config.max_position_embeddings), (1e4, 1e-6, 2048));
    assert_eq!((config.dtype, config.tie_word_embeddings), (Some(DType::BF16), true));
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(0), &[2][..]));
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = ModelConfig::from_json(r#"{"model_type": "qwen3"}"#, None).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.intermediate_size), (151_936, 4096, 22_016));
    assert_eq!((config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim), (32, 32, 32, 128));
    assert_eq!((config.rms_norm_eps, config.rope_theta, config.max_position_embeddings), (1e-6, 1e4, 32_768));
    assert_eq!((config.attention_bias, config.tie_word_embeddings), (false, false));
    assert_eq!((config.eos_token_ids, config.dtype), (vec![], None));
    assert_eq!(read_with(json!({"num_key_value_heads": null})).unwrap().num_kv_heads, 4);
}

#[test]
fn rope_theta_is_read_from_either_layout() {
    let theta = |changes| read_with(changes).unwrap().rope_theta;
    assert_eq!(theta(json!({"rope_theta": 5e5, "rope_scaling": null})), 5e5);
    assert_eq!(theta(json!({"rope_theta": 1000000})), 1e6);
    assert_eq!(theta(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})), 7.0);
    assert_eq!(theta(json!({"rope_parameters": {"rope_type": "default"}, "rope_theta": 9.0})), 9.0);
    assert_eq!(theta(json!({"rope_parameters": {"rope_theta": 3.0}, "rope_theta": 9.0})), 3.0);
    assert_eq!(theta(json!({"rope_scaling": {}, "rope_parameters": null})), 1e4);
}

#[test]
fn scaled_rope_is_refused_by_name() {
    for key in ["rope_scaling", "rope_parameters"] {
        let error = error_with(json!({key: {"rope_type": "yarn", "factor": 4.0}}));
        assert!(error.contains(key) && error.contains("yarn") && error.contains("supported"), "{error}");
    }
    assert!(error_with(json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})).contains("rope_parameters"));
    assert!(error_with(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).contains("linear"));
}

#[test]
fn only_an_effective_sliding_window_is_refused() {
    assert!(read_with(json!({"use_sliding_window": false, "sliding_window": 4096})).is_ok());
    assert!(read_with(json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0})).is_ok());
    assert!(read_with(json!({"use_sliding_window": true, "max_window_layers": 2})).is_ok());
    assert!(error_with(json!({"use_sliding_window": true, "max_window_layers": 1})).contains("max_window_layers 1"));
    assert!(error_with(json!({"layer_types": ["full_attention", "sliding_attention"]})).contains("layer_types[1]"));
    assert!(error_with(json!({"layer_types": ["full_attention", "linear_attention"]})).contains("linear_attention"));
    assert!(error_with(json!({"layer_types": ["full_attention"]})).contains("1 entries"));
}

#[test]
fn end_of_sequence_tokens_of_the_generation_config_win() {
    let config = json!({"model_type": "qwen3", "eos_token_id": 5}).to_string();
    let eos = |generation: Option<&str>| ModelConfig::from_json(&config, generation).unwrap().eos_token_ids;
    assert_eq!(eos(None), [5]);
    assert_eq!(eos(Some(r#"{"eos_token_id": [7, 8]}"#)), [7, 8]);
    assert_eq!(eos(Some(r#"{"eos_token_id": 9}"#)), [9]);
    assert_eq!(eos(Some(r#"{"eos_token_id": null}"#)), [5]);
    assert!(ModelConfig::from_json(&config, Some("[]")).unwrap_err().to_string().contains("generation_config.json"));
}

#[test]
fn the_dtype_is_read_from_either_key_and_half_precision_is_widened() {
    let dtype = |changes| read_with(changes).unwrap().dtype;
    assert_eq!(dtype(json!({"torch_dtype": "bfloat16"})), Some(DType::BF16));
    assert_eq!(dtype(json!({"torch_dtype": "bfloat16", "dtype": "float32"})), Some(DType::F32));
    assert_eq!(dtype(json!({"dtype": "float16"})), Some(DType::F32));
    assert_eq!(dtype(json!({"dtype": null})), None);
    assert!(error_with(json!({"dtype": "float8_e4m3fn"})).contains("float8_e4m3fn"));
}

#[test]
fn hostile_values_are_refused_by_key_and_value() {
    for (changes, expected) in [
        (json!({"model_type": "llama"}), "model_type \"llama\""),
        (json!({"model_type": "absent"}), "model_type is missing"),
        (json!({"hidden_act": "gelu"}), "hidden_act \"gelu\""),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "fp8"),
        (json!({"hidden_size": 0}), "hidden_size 0"),
        (json!({"hidden_size": -1}), "hidden_size is -1"),
        (json!({"hidden_size": 64.5}), "hidden_size is 64.5"),
        (json!({"hidden_size": u64::MAX}), "hidden_size 18446744073709551615"),
        (json!({"vocab_size": 1u64 << 40}), "vocab_size 1099511627776"),
        (json!({"vocab_size": null}), "vocab_size is null"),
        (json!({"head_dim": null}), "head_dim is null"),
        (json!({"num_hidden_layers": 100_000}), "num_hidden_layers 100000"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads 3"),
        (json!({"head_dim": 15}), "head_dim 15"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps 0"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps is \"small\""),
        (json!({"rms_norm_eps": 1e300}), "rms_norm_eps inf"),
        (json!({"rope_theta": -1.0}), "rope_theta -1"),
        (json!({"rope_theta": null}), "rope_theta is null"),
        (json!({"eos_token_id": 100}), "eos_token_id 100"),
        (json!({"eos_token_id": [1, -2]}), "eos_token_id is -2"),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings is 1"),
    ] {
        let error = error_with(changes);
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
    assert!(ModelConfig::from_json("{", None).unwrap_err().to_string().contains("not JSON"));
    assert!(ModelConfig::from_json("[1]", None).unwrap_err().to_string().contains("not an object"));
    let long = error_with(json!({"hidden_act": "é".repeat(100_000)}));
    assert!(long.len() < 1000);
}

#[test]
fn what_is_written_is_read_back() {
    for name in ModelConfig::named_shapes() {
        let config = ModelConfig::named_shape(name).unwrap();
        config.validate().unwrap();
        assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config, "{name}");
    }
    let mut config = read_with(json!({"dtype": "float32", "eos_token_id": 3, "rms_norm_eps": 1e-5})).unwrap();
    assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    config.eos_token_ids.clear();
    config.dtype = None;
    assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    assert!(config.to_json().contains("\"rms_norm_eps\": 0.00001,"), "{}", config.to_json());
}

#[test]
fn an_unknown_shape_has_no_config() {
    assert!(ModelConfig::named_shape("qwen3-9000b").is_none());
    assert_eq!(ModelConfig::named_shapes().next(), Some("qwen3-0.6b"));
}

#[test]
fn token_ids_beyond_the_vocabulary_are_refused_in_either_file_and_under_any_name() {
    let config = |extra: &str| format!(r#"{{"model_type": "qwen3", "vocab_size": 100{extra}}}"#);
    assert!(ModelConfig::from_json(&config(r#", "pad_token_id": 99"#), Some(r#"{"pad_token_id": null}"#)).is_ok());
    for key in ["eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"] {
        for value in ["100", "[7, 100]", "-1", "\"seven\""] {
            let entry = format!(r#""{key}": {value}"#);
            let errors = [
                ModelConfig::from_json(&config(&format!(", {entry}")), None),
                ModelConfig::from_json(&config(""), Some(&format!("{{{entry}}}"))),
                // Also where the other file's wins.
                ModelConfig::from_json(&config(&format!(", {entry}")), Some(r#"{"eos_token_id": 5}"#)),
            ];
            for error in errors {
                let error = error.unwrap_err().to_string();
                assert!(error.contains(key), "{error}");
            }
        }
    }
}
