//! No instruction set in particular: loops over bytes and 16-bit integers, which a compiler turns into whatever vectors
//! the target has. The arithmetic never wraps. It is `wrapping` because overflow checks would keep the compiler from
//! using vectors.

use super::kernel::{self, Block, Scratch, Simd, Tile};
use super::layout::{PANEL_ROWS, PackedBlock, PackedScales, QUADS, TokenBlock, WEIGHT_BIAS};
use crate::format::e4m3;

/// Runs anywhere.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Simd for Portable {
    const LANES: usize = PANEL_ROWS;
    const TOKENS: usize = 4;
    /// For each quad and each of its four columns, a number of every row.
    type Weights = ([[[i16; PANEL_ROWS]; 4]; QUADS], [f32; PANEL_ROWS]);
    type Sums = [f32; PANEL_ROWS];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Block) {
        for (quad, out) in out.quads.iter_mut().enumerate() {
            for (&byte, out) in values.0[quad / 2].as_flattened().iter().zip(out.as_flattened_mut()) {
                *out = biased(byte >> (quad % 2 * 4));
            }
        }
        out.scales = scales.map(|code| e4m3::VALUES[usize::from(code)]);
    }

    #[inline(always)]
    fn load(self, block: &Block, _lane: usize) -> Self::Weights {
        let mut weights = [[[0; PANEL_ROWS]; 4]; QUADS];
        for (weights, quad) in weights.iter_mut().zip(&block.quads) {
            for (column, weights) in weights.iter_mut().enumerate() {
                for (weight, &row) in weights.iter_mut().zip(quad) {
                    // A shift of the whole row is done on vectors; choosing a byte would not be.
                    *weight = (u32::from_le_bytes(row) >> (8 * column) & 0xFF) as i16;
                }
            }
        }
        (weights, block.scales)
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [0.0; PANEL_ROWS]
    }

    #[inline(always)]
    fn accumulate(self, sums: Self::Sums, (quads, scales): Self::Weights, token: &TokenBlock) -> Self::Sums {
        // With the bias, a sum is at most 16·12·12 in magnitude. On the way there it is at most twice that.
        let mut dots = [token.bias as i16; PANEL_ROWS];
        for (weights, token) in quads.iter().zip(token.quads) {
            let token = token.to_le_bytes().map(|byte| i16::from(byte as i8));
            for (row, dot) in dots.iter_mut().enumerate() {
                let product = |column: usize| weights[column][row].wrapping_mul(token[column]);
                let (front, back) = (product(0).wrapping_add(product(1)), product(2).wrapping_add(product(3)));
                *dot = dot.wrapping_add(front.wrapping_add(back));
            }
        }
        std::array::from_fn(|row| sums[row] + f32::from(dots[row]) * (scales[row] * token.scale))
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        memory.iter_mut().zip(sums).for_each(|(memory, sum)| *memory += sum);
    }

    fn compute(self, tile: &Tile<'_>, scratch: &mut Scratch) {
        kernel::compute(self, tile, scratch);
    }
}

/// The biased weight of a value code, without a table.
#[inline(always)]
fn biased(code: u8) -> u8 {
    const BIAS: u8 = WEIGHT_BIAS as u8;
    let magnitude = code & 7;
    // 0, 1, 2, 3, 4, then in steps of 2: 6, 8, then of 4: 12.
    let step_2 = magnitude.saturating_sub(4);
    let step_4 = magnitude.saturating_sub(6);
    let doubled = magnitude.wrapping_add(step_2).wrapping_add(step_4).wrapping_add(step_4);
    if code & 8 == 0 { BIAS.wrapping_add(doubled) } else { BIAS.wrapping_sub(doubled) }
}

#[cfg(test)]
mod tests {
    use super::super::layout::BIASED;
    use super::biased;

    #[test]
    fn weights_are_those_of_the_table() {
        for code in 0..=255u8 {
            assert_eq!(biased(code), BIASED[usize::from(code & 0xF)]);
        }
    }
}
