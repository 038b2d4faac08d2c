//! What a request can have of its prompt beside its own log-probabilities: those of tokens it names, and tokens drawn in the place of its own.

mod common;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;

const LENGTH: usize = 150;

/// A prompt and an engine whose sampler `tuned` has been trained away from the base model (operations 1 to 3).
fn tuned() -> (EngineHandle, Vec<i64>) {
    let engine = engine();
    create(&engine, "m", 8, 1);
    losses(ask(&engine, train("m", 1, backward(examples(4, 3)))));
    grad_norm(ask(&engine, train("m", 2, step(3e-2))));
    snapshot(&engine, "m", 3, "tuned");
    (engine, tokens(1, LENGTH))
}

fn dense(columns: usize, ids: Vec<i64>) -> PromptTargets {
    PromptTargets { shape: [ids.len() / columns, columns], cells: Cells::All, ids }
}

/// The cells of a dense matrix that are not -1, as compressed rows.
fn sparse(targets: &PromptTargets) -> PromptTargets {
    let [rows, width] = targets.shape;
    let (mut row_offsets, mut columns, mut ids) = (vec![0], Vec::new(), Vec::new());
    for row in 0..rows {
        for column in (0..width).filter(|column| targets.ids[row * width + column] != -1) {
            columns.push(column as i64);
            ids.push(targets.ids[row * width + column]);
        }
        row_offsets.push(ids.len() as i64);
    }
    PromptTargets { shape: targets.shape, cells: Cells::Csr { row_offsets, columns }, ids }
}

/// The prompt's own tokens, others, and nothing, in turn.
fn some_targets(prompt: &[i64]) -> PromptTargets {
    let row = |i: usize| [prompt[i + 1], prompt[i / 2], if i.is_multiple_of(3) { -1 } else { i as i64 }];
    dense(3, (0..prompt.len() - 1).flat_map(row).collect())
}

/// One token after `prompt`, and what is asked of the prompt.
fn scored(prompt: &[i64], targets: Option<PromptTargets>) -> SampleRequest {
    SampleRequest { target_prompt_logprobs: targets, ..sample_request(prompt.to_vec(), 1, 1, 1) }
}

fn target_logprobs(output: &SampleOutput) -> Vec<u32> {
    bits_of(&output.target_prompt_logprobs.as_ref().expect("they were asked for").logprobs)
}

#[test]
fn named_tokens_have_the_bits_that_forward_computes_and_what_is_not_named_has_zero() {
    let (engine, prompt) = tuned();
    let targets = some_targets(&prompt);
    let asked = SampleRequest { prompt_logprobs: true, ..scored(&prompt, Some(targets.clone())) };
    let output = sampled(ask(&engine, sample("tuned", asked)));
    let found = output.target_prompt_logprobs.unwrap();
    assert_eq!((found.shape, &found.cells), (targets.shape, &Cells::All));
    // A pass takes a matrix of targets too; it has to name something in every cell.
    let named: Vec<i64> = targets.ids.iter().map(|&id| id.max(0)).collect();
    let values = LossValues::I64(named);
    let target_tokens = LossInput { shape: vec![LENGTH - 1, 3], values };
    let weights = LossInput { shape: vec![LENGTH - 1, 3], values: LossValues::F32(vec![1.0; 3 * (LENGTH - 1)]) };
    let loss_inputs = [("target_tokens".to_owned(), target_tokens), ("weights".to_owned(), weights)].into();
    let datum = Datum { tokens: prompt[..LENGTH - 1].to_vec(), images: Vec::new(), loss_inputs };
    let exact = losses(ask(&engine, train("m", 4, forward(vec![datum])))).data.remove(0).logprobs;
    for (cell, &id) in targets.ids.iter().enumerate() {
        let expected = if id == -1 { 0.0 } else { exact[cell] };
        assert_eq!(found.logprobs[cell].to_bits(), expected.to_bits(), "cell {cell}, token {id}");
    }
    let own: Vec<f32> = found.logprobs.chunks(3).map(|row| row[0]).collect();
    let scores: Vec<f32> = output.prompt_logprobs.unwrap().into_iter().flatten().collect();
    assert_eq!(bits_of(&own), bits_of(&scores), "the last position included");
}

#[test]
fn a_sparse_matrix_is_answered_as_it_was_asked() {
    let (engine, prompt) = tuned();
    let dense = some_targets(&prompt);
    let sparse = sparse(&dense);
    let all = target_logprobs(&sampled(ask(&engine, sample("tuned", scored(&prompt, Some(dense.clone()))))));
    let output = sampled(ask(&engine, sample("tuned", scored(&prompt, Some(sparse.clone())))));
    let found = output.target_prompt_logprobs.as_ref().unwrap();
    assert_eq!((found.shape, &found.cells), (sparse.shape, &sparse.cells));
    let listed: Vec<u32> = all.iter().zip(&dense.ids).filter(|(_, id)| **id != -1).map(|(bits, _)| *bits).collect();
    assert_eq!(target_logprobs(&output), listed);
    // A listed cell may want nothing either.
    let mut with_gap = sparse;
    with_gap.ids[7] = -1;
    let found = target_logprobs(&sampled(ask(&engine, sample("tuned", scored(&prompt, Some(with_gap))))));
    assert_eq!((found[7], &found[8..]), (0, &listed[8..]));
}

#[test]
fn named_tokens_and_alternatives_are_the_same_from_a_cached_prompt_in_company_and_in_a_small_cache() {
    let (engine, prompt) = tuned();
    base_sampler(&engine, "base");
    let late = |from: usize| {
        let named = some_targets(&prompt);
        let ids = named.ids.iter().enumerate().map(|(cell, &id)| if cell < 3 * from { -1 } else { id });
        PromptTargets { ids: ids.collect(), ..named }
    };
    let asked = |from: usize, k: usize| SampleRequest { prompt_alt_tokens_k: k, ..scored(&prompt, Some(late(from))) };
    let outcome = |engine: &EngineHandle, asked| sampled(ask(engine, sample("base", asked)));
    let first = outcome(&engine, asked(0, 3));
    assert_eq!(first.prompt_cache_hit_tokens, 0);
    let again = outcome(&engine, asked(0, 3));
    assert_eq!(again, first, "the cache has the prompt now, and all of it is computed again");
    // Rows before the first that names a token are not computed: here that of position 131.
    let late_one = outcome(&engine, asked(130, 0));
    assert_eq!(late_one.prompt_cache_hit_tokens, 128, "of two tokens more no copy is made");
    assert_eq!(target_logprobs(&late_one)[390..], target_logprobs(&first)[390..]);
    assert!(target_logprobs(&late_one)[..390].iter().all(|bits| *bits == 0));
    // Position 128 is predicted from the last token of the second page, which has to be computed.
    let on_the_edge = outcome(&engine, asked(127, 0));
    assert_eq!(on_the_edge.prompt_cache_hit_tokens, 127);
    assert_eq!(target_logprobs(&on_the_edge)[381..], target_logprobs(&first)[381..]);
    // Others meanwhile, in steps that cut prompts elsewhere.
    let others: Vec<_> = (0..6)
        .map(|n| {
            let request = SampleRequest { prompt_alt_tokens_k: 2, ..sample_request(tokens(20 + n, 300), 2, 20, n) };
            submit_as(&engine, "others", sample("tuned", request))
        })
        .collect();
    engine.info();
    let in_company = outcome(&engine, SampleRequest { prompt: prompt.clone(), ..asked(0, 3) });
    assert_eq!(in_company, first);
    others.into_iter().for_each(|other| drop(sampled(other.recv().unwrap())));
    // Where prompts and samples take each other's pages.
    let small = common::engine_with(2, 40 << 20);
    base_sampler(&small, "base");
    let crowd: Vec<_> = (0..8u64)
        .map(|n| {
            let request = sample_request(tokens(n, small.info().max_context_tokens / 2), 3, 60, n);
            submit_as(&small, &format!("session {}", n % 3), sample("base", request))
        })
        .collect();
    assert_eq!(outcome(&small, asked(0, 3)), first);
    crowd.into_iter().for_each(|other| drop(sampled(other.recv().unwrap())));
}

#[test]
fn alternatives_are_drawn_anew_at_every_position_and_scored_as_named_tokens_are() {
    let (engine, prompt) = tuned();
    let asked = |k, seed, temperature| SampleRequest { prompt_alt_tokens_k: k, seed, temperature, ..scored(&prompt, None) };
    let drawn = |request| sampled(ask(&engine, sample("tuned", request))).prompt_alt_tokens.unwrap();
    let first = drawn(asked(4, u64::MAX - 5, 1.0));
    assert_eq!((first.k, first.tokens.len(), first.logprobs.len()), (4, 4 * (LENGTH - 1), 4 * (LENGTH - 1)));
    // Their log-probabilities are those of the model, whatever the temperature.
    for temperature in [1.0, 3.0] {
        let drawn = drawn(asked(4, 9, temperature));
        let named = dense(4, drawn.tokens.iter().map(|&token| token.into()).collect());
        let output = sampled(ask(&engine, sample("tuned", scored(&prompt, Some(named)))));
        assert_eq!(target_logprobs(&output), bits_of(&drawn.logprobs), "{temperature}");
    }
    assert_ne!(drawn(asked(4, 1, 1.0)).tokens, first.tokens);
    let (hot, seed) = (drawn(asked(4, 2, 3.0)), 2);
    assert_ne!(drawn(asked(4, seed, 1.0)).tokens, hot.tokens);
    // A draw does not depend on how many there are, nor on what restricts samples.
    let one = drawn(SampleRequest { top_k: Some(1), top_p: 0.1, ..asked(1, seed, 3.0) });
    let first_of_four: Vec<u32> = hot.tokens.chunks(4).map(|row| row[0]).collect();
    assert_eq!(one.tokens, first_of_four);
    // Where all tokens are as probable at one position as at another, what is drawn is another all the same.
    let flat = drawn(asked(4, seed, 1e6));
    let repeated = flat.tokens.chunks(4).zip(flat.tokens.chunks(4).skip(1)).filter(|(row, next)| row == next).count();
    assert_eq!(repeated, 0, "of {} positions", LENGTH - 1);
    let greedy = drawn(asked(2, 3, 0.0));
    let request = SampleRequest { topk_prompt_logprobs: 1, ..scored(&prompt, None) };
    let best = sampled(ask(&engine, sample("tuned", request))).topk_prompt_logprobs.unwrap();
    let best: Vec<u32> = best[1..].iter().flat_map(|row| [row[0].0; 2]).collect();
    assert_eq!(greedy.tokens, best);
}

#[test]
fn alternatives_follow_the_distribution_of_their_position() {
    let (engine, prompt) = tuned();
    let prompt = &prompt[..9];
    let mut counts = vec![std::collections::HashMap::<u32, f64>::new(); prompt.len()];
    const REQUESTS: u64 = 16;
    for seed in 0..REQUESTS {
        let request = SampleRequest { prompt_alt_tokens_k: 128, seed, ..scored(prompt, None) };
        let drawn = sampled(ask(&engine, sample("tuned", request))).prompt_alt_tokens.unwrap();
        for (row, tokens) in drawn.tokens.chunks(128).enumerate() {
            tokens.iter().for_each(|&token| *counts[row + 1].entry(token).or_default() += 1.0 / (128 * REQUESTS) as f64);
        }
    }
    let request = SampleRequest { topk_prompt_logprobs: 128, ..scored(prompt, None) };
    let probable = sampled(ask(&engine, sample("tuned", request))).topk_prompt_logprobs.unwrap();
    for (position, row) in probable.iter().enumerate().skip(1) {
        for &(token, logprob) in row {
            let (share, probability) = (counts[position].get(&token).copied().unwrap_or(0.0), f64::from(logprob.exp()));
            // Five standard deviations of 2048 draws, and then some.
            let bound = 5.0 * (probability * (1.0 - probability) / 2048.0).sqrt() + 0.004;
            assert!((share - probability).abs() < bound, "position {position}, token {token}: {share}, not {probability}");
        }
    }
}

#[test]
fn the_last_positions_alone_have_scores_and_all_have_what_is_named_and_drawn() {
    let (engine, prompt) = tuned();
    let asked = |last_n| SampleRequest {
        prompt_logprobs: true,
        prompt_logprobs_last_n: last_n,
        topk_prompt_logprobs: 2,
        prompt_alt_tokens_k: 2,
        ..scored(&prompt, Some(some_targets(&prompt)))
    };
    let all = sampled(ask(&engine, sample("tuned", asked(None))));
    let scores = all.prompt_logprobs.clone().unwrap();
    for n in [1, 2, LENGTH - 1] {
        let last = sampled(ask(&engine, sample("tuned", asked(Some(n)))));
        assert_eq!(
            (&last.target_prompt_logprobs, &last.prompt_alt_tokens),
            (&all.target_prompt_logprobs, &all.prompt_alt_tokens)
        );
        let own = last.prompt_logprobs.unwrap();
        assert!(own[..LENGTH - n].iter().all(Option::is_none), "{n}");
        assert_eq!(own[LENGTH - n..], scores[LENGTH - n..], "{n}");
        let topk = last.topk_prompt_logprobs.unwrap();
        assert!(topk[..LENGTH - n].iter().all(Vec::is_empty) && topk[LENGTH - n..].iter().all(|row| row.len() == 2), "{n}");
    }
}

#[test]
fn a_prompt_of_one_token_has_nothing_to_draw_instead() {
    let (engine, prompt) = tuned();
    let request = SampleRequest { prompt_alt_tokens_k: 3, prompt_logprobs: true, ..scored(&prompt[..1], None) };
    let output = sampled(ask(&engine, sample("tuned", request)));
    assert_eq!(output.prompt_alt_tokens, Some(PromptAltTokens { k: 3, tokens: vec![], logprobs: vec![] }));
    assert_eq!(output.prompt_logprobs, Some(vec![None]));
}

#[test]
fn a_prompt_that_fills_the_context_is_scored_and_one_token_follows() {
    // This is the model's own limit, in much memory and in little. The simulation has contexts that end where the cache does.
    for memory_bytes in [MEMORY_BYTES, 40 << 20] {
        let engine = engine_with(2, memory_bytes);
        base_sampler(&engine, "base");
        let context = engine.info().max_context_tokens;
        let text = tokens(5, context);
        let asked = |length: usize, max_tokens| SampleRequest {
            max_tokens,
            prompt_logprobs: true,
            prompt_alt_tokens_k: 1,
            ..scored(&text[..length], None)
        };
        for (max_tokens, num_samples) in [(Some(1), 1), (None, 3), (Some(50), 2)] {
            let request = SampleRequest { num_samples, ..asked(context, max_tokens) };
            let full = sampled(ask(&engine, sample("base", request)));
            let scores = full.prompt_logprobs.unwrap();
            assert!(scores.len() == context && scores[1..].iter().all(Option::is_some));
            assert_eq!(full.prompt_alt_tokens.unwrap().tokens.len(), context - 1);
            assert!(full.sequences.iter().all(|s| s.tokens.len() == 1 && s.stop_reason == StopReason::Length), "{context}");
            // One that is shorter by one has room for as many.
            let shorter = sampled(ask(&engine, sample("base", asked(context - 1, max_tokens))));
            assert_eq!(shorter.sequences[0].tokens.len(), 1);
            assert_eq!(shorter.prompt_logprobs.unwrap()[..], scores[..context - 1]);
        }
        let longer = user_error(ask(&engine, sample("base", scored(&tokens(5, context + 1), None))));
        assert!(longer.contains(&format!("{} tokens", context + 1)) && longer.contains(&context.to_string()), "{longer}");
    }
}

#[test]
fn what_is_wrong_with_named_tokens_is_said_with_its_value() {
    let (engine, prompt) = tuned();
    let prompt = &prompt[..4];
    let vocab = engine.info().vocab_size as i64;
    let all = |shape, ids: &[i64]| PromptTargets { shape, cells: Cells::All, ids: ids.to_vec() };
    let csr = |row_offsets: &[i64], columns: &[i64], ids: &[i64]| {
        let cells = Cells::Csr { row_offsets: row_offsets.to_vec(), columns: columns.to_vec() };
        PromptTargets { shape: [3, 2], cells, ids: ids.to_vec() }
    };
    for (targets, expected) in [
        (all([4, 1], &[5; 4]), "has shape [4, 1]; a prompt of 4 tokens needs 3 rows"),
        (all([0, 1], &[]), "has shape [0, 1]; a prompt of 4 tokens needs 3 rows"),
        (all([3, 0], &[]), "has shape [3, 0]; its columns are between 1 and 1024"),
        (all([3, 1025], &[5; 3075]), "has shape [3, 1025]; its columns are between 1 and 1024"),
        (all([usize::MAX, usize::MAX], &[5]), "needs 3 rows"),
        (all([3, 2], &[5; 3]), "has 3 values, and its shape [3, 2] needs 6"),
        (all([3, 1], &[5, vocab, 5]), &format!("[1, 0] is {vocab}, neither a token of the vocabulary, 0 to {}", vocab - 1)),
        (all([3, 2], &[5, 5, 5, 5, 5, -2]), "[2, 1] is -2"),
        (all([3, 1], &[i64::MAX, 5, 5]), "[0, 0] is 9223372036854775807"),
        (all([3, 1], &[-1; 3]), "names no token"),
        (csr(&[0, 0, 0, 0], &[], &[]), "names no token"),
        (csr(&[0, 1, 2], &[0, 0], &[5; 2]), "has 3 sparse_crow_indices; 3 rows need 4"),
        (csr(&[], &[], &[]), "has 0 sparse_crow_indices; 3 rows need 4"),
        (csr(&[0, 1, 1, 2], &[0], &[5; 2]), "has 2 values and 1 sparse_col_indices"),
        (csr(&[1, 1, 1, 2], &[0, 0], &[5; 2]), "from 1 to 2; with 2 values they go from 0 to 2"),
        (csr(&[0, 1, 1, 3], &[0, 0], &[5; 2]), "from 0 to 3; with 2 values they go from 0 to 2"),
        (csr(&[0, 2, 1, 2], &[0, 1], &[5; 2]), "that fall from 2 to 1 at row 1"),
        (csr(&[0, -1, 1, 2], &[0, 1], &[5; 2]), "that fall from 0 to -1 at row 0"),
        (csr(&[0, i64::MAX, 1, 2], &[0, 1], &[5; 2]), "at row 1"),
        (csr(&[0, 1, 1, 2], &[0, 2], &[5; 2]), "has column 2 among sparse_col_indices of row 2; columns are 0 to 1"),
        (csr(&[0, 1, 1, 2], &[-1, 0], &[5; 2]), "has column -1 among sparse_col_indices of row 0"),
        (csr(&[0, 0, 2, 2], &[1, 0], &[5; 2]), "has column 0 behind 1 among sparse_col_indices of row 1"),
        (csr(&[0, 0, 2, 2], &[1, 1], &[5; 2]), "has column 1 behind 1 among sparse_col_indices of row 1"),
        (csr(&[0, 0, 1, 2], &[1, 1], &[5, vocab]), &format!("[2, 1] is {vocab}")),
    ] {
        let message = user_error(ask(&engine, sample("tuned", scored(prompt, Some(targets)))));
        assert!(message.starts_with("target_prompt_logprobs") && message.contains(expected), "{message}, not {expected}");
    }
    let one = user_error(ask(&engine, sample("tuned", scored(&prompt[..1], Some(all([0, 1], &[]))))));
    assert!(one.contains("names no token"), "{one}");
    let request = SampleRequest { prompt_alt_tokens_k: 129, ..scored(prompt, None) };
    assert!(user_error(ask(&engine, sample("tuned", request))).contains("prompt_alt_tokens_k is 129, above 128"));
    let request = SampleRequest { prompt_logprobs: true, prompt_logprobs_last_n: Some(4), ..scored(prompt, None) };
    assert!(user_error(ask(&engine, sample("tuned", request))).contains("last_n is 4, not between 1 and 3"));
}

/// What an answer takes is paid for before it is computed.
#[test]
fn an_answer_that_can_never_fit_is_refused() {
    let engine = engine_with(2, 40 << 20);
    base_sampler(&engine, "base");
    let context = engine.info().max_context_tokens;
    let room = engine.ledger().request_bytes_max();
    let request = SampleRequest { prompt_alt_tokens_k: 128, ..scored(&tokens(1, context), None) };
    let (tx, _rx) = std::sync::mpsc::channel();
    let refusal =
        engine.submit("r".into(), client("a"), sample("base", request), Box::new(move |outcome, _| drop(tx.send(outcome))));
    let least = 20 * 128 * context as u64;
    assert!(least > room, "{least} bytes fit into {room}");
    let Err(Refusal::User(message)) = refusal else { panic!("{refusal:?}") };
    assert!(message.contains("above the limit") && message.contains(&room.to_string()), "{message}");
    assert!(message.contains("prompt_alt_tokens_k is 128"), "{message}");
}
