//! Which parts of what is mapped nobody uses, and who gets them next.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::system::HUGE_PAGE_BYTES;

/// How much memory there may be.
#[derive(Clone, Copy)]
pub(super) enum Limit {
    /// So many bytes that are free.
    Held(usize),
    /// What those that are in use leave of so many bytes.
    All(usize),
}

/// Free memory, as ranges of addresses no two of which are neighbours.
pub(super) struct Pool {
    /// By their first addresses.
    free: BTreeMap<usize, Free>,
    /// The same by `(bytes, address)`.
    by_len: BTreeSet<(usize, usize)>,
    held_bytes: usize,
    pub limit: Limit,
    /// Ranges that were ever freed.
    num_freed: u64,
}

struct Free {
    end: usize,
    /// Whether nobody has had it yet, so that it reads as zeros.
    untouched: bool,
    /// When the latest of its parts was freed, counted in ranges.
    freed: u64,
}

/// Whole huge pages within a range.
fn whole_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.next_multiple_of(HUGE_PAGE_BYTES);
    start..(range.end / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES).max(start)
}

impl Pool {
    pub const fn new(limit: Limit) -> Self {
        Pool { free: BTreeMap::new(), by_len: BTreeSet::new(), held_bytes: 0, limit, num_freed: 0 }
    }

    /// The start of the smallest range of at least so many bytes, and whether it reads as zeros.
    pub fn take(&mut self, bytes: usize) -> Option<(usize, bool)> {
        let &(_, start) = self.by_len.range((bytes, 0)..).next()?;
        let Free { end, untouched, freed } = self.remove(start);
        self.insert(start + bytes..end, untouched, freed);
        Some((start, untouched))
    }

    /// Takes in what is free from now on. `untouched`: nobody has had it, so that it reads as zeros.
    pub fn put(&mut self, mut range: Range<usize>, mut untouched: bool) {
        self.num_freed += 1;
        let before = self.free.range(..range.start).next_back().map(|(&start, free)| start..free.end);
        let behind = self.free.get(&range.end).map(|free| range.end..free.end);
        for neighbour in [before.filter(|before| before.end == range.start), behind].into_iter().flatten() {
            untouched &= self.remove(neighbour.start).untouched;
            range = range.start.min(neighbour.start)..range.end.max(neighbour.end);
        }
        self.insert(range, untouched, self.num_freed);
    }

    /// Takes out whole huge pages of at least so many bytes together, of as few ranges as there can be. None if there are not so many.
    pub fn take_pages(&mut self, bytes: usize) -> Option<Vec<Range<usize>>> {
        if self.held_bytes < bytes {
            return None;
        }
        let (mut found, mut missing) = (Vec::new(), bytes.next_multiple_of(HUGE_PAGE_BYTES));
        for &(len, start) in self.by_len.iter().rev() {
            let pages = whole_pages(&(start..start + len));
            let taken = pages.len().min(missing);
            if taken > 0 {
                found.push(pages.end - taken..pages.end);
            }
            missing -= taken;
            if missing == 0 {
                found.iter().for_each(|pages| self.take_out(pages.clone()));
                return Some(found);
            }
        }
        None
    }

    /// Takes out whole huge pages, of what has waited longest, down to what it may hold beside `live` bytes in use. Less than a huge page stays.
    pub fn evict(&mut self, live: usize) -> Vec<Range<usize>> {
        let held_max = match self.limit {
            Limit::Held(bytes) => bytes,
            Limit::All(bytes) => bytes.saturating_sub(live),
        };
        let mut evicted = Vec::new();
        while self.held_bytes > held_max {
            let pages = self.free.iter().map(|(&start, free)| (free.freed, whole_pages(&(start..free.end))));
            let Some((_, pages)) = pages.filter(|(_, pages)| !pages.is_empty()).min_by_key(|(freed, _)| *freed) else { break };
            let surplus = (self.held_bytes - held_max).next_multiple_of(HUGE_PAGE_BYTES);
            let pages = pages.end - pages.len().min(surplus)..pages.end;
            self.take_out(pages.clone());
            evicted.push(pages);
        }
        evicted
    }

    /// Takes out a part of a range.
    fn take_out(&mut self, part: Range<usize>) {
        let (&start, _) = self.free.range(..=part.start).next_back().expect("it is a part of a range");
        let Free { end, untouched, freed } = self.remove(start);
        assert!(part.end <= end);
        self.insert(start..part.start, untouched, freed);
        self.insert(part.end..end, untouched, freed);
    }

    fn remove(&mut self, start: usize) -> Free {
        let free = self.free.remove(&start).expect("it was just seen");
        self.by_len.remove(&(free.end - start, start));
        self.held_bytes -= free.end - start;
        free
    }

    fn insert(&mut self, range: Range<usize>, untouched: bool, freed: u64) {
        if range.is_empty() {
            return;
        }
        self.by_len.insert((range.len(), range.start));
        self.held_bytes += range.len();
        self.free.insert(range.start, Free { end: range.end, untouched, freed });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    const HUGE: usize = HUGE_PAGE_BYTES;

    fn ranges(pool: &Pool) -> Vec<Range<usize>> {
        pool.free.iter().map(|(&start, free)| start..free.end).collect()
    }

    fn pages(numbers: Range<usize>) -> Range<usize> {
        numbers.start * HUGE..numbers.end * HUGE
    }

    fn pool_of(ranges: &[Range<usize>]) -> Pool {
        let mut pool = Pool::new(Limit::Held(usize::MAX));
        ranges.iter().for_each(|range| pool.put(range.clone(), false));
        pool
    }

    #[test]
    fn neighbours_become_one_and_the_smallest_that_suffices_is_taken() {
        let mut pool = pool_of(&[100..200, 300..400, 500..550]);
        assert_eq!(pool.take(101), None);
        pool.put(200..300, false);
        assert_eq!(ranges(&pool), [100..400, 500..550]);
        assert_eq!((pool.take(40), pool.take(60)), (Some((500, false)), Some((100, false))));
        assert_eq!(ranges(&pool), [160..400, 540..550]);
        pool.put(400..540, false);
        assert_eq!((ranges(&pool).len(), pool.held_bytes), (1, 390));
        assert_eq!(pool.take(390), Some((160, false)));
        assert_eq!((ranges(&pool), pool.held_bytes), (vec![], 0));
    }

    #[test]
    fn what_nobody_has_had_is_known_until_it_meets_what_somebody_had() {
        let mut pool = Pool::new(Limit::Held(usize::MAX));
        pool.put(100..200, true);
        assert_eq!(pool.take(10), Some((100, true)));
        assert_eq!(pool.take(10), Some((110, true)));
        pool.put(110..120, false);
        assert_eq!(pool.take(10), Some((110, false)));
        assert_eq!(pool.take(10), Some((120, false)));
    }

    #[test]
    fn what_waited_longest_goes_first_and_no_more_than_must() {
        let mut pool = pool_of(&[0..4 * HUGE, 10 * HUGE + 1..12 * HUGE, 20 * HUGE - 5..23 * HUGE + 5]);
        pool.limit = Limit::All(10 * HUGE);
        assert_eq!(pool.evict(0), []);
        assert_eq!(pool.evict(HUGE), vec![pages(3..4)]);
        // What has been in use again is not old any more.
        assert_eq!(pool.take(2 * HUGE - 1), Some((10 * HUGE + 1, false)));
        pool.put(10 * HUGE + 1..12 * HUGE, false);
        assert_eq!(pool.evict(7 * HUGE), [0..3 * HUGE, 20 * HUGE..23 * HUGE]);
        pool.limit = Limit::Held(0);
        assert_eq!(pool.evict(usize::MAX), vec![pages(11..12)]);
        // Less than a huge page cannot go.
        assert_eq!(ranges(&pool), [10 * HUGE + 1..11 * HUGE, 20 * HUGE - 5..20 * HUGE, 23 * HUGE..23 * HUGE + 5]);
    }

    #[test]
    fn pages_are_of_the_largest_ranges() {
        let mut pool = pool_of(&[0..3 * HUGE, 10 * HUGE..15 * HUGE + 7, 20 * HUGE + 1..22 * HUGE, 30 * HUGE..32 * HUGE - 1]);
        assert_eq!(pool.take_pages(10 * HUGE + 1), None);
        assert_eq!(pool.take_pages(6 * HUGE + 1), Some(vec![10 * HUGE..15 * HUGE, HUGE..3 * HUGE]));
        assert_eq!(pool.take_pages(3 * HUGE), Some(vec![30 * HUGE..31 * HUGE, 21 * HUGE..22 * HUGE, 0..HUGE]));
        assert_eq!(ranges(&pool), [15 * HUGE..15 * HUGE + 7, 20 * HUGE + 1..21 * HUGE, 31 * HUGE..32 * HUGE - 1]);
    }

    /// Whatever is taken and freed, every byte is in use, free, or the system's, and in one of these only.
    #[test]
    fn nothing_is_lost_and_nothing_is_had_twice() {
        let mut pool = Pool::new(Limit::Held(0));
        let (mut live, mut mapped) = (Vec::<Range<usize>>::new(), BTreeSet::<usize>::new());
        let unmap = |mapped: &mut BTreeSet<usize>, gone: Vec<Range<usize>>| {
            for gone in gone {
                assert!(gone.start % HUGE == 0 && gone.end % HUGE == 0 && !gone.is_empty());
                assert!(gone.step_by(HUGE).all(|page| mapped.remove(&page)), "it was not mapped");
            }
        };
        let (mut next, mut gathered, mut evicted) = (HUGE, 0, 0);
        for i in 0..20_000u64 {
            let [kind, size, which, shift] = random::philox(7, [i, 0]);
            let in_use: usize = live.iter().map(Range::len).sum();
            // By turns there is room beside what is in use, and there is not.
            let limit = if i / 1000 % 2 == 0 { 200 * HUGE } else { 100 * HUGE };
            if i % 1000 == 0 {
                pool.limit = Limit::All(limit);
                let gone = pool.evict(in_use);
                unmap(&mut mapped, gone);
            }
            if kind % 100 < 45 && !live.is_empty() {
                let range = live.swap_remove(which as usize % live.len());
                pool.put(range.clone(), false);
                let gone = pool.evict(in_use - range.len());
                evicted += gone.len();
                unmap(&mut mapped, gone);
            } else {
                let len = ((size as usize % (40 * HUGE)) >> (shift % 12)).max(1).next_multiple_of(4096);
                if in_use + len > 150 * HUGE {
                    continue;
                }
                let start = pool.take(len).map_or_else(
                    || {
                        let bytes = len.next_multiple_of(HUGE);
                        let pages = pool.take_pages(len);
                        gathered += usize::from(pages.is_some());
                        let gone = pages.unwrap_or_else(|| {
                            let gone = pool.evict(in_use + bytes);
                            evicted += gone.len();
                            gone
                        });
                        unmap(&mut mapped, gone);
                        // Sometimes beside what was mapped last.
                        let start = next + (shift as usize >> 16) % 2 * HUGE;
                        next = start + bytes;
                        mapped.extend((start..next).step_by(HUGE));
                        if len < bytes {
                            pool.put(start + len..next, true);
                        }
                        start
                    },
                    |(start, _)| start,
                );
                live.push(start..start + len);
            }
            let mut all: Vec<(Range<usize>, bool)> = live.iter().cloned().map(|range| (range, false)).collect();
            let free = ranges(&pool);
            assert_eq!(pool.held_bytes, free.iter().map(Range::len).sum::<usize>());
            assert_eq!(pool.by_len.len(), free.len());
            all.extend(free.into_iter().map(|range| (range, true)));
            all.sort_by_key(|(range, _)| range.start);
            assert!(all.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start), "had twice");
            assert!(all.windows(2).all(|pair| !(pair[0].1 && pair[1].1 && pair[0].0.end == pair[1].0.start)), "not joined");
            let bytes: usize = all.iter().map(|(range, _)| range.len()).sum();
            assert_eq!(bytes, mapped.len() * HUGE);
            let none_whole = || ranges(&pool).iter().all(|range| whole_pages(range).is_empty());
            assert!(bytes <= limit || none_whole(), "{bytes} bytes are above the limit");
        }
        assert!(gathered > 100 && evicted > 100, "{gathered} gathered, {evicted} evicted");
    }
}
