//! The Hopper kernel.
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 exactly ([`decode`](crate::decoding::decode)). A and B are
//! swapped: weights are on the tensor core's M, tokens on its N. All tiles of the same tokens need these tokens
//! decoded. So a small grid decodes the tokens once, to global memory, before the grid that multiplies ([`tokens`]).
//! With so few tokens that this would take longer, each CTA decodes them itself.
//!
//! In the grid that multiplies, one warp loads weights and one warp loads decoded tokens, both by bulk copies. Two or
//! four warpgroups decode weights in registers, directly to the A fragments of `wgmma`, and multiply. Each of them has
//! 64 rows of both panels, or 32 in a narrow tile. Two warpgroups take turns (ping-pong): one multiplies while the
//! other one decodes. A CTA computes its tiles in sequence, and the loading warps run ahead by as much as the buffers
//! hold.
//!
//! ```text
//! weights ─ a warp ───────────────────────▶ stages ──┐
//! tokens ─ previous grid ─▶ f16 ─ a warp ─▶ buffers ─┴─ warpgroups ─▶ C
//! ```
//!
//! The grid may start while the previous grid still runs (programmatic dependent launch). The first k-block of weights
//! is loaded at once. Tokens and all other weights are loaded after the previous grid has ended.
//!
//! A product may sum over K in any order. So A and B permute K alike ([`order`]), and no element moves to another
//! thread.

mod load;
mod multiply;
mod order;
pub mod tokens;

use cuda_std::{
    fence::fence_mbarrier_init,
    global::{GlobalAddress, prefetch_l1},
    kernel,
    mbarrier::{MBARRIER_BYTES, Mbarrier},
    shared::{SharedAddress, dynamic_shared_address},
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, warp_shuffle_idx},
};

use crate::{
    decoding::{TURN_BARRIERS, WARPS},
    ring::{Ring, ring_bytes},
    wgmma::{
        PingPong,
        gated_sm90::abi::{Group, INSTANCES, Index, Instance, K_BLOCK, Launch, SLAB_ROWS, Tile, instances},
        give_registers, take_registers,
    },
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
            unsafe { Sm90::<{ Index::$entry as usize }>::run::<{ INSTANCES[Index::$entry as usize].shape().parts() }>(launch) }
        }
    )*};
}
instances!(entries);

/// Kernel of the instance `INSTANCES[INDEX]`.
struct Sm90<const INDEX: usize>;

impl<const INDEX: usize> Sm90<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The first warpgroup loads: its first warp weights, its second warp decoded tokens. If the CTA decodes tokens
    // itself, all its warps except the first decode. The other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: stages, buffers, barriers. These are offsets from its start, and within a stage from the start of
    // the stage. A slab lies at a multiple of 512, as its swizzle requires.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS: u32 = Self::INSTANCE.stages * Self::STAGE_BYTES;
    const BUFFER_BYTES: u32 = Self::INSTANCE.shape().buffer_bytes();
    const STAGE_BARRIERS: u32 = Self::BUFFERS + Self::INSTANCE.buffers * Self::BUFFER_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TURN_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const END: u32 = Self::TURN_BARRIERS + TURN_BARRIERS * MBARRIER_BYTES;
    const PING_PONG: bool = Self::INSTANCE.shape().ping_pong();
    const fn panel(panel: u32) -> u32 {
        panel * Self::INSTANCE.panel_bytes()
    }

    /// Stages of weights. A stage is full after the loading warp and its copies have arrived, and empty after every
    /// warp that multiplies has arrived.
    fn stages(shared: SharedAddress) -> Ring {
        Ring::new(shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of decoded tokens, full and empty like stages.
    fn buffers(shared: SharedAddress) -> Ring {
        Ring::new(shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// Address of the current stage.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        shared + stages.index() * Self::STAGE_BYTES
    }

    /// Address of the current buffer of tokens.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        shared + Self::BUFFERS + buffers.index() * Self::BUFFER_BYTES
    }

    /// Barriers of turns.
    fn turn_barriers(shared: SharedAddress) -> Mbarrier {
        Mbarrier::at(shared + Self::TURN_BARRIERS)
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    unsafe fn run<const P: usize>(launch: Launch) {
        const { Self::CHECK };
        let shared = dynamic_shared_address();
        // SAFETY: the barriers have their own places in shared memory, and are initialized before any thread passes
        // `sync_threads`. Every thread of the CTA takes part in the CTA's collective operations, and every thread of a
        // warpgroup in the warpgroup's. Each role belongs to one thread, one warp or one warpgroup.
        unsafe {
            let tiles = Tiles::new(launch);
            if thread::thread_idx_x() == 0 {
                Self::stages(shared).init(1, Self::CONSUMER_WARPS);
                Self::buffers(shared).init(1, Self::CONSUMER_WARPS);
                if Self::PING_PONG {
                    PingPong::init(Self::turn_barriers(shared));
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The value is the same in all lanes; the shuffle shows this to the compiler.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp < WARPS {
                give_registers(Self::INSTANCE.shape());
                if warp == Self::WEIGHT_WARP {
                    if elect_sync(ALL_LANES) {
                        Self::load_weights(tiles, shared);
                    }
                } else if Self::INSTANCE.decodes_tokens() {
                    Self::decode_tokens(tiles, shared, warp);
                } else if warp == Self::TOKEN_WARP && elect_sync(ALL_LANES) {
                    Self::load_tokens(tiles, shared);
                }
            } else {
                take_registers(Self::INSTANCE.shape());
                Self::multiply::<P>(launch.output, tiles, shared, warp / WARPS - 1);
            }
        }
    }
}

/// Tiles of this CTA.
///
/// This is a cursor instead of an iterator: a role that needs a tile both before and after its k-blocks reads the tile
/// twice, which is cheaper than keeping it in registers.
struct Tiles {
    /// Address of the array.
    tiles: u64,
    /// Index of the current tile in the array.
    index: u32,
}

impl Tiles {
    /// Returns the cursor at the CTA's first tile, and prefetches the tile.
    ///
    /// # Safety
    /// The array has a tile for every CTA, and each tile's `next` is 0 or the index of another tile. Nobody writes the
    /// array while the kernel runs.
    #[inline(always)]
    unsafe fn new(launch: Launch) -> Self {
        let this = Self { tiles: launch.tiles, index: thread::block_idx_x() };
        // SAFETY: the array has a tile for every CTA.
        unsafe { this.prefetch(this.index) };
        this
    }

    /// Reads the current tile.
    ///
    /// # Safety
    /// [`Self::advance`] has not returned `false`.
    #[inline(always)]
    unsafe fn read(&self) -> Tile {
        // SAFETY: the index is inside the array, and nobody writes the array while the kernel runs: the caller of `new`
        // guarantees both.
        unsafe { *(self.tiles as *const Tile).add(self.index as usize) }
    }

    /// Advances to the tile `next`, the [`Tile::next`] of the current tile. Returns whether there is one.
    #[inline(always)]
    const fn advance(&mut self, next: u32) -> bool {
        self.index = next;
        next != 0
    }

    /// Prefetches a tile.
    ///
    /// # Safety
    /// The array has a tile at this index.
    #[inline(always)]
    unsafe fn prefetch(&self, index: u32) {
        let tile = GlobalAddress::new(self.tiles) + u64::from(index) * size_of::<Tile>() as u64;
        // SAFETY: the caller guarantees that the array has this tile; the addresses are its first and its last byte.
        unsafe {
            prefetch_l1(tile);
            prefetch_l1(tile + (size_of::<Tile>() as u64 - 1));
        }
    }
}

impl Tile {
    /// Index of the half of its slabs' rows that a narrow tile uses.
    #[inline(always)]
    const fn half_of_slab(&self) -> u32 {
        self.first_column % SLAB_ROWS / (SLAB_ROWS / 2)
    }
}

impl Group {
    /// Number of k-blocks of a tile.
    #[inline(always)]
    const fn k_blocks(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }
}
