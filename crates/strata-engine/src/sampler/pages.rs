//! Who owns which page of the KV cache, and which pages hold a prefix that the next prompt may begin with.
//!
//! Pages are counted, not owned: sequences with a common prefix hold the same pages. A full page of known tokens is also
//! registered in a trie, keyed by its predecessor and its tokens; the root of each chain is the weights that computed
//! it. So is a page that its sequence has left partly filled: nobody holds it as his own, but who goes on with some of its tokens, or with some
//! of a full page's, begins with a copy of it. A registered page that nobody holds stays until its memory is needed, the least recently used goes first, or until another page begins with all that is in it.
//! Of those that are partly filled only some stay: what is seldom asked for again is to leave its memory, which is warm, to the next.
//!
//! Pages are reserved before they are taken: a sequence starts only when the pages it can ever need are promised to it, so
//! that no step can run out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::snapshot::WeightsId;

/// Of the pages that nobody holds, one in so many may be partly filled, or so many of a small cache.
const BEGUN_PART: usize = 32;
const BEGUN_MIN: usize = 8;

/// What precedes a page: nothing but the weights and the kind of sequence, or another registered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Prefix {
    Root { weights: WeightsId, is_long: bool },
    Page(u64),
}

/// What is in a page.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageText {
    /// What tells it from all others with the same tokens: nothing in a page without pictures.
    pub(crate) marks: Box<[u32]>,
    /// As many as the page has room for, or fewer in one that is partly filled.
    pub(crate) tokens: Box<[u32]>,
}

impl PageText {
    /// A page without pictures.
    pub(crate) fn plain(tokens: &[u32]) -> Self {
        PageText { marks: Box::default(), tokens: tokens.into() }
    }
}

type Key = (Prefix, PageText);

/// A page that begins with some tokens that are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alike {
    pub(crate) page: u32,
    /// Of what is in it, the number that nothing else ever has.
    pub(crate) id: u64,
    /// How many of the tokens it begins with.
    pub(crate) tokens: usize,
}

/// Whether the second page begins with all that is in the first, behind the same pages.
fn is_begun_as((prefix, text): &Key, (other, longer): &Key) -> bool {
    prefix == other && text.marks == longer.marks && longer.tokens.starts_with(&text.tokens)
}

struct Registration {
    page: u32,
    id: u64,
}

#[derive(Default)]
struct PageState {
    holders: u32,
    /// The page's place in the trie, if it has one.
    key: Option<Key>,
    /// When it was last let go, if it is registered and nobody holds it.
    idle_since: Option<u64>,
}

/// The owner of all pages.
pub(crate) struct PagePool {
    pages: Vec<PageState>,
    free: Vec<u32>,
    /// In this order pages that begin alike are neighbours.
    registered: BTreeMap<Key, Registration>,
    /// Registered pages that nobody holds, the least recently used first.
    idle: BTreeMap<u64, u32>,
    /// Those of them that are partly filled.
    idle_begun: BTreeSet<u64>,
    page_tokens: usize,
    reserved: usize,
    next_id: u64,
    now: u64,
}

impl PagePool {
    /// So many pages, of so many tokens each.
    pub(crate) fn new(num_pages: usize, page_tokens: usize) -> Self {
        PagePool {
            pages: (0..num_pages).map(|_| PageState::default()).collect(),
            // Low numbers first: memory is touched only as pages are used.
            free: (0..num_pages as u32).rev().collect(),
            registered: BTreeMap::new(),
            idle: BTreeMap::new(),
            idle_begun: BTreeSet::new(),
            page_tokens,
            reserved: 0,
            next_id: 0,
            now: 0,
        }
    }

    /// Pages that are neither held nor promised.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle.len() - self.reserved
    }

    /// Promises `count` pages that are available.
    pub(crate) fn reserve(&mut self, count: usize) {
        assert!(count <= self.available(), "{count} of {} available pages", self.available());
        self.reserved += count;
    }

    /// Gives back a promise of `count` pages.
    pub(crate) fn unreserve(&mut self, count: usize) {
        assert!(count <= self.reserved, "{count} of {} reserved pages", self.reserved);
        self.reserved -= count;
    }

    /// Takes a page that was promised. The caller clears it. If a registered page gave way, the id of the prefix that it made comes with it.
    pub(crate) fn take_reserved(&mut self) -> (u32, Option<u64>) {
        self.unreserve(1);
        let (page, forgotten) = self.free.pop().map_or_else(|| self.evict(), |page| (page, None));
        let state = &mut self.pages[page as usize];
        assert!(state.holders == 0 && state.key.is_none(), "page {page} is in use");
        state.holders = 1;
        (page, forgotten)
    }

    /// As [`PagePool::take_reserved`], but not the registered page `other`; `None` if there is nothing else.
    pub(crate) fn take_beside(&mut self, other: u32) -> Option<(u32, Option<u64>)> {
        if self.pages[other as usize].idle_since.is_some() && self.available() == 0 {
            return None;
        }
        self.hold(other);
        let taken = self.take_reserved();
        self.release(&[other]);
        Some(taken)
    }

    fn evict(&mut self) -> (u32, Option<u64>) {
        let (_, &page) = self.idle.first_key_value().expect("a reserved page is free or idle");
        (page, self.forget(page))
    }

    /// Takes a page that nobody holds out of the trie. The id of the prefix that it made.
    fn forget(&mut self, page: u32) -> Option<u64> {
        self.take_out_of_idle(page);
        let state = &mut self.pages[page as usize];
        state.key.take().and_then(|key| self.registered.remove(&key)).map(|r| r.id)
    }

    /// Frees every registered page that nobody holds. The ids of the prefixes that they made.
    pub(crate) fn forget_idle(&mut self) -> Vec<u64> {
        let mut forgotten = Vec::new();
        while !self.idle.is_empty() {
            let (page, prefix) = self.evict();
            self.free.push(page);
            forgotten.extend(prefix);
        }
        forgotten
    }

    /// Adds a holder to a page that is held or registered. Of one that nobody held, there must be one that is not promised.
    pub(crate) fn hold(&mut self, page: u32) {
        self.take_out_of_idle(page);
        self.pages[page as usize].holders += 1;
    }

    fn take_out_of_idle(&mut self, page: u32) {
        if let Some(since) = self.pages[page as usize].idle_since.take() {
            self.idle.remove(&since);
            self.idle_begun.remove(&since);
        }
    }

    /// Lets go of a sequence's pages, in the order of the sequence. Those that nobody holds any more become free, or idle if
    /// they are registered; of these the end of the sequence is forgotten before its beginning.
    pub(crate) fn release(&mut self, pages: &[u32]) {
        for &page in pages.iter().rev() {
            let state = &mut self.pages[page as usize];
            assert!(state.holders > 0, "page {page} is not held");
            state.holders -= 1;
            if state.holders > 0 {
                continue;
            }
            let Some(key) = &state.key else {
                self.free.push(page);
                continue;
            };
            // One that begins with all that is in this one serves whoever would copy it.
            let longer = self.registered.range((Bound::Excluded(key), Bound::Unbounded)).next();
            let kept = longer.filter(|(other, _)| is_begun_as(key, other)).map_or(page, |(_, other)| other.page);
            if kept != page {
                self.forget(page);
                self.free.push(page);
            }
            self.touch(kept);
        }
    }

    /// Notes that a registered page was used just now, if nobody holds it.
    fn touch(&mut self, page: u32) {
        if self.pages[page as usize].holders > 0 {
            return;
        }
        self.take_out_of_idle(page);
        self.now += 1;
        let state = &mut self.pages[page as usize];
        state.idle_since = Some(self.now);
        self.idle.insert(self.now, page);
        if state.key.as_ref().is_some_and(|(_, text)| text.tokens.len() < self.page_tokens) {
            self.idle_begun.insert(self.now);
        }
        if self.idle_begun.len() > (self.pages.len() / BEGUN_PART).max(BEGUN_MIN)
            && let Some(&page) = self.idle_begun.first().and_then(|oldest| self.idle.get(oldest))
        {
            self.forget(page);
            self.free.push(page);
        }
    }

    /// Looks a full page up. The id of the prefix it makes comes with it.
    pub(crate) fn find(&self, prefix: Prefix, text: PageText) -> Option<(u32, u64)> {
        self.registered.get(&(prefix, text)).map(|&Registration { page, id }| (page, id))
    }

    /// The page without pictures, full or not, that begins with most of these tokens, if any begins with the first.
    pub(crate) fn find_alike(&self, prefix: Prefix, tokens: &[u32]) -> Option<Alike> {
        let key: Key = (prefix, PageText::plain(tokens));
        let neighbours = [self.registered.range(..=&key).next_back(), self.registered.range(&key..).next()];
        let alike = neighbours.into_iter().flatten().filter(|((of, text), _)| *of == prefix && text.marks.is_empty());
        let alike = alike.map(|((_, text), &Registration { page, id })| {
            let same = text.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            Alike { page, id, tokens: same }
        });
        alike.max_by_key(|alike| alike.tokens).filter(|alike| alike.tokens > 0)
    }

    /// Registers a held page that is full, or into which nobody writes any more. If another page with the same tokens after the same prefix is registered already, that
    /// one stays, and takes the place of the held one: both have the same bits. Returns the prefix that the page makes.
    pub(crate) fn register(&mut self, prefix: Prefix, text: PageText, page: &mut u32) -> Prefix {
        let key: Key = (prefix, text);
        if let Some(&Registration { page: existing, id }) = self.registered.get(&key) {
            if existing != *page && self.pages[*page as usize].holders == 1 {
                // In this order there is always one that is not promised.
                self.release(&[*page]);
                self.hold(existing);
                *page = existing;
            }
            return Prefix::Page(id);
        }
        let state = &mut self.pages[*page as usize];
        assert!(state.holders > 0 && state.key.is_none(), "page {page} is free or registered with other tokens");
        state.key = Some(key.clone());
        let shorter = self.registered.range(..&key).next_back().filter(|(other, _)| is_begun_as(other, &key));
        if let Some(other) = shorter.map(|(_, r)| r.page).filter(|&other| self.pages[other as usize].holders == 0) {
            self.forget(other);
            self.free.push(other);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.registered.insert(key, Registration { page: *page, id });
        Prefix::Page(id)
    }
}

impl PagePool {
    /// Pages that nobody holds and that hold nothing.
    pub(crate) fn free_pages(&self) -> &[u32] {
        &self.free
    }

    /// Whether every page is free or idle, and none is promised.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn is_unused(&self) -> bool {
        self.reserved == 0 && self.free.len() + self.idle.len() == self.pages.len()
    }

    /// Compares the books with who holds what.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn audit(&self, holders: &std::collections::HashMap<u32, u32>, promised: usize) -> Result<(), String> {
        for (page, state) in (0u32..).zip(&self.pages) {
            let held = holders.get(&page).copied().unwrap_or(0);
            if held != state.holders {
                return Err(format!("page {page} is held {held} times, {} are counted", state.holders));
            }
            let places = usize::from(self.free.contains(&page))
                + usize::from(state.idle_since.is_some_and(|at| self.idle.get(&at) == Some(&page)))
                + usize::from(held > 0);
            if places != 1 {
                return Err(format!("page {page} is in {places} places"));
            }
        }
        let begun = self.idle.iter().filter(|(_, page)| {
            self.pages[**page as usize].key.as_ref().is_some_and(|(_, text)| text.tokens.len() < self.page_tokens)
        });
        if !begun.map(|(since, _)| since).eq(&self.idle_begun) {
            return Err("the pages that are partly filled are not those that are counted".into());
        }
        if promised != self.reserved {
            return Err(format!("{promised} pages are promised, {} are counted", self.reserved));
        }
        if self.reserved > self.free.len() + self.idle.len() {
            return Err(format!("{} pages are promised, {} are there", self.reserved, self.free.len() + self.idle.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const ROOT: Prefix = Prefix::Root { weights: WeightsId(1), is_long: false };
    const PAGE_TOKENS: usize = 64;

    fn tokens(seed: u32) -> PageText {
        PageText::plain(&(0..PAGE_TOKENS as u32).map(|i| i * 7 + seed).collect::<Vec<_>>())
    }

    fn take(pool: &mut PagePool) -> u32 {
        pool.reserve(1);
        pool.take_reserved().0
    }

    #[test]
    fn a_promise_is_kept_and_no_more_is_promised_than_there_is() {
        let mut pool = PagePool::new(3, PAGE_TOKENS);
        pool.reserve(2);
        assert_eq!(pool.available(), 1);
        let pages = [pool.take_reserved().0, pool.take_reserved().0];
        assert_eq!(pool.available(), 1);
        pool.release(&pages);
        assert_eq!(pool.available(), 3);
    }

    #[test]
    fn a_shared_page_is_free_only_after_its_last_holder_let_go() {
        let mut pool = PagePool::new(1, PAGE_TOKENS);
        let page = take(&mut pool);
        pool.hold(page);
        pool.release(&[page]);
        assert_eq!(pool.available(), 0);
        pool.release(&[page]);
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn a_prefix_is_found_only_behind_the_same_weights_and_tokens() {
        let mut pool = PagePool::new(4, PAGE_TOKENS);
        let (mut a, mut b) = (take(&mut pool), take(&mut pool));
        let after_a = pool.register(ROOT, tokens(1), &mut a);
        pool.register(after_a, tokens(2), &mut b);
        pool.release(&[a, b]);
        assert_eq!(pool.available(), 4);
        let (page, id) = pool.find(ROOT, tokens(1)).unwrap();
        assert_eq!((page, Prefix::Page(id)), (a, after_a));
        assert_eq!(pool.find(after_a, tokens(2)).unwrap().0, b);
        [a, b].into_iter().for_each(|page| pool.hold(page));
        assert_eq!(pool.available(), 2, "a page that is held again cannot be promised to others");
        for (weights, is_long) in [(2, false), (1, true)] {
            let root = Prefix::Root { weights: WeightsId(weights), is_long };
            assert!(pool.find(root, tokens(1)).is_none());
        }
        assert!(pool.find(ROOT, tokens(2)).is_none());
    }

    #[test]
    fn the_end_of_the_least_recent_sequence_is_evicted_first() {
        let mut pool = PagePool::new(3, PAGE_TOKENS);
        let [mut a, mut b, mut c] = [take(&mut pool), take(&mut pool), take(&mut pool)];
        let after_a = pool.register(ROOT, tokens(1), &mut a);
        pool.register(after_a, tokens(2), &mut b);
        pool.register(ROOT, tokens(3), &mut c);
        pool.release(&[a, b]);
        pool.release(&[c]);
        assert_eq!(take(&mut pool), b);
        pool.reserve(1);
        let (page, forgotten) = pool.take_reserved();
        assert_eq!((page, forgotten.map(Prefix::Page)), (a, Some(after_a)));
        assert!(pool.find(ROOT, tokens(1)).is_none());
        assert_eq!(pool.find(ROOT, tokens(3)).unwrap().0, c);
    }

    #[test]
    fn a_cache_that_is_emptied_is_free_and_finds_nothing() {
        let mut pool = PagePool::new(2, PAGE_TOKENS);
        let mut a = take(&mut pool);
        let after_a = pool.register(ROOT, tokens(1), &mut a);
        pool.release(&[a]);
        assert_eq!(pool.forget_idle().into_iter().map(Prefix::Page).collect::<Vec<_>>(), [after_a]);
        assert!(pool.find(ROOT, tokens(1)).is_none());
        assert_eq!((pool.free_pages().len(), pool.available()), (2, 2));
    }

    #[test]
    fn a_second_page_with_the_same_tokens_gives_way_to_the_first() {
        let mut pool = PagePool::new(2, PAGE_TOKENS);
        let (mut a, mut b) = (take(&mut pool), take(&mut pool));
        let second = b;
        assert_eq!(pool.register(ROOT, tokens(1), &mut a), pool.register(ROOT, tokens(1), &mut b));
        assert_eq!((b, pool.available()), (a, 1), "both hold the first");
        assert_eq!(take(&mut pool), second, "the second went straight back to the free pages");
        pool.release(&[a]);
        assert_eq!(pool.available(), 0);
        pool.release(&[b]);
        // Of a page that nobody holds, too, when all others are promised.
        pool.reserve(1);
        let mut third = second;
        assert!(matches!(pool.register(ROOT, tokens(1), &mut third), Prefix::Page(0)));
        assert_eq!((third, pool.available()), (a, 0));
        pool.audit(&HashMap::from([(a, 1)]), 1).unwrap();
    }

    #[test]
    fn of_pages_that_begin_alike_the_one_that_does_longest_is_found() {
        let mut pool = PagePool::new(8, PAGE_TOKENS);
        let mut register = |prefix: Prefix, text: PageText| {
            let mut page = take(&mut pool);
            (pool.register(prefix, text, &mut page), page)
        };
        let (full, other) = (register(ROOT, PageText::plain(&[1, 2, 3, 4])), register(ROOT, PageText::plain(&[1, 2, 5])));
        let part = register(ROOT, PageText::plain(&[1, 2, 3]));
        let behind = register(full.0, PageText::plain(&[1, 2, 3, 9]));
        register(ROOT, PageText { marks: [7].into(), tokens: [1, 8, 8, 8].into() });
        let found = |prefix: Prefix, tokens: &[u32]| {
            pool.find_alike(prefix, tokens).map(|Alike { page, id, tokens }| ((Prefix::Page(id), page), tokens))
        };
        assert_eq!(found(ROOT, &[1, 2, 3, 4]), Some((full, 4)));
        assert_eq!(found(ROOT, &[1, 2, 3]), Some((part, 3)));
        assert!([Some((full, 3)), Some((part, 3))].contains(&found(ROOT, &[1, 2, 3, 6])));
        assert_eq!(found(ROOT, &[1, 2, 5, 6]), Some((other, 3)));
        assert_eq!(found(ROOT, &[1, 2, 7]).unwrap().1, 2);
        assert_eq!(found(ROOT, &[1, 8, 8]).unwrap().1, 1, "of a page with a picture nothing is found");
        assert_eq!(found(ROOT, &[2, 2]), None);
        assert_eq!(found(ROOT, &[]), None);
        assert_eq!(found(full.0, &[1, 2, 3, 9]), Some((behind, 4)));
        assert_eq!(found(part.0, &[1, 2, 3, 9]), None, "nothing is behind it");
    }

    #[test]
    fn a_page_that_nobody_holds_is_free_if_another_begins_with_all_that_is_in_it() {
        let mut pool = PagePool::new(4, PAGE_TOKENS);
        let [mut a, mut b, mut c, mut d] = [(); 4].map(|()| take(&mut pool));
        let found = |pool: &PagePool| pool.find_alike(ROOT, &[1, 2, 9]).map(|alike| (alike.page, alike.tokens));
        pool.register(ROOT, PageText::plain(&[1, 2]), &mut a);
        pool.release(&[a]);
        assert_eq!((pool.free_pages(), found(&pool)), (&[][..], Some((a, 2))));
        pool.register(ROOT, PageText::plain(&[1, 2, 3, 4]), &mut b);
        assert_eq!((pool.free_pages(), found(&pool)), (&[a][..], Some((b, 2))));
        // One that is held goes once it is let go.
        pool.register(ROOT, PageText::plain(&[5]), &mut c);
        pool.register(ROOT, PageText::plain(&[5, 6]), &mut d);
        pool.release(&[d]);
        pool.release(&[b]);
        assert_eq!(pool.free_pages(), [a]);
        pool.release(&[c]);
        assert_eq!(pool.free_pages(), [a, c]);
        pool.reserve(3);
        assert_eq!([(); 3].map(|()| pool.take_reserved().0), [c, a, b], "what serves in its place was used last");
        pool.audit(&HashMap::from([(a, 1), (b, 1), (c, 1)]), 0).unwrap();
    }

    #[test]
    fn a_page_that_is_copied_does_not_give_way_to_its_copy() {
        let mut pool = PagePool::new(2, PAGE_TOKENS);
        let [mut a, mut b] = [take(&mut pool), take(&mut pool)];
        pool.register(ROOT, tokens(1), &mut a);
        pool.register(ROOT, tokens(2), &mut b);
        pool.release(&[a]);
        pool.release(&[b]);
        pool.reserve(1);
        assert_eq!(pool.take_beside(a).unwrap().0, b, "although it was used before that");
        pool.reserve(1);
        assert_eq!(pool.take_beside(a), None, "there is nothing else");
        pool.hold(b);
        pool.release(&[b]);
        pool.unreserve(1);
        pool.release(&[b]);
        pool.reserve(1);
        assert_eq!(pool.take_beside(a).unwrap().0, b);
        assert!(pool.find(ROOT, tokens(1)).is_some());
        pool.audit(&HashMap::from([(b, 1)]), 0).unwrap();
    }

    #[test]
    fn of_pages_that_are_partly_filled_only_the_last_stay() {
        let mut pool = PagePool::new(20, 4);
        let mut register = |tokens: &[u32]| {
            let mut page = take(&mut pool);
            pool.register(ROOT, PageText::plain(tokens), &mut page);
            pool.release(&[page]);
        };
        register(&[7, 8, 9, 10]);
        (0..12).for_each(|n| register(&[n, 1]));
        let found = |n: u32| pool.find_alike(ROOT, &[n, 1]).map_or(0, |alike| alike.tokens);
        assert_eq!((0..12).map(found).collect::<Vec<_>>(), [0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2]);
        assert!(pool.find(ROOT, PageText::plain(&[7, 8, 9, 10])).is_some(), "a full page stays");
        // The next takes the place of what went last.
        assert_eq!((pool.free.last(), pool.free.len()), (Some(&4), 11));
        pool.audit(&HashMap::new(), 0).unwrap();
    }
}
