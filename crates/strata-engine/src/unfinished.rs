//! Counts the saves that were asked for and are not answered yet: what a server that ends waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::api::{Failure, Request, TrainOp};
use crate::reply::Reply;

/// How many saves are owed, and how many were not kept. Clones count together.
#[derive(Clone, Default)]
pub(crate) struct UnfinishedSaves(Arc<Counts>);

#[derive(Default)]
struct Counts {
    owed: AtomicUsize,
    failed: AtomicUsize,
}

/// One save that is owed, until it is dropped.
struct Unfinished(UnfinishedSaves);

impl UnfinishedSaves {
    pub(crate) fn owed(&self) -> usize {
        self.0.owed.load(Ordering::Acquire)
    }

    /// Saves that Strata failed to write since the start. Those that the user got wrong do not count.
    pub(crate) fn failed(&self) -> usize {
        self.0.failed.load(Ordering::Acquire)
    }

    /// The reply of a request, counted until it was called if the request is a save. A reply that is dropped counts no more either.
    pub(crate) fn counted(&self, request: &Request, reply: Reply) -> Reply {
        let Request::Train { op: TrainOp::SaveState(_) | TrainOp::SaveSampler(_), .. } = request else { return reply };
        self.0.owed.fetch_add(1, Ordering::AcqRel);
        let unfinished = Unfinished(self.clone());
        Box::new(move |outcome, charge| {
            if let Err(Failure::Server(_)) = &outcome {
                unfinished.0.0.failed.fetch_add(1, Ordering::AcqRel);
            }
            reply(outcome, charge);
            drop(unfinished);
        })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.0.owed.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Response, SaveTarget};

    fn save() -> Request {
        let target = SaveTarget {
            root: "".into(),
            dir: "a".into(),
            name: "a".into(),
            overwrite: false,
            metadata: serde_json::Value::Null,
            recipients: vec![],
        };
        Request::Train { model_id: "m".into(), seq_id: 1, op: TrainOp::SaveState(target) }
    }

    #[test]
    fn a_save_counts_until_its_reply_was_called_or_is_no_more() {
        let saves = UnfinishedSaves::default();
        let during = saves.clone();
        let answered = saves.counted(&save(), Box::new(move |_, _| assert_eq!(during.owed(), 2)));
        let dropped = saves.counted(&save(), Box::new(|_, _| {}));
        let other = saves.counted(&Request::DropSampler { sampler_id: "s".into() }, Box::new(|_, _| {}));
        assert_eq!(saves.owed(), 2);
        answered(Ok(Response::Freed), None);
        assert_eq!(saves.owed(), 1);
        saves.counted(&save(), Box::new(|_, _| {}))(Err(Failure::User("the name is taken".into())), None);
        assert_eq!(saves.failed(), 0);
        saves.counted(&save(), Box::new(|_, _| {}))(Err(Failure::Server("the disk is full".into())), None);
        assert_eq!((saves.owed(), saves.failed()), (1, 1));
        drop((dropped, other));
        assert_eq!(saves.owed(), 0);
    }
}
