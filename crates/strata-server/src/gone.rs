//! Ids of results that are gone, by their hashes: they are many, kept long, and whoever asks knows the id.
//!
//! A hash is two of 64 bits under keys that nobody outside knows, so that no other id is ever taken for one that is gone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

/// The last so many ids that are gone, each of which may have left something (`T`) that is remembered as long.
pub(crate) struct Gone<T> {
    keys: [RandomState; 2],
    hashes: HashSet<u128>,
    order: VecDeque<u128>,
    left: HashMap<u128, T>,
}

impl<T> Default for Gone<T> {
    fn default() -> Self {
        let keys = [RandomState::new(), RandomState::new()];
        Gone { keys, hashes: HashSet::new(), order: VecDeque::new(), left: HashMap::new() }
    }
}

impl<T> Gone<T> {
    fn hash(&self, id: &str) -> u128 {
        let [high, low] = [0, 1].map(|key| u128::from(self.keys[key].hash_one(id)));
        high << 64 | low
    }

    pub(crate) fn contains(&self, id: &str) -> bool {
        self.hashes.contains(&self.hash(id))
    }

    /// Adds an id and what it has left. Answers what was left by those that have no place any more, of which there are `max`.
    pub(crate) fn add(&mut self, id: &str, left: Option<T>, max: usize) -> Vec<T> {
        let hash = self.hash(id);
        if self.hashes.insert(hash) {
            self.order.push_back(hash);
        }
        if let Some(left) = left {
            self.left.insert(hash, left);
        }
        let mut forgotten = Vec::new();
        while self.order.len() > max {
            let Some(oldest) = self.order.pop_front() else { break };
            self.hashes.remove(&oldest);
            forgotten.extend(self.left.remove(&oldest));
        }
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ids_are_known_and_what_others_have_left_is_handed_back() {
        let mut gone = Gone::default();
        let name = |n: usize| format!("request {n}");
        for n in 0..100 {
            let forgotten = gone.add(&name(n), n.is_multiple_of(2).then_some(n), 10);
            let oldest = n.checked_sub(10).filter(|oldest| oldest.is_multiple_of(2));
            assert_eq!(forgotten, Vec::from_iter(oldest), "{n}");
            assert!((0..100).all(|other| gone.contains(&name(other)) == (other <= n && n - other < 10)));
        }
        assert_eq!(gone.add(&name(99), None, 10), [0; 0], "it is there");
        assert_eq!((gone.hashes.len(), gone.order.len(), gone.left.len()), (10, 10, 5));
        assert_eq!(gone.add(&name(99), None, 0), [90, 92, 94, 96, 98]);
        assert!(!gone.contains(&name(99)));
    }
}
