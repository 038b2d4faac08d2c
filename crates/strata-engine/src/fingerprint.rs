//! What tells a request that is sent again from another that took its number.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::api::{AdamParams, Datum, Image, LossValues, SampleRequest, SaveTarget, TrainOp};

impl TrainOp {
    /// A number by which operations differ that ask for different things, as long as the process runs. What differs each time that one is sent, such as the metadata of a save, is no part of it.
    /// `None` if it was refused: then it may be the same as any other.
    pub fn fingerprint(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        std::mem::discriminant(self).hash(&mut hasher);
        match self {
            TrainOp::ForwardBackward { data, loss, forward_only } => {
                (forward_only, &loss.name, loss.config.len(), data.len()).hash(&mut hasher);
                for (name, setting) in &loss.config {
                    (name, setting.to_bits()).hash(&mut hasher);
                }
                data.iter().for_each(|datum| hash_datum(datum, &mut hasher));
            }
            TrainOp::OptimStep(AdamParams { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm }) => {
                [learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm].map(|x| x.to_bits()).hash(&mut hasher);
            }
            // What is to be written beside it has the time at which it was asked for.
            TrainOp::SaveState(SaveTarget { root: _, dir: _, name, overwrite, metadata: _, recipients })
            | TrainOp::SaveSampler(SaveTarget { root: _, dir: _, name, overwrite, metadata: _, recipients }) => {
                (name, overwrite, recipients).hash(&mut hasher);
            }
            // Clients take another name each time that they send it.
            TrainOp::Snapshot { sampler_id: _, replace } => replace.hash(&mut hasher),
            TrainOp::LoadState { source, with_optimizer } => (&source.name, with_optimizer).hash(&mut hasher),
            TrainOp::Refused(_) => return None,
        }
        Some(hasher.finish())
    }
}

impl SampleRequest {
    /// As [`TrainOp::fingerprint`], of all that is there but its seed, which may have been drawn for it.
    pub fn fingerprint(&self) -> u64 {
        let SampleRequest {
            prompt,
            images,
            num_samples,
            max_tokens,
            seed: _,
            stop,
            temperature,
            top_k,
            top_p,
            prompt_logprobs,
            prompt_logprobs_last_n,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
        } = self;
        let mut hasher = DefaultHasher::new();
        (prompt, num_samples, max_tokens, stop, temperature.to_bits(), top_k, top_p.to_bits()).hash(&mut hasher);
        (prompt_logprobs, prompt_logprobs_last_n, topk_prompt_logprobs, topk_sample_logprobs).hash(&mut hasher);
        (target_prompt_logprobs, prompt_alt_tokens_k).hash(&mut hasher);
        hash_images(images, &mut hasher);
        hasher.finish()
    }
}

fn hash_images(images: &[Image], hasher: &mut impl Hasher) {
    images.len().hash(hasher);
    for image in images {
        (image.at, &image.file, image.expected_tokens).hash(hasher);
    }
}

fn hash_datum(datum: &Datum, hasher: &mut impl Hasher) {
    datum.tokens.hash(hasher);
    hash_images(&datum.images, hasher);
    datum.loss_inputs.len().hash(hasher);
    for (name, input) in &datum.loss_inputs {
        (name, &input.shape).hash(hasher);
        match &input.values {
            LossValues::F32(values) => values.iter().for_each(|value| hasher.write_u32(value.to_bits())),
            LossValues::I64(values) => values.hash(hasher),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Cells, CheckpointSource, LossInput, LossSpec, PromptTargets, Stop};

    fn pass(tokens: &[i64], weights: &[f32]) -> TrainOp {
        let input = LossInput { shape: vec![weights.len()], values: LossValues::F32(weights.to_vec()) };
        let datum = Datum { tokens: tokens.to_vec(), loss_inputs: [("weights".into(), input)].into(), ..Default::default() };
        let loss = LossSpec { name: "cross_entropy".into(), config: Default::default() };
        TrainOp::ForwardBackward { data: vec![datum], loss, forward_only: false }
    }

    fn save(name: &str, save_id: u64) -> SaveTarget {
        let metadata = serde_json::json!({ "save_id": save_id });
        SaveTarget { root: "".into(), dir: name.into(), name: name.into(), overwrite: false, metadata, recipients: vec![] }
    }

    #[test]
    fn operations_that_ask_for_different_things_differ_and_one_sent_again_does_not() {
        let load = |name: &str| {
            let source = CheckpointSource { dir: name.into(), name: name.into(), save_id: None };
            TrainOp::LoadState { source, with_optimizer: true }
        };
        let forward = |op| match op {
            TrainOp::ForwardBackward { data, loss, .. } => TrainOp::ForwardBackward { data, loss, forward_only: true },
            other => other,
        };
        let all = || {
            [
                pass(&[1, 2], &[1.0, 1.0]),
                pass(&[1, 3], &[1.0, 1.0]),
                pass(&[1, 2], &[1.0, 0.5]),
                forward(pass(&[1, 2], &[1.0, 1.0])),
                TrainOp::OptimStep(AdamParams::default()),
                TrainOp::OptimStep(AdamParams { learning_rate: 0.5, ..Default::default() }),
                TrainOp::SaveState(save("a", 1)),
                TrainOp::SaveState(save("b", 1)),
                TrainOp::SaveState(SaveTarget { overwrite: true, ..save("a", 1) }),
                TrainOp::SaveState(SaveTarget { recipients: vec!["age1".into()], ..save("a", 1) }),
                TrainOp::SaveSampler(save("a", 1)),
                TrainOp::Snapshot { sampler_id: "a".into(), replace: false },
                TrainOp::Snapshot { sampler_id: "a".into(), replace: true },
                load("a"),
                load("b"),
            ]
        };
        for (i, a) in all().iter().enumerate() {
            for (j, b) in all().iter().enumerate() {
                assert_eq!(a.fingerprint() == b.fingerprint(), i == j, "{a:?} and {b:?}");
            }
        }
        assert_eq!(TrainOp::SaveState(save("a", 1)).fingerprint(), TrainOp::SaveState(save("a", 2)).fingerprint());
        let snapshot = |name: &str| TrainOp::Snapshot { sampler_id: name.into(), replace: false };
        assert_eq!(snapshot("a").fingerprint(), snapshot("b").fingerprint());
        assert_eq!(TrainOp::Refused("no".into()).fingerprint(), None);
    }

    #[test]
    fn samples_that_ask_for_different_things_differ_and_one_with_another_seed_does_not() {
        let plain = || SampleRequest { seed: 1, ..SampleRequest::of(vec![1, 2]) };
        let with_image = |at: usize, file: &[u8], expected_tokens: Option<i64>| SampleRequest {
            images: vec![Image { at, file: file.into(), expected_tokens }],
            ..plain()
        };
        let targets = PromptTargets { shape: [1, 1], cells: Cells::All, ids: vec![7] };
        let all = [
            plain(),
            SampleRequest { prompt: vec![1, 3], ..plain() },
            SampleRequest { num_samples: 2, ..plain() },
            SampleRequest { max_tokens: Some(0), ..plain() },
            SampleRequest { stop: Stop::Tokens(vec![]), ..plain() },
            SampleRequest { temperature: 0.5, ..plain() },
            SampleRequest { top_k: Some(1), ..plain() },
            SampleRequest { top_p: 0.5, ..plain() },
            SampleRequest { prompt_logprobs: true, ..plain() },
            SampleRequest { prompt_logprobs_last_n: Some(0), ..plain() },
            SampleRequest { topk_prompt_logprobs: 1, ..plain() },
            SampleRequest { topk_sample_logprobs: 1, ..plain() },
            SampleRequest { target_prompt_logprobs: Some(targets), ..plain() },
            SampleRequest { prompt_alt_tokens_k: 1, ..plain() },
            with_image(0, b"picture", None),
            with_image(1, b"picture", None),
            with_image(0, b"another", None),
            with_image(0, b"picture", Some(4)),
        ];
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                assert_eq!(a.fingerprint() == b.fingerprint(), i == j, "{a:?} and {b:?}");
            }
        }
        assert_eq!(SampleRequest { seed: 2, ..plain() }.fingerprint(), plain().fingerprint());
    }
}
