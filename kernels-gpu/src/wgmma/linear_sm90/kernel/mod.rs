//! Kernel of a linear layer on Hopper.
//!
//! A CTA computes every n-th tile of C. Its first warp loads weights, one bulk copy per panel. Its second warp loads
//! tokens by tensor copies, in the layout in which `wgmma` reads B. Two warpgroups take turns: one decodes weights in
//! registers while the other one multiplies ([`decoding`](crate::decoding)). For few tiles, some warpgroups decode to
//! shared memory and another one multiplies ([`decoded`]). If K has two parts, two CTAs of a cluster then sum one part
//! each, and with more tiles a CTA sums one part after the other ([`parts`]).
//!
//! ```text
//! weights ─ a warp ──────▶ stages ──┐
//! tokens ── a warp ──────▶ buffers ─┴─ warpgroups ─▶ C
//! ```

mod decoded;
mod multiply;
mod parts;
mod tiles;
mod tokens;
mod weights;

use cuda_std::{
    fence::fence_mbarrier_init,
    kernel,
    mbarrier::{MBARRIER_BYTES, Mbarrier},
    shared::{SharedAddress, dynamic_shared_address},
    tensor_map_of_parameter, thread,
    tma::{TensorMapAddress, prefetch_tensormap},
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

use crate::{
    decoding::{TURN_BARRIERS, WARPS},
    linear::{
        Launch,
        decode::{Decode, Packed},
    },
    ring::{Ring, ring_bytes},
    units::OperandType,
    wgmma::{
        PingPong, give_registers,
        linear_sm90::abi::{INSTANCES, Index, Instance, instances},
        take_registers,
    },
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1,
            cluster = INSTANCES[Index::$entry as usize].cluster() / 2 * 2
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
            unsafe {
                let token_map = tensor_map_of_parameter!($entry);
                Linear::<{ Index::$entry as usize }, IS_BF16, { INSTANCE.shape().parts() }>::run::<{ INSTANCE.shape().rounds() }>(launch, token_map);
            }
        }
    )*};
}
instances!(entries);

/// Kernel of the instance `INSTANCES[INDEX]`, with bf16 or f16 tokens and `P` parts of a stage per thread.
struct Linear<const INDEX: usize, const BF16: bool, const P: usize> {
    launch: Launch,
    token_map: TensorMapAddress,
    shared: SharedAddress,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The first warpgroup loads: one warp weights, another warp tokens. The other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Offsets from the start of shared memory. Buffers come first, because the pattern of the swizzle begins at
    // multiples of 1024.
    const DECODED: u32 = Self::INSTANCE.buffers * Self::INSTANCE.shape().buffer_bytes();
    const STAGES: u32 = Self::DECODED + Self::INSTANCE.decoded_bytes();
    const STAGE_BARRIERS: u32 = Self::STAGES + Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TURN_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const INBOX: u32 = Self::TURN_BARRIERS + TURN_BARRIERS * MBARRIER_BYTES;
    const END: u32 = Self::INBOX + Self::INSTANCE.inbox_bytes();

    /// Stages of weights. A stage is full after the loading warp and its copies have arrived, and empty after every
    /// warp that multiplies has arrived.
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of tokens, full and empty like stages. Each one has a buffer of decoded weights if other warpgroups
    /// decode; it is then full only after the warps of the decoding warpgroup have arrived as well.
    fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// Barriers of turns.
    fn turn_barriers(&self) -> Mbarrier {
        Mbarrier::at(self.shared + Self::TURN_BARRIERS)
    }

    /// Address of the current stage.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        shared + Self::STAGES + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// Address of the current buffer of tokens.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        shared + buffers.index() * Self::INSTANCE.shape().buffer_bytes()
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    unsafe fn run<const ROUNDS: usize>(launch: Launch, token_map: TensorMapAddress)
    where
        Packed<BF16>: Decode,
    {
        const { Self::CHECK };
        let this = Self { launch, token_map, shared: dynamic_shared_address() };
        // SAFETY: the barriers have their own places in shared memory, and are initialized before any thread passes
        // `sync_threads`. Every thread of the CTA takes part in the CTA's collective operations, and every thread of a
        // warpgroup in the warpgroup's. Each role belongs to one warp or one warpgroup.
        unsafe {
            if thread::thread_idx_x() == 0 {
                prefetch_tensormap(token_map);
                this.stages().init(1, Self::CONSUMER_WARPS);
                let decoders = if Self::INSTANCE.decoders > 0 { WARPS } else { 0 };
                this.buffers().init(1 + decoders, Self::CONSUMER_WARPS);
                if Self::INSTANCE.shape().ping_pong() {
                    PingPong::init(this.turn_barriers());
                }
                if Self::CLUSTER > 1 {
                    this.inbox().init();
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            if Self::CLUSTER > 1 {
                this.inbox().open();
            }
            // The value is the same in all lanes; the shuffle shows this to the compiler.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            if Self::INSTANCE.decoders > 0 {
                match warp / WARPS {
                    0 if warp == Self::WEIGHT_WARP => this.load_weights(),
                    0 if warp == Self::TOKEN_WARP => this.load_tokens(),
                    0 => {}
                    1 => this.multiply_decoded(),
                    warpgroup => this.decode(warpgroup - 2),
                }
            } else if warp < WARPS {
                give_registers(Self::INSTANCE.shape());
                if warp == Self::WEIGHT_WARP {
                    this.load_weights();
                } else if warp == Self::TOKEN_WARP {
                    this.load_tokens();
                }
            } else {
                take_registers(Self::INSTANCE.shape());
                this.multiply::<ROUNDS>(warp / WARPS - 1);
            }
        }
    }
}
