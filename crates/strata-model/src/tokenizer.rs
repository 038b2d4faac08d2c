//! Text to tokens and back: `tokenizer.json` through the `tokenizers` crate, and decoding of a growing sequence.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use tokenizers::models::bpe::BPE;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use crate::{Error, ModelConfig, ModelSource, Result};

/// The longest text that is encoded at once; far above any context.
const TEXT_BYTES_MAX: usize = 64 << 20;

/// What to do with special tokens such as `<|im_end|>` in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Write them out.
    Keep,
    /// Leave them out.
    Skip,
}

/// The common kind of tokenizer, by merges of pairs. Where the library is not told the kind it holds the whole file three times over as JSON before it looks.
type OfPairs = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads the tokenizer of a model.
    ///
    /// # Errors
    /// If `tokenizer.json` cannot be read, or is not one.
    pub fn load(source: &ModelSource) -> Result<Self> {
        Self::from_json(&source.tokenizer_json()?)
    }

    /// Reads the tokenizer of a model; `None` if it has no `tokenizer.json`.
    ///
    /// # Errors
    /// If `tokenizer.json` cannot be read, or is not one.
    pub fn load_if_exists(source: &ModelSource) -> Result<Option<Self>> {
        source.tokenizer_json_if_exists()?.map(|json| Self::from_json(&json)).transpose()
    }

    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// If it is not one.
    pub fn from_json(json: &str) -> Result<Self> {
        // The library answers some malformed files with a panic.
        let parsed = catch_unwind(|| match serde_json::from_str::<OfPairs>(json) {
            Ok(of_pairs) => Ok(of_pairs.into()),
            Err(_) => json.parse::<tokenizers::Tokenizer>(),
        });
        let parsed = parsed.map_err(|_| Error::Tokenizer("tokenizer.json: the file contradicts itself".into()))?;
        let mut inner = parsed.map_err(|e| error("tokenizer.json", e))?;
        // Files can carry the truncation and padding of their training; transformers leaves both off unless a call asks for them.
        inner.with_truncation(None).map_err(|e| error("tokenizer.json", e))?;
        inner.with_padding(None);
        Ok(Tokenizer { inner })
    }

    /// Refuses a tokenizer that gives out tokens which a model of this configuration does not have. The model may have more: vocabularies are
    /// often padded.
    ///
    /// # Errors
    /// Names the token, its id and the size of the vocabulary.
    pub fn check_against(&self, config: &ModelConfig) -> Result<()> {
        let outside = |id: u32| id as usize >= config.vocab_size;
        let refuse = |token: &str, id: u32| {
            let token: String = token.chars().take(100).collect();
            Err(Error::Tokenizer(format!(
                "token {token:?} has id {id}, which is not below the vocab_size {} of config.json: the tokenizer is not this model's",
                config.vocab_size
            )))
        };
        if let Some((token, id)) =
            self.inner.get_vocab(true).into_iter().filter(|&(_, id)| outside(id)).min_by_key(|&(_, id)| id)
        {
            return refuse(&token, id);
        }
        // Tokens that are added around a text have ids of their own in the file.
        match self.encode_with_special_tokens("")?.into_iter().find(|&id| outside(id)) {
            Some(id) => refuse("(added around every text)", id),
            None => Ok(()),
        }
    }

    /// Tokens of a text as it stands: special tokens written out in it are recognised, none are added. For rendered chat templates.
    ///
    /// # Errors
    /// If the text is too long, or the tokenizer cannot encode it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_as(text, false)
    }

    /// Tokens of a text with those around it that the tokenizer adds to a bare text, such as a beginning-of-sequence token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_as(text, true)
    }

    fn encode_as(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(Error::Tokenizer(format!("a text of {} bytes is longer than {TEXT_BYTES_MAX}", text.len())));
        }
        let encoding = self.inner.encode_fast(text, add_special_tokens).map_err(|e| error("encode", e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens. Ids without a token, such as those of padded vocabulary rows, have no text.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32], special_tokens: SpecialTokens) -> Result<String> {
        self.inner.decode(tokens, special_tokens == SpecialTokens::Skip).map_err(|e| error("decode", e))
    }

    /// The id of a token by its text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of a token in the vocabulary, which for byte-level tokenizers is not the text it decodes to.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Number of tokens, added ones included. The model's vocabulary may be larger: it is often padded.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// A tokenizer that may still be read: one of 150,000 tokens takes a second, in which a server of it serves whoever does not need it. Clones are of one.
#[derive(Clone)]
pub struct LateTokenizer(Arc<OnceLock<Result<Arc<Tokenizer>, String>>>);

impl LateTokenizer {
    /// One that a thread of its own gets from `read`. It begins with `begin`, such as a lower priority.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn read(
        begin: impl FnOnce() + Send + 'static,
        read: impl FnOnce() -> Result<Tokenizer> + Send + 'static,
    ) -> std::io::Result<Self> {
        let late = LateTokenizer(Arc::new(OnceLock::new()));
        let to = late.clone();
        std::thread::Builder::new().name("strata-tokens".into()).spawn(move || {
            begin();
            // Whoever waits is answered, come what may.
            let read = catch_unwind(AssertUnwindSafe(read));
            let read = read.unwrap_or_else(|panic| Err(Error::Tokenizer(format!("tokenizer.json: {}", text_of(&*panic)))));
            to.0.get_or_init(|| read.map(Arc::new).map_err(|error| error.to_string()));
        })?;
        Ok(late)
    }

    /// The tokenizer, once it has been read.
    ///
    /// # Errors
    /// Why it could not be.
    pub fn wait(&self) -> Result<Arc<Tokenizer>, String> {
        self.0.wait().clone()
    }

    /// The same if it need not be waited for.
    pub fn now(&self) -> Option<Result<Arc<Tokenizer>, String>> {
        self.0.get().cloned()
    }
}

impl From<Tokenizer> for LateTokenizer {
    fn from(tokenizer: Tokenizer) -> Self {
        LateTokenizer(Arc::new(OnceLock::from(Ok(Arc::new(tokenizer)))))
    }
}

/// What a thread said when it failed.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it cannot be read")
}

fn error(what: &str, source: tokenizers::Error) -> Error {
    Error::Tokenizer(format!("{what}: {source}"))
}

/// Tokens after which an undecodable end of the text cannot become a character any more: UTF-8 has at most four bytes.
const CHARACTER_TOKENS_MAX: usize = 4;
/// Tokens without settled text after which the decoder stops waiting for a better end, so that its work per token is bounded.
const PENDING_TOKENS_MAX: usize = 16;

/// Decodes a sequence that grows by one token at a time. Text is given out once further tokens cannot change it: a
/// character whose bytes are spread over several tokens appears with the last of them.
///
/// Work per token is constant, whatever the tokens are. The sum of all that is given out is the text of the whole sequence.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    special_tokens: SpecialTokens,
    text: String,
    /// Tokens whose text is out already; decoders may look back at them (a leading space depends on what is before it).
    context: Vec<u32>,
    /// Tokens whose text is not out yet.
    pending: Vec<u32>,
}

impl StreamDecoder {
    /// A decoder of an empty sequence.
    pub fn new(special_tokens: SpecialTokens) -> Self {
        StreamDecoder { special_tokens, text: String::new(), context: Vec::new(), pending: Vec::new() }
    }

    /// The text that is settled so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Adds a token; returns the text that it settled, which may be none.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<&str> {
        self.pending.push(token);
        let start = self.text.len();
        let new = self.pending_text(tokenizer, self.pending.len())?;
        if !new.is_empty() && !new.ends_with(char::REPLACEMENT_CHARACTER) {
            self.text.push_str(&new);
            self.context = std::mem::take(&mut self.pending);
        } else if self.pending.len() >= PENDING_TOKENS_MAX {
            self.settle_front(tokenizer, &new)?;
        }
        Ok(&self.text[start..])
    }

    /// The text that waits for more tokens, but for a character at its end of which some bytes are missing.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn waiting(&self, tokenizer: &Tokenizer) -> Result<String> {
        if self.pending.is_empty() {
            return Ok(String::new());
        }
        let mut text = self.pending_text(tokenizer, self.pending.len())?;
        text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        Ok(text)
    }

    /// Ends the sequence; returns the text that was waiting for more tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<&str> {
        let start = self.text.len();
        let rest = self.pending_text(tokenizer, self.pending.len())?;
        self.text.push_str(&rest);
        self.context = std::mem::take(&mut self.pending);
        Ok(&self.text[start..])
    }

    /// Gives out the text of all but the last few pending tokens, unless those still change it.
    fn settle_front(&mut self, tokenizer: &Tokenizer, new: &str) -> Result<()> {
        let front_tokens = self.pending.len() - CHARACTER_TOKENS_MAX;
        let front = self.pending_text(tokenizer, front_tokens)?;
        if new.starts_with(&front) || self.pending.len() >= 2 * PENDING_TOKENS_MAX {
            self.text.push_str(&front);
            let settled = self.pending.drain(..front_tokens).collect();
            if !front.is_empty() {
                self.context = settled;
            }
        }
        Ok(())
    }

    /// What the first `count` pending tokens add to the text of the context.
    fn pending_text(&self, tokenizer: &Tokenizer, count: usize) -> Result<String> {
        let context = tokenizer.decode(&self.context, self.special_tokens)?;
        let tokens = [&self.context[..], &self.pending[..count]].concat();
        let mut all = tokenizer.decode(&tokens, self.special_tokens)?;
        // Where tokens change the text of their context (as raw bytes do for some decoders), what was given out stays.
        let mut known = context.len().min(all.len());
        while !all.is_char_boundary(known) {
            known -= 1;
        }
        Ok(all.split_off(known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Tokenizer {
        Tokenizer::load(&ModelSource::Embedded).unwrap()
    }

    /// A sentencepiece-like tokenizer: words begin with `▁`, whatever is unknown falls apart into bytes.
    fn byte_fallback() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for (id, token) in ["<unk>", "▁Hello", "▁world", "▁"].iter().enumerate() {
            vocab.insert(token.to_string(), id.into());
        }
        for byte in 0..256 {
            vocab.insert(format!("<0x{byte:02X}>"), (4 + byte).into());
        }
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": null,
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            ]},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"}
        });
        Tokenizer::from_json(&json.to_string()).unwrap()
    }

    /// Streams tokens and checks every step: nothing given out is wrong, and everything is given out in the end.
    fn stream(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
        let whole = tokenizer.decode(tokens, SpecialTokens::Keep).unwrap();
        let mut decoder = StreamDecoder::new(SpecialTokens::Keep);
        let mut steps = Vec::new();
        for &token in tokens {
            steps.push(decoder.push(tokenizer, token).unwrap().to_string());
            assert!(whole.starts_with(decoder.text()), "{:?} does not begin {whole:?}", decoder.text());
            assert!(decoder.context.len() + decoder.pending.len() <= 4 * PENDING_TOKENS_MAX);
        }
        steps.push(decoder.finish(tokenizer).unwrap().to_string());
        assert_eq!(decoder.text(), whole);
        assert_eq!(steps.concat(), whole);
        steps
    }

    #[test]
    fn text_survives_encoding_and_decoding() {
        let tokenizer = tiny();
        for text in ["Reverse: planet", "zażółć gęślą jaźń 🦀", "", " two  spaces ", "<|im_start|>user\nhi<|im_end|>"]
        {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&tokens, SpecialTokens::Keep).unwrap(), text);
        }
    }

    #[test]
    fn special_tokens_are_single_and_can_be_skipped() {
        let tokenizer = tiny();
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        assert_eq!(end, 2);
        assert_eq!(tokenizer.id_to_token(2).unwrap(), "<|im_end|>");
        assert_eq!(tokenizer.encode("<|im_end|>").unwrap(), [end]);
        let tokens = tokenizer.encode("a<|im_end|>").unwrap();
        assert_eq!(tokenizer.decode(&tokens, SpecialTokens::Skip).unwrap(), "a");
        assert_eq!(tokenizer.vocab_size(), 259);
        assert_eq!(tokenizer.decode(&[270, 4_000_000_000], SpecialTokens::Keep).unwrap(), "");
    }

    #[test]
    fn whoever_waits_for_a_tokenizer_is_answered() {
        let (go_on, held) = std::sync::mpsc::channel::<()>();
        let late = LateTokenizer::read(
            || (),
            move || {
                held.recv().unwrap();
                Ok(tiny())
            },
        );
        let late = late.unwrap();
        assert!(late.now().is_none());
        let waiting = std::thread::spawn({
            let late = late.clone();
            move || late.wait().unwrap().vocab_size()
        });
        go_on.send(()).unwrap();
        assert_eq!((waiting.join().unwrap(), late.now().unwrap().unwrap().vocab_size()), (259, 259));

        let failed = |read: fn() -> Result<Tokenizer>| LateTokenizer::read(|| (), read).unwrap().wait().err().unwrap();
        assert!(failed(|| Tokenizer::from_json("{}")).contains("tokenizer.json"));
        assert!(failed(|| panic!("it is {}", "upside down")).contains("upside down"));
    }

    #[test]
    fn tokenizers_of_every_kind_are_read() {
        let merged = serde_json::json!({"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]});
        let with = |key: &str, value: serde_json::Value| {
            let mut model = merged.clone();
            model[key] = value;
            model
        };
        let models = [
            merged.clone(),
            with("type", "BPE".into()),
            with("merges", serde_json::json!(["a b"])),
            // A field that the library does not know.
            with("more", serde_json::json!({"of": ["it"]})),
            serde_json::json!({"type": "WordLevel", "vocab": {"ab": 2, "?": 0}, "unk_token": "?"}),
            serde_json::json!({"type": "WordPiece", "vocab": {"ab": 2, "?": 0}, "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}),
            serde_json::json!({"type": "Unigram", "vocab": [["?", 0.0], ["a", -9.0], ["ab", -1.0]], "unk_id": 0}),
        ];
        for model in models {
            let json = serde_json::json!({"version": "1.0", "added_tokens": [], "model": model}).to_string();
            assert_eq!(Tokenizer::from_json(&json).unwrap().encode("ab").unwrap(), [2], "{json}");
        }
    }

    #[test]
    fn truncation_in_the_file_is_ignored() {
        assert!(byte_fallback().encode("abcdef").unwrap().len() > 2);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        for json in ["", "{}", "[]", "{\"model\": 5}"] {
            assert!(Tokenizer::from_json(json).err().unwrap().to_string().contains("tokenizer.json"));
        }
    }

    #[test]
    fn a_tokenizer_with_more_tokens_than_the_model_is_refused() {
        let config = ModelSource::Embedded.config().unwrap();
        tiny().check_against(&config).unwrap();
        let fits = ModelConfig { vocab_size: 259, ..config.clone() };
        tiny().check_against(&fits).unwrap();
        let error = tiny().check_against(&ModelConfig { vocab_size: 258, ..config.clone() }).unwrap_err().to_string();
        assert!(error.contains("has id 258") && error.contains("vocab_size 258"), "{error}");
        // A template that puts an id of its own around every text.
        let mut json: serde_json::Value = serde_json::from_str(&ModelSource::Embedded.tokenizer_json().unwrap()).unwrap();
        json["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<x>": {"id": "<x>", "ids": [4_000_000_000u32], "tokens": ["<x>"]}}
        });
        let error = Tokenizer::from_json(&json.to_string()).unwrap().check_against(&config).unwrap_err().to_string();
        assert!(error.contains("4000000000"), "{error}");
    }

    #[test]
    fn a_malformed_tokenizer_is_an_error_and_an_absent_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Directory(dir.path().into());
        assert!(Tokenizer::load_if_exists(&source).unwrap().is_none());
        for text in [&b"{\"model\": {}}"[..], b"", b"\xff\xfe"] {
            std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
            let error = Tokenizer::load_if_exists(&source).err().unwrap().to_string();
            assert!(error.contains("tokenizer.json"), "{error}");
        }
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let tokenizer = tiny();
        let tokens = tokenizer.encode("aé🦀b").unwrap();
        assert_eq!(stream(&tokenizer, &tokens), ["a", "", "é", "", "", "", "🦀", "b", ""]);
    }

    #[test]
    fn any_bytes_stream_to_the_text_of_the_whole() {
        let tokenizer = tiny();
        let mut state = 1u64;
        for length in [1, 3, 20, 200] {
            for _ in 0..200 {
                let tokens: Vec<u32> = (0..length)
                    .map(|_| {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        (state >> 33) as u32 % 272
                    })
                    .collect();
                stream(&tokenizer, &tokens);
            }
        }
    }

    #[test]
    fn undecodable_bytes_do_not_pile_up() {
        let tokenizer = tiny();
        let continuation = tokenizer.encode("é").unwrap()[1];
        let mut tokens = vec![continuation; 500];
        tokens.extend(tokenizer.encode("é!").unwrap());
        let steps = stream(&tokenizer, &tokens);
        assert!(steps[..500].concat().len() > 400 * 3, "replacement characters come out while more bytes come in");
    }

    #[test]
    fn tokens_without_text_do_not_pile_up() {
        let tokenizer = tiny();
        let mut tokens = vec![270; 500];
        tokens.extend(tokenizer.encode("hi").unwrap());
        stream(&tokenizer, &tokens);
    }

    #[test]
    fn leading_spaces_depend_on_the_start_of_the_whole_only() {
        let tokenizer = byte_fallback();
        assert_eq!(stream(&tokenizer, &[1, 2, 2]), ["Hello", " world", " world", ""]);
        let crab = "🦀".bytes().map(|b| 4 + u32::from(b));
        let tokens: Vec<u32> = [1].into_iter().chain(crab).chain([2]).collect();
        assert_eq!(stream(&tokenizer, &tokens), ["Hello", "", "", "", "🦀", " world", ""]);
    }

    #[test]
    fn text_that_waits_comes_out_at_the_end() {
        let tokenizer = tiny();
        let first_byte = tokenizer.encode("é").unwrap()[0];
        assert_eq!(stream(&tokenizer, &[first_byte]), ["", "\u{fffd}"]);
    }
}
