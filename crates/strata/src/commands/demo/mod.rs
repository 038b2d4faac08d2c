//! `strata demo`: teaches the embedded model Pig Latin over the real HTTP API, and shows what was gained.

mod pig_latin;

use std::io::IsTerminal;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use strata_model::{ChatInput, ChatTemplate, EMBEDDED_NAME, ModelSource, SpecialTokens, Tokenizer};
use strata_server::{DataDir, RunningServer, Server, ServerConfig};
use strata_tensor::random;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::base_model::{self, Copies, Naming, Resources};
use crate::client::{Client, Example, Sampler, Tenant};
use crate::commands::shutdown::{Signals, interruptible_with};
use crate::logging::{self, LogFormat};
use crate::output::say;

/// Settings of `strata demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Port to serve on; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// Training steps.
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub steps: u32,
    /// Keep serving afterwards even if standard output is not a terminal.
    #[arg(long)]
    pub keep_serving: bool,
    /// What the model may use.
    #[command(flatten)]
    pub resources: Resources,
}

const RANK: usize = 32;
const LEARNING_RATE: f64 = 2e-3;
const WORDS_PER_STEP: usize = 32;
/// Words that are never trained on.
const HELD_OUT_WORDS: usize = 64;
const EXAMPLES_SHOWN: usize = 6;
/// The longest answer has 15 letters; a model that rambles is cut off.
const ANSWER_TOKENS_MAX: usize = 32;
const SEED: u64 = 7;

/// Runs the demonstration.
///
/// # Errors
/// If anything fails, or the demonstration falls short: nothing was learned, or log-probabilities of sampling and training differ.
pub fn run(args: Args) -> Result<()> {
    if std::env::var_os("RUST_LOG").is_some() {
        logging::init(LogFormat::Text);
    }
    let temporary = TempDir::with_prefix("strata-demo-").context("making a directory for the demonstration")?;
    let path = temporary.path().to_owned();
    let give_up = move || {
        // What is written to it meanwhile is in the way once.
        let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_dir_all(&path));
    };
    let (server, runtime) = interruptible_with(give_up, || serve_and_demonstrate(&args, &temporary))?;
    if args.keep_serving || std::io::stdout().is_terminal() {
        let url = server.url();
        say!("\nStill serving at {url} until Ctrl-C. Connect from Python (pip install tinker):\n")?;
        say!("  import tinker")?;
        say!("  service = tinker.ServiceClient(base_url=\"{url}\", api_key=\"tml-local\")")?;
        say!("  training = service.create_lora_training_client(base_model=\"{EMBEDDED_NAME}\", rank={RANK}).result()")?;
        runtime.block_on(async {
            Signals::listen()?.next().await;
            anyhow::Ok(())
        })?;
    }
    runtime.block_on(server.stop());
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// The server, when all was shown.
fn serve_and_demonstrate(args: &Args, temporary: &TempDir) -> Result<(RunningServer, Runtime)> {
    let data_dir = DataDir::claim(temporary.path())?;
    let mut bases = base_model::start(&[], &Naming::default(), &args.resources, &Copies::default(), &data_dir)?;
    let mut config = ServerConfig::new((Ipv4Addr::LOCALHOST, args.port).into(), data_dir);
    base_model::keep_within(&mut config, &bases);
    let base = bases.remove(0);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let server = runtime.block_on(Server::start(config, vec![(base.engine, base.info)]))?;
    let url = server.url();
    say!("Strata {} serves {EMBEDDED_NAME} at {url} ({})", env!("CARGO_PKG_VERSION"), base.kernels)?;
    say!(
        "Teaching it Pig Latin through the Tinker API: LoRA of rank {RANK}, AdamW, {} steps of {WORDS_PER_STEP} words.\n",
        args.steps
    )?;

    demonstrate(&url, args.steps)?;
    Ok((server, runtime))
}

/// Everything that the demonstration shows, as a client of the server at `url`.
fn demonstrate(url: &str, steps: u32) -> Result<()> {
    let lesson = Lesson::new()?;
    let client = Client::connect(url)?;
    let mut tenant = client.create_model(EMBEDDED_NAME, RANK, SEED)?;

    let before = lesson.examine(&client, &mut client.snapshot(&mut tenant, 0)?)?;
    lesson.teach(&client, &mut tenant, steps)?;
    let mut sampler = client.snapshot(&mut tenant, 1)?;
    let after = lesson.examine(&client, &mut sampler)?;
    let agreement = lesson.compare_logprobs(&client, &mut tenant, &mut sampler)?;

    lesson.report(&before, &after)?;
    say!(
        "\nSampled and recomputed log-probabilities: {} of {} are equal to the last bit.",
        HumanCount(agreement.equal),
        HumanCount(agreement.total)
    )?;
    let (score_before, score_after) = (lesson.score(&before), lesson.score(&after));
    ensure!(score_after > score_before, "nothing was learned: {score_before} words were right before, {score_after} after");
    ensure!(agreement.equal == agreement.total, "log-probabilities of sampling and training differ");
    Ok(())
}

/// The words of the demonstration and how they become tokens.
struct Lesson {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    training_words: Vec<&'static str>,
    held_out: Vec<&'static str>,
}

/// How many log-probabilities were compared and how many had the same bits.
struct Agreement {
    equal: u64,
    total: u64,
}

impl Lesson {
    fn new() -> Result<Self> {
        let tokenizer = Tokenizer::load(&ModelSource::Embedded)?;
        let template = ChatTemplate::load(&ModelSource::Embedded)?.context("the embedded model has no chat template")?;
        let mut training_words = pig_latin::words();
        shuffle(&mut training_words, SEED);
        let held_out = training_words.split_off(training_words.len() - HELD_OUT_WORDS);
        Ok(Lesson { tokenizer, template, training_words, held_out })
    }

    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<Vec<u32>> {
        let text = self.template.render(&ChatInput { messages, add_generation_prompt, ..ChatInput::default() })?;
        Ok(self.tokenizer.encode(&text)?)
    }

    /// Tokens of the question in the model's chat format, up to where the answer begins.
    fn prompt(&self, word: &str) -> Result<Vec<u32>> {
        self.render(&[json!({"role": "user", "content": pig_latin::question(word)})], true)
    }

    /// The question and the right answer; only the answer counts.
    fn example(&self, word: &str) -> Result<Example> {
        let question = json!({"role": "user", "content": pig_latin::question(word)});
        let answer = json!({"role": "assistant", "content": pig_latin::translate(word)});
        Ok(Example::completion(&self.render(&[question, answer], false)?, self.prompt(word)?.len()))
    }

    fn teach(&self, client: &Client, tenant: &mut Tenant, steps: u32) -> Result<()> {
        let bar = ProgressBar::new(u64::from(steps));
        bar.set_style(ProgressStyle::with_template("  {bar:32} step {pos}/{len}  {msg}")?);
        let (started, mut tokens) = (Instant::now(), 0);
        let mut words = Vec::new();
        for step in 0..steps {
            let mut batch = Vec::with_capacity(WORDS_PER_STEP);
            for _ in 0..WORDS_PER_STEP {
                if words.is_empty() {
                    words = self.training_words.clone();
                    shuffle(&mut words, SEED + u64::from(step));
                }
                let word = words.pop().expect("the list was refilled above");
                batch.push(self.example(word)?);
            }
            let backward = client.forward_backward(tenant, &batch)?;
            let update = client.optim_step(tenant, LEARNING_RATE)?;
            let losses = client.losses(&backward)?;
            client.finish(&update)?;

            tokens += batch.iter().map(|example| example.tokens.len()).sum::<usize>();
            let answer_tokens: f32 = batch.iter().flat_map(|example| &example.weights).sum();
            let rate = tokens as f64 / started.elapsed().max(Duration::from_millis(1)).as_secs_f64();
            bar.set_message(format!(
                "loss {:.4} per token, {} tokens/s",
                losses.loss_sum / f64::from(answer_tokens),
                HumanCount(rate as u64)
            ));
            bar.inc(1);
        }
        bar.finish();
        let seconds = started.elapsed().as_secs_f64();
        say!("  {} tokens in {seconds:.1} s: {:.0} tokens/s\n", HumanCount(tokens as u64), tokens as f64 / seconds)?;
        Ok(())
    }

    /// The model's greedy answer for every held-out word.
    fn examine(&self, client: &Client, sampler: &mut Sampler) -> Result<Vec<String>> {
        let mut pending = Vec::with_capacity(self.held_out.len());
        for word in &self.held_out {
            pending.push(client.sample(sampler, &self.prompt(word)?, ANSWER_TOKENS_MAX, 0.0, 0)?);
        }
        let mut answers = Vec::with_capacity(pending.len());
        for pending in &pending {
            let text = self.tokenizer.decode(&client.sampled(pending)?.tokens, SpecialTokens::Skip)?;
            answers.push(text.trim().to_owned());
        }
        Ok(answers)
    }

    /// Samples an answer for every held-out word at temperature 1 and has the trainer score the same tokens.
    fn compare_logprobs(&self, client: &Client, tenant: &mut Tenant, sampler: &mut Sampler) -> Result<Agreement> {
        let mut prompts = Vec::with_capacity(self.held_out.len());
        let mut pending = Vec::with_capacity(self.held_out.len());
        for (seed, word) in self.held_out.iter().enumerate() {
            let prompt = self.prompt(word)?;
            pending.push(client.sample(sampler, &prompt, ANSWER_TOKENS_MAX, 1.0, seed as u64)?);
            prompts.push(prompt);
        }
        let mut sampled = Vec::with_capacity(pending.len());
        let mut examples = Vec::with_capacity(pending.len());
        for (prompt, pending) in prompts.iter().zip(&pending) {
            let sample = client.sampled(pending)?;
            examples.push(Example::completion(&[prompt.as_slice(), &sample.tokens].concat(), prompt.len()));
            sampled.push(sample.logprobs);
        }
        let scored = client.losses(&client.forward(tenant, &examples)?)?.logprobs;
        let mut agreement = Agreement { equal: 0, total: 0 };
        for ((sampled, scored), prompt) in sampled.iter().zip(&scored).zip(&prompts) {
            let recomputed = scored.get(prompt.len() - 1..).unwrap_or_default();
            agreement.total += sampled.len().max(recomputed.len()) as u64;
            agreement.equal += sampled.iter().zip(recomputed).filter(|(a, b)| a.to_bits() == b.to_bits()).count() as u64;
        }
        Ok(agreement)
    }

    fn score(&self, answers: &[String]) -> usize {
        self.held_out.iter().zip(answers).filter(|(word, answer)| **answer == pig_latin::translate(word)).count()
    }

    fn report(&self, before: &[String], after: &[String]) -> Result<()> {
        say!("  {:<12} {:<24} {:<24}", "unseen word", "before", "after")?;
        for ((word, before), after) in self.held_out.iter().zip(before).zip(after).take(EXAMPLES_SHOWN) {
            let mark = if *after == pig_latin::translate(word) { "✓" } else { "✗" };
            say!("  {word:<12} {:<24} {after:<20} {mark}", shorten(before, 22))?;
        }
        let of = self.held_out.len();
        say!("\nUnseen words right: {} of {of} before, {} of {of} after.", self.score(before), self.score(after))
    }
}

fn shorten(text: &str, chars_max: usize) -> String {
    let line = text.replace('\n', " ");
    if line.chars().count() <= chars_max { line } else { line.chars().take(chars_max - 1).chain(['…']).collect() }
}

/// Fisher-Yates with draws that depend on `seed` only.
fn shuffle<T>(items: &mut [T], seed: u64) {
    for i in (1..items.len()).rev() {
        let draw = random::uniform([seed, 0], i as u64);
        items.swap(i, (f64::from(draw) * (i + 1) as f64) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_every_item_and_depends_on_the_seed_only() {
        let mut once: Vec<u32> = (0..100).collect();
        let mut again = once.clone();
        let mut other = once.clone();
        shuffle(&mut once, 1);
        shuffle(&mut again, 1);
        shuffle(&mut other, 2);
        assert_eq!(once, again);
        assert_ne!(once, other);
        once.sort_unstable();
        assert_eq!(once, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn long_answers_are_cut_for_the_table() {
        assert_eq!(shorten("ench-wray", 22), "ench-wray");
        assert_eq!(shorten("abcdef", 4), "abc…");
    }
}
