//! What the toy model computes, as plain functions of a whole sequence, and what each request must get when it is alone.
//!
//! A cell (what a real model keeps as keys and values of a position) is a hash of the weights, the token, the position and all cells before it;
//! a prediction is a hash of all cells up to its position. So a page that is stale, misplaced, or of other weights changes every number after it.

use std::ops::Range;

use crate::api::{
    AdamParams, Cells, Datum, DatumOutput, ForwardBackwardOutput, LoraSpec, LossSpec, PromptAltTokens, PromptTargetLogprobs,
    PromptTargets, SampleOutput, SampleRequest, SampledSequence, Stop, StopReason, TopK,
};
use strata_model::vision::Grid;

use crate::datum::{self, ModelLimits, PreparedDatum};
use crate::pictures::{Eyes, Measured, Picture, PictureId, is_seen};
use crate::sampler::{Alternatives, DrawSettings, Drawn};

/// Rows of the toy's vocabulary.
pub const VOCAB: u32 = 24;
/// Tokens that end a sample by default.
pub const END_OF_SEQUENCE: [u32; 2] = [3, 11];
/// Every so many seeds, samples say this again and again, and now and then something else.
pub(super) const REFRAIN_EVERY: u64 = 3;
pub(super) const REFRAIN: [u32; 5] = [14, 2, 9, 9, 20];
/// The weights of the base model.
pub const BASE: u64 = 0x5eed;
/// What a sequence is before its first token.
pub(super) const EMPTY: u64 = 0x0123_4567_89ab_cdef;

/// The token that stands for a part of a picture.
pub const IMAGE_TOKEN: u32 = 7;
/// The most tokens of a picture, whatever room there is.
pub const PICTURE_TOKENS_MAX: usize = 12;

/// The toy's eyes. A file of a picture is its number of tokens, and then anything; one that ends in 255 is broken.
pub(crate) struct ToyEyes {
    pub(crate) tokens_max: usize,
}

impl Eyes for ToyEyes {
    fn image_token(&self) -> u32 {
        IMAGE_TOKEN
    }

    fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    fn grid(&self, file: &[u8]) -> Result<Grid, String> {
        match file.first() {
            Some(&width) if (1..=PICTURE_TOKENS_MAX).contains(&usize::from(width)) => {
                Ok(Grid { time: 1, height: 1, width: width.into() })
            }
            _ => Err("toy: no picture".into()),
        }
    }

    fn check(&self, _: &PictureId, file: &[u8]) -> Result<(), String> {
        if file.last() == Some(&255) { Err("toy: broken picture".into()) } else { Ok(()) }
    }
}

/// What the toy sees in a file.
pub(super) fn see(file: &[u8]) -> u64 {
    file.iter().fold(EMPTY, |hash, byte| mix(hash, u64::from(*byte)))
}

/// What takes the place of the token of a picture: no token of text.
pub(super) fn seen_token(seen: u64, row: usize) -> u32 {
    mix(seen, row as u64) as u32 | 0x8000_0000
}

/// Puts what is seen in the place of the tokens of pictures.
fn with_pictures(mut tokens: Vec<u32>, pictures: &[Picture]) -> Vec<u32> {
    for picture in pictures {
        let seen = see(&picture.file);
        picture.tokens().enumerate().for_each(|(row, position)| tokens[position] = seen_token(seen, row));
    }
    tokens
}

/// Mixes a value into a hash (the finaliser of SplitMix64).
pub(super) fn mix(hash: u64, value: u64) -> u64 {
    let mut z = (hash.rotate_left(23) ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The cell of a token behind what `before` amounts to.
pub(super) fn cell(before: u64, weights: u64, token: u32, position: usize) -> u64 {
    mix(mix(mix(before, weights), u64::from(token)), position as u64)
}

/// What a sequence amounts to with one more cell.
pub(super) fn fold(before: u64, cell: u64) -> u64 {
    mix(before, cell ^ 0xf01d)
}

pub(super) fn logprob(row: u64, token: u32) -> f32 {
    -((mix(row, u64::from(token) + 77) >> 44) as f32) / 131_072.0
}

pub(super) fn top_k(row: u64, k: usize) -> TopK {
    (0..k.min(VOCAB as usize) as u32).map(|i| ((i * 5 + (row % 24) as u32) % VOCAB, logprob(row, i + 1000))).collect()
}

pub(super) fn draw(row: u64, settings: &DrawSettings, sample: usize, position: usize) -> Drawn {
    let uniform = match settings.temperature == 0.0 {
        true => mix(row, 0xa19),
        false => mix(mix(mix(row, settings.seed), sample as u64), position as u64),
    };
    let token = match settings.seed.is_multiple_of(REFRAIN_EVERY) && uniform % 16 != 0 {
        true => REFRAIN[(sample + position) % REFRAIN.len()],
        false => (uniform % u64::from(VOCAB)) as u32,
    };
    Drawn { token, logprob: logprob(row, token), topk: top_k(row, settings.report_topk) }
}

/// Tokens in the place of one of a prompt, and their log-probabilities.
pub(super) fn alternatives(row: u64, asked: &Alternatives) -> Vec<(u32, f32)> {
    let Alternatives { seed, temperature, position, count } = *asked;
    let uniform = |draw: usize| match temperature == 0.0 {
        true => mix(row, 0xa19),
        false => mix(mix(mix(mix(row, seed), 0xa17), position as u64), draw as u64),
    };
    let token = |draw| (uniform(draw) % u64::from(VOCAB)) as u32;
    (0..count).map(|draw| (token(draw), logprob(row, token(draw)))).collect()
}

/// A sequence that grows token by token.
struct Sequence {
    weights: u64,
    length: usize,
    folded: u64,
}

impl Sequence {
    fn new(weights: u64) -> Self {
        Sequence { weights, length: 0, folded: EMPTY }
    }

    /// Appends a token; answers the prediction after it.
    fn push(&mut self, token: u32) -> u64 {
        let cell = cell(self.folded, self.weights, token, self.length);
        self.length += 1;
        self.folded = fold(self.folded, cell);
        self.folded
    }
}

/// What a sample request gets from these weights; its tokens must be in the vocabulary. How much the prefix cache had is left at 0.
pub fn expected_sample(weights: u64, request: &SampleRequest, max_context_tokens: usize) -> SampleOutput {
    let (eyes, vocab_size) = (ToyEyes { tokens_max: usize::MAX }, VOCAB as usize);
    let measured = Measured::new(&request.prompt, &request.images, Some(&eyes)).expect("the request was accepted");
    let (prompt, pictures) = measured.place("prompt", vocab_size, Some(&eyes)).expect("the request was accepted");
    let prompt = with_pictures(prompt, &pictures);
    let length = prompt.len();
    let settings = DrawSettings {
        seed: request.seed,
        temperature: request.temperature,
        top_k: request.top_k,
        top_p: request.top_p,
        report_topk: request.topk_sample_logprobs,
    };
    let scores = request.prompt_logprobs || request.topk_prompt_logprobs > 0;
    let first_scored = match scores {
        true => length.saturating_sub(request.prompt_logprobs_last_n.unwrap_or(length)).max(1),
        false => length,
    };
    let (mut prompt_logprobs, mut prompt_topk) = (vec![None; length], vec![TopK::new(); length]);
    let (mut drawn_instead, count) = (Vec::new(), request.prompt_alt_tokens_k);
    let mut targets = request.target_prompt_logprobs.as_ref().map(|asked| {
        let PromptTargets { shape, cells, ids } = asked.clone();
        (ids, PromptTargetLogprobs { shape, cells, logprobs: vec![0.0; asked.ids.len()] })
    });
    let mut sequence = Sequence::new(weights);
    for (position, &token) in prompt.iter().enumerate() {
        if position >= first_scored && !is_seen(&pictures, position) {
            prompt_logprobs[position] = Some(logprob(sequence.folded, token));
            prompt_topk[position] = top_k(sequence.folded, request.topk_prompt_logprobs);
        }
        if position > 0 {
            if let Some((ids, scored)) = &mut targets {
                for cell in listed(&scored.cells, scored.shape[1], position - 1).filter(|&cell| ids[cell] != -1) {
                    scored.logprobs[cell] = logprob(sequence.folded, ids[cell] as u32);
                }
            }
            let asked = Alternatives { seed: request.seed, temperature: request.temperature, position, count };
            drawn_instead.extend(alternatives(sequence.folded, &asked));
        }
        sequence.push(token);
    }
    // One token follows even a prompt that fills the context.
    let max_tokens = request.max_tokens.unwrap_or(usize::MAX).min((max_context_tokens - length).max(1));
    let stops = |token: u32| match &request.stop {
        Stop::EndOfSequence => END_OF_SEQUENCE.contains(&token),
        Stop::Tokens(tokens) => tokens.contains(&i64::from(token)),
        Stop::Strings(_) => false,
    };
    let sample = |index: usize| {
        let mut s = Sequence { ..sequence };
        let mut drawn = vec![draw(s.folded, &settings, index, 0)];
        loop {
            let last = drawn[drawn.len() - 1].token;
            let reason = if stops(last) {
                StopReason::Stop
            } else if drawn.len() >= max_tokens {
                StopReason::Length
            } else {
                drawn.push(draw(s.push(last), &settings, index, drawn.len()));
                continue;
            };
            return SampledSequence {
                tokens: drawn.iter().map(|d| d.token).collect(),
                logprobs: drawn.iter().map(|d| d.logprob).collect(),
                topk: (request.topk_sample_logprobs > 0).then(|| drawn.iter().map(|d| d.topk.clone()).collect()),
                stop_reason: reason,
            };
        }
    };
    SampleOutput {
        sequences: (0..request.num_samples).map(sample).collect(),
        prompt_logprobs: request.prompt_logprobs.then_some(prompt_logprobs),
        topk_prompt_logprobs: (request.topk_prompt_logprobs > 0).then_some(prompt_topk),
        target_prompt_logprobs: targets.map(|(_, scored)| scored),
        prompt_alt_tokens: (count > 0).then(|| PromptAltTokens {
            k: count,
            tokens: drawn_instead.iter().map(|drawn| drawn.0).collect(),
            logprobs: drawn_instead.iter().map(|drawn| drawn.1).collect(),
        }),
        prompt_cache_hit_tokens: 0,
    }
}

/// The listed cells of a row of a matrix of `width` columns.
fn listed(cells: &Cells, width: usize, row: usize) -> Range<usize> {
    match cells {
        Cells::All => row * width..(row + 1) * width,
        Cells::Csr { row_offsets, .. } => row_offsets[row] as usize..row_offsets[row + 1] as usize,
    }
}

/// Log-probabilities of the targets of an example, and what it adds to a gradient.
pub(super) fn train(weights: u64, datum: &PreparedDatum) -> (Vec<f32>, u64) {
    let mut sequence = Sequence::new(weights);
    let mut logprobs = Vec::with_capacity(datum.targets.len());
    let tokens = with_pictures(datum.tokens.clone(), &datum.pictures);
    for (&token, targets) in tokens.iter().zip(datum.targets.chunks(datum.targets_per_token)) {
        let row = sequence.push(token);
        logprobs.extend(targets.iter().map(|&target| logprob(row, target)));
    }
    datum.loss.fix_sequence_ratio(&logprobs);
    let gradient = logprobs
        .iter()
        .enumerate()
        .fold(sequence.folded, |hash, (i, &logprob)| mix(hash, u64::from(datum.loss.term(i, logprob).derivative.to_bits())));
    (logprobs, gradient)
}

/// The numbers of an adapter in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Its weights: what samples and log-probabilities depend on.
    pub weights: u64,
    /// What the optimizer remembers.
    pub moments: u64,
    /// What has been added since the last step; 0 is nothing.
    pub gradient: u64,
}

impl Numbers {
    /// A fresh adapter.
    pub fn fresh(lora: &LoraSpec) -> Self {
        Numbers { weights: mix(mix(BASE, lora.seed), lora.rank as u64), moments: 0, gradient: 0 }
    }

    pub(super) fn add(&mut self, gradient: u64) {
        self.gradient = mix(self.gradient, gradient).max(1);
    }

    /// Takes a step; answers the norm of the gradient.
    pub fn optim_step(&mut self, params: &AdamParams) -> f64 {
        let norm = (self.gradient % 1009) as f64;
        self.moments = mix(self.moments, self.gradient);
        self.weights = mix(mix(self.weights, self.moments), params.learning_rate.to_bits());
        self.gradient = 0;
        norm
    }

    /// What a `forward_backward` gets, and unless `forward_only` its gradient is added.
    ///
    /// # Errors
    /// The message for the user, if the request is wrong.
    pub fn forward(
        &mut self,
        data: Vec<Datum>,
        loss: &LossSpec,
        forward_only: bool,
        max_example_tokens: usize,
    ) -> Result<ForwardBackwardOutput, String> {
        let eyes = ToyEyes { tokens_max: usize::MAX };
        let limits = ModelLimits { vocab_size: VOCAB as usize, max_example_tokens, eyes: Some(&eyes) };
        let mut outputs = Vec::new();
        let mut sum = 0.0;
        for datum in datum::prepare(data, loss, limits)? {
            let (logprobs, gradient) = train(self.weights, &datum);
            if !forward_only {
                self.add(gradient);
            }
            let elementwise_loss: Vec<f32> = logprobs.iter().enumerate().map(|(i, &lp)| datum.loss.term(i, lp).loss).collect();
            elementwise_loss.iter().for_each(|&loss| sum += f64::from(loss));
            outputs.push(DatumOutput { shape: datum.shape, logprobs, elementwise_loss });
        }
        Ok(ForwardBackwardOutput { data: outputs, metrics: vec![("loss:sum".into(), sum)] })
    }
}
