//! The engine over a toy model, a toy disk and a simulated clock, driven turn by turn from one seed.
//!
//! Everything above the model is the real thing: admission, the ledger, the order of operations, shares, the sampler with its pages and its prefix
//! cache, passes, saves and loads. What the toy computes is a hash of all that it should depend on, so that any mix-up is a wrong number.
//! [`Engine`] is for any test that wants to drive that; [`run_world`] drives it with random clients and checks what must always hold.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::Admission;
use crate::budget::Budget;
use crate::compute::Compute;
use crate::core::Core;
use crate::engine::{EngineHandle, EngineInfo};
use crate::intake::Intake;
use crate::ledger::Ledger;
use crate::pictures::Eyes;
use crate::sampler::{Room, SamplerLimits, Speculated, Speculating, Speculation};

mod copies;
mod disk;
pub mod oracle;
#[cfg(test)]
mod prefixes;
#[cfg(test)]
mod samplers;
#[cfg(test)]
mod shares;
#[cfg(test)]
mod speculation;
mod toy;
mod world;

pub use world::{Outline, run_world};

use disk::{Contents, Disk};
use toy::{Shared, Toy};

/// A small random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// A number below `n`, or 0 if there is none.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        oracle::mix(self.0, 0x51) % n.max(1)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below((high - low + 1) as u64) as usize
    }

    /// Whether something of this probability happens.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len() as u64) as usize)
    }
}

/// How often, out of a thousand times, something goes wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A sampling step fails or panics.
    pub step: u32,
    /// The prediction of one sample is not a number.
    pub row: u32,
    /// A training pass fails or panics.
    pub pass: u32,
    /// An optimizer step fails or panics.
    pub optim: u32,
    /// An adapter cannot be made or frozen.
    pub adapter: u32,
    /// A save or a load fails or hangs.
    pub disk: u32,
    /// Seeing a picture fails or panics.
    pub see: u32,
    /// Copying a page fails or panics, the latter of which nothing expects.
    pub page: u32,
}

/// Limits of a simulated engine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Seed of what goes wrong, and when.
    pub seed: u64,
    /// What goes wrong.
    pub faults: Faults,
    /// Tokens in a page of the cache.
    pub page_tokens: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// States of the cache; 0 for a model without, otherwise at least 2.
    pub states: usize,
    /// Tokens of a training pass.
    pub pass_tokens: usize,
    /// Tokens of all passes that run at the same time.
    pub activation_tokens: usize,
    /// Bytes of adapters; one in training takes 20 for each of its rank.
    pub adapter_bytes: u64,
    /// Bytes of adapters that are being written.
    pub captured_bytes: u64,
    /// Bytes of requests and results.
    pub ledger_bytes: u64,
    /// Tokens of pictures whose sight is kept; a picture has half of them at most. 0 for a model that reads text alone.
    pub gallery_tokens: usize,
    /// Whether samples guess what follows.
    pub speculation: Speculation,
}

impl Limits {
    /// Nothing goes wrong, and there is room.
    pub fn roomy(seed: u64) -> Self {
        Limits {
            seed,
            faults: Faults::default(),
            page_tokens: 4,
            pages: 200,
            states: 0,
            pass_tokens: 128,
            activation_tokens: 1024,
            adapter_bytes: 4000,
            captured_bytes: 1000,
            ledger_bytes: 64 << 20,
            gallery_tokens: 128,
            speculation: Speculation::PromptLookup,
        }
    }

    /// The longest sequence.
    pub fn max_context_tokens(&self) -> usize {
        (self.pages - 1) * self.page_tokens
    }

    /// The longest sequence that shares pages with short ones.
    pub fn short_sequence_max(&self) -> usize {
        self.max_context_tokens() / 2
    }

    /// The longest training example.
    pub fn max_example_tokens(&self) -> usize {
        self.max_context_tokens().min(self.activation_tokens / 4 * 3)
    }

    pub(crate) fn cache(&self) -> Room {
        Room { pages: self.pages, states: self.states }
    }

    fn budget(&self) -> Budget {
        Budget {
            max_context_tokens: self.max_context_tokens(),
            max_example_tokens: self.max_example_tokens(),
            cache: self.cache(),
            pass_tokens: self.pass_tokens,
            activation_tokens: self.activation_tokens,
            bytes_per_token: toy::PASS_BYTES,
            buffer_bytes: 0,
            adapter_bytes: self.adapter_bytes,
            captured_bytes: self.captured_bytes,
            ledger_bytes: self.ledger_bytes,
            transit_bytes: self.ledger_bytes,
            reserve_bytes: self.ledger_bytes,
            picture_tokens: self.gallery_tokens / 2,
            decoding_bytes: 0,
            gallery_bytes: self.gallery_tokens as u64 * toy::SEEN_BYTES,
        }
    }

    /// What is known of pictures before they are seen.
    pub(crate) fn eyes(&self) -> Option<Box<dyn Eyes>> {
        let tokens_max = self.gallery_tokens / 2;
        (tokens_max > 0).then(|| Box::new(oracle::ToyEyes { tokens_max }) as Box<dyn Eyes>)
    }
}

/// A simulated engine.
pub struct Engine {
    core: Core<Toy, Disk>,
    handle: EngineHandle,
    limits: Limits,
    shared: Rc<Shared>,
    contents: Rc<RefCell<Contents>>,
}

impl Engine {
    /// An engine with nothing to do.
    pub fn new(limits: Limits) -> Self {
        let shared = Rc::new(Shared::new(limits.seed, limits.faults));
        let contents = Rc::new(RefCell::new(Contents::default()));
        let intake = Arc::new(Intake::new(Ledger::new(limits.ledger_bytes), limits.adapter_bytes));
        let admission = Admission {
            intake: intake.clone(),
            max_example_tokens: limits.max_example_tokens(),
            sampler_limits: SamplerLimits {
                vocab_size: oracle::VOCAB as usize,
                max_context_tokens: limits.max_context_tokens(),
                short_sequence_max: limits.short_sequence_max(),
                eos_token_ids: oracle::END_OF_SEQUENCE.to_vec(),
                page_tokens: limits.page_tokens,
                cache: limits.cache(),
                tokenizer: None,
                eyes: limits.eyes(),
            },
            adapter_bytes: Box::new(toy::adapter_bytes),
        };
        let info = EngineInfo {
            max_context_tokens: limits.max_context_tokens(),
            max_example_tokens: limits.max_example_tokens(),
            vocab_size: oracle::VOCAB as usize,
            cache_tokens: limits.pages * limits.page_tokens,
            backend: "toy".into(),
            transit_bytes: limits.ledger_bytes,
            reserve_bytes: limits.ledger_bytes,
        };
        let toy = Toy::new(shared.clone(), limits.page_tokens, limits.gallery_tokens / 2, limits.activation_tokens);
        let cache = toy.new_cache(limits.cache()).expect("a toy always has memory");
        let disk = Disk::new(shared.clone(), contents.clone());
        let speculating = Speculating::new(limits.speculation);
        let core = Core::new(toy, cache, intake, disk, limits.budget(), limits.page_tokens, speculating.clone());
        Engine { core, handle: EngineHandle::over(admission, info, speculating), limits, shared, contents }
    }

    /// What a server holds of it.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// What it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes what has arrived and runs one piece of work. Answers whether there was any.
    pub fn turn(&mut self) -> bool {
        self.core.turn()
    }

    /// The simulated time.
    pub fn now(&self) -> Duration {
        self.shared.now.get()
    }

    /// Lets time pass while nothing runs.
    pub fn advance(&self, time: Duration) {
        self.shared.spend(time);
    }

    /// Lets time pass until the disk has done something, if it has anything to do.
    pub fn advance_to_disk(&mut self) -> bool {
        let Some(at) = self.core.storage_mut().next_end() else { return false };
        self.advance(at.saturating_sub(self.now()));
        true
    }

    /// Calls `act` whenever time has passed, also between the layers of a pass.
    pub fn on_time(&self, act: impl FnMut() + 'static) {
        *self.shared.on_time.borrow_mut() = Some(Box::new(act));
    }

    /// Decides anew what goes wrong.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.faults.set(faults);
    }

    /// Gives memory back, as an engine does that is idle.
    pub fn release_memory(&mut self) {
        self.core.release_memory();
    }

    /// Requests that are open.
    pub fn open_requests(&self) -> usize {
        self.core.open_requests()
    }

    /// Samples that lost their pages to others.
    pub fn evictions(&self) -> u64 {
        self.core.evictions()
    }

    /// What came of the guesses of samples.
    pub fn speculated(&self) -> Speculated {
        self.handle.speculated()
    }

    /// What is wrong with the engine's books, if anything.
    ///
    /// # Errors
    /// A sentence that says what.
    pub fn audit(&self) -> Result<(), String> {
        self.core.audit()?;
        if let Some(first) = self.shared.violations.borrow().first() {
            return Err(first.clone());
        }
        let live = self.shared.live_bytes.get();
        if let Some(counted) = self.core.adapter_bytes()
            && live > counted
        {
            return Err(format!("adapters and their copies take {live} bytes, {counted} are counted"));
        }
        Ok(())
    }
}
