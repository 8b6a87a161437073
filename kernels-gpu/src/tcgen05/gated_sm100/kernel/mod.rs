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
//! these MMAs, while the tensor core executes later ones. Instances with [`Instance::one_set`] rely on CUTLASS's order,
//! for a comparison on a GPU.
//!
//! A tile of tokens that starts inside of a scale tile passes the column at which its 32 tokens begin. The manual only
//! requires this address to be a whole column ("4-byte aligned sub-column", "Layout of the Scale Factor B Matrix for
//! scale_vec::4X"). CUTLASS starts at every second column, for N of 64 and 192. No known kernel starts at an odd
//! column, so the host plans a tile of this kind only on request.
//!
//! # Weights before tokens
//!
//! With [`Instance::early`], the weights of all stages are on their way while the grid before still makes the tokens.
//! A stage is full when both have arrived.
//!
//! [`Halves::Matrices`]: crate::tcgen05::gated_sm100::abi::Halves::Matrices
//! [`Instance::blocks`]: crate::tcgen05::gated_sm100::abi::Instance::blocks
//! [`Instance::early`]: crate::tcgen05::gated_sm100::abi::Instance::early
//! [`Instance::scale_sets`]: crate::tcgen05::gated_sm100::abi::Instance::scale_sets
//! [`Instance::splits`]: crate::tcgen05::gated_sm100::abi::Instance::splits
//! [`Instance::one_set`]: crate::tcgen05::gated_sm100::abi::Instance::one_set

mod load;
mod multiply;
mod sm100;
mod store;
mod work;

use core::ops::Range;

use cuda_std::{
    cluster::{arrive_cluster_relaxed, cluster_rank, wait_cluster},
    fence::fence_mbarrier_init,
    mbarrier::{Mbarrier, mbarrier_init},
    shared::{dynamic_shared_address, ld_shared_b32},
    tcgen05::{
        TmemAddress, tcgen05_alloc, tcgen05_dealloc, tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync,
        tcgen05_relinquish_alloc_permit,
    },
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, sync_warp},
};

use self::{
    multiply::Multiplier,
    sm100::{BEGUN, FULL, LEFT},
    store::Epilogue,
};
pub use self::{
    sm100::Sm100,
    work::{Placed, Sums, Work},
};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    nvfp4_rows::K_BLOCK,
    ring::Ring,
    tcgen05::gated_sm100::abi::{Group, MMA_K, MMAS_PER_K_BLOCK, Roles, Tile},
};

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
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
            if BLOCKS > 1 {
                arrive_cluster_relaxed();
            }
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
            // Both CTAs of a pair must have started before one of them allocates for both (PTX ISA, "tcgen05.alloc").
            if BLOCKS > 1 {
                wait_cluster();
            }
            if warp == Self::MMA_WARP {
                tcgen05_alloc::<BLOCKS>(block.shared + Self::TMEM_ADDRESS, Self::TMEM_COLUMNS);
                tcgen05_relinquish_alloc_permit::<BLOCKS>();
                tcgen05_fence_before_thread_sync();
            }
            if matches!(Self::INSTANCE.roles, Roles::Specialized) && loads {
                Self::arrive::<BEGUN>();
                if Self::INSTANCE.early {
                    block.load_early(stages);
                } else {
                    W::wait();
                    let (tiles, first) = match first {
                        Some(first) => first,
                        None => block.first_tile(),
                    };
                    block.load_tiles(stages, maps, tiles, first);
                }
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
        // same lanes has the same leader), and it takes the k-blocks in order. The whole warp takes the tiles. `drain`
        // keeps this CTA until the other CTA of the pair has arrived here.
        unsafe {
            let elected = elect_sync(ALL_LANES);
            let (mut next, mut loaded) = (first, u32::from(W::AT_ONCE));
            let mut together = false;
            while let Some((tile, group)) = next {
                if elected {
                    let group = W::placed(group);
                    self.acquire_maps(&mut maps, &tile, &group);
                    let Range { start, end } = self.k_blocks(&group);
                    for k_block in start + loaded..end {
                        stages.wait_empty();
                        self.load(&mut stages, &tile, &group, k_block, together);
                        // If K is split, few k-blocks are left at this point.
                        together |= BLOCKS > 1 && Self::INSTANCE.splits == 1 && stages.index() == 0;
                    }
                }
                sync_warp(ALL_LANES);
                (next, loaded) = (tiles.next(), 0);
            }
            if elected {
                stages.drain();
            }
        }
    }

    /// Same as [`Self::load_tiles`], for an instance with [`Instance::early`]: fills all stages with weights, waits for
    /// earlier grids, and then adds the tokens.
    ///
    /// # Safety
    /// The contract in `mod.rs` of the kernel's folder holds. The loading warp calls this, after it has initialized the
    /// barriers. `stages` is at the first stage.
    #[inline(always)]
    unsafe fn load_early(self, mut stages: Ring<BLOCKS>) {
        const { assert!(BLOCKS == 1 && !W::MAPS_IN_MEMORY || !Self::INSTANCE.early) };
        // SAFETY: one thread is elected, and the whole warp takes the tiles. All stages are empty at first, so the first
        // ones need no wait. Both iterations have the same tiles and k-blocks in the same order, so a stage's tokens
        // follow its weights. The contract guarantees that tiles can be found before the wait, and that earlier grids
        // write no weights.
        unsafe {
            let elected = elect_sync(ALL_LANES);
            let (mut ahead, mut begun) = (stages, 0);
            for (tile, group) in self.tiles() {
                let group = W::placed(group);
                for k_block in self.k_blocks(&group) {
                    if begun < Self::STAGES {
                        if elected {
                            self.load_parts::<true, false>(&mut ahead, &tile, &group, k_block, false);
                        }
                        begun += 1;
                    }
                }
                sync_warp(ALL_LANES);
                if begun == Self::STAGES {
                    break;
                }
            }
            W::wait();
            for (tile, group) in self.tiles() {
                if elected {
                    let group = W::placed(group);
                    for k_block in self.k_blocks(&group) {
                        if begun > 0 {
                            self.load_parts::<false, true>(&mut stages, &tile, &group, k_block, false);
                            begun -= 1;
                        } else {
                            stages.wait_empty();
                            self.load(&mut stages, &tile, &group, k_block, false);
                        }
                    }
                }
                sync_warp(ALL_LANES);
            }
            if elected {
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
        // SAFETY: one thread is elected to multiply, whole warps take tiles and run the epilogue, and each role takes
        // the same tiles and k-blocks in the same order.
        unsafe {
            if warp == Self::MMA_WARP {
                let elected = elect_sync(ALL_LANES);
                let mut multiplier = Multiplier::new(self);
                for (tile, group) in self.tiles() {
                    if elected {
                        let group = W::placed(group);
                        if self.rank > 0 {
                            multiplier.report(&group);
                        } else {
                            multiplier.begin();
                            for k_block in self.k_blocks(&group) {
                                multiplier.multiply(&tile, &group, k_block);
                            }
                            multiplier.end();
                        }
                    }
                    sync_warp(ALL_LANES);
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
