//! What a simulation asks of the keeper after each of its steps.

use std::collections::BTreeSet;

use super::{Intake, Op, QueuedOp, SamplerEntry};
use crate::api::{ModelId, RequestId};

impl Intake {
    /// Bytes of adapters that outlive their names.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.lock().kept.values().filter(|kept| kept.within.is_none()).map(|kept| kept.bytes).sum()
    }

    /// Bytes of adapters that are accounted for; `None` while something that is given up waits for the engine to hear of it.
    pub(crate) fn adapter_bytes(&self) -> Option<u64> {
        let inner = self.lock();
        inner.controls.is_empty().then_some(inner.adapter_bytes_used)
    }

    /// What is kept although nothing is open.
    pub(crate) fn leftovers(&self) -> Result<(), String> {
        let inner = self.lock();
        let tables = (inner.controls.len(), inner.models.len(), inner.ready.len(), inner.waiting.len(), inner.samplers.len());
        if tables != (0, 0, 0, 0, 0) || !inner.kept.is_empty() || inner.adapter_bytes_used != 0 {
            return Err(format!(
                "{tables:?} controls, models, ready, waiting, samplers, and {} bytes are kept",
                inner.adapter_bytes_used
            ));
        }
        Ok(())
    }

    /// Requests that wait here.
    pub(crate) fn open_requests(&self) -> usize {
        let inner = self.lock();
        inner.controls.len() + inner.models.values().map(|q| q.waiting.len()).sum::<usize>()
    }

    /// What is wrong with the books, if anything. The simulation asks after every step.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let inner = self.lock();
        let models: u64 = inner.models.values().map(|q| q.bytes.training).sum();
        let samplers: u64 = inner.samplers.values().map(|s| s.bytes).sum();
        let kept: u64 = inner.kept.values().filter(|kept| kept.within.is_none()).map(|kept| kept.bytes).sum();
        if models + samplers + kept != inner.adapter_bytes_used || inner.adapter_bytes_used > self.adapter_bytes_max {
            return Err(format!(
                "adapters take {models} + {samplers} + {kept} bytes, {} are counted",
                inner.adapter_bytes_used
            ));
        }
        let waiting: BTreeSet<&RequestId> = inner.models.values().flat_map(|q| q.waiting.values().map(|op| &op.id)).collect();
        if waiting.len() != inner.waiting.len() {
            return Err(format!("{} operations wait, {} are indexed", waiting.len(), inner.waiting.len()));
        }
        let ready: BTreeSet<&ModelId> =
            inner.models.iter().filter(|(_, q)| q.waiting.contains_key(&q.next)).map(|(id, _)| id).collect();
        if ready != inner.ready.iter().collect() {
            return Err(format!("{ready:?} are ready, {:?} are noted", inner.ready));
        }
        for (id, entry) in &inner.samplers {
            let waits = |op: &&QueuedOp| matches!(&op.op, Op::Snapshot { entry: uid, .. } if *uid == entry.uid);
            let pending = inner.models.values().flat_map(|q| q.waiting.values()).filter(waits).count();
            if pending != entry.pending || (pending == 0 && !entry.made) {
                return Err(format!("sampling weights {id}: {pending} snapshots wait, {} are counted", entry.pending));
            }
        }
        for (id, entry) in &inner.samplers {
            let Some(from) = &entry.from else { continue };
            let same = |other: &&SamplerEntry| other.from.as_ref().is_some_and(|other| other.is_same(from));
            let with_room = inner.samplers.values().filter(same).filter(|entry| entry.bytes > 0).count();
            if with_room > 1 || (with_room == 0 && entry.bytes == 0) {
                return Err(format!("sampling weights {id} have the room of {with_room} names"));
            }
        }
        if self.ledger.used() > self.ledger.total() {
            return Err(format!("{} of {} bytes are charged", self.ledger.used(), self.ledger.total()));
        }
        Ok(())
    }
}
