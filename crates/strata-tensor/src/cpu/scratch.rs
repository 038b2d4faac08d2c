//! Memory for what a task needs only while it runs.

use std::cell::RefCell;
use std::mem::size_of;

use half::bf16;

/// A number that any bits are.
///
/// # Safety
/// Every pattern of bits must be a value, and the alignment at most that of a cache line.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: numbers without gaps or forbidden values.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for [u32; 2] {}
// SAFETY: as above.
unsafe impl Plain for usize {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}

/// Bytes that the parts of an arena begin at multiples of.
const ALIGN_BYTES: usize = 64;

/// Bytes that [`Arena::take`] takes for `len` numbers.
pub(crate) const fn taken_bytes<T>(len: usize) -> usize {
    (len * size_of::<T>()).next_multiple_of(ALIGN_BYTES)
}

/// Memory that is handed out part by part, with whatever is in it.
pub(crate) struct Arena<'a>(&'a mut [u8]);

impl<'a> Arena<'a> {
    /// Parts of these bytes, which begin at a cache line.
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES));
        Arena(bytes)
    }

    /// What is left of it, for a while.
    pub(crate) fn reborrow(&mut self) -> Arena<'_> {
        Arena(self.0)
    }

    /// The next `len` numbers. Their values are unspecified.
    ///
    /// # Panics
    /// If there is no more room.
    pub(crate) fn take<T: Plain>(&mut self, len: usize) -> &'a mut [T] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(taken_bytes::<T>(len));
        self.0 = rest;
        // SAFETY: as many whole numbers, at a cache line, of any bits.
        unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast(), len) }
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static OPERANDS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that stay with this thread.
#[cfg(test)]
pub(crate) fn held_bytes() -> usize {
    let held = |scratch: &RefCell<Vec<u8>>| scratch.borrow().len().saturating_sub(ALIGN_BYTES);
    SCRATCH.with(held) + OPERANDS.with(held)
}

/// Runs `body` with an arena of `bytes` bytes of this thread, which stay with it for the next task.
///
/// # Panics
/// If `body` asks for another.
pub(crate) fn with_scratch<R>(bytes: usize, body: impl FnOnce(Arena<'_>) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| with_bytes(scratch, bytes, body))
}

/// The same for what a thread copies of an operand, to read it again and again: `body` may ask for [`with_scratch`] too. In the cache of this core from one product to the next, where memory that goes from hand to hand would
/// have to come from another's.
///
/// # Panics
/// If `body` asks for another.
pub(crate) fn with_operand<R>(bytes: usize, body: impl FnOnce(Arena<'_>) -> R) -> R {
    OPERANDS.with_borrow_mut(|scratch| with_bytes(scratch, bytes, body))
}

fn with_bytes<R>(scratch: &mut Vec<u8>, bytes: usize, body: impl FnOnce(Arena<'_>) -> R) -> R {
    if scratch.len() < bytes + ALIGN_BYTES {
        scratch.resize(bytes + ALIGN_BYTES, 0);
    }
    let offset = scratch.as_ptr().align_offset(ALIGN_BYTES);
    body(Arena::new(&mut scratch[offset..offset + bytes]))
}
