//! `strata init-model`: a checkpoint with random weights, for measuring a shape without downloading a model.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use indicatif::HumanBytes;
use safetensors::Dtype;
use strata_model::checkpoint::{Existing, Sink, WrittenTensor, write_atomically, write_safetensors};
use strata_model::{Error, FileTensor, ModelConfig, ModelSource, file_tensors, random_parameter};
use strata_tensor::{DType, HostTensor};

use crate::output::say;

/// Settings of `strata init-model`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("of").required(true).args(["shape", "config"])))]
pub struct Args {
    /// Directory to create.
    pub out: PathBuf,
    /// A public model whose shape to take.
    #[arg(long, value_parser = PossibleValuesParser::new(ModelConfig::named_shapes()))]
    pub shape: Option<String>,
    /// A `config.json` whose shape to take.
    #[arg(long)]
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
            ModelConfig::from_json(&text, None).with_context(|| format!("{}", path.display()))?
        }
        (None, None) => unreachable!("clap asks for a shape or a config"),
    };
    config.dtype = Some(dtype);
    let bytes = write_atomically(&args.out, Existing::Refuse, |dir| write_checkpoint(dir, &config, args.seed, dtype))?;
    say!("{}: {}", args.out.display(), HumanBytes(bytes))?;
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
    if let Some(processor) = config.image_processor() {
        write_text(&dir.join("preprocessor_config.json"), &processor.to_json())?;
    }
    let range = config.initializer_range;
    let tensors = file_tensors(config).into_iter().map(|of| random_tensor(of, dtype, range, seed));
    write_safetensors(&dir.join("model.safetensors"), &[("format", "pt")], tensors.collect())
}

fn write_text(path: &Path, text: &str) -> strata_model::Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { path: path.into(), source })
}

/// A tensor that is drawn when its turn to be written comes, some elements at a time.
fn random_tensor(of: FileTensor, dtype: DType, range: f32, seed: u64) -> WrittenTensor<'static> {
    let (name, shape) = (of.name.clone(), of.shape.clone());
    let write = Box::new(move |sink: &mut Sink<'_>| {
        for (index, of) in &of.parts {
            let len: usize = of.shape.iter().product();
            for first in (0..len).step_by(SLICE_ELEMENTS) {
                let mut values = vec![0.0; SLICE_ELEMENTS.min(len - first)];
                random_parameter(of.initial, range, [seed, *index as u64], first, &mut values);
                let rounded = HostTensor::from_f32(&values, &[values.len()], dtype).expect("the shape is that of the values");
                sink.put(rounded.as_ref().as_bytes())?;
            }
        }
        Ok(())
    });
    let dtype = match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
    };
    WrittenTensor { name, dtype, shape, write }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::sync::Arc;

    use strata_model::vision::{Grid, Patches};
    use strata_model::{Held, Model, PackedBatch, PlacedImage, Targets};
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

    /// Of experts, too, which are drawn one by one and written together.
    #[test]
    fn a_written_model_that_sees_is_the_random_one_and_says_how_it_sees() {
        for model_type in ["qwen3_vl", "qwen3_vl_moe"] {
            let dir = TempDir::new().unwrap();
            let config = serde_json::json!({
                "model_type": model_type, "image_token_id": 5, "text_config": {
                    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "head_dim": 12, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6
                },
                "vision_config": {
                    "depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 1, "patch_size": 2, "out_hidden_size": 16,
                    "num_position_embeddings": 9, "deepstack_visual_indexes": [1]
                }
            });
            let path = dir.path().join("config.json");
            std::fs::write(&path, config.to_string()).unwrap();
            let out = dir.path().join("out");
            run(Args { out: out.clone(), shape: None, config: Some(path), seed: 7, dtype: "f32".into() }).unwrap();
            let source = ModelSource::Directory(out.clone());
            let backend = Arc::new(CpuBackend::new(Some(1)).unwrap());
            let written = Model::load(backend.clone(), &source, None).unwrap();
            let random = Model::random(backend, source.config().unwrap(), 7, DType::F32).unwrap();
            let seen = |model: &Model| {
                let processor = model.image_processor().unwrap();
                let grid = Grid { time: 1, height: 4, width: 6 };
                let patches = Patches { values: (0..24 * 24).map(|i| (i % 9) as f32 / 8.0).collect(), grid };
                let features = model.image_features(&patches, &mut || ControlFlow::Continue(())).unwrap();
                let mut batch = PackedBatch::new();
                let image = PlacedImage { first: 1, grid: processor.token_grid(&grid), features: Some(&features) };
                batch.push_with_images(&[1, 5, 5, 5, 5, 5, 5, 2], 0, 8, Held::default(), &[image]);
                let logprobs = model.forward(&batch, &Targets { ids: vec![3; 8], offsets: (0..=8).collect() }).unwrap();
                (processor.clone(), logprobs)
            };
            assert_eq!(seen(&written), seen(&random));
            // The file says so, and not the default alone.
            assert!(std::fs::read_to_string(out.join("preprocessor_config.json")).unwrap().contains("16777216"));
            let checkpoint = source.checkpoint().unwrap();
            let names: Vec<&str> = checkpoint.names().collect();
            let experts = "model.language_model.layers.1.mlp.experts.gate_up_proj";
            assert_eq!(names.contains(&experts), model_type == "qwen3_vl_moe", "{names:?}");
            let is_of_composite = |name: &&str| {
                ["model.language_model.", "model.visual.", "lm_head."].iter().any(|prefix| name.starts_with(prefix))
            };
            assert!(names.iter().all(is_of_composite), "{names:?}");
        }
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
