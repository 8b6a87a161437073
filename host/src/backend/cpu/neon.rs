//! NEON with dot products of bytes (`sdot`), and with products of byte matrices (`smmla`) if the CPU has them. Two
//! vectors of rows are computed at a time.

use std::arch::aarch64::*;
use std::arch::asm;
use std::arch::is_aarch64_feature_detected;

use super::kernel::{self, Simd, Tile};
use super::layout::{
    Bits16, Integers, Numbers, Nvfp4, PANEL_ROWS, PackedBlock, PackedScales, QUADS, Scratch, TokenBlock,
};
use crate::format::{BLOCK, e2m1};

/// Proof that this machine has NEON and `sdot` and, with `I8MM`, `smmla`.
#[derive(Clone, Copy)]
pub(super) struct Neon<const I8MM: bool>(());

/// Number of 32-bit lanes per vector.
const LANES: usize = 4;

/// Vectors of rows that are computed together.
const VECTORS: usize = 2;

impl<const I8MM: bool> Neon<I8MM> {
    /// Returns a value that proves that this machine has the features, or `None`.
    pub fn detect() -> Option<Self> {
        let present = is_aarch64_feature_detected!("neon")
            && is_aarch64_feature_detected!("dotprod")
            && (!I8MM || is_aarch64_feature_detected!("i8mm"));
        present.then_some(Self(()))
    }

    /// Decodes four scales.
    #[inline(always)]
    fn scales(self, codes: [u8; LANES]) -> float32x4_t {
        // SAFETY: `Neon` exists only if NEON was detected. The array of shifts has four i32, one vector.
        unsafe {
            let codes = vdupq_n_u32(u32::from_le_bytes(codes));
            let codes = vandq_u32(vshlq_u32(codes, vld1q_s32([0, -8, -16, -24].as_ptr())), vdupq_n_u32(0xFF));
            // Shift the fields of E4M3 to their places in f32. The exponent bias of f32 is larger by 120.
            const BIAS: f32 = f32::from_bits((127 + 120) << 23);
            vmulq_n_f32(vreinterpretq_f32_u32(vshlq_n_u32::<20>(codes)), BIAS)
        }
    }

    #[inline(always)]
    fn zeros(self) -> [float32x4_t; VECTORS] {
        // SAFETY: `Neon` exists only if NEON was detected.
        unsafe { [vdupq_n_f32(0.0); VECTORS] }
    }

    /// Adds sums to the sums in memory.
    #[inline(always)]
    fn add(self, sums: [float32x4_t; VECTORS], memory: &mut [f32]) {
        for (sums, memory) in sums.into_iter().zip(memory.as_chunks_mut::<LANES>().0) {
            // SAFETY: `Neon` exists only if NEON was detected. `memory` has 4 f32, one vector, and is borrowed mutably.
            unsafe { vst1q_f32(memory.as_mut_ptr(), vaddq_f32(vld1q_f32(memory.as_ptr()), sums)) }
        }
    }
}

impl<const I8MM: bool> Simd<Nvfp4> for Neon<I8MM> {
    const LANES: usize = VECTORS * LANES;
    // With `sdot` and eight tokens, the compiler generates a loop over the tokens and keeps their sums in memory.
    const TOKENS: usize = if I8MM { 8 } else { 4 };
    type Sums = [float32x4_t; VECTORS];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Integers) {
        // SAFETY: `Neon` exists only if NEON was detected. Four rows take 16 bytes, one vector, in a half of a packed
        // block and in a quad of an unpacked block. `DOUBLED` has 16 bytes.
        unsafe {
            let table = vld1q_s8(e2m1::DOUBLED.as_ptr());
            for (half, bytes) in values.0.iter().enumerate() {
                for vector in 0..PANEL_ROWS / LANES {
                    let packed = vld1q_u8(bytes[LANES * vector..].as_ptr().cast());
                    let even = vreinterpretq_s32_s8(vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(0xF))));
                    let odd = vreinterpretq_s32_s8(vqtbl1q_s8(table, vshrq_n_u8::<4>(packed)));
                    // `smmla` expects eight bytes of a row, then eight bytes of the next row.
                    let quads = if I8MM { [vzip1q_s32(even, odd), vzip2q_s32(even, odd)] } else { [even, odd] };
                    for (parity, quad) in quads.into_iter().enumerate() {
                        let out = out.quads[2 * half + parity][LANES * vector..].as_mut_ptr();
                        vst1q_s32(out.cast(), quad);
                    }
                }
            }
        }
        for (codes, out) in scales.as_chunks::<LANES>().0.iter().zip(out.scales.as_chunks_mut::<LANES>().0) {
            // SAFETY: `Neon` exists only if NEON was detected. `out` has 4 f32, one vector.
            unsafe { vst1q_f32(out.as_mut_ptr(), self.scales(*codes)) }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        self.zeros()
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Integers,
        lane: usize,
        tokens: [&TokenBlock; N],
    ) {
        // SAFETY: `Neon` exists only if NEON and `sdot` were detected and, with `I8MM`, `smmla`. Four rows of a quad
        // are 16 bytes, one vector, and so are the scales of four rows and the quads of a token.
        unsafe {
            let weights: [[_; VECTORS]; QUADS] = std::array::from_fn(|quad| {
                std::array::from_fn(|vector| vld1q_s8(block.quads[quad][lane + LANES * vector..].as_ptr().cast()))
            });
            let scales: [_; VECTORS] =
                std::array::from_fn(|vector| vld1q_f32(block.scales[lane + LANES * vector..].as_ptr()));
            let bytes = |token: &TokenBlock| vreinterpretq_s8_s32(vld1q_s32(token.quads.as_ptr()));
            let add = |sum: &mut float32x4_t, dots, scales, token: &TokenBlock| {
                *sum = vfmaq_f32(*sum, vcvtq_f32_s32(dots), vmulq_n_f32(scales, token.scale));
            };
            let none = vdupq_n_s32(0);
            if !I8MM {
                for (sums, token) in sums.iter_mut().zip(tokens) {
                    let values = bytes(token);
                    for vector in 0..VECTORS {
                        let dots = sdot::<0>(none, weights[0][vector], values);
                        let dots = sdot::<1>(dots, weights[1][vector], values);
                        let dots = sdot::<2>(dots, weights[2][vector], values);
                        let dots = sdot::<3>(dots, weights[3][vector], values);
                        add(&mut sums[vector], dots, scales[vector], token);
                    }
                }
                return;
            }
            for first in (0..N).step_by(2) {
                // A token without a neighbor is multiplied twice, and the second result is ignored.
                let second = (first + 1).min(N - 1);
                let pair = [first, second].map(|token| vreinterpretq_s64_s8(bytes(tokens[token])));
                let halves =
                    [vzip1q_s64(pair[0], pair[1]), vzip2q_s64(pair[0], pair[1])].map(|half| vreinterpretq_s8_s64(half));
                for vector in 0..VECTORS {
                    // Products of two rows with both tokens.
                    let products = |rows: usize| {
                        let front = smmla(none, weights[rows][vector], halves[0]);
                        smmla(front, weights[2 + rows][vector], halves[1])
                    };
                    let (front, back) = (products(0), products(1));
                    add(&mut sums[first][vector], vuzp1q_s32(front, back), scales[vector], tokens[first]);
                    if second > first {
                        add(&mut sums[second][vector], vuzp2q_s32(front, back), scales[vector], tokens[second]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        self.add(sums, memory);
    }

    fn compute(self, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
        #[target_feature(enable = "neon,dotprod")]
        fn plain(simd: Neon<false>, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
            kernel::compute(simd, tile, scratch);
        }
        #[target_feature(enable = "neon,dotprod,i8mm")]
        fn i8mm(simd: Neon<true>, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Neon` exists only if NEON and `sdot` were detected and, with `I8MM`, `smmla`.
        unsafe { if I8MM { i8mm(Neon(()), tile, scratch) } else { plain(Neon(()), tile, scratch) } }
    }
}

impl<const I8MM: bool> Simd<Bits16> for Neon<I8MM> {
    const LANES: usize = VECTORS * LANES;
    const TOKENS: usize = 4;
    /// Sums of even columns and sums of odd columns.
    type Sums = [[float32x4_t; VECTORS]; 2];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Numbers) {
        /// Corrects the exponent after the fields of E2M1 are shifted to their places in f32. The exponent bias of f32
        /// is larger by 126.
        const BIAS: f32 = f32::from_bits((127 + 126) << 23);
        // SAFETY: `Neon` exists only if NEON was detected. Four rows of a half of a packed block are 16 bytes, one
        // vector, with eight codes of a row in each lane. Four rows of a column of numbers are 4 f32, one vector.
        unsafe {
            for (vector, codes) in scales.as_chunks::<LANES>().0.iter().enumerate() {
                let scales = self.scales(*codes);
                for (half, bytes) in values.0.iter().enumerate() {
                    let packed = vld1q_u32(bytes[LANES * vector..].as_ptr().cast());
                    for column in 0..BLOCK / 2 {
                        let shifted = |to: i32| vshlq_u32(packed, vdupq_n_s32(to - 4 * column as i32));
                        let magnitudes = vandq_u32(shifted(22), vdupq_n_u32(7 << 22));
                        let signs = vandq_u32(shifted(28), vdupq_n_u32(1 << 31));
                        let numbers = vmulq_n_f32(vreinterpretq_f32_u32(vorrq_u32(magnitudes, signs)), BIAS);
                        let out = out.0[half * BLOCK / 2 + column][LANES * vector..].as_mut_ptr();
                        vst1q_f32(out, vmulq_f32(numbers, scales));
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [self.zeros(); 2]
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Numbers,
        lane: usize,
        tokens: [&[f32; BLOCK]; N],
    ) {
        for four in 0..BLOCK / LANES {
            // SAFETY: `Neon` exists only if NEON was detected. Four numbers of a token are one vector, and so are four
            // rows of a column.
            unsafe {
                let tokens = tokens.map(|token| vld1q_f32(token[LANES * four..].as_ptr()));
                let weights = |column: usize| -> [_; VECTORS] {
                    let rows = &block.0[LANES * four + column];
                    std::array::from_fn(|vector| vld1q_f32(rows[lane + LANES * vector..].as_ptr()))
                };
                add_column::<0, N>(sums, weights(0), tokens);
                add_column::<1, N>(sums, weights(1), tokens);
                add_column::<2, N>(sums, weights(2), tokens);
                add_column::<3, N>(sums, weights(3), tokens);
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let [even, odd] = sums;
        // SAFETY: `Neon` exists only if NEON was detected.
        self.add(std::array::from_fn(|vector| unsafe { vaddq_f32(even[vector], odd[vector]) }), memory);
    }

    fn compute(self, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
        #[target_feature(enable = "neon")]
        fn compute<const I8MM: bool>(simd: Neon<I8MM>, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Neon` exists only if NEON was detected.
        unsafe { compute(self, tile, scratch) }
    }
}

/// Adds the products of a column of weights with lane `LANE` of each token.
#[inline(always)]
fn add_column<const LANE: i32, const N: usize>(
    sums: &mut [[[float32x4_t; VECTORS]; 2]; N],
    weights: [float32x4_t; VECTORS],
    tokens: [float32x4_t; N],
) {
    for (sums, token) in sums.iter_mut().zip(tokens) {
        for (sum, weights) in sums[LANE as usize % 2].iter_mut().zip(weights) {
            // SAFETY: NEON is part of the target.
            *sum = unsafe { vfmaq_laneq_f32::<LANE>(*sum, weights, token) };
        }
    }
}

/// For each of four lanes, adds the dot product of four signed bytes of `a` with the four bytes of lane `LANE` of `b`
/// (Arm ARM, "SDOT (by element)"). The intrinsic is not stable in Rust 1.95.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: i32>(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the function's target features include `sdot`. The instruction accesses these registers only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds the product of `a`, two rows of eight signed bytes, with `b`, two columns of eight, to a 2×2 matrix of sums
/// (Arm ARM, "SMMLA"). The intrinsic is not stable in Rust 1.95.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the function's target features include `smmla`. The instruction accesses these registers only.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
