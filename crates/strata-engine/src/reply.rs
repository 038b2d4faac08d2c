//! The promise that every request is answered exactly once.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::api::{Failure, Outcome};

/// Takes the outcome of a request, on one of the engine's threads: it must be quick and must not block.
pub type Reply = Box<dyn FnOnce(Outcome) + Send>;

/// What a request that the engine could not finish is told.
const STOPPED: &str = "the engine stopped before this request was done; the server log says why";

/// A [`Reply`] that is still owed. Dropped without an answer (the engine died, or was shut down), it answers with a server failure.
pub(crate) struct PendingReply(Option<Reply>);

impl PendingReply {
    pub(crate) fn new(reply: Reply) -> Self {
        PendingReply(Some(reply))
    }

    pub(crate) fn send(mut self, outcome: Outcome) {
        self.deliver(outcome);
    }

    pub(crate) fn fail_user(self, message: impl Into<String>) {
        self.send(Err(Failure::User(message.into())));
    }

    pub(crate) fn fail_server(self, message: impl Into<String>) {
        self.send(Err(Failure::Server(message.into())));
    }

    /// A caller's closure that panics must not take the engine, and everyone else's requests, with it.
    fn deliver(&mut self, outcome: Outcome) {
        let Some(reply) = self.0.take() else { return };
        if catch_unwind(AssertUnwindSafe(|| reply(outcome))).is_err() {
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
        PendingReply::new(Box::new(move |o| tx.send(o).unwrap())).send(Ok(Response::Freed));
        assert!(matches!(rx.recv(), Ok(Ok(Response::Freed))));
        assert!(rx.recv().is_err(), "the closure was dropped after its one call");
    }

    #[test]
    fn a_dropped_reply_fails_with_a_server_error() {
        let (tx, rx) = channel();
        drop(PendingReply::new(Box::new(move |o| tx.send(o).unwrap())));
        assert!(matches!(rx.recv(), Ok(Err(Failure::Server(_)))));
    }

    #[test]
    fn a_panicking_closure_is_contained() {
        PendingReply::new(Box::new(|_| panic!("expected in this test"))).send(Ok(Response::Freed));
    }
}
