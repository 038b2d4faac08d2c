//! What is remembered of samples that are to be trained on: the tokens of each sequence and their log-probabilities, under the ids that the
//! sequences were acknowledged with.
//!
//! A record lives as long as the session that sampled it, and a day from its last use. It is charged to that session, and there is only so
//! much room for all of them: an owner's oldest goes for its next, those of the owner that has most go first where the server runs short. A
//! client that has lost one has the log-probabilities still: they were in its sample's result.
//!
//! Everything is behind one std mutex, held for map operations only. The ledger's own lock is taken within it, never the other way around.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use strata_engine::api::{Client, SampledSequence};
use strata_engine::ledger::{Charge, Ledger};

use crate::clock;
use crate::limits;

/// What one request sampled.
#[derive(Debug)]
pub struct Sampled {
    /// Tokens of its prompt, where that is known without the model.
    pub prompt_tokens: Option<usize>,
    /// Its sequences.
    pub sequences: Vec<Sequence>,
}

/// What was sampled of one sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its tokens.
    pub tokens: Box<[u32]>,
    /// Their log-probabilities.
    pub logprobs: Box<[f32]>,
}

impl Sampled {
    /// What is to be remembered of the sequences of a request.
    pub fn new(prompt_tokens: Option<usize>, sequences: Vec<SampledSequence>) -> Self {
        let sequence = |SampledSequence { tokens, logprobs, .. }: SampledSequence| Sequence {
            tokens: tokens.into(),
            logprobs: logprobs.into(),
        };
        Sampled { prompt_tokens, sequences: sequences.into_iter().map(sequence).collect() }
    }

    /// Bytes that it holds, with its places in the tables.
    fn held_bytes(&self, request_id: &str) -> u64 {
        let values: usize = self.sequences.iter().map(|s| 4 * (s.tokens.len() + s.logprobs.len())).sum();
        let sequences = self.sequences.len() * (size_of::<Sequence>() + limits::ALLOCATION_BYTES);
        limits::RECORD_BYTES + (request_id.len() + values + sequences) as u64
    }
}

/// The id of the `index`-th sequence of a request.
pub fn sequence_id(request_id: &str, index: usize) -> String {
    format!("{request_id}:{index}")
}

/// The records of all sessions.
#[derive(Default)]
pub struct Records {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<Arc<str>, Entry>,
    owners: HashMap<Arc<str>, OfOwner>,
    bytes: u64,
    uses: u64,
}

/// The records of an owner.
#[derive(Default)]
struct OfOwner {
    bytes: u64,
    /// Requests by their last use.
    order: BTreeMap<u64, Arc<str>>,
}

struct Entry {
    sampled: Arc<Sampled>,
    client: Client,
    last_used: Instant,
    use_number: u64,
    charge: Charge,
}

impl Records {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Remembers what a client's request sampled, in the place of the owner's oldest where there is no room, and of what the same request sampled before, if it was forgotten and
    /// sent again. Answers whether there is room for it at all.
    pub fn remember(&self, ledger: &Ledger, client: &Client, request_id: &str, sampled: Sampled) -> bool {
        let bytes = sampled.held_bytes(request_id);
        let bytes_max = ledger.total() / limits::RECORDS_FRACTION;
        let owner_bytes_max = bytes_max / 2;
        if bytes > owner_bytes_max {
            return false;
        }
        let mut inner = self.lock();
        inner.forget(request_id);
        while inner.owners.get(&client.owner).is_some_and(|owner| owner.bytes + bytes > owner_bytes_max) {
            inner.forget_oldest(&client.owner);
        }
        while inner.bytes + bytes > bytes_max && inner.forget_of_largest() {}
        let charge = loop {
            match ledger.charge_if_free(client, bytes) {
                Some(charge) => break charge,
                None if !inner.forget_oldest(&client.owner) => return false,
                None => {}
            }
        };
        let (id, use_number): (Arc<str>, u64) = (request_id.into(), inner.next_use());
        let owner = inner.owners.entry(client.owner.clone()).or_default();
        owner.order.insert(use_number, id.clone());
        owner.bytes += bytes;
        inner.bytes += bytes;
        let entry = Entry { sampled: Arc::new(sampled), client: client.clone(), last_used: clock::now(), use_number, charge };
        inner.entries.insert(id, entry);
        true
    }

    /// What is remembered of a sequence of an owner, with its place in the request that sampled it; that is a use of it.
    pub fn find(&self, owner: &str, sequence_id: &str) -> Option<(Arc<Sampled>, usize)> {
        let (request_id, index) = sequence_id.rsplit_once(':')?;
        let index: usize = index.parse().ok()?;
        // One spelling for each: `7` and not `+7` or `07`.
        if self::sequence_id(request_id, index) != sequence_id {
            return None;
        }
        let mut inner = self.lock();
        let use_number = inner.next_use();
        let Inner { entries, owners, .. } = &mut *inner;
        let (id, entry) = entries.get_key_value(request_id).map(|(id, _)| id.clone()).and_then(|id| {
            let entry = entries.get_mut(&id)?;
            Some((id, entry))
        })?;
        if *entry.client.owner != *owner || index >= entry.sampled.sequences.len() {
            return None;
        }
        let order = &mut owners.get_mut(&entry.client.owner)?.order;
        order.remove(&entry.use_number);
        order.insert(use_number, id);
        (entry.use_number, entry.last_used) = (use_number, clock::now());
        Some((entry.sampled.clone(), index))
    }

    /// Forgets all that a session sampled.
    pub fn forget_session(&self, session: &str) {
        self.lock().forget_where(|entry| *entry.client.session == *session);
    }

    /// Forgets what was not used for a day.
    pub fn sweep(&self, now: Instant) {
        self.lock().forget_where(|entry| now.saturating_duration_since(entry.last_used) > limits::RECORD_LIFE);
    }

    /// Gives one up where memory is short: the oldest of the owner that has most. Answers whether there was one.
    pub fn give_up(&self) -> bool {
        self.lock().forget_of_largest()
    }

    /// Bytes that records hold.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }
}

impl Inner {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    fn forget_where(&mut self, condition: impl Fn(&Entry) -> bool) {
        let over: Vec<Arc<str>> = self.entries.iter().filter(|(_, e)| condition(e)).map(|(id, _)| id.clone()).collect();
        over.iter().for_each(|id| self.forget(id));
    }

    fn forget_of_largest(&mut self) -> bool {
        let largest = self.owners.iter().max_by_key(|(_, owner)| owner.bytes).map(|(name, _)| name.clone());
        largest.is_some_and(|owner| self.forget_oldest(&owner))
    }

    fn forget_oldest(&mut self, owner: &str) -> bool {
        let oldest = self.owners.get(owner).and_then(|owner| owner.order.values().next().cloned());
        oldest.is_some_and(|id| {
            self.forget(&id);
            true
        })
    }

    fn forget(&mut self, id: &str) {
        let Some(Entry { client, use_number, charge, .. }) = self.entries.remove(id) else { return };
        self.bytes -= charge.bytes();
        if let Some(owner) = self.owners.get_mut(&client.owner) {
            owner.bytes -= charge.bytes();
            owner.order.remove(&use_number);
            if owner.order.is_empty() {
                self.owners.remove(&client.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use strata_engine::api::StopReason;

    use super::*;

    fn client(owner: &str, session: &str) -> Client {
        Client { owner: owner.into(), session: session.into() }
    }

    fn sampled(lengths: &[usize]) -> Sampled {
        let sequence = |&len: &usize| SampledSequence {
            tokens: vec![7; len],
            logprobs: vec![-0.5; len],
            topk: None,
            stop_reason: StopReason::Length,
        };
        Sampled::new(Some(3), lengths.iter().map(sequence).collect())
    }

    #[test]
    fn a_sequence_is_found_by_its_owner_under_its_own_id_alone() {
        let (records, ledger) = (Records::default(), Ledger::new(1 << 20));
        assert!(records.remember(&ledger, &client("a", "s"), "s:sample:0:1", sampled(&[2, 5])));
        let (found, index) = records.find("a", "s:sample:0:1:1").unwrap();
        assert_eq!((found.sequences[index].tokens.len(), found.prompt_tokens), (5, Some(3)));
        for (owner, id) in
            [("b", "s:sample:0:1:1"), ("a", "s:sample:0:1:2"), ("a", "s:sample:0:1:+1"), ("a", "s:sample:0:1:01")]
        {
            assert!(records.find(owner, id).is_none(), "{owner} {id}");
        }
        assert!(records.find("a", "s:sample:0:1").is_none() && records.find("a", "garbage").is_none());
    }

    #[test]
    fn records_are_charged_and_end_with_their_session_or_a_day_after_their_last_use() {
        let (records, ledger) = (Records::default(), Ledger::new(1 << 20));
        for (session, id) in [("1", "x"), ("1", "y"), ("2", "z")] {
            assert!(records.remember(&ledger, &client("a", session), id, sampled(&[100])));
        }
        assert_eq!(ledger.used(), records.bytes());
        assert!(ledger.used() > 3 * 800);
        records.forget_session("2");
        assert!(records.find("a", "z:0").is_none());
        clock::advance(limits::RECORD_LIFE / 2);
        assert!(records.find("a", "y:0").is_some());
        clock::advance(limits::RECORD_LIFE / 2 + std::time::Duration::from_secs(1));
        records.sweep(clock::now());
        assert!(records.find("a", "x:0").is_none(), "not used for a day");
        assert!(records.find("a", "y:0").is_some(), "its use made it new");
        records.forget_session("1");
        assert_eq!((ledger.used(), records.bytes(), records.lock().owners.len()), (0, 0, 0));
    }

    #[test]
    fn the_least_recently_used_of_an_owner_makes_room_for_its_next() {
        let (records, ledger) = (Records::default(), Ledger::new(128 << 10));
        let owner_max = (128 << 10) / limits::RECORDS_FRACTION / 2;
        let other = client("b", "1");
        assert!(records.remember(&ledger, &other, "other", sampled(&[10])));
        let remember = |i: usize| records.remember(&ledger, &client("a", "s"), &format!("r{i}"), sampled(&[300]));
        assert!(remember(0) && remember(1));
        for i in 2..50 {
            assert!(records.find("a", "r0:0").is_some(), "what is used stays");
            assert!(remember(i));
            assert!(records.lock().owners["a"].bytes <= owner_max);
        }
        assert!(records.find("a", "r1:0").is_none());
        assert!(records.find("b", "other:0").is_some(), "what others have stays");
        assert!(!records.remember(&ledger, &client("a", "s"), "large", sampled(&[1 << 20])), "it has no room at all");
        assert!(records.find("a", "r0:0").is_some(), "and nothing goes for it");
    }

    #[test]
    fn a_request_that_is_sampled_again_takes_its_own_place() {
        let (records, ledger) = (Records::default(), Ledger::new(1 << 20));
        let client = client("a", "s");
        assert!(records.remember(&ledger, &client, "again", sampled(&[10])));
        assert!(records.remember(&ledger, &client, "again", sampled(&[20, 20])));
        assert_eq!(ledger.used(), records.bytes());
        assert_eq!(records.find("a", "again:1").unwrap().0.sequences[1].tokens.len(), 20);
        assert_eq!(records.lock().owners["a"].order.len(), 1);
        assert!(records.give_up() && !records.give_up(), "what is gone is not given up again and again");
        assert_eq!((ledger.used(), records.bytes(), records.lock().owners.len()), (0, 0, 0));
    }

    #[test]
    fn where_memory_is_short_those_go_first_who_have_most() {
        let (records, ledger) = (Records::default(), Ledger::new(1 << 20));
        assert!(records.remember(&ledger, &client("a", "s"), "small", sampled(&[10])));
        assert!(records.remember(&ledger, &client("b", "s"), "large", sampled(&[1000])));
        assert!(records.give_up());
        assert!(records.find("b", "large:0").is_none() && records.find("a", "small:0").is_some());
        assert!(records.give_up() && !records.give_up());
        assert_eq!(ledger.used(), 0);
        // Records displace nothing else: where others have all the room, there is none for them.
        let full: Vec<Charge> = (0..100).filter_map(|o| ledger.charge(&client(&o.to_string(), "s"), 100 << 10).ok()).collect();
        let full: Vec<Charge> = full
            .into_iter()
            .chain((0..10_000).filter_map(|o| ledger.charge(&client(&format!("x{o}"), "s"), 100).ok()))
            .collect();
        assert!(!records.remember(&ledger, &client("a", "s"), "late", sampled(&[10])));
        drop(full);
    }
}
