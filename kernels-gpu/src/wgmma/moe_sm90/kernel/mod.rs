//! Products of an MoE layer on Hopper, and on GPUs that have `mma.sync` but no `wgmma`.
//!
//! A CTA takes its tiles one by one, by ticket. Its first warp looks up each tile in the lists that an earlier grid
//! wrote, writes the tile to shared memory for the other warps, and loads its weights, by a few bulk copies per stage.
//! If tokens are sorted, a second warp loads them by bulk copies too. Otherwise three warps gather them, 16 bytes per
//! copy, because rows may lie anywhere and bulk copies cannot gather. Up to four warpgroups decode weights in registers
//! and multiply ([`decoding`](crate::decoding)).
//!
//! ```text
//! lists ─ a warp ─▶ tiles ─────────────────────────┐
//! weights ─ the same ─────────▶ stages ──┐         │
//! tokens ─ one warp or three ─▶ buffers ─┴─ warpgroups ─▶ C
//! ```

mod gather;
mod multiply;
mod tokens;
mod weights;

use core::marker::PhantomData;

use cuda_std::{
    fence::fence_mbarrier_init,
    mbarrier::{MBARRIER_BYTES, Mbarrier},
    shared::{SharedAddress, dynamic_shared_address},
    thread,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

use crate::{
    decoding::{Decode, Packed, TILE_BYTES, TILE_SLOTS, TURN_BARRIERS, WARPS},
    moe::Launch,
    ring::{Ring, ring_bytes},
    wgmma::{PingPong, Tiles, give_registers, moe_sm90::abi::Instance, take_registers},
};

/// An instance as a type.
pub(crate) trait Built {
    const INSTANCE: Instance;
}

/// Makes the entries of a list of instances, with a separate type per instance.
macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            struct This;
            impl Built for This {
                const INSTANCE: Instance = INSTANCE;
            }
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
            unsafe { Moe::<This, IS_BF16, { INSTANCE.shape().parts() }>::run(launch) }
        }
    )*};
}
pub(crate) use entries;

/// Kernel of an instance, with bf16 or f16 tokens and `P` parts of a stage per thread.
pub(crate) struct Moe<I, const BF16: bool, const P: usize> {
    launch: Launch,
    shared: SharedAddress,
    instance: PhantomData<I>,
}

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    const INSTANCE: Instance = I::INSTANCE;
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The first warpgroup loads: its first warp weights, its next warps tokens. The other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARPS: u32 = Self::INSTANCE.token_warps();
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: stages, buffers, starts of tokens, tiles, barriers. These are offsets from its start, and within a
    // stage from the start of the stage.
    const BUFFERS: u32 = Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    const SOURCES: u32 = Self::BUFFERS + Self::INSTANCE.buffers * Self::INSTANCE.shape().buffer_bytes();
    const TILES: u32 = Self::SOURCES + Self::INSTANCE.source_bytes();
    const STAGE_BARRIERS: u32 = Self::TILES + TILE_SLOTS * TILE_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TILE_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const TURN_BARRIERS: u32 = Self::TILE_BARRIERS + ring_bytes(TILE_SLOTS);
    const END: u32 = Self::TURN_BARRIERS + TURN_BARRIERS * MBARRIER_BYTES;
    const PING_PONG: bool = Self::INSTANCE.shape().ping_pong();
    const fn panel(panel: u32) -> u32 {
        panel * Self::INSTANCE.panel_bytes()
    }

    /// Stages of weights. A stage is full after the loading warp and its copies have arrived, and empty after every
    /// warp that multiplies has arrived.
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of tokens. A buffer is full after the loading warp and its copies have arrived, or after the copies of
    /// every gathering thread have arrived. It is empty after every warp that multiplies has arrived.
    fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
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
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        shared + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// Address of the current buffer of tokens.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        shared + Self::BUFFERS + buffers.index() * Self::INSTANCE.shape().buffer_bytes()
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    pub(crate) unsafe fn run(launch: Launch)
    where
        Packed<BF16>: Decode,
    {
        const { Self::CHECK };
        let this = Self { launch, shared: dynamic_shared_address(), instance: PhantomData };
        // SAFETY: the barriers have their own places in shared memory, and are initialized before any thread passes
        // `sync_threads`. Every thread of the CTA takes part in the CTA's collective operations, and every thread of a
        // warpgroup in the warpgroup's. Each role belongs to one warp or one warpgroup.
        unsafe {
            if thread::thread_idx_x() == 0 {
                this.stages().init(1, Self::CONSUMER_WARPS);
                let copying = if Self::INSTANCE.sorted { 1 } else { Self::TOKEN_WARPS * WARP_SIZE };
                this.buffers().init(copying, Self::CONSUMER_WARPS);
                this.tiles().init(Self::TOKEN_WARPS + Self::CONSUMER_WARPS);
                if Self::PING_PONG {
                    PingPong::init(this.turn_barriers());
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The value is the same in all lanes; the shuffle shows this to the compiler.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if warp < WARPS {
                if Self::INSTANCE.shares_registers() {
                    give_registers(Self::INSTANCE.shape());
                }
                if warp == Self::WEIGHT_WARP {
                    this.load_weights();
                } else if !Self::INSTANCE.sorted {
                    this.gather_tokens(warp - 1);
                } else if warp == Self::TOKEN_WARPS {
                    this.load_tokens();
                }
            } else {
                if Self::INSTANCE.shares_registers() {
                    take_registers(Self::INSTANCE.shape());
                }
                this.multiply(warp / WARPS - 1);
            }
        }
    }
}
