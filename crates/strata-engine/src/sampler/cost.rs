//! What a step costs: a line through the steps that were seen, time against tokens.
//!
//! A step reads all weights once, whatever its length; beyond that it costs by the token. How many tokens the reading is worth depends on
//! model and machine, and decides how much company a small step can bear.
//!
//! The line is fitted by its relative error, so that short steps count as much as long ones: with `t = base + n * each`, the sum of
//! `(base / t + each * n / t - 1)²` is least.

use std::time::Duration;

/// What each new step leaves of the weight of those before.
const DECAY: f64 = 0.998;
/// Until enough was seen, and the most that is believed.
const BASE_TOKENS: (usize, usize) = (4, 64);

/// Sums over the steps seen, recent ones more than old ones; `u = 1 / t` and `v = n / t`.
#[derive(Default)]
pub(crate) struct StepCost {
    u: f64,
    v: f64,
    uu: f64,
    uv: f64,
    vv: f64,
}

impl StepCost {
    /// Notes a step of `tokens` that took `time`.
    pub(crate) fn observe(&mut self, tokens: usize, time: Duration) {
        let microseconds = (time.as_secs_f64() * 1e6).max(1.0);
        let (u, v) = (1.0 / microseconds, tokens as f64 / microseconds);
        for (sum, new) in
            [(&mut self.u, u), (&mut self.v, v), (&mut self.uu, u * u), (&mut self.uv, u * v), (&mut self.vv, v * v)]
        {
            *sum = *sum * DECAY + new;
        }
    }

    /// Tokens that take as long as what every step takes.
    pub(crate) fn base_tokens(&self) -> usize {
        let determinant = self.uu * self.vv - self.uv * self.uv;
        // Steps of nearly one length lie on any line.
        if determinant <= 0.02 * self.uu * self.vv {
            return BASE_TOKENS.0;
        }
        let base = (self.u * self.vv - self.v * self.uv) / determinant;
        let each = (self.v * self.uu - self.u * self.uv) / determinant;
        if each <= 0.0 {
            return BASE_TOKENS.1;
        }
        ((base / each).max(1.0) as usize).min(BASE_TOKENS.1)
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
        for i in 0..4000u64 {
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
