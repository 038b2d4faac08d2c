//! Random clients of the whole server, over an engine with a toy model, on one thread, in simulated time. The engine's own simulation checks what
//! it computes; this one checks what the server makes of it: sessions, futures, retries, shortages and ends.
//!
//! `STRATA_SIM_SEED=…` runs one world again.

use std::collections::BTreeMap;
use std::time::Instant;

use strata_engine::simulation::{Engine, Faults, Limits, Rng, oracle};

use super::*;
use crate::bases::Base;
use crate::{clock, ids};

/// Worlds of a run, unless one is named.
const WORLDS: u64 = 250;
const SESSION_TIMEOUT: Duration = Duration::from_secs(300);

/// What a client knows of a request that was acknowledged.
struct Acknowledged {
    session: String,
    path: &'static str,
    body: Value,
    result: Option<Bytes>,
    is_given_up: bool,
}

struct World {
    rng: Rng,
    engine: Engine,
    app: Arc<App>,
    router: Router,
    sessions: Vec<String>,
    /// Models by id, with the next id of their operations.
    models: BTreeMap<String, u64>,
    samplers: Vec<String>,
    /// What there was no room for.
    to_send_again: Vec<(&'static str, String, Value)>,
    acknowledged: BTreeMap<String, Acknowledged>,
    next: u64,
    moved: Duration,
    refusals: usize,
}

impl World {
    fn new(seed: u64, data_dir: &TempDir) -> Self {
        ids::start_over();
        let mut rng = Rng::new(seed);
        let limits = Limits {
            pages: rng.between(12, 60),
            adapter_bytes: rng.between(100, 2000) as u64,
            ledger_bytes: 1 << rng.between(18, 22),
            faults: Faults {
                step: rng.below(3) as u32,
                pass: rng.below(3) as u32,
                disk: rng.below(60) as u32,
                ..Faults::default()
            },
            ..Limits::roomy(seed)
        };
        let engine = Engine::new(limits);
        let mut config = ServerConfig::new(([127, 0, 0, 1], 0).into(), DataDir::claim(data_dir.path()).unwrap());
        (config.poll_hold, config.session_timeout) = (Duration::ZERO, SESSION_TIMEOUT);
        let app = App::new(config, vec![Base { info: model_info(), engine: Arc::new(engine.handle()) }]).unwrap();
        World {
            rng,
            engine,
            router: routes::router(app.clone()),
            app,
            sessions: Vec::new(),
            models: BTreeMap::new(),
            samplers: Vec::new(),
            to_send_again: Vec::new(),
            acknowledged: BTreeMap::new(),
            next: 0,
            moved: Duration::ZERO,
            refusals: 0,
        }
    }

    async fn post(&mut self, path: &str, key: &str, body: &Value) -> (StatusCode, Bytes) {
        let request = HttpRequest::builder().method("POST").uri(format!("/api/v1/{path}")).header("host", "localhost:1");
        let request = request.header("content-type", "application/json").header("x-api-key", key);
        let response = self.router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
        let status = response.status();
        assert!(!status.is_server_error(), "{path} {body}: {status}");
        (status, axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap())
    }

    /// Sends something that becomes a future. Sent again, it must be the same one.
    async fn submit(&mut self, path: &'static str, session: &str, body: Value) {
        let (status, bytes) = self.post(path, "tml-a", &body).await;
        if status != StatusCode::OK {
            self.refusals += 1;
            let detail: Value = serde_json::from_slice(&bytes).unwrap();
            assert!(detail["detail"].is_string(), "{path}: {detail}");
            if status == StatusCode::TOO_MANY_REQUESTS {
                self.to_send_again.push((path, session.to_owned(), body));
            }
            return;
        }
        let id = serde_json::from_slice::<Value>(&bytes).unwrap()["request_id"].as_str().unwrap().to_owned();
        let known = self.acknowledged.get(&id).is_some_and(|known| known.path != path);
        assert!(!known, "{id} is the id of two requests");
        let entry = Acknowledged { session: session.to_owned(), path, body, result: None, is_given_up: false };
        self.acknowledged.entry(id).or_insert(entry);
    }

    fn tokens(&mut self, most: usize) -> Vec<u32> {
        let n = self.rng.between(1, most);
        (0..n).map(|_| self.rng.below(u64::from(oracle::VOCAB)) as u32).collect()
    }

    fn datum(&mut self) -> Value {
        let tokens = self.tokens(12);
        let n = tokens.len();
        json!({ "model_input": { "chunks": [{ "tokens": tokens }] }, "loss_fn_inputs": {
            "target_tokens": { "data": vec![1; n], "dtype": "int64" }, "weights": { "data": vec![1.0; n], "dtype": "float32" } } })
    }

    async fn act(&mut self) {
        self.next += 1;
        let n = self.next;
        // Now and then somebody does not know that a session is over.
        let all = self.rng.chance(5);
        let known: Vec<String> = self.sessions.iter().filter(|id| all || self.app.registry.is_active(id)).cloned().collect();
        let session = self.rng.pick(&known).cloned().unwrap_or_default();
        let of_known = |id: &&String| known.iter().any(|session| id.starts_with(session.as_str()));
        let models: Vec<String> = self.models.keys().filter(of_known).cloned().collect();
        let samplers: Vec<String> = self.samplers.iter().filter(of_known).cloned().collect();
        let model = self.rng.pick(&models).cloned().unwrap_or_default();
        let of_model = model.split(':').next().unwrap_or_default().to_owned();
        match self.rng.below(100) {
            0..6 => {
                let key = if self.rng.chance(50) { "tml-a" } else { "tml-b" };
                let (status, bytes) =
                    self.post("create_session", key, &json!({ "user_metadata": { "n": "x".repeat(50) } })).await;
                if status == StatusCode::OK {
                    let made: Value = serde_json::from_slice(&bytes).unwrap();
                    self.sessions.push(made["session_id"].as_str().unwrap().to_owned());
                }
            }
            6..12 => {
                let mut body = create_model_body(&session, n);
                body["lora_config"]["rank"] = json!(self.rng.between(1, 6));
                self.submit("create_model", &session, body).await;
                self.models.insert(format!("{session}:train:{n}"), 1);
            }
            12..17 => {
                let body = json!({ "session_id": session, "sampling_session_seq_id": n, "base_model": "org/base" });
                self.post("create_sampling_session", "tml-a", &body).await;
                self.samplers.push(format!("{session}:sample:{n}"));
            }
            17..55 if !model.is_empty() => {
                // An operation that there was no room for is sent again under its number.
                let waits = |seq: &u64| {
                    self.to_send_again
                        .iter()
                        .any(|(_, _, body)| body["model_id"] == json!(model) && body["seq_id"] == json!(seq))
                };
                let taken = |seq: &u64| self.acknowledged.contains_key(&format!("{model}:{seq}")) || waits(seq);
                // Some come early, and leave a gap.
                let first = self.models[&model] + if self.rng.chance(10) { 1 + self.rng.below(3) } else { 0 };
                let seq = (first..).find(|seq| !taken(seq)).unwrap_or(first);
                let next = (self.models[&model]..).find(|next| *next != seq && !taken(next));
                self.models.insert(model.clone(), next.unwrap_or(seq));
                let head = json!({ "model_id": model, "seq_id": seq });
                let with = |more: Value| {
                    let mut body = head.clone();
                    more.as_object().unwrap().iter().for_each(|(k, v)| body[k] = v.clone());
                    body
                };
                match self.rng.below(10) {
                    0..5 => {
                        let data: Vec<Value> = (0..self.rng.between(1, 4)).map(|_| self.datum()).collect();
                        let input = json!({ "forward_backward_input": { "data": data, "loss_fn": "cross_entropy" } });
                        self.submit("forward_backward", &of_model, with(input)).await;
                    }
                    5..7 => self.submit("optim_step", &of_model, head).await,
                    7 => self.submit("save_weights", &of_model, with(json!({ "path": format!("s{n}") }))).await,
                    _ => {
                        self.samplers.push(format!("{of_model}:sample:{n}"));
                        self.submit("save_weights_for_sampler", &of_model, with(json!({ "sampling_session_seq_id": n }))).await;
                    }
                }
            }
            55..75 if !samplers.is_empty() => {
                let sampler = self.rng.pick(&samplers).cloned().unwrap_or_default();
                let (prompt, most, count) = (self.tokens(20), self.rng.between(1, 12), self.rng.between(1, 5));
                let mut body = sample_body(&sampler, n);
                body["prompt"] = json!({ "chunks": [{ "tokens": prompt }] });
                body["num_samples"] = json!(count);
                body["sampling_params"]["max_tokens"] = json!(most);
                let of_sampler = sampler.split(':').next().unwrap_or_default().to_owned();
                self.submit("asample", &of_sampler, body).await;
            }
            75..88 => self.read_one().await,
            88..91 => {
                if let Some((path, session, body)) = self.to_send_again.pop() {
                    self.submit(path, &session, body).await;
                }
                self.send_one_again().await;
            }
            91 => {
                let ids: Vec<String> = self.acknowledged.keys().cloned().collect();
                if let Some(id) = self.rng.pick(&ids).cloned() {
                    self.post("cancel_future", "tml-a", &json!({ "request_id": id })).await;
                    self.acknowledged.get_mut(&id).unwrap().is_given_up = true;
                }
            }
            92..95 if !session.is_empty() => {
                self.post(&format!("sessions/{session}/finish"), "tml-a", &json!({})).await;
            }
            95 => {
                // Somebody is away for long; the others send a sign of life before.
                self.pass_time(SESSION_TIMEOUT - Duration::from_secs(1));
                for session in self.sessions.clone() {
                    if self.rng.chance(70) {
                        self.post("session_heartbeat", "tml-a", &json!({ "session_id": session })).await;
                    }
                }
                self.pass_time(Duration::from_secs(2));
                self.app.reap().await;
            }
            _ => {
                for _ in 0..self.rng.below(20) {
                    self.turn();
                }
            }
        }
    }

    fn pass_time(&mut self, by: Duration) {
        clock::advance(by);
        self.moved += by;
    }

    fn turn(&mut self) -> bool {
        let worked = self.engine.turn() || self.engine.advance_to_disk();
        self.engine.audit().unwrap_or_else(|wrong| panic!("{wrong}"));
        worked
    }

    /// Reads a result, which is the same as when it was last read, unless it is gone.
    async fn read_one(&mut self) {
        let ids: Vec<String> = self.acknowledged.keys().cloned().collect();
        let Some(id) = self.rng.pick(&ids).cloned() else { return };
        let (status, bytes) = self.post("retrieve_future", "tml-a", &json!({ "request_id": id })).await;
        let known = self.acknowledged.get_mut(&id).unwrap();
        match status {
            StatusCode::OK => {
                assert!(known.result.as_ref().is_none_or(|before| *before == bytes), "{id} reads otherwise the second time");
                known.result = Some(bytes);
            }
            StatusCode::REQUEST_TIMEOUT => assert!(known.result.is_none(), "{id} was done before"),
            // What nobody read or gave up is kept, as long as its session is there and its time is not over.
            StatusCode::GONE | StatusCode::NOT_FOUND => {
                let is_over = self.moved > Duration::from_secs(3600) || !self.app.registry.is_active(&known.session);
                assert!(known.result.is_some() || known.is_given_up || is_over, "{id} is lost unread");
            }
            other => panic!("{id}: {other}"),
        }
    }

    /// A request that is sent again has the same id, and is not done twice.
    async fn send_one_again(&mut self) {
        let ids: Vec<String> = self.acknowledged.keys().cloned().collect();
        let Some(id) = self.rng.pick(&ids).cloned() else { return };
        let (path, body) = (self.acknowledged[&id].path, self.acknowledged[&id].body.clone());
        let open = self.engine.open_requests();
        let (status, bytes) = self.post(path, "tml-a", &body).await;
        if status == StatusCode::OK {
            let again: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(again["request_id"], json!(id), "{path}");
            // A snapshot that was refused its sampling session counts as new; nothing else does.
            assert!(self.engine.open_requests() <= open + usize::from(path == "save_weights_for_sampler"), "{path} ran again");
        }
    }

    /// Lets everything come to its end: every future resolves, and nothing is held for anyone.
    async fn end(mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < 200_000, "there is no end of it");
        }
        for (id, known) in std::mem::take(&mut self.acknowledged) {
            let (status, _) = self.post("retrieve_future", "tml-a", &json!({ "request_id": id })).await;
            // Operations behind a gap wait for as long as their session lives.
            let waits = known.body.get("seq_id").is_some() && self.app.registry.is_active(&known.session);
            let done = [StatusCode::OK, StatusCode::GONE, StatusCode::NOT_FOUND].contains(&status);
            assert!(done || (waits && status == StatusCode::REQUEST_TIMEOUT), "{id}: {status}");
        }
        for session in self.sessions.clone() {
            self.post(&format!("sessions/{session}/finish"), "tml-a", &json!({})).await;
        }
        while self.turn() {}
        assert_eq!(self.engine.open_requests(), 0, "work is left for sessions that are over");
        self.pass_time(Duration::from_secs(3601));
        self.app.reap().await;
        while let Some(session) = self.app.registry.forget_ended() {
            self.app.futures.forget_session(&session);
        }
        assert_eq!(self.app.ledger().used(), 0, "memory is held for nobody");
    }
}

fn run_world(seed: u64, data_dir: &TempDir) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(seed, data_dir);
        for _ in 0..world.rng.between(50, 400) {
            world.act().await;
            if world.rng.chance(40) {
                world.turn();
            }
        }
        let refusals = world.refusals;
        world.end().await;
        refusals
    })
}

#[test]
fn worlds_of_random_clients_hold() {
    let named = std::env::var("STRATA_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    let first = named.unwrap_or_else(|| getrandom::u64().unwrap());
    let (begun, mut refusals) = (Instant::now(), 0);
    for seed in (0..if named.is_some() { 1 } else { WORLDS }).map(|i| first.wrapping_add(i)) {
        let data_dir = tempfile::tempdir().unwrap();
        let done = std::panic::catch_unwind(|| run_world(seed, &data_dir));
        match done {
            Ok(refused) => refusals += refused,
            Err(panic) => {
                eprintln!("run it again with STRATA_SIM_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    eprintln!("worlds took {:?}, {refusals} requests were refused", begun.elapsed());
}
