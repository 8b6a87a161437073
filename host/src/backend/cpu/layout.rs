//! What the kernel reads: weights in panels, made once, and tokens in integers, made for every step.
//!
//! Within a block of 16, K is reordered so that weights need no shuffle: a byte of a packed matrix holds two neighbours,
//! and unpacking four bytes gives the four even elements of eight, then the four odd ones. Tokens are stored in that order.

use rayon::prelude::*;

use super::pages::Pages;
use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};
use crate::problem::Expert;

/// Rows of weights in a panel: 16 of gate beside the same 16 of up, or 32 of the only projection.
pub(super) const PANEL_ROWS: usize = 32;

/// Groups of four elements of K in a block, the unit of the byte dot product instructions.
pub(super) const QUADS: usize = BLOCK / 4;

/// Blocks of K computed at a time, 512 elements: a panel's weights, unpacked, are 20 KiB and stay in a core's L1 cache.
pub(super) const CHUNK_BLOCKS: usize = 32;

/// Added to the doubled value of a weight to make it unsigned: the dot product instructions take one unsigned operand.
pub(super) const WEIGHT_BIAS: i32 = 12;

/// The biased weight of each value code, for byte shuffles.
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) const BIASED: [u8; 16] = {
    let mut biased = [0; 16];
    let mut code = 0;
    while code < 16 {
        biased[code] = (e2m1::DOUBLED[code] as i32 + WEIGHT_BIAS) as u8;
        code += 1;
    }
    biased
};

/// A block of 16 elements of K for the rows of a panel, packed as in the matrix. The first half of the block comes
/// first: four bytes of a row, then four of the next. The second half follows in the same order.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct PackedBlock(pub [[[u8; 4]; PANEL_ROWS]; 2]);

/// The scales of a block of 16 elements of K for the rows of a panel.
pub(super) type PackedScales = [u8; PANEL_ROWS];

/// The weights of an expert: panel after panel, each with all blocks of K.
pub(super) struct Panels {
    pub n: usize,
    pub k: usize,
    /// Output features of a panel: 16 gated, 32 plain.
    pub features: usize,
    values: Pages<PackedBlock>,
    scales: Pages<PackedScales>,
}

impl Panels {
    pub fn new(expert: &Expert<'_>) -> Result<Self, Error> {
        let (n, k) = (expert.n(), expert.k());
        let projections: Vec<_> = expert.projections().collect();
        let features = PANEL_ROWS / projections.len();
        let blocks = k / BLOCK;
        // Rows past N are zeros: their sums are computed and dropped.
        let row = |panel: usize, lane: usize| {
            let row = panel * features + lane % features;
            (row < n).then_some((projections[lane / features], row))
        };
        let places = || (0..n.div_ceil(features) * blocks).into_par_iter().with_min_len(blocks);
        let values = places().map(|at| {
            let mut packed = PackedBlock([[[0; 4]; PANEL_ROWS]; 2]);
            for lane in 0..PANEL_ROWS {
                if let Some((matrix, row)) = row(at / blocks, lane) {
                    let halves = matrix.row_values(row)[at % blocks * (BLOCK / 2)..].as_chunks::<4>().0;
                    packed.0[0][lane] = halves[0];
                    packed.0[1][lane] = halves[1];
                }
            }
            packed
        });
        let scales = places().map(|at| {
            std::array::from_fn(|lane| {
                row(at / blocks, lane).map_or(0, |(matrix, row)| matrix.row_scales(row)[at % blocks])
            })
        });
        Ok(Self { n, k, features, values: Pages::collect(values)?, scales: Pages::collect(scales)? })
    }

    /// The number of panels.
    pub fn len(&self) -> usize {
        self.n.div_ceil(self.features)
    }

    /// A chunk of K of a panel: its blocks and their scales, [`CHUNK_BLOCKS`] or what is left.
    pub fn chunk(&self, panel: usize, chunk: usize) -> (&[PackedBlock], &[PackedScales]) {
        let blocks = self.k / BLOCK;
        let start = chunk * CHUNK_BLOCKS;
        let range = panel * blocks + start..panel * blocks + blocks.min(start + CHUNK_BLOCKS);
        (&self.values[range.clone()], &self.scales[range])
    }
}

/// The chunks of K of a row.
pub(super) const fn chunks(k: usize) -> usize {
    k.div_ceil(BLOCK * CHUNK_BLOCKS)
}

/// A block of 16 elements of a token.
#[derive(Clone, Copy)]
pub(super) struct TokenBlock {
    /// Doubled values, four signed bytes in each.
    pub quads: [i32; QUADS],
    /// What the bias of the weights adds to the dot product, negated.
    pub bias: i32,
    pub scale: f32,
}

impl TokenBlock {
    pub const ZERO: Self = Self { quads: [0; QUADS], bias: 0, scale: 0.0 };

    pub fn new(values: [u8; BLOCK / 2], scale: u8) -> Self {
        let quad = |quad: usize| {
            let shift = quad % 2 * 4;
            std::array::from_fn(|i| e2m1::DOUBLED[usize::from(values[quad / 2 * 4 + i] >> shift & 0xF)])
        };
        let quads: [[i8; 4]; QUADS] = std::array::from_fn(quad);
        let sum: i32 = quads.iter().flatten().map(|&value| i32::from(value)).sum();
        Self {
            quads: quads.map(|quad| i32::from_le_bytes(quad.map(|value| value as u8))),
            bias: -WEIGHT_BIAS * sum,
            scale: e4m3::VALUES[usize::from(scale)],
        }
    }
}

/// A chunk of K of a token. A group's tokens are stored chunk by chunk, so that what is used together lies together.
pub(super) type TokenChunk = [TokenBlock; CHUNK_BLOCKS];

/// Writes a chunk of a row of activations. If K ends inside of the last chunk, its rest stays as it is and is not read.
pub(super) fn unpack_tokens(matrix: &Matrix<'_>, row: usize, chunk: usize, out: &mut TokenChunk) {
    let start = chunk * CHUNK_BLOCKS;
    let values = matrix.row_values(row).as_chunks().0[start..].iter();
    for ((out, values), &scale) in out.iter_mut().zip(values).zip(&matrix.row_scales(row)[start..]) {
        *out = TokenBlock::new(*values, scale);
    }
}
