//! What a tenant gets is the same bits alone or in company, however its work is cut, and with any number of threads.

mod common;

use std::sync::mpsc::Receiver;

use common::*;
use strata_engine::EngineHandle;
use strata_engine::api::*;

/// Submits three rounds of training of one tenant; every third tenant also scores.
fn submit_training(engine: &EngineHandle, id: &str, seed: u64) -> Vec<Receiver<Outcome>> {
    create(engine, id, 4 + seed as usize, seed);
    let mut seq = 0;
    let mut ops = Vec::new();
    for round in 0..3 {
        ops.push(backward(examples(seed + round, 3)));
        ops.push(backward(examples(seed + 50 + round, 2)));
        if seed.is_multiple_of(3) {
            ops.push(forward(examples(seed + 90, 2)));
        }
        ops.push(step(1e-2));
    }
    ops.into_iter()
        .map(|op| {
            seq += 1;
            submit(engine, train(id, seq, op))
        })
        .collect()
}

/// All that tenant `t` of seed 3 computes, with the saved state last.
fn results(engine: &EngineHandle, company: bool) -> (Vec<Vec<u32>>, Vec<f64>, Vec<u8>) {
    let others: Vec<_> = if company { (4..11).map(|s| submit_training(engine, &format!("o{s}"), s)).collect() } else { vec![] };
    base_sampler(engine, "base");
    let samples: Vec<_> = (0..if company { 8 } else { 0 })
        .map(|s| submit(engine, sample("base", sample_request(tokens(s, 40), 2, 30, s))))
        .collect();
    let own = submit_training(engine, "t", 3);
    let (mut passes, mut norms) = (Vec::new(), Vec::new());
    for outcome in own.into_iter().map(|rx| rx.recv().unwrap()) {
        match outcome {
            Ok(Response::ForwardBackward(output)) => passes.push(bits(&output)),
            other => norms.push(grad_norm(other)),
        }
    }
    for outcome in others.into_iter().flatten().chain(samples).map(|rx| rx.recv().unwrap()) {
        outcome.expect("the others succeed too");
    }
    (passes, norms, saved_bytes(engine, "t", 13))
}

#[test]
fn a_tenant_computes_the_same_bits_alone_and_in_company() {
    let alone = results(&engine(), false);
    assert_eq!(alone.1.len(), 3);
    assert!(alone.1.iter().all(|&n| n > 0.0));
    assert_ne!(alone.0[0], alone.0[3], "training changes the losses");
    assert!(alone == results(&engine(), true), "company changed the bits");
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let one = results(&engine_with(1, MEMORY_BYTES), false);
    assert!(one == results(&engine_with(3, MEMORY_BYTES), false));
}

#[test]
fn a_batch_cut_into_requests_is_the_same_step() {
    let engine = engine();
    let data = examples(1, 6);
    create(&engine, "whole", 8, 1);
    create(&engine, "cut", 8, 1);
    let whole = losses(ask(&engine, train("whole", 1, backward(data.clone()))));
    let cut: Vec<_> =
        (0..3).map(|i| losses(ask(&engine, train("cut", 1 + i as u64, backward(data[2 * i..2 * i + 2].to_vec()))))).collect();
    assert_eq!(bits(&whole), cut.iter().flat_map(bits).collect::<Vec<_>>());
    let sum: f64 = cut.iter().map(loss_sum).sum();
    assert!((loss_sum(&whole) - sum).abs() < 1e-9 * sum.abs());
    let norms = [ask(&engine, train("whole", 2, step(1e-2))), ask(&engine, train("cut", 4, step(1e-2)))].map(grad_norm);
    assert_eq!(norms[0].to_bits(), norms[1].to_bits());
    assert!(saved_bytes(&engine, "whole", 3) == saved_bytes(&engine, "cut", 5));
}

#[test]
fn one_pass_and_many_passes_are_the_same_step() {
    // Enough tokens for several passes, of which the second tenant's are cut elsewhere by a neighbour.
    let data: Vec<Datum> = (0..5).map(|i| cross_entropy_datum(&tokens(i, 601), 1.0)).collect();
    let engine = engine();
    create(&engine, "alone", 4, 2);
    losses(ask(&engine, train("alone", 1, backward(data.clone()))));
    grad_norm(ask(&engine, train("alone", 2, step(1e-2))));
    create(&engine, "beside", 4, 2);
    create(&engine, "neighbour", 4, 3);
    let neighbour = submit(&engine, train("neighbour", 1, backward(examples(9, 20))));
    losses(ask(&engine, train("beside", 1, backward(data))));
    grad_norm(ask(&engine, train("beside", 2, step(1e-2))));
    losses(neighbour.recv().unwrap());
    assert!(saved_bytes(&engine, "alone", 3) == saved_bytes(&engine, "beside", 3));
}

#[test]
fn samples_are_the_same_alone_and_in_company() {
    let request = || sample_request(tokens(77, 100), 3, 40, 5);
    let alone = engine();
    base_sampler(&alone, "base");
    let alone = sampled(ask(&alone, sample("base", request())));
    let engine = engine();
    base_sampler(&engine, "base");
    create(&engine, "m", 8, 1);
    losses(ask(&engine, train("m", 1, backward(examples(4, 3)))));
    grad_norm(ask(&engine, train("m", 2, step(1e-1))));
    snapshot(&engine, "m", 3, "tuned");
    let company: Vec<_> = (0..10u64)
        .map(|s| {
            let weights = if s % 2 == 0 { "tuned" } else { "base" };
            submit(&engine, sample(weights, sample_request(tokens(s, 10 + 30 * s as usize), 2, 50, s)))
        })
        .collect();
    let training = submit(&engine, train("m", 4, backward(examples(5, 10))));
    let together = sampled(ask(&engine, sample("base", request())));
    assert_eq!(sample_bits(&alone), sample_bits(&together));
    company.into_iter().for_each(|rx| drop(sampled(rx.recv().unwrap())));
    losses(training.recv().unwrap());
}
