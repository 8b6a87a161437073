//! Products of an MoE layer with e4m3 tokens on Hopper.
//!
//! A CTA takes its tiles one by one, by ticket. Its first warp looks up each tile, writes it to shared memory for the
//! other warps, and loads its weights. A second warp loads the sorted tokens, one bulk copy per k-block. Two or four
//! warpgroups decode weights in registers, with a table that the CTA makes first, and multiply.
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
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
            unsafe {
                Product::<{ Index::$entry as usize }, { multiply::registers(INSTANCE.tile_tokens) }>::run(launch)
            }
        }
    )*};
}
instances!(entries);

/// Kernel of the instance `INSTANCES[INDEX]`, where a thread that multiplies has `R` sums.
struct Product<const INDEX: usize, const R: usize> {
    launch: Launch,
    shared: SharedAddress,
}

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // Warps of the first warpgroup that load weights and tokens.
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

    /// Stages of weights. A stage is full after the loading warp and its copies have arrived, and empty after every
    /// warp that multiplies has arrived.
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of tokens, full and empty like stages.
    fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// Scales of tiles, full and empty like stages.
    fn scales(&self) -> Ring {
        Ring::new(self.shared + Self::SCALE_BARRIERS, SCALE_SLOTS)
    }

    /// Tiles that the first warp writes for the others.
    fn tiles(&self) -> Tiles {
        Tiles::new(self.shared + Self::TILE_BARRIERS, self.shared + Self::TILES)
    }

    /// Barriers of turns.
    fn turn_barriers(&self) -> Mbarrier {
        Mbarrier::at(self.shared + Self::TURN_BARRIERS)
    }

    /// Address of the current stage.
    fn stage(&self, stages: Ring) -> SharedAddress {
        self.shared + Self::STAGES + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// Address of the current buffer of tokens, a multiple of 1024.
    fn buffer(&self, buffers: Ring) -> SharedAddress {
        self.shared + buffers.index() * Self::INSTANCE.buffer_bytes()
    }

    /// Address of the current tile's scales.
    fn tile_scales(&self, scales: Ring) -> SharedAddress {
        self.shared + Self::SCALES + scales.index() * Self::INSTANCE.scale_bytes()
    }

    /// Number of rows of C if the host knows it, or 0. The rows of a gated product are in lists.
    fn known_rows(&self) -> u32 {
        if Self::INSTANCE.matrices == 2 { 0 } else { self.launch.rows }
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let this = Self { launch, shared: dynamic_shared_address() };
        // SAFETY: the barriers have their own places in shared memory. The barriers and the table are written before
        // any thread passes `sync_threads`. Every thread of the CTA takes part in the CTA's collective operations, and
        // every thread of a warpgroup in the warpgroup's. Each role belongs to one warp or one warpgroup.
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
            // The value is the same in all lanes; the shuffle shows this to the compiler.
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
