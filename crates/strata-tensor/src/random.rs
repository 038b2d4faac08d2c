//! Counter-based random numbers: a pure function of key and counter, so that a draw does not depend on who drew before.
//!
//! Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

use crate::cpu::isa::{Fma, Isa, multiversion};

/// Four random words for this key and counter.
#[inline(always)]
pub fn philox(key: u64, counter: [u64; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let mut k = [key as u32, (key >> 32) as u32];
    let mut c = [counter[0] as u32, (counter[0] >> 32) as u32, counter[1] as u32, (counter[1] >> 32) as u32];
    for _ in 0..10 {
        let p0 = MULTIPLIERS[0] as u64 * c[0] as u64;
        let p1 = MULTIPLIERS[1] as u64 * c[2] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// A uniform draw from [0, 1) with 24 bits, keyed by `key` at place `counter`.
pub fn uniform(key: [u64; 2], counter: u64) -> f32 {
    (philox(key[0], [counter, key[1]])[0] >> 8) as f32 / (1 << 24) as f32
}

/// Uniform draws from `[-bound, bound)`, for places `first..` of `key`, four to a block of the generator, on all cores.
pub fn fill_uniform(key: [u64; 2], first: u64, bound: f32, values: &mut [f32]) {
    const PER_THREAD_MIN: usize = 1 << 16;
    let fill = |first: u64, values: &mut [f32]| {
        let (mut block, mut words) = (u64::MAX, [0; 4]);
        for (place, value) in (first..).zip(values) {
            if block != place / 4 {
                block = place / 4;
                words = philox(key[0], [block, key[1]]);
            }
            *value = ((words[(place % 4) as usize] >> 8) as f32 / (1 << 23) as f32 - 1.0) * bound;
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(values.len() / PER_THREAD_MIN).max(1);
    let part = values.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (i, values) in values.chunks_mut(part).enumerate() {
            scope.spawn(move || fill(first + (i * part) as u64, values));
        }
    });
}

/// `(2 · uniform(key, place) − 1) · bound` of every place, from 0 on, to the bit: as many draws at a time as a vector of this machine has room for.
pub fn fill_symmetric(key: [u64; 2], bound: f32, values: &mut [f32]) {
    symmetric(Isa::detect(), key, bound, values);
}

multiversion! {
    /// See [`fill_symmetric`].
    fn symmetric(key: [u64; 2], bound: f32, values: &mut [f32]) = symmetric_body;
}

#[inline(always)]
fn symmetric_body(_fma: impl Fma, key: [u64; 2], bound: f32, values: &mut [f32]) {
    for (place, value) in values.iter_mut().enumerate() {
        let word = philox(key[0], [place as u64, key[1]])[0];
        *value = ((word >> 8) as f32 / (1 << 24) as f32 * 2.0 - 1.0) * bound;
    }
}

/// A standard normal draw keyed by `key` at place `counter` (Box and Muller, 1958).
pub fn normal(key: [u64; 2], counter: u64) -> f32 {
    let [a, b, ..] = philox(key[0], [counter, key[1]]);
    let radius = (-2.0 * ((a as f64 + 1.0) / (1u64 << 32) as f64).ln()).sqrt();
    (radius * (std::f64::consts::TAU * (b as f64 / (1u64 << 32) as f64)).cos()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_known_answers() {
        // kat_vectors of Random123: philox4x32-10.
        assert_eq!(philox(0, [0, 0]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox(u64::MAX, [u64::MAX, u64::MAX]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    }

    #[test]
    fn uniform_draws_do_not_depend_on_where_a_fill_begins() {
        let mut whole = vec![0.0; 200_000];
        fill_uniform([7, 9], 0, 0.5, &mut whole);
        let mut part = vec![0.0; 1000];
        fill_uniform([7, 9], 150_001, 0.5, &mut part);
        assert_eq!(part, whole[150_001..151_001]);
        assert!(whole.iter().all(|v| (-0.5..0.5).contains(v)));
        let mean = whole.iter().sum::<f32>() / whole.len() as f32;
        assert!(mean.abs() < 0.005);
    }

    #[test]
    fn symmetric_draws_are_those_of_single_places_on_every_instruction_set() {
        for isa in Isa::available() {
            for len in [0, 1, 7, 16, 100, 4099] {
                let mut values = vec![f32::NAN; len];
                symmetric(isa, [u64::MAX - 3, 5 << 32 | 7], 0.3, &mut values);
                for (place, value) in values.iter().enumerate() {
                    let expected = (uniform([u64::MAX - 3, 5 << 32 | 7], place as u64) * 2.0 - 1.0) * 0.3;
                    assert_eq!(value.to_bits(), expected.to_bits(), "{isa}: place {place} of {len}");
                }
            }
        }
    }

    #[test]
    fn normal_draws_have_unit_variance() {
        let n = 20_000;
        let (sum, squares) = (0..n).fold((0.0, 0.0), |(s, q), i| {
            let v = normal([3, 5], i) as f64;
            (s + v, q + v * v)
        });
        assert!((sum / n as f64).abs() < 0.03 && (squares / n as f64 - 1.0).abs() < 0.05);
    }
}
