//! Names from outside. Those that become parts of paths are checked once, here, before they touch the file system; those that are shown in an
//! error are cut.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::error::{ApiError, ApiResult};
use crate::limits;

/// The kinds of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointKind {
    /// Adapter and optimizer state.
    Weights,
    /// The adapter alone.
    SamplerWeights,
    /// The adapter alone, to be downloaded; encrypted, where its user gave keys.
    ExternalWeights,
}

impl CheckpointKind {
    /// All kinds.
    pub const ALL: [CheckpointKind; 3] =
        [CheckpointKind::Weights, CheckpointKind::SamplerWeights, CheckpointKind::ExternalWeights];

    /// Its segment in a path.
    pub fn segment(self) -> &'static str {
        match self {
            CheckpointKind::Weights => "weights",
            CheckpointKind::SamplerWeights => "sampler_weights",
            CheckpointKind::ExternalWeights => "external_weights",
        }
    }

    /// The `checkpoint_type` that the API reports.
    pub fn checkpoint_type(self) -> &'static str {
        match self {
            CheckpointKind::Weights => "training",
            CheckpointKind::SamplerWeights => "sampler",
            CheckpointKind::ExternalWeights => "external",
        }
    }

    fn parse(segment: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.segment() == segment)
    }
}

/// What names a checkpoint: `tinker://{run}/{kind}/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CheckpointId {
    /// The model that was saved.
    pub run: String,
    /// What was saved of it.
    pub kind: CheckpointKind,
    /// The name the user gave.
    pub name: String,
}

impl CheckpointId {
    /// Puts an id together from the segments of a request path.
    ///
    /// # Errors
    /// If a segment is not a kind or not a name.
    pub fn new(run: &str, kind: &str, name: &str) -> ApiResult<Self> {
        check_name("training run id", run)?;
        check_name("checkpoint name", name)?;
        let Some(kind) = CheckpointKind::parse(kind) else {
            return Err(ApiError::bad(format!(
                "checkpoint kind {:?} is not one of weights, sampler_weights, external_weights",
                shown(kind)
            )));
        };
        Ok(CheckpointId { run: run.into(), kind, name: name.into() })
    }

    /// Parses a `tinker://` path.
    ///
    /// # Errors
    /// If it does not have the three segments of a checkpoint, or one of them is not allowed.
    pub fn parse(path: &str) -> ApiResult<Self> {
        if path.len() > limits::PATH_BYTES_MAX {
            return Err(ApiError::bad(format!(
                "checkpoint path of {} bytes is above the limit of {}",
                path.len(),
                limits::PATH_BYTES_MAX
            )));
        }
        let malformed =
            || ApiError::bad(format!("{:?} is not a checkpoint path such as tinker://RUN/weights/NAME", shown(path)));
        let segments: Vec<&str> = path.strip_prefix("tinker://").ok_or_else(malformed)?.split('/').collect();
        let [run, kind, name] = segments[..] else { return Err(malformed()) };
        Self::new(run, kind, name)
    }

    /// Where its files are below a directory of checkpoints.
    pub fn dir_in(&self, checkpoints_dir: &Path) -> PathBuf {
        checkpoints_dir.join(&self.run).join(self.kind.segment()).join(&self.name)
    }

    /// Its `tinker://` path.
    pub fn tinker_path(&self) -> String {
        format!("tinker://{}/{}/{}", self.run, self.kind.segment(), self.name)
    }
}

/// Refuses names that could leave their directory or that are no names at all.
///
/// # Errors
/// If `name` is empty, too long, starts with a dot, or has characters other than letters, digits, `.`, `_`, `:` and `-`.
pub fn check_name(what: &str, name: &str) -> ApiResult<()> {
    if name.is_empty() || name.len() > limits::NAME_BYTES_MAX {
        return Err(ApiError::bad(format!(
            "{what} has {} bytes; it needs between 1 and {}",
            name.len(),
            limits::NAME_BYTES_MAX
        )));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':' | '-');
    if name.starts_with('.') || !name.chars().all(allowed) {
        return Err(ApiError::bad(format!(
            "{what} {:?} may only have letters, digits, '.', '_', ':' and '-', and must not start with '.'",
            shown(name)
        )));
    }
    Ok(())
}

/// A text from outside as an error shows it.
pub fn shown(text: &str) -> Cow<'_, str> {
    cut(text, limits::SHOWN_CHARS_MAX)
}

/// At most `chars_max` characters of a text, and a sign that there were more.
pub fn cut(text: &str, chars_max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_survive_a_round_trip() {
        let path = "tinker://3fa:train:0/sampler_weights/step-10.final";
        assert_eq!(CheckpointId::parse(path).unwrap().tinker_path(), path);
    }

    #[test]
    fn texts_are_shown_cut_to_a_length() {
        assert_eq!(shown("abc"), "abc");
        assert_eq!(shown(&"é".repeat(128)), "é".repeat(128));
        assert_eq!(shown(&"é".repeat(129)), format!("{}…", "é".repeat(128)));
    }

    #[test]
    fn names_that_leave_their_directory_are_refused() {
        for name in ["..", ".", "a/b", "", ".hidden", "a\\b", "a\0b", "é", &"x".repeat(201)] {
            assert!(check_name("checkpoint name", name).is_err(), "{name:?}");
        }
        for path in [
            "tinker://a/weights",
            "tinker://a/other/b",
            "file://a/weights/b",
            "tinker://../weights/b",
            "tinker://a/weights/b/c",
        ] {
            assert!(CheckpointId::parse(path).is_err(), "{path:?}");
        }
    }
}
