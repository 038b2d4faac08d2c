//! What products fetch from memory while they compute.
//!
//! A prefetch of any address is harmless, and changes no bits. What comes next is fetched into the second-level cache: the first has room for few lines on their way
//! at a time, and what computes would wait behind them (Zen 4, 16 rows in 6, 5 and 5: 46 ms into the first level, 36 into the second, where reading takes 27 and computing 35).

use std::ops::Range;

use super::kernel::VECTORS_MAX;
use crate::cpu::isa::is_zen4;

/// Tiles that share what the first of them fetch, at most.
pub(super) const FETCHING_TILES_MAX: usize = 8;

/// What a tile fetches of the right side on its way, where that lies in memory: processors look ahead by themselves, but not far enough for a tile of
/// several rows, which takes the time of several loads for each step.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Fetch {
    Nothing,
    /// What the tile itself comes to, and behind its right side what the next tile begins with, which is from there on.
    Own(*const u8),
    /// A line of each step of that, for a processor that fetches those between once it is shown the way.
    Hints(*const u8),
    /// A line for each step from there on, or two: where there are few tiles to fetch with. And beside it chunks, as below, if there are any.
    Next(*const u8, Lines, *const [usize]),
    /// A line for each step, of the chunks of [`CHUNK_BYTES`] at these addresses: where there is more to compute than to fetch.
    Chunks(*const [usize]),
    /// Of such chunks as many lines for each step as a whole panel has, where there is as much to fetch as to compute with.
    Stream(*const [usize]),
}

/// What the products of a kernel fetch, by the processor: each was measured there in turns with the others.
#[derive(Clone, Copy)]
pub(super) struct Fetching {
    /// What a tile fetches of its own right side where no other reads it.
    pub own: Own,
    /// Whether several tiles fetch what comes next, and what else there is ([`Fetch::Chunks`]).
    pub meanwhile: bool,
    /// Whether a tile that reads what comes from memory, as fast as it comes, fetches for the next while it computes, rather than between.
    pub streams: bool,
}

/// See [`Fetching::own`].
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Own {
    Nothing,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // What Zen 4 has.
    Hints,
    EveryLine,
}

impl Fetching {
    pub(super) const NOTHING: Self = Fetching { own: Own::Nothing, meanwhile: false, streams: false };

    /// Of kernels of AVX-512 that read f32 or pairs of bf16 as they are. Zen 4 reads far enough ahead of a tile of six rows by itself once it is shown the way: four rows read 95% of what memory gives without
    /// fetches, all of it with a line of four, and 70 to 83% with every line 4 KiB ahead or more (two threads, a loop that does nothing else).
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // For its kernels.
    pub(super) fn of_pairs() -> Self {
        Fetching { own: if is_zen4() { Own::Hints } else { Own::EveryLine }, meanwhile: true, streams: false }
    }

    /// Of kernels of AVX-512 that widen bf16.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // For its kernels.
    pub(super) fn of_widened() -> Self {
        Fetching { own: if is_zen4() { Own::Nothing } else { Own::EveryLine }, meanwhile: true, streams: true }
    }
}

const LINE_BYTES: usize = 64;
/// Steps of a tile that fetch a chunk, and its bytes.
pub(crate) const CHUNK_STEPS: usize = 8;
pub(super) const CHUNK_BYTES: usize = CHUNK_STEPS * LINE_BYTES;
/// Steps that fetch a chunk of [`Fetch::Stream`].
pub(crate) const STREAM_STEPS: usize = CHUNK_STEPS / VECTORS_MAX;

/// Lines that a tile fetches at each step.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Lines {
    One,
    Two,
}

/// What the `i`-th of some tiles fetches of a right side of `steps` steps that comes next. All together fetch all of it, as evenly as can be: memory that
/// is asked for much at one time and for nothing at another is idle in between.
///
/// `chunks` are fetched beside it, by those first that have less to fetch: the last.
pub(super) fn next_of_tile(next: *const u8, chunks: &[usize], i: usize, tiles: usize, steps: usize) -> Fetch {
    // Of the lines of a step two for each of the first tiles, one for each of the others.
    let double = VECTORS_MAX.saturating_sub(tiles).min(tiles);
    let before = i + i.min(double);
    let chunks = chunks_of_tile(chunks, tiles - 1 - i, steps);
    if before < VECTORS_MAX {
        Fetch::Next(next.wrapping_add(before * steps * 64), if i < double { Lines::Two } else { Lines::One }, chunks)
    } else if chunks.is_empty() {
        Fetch::Nothing
    } else {
        Fetch::Chunks(chunks)
    }
}

/// The `i`-th share of some chunks, as many as are fetched in so many steps.
pub(super) fn chunks_of_tile(chunks: &[usize], i: usize, steps: usize) -> &[usize] {
    chunks.chunks((steps / CHUNK_STEPS).max(1)).nth(i).unwrap_or(&[])
}

/// Fetches what lies there into the second-level cache.
#[inline]
pub(crate) fn fetch_numbers<T>(numbers: &[T]) {
    numbers.chunks(LINE_BYTES / size_of::<T>()).for_each(|line| fetch_line(line.as_ptr().addr()));
}

/// Fetches what is to be written, for this core alone.
#[inline]
pub(crate) fn fetch_to_write<T>(first: *const T, count: usize) {
    for line in (0..count * size_of::<T>()).step_by(LINE_BYTES) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: any address will do, and a processor that does not know the instruction does nothing.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) first.wrapping_byte_add(line), options(nostack, preserves_flags, readonly))
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (first, line);
    }
}

/// Fetches a line into the second-level cache.
#[inline]
fn fetch_line(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every such processor has the instruction, and any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Memory in pieces that are equally far apart, some of it gone through.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Pieces {
    /// What is left of the next.
    pub(super) next: Range<usize>,
    /// Where a whole piece begins, and its bytes.
    first: usize,
    bytes: usize,
    /// From one to the next.
    apart: usize,
    /// The next included.
    pub(super) count: usize,
}

impl Pieces {
    /// Some bytes from an address on.
    pub(crate) fn one(address: usize, bytes: Range<usize>) -> Self {
        let next = address + bytes.start..address + bytes.end;
        Pieces { first: next.start, bytes: bytes.len(), next, apart: 0, count: 1 }
    }

    /// So many of them.
    pub(crate) fn repeated(self, count: usize, apart: usize) -> Self {
        Pieces { count, apart, ..self }
    }

    /// Whether none are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0 || self.next.is_empty()
    }

    /// Where the next begins, if any is left.
    pub(super) fn first_address(&self) -> Option<*const u8> {
        (!self.is_empty()).then(|| std::ptr::without_provenance(self.next.start))
    }

    /// Lines of those that are left.
    pub(crate) fn lines(&self) -> usize {
        let further = self.count.saturating_sub(1) * self.bytes.div_ceil(LINE_BYTES);
        if self.count > 0 { self.next.len().div_ceil(LINE_BYTES) + further } else { 0 }
    }

    /// Fetches so many lines into the second-level cache; answers what is left.
    pub(crate) fn fetch(mut self, lines: usize) -> Self {
        for _ in 0..lines {
            let Some(line) = self.next_line() else { break };
            fetch_line(line);
        }
        self
    }

    /// Goes past as many chunks as there is room for, and writes where they are; answers how many there are.
    pub(crate) fn list_chunks(&mut self, chunks: &mut [usize]) -> usize {
        let mut list = ChunkList::new(chunks);
        *self = list.add_pieces(std::mem::take(self));
        list.len
    }

    /// Whether one of them is a chunk or more.
    pub(crate) fn have_chunks(&self) -> bool {
        self.bytes >= CHUNK_BYTES
    }

    /// Lines that each of some calls fetches, at least, so that all together fetch all pieces: none fetches of two.
    pub(super) fn lines_each(&self, calls: usize) -> usize {
        if self.count == 0 || calls == 0 {
            return 0;
        }
        let of_piece = self.bytes.div_ceil(LINE_BYTES);
        // The first piece is whole, or less.
        let calls_of_piece = calls / self.count;
        if calls_of_piece == 0 { of_piece } else { of_piece.div_ceil(calls_of_piece) }
    }

    /// Goes past the next lines, so many at most, that lie side by side; answers where they begin and how many there are.
    pub(super) fn next_lines(&mut self, max: usize) -> (usize, usize) {
        if self.count == 0 || max == 0 {
            return (0, 0);
        }
        let lines = self.next.len().div_ceil(LINE_BYTES).min(max);
        let first = self.next.start;
        self.next.start += lines * LINE_BYTES;
        if self.next.start >= self.next.end {
            *self = std::mem::take(self).behind_next();
        }
        (first, lines)
    }

    /// Goes past what the first of so many tiles fetch of one piece, each so many lines, behind each other; answers where that begins, if there is something left, and how many tiles it takes.
    pub(super) fn next_tiles(&mut self, tiles: usize, lines_each: usize) -> (Option<usize>, usize) {
        let (first, lines) = self.next_lines(tiles * lines_each);
        if lines > 0 { (Some(first), lines.div_ceil(lines_each)) } else { (None, tiles) }
    }

    /// Goes past a line.
    #[inline]
    fn next_line(&mut self) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        let line = self.next.start;
        self.next.start += LINE_BYTES;
        if self.next.start >= self.next.end {
            *self = std::mem::take(self).behind_next();
        }
        Some(line)
    }

    /// Each of them.
    #[cfg(test)]
    pub(crate) fn each(mut self) -> Vec<Range<usize>> {
        let mut each = Vec::new();
        while self.count > 0 {
            each.push(self.next.clone());
            self = self.behind_next();
        }
        each
    }

    fn behind_next(self) -> Self {
        let first = self.first + self.apart;
        Pieces { next: first..first + self.bytes, first, count: self.count - 1, ..self }
    }
}

/// Chunks to fetch.
pub(super) struct ChunkList<'a> {
    chunks: &'a mut [usize],
    len: usize,
    /// Chunks that there is room for.
    max: usize,
}

impl<'a> ChunkList<'a> {
    pub(super) fn new(chunks: &'a mut [usize]) -> Self {
        let max = chunks.len();
        ChunkList { chunks, len: 0, max }
    }

    /// Begins anew, with room for `max` chunks at most.
    pub(super) fn clear(&mut self, max: usize) {
        self.len = 0;
        self.max = max.min(self.chunks.len());
    }

    /// Adds memory as far as there is room; answers what is left.
    pub(super) fn add(&mut self, bytes: Range<usize>) -> Range<usize> {
        let count = bytes.len().div_ceil(CHUNK_BYTES).min(self.max - self.len);
        let at = |i: usize| bytes.start + i * CHUNK_BYTES;
        self.chunks[self.len..self.len + count].iter_mut().enumerate().for_each(|(i, chunk)| *chunk = at(i));
        self.len += count;
        at(count).min(bytes.end)..bytes.end
    }

    /// As [`ChunkList::add`], of all pieces.
    pub(super) fn add_pieces(&mut self, mut pieces: Pieces) -> Pieces {
        while pieces.count > 0 {
            let left = self.add(pieces.next.clone());
            if !left.is_empty() {
                return Pieces { next: left, ..pieces };
            }
            pieces = pieces.behind_next();
        }
        pieces
    }

    pub(super) fn add_all<'b>(&mut self, all: impl Iterator<Item = &'b [u8]>) {
        for bytes in all.map(<[u8]>::as_ptr_range) {
            self.add(bytes.start.addr()..bytes.end.addr());
        }
    }

    pub(super) fn fetch(&self) -> Fetch {
        if self.len == 0 { Fetch::Nothing } else { Fetch::Chunks(&raw const self.chunks[..self.len]) }
    }

    /// What of it is fetched in some of `num_steps` steps.
    pub(super) fn share(&self, steps: &Range<usize>, num_steps: usize) -> &[usize] {
        let at = |step: usize| self.len * step / num_steps;
        &self.chunks[at(steps.start)..at(steps.end)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines that `tiles` tiles of `steps` steps fetch of what comes next at `next`, and of chunks.
    fn fetched(next: usize, chunks: &[usize], tiles: usize, steps: usize) -> (Vec<usize>, Vec<usize>) {
        let (mut lines, mut of_chunks) = (Vec::new(), Vec::new());
        for i in 0..tiles {
            let chunks = match next_of_tile(std::ptr::without_provenance(next), chunks, i, tiles, steps) {
                Fetch::Next(first, each, chunks) => {
                    let each = if each == Lines::One { 1 } else { 2 };
                    lines.extend((0..each * steps).map(|line| first.addr() + line * 64));
                    chunks
                }
                Fetch::Chunks(chunks) => chunks,
                Fetch::Nothing => &[],
                Fetch::Own(_) | Fetch::Hints(_) | Fetch::Stream(_) => unreachable!("not of several tiles"),
            };
            // SAFETY: parts of the chunks above.
            of_chunks.extend_from_slice(unsafe { &*chunks });
            assert!(chunks.len() <= steps / CHUNK_STEPS, "a tile fetches no more chunks than it has steps for");
        }
        lines.sort_unstable();
        of_chunks.sort_unstable();
        (lines, of_chunks)
    }

    #[test]
    fn tiles_fetch_every_line_of_what_comes_next_and_every_chunk_once() {
        for steps in [CHUNK_STEPS, 64] {
            let all: Vec<usize> = (0..VECTORS_MAX * steps).map(|line| 4096 + line * 64).collect();
            for tiles in 2..=FETCHING_TILES_MAX {
                for num_chunks in 0..=tiles * (steps / CHUNK_STEPS) {
                    let chunks: Vec<usize> = (0..num_chunks).map(|chunk| (1 << 20) + chunk * CHUNK_BYTES).collect();
                    assert_eq!(fetched(4096, &chunks, tiles, steps), (all.clone(), chunks), "{tiles} tiles of {steps} steps");
                }
            }
        }
    }

    #[test]
    fn shares_of_chunks_are_all_of_them() {
        let mut room = [0; 10];
        let mut list = ChunkList::new(&mut room);
        let left = list.add(0..CHUNK_BYTES * 7 - 1);
        assert!(left.is_empty());
        let shares: Vec<usize> = [0..64, 64..128, 128..150].iter().flat_map(|steps| list.share(steps, 150).to_vec()).collect();
        assert_eq!(shares, (0..7).map(|chunk| chunk * CHUNK_BYTES).collect::<Vec<_>>());
        // As far as there is room.
        assert_eq!(list.add(0..CHUNK_BYTES * 5), CHUNK_BYTES * 3..CHUNK_BYTES * 5);
        list.clear(2);
        assert_eq!(list.add(0..CHUNK_BYTES * 5), CHUNK_BYTES * 2..CHUNK_BYTES * 5);
    }

    #[test]
    fn pieces_are_gone_through_one_after_another_as_far_as_there_is_room() {
        let mut room = [0; 5];
        let mut pieces = Pieces::one(1000, 0..CHUNK_BYTES * 2 + 1).repeated(3, 10_000);
        let mut all = Vec::new();
        for room_for in [5, 1, 5] {
            let mut list = ChunkList::new(&mut room[..room_for]);
            pieces = list.add_pieces(pieces);
            let len = list.len;
            all.extend_from_slice(&room[..len]);
        }
        let expected = [1000, 11_000, 21_000].map(|first| [0, 1, 2].map(|chunk| first + chunk * CHUNK_BYTES));
        assert_eq!(all, expected.as_flattened());
        assert_eq!(pieces.count, 0);
        assert_eq!(ChunkList::new(&mut room).add_pieces(Pieces::default()).count, 0);
    }

    #[test]
    fn lines_of_pieces_are_fetched_one_after_another() {
        let mut pieces = Pieces::one(4096, 0..3 * LINE_BYTES).repeated(2, 10_000);
        assert_eq!(pieces.lines(), 6);
        let mut left = Vec::new();
        while pieces.count > 0 {
            pieces = pieces.fetch(2);
            left.push((pieces.next.start, pieces.lines()));
        }
        assert_eq!(left[..2], [(4096 + 2 * LINE_BYTES, 4), (14_096 + LINE_BYTES, 2)]);
        assert_eq!(left[2].1, 0);
        assert_eq!(Pieces::default().fetch(1), Pieces::default());
    }

    #[test]
    fn tiles_one_after_another_fetch_every_line_of_all_pieces_once() {
        for (count, bytes, tiles) in
            [(1, 512 * LINE_BYTES, 32), (1, 100 * LINE_BYTES, 32), (1, LINE_BYTES, 2), (3, 33 * LINE_BYTES, 8), (0, 1, 4)]
        {
            let mut pieces = if count > 0 { Pieces::one(4096, 0..bytes).repeated(count, 1 << 20) } else { Pieces::default() };
            let (all, lines_each) = (pieces.clone(), pieces.lines_each(tiles));
            let (mut lines, mut done) = (Vec::new(), 0);
            while done < tiles {
                let (first, of_run) = pieces.next_tiles(tiles - done, lines_each);
                assert!((1..=tiles - done).contains(&of_run));
                // The last tile goes on behind the end, which is fetched for nothing.
                lines.extend(
                    first.into_iter().flat_map(|first| (0..of_run * lines_each).map(move |line| first + line * LINE_BYTES)),
                );
                done += of_run;
            }
            assert_eq!(pieces.lines(), 0, "{count} pieces of {bytes} bytes");
            lines.retain(|line| all.clone().each().iter().any(|piece| piece.contains(line)));
            let expected: Vec<usize> = all.each().into_iter().flat_map(|piece| piece.step_by(LINE_BYTES)).collect();
            assert_eq!(lines, expected, "{count} pieces of {bytes} bytes");
        }
    }

    #[test]
    fn calls_fetch_every_line_of_all_pieces_once() {
        for count in 0..6 {
            for bytes in [1, LINE_BYTES, 5 * LINE_BYTES + 1, 128 * LINE_BYTES] {
                let all = if count == 0 { Pieces::default() } else { Pieces::one(4096, 0..bytes).repeated(count, 1 << 20) };
                let expected: Vec<usize> = (0..count)
                    .flat_map(|piece| (0..bytes.div_ceil(LINE_BYTES)).map(move |line| 4096 + (piece << 20) + line * LINE_BYTES))
                    .collect();
                for calls in count..40 {
                    let (mut pieces, each) = (all.clone(), all.lines_each(calls));
                    let mut lines = Vec::new();
                    for _ in 0..calls {
                        let (first, len) = pieces.next_lines(each);
                        assert!(len <= each);
                        lines.extend((0..len).map(|line| first + line * LINE_BYTES));
                    }
                    assert_eq!(lines, expected, "{count} pieces of {bytes} bytes, {calls} calls");
                }
            }
        }
    }
}
