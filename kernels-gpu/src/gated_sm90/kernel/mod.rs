//! How the Hopper kernel works.
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 ([`decode`]). Weights lie on the tensor core's M, tokens on its
//! N. Every tile of columns multiplies the same tokens: a small grid before decodes them once, to global memory; where they are
//! so few that it would take longer, each block decodes them for itself ([`tokens`]). Of the grid that multiplies, one warp
//! loads weights as they are, and one the decoded tokens, by bulk copies;
//! two or four warpgroups decode weights in registers, straight into the A fragments of `wgmma`, and multiply, each 64 rows
//! of both panels. A block computes its tiles one after the other, and the warps that load are ahead by as much as the buffers
//! hold. It may begin while the grid before still runs: only tokens wait for that, and all weights but the first.
//!
//! ```text
//! weights ─ a warp ─────────────────────▶ stages ──┐
//! tokens ─ grid before ─▶ f16 ─ a warp ─▶ buffers ─┴─ warpgroups ─▶ C
//! ```
//!
//! A product sums over K in any order, so A and B permute it alike ([`order`]), and no element ever changes its thread.

// Indices, not iterators: a loop over indices unrolls, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

mod decode;
mod load;
mod multiply;
mod order;
pub mod tokens;

use cuda_std::{
    fence::fence_mbarrier_init,
    global::prefetch_l1,
    kernel,
    mbarrier::MBARRIER_BYTES,
    setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc},
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, warp_shuffle_idx},
};

use self::multiply::PingPong;
use crate::{
    gated_sm90::abi::{Group, INSTANCES, Index, Instance, K_BLOCK, Launch, Registers, Tile, WARPGROUP, instances},
    ring::{Ring, ring_bytes},
};

/// Warps of a warpgroup.
const WARPS: u32 = WARPGROUP / WARP_SIZE;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the contract is this function's too.
            unsafe { Sm90::<{ Index::$entry as usize }>::run(launch) }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`].
struct Sm90<const INDEX: usize>;

impl<const INDEX: usize> Sm90<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // Warps: of the warpgroup that loads the first loads weights, the second tokens, or the others decode them; those of the
    // other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: stages, buffers, barriers. Offsets from its start; inside of a stage, from the stage's. A swizzle wants
    // values at multiples of 512.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS: u32 = Self::INSTANCE.stages * Self::STAGE_BYTES;
    const BUFFER_BYTES: u32 = Self::INSTANCE.buffer_bytes();
    const STAGE_BARRIERS: u32 = Self::BUFFERS + Self::INSTANCE.buffers * Self::BUFFER_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TURN_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const END: u32 = Self::TURN_BARRIERS + Instance::TURN_BARRIERS * MBARRIER_BYTES;
    const PING_PONG: bool = Self::INSTANCE.ping_pong();
    const fn panel(panel: u32) -> u32 {
        panel * Self::INSTANCE.panel_bytes()
    }

    /// Stages of weights: full when the warp that loads and its copies have arrived, empty when every warp that multiplies has.
    const fn stages(shared: u32) -> Ring {
        Ring::new(shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of decoded tokens: likewise.
    const fn buffers(shared: u32) -> Ring {
        Ring::new(shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// The address of a ring's stage.
    const fn stage(shared: u32, stages: Ring) -> u32 {
        shared + stages.index() * Self::STAGE_BYTES
    }

    /// The address of a ring's buffer.
    const fn buffer(shared: u32, buffers: Ring) -> u32 {
        shared + Self::BUFFERS + buffers.index() * Self::BUFFER_BYTES
    }

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let shared = dynamic_shared_address();
        // SAFETY: barriers are made before anyone uses them; every thread takes part in what the block does together, every
        // thread of a warpgroup in what that does.
        unsafe {
            let tiles = Tiles::new(launch);
            if thread::thread_idx_x() == 0 {
                Self::stages(shared).init(1, Self::CONSUMER_WARPS);
                Self::buffers(shared).init(1, Self::CONSUMER_WARPS);
                if Self::PING_PONG {
                    PingPong::init(shared + Self::TURN_BARRIERS);
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The same in all lanes, and known to be.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp < WARPS {
                // The instance's registers; the instruction takes a constant.
                if Self::PING_PONG {
                    setmaxnreg_dec::<{ Registers::OF_TWO_CONSUMERS.producer }>();
                } else {
                    setmaxnreg_dec::<{ Registers::OF_FOUR_CONSUMERS.producer }>();
                }
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
                if Self::PING_PONG {
                    setmaxnreg_inc::<{ Registers::OF_TWO_CONSUMERS.consumer }>();
                } else {
                    setmaxnreg_inc::<{ Registers::OF_FOUR_CONSUMERS.consumer }>();
                }
                Self::multiply(launch.output, tiles, shared, warp / WARPS - 1);
            }
        }
    }
}

/// This block's tiles.
///
/// A cursor, not an iterator: what a role needs of a tile both before and after its steps is read twice, which is cheaper
/// than the registers to keep it in.
struct Tiles {
    /// Address of the array.
    tiles: u64,
    index: u32,
}

impl Tiles {
    /// At the block's first tile, which is asked for.
    #[inline(always)]
    unsafe fn new(launch: Launch) -> Self {
        let this = Self { tiles: launch.tiles, index: thread::block_idx_x() };
        // SAFETY: the contract: a tile for every block.
        unsafe { this.prefetch(this.index) };
        this
    }

    /// The tile at hand.
    #[inline(always)]
    unsafe fn read(&self) -> Tile {
        // SAFETY: inside of the array, which does not change while the kernel runs.
        unsafe { *(self.tiles as *const Tile).add(self.index as usize) }
    }

    /// Goes on to what the tile at hand has for its next one. Returns whether there is one.
    #[inline(always)]
    const fn advance(&mut self, next: u32) -> bool {
        self.index = next;
        next != 0
    }

    /// Asks for a tile ahead of its use.
    #[inline(always)]
    unsafe fn prefetch(&self, index: u32) {
        let tile = self.tiles + u64::from(index) * size_of::<Tile>() as u64;
        // SAFETY: the caller's promise: a tile of the array.
        unsafe {
            prefetch_l1(tile);
            prefetch_l1(tile + size_of::<Tile>() as u64 - 1);
        }
    }
}

impl Group {
    /// Stages that a tile takes.
    #[inline(always)]
    const fn steps(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }
}
