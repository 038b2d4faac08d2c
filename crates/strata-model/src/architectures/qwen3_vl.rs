//! Qwen3-VL and Qwen3-VL-MoE, as `Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration` of transformers compute them: Qwen3 or Qwen3-MoE whose tokens may be those of
//! pictures. Their embeddings come from a tower that sees, their positions have three axes, and the first layers are told again what its middle blocks have seen.

use serde_json::{Map, Value, json};
use strata_tensor::{ExpertActivation, Gelu};

use super::blocks::{AttentionConfig, MlpConfig};
use super::declaration::{Declaration, NormWeights};
use super::decoder::DecoderLayers;
use super::dense::{self, DenseConfig};
use super::moe::{MoeConfig, MoeLayout, Router};
use super::qwen3_moe::{self, Qwen3MoeConfig};
use super::vision_tower::VisionConfig;
use super::{Family, FamilyConfig, composite};
use crate::config::fields::{Defaults, Fields, token_id, wrong_kind};
use crate::config::{
    EXPERTS_MAX, HEAD_DIM_MAX, HIDDEN_SIZE_MAX, INTERMEDIATE_SIZE_MAX, NUM_LAYERS_MAX, Rope, VOCAB_SIZE_MAX, short,
};
use crate::{Error, ModelConfig, Result};

/// What a Qwen3-VL model has beside what all models have.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3VlConfig {
    /// The part that reads and writes.
    pub text: Qwen3VlText,
    /// The part that sees.
    pub vision: VisionConfig,
    /// Pairs of a head that turn by time, by rows and by columns.
    pub sections: [usize; 3],
    /// The token that stands for a part of a picture.
    pub image_token_id: u32,
}

/// The decoder of a Qwen3-VL model.
#[derive(Clone, Debug, PartialEq)]
pub enum Qwen3VlText {
    /// That of Qwen3.
    Dense(DenseConfig),
    /// That of Qwen3-MoE.
    Experts(Qwen3MoeConfig),
}

const TEXT: &str = "qwen3_vl_text";
const MOE_TEXT: &str = "qwen3_vl_moe_text";
/// Where a file does not say.
const IMAGE_TOKEN: u32 = 151_655;
const SECTIONS: [usize; 3] = [24, 20, 20];
const THETA: f64 = 500_000.0;

impl Qwen3VlConfig {
    pub(super) fn model_type(&self) -> &'static str {
        match self.text {
            Qwen3VlText::Dense(_) => "qwen3_vl",
            Qwen3VlText::Experts(_) => "qwen3_vl_moe",
        }
    }

    fn decoder(&self) -> &dyn FamilyConfig {
        match &self.text {
            Qwen3VlText::Dense(c) => c,
            Qwen3VlText::Experts(c) => c,
        }
    }
}

impl FamilyConfig for Qwen3VlConfig {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        self.decoder().validate(model)?;
        self.vision.validate(model)?;
        if self.image_token_id as usize >= model.vocab_size {
            let (id, vocab) = (self.image_token_id, model.vocab_size);
            return Err(Error::Config(format!("image_token_id {id} is not below vocab_size {vocab}")));
        }
        Ok(())
    }

    fn rope(&self) -> &Rope {
        self.decoder().rope()
    }

    fn declare(&self, d: &mut Declaration, model: &ModelConfig) -> Box<dyn DecoderLayers> {
        self.decoder().declare(d, model)
    }

    fn active_experts(&self) -> usize {
        self.decoder().active_experts()
    }

    fn part_of_composite(&self) -> Option<&'static str> {
        Some(composite::TEXT_PREFIX)
    }

    fn vision(&self) -> Option<&VisionConfig> {
        Some(&self.vision)
    }

    fn image_token(&self) -> Option<u32> {
        Some(self.image_token_id)
    }

    /// Time, rows, columns, time, and so on; what rows and columns have no more of is left to time.
    fn axis_of_pair(&self, pair: usize) -> usize {
        match pair % 3 {
            axis @ (1 | 2) if pair < 3 * self.sections[axis] => axis,
            _ => 0,
        }
    }
}

/// As `Qwen3VLConfig`.
pub(super) fn read(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 4096,
        num_layers: 32,
        max_position_embeddings: 128_000,
        bos_token_id: None,
        eos_token_id: None,
        tie_word_embeddings: false,
    };
    let map = text_of(fields, TEXT)?;
    let text = Fields { map: &map };
    let (num_heads, num_kv_heads) = dense::heads(&text, 32, Some(32))?;
    let head_dim = text.size("head_dim", 128, HEAD_DIM_MAX)?;
    let attention = attention(&text, &defaults, [num_heads, num_kv_heads, head_dim])?;
    let intermediate_size = text.size("intermediate_size", 22_016, INTERMEDIATE_SIZE_MAX)?;
    let dense = DenseConfig { attention, mlp: MlpConfig { intermediate_size, bias: false } };
    read_with(fields, &text, generation, &defaults, "qwen3_vl_vision", Qwen3VlText::Dense(dense))
}

/// As `Qwen3VLMoeConfig`.
pub(super) fn read_moe(fields: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        num_layers: 24,
        max_position_embeddings: 128_000,
        bos_token_id: None,
        eos_token_id: None,
        tie_word_embeddings: false,
    };
    let map = text_of(fields, MOE_TEXT)?;
    let text = Fields { map: &map };
    let num_layers = text.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    let (num_heads, num_kv_heads) = dense::heads(&text, 16, Some(16))?;
    let head_dim = dense::head_dim(&text, num_heads, defaults.hidden_size)?;
    let attention = attention(&text, &defaults, [num_heads, num_kv_heads, head_dim])?;
    let mlp = MlpConfig { intermediate_size: text.size("intermediate_size", 5632, INTERMEDIATE_SIZE_MAX)?, bias: false };
    let experts_key = text.one_of("num_experts", "num_local_experts")?;
    let moe = MoeConfig {
        num_experts: text.size(experts_key, 60, EXPERTS_MAX)?,
        experts_per_token: text.size("num_experts_per_tok", 4, EXPERTS_MAX)?,
        intermediate_size: text.size("moe_intermediate_size", 1408, INTERMEDIATE_SIZE_MAX)?,
        // Always divided by their sum, whatever `norm_topk_prob` says.
        router: Router::Softmax { normalize: true },
        shared_size: None,
        shared_gate: false,
        activation: ExpertActivation::SwiGlu,
        layout: MoeLayout::PerExpert,
    };
    let sparse = qwen3_moe::sparse_layers(&text, num_layers)?;
    let text_config = Qwen3VlText::Experts(Qwen3MoeConfig { dense: DenseConfig { attention, mlp }, moe, sparse });
    read_with(fields, &text, generation, &defaults, "qwen3_vl_moe_vision", text_config)
}

/// The keys of the text, with the base of frequencies that its class has by default.
fn text_of(fields: &Fields<'_>, model_type: &str) -> Result<Map<String, Value>> {
    let mut text = composite::text_of(fields, model_type)?;
    text.entry("rope_theta").or_insert(THETA.into());
    Ok(text)
}

fn attention(text: &Fields<'_>, defaults: &Defaults, heads: [usize; 3]) -> Result<AttentionConfig> {
    text.require_silu()?;
    let [num_heads, num_kv_heads, head_dim] = heads;
    let bias = text.flag("attention_bias", false)?;
    let num_layers = text.size("num_hidden_layers", defaults.num_layers, NUM_LAYERS_MAX)?;
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(NormWeights::Plain),
        output_gate: false,
        sinks: false,
        windows: vec![None; num_layers],
        rope: Rope::read(text, head_dim, text.context(defaults.max_position_embeddings)?)?,
    })
}

/// What both have.
fn read_with(
    fields: &Fields<'_>,
    text: &Fields<'_>,
    generation: Option<&Fields<'_>>,
    defaults: &Defaults,
    vision_type: &str,
    config: Qwen3VlText,
) -> Result<ModelConfig> {
    let hidden_size = text.size("hidden_size", defaults.hidden_size, HIDDEN_SIZE_MAX)?;
    let vision = composite::part_of(fields, "vision_config")?;
    let vision = VisionConfig::read(&Fields { map: &vision }, vision_type, hidden_size)?;
    let image_token_id = match fields.get("image_token_id") {
        None => IMAGE_TOKEN,
        Some(value) => token_id("image_token_id", value, text.size("vocab_size", defaults.vocab_size, VOCAB_SIZE_MAX)?)?,
    };
    let sections = sections(text)?;
    text.model(generation, defaults, Family::Qwen3Vl(Qwen3VlConfig { text: config, vision, sections, image_token_id }))
}

/// `mrope_section`, which lies with the settings of rope.
fn sections(text: &Fields<'_>) -> Result<[usize; 3]> {
    const KEY: &str = "mrope_section";
    let rope = ["rope_scaling", "rope_parameters"].into_iter().find_map(|key| text.get(key)?.get(KEY));
    let Some(value) = rope else { return Ok(SECTIONS) };
    let numbers: Option<Vec<usize>> = value
        .as_array()
        .and_then(|list| list.iter().map(|n| n.as_u64().filter(|&n| n <= HEAD_DIM_MAX as u64).map(|n| n as usize)).collect());
    let three = numbers.and_then(|numbers| <[usize; 3]>::try_from(numbers).ok());
    three.ok_or_else(|| wrong_kind(KEY, value, "a list of three numbers of pairs"))
}

/// Makes of the keys that all models write those of a composite.
pub(super) fn write(model: &ModelConfig, c: &Qwen3VlConfig, map: &mut Map<String, Value>) {
    let (model_type, class) = match &c.text {
        Qwen3VlText::Dense(text) => {
            dense::write(text, "", map);
            map.insert("head_dim".into(), text.attention.head_dim.into());
            map.insert("attention_bias".into(), text.attention.o_bias.into());
            (TEXT, "Qwen3VLForConditionalGeneration")
        }
        Qwen3VlText::Experts(text) => {
            qwen3_moe::write(model, text, map);
            (MOE_TEXT, "Qwen3VLMoeForConditionalGeneration")
        }
    };
    let mut text = std::mem::take(map);
    text.insert("model_type".into(), model_type.into());
    text.remove("architectures");
    if let Some(rope) = text.get_mut("rope_parameters").and_then(Value::as_object_mut) {
        rope.insert("mrope_section".into(), c.sections.as_slice().into());
        rope.insert("mrope_interleaved".into(), true.into());
    }
    let v = &c.vision;
    map.insert("architectures".into(), json!([class]));
    map.insert("model_type".into(), c.model_type().into());
    map.insert("image_token_id".into(), c.image_token_id.into());
    map.insert("tie_word_embeddings".into(), model.tie_word_embeddings.into());
    map.insert("text_config".into(), text.into());
    let act = if v.activation == Gelu::Tanh { "gelu_pytorch_tanh" } else { "gelu" };
    map.insert(
        "vision_config".into(),
        json!({
            "model_type": format!("{}_vision", c.model_type()), "depth": v.depth, "hidden_size": v.hidden_size, "hidden_act": act,
            "intermediate_size": v.intermediate_size, "num_heads": v.num_heads, "in_channels": 3, "patch_size": v.patch_size,
            "temporal_patch_size": v.temporal_patch_size, "spatial_merge_size": v.merge_size, "out_hidden_size": model.hidden_size,
            "num_position_embeddings": v.num_positions, "deepstack_visual_indexes": v.deepstack,
            "initializer_range": short(model.initializer_range),
            "rope_parameters": { "rope_type": "axial", "rope_theta": v.rope_theta }
        }),
    );
}
