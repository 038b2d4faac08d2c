//! The cache as sequences see it: pages and states, promised together and found together.

use strata_model::Held;

use super::pages::{Alike, PagePool, PageText, Prefix};
use super::room::Room;
use super::states::StatePool;

/// What the cache has of the beginning of a sequence.
pub(crate) struct Found {
    /// Its pages, which the sequence holds now.
    pub(crate) pages: Vec<u32>,
    /// What they amount to.
    pub(crate) prefix: Prefix,
    /// What it left behind, in a cache with states: to be copied before anything else is asked of the pool.
    pub(crate) snapshot: Option<u32>,
    /// Pages that are in the cache, of which those behind `pages` cannot be gone on from.
    pub(crate) known: usize,
}

/// The owner of all pages and states.
pub(crate) struct CachePool {
    size: Room,
    pages: PagePool,
    states: StatePool,
}

impl CachePool {
    /// Of this size, with pages of so many tokens.
    pub(crate) fn new(size: Room, page_tokens: usize) -> Self {
        CachePool { size, pages: PagePool::new(size.pages, page_tokens), states: StatePool::new(size.states) }
    }

    /// All there is.
    pub(crate) fn size(&self) -> Room {
        self.size
    }

    /// Whether a sequence has a state.
    pub(crate) fn has_states(&self) -> bool {
        self.size.states > 0
    }

    /// Promises this room, if it is neither held nor promised.
    pub(crate) fn try_reserve(&mut self, room: Room) -> bool {
        let fits = room.fits(Room { pages: self.pages.available(), states: self.states.available() });
        if fits {
            self.pages.reserve(room.pages);
            self.states.reserve(room.states);
        }
        fits
    }

    /// Gives back a promise.
    pub(crate) fn unreserve(&mut self, room: Room) {
        self.pages.unreserve(room.pages);
        self.states.unreserve(room.states);
    }

    /// Takes a page that was promised. The caller clears it.
    pub(crate) fn take_page(&mut self) -> u32 {
        let (page, forgotten) = self.pages.take_reserved();
        forgotten.into_iter().for_each(|prefix| self.states.forget(prefix));
        page
    }

    /// As [`CachePool::take_page`], but not this registered page; `None` if there is nothing else.
    pub(crate) fn take_page_beside(&mut self, other: u32) -> Option<u32> {
        let (page, forgotten) = self.pages.take_beside(other)?;
        forgotten.into_iter().for_each(|prefix| self.states.forget(prefix));
        Some(page)
    }

    /// Lets go of pages that nobody else holds, and promises as many to who held them.
    pub(crate) fn give_back(&mut self, pages: &[u32]) {
        self.pages.release(pages);
        self.pages.reserve(pages.len());
    }

    /// Takes a state that was promised. Right after [`CachePool::find_promised`] it may be the snapshot itself.
    pub(crate) fn take_state(&mut self) -> u32 {
        self.states.take_reserved()
    }

    /// Adds a holder to a page that is already held.
    pub(crate) fn hold_page(&mut self, page: u32) {
        self.pages.hold(page);
    }

    /// Lets go of all that a sequence holds. Its pages are kept for those who begin alike, as long as there is room.
    pub(crate) fn release(&mut self, held: Held) {
        self.pages.release(&held.pages);
        held.state.into_iter().for_each(|state| self.states.release(state));
    }

    /// Looks up the pages that a sequence begins with, full pages of tokens, as far as it can go on behind them. Those that are found take the place of as many that were promised to it.
    pub(crate) fn find_promised(&mut self, root: Prefix, pages: impl Iterator<Item = PageText>) -> Found {
        let mut chain = Vec::new();
        let mut prefix = root;
        for text in pages {
            let Some((page, id)) = self.pages.find(prefix, text) else { break };
            prefix = Prefix::Page(id);
            chain.push((page, id));
        }
        let known = chain.len();
        let mut snapshot = None;
        if self.has_states() {
            while let Some(&(_, id)) = chain.last() {
                snapshot = self.states.snapshot(id);
                if snapshot.is_some() {
                    break;
                }
                chain.pop();
            }
        }
        for &(page, _) in &chain {
            self.pages.hold(page);
            self.pages.unreserve(1);
        }
        let prefix = chain.last().map_or(root, |&(_, id)| Prefix::Page(id));
        Found { pages: chain.into_iter().map(|(page, _)| page).collect(), prefix, snapshot, known }
    }

    /// Whether a page is there after this prefix.
    pub(crate) fn has(&self, prefix: Prefix, text: PageText) -> bool {
        self.pages.find(prefix, text).is_some()
    }

    /// The page that begins with most of these tokens; see [`PagePool::find_alike`].
    pub(crate) fn find_alike(&self, prefix: Prefix, tokens: &[u32]) -> Option<Alike> {
        self.pages.find_alike(prefix, tokens)
    }

    /// Registers a held page; see [`PagePool::register`].
    pub(crate) fn register(&mut self, prefix: Prefix, text: PageText, page: &mut u32) -> Prefix {
        self.pages.register(prefix, text, page)
    }

    /// Whether a snapshot could be kept now.
    pub(crate) fn has_room_for_snapshot(&self) -> bool {
        self.states.available() > 0
    }

    /// A place for what this prefix left behind, if it has none and there is room.
    pub(crate) fn new_snapshot(&mut self, prefix: Prefix) -> Option<u32> {
        match prefix {
            Prefix::Page(id) => self.states.new_snapshot(id),
            Prefix::Root { .. } => None,
        }
    }

    /// Forgets what this prefix left behind.
    pub(crate) fn forget_snapshot(&mut self, prefix: Prefix) {
        if let Prefix::Page(id) = prefix {
            self.states.forget(id);
        }
    }

    /// Forgets every page that nobody holds.
    pub(crate) fn forget_idle(&mut self) {
        let forgotten = self.pages.forget_idle();
        forgotten.into_iter().for_each(|prefix| self.states.forget(prefix));
    }

    /// Pages and states that nobody holds and that hold nothing.
    pub(crate) fn free(&self) -> (&[u32], &[u32]) {
        (self.pages.free_pages(), self.states.free_states())
    }

    /// Whether nobody holds anything, and nothing is promised.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn is_unused(&self) -> bool {
        self.pages.is_unused() && self.states.is_unused()
    }

    /// Compares the books with what sequences hold, and with what is promised.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn audit<'h>(&self, holders: impl Iterator<Item = &'h Held>, promised: Room) -> Result<(), String> {
        let (mut pages, mut states) = (std::collections::HashMap::new(), Vec::new());
        for held in holders {
            held.pages.iter().for_each(|&page| *pages.entry(page).or_default() += 1);
            states.extend(held.state);
        }
        self.pages.audit(&pages, promised.pages)?;
        self.states.audit(&states, promised.states)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::WeightsId;

    const ROOT: Prefix = Prefix::Root { weights: WeightsId(1), is_long: false };

    fn pages(of: &[u32]) -> impl Iterator<Item = PageText> {
        of.iter().map(|&n| PageText::plain(&[n; 4]))
    }

    /// A chain of pages that nobody holds, of `of`, with snapshots behind those of `with`.
    fn keep(pool: &mut CachePool, of: &[u32], with: &[u32]) {
        assert!(pool.try_reserve(Room { pages: of.len(), states: 0 }));
        let mut held: Vec<u32> = of.iter().map(|_| pool.take_page()).collect();
        let mut prefix = ROOT;
        for ((text, page), n) in pages(of).zip(&mut held).zip(of) {
            prefix = pool.register(prefix, text, page);
            assert_eq!(with.contains(n), with.contains(n) && pool.new_snapshot(prefix).is_some());
        }
        pool.release(held.into());
    }

    #[test]
    fn without_states_a_sequence_goes_on_behind_all_that_is_known() {
        let mut pool = CachePool::new(Room { pages: 4, states: 0 }, 4);
        keep(&mut pool, &[1, 2, 3], &[]);
        assert!(pool.try_reserve(Room { pages: 3, states: 0 }));
        let found = pool.find_promised(ROOT, pages(&[1, 2, 4]));
        assert_eq!((found.pages.len(), found.known, found.snapshot), (2, 2, None));
        pool.audit([Held::from(found.pages)].iter(), Room { pages: 1, states: 0 }).unwrap();
    }

    #[test]
    fn with_states_a_sequence_goes_on_behind_the_last_snapshot() {
        let mut pool = CachePool::new(Room { pages: 6, states: 3 }, 4);
        keep(&mut pool, &[1, 2, 3], &[1, 2]);
        assert!(pool.try_reserve(Room { pages: 3, states: 1 }));
        let found = pool.find_promised(ROOT, pages(&[1, 2, 3]));
        assert_eq!((found.pages.len(), found.known, found.snapshot.is_some()), (2, 3, true));
        let held = Held { pages: found.pages, state: Some(pool.take_state()), ..Held::default() };
        pool.audit([held.clone()].iter(), Room { pages: 1, states: 0 }).unwrap();
        pool.unreserve(Room { pages: 1, states: 0 });
        // The state that a sequence takes may be the snapshot that it goes on from.
        assert!(pool.try_reserve(Room { pages: 2, states: 2 }));
        let first = pool.take_state();
        let again = pool.find_promised(ROOT, pages(&[1, 2]));
        assert_eq!((again.snapshot, again.pages.len()), (Some(pool.take_state()), 2));
        pool.audit(
            [
                held,
                Held { pages: again.pages, state: again.snapshot, ..Held::default() },
                Held { state: Some(first), ..Held::default() },
            ]
            .iter(),
            Room::default(),
        )
        .unwrap();
    }

    #[test]
    fn what_a_page_left_behind_is_forgotten_with_it() {
        let mut pool = CachePool::new(Room { pages: 1, states: 1 }, 4);
        keep(&mut pool, &[1], &[1]);
        assert_eq!(pool.free(), (&[][..], &[][..]));
        assert!(pool.try_reserve(Room { pages: 1, states: 0 }));
        let page = pool.take_page();
        assert_eq!(pool.free(), (&[][..], &[0][..]));
        pool.release(vec![page].into());
        keep(&mut pool, &[2], &[2]);
        pool.forget_idle();
        assert_eq!(pool.free(), (&[0][..], &[0][..]));
    }
}
