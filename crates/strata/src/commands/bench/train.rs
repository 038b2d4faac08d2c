//! `strata bench train`.

use anyhow::ensure;
use strata_engine::api::{AdamParams, Datum, LossInput, LossSpec, LossValues, Request, TrainOp};

use super::{Bench, Common, Report, timed, tokens};

/// Settings of the training benchmark.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Rank of the adapter; it trains attention, MLP and unembedding.
    #[arg(long, default_value_t = 32)]
    rank: usize,
    /// Sequences of a forward_backward.
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 256)]
    seq_len: usize,
    /// Steps; the first is shown apart, of the others the fastest and the mean.
    #[arg(long, default_value_t = 4)]
    steps: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.steps > 0 && args.batch > 0 && args.seq_len > 0, "--steps, --batch and --seq-len must be at least 1");
    let mut bench = Bench::start(&args.common)?;
    bench.create_model("bench", args.rank)?;
    let (mut seconds, mut optimizer_seconds) = (Vec::new(), Vec::new());
    let mut seq_id = 0;
    let mut train = |op| {
        seq_id += 1;
        bench.call(Request::Train { model_id: "bench".into(), seq_id, op })
    };
    for step in 0..args.steps {
        let data = (0..args.batch).map(|i| datum(&bench, (step * args.batch + i) as u64, args.seq_len)).collect();
        let loss = LossSpec { name: "cross_entropy".into(), config: Default::default() };
        seconds.push(timed(|| train(TrainOp::ForwardBackward { data, loss, forward_only: false }))?.0);
        optimizer_seconds.push(timed(|| train(TrainOp::OptimStep(AdamParams::default())))?.0);
    }

    bench.measure_limits_again(&args.common)?;
    let num_tokens = (args.batch * args.seq_len) as f64;
    let (layers, unembedding) = bench.matmul_parameters();
    let c = &bench.config;
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    // Inputs and outputs of q, k, v, o, gate, up and down.
    let attention_widths = 4 * c.hidden_size + 2 * q + 2 * kv;
    let low_rank_widths = c.num_layers * (attention_widths + 3 * c.hidden_size + 3 * c.intermediate_size);
    let low_rank = (args.rank * low_rank_widths) as f64;
    let low_rank_unembedding = (args.rank * (c.hidden_size + c.vocab_size)) as f64;
    // Of every matrix: forward, forward again for the layers, gradient of the input; of low-rank pairs also their own gradient.
    // Attention: twice forward, and two and a half times as much backward.
    let matmul = 2.0 * num_tokens * (3.0 * layers + 2.0 * unembedding + 4.0 * low_rank + 3.0 * low_rank_unembedding);
    let flops = matmul + 4.5 * bench.attention_flops(args.batch, args.seq_len);

    let settings = [("rank", args.rank), ("batch", args.batch), ("seq-len", args.seq_len), ("steps", args.steps)];
    let mut report = Report::new("train", &args.common, &bench, &settings);
    let later = if seconds.len() > 1 { &seconds[1..] } else { &seconds[..] };
    let best = later.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = later.iter().sum::<f64>() / later.len() as f64;
    report.add("forward_backward, tokens/s, best", num_tokens / best);
    report.add("forward_backward, tokens/s, mean", num_tokens / mean);
    report.add("forward_backward, tokens/s, first", num_tokens / seconds[0]);
    report.add("forward_backward, GFLOP/s, best", flops / best / 1e9);
    report.add("forward_backward, fraction of matmul peak", flops / best / bench.limits.matmul_flops);
    report.add("optim_step, seconds, best", optimizer_seconds.iter().copied().fold(f64::INFINITY, f64::min));
    report.finish(args.common.json)
}

fn datum(bench: &Bench, sequence: u64, len: usize) -> Datum {
    let text = tokens(bench.config.vocab_size, sequence, len + 1);
    let (tokens, targets) = (text[..len].to_vec(), text[1..].to_vec());
    let input = |values| LossInput { shape: vec![len], values };
    let loss_inputs = [
        ("target_tokens".to_string(), input(LossValues::I64(targets))),
        ("weights".to_string(), input(LossValues::F32(vec![1.0; len]))),
    ];
    Datum { tokens, loss_inputs: loss_inputs.into() }
}
