//! Pictures in samples and passes of a real engine over a small model that sees.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;
use strata_model::{Model, ModelSource};
use strata_tensor::testing::RemoteBackend;
use strata_tensor::{Backend, CpuBackend};

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/fixtures/qwen3_vl_f32")
}

fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(Some(threads)).expect("the processor has a backend"))
}

fn over(backend: Arc<dyn Backend>, memory_bytes: u64) -> EngineHandle {
    let source = ModelSource::resolve(fixture().join("model").to_str().unwrap()).expect("the fixture is there");
    let model = Model::load(backend, &source, None).expect("the fixture is whole");
    EngineHandle::start(model, None, config(memory_bytes)).expect("memory suffices")
}

fn image(at: usize, name: &str) -> Image {
    let file = std::fs::read(fixture().join(name)).expect("the fixture is there");
    Image { at, file: file.into(), expected_tokens: None }
}

fn text(seed: u64, n: usize) -> Vec<i64> {
    tokens(seed, n).into_iter().map(|token| token % 79).collect()
}

/// An example of text with pictures in it, whose first tokens are not learned; `shown` of its tokens are those of pictures.
fn example(seed: u64, images: Vec<Image>, shown: usize) -> Datum {
    let own = text(seed, 9);
    let n = own.len() + shown;
    let weights = reals((0..n).map(|i| if i < n - 4 { 0.0 } else { 1.0 + i as f32 }).collect());
    let inputs = [("target_tokens", ids(text(seed + 1, n))), ("weights", weights)];
    Datum { tokens: own, images, loss_inputs: inputs.map(|(name, input)| (name.to_string(), input)).into() }
}

fn tokens_of(name: &str, engine: &EngineHandle) -> usize {
    let asked = SampleRequest {
        images: vec![Image { expected_tokens: Some(-1), ..image(0, name) }],
        ..sample_request(text(1, 3), 1, 1, 1)
    };
    let message = user_error(ask(engine, sample("base", asked)));
    let words: Vec<&str> = message.split(' ').collect();
    let at = words.iter().position(|word| *word == "makes").expect("it says what it makes of it");
    words[at + 1].parse().expect("a number of tokens")
}

fn pictured(seed: u64, names: &[&str]) -> SampleRequest {
    let images = names.iter().enumerate().map(|(i, name)| image(2 + i, name)).collect();
    SampleRequest { images, prompt_logprobs: true, ..sample_request(text(seed, 11), 3, 8, seed) }
}

/// Everything that a run with pictures comes to, in bits.
fn run(engine: &EngineHandle) -> Vec<Vec<u32>> {
    base_sampler(engine, "base");
    create(engine, "m", 4, 1);
    let [photo, alpha] = ["photo.jpg", "alpha.png"].map(|name| tokens_of(name, engine));
    let data = |seed| {
        let two = vec![image(3, "alpha.png"), image(3, "photo.jpg")];
        vec![example(seed, vec![image(0, "photo.jpg")], photo), example(seed + 7, two, photo + alpha)]
    };
    let first = losses(ask(engine, train("m", 1, backward(data(1)))));
    grad_norm(ask(engine, train("m", 2, step(1e-2))));
    let second = losses(ask(engine, train("m", 3, forward(data(1)))));
    snapshot(engine, "m", 4, "tuned");
    let mut all = vec![bits(&first), bits(&second)];
    for request in [pictured(5, &["photo.jpg", "strip.png"]), pictured(6, &["alpha.png"])] {
        let sampled = sampled(ask(engine, sample("tuned", request)));
        all.extend(sample_bits(&sampled).into_iter().map(|(tokens, logprobs)| [tokens, logprobs].concat()));
        all.push(sampled.prompt_logprobs.iter().flatten().map(|v| v.map_or(7, f32::to_bits)).collect());
    }
    all
}

#[test]
fn no_bit_depends_on_threads_company_or_device() {
    let alone = run(&over(cpu(1), MEMORY_BYTES));
    assert_eq!(run(&over(cpu(2), MEMORY_BYTES)), alone);
    let remote = RemoteBackend::new(CpuBackend::new(Some(2)).expect("the processor has a backend"));
    assert_eq!(run(&over(Arc::new(remote), MEMORY_BYTES)), alone);
    // Others with the same pictures and others, with text, and with what is in the cache already.
    let engine = over(cpu(2), MEMORY_BYTES);
    let company = |n: u64| {
        submit_as(&engine, "others", Request::CreateSampler { sampler_id: format!("s{n}"), source: None });
        let names: &[&str] = [&["photo.jpg", "strip.png"][..], &["strip.png", "grey.png", "exact.png"], &[]][n as usize % 3];
        let request = SampleRequest { num_samples: 5, max_tokens: Some(60), ..pictured(5 + n, names) };
        submit_as(&engine, "others", sample(&format!("s{n}"), request))
    };
    let others: Vec<_> = (0..9).map(company).collect();
    assert_eq!(run(&engine), alone);
    others.into_iter().for_each(|other| drop(sampled(other.recv().unwrap())));
}

#[test]
fn a_prompt_with_pictures_is_found_again_and_another_is_not() {
    let engine = over(cpu(2), MEMORY_BYTES);
    base_sampler(&engine, "base");
    // Of 16 by 16 pixels and resized to as much as there may be, it fills no page: text does.
    let asked = |name| SampleRequest { images: vec![image(0, name)], ..sample_request(text(3, 100), 1, 4, 1) };
    let ask_of = |name| sampled(ask(&engine, sample("base", asked(name))));
    let (first, again, other) = (ask_of("exact.png"), ask_of("exact.png"), ask_of("palette.png"));
    assert_eq!((first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens), (0, 103));
    assert_eq!(sample_bits(&first), sample_bits(&again));
    assert_eq!(other.prompt_cache_hit_tokens, 0);
}

#[test]
fn what_is_wrong_with_a_picture_is_the_users_to_know() {
    let engine = over(cpu(2), MEMORY_BYTES);
    base_sampler(&engine, "base");
    create(&engine, "m", 4, 1);
    let photo = tokens_of("photo.jpg", &engine) as i64;
    let file = std::fs::read(fixture().join("photo.jpg")).unwrap();
    let cases = [
        (Image { expected_tokens: Some(photo + 1), ..image(0, "photo.jpg") }, format!("makes {photo} tokens")),
        (Image { file: file[..file.len() / 2].into(), ..image(0, "photo.jpg") }, "cannot be decoded".into()),
        (Image { file: b"GIF89a"[..].into(), ..image(0, "photo.jpg") }, "neither a PNG nor a JPEG".into()),
        (Image { at: 50, ..image(0, "photo.jpg") }, "at token 50".into()),
    ];
    for (seq, (image, expected)) in (1..).zip(cases) {
        let request = SampleRequest { images: vec![image.clone()], ..sample_request(text(1, 5), 1, 4, 1) };
        let message = user_error(ask(&engine, sample("base", request)));
        assert!(message.contains("images[0]") && message.contains(&expected), "{message}");
        let message = user_error(ask(&engine, train("m", seq, backward(vec![example(1, vec![image], photo as usize)]))));
        assert!(message.contains("datum 0: images[0]") && message.contains(&expected), "{message}");
    }
    let text_alone = engine_with(2, MEMORY_BYTES);
    base_sampler(&text_alone, "base");
    let request = SampleRequest { images: vec![image(0, "photo.jpg")], ..sample_request(text(1, 5), 1, 4, 1) };
    assert!(user_error(ask(&text_alone, sample("base", request))).contains("reads text alone"));
    // Nothing of it stays behind.
    assert_eq!(losses(ask(&engine, train("m", 5, forward(vec![example(1, Vec::new(), 0)])))).data.len(), 1);
}

#[test]
fn with_little_memory_small_pictures_are_seen_and_large_ones_refused() {
    let engine = over(cpu(2), 24 << 20);
    base_sampler(&engine, "base");
    let request = |image| SampleRequest { images: vec![image], ..sample_request(text(1, 5), 1, 4, 1) };
    sampled(ask(&engine, sample("base", request(image(0, "exact.png")))));
    let mut large = Vec::new();
    let mut encoder = png::Encoder::new(&mut large, 1500, 1500);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&[0; 3 * 1500 * 1500]).unwrap();
    let large = Image { at: 0, file: large.into(), expected_tokens: None };
    let message = user_error(ask(&engine, sample("base", request(large))));
    assert!(message.contains("decoding the picture takes up to 45"), "{message}");
}

/// In the time that a picture of sixteen million pixels is decoded and resized, a sample of text of a tiny model is drawn many times over; between the few blocks of the tower, a few times.
#[test]
fn others_run_while_a_picture_is_decoded() {
    let engine = over(cpu(2), 24 << 30);
    base_sampler(&engine, "base");
    let mut large = Vec::new();
    let mut encoder = png::Encoder::new(&mut large, 4096, 4096);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&vec![7; 3 << 24]).unwrap();
    let large = Image { at: 0, file: large.into(), expected_tokens: None };
    let pictured =
        submit(&engine, sample("base", SampleRequest { images: vec![large], ..sample_request(text(1, 5), 1, 1, 1) }));
    let mut texts = 0;
    let picture = loop {
        match pictured.try_recv() {
            Ok(outcome) => break outcome,
            Err(_) => drop(sampled(ask(&engine, sample("base", sample_request(text(2, 5), 1, 1, 1))))),
        }
        texts += 1;
    };
    sampled(picture);
    assert!(texts > 20, "{texts} samples of text were drawn meanwhile");
}

#[test]
fn a_picture_that_the_device_has_no_memory_for_fails_its_request_alone() {
    let device = Arc::new(RemoteBackend::new(CpuBackend::new(Some(2)).expect("the processor has a backend")));
    let engine = over(device.clone(), MEMORY_BYTES);
    base_sampler(&engine, "base");
    create(&engine, "m", 4, 1);
    // First of all: what comes before a picture is computed while it is decoded.
    let ask_for = |name: &str| ask(&engine, sample("base", SampleRequest { images: vec![image(0, name)], ..pictured(5, &[]) }));
    device.refuse_allocation(3);
    match ask_for("photo.jpg") {
        Err(Failure::Server(message)) => assert!(message.contains("seeing a picture"), "{message}"),
        other => panic!("{other:?}"),
    }
    let expected = sample_bits(&sampled(ask_for("photo.jpg")));
    let photo = tokens_of("alpha.png", &engine);
    let pass = |seq| ask(&engine, train("m", seq, backward(vec![example(1, vec![image(0, "alpha.png")], photo)])));
    device.refuse_allocation(3);
    match pass(1) {
        Err(Failure::Server(message)) => assert!(message.contains("seeing a picture"), "{message}"),
        other => panic!("{other:?}"),
    }
    losses(pass(2));
    // Nothing had been added when it failed.
    grad_norm(ask(&engine, train("m", 3, step(1e-2))));
    assert_eq!(sample_bits(&sampled(ask_for("photo.jpg"))), expected);
}

/// What a picture shows is given and has no score, but the model expects something there, as everywhere.
#[test]
fn named_and_drawn_tokens_are_had_at_the_positions_of_pictures_too() {
    let engine = over(cpu(2), MEMORY_BYTES);
    base_sampler(&engine, "base");
    let shown = tokens_of("photo.jpg", &engine);
    let (own, length) = (text(5, 11), 11 + shown);
    let is_shown = |position: usize| (2..2 + shown).contains(&position);
    let own_at = |position: usize| own[if position < 2 { position } else { position - shown }];
    let named: Vec<i64> = (1..length).map(|position| if is_shown(position) { 5 } else { own_at(position) }).collect();
    let asked = |ids: Vec<i64>, columns: usize| SampleRequest {
        target_prompt_logprobs: Some(PromptTargets { shape: [ids.len() / columns, columns], cells: Cells::All, ids }),
        prompt_alt_tokens_k: 2,
        ..pictured(5, &["photo.jpg"])
    };
    let first = sampled(ask(&engine, sample("base", asked(named.clone(), 1))));
    let (scores, targets) = (first.prompt_logprobs.clone().unwrap(), first.target_prompt_logprobs.clone().unwrap());
    assert_eq!((scores.len(), scores[0], targets.logprobs.len()), (length, None, length - 1));
    for (position, (score, target)) in (1..).zip(scores[1..].iter().zip(&targets.logprobs)) {
        assert!(*target < 0.0 && target.is_finite(), "{position}");
        assert_eq!(*score, (!is_shown(position)).then_some(*target), "{position}");
    }
    let drawn = first.prompt_alt_tokens.clone().unwrap();
    assert_eq!(drawn.tokens.len(), 2 * (length - 1));
    let again = asked(drawn.tokens.iter().map(|&token| token.into()).collect(), 2);
    let again = sampled(ask(&engine, sample("base", again)));
    assert_eq!(bits_of(&again.target_prompt_logprobs.unwrap().logprobs), bits_of(&drawn.logprobs));
    assert_eq!((again.prompt_alt_tokens, again.prompt_logprobs), (first.prompt_alt_tokens, first.prompt_logprobs));
    // The engine alone knows how long the prompt is.
    let wrong = user_error(ask(&engine, sample("base", asked(text(5, 10), 1))));
    assert!(wrong.contains(&format!("has shape [10, 1]; a prompt of {length} tokens needs {} rows", length - 1)), "{wrong}");
    let wrong = SampleRequest { prompt_logprobs_last_n: Some(length), ..pictured(5, &["photo.jpg"]) };
    assert!(user_error(ask(&engine, sample("base", wrong))).contains(&format!("not between 1 and {}", length - 1)));
}
