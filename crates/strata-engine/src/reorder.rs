//! Puts a tenant's operations in the order of their sequence ids, whatever order they arrive in.

use std::collections::BTreeMap;

/// Most operations of one tenant that may wait, for their turn or for a gap before them to be filled.
pub(crate) const WAITING_OPS_MAX: usize = 16_384;

/// Operations that have arrived and not begun.
pub(crate) struct Reorder<T> {
    next_seq: u64,
    waiting: BTreeMap<u64, T>,
}

impl<T> Reorder<T> {
    /// Nothing has run; the first operation is `1`.
    pub(crate) fn new() -> Self {
        Reorder { next_seq: 1, waiting: BTreeMap::new() }
    }

    /// Takes an operation, or hands it back with the reason why its place cannot be filled.
    pub(crate) fn insert(&mut self, seq_id: u64, op: T) -> Result<(), (T, String)> {
        if seq_id < self.next_seq {
            let message = format!("seq_id {seq_id} has already run; the next is {}", self.next_seq);
            return Err((op, message));
        }
        if self.waiting.contains_key(&seq_id) {
            return Err((op, format!("seq_id {seq_id} is already waiting to run")));
        }
        // The next operation is always taken: refusing it would block the ones behind it for good.
        if self.waiting.len() >= WAITING_OPS_MAX && seq_id != self.next_seq {
            let message = format!(
                "{} operations already wait for seq_id {}; seq_id {seq_id} is one too many",
                self.waiting.len(),
                self.next_seq
            );
            return Err((op, message));
        }
        self.waiting.insert(seq_id, op);
        Ok(())
    }

    /// The operation whose turn it is, if it has arrived.
    pub(crate) fn peek(&self) -> Option<&T> {
        self.waiting.get(&self.next_seq)
    }

    /// Begins the operation whose turn it is, if it has arrived.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let op = self.waiting.remove(&self.next_seq)?;
        self.next_seq += 1;
        Some(op)
    }

    /// Everything that has not begun, in order.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        std::mem::take(&mut self.waiting).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_run_in_order_whatever_order_they_arrive_in() {
        let mut r = Reorder::new();
        r.insert(3, 'c').unwrap();
        assert_eq!(r.pop(), None);
        r.insert(1, 'a').unwrap();
        assert_eq!((r.pop(), r.pop()), (Some('a'), None));
        r.insert(2, 'b').unwrap();
        assert_eq!((r.pop(), r.pop(), r.pop()), (Some('b'), Some('c'), None));
    }

    #[test]
    fn an_id_is_taken_once() {
        let mut r = Reorder::new();
        assert!(r.insert(0, ()).is_err(), "ids begin at 1");
        r.insert(1, ()).unwrap();
        assert!(r.insert(1, ()).unwrap_err().1.contains("already waiting"));
        r.pop().unwrap();
        assert!(r.insert(1, ()).unwrap_err().1.contains("already run"));
    }

    #[test]
    fn the_buffer_is_bounded_but_never_refuses_the_next_operation() {
        let mut r = Reorder::new();
        for seq in 2..2 + WAITING_OPS_MAX as u64 {
            r.insert(seq, seq).unwrap();
        }
        assert!(r.insert(1_000_000, 0).is_err());
        r.insert(1, 1).unwrap();
        assert_eq!(r.pop(), Some(1));
        assert_eq!(r.drain().next(), Some(2));
    }
}
