//! Loops of 64-bit ARM processors.

use std::arch::aarch64::*;
use std::hint::black_box;

use super::Inputs;
use super::arithmetic::Loop;
use super::bandwidth::{BLOCK_BYTES, Block, Reader};

/// Chains of dependent sums: with two operands they are most of the registers, and more than four pipes times a latency of four or five cycles.
const CHAINS: usize = 24;
/// Bytes of a vector.
const VECTOR_BYTES: usize = 16;

/// The loops that this processor can run.
pub(super) fn loops() -> Vec<Loop> {
    vec![Loop { instructions: "NEON fmla (f32)", inputs: Inputs::F32, flops_per_round: (CHAINS * 4 * 2) as u64, run: fma }]
}

fn fma(rounds: u64) {
    // SAFETY: every processor of this architecture has the instructions.
    unsafe {
        let (factor, value) = (vdupq_n_f32(black_box(0.5)), vdupq_n_f32(black_box(1e-6)));
        // Chains that begin alike would be computed once.
        let mut chains: [float32x4_t; CHAINS] = std::array::from_fn(|i| vdupq_n_f32(i as f32));
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = vfmaq_f32(*chain, factor, value);
            }
        }
        black_box(chains);
    }
}

/// The ways to read that this processor has.
pub(super) fn readers() -> Vec<Reader> {
    vec![read::<1>, read::<4>, read::<8>]
}

fn read<const STREAMS: usize>(block: &Block) {
    let stream_bytes = BLOCK_BYTES / STREAMS;
    // SAFETY: every processor of this architecture has the instructions, and the reads lie in the block.
    unsafe {
        let mut sums = [vdupq_n_u8(0); STREAMS];
        for at in (0..stream_bytes).step_by(VECTOR_BYTES) {
            for (stream, sum) in sums.iter_mut().enumerate() {
                let at = block.0.as_ptr().cast::<u8>().add(stream * stream_bytes + at);
                *sum = vorrq_u8(*sum, vld1q_u8(at));
            }
        }
        black_box(sums);
    }
}
