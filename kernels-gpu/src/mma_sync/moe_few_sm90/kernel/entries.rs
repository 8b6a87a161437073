//! The entries.

use cuda_std::kernel;

use super::{down, gate_up};
use crate::mma_sync::moe_few_sm90::abi::{Down, GateUp, MAX_THREADS};

/// Both entries for a token type, and for a single token or several.
macro_rules! entries {
    ($($gate_up:ident $down:ident: $is_bf16:literal $is_one:literal;)*) => {$(
        /// Gate, up and the activation.
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = MAX_THREADS, min_blocks = 1)]
        pub unsafe fn $gate_up(launch: GateUp) {
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { gate_up::run::<$is_bf16, $is_one>(&launch) }
        }

        /// Down, and the weighted sum of each token's rows.
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = MAX_THREADS, min_blocks = 1)]
        pub unsafe fn $down(launch: Down) {
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { down::run::<$is_bf16, $is_one>(&launch) }
        }
    )*};
}
entries! {
    moe_few_gate_up_f16 moe_few_down_f16: false false;
    moe_few_gate_up_bf16 moe_few_down_bf16: true false;
    moe_one_gate_up_f16 moe_one_down_f16: false true;
    moe_one_gate_up_bf16 moe_one_down_bf16: true true;
}
