//! The tile unit of Intel processors from Sapphire Rapids on: sixteen rows by sixteen columns by 32 inputs at a time, in one instruction.
//!
//! Roofline: a product takes sixteen cycles, the load of a tile, a kilobyte, eight from the first-level cache and some twenty from the second. Many rows keep a block of a whole panel in the first, and
//! four products need one tile from the second ([`near`]); two tiles of rows by two of columns would need two of their four. Few rows take a cycle for each row and wait for memory.
//!
//! Measured on Emerald Rapids, one core, in nanoseconds for each product, of which the unit alone makes one in 7.3 to 7.5: 9.2 to 9.5 with all 1,024 inputs of 512 rows, left sides and sums from the second-level
//! cache. Of these the stores of sums are 0.9 and their loads 0.5. Loads go as far ahead as there are registers, across tiles of rows: 2 to 3% (5% of 3,072 inputs) over a call for each tile. Those of the left side are
//! not kept in the first-level cache, from which they push what stays there (11.1 if they are), and the sums of the next tile are fetched meanwhile. Blocks of six granules take 8% longer, of four 26%, and sixteen,
//! which do not fit the first level, 50%. What gives nothing or less: stores and loads of sums between the last products of a tile (9.6) wherever they lie, right sides in tiles of their own (9.2), sums in rows of a
//! panel (9.3), left sides in rows of four granules. Registers of tiles are renamed: loading one that is being read costs nothing. A core has room for 16 lines on their way: prefetches of the right side in runs of 32
//! waited for an eighth of a prefill.
//!
//! Where a neighbour has the core's other thread and its tiles, the unit alone makes a product in 17, a load takes 13 where it took 3.4 (vectors are as fast as ever), and no kernel makes a product in less than 30: 31 to
//! 46 this one, and with a right side alone and no sums 29. Limits are of quiet moments then, and fractions of them say more of the neighbour than of the kernel.
//!
//! What `tdpbf16ps` computes is written down in [`granules`](super::granules). The instructions have no stable intrinsics, so each loop is one block of assembly: nothing the compiler
//! does can come between a tile's loads and its products.

#[cfg(all(test, target_os = "linux"))]
pub(crate) mod emulator;

use std::arch::asm;
use std::cell::Cell;
use std::mem::offset_of;

use super::granules::{GranuleTile, ROW_BYTES, TILE_ROWS};
use super::tiled::near::NearTiles;
use crate::cpu::packed::LANES;

/// Vectors of columns that one tile of rows is multiplied with at a time, at most.
const WIDE: usize = 4;

/// Asks the system for the use of tiles, for the whole process.
pub(crate) fn permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: asks for a feature of the processor; a system that does not know the question says so.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

thread_local! {
    /// Rows of the tiles that this thread has configured, first and second; (0, 0) if it has none.
    static CONFIGURED: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
}

/// Has this thread's tiles hold so many rows. Tiles 0 and 1 are results of the first rows and 2 and 3 of the second; 4 and 5 the left sides of
/// both; 6 and 7 right sides.
fn configure(first: usize, second: usize) {
    let rows = (first as u8, second as u8);
    if CONFIGURED.get() == rows {
        return;
    }
    /// Palette, then at 16 two bytes for each tile with the bytes of its rows, and at 48 one with their number.
    #[repr(align(64))]
    struct Config([u8; 64]);
    let mut config = Config([0; 64]);
    config.0[0] = 1;
    for (tile, rows) in [rows.0, rows.0, rows.1, rows.1, rows.0, rows.1, 16, 16].into_iter().enumerate() {
        config.0[16 + 2 * tile] = 64;
        config.0[48 + tile] = rows;
    }
    // SAFETY: the configuration is valid: 1 to 16 rows of 64 bytes. Only this module uses tiles.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config.0.as_ptr(), options(nostack, readonly)) };
    CONFIGURED.set(rows);
}

/// Gives up this thread's tiles, if it has any: the system need not save them any more, and the core may rest.
pub(crate) fn release() {
    if CONFIGURED.get() != (0, 0) {
        // SAFETY: only this module uses tiles, and a thread that has configured them can release them.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
        CONFIGURED.set((0, 0));
    }
}

/// See [`GranuleFn`](super::granules::GranuleFn).
///
/// # Safety
/// As there, with AMX-BF16 and the system's permission.
pub(super) unsafe fn run(rows: usize, parts: &[*const u8], t: &GranuleTile) {
    let second = rows.saturating_sub(TILE_ROWS);
    configure(rows.min(TILE_ROWS), if second > 0 { second } else { rows });
    let mut v = 0;
    while v < t.vectors {
        let (count, product): (usize, unsafe fn(&Product<'_>)) = match (second > 0, t.vectors - v) {
            (true, 1) => (1, two_by_one),
            (true, _) => (2, two_by_two),
            (false, WIDE..) if !t.behind.is_null() => (WIDE, one_by_four_streamed),
            (false, WIDE..) => (WIDE, one_by_four),
            (false, 2 | 3) => (2, one_by_two),
            (false, _) => (1, one_by_one),
        };
        // SAFETY: rows and vectors that the caller vouches for, with tiles of as many rows.
        unsafe { product(&Product::new(t, parts, v)) };
        v += count;
    }
}

/// What a loop reads of memory where it begins and ends: registers are few.
struct Product<'t> {
    t: &'t GranuleTile,
    parts: std::ops::Range<*const *const u8>,
    /// Of each part, from its beginning.
    b_offset: usize,
    /// See [`GranuleTile::behind`].
    behind: *const u8,
    /// Of the first rows and the second; bytes from one row to the next.
    from: [*const f32; 2],
    from_row: usize,
    to: [*mut f32; 2],
    to_row: usize,
}

impl<'t> Product<'t> {
    /// From the `v`-th vector on.
    fn new(t: &'t GranuleTile, parts: &[*const u8], v: usize) -> Self {
        let from = |row: usize| match t.from.is_null() {
            true => t.from,
            false => t.from.wrapping_add(row * t.from_row + v * LANES),
        };
        let to = |row: usize| t.c.wrapping_add(row * t.c_row + v * LANES);
        Product {
            t,
            parts: parts.as_ptr_range(),
            b_offset: v * LANES * 4,
            behind: t.behind,
            from: [from(0), from(TILE_ROWS)],
            from_row: t.from_row * 4,
            to: [to(0), to(TILE_ROWS)],
            to_row: t.c_row * 4,
        }
    }
}

/// A granule of 16 rows by 64 columns.
macro_rules! one_by_four_products {
    () => {
        concat!(
            "tileloadd tmm4, [{a} + {a_row}*1]\n",
            "tileloadd tmm6, [{b} + {b_step}*1]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tileloadd tmm7, [{b} + {b_step}*1 + 64]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tileloadd tmm6, [{b} + {b_step}*1 + 128]\n",
            "tdpbf16ps tmm2, tmm4, tmm6\n",
            "tileloadd tmm7, [{b} + {b_step}*1 + 192]\n",
            "tdpbf16ps tmm3, tmm4, tmm7\n",
        )
    };
}

/// A granule of sixteen rows by four vectors: the register of its left tile, those of its right tiles, of which the fourth comes into that of the first, and what is loaded meanwhile for the granule behind it.
/// Three products ahead, as far as there are registers.
macro_rules! near_granule {
    ($left:literal, [$first:literal, $second:literal, $third:literal], $goes_on:expr, [$after_second:expr, $after_third:expr, $after_last:expr]) => {
        concat!(
            "tdpbf16ps tmm0, ",
            $left,
            ", ",
            $first,
            "\n",
            "tileloadd ",
            $first,
            ", [{b} + {b_step}*1 + 192]\n",
            $goes_on,
            "tdpbf16ps tmm1, ",
            $left,
            ", ",
            $second,
            "\n",
            $after_second,
            "tdpbf16ps tmm2, ",
            $left,
            ", ",
            $third,
            "\n",
            $after_third,
            "tdpbf16ps tmm3, ",
            $left,
            ", ",
            $first,
            "\n",
            $after_last,
            "mov {n}, [{t} + {coming_each}]\n",
            "test {n}, {n}\n",
            "jz 5f\n",
            "4:\n",
            "prefetcht1 [{coming}]\n",
            "add {coming}, 64\n",
            "dec {n}\n",
            "jnz 4b\n",
            "5:\n",
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448\n",
            "prefetcht0 [{next_sums} + \\line]\n",
            ".endr\n",
            "add {next_sums}, 512\n",
        )
    };
}

/// The left tile of the granule at hand, which does not push the right side out of the first-level cache, and a right tile.
macro_rules! near_load {
    (left $tile:literal) => {
        concat!("tileloaddt1 ", $tile, ", [{a} + {row}*1]\n")
    };
    (right $tile:literal, $place:literal) => {
        concat!("tileloadd ", $tile, ", [{b} + {b_step}*1 + ", $place, "]\n")
    };
}

/// On to the next granule of a tile.
macro_rules! near_next_granule {
    () => {
        concat!("lea {b}, [{b} + 8*{b_step}]\n", "lea {b}, [{b} + 8*{b_step}]\n", "add {a}, 1024\n")
    };
}

/// On to the first granule of the next tile of rows; behind the last, to that of the last once more.
macro_rules! near_next_tile {
    () => {
        concat!(
            "mov {b}, [{t} + {first_b}]\n",
            "mov {a}, [{t} + {first_a}]\n",
            "add {a}, [{t} + {a_tile}]\n",
            "cmp {a}, [{t} + {last_a}]\n",
            "cmova {a}, [{t} + {last_a}]\n",
            "mov [{t} + {first_a}], {a}\n",
        )
    };
}

/// The granule whose left tile is the fourth tile; behind it comes [`near_odd_granule`].
macro_rules! near_even_granule {
    () => {
        near_granule!("tmm4", ["tmm5", "tmm6", "tmm7"], near_next_granule!(), [
            near_load!(left "tmm6"),
            near_load!(right "tmm7", 0),
            concat!(near_load!(right "tmm4", 64), near_load!(right "tmm5", 128))
        ])
    };
}

/// The granule whose left tile is the sixth; behind it comes [`near_even_granule`].
macro_rules! near_odd_granule {
    ($goes_on:expr) => {
        near_granule!("tmm6", ["tmm7", "tmm4", "tmm5"], $goes_on, [
            near_load!(left "tmm4"),
            near_load!(right "tmm5", 0),
            concat!(near_load!(right "tmm6", 64), near_load!(right "tmm7", 128))
        ])
    };
}

/// See [`NearFn`](super::tiled::near::NearFn): of four products one load comes from the second-level cache, where two tiles of rows by two of columns would be two of four.
///
/// # Safety
/// As there, with AMX-BF16 and the system's permission.
pub(super) unsafe fn near(mut t: NearTiles) {
    configure(TILE_ROWS, TILE_ROWS);
    // Sums lie as the left side does, in tiles of sixteen rows of 64 bytes (`row`).
    // SAFETY: the caller vouches for the operands; tile registers are used in this block alone.
    unsafe {
        asm!(
            near_load!(left "tmm4"),
            near_load!(right "tmm5", 0),
            near_load!(right "tmm6", 64),
            near_load!(right "tmm7", 128),
            "20:",
            "mov {n}, [{t} + {from}]",
            "test {n}, {n}",
            "jz 3f",
            "tileloadd tmm0, [{n} + {row}*1]",
            "tileloadd tmm1, [{n} + {row}*1 + 1024]",
            "tileloadd tmm2, [{n} + {row}*1 + 2048]",
            "tileloadd tmm3, [{n} + {row}*1 + 3072]",
            "add {n}, 4096",
            "mov [{t} + {from}], {n}",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "mov {n}, [{t} + {written_rows}]",
            "test {n}, {n}",
            "jz 5f",
            "mov {next_sums}, [{t} + {written}]",
            "4:",
            "prefetchw [{next_sums}]",
            "prefetchw [{next_sums} + 64]",
            "prefetchw [{next_sums} + 128]",
            "prefetchw [{next_sums} + 192]",
            "add {next_sums}, [{t} + {written_row}]",
            "dec {n}",
            "jnz 4b",
            "mov {next_sums}, [{t} + {written_tile}]",
            "add [{t} + {written}], {next_sums}",
            "5:",
            "add qword ptr [{t} + {sums}], 4096",
            "mov {next_sums}, [{t} + {sums}]",
            "mov {behind}, [{t} + {granules}]",
            "sub {behind}, 3",
            "jl 7f",
            "6:",
            near_even_granule!(),
            near_odd_granule!(near_next_granule!()),
            "sub {behind}, 2",
            "jge 6b",
            "7:",
            "cmp {behind}, -1",
            "jne 8f",
            near_even_granule!(),
            near_odd_granule!(near_next_tile!()),
            "jmp 9f",
            "8:",
            near_granule!("tmm4", ["tmm5", "tmm6", "tmm7"], near_next_tile!(), [
                near_load!(right "tmm6", 64),
                near_load!(right "tmm7", 128),
                concat!(near_load!(left "tmm4"), near_load!(right "tmm5", 0))
            ]),
            "9:",
            "mov {n}, [{t} + {to}]",
            "tilestored [{n} + {to_row}*1], tmm0",
            "add {n}, {to_vector}",
            "tilestored [{n} + {to_row}*1], tmm1",
            "add {n}, {to_vector}",
            "tilestored [{n} + {to_row}*1], tmm2",
            "add {n}, {to_vector}",
            "tilestored [{n} + {to_row}*1], tmm3",
            "mov {n}, [{t} + {to_tile}]",
            "add [{t} + {to}], {n}",
            "dec qword ptr [{t} + {tiles}]",
            "jnz 20b",
            t = in(reg) &raw mut t,
            tiles = const offset_of!(NearTiles, tiles),
            granules = const offset_of!(NearTiles, granules),
            first_a = const offset_of!(NearTiles, a),
            a_tile = const offset_of!(NearTiles, a_tile),
            last_a = const offset_of!(NearTiles, last_a),
            first_b = const offset_of!(NearTiles, b),
            from = const offset_of!(NearTiles, from),
            to = const offset_of!(NearTiles, to),
            to_tile = const offset_of!(NearTiles, to_tile),
            sums = const offset_of!(NearTiles, sums),
            coming_each = const offset_of!(NearTiles, coming_each),
            written = const offset_of!(NearTiles, written),
            written_rows = const offset_of!(NearTiles, written_rows),
            written_row = const offset_of!(NearTiles, written_row),
            written_tile = const offset_of!(NearTiles, written_tile),
            a = inout(reg) t.a => _,
            row = in(reg) ROW_BYTES,
            b = inout(reg) t.b => _,
            b_step = in(reg) t.b_step,
            coming = inout(reg) t.coming => _,
            next_sums = out(reg) _,
            to_row = in(reg) t.to_row,
            to_vector = in(reg) t.to_vector,
            behind = out(reg) _,
            n = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Wraps the body of a loop over parts and their granules in loads, or zeros, and stores of result tiles: of each sixteen rows their number, and `(tile, place in the row)`.
macro_rules! tiles {
    ($(#[$attribute:meta])* $name:ident, results: [$([$half:literal, $(($tile:literal, $place:literal)),+]),+], [$($body:expr),+ $(,)?]) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// As [`run`], with tiles configured.
        unsafe fn $name(p: &Product<'_>) {
            // SAFETY: the caller vouches for the operands; tile registers are used in this block alone.
            unsafe {
                asm!(
                    "mov {b}, [{p} + {from}]",
                    "test {b}, {b}",
                    "jz 3f",
                    "mov {granules}, [{p} + {from_row}]",
                    $(
                        concat!("mov {b}, [{p} + {from} + 8*", $half, "]"),
                        $(concat!("tileloadd ", $tile, ", [{b} + {granules}*1 + ", $place, "]"),)+
                    )+
                    "jmp 4f",
                    "3:",
                    $($(concat!("tilezero ", $tile),)+)+
                    "4:",
                    "# {ahead} and {behind} are used by some bodies",
                    "mov {b}, [{part}]",
                    "add {b}, [{p} + {b_offset}]",
                    "mov {granules}, {granules_each}",
                    "2:",
                    $($body,)+
                    "add {a}, {a_granule}",
                    "add {a2}, {a_granule}",
                    "lea {b}, [{b} + 8*{b_step}]",
                    "lea {b}, [{b} + 8*{b_step}]",
                    "dec {granules}",
                    "jnz 2b",
                    "add {part}, 8",
                    "cmp {part}, [{p} + {parts_end}]",
                    "jb 4b",
                    "mov {granules}, [{p} + {to_row}]",
                    $(
                        concat!("mov {b}, [{p} + {to} + 8*", $half, "]"),
                        $(concat!("tilestored [{b} + {granules}*1 + ", $place, "], ", $tile),)+
                    )+
                    p = in(reg) p,
                    from = const offset_of!(Product<'_>, from),
                    from_row = const offset_of!(Product<'_>, from_row),
                    b_offset = const offset_of!(Product<'_>, b_offset),
                    behind = const offset_of!(Product<'_>, behind),
                    parts_end = const offset_of!(Product<'_>, parts) + offset_of!(std::ops::Range<*const *const u8>, end),
                    to = const offset_of!(Product<'_>, to),
                    to_row = const offset_of!(Product<'_>, to_row),
                    a = inout(reg) p.t.a => _,
                    a2 = inout(reg) p.t.a.wrapping_add(p.t.a_tile) => _,
                    a_row = in(reg) p.t.a_row,
                    a_granule = in(reg) p.t.a_granule,
                    part = inout(reg) p.parts.start => _,
                    b = out(reg) _,
                    b_step = in(reg) p.t.b_step,
                    granules_each = in(reg) p.t.granules,
                    granules = out(reg) _,
                    ahead = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Two lines of each of the next eight steps of a right side.
macro_rules! fetch_eight_steps {
    () => {
        concat!(".rept 8\n", "prefetcht0 [{ahead}]\n", "prefetcht0 [{ahead} + 64]\n", "add {ahead}, {b_step}\n", ".endr\n",)
    };
}

/// All lines of the right side of the fourth granule from here on, of four vectors: in this block or in what is read behind it.
macro_rules! fetch_fourth_granule {
    () => {
        concat!(
            "lea {ahead}, [{b} + 4*4096]\n",
            "cmp {granules}, 4\n",
            "ja 7f\n",
            "imul {ahead}, {granules}, -4096\n",
            "add {ahead}, [{p} + {behind}]\n",
            "add {ahead}, 4*4096\n",
            "7:\n",
            ".rept 16\n",
            "prefetcht1 [{ahead}]\n",
            "prefetcht1 [{ahead} + 64]\n",
            "prefetcht1 [{ahead} + 128]\n",
            "prefetcht1 [{ahead} + 192]\n",
            "add {ahead}, 256\n",
            ".endr\n",
        )
    };
}

tiles! {
    /// Up to 32 rows by 32 columns. The right side of the next granule is fetched meanwhile: waiting for it was a sixth of the time of attention's products (Emerald Rapids, prefill of 512 tokens).
    two_by_two, results: [[0, ("tmm0", 0), ("tmm1", 64)], [1, ("tmm2", 0), ("tmm3", 64)]], [
        "tileloadd tmm6, [{b} + {b_step}*1]",
        "tileloadd tmm4, [{a} + {a_row}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_step}*1 + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a2} + {a_row}*1]",
        "mov {ahead}, {b_step}",
        "shl {ahead}, 4",
        "add {ahead}, {b}",
        fetch_eight_steps!(),
        "tdpbf16ps tmm2, tmm5, tmm6",
        fetch_eight_steps!(),
        "tdpbf16ps tmm3, tmm5, tmm7",
    ]
}

tiles! {
    /// Up to 32 rows by 16 columns.
    two_by_one, results: [[0, ("tmm0", 0)], [1, ("tmm2", 0)]], [
        "tileloadd tmm6, [{b} + {b_step}*1]",
        "tileloadd tmm4, [{a} + {a_row}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a2} + {a_row}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
    ]
}

tiles! {
    /// Up to 16 rows by 64 columns.
    one_by_four, results: [[0, ("tmm0", 0), ("tmm1", 64), ("tmm2", 128), ("tmm3", 192)]], [one_by_four_products!()]
}

tiles! {
    /// The same with a right side that it waits for, which is fetched into the second-level cache: lines on their way to the first are few, and loads wait behind them. (Two tiles of rows take 15% longer with
    /// that than without.)
    one_by_four_streamed, results: [[0, ("tmm0", 0), ("tmm1", 64), ("tmm2", 128), ("tmm3", 192)]], [
        one_by_four_products!(),
        fetch_fourth_granule!(),
    ]
}

tiles! {
    /// Up to 16 rows by 32 columns.
    one_by_two, results: [[0, ("tmm0", 0), ("tmm1", 64)]], [
        "tileloadd tmm4, [{a} + {a_row}*1]",
        "tileloadd tmm6, [{b} + {b_step}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_step}*1 + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7",
    ]
}

tiles! {
    /// Up to 16 rows by 16 columns.
    one_by_one, results: [[0, ("tmm0", 0)]], [
        "tileloadd tmm4, [{a} + {a_row}*1]",
        "tileloadd tmm6, [{b} + {b_step}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
    ]
}
