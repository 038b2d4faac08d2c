//! A packed batch: the tokens of many sequences, grouped by adapter, with no padding anywhere.

use std::ops::Range;

use strata_tensor::Repeats;

use crate::architectures::ImageFeatures;
use crate::lora::Adapter;
use crate::vision::Grid;

/// What a sequence holds of a cache. Nothing for one that is computed whole without a cache, as in training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Pages, in order, enough for all of its tokens and those that a batch adds.
    pub pages: Vec<u32>,
    /// Its state, in a cache that has states ([`crate::Model::kv_state_bytes`]). No other sequence of a batch has the same.
    pub state: Option<u32>,
    /// If its past ends within a page: what is in that page so far, as a number that sequences of as much past have in common if they have the same tokens there, each in a page of its own, behind the same
    /// pages. `None`: it is not known of any others.
    pub begun: Option<u64>,
}

impl From<Vec<u32>> for Held {
    /// Of a cache without states.
    fn from(pages: Vec<u32>) -> Self {
        Held { pages, ..Held::default() }
    }
}

/// One sequence's new tokens in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where its tokens are in the batch.
    pub tokens: Range<usize>,
    /// Position of its first token: the number of tokens of the sequence that are already in the KV cache.
    pub past: usize,
    /// Tokens that the sequence has, or may come to have while its keys are in the cache. Some models turn positions otherwise in long sequences.
    pub length_max: usize,
    /// Where its past lies, and what it leaves for tokens after these goes.
    pub held: Held,
}

/// A picture among the tokens of a sequence.
#[derive(Clone, Copy)]
pub struct PlacedImage<'a> {
    /// Where its first token is in the sequence.
    pub first: usize,
    /// Its tokens, along time, height and width.
    pub grid: Grid,
    /// What the model sees of it: a row for each token. `None` for one of whose tokens none is new.
    pub features: Option<&'a ImageFeatures>,
}

impl PlacedImage<'_> {
    /// Where its tokens are in the sequence.
    pub fn tokens(&self) -> Range<usize> {
        self.first..self.first + self.grid.patches()
    }
}

/// Positions of some tokens of a sequence on three axes: time, height and width (`get_rope_index` of Qwen3-VL in transformers). Text counts on all of them; the tokens of a picture lie where
/// it begins, and as many rows and columns further as they are within it; what follows begins behind its longer side. They depend on the pictures before them and on nothing else: a
/// sequence that goes on has no state that could be lost.
fn positions<'i, 'a: 'i>(images: &'i [PlacedImage<'a>], tokens: Range<usize>) -> impl Iterator<Item = [u32; 3]> + 'i {
    let mut before = 0;
    // How far positions are behind the number of the token, after the first `before` images.
    let mut behind = 0;
    tokens.map(move |token| {
        while let Some(image) = images.get(before).filter(|image| image.tokens().end <= token) {
            behind += image.grid.patches() - image.grid.height.max(image.grid.width);
            before += 1;
        }
        let at = |place: usize| (place - behind) as u32;
        match images.get(before).filter(|image| image.first <= token) {
            Some(PlacedImage { first, grid, .. }) => {
                let (within, start) = (token - first, at(*first));
                let [frame, row, column] =
                    [within / (grid.height * grid.width), within / grid.width % grid.height, within % grid.width];
                [frame, row, column].map(|offset| start + offset as u32)
            }
            None => [at(token); 3],
        }
    })
}

/// Rows of an image's features in a batch.
pub(crate) struct ImageRows<'a> {
    /// Tokens of the batch.
    pub tokens: Range<usize>,
    /// The first of the rows that they have.
    pub first: usize,
    pub features: &'a ImageFeatures,
}

/// A run of tokens of a batch that share an adapter.
#[derive(Clone, Copy)]
pub struct AdapterGroup<'a> {
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// The adapter, or `None` for the bare base model.
    pub adapter: Option<&'a Adapter>,
}

/// Tokens of several sequences, `[total_tokens]`, sequence after sequence, adapter after adapter.
#[derive(Default)]
pub struct PackedBatch<'a> {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Positions of each token in its sequence, on three axes that differ within pictures only.
    pub positions: [Vec<u32>; 3],
    /// Which tokens are those of pictures.
    pub(crate) images: Vec<ImageRows<'a>>,
    /// The sequences, in order; they cover all tokens.
    pub spans: Vec<Span>,
    /// The adapters, in order; they cover all tokens.
    pub groups: Vec<AdapterGroup<'a>>,
}

impl<'a> PackedBatch<'a> {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a run of sequences that share `adapter`. Every sequence pushed next belongs to it.
    pub fn begin_group(&mut self, adapter: Option<&'a Adapter>) {
        let at = self.tokens.len();
        self.groups.push(AdapterGroup { start: at, end: at, adapter });
    }

    /// Adds a whole sequence that needs no cache (training, scoring).
    pub fn push_sequence(&mut self, tokens: &[u32]) {
        self.push_cached(tokens, 0, tokens.len(), Held::default());
    }

    /// Adds `tokens` that follow `past` tokens already in the cache, in what the sequence holds of it; the sequence may come to have `length_max`.
    pub fn push_cached(&mut self, tokens: &[u32], past: usize, length_max: usize, held: impl Into<Held>) {
        self.push_with_images(tokens, past, length_max, held, &[]);
    }

    /// As [`PackedBatch::push_cached`], of a sequence with pictures: all that it has, in order, whichever of their tokens are in `past`, in `tokens` or neither.
    ///
    /// # Panics
    /// If the pictures are not in order, or overlap, or one with new tokens comes without its features.
    pub fn push_with_images(
        &mut self,
        tokens: &[u32],
        past: usize,
        length_max: usize,
        held: impl Into<Held>,
        images: &[PlacedImage<'a>],
    ) {
        assert!(images.windows(2).all(|pair| pair[0].tokens().end <= pair[1].first), "pictures are not in order");
        if self.groups.is_empty() {
            self.begin_group(None);
        }
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let new = past..past + tokens.len();
        for place in positions(images, new.clone()) {
            self.positions.iter_mut().zip(place).for_each(|(axis, position)| axis.push(position));
        }
        for image in images {
            let seen = image.tokens().start.max(new.start)..image.tokens().end.min(new.end);
            if !seen.is_empty() {
                let tokens = start + seen.start - past..start + seen.end - past;
                let features = image.features.expect("a picture with new tokens comes with what is seen of it");
                self.images.push(ImageRows { tokens, first: seen.start - image.first, features });
            }
        }
        let end = self.tokens.len();
        self.spans.push(Span { tokens: start..end, past, length_max, held: held.into() });
        self.groups.last_mut().expect("a group was begun above").end = end;
    }

    /// Its tokens that repeat no others, each with its position. Sequences that have none of their own are left out.
    pub(crate) fn without(&self, repeats: &Repeats) -> Self {
        let of = |values: &Vec<u32>| repeats.firsts().iter().map(|&row| values[row]).collect();
        let own = |tokens: &Range<usize>| Some(repeats.own(tokens)).filter(|own| !own.is_empty());
        let span = |span: &Span| {
            let tokens = own(&span.tokens)?;
            let past = span.past + span.tokens.len() - tokens.len();
            Some(Span { tokens, past, ..span.clone() })
        };
        let image = |image: &ImageRows<'a>| {
            let tokens = own(&image.tokens)?;
            let first = image.first + image.tokens.len() - tokens.len();
            Some(ImageRows { tokens, first, features: image.features })
        };
        let group = |group: &AdapterGroup<'a>| {
            let Range { start, end } = repeats.own(&(group.start..group.end));
            AdapterGroup { start, end, ..*group }
        };
        PackedBatch {
            tokens: of(&self.tokens),
            positions: self.positions.each_ref().map(of),
            images: self.images.iter().filter_map(image).collect(),
            spans: self.spans.iter().filter_map(span).collect(),
            groups: self.groups.iter().map(group).collect(),
        }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use strata_tensor::{CpuBackend, DType, Isa, Memory};

    use super::*;

    #[test]
    fn positions_are_those_of_transformers_wherever_a_sequence_is_cut() {
        let backend = CpuBackend::with_isa(Isa::detect(), 1);
        let features = ImageFeatures { embeddings: backend.zeros(&[6, 2], DType::F32).unwrap(), deepstack: Vec::new() };
        let image =
            |first, height, width| PlacedImage { first, grid: Grid { time: 1, height, width }, features: Some(&features) };
        // Two tokens of text, a picture of 2 by 3, one token, a picture of 1 by 4, and text.
        let images = [image(2, 2, 3), image(9, 1, 4)];
        let expected = [
            [0; 3],
            [1; 3],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5; 3],
            [6, 6, 6],
            [6, 6, 7],
            [6, 6, 8],
            [6, 6, 9],
            [10; 3],
            [11; 3],
        ];
        for start in 0..expected.len() {
            let found: Vec<[u32; 3]> = positions(&images, start..expected.len()).collect();
            assert_eq!(found, expected[start..], "from {start} on");
        }
        let mut batch = PackedBatch::new();
        batch.push_sequence(&[7, 7]);
        batch.push_with_images(&[9; 5], 4, 15, Held::default(), &images);
        let rows: Vec<_> = batch.images.iter().map(|rows| (rows.tokens.clone(), rows.first)).collect();
        assert_eq!(rows, [(2..6, 2)], "tokens 4 to 8, of which the last is text");
        assert_eq!(batch.positions.map(|axis| axis[2]), [2, 2, 4]);
    }
}
