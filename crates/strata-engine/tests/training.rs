//! The training operations: order, errors, losses, steps.

mod common;

use std::collections::BTreeMap;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;

#[test]
fn operations_run_in_the_order_of_their_ids() {
    let (ordered, shuffled) = (engine(), engine());
    create(&ordered, "m", 4, 1);
    create(&shuffled, "m", 4, 1);
    let op = |seq: u64| match seq {
        1 => backward(examples(1, 2)),
        2 => step(1e-2),
        _ => forward(examples(2, 2)),
    };
    let [_, _, expected] = [1, 2, 3].map(|seq| ask(&ordered, train("m", seq, op(seq))));
    let third = submit(&shuffled, train("m", 3, op(3)));
    let first = submit(&shuffled, train("m", 1, op(1)));
    assert!(first.recv().unwrap().is_ok());
    assert!(third.try_recv().is_err(), "the third waits for the second");
    let second = submit(&shuffled, train("m", 2, op(2)));
    assert!(second.recv().unwrap().is_ok());
    assert_eq!(bits(&losses(third.recv().unwrap())), bits(&losses(expected)));
    assert!(user_error(ask(&shuffled, train("m", 2, op(2)))).contains("accepted before"));
}

#[test]
fn a_failed_operation_takes_its_place_and_adds_nothing() {
    let engine = engine();
    create(&engine, "good", 4, 1);
    create(&engine, "bad", 4, 1);
    let mut wrong = examples(2, 3);
    wrong[2].tokens[0] = 9999;
    for (seq, op) in [(1, backward(examples(1, 2))), (2, step(1e-2))] {
        ask(&engine, train("good", seq, op)).unwrap();
    }
    let outcomes: Vec<_> = [
        backward(wrong),
        backward(examples(1, 2)),
        TrainOp::Refused("the server said no".into()),
        TrainOp::OptimStep(AdamParams { beta1: 1.5, ..AdamParams::default() }),
        step(1e-2),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, op)| submit(&engine, train("bad", 1 + i as u64, op)))
    .collect();
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(|rx| rx.recv().unwrap()).collect();
    assert!(user_error(outcomes[0].clone()).contains("datum 2: tokens[0] is 9999"));
    assert_eq!(user_error(outcomes[2].clone()), "the server said no");
    assert!(user_error(outcomes[3].clone()).contains("beta1 is 1.5"));
    assert!(saved_bytes(&engine, "good", 3) == saved_bytes(&engine, "bad", 6));
}

#[test]
fn negative_weights_give_the_negative_gradient() {
    let engine = engine();
    let norm = |id: &str, sign: f32| {
        create(&engine, id, 4, 1);
        let data: Vec<Datum> = (0..3).map(|i| cross_entropy_datum(&tokens(i, 20), sign * 0.7)).collect();
        let output = losses(ask(&engine, train(id, 1, backward(data))));
        (loss_sum(&output), grad_norm(ask(&engine, train(id, 2, step(1e-3)))))
    };
    let (plus, minus) = (norm("plus", 1.0), norm("minus", -1.0));
    assert_eq!(plus.0, -minus.0);
    assert_eq!(plus.1.to_bits(), minus.1.to_bits());
    assert!(plus.1 > 0.0 && plus.0 > 0.0);
}

#[test]
fn a_step_without_gradient_succeeds_and_a_fresh_adapter_is_the_base_model() {
    let engine = engine();
    create(&engine, "m", 4, 1);
    base_sampler(&engine, "base");
    let text = tokens(5, 50);
    let before = losses(ask(&engine, train("m", 1, forward(vec![cross_entropy_datum(&text, 1.0)]))));
    assert_eq!(grad_norm(ask(&engine, train("m", 2, TrainOp::OptimStep(AdamParams::default())))), 0.0);
    let after = losses(ask(&engine, train("m", 3, forward(vec![cross_entropy_datum(&text, 1.0)]))));
    assert_eq!(bits(&before), bits(&after));
    let scored = SampleRequest { prompt_logprobs: true, ..sample_request(text, 1, 1, 0) };
    let base = sampled(ask(&engine, sample("base", scored))).prompt_logprobs.unwrap();
    let base: Vec<f32> = base.into_iter().flatten().collect();
    assert_eq!(bits_of(&base), bits_of(&before.data[0].logprobs));
}

#[test]
fn training_lowers_the_loss_and_gradients_are_cleared_by_a_step() {
    let engine = engine();
    create(&engine, "m", 8, 1);
    let data = vec![cross_entropy_datum(&tokens(1, 40), 1.0)];
    let mut sums = Vec::new();
    for round in 0..8 {
        sums.push(loss_sum(&losses(ask(&engine, train("m", 2 * round + 1, backward(data.clone()))))));
        grad_norm(ask(&engine, train("m", 2 * round + 2, step(2e-3))));
    }
    assert!(sums[7] < 0.6 * sums[0], "{sums:?}");
    assert_eq!(grad_norm(ask(&engine, train("m", 17, step(1e-2)))), 0.0);
}

fn policy_datum(text: &[i64], logprobs: &[f32]) -> Datum {
    let n = text.len() - 1;
    let advantages = (0..n).map(|i| if i < 4 { 0.0 } else { (i % 3) as f32 - 0.8 }).collect();
    let q = logprobs.iter().enumerate().map(|(i, &lp)| if i < 4 { 0.0 } else { lp + 0.1 * (i % 5) as f32 - 0.2 }).collect();
    let mask = (0..n).map(|i| if i < 4 { 0.0 } else { 1.0 }).collect();
    datum(text, vec![("advantages", reals(advantages)), ("logprobs", reals(q)), ("sequence_ratio_mask", reals(mask))])
}

fn run_loss(engine: &EngineHandle, id: &str, name: &str, data: Vec<Datum>) -> (ForwardBackwardOutput, f64) {
    create(engine, id, 4, 1);
    let op = |forward_only| TrainOp::ForwardBackward { data: data.clone(), loss: loss(name), forward_only };
    let scored = losses(ask(engine, train(id, 1, op(true))));
    let output = losses(ask(engine, train(id, 2, op(false))));
    assert_eq!(bits(&scored), bits(&output), "{name}: forward alone answers the same");
    (output, grad_norm(ask(engine, train(id, 3, step(1e-3)))))
}

#[test]
fn every_policy_loss_runs_and_its_terms_add_up() {
    let engine = engine();
    let text = tokens(8, 30);
    create(&engine, "scorer", 4, 1);
    let scored = losses(ask(&engine, train("scorer", 1, forward(vec![cross_entropy_datum(&text, 1.0)]))));
    let data = vec![policy_datum(&text, &scored.data[0].logprobs); 2];
    for name in ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"] {
        let (output, norm) = run_loss(&engine, name, name, data.clone());
        let terms: f64 = output.data.iter().flat_map(|d| &d.elementwise_loss).map(|&l| l as f64).sum();
        assert_eq!(terms, loss_sum(&output), "{name}");
        assert!(norm.is_finite() && norm > 0.0, "{name}: {norm}");
        assert_eq!(bits_of(&output.data[0].logprobs), bits_of(&scored.data[0].logprobs), "{name}");
    }
}

#[test]
fn importance_sampling_on_policy_has_the_gradient_of_weighted_cross_entropy() {
    let engine = engine();
    let text = tokens(8, 30);
    create(&engine, "scorer", 4, 1);
    let scored = losses(ask(&engine, train("scorer", 1, forward(vec![cross_entropy_datum(&text, 1.0)]))));
    let q = reals(scored.data[0].logprobs.clone());
    let on_policy = datum(&text, vec![("logprobs", q), ("advantages", reals(vec![0.7; 29]))]);
    // Where the sampler's log-probabilities are the trainer's bit for bit, every ratio is exactly 1.
    let (output, _) = run_loss(&engine, "is", "importance_sampling", vec![on_policy]);
    assert!(output.data[0].elementwise_loss.iter().all(|&l| l == -0.7));
    run_loss(&engine, "ce", "cross_entropy", vec![cross_entropy_datum(&text, 0.7)]);
    assert!(saved_bytes(&engine, "is", 4) == saved_bytes(&engine, "ce", 4));
}

#[test]
fn several_targets_per_token_are_scored_each() {
    let engine = engine();
    create(&engine, "m", 4, 1);
    let text = tokens(3, 10);
    let one = losses(ask(&engine, train("m", 1, forward(vec![cross_entropy_datum(&text, 1.0)]))));
    let targets: Vec<i64> = text[1..].iter().flat_map(|&t| [t, 7]).collect();
    let loss_inputs = BTreeMap::from([
        ("target_tokens".to_string(), LossInput { shape: vec![9, 2], values: LossValues::I64(targets) }),
        ("weights".to_string(), LossInput { shape: vec![9, 2], values: LossValues::F32([1.0, 0.0].repeat(9)) }),
    ]);
    let two = losses(ask(
        &engine,
        train("m", 2, backward(vec![Datum { tokens: text[..9].to_vec(), images: Vec::new(), loss_inputs }])),
    ));
    assert_eq!(two.data[0].shape, [9, 2]);
    let first: Vec<f32> = two.data[0].logprobs.iter().step_by(2).copied().collect();
    assert_eq!(bits_of(&first), bits_of(&one.data[0].logprobs));
    assert_eq!(loss_sum(&one), loss_sum(&two));
}

#[test]
fn a_gradient_that_is_not_finite_is_refused_and_cleared() {
    let engine = engine();
    create(&engine, "m", 4, 1);
    create(&engine, "good", 4, 1);
    let text = tokens(3, 10);
    let q = reals(vec![-1e30; 9]);
    let infinite = datum(&text, vec![("logprobs", q), ("advantages", reals(vec![1.0; 9]))]);
    let op = TrainOp::ForwardBackward { data: vec![infinite], loss: loss("importance_sampling"), forward_only: false };
    let (bad, good) = (submit(&engine, train("m", 1, op)), submit(&engine, train("good", 1, backward(examples(1, 2)))));
    assert!(user_error(bad.recv().unwrap()).contains("the loss of target"));
    losses(good.recv().unwrap());
    let told = user_error(ask(&engine, train("m", 2, step(1e-2))));
    assert!(told.contains("the gradient was lost") && told.contains("the loss of target"), "{told}");
    losses(ask(&engine, train("m", 3, backward(examples(1, 2)))));
    let norms = [("m", 4), ("good", 2)].map(|(id, seq)| grad_norm(ask(&engine, train(id, seq, step(1e-2)))));
    assert!(norms[0].is_finite());
    assert_eq!(norms[0].to_bits(), norms[1].to_bits());
}

#[test]
fn bad_adapters_and_unknown_models_are_refused() {
    let engine = engine();
    let make = |lora: LoraSpec| user_error(ask(&engine, Request::CreateModel { model_id: "m".into(), lora }));
    assert!(make(lora(0, 1)).contains("rank 0"));
    assert!(make(lora(100_000, 1)).contains("rank 100000"));
    let nothing = LoraSpec { train_attn: false, train_mlp: false, train_unembed: false, ..lora(4, 1) };
    assert!(make(nothing).contains("all three are off"));
    create(&engine, "m", 4, 1);
    assert!(make(lora(4, 1)).contains("exists already"));
    assert!(user_error(ask(&engine, train("nobody", 1, step(1e-3)))).contains("no model nobody"));
    assert!(user_error(ask(&engine, Request::UnloadModel { model_id: "nobody".into() })).contains("no model nobody"));
}

#[test]
fn an_unloaded_model_fails_what_waits_and_leaves_nothing_to_the_next_of_its_name() {
    let engine = engine();
    let fresh = |id: &str| {
        create(&engine, id, 4, 1);
        losses(ask(&engine, train(id, 1, backward(examples(1, 2)))));
    };
    fresh("m");
    let waiting = submit(&engine, train("m", 5, step(1e-3)));
    assert!(matches!(ask(&engine, Request::UnloadModel { model_id: "m".into() }), Ok(Response::Freed)));
    assert!(user_error(waiting.recv().unwrap()).contains("unloaded"));
    fresh("m");
    fresh("other");
    let norms = ["m", "other"].map(|id| grad_norm(ask(&engine, train(id, 2, step(1e-2)))));
    assert_eq!(norms[0].to_bits(), norms[1].to_bits(), "no gradient of the first m is left");
}
