//! The order of products that AMX computes, for any processor.
//!
//! A *granule* is sixteen steps of a reduction over bf16: 32 inputs. For one output, `tdpbf16ps` runs two chains of multiply-adds over them, one
//! over the even inputs and one over the odd, both from zero, and then adds their sum to what was there:
//!
//! ```text
//! even = odd = 0
//! for k in 0..16:  even = fma(a[2k], b[2k], even);  odd = fma(a[2k+1], b[2k+1], odd)
//! c = c + (even + odd)
//! ```
//!
//! Every operation rounds to nearest even; numbers below the normal range are read as zero, and results below it become zero (found by
//! experiment, and held against the instruction by the tests where there is a tile unit; elsewhere they emulate it). The last granule of a reduction is filled up with zeros.
//!
//! [`reference`] is that, word for word. `body` is the same for the vectoriser: it compiles to AVX2, NEON, or whatever there is, and is the
//! kernel of every machine that has none of its own for this order (`granules_avx512`, `amx`).

use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::packed::LANES;

/// Steps of a granule.
pub(crate) const STEPS: usize = 16;
/// Inputs of a granule.
pub(crate) const INPUTS: usize = 2 * STEPS;
/// Bytes of a row of a granule.
pub(crate) const ROW_BYTES: usize = 4 * STEPS;
/// Rows of a tile of the left side.
pub(crate) const TILE_ROWS: usize = 16;
/// Rows that a kernel takes at a time, at most: two tiles.
pub(crate) const ROWS_MAX: usize = 2 * TILE_ROWS;

/// Operands of a product over whole granules, beside its right side, which lies in parts: each step has [`LANES`] words for each vector of columns. All strides are bytes, but for that of the result.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Some of it is for matrix units.
pub(crate) struct GranuleTile {
    /// Granules of each part of the reduction, at least one.
    pub granules: usize,
    /// First row of the left side, which goes through all parts.
    pub a: *const u8,
    /// From one row to the next within a tile of [`TILE_ROWS`].
    pub a_row: usize,
    /// From one granule of a row to the next.
    pub a_granule: usize,
    /// From one tile of rows to the next.
    pub a_tile: usize,
    /// From one step of the right side to the next.
    pub b_step: usize,
    /// If the right side comes from memory as it is read, what will be read after it, from there on; else a null pointer.
    pub behind: *const u8,
    /// What the product is added to: a null pointer for zeros.
    pub from: *const f32,
    /// Elements from one row of it to the next.
    pub from_row: usize,
    /// Result, which may be the same.
    pub c: *mut f32,
    /// Elements from one row of the result to the next.
    pub c_row: usize,
    /// Vectors of columns, 1 to 4, all whole.
    pub vectors: usize,
}

impl GranuleTile {
    /// The tile `rows` rows further on, whole tiles of the left side.
    ///
    /// # Safety
    /// There are that many.
    pub(super) unsafe fn below(&self, rows: usize) -> GranuleTile {
        debug_assert!(rows.is_multiple_of(TILE_ROWS));
        // SAFETY: the caller's promise.
        let (a, c) = unsafe { (self.a.add(rows / TILE_ROWS * self.a_tile), self.c.add(rows * self.c_row)) };
        let from = if self.from.is_null() { self.from } else { self.from.wrapping_add(rows * self.from_row) };
        GranuleTile { a, c, from, ..*self }
    }

    /// The tile with what it is added to in the result.
    ///
    /// # Safety
    /// As [`GranuleFn`].
    pub(super) unsafe fn begun(&self, rows: usize) -> GranuleTile {
        let len = self.vectors * LANES;
        if !std::ptr::eq(self.from, self.c) {
            for row in 0..rows {
                // SAFETY: the caller vouches for both, which are the same or apart.
                unsafe {
                    let c = self.c.add(row * self.c_row);
                    match self.from.is_null() {
                        true => c.write_bytes(0, len),
                        false => c.copy_from_nonoverlapping(self.from.add(row * self.from_row), len),
                    }
                }
            }
        }
        GranuleTile { from: self.c, from_row: self.c_row, ..*self }
    }
}

/// Adds the product of up to [`ROWS_MAX`] rows and a right side in `parts`, at least one, to what there is, in the result.
///
/// # Safety
/// All operands must be readable, and the result writable, for that many rows and for whole vectors; what it is added to is the result or apart from it. The machine must have the instructions.
pub(crate) type GranuleFn = unsafe fn(rows: usize, parts: &[*const u8], tile: &GranuleTile);

/// The kernel of this order for an instruction set.
pub(crate) fn kernel(isa: Isa) -> GranuleFn {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => super::amx::run,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => super::granules_avx512::run,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => |rows, parts, tile| unsafe { body(Isa::Avx2, rows, parts, tile) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => |rows, parts, tile| unsafe { body(Isa::Neon, rows, parts, tile) },
        _ => |rows, parts, tile| unsafe { body(Isa::Portable, rows, parts, tile) },
    }
}

/// A number below the normal range as a zero of its sign.
#[inline(always)]
fn flushed(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { f32::from_bits(value.to_bits() & 0x8000_0000) } else { value }
}

/// `a·b + c` of bf16 `a` and `b`, rounded once, with numbers below the normal range as zeros.
fn fma_flushed(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (flushed(a), flushed(b), flushed(c));
    let rounded = a.mul_add(b, c);
    if rounded.abs() == f32::MIN_POSITIVE && is_tiny(a, b, c) {
        return rounded * 0.0;
    }
    flushed(rounded)
}

/// Whether `a·b + c`, of about the least normal number, would be below it if exponents had no limit: rounded to 24 bits it is, though rounded to what
/// bits are left there it is not. That is how processors of this family decide what to flush.
fn is_tiny(a: f32, b: f32, c: f32) -> bool {
    // Half way between the last number of 24 bits below and the least normal number; a tie rounds up to the even one.
    let threshold = f32::MIN_POSITIVE as f64 * (1.0 - 2f64.powi(-25));
    let (product, c) = (a as f64 * b as f64, c as f64);
    let sum = product + c;
    // What the sum has lost (Knuth's TwoSum), of the sign of the sum.
    let from_c = sum - product;
    let lost = ((product - (sum - from_c)) + (c - from_c)) * sum.signum();
    sum.abs() < threshold || sum.abs() == threshold && lost < 0.0
}

/// Words of bf16 pairs as numbers: the even input and the odd.
#[inline(always)]
fn pair(word: u32) -> (f32, f32) {
    (f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000))
}

/// One granule of one output, as it is defined.
pub(crate) fn reference(a: &[u32; STEPS], b: &[u32; STEPS], c: f32) -> f32 {
    let (mut even, mut odd) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        let (a, b) = (pair(a), pair(b));
        even = fma_flushed(a.0, b.0, even);
        odd = fma_flushed(a.1, b.1, odd);
    }
    flushed(flushed(c) + flushed(even + odd))
}

multiversion! {
    /// The product in plain code, sixteen columns at a time.
    ///
    /// # Safety
    /// As [`GranuleFn`].
    fn vectors(rows: usize, parts: &[*const u8], tile: &GranuleTile) = vectors_body;
}

/// # Safety
/// As [`GranuleFn`].
unsafe fn body(isa: Isa, rows: usize, parts: &[*const u8], tile: &GranuleTile) {
    vectors(isa, rows, parts, tile);
}

#[inline(always)]
fn vectors_body(_fma: impl Fma, rows: usize, parts: &[*const u8], t: &GranuleTile) {
    // SAFETY: the caller's promise.
    let t = unsafe { &t.begun(rows) };
    for row in 0..rows {
        // SAFETY: the caller of the kernel vouches for all operands.
        unsafe {
            let a_row = t.a.add(row / TILE_ROWS * t.a_tile + row % TILE_ROWS * t.a_row);
            for v in 0..t.vectors {
                let c = &mut *t.c.add(row * t.c_row + v * LANES).cast::<[f32; LANES]>();
                for g in 0..parts.len() * t.granules {
                    let a = a_row.add(g * t.a_granule).cast::<[u32; STEPS]>().read_unaligned();
                    let b = parts[g / t.granules].add(g % t.granules * STEPS * t.b_step + v * LANES * 4);
                    granule(&a, b, t.b_step, c);
                }
            }
        }
    }
}

/// One granule of sixteen outputs. Where a result lies at the edge of the normal range, the reference decides.
///
/// # Safety
/// `b` has [`STEPS`] steps of [`LANES`] words, `b_step` bytes apart.
#[inline(always)]
unsafe fn granule(a: &[u32; STEPS], b: *const u8, b_step: usize, c: &mut [f32; LANES]) {
    let (mut even, mut odd) = ([0.0f32; LANES], [0.0f32; LANES]);
    let mut at_edge = [false; LANES];
    for (s, &a) in a.iter().enumerate() {
        // SAFETY: the caller's promise.
        let b = unsafe { b.add(s * b_step).cast::<[u32; LANES]>().read_unaligned() };
        let a = pair(a);
        let a = (flushed(a.0), flushed(a.1));
        for l in 0..LANES {
            let b = pair(b[l]);
            // Always fused: this is one order for all machines, and one without the instruction computes it by other means.
            let sums = (a.0.mul_add(flushed(b.0), even[l]), a.1.mul_add(flushed(b.1), odd[l]));
            at_edge[l] |= (sums.0.abs() == f32::MIN_POSITIVE) | (sums.1.abs() == f32::MIN_POSITIVE);
            (even[l], odd[l]) = (flushed(sums.0), flushed(sums.1));
        }
    }
    if at_edge.iter().any(|&edge| edge) {
        for (l, c) in c.iter_mut().enumerate() {
            // SAFETY: as above.
            let column = std::array::from_fn(|s| unsafe { b.add(s * b_step + l * 4).cast::<u32>().read_unaligned() });
            *c = reference(a, &column, *c);
        }
        return;
    }
    for l in 0..LANES {
        c[l] = flushed(flushed(c[l]) + flushed(even[l] + odd[l]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    /// Numbers of bf16 that have something to say: of all sizes, zeros of both signs, below the normal range, infinite.
    fn awkward(key: u64, i: usize) -> u16 {
        let bits = random::philox(key, [i as u64, 0]);
        let value = bits[0] as u16;
        match bits[1] % 8 {
            0 => value & 0x8000,
            1 => value & 0x807f,
            // Products about the edge of the normal range.
            2..4 => value & 0x80ff | 0x1f80,
            4 => value & 0x807f | 0x2000,
            // Products about the edge of the normal range, with others much larger.
            5 => value & 0xbfff,
            _ => value & 0x83ff | 0x3c00,
        }
    }

    fn words(key: u64, n: usize, number: impl Fn(u64, usize) -> u16) -> Vec<u32> {
        (0..n).map(|i| number(key, 2 * i) as u32 | (number(key, 2 * i + 1) as u32) << 16).collect()
    }

    /// What a product is added to.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum From {
        Result,
        Zeros,
        Elsewhere,
    }

    /// The product of a tile in plain rows, by the kernel of `isa` and by the reference. Of several granules, two or three are parts, and lie the other way round.
    fn both(isa: Isa, [rows, granules, vectors]: [usize; 3], from: From, number: fn(u64, usize) -> u16) -> [Vec<f32>; 2] {
        let num_parts = [3, 2].into_iter().find(|parts| granules.is_multiple_of(*parts)).unwrap_or(1);
        let (steps, columns) = (granules * STEPS, vectors * LANES);
        let key = (rows * 1000 + granules * 10 + vectors) as u64;
        let (a, b) = (words(2 * key, rows * steps, number), words(2 * key + 1, steps * columns, number));
        let c: Vec<f32> = words(3 * key, rows * columns, number).into_iter().map(|word| pair(word).0).collect();
        let mut expected = if from == From::Zeros { vec![0.0; c.len()] } else { c.clone() };
        for (i, c) in expected.iter_mut().enumerate() {
            for g in 0..granules {
                let a = std::array::from_fn(|s| a[i / columns * steps + g * STEPS + s]);
                let b = std::array::from_fn(|s| b[(g * STEPS + s) * columns + i % columns]);
                *c = reference(&a, &b, *c);
            }
        }
        // Elsewhere rows lie further apart.
        let row_words = columns + 3;
        let elsewhere: Vec<f32> = c.chunks(columns).flat_map(|row| [row, &[f32::NAN; 3]].concat()).collect();
        let mut actual = if from == From::Elsewhere { vec![f32::NAN; c.len()] } else { c };
        let (from, from_row) = match from {
            From::Result => (actual.as_ptr(), columns),
            From::Zeros => (std::ptr::null(), 0),
            From::Elsewhere => (elsewhere.as_ptr(), row_words),
        };
        let part_words = b.len() / num_parts;
        let apart: Vec<u32> = b.chunks(part_words).rev().flatten().copied().collect();
        let parts: Vec<*const u8> = apart.chunks(part_words).rev().map(|part| part.as_ptr().cast()).collect();
        let tile = GranuleTile {
            granules: granules / num_parts,
            a: a.as_ptr().cast(),
            a_row: steps * 4,
            a_granule: ROW_BYTES,
            a_tile: TILE_ROWS * steps * 4,
            b_step: columns * 4,
            behind: if rows.is_multiple_of(2) { a.as_ptr().cast() } else { std::ptr::null() },
            from,
            from_row,
            c: actual.as_mut_ptr(),
            c_row: columns,
            vectors,
        };
        // SAFETY: the operands are as large as the tile says, and the machine has the instructions.
        unsafe { kernel(isa)(rows, &parts, &tile) };
        crate::cpu::matmul::release_thread();
        [actual, expected]
    }

    fn assert_same(isa: Isa, number: fn(u64, usize) -> u16) {
        for (rows, granules, vectors) in
            (1..=ROWS_MAX).map(|rows| (rows, 1 + rows % 3, 1 + rows % 4)).chain([(32, 5, 4), (16, 3, 4), (17, 2, 3), (1, 7, 4)])
        {
            for begins in [From::Result, From::Zeros, From::Elsewhere] {
                let [actual, expected] = both(isa, [rows, granules, vectors], begins, number);
                for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
                    let same = a.to_bits() == e.to_bits() || a.is_nan() && e.is_nan();
                    let what = format!("{rows} rows, {granules} granules, {vectors} vectors, {begins:?}");
                    assert!(same, "{isa}, {what}: element {i} is {a:e}, not {e:e}");
                }
            }
        }
    }

    #[test]
    fn every_kernel_has_the_bits_of_the_reference() {
        let ordinary = |key, i: usize| half::bf16::from_f32(random::normal([key, 0], i as u64)).to_bits();
        for isa in Isa::available() {
            assert_same(isa, ordinary);
            assert_same(isa, awkward);
        }
    }

    /// Where a sum would round up to the least normal number, but is flushed because it is below. Of AMX it is not known what it does there; sums of
    /// random numbers do not come upon it.
    #[test]
    fn vector_kernels_flush_what_only_looks_normal_for_want_of_bits() {
        let power = |e: i32| half::bf16::from_f32(2f32.powi(e)).to_bits() as u32;
        let minus = 0x8000;
        let (mut a, mut b) = ([0; STEPS], [0; STEPS * LANES]);
        (a[0], a[1]) = (power(-60) | power(-60) << 16, power(-100) | power(-100) << 16);
        // Of the even inputs the sum is three quarters of the way to the number below, of the odd ones it is a tie.
        (b[0], b[LANES]) = (power(-66) | power(-66) << 16, power(-50) | minus | (power(-51) | minus) << 16);
        let fused = pair(a[1]).0.mul_add(pair(b[LANES]).0, f32::MIN_POSITIVE);
        assert_eq!(fused, f32::MIN_POSITIVE, "rounded to the bits that are left there, it looks normal");
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Amx) {
            for (mask, expected) in [(0x0000_ffff, 0.0), (0xffff_0000, f32::MIN_POSITIVE)] {
                let a = a.map(|word| word & mask);
                let mut c = [0.0f32; LANES];
                let (a_row, a_granule, b_step) = (ROW_BYTES, ROW_BYTES, LANES * 4);
                let (a, b) = (a.as_ptr().cast(), b.as_ptr().cast());
                let tile = GranuleTile {
                    granules: 1,
                    a,
                    a_row,
                    a_granule,
                    a_tile: 0,
                    b_step,
                    behind: std::ptr::null(),
                    from: c.as_ptr(),
                    from_row: LANES,
                    c: c.as_mut_ptr(),
                    c_row: LANES,
                    vectors: 1,
                };
                // SAFETY: one row, one granule and one vector, and the machine has the instructions.
                unsafe { kernel(isa)(1, &[b], &tile) };
                assert_eq!(c[0], expected, "{isa}");
            }
        }
    }

    #[test]
    fn what_rounds_up_to_the_least_normal_number_is_flushed_like_what_does_not() {
        let least = f32::MIN_POSITIVE;
        // 2^-126 - 2^-151 would be 1 - 2^-25 of it: a tie, which rounds up without limit to exponents, and so is not below.
        let small = f32::from_bits(0x0080_0000 - 0x40_0000);
        assert_eq!(flushed(small), 0.0);
        let power = |e: i32| 2f32.powi(e);
        // The sum just below the least normal number is made of it and a product of opposite sign.
        let below = |e: i32| fma_flushed(power(-100), -power(e + 100), least);
        assert_eq!(below(-150), 0.0, "three quarters of the way to the number below");
        assert_eq!(below(-151), least, "a tie");
        assert_eq!(below(-152), least);
        assert_eq!(
            fma_flushed(-power(-100), -power(-50), -least).to_bits(),
            (-0.0f32).to_bits(),
            "zeros have the sign of what they were"
        );
    }
}
