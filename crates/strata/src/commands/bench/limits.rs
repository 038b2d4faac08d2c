//! What the machine can do: the fastest matmul of the backend, and the fastest read of memory.

use std::time::Instant;

use strata_tensor::{Backend, DType, HostTensor, random};

/// Side of the square matmul that stands for the peak: its operands stay in the cache that the cores share.
const MATMUL_SIDE: usize = 2048;
/// Bytes that are read to measure bandwidth: many times any cache.
const READ_BYTES: usize = 512 << 20;
/// Tries; the best counts, for others may use the machine too.
const TRIES: usize = 8;

/// Limits of this machine, per second.
pub(super) struct Limits {
    /// Floating-point operations of the fastest matmul.
    pub matmul_flops: f64,
    /// Bytes read from memory.
    pub read_bytes: f64,
}

impl Limits {
    /// The better of two measurements.
    pub(super) fn max(&self, other: Limits) -> Limits {
        Limits { matmul_flops: self.matmul_flops.max(other.matmul_flops), read_bytes: self.read_bytes.max(other.read_bytes) }
    }
}

/// Measures both limits.
pub(super) fn measure(backend: &dyn Backend, dtype: DType, threads: Option<usize>) -> anyhow::Result<Limits> {
    Ok(Limits { matmul_flops: matmul_flops(backend, dtype)?, read_bytes: read_bytes(threads) })
}

fn matmul_flops(backend: &dyn Backend, dtype: DType) -> anyhow::Result<f64> {
    const N: usize = MATMUL_SIDE;
    let mut values = vec![0.0; N * N];
    random::fill_uniform([0, 0], 0, 1.0, &mut values);
    let x = backend.tensor(&values, &[N, N], dtype)?;
    let mut w = backend.packed(1, N, N, dtype.into())?;
    backend.upload_rows(&mut w, 0, 0, HostTensor::from_f32(&values, &[N, N], dtype)?.as_ref())?;
    let mut y = backend.zeros(&[N, N], DType::F32)?;
    let mut done = Ok(());
    let seconds = best(|| done = backend.matmul(&x, w.layer(0), &mut y));
    done?;
    Ok(2.0 * (N * N * N) as f64 / seconds)
}

fn read_bytes(threads: Option<usize>) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores).max(1);
    let words = vec![1u64; READ_BYTES / 8];
    let seconds = best(|| {
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(threads)) {
                scope.spawn(move || std::hint::black_box(sum(part)));
            }
        });
    });
    READ_BYTES as f64 / seconds
}

/// Several sums at a time, so that reading is what takes the time.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    for chunk in words.chunks_exact(16) {
        for (sum, &word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(word);
        }
    }
    sums.iter().fold(0, |a, &b| a.wrapping_add(b))
}

fn best(mut body: impl FnMut()) -> f64 {
    let mut seconds = f64::INFINITY;
    for _ in 0..TRIES {
        let start = Instant::now();
        body();
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    seconds
}
