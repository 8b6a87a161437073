//! How the Blackwell kernel works.
//!
//! A and B are swapped: weights lie on the tensor core's M, which is 128 rows, and tokens on its N, which is as large as a
//! tile needs. One warp loads by bulk copies, one issues MMAs, and eight or more turn accumulators into C. A block computes tiles
//! until none are left. Each role is ahead of the next by as much as the buffers between them hold:
//!
//! ```text
//! global ─ load warp ─▶ stages ─ MMA warp ─▶ accumulators ─ epilogue warps ─▶ C
//! ```
//!
//! A pair of blocks ([`Instance::blocks`]) computes 256 rows: each block has half of the rows, half of the tokens and a
//! pipeline of its own, and a thread of the first block multiplies for both. The rows of a pair apart ([`Halves::Matrices`]) are 128
//! of gate and the same 128 of up. Then sums meet in the epilogue: each block finishes half of the tokens, and sends the other block the
//! sums of the other half. Both need the scales of all of a tile's tokens: each copies half of them, to both, once a stage has been
//! emptied, which shows that both blocks have begun.
//!
//! Where K is split ([`Instance::splits`]), two pairs of a cluster have the k-blocks of a tile, each half of them, so that a tile of
//! twice as many tokens occupies as many multiprocessors and takes in fewer bytes. All blocks that have sums of the same elements finish
//! a part of these, and send each other the rest. A cluster computes one tile.
//!
//! # Scales
//!
//! A tile of the scale layout takes one copy (`tcgen05.cp`) to four columns of tensor memory, a column for 32 rows. A copy
//! and the MMAs after it execute in order, but MMAs and a copy after them need not (PTX ISA, "Pipelined tcgen05
//! Instructions"). CUTLASS relies on it that they do (`sm100_blockscaled_mma_warpspecialized.hpp` has one place for the scales
//! of all stages); this kernel does not. It has [`Instance::scale_sets`] sets of columns and uses them in turn, one for each
//! k-block. Before a set is written again, the MMAs that read it must be complete. Where there are as many sets as stages, a
//! stage that is full again shows that they are. Where fewer sets fit, the thread that multiplies waits for those MMAs, while
//! the tensor core is busy with the ones issued since.
//!
//! A tile of tokens that starts inside of a scale tile names the column at which its 32 tokens begin. The manual asks only
//! that this address is a whole column ("4-byte aligned sub-column", "Layout of the Scale Factor B Matrix for
//! scale_vec::4X"). CUTLASS starts at every second column, for N of 64 and 192. No known kernel starts at an odd one, so the
//! host plans such a tile only if it is told to.

mod load;
mod multiply;
mod store;
mod work;

use core::ops::Range;

use cuda_std::{
    cluster::{arrive_cluster, cluster_rank, sync_cluster, wait_cluster},
    fence::fence_mbarrier_init,
    mbarrier::{MBARRIER_BYTES, Mbarrier, mbarrier_init},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32},
    tcgen05::{
        TMEM_LANES, TmemAddress, tcgen05_alloc, tcgen05_dealloc, tcgen05_fence_after_thread_sync,
        tcgen05_fence_before_thread_sync, tcgen05_relinquish_alloc_permit, tmem_allocation,
    },
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, sync_warp},
};

pub use self::work::{Placed, Sums, Work};
use self::{multiply::Multiplier, store::Epilogue};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    nvfp4_rows::K_BLOCK,
    ring::{Ring, ring_bytes},
    tcgen05::gated_sm100::abi::{
        Group, Halves, Instance, K_ALIGNMENT, MMA_K, MMAS_PER_K_BLOCK, QUARTERS, Roles, SLOT_BYTES, TILE_ROWS,
        TOKEN_SCALE_ROWS, Tile,
    },
};

const _: () = {
    assert!(
        TILE_ROWS == TMEM_LANES && TILE_ROWS == QUARTERS * WARP_SIZE,
        "each row has a lane, and each lane a thread of a quarter's warps"
    );
    assert!(TILE_ROWS == SCALE_TILE_ROWS, "a weight tile's scales are whole tiles");
    assert!(K_ALIGNMENT / 2 == 16, "what a tensor map asks of a row, in bytes");
};

/// A block at work. BLOCKS compute a tile, as the instance says.
#[derive(Clone, Copy)]
pub struct Sm100<W: Work, const BLOCKS: u32> {
    work: W,
    /// Its shared memory.
    shared: SharedAddress,
    /// Its tensor memory.
    tmem: TmemAddress,
    /// Which block of its pair it is, from 0.
    rank: u32,
    /// Which part of K it has, from 0.
    split: u32,
}

/// The barrier of a block alone at which its warps meet when they have begun. It is not that of `sync_threads`, at which the warp that
/// loads may come before the others have met here.
const BEGUN: u32 = 1;

/// The barrier of a block alone at which its warps say that they leave.
const LEFT: u32 = 2;

/// The barrier of a cluster at which its warps say that the accumulators are full, and so the stages free.
const FULL: u32 = 3;

/// Ranks of a pair's blocks, as bits.
const BOTH: u16 = 0b11;

/// Columns of tensor memory of a tile of the scale layout.
const SCALE_COLUMNS: u32 = SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
    const INSTANCE: Instance = W::INSTANCE;
    /// Matrices that this block loads.
    const MATRICES: usize = Self::INSTANCE.block_matrices() as usize;
    const STAGES: u32 = Self::INSTANCE.stages;
    const CHECK: () = {
        assert!(Self::INSTANCE.blocks == BLOCKS);
        assert!(Self::TMEM_ADDRESS + MBARRIER_BYTES == Self::INSTANCE.shared_bytes());
    };

    /// The warp that loads. With specialized roles, the warps before it run the epilogue.
    const LOAD_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps(),
        Roles::Serial => 0,
    };

    /// The warp that issues MMAs, and owns the tensor memory.
    const MMA_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps() + 1,
        Roles::Serial => 0,
    };

    // Shared memory: stages, the epilogue warps' buffers and slots, barriers, the address of the tensor memory. These are offsets from
    // its start, and inside of a stage from the stage's start.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS: u32 = Self::STAGES * Self::STAGE_BYTES;
    const SLOTS: u32 = Self::BUFFERS + Self::INSTANCE.epilogue_warps() * 2 * Self::INSTANCE.store_bytes();
    const STAGE_BARRIERS: u32 = Self::SLOTS + Self::INSTANCE.slots() * SLOT_BYTES;
    const ACCUMULATOR_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::STAGES);
    const SLOT_BARRIERS: u32 = Self::ACCUMULATOR_BARRIERS + ring_bytes(Self::INSTANCE.accumulators());
    const INBOX_BARRIERS: u32 = Self::SLOT_BARRIERS + Self::INSTANCE.slots() * MBARRIER_BYTES;
    const TMEM_ADDRESS: u32 = Self::INBOX_BARRIERS + Self::INSTANCE.inboxes() * MBARRIER_BYTES;
    const fn weights(matrix: usize) -> u32 {
        matrix as u32 * Instance::WEIGHT_BYTES
    }
    const TOKENS: u32 = Self::weights(Self::MATRICES);
    const fn weight_scales(matrix: usize) -> u32 {
        Self::TOKENS + Self::INSTANCE.token_bytes() + matrix as u32 * Instance::SCALE_BYTES
    }
    const TOKEN_SCALES: u32 = Self::weight_scales(Self::MATRICES);

    // Tensor memory: accumulators, each of all matrices, then sets of scales. These are columns from its start, and of scales
    // from the set's start.
    const fn accumulator(index: u32, matrix: usize) -> u32 {
        index * Self::INSTANCE.accumulator_columns() + matrix as u32 * Self::INSTANCE.tile_tokens
    }
    const fn scales(set: u32) -> u32 {
        Self::accumulator(Self::INSTANCE.accumulators(), 0) + set * Self::INSTANCE.scale_columns()
    }
    const fn weight_scale_column(matrix: usize, mma: u32) -> u32 {
        (matrix as u32 * MMAS_PER_K_BLOCK + mma) * SCALE_COLUMNS
    }
    /// Scale tiles of an MMA lie side by side, so that the columns of 32 tokens each follow one another.
    const fn token_scale_column(mma: u32, tile_row: u32) -> u32 {
        Self::weight_scale_column(Self::MATRICES, 0)
            + (mma * Self::INSTANCE.token_scale_tiles() + tile_row) * SCALE_COLUMNS
    }
    const TMEM_COLUMNS: u32 = tmem_allocation(Self::INSTANCE.tmem_columns());

    /// The rank in the cluster of the first block of this block's pair.
    #[inline(always)]
    const fn leader(self) -> u32 {
        self.split * BLOCKS
    }

    /// The stages. One is full when the load warp and its copies have arrived, and to the thread that multiplies for a pair
    /// when those of both blocks have. It is empty when the MMAs that read it are complete.
    fn stages(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::STAGES)
    }

    /// The accumulators. One is full when its MMAs are complete, and empty when every epilogue warp has read it, in a pair
    /// those of both blocks.
    fn accumulators(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::ACCUMULATOR_BARRIERS, Self::INSTANCE.accumulators())
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract of the kernel.
    #[inline(always)]
    pub unsafe fn run(work: W) {
        const { Self::CHECK };
        let warp = thread::thread_idx_x() / WARP_SIZE;
        let of_cluster = if BLOCKS > 1 { cluster_rank() } else { 0 };
        let (rank, split) = (of_cluster % BLOCKS, if Self::INSTANCE.splits > 1 { of_cluster / BLOCKS } else { 0 });
        let mut block = Self { work, shared: dynamic_shared_address(), tmem: TmemAddress::new(0), rank, split };
        // SAFETY: barriers and the address of the tensor memory have places of their own in shared memory, and nobody uses
        // them before all threads have passed the first `sync`. Whole warps come here. After the last `sync` nobody uses the
        // tensor memory any more, nor another block's shared memory.
        unsafe {
            let loads = warp == Self::LOAD_WARP;
            // Its first tile is on its way while barriers are initialized.
            let first = (W::AT_ONCE && loads).then(|| block.first_tile());
            let (mut stages, mut maps) = (block.stages(), u32::MAX);
            if loads && elect_sync(ALL_LANES) {
                let full_arrivals = if rank == 0 { BLOCKS } else { 1 };
                stages.init(full_arrivals, 1);
                block.accumulators().init(1, BLOCKS * Self::INSTANCE.epilogue_warps());
                fence_mbarrier_init();
                // It waits for no barriers but those that it has initialized, so that copies begin before any other warp is there.
                if let (Roles::Specialized, Some((_, Some((tile, group))))) = (Self::INSTANCE.roles, &first) {
                    let group = W::placed(*group);
                    block.acquire_maps(&mut maps, tile, &group);
                    block.load(&mut stages, tile, &group, block.k_blocks(&group).start, false);
                }
            }
            if warp < Self::INSTANCE.epilogue_warps() {
                block.init_slots(warp);
            }
            if warp == Self::MMA_WARP {
                tcgen05_alloc::<BLOCKS>(block.shared + Self::TMEM_ADDRESS, Self::TMEM_COLUMNS);
                tcgen05_relinquish_alloc_permit::<BLOCKS>();
                tcgen05_fence_before_thread_sync();
            }
            if matches!(Self::INSTANCE.roles, Roles::Specialized) && loads {
                Self::arrive::<BEGUN>();
                W::wait();
                let (tiles, first) = match first {
                    Some(first) => first,
                    None => block.first_tile(),
                };
                block.load_tiles(stages, maps, tiles, first);
                sync_warp(ALL_LANES);
                if BLOCKS > 1 {
                    wait_cluster();
                }
                if Self::INSTANCE.splits > 1 {
                    Self::sync::<FULL>();
                }
                Self::arrive::<LEFT>();
            } else {
                Self::sync::<BEGUN>();
                tcgen05_fence_after_thread_sync();
                block.tmem = TmemAddress::new(ld_shared_b32(block.shared + Self::TMEM_ADDRESS));
                W::wait();
                match Self::INSTANCE.roles {
                    Roles::Specialized => block.specialized(warp),
                    Roles::Serial => block.serial(warp),
                }
            }

            if warp == Self::MMA_WARP {
                if Self::INSTANCE.splits > 1 {
                    Self::sync::<FULL>();
                }
                tcgen05_fence_before_thread_sync();
                Self::sync::<LEFT>();
                tcgen05_fence_after_thread_sync();
                tcgen05_dealloc::<BLOCKS>(block.tmem, Self::TMEM_COLUMNS);
            } else if BLOCKS > 1 {
                wait_cluster();
            }
        }
    }

    /// Tells the threads of the block, or of both blocks of a pair, that this warp has come so far, and lets it go on: at [`BEGUN`] that the
    /// warp has begun, at [`LEFT`] that it accesses neither tensor memory nor the other block's memory any more. In a pair it calls
    /// [`wait_cluster`] before it comes to the next of them, or ends.
    ///
    /// # Safety
    /// Each whole warp calls this or [`Self::sync`] once at each of them, first at [`BEGUN`].
    #[inline(always)]
    unsafe fn arrive<const BARRIER: u32>() {
        // SAFETY: the lanes of the warp meet first, so one arrival counts for the whole warp; each warp arrives once,
        // here or in `sync`.
        unsafe {
            sync_warp(ALL_LANES);
            if BLOCKS > 1 {
                arrive_cluster();
            } else {
                thread::arrive_barrier::<BARRIER>(Self::INSTANCE.threads());
            }
        }
    }

    /// As [`Self::arrive`], and waits until all other warps have come so far.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn sync<const BARRIER: u32>() {
        // SAFETY: the lanes of the warp meet first, so all of them wait together; each warp arrives once, here or in
        // `arrive`.
        unsafe {
            sync_warp(ALL_LANES);
            if BLOCKS > 1 {
                sync_cluster();
            } else {
                thread::sync_barrier::<BARRIER>(Self::INSTANCE.threads());
            }
        }
    }

    /// [`Roles::Specialized`]: the warp that loads does so for every tile; the first is at hand, and where tiles are known at once its
    /// first k-block is on its way.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. That warp calls it, which has initialized the barriers, with [`Self::first_tile`]'s, with
    /// the stages as they stand and the group whose maps have been acquired.
    #[inline(always)]
    unsafe fn load_tiles(
        self,
        mut stages: Ring<BLOCKS>,
        mut maps: u32,
        mut tiles: W::Tiles,
        first: Option<(Tile, W::Group)>,
    ) {
        // SAFETY: one thread is elected, the same as for the first k-block (PTX ISA, "elect.sync": an election of the same lanes has the
        // same leader), and takes the tiles and k-blocks in order. `drain` keeps the block until its peer has arrived here.
        unsafe {
            if elect_sync(ALL_LANES) {
                let (mut next, mut loaded) = (first, u32::from(W::AT_ONCE));
                let mut together = false;
                while let Some((tile, group)) = next {
                    let group = W::placed(group);
                    self.acquire_maps(&mut maps, &tile, &group);
                    let Range { start, end } = self.k_blocks(&group);
                    for k_block in start + loaded..end {
                        stages.wait_empty();
                        self.load(&mut stages, &tile, &group, k_block, together);
                        // Where K is split, few k-blocks are left by then.
                        together |= BLOCKS > 1 && Self::INSTANCE.splits == 1 && stages.index() == 0;
                    }
                    (next, loaded) = (tiles.next(), 0);
                }
                stages.drain();
            }
        }
    }

    /// [`Roles::Specialized`]: the other roles, which have warps of their own.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. Every other thread of the block calls it with the number of its warp, once
    /// barriers and tensor memory are there.
    #[inline(always)]
    unsafe fn specialized(self, warp: u32) {
        // SAFETY: one thread is elected for multiplying, whole warps run the epilogue, and each role takes the same tiles and k-blocks
        // in the same order.
        unsafe {
            if warp == Self::MMA_WARP {
                if elect_sync(ALL_LANES) {
                    let mut multiplier = Multiplier::new(self);
                    for (tile, group) in self.tiles() {
                        let group = W::placed(group);
                        if self.rank > 0 {
                            multiplier.report(&group);
                            continue;
                        }
                        multiplier.begin();
                        for k_block in self.k_blocks(&group) {
                            multiplier.multiply(&tile, &group, k_block);
                        }
                        multiplier.end();
                    }
                }
            } else {
                let mut epilogue = Epilogue::new(self, warp);
                let (mut tiles, mut next) = self.first_tile();
                if next.is_none() {
                    Self::arrive::<LEFT>();
                }
                while let Some((tile, group)) = next {
                    let group = W::placed(group);
                    next = tiles.next();
                    epilogue.store(&tile, &group, next.is_none());
                }
                epilogue.finish();
            }
        }
    }

    /// [`Roles::Serial`]: one thread loads and multiplies a tile, then every warp runs the epilogue. Loads are ahead by all
    /// stages but the one that is multiplied.
    ///
    /// # Safety
    /// As [`Self::specialized`].
    #[inline(always)]
    unsafe fn serial(self, warp: u32) {
        let ahead = Self::STAGES - 1;
        // SAFETY: one thread is elected for both roles, and whole warps run the epilogue, which waits for the accumulator.
        unsafe {
            let elected = warp == Self::LOAD_WARP && elect_sync(ALL_LANES);
            let (mut stages, mut multiplier) = (self.stages(), Multiplier::new(self));
            let mut maps = u32::MAX;
            let mut epilogue = Epilogue::new(self, warp);
            for (tile, group) in self.tiles() {
                let group = W::placed(group);
                if elected {
                    self.acquire_maps(&mut maps, &tile, &group);
                    multiplier.begin();
                    for k_block in 0..group.k_blocks() + ahead {
                        if k_block < group.k_blocks() {
                            stages.wait_empty();
                            self.load(&mut stages, &tile, &group, k_block, false);
                        }
                        if k_block >= ahead {
                            multiplier.multiply(&tile, &group, k_block - ahead);
                        }
                    }
                    multiplier.end();
                }
                sync_warp(ALL_LANES);
                epilogue.store(&tile, &group, false);
            }
            epilogue.finish();
            if warp != Self::MMA_WARP {
                tcgen05_fence_before_thread_sync();
                Self::arrive::<LEFT>();
            }
        }
    }

    /// The k-blocks that this block has of a tile. If there are fewer than parts of K, some are behind the last: of those the maps give
    /// zeros as values.
    #[inline(always)]
    const fn k_blocks(self, group: &Group) -> Range<u32> {
        let (all, splits) = (group.k_blocks(), Self::INSTANCE.splits);
        if splits == 1 {
            return 0..all;
        }
        let all = if all < splits { splits } else { all };
        all * self.split / splits..all * (self.split + 1) / splits
    }

    /// Initializes the barriers of what other blocks send an epilogue warp, where they do.
    ///
    /// # Safety
    /// That warp calls it, before the first `sync`.
    #[inline(always)]
    unsafe fn init_slots(self, warp: u32) {
        let of_warp = Self::INSTANCE.slots() / Self::INSTANCE.epilogue_warps();
        // SAFETY: no other warp uses the barriers before the first `sync`; each barrier has its own 8 bytes of shared
        // memory.
        unsafe {
            if of_warp + Self::INSTANCE.inboxes() > 0 && elect_sync(ALL_LANES) {
                for slot in warp * of_warp..(warp + 1) * of_warp {
                    mbarrier_init(Mbarrier::at(self.shared + Self::SLOT_BARRIERS).nth(slot), 1);
                }
                if Self::INSTANCE.inboxes() > 0 {
                    mbarrier_init(Mbarrier::at(self.shared + Self::INBOX_BARRIERS).nth(warp), 1);
                }
                fence_mbarrier_init();
            }
        }
    }

    /// The first tile of this block, and those behind it.
    #[inline(always)]
    fn first_tile(self) -> (W::Tiles, Option<(Tile, W::Group)>) {
        let mut tiles = self.tiles();
        let first = tiles.next();
        (tiles, first)
    }

    /// The tiles of this block, in order.
    #[inline(always)]
    fn tiles(self) -> W::Tiles {
        let blocks = Self::INSTANCE.blocks_of_tile();
        let (next, stride) = (thread::block_idx_x() / blocks, thread::grid_dim_x() / blocks);
        // SAFETY: the contract; lists are read behind `W::wait`.
        unsafe { self.work.tiles(next, stride) }
    }

    /// The first row of weights, which is a column of C, that this block has of a tile.
    #[inline(always)]
    const fn first_row(self, tile: &Tile) -> u32 {
        match Self::INSTANCE.halves {
            Halves::Rows => tile.first_row + self.rank * TILE_ROWS,
            Halves::Matrices => tile.first_row,
        }
    }

    /// The address, or whatever else each of a group's matrices has, of the first matrix that this block loads and of the next.
    #[inline(always)]
    fn of_matrices<T: Copy>(self, [first, second]: [T; 2]) -> [T; 2] {
        if matches!(Self::INSTANCE.halves, Halves::Matrices) && self.rank > 0 {
            [second, second]
        } else {
            [first, second]
        }
    }
}

impl Group {
    /// The k-blocks of a tile.
    #[inline(always)]
    const fn k_blocks(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }

    /// MMAs along a k-block. The last k-block may take fewer than the others.
    #[inline(always)]
    const fn mmas(&self, k_block: u32) -> u32 {
        let left = (self.k - k_block * K_BLOCK).div_ceil(MMA_K);
        if left < MMAS_PER_K_BLOCK { left } else { MMAS_PER_K_BLOCK }
    }

    /// Bytes from the scales of 128 rows to those of the next.
    #[inline(always)]
    const fn scale_stride(&self) -> u64 {
        self.k.div_ceil(MMA_K) as u64 * SCALE_TILE_BYTES as u64
    }
}

impl Tile {
    /// Scale tiles that its tokens lie in, from the one with `first_token` on.
    #[inline(always)]
    const fn token_scale_tiles(&self) -> u32 {
        (self.first_token % SCALE_TILE_ROWS + self.tokens).div_ceil(SCALE_TILE_ROWS)
    }
}
