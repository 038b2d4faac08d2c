//! Whose adapters take part, and of what ranks.

use anyhow::ensure;
use strata_model::lora::RANK_MAX;

/// Rank of a single adapter.
const RANK: usize = 32;
/// The most adapters: more than any memory has room for.
const ADAPTERS_MAX: usize = 1 << 16;
/// Ranks of several, over and over: from 1 to 64, large and small beside each other.
const MIXED_RANKS: [usize; 7] = [32, 1, 64, 8, 2, 16, 4];

/// Settings of adapters.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Adapters {
    /// Adapters, each of a tenant of its own; the requests of all are in flight at the same time.
    #[arg(long, value_name = "N")]
    adapters: Option<usize>,
    /// Rank of the adapters; several numbers are taken in turn [default: 32 for one adapter; 32,1,64,8,2,16,4 in turn for several].
    #[arg(long, value_delimiter = ',', value_name = "RANKS")]
    rank: Vec<usize>,
}

impl Adapters {
    /// The rank of each adapter. There are `default` of them if nothing is said.
    pub(super) fn ranks(&self, default: usize) -> anyhow::Result<Vec<usize>> {
        let count = self.adapters.unwrap_or(if self.rank.is_empty() { default } else { self.rank.len() });
        ensure!(self.rank.len() <= count, "--rank names {} ranks for {count} adapters", self.rank.len());
        ensure!(count <= ADAPTERS_MAX, "--adapters {count} is more than {ADAPTERS_MAX}");
        for &rank in &self.rank {
            ensure!((1..=RANK_MAX).contains(&rank), "--rank {rank} is not between 1 and {RANK_MAX}");
        }
        let ranks = match (&self.rank[..], count) {
            ([], 1) => &[RANK],
            ([], _) => &MIXED_RANKS[..],
            (ranks, _) => ranks,
        };
        Ok(ranks.iter().copied().cycle().take(count).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(adapters: Option<usize>, rank: &[usize], default: usize) -> anyhow::Result<Vec<usize>> {
        Adapters { adapters, rank: rank.to_vec() }.ranks(default)
    }

    #[test]
    fn one_adapter_has_one_rank_and_several_have_mixed_ones() {
        assert_eq!(ranks(None, &[], 1).unwrap(), [32]);
        assert!(ranks(None, &[], 0).unwrap().is_empty());
        assert_eq!(ranks(None, &[8], 0).unwrap(), [8]);
        assert_eq!(ranks(None, &[8, 4], 1).unwrap(), [8, 4]);
        assert_eq!(ranks(Some(3), &[8, 4], 1).unwrap(), [8, 4, 8]);
        assert_eq!(ranks(Some(8), &[], 1).unwrap(), [32, 1, 64, 8, 2, 16, 4, 32]);
    }

    #[test]
    fn ranks_that_no_adapter_has_are_refused() {
        assert!(ranks(None, &[0], 1).is_err());
        assert!(ranks(None, &[RANK_MAX + 1], 1).is_err());
        let error = ranks(Some(1), &[1, 2], 1).unwrap_err().to_string();
        assert_eq!(error, "--rank names 2 ranks for 1 adapters");
        assert!(ranks(Some(usize::MAX), &[], 1).is_err());
    }
}
