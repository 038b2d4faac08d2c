//! An engine over a random model, and requests as they would come from the server.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use anyhow::Context;
use strata_engine::api::{Client, Failure, LoraSpec, Outcome, Request, Response};
use strata_engine::{EngineConfig, EngineHandle, EngineInfo, Machine, Speculated, bytes_of};
use strata_model::{Model, ModelConfig};
use strata_tensor::{WeightFormat, random};

use super::Common;
use crate::base_model::Quantize;

/// The engine that is measured.
pub(super) struct Engine {
    handle: EngineHandle,
    /// Requests sent so far.
    requests: Cell<u64>,
    /// Sequences made so far.
    sequences: Cell<u64>,
    /// The shape of its model.
    pub config: ModelConfig,
}

impl Engine {
    /// Makes a model and starts an engine over it. Several adapters get the memory that they need, if it is not said what adapters are to get.
    pub(super) fn start(common: &Common, held: Held<'_>) -> anyhow::Result<Self> {
        Self::of(common, common.config()?, held)
    }

    /// As [`Engine::start`], with this model.
    pub(super) fn of(common: &Common, config: ModelConfig, held: Held<'_>) -> anyhow::Result<Self> {
        let backend = Arc::new(common.backend()?);
        let format = WeightFormat { compute: common.dtype.into(), storage: Quantize::storage(common.resources.quantize) };
        let model = Model::random(backend, config.clone(), 0, format)?;
        let engine_config = EngineConfig {
            memory_bytes: common.resources.memory_bytes(),
            adapter_bytes: match common.resources.adapter_memory {
                Some(bytes) => Some(bytes),
                None => held.adapter_bytes(&model)?,
            },
            base_model: common.shape.clone(),
            machine: Machine::default(),
            speculation: common.resources.speculation.into(),
        };
        let handle = EngineHandle::start(model, None, engine_config)?;
        Ok(Engine { handle, requests: Cell::new(0), sequences: Cell::new(0), config })
    }

    /// What it has room for.
    pub(super) fn info(&self) -> &EngineInfo {
        self.handle.info()
    }

    /// Whether training computes activations again that it has memory to keep.
    pub(super) fn compute_activations_again(&self, again: bool) {
        self.handle.compute_activations_again(again);
    }

    /// Has the samples that follow take memory that the cache has had before.
    pub(super) fn forget_prefixes(&self) {
        self.handle.forget_prefixes();
    }

    /// What came of guesses so far.
    pub(super) fn speculated(&self) -> Speculated {
        self.handle.speculated()
    }

    /// Sends a request of a tenant; the outcome comes through the receiver.
    pub(super) fn submit(&self, tenant: usize, request: Request) -> Receiver<Outcome> {
        let (sender, receiver) = channel();
        let refused = sender.clone();
        // A benchmark that has gone away no longer wants the outcome.
        let reply = Box::new(move |outcome, _| sender.send(outcome).unwrap_or(()));
        let client = Client { owner: format!("tenant-{tenant}").into(), session: format!("session-{tenant}").into() };
        let id = next(&self.requests).to_string().into();
        if let Err(refusal) = self.handle.submit(id, client, request, reply) {
            refused.send(Err(Failure::User(refusal.to_string()))).unwrap_or(());
        }
        receiver
    }

    /// Sends a request of a tenant and waits for its outcome.
    pub(super) fn call(&self, tenant: usize, request: Request) -> anyhow::Result<Response> {
        wait(&self.submit(tenant, request))
    }

    /// Makes an adapter on attention, MLP and unembedding for a tenant.
    pub(super) fn create_adapter(&self, tenant: usize, rank: usize) -> anyhow::Result<()> {
        self.call(tenant, Request::CreateModel { model_id: adapter_name(tenant), lora: lora(rank) })?;
        Ok(())
    }

    /// Token ids that look like text to a matmul: any will do, but no two sequences are alike.
    pub(super) fn new_sequence(&self, len: usize) -> Vec<i64> {
        self.new_refrain(len, len)
    }

    /// The same, beginning anew every `period` tokens.
    pub(super) fn new_refrain(&self, len: usize, period: usize) -> Vec<i64> {
        let sequence = next(&self.sequences);
        (0..len as u64)
            .map(|i| i % period as u64)
            .map(|i| (random::philox(sequence, [i, 0])[0] as usize % self.config.vocab_size) as i64)
            .collect()
    }
}

/// What an engine is to hold at the same time.
#[derive(Clone, Copy)]
pub(super) enum Held<'a> {
    /// What it has room for as it comes.
    AsItComes,
    /// Adapters of these ranks in training.
    Training(&'a [usize]),
    /// Adapters of these ranks frozen for sampling, each made by an owner of its own while the others are there.
    Frozen(&'a [usize]),
}

impl Held<'_> {
    /// What the engine is told to give adapters: nothing, unless there are several.
    fn adapter_bytes(self, model: &Model) -> anyhow::Result<Option<u64>> {
        let (Held::Training(ranks) | Held::Frozen(ranks)) = self else { return Ok(None) };
        if ranks.len() < 2 {
            return Ok(None);
        }
        let sizes = ranks.iter().map(|&rank| bytes_of(&lora(rank), model)).collect::<Result<Vec<_>, _>>();
        let sizes = sizes.map_err(anyhow::Error::msg)?;
        let bytes = match self {
            // An owner who has one may have seven eighths of the room.
            Held::Frozen(_) => {
                let largest = sizes.iter().map(|bytes| bytes.training).max().unwrap_or(0);
                (sizes.iter().map(|bytes| bytes.frozen).sum::<u64>() + largest).div_ceil(7) * 8
            }
            Held::Training(_) | Held::AsItComes => sizes.iter().map(|bytes| bytes.training).sum(),
        };
        // A fourth is for what is being saved.
        Ok(Some(bytes.div_ceil(3) * 4))
    }
}

/// An adapter on attention, MLP and unembedding.
fn lora(rank: usize) -> LoraSpec {
    LoraSpec { rank, seed: 0, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() }
}

/// The adapter of a tenant.
pub(super) fn adapter_name(tenant: usize) -> String {
    format!("adapter-{tenant}")
}

/// Waits for an outcome.
pub(super) fn wait(receiver: &Receiver<Outcome>) -> anyhow::Result<Response> {
    Ok(receiver.recv().context("the engine went away")??)
}

fn next(counter: &Cell<u64>) -> u64 {
    counter.set(counter.get() + 1);
    counter.get()
}
