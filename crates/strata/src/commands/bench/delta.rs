//! `strata bench delta`: one layer's gated delta net between its projections, and its rule alone.

use std::rc::Rc;

use anyhow::{Context, ensure};
use serde_json::json;
use strata_limits::{Inputs, Limits};
use strata_model::{MixerWork, ModelConfig, Work};
use strata_tensor::{
    Backend, CpuBackend, DELTA_CHUNK, DType, DeltaGeometry, DeltaInputs, DeltaNetInput, DeltaParams, DeltaSpan, Memory, Tape,
    Tensor, Var,
};

use super::peer::{self, Peer};
use super::report::{Case, Figure, PeakMemory, Report, Unit, forget_peak_memory, peak_memory_bytes};
use super::{Common, ROUND_TIME, counts, fastest, least, progress, text, uniform};

/// Settings of the benchmark of gated delta nets.
#[derive(Debug, clap::Args)]
#[command(mut_arg("shape", |shape| shape.default_value("qwen3.5-9b")))]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Tokens of the one sequence, which begins from nothing.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Rounds; the best time of all counts.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (common, tokens) = (&args.common, args.tokens);
    ensure!(tokens > 0 && args.repeats > 0, "--tokens and --repeats must be at least 1");
    ensure!(common.resources.quantize.is_none(), "--quantize is of matrices, and what is measured has none");
    let config = common.config()?;
    let geometry = geometry(&config).with_context(|| format!("shape {:?} has no gated delta nets", common.shape))?;
    let backend = common.backend()?;
    backend.check_delta(&geometry)?;
    let room = tokens_max(&backend, &geometry, common.resources.memory_bytes());
    ensure!(tokens <= room, "--tokens {tokens} is above {room}, the longest sequence for which there is memory; see --memory");
    let mut peer = common.start_peer(&peer::DELTA_MODULES, &[])?;
    let limits = Limits::measure(common.threads()?)?;
    forget_peak_memory();
    let layer = Layer::random(&backend, &geometry, config.rms_norm_eps)?;
    let sequence = Sequence::random(&layer, tokens)?;
    let (mut ours, mut peers) = (Times::default(), Times::default());
    for round in 1..=args.repeats {
        progress(format_args!("gated delta net of {tokens} tokens, round {round} of {}", args.repeats));
        ours.net.push(fastest(|| sequence.net(common.dtype.into()))?);
        ours.rule.push(fastest(|| sequence.rule())?);
        if let Some(peer) = &mut peer {
            let peer::Mixed { net_seconds, rule_seconds } = mix(peer, &geometry, tokens)?;
            peers.net.push(net_seconds);
            peers.rule.push(rule_seconds);
        }
    }

    let peak = PeakMemory { of: "strata", bytes: peak_memory_bytes()? };
    let limits = limits.max(&Limits::measure(common.threads()?)?);
    // The rule is computed in f32, whatever the weights around it are.
    let limit = limits.fastest(Inputs::F32).clone();
    let figures = figures(&ours, peer.is_some().then_some(&peers), &geometry, tokens, limit.gflop_per_s);
    let mut report = Report::new("delta", common, limits)?;
    report.limits.fastest = limit;
    report.kernels = Some(backend.description());
    report.peak_memory_bytes.push(peak);
    report.peer = peer.map(|peer| peer.versions().clone());
    let settings = settings(&geometry, tokens).map(|(name, value)| (name.to_string(), json!(value))).into_iter().collect();
    report.cases.push(Case { settings, figures });
    text::print(&report, common.json)
}

/// That of the gated delta nets of a model, if it has any.
fn geometry(config: &ModelConfig) -> Option<DeltaGeometry> {
    Work::of(config).mixers.into_iter().find_map(|mixer| match mixer {
        MixerWork::DeltaNet(geometry) => Some(geometry),
        MixerWork::Attention(_) => None,
    })
}

/// The longest sequence that can be measured in so much memory.
fn tokens_max(backend: &CpuBackend, g: &DeltaGeometry, memory_bytes: u64) -> usize {
    // Forward the rule takes as much for one chunk as for many.
    let fixed = backend.delta_scratch_bytes(g, DELTA_CHUNK) + (g.conv_width() * g.kernel + g.state_width()) * size_of::<f32>();
    // The projection and what it is made of, the inputs of the rule in the net and beside it, what the rule recalls, and the output.
    let token = (2 * g.projection_width() + 2 * (g.conv_width() + 2 * g.v_heads) + 2 * g.value_width()) * size_of::<f32>();
    usize::try_from(memory_bytes).unwrap_or(usize::MAX).saturating_sub(fixed) / token
}

/// A layer with random weights.
struct Layer<'b> {
    backend: &'b CpuBackend,
    geometry: DeltaGeometry,
    eps: f32,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
}

impl<'b> Layer<'b> {
    fn random(backend: &'b CpuBackend, g: &DeltaGeometry, eps: f32) -> anyhow::Result<Self> {
        let vector = |seed: u64, len: usize| uniform(backend, seed, &[len], DType::F32);
        // A state outlives a chunk, and nothing becomes so small that a processor slows down.
        let a_log = backend.to_f32_vec(vector(1, g.v_heads)?.as_ref())?.into_iter().map(|x| x - 3.0).collect::<Vec<_>>();
        Ok(Layer {
            backend,
            geometry: *g,
            eps,
            conv: vector(0, g.conv_width() * g.kernel)?,
            a_log: backend.tensor(&a_log, &[g.v_heads], DType::F32)?,
            dt_bias: vector(2, g.v_heads)?,
            norm: vector(3, g.v_dim)?,
        })
    }

    fn params(&self) -> DeltaParams<'_> {
        DeltaParams { conv: self.conv.as_ref(), a_log: self.a_log.as_ref(), dt_bias: self.dt_bias.as_ref() }
    }
}

/// A sequence that passes a layer: what comes out of the projections, and what the rule reads of it.
struct Sequence<'l> {
    layer: &'l Layer<'l>,
    spans: Rc<[DeltaSpan]>,
    projection: Var,
    inputs: DeltaInputs,
}

impl<'l> Sequence<'l> {
    fn random(layer: &'l Layer<'l>, tokens: usize) -> anyhow::Result<Self> {
        let Layer { backend, geometry: g, .. } = layer;
        let spans: Rc<[DeltaSpan]> = [DeltaSpan { tokens: 0..tokens, past: 0, slot: None }].into();
        let projection = uniform(backend, 4, &[tokens, g.projection_width()], DType::F32)?;
        let new = |width| backend.scratch(&[tokens, width], DType::F32);
        let (q, k, v) = (new(g.key_width())?, new(g.key_width())?, new(g.value_width())?);
        let mut inputs = DeltaInputs { q, k, v, g: new(g.v_heads)?, beta: new(g.v_heads)? };
        backend.delta_inputs(&projection, &layer.params(), g, &spans, None, &mut inputs)?;
        Ok(Sequence { layer, spans, projection: Tape::inference(*backend).constant(projection), inputs })
    }

    /// All between the projections.
    fn net(&self, dtype: DType) -> anyhow::Result<()> {
        let layer = self.layer;
        let input = DeltaNetInput {
            geometry: layer.geometry,
            params: layer.params(),
            norm: layer.norm.as_ref(),
            eps: layer.eps,
            spans: self.spans.clone(),
        };
        Tape::inference(layer.backend).gated_delta_net(&self.projection, &input, None, dtype)?;
        Ok(())
    }

    /// The rule alone.
    fn rule(&self) -> anyhow::Result<()> {
        let Layer { backend, geometry: g, .. } = self.layer;
        let mut out = backend.scratch(self.inputs.v.shape().dims(), DType::F32)?;
        Ok(backend.delta_rule(&self.inputs, g, &self.spans, None, &mut out)?)
    }
}

/// Seconds of the rounds.
#[derive(Default)]
struct Times {
    net: Vec<f64>,
    rule: Vec<f64>,
}

fn mix(peer: &mut Peer, g: &DeltaGeometry, tokens: usize) -> anyhow::Result<peer::Mixed> {
    let &DeltaGeometry { k_heads, v_heads, k_dim, v_dim, kernel } = g;
    peer.call(&peer::Request::Delta { tokens, k_heads, v_heads, k_dim, v_dim, kernel, seconds: ROUND_TIME.as_secs_f64() })
}

fn settings(g: &DeltaGeometry, tokens: usize) -> [(&'static str, usize); 6] {
    let &DeltaGeometry { k_heads, v_heads, k_dim, v_dim, kernel } = g;
    [("tokens", tokens), ("k_heads", k_heads), ("v_heads", v_heads), ("k_dim", k_dim), ("v_dim", v_dim), ("kernel", kernel)]
}

/// `limit`: GFLOP/s that the machine could do.
fn figures(ours: &Times, peers: Option<&Times>, g: &DeltaGeometry, tokens: usize, limit: f64) -> Vec<Figure> {
    let gflop = counts::delta_rule(g, tokens) / 1e9;
    let rate = |seconds: &[f64]| tokens as f64 / least(seconds);
    let gflop_per_s = |times: &Times| gflop / least(&times.rule);
    let share = |times: &Times| gflop_per_s(times) / limit;
    vec![
        Figure::new("tokens_per_s", "between the projections", Unit::TokensPerSecond, rate(&ours.net))
            .beside(peers.map(|peers| rate(&peers.net))),
        Figure::new("rule_tokens_per_s", "rule alone", Unit::TokensPerSecond, rate(&ours.rule))
            .beside(peers.map(|peers| rate(&peers.rule))),
        Figure::new("rule_gflop_per_s", "rule alone", Unit::GflopPerSecond, gflop_per_s(ours)).beside(peers.map(gflop_per_s)),
        Figure::new("rule_fraction_of_limit", "rule alone, of f32", Unit::OfArithmetic, share(ours)).beside(peers.map(share)),
    ]
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches};

    use super::*;

    /// What a command line asks for.
    fn parsed(arguments: &[&str]) -> Args {
        let matches = Args::augment_args(clap::Command::new("delta")).get_matches_from([&["delta"], arguments].concat());
        Args::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn the_shape_is_one_with_gated_delta_nets_unless_another_is_named() {
        let config = parsed(&[]).common.config().unwrap();
        let expected = DeltaGeometry { k_heads: 16, v_heads: 32, k_dim: 128, v_dim: 128, kernel: 4 };
        assert_eq!(geometry(&config), Some(expected));
        let other = parsed(&["--shape", "qwen3-0.6b"]).common;
        assert_eq!((other.shape.as_str(), geometry(&other.config().unwrap())), ("qwen3-0.6b", None));
    }

    #[test]
    fn rates_are_of_the_best_round_and_the_rule_is_counted_token_by_token() {
        let g = DeltaGeometry { k_heads: 1, v_heads: 2, k_dim: 3, v_dim: 5, kernel: 4 };
        let ours = Times { net: vec![4.0, 2.0], rule: vec![1.0, 0.5] };
        let peers = Times { net: vec![8.0, 9.0], rule: vec![5.0, 2.0] };
        let figures = figures(&ours, Some(&peers), &g, 10, 7.2e-6);
        let of = |i: usize| (figures[i].key, figures[i].ours, figures[i].peers.unwrap());
        assert_eq!((of(0), of(1)), (("tokens_per_s", 5.0, 1.25), ("rule_tokens_per_s", 20.0, 5.0)));
        // 10 tokens, 2 heads, states of 15 numbers, of which each is multiplied and added three times: 1800 operations.
        let (key, rate, peers_rate) = of(2);
        assert_eq!((key, (rate * 1e9).round(), (peers_rate * 1e9).round()), ("rule_gflop_per_s", 3600.0, 900.0));
        let (key, share, peers_share) = of(3);
        assert_eq!((key, (share * 1e6).round(), (peers_share * 1e6).round()), ("rule_fraction_of_limit", 500_000.0, 125_000.0));
    }
}
