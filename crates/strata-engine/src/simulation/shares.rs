//! Nobody waits for more than their share: what a small request costs beside someone who has far too much to do.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::api::{
    AdamParams, Client, Datum, Image, LoraSpec, LossInput, LossSpec, LossValues, Request, SampleRequest, Stop, TrainOp,
};

use crate::engine::EngineHandle;

use super::oracle::{self, PICTURE_TOKENS_MAX};
use super::toy::{BASE_COST, LAYERS, OPTIM_COST, SEEING_COST, TOKEN_COST, Worked};
use super::{Engine, Limits, Rng};

/// Pages of the cache: 800 tokens.
const PAGES: usize = 200;

/// What the cache has beside its pages.
#[derive(Clone, Copy, Debug)]
struct Room {
    states: usize,
    /// For what was seen. Half as many may be seen at a time.
    gallery_tokens: usize,
}

/// What someone has to do.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Requests, samples of each, prompt tokens, sampled tokens.
    Samples(usize, usize, usize, usize),
    /// Models, operations of each, examples of each, tokens of each.
    Training(usize, usize, usize, usize),
    /// Requests, pictures of each, each of them another.
    Pictures(usize, usize),
    /// Operations of a model, examples of each with a picture.
    PictureTraining(usize, usize),
    /// Models, optimizer steps of each.
    Steps(usize, usize),
    /// Models, snapshots of each with a step before.
    Snapshots(usize, usize),
}

/// Clients that send all at once, and when they are answered.
#[derive(Clone)]
struct Clients {
    handle: EngineHandle,
    answers: Arc<Mutex<Vec<u64>>>,
    answered: Rc<RefCell<HashMap<u64, Duration>>>,
    sent: Rc<Cell<u64>>,
}

fn client(owner: &str, session: &str) -> Client {
    Client { owner: owner.into(), session: session.into() }
}

fn datum(number: u64, length: usize, rng: &mut Rng) -> Datum {
    let ids = |rng: &mut Rng| (0..length).map(|_| rng.below(u64::from(oracle::VOCAB)) as i64).collect::<Vec<i64>>();
    let input = |values| LossInput { shape: vec![length], values };
    let mut loss_inputs = BTreeMap::new();
    loss_inputs.insert("target_tokens".to_string(), input(LossValues::I64(ids(rng))));
    loss_inputs.insert("weights".to_string(), input(LossValues::F32(vec![number as f32; length])));
    Datum { tokens: ids(rng), images: Vec::new(), loss_inputs }
}

fn forward_backward(data: Vec<Datum>) -> TrainOp {
    TrainOp::ForwardBackward {
        data,
        loss: LossSpec { name: "cross_entropy".into(), config: BTreeMap::new() },
        forward_only: false,
    }
}

/// A picture that no other request has.
fn picture(request: u64, n: usize) -> Image {
    let mut file = vec![PICTURE_TOKENS_MAX as u8];
    file.extend(request.to_le_bytes().into_iter().chain([n as u8, 0]));
    Image { at: 0, file: file.into(), expected_tokens: None }
}

impl Clients {
    fn new(pages: usize, room: Room) -> (Engine, Clients) {
        let Room { states, gallery_tokens } = room;
        let engine = Engine::new(Limits { adapter_bytes: 1 << 20, pages, states, gallery_tokens, ..Limits::roomy(1) });
        let handle = engine.handle();
        (engine, Clients { handle, answers: Arc::default(), answered: Rc::default(), sent: Rc::default() })
    }

    /// Notes what was answered by now.
    fn look(&self, now: Duration) {
        let answers = self.answers.lock().unwrap().drain(..).map(|number| (number, now)).collect::<Vec<_>>();
        self.answered.borrow_mut().extend(answers);
    }

    /// What someone sends to have this load; the number of the last request.
    fn load(&self, who: &Client, load: Load, rng: &mut Rng) -> u64 {
        let session = &who.session;
        let sampler_id = format!("{session}:base");
        match load {
            Load::Samples(..) | Load::Pictures(..) => {
                let (requests, num_samples, prompt, max_tokens, pictures) = match load {
                    Load::Samples(requests, num_samples, prompt, max_tokens) => (requests, num_samples, prompt, max_tokens, 0),
                    Load::Pictures(requests, pictures) => (requests, 1, 4, 8, pictures),
                    _ => return self.sent.get(),
                };
                self.send(who, Request::CreateSampler { sampler_id: sampler_id.clone(), source: None });
                for _ in 0..requests {
                    let sample = SampleRequest {
                        images: (0..pictures).map(|n| picture(self.sent.get(), n)).collect(),
                        num_samples,
                        max_tokens: Some(max_tokens),
                        seed: self.sent.get() + 1,
                        stop: Stop::Tokens(Vec::new()),
                        ..SampleRequest::of((0..prompt).map(|_| rng.below(u64::from(oracle::VOCAB)) as i64).collect())
                    };
                    self.send(who, Request::Sample { sampler_id: sampler_id.clone(), sample });
                }
            }
            Load::Training(models, ops, examples, tokens) => self.train(who, models, ops, |_, number, rng| {
                vec![forward_backward((0..examples).map(|_| datum(number, tokens, rng)).collect())]
            }),
            Load::PictureTraining(ops, examples) => self.train(who, 1, ops, |_, number, rng| {
                let example = |n: usize| {
                    let mut datum = datum(number, 20, rng);
                    datum.tokens.truncate(20 - PICTURE_TOKENS_MAX);
                    datum.images = vec![picture(number, n)];
                    datum
                };
                vec![forward_backward((0..examples).map(example).collect())]
            }),
            Load::Steps(models, ops) => self.train(who, models, ops, |_, _, _| vec![TrainOp::OptimStep(AdamParams::default())]),
            Load::Snapshots(models, ops) => self.train(who, models, ops, |model, _, _| {
                let sampler_id = format!("{model}:inflight");
                vec![TrainOp::OptimStep(AdamParams::default()), TrainOp::Snapshot { sampler_id, replace: true }]
            }),
        }
        self.sent.get()
    }

    fn create(&self, who: &Client, model_id: &str) {
        let lora =
            LoraSpec { rank: 1, seed: 1, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() };
        self.send(who, Request::CreateModel { model_id: model_id.into(), lora });
    }

    fn train(&self, who: &Client, models: usize, ops: usize, op: impl Fn(&str, u64, &mut Rng) -> Vec<TrainOp>) {
        let mut rng = Rng::new(3);
        for n in 0..models {
            let model_id = format!("{}:{n}", who.session);
            self.create(who, &model_id);
            let ops = (0..ops).flat_map(|_| op(&model_id, self.sent.get() + 1, &mut rng)).collect::<Vec<_>>();
            for (seq_id, op) in (1..).zip(ops) {
                self.send(who, Request::Train { model_id: model_id.clone(), seq_id, op });
            }
        }
    }

    fn send(&self, who: &Client, request: Request) {
        let number = self.sent.get() + 1;
        self.sent.set(number);
        let answers = self.answers.clone();
        let reply = Box::new(move |outcome: crate::api::Outcome, _| {
            // What is open when the engine is dropped fails; anything else that fails is missed as never answered.
            if outcome.is_ok() {
                answers.lock().unwrap().push(number);
            }
        });
        self.handle.submit(format!("r{number}").into(), who.clone(), request, reply).unwrap();
    }
}

/// How long `small` takes beside `large` when it comes at some moment, and how long the largest step, layer and optimizer step take meanwhile.
fn latency(room: Room, large: &[(Client, Load)], small: (Client, Load), moment: Duration) -> (Duration, Duration) {
    let (mut engine, clients) = Clients::new(PAGES, room);
    for (who, load) in large {
        clients.load(who, *load, &mut Rng::new(5));
    }
    let shows = matches!(small.1, Load::Pictures(..) | Load::PictureTraining(..));
    // It comes at its moment, also in the middle of a pass.
    let begun = Rc::new(Cell::new(None));
    let (others, noted, shared) = (clients.clone(), begun.clone(), engine.shared.clone());
    engine.on_time(move || {
        let now = shared.now.get();
        others.look(now);
        if now >= moment && noted.get().is_none() {
            noted.set(Some((others.load(&small.0, small.1, &mut Rng::new(9)), now)));
        }
    });
    let mut quiet = 0;
    loop {
        quiet = if engine.turn() { 0 } else { quiet + 1 };
        engine.audit().unwrap();
        clients.look(engine.now());
        if let Some((number, at)) = begun.get()
            && let Some(&end) = clients.answered.borrow().get(&number)
        {
            let log = engine.shared.log.borrow();
            let steps = log.iter().filter_map(|(_, w)| if let Worked::Step { tokens, .. } = w { Some(*tokens) } else { None });
            let passes = log.iter().filter_map(|(_, w)| if let Worked::Pass { tokens, .. } = w { Some(*tokens) } else { None });
            let sights = log
                .iter()
                .filter_map(|(_, w)| if let Worked::Sight { file, .. } = w { Some(usize::from(file[0])) } else { None });
            // Of a tower, too, whoever comes waits for a block; and who shows a picture, for the one that is being seen.
            let sight = (sights.max().unwrap_or(0) * SEEING_COST * if shows { LAYERS as usize } else { 1 }) as u32;
            let (step, pass) = (steps.max().unwrap_or(0) as u32, (passes.max().unwrap_or(0) as u32).max(sight));
            let wait = BASE_COST + TOKEN_COST * step + (BASE_COST + TOKEN_COST * pass) / LAYERS + OPTIM_COST;
            return (end - at, wait);
        }
        if let Some((_, at)) = begun.get()
            && engine.now() - at > Duration::from_millis(100)
        {
            // Long enough to be wrong.
            return (engine.now() - at, Duration::ZERO);
        }
        if quiet > 0 {
            assert!(begun.get().is_none() || quiet < 10_000, "it is never answered");
            engine.advance(Duration::from_micros(50));
        }
    }
}

#[test]
fn a_small_request_waits_for_no_backlog() {
    let slow =
        [1795353775560703127, 1795567601464732611, seed()].into_iter().flat_map(slow_beside_backlogs).collect::<Vec<_>>();
    assert!(slow.is_empty(), "{}", slow.join("\n"));
}

/// The models of the large one are made at about 3 ms, and its first pass comes then: before the picture is seen, between the blocks of its tower, or after.
#[test]
fn a_large_pass_that_comes_while_a_picture_is_seen_does_not_run_before_what_the_picture_is_for() {
    let (small, large) = (client("small", "s"), [(client("small", "t"), Load::Training(2, 10, 1, 700))]);
    let (room, what) = (Room { states: 24, gallery_tokens: 128 }, Load::Pictures(1, 1));
    let (alone, _) = latency(room, &[], (small.clone(), what), Duration::ZERO);
    for moment in (0..250).map(|n| Duration::from_micros(20 * n)) {
        let (latency, wait) = latency(room, &large, (small.clone(), what), moment);
        assert!(latency <= alone * 3 + wait, "at {moment:?} it takes {latency:?}, alone {alone:?}, with {wait:?} to wait");
    }
}

/// Which small requests wait too long beside which backlogs, if they come at moments drawn from `seed`.
fn slow_beside_backlogs(seed: u64) -> Vec<String> {
    let (small, other) = (client("small", "s"), client("large", "t"));
    let loads = [
        Load::Samples(200, 4, 20, 64),
        Load::Samples(30, 1, 700, 60),
        Load::Samples(300, 8, 3, 200),
        Load::Samples(200, 64, 2, 6),
        Load::Training(1, 40, 8, 100),
        Load::Training(4, 40, 8, 10),
        Load::Training(2, 10, 1, 700),
        Load::Pictures(100, 3),
        Load::PictureTraining(40, 8),
        Load::Steps(4, 300),
        Load::Snapshots(4, 200),
    ];
    let smalls = [
        Load::Samples(1, 1, 8, 16),
        Load::Training(1, 1, 1, 8),
        Load::Steps(1, 1),
        Load::Samples(1, 2, 40, 30),
        Load::Pictures(1, 1),
        Load::PictureTraining(1, 1),
    ];
    let mut rng = Rng::new(seed);
    let mut slow = Vec::new();
    // A cache without states, one that has few, and one with room for one picture at a time.
    let [none, few, narrow] =
        [(0, 128), (24, 128), (0, 2 * PICTURE_TOKENS_MAX)].map(|(states, gallery_tokens)| Room { states, gallery_tokens });
    for (what, room) in smalls.into_iter().flat_map(|what| [none, few, narrow].map(|room| (what, room))) {
        let (alone, _) = latency(room, &[], (small.clone(), what), Duration::ZERO);
        let mut beside: Vec<Vec<(Client, Load)>> = loads.iter().map(|&load| vec![(other.clone(), load)]).collect();
        // Of the same owner, in another session; and all of them together, which is still one owner.
        beside.extend(loads.iter().map(|&load| vec![(client("small", "t"), load)]));
        beside.push((0..loads.len()).map(|n| (client("large", &format!("t{n}")), loads[n])).collect());
        for large in beside {
            let moment = Duration::from_micros(rng.below(100_000));
            // A sample that fills the cache keeps it until it has got somewhere.
            let one = latency(room, &[], (other.clone(), Load::Samples(1, 1, 700, 60)), Duration::ZERO).0;
            let one =
                if large.iter().any(|(_, load)| matches!(load, Load::Samples(_, _, 700, _))) { one } else { Duration::ZERO };
            let (latency, wait) = latency(room, &large, (small.clone(), what), moment);
            if latency > alone * 3 + wait + one {
                slow.push(format!(
                    "{what:?} with {room:?} takes {latency:?}, alone {alone:?}, with {wait:?} to wait, at {moment:?} beside {large:?}"
                ));
            }
        }
    }
    slow
}

fn seed() -> u64 {
    let seed = std::env::var("STRATA_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
    let seed = seed.unwrap_or_else(now);
    println!("STRATA_SIM_SEED={seed}");
    seed
}

#[test]
fn owners_with_as_much_to_do_have_as_much_of_the_device() {
    // Of samples as long, so that as many pages are as much work. However it is cut: three sessions against one, large requests against small ones, training against samples.
    let pairs = [
        (vec![Load::Training(1, 60, 8, 100)], vec![Load::Training(4, 600, 2, 10)]),
        (vec![Load::Samples(1000, 8, 8, 24)], vec![Load::Samples(5000, 1, 8, 24)]),
        (vec![Load::Samples(500, 8, 8, 24); 3], vec![Load::Samples(1000, 4, 8, 24)]),
        (vec![Load::Training(1, 60, 8, 100)], vec![Load::Samples(1000, 8, 8, 24)]),
    ];
    for (one, other) in pairs {
        let (mut engine, clients) = Clients::new(4000, Room { states: 0, gallery_tokens: 128 });
        for (owner, loads) in [("one", &one), ("other", &other)] {
            for (n, load) in loads.iter().enumerate() {
                clients.load(&client(owner, &format!("{owner}{n}")), *load, &mut Rng::new(5));
            }
        }
        while engine.now() < Duration::from_millis(400) {
            // Before there is anything to share, models are made.
            assert!(engine.turn() || engine.advance_to_disk(), "there is more to do");
        }
        let [a, b] = ["one", "other"].map(|owner| engine.core.used(&client(owner, &format!("{owner}0"))).as_micros() as i64);
        // A pass or step of either may be in front.
        assert!((a - b).abs() < 12_000, "{a} and {b} us for {one:?} and {other:?}");
    }
}

/// Tokens of the passes that are begun, and how long all take, where so many owners have an example each of so many tokens; they send it so long after the first.
fn passes(senders: &[(usize, Duration)]) -> (Vec<usize>, Duration) {
    let (mut engine, clients) = Clients::new(PAGES, Room { states: 0, gallery_tokens: 128 });
    let whos: Vec<Client> = (0..senders.len()).map(|n| client(&format!("o{n}"), &format!("s{n}"))).collect();
    whos.iter().for_each(|who| clients.create(who, &who.session));
    while clients.answers.lock().unwrap().len() < whos.len() {
        if !engine.turn() && !engine.advance_to_disk() {
            engine.advance(Duration::from_micros(10));
        }
    }
    let (start, mut rng) = (engine.now(), Rng::new(7));
    let mut left: Vec<(Duration, Client, usize)> =
        senders.iter().zip(whos).map(|(&(tokens, after), who)| (start + after, who, tokens)).collect();
    let (others, shared) = (clients.clone(), engine.shared.clone());
    let mut send_due = move || {
        let now = shared.now.get();
        for (_, who, tokens) in left.extract_if(.., |(at, ..)| *at <= now) {
            let model_id = who.session.to_string();
            let op = forward_backward(vec![datum(others.sent.get() + 1, tokens, &mut rng)]);
            others.send(&who, Request::Train { model_id, seq_id: 1, op });
        }
    };
    send_due();
    engine.on_time(send_due);
    while clients.answers.lock().unwrap().len() < 2 * senders.len() {
        if !engine.turn() {
            engine.advance(Duration::from_micros(10));
        }
        engine.audit().unwrap();
    }
    let log = engine.shared.log.borrow();
    let tokens = log.iter().filter_map(|(_, w)| if let Worked::Pass { tokens, .. } = w { Some(*tokens) } else { None });
    (tokens.collect(), engine.now() - start)
}

#[test]
fn those_who_send_at_the_same_time_share_a_pass_although_one_comes_first() {
    let us = Duration::from_micros;
    let layer = |tokens: u32| (BASE_COST + TOKEN_COST * tokens) / LAYERS;
    // One of sixteen is first; the others come while its first layer runs.
    let at_once: Vec<_> = (0..16).map(|n| (8, us(n))).collect();
    let (tokens, time) = passes(&at_once);
    assert_eq!(tokens, [8, 128]);
    assert!(time <= layer(8) + layer(128) * LAYERS + us(10), "{time:?}");

    // After its first layer it is too late: they do not fit between its layers, and share the next.
    let late: Vec<_> = (0..16).map(|n| (8, if n == 0 { us(0) } else { layer(8) + us(1) })).collect();
    assert_eq!(passes(&late).0, [8, 120]);

    // Who has little to do runs between the layers of a large pass, and does not have it begin anew; nor do few who would make it a little larger.
    assert_eq!(passes(&[(100, us(0)), (8, us(1))]).0, [100, 8]);
    assert_eq!(passes(&[(40, us(0)), (30, us(0)), (30, us(1))]).0[..2], [70, 30]);

    // However they come, what is left is little.
    for gap in 1..100 {
        let in_turn: Vec<_> = (0..16).map(|n| (8, us(gap * n))).collect();
        let (tokens, _) = passes(&in_turn);
        let begun: usize = tokens.iter().sum();
        assert!(begun - 128 <= 2 * 128, "{tokens:?}");
    }
}

#[test]
fn completions_of_one_prompt_share_a_pass_beyond_its_tokens_where_nothing_goes_back() {
    let passes_of = |forward_only: bool, count: usize| {
        let (mut engine, clients) = Clients::new(PAGES, Room { states: 0, gallery_tokens: 0 });
        let (who, mut rng) = (client("o", "s"), Rng::new(3));
        let mut data: Vec<Datum> = (0..count).map(|_| datum(1, 60, &mut rng)).collect();
        let prompt = data[0].tokens[..56].to_vec();
        data.iter_mut().for_each(|datum| datum.tokens[..56].copy_from_slice(&prompt));
        clients.create(&who, "s:0");
        let loss = LossSpec { name: "cross_entropy".into(), config: BTreeMap::new() };
        let op = TrainOp::ForwardBackward { data, loss, forward_only };
        clients.send(&who, Request::Train { model_id: "s:0".into(), seq_id: 1, op });
        while clients.answers.lock().unwrap().len() < 2 {
            if !engine.turn() && !engine.advance_to_disk() {
                engine.advance(Duration::from_micros(10));
            }
            engine.audit().unwrap();
        }
        let log = engine.shared.log.borrow();
        let tokens = log.iter().filter_map(|(_, w)| if let Worked::Pass { tokens, .. } = w { Some(*tokens) } else { None });
        tokens.collect::<Vec<_>>()
    };
    // The first example takes 60, and each of those that follow 4 and what 56 copies do: of twice 128, for all alone they would take 60.
    assert_eq!(passes_of(true, 12), [720]);
    assert_eq!(passes_of(true, 18), [1020, 60], "there is memory for 1,024 tokens");
    assert_eq!(passes_of(false, 8), [120; 4]);
}
