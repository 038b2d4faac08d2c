//! Sampling: exact log-probabilities, the prefix cache, stops, limits.

mod common;

use std::time::Duration;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;
use strata_model::{LateTokenizer, SpecialTokens};

/// A tenant that has been trained away from the base model, frozen as the sampler `tuned` (operations 1 to 3).
fn tuned(engine: &EngineHandle) {
    create(engine, "m", 8, 1);
    losses(ask(engine, train("m", 1, backward(examples(4, 3)))));
    grad_norm(ask(engine, train("m", 2, step(3e-2))));
    snapshot(engine, "m", 3, "tuned");
}

/// Log-probabilities that training computes for each token of `text` after the first.
fn forward_logprobs(engine: &EngineHandle, seq: u64, text: &[i64]) -> Vec<f32> {
    losses(ask(engine, train("m", seq, forward(vec![cross_entropy_datum(text, 1.0)])))).data.remove(0).logprobs
}

#[test]
fn sampled_logprobs_are_the_bits_that_forward_computes() {
    let engine = engine();
    tuned(&engine);
    let mut seq = 3;
    // Shorter than a page, exactly a page, across several chunks of prefill; with and without room in the last page.
    for prompt_tokens in [1, 63, 64, 65, 700] {
        let prompt = tokens(prompt_tokens as u64, prompt_tokens);
        let request = SampleRequest { prompt_logprobs: true, ..sample_request(prompt.clone(), 3, 70, 9) };
        let output = sampled(ask(&engine, sample("tuned", request)));
        let scored = output.prompt_logprobs.unwrap();
        assert_eq!((scored.len(), scored[0]), (prompt_tokens, None));
        let scored: Vec<f32> = scored.into_iter().flatten().collect();
        for sequence in output.sequences {
            seq += 1;
            let text: Vec<i64> = prompt.iter().copied().chain(sequence.tokens.iter().map(|&t| t as i64)).collect();
            let exact = forward_logprobs(&engine, seq, &text);
            assert_eq!(bits_of(&exact[..prompt_tokens - 1]), bits_of(&scored), "prompt of {prompt_tokens}");
            assert_eq!(bits_of(&exact[prompt_tokens - 1..]), bits_of(&sequence.logprobs), "after {prompt_tokens}");
            assert!(sequence.logprobs.iter().all(|&lp| lp.is_finite() && lp <= 0.0));
        }
    }
}

#[test]
fn the_prefix_cache_changes_nothing_but_the_work() {
    let engine = engine();
    tuned(&engine);
    base_sampler(&engine, "base");
    let request = || sample_request(tokens(1, 200), 2, 100, 3);
    let cold = sampled(ask(&engine, sample("tuned", request())));
    let warm = sampled(ask(&engine, sample("tuned", request())));
    assert_eq!((cold.prompt_cache_hit_tokens, warm.prompt_cache_hit_tokens), (0, 199));
    assert_eq!(sample_bits(&cold), sample_bits(&warm));
    let other_weights = sampled(ask(&engine, sample("base", request())));
    assert_eq!(other_weights.prompt_cache_hit_tokens, 0);
    assert_ne!(sample_bits(&cold), sample_bits(&other_weights));
    // What was sampled is a prefix too, as in the next turn of a conversation.
    let turn: Vec<i64> = tokens(1, 200).into_iter().chain(cold.sequences[0].tokens.iter().map(|&t| t as i64)).collect();
    let next = sampled(ask(&engine, sample("tuned", sample_request(turn.clone(), 1, 5, 4))));
    assert_eq!(next.prompt_cache_hit_tokens, 299, "all but the last token, which was never an input");
    let fresh = common::engine();
    tuned(&fresh);
    let fresh = sampled(ask(&fresh, sample("tuned", sample_request(turn, 1, 5, 4))));
    assert_eq!(sample_bits(&next), sample_bits(&fresh));
}

#[test]
fn requests_that_come_at_once_with_prompts_that_begin_alike_have_the_bits_of_each_alone() {
    let engine = engine();
    tuned(&engine);
    let (long, short) = (tokens(1, 700), tokens(2, 90));
    let prompt = |n: u64| match n % 3 {
        0 => long.clone(),
        1 => [&long[..640 - 10 * n as usize], &tokens(n, 30)].concat(),
        _ => short.clone(),
    };
    let request = |n: u64| SampleRequest { prompt_logprobs: n == 3, ..sample_request(prompt(n), 1 + n as usize % 2, 40, n) };
    let running: Vec<_> =
        (0..12).map(|n| submit_as(&engine, &format!("session {}", n % 4), sample("tuned", request(n)))).collect();
    let together: Vec<_> = running.into_iter().map(|rx| sampled(rx.recv().unwrap())).collect();
    let fresh = common::engine();
    tuned(&fresh);
    for (n, together) in (0..).zip(together) {
        let alone = sampled(ask(&fresh, sample("tuned", request(n))));
        assert_eq!(sample_bits(&together), sample_bits(&alone), "request {n}");
        let scores = |output: &SampleOutput| {
            output.prompt_logprobs.iter().flatten().flatten().map(|lp| lp.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(scores(&together), scores(&alone), "request {n}");
    }
}

#[test]
fn prompt_scores_can_be_had_for_the_last_positions_only() {
    let engine = engine();
    base_sampler(&engine, "base");
    let prompt = tokens(1, 150);
    let request = |last_n| SampleRequest {
        prompt_logprobs: true,
        prompt_logprobs_last_n: last_n,
        topk_prompt_logprobs: 4,
        topk_sample_logprobs: 2,
        ..sample_request(prompt.clone(), 1, 3, 1)
    };
    let all = sampled(ask(&engine, sample("base", request(None))));
    let last = sampled(ask(&engine, sample("base", request(Some(5)))));
    assert_eq!(last.prompt_cache_hit_tokens, 144, "positions that are not scored may come from the cache");
    let (all_scores, last_scores) = (all.prompt_logprobs.unwrap(), last.prompt_logprobs.unwrap());
    assert!(last_scores[..145].iter().all(Option::is_none));
    assert_eq!(all_scores[145..], last_scores[145..]);
    assert!(all_scores[1..].iter().all(Option::is_some));
    let topk = all.topk_prompt_logprobs.unwrap();
    assert!(topk[0].is_empty() && topk[1..].iter().all(|row| row.len() == 4 && row.is_sorted_by(|a, b| a.1 >= b.1)));
    assert_eq!(topk[145..], last.topk_prompt_logprobs.unwrap()[145..]);
    let sequence = &all.sequences[0];
    let topk = sequence.topk.as_ref().unwrap();
    assert_eq!(topk.len(), 3);
    for ((row, token), logprob) in topk.iter().zip(&sequence.tokens).zip(&sequence.logprobs) {
        assert!(row[0].1 >= *logprob);
        assert!(row.iter().all(|&(id, lp)| id != *token || lp == *logprob));
    }
}

#[test]
fn a_snapshot_keeps_its_weights_while_training_goes_on() {
    let engine = engine();
    tuned(&engine);
    let request = || sample_request(tokens(2, 20), 2, 20, 1);
    let before = sampled(ask(&engine, sample("tuned", request())));
    losses(ask(&engine, train("m", 4, backward(examples(6, 3)))));
    grad_norm(ask(&engine, train("m", 5, step(3e-2))));
    snapshot(&engine, "m", 6, "later");
    assert_eq!(sample_bits(&before), sample_bits(&sampled(ask(&engine, sample("tuned", request())))));
    let later = sampled(ask(&engine, sample("later", request())));
    assert_ne!(sample_bits(&before), sample_bits(&later));
    let again = TrainOp::Snapshot { sampler_id: "tuned".into(), replace: false };
    assert!(user_error(ask(&engine, train("m", 7, again))).contains("exist already"));
    ask(&engine, train("m", 8, TrainOp::Snapshot { sampler_id: "tuned".into(), replace: true })).unwrap();
    assert_eq!(sample_bits(&later), sample_bits(&sampled(ask(&engine, sample("tuned", request())))));
}

#[test]
fn dropping_weights_stops_their_samples_and_no_others() {
    let engine = engine();
    tuned(&engine);
    base_sampler(&engine, "base");
    let request = |max_tokens| sample_request(tokens(2, 20), 2, max_tokens, 1);
    let expected = sampled(ask(&engine, sample("base", request(200))));
    let other = submit(&engine, sample("base", request(200)));
    let dropped: Vec<_> = (0..50).map(|_| submit(&engine, sample("tuned", request(2000)))).collect();
    assert!(matches!(ask(&engine, Request::DropSampler { sampler_id: "tuned".into() }), Ok(Response::Freed)));
    for rx in dropped {
        assert!(user_error(rx.recv().unwrap()).contains("tuned were dropped"));
    }
    assert_eq!(sample_bits(&sampled(other.recv().unwrap())), sample_bits(&expected));
    assert!(user_error(ask(&engine, sample("tuned", request(10)))).contains("no sampling weights tuned"));
    assert!(user_error(ask(&engine, Request::DropSampler { sampler_id: "tuned".into() })).contains("tuned"));
}

#[test]
fn stops_end_a_sample_with_the_stop_in_it() {
    let engine = engine();
    base_sampler(&engine, "base");
    let free = sampled(ask(&engine, sample("base", sample_request(tokens(2, 20), 1, 40, 1)))).sequences.remove(0);
    assert_eq!((free.tokens.len(), free.stop_reason), (40, StopReason::Length));
    let stop = free.tokens[17];
    let first = free.tokens.iter().position(|&t| t == stop).unwrap();
    let request = SampleRequest { stop: Stop::Tokens(vec![stop as i64]), ..sample_request(tokens(2, 20), 1, 40, 1) };
    let stopped = sampled(ask(&engine, sample("base", request))).sequences.remove(0);
    assert_eq!((&stopped.tokens[..], stopped.stop_reason), (&free.tokens[..=first], StopReason::Stop));
    assert_eq!(bits_of(&stopped.logprobs), bits_of(&free.logprobs[..=first]));
}

#[test]
fn a_stop_string_ends_a_sample_with_the_token_that_completes_it() {
    let engine = engine();
    base_sampler(&engine, "base");
    let tokenizer = tokenizer();
    let prompt = "<|im_start|>user\nReverse: planet<|im_end|>\n<|im_start|>assistant\n";
    let prompt: Vec<i64> = tokenizer.encode(prompt).unwrap().into_iter().map(i64::from).collect();
    let text = |stop| {
        let request = SampleRequest { stop, temperature: 0.0, ..sample_request(prompt.clone(), 1, 20, 1) };
        let sequence = sampled(ask(&engine, sample("base", request))).sequences.remove(0);
        (tokenizer.decode(&sequence.tokens, SpecialTokens::Keep).unwrap(), sequence.stop_reason)
    };
    assert_eq!(text(Stop::EndOfSequence), ("tenalp<|im_end|>".into(), StopReason::Stop));
    assert_eq!(text(Stop::Strings(vec!["xyz".into(), "nal".into()])), ("tenal".into(), StopReason::Stop));
    assert_eq!(text(Stop::Strings(vec!["p<|im_end|>".into()])), ("tenalp<|im_end|>".into(), StopReason::Stop));
    assert_eq!(text(Stop::Strings(vec!["never".into()])).1, StopReason::Length);
}

#[test]
fn who_needs_a_tokenizer_that_is_still_being_read_is_told_to_ask_again() {
    let (go_on, held) = std::sync::mpsc::channel::<()>();
    let late = LateTokenizer::read(
        || (),
        move || {
            held.recv().expect("the test lets it go on");
            Ok(tokenizer())
        },
    );
    let late = late.unwrap();
    let engine = EngineHandle::start(model(2), Some(late.clone()), config(MEMORY_BYTES)).expect("memory suffices");
    base_sampler(&engine, "base");
    let with = |stop| sample("base", SampleRequest { stop, ..sample_request(tokens(2, 20), 1, 3, 1) });
    let of_strings = || with(Stop::Strings(vec!["xyz".into()]));
    for _ in 0..2 {
        let refusal = engine.submit("too-early".into(), client("session"), of_strings(), Box::new(|_, _| ()));
        let Err(Refusal::Busy(message)) = refusal else { panic!("{refusal:?}") };
        assert!(message.contains("tokenizer"), "{message}");
    }
    sampled(ask(&engine, with(Stop::EndOfSequence)));
    go_on.send(()).unwrap();
    late.wait().unwrap();
    sampled(ask(&engine, of_strings()));
}

#[test]
fn greedy_samples_repeat_what_the_model_finds_most_probable() {
    let engine = engine();
    base_sampler(&engine, "base");
    let request = SampleRequest { temperature: 0.0, topk_sample_logprobs: 1, ..sample_request(tokens(2, 20), 2, 10, 1) };
    let output = sampled(ask(&engine, sample("base", request)));
    assert_eq!(output.sequences[0], output.sequences[1]);
    let sequence = &output.sequences[0];
    for ((token, logprob), best) in sequence.tokens.iter().zip(&sequence.logprobs).zip(sequence.topk.as_ref().unwrap()) {
        assert_eq!((*token, *logprob), best[0]);
    }
    let random = sampled(ask(&engine, sample("base", sample_request(tokens(2, 20), 8, 10, 1))));
    assert!(random.sequences.windows(2).any(|w| w[0].tokens != w[1].tokens), "samples of one request differ");
}

#[test]
fn a_sample_without_a_limit_ends_at_the_context() {
    let engine = engine();
    base_sampler(&engine, "base");
    let context = engine.info().max_context_tokens;
    let request = SampleRequest { max_tokens: None, ..sample_request(tokens(2, context - 5), 2, 1, 1) };
    let output = sampled(ask(&engine, sample("base", request)));
    assert!(output.sequences.iter().all(|s| s.tokens.len() == 5 && s.stop_reason == StopReason::Length));
}

#[test]
fn more_samples_than_fit_at_once_all_come() {
    let engine = engine();
    base_sampler(&engine, "base");
    let many = submit(&engine, sample("base", sample_request(tokens(1, 70), 300, 5, 1)));
    let few = sampled(ask(&engine, sample("base", sample_request(tokens(1, 70), 2, 5, 1))));
    let many = sampled(many.recv().unwrap());
    assert_eq!(many.sequences.len(), 300);
    assert_eq!(sample_bits(&many)[..2], sample_bits(&few)[..], "a sample does not depend on how many there are");
}

#[test]
fn samples_queue_when_the_cache_is_full() {
    let small = common::engine_with(2, 40 << 20);
    let context = small.info().max_context_tokens;
    base_sampler(&small, "base");
    // Each prompt alone takes a good part of the cache, and all together far more than there is of it.
    let request = |seed| sample_request(tokens(seed, context / 2), 3, context / 4, seed);
    let num_requests = 4 * small.info().cache_tokens / context + 4;
    let running: Vec<_> = (0..num_requests as u64)
        .map(|seed| submit_as(&small, &format!("session {}", seed % 3), sample("base", request(seed))))
        .collect();
    let roomy = engine();
    base_sampler(&roomy, "base");
    for (seed, rx) in running.into_iter().enumerate() {
        let expected = sampled(ask(&roomy, sample("base", request(seed as u64))));
        assert_eq!(sample_bits(&sampled(rx.recv().unwrap())), sample_bits(&expected));
    }
}

/// The prompts of requests that were admitted take pages too: were it not for the pages that each keeps for its samples, they would wait for
/// each other for ever.
#[test]
fn many_prompts_with_many_samples_all_finish_in_a_small_cache() {
    let engine = common::engine_with(2, 40 << 20);
    base_sampler(&engine, "base");
    let request = |seed| sample_request(tokens(seed, 380), 64, 20, seed);
    let mut waiting: Vec<u64> = (0..40).collect();
    while !waiting.is_empty() {
        let running: Vec<_> = waiting.drain(..).map(|seed| (seed, submit(&engine, sample("base", request(seed))))).collect();
        for (seed, rx) in running {
            match rx.recv().unwrap() {
                Err(Failure::User(message)) if message.contains("send it again") => waiting.push(seed),
                outcome => assert_eq!(sampled(outcome).sequences.len(), 64),
            }
        }
    }
}

#[test]
fn a_cancelled_request_and_an_ended_session_stop_their_work() {
    let engine = engine();
    base_sampler(&engine, "base");
    let endless = || sample("base", sample_request(tokens(1, 20), 200, 2000, 1));
    let (cancelled, ended) = (submit_as(&engine, "a", endless()), submit_as(&engine, "b", endless()));
    let (tx, rx) = std::sync::mpsc::channel();
    engine.submit("named".into(), client("a"), endless(), Box::new(move |outcome, _| drop(tx.send(outcome)))).unwrap();
    ask(&engine, Request::Cancel { request_id: "named".into() }).unwrap();
    assert!(user_error(rx.recv().unwrap()).contains("cancelled"));
    submit_as(&engine, "b", Request::EndSession).recv().unwrap().unwrap();
    assert!(user_error(ended.recv().unwrap()).contains("session"));
    assert!(cancelled.try_recv().is_err(), "the other session goes on");
    submit_as(&engine, "a", Request::EndSession).recv().unwrap().unwrap();
    user_error(cancelled.recv().unwrap());
    // What pays for an answer is given back with it, on the engine's thread.
    let given_back = (0..1000).any(|_| {
        engine.ledger().used() == 0 || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }
    });
    assert!(given_back, "{} bytes are held for nobody", engine.ledger().used());
}

#[test]
fn bad_requests_fail_alone_with_the_value_that_is_wrong() {
    let engine = engine();
    base_sampler(&engine, "base");
    let good = || sample_request(tokens(2, 20), 1, 4, 1);
    let context = engine.info().max_context_tokens;
    let running = submit(&engine, sample("base", SampleRequest { max_tokens: Some(100), ..good() }));
    for (request, expected) in [
        (SampleRequest { prompt: vec![], ..good() }, "prompt is empty"),
        (SampleRequest { prompt: vec![5, -3], ..good() }, "prompt[1] is -3"),
        (SampleRequest { prompt: vec![100_000], ..good() }, "prompt[0] is 100000"),
        (SampleRequest { prompt: tokens(1, context + 1), ..good() }, "is longer than the context"),
        (SampleRequest { max_tokens: Some(0), ..good() }, "max_tokens is 0"),
        (SampleRequest { num_samples: 0, ..good() }, "num_samples is 0"),
        (SampleRequest { temperature: -1.0, ..good() }, "temperature is -1"),
        (SampleRequest { temperature: f32::NAN, ..good() }, "temperature is NaN"),
        (SampleRequest { top_p: 0.0, ..good() }, "top_p is 0"),
        (SampleRequest { top_k: Some(0), ..good() }, "top_k is 0"),
        (SampleRequest { topk_sample_logprobs: 1 << 20, ..good() }, "topk_sample_logprobs is 1048576"),
        (SampleRequest { prompt_logprobs_last_n: Some(0), ..good() }, "last_n is 0"),
        (SampleRequest { stop: Stop::Strings(vec![String::new()]), ..good() }, "stop[0] has 0 bytes"),
        (SampleRequest { stop: Stop::Tokens(vec![-1]), ..good() }, "stop[0] is -1"),
    ] {
        let message = user_error(ask(&engine, sample("base", request)));
        assert!(message.contains(expected), "{message}");
    }
    assert!(user_error(ask(&engine, sample("nobody", good()))).contains("no sampling weights nobody"));
    assert_eq!(sampled(running.recv().unwrap()).sequences[0].tokens.len(), 100);
}
