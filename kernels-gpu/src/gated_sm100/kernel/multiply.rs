//! Multiplying: stages → accumulators. One thread; of a pair, one of the first block.

use cuda_std::tcgen05::{
    MatrixSwizzle, matrix_descriptor, mxf4nvf4_descriptor, tcgen05_commit, tcgen05_commit_multicast,
    tcgen05_cp_32x128b_warpx4, tcgen05_fence_after_thread_sync, tcgen05_mma_mxf4nvf4_block16,
};

use super::Sm100;
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    gated_sm100::abi::{Group, Instance, K_BLOCK_BYTES, MMA_K, TOKEN_SCALE_ROWS, Tile},
    ring::Ring,
};

/// The thread that multiplies, step by step.
pub(super) struct Multiplier<const INDEX: usize, const BLOCKS: u32> {
    block: Sm100<INDEX, BLOCKS>,
    stages: Ring<BLOCKS>,
    accumulators: Ring<BLOCKS>,
    /// The columns of the next step's scales.
    scale_set: u32,
    /// The stage that was multiplied with the scales in those columns, once all have been used.
    scales_of: Ring<BLOCKS>,
    all_used: bool,
}

impl<const INDEX: usize, const BLOCKS: u32> Multiplier<INDEX, BLOCKS> {
    const INSTANCE: Instance = Sm100::<INDEX, BLOCKS>::INSTANCE;
    const SCALE_SETS: u32 = Self::INSTANCE.scale_sets();

    #[inline(always)]
    pub const fn new(block: Sm100<INDEX, BLOCKS>) -> Self {
        let (stages, accumulators) = (block.stages(), block.accumulators());
        Self { block, stages, accumulators, scale_set: 0, scales_of: stages, all_used: false }
    }

    /// Waits for an accumulator, for a tile.
    #[inline(always)]
    pub unsafe fn begin(&mut self) {
        // SAFETY: the ring's barriers.
        unsafe { self.accumulators.wait_empty() };
        tcgen05_fence_after_thread_sync();
    }

    /// Multiplies the next stage, a step of the tile.
    #[inline(always)]
    pub unsafe fn multiply(&mut self, tile: &Tile, group: &Group, step: u32) {
        let Self { block, .. } = *self;
        let stage = block.shared + self.stages.index() * Sm100::<INDEX, BLOCKS>::STAGE_BYTES;
        let scales = block.tmem + Sm100::<INDEX, BLOCKS>::scales(self.scale_set);
        let mma_n = Self::INSTANCE.mma_n(tile.tokens);
        let descriptor = mxf4nvf4_descriptor(Self::INSTANCE.tile_rows(), mma_n);
        let token_column = tile.first_token % SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;
        // SAFETY: an accumulator is written while it is empty, a stage read while it is full, columns of scales written
        // when the MMAs that read them are complete; what was issued is complete when the barriers say so.
        unsafe {
            self.stages.wait_full();
            self.wait_for_scale_set();
            tcgen05_fence_after_thread_sync();
            for mma in 0..group.mmas(step) {
                Self::copy_scales(scales, stage, mma, tile.token_scale_tiles());
                let tokens = values_descriptor(stage + Sm100::<INDEX, BLOCKS>::TOKENS, mma);
                for matrix in 0..Sm100::<INDEX, BLOCKS>::MATRICES {
                    tcgen05_mma_mxf4nvf4_block16::<BLOCKS>(
                        block.tmem + Sm100::<INDEX, BLOCKS>::accumulator(self.accumulators.index(), matrix),
                        values_descriptor(stage + Sm100::<INDEX, BLOCKS>::weights(matrix), mma),
                        tokens,
                        descriptor,
                        scales + Sm100::<INDEX, BLOCKS>::weight_scale_column(matrix, mma),
                        scales + Sm100::<INDEX, BLOCKS>::token_scale_column(mma, 0) + token_column,
                        step > 0 || mma > 0,
                    );
                }
            }
            Self::commit(self.stages.empty());
        }
        self.stages.advance();
    }

    /// Hands the accumulator over when the tile is complete.
    #[inline(always)]
    pub unsafe fn end(&mut self) {
        // SAFETY: a barrier.
        unsafe { Self::commit(self.accumulators.full()) };
        self.accumulators.advance();
    }

    /// Waits until the MMAs that read the next step's columns of scales are complete, and goes on to the next columns.
    #[inline(always)]
    unsafe fn wait_for_scale_set(&mut self) {
        // With as many sets as stages, the stage would not be full if they were not.
        if Self::SCALE_SETS < Self::INSTANCE.stages && self.all_used {
            // SAFETY: a stage's barrier, whose MMAs have been issued and which has not been multiplied again.
            unsafe { self.scales_of.wait_emptied() };
            self.scales_of.advance();
        }
        self.scale_set += 1;
        if self.scale_set == Self::SCALE_SETS {
            self.scale_set = 0;
            self.all_used = true;
        }
    }

    /// Copies the scales of one MMA of each matrix to tensor memory.
    #[inline(always)]
    unsafe fn copy_scales(scales: u32, stage: u32, mma: u32, token_scale_tiles: u32) {
        // SAFETY: the caller's promise: a full stage, columns that nobody reads.
        unsafe {
            for matrix in 0..Sm100::<INDEX, BLOCKS>::MATRICES {
                let column = scales + Sm100::<INDEX, BLOCKS>::weight_scale_column(matrix, mma);
                let source = stage + Sm100::<INDEX, BLOCKS>::weight_scales(matrix);
                tcgen05_cp_32x128b_warpx4::<BLOCKS>(column, scales_descriptor(source, mma));
            }
            for tile_row in 0..token_scale_tiles {
                let column = scales + Sm100::<INDEX, BLOCKS>::token_scale_column(mma, tile_row);
                let source = stage + Sm100::<INDEX, BLOCKS>::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES;
                tcgen05_cp_32x128b_warpx4::<BLOCKS>(column, scales_descriptor(source, mma));
            }
        }
    }

    /// Arrives at a barrier, of both blocks of a pair, when all MMAs and copies so far are complete.
    #[inline(always)]
    unsafe fn commit(barrier: u32) {
        /// Ranks of a pair's blocks, as bits.
        const BOTH: u16 = 0b11;

        // SAFETY: both blocks have the same barriers, and end together.
        unsafe {
            if BLOCKS > 1 {
                tcgen05_commit_multicast::<BLOCKS>(barrier, BOTH);
            } else {
                tcgen05_commit::<BLOCKS>(barrier);
            }
        }
    }

    /// A pair's second block: tells the first, whose thread multiplies for both, of each stage of a tile that is full here.
    #[inline(always)]
    pub unsafe fn report(&mut self, group: &Group) {
        for _ in 0..group.steps() {
            // SAFETY: a stage's barriers.
            unsafe {
                self.stages.wait_full();
                Ring::<BLOCKS>::arrive(self.stages.full());
            }
            self.stages.advance();
        }
    }
}

/// The values of the `mma`-th MMA of a stage's rows at `address`: as TMA has swizzled them, 8 rows after 8.
#[inline(always)]
const fn values_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * (MMA_K / 2), 8 * K_BLOCK_BYTES, MatrixSwizzle::B128)
}

/// The scales of the `mma`-th MMA of a stage's 128 rows at `address`: 32 rows of 16 bytes.
#[inline(always)]
const fn scales_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * SCALE_TILE_BYTES, 8 * 16, MatrixSwizzle::None)
}
