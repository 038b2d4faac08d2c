//! A sample request and its sequences, from the check of the request to the answer.

use std::ops::Range;

use strata_model::Held;

use crate::api::{
    Client, Failure, RequestId, Response, SampleOutput, SampleRequest, SampledSequence, SamplerId, StopReason, TopK,
};
use crate::compute::{RowTask, Scored};
use crate::limits::{NUM_SAMPLES_MAX, TOPK_MAX};
use crate::pictures::{self, Measured, Picture};
use crate::reply::PendingReply;
use crate::snapshot::WeightsId;

use super::SamplerLimits;
use super::draw::{DrawSettings, Drawn};
use super::pages::{PageText, Prefix};
use super::prompt::{Scores, Wanted, topk_bytes};
use super::room::Room;
use super::speculation::Guesses;
use super::stop::{StopProgress, StopRule};

/// What any request holds besides what it brings and what comes of it: its entries in tables and queues.
pub(crate) const REQUEST_BYTES: u64 = 2048;

/// A checked request.
pub(crate) struct Plan {
    page_tokens: usize,
    pub(crate) prompt: Vec<u32>,
    /// Pictures in the prompt, in order.
    pub(crate) pictures: Vec<Picture>,
    pub(crate) num_samples: usize,
    /// Tokens of each sample at most; at least 1, and they fit the context.
    pub(crate) max_tokens: usize,
    pub(crate) settings: DrawSettings,
    pub(crate) stop: StopRule,
    /// What is wanted of the prompt's own predictions.
    pub(crate) wanted: Wanted,
    pub(crate) report_samples_topk: bool,
    /// Whether it may come to be longer than what shares pages with short sequences.
    is_long: bool,
    /// States of a sequence: 1, or 0 in a cache without.
    states: usize,
}

impl Plan {
    /// # Errors
    /// A message for the user that names what is wrong.
    pub(crate) fn new(request: &SampleRequest, limits: &SamplerLimits) -> Result<Self, String> {
        let measured = Measured::new(&request.prompt, &request.images, limits.eyes.as_deref())?;
        let length = measured.tokens();
        if length == 0 {
            return Err("the prompt is empty".into());
        }
        if length > limits.max_context_tokens {
            let max = limits.max_context_tokens;
            return Err(format!("a prompt of {length} tokens is longer than the context, which has room for {max}"));
        }
        let (prompt, pictures) = measured.place("prompt", limits.vocab_size, limits.eyes.as_deref())?;
        // The last token of a sample is never an input: a prompt that fills the context can be scored, and what follows it drawn.
        let room = (limits.max_context_tokens - length).max(1);
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
        let topk_samples = request.topk_sample_logprobs;
        if topk_samples > TOPK_MAX {
            return Err(format!("topk_sample_logprobs is {topk_samples}, above {TOPK_MAX}"));
        }
        let settings = DrawSettings {
            seed: request.seed,
            temperature: request.temperature,
            top_k: request.top_k,
            top_p: request.top_p,
            report_topk: topk_samples,
        };
        let mut plan = Plan {
            page_tokens: limits.page_tokens,
            num_samples: request.num_samples,
            max_tokens,
            settings,
            stop: StopRule::new(&request.stop, limits)?,
            wanted: Wanted::new(request, length, limits.vocab_size)?,
            report_samples_topk: topk_samples > 0,
            is_long: false,
            states: limits.cache.states.min(1),
            prompt,
            pictures,
        };
        plan.is_long = plan.length_max() > limits.short_sequence_max;
        // The partly filled page of a prompt is there twice: for the prompt and for its first sample.
        let need = plan.prompt_room() + plan.own_room();
        if !need.fits(limits.cache) {
            let pages = need.pages;
            return Err(format!(
                "a prompt of {length} tokens and {max_tokens} more take {pages} pages of {} tokens, and the cache has {}; \
                 start the server with more memory, or ask for fewer tokens",
                limits.page_tokens, limits.cache.pages
            ));
        }
        Ok(plan)
    }

    /// Tokens of a whole sample that are inputs, those of the prompt included, at most: its last token never is.
    pub(crate) fn length_max(&self) -> usize {
        self.prompt.len() + self.max_tokens - 1
    }

    /// What precedes the first page, computed with `weights`.
    pub(crate) fn root(&self, weights: WeightsId) -> Prefix {
        Prefix::Root { weights, is_long: self.is_long }
    }

    /// What the prompt needs.
    pub(crate) fn prompt_room(&self) -> Room {
        Room { pages: self.prompt.len().div_ceil(self.page_tokens), states: self.states }
    }

    /// What each sample may need beyond the full pages of the prompt, which all share.
    pub(crate) fn own_room(&self) -> Room {
        // A sample of one token never runs.
        if self.max_tokens == 1 {
            return Room::default();
        }
        self.sequence_room() - Room { pages: self.prompt.len() / self.page_tokens, states: 0 }
    }

    /// What a whole sample needs, prompt included.
    pub(crate) fn sequence_room(&self) -> Room {
        Room { pages: self.length_max().div_ceil(self.page_tokens), states: self.states }
    }

    /// Full pages in so many tokens.
    pub(crate) fn pages_in(&self, tokens: usize) -> usize {
        tokens / self.page_tokens
    }

    /// What full page `page` of the prompt is known by.
    pub(crate) fn page(&self, page: usize) -> PageText {
        let range = page * self.page_tokens..(page + 1) * self.page_tokens;
        PageText { marks: pictures::marks(&self.pictures, range.clone()).collect(), tokens: self.prompt[range].into() }
    }

    /// Some tokens of a page of the prompt, or none if they show something of a picture.
    pub(crate) fn plain(&self, range: Range<usize>) -> &[u32] {
        if pictures::marks(&self.pictures, range.clone()).next().is_some() { &[] } else { &self.prompt[range] }
    }

    /// Where the full pages of the prompt end that another request with the same prompt can begin behind.
    pub(crate) fn resumable(&self) -> usize {
        (self.prompt.len() - 1) / self.page_tokens * self.page_tokens
    }

    /// What to ask of the prediction of a prompt position, if anything.
    pub(crate) fn score_task(&self, position: usize) -> Option<RowTask> {
        let own = self.is_scored(position).then(|| self.prompt[position]);
        self.wanted.task(position, own, &self.settings)
    }

    /// Whether the token at a prompt position has a score. What a picture shows is given, and not predicted.
    fn is_scored(&self, position: usize) -> bool {
        self.wanted.scores(position) && !pictures::is_seen(&self.pictures, position)
    }

    /// Tokens of the prompt that may come from the cache: the positions whose predictions are wanted must be computed.
    pub(crate) fn cacheable(&self) -> usize {
        (self.prompt.len() - 1).min(self.wanted.first() - 1)
    }

    /// Whole pages of them.
    pub(crate) fn cacheable_pages(&self) -> usize {
        self.cacheable() / self.page_tokens
    }

    /// Bytes that the request holds while it is open, its result included.
    pub(crate) fn held_bytes(&self) -> u64 {
        REQUEST_BYTES + self.prompt_bytes() + self.samples_bytes()
    }

    /// What they go to, for people.
    pub(crate) fn shown_bytes(&self) -> String {
        let Plan { num_samples, max_tokens, .. } = self;
        let (samples, prompt) = (self.samples_bytes(), self.prompt_bytes());
        let (tokens, wanted) = (self.prompt.len(), self.wanted.shown());
        format!(
            "{samples} for {num_samples} samples of up to {max_tokens} tokens, {prompt} for a prompt of {tokens} tokens{wanted}"
        )
    }

    fn prompt_bytes(&self) -> u64 {
        let length = self.prompt.len();
        pictures::file_bytes(&self.pictures) + length as u64 * 4 + self.wanted.held_bytes(length)
    }

    fn samples_bytes(&self) -> u64 {
        // Ids and log-probabilities, half as much again for vectors that grow, and both once more as the encoded answer.
        let stop_text = if matches!(self.stop, StopRule::Strings { .. }) { 16 } else { 0 };
        let per_token = 12 + 8 + stop_text + topk_bytes(self.settings.report_topk);
        self.num_samples as u64 * (256 + self.max_tokens as u64 * per_token)
    }
}

/// Who asked, for what weights, and whom to answer.
pub(crate) struct Asked {
    pub(crate) id: RequestId,
    pub(crate) client: Client,
    pub(crate) sampler_id: SamplerId,
    pub(crate) reply: PendingReply,
}

/// A request in work.
pub(crate) struct Job<F> {
    pub(crate) plan: Plan,
    pub(crate) asked: Asked,
    pub(crate) weights: (WeightsId, F),
    /// The session it belongs to, as the sampler numbers them.
    pub(crate) session: u64,
    /// Whether it holds its prompt, or a promise of the pages for it.
    pub(crate) admitted: bool,
    /// What is held for the prompt.
    pub(crate) held: Held,
    /// What is promised for the prompt and not yet taken.
    pub(crate) reserved: Room,
    /// What the registered full pages of the prompt amount to.
    pub(crate) prefix: Prefix,
    /// Whether the prefix cache has been asked.
    pub(crate) looked_up: bool,
    pub(crate) cache_hit_tokens: usize,
    /// Tokens of the prompt whose keys and values are in the cache.
    pub(crate) computed: usize,
    /// Lengths of the prompt at which others may want to go on from it, ascending: what is left behind there is worth a snapshot.
    pub(crate) forks: [usize; 2],
    /// Promises of the pages of one sample that no sample uses yet.
    pub(crate) idle_lanes: usize,
    /// Samples that run on pages of their own.
    pub(crate) running: usize,
    /// Whether the first tokens are drawn.
    pub(crate) begun: bool,
    /// Sequences whose first token is drawn and that begin behind the prompt that the job holds, the last first.
    pub(crate) unstarted: Vec<Sequence>,
    /// Sequences that lost their pages, and with them the prompt: each begins anew from its first token.
    pub(crate) evicted: Vec<Sequence>,
    /// Samples that have not ended.
    pub(crate) unfinished: usize,
    /// When it was last admitted, in the order of all that start.
    pub(crate) started: u64,
    results: Vec<Option<SampledSequence>>,
    scores: Scores,
}

/// What a job could use next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Its prompt, and pages for one sample.
    Admission,
    /// Pages for one more sample behind its prompt.
    Lane,
    /// Pages for a whole sample that lost its own.
    Restart,
}

impl<F> Job<F> {
    pub(crate) fn new(plan: Plan, weights: (WeightsId, F), asked: Asked, session: u64) -> Self {
        Job {
            admitted: false,
            held: Held::default(),
            reserved: Room::default(),
            prefix: plan.root(weights.0),
            looked_up: false,
            cache_hit_tokens: 0,
            computed: 0,
            forks: [0, 0],
            idle_lanes: 0,
            running: 0,
            begun: false,
            unstarted: Vec::new(),
            evicted: Vec::new(),
            unfinished: plan.num_samples,
            started: 0,
            results: vec![None; plan.num_samples],
            scores: Scores::new(&plan.wanted, plan.prompt.len()),
            plan,
            asked,
            weights,
            session,
        }
    }

    /// Whether the whole prompt is computed.
    pub(crate) fn prefilled(&self) -> bool {
        self.computed == self.plan.prompt.len()
    }

    /// What it could use next, if anything.
    pub(crate) fn want(&self) -> Option<Want> {
        let lanes = if self.begun { self.unstarted.len() } else { self.plan.num_samples };
        match () {
            () if !self.begun && !self.admitted => Some(Want::Admission),
            () if self.admitted && lanes > self.idle_lanes => Some(Want::Lane),
            () if !self.evicted.is_empty() => Some(Want::Restart),
            () => None,
        }
    }

    /// What is to be promised for what it wants.
    pub(crate) fn room_for(&self, want: Want) -> Room {
        match want {
            Want::Admission => self.plan.prompt_room() + self.plan.own_room(),
            Want::Lane => self.plan.own_room(),
            Want::Restart => self.plan.sequence_room(),
        }
    }

    /// Promises for samples that no sample uses yet.
    pub(crate) fn idle_room(&self) -> Room {
        self.plan.own_room() * self.idle_lanes
    }

    /// Records what came of the prediction of a prompt position.
    pub(crate) fn score(&mut self, position: usize, scored: Scored) {
        self.scores.record(&self.plan.wanted, position, self.plan.is_scored(position), scored);
    }

    /// Records the end of a sample.
    pub(crate) fn finish(&mut self, index: usize, sample: SampledSequence) {
        self.results[index] = Some(sample);
        self.unfinished -= 1;
    }

    /// Answers, once every sample has ended.
    pub(crate) fn answer(self) {
        let sequences: Option<Vec<_>> = self.results.into_iter().collect();
        let prompt = self.scores.into_output(self.plan.wanted);
        self.asked.reply.send(match sequences {
            Some(sequences) => Ok(Response::Sampled(SampleOutput {
                sequences,
                prompt_logprobs: prompt.logprobs,
                topk_prompt_logprobs: prompt.topk,
                target_prompt_logprobs: prompt.targets,
                prompt_alt_tokens: prompt.alternatives,
                prompt_cache_hit_tokens: self.cache_hit_tokens,
            })),
            None => Err(Failure::Server("a sample was answered before all its sequences had ended".into())),
        });
    }
}

/// One sample in work.
pub(crate) struct Sequence {
    pub(crate) job: u64,
    pub(crate) session: u64,
    pub(crate) index: usize,
    pub(crate) tokens: Vec<u32>,
    logprobs: Vec<f32>,
    topk: Vec<TopK>,
    stop: StopProgress,
    /// What it holds, pages shared with others first.
    pub(crate) held: Held,
    /// What is promised and not yet taken.
    pub(crate) reserved: Room,
    /// What its session was charged for.
    pub(crate) granted: Room,
    /// Tokens whose keys and values are in the cache.
    pub(crate) cached: usize,
    /// What its first `registered` pages amount to.
    pub(crate) prefix: Prefix,
    pub(crate) registered: usize,
    /// The last prefix of its own whose state it has kept a snapshot of.
    pub(crate) snapshot: Option<Prefix>,
    /// What it guesses to follow in the step that is planned or was run.
    pub(crate) guesses: Guesses,
    ended: bool,
    /// When it started, in the order of all that start, and with how many tokens.
    pub(crate) started: u64,
    pub(crate) tokens_at_start: usize,
    /// When it last ran.
    pub(crate) last_step: u64,
}

impl Sequence {
    pub(crate) fn new(job: u64, session: u64, index: usize, root: Prefix) -> Self {
        Sequence {
            job,
            session,
            index,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            topk: Vec::new(),
            stop: StopProgress::default(),
            held: Held::default(),
            reserved: Room::default(),
            granted: Room::default(),
            cached: 0,
            prefix: root,
            registered: 0,
            snapshot: None,
            guesses: Guesses::default(),
            ended: false,
            started: 0,
            tokens_at_start: 0,
            last_step: 0,
        }
    }

    /// Tokens that have to be in the cache before the next one can be drawn, the one that is fed next left out.
    pub(crate) fn known(&self, plan: &Plan) -> usize {
        plan.prompt.len() + self.tokens.len() - 1
    }

    /// Token `position` of prompt and sample together.
    pub(crate) fn token(&self, plan: &Plan, position: usize) -> u32 {
        match position.checked_sub(plan.prompt.len()) {
            None => plan.prompt[position],
            Some(sampled) => self.tokens[sampled],
        }
    }

    /// What full page `page` of prompt and sample together is known by.
    pub(crate) fn page(&self, plan: &Plan, page: usize) -> PageText {
        self.text(plan, page * plan.page_tokens..(page + 1) * plan.page_tokens)
    }

    /// Some tokens of a page of prompt and sample together, or none if they show something of a picture.
    pub(crate) fn plain(&self, plan: &Plan, range: Range<usize>) -> Box<[u32]> {
        let PageText { marks, tokens } = self.text(plan, range);
        if marks.is_empty() { tokens } else { Box::default() }
    }

    fn text(&self, plan: &Plan, range: Range<usize>) -> PageText {
        PageText {
            marks: pictures::marks(&plan.pictures, range.clone()).collect(),
            tokens: range.map(|position| self.token(plan, position)).collect(),
        }
    }

    /// Appends a token, and says whether the sequence ends with it.
    pub(crate) fn push(&mut self, drawn: Drawn, plan: &Plan) -> Option<StopReason> {
        self.tokens.push(drawn.token);
        self.logprobs.push(drawn.logprob);
        if plan.report_samples_topk {
            self.topk.push(drawn.topk);
        }
        let reason = match plan.stop.ends(&self.tokens, &mut self.stop) {
            true => Some(StopReason::Stop),
            false => (self.tokens.len() >= plan.max_tokens).then_some(StopReason::Length),
        };
        self.ended = reason.is_some();
        reason
    }

    /// Whether the row behind so many of its guesses is its next: all of them were drawn, and it has not ended.
    pub(crate) fn holds(&self, ahead: usize) -> bool {
        !self.ended && self.guesses.holds(ahead, self.tokens.last())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_as_long_as_its_inputs_may_come_to_be() {
        let limits = SamplerLimits {
            vocab_size: 10,
            max_context_tokens: 100,
            short_sequence_max: 48,
            eos_token_ids: vec![],
            page_tokens: 16,
            cache: Room { pages: 20, states: 0 },
            tokenizer: None,
            eyes: None,
        };
        let of = |prompt: usize, max_tokens: Option<usize>| {
            let request = SampleRequest { max_tokens, temperature: 0.0, ..SampleRequest::of(vec![1; prompt]) };
            let plan = Plan::new(&request, &limits).unwrap();
            (plan.length_max(), plan.is_long)
        };
        // The last token is drawn and never read.
        assert_eq!([of(40, Some(9)), of(48, Some(1)), of(47, Some(2))], [(48, false); 3]);
        assert_eq!([of(40, Some(10)), of(49, Some(1))], [(49, true); 2]);
        assert_eq!([of(40, None), of(100, Some(1))], [(99, true), (100, true)]);
    }
}
