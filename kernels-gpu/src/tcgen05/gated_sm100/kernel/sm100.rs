//! A CTA: its shared and tensor memory, its barriers and its tiles.

use core::ops::Range;

use cuda_std::{
    cluster::{arrive_cluster, arrive_cluster_relaxed, wait_cluster},
    mbarrier::MBARRIER_BYTES,
    shared::SharedAddress,
    tcgen05::{TMEM_LANES, TmemAddress, tmem_allocation},
    thread,
    warp::{ALL_LANES, WARP_SIZE, sync_warp},
};

use super::work::Work;
use crate::{
    format::SCALE_TILE_ROWS,
    ring::{Ring, ring_bytes},
    tcgen05::gated_sm100::abi::{
        Group, Halves, Instance, K_ALIGNMENT, MMAS_PER_K_BLOCK, QUARTERS, Roles, SLOT_BYTES, TILE_ROWS,
        TOKEN_SCALE_ROWS, Tile,
    },
};

const _: () = {
    assert!(
        TILE_ROWS == TMEM_LANES && TILE_ROWS == QUARTERS * WARP_SIZE,
        "each row of a tile must have a lane of tensor memory and a thread that reads it"
    );
    assert!(TILE_ROWS == SCALE_TILE_ROWS, "a tile of weights must have as many rows as a scale tile");
    assert!(K_ALIGNMENT / 2 == 16, "the bytes of a row must be a multiple of 16 for a tensor map");
};

/// A CTA. `BLOCKS` CTAs compute a tile together, as in the instance.
#[derive(Clone, Copy)]
pub struct Sm100<W: Work, const BLOCKS: u32> {
    pub(super) work: W,
    /// Shared memory of the CTA.
    pub(super) shared: SharedAddress,
    /// Tensor memory of the CTA.
    pub(super) tmem: TmemAddress,
    /// Rank of the CTA in its pair, from 0.
    pub(super) rank: u32,
    /// Index of the CTA's part of K, from 0.
    pub(super) split: u32,
}

/// Barrier at which the warps of a single CTA meet after they have started. It is not the barrier of `sync_threads`,
/// because the loading warp may arrive there before the other warps have met here.
pub(super) const BEGUN: u32 = 1;

/// Barrier at which the warps of a single CTA signal that they leave.
pub(super) const LEFT: u32 = 2;

/// Barrier of a cluster at which its warps signal that the accumulators are full, and so the stages are free.
pub(super) const FULL: u32 = 3;

/// Bit mask of both ranks of a pair.
pub(super) const BOTH: u16 = 0b11;

/// Columns of tensor memory per tile of the scale layout.
const SCALE_COLUMNS: u32 = SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
    pub(super) const INSTANCE: Instance = W::INSTANCE;
    /// Number of matrices that this CTA loads.
    pub(super) const MATRICES: usize = Self::INSTANCE.block_matrices() as usize;
    pub(super) const STAGES: u32 = Self::INSTANCE.stages;
    pub(super) const CHECK: () = {
        assert!(Self::INSTANCE.blocks == BLOCKS);
        assert!(Self::TMEM_ADDRESS + MBARRIER_BYTES == Self::INSTANCE.shared_bytes());
    };

    /// Warp that loads. With specialized roles, the warps before it run the epilogue.
    pub(super) const LOAD_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps(),
        Roles::Serial => 0,
    };

    /// Warp that issues MMAs and owns the tensor memory.
    pub(super) const MMA_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps() + 1,
        Roles::Serial => 0,
    };

    // Shared memory: stages, the epilogue warps' buffers and slots, barriers, the address of the tensor memory. These
    // are offsets from its start, and within a stage from the start of the stage.
    pub(super) const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    pub(super) const BUFFERS: u32 = Self::STAGES * Self::STAGE_BYTES;
    pub(super) const SLOTS: u32 = Self::BUFFERS + Self::INSTANCE.epilogue_warps() * 2 * Self::INSTANCE.store_bytes();
    const STAGE_BARRIERS: u32 = Self::SLOTS + Self::INSTANCE.slots() * SLOT_BYTES;
    const ACCUMULATOR_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::STAGES);
    pub(super) const SLOT_BARRIERS: u32 = Self::ACCUMULATOR_BARRIERS + ring_bytes(Self::INSTANCE.accumulators());
    pub(super) const INBOX_BARRIERS: u32 = Self::SLOT_BARRIERS + Self::INSTANCE.slots() * MBARRIER_BYTES;
    pub(super) const TMEM_ADDRESS: u32 = Self::INBOX_BARRIERS + Self::INSTANCE.inboxes() * MBARRIER_BYTES;
    pub(super) const fn weights(matrix: usize) -> u32 {
        matrix as u32 * Instance::WEIGHT_BYTES
    }
    pub(super) const TOKENS: u32 = Self::weights(Self::MATRICES);
    pub(super) const fn weight_scales(matrix: usize) -> u32 {
        Self::TOKENS + Self::INSTANCE.token_bytes() + matrix as u32 * Instance::SCALE_BYTES
    }
    pub(super) const TOKEN_SCALES: u32 = Self::weight_scales(Self::MATRICES);

    // Tensor memory: accumulators, each with all matrices, then sets of scales. These are columns from its start, and
    // for scales from the start of the set.
    pub(super) const fn accumulator(index: u32, matrix: usize) -> u32 {
        index * Self::INSTANCE.accumulator_columns() + matrix as u32 * Self::INSTANCE.tile_tokens
    }
    pub(super) const fn scales(set: u32) -> u32 {
        Self::accumulator(Self::INSTANCE.accumulators(), 0) + set * Self::INSTANCE.scale_columns()
    }
    pub(super) const fn weight_scale_column(matrix: usize, mma: u32) -> u32 {
        (matrix as u32 * MMAS_PER_K_BLOCK + mma) * SCALE_COLUMNS
    }
    /// First column of the scales of the tokens of one scale tile, for one MMA. The MMA's scale tiles lie side by side.
    pub(super) const fn token_scale_column(mma: u32, tile_row: u32) -> u32 {
        Self::weight_scale_column(Self::MATRICES, 0)
            + (mma * Self::INSTANCE.token_scale_tiles() + tile_row) * SCALE_COLUMNS
    }
    pub(super) const TMEM_COLUMNS: u32 = tmem_allocation(Self::INSTANCE.tmem_columns());

    /// Cluster rank of the first CTA of this CTA's pair.
    #[inline(always)]
    pub(super) const fn leader(self) -> u32 {
        self.split * BLOCKS
    }

    /// Stages. A stage is full after the load warp and its copies have arrived; for the thread that multiplies for a
    /// pair, after the load warps and copies of both CTAs have arrived. It is empty after the MMAs that read it are
    /// complete.
    pub(super) fn stages(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::STAGES).releasing(Self::INSTANCE.releases)
    }

    /// Accumulators. An accumulator is full after its MMAs are complete, and empty after every epilogue warp, in a pair
    /// of both CTAs, has read it.
    pub(super) fn accumulators(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::ACCUMULATOR_BARRIERS, Self::INSTANCE.accumulators())
            .releasing(Self::INSTANCE.releases)
    }

    /// Signals to the threads of the CTA, or of both CTAs of a pair, that this warp has reached a point, and continues.
    /// At [`BEGUN`] the warp has started; at [`LEFT`] it does not access tensor memory or the other CTA's memory any
    /// more. In a pair, the warp calls [`wait_cluster`](cuda_std::cluster::wait_cluster) before it reaches the next
    /// point or exits.
    ///
    /// # Safety
    /// Each whole warp calls this or [`Self::sync`] once per point, first at [`BEGUN`].
    #[inline(always)]
    pub(super) unsafe fn arrive<const BARRIER: u32>() {
        // SAFETY: the lanes of the warp meet first, so one arrival counts for the whole warp; each warp arrives once,
        // here or in `sync`.
        unsafe {
            sync_warp(ALL_LANES);
            if BLOCKS > 1 {
                if Self::publishes::<BARRIER>() {
                    arrive_cluster();
                } else {
                    arrive_cluster_relaxed();
                }
            } else {
                thread::arrive_barrier::<BARRIER>(Self::INSTANCE.threads());
            }
        }
    }

    /// Whether an arrival of a pair's warp must publish what the warp wrote: at [`BEGUN`], the address of the tensor
    /// memory. At the other points the warp has only read.
    const fn publishes<const BARRIER: u32>() -> bool {
        BARRIER == BEGUN || Self::INSTANCE.releases
    }

    /// Same as [`Self::arrive`], and waits until all other warps have reached the point.
    ///
    /// # Safety
    /// The requirements of [`Self::arrive`].
    #[inline(always)]
    pub(super) unsafe fn sync<const BARRIER: u32>() {
        // SAFETY: the lanes of the warp meet first, so all of them wait together; each warp arrives once, here or in
        // `arrive`.
        unsafe {
            if BLOCKS > 1 {
                Self::arrive::<BARRIER>();
                wait_cluster();
            } else {
                sync_warp(ALL_LANES);
                thread::sync_barrier::<BARRIER>(Self::INSTANCE.threads());
            }
        }
    }

    /// K-blocks of a tile that this CTA has. If there are fewer k-blocks than parts of K, some are past the last one,
    /// and the tensor maps fill their values with zeros.
    #[inline(always)]
    pub(super) const fn k_blocks(self, group: &Group) -> Range<u32> {
        let (all, splits) = (group.k_blocks(), Self::INSTANCE.splits);
        if splits == 1 {
            return 0..all;
        }
        let all = if all < splits { splits } else { all };
        all * self.split / splits..all * (self.split + 1) / splits
    }

    /// Returns the first tile of this CTA, and the tiles after it.
    #[inline(always)]
    pub(super) fn first_tile(self) -> (W::Tiles, Option<(Tile, W::Group)>) {
        let mut tiles = self.tiles();
        let first = tiles.next();
        (tiles, first)
    }

    /// Returns the tiles of this CTA, in order.
    #[inline(always)]
    pub(super) fn tiles(self) -> W::Tiles {
        let blocks = Self::INSTANCE.blocks_of_tile();
        let (next, stride) = (thread::block_idx_x() / blocks, thread::grid_dim_x() / blocks);
        // SAFETY: the caller of `run` guarantees the contract of the kernel. Callers run after `W::wait`, unless
        // `W::AT_ONCE` or the instance loads weights early.
        unsafe { self.work.tiles(next, stride) }
    }

    /// First row of weights, which is a column of C, that this CTA has of a tile.
    #[inline(always)]
    pub(super) const fn first_row(self, tile: &Tile) -> u32 {
        match Self::INSTANCE.halves {
            Halves::Rows => tile.first_row + self.rank * TILE_ROWS,
            Halves::Matrices => tile.first_row,
        }
    }

    /// Returns the items of the matrices that this CTA loads, in order. The arguments are one item per matrix of a
    /// group.
    #[inline(always)]
    pub(super) fn of_matrices<T: Copy>(self, [first, second]: [T; 2]) -> [T; 2] {
        if matches!(Self::INSTANCE.halves, Halves::Matrices) && self.rank > 0 {
            [second, second]
        } else {
            [first, second]
        }
    }
}
