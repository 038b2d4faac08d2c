//! What a simulation asks of the engine after each of its steps.

#[cfg(test)]
use std::time::Duration;

use super::{Core, SamplerSlot};
#[cfg(test)]
use crate::api::Client;
use crate::api::{ModelId, SamplerId};
use crate::compute::Compute;
use crate::files::Storage;

impl<C: Compute, S: Storage<C::State>> Core<C, S> {
    /// Requests that are open anywhere in the engine.
    pub(crate) fn open_requests(&self) -> usize {
        let state = &self.state;
        let tenants: usize = state
            .tenants
            .values()
            .map(|t| t.running.len() + usize::from(t.loading.is_some()) + usize::from(t.making.is_some()))
            .sum();
        let loading = state.samplers.values().map(|slot| match slot {
            SamplerSlot::Loading { queued, .. } => 1 + queued.len(),
            SamplerSlot::Ready { .. } => 0,
        });
        state.intake.open_requests() + state.batcher.open() + tenants + loading.sum::<usize>() + state.files.unwritten()
    }

    /// What is wrong with the books, if anything. The simulation asks after every step.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let state = &self.state;
        state.batcher.audit()?;
        state.intake.audit()?;
        state.files.audit()?;
        let tokens: usize = state.passes.iter().map(|p| p.room).sum();
        if tokens > state.budget.activation_tokens {
            return Err(format!("passes of {tokens} tokens run, with room for {}", state.budget.activation_tokens));
        }
        let tokens: usize = state.passes.iter().filter_map(|p| p.sees.as_ref()).map(|sees| sees.tokens).sum();
        if tokens > state.budget.picture_tokens {
            return Err(format!("pictures of {tokens} tokens are seen, with room for {}", state.budget.picture_tokens));
        }
        let unwanted = state.samplers.keys().find(|id| !state.intake.wants_sampler(id));
        match unwanted {
            // A request to drop it may still be on its way.
            Some(id) if state.intake.open_requests() == 0 => Err(format!("sampling weights {id} are kept for nobody")),
            _ => Ok(()),
        }
    }

    /// The batcher's count of samples that lost their pages.
    pub(crate) fn evictions(&self) -> u64 {
        self.state.batcher.evictions
    }

    /// Time that the owner of a client was charged for.
    #[cfg(test)]
    pub(crate) fn used(&self, client: &Client) -> Duration {
        self.state.fair.used(client)
    }

    /// Bytes of adapters and their copies that are accounted for, if that is settled.
    pub(crate) fn adapter_bytes(&self) -> Option<u64> {
        self.state.intake.adapter_bytes().map(|bytes| bytes + self.state.files.captured_bytes())
    }

    /// Panics outside of passes.
    pub(crate) fn recoveries(&self) -> u64 {
        self.state.recoveries
    }

    /// What is still there of what should be over, if anything, when every session has ended and everything is answered.
    pub(crate) fn leftovers(&self) -> Result<(), String> {
        let state = &self.state;
        state.batcher.leftovers()?;
        state.intake.leftovers()?;
        let models: Vec<&ModelId> = state.tenants.keys().collect();
        let samplers: Vec<&SamplerId> = state.samplers.keys().collect();
        if !models.is_empty() || !samplers.is_empty() || !state.files.is_idle() || !state.passes.is_empty() {
            return Err(format!("left over: models {models:?}, sampling weights {samplers:?}, passes or files"));
        }
        match state.fair.sessions() + state.files.sessions() {
            0 => Ok(()),
            n => Err(format!("the shares of {n} sessions that are over are kept")),
        }
    }

    pub(crate) fn storage_mut(&mut self) -> &mut S {
        &mut self.state.storage
    }
}
