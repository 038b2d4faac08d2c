//! Which snapshots make room for others. They are what a reinforcement-learning loop makes at every step and never deletes.

use std::collections::HashMap;

use strata_engine::api::{Client, Request};

use super::{Inner, Registry, State, Weights, unknown_session};
use crate::bases::BaseId;
use crate::error::{ApiError, ApiResult};
use crate::limits;

impl Registry {
    /// Gives up snapshots for which nobody has asked for longest, so that `bytes` more for adapters of a base are there, if there are enough of them; says what
    /// the engine has to free. First those of the session itself, then of others of its owner; never one that is being sampled, nor the last of a model, but of
    /// `of_model`, which is about to have another. `bytes_of`: what dropping one gives back, if it can be dropped.
    pub fn give_up_snapshots(
        &self,
        (client, base): (&Client, BaseId),
        of_model: Option<&str>,
        bytes: u64,
        bytes_of: impl Fn(&str) -> Option<u64>,
    ) -> Vec<Request> {
        let mut inner = self.lock();
        let mut last_of: HashMap<&str, u64> = HashMap::new();
        let mut snapshots = Vec::new();
        for (id, sampler) in &inner.samplers {
            let Weights::Snapshot(model_id) = &sampler.weights else { continue };
            let session = inner.sessions.get(&sampler.session_id);
            if sampler.state != State::Active || sampler.base != base || session.is_none_or(|s| s.client.owner != client.owner)
            {
                continue;
            }
            let last = last_of.entry(model_id).or_default();
            *last = sampler.number.max(*last);
            snapshots.push((id, model_id.as_str(), sampler));
        }
        snapshots.retain(|(_, model_id, sampler)| {
            let is_last = last_of[model_id] == sampler.number && of_model != Some(model_id);
            sampler.running == 0 && !is_last
        });
        snapshots.sort_by_key(|(_, _, s)| (*s.session_id != *client.session, s.last_used, s.number));
        let (mut freed, mut given_up) = (0, Vec::new());
        for (id, ..) in snapshots {
            if freed >= bytes {
                break;
            }
            if let Some(of_it) = bytes_of(id) {
                freed += of_it;
                given_up.push(id.clone());
            }
        }
        if freed < bytes {
            return Vec::new();
        }
        let reason = "there was no more room for adapters, and it was an unnamed snapshot unused for longest; save weights under a name to keep them longer";
        for id in &given_up {
            if let Some(sampler) = inner.samplers.get_mut(id) {
                sampler.state = State::Gone(reason.into());
            }
        }
        given_up.into_iter().map(|sampler_id| Request::DropSampler { sampler_id }).collect()
    }
}

impl Inner {
    /// Frees the least recently used snapshot of a session that has too many.
    pub(super) fn make_room_for_sampler(&mut self, session_id: &str, weights: &Weights) -> ApiResult<Vec<Request>> {
        let Some(session) = self.sessions.get_mut(session_id) else { return Err(unknown_session(session_id)) };
        if session.samplers.len() >= limits::SAMPLERS_PER_SESSION_MAX {
            // Those that are gone only serve to explain themselves, which they have had time for.
            let is_active = |id: &String| self.samplers.get(id).is_some_and(|s| s.state == State::Active);
            let (active, gone) = std::mem::take(&mut session.samplers).into_iter().partition(is_active);
            session.samplers = active;
            let gone: Vec<String> = gone;
            for id in gone {
                self.samplers.remove(&id);
            }
        }
        if session.samplers.len() >= limits::SAMPLERS_PER_SESSION_MAX {
            return Err(ApiError::bad(format!(
                "session {session_id} has {} sampling sessions, which is the limit",
                limits::SAMPLERS_PER_SESSION_MAX
            )));
        }
        let mut snapshots = Vec::new();
        for id in &session.samplers {
            if let Some(sampler) = self.samplers.get(id)
                && sampler.state == State::Active
                && matches!(sampler.weights, Weights::Snapshot(_))
            {
                snapshots.push((sampler.running > 0, sampler.last_used, id.clone()));
            }
        }
        if !matches!(weights, Weights::Snapshot(_)) || snapshots.len() < limits::SNAPSHOTS_PER_SESSION_MAX {
            return Ok(Vec::new());
        }
        let Some((false, _, oldest)) = snapshots.into_iter().min() else { return Ok(Vec::new()) };
        if let Some(sampler) = self.samplers.get_mut(&oldest) {
            sampler.state = State::Gone(format!(
                "a session keeps its {} most recently used unnamed snapshots; save weights under a name to keep them longer",
                limits::SNAPSHOTS_PER_SESSION_MAX
            ));
        }
        Ok(vec![Request::DropSampler { sampler_id: oldest }])
    }
}
