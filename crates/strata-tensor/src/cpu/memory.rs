//! Memory of tensors on the processor: aligned, and recycled between the ops of a step.
//!
//! A step allocates and frees the same few large buffers for every layer. Handing them back to the system each time would cost a
//! page fault for every 4 KiB written (about a tenth of a layer's time), so freed buffers wait in a pool for the next
//! tensor of about their size: as long as they and those in use are within [`set_memory_limit`] bytes. Beyond that, what has waited longest goes back first.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::{Element, Error, Result};

/// Alignment of every buffer: a page, so that rows of packed matrices start on cache lines and huge pages can back them.
pub(crate) const ALIGN_BYTES: usize = 4096;
/// Of most processors' caches.
const LINE_BYTES: usize = 64;
/// Places at which large buffers that are made together begin, and bytes from one to the next: all sets of a second-level cache in turn.
const PLACES: usize = 64;
const PLACE_BYTES: usize = 1024;
/// Beside this, the bytes before a place are few.
const STAGGERED_MIN_BYTES: usize = 4 << 20;
/// Buffers below this are left to the allocator, which is good at them.
const POOLED_MIN_BYTES: usize = 64 << 10;
/// From here on, map pages and ask for huge ones: a matrix of this size is streamed, and page walks would cost bandwidth.
#[cfg(target_os = "linux")]
const MAPPED_MIN_BYTES: usize = 4 << 20;
/// Of most processors. Mappings begin at a multiple of it, else their first and last bytes are not in huge pages.
#[cfg(target_os = "linux")]
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// What the pool holds at most unless someone says how much memory there is.
const HELD_MAX_BYTES: usize = 256 << 20;

static POOL: Mutex<Pool> = Mutex::new(Pool::new(Limit::Held(HELD_MAX_BYTES)));
/// Bytes of all buffers that are in use, and the most there have been.
static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Sets for how many bytes of buffers there is memory, those in use and freed ones that the process keeps for the next tensors together: what is held beyond it goes
/// back to the system.
pub(crate) fn set_memory_limit(bytes: usize) {
    let mut pool = pool();
    pool.limit = Limit::All(bytes);
    let evicted = pool.evict(live_bytes());
    drop(pool);
    evicted.into_iter().for_each(Allocation::release);
}

/// Gives all freed buffers back to the system.
pub(crate) fn trim_pool() {
    let mut pool = pool();
    let held = std::mem::take(&mut pool.free);
    pool.held_bytes = 0;
    drop(pool);
    held.into_values().flatten().for_each(|waiting| waiting.allocation.release());
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

fn pool() -> MutexGuard<'static, Pool> {
    // A panic leaves the pool as it was: nothing in it is taken apart and put together again.
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What a pool may hold.
#[derive(Clone, Copy)]
enum Limit {
    /// So many bytes.
    Held(usize),
    /// What those that are in use leave of so many bytes.
    All(usize),
}

struct Pool {
    /// Free buffers by capacity; of each, the latest freed last.
    free: BTreeMap<usize, VecDeque<Waiting>>,
    held_bytes: usize,
    limit: Limit,
    /// Buffers that were ever freed into the pool.
    num_freed: u64,
}

/// A buffer in the pool.
struct Waiting {
    allocation: Allocation,
    /// When it was freed, counted in buffers.
    freed: u64,
}

impl Pool {
    const fn new(limit: Limit) -> Self {
        Pool { free: BTreeMap::new(), held_bytes: 0, limit, num_freed: 0 }
    }

    fn take(&mut self, capacity: usize) -> Option<Allocation> {
        let found = self.free.get_mut(&capacity)?.pop_back()?;
        self.held_bytes -= capacity;
        Some(found.allocation)
    }

    /// What it may hold beside `live` bytes in use.
    fn held_max(&self, live: usize) -> usize {
        match self.limit {
            Limit::Held(bytes) => bytes,
            Limit::All(bytes) => bytes.saturating_sub(live),
        }
    }

    /// Keeps a buffer; answers those that have to go for it, itself perhaps. `live`: bytes in use without it.
    fn put(&mut self, allocation: Allocation, live: usize) -> Vec<Allocation> {
        if allocation.capacity > self.held_max(live) {
            return vec![allocation];
        }
        self.held_bytes += allocation.capacity;
        self.num_freed += 1;
        let waiting = Waiting { freed: self.num_freed, allocation };
        self.free.entry(waiting.allocation.capacity).or_default().push_back(waiting);
        self.evict(live)
    }

    /// Takes out what has waited longest, down to what it may hold beside `live` bytes in use.
    fn evict(&mut self, live: usize) -> Vec<Allocation> {
        let mut evicted = Vec::new();
        while self.held_bytes > self.held_max(live) {
            // A model has a few dozen sizes of buffers.
            let oldest = self.free.iter().filter_map(|(capacity, queue)| Some((queue.front()?.freed, *capacity))).min();
            let (_, capacity) = oldest.expect("bytes are held, so a buffer is");
            let queue = self.free.get_mut(&capacity).expect("it was just seen");
            evicted.extend(queue.pop_front().map(|waiting| waiting.allocation));
            if queue.is_empty() {
                self.free.remove(&capacity);
            }
            self.held_bytes -= capacity;
        }
        evicted
    }
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
    fn layout(capacity: usize) -> Option<Layout> {
        Layout::from_size_align(capacity, ALIGN_BYTES).ok()
    }

    /// `None` if the system has no such memory.
    fn new_zeroed(capacity: usize) -> Option<Self> {
        #[cfg(target_os = "linux")]
        if capacity >= MAPPED_MIN_BYTES {
            return Self::map(capacity);
        }
        // SAFETY: the layout has a non-zero size.
        let ptr = NonNull::new(unsafe { alloc_zeroed(Self::layout(capacity)?) })?;
        Some(Allocation { ptr, capacity })
    }

    /// Fresh pages from the system: zero without being touched, and huge where the system has them.
    #[cfg(target_os = "linux")]
    fn map(capacity: usize) -> Option<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let mapped = capacity.checked_add(HUGE_PAGE_BYTES)?;
        // SAFETY: a new anonymous mapping touches no memory of ours.
        let all = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if all == libc::MAP_FAILED {
            return None;
        }
        let all: *mut u8 = all.cast();
        // What is mapped before and behind goes back; the system maps whole pages.
        let before = all.align_offset(HUGE_PAGE_BYTES);
        let behind = (before + capacity).next_multiple_of(ALIGN_BYTES);
        let ptr = all.wrapping_add(before);
        // SAFETY: all ranges are parts of the new mapping; the advice cannot change its contents, and a refusal of it is harmless, as is one to unmap.
        unsafe {
            if before > 0 {
                libc::munmap(all.cast(), before);
            }
            if behind < mapped {
                libc::munmap(all.add(behind).cast(), mapped - behind);
            }
            libc::madvise(ptr.cast(), capacity, libc::MADV_HUGEPAGE);
        }
        Some(Allocation { ptr: NonNull::new(ptr)?, capacity })
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
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.capacity).expect("it was allocated with this layout")) }
    }
}

/// Rounds up so that nearly equal requests share buffers: to a sixteenth of the next lower power of two.
fn capacity_for(len: usize) -> Option<usize> {
    let len = len.max(1);
    if len < POOLED_MIN_BYTES {
        return Some(len.next_multiple_of(64));
    }
    let step = (1usize << len.ilog2()) / 16;
    len.checked_next_multiple_of(step)
}

/// Owned bytes, aligned to [`ALIGN_BYTES`], all initialised.
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
        if self.shared.allocation().capacity >= MAPPED_MIN_BYTES {
            // SAFETY: asks for a number.
            let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
            let whole = range.start.next_multiple_of(page_bytes)..range.end / page_bytes * page_bytes;
            if whole.start < whole.end {
                let first = self[whole.start..].as_mut_ptr();
                // SAFETY: whole pages of an anonymous private mapping of ours, borrowed exclusively; they become zeros.
                let done = unsafe { libc::madvise(first.cast(), whole.len(), libc::MADV_DONTNEED) };
                if done == 0 {
                    self[range.start..whole.start].fill(0);
                    self[whole.end..range.end].fill(0);
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
    if capacity >= POOLED_MIN_BYTES {
        let mut pool = pool();
        let (taken, evicted) = match pool.take(capacity) {
            Some(allocation) => (Some(allocation), Vec::new()),
            // It goes first, so that there is never more than there may be.
            None => (None, pool.evict(live)),
        };
        drop(pool);
        evicted.into_iter().for_each(Allocation::release);
        if let Some(allocation) = taken {
            PEAK_LIVE_BYTES.fetch_max(live, Ordering::Relaxed);
            return Ok((allocation, true));
        }
    }
    let fresh = Allocation::new_zeroed(capacity).or_else(|| {
        // What is only kept for speed may be what is missing.
        trim_pool();
        Allocation::new_zeroed(capacity)
    });
    match fresh {
        Some(allocation) => {
            PEAK_LIVE_BYTES.fetch_max(live, Ordering::Relaxed);
            Ok((allocation, false))
        }
        None => {
            LIVE_BYTES.fetch_sub(capacity, Ordering::Relaxed);
            Err(out_of_memory())
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(allocation) = self.0.take() else { return };
        let live = LIVE_BYTES.fetch_sub(allocation.capacity, Ordering::Relaxed).saturating_sub(allocation.capacity);
        if allocation.capacity < POOLED_MIN_BYTES {
            return allocation.release();
        }
        let evicted = pool().put(allocation, live);
        // The system takes its time to take memory back: not while others wait for the pool.
        evicted.into_iter().for_each(Allocation::release);
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

    fn allocation(capacity: usize) -> Allocation {
        Allocation::new_zeroed(capacity).unwrap()
    }

    fn release(evicted: Vec<Allocation>) -> Vec<usize> {
        evicted.into_iter().map(|a| (a.capacity, a.release()).0).collect()
    }

    #[test]
    fn the_pool_stays_below_its_limit_and_lets_go_what_waited_longest() {
        let mut pool = Pool::new(Limit::All(1500 << 10));
        let live = 500 << 10;
        for kib in [400, 100, 400] {
            assert!(pool.put(allocation(kib << 10), live).is_empty());
        }
        assert_eq!(release(pool.put(allocation(200 << 10), live)), [400 << 10]);
        assert_eq!(pool.held_bytes, 700 << 10);
        // What is in use again is not old any more.
        let again = pool.take(100 << 10).unwrap();
        assert!(pool.take(300 << 10).is_none());
        assert!(pool.put(again, live).is_empty());
        assert_eq!(release(pool.put(allocation(900 << 10), live)), [400 << 10, 200 << 10]);
        assert_eq!(release(pool.put(allocation(2000 << 10), live)), [2000 << 10], "larger than the pool");
        assert_eq!(pool.held_bytes, 1000 << 10);
        // What is in use takes the place of what is held.
        assert_eq!(release(pool.evict(600 << 10)), [100 << 10]);
        assert!(pool.evict(600 << 10).is_empty());
        assert_eq!(release(pool.put(allocation(64 << 10), 1500 << 10)), [64 << 10], "there is no room beside what is in use");
        assert_eq!(release(pool.evict(usize::MAX)), [900 << 10]);
        assert_eq!((pool.held_bytes, pool.free.len()), (0, 0));
        pool.limit = Limit::Held(100 << 10);
        assert!(pool.put(allocation(100 << 10), usize::MAX).is_empty());
        assert_eq!(release(pool.put(allocation(90 << 10), 0)), [100 << 10]);
        pool.limit = Limit::All(0);
        assert_eq!(release(pool.evict(0)), [90 << 10]);
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
    #[cfg(target_os = "linux")]
    fn what_is_mapped_begins_at_a_huge_page() {
        for len in [MAPPED_MIN_BYTES, 5 << 20, 9_000_001] {
            assert_eq!(Buffer::zeroed(len).unwrap().as_ptr().addr() % HUGE_PAGE_BYTES, 0, "{len}");
        }
    }

    #[test]
    fn a_released_range_reads_as_zeros_and_its_neighbours_stay() {
        for len in [100_000, 9 << 20] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            buffer.fill(7);
            buffer.release_range(5000..90_001);
            for (range, value) in [(0..5000, 7), (5000..90_001, 0), (90_001..len, 7)] {
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
    fn capacities_waste_at_most_a_sixteenth() {
        for len in [1, 63, 64, 65_536, 65_537, 1_000_000, 155_000_001] {
            let c = capacity_for(len).unwrap();
            assert!(c >= len && c <= len + len / 16 + 64, "{len} -> {c}");
        }
    }
}
