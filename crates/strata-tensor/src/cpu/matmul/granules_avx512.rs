//! The order of [`granules`](super::granules) with AVX-512: numbers below the normal range become zeros because the processor is told so.
//!
//! Roofline: a tile of six rows by two vectors does 24 multiply-adds a step on ten loads and sixteen shifts and masks, which other units
//! do beside them: bound by f32 arithmetic. One row is bound by wherever the right side comes from.

use std::arch::asm;

use super::granules::{GranuleTile, TILE_ROWS};
use crate::cpu::packed::LANES;

/// MXCSR that flushes results to zero and reads inputs as zero, rounds to nearest even, and raises nothing.
const FLUSH: u32 = 0x1f80 | 1 << 15 | 1 << 6;

/// See [`GranuleFn`](super::granules::GranuleFn).
///
/// # Safety
/// As there, with AVX-512 F, BW, VL and DQ.
pub(super) unsafe fn run(rows: usize, parts: &[*const u8], t: &GranuleTile) {
    // SAFETY: the caller's promise.
    let t = unsafe { &t.begun(rows) };
    for first in (0..rows).step_by(TILE_ROWS) {
        let in_tile = TILE_ROWS.min(rows - first);
        let num_kernels = in_tile.div_ceil(ONE_VECTOR.len());
        let mut row = 0;
        for i in 0..num_kernels {
            let count = (in_tile - row).div_ceil(num_kernels - i);
            for v in (0..t.vectors).step_by(2) {
                let kernels = if t.vectors - v == 1 { &ONE_VECTOR } else { &TWO_VECTORS };
                for (part, b) in parts.iter().enumerate() {
                    // SAFETY: rows, vectors and parts that the caller vouches for.
                    unsafe {
                        let granules_before = part * t.granules * t.a_granule;
                        let tile = GranuleTile {
                            a: t.a.add(first / TILE_ROWS * t.a_tile + row * t.a_row + granules_before),
                            c: t.c.add((first + row) * t.c_row + v * LANES),
                            ..*t
                        };
                        kernels[count - 1](&tile, b.add(v * LANES * 4));
                    }
                }
            }
            row += count;
        }
    }
}

/// Of so many rows and vectors, with one part of the right side.
type GranulesFn = unsafe fn(&GranuleTile, b: *const u8);

/// Kernels of 1 to 6 rows.
const ONE_VECTOR: [GranulesFn; 6] = [rows_1x1, rows_2x1, rows_3x1, rows_4x1, rows_5x1, rows_6x1];
const TWO_VECTORS: [GranulesFn; 6] = [rows_1x2, rows_2x2, rows_3x2, rows_4x2, rows_5x2, rows_6x2];

/// A tile in registers. Each row has an address of its left side, one of its result, and for each vector of columns the numbers of the
/// registers of its even and odd chain, and a place within the row of the result. Each vector has the registers of the right side's even and odd
/// inputs, and their place within a step.
macro_rules! tile {
    ($name:ident, [$([$a:literal, $([$e:literal, $o:literal, $be:literal, $bo:literal, $c:literal]),+]),+], [$([$b:literal, $even:literal, $odd:literal]),+]) => {
        /// # Safety
        /// As [`GranuleFn`](super::granules::GranuleFn), for as many rows and vectors as the name says.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
        unsafe fn $name(t: &GranuleTile, b: *const u8) {
            let mut mxcsr = [0u32, FLUSH];
            // SAFETY: the caller vouches for the operands; MXCSR is what it was when the block ends.
            unsafe {
                asm!(
                    "stmxcsr [{mxcsr}]",
                    "ldmxcsr [{mxcsr} + 4]",
                    "mov {steps:e}, 0xffff0000",
                    "vpbroadcastd zmm31, {steps:e}",
                    "2:",
                    $($(
                        concat!("vpxord zmm", $e, ", zmm", $e, ", zmm", $e),
                        concat!("vpxord zmm", $o, ", zmm", $o, ", zmm", $o),
                    )+)+
                    "mov {steps:e}, 16",
                    "3:",
                    $(
                        concat!("vpslld zmm", $even, ", zmmword ptr [{b} + ", $b, "], 16"),
                        concat!("vpandd zmm", $odd, ", zmm31, zmmword ptr [{b} + ", $b, "]"),
                    )+
                    $(
                        concat!("vpbroadcastd zmm29, dword ptr [", $a, "]"),
                        "vpslld zmm28, zmm29, 16",
                        "vpandd zmm29, zmm29, zmm31",
                        $(
                            concat!("vfmadd231ps zmm", $e, ", zmm28, zmm", $be),
                            concat!("vfmadd231ps zmm", $o, ", zmm29, zmm", $bo),
                        )+
                    )+
                    "add {a}, 4",
                    "add {a3}, 4",
                    "add {b}, {b_step}",
                    "dec {steps:e}",
                    "jnz 3b",
                    "add {a}, {a_skip}",
                    "add {a3}, {a_skip}",
                    $($(
                        concat!("vaddps zmm", $e, ", zmm", $e, ", zmm", $o),
                        concat!("vaddps zmm", $e, ", zmm", $e, ", zmmword ptr [", $c, "]"),
                        concat!("vmovups zmmword ptr [", $c, "], zmm", $e),
                    )+)+
                    "dec {granules}",
                    "jnz 2b",
                    "ldmxcsr [{mxcsr}]",
                    "# {a_row} {c_row} {c3}",
                    mxcsr = in(reg) mxcsr.as_mut_ptr(),
                    steps = out(reg) _,
                    a = inout(reg) t.a => _,
                    a_row = in(reg) t.a_row,
                    a3 = inout(reg) t.a.wrapping_add(3 * t.a_row) => _,
                    a_skip = in(reg) t.a_granule.wrapping_sub(64),
                    b = inout(reg) b => _,
                    b_step = in(reg) t.b_step,
                    c = in(reg) t.c,
                    c_row = in(reg) t.c_row * 4,
                    c3 = in(reg) t.c.wrapping_add(3 * t.c_row),
                    granules = inout(reg) t.granules => _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                    out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _,
                    out("zmm15") _, out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _,
                    out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _,
                    out("zmm29") _, out("zmm31") _,
                    options(nostack),
                );
            }
        }
    };
}

/// A tile for each row there is a line of, with that row and all before it.
macro_rules! tiles {
    ($vectors:tt; [$($before:tt)*];) => {};
    ($vectors:tt; [$($before:tt)*]; $name:ident $row:tt $($rest:tt)*) => {
        tile!($name, [$($before)* $row], $vectors);
        tiles!($vectors; [$($before)* $row,]; $($rest)*);
    };
}

tiles! {
    [["0", "24", "25"]]; [];
    rows_1x1 ["{a}", ["0", "1", "24", "25", "{c}"]]
    rows_2x1 ["{a} + {a_row}", ["4", "5", "24", "25", "{c} + {c_row}"]]
    rows_3x1 ["{a} + 2*{a_row}", ["8", "9", "24", "25", "{c} + 2*{c_row}"]]
    rows_4x1 ["{a3}", ["12", "13", "24", "25", "{c3}"]]
    rows_5x1 ["{a} + 4*{a_row}", ["16", "17", "24", "25", "{c} + 4*{c_row}"]]
    rows_6x1 ["{a3} + 2*{a_row}", ["20", "21", "24", "25", "{c3} + 2*{c_row}"]]
}
tiles! {
    [["0", "24", "25"], ["64", "26", "27"]]; [];
    rows_1x2 ["{a}", ["0", "1", "24", "25", "{c}"], ["2", "3", "26", "27", "{c} + 64"]]
    rows_2x2 ["{a} + {a_row}", ["4", "5", "24", "25", "{c} + {c_row}"], ["6", "7", "26", "27", "{c} + {c_row} + 64"]]
    rows_3x2 ["{a} + 2*{a_row}", ["8", "9", "24", "25", "{c} + 2*{c_row}"], ["10", "11", "26", "27", "{c} + 2*{c_row} + 64"]]
    rows_4x2 ["{a3}", ["12", "13", "24", "25", "{c3}"], ["14", "15", "26", "27", "{c3} + 64"]]
    rows_5x2 ["{a} + 4*{a_row}", ["16", "17", "24", "25", "{c} + 4*{c_row}"], ["18", "19", "26", "27", "{c} + 4*{c_row} + 64"]]
    rows_6x2 ["{a3} + 2*{a_row}", ["20", "21", "24", "25", "{c3} + 2*{c_row}"], ["22", "23", "26", "27", "{c3} + 2*{c_row} + 64"]]
}
