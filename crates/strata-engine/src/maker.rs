//! Draws the first weights of adapters on a thread of its own: of a large model they are some hundred million numbers, and nobody's step waits for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use strata_model::Model;

use crate::api::{Failure, LoraSpec};
use crate::disk::{Deliver, Done};
use crate::learner::{self, LearnerState};

/// The thread. It ends when this is dropped, and what it has not begun comes to nothing.
pub(crate) struct Maker {
    jobs: Sender<(u64, LoraSpec)>,
}

impl Maker {
    pub(crate) fn start(model: Arc<Model>, deliver: Deliver) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<(u64, LoraSpec)>();
        let work = move || {
            for (ticket, lora) in queue {
                let made = catch_unwind(AssertUnwindSafe(|| make(&model, &lora)));
                let failed = |_| Err(Failure::Server("making the adapter panicked; the server log says why".into()));
                deliver(Done::Made { ticket, result: made.unwrap_or_else(failed) });
            }
        };
        std::thread::Builder::new().name("strata-make".into()).spawn(work)?;
        Ok(Maker { jobs })
    }

    /// Queues an adapter.
    pub(crate) fn make(&self, ticket: u64, lora: LoraSpec) {
        self.jobs.send((ticket, lora)).expect("the thread ends only when the sender is dropped");
    }
}

fn make(model: &Model, lora: &LoraSpec) -> Result<LearnerState, Failure> {
    let config = learner::config_of(lora, model.lora_modules()).map_err(Failure::User)?;
    LearnerState::fresh(model, config, lora.seed)
}
