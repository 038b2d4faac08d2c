//! What is said of the hub by the environment, which is read as Python's `huggingface_hub` reads it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PUBLIC_ENDPOINT: &str = "https://huggingface.co";

/// Where and how to look for models.
#[derive(Clone)]
pub struct HubOptions {
    /// Base URL of the hub.
    pub endpoint: String,
    /// Access token; `None`: none is sent.
    pub token: Option<String>,
    /// Directory of the cache.
    pub cache_dir: PathBuf,
    /// The variable that says to stay off the network, if one does.
    pub offline: Option<&'static str>,
    /// How long to wait for the hub, and how often.
    pub patience: Patience,
}

/// How long to wait for a server, and how often. What arrives may take as long as it likes.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The most that may pass until there is a connection, until it is answered, and between two arrivals of bytes.
    pub silence: Duration,
    /// Pauses before trying again what failed and may pass; when there are no more, it is an error.
    pub pauses: &'static [Duration],
}

impl Default for Patience {
    fn default() -> Self {
        const PAUSES: [Duration; 4] =
            [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9), Duration::from_secs(27)];
        Patience { silence: Duration::from_secs(30), pauses: &PAUSES }
    }
}

impl HubOptions {
    /// What the environment says.
    pub fn from_env() -> Self {
        let home = path_variable("HF_HOME").unwrap_or_else(|| {
            let cache = path_variable("XDG_CACHE_HOME");
            cache.unwrap_or_else(|| env::home_dir().unwrap_or_default().join(".cache")).join("huggingface")
        });
        let cache_dir = path_variable("HF_HUB_CACHE").or_else(|| path_variable("HUGGINGFACE_HUB_CACHE"));
        HubOptions {
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_ENDPOINT.into()),
            token: token(&home),
            cache_dir: cache_dir.unwrap_or_else(|| home.join("hub")),
            offline: offline(variable),
            patience: Patience::default(),
        }
    }
}

/// Which variable says to stay off the network: the first that has a value decides.
pub(super) fn offline(value_of: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let (name, value) =
        ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().find_map(|name| Some((name, value_of(name)?)))?;
    is_true(&value).then_some(name)
}

/// A variable of the environment that is set and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn path_variable(name: &str) -> Option<PathBuf> {
    Some(expanded(&variable(name)?, &env::home_dir().unwrap_or_default(), |name| env::var(name).ok()))
}

/// `HF_TOKEN`, or the token that a login stored.
fn token(home: &Path) -> Option<String> {
    if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value)) {
        return None;
    }
    let stored = || fs::read_to_string(path_variable("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"))).ok();
    let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(stored)?;
    in_one_line(&token)
}

/// A token without the line ends that a file or a paste left in it, for which a header has no room; `None` if nothing is left.
pub(super) fn in_one_line(token: &str) -> Option<String> {
    let token: String = token.trim().chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    (!token.is_empty()).then_some(token)
}

/// Values of flags that `huggingface_hub` takes for true.
pub(super) fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

/// A path with the home directory for `~` and values for `$NAME` and `${NAME}`; as in Python, a variable that is not set stays as it is written.
pub(super) fn expanded(text: &str, home: &Path, value_of: impl Fn(&str) -> Option<String>) -> PathBuf {
    let text = match text.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{}{rest}", home.display()),
        _ => text.to_string(),
    };
    let (mut path, mut rest) = (String::new(), &text[..]);
    while let Some((before, after)) = rest.split_once('$') {
        path.push_str(before);
        let word = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        let (name, end) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, _)) => (name, name.len() + 2),
            None => (&after[..word], word),
        };
        match value_of(name).filter(|_| end > 0) {
            Some(value) => path.push_str(&value),
            None => path.extend(["$", &after[..end]]),
        }
        rest = &after[end..];
    }
    (path + rest).into()
}
