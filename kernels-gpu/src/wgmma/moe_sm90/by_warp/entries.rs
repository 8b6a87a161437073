//! Entries of the instances.

use cuda_std::kernel;

use super::{
    abi::{INSTANCES, Index, Instance, instances},
    kernel::{Built, Strips},
};
use crate::{moe::Launch, units::OperandType};

/// Makes the entries of a list of instances, with a separate type per instance.
macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in `moe_sm90/mod.rs` holds.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(),
            min_blocks = INSTANCES[Index::$entry as usize].resident_blocks
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            struct This;
            impl Built for This {
                const INSTANCE: Instance = INSTANCE;
            }
            // SAFETY: the caller guarantees the contract in `moe_sm90/mod.rs`.
            unsafe { Strips::<This, IS_BF16>::run(launch) }
        }
    )*};
}
instances!(entries);
