//! Samplers of one save: they share weights and what was computed with them, the room for them, and the reading of them.

use std::sync::{Arc, Mutex};

use crate::api::{CheckpointSource, Client, LoraSpec, Outcome, Request, Response, SaveTarget, TrainOp};

use super::prefixes::{Asker, client, tokens};
use super::toy::bytes_of;
use super::{Faults, Limits};

fn lora() -> LoraSpec {
    LoraSpec { rank: 2, seed: 1, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() }
}

/// Saves the model `m` for sampling.
fn save(asker: &mut Asker, seq_id: u64, save_id: &str) -> CheckpointSource {
    let target = SaveTarget {
        root: "".into(),
        dir: "/d".into(),
        name: "/d".into(),
        overwrite: true,
        metadata: serde_json::json!({ "save_id": save_id }),
        recipients: vec![],
    };
    asker.ask(Request::Train { model_id: "m".into(), seq_id, op: TrainOp::SaveSampler(target) });
    CheckpointSource { dir: "/d".into(), name: "/d".into(), save_id: Some(save_id.into()) }
}

/// Someone with a save, and what sampling weights are made from.
fn saver(limits: Limits) -> (Asker, Option<(CheckpointSource, LoraSpec)>) {
    let mut asker = Asker::over(limits);
    asker.ask(Request::CreateModel { model_id: "m".into(), lora: lora() });
    let source = save(&mut asker, 1, "first");
    (asker, Some((source, lora())))
}

type Answer = Arc<Mutex<Option<Outcome>>>;

fn is_made(answer: &Answer) -> bool {
    matches!(*answer.lock().unwrap(), Some(Ok(Response::Sampler)))
}

fn is_refused(answer: &Answer) -> bool {
    matches!(*answer.lock().unwrap(), Some(Err(_)))
}

/// Sends what makes sampling weights of this name, for a session of this name.
fn create(asker: &mut Asker, session: &str, name: &str, source: &Option<(CheckpointSource, LoraSpec)>) -> Answer {
    asker.client = Client { session: session.into(), ..client() };
    asker.send(Request::CreateSampler { sampler_id: name.into(), source: source.clone() })
}

/// Turns until nothing is left to do.
fn settle(asker: &mut Asker) {
    while asker.engine.turn() || asker.engine.advance_to_disk() {
        asker.engine.audit().unwrap();
    }
}

#[test]
fn samplers_of_one_save_have_room_for_one_as_long_as_one_of_them_is_there() {
    let (training, frozen) = (bytes_of(lora().rank).training, bytes_of(lora().rank).frozen);
    // Beside the model for one, and not for two: an eighth is kept for others.
    let (mut asker, source) = saver(Limits { adapter_bytes: training + 2 * frozen, ..Limits::roomy(1) });
    let before = asker.engine.shared.live_bytes.get();
    let names: Vec<String> = (0..20).map(|n| format!("s{n}")).collect();
    let made: Vec<Answer> = names.iter().map(|name| create(&mut asker, "s", name, &source)).collect();
    settle(&mut asker);
    assert!(made.iter().all(is_made));
    assert_eq!(asker.engine.shared.live_bytes.get(), before + frozen, "they share what they sample with");
    // Whoever goes leaves the room to the others; the last gives it back.
    for name in names {
        let other =
            Request::CreateSampler { sampler_id: "other".into(), source: source.clone().map(|(s, l)| (nameless(s), l)) };
        assert!(asker.outcome_of(other).is_err(), "there is no room for another while {name} is there");
        assert_eq!(asker.sample_from(&name, &[], &tokens(1, 6), 2).1.sequences.len(), 1);
        asker.ask(Request::DropSampler { sampler_id: name });
    }
    settle(&mut asker);
    assert_eq!(asker.engine.shared.live_bytes.get(), before);
    let other = Request::CreateSampler { sampler_id: "other".into(), source: source.map(|(s, l)| (nameless(s), l)) };
    asker.ask(other);
}

fn nameless(source: CheckpointSource) -> CheckpointSource {
    CheckpointSource { save_id: None, ..source }
}

#[test]
fn what_many_wait_for_is_read_once_and_goes_on_for_those_who_are_left() {
    let (mut asker, source) = saver(Limits::roomy(1));
    asker.ask(Request::UnloadModel { model_id: "m".into() });
    let read = bytes_of(lora().rank).read(false);
    let waiting = ["a", "b", "a", "c"].into_iter().enumerate().map(|(n, s)| create(&mut asker, s, &format!("s{n}"), &source));
    let waiting: Vec<Answer> = waiting.collect();
    let sampled = asker.send(Request::Sample {
        sampler_id: "s3".into(),
        sample: crate::api::SampleRequest { max_tokens: Some(2), ..crate::api::SampleRequest::of(tokens(1, 6)) },
    });
    while asker.engine.turn() {}
    assert_eq!(asker.engine.shared.live_bytes.get(), read);
    // The first goes, and another of its session is left; then the session, in whose turn it is read.
    asker.client = Client { session: "a".into(), ..client() };
    asker.ask(Request::DropSampler { sampler_id: "s0".into() });
    asker.send(Request::EndSession);
    while asker.engine.turn() {}
    assert!(is_refused(&waiting[0]) && is_refused(&waiting[2]) && waiting[1].lock().unwrap().is_none());
    settle(&mut asker);
    assert!(is_made(&waiting[1]) && is_made(&waiting[3]));
    assert!(matches!(*sampled.lock().unwrap(), Some(Ok(Response::Sampled(_)))));
    assert_eq!(asker.engine.shared.live_bytes.get(), bytes_of(lora().rank).frozen);
    for session in ["b", "c", "s"] {
        asker.client = Client { session: session.into(), ..client() };
        asker.send(Request::EndSession);
    }
    settle(&mut asker);
    asker.engine.core.leftovers().unwrap();
}

#[test]
fn what_cannot_be_read_fails_for_all_who_wait_for_it() {
    let (mut asker, source) = saver(Limits::roomy(1));
    asker.engine.set_faults(Faults { disk: 1000, ..Faults::default() });
    let waiting: Vec<Answer> = ["a", "b"].into_iter().map(|s| create(&mut asker, s, s, &source)).collect();
    settle(&mut asker);
    assert!(waiting.iter().all(is_refused));
    asker.engine.set_faults(Faults::default());
    let again = create(&mut asker, "a", "a", &source);
    settle(&mut asker);
    assert!(is_made(&again));
}

#[test]
fn samplers_of_one_save_share_weights_and_prefixes_and_no_others_do() {
    let mut asker = Asker::new(0);
    let lora = lora();
    asker.ask(Request::CreateModel { model_id: "m".into(), lora: lora.clone() });
    for (seq_id, save_id) in (1..).zip(["first", "second"]) {
        let source = save(&mut asker, seq_id, save_id);
        for n in 0..3 {
            // The third is somebody else's.
            asker.client.owner = if n == 2 { "other" } else { "o" }.into();
            let (sampler_id, source) = (format!("{save_id}{n}"), Some((source.clone(), lora.clone())));
            asker.ask(Request::CreateSampler { sampler_id: sampler_id.clone(), source });
            let (found, _) = asker.sample_from(&sampler_id, &[], &tokens(1, 14), 3);
            assert_eq!(found, if n == 1 { 13 } else { 0 }, "{sampler_id}");
        }
        asker.client = client();
        // Who takes it for a smaller one is refused, as if nobody had loaded it.
        let smaller = Some((source, LoraSpec { rank: 1, ..lora.clone() }));
        let outcome = asker.outcome_of(Request::CreateSampler { sampler_id: "smaller".into(), source: smaller });
        assert!(outcome.is_err(), "{save_id}: {outcome:?}");
        // One of the two goes, and the other goes on.
        asker.ask(Request::DropSampler { sampler_id: format!("{save_id}0") });
        assert_eq!(asker.sample_from(&format!("{save_id}1"), &[], &tokens(1, 14), 3).0, 13);
    }
    // A save without an identity may be another the next time.
    let source = CheckpointSource { dir: "/d".into(), name: "/d".into(), save_id: None };
    for sampler_id in ["nameless0", "nameless1"] {
        asker.ask(Request::CreateSampler { sampler_id: sampler_id.into(), source: Some((source.clone(), lora.clone())) });
        assert_eq!(asker.sample_from(sampler_id, &[], &tokens(1, 14), 3).0, 0, "{sampler_id}");
    }
}
