//! Types of JSON bodies that hold only so much: each refuses a list, a map or a text at the first entry or byte beyond its limit.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::Deserialize;
use serde::de::{self, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::limits;
use crate::names::cut;

/// A text of at most `MAX` bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text<const MAX: usize>(pub String);

impl<const MAX: usize> Deref for Text<MAX> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<const MAX: usize> fmt::Display for Text<MAX> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for Text<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor<const MAX: usize>;

        impl<const MAX: usize> Visitor<'_> for TextVisitor<MAX> {
            type Value = Text<MAX>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "a text of at most {MAX} bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<MAX>, E> {
                if text.len() > MAX {
                    return Err(E::custom(format!("a text of {} bytes is above the limit of {MAX} here", text.len())));
                }
                Ok(Text(text.to_owned()))
            }
        }

        deserializer.deserialize_str(TextVisitor)
    }
}

/// The first kilobyte of a text, for logs.
#[derive(Clone, Debug, Default)]
pub struct Excerpt(pub String);

impl<'de> Deserialize<'de> for Excerpt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ExcerptVisitor;

        impl Visitor<'_> for ExcerptVisitor {
            type Value = Excerpt;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Excerpt, E> {
                Ok(Excerpt(cut(text, 1000).into_owned()))
            }
        }

        deserializer.deserialize_str(ExcerptVisitor)
    }
}

/// A list of at most `MAX` entries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct List<T, const MAX: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = List<T, MAX>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<List<T, MAX>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = access.next_element()? {
                    if entries.len() == MAX {
                        return Err(A::Error::custom(format!("a list here may have at most {MAX} entries, and this has more")));
                    }
                    entries.push(entry);
                }
                Ok(List(entries))
            }
        }

        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

/// A map of at most `MAX` entries, by names of at most [`limits::NAME_BYTES_MAX`] bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Map<V, const MAX: usize>(pub BTreeMap<String, V>);

impl<V, const MAX: usize> Default for Map<V, MAX> {
    fn default() -> Self {
        Map(BTreeMap::new())
    }
}

impl<'de, V: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Map<V, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V, const MAX: usize>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>, const MAX: usize> Visitor<'de> for MapVisitor<V, MAX> {
            type Value = Map<V, MAX>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Map<V, MAX>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = access.next_key::<Text<{ limits::NAME_BYTES_MAX }>>()? {
                    if entries.len() == MAX {
                        return Err(A::Error::custom(format!("a map here may have at most {MAX} entries, and this has more")));
                    }
                    entries.insert(name.0, access.next_value()?);
                }
                Ok(Map(entries))
            }
        }

        deserializer.deserialize_map(MapVisitor(PhantomData))
    }
}

/// Numbers of a tensor whose type is not known yet: integers, or from the first that is none on, floats.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// All of them are integers.
    I64(Vec<i64>),
    /// At least one is not.
    F32(Vec<f32>),
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumbersVisitor;

        impl<'de> Visitor<'de> for NumbersVisitor {
            type Value = Numbers;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Numbers, A::Error> {
                let mut integers: Vec<i64> = Vec::new();
                while let Some(number) = access.next_element::<Number>()? {
                    match number {
                        Number::I64(integer) => integers.push(integer),
                        Number::F64(float) => {
                            let mut floats: Vec<f32> = integers.into_iter().map(|integer| integer as f32).collect();
                            floats.push(float as f32);
                            while let Some(number) = access.next_element::<Number>()? {
                                floats.push(match number {
                                    Number::I64(integer) => integer as f32,
                                    Number::F64(float) => float as f32,
                                });
                            }
                            return Ok(Numbers::F32(floats));
                        }
                    }
                }
                Ok(Numbers::I64(integers))
            }
        }

        deserializer.deserialize_seq(NumbersVisitor)
    }
}

enum Number {
    I64(i64),
    F64(f64),
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl Visitor<'_> for NumberVisitor {
            type Value = Number;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number")
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Number, E> {
                Ok(Number::I64(value))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Number, E> {
                Ok(i64::try_from(value).map_or(Number::F64(value as f64), Number::I64))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Number, E> {
                Ok(Number::F64(value))
            }
        }

        deserializer.deserialize_any(NumberVisitor)
    }
}

/// Metadata, each value as text: a text as it is, anything else as JSON.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetadataTexts(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for MetadataTexts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MetadataVisitor;

        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = MetadataTexts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<MetadataTexts, A::Error> {
                let (mut texts, mut size_bytes) = (BTreeMap::new(), 0);
                while let Some(key) = access.next_key::<Text<{ limits::METADATA_BYTES_MAX }>>()? {
                    let value = match access.next_value()? {
                        JsonText::Text(text) | JsonText::Other(text) => text,
                    };
                    size_bytes += key.len() + value.len();
                    if size_bytes > limits::METADATA_BYTES_MAX || texts.len() == limits::METADATA_ENTRIES_MAX {
                        return Err(A::Error::custom(format!(
                            "bytes of user_metadata: the limit is {} in at most {} entries",
                            limits::METADATA_BYTES_MAX,
                            limits::METADATA_ENTRIES_MAX
                        )));
                    }
                    texts.insert(key.0, value);
                }
                Ok(MetadataTexts(texts))
            }
        }

        deserializer.deserialize_map(MetadataVisitor)
    }
}

/// Any JSON as text.
enum JsonText {
    /// A text, without its quotes.
    Text(String),
    /// Anything else, as it is written.
    Other(String),
}

impl JsonText {
    fn write<E: Error>(self, out: &mut String) -> Result<(), E> {
        match self {
            JsonText::Text(text) => out.push_str(&serde_json::to_string(&text).map_err(E::custom)?),
            JsonText::Other(text) => out.push_str(&text),
        }
        if out.len() > limits::METADATA_BYTES_MAX {
            return Err(E::custom(format!(
                "bytes of user_metadata: one value is above the limit of {}",
                limits::METADATA_BYTES_MAX
            )));
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonTextVisitor;

        impl<'de> Visitor<'de> for JsonTextVisitor {
            type Value = JsonText;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("any value")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<JsonText, E> {
                Ok(JsonText::Other(value.to_string()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<JsonText, E> {
                Ok(JsonText::Other(value.to_string()))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<JsonText, E> {
                Ok(JsonText::Other(value.to_string()))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<JsonText, E> {
                serde_json::to_string(&value).map(JsonText::Other).map_err(E::custom)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<JsonText, E> {
                Ok(JsonText::Text(text.to_owned()))
            }

            fn visit_unit<E: Error>(self) -> Result<JsonText, E> {
                Ok(JsonText::Other("null".into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<JsonText, A::Error> {
                let mut out = String::from("[");
                while let Some(element) = access.next_element::<JsonText>()? {
                    if out.len() > 1 {
                        out.push(',');
                    }
                    element.write(&mut out)?;
                }
                out.push(']');
                Ok(JsonText::Other(out))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<JsonText, A::Error> {
                let mut out = String::from("{");
                while let Some(key) = access.next_key::<Text<{ limits::METADATA_BYTES_MAX }>>()? {
                    if out.len() > 1 {
                        out.push(',');
                    }
                    JsonText::Text(key.0).write(&mut out)?;
                    out.push(':');
                    access.next_value::<JsonText>()?.write(&mut out)?;
                }
                out.push('}');
                Ok(JsonText::Other(out))
            }
        }

        deserializer.deserialize_any(JsonTextVisitor)
    }
}

/// Any value that is there, without looking at it.
#[derive(Debug)]
pub struct Present;

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        de::IgnoredAny::deserialize(deserializer).map(|_| Present)
    }
}
