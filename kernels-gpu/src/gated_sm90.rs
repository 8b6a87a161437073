//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * Computes what [`Group`] says for every tile of the list, in one launch of as many blocks as the list is dealt out to,
//!   [`THREADS`] threads each, [`Instance::shared_bytes`] of dynamic shared memory. Tiles cover each group's C once. M, N
//!   and K may end anywhere in a tile.
//! * Addresses and tensor maps are as [`Group`] says. Scales are finite (never 0x7f) and have no sign; padding of the
//!   scale layout may hold anything.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Products are exact; the tensor core adds them up in f32. α·sum must be finite in f32. Overflow of the output
//!   format gives ±inf.
//!
//! # How
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 ([`decode`]). Weights lie on the tensor core's M, tokens on its
//! N. One warp loads both as they are, by bulk copies; three warps decode tokens, for all; two warpgroups decode
//! weights in registers, straight into the A fragments of `wgmma`, and multiply, each 64 rows of both panels. A block
//! computes its tiles one after the other, and each role is ahead of the next by as much as the buffers between them hold:
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
    abi::sm90::{
        CONSUMERS, Group, Instance, Launch, PANELS, SCALE_TILE_K, SCALE_TILE_BYTES, STEP, THREADS, Tile, WARPGROUP,
    },
    ring::Ring,
    sm90_instances,
};

/// Registers of a thread after `setmaxnreg`, which shares out what the block was launched with: as many for each thread
/// as a multiprocessor's 65,536 allow, in eights.
const PRODUCER_REGISTERS: u32 = 56;
const CONSUMER_REGISTERS: u32 = 224;
const _: () =
    assert!(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65_536 / THREADS / 8 * 8 * (1 + CONSUMERS));

/// Warps of a warpgroup.
const WARPS: u32 = WARPGROUP / WARP_SIZE;

/// The warp that loads; those before it decode tokens.
const LOAD_WARP: u32 = WARPS - 1;

/// Warps that decode tokens.
const TOKEN_WARPS: u32 = LOAD_WARP;

macro_rules! entries {
    ($($entry:ident = $matrices:literal, $tile_tokens:literal, $width_step:literal, $stages:literal, $buffers:literal;)*) => {$(
        /// An [`Instance`].
        ///
        /// # Safety
        /// The module's contract.
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the caller's promise.
            unsafe { Sm90::<$matrices, $tile_tokens, $stages, $buffers>::run(launch) }
        }
    )*};
}
sm90_instances!(entries);

/// The kernel of one [`Instance`].
struct Sm90<const MATRICES: u32, const TILE_TOKENS: u32, const STAGES: u32, const BUFFERS: u32>;

impl<const MATRICES: u32, const TILE_TOKENS: u32, const STAGES: u32, const BUFFERS: u32>
    Sm90<MATRICES, TILE_TOKENS, STAGES, BUFFERS>
{
    const INSTANCE: Instance = Instance::of(MATRICES, TILE_TOKENS);
    const CHECK: () = {
        Self::INSTANCE.check();
        assert!(Self::INSTANCE.stages == STAGES && Self::INSTANCE.buffers == BUFFERS);
        assert!(Self::END == Self::INSTANCE.shared_bytes());
    };

    // Shared memory: stages, buffers, barriers. Offsets from its start; inside of a stage, from the stage's. A swizzle wants
    // values at multiples of 512.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const BUFFERS_AT: u32 = STAGES * Self::STAGE_BYTES;
    const BUFFER_BYTES: u32 = Self::INSTANCE.buffer_bytes();
    const STAGE_BARRIERS: u32 = Self::BUFFERS_AT + BUFFERS * Self::BUFFER_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + Ring::<STAGES>::BYTES;
    const END: u32 = Self::BUFFER_BARRIERS + Ring::<BUFFERS>::BYTES;
    const fn values(panel: u32) -> u32 {
        panel * Instance::PANEL_BYTES
    }
    const TOKENS: u32 = Self::values(PANELS);
    const fn scales(panel: u32) -> u32 {
        Self::TOKENS + Self::INSTANCE.token_bytes() + panel * Instance::SCALE_BYTES
    }
    const TOKEN_SCALES: u32 = Self::scales(PANELS);

    /// Stages: full when the load warp and its copies have arrived, empty when every warp that reads has.
    const fn stages(shared: u32) -> Ring<STAGES> {
        Ring::new(shared + Self::STAGE_BARRIERS)
    }

    /// Buffers of decoded tokens: full when every token warp has arrived, empty when every warp that multiplies has.
    const fn buffers(shared: u32) -> Ring<BUFFERS> {
        Ring::new(shared + Self::BUFFER_BARRIERS)
    }

    /// The address of a ring's stage.
    const fn stage(shared: u32, stages: Ring<STAGES>) -> u32 {
        shared + stages.index() * Self::STAGE_BYTES
    }

    /// The address of a ring's buffer.
    const fn buffer(shared: u32, buffers: Ring<BUFFERS>) -> u32 {
        shared + Self::BUFFERS_AT + buffers.index() * Self::BUFFER_BYTES
    }

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let shared = dynamic_shared_address();
        // SAFETY: barriers are made before anyone uses them; every thread takes part in what the block does together, every
        // thread of a warpgroup in what that does.
        unsafe {
            if thread::thread_idx_x() == 0 {
                Self::stages(shared).init(1, TOKEN_WARPS + CONSUMERS * WARPS);
                Self::buffers(shared).init(TOKEN_WARPS, CONSUMERS * WARPS);
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The same in all lanes, and known to be.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp < WARPS {
                setmaxnreg_dec::<PRODUCER_REGISTERS>();
                if warp == LOAD_WARP {
                    if elect_sync(ALL_LANES) {
                        Self::load(launch, shared);
                    }
                } else {
                    Self::decode_tokens(launch, shared, warp);
                }
            } else {
                setmaxnreg_inc::<CONSUMER_REGISTERS>();
                Self::multiply(launch, shared, warp / WARPS - 1);
            }
        }
    }
}

/// This block's tiles, each with its group.
#[derive(Clone, Copy)]
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
}

impl Iterator for Tiles {
    type Item = (Tile, &'static Group);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.end {
            return None;
        }
        // SAFETY: inside of the list, whose tiles name groups of the array; neither changes while the kernel runs.
        let item = unsafe {
            let tile = *(self.launch.tiles as *const Tile).add(self.next as usize);
            (tile, &*(self.launch.groups as *const Group).add(tile.group as usize))
        };
        self.next += 1;
        Some(item)
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
