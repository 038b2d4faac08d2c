//! Models that are a part of another: what is published as a composite of a part that sees and one that reads and writes text.

use serde_json::{Map, Value};

use crate::Result;
use crate::config::fields::{Fields, unsupported, wrong_kind};
use crate::config::quantization;

/// What the names of the text's parameters begin with in a composite.
pub(super) const TEXT_PREFIX: &str = "model.language_model.";
/// What those of the part that sees begin with.
pub(super) const VISION_PREFIX: &str = "model.visual.";

/// The keys of `text_config`, and those of the composite that count for its text.
pub(super) fn text_of(fields: &Fields<'_>, model_type: &str) -> Result<Map<String, Value>> {
    let mut text = part_of(fields, "text_config")?;
    // Either may say how its matrices lie.
    if let Some(whole) = fields.get(quantization::KEY) {
        match text.get(quantization::KEY).filter(|own| !own.is_null() && *own != whole) {
            None => drop(text.insert(quantization::KEY.into(), whole.clone())),
            Some(own) => {
                let key = format!("text_config.{}", quantization::KEY);
                return Err(unsupported(&key, own, &format!("what the composite says: {whole}")));
            }
        }
    }
    quantization::check(&Fields { map: &text })?;
    if let Some(other) = text.get("model_type").filter(|value| *value != model_type) {
        return Err(unsupported("text_config.model_type", other, &format!("{model_type:?}")));
    }
    // The composite has the unembedding, and what it says of it counts, whatever its text says.
    let tied = fields.map.get("tie_word_embeddings").cloned().unwrap_or(false.into());
    text.insert("tie_word_embeddings".into(), tied);
    // What generation takes of a configuration is the composite's, and of its text what the composite does not say.
    for key in ["bos_token_id", "eos_token_id"] {
        if let Some(value) = fields.get(key) {
            text.insert(key.into(), value.clone());
        }
    }
    let of_text = Fields { map: &text };
    if of_text.get("dtype").or(of_text.get("torch_dtype")).is_none()
        && let Some(dtype) = fields.get("dtype").or(fields.get("torch_dtype"))
    {
        text.insert("dtype".into(), dtype.clone());
    }
    Ok(text)
}

/// The keys of a part; none if it is not there.
pub(super) fn part_of(fields: &Fields<'_>, key: &str) -> Result<Map<String, Value>> {
    match fields.get(key) {
        None => Ok(Map::new()),
        Some(Value::Object(part)) => Ok(part.clone()),
        Some(other) => Err(wrong_kind(key, other, "an object")),
    }
}
