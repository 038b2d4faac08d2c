//! Checks training examples against the model, and turns them into what a pass computes. Nothing of a request that fails here
//! reaches the model, so that one bad request fails alone.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::api::{Datum, LossInput, LossSpec, LossValues};
use crate::limits::{DATUMS_MAX, REQUEST_TARGETS_MAX, REQUEST_TOKENS_MAX, TARGETS_PER_TOKEN_MAX};
use crate::losses::{DatumLoss, Loss, LossInputs, check_clip};
use crate::pictures::{self, Eyes, Measured, Picture};

/// Tokens that repeat those of the example before them, and together take the time of another where nothing goes back: of their keys and values, and of their place in the results.
const COPIES_PER_TOKEN: usize = 32;

/// What a request is checked against.
#[derive(Clone, Copy)]
pub(crate) struct ModelLimits<'e> {
    pub(crate) vocab_size: usize,
    pub(crate) max_example_tokens: usize,
    /// `None` for a model that reads text alone.
    pub(crate) eyes: Option<&'e dyn Eyes>,
}

/// A checked training example.
#[derive(Debug)]
pub(crate) struct PreparedDatum {
    /// `[tokens]`.
    pub(crate) tokens: Vec<u32>,
    /// Pictures among them, in order.
    pub(crate) pictures: Vec<Picture>,
    /// `[tokens, targets_per_token]`.
    pub(crate) targets: Vec<u32>,
    pub(crate) targets_per_token: usize,
    /// Shape of `target_tokens` as the request gave it, and of the outputs.
    pub(crate) shape: Vec<usize>,
    pub(crate) loss: DatumLoss,
    /// Tokens at its beginning that are those of the example before it in the request, pictures included.
    pub(crate) repeated: usize,
}

/// What an example takes of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Of memory.
    pub(crate) tokens: usize,
    /// Of time, in tokens that are computed whole.
    pub(crate) work: usize,
}

impl PreparedDatum {
    /// What it takes of a pass. `follows`: that has the example before it in its request as well. On the way back every token is computed, in whatever company.
    pub(crate) fn extent(&self, follows: bool, backward: bool) -> Extent {
        let tokens = self.tokens.len();
        let repeated = if follows && !backward { self.repeated } else { 0 };
        Extent { tokens, work: tokens - repeated + repeated.div_ceil(COPIES_PER_TOKEN) }
    }

    /// Bytes that it holds while it waits, and those of its outputs and their encoding, which follow.
    pub(crate) fn held_bytes(&self) -> u64 {
        let inputs = match &self.loss.inputs {
            LossInputs::Weights(weights) => weights.len(),
            LossInputs::Policy { advantages, clip, ratio_mask, .. } => {
                let per_target = 2 + 2 * usize::from(clip.is_some()) + usize::from(ratio_mask.is_some());
                advantages.len() * per_target
            }
        };
        let outputs = 4 * self.targets.len();
        let lists = 256 + 4 * (self.tokens.len() + self.targets.len() + inputs + outputs);
        lists as u64 + pictures::file_bytes(&self.pictures)
    }

    /// Lets go of what it holds: it has been computed.
    pub(crate) fn clear(&mut self) {
        self.tokens = Vec::new();
        self.pictures = Vec::new();
        self.targets = Vec::new();
        self.loss.inputs = LossInputs::Weights(Vec::new());
    }
}

/// Checks the data of a `forward_backward`.
///
/// # Errors
/// A message for the user that names the example and the value that is wrong.
pub(crate) fn prepare(data: Vec<Datum>, spec: &LossSpec, limits: ModelLimits<'_>) -> Result<Vec<PreparedDatum>, String> {
    let loss = Loss::parse(&spec.name, &spec.config)?;
    if data.is_empty() {
        return Err("data is empty".into());
    }
    if data.len() > DATUMS_MAX {
        return Err(format!("{} examples are above the limit of {DATUMS_MAX} in a request", data.len()));
    }
    let total: usize = data.iter().map(|d| d.tokens.len()).sum();
    if total > REQUEST_TOKENS_MAX {
        return Err(format!("{total} tokens are above the limit of {REQUEST_TOKENS_MAX} in a request"));
    }
    let mut prepared: Vec<PreparedDatum> = Vec::with_capacity(data.len());
    let mut targets = 0;
    // What has been prepared is let go at once: no request is in memory twice.
    for (index, datum) in data.into_iter().enumerate() {
        let mut datum = prepare_datum(&datum, loss, limits).map_err(|e| format!("datum {index}: {e}"))?;
        datum.repeated = prepared.last().map_or(0, |before| common_beginning(before, &datum));
        targets += datum.targets.len();
        if targets > REQUEST_TARGETS_MAX {
            return Err(format!("datum {index}: the request has more than {REQUEST_TARGETS_MAX} targets"));
        }
        prepared.push(datum);
    }
    Ok(prepared)
}

/// Tokens with which both begin: of a picture they are the same where it is the same one, in the same place.
fn common_beginning(one: &PreparedDatum, other: &PreparedDatum) -> usize {
    let same = one.tokens.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count();
    let place = |picture: &Picture| (picture.first, picture.id);
    let (mut ours, mut theirs) = (one.pictures.iter(), other.pictures.iter());
    let first = loop {
        match (ours.next(), theirs.next()) {
            (None, None) => break None,
            (a, b) if a.map(place) == b.map(place) => {}
            (a, b) => break a.into_iter().chain(b).map(|picture| picture.first).min(),
        }
    };
    first.map_or(same, |first| first.min(same))
}

/// Checks token ids against the vocabulary.
///
/// # Errors
/// A message that names the first id outside of it.
pub(crate) fn check_tokens(what: &str, tokens: &[i64], vocab_size: usize) -> Result<Vec<u32>, String> {
    let check = |(i, &t): (usize, &i64)| match u32::try_from(t) {
        Ok(id) if (id as usize) < vocab_size => Ok(id),
        _ => Err(format!("{what}[{i}] is {t}, outside the vocabulary of {vocab_size} tokens")),
    };
    tokens.iter().enumerate().map(check).collect()
}

fn prepare_datum(datum: &Datum, loss: Loss, limits: ModelLimits<'_>) -> Result<PreparedDatum, String> {
    let measured = Measured::new(&datum.tokens, &datum.images, limits.eyes)?;
    let n = measured.tokens();
    if n == 0 {
        return Err("it has no tokens".into());
    }
    if n > limits.max_example_tokens {
        return Err(format!(
            "{n} tokens are above {}, the longest training example that the model's context and the server's memory allow",
            limits.max_example_tokens
        ));
    }
    let (tokens, pictures) = measured.place("tokens", limits.vocab_size, limits.eyes)?;
    let (shape, targets) = prepare_targets(datum, n, limits.vocab_size)?;
    let targets_per_token = targets.len() / n;
    let inputs = match loss {
        // As the field's services do. Of several targets for a token, and of those at a picture, it has to be said which count.
        Loss::CrossEntropy { .. } if !datum.loss_inputs.contains_key("weights") && shape.len() == 1 && pictures.is_empty() => {
            LossInputs::Weights(vec![1.0; n])
        }
        Loss::CrossEntropy { .. } => LossInputs::Weights(numbers(datum, "weights", &shape)?),
        _ => policy_inputs(datum, loss, &shape)?,
    };
    let loss = DatumLoss { loss, inputs, log_sequence_ratio: OnceLock::new() };
    Ok(PreparedDatum { tokens, pictures, targets, targets_per_token, shape, loss, repeated: 0 })
}

fn prepare_targets(datum: &Datum, n: usize, vocab_size: usize) -> Result<(Vec<usize>, Vec<u32>), String> {
    let input = required(&datum.loss_inputs, "target_tokens")?;
    let per_token = match input.shape[..] {
        [rows] if rows == n => 1,
        [rows, k] if rows == n => k,
        _ => {
            return Err(format!("target_tokens has shape {:?}, not [{n}] or [{n}, k], for {n} input tokens", input.shape));
        }
    };
    if per_token == 0 || per_token > TARGETS_PER_TOKEN_MAX {
        return Err(format!("{per_token} targets per token are not between 1 and {TARGETS_PER_TOKEN_MAX}"));
    }
    let LossValues::I64(ids) = &input.values else {
        return Err("target_tokens holds real numbers, not token ids".into());
    };
    check_count("target_tokens", ids.len(), n * per_token, &input.shape)?;
    Ok((input.shape.clone(), check_tokens("target_tokens", ids, vocab_size)?))
}

fn policy_inputs(datum: &Datum, loss: Loss, shape: &[usize]) -> Result<LossInputs, String> {
    if shape.len() != 1 {
        return Err(format!("target_tokens has shape {shape:?}; policy losses take one target per token"));
    }
    // Inputs that a loss does not read are passed over.
    let given = |name: &str| loss.clips() && datum.loss_inputs.contains_key(name);
    let (low_name, high_name) = ("clip_low_threshold", "clip_high_threshold");
    let clip = match (given(low_name), given(high_name)) {
        (false, false) => None,
        (true, true) => {
            let (low, high) = (numbers(datum, low_name, shape)?, numbers(datum, high_name, shape)?);
            for (i, (&low, &high)) in low.iter().zip(&high).enumerate() {
                check_clip(low as f64, high as f64).map_err(|e| format!("at token {i}: {e}"))?;
            }
            Some((low, high))
        }
        _ => return Err(format!("of {low_name} and {high_name} per token only one is given")),
    };
    let ratio_mask = match loss.needs_sequence_ratio() {
        true => Some(ratio_mask(datum, shape)?),
        false => None,
    };
    Ok(LossInputs::Policy {
        advantages: numbers(datum, "advantages", shape)?,
        sampling_logprobs: numbers(datum, "logprobs", shape)?,
        clip,
        ratio_mask,
    })
}

fn ratio_mask(datum: &Datum, shape: &[usize]) -> Result<Vec<f32>, String> {
    let mask = numbers(datum, "sequence_ratio_mask", shape)?;
    if let Some((i, &m)) = mask.iter().enumerate().find(|&(_, &m)| m < 0.0) {
        return Err(format!("sequence_ratio_mask[{i}] is {m}, below 0"));
    }
    if mask.iter().all(|&m| m == 0.0) {
        return Err("sequence_ratio_mask selects no token".into());
    }
    Ok(mask)
}

fn required<'a>(inputs: &'a BTreeMap<String, LossInput>, name: &str) -> Result<&'a LossInput, String> {
    inputs.get(name).ok_or_else(|| {
        let given: Vec<&str> = inputs.keys().map(String::as_str).collect();
        format!("the loss needs {name}; the inputs given are [{}]", given.join(", "))
    })
}

/// A real-valued input of the shape of `target_tokens`.
fn numbers(datum: &Datum, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
    let input = required(&datum.loss_inputs, name)?;
    if input.shape != shape {
        return Err(format!("{name} has shape {:?}, target_tokens has {shape:?}", input.shape));
    }
    let values = match &input.values {
        LossValues::F32(values) => values.clone(),
        // Masks and rewards often come as whole numbers.
        LossValues::I64(values) => values.iter().map(|&v| v as f32).collect(),
    };
    check_count(name, values.len(), shape.iter().product(), shape)?;
    if let Some((i, v)) = values.iter().enumerate().find(|(_, v)| !v.is_finite()) {
        return Err(format!("{name}[{i}] is {v}, which is not a finite number"));
    }
    Ok(values)
}

fn check_count(name: &str, actual: usize, expected: usize, shape: &[usize]) -> Result<(), String> {
    if actual != expected {
        return Err(format!("{name} has {actual} values for shape {shape:?}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use strata_model::vision::Grid;

    use super::*;

    const LIMITS: ModelLimits<'_> = ModelLimits { vocab_size: 10, max_example_tokens: 4, eyes: None };

    fn ids(values: &[i64], shape: &[usize]) -> LossInput {
        LossInput { shape: shape.to_vec(), values: LossValues::I64(values.to_vec()) }
    }

    fn reals(values: &[f32], shape: &[usize]) -> LossInput {
        LossInput { shape: shape.to_vec(), values: LossValues::F32(values.to_vec()) }
    }

    fn datum(tokens: &[i64], inputs: Vec<(&str, LossInput)>) -> Datum {
        let loss_inputs = inputs.into_iter().map(|(n, v)| (n.to_string(), v)).collect();
        Datum { tokens: tokens.to_vec(), images: Vec::new(), loss_inputs }
    }

    fn spec(name: &str) -> LossSpec {
        LossSpec { name: name.into(), config: BTreeMap::new() }
    }

    /// The message with which `bad` is refused behind a good example.
    fn refusal(loss: &str, bad: Datum) -> String {
        let good = [("target_tokens", ids(&[1], &[1])), ("weights", reals(&[1.0], &[1]))];
        let policy = [("advantages", reals(&[1.0], &[1])), ("logprobs", reals(&[1.0], &[1]))];
        let mask = ("sequence_ratio_mask", reals(&[1.0], &[1]));
        let inputs = good.into_iter().chain(policy).chain([mask]).collect();
        let error = prepare(vec![datum(&[1], inputs), bad], &spec(loss), LIMITS).unwrap_err();
        assert!(error.starts_with("datum 1: "), "{error}");
        error
    }

    #[test]
    fn one_and_several_targets_per_token_are_taken() {
        let one = datum(&[1, 2], vec![("target_tokens", ids(&[2, 3], &[2])), ("weights", ids(&[1, 0], &[2]))]);
        let two = datum(&[1, 2], vec![("target_tokens", ids(&[2, 3, 4, 5], &[2, 2])), ("weights", reals(&[0.5; 4], &[2, 2]))]);
        let prepared = prepare(vec![one, two], &spec("cross_entropy"), LIMITS).unwrap();
        assert_eq!((prepared[0].targets_per_token, prepared[1].targets_per_token), (1, 2));
        assert_eq!(prepared[1].shape, [2, 2]);
    }

    #[test]
    fn without_weights_every_target_counts_once_and_of_several_it_has_to_be_said() {
        let plain = datum(&[1, 2], vec![("target_tokens", ids(&[2, 3], &[2]))]);
        let prepared = prepare(vec![plain], &spec("cross_entropy"), LIMITS).unwrap();
        assert!(matches!(&prepared[0].loss.inputs, LossInputs::Weights(weights) if weights == &[1.0, 1.0]));
        let wide = datum(&[1], vec![("target_tokens", ids(&[1, 2], &[1, 2]))]);
        assert!(refusal("cross_entropy", wide).contains("needs weights"));
    }

    #[test]
    fn tokens_that_repeat_the_example_before_are_known_and_take_less_of_a_forward_pass() {
        let example = |tokens: &[i64]| {
            let n = tokens.len();
            datum(tokens, vec![("target_tokens", ids(&vec![1; n], &[n])), ("weights", reals(&vec![1.0; n], &[n]))])
        };
        let data = [&[1, 2, 3, 4][..], &[1, 2, 3, 5], &[1, 2, 3, 5], &[2, 2], &[2, 2, 7]].map(example).to_vec();
        let prepared = prepare(data, &spec("cross_entropy"), LIMITS).unwrap();
        assert_eq!(prepared.iter().map(|datum| datum.repeated).collect::<Vec<_>>(), [0, 3, 4, 0, 2]);
        let work = |follows, backward| prepared[1].extent(follows, backward).work;
        assert_eq!((work(true, false), work(true, true), work(false, false)), (2, 4, 4), "three of four are as good as one");
        assert!(prepared.iter().all(|datum| datum.extent(true, false).tokens == datum.tokens.len()));
    }

    #[test]
    fn beginnings_with_another_picture_are_the_same_up_to_it() {
        let example = |pictures: &[(usize, u8)]| PreparedDatum {
            tokens: vec![1; 9],
            pictures: pictures
                .iter()
                .map(|&(first, id)| Picture {
                    first,
                    id: [id; 32],
                    grid: Grid { time: 1, height: 1, width: 2 },
                    file: [].into(),
                })
                .collect(),
            targets: vec![1; 9],
            targets_per_token: 1,
            shape: vec![9],
            loss: DatumLoss {
                loss: Loss::parse("cross_entropy", &BTreeMap::new()).unwrap(),
                inputs: LossInputs::Weights(vec![1.0; 9]),
                log_sequence_ratio: OnceLock::new(),
            },
            repeated: 0,
        };
        let shared = |one: &[(usize, u8)], other: &[(usize, u8)]| common_beginning(&example(one), &example(other));
        assert_eq!(shared(&[(1, 1), (5, 2)], &[(1, 1), (5, 2)]), 9);
        assert_eq!(shared(&[(1, 1), (5, 2)], &[(1, 1), (5, 3)]), 5);
        assert_eq!(shared(&[(1, 1), (5, 2)], &[(1, 1), (4, 2)]), 4);
        assert_eq!(shared(&[(1, 1)], &[(1, 1), (5, 3)]), 5);
        assert_eq!(shared(&[(2, 1)], &[]), 2);
    }

    #[test]
    fn every_mistake_is_refused_with_its_place_and_value() {
        let ce = |tokens: &[i64], targets, weights| {
            refusal("cross_entropy", datum(tokens, vec![("target_tokens", targets), ("weights", weights)]))
        };
        assert!(ce(&[], ids(&[], &[0]), reals(&[], &[0])).contains("no tokens"));
        assert!(ce(&[10], ids(&[1], &[1]), reals(&[1.0], &[1])).contains("tokens[0] is 10"));
        assert!(ce(&[-1], ids(&[1], &[1]), reals(&[1.0], &[1])).contains("tokens[0] is -1"));
        assert!(ce(&[1; 5], ids(&[1; 5], &[5]), reals(&[1.0; 5], &[5])).contains("5 tokens are above 4,"));
        assert!(ce(&[1, 2], ids(&[1], &[1]), reals(&[1.0], &[1])).contains("shape [1]"));
        assert!(ce(&[1], ids(&[10], &[1]), reals(&[1.0], &[1])).contains("target_tokens[0] is 10"));
        assert!(ce(&[1], reals(&[1.0], &[1]), reals(&[1.0], &[1])).contains("not token ids"));
        assert!(ce(&[1], ids(&[1, 2], &[1]), reals(&[1.0], &[1])).contains("2 values for shape [1]"));
        assert!(ce(&[1], ids(&[1], &[1]), reals(&[1.0, 1.0], &[2])).contains("weights has shape [2]"));
        assert!(ce(&[1], ids(&[1], &[1]), reals(&[f32::NAN], &[1])).contains("weights[0] is NaN"));
        assert!(ce(&[1], ids(&[], &[1, 0]), reals(&[], &[1, 0])).contains("0 targets"));
        assert!(refusal("cross_entropy", datum(&[1], vec![])).contains("needs target_tokens"));
        assert!(refusal("ppo", datum(&[1], vec![("target_tokens", ids(&[1], &[1]))])).contains("needs advantages"));
        let wide = datum(&[1], vec![("target_tokens", ids(&[1, 2], &[1, 2]))]);
        assert!(refusal("ppo", wide).contains("one target per token"));
        let inputs = vec![
            ("target_tokens", ids(&[1], &[1])),
            ("advantages", reals(&[1.0], &[1])),
            ("logprobs", reals(&[1.0], &[1])),
            ("sequence_ratio_mask", reals(&[0.0], &[1])),
        ];
        assert!(refusal("gspo", datum(&[1], inputs)).contains("selects no token"));
        let bounds = |names: &[&'static str]| {
            let of_all = ["advantages", "logprobs", "sequence_ratio_mask"].map(|name| (name, reals(&[1.0], &[1])));
            let bounds = names.iter().map(|name| (*name, reals(&[f32::NAN], &[1])));
            let inputs = [("target_tokens", ids(&[1], &[1]))].into_iter().chain(of_all).chain(bounds).collect();
            datum(&[1], inputs)
        };
        let (low, high) = ("clip_low_threshold", "clip_high_threshold");
        for loss in ["ppo", "cispo", "gspo"] {
            assert!(refusal(loss, bounds(&[low])).contains("only one is given"), "{loss}");
            assert!(refusal(loss, bounds(&[low, high])).contains("clip_low_threshold[0] is NaN"), "{loss}");
        }
        for loss in ["importance_sampling", "dro", "stable_reinforce"] {
            assert!(prepare(vec![bounds(&[low]), bounds(&[low, high])], &spec(loss), LIMITS).is_ok(), "{loss}");
        }
    }

    #[test]
    fn empty_data_and_unknown_losses_are_refused() {
        assert_eq!(prepare(vec![], &spec("ppo"), LIMITS).unwrap_err(), "data is empty");
        assert!(prepare(vec![], &spec("nonsense"), LIMITS).unwrap_err().contains("nonsense"));
    }
}
