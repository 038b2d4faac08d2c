//! A small blocking client of the Tinker API: as much of it as the binary's own commands need.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use prost::Message;
use serde_json::{Value, json};
use strata_server::proto;

/// How long one HTTP exchange may take; the server holds polls for less.
const HTTP_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a result may take before the client gives up.
const RESULT_TIMEOUT: Duration = Duration::from_secs(600);
const PROTOBUF: &str = "application/x-protobuf";
/// Largest answer that is read.
const ANSWER_BYTES_MAX: u64 = 1 << 30;

/// One session with a server.
pub struct Client {
    agent: ureq::Agent,
    base_url: String,
    session_id: String,
}

/// A request that was accepted and is being worked on.
#[must_use]
pub struct Pending(String);

/// A training tenant and its place in the order of operations.
pub struct Tenant {
    model_id: String,
    next_seq_id: i32,
}

impl Tenant {
    fn take_seq_id(&mut self) -> i32 {
        let id = self.next_seq_id;
        self.next_seq_id += 1;
        id
    }
}

/// Sampling weights and the number of requests made of them.
pub struct Sampler {
    sampling_session_id: String,
    next_seq_id: u64,
}

/// A training example: input tokens, and for each of them the token that should follow with its weight in the loss.
pub struct Example {
    /// Input token ids, `[tokens]`.
    pub tokens: Vec<u32>,
    /// The token after each, `[tokens]`.
    pub targets: Vec<u32>,
    /// Its weight, `[tokens]`.
    pub weights: Vec<f32>,
}

impl Example {
    /// All of `tokens` predicted one by one, of which only those from `answer_start` on count. `answer_start` is at least 1.
    pub fn completion(tokens: &[u32], answer_start: usize) -> Self {
        let inputs = tokens.len() - 1;
        let weights = (1..=inputs).map(|target| if target < answer_start { 0.0 } else { 1.0 }).collect();
        Example { tokens: tokens[..inputs].to_vec(), targets: tokens[1..].to_vec(), weights }
    }
}

/// What a loss returned.
pub struct Losses {
    /// Log-probabilities of the targets, for each example `[tokens]`.
    pub logprobs: Vec<Vec<f32>>,
    /// The sum that was differentiated.
    pub loss_sum: f64,
}

/// A sampled continuation.
pub struct Sample {
    /// Token ids, the stop token included.
    pub tokens: Vec<u32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
}

impl Client {
    /// Opens a session.
    ///
    /// # Errors
    /// If the server does not answer or refuses.
    pub fn connect(base_url: &str) -> Result<Self> {
        let config = ureq::Agent::config_builder().timeout_global(Some(HTTP_TIMEOUT)).http_status_as_error(false).build();
        let mut client = Client { agent: config.into(), base_url: base_url.to_owned(), session_id: String::new() };
        let session = client.post(
            "create_session",
            &json!({"tags": [], "user_metadata": {}, "sdk_version": env!("CARGO_PKG_VERSION"), "type": "create_session"}),
        )?;
        client.session_id = text(&session, "session_id")?;
        Ok(client)
    }

    /// Makes a fresh adapter that trains every linear layer.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn create_model(&self, base_model: &str, rank: usize, seed: u64) -> Result<Tenant> {
        let lora = json!({"rank": rank, "seed": seed, "train_unembed": true, "train_mlp": true, "train_attn": true});
        let ack = self.post(
            "create_model",
            &json!({"session_id": self.session_id, "model_seq_id": 0, "base_model": base_model, "lora_config": lora,
                    "optimizer_config": {"type": "adamw"}, "type": "create_model"}),
        )?;
        let created = self.json_result(&pending(&ack)?)?;
        Ok(Tenant { model_id: text(&created, "model_id")?, next_seq_id: 1 })
    }

    /// Submits a cross-entropy pass that adds its gradient.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn forward_backward(&self, tenant: &mut Tenant, examples: &[Example]) -> Result<Pending> {
        self.submit_pass(tenant, examples, false)
    }

    /// Submits a cross-entropy pass that only scores.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn forward(&self, tenant: &mut Tenant, examples: &[Example]) -> Result<Pending> {
        self.submit_pass(tenant, examples, true)
    }

    fn submit_pass(&self, tenant: &mut Tenant, examples: &[Example], forward_only: bool) -> Result<Pending> {
        let request = proto::ForwardBackwardRequest {
            model_id: tenant.model_id.clone(),
            seq_id: tenant.take_seq_id(),
            data: examples.iter().map(datum).collect(),
            loss_fn: "cross_entropy".into(),
            forward_only,
            ..Default::default()
        };
        let url = format!("{}/api/v1/forward_backward", self.base_url);
        let sent = self.agent.post(&url).header("content-type", PROTOBUF).send(request.encode_to_vec().as_slice());
        pending(&json_answer("forward_backward", sent)?)
    }

    /// Waits for the outcome of a pass.
    ///
    /// # Errors
    /// If the pass failed.
    pub fn losses(&self, pending: &Pending) -> Result<Losses> {
        let output = proto::ForwardBackwardOutput::decode(self.wait(pending, PROTOBUF)?.as_slice())?;
        let mut logprobs = Vec::new();
        for record in &output.loss_fn_outputs {
            let field = record.fields.get("logprobs").context("the answer has no log-probabilities")?;
            let offsets: Vec<usize> = words(&field.offsets).map(|b: [u8; 8]| i64::from_le_bytes(b) as usize).collect();
            for range in offsets.windows(2) {
                let bytes = field.data.get(range[0]..range[1]).context("an offset of the answer is outside its data")?;
                logprobs.push(words(bytes).map(f32::from_le_bytes).collect());
            }
        }
        let loss_sum = *output.metrics.get("loss:sum").context("the answer has no loss:sum")?;
        Ok(Losses { logprobs, loss_sum })
    }

    /// Submits an AdamW step.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn optim_step(&self, tenant: &mut Tenant, learning_rate: f64) -> Result<Pending> {
        let adam = json!({"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0});
        let body =
            json!({"adam_params": adam, "model_id": tenant.model_id, "seq_id": tenant.take_seq_id(), "type": "optim_step"});
        pending(&self.post("optim_step", &body)?)
    }

    /// Freezes the adapter as it is into sampling weights.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn snapshot(&self, tenant: &mut Tenant, sampling_session_seq_id: u64) -> Result<Sampler> {
        let ack = self.post(
            "save_weights_for_sampler",
            &json!({"model_id": tenant.model_id, "sampling_session_seq_id": sampling_session_seq_id, "kind": "snapshot",
                    "seq_id": tenant.take_seq_id(), "type": "save_weights_for_sampler"}),
        )?;
        let saved = self.json_result(&pending(&ack)?)?;
        Ok(Sampler { sampling_session_id: text(&saved, "sampling_session_id")?, next_seq_id: 0 })
    }

    /// Submits one sample of a prompt: up to `max_tokens`, ended by the model's own end of sequence.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn sample(
        &self,
        sampler: &mut Sampler,
        prompt: &[u32],
        max_tokens: usize,
        temperature: f32,
        seed: u64,
    ) -> Result<Pending> {
        let seq_id = sampler.next_seq_id;
        sampler.next_seq_id += 1;
        let params = json!({"max_tokens": max_tokens, "temperature": temperature, "top_k": -1, "top_p": 1.0, "seed": seed});
        let ack = self.post(
            "asample",
            &json!({"num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "sampling_params": params,
                    "sampling_session_id": sampler.sampling_session_id, "seq_id": seq_id, "prompt_logprobs": false, "type": "sample"}),
        )?;
        pending(&ack)
    }

    /// Waits for a sample.
    ///
    /// # Errors
    /// If sampling failed.
    pub fn sampled(&self, pending: &Pending) -> Result<Sample> {
        let response = proto::SampleResponse::decode(self.wait(pending, PROTOBUF)?.as_slice())?;
        let sequence = response.sequences.first().context("the answer has no sequence")?;
        let tokens: Vec<u32> = words(&sequence.tokens).map(u32::from_le_bytes).collect();
        let logprobs: Vec<f32> = words(sequence.logprobs.as_deref().unwrap_or_default()).map(f32::from_le_bytes).collect();
        ensure!(tokens.len() == logprobs.len(), "{} tokens came with {} log-probabilities", tokens.len(), logprobs.len());
        Ok(Sample { tokens, logprobs })
    }

    /// Waits for something whose answer does not matter.
    ///
    /// # Errors
    /// If it failed.
    pub fn finish(&self, pending: &Pending) -> Result<()> {
        self.json_result(pending).map(drop)
    }

    fn json_result(&self, pending: &Pending) -> Result<Value> {
        Ok(serde_json::from_slice(&self.wait(pending, "application/json")?)?)
    }

    /// Polls until there is an outcome; its bytes.
    fn wait(&self, pending: &Pending, accept: &str) -> Result<Vec<u8>> {
        let url = format!("{}/api/v1/retrieve_future", self.base_url);
        let body = json!({"request_id": pending.0, "allow_metadata_only": false});
        let deadline = Instant::now() + RESULT_TIMEOUT;
        while Instant::now() < deadline {
            let mut answer = self.agent.post(&url).header("accept", accept).send_json(&body)?;
            let is_json = answer.headers().get("content-type").is_none_or(|value| value != PROTOBUF);
            let bytes = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec()?;
            match answer.status().as_u16() {
                408 => continue,
                200 => {}
                status => bail!("retrieve_future answered {status}: {}", String::from_utf8_lossy(&bytes)),
            }
            if is_json {
                let value: Value = serde_json::from_slice(&bytes)?;
                if let Some(error) = value.get("error").and_then(Value::as_str) {
                    bail!("{error}");
                }
            }
            return Ok(bytes);
        }
        bail!("request {} has no result after {} s", pending.0, RESULT_TIMEOUT.as_secs())
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value> {
        json_answer(path, self.agent.post(format!("{}/api/v1/{path}", self.base_url)).send_json(body))
    }
}

fn json_answer(path: &str, sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Value> {
    let mut answer = sent.with_context(|| format!("{path} got no answer"))?;
    let text = answer.body_mut().read_to_string()?;
    ensure!(answer.status().is_success(), "{path} answered {}: {text}", answer.status());
    serde_json::from_str(&text).with_context(|| format!("{path} did not answer JSON"))
}

fn datum(example: &Example) -> proto::Datum {
    let tokens: Vec<u8> = example.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    let targets: Vec<u8> = example.targets.iter().flat_map(|&t| i64::from(t).to_le_bytes()).collect();
    let weights: Vec<u8> = example.weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let tensor = |bytes: Vec<u8>, dtype: proto::DType, len: usize| proto::Tensor {
        encoding: Some(proto::Encoding::Dense(bytes.into())),
        dtype: dtype.into(),
        shape: vec![len as i64],
    };
    let text = proto::ChunkKind::EncodedText(proto::EncodedText { tokens: tokens.into() });
    proto::Datum {
        model_input: vec![proto::Chunk { chunk: Some(text) }],
        loss_fn_inputs: [
            ("target_tokens".to_owned(), tensor(targets, proto::DType::Int64, example.targets.len())),
            ("weights".to_owned(), tensor(weights, proto::DType::Float32, example.weights.len())),
        ]
        .into(),
    }
}

fn pending(ack: &Value) -> Result<Pending> {
    Ok(Pending(text(ack, "request_id")?))
}

fn text(value: &Value, field: &str) -> Result<String> {
    let found = value.get(field).and_then(Value::as_str);
    found.map(str::to_owned).with_context(|| format!("the answer has no {field}: {value}"))
}

/// Consecutive words of `N` bytes.
fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).map(|word| word.try_into().expect("a chunk has N bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_of_a_completion_counts() {
        let example = Example::completion(&[5, 6, 7, 8], 2);
        assert_eq!(example.tokens, [5, 6, 7]);
        assert_eq!(example.targets, [6, 7, 8]);
        assert_eq!(example.weights, [0.0, 1.0, 1.0]);
    }
}
