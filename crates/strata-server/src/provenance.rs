//! Where the tokens of an example come from, and with it the policy that sampled them.
//!
//! `stable_reinforce` corrects for the policy that its tokens were sampled with. The spans of an example say which sampled sequence each of its
//! positions is of; what was recorded of those sequences becomes the `logprobs` of the example. The order of precedence:
//!
//! - A recorded log-probability wins over one that the request brings: it is the sampler's own number, which no code of the client's has touched.
//! - Where nothing is recorded (or no longer, or it is somebody else's), the `logprobs` of the request count: the client had them with the sample.
//! - Where there is neither, the example is refused.
//!
//! Spans that contradict the example or the record are refused in either case. Targets among the tokens of a prompt are not compared: recipes fill
//! them with zeros, and their advantages are zero.

use std::collections::HashMap;
use std::sync::Arc;

use strata_engine::STABLE_REINFORCE;
use strata_engine::api::{Datum, LossInput, LossValues, TrainOp};

use crate::names::shown;
use crate::records::{Records, Sampled};
use crate::wire::budget::Budget;

/// What a run of tokens is of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A part of its prompt.
    Prompt,
    /// Sampled.
    Sampled,
}

/// A run of positions of an example: tokens `[offset, offset + length)` of a sequence's prompt or of what was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Which of the two.
    pub origin: Origin,
    /// The sequence.
    pub sequence_id: String,
    /// The first of its tokens.
    pub offset: usize,
    /// Their number.
    pub length: usize,
}

/// The spans of an example, in the order of its positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spans {
    /// Of its input.
    pub model_input: Vec<Span>,
    /// Of its targets.
    pub loss_fn_inputs: Vec<Span>,
}

/// Where the log-probabilities came from that sampled targets were weighed with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Targets whose log-probability was recorded.
    pub recorded: usize,
    /// Targets whose log-probability the request brought.
    pub passed: usize,
}

const MODEL_INPUT: &str = "model_input_spans";
const LOSS_FN_INPUT: &str = "loss_fn_input_spans";

/// Whether spans count for an operation.
pub fn counts_for(op: &TrainOp) -> bool {
    matches!(op, TrainOp::ForwardBackward { loss, .. } if loss.name == STABLE_REINFORCE)
}

/// Gives the examples of an operation that spans count for the log-probabilities that were recorded for an owner. `spans` has those of each example, or
/// nothing where the request can have none.
///
/// # Errors
/// If an example has neither recorded nor other log-probabilities, or spans that contradict it or what is recorded.
pub fn resolve(op: &mut TrainOp, spans: &[Spans], records: &Records, owner: &str, budget: &Budget) -> Result<Sources, String> {
    let mut sources = Sources::default();
    let TrainOp::ForwardBackward { data, .. } = op else { return Ok(sources) };
    let (none, mut known) = (Spans::default(), Known { records, owner, found: HashMap::new() });
    for (i, datum) in data.iter_mut().enumerate() {
        let spans = spans.get(i).unwrap_or(&none);
        let of_datum = resolve_datum(datum, spans, &mut known, budget).map_err(|reason| format!("datum {i}: {reason}"))?;
        sources.recorded += of_datum.recorded;
        sources.passed += of_datum.passed;
    }
    Ok(sources)
}

/// What is known of sequences, asked for once each.
struct Known<'a> {
    records: &'a Records,
    owner: &'a str,
    found: HashMap<&'a str, Option<(Arc<Sampled>, usize)>>,
}

impl<'a> Known<'a> {
    fn find(&mut self, sequence_id: &'a str) -> Option<(Arc<Sampled>, usize)> {
        self.found.entry(sequence_id).or_insert_with(|| self.records.find(self.owner, sequence_id)).clone()
    }
}

fn resolve_datum<'a>(datum: &mut Datum, spans: &'a Spans, known: &mut Known<'a>, budget: &Budget) -> Result<Sources, String> {
    // What is wrong with the tensors themselves, the engine says.
    let Some(LossInput { shape, values: LossValues::I64(targets) }) = datum.loss_inputs.get("target_tokens") else {
        return Ok(Sources::default());
    };
    let &[n] = &shape[..] else { return Ok(Sources::default()) };
    let passed = match datum.loss_inputs.get("logprobs") {
        None => None,
        Some(input) => match finite_numbers(input, n) {
            Some(passed) => Some(passed),
            None => return Ok(Sources::default()),
        },
    };
    if spans.model_input.is_empty() && spans.loss_fn_inputs.is_empty() {
        if passed.is_none() {
            return Err(format!(
                "{STABLE_REINFORCE} needs to know what its targets were sampled with: the input logprobs, or provenance spans of sequences that \
                 were sampled with record_stability_info; it has neither"
            ));
        }
        return Ok(Sources { recorded: 0, passed: n });
    }
    let positions = Positions::of(datum)?;
    tile(MODEL_INPUT, &spans.model_input, "the input", positions.len())?;
    tile(LOSS_FN_INPUT, &spans.loss_fn_inputs, "target_tokens", n)?;
    for (name, list) in [(MODEL_INPUT, &spans.model_input), (LOSS_FN_INPUT, &spans.loss_fn_inputs)] {
        refuse_overlaps(name, list)?;
        list.iter().enumerate().try_for_each(|(i, span)| within(name, i, span, known.find(&span.sequence_id).as_ref()))?;
    }
    let input_token = |position| positions.token(position).ok_or_else(|| "a picture".to_owned());
    compare(MODEL_INPUT, &spans.model_input, known, "the input", input_token)?;
    compare(LOSS_FN_INPUT, &spans.loss_fn_inputs, known, "target_tokens", |position| Ok(targets[position]))?;
    if let Some(advantages) = datum.loss_inputs.get("advantages").and_then(|input| finite_numbers(input, n)) {
        refuse_advantages_of_prompts(&spans.loss_fn_inputs, &advantages)?;
    }
    budget.take_values::<f32>(n)?;
    let (logprobs, sources) = behaviour(&spans.loss_fn_inputs, passed.as_deref(), n, known)?;
    let input = LossInput { shape: vec![n], values: LossValues::F32(logprobs) };
    datum.loss_inputs.insert("logprobs".into(), input);
    Ok(sources)
}

/// The `n` numbers of an input, if that is what it holds.
fn finite_numbers(input: &LossInput, n: usize) -> Option<Vec<f32>> {
    let numbers: Vec<f32> = match &input.values {
        LossValues::F32(numbers) => numbers.clone(),
        LossValues::I64(numbers) => numbers.iter().map(|&number| number as f32).collect(),
    };
    let is_whole = input.shape == [n] && numbers.len() == n && numbers.iter().all(|number| number.is_finite());
    is_whole.then_some(numbers)
}

/// The positions of an input: tokens, and pictures among them.
struct Positions<'d> {
    tokens: &'d [i64],
    /// First position and number of positions of each picture.
    pictures: Vec<(usize, usize)>,
    pictures_len: usize,
}

impl<'d> Positions<'d> {
    fn of(datum: &'d Datum) -> Result<Self, String> {
        let (mut pictures, mut pictures_len) = (Vec::with_capacity(datum.images.len()), 0usize);
        for (i, image) in datum.images.iter().enumerate() {
            let len = image.expected_tokens.and_then(|tokens| usize::try_from(tokens).ok());
            let len = len.ok_or_else(|| format!("image {i} of the input has no expected_tokens, by which spans count"))?;
            pictures.push((image.at.saturating_add(pictures_len), len));
            pictures_len = pictures_len.saturating_add(len);
        }
        Ok(Positions { tokens: &datum.tokens, pictures, pictures_len })
    }

    fn len(&self) -> usize {
        self.tokens.len().saturating_add(self.pictures_len)
    }

    /// The token at a position, if it is none of a picture.
    fn token(&self, position: usize) -> Option<i64> {
        let before = self.pictures.partition_point(|&(first, _)| first <= position);
        match before.checked_sub(1).map(|last| self.pictures[last]) {
            Some((first, len)) if position - first < len => None,
            _ => {
                let skipped: usize = self.pictures[..before].iter().map(|&(_, len)| len).sum();
                self.tokens.get(position - skipped).copied()
            }
        }
    }
}

fn tile(name: &str, spans: &[Span], what: &str, n: usize) -> Result<(), String> {
    let covered = spans.iter().try_fold(0usize, |covered, span| covered.checked_add(span.length));
    match covered {
        Some(covered) if covered == n => Ok(()),
        Some(covered) => Err(format!("{name} cover {covered} positions, and {what} has {n}; they have to tile it")),
        None => Err(format!("{name} cover more positions than there are numbers for, and {what} has {n}")),
    }
}

/// A token was sampled once: two runs that share it are a mistake.
fn refuse_overlaps(name: &str, spans: &[Span]) -> Result<(), String> {
    let sampled = spans.iter().enumerate().filter(|(_, span)| span.origin == Origin::Sampled && span.length > 0);
    let mut runs: Vec<(&str, usize, usize, usize)> =
        sampled.map(|(i, span)| (&*span.sequence_id, span.offset, span.length, i)).collect();
    runs.sort_unstable();
    for pair in runs.windows(2) {
        let [(id, offset, length, i), (next_id, next_offset, _, next_i)] = pair else { continue };
        if id == next_id && next_offset - offset < *length {
            return Err(format!(
                "{name}[{i}] and {name}[{next_i}] overlap: both have sampled token {next_offset} of sequence {:?}",
                shown(id)
            ));
        }
    }
    Ok(())
}

fn within(name: &str, i: usize, span: &Span, known: Option<&(Arc<Sampled>, usize)>) -> Result<(), String> {
    let Span { origin, offset, length, .. } = span;
    let (what, len) = match (origin, known) {
        (Origin::Prompt, Some((sampled, _))) => ("a prompt of", sampled.prompt_tokens),
        (Origin::Sampled, Some((sampled, index))) => ("sampled", Some(sampled.sequences[*index].tokens.len())),
        (_, None) => ("tokens beyond", Some(usize::MAX)),
    };
    match (offset.checked_add(*length), len) {
        (Some(end), Some(len)) if end > len => Err(format!(
            "{name}[{i}] has tokens {offset} to {end} of sequence {:?}, which has {what} {len} tokens",
            shown(&span.sequence_id)
        )),
        (Some(_), _) => Ok(()),
        (None, _) => Err(format!("{name}[{i}] has {length} tokens from {offset} on, which is beyond any sequence")),
    }
}

/// Refuses tokens that are not those that were sampled. `token` is what is at a position, or says in words what is.
fn compare<'a>(
    name: &str,
    spans: &'a [Span],
    known: &mut Known<'a>,
    what: &str,
    token: impl Fn(usize) -> Result<i64, String>,
) -> Result<(), String> {
    let mut first = 0;
    for (i, span) in spans.iter().enumerate() {
        if span.origin == Origin::Sampled
            && let Some((sampled, index)) = known.find(&span.sequence_id)
        {
            let tokens = &sampled.sequences[index].tokens[span.offset..span.offset + span.length];
            for (k, &expected) in tokens.iter().enumerate() {
                let found = token(first + k);
                if found != Ok(i64::from(expected)) {
                    let found = found.map_or_else(|words| words, |token| token.to_string());
                    return Err(format!(
                        "{what}[{}] is {found}, and {name}[{i}] says that it is sampled token {} of sequence {:?}, which is {expected}",
                        first + k,
                        span.offset + k,
                        shown(&span.sequence_id)
                    ));
                }
            }
        }
        first += span.length;
    }
    Ok(())
}

/// No policy has sampled the tokens of a prompt.
fn refuse_advantages_of_prompts(spans: &[Span], advantages: &[f32]) -> Result<(), String> {
    let mut first = 0;
    for (i, span) in spans.iter().enumerate() {
        let own = &advantages[first..first + span.length];
        if span.origin == Origin::Prompt
            && let Some(k) = own.iter().position(|&advantage| advantage != 0.0)
        {
            return Err(format!(
                "advantages[{}] is {}, at a token that {LOSS_FN_INPUT}[{i}] says is of a prompt; only sampled tokens may have one",
                first + k,
                own[k]
            ));
        }
        first += span.length;
    }
    Ok(())
}

/// The log-probabilities of the targets under the policy that sampled them, and where they come from.
fn behaviour<'a>(
    spans: &'a [Span],
    passed: Option<&[f32]>,
    n: usize,
    known: &mut Known<'a>,
) -> Result<(Vec<f32>, Sources), String> {
    let mut logprobs = passed.map_or_else(|| vec![0.0; n], <[f32]>::to_vec);
    let (mut first, mut sources) = (0, Sources::default());
    for (i, span) in spans.iter().enumerate().filter(|(_, span)| span.length > 0) {
        let own = &mut logprobs[first..first + span.length];
        first += span.length;
        if span.origin == Origin::Prompt {
            continue;
        }
        match known.find(&span.sequence_id) {
            Some((sampled, index)) => {
                own.copy_from_slice(&sampled.sequences[index].logprobs[span.offset..span.offset + span.length]);
                sources.recorded += span.length;
            }
            None if passed.is_some() => sources.passed += span.length,
            None => {
                return Err(format!(
                    "nothing is recorded of sequence {:?}, which {LOSS_FN_INPUT}[{i}] names, and there are no logprobs: it was not sampled with \
                     record_stability_info in a session of yours that goes on, or it is too long ago; send logprobs, or sample again",
                    shown(&span.sequence_id)
                ));
            }
        }
    }
    Ok((logprobs, sources))
}

#[cfg(test)]
mod tests {
    use strata_engine::api::{Client, Image, LossSpec, SampledSequence, StopReason};
    use strata_engine::ledger::Ledger;

    use super::*;
    use crate::tests::with_budget;

    const ID: &str = "s:sample:0:1:0";

    fn span(origin: Origin, sequence_id: &str, offset: usize, length: usize) -> Span {
        Span { origin, sequence_id: sequence_id.into(), offset, length }
    }

    fn prompt(offset: usize, length: usize) -> Span {
        span(Origin::Prompt, ID, offset, length)
    }

    fn own(offset: usize, length: usize) -> Span {
        span(Origin::Sampled, ID, offset, length)
    }

    fn reals(values: &[f32]) -> LossInput {
        LossInput { shape: vec![values.len()], values: LossValues::F32(values.to_vec()) }
    }

    /// Prompt 1, 2, 3 and sample 4, 5, 6 as `rl_loop` of the cookbook sends it: its targets are zeros in the prompt.
    fn datum() -> Datum {
        let targets = LossInput { shape: vec![5], values: LossValues::I64(vec![0, 0, 4, 5, 6]) };
        let inputs = [("target_tokens", targets), ("advantages", reals(&[0.0, 0.0, 1.0, 1.0, 1.0]))];
        let loss_inputs = inputs.map(|(name, input)| (name.to_owned(), input)).into();
        Datum { tokens: vec![1, 2, 3, 4, 5], images: Vec::new(), loss_inputs }
    }

    fn spans() -> Spans {
        Spans { model_input: vec![prompt(0, 3), own(0, 2)], loss_fn_inputs: vec![prompt(1, 2), own(0, 3)] }
    }

    fn with_logprobs(mut datum: Datum, logprobs: &[f32]) -> Datum {
        datum.loss_inputs.insert("logprobs".into(), reals(logprobs));
        datum
    }

    /// The log-probabilities that an example comes to have, and where they are from; `a` has sampled 4, 5, 6 after a prompt of three tokens.
    fn resolved(datum: Datum, spans: Spans, owner: &str) -> Result<(Vec<f32>, Sources), String> {
        let (records, ledger) = (Records::default(), Ledger::new(1 << 20));
        let sequence = SampledSequence {
            tokens: vec![4, 5, 6],
            logprobs: vec![-0.4, -0.5, -0.6],
            topk: None,
            stop_reason: StopReason::Stop,
        };
        let client = Client { owner: "a".into(), session: "s".into() };
        assert!(records.remember(&ledger, &client, "s:sample:0:1", Sampled::new(Some(3), vec![sequence])));
        let loss = LossSpec { name: STABLE_REINFORCE.into(), config: Default::default() };
        let mut op = TrainOp::ForwardBackward { data: vec![datum], loss, forward_only: false };
        assert!(counts_for(&op));
        let sources = with_budget(1 << 20, |budget| resolve(&mut op, &[spans], &records, owner, budget))?;
        let TrainOp::ForwardBackward { mut data, .. } = op else { panic!("it is what it was") };
        match data.remove(0).loss_inputs.remove("logprobs") {
            Some(LossInput { values: LossValues::F32(logprobs), .. }) => Ok((logprobs, sources)),
            other => panic!("{other:?}"),
        }
    }

    fn refusal(datum: Datum, spans: Spans) -> String {
        let error = resolved(datum, spans, "a").unwrap_err();
        assert!(error.starts_with("datum 0: "), "{error}");
        error
    }

    #[test]
    fn what_was_recorded_is_the_policy_that_sampled_and_wins_over_what_is_passed() {
        let recorded = Sources { recorded: 3, passed: 0 };
        assert_eq!(resolved(datum(), spans(), "a"), Ok((vec![0.0, 0.0, -0.4, -0.5, -0.6], recorded)));
        let passed = with_logprobs(datum(), &[-9.0, -8.0, -7.0, -7.0, -7.0]);
        assert_eq!(resolved(passed, spans(), "a"), Ok((vec![-9.0, -8.0, -0.4, -0.5, -0.6], recorded)));
    }

    #[test]
    fn what_is_passed_counts_where_nothing_is_recorded() {
        let values = [0.0, 0.0, -7.0, -7.5, -8.0];
        let passed = with_logprobs(datum(), &values);
        assert_eq!(resolved(passed.clone(), spans(), "b"), Ok((values.to_vec(), Sources { recorded: 0, passed: 3 })));
        assert_eq!(resolved(passed, Spans::default(), "a"), Ok((values.to_vec(), Sources { recorded: 0, passed: 5 })));
        let error = resolved(datum(), spans(), "b").unwrap_err();
        assert!(
            error.contains(ID) && error.contains("loss_fn_input_spans[1]") && error.contains("record_stability_info"),
            "{error}"
        );
        assert!(refusal(datum(), Spans::default()).contains("logprobs, or provenance spans"));
    }

    #[test]
    fn spans_that_contradict_the_example_or_the_record_are_refused() {
        let all = |model_input: Vec<Span>, loss_fn_inputs: Vec<Span>| Spans { model_input, loss_fn_inputs };
        let inputs = || spans().model_input;
        let targets = |list: Vec<Span>| all(inputs(), list);
        for (spans, words) in [
            (targets(vec![prompt(1, 2), own(0, 2)]), "loss_fn_input_spans cover 4 positions, and target_tokens has 5"),
            (targets(vec![prompt(1, 2), own(0, 4)]), "cover 6 positions, and target_tokens has 5"),
            (targets(vec![]), "loss_fn_input_spans cover 0 positions"),
            (all(vec![], spans().loss_fn_inputs), "model_input_spans cover 0 positions, and the input has 5"),
            (targets(vec![own(0, usize::MAX), own(0, usize::MAX)]), "cover more positions than"),
            (targets(vec![prompt(0, 2), own(1, 3)]), "loss_fn_input_spans[1] has tokens 1 to 4 of sequence"),
            (targets(vec![prompt(2, 2), own(0, 3)]), "loss_fn_input_spans[0] has tokens 2 to 4 of sequence"),
            (targets(vec![prompt(usize::MAX, 2), own(0, 3)]), "beyond any sequence"),
            (
                targets(vec![prompt(0, 1), own(0, 2), own(1, 2)]),
                "[1] and loss_fn_input_spans[2] overlap: both have sampled token 1",
            ),
            (
                targets(vec![prompt(0, 3), own(0, 2)]),
                "target_tokens[3] is 5, and loss_fn_input_spans[1] says that it is sampled token 0",
            ),
            (all(vec![prompt(0, 2), own(0, 3)], spans().loss_fn_inputs), "the input[2] is 3, and model_input_spans[1] says"),
        ] {
            let error = refusal(with_logprobs(datum(), &[0.0; 5]), spans);
            assert!(error.contains(words), "{error}");
        }
        let mut of_prompt = datum();
        of_prompt.loss_inputs.insert("advantages".into(), reals(&[0.0, 0.5, 1.0, 1.0, 1.0]));
        let error = refusal(of_prompt, spans());
        assert!(error.contains("advantages[1] is 0.5, at a token that loss_fn_input_spans[0] says is of a prompt"), "{error}");
    }

    #[test]
    fn runs_of_no_tokens_and_several_sequences_are_taken() {
        // A sample of one token after a prompt of one: two of the runs are empty.
        let targets = LossInput { shape: vec![1], values: LossValues::I64(vec![4]) };
        let inputs = [("target_tokens", targets), ("advantages", reals(&[1.0]))];
        let loss_inputs = inputs.map(|(name, input)| (name.to_owned(), input)).into();
        let short = Datum { tokens: vec![3], images: Vec::new(), loss_inputs };
        let of_short = Spans { model_input: vec![prompt(0, 1), own(0, 0)], loss_fn_inputs: vec![prompt(1, 0), own(0, 1)] };
        assert_eq!(resolved(short, of_short, "a").unwrap().0, [-0.4]);
        // Two parts of a sample with something that nobody knows between them.
        let mut other = with_logprobs(datum(), &[0.0, 0.0, -1.0, -2.0, -3.0]);
        other
            .loss_inputs
            .insert("target_tokens".into(), LossInput { shape: vec![5], values: LossValues::I64(vec![0, 4, 5, 9, 6]) });
        other.loss_inputs.insert("advantages".into(), reals(&[0.0, 1.0, 1.0, 1.0, 1.0]));
        let unknown = span(Origin::Sampled, "x:0", 7, 1);
        let list = vec![prompt(0, 1), own(0, 2), unknown, own(2, 1)];
        let (logprobs, sources) =
            resolved(other, Spans { model_input: vec![prompt(0, 3), own(0, 2)], loss_fn_inputs: list }, "a").unwrap();
        assert_eq!((logprobs, sources), (vec![0.0, -0.4, -0.5, -2.0, -0.6], Sources { recorded: 3, passed: 1 }));
    }

    #[test]
    fn pictures_count_as_the_tokens_they_are_said_to_be() {
        let with_picture = |expected_tokens| {
            let mut datum = datum();
            datum.tokens = vec![1, 4, 5];
            datum.images = vec![Image { at: 1, file: [].into(), expected_tokens }];
            datum
        };
        assert_eq!(resolved(with_picture(Some(2)), spans(), "a").unwrap().1, Sources { recorded: 3, passed: 0 });
        assert!(refusal(with_picture(None), spans()).contains("image 0 of the input has no expected_tokens"));
        let shifted = Spans { model_input: vec![prompt(0, 2), own(0, 3)], ..spans() };
        assert!(refusal(with_picture(Some(2)), shifted).contains("the input[2] is a picture"));
    }

    #[test]
    fn what_is_wrong_with_the_tensors_is_left_to_the_engine() {
        let mut wrong = datum();
        wrong.loss_inputs.insert("logprobs".into(), reals(&[f32::NAN; 5]));
        assert!(resolved(wrong, spans(), "a").unwrap().0.iter().all(|logprob| logprob.is_nan()));
        assert_eq!(resolved(with_logprobs(datum(), &[1.0]), spans(), "a").unwrap().0, [1.0]);
    }
}
