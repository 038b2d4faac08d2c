//! An engine that answers everything at once and remembers what it was asked, or holds its answers back.

use std::collections::HashMap;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use strata_engine::Reply;
use strata_engine::api::{
    Client, DatumOutput, Failure, ForwardBackwardOutput, LoraSpec, Outcome, Refusal, Request, RequestId, Response,
    SampleOutput, SampledSequence, SaveTarget, StopReason, TrainOp,
};
use strata_engine::ledger::{Charge, Ledger};

use crate::submit::{Submit, Wanted};

/// What sampling weights take.
pub const SAMPLER_BYTES: u64 = 100;

pub struct ScriptedEngine {
    pub ledger: Ledger,
    /// While set, everything is refused as busy.
    pub is_full: AtomicBool,
    /// Tokens of a pass beyond which it is refused for good; 0: none.
    pub datum_tokens_max: AtomicUsize,
    /// What a request and its result are charged for.
    pub charged_bytes: AtomicU64,
    /// Everything that was asked, in the order it arrived.
    pub requests: Mutex<Vec<Request>>,
    /// Operations of a model that wait for those before them.
    waiting: Mutex<HashMap<(String, u64), (TrainOp, Owed)>>,
    next_seq_id: Mutex<HashMap<String, u64>>,
    /// The order in which operations ran.
    pub ran: Mutex<Vec<u64>>,
    /// While set, answers are held back.
    pub holds: AtomicBool,
    held: Mutex<Vec<(Request, Owed)>>,
    /// Bytes for adapters that are missing; each sampler that is dropped gives back [`SAMPLER_BYTES`].
    pub shortage: AtomicU64,
    /// While set, everything fails and nothing is alive.
    pub is_dead: AtomicBool,
}

impl ScriptedEngine {
    /// Gives the answers held back so far.
    pub fn release(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        for (request, owed) in held {
            self.work(request, owed);
        }
    }

    /// How many requests a condition holds for.
    pub fn count(&self, condition: impl Fn(&Request) -> bool) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| condition(request)).count()
    }

    fn work(&self, request: Request, owed: Owed) {
        let Request::Train { model_id, seq_id, op } = request else { return owed.answer(answer(request)) };
        self.waiting.lock().unwrap().insert((model_id.clone(), seq_id), (op, owed));
        loop {
            let next = *self.next_seq_id.lock().unwrap().entry(model_id.clone()).or_insert(1);
            let ready = self.waiting.lock().unwrap().remove(&(model_id.clone(), next));
            let Some((op, owed)) = ready else { return };
            self.next_seq_id.lock().unwrap().insert(model_id.clone(), next + 1);
            self.ran.lock().unwrap().push(next);
            owed.answer(answer(Request::Train { model_id: model_id.clone(), seq_id: next, op }));
        }
    }
}

/// Whom to answer, and what pays for the answer.
struct Owed(Reply, Charge);

impl Owed {
    fn answer(self, outcome: Outcome) {
        (self.0)(outcome, Some(self.1));
    }
}

impl Default for ScriptedEngine {
    fn default() -> Self {
        ScriptedEngine {
            ledger: Ledger::new(16 << 20),
            is_full: AtomicBool::new(false),
            datum_tokens_max: AtomicUsize::new(0),
            charged_bytes: AtomicU64::new(1000),
            requests: Mutex::default(),
            waiting: Mutex::default(),
            next_seq_id: Mutex::default(),
            ran: Mutex::default(),
            holds: AtomicBool::new(false),
            held: Mutex::default(),
            shortage: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
        }
    }
}

impl Submit for ScriptedEngine {
    fn submit(&self, _id: RequestId, client: Client, request: Request, reply: Reply) -> Result<(), Refusal> {
        if self.is_dead.load(Ordering::Relaxed) {
            reply(Err(Failure::Server("the engine is dead".into())), None);
            return Ok(());
        }
        if self.is_full.load(Ordering::Relaxed) {
            return Err(Refusal::Busy("the queue is full".into()));
        }
        if let Request::Train { model_id, seq_id, .. } = &request {
            let next = *self.next_seq_id.lock().unwrap().entry(model_id.clone()).or_insert(1);
            match *seq_id {
                0 => return Err(Refusal::User("operations count from 1".into())),
                seen if seen < next => return Err(Refusal::Seen),
                far if far > next + 16_384 => return Err(Refusal::User(format!("seq_id {far} is too far ahead"))),
                _ => {}
            }
        }
        if let Request::Train { op: TrainOp::ForwardBackward { data, .. }, .. } = &request {
            let (tokens, max) =
                (data.iter().map(|datum| datum.tokens.len()).sum::<usize>(), self.datum_tokens_max.load(Ordering::Relaxed));
            if max > 0 && tokens > max {
                return Err(Refusal::User(format!("{tokens} tokens are above the limit of {max}")));
            }
        }
        let Ok(charge) = self.ledger.charge(&client, self.charged_bytes.load(Ordering::Relaxed)) else {
            return Err(Refusal::Busy("no room".into()));
        };
        if matches!(request, Request::DropSampler { .. }) {
            let fewer = |bytes: u64| Some(bytes.saturating_sub(SAMPLER_BYTES));
            let _ = self.shortage.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        }
        self.requests.lock().unwrap().push(request.clone());
        let owed = Owed(reply, charge);
        if self.holds.load(Ordering::Relaxed) {
            self.held.lock().unwrap().push((request, owed));
        } else {
            self.work(request, owed);
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        !self.is_dead.load(Ordering::Relaxed)
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn shortage(&self, _: &Client, _: Wanted<'_>) -> u64 {
        self.shortage.load(Ordering::Relaxed)
    }

    fn sampler_bytes(&self, _: &str) -> Option<u64> {
        Some(SAMPLER_BYTES)
    }
}

fn lora() -> LoraSpec {
    LoraSpec { rank: 8, seed: 3, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() }
}

fn answer(request: Request) -> Outcome {
    match request {
        Request::CreateModel { lora, .. } if lora.rank == 666 => Err(Failure::User("rank 666 is too large".into())),
        Request::CreateModel { lora, .. } => Ok(Response::Created { lora }),
        Request::CreateModelFromCheckpoint { .. } => Ok(Response::Created { lora: lora() }),
        Request::CreateSampler { .. } => Ok(Response::Sampler),
        Request::UnloadModel { .. } | Request::DropSampler { .. } | Request::Cancel { .. } | Request::EndSession => {
            Ok(Response::Freed)
        }
        Request::Sample { sample, .. } => {
            let sequence =
                SampledSequence { tokens: vec![4, 5], logprobs: vec![-1.0, -2.0], topk: None, stop_reason: StopReason::Stop };
            Ok(Response::Sampled(SampleOutput {
                sequences: vec![sequence; sample.num_samples],
                prompt_logprobs: None,
                topk_prompt_logprobs: None,
                target_prompt_logprobs: None,
                prompt_alt_tokens: None,
                prompt_cache_hit_tokens: 0,
            }))
        }
        Request::Train { op, .. } => train(op),
    }
}

fn train(op: TrainOp) -> Outcome {
    match op {
        TrainOp::ForwardBackward { data, .. } => {
            let output = |n: usize| DatumOutput { shape: vec![n], logprobs: vec![-1.0; n], elementwise_loss: vec![1.0; n] };
            let metrics = vec![("loss:sum".to_owned(), data.iter().map(|datum| datum.tokens.len() as f64).sum())];
            let data = data.iter().map(|datum| output(datum.tokens.len())).collect();
            Ok(Response::ForwardBackward(ForwardBackwardOutput { data, metrics }))
        }
        TrainOp::OptimStep(_) => Ok(Response::OptimStep { metrics: vec![("optim/grad_norm".into(), 0.5)] }),
        TrainOp::SaveState(target) | TrainOp::SaveSampler(target) => save(&target),
        TrainOp::Snapshot { .. } => Ok(Response::Sampler),
        TrainOp::LoadState { .. } => Ok(Response::Loaded),
        TrainOp::Refused(reason) => Err(Failure::User(reason)),
    }
}

fn save(target: &SaveTarget) -> Outcome {
    if target.dir.exists() && !target.overwrite {
        return Err(Failure::User(format!("checkpoint {} exists already", target.name)));
    }
    fs::create_dir_all(&target.dir).unwrap();
    fs::write(target.dir.join("strata.json"), target.metadata.to_string()).unwrap();
    let lora = serde_json::from_value(target.metadata["lora"].clone()).unwrap();
    Ok(Response::Saved { dir: target.dir.clone(), size_bytes: 123, lora })
}
