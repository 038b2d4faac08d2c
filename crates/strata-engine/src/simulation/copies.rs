//! What of a step a model need not compute, and whether what it relies on for that is so.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use crate::compute::StepSpan;

/// One in so many tokens of a step is a copy at least, or they are computed like all others.
pub(super) const COPIES_PART: usize = 8;

/// Tokens of a step that are no copies, or all, where few are: as a model counts them.
///
/// # Errors
/// If sequences that are said to have begun a page with the same tokens have others there.
pub(super) fn num_computed<F, S>(spans: &[StepSpan<'_, F, S>], pages: &[Vec<u64>]) -> Result<usize, String> {
    let page_tokens = pages.first().map_or(1, Vec::len);
    let all: usize = spans.iter().map(|span| span.tokens.len()).sum();
    let (mut firsts, mut begins, mut copies) = (HashSet::new(), HashMap::new(), 0);
    for span in spans {
        let whole = &span.held.pages[..span.past / page_tokens];
        let begun = match (span.past % page_tokens, span.held.begun) {
            (0, _) => None,
            (_, None) => continue,
            (tokens, Some(begun)) => Some((tokens, begun)),
        };
        let behind = (span.weights.0, whole, begun);
        let own = begun.map_or(&[][..], |(tokens, _)| &pages[span.held.pages[whole.len()] as usize][..tokens]);
        match begins.entry(behind) {
            Entry::Vacant(entry) => drop(entry.insert(own)),
            Entry::Occupied(entry) if *entry.get() == own => {}
            Entry::Occupied(entry) => return Err(format!("{own:?} and {:?} are said to be the same", entry.get())),
        }
        if span.pictures.is_empty() {
            copies += (1..=span.tokens.len()).filter(|&until| !firsts.insert((behind, &span.tokens[..until]))).count();
        }
    }
    Ok(if copies * COPIES_PART >= all { all - copies } else { all })
}
