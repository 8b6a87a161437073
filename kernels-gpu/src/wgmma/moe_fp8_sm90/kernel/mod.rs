//! How the layer's products with tokens in e4m3 work on Hopper.
//!
//! A block asks for its tiles as it goes. Its first warp finds out what a tile is, writes it down for the others, and loads weights.
//! A second one loads tokens, which lie sorted, a bulk copy a k-block. Two warpgroups decode weights in registers, by a table that the
//! block makes first, and multiply.
//!
//! ```text
//! lists ─ a warp ─▶ tiles ────────────────────┐
//! weights ─ the same ─────────▶ stages ──┐    │
//! tokens ─ a second warp ─────▶ buffers ─┴─ warpgroups ─▶ C
//! ```

mod multiply;
mod table;
mod tokens;
mod weights;
mod write;

use cuda_std::{
    fence::fence_mbarrier_init,
    kernel,
    mbarrier::{MBARRIER_BYTES, Mbarrier},
    setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc},
    shared::{SharedAddress, dynamic_shared_address},
    thread,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

use crate::{
    decoding::{Registers, TILE_BYTES, TILE_SLOTS, TURN_BARRIERS, WARPS},
    ring::{Ring, ring_bytes},
    wgmma::{
        PingPong, Tiles,
        moe_fp8_sm90::abi::{INSTANCES, Index, Instance, Launch, SCALE_SLOTS, TABLE_BYTES, instances},
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
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            // SAFETY: the contract is this function's too.
            unsafe {
                Product::<{ Index::$entry as usize }, { multiply::registers(INSTANCE.tile_tokens) }>::run(launch)
            }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`], whose threads that multiply have `R` sums.
struct Product<const INDEX: usize, const R: usize> {
    launch: Launch,
    shared: SharedAddress,
}

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The warps of the first warpgroup that load: weights and tokens.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: buffers, stages, the table, scales, tiles, barriers. These are offsets from its start.
    const STAGES: u32 = Self::INSTANCE.buffers * Self::INSTANCE.buffer_bytes();
    const TABLE: u32 = Self::STAGES + Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    const SCALES: u32 = Self::TABLE + TABLE_BYTES;
    const TILES: u32 = Self::SCALES + SCALE_SLOTS * Self::INSTANCE.scale_bytes();
    const STAGE_BARRIERS: u32 = Self::TILES + TILE_SLOTS * TILE_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TILE_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const SCALE_BARRIERS: u32 = Self::TILE_BARRIERS + ring_bytes(TILE_SLOTS);
    const TURN_BARRIERS: u32 = Self::SCALE_BARRIERS + ring_bytes(SCALE_SLOTS);
    const END: u32 = Self::TURN_BARRIERS + if Self::INSTANCE.ping_pong() { TURN_BARRIERS * MBARRIER_BYTES } else { 0 };

    /// The stages of weights. One is full when the warp that loads and its copies have arrived, and empty when every warp that
    /// multiplies has.
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// The buffers of tokens, full and empty as stages are.
    fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// The scales of tiles, full and empty as stages are.
    fn scales(&self) -> Ring {
        Ring::new(self.shared + Self::SCALE_BARRIERS, SCALE_SLOTS)
    }

    /// What is written down of tiles.
    fn tiles(&self) -> Tiles {
        Tiles::new(self.shared + Self::TILE_BARRIERS, self.shared + Self::TILES)
    }

    /// The barriers of turns.
    fn turn_barriers(&self) -> Mbarrier {
        Mbarrier::at(self.shared + Self::TURN_BARRIERS)
    }

    /// The address of the stage that a ring stands at.
    fn stage(&self, stages: Ring) -> SharedAddress {
        self.shared + Self::STAGES + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// The address of the buffer that a ring stands at, a multiple of 1024.
    fn buffer(&self, buffers: Ring) -> SharedAddress {
        self.shared + buffers.index() * Self::INSTANCE.buffer_bytes()
    }

    /// The address of the scales that a ring stands at.
    fn tile_scales(&self, scales: Ring) -> SharedAddress {
        self.shared + Self::SCALES + scales.index() * Self::INSTANCE.scale_bytes()
    }

    /// Rows of C, if the host knows them; else 0. A gated product's are in lists.
    fn known_rows(&self) -> u32 {
        if Self::INSTANCE.matrices == 2 { 0 } else { self.launch.rows }
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let this = Self { launch, shared: dynamic_shared_address() };
        // SAFETY: barriers have places of their own in shared memory, and are initialized before any thread passes
        // `sync_threads`; so is the table. Every thread of the block takes part in what the block does together, and every thread
        // of a warpgroup in what the warpgroup does together; each role is one warp's or one warpgroup's.
        unsafe {
            if thread::thread_idx_x() == 0 {
                this.stages().init(1, Self::CONSUMER_WARPS);
                this.buffers().init(1, Self::CONSUMER_WARPS);
                this.scales().init(1, Self::CONSUMER_WARPS);
                this.tiles().init(1 + Self::CONSUMER_WARPS);
                if Self::INSTANCE.ping_pong() {
                    PingPong::init(this.turn_barriers());
                }
                fence_mbarrier_init();
            }
            table::make(this.shared + Self::TABLE);
            thread::sync_threads();
            // The same value in all lanes; through the shuffle the compiler knows that it is.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp < WARPS {
                if Self::INSTANCE.ping_pong() {
                    setmaxnreg_dec::<{ Registers::OF_TWO_CONSUMERS.producer }>();
                } else {
                    setmaxnreg_dec::<{ Registers::OF_FOUR_CONSUMERS.producer }>();
                }
                match warp {
                    Self::WEIGHT_WARP => this.load_weights(),
                    Self::TOKEN_WARP => this.load_tokens(),
                    _ => {}
                }
            } else {
                if Self::INSTANCE.ping_pong() {
                    setmaxnreg_inc::<{ Registers::OF_TWO_CONSUMERS.consumer }>();
                } else {
                    setmaxnreg_inc::<{ Registers::OF_FOUR_CONSUMERS.consumer }>();
                }
                this.multiply(warp / WARPS - 1);
            }
        }
    }
}
