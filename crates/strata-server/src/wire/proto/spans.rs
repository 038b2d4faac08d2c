//! Provenance spans in the body of `forward_backward`. They are read for the one loss that looks at them; whatever they hold, other losses pass over it.

use axum::body::Bytes;
use prost::Message;

use super::request::for_each_field;
use crate::limits;
use crate::provenance::{Origin, Span, Spans};
use crate::wire::budget::Budget;
use crate::wire::json::at_most;

/// Where a run of positions of an example comes from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProvenanceSpan {
    /// The run.
    #[prost(oneof = "SpanKind", tags = "1, 2")]
    pub span: Option<SpanKind>,
}

/// The kind of a run.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum SpanKind {
    /// Tokens of the prompt of a sequence.
    #[prost(message, tag = "1")]
    PromptTokens(SequenceTokens),
    /// Tokens that were sampled.
    #[prost(message, tag = "2")]
    SampledTokens(SequenceTokens),
}

/// Consecutive tokens of a sampled sequence or its prompt: `PromptProvenanceSpan` and `SampledProvenanceSpan`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SequenceTokens {
    /// The sequence.
    #[prost(string, tag = "1")]
    pub sequence_id: String,
    /// The first of them.
    #[prost(int64, tag = "2")]
    pub offset: i64,
    /// Their number.
    #[prost(int64, tag = "3")]
    pub length: i64,
}

/// What a span takes: its place in a list that grows by doubling, and in those by which it is checked.
const SPAN_BYTES: usize = 5 * size_of::<Span>();

const DATA: u32 = 3;
const MODEL_INPUT_SPANS: u32 = 3;
const LOSS_FN_INPUT_SPANS: u32 = 4;

/// The spans of each example of a body that was decoded before.
///
/// # Errors
/// If one is no span, or they take more memory than there is for them.
pub fn decode_spans(body: &Bytes, budget: &Budget) -> Result<Vec<Spans>, String> {
    let (mut examples, mut refused) = (Vec::new(), None);
    for_each_field(body, |tag, field| {
        if tag == DATA
            && refused.is_none()
            && let Some(datum) = field
        {
            // The list grows by doubling.
            let spans = budget.take_values::<Spans>(2).and_then(|()| spans_of(datum, budget));
            match spans {
                Ok(spans) => examples.push(spans),
                Err(reason) => refused = Some(format!("datum {}: {reason}", examples.len())),
            }
        }
    });
    refused.map_or(Ok(examples), Err)
}

fn spans_of(datum: &[u8], budget: &Budget) -> Result<Spans, String> {
    let (mut spans, mut refused) = (Spans::default(), None);
    for_each_field(datum, |tag, field| {
        let (name, list) = match tag {
            MODEL_INPUT_SPANS => ("model_input_spans", &mut spans.model_input),
            LOSS_FN_INPUT_SPANS => ("loss_fn_input_spans", &mut spans.loss_fn_inputs),
            _ => return,
        };
        if let (Some(span), None) = (field, &refused) {
            let taken = budget.take(SPAN_BYTES + span.len());
            match taken.and_then(|()| span_of(span)) {
                Ok(span) => list.push(span),
                Err(reason) => refused = Some(format!("{name}[{}]: {reason}", list.len())),
            }
        }
    });
    refused.map_or(Ok(spans), Err)
}

fn span_of(span: &[u8]) -> Result<Span, String> {
    let decoded = ProvenanceSpan::decode(span).map_err(|error| format!("it is no ProvenanceSpan: {error}"))?;
    let (origin, tokens) = match decoded.span {
        Some(SpanKind::PromptTokens(tokens)) => (Origin::Prompt, tokens),
        Some(SpanKind::SampledTokens(tokens)) => (Origin::Sampled, tokens),
        None => return Err("it has neither prompt_tokens nor sampled_tokens".into()),
    };
    let SequenceTokens { sequence_id, offset, length } = tokens;
    at_most("bytes of its sequence_id", sequence_id.len(), limits::ID_BYTES_MAX)?;
    if sequence_id.is_empty() {
        return Err("it has no sequence_id".into());
    }
    let number = |what: &str, value: i64| usize::try_from(value).map_err(|_| format!("its {what} is {value}, below 0"));
    Ok(Span { origin, sequence_id, offset: number("offset", offset)?, length: number("length", length)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{peak_bytes, with_budget};

    /// A field whose content is `content`.
    fn delimited(tag: u8, content: &[u8]) -> Vec<u8> {
        let mut field = vec![tag << 3 | 2];
        prost::encoding::encode_varint(content.len() as u64, &mut field);
        [field, content.to_vec()].concat()
    }

    fn sampled(sequence_id: &str, offset: i64, length: i64) -> Vec<u8> {
        let tokens = SequenceTokens { sequence_id: sequence_id.into(), offset, length };
        ProvenanceSpan { span: Some(SpanKind::SampledTokens(tokens)) }.encode_to_vec()
    }

    fn decoded(body: Vec<u8>) -> Result<Vec<Spans>, String> {
        with_budget(1 << 20, |budget| decode_spans(&body.into(), budget))
    }

    #[test]
    fn spans_are_those_of_their_examples_and_fields() {
        let tokens = SequenceTokens { sequence_id: "s:0".into(), offset: 1, length: 2 };
        let prompt = ProvenanceSpan { span: Some(SpanKind::PromptTokens(tokens)) }.encode_to_vec();
        let first = [delimited(3, &prompt), delimited(4, &sampled("s:0", 0, 3)), delimited(3, &sampled("t:1", 4, 0))].concat();
        let spans = decoded([delimited(3, &first), delimited(4, b"ppo"), delimited(3, &[])].concat()).unwrap();
        let span = |origin, id: &str, offset, length| Span { origin, sequence_id: id.into(), offset, length };
        assert_eq!(spans[0].model_input, [span(Origin::Prompt, "s:0", 1, 2), span(Origin::Sampled, "t:1", 4, 0)]);
        assert_eq!(spans[0].loss_fn_inputs, [span(Origin::Sampled, "s:0", 0, 3)]);
        assert_eq!(spans[1..], [Spans::default()]);
    }

    #[test]
    fn what_is_no_span_is_refused_with_its_place() {
        for (span, words) in [
            (vec![0xff, 0xff], "it is no ProvenanceSpan"),
            (delimited(2, &delimited(1, &[0xff])), "it is no ProvenanceSpan"),
            (vec![], "neither prompt_tokens nor sampled_tokens"),
            (sampled("", 0, 1), "it has no sequence_id"),
            (sampled("s:0", -1, 1), "its offset is -1, below 0"),
            (sampled("s:0", 0, -7), "its length is -7, below 0"),
            (sampled(&"x".repeat(513), 0, 1), "513 is above the limit of 512"),
        ] {
            let datum = delimited(3, &[delimited(4, &sampled("s:0", 0, 1)), delimited(4, &span)].concat());
            let error = decoded([delimited(3, &[]), datum].concat()).unwrap_err();
            assert!(error.starts_with("datum 1: loss_fn_input_spans[1]: ") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn bodies_of_very_many_spans_stay_within_the_budget() {
        for body in [delimited(3, &delimited(4, &sampled("s", 0, 1)).repeat(100_000)), delimited(3, &[]).repeat(100_000)] {
            let (refused, peak) = peak_bytes(|| decoded(body));
            assert!(refused.unwrap_err().contains("more than 1 MiB"));
            assert!(peak < 3 << 20, "{peak}");
        }
    }
}
