//! Mixture of experts: how tokens choose experts, what experts are, and which rows go to which.

use std::ops::Range;

use crate::tape::{Linear, LoraGroup, LoraProjection, LoraSite, Var};
use crate::{Error, Result, Tensor, TensorRef};

/// How a router makes choices and weights of its logits, all in f32. Of equal experts the one of the lower index is chosen.
#[derive(Clone, Copy)]
pub struct Routing<'a> {
    /// Experts that a token chooses.
    pub top_k: usize,
    /// What its choice weighs.
    pub scores: RouterScores<'a>,
}

/// What experts are chosen by, and what their outputs are multiplied by.
#[derive(Clone, Copy)]
pub enum RouterScores<'a> {
    /// The softmax over all experts, as it is: Qwen3-MoE without `norm_topk_prob`.
    Softmax,
    /// The softmax over the logits of the chosen alone: gpt-oss. It is also what Qwen3-MoE with `norm_topk_prob` and Qwen3.5-MoE compute by dividing a
    /// softmax over all by the sum of what is chosen.
    SoftmaxOfChosen,
    /// A sigmoid each: DeepSeek-V3 (arXiv:2412.19437), GLM-4.7-Flash.
    Sigmoid(SigmoidScores<'a>),
}

/// Sigmoid scores `s`. What is chosen is chosen by `s + correction_bias`, first groups of experts by the sum of the two largest in each, then experts of these groups.
/// What it weighs is `scaling_factor · s`, or `scaling_factor · s / (Σ s of the chosen + 1e-20)`.
#[derive(Clone, Copy)]
pub struct SigmoidScores<'a> {
    /// `e_score_correction_bias`: f32 `[experts]`.
    pub correction_bias: Option<TensorRef<'a>>,
    /// `n_group`: groups of equally many neighbouring experts, at least two.
    pub num_groups: usize,
    /// `topk_group`: groups that a token chooses its experts from.
    pub top_groups: usize,
    /// `norm_topk_prob`: whether weights are divided by their sum.
    pub normalize: bool,
    /// `routed_scaling_factor`.
    pub scaling_factor: f32,
}

/// What tokens have chosen.
#[derive(Clone)]
pub struct Routed {
    /// `[tokens, top_k]`: different experts in each row.
    pub experts: std::rc::Rc<[u32]>,
    /// What their outputs are multiplied by: f32 `[tokens, top_k]`.
    pub weights: Var,
}

/// What lies between the two layers of an expert: of the first one's outputs, all of gate and then all of up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) · up`.
    SwiGlu,
    /// gpt-oss: `(up' + 1) · gate' · sigmoid(alpha · gate')`, with `gate' = min(gate, limit)` and `up'` between `-limit` and `limit`.
    ClampedSwiGlu {
        /// `swiglu_alpha`: 1.702.
        alpha: f32,
        /// `swiglu_limit`: 7.
        limit: f32,
    },
}

/// The experts of a layer. Weights, low-rank pairs and sites are those of its first expert; those of expert `e` are `e` layers further on in their stacks, so that one stack holds
/// entry `layer · num_experts + e` of each kind.
///
/// `y = Σ over chosen experts of down(weight · activation(gate_up(x))) + weight · (bias of down)`: the weight of a choice goes into the second product rather than to
/// its result, so that its gradient needs no output of an expert.
#[derive(Clone)]
pub struct Experts<'a> {
    /// Experts of the layer.
    pub num_experts: usize,
    /// `hidden → 2 · intermediate`. A bias is f32 `[num_experts, 2 · intermediate]`.
    pub gate_up: Linear<'a>,
    /// What follows it.
    pub activation: ExpertActivation,
    /// `intermediate → hidden`. A bias is f32 `[num_experts, hidden]`.
    pub down: Linear<'a>,
    /// Whether what `gate_up` makes is kept for the way back, f32 `[2 · intermediate]` for each choice, rather than made again. Devices may do without.
    pub keeps: bool,
}

/// What the first layers of experts have made of their rows, f32 `[rows, 2 · intermediate]`, in the order of experts that have rows.
pub struct KeptExperts(pub(crate) Vec<Tensor>);

/// The rows of a batch by expert: a row for each token and each of its choices, in the order of tokens within an expert. No expert without rows is in it.
pub struct Dispatch {
    top_k: usize,
    /// Places in `[tokens, top_k]`, expert after expert.
    places: Vec<usize>,
    /// Experts in order, with their rows.
    runs: Vec<(usize, Range<usize>)>,
}

/// The rows of one expert.
pub(crate) struct ExpertRows<'d> {
    pub(crate) expert: usize,
    /// Of each row the place in `[tokens, top_k]`.
    pub(crate) places: &'d [usize],
    top_k: usize,
}

impl Dispatch {
    /// Sorts rows by expert.
    ///
    /// # Errors
    /// If there is no such expert, a token chooses one twice, or choices are not `[tokens, top_k]`.
    pub(crate) fn new(op: &'static str, experts: &[u32], tokens: usize, top_k: usize, num_experts: usize) -> Result<Self> {
        if experts.len() != tokens * top_k || top_k == 0 {
            return Err(Error::Shape {
                op,
                expected: format!("choices of shape [{tokens}, {}]", top_k.max(1)),
                actual: format!("{} choices", experts.len()),
            });
        }
        if let Some(&expert) = experts.iter().find(|&&e| e as usize >= num_experts) {
            return Err(Error::Index { op, what: "experts", index: expert as usize, size: num_experts });
        }
        let mut ends = vec![0; num_experts];
        experts.iter().for_each(|&e| ends[e as usize] += 1);
        let mut runs = Vec::new();
        let mut end = 0;
        for (expert, count) in ends.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            runs.push((expert, end..end + *count));
            end += std::mem::replace(count, end);
        }
        let mut places = vec![0; experts.len()];
        for (place, &expert) in experts.iter().enumerate() {
            let next = &mut ends[expert as usize];
            places[*next] = place;
            *next += 1;
        }
        let dispatch = Dispatch { top_k, places, runs };
        for rows in dispatch.experts() {
            if let Some(pair) = rows.places.windows(2).find(|pair| pair[0] / top_k == pair[1] / top_k) {
                return Err(Error::Unsupported(format!(
                    "{op}: token {} chooses expert {} twice",
                    pair[0] / top_k,
                    rows.expert
                )));
            }
        }
        Ok(dispatch)
    }

    /// The rows of some tokens alone.
    pub(crate) fn of_tokens(&self, is_wanted: impl Fn(usize) -> bool) -> Self {
        let mut some = Dispatch { top_k: self.top_k, places: Vec::with_capacity(self.places.len()), runs: Vec::new() };
        for rows in self.experts() {
            let first = some.places.len();
            some.places.extend(rows.places.iter().filter(|&&place| is_wanted(place / self.top_k)));
            if some.places.len() > first {
                some.runs.push((rows.expert, first..some.places.len()));
            }
        }
        some
    }

    /// The experts that have rows, in order.
    pub(crate) fn experts(&self) -> impl Iterator<Item = ExpertRows<'_>> {
        self.runs.iter().map(|(expert, run)| ExpertRows {
            expert: *expert,
            places: &self.places[run.clone()],
            top_k: self.top_k,
        })
    }
}

impl ExpertRows<'_> {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The token of a row.
    pub(crate) fn token(&self, row: usize) -> usize {
        self.places[row] / self.top_k
    }

    /// The rows of these tokens.
    fn of(&self, tokens: &Range<usize>) -> Range<usize> {
        let first = |token: usize| self.places.partition_point(|&place| place < token * self.top_k);
        first(tokens.start)..first(tokens.end)
    }

    /// A layer of this expert, its tokens being rows; groups that have none are left out. Sequences are told only to those who go back.
    pub(crate) fn layer<'a>(&self, layer: &Linear<'a>, sequences: Sequences) -> Linear<'a> {
        let e = self.expert;
        let projection = |p: &LoraProjection<'a>| LoraProjection {
            a: p.a.further(e),
            b: p.b.further(e),
            site: LoraSite { layer: p.site.layer + e, ..p.site },
            ..*p
        };
        let group = |group: &LoraGroup<'a>| LoraGroup {
            tokens: self.of(&group.tokens),
            sequences: match sequences {
                Sequences::Untold => [].into(),
                Sequences::Told => group.sequences.iter().map(|s| self.of(s)).filter(|rows| !rows.is_empty()).collect(),
            },
            projections: group.projections.iter().map(projection).collect(),
        };
        Linear {
            weight: layer.weight.further(e),
            bias: layer.bias.map(|biases| biases.row(e)),
            lora: layer.lora.iter().filter(|g| self.reach(g)).map(group).collect(),
        }
    }

    /// Whether some of a group's tokens chose this expert.
    pub(crate) fn reach(&self, group: &LoraGroup<'_>) -> bool {
        !self.of(&group.tokens).is_empty()
    }
}

/// Whether a layer of an expert knows which of its rows are of one sequence.
#[derive(Clone, Copy)]
pub(crate) enum Sequences {
    Told,
    Untold,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_then_by_token() {
        let dispatch = Dispatch::new("test", &[3, 0, 5, 3, 0, 5], 3, 2, 7).unwrap();
        let found: Vec<_> = dispatch.experts().map(|r| (r.expert, r.places.to_vec(), r.of(&(1..3)))).collect();
        assert_eq!(found, [(0, vec![1, 4], 1..2), (3, vec![0, 3], 1..2), (5, vec![2, 5], 0..2)]);
        let some = dispatch.of_tokens(|token| token == 1);
        let found: Vec<_> = some.experts().map(|r| (r.expert, r.places.to_vec())).collect();
        assert_eq!(found, [(3, vec![3]), (5, vec![2])]);
        assert_eq!(dispatch.of_tokens(|_| false).experts().count(), 0);
        assert_eq!(Dispatch::new("test", &[], 0, 2, 7).unwrap().experts().count(), 0);
    }

    #[test]
    fn choices_that_are_none_are_refused() {
        let refused =
            |experts: &[u32], tokens, top_k| Dispatch::new("test", experts, tokens, top_k, 4).err().map(|e| e.to_string());
        assert!(refused(&[0, 1, 2, 3], 2, 2).is_none());
        assert!(refused(&[0, 1, 2], 2, 2).unwrap().contains("[2, 2]") && refused(&[], 2, 0).is_some());
        assert!(refused(&[0, 4], 1, 2).unwrap().contains("index 4"));
        assert!(refused(&[0, 1, 2, 2], 2, 2).unwrap().contains("token 1 chooses expert 2 twice"));
    }
}
