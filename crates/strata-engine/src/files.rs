//! Checkpoints that wait to be written or read: who goes next, and who is told.
//!
//! A save holds the state it captured until it is written. Sessions take turns by the bytes they have had; a slow or hanging file delays its own
//! session, and others only by its share of the few places there are.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::api::{CheckpointSource, Client, Failure, LoraSpec, SaveTarget};
use crate::fair::{Fair, Work};
use crate::reply::PendingReply;

/// Saves that the storage has at a time: one being written, one to follow.
const SAVES_MAX: usize = 2;
/// Loads that the storage has at a time.
const LOADS_MAX: usize = 4;
/// Loads of one session that the storage has at a time.
const LOADS_PER_SESSION_MAX: usize = 2;

/// Where checkpoints are written and read, beside the engine thread. Jobs end in any order and are collected with [`Storage::poll`].
pub(crate) trait Storage<S> {
    fn save(&mut self, ticket: u64, state: S, target: SaveTarget);
    fn load(&mut self, load: Load);
    /// Draws the first weights of an adapter, which needs no disk and none of the device's time, but a thread.
    fn make(&mut self, ticket: u64, lora: LoraSpec);
    /// Something that has ended, if anything has.
    fn poll(&mut self) -> Option<Done<S>>;
}

/// A job of a [`Storage`] that has ended.
pub(crate) enum Done<S> {
    Saved {
        ticket: u64,
        /// Bytes of the files.
        result: Result<u64, Failure>,
    },
    Loaded {
        ticket: u64,
        result: Result<S, Failure>,
    },
    Made {
        ticket: u64,
        result: Result<S, Failure>,
    },
}

/// A save that was captured.
pub(crate) struct Save<S> {
    pub(crate) ticket: u64,
    pub(crate) state: S,
    pub(crate) target: SaveTarget,
    /// What it takes of memory.
    pub(crate) bytes: u64,
}

/// Whom a save is for.
pub(crate) struct SaveFor {
    pub(crate) dir: std::path::PathBuf,
    pub(crate) lora: LoraSpec,
    pub(crate) reply: PendingReply,
    /// What is given back when it is written; 0 if its model waits for it instead.
    pub(crate) captured_bytes: u64,
}

/// A load that was asked for.
pub(crate) struct Load {
    pub(crate) ticket: u64,
    pub(crate) source: CheckpointSource,
    pub(crate) with_optimizer: bool,
    /// What the model was made with whose adapter it replaces; `None` if it makes one.
    pub(crate) replaces: Option<LoraSpec>,
    /// What it may take of memory: a checkpoint that takes more is refused before it is read.
    pub(crate) bytes_max: u64,
    /// What nothing else is set aside for of that, until it is in its place.
    pub(crate) beside_bytes: u64,
}

/// Whom a load is for.
pub(crate) enum LoadFor {
    /// The tenant of this uid, made by it or given new weights.
    Tenant { uid: u64 },
    /// Sampling weights, whoever waits for them, with room for an adapter of this shape.
    Sampler { lora: LoraSpec },
}

/// The queues in front of a storage.
pub(crate) struct Files<S> {
    saves: BTreeMap<Client, VecDeque<Save<S>>>,
    loads: BTreeMap<Client, VecDeque<Load>>,
    turns: Fair,
    /// Sessions that are over and have saves that wait.
    over: BTreeSet<Client>,
    saving: BTreeMap<u64, SaveFor>,
    /// Tickets that the storage has.
    writing: Vec<u64>,
    loading: BTreeMap<u64, (Client, LoadFor)>,
    reading: Vec<Reading>,
    makes: BTreeMap<Client, VecDeque<(u64, LoraSpec)>>,
    /// The tenants, by uid, that fresh adapters are for.
    making: BTreeMap<u64, u64>,
    /// What the storage makes. One at a time: another begins no sooner for being asked for, and a session waits for one of each other session at most.
    drawing: Option<u64>,
    /// Of states that wait to be written, and of checkpoints that are read beside what they are for.
    captured_bytes: u64,
    captured_bytes_max: u64,
    /// Whether a load waits for room: what is saved then keeps what it has in the place of a copy.
    load_waits: bool,
}

/// What the storage reads.
struct Reading {
    ticket: u64,
    client: Client,
    beside_bytes: u64,
}

impl<S> Files<S> {
    pub(crate) fn new(captured_bytes_max: u64) -> Self {
        Files {
            saves: BTreeMap::new(),
            loads: BTreeMap::new(),
            turns: Fair::default(),
            over: BTreeSet::new(),
            saving: BTreeMap::new(),
            writing: Vec::new(),
            loading: BTreeMap::new(),
            reading: Vec::new(),
            makes: BTreeMap::new(),
            making: BTreeMap::new(),
            drawing: None,
            captured_bytes: 0,
            captured_bytes_max,
            load_waits: false,
        }
    }

    /// Takes room for a state that is captured, if there is any.
    pub(crate) fn try_capture(&mut self, bytes: u64) -> bool {
        let fits = !self.load_waits && self.captured_bytes + bytes <= self.captured_bytes_max;
        if fits {
            self.captured_bytes += bytes;
        }
        fits
    }

    pub(crate) fn save(&mut self, client: &Client, save: Save<S>, save_for: SaveFor) {
        self.saving.insert(save.ticket, save_for);
        self.saves.entry(client.clone()).or_default().push_back(save);
    }

    pub(crate) fn load(&mut self, client: &Client, load: Load, load_for: LoadFor) {
        self.loading.insert(load.ticket, (client.clone(), load_for));
        self.loads.entry(client.clone()).or_default().push_back(load);
    }

    /// Has a fresh adapter made for the tenant of this uid.
    pub(crate) fn make(&mut self, client: &Client, ticket: u64, lora: LoraSpec, uid: u64) {
        self.making.insert(ticket, uid);
        self.makes.entry(client.clone()).or_default().push_back((ticket, lora));
    }

    /// Gives the storage what it has room for.
    pub(crate) fn dispatch(&mut self, storage: &mut impl Storage<S>) {
        while self.writing.len() < SAVES_MAX {
            let next = self.saves.keys().min_by_key(|c| self.turns.standing(c, Work::Training)).cloned();
            let Some(client) = next else { break };
            let Some(save) = pop(&mut self.saves, &client) else { break };
            self.turns.serve(&client, Work::Training);
            // Bytes stand for time: only their ratio matters.
            self.turns.charge(&client, Work::Training, Duration::from_nanos(save.bytes.max(1)));
            if !self.saves.contains_key(&client) && self.over.remove(&client) {
                self.turns.forget(&client);
            }
            self.writing.push(save.ticket);
            storage.save(save.ticket, save.state, save.target);
        }
        self.load_waits = false;
        while self.reading.len() < LOADS_MAX {
            let beside = |c: &Client| self.loads[c].front().map_or(0, |load| load.beside_bytes);
            let may = |c: &&Client| {
                let reads = self.reading.iter().filter(|other| other.client == **c).count();
                // What takes no room passes by what waits for it; nothing else does.
                reads < LOADS_PER_SESSION_MAX && (!self.load_waits || beside(c) == 0)
            };
            let next = self.loads.keys().filter(may).min_by_key(|c| self.turns.standing(c, Work::Sampling)).cloned();
            let Some(client) = next else { break };
            let beside_bytes = beside(&client);
            // One that is larger than all the room there is takes it alone.
            if self.captured_bytes > 0 && self.captured_bytes + beside_bytes > self.captured_bytes_max && beside_bytes > 0 {
                self.load_waits = true;
                continue;
            }
            let Some(load) = pop(&mut self.loads, &client) else { break };
            self.turns.serve(&client, Work::Sampling);
            self.turns.charge(&client, Work::Sampling, Duration::from_millis(1));
            self.captured_bytes += beside_bytes;
            self.reading.push(Reading { ticket: load.ticket, client, beside_bytes });
            storage.load(load);
        }
        if self.drawing.is_none() {
            let next = self.makes.keys().min_by_key(|c| self.turns.standing(c, Work::Sampling)).cloned();
            let Some(client) = next else { return };
            let Some((ticket, lora)) = pop(&mut self.makes, &client) else { return };
            self.turns.serve(&client, Work::Sampling);
            self.turns.charge(&client, Work::Sampling, Duration::from_millis(1));
            self.drawing = Some(ticket);
            storage.make(ticket, lora);
        }
    }

    /// The tenant that an adapter was made for; `None` if nobody wants it any more.
    pub(crate) fn made(&mut self, ticket: u64) -> Option<u64> {
        self.drawing = self.drawing.filter(|other| *other != ticket);
        self.making.remove(&ticket)
    }

    /// Forgets whom a fresh adapter is for. Whether it has not begun, and does not: what is being made takes its memory until it is.
    pub(crate) fn abandon_make(&mut self, ticket: u64) -> bool {
        self.making.remove(&ticket);
        for queue in self.makes.values_mut() {
            queue.retain(|(other, _)| *other != ticket);
        }
        self.makes.retain(|_, queue| !queue.is_empty());
        self.drawing != Some(ticket)
    }

    /// Whom a save that has ended was for.
    pub(crate) fn saved(&mut self, ticket: u64) -> Option<SaveFor> {
        self.writing.retain(|&other| other != ticket);
        let save_for = self.saving.remove(&ticket)?;
        self.captured_bytes -= save_for.captured_bytes;
        Some(save_for)
    }

    /// Whom a load that has ended was for; `None` if nobody wants it any more.
    pub(crate) fn loaded(&mut self, ticket: u64) -> Option<(Client, LoadFor)> {
        if let Some(at) = self.reading.iter().position(|other| other.ticket == ticket) {
            self.captured_bytes -= self.reading.swap_remove(at).beside_bytes;
        }
        self.loading.remove(&ticket)
    }

    /// In whose turn something is read, or was until now.
    pub(crate) fn reader(&self, ticket: u64) -> Option<&Client> {
        self.loading.get(&ticket).map(|(client, _)| client)
    }

    /// Forgets whom a load is for. Whether it has not begun, and does not: what is being read takes its memory until it is.
    pub(crate) fn abandon_load(&mut self, ticket: u64) -> bool {
        self.loading.remove(&ticket);
        for queue in self.loads.values_mut() {
            queue.retain(|load| load.ticket != ticket);
        }
        self.loads.retain(|_, queue| !queue.is_empty());
        self.reading.iter().all(|other| other.ticket != ticket)
    }

    /// Forgets a session's shares, once its saves have had theirs.
    pub(crate) fn forget(&mut self, client: &Client) {
        self.turns.forget(client);
        if self.saves.contains_key(client) {
            self.over.insert(client.clone());
        }
    }

    /// Saves that are not written yet.
    pub(crate) fn unwritten(&self) -> usize {
        self.saving.len()
    }
}

#[cfg(any(test, feature = "simulation"))]
impl<S> Files<S> {
    /// Whether nothing waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.saving.is_empty() && self.loading.is_empty() && self.making.is_empty()
    }

    /// What is wrong with the books, if anything.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let captured: u64 = self.saving.values().map(|s| s.captured_bytes).sum();
        let beside: Vec<u64> = self.reading.iter().map(|r| r.beside_bytes).filter(|bytes| *bytes > 0).collect();
        let held = captured + beside.iter().sum::<u64>();
        let is_alone = captured == 0 && beside.len() == 1;
        if held != self.captured_bytes || (held > self.captured_bytes_max && !is_alone) {
            return Err(format!("saves hold {captured} bytes and loads {beside:?}, {} are counted", self.captured_bytes));
        }
        Ok(())
    }

    /// Bytes of states that were captured and are not written, and of what is read.
    pub(crate) fn captured_bytes(&self) -> u64 {
        self.captured_bytes
    }

    /// Sessions whose shares are remembered.
    pub(crate) fn sessions(&self) -> usize {
        self.turns.sessions()
    }
}

fn pop<T>(queues: &mut BTreeMap<Client, VecDeque<T>>, client: &Client) -> Option<T> {
    let queue = queues.get_mut(client)?;
    let item = queue.pop_front();
    if queue.is_empty() {
        queues.remove(client);
    }
    item
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A storage that takes everything and ends nothing.
    #[derive(Default)]
    struct Taking {
        loads: Vec<u64>,
    }

    impl Storage<()> for Taking {
        fn save(&mut self, _: u64, (): (), _: SaveTarget) {}

        fn load(&mut self, load: Load) {
            self.loads.push(load.ticket);
        }

        fn make(&mut self, _: u64, _: LoraSpec) {}

        fn poll(&mut self) -> Option<Done<()>> {
            None
        }
    }

    fn load(files: &mut Files<()>, session: &str, ticket: u64, beside_bytes: u64) {
        let client = Client { owner: "o".into(), session: session.into() };
        let source = CheckpointSource { dir: "d".into(), name: "n".into(), save_id: None };
        let load = Load { ticket, source, with_optimizer: true, replaces: None, bytes_max: beside_bytes, beside_bytes };
        files.load(&client, load, LoadFor::Tenant { uid: ticket });
    }

    #[test]
    fn loads_wait_for_room_and_one_that_is_larger_than_all_of_it_has_it_alone() {
        let (mut files, mut storage) = (Files::new(100), Taking::default());
        assert!(files.try_capture(50));
        load(&mut files, "a", 1, 50);
        load(&mut files, "b", 2, 10);
        load(&mut files, "c", 3, 0);
        files.dispatch(&mut storage);
        assert_eq!(storage.loads, [1, 3], "the second has no room, and the third needs none");
        load(&mut files, "f", 6, 1);
        files.dispatch(&mut storage);
        assert_eq!(storage.loads, [1, 3], "and what needs some does not pass by");
        assert!(!files.try_capture(0), "nothing that is saved takes what a load waits for");
        files.loaded(1);
        files.dispatch(&mut storage);
        assert_eq!(storage.loads, [1, 3, 2, 6]);
        assert!(files.try_capture(39));
        assert_eq!(files.captured_bytes(), 100);

        load(&mut files, "d", 4, 1000);
        files.dispatch(&mut storage);
        assert_eq!(storage.loads.len(), 4);
        assert!([2, 3, 6].into_iter().all(|ticket| files.loaded(ticket).is_some()));
        files.captured_bytes -= 89;
        files.dispatch(&mut storage);
        assert_eq!(storage.loads, [1, 3, 2, 6, 4], "alone");
        load(&mut files, "e", 5, 1);
        files.dispatch(&mut storage);
        assert_eq!(storage.loads.len(), 5);
        // Given up, it takes its memory until it is read; what has not begun takes none.
        assert!(!files.abandon_load(4) && files.abandon_load(5));
        assert_eq!(files.captured_bytes(), 1000);
        assert!(files.loaded(4).is_none());
        assert_eq!(files.captured_bytes(), 0);
    }
}
