//! Shares the device between training and sampling by time: whichever has had less of it goes next.
//!
//! A training pass may take a hundred times as long as a decode step, so taking turns one for one would starve sampling.
//! This only orders work; no result depends on it.

use std::time::Duration;

/// The two kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Training,
    Sampling,
}

/// Time each kind of work has had since both last began to compete.
#[derive(Debug, Default)]
pub(crate) struct FairClock {
    training: Duration,
    sampling: Duration,
}

impl FairClock {
    /// What goes next, of the kinds that are ready.
    pub(crate) fn choose(&mut self, training_ready: bool, sampling_ready: bool) -> Option<Work> {
        match (training_ready, sampling_ready) {
            (false, false) => None,
            (true, true) if self.training <= self.sampling => Some(Work::Training),
            (true, true) => Some(Work::Sampling),
            // Nobody is owed the time during which it had nothing to do.
            (true, false) => {
                self.sampling = self.training;
                Some(Work::Training)
            }
            (false, true) => {
                self.training = self.sampling;
                Some(Work::Sampling)
            }
        }
    }

    /// Charges the time a piece of work took.
    pub(crate) fn charge(&mut self, work: Work, time: Duration) {
        match work {
            Work::Training => self.training += time,
            Work::Sampling => self.sampling += time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_get_the_same_share_of_time_when_both_have_work() {
        let (mut clock, mut time) = (FairClock::default(), [0u64; 2]);
        for _ in 0..10_000 {
            let work = clock.choose(true, true).unwrap();
            let cost = if work == Work::Training { 100 } else { 1 };
            time[(work == Work::Sampling) as usize] += cost;
            clock.charge(work, Duration::from_millis(cost));
        }
        assert!(time[0].abs_diff(time[1]) <= 100, "{time:?}");
    }

    #[test]
    fn idleness_earns_no_credit() {
        let mut clock = FairClock::default();
        for _ in 0..1000 {
            assert_eq!(clock.choose(true, false), Some(Work::Training));
            clock.charge(Work::Training, Duration::from_secs(1));
        }
        clock.charge(Work::Sampling, Duration::from_secs(3));
        let next: Vec<_> = (0..3)
            .map(|_| {
                let work = clock.choose(true, true).unwrap();
                clock.charge(work, Duration::from_secs(1));
                work
            })
            .collect();
        assert!(next.contains(&Work::Training), "sampling may not catch up on a thousand seconds: {next:?}");
        assert_eq!(clock.choose(false, false), None);
    }
}
