//! The warpgroups that multiply: stages of weights × buffers of tokens → C. The main loop and the epilogue are those of
//! [`sm90`](crate::sm90); here stands how weights lie in a stage.

use core::marker::PhantomData;

use cuda_std::{
    shared::{SharedAddress, ld_shared_b16, ld_shared_v4_b32},
    wgmma,
};

use super::{
    Sm90, Tiles,
    order::{LANE_SCALES, LANE_WORDS},
};
use crate::{
    epilogue::Activation,
    format::{OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_BYTES, scale_row},
    gated_sm90::abi::{Group, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, lane_offset},
    ring::Ring,
    sm90::{
        Alpha, Consumer, Fragment, Kind, PANELS, Shape, Sums, Target,
        decode::{F16_UNSCALE, Scales, decode_weights},
    },
};

impl<const INDEX: usize> Sm90<INDEX> {
    /// Multiplies and writes the block's tiles. One warpgroup, the `consumer`-th of those that multiply.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warpgroup calls it together, and
    /// so does every other one that multiplies, with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(output: u32, mut tiles: Tiles, shared: SharedAddress, consumer: u32) {
        let (stages, buffers) = (Self::stages(shared), Self::buffers(shared));
        let mut consumer = Consumer::new(Self, shared, consumer, stages, buffers, Self::turn_barriers(shared));
        // SAFETY: the whole warpgroup is here and takes the same way. The tile is the block's.
        unsafe {
            loop {
                let tile = tiles.read();
                let sums: Sums<PANELS> = consumer.sum_tile(tile.tokens, tile.group.k_blocks());
                let tile = tiles.read();
                let Group { c, alpha, n, .. } = tile.group;
                let target: Target<Self> = Target {
                    c,
                    n,
                    alpha: Alpha::OfMatrices(alpha),
                    bias: [0; 2],
                    activation: Activation::NONE,
                    first_column: tile.first_column,
                    first_row: tile.first_token,
                    tokens: tile.tokens,
                    kind: PhantomData,
                };
                if output == OUTPUT_BF16 {
                    target.write(OUTPUT_BF16, &consumer.fragment, sums);
                } else {
                    target.write(OUTPUT_F16, &consumer.fragment, sums);
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }
}

/// A thread's words of two rows of a stage's panel, and the scales of these words.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [Scales; 2],
}

impl<const INDEX: usize> Kind<PANELS> for Sm90<INDEX> {
    const SHAPE: Shape = Self::INSTANCE.shape();
    // Both factors of a product are decoded.
    const UNSCALE: f32 = F16_UNSCALE * F16_UNSCALE;
    // Where threads decode tokens to the buffers, they make the fence.
    const COPIED_BY_THREADS: bool = false;
    const ANY_ACTIVATION: bool = false;
    type Number = wgmma::F16;
    type Part = Rows;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Self::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Self::buffer(shared, buffers)
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, fragment: &Fragment, _k_block: u32) -> [Rows; PANELS] {
        // SAFETY: the panels of the stage, which is full.
        unsafe { [0, 1].map(|panel| Rows::load(stage + Self::panel(panel), fragment)) }
    }

    #[inline(always)]
    fn decode(part: &Rows, word: usize) -> [[u32; 4]; 2] {
        let scale = word / (LANE_WORDS / LANE_SCALES) as usize;
        let [first, second] = [0, 1].map(|row| decode_weights(part.words[row][word], part.scales[row].twice(scale)));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

impl Rows {
    /// Loads them of the panel at this address.
    ///
    /// # Safety
    /// The panel's stage is full.
    #[inline(always)]
    unsafe fn load(panel: SharedAddress, fragment: &Fragment) -> Self {
        let lane = fragment.lane;
        let slab = |row: u32| panel + row / SLAB_ROWS * SLAB_BYTES;
        // SAFETY: inside of the panel, which is full; a slab lies at a multiple of 16.
        unsafe {
            Self {
                words: fragment.rows.map(|row| ld_shared_v4_b32(slab(row) + lane_offset(row % SLAB_ROWS, lane))),
                scales: fragment.rows.map(|row| {
                    let tile = slab(row) + SLAB_VALUE_BYTES + lane / 2 * SCALE_TILE_BYTES;
                    Scales::new(ld_shared_b16(scale_row(tile, row) + lane % 2 * LANE_SCALES))
                }),
            }
        }
    }
}
