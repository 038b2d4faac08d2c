//! The tile instructions for tests on processors that lack them: a handler of the signal that an unknown instruction raises does what it asks, and goes on behind it.
//!
//! So the assembly of [`super`] runs as it is, byte by byte, wherever AVX-512-BF16 does, and with it all that decides what goes into which tile. What would fault on
//! hardware, or mean something else than was meant, ends the process: tiles that are not configured, a product of shapes that do not fit. Encodings and what they do:
//! Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2; the sums of `TDPBF16PS` are the order of [`granules`], of which this is another kernel's work.

use std::cell::UnsafeCell;
use std::io::Write;
use std::sync::LazyLock;

use crate::cpu::isa::Isa;
use crate::cpu::matmul::granules::{self, GranuleTile, ROW_BYTES, STEPS};
use crate::cpu::packed::LANES;

const TILES: usize = 8;
const TILE_ROWS: usize = 16;

/// Whether tiles are emulated from now on: where there is no tile unit, but everything else that AMX kernels use.
pub(crate) fn stands_in() -> bool {
    static INSTALLED: LazyLock<bool> = LazyLock::new(|| {
        // SAFETY: an all-zero `sigaction` is one without flags and with an empty mask; the handler has the signature that SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_unknown_instruction as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) == 0
        }
    });
    Isa::Avx512Bf16.is_available() && *INSTALLED
}

/// A tile register: rows of 64 bytes, of which the configuration says how many rows and bytes there are. The rest is zeros.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile {
    words: [[u32; STEPS]; TILE_ROWS],
    rows: usize,
    row_bytes: usize,
}

const EMPTY: Tile = Tile { words: [[0; STEPS]; TILE_ROWS], rows: 0, row_bytes: 0 };

thread_local! {
    /// Without a configuration all are empty. Nothing but the handler of this thread's own instructions touches them, and that one does not interrupt itself.
    static THESE: UnsafeCell<[Tile; TILES]> = const { UnsafeCell::new([EMPTY; TILES]) };
}

/// Says what is wrong, past what captures the output of tests, and ends the process: nothing can be unwound from here.
fn refuse(what: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "emulated tiles: {what}");
    std::process::abort()
}

extern "C" fn on_unknown_instruction(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes what it will restore when the handler returns, and nobody else has it meanwhile.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let mut at = registers[libc::REG_RIP as usize] as usize;
    let Some(mut instruction) = Instruction::decode(at, registers) else {
        // SAFETY: no instruction of ours: it is raised again, and ends the process as it would have.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
        return;
    };
    // A signal takes longer than what it asks for: all tile instructions that follow each other are done in one.
    THESE.with(|tiles| {
        loop {
            // SAFETY: see `THESE`.
            instruction.run(unsafe { &mut *tiles.get() });
            at += instruction.bytes;
            instruction = match Instruction::decode(at, registers) {
                Some(next) => next,
                None => break,
            };
        }
    });
    registers[libc::REG_RIP as usize] = at as i64;
}

/// What an instruction does, with the numbers of tiles and its other operands read from the registers.
enum Action {
    /// From the configuration at an address.
    Configure(usize),
    Release,
    Zero(usize),
    Load(usize, TileRows),
    Store(usize, TileRows),
    /// `sum += left·right`, of bf16.
    Multiply {
        sum: usize,
        left: usize,
        right: usize,
    },
}

/// Where the rows of a tile are in memory.
struct TileRows {
    first: usize,
    stride: usize,
}

impl TileRows {
    fn at(&self, row: usize) -> usize {
        self.first.wrapping_add(row.wrapping_mul(self.stride))
    }
}

struct Instruction {
    action: Action,
    bytes: usize,
}

impl Instruction {
    /// The tile instruction at an address, `None` if there is another.
    fn decode(at: usize, registers: &[libc::greg_t]) -> Option<Instruction> {
        // SAFETY: the processor has just read an instruction there; code does not end behind one.
        let byte = |i: usize| unsafe { std::ptr::with_exposed_provenance::<u8>(at + i).read() };
        // A VEX prefix of three bytes, map 0F38, W0, L0.
        if byte(0) != 0xc4 {
            return None;
        }
        let (first, second) = (byte(1), byte(2));
        if first & 0x1f != 2 || second & 0x84 != 0 {
            return None;
        }
        let prefix = second & 3;
        let modrm = byte(4);
        let (is_register, reg, rm) = (modrm >> 6 == 3, (modrm >> 3 & 7) as usize, (modrm & 7) as usize);
        let (none, x66, f3, f2) = (0, 1, 2, 3);
        let place = || Place::decode(&byte, first, registers);
        let (action, bytes) = match (byte(3), prefix, is_register) {
            (0x49, p, true) if p == none && modrm == 0xc0 => (Action::Release, 5),
            (0x49, p, false) if p == none && reg == 0 => {
                let place = place();
                (Action::Configure(place.base), place.bytes)
            }
            (0x49, p, true) if p == f2 && rm == 0 => (Action::Zero(reg), 5),
            (0x4b, p, false) if p != none => {
                let Place { base, index, bytes } = place();
                let stride = index.unwrap_or_else(|| refuse("a load or store without a stride"));
                let rows = TileRows { first: base, stride };
                // With 66 it says that what is loaded need not stay in the first-level cache.
                let action = if p == f2 || p == x66 { Action::Load(reg, rows) } else { Action::Store(reg, rows) };
                (action, bytes)
            }
            (0x5c, p, true) if p == f3 => (Action::Multiply { sum: reg, left: rm, right: (!second >> 3 & 0xf) as usize }, 5),
            _ => return None,
        };
        Some(Instruction { action, bytes })
    }

    fn run(&self, tiles: &mut [Tile; TILES]) {
        match &self.action {
            &Action::Configure(from) => {
                // SAFETY: the instruction reads 64 bytes there.
                let config = unsafe { std::ptr::with_exposed_provenance::<[u8; 64]>(from).read() };
                if config[0] != 1 || config[1..16].iter().any(|&reserved| reserved != 0) {
                    refuse("a configuration of another palette, or one that resumes");
                }
                for (i, tile) in tiles.iter_mut().enumerate() {
                    let row_bytes = u16::from_le_bytes([config[16 + 2 * i], config[17 + 2 * i]]) as usize;
                    let rows = config[48 + i] as usize;
                    if rows > TILE_ROWS || row_bytes > ROW_BYTES || (rows == 0) != (row_bytes == 0) {
                        refuse("a configuration of tiles that there are not");
                    }
                    *tile = Tile { rows, row_bytes, ..EMPTY };
                }
            }
            Action::Release => *tiles = [EMPTY; TILES],
            &Action::Zero(tile) => {
                let tile = configured(tiles, tile);
                *tile = Tile { rows: tile.rows, row_bytes: tile.row_bytes, ..EMPTY };
            }
            Action::Load(tile, from) => {
                let tile = configured(tiles, *tile);
                let mut loaded = Tile { rows: tile.rows, row_bytes: tile.row_bytes, ..EMPTY };
                for (row, words) in loaded.words[..tile.rows].iter_mut().enumerate() {
                    let from = std::ptr::with_exposed_provenance::<u8>(from.at(row));
                    // SAFETY: the instruction reads as many bytes there.
                    unsafe { words.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, tile.row_bytes) };
                }
                *tile = loaded;
            }
            Action::Store(tile, to) => {
                let tile = configured(tiles, *tile);
                for (row, words) in tile.words[..tile.rows].iter().enumerate() {
                    let to = std::ptr::with_exposed_provenance_mut::<u8>(to.at(row));
                    // SAFETY: the instruction writes as many bytes there.
                    unsafe { to.copy_from_nonoverlapping(words.as_ptr().cast(), tile.row_bytes) };
                }
            }
            &Action::Multiply { sum, left, right } => {
                let (left, right) = (*configured(tiles, left), *configured(tiles, right));
                let sum = configured(tiles, sum);
                if left.rows != sum.rows || right.row_bytes != sum.row_bytes || left.row_bytes != 4 * right.rows {
                    refuse("a product of tiles that do not fit each other");
                }
                if left.row_bytes != ROW_BYTES || right.row_bytes != ROW_BYTES {
                    refuse("a product of parts of tiles, which no kernel has yet");
                }
                let c = sum.words.as_mut_ptr().cast::<f32>();
                let tile = GranuleTile {
                    granules: 1,
                    a: left.words.as_ptr().cast(),
                    a_row: ROW_BYTES,
                    a_granule: ROW_BYTES,
                    a_tile: 0,
                    b_step: ROW_BYTES,
                    behind: std::ptr::null(),
                    from: c,
                    from_row: LANES,
                    c,
                    c_row: LANES,
                    vectors: 1,
                };
                // SAFETY: whole tiles of sixteen steps and columns; who asks for tiles has AVX-512.
                unsafe { granules::kernel(Isa::Avx512)(sum.rows, &[right.words.as_ptr().cast()], &tile) };
            }
        }
    }
}

fn configured(tiles: &mut [Tile; TILES], tile: usize) -> &mut Tile {
    match tiles.get_mut(tile) {
        Some(tile) if tile.rows > 0 => tile,
        _ => refuse("an operand that is not configured"),
    }
}

/// An operand in memory: `base + index`, of which tiles have the index for each row.
struct Place {
    base: usize,
    index: Option<usize>,
    /// Of the whole instruction.
    bytes: usize,
}

impl Place {
    fn decode(byte: &impl Fn(usize) -> u8, vex: u8, registers: &[libc::greg_t]) -> Place {
        /// Registers as instructions number them.
        const NUMBERED: [libc::c_int; 16] = [
            libc::REG_RAX,
            libc::REG_RCX,
            libc::REG_RDX,
            libc::REG_RBX,
            libc::REG_RSP,
            libc::REG_RBP,
            libc::REG_RSI,
            libc::REG_RDI,
            libc::REG_R8,
            libc::REG_R9,
            libc::REG_R10,
            libc::REG_R11,
            libc::REG_R12,
            libc::REG_R13,
            libc::REG_R14,
            libc::REG_R15,
        ];
        let value = |number: u8| registers[NUMBERED[number as usize] as usize] as usize;
        // Extensions of register numbers are stored inverted.
        let (extends_index, extends_base) = ((!vex >> 6 & 1) << 3, (!vex >> 5 & 1) << 3);
        let (mode, rm) = (byte(4) >> 6, byte(4) & 7);
        if mode == 0 && rm == 5 {
            refuse("an address beside the code");
        }
        let (mut base, mut index, mut at) = (rm | extends_base, None, 5);
        let mut has_base = true;
        if rm == 4 {
            let sib = byte(5);
            let number = sib >> 3 & 7 | extends_index;
            // The stack pointer is no index.
            index = (number != 4).then(|| value(number) << (sib >> 6));
            base = sib & 7 | extends_base;
            has_base = mode != 0 || sib & 7 != 5;
            at = 6;
        }
        let word = |at| i32::from_le_bytes(std::array::from_fn(|i| byte(at + i)));
        let (offset, offset_bytes) = match mode {
            1 => (byte(at) as i8 as isize, 1),
            0 if has_base => (0, 0),
            _ => (word(at) as isize, 4),
        };
        let base = if has_base { value(base) } else { 0 };
        Place { base: base.wrapping_add_signed(offset), index, bytes: at + offset_bytes }
    }
}
