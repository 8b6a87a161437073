//! Multiplying: stages → accumulators. One thread; of a pair, one of the first block.

use cuda_std::tcgen05::{
    MatrixSwizzle, matrix_descriptor, mxf4nvf4_descriptor, tcgen05_commit, tcgen05_commit_multicast,
    tcgen05_cp_32x128b_warpx4, tcgen05_fence_after_thread_sync, tcgen05_mma_mxf4nvf4_block16,
};

use super::{Ring, Sm100};
use crate::abi::{
    SCALE_TILE_ROWS,
    sm100::{Group, Instance, MMA_K, SCALE_TILE_BYTES, STEP_BYTES, TOKEN_SCALE_ROWS, Tile},
};

impl<const INDEX: usize, const BLOCKS: u32> Sm100<INDEX, BLOCKS> {
    /// Multiplies the next stage, a step of a tile, into the accumulator at hand.
    #[inline(always)]
    pub(super) unsafe fn multiply(
        self,
        stages: &mut Ring<BLOCKS>,
        accumulators: Ring<BLOCKS>,
        tile: &Tile,
        group: &Group,
        step: u32,
    ) {
        let stage = self.shared + stages.index * Self::STAGE_BYTES;
        let issued_tokens = Self::INSTANCE.issued_tokens(tile.tokens);
        let descriptor = mxf4nvf4_descriptor(Self::INSTANCE.tile_rows(), issued_tokens);
        let token_column = tile.first_token % SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;
        // SAFETY: an accumulator is written while it is empty, a stage read while it is full; what was issued is complete
        // when their barriers say so. Scales in tensor memory are overwritten behind the MMAs that read them ("Scales").
        unsafe {
            stages.wait_full();
            tcgen05_fence_after_thread_sync();
            for mma in 0..group.mmas(step) {
                self.copy_scales(stage, mma, tile.token_scale_tiles());
                let tokens = values_descriptor(stage + Self::TOKENS, mma);
                for matrix in 0..Self::MATRICES {
                    tcgen05_mma_mxf4nvf4_block16::<BLOCKS>(
                        self.tmem + Self::accumulator(accumulators.index, matrix),
                        values_descriptor(stage + Self::weights(matrix), mma),
                        tokens,
                        descriptor,
                        self.tmem + Self::weight_scale_column(matrix, mma),
                        self.tmem + Self::token_scale_column(mma, 0) + token_column,
                        step > 0 || mma > 0,
                    );
                }
            }
            Self::commit(stages.empty());
        }
        stages.advance();
    }

    /// Copies the scales of one MMA of each matrix to tensor memory.
    #[inline(always)]
    unsafe fn copy_scales(self, stage: u32, mma: u32, token_scale_tiles: u32) {
        // SAFETY: the caller's promise: a full stage, columns of their own.
        unsafe {
            for matrix in 0..Self::MATRICES {
                let source = scales_descriptor(stage + Self::weight_scales(matrix), mma);
                tcgen05_cp_32x128b_warpx4::<BLOCKS>(self.tmem + Self::weight_scale_column(matrix, mma), source);
            }
            for tile_row in 0..token_scale_tiles {
                let source = scales_descriptor(stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES, mma);
                tcgen05_cp_32x128b_warpx4::<BLOCKS>(self.tmem + Self::token_scale_column(mma, tile_row), source);
            }
        }
    }

    /// Arrives at a barrier, of both blocks of a pair, when all MMAs and copies so far are complete.
    #[inline(always)]
    pub(super) unsafe fn commit(barrier: u32) {
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
    pub(super) unsafe fn report(self, stages: &mut Ring<BLOCKS>, group: &Group) {
        for _ in 0..group.steps() {
            // SAFETY: a stage's barriers.
            unsafe {
                stages.wait_full();
                Ring::<BLOCKS>::arrive(stages.full());
            }
            stages.advance();
        }
    }
}

/// The values of the `mma`-th MMA of a stage's rows at `address`: as TMA has swizzled them, 8 rows after 8.
#[inline(always)]
const fn values_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * (MMA_K / 2), 8 * STEP_BYTES, MatrixSwizzle::B128)
}

/// The scales of the `mma`-th MMA of a stage's 128 rows at `address`: 32 rows of 16 bytes.
#[inline(always)]
const fn scales_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * SCALE_TILE_BYTES, 8 * 16, MatrixSwizzle::None)
}
