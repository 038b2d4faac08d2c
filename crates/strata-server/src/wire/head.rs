//! Where an operation belongs, read from as much of a body as makes sense.
//!
//! A client that has sent an operation has spent its place in the order of its model, whatever becomes of the request. So a body that is
//! malformed, too large or sent to where nobody reads it is looked at for these two fields alone. Nothing is allocated but the id.

use std::cell::RefCell;
use std::fmt;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::limits;
use crate::wire::json::OpHead;

/// What has been seen so far.
#[derive(Default)]
struct Seen {
    model_id: Option<String>,
    seq_id: Option<u64>,
}

impl Seen {
    fn into_head(self) -> Option<OpHead> {
        Some(OpHead::new(self.model_id?, self.seq_id?))
    }
}

/// The head of an operation, of a body in either form that may end or go wrong anywhere.
pub fn glimpse(body: &[u8]) -> Option<OpHead> {
    of_json(body).or_else(|| of_protobuf(body))
}

/// As [`glimpse`], of JSON.
pub fn of_json(body: &[u8]) -> Option<OpHead> {
    // A number at the end may have gone on, and be another.
    let is_of_number = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    let body = &body[..body.iter().rposition(|byte| !is_of_number(byte)).map_or(0, |last| last + 1)];
    let seen = RefCell::new(Seen::default());
    // Whatever is wrong further on, what was seen before it counts.
    let _ = serde_json::Deserializer::from_slice(body).deserialize_map(Fields(&seen));
    seen.into_inner().into_head()
}

/// As [`glimpse`], of a `ForwardBackwardRequest`.
pub fn of_protobuf(mut body: &[u8]) -> Option<OpHead> {
    const MODEL_ID: u32 = 1;
    const SEQ_ID: u32 = 2;
    let mut seen = Seen::default();
    while let Ok((tag, wire_type)) = decode_key(&mut body) {
        match (tag, wire_type) {
            (MODEL_ID, WireType::LengthDelimited) => {
                let len = decode_varint(&mut body).ok().and_then(|len| usize::try_from(len).ok());
                let Some((id, rest)) = len.and_then(|len| body.split_at_checked(len)) else { break };
                body = rest;
                if id.len() <= limits::ID_BYTES_MAX {
                    seen.model_id = std::str::from_utf8(id).ok().map(str::to_owned);
                }
            }
            (SEQ_ID, WireType::Varint) => {
                let Ok(seq_id) = decode_varint(&mut body) else { break };
                // An int32 on the wire: those below zero have their upper bits set.
                seen.seq_id = i64::try_from(seq_id).ok().and_then(|seq_id| u64::try_from(seq_id).ok());
            }
            _ if skip_field(wire_type, tag, &mut body, DecodeContext::default()).is_err() => break,
            _ => {}
        }
    }
    seen.into_head()
}

struct Fields<'s>(&'s RefCell<Seen>);

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        while let Some(field) = access.next_key_seed(FieldName)? {
            match field {
                Field::Head => access.next_value_seed(Value(self.0))?,
                Field::Other => access.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(())
    }
}

/// Which field a key names.
enum Field {
    /// `model_id` or `seq_id`: which of them, its value says, which is a text or a number.
    Head,
    Other,
}

struct FieldName;

impl<'de> DeserializeSeed<'de> for FieldName {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldName {
    type Value = Field;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the name of a field")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Field, E> {
        Ok(match name {
            "model_id" | "seq_id" => Field::Head,
            _ => Field::Other,
        })
    }
}

struct Value<'s>(&'s RefCell<Seen>);

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for Value<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an id or a place")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        if text.len() <= limits::ID_BYTES_MAX {
            self.0.borrow_mut().model_id = Some(text.to_owned());
        }
        Ok(())
    }

    fn visit_u64<E: Error>(self, place: u64) -> Result<(), E> {
        self.0.borrow_mut().seq_id = Some(place);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::wire::proto::ForwardBackwardRequest;

    fn seen(head: Option<OpHead>) -> Option<(String, u64)> {
        head.map(|head| (head.model_id.0, head.seq_id))
    }

    #[test]
    fn a_head_is_found_in_front_of_whatever_is_wrong() {
        let expected = Some(("m".to_owned(), 7));
        for body in [
            r#"{"model_id":"m","seq_id":7}"#,
            r#"{"adam_params":{"model_id":"x","seq_id":3},"model_id":"m","seq_id":7,"type":"#,
            r#"{"seq_id":7,"model_id":"m","data":[1,2,"#,
            r#"{"seq_id":7,"model_id":"m"}}}"#,
            "{\"seq_id\":7,\"model_id\":\"m\",\"a\":\"\u{1}\"}",
        ] {
            assert_eq!(seen(of_json(body.as_bytes())), expected, "{body}");
        }
        for body in ["", "[]", "7", r#"{"model_id":"m"}"#, r#"{"seq_id":7,"x":]"#, r#"{"model_id":7,"seq_id":-1}"#, "{"] {
            assert_eq!(seen(glimpse(body.as_bytes())), None, "{body}");
        }
        let cut = r#"{"model_id":"m","seq_id":12"#;
        assert_eq!(seen(of_json(cut.as_bytes())), None, "it may have been 123");
        assert_eq!(seen(of_json(format!("{cut},").as_bytes())), Some(("m".into(), 12)));
        let long = format!(r#"{{"model_id":"{}","seq_id":7}}"#, "m".repeat(limits::ID_BYTES_MAX + 1));
        assert_eq!(seen(of_json(long.as_bytes())), None);
    }

    #[test]
    fn a_head_is_found_in_a_message_that_is_cut_short() {
        let request =
            ForwardBackwardRequest { model_id: "m".into(), seq_id: 7, loss_fn: "x".repeat(100), ..Default::default() };
        let body = request.encode_to_vec();
        assert_eq!(seen(glimpse(&body[..20])), Some(("m".into(), 7)));
        assert_eq!(seen(of_protobuf(&body[..4])), None);
        let negative = ForwardBackwardRequest { model_id: "m".into(), seq_id: -7, ..Default::default() };
        assert_eq!(seen(of_protobuf(&negative.encode_to_vec())), None);
    }
}
