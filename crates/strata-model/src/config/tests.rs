mod vision;

use serde_json::{Value, json};
use strata_tensor::{DType, DeltaGeometry, ExpertActivation};

use crate::architectures::{DeepseekV3Config, DenseConfig, MlpConfig, Qwen3_5Config, Qwen3_5Mlp, Router, SigmoidRouter};

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

/// What a dense model has of its own.
fn dense(config: &ModelConfig) -> &DenseConfig {
    let (Family::Qwen3(c) | Family::Qwen2(c) | Family::Llama(c) | Family::Mistral(c)) = &config.family else {
        panic!("{config:?} is not dense")
    };
    c
}

fn error_with(changes: Value) -> String {
    read_with(changes.clone()).expect_err(&changes.to_string()).to_string()
}

#[test]
fn the_embedded_config_is_read() {
    let config = ModelConfig::from_json(TINY_CONFIG, Some(TINY_GENERATION_CONFIG)).unwrap();
    let DenseConfig { attention: a, mlp } = dense(&config);
    assert_eq!((config.num_layers, config.hidden_size, a.num_heads, a.num_kv_heads), (5, 192, 6, 2));
    assert_eq!((a.head_dim, mlp.intermediate_size, config.vocab_size), (32, 512, 272));
    assert_eq!((a.rope.theta, config.rms_norm_eps, config.max_position_embeddings), (1e4, 1e-6, 2048));
    assert_eq!((config.dtype, config.tie_word_embeddings), (Some(DType::BF16), true));
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(0), &[2][..]));
}

/// What a model that attends over latents has of its own.
fn latent(config: &ModelConfig) -> &DeepseekV3Config {
    let (Family::DeepseekV3(c) | Family::Glm4MoeLite(c)) = &config.family else { panic!("{config:?} has no latents") };
    c
}

#[test]
fn defaults_of_families_with_latents_are_those_of_transformers() {
    let deepseek = ModelConfig::from_json(r#"{"model_type": "deepseek_v3"}"#, None).unwrap();
    let DeepseekV3Config { attention: a, mlp, moe, sparse, further_layers } = latent(&deepseek);
    assert_eq!((a.num_heads, a.query_latent, a.latent), (128, Some(1536), 512));
    assert_eq!((a.nope_dim, a.rope_dim, a.value_dim, a.bias, a.interleaved), (128, 64, 128, false, true));
    assert_eq!((mlp.intermediate_size, moe.num_experts, moe.experts_per_token, moe.shared_size), (18_432, 256, 8, Some(2048)));
    let router = SigmoidRouter { num_groups: 8, top_groups: 4, normalize: true, scaling_factor: 2.5 };
    assert_eq!((&moe.router, *further_layers), (&Router::Sigmoid(router), 1));
    assert_eq!((sparse.iter().position(|s| *s), sparse.len(), deepseek.rms_norm_eps), (Some(3), 61, 1e-6));

    let glm = ModelConfig::from_json(r#"{"model_type": "glm4_moe_lite"}"#, None).unwrap();
    let DeepseekV3Config { attention: a, moe, sparse, .. } = latent(&glm);
    assert_eq!((a.num_heads, a.query_latent, a.latent), (20, Some(768), 512));
    assert_eq!((a.nope_dim, a.rope_dim, a.value_dim), (192, 64, 256));
    let router = SigmoidRouter { num_groups: 1, top_groups: 1, normalize: true, scaling_factor: 1.8 };
    assert_eq!((moe.num_experts, &moe.router), (64, &Router::Sigmoid(router)));
    assert_eq!((sparse.iter().position(|s| *s), sparse.len(), glm.rms_norm_eps), (Some(1), 47, 1e-5));
    for config in [deepseek, glm] {
        assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    }
}

#[test]
fn what_attention_over_latents_does_not_compute_is_refused() {
    let error = |key: &str, value: Value| {
        let json = json!({ "model_type": "deepseek_v3", key: value });
        ModelConfig::from_json(&json.to_string(), None).expect_err(key).to_string()
    };
    for (key, value, said) in [
        ("num_key_value_heads", json!(8), "num_key_value_heads 8"),
        ("head_dim", json!(128), "head_dim 128"),
        ("scoring_func", json!("softmax"), "scoring_func \"softmax\""),
        ("topk_method", json!("greedy"), "topk_method \"greedy\""),
        ("moe_layer_freq", json!(2), "moe_layer_freq 2"),
        ("n_group", json!(7), "n_group 7"),
        ("topk_group", json!(9), "topk_group 9"),
        ("num_experts_per_tok", json!(129), "num_experts_per_tok 129"),
        ("num_hidden_layers", json!(1000), "1000 layers of 256 experts"),
        ("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.5}), "mscale_all_dim"),
        ("partial_rotary_factor", json!(0.5), "32 of the 64"),
        ("hidden_act", json!("gelu"), "hidden_act \"gelu\""),
    ] {
        assert!(error(key, value.clone()).contains(said), "{key}: {}", error(key, value));
    }
    let schedule = r#"{"model_type": "glm4_moe_lite", "num_hidden_layers": 2, "mlp_layer_types": ["dense", "linear"]}"#;
    assert!(ModelConfig::from_json(schedule, None).unwrap_err().to_string().contains("mlp_layer_types[1] \"linear\""));
    let contradicted = r#"{"model_type": "glm4_moe_lite", "first_k_dense_replace": 2}"#;
    assert!(ModelConfig::from_json(contradicted, None).unwrap_err().to_string().contains("first_k_dense_replace 2"));
}

/// Yarn stretches the scale of all of a query and a key beside the cosines and sines of what turns.
#[test]
fn yarn_stretches_the_scale_of_attention_over_latents() {
    let scale = |rope: Value| {
        let json = json!({"model_type": "deepseek_v3", "num_hidden_layers": 1, "rope_scaling": rope});
        latent(&ModelConfig::from_json(&json.to_string(), None).unwrap()).attention.scale()
    };
    let yarn =
        |all: f64| json!({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": all});
    assert_eq!(scale(json!(null)), 192f32.sqrt().recip());
    assert_eq!(scale(yarn(0.0)), 192f32.sqrt().recip());
    assert!((scale(yarn(1.0)) / scale(json!(null)) - 1.873_854).abs() < 1e-5);
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = ModelConfig::from_json(r#"{"model_type": "qwen3"}"#, None).unwrap();
    let DenseConfig { attention: a, mlp } = dense(&config);
    assert_eq!((config.vocab_size, config.hidden_size, mlp.intermediate_size), (151_936, 4096, 22_016));
    assert_eq!((config.num_layers, a.num_heads, a.num_kv_heads, a.head_dim), (32, 32, 32, 128));
    assert_eq!((config.rms_norm_eps, a.rope.theta, config.max_position_embeddings), (1e-6, 1e4, 32_768));
    assert_eq!((a.qkv_bias, a.o_bias, mlp.bias, config.tie_word_embeddings), (false, false, false, false));
    assert_eq!((&a.windows[..], &a.rope.scaling), (&[None; 32][..], &RopeScaling::Default));
    assert_eq!((config.eos_token_ids.len(), config.dtype), (0, None));
    assert_eq!(dense(&read_with(json!({"num_key_value_heads": null})).unwrap()).attention.num_kv_heads, 4);

    let llama = ModelConfig::from_json(r#"{"model_type": "llama"}"#, None).unwrap();
    let DenseConfig { attention: a, mlp } = dense(&llama);
    assert_eq!((llama.vocab_size, a.num_kv_heads, a.head_dim, mlp.intermediate_size), (32_000, 32, 128, 11_008));
    assert_eq!((llama.bos_token_id, &llama.eos_token_ids[..], llama.max_position_embeddings), (Some(1), &[2][..], 2048));
    let none = ModelConfig::from_json(r#"{"model_type": "llama", "bos_token_id": null, "eos_token_id": null}"#, None).unwrap();
    assert_eq!((none.bos_token_id, none.eos_token_ids.len()), (None, 0));

    let qwen2 = ModelConfig::from_json(
        r#"{"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}"#,
        None,
    );
    let DenseConfig { attention: a, .. } = dense(qwen2.as_ref().unwrap_or_else(|e| panic!("{e}")));
    assert_eq!((a.head_dim, a.qkv_bias, a.o_bias, a.qk_norm), (64, true, false, None));

    let mistral = ModelConfig::from_json(r#"{"model_type": "mistral"}"#, None).unwrap();
    let DenseConfig { attention: a, mlp } = dense(&mistral);
    assert_eq!((a.num_kv_heads, mlp.intermediate_size, mistral.max_position_embeddings), (8, 14_336, 131_072));
    assert_eq!(a.windows, [Some(4096); 32]);
    let all = ModelConfig::from_json(r#"{"model_type": "mistral", "sliding_window": null}"#, None).unwrap();
    assert_eq!(dense(&all).attention.windows, [None; 32]);
    for model_type in ["mistral", "ministral"] {
        let of_types = |types: &str| {
            let config = format!(
                r#"{{"model_type": "{model_type}", "num_hidden_layers": 2, "sliding_window": 9, "layer_types": {types}}}"#
            );
            ModelConfig::from_json(&config, None)
        };
        let mixed = of_types(r#"["full_attention", "sliding_attention"]"#).unwrap();
        assert_eq!(dense(&mixed).attention.windows, [None, Some(9)]);
        assert_eq!(dense(&of_types(r#"["full_attention", "full_attention"]"#).unwrap()).attention.windows, [None; 2]);
        assert_eq!(dense(&of_types("null").unwrap()).attention.windows, [Some(9); 2]);
        assert!(of_types(r#"["full_attention"]"#).unwrap_err().to_string().contains("1 entries"));
        assert!(of_types(r#"["full_attention", "chunked_attention"]"#).unwrap_err().to_string().contains("layer_types[1]"));
    }
}

#[test]
fn rope_theta_is_read_from_either_layout() {
    let theta = |changes| dense(&read_with(changes).unwrap()).attention.rope.theta;
    assert_eq!(theta(json!({"rope_theta": 5e5, "rope_scaling": null})), 5e5);
    assert_eq!(theta(json!({"rope_theta": 1000000})), 1e6);
    assert_eq!(theta(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})), 7.0);
    assert_eq!(theta(json!({"rope_parameters": {"rope_type": "default"}, "rope_theta": 9.0})), 9.0);
    assert_eq!(theta(json!({"rope_parameters": {"rope_theta": 3.0}, "rope_theta": 9.0})), 3.0);
    assert_eq!(theta(json!({"rope_scaling": {}, "rope_parameters": null})), 1e4);
}

#[test]
fn every_kind_of_rope_is_read_from_either_layout() {
    let scaling = |changes: Value| {
        dense(&read_with(changes.clone()).unwrap_or_else(|e| panic!("{changes}: {e}"))).attention.rope.scaling.clone()
    };
    for key in ["rope_scaling", "rope_parameters"] {
        assert_eq!(scaling(json!({key: {"type": "linear", "factor": 2}})), RopeScaling::Linear { factor: 2.0 });
        assert_eq!(scaling(json!({key: {"rope_type": "dynamic", "factor": 2.5}})), RopeScaling::Dynamic { factor: 2.5 });
        let yarn = Yarn {
            factor: 4.0,
            original_max_position_embeddings: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        };
        assert_eq!(scaling(json!({key: {"rope_type": "yarn", "factor": 4.0}})), RopeScaling::Yarn(yarn.clone()));
        let given = json!({key: {"rope_type": "yarn", "original_max_position_embeddings": 8192, "beta_fast": 0, "beta_slow": 2,
            "mscale": 1.0, "truncate": false}});
        let implied =
            Yarn { original_max_position_embeddings: 8192, beta_slow: 2.0, mscale: Some(1.0), truncate: false, ..yarn };
        assert_eq!(scaling(given), RopeScaling::Yarn(implied));
        let llama3 = json!({key: {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}});
        assert!(matches!(scaling(llama3), RopeScaling::Llama3 { original_max_position_embeddings: 8192, .. }));
        let long = json!({key: {"rope_type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8],
            "original_max_position_embeddings": 1024}});
        let RopeScaling::LongRope(long) = scaling(long) else { panic!("longrope is read as something else") };
        assert!((long.attention_factor - (1.0 + 32f64.ln() / 1024f64.ln()).sqrt()).abs() < 1e-12);
    }
}

#[test]
fn rope_that_cannot_be_computed_is_refused_by_name() {
    for key in ["rope_scaling", "rope_parameters"] {
        let refused = |rope: Value| error_with(json!({key: rope}));
        for (rope, expected) in [
            (json!({"rope_type": "cubist"}), "cubist"),
            (json!({"rope_type": 7}), "rope_type is 7"),
            (json!({"rope_type": "linear"}), "has no factor"),
            (json!({"rope_type": "linear", "factor": "big"}), "factor is \"big\""),
            (json!({"rope_type": "linear", "factor": 0}), "inf"),
            (json!({"rope_type": "linear", "factor": -1}), "-1"),
            (json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}), "has no high_freq_factor"),
            (json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}), "1 factors for 8 pairs"),
            (json!({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}), "short_factor is 1.0"),
            (json!({"partial_rotary_factor": 0.0}), "partial_rotary_factor 0"),
            (json!({"partial_rotary_factor": 0.5}), "8 of 16"),
            (json!({"full_attention": {"rope_type": "default"}}), "full_attention"),
            (json!(4), "is 4"),
        ] {
            let error = refused(rope.clone());
            assert!(error.contains(expected), "{rope}: {error}");
        }
    }
}

#[test]
fn windows_are_those_of_the_layers_that_have_them() {
    let windows = |changes| dense(&read_with(changes).unwrap()).attention.windows.clone();
    assert_eq!(windows(json!({"use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 0})), [None; 2]);
    assert_eq!(windows(json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0})), [None; 2]);
    assert_eq!(windows(json!({"use_sliding_window": true, "max_window_layers": 2})), [None; 2]);
    assert_eq!(windows(json!({"use_sliding_window": true, "max_window_layers": 1})), [None, Some(4096)]);
    let types = |names: Value| json!({"use_sliding_window": true, "sliding_window": 7, "layer_types": names});
    assert_eq!(windows(types(json!(["sliding_attention", "full_attention"]))), [Some(7), None]);
    assert!(error_with(types(json!(["full_attention", "linear_attention"]))).contains("linear_attention"));
    assert!(error_with(types(json!(["full_attention"]))).contains("1 entries"));
    assert!(error_with(types(json!(["full_attention", 3]))).contains("layer_types[1]"));
    let without = json!({"layer_types": ["full_attention", "sliding_attention"]});
    assert!(error_with(without).contains("layer_types[1]"));
}

#[test]
fn gpt_oss_has_the_windows_rope_and_experts_of_its_defaults() {
    let oss = |changes: Value| {
        let mut keys = json!({"model_type": "gpt_oss"});
        keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read_with(keys)
    };
    let parts = |changes: Value| match oss(changes).unwrap().family {
        Family::GptOss(c) => c,
        other => panic!("{other:?}"),
    };
    let c = parts(json!({"head_dim": 64, "num_key_value_heads": 1}));
    assert_eq!(c.attention.windows, [Some(128), None]);
    assert!(c.attention.sinks && c.attention.qkv_bias && c.attention.o_bias);
    assert_eq!((c.moe.num_experts, c.moe.experts_per_token, c.moe.shared_size), (128, 4, None));
    assert_eq!(c.moe.activation, ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 });
    let published = json!({"rope_theta": 150_000, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}});
    assert_eq!(parts(published.clone()).attention.rope, parts(json!({})).attention.rope);
    assert_eq!(parts(published).attention.rope.theta, 150_000.0);
    assert_eq!(parts(json!({"num_local_experts": 32})).moe.num_experts, 32);
    assert_eq!(oss(json!({})).unwrap().rms_norm_eps, 1e-5);
    assert_eq!(parts(json!({"quantization_config": {"quant_method": "mxfp4"}})), parts(json!({})));
    for (changes, expected) in [
        (json!({"quantization_config": {"quant_method": "fp8"}}), "fp8"),
        (json!({"quantization_config": {}}), "quantization_config {}"),
        (json!({"sliding_window": null}), "layer_types[0]"),
        (json!({"layer_types": ["full_attention"]}), "1 entries"),
        (json!({"swiglu_limit": 0}), "swiglu_limit 0"),
        (json!({"swiglu_alpha": "steep"}), "swiglu_alpha is \"steep\""),
        (json!({"num_experts_per_tok": 129}), "num_experts_per_tok 129"),
        (json!({"hidden_act": "gelu"}), "hidden_act \"gelu\""),
    ] {
        let error = oss(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
    let mxfp4 = json!({"quantization_config": {"quant_method": "mxfp4"}});
    assert!(error_with(mxfp4).contains("mxfp4"), "of another family");
}

/// What a Qwen3.5 model has of its own.
fn qwen3_5(config: &ModelConfig) -> &Qwen3_5Config {
    let Family::Qwen3_5(c) = &config.family else { panic!("{config:?} is not Qwen3.5") };
    c
}

#[test]
fn qwen3_5_has_the_layers_heads_and_experts_of_its_defaults() {
    let delta = DeltaGeometry { k_heads: 16, v_heads: 32, k_dim: 128, v_dim: 128, kernel: 4 };
    let dense = ModelConfig::from_json(r#"{"model_type": "qwen3_5_text"}"#, None).unwrap();
    let c = qwen3_5(&dense);
    assert_eq!((dense.vocab_size, dense.hidden_size, dense.num_layers, dense.tie_word_embeddings), (248_320, 4096, 32, false));
    assert_eq!((c.attention.num_heads, c.attention.num_kv_heads, c.attention.head_dim, c.delta), (16, 4, 256, delta));
    assert_eq!((c.attention.rope.rotary_dim, c.attention.qkv_bias, dense.max_position_embeddings), (64, false, 32_768));
    assert_eq!((c.attends.iter().filter(|attends| **attends).count(), &c.attends[..4]), (8, &[false, false, false, true][..]));
    assert!(matches!(c.mlp, Qwen3_5Mlp::Dense(MlpConfig { intermediate_size: 12_288, bias: false })));
    let moe = ModelConfig::from_json(r#"{"model_type": "qwen3_5_moe_text"}"#, None).unwrap();
    let c = qwen3_5(&moe);
    assert_eq!((moe.hidden_size, moe.num_layers, c.attention.num_kv_heads, c.delta), (2048, 40, 2, delta));
    let Qwen3_5Mlp::Experts(experts) = &c.mlp else { panic!("{c:?} has no experts") };
    assert_eq!((experts.num_experts, experts.experts_per_token, experts.intermediate_size), (256, 8, 512));
    assert_eq!(
        (experts.shared_size, experts.shared_gate, &experts.router),
        (Some(512), true, &Router::Softmax { normalize: true })
    );

    let read = |changes: Value| {
        let mut keys = json!({"model_type": "qwen3_5_text", "head_dim": 24, "full_attention_interval": 2});
        keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read_with(keys)
    };
    assert_eq!(qwen3_5(&read(json!({})).unwrap()).attends, [false, true]);
    let types = json!({"layer_types": ["full_attention", "linear_attention"], "full_attention_interval": 2});
    assert_eq!(qwen3_5(&read(types).unwrap()).attends, [true, false]);
    let turning = |changes| qwen3_5(&read(changes).unwrap()).attention.rope.rotary_dim;
    assert_eq!((turning(json!({})), turning(json!({"partial_rotary_factor": 0.5}))), (6, 12));
    let in_rope = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0, "mrope_section": [4, 4, 4], "mrope_interleaved": true}});
    assert_eq!(turning(in_rope), 24);
    // As Python reads it; one unit in the last place less would be three elements.
    assert_eq!(turning(json!({"head_dim": 34, "partial_rotary_factor": 4.0 / 34.0})), 4);
    for (changes, expected) in [
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types[1] \"sliding_attention\""),
        (json!({"layer_types": ["full_attention"]}), "1 entries"),
        (json!({"full_attention_interval": 0}), "full_attention_interval 0"),
        (json!({"linear_num_value_heads": 24}), "linear_num_value_heads 24"),
        (json!({"linear_conv_kernel_dim": 0}), "linear_conv_kernel_dim 0"),
        (json!({"linear_conv_kernel_dim": 65}), "linear_conv_kernel_dim 65"),
        (json!({"linear_key_head_dim": 1 << 20}), "linear_key_head_dim 1048576"),
        (json!({"head_dim": 20}), "5 elements of a head"),
        (json!({"hidden_act": "gelu"}), "hidden_act \"gelu\""),
        (json!({"rope_parameters": {"rope_type": "mrope"}}), "mrope"),
    ] {
        let error = read(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
}

#[test]
fn of_a_composite_the_text_is_read() {
    let text = json!({"model_type": "qwen3_5_text", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "dtype": "bfloat16",
        "tie_word_embeddings": true, "eos_token_id": 7});
    let read = |own: Value, generation| {
        let mut composite = json!({"model_type": "qwen3_5", "text_config": text, "hidden_size": 999, "image_token_id": 248_056,
            "vision_config": {"hidden_size": 8}});
        composite.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        ModelConfig::from_json(&composite.to_string(), generation)
    };
    let config = read(json!({}), None).unwrap();
    assert_eq!((config.hidden_size, config.num_layers, config.dtype), (64, 2, Some(DType::BF16)));
    // What the composite says of its unembedding counts, and it says so by default.
    assert!(!config.tie_word_embeddings && read(json!({"tie_word_embeddings": true}), None).unwrap().tie_word_embeddings);
    let eos = |own, generation| read(own, generation).unwrap().eos_token_ids;
    assert_eq!((eos(json!({}), None), eos(json!({"eos_token_id": [8, 9]}), None)), (vec![7], vec![8, 9]));
    assert_eq!(eos(json!({"eos_token_id": 8}), Some(r#"{"eos_token_id": 5}"#)), [5]);
    assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    let of_defaults = ModelConfig::from_json(r#"{"model_type": "qwen3_5_moe", "dtype": "float32"}"#, None).unwrap();
    assert_eq!(
        (of_defaults.model_type(), of_defaults.hidden_size, of_defaults.dtype),
        ("qwen3_5_moe_text", 2048, Some(DType::F32))
    );
    for (own, expected) in [
        (json!({"text_config": 3}), "text_config is 3"),
        (json!({"text_config": {"model_type": "qwen3_5_moe_text"}}), "text_config.model_type \"qwen3_5_moe_text\""),
        (json!({"text_config": {"quantization_config": {"quant_method": "hqq"}}}), "hqq"),
        (json!({"quantization_config": {"quant_method": "hqq"}}), "hqq"),
        (json!({"quantization_config": {"quant_method": "gptq", "bits": 3}}), "bits 3"),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
                "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}}),
            "text_config.quantization_config",
        ),
        (json!({"tie_word_embeddings": null}), "tie_word_embeddings is null"),
        (json!({"eos_token_id": 100}), "eos_token_id 100"),
    ] {
        let error = read(own, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
}

#[test]
fn layouts_of_four_bits_are_read_and_others_refused_by_key_and_value() {
    let form = |own: Value| read_with(json!({ "quantization_config": own })).map(|config| config.int4);
    let with = |base: &Value, own: Value| {
        let mut all = base.clone();
        all.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        form(all)
    };
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
    let of = |layout, group_inputs| Some(Int4Form { layout, group_inputs });
    let of_gptq = |zeros_less, reordered| Int4Layout::Gptq { zeros_less, reordered };
    assert_eq!(form(gptq.clone()).unwrap(), of(of_gptq(1, false), Some(128)));
    let second = json!({"checkpoint_format": "gptq_v2", "group_size": -1, "desc_act": true, "dynamic": null});
    assert_eq!(with(&gptq, second).unwrap(), of(of_gptq(0, true), None));
    for (named, zeros_less) in [
        (json!({"format": "gptq_v2"}), 0),
        (json!({"format": "gptq_v2", "checkpoint_format": null}), 0),
        (json!({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}), 0),
        (json!({"format": "gptq"}), 1),
    ] {
        assert_eq!(with(&gptq, named).unwrap(), of(of_gptq(zeros_less, false), Some(128)));
    }
    let awq = json!({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": true, "version": "GEMM"});
    assert_eq!(form(awq.clone()).unwrap(), of(Int4Layout::Awq, Some(64)));
    let compressed = |weights: Value, others: Value| {
        let mut all = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
        all.as_object_mut().unwrap().extend(weights.as_object().unwrap().clone());
        let mut groups = json!({"group_0": {"weights": all, "targets": ["Linear"]}});
        groups.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        form(json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}))
    };
    let compressed_with = |own: Value| {
        let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
        let groups = json!({"group_0": {"weights": weights, "targets": ["Linear"]}});
        with(&json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}), own)
    };
    let none = || json!({});
    let layout = |symmetric| Int4Layout::CompressedTensors { symmetric };
    assert_eq!(compressed(none(), none()).unwrap(), of(layout(true), Some(32)));
    assert_eq!(compressed(json!({"symmetric": false, "actorder": "static"}), none()).unwrap(), of(layout(false), Some(32)));
    assert_eq!(compressed(json!({"strategy": "channel", "group_size": null}), none()).unwrap(), of(layout(true), None));
    let sparsity = json!({"sparsity_config": {"format": "dense", "ignore": ["lm_head"]}, "transform_config": {}});
    assert_eq!(compressed_with(sparsity).unwrap(), of(layout(true), Some(32)));
    // What is said of some modules says nothing new.
    let excluded = json!({"dynamic": {"-:.*attn.*": {}, "-:.*visual.*": true, "lm_head": {}, "+:.*mlp.*": {"bits": 4}}});
    assert_eq!(with(&gptq, excluded).unwrap(), of(of_gptq(1, false), Some(128)));
    assert_eq!(with(&gptq, json!({"desc_act": null})).unwrap(), of(of_gptq(1, false), Some(128)));
    assert_eq!(with(&awq, json!({"zero_point": false})).unwrap(), of(Int4Layout::Awq, Some(64)));
    let composite = json!({"model_type": "qwen3_5", "quantization_config": gptq}).to_string();
    assert_eq!(ModelConfig::from_json(&composite, None).unwrap().int4, of(of_gptq(1, false), Some(128)));

    let other_group = json!({"group_1": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}});
    for (refused, expected) in [
        (with(&gptq, json!({"bits": 8})), "quantization_config.bits 8"),
        (with(&gptq, json!({"group_size": 48})), "quantization_config.group_size 48"),
        (with(&gptq, json!({"group_size": null})), "quantization_config.group_size is missing"),
        (with(&gptq, json!({"checkpoint_format": "marlin"})), "checkpoint_format \"marlin\""),
        (with(&gptq, json!({"format": "marlin", "checkpoint_format": "gptq"})), "quantization_config.format \"marlin\""),
        (with(&gptq, json!({"format": "gptq_v2", "checkpoint_format": "gptq"})), "quantization_config.format \"gptq_v2\""),
        (with(&gptq, json!({"dynamic": {"+:lm_head": {"bits": 8}}})), "quantization_config.dynamic.+:lm_head.bits 8"),
        (with(&gptq, json!({"dynamic": {"lm_head": {"sym": false}}})), "quantization_config.dynamic.lm_head.sym false"),
        (with(&gptq, json!({"dynamic": 3})), "quantization_config.dynamic is 3"),
        (with(&gptq, json!({"rotation": "hadamard"})), "quantization_config.rotation \"hadamard\""),
        (with(&awq, json!({"rotation": "random"})), "quantization_config.rotation \"random\""),
        (with(&gptq, json!({"adapter": {"name": "lora", "rank": 8}})), "quantization_config.adapter"),
        (with(&gptq, json!({"pack_dtype": "int64"})), "pack_dtype \"int64\""),
        (with(&awq, json!({"version": "gemv"})), "version \"gemv\""),
        (with(&awq, json!({"format": "gemv"})), "quantization_config.format \"gemv\""),
        (with(&awq, json!({"checkpoint_format": "gemv_fast"})), "quantization_config.checkpoint_format \"gemv_fast\""),
        (with(&awq, json!({"backend": "llm-awq"})), "quantization_config.backend \"llm-awq\""),
        (with(&awq, json!({"dynamic": {"lm_head": {"bits": 8}}})), "quantization_config.dynamic.lm_head.bits 8"),
        (with(&awq, json!({"zero_point": "no"})), "zero_point is \"no\""),
        (compressed_with(json!({"sparsity_config": {"format": "sparse-24-bitmask"}})), "sparsity_config.format \"sparse-24"),
        (compressed_with(json!({"sparsity_config": {"sparsity_structure": "2:4"}})), "sparsity_config.format is missing"),
        (compressed_with(json!({"transform_config": {"config_groups": {"R1": {}}}})), "quantization_config.transform_config"),
        (compressed(json!({"num_bits": 8}), none()), "config_groups.group_0.weights.num_bits 8"),
        (compressed(json!({"type": "float"}), none()), "weights.type \"float\""),
        (compressed(json!({"actorder": "group"}), none()), "weights.actorder \"group\""),
        (compressed(json!({"dynamic": true}), none()), "weights.dynamic true"),
        (compressed(none(), other_group), "config_groups.group_1.weights"),
        (compressed(none(), json!({"group_0": {"weights": null}})), "group_0.weights is missing"),
        (form(json!({"quant_method": "compressed-tensors", "format": "float-quantized"})), "format \"float-quantized\""),
        (
            form(json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}})),
            "config_groups {}",
        ),
        (form(json!("gptq")), "quantization_config is \"gptq\""),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
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
fn matrices_in_bytes_are_read_as_transformers_writes_what_it_says_of_them() {
    let with = |changes: Value| {
        // `FineGrainedFP8Config().to_dict()` of transformers 5.24.
        let mut all = json!({
            "quant_method": "fp8", "modules_to_not_convert": null, "modules_to_convert": null, "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "dequantize": false, "scale_fmt": "float", "expert_dtype": "fp8"
        });
        changes.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
        read_with(json!({ "quantization_config": all })).map(|_| ()).map_err(|error| error.to_string())
    };
    for same in [json!({}), json!({"dequantize": true}), json!({"ignored_layers": ["lm_head"]}), json!({"fmt": "e4m3"})] {
        assert_eq!(with(same.clone()), Ok(()), "{same}");
    }
    for (other, named) in [
        (json!({"expert_dtype": "fp4"}), "quantization_config.expert_dtype \"fp4\""),
        (json!({"modules_to_convert": ["embed_tokens"]}), "quantization_config.modules_to_convert [\"embed_tokens\"]"),
        (json!({"activation_scheme": "static"}), "quantization_config.activation_scheme \"static\""),
    ] {
        assert!(with(other).is_err_and(|error| error.contains(named)), "{named}");
    }
}

#[test]
fn hostile_values_are_refused_by_key_and_value() {
    for (changes, expected) in [
        (json!({"model_type": "gpt2"}), "model_type \"gpt2\""),
        (json!({"model_type": "absent"}), "model_type is missing"),
        (json!({"hidden_act": "gelu"}), "hidden_act \"gelu\""),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "fp8"),
        (json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": null}}), "with a weight_block_size"),
        (json!({"quantization_config": {"quant_method": "hqq", "weight_block_size": [128, 128]}}), "hqq"),
        (json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}), "weight_block_size [64,128]"),
        (json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}}), "e5m2"),
        (json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "bits": 8}}), "bits 8"),
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
        let config = ModelConfig::named_shape(name).unwrap_or_else(|| panic!("{name} is no configuration"));
        assert_eq!(ModelConfig::named_shape_of_layers(name, 3).unwrap().num_layers, 3);
        assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config, "{name}");
    }
    for changes in [
        json!({"model_type": "llama", "attention_bias": true, "mlp_bias": true, "head_dim": 20}),
        json!({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
        json!({"model_type": "qwen2", "use_sliding_window": true, "max_window_layers": 1}),
        json!({"model_type": "qwen2", "head_dim": 18, "rope_scaling": {"rope_type": "dynamic", "factor": 3.5}}),
        json!({"model_type": "mistral", "sliding_window": null, "rope_scaling": {"rope_type": "linear", "factor": 3}}),
        json!({"model_type": "mistral", "sliding_window": 9}),
        json!({"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
        json!({"model_type": "qwen3_moe", "mlp_only_layers": [1], "norm_topk_prob": true, "use_sliding_window": true, "sliding_window": 5}),
        json!({"model_type": "qwen3_moe", "num_local_experts": 16, "decoder_sparse_step": 2, "head_dim": 20}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "attention_bias": true}),
        json!({"model_type": "gpt_oss"}),
        json!({"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default"}, "layer_types": ["full_attention", "full_attention"],
            "sliding_window": null, "swiglu_limit": 5.5, "swiglu_alpha": 1.25, "attention_bias": false, "num_experts": 6}),
        json!({"model_type": "deepseek_v3", "head_dim": "absent", "num_key_value_heads": 4, "q_lora_rank": null,
               "rope_interleave": false, "norm_topk_prob": false, "attention_bias": true, "first_k_dense_replace": 0,
               "n_shared_experts": 3, "num_mtp_layers": 2, "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7}}),
        json!({"model_type": "glm4_moe_lite", "head_dim": "absent", "num_key_value_heads": 4,
               "mlp_layer_types": ["sparse", "dense"], "num_nextn_predict_layers": 0}),
        json!({"rope_scaling": {"rope_type": "longrope", "short_factor": vec![1.5; 8], "long_factor": vec![2.0; 8], "factor": 3.0}}),
        json!({"model_type": "qwen3_5_text", "head_dim": 98, "partial_rotary_factor": 0.0205, "attention_bias": true}),
        json!({"model_type": "qwen3_5_text", "head_dim": 12, "partial_rotary_factor": 0.84, "full_attention_interval": 1}),
        json!({"model_type": "qwen3_5_moe_text", "partial_rotary_factor": 1.0, "num_experts": 6, "num_experts_per_tok": 3,
               "moe_intermediate_size": 10, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2,
               "linear_num_value_heads": 6, "linear_key_head_dim": 9, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 2}),
    ] {
        let config = read_with(changes.clone()).unwrap_or_else(|e| panic!("{changes}: {e}"));
        assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config, "{changes}");
    }
    let mut config = read_with(json!({"dtype": "float32", "eos_token_id": 3, "rms_norm_eps": 1e-5})).unwrap();
    assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    config.eos_token_ids.clear();
    config.dtype = None;
    assert_eq!(ModelConfig::from_json(&config.to_json(), None).unwrap(), config);
    assert!(config.to_json().contains("\"rms_norm_eps\": 0.00001,"), "{}", config.to_json());
}

#[test]
fn what_makes_another_model_of_any_family_is_refused_by_name() {
    for model_type in
        ["qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "qwen3_5_text"]
    {
        let read = |extra: &str| ModelConfig::from_json(&format!(r#"{{"model_type": "{model_type}", {extra}}}"#), None);
        for harmless in [r#""is_causal": true"#, r#""is_causal": null"#] {
            assert!(read(harmless).is_ok(), "{model_type}: {harmless}");
        }
        for (extra, expected) in [
            (r#""is_causal": false"#, "is_causal false is not supported"),
            (r#""layer_types": ["full_attention"]"#, "layer_types has 1 entries"),
        ] {
            let error = read(extra).unwrap_err().to_string();
            assert!(error.contains(expected), "{model_type}: {error}");
        }
    }
    for (model_type, key) in [("deepseek_v3", "n_routed_experts"), ("qwen3_moe", "num_experts"), ("gpt_oss", "num_experts")] {
        let read = |experts: usize| {
            let config = format!(r#"{{"model_type": "{model_type}", "{key}": 64, "num_local_experts": {experts}}}"#);
            ModelConfig::from_json(&config, None)
        };
        assert!(read(64).is_ok(), "{model_type}");
        let error = read(8).unwrap_err().to_string();
        assert!(error.contains("64") && error.contains("num_local_experts is 8"), "{model_type}: {error}");
    }
    let odd = ModelConfig::from_json(r#"{"model_type": "deepseek_v3", "kv_lora_rank": 33}"#, None).and_then(|c| c.validate());
    assert!(odd.unwrap_err().to_string().contains("kv_lora_rank 33 and qk_rope_head_dim 64 are 97 together"));
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
