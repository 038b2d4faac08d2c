//! `quantization_config`: checkpoints whose weights lie in fewer bits than they are computed with.

use serde_json::{Value, json};

use super::fields::{Fields, unsupported, wrong_kind};
use crate::Result;

/// Rows, and columns, of a block of a matrix of `F8_E4M3` that has one scale, `{name}_scale_inv`.
pub(crate) const FP8_BLOCK: usize = 128;

/// Refuses whatever is not the layout of DeepSeek-V3: matrices of `F8_E4M3` with a scale for each block. It is computed with what the bytes stand for, and
/// activations are not rounded to bytes as some kernels do.
pub(crate) fn check(fields: &Fields<'_>) -> Result<()> {
    const KEY: &str = "quantization_config";
    let Some(value) = fields.get(KEY) else { return Ok(()) };
    let Value::Object(map) = value else { return Err(wrong_kind(KEY, value, "an object")) };
    let settings = Fields { map };
    if settings.get("quant_method") != Some(&json!("fp8")) || !settings.has("weight_block_size") {
        return Err(unsupported(KEY, value, "none, or \"fp8\" with a weight_block_size"));
    }
    let fixed =
        [("weight_block_size", json!([FP8_BLOCK, FP8_BLOCK])), ("fmt", json!("e4m3")), ("activation_scheme", json!("dynamic"))];
    for (key, only) in fixed {
        if let Some(other) = settings.map.get(key).filter(|value| **value != only) {
            return Err(unsupported(&format!("{KEY}.{key}"), other, &only.to_string()));
        }
    }
    // What is not converted has another dtype in the file, and the format of scales is that of their tensors.
    let known = ["quant_method", "weight_block_size", "fmt", "activation_scheme", "modules_to_not_convert", "scale_fmt"];
    match map.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, other)) => Err(unsupported(&format!("{KEY}.{key}"), other, &known.join(", "))),
        None => Ok(()),
    }
}
