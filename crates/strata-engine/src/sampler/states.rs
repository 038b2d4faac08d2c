//! Who owns which state of the cache, and which states hold what a prefix left behind.
//!
//! A sequence has a state of its own from its first token on, because every token changes it. What a prefix left behind can only be found if it was copied when a sequence was there: such
//! a copy is a snapshot. Nobody holds a snapshot. Whoever goes on from it copies it again, and it stays until a sequence needs the state; the least recently used goes first.

use std::collections::{BTreeMap, HashMap};

/// The owner of all states.
pub(crate) struct StatePool {
    /// Whether each is held by a sequence.
    held: Vec<bool>,
    free: Vec<u32>,
    /// Snapshots, the least recently used first: what prefix each is of, and where it is.
    by_age: BTreeMap<u64, (u64, u32)>,
    /// When the snapshot of a prefix was last used.
    ages: HashMap<u64, u64>,
    reserved: usize,
    now: u64,
}

impl StatePool {
    pub(crate) fn new(num_states: usize) -> Self {
        StatePool {
            held: vec![false; num_states],
            // Low numbers first: memory is touched only as states are used.
            free: (0..num_states as u32).rev().collect(),
            by_age: BTreeMap::new(),
            ages: HashMap::new(),
            reserved: 0,
            now: 0,
        }
    }

    /// States that are neither held nor promised.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.by_age.len() - self.reserved
    }

    /// Promises `count` states that are available.
    pub(crate) fn reserve(&mut self, count: usize) {
        assert!(count <= self.available(), "{count} of {} available states", self.available());
        self.reserved += count;
    }

    /// Gives back a promise of `count` states.
    pub(crate) fn unreserve(&mut self, count: usize) {
        assert!(count <= self.reserved, "{count} of {} reserved states", self.reserved);
        self.reserved -= count;
    }

    /// Takes a state that was promised. What is in it is no longer of use.
    pub(crate) fn take_reserved(&mut self) -> u32 {
        self.unreserve(1);
        let state = self.free.pop().unwrap_or_else(|| self.forget_oldest());
        assert!(!self.held[state as usize], "state {state} is in use");
        self.held[state as usize] = true;
        state
    }

    /// Lets go of a sequence's state.
    pub(crate) fn release(&mut self, state: u32) {
        assert!(self.held[state as usize], "state {state} is not held");
        self.held[state as usize] = false;
        self.free.push(state);
    }

    /// A place for a snapshot of the prefix of this id, if it has none and there is a state that is not promised.
    pub(crate) fn new_snapshot(&mut self, prefix: u64) -> Option<u32> {
        if self.available() == 0 || self.ages.contains_key(&prefix) {
            return None;
        }
        let state = self.free.pop().unwrap_or_else(|| self.forget_oldest());
        self.now += 1;
        self.ages.insert(prefix, self.now);
        self.by_age.insert(self.now, (prefix, state));
        Some(state)
    }

    /// The snapshot of a prefix, if there is one: from now on the one that was used last.
    pub(crate) fn snapshot(&mut self, prefix: u64) -> Option<u32> {
        let age = self.ages.get_mut(&prefix)?;
        let found = self.by_age.remove(age).expect("a snapshot that has an age is in its place");
        self.now += 1;
        *age = self.now;
        self.by_age.insert(self.now, found);
        Some(found.1)
    }

    /// Forgets the snapshot of a prefix, if there is one.
    pub(crate) fn forget(&mut self, prefix: u64) {
        if let Some((_, state)) = self.ages.remove(&prefix).and_then(|age| self.by_age.remove(&age)) {
            self.free.push(state);
        }
    }

    fn forget_oldest(&mut self) -> u32 {
        let (_, (prefix, state)) = self.by_age.pop_first().expect("a reserved state is free or a snapshot");
        self.ages.remove(&prefix);
        state
    }

    /// States that nobody holds and that hold nothing.
    pub(crate) fn free_states(&self) -> &[u32] {
        &self.free
    }

    /// Whether every state is free or a snapshot, and none is promised.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn is_unused(&self) -> bool {
        self.reserved == 0 && self.available() == self.held.len()
    }

    /// Compares the books with the states that sequences hold.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn audit(&self, holders: &[u32], promised: usize) -> Result<(), String> {
        for (state, &is_held) in (0u32..).zip(&self.held) {
            let snapshots = self.by_age.values().filter(|(_, at)| *at == state).count();
            let holders = holders.iter().filter(|held| **held == state).count();
            let places = holders + snapshots + usize::from(self.free.contains(&state));
            if places != 1 || (holders == 1) != is_held {
                return Err(format!(
                    "state {state} is in {places} places, held by {holders}, of which the books say {is_held}"
                ));
            }
        }
        let aged = |(prefix, age): (&u64, &u64)| self.by_age.get(age).is_some_and(|(of, _)| of == prefix);
        if self.ages.len() != self.by_age.len() || !self.ages.iter().all(aged) {
            return Err("the ages of snapshots are not those of their places".into());
        }
        if promised != self.reserved || self.reserved > self.free.len() + self.by_age.len() {
            let there = self.free.len() + self.by_age.len();
            return Err(format!("{promised} states are promised, {} are counted, {there} are there", self.reserved));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut StatePool) -> u32 {
        pool.reserve(1);
        pool.take_reserved()
    }

    #[test]
    fn a_snapshot_is_found_until_a_sequence_needs_its_state() {
        let mut pool = StatePool::new(2);
        let at = pool.new_snapshot(7).unwrap();
        assert_eq!((pool.snapshot(7), pool.snapshot(8), pool.available()), (Some(at), None, 2));
        let held = take(&mut pool);
        assert_ne!(held, at, "a free state goes first");
        assert_eq!((take(&mut pool), pool.snapshot(7), pool.available()), (at, None, 0));
        pool.release(at);
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn the_least_recently_used_snapshot_gives_way() {
        let mut pool = StatePool::new(2);
        let (a, b) = (pool.new_snapshot(1).unwrap(), pool.new_snapshot(2).unwrap());
        assert_eq!(pool.snapshot(1), Some(a));
        assert_eq!(pool.new_snapshot(3), Some(b), "that of 2 was used before that of 1");
        assert_eq!((pool.snapshot(1), pool.snapshot(2), pool.snapshot(3)), (Some(a), None, Some(b)));
    }

    #[test]
    fn what_is_promised_is_not_given_to_a_snapshot() {
        let mut pool = StatePool::new(1);
        pool.reserve(1);
        assert_eq!(pool.new_snapshot(1), None);
        let state = pool.take_reserved();
        assert_eq!(pool.new_snapshot(1), None);
        pool.release(state);
        assert_eq!(pool.new_snapshot(1), Some(state));
        assert_eq!(pool.new_snapshot(1), None, "it is there already");
        pool.forget(1);
        assert_eq!((pool.snapshot(1), pool.free_states()), (None, &[state][..]));
    }
}
