//! Products: stages → sums in registers. Whole warps multiply, each with a strip of both slabs and a part of the
//! tokens.

use cuda_std::{
    fence::fence_proxy_async_shared,
    mma::{Sums, ldmatrix_x4_b16, mma_m16n8k64_mxf4nvf4},
    shared::{SharedAddress, ld_shared_b32, ld_shared_v4_b32},
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{
    sm120::Sm120,
    work::{Columns, Placed, Work},
};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS, scale_row},
    mma_sync::gated_sm120::abi::{
        K_BLOCK_BYTES, LANE_BYTES, N_STEP, SLAB_ROWS, SLABS, STEPS, STRIP_BYTES, STRIP_ROWS, STRIP_SCALE_BYTES, STRIPS,
        TOKEN_SCALE_ROWS, Tile, Weights, slab_bytes, slab_value_bytes,
    },
    ring::Ring,
    unroll::unroll,
};

/// Number of groups of eight tokens whose scales are in one register.
const QUAD_COLUMNS: usize = (TOKEN_SCALE_ROWS / N_STEP) as usize;

const _: () = assert!(QUAD_COLUMNS == 4 && SLABS == 2, "`multiply_k_block` has code for 4 columns and 2 slabs");

/// A lane's sums of a tile, by slab and group of eight tokens.
pub(super) type TileSums<const COLUMNS: usize> = [[Sums; COLUMNS]; SLABS as usize];

/// A lane of a multiplying warp, which goes from tile to tile.
pub(super) struct Multiplier<W: Work, const COLUMNS: usize> {
    pub(super) block: Sm120<W, COLUMNS>,
    stages: Ring,
    pub(super) lane: u32,
    /// The warp's strip of each slab.
    pub(super) strip: u32,
    /// The warp's first token in a tile.
    pub(super) first_token: u32,
}

impl<W: Work, const COLUMNS: usize> Multiplier<W, COLUMNS> {
    #[inline(always)]
    pub fn new(block: Sm120<W, COLUMNS>, warp: u32) -> Self {
        let first_token = warp / STRIPS * Sm120::<W, COLUMNS>::INSTANCE.warp_tokens();
        Self { block, stages: block.stages(), lane: lane_id(), strip: warp % STRIPS, first_token }
    }

    /// Whether row g of a product is the second of a lane's two rows of the strip, and row g + 8 the first.
    #[inline(always)]
    const fn swaps(lane: u32) -> bool {
        match Sm120::<W, COLUMNS>::INSTANCE.weights {
            Weights::Slabs => false,
            Weights::Rows => lane >= 16,
        }
    }

    /// Whether this lane's rows are swapped.
    #[inline(always)]
    pub(super) const fn swapped(&self) -> bool {
        Self::swaps(self.lane)
    }

    /// The terms of this lane's elements of C in a tile.
    ///
    /// # Safety
    /// The tile is one of the work's, and `group` is its group.
    #[inline(always)]
    pub unsafe fn terms(&self, tile: &Tile, group: &Placed) -> W::Terms {
        let first = tile.first_column + self.strip * STRIP_ROWS + self.lane / 4 * 2;
        let gated = Sm120::<W, COLUMNS>::INSTANCE.matrices == 2;
        let columns: Columns = core::array::from_fn(|slab| {
            let first = first + if gated { 0 } else { slab as u32 * SLAB_ROWS };
            core::array::from_fn(|row| first + (row as u32 ^ u32::from(self.swapped())))
        });
        // SAFETY: the caller guarantees that the tile is one of the work's and that `group` is its group.
        unsafe { self.block.work.terms::<COLUMNS>(tile, group, columns, self.first_token + self.lane % 4 * 2) }
    }

    /// The warp's sums of a tile.
    ///
    /// # Safety
    /// The CTA's barriers have been initialized. Whole warps make this call, with all tiles of the CTA in the order in
    /// which they are loaded.
    #[inline(always)]
    pub unsafe fn multiply(&mut self, tile: &Tile, group: &Placed) -> TileSums<COLUMNS> {
        let mut sums = [[[0.0; 4]; COLUMNS]; SLABS as usize];
        for k_block in 0..group.k_blocks() {
            // SAFETY: the producer is at most one round ahead, because it waits for this warp. A stage is read while it
            // is full. The fence orders later copies after the loads of this lane; the arrival comes after the loads of
            // all lanes.
            unsafe {
                self.stages.wait_full();
                self.multiply_k_block(tile, group.steps(k_block), &mut sums);
                fence_proxy_async_shared();
                sync_warp(ALL_LANES);
                if self.lane == 0 {
                    self.stages.arrive(self.stages.empty(), 0);
                }
            }
            self.stages.advance();
        }
        sums
    }

    /// Adds the products of a k-block of `steps` steps, two steps at a time.
    ///
    /// # Safety
    /// The current stage is full. The whole warp makes this call together.
    #[inline(always)]
    unsafe fn multiply_k_block(&self, tile: &Tile, steps: u32, sums: &mut TileSums<COLUMNS>) {
        let stage = self.stages.index();
        let token_scales = self.token_scales(stage, tile);
        let present = tile.tokens.saturating_sub(self.first_token);
        for first_step in (0..STEPS).step_by(2) {
            if first_step >= steps {
                break;
            }
            let both = first_step + 1 < steps;
            // SAFETY: the loads read the current stage, which is full. For a step that the k-block lacks, only tokens
            // are loaded, which are zeros there, and nothing is multiplied.
            unsafe {
                let mut a = [[[0; 4]; 2]; SLABS as usize];
                let mut a_scales = [0; SLABS as usize];
                unroll!(SLAB in 0 1, {
                    a[SLAB][0] = self.weights(stage, SLAB as u32, first_step);
                    if both {
                        a[SLAB][1] = self.weights(stage, SLAB as u32, first_step + 1);
                    }
                    a_scales[SLAB] = ld_shared_b32(self.weight_scales(stage, tile, SLAB as u32, first_step, steps));
                });
                let step_bytes = Sm120::<W, COLUMNS>::INSTANCE.step_scale_bytes();
                unroll!(QUAD in 0 1, {
                    if QUAD * QUAD_COLUMNS < COLUMNS {
                    // Tokens that are 32 apart lie side by side in a tile of scales.
                    let scales = token_scales + QUAD as u32 * 4 + first_step * step_bytes;
                    let first_scales = ld_shared_b32(scales);
                    let second_scales = if both { ld_shared_b32(scales + step_bytes) } else { 0 };
                    unroll!(IN_QUAD in 0 1 2 3, {
                        const COLUMN: usize = QUAD * QUAD_COLUMNS + IN_QUAD;
                        const THREAD: u32 = IN_QUAD as u32;
                        if COLUMN < COLUMNS && COLUMN as u32 * N_STEP < present {
                            let b = ldmatrix_x4_b16(self.tokens(stage, COLUMN as u32, first_step));
                            unroll!(SLAB in 0 1, {
                                let (d, scales) = (&mut sums[SLAB][COLUMN % COLUMNS], a_scales[SLAB]);
                                mma_m16n8k64_mxf4nvf4::<0, THREAD>(d, a[SLAB][0], [b[0], b[1]], scales, first_scales);
                            });
                            if both {
                                unroll!(SLAB in 0 1, {
                                    let (d, scales) = (&mut sums[SLAB][COLUMN % COLUMNS], a_scales[SLAB]);
                                    mma_m16n8k64_mxf4nvf4::<1, THREAD>(d, a[SLAB][1], [b[2], b[3]], scales, second_scales);
                                });
                            }
                        }
                    });
                    }
                });
            }
        }
    }

    /// This lane's four registers of A for the warp's strip of a slab.
    ///
    /// # Safety
    /// The stage is full and has this step. The whole warp makes this call together.
    #[inline(always)]
    unsafe fn weights(&self, stage: u32, slab: u32, step: u32) -> [u32; 4] {
        let weights = self.block.weights_of(stage);
        // SAFETY: the stage is full and has this step, and the whole warp executes the loads together.
        unsafe {
            match Sm120::<W, COLUMNS>::INSTANCE.weights {
                Weights::Slabs => {
                    let strip = slab * slab_bytes(STEPS) + (step * STRIPS + self.strip) * STRIP_BYTES;
                    ld_shared_v4_b32(weights + strip + self.lane * LANE_BYTES)
                }
                Weights::Rows => {
                    // Four matrices: rows g, rows g + 8, and both again 16 bytes further along K. Lane 8i + g has the
                    // address of row g of the i-th matrix.
                    let row = Self::row_of_strip(self.lane % 8, self.lane / 8 % 2);
                    let chunk = step * 2 + self.lane / 16;
                    let of_row = slab * slab_value_bytes(STEPS) + (self.strip * STRIP_ROWS + row) * K_BLOCK_BYTES;
                    // The 128-byte swizzle, as for tokens.
                    ldmatrix_x4_b16(weights + of_row + (chunk ^ (row % 8)) * 16)
                }
            }
        }
    }

    /// Address of this lane's scales of A for a pair of steps; the k-block has `steps` steps. Thread selector 0 of A
    /// takes the scales of the first step, selector 1 the scales of the second.
    #[inline(always)]
    fn weight_scales(&self, stage: u32, tile: &Tile, slab: u32, first_step: u32, steps: u32) -> SharedAddress {
        let weights = self.block.weights_of(stage);
        match Sm120::<W, COLUMNS>::INSTANCE.weights {
            Weights::Slabs => {
                let strip = (first_step / 2 * STRIPS + self.strip) * STRIP_SCALE_BYTES;
                weights + slab * slab_bytes(STEPS) + slab_value_bytes(steps) + strip + self.lane * 4
            }
            Weights::Rows => {
                // If there is no second step, no product reads its scales.
                let step = (first_step + self.lane % 4 / 2).min(steps - 1);
                let row = self.strip * STRIP_ROWS + Self::row_of_strip(self.lane / 4, self.lane % 2);
                let (matrix, first_row) = if Sm120::<W, COLUMNS>::INSTANCE.matrices == 2 {
                    (slab, tile.first_column % SCALE_TILE_ROWS)
                } else {
                    (0, slab * SLAB_ROWS)
                };
                let scales = weights + Sm120::<W, COLUMNS>::weight_scales(matrix) + step * SCALE_TILE_BYTES;
                scale_row(scales, first_row + row)
            }
        }
    }

    /// The row of a strip that is row g of a product (`half` 0) or row g + 8 (`half` 1), for weights in rows.
    #[inline(always)]
    const fn row_of_strip(g: u32, half: u32) -> u32 {
        2 * g + (half ^ (g / 4))
    }

    /// Address of this lane's values of eight tokens for two steps: four matrices, 16 bytes of a token each, swizzled.
    #[inline(always)]
    fn tokens(&self, stage: u32, column: u32, first_step: u32) -> SharedAddress {
        let (token, chunk) = (self.first_token + column * N_STEP + self.lane % 8, first_step * 2 + self.lane / 8);
        // The 128-byte swizzle of eight rows (PTX ISA, "Tensor swizzle modes").
        self.block.tokens_of(stage) + token * K_BLOCK_BYTES + (chunk ^ (self.lane % 8)) * 16
    }

    /// Address of this lane's scales of tokens for the first step: the scales of column `lane / 4` of the products with
    /// thread selector `lane % 4` of B. If there are fewer products, it is another lane's address.
    #[inline(always)]
    fn token_scales(&self, stage: u32, tile: &Tile) -> SharedAddress {
        let selector = self.lane % 4 % if COLUMNS < QUAD_COLUMNS { COLUMNS as u32 } else { QUAD_COLUMNS as u32 };
        let word = (tile.first_token + self.first_token) % SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;
        self.block.token_scales_of(stage) + (selector * N_STEP + self.lane / 4) * 16 + word * 4
    }
}
