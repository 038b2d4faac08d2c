//! What is asked of a row of logits for a draw.
//!
//! A draw is a function of the logits, the settings and a uniform number that is keyed by (seed, sample index, position), or where it takes the
//! place of a prompt token by (seed, number of the draw, position): it does not depend on who else is in the batch or which thread it runs on.

use strata_tensor::random::philox;
use strata_tensor::{Draw, RowReply, RowRequest};

use crate::api::TopK;

/// How to draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DrawSettings {
    pub(crate) seed: u64,
    /// 0 is greedy.
    pub(crate) temperature: f32,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: f32,
    /// Most probable tokens to report with each draw.
    pub(crate) report_topk: usize,
}

/// A token that was drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token: u32,
    /// At temperature 1, whatever the settings.
    pub(crate) logprob: f32,
    pub(crate) topk: TopK,
}

/// Tokens to draw in the place of one of a prompt: from the whole distribution, whatever top-k and top-p say for samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Alternatives {
    pub(crate) seed: u64,
    /// 0 is greedy.
    pub(crate) temperature: f32,
    /// The position in the prompt.
    pub(crate) position: usize,
    /// How many, each drawn from all tokens.
    pub(crate) count: usize,
}

/// What tells their random numbers from those of samples, which are numbered from 0.
const ALTERNATIVES: u64 = 1 << 63;

impl Alternatives {
    pub(crate) fn request(&self) -> Draw {
        let Alternatives { seed, temperature, position, count } = *self;
        let uniforms = (0..count as u64).map(|draw| uniform(seed, ALTERNATIVES | draw, position)).collect();
        Draw { temperature, top_k: None, top_p: 1.0, uniforms }
    }
}

/// Asks for one token for each of `samples`, all at `position` of their sequences.
pub(crate) fn request(settings: &DrawSettings, samples: &[usize], position: usize) -> RowRequest {
    let DrawSettings { seed, temperature, top_k, top_p, report_topk } = *settings;
    let uniforms = samples.iter().map(|&sample| uniform(seed, sample as u64, position)).collect();
    RowRequest { ids: Vec::new(), top: report_topk, draw: Some(Draw { temperature, top_k, top_p, uniforms }) }
}

/// The tokens that were drawn, one for each sample that was asked for.
pub(crate) fn drawn(reply: RowReply) -> Vec<Drawn> {
    let RowReply { top, drawn, .. } = reply;
    drawn.into_iter().map(|(token, logprob)| Drawn { token, logprob, topk: top.clone() }).collect()
}

/// A uniform number from [0, 1) with 53 bits.
fn uniform(seed: u64, stream: u64, position: usize) -> f64 {
    let [a, b, ..] = philox(seed, [position as u64, stream]);
    (((a as u64) << 32 | b as u64) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_one_row_differ_and_do_not_depend_on_company() {
        let settings = DrawSettings { seed: 7, temperature: 1.0, top_k: None, top_p: 1.0, report_topk: 0 };
        let uniforms = |samples: &[usize], position| request(&settings, samples, position).draw.unwrap().uniforms;
        let together = uniforms(&[0, 1, 2], 5);
        assert!(together[0] != together[1] && together.iter().all(|u| (0.0..1.0).contains(u)));
        assert_eq!(uniforms(&[2], 5), together[2..]);
        assert_ne!(uniforms(&[2], 6), together[2..]);
    }

    #[test]
    fn alternatives_to_a_prompt_token_are_draws_of_their_own() {
        let uniforms = |seed, position, count| Alternatives { seed, temperature: 1.0, position, count }.request().uniforms;
        let four = uniforms(7, 5, 4);
        assert_eq!(uniforms(7, 5, 2), four[..2], "a draw does not depend on how many there are");
        let of_samples = DrawSettings { seed: 7, temperature: 1.0, top_k: None, top_p: 1.0, report_topk: 0 };
        let of_samples = request(&of_samples, &[0, 1, 2, 3], 5).draw.unwrap().uniforms;
        let all = [four, uniforms(7, 6, 4), uniforms(8, 5, 4), of_samples].concat();
        assert!((0..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
    }
}
