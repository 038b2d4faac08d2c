//! Losses: sums of one term per target, each a function of that target's log-probability `lp`.
//!
//! Nothing is ever divided by a number of tokens or sequences: users fold normalisation into weights and advantages. With
//! `q` the log-probability under the sampling policy, `A` the advantage and `r = exp(lp - q)`:
//!
//! | loss | term |
//! |---|---|
//! | `cross_entropy` | `-lp * weight` |
//! | `importance_sampling` | `-r * A` |
//! | `ppo` | `-min(r * A, clip(r, low, high) * A)` (Schulman et al., 2017, arXiv:1707.06347) |
//! | `cispo` | `-stop_gradient(clip(r, low, high)) * lp * A` (MiniMax, 2025, arXiv:2506.13585) |
//! | `dro` | `-(lp * A - beta / 2 * (lp - q)^2)` (Richemond et al., 2024, arXiv:2405.19107) |
//! | `gspo` | as `ppo` with `r = exp(s)`, `s` the mean of `lp - q` over the masked tokens of the sequence, and `dr/dlp = r` (Zheng et al., 2025, arXiv:2507.18071) |
//! | `stable_reinforce` | `-stop_gradient(min(r, cap)) * lp * A`, plus `kl_coeff / 2 * (lp - q)^2` where `A` is not zero |
//!
//! The formula of `stable_reinforce` is not published. Ours is an approximation: truncated importance sampling per token against
//! `q`, which whoever takes requests may have put there from what it recorded of samples.
//!
//! Terms are computed in f64 and rounded once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

/// A loss by name, with its settings checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Loss {
    CrossEntropy {
        /// Whether log-probabilities are answered where all weights of a token are 0.
        weightless_logprobs: bool,
    },
    ImportanceSampling,
    Ppo {
        low: f64,
        high: f64,
    },
    Cispo {
        low: f64,
        high: f64,
    },
    Dro {
        beta: f64,
    },
    Gspo {
        low: f64,
        high: f64,
    },
    StableReinforce {
        cap: f64,
        kl_coeff: f64,
    },
}

/// The loss whose behaviour policy may be what was recorded of samples.
pub const STABLE_REINFORCE: &str = "stable_reinforce";
/// The names [`Loss::parse`] knows.
const NAMES: &str = "cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce";
/// Default bounds of the ratio for `ppo` and `gspo`: absolute ratios, not distances from 1.
const PPO_CLIP: (f64, f64) = (0.8, 1.2);
/// Default bounds of the ratio for `cispo`.
const CISPO_CLIP: (f64, f64) = (0.0, 4.0);
const DRO_BETA: f64 = 0.05;
/// Default cap of the ratio for `stable_reinforce`.
const STABLE_REINFORCE_CAP: f64 = 2.0;

impl Loss {
    /// The loss a request names.
    ///
    /// # Errors
    /// A message for the user if the name or a setting is unknown, or a setting is out of range.
    pub(crate) fn parse(name: &str, config: &BTreeMap<String, f64>) -> Result<Self, String> {
        let known: &[&str] = match name {
            "cross_entropy" => &["weightless_logprobs"],
            "importance_sampling" => &[],
            "ppo" | "cispo" | "gspo" => &["clip_low_threshold", "clip_high_threshold"],
            "dro" => &["beta"],
            // Its settings are not published: those without a meaning here are let through.
            STABLE_REINFORCE => &["*"],
            "custom" => {
                return Err(format!(
                    "loss \"custom\" is not computed here: forward_backward_custom differentiates it in the client; known are {NAMES}"
                ));
            }
            _ => return Err(format!("unknown loss {name:?}; known are {NAMES}")),
        };
        for (key, value) in config {
            if !known.contains(&key.as_str()) && known != ["*"] {
                let has = if known.is_empty() { "none".into() } else { known.join(", ") };
                return Err(format!("loss {name} has no setting {key:?}; its settings are: {has}"));
            }
            if !value.is_finite() {
                return Err(format!("loss {name}: {key} is {value}, which is not a finite number"));
            }
        }
        let clip = |(low, high): (f64, f64)| -> Result<(f64, f64), String> {
            let low = config.get("clip_low_threshold").copied().unwrap_or(low);
            let high = config.get("clip_high_threshold").copied().unwrap_or(high);
            check_clip(low, high).map_err(|e| format!("loss {name}: {e}"))?;
            Ok((low, high))
        };
        let non_negative = |key: &str, default: f64| match config.get(key) {
            Some(&v) if v < 0.0 => Err(format!("loss {name}: {key} is {v}, below 0")),
            Some(&v) => Ok(v),
            None => Ok(default),
        };
        let is_on = |key: &str, default: bool| match config.get(key) {
            Some(&v) if v == 0.0 || v == 1.0 => Ok(v == 1.0),
            Some(&v) => Err(format!("loss {name}: {key} is {v}, neither 0 nor 1")),
            None => Ok(default),
        };
        Ok(match name {
            "cross_entropy" => Loss::CrossEntropy { weightless_logprobs: is_on("weightless_logprobs", true)? },
            "importance_sampling" => Loss::ImportanceSampling,
            "ppo" => clip(PPO_CLIP).map(|(low, high)| Loss::Ppo { low, high })?,
            "cispo" => clip(CISPO_CLIP).map(|(low, high)| Loss::Cispo { low, high })?,
            "gspo" => clip(PPO_CLIP).map(|(low, high)| Loss::Gspo { low, high })?,
            "dro" => Loss::Dro { beta: non_negative("beta", DRO_BETA)? },
            _ => Loss::StableReinforce {
                cap: non_negative("clip_high_threshold", STABLE_REINFORCE_CAP)?,
                kl_coeff: non_negative("kl_coeff", 0.0)?,
            },
        })
    }

    /// Whether the loss of a sequence needs all its log-probabilities before the derivative of the first is known.
    pub(crate) fn needs_sequence_ratio(&self) -> bool {
        matches!(self, Loss::Gspo { .. })
    }

    /// Whether each target may have bounds of the ratio of its own.
    pub(crate) fn clips(&self) -> bool {
        matches!(self, Loss::Ppo { .. } | Loss::Cispo { .. } | Loss::Gspo { .. })
    }
}

/// Refuses clip thresholds that no ratio lies between.
pub(crate) fn check_clip(low: f64, high: f64) -> Result<(), String> {
    if low < 0.0 || high < low {
        return Err(format!("clip thresholds {low} and {high} do not satisfy 0 <= low <= high"));
    }
    Ok(())
}

/// What a loss reads for the targets of one datum, all of the same length.
#[derive(Clone, Debug)]
pub(crate) enum LossInputs {
    /// `cross_entropy`.
    Weights(Vec<f32>),
    /// The policy losses.
    Policy {
        advantages: Vec<f32>,
        /// `q`.
        sampling_logprobs: Vec<f32>,
        /// Bounds of the ratio for each target, where the request gives them instead of one pair for all.
        clip: Option<(Vec<f32>, Vec<f32>)>,
        /// Weight of each target in the mean ratio of the sequence: `gspo` alone has it.
        ratio_mask: Option<Vec<f32>>,
    },
}

/// One target's share of a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Term {
    pub(crate) loss: f32,
    /// Derivative of the loss by the log-probability.
    pub(crate) derivative: f32,
}

/// The loss of one datum.
#[derive(Clone, Debug)]
pub(crate) struct DatumLoss {
    pub(crate) loss: Loss,
    pub(crate) inputs: LossInputs,
    /// Logarithm of the sequence's ratio, for losses that have one, once it is known.
    pub(crate) log_sequence_ratio: OnceLock<f64>,
}

impl DatumLoss {
    /// The term of target `i`, whose log-probability is `logprob`.
    pub(crate) fn term(&self, i: usize, logprob: f32) -> Term {
        let (loss, derivative) = match &self.inputs {
            LossInputs::Weights(weights) => cross_entropy(logprob as f64, weights[i] as f64),
            LossInputs::Policy { advantages, sampling_logprobs, clip, .. } => {
                let bounds = clip.as_ref().map(|(low, high)| (low[i] as f64, high[i] as f64));
                self.policy_term(logprob as f64, sampling_logprobs[i] as f64, advantages[i] as f64, bounds)
            }
        };
        Term { loss: loss as f32, derivative: derivative as f32 }
    }

    fn policy_term(&self, lp: f64, q: f64, advantage: f64, bounds: Option<(f64, f64)>) -> (f64, f64) {
        // At A = 0 every term but the quadratic ones is exactly 0, also where the ratio overflows.
        if advantage == 0.0 && !matches!(self.loss, Loss::Dro { .. }) {
            return (0.0, 0.0);
        }
        match self.loss {
            Loss::CrossEntropy { .. } => cross_entropy(lp, advantage),
            Loss::ImportanceSampling => {
                let value = -(lp - q).exp() * advantage;
                (value, value)
            }
            Loss::Ppo { low, high } => clipped((lp - q).exp(), advantage, bounds.unwrap_or((low, high))),
            Loss::Gspo { low, high } => {
                // Where it is not known, all advantages are 0, and so is the term.
                let log_ratio = self.log_sequence_ratio.get().copied().unwrap_or_default();
                clipped(log_ratio.exp(), advantage, bounds.unwrap_or((low, high)))
            }
            Loss::Cispo { low, high } => {
                let (low, high) = bounds.unwrap_or((low, high));
                let factor = -(lp - q).exp().clamp(low, high) * advantage;
                (factor * lp, factor)
            }
            Loss::Dro { beta } => {
                let distance = lp - q;
                (-(lp * advantage - 0.5 * beta * distance * distance), -(advantage - beta * distance))
            }
            Loss::StableReinforce { cap, kl_coeff } => {
                let distance = lp - q;
                let factor = -distance.exp().min(cap) * advantage;
                (factor * lp + 0.5 * kl_coeff * distance * distance, factor + kl_coeff * distance)
            }
        }
    }

    /// Whether the log-probabilities of these targets of one token are to be computed.
    pub(crate) fn asks_for(&self, targets: Range<usize>) -> bool {
        match (self.loss, &self.inputs) {
            (Loss::CrossEntropy { weightless_logprobs: false }, LossInputs::Weights(weights)) => {
                weights[targets].iter().any(|weight| *weight != 0.0)
            }
            _ => true,
        }
    }

    /// Of each target whether the ratio of the sequence depends on its log-probability: of none where no term depends on the ratio.
    pub(crate) fn in_sequence_ratio(&self) -> Option<Vec<bool>> {
        let LossInputs::Policy { advantages, ratio_mask: Some(mask), .. } = &self.inputs else { return None };
        advantages.iter().any(|a| *a != 0.0).then(|| mask.iter().map(|m| *m != 0.0).collect())
    }

    /// Fixes the ratio of the sequence from its log-probabilities, unless it is known.
    pub(crate) fn fix_sequence_ratio(&self, logprobs: &[f32]) {
        let LossInputs::Policy { sampling_logprobs, ratio_mask: Some(mask), .. } = &self.inputs else { return };
        let (mut sum, mut weight) = (0.0, 0.0);
        for ((&lp, &q), &m) in logprobs.iter().zip(sampling_logprobs).zip(mask) {
            if m != 0.0 {
                sum += m as f64 * (lp as f64 - q as f64);
                weight += m as f64;
            }
        }
        self.log_sequence_ratio.get_or_init(|| sum / weight);
    }
}

fn cross_entropy(lp: f64, weight: f64) -> (f64, f64) {
    // A target of weight 0 costs nothing even where its probability is 0.
    if weight == 0.0 { (0.0, 0.0) } else { (-lp * weight, -weight) }
}

/// `-min(r * A, clip(r) * A)` and its derivative by the logarithm of `r`.
fn clipped(ratio: f64, advantage: f64, (low, high): (f64, f64)) -> (f64, f64) {
    let free = ratio * advantage;
    let bound = ratio.clamp(low, high) * advantage;
    if free <= bound { (-free, -free) } else { (-bound, 0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pairs.iter().map(|(k, v)| (k.to_string(), *v)).collect()
    }

    fn policy(loss: Loss, q: f32, advantage: f32) -> DatumLoss {
        let inputs = LossInputs::Policy {
            advantages: vec![advantage],
            sampling_logprobs: vec![q],
            clip: None,
            ratio_mask: loss.needs_sequence_ratio().then(|| vec![1.0]),
        };
        DatumLoss { loss, inputs, log_sequence_ratio: OnceLock::new() }
    }

    const H: f64 = 1e-5;

    /// Central difference of a differentiable term, in f64.
    fn difference(f: impl Fn(f64) -> f64, lp: f64) -> f64 {
        (f(lp + H) - f(lp - H)) / (2.0 * H)
    }

    fn assert_close(a: f64, b: f64, what: &str) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + a.abs().max(b.abs())), "{what}: {a} and {b}");
    }

    #[test]
    fn derivatives_agree_with_finite_differences() {
        for lp in [-0.1f64, -1.3, -4.0] {
            for q in [-0.2f64, -1.2, -3.0] {
                for a in [-1.5f64, 0.0, 0.7] {
                    for loss in [Loss::ImportanceSampling, Loss::Ppo { low: 0.8, high: 1.2 }, Loss::Dro { beta: 0.05 }] {
                        let d = policy(loss, q as f32, a as f32);
                        let numeric = difference(|x| d.policy_term(x, q, a, None).0, lp);
                        assert_close(d.policy_term(lp, q, a, None).1, numeric, &format!("{loss:?} {lp} {q} {a}"));
                    }
                    // The ratio is a constant in these: hold it fixed while the log-probability moves.
                    let cispo = policy(Loss::Cispo { low: 0.5, high: 2.0 }, q as f32, a as f32);
                    let ratio = (lp - q).exp().clamp(0.5, 2.0);
                    let numeric = difference(|x| -ratio * x * a, lp);
                    assert_close(cispo.policy_term(lp, q, a, None).1, numeric, "cispo");
                    let stable = policy(Loss::StableReinforce { cap: 2.0, kl_coeff: 0.1 }, q as f32, a as f32);
                    let ratio = (lp - q).exp().min(2.0);
                    let kl = if a == 0.0 { 0.0 } else { 0.05 };
                    let numeric = difference(|x| -ratio * x * a + kl * (x - q) * (x - q), lp);
                    assert_close(stable.policy_term(lp, q, a, None).1, numeric, "stable_reinforce");
                }
            }
            let numeric = difference(|x| cross_entropy(x, -2.5).0, lp);
            assert_close(cross_entropy(lp, -2.5).1, numeric, "cross_entropy");
        }
    }

    #[test]
    fn gspo_uses_one_ratio_for_the_sequence_and_passes_it_to_every_token() {
        let d = DatumLoss {
            loss: Loss::Gspo { low: 0.8, high: 1.2 },
            inputs: LossInputs::Policy {
                advantages: vec![0.0, 2.0, 2.0],
                sampling_logprobs: vec![0.0, -1.0, -2.0],
                clip: None,
                ratio_mask: Some(vec![0.0, 1.0, 1.0]),
            },
            log_sequence_ratio: OnceLock::new(),
        };
        d.fix_sequence_ratio(&[-9.0, -0.9, -2.0]);
        assert!((d.log_sequence_ratio.get().unwrap() - 0.05).abs() < 1e-6);
        let ratio = 0.05f64.exp();
        let term = d.term(2, -2.0);
        assert_close(term.loss as f64, -ratio * 2.0, "loss");
        // r = exp(s + lp - stop_gradient(lp)): its derivative by lp is r.
        assert_close(term.derivative as f64, -ratio * 2.0, "derivative");
        assert_eq!(d.term(0, -9.0), Term::default());
    }

    #[test]
    fn ppo_clips_only_where_clipping_lowers_the_objective() {
        let ppo = |q, a| policy(Loss::Ppo { low: 0.8, high: 1.2 }, q, a).term(0, 0.0);
        assert_eq!(ppo(-1.0, 1.0).derivative, 0.0, "a ratio of e with a positive advantage is clipped");
        assert!((ppo(-1.0, 1.0).loss + 1.2).abs() < 1e-6);
        assert!(ppo(-1.0, -1.0).derivative > 2.7, "with a negative one it is not");
    }

    #[test]
    fn cross_entropy_takes_negative_and_zero_weights() {
        let d = DatumLoss {
            loss: Loss::parse("cross_entropy", &config(&[])).unwrap(),
            inputs: LossInputs::Weights(vec![-0.5, 0.0]),
            log_sequence_ratio: OnceLock::new(),
        };
        assert_eq!(d.term(0, -2.0), Term { loss: -1.0, derivative: 0.5 });
        assert_eq!(d.term(1, f32::NEG_INFINITY), Term::default());
    }

    #[test]
    fn the_quadratic_part_of_dro_does_not_vanish_without_advantage() {
        let term = policy(Loss::Dro { beta: 0.5 }, 0.0, 0.0).term(0, -2.0);
        assert_eq!(term, Term { loss: 1.0, derivative: -1.0 });
    }

    #[test]
    fn names_and_settings_are_checked() {
        assert!(Loss::parse("mse", &config(&[])).unwrap_err().contains("cispo"));
        assert!(Loss::parse("custom", &config(&[])).unwrap_err().contains("forward_backward_custom"));
        let refused = Loss::parse("ppo", &config(&[("beta", 1.0)])).unwrap_err();
        assert_eq!(refused, "loss ppo has no setting \"beta\"; its settings are: clip_low_threshold, clip_high_threshold");
        assert!(Loss::parse("importance_sampling", &config(&[("beta", 1.0)])).unwrap_err().ends_with("its settings are: none"));
        let cross_entropy = |weightless| Loss::parse("cross_entropy", &config(&[("weightless_logprobs", weightless)]));
        assert_eq!(cross_entropy(0.0), Ok(Loss::CrossEntropy { weightless_logprobs: false }));
        assert_eq!(cross_entropy(1.0), Loss::parse("cross_entropy", &config(&[])));
        let refused = cross_entropy(0.5).unwrap_err();
        assert_eq!(refused, "loss cross_entropy: weightless_logprobs is 0.5, neither 0 nor 1");
        assert!(Loss::parse("ppo", &config(&[("clip_low_threshold", 2.0)])).is_err());
        assert!(Loss::parse("dro", &config(&[("beta", f64::NAN)])).is_err());
        assert_eq!(Loss::parse("cispo", &config(&[])), Ok(Loss::Cispo { low: 0.0, high: 4.0 }));
        let stable = Loss::parse("stable_reinforce", &config(&[("kl_coeff", 0.1), ("anything", 3.0)]));
        assert_eq!(stable, Ok(Loss::StableReinforce { cap: STABLE_REINFORCE_CAP, kl_coeff: 0.1 }));
    }
}
