//! Pictures in inputs: where they lie among the tokens, and what tells one from another.
//!
//! A picture is looked at twice. Where it is sent, its head says how many tokens it is, and it is decoded once to know that it can be; its file is what waits, because it is the
//! smallest form there is. When its tokens are about to be computed the model [sees](crate::compute::Compute::see) it, and what it saw is kept in the [gallery](crate::gallery) for
//! whoever shows it again.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest, Sha256};
use strata_model::Model;
use strata_model::vision::{self, Grid};

use crate::api::Image;
use crate::datum::check_tokens;
use crate::limits::IMAGES_MAX;

/// What a picture is known by: the SHA-256 of its file. Two files of one picture are two.
pub(crate) type PictureId = [u8; 32];

/// Files that were found to be whole and need not be decoded again to know it.
const WHOLE_FILES_MAX: usize = 1024;

/// A checked picture of an input.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    /// Its first token in the input.
    pub(crate) first: usize,
    /// Its tokens, along time, height and width.
    pub(crate) grid: Grid,
    pub(crate) id: PictureId,
    pub(crate) file: Arc<[u8]>,
}

impl Picture {
    /// Where its tokens are in the input.
    pub(crate) fn tokens(&self) -> Range<usize> {
        self.first..self.first + self.grid.patches()
    }
}

/// What can be said of a picture before the model sees it.
pub(crate) trait Eyes: Send + Sync {
    /// The token that stands for a part of a picture.
    fn image_token(&self) -> u32;

    /// The most tokens of a picture for which there is memory.
    fn tokens_max(&self) -> usize;

    /// How the tokens of a picture lie, by the head of its file.
    ///
    /// # Errors
    /// A sentence, if there is no such picture, or it is too large.
    fn grid(&self, file: &[u8]) -> Result<Grid, String>;

    /// Makes sure that the model can see what the file holds.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    fn check(&self, id: &PictureId, file: &[u8]) -> Result<(), String>;
}

/// An input whose pictures are measured by the heads of their files: nothing is decoded yet, nor as many tokens written down.
pub(crate) struct Measured<'i> {
    text: &'i [i64],
    images: &'i [Image],
    grids: Vec<Grid>,
}

impl<'i> Measured<'i> {
    /// # Errors
    /// A message for the user that names the picture and what is wrong with it.
    pub(crate) fn new(text: &'i [i64], images: &'i [Image], eyes: Option<&dyn Eyes>) -> Result<Self, String> {
        if images.len() > IMAGES_MAX {
            return Err(format!("{} pictures are above the limit of {IMAGES_MAX} in an input", images.len()));
        }
        let grid = |(i, image): (usize, &Image)| match eyes {
            Some(eyes) => grid_of(image, eyes).map_err(|what| format!("images[{i}]: {what}")),
            None => Err(format!("images[{i}] is a picture, and this model reads text alone")),
        };
        let grids = images.iter().enumerate().map(grid).collect::<Result<_, String>>()?;
        Ok(Measured { text, images, grids })
    }

    /// Tokens of text and pictures.
    pub(crate) fn tokens(&self) -> usize {
        self.text.len() + self.grids.iter().map(Grid::patches).sum::<usize>()
    }

    /// The tokens, those of pictures among them, and the pictures, which are whole.
    ///
    /// # Errors
    /// A message for the user that names the token or picture and what is wrong with it; tokens are called `what`.
    pub(crate) fn place(
        self,
        what: &str,
        vocab_size: usize,
        eyes: Option<&dyn Eyes>,
    ) -> Result<(Vec<u32>, Vec<Picture>), String> {
        let text = check_tokens(what, self.text, vocab_size)?;
        let Some(eyes) = eyes.filter(|_| !self.images.is_empty()) else { return Ok((text, Vec::new())) };
        let (mut tokens, mut pictures) = (Vec::with_capacity(self.tokens()), Vec::with_capacity(self.images.len()));
        let (mut rest, mut before) = (&text[..], 0);
        for (i, (image, grid)) in self.images.iter().zip(self.grids).enumerate() {
            let Some((own, later)) = image.at.checked_sub(before).and_then(|own| rest.split_at_checked(own)) else {
                return Err(format!(
                    "images[{i}] is at token {}, not among the {} behind token {before}",
                    image.at,
                    rest.len()
                ));
            };
            (rest, before) = (later, image.at);
            tokens.extend_from_slice(own);
            let id: PictureId = Sha256::digest(&image.file).into();
            pictures.push(Picture { first: tokens.len(), grid, id, file: image.file.clone() });
            tokens.resize(tokens.len() + grid.patches(), eyes.image_token());
        }
        tokens.extend_from_slice(rest);
        for (i, picture) in pictures.iter().enumerate() {
            eyes.check(&picture.id, &picture.file).map_err(|error| format!("images[{i}]: {error}"))?;
        }
        Ok((tokens, pictures))
    }
}

fn grid_of(image: &Image, eyes: &dyn Eyes) -> Result<Grid, String> {
    let grid = eyes.grid(&image.file)?;
    let (tokens, max) = (grid.patches(), eyes.tokens_max());
    if let Some(expected) = image.expected_tokens.filter(|&expected| usize::try_from(expected) != Ok(tokens)) {
        return Err(format!("expected_tokens is {expected}, and this model makes {tokens} tokens of the picture"));
    }
    if tokens > max {
        return Err(format!(
            "a picture of {tokens} tokens is above {max}, the largest that memory allows; send a smaller one, or start the \
             server with more memory"
        ));
    }
    Ok(grid)
}

/// Whether a position is that of a picture.
pub(crate) fn is_seen(pictures: &[Picture], position: usize) -> bool {
    let next = pictures.partition_point(|picture| picture.tokens().end <= position);
    pictures.get(next).is_some_and(|picture| picture.first <= position)
}

/// What tells the tokens `range` of an input from all others with the same tokens: where the pictures that it touches begin, and what they are.
pub(crate) fn marks(pictures: &[Picture], range: Range<usize>) -> impl Iterator<Item = u32> {
    let first = pictures.partition_point(|picture| picture.tokens().end <= range.start);
    let touched = pictures[first..].iter().take_while(move |picture| picture.first < range.end);
    touched.flat_map(move |picture| {
        let words = picture.id.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        std::iter::once((picture.first as u32).wrapping_sub(range.start as u32)).chain(words)
    })
}

/// Bytes of the files of pictures.
pub(crate) fn file_bytes(pictures: &[Picture]) -> u64 {
    pictures.iter().map(|picture| (picture.file.len() + size_of::<Picture>()) as u64).sum()
}

/// What is known of pictures for a real model.
pub(crate) struct ModelEyes {
    model: Arc<Model>,
    image_token: u32,
    tokens_max: usize,
    decoding_bytes: u64,
    /// Who has this decodes: one picture at a time has pixels in memory.
    decoding: Mutex<()>,
    /// Which files were whole, the latest last.
    whole: Mutex<(HashSet<PictureId>, VecDeque<PictureId>)>,
}

impl ModelEyes {
    /// `None` for a model that reads text alone.
    pub(crate) fn of(model: &Arc<Model>, tokens_max: usize, decoding_bytes: u64) -> Option<Self> {
        let image_token = model.image_processor().and(model.config().image_token_id())?;
        Some(ModelEyes {
            model: model.clone(),
            image_token,
            tokens_max,
            decoding_bytes,
            decoding: Mutex::default(),
            whole: Mutex::default(),
        })
    }
}

impl Eyes for ModelEyes {
    fn image_token(&self) -> u32 {
        self.image_token
    }

    fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    fn grid(&self, file: &[u8]) -> Result<Grid, String> {
        let Some(processor) = self.model.image_processor() else { return Err("this model reads text alone".into()) };
        let (bytes, max) = (vision::decoding_bytes(file)?, self.decoding_bytes);
        if bytes > max {
            return Err(format!(
                "decoding the picture takes up to {bytes} bytes, above {max} that there are for it; send a smaller one"
            ));
        }
        Ok(processor.token_grid(&processor.grid(file)?))
    }

    fn check(&self, id: &PictureId, file: &[u8]) -> Result<(), String> {
        let is_known = || self.whole.lock().unwrap_or_else(PoisonError::into_inner).0.contains(id);
        if is_known() {
            return Ok(());
        }
        let _decoding = self.decoding.lock().unwrap_or_else(PoisonError::into_inner);
        // Someone else may have shown it meanwhile.
        if is_known() {
            return Ok(());
        }
        vision::check(file)?;
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        whole.0.insert(*id);
        whole.1.push_back(*id);
        if whole.1.len() > WHOLE_FILES_MAX
            && let Some(oldest) = whole.1.pop_front()
        {
            whole.0.remove(&oldest);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture is as many tokens as its file has bytes, all in one row; an empty one is broken, and one of zeros cannot be decoded.
    struct Toy;

    impl Eyes for Toy {
        fn image_token(&self) -> u32 {
            9
        }

        fn tokens_max(&self) -> usize {
            5
        }

        fn grid(&self, file: &[u8]) -> Result<Grid, String> {
            if file.is_empty() { Err("empty".into()) } else { Ok(Grid { time: 1, height: 1, width: file.len() }) }
        }

        fn check(&self, _: &PictureId, file: &[u8]) -> Result<(), String> {
            if file.iter().all(|byte| *byte == 0) { Err("zeros".into()) } else { Ok(()) }
        }
    }

    fn image(at: usize, file: &[u8], expected_tokens: Option<i64>) -> Image {
        Image { at, file: file.into(), expected_tokens }
    }

    fn place(text: &[i64], images: &[Image]) -> Result<(Vec<u32>, Vec<Picture>), String> {
        Measured::new(text, images, Some(&Toy))?.place("tokens", 10, Some(&Toy))
    }

    #[test]
    fn pictures_lie_where_they_were_put() {
        let images = [image(0, &[1, 1], Some(2)), image(2, &[2], None), image(2, &[3], None), image(3, &[4], None)];
        let (tokens, pictures) = place(&[5, 6, 7], &images).unwrap();
        assert_eq!(tokens, [9, 9, 5, 6, 9, 9, 7, 9]);
        assert_eq!(pictures.iter().map(Picture::tokens).collect::<Vec<_>>(), [0..2, 4..5, 5..6, 7..8]);
        let seen: Vec<bool> = (0..8).map(|position| is_seen(&pictures, position)).collect();
        assert_eq!(seen, tokens.iter().map(|token| *token == 9).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_wrong_with_a_picture_is_said_with_its_place_and_value() {
        let refused = |images: &[Image]| place(&[5, 6], images).unwrap_err();
        let one = [image(0, &[1], None)];
        assert!(Measured::new(&[5], &one, None).err().unwrap().contains("reads text alone"));
        assert_eq!(refused(&[image(0, &[1], None), image(1, &[], None)]), "images[1]: empty");
        assert_eq!(refused(&[image(0, &[0], None)]), "images[0]: zeros");
        let wrong = refused(&[image(0, &[1], Some(-1))]);
        assert!(wrong.contains("expected_tokens is -1") && wrong.contains("1 tokens"), "{wrong}");
        assert!(refused(&[image(0, &[1; 6], None)]).contains("6 tokens is above 5"));
        assert!(refused(&[image(3, &[1], None)]).contains("at token 3"));
        assert!(refused(&[image(2, &[1], None), image(1, &[1], None)]).contains("images[1] is at token 1"));
        assert!(refused(&vec![image(0, &[1], None); IMAGES_MAX + 1]).contains("above the limit"));
    }

    #[test]
    fn pages_with_other_pictures_are_other_pages() {
        let marked = |images: &[Image], range: Range<usize>| {
            let (tokens, pictures) = place(&[9, 9], images).unwrap();
            [&tokens[range.clone()], &marks(&pictures, range).collect::<Vec<_>>()].concat()
        };
        let (a, b) = ([1, 1], [1, 2]);
        // The same tokens each time: another picture, the same one a token later, and text that looks like one.
        let all =
            [marked(&[image(0, &a, None)], 0..4), marked(&[image(0, &b, None)], 0..4), marked(&[image(1, &a, None)], 0..4)];
        assert!(all[0] != all[1] && all[0] != all[2] && all.iter().all(|key| key[..4] == [9; 4]));
        // One that began on the page before.
        let (early, late) = (marked(&[image(0, &a, None)], 1..3), marked(&[image(0, &b, None)], 1..3));
        assert_ne!(early, late);
        assert_eq!(marked(&[image(0, &a, None)], 2..4), [9, 9], "what touches none has no marks");
    }
}
