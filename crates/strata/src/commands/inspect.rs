//! `strata inspect`: what a checkpoint holds and what it would take, without loading its weights.

use std::fmt::Write;

use indicatif::HumanBytes;
use strata_model::checkpoint::HubOptions;
use strata_model::vision::ImageProcessor;
use strata_model::{
    LinearWork, MixerWork, Model, ModelConfig, ModelSource, ParameterShape, Work, parameter_shapes, weight_bytes,
};
use strata_tensor::{DType, WeightFormat, WeightStorage};

use crate::base_model::Quantize;
use crate::download::DownloadBars;
use crate::logging::{self, LogFormat};
use crate::output;

/// Settings of `strata inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A checkpoint directory, or a Hugging Face name.
    pub model: String,
    /// Say what the weights would take in memory stored like this.
    #[arg(long, value_enum)]
    pub quantize: Option<Quantize>,
}

/// Prints what there is to say.
///
/// # Errors
/// If the model cannot be found, is not supported, or its files do not hold it; the reason is the error.
pub fn run(args: Args) -> anyhow::Result<()> {
    logging::init(LogFormat::Text);
    let source = ModelSource::resolve_with(&args.model, &HubOptions::from_env(), &DownloadBars::default(), &|_| Ok(()))?;
    let config = source.config()?;
    Model::check_files(&source)?;
    let storage = Quantize::storage(args.quantize);
    let (bytes, dtype) = Model::weight_bytes_of(&source, None, storage)?;
    let processor = source.image_processor(&config)?;
    output::write(format_args!("{}", describe(&source.served_name(), &config, processor.as_ref(), dtype, storage, bytes)))
}

/// One screen about a model whose weights take so many bytes.
fn describe(
    name: &str,
    config: &ModelConfig,
    processor: Option<&ImageProcessor>,
    dtype: DType,
    storage: WeightStorage,
    bytes: u64,
) -> String {
    let work = Work::of(config);
    let mut text = String::new();
    let mut line = |what: &str, value: String| writeln!(text, "{what:<14}{value}").expect("a string takes all that is written");
    line("model", name.into());
    line("architecture", config.model_type().into());
    line("layers", format!("{} of width {}", config.num_layers, config.hidden_size));
    for (of, first, last) in runs(&work.mixers) {
        line("", format!("{} {}", layers(first, last), mixer_line(&of)));
    }
    for linear in &work.linears {
        line("", linear_line(linear));
    }
    if let Some((vision, processor)) = config.vision().zip(processor) {
        let [least, most] = processor.tokens();
        line(
            "sees with",
            format!("{} blocks of width {}, of {} parameters", vision.depth, vision.hidden_size, counted(seeing(config))),
        );
        line("", format!("patches of {0} × {0} pixels, {1} × {1} of them a token", vision.patch_size, vision.merge_size));
        line("", format!("{least} to {most} tokens a picture"));
        line("", "frozen: adapters are of the language model alone".into());
    }
    let tied = if config.tie_word_embeddings { "tied to the embedding" } else { "of its own" };
    line("vocabulary", format!("{}, unembedding {tied}", config.vocab_size));
    line("context", format!("{} tokens", config.max_position_embeddings));
    let parameters: u64 = parameter_shapes(config).iter().map(ParameterShape::elements).sum();
    line("parameters", counted(parameters));
    let kept = match (config.int4, storage) {
        // One matrix that lies otherwise has those of its name in all layers held as they are computed with.
        (Some(_), WeightStorage::Dense) if bytes >= weight_bytes(config, WeightFormat { compute: dtype, storage }) => {
            "as they are computed with: of no matrix all layers are int4 in the files"
        }
        (Some(_), WeightStorage::Dense) => "as they lie: int4",
        (Some(_), WeightStorage::Int8) => "as they lie where that is int4, or int8",
        (None, WeightStorage::Dense) => "as they are",
        (None, WeightStorage::Int8) => "int8",
        (_, WeightStorage::Int4(_)) => "int4",
    };
    line("memory", format!("{} of weights in {dtype}, kept {kept}", HumanBytes(bytes)));
    let (per_token, per_sequence) = cached_bytes(&work, dtype);
    let states = match per_sequence {
        0 => String::new(),
        bytes => format!(", and {} of states for each sequence", HumanBytes(bytes)),
    };
    line("", format!("{} of cache for 1,000 tokens{states}", HumanBytes(1000 * per_token)));
    text
}

/// Parameters of the part that sees.
fn seeing(config: &ModelConfig) -> u64 {
    let parameters = parameter_shapes(config).into_iter().filter(|of| of.name.starts_with("model.visual."));
    parameters.map(|of| of.elements()).sum()
}

/// A number of parameters in words.
fn counted(parameters: u64) -> String {
    match parameters {
        100_000_000.. => format!("{:.3} billion", parameters as f64 / 1e9),
        100_000.. => format!("{:.3} million", parameters as f64 / 1e6),
        few => few.to_string(),
    }
}

/// Bytes that a token leaves behind, and that a sequence does, however long.
fn cached_bytes(work: &Work, dtype: DType) -> (u64, u64) {
    let bytes = |of: &MixerWork| match of {
        MixerWork::Attention(of) => (of.cached_width * dtype.size_bytes(), 0),
        MixerWork::DeltaNet(g) => (0, g.state_width() * DType::F32.size_bytes()),
    };
    let sum = work.mixers.iter().map(bytes).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    (sum.0 as u64, sum.1 as u64)
}

fn mixer_line(mixer: &MixerWork) -> String {
    match mixer {
        MixerWork::Attention(of) => {
            let window = of.window.map_or(String::new(), |window| format!(", window {window}"));
            format!("attention: queries {} wide, {} cached a token{window}", of.query_width, of.cached_width)
        }
        MixerWork::DeltaNet(g) => {
            format!("gated delta net: {} heads, states of {} × {}", g.v_heads, g.k_dim, g.v_dim)
        }
    }
}

fn linear_line(linear: &LinearWork) -> String {
    let (each, layers) = (format!("{} → {}", linear.in_features, linear.out_features), linear.layers);
    match linear.experts {
        None => format!("{layers} × {} {each}", linear.name),
        Some(experts) => {
            format!("{layers} × {} experts, {} for a token, {} {each}", experts.count, experts.active, linear.name)
        }
    }
}

fn layers(first: usize, last: usize) -> String {
    if first == last { format!("layer {first}:") } else { format!("layers {first}-{last}:") }
}

/// Runs of layers that mix tokens with the same: with what, the first and the last.
fn runs(mixers: &[MixerWork]) -> Vec<(MixerWork, usize, usize)> {
    let mut runs: Vec<(MixerWork, usize, usize)> = Vec::new();
    for (l, of) in mixers.iter().enumerate() {
        match runs.last_mut() {
            Some((kind, _, last)) if kind == of => *last = l,
            _ => runs.push((*of, l, l)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use strata_model::AttentionWork;

    use super::*;

    fn described(
        name: &str,
        config: &ModelConfig,
        processor: Option<&ImageProcessor>,
        dtype: DType,
        storage: WeightStorage,
    ) -> String {
        let bytes = weight_bytes(config, WeightFormat { compute: dtype, storage });
        describe(name, config, processor, dtype, storage, bytes)
    }

    #[test]
    fn a_model_is_described_by_what_it_has() {
        let config = ModelConfig::named_shape("qwen3-30b-a3b").unwrap();
        let text = described("Qwen/Qwen3-30B-A3B", &config, None, DType::BF16, WeightStorage::Dense);
        for part in [
            "Qwen/Qwen3-30B-A3B",
            "qwen3_moe",
            "layers 0-47: attention: queries 4096 wide, 1024 cached a token",
            "48 × 128 experts, 8 for a token, down_proj 768 → 2048",
            "30.532 billion",
            "56.87 GiB of weights in bf16",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let of_states =
            described("small", &ModelConfig::named_shape("qwen3.5-9b").unwrap(), None, DType::BF16, WeightStorage::Dense);
        for part in [
            "layers 0-2: gated delta net: 32 heads, states of 128 × 128",
            "layer 3: attention: queries 4096 wide, 2048 cached a token",
            "24 × in_proj_qkv 4096 → 8192",
            "8 × q_proj 4096 → 8192",
            "48.00 MiB of states for each sequence",
        ] {
            assert!(of_states.contains(part), "{part:?} is not in\n{of_states}");
        }
        assert_eq!([30_532_122_624, 1_880_064, 9_999].map(counted), ["30.532 billion", "1.880 million", "9999"]);
        let small = described("small", &config, None, DType::BF16, WeightStorage::Int8);
        assert!(small.contains("kept int8") && !small.contains("56.87"), "{small}");
    }

    #[test]
    fn a_model_that_sees_says_with_what() {
        let config = ModelConfig::named_shape("qwen3-vl-8b").unwrap();
        let processor = config.image_processor();
        let text = described("small", &config, processor.as_ref(), DType::BF16, WeightStorage::Dense);
        for part in [
            "qwen3_vl",
            "sees with     27 blocks of width 1152, of 0.576 billion parameters",
            "patches of 16 × 16 pixels, 2 × 2 of them a token",
            "64 to 16384 tokens a picture",
            "8.767 billion",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let text = described("small", &ModelConfig::named_shape("qwen3-8b").unwrap(), None, DType::BF16, WeightStorage::Dense);
        assert!(!text.contains("sees"), "{text}");
    }

    #[test]
    fn layers_of_one_kind_are_one_line() {
        let of = |window| MixerWork::Attention(AttentionWork { query_width: 8, cached_width: 4, window });
        let kinds = [of(None), of(Some(3)), of(Some(3)), of(None)];
        assert_eq!(runs(&kinds), [(of(None), 0, 0), (of(Some(3)), 1, 2), (of(None), 3, 3)]);
    }
}
