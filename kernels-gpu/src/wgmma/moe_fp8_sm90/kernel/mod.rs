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
mod product;
mod table;
mod tokens;
mod weights;
mod write;

use cuda_std::{
    fence::fence_mbarrier_init,
    kernel,
    setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc},
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

use self::product::Product;
use crate::{
    decoding::{Registers, WARPS},
    wgmma::{
        PingPong,
        moe_fp8_sm90::abi::{INSTANCES, Index, Instance, Launch, instances},
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

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
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
