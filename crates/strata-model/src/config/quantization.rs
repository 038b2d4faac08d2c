//! `quantization_config`: checkpoints whose weights lie in fewer bits than they are computed with.

use serde_json::{Map, Value, json};
use strata_values::{FP8_BLOCK, Int4Words};

use super::fields::{Fields, unsupported, wrong_kind};
use crate::Result;

/// The key of a configuration that says how.
pub(crate) const KEY: &str = "quantization_config";

/// How matrices lie in a checkpoint that has them in four bits. Which of them, its tensors say: transformers quantises linear layers but for the unembedding, and configurations
/// name exceptions in many ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4Form {
    pub(crate) layout: Int4Layout,
    /// Consecutive inputs of an output that share a scale; `None`: all of them.
    pub(crate) group_inputs: Option<usize>,
}

impl Int4Form {
    /// How the codes lie.
    pub(crate) fn words(self) -> Int4Words {
        match self.layout {
            Int4Layout::Gptq { .. } => Int4Words::Gptq,
            Int4Layout::Awq => Int4Words::Awq,
            Int4Layout::CompressedTensors { .. } => Int4Words::CompressedTensors,
        }
    }
}

/// The common ways to lay out codes, scales and zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int4Layout {
    /// `qweight [in / 8, out]`, `qzeros [groups, out / 8]`, `scales [groups, out]`, `g_idx [in]` (Frantar et al., 2022, arXiv:2210.17323, as AutoGPTQ and GPTQModel write it).
    Gptq {
        /// What zeros are stored less than they are: one, but for `gptq_v2`. It is taken from whole words: a zero of 0 borrows from the next.
        zeros_less: u8,
        /// Whether inputs may have been put in another order: then only `g_idx` says whether they were.
        reordered: bool,
    },
    /// `qweight [in, out / 8]`, `qzeros [groups, out / 8]`, `scales [groups, out]` (Lin et al., 2023, arXiv:2306.00978, as AutoAWQ writes its `gemm` version).
    Awq,
    /// `weight_packed [out, in / 8]`, `weight_scale [out, groups]`, `weight_shape [2]`, as llm-compressor writes `pack-quantized`.
    CompressedTensors {
        /// Whether all zeros are 8; else there is `weight_zero_point [out / 8, groups]`.
        symmetric: bool,
    },
}

/// Refuses whatever is not read: what is, are matrices in bytes as DeepSeek-V3 has them, and matrices of four bits as GPTQ, AWQ and compressed-tensors do. It is computed with what the bytes
/// stand for, and activations are not rounded as some kernels do.
pub(crate) fn check(fields: &Fields<'_>) -> Result<()> {
    let Some(value) = fields.get(KEY) else { return Ok(()) };
    let settings = object(KEY, value)?;
    match settings.get("quant_method").and_then(Value::as_str) {
        Some("fp8") if settings.get("weight_block_size").is_some() => check_fp8(&settings),
        Some("gptq" | "awq" | "compressed-tensors") => int4_form(fields).map(|_| ()),
        _ => {
            Err(unsupported(KEY, value, "none, \"fp8\" with a weight_block_size, \"gptq\", \"awq\" or \"compressed-tensors\""))
        }
    }
}

/// How matrices of four bits lie; `None` if none do.
pub(crate) fn int4_form(fields: &Fields<'_>) -> Result<Option<Int4Form>> {
    let Some(value) = fields.get(KEY) else { return Ok(None) };
    let settings = object(KEY, value)?;
    match settings.get("quant_method").and_then(Value::as_str) {
        Some("gptq") => gptq(&settings).map(Some),
        Some("awq") => awq(&settings).map(Some),
        Some("compressed-tensors") => compressed_tensors(&settings).map(Some),
        _ => Ok(None),
    }
}

fn check_fp8(settings: &Fields<'_>) -> Result<()> {
    only(settings, KEY, "weight_block_size", &[json!([FP8_BLOCK, FP8_BLOCK])])?;
    only(settings, KEY, "fmt", &[json!("e4m3")])?;
    only(settings, KEY, "activation_scheme", &[json!("dynamic")])?;
    only(settings, KEY, "expert_dtype", &[json!("fp8")])?;
    // What is not converted, or is beside linear layers, has its dtype in the file, and the format of scales is that of their tensors. All is computed with as the numbers that it stands for,
    // as `dequantize` asks for.
    let known = [
        "quant_method",
        "weight_block_size",
        "fmt",
        "activation_scheme",
        "modules_to_not_convert",
        "ignored_layers",
        "scale_fmt",
        "dequantize",
        "expert_dtype",
    ];
    match settings.map.iter().find(|(key, value)| !known.contains(&key.as_str()) && !value.is_null()) {
        Some((key, other)) => Err(unsupported(&format!("{KEY}.{key}"), other, &known.join(", "))),
        None => Ok(()),
    }
}

fn gptq(settings: &Fields<'_>) -> Result<Int4Form> {
    // Of its many other keys those below say how tensors lie, and the rest how they were found.
    required(settings, KEY, "bits", &[json!(4)])?;
    // The same by its old name and its new one.
    let names = ["checkpoint_format", "format"];
    for name in names {
        only(settings, KEY, name, &[json!("gptq"), json!("gptq_v2")])?;
    }
    let [old, new] = names.map(|name| settings.get(name));
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        return Err(unsupported(&format!("{KEY}.{}", names[1]), new, &format!("{} {old}", names[0])));
    }
    only(settings, KEY, "pack_dtype", &[json!("int32")])?;
    only(settings, KEY, "is_marlin_format", &[json!(false)])?;
    check_dynamic(settings)?;
    check_plain_product(settings)?;
    let zeros_less = u8::from(old.or(new) != Some(&json!("gptq_v2")));
    let reordered = flag(settings, KEY, "desc_act", false)?;
    let group_inputs = group_inputs(settings, KEY, required(settings, KEY, "group_size", &[])?)?;
    Ok(Int4Form { layout: Int4Layout::Gptq { zeros_less, reordered }, group_inputs })
}

/// Refuses what changes the product itself, and not how its matrix lies: inputs that are turned before it, and addends behind it.
fn check_plain_product(settings: &Fields<'_>) -> Result<()> {
    only(settings, KEY, "rotation", &[json!(false)])?;
    only(settings, KEY, "adapter", &[json!({})])
}

/// Refuses other settings for some modules. That some are not quantised their tensors say, and settings that are those of all are no others.
fn check_dynamic(settings: &Fields<'_>) -> Result<()> {
    let path = format!("{KEY}.dynamic");
    let dynamic = match settings.get("dynamic") {
        None | Some(Value::Bool(false)) => return Ok(()),
        Some(value) => object(&path, value)?,
    };
    for (modules, own) in dynamic.map {
        match own {
            _ if modules.starts_with("-:") => {}
            Value::Null | Value::Bool(true) => {}
            own => {
                let path = format!("{path}.{modules}");
                for (key, value) in object(&path, own)?.map {
                    if settings.map.get(key) != Some(value) {
                        let of_all = settings.map.get(key).unwrap_or(&Value::Null);
                        return Err(unsupported(&format!("{path}.{key}"), value, &format!("that of all: {of_all}")));
                    }
                }
            }
        }
    }
    Ok(())
}

fn awq(settings: &Fields<'_>) -> Result<Int4Form> {
    check_plain_product(settings)?;
    // AutoAWQ had other names for two keys once.
    let name = |keys: [&'static str; 2]| if settings.has(keys[1]) { keys[1] } else { keys[0] };
    required(settings, KEY, name(["bits", "w_bit"]), &[json!(4)])?;
    for name in ["version", "format", "checkpoint_format"] {
        only(settings, KEY, name, &[json!("gemm"), json!("GEMM")])?;
    }
    if settings.get("backend") == Some(&json!("llm-awq")) {
        return Err(unsupported(&format!("{KEY}.backend"), &json!("llm-awq"), "what has the layout of gemm"));
    }
    check_dynamic(settings)?;
    // Without zeros of their own all are 8, and are there all the same.
    flag(settings, KEY, "zero_point", true)?;
    let group_inputs = group_inputs(settings, KEY, required(settings, KEY, name(["group_size", "q_group_size"]), &[])?)?;
    Ok(Int4Form { layout: Int4Layout::Awq, group_inputs })
}

fn compressed_tensors(settings: &Fields<'_>) -> Result<Int4Form> {
    required(settings, KEY, "format", &[json!("pack-quantized")])?;
    for scheme in ["kv_cache_scheme", "transform_config"] {
        only(settings, KEY, scheme, &[json!({})])?;
    }
    if let Some(sparsity) = settings.get("sparsity_config") {
        // What is not sparse lies as it is.
        let path = format!("{KEY}.sparsity_config");
        let sparsity = object(&path, sparsity)?;
        only(&sparsity, &path, "format", &[json!("dense")])?;
        if !sparsity.map.is_empty() {
            required(&sparsity, &path, "format", &[])?;
        }
    }
    let groups = object(&format!("{KEY}.config_groups"), required(settings, KEY, "config_groups", &[])?)?;
    let mut form = None;
    for (name, value) in groups.map {
        let path = format!("{KEY}.config_groups.{name}");
        let of_group = object(&path, value)?;
        only(&of_group, &path, "input_activations", &[])?;
        only(&of_group, &path, "output_activations", &[])?;
        only(&of_group, &path, "format", &[json!("pack-quantized")])?;
        let weights = object(&format!("{path}.weights"), required(&of_group, &path, "weights", &[])?)?;
        let path = format!("{path}.weights");
        required(&weights, &path, "num_bits", &[json!(4)])?;
        required(&weights, &path, "type", &[json!("int")])?;
        only(&weights, &path, "dynamic", &[json!(false)])?;
        // In the order of the inputs, or with a better order while scales were found; else there would be a `weight_g_idx`.
        only(&weights, &path, "actorder", &[json!("static"), json!("weight"), json!(false)])?;
        let strategy = required(&weights, &path, "strategy", &[json!("group"), json!("channel")])?;
        let group_inputs = match strategy.as_str() {
            Some("channel") => None,
            _ => group_inputs(&weights, &path, required(&weights, &path, "group_size", &[])?)?,
        };
        let layout = Int4Layout::CompressedTensors { symmetric: flag(&weights, &path, "symmetric", true)? };
        let own = Int4Form { layout, group_inputs };
        if form.is_some_and(|other| other != own) {
            return Err(unsupported(&path, &Value::Object(weights.map.clone()), "what the group before it has"));
        }
        form = Some(own);
    }
    form.ok_or_else(|| unsupported(&format!("{KEY}.config_groups"), &Value::Object(Map::new()), "a group of linear layers"))
}

/// Inputs to a group; -1 are all.
fn group_inputs(settings: &Fields<'_>, path: &str, value: &Value) -> Result<Option<usize>> {
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(8 | 16 | 32 | 64 | 128 | 256 | 512 | 1024) => Ok(value.as_u64().map(|inputs| inputs as usize)),
        _ => {
            let key = if settings.has("q_group_size") { "q_group_size" } else { "group_size" };
            Err(unsupported(&format!("{path}.{key}"), value, "-1 or a power of two from 8 to 1024"))
        }
    }
}

fn object<'a>(key: &str, value: &'a Value) -> Result<Fields<'a>> {
    match value {
        Value::Object(map) => Ok(Fields { map }),
        other => Err(wrong_kind(key, other, "an object")),
    }
}

/// Refuses a key that is there with another value than these.
fn only(settings: &Fields<'_>, path: &str, key: &str, values: &[Value]) -> Result<()> {
    match settings.get(key).filter(|value| !values.contains(value)) {
        None => Ok(()),
        Some(other) => {
            let named = values.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ");
            Err(unsupported(&format!("{path}.{key}"), other, if named.is_empty() { "null" } else { &named }))
        }
    }
}

/// True or false; `null` counts as absent.
fn flag(settings: &Fields<'_>, path: &str, key: &str, default: bool) -> Result<bool> {
    let Some(value) = settings.get(key) else { return Ok(default) };
    value.as_bool().ok_or_else(|| wrong_kind(&format!("{path}.{key}"), value, "true or false"))
}

/// The value of a key, which is one of these if there are any.
fn required<'a>(settings: &Fields<'a>, path: &str, key: &str, values: &[Value]) -> Result<&'a Value> {
    if !values.is_empty() {
        only(settings, path, key, values)?;
    }
    settings.get(key).ok_or_else(|| crate::Error::Config(format!("{path}.{key} is missing")))
}
