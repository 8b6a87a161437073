//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * Computes what [`Group`] says for every tile of the list, in one launch of as many blocks as the list is dealt out to,
//!   [`Instance::threads`] each, [`Instance::shared_bytes`] of dynamic shared memory. Tiles cover each group's C once. M, N
//!   and K may end anywhere in a tile.
//! * Addresses and tensor maps are as [`Group`] says. Scales are finite (never 0x7f) and have no sign, in the
//!   padding of the scale layout too: it meets values that are zeros.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Products are exact; the tensor core adds them up in f32. α·sum and α·2²⁸ must be finite in f32. Overflow of the output
//!   format gives ±inf.
//!
//! # How
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 ([`decode`]). Weights lie on the tensor core's M, tokens on its
//! N. One warp loads both, packed as they are, by bulk copies; the others of its warpgroups decode tokens, for all; two or four
//! warpgroups decode weights in registers, straight into the A fragments of `wgmma`, and multiply, each 64 rows of both
//! panels. A block computes its tiles one after the other, and each role is ahead of the next by as much as the buffers
//! between them hold:
//!
//! ```text
//! global ─ load warp ─▶ stages ─┬─ token warps ─▶ buffers ─┐
//!                               └──────────────────────────┴─ warpgroups ─▶ C
//! ```
//!
//! A product sums over K in any order, so A and B permute it alike ([`order`]), and no element ever changes its thread.

// Indices, not iterators: a loop over indices unrolls, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

mod decode;
mod load;
mod multiply;
mod order;
mod tokens;

use cuda_std::{
    fence::fence_mbarrier_init,
    kernel,
    setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc},
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync, warp_shuffle_idx},
};

use crate::{
    abi::sm90::{Group, Instance, Launch, PANELS, SCALE_TILE_BYTES, SCALE_TILE_K, STEP, Tile, WARPGROUP},
    ring::{Ring, ring_bytes},
    sm90_instances,
};

/// Registers of a thread of the producers and of the consumers after `setmaxnreg`, where there are four warpgroups of
/// consumers and where there are two.
const FOUR_CONSUMERS: (u32, u32) = (56, 104);
const TWO_CONSUMERS: (u32, u32) = (40, 216);

/// Warps of a warpgroup.
const WARPS: u32 = WARPGROUP / WARP_SIZE;

macro_rules! entries {
    ($($entry:ident = $matrices:literal, $tile_tokens:literal, $($budget:literal),*;)*) => {$(
        /// An [`Instance`].
        ///
        /// # Safety
        /// The module's contract.
        #[kernel(threads = Instance::of($matrices, $tile_tokens).threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the caller's promise.
            unsafe { Sm90::<$matrices, $tile_tokens>::run(launch) }
        }
    )*};
}
sm90_instances!(entries);

/// The kernel of one [`Instance`].
struct Sm90<const MATRICES: u32, const TILE_TOKENS: u32>;

impl<const MATRICES: u32, const TILE_TOKENS: u32> Sm90<MATRICES, TILE_TOKENS> {
    const INSTANCE: Instance = Instance::of(MATRICES, TILE_TOKENS);
    const CHECK: () = {
        Self::INSTANCE.check();
        assert!(Self::END == Self::INSTANCE.shared_bytes());
        // `setmaxnreg` shares out what the block was launched with: as many for each thread as a multiprocessor's 65,536
        // allow, in eights.
        let Instance { producers, consumers, .. } = Self::INSTANCE;
        let launched = 65_536 / Self::INSTANCE.threads() / 8 * 8 * (producers + consumers);
        let (producer, consumer) = Self::REGISTERS;
        assert!(producers * producer + consumers * consumer <= launched);
    };
    const REGISTERS: (u32, u32) = if Self::INSTANCE.consumers == 4 { FOUR_CONSUMERS } else { TWO_CONSUMERS };

    // Warps: those that decode tokens, the one that loads, those of the warpgroups that multiply.
    const LOAD_WARP: u32 = Self::INSTANCE.producers * WARPS - 1;
    const TOKEN_WARPS: u32 = Self::LOAD_WARP;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: stages, buffers, barriers. Offsets from its start; inside of a stage, from the stage's. A swizzle wants
    // values at multiples of 512.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS: u32 = Self::INSTANCE.stages * Self::STAGE_BYTES;
    const BUFFER_BYTES: u32 = Self::INSTANCE.buffer_bytes();
    const STAGE_BARRIERS: u32 = Self::BUFFERS + Self::INSTANCE.buffers * Self::BUFFER_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const END: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const fn panel(panel: u32) -> u32 {
        panel * Self::INSTANCE.panel_bytes()
    }
    const TOKENS: u32 = Self::panel(PANELS);
    const TOKEN_SCALES: u32 = Self::TOKENS + Self::INSTANCE.token_bytes();

    /// Stages: full when the load warp and its copies have arrived, empty when every warp that reads has.
    const fn stages(shared: u32) -> Ring {
        Ring::new(shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of decoded tokens: full when every token warp has arrived, empty when every warp that multiplies has.
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
            if thread::thread_idx_x() == 0 {
                Self::stages(shared).init(1, Self::TOKEN_WARPS + Self::CONSUMER_WARPS);
                Self::buffers(shared).init(Self::TOKEN_WARPS, Self::CONSUMER_WARPS);
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The same in all lanes, and known to be.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp <= Self::LOAD_WARP {
                if const { Self::INSTANCE.consumers == 4 } {
                    setmaxnreg_dec::<{ FOUR_CONSUMERS.0 }>();
                } else {
                    setmaxnreg_dec::<{ TWO_CONSUMERS.0 }>();
                }
                if warp == Self::LOAD_WARP {
                    if elect_sync(ALL_LANES) {
                        Self::load(launch, shared);
                    }
                } else {
                    Self::decode_tokens(launch, shared, warp);
                }
            } else {
                if const { Self::INSTANCE.consumers == 4 } {
                    setmaxnreg_inc::<{ FOUR_CONSUMERS.1 }>();
                } else {
                    setmaxnreg_inc::<{ TWO_CONSUMERS.1 }>();
                }
                Self::multiply(launch, shared, warp / WARPS - Self::INSTANCE.producers);
            }
        }
    }
}

/// This block's tiles.
///
/// A cursor, not an iterator: what a role needs of a tile both before and after its steps is read twice, which is cheaper
/// than the registers to keep it in.
struct Tiles {
    launch: Launch,
    next: u32,
    end: u32,
}

impl Tiles {
    #[inline(always)]
    unsafe fn new(launch: Launch) -> Self {
        let start = |block: u32| {
            // SAFETY: the contract: one more start than blocks.
            unsafe { *(launch.starts as *const u32).add(block as usize) }
        };
        let block = thread::block_idx_x();
        Self { launch, next: start(block), end: start(block + 1) }
    }

    /// Whether there is a tile at hand.
    #[inline(always)]
    const fn more(&self) -> bool {
        self.next < self.end
    }

    /// The tile at hand and its group.
    #[inline(always)]
    unsafe fn read(&self) -> (Tile, &'static Group) {
        // SAFETY: inside of the list, whose tiles name groups of the array; neither changes while the kernel runs.
        unsafe {
            let tile = *(self.launch.tiles as *const Tile).add(self.next as usize);
            (tile, &*(self.launch.groups as *const Group).add(tile.group as usize))
        }
    }

    #[inline(always)]
    const fn advance(&mut self) {
        self.next += 1;
    }
}

impl Group {
    /// Stages that a tile takes.
    #[inline(always)]
    const fn steps(&self) -> u32 {
        self.k.div_ceil(STEP)
    }

    /// Tiles of the scale layout along K.
    #[inline(always)]
    const fn scale_tiles(&self) -> u32 {
        self.k.div_ceil(SCALE_TILE_K)
    }

    /// Bytes from the scales of 128 rows to those of the next.
    #[inline(always)]
    const fn scale_stride(&self) -> u64 {
        self.scale_tiles() as u64 * SCALE_TILE_BYTES as u64
    }
}
