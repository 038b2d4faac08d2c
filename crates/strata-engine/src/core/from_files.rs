//! What becomes of files that have been written or read, and of adapters that have been made.

use super::{SamplerSlot, State};
use crate::api::{Failure, LoraSpec, Response, SamplerId};
use crate::compute::Compute;
use crate::files::{LoadFor, SaveFor, Storage};
use crate::snapshot::WeightsId;

impl<C: Compute, S: Storage<C::State>> State<C, S> {
    pub(super) fn saved(&mut self, ticket: u64, result: Result<u64, Failure>) {
        for tenant in self.tenants.values_mut() {
            if tenant.saving == Some(ticket) {
                tenant.saving = None;
            }
        }
        self.intake.release(ticket);
        let Some(SaveFor { dir, lora, reply, .. }) = self.files.saved(ticket) else { return };
        reply.send(result.map(|size_bytes| Response::Saved { dir, size_bytes, lora }));
    }

    pub(super) fn loaded(&mut self, c: &C, ticket: u64, result: Result<C::State, Failure>) {
        match self.files.loaded(ticket) {
            Some((_, LoadFor::Tenant { uid })) => self.tenant_loaded(c, uid, ticket, result),
            Some((_, LoadFor::Sampler { lora })) => self.sampler_loaded(c, ticket, &lora, result),
            // Given up meanwhile: its requests have been answered. Its memory is free before others may have it.
            None => drop(result),
        }
        self.intake.release(ticket);
    }

    /// A fresh adapter is there, or is not.
    pub(super) fn made(&mut self, c: &C, ticket: u64, result: Result<C::State, Failure>) {
        let of_uid = self.files.made(ticket).and_then(|uid| self.tenants.iter_mut().find(|(_, tenant)| tenant.uid == uid));
        let wanted = of_uid.and_then(|(model_id, tenant)| Some((model_id.clone(), tenant.making.take()?.1, tenant)));
        match (wanted, result) {
            (Some((_, reply, tenant)), Ok(state)) => {
                tenant.learner = Some(c.restore(state));
                reply.send(Ok(Response::Created { lora: tenant.lora.clone() }));
            }
            (Some((model_id, reply, _)), Err(failure)) => {
                // Its name is free again before anyone is told.
                self.intake.remove_model(&model_id, &failure);
                reply.send(Err(failure));
            }
            // Given up meanwhile: who asked has been answered. Its memory is free before others may have it.
            (None, result) => drop(result),
        }
        self.intake.release(ticket);
    }

    fn tenant_loaded(&mut self, c: &C, uid: u64, ticket: u64, result: Result<C::State, Failure>) {
        let Some((model_id, tenant)) = self.tenants.iter_mut().find(|(_, t)| t.uid == uid) else { return };
        let Some((_, reply)) = tenant.loading.take_if(|(at, _)| *at == ticket) else { return };
        let checked = result.and_then(|state| {
            let fits = match &tenant.learner {
                Some(_) => c.check_shape(&tenant.made_with, &state),
                None => fits(c, &state, &tenant.lora),
            };
            fits.map(|()| state).map_err(Failure::User)
        });
        match (checked, &mut tenant.learner) {
            (Ok(state), learner) => {
                let response = match learner {
                    Some(_) => Response::Loaded,
                    None => {
                        tenant.made_with = c.spec_of(&state);
                        Response::Created { lora: tenant.made_with.clone() }
                    }
                };
                *learner = Some(c.restore(state));
                reply.send(Ok(response));
            }
            (Err(failure), Some(_)) => reply.send(Err(failure)),
            (Err(failure), None) => {
                // Its name is free again before anyone is told.
                let model_id = model_id.clone();
                self.intake.remove_model(&model_id, &Failure::User(format!("model {model_id} was not made: {failure}")));
                reply.send(Err(failure));
            }
        }
    }

    /// Sampling weights are there, or are not, for all who wait for them.
    fn sampler_loaded(&mut self, c: &C, ticket: u64, lora: &LoraSpec, result: Result<C::State, Failure>) {
        let made = result.and_then(|state| {
            fits(c, &state, lora).map_err(Failure::User)?;
            Ok(((WeightsId::fresh(), c.freeze_state(&state)?), c.state_bytes(&state).frozen))
        });
        let is_it = |slot: &SamplerSlot<C>| matches!(slot, SamplerSlot::Loading { ticket: at, .. } if *at == ticket);
        let ids: Vec<SamplerId> = self.samplers.iter().filter(|(_, slot)| is_it(slot)).map(|(id, _)| id.clone()).collect();
        for sampler_id in ids {
            let Some(SamplerSlot::Loading { reply, queued, loaded_from, .. }) = self.samplers.remove(&sampler_id) else {
                continue;
            };
            match &made {
                Ok((weights, bytes)) => {
                    let slot = SamplerSlot::Ready { weights: weights.clone(), bytes: *bytes, loaded_from: Some(loaded_from) };
                    self.samplers.insert(sampler_id, slot);
                    reply.send(Ok(Response::Sampler));
                    queued.into_iter().for_each(|(plan, asked)| self.batcher.submit(plan, weights.clone(), asked));
                }
                Err(failure) => {
                    queued.into_iter().for_each(|(_, asked)| asked.reply.send(Err(failure.clone())));
                    self.intake.remove_sampler(&sampler_id, failure);
                    reply.send(Err(failure.clone()));
                }
            }
        }
    }
}

/// Whether a checkpoint fits the room that was set aside for it.
fn fits<C: Compute>(c: &C, state: &C::State, lora: &LoraSpec) -> Result<(), String> {
    let (set_aside, needed) = (c.adapter_bytes(lora)?, c.state_bytes(state));
    if needed.training > set_aside.training {
        return Err(format!(
            "the checkpoint's adapter takes {} bytes, and its record says {}: they do not belong together",
            needed.training, set_aside.training
        ));
    }
    Ok(())
}
