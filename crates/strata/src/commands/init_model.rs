//! `strata init-model`: a checkpoint with random weights, for measuring a shape without downloading a model.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use indicatif::HumanBytes;
use safetensors::tensor::{Dtype, View, serialize_to_file};
use strata_model::checkpoint::{Existing, write_atomically};
use strata_model::{Error, ModelConfig, ModelSource, ParameterShape, parameter_shapes, random_parameter};
use strata_tensor::{DType, HostTensor};

/// Settings of `strata init-model`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory to create.
    pub out: PathBuf,
    /// A public model whose shape to take.
    #[arg(long, value_parser = PossibleValuesParser::new(ModelConfig::named_shapes()), required_unless_present = "config")]
    pub shape: Option<String>,
    /// A `config.json` whose shape to take.
    #[arg(long, conflicts_with = "shape")]
    pub config: Option<PathBuf>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Dtype of the weights.
    #[arg(long, default_value = "bf16", value_parser = ["f32", "bf16"])]
    pub dtype: String,
}

/// Elements that are drawn at a time.
const SLICE_ELEMENTS: usize = 1 << 20;

/// Writes the checkpoint.
///
/// # Errors
/// If the configuration cannot be used, the directory exists or cannot be written.
pub fn run(args: Args) -> Result<()> {
    let dtype = if args.dtype == "f32" { DType::F32 } else { DType::BF16 };
    let mut config = match (&args.shape, &args.config) {
        (Some(name), _) => ModelConfig::named_shape(name).with_context(|| format!("{name:?} is not a known shape"))?,
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
            ModelConfig::from_json(&text, None)?
        }
        (None, None) => unreachable!("clap asks for a shape or a config"),
    };
    config.dtype = Some(dtype);
    let bytes = write_atomically(&args.out, Existing::Refuse, |dir| write_checkpoint(dir, &config, args.seed, dtype))?;
    println!("{}: {}", args.out.display(), HumanBytes(bytes));
    Ok(())
}

fn write_checkpoint(dir: &Path, config: &ModelConfig, seed: u64, dtype: DType) -> strata_model::Result<()> {
    write_text(&dir.join("config.json"), &config.to_json())?;
    // Bytes are tokens of any vocabulary that has room for them.
    if config.vocab_size >= ModelSource::Embedded.config()?.vocab_size {
        write_text(&dir.join("tokenizer.json"), &ModelSource::Embedded.tokenizer_json()?)?;
        if let Some(text) = ModelSource::Embedded.tokenizer_config_json()? {
            write_text(&dir.join("tokenizer_config.json"), &text)?;
        }
        if let Some(text) = ModelSource::Embedded.chat_template_jinja()? {
            write_text(&dir.join("chat_template.jinja"), &text)?;
        }
    }
    let range = config.initializer_range;
    let shapes = parameter_shapes(config).into_iter().enumerate();
    let tensors = shapes.map(|(index, of)| {
        let name = of.name.clone();
        (name, RandomTensor { of, dtype, range, key: [seed, index as u64] })
    });
    let path = dir.join("model.safetensors");
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(tensors, Some(metadata), &path)
        .map_err(|e| Error::Checkpoint { path, message: format!("cannot be written: {e}") })
}

fn write_text(path: &Path, text: &str) -> strata_model::Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { path: path.into(), source })
}

/// A parameter that is drawn when its turn to be written comes, so that one at a time is in memory.
struct RandomTensor {
    of: ParameterShape,
    dtype: DType,
    range: f32,
    key: [u64; 2],
}

impl View for RandomTensor {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.of.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let len: usize = self.of.shape.iter().product();
        let mut bytes = Vec::with_capacity(self.data_len());
        for first in (0..len).step_by(SLICE_ELEMENTS) {
            let mut values = vec![0.0; SLICE_ELEMENTS.min(len - first)];
            random_parameter(self.of.initial, self.range, self.key, first, &mut values);
            let rounded = HostTensor::from_f32(&values, &[values.len()], self.dtype).expect("the shape is that of the values");
            bytes.extend_from_slice(rounded.as_ref().as_bytes());
        }
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.of.shape.iter().product::<usize>() * self.dtype.size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use strata_model::{Model, PackedBatch, Targets};
    use strata_tensor::CpuBackend;
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_written_checkpoint_is_the_random_model_of_the_same_seed() {
        let dir = TempDir::new().unwrap();
        let json = ModelSource::Embedded.config_json().unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&json).unwrap();
        config["tie_word_embeddings"] = false.into();
        config["num_hidden_layers"] = 2.into();
        config.as_object_mut().unwrap().remove("layer_types");
        let path = dir.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let out = dir.path().join("out");
        run(Args { out: out.clone(), shape: None, config: Some(path), seed: 7, dtype: "bf16".into() }).unwrap();

        let logprobs = |model: &Model| {
            let mut batch = PackedBatch::new();
            batch.push_sequence(&[1, 2, 3]);
            model.forward(&batch, &Targets { ids: vec![2, 3, 4], offsets: vec![0, 1, 2, 3] }).unwrap()
        };
        let backend = Arc::new(CpuBackend::new(Some(1)).unwrap());
        let source = ModelSource::Directory(out);
        let written = Model::load(backend.clone(), &source, None).unwrap();
        let random = |seed| Model::random(backend.clone(), source.config().unwrap(), seed, DType::BF16).unwrap();
        assert_eq!(logprobs(&written), logprobs(&random(7)));
        assert_ne!(logprobs(&written), logprobs(&random(8)));
    }

    #[test]
    fn an_existing_directory_is_left_alone() {
        let dir = TempDir::new().unwrap();
        let args =
            Args { out: dir.path().into(), shape: Some("qwen3-0.6b".into()), config: None, seed: 0, dtype: "bf16".into() };
        assert!(run(args).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
