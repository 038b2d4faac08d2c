//! The JSON body of `asample`, checked against everything that can be known without the model.

use serde::Deserialize;
use strata_engine::api;

use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::wire::json::{ModelInput, at_most, null_is_default, seed};

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
    pub sampling_session_id: Option<String>,
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
    target_prompt_logprobs: Option<serde::de::IgnoredAny>,
    #[serde(default, deserialize_with = "null_is_default")]
    prompt_alt_tokens_k: i64,
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
    temperature: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    top_p: Option<f32>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "stop must be a string, a list of strings or a list of token ids")]
enum StopSpec {
    String(String),
    Tokens(Vec<i64>),
    Strings(Vec<String>),
}

impl Sample {
    /// What to sample.
    ///
    /// # Errors
    /// If something in it is impossible whatever the model, or not supported.
    pub fn into_request(self) -> ApiResult<api::SampleRequest> {
        self.check().map_err(ApiError::BadRequest)
    }

    fn check(self) -> Result<api::SampleRequest, String> {
        let params = self.sampling_params;
        let prompt = self.prompt.into_tokens().map_err(|error| format!("prompt: {error}"))?;
        if prompt.is_empty() {
            return Err("the prompt is empty; it needs at least one token".into());
        }
        at_most("prompt tokens", prompt.len(), limits::PROMPT_TOKENS_MAX)?;
        let num_samples = self.num_samples.unwrap_or(1);
        if num_samples == 0 {
            return Err("num_samples is 0; it needs to be at least 1".into());
        }
        at_most("num_samples", num_samples, limits::NUM_SAMPLES_MAX)?;
        if params.max_tokens == Some(0) {
            return Err("max_tokens is 0; it needs to be at least 1".into());
        }
        let temperature = params.temperature.unwrap_or(1.0);
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(format!("temperature {temperature} is not a number from 0 upwards"));
        }
        let top_p = params.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(format!("top_p {top_p} is not above 0 and at most 1"));
        }
        let top_k = match params.top_k.unwrap_or(-1) {
            -1 | 0 => None,
            k => Some(usize::try_from(k).map_err(|_| format!("top_k {k} is neither -1 (off) nor positive"))?),
        };
        if self.prompt_alt_tokens_k != 0 {
            return Err("prompt_alt_tokens_k is not supported by this server".into());
        }
        if self.target_prompt_logprobs.is_some() {
            return Err("target_prompt_logprobs is not supported by this server".into());
        }
        at_most("topk_prompt_logprobs", self.topk_prompt_logprobs, limits::TOPK_MAX)?;
        at_most("topk_sample_logprobs", self.topk_sample_logprobs, limits::TOPK_MAX)?;
        if let Some(n) = self.prompt_logprobs_last_n
            && !(1..prompt.len()).contains(&n)
        {
            return Err(format!(
                "prompt_logprobs_last_n {n} is not between 1 and {}, the prompt's length less one",
                prompt.len() - 1
            ));
        }
        let stop = match params.stop {
            None => api::Stop::EndOfSequence,
            Some(StopSpec::String(text)) => api::Stop::Strings(vec![text]),
            Some(StopSpec::Strings(texts)) => api::Stop::Strings(texts),
            Some(StopSpec::Tokens(tokens)) => api::Stop::Tokens(tokens),
        };
        match &stop {
            api::Stop::Strings(texts) if texts.iter().any(String::is_empty) => {
                return Err("stop has an empty string, which every text contains".into());
            }
            api::Stop::Strings(texts) => at_most("stop strings", texts.len(), limits::STOPS_MAX)?,
            api::Stop::Tokens(tokens) => at_most("stop tokens", tokens.len(), limits::STOPS_MAX)?,
            api::Stop::EndOfSequence => {}
        }
        Ok(api::SampleRequest {
            prompt,
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
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::wire::json::parse;

    fn sample(extra: Value) -> Result<api::SampleRequest, String> {
        let mut body = json!({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}, "sampling_params": {}});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        let sample: Sample = parse(body.to_string().as_bytes()).map_err(|error| error.to_string())?;
        sample.check()
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
        assert!(stop(json!({"a": 1})).unwrap_err().contains("stop must be"));
        assert!(stop(json!([""])).unwrap_err().contains("empty string"));
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
            (json!({"sampling_params": {"temperature": -1}}), "temperature"),
            (json!({"sampling_params": {"top_p": 0}}), "top_p"),
            (json!({"sampling_params": {"top_k": -5}}), "top_k"),
            (json!({"sampling_params": {"max_tokens": 0}}), "max_tokens"),
            (json!({"prompt_alt_tokens_k": 2}), "prompt_alt_tokens_k"),
            (json!({"target_prompt_logprobs": {"data": []}}), "target_prompt_logprobs"),
            (json!({"prompt_logprobs_last_n": 3}), "prompt_logprobs_last_n"),
            (json!({"topk_prompt_logprobs": 1000}), "topk_prompt_logprobs"),
        ] {
            let error = sample(extra).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
