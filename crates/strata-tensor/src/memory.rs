//! Memory of tensors: aligned, and recycled between the ops of a step.
//!
//! A step allocates and frees the same few large buffers for every layer. Handing them back to the system each time would cost a
//! page fault for every 4 KiB written (about a tenth of a layer's time), so freed buffers wait in a pool for the next
//! tensor of about their size.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Mutex;

/// Alignment of every buffer: a page, so that rows of packed matrices start on cache lines and huge pages can back them.
const ALIGN_BYTES: usize = 4096;
/// Buffers below this are left to the allocator, which is good at them.
const POOLED_MIN_BYTES: usize = 64 << 10;
/// From here on, map pages and ask for huge ones: a matrix of this size is streamed, and page walks would cost bandwidth.
#[cfg(target_os = "linux")]
const MAPPED_MIN_BYTES: usize = 4 << 20;
/// What the pool keeps at most; beyond it, freed buffers go back to the system.
const POOL_MAX_BYTES: usize = 1 << 30;

static POOL: Mutex<Pool> = Mutex::new(Pool { free: BTreeMap::new(), held_bytes: 0 });

struct Pool {
    /// Free buffers by capacity.
    free: BTreeMap<usize, Vec<Allocation>>,
    held_bytes: usize,
}

struct Allocation {
    ptr: NonNull<u8>,
    capacity: usize,
}

// SAFETY: an allocation is owned memory without thread affinity.
unsafe impl Send for Allocation {}
// SAFETY: shared access only reads.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, ALIGN_BYTES).expect("tensor size overflows the address space")
    }

    fn new_zeroed(capacity: usize) -> Self {
        #[cfg(target_os = "linux")]
        if capacity >= MAPPED_MIN_BYTES {
            return Self::map(capacity);
        }
        let layout = Self::layout(capacity);
        // SAFETY: the layout has a non-zero size.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        Allocation { ptr, capacity }
    }

    /// Fresh pages from the system: zero without being touched, and huge where the system has them.
    #[cfg(target_os = "linux")]
    fn map(capacity: usize) -> Self {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches no memory of ours.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), capacity, protection, flags, -1, 0) };
        if ptr == libc::MAP_FAILED {
            handle_alloc_error(Self::layout(capacity));
        }
        // SAFETY: the range is ours; the advice cannot change its contents, and a refusal is harmless.
        unsafe { libc::madvise(ptr, capacity, libc::MADV_HUGEPAGE) };
        Allocation { ptr: NonNull::new(ptr.cast()).expect("mmap succeeded"), capacity }
    }

    /// Gives the memory back to the system.
    fn release(self) {
        #[cfg(target_os = "linux")]
        if self.capacity >= MAPPED_MIN_BYTES {
            // SAFETY: mapped in `map` with the same length, and unmapped once.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.capacity) };
            return;
        }
        // SAFETY: allocated in `new_zeroed` with the same layout, and freed once.
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.capacity)) }
    }
}

/// Rounds up so that nearly equal requests share buffers: to an eighth of the next lower power of two.
fn capacity_for(len: usize) -> usize {
    let len = len.max(1);
    if len < POOLED_MIN_BYTES {
        return len.next_multiple_of(64);
    }
    let step = (1usize << len.ilog2()) / 8;
    len.checked_next_multiple_of(step).expect("tensor size overflows the address space")
}

/// Owned bytes, aligned to [`ALIGN_BYTES`], all initialised.
pub(crate) struct Buffer {
    allocation: Option<Allocation>,
}

impl Buffer {
    /// A buffer of at least `len` zero bytes.
    pub(crate) fn zeroed(len: usize) -> Self {
        match take_pooled(capacity_for(len)) {
            Some(allocation) => {
                let mut buffer = Buffer { allocation: Some(allocation) };
                buffer[..len].fill(0);
                buffer
            }
            None => Buffer { allocation: Some(Allocation::new_zeroed(capacity_for(len))) },
        }
    }

    /// A buffer of at least `len` bytes that may hold what an earlier tensor left.
    pub(crate) fn recycled(len: usize) -> Self {
        let capacity = capacity_for(len);
        Buffer { allocation: Some(take_pooled(capacity).unwrap_or_else(|| Allocation::new_zeroed(capacity))) }
    }

    fn allocation(&self) -> &Allocation {
        self.allocation.as_ref().expect("a buffer owns its allocation until it is dropped")
    }
}

fn take_pooled(capacity: usize) -> Option<Allocation> {
    if capacity < POOLED_MIN_BYTES {
        return None;
    }
    let mut pool = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = pool.free.get_mut(&capacity)?.pop()?;
    pool.held_bytes -= capacity;
    Some(found)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(allocation) = self.allocation.take() else { return };
        if allocation.capacity >= POOLED_MIN_BYTES {
            let mut pool = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if pool.held_bytes + allocation.capacity <= POOL_MAX_BYTES {
                pool.held_bytes += allocation.capacity;
                pool.free.entry(allocation.capacity).or_default().push(allocation);
                return;
            }
        }
        allocation.release();
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let allocation = self.allocation();
        // SAFETY: `capacity` bytes, initialised at allocation, owned by this buffer.
        unsafe { std::slice::from_raw_parts(allocation.ptr.as_ptr(), allocation.capacity) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let allocation = self.allocation();
        // SAFETY: as in `deref`, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(allocation.ptr.as_ptr(), allocation.capacity) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zeroed_buffer_is_zero_even_when_recycled() {
        for _ in 0..3 {
            let mut b = Buffer::zeroed(100_000);
            assert!(b[..100_000].iter().all(|&x| x == 0));
            b.fill(7);
        }
    }

    #[test]
    fn capacities_waste_at_most_an_eighth() {
        for len in [1, 63, 64, 65_536, 65_537, 1_000_000, 155_000_001] {
            let c = capacity_for(len);
            assert!(c >= len && c <= len + len / 8 + 64, "{len} -> {c}");
        }
    }
}
