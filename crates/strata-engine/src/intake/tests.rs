use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::api::Outcome;

fn client() -> Client {
    Client { owner: "o".into(), session: "s".into() }
}

const BYTES: AdapterBytes = AdapterBytes { training: 10, frozen: 3, captured: 5 };

fn intake(total: u64) -> Intake {
    let intake = Intake::new(Ledger::new(total), 100);
    intake.add_model(&"m".into(), &client(), BYTES).unwrap();
    intake
}

fn queued(seq_id: u64, op: Op) -> (QueuedOp, Receiver<Outcome>) {
    let (tx, rx) = channel();
    let reply = PendingReply::new(Box::new(move |outcome, _| drop(tx.send(outcome))));
    (QueuedOp { id: format!("m:{seq_id}").into(), op, reply }, rx)
}

fn put(intake: &Intake, seq_id: u64, bytes: u64) -> Result<(), Refusal> {
    intake.accept_op("m", seq_id, bytes, queued(seq_id, Op::Optim(AdamParams::default())).0)
}

fn begin(intake: &Intake) -> Option<RequestId> {
    intake.begin_op("m", 0, |_, _| Some(0)).map(|queued| queued.id.clone())
}

#[test]
fn what_is_missing_for_adapters_is_what_has_to_be_given_back() {
    let intake = intake(1 << 20);
    let make = |seq: u64| {
        let op = Op::Snapshot { sampler_id: seq.to_string(), replace: false, entry: 0 };
        intake.accept_op("m", seq, 1, queued(seq, op).0).unwrap();
        assert_eq!(intake.sampler_bytes(&seq.to_string()), None, "it is still to be made");
        match intake.begin_op("m", 0, |_, _| Some(0)).unwrap().op {
            Op::Snapshot { sampler_id, entry, .. } => intake.snapshot_over(&sampler_id, entry, true),
            _ => panic!("snapshot {seq} was refused"),
        }
    };
    // An eighth of 100 bytes is for others.
    let made = (1..).take_while(|_| intake.snapshot_shortage("m") == 0).inspect(|seq| make(*seq)).count();
    assert_eq!((made, intake.lock().adapter_bytes_used), (26, 88));
    assert_eq!((intake.snapshot_shortage("m"), intake.shortage(&client(), 10), intake.snapshot_shortage("none")), (3, 10, 0));
    assert_eq!(intake.sampler_bytes("7"), Some(BYTES.frozen));
    assert!(intake.remove_sampler("7", &Failure::User("gone".into())));
    assert_eq!((intake.snapshot_shortage("m"), intake.shortage(&client(), 10), intake.sampler_bytes("7")), (0, 7, None));
    make(27);
    intake.audit().unwrap();
}

#[test]
fn operations_begin_in_order_whatever_order_they_arrive_in_and_once() {
    let intake = intake(1 << 20);
    put(&intake, 3, 1).unwrap();
    assert_eq!((begin(&intake), intake.ready_models().len()), (None, 0));
    put(&intake, 1, 1).unwrap();
    assert_eq!(put(&intake, 1, 1), Err(Refusal::Seen));
    assert_eq!((begin(&intake).as_deref(), begin(&intake)), (Some("m:1"), None));
    put(&intake, 2, 1).unwrap();
    assert_eq!((begin(&intake).as_deref(), begin(&intake).as_deref()), (Some("m:2"), Some("m:3")));
    assert_eq!(put(&intake, 2, 1), Err(Refusal::Seen));
    assert!(matches!(put(&intake, 5 + SEQUENCE_AHEAD_MAX, 1), Err(Refusal::User(_))));
    assert!(matches!(put(&intake, 0, 1), Err(Refusal::User(_))));
    intake.audit().unwrap();
}

#[test]
fn a_full_account_takes_only_what_others_wait_for() {
    let intake = intake(1000);
    // In order, everything counts: the next to arrive is not what others wait for.
    let accepted = (1..).take_while(|&seq| put(&intake, seq, 50).is_ok()).count() as u64;
    assert_eq!(accepted, 8, "the last that half of three quarters of 1000 lets in");
    while begin(&intake).is_some() {}
    // Behind a gap, too; what fills the gap is taken all the same.
    let gap = accepted + 1;
    let behind = (gap + 1..).take_while(|&seq| put(&intake, seq, 50).is_ok()).count();
    assert_eq!(behind, 8);
    assert!(matches!(put(&intake, gap + 20, 50), Err(Refusal::Busy(_))));
    put(&intake, gap, 200).unwrap();
    assert_eq!(begin(&intake).as_deref(), Some(format!("m:{gap}").as_str()));
}

#[test]
fn room_for_adapters_follows_what_was_accepted() {
    let intake = intake(1 << 20);
    for n in 0..7 {
        intake.add_model(&format!("m{n}"), &client(), BYTES).unwrap();
    }
    let Err(Refusal::User(message)) = intake.add_model(&"one more".into(), &client(), BYTES) else { panic!("there is room") };
    assert!(message.contains("80 of the 100 bytes set aside for adapters (12 are kept"), "{message}");
    assert!(message.contains("80 of them yours"), "{message}");
    let gone = Failure::User("gone".into());
    assert!(intake.remove_model("m3", &gone));
    let snapshot = |name: &str| Op::Snapshot { sampler_id: name.into(), replace: false, entry: 0 };
    for seq in 1..=4 {
        intake.accept_op("m", seq, 1, queued(seq, snapshot(&seq.to_string())).0).unwrap();
    }
    let refused = (0..4).filter(|_| match intake.begin_op("m", 0, |_, _| Some(0)).unwrap().op {
        Op::Snapshot { sampler_id, entry, .. } => {
            intake.snapshot_over(&sampler_id, entry, true);
            false
        }
        _ => true,
    });
    let refused = refused.count();
    assert_eq!(refused, 0, "their room was a model's, and what is left of it");
    assert!(intake.remove_sampler("2", &gone) && !intake.wants_sampler("2"));
    assert!(!intake.remove_sampler("2", &gone));
    intake.audit().unwrap();
    intake.end_session(&client(), &gone);
    assert_eq!(intake.lock().adapter_bytes_used, 0);
    intake.audit().unwrap();
}

#[test]
fn the_last_room_for_adapters_is_for_those_who_have_none() {
    let intake = Intake::new(Ledger::new(1 << 20), 160);
    let client = |owner: &str, session: &str| Client { owner: owner.into(), session: session.into() };
    let add = |name: &str, client: &Client| intake.add_model(&name.into(), client, BYTES);
    let crowd = client("a", "1");
    let held = (0..).take_while(|n| add(&format!("m{n}"), &crowd).is_ok()).count();
    assert_eq!(held, 14, "seven eighths");
    add("another session's", &client("a", "2")).unwrap();
    assert!(matches!(add("a third's", &client("a", "3")), Err(Refusal::User(_))), "its owner can free something");
    add("another owner's", &client("b", "4")).unwrap();
    assert!(matches!(add("that owner's second", &client("b", "4")), Err(Refusal::Busy(_))), "others can");
    assert!(matches!(add("a third owner's", &client("c", "5")), Err(Refusal::Busy(_))));
    let gone = Failure::User("gone".into());
    intake.end_session(&crowd, &gone);
    add("a third owner's", &client("c", "5")).unwrap();
    intake.audit().unwrap();
}

#[test]
fn draining_keeps_what_saves_wait_for_and_nothing_else() {
    let intake = intake(1 << 20);
    intake.add_model(&"other".into(), &client(), BYTES).unwrap();
    let target = SaveTarget {
        root: "".into(),
        dir: "d".into(),
        name: "n".into(),
        overwrite: false,
        metadata: serde_json::Value::Null,
        recipients: vec![],
    };
    let save = || Op::Save { target: target.clone(), with_optimizer: true };
    for (seq, op) in [(1, Op::Optim(AdamParams::default())), (2, save()), (3, Op::Optim(AdamParams::default())), (5, save())] {
        intake.accept_op("m", seq, 1, queued(seq, op).0).unwrap();
    }
    let mut stray = queued(1, save()).0;
    stray.id = "other:2".into();
    intake.accept_op("other", 2, 1, stray).unwrap();
    intake.drain(&Failure::Server("stopping".into()));
    intake.audit().unwrap();
    assert_eq!((begin(&intake).as_deref(), begin(&intake).as_deref(), begin(&intake)), (Some("m:1"), Some("m:2"), None));
    assert_eq!(intake.open_requests(), 1, "the note to the engine alone is left");
}

#[test]
fn a_name_whose_last_snapshot_is_given_up_is_given_up() {
    let intake = intake(1 << 20);
    let gone = Failure::User("gone".into());
    let replacing = || Op::Snapshot { sampler_id: "x".into(), replace: true, entry: 0 };
    for seq in 1..=3 {
        intake.accept_op("m", seq, 1, queued(seq, replacing()).0).unwrap();
    }
    intake.cancel(&"m:1".into(), &gone);
    assert!(intake.wants_sampler("x"), "the second will make it");
    begin(&intake).unwrap();
    let Op::Snapshot { entry, .. } = intake.begin_op("m", 0, |_, _| Some(0)).unwrap().op else {
        panic!("the second is a snapshot")
    };
    intake.remove_sampler("x", &gone);
    assert!(!intake.wants_snapshot("x", entry));
    intake.accept_op("m", 4, 1, queued(4, replacing()).0).unwrap();
    assert!(!intake.wants_snapshot("x", entry), "the name stands for something else now");
    assert!(intake.remove_model("m", &gone) && !intake.wants_sampler("x"));
    assert_eq!(intake.lock().adapter_bytes_used, 0);
    intake.audit().unwrap();
}

#[test]
fn what_is_cancelled_keeps_its_place_and_what_ends_is_answered() {
    let intake = intake(1 << 20);
    let (first, _) = queued(1, Op::Snapshot { sampler_id: "x".into(), replace: false, entry: 0 });
    let (second, rx) = queued(2, Op::Optim(AdamParams::default()));
    intake.accept_op("m", 1, 1, first).unwrap();
    intake.accept_op("m", 2, 1, second).unwrap();
    intake.cancel(&"m:1".into(), &Failure::User("cancelled".into()));
    assert!(!intake.wants_sampler("x"));
    assert!(matches!(intake.begin_op("m", 0, |_, _| Some(0)).unwrap().op, Op::Refused(_)));
    assert!(rx.try_recv().is_err());
    intake.end_session(&client(), &Failure::User("over".into()));
    assert_eq!(rx.try_recv().unwrap().unwrap_err(), Failure::User("over".into()));
    assert_eq!(intake.ledger().used(), 0);
}
