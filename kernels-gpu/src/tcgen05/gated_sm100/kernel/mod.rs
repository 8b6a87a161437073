//! The Blackwell kernel.
//!
//! A and B are swapped: weights are on the tensor core's M, which is 128 rows, and tokens on its N, which is as large
//! as a tile needs. One warp loads by bulk copies, one warp issues MMAs, and eight or more warps convert accumulators
//! to C. A CTA computes tiles until none are left. Each role runs ahead of the next one by as much as the buffers
//! between them hold:
//!
//! ```text
//! global ─ load warp ─▶ stages ─ MMA warp ─▶ accumulators ─ epilogue warps ─▶ C
//! ```
//!
//! A pair of CTAs ([`Instance::blocks`]) computes 256 rows: each CTA has half of the rows, half of the tokens and its
//! own pipeline, and a thread of the first CTA multiplies for both. With [`Halves::Matrices`], the rows of a pair are
//! 128 rows of gate in the first CTA and the same 128 rows of up in the second. The sums then meet in the epilogue:
//! each CTA finishes half of the tokens, and sends the sums of the other half to the other CTA. Both CTAs need the
//! scales of all of a tile's tokens. Each CTA copies half of them to both, once a stage has been emptied, which shows
//! that both CTAs have started.
//!
//! If K is split ([`Instance::splits`]), two pairs of a cluster have half of a tile's k-blocks each. A tile of twice as
//! many tokens then occupies the same number of SMs and loads fewer bytes. All CTAs that have sums of the same elements
//! finish a part of these elements, and send each other the other sums. A cluster computes one tile.
//!
//! # Scales
//!
//! One copy (`tcgen05.cp`) moves a tile of the scale layout to four columns of tensor memory, one column per 32 rows. A
//! copy and the MMAs after it execute in order, but MMAs and a copy after them need not (PTX ISA, "Pipelined tcgen05
//! Instructions"). CUTLASS relies on this order too (`sm100_blockscaled_mma_warpspecialized.hpp` has one place for the
//! scales of all stages); this kernel does not. It has [`Instance::scale_sets`] sets of columns and uses them in turn,
//! one per k-block. Before a set is written again, the MMAs that read it must be complete. If there are as many sets as
//! stages, a stage that is full again shows that they are. If fewer sets fit, the thread that multiplies waits for
//! these MMAs, while the tensor core executes later ones.
//!
//! A tile of tokens that starts inside of a scale tile passes the column at which its 32 tokens begin. The manual only
//! requires this address to be a whole column ("4-byte aligned sub-column", "Layout of the Scale Factor B Matrix for
//! scale_vec::4X"). CUTLASS starts at every second column, for N of 64 and 192. No known kernel starts at an odd
//! column, so the host plans such a tile only on request.

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
        "each row needs a lane, and each lane a thread of a quarter's warps"
    );
    assert!(TILE_ROWS == SCALE_TILE_ROWS, "the scales of a weight tile must be whole tiles");
    assert!(K_ALIGNMENT / 2 == 16, "a tensor map requires rows of a multiple of 16 bytes");
};

/// A CTA. `BLOCKS` CTAs compute a tile together, as in the instance.
#[derive(Clone, Copy)]
pub struct Sm100<W: Work, const BLOCKS: u32> {
    work: W,
    /// Shared memory of the CTA.
    shared: SharedAddress,
    /// Tensor memory of the CTA.
    tmem: TmemAddress,
    /// Rank of the CTA in its pair, from 0.
    rank: u32,
    /// Index of the CTA's part of K, from 0.
    split: u32,
}

/// Barrier at which the warps of a single CTA meet after they have started. It is not the barrier of `sync_threads`,
/// because the loading warp may arrive there before the other warps have met here.
const BEGUN: u32 = 1;

/// Barrier at which the warps of a single CTA signal that they leave.
const LEFT: u32 = 2;

/// Barrier of a cluster at which its warps signal that the accumulators are full, and so the stages are free.
const FULL: u32 = 3;

/// Bit mask of both ranks of a pair.
const BOTH: u16 = 0b11;

/// Columns of tensor memory per tile of the scale layout.
const SCALE_COLUMNS: u32 = SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
    const INSTANCE: Instance = W::INSTANCE;
    /// Number of matrices that this CTA loads.
    const MATRICES: usize = Self::INSTANCE.block_matrices() as usize;
    const STAGES: u32 = Self::INSTANCE.stages;
    const CHECK: () = {
        assert!(Self::INSTANCE.blocks == BLOCKS);
        assert!(Self::TMEM_ADDRESS + MBARRIER_BYTES == Self::INSTANCE.shared_bytes());
    };

    /// Warp that loads. With specialized roles, the warps before it run the epilogue.
    const LOAD_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps(),
        Roles::Serial => 0,
    };

    /// Warp that issues MMAs and owns the tensor memory.
    const MMA_WARP: u32 = match Self::INSTANCE.roles {
        Roles::Specialized => Self::INSTANCE.epilogue_warps() + 1,
        Roles::Serial => 0,
    };

    // Shared memory: stages, the epilogue warps' buffers and slots, barriers, the address of the tensor memory. These
    // are offsets from its start, and within a stage from the start of the stage.
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

    // Tensor memory: accumulators, each with all matrices, then sets of scales. These are columns from its start, and
    // for scales from the start of the set.
    const fn accumulator(index: u32, matrix: usize) -> u32 {
        index * Self::INSTANCE.accumulator_columns() + matrix as u32 * Self::INSTANCE.tile_tokens
    }
    const fn scales(set: u32) -> u32 {
        Self::accumulator(Self::INSTANCE.accumulators(), 0) + set * Self::INSTANCE.scale_columns()
    }
    const fn weight_scale_column(matrix: usize, mma: u32) -> u32 {
        (matrix as u32 * MMAS_PER_K_BLOCK + mma) * SCALE_COLUMNS
    }
    /// Scale tiles of an MMA lie side by side, so the columns of 32 tokens each are consecutive.
    const fn token_scale_column(mma: u32, tile_row: u32) -> u32 {
        Self::weight_scale_column(Self::MATRICES, 0)
            + (mma * Self::INSTANCE.token_scale_tiles() + tile_row) * SCALE_COLUMNS
    }
    const TMEM_COLUMNS: u32 = tmem_allocation(Self::INSTANCE.tmem_columns());

    /// Cluster rank of the first CTA of this CTA's pair.
    #[inline(always)]
    const fn leader(self) -> u32 {
        self.split * BLOCKS
    }

    /// Stages. A stage is full after the load warp and its copies have arrived; for the thread that multiplies for a
    /// pair, after the load warps and copies of both CTAs have arrived. It is empty after the MMAs that read it are
    /// complete.
    fn stages(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::STAGES)
    }

    /// Accumulators. An accumulator is full after its MMAs are complete, and empty after every epilogue warp, in a pair
    /// of both CTAs, has read it.
    fn accumulators(self) -> Ring<BLOCKS> {
        Ring::new(self.shared + Self::ACCUMULATOR_BARRIERS, Self::INSTANCE.accumulators())
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `mod.rs` of the kernel's folder (`gated_sm100` or `moe_sm100`) holds.
    #[inline(always)]
    pub unsafe fn run(work: W) {
        const { Self::CHECK };
        let warp = thread::thread_idx_x() / WARP_SIZE;
        let of_cluster = if BLOCKS > 1 { cluster_rank() } else { 0 };
        let (rank, split) = (of_cluster % BLOCKS, if Self::INSTANCE.splits > 1 { of_cluster / BLOCKS } else { 0 });
        let mut block = Self { work, shared: dynamic_shared_address(), tmem: TmemAddress::new(0), rank, split };
        // SAFETY: the barriers and the address of the tensor memory have their own places in shared memory, and nobody
        // uses them before all threads have passed the first `sync`. Whole warps reach this point. After the last
        // `sync`, nobody uses the tensor memory or another CTA's shared memory any more.
        unsafe {
            let loads = warp == Self::LOAD_WARP;
            // The first tile is loaded while barriers are initialized.
            let first = (W::AT_ONCE && loads).then(|| block.first_tile());
            let (mut stages, mut maps) = (block.stages(), u32::MAX);
            if loads && elect_sync(ALL_LANES) {
                let full_arrivals = if rank == 0 { BLOCKS } else { 1 };
                stages.init(full_arrivals, 1);
                block.accumulators().init(1, BLOCKS * Self::INSTANCE.epilogue_warps());
                fence_mbarrier_init();
                // This warp waits only for barriers that it has initialized, so copies start before any other warp has
                // arrived.
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

    /// Signals to the threads of the CTA, or of both CTAs of a pair, that this warp has reached a point, and continues.
    /// At [`BEGUN`] the warp has started; at [`LEFT`] it does not access tensor memory or the other CTA's memory any
    /// more. In a pair, the warp calls [`wait_cluster`] before it reaches the next point or exits.
    ///
    /// # Safety
    /// Each whole warp calls this or [`Self::sync`] once per point, first at [`BEGUN`].
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

    /// Same as [`Self::arrive`], and waits until all other warps have reached the point.
    ///
    /// # Safety
    /// The requirements of [`Self::arrive`].
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

    /// [`Roles::Specialized`]: loads every tile, in the loading warp. `first` is the first tile; with
    /// [`Work::AT_ONCE`], its first k-block has been loaded already.
    ///
    /// # Safety
    /// The contract in `mod.rs` of the kernel's folder holds. The loading warp calls this, after it has initialized the
    /// barriers. `tiles` and `first` are from [`Self::first_tile`], `stages` is at the next stage, and `maps` is the
    /// group whose tensor maps have been acquired.
    #[inline(always)]
    unsafe fn load_tiles(
        self,
        mut stages: Ring<BLOCKS>,
        mut maps: u32,
        mut tiles: W::Tiles,
        first: Option<(Tile, W::Group)>,
    ) {
        // SAFETY: one thread is elected, the same as for the first k-block (PTX ISA, "elect.sync": an election of the
        // same lanes has the same leader), and it takes the tiles and k-blocks in order. `drain` keeps this CTA until
        // the other CTA of the pair has arrived here.
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
                        // If K is split, few k-blocks are left at this point.
                        together |= BLOCKS > 1 && Self::INSTANCE.splits == 1 && stages.index() == 0;
                    }
                    (next, loaded) = (tiles.next(), 0);
                }
                stages.drain();
            }
        }
    }

    /// [`Roles::Specialized`]: runs the other roles, in their own warps.
    ///
    /// # Safety
    /// The contract in `mod.rs` of the kernel's folder holds. Every other thread of the CTA calls this with the index
    /// of its warp, after the barriers are initialized and the tensor memory is allocated.
    #[inline(always)]
    unsafe fn specialized(self, warp: u32) {
        // SAFETY: one thread is elected to multiply, whole warps run the epilogue, and each role takes the same tiles
        // and k-blocks in the same order.
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

    /// [`Roles::Serial`]: one thread loads and multiplies a tile, then every warp runs the epilogue. Loads are ahead by
    /// all stages except the stage that is multiplied.
    ///
    /// # Safety
    /// The contract in `mod.rs` of the kernel's folder holds. Every thread of the CTA calls this with the index of its
    /// warp, after the barriers are initialized and the tensor memory is allocated.
    #[inline(always)]
    unsafe fn serial(self, warp: u32) {
        let ahead = Self::STAGES - 1;
        // SAFETY: one thread is elected for both roles, and whole warps run the epilogue, which waits for the
        // accumulator.
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

    /// K-blocks of a tile that this CTA has. If there are fewer k-blocks than parts of K, some are past the last one,
    /// and the tensor maps fill their values with zeros.
    #[inline(always)]
    const fn k_blocks(self, group: &Group) -> Range<u32> {
        let (all, splits) = (group.k_blocks(), Self::INSTANCE.splits);
        if splits == 1 {
            return 0..all;
        }
        let all = if all < splits { splits } else { all };
        all * self.split / splits..all * (self.split + 1) / splits
    }

    /// Initializes the barriers of an epilogue warp's slots and inbox, if it has any.
    ///
    /// # Safety
    /// The epilogue warp with index `warp` calls this, before the first `sync`.
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

    /// Returns the first tile of this CTA, and the tiles after it.
    #[inline(always)]
    fn first_tile(self) -> (W::Tiles, Option<(Tile, W::Group)>) {
        let mut tiles = self.tiles();
        let first = tiles.next();
        (tiles, first)
    }

    /// Returns the tiles of this CTA, in order.
    #[inline(always)]
    fn tiles(self) -> W::Tiles {
        let blocks = Self::INSTANCE.blocks_of_tile();
        let (next, stride) = (thread::block_idx_x() / blocks, thread::grid_dim_x() / blocks);
        // SAFETY: the caller of `run` guarantees the contract of the kernel. Callers run after `W::wait`, unless
        // `W::AT_ONCE`.
        unsafe { self.work.tiles(next, stride) }
    }

    /// First row of weights, which is a column of C, that this CTA has of a tile.
    #[inline(always)]
    const fn first_row(self, tile: &Tile) -> u32 {
        match Self::INSTANCE.halves {
            Halves::Rows => tile.first_row + self.rank * TILE_ROWS,
            Halves::Matrices => tile.first_row,
        }
    }

    /// Returns the items of the matrices that this CTA loads, in order. The arguments are one item per matrix of a
    /// group.
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
    /// Number of k-blocks of a tile.
    #[inline(always)]
    const fn k_blocks(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }

    /// Number of MMAs along a k-block. The last k-block may need fewer than the others.
    #[inline(always)]
    const fn mmas(&self, k_block: u32) -> u32 {
        let left = (self.k - k_block * K_BLOCK).div_ceil(MMA_K);
        if left < MMAS_PER_K_BLOCK { left } else { MMAS_PER_K_BLOCK }
    }

    /// Bytes from the scales of 128 rows to the scales of the next 128 rows.
    #[inline(always)]
    const fn scale_stride(&self) -> u64 {
        self.k.div_ceil(MMA_K) as u64 * SCALE_TILE_BYTES as u64
    }
}

impl Tile {
    /// Number of scale tiles that contain the tile's tokens, starting with the scale tile of `first_token`.
    #[inline(always)]
    const fn token_scale_tiles(&self) -> u32 {
        (self.first_token % SCALE_TILE_ROWS + self.tokens).div_ceil(SCALE_TILE_ROWS)
    }
}
