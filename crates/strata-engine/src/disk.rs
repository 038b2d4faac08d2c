//! Reads and writes checkpoints on threads of their own, so that a slow disk never delays a step.
//!
//! This runs what it is given; who may give what, and when, is the engine's to decide. Saves run one after another on one thread, and are
//! finished even when the engine is gone. Each load has a thread to itself, a few at a time: one that hangs, on a network drive that went
//! away, holds up neither the saves nor the other loads. After a while it is given up and its thread is left behind; once all threads are,
//! loads fail at once. A load sees every save that was acknowledged before it was asked for.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::api::{Failure, SaveTarget};
use crate::checkpoint::{self, BaseModel};
use crate::files::Load;
use crate::learner::LearnerState;

/// Loads that run at a time, those that hang included.
const READERS_MAX: usize = 4;
/// How long one load may take.
const LOAD_TIME_MAX: Duration = Duration::from_secs(300);
/// How long a load may wait for one of the readers, when all are at work.
const LOAD_WAIT_MAX: Duration = Duration::from_secs(600);

/// A checkpoint to write.
pub(crate) struct SaveJob {
    /// Comes back with the outcome.
    pub(crate) ticket: u64,
    pub(crate) state: LearnerState,
    pub(crate) target: SaveTarget,
}

/// How a job ended. Each job ends once.
pub(crate) type Done = crate::files::Done<LearnerState>;

/// Takes what is done, on one of the threads here: it must be quick and must not block.
pub(crate) type Deliver = Arc<dyn Fn(Done) + Send + Sync>;

type Write = dyn Fn(&SaveTarget, &LearnerState) -> Result<u64, Failure> + Send + Sync;
type Read = dyn Fn(&Load) -> Result<LearnerState, Failure> + Send + Sync;

/// The threads of the disk. Dropped, it finishes the saves it has; loads then come to nothing.
pub(crate) struct Disk {
    saves: Option<Sender<SaveJob>>,
    writer: Option<JoinHandle<()>>,
    loads: Sender<LoadEvent>,
}

struct LoadLimits {
    readers_max: usize,
    time_max: Duration,
    wait_max: Duration,
}

impl Disk {
    pub(crate) fn start(base: BaseModel, deliver: Deliver) -> std::io::Result<Self> {
        let base = Arc::new(base);
        let for_reading = base.clone();
        let write = move |target: &SaveTarget, state: &LearnerState| checkpoint::write(&base, target, state);
        let read = move |load: &Load| checkpoint::read(&for_reading, load);
        let limits = LoadLimits { readers_max: READERS_MAX, time_max: LOAD_TIME_MAX, wait_max: LOAD_WAIT_MAX };
        Self::start_with(Arc::new(write), Arc::new(read), limits, deliver)
    }

    fn start_with(write: Arc<Write>, read: Arc<Read>, limits: LoadLimits, deliver: Deliver) -> std::io::Result<Self> {
        let (saves, save_queue) = channel();
        let saved = deliver.clone();
        let writer =
            std::thread::Builder::new().name("strata-save".into()).spawn(move || run_saves(&save_queue, &*write, &*saved))?;
        let (loads, events) = channel();
        let loader = Loader {
            read,
            limits,
            deliver,
            events: loads.clone(),
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
            readers_started: 0,
            given_up: 0,
        };
        std::thread::Builder::new().name("strata-loads".into()).spawn(move || loader.run(&events))?;
        Ok(Disk { saves: Some(saves), writer: Some(writer), loads })
    }

    /// Queues a save.
    pub(crate) fn save(&self, job: SaveJob) {
        let saves = self.saves.as_ref().expect("the sender is there until the drop");
        saves.send(job).expect("the writer ends only when the sender is dropped");
    }

    /// Queues a load.
    pub(crate) fn load(&self, job: Load) {
        self.loads.send(LoadEvent::Asked(job)).expect("the loader ends only when it is told to");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.loads.send(LoadEvent::Stop);
        self.saves = None;
        if let Some(writer) = self.writer.take() {
            // A panic of a job was caught and answered where it happened.
            let _ = writer.join();
        }
    }
}

fn run_saves(queue: &Receiver<SaveJob>, write: &Write, deliver: &(dyn Fn(Done) + Send + Sync)) {
    for SaveJob { ticket, state, target } in queue {
        let result = guard(&target.name, || write(&target, &state));
        // What was captured is let go before the answer: whoever steps next need not copy it.
        drop(state);
        deliver(Done::Saved { ticket, result });
    }
}

enum LoadEvent {
    Asked(Load),
    /// A reader, by its number, is done, in time or not.
    Read(u64, Result<LearnerState, Failure>),
    Stop,
}

/// A thread that reads one checkpoint.
struct Reader {
    ticket: u64,
    /// The checkpoint.
    name: String,
    /// When it is given up.
    deadline: Instant,
}

/// Gives loads to readers and watches the time. Never touches a disk itself, and so cannot hang.
struct Loader {
    read: Arc<Read>,
    limits: LoadLimits,
    deliver: Deliver,
    events: Sender<LoadEvent>,
    /// Loads that wait for a reader, each with the moment at which it has waited too long.
    waiting: VecDeque<(Instant, Load)>,
    /// Readers at work, by number.
    running: BTreeMap<u64, Reader>,
    readers_started: u64,
    /// Readers that never came back. One that does after all is free again.
    given_up: usize,
}

impl Loader {
    fn run(mut self, events: &Receiver<LoadEvent>) {
        loop {
            let event = match self.next_deadline() {
                Some(deadline) => events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(LoadEvent::Asked(job)) => self.waiting.push_back((Instant::now() + self.limits.wait_max, job)),
                Ok(LoadEvent::Read(number, result)) => match self.running.remove(&number) {
                    Some(reader) => (self.deliver)(Done::Loaded { ticket: reader.ticket, result }),
                    None => self.given_up -= 1,
                },
                Err(RecvTimeoutError::Timeout) => {}
                Ok(LoadEvent::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            self.give_up_what_takes_too_long(Instant::now());
            self.start_what_waits();
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.values().map(|reader| reader.deadline);
        running.chain(self.waiting.front().map(|(deadline, _)| *deadline)).min()
    }

    fn give_up_what_takes_too_long(&mut self, now: Instant) {
        let late: Vec<u64> = self.running.iter().filter(|(_, reader)| reader.deadline <= now).map(|(&n, _)| n).collect();
        for number in late {
            let Some(Reader { ticket, name, .. }) = self.running.remove(&number) else { continue };
            self.given_up += 1;
            tracing::error!(name, given_up = self.given_up, "reading a checkpoint takes too long and is given up");
            let seconds = self.limits.time_max.as_secs_f32();
            self.fail(
                ticket,
                format!("checkpoint {name} was not read within {seconds} s; the storage of this server does not answer"),
            );
        }
        while self.waiting.front().is_some_and(|(deadline, _)| *deadline <= now) {
            let Some((_, job)) = self.waiting.pop_front() else { break };
            let seconds = self.limits.wait_max.as_secs_f32();
            self.fail(
                job.ticket,
                format!("checkpoint {} waited {seconds} s to be read; the storage is too slow", job.source.name),
            );
        }
    }

    fn start_what_waits(&mut self) {
        while self.given_up >= self.limits.readers_max
            && let Some((_, job)) = self.waiting.pop_front()
        {
            let name = job.source.name;
            self.fail(job.ticket, format!("checkpoint {name} cannot be read: the storage of this server does not answer"));
        }
        while self.running.len() + self.given_up < self.limits.readers_max
            && let Some((_, job)) = self.waiting.pop_front()
        {
            self.start(job);
        }
    }

    fn start(&mut self, load: Load) {
        let (ticket, name) = (load.ticket, load.source.name.clone());
        let (read, events) = (self.read.clone(), self.events.clone());
        self.readers_started += 1;
        let number = self.readers_started;
        let reader = move || {
            let result = guard(&load.source.name, || read(&load));
            // Nobody is there any more when the engine is gone.
            let _ = events.send(LoadEvent::Read(number, result));
        };
        match std::thread::Builder::new().name("strata-load".into()).spawn(reader) {
            Ok(_) => {
                self.running.insert(number, Reader { ticket, name, deadline: Instant::now() + self.limits.time_max });
            }
            Err(error) => self.fail(ticket, format!("checkpoint {name} was not read: the system refuses a thread: {error}")),
        }
    }

    fn fail(&self, ticket: u64, message: String) {
        (self.deliver)(Done::Loaded { ticket, result: Err(Failure::Server(message)) });
    }
}

fn guard<T>(name: &str, job: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|_| {
        Err(Failure::Server(format!("reading or writing checkpoint {name} panicked; the server log says why")))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use strata_model::lora::{LoraConfig, LoraParams, ModuleSet};

    use super::*;
    use crate::api::CheckpointSource;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn state() -> LearnerState {
        let (left_out, own) = (ModuleSet::NONE, BTreeMap::new());
        let config =
            LoraConfig { rank: 1, alpha: 32.0, attention: true, mlp: false, unembed: false, embedding: false, left_out, own };
        LearnerState { config, weights: Arc::new(LoraParams { stacks: Vec::new() }), moments: None }
    }

    fn load(ticket: u64, name: &str) -> Load {
        let source = CheckpointSource { dir: name.into(), name: name.into(), save_id: None };
        Load { ticket, source, with_optimizer: false, replaces: None, bytes_max: 0, beside_bytes: 0 }
    }

    fn save(ticket: u64, name: &str) -> SaveJob {
        let target = SaveTarget {
            root: "".into(),
            dir: name.into(),
            name: name.into(),
            overwrite: false,
            metadata: serde_json::Value::Null,
            recipients: vec![],
        };
        SaveJob { ticket, state: state(), target }
    }

    /// A disk on which what is named `hangs` hangs until the sender is dropped, and what is named `panics` panics.
    fn disk(readers_max: usize, time_max: Duration) -> (Disk, Receiver<Done>, Sender<()>) {
        let (release, hangs) = channel::<()>();
        let hangs = Mutex::new(hangs);
        let act = move |name: &str| match name {
            "hangs" => drop(hangs.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv()),
            "panics" => panic!("expected in this test"),
            _ => {}
        };
        let act = Arc::new(act);
        let act_too = act.clone();
        let write = move |target: &SaveTarget, _: &LearnerState| {
            act(&target.name);
            Ok(7)
        };
        let read = move |load: &Load| {
            act_too(&load.source.name);
            Ok(state())
        };
        let (tx, done) = channel();
        let deliver = Arc::new(move |outcome| drop(tx.send(outcome)));
        let limits = LoadLimits { readers_max, time_max, wait_max: PATIENCE };
        (Disk::start_with(Arc::new(write), Arc::new(read), limits, deliver).unwrap(), done, release)
    }

    fn loaded(done: &Receiver<Done>) -> (u64, Result<(), Failure>) {
        match done.recv_timeout(PATIENCE).unwrap() {
            Done::Loaded { ticket, result } => (ticket, result.map(drop)),
            Done::Saved { .. } | Done::Made { .. } => panic!("nothing was saved"),
        }
    }

    #[test]
    fn a_reader_that_hangs_holds_up_neither_saves_nor_other_loads_and_is_given_up() {
        let (disk, done, release) = disk(2, Duration::from_millis(400));
        disk.load(load(1, "hangs"));
        disk.load(load(2, "a"));
        assert_eq!(loaded(&done), (2, Ok(())));
        disk.save(save(3, "b"));
        assert!(matches!(done.recv_timeout(PATIENCE), Ok(Done::Saved { ticket: 3, result: Ok(7) })));
        let (ticket, result) = loaded(&done);
        assert!(
            ticket == 1 && matches!(&result, Err(Failure::Server(why)) if why.contains("hangs was not read")),
            "{result:?}"
        );
        // One reader is left, and then none.
        disk.load(load(4, "c"));
        assert_eq!(loaded(&done), (4, Ok(())));
        disk.load(load(5, "hangs"));
        disk.load(load(6, "d"));
        let outcomes = [loaded(&done), loaded(&done)];
        assert!(
            outcomes.iter().all(|(_, result)| result.is_err()),
            "what waits for readers that hang fails with them: {outcomes:?}"
        );
        disk.load(load(7, "e"));
        assert!(loaded(&done).1.is_err(), "with no reader left a load fails at once");
        disk.save(save(8, "f"));
        assert!(matches!(done.recv_timeout(PATIENCE), Ok(Done::Saved { ticket: 8, result: Ok(7) })));
        // Storage that answers again is used again, and nothing is delivered twice, whoever has the ticket now.
        drop(release);
        let retry = (0..1000).find(|_| {
            disk.load(load(1, "g"));
            let (answered, result) = loaded(&done);
            assert_eq!(answered, 1);
            std::thread::sleep(Duration::from_millis(5));
            result.is_ok()
        });
        assert!(retry.is_some());
    }

    #[test]
    fn loads_beyond_the_readers_wait_their_turn() {
        let (disk, done, release) = disk(1, PATIENCE);
        disk.load(load(1, "hangs"));
        disk.load(load(2, "a"));
        assert!(done.recv_timeout(Duration::from_millis(100)).is_err());
        drop(release);
        assert_eq!((loaded(&done), loaded(&done)), ((1, Ok(())), (2, Ok(()))));
    }

    #[test]
    fn a_panic_is_the_failure_of_its_job_alone() {
        let (disk, done, _release) = disk(1, PATIENCE);
        disk.load(load(1, "panics"));
        assert!(matches!(loaded(&done), (1, Err(Failure::Server(_)))));
        disk.load(load(2, "a"));
        assert_eq!(loaded(&done), (2, Ok(())));
        disk.save(save(3, "panics"));
        disk.save(save(4, "b"));
        assert!(matches!(done.recv_timeout(PATIENCE), Ok(Done::Saved { ticket: 3, result: Err(Failure::Server(_)) })));
        assert!(matches!(done.recv_timeout(PATIENCE), Ok(Done::Saved { ticket: 4, result: Ok(7) })));
    }

    #[test]
    fn saves_are_finished_when_the_disk_is_dropped_and_loads_are_not_waited_for() {
        let (disk, done, _release) = disk(1, PATIENCE);
        disk.load(load(1, "hangs"));
        for ticket in 2..50 {
            disk.save(save(ticket, "a"));
        }
        drop(disk);
        assert_eq!(done.try_iter().count(), 48);
    }
}
