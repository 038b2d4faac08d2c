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

/// The loops that every processor of this architecture can run.
pub(super) fn loops() -> Vec<Loop> {
    vec![Loop {
        instructions: "NEON fmla (f32)",
        inputs: Inputs::F32,
        flops_per_round: (CHAINS * 4 * 2) as u64,
        // SAFETY: every processor of this architecture has the instructions.
        run: |rounds| unsafe { fma(rounds) },
    }]
}

#[target_feature(enable = "neon")]
fn fma(rounds: u64) {
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

/// The ways to read.
pub(super) fn readers() -> Vec<Reader> {
    // SAFETY: every processor of this architecture has the instructions.
    vec![|block| unsafe { read::<1>(block) }, |block| unsafe { read::<4>(block) }, |block| unsafe { read::<8>(block) }]
}

#[target_feature(enable = "neon")]
fn read<const STREAMS: usize>(block: &Block) {
    let stream_bytes = BLOCK_BYTES / STREAMS;
    let mut sums = [vdupq_n_u8(0); STREAMS];
    for at in (0..stream_bytes).step_by(VECTOR_BYTES) {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let at = block.0.as_ptr().cast::<u8>().wrapping_add(stream * stream_bytes + at);
            // SAFETY: the vector lies in the block.
            *sum = vorrq_u8(*sum, unsafe { vld1q_u8(at) });
        }
    }
    black_box(sums);
}
