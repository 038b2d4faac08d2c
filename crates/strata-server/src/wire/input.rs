//! Prompts and inputs of JSON bodies: chunks of tokens and pictures, in any order.

use serde::Deserialize;
use strata_engine::api;

use crate::limits;
use crate::wire::bounded::{List, Present, Text};
use crate::wire::budget::Budget;
use crate::wire::json::{Name, at_most};
use crate::wire::picture::{self, PictureFile};

/// A prompt or an input, in chunks.
#[derive(Debug, Deserialize)]
pub(super) struct ModelInput {
    chunks: List<Chunk, { limits::CHUNKS_MAX }>,
}

/// A chunk of any kind.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default, rename = "type")]
    kind: Option<Name>,
    #[serde(default)]
    tokens: Option<List<i64, { limits::PROMPT_TOKENS_MAX }>>,
    #[serde(default)]
    data: Option<PictureFile>,
    #[serde(default)]
    location: Option<Text<{ limits::LOCATION_BYTES_MAX }>>,
    #[serde(default)]
    format: Option<Name>,
    #[serde(default)]
    expected_tokens: Option<i64>,
    #[serde(default)]
    override_dimensions: Option<Present>,
}

/// What the chunks of an input come to.
pub(super) struct Input {
    /// Tokens of its text.
    pub tokens: Vec<i64>,
    /// Pictures among them.
    pub images: Vec<api::Image>,
    /// Those of them whose files are empty, because they have yet to be read.
    pub assets: Vec<Asset>,
}

/// A picture that is not in the request.
#[derive(Debug, PartialEq, Hash)]
pub struct Asset {
    /// The number of its chunk, for messages.
    pub chunk: usize,
    /// Its number among the pictures of its input.
    pub image: usize,
    /// Where it is said to be.
    pub location: String,
}

impl ModelInput {
    /// What it comes to.
    ///
    /// # Errors
    /// If a chunk is neither text nor a picture, or there is more than an input may have.
    pub(super) fn into_input(self, budget: &Budget) -> Result<Input, String> {
        let chunks = self.chunks.0;
        let count = |kind: &str| chunks.iter().filter(|chunk| chunk.kind() == kind).count();
        let (num_files, num_assets) = (count(IMAGE), count(ASSET));
        at_most("images of one input", num_files + num_assets, limits::IMAGES_MAX)?;
        budget.take_values::<Vec<i64>>(chunks.len())?;
        budget.take_values::<api::Image>(num_files + num_assets)?;
        budget.take_values::<Asset>(num_assets)?;
        let mut parts = Vec::with_capacity(chunks.len());
        let (mut images, mut assets) = (Vec::with_capacity(num_files + num_assets), Vec::with_capacity(num_assets));
        let mut total = 0;
        for (i, chunk) in chunks.into_iter().enumerate() {
            let Chunk { kind, tokens, data, location, format, expected_tokens, override_dimensions } = chunk;
            match kind.as_deref().unwrap_or(TEXT) {
                TEXT => {
                    let tokens = tokens.ok_or_else(|| format!("model_input chunk {i} has no tokens"))?;
                    total += tokens.0.len();
                    parts.push(tokens.0);
                }
                kind @ (IMAGE | ASSET) => {
                    let in_place = |reason| format!("model_input chunk {i} ({kind}): {reason}");
                    let format = format.as_ref().map(|format| format.as_bytes());
                    picture::check(format, override_dimensions.is_some()).map_err(in_place)?;
                    let mut file = [].into();
                    if kind == ASSET {
                        let location = location.ok_or_else(|| in_place("it has no location".into()))?;
                        assets.push(Asset { chunk: i, image: images.len(), location: location.0 });
                    } else {
                        file = data.map_or(Ok(file), |data| data.0).map_err(in_place)?;
                        picture::check_len(file.len()).map_err(in_place)?;
                    }
                    images.push(api::Image { at: total, file, expected_tokens });
                }
                other => return Err(picture::unread(i, other)),
            }
        }
        at_most("tokens of one input", total, limits::PROMPT_TOKENS_MAX)?;
        let tokens = if parts.len() == 1 {
            // Grown by doubling: half of it may be empty, and it is about to wait.
            let mut tokens = parts.swap_remove(0);
            tokens.shrink_to_fit();
            tokens
        } else {
            budget.take_values::<i64>(total)?;
            parts.concat()
        };
        Ok(Input { tokens, images, assets })
    }
}

const TEXT: &str = "encoded_text";
const IMAGE: &str = "image";
const ASSET: &str = "image_asset_pointer";

impl Chunk {
    fn kind(&self) -> &str {
        self.kind.as_deref().unwrap_or(TEXT)
    }
}

impl Input {
    /// Its tokens and pictures, where all of them have to be in the request.
    ///
    /// # Errors
    /// If one is not.
    pub(super) fn without_assets(self) -> Result<(Vec<i64>, Vec<api::Image>), String> {
        match self.assets.first() {
            None => Ok((self.tokens, self.images)),
            Some(asset) => Err(format!(
                "model_input chunk {} (image_asset_pointer): only prompts of samples may point to a picture; send it as an image",
                asset.chunk
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tests::{peak_bytes, with_budget};
    use crate::wire::guard::parse;

    fn input(chunks: Value) -> Result<Input, String> {
        let body = json!({ "chunks": chunks }).to_string();
        with_budget(1 << 20, |budget| parse::<ModelInput>(body.as_bytes(), budget)?.into_input(budget))
    }

    fn text(tokens: &[i64]) -> Value {
        json!({ "type": "encoded_text", "tokens": tokens })
    }

    fn image(extra: Value) -> Value {
        let mut image = json!({ "type": "image", "data": "iVBO", "format": "png" });
        for (key, value) in extra.as_object().unwrap() {
            image[key] = value.clone();
        }
        image
    }

    #[test]
    fn pictures_lie_where_their_chunks_do() {
        let chunks = json!([
            image(json!({ "expected_tokens": 4 })),
            text(&[1, 2]),
            image(json!({ "format": "jpeg", "data": "/9j/" })),
            { "type": "image_asset_pointer", "format": "png", "location": "file:///a.png", "expected_tokens": 9 },
            text(&[]),
            text(&[3]),
        ]);
        let input = input(chunks).unwrap();
        assert_eq!(input.tokens, [1, 2, 3]);
        let images: Vec<_> = input.images.iter().map(|image| (image.at, &*image.file, image.expected_tokens)).collect();
        assert_eq!(images, [(0, &b"\x89PN"[..], Some(4)), (2, b"\xff\xd8\xff", None), (2, b"", Some(9))]);
        assert_eq!(input.assets, [Asset { chunk: 3, image: 2, location: "file:///a.png".into() }]);
    }

    #[test]
    fn what_is_wrong_with_a_chunk_is_said_with_its_number_and_kind() {
        for (chunk, words) in [
            (image(json!({ "format": "gif" })), "(image): format \"gif\" is neither"),
            (image(json!({ "format": null })), "(image): it has no format"),
            (image(json!({ "data": "iVB" })), "(image): its data is not base64"),
            (image(json!({ "data": null })), "(image): it has no data"),
            (image(json!({ "data": "" })), "(image): it has no data"),
            (image(json!({ "override_dimensions": { "width": 1 } })), "(image): override_dimensions"),
            (json!({ "type": "image_asset_pointer", "format": "png" }), "(image_asset_pointer): it has no location"),
            (json!({ "type": "image_asset_pointer", "location": "x" }), "(image_asset_pointer): it has no format"),
            (json!({ "type": "dmel", "dmel": "AAAA" }), "is of kind \"dmel\"; this server reads"),
            (json!({ "type": "video", "data": "AAAA" }), "is of kind \"video\""),
            (json!({ "type": "encoded_text" }), "has no tokens"),
        ] {
            let error = input(json!([text(&[1]), chunk])).map(|_| ()).unwrap_err();
            assert!(error.starts_with("model_input chunk 1") && error.contains(words), "{error}");
        }
        let pointer = json!({ "type": "image_asset_pointer", "format": "png", "location": "file:///a.png" });
        let error = input(json!([pointer])).and_then(Input::without_assets).unwrap_err();
        assert!(error.contains("chunk 0 (image_asset_pointer)"), "{error}");
    }

    #[test]
    fn more_pictures_than_the_limit_are_refused_and_as_many_are_not() {
        let images = |count| input(vec![image(json!({})); count].into());
        assert_eq!(images(256).unwrap().images.len(), 256);
        let error = images(257).map(|_| ()).unwrap_err();
        assert!(error.contains("images of one input: 257 is above the limit of 256"), "{error}");
    }

    #[test]
    fn pictures_stay_within_three_times_the_body_and_the_budget() {
        let body = |chunk: &str, count: usize| format!(r#"{{"chunks":[{chunk}{}]}}"#, format!(",{chunk}").repeat(count - 1));
        let with_data = |data: &str| format!(r#"{{"type":"image","format":"png","data":"{data}"}}"#);
        let budget_bytes = 1 << 20;
        for (what, body, words) in [
            ("one that is large", body(&with_data(&"A".repeat(2 << 20)), 1), "more than 1 MiB"),
            ("one with an escape in every character", body(&with_data(&"\\u0041".repeat(2 << 20)), 1), "more than 1 MiB"),
            ("several that are large together", body(&with_data(&"A".repeat(256 << 10)), 200), "more than 1 MiB"),
            ("many empty ones", body(&with_data(""), 16_000), "more than 1 MiB"),
            ("empty ones", body(&with_data(""), 1000), "limit of 256"),
            ("one that is no picture's", body(r#"{"data":"AAAA"}"#, 1000), "no tokens"),
            ("one of hostile characters", body(&with_data(&"\u{fffd}".repeat(100_000)), 1), "not base64"),
        ] {
            let work = || with_budget(budget_bytes, |budget| parse::<ModelInput>(body.as_bytes(), budget)?.into_input(budget));
            let (refused, peak) = peak_bytes(work);
            let error = refused.map(|_| ()).unwrap_err();
            assert!(error.contains(words) && error.len() < 2000, "{what}: {error}");
            let bound = 3 * (body.len() + budget_bytes);
            assert!(peak <= bound, "{what}: {peak} bytes, above {bound}");
        }
    }
}
