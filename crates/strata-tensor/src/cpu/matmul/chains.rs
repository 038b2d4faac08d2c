//! Chains of multiply-adds over the steps of a reduction, in plain code.
//!
//! Every element of the result is one chain over the steps, in order, begun from zero or from what is there: its bits do not depend on the size of the
//! tile it was computed in, nor on where a long reduction was cut into blocks. `plain` is the reference; the vectoriser turns it into the kernel of
//! every instruction set that has none of its own.

use half::bf16;

use super::kernel::Tile;
use crate::Element;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::cpu::isa::Fused;
use crate::cpu::isa::{Fma, Unfused};
use crate::cpu::packed::LANES;

/// A right-side or left-side step as the numbers in it.
trait Steps: Element {
    /// `acc + a·b` for one step.
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32;
}

impl Steps for f32 {
    #[inline(always)]
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32 {
        fma.fma(f32::from_bits(a), f32::from_bits(b), acc)
    }
}

impl Steps for bf16 {
    #[inline(always)]
    fn dot(fma: impl Fma, a: u32, b: u32, acc: f32) -> f32 {
        let (a0, b0) = (f32::from_bits(a << 16), f32::from_bits(b << 16));
        let (a1, b1) = (f32::from_bits(a & 0xffff_0000), f32::from_bits(b & 0xffff_0000));
        fma.fma(a1, b1, fma.fma(a0, b0, acc))
    }
}

/// The reference, which the vectoriser turns into the kernel of every instruction set that has none of its own.
#[inline(always)]
unsafe fn plain<T: Steps, const ROWS: usize>(fma: impl Fma, vectors: usize, t: &Tile) {
    for v in 0..vectors {
        let columns = (t.columns - v * LANES).min(LANES);
        let mut acc = [[0.0f32; LANES]; ROWS];
        // SAFETY: the caller of `TileKernel::block` vouches for all operands.
        unsafe {
            if t.accumulate {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (l, acc) in acc.iter_mut().enumerate().take(columns) {
                        *acc = *t.c.add(r * t.c_stride + v * LANES + l);
                    }
                }
            }
            for s in 0..t.steps {
                let b = *t.b.add(s * t.b_stride + v * LANES * 4).cast::<[u32; LANES]>();
                for (r, acc) in acc.iter_mut().enumerate() {
                    let a = t.a.add(r * t.a_stride + s * 4).cast::<u32>().read_unaligned();
                    for l in 0..LANES {
                        acc[l] = T::dot(fma, a, b[l], acc[l]);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (l, &acc) in acc.iter().enumerate().take(columns) {
                    *t.c.add(r * t.c_stride + v * LANES + l) = acc;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn plain_rows<T: Steps>(fma: impl Fma, rows: usize, vectors: usize, tile: &Tile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match rows {
            1 => plain::<T, 1>(fma, vectors, tile),
            2 => plain::<T, 2>(fma, vectors, tile),
            3 => plain::<T, 3>(fma, vectors, tile),
            4 => plain::<T, 4>(fma, vectors, tile),
            _ => unreachable!("{rows} rows in a tile of at most 4"),
        }
    }
}

/// Compiles the reference for one dtype and instruction set.
macro_rules! plain_kernel {
    ($name:ident, $element:ty, $fma:expr $(, #[$attribute:meta])*) => {
        $(#[$attribute])*
        pub(super) unsafe fn $name(rows: usize, vectors: usize, tile: &Tile) {
            // SAFETY: passed on from the caller.
            unsafe { plain_rows::<$element>($fma, rows, vectors, tile) }
        }
    };
}

plain_kernel!(portable_f32, f32, Unfused);
plain_kernel!(portable_bf16, bf16, Unfused);
#[cfg(target_arch = "aarch64")]
plain_kernel!(neon_f32, f32, Fused);
#[cfg(target_arch = "aarch64")]
plain_kernel!(neon_bf16, bf16, Fused);
#[cfg(target_arch = "x86_64")]
plain_kernel!(avx2_f32, f32, Fused, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "x86_64")]
plain_kernel!(avx2_bf16, bf16, Fused, #[target_feature(enable = "avx2,fma")]);
