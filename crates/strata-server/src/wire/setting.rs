//! Settings of a loss: numbers, and texts that are numbers.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

use crate::limits;
use crate::names::shown;
use crate::wire::json::at_most;

/// The value of a setting, as it comes.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SettingVisitor;

        impl Visitor<'_> for SettingVisitor {
            type Value = Setting;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number or a text")
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Setting, E> {
                Ok(Setting::Number(number))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Setting, E> {
                Ok(Setting::Number(number as f64))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Setting, E> {
                Ok(Setting::Number(number as f64))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Setting, E> {
                at_most("bytes of a setting of the loss", text.len(), limits::NAME_BYTES_MAX).map_err(E::custom)?;
                Ok(Setting::Text(text.to_owned()))
            }
        }

        deserializer.deserialize_any(SettingVisitor)
    }
}

/// The settings of `loss_fn` as numbers.
///
/// # Errors
/// If one has a name that is too long, no value, or a text that is no number.
pub fn numbers(
    loss_fn: &str,
    settings: impl Iterator<Item = (String, Option<Setting>)>,
) -> Result<BTreeMap<String, f64>, String> {
    let mut numbers = BTreeMap::new();
    for (name, setting) in settings {
        at_most("bytes of a name in loss_fn_config", name.len(), limits::NAME_BYTES_MAX)?;
        let number = match setting {
            Some(Setting::Number(number)) => number,
            Some(Setting::Text(text)) => text.trim().parse().map_err(|_| {
                let (name, text, loss_fn) = (shown(&name), shown(&text), shown(loss_fn));
                format!("loss_fn_config[{name:?}] is the text {text:?}; the settings of {loss_fn} are numbers here")
            })?,
            None => return Err(format!("loss_fn_config[{:?}] has no value; send a number", shown(&name))),
        };
        numbers.insert(name, number);
    }
    Ok(numbers)
}
