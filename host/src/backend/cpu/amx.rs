//! Intel's AMX for bf16: one instruction multiplies 16 tokens by 32 columns with 32 columns by 16 rows of weights.
//!
//! AMX multiplies ordinary bf16 tokens in tiles of more than two tokens. AVX-512 computes all other tiles, to the same
//! bits.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::LazyLock;

use super::avx512::Avx512;
use super::kernel::{self, Tile};
use super::layout::{Bf16, PANEL_ROWS, PackedBlock, PackedScales, Pairs, Scratch, TILE_TOKENS, TokenPairs, Tokens};
use crate::format::BLOCK;

/// Proof that this machine has AMX for bf16 and AVX-512, and that the operating system lets this process use AMX.
#[derive(Clone, Copy)]
pub(super) struct Amx(Avx512);

/// Rows per tile register: tokens, or rows of weights.
const REGISTER_ROWS: usize = 16;

/// Bytes per row of a tile register: 32 bf16, or 16 f32.
const REGISTER_BYTES: usize = 64;

/// Columns of K per instruction.
const STEP: usize = REGISTER_BYTES / size_of::<u16>();

/// Bytes from one token to the next.
const TOKEN_BYTES: usize = Bf16::CHUNK_BLOCKS * BLOCK * size_of::<u16>();

/// Distance in bytes between two pairs of columns in a panel's weights, and also between the sums of two tokens.
const PANEL_BYTES: usize = PANEL_ROWS * size_of::<f32>();

const _: () = assert!(PANEL_ROWS == 2 * REGISTER_ROWS && STEP == Bf16::SUM_BLOCKS * BLOCK);

impl Amx {
    /// Returns a value that proves that this process can use AMX and AVX-512, or `None`.
    pub fn detect() -> Option<Self> {
        static IS_PERMITTED: LazyLock<bool> = LazyLock::new(|| has_amx() && is_permitted());
        Avx512::detect().filter(|_| *IS_PERMITTED).map(Self)
    }

    /// Computes a tile and writes its outputs.
    pub fn compute(self, tile: &Tile<'_, Bf16>, scratch: &mut Scratch<Bf16>) {
        // With one or two tokens, memory limits the speed, and AVX-512 decodes weights as they arrive.
        if !tile.are_ordinary || tile.rows.len() <= 2 {
            return self.0.compute_as_f32(tile);
        }
        #[target_feature(enable = "avx512f,avx512bw")]
        fn unpack(amx: Amx, values: &[PackedBlock], scales: &[PackedScales], out: &mut [Pairs]) {
            for ((values, scales), out) in values.iter().zip(scales).zip(&mut *out) {
                kernel::prefetch_after(values);
                kernel::prefetch_after(scales);
                amx.0.unpack_bf16::<Bf16>(values, scales, out);
            }
            out[values.len()..].fill(Bf16::ZERO_BLOCK);
        }
        let rows = tile.rows.len();
        let sums = &mut scratch.sums[..tile.panels.len()];
        sums.iter_mut().for_each(|sums| sums[..rows].fill([0.0; PANEL_ROWS]));
        for (chunk, tokens) in tile.tokens.chunks(Bf16::CHUNK_BLOCKS * tile.m).enumerate() {
            let tokens = &tokens[Bf16::CHUNK_BLOCKS * tile.rows.start..][..Bf16::CHUNK_BLOCKS * rows];
            for (panel, sums) in tile.panels.clone().zip(&mut *sums) {
                let (values, scales) = tile.weights.blocks(panel, Bf16::CHUNK_BLOCKS * chunk, Bf16::CHUNK_BLOCKS);
                let weights = &mut scratch.panel[..values.len().next_multiple_of(Bf16::SUM_BLOCKS)];
                // SAFETY: `Amx` holds an `Avx512`, which exists only if AVX-512 F and BW were detected.
                unsafe { unpack(self, values, scales, weights) };
                self.add_products(weights, tokens, &mut sums[..rows]);
            }
        }
        kernel::write(tile, sums);
    }

    /// Adds the products of tokens and a panel over one chunk of K.
    fn add_products(self, weights: &[Pairs], tokens: &[TokenPairs], sums: &mut [[f32; PANEL_ROWS]]) {
        assert!(sums.len() <= TILE_TOKENS && tokens.len() == sums.len() * Bf16::CHUNK_BLOCKS);
        assert!(weights.len().is_multiple_of(Bf16::SUM_BLOCKS) && weights.len() <= Bf16::CHUNK_BLOCKS);
        let tokens = tokens.chunks(2 * REGISTER_ROWS * Bf16::CHUNK_BLOCKS);
        for (tokens, sums) in tokens.zip(sums.chunks_mut(2 * REGISTER_ROWS)) {
            let operands = Operands {
                registers: Registers::new(sums.len()),
                second_token: second_token(sums.len()),
                steps: weights.len() / Bf16::SUM_BLOCKS,
                tokens: tokens.as_ptr(),
                weights: weights.as_ptr(),
                sums: sums.as_mut_ptr(),
            };
            // SAFETY: `Amx` exists only if AMX with bf16 was detected and permitted. The asserts above bound the
            // operands: `tokens` and `sums` have the number of tokens that `registers` was made for, and `weights` has
            // `steps` steps. This thread alone writes `sums`.
            unsafe { operands.multiply() }
        }
    }
}

/// Configuration of the tile registers: palette 1 of `ldtilecfg`.
#[repr(C, align(64))]
struct Registers {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Registers {
    /// Configures registers 0 to 3 for the sums of up to 32 tokens, 4 and 5 for the tokens, and 6 and 7 for weights.
    fn new(tokens: usize) -> Self {
        let [first, second] = [0, second_token(tokens)].map(|token| (tokens - token).min(REGISTER_ROWS) as u8);
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(REGISTER_BYTES as u16);
        rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// Returns the first token of the second register. With up to 16 tokens it is 0: both registers hold the same tokens,
/// and each sum is computed and stored twice. That takes less time than decoding weights.
fn second_token(tokens: usize) -> usize {
    if tokens > REGISTER_ROWS { REGISTER_ROWS } else { 0 }
}

/// Operands of one multiplication: the tokens and a panel's weights of a chunk of K, `steps` steps of each, and the
/// sums.
struct Operands {
    registers: Registers,
    second_token: usize,
    steps: usize,
    tokens: *const TokenPairs,
    weights: *const Pairs,
    sums: *mut [f32; PANEL_ROWS],
}

impl Operands {
    /// Adds the products of the tokens to their sums.
    ///
    /// # Safety
    /// The machine has AMX with bf16, and the process may use it. `steps` is at least 1. `tokens` points to the number
    /// of tokens that `registers` is configured for, each with a chunk of K, and `sums` to one row of sums per token.
    /// `weights` points to `steps` steps. No other thread accesses `sums` during the call.
    unsafe fn multiply(&self) {
        // SAFETY: the caller guarantees AMX and the lengths of `tokens`, `sums` and `weights`, so all tile loads and
        // stores stay within them. `ldtilecfg` configures the tile registers, and `tilerelease` frees them.
        unsafe {
            asm!(
                "ldtilecfg [{registers}]",
                "tileloadd tmm0, [{sums} + {panel_bytes}]",
                "tileloadd tmm1, [{sums} + {panel_bytes} + {register_bytes}]",
                "tileloadd tmm2, [{second_sums} + {panel_bytes}]",
                "tileloadd tmm3, [{second_sums} + {panel_bytes} + {register_bytes}]",
                "2:",
                "tileloadd tmm4, [{tokens} + {token_bytes}]",
                "tileloadd tmm6, [{weights} + {panel_bytes}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{weights} + {panel_bytes} + {register_bytes}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{second_tokens} + {token_bytes}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {tokens}, {register_bytes}",
                "add {second_tokens}, {register_bytes}",
                "add {weights}, {step_bytes}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {panel_bytes}], tmm0",
                "tilestored [{sums} + {panel_bytes} + {register_bytes}], tmm1",
                "tilestored [{second_sums} + {panel_bytes}], tmm2",
                "tilestored [{second_sums} + {panel_bytes} + {register_bytes}], tmm3",
                "tilerelease",
                registers = in(reg) &raw const self.registers,
                sums = in(reg) self.sums,
                second_sums = in(reg) self.sums.add(self.second_token),
                tokens = inout(reg) self.tokens => _,
                second_tokens = inout(reg) self.tokens.add(self.second_token * Bf16::CHUNK_BLOCKS) => _,
                weights = inout(reg) self.weights => _,
                steps = inout(reg) self.steps => _,
                panel_bytes = in(reg) PANEL_BYTES,
                token_bytes = in(reg) TOKEN_BYTES,
                register_bytes = const REGISTER_BYTES,
                step_bytes = const PANEL_BYTES * REGISTER_ROWS,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Whether the processor has AMX with bf16 (Intel SDM, volume 2, CPUID: leaf 7, EDX, bits 22 and 24).
fn has_amx() -> bool {
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES
}

/// Asks Linux to permit the tile registers to all threads of the process (Linux, Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this system call takes numbers only and reads no memory of the process. It only raises the size of the
    // signal frame.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// AMX is used on Linux only.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
