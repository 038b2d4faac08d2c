//! A toy in the model's place: see [`oracle`](super::oracle) for its numbers. It keeps the simulated time, fails when it is told to, and
//! notes whom it works for.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::time::Duration;

use crate::api::{AdamParams, Failure, LoraSpec};
use crate::compute::{AdapterBytes, Between, Compute, PassError, PassPart, RowResult, RowTask, Scored, StepSpan, Stepped};
use sha2::{Digest, Sha256};

use crate::losses::LossInputs;
use crate::pictures::PictureId;
use crate::sampler::{Room, STEP_COPIES, STEP_TOKENS};
use crate::snapshot::WeightsId;

use super::copies::{COPIES_PART, num_computed};
use super::oracle::{self, EMPTY, Numbers};
use super::{Faults, Rng};

/// Layers of the toy: a pass stops between them.
pub(super) const LAYERS: u32 = 4;
/// What a step, and a layer of a pass, cost whatever their length.
pub(super) const BASE_COST: Duration = Duration::from_micros(80);
/// What a token costs in a step, and in a layer of a pass.
pub(super) const TOKEN_COST: Duration = Duration::from_micros(10);
/// Tokens of a pass that seeing a token of a picture costs as much as.
pub(super) const SEEING_COST: usize = 3;
/// Bytes of what is seen of a token of a picture.
pub(super) const SEEN_BYTES: u64 = 10;
/// Bytes that a pass takes for each of its tokens.
pub(super) const PASS_BYTES: u64 = 10;
/// Bytes that it may keep of each of its layers but one, for each of its tokens.
const KEPT_BYTES: u64 = 7;
/// What an optimizer step costs.
pub(super) const OPTIM_COST: Duration = Duration::from_micros(300);
/// What freezing an adapter costs.
pub(super) const FREEZE_COST: Duration = Duration::from_micros(100);
/// The largest rank of an adapter.
pub(super) const RANK_MAX: usize = 8;
/// Why an adapter is not made or frozen.
pub(super) const ADAPTER_FAULT: &str = "toy fault: no adapter";
/// What no cell may hold when it is read.
const STALE: u64 = 0xdead;

/// What the toy, the disk and those who watch them have in common.
pub(super) struct Shared {
    pub(super) now: Cell<Duration>,
    pub(super) faults: Cell<Faults>,
    pub(super) rng: RefCell<Rng>,
    /// Called whenever time has passed.
    pub(super) on_time: RefCell<Option<Box<dyn FnMut()>>>,
    /// Work that has begun since someone looked.
    pub(super) log: RefCell<Vec<(u64, Worked)>>,
    /// Counts the times at which the engine takes what has arrived: work that begins later knows of it.
    pub(super) moment: Cell<u64>,
    /// What must never happen and has.
    pub(super) violations: RefCell<Vec<String>>,
    /// Requests whose pass or row was made to fail.
    pub(super) failed: RefCell<BTreeSet<u64>>,
    /// Requests with a row behind a guess that was made to fail: they fail if they come to it.
    pub(super) may_fail: RefCell<BTreeSet<u64>>,
    /// Steps that were made to fail.
    pub(super) failed_steps: Cell<u64>,
    /// Bytes of adapters and their copies that are alive.
    pub(super) live_bytes: Cell<u64>,
    /// Tokens of the pictures that are being seen.
    pub(super) seeing: Cell<usize>,
    /// Times that seeing a picture was made to fail.
    pub(super) failed_sights: Cell<u64>,
    /// Bytes of the passes that run.
    pass_bytes: Cell<u64>,
}

/// A piece of work, by the numbers of the requests in it: the seed of a sample, the first loss input of an example.
#[derive(Clone, Debug)]
pub(super) enum Worked {
    Step {
        samples: Vec<u64>,
        tokens: usize,
    },
    Pass {
        requests: Vec<u64>,
        tokens: usize,
    },
    /// A pass was told to go on.
    GoesOn {
        requests: Vec<u64>,
    },
    /// A block of the tower that sees a picture, by its file.
    Sight {
        block: u32,
        file: Vec<u8>,
    },
}

impl Shared {
    pub(super) fn new(seed: u64, faults: Faults) -> Self {
        Shared {
            now: Cell::default(),
            faults: Cell::new(faults),
            rng: RefCell::new(Rng::new(seed)),
            on_time: RefCell::default(),
            log: RefCell::default(),
            moment: Cell::default(),
            violations: RefCell::default(),
            failed: RefCell::default(),
            may_fail: RefCell::default(),
            failed_steps: Cell::default(),
            live_bytes: Cell::default(),
            seeing: Cell::default(),
            failed_sights: Cell::default(),
            pass_bytes: Cell::default(),
        }
    }

    pub(super) fn violate(&self, what: String) {
        self.violations.borrow_mut().push(what);
    }

    fn note(&self, worked: Worked) {
        self.log.borrow_mut().push((self.moment.get(), worked));
    }

    pub(super) fn chance(&self, per_mille: u32) -> bool {
        per_mille > 0 && self.rng.borrow_mut().below(1000) < u64::from(per_mille)
    }

    /// Lets time pass, and whoever waits for it act.
    pub(super) fn spend(&self, time: Duration) {
        self.now.set(self.now.get() + time);
        let taken = self.on_time.borrow_mut().take();
        if let Some(mut act) = taken {
            act();
            *self.on_time.borrow_mut() = Some(act);
        }
    }

    /// Fails one way or the other.
    fn fail(&self) -> String {
        if self.chance(500) {
            // Unwinds as a panic does, without a word on the terminal.
            std::panic::resume_unwind(Box::new("toy fault"));
        }
        "toy fault".into()
    }
}

/// Counts memory for as long as it lives.
pub(super) struct Memory(Rc<Shared>, u64);

impl Memory {
    pub(super) fn new(shared: &Rc<Shared>, bytes: u64) -> Self {
        shared.live_bytes.set(shared.live_bytes.get() + bytes);
        Memory(shared.clone(), bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.0.live_bytes.set(self.0.live_bytes.get() - self.1);
    }
}

/// Bytes of an adapter of this rank.
pub(super) fn bytes_of(rank: usize) -> AdapterBytes {
    let rank = rank as u64;
    AdapterBytes { training: 20 * rank, frozen: 4 * rank, captured: 12 * rank }
}

/// # Errors
/// If the toy has no such adapter.
pub(super) fn adapter_bytes(lora: &LoraSpec) -> Result<AdapterBytes, String> {
    match lora.rank {
        1..=RANK_MAX => Ok(bytes_of(lora.rank)),
        rank => Err(format!("rank {rank} is not between 1 and {RANK_MAX}")),
    }
}

/// Weights and moments: a checkpoint shares them until the next step.
struct Params {
    weights: u64,
    moments: u64,
    memory: Memory,
}

pub(super) struct Learner {
    rank: usize,
    params: Rc<Params>,
    gradient: u64,
    frozen: Option<(WeightsId, Frozen)>,
    lost: Option<Failure>,
    _memory: Memory,
}

#[derive(Clone)]
pub(super) struct Frozen(Rc<FrozenWeights>);

struct FrozenWeights {
    weights: u64,
    _memory: Memory,
}

#[derive(Clone)]
pub(super) struct State {
    pub(super) rank: usize,
    pub(super) with_optimizer: bool,
    params: Rc<Params>,
}

impl State {
    pub(super) fn new(shared: &Rc<Shared>, content: &Content, with_optimizer: bool) -> Self {
        let memory = Memory::new(shared, bytes_of(content.rank).read(with_optimizer));
        let moments = content.moments.filter(|_| with_optimizer);
        let params = Params { weights: content.weights, moments: moments.unwrap_or(0), memory };
        State { rank: content.rank, with_optimizer: moments.is_some(), params: Rc::new(params) }
    }

    pub(super) fn content(&self) -> Content {
        Content { rank: self.rank, weights: self.params.weights, moments: self.with_optimizer.then_some(self.params.moments) }
    }
}

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) rank: usize,
    pub(super) weights: u64,
    pub(super) moments: Option<u64>,
}

pub(super) struct Cache {
    page_tokens: usize,
    /// Pages of cells.
    pages: Vec<Vec<u64>>,
    /// What the tokens of a sequence fold to, and how many there are.
    states: Vec<(u64, usize)>,
}

/// What was seen of a picture.
pub(super) struct Sight {
    id: PictureId,
    seen: u64,
}

/// The toy.
pub(super) struct Toy {
    pub(super) shared: Rc<Shared>,
    pub(super) page_tokens: usize,
    /// For how many tokens of pictures there is memory at a time.
    picture_tokens: usize,
    /// And for how many of passes.
    activation_tokens: usize,
    base: Frozen,
}

impl Toy {
    pub(super) fn new(shared: Rc<Shared>, page_tokens: usize, picture_tokens: usize, activation_tokens: usize) -> Self {
        let base = Frozen(Rc::new(FrozenWeights { weights: oracle::BASE, _memory: Memory::new(&shared, 0) }));
        Toy { shared, page_tokens, picture_tokens, activation_tokens, base }
    }

    fn params(&self, rank: usize, numbers: Numbers) -> Rc<Params> {
        let memory = Memory::new(&self.shared, bytes_of(rank).captured);
        Rc::new(Params { weights: numbers.weights, moments: numbers.moments, memory })
    }

    fn learner(&self, rank: usize, params: Rc<Params>) -> Learner {
        let AdapterBytes { training, frozen, captured } = bytes_of(rank);
        let memory = Memory::new(&self.shared, training - frozen - captured);
        Learner { rank, params, gradient: 0, frozen: None, lost: None, _memory: memory }
    }

    fn freeze(&self, rank: usize, weights: u64) -> Frozen {
        Frozen(Rc::new(FrozenWeights { weights, _memory: Memory::new(&self.shared, bytes_of(rank).frozen) }))
    }

    fn layer(&self, tokens: usize) {
        self.shared.spend(BASE_COST / LAYERS + TOKEN_COST / LAYERS * tokens as u32);
    }

    fn run_span(&self, cache: &mut Cache, span: &StepSpan<'_, Frozen, Rc<Sight>>, out: &mut Vec<RowResult>) {
        let weights = span.weights.1.0.weights;
        let mut folded = EMPTY;
        let size = cache.page_tokens;
        let last = span.past + span.tokens.len();
        if span.held.pages.len() * size < last {
            return self.shared.violate(format!("{last} tokens on {} pages", span.held.pages.len()));
        }
        if span.held.state.is_none() != cache.states.is_empty() {
            return self.shared.violate(format!("state {:?} in a cache with {}", span.held.state, cache.states.len()));
        }
        let first_row = out.len();
        let seed = span.rows.iter().find_map(|(_, task)| seed_of(task));
        let mut rows = span.rows.iter();
        let mut next = rows.next();
        for position in 0..last {
            let (page, offset) = (span.held.pages[position / size] as usize, position % size);
            if position == span.past
                && position > 0
                && let Some(state) = span.held.state
                && cache.states[state as usize] != (folded, position)
            {
                self.shared.violate(format!("state {state} is not what {position} tokens left behind"));
            }
            if let Some(new) = position.checked_sub(span.past) {
                let token = self.token_at(span, new, position);
                cache.pages[page][offset] = oracle::cell(folded, weights, token, position);
            } else if cache.pages[page][offset] == STALE {
                self.shared.violate(format!("position {position} is read from page {page}, where nothing was written"));
            }
            folded = oracle::fold(folded, cache.pages[page][offset]);
            while let Some((row, task)) = next.filter(|(row, _)| row + span.past == position) {
                let result = match before_guess(span, *row, &out[first_row..]) {
                    Some(Guess::Wrong) => RowResult::NotNumbers,
                    Some(Guess::Right) => self.run_task(folded, task, seed, &self.shared.may_fail),
                    None => self.run_task(folded, task, seed, &self.shared.failed),
                };
                out.push(result);
                next = rows.next();
            }
        }
        if let Some(state) = span.held.state {
            cache.states[state as usize] = (folded, last);
        }
    }

    /// The token at a position of a sequence, or what is seen there.
    fn token_at(&self, span: &StepSpan<'_, Frozen, Rc<Sight>>, new: usize, position: usize) -> u32 {
        match span.pictures.iter().find(|(picture, _)| picture.tokens().contains(&position)) {
            Some((picture, Some(sight))) if sight.id == picture.id => oracle::seen_token(sight.seen, position - picture.first),
            Some(_) => {
                self.shared.violate(format!("position {position} is that of a picture that was not seen"));
                0
            }
            None => span.tokens[new],
        }
    }

    /// Notes whose row it makes fail: none of a request that draws nothing in this span, whose seed is not to be seen.
    fn run_task(&self, row: u64, task: &RowTask, seed: Option<u64>, failed: &RefCell<BTreeSet<u64>>) -> RowResult {
        if let Some(seed) = seed
            && self.shared.chance(self.shared.faults.get().row)
        {
            failed.borrow_mut().insert(seed);
            return RowResult::NotNumbers;
        }
        match task {
            RowTask::Score { ids, topk, alternatives } => RowResult::Scored(Scored {
                logprobs: ids.iter().map(|&id| oracle::logprob(row, id)).collect(),
                topk: oracle::top_k(row, *topk),
                alternatives: alternatives.map(|a| oracle::alternatives(row, &a)).unwrap_or_default(),
            }),
            RowTask::Draw { settings, samples, position } => {
                RowResult::Drawn(samples.iter().map(|&s| oracle::draw(row, settings, s, *position)).collect())
            }
        }
    }
}

impl Toy {
    fn pass_layers(
        &self,
        parts: &mut [PassPart<'_, Self>],
        seen: &HashMap<PictureId, Rc<Sight>>,
        between: Between<'_>,
    ) -> Result<Vec<f32>, PassError> {
        let pictures = parts.iter().flat_map(|part| &part.data).flat_map(|datum| &datum.pictures);
        if pictures.into_iter().any(|picture| seen.get(&picture.id).is_none_or(|sight| sight.id != picture.id)) {
            self.shared.violate("a pass has a picture that was not seen".into());
        }
        let data = || parts.iter().flat_map(|p| &p.data);
        let requests: Vec<u64> = data().map(|d| number_of(d)).collect();
        let tokens: usize = data().map(|d| d.tokens.len()).sum();
        self.shared.note(Worked::Pass { requests: requests.clone(), tokens });
        let gradients: Vec<u64> = parts.iter().map(|p| p.learner.gradient).collect();
        let fails_at = self.shared.chance(self.shared.faults.get().pass).then(|| self.shared.rng.borrow_mut().below(4) as u32);
        for layer in 0..LAYERS {
            if layer as usize == self.early_layers() {
                // A learner whose pass ends from here on has part of a gradient.
                parts.iter_mut().filter(|p| p.backward).for_each(|p| p.learner.gradient = STALE);
            }
            if fails_at == Some(layer) {
                self.shared.failed.borrow_mut().extend(&requests);
                return Err(PassError::Failed(self.shared.fail()));
            }
            self.layer(tokens);
            if layer + 1 < LAYERS {
                self.shared.moment.set(self.shared.moment.get() + 1);
                if between() == ControlFlow::Break(()) {
                    return Err(PassError::Interrupted);
                }
                self.shared.note(Worked::GoesOn { requests: requests.clone() });
            }
        }
        let mut logprobs = Vec::new();
        for (part, gradient) in parts.iter_mut().zip(gradients) {
            let weights = part.learner.params.weights;
            let mut numbers = Numbers { weights, moments: 0, gradient };
            for datum in &mut part.data {
                let (own, gradient) = oracle::train(weights, datum);
                logprobs.extend(own);
                numbers.add(gradient);
            }
            if part.backward {
                part.learner.gradient = numbers.gradient;
            }
        }
        Ok(logprobs)
    }

    fn see_blocks(&self, file: &[u8], between: Between<'_>) -> Result<Rc<Sight>, PassError> {
        let tokens = usize::from(file[0]);
        let fails_at = self.shared.chance(self.shared.faults.get().see).then(|| self.shared.rng.borrow_mut().below(4) as u32);
        for block in 0..LAYERS {
            if fails_at == Some(block) {
                self.shared.failed_sights.set(self.shared.failed_sights.get() + 1);
                return Err(PassError::Failed(self.shared.fail()));
            }
            self.shared.note(Worked::Sight { block, file: file.to_vec() });
            self.layer(SEEING_COST * tokens);
            if block + 1 < LAYERS {
                self.shared.moment.set(self.shared.moment.get() + 1);
                if between() == ControlFlow::Break(()) {
                    return Err(PassError::Interrupted);
                }
            }
        }
        Ok(Rc::new(Sight { id: Sha256::digest(file).into(), seen: oracle::see(file) }))
    }
}

/// What is taken while a pass runs, and how much was before.
struct PassMemory<'s>(&'s Shared, u64);

impl Drop for PassMemory<'_> {
    fn drop(&mut self) {
        self.0.pass_bytes.set(self.1);
    }
}

/// The number of the request that an example belongs to.
fn number_of(datum: &crate::datum::PreparedDatum) -> u64 {
    let inputs = match &datum.loss.inputs {
        LossInputs::Weights(weights) => weights,
        LossInputs::Policy { advantages, .. } => advantages,
    };
    inputs.first().map_or(0, |&number| number as u64)
}

impl Compute for Toy {
    type Learner = Learner;
    type Frozen = Frozen;
    type State = State;
    type Cache = Cache;
    type Seen = Rc<Sight>;

    fn now(&self) -> Duration {
        self.shared.now.get()
    }

    fn adapter_bytes(&self, lora: &LoraSpec) -> Result<AdapterBytes, String> {
        adapter_bytes(lora)
    }

    fn restore(&self, State { rank, params, .. }: State) -> Learner {
        // One that was read without its moments gets room for them.
        let Params { weights, moments, ref memory } = *params;
        let missing = bytes_of(rank).captured - memory.1;
        let whole = (missing > 0).then(|| Memory::new(&self.shared, missing + memory.1));
        self.learner(rank, whole.map_or(params.clone(), |memory| Rc::new(Params { weights, moments, memory })))
    }

    fn spec_of(&self, state: &State) -> LoraSpec {
        LoraSpec {
            rank: state.rank,
            seed: 0,
            train_attn: true,
            train_mlp: true,
            train_unembed: true,
            ranks: Default::default(),
        }
    }

    fn state_bytes(&self, state: &State) -> AdapterBytes {
        bytes_of(state.rank)
    }

    fn check_shape(&self, made_with: &LoraSpec, state: &State) -> Result<(), String> {
        match made_with.rank == state.rank {
            true => Ok(()),
            false => Err("toy: the checkpoint holds an adapter of another shape".into()),
        }
    }

    fn capture(&self, learner: &mut Learner, with_optimizer: bool) -> Result<State, Failure> {
        Ok(State { rank: learner.rank, with_optimizer, params: learner.params.clone() })
    }

    fn freeze(&self, learner: &mut Learner) -> Result<(WeightsId, Frozen), Failure> {
        if self.shared.chance(self.shared.faults.get().adapter) {
            return Err(Failure::Server(ADAPTER_FAULT.into()));
        }
        if learner.frozen.is_none() {
            self.shared.spend(FREEZE_COST);
        }
        let frozen =
            learner.frozen.get_or_insert_with(|| (WeightsId::fresh(), self.freeze(learner.rank, learner.params.weights)));
        Ok(frozen.clone())
    }

    fn freeze_state(&self, state: &State) -> Result<Frozen, Failure> {
        Ok(self.freeze(state.rank, state.params.weights))
    }

    fn base(&self) -> Frozen {
        self.base.clone()
    }

    fn optim_step(&self, learner: &mut Learner, params: &AdamParams) -> Result<f64, Failure> {
        self.shared.spend(OPTIM_COST);
        if let Some(why) = learner.lost.take() {
            learner.gradient = 0;
            return Err(why.retold(|why| format!("the gradient was lost ({why})")));
        }
        if self.shared.chance(self.shared.faults.get().optim) {
            return Err(Failure::Server(self.shared.fail()));
        }
        let mut numbers =
            Numbers { weights: learner.params.weights, moments: learner.params.moments, gradient: learner.gradient };
        let norm = numbers.optim_step(params);
        // As `Arc::make_mut` does: a copy only if a checkpoint holds what is there.
        if Rc::strong_count(&learner.params) > 1 {
            learner.params = self.params(learner.rank, numbers);
        } else if let Some(own) = Rc::get_mut(&mut learner.params) {
            (own.weights, own.moments) = (numbers.weights, numbers.moments);
        }
        (learner.gradient, learner.frozen) = (0, None);
        Ok(norm)
    }

    fn gradient_is_finite(&self, _: &Learner) -> Result<bool, Failure> {
        Ok(true)
    }

    fn lose_gradient(&self, learner: &mut Learner, why: Failure) {
        learner.gradient = 0;
        learner.lost = Some(why);
    }

    fn seen_bytes_per_token(&self) -> u64 {
        SEEN_BYTES
    }

    fn see(&self, file: &[u8], between: Between<'_>) -> Result<Rc<Sight>, PassError> {
        let (before, tokens) = (self.shared.seeing.get(), usize::from(file[0]));
        self.shared.seeing.set(before + tokens);
        if before + tokens > self.picture_tokens {
            self.shared.violate(format!("pictures of {before} and {tokens} tokens are seen at a time"));
        }
        let done = catch_unwind(AssertUnwindSafe(|| self.see_blocks(file, between)));
        self.shared.seeing.set(before);
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn kept_bytes(&self, parts: &[PassPart<'_, Self>], spare_bytes: u64) -> u64 {
        let tokens: usize = parts.iter().flat_map(|part| &part.data).map(|datum| datum.tokens.len()).sum();
        let of_layer = tokens as u64 * KEPT_BYTES;
        (spare_bytes / of_layer.max(1)).min(LAYERS as u64 - 1) * of_layer
    }

    fn early_layers(&self) -> usize {
        1
    }

    fn pass(
        &self,
        parts: &mut [PassPart<'_, Self>],
        seen: &HashMap<PictureId, Rc<Sight>>,
        kept_bytes: u64,
        between: Between<'_>,
    ) -> Result<Vec<f32>, PassError> {
        let tokens: usize = parts.iter().flat_map(|part| &part.data).map(|datum| datum.tokens.len()).sum();
        let before = self.shared.pass_bytes.get();
        let bytes = before + tokens as u64 * PASS_BYTES + kept_bytes;
        if bytes > self.activation_tokens as u64 * PASS_BYTES {
            self.shared.violate(format!("passes take {bytes} bytes, where there are {} tokens", self.activation_tokens));
        }
        let _taken = PassMemory(&self.shared, before);
        self.shared.pass_bytes.set(bytes);
        self.pass_layers(parts, seen, between)
    }

    fn new_cache(&self, size: Room) -> Result<Cache, String> {
        let page = vec![STALE; self.page_tokens];
        Ok(Cache { page_tokens: self.page_tokens, pages: vec![page; size.pages], states: vec![(STALE, 0); size.states] })
    }

    fn copy_page(&self, cache: &mut Cache, from: u32, to: u32) -> Result<(), String> {
        if self.shared.chance(self.shared.faults.get().page) {
            self.shared.failed_steps.set(self.shared.failed_steps.get() + 1);
            return Err(self.shared.fail());
        }
        cache.pages[to as usize] = cache.pages[from as usize].clone();
        Ok(())
    }

    fn copy_state(&self, cache: &mut Cache, from: u32, to: u32) -> Result<(), String> {
        if self.shared.chance(self.shared.faults.get().page) {
            self.shared.failed_steps.set(self.shared.failed_steps.get() + 1);
            return Err(self.shared.fail());
        }
        cache.states[to as usize] = cache.states[from as usize];
        Ok(())
    }

    fn release_memory(&self, cache: &mut Cache, free_pages: &[u32], free_states: &[u32]) {
        free_pages.iter().for_each(|&page| cache.pages[page as usize].fill(STALE));
        free_states.iter().for_each(|&state| cache.states[state as usize] = (STALE, 0));
    }

    fn step(&self, cache: &mut Cache, spans: &[StepSpan<'_, Frozen, Rc<Sight>>]) -> Result<Stepped, String> {
        let tokens = num_computed(spans, &cache.pages).unwrap_or_else(|wrong| {
            self.shared.violate(wrong);
            0
        });
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        if tokens > STEP_TOKENS.1 * COPIES_PART / (COPIES_PART - 1) || rows > STEP_TOKENS.1 + STEP_COPIES {
            self.shared.violate(format!("a step of {rows} tokens computes {tokens}"));
        }
        let samples: Vec<u64> = spans.iter().flat_map(|s| &s.rows).filter_map(|(_, task)| seed_of(task)).collect();
        self.shared.note(Worked::Step { samples: samples.clone(), tokens });
        let mut out = Vec::new();
        let fails = self.shared.chance(self.shared.faults.get().step);
        for span in spans {
            self.run_span(cache, span, &mut out);
        }
        self.shared.spend(BASE_COST + TOKEN_COST * tokens as u32);
        if fails {
            self.shared.failed.borrow_mut().extend(&samples);
            self.shared.failed_steps.set(self.shared.failed_steps.get() + 1);
            return Err(self.shared.fail());
        }
        Ok(Stepped { results: out, num_computed: tokens })
    }
}

/// Whether the token of a row was guessed, and is what was drawn.
enum Guess {
    Right,
    Wrong,
}

/// What the token of a row is that follows these rows of its span. Nobody may look at what a wrong guess leads to.
fn before_guess<F, S>(span: &StepSpan<'_, F, S>, row: usize, before: &[RowResult]) -> Option<Guess> {
    match before.last()? {
        _ if matches!(span.rows[before.len() - 1].1, RowTask::Score { .. }) => None,
        RowResult::Scored(_) | RowResult::NotNumbers => Some(Guess::Wrong),
        RowResult::Drawn(drawn) => match drawn.first().is_some_and(|drawn| drawn.token == span.tokens[row]) {
            true => Some(Guess::Right),
            false => Some(Guess::Wrong),
        },
    }
}

fn seed_of(task: &RowTask) -> Option<u64> {
    match task {
        RowTask::Draw { settings, .. } => Some(settings.seed),
        RowTask::Score { .. } => None,
    }
}
