//! A toy disk: slow, full, or hanging, as it is told. Saves are written one after the other, loads end in any order.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use crate::api::{Failure, LoraSpec, SaveTarget};
use crate::files::{Done, Load, Storage};

use super::oracle::Numbers;
use super::toy::{ADAPTER_FAULT, Content, Memory, Shared, State, bytes_of};

/// The identity of a save.
type SaveId = String;

/// What is on the disk, for those who watch it.
#[derive(Default)]
pub(super) struct Contents {
    dirs: BTreeMap<PathBuf, SaveId>,
    /// Everything that was ever written.
    pub(super) written: HashMap<SaveId, Content>,
}

pub(super) struct Disk {
    shared: Rc<Shared>,
    contents: Rc<RefCell<Contents>>,
    saves: VecDeque<(Duration, u64, State, SaveTarget)>,
    /// What is being read has its memory from the start.
    loads: Vec<(Duration, Load, Memory)>,
    /// What is being made has its memory from the start.
    makes: Vec<(Duration, u64, Result<State, Failure>)>,
}

impl Disk {
    pub(super) fn new(shared: Rc<Shared>, contents: Rc<RefCell<Contents>>) -> Self {
        Disk { shared, contents, saves: VecDeque::new(), loads: Vec::new(), makes: Vec::new() }
    }

    /// When something ends next, if anything runs.
    pub(super) fn next_end(&self) -> Option<Duration> {
        let loads = self.loads.iter().map(|l| l.0);
        self.saves.front().map(|s| s.0).into_iter().chain(loads).chain(self.makes.iter().map(|m| m.0)).min()
    }

    fn delay(&self) -> Duration {
        let slowest = if self.shared.chance(self.shared.faults.get().disk) { 300_000 } else { 3000 };
        Duration::from_micros(self.shared.rng.borrow_mut().below(slowest))
    }

    fn write(&self, state: &State, target: SaveTarget) -> Result<u64, Failure> {
        if self.shared.chance(self.shared.faults.get().disk) {
            return Err(Failure::Server("toy disk: it is full".into()));
        }
        let contents = &mut *self.contents.borrow_mut();
        if contents.dirs.contains_key(&target.dir) && !target.overwrite {
            return Err(Failure::User("toy disk: the directory exists".into()));
        }
        let id = target.metadata["save_id"].as_str().unwrap_or_default().to_string();
        contents.dirs.insert(target.dir, id.clone());
        contents.written.insert(id, state.content());
        Ok(1)
    }

    fn fresh(&self, lora: &LoraSpec) -> Result<State, Failure> {
        if self.shared.chance(self.shared.faults.get().adapter) {
            return Err(Failure::Server(ADAPTER_FAULT.into()));
        }
        let content = Content { rank: lora.rank, weights: Numbers::fresh(lora).weights, moments: None };
        Ok(State::new(&self.shared, &content, false))
    }

    fn read(&self, Load { source, with_optimizer, bytes_max, .. }: &Load) -> Result<State, Failure> {
        if self.shared.chance(self.shared.faults.get().disk) {
            return Err(Failure::Server("toy disk: it cannot be read".into()));
        }
        let contents = self.contents.borrow();
        match contents.dirs.get(&source.dir) {
            Some(id) if source.save_id.as_ref().is_none_or(|wanted| wanted == id) => {
                let content = &contents.written[id];
                match bytes_of(content.rank).read(*with_optimizer) <= *bytes_max {
                    true => Ok(State::new(&self.shared, content, *with_optimizer)),
                    false => Err(Failure::User("toy disk: it is of another shape".into())),
                }
            }
            _ => Err(Failure::User("toy disk: it is not there".into())),
        }
    }
}

impl Storage<State> for Disk {
    fn save(&mut self, ticket: u64, state: State, target: SaveTarget) {
        let begin = self.saves.back().map_or(Duration::ZERO, |s| s.0).max(self.shared.now.get());
        self.saves.push_back((begin + self.delay(), ticket, state, target));
    }

    fn load(&mut self, load: Load) {
        let contents = self.contents.borrow();
        let content = contents.dirs.get(&load.source.dir).map(|id| &contents.written[id]);
        let bytes = content.map_or(0, |content| bytes_of(content.rank).read(load.with_optimizer));
        // Of what takes more than it may, nothing is read.
        let memory = Memory::new(&self.shared, if bytes <= load.bytes_max { bytes } else { 0 });
        self.loads.push((self.shared.now.get() + self.delay(), load, memory));
    }

    fn make(&mut self, ticket: u64, lora: LoraSpec) {
        let end = self.shared.now.get() + self.delay();
        self.makes.push((end, ticket, self.fresh(&lora)));
    }

    fn poll(&mut self) -> Option<Done<State>> {
        let now = self.shared.now.get();
        if self.saves.front().is_some_and(|s| s.0 <= now) {
            let (_, ticket, state, target) = self.saves.pop_front()?;
            return Some(Done::Saved { ticket, result: self.write(&state, target) });
        }
        if let Some(ended) = self.makes.iter().position(|m| m.0 <= now) {
            let (_, ticket, result) = self.makes.remove(ended);
            return Some(Done::Made { ticket, result });
        }
        let ended = self.loads.iter().position(|l| l.0 <= now)?;
        let (_, load, memory) = self.loads.remove(ended);
        drop(memory);
        Some(Done::Loaded { ticket: load.ticket, result: self.read(&load) })
    }
}
