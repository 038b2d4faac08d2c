//! What the model has seen of pictures, kept within a bound for whoever shows them again.
//!
//! What is held is in use by a prompt that is being computed, and stays. Of the rest the least recently used goes first.

use std::collections::HashMap;

use crate::pictures::PictureId;

struct Entry<F> {
    features: F,
    bytes: u64,
    holders: usize,
    used: u64,
}

/// What was seen, by picture.
pub(crate) struct Gallery<F> {
    entries: HashMap<PictureId, Entry<F>>,
    capacity: u64,
    bytes: u64,
    now: u64,
}

impl<F: Clone> Gallery<F> {
    /// One that keeps up to `capacity` bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        Gallery { entries: HashMap::new(), capacity, bytes: 0, now: 0 }
    }

    /// Whether it is there.
    pub(crate) fn has(&self, id: &PictureId) -> bool {
        self.entries.contains_key(id)
    }

    /// What was seen of a picture.
    pub(crate) fn get(&mut self, id: &PictureId) -> Option<F> {
        self.now += 1;
        let entry = self.entries.get_mut(id)?;
        entry.used = self.now;
        Some(entry.features.clone())
    }

    /// Whether so many bytes would find room beside what is held.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let held: u64 = self.entries.values().filter(|entry| entry.holders > 0).map(|entry| entry.bytes).sum();
        held + bytes <= self.capacity
    }

    /// Keeps what was seen, if there is room beside what is held.
    pub(crate) fn keep(&mut self, id: PictureId, features: &F, bytes: u64) {
        if self.has(&id) || !self.has_room(bytes) {
            return;
        }
        while self.bytes + bytes > self.capacity {
            let idle = self.entries.iter().filter(|(_, entry)| entry.holders == 0);
            let Some(oldest) = idle.min_by_key(|(_, entry)| entry.used).map(|(id, _)| *id) else { return };
            self.forget(&oldest);
        }
        self.now += 1;
        self.bytes += bytes;
        self.entries.insert(id, Entry { features: features.clone(), bytes, holders: 0, used: self.now });
    }

    /// Whether someone holds it.
    pub(crate) fn is_held(&self, id: &PictureId) -> bool {
        self.entries.get(id).is_some_and(|entry| entry.holders > 0)
    }

    /// Holds what is there for someone who needs it again until it is let go of. Whether it is there.
    pub(crate) fn hold(&mut self, id: &PictureId) -> bool {
        self.now += 1;
        let entry = self.entries.get_mut(id);
        entry.is_some_and(|entry| {
            (entry.holders, entry.used) = (entry.holders + 1, self.now);
            true
        })
    }

    /// Lets go of what is held.
    pub(crate) fn let_go(&mut self, id: &PictureId) {
        let entry =
            self.entries.get_mut(id).filter(|entry| entry.holders > 0).expect("a picture is let go of that is not held");
        entry.holders -= 1;
    }

    /// Forgets all that nobody holds.
    pub(crate) fn forget_idle(&mut self) {
        let idle: Vec<PictureId> = self.entries.iter().filter(|(_, entry)| entry.holders == 0).map(|(id, _)| *id).collect();
        idle.iter().for_each(|id| self.forget(id));
    }

    fn forget(&mut self, id: &PictureId) {
        let entry = self.entries.remove(id);
        self.bytes -= entry.map_or(0, |entry| entry.bytes);
    }

    /// Compares the books with how often what is held.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn audit(&self, holders: &HashMap<PictureId, usize>) -> Result<(), String> {
        let bytes: u64 = self.entries.values().map(|entry| entry.bytes).sum();
        if bytes != self.bytes || bytes > self.capacity {
            return Err(format!("pictures take {bytes} bytes of {}, {} are counted", self.capacity, self.bytes));
        }
        if let Some(id) = holders.keys().find(|id| !self.has(id)) {
            return Err(format!("picture {:?} is held and not there", &id[..4]));
        }
        for (id, entry) in &self.entries {
            let held = holders.get(id).copied().unwrap_or(0);
            if held != entry.holders {
                return Err(format!("picture {:?} is held {held} times, {} are counted", &id[..4], entry.holders));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PictureId = [1; 32];
    const B: PictureId = [2; 32];
    const C: PictureId = [3; 32];

    #[test]
    fn the_least_recently_used_goes_and_what_is_held_stays() {
        let mut gallery = Gallery::new(20);
        gallery.keep(A, &'a', 10);
        gallery.keep(B, &'b', 10);
        assert!(gallery.hold(&A));
        gallery.get(&B);
        gallery.keep(C, &'c', 10);
        assert_eq!([A, B, C].map(|id| gallery.get(&id)), [Some('a'), None, Some('c')], "A is older, but held");
        assert!(!gallery.has_room(11) && gallery.has_room(10));
        gallery.keep(B, &'b', 11);
        assert!(!gallery.has(&B) && gallery.has(&C), "nothing gives way for what finds no room");
        gallery.audit(&HashMap::from([(A, 1)])).unwrap();
        gallery.let_go(&A);
        gallery.forget_idle();
        assert!(!gallery.has(&A) && gallery.has_room(20));
    }
}
