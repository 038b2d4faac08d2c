//! Where a model comes from: the program itself, a directory, or the Hugging Face hub. All are read through [`ModelSource`].

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{
    Checkpoint, DownloadProgress, HubOptions, NoProgress, fetch_model, is_repository_name, read_text, read_text_if_exists,
};
use crate::config::fields::parse_object;
use crate::embedded::{self, EMBEDDED_NAME};
use crate::vision::ImageProcessor;
use crate::{Error, ModelConfig, Result};

/// The largest `config.json` or `generation_config.json` that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// The largest `tokenizer.json` that is read; large multilingual vocabularies take some 35 MB.
const TOKENIZER_BYTES_MAX: u64 = 64 << 20;
/// The largest `tokenizer_config.json` that is read; it lists added tokens.
const TOKENIZER_CONFIG_BYTES_MAX: u64 = 16 << 20;
/// The largest chat template that is read.
const CHAT_TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// The files of a model, wherever they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The default model, which is part of the program.
    Embedded,
    /// A directory with a Hugging Face checkpoint.
    Directory(PathBuf),
    /// A repository of the Hugging Face hub, downloaded.
    Hub {
        /// Its name, `organisation/model`.
        repository: String,
        /// The directory that holds its files.
        snapshot: PathBuf,
    },
}

impl ModelSource {
    /// What a user names: [`EMBEDDED_NAME`], a directory that exists, or a repository of the Hugging Face hub, which is downloaded if
    /// it is not in the hub's cache. Blocks.
    ///
    /// # Errors
    /// If it is none of these, or the repository cannot be had.
    pub fn resolve(spec: &str) -> Result<Self> {
        Self::resolve_with(spec, &HubOptions::from_env(), &NoProgress, &|_| Ok(()))
    }

    /// [`ModelSource::resolve`] with these settings of the hub, and progress of a download told to `progress`. Before weights are downloaded, the configuration is read, and `check` may
    /// refuse a model that has everything else.
    ///
    /// # Errors
    /// As [`ModelSource::resolve`], and those of `check`.
    pub fn resolve_with(
        spec: &str,
        hub: &HubOptions,
        progress: &dyn DownloadProgress,
        check: &dyn Fn(&ModelSource) -> Result<()>,
    ) -> Result<Self> {
        if spec == EMBEDDED_NAME {
            return Ok(ModelSource::Embedded);
        }
        if Path::new(spec).is_dir() {
            return Ok(ModelSource::Directory(spec.into()));
        }
        if Path::new(spec).exists() {
            return Err(Error::Hub(format!("{spec:?} is a file; name the directory that holds it and the rest of the model")));
        }
        if !is_repository_name(spec) {
            let message = format!("{spec:?} is neither a directory nor a repository name such as Qwen/Qwen3-0.6B");
            return Err(Error::Hub(message));
        }
        let of = |snapshot: &Path| ModelSource::Hub { repository: spec.into(), snapshot: snapshot.into() };
        let before_weights = |snapshot: &Path| {
            let source = of(snapshot);
            source.config()?;
            check(&source)
        };
        Ok(of(&fetch_model(spec, hub, progress, &before_weights)?))
    }

    /// The name to serve the model under: that of the repository, or of the directory.
    pub fn served_name(&self) -> String {
        match self {
            ModelSource::Embedded => EMBEDDED_NAME.into(),
            ModelSource::Hub { repository, .. } => repository.clone(),
            ModelSource::Directory(dir) => {
                // `.` and `models/..` have a name only once they are resolved.
                let resolved = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                resolved.file_name().unwrap_or(resolved.as_os_str()).to_string_lossy().into_owned()
            }
        }
    }

    /// The directory of the files; `None` for the embedded model.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            ModelSource::Embedded => None,
            ModelSource::Directory(dir) | ModelSource::Hub { snapshot: dir, .. } => Some(dir),
        }
    }

    /// The configuration, read and checked.
    ///
    /// # Errors
    /// If a file cannot be read, or [`ModelConfig::from_json`] refuses it; which checkpoint's it is, is said too.
    pub fn config(&self) -> Result<ModelConfig> {
        let config = ModelConfig::from_json(&self.config_json()?, self.generation_config_json()?.as_deref());
        config.map_err(|error| match (error, self.directory()) {
            (error @ Error::Config(_), Some(dir)) => Error::Checkpoint { path: dir.into(), message: error.to_string() },
            (error, _) => error,
        })
    }

    /// The text of `config.json`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn config_json(&self) -> Result<Cow<'static, str>> {
        self.required("config.json", embedded::CONFIG, CONFIG_BYTES_MAX)
    }

    /// The text of `generation_config.json`, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn generation_config_json(&self) -> Result<Option<Cow<'static, str>>> {
        self.optional("generation_config.json", embedded::GENERATION_CONFIG, CONFIG_BYTES_MAX)
    }

    /// How pictures are cut up for a model that sees: what `preprocessor_config.json` says, or `processor_config.json`, where newer checkpoints have it. `None` for a model that reads text alone.
    ///
    /// # Errors
    /// If a file cannot be read, or asks for something that is not computed.
    pub fn image_processor(&self, config: &ModelConfig) -> Result<Option<ImageProcessor>> {
        let (Some(own), Some(dir)) = (config.image_processor(), self.directory()) else { return Ok(None) };
        for (file, part) in [("processor_config.json", Some("image_processor")), ("preprocessor_config.json", None)] {
            let path = dir.join(file);
            let Some(text) = read_text_if_exists(&path, CONFIG_BYTES_MAX)? else { continue };
            let map = parse_object(file, &text)?;
            let settings = match part {
                None => map,
                Some(part) => match map.get(part) {
                    Some(Value::Object(settings)) => settings.clone(),
                    _ => continue,
                },
            };
            return ImageProcessor::read(&settings, &own).map(Some);
        }
        Ok(Some(own))
    }

    /// The weights.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        match self.directory() {
            Some(dir) => Checkpoint::open(dir),
            None => Checkpoint::from_static(embedded::weights(), EMBEDDED_NAME),
        }
    }

    /// The text of `tokenizer.json`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn tokenizer_json(&self) -> Result<Cow<'static, str>> {
        self.required("tokenizer.json", embedded::TOKENIZER, TOKENIZER_BYTES_MAX)
    }

    /// The text of `tokenizer.json`, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn tokenizer_json_if_exists(&self) -> Result<Option<Cow<'static, str>>> {
        self.optional("tokenizer.json", embedded::TOKENIZER, TOKENIZER_BYTES_MAX)
    }

    /// The text of `tokenizer_config.json`, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn tokenizer_config_json(&self) -> Result<Option<Cow<'static, str>>> {
        self.optional("tokenizer_config.json", embedded::TOKENIZER_CONFIG, TOKENIZER_CONFIG_BYTES_MAX)
    }

    /// The text of `chat_template.jinja`, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn chat_template_jinja(&self) -> Result<Option<Cow<'static, str>>> {
        self.optional("chat_template.jinja", embedded::CHAT_TEMPLATE, CHAT_TEMPLATE_BYTES_MAX)
    }

    fn required(&self, file: &str, embedded: &'static str, bytes_max: u64) -> Result<Cow<'static, str>> {
        match self.directory() {
            Some(dir) => Ok(read_text(&dir.join(file), bytes_max)?.into()),
            None => Ok(embedded.into()),
        }
    }

    fn optional(&self, file: &str, embedded: &'static str, bytes_max: u64) -> Result<Option<Cow<'static, str>>> {
        match self.directory() {
            Some(dir) => Ok(read_text_if_exists(&dir.join(file), bytes_max)?.map(Cow::from)),
            None => Ok(Some(embedded.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use strata_tensor::DType;

    use super::*;

    #[test]
    fn the_embedded_model_is_whole() {
        let source = ModelSource::Embedded;
        let config = source.config().unwrap();
        let checkpoint = source.checkpoint().unwrap();
        let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap().unwrap();
        assert_eq!(embedding.shape, [config.vocab_size, config.hidden_size]);
        let converted = embedding.read(DType::BF16).unwrap();
        assert!(matches!(converted, crate::checkpoint::Converted::Borrowed(_)), "embedded tensors are aligned");
        assert!(source.tokenizer_json().unwrap().starts_with('{'));
        assert!(source.tokenizer_config_json().unwrap().is_some());
        assert!(source.chat_template_jinja().unwrap().unwrap().contains("im_start"));
        assert_eq!(source.served_name(), "strata/tiny-base");
    }

    #[test]
    fn of_a_configuration_that_is_wrong_it_is_said_whose_it_is_and_in_which_file() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Directory(dir.path().into());
        let refused = |config: &str, generation: &str| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            std::fs::write(dir.path().join("generation_config.json"), generation).unwrap();
            source.config().unwrap_err().to_string()
        };
        let own = dir.path().display().to_string();
        let error = refused(r#"{"model_type": "llama", "vocab_size": 60, "eos_token_id": 60}"#, "{}");
        assert!(error.contains(&own) && error.ends_with("config.json: eos_token_id 60 is not below vocab_size 60"), "{error}");
        let error = refused(r#"{"model_type": "llama", "vocab_size": 60, "eos_token_id": 2}"#, r#"{"eos_token_id": 600}"#);
        assert!(
            error.contains(&own) && error.ends_with("600 is not below vocab_size 60, in generation_config.json beside it"),
            "{error}"
        );
    }

    #[test]
    fn what_a_user_names_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(ModelSource::resolve(EMBEDDED_NAME).unwrap(), ModelSource::Embedded);
        assert_eq!(ModelSource::resolve(path).unwrap(), ModelSource::Directory(path.into()));
        assert!(ModelSource::resolve("/no/such/dir").unwrap_err().to_string().contains("/no/such/dir"));
        let snapshot = dir.path().join("models--org--model/snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir(dir.path().join("models--org--model/refs")).unwrap();
        std::fs::write(dir.path().join("models--org--model/refs/main"), "abc").unwrap();
        std::fs::write(snapshot.join("config.json"), embedded::CONFIG).unwrap();
        std::fs::write(snapshot.join("model.safetensors"), embedded::weights()).unwrap();
        let hub = HubOptions { cache_dir: path.into(), offline: Some("HF_HUB_OFFLINE"), ..HubOptions::from_env() };
        let source = ModelSource::resolve_with("org/model", &hub, &NoProgress, &|_| Ok(())).unwrap();
        assert_eq!(source.directory(), Some(snapshot.as_path()));
        assert_eq!(source.served_name(), "org/model");
    }

    #[test]
    fn a_directory_is_read_and_served_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my-model");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("config.json"), embedded::CONFIG).unwrap();
        let source = ModelSource::Directory(path.clone());
        assert_eq!(source.config().unwrap().num_layers, 5);
        assert_eq!(source.generation_config_json().unwrap(), None);
        assert!(source.tokenizer_json().unwrap_err().to_string().contains("tokenizer.json"));
        assert_eq!(source.served_name(), "my-model");
        assert_eq!(ModelSource::Directory(path.join("..").join("my-model")).served_name(), "my-model");
    }
}
