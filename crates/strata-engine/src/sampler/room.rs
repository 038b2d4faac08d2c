//! What a sequence needs of the cache, and what the cache has: pages and states, counted.

use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

/// Pages and states of a cache, as numbers of them. A model without recurrent layers has no states, and nobody needs any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Pages of keys and values.
    pub(crate) pages: usize,
    /// States, one for each sequence.
    pub(crate) states: usize,
}

impl Room {
    /// Whether this is there in `other`.
    pub(crate) fn fits(self, other: Room) -> bool {
        self.pages <= other.pages && self.states <= other.states
    }

    /// How much it is of a cache of `size`, as a number that can be compared and added: a cache's pages and its states weigh the same.
    pub(crate) fn weight(self, size: Room) -> u64 {
        match size.states {
            0 => self.pages as u64,
            states => self.pages as u64 * states as u64 + self.states as u64 * size.pages as u64,
        }
    }
}

impl Add for Room {
    type Output = Room;
    fn add(self, other: Room) -> Room {
        Room { pages: self.pages + other.pages, states: self.states + other.states }
    }
}

impl AddAssign for Room {
    fn add_assign(&mut self, other: Room) {
        *self = *self + other;
    }
}

impl Sub for Room {
    type Output = Room;
    fn sub(self, other: Room) -> Room {
        Room { pages: self.pages - other.pages, states: self.states - other.states }
    }
}

impl SubAssign for Room {
    fn sub_assign(&mut self, other: Room) {
        *self = *self - other;
    }
}

impl Mul<usize> for Room {
    type Output = Room;
    fn mul(self, times: usize) -> Room {
        Room { pages: self.pages * times, states: self.states * times }
    }
}

impl std::iter::Sum for Room {
    fn sum<I: Iterator<Item = Room>>(all: I) -> Room {
        all.fold(Room::default(), Add::add)
    }
}

impl std::fmt::Display for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages and {} states", self.pages, self.states)
    }
}
