//! `strata bench matmul`: products of the model's shapes, apart from everything around them.

use anyhow::{Context, ensure};
use serde_json::json;
use strata_limits::Limits;
use strata_model::{MatrixShape, ModelConfig, Work};
use strata_tensor::{Backend, CpuBackend, DType, Linear, LowProducts, Memory, WeightFormat, WeightStorage};

use super::peer::{self, Peer};
use super::report::{Case, Figure, PeakMemory, Report, Unit, forget_peak_memory, peak_memory_bytes};
use super::{Common, ROUND_TIME, fastest, least, progress, text, uniform};
use crate::base_model::Quantize;

/// Settings of the matmul benchmark.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Rows of the input.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Rounds; the best product of all counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Matrices of a kind take at least so much together, if the model has so many: no cache holds them from one product to the next, as in a pass.
const MATRICES_BYTES_MIN: usize = 256 << 20;

/// Products `[tokens, in_features] · [out_features, in_features]ᵀ`, and those of their way back to the input, `[tokens, out_features] · [out_features, in_features]`.
#[derive(Clone, Copy)]
struct Product {
    name: &'static str,
    /// One for each of some layers, which are gone through in turn.
    matrices: usize,
    tokens: usize,
    in_features: usize,
    out_features: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.tokens > 0 && args.rounds > 0, "--tokens and --rounds must be at least 1");
    let common = &args.common;
    let config = common.config()?;
    let room = tokens_max(&config, common.dtype.into(), common.resources.memory_bytes());
    ensure!(args.tokens <= room, "--tokens {} is above {room}, the most for which there is memory; see --memory", args.tokens);
    let backend = common.backend()?;
    let mut peer = common.start_peer(&peer::MATMUL_MODULES, &[])?;
    let limits = Limits::measure(common.threads()?)?;
    forget_peak_memory();
    let mut measured = Vec::new();
    for product in products(&config, common.dtype.into(), args.tokens) {
        progress(format_args!("multiplying {}", product.name));
        let mut multiply = operands(&backend, common.dtype.into(), Quantize::storage(common.resources.quantize), product)?;
        let (mut ours, mut backward, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            ours.push(fastest(|| multiply(Way::There))?);
            backward.push(fastest(|| multiply(Way::Back))?);
            if let Some(peer) = &mut peer {
                peers.push(peers_fastest(peer, product)?);
            }
        }
        measured.push((product, [least(&ours), least(&backward)], peers.into_iter().reduce(f64::min)));
    }

    let peak = PeakMemory { of: "strata", bytes: peak_memory_bytes()? };
    let limits = limits.max(&Limits::measure(common.threads()?)?);
    let limit = limits.fastest(common.dtype.into()).gflop_per_s;
    let mut report = Report::new("matmul", common, limits)?;
    report.kernels = Some(backend.description());
    report.peak_memory_bytes.push(peak);
    report.peer = peer.map(|peer| peer.versions().clone());
    report.cases = measured.into_iter().map(|(product, ours, peers)| case(product, ours, peers, limit)).collect();
    text::print(&report, common.json)
}

/// The most tokens whose products with every matrix have room in so much memory, beside the matrix itself.
fn tokens_max(config: &ModelConfig, dtype: DType, memory_bytes: u64) -> usize {
    let room = |p: Product| {
        // They are packed from the numbers of one.
        let matrices = (p.matrices + 1) * p.in_features * p.out_features * dtype.size_bytes();
        let of_a_token = (p.in_features + p.out_features) * (dtype.size_bytes() + DType::F32.size_bytes());
        (memory_bytes as usize).saturating_sub(matrices) / of_a_token
    };
    products(config, dtype, 1).into_iter().map(room).min().unwrap_or(0)
}

/// The matrices of a decoder layer as they are stored, fused, and the unembedding.
fn products(config: &ModelConfig, dtype: DType, tokens: usize) -> Vec<Product> {
    let shapes = Work::of(config).matrices;
    let unembedding = shapes.len() - 1;
    let product = |(i, m): (usize, MatrixShape)| {
        let MatrixShape { label, in_features, out_features } = m;
        let of_layers = MATRICES_BYTES_MIN.div_ceil(in_features * out_features * dtype.size_bytes()).min(config.num_layers);
        let matrices = if i == unembedding { 1 } else { of_layers };
        Product { name: label, matrices, tokens, in_features, out_features }
    };
    shapes.into_iter().enumerate().map(product).collect()
}

/// From the input, or to its gradient.
enum Way {
    There,
    Back,
}

/// A closure that multiplies through the backend, as a pass does.
fn operands(
    backend: &CpuBackend,
    dtype: DType,
    storage: WeightStorage,
    product: Product,
) -> anyhow::Result<impl FnMut(Way) -> anyhow::Result<()>> {
    let Product { matrices, tokens, in_features, out_features, .. } = product;
    let x = uniform(backend, 0, &[tokens, in_features], dtype)?;
    let format = WeightFormat { compute: dtype, storage };
    let mut w = backend.packed(matrices, in_features, out_features, format)?;
    let numbers = uniform(backend, 1, &[out_features, in_features], dtype)?;
    for layer in 0..matrices {
        backend.pack_rows(&mut w, layer, numbers.as_ref())?;
    }
    let dy = uniform(backend, 2, &[tokens, out_features], dtype)?;
    let mut y = backend.zeros(&[tokens, out_features], DType::F32)?;
    let mut dx = backend.zeros(&[tokens, in_features], DType::F32)?;
    let mut layers = (0..matrices).cycle();
    Ok(move |way| {
        let weight = w.layer(layers.next().context("there are matrices")?);
        let layer = Linear { weight, bias: None, lora: [].into() };
        match way {
            Way::There => backend.linear(&x, &layer, Some(&mut y)).map(drop)?,
            Way::Back => backend.linear_backward(&dy, &x, &LowProducts::default(), &layer, &mut [], Some(&mut dx))?,
        }
        Ok(())
    })
}

fn peers_fastest(peer: &mut Peer, product: Product) -> anyhow::Result<f64> {
    let Product { matrices, tokens, in_features, out_features, .. } = product;
    let request = peer::Request::Matmul { matrices, tokens, in_features, out_features, seconds: ROUND_TIME.as_secs_f64() };
    Ok(peer.call::<peer::Multiplied>(&request)?.seconds)
}

fn case(product: Product, [ours, backward]: [f64; 2], peers: Option<f64>, limit: f64) -> Case {
    let Product { name, matrices, tokens, in_features, out_features } = product;
    let gflop = 2.0 * (tokens * in_features) as f64 * out_features as f64 / 1e9;
    let rate = |seconds| gflop / seconds;
    let sizes = [("matrices", matrices), ("tokens", tokens), ("in", in_features), ("out", out_features)];
    let settings = [("matrix", json!(name))].into_iter().chain(sizes.map(|(name, size)| (name, json!(size))));
    Case {
        settings: settings.map(|(name, value)| (name.to_string(), value)).collect(),
        figures: vec![
            Figure::new("gflop_per_s", "product", Unit::GflopPerSecond, rate(ours)).beside(peers.map(rate)).in_table(),
            Figure::new("fraction_of_limit", "product", Unit::OfArithmetic, rate(ours) / limit).in_table(),
            Figure::new("backward_fraction_of_limit", "back", Unit::OfArithmetic, rate(backward) / limit).in_table(),
        ],
    }
}
