//! No instruction set in particular: loops that a compiler turns into whatever vectors the target has.

use super::kernel::{self, Block, Scratch, Simd, Tile};
use super::layout::{BIASED, PackedBlock, PackedScales, QUADS, TokenBlock};
use crate::format::e4m3;

/// Runs anywhere.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 8;

impl Simd for Portable {
    const LANES: usize = LANES;
    const TOKENS: usize = 2;
    type Weights = ([[[u8; 4]; LANES]; QUADS], [f32; LANES]);
    type Sums = [f32; LANES];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Block) {
        for (quad, out) in out.quads.iter_mut().enumerate() {
            for (bytes, out) in values.0[quad / 2].iter().zip(out) {
                *out = bytes.map(|byte| BIASED[usize::from(byte >> (quad % 2 * 4) & 0xF)]);
            }
        }
        out.scales = scales.map(|code| e4m3::VALUES[usize::from(code)]);
    }

    #[inline(always)]
    fn load(self, block: &Block, lane: usize) -> Self::Weights {
        let quads = block.quads.map(|quad| std::array::from_fn(|i| quad[lane + i]));
        (quads, std::array::from_fn(|i| block.scales[lane + i]))
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [0.0; LANES]
    }

    #[inline(always)]
    fn accumulate(self, sums: Self::Sums, (quads, scales): Self::Weights, token: &TokenBlock) -> Self::Sums {
        let mut dots = [token.bias; LANES];
        for (quad, token) in quads.iter().zip(token.quads) {
            let token = token.to_le_bytes().map(|byte| i32::from(byte as i8));
            for (dot, weights) in dots.iter_mut().zip(quad) {
                for (weight, token) in weights.iter().zip(token) {
                    *dot += i32::from(*weight) * token;
                }
            }
        }
        std::array::from_fn(|i| sums[i] + dots[i] as f32 * (scales[i] * token.scale))
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        memory.iter_mut().zip(sums).for_each(|(memory, sum)| *memory += sum);
    }

    fn compute(self, tile: &Tile<'_>, scratch: &mut Scratch) {
        kernel::compute(self, tile, scratch);
    }
}
