//! Decides where a sample ends: at a token, or when its text contains a string.

use std::sync::Arc;

use crate::api::Stop;
use crate::datum::check_tokens;

use super::SamplerLimits;

/// Most stop tokens or strings of a request.
pub(crate) const STOPS_MAX: usize = 1024;
/// Longest stop string, in bytes.
pub(crate) const STOP_STRING_BYTES_MAX: usize = 4096;
/// Tokens without a complete character after which the text is taken as it is: no character has more bytes than tokens this many.
const INCOMPLETE_TOKENS_MAX: usize = 8;

/// Turns tokens into text, special tokens included; bytes that are not yet a whole character end in U+FFFD. `None` if it cannot.
pub type Decode = Arc<dyn Fn(&[u32]) -> Option<String> + Send + Sync>;

/// When the samples of a request end before their token limit.
pub(crate) enum StopRule {
    Tokens(Vec<u32>),
    Strings { strings: Vec<String>, longest_bytes: usize, decode: Decode },
}

/// How far the text of a sample has been searched.
#[derive(Default)]
pub(crate) struct StopProgress {
    /// End of the text that was searched, as far as a stop string can begin in it.
    tail: String,
    /// Tokens before this are not decoded again.
    context_start: usize,
    /// Tokens before this have been searched.
    searched: usize,
}

impl StopRule {
    /// # Errors
    /// A message for the user that names what is wrong.
    pub(crate) fn new(stop: &Stop, limits: &SamplerLimits) -> Result<Self, String> {
        let check_count = |count: usize| match count {
            0..=STOPS_MAX => Ok(()),
            _ => Err(format!("{count} stops are above the limit of {STOPS_MAX}")),
        };
        match stop {
            Stop::EndOfSequence => Ok(StopRule::Tokens(limits.eos_token_ids.clone())),
            Stop::Tokens(tokens) => {
                check_count(tokens.len())?;
                Ok(StopRule::Tokens(check_tokens("stop", tokens, limits.vocab_size)?))
            }
            Stop::Strings(strings) => {
                check_count(strings.len())?;
                if let Some(i) = strings.iter().position(|s| s.is_empty() || s.len() > STOP_STRING_BYTES_MAX) {
                    let bytes = strings[i].len();
                    return Err(format!("stop[{i}] has {bytes} bytes, not between 1 and {STOP_STRING_BYTES_MAX}"));
                }
                let Some(decode) = limits.decode.clone() else {
                    return Err("this model has no tokenizer, so that stop strings cannot be found; use token ids".into());
                };
                let longest_bytes = strings.iter().map(String::len).max().unwrap_or(0);
                Ok(StopRule::Strings { strings: strings.clone(), longest_bytes, decode })
            }
        }
    }

    /// Whether a sample ends with the last of `tokens`. To be asked after every token.
    pub(crate) fn ends(&self, tokens: &[u32], progress: &mut StopProgress) -> bool {
        match self {
            StopRule::Tokens(stops) => tokens.last().is_some_and(|last| stops.contains(last)),
            StopRule::Strings { strings, longest_bytes, decode } => {
                let Some(piece) = new_text(decode, tokens, progress) else { return false };
                progress.tail.push_str(&piece);
                let ends = strings.iter().any(|s| progress.tail.contains(s.as_str()));
                let mut cut = progress.tail.len().saturating_sub(longest_bytes.saturating_sub(1));
                while !progress.tail.is_char_boundary(cut) {
                    cut -= 1;
                }
                progress.tail.drain(..cut);
                ends
            }
        }
    }
}

/// The text that the tokens since the last call add, if it ends in a whole character. What a token adds depends on the one before it
/// (a leading space, a character cut in two), so the tokens of the previous call are decoded along.
fn new_text(decode: &Decode, tokens: &[u32], progress: &mut StopProgress) -> Option<String> {
    let known = decode(&tokens[progress.context_start..progress.searched])?;
    let all = decode(&tokens[progress.context_start..])?;
    let incomplete = all.ends_with(char::REPLACEMENT_CHARACTER) && tokens.len() - progress.searched < INCOMPLETE_TOKENS_MAX;
    if incomplete {
        return None;
    }
    let piece = all.get(known.len()..).unwrap_or_default().to_string();
    progress.context_start = progress.searched;
    progress.searched = tokens.len();
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens are bytes.
    fn limits() -> SamplerLimits {
        let decode: Decode = Arc::new(|tokens| {
            let bytes: Vec<u8> = tokens.iter().map(|&t| t as u8).collect();
            Some(String::from_utf8_lossy(&bytes).into_owned())
        });
        SamplerLimits { vocab_size: 256, max_context_tokens: 100, eos_token_ids: vec![2], decode: Some(decode) }
    }

    /// Number of tokens after which `text` ends under `stop`.
    fn end_of(text: &str, stop: Stop) -> Option<usize> {
        let rule = StopRule::new(&stop, &limits()).unwrap();
        let (mut progress, tokens) = (StopProgress::default(), text.bytes().map(u32::from).collect::<Vec<_>>());
        (1..=tokens.len()).find(|&n| rule.ends(&tokens[..n], &mut progress))
    }

    fn strings(list: &[&str]) -> Stop {
        Stop::Strings(list.iter().map(|s| s.to_string()).collect())
    }

    #[test]
    fn a_string_ends_the_sample_with_the_token_that_completes_it() {
        assert_eq!(end_of("hello, world", strings(&["lo,", "world"])), Some(6));
        assert_eq!(end_of("hello", strings(&["xyz"])), None);
        assert_eq!(end_of("aab", strings(&["ab"])), Some(3), "a match may begin within a failed one");
    }

    #[test]
    fn a_string_of_characters_of_several_bytes_is_found() {
        assert_eq!(end_of("aé→b", strings(&["é→"])), Some(6));
        assert_eq!(end_of("日本", strings(&["本"])), Some(6));
    }

    #[test]
    fn end_of_sequence_is_a_stop_only_if_no_list_is_given() {
        assert_eq!(end_of("ab\u{2}c", Stop::EndOfSequence), Some(3));
        assert_eq!(end_of("ab\u{2}c", Stop::Tokens(vec![])), None);
        assert_eq!(end_of("ab\u{2}c", Stop::Tokens(vec!['c' as i64])), Some(4));
    }

    #[test]
    fn impossible_stops_are_refused() {
        let refused = |stop| StopRule::new(&stop, &limits()).err().unwrap();
        assert!(refused(Stop::Tokens(vec![1, 256])).contains("stop[1] is 256"));
        assert!(refused(strings(&["a", ""])).contains("stop[1] has 0 bytes"));
        let no_tokenizer = SamplerLimits { decode: None, ..limits() };
        assert!(StopRule::new(&strings(&["a"]), &no_tokenizer).err().unwrap().contains("no tokenizer"));
    }
}
