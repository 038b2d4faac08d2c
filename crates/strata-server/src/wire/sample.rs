//! The JSON body of `asample`, checked against everything that can be known without the model.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use strata_engine::api;

use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::wire::budget::Budget;
use crate::wire::input::{Asset, Input, ModelInput};
use crate::wire::json::{Id, TensorData, at_most, null_is_default, seed};

/// Body of `asample`.
#[derive(Debug, Deserialize)]
pub struct Sample {
    /// Number of sequences.
    #[serde(default)]
    num_samples: Option<usize>,
    /// The prompt.
    prompt: ModelInput,
    /// How to sample.
    #[serde(default, deserialize_with = "null_is_default")]
    sampling_params: SamplingParams,
    /// What to sample from.
    #[serde(default)]
    pub sampling_session_id: Option<Id>,
    /// The number of the request within its sampling session.
    #[serde(default)]
    pub seq_id: Option<u64>,
    #[serde(default, deserialize_with = "null_is_default")]
    prompt_logprobs: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    topk_prompt_logprobs: usize,
    #[serde(default, deserialize_with = "null_is_default")]
    topk_sample_logprobs: usize,
    #[serde(default)]
    prompt_logprobs_last_n: Option<usize>,
    #[serde(default)]
    target_prompt_logprobs: Option<TensorData>,
    #[serde(default, deserialize_with = "null_is_default")]
    prompt_alt_tokens_k: i64,
    /// Whether what is sampled is to be remembered for `stable_reinforce`.
    #[serde(default, deserialize_with = "null_is_default")]
    pub record_stability_info: bool,
}

#[derive(Debug, Default, Deserialize)]
struct SamplingParams {
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    seed: Option<serde_json::Number>,
    #[serde(default)]
    stop: Option<StopSpec>,
    #[serde(default)]
    temperature: Option<f64>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    top_p: Option<f64>,
}

/// What `stop` may be. Read by hand: serde's untagged enums put the whole value aside before they look at it.
#[derive(Debug)]
enum StopSpec {
    Tokens(Vec<i64>),
    Strings(Vec<String>),
}

impl<'de> Deserialize<'de> for StopSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopVisitor;

        impl<'de> Visitor<'de> for StopVisitor {
            type Value = StopSpec;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a list of strings or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<StopSpec, E> {
                Ok(StopSpec::Strings(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<StopSpec, A::Error> {
                let (mut tokens, mut texts) = (Vec::new(), Vec::new());
                while let Some(stop) = access.next_element()? {
                    match stop {
                        StopItem::Token(token) => tokens.push(token),
                        StopItem::Text(text) => texts.push(text),
                    }
                    if tokens.len().max(texts.len()) > limits::STOPS_MAX {
                        return Err(A::Error::custom(format!("stop has more than {} entries", limits::STOPS_MAX)));
                    }
                }
                match (tokens.is_empty(), texts.is_empty()) {
                    (_, true) => Ok(StopSpec::Tokens(tokens)),
                    (true, false) => Ok(StopSpec::Strings(texts)),
                    (false, false) => {
                        Err(A::Error::custom("stop must be a list of strings or a list of token ids, and has both"))
                    }
                }
            }
        }

        deserializer.deserialize_any(StopVisitor)
    }
}

enum StopItem {
    Token(i64),
    Text(String),
}

impl<'de> Deserialize<'de> for StopItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;

        impl Visitor<'_> for ItemVisitor {
            type Value = StopItem;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a list of strings or a list of token ids")
            }

            fn visit_i64<E: Error>(self, token: i64) -> Result<StopItem, E> {
                Ok(StopItem::Token(token))
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<StopItem, E> {
                i64::try_from(token).map(StopItem::Token).map_err(|_| E::custom(format!("stop token {token} is out of range")))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<StopItem, E> {
                Ok(StopItem::Text(text.to_owned()))
            }
        }

        deserializer.deserialize_any(ItemVisitor)
    }
}

impl Sample {
    /// The seed, as it was sent.
    pub fn seed(&self) -> Option<String> {
        self.sampling_params.seed.as_ref().map(ToString::to_string)
    }

    /// What to sample, and the pictures of its prompt that have yet to be read: their files are empty until then.
    ///
    /// # Errors
    /// If something in it is impossible whatever the model, or not supported.
    pub fn into_request(self, budget: &Budget) -> ApiResult<(api::SampleRequest, Vec<Asset>)> {
        self.check(budget).map_err(ApiError::BadRequest)
    }

    fn check(self, budget: &Budget) -> Result<(api::SampleRequest, Vec<Asset>), String> {
        let params = self.sampling_params;
        let input = self.prompt.into_input(budget).map_err(|error| format!("prompt: {error}"))?;
        let Input { tokens: prompt, images, assets } = input;
        if prompt.is_empty() && images.is_empty() {
            return Err("the prompt is empty; it needs at least one token".into());
        }
        let num_samples = self.num_samples.unwrap_or(1);
        if num_samples == 0 {
            return Err("num_samples is 0; it needs to be at least 1".into());
        }
        at_most("num_samples", num_samples, limits::NUM_SAMPLES_MAX)?;
        if params.max_tokens == Some(0) {
            return Err("max_tokens is 0; it needs to be at least 1".into());
        }
        // What counts is the 32-bit float; what is named is what was sent.
        let sent = params.temperature.unwrap_or(1.0);
        let temperature = sent as f32;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(format!("temperature {sent:?} is not a number from 0 upwards that a 32-bit float holds"));
        }
        let sent = params.top_p.unwrap_or(1.0);
        let top_p = sent as f32;
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(format!("top_p {sent:?} is not above 0 and at most 1, also as a 32-bit float"));
        }
        let top_k = match params.top_k.unwrap_or(-1) {
            -1 | 0 => None,
            k => Some(usize::try_from(k).map_err(|_| format!("top_k {k} is neither -1 (off) nor positive"))?),
        };
        let prompt_alt_tokens_k = self.prompt_alt_tokens_k;
        let prompt_alt_tokens_k = usize::try_from(prompt_alt_tokens_k)
            .map_err(|_| format!("prompt_alt_tokens_k {prompt_alt_tokens_k} is not a number from 0 upwards"))?;
        at_most("prompt_alt_tokens_k", prompt_alt_tokens_k, limits::PROMPT_ALT_TOKENS_MAX)?;
        let target_prompt_logprobs = self.target_prompt_logprobs.map(TensorData::into_prompt_targets).transpose();
        let target_prompt_logprobs = target_prompt_logprobs.map_err(|error| format!("target_prompt_logprobs: {error}"))?;
        at_most("topk_prompt_logprobs", self.topk_prompt_logprobs, limits::TOPK_MAX)?;
        at_most("topk_sample_logprobs", self.topk_sample_logprobs, limits::TOPK_MAX)?;
        // How many tokens a picture is, the engine knows.
        let last_n_end = if images.is_empty() { prompt.len() } else { usize::MAX };
        if let Some(n) = self.prompt_logprobs_last_n
            && !(1..last_n_end).contains(&n)
        {
            return Err(format!(
                "prompt_logprobs_last_n {n} is not between 1 and {}, the prompt's length less one",
                last_n_end - 1
            ));
        }
        let stop = match params.stop {
            None => api::Stop::EndOfSequence,
            Some(StopSpec::Strings(texts)) => api::Stop::Strings(texts),
            Some(StopSpec::Tokens(tokens)) => api::Stop::Tokens(tokens),
        };
        match &stop {
            api::Stop::Strings(texts) if texts.iter().any(String::is_empty) => {
                return Err("stop has an empty string, which every text contains".into());
            }
            api::Stop::Strings(texts) => {
                let longest = texts.iter().map(String::len).max().unwrap_or(0);
                at_most("bytes of a stop string", longest, limits::STOP_BYTES_MAX)?;
            }
            api::Stop::Tokens(_) | api::Stop::EndOfSequence => {}
        }
        let request = api::SampleRequest {
            prompt,
            images,
            num_samples,
            max_tokens: params.max_tokens,
            seed: seed(params.seed.as_ref())?,
            stop,
            temperature,
            top_k,
            top_p,
            prompt_logprobs: self.prompt_logprobs,
            prompt_logprobs_last_n: self.prompt_logprobs_last_n,
            topk_prompt_logprobs: self.topk_prompt_logprobs,
            topk_sample_logprobs: self.topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
        };
        Ok((request, assets))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tests::{peak_bytes, with_budget};
    use crate::wire::guard::parse;

    fn sample(extra: Value) -> Result<api::SampleRequest, String> {
        let mut body = json!({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}, "sampling_params": {}});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        with_budget(1 << 20, |budget| parse::<Sample>(body.to_string().as_bytes(), budget)?.check(budget))
            .map(|(request, _)| request)
    }

    /// Two tokens for a prompt of three, with something else about them.
    fn targets(other: Value) -> Value {
        let mut tensor = json!({"data": [5, -1], "dtype": "int64", "shape": [2, 1]});
        for (key, value) in other.as_object().unwrap() {
            tensor[key] = value.clone();
        }
        json!({ "target_prompt_logprobs": tensor })
    }

    #[test]
    fn tokens_for_positions_of_a_prompt_come_dense_and_sparse() {
        let named = |extra| sample(extra).unwrap().target_prompt_logprobs.unwrap();
        let dense = api::PromptTargets { shape: [2, 1], cells: api::Cells::All, ids: vec![5, -1] };
        assert_eq!(named(targets(json!({"sparse_crow_indices": null}))), dense);
        let sparse = named(targets(json!({"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 0]})));
        let cells = api::Cells::Csr { row_offsets: vec![0, 1, 2], columns: vec![0, 0] };
        assert_eq!(sparse, api::PromptTargets { cells, ..dense });
        assert_eq!(sample(json!({"target_prompt_logprobs": null})).unwrap().target_prompt_logprobs, None);
    }

    #[test]
    fn tokens_for_positions_of_a_prompt_are_counted_before_they_are_there() {
        let many = format!("[{}5]", "5,".repeat(1_000_000));
        for (list, others) in [
            ("data", r#""shape": [1000001, 1]"#),
            ("sparse_crow_indices", r#""data": [], "shape": [1000000, 1], "sparse_col_indices": []"#),
            ("sparse_col_indices", r#""data": [], "shape": [1, 1], "sparse_crow_indices": []"#),
        ] {
            let tensor = format!(r#"{{"dtype": "int64", "{list}": {many}, {others}}}"#);
            let body = format!(r#"{{"prompt": {{"chunks": [{{"tokens": [1]}}]}}, "target_prompt_logprobs": {tensor}}}"#);
            let work = || with_budget(1 << 20, |budget| parse::<Sample>(body.as_bytes(), budget).map(drop));
            let (refused, peak) = peak_bytes(work);
            assert!(refused.unwrap_err().contains("more than 1 MiB decoded"), "{list}");
            assert!(peak < 4 << 20, "{list}: {peak}");
        }
    }

    #[test]
    fn absent_and_null_are_the_defaults() {
        let request = sample(json!({"num_samples": null, "sampling_params": null, "prompt_logprobs": null})).unwrap();
        assert_eq!((request.num_samples, request.temperature, request.top_p), (1, 1.0, 1.0));
        assert_eq!((request.top_k, request.max_tokens, request.stop), (None, None, api::Stop::EndOfSequence));
    }

    #[test]
    fn an_empty_stop_is_not_an_absent_one() {
        let stop = |value: Value| sample(json!({"sampling_params": {"stop": value}})).map(|request| request.stop);
        assert_eq!(stop(json!(null)), Ok(api::Stop::EndOfSequence));
        assert_eq!(stop(json!([])), Ok(api::Stop::Tokens(vec![])));
        assert_eq!(stop(json!([5, 6])), Ok(api::Stop::Tokens(vec![5, 6])));
        assert_eq!(stop(json!("x")), Ok(api::Stop::Strings(vec!["x".into()])));
        assert_eq!(stop(json!(["x", "y"])), Ok(api::Stop::Strings(vec!["x".into(), "y".into()])));
        assert!(stop(json!({"a": 1})).unwrap_err().contains("expected a string, a list of strings or a list of token ids"));
        assert!(stop(json!([""])).unwrap_err().contains("empty string"));
    }

    #[test]
    fn a_prompt_may_be_a_picture_alone_and_the_engine_knows_how_long_it_is() {
        let image = json!({"type": "image", "data": "iVBO", "format": "png"});
        let request = sample(json!({"prompt": {"chunks": [image]}, "prompt_logprobs_last_n": 9})).unwrap();
        assert_eq!((request.prompt.len(), request.images.len(), request.prompt_logprobs_last_n), (0, 1, Some(9)));
        assert!(sample(json!({"prompt": {"chunks": [image]}, "prompt_logprobs_last_n": 0})).is_err());
    }

    #[test]
    fn a_list_of_a_million_is_refused_where_a_few_are_taken() {
        for stop in ["5,", r#""x","#] {
            let list = format!("[{}5]", stop.repeat(1_000_000));
            let body = format!(r#"{{"prompt": {{"chunks": [{{"tokens": [1]}}]}}, "sampling_params": {{"stop": {list}}}}}"#);
            let (refused, peak) =
                peak_bytes(|| with_budget(1 << 20, |budget| parse::<Sample>(body.as_bytes(), budget).map(drop)));
            assert!(refused.unwrap_err().contains("more than 256"));
            assert!(peak < 1 << 20, "{peak}");
        }
        let error = sample(json!({"sampling_params": {"stop": [5, "x"]}})).unwrap_err();
        assert!(error.contains("both"), "{error}");
    }

    #[test]
    fn a_prompt_beyond_the_limit_is_refused_in_one_list_and_in_several() {
        let refused = |chunks: &[usize]| {
            let chunks: Vec<String> = chunks.iter().map(|n| format!(r#"{{"tokens": [{}1]}}"#, "1,".repeat(n - 1))).collect();
            let body = format!(r#"{{"prompt": {{"chunks": [{}]}}}}"#, chunks.join(","));
            with_budget(256 << 20, |budget| parse::<Sample>(body.as_bytes(), budget)?.check(budget)).unwrap_err()
        };
        assert!(refused(&[limits::PROMPT_TOKENS_MAX + 1]).contains("at most 4194304"));
        assert!(refused(&[limits::PROMPT_TOKENS_MAX / 2 + 1; 2]).contains("above the limit of 4194304"));
    }

    #[test]
    fn seeds_are_any_64_bit_integer_and_drawn_when_absent() {
        let with = |seed: Value| sample(json!({"sampling_params": {"seed": seed}})).map(|request| request.seed);
        assert_eq!(with(json!(u64::MAX)), Ok(u64::MAX));
        assert_eq!(with(json!(-1)), Ok(u64::MAX));
        assert!(with(json!(0.5)).unwrap_err().contains("seed"));
        assert_ne!(with(json!(null)), with(json!(null)));
    }

    #[test]
    fn what_cannot_be_sampled_is_refused_with_its_value() {
        for (extra, word) in [
            (json!({"num_samples": 0}), "num_samples"),
            (json!({"num_samples": 1_000_000}), "num_samples"),
            (json!({"prompt": {"chunks": []}}), "empty"),
            (json!({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}), "image"),
            (json!({"sampling_params": {"temperature": -1}}), "temperature -1.0"),
            (json!({"sampling_params": {"temperature": 1e300}}), "temperature 1e300"),
            (json!({"sampling_params": {"top_p": 0}}), "top_p 0.0"),
            (json!({"sampling_params": {"top_p": 1e-50}}), "top_p 1e-50"),
            (json!({"sampling_params": {"top_k": -5}}), "top_k"),
            (json!({"sampling_params": {"max_tokens": 0}}), "max_tokens"),
            (json!({"prompt_alt_tokens_k": -1}), "prompt_alt_tokens_k -1"),
            (json!({"prompt_alt_tokens_k": 129}), "prompt_alt_tokens_k: 129 is above"),
            (targets(json!({"dtype": "float32"})), "target_prompt_logprobs: dtype \"float32\" is not int64"),
            (targets(json!({"data": [1.5, 2]})), "target_prompt_logprobs: int64 data has a value"),
            (targets(json!({"shape": null})), "target_prompt_logprobs: shape [] is not"),
            (targets(json!({"shape": [2, 1, 1]})), "target_prompt_logprobs: shape [2, 1, 1] is not"),
            (targets(json!({"shape": [-2, -1]})), "target_prompt_logprobs: shape [-2, -1] is not"),
            (targets(json!({"shape": [2, 1, -1]})), "target_prompt_logprobs: shape [2, 1, -1] is not"),
            (targets(json!({"sparse_crow_indices": [0, 1, 2]})), "target_prompt_logprobs: a sparse tensor needs both"),
            (json!({"prompt_logprobs_last_n": 3}), "prompt_logprobs_last_n"),
            (json!({"sampling_params": {"stop": "x".repeat(5000)}}), "stop string"),
            (json!({"topk_prompt_logprobs": 1000}), "topk_prompt_logprobs"),
        ] {
            let error = sample(extra).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
