//! The matrix unit of Intel processors, through inline assembly: the intrinsics are not in stable Rust.
//!
//! Instructions and the tile configuration are those of the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18
//! ("Programming with Intel AMX"); the permission is that of the Linux kernel's `Documentation/arch/x86/xstate.rst`.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

use crate::Inputs;
use crate::arithmetic::Loop;

/// A tile has this many rows, each of this many bytes.
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;
/// `tdpbf16ps` on full tiles: 16 rows by 16 columns, 16 pairs of bf16 each.
const FLOPS_PER_PRODUCT: u64 = 16 * 16 * 32 * 2;
/// Products of a round: every one of two A tiles by every one of two B tiles, each into a C tile of its own. Their starts are 16 cycles apart,
/// their results take 52.
const PRODUCTS: u64 = 4;

/// The loop, if processor and kernel let this process use the unit.
pub(super) fn multiply_tiles() -> Option<Loop> {
    (has_amx_bf16() && may_use_tiles()).then_some(Loop {
        instructions: "AMX tdpbf16ps",
        inputs: Inputs::Bf16,
        flops_per_round: PRODUCTS * FLOPS_PER_PRODUCT,
        // SAFETY: the processor has the instructions, and the kernel has granted the state.
        run: |rounds| unsafe { run(rounds) },
    })
}

/// Whether the processor has tiles (bit 24) and products of bf16 (bit 22).
fn has_amx_bf16() -> bool {
    const LEAF: u32 = 7;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let leaves = __cpuid(0).eax;
    leaves >= LEAF && __cpuid_count(LEAF, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Asks the kernel for the state of tiles, once for the process and all its threads. It refuses where it does not save them.
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call reads its two numbers and changes nothing but what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row, for each of eight tiles and eight that do not exist.
    row_bytes: [u16; 16],
    /// Rows, likewise.
    rows: [u8; 16],
}

static FULL_TILES: TileConfig = {
    let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = ROW_BYTES as u16;
        config.rows[tile] = ROWS as u8;
        tile += 1;
    }
    config
};

/// Bytes of a tile of bf16.
#[repr(C, align(64))]
struct Tile([u16; ROWS * ROW_BYTES / 2]);

/// Multiplies tiles that stay in their registers: 0 to 3 are C, 4 and 5 are A, 6 and 7 are B.
///
/// # Safety
/// The processor must have AMX with bf16, and the kernel must have granted the state of tiles.
unsafe fn run(rounds: u64) {
    if rounds == 0 {
        return;
    }
    // 2^-12 in bf16: sums stay finite however long it runs.
    let operand = Tile([0x3980; ROWS * ROW_BYTES / 2]);
    // SAFETY: the caller vouches for the instructions. The configuration and the tile are read at their full size and nothing is written to
    // memory; tile registers are this block's alone, and are given back before it ends.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{operand} + {stride}*1]",
            "tileloadd tmm5, [{operand} + {stride}*1]",
            "tileloadd tmm6, [{operand} + {stride}*1]",
            "tileloadd tmm7, [{operand} + {stride}*1]",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            "tilerelease",
            config = in(reg) &raw const FULL_TILES,
            operand = in(reg) &raw const operand,
            stride = in(reg) ROW_BYTES,
            rounds = inout(reg) rounds => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    #[test]
    fn the_tile_configuration_is_laid_out_as_the_processor_reads_it() {
        assert_eq!((size_of::<TileConfig>(), size_of::<Tile>()), (64, 1024));
        assert_eq!((offset_of!(TileConfig, row_bytes), offset_of!(TileConfig, rows)), (16, 48));
        assert!(FULL_TILES.rows[..8] == [16; 8] && FULL_TILES.rows[8..] == [0; 8]);
        assert!(FULL_TILES.row_bytes[..8] == [64; 8] && FULL_TILES.row_bytes[8..] == [0; 8]);
        assert_eq!((FULL_TILES.palette, FULL_TILES.start_row), (1, 0));
    }
}
