//! Reads and writes checkpoints on a thread of its own, so that a long write never delays a step.
//!
//! Jobs run one after another in the order they were given: a load sees what an earlier save of the same directory wrote.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use crate::api::{Failure, Response, SaveTarget};
use crate::checkpoint::{self, BaseModel};
use crate::reply::PendingReply;
use crate::tenant::LearnerState;

/// Jobs that may wait. Each save holds the adapter it captured.
const JOBS_MAX: usize = 64;

/// Whom a loaded checkpoint is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ticket {
    /// The tenant with this uid.
    Tenant(u64),
    /// The sampling weights with this uid.
    Sampler(u64),
}

/// What the disk thread can be asked.
enum DiskJob {
    Save { state: LearnerState, target: SaveTarget, reply: PendingReply },
    Load { dir: PathBuf, with_optimizer: bool, ticket: Ticket },
}

/// Hands the engine what was loaded.
pub(crate) type Deliver = Box<dyn Fn(Ticket, Result<LearnerState, Failure>) + Send>;

/// The disk thread. Dropped, it finishes the jobs it has.
pub(crate) struct Disk {
    jobs: Option<SyncSender<DiskJob>>,
    thread: Option<JoinHandle<()>>,
}

impl Disk {
    pub(crate) fn start(base: BaseModel, deliver: Deliver) -> std::io::Result<Self> {
        let (jobs, queue) = sync_channel(JOBS_MAX);
        let thread = std::thread::Builder::new().name("strata-disk".into()).spawn(move || run(&queue, &base, &deliver))?;
        Ok(Disk { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Queues a save, which answers the request itself.
    pub(crate) fn save(&self, state: LearnerState, target: SaveTarget, reply: PendingReply) {
        if let Err((DiskJob::Save { reply, .. }, failure)) = self.submit(DiskJob::Save { state, target, reply }).map_err(|e| *e)
        {
            reply.send(Err(failure));
        }
    }

    /// Queues a load; the engine gets what was loaded under `ticket`.
    pub(crate) fn load(&self, dir: PathBuf, with_optimizer: bool, ticket: Ticket) -> Result<(), Failure> {
        self.submit(DiskJob::Load { dir, with_optimizer, ticket }).map_err(|e| e.1)
    }

    fn submit(&self, job: DiskJob) -> Result<(), Box<(DiskJob, Failure)>> {
        let jobs = self.jobs.as_ref().expect("the sender is there until the drop");
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) => {
                Box::new((job, Failure::Server(format!("{JOBS_MAX} checkpoints wait for the disk already"))))
            }
            TrySendError::Disconnected(job) => Box::new((job, Failure::Server("the disk thread has stopped".into()))),
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a job was caught and answered where it happened.
            let _ = thread.join();
        }
    }
}

fn run(queue: &Receiver<DiskJob>, base: &BaseModel, deliver: &Deliver) {
    for job in queue {
        match job {
            DiskJob::Save { state, target, reply } => {
                let outcome = guard(|| checkpoint::write(base, &target, &state));
                // What was captured is let go before the answer: whoever steps next need not copy it.
                drop(state);
                reply.send(outcome.map(|size_bytes| Response::Saved { dir: target.dir, size_bytes }));
            }
            DiskJob::Load { dir, with_optimizer, ticket } => {
                deliver(ticket, guard(|| checkpoint::read(base, &dir, with_optimizer)));
            }
        }
    }
}

fn guard<T>(job: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(job))
        .unwrap_or_else(|_| Err(Failure::Server("reading or writing a checkpoint panicked".into())))
}
