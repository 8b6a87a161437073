//! Multiplies stages and adds to accumulators. Runs in one thread; for a pair, in one thread of the first CTA.

use cuda_std::{
    mbarrier::Mbarrier,
    shared::SharedAddress,
    tcgen05::{
        InstructionDescriptor, MatrixDescriptor, MatrixSwizzle, TmemAddress, tcgen05_commit, tcgen05_commit_multicast,
        tcgen05_cp_32x128b_warpx4, tcgen05_fence_after_thread_sync, tcgen05_mma_mxf4nvf4_block16,
    },
};

use super::{
    sm100::{BOTH, Sm100},
    work::{Placed, Work},
};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    ring::Ring,
    tcgen05::gated_sm100::abi::{Instance, K_BLOCK_BYTES, MMA_K, MMAS_PER_K_BLOCK, TOKEN_SCALE_ROWS, Tile},
};

/// State of the thread that multiplies, k-block by k-block.
pub(super) struct Multiplier<W: Work, const BLOCKS: u32> {
    block: Sm100<W, BLOCKS>,
    stages: Ring<BLOCKS>,
    accumulators: Ring<BLOCKS>,
    /// Set of columns for the next k-block's scales.
    scale_set: u32,
    /// Stage that was last multiplied with the scales in this set. Undefined until `all_used`.
    scales_of: Ring<BLOCKS>,
    /// Whether every set has been used once.
    all_used: bool,
}

/// Operands that all MMAs of a k-block share.
struct Operands {
    /// Values and scales in the k-block's stage.
    values: MatrixDescriptor,
    scale_source: MatrixDescriptor,
    /// Set of columns for the k-block's scales.
    scales: TmemAddress,
    accumulator: TmemAddress,
    descriptor: InstructionDescriptor,
    /// Column of the tile's first token within its scale tile, and the number of scale tiles.
    token_column: u32,
    token_scale_tiles: u32,
}

impl<W: Work, const BLOCKS: u32> Multiplier<W, BLOCKS> {
    const INSTANCE: Instance = Sm100::<W, BLOCKS>::INSTANCE;
    const SCALE_SETS: u32 = Self::INSTANCE.scale_sets();

    #[inline(always)]
    pub fn new(block: Sm100<W, BLOCKS>) -> Self {
        let (stages, accumulators) = (block.stages(), block.accumulators());
        Self { block, stages, accumulators, scale_set: 0, scales_of: stages, all_used: false }
    }

    /// Waits for an accumulator for the next tile.
    ///
    /// # Safety
    /// The CTA's barriers are initialized. One thread has a multiplier, and calls [`Self::begin`], [`Self::multiply`]
    /// and [`Self::end`] for each tile.
    #[inline(always)]
    pub unsafe fn begin(&mut self) {
        // SAFETY: the barriers are initialized. The epilogue is at most one round behind, since this thread waits for
        // it in every round.
        unsafe { self.accumulators.wait_empty() };
        tcgen05_fence_after_thread_sync();
    }

    /// Multiplies the next stage, which holds k-block `k_block` of the tile.
    ///
    /// # Safety
    /// The requirements of [`Self::begin`]. `group` is the tile's group. The calls have the k-blocks in the order in
    /// which they are loaded.
    #[inline(always)]
    pub unsafe fn multiply(&mut self, tile: &Tile, group: &Placed, k_block: u32) {
        let Self { block, .. } = *self;
        let stage = block.shared + self.stages.index() * Sm100::<W, BLOCKS>::STAGE_BYTES;
        let operands = Operands {
            values: values_descriptor(stage),
            scale_source: scales_descriptor(stage),
            scales: block.tmem.column(Sm100::<W, BLOCKS>::scales(self.scale_set)),
            accumulator: block.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), 0)),
            descriptor: InstructionDescriptor::mxf4nvf4(Self::INSTANCE.mma_rows(), Self::INSTANCE.mma_n(tile.tokens)),
            token_column: tile.first_token % SCALE_TILE_ROWS / TOKEN_SCALE_ROWS,
            token_scale_tiles: tile.token_scale_tiles(),
        };
        let adds = k_block > block.k_blocks(group).start;
        // SAFETY: the accumulator is written while it is empty, and the stage is read while it is full. Columns of
        // scales are written after the MMAs that read them are complete. Barriers signal the completion of the copies
        // and MMAs that this thread issues.
        unsafe {
            self.stages.wait_full();
            self.wait_for_scale_set();
            tcgen05_fence_after_thread_sync();
            let behind = Self::INSTANCE.splits > 1 && k_block == group.k_blocks();
            let mmas = if behind { group.mmas(k_block - 1) } else { group.mmas(k_block) };
            if mmas == MMAS_PER_K_BLOCK {
                // Written out so that all arguments are constants. The compiler does not unroll a loop if tiles may
                // have two tiles of scales, and computing descriptors in a loop takes this thread longer than an MMA
                // takes the tensor core.
                const { assert!(MMAS_PER_K_BLOCK == 4) };
                Self::multiply_once(&operands, 0, adds);
                Self::multiply_once(&operands, 1, true);
                Self::multiply_once(&operands, 2, true);
                Self::multiply_once(&operands, 3, true);
            } else {
                for mma in 0..mmas {
                    Self::multiply_once(&operands, mma, adds || mma > 0);
                }
            }
            self.commit(self.stages.empty());
        }
        self.stages.advance();
    }

    /// Copies the scales of one MMA per matrix, and issues these MMAs.
    ///
    /// # Safety
    /// The requirements of [`Self::multiply`], which calls this for each MMA of the stage. The stage is full, and the
    /// set of columns is free.
    #[inline(always)]
    unsafe fn multiply_once(operands: &Operands, mma: u32, adds: bool) {
        let &Operands { values, scale_source, scales, accumulator, descriptor, token_column, token_scale_tiles } =
            operands;
        let values_at = |matrix: u32| values.at(matrix + mma * MMA_K_BYTES);
        let token_scales = scales.column(Sm100::<W, BLOCKS>::token_scale_column(mma, 0)).column(token_column);
        // SAFETY: the stage is full, so values and scales are complete; no MMA still reads this set of columns; one
        // thread calls this.
        unsafe {
            Self::copy_scales(scales, scale_source, mma, token_scale_tiles);
            for matrix in 0..Sm100::<W, BLOCKS>::MATRICES {
                tcgen05_mma_mxf4nvf4_block16::<BLOCKS>(
                    accumulator.column(Sm100::<W, BLOCKS>::accumulator(0, matrix)),
                    values_at(Sm100::<W, BLOCKS>::weights(matrix)),
                    values_at(Sm100::<W, BLOCKS>::TOKENS),
                    descriptor,
                    scales.column(Sm100::<W, BLOCKS>::weight_scale_column(matrix, mma)),
                    token_scales,
                    adds,
                );
            }
        }
    }

    /// Passes the accumulator to the epilogue as soon as the tile's MMAs are complete.
    ///
    /// # Safety
    /// The requirements of [`Self::begin`].
    #[inline(always)]
    pub unsafe fn end(&mut self) {
        // SAFETY: this is the full barrier of an accumulator that `begin` waited for, and its phase still expects this
        // arrival.
        unsafe { self.commit(self.accumulators.full()) };
        self.accumulators.advance();
    }

    /// Waits until the MMAs that read the next set of scale columns are complete, and advances to the following set.
    ///
    /// # Safety
    /// The requirements of [`Self::multiply`], which calls this for each k-block.
    #[inline(always)]
    unsafe fn wait_for_scale_set(&mut self) {
        // With as many sets as stages, no wait is needed: the stage is full, so the MMAs that read it last, and this
        // set with it, are complete.
        if Self::SCALE_SETS < Self::INSTANCE.stages && !Self::INSTANCE.one_set && self.all_used {
            // SAFETY: the MMAs of this stage were issued in this round, and the stage has not been multiplied again
            // since.
            unsafe { self.scales_of.wait_emptied() };
            self.scales_of.advance();
        }
        self.scale_set += 1;
        if self.scale_set == Self::SCALE_SETS {
            self.scale_set = 0;
            self.all_used = true;
        }
    }

    /// Copies the scales of one MMA per matrix to tensor memory.
    ///
    /// # Safety
    /// The stage of the descriptor is full. `scales` is a set of columns that no MMA reads any more.
    #[inline(always)]
    unsafe fn copy_scales(scales: TmemAddress, stage: MatrixDescriptor, mma: u32, token_scale_tiles: u32) {
        let source = |scales: u32| stage.at(scales + mma * SCALE_TILE_BYTES);
        // SAFETY: the stage is full, so its scales are complete; no MMA still reads these columns; one thread calls
        // this.
        unsafe {
            for matrix in 0..Sm100::<W, BLOCKS>::MATRICES {
                let column = scales.column(Sm100::<W, BLOCKS>::weight_scale_column(matrix, mma));
                let weight_scales = Sm100::<W, BLOCKS>::weight_scales(matrix);
                tcgen05_cp_32x128b_warpx4::<BLOCKS>(column, source(weight_scales));
            }
            for tile_row in 0..Self::INSTANCE.token_scale_tiles() {
                // Every tile has at least one.
                if tile_row == 0 || tile_row < token_scale_tiles {
                    let column = scales.column(Sm100::<W, BLOCKS>::token_scale_column(mma, tile_row));
                    let token_scales = Sm100::<W, BLOCKS>::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES;
                    tcgen05_cp_32x128b_warpx4::<BLOCKS>(column, source(token_scales));
                }
            }
        }
    }

    /// Arrives at a barrier, in both CTAs of a pair, when all previous MMAs and copies of this thread are complete.
    ///
    /// # Safety
    /// `barrier` is an initialized barrier of the CTA, and its phase still expects an arrival.
    #[inline(always)]
    unsafe fn commit(&self, barrier: Mbarrier) {
        // SAFETY: `barrier` is initialized in both CTAs of a pair, which exit together, and its phase still
        // expects this arrival.
        unsafe {
            if BLOCKS > 1 {
                tcgen05_commit_multicast::<BLOCKS>(barrier, BOTH << self.block.leader());
            } else {
                tcgen05_commit::<BLOCKS>(barrier);
            }
        }
    }

    /// In a pair's second CTA: reports each stage of a tile, as it becomes full here, to the first CTA, whose thread
    /// multiplies for both.
    ///
    /// # Safety
    /// The CTA's barriers are initialized. One thread calls this, for each tile.
    #[inline(always)]
    pub unsafe fn report(&mut self, group: &Placed) {
        for _ in self.block.k_blocks(group) {
            // SAFETY: the producer is at most one round ahead, since it waits for the MMAs. The first CTA's barrier
            // expects this arrival in addition to its own thread's.
            unsafe {
                self.stages.wait_full();
                self.stages.arrive(self.stages.full(), self.block.leader());
            }
            self.stages.advance();
        }
    }
}

/// Rows of a core matrix. Matrices in shared memory consist of core matrices (PTX ISA, "Canonical Layouts"), and a
/// descriptor has the number of bytes from one to the next.
const CORE_MATRIX_ROWS: u32 = 8;

/// Bytes of a row of values per MMA.
const MMA_K_BYTES: u32 = MMA_K / 2;

/// Descriptor of the values in a stage, as swizzled by TMA.
#[inline(always)]
fn values_descriptor(stage: SharedAddress) -> MatrixDescriptor {
    MatrixDescriptor::new(stage, CORE_MATRIX_ROWS * K_BLOCK_BYTES, MatrixSwizzle::B128)
}

/// Descriptor of the scale tiles in a stage: each one has 32 rows of 16 bytes.
#[inline(always)]
fn scales_descriptor(stage: SharedAddress) -> MatrixDescriptor {
    MatrixDescriptor::new(stage, CORE_MATRIX_ROWS * 16, MatrixSwizzle::None)
}
