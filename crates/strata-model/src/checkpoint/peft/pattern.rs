//! `rank_pattern` and `alpha_pattern`: a number for each module that a key matches.

use fancy_regex::RegexBuilder;
use serde_json::Value;

use super::config::show;

/// The most entries of a pattern, and bytes of a key.
const ENTRIES_MAX: usize = 1024;
const KEY_BYTES_MAX: usize = 4096;
/// Memory of one compiled expression.
pub(super) const PATTERN_MEMORY_MAX: usize = 1 << 20;

/// Numbers by regular expression, the first that matches counting.
#[derive(Debug)]
pub(super) struct Pattern {
    key: &'static str,
    entries: Vec<(String, f64)>,
}

impl Pattern {
    /// Reads the value of a key of the configuration; `number` is what one entry may be, and `kind` says so.
    pub(super) fn from_json(
        key: &'static str,
        value: Option<&Value>,
        kind: &str,
        number: impl Fn(&Value) -> Option<f64>,
    ) -> Result<Self, String> {
        let map = match value {
            None | Some(Value::Null) => return Ok(Pattern { key, entries: Vec::new() }),
            Some(Value::Object(map)) if map.len() <= ENTRIES_MAX => map,
            _ => return Err(format!("{key} is {}, not an object of at most {ENTRIES_MAX} entries", show(value))),
        };
        let entry = |(name, value): (&String, &Value)| {
            if name.len() > KEY_BYTES_MAX {
                return Err(format!("{key} has a key of {} bytes; at most {KEY_BYTES_MAX} are read", name.len()));
            }
            let number =
                number(value).ok_or_else(|| format!("{key} gives {} to {}, not {kind}", show(Some(value)), quoted(name)))?;
            Ok((name.clone(), number))
        };
        Ok(Pattern { key, entries: map.iter().map(entry).collect::<Result<_, _>>()? })
    }

    /// What the entries say of each of `names`, paths within the model: a key has to match the end of a path, from its start or a dot on.
    pub(super) fn values(&self, names: &[&str]) -> Result<Vec<Option<f64>>, String> {
        let mut values = vec![None; names.len()];
        // Keys come one after another, so that one at a time takes memory.
        for (name, number) in &self.entries {
            let refused = |e| format!("{} has the key {}: {e}", self.key, quoted(name));
            let regex = RegexBuilder::new(&format!(r"^(.*\.)?({name})$"))
                .backtrack_limit(10_000)
                .delegate_size_limit(PATTERN_MEMORY_MAX)
                .build()
                .map_err(refused)?;
            for (value, path) in values.iter_mut().zip(names).filter(|(value, _)| value.is_none()) {
                if regex.is_match(path).map_err(refused)? {
                    *value = Some(*number);
                }
            }
        }
        Ok(values)
    }

    /// The one number that the entries give a module, and `None` where they give it none: the `values` of all its paths, with `common` where no key matches.
    pub(super) fn of_module(&self, paths: &[String], values: &[Option<f64>], common: f64) -> Result<Option<f64>, String> {
        let first = values.first().copied().flatten().unwrap_or(common);
        let others = values.iter().map(|value| value.unwrap_or(common)).zip(paths);
        if let Some((other, path)) = others.into_iter().find(|(value, _)| *value != first) {
            let (key, one) = (self.key, paths.first().map_or("", String::as_str));
            return Err(format!(
                "{key} has {first} for {one} and {other} for {path}; supported: one for all layers and parts of a module"
            ));
        }
        Ok(values.iter().any(Option::is_some).then_some(first))
    }
}

fn quoted(name: &str) -> String {
    show(Some(&name.into()))
}
