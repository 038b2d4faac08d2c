//! From a request to something accepted, on the thread of whoever sends it: checked against the model, turned into what the engine computes,
//! and paid for. What is wrong with a request is found here and costs the engine thread nothing.

use std::sync::Arc;

use strata_model::LateTokenizer;

use crate::api::{Client, Failure, LoraSpec, Refusal, Request, RequestId, Response, Stop, TrainOp};
use crate::compute::AdapterBytes;
use crate::datum::{self, ModelLimits};
use crate::intake::{Control, Intake, Op, QueuedOp};
use crate::optimizer;
use crate::reply::{PendingReply, Reply};
use crate::sampler::{Asked, Plan, REQUEST_BYTES, SamplerLimits};
use crate::snapshot::LoadedFrom;

type AdapterSizes = Box<dyn Fn(&LoraSpec) -> Result<AdapterBytes, String> + Send + Sync>;

/// What requests are checked against.
pub(crate) struct Admission {
    pub(crate) intake: Arc<Intake>,
    /// Longest training example.
    pub(crate) max_example_tokens: usize,
    pub(crate) sampler_limits: SamplerLimits,
    pub(crate) adapter_bytes: AdapterSizes,
}

impl Admission {
    /// Accepts a request, whose `reply` is then called exactly once, or refuses it, and `reply` is never called.
    pub(crate) fn submit(&self, id: RequestId, client: Client, request: Request, reply: Reply) -> Result<(), Refusal> {
        let reply = PendingReply::new(reply);
        if self.intake.is_closed() {
            return answer(reply, Err(Failure::Server("the engine is not running: the server has to be restarted".into())));
        }
        let gone = |what: &str| Failure::User(format!("{what} before this request was done"));
        match request {
            Request::CreateModel { model_id, lora } => {
                let room = self.sizes(&lora).and_then(|bytes| self.intake.add_model(&model_id, &client, bytes));
                match room {
                    Ok(()) => self.control(reply, |reply| Control::Create { model_id, client, lora, reply }),
                    Err(refusal) => refuse(reply, refusal),
                }
            }
            Request::CreateModelFromCheckpoint { model_id, source, lora, with_optimizer } => {
                let room = self.sizes(&lora).and_then(|bytes| self.intake.add_model(&model_id, &client, bytes));
                match room {
                    Ok(()) => self.control(reply, |reply| Control::CreateFrom {
                        model_id,
                        client,
                        source,
                        lora,
                        with_optimizer,
                        reply,
                    }),
                    Err(refusal) => refuse(reply, refusal),
                }
            }
            Request::Train { model_id, seq_id, op } => {
                if let Err(refusal) = self.intake.check_place(&model_id, seq_id) {
                    reply.withdraw();
                    return Err(refusal);
                }
                let op = self.prepare(op);
                let bytes = REQUEST_BYTES
                    + match &op {
                        Op::Forward { data, .. } => data.iter().map(datum::PreparedDatum::held_bytes).sum(),
                        _ => 0,
                    };
                self.intake.accept_op(&model_id, seq_id, bytes, QueuedOp { id, op, reply })
            }
            Request::UnloadModel { model_id } => {
                let outcome = match self.intake.remove_model(&model_id, &gone(&format!("model {model_id} was unloaded"))) {
                    true => Ok(Response::Freed),
                    false => Err(Failure::User(format!("there is no model {model_id}"))),
                };
                answer(reply, outcome)
            }
            Request::CreateSampler { sampler_id, source } => {
                let bytes = match &source {
                    Some((_, lora)) => self.sizes(lora).map(|bytes| bytes.frozen),
                    None => Ok(0),
                };
                let from = source.clone().map(|(source, lora)| LoadedFrom { owner: client.owner.clone(), source, lora });
                match bytes.and_then(|bytes| self.intake.add_sampler(&sampler_id, &client, bytes, from)) {
                    Ok(()) => self.control(reply, |reply| Control::CreateSampler { sampler_id, client, source, reply }),
                    Err(refusal) => refuse(reply, refusal),
                }
            }
            Request::DropSampler { sampler_id } => {
                let dropped = gone(&format!("sampling weights {sampler_id} were dropped"));
                let outcome = match self.intake.remove_sampler(&sampler_id, &dropped) {
                    true => Ok(Response::Freed),
                    false => Err(Failure::User(format!("there are no sampling weights {sampler_id}"))),
                };
                answer(reply, outcome)
            }
            Request::Sample { sampler_id, sample } => {
                // The threads that take requests do not wait for it.
                let is_read = |tokenizer: &LateTokenizer| tokenizer.now().is_some();
                if matches!(sample.stop, Stop::Strings(_)) && !self.sampler_limits.tokenizer.as_ref().is_none_or(is_read) {
                    reply.withdraw();
                    return Err(Refusal::Busy("the tokenizer, which stop strings need, is still being read; ask again".into()));
                }
                let plan = match Plan::new(&sample, &self.sampler_limits) {
                    Ok(plan) => plan,
                    Err(message) => return answer(reply, Err(Failure::User(message))),
                };
                match self.intake.charge(&client, plan.held_bytes()) {
                    Ok(charge) => {
                        let reply = reply.paid_by(charge);
                        self.control(reply, |reply| Control::Sample { plan, asked: Asked { id, client, sampler_id, reply } })
                    }
                    Err(refusal) => {
                        reply.withdraw();
                        Err(match refusal {
                            Refusal::User(message) => Refusal::User(format!("{message} ({})", plan.shown_bytes())),
                            refusal => refusal,
                        })
                    }
                }
            }
            Request::Cancel { request_id } => {
                self.intake.cancel(&request_id, &Failure::User("the request was cancelled".into()));
                answer(reply, Ok(Response::Freed))
            }
            Request::EndSession => {
                self.intake.end_session(&client, &gone("the session ended"));
                answer(reply, Ok(Response::Freed))
            }
        }
    }

    /// Bytes for adapters that are missing for a model of `client`; none for one that is refused anyway.
    pub(crate) fn model_shortage(&self, client: &Client, lora: &LoraSpec) -> u64 {
        self.sizes(lora).map_or(0, |bytes| self.intake.shortage(client, bytes.training))
    }

    fn sizes(&self, lora: &LoraSpec) -> Result<AdapterBytes, Refusal> {
        (self.adapter_bytes)(lora).map_err(Refusal::User)
    }

    fn control(&self, reply: PendingReply, control: impl FnOnce(PendingReply) -> Control) -> Result<(), Refusal> {
        self.intake.accept(control(reply)).map_err(|refused| {
            let (refusal, control) = *refused;
            control.withdraw();
            refusal
        })
    }

    /// What an operation comes to. One that is wrong takes its place all the same, and fails there.
    fn prepare(&self, op: TrainOp) -> Op {
        let SamplerLimits { vocab_size, eyes, .. } = &self.sampler_limits;
        let limits =
            ModelLimits { vocab_size: *vocab_size, max_example_tokens: self.max_example_tokens, eyes: eyes.as_deref() };
        match op {
            TrainOp::ForwardBackward { data, loss, forward_only } => match datum::prepare(data, &loss, limits) {
                Ok(data) => Op::Forward { data, backward: !forward_only },
                Err(message) => Op::Refused(Failure::User(message)),
            },
            TrainOp::OptimStep(params) => match optimizer::check(&params) {
                Ok(_) => Op::Optim(params),
                Err(message) => Op::Refused(Failure::User(message)),
            },
            TrainOp::SaveState(target) => Op::Save { target, with_optimizer: true },
            TrainOp::SaveSampler(target) => Op::Save { target, with_optimizer: false },
            TrainOp::Snapshot { sampler_id, replace } => Op::Snapshot { sampler_id, replace, entry: 0 },
            TrainOp::LoadState { source, with_optimizer } => Op::Load { source, with_optimizer },
            TrainOp::Refused(reason) => Op::Refused(Failure::User(reason)),
        }
    }
}

/// What can be sent again is refused; what stays wrong is answered, and has its place among what was asked.
fn refuse(reply: PendingReply, refusal: Refusal) -> Result<(), Refusal> {
    match refusal {
        Refusal::User(message) => answer(reply, Err(Failure::User(message))),
        refusal => {
            reply.withdraw();
            Err(refusal)
        }
    }
}

fn answer(reply: PendingReply, outcome: crate::api::Outcome) -> Result<(), Refusal> {
    reply.send(outcome);
    Ok(())
}

impl Control {
    /// Forgets whom to answer: the request was refused.
    fn withdraw(self) {
        match self {
            Control::Create { reply, .. } | Control::CreateFrom { reply, .. } | Control::CreateSampler { reply, .. } => {
                reply.withdraw()
            }
            Control::Sample { asked, .. } => asked.reply.withdraw(),
            Control::Unload { .. }
            | Control::DropSampler { .. }
            | Control::Cancel { .. }
            | Control::EndSession { .. }
            | Control::Drain { .. } => {}
        }
    }
}
