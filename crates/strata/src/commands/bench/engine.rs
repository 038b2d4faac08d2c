//! An engine over a random model, and requests as they would come from the server.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use anyhow::Context;
use strata_engine::api::{Client, Failure, LoraSpec, Outcome, Request, Response};
use strata_engine::{EngineConfig, EngineHandle, EngineInfo, Machine, Speculated};
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
    /// Makes a model and starts an engine over it.
    pub(super) fn start(common: &Common) -> anyhow::Result<Self> {
        Self::of(common, common.config()?)
    }

    /// As [`Engine::start`], with this model.
    pub(super) fn of(common: &Common, config: ModelConfig) -> anyhow::Result<Self> {
        let backend = Arc::new(common.backend()?);
        let format = WeightFormat { compute: common.dtype.into(), storage: Quantize::storage(common.resources.quantize) };
        let model = Model::random(backend, config.clone(), 0, format)?;
        let engine_config = EngineConfig {
            memory_bytes: common.resources.memory_bytes(),
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
        let lora =
            LoraSpec { rank, seed: 0, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() };
        self.call(tenant, Request::CreateModel { model_id: adapter_name(tenant), lora })?;
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
