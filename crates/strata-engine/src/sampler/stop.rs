//! Decides where a sample ends: at a token, or when its text contains a string.

use std::sync::Arc;

use strata_model::{SpecialTokens, StreamDecoder, Tokenizer};

use crate::api::Stop;
use crate::datum::check_tokens;
use crate::limits::{STOP_BYTES_MAX, STOPS_MAX};

use super::SamplerLimits;

/// When the samples of a request end before their token limit.
pub(crate) enum StopRule {
    Tokens(Vec<u32>),
    Strings { strings: Vec<String>, longest_bytes: usize, tokenizer: Arc<Tokenizer> },
}

/// How far the text of a sample has been searched.
pub(crate) struct StopProgress {
    decoder: StreamDecoder,
    /// Bytes of the text before which no stop string begins.
    searched_bytes: usize,
}

impl Default for StopProgress {
    /// Special tokens are text here: a stop string may be one.
    fn default() -> Self {
        StopProgress { decoder: StreamDecoder::new(SpecialTokens::Keep), searched_bytes: 0 }
    }
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
                if let Some(i) = strings.iter().position(|s| s.is_empty() || s.len() > STOP_BYTES_MAX) {
                    let bytes = strings[i].len();
                    return Err(format!("stop[{i}] has {bytes} bytes, not between 1 and {STOP_BYTES_MAX}"));
                }
                let Some(tokenizer) = &limits.tokenizer else {
                    return Err("this model has no tokenizer, so that stop strings cannot be found; use token ids".into());
                };
                // It has been read where requests are taken.
                let tokenizer = tokenizer.wait()?;
                let longest_bytes = strings.iter().map(String::len).max().unwrap_or(0);
                Ok(StopRule::Strings { strings: strings.clone(), longest_bytes, tokenizer })
            }
        }
    }

    /// Whether a sample ends with the last of `tokens`. To be asked after every token.
    pub(crate) fn ends(&self, tokens: &[u32], progress: &mut StopProgress) -> bool {
        match self {
            StopRule::Tokens(stops) => tokens.last().is_some_and(|last| stops.contains(last)),
            StopRule::Strings { strings, longest_bytes, tokenizer } => {
                let Some(&last) = tokens.last() else { return false };
                // A token that has no text ends nothing.
                if progress.decoder.push(tokenizer, last).is_err() {
                    return false;
                }
                // A token may complete a string and begin a character of several bytes.
                let waiting = progress.decoder.waiting(tokenizer).unwrap_or_default();
                let text = progress.decoder.text();
                let rest = [&text[progress.searched_bytes..], &waiting].concat();
                let ends = strings.iter().any(|s| rest.contains(s.as_str()));
                let mut next = (text.len() + 1).saturating_sub(*longest_bytes).max(progress.searched_bytes);
                while !text.is_char_boundary(next) {
                    next -= 1;
                }
                progress.searched_bytes = next;
                ends
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use strata_model::ModelSource;

    use super::*;
    use crate::sampler::Room;

    fn limits() -> SamplerLimits {
        let tokenizer = Tokenizer::load(&ModelSource::Embedded).unwrap();
        SamplerLimits {
            vocab_size: 272,
            max_context_tokens: 100,
            short_sequence_max: usize::MAX,
            eos_token_ids: vec![2],
            page_tokens: 64,
            cache: Room { pages: 10, states: 0 },
            tokenizer: Some(tokenizer.into()),
            eyes: None,
        }
    }

    /// Number of tokens (here of bytes) after which `text` ends under `stop`.
    fn end_of(text: &str, stop: Stop) -> Option<usize> {
        let limits = limits();
        let rule = StopRule::new(&stop, &limits).unwrap();
        let tokens = limits.tokenizer.unwrap().wait().unwrap().encode(text).unwrap();
        let mut progress = StopProgress::default();
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
    fn a_string_is_found_in_a_token_that_goes_on_with_part_of_a_character() {
        // Bytes as GPT-2 writes them: `a`, `.` with the first two bytes of a quotation mark, and its third.
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "truncation": null, "padding": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "model": {"type": "BPE", "vocab": {"a": 0, ".\u{e2}\u{122}": 1, "\u{13f}": 2}, "merges": []}
        });
        let tokenizer = Tokenizer::from_json(&tokenizer.to_string()).unwrap();
        assert_eq!(tokenizer.decode(&[0, 1, 2], SpecialTokens::Keep).unwrap(), "a.\u{201d}");
        let limits = SamplerLimits { tokenizer: Some(tokenizer.into()), ..limits() };
        let end = |stop: &str| {
            let rule = StopRule::new(&strings(&[stop]), &limits).unwrap();
            let mut progress = StopProgress::default();
            (1..=3).find(|&n| rule.ends(&[0, 1, 2][..n], &mut progress))
        };
        assert_eq!(
            [end("a"), end("."), end("a."), end("\u{201d}"), end(".\u{201d}")],
            [Some(1), Some(2), Some(2), Some(3), Some(3)]
        );
        assert_eq!(end("\u{fffd}"), None, "what is not whole yet is no text");
    }

    #[test]
    fn end_of_sequence_is_a_stop_only_if_no_list_is_given() {
        assert_eq!(end_of("ab<|im_end|>c", Stop::EndOfSequence), Some(3));
        assert_eq!(end_of("ab<|im_end|>c", Stop::Tokens(vec![])), None);
        assert_eq!(end_of("ab<|im_end|>c", Stop::Tokens(vec![69])), Some(4));
    }

    #[test]
    fn impossible_stops_are_refused() {
        let refused = |stop| StopRule::new(&stop, &limits()).err().unwrap();
        assert!(refused(Stop::Tokens(vec![1, 272])).contains("stop[1] is 272"));
        assert!(refused(strings(&["a", ""])).contains("stop[1] has 0 bytes"));
        let no_tokenizer = SamplerLimits { tokenizer: None, ..limits() };
        assert!(StopRule::new(&strings(&["a"]), &no_tokenizer).err().unwrap().contains("no tokenizer"));
    }
}
