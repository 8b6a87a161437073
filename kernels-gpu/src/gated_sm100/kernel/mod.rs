//! How the Blackwell kernel works.
//!
//! Weights lie on the tensor core's M, of 128 rows, and tokens on its N, which each tile chooses for itself. One warp
//! loads by bulk copies, one issues MMAs, four turn accumulators into C; a block computes tiles until none are left,
//! and each role is ahead of the next by as much as the buffers between them hold:
//!
//! ```text
//! global ─ load warp ─▶ stages ─ MMA warp ─▶ accumulators ─ epilogue warps ─▶ C
//! ```
//!
//! A pair of blocks ([`Instance::blocks`]) computes 256 rows: each has half of the rows, half of the tokens and a
//! pipeline of its own, and a thread of the first multiplies for both.
//!
//! # Scales
//!
//! A tile of the scale layout is a copy (`tcgen05.cp`) and four columns of tensor memory, one for 32 rows. A copy and
//! the MMAs behind it execute in order; MMAs and a copy behind them need not (PTX ISA, "Pipelined tcgen05
//! Instructions"), although CUTLASS counts on it (`sm100_blockscaled_mma_warpspecialized.hpp`: one place for the scales
//! of all stages). So steps have columns of their own for their scales, [`Instance::scale_sets`] of them in turn. Where
//! there are as many as stages, a stage that is full again says that the MMAs that read its scales are complete; where
//! fewer fit, who multiplies waits for those MMAs, which leaves it the ones issued since.
//!
//! A tile of tokens that starts inside of a scale tile names the column that its 32 tokens begin at. The manual asks no
//! more of that address than whole columns ("4-byte aligned sub-column", "Layout of the Scale Factor B Matrix for
//! scale_vec::4X"); CUTLASS starts at every second column for N of 64 and 192. Nobody is known to start at an odd one:
//! the host plans that only where it is told to.

mod load;
mod multiply;
mod store;

use cuda_std::{
    cluster::{cluster_rank, sync_cluster},
    fence::fence_mbarrier_init,
    kernel,
    mbarrier::MBARRIER_BYTES,
    shared::{dynamic_shared_address, ld_shared_b32},
    tcgen05::{
        TMEM_LANES, tcgen05_alloc, tcgen05_dealloc, tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync,
        tcgen05_relinquish_alloc_permit, tmem_allocation,
    },
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, sync_warp},
};

use self::{multiply::Multiplier, store::Epilogue};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    gated_sm100::abi::{
        EPILOGUE_WARPS, Group, INSTANCES, Index, Instance, K_ALIGNMENT, K_BLOCK, Launch, MMA_K, MMAS_PER_K_BLOCK,
        Roles, TILE_ROWS, TOKEN_SCALE_ROWS, Tile, instances,
    },
    ring::{Ring, ring_bytes},
};

const _: () = {
    assert!(TILE_ROWS == TMEM_LANES && TILE_ROWS == EPILOGUE_WARPS * WARP_SIZE, "a row of C a lane, a lane a thread");
    assert!(TILE_ROWS == SCALE_TILE_ROWS, "a weight tile's scales are whole tiles");
    assert!(K_ALIGNMENT / 2 == 16, "what a tensor map asks of a row, in bytes");
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(),
            min_blocks = 1,
            cluster = INSTANCES[Index::$entry as usize].cluster()
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            // SAFETY: the contract is this function's too.
            unsafe { Sm100::<INDEX, { INSTANCES[INDEX].blocks }>::run(launch) }
        }
    )*};
}
instances!(entries);

/// A block at work as one of [`INSTANCES`]: one of BLOCKS for each tile.
#[derive(Clone, Copy)]
struct Sm100<const INDEX: usize, const BLOCKS: u32> {
    launch: Launch,
    /// Its shared memory.
    shared: u32,
    /// Its tensor memory.
    tmem: u32,
    /// Which of the blocks of a tile it is, from 0.
    rank: u32,
}

/// Columns of tensor memory of a tile of the scale layout.
const SCALE_COLUMNS: u32 = SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;

impl<const INDEX: usize, const BLOCKS: u32> Sm100<INDEX, BLOCKS> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MATRICES: usize = Self::INSTANCE.matrices as usize;
    const STAGES: u32 = Self::INSTANCE.stages;
    const CHECK: () = {
        assert!(Self::INSTANCE.blocks == BLOCKS);
        assert!(Self::TMEM_ADDRESS + MBARRIER_BYTES == Self::INSTANCE.shared_bytes());
    };

    /// The warp that loads. Where roles are specialised, those before it run the epilogue.
    const LOAD_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialised => EPILOGUE_WARPS,
        Roles::Serial => 0,
    };

    /// The warp that issues MMAs, and owns the tensor memory.
    const MMA_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialised => EPILOGUE_WARPS + 1,
        Roles::Serial => 0,
    };

    // Shared memory: stages, the epilogue warps' buffers, barriers, the address of the tensor memory. Offsets from its
    // start; inside of a stage, from the stage's.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS: u32 = Self::STAGES * Self::STAGE_BYTES;
    const STAGE_BARRIERS: u32 = Self::BUFFERS + EPILOGUE_WARPS * 2 * Self::INSTANCE.store_bytes();
    const ACCUMULATOR_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::STAGES);
    const TMEM_ADDRESS: u32 = Self::ACCUMULATOR_BARRIERS + ring_bytes(Self::INSTANCE.accumulators());
    const fn weights(matrix: usize) -> u32 {
        matrix as u32 * Instance::WEIGHT_BYTES
    }
    const TOKENS: u32 = Self::weights(Self::MATRICES);
    const fn weight_scales(matrix: usize) -> u32 {
        Self::TOKENS + Self::INSTANCE.token_bytes() + matrix as u32 * Instance::SCALE_BYTES
    }
    const TOKEN_SCALES: u32 = Self::weight_scales(Self::MATRICES);

    // Tensor memory: accumulators, each of all matrices, then sets of scales. Columns from its start; of scales, from the
    // set's.
    const fn accumulator(index: u32, matrix: usize) -> u32 {
        index * Self::INSTANCE.accumulator_columns() + matrix as u32 * Self::INSTANCE.tile_tokens
    }
    const fn scales(set: u32) -> u32 {
        Self::accumulator(Self::INSTANCE.accumulators(), 0) + set * Self::INSTANCE.scale_columns()
    }
    const fn weight_scale_column(matrix: usize, mma: u32) -> u32 {
        (matrix as u32 * MMAS_PER_K_BLOCK + mma) * SCALE_COLUMNS
    }
    /// Rows of scale tiles lie side by side, so that columns of 32 tokens follow each other.
    const fn token_scale_column(mma: u32, tile_row: u32) -> u32 {
        Self::weight_scale_column(Self::MATRICES, 0)
            + (mma * Self::INSTANCE.token_scale_tiles() + tile_row) * SCALE_COLUMNS
    }
    const TMEM_COLUMNS: u32 = tmem_allocation(Self::INSTANCE.tmem_columns());

    /// Stages: full when the load warp and its copies have arrived, for who multiplies for a pair those of both blocks;
    /// empty when the MMAs that read it have.
    const fn stages(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::STAGES)
    }

    /// Accumulators: full when the MMAs have arrived, empty when every epilogue warp has, for a pair those of both
    /// blocks.
    const fn accumulators(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::ACCUMULATOR_BARRIERS, Self::INSTANCE.accumulators())
    }

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let warp = thread::thread_idx_x() / WARP_SIZE;
        let rank = if BLOCKS > 1 { cluster_rank() } else { 0 };
        let mut block = Self { launch, shared: dynamic_shared_address(), tmem: 0, rank };
        // SAFETY: barriers and the address of the tensor memory have places of their own in shared memory, and nobody
        // uses them before all have passed `sync`; whole warps come here. When they pass the last one, nobody uses the
        // tensor memory any more, nor another block's shared memory.
        unsafe {
            if warp == Self::LOAD_WARP && elect_sync(ALL_LANES) {
                let full_arrivals = if rank == 0 { BLOCKS } else { 1 };
                block.stages().init(full_arrivals, 1);
                block.accumulators().init(1, BLOCKS * EPILOGUE_WARPS);
                fence_mbarrier_init();
            }
            if warp == Self::MMA_WARP {
                tcgen05_alloc::<BLOCKS>(block.shared + Self::TMEM_ADDRESS, Self::TMEM_COLUMNS);
                tcgen05_relinquish_alloc_permit::<BLOCKS>();
                tcgen05_fence_before_thread_sync();
            }
            Self::sync();
            tcgen05_fence_after_thread_sync();
            block.tmem = ld_shared_b32(block.shared + Self::TMEM_ADDRESS);

            match Self::INSTANCE.roles {
                Roles::Specialised => block.specialised(warp),
                Roles::Serial => block.serial(warp),
            }

            tcgen05_fence_before_thread_sync();
            Self::sync();
            if warp == Self::MMA_WARP {
                tcgen05_fence_after_thread_sync();
                tcgen05_dealloc::<BLOCKS>(block.tmem, Self::TMEM_COLUMNS);
            }
        }
    }

    /// Waits for every thread of the block, or of both.
    #[inline(always)]
    unsafe fn sync() {
        // SAFETY: every thread of the block comes here, and of the other; the lanes of a warp meet before.
        unsafe {
            sync_warp(ALL_LANES);
            if BLOCKS > 1 { sync_cluster() } else { thread::sync_threads() }
        }
    }

    /// Every role has its own warps.
    #[inline(always)]
    unsafe fn specialised(self, warp: u32) {
        // SAFETY: one thread is elected for each role that has one.
        unsafe {
            if warp == Self::LOAD_WARP {
                if elect_sync(ALL_LANES) {
                    let mut stages = self.stages();
                    let mut maps = u32::MAX;
                    for (tile, group) in self.tiles() {
                        self.acquire_maps(&mut maps, &tile, group);
                        for step in 0..group.steps() {
                            self.load(&mut stages, &tile, group, step);
                        }
                    }
                    stages.drain();
                }
            } else if warp == Self::MMA_WARP {
                if elect_sync(ALL_LANES) {
                    let mut multiplier = Multiplier::new(self);
                    for (tile, group) in self.tiles() {
                        if self.rank > 0 {
                            multiplier.report(group);
                            continue;
                        }
                        multiplier.begin();
                        for step in 0..group.steps() {
                            multiplier.multiply(&tile, group, step);
                        }
                        multiplier.end();
                    }
                }
            } else {
                let mut epilogue = Epilogue::new(self, warp);
                for (tile, group) in self.tiles() {
                    epilogue.store(&tile, group);
                }
                epilogue.finish();
            }
        }
    }

    /// One thread loads and multiplies a tile, with loads ahead by all stages but the one that is multiplied; then every
    /// warp runs the epilogue.
    #[inline(always)]
    unsafe fn serial(self, warp: u32) {
        let ahead = Self::STAGES - 1;
        // SAFETY: one thread is elected.
        unsafe {
            let elected = warp == Self::LOAD_WARP && elect_sync(ALL_LANES);
            let (mut stages, mut multiplier) = (self.stages(), Multiplier::new(self));
            let mut maps = u32::MAX;
            let mut epilogue = Epilogue::new(self, warp);
            for (tile, group) in self.tiles() {
                if elected {
                    self.acquire_maps(&mut maps, &tile, group);
                    multiplier.begin();
                    for step in 0..group.steps() + ahead {
                        if step < group.steps() {
                            self.load(&mut stages, &tile, group, step);
                        }
                        if step >= ahead {
                            multiplier.multiply(&tile, group, step - ahead);
                        }
                    }
                    multiplier.end();
                }
                sync_warp(ALL_LANES);
                epilogue.store(&tile, group);
            }
            epilogue.finish();
        }
    }

    /// Its tiles.
    #[inline(always)]
    fn tiles(self) -> Tiles {
        let (next, stride) = (thread::block_idx_x() / BLOCKS, thread::grid_dim_x() / BLOCKS);
        Tiles { launch: self.launch, next, stride }
    }

    /// The first of its rows of weights, columns of C, of a tile.
    #[inline(always)]
    const fn first_row(self, tile: &Tile) -> u32 {
        tile.first_row + self.rank * TILE_ROWS
    }
}

/// A block's tiles, each with its group.
struct Tiles {
    launch: Launch,
    next: u32,
    stride: u32,
}

impl Iterator for Tiles {
    type Item = (Tile, &'static Group);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.launch.tile_count {
            return None;
        }
        // SAFETY: inside of the list, whose tiles name groups of the array; neither changes while the kernel runs.
        let item = unsafe {
            let tile = *(self.launch.tiles as *const Tile).add(self.next as usize);
            (tile, &*(self.launch.groups as *const Group).add(tile.group as usize))
        };
        self.next += self.stride;
        Some(item)
    }
}

impl Group {
    /// Stages that a tile takes.
    #[inline(always)]
    const fn steps(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }

    /// MMAs along K that a step takes: fewer in the last.
    #[inline(always)]
    const fn mmas(&self, step: u32) -> u32 {
        let left = (self.k - step * K_BLOCK).div_ceil(MMA_K);
        if left < MMAS_PER_K_BLOCK { left } else { MMAS_PER_K_BLOCK }
    }

    /// Bytes from the scales of 128 rows to those of the next.
    #[inline(always)]
    const fn scale_stride(&self) -> u64 {
        self.k.div_ceil(MMA_K) as u64 * SCALE_TILE_BYTES as u64
    }
}

impl Tile {
    /// Rows of scale tiles that its tokens meet, from the one with `first_token` on.
    #[inline(always)]
    const fn token_scale_tiles(&self) -> u32 {
        (self.first_token % SCALE_TILE_ROWS + self.tokens).div_ceil(SCALE_TILE_ROWS)
    }
}
