//! A sample request and its sequences, from the check of the request to the answer.

use crate::api::{Failure, Response, SampleOutput, SampleRequest, SampledSequence, StopReason, TopK};
use crate::datum::check_tokens;
use crate::reply::PendingReply;
use crate::snapshot::Weights;

use super::SamplerLimits;
use super::draw::{DrawSettings, Drawn};
use super::pages::Prefix;
use super::stop::{StopProgress, StopRule};
use strata_model::PAGE_TOKENS;

/// Most samples of one request.
pub(crate) const NUM_SAMPLES_MAX: usize = 4096;
/// Most tokens to report per position.
pub(crate) const REPORT_TOPK_MAX: usize = 1024;

/// A checked request.
pub(crate) struct Plan {
    pub(crate) prompt: Vec<u32>,
    pub(crate) num_samples: usize,
    /// Tokens of each sample at most; at least 1, and they fit the context.
    pub(crate) max_tokens: usize,
    pub(crate) settings: DrawSettings,
    pub(crate) stop: StopRule,
    pub(crate) prompt_logprobs: bool,
    pub(crate) topk_prompt: usize,
    /// First prompt position whose prediction by its predecessors is wanted: the prompt's length if none is.
    pub(crate) first_scored: usize,
    pub(crate) report_samples_topk: bool,
}

impl Plan {
    /// # Errors
    /// A message for the user that names what is wrong.
    pub(crate) fn new(request: &SampleRequest, limits: &SamplerLimits) -> Result<Self, String> {
        let prompt = check_tokens("prompt", &request.prompt, limits.vocab_size)?;
        let length = prompt.len();
        if length == 0 {
            return Err("the prompt is empty".into());
        }
        if length >= limits.max_context_tokens {
            let max = limits.max_context_tokens;
            return Err(format!("a prompt of {length} tokens leaves no room in a context of {max}"));
        }
        let room = limits.max_context_tokens - length;
        let max_tokens = request.max_tokens.unwrap_or(room).min(room);
        if max_tokens == 0 {
            return Err("max_tokens is 0; at least 1 token is sampled".into());
        }
        if request.num_samples == 0 || request.num_samples > NUM_SAMPLES_MAX {
            return Err(format!("num_samples is {}, not between 1 and {NUM_SAMPLES_MAX}", request.num_samples));
        }
        if !request.temperature.is_finite() || request.temperature < 0.0 {
            return Err(format!("temperature is {}, not a number from 0", request.temperature));
        }
        if !(request.top_p > 0.0 && request.top_p <= 1.0) {
            return Err(format!("top_p is {}, not above 0 and at most 1", request.top_p));
        }
        if request.top_k == Some(0) {
            return Err("top_k is 0; it is at least 1, or absent".into());
        }
        for (name, k) in
            [("topk_prompt_logprobs", request.topk_prompt_logprobs), ("topk_sample_logprobs", request.topk_sample_logprobs)]
        {
            if k > REPORT_TOPK_MAX {
                return Err(format!("{name} is {k}, above {REPORT_TOPK_MAX}"));
            }
        }
        let scores_prompt = request.prompt_logprobs || request.topk_prompt_logprobs > 0;
        let last_n = request.prompt_logprobs_last_n.unwrap_or(length);
        if last_n == 0 {
            return Err("prompt_logprobs_last_n is 0; it is at least 1, or absent".into());
        }
        let settings = DrawSettings {
            seed: request.seed,
            temperature: request.temperature,
            top_k: request.top_k,
            top_p: request.top_p,
            report_topk: request.topk_sample_logprobs,
        };
        Ok(Plan {
            num_samples: request.num_samples,
            max_tokens,
            settings,
            stop: StopRule::new(&request.stop, limits)?,
            prompt_logprobs: request.prompt_logprobs,
            topk_prompt: request.topk_prompt_logprobs,
            first_scored: if scores_prompt { length.saturating_sub(last_n).max(1) } else { length },
            report_samples_topk: request.topk_sample_logprobs > 0,
            prompt,
        })
    }

    /// Pages of the prompt.
    pub(crate) fn prompt_pages(&self) -> usize {
        self.prompt.len().div_ceil(PAGE_TOKENS)
    }

    /// Pages that each sample may need beyond the full pages of the prompt, which all share.
    pub(crate) fn own_pages(&self) -> usize {
        // The last token of a sample is never an input; a sample of one token never runs.
        let cached = self.prompt.len() + self.max_tokens - 1;
        if self.max_tokens == 1 { 0 } else { cached.div_ceil(PAGE_TOKENS) - self.prompt.len() / PAGE_TOKENS }
    }

    /// Whole pages of the prompt that may come from the cache: the positions whose predictions are wanted must be computed.
    pub(crate) fn cacheable_pages(&self) -> usize {
        (self.prompt.len() - 1).min(self.first_scored - 1) / PAGE_TOKENS
    }
}

/// A request in work.
pub(crate) struct Job {
    pub(crate) plan: Plan,
    pub(crate) weights: Weights,
    pub(crate) reply: PendingReply,
    /// Pages of the prompt that are held.
    pub(crate) pages: Vec<u32>,
    /// Pages of the prompt that are promised and not yet taken.
    pub(crate) reserved: usize,
    /// What the registered full pages of the prompt amount to.
    pub(crate) prefix: Prefix,
    /// Whether the prefix cache has been asked.
    pub(crate) looked_up: bool,
    pub(crate) cache_hit_tokens: usize,
    /// Tokens of the prompt whose keys and values are in the cache.
    pub(crate) computed: usize,
    /// Samples with a promise of pages that have not started.
    pub(crate) grants: usize,
    /// Sequences whose first token is drawn and that wait for a grant, the last first.
    pub(crate) unstarted: Vec<Sequence>,
    /// Samples that have not ended.
    pub(crate) unfinished: usize,
    results: Vec<Option<SampledSequence>>,
    prompt_logprobs: Vec<Option<f32>>,
    prompt_topk: Vec<TopK>,
}

impl Job {
    pub(crate) fn new(plan: Plan, weights: Weights, reply: PendingReply) -> Self {
        let length = plan.prompt.len();
        Job {
            pages: Vec::new(),
            reserved: 0,
            prefix: Prefix::Root(weights.id),
            looked_up: false,
            cache_hit_tokens: 0,
            computed: 0,
            grants: 0,
            unstarted: Vec::new(),
            unfinished: plan.num_samples,
            results: vec![None; plan.num_samples],
            prompt_logprobs: vec![None; if plan.prompt_logprobs { length } else { 0 }],
            prompt_topk: vec![TopK::new(); if plan.topk_prompt > 0 { length } else { 0 }],
            plan,
            weights,
            reply,
        }
    }

    /// Whether the whole prompt is computed.
    pub(crate) fn prefilled(&self) -> bool {
        self.computed == self.plan.prompt.len()
    }

    /// Samples that still need a promise of pages.
    pub(crate) fn wants_grants(&self) -> usize {
        if self.prefilled() { self.unstarted.len() } else { self.plan.num_samples - self.grants }
    }

    /// Records how probable the token at a prompt position was.
    pub(crate) fn score(&mut self, position: usize, logprob: f32, topk: TopK) {
        if let Some(slot) = self.prompt_logprobs.get_mut(position) {
            *slot = Some(logprob);
        }
        if let Some(slot) = self.prompt_topk.get_mut(position) {
            *slot = topk;
        }
    }

    /// Records the end of a sample.
    pub(crate) fn finish(&mut self, index: usize, sample: SampledSequence) {
        self.results[index] = Some(sample);
        self.unfinished -= 1;
    }

    /// Answers, once every sample has ended.
    pub(crate) fn answer(self) {
        let sequences: Option<Vec<_>> = self.results.into_iter().collect();
        self.reply.send(match sequences {
            Some(sequences) => Ok(Response::Sampled(SampleOutput {
                sequences,
                prompt_logprobs: self.plan.prompt_logprobs.then_some(self.prompt_logprobs),
                topk_prompt_logprobs: (self.plan.topk_prompt > 0).then_some(self.prompt_topk),
                prompt_cache_hit_tokens: self.cache_hit_tokens,
            })),
            None => Err(Failure::Server("a sample was answered before all its sequences had ended".into())),
        });
    }
}

/// One sample in work.
pub(crate) struct Sequence {
    pub(crate) job: u64,
    pub(crate) index: usize,
    pub(crate) tokens: Vec<u32>,
    logprobs: Vec<f32>,
    topk: Vec<TopK>,
    stop: StopProgress,
    /// Pages held, those shared with the prompt first.
    pub(crate) pages: Vec<u32>,
    /// Pages promised and not yet taken.
    pub(crate) reserved: usize,
    /// Tokens whose keys and values are in the cache.
    pub(crate) cached: usize,
}

impl Sequence {
    pub(crate) fn new(job: u64, index: usize, prompt_tokens: usize) -> Self {
        Sequence {
            job,
            index,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            topk: Vec::new(),
            stop: StopProgress::default(),
            pages: Vec::new(),
            reserved: 0,
            cached: prompt_tokens,
        }
    }

    /// Appends a token, and says whether the sequence ends with it.
    pub(crate) fn push(&mut self, drawn: Drawn, plan: &Plan) -> Option<StopReason> {
        self.tokens.push(drawn.token);
        self.logprobs.push(drawn.logprob);
        if plan.report_samples_topk {
            self.topk.push(drawn.topk);
        }
        if plan.stop.ends(&self.tokens, &mut self.stop) {
            return Some(StopReason::Stop);
        }
        (self.tokens.len() >= plan.max_tokens).then_some(StopReason::Length)
    }

    pub(crate) fn into_sample(self, plan: &Plan, stop_reason: StopReason) -> SampledSequence {
        SampledSequence {
            tokens: self.tokens,
            logprobs: self.logprobs,
            topk: plan.report_samples_topk.then_some(self.topk),
            stop_reason,
        }
    }
}
