//! Pages that sequences leave partly filled, and pages that others begin with a copy.
//!
//! Whole pages are shared. The page in which a sequence ends is its own; once nobody writes into it any more, it is registered as well. Who has some of its tokens behind the same pages, or some of a whole
//! page's, begins a page of his own with a copy of it and computes what comes behind: of a prompt that is asked for again the last token, of the next turn of a conversation what is new.
//! Where sequences have states none of this is of use: nobody can go on from the middle of a page, for no state is kept of it.

use super::Batcher;
use super::pages::{Alike, PageText, Prefix};
use super::pool::CachePool;
use crate::compute::Compute;

/// One in so many tokens of a page is to be there: copying it takes as long as computing one or two.
const WORTHWHILE_PART: usize = 16;

/// A page that was taken for a copy.
pub(super) struct Begun {
    pub(super) page: u32,
    pub(super) of: Alike,
    pub(super) copied: Result<(), String>,
}

impl<C: Compute> Batcher<C> {
    /// Takes a page that is promised, for a copy of one that begins with enough of these tokens, if there is one.
    pub(super) fn begin_page(&mut self, compute: &C, prefix: Prefix, tokens: &[u32]) -> Option<Begun> {
        let of = self.find_begun(prefix, tokens)?;
        let page = self.pool.take_page_beside(of.page)?;
        Some(Begun { page, of, copied: compute.copy_page(&mut self.cache, of.page, page) })
    }

    /// The page that begins with most of these tokens, if they are enough.
    fn find_begun(&self, prefix: Prefix, tokens: &[u32]) -> Option<Alike> {
        let found = if self.pool.has_states() { None } else { self.pool.find_alike(prefix, tokens) };
        found.filter(|of| of.tokens >= self.worthwhile())
    }

    /// Tokens of a page that are worth a copy.
    pub(super) fn worthwhile(&self) -> usize {
        (self.page_tokens / WORTHWHILE_PART).max(1)
    }

    /// Tokens of a prompt that may come from a copy: those of the page that it is about to read, or has begun.
    fn beginning(&self, id: u64) -> Option<(Prefix, Vec<u32>)> {
        let job = self.jobs.get(&id)?;
        let start = job.plan.pages_in(job.computed) * self.page_tokens;
        let end = job.plan.cacheable().min(start + self.page_tokens);
        (start < end).then(|| (job.prefix, job.plan.plain(start..end).to_vec()))
    }

    /// Begins the page that a prompt is about to read with a copy, if it has nothing of it and that is worth it.
    ///
    /// # Errors
    /// If the page was not copied. The job cannot go on.
    pub(super) fn begin_page_of_prompt(&mut self, compute: &C, id: u64) -> Result<(), String> {
        if self.jobs.get(&id).is_none_or(|job| !job.computed.is_multiple_of(self.page_tokens)) {
            return Ok(());
        }
        let Some((prefix, tokens)) = self.beginning(id) else { return Ok(()) };
        let Some(begun) = self.begin_page(compute, prefix, &tokens) else { return Ok(()) };
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(()) };
        job.reserved.pages -= 1;
        job.held.pages.push(begun.page);
        begun.copied?;
        job.held.begun = Some(begun.of.id);
        job.computed += begun.of.tokens;
        job.cache_hit_tokens += begun.of.tokens;
        Ok(())
    }

    /// Gives back the page that a prompt has begun with a copy and not gone on with, if by now there is more of it: whole pages, or a copy with enough more.
    pub(super) fn begin_anew(&mut self, id: u64) {
        let Some((prefix, tokens)) = self.beginning(id) else { return };
        let Some(job) = self.jobs.get(&id) else { return };
        let page = job.plan.pages_in(job.computed);
        let has = job.computed - page * self.page_tokens;
        let is_whole = page < job.plan.cacheable_pages() && self.pool.has(prefix, job.plan.page(page));
        if !is_whole && self.find_begun(prefix, &tokens).is_none_or(|of| of.tokens < has + self.worthwhile()) {
            return;
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.held.begun = None;
        job.computed -= has;
        job.cache_hit_tokens -= has;
        let own = job.held.pages.split_off(page);
        job.reserved.pages += own.len();
        self.pool.give_back(&own);
    }
}

/// Registers the page in which `tokens` of a sequence lie and no more, and into which nobody writes any more.
pub(super) fn register_begun(pool: &mut CachePool, prefix: Prefix, tokens: &[u32], page: Option<&mut u32>) {
    if let Some(page) = page.filter(|_| !tokens.is_empty() && !pool.has_states()) {
        pool.register(prefix, PageText::plain(tokens), page);
    }
}
