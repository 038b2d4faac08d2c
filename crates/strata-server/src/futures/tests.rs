use strata_engine::ledger::Ledger;

use super::*;

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(20);

fn json(text: &str) -> Answer {
    Answer::Json(Bytes::copy_from_slice(text.as_bytes()))
}

fn client(session: &str) -> Client {
    Client { owner: "o".into(), session: session.into() }
}

fn begin(futures: &Futures, id: &str) -> Completer {
    futures.begin(id, &client("s")).expect("it is new")
}

#[tokio::test]
async fn a_result_wakes_its_reader_and_can_be_read_again() {
    let futures = Futures::new(Retention::default());
    let completer = begin(&futures, "a");
    let reader = tokio::spawn({
        let futures = futures.clone();
        async move { futures.wait("a", LONG).await }
    });
    tokio::time::sleep(SHORT).await;
    completer.complete(json("{}"), None);
    assert_eq!(reader.await.unwrap(), Waited::Ready(Arc::new(json("{}"))));
    assert_eq!(futures.wait("a", SHORT).await, Waited::Ready(Arc::new(json("{}"))));
    assert!(futures.begin("a", &client("s")).is_none());
}

#[test]
fn a_request_that_is_sent_again_is_told_from_another_of_its_id() {
    let futures = Futures::new(Retention::default());
    let completer = futures.begin_for("a", &client("s"), Some(1), None).unwrap().expect("it is new");
    let find = |fingerprint| {
        let begun = futures.begin_for("a", &client("s"), fingerprint, None).map(|completer| completer.is_none());
        assert_eq!(begun, futures.is_known("a", fingerprint));
        begun
    };
    let outcomes = || [find(Some(1)), find(Some(2)), find(None)];
    assert_eq!(outcomes(), [Ok(true), Err(Taken("a".into())), Ok(true)]);
    completer.complete(json("{}"), None);
    assert_eq!(outcomes(), [Ok(true), Err(Taken("a".into())), Ok(true)]);
    assert_eq!(futures.is_known("b", Some(1)), Ok(false));
}

#[tokio::test]
async fn a_poll_ends_after_its_hold_and_unknown_ids_are_told_apart() {
    let futures = Futures::new(Retention::default());
    let _open = begin(&futures, "a");
    assert_eq!(futures.wait("a", SHORT).await, Waited::Pending);
    assert_eq!(futures.wait("b", SHORT).await, Waited::Unknown);
}

#[tokio::test]
async fn results_are_gone_after_their_time_and_stay_known() {
    let futures = Futures::new(Retention { unread: Duration::ZERO, read: Duration::ZERO, ..Retention::default() });
    begin(&futures, "unread").complete(json("{}"), None);
    begin(&futures, "read").complete(json("{}"), None);
    futures.wait("read", SHORT).await;
    futures.sweep(Instant::now() + SHORT);
    assert_eq!(futures.wait("unread", SHORT).await, Waited::Gone);
    assert_eq!(futures.wait("read", SHORT).await, Waited::Gone);
    assert!(futures.begin("read", &client("s")).is_none());
}

#[tokio::test]
async fn a_shortage_takes_what_was_read_and_what_nobody_comes_for_and_nothing_else() {
    let futures = Futures::new(Retention::default());
    let ledger = Ledger::new(1 << 20);
    let complete = |id: &str, session: &str| {
        let Some(completer) = futures.begin(id, &client(session)) else { panic!("{id} is new") };
        completer.complete(json("1234"), Some(ledger.charge(&client(session), 1000).unwrap()));
    };
    complete("unread", "s");
    complete("orphan", "over");
    complete("read", "s");
    assert_eq!(ledger.used(), 3 * (4 + limits::FUTURE_BYTES), "a result costs what it holds");
    futures.wait("read", SHORT).await;
    futures.session_over("over");
    assert!(futures.evict() && futures.evict() && !futures.evict());
    assert_eq!(ledger.used(), 4 + limits::FUTURE_BYTES);
    assert_eq!(futures.wait("read", SHORT).await, Waited::Gone);
    assert_eq!(futures.wait("orphan", SHORT).await, Waited::Gone);
    assert!(matches!(futures.wait("unread", SHORT).await, Waited::Ready(_)));
    futures.forget_session("s");
    assert_eq!(ledger.used(), 0);
}

#[tokio::test]
async fn nothing_of_a_result_stays_behind_one_that_nobody_reads() {
    let futures = Futures::new(Retention::default());
    begin(&futures, "unread").complete(json("{}"), None);
    for i in 0..100 {
        let (id, session) = (format!("{i}"), format!("session-{}", i % 7));
        futures.begin(&id, &client(&session)).unwrap().complete(json("{}"), None);
        assert!(matches!(futures.wait(&id, SHORT).await, Waited::Ready(_)));
        match i % 3 {
            0 => futures.retrieved(&id),
            1 => assert!(futures.evict()),
            _ => futures.forget_session(&session),
        }
    }
    drop(begin(&futures, "withdrawn"));
    let table = futures.shared.lock();
    assert_eq!((table.unread.len(), table.read.len(), table.orphans.len()), (1, 0, 0));
    assert_eq!((table.entries.len(), table.of_session.len()), (1, 1));
}

#[tokio::test]
async fn results_of_sessions_that_are_over_go_oldest_first_whichever_came_first_their_end_or_they() {
    let futures = Futures::new(Retention::default());
    let late = futures.begin("late", &client("over")).unwrap();
    for id in ["a", "b", "read"] {
        futures.begin(id, &client("over")).unwrap().complete(json("{}"), None);
    }
    begin(&futures, "kept").complete(json("{}"), None);
    futures.wait("read", SHORT).await;
    futures.session_over("over");
    late.complete(json("{}"), None);
    for id in ["read", "a", "b", "late"] {
        assert!(matches!(futures.shared.lock().entries.get(id), Some(entry) if entry.place.is_some()), "{id}");
        assert!(futures.evict());
        assert!(!futures.shared.lock().entries.contains_key(id), "{id}");
    }
    assert!(!futures.evict());
}

#[tokio::test]
async fn a_refused_request_leaves_its_id_free() {
    let futures = Futures::new(Retention::default());
    let refused = begin(&futures, "a");
    let reader = tokio::spawn({
        let futures = futures.clone();
        async move { futures.wait("a", LONG).await }
    });
    tokio::time::sleep(SHORT).await;
    drop(refused);
    assert_eq!(reader.await.unwrap(), Waited::Unknown);
    begin(&futures, "a").complete(json("{}"), None);
}

fn target(clone: u64) -> Target {
    Target { sampler_id: "s".into(), clone }
}

fn begin_for(futures: &Futures, id: &str, clone: u64) -> Completer {
    futures.begin_for(id, &client("s"), None, Some(target(clone))).unwrap().expect("it is new")
}

async fn told(futures: &Futures, clone: u64, seen: u64, hold: Duration) -> (Vec<String>, u64) {
    let (completions, cursor) = futures.completions(&target(clone), seen, hold).await;
    (completions.into_iter().map(|completion| completion.request_id.to_string()).collect(), cursor)
}

#[tokio::test]
async fn completions_are_told_again_until_they_were_seen_and_to_nobody_else() {
    let futures = Futures::new(Retention::default());
    begin_for(&futures, "a", 0).complete(json("{}"), None);
    begin_for(&futures, "other", 7).complete(json("{}"), None);
    begin_for(&futures, "b", 0).complete(Answer::Failed(Failure::User("no".into())), None);
    let (first, cursor) = told(&futures, 0, 0, SHORT).await;
    assert_eq!(first, ["a", "b"]);
    assert_eq!(told(&futures, 0, 0, SHORT).await.0, first, "an answer that was lost on its way");
    assert_eq!(told(&futures, 0, cursor, SHORT).await, (vec![], cursor));
    assert_eq!(told(&futures, 0, 0, SHORT).await.0, Vec::<String>::new(), "what was seen is forgotten");
    assert_eq!(told(&futures, 7, 0, SHORT).await.0, ["other"]);
    let bytes = |told: (Vec<Completion>, u64)| told.0.into_iter().map(|completion| completion.result_bytes).collect::<Vec<_>>();
    assert_eq!(bytes(futures.completions(&target(7), 0, SHORT).await), [Some(2)]);
}

#[tokio::test]
async fn a_completion_wakes_who_waits_for_it_and_no_waiting_is_left_behind() {
    let futures = Futures::new(Retention::default());
    let completer = begin_for(&futures, "a", 0);
    let reader = tokio::spawn({
        let futures = futures.clone();
        async move { told(&futures, 0, 0, LONG).await.0 }
    });
    tokio::time::sleep(SHORT).await;
    completer.complete(json("{}"), None);
    assert_eq!(reader.await.unwrap(), ["a"]);
    let cursor = told(&futures, 0, 0, SHORT).await.1;
    told(&futures, 0, cursor, SHORT).await;
    assert!(futures.shared.lock().watched.is_empty());
    // A client that hangs up.
    assert!(tokio::time::timeout(SHORT, told(&futures, 0, cursor, LONG)).await.is_err());
    assert!(futures.shared.lock().watched.is_empty());
}

#[tokio::test]
async fn a_result_that_goes_before_its_time_takes_no_other_along() {
    let futures = Futures::new(Retention { read: LONG, ..Retention::default() });
    for id in ["first", "second"] {
        begin(&futures, id).complete(json("{}"), None);
    }
    futures.wait("first", SHORT).await;
    let read_first = clock::now();
    futures.retrieved("first");
    tokio::time::sleep(SHORT).await;
    futures.wait("second", SHORT).await;
    futures.sweep(read_first + LONG + SHORT / 2);
    assert!(matches!(futures.wait("second", SHORT).await, Waited::Ready(_)), "its time is not over");
    futures.sweep(clock::now() + LONG + SHORT);
    assert_eq!(futures.wait("second", SHORT).await, Waited::Gone);
}

#[tokio::test]
async fn the_result_of_a_request_that_is_given_up_makes_room_first() {
    let (futures, ledger) = (Futures::new(Retention::default()), Ledger::new(1 << 20));
    let charge = || Some(ledger.charge(&client("s"), 4096).unwrap());
    let complete = |id: &str| begin(&futures, id).complete(json(&"x".repeat(2000)), charge());
    complete("wanted");
    complete("given up when done");
    futures.given_up("given up when done");
    let running = begin(&futures, "given up before");
    futures.given_up("given up before");
    running.complete(json(&"x".repeat(2000)), charge());
    futures.given_up("never heard of");
    assert!(futures.evict() && futures.evict() && !futures.evict());
    assert_eq!(futures.wait("given up when done", SHORT).await, Waited::Gone);
    assert_eq!(futures.wait("given up before", SHORT).await, Waited::Gone);
    assert!(matches!(futures.wait("wanted", SHORT).await, Waited::Ready(_)));
}

#[tokio::test]
async fn a_completion_whose_result_is_given_up_unread_is_told_and_one_that_was_read_is_not_kept() {
    let futures = Futures::new(Retention { unread: Duration::ZERO, read: Duration::ZERO, gone_max: 1 });
    begin_for(&futures, "read", 0).complete(json("{}"), None);
    futures.wait("read", SHORT).await;
    futures.retrieved("read");
    assert_eq!(futures.wait("read", SHORT).await, Waited::Gone);
    begin_for(&futures, "unread", 0).complete(json("{}"), None);
    futures.retrieved("unread");
    futures.sweep(Instant::now() + SHORT);
    assert_eq!(futures.wait("unread", SHORT).await, Waited::Gone);
    assert_eq!(told(&futures, 0, 0, SHORT).await.0, ["unread"]);
    begin(&futures, "later").complete(json("{}"), None);
    futures.sweep(Instant::now() + SHORT);
    assert!(futures.shared.lock().completions.is_empty(), "ids that are forgotten take their completions along");
}

#[test]
fn ids_that_are_gone_are_forgotten_beyond_a_bound() {
    let futures = Futures::new(Retention { unread: Duration::ZERO, gone_max: 1, ..Retention::default() });
    begin(&futures, "a").complete(json("{}"), None);
    begin(&futures, "b").complete(json("{}"), None);
    futures.sweep(Instant::now() + SHORT);
    assert!(futures.begin("b", &client("s")).is_none());
    assert!(futures.begin("a", &client("s")).is_some());
}
