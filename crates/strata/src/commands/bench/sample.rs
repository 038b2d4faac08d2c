//! `strata bench sample`.

use anyhow::ensure;
use strata_engine::api::{Request, Response, SampleRequest, Stop};

use super::{Bench, Common, Report, timed, tokens, wait};

/// Settings of the sampling benchmark.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens to sample after each prompt.
    #[arg(long, default_value_t = 32)]
    new: usize,
    /// Sequences at a time; several numbers for several runs.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4])]
    batch: Vec<usize>,
    /// Requests for each measurement; the best counts, the first is shown too.
    #[arg(long, default_value_t = 10)]
    repeats: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.new > 1 && args.prompt > 0 && args.repeats > 0, "--new must be at least 2, --prompt and --repeats at least 1");
    ensure!(!args.batch.contains(&0), "--batch must be at least 1");
    let mut bench = Bench::start(&args.common)?;
    bench.call(Request::CreateSampler { sampler_id: "base".into(), source: None })?;
    let mut next_prompt = 0;
    let mut sample = |batch: usize, new: usize| {
        timed(|| {
            let outcomes: Vec<_> =
                (0..batch).map(|_| bench.submit(request(&bench, &mut next_prompt, args.prompt, new))).collect();
            for outcome in &outcomes {
                let Response::Sampled(output) = wait(outcome)? else {
                    anyhow::bail!("a sample was answered with something else")
                };
                ensure!(output.sequences[0].tokens.len() == new, "a sample of {} tokens", output.sequences[0].tokens.len());
            }
            Ok(())
        })
    };

    // The first request of all, and then as many as asked for: there is no warm-up to hide.
    let prefills = (0..args.repeats).map(|_| Ok(sample(1, 1)?.0)).collect::<anyhow::Result<Vec<f64>>>()?;
    let mut decodes = Vec::new();
    for &batch in &args.batch {
        let short = best(args.repeats, || Ok(sample(batch, 1)?.0))?;
        let long = best(args.repeats.min(4), || Ok(sample(batch, args.new)?.0))?;
        decodes.push((batch, (long - short) / (args.new - 1) as f64, long));
    }

    bench.measure_limits_again(&args.common)?;
    let settings = [("prompt", args.prompt), ("new", args.new), ("repeats", args.repeats)];
    let mut report = Report::new("sample", &args.common, &bench, &settings);
    let (layers, _) = bench.matmul_parameters();
    let prefill = prefills.iter().copied().fold(f64::INFINITY, f64::min);
    let flops = 2.0 * layers * args.prompt as f64 + bench.attention_flops(1, args.prompt);
    report.add("prefill, tokens/s, best", args.prompt as f64 / prefill);
    report.add("prefill, fraction of matmul peak", flops / prefill / bench.limits.matmul_flops);
    report.add("request of one token, seconds, first", prefills[0]);
    report.add("request of one token, seconds, last", prefills[prefills.len() - 1]);
    for (batch, step, long) in decodes {
        let bytes = bench.weight_bytes as f64 / step;
        report.add(format!("batch {batch}: decode, tokens/s"), batch as f64 / step);
        report.add(format!("batch {batch}: decode, GB/s"), bytes / 1e9);
        report.add(format!("batch {batch}: decode, fraction of bandwidth"), bytes / bench.limits.read_bytes);
        report.add(format!("batch {batch}: new tokens/s with prefill"), (batch * args.new) as f64 / long);
    }
    report.finish(args.common.json)
}

fn best(repeats: usize, mut body: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    (0..repeats).try_fold(f64::INFINITY, |best, _| Ok(best.min(body()?)))
}

/// A request with a prompt that none before it had, so that nothing is found in the prefix cache.
fn request(bench: &Bench, next_prompt: &mut u64, prompt: usize, new: usize) -> Request {
    *next_prompt += 1;
    let sample = SampleRequest {
        prompt: tokens(bench.config.vocab_size, *next_prompt, prompt),
        num_samples: 1,
        max_tokens: Some(new),
        seed: *next_prompt,
        stop: Stop::Tokens(Vec::new()),
        temperature: 1.0,
        top_k: None,
        top_p: 1.0,
        prompt_logprobs: false,
        prompt_logprobs_last_n: None,
        topk_prompt_logprobs: 0,
        topk_sample_logprobs: 0,
    };
    Request::Sample { sampler_id: "base".into(), sample }
}
