//! What a step costs: a line through the steps that were seen, time against tokens.
//!
//! A step reads all weights once, whatever its length; beyond that it costs by the token. How many tokens the reading is worth depends on
//! model and machine, and decides how much company a small step can bear.

use std::time::Duration;

/// What each new step leaves of the weight of those before.
const DECAY: f64 = 0.98;
/// Until enough was seen, and the most that is believed.
const BASE_TOKENS: (usize, usize) = (4, 64);

/// Sums over the steps seen, recent ones more than old ones.
#[derive(Default)]
pub(crate) struct StepCost {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
}

impl StepCost {
    /// Notes a step of `tokens` that took `time`.
    pub(crate) fn observe(&mut self, tokens: usize, time: Duration) {
        let (tokens, seconds) = (tokens as f64, time.as_secs_f64());
        for (sum, new) in [
            (&mut self.weight, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_squared, tokens * tokens),
            (&mut self.tokens_seconds, tokens * seconds),
        ] {
            *sum = *sum * DECAY + new;
        }
    }

    /// Tokens that take as long as what every step takes.
    pub(crate) fn base_tokens(&self) -> usize {
        let variance = self.weight * self.tokens_squared - self.tokens * self.tokens;
        let covariance = self.weight * self.tokens_seconds - self.tokens * self.seconds;
        if variance < self.weight * self.weight || covariance <= 0.0 {
            return BASE_TOKENS.0;
        }
        let per_token = covariance / variance;
        let base = (self.seconds - per_token * self.tokens) / self.weight;
        ((base / per_token).max(0.0) as usize).min(BASE_TOKENS.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_through_steps_is_found_and_follows() {
        let mut cost = StepCost::default();
        assert_eq!(cost.base_tokens(), BASE_TOKENS.0);
        for i in 0..200u64 {
            let tokens = 1 + i % 40;
            cost.observe(tokens as usize, Duration::from_micros(1000 + 100 * tokens));
        }
        assert!((9..=10).contains(&cost.base_tokens()), "{}", cost.base_tokens());
        for i in 0..1000u64 {
            let tokens = 1 + i % 40;
            cost.observe(tokens as usize, Duration::from_micros(400 + 100 * tokens));
        }
        assert!((3..=4).contains(&cost.base_tokens()), "{}", cost.base_tokens());
    }

    #[test]
    fn steps_of_one_length_say_nothing() {
        let mut cost = StepCost::default();
        (0..100).for_each(|_| cost.observe(5, Duration::from_millis(1)));
        assert_eq!(cost.base_tokens(), BASE_TOKENS.0);
    }
}
