//! What random clients do: models, training, samples, and giving all of that up at the wrong moment.

use std::collections::{BTreeMap, HashMap};

use crate::api::{
    AdamParams, Cells, CheckpointSource, Datum, Image, LoraSpec, LossInput, LossSpec, LossValues, PromptTargets, Request,
    SampleRequest, SaveTarget, Stop, TrainOp,
};
use crate::sampler::{Plan, SamplerLimits};

use super::super::Rng;
use super::super::oracle::{self, PICTURE_TOKENS_MAX, VOCAB};
use super::super::toy::bytes_of;
use super::{Asked, Event, Kind, Model, Sampler, World, id_of};

impl World {
    pub(super) fn act(&mut self, session: usize) {
        if self.acts_left == 0 || self.sessions[session].over {
            return;
        }
        self.acts_left -= 1;
        match self.rng.below(100) {
            0..13 => self.create_model(session),
            13..45 => self.train(session),
            45..57 => self.create_sampler(session),
            57..78 => self.sample(session),
            78..86 => self.replace_weights(session),
            86..91 => self.cancel(),
            91..94 => self.drop_sampler(session),
            94..96 => self.unload(session),
            _ if self.rng.chance(50) => {
                self.end_session(session);
                self.add_session();
            }
            _ => {}
        }
        self.after(3000, Event::Act { session });
    }

    fn ask(&mut self, session: usize, kind: Kind, request: Request) -> usize {
        self.asked.push(Asked {
            session,
            kind,
            request,
            wrong: None,
            accepted: None,
            attempts: 0,
            refusals: 0,
            given_up: false,
            outcome: None,
            cancelled: None,
            makes: None,
            worked: false,
            ended: None,
            had_room: true,
        });
        self.asked.len() - 1
    }

    /// The number that the next request has in the toy's notes.
    fn next_number(&self) -> u64 {
        self.asked.len() as u64 + 1
    }

    fn lora(&mut self) -> LoraSpec {
        let rank = if self.rng.chance(3) { 9 } else { self.rng.between(1, 6) };
        LoraSpec {
            rank,
            seed: self.rng.below(1 << 40),
            train_attn: true,
            train_mlp: true,
            train_unembed: true,
            ranks: Default::default(),
        }
    }

    fn create_model(&mut self, session: usize) {
        let n = self.models.len();
        let gone = self.models.iter().filter(|m| m.gone && m.session == session).map(|m| m.name.clone()).next();
        let name = match gone.filter(|_| self.rng.chance(30)) {
            Some(name) if !self.models.iter().any(|m| !m.gone && m.name == name) => name,
            _ => format!("m{n}"),
        };
        let mut lora = self.lora();
        let save = self.rng.pick(&self.saves).cloned().filter(|_| self.rng.chance(30));
        let request = match save {
            Some((dir, save_id, rank)) => {
                if self.rng.chance(90) {
                    lora.rank = rank;
                }
                let with_optimizer = self.rng.chance(50);
                let source = CheckpointSource { dir: dir.clone().into(), name: dir, save_id: Some(save_id) };
                Request::CreateModelFromCheckpoint { model_id: name.clone(), source, lora: lora.clone(), with_optimizer }
            }
            None => Request::CreateModel { model_id: name.clone(), lora: lora.clone() },
        };
        let had_room = self.room(session) >= bytes_of(lora.rank).training;
        let asked = self.ask(session, Kind::Create { model: n }, request);
        self.models.push(Model {
            name,
            session,
            rank: lora.rank,
            shape: lora.rank,
            gone: false,
            made: false,
            next_seq: 1,
            ops: BTreeMap::new(),
            numbers: None,
            lost: None,
            next: 1,
            snapshots: HashMap::new(),
        });
        self.asked[asked].had_room = had_room;
        self.send(asked);
    }

    /// Room for adapters of a session that is certainly free.
    pub(super) fn room(&self, session: usize) -> u64 {
        let models = self.models.iter().filter(|m| !m.gone).map(|m| (m.session, bytes_of(m.rank).training));
        let samplers = self.samplers.iter().filter(|s| !s.gone).map(|s| (s.session, s.bytes));
        let (mut used, mut owned, mut own) = (self.handle.intake().kept_bytes(), 0, 0);
        for (holder, bytes) in models.chain(samplers) {
            used += bytes;
            owned += if self.sessions[holder].client.owner == self.sessions[session].client.owner { bytes } else { 0 };
            own += if holder == session { bytes } else { 0 };
        }
        let total = self.limits.adapter_bytes;
        let kept_for_newcomers = if own > 0 {
            total.div_ceil(8)
        } else if owned > 0 {
            total.div_ceil(16)
        } else {
            0
        };
        (total - kept_for_newcomers).saturating_sub(used)
    }

    fn tokens(&mut self, length: usize) -> Vec<i64> {
        let family = self.rng.below(3);
        let own = self.rng.between(0, length);
        (0..length)
            .map(|i| match i < own {
                true => (oracle::mix(family, i as u64) % u64::from(VOCAB)) as i64,
                false => self.rng.below(u64::from(VOCAB)) as i64,
            })
            .collect()
    }

    /// Pictures of an input of `length` tokens, and how many of those are theirs: not all. `broken` of a hundred cannot be decoded.
    fn images(&mut self, length: usize, largest: usize, broken: u64) -> (Vec<Image>, usize) {
        let (mut images, mut at, mut shown) = (Vec::new(), 0, 0);
        let count = if self.rng.chance(40) { self.rng.between(1, 4) } else { 0 };
        for _ in 0..count {
            let width = self.rng.between(1, PICTURE_TOKENS_MAX).min(largest).min(length - 1 - shown);
            if width == 0 {
                break;
            }
            shown += width;
            at += if self.rng.chance(60) { 0 } else { self.rng.below(6) as usize };
            let end = if self.rng.chance(broken) { 255 } else { self.rng.below(3) as u8 };
            let expected_tokens = self.rng.chance(50).then_some(width as i64);
            images.push(Image { at, file: [width as u8, end].into(), expected_tokens });
        }
        images.iter_mut().for_each(|image| image.at = image.at.min(length - shown));
        (images, shown)
    }

    fn length(&mut self, usual: usize, max: usize) -> usize {
        if self.rng.chance(8) { self.rng.between(1, max) } else { self.rng.between(1, usual.min(max)) }
    }

    fn data(&mut self) -> (Vec<Datum>, LossSpec) {
        let number = self.next_number() as f32;
        let policy = self.rng.chance(40);
        let name = if !policy {
            "cross_entropy"
        } else if self.rng.chance(50) {
            "ppo"
        } else {
            "importance_sampling"
        };
        let count = if self.rng.chance(5) { self.rng.between(10, 30) } else { self.rng.between(1, 4) };
        let data = (0..count).map(|_| {
            let n = self.length(16, self.limits.max_example_tokens());
            let k = if policy { 1 } else { self.rng.between(1, 2) };
            let shape = if k == 1 { vec![n] } else { vec![n, k] };
            let numbers = |first: f32, rng: &mut Rng| LossInput {
                shape: shape.clone(),
                values: LossValues::F32(
                    (0..n * k).map(|i| if i == 0 { first } else { rng.below(100) as f32 / 50.0 }).collect(),
                ),
            };
            let targets: Vec<i64> = (0..n * k).map(|_| self.rng.below(u64::from(VOCAB)) as i64).collect();
            let mut inputs = BTreeMap::from([(
                "target_tokens".to_string(),
                LossInput { shape: shape.clone(), values: LossValues::I64(targets) },
            )]);
            if policy {
                inputs.insert("advantages".into(), numbers(number, &mut self.rng));
                inputs.insert("logprobs".into(), numbers(-1.0, &mut self.rng));
            } else {
                inputs.insert("weights".into(), numbers(number, &mut self.rng));
            }
            let (images, shown) = self.images(n, self.limits.gallery_tokens / 2, 0);
            Datum { tokens: self.tokens(n - shown), images, loss_inputs: inputs }
        });
        let mut data: Vec<Datum> = data.collect();
        // Completions of one prompt.
        if self.rng.chance(30) {
            for i in 1..data.len() {
                let (before, rest) = data.split_at_mut(i);
                let (first, own) = (&before[i - 1].tokens, &mut rest[0].tokens);
                let shared = self.rng.below(first.len().min(own.len()) as u64 + 1) as usize;
                own[..shared].copy_from_slice(&first[..shared]);
            }
        }
        (data, LossSpec { name: name.into(), config: BTreeMap::new() })
    }

    fn some_model(&mut self, session: usize) -> Option<usize> {
        let own: Vec<usize> =
            (0..self.models.len()).filter(|&m| self.models[m].session == session && !self.models[m].gone).collect();
        self.rng.pick(&own).copied()
    }

    fn train(&mut self, session: usize) {
        let Some(model) = self.some_model(session) else { return self.create_model(session) };
        let spread = if self.rng.chance(50) { 1 } else { 6000 };
        for _ in 0..self.rng.between(1, 8) {
            let seq = self.models[model].next_seq;
            self.models[model].next_seq += 1;
            let (op, wrong) = self.op(model);
            let model_id = self.models[model].name.clone();
            let asked = self.ask(session, Kind::Train { model, seq }, Request::Train { model_id, seq_id: seq, op });
            self.asked[asked].wrong = wrong;
            if self.rng.chance(1) {
                self.sessions[session].lost_one = true;
                continue;
            }
            for _ in 0..if self.rng.chance(10) { 2 } else { 1 } {
                self.after(spread, Event::Send { asked });
            }
        }
    }

    /// A step, the weights of a sampler replaced, and samples meanwhile, as asynchronous reinforcement learning does.
    fn replace_weights(&mut self, session: usize) {
        let Some(model) = self.some_model(session) else { return self.create_model(session) };
        for _ in 0..self.rng.between(1, 4) {
            let model_id = self.models[model].name.clone();
            let sampler_id = format!("{model_id}:inflight");
            let step = TrainOp::OptimStep(AdamParams { learning_rate: self.rng.below(100) as f64, ..AdamParams::default() });
            for op in [step, TrainOp::Snapshot { sampler_id: sampler_id.clone(), replace: true }] {
                let seq = self.models[model].next_seq;
                self.models[model].next_seq += 1;
                let request = Request::Train { model_id: model_id.clone(), seq_id: seq, op };
                let asked = self.ask(session, Kind::Train { model, seq }, request);
                self.after(3000, Event::Send { asked });
            }
            if let Some(sampler) = self.samplers.iter().position(|s| s.name == sampler_id && !s.gone) {
                self.sample_from(session, sampler);
            }
        }
    }

    fn op(&mut self, model: usize) -> (TrainOp, Option<String>) {
        let rank = self.models[model].shape;
        let op = match self.rng.below(100) {
            0..48 => {
                let (mut data, loss) = self.data();
                let wrong = self.rng.chance(5);
                let mut why = "outside the vocabulary";
                if wrong {
                    match data[0].images.last_mut() {
                        Some(image) => {
                            image.file = [image.file[0], 255].into();
                            why = "broken picture";
                        }
                        None => data[0].tokens[0] = 1000,
                    }
                }
                let op = TrainOp::ForwardBackward { data, loss, forward_only: self.rng.chance(25) };
                return (op, wrong.then(|| why.into()));
            }
            48..70 => {
                let wrong = self.rng.chance(5);
                let learning_rate = if wrong { -1.0 } else { self.rng.below(100) as f64 };
                let op = TrainOp::OptimStep(AdamParams { learning_rate, ..AdamParams::default() });
                return (op, wrong.then(|| "learning_rate".into()));
            }
            70..82 => {
                let dir = format!("/d{}", self.rng.below(6));
                let save_id = format!("save{}", self.next_number());
                self.saves.push((dir.clone(), save_id.clone(), rank));
                let target = SaveTarget {
                    root: "".into(),
                    dir: dir.clone().into(),
                    name: dir,
                    overwrite: self.rng.chance(80),
                    metadata: serde_json::json!({ "save_id": save_id }),
                    recipients: vec![],
                };
                if self.rng.chance(60) { TrainOp::SaveState(target) } else { TrainOp::SaveSampler(target) }
            }
            82..92 => {
                let replace = self.rng.chance(50);
                let name =
                    if replace { format!("{}:inflight", self.models[model].name) } else { format!("x{}", self.next_number()) };
                TrainOp::Snapshot { sampler_id: name, replace }
            }
            92..97 => match self.rng.pick(&self.saves).cloned() {
                Some((dir, save_id, _)) => {
                    let source = CheckpointSource { dir: dir.clone().into(), name: dir, save_id: Some(save_id) };
                    TrainOp::LoadState { source, with_optimizer: self.rng.chance(50) }
                }
                None => TrainOp::Refused("as asked".into()),
            },
            _ => TrainOp::Refused("as asked".into()),
        };
        let wrong = matches!(op, TrainOp::Refused(_)).then(|| "as asked".into());
        (op, wrong)
    }

    fn create_sampler(&mut self, session: usize) {
        let sampler = self.samplers.len();
        let name = format!("sampler{sampler}");
        let save = self.rng.pick(&self.saves).cloned().filter(|_| self.rng.chance(60));
        let source = save.map(|(dir, save_id, rank)| {
            let rank = if self.rng.chance(95) { rank } else { 1 };
            let lora =
                LoraSpec { rank, seed: 0, train_attn: true, train_mlp: true, train_unembed: true, ranks: Default::default() };
            (CheckpointSource { dir: dir.clone().into(), name: dir, save_id: Some(save_id) }, lora)
        });
        let bytes = source.as_ref().map_or(0, |(_, lora)| bytes_of(lora.rank).frozen);
        let had_room = self.room(session) >= bytes;
        self.samplers.push(Sampler { name: name.clone(), session, bytes, gone: false, versions: Vec::new(), pending: 0 });
        let asked = self.ask(session, Kind::CreateSampler { sampler }, Request::CreateSampler { sampler_id: name, source });
        self.asked[asked].had_room = had_room;
        self.send(asked);
    }

    fn sample(&mut self, session: usize) {
        let own = |s: &Sampler| s.session == session && !s.gone;
        let own: Vec<usize> = (0..self.samplers.len()).filter(|&s| own(&self.samplers[s])).collect();
        let Some(&sampler) = self.rng.pick(&own).filter(|_| !own.is_empty()) else { return self.create_sampler(session) };
        self.sample_from(session, sampler);
    }

    fn sample_from(&mut self, session: usize, sampler: usize) {
        for _ in 0..if self.rng.chance(15) { self.rng.between(2, 12) } else { 1 } {
            let context = self.limits.max_context_tokens();
            let length = if self.rng.chance(3) { context } else { self.length(24, context) };
            // Now and then one that is too large, or that this model does not read.
            let mut largest = self.limits.gallery_tokens / 2;
            if self.rng.chance(5) {
                largest = PICTURE_TOKENS_MAX;
            }
            let (images, shown) = self.images(length, largest, 2);
            let sample = SampleRequest {
                prompt: self.tokens(length - shown),
                images,
                num_samples: if self.rng.chance(10) { self.rng.between(5, 30) } else { self.rng.between(1, 5) },
                max_tokens: (!self.rng.chance(10))
                    .then(|| if self.rng.chance(15) { 1 } else { self.length(24, self.limits.max_context_tokens()) }),
                seed: self.next_number(),
                stop: match self.rng.below(4) {
                    0 => Stop::Tokens(vec![self.rng.below(u64::from(VOCAB)) as i64]),
                    1 => Stop::Tokens(Vec::new()),
                    _ => Stop::EndOfSequence,
                },
                temperature: if self.rng.chance(20) { 0.0 } else { 1.0 },
                top_k: None,
                top_p: 1.0,
                prompt_logprobs: self.rng.chance(25),
                prompt_logprobs_last_n: self.rng.chance(30).then(|| self.rng.between(1, 10)),
                topk_prompt_logprobs: if self.rng.chance(10) { 3 } else { 0 },
                topk_sample_logprobs: if self.rng.chance(10) { 2 } else { 0 },
                target_prompt_logprobs: self.rng.chance(20).then(|| self.prompt_targets(length)),
                prompt_alt_tokens_k: if self.rng.chance(15) { self.rng.between(1, 4) } else { 0 },
            };
            let limits = SamplerLimits {
                vocab_size: VOCAB as usize,
                max_context_tokens: self.limits.max_context_tokens(),
                short_sequence_max: self.limits.short_sequence_max(),
                eos_token_ids: oracle::END_OF_SEQUENCE.to_vec(),
                page_tokens: self.limits.page_tokens,
                cache: self.limits.cache(),
                tokenizer: None,
                eyes: self.limits.eyes(),
            };
            let wrong = Plan::new(&sample, &limits).err();
            let known = self.rng.chance(98);
            let s = &self.samplers[sampler];
            let kind = Kind::Sample { sampler: None, version: None };
            let sampler_id = if known { s.name.clone() } else { "nowhere".into() };
            let asked = self.ask(session, kind, Request::Sample { sampler_id, sample });
            self.asked[asked].wrong = wrong;
            self.send(asked);
        }
    }

    /// Tokens to score in a prompt of so many tokens: whole or in compressed rows, with cells that want nothing, and now and then wrong.
    fn prompt_targets(&mut self, length: usize) -> PromptTargets {
        let rows = if self.rng.chance(3) { length } else { length - 1 };
        let width = self.rng.between(1, 4);
        let is_sparse = self.rng.chance(50);
        // What is before the first that is named may come from the prefix cache.
        let first = self.rng.below(rows as u64 + 1) as usize;
        let (mut ids, mut columns, mut row_offsets) = (Vec::new(), Vec::new(), vec![0]);
        for row in 0..rows {
            for column in 0..width as i64 {
                if is_sparse && self.rng.chance(60) {
                    continue;
                }
                let is_named = row >= first && self.rng.chance(70);
                ids.push(if is_named { self.rng.below(u64::from(VOCAB)) as i64 } else { -1 });
                columns.push(column);
            }
            row_offsets.push(ids.len() as i64);
        }
        if let Some(id) = ids.last_mut().filter(|_| self.rng.chance(3)) {
            *id = i64::from(VOCAB);
        }
        let cells = if is_sparse { Cells::Csr { row_offsets, columns } } else { Cells::All };
        PromptTargets { shape: [rows, width], cells, ids }
    }

    fn cancel(&mut self) {
        let open = |a: &Asked| a.accepted.is_some() && a.outcome.is_none();
        let open: Vec<usize> = (0..self.asked.len()).filter(|&a| open(&self.asked[a])).collect();
        let Some(&target) = self.rng.pick(&open) else { return };
        let session = self.asked[target].session;
        let request_id = id_of(target);
        let asked = self.ask(session, Kind::Free { found: Some(true) }, Request::Cancel { request_id });
        self.asked[target].cancelled = Some(self.shared.moment.get());
        self.send(asked);
    }

    fn drop_sampler(&mut self, session: usize) {
        let own = |s: &Sampler| s.session == session && !s.gone;
        let own: Vec<usize> = (0..self.samplers.len()).filter(|&s| own(&self.samplers[s])).collect();
        let Some(&sampler) = self.rng.pick(&own) else { return };
        self.lose_sampler(sampler);
        let sampler_id = self.samplers[sampler].name.clone();
        let asked = self.ask(session, Kind::Free { found: None }, Request::DropSampler { sampler_id });
        self.send(asked);
    }

    fn lose_sampler(&mut self, sampler: usize) {
        let moment = self.shared.moment.get();
        self.samplers[sampler].gone = true;
        let name = self.samplers[sampler].name.clone();
        for asked in self.asked.iter_mut().filter(|a| a.outcome.is_none()) {
            let names = match &asked.kind {
                Kind::Sample { sampler: Some(s), .. } => *s == sampler && asked.accepted.is_some(),
                Kind::CreateSampler { sampler: s } => *s == sampler,
                Kind::Train { .. } => {
                    matches!(&asked.request, Request::Train { op: TrainOp::Snapshot { sampler_id, .. }, .. } if *sampler_id == name)
                        && asked.accepted.is_some()
                }
                _ => false,
            };
            if names {
                asked.ended.get_or_insert(moment);
            }
        }
    }

    fn unload(&mut self, session: usize) {
        let Some(model) = self.some_model(session) else { return };
        self.lose_model(model);
        let request = Request::UnloadModel { model_id: self.models[model].name.clone() };
        let asked = self.ask(session, Kind::Free { found: None }, request);
        self.send(asked);
    }

    pub(super) fn lose_model(&mut self, model: usize) {
        let moment = self.shared.moment.get();
        self.models[model].gone = true;
        for asked in self.asked.iter_mut().filter(|a| a.outcome.is_none()) {
            if matches!(asked.kind, Kind::Train { model: m, .. } | Kind::Create { model: m } if m == model) {
                asked.ended.get_or_insert(moment);
            }
        }
    }

    pub(super) fn end_session(&mut self, session: usize) {
        self.sessions[session].over = true;
        for model in 0..self.models.len() {
            if self.models[model].session == session && !self.models[model].gone {
                self.lose_model(model);
            }
        }
        for sampler in 0..self.samplers.len() {
            if self.samplers[sampler].session == session && !self.samplers[sampler].gone {
                self.lose_sampler(sampler);
            }
        }
        let moment = self.shared.moment.get();
        for asked in self.asked.iter_mut().filter(|a| a.session == session && a.outcome.is_none()) {
            asked.ended.get_or_insert(moment);
        }
        let asked = self.ask(session, Kind::Free { found: Some(true) }, Request::EndSession);
        self.send(asked);
    }
}
