//! Sequences of a batch that begin alike.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use strata_tensor::Repeats;

use crate::batch::Span;
use crate::{PAGE_TOKENS, PackedBatch};

/// One in so many tokens repeats another at least: for fewer it does not pay to move rows about.
const WORTHWHILE_PART: usize = 8;

/// What a token is, beside what comes before it.
#[derive(PartialEq, Eq, Hash)]
struct Token {
    id: u32,
    position: [u32; 3],
    /// Of one of a picture, where what is seen of it lies.
    seen: Option<(usize, usize)>,
}

/// What comes before a token.
#[derive(PartialEq, Eq, Hash)]
enum Before<'b> {
    /// What is in the cache, or nothing: it is the first new one of a sequence of this group. Long sequences may have angles of their own.
    Past { group: usize, is_long: bool, past: Past<'b> },
    /// The first of all tokens that follow the same tokens and are the same.
    Token(usize),
}

/// What a sequence has in the cache, where others can have the same.
#[derive(PartialEq, Eq, Hash)]
struct Past<'b> {
    /// Whole pages are never changed, and so are shared.
    pages: &'b [u32],
    /// How many tokens it has in the page behind them, which is its own, and what they are.
    begun: Option<(usize, u64)>,
}

/// The past of a sequence, if others can have the same.
fn shared_past(span: &Span) -> Option<Past<'_>> {
    let pages = span.held.pages.get(..span.past / PAGE_TOKENS)?;
    match span.past % PAGE_TOKENS {
        0 => Some(Past { pages, begun: None }),
        tokens => span.held.begun.map(|begun| Past { pages, begun: Some((tokens, begun)) }),
    }
}

/// The tokens of a batch that follow the same tokens in the same group as earlier ones do, in the batch and in pages that both sequences hold; `None` where there are few. `is_long`: whether a
/// sequence of so many tokens has other angles than a short one.
pub(super) fn of(batch: &PackedBatch<'_>, is_long: impl Fn(usize) -> bool) -> Option<Repeats> {
    // Most steps go on with sequences that have nothing in common.
    batch.spans.iter().filter_map(shared_past).nth(1)?;
    let mut firsts: Vec<usize> = Vec::with_capacity(batch.len());
    let mut known: HashMap<(Before<'_>, Token), usize> = HashMap::with_capacity(batch.len());
    let mut images = batch.images.iter().peekable();
    let mut group = 0;
    for span in &batch.spans {
        while batch.groups[group].end <= span.tokens.start && group + 1 < batch.groups.len() {
            group += 1;
        }
        let Some(past) = shared_past(span) else {
            firsts.extend(span.tokens.clone());
            continue;
        };
        let mut before = Before::Past { group, is_long: is_long(span.length_max), past };
        for row in span.tokens.clone() {
            while images.next_if(|image| image.tokens.end <= row).is_some() {}
            let seen = images.peek().filter(|image| image.tokens.contains(&row)).map(|image| {
                let features: *const _ = image.features;
                (features.addr(), image.first + row - image.tokens.start)
            });
            let position = batch.positions.each_ref().map(|axis| axis[row]);
            let first = match known.entry((before, Token { id: batch.tokens[row], position, seen })) {
                Entry::Occupied(entry) => *entry.get(),
                Entry::Vacant(entry) => *entry.insert(row),
            };
            firsts.push(first);
            before = Before::Token(first);
        }
    }
    let repeated = firsts.iter().enumerate().filter(|(row, first)| row != *first).count();
    (repeated * WORTHWHILE_PART >= batch.len()).then(|| Repeats::new(&firsts))
}

#[cfg(test)]
mod tests {
    use strata_tensor::{CpuBackend, DType, Isa, Memory};

    use super::*;
    use crate::ImageFeatures;
    use crate::batch::{Held, PlacedImage};
    use crate::vision::Grid;

    fn found(batch: &PackedBatch<'_>) -> Option<Repeats> {
        of(batch, |length| length > 100)
    }

    fn packed(groups: &[&[&[u32]]]) -> PackedBatch<'static> {
        let mut batch = PackedBatch::new();
        for sequences in groups {
            batch.begin_group(None);
            sequences.iter().for_each(|tokens| batch.push_sequence(tokens));
        }
        batch
    }

    #[test]
    fn tokens_repeat_as_far_as_all_before_them_are_the_same() {
        let batch = packed(&[&[&[1, 2, 3, 4], &[1, 2, 4, 4], &[1, 2, 4], &[2, 2]]]);
        // The third begins as both do, and goes on as the second.
        assert_eq!(found(&batch), Some(Repeats::new(&[0, 1, 2, 3, 0, 1, 6, 7, 0, 1, 6, 11, 12])));
        // The same tokens in another group have other pairs.
        assert_eq!(found(&packed(&[&[&[1, 2, 3]], &[&[1, 2, 3]]])), None);
        assert_eq!(
            found(&packed(&[&[], &[&[5, 6]], &[&[1, 2, 3], &[1, 2, 3]]])),
            Some(Repeats::new(&[0, 1, 2, 3, 4, 2, 3, 4]))
        );
        assert_eq!(found(&packed(&[&[&[1, 2, 3, 4, 5, 6, 7, 8, 9], &[1, 20, 30, 40, 50, 60]]])), None, "one in 15 is too few");
    }

    #[test]
    fn sequences_with_other_angles_share_nothing() {
        let mut batch = packed(&[&[&[1, 2, 3]]]);
        batch.push_cached(&[1, 2, 3], 0, 200, Held::default());
        assert_eq!(found(&batch), None, "angles of a long sequence");
        batch.push_cached(&[1, 2, 3], 0, 300, Held::default());
        assert_eq!(found(&batch), Some(Repeats::new(&[0, 1, 2, 3, 4, 5, 3, 4, 5])));
    }

    #[test]
    fn behind_a_cache_tokens_repeat_where_it_is_the_same_whole_pages() {
        let with = |sequences: &[(&[u32], usize, &[u32])]| {
            let mut batch = PackedBatch::new();
            sequences.iter().for_each(|(tokens, past, pages)| batch.push_cached(tokens, *past, 100, pages.to_vec()));
            found(&batch)
        };
        let same = Some(Repeats::new(&[0, 1, 0, 1]));
        assert_eq!(with(&[(&[1, 2], 0, &[4]), (&[1, 2], 0, &[5])]), same, "pages of their own are where their own tokens go");
        let page = PAGE_TOKENS;
        assert_eq!(with(&[(&[1, 2], page, &[3, 4]), (&[1, 2], page, &[3, 5])]), same);
        assert_eq!(with(&[(&[1, 2], page, &[3, 4]), (&[1, 2], page, &[6, 5])]), None, "another past");
        assert_eq!(with(&[(&[1, 2], page, &[3, 4]), (&[1, 2], 0, &[3])]), None, "none");
        assert_eq!(with(&[(&[1, 2], page + 1, &[3, 4]), (&[1, 2], page + 1, &[3, 5])]), None, "part of a page");
        let beside = [(&[9][..], 7, &[0][..]), (&[1, 2], page, &[3, 4]), (&[1, 3], page, &[3, 5])];
        assert_eq!(with(&beside), Some(Repeats::new(&[0, 1, 2, 1, 4])));
    }

    #[test]
    fn tokens_repeat_where_a_page_is_begun_with_the_same() {
        let with = |sequences: &[(usize, &[u32], u64)]| {
            let mut batch = PackedBatch::new();
            for &(past, pages, begun) in sequences {
                batch.push_cached(&[1, 2], past, 100, Held { pages: pages.to_vec(), begun: Some(begun), ..Held::default() });
            }
            found(&batch)
        };
        let (page, same) = (PAGE_TOKENS, Some(Repeats::new(&[0, 1, 0, 1])));
        assert_eq!(with(&[(page + 5, &[3, 4], 8), (page + 5, &[3, 6], 8)]), same);
        assert_eq!(with(&[(5, &[4], 8), (5, &[6], 8)]), same, "the first page");
        assert_eq!(with(&[(page + 5, &[3, 4], 8), (page + 5, &[3, 6], 9)]), None, "other tokens");
        assert_eq!(with(&[(page + 5, &[3, 4], 8), (page + 6, &[3, 6], 8)]), None, "more of them");
        assert_eq!(with(&[(page + 5, &[3, 4], 8), (page + 5, &[2, 6], 8)]), None, "behind other pages");
        assert_eq!(with(&[(page, &[3, 4], 8), (page, &[3, 6], 9)]), same, "nothing is begun");
    }

    #[test]
    fn tokens_of_pictures_repeat_where_the_same_is_seen() {
        let backend = CpuBackend::with_isa(Isa::detect(), 1);
        let seen = || ImageFeatures { embeddings: backend.zeros(&[4, 2], DType::F32).unwrap(), deepstack: Vec::new() };
        let (a, b) = (seen(), seen());
        let with = |pictures: [(&ImageFeatures, [usize; 2]); 2]| {
            let mut batch = PackedBatch::new();
            for (features, [height, width]) in pictures {
                let image = PlacedImage { first: 1, grid: Grid { time: 1, height, width }, features: Some(features) };
                batch.push_with_images(&[7, 9, 9, 9, 9, 8], 0, 6, Held::default(), &[image]);
            }
            found(&batch)
        };
        assert_eq!(with([(&a, [2, 2]), (&a, [2, 2])]), Some(Repeats::new(&[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5])));
        assert_eq!(with([(&a, [2, 2]), (&b, [2, 2])]), None, "one token in twelve");
        // The first token of a picture lies where it lies, whatever its shape.
        assert_eq!(with([(&a, [2, 2]), (&a, [1, 4])]), Some(Repeats::new(&[0, 1, 2, 3, 4, 5, 0, 1, 2, 9, 10, 11])));
    }
}
