//! Sums over rows in one order: lane `l` of 16 takes elements `l`, `l + 16`, ..., and a tree joins the lanes.
//!
//! Sixteen f32 fill the widest register; narrower ones hold the same lanes in several.

use crate::cpu::isa::Fma;

/// How many partial sums there are.
pub(super) const LANES: usize = 16;

/// Joins the lanes: halves are added until one value is left.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The last, shorter chunk of a row, filled up. Sums of products fill with zeros, which change no lane.
#[inline(always)]
pub(super) fn filled<const N: usize>(tail: &[f32], fill: f32) -> [f32; N] {
    let mut chunk = [fill; N];
    chunk[..tail.len()].copy_from_slice(tail);
    chunk
}

/// Sum of `a[i] * b[i]`.
#[inline(always)]
pub(super) fn dot(fma: impl Fma, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut sums = [0.0; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for l in 0..LANES {
            sums[l] = fma.fma(a[l], b[l], sums[l]);
        }
    }
    if !a_tail.is_empty() {
        let (a, b) = (filled::<LANES>(a_tail, 0.0), filled::<LANES>(b_tail, 0.0));
        for l in 0..LANES {
            sums[l] = fma.fma(a[l], b[l], sums[l]);
        }
    }
    tree(sums)
}

/// Sum of `a[i]`.
#[inline(always)]
pub(super) fn sum(a: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (chunks, tail) = a.as_chunks::<LANES>();
    for a in chunks.iter().chain([&filled(tail, 0.0)]) {
        for l in 0..LANES {
            sums[l] += a[l];
        }
    }
    tree(sums)
}

/// Sum of `(a[i] - center)^2`.
#[inline(always)]
pub(super) fn squares_about(fma: impl Fma, a: &[f32], center: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (chunks, tail) = a.as_chunks::<LANES>();
    for a in chunks.iter().chain([&filled(tail, center)]) {
        for l in 0..LANES {
            let from_center = a[l] - center;
            sums[l] = fma.fma(from_center, from_center, sums[l]);
        }
    }
    tree(sums)
}

/// Sum of `a[i] * b[i] * c[i]`.
#[inline(always)]
pub(super) fn dot3(fma: impl Fma, a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    assert!(a.len() == b.len() && b.len() == c.len());
    let mut sums = [0.0; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let (c_chunks, c_tail) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_chunks.iter().zip(b_chunks).zip(c_chunks) {
        for l in 0..LANES {
            sums[l] = fma.fma(a[l] * b[l], c[l], sums[l]);
        }
    }
    if !a_tail.is_empty() {
        let (a, b, c) = (filled::<LANES>(a_tail, 0.0), filled::<LANES>(b_tail, 0.0), filled::<LANES>(c_tail, 0.0));
        for l in 0..LANES {
            sums[l] = fma.fma(a[l] * b[l], c[l], sums[l]);
        }
    }
    tree(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Fused;
    use crate::cpu::rows::testing::{LENGTHS, random};

    #[test]
    fn a_sum_takes_every_element_in_lane_order() {
        for n in LENGTHS {
            let (a, b) = (random(n, 1), random(n, 2));
            let mut lanes = [0.0f32; LANES];
            for i in 0..n {
                lanes[i % LANES] = a[i].mul_add(b[i], lanes[i % LANES]);
            }
            let pairs = |v: &[f32]| -> Vec<f32> { (0..v.len() / 2).map(|l| v[l] + v[l + v.len() / 2]).collect() };
            let expected = pairs(&pairs(&pairs(&pairs(&lanes))));
            assert_eq!(dot(Fused, &a, &b), expected[0], "length {n}");
            assert_eq!(dot3(Fused, &a, &vec![1.0; n], &b), expected[0], "length {n}");
            assert_eq!(sum(&a), dot(Fused, &a, &vec![1.0; n]), "length {n}");
            let from_center: Vec<f32> = a.iter().map(|v| v - 0.7).collect();
            assert_eq!(squares_about(Fused, &a, 0.7), dot(Fused, &from_center, &from_center), "length {n}");
        }
    }
}
