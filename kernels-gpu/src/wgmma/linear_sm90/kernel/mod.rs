//! How a linear layer works on Hopper.
//!
//! A block computes every n-th tile of C. Its first warp loads weights, a bulk copy a panel, and another warp loads tokens, by tensor
//! copies that leave them as `wgmma` reads its B. Two warpgroups take turns to decode weights in registers and to multiply
//! ([`sm90`](crate::decoding)); for few tiles, some decode to shared memory and another one multiplies ([`decoded`]).
//!
//! ```text
//! weights ─ a warp ──────▶ stages ──┐
//! tokens ── a warp ──────▶ buffers ─┴─ warpgroups ─▶ C
//! ```

mod decoded;
mod multiply;
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
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            // SAFETY: the contract is this function's too.
            unsafe {
                let token_map = tensor_map_of_parameter!($entry);
                Linear::<{ Index::$entry as usize }, IS_BF16, { INSTANCE.shape().parts() }>::run::<{ INSTANCE.shape().rounds() }>(launch, token_map);
            }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`], whose tokens are bf16 or f16, and whose threads have `P` parts of a stage.
struct Linear<const INDEX: usize, const BF16: bool, const P: usize> {
    launch: Launch,
    token_map: TensorMapAddress,
    shared: SharedAddress,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // The first warpgroup loads: a warp weights, another tokens. The other warpgroups multiply.
    const WEIGHT_WARP: u32 = 0;
    const TOKEN_WARP: u32 = 1;
    const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Offsets from the start of shared memory. Buffers come first: the swizzle's pattern begins at multiples of 1024.
    const DECODED: u32 = Self::INSTANCE.buffers * Self::INSTANCE.shape().buffer_bytes();
    const STAGES: u32 = Self::DECODED + Self::INSTANCE.decoded_bytes();
    const STAGE_BARRIERS: u32 = Self::STAGES + Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TURN_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const END: u32 = Self::TURN_BARRIERS + TURN_BARRIERS * MBARRIER_BYTES;

    /// The stages of weights. One is full when the warp that loads and its copies have arrived, and empty when every warp that
    /// multiplies has.
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// The buffers of tokens, which are full and empty as stages are. With one goes a buffer of decoded weights, if there are any: then
    /// it is full when the warps of the warpgroup that decodes have arrived too.
    fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// The barriers of turns.
    fn turn_barriers(&self) -> Mbarrier {
        Mbarrier::at(self.shared + Self::TURN_BARRIERS)
    }

    /// The address of the stage that a ring stands at.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        shared + Self::STAGES + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// The address of the buffer that a ring stands at.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        shared + buffers.index() * Self::INSTANCE.shape().buffer_bytes()
    }

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run<const ROUNDS: usize>(launch: Launch, token_map: TensorMapAddress)
    where
        Packed<BF16>: Decode,
    {
        const { Self::CHECK };
        let this = Self { launch, token_map, shared: dynamic_shared_address() };
        // SAFETY: barriers have places of their own in shared memory, and are initialized before any thread passes
        // `sync_threads`. Every thread of the block takes part in what the block does together, and every thread of a
        // warpgroup in what the warpgroup does together; each role is one warp's or one warpgroup's.
        unsafe {
            if thread::thread_idx_x() == 0 {
                prefetch_tensormap(token_map);
                this.stages().init(1, Self::CONSUMER_WARPS);
                let decoders = if Self::INSTANCE.decoders > 0 { WARPS } else { 0 };
                this.buffers().init(1 + decoders, Self::CONSUMER_WARPS);
                if Self::INSTANCE.shape().ping_pong() {
                    PingPong::init(this.turn_barriers());
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            // The same value in all lanes; through the shuffle the compiler knows that it is.
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
