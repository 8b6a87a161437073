//! A linear layer on GeForce RTX 50, RTX PRO and DGX Spark: `linear_sm90`'s source with other instances.
//!
//! Each warp multiplies by itself (`mma.sync`) for every M, because sm_120 and sm_121 have no `wgmma`, and a CTA has 99
//! KB of shared memory.
//!
//! # Contract
//!
//! The contract of [`linear_sm90`](crate::wgmma::linear_sm90), with the threads and the shared memory of these
//! instances, and one CTA per tile. A row has the same bits as on Hopper if the tensor core adds like Hopper's, which
//! no GPU has shown yet.

use crate::{
    instances::table,
    mma_sync::{
        SHARED_BYTES,
        linear::{Instance, tokens},
    },
    units::OperandType,
};

/// Passes the list of instances to `$each!`. Per token type, instances with fewer tokens per tile come first.
///
/// Up to 16 tokens, tiles have few columns, so that even a small N gives many CTAs. Two CTAs share an SM, and together
/// have 45 KB of weights in flight at one token. From 32 tokens on, the tokens of a stage have more bytes than its
/// weights, so a tile has more columns, which share the tokens.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_sm120_f16_t8 = tokens(OperandType::F16, 8).strips(2).stages(11);
            linear_sm120_f16_t16 = tokens(OperandType::F16, 16).strips(2).stages(7);
            linear_sm120_f16_t32 = tokens(OperandType::F16, 32).shared_by(2).strips(4).stages(7);
            linear_sm120_f16_t64 = tokens(OperandType::F16, 64).strips(8).stages(3);
            linear_sm120_bf16_t8 = tokens(OperandType::Bf16, 8).strips(2).stages(11);
            linear_sm120_bf16_t16 = tokens(OperandType::Bf16, 16).strips(2).stages(7);
            linear_sm120_bf16_t32 = tokens(OperandType::Bf16, 32).shared_by(2).strips(4).stages(7);
            linear_sm120_bf16_t64 = tokens(OperandType::Bf16, 64).strips(8).stages(3);
        }
    };
}
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        assert!(INSTANCES[index].shared_bytes() <= SHARED_BYTES, "the stages do not fit in shared memory");
        index += 1;
    }
};

#[cfg(feature = "linear_sm120")]
mod entries {
    use cuda_std::{kernel, tensor_map_of_parameter};

    use super::{INSTANCES, Index};
    use crate::{
        linear::Launch,
        mma_sync::linear::{
            Instance,
            kernel::{Built, ByWarp, entries},
        },
        units::OperandType,
    };

    instances!(entries);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_names_state_type_and_tile_size() {
        for instance in INSTANCES {
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            assert_eq!(instance.entry, std::format!("linear_sm120_{operand_type}_t{}", instance.tile_tokens));
        }
    }

    extern crate std;
}
