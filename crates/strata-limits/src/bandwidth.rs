//! The most bytes a second that all threads read from memory.

use std::time::Duration;

use super::{NoMemory, median, memory_bytes, threads};

/// Bytes to read over and over, many times any cache; on a small machine a share of its memory.
const BUFFER_BYTES: u64 = 1 << 30;
const BUFFER_SHARE: u64 = 8;
/// Bytes of a block, and of the pages that the system is asked for.
pub(super) const BLOCK_BYTES: usize = 2 << 20;
/// Length of a window, and how many there are for each way to read: short and many, so that on a busy machine some are undisturbed.
const WINDOW: Duration = Duration::from_millis(10);
const WINDOWS: usize = 20;
/// Between two windows, in which others get what they have waited for.
const PAUSE: Duration = Duration::from_millis(5);

/// What one page holds.
#[repr(C, align(64))]
pub(super) struct Block(pub(super) [u64; BLOCK_BYTES / 8]);

/// A way to read a block, in which nothing is worth computing.
pub(super) type Reader = fn(&Block);

/// Bytes read a second in units of 1e9, all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reads {
    /// In the best of all windows.
    pub best: f64,
    /// In the middle of the windows of the way to read that has most there.
    pub median: f64,
}

impl Reads {
    /// Of what each way read in its windows: at least one of each.
    fn of(windows: &[Vec<f64>]) -> Self {
        let best = windows.iter().flatten().copied().fold(0.0, f64::max);
        Reads { best, median: windows.iter().map(|of_one| median(of_one)).fold(0.0, f64::max) }
    }
}

/// Measures every way to read.
///
/// # Errors
/// If there is no memory to read.
pub(super) fn measure(num_threads: usize) -> Result<Reads, NoMemory> {
    let bytes = BUFFER_BYTES.min(memory_bytes() / BUFFER_SHARE);
    let buffer = Buffer::touched((bytes as usize / BLOCK_BYTES).max(num_threads))?;
    let blocks = buffer.blocks();
    let window = |(read, window): (Reader, usize)| {
        std::thread::sleep(PAUSE);
        // Each thread goes round a part of its own, and begins further on in each window.
        let part = |thread: usize| {
            let part = &blocks[thread * blocks.len() / num_threads..(thread + 1) * blocks.len() / num_threads];
            part.iter().cycle().skip(window * part.len() / WINDOWS)
        };
        // Memory is shared: what one thread reads while another waits is no sign of what both can. So all of the window counts.
        let done = threads::during(WINDOW, num_threads, part, |blocks| {
            blocks.next().map_or(0.0, |block| {
                read(block);
                BLOCK_BYTES as f64 / 1e9
            })
        });
        done.iter().map(|d| d.work / d.elapsed.as_secs_f64()).sum::<f64>()
    };
    let windows_of = |read| (0..WINDOWS).map(|i| window((read, i))).collect();
    Ok(Reads::of(&readers().into_iter().map(windows_of).collect::<Vec<_>>()))
}

fn readers() -> Vec<Reader> {
    #[cfg(target_arch = "x86_64")]
    let mut readers = super::x86::readers();
    #[cfg(target_arch = "aarch64")]
    let mut readers = super::neon::readers();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let mut readers: Vec<Reader> = Vec::new();
    if readers.is_empty() {
        readers.push(|block| {
            std::hint::black_box(super::portable::read(&block.0));
        });
    }
    readers
}

/// Memory of its own, in huge pages where the system grants them: with ordinary ones a read also waits for their addresses.
struct Buffer {
    mapping: *mut libc::c_void,
    mapped_bytes: usize,
    num_blocks: usize,
}

impl Buffer {
    /// Maps blocks and writes to all of them: what was never written to is one page of zeros, which lies in the cache.
    fn touched(num_blocks: usize) -> Result<Self, NoMemory> {
        // One block more, so that they can begin where a huge page does.
        let mapped_bytes = (num_blocks + 1) * BLOCK_BYTES;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, of which nobody else knows.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, access, kind, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(NoMemory { bytes: mapped_bytes });
        }
        let mut buffer = Buffer { mapping, mapped_bytes, num_blocks };
        #[cfg(target_os = "linux")]
        // SAFETY: advice about the mapping above. A system that does not take it leaves ordinary pages.
        unsafe {
            libc::madvise(mapping, mapped_bytes, libc::MADV_HUGEPAGE);
        }
        for block in buffer.blocks_mut() {
            block.0.fill(1);
        }
        Ok(buffer)
    }

    /// Where the first huge page begins.
    fn start(&self) -> *mut Block {
        let start = self.mapping.cast::<u8>();
        start.wrapping_add(start.align_offset(BLOCK_BYTES)).cast()
    }

    fn blocks(&self) -> &[Block] {
        // SAFETY: the mapping has one block more than this, to begin at a multiple of one; it is initialised, by the system if by nobody
        // else, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start(), self.num_blocks) }
    }

    fn blocks_mut(&mut self) -> &mut [Block] {
        // SAFETY: as for `blocks`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.num_blocks) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is as it was made, and what was borrowed from it is gone. A failure would leave it mapped.
        unsafe {
            libc::munmap(self.mapping, self.mapped_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_window_of_all_counts_and_the_middle_one_of_the_way_that_has_most_there() {
        // The best of all is a way's that mostly reads less than the other.
        let reads = Reads::of(&[vec![20.0, 60.0, 10.0], vec![30.0, 50.0, 40.0, 0.0]]);
        assert_eq!(reads, Reads { best: 60.0, median: 35.0 });
    }

    #[test]
    fn blocks_begin_on_huge_pages_and_every_reader_reads_them() {
        let buffer = Buffer::touched(2).unwrap();
        assert_eq!(buffer.start().addr() % BLOCK_BYTES, 0);
        for read in readers() {
            buffer.blocks().iter().for_each(read);
        }
    }
}
