//! JSON straight into typed values, held to a [`Budget`] as it is read.
//!
//! [`Guarded`] stands between serde_json and the types: it counts what lists, maps and texts are about to take before they take it, and
//! passes on no text above a limit, because serde puts the whole of an unexpected text into its error. Files in base64 alone are longer, and
//! go to a type that takes any text. What a type does not ask for is skipped and costs nothing.
//!
//! An error names the field that is wrong, by the way to it (`data[3].weights.dtype`). The way is put together as the error comes up from there,
//! so that what is right pays for no more than remembering the last key of each level.
//!
//! Peak memory: no more than three times the budget and the body together, as a vector that grows is there twice for a moment.

use std::cell::RefCell;
use std::fmt::{self, Write};

use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::limits;
use crate::names::cut;
use crate::wire::budget::{Budget, map_bytes};
use crate::wire::picture;

/// Parses a body.
///
/// # Errors
/// With the way to what is wrong, and serde's message, which says what it is and where.
pub fn parse<T: DeserializeOwned>(body: &[u8], budget: &Budget) -> Result<T, String> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let reading = Reading { budget, key: RefCell::default(), way: RefCell::default() };
    let parsed = T::deserialize(Guarded { inner: &mut json, reading: &reading });
    let parsed = parsed.and_then(|value| json.end().map(|()| value));
    parsed.map_err(|error| {
        let (way, error) = (reading.way(), in_plain_words(error.to_string()));
        format!("request body: {}{}", way, cut(&error, limits::ERROR_CHARS_MAX))
    })
}

/// Serde's message without the names of Rust's types.
fn in_plain_words(error: String) -> String {
    let words = |name: &str| match name {
        "usize" | "u64" | "u32" => Some("a whole number from 0"),
        "i64" | "i32" => Some("a whole number"),
        "f64" | "f32" => Some("a number"),
        _ => None,
    };
    let (what, expected) = error.rsplit_once(", expected ").unwrap_or((&error, ""));
    let (name, place) = expected.split_once(' ').unwrap_or((expected, ""));
    words(name).map(|words| format!("{what}, expected {words} {place}")).unwrap_or(error)
}

/// What the levels of one reading share.
struct Reading<'b> {
    budget: &'b Budget,
    /// How the key that was read last begins.
    key: RefCell<String>,
    /// The way to what is wrong, from there outwards.
    way: RefCell<Vec<Step>>,
}

/// A step on the way to a value.
enum Step {
    Field(String),
    Index(usize),
}

impl Reading<'_> {
    fn note_key(&self, key: &str) {
        let mut noted = self.key.borrow_mut();
        noted.clear();
        noted.extend(key.chars().take(KEY_CHARS_MAX));
    }

    /// Adds a step to the way that an error comes from.
    fn came_through(&self, step: Step) {
        self.way.borrow_mut().push(step);
    }

    /// The way to what is wrong, ready to be put in front of what is wrong with it.
    fn way(&self) -> String {
        let mut way = String::new();
        for step in self.way.borrow().iter().rev() {
            // Writing to a string does not fail.
            let _ = match step {
                Step::Field(name) if way.is_empty() => write!(way, "{name}"),
                Step::Field(name) => write!(way, ".{name}"),
                Step::Index(index) => write!(way, "[{index}]"),
            };
        }
        if way.is_empty() { way } else { format!("{}: ", cut(&way, limits::ERROR_CHARS_MAX / 2)) }
    }
}

/// Characters of a key that an error shows.
const KEY_CHARS_MAX: usize = 64;

/// A deserializer, an access or a seed that is held to a budget.
struct Guarded<'r, 'b, T> {
    inner: T,
    reading: &'r Reading<'b>,
}

impl<'r, 'b, T> Guarded<'r, 'b, T> {
    fn visitor<V>(&self, visitor: V, kind: Kind) -> GuardedVisitor<'r, 'b, V> {
        GuardedVisitor { inner: visitor, reading: self.reading, kind }
    }
}

/// What a visitor makes of what it sees.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// A value whose texts and entries take memory of their own.
    Value,
    /// A struct: its fields are part of what holds it, which has been counted.
    Struct,
    /// The name of a field of a struct, which is looked at only.
    Field,
    /// A file in base64, which has a limit of its own and becomes the bytes that it encodes.
    File,
}

/// Whatever a type hopes for, it is shown what is there: asked for a type that is not, serde_json puts the text that it found into its error
/// by itself.
macro_rules! guarded {
    ($($method:ident),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.deserialize_any(visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Guarded<'_, '_, D> {
    type Error = D::Error;

    guarded!(
        deserialize_bool,
        deserialize_i8,
        deserialize_i16,
        deserialize_i32,
        deserialize_i64,
        deserialize_u8,
        deserialize_u16,
        deserialize_u32,
        deserialize_u64,
        deserialize_f32,
        deserialize_f64,
        deserialize_char,
        deserialize_str,
        deserialize_string,
        deserialize_byte_buf,
        deserialize_unit,
        deserialize_seq,
        deserialize_map
    );

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::Value);
        self.inner.deserialize_any(visitor)
    }

    /// What asks for bytes is shown the base64 that a file is written in.
    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::File);
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::Value);
        self.inner.deserialize_option(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::Value);
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_any(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_any(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _len: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.deserialize_any(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::Struct);
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        // No type of the API is an enum as serde knows it; one that became so would be told that it does not fit.
        self.deserialize_any(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.visitor(visitor, Kind::Field);
        self.inner.deserialize_identifier(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }
}

struct GuardedVisitor<'r, 'b, V> {
    inner: V,
    reading: &'r Reading<'b>,
    kind: Kind,
}

impl<'r, 'b, V> GuardedVisitor<'r, 'b, V> {
    fn access<A>(&self, access: A) -> GuardedEntries<'r, 'b, A> {
        let is_struct = self.kind == Kind::Struct;
        GuardedEntries { inner: access, reading: self.reading, is_struct, count: 0, key_bytes: 0, key: String::new() }
    }

    fn text<E: Error>(&self, text: &str) -> Result<(), E> {
        if self.kind == Kind::File {
            return self.reading.budget.take(picture::bytes_out_of_base64(text)).map_err(E::custom);
        }
        if text.len() > limits::TEXT_BYTES_MAX {
            return Err(E::custom(format!("a text of {} bytes is above the limit of {}", text.len(), limits::TEXT_BYTES_MAX)));
        }
        self.reading.note_key(text);
        if self.kind == Kind::Field { Ok(()) } else { self.reading.budget.take(text.len()).map_err(E::custom) }
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for GuardedVisitor<'_, '_, V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.inner.visit_bool(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.inner.visit_i64(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        self.inner.visit_u64(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        self.inner.visit_f64(value)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.text(text)?;
        self.inner.visit_str(text)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        self.text(text)?;
        self.inner.visit_borrowed_str(text)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Guarded { inner: deserializer, reading: self.reading })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Guarded { inner: deserializer, reading: self.reading })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.access(access);
        self.inner.visit_seq(access)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.access(access);
        self.inner.visit_map(access)
    }
}

/// The entries of a list or a map, counted as a `Vec` or a `BTreeMap` takes memory for them.
struct GuardedEntries<'r, 'b, A> {
    inner: A,
    reading: &'r Reading<'b>,
    is_struct: bool,
    count: usize,
    key_bytes: usize,
    /// How the key of the entry at hand begins.
    key: String,
}

/// Fewest entries that a vector has room for.
const VEC_ENTRIES_MIN: usize = 4;

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for GuardedEntries<'_, '_, A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, A::Error> {
        let element = self.inner.next_element_seed(Guarded { inner: seed, reading: self.reading });
        let element = element.inspect_err(|_| self.reading.came_through(Step::Index(self.count)))?;
        if element.is_some() {
            // A vector that is full becomes twice as long.
            let grows_by = match self.count {
                _ if self.is_struct => 0,
                0 => VEC_ENTRIES_MIN,
                count if count >= VEC_ENTRIES_MIN && count.is_power_of_two() => count,
                _ => 0,
            };
            self.reading.budget.take_values::<T::Value>(grows_by).map_err(A::Error::custom)?;
            self.count += 1;
        }
        Ok(element)
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for GuardedEntries<'_, '_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        self.key_bytes = size_of::<K::Value>();
        let key = self.inner.next_key_seed(Guarded { inner: seed, reading: self.reading })?;
        self.key.clone_from(&self.reading.key.borrow());
        Ok(key)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        if !self.is_struct {
            let node_bytes = map_bytes::<(), T::Value>(1) + 11 * self.key_bytes;
            let grows_by = if self.count.is_multiple_of(5) { node_bytes } else { 0 };
            self.reading.budget.take(grows_by).map_err(A::Error::custom)?;
            self.count += 1;
        }
        let value = self.inner.next_value_seed(Guarded { inner: seed, reading: self.reading });
        value.inspect_err(|_| self.reading.came_through(Step::Field(std::mem::take(&mut self.key))))
    }
}

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for Guarded<'_, '_, T> {
    type Value = T::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T::Value, D::Error> {
        self.inner.deserialize(Guarded { inner: deserializer, reading: self.reading })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;
    use crate::tests::with_budget;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only what is wrong with them is looked at")]
    struct Outer {
        list: Vec<Inner>,
        #[serde(default)]
        map: BTreeMap<String, Option<Inner>>,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "as above")]
    struct Inner {
        name: String,
        #[serde(default)]
        number: u64,
    }

    #[test]
    fn an_error_names_the_way_to_what_is_wrong() {
        for (body, way) in [
            (r#"{"list":[{"name":"a"},{"name":null}]}"#, "list[1].name: invalid type: null"),
            (
                r#"{"list":[{"name":"a","other":{"name":1},"number":-3}]}"#,
                "list[0].number: invalid value: integer `-3`, expected a whole number from 0 at line 1",
            ),
            (
                r#"{"list":[{"name":"a","number":", expected usize"}]}"#,
                "list[0].number: invalid type: string \", expected usize\", expected a whole number from 0 at",
            ),
            (r#"{"list":[],"map":{"first":null,"second":{"name":[]}}}"#, "map.second.name: invalid type: sequence"),
            (r#"{"list":[{"number":1}]}"#, "list[0]: missing field `name`"),
            (r#"{"list":null}"#, "list: invalid type: null"),
            (r#"{"map":{}}"#, "missing field `list`"),
        ] {
            let error = with_budget(1 << 20, |budget| parse::<Outer>(body.as_bytes(), budget)).unwrap_err();
            assert!(error.starts_with(&format!("request body: {way}")), "{error}");
        }
        let deep = format!(r#"{{"list":[],"map":{{"{}":7}}}}"#, "k".repeat(10_000));
        let error = with_budget(1 << 20, |budget| parse::<Outer>(deep.as_bytes(), budget)).unwrap_err();
        assert!(error.len() < 300 && error.contains("kkk"), "{error}");
    }
}
