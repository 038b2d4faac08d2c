//! Loops of x86-64 processors: f32 with AVX2 and AVX-512, bf16 with AVX-512-BF16 and AMX.

mod amx;
mod read;

use std::arch::x86_64::*;
use std::hint::black_box;

use super::Inputs;
use super::arithmetic::Loop;

pub(super) use read::readers;

/// Chains of dependent sums: with two operands they fill the registers, and are more than the latency of any processor times the instructions it
/// begins in a cycle.
const CHAINS_256: usize = 12;
const CHAINS_512: usize = 24;

/// The loops that this processor can run.
pub(super) fn loops() -> Vec<Loop> {
    let mut loops = Vec::new();
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        loops.push(Loop {
            instructions: "AVX2 vfmadd (f32)",
            inputs: Inputs::F32,
            flops_per_round: (CHAINS_256 * 8 * 2) as u64,
            // SAFETY: the processor has the instructions.
            run: |rounds| unsafe { fma_256(rounds) },
        });
    }
    if is_x86_feature_detected!("avx512f") {
        loops.push(Loop {
            instructions: "AVX-512 vfmadd (f32)",
            inputs: Inputs::F32,
            flops_per_round: (CHAINS_512 * 16 * 2) as u64,
            // SAFETY: the processor has the instructions.
            run: |rounds| unsafe { fma_512(rounds) },
        });
    }
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
        loops.push(Loop {
            instructions: "AVX-512-BF16 vdpbf16ps",
            inputs: Inputs::Bf16,
            flops_per_round: (CHAINS_512 * 32 * 2) as u64,
            // SAFETY: the processor has the instructions.
            run: |rounds| unsafe { dpbf16_512(rounds) },
        });
    }
    loops.extend(amx::multiply_tiles());
    loops
}

#[target_feature(enable = "avx2,fma")]
fn fma_256(rounds: u64) {
    let (factor, summand) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
    // Chains that begin alike would be computed once.
    let mut chains: [__m256; CHAINS_256] = std::array::from_fn(|i| _mm256_set1_ps(i as f32));
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm256_fmadd_ps(*chain, factor, summand);
        }
    }
    black_box(chains);
}

#[target_feature(enable = "avx512f")]
fn fma_512(rounds: u64) {
    let (factor, summand) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    let mut chains: [__m512; CHAINS_512] = std::array::from_fn(|i| _mm512_set1_ps(i as f32));
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm512_fmadd_ps(*chain, factor, summand);
        }
    }
    black_box(chains);
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn dpbf16_512(rounds: u64) {
    // 1.0 and 2^-24 in bf16: sums stay finite however long it runs.
    let (ones, small) = (_mm512_set1_epi16(black_box(0x3f80)), _mm512_set1_epi16(black_box(0x3380)));
    // SAFETY: vectors of the same size, in which every bit pattern is a value.
    let [a, b] = [ones, small].map(|words| unsafe { std::mem::transmute::<__m512i, __m512bh>(words) });
    let mut chains: [__m512; CHAINS_512] = std::array::from_fn(|i| _mm512_set1_ps(i as f32));
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm512_dpbf16_ps(*chain, a, b);
        }
    }
    black_box(chains);
}
