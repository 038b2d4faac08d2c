//! Which operations of a model were accepted: ids count up from 1, arrive in any order, and each is accepted once.

use std::collections::BTreeSet;

use crate::limits;

/// The ids accepted so far, as the first that is missing and those beyond it.
#[derive(Debug)]
pub struct AcceptedIds {
    first_missing: u64,
    ahead: BTreeSet<u64>,
}

/// What an id is to the ids accepted so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It was accepted before.
    Seen,
    /// It is the first that is missing: those beyond it wait for it.
    Next,
    /// It is new, and waits for others.
    Ahead,
    /// It is further ahead than is kept.
    TooFar,
}

impl AcceptedIds {
    /// Nothing accepted: the first id is 1.
    pub fn new() -> Self {
        AcceptedIds { first_missing: 1, ahead: BTreeSet::new() }
    }

    /// Where an id belongs.
    pub fn place(&self, id: u64) -> Place {
        if id < self.first_missing || self.ahead.contains(&id) {
            Place::Seen
        } else if id == self.first_missing {
            Place::Next
        } else if id - self.first_missing <= limits::SEQUENCE_AHEAD_MAX {
            Place::Ahead
        } else {
            Place::TooFar
        }
    }

    /// Accepts an id.
    pub fn insert(&mut self, id: u64) {
        if id >= self.first_missing {
            self.ahead.insert(id);
        }
        while self.ahead.remove(&self.first_missing) {
            self.first_missing += 1;
        }
    }

    /// The first id that is missing.
    pub fn first_missing(&self) -> u64 {
        self.first_missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_accepted_once_in_any_order_and_cost_nothing_once_in_order() {
        let mut ids = AcceptedIds::new();
        for id in [2, 3] {
            assert_eq!(ids.place(id), Place::Ahead);
            ids.insert(id);
        }
        assert_eq!(ids.place(1), Place::Next);
        ids.insert(1);
        assert_eq!((ids.first_missing(), ids.ahead.len()), (4, 0));
        for id in 0..4 {
            assert_eq!(ids.place(id), Place::Seen);
        }
        assert_eq!(ids.place(5 + limits::SEQUENCE_AHEAD_MAX), Place::TooFar);
    }
}
