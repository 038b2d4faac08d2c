//! What any processor can do, in code without intrinsics.

use std::hint::black_box;

use super::Inputs;
use super::arithmetic::Loop;

/// Lanes of eight vectors of 128 bits, each a chain of dependent sums.
const LANES: usize = 32;

/// Multiply, then add. Without a promise of a fused instruction the two stay apart.
pub(super) fn multiply_add() -> Loop {
    Loop { instructions: "portable multiply and add", inputs: Inputs::F32, flops_per_round: 2 * LANES as u64, run }
}

fn run(rounds: u64) {
    let (factor, summand) = (black_box(0.5f32), black_box(1.0f32));
    let mut chains: [f32; LANES] = std::array::from_fn(|i| i as f32);
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = *chain * factor + summand;
        }
    }
    black_box(chains);
}

/// Reads every word, and answers with what the compiler cannot know without.
pub(super) fn read(words: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    for chunk in words.chunks_exact(16) {
        for (sum, &word) in sums.iter_mut().zip(chunk) {
            *sum |= word;
        }
    }
    sums.iter().fold(0, |a, &b| a | b)
}
