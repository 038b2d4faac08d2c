//! Seeing pictures, for samples and for passes: a piece of work of its own, so that whoever shows a picture pays for it alone and others run between the blocks of the tower.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::State;
use super::passes::{PassInWork, Sees};
use crate::api::{Client, Failure, RequestId};
use crate::compute::{Compute, PassError};
use crate::datum::Extent;
use crate::fair::{Standing, Work};
use crate::files::Storage;
use crate::pictures::{Picture, PictureId};
use crate::tenant::Tenant;

/// A picture that was not seen, and what request shows it.
type Missing = Option<(RequestId, Picture)>;

/// What was seen for a pass.
pub(super) type Seen<C> = HashMap<PictureId, <C as Compute>::Seen>;

impl<C: Compute, S: Storage<C::State>> State<C, S> {
    /// Has the next picture seen that a session's samples wait for. Answers whether there was one; what was seen before costs nothing.
    pub(super) fn see_for_samples(&mut self, c: &C, client: &Client) -> bool {
        while let Some((job, index, picture)) = self.batcher.next_to_see(c, client) {
            if self.batcher.recall(job, index, &picture) {
                continue;
            }
            match self.see(c, client, Work::Sampling, &picture) {
                Ok(_) => drop(self.batcher.recall(job, index, &picture)),
                Err(None) => {}
                Err(Some(failure)) => self.batcher.not_seen(job, failure),
            }
            return true;
        }
        false
    }

    /// Has the pictures seen that the next pass of a model is about. `None` if the model has nothing to run any more.
    pub(super) fn see_for_pass(&mut self, c: &C, model_id: &str, tokens_max: usize) -> Option<Seen<C>> {
        let tenant = self.tenants.get(model_id)?;
        let (client, uids) = (tenant.client.clone(), vec![tenant.uid]);
        self.passes.push(PassInWork {
            clients: vec![(client.clone(), 1)],
            early: None,
            left: false,
            inner: 0,
            room: 0,
            work: Work::Training,
            uids,
            sees: None,
            charged_until: c.now(),
        });
        let depth = self.passes.len();
        let mut seen = Some(Seen::<C>::new());
        while let Some(so_far) = seen.as_mut() {
            let Some((extent, missing)) = self.look_ahead(model_id, tokens_max, so_far) else {
                seen = None;
                break;
            };
            // What was seen takes its part of the memory of the pass that it is for.
            self.passes[depth - 1].room = extent.tokens.min(self.room() + self.passes[depth - 1].room);
            self.passes[depth - 1].inner = self.inner_tokens(depth - 1, extent.work);
            // One that cannot be seen now waits: the pass takes what comes before.
            let may_see = |(_, picture): &(RequestId, Picture)| self.batcher.may_see(&client.owner, picture);
            let Some((request, picture)) = missing.filter(may_see) else { break };
            match self.see(c, &client, Work::Training, &picture) {
                Ok(known) => drop(so_far.insert(picture.id, known)),
                Err(None) => seen = None,
                // It fails when it is its turn: the pass takes what comes before.
                Err(Some(_)) if !self.is_next(model_id, &request) => break,
                Err(Some(failure)) => {
                    if let Some(tenant) = self.tenants.get_mut(model_id) {
                        tenant.cancel(c, &request, &failure);
                    }
                    self.begin_ops(c, model_id);
                    seen = None;
                }
            }
            // Whoever is due runs before the next one is seen.
            self.passes[depth - 1].charged_until = c.now();
            if seen.is_some() && self.guarded_between(c, depth).is_break() {
                seen = None;
            }
        }
        self.passes.truncate(depth - 1);
        seen
    }

    /// What the next pass of a model takes, up to the first picture that was not seen; and that picture, and what request shows it. What was `seen` of others is let go of.
    fn look_ahead(&mut self, model_id: &str, tokens_max: usize, seen: &mut Seen<C>) -> Option<(Extent, Missing)> {
        let tenant = self.tenants.get(model_id)?;
        let next = tenant.next_example().filter(|datum| datum.tokens.len() <= tokens_max)?;
        // An example that is longer than a pass is the only one of its pass.
        let most = self.budget.pass_tokens.min(tokens_max).max(next.tokens.len());
        let mut known = std::mem::take(seen);
        let mut total = Extent { tokens: 0, work: 0 };
        for (request, datum, extent) in tenant.next_examples(most) {
            if total.work + extent.work > most {
                break;
            }
            total = Extent { tokens: total.tokens + extent.tokens, work: total.work + extent.work };
            for picture in datum.pictures.iter() {
                if seen.contains_key(&picture.id) {
                    continue;
                }
                match known.remove(&picture.id).or_else(|| self.batcher.seen(&picture.id)) {
                    Some(known) => drop(seen.insert(picture.id, known)),
                    None => return Some((total, Some((request.clone(), picture.clone())))),
                }
            }
        }
        Some((total, None))
    }

    /// Whether a request is the next that a pass takes of a model.
    fn is_next(&self, model_id: &str, request: &RequestId) -> bool {
        let running = self.tenants.get(model_id).and_then(|tenant| tenant.running.front());
        running.is_some_and(|first| first.id == *request)
    }

    /// Has a picture seen.
    fn see(&mut self, c: &C, client: &Client, work: Work, picture: &Picture) -> Result<C::Seen, Option<Failure>> {
        self.passes.push(PassInWork {
            clients: vec![(client.clone(), 1)],
            early: None,
            left: false,
            inner: self.inner_tokens(self.passes.len(), picture.grid.patches()),
            room: 0,
            work,
            uids: Vec::new(),
            sees: Some(Sees { id: picture.id, tokens: picture.grid.patches(), owner: client.owner.clone() }),
            charged_until: c.now(),
        });
        self.note_seeing();
        let depth = self.passes.len();
        let done = {
            let mut between = || self.guarded_between(c, depth);
            catch_unwind(AssertUnwindSafe(|| c.see(&picture.file, &mut between)))
        };
        self.passes.truncate(depth);
        self.charge_pass(c);
        self.passes.pop();
        self.note_seeing();
        let error = match done {
            Ok(Ok(seen)) => {
                self.batcher.keep_seen(picture, &seen);
                return Ok(seen);
            }
            Ok(Err(PassError::Interrupted)) => return Err(None),
            Ok(Err(PassError::Failed(error))) => error,
            Err(_) => "it panicked; the server log says where".into(),
        };
        tracing::error!(error, "a picture was not seen");
        Err(Some(Failure::Server(format!("seeing a picture: {error}"))))
    }

    /// Tells the sampler for whom pictures are being seen.
    pub(super) fn note_seeing(&mut self) {
        let seen = self.passes.iter().filter_map(|pass| pass.sees.as_ref());
        self.batcher.seeing = seen.map(|sees| (sees.owner.clone(), sees.tokens)).collect();
    }

    /// Where the first stands of those who wait until another owner's picture was seen. That owner's other work gives way to them: if it ran between the blocks of the tower, whoever
    /// waits for the memory would wait for all that its holder has to do, and not for one picture.
    pub(super) fn first_waiting_to_see(&self) -> Option<Standing> {
        if self.batcher.seeing.is_empty() {
            return None;
        }
        let sampling = self.batcher.waiting_to_see().map(|client| (client, Work::Sampling));
        let unseen = |t: &&Tenant<C>| t.next_example().is_some() && !self.has_example(t, usize::MAX);
        let tenants = self.tenants.values().filter(unseen).map(|tenant| (&tenant.client, Work::Training));
        let tenants = tenants.filter(|(client, _)| !self.batcher.sees_for(&client.owner));
        sampling.chain(tenants).map(|(client, work)| self.fair.standing(client, work)).min()
    }

    /// Whether someone still shows a picture.
    pub(super) fn is_shown(&self, id: &PictureId) -> bool {
        let examples = self.tenants.values().flat_map(|t| &t.running).flat_map(|f| &f.data[f.next_datum()..]);
        self.batcher.shows(id) || examples.flat_map(|datum| &datum.pictures).any(|picture| picture.id == *id)
    }
}
