//! Reads with vectors, fetched ahead.

use std::arch::x86_64::*;
use std::hint::black_box;

use crate::bandwidth::{BLOCK_BYTES, Block, Reader};

/// Bytes that all streams together are fetched ahead of their reads.
const AHEAD_BYTES: usize = 4096;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// The ways to read that this processor has.
pub(crate) fn readers() -> Vec<Reader> {
    let mut readers: Vec<Reader> = Vec::new();
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        readers.extend([
            (|block| unsafe { read_512::<1>(block) }) as Reader,
            |block| unsafe { read_512::<2>(block) },
            |block| unsafe { read_512::<4>(block) },
        ]);
    }
    if is_x86_feature_detected!("avx2") {
        // SAFETY: likewise.
        readers.extend([(|block| unsafe { read_256::<1>(block) }) as Reader, |block| unsafe { read_256::<4>(block) }]);
    }
    readers
}

#[target_feature(enable = "avx512f")]
fn read_512<const STREAMS: usize>(block: &Block) {
    let stream_bytes = BLOCK_BYTES / STREAMS;
    let mut sums = [_mm512_setzero_si512(); STREAMS];
    for line in (0..stream_bytes).step_by(LINE_BYTES) {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let at = block.0.as_ptr().cast::<u8>().wrapping_add(stream * stream_bytes + line);
            // SAFETY: the line lies in the block, which begins on one; fetching ahead never faults.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD_BYTES / STREAMS).cast());
                *sum = _mm512_or_si512(*sum, _mm512_load_si512(at.cast()));
            }
        }
    }
    black_box(sums);
}

#[target_feature(enable = "avx2")]
fn read_256<const STREAMS: usize>(block: &Block) {
    let stream_bytes = BLOCK_BYTES / STREAMS;
    let mut sums = [_mm256_setzero_si256(); STREAMS];
    for line in (0..stream_bytes).step_by(LINE_BYTES) {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let at = block.0.as_ptr().cast::<u8>().wrapping_add(stream * stream_bytes + line);
            // SAFETY: as for the wider reads.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD_BYTES / STREAMS).cast());
                let halves = _mm256_or_si256(_mm256_load_si256(at.cast()), _mm256_load_si256(at.wrapping_add(32).cast()));
                *sum = _mm256_or_si256(*sum, halves);
            }
        }
    }
    black_box(sums);
}
