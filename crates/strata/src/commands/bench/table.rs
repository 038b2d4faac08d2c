//! `strata bench table`: training or sampling at several batch sizes and lengths in one run.

use anyhow::ensure;

use super::adapters::Adapters;
use super::{Common, sample, train};

/// Which table.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Training: every batch size with every sequence length.
    Train(TrainArgs),
    /// Sampling: every batch size with every prompt length.
    Sample(SampleArgs),
}

#[derive(Debug, clap::Args)]
struct TrainArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    adapters: Adapters,
    /// Sequences of a forward_backward.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    batch: Vec<usize>,
    /// Tokens of a sequence.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1024])]
    seq_len: Vec<usize>,
    /// Steps of each; the first does not count.
    #[arg(long, default_value_t = 3)]
    steps: usize,
}

#[derive(Debug, clap::Args)]
struct SampleArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    adapters: Adapters,
    /// Sequences at a time.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    batch: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 1024])]
    prompt: Vec<usize>,
    #[command(flatten)]
    rounds: sample::Rounds,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::Train(args) => {
            let cells: Vec<_> =
                pairs(&args.batch, &args.seq_len)?.map(|(batch, seq_len)| train::Cell::of(batch, seq_len)).collect();
            train::measure(&args.common, &args.adapters, &cells, args.steps)
        }
        What::Sample(args) => {
            let cells: Vec<_> =
                pairs(&args.batch, &args.prompt)?.map(|(batch, prompt)| sample::Cell { batch, prompt }).collect();
            sample::measure(&args.common, &args.adapters, &cells, args.rounds)
        }
    }
}

/// Every batch size with every length.
fn pairs<'a>(batches: &'a [usize], lengths: &'a [usize]) -> anyhow::Result<impl Iterator<Item = (usize, usize)> + 'a> {
    ensure!(!batches.is_empty() && !lengths.is_empty(), "a table needs at least one batch size and one length");
    Ok(batches.iter().flat_map(move |&batch| lengths.iter().map(move |&length| (batch, length))))
}
