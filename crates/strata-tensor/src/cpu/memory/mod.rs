//! Memory of tensors on the processor: aligned, and recycled between the ops of a step.
//!
//! A step allocates and frees the same few large buffers for every layer, and the next step others of about the same size. Handing them back to the system each time would
//! cost a page fault for every page written: a tenth of a layer's time, and in a virtual machine whose host takes back what is free as much as the layer. So freed memory
//! waits in a pool for the next tensor, whatever its size: neighbours become one range, the smallest range that suffices is taken, and where none does, pages of several are
//! moved to one place. It waits as long as it and what is in use are within [`set_memory_limit`] bytes. Beyond that, what has waited longest goes back first.

mod pool;
mod system;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use self::pool::{Limit, Pool};
use self::system::HUGE_PAGE_BYTES;
use crate::{Element, Error, Result};

/// Alignment of small buffers, and of bytes that packed weights lie in without being copied: a page.
pub(crate) const ALIGN_BYTES: usize = 4096;
/// Larger buffers are so many bytes, times a whole number, from the start of a huge page: rows of packed matrices start on cache lines.
const UNIT_BYTES: usize = 1024;
/// Of most processors' caches.
const LINE_BYTES: usize = 64;
/// Places at which large buffers that are made together begin, and bytes from one to the next: all sets of a second-level cache in turn.
const PLACES: usize = 64;
const PLACE_BYTES: usize = 1024;
/// Beside this, the bytes before a place are few.
const STAGGERED_MIN_BYTES: usize = 4 << 20;
/// Buffers below this are left to the allocator, which is good at them. Larger ones lie in huge pages, and share these.
const POOLED_MIN_BYTES: usize = 64 << 10;
/// What the pool holds at most unless someone says how much memory there is.
const HELD_MAX_BYTES: usize = 256 << 20;

static POOL: Mutex<Pool> = Mutex::new(Pool::new(Limit::Held(HELD_MAX_BYTES)));
/// Bytes of all buffers that are in use, and the most there have been.
static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Bytes that were ever asked of the system for the pool.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Sets for how many bytes of buffers there is memory, those in use and what is free and waits for the next tensors together: what is held beyond it goes
/// back to the system.
pub(crate) fn set_memory_limit(bytes: usize) {
    let mut pool = pool();
    pool.limit = Limit::All(bytes);
    let evicted = pool.evict(live_bytes());
    drop(pool);
    give_back(evicted);
}

/// Gives all huge pages of which nothing is in use back to the system.
pub(crate) fn trim_pool() {
    let mut pool = pool();
    let limit = std::mem::replace(&mut pool.limit, Limit::Held(0));
    let evicted = pool.evict(0);
    pool.limit = limit;
    drop(pool);
    give_back(evicted);
}

/// Gives what the pool let go back to the system.
fn give_back(evicted: Vec<Range<usize>>) {
    // SAFETY: whole huge pages that were mapped and are nobody's: the pool had them.
    evicted.into_iter().for_each(|pages| unsafe { system::unmap(pages) });
}

/// Bytes of the buffers of all tensors, packed weights and caches there are. Memory of a buffer that was never touched counts, though the system
/// has not handed it out.
pub fn live_bytes() -> usize {
    LIVE_BYTES.load(Ordering::Relaxed)
}

/// The most that [`live_bytes`] has been since the start of the process, or since [`reset_peak_live_bytes`].
pub fn peak_live_bytes() -> usize {
    PEAK_LIVE_BYTES.load(Ordering::Relaxed)
}

/// Begins a new measurement of [`peak_live_bytes`]. The counters are those of the whole process: for tests and benchmarks that are alone in it.
pub fn reset_peak_live_bytes() {
    PEAK_LIVE_BYTES.store(live_bytes(), Ordering::Relaxed);
}

/// Bytes that were asked of the system for buffers since the start of the process, small ones apart: what was used again counts once.
pub fn mapped_bytes() -> usize {
    MAPPED_BYTES.load(Ordering::Relaxed)
}

fn pool() -> MutexGuard<'static, Pool> {
    // Nothing that holds the lock runs what is another's, so that only a mistake in the pool itself could panic.
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Memory that is no buffer's, counted as if it were.
pub(crate) struct InUse(usize);

impl InUse {
    pub(crate) fn new(bytes: usize) -> Self {
        let live = LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK_LIVE_BYTES.fetch_max(live, Ordering::Relaxed);
        InUse(bytes)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        LIVE_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
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
    /// Memory for a buffer of this capacity while `live` bytes are in use, it included, and whether it reads as zeros. `None` if the system has no such memory.
    fn new(capacity: usize, live: usize) -> Option<(Self, bool)> {
        if capacity < POOLED_MIN_BYTES {
            // SAFETY: the layout has a non-zero size.
            let ptr = NonNull::new(unsafe { alloc_zeroed(small(capacity)) })?;
            return Some((Allocation { ptr, capacity }, true));
        }
        let mut pool = pool();
        let (start, untouched) = match pool.take(capacity) {
            Some(taken) => taken,
            None => {
                let pages = pool.take_pages(capacity);
                drop(pool);
                // SAFETY: whole huge pages that were mapped and are nobody's: the pool had them.
                let gathered = pages.and_then(|pages| unsafe { system::gather(&pages) });
                let untouched = gathered.is_none();
                let range = gathered.or_else(|| fresh(capacity, live))?;
                let end = range.start + capacity;
                if end < range.end {
                    self::pool().put(end..range.end, untouched);
                }
                (range.start, untouched)
            }
        };
        Some((Allocation { ptr: NonNull::new(std::ptr::with_exposed_provenance_mut(start))?, capacity }, untouched))
    }

    /// Lets the next buffers have the memory, or the system, while `live` bytes are in use.
    fn release(self, live: usize) {
        if self.capacity < POOLED_MIN_BYTES {
            // SAFETY: allocated in `new` with the same layout, and freed once.
            return unsafe { dealloc(self.ptr.as_ptr(), small(self.capacity)) };
        }
        let start = self.ptr.as_ptr().expose_provenance();
        let mut pool = pool();
        pool.put(start..start + self.capacity, false);
        let evicted = pool.evict(live);
        drop(pool);
        // The system takes its time to take memory back: not while others wait for the pool.
        give_back(evicted);
    }
}

/// The layout of a buffer that is left to the allocator.
fn small(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, ALIGN_BYTES).expect("below the size of what is mapped")
}

/// Whole huge pages from the system for this capacity, while `live` bytes are in use with it.
fn fresh(capacity: usize, live: usize) -> Option<Range<usize>> {
    let bytes = capacity.checked_next_multiple_of(HUGE_PAGE_BYTES)?;
    // What is held goes first, so that there is never more than there may be.
    let evicted = pool().evict(live.saturating_add(bytes - capacity));
    give_back(evicted);
    MAPPED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    system::map(bytes).or_else(|| {
        // What is only kept for speed may be what is missing.
        trim_pool();
        system::map(bytes)
    })
}

/// Rounds up, by a sixty-fourth at most from some lines on.
fn capacity_for(len: usize) -> Option<usize> {
    let unit = if len < POOLED_MIN_BYTES { LINE_BYTES } else { UNIT_BYTES };
    len.max(1).checked_next_multiple_of(unit)
}

/// Owned bytes that begin at a cache line, all initialised.
pub(crate) struct Buffer {
    /// They are its own, though the allocation may be shared.
    bytes: NonNull<[u8]>,
    shared: Arc<Shared>,
}

// SAFETY: a buffer is owned memory without thread affinity.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

/// An allocation and the buffers in it, each a part of its own.
struct Shared(Option<Allocation>);

impl Buffer {
    /// A buffer of at least `len` zero bytes.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let (allocation, recycled) = allocate(len)?;
        let mut buffer = Buffer::of(allocation);
        if recycled {
            buffer[..len].fill(0);
        }
        Ok(buffer)
    }

    /// A buffer of at least `len` bytes that may hold what an earlier tensor left.
    pub(crate) fn recycled(len: usize) -> Result<Self> {
        Ok(Buffer::of(allocate(len)?.0))
    }

    /// Buffers of at least so many zero bytes each, next to each other in one allocation: together in huge pages, although each may be smaller than one. They begin at a
    /// multiple of a cache line, and large ones that are made alike at different places of pages and of the sets of a cache: what is read in turn of each of them does not push
    /// out what was read of the others.
    pub(crate) fn zeroed_together(lens: &[usize]) -> Result<Vec<Self>> {
        static NEXT_PLACE: AtomicUsize = AtomicUsize::new(0);
        let total = lens.iter().fold(0usize, |total, &len| total.saturating_add(len));
        let mut end = match total {
            STAGGERED_MIN_BYTES.. => NEXT_PLACE.fetch_add(1, Ordering::Relaxed) % PLACES * PLACE_BYTES,
            _ => 0,
        };
        let mut parts = Vec::with_capacity(lens.len());
        for &len in lens {
            let first = end;
            end = len
                .checked_next_multiple_of(LINE_BYTES)
                .and_then(|len| end.checked_add(len))
                .ok_or(Error::OutOfMemory { bytes: len })?;
            parts.push(first..end);
        }
        let whole = Buffer::zeroed(end)?;
        let part = |part: std::ops::Range<usize>| {
            // SAFETY: parts of the whole, which no one has any more, and which do not overlap.
            let first = unsafe { whole.bytes.cast::<u8>().add(part.start) };
            Buffer { bytes: NonNull::slice_from_raw_parts(first, part.len()), shared: whole.shared.clone() }
        };
        Ok(parts.into_iter().map(part).collect())
    }

    fn of(allocation: Allocation) -> Self {
        let bytes = NonNull::slice_from_raw_parts(allocation.ptr, allocation.capacity);
        Buffer { bytes, shared: Arc::new(Shared(Some(allocation))) }
    }

    /// Gives the memory of the whole pages of the system within `range` back to it, where it can; all of `range` reads as zeros from then on.
    pub(crate) fn release_range(&mut self, range: std::ops::Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len());
        #[cfg(target_os = "linux")]
        if self.shared.allocation().capacity >= POOLED_MIN_BYTES {
            // SAFETY: asks for a number.
            let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
            let first = self.as_ptr().addr();
            let start = (first + range.start).next_multiple_of(page_bytes) - first;
            let end = ((first + range.end) / page_bytes * page_bytes).saturating_sub(first);
            if start < end {
                let pages = self[start..end].as_mut_ptr();
                // SAFETY: whole pages of an anonymous private mapping of ours, borrowed exclusively; they become zeros.
                let done = unsafe { libc::madvise(pages.cast(), end - start, libc::MADV_DONTNEED) };
                if done == 0 {
                    self[range.start..start].fill(0);
                    self[end..range.end].fill(0);
                    return;
                }
            }
        }
        self[range].fill(0);
    }

    /// The first `len` numbers, to be written.
    pub(crate) fn numbers_mut<T: Element>(&mut self, len: usize) -> &mut [T] {
        let bytes = &mut self[..len * size_of::<T>()];
        // SAFETY: so many bytes, aligned for every element type, any of which is a number.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) }
    }
}

impl Shared {
    fn allocation(&self) -> &Allocation {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

/// An allocation of at least `len` bytes, and whether another buffer had it before; else it is zero. It counts as in use from here on.
fn allocate(len: usize) -> Result<(Allocation, bool)> {
    let out_of_memory = || Error::OutOfMemory { bytes: len };
    let capacity = capacity_for(len).ok_or_else(out_of_memory)?;
    let live = LIVE_BYTES.fetch_add(capacity, Ordering::Relaxed).saturating_add(capacity);
    let Some((allocation, untouched)) = Allocation::new(capacity, live) else {
        LIVE_BYTES.fetch_sub(capacity, Ordering::Relaxed);
        return Err(out_of_memory());
    };
    PEAK_LIVE_BYTES.fetch_max(live, Ordering::Relaxed);
    Ok((allocation, !untouched))
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(allocation) = self.0.take() else { return };
        let live = LIVE_BYTES.fetch_sub(allocation.capacity, Ordering::Relaxed).saturating_sub(allocation.capacity);
        allocation.release(live);
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialised at allocation, and this buffer's alone.
        unsafe { self.bytes.as_ref() }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the buffer is borrowed exclusively.
        unsafe { self.bytes.as_mut() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zeroed_buffer_is_zero_even_when_recycled() {
        for _ in 0..3 {
            let mut b = Buffer::zeroed(100_000).unwrap();
            assert!(b[..100_000].iter().all(|&x| x == 0));
            b.fill(7);
        }
    }

    #[test]
    fn buffers_made_together_are_each_their_own_and_go_back_together() {
        for lens in [[5000, 1, 100_000], [3 << 20, 0, 3 << 20]] {
            let mut buffers = Buffer::zeroed_together(&lens).unwrap();
            for (i, (buffer, len)) in buffers.iter_mut().zip(lens).enumerate() {
                assert!(buffer.as_ptr().addr().is_multiple_of(LINE_BYTES) && (len..len + LINE_BYTES).contains(&buffer.len()));
                assert!(buffer.iter().all(|&b| b == 0));
                buffer.fill(i as u8 + 1);
            }
            assert!(buffers[0].as_ptr().wrapping_add(buffers[0].len()) == buffers[1].as_ptr());
            let shared = Arc::downgrade(&buffers[0].shared);
            let last = buffers.pop().unwrap();
            for (i, buffer) in buffers.iter().enumerate() {
                assert!(buffer.iter().all(|&b| b == i as u8 + 1));
            }
            drop(buffers);
            assert!(shared.strong_count() == 1 && last.iter().all(|&b| b == 3));
            drop(last);
            assert_eq!(shared.strong_count(), 0);
        }
        assert!(matches!(Buffer::zeroed_together(&[usize::MAX, 1]), Err(Error::OutOfMemory { .. })));
        assert!(matches!(Buffer::zeroed_together(&[1 << 63, 1 << 63]), Err(Error::OutOfMemory { .. })));
        assert!(Buffer::zeroed_together(&[]).unwrap().is_empty());
    }

    #[test]
    fn large_buffers_made_alike_begin_in_other_sets_of_a_cache() {
        let made: Vec<_> = (0..PLACES).map(|_| Buffer::zeroed_together(&[STAGGERED_MIN_BYTES, 1]).unwrap()).collect();
        let place = |buffers: &Vec<Buffer>| buffers[0].as_ptr().addr() % (PLACES * PLACE_BYTES);
        let places: std::collections::BTreeSet<usize> = made.iter().map(place).collect();
        // Others make some at the same time.
        assert!(places.len() > PLACES / 2, "{places:?}");
    }

    #[test]
    fn a_released_range_reads_as_zeros_and_its_neighbours_stay() {
        for len in [50_000, 100_000, 9 << 20] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            buffer.fill(7);
            buffer.release_range(5000..40_001);
            for (range, value) in [(0..5000, 7), (5000..40_001, 0), (40_001..len, 7)] {
                assert!(buffer[range.clone()].iter().all(|&b| b == value), "{range:?} of {len}");
            }
            buffer.release_range(10..10);
            assert_eq!(buffer[10], 7);
        }
    }

    #[test]
    fn what_the_system_does_not_have_is_an_error() {
        // No address space is this large, and no size larger.
        for bytes in [1 << 62, usize::MAX] {
            let refused = |made: Result<Buffer>| matches!(made, Err(Error::OutOfMemory { bytes: b }) if b == bytes);
            assert!(refused(Buffer::zeroed(bytes)) && refused(Buffer::recycled(bytes)));
        }
        assert!(Buffer::zeroed(100_000).is_ok());
    }

    #[test]
    fn capacities_waste_at_most_a_sixty_fourth() {
        for len in [1, 63, 64, 65_536, 65_537, 1_000_000, 155_000_001] {
            let c = capacity_for(len).unwrap();
            assert!(c >= len && c <= len + len / 64 + 64, "{len} -> {c}");
        }
    }
}
