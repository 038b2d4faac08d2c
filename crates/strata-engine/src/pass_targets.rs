//! The targets of a pass: which are computed, whose they are, and where their log-probabilities belong.

use strata_model::{Targets, TokenLoss};

use crate::datum::PreparedDatum;
use crate::losses::DatumLoss;

/// The targets of the examples of a pass, in their order. Those whose log-probabilities nobody asks for are not computed.
pub(crate) struct PassTargets<'d> {
    /// Those that are computed.
    pub(crate) targets: Targets,
    losses: Vec<ExampleLoss<'d>>,
    runs: Vec<Run>,
    /// Targets that examples have, computed or not.
    count: usize,
}

#[derive(Clone, Copy)]
struct ExampleLoss<'d> {
    loss: &'d DatumLoss,
    /// Whether there is a gradient of it.
    goes_back: bool,
}

/// Targets that follow each other in an example and are computed.
struct Run {
    /// Place of the example in the pass.
    datum: usize,
    /// Places of the first among the targets that are computed, those of the example, and all of the pass.
    computed: usize,
    in_datum: usize,
    in_pass: usize,
    count: usize,
}

impl<'d> PassTargets<'d> {
    pub(crate) fn new() -> Self {
        let targets = Targets { ids: Vec::new(), offsets: vec![0] };
        PassTargets { targets, losses: Vec::new(), runs: Vec::new(), count: 0 }
    }

    /// Adds the targets of the next example, for a gradient of its loss.
    pub(crate) fn push(&mut self, datum: &'d PreparedDatum) {
        self.push_targets(datum);
        self.losses.push(ExampleLoss { loss: &datum.loss, goes_back: true });
    }

    /// Adds the targets of the next example, of which log-probabilities are wanted and nothing else: no derivative comes to it from its loss.
    pub(crate) fn push_scored(&mut self, datum: &'d PreparedDatum) {
        self.push_targets(datum);
        self.losses.push(ExampleLoss { loss: &datum.loss, goes_back: false });
    }

    fn push_targets(&mut self, datum: &PreparedDatum) {
        let Targets { ids, offsets } = &mut self.targets;
        let mut goes_on = false;
        for first in (0..datum.targets.len()).step_by(datum.targets_per_token) {
            let of_token = first..first + datum.targets_per_token;
            let is_asked = datum.loss.asks_for(of_token.clone());
            if is_asked {
                match self.runs.last_mut().filter(|_| goes_on) {
                    Some(run) => run.count += of_token.len(),
                    None => self.runs.push(Run {
                        datum: self.losses.len(),
                        computed: ids.len(),
                        in_datum: first,
                        in_pass: self.count + first,
                        count: of_token.len(),
                    }),
                }
                ids.extend_from_slice(&datum.targets[of_token]);
            }
            goes_on = is_asked;
            offsets.push(ids.len());
        }
        self.count += datum.targets.len();
    }

    /// The targets on which ratios of sequences depend that a gradient depends on, as places among those that are computed.
    fn in_ratios(&self) -> Vec<usize> {
        let mut places = Vec::new();
        for run in &self.runs {
            let ExampleLoss { loss, goes_back } = self.losses[run.datum];
            if let Some(depends) = loss.in_sequence_ratio().filter(|_| goes_back) {
                places.extend((0..run.count).filter(|i| depends[run.in_datum + i]).map(|i| run.computed + i));
            }
        }
        places
    }

    /// The log-probabilities of all targets of the pass: those that were computed, and 0 for the others. All that losses need of them is known from here on.
    pub(crate) fn answers(&self, computed: Vec<f32>) -> Vec<f32> {
        for run in &self.runs {
            self.losses[run.datum].loss.fix_sequence_ratio(&computed[run.computed..][..run.count]);
        }
        if computed.len() == self.count {
            return computed;
        }
        let mut answers = vec![0.0; self.count];
        for run in &self.runs {
            answers[run.in_pass..][..run.count].copy_from_slice(&computed[run.computed..][..run.count]);
        }
        answers
    }
}

impl TokenLoss for PassTargets<'_> {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        let mut run = self.runs.partition_point(|run| run.computed <= first).saturating_sub(1);
        for (i, (out, &logprob)) in gradient.iter_mut().zip(logprobs).enumerate() {
            let target = first + i;
            while self.runs.get(run + 1).is_some_and(|next| next.computed <= target) {
                run += 1;
            }
            let Run { datum, computed, in_datum, .. } = self.runs[run];
            let ExampleLoss { loss, goes_back } = self.losses[datum];
            *out = if goes_back { loss.term(in_datum + target - computed, logprob).derivative } else { 0.0 };
        }
    }

    fn asks_first(&self) -> Option<Targets> {
        let places = self.in_ratios();
        let offsets = self.targets.offsets.iter().map(|offset| places.partition_point(|place| place < offset)).collect();
        let ids = places.iter().map(|&place| self.targets.ids[place]).collect();
        (!places.is_empty()).then_some(Targets { ids, offsets })
    }

    fn is_told(&self, logprobs: &[f32]) {
        // A ratio does not depend on the others.
        let mut computed = vec![0.0; self.targets.ids.len()];
        self.in_ratios().into_iter().zip(logprobs).for_each(|(place, &logprob)| computed[place] = logprob);
        for run in &self.runs {
            let ExampleLoss { loss, goes_back } = self.losses[run.datum];
            if goes_back && loss.in_sequence_ratio().is_some() {
                loss.fix_sequence_ratio(&computed[run.computed..][..run.count]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::losses::{Loss, LossInputs};

    /// An example of `targets_per_token` targets for each token, numbered from `first`.
    fn datum(first: u32, weights: &[f32], targets_per_token: usize, weightless_logprobs: bool) -> PreparedDatum {
        let tokens = weights.len() / targets_per_token;
        PreparedDatum {
            tokens: vec![0; tokens],
            pictures: Vec::new(),
            targets: (first..).take(weights.len()).collect(),
            targets_per_token,
            shape: vec![tokens, targets_per_token],
            loss: DatumLoss {
                loss: Loss::CrossEntropy { weightless_logprobs },
                inputs: LossInputs::Weights(weights.to_vec()),
                log_sequence_ratio: OnceLock::new(),
            },
            repeated: 0,
        }
    }

    fn of<'d>(data: impl IntoIterator<Item = &'d PreparedDatum>) -> PassTargets<'d> {
        let mut targets = PassTargets::new();
        data.into_iter().for_each(|datum| targets.push(datum));
        targets
    }

    #[test]
    fn derivatives_are_those_of_the_example_that_a_target_belongs_to() {
        let data = [datum(0, &[1.0, 2.0], 1, true), datum(2, &[3.0], 1, true)];
        let mut out = [0.0; 2];
        of(&data).gradient(1, &[-1.0, -1.0], &mut out);
        assert_eq!(out, [-2.0, -3.0]);
    }

    #[test]
    fn no_derivative_comes_to_an_example_that_is_only_scored() {
        let data = [datum(0, &[1.0, 2.0], 1, true), datum(2, &[3.0], 1, true)];
        let mut targets = PassTargets::new();
        targets.push_scored(&data[0]);
        targets.push(&data[1]);
        let mut out = [9.0; 3];
        targets.gradient(0, &[-1.0; 3], &mut out);
        assert_eq!(out, [0.0, 0.0, -3.0]);
        assert_eq!(targets.answers(vec![-1.0, -2.0, -3.0]), [-1.0, -2.0, -3.0]);
    }

    #[test]
    fn of_sequences_whose_ratio_a_gradient_depends_on_it_asks_what_the_ratio_depends_on() {
        let with_ratio = |first: u32, advantages: [f32; 3], mask: [f32; 3]| {
            let mut datum = datum(first, &advantages, 1, true);
            datum.loss.loss = Loss::Gspo { low: 0.0, high: 10.0 };
            datum.loss.inputs = LossInputs::Policy {
                advantages: advantages.to_vec(),
                sampling_logprobs: vec![-1.0; 3],
                clip: None,
                ratio_mask: Some(mask.to_vec()),
            };
            datum
        };
        let data = [
            datum(0, &[1.0], 1, true),
            with_ratio(1, [0.0, 1.0, 1.0], [0.0, 1.0, 3.0]),
            with_ratio(4, [0.0; 3], [1.0; 3]),
            with_ratio(7, [1.0; 3], [1.0; 3]),
        ];
        let mut targets = of(&data[..3]);
        targets.push_scored(&data[3]);
        let first = targets.asks_first().unwrap();
        assert_eq!((&first.ids[..], &first.offsets[..]), (&[2, 3][..], &[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2][..]));
        targets.is_told(&[-2.0, -3.0]);
        let ratio = |datum: &PreparedDatum| datum.loss.log_sequence_ratio.get().copied();
        assert_eq!(data.each_ref().map(ratio), [None, Some(-1.75), None, None]);
        targets.answers(vec![-1.0; 10]);
        assert_eq!(data.each_ref().map(ratio), [None, Some(-1.75), Some(0.0), Some(0.0)]);
        assert!(of(&data[..1]).asks_first().is_none());
    }

    #[test]
    fn what_nobody_asks_for_is_left_out_and_answered_as_zero() {
        let weights = [0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0];
        let data = [
            datum(0, &weights, 2, false),
            datum(10, &[0.0, 0.0], 1, false),
            datum(12, &[0.0, 5.0], 1, true),
            datum(14, &[6.0, 0.0, 7.0], 1, false),
        ];
        let targets = of(&data);
        // Of a token of several targets one counts and all are computed.
        assert_eq!(targets.targets.ids, [2, 3, 4, 5, 8, 9, 12, 13, 14, 16]);
        assert_eq!(targets.targets.offsets, [0, 0, 2, 4, 4, 6, 6, 6, 7, 8, 9, 9, 10]);
        let mut gradient = [9.0; 10];
        targets.gradient(0, &[-1.0; 10], &mut gradient);
        assert_eq!(gradient, [0.0, -1.0, -2.0, 0.0, -3.0, -4.0, 0.0, -5.0, -6.0, -7.0]);
        for first in 0..10 {
            let mut part = vec![9.0; 10 - first];
            targets.gradient(first, &[-1.0; 10][first..], &mut part);
            assert_eq!(part, gradient[first..], "from target {first}");
        }
        let computed: Vec<f32> = (1..=10).map(|i| -(i as f32)).collect();
        let answers = [0., 0., -1., -2., -3., -4., 0., 0., -5., -6., 0., 0., -7., -8., -9., 0., -10.];
        assert_eq!(targets.answers(computed), answers);
    }

    #[test]
    fn all_are_computed_unless_a_request_does_without() {
        let data = [datum(0, &[0.0, 1.0, 0.0], 1, true)];
        let targets = of(&data);
        assert_eq!(targets.targets.ids, [0, 1, 2]);
        assert_eq!(targets.answers(vec![-1.0, -2.0, -3.0]), [-1.0, -2.0, -3.0]);
    }
}
