//! Code for any CPU: loops over bytes and 16-bit integers, which the compiler turns into the target's vector
//! instructions. The arithmetic never wraps. It uses `wrapping` operations because overflow checks would keep the
//! compiler from using vectors.

use super::kernel::{self, Simd, Tile};
use super::layout::{
    Bits16, Integers, Numbers, Nvfp4, PANEL_ROWS, PackedBlock, PackedScales, QUADS, Scratch, TokenBlock, WEIGHT_BIAS,
};
use crate::format::{BLOCK, e4m3};

/// An instruction set that every machine has.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Simd<Nvfp4> for Portable {
    const LANES: usize = PANEL_ROWS;
    const TOKENS: usize = 4;
    type Sums = [f32; PANEL_ROWS];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Integers) {
        for (quad, out) in out.quads.iter_mut().enumerate() {
            for (&byte, out) in values.0[quad / 2].as_flattened().iter().zip(out.as_flattened_mut()) {
                *out = biased(byte >> (quad % 2 * 4));
            }
        }
        out.scales = scales.map(|code| e4m3::VALUES[usize::from(code)]);
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [0.0; PANEL_ROWS]
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Integers,
        _lane: usize,
        tokens: [&TokenBlock; N],
    ) {
        // Indexed by quad, by column within the quad, and by row.
        let mut weights = [[[0; PANEL_ROWS]; 4]; QUADS];
        for (weights, quad) in weights.iter_mut().zip(&block.quads) {
            for (column, weights) in weights.iter_mut().enumerate() {
                for (weight, &row) in weights.iter_mut().zip(quad) {
                    // The compiler vectorizes a shift of the whole row, but not the selection of a byte.
                    *weight = (u32::from_le_bytes(row) >> (8 * column) & 0xFF) as i16;
                }
            }
        }
        for (sums, token) in sums.iter_mut().zip(tokens) {
            // With the bias, a sum is at most 16·12·12 in magnitude. Sums on the way are at most twice as large.
            let mut dots = [token.bias as i16; PANEL_ROWS];
            for (weights, token) in weights.iter().zip(token.quads) {
                let token = token.to_le_bytes().map(|byte| i16::from(byte as i8));
                for (row, dot) in dots.iter_mut().enumerate() {
                    let product = |column: usize| weights[column][row].wrapping_mul(token[column]);
                    let (front, back) = (product(0).wrapping_add(product(1)), product(2).wrapping_add(product(3)));
                    *dot = dot.wrapping_add(front.wrapping_add(back));
                }
            }
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum += f32::from(dots[row]) * (block.scales[row] * token.scale);
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        memory.iter_mut().zip(sums).for_each(|(memory, sum)| *memory += sum);
    }

    fn compute(self, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
        kernel::compute(self, tile, scratch);
    }
}

/// Rows that are computed together with 16-bit tokens: two vectors of the smallest size.
const ROWS: usize = 8;

impl Simd<Bits16> for Portable {
    const LANES: usize = ROWS;
    const TOKENS: usize = 2;
    /// Sums of even columns and sums of odd columns.
    type Sums = [[f32; ROWS]; 2];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Numbers) {
        let scales = scales.map(|code| e4m3::VALUES[usize::from(code)]);
        for (half, rows) in values.0.iter().enumerate() {
            for column in 0..BLOCK / 2 {
                let out = &mut out.0[half * BLOCK / 2 + column];
                for ((out, &row), scale) in out.iter_mut().zip(rows).zip(scales) {
                    *out = number((u32::from_le_bytes(row) >> (4 * column)) as u8) * scale;
                }
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [[0.0; ROWS]; 2]
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Numbers,
        lane: usize,
        tokens: [&[f32; BLOCK]; N],
    ) {
        let before = *sums;
        for (column, weights) in block.0.iter().enumerate() {
            let weights: &[f32; ROWS] = weights[lane..].first_chunk().expect("a panel has rows for each lane");
            for (sums, token) in sums.iter_mut().zip(tokens) {
                for (sum, weight) in sums[column % 2].iter_mut().zip(weights) {
                    *sum += token[column] * weight;
                }
            }
        }
        // Products are exact unless they overflow. If one overflows, a fused multiply-add may still give a finite sum.
        if sums.as_flattened().as_flattened().iter().any(|sum| !sum.is_finite()) {
            *sums = before;
            accumulate_fused(sums, block, lane, tokens);
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let [even, odd] = sums;
        for ((memory, even), odd) in memory.iter_mut().zip(even).zip(odd) {
            *memory += even + odd;
        }
    }

    fn compute(self, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
        kernel::compute(self, tile, scratch);
    }
}

/// Uses fused multiply-adds, which are slow on CPUs that have no instruction for them.
#[cold]
fn accumulate_fused<const N: usize>(
    sums: &mut [[[f32; ROWS]; 2]; N],
    block: &Numbers,
    lane: usize,
    tokens: [&[f32; BLOCK]; N],
) {
    for (column, weights) in block.0.iter().enumerate() {
        for (sums, token) in sums.iter_mut().zip(tokens) {
            for (sum, weight) in sums[column % 2].iter_mut().zip(&weights[lane..]) {
                *sum = token[column].mul_add(*weight, *sum);
            }
        }
    }
}

/// Decodes a value code without a table.
#[inline(always)]
fn number(code: u8) -> f32 {
    let magnitude = f32::from(biased(code & 7) - WEIGHT_BIAS as u8) * 0.5;
    f32::from_bits(magnitude.to_bits() | u32::from(code & 8) << 28)
}

/// Biased weight of a value code, computed without a table.
#[inline(always)]
fn biased(code: u8) -> u8 {
    const BIAS: u8 = WEIGHT_BIAS as u8;
    let magnitude = code & 7;
    // 0, 1, 2, 3, 4, then in steps of 2: 6, 8, then in a step of 4: 12.
    let step_2 = magnitude.saturating_sub(4);
    let step_4 = magnitude.saturating_sub(6);
    let doubled = magnitude.wrapping_add(step_2).wrapping_add(step_4).wrapping_add(step_4);
    if code & 8 == 0 { BIAS.wrapping_add(doubled) } else { BIAS.wrapping_sub(doubled) }
}

#[cfg(test)]
mod tests {
    use super::super::layout::BIASED;
    use super::{biased, number};
    use crate::format::e2m1;

    #[test]
    fn weights_match_the_table() {
        for code in 0..=255u8 {
            assert_eq!(biased(code), BIASED[usize::from(code & 0xF)]);
            assert_eq!(number(code).to_bits(), e2m1::decode(code).to_bits());
        }
    }
}
