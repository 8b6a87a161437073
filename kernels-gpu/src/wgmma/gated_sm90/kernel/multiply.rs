//! Warpgroups that multiply stages of weights by buffers of tokens and write C. The mainloop is in
//! [`Consumer`](crate::wgmma::Consumer), the epilogue in [`decoding`](crate::decoding). This file defines the layout of
//! weights in a stage.

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
    decoding::{
        Alpha, Fragment, Shape, Sums, Target, Written,
        decode::{F16_UNSCALE, Scales, decode_weights},
    },
    epilogue::Activation,
    format::{OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_BYTES, scale_row},
    ring::Ring,
    wgmma::{
        Consumer, Kind,
        gated_sm90::abi::{Group, SLAB_BYTES, SLAB_ROWS, lane_offset},
    },
};

impl<const INDEX: usize> Sm90<INDEX> {
    /// Multiplies and writes the CTA's tiles. Runs in one warpgroup, the `consumer`-th that multiplies.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warpgroup calls this
    /// together. Every other warpgroup that multiplies calls it with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply<const P: usize>(output: u32, mut tiles: Tiles, shared: SharedAddress, consumer: u32) {
        let (stages, buffers) = (Self::stages(shared), Self::buffers(shared));
        let kind: Slabs<INDEX> = Slabs { half_of_slab: 0 };
        let mut consumer: Consumer<_, P> =
            Consumer::new(kind, shared, consumer, stages, buffers, Self::turn_barriers(shared));
        // SAFETY: the whole warpgroup is here and follows the same path. The barriers are initialized, and only this
        // CTA has this tile. `read` is called before `advance` returns `false`.
        unsafe {
            loop {
                let tile = tiles.read();
                consumer.kind.half_of_slab = tile.half_of_slab();
                let sums: Sums<P> = consumer.sum_tile(tile.tokens, tile.group.k_blocks());
                let tile = tiles.read();
                let Group { c, alpha, n, .. } = tile.group;
                let target: Target<Slabs<INDEX>> = Target {
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
                let rows = Slabs::<INDEX>::rows_of(&consumer.fragment);
                if output == OUTPUT_BF16 {
                    target.write(OUTPUT_BF16, &rows, sums);
                } else {
                    target.write(OUTPUT_F16, &rows, sums);
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }
}

/// A thread's words of two rows of a stage's panel, and their scales.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [Scales; 2],
}

/// Layout of a stage of slabs.
struct Slabs<const INDEX: usize> {
    /// Index of the half of its slabs' rows that a narrow tile uses.
    half_of_slab: u32,
}

impl<const INDEX: usize> Slabs<INDEX> {
    /// Returns the fragment with the thread's rows in a tile of this instance.
    #[inline(always)]
    const fn rows_of(fragment: &Fragment) -> Fragment {
        if Sm90::<INDEX>::INSTANCE.narrow { fragment.narrow() } else { *fragment }
    }
}

impl<const INDEX: usize, const P: usize> Written<P> for Slabs<INDEX> {
    const SHAPE: Shape = Sm90::<INDEX>::INSTANCE.shape();
    // Both factors of a product are decoded.
    const UNSCALE: f32 = F16_UNSCALE * F16_UNSCALE;
    const ANY_ACTIVATION: bool = false;
}

impl<const INDEX: usize, const P: usize> Kind<P> for Slabs<INDEX> {
    // Threads that decode tokens to the buffers execute the fence themselves.
    const COPIED_BY_THREADS: bool = false;
    type Number = wgmma::F16;
    type Part = Rows;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Sm90::<INDEX>::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Sm90::<INDEX>::buffer(shared, buffers)
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, fragment: &Fragment, _k_block: u32) -> [Rows; P] {
        let panels = [0, 1].map(|panel| stage + Sm90::<INDEX>::panel(panel));
        let rows = Self::rows_of(fragment).rows;
        let lane = fragment.lane;
        // SAFETY: the addresses are the panels of the stage, and the caller guarantees that the stage is full.
        unsafe {
            core::array::from_fn(|part| {
                // In a narrow tile, a thread has one row of each panel.
                let of_panels = if P == 1 { panels } else { [panels[part]; 2] };
                Rows::load::<INDEX>(of_panels, rows, lane, self.half_of_slab)
            })
        }
    }

    #[inline(always)]
    fn decode(part: &Rows, word: usize) -> [[u32; 4]; 2] {
        let scale = word / (LANE_WORDS / LANE_SCALES) as usize;
        let [first, second] = [0, 1].map(|row| decode_weights(part.words[row][word], part.scales[row].twice(scale)));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

impl Rows {
    /// Loads a lane's words of two rows, each from the panel with the same index.
    ///
    /// # Safety
    /// The panels' stage is full.
    #[inline(always)]
    unsafe fn load<const INDEX: usize>(
        panels: [SharedAddress; 2],
        rows: [u32; 2],
        lane: u32,
        half_of_slab: u32,
    ) -> Self {
        let instance = Sm90::<INDEX>::INSTANCE;
        let slab = |index: usize| panels[index] + rows[index] / SLAB_ROWS * SLAB_BYTES;
        // Narrow panels have all scales of their slabs.
        let first_row = if instance.narrow { half_of_slab * (SLAB_ROWS / 2) } else { 0 };
        // SAFETY: the addresses are inside the panels, and the caller guarantees that their stage is full; a slab lies
        // at a multiple of 16.
        unsafe {
            Self {
                words: [0, 1].map(|row| ld_shared_v4_b32(slab(row) + lane_offset(rows[row] % SLAB_ROWS, lane))),
                scales: [0, 1].map(|row| {
                    let tile = slab(row) + instance.value_bytes() + lane / 2 * SCALE_TILE_BYTES;
                    Scales::new(ld_shared_b16(scale_row(tile, first_row + rows[row]) + lane % 2 * LANE_SCALES))
                }),
            }
        }
    }
}
