//! Pictures as they come from outside: broken, swollen, or of kinds that are rare. What their pixels are is compared with transformers in `tests/reference`.

use serde_json::{Value, json};

use super::{Grid, IMAGE_PIXELS_MAX, ImageProcessor, Patches};

/// A picture of 23 by 19 pixels in several forms.
const JPEGS: [&[u8]; 2] = [include_bytes!("samples/baseline.jpg"), include_bytes!("samples/progressive.jpg")];
const COLOUR: &[u8] = include_bytes!("samples/colour.png");
const PNGS: [&[u8]; 5] = [
    COLOUR,
    include_bytes!("samples/palette.png"),
    include_bytes!("samples/alpha.png"),
    include_bytes!("samples/interlaced.png"),
    include_bytes!("samples/animated.png"),
];

fn processor() -> ImageProcessor {
    ImageProcessor { pixels: [64, 1024], ..ImageProcessor::new(4, 2, 2) }
}

fn process(file: &[u8]) -> Result<Patches, String> {
    processor().process(file)
}

#[test]
fn what_is_rare_has_the_same_pixels() {
    let colour = process(COLOUR).unwrap();
    // 24 by 16 pixels.
    assert_eq!((colour.grid, colour.values.len()), (Grid { time: 1, height: 4, width: 6 }, 24 * 96));
    for file in [PNGS[3], PNGS[4]] {
        assert_eq!(process(file).unwrap(), colour, "interlaced, and the first frame of a film");
    }
    assert_eq!(process(JPEGS[0]).unwrap(), process(JPEGS[1]).unwrap(), "progressive or not");
    let error = process(include_bytes!("samples/cmyk.jpg")).unwrap_err();
    assert!(error.contains("four colours"), "{error}");
}

#[test]
fn a_file_that_is_cut_short_anywhere_is_an_error() {
    for jpeg in JPEGS {
        for len in 0..jpeg.len() {
            assert!(process(&jpeg[..len]).is_err(), "{len} bytes of {}", jpeg.len());
        }
    }
    for png in PNGS {
        let whole = process(png).unwrap();
        for len in 0..png.len() {
            // Behind the pixels it does not matter.
            match process(&png[..len]) {
                Ok(patches) => assert!(len + 24 > png.len() || patches == whole, "{len} bytes of {}", png.len()),
                Err(message) => assert!(!message.is_empty()),
            }
        }
        assert!(process(&png[..png.len() / 3]).is_err());
    }
}

#[test]
fn a_file_with_any_bytes_changed_is_an_error_or_a_picture() {
    let (mut state, mut pictures) = (1u64, 0);
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let rounds = 4000;
    for round in 0..rounds {
        let files = [JPEGS[0], JPEGS[1], PNGS[round % PNGS.len()]];
        let mut file = files[round % files.len()].to_vec();
        for _ in 0..=random(4) {
            let at = random(file.len());
            file[at] = random(256) as u8;
        }
        let said = processor().grid(&file);
        if let Ok(patches) = process(&file) {
            assert_eq!(said, Ok(patches.grid));
            assert_eq!(patches.values.len(), patches.grid.patches() * 96);
            pictures += 1;
        }
    }
    assert!((rounds / 20..rounds).contains(&pictures), "{pictures} pictures of {rounds} files");
    for len in [0, 1, 7, 8, 9, 100] {
        assert!(process(&vec![0xff; len]).is_err());
        assert!(process(&[b"\x89PNG\r\n\x1a\n".as_slice(), &vec![0xff; len]].concat()).is_err());
    }
}

fn with_size(file: &[u8], at: usize, size: &[u8]) -> Vec<u8> {
    [&file[..at], size, &file[at + size.len()..]].concat()
}

#[test]
fn a_head_that_announces_too_much_is_refused_before_anything_is_decoded() {
    // With the checksum of that head.
    let [width, height] = [60_000u32.to_be_bytes(); 2];
    let png = [&COLOUR[..16], &width, &height, &COLOUR[24..29], &[0x0f, 0xb0, 0xe2, 0x15], &COLOUR[33..]].concat();
    let sof = JPEGS[0].windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    let jpeg = with_size(JPEGS[0], sof + 5, &[0xff, 0x00, 0xff, 0x00]);
    for file in [png, jpeg] {
        for error in [processor().grid(&file).unwrap_err(), process(&file).unwrap_err()] {
            assert!(error.contains("decoded"), "{error}");
        }
    }
    let error = processor().grid(&with_size(JPEGS[0], sof + 5, &[0x0f, 0xff, 0x00, 0x01])).unwrap_err();
    assert!(error.contains("1 × 4095"), "{error}");
}

#[test]
fn scans_without_end_are_refused() {
    let file = JPEGS[1];
    let last = file.windows(2).rposition(|marker| marker == [0xff, 0xda]).unwrap();
    let (head, scan, end) = (&file[..last], &file[last..file.len() - 2], &file[file.len() - 2..]);
    let with = |scans: usize| process(&[head, &scan.repeat(scans), end].concat());
    assert_eq!(with(1), process(file));
    assert!(with(20).is_ok());
    let error = with(5000).unwrap_err();
    assert!(error.contains("50") && error.contains("scans"), "{error}");
    // Few scans of a large picture are as much to do.
    let sof = file.windows(2).position(|marker| marker == [0xff, 0xc2]).unwrap();
    let large = |scans: usize| {
        let file = [head, &scan.repeat(scans), end].concat();
        process(&with_size(&file, sof + 5, &[0x16, 0x00, 0x16, 0x00])).map(drop)
    };
    assert_eq!(large(1), Ok(()));
    let error = large(20).unwrap_err();
    assert!(error.contains("scans of 5632 × 5632 pixels"), "{error}");
    // A picture in a segment of another, as cameras put it there, is none of its scans.
    let thumbnail = [&[0xff, 0xe1, 0x02, 0x02][..], &[0xff, 0xda].repeat(256)].concat();
    assert_eq!(process(&[&file[..2], &thumbnail, &file[2..]].concat()), process(file));
}

#[test]
fn a_transparent_colour_that_others_take_for_another_is_refused() {
    let with = |color, depth, transparent: &'static [u8], row: usize| {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 16, 16);
        encoder.set_color(color);
        encoder.set_depth(depth);
        encoder.set_trns(transparent);
        encoder.write_header().unwrap().write_image_data(&vec![0; 16 * row]).unwrap();
        process(&file).map(drop)
    };
    for (depth, row, bits) in [(png::BitDepth::Two, 4, "2 bits"), (png::BitDepth::Four, 8, "4 bits")] {
        let error = with(png::ColorType::Grayscale, depth, &[0, 1], row).unwrap_err();
        assert!(error.contains("transparent") && error.contains(bits), "{error}");
    }
    let error = with(png::ColorType::Rgb, png::BitDepth::Sixteen, &[0, 1, 0, 1, 0, 1], 96).unwrap_err();
    assert!(error.contains("16 bits"), "{error}");
    assert_eq!(with(png::ColorType::Grayscale, png::BitDepth::Eight, &[0, 1], 16), Ok(()));
}

#[test]
fn pixels_in_parts_without_end_are_refused() {
    const EMPTY: &[u8] = b"\0\0\0\0IDAT\x35\xaf\x06\x1e";
    let file = PNGS[0];
    let first = file.windows(4).position(|name| name == b"IDAT").unwrap() - 4;
    let with = |parts: usize| process(&[&file[..first], &EMPTY.repeat(parts), &file[first..]].concat());
    assert_eq!(with(1000), process(file));
    let error = with(70_000).unwrap_err();
    assert!(error.contains("in 70001 parts (IDAT); at most 65536"), "{error}");
}

#[test]
fn too_elongated_pictures_are_refused_by_their_sides() {
    assert_eq!(processor().resized(1, 200), Ok([8, 120]));
    let error = processor().resized(1, 201).unwrap_err();
    assert!(error.contains("201 × 1"), "{error}");
    assert!(processor().resized(u32::MAX, 1).is_err());
}

/// Reads a file of these keys.
fn read(keys: Value) -> crate::Result<ImageProcessor> {
    ImageProcessor::read(keys.as_object().unwrap(), &ImageProcessor::new(16, 2, 2))
}

#[test]
fn what_a_file_says_counts_and_what_is_not_computed_is_refused_by_key_and_value() {
    let own =
        ImageProcessor { pixels: [256, 4096], mean: [0.1, 0.2, 0.3], std: [0.5, 0.25, 1.5], ..ImageProcessor::new(16, 2, 2) };
    let written: Value = serde_json::from_str(&own.to_json()).unwrap();
    assert_eq!(read(written).unwrap(), own);
    // As transformers 4 writes it, and what its class has where nothing is said.
    let old = read(json!({
        "min_pixels": 512, "max_pixels": null, "size": {"shortest_edge": 9, "longest_edge": 2048}, "crop_size": null, "do_pad": null,
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": null
    }))
    .unwrap();
    assert_eq!((old.pixels, old.mean[0], old.std[2]), ([512, 2048], 0.481_454_66, 0.275_777_1));
    assert_eq!(read(json!({})).unwrap().pixels, [3136, 1_003_520]);
    for (keys, expected) in [
        (json!({"patch_size": 14}), "patch_size 14"),
        (json!({"patch_size": 0}), "patch_size 0"),
        (json!({"patch_size": "16"}), "patch_size is \"16\""),
        (json!({"merge_size": 3}), "merge_size 3"),
        (json!({"temporal_patch_size": 1u64 << 40}), "temporal_patch_size 1099511627776"),
        (json!({"size": {"height": 224, "width": 224}}), "size is {"),
        (json!({"size": 224}), "size is 224"),
        (json!({"size": {"shortest_edge": 0, "longest_edge": 9}}), "shortest_edge 0"),
        (json!({"size": {"shortest_edge": 1, "longest_edge": IMAGE_PIXELS_MAX + 1}}), "longest_edge 33554433"),
        (json!({"min_pixels": 5000, "max_pixels": 4000}), "5000"),
        (json!({"max_pixels": -1}), "max_pixels is -1"),
        (json!({"max_pixels": u64::MAX}), "max_pixels 18446744073709551615"),
        (json!({"image_std": [0.5, 0.0, 0.5]}), "image_std [0.5, 0.0, 0.5]"),
        (json!({"image_std": [0.5, 0.5]}), "image_std is [0.5,0.5]"),
        (json!({"image_mean": [1e300, 0.5, 0.5]}), "image_mean is [1e+300"),
        (json!({"image_mean": 0.5}), "image_mean is 0.5"),
        (json!({"do_resize": false}), "do_resize false"),
        (json!({"do_center_crop": true}), "do_center_crop true"),
        (json!({"resample": 2}), "resample 2"),
        (json!({"rescale_factor": 0.5}), "rescale_factor 0.5"),
        (json!({"image_processor_type": "CLIPImageProcessor"}), "image_processor_type \"CLIPImageProcessor\""),
    ] {
        let error = read(keys.clone()).map(|read| panic!("{keys}: {read:?}")).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
}
