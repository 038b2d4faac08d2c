//! Seeing pictures, for samples and for passes: a piece of work of its own, so that whoever shows a picture pays for it alone and others run between the blocks of the tower.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::State;
use super::passes::PassInWork;
use crate::api::{Client, Failure};
use crate::compute::{Compute, PassError};
use crate::fair::Work;
use crate::files::Storage;
use crate::pictures::{Picture, PictureId};

/// What was seen for a pass.
pub(super) type Seen<C> = HashMap<PictureId, <C as Compute>::Seen>;

impl<C: Compute, S: Storage<C::State>> State<C, S> {
    /// Has the next picture seen that a session's samples wait for. Answers whether there was one; what was seen before costs nothing.
    pub(super) fn see_for_samples(&mut self, c: &C, client: &Client) -> bool {
        while let Some((job, index, picture)) = self.batcher.to_see(c, client) {
            if self.batcher.recall(job, index, &picture) {
                continue;
            }
            match self.see(c, client, Work::Sampling, 0, &picture) {
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
        let mut seen: Seen<C> = HashMap::new();
        loop {
            let tenant = self.tenants.get(model_id)?;
            let next = tenant.next_example().filter(|datum| datum.tokens.len() <= tokens_max)?;
            // What a pass takes of one model: an example that is longer than a pass is the only one of its pass.
            let most = self.budget.pass_tokens.min(tokens_max).max(next.tokens.len());
            let (mut tokens, mut missing) = (0, None);
            let mut window = HashMap::new();
            for (request, datum) in tenant.next_examples(most) {
                tokens += datum.tokens.len();
                if tokens > most {
                    break;
                }
                for picture in &datum.pictures {
                    match seen.remove(&picture.id).or_else(|| self.batcher.seen(&picture.id)) {
                        Some(known) => drop(window.insert(picture.id, known)),
                        None if window.contains_key(&picture.id) => {}
                        None => missing = missing.or_else(|| Some((request.clone(), picture.clone()))),
                    }
                }
                if missing.is_some() {
                    break;
                }
            }
            seen = window;
            // Between the blocks of a tower no other picture is seen: the pass takes what comes before.
            let Some((request, picture)) = missing.filter(|_| !self.batcher.seeing) else { return Some(seen) };
            let client = tenant.client.clone();
            match self.see(c, &client, Work::Training, tokens, &picture) {
                Ok(known) => drop(seen.insert(picture.id, known)),
                Err(None) => return None,
                Err(Some(failure)) => {
                    let tenant = self.tenants.get_mut(model_id)?;
                    if tenant.running.front().is_some_and(|first| first.id != request) {
                        // It fails when it is its turn; the pass takes what comes before.
                        return Some(seen);
                    }
                    tenant.cancel(c, &request, &failure);
                    self.begin_ops(c, model_id);
                    return None;
                }
            }
        }
    }

    /// Has a picture seen. `room`: tokens of training for whose memory what was seen for it counts.
    fn see(&mut self, c: &C, client: &Client, work: Work, room: usize, picture: &Picture) -> Result<C::Seen, Option<Failure>> {
        let tokens = picture.grid.patches();
        self.passes.push(PassInWork {
            clients: vec![(client.clone(), tokens)],
            tokens,
            room,
            work,
            uids: Vec::new(),
            sees: Some(picture.id),
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

    /// Tells the sampler whether a picture is being seen.
    pub(super) fn note_seeing(&mut self) {
        self.batcher.seeing = self.passes.iter().any(|pass| pass.sees.is_some());
    }

    /// Whether someone still shows a picture.
    pub(super) fn is_shown(&self, id: &PictureId) -> bool {
        let examples = self.tenants.values().flat_map(|t| &t.running).flat_map(|f| &f.data[f.next_datum()..]);
        self.batcher.shows(id) || examples.flat_map(|datum| &datum.pictures).any(|picture| picture.id == *id)
    }
}
