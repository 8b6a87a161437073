//! How the Hopper kernel works.
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 exactly ([`decode`](crate::decoding::decode)). A and B are swapped: weights lie on the
//! tensor core's M, tokens on its N. All tiles of the same tokens need them decoded. So a small grid decodes the tokens once,
//! to global memory, before the grid that multiplies ([`tokens`]). Where they are so few that this would take longer, each
//! block decodes them for itself.
//!
//! In the grid that multiplies, one warp loads weights as they are and one warp loads decoded tokens, both by bulk copies. Two
//! or four warpgroups decode weights in registers, straight into the A fragments of `wgmma`, and multiply; each has 64 rows of
//! both panels, in a narrow tile 32. Two warpgroups take turns (ping-pong): one multiplies while the other decodes. A block computes its tiles one
//! after the other, and the warps that load are ahead by as much as the buffers hold.
//!
//! ```text
//! weights ─ a warp ─────────────────────▶ stages ──┐
//! tokens ─ grid before ─▶ f16 ─ a warp ─▶ buffers ─┴─ warpgroups ─▶ C
//! ```
//!
//! The grid may begin while the one before still runs (programmatic dependent launch). The first k-block of weights is loaded
//! at once; tokens and all other weights wait for the grid before to end.
//!
//! A product may sum over K in any order. So A and B permute K alike ([`order`]), and no element is ever moved to another
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
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the contract is this function's too.
            unsafe { Sm90::<{ Index::$entry as usize }>::run::<{ INSTANCES[Index::$entry as usize].shape().parts() }>(launch) }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`].
struct Sm90<const INDEX: usize>;

impl<const INDEX: usize> Sm90<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The first warpgroup loads: its first warp weights, its second decoded tokens. Where the block decodes tokens itself, all
    // but the first do that. The other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: stages, buffers, barriers. These are offsets from its start, and inside of a stage from the stage's start.
    // A slab lies at a multiple of 512, as its swizzle asks.
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

    /// The stages of weights. One is full when the warp that loads and its copies have arrived, and empty when every warp that
    /// multiplies has.
    fn stages(shared: SharedAddress) -> Ring {
        Ring::new(shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// The buffers of decoded tokens. They are full and empty as stages are.
    fn buffers(shared: SharedAddress) -> Ring {
        Ring::new(shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// The address of the stage that a ring stands at.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        shared + stages.index() * Self::STAGE_BYTES
    }

    /// The address of the buffer that a ring stands at.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        shared + Self::BUFFERS + buffers.index() * Self::BUFFER_BYTES
    }

    /// The barriers of turns.
    fn turn_barriers(shared: SharedAddress) -> Mbarrier {
        Mbarrier::at(shared + Self::TURN_BARRIERS)
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run<const P: usize>(launch: Launch) {
        const { Self::CHECK };
        let shared = dynamic_shared_address();
        // SAFETY: barriers have places of their own in shared memory, and are initialized before any thread passes
        // `sync_threads`. Every thread of the block takes part in what the block does together, and every thread of a
        // warpgroup in what the warpgroup does together; each role is one thread's, one warp's or one warpgroup's.
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
            // The same value in all lanes; through the shuffle the compiler knows that it is.
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

/// This block's tiles.
///
/// It is a cursor, not an iterator: a role that needs something of a tile both before and after its k-blocks reads it twice,
/// which is cheaper than the registers to keep it in.
struct Tiles {
    /// Address of the array.
    tiles: u64,
    /// The current tile's place in it.
    index: u32,
}

impl Tiles {
    /// At the block's first tile, which is prefetched.
    ///
    /// # Safety
    /// The contract: the array has a tile for every block, and each tile's `next` is 0 or the place of another.
    #[inline(always)]
    unsafe fn new(launch: Launch) -> Self {
        let this = Self { tiles: launch.tiles, index: thread::block_idx_x() };
        // SAFETY: the array has a tile for every block.
        unsafe { this.prefetch(this.index) };
        this
    }

    /// The current tile.
    ///
    /// # Safety
    /// [`Self::advance`] has not returned false.
    #[inline(always)]
    unsafe fn read(&self) -> Tile {
        // SAFETY: inside of the array, as `new` has been promised; it does not change while the kernel runs.
        unsafe { *(self.tiles as *const Tile).add(self.index as usize) }
    }

    /// Goes on to the tile that is [`Tile::next`] of the current one. Returns whether there is one.
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
        // SAFETY: the first and the last byte of a tile of the array.
        unsafe {
            prefetch_l1(tile);
            prefetch_l1(tile + (size_of::<Tile>() as u64 - 1));
        }
    }
}

impl Tile {
    /// Which half of its slabs' rows a narrow tile has.
    #[inline(always)]
    const fn half_of_slab(&self) -> u32 {
        self.first_column % SLAB_ROWS / (SLAB_ROWS / 2)
    }
}

impl Group {
    /// The k-blocks of a tile.
    #[inline(always)]
    const fn k_blocks(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }
}
