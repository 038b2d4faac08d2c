//! What a checkpoint has beside its weights.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value, json};
use strata_tensor::DType;

use crate::checkpoint::{INDEX_FILE, open_regular};
use crate::config::fields::parse_object;
use crate::{Error, ModelSource, Result};

const CONFIG_FILE: &str = "config.json";
/// What else transformers, and what is built on it, read of a directory.
const OTHER_FILES: [&str; 14] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE",
];

/// What is otherwise in the configuration of a merged checkpoint.
pub(super) struct Changes {
    /// The unembedding is a tensor of its own.
    pub(super) unties: bool,
    /// All weights have this dtype.
    pub(super) dtype: Option<DType>,
}

/// Writes the list of which file has which tensor.
pub(super) fn write_index(dir: &Path, files: &BTreeMap<String, String>, total_bytes: usize) -> Result<()> {
    write(dir, INDEX_FILE, &json!({ "metadata": { "total_size": total_bytes }, "weight_map": files }))
}

/// Writes `config.json` as it has to be, and copies what is there of the rest.
pub(super) fn write_others(base: &ModelSource, dir: &Path, changes: &Changes) -> Result<()> {
    let mut config = parse_object(CONFIG_FILE, &base.config_json()?)?;
    changes.apply(&mut config);
    write(dir, CONFIG_FILE, &config.into())?;
    let Some(from) = base.directory() else {
        let text = |name: &str, text: Option<std::borrow::Cow<'static, str>>| match text {
            Some(text) => write_bytes(dir, name, text.as_bytes()),
            None => Ok(()),
        };
        text("generation_config.json", base.generation_config_json()?)?;
        text("tokenizer.json", Some(base.tokenizer_json()?))?;
        text("tokenizer_config.json", base.tokenizer_config_json()?)?;
        return text("chat_template.jinja", base.chat_template_jinja()?);
    };
    for name in OTHER_FILES {
        let mut original = match open_regular(&from.join(name)) {
            Ok(file) => file,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let path = dir.join(name);
        let copied = File::create(&path).and_then(|mut copy| std::io::copy(&mut original, &mut copy));
        copied.map_err(|source| Error::Io { path, source })?;
    }
    Ok(())
}

impl Changes {
    /// Changes what a configuration says of the whole, and of its parts.
    fn apply(&self, config: &mut Map<String, Value>) {
        if self.unties {
            config.insert("tie_word_embeddings".into(), false.into());
        }
        if let Some(dtype) = self.dtype {
            let name = if dtype == DType::F32 { "float32" } else { "bfloat16" };
            config.remove("torch_dtype");
            config.insert("dtype".into(), name.into());
        }
        // Nothing is quantized any more, whether anything was or not.
        config.remove("quantization_config");
        for part in ["text_config", "vision_config"] {
            let Some(Value::Object(part)) = config.get_mut(part) else { continue };
            part.remove("quantization_config");
            if self.unties && part.contains_key("tie_word_embeddings") {
                part.insert("tie_word_embeddings".into(), false.into());
            }
            if self.dtype.is_some() {
                // The whole says it.
                part.remove("torch_dtype");
                part.remove("dtype");
            }
        }
    }
}

fn write(dir: &Path, name: &str, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("what was JSON is JSON") + "\n";
    write_bytes(dir, name, text.as_bytes())
}

fn write_bytes(dir: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = dir.join(name);
    std::fs::write(&path, bytes).map_err(|source| Error::Io { path, source })
}
