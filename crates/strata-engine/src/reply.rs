//! The promise that every request is answered exactly once.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::api::{Failure, Outcome};
use crate::ledger::Charge;

/// Takes the outcome of a request, and with it what the request was charged for, which now pays for the result. It is called on one of the
/// engine's threads: it must be quick and must not block.
pub type Reply = Box<dyn FnOnce(Outcome, Option<Charge>) + Send>;

/// What a request that the engine could not finish is told.
const STOPPED: &str = "the engine stopped before this request was done; the server log says why";

/// A [`Reply`] that is still owed. Dropped without an answer (the engine died, or was shut down), it answers with a server failure.
pub(crate) struct PendingReply {
    reply: Option<Reply>,
    charge: Option<Charge>,
}

impl PendingReply {
    pub(crate) fn new(reply: Reply) -> Self {
        PendingReply { reply: Some(reply), charge: None }
    }

    /// What the request holds is paid for by `charge`.
    pub(crate) fn paid_by(mut self, charge: Charge) -> Self {
        self.charge = Some(charge);
        self
    }

    pub(crate) fn send(mut self, outcome: Outcome) {
        self.deliver(outcome);
    }

    pub(crate) fn fail_user(self, message: impl Into<String>) {
        self.send(Err(Failure::User(message.into())));
    }

    /// Forgets the closure: the request was refused, and its sender is told so in another way.
    pub(crate) fn withdraw(mut self) {
        self.reply = None;
    }

    /// A caller's closure that panics must not take the engine, and everyone else's requests, with it.
    fn deliver(&mut self, outcome: Outcome) {
        let Some(reply) = self.reply.take() else { return };
        let charge = self.charge.take();
        if catch_unwind(AssertUnwindSafe(|| reply(outcome, charge))).is_err() {
            tracing::error!("a reply closure panicked");
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.deliver(Err(Failure::Server(STOPPED.into())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::api::Response;

    #[test]
    fn an_answered_reply_is_called_once() {
        let (tx, rx) = channel();
        PendingReply::new(Box::new(move |o, _| tx.send(o).unwrap())).send(Ok(Response::Freed));
        assert!(matches!(rx.recv(), Ok(Ok(Response::Freed))));
        assert!(rx.recv().is_err(), "the closure was dropped after its one call");
    }

    #[test]
    fn a_dropped_reply_fails_with_a_server_error_and_a_withdrawn_one_is_silent() {
        let (tx, rx) = channel();
        let other = tx.clone();
        drop(PendingReply::new(Box::new(move |o, _| tx.send(o).unwrap())));
        assert!(matches!(rx.recv(), Ok(Err(Failure::Server(_)))));
        PendingReply::new(Box::new(move |o, _| other.send(o).unwrap())).withdraw();
        assert!(rx.recv().is_err());
    }

    #[test]
    fn a_panicking_closure_is_contained() {
        PendingReply::new(Box::new(|_, _| panic!("expected in this test"))).send(Ok(Response::Freed));
    }
}
