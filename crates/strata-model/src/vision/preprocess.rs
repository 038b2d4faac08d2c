//! From the bytes of a picture to the patches that a vision tower reads, as `Qwen2VLImageProcessor` of transformers does it: decode, lay transparency on white, resize to a multiple
//! of what a token covers, normalise, cut into patches.

use serde_json::{Map, Value, json};
use strata_values::{PatchSizes, cut, resize};

use super::decode::{self, IMAGE_PIXELS_MAX};
use crate::config::fields::{Fields, check_size, unsupported, wrong_kind};
use crate::config::short;
use crate::{Error, Result};

/// The most elongated picture, one side to the other.
const ASPECT_MAX: f64 = 200.0;
/// The largest side of a patch, and the most patches that make a token along one.
const PATCH_SIZE_MAX: usize = 64;
const MERGE_SIZE_MAX: usize = 8;

/// Patches of a picture, or what they are merged to, along time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Frames, two of a film to each; 1 for a picture.
    pub time: usize,
    /// Rows of patches.
    pub height: usize,
    /// Columns of patches.
    pub width: usize,
}

impl Grid {
    /// How many there are; as many as there are numbers for, if there are more.
    pub fn patches(&self) -> usize {
        self.time.saturating_mul(self.height).saturating_mul(self.width)
    }
}

/// A picture, cut up.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// `[patches, 3 * temporal_patch_size * patch_size²]`: of each patch its channels, in each its frames, in each its rows. Patches that are merged to one token are neighbours.
    pub values: Vec<f32>,
    /// How they lie.
    pub grid: Grid,
}

/// What is done to a picture.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames of a patch; a picture is as many equal ones.
    pub temporal_patch_size: usize,
    /// Patches along a side of what becomes a token.
    pub merge_size: usize,
    /// Least and most pixels after resizing.
    pub pixels: [u64; 2],
    /// Of each channel, what is subtracted of values from 0 to 1.
    pub mean: [f32; 3],
    /// Of each channel, what the rest is divided by.
    pub std: [f32; 3],
}

/// What lies in a `preprocessor_config.json` that changes what comes out, and the only value of it that is computed.
const FIXED: [(&str, bool); 6] = [
    ("do_resize", true),
    ("do_rescale", true),
    ("do_normalize", true),
    ("do_convert_rgb", true),
    ("do_center_crop", false),
    ("do_pad", false),
];

/// What the class of transformers takes for what a file of it leaves out.
const CLASS_PIXELS: [u64; 2] = [56 * 56, 28 * 28 * 1280];
const CLASS_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLASS_STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];
/// What it has been called.
const CLASSES: [&str; 3] = ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];

impl ImageProcessor {
    /// What Qwen3-VL is published with, for a tower of these patches.
    pub fn new(patch_size: usize, temporal_patch_size: usize, merge_size: usize) -> Self {
        let pixels = [1 << 16, 1 << 24];
        ImageProcessor { patch_size, temporal_patch_size, merge_size, pixels, mean: [0.5; 3], std: [0.5; 3] }
    }

    /// Reads a `preprocessor_config.json`, whose patches must be those of the tower.
    ///
    /// # Errors
    /// If it says something that is not computed here; key and value are named.
    pub(crate) fn read(map: &Map<String, Value>, tower: &ImageProcessor) -> Result<Self> {
        let fields = Fields { map };
        if let Some(class) = fields.get("image_processor_type").filter(|class| CLASSES.iter().all(|known| class != known)) {
            return Err(unsupported("image_processor_type", class, &CLASSES.map(|name| format!("{name:?}")).join(", ")));
        }
        for (key, only) in FIXED {
            if let Some(value) = fields.get(key).filter(|value| **value != only) {
                return Err(unsupported(key, value, &only.to_string()));
            }
        }
        let bicubic = 3;
        if let Some(value) = fields.get("resample").filter(|value| **value != bicubic) {
            return Err(unsupported("resample", value, "3 (bicubic)"));
        }
        if let Some(value) = fields.get("rescale_factor").filter(|value| value.as_f64() != Some(1.0 / 255.0)) {
            return Err(unsupported("rescale_factor", value, "1 / 255"));
        }
        let sizes = [
            ("patch_size", tower.patch_size, PATCH_SIZE_MAX),
            ("temporal_patch_size", tower.temporal_patch_size, MERGE_SIZE_MAX),
            ("merge_size", tower.merge_size, MERGE_SIZE_MAX),
        ];
        for (key, of_tower, max) in sizes {
            let found = fields.optional_size(key, max)?.unwrap_or(of_tower);
            if found != of_tower {
                return Err(Error::Config(format!("{key} {found} of the image processor is {of_tower} in vision_config")));
            }
        }
        let pixels = match fields.get("size") {
            None => CLASS_PIXELS,
            Some(value) => {
                let edge = |key| value.as_object()?.get(key)?.as_u64();
                let edges = edge("shortest_edge").zip(edge("longest_edge"));
                let (least, most) =
                    edges.ok_or_else(|| wrong_kind("size", value, "an object of shortest_edge and longest_edge"))?;
                let max = IMAGE_PIXELS_MAX as usize;
                [check_size("shortest_edge", least, max)? as u64, check_size("longest_edge", most, max)? as u64]
            }
        };
        let pixel = |key, default| {
            Ok::<_, Error>(fields.optional_size(key, IMAGE_PIXELS_MAX as usize)?.map_or(default, |pixels| pixels as u64))
        };
        let pixels = [pixel("min_pixels", pixels[0])?, pixel("max_pixels", pixels[1])?];
        if pixels[0] > pixels[1] {
            return Err(Error::Config(format!(
                "the least pixels, {} (shortest_edge or min_pixels), are more than the most, {} (longest_edge or max_pixels)",
                pixels[0], pixels[1]
            )));
        }
        let (mean, std) = (channels(&fields, "image_mean", CLASS_MEAN)?, channels(&fields, "image_std", CLASS_STD)?);
        if std.iter().any(|std| *std <= 0.0) {
            return Err(Error::Config(format!("image_std {std:?} has a number that is not above zero")));
        }
        Ok(ImageProcessor { pixels, mean, std, ..tower.clone() })
    }

    /// A `preprocessor_config.json` that says this.
    pub fn to_json(&self) -> String {
        let map = json!({
            "image_processor_type": CLASSES[0], "patch_size": self.patch_size, "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size, "size": { "shortest_edge": self.pixels[0], "longest_edge": self.pixels[1] },
            "image_mean": self.mean.map(short), "image_std": self.std.map(short)
        });
        format!("{map:#}\n")
    }

    /// Rows and columns of pixels that a picture of so many is resized to (`smart_resize`): multiples of what a token covers, within the limits, nearly of the same form.
    ///
    /// # Errors
    /// A sentence, if the picture is too elongated or has no pixels.
    pub fn resized(&self, height: u32, width: u32) -> std::result::Result<[usize; 2], String> {
        let (long, short) = (f64::from(height.max(width)), f64::from(height.min(width)));
        if short == 0.0 || long / short > ASPECT_MAX {
            return Err(format!(
                "a picture of {width} × {height} pixels: the longer side may be {ASPECT_MAX} times the shorter one"
            ));
        }
        let factor = (self.patch_size * self.merge_size) as f64;
        let [least, most] = self.pixels.map(|pixels| pixels as f64);
        let (height, width) = (f64::from(height), f64::from(width));
        // As Python rounds: halves to even.
        let mut sides = [height, width].map(|side| (side / factor).round_ties_even() * factor);
        let area = sides[0] * sides[1];
        if area > most {
            let shrink = (height * width / most).sqrt();
            sides = [height, width].map(|side| ((side / shrink / factor).floor() * factor).max(factor));
        } else if area < least {
            let grow = (least / (height * width)).sqrt();
            sides = [height, width].map(|side| (side * grow / factor).ceil() * factor);
        }
        Ok(sides.map(|side| side as usize))
    }

    /// The grid of a picture, which is all that its tokens depend on: reads the head of the file alone.
    ///
    /// # Errors
    /// As [`ImageProcessor::process`], but for what lies behind the head.
    pub fn grid(&self, file: &[u8]) -> std::result::Result<Grid, String> {
        let [height, width] = decode::size(file)?;
        Ok(self.grid_of(self.resized(height, width)?))
    }

    fn grid_of(&self, [height, width]: [usize; 2]) -> Grid {
        Grid { time: 1, height: height / self.patch_size, width: width / self.patch_size }
    }

    /// The most tokens that a picture becomes.
    pub fn tokens_max(&self) -> usize {
        let side = (self.patch_size * self.merge_size) as u64;
        // One row of an elongated picture may be more than its pixels are worth.
        usize::try_from(self.pixels[1] / (side * side)).unwrap_or(usize::MAX).max(ASPECT_MAX as usize)
    }

    /// The tokens that a picture becomes, as they lie.
    pub fn token_grid(&self, grid: &Grid) -> Grid {
        Grid { time: grid.time, height: grid.height / self.merge_size, width: grid.width / self.merge_size }
    }

    /// The fewest and the most tokens that a picture becomes, but for such as are far longer than wide.
    pub fn tokens(&self) -> [u64; 2] {
        let of_token = (self.patch_size * self.merge_size).pow(2) as u64;
        [self.pixels[0].div_ceil(of_token), (self.pixels[1] / of_token).max(1)]
    }

    /// Cuts up a PNG or JPEG.
    ///
    /// # Errors
    /// A sentence, if it is none, too large in bytes or pixels, too elongated, or broken.
    pub fn process(&self, file: &[u8]) -> std::result::Result<Patches, String> {
        let [height, width] = decode::size(file)?;
        let to = self.resized(height, width)?;
        let pixels = decode::decode(file)?;
        let (resized, grid) = (resize(&pixels.bytes, [pixels.height, pixels.width], to), self.grid_of(to));
        let sizes = PatchSizes { side: self.patch_size, merge: self.merge_size, frames: self.temporal_patch_size };
        let values = cut(&resized, [grid.height, grid.width], sizes, self.mean, self.std);
        Ok(Patches { values, grid })
    }
}

/// Three numbers of a list.
fn channels(fields: &Fields<'_>, key: &str, default: [f32; 3]) -> Result<[f32; 3]> {
    let Some(value) = fields.get(key) else { return Ok(default) };
    let numbers: Option<Vec<f32>> =
        value.as_array().and_then(|list| list.iter().map(|number| number.as_f64().map(|number| number as f32)).collect());
    let three = numbers.and_then(|numbers| <[f32; 3]>::try_from(numbers).ok()).filter(|all| all.iter().all(|n| n.is_finite()));
    three.ok_or_else(|| wrong_kind(key, value, "a list of three numbers"))
}
